"""A run ends when it is told to, in whatever way, and one that was killed goes on from what it had saved."""

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import children
import corpora
import pytest
from fault_proxy import Fault, FaultProxy

from ibm_nodes import Mixer, Packer, Prefetcher, Reader, Sharder, checkpoint
from ibm_nodes.recipes import object_store

STEPS = 60


def write(url, storage_options=None):
    """Two datasets; gives what the recipe needs to mix them."""
    for number, (name, form) in enumerate((("web", "arrow"), ("code", "parquet"))):
        rows = corpora.documents([3, 40, 7, 21] * 60, first=1000 * number)
        files = [corpora.every(part, 10) for part in corpora.every(rows, 60)]
        corpora.write(f"{url}{name}/", files, form, storage_options)
    datasets = {name: f"{url}{name}/" for name in ("web", "code")}
    return {"datasets": datasets, "weights": {"web": 2, "code": 1}, "storage_options": storage_options}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return write(f"file://{tmp_path_factory.mktemp('data')}/")


@pytest.fixture(scope="module")
def remote(s3):
    return write(object_store.make_bucket(s3.storage_options, "shutdown"), s3.storage_options)


def through(proxy, config):
    return {**config, "storage_options": {**config["storage_options"], "endpoint_url": proxy.endpoint}}


def digests(config, count):
    with children.build(config) as loader:
        return [children.digest(batch) for batch in itertools.islice(loader, count)]


class TestTheEndOfAScript:
    """It ends soon, with the code that it should have, and says nothing that is not its own."""

    WAYS = {
        "by falling off its end": 0,
        "with its iterator in a global": 0,
        "with an iterator in a loop that refers to itself": 0,
        "by an exception": 1,
        "by sys.exit(3)": 3,
        "in the midst of a save": 0,
        "by Ctrl-C": -signal.SIGINT,
    }

    def run(self, config, tmp_path, ways, pause=0.0):
        cases = []
        for number, how in enumerate(ways):
            directory = tmp_path / str(number)
            directory.mkdir()
            case = {"config": config, "how": how, "directory": str(directory), "limit": 15}
            cases.append({**case, "url": f"file://{directory}/saved", "pause": pause})
        code, output, errors = children.finish(children.start("endings", cases), timeout=120)
        assert (code, errors) == (0, "")
        results = dict(zip(ways, json.loads(output), strict=True))
        for how, case in zip(ways, cases, strict=True):
            status, seconds = results[how]
            assert status == self.WAYS[how], f"{how}: {status} after {seconds:.1f} s"
            assert Path(case["directory"], "stdout").read_text() == "", how
            self.check_errors(how, Path(case["directory"], "stderr").read_text())
        return cases

    def check_errors(self, how, text):
        last = {"by an exception": "ValueError: the loss is not a number", "by Ctrl-C": "KeyboardInterrupt"}.get(how)
        if last is None:
            assert text == "", how
        else:
            assert text.count("Traceback (most recent call last)") == 1, text
            assert text.splitlines()[-1] == last, text

    def test_it_ends_when_it_reads_from_the_disk(self, local, tmp_path):
        cases = self.run(local, tmp_path, ["by sys.exit(3)", "with its iterator in a global", "in the midst of a save"])
        case = cases[-1]
        with children.build(local) as loader:
            assert checkpoint.load(loader, case["url"])[:2] == (3, 12)
            rest = [children.digest(batch) for batch in itertools.islice(loader, 3)]
        assert rest == digests(local, 6)[3:]

    def test_it_ends_when_it_reads_from_a_store(self, remote, tmp_path):
        self.run(remote, tmp_path, ["by falling off its end", "by an exception", "by Ctrl-C"])

    def test_it_ends_while_the_store_does_not_answer(self, remote, tmp_path):
        with FaultProxy(remote["storage_options"]["endpoint_url"]) as proxy:
            for number, how in enumerate(["with an iterator in a loop that refers to itself", "by Ctrl-C"]):
                ready = tmp_path / str(number) / "0" / "ready"
                ready.parent.parent.mkdir()
                over = threading.Event()
                hang = Fault(before=lambda file=ready, over=over: file.exists() and over.wait(30))
                proxy.spoil(itertools.repeat(hang))
                config = {**through(proxy, remote), "seq_len": 64, "prefetch_factor": 500}
                try:
                    self.run(config, ready.parent.parent, [how], pause=0.5)
                finally:
                    over.set()

    def test_a_process_that_was_not_forked_ends_too(self, remote, tmp_path):
        how = "by an exception"
        process = children.start("end", {"config": remote, "how": how, "directory": str(tmp_path), "pause": 0})
        code, output, errors = children.finish(process, timeout=20)
        assert (code, output) == (self.WAYS[how], "")
        self.check_errors(how, errors)


class TestKilled:
    def test_a_run_that_is_killed_again_and_again_gives_the_batches_of_one_that_is_not(self, local, tmp_path):
        rng = random.Random(os.urandom(8).hex())
        golden = digests(local, STEPS)
        log, url = tmp_path / "log", f"file://{tmp_path}/saved"
        arguments = (local, url, str(log), STEPS, 0.01)
        known = 0
        for _ in range(3):
            before = len(lines(log))
            process = children.start("train", *arguments)
            wanted = before + 10 + rng.randrange(7)
            deadline = time.monotonic() + 40
            while len(lines(log)) < wanted and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(rng.random() * 0.02)
            process.kill()
            code, output, errors = children.finish(process)
            assert (code, output, errors) == (-signal.SIGKILL, "", "")
            start, *steps = lines(log)[before:]
            assert start == f"start {known}"
            self.check(steps, known, golden)
            saved = checkpoint.latest(url) or 0
            assert saved >= known + len(steps) - 6  # four saves may be under way, and a step not saved yet
            known = saved
        assert known > 5
        self.check_two_ranks(local, url, known)
        before = len(lines(log))
        assert children.finish(children.start("train", *arguments)) == (0, "", "")
        start, *steps = lines(log)[before:]
        assert start == f"start {known}"
        self.check(steps, known, golden)
        assert known + len(steps) == STEPS

    def check(self, steps, first, golden):
        for number, step in enumerate(steps, start=first):
            assert step == f"{number} {golden[number]}"

    def check_two_ranks(self, config, url, step):
        """They go on from the same files with the batch that is due, divided between them."""
        with ExitStack() as stack:
            ranks = [
                stack.enter_context(children.build({**config, "rank": rank, "world_size": 2})) for rank in range(2)
            ]
            assert {checkpoint.load(loader, url).step for loader in ranks} == {step}
            parts = [next(iter(loader)) for loader in ranks]
        for key, whole in next_batch(config, step).items():
            assert [row for pair in zip(*(part[key].tolist() for part in parts), strict=True) for row in pair] == whole


def lines(log):
    """The whole lines of a file that is being written."""
    return log.read_text().split("\n")[:-1] if log.exists() else []


def next_batch(config, step):
    with children.build(config) as loader:
        batch = next(itertools.islice(loader, step, None))
    return {key: value.tolist() for key, value in batch.items()}


class TestWhatIsNotUsed:
    def test_building_five_pipelines_and_using_one_reads_only_what_that_one_needs(self, s3, bucket):
        urls = []
        for number in range(5):
            rows = corpora.documents([5] * 20)
            files = [[part] for part in corpora.every(rows, 10)]
            urls.append(corpora.write(f"{bucket.url}d{number}/", files, "arrow", bucket.storage_options))
        with FaultProxy(s3.endpoint) as proxy:
            options = {**bucket.storage_options, "endpoint_url": proxy.endpoint}
            threads = set(threading.enumerate())
            built = []
            for url in urls:

                def graph(shard, num_shards, url=url):
                    node = Reader(url, name="d", shard=shard, num_shards=num_shards, storage_options=options)
                    return Packer(Mixer({"d": node}, weights={"d": 1}), seq_len=8, eos_id=2)

                built.append(Prefetcher(Sharder(graph, num_shards=4, rank=0, world_size=1), prefetch_factor=2))
            assert proxy.requests == []
            assert set(threading.enumerate()) == threads
            for _ in range(10):
                next(built[-1])
            time.sleep(0.3)
            paths = Counter(request.path.partition("?")[0].partition("/d")[2][:1] for request in proxy.reads)
            assert set(paths) == {"4"}
            listed = [request.path for request in proxy.requests if request.is_listing()]
            assert len(listed) == 1
            assert "d4" in listed[0]
            built[-1].close()

    def test_listing_is_all_that_the_recipe_does_before_the_first_batch(self, remote):
        with FaultProxy(remote["storage_options"]["endpoint_url"]) as proxy:
            loaders = [children.build(through(proxy, remote)) for _ in range(5)]
            time.sleep(0.2)
            assert proxy.reads == []
            assert sum(request.is_listing() for request in proxy.requests) == len(proxy.requests) == 10
            for loader in loaders:
                loader.state_dict()
                iter(loader)
            assert proxy.reads == []

    def test_a_loader_that_is_dropped_in_the_midst_of_reading_stops_reading(self, remote):
        with FaultProxy(remote["storage_options"]["endpoint_url"]) as proxy:
            loader = children.build({**through(proxy, remote), "prefetch_factor": 10_000})
            next(iter(loader))
            began = time.monotonic()
            del loader
            assert time.monotonic() - began < 1.5
            time.sleep(0.3)
            count = len(proxy.requests)
            time.sleep(0.3)
            assert len(proxy.requests) == count
            assert not any(thread.name == "ibm_nodes-prefetch" for thread in threading.enumerate())

    @pytest.mark.parametrize("others", [False, True])
    def test_endless_data_without_a_token_is_an_error_that_names_the_dataset(self, local, tmp_path, others):
        empty = corpora.write(f"file://{tmp_path}/empty/", [[[[]] * 5] * 2] * 3, "arrow")
        config = {**local, "datasets": {"empty": empty}, "weights": {"empty": 1}}
        if others:
            config = {**local, "datasets": {**local["datasets"], "empty": empty}}
            config["weights"] = {**local["weights"], "empty": 1}
        with children.build(config) as loader, pytest.raises(ValueError, match="'empty'.* has no token"):
            next(iter(loader))


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has threads")
class TestOtherProcesses:
    """A loader that was not started works in a child process, whatever its parent has read before."""

    def check(self, process, golden):
        code, output, errors = children.finish(process, timeout=100)
        assert (code, errors) == (0, "")
        for method, found, seconds, exit_code in json.loads(output):
            assert found == golden, f"{method}, after {seconds:.1f} s"
            assert exit_code == 0, method

    def test_with_every_way_to_start_a_process(self, remote):
        self.check(children.start("hand_over", remote, ["fork", "forkserver", "spawn"]), digests(remote, 5))

    @pytest.mark.slow
    def test_forked_again_and_again_while_the_parent_waits_for_the_store(self, remote):
        golden = digests(remote, 5)
        with FaultProxy(remote["storage_options"]["endpoint_url"]) as proxy:
            proxy.spoil(itertools.repeat(Fault(before=lambda: time.sleep(0.05))))
            self.check(children.start("hand_over", through(proxy, remote), ["fork"] * 3), golden)

    def test_forked_while_the_parent_reads_what_the_child_wants_to_read_by_the_same_listing(self, remote):
        golden = digests(remote, 5)
        with FaultProxy(remote["storage_options"]["endpoint_url"]) as proxy:
            proxy.spoil(itertools.repeat(Fault(before=lambda: time.sleep(0.2))))
            self.check(children.start("hand_over_at_once", through(proxy, remote)), golden)
