"""Object storage: lists prefixes, reads ranges of what was listed, writes objects; alone in knowing fsspec."""

import asyncio
import contextvars
import hashlib
import itertools
import os
import posixpath
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ibm_nodes import s3
from ibm_nodes.once import Once
from ibm_nodes.read_ahead import POLL_SECONDS, check_stopped, counters

T = TypeVar("T")
Options = Mapping[str, Any] | None

CACHED_FILES = 512
CACHED_BLOCKS = 4096
NUM_TRIES = 4


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


class Listing:
    """The objects of a dataset, sorted by key: what the order of its documents depends on.

    Args:
        url: the prefix, or one object.
        objects: what is under it.
        storage_options: fsspec's options for its store. They never show in a state, an error or a repr.

    Attributes:
        starts: where each object begins in the dataset's bytes, and, last, their sum.
        digest: a hash of keys and sizes.
    """

    def __init__(self, url: str, objects: Sequence[Object], storage_options: Options = None) -> None:
        self.url = url
        self.objects = sorted(objects, key=lambda item: item.key)
        self.starts = [0, *itertools.accumulate(item.size for item in self.objects)]
        text = "\n".join(f"{item.key}\0{item.size}" for item in self.objects)
        self.digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self.storage_options = storage_options
        self._files: Once[Any] = Once(CACHED_FILES)
        self._blocks: Once[Any] = Once(CACHED_BLOCKS, weak=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return Listing, (self.url, self.objects, self.storage_options)

    def __str__(self) -> str:
        return f"{len(self.objects)} files of {self.starts[-1]} bytes (listing {self.digest})"

    def file(self, key: Any, make: Callable[[], T]) -> T:
        """Gives what ``make`` opens, once for all who ask with the same key."""
        opened: T = self._files.get(key, make)
        return opened

    def block(self, key: Any, make: Callable[[], T]) -> T:
        """Gives what ``make`` reads, once for all who hold it at the same time."""
        block: T = self._blocks.get(key, make)
        return block

    def read(self, item: Object, start: int, end: int) -> bytes | bytearray:
        """Reads bytes [start, end) of an object, as it was listed.

        Raises:
            OSError: if it has changed, is gone, or cannot be read.
        """
        return read(item, start, end, self.storage_options)


class ListingSession:
    """Within it, readers of the same prefix share one listing: ``with session: reader.reset(state)``."""

    def __init__(self) -> None:
        self._listings: Once[Listing] = Once(None)
        self._tokens: list[contextvars.Token[ListingSession | None]] = []

    def __enter__(self) -> "ListingSession":
        self._tokens.append(_session.set(self))
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        _session.reset(self._tokens.pop())

    def listing(self, url: str, storage_options: Options, suffixes: tuple[str, ...]) -> Listing:
        """Gives the listing of a prefix, made at the first call."""
        key = (url, suffixes, repr(sorted((storage_options or {}).items(), key=str)))
        return self._listings.get(key, lambda: list_objects(url, storage_options, suffixes))


_session: contextvars.ContextVar[ListingSession | None] = contextvars.ContextVar("session", default=None)


def current_session() -> ListingSession:
    """Gives the session that the caller is in, or a new one."""
    return _session.get() or ListingSession()


def list_objects(url: str, storage_options: Options = None, suffixes: tuple[str, ...] = ("",)) -> Listing:
    """Lists a prefix afresh, in one go.

    Left out: empty objects, and below the prefix names that begin with ``_`` or ``.`` and endings not in
    ``suffixes``. A URL of one object is always read.

    Raises:
        FileNotFoundError: if there is nothing to read.
        PermissionError, ConnectionError, OSError: as the store says.
    """
    fs, root = _filesystem(url, storage_options)
    found = _retried(lambda: fs.find(root, detail=True), url)
    base = url.rstrip("/")
    objects = []
    for path, info in found.items():
        key = path[len(root) :].lstrip("/")
        if info["type"] == "file" and info["size"] and (not key or _is_data(key, suffixes)):
            full = f"{base}/{key}" if key else url
            objects.append(Object(full, key or posixpath.basename(path), int(info["size"]), _version(info)))
    if not objects:
        seen = f"{len(found)} other objects" if found else "nothing"
        raise FileNotFoundError(
            f"no data under {url}: it holds {seen}; give a prefix with files that end in one of {', '.join(suffixes)}"
        )
    return Listing(url, objects, storage_options)


def read(item: Object, start: int, end: int, storage_options: Options = None) -> bytes | bytearray:
    """Reads bytes [start, end) of an object that was listed: all of them, of that version, or an error."""
    fs, path = _filesystem(item.url, storage_options)
    began = time.perf_counter()
    try:
        if isinstance(fs, LocalFileSystem):
            return _read_local(path, start, end, item.version)
        if hasattr(fs, "set_session"):
            return _wait(s3.read_range(fs, path, start, end, item.version), fs.loop)
        data: bytes = _retried(lambda: fs.cat_file(path, start=start, end=end), item.url)
        if len(data) != end - start:
            raise OSError(
                f"{item.url} bytes {start} to {end}: only {len(data)} bytes came; has it changed since it was listed?"
            )
        return data
    finally:
        counters.requests += 1
        counters.bytes += end - start
        counters.store_seconds += time.perf_counter() - began


def write(url: str, data: bytes, storage_options: Options = None) -> None:
    """Writes an object whole or not at all: one PUT, or a temporary file, fsync and rename."""
    fs, path = _filesystem(url, storage_options)
    if not isinstance(fs, LocalFileSystem):
        _retried(lambda: fs.pipe_file(path, data), url)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def find(url: str, storage_options: Options = None) -> list[Object]:
    """Lists every object under a prefix, as it is now; nothing there is an empty list."""
    fs, root = _filesystem(url, storage_options)
    try:
        found = _retried(lambda: fs.find(root, detail=True), url)
    except FileNotFoundError:
        return []
    base = url.rstrip("/")
    keys = {path[len(root) :].lstrip("/"): info for path, info in found.items()}
    return [Object(f"{base}/{key}", key, int(info["size"]), _version(info)) for key, info in sorted(keys.items())]


def _read_local(path: str, start: int, end: int, version: str | None) -> bytes:
    """Reads by pread: a file that shrinks under an mmap would kill the process."""
    file = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(file)
        if version is not None and version != f"{status.st_size}-{status.st_mtime!r}":
            raise OSError(f"{path} has changed since it was listed: the run's data would be mixed; list again")
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


def _wait(coroutine: Any, loop: asyncio.AbstractEventLoop) -> bytearray:
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        while True:
            try:
                data: bytearray = future.result(POLL_SECONDS)
                return data
            except TimeoutError:
                if future.done():
                    raise
                check_stopped()
    finally:
        future.cancel()


def _is_data(key: str, suffixes: tuple[str, ...]) -> bool:
    hidden = any(part.startswith(("_", ".")) for part in key.split("/"))
    return not hidden and key.lower().endswith(suffixes)


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
            _filesystems[key] = fsspec.filesystem(protocol, skip_instance_cache=True, **options)
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
        except (FileNotFoundError, PermissionError):
            raise
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
