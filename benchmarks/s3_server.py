"""What the benchmarks do with the S3 server of this machine: fill it, and put a latency before it."""

import contextlib
import itertools
import multiprocessing
import pathlib
import sys
from collections.abc import Callable, Iterator

import s3fs

from ibm_nodes.s3 import client_options

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"
UPLOADS = 8


def _serve(server: str, pipe: object) -> None:
    sys.path.insert(0, str(TESTS))
    import fault_proxy

    seconds = 0.0
    with fault_proxy.FaultProxy(server) as proxy:
        proxy.spoil((fault_proxy.Fault(delay=seconds) for _ in itertools.count()), lambda request: True)
        pipe.send(proxy.endpoint)
        while (seconds := pipe.recv()) is not None:
            proxy.requests.clear()
            pipe.send(None)


@contextlib.contextmanager
def proxy(server: str) -> Iterator[tuple[str, Callable[[float], None]]]:
    """Serves a proxy in a process of its own; gives its address, and what sets the latency in seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(server, theirs))
    process.start()

    def set_latency(seconds: float) -> None:
        ours.send(seconds)
        ours.recv()

    try:
        yield ours.recv(), set_latency
    finally:
        ours.send(None)
        process.join()


def upload(urls: dict[str, str], bucket: str, storage_options: dict[str, object]) -> dict[str, str]:
    """Copies datasets into a bucket, some files at a time; gives their prefixes there."""
    filesystem = s3fs.S3FileSystem(**client_options(storage_options))
    prefixes = {}
    for name, url in urls.items():
        folder = pathlib.Path(url.removeprefix("file://"))
        prefixes[name] = f"{bucket}{folder.parent.name}/{name}/"
        paths = sorted(folder.iterdir())
        filesystem.put(
            [str(path) for path in paths], [prefixes[name] + path.name for path in paths], batch_size=UPLOADS
        )
    return prefixes
