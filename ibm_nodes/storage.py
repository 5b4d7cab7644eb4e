"""Object storage: finds objects, reads ranges of them, writes them. The only module that knows fsspec."""

import asyncio
import itertools
import os
import posixpath
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ibm_nodes import s3
from ibm_nodes.read_ahead import POLL_SECONDS, check_stopped, counters
from ibm_nodes.s3 import ObjectChanged

T = TypeVar("T")
Options = Mapping[str, Any] | None

NUM_TRIES = 4
WRITE_SECONDS = 10.0  # an attempt to write has these, and a second more for each MiB


class Object(NamedTuple):
    """An object as it was listed.

    Attributes:
        url: its full URL.
        key: its place under the prefix.
        size: its bytes.
        version: what pins it within a run: an ETag, or size and time of change; None where the store gives neither.
    """

    url: str
    key: str
    size: int
    version: str | None


def read(item: Object, start: int, end: int, storage_options: Options = None) -> bytes | bytearray:
    """Reads bytes [start, end) of an object that was listed: all of them, of that version, or an error."""
    fs, path = _filesystem(item.url, storage_options)
    began = time.perf_counter()
    try:
        if isinstance(fs, LocalFileSystem):
            return _read_local(path, start, end, item.version)
        if hasattr(fs, "set_session"):
            got: bytearray = _wait(s3.read_range(fs, path, start, end, item.version), fs.loop)
            return got
        data: bytes = _retried(lambda: _call(fs, "cat_file", path, start=start, end=end), item.url)
        if len(data) != end - start:
            kind = OSError if _call(fs, "info", path)["size"] == item.size else ObjectChanged
            raise kind(
                f"{item.url} bytes {start} to {end}: only {len(data)} bytes came; has it changed since it was listed?"
            )
        return data
    finally:
        counters.requests += 1
        counters.bytes += end - start
        counters.store_seconds += time.perf_counter() - began


def read_whole(url: str, storage_options: Options = None) -> bytes:
    """Reads one small object that was not listed.

    Raises:
        FileNotFoundError, PermissionError, ConnectionError, OSError: as the store says.
    """
    fs, path = _filesystem(url, storage_options)
    if isinstance(fs, LocalFileSystem):
        with open(path, "rb") as file:
            return file.read()
    data: bytes = _retried(lambda: _call(fs, "cat_file", path), url)
    return data


def write(url: str, data: bytes, storage_options: Options = None) -> None:
    """Writes an object whole or not at all: one PUT, or a temporary file, fsync and rename."""
    fs, path = _filesystem(url, storage_options)
    if not isinstance(fs, LocalFileSystem):
        limit = WRITE_SECONDS + len(data) / s3.MIN_BYTES_PER_SECOND
        _retried(lambda: _call(fs, "pipe_file", path, data, limit_seconds=limit), url)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def delete(urls: list[str], storage_options: Options = None) -> None:
    """Deletes objects; one that is not there any more is no error."""
    for url in urls:
        fs, path = _filesystem(url, storage_options)
        try:
            _retried(partial(_call, fs, "rm_file", path), url)
        except FileNotFoundError:
            continue


def find(url: str, storage_options: Options = None) -> list[Object]:
    """Lists every object under a prefix, or one object, as it is now; nothing there is an empty list.

    Raises:
        FileNotFoundError: if there is no such bucket.
        PermissionError, ConnectionError, OSError: as the store says.
    """
    fs, root = _filesystem(url, storage_options)
    objects = []
    for path, info in _find(fs, root, url).items():
        key = path[len(root) :].lstrip("/")
        full = f"{url.rstrip('/')}/{key}" if key else url
        objects.append(Object(full, key or posixpath.basename(path), int(info["size"]), _version(info)))
    return objects


def _find(fs: Any, root: str, url: str) -> dict[str, dict[str, Any]]:
    """Finds the files under a prefix, with sizes and versions; a link on a disk is the file that it leads to."""
    found = _retried(lambda: _call(fs, "find", root, detail=True), url)
    for path, info in found.items():
        if info.get("islink") and os.path.isfile(path):
            status = os.stat(path)
            info.update(type="file", size=status.st_size, mtime=status.st_mtime)
    return {path: info for path, info in found.items() if info["type"] == "file"}


def _call(fs: Any, name: str, *arguments: Any, limit_seconds: float | None = None, **options: Any) -> Any:
    """Calls a method of a filesystem; a wait for the network can be given up, and has a limit where clients have none.

    aiohttp waits for ever for the "100 Continue" before the body of a PUT.
    """
    if getattr(fs, "async_impl", False):
        return _wait(asyncio.wait_for(getattr(fs, f"_{name}")(*arguments, **options), limit_seconds), fs.loop)
    return getattr(fs, name)(*arguments, **options)


def _read_local(path: str, start: int, end: int, version: str | None) -> bytes:
    """Reads by pread: a file that shrinks under an mmap would kill the process."""
    file = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(file)
        if version is not None and version != f"{status.st_size}-{status.st_mtime!r}":
            raise ObjectChanged(f"{path} has changed since it was listed: the run's data would be mixed; list again")
        parts: list[bytes] = []
        while start < end:
            part = os.pread(file, end - start, start)
            if not part:
                raise OSError(f"{path} ended at byte {start}, before byte {end}")
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(file)


def _wait(coroutine: Any, loop: asyncio.AbstractEventLoop) -> Any:
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        while True:
            try:
                return future.result(POLL_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
                check_stopped()
    finally:
        future.cancel()


def _version(info: Mapping[str, Any]) -> str | None:
    if "ETag" in info:
        return str(info["ETag"])
    return f"{info['size']}-{info['mtime']!r}" if "mtime" in info else None


_filesystems: dict[tuple[int, str, str], Any] = {}
_filesystems_lock = threading.Lock()


def _filesystem(url: str, storage_options: Options) -> tuple[Any, str]:
    """Gives the process's own client for a URL, made at the first use in this process, and the path in it."""
    protocol = fsspec.utils.get_protocol(url)
    options = dict(storage_options or {})
    key = (os.getpid(), protocol, repr(sorted(options.items(), key=str)))
    with _filesystems_lock:
        if key not in _filesystems:
            if protocol in ("s3", "s3a"):
                options = s3.client_options(options)
            try:
                _filesystems[key] = fsspec.filesystem(protocol, skip_instance_cache=True, **options)
            except (TypeError, ValueError, ImportError) as error:
                raise ValueError(f"{url} cannot be opened: {error}: check the URL and storage_options") from error
        fs = _filesystems[key]
    return fs, fs._strip_protocol(url)


def _forget_lock() -> None:
    global _filesystems_lock
    _filesystems_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def _retried(call: Callable[[], T], url: str) -> T:
    """Calls fsspec, again where that may help; what escapes from the clients below it becomes a built-in error."""
    delay = s3.FIRST_DELAY_SECONDS
    for attempt in itertools.count(1):
        check_stopped()
        try:
            return call()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{url} is not there: {error}: check the bucket and the prefix") from error
        except PermissionError as error:
            raise PermissionError(f"{url} cannot be read: {error}: check the credentials and the policy") from error
        except _client_errors() as error:
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
                raise PermissionError(f"{url} cannot be read: {error}: give storage_options, or anon=True") from error
            if attempt == NUM_TRIES:
                kind = OSError if isinstance(error, OSError) else ConnectionError
                raise kind(f"{url} could not be reached in {attempt} attempts: {error}") from error
        time.sleep(delay)
        delay *= 4
    raise AssertionError("unreachable")


def _client_errors() -> tuple[type[BaseException], ...]:
    """Gives what may escape from the clients below fsspec, which share no base class."""
    import aiohttp
    import botocore.exceptions

    return (OSError, aiohttp.ClientError, botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)
