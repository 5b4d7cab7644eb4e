"""Arrow IPC files: runs of record batches as blocks, read by the offsets in the footer."""

import struct
from dataclasses import replace
from typing import NamedTuple

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
PART_BYTES = 4 << 20
"""Record batches that are larger than this are read in parts of about this size, if they are not compressed."""
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
        sizes = self._batches["metadata"] + self._batches["body"]
        self._places: dict[int, np.void | None] = {}
        large = np.flatnonzero(sizes > PART_BYTES)
        num_parts = np.ones(len(begins), np.int64)
        if len(large) and not self._dictionaries.size and self._place(int(large[0])) is not None:
            num_parts[large] = -(-sizes[large] // PART_BYTES)
        self._runs = _runs(begins.tolist(), num_parts.tolist())
        starts = [int(begins[run.first]) + int(sizes[run.first]) * run.part // run.num_parts for run in self._runs]
        self.spans = np.array([0, *starts[1:], file.size] if starts else [0], np.int64)
        self.groups = np.arange(len(self.spans) - 1)

    def size(self, block: int) -> int:
        """Gives about how many bytes reading a block takes in memory."""
        return int(self.spans[block + 1] - self.spans[block])

    def is_at_hand(self, block: int) -> bool:
        """Tells whether a block is in memory and takes no decompression: it need not be read ahead."""
        run = self._runs[block]
        if not self._decoder.is_easy or self._dictionaries.size or run.num_parts > 1:
            return False
        first, last = self._batches[run.first], self._batches[run.last - 1]
        return self._file.is_at_hand(int(first["offset"]), int(last["offset"] + last["metadata"] + last["body"]))

    def read(self, block: int) -> Lists:
        """Reads a block."""
        run = self._runs[block]
        if run.num_parts > 1:
            return self._read_part(run)
        lists, size = self._read_batches(run.first, run.last)
        if lists.values.nbytes * 2 < size:  # the rest of the block is other columns: let go of it
            lists = replace(lists, values=lists.values.copy())
        return lists

    def _read_batches(self, first: int, last: int) -> tuple[Lists, int]:
        """Reads whole batches; gives their rows, and how many bytes were read."""
        places = self._batches[first:last].copy()
        start = int(places["offset"][0])
        data = self._file.read(start, int((places["offset"] + places["metadata"] + places["body"]).max()))
        places["offset"] -= start
        numbers = np.arange(first, last) if self._numbers is None else self._numbers[first:last]
        return self._decoder.decode(data, places, numbers, self._read_dictionaries()), len(data)

    def _read_part(self, run: "_Run") -> Lists:
        """Reads some rows of a batch: their offsets, then their values."""
        number = run.first if self._numbers is None else int(self._numbers[run.first])
        begin, place = int(self._batches["offset"][run.first]), self._place(run.first)
        if place is None:  # unlike the first large one of its file, it cannot be read in parts
            lists, _ = self._read_batches(run.first, run.last)
            rows = _share(len(lists.rows), run)
            begins, ends = lists.begins[rows], lists.ends[rows]
            low, high = (int(begins.min()), int(ends.max())) if len(begins) else (0, 0)
            return Lists(lists.values[low:high].copy(), begins - low, ends - low, lists.rows[rows])
        return self._decoder.read_rows(
            lambda first, last: self._file.read(begin + first, begin + last),
            place,
            _share(int(place["length"]), run),
            number,
        )

    def _place(self, index: int) -> np.void | None:
        """Finds the column in a large batch, or gives None if that cannot be read in parts."""
        if index not in self._places:
            batch = self._batches[index]
            begin = int(batch["offset"])
            metadata = bytes(self._file.read(begin, begin + int(batch["metadata"])))
            self._places[index] = self._decoder.locate(metadata, int(batch["body"]))
        return self._places[index]

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


class _Run(NamedTuple):
    """A block: batches [first, last), or a part of one."""

    first: int
    last: int
    part: int
    num_parts: int


def _runs(begins: list[int], num_parts: list[int]) -> list[_Run]:
    """Cuts batches into blocks."""
    runs: list[_Run] = []
    limit = -1
    for index, (begin, number) in enumerate(zip(begins, num_parts, strict=True)):
        if number > 1:
            runs += [_Run(index, index + 1, part, number) for part in range(number)]
            limit = -1
        elif begin >= limit:
            runs.append(_Run(index, index + 1, 0, 1))
            limit = begin + BLOCK_BYTES
        else:
            runs[-1] = runs[-1]._replace(last=index + 1)
    return runs


def _share(num_rows: int, run: _Run) -> slice:
    """Gives the rows that belong to a part."""
    return slice(num_rows * run.part // run.num_parts, num_rows * (run.part + 1) // run.num_parts)
