"""Arrow IPC streams: what Arrow writes to pipes, and what caches of other libraries hold, also in ``.arrow`` files."""

import struct
from functools import partial

import numpy as np
import pyarrow as pa

from ibm_nodes.formats.arrow import ArrowFile, is_stream
from ibm_nodes.formats.batches import CONTINUATION, PLACE, PREFIX_BYTES, RECORD_BATCH, BatchDecoder
from ibm_nodes.formats.flatbuffers import Table
from ibm_nodes.formats.lists import Columns, Lists, join
from ibm_nodes.formats.sequential import SequentialFile
from ibm_nodes.formats.where import Where
from ibm_nodes.listing import StoredObject

SCHEMA, DICTIONARY = 1, 2


def open_arrow(file: StoredObject, column: Columns, where: Where | None = None) -> ArrowFile | SequentialFile:
    """Opens an Arrow IPC file or stream, whichever it is by its content."""
    try:
        return ArrowFile(file, column, where)
    except ValueError:
        if not is_stream(file):
            raise
    return SequentialFile(file, partial(StreamDecoder, column, file.url, where))


class StreamDecoder:
    """Takes one column, or the rows of several, out of a stream; a row is 2**32 * record batch + row in it."""

    def __init__(self, column: Columns, url: str, where: Where | None = None) -> None:
        self._column, self._url, self._where = column, url, where
        self._buffer = bytearray()
        self._ended = False
        self._decoder: BatchDecoder | None = None
        self._dictionaries: list[bytes] = []
        self._number = 0

    def feed(self, data: bytes, *, last: bool, wanted: bool) -> Lists | None:
        """Takes the next bytes, and gives the rows of the batches that end in them, if they are wanted."""
        self._buffer += data
        parts, places, at = [], [], 0
        while not self._ended and (message := self._message(at)) is not None:
            size, body, kind = message
            end = at + size + body
            if kind == RECORD_BATCH:
                places.append((at, size, 0, body))
            else:
                parts += self._decode(places, wanted)  # with the dictionaries so far
                places = []
                self._prepare(bytes(self._buffer[at:end]), kind)
            at = end
        parts += self._decode(places, wanted)
        if last and (self._decoder is None or (at < len(self._buffer) and not self._ended)):
            raise ValueError(f"{self._url} is not an Arrow stream, or was cut off: it ends in the middle of one")
        del self._buffer[:at]
        return join(parts) if wanted else None

    def _decode(self, places: list[tuple[int, int, int, int]], wanted: bool) -> list[Lists]:
        first, self._number = self._number, self._number + len(places)
        if not places or not wanted or self._decoder is None:
            return []
        numbers = np.arange(first, self._number)
        return [
            self._decoder.decode(bytes(self._buffer), np.array(places, PLACE), numbers, b"".join(self._dictionaries))
        ]

    def _message(self, at: int) -> tuple[int, int, int] | None:
        """Gives the bytes of a message's metadata and body, and its kind, or None while it is not all there yet."""
        head = self._buffer[at : at + PREFIX_BYTES]
        if len(head) < PREFIX_BYTES:
            return None
        mark, length = head[:4], struct.unpack_from("<i", head, 4)[0]
        if mark != CONTINUATION or length < 0:
            raise ValueError(f"{self._url} is damaged: an Arrow message does not begin where the last one ended")
        if length == 0:
            self._ended = True
            return None
        metadata = bytes(self._buffer[at + PREFIX_BYTES : at + PREFIX_BYTES + length])
        if len(metadata) < length:
            return None
        try:
            message = Table.root(metadata)
            kind, body = message.integer(1, "B"), message.integer(3, "q")
        except struct.error as error:
            raise ValueError(f"{self._url} is damaged: the metadata of an Arrow message cannot be read") from error
        if body < 0:
            raise ValueError(f"{self._url} is damaged: an Arrow message says that it has {body} bytes")
        size = PREFIX_BYTES + length
        return (size, body, kind) if at + size + body <= len(self._buffer) else None

    def _prepare(self, message: bytes, kind: int) -> None:
        """Takes what has to be known before batches."""
        if kind == DICTIONARY:
            self._dictionaries.append(message)
        elif kind == SCHEMA and self._decoder is None:
            schema = pa.ipc.read_schema(pa.py_buffer(message))
            self._decoder = BatchDecoder(schema, self._column, self._url, self._where)
        else:
            raise ValueError(f"{self._url} is damaged: an Arrow message of kind {kind} is out of place")
