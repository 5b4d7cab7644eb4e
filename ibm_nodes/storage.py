"""Object storage: finds objects, reads ranges of them, writes them. The only module that knows fsspec."""

import asyncio
import contextlib
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
from ibm_nodes.attempts import MIN_BYTES_PER_SECOND, Changed, delays
from ibm_nodes.read_ahead import POLL_SECONDS, check_stopped, counters

T = TypeVar("T")
Options = Mapping[str, Any] | None
Url = str | os.PathLike[str]
"""What users may give for a URL: a path, too."""

NUM_TRIES = 4
"""Attempts at stores other than S3, whose clients have retries of their own."""
CALL_SECONDS = 60.0
"""An attempt at a store other than S3 has these, and time for its bytes, if it can be given up at all."""
GIVE_UP_KEY, DATASETS_KEY = "give_up_seconds", "datasets"
"""Storage options that are not fsspec's: a deadline, and options of the recipes' single datasets."""


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
    _wait_for_turn(fs)
    began = time.perf_counter()
    try:
        if isinstance(fs, LocalFileSystem):
            return _read_local(path, start, end, item.version)
        if _is_s3(fs):
            got: bytearray = _wait(s3.read_range(fs, path, start, end, item.version), fs.loop)
            return got
        place = f"{item.url} bytes {start} to {end}"
        data: bytes = _retried(lambda: _call(fs, end - start, "cat_file", path, start=start, end=end), place)
        if len(data) != end - start:
            if _call(fs, 0, "info", path)["size"] != item.size:
                raise Changed(place, f": only {len(data)} bytes came; it")
            raise OSError(
                f"{item.url} bytes {start} to {end}: only {len(data)} bytes came; has it changed since it was listed?"
            )
        return data
    finally:
        counters.requests += 1
        counters.bytes += end - start
        counters.store_seconds += time.perf_counter() - began


def is_at_hand(item: Object, start: int, end: int, storage_options: Options = None) -> bool:
    """Tells whether bytes of a local file are in memory already, by a look at three of them; nothing is read for it."""
    fs, path = _filesystem(item.url, storage_options)
    if not isinstance(fs, LocalFileSystem) or not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            for place in (start, (start + end) // 2, end - 1):
                os.preadv(file, [bytearray(1)], place, os.RWF_NOWAIT)
        finally:
            os.close(file)
    except OSError:  # not in memory, or not on this file system
        return False
    return True


def read_whole(url: str, storage_options: Options = None) -> bytes:
    """Reads one small object that was not listed.

    Raises:
        FileNotFoundError, PermissionError, ConnectionError, OSError: as the store says.
    """
    fs, path = _filesystem(url, storage_options)
    if isinstance(fs, LocalFileSystem):
        with open(path, "rb") as file:
            return file.read()
    if _is_s3(fs):
        whole: bytes = _wait(s3.read_whole(fs, path), fs.loop)
        return whole
    data: bytes = _retried(lambda: _call(fs, 0, "cat_file", path), url)
    return data


def write(url: str, data: bytes, storage_options: Options = None) -> None:
    """Writes an object whole or not at all: one PUT, or a temporary file, fsync and rename."""
    fs, path = _filesystem(url, storage_options)
    if _is_s3(fs):
        _wait(s3.write(fs, path, data), fs.loop)
        return
    if not isinstance(fs, LocalFileSystem):
        _retried(lambda: _call(fs, len(data), "pipe_file", path, data), url)
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
        if _is_s3(fs):
            _wait(s3.delete(fs, path), fs.loop)
            continue
        with contextlib.suppress(FileNotFoundError):
            _retried(partial(_call, fs, 0, "rm_file", path), url)


def find(url: str, storage_options: Options = None) -> list[Object]:
    """Lists every object under a prefix, or one object, as it is now; nothing there is an empty list.

    Raises:
        FileNotFoundError: if there is no such bucket.
        PermissionError, ConnectionError, OSError: as the store says.
    """
    fs, root = _filesystem(url, storage_options)
    _wait_for_turn(fs)
    objects = []
    for path, info in _find(fs, root, url).items():
        key = path[len(root.rstrip("/")) + 1 :]
        full = f"{url.rstrip('/')}/{key}" if key else url
        objects.append(Object(full, key or posixpath.basename(path), int(info["size"]), _version(info)))
    return objects


_turn: float | None = None


def hold_first_reads(seconds: float) -> None:
    """Keeps what this process lists and reads over the network waiting, for a time that the first call sets off."""
    global _turn
    if _turn is None:
        _turn = time.monotonic() + seconds


def _wait_for_turn(fs: Any) -> None:
    while _turn is not None and getattr(fs, "async_impl", False) and (left := _turn - time.monotonic()) > 0:
        check_stopped()
        time.sleep(min(left, POLL_SECONDS))


def _find(fs: Any, root: str, url: str) -> dict[str, dict[str, Any]]:
    """Finds the files under a prefix, with sizes and versions; a link on a disk is the file that it leads to."""
    if _is_s3(fs):
        bucket = root.partition("/")[0]
        listed = _wait(s3.find(fs, root, url), fs.loop)
        return {f"{bucket}/{item['Key']}": {"size": item["Size"], **item} for item in listed}
    found = _retried(lambda: _call(fs, None, "find", root, detail=True), url)
    for path, info in found.items():
        if info.get("islink") and os.path.isfile(path):
            status = os.stat(path)
            info.update(type="file", size=status.st_size, mtime=status.st_mtime)
    return {path: info for path, info in found.items() if info["type"] == "file"}


def _is_s3(fs: Any) -> bool:
    return "s3" in fs.protocol  # one name or several


def _call(fs: Any, size: int | None, name: str, *arguments: Any, **options: Any) -> Any:
    """Calls a method of a filesystem; where that is possible, a wait can be given up, and has a limit by its bytes."""
    if getattr(fs, "async_impl", False):
        limit = None if size is None else CALL_SECONDS + size / MIN_BYTES_PER_SECOND
        return _wait(asyncio.wait_for(getattr(fs, f"_{name}")(*arguments, **options), limit), fs.loop)
    return getattr(fs, name)(*arguments, **options)


def _read_local(path: str, start: int, end: int, version: str | None) -> bytes:
    """Reads by pread: a file that shrinks under an mmap would kill the process."""
    file = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(file)
        if version is not None and version != f"{status.st_size}-{status.st_mtime!r}":
            raise Changed(path)
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
    give_up_seconds = _give_up_seconds(options)
    key = (os.getpid(), protocol, repr((give_up_seconds, sorted(options.items(), key=str))))
    with _filesystems_lock:
        if key not in _filesystems:
            if protocol in ("s3", "s3a"):
                options = s3.client_options(options)
            try:
                _filesystems[key] = fsspec.filesystem(protocol, skip_instance_cache=True, **options)
                _filesystems[key].give_up_seconds = give_up_seconds
            except (TypeError, ValueError, ImportError) as error:
                raise ValueError(f"{url} cannot be opened: {error}: check the URL and storage_options") from error
        fs = _filesystems[key]
    return fs, fs._strip_protocol(url)


def _give_up_seconds(options: dict[str, Any]) -> float | None:
    """Takes what is not fsspec's out of its options."""
    options.pop(DATASETS_KEY, None)
    seconds = options.pop(GIVE_UP_KEY, None)
    if seconds is not None and not (isinstance(seconds, (int, float)) and seconds > 0):
        raise ValueError(f"{GIVE_UP_KEY} in storage_options must be a number of seconds above 0, got {seconds!r}")
    return seconds


def _forget_lock() -> None:
    global _filesystems_lock
    _filesystems_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def _retried(call: Callable[[], T], url: str) -> T:
    """Calls fsspec, again where that may help; what escapes from the clients below it becomes a built-in error."""
    for attempt, pause in enumerate(delays(), 1):
        check_stopped()
        try:
            return call()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{url} is not there: {error}: check the bucket and the prefix") from error
        except PermissionError as error:
            raise PermissionError(f"{url} cannot be read: {error}: check the credentials and the policy") from error
        except _client_errors() as error:
            if attempt == NUM_TRIES:
                kind = OSError if isinstance(error, OSError) else ConnectionError
                raise kind(f"{url} could not be reached in {attempt} attempts: {str(error) or 'no answer'}") from error
        _pause(4 * pause)
    raise AssertionError("unreachable")


def _pause(seconds: float) -> None:
    """Sleeps, unless the thread is told to stop waiting."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        check_stopped()
        time.sleep(min(left, POLL_SECONDS))


def _client_errors() -> tuple[type[BaseException], ...]:
    """Gives what may escape from the clients below fsspec, which share no base class."""
    import aiohttp

    return (OSError, aiohttp.ClientError)
