"""Arrow IPC files: runs of record batches as blocks, read by the offsets in the footer."""

import struct
from dataclasses import replace

import numpy as np
import pyarrow as pa

from ibm_nodes.formats.batches import CONTINUATION, PLACE, BatchDecoder
from ibm_nodes.formats.flatbuffers import Table
from ibm_nodes.formats.lists import Columns, Lists
from ibm_nodes.formats.where import Where
from ibm_nodes.listing import StoredObject

MAGIC = b"ARROW1"
TAIL_BYTES = 64 << 10
BLOCK_BYTES = 1 << 20
"""A block is as many record batches as begin within this many bytes."""
DICTIONARIES_FIELD, BATCHES_FIELD = 2, 3


class ArrowFile:
    """A file of the Arrow IPC file format, uncompressed or with lz4 or zstd bodies."""

    splittable = True

    def __init__(self, file: StoredObject, column: Columns, where: Where | None = None) -> None:
        self._file = file
        footer, self._schema = _footer(file)
        self._decoder = BatchDecoder(self._schema, column, file.url, where)
        self._dictionaries = _places(footer, DICTIONARIES_FIELD, file)
        self._batches = _places(footer, BATCHES_FIELD, file)
        begins = self._batches["offset"]
        self._numbers = None
        if np.any(np.diff(begins) < 0):
            self._numbers = np.argsort(begins, kind="stable")
            self._batches = self._batches[self._numbers]
            begins = self._batches["offset"]
        self._firsts = _runs(begins)
        starts = begins[self._firsts[1:-1]]
        self.spans = np.concatenate([[0], starts, [file.size]]) if len(begins) else np.array([0])
        self.groups = np.arange(len(self.spans) - 1)

    def size(self, block: int) -> int:
        """Gives about how many bytes reading a block takes in memory."""
        return int(self.spans[block + 1] - self.spans[block])

    def read(self, block: int) -> Lists:
        """Reads a block."""
        first, last = self._firsts[block], self._firsts[block + 1]
        places = self._batches[first:last].copy()
        start = int(places["offset"][0])
        data = self._file.read(start, int((places["offset"] + places["metadata"] + places["body"]).max()))
        places["offset"] -= start
        numbers = np.arange(first, last) if self._numbers is None else self._numbers[first:last]
        lists = self._decoder.decode(data, places, numbers, self._read_dictionaries())
        if lists.values.nbytes * 2 < len(data):  # the rest of the block is other columns: let go of it
            lists = replace(lists, values=lists.values.copy())
        return lists

    def _read_dictionaries(self) -> bytes:
        parts = []
        for place in self._dictionaries:
            begin = int(place["offset"])
            parts.append(self._file.read(begin, begin + int(place["metadata"]) + int(place["body"])))
        return b"".join(parts)


def read_tail(file: StoredObject, size: int) -> bytes | bytearray:
    """Reads the last ``size`` bytes of an object, or all of it."""
    return file.read(max(0, file.size - size), file.size)


def is_stream(file: StoredObject) -> bool:
    """Tells a stream from a file, by what they begin and end with."""
    return bytes(file.read(0, min(len(CONTINUATION), file.size))) == CONTINUATION


def _footer(file: StoredObject) -> tuple[bytes, pa.Schema]:
    """Reads the footer."""
    tail = read_tail(file, TAIL_BYTES)
    if not tail.endswith(MAGIC):
        raise ValueError(f"{file.url} is not an Arrow IPC file, or was cut off: it does not end with {MAGIC!r}")
    end = len(MAGIC) + 4
    (length,) = struct.unpack_from("<i", tail, len(tail) - end) if len(tail) >= end else (0,)
    needed = length + end
    if length <= 0 or needed + len(MAGIC) + 2 > file.size:
        raise ValueError(f"{file.url} has a damaged footer: it says that it is {length} bytes long")
    if needed > len(tail):
        tail = file.read(file.size - needed, file.size)
    # pyarrow looks at nothing but the magic numbers and the footer until a batch is asked for.
    try:
        schema = pa.ipc.open_file(pa.BufferReader(MAGIC + b"\0\0" + tail[-needed:])).schema
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file.url} has a damaged footer: {error}") from error
    return bytes(tail[len(tail) - needed : len(tail) - end]), schema


def _places(footer: bytes, field: int, file: StoredObject) -> np.ndarray:
    """Gives where the footer says that batches lie."""
    position, count = Table.root(footer).vector(field)
    places = np.frombuffer(footer, PLACE, count, position) if count else np.empty(0, PLACE)
    parts = [places[name] for name in ("offset", "metadata", "body")]
    inside = all(np.all((part >= 0) & (part <= file.size)) for part in (*parts, sum(parts)))
    if not inside:
        raise ValueError(f"{file.url} has a damaged footer: a record batch lies outside the file")
    return places


def _runs(begins: np.ndarray) -> list[int]:
    """Gives the first batch of each block, and, last, the number of batches."""
    firsts, limit = [], -1
    for index, begin in enumerate(begins.tolist()):
        if begin >= limit:
            firsts.append(index)
            limit = begin + BLOCK_BYTES
    return [*firsts, len(begins)]
