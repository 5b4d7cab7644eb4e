"""A throw-away S3 server on this machine: SeaweedFS, for the quick start and the tests.

Run as a program, this file is the guard of one server: it ends the server when the process that asked for it ends, in
whatever way. So only the standard library may be imported at its top.
"""

import contextlib
import ctypes
import glob
import http.client
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_REGION = "us-east-1"
_S3_PORT = "s3.port"
_PORT_NAMES = tuple(
    f"{server}.port{kind}" for server in ("master", "volume", "filer", "s3", "admin") for kind in ("", ".grpc")
)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ObjectStore:
    """A running S3 server.

    Attributes:
        endpoint: Its address, such as ``http://127.0.0.1:8333``.
        storage_options: What s3fs needs to use it: address, region, and credentials made for this server alone.
    """

    endpoint: str
    storage_options: dict[str, Any]


def is_installed() -> bool:
    """Says whether `serve` can find the SeaweedFS program, ``weed``."""
    return _find_weed() is not None


@contextlib.contextmanager
def serve(directory: str | os.PathLike[str], *, flags: Sequence[str] = ()) -> Iterator[ObjectStore]:
    """Runs an empty S3 server on free ports of 127.0.0.1 for the time of a ``with`` block.

    However the block or the process ends (an exception, Ctrl-C, SIGKILL), the server, its data and its sockets go too.

    Args:
        directory: Where the server puts its data, and its log, which stays. Made if missing.
        flags: More flags of ``weed mini``.

    Raises:
        FileNotFoundError: SeaweedFS is not installed.
        RuntimeError: The server did not start; the message ends with its log.
    """
    weed = _find_weed()
    if weed is None:
        raise FileNotFoundError(
            "weed (SeaweedFS) is not installed, so no S3 server can start: pip install 'ibm-nodes[s3server]'"
        )
    log = Path(directory, "weed.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    key, secret = secrets.token_hex(10), secrets.token_hex(20)
    for _ in range(3):  # between choosing a port and binding it, another process may take it
        ports = _free_ports()
        with _guarded(weed, ports, log, flags, {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}) as guard:
            if _becomes_ready(guard, ports[_S3_PORT]):
                endpoint = f"http://127.0.0.1:{ports[_S3_PORT]}"
                options = {"key": key, "secret": secret, "endpoint_url": endpoint}
                yield ObjectStore(endpoint, {**options, "client_kwargs": {"region_name": _REGION}})
                return
    raise RuntimeError(f"the S3 server must start within 30 seconds, but did not:\n{log.read_text()[-2000:]}")


def make_bucket(storage_options: dict[str, Any], name: str) -> str:
    """Makes a bucket and returns its URL, ``s3://name/``.

    Tries for five seconds, since the parts of a server that has just started learn of each other a little late.

    Args:
        storage_options: How to reach the server, as `ObjectStore` gives them.
        name: The bucket's name: 3 to 63 lower-case letters, digits and hyphens.

    Raises:
        FileExistsError: There is a bucket of this name.
        PermissionError: The credentials are wrong or do not allow it.
    """
    import s3fs

    filesystem = s3fs.S3FileSystem(**storage_options)
    deadline = time.monotonic() + 5
    while True:
        try:
            filesystem.mkdir(name)
            return f"s3://{name}/"
        except (FileExistsError, PermissionError):
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _find_weed() -> str | None:
    return shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")


def _free_ports() -> dict[str, int]:
    """Chooses all ten ports: SeaweedFS would take port + 10000 for gRPC, which may be no port at all."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in _PORT_NAMES]
        return {name: server.getsockname()[1] for name, server in zip(_PORT_NAMES, sockets, strict=True)}


@contextlib.contextmanager
def _guarded(
    weed: str, ports: dict[str, int], log: Path, flags: Sequence[str], credentials: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    data = tempfile.mkdtemp(prefix="weed-", dir=log.parent)
    command = [weed, "-logtostderr", "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.autoCreateBucket=false"]
    # Each bucket takes a volume of its own; by default there are as many as free gigabytes of the disk.
    command += ["-volume.max=100000", "-master.volumeSizeLimitMB=128"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", *(f"-{name}={port}" for name, port in ports.items()), *flags]
    numbers = ",".join(map(str, ports.values()))
    with log.open("ab") as output:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), data, numbers, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **credentials},
            start_new_session=True,  # so that Ctrl-C reaches the one who asked for the server, who then stops it
        )
    try:
        yield guard
    finally:
        _stop(guard)


def _becomes_ready(guard: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + 30
    while guard.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/healthz")
            if connection.getresponse().status == http.client.OK:
                return guard.poll() is None
        time.sleep(0.05)
    return False


def _stop(guard: subprocess.Popen[bytes]) -> None:
    """Tells the guard to stop in words, as a forked child of this process may hold the pipe open."""
    try:
        guard.communicate(b"stop\n", timeout=10)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def _guard(parent: int, data: str, ports: Sequence[str], command: Sequence[str]) -> None:
    """Runs the server until the parent says stop, closes the pipe or is gone, or the server ends by itself."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=data, preexec_fn=_die_with_guard) as server:
        while server.poll() is None and os.getppid() == parent and not select.select([sys.stdin], [], [], 0.25)[0]:
            pass
        server.kill()  # the data is thrown away, and a kind stop takes two seconds
    for port in ports:
        for path in glob.glob(f"/tmp/seaweedfs-*-{port}.sock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    shutil.rmtree(data, ignore_errors=True)


def _die_with_guard() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2], sys.argv[3].split(","), sys.argv[4:])
