"""A healthy run says nothing, and importing and using the package leaves the process's settings alone."""

import json
import logging
import time

import children
import corpora
import pytest
import torch

from ibm_nodes.recipes import object_store


def write(url, num_files, storage_options=None):
    files = [[part] for part in corpora.every(corpora.documents([15] * (4 * num_files)), 4)]
    corpora.write(f"{url}d/", files, "parquet", storage_options)
    return {"datasets": {"d": f"{url}d/"}, "weights": {"d": 1}, "storage_options": storage_options}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return write(f"file://{tmp_path_factory.mktemp('data')}/", 200)


@pytest.fixture(scope="module")
def remote(s3):
    return write(object_store.make_bucket(s3.storage_options, "logging"), 20, s3.storage_options)


def use(config, url):
    """A run with everything in it: batches, a save, a load, more batches, the end."""
    with children.build(config) as loader:
        for _ in range(25):
            next(iter(loader))
        children.checkpoint.save(loader, url, step=1).result()
        children.checkpoint.load(loader, url)
        for _ in range(25):
            next(iter(loader))
        repr(loader), str(loader.state_dict())


class TestAHealthyRun:
    def test_two_ranks_over_two_hundred_files_write_nothing_to_either_stream(self, local):
        ranks = [{**local, "rank": rank, "world_size": 2, "prefetch_factor": 8} for rank in range(2)]
        assert children.finish(children.start("long_run", ranks, 250)) == (0, "", "")

    def test_a_run_over_a_store_writes_nothing_to_either_stream(self, remote):
        assert children.finish(children.start("long_run", [remote], 50)) == (0, "", "")

    def test_it_logs_nothing_at_warning_and_a_few_lines_at_info(self, remote, tmp_path, caplog):
        with caplog.at_level(logging.DEBUG, "ibm_nodes"):
            use(remote, f"file://{tmp_path}/saved")
        ours = [record for record in caplog.records if record.name.split(".")[0] == "ibm_nodes"]
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        assert sum(record.levelno >= logging.INFO for record in ours) <= 5
        assert all(not record.name.startswith("root") for record in ours)

    def test_warnings_are_for_what_the_user_can_change_and_come_once(self, local, caplog, monkeypatch):
        monkeypatch.setattr("os.sysconf", lambda name: 1024)  # a machine with a MiB of memory
        children.build(local).close()
        (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert record.name == "ibm_nodes.recipes.assemble"
        assert "num_shards" in record.getMessage()


class SlowHandler(logging.Handler):
    """Keeps what it is told, and takes its time with the lock held."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.texts = []
        self.setFormatter(logging.Formatter("%(name)s %(threadName)s %(message)s"))

    def emit(self, record):
        time.sleep(0.0005)
        self.texts.append(self.format(record))


@pytest.fixture
def everything():
    """All that any logger says at DEBUG."""
    handler, root = SlowHandler(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler.texts
    root.setLevel(level)
    root.removeHandler(handler)


class TestDebugging:
    @pytest.mark.parametrize("wrong", [False, True])
    def test_all_loggers_at_debug_to_a_slow_handler_stop_nothing_and_tell_no_secret(
        self, remote, tmp_path, everything, wrong
    ):
        options = dict(remote["storage_options"])
        if wrong:
            options["secret"] = "w" * 40
        began = time.monotonic()
        if wrong:
            with pytest.raises(PermissionError) as caught:
                use({**remote, "storage_options": options}, f"file://{tmp_path}/saved")
            everything.append(
                "".join(map(str, [caught.value, caught.value.__cause__, caught.getrepr(showlocals=False)]))
            )
        else:
            use({**remote, "storage_options": options}, f"file://{tmp_path}/saved")
        assert time.monotonic() - began < 60
        assert len(everything) > 10
        assert not [text for text in everything if options["secret"] in text]

    def test_no_secret_gets_into_a_state_or_into_a_text_of_a_loader(self, remote, tmp_path):
        with children.build(remote) as loader:
            next(iter(loader))
            state = loader.state_dict()
            children.checkpoint.save(loader, f"file://{tmp_path}/saved", step=1).result()
            listing = loader.root.source.source.graph.keywords["listings"]["d"]
            texts = [repr(state), repr(loader), repr(loader.root), repr(listing), str(listing)]
        (file,) = (tmp_path / "saved").rglob("*.pt")
        torch.save(state, tmp_path / "state.pt")
        contents = [path.read_bytes() for path in (file, tmp_path / "state.pt")]
        for value in (remote["storage_options"]["secret"], remote["storage_options"]["key"]):
            assert not [text for text in texts if value in text]
            assert not [content for content in contents if value.encode() in content]


class TestTheProcess:
    @pytest.mark.parametrize("where", ["local", "remote"])
    def test_importing_and_using_change_no_setting_of_the_process(self, request, tmp_path, where):
        config = request.getfixturevalue(where)
        # The client for S3 is imported when it is first needed, and its own parts add filters of warnings.
        code = SNAPSHOTS.format(more="s3fs" if where == "remote" else "numpy")
        code, output, errors = children.finish(children.start_code(code, config, f"file://{tmp_path}/saved"))
        assert (code, errors) == (0, "")
        before, imported, built, used, closed = (json.loads(line) for line in output.splitlines())
        assert before["start method"] is None
        for when, after in (("imported", imported), ("built", built), ("used", used), ("closed", closed)):
            assert after == before, f"{when}: {[key for key in before if after[key] != before[key]]}"


SNAPSHOTS = """
import asyncio, faulthandler, gc, itertools, json, locale, logging, multiprocessing, os, resource, signal, socket
import sys, threading, urllib.request, warnings
import numpy, pyarrow, torch, torchdata.nodes, {more}

def snapshot():
    root = logging.getLogger()
    print(json.dumps({{
        "handlers": list(map(repr, root.handlers)),
        "filters": list(map(repr, root.filters)),
        "level": [root.level, logging.root.manager.disable, logging.raiseExceptions, repr(logging.lastResort)],
        "logger class": repr(logging.getLoggerClass()),
        "record factory": repr(logging.getLogRecordFactory()),
        "our handlers": list(map(repr, logging.getLogger("ibm_nodes").handlers)),
        "our level": logging.getLogger("ibm_nodes").level,
        "captured warnings": repr(warnings.showwarning),
        "warning filters": list(map(repr, warnings.filters)),
        "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "wake-up": signal.set_wakeup_fd(-1),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch": [repr(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_deterministic_debug_mode()],
        "torch sharing": torch.multiprocessing.get_sharing_strategy(),
        "arrow threads": [pyarrow.cpu_count(), pyarrow.io_thread_count()],
        "arrow memory": pyarrow.default_memory_pool().backend_name,
        "numpy": [repr(numpy.geterr()), repr(numpy.get_printoptions())],
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.unraisablehook), repr(sys.displayhook)],
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "path": sys.path,
        "locale": locale.setlocale(locale.LC_ALL),
        "time-out": socket.getdefaulttimeout(),
        "opener": repr(urllib.request._opener),
        "loop policy": repr(type(asyncio.get_event_loop_policy())),
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "switching": [sys.getswitchinterval(), sys.getrecursionlimit()],
        "tracing": [sys.gettrace() is None, threading.gettrace() is None],
        "faults": faulthandler.is_enabled(),
        "limits": [resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "umask": [os.umask(0o22), os.umask(0o22)][1],
        "streams": [repr(sys.stdout), repr(sys.stderr), sys.stdout is sys.__stdout__],
    }}))

config, url = json.loads(sys.argv[1])
snapshot()
import ibm_nodes, ibm_nodes.testing, ibm_nodes.checkpoint, ibm_nodes.recipes.pretrain
snapshot()
import children
loader = children.build(config)
snapshot()
for _ in range(20):
    next(iter(loader))
ibm_nodes.checkpoint.save(loader, url, step=1).result()
ibm_nodes.checkpoint.load(loader, url)
next(iter(loader))
snapshot()
loader.close()
snapshot()
"""
