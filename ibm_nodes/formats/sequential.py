"""Files that can only be read from their beginning on: compressed ones, and those that say nowhere what lies where.

A block is what comes to its end in a chunk of the stored bytes: their number is known without reading, and a block
depends on the file alone. A decoder is fed with the chunks; some that stand further back or ahead are kept, so that
whoever reads block after block decodes each byte once.
"""

import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ibm_nodes.formats.lists import Lists
from ibm_nodes.listing import StoredObject
from ibm_nodes.read_ahead import POLL_SECONDS, check_stopped

CHUNK_BYTES = 512 << 10
CHUNKS_PER_READ = 4
KEPT_DECODERS = 16
GROWTH = 4
"""A guess at how many times its stored bytes a block takes in memory."""
GZIP = 16 + zlib.MAX_WBITS


class Decoder(Protocol):
    """Takes rows out of a stream of bytes that comes in pieces."""

    def feed(self, data: bytes, *, last: bool, wanted: bool) -> Lists | None:
        """Takes the next bytes, and gives the rows that end in them, if they are wanted.

        Raises:
            ValueError: if they cannot be decoded, or are the last and end in the middle of a row.
        """
        ...


class SequentialFile:
    """A file that is read from its beginning on, compressed or not, by what its ending says.

    Args:
        file: the object.
        make: makes a decoder of its decompressed bytes.
    """

    splittable = False

    def __init__(self, file: StoredObject, make: Callable[[], Decoder]) -> None:
        self._file, self._make = file, make
        self.spans = np.append(np.arange(0, file.size, CHUNK_BYTES), file.size)
        self.groups = np.zeros(len(self.spans) - 1, np.int64)
        self._streams: OrderedDict[int, _Stream] = OrderedDict()
        self._lock = threading.Lock()
        _codec(file.key)  # which may not be installed

    def size(self, block: int) -> int:
        """Gives about how many bytes reading a block takes in memory."""
        return GROWTH * CHUNK_BYTES

    def read(self, block: int) -> Lists:
        """Reads a block, and what comes before it if no decoder is kept that stands there."""
        while not self._lock.acquire(timeout=POLL_SECONDS):  # one after the other: each goes on where one ended
            check_stopped()
        try:
            start = max((position for position in self._streams if position <= block), default=None)
            stream = _Stream(self._file, self._make()) if start is None else self._streams.pop(start)
            while stream.position < block:
                stream.next(until=block)
            lists = stream.next(until=block)
            if stream.position < len(self.groups):
                self._streams[stream.position] = stream
            while len(self._streams) > KEPT_DECODERS:
                self._streams.popitem(last=False)
            return lists
        finally:
            self._lock.release()


class _Stream:
    """A decoder on its way through the file, and the bytes that were read but not decoded yet."""

    def __init__(self, file: StoredObject, decoder: Decoder) -> None:
        self._file, self._decoder = file, decoder
        self._decompress = _Decompressor(file)
        self._window, self._begin = memoryview(b""), 0
        self.position = 0

    def next(self, *, until: int) -> Lists:
        """Decodes a chunk; those before ``until`` only to get past them."""
        check_stopped()
        begin = self.position * CHUNK_BYTES
        end = min(begin + CHUNK_BYTES, self._file.size)
        if begin >= self._begin + len(self._window):
            ahead = min(begin + CHUNKS_PER_READ * CHUNK_BYTES, self._file.size)
            self._window, self._begin = memoryview(self._file.read(begin, ahead)), begin
        last = end == self._file.size
        data = self._decompress(self._window[begin - self._begin : end - self._begin], last)
        lists = self._decoder.feed(data, last=last, wanted=self.position == until)
        self.position += 1
        return Lists.of([], []) if lists is None else lists


class _Decompressor:
    """Decompresses what comes in pieces, all members and frames of it."""

    def __init__(self, file: StoredObject) -> None:
        self._url = file.url
        self._make = _codec(file.key)
        self._member: Any = None

    def __call__(self, data: memoryview, last: bool) -> bytes:
        if self._make is None:
            return bytes(data)
        parts, left = [], bytes(data)
        errors: tuple[type[Exception], ...] = (zlib.error, *_zstd_errors())
        try:
            while left:
                if self._member is None:
                    left = left.lstrip(b"\0")  # padding between members; no frame begins so
                    if not left:
                        break
                    self._member = self._make()
                parts.append(self._member.decompress(left))
                left = b""
                if self._member.eof:
                    left, self._member = self._member.unused_data, None
        except errors as error:
            raise ValueError(f"{self._url} cannot be decompressed: {error}: it is damaged") from error
        if last and self._member is not None:
            raise ValueError(f"{self._url} was cut off: it ends in the middle of its compressed data")
        return b"".join(parts)


def _codec(key: str) -> Callable[[], Any] | None:
    """Gives what makes a decompressor for objects of that ending, or None."""
    if key.lower().endswith((".gz", ".tgz")):
        return lambda: zlib.decompressobj(GZIP)
    if key.lower().endswith((".zst", ".zstd")):
        try:
            import zstandard
        except ImportError as error:
            raise ImportError(f"{key} needs zstandard to be read: pip install 'ibm-nodes[zstd]'") from error
        return lambda: zstandard.ZstdDecompressor().decompressobj()
    return None


def _zstd_errors() -> tuple[type[Exception], ...]:
    try:
        import zstandard
    except ImportError:
        return ()
    return (zstandard.ZstdError,)
