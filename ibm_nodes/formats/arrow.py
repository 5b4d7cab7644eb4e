"""Arrow IPC files: runs of record batches as blocks, read by the offsets in the footer.

The footer is a flatbuffer whose layout is frozen (Footer and Block in Arrow's File.fbs); pyarrow reads it but does not
give the offsets away.
"""

import struct
from dataclasses import replace

import numpy as np
import pyarrow as pa

from ibm_nodes.formats.lists import ROWS_PER_BATCH, Lists, check_column, join, to_lists
from ibm_nodes.listing import Listing
from ibm_nodes.storage import Object

MAGIC = b"ARROW1"
TAIL_BYTES = 64 << 10
BLOCK_BYTES = 1 << 20
"""A block is as many record batches as begin within this many bytes."""
BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])
DICTIONARIES_FIELD, BATCHES_FIELD = 2, 3


class ArrowFile:
    """A file of the Arrow IPC file format, uncompressed or with lz4 or zstd bodies."""

    def __init__(self, listing: Listing, item: Object, column: str) -> None:
        self._listing = listing
        self._item = item
        self._column = column
        tail = read_tail(listing, item, TAIL_BYTES)
        if not tail.endswith(MAGIC):
            raise ValueError(f"{item.url} is not an Arrow IPC file, or was cut off: it does not end with {MAGIC!r}")
        (length,) = struct.unpack_from("<i", tail, len(tail) - len(MAGIC) - 4)
        needed = length + len(MAGIC) + 4
        if length <= 0 or needed + len(MAGIC) + 2 > item.size:
            raise ValueError(f"{item.url} has a damaged footer: it says that it is {length} bytes long")
        if needed > len(tail):
            tail = listing.read(item, item.size - needed, item.size)
        footer = tail[len(tail) - needed : len(tail) - len(MAGIC) - 4]
        # pyarrow looks at nothing but the magic numbers and the footer until a batch is asked for.
        try:
            self._schema = pa.ipc.open_file(pa.BufferReader(MAGIC + b"\0\0" + tail[-needed:])).schema
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{item.url} has a damaged footer: {error}") from error
        check_column(self._schema, column, item.url)
        self._dictionaries = _blocks(footer, DICTIONARIES_FIELD)
        batches = _blocks(footer, BATCHES_FIELD)
        self._numbers = np.argsort(batches["offset"], kind="stable")
        batches = batches[self._numbers]
        self._begins = batches["offset"]
        self._ends = batches["offset"] + batches["metadata"] + batches["body"]
        if len(batches) and (self._begins[0] < 0 or np.any(self._ends > item.size)):
            raise ValueError(f"{item.url} has a damaged footer: a record batch lies outside the file")
        self._firsts = _runs(self._begins)
        starts = self._begins[self._firsts[1:-1]]
        self.spans = np.concatenate([[0], starts, [item.size]]) if len(batches) else np.array([0])
        self.groups = np.arange(len(self.spans) - 1)

    def size(self, block: int) -> int:
        """Gives about how many bytes reading a block takes in memory."""
        return int(self.spans[block + 1] - self.spans[block])

    def read(self, block: int) -> Lists:
        """Reads a block."""
        first, last = self._firsts[block], self._firsts[block + 1]
        start, end = int(self._begins[first]), int(self._ends[last - 1])
        data = pa.py_buffer(self._listing.read(self._item, start, end))
        reader = pa.ipc.MessageReader.open_stream(data)
        if len(self._dictionaries):
            reader = self._with_dictionaries(data)
        index = self._schema.get_field_index(self._column)
        parts = []
        for number in self._numbers[first:last].tolist():
            if isinstance(reader, pa.ipc.RecordBatchStreamReader):
                batch = reader.read_next_batch()
            else:
                batch = pa.ipc.read_record_batch(reader.read_next_message(), self._schema)
            parts.append(to_lists(batch.column(index), self._column, number * ROWS_PER_BATCH))
        lists = join(parts)
        if lists.values.nbytes * 2 < data.size:  # the rest of the block is other columns: let go of it
            lists = replace(lists, values=lists.values.copy())
        return lists

    def _with_dictionaries(self, data: pa.Buffer) -> pa.ipc.RecordBatchStreamReader:
        """Makes a stream of the schema, the dictionaries and a block."""
        parts = [self._schema.serialize()]
        for block in self._dictionaries:
            end = block["offset"] + block["metadata"] + block["body"]
            parts.append(self._listing.read(self._item, int(block["offset"]), int(end)))
        return pa.ipc.open_stream(pa.py_buffer(b"".join([*map(bytes, parts), data])))


def read_tail(listing: Listing, item: Object, size: int) -> bytes | bytearray:
    """Reads the last ``size`` bytes of an object, or all of it."""
    return listing.read(item, max(0, item.size - size), item.size)


def _blocks(footer: bytes | bytearray, field: int) -> np.ndarray:
    """Gives a vector of Block structs out of the footer's flatbuffer."""
    (root,) = struct.unpack_from("<I", footer, 0)
    table = root - struct.unpack_from("<i", footer, root)[0]
    slot = 4 + 2 * field
    (table_size,) = struct.unpack_from("<H", footer, table)
    offset = struct.unpack_from("<H", footer, table + slot)[0] if slot < table_size else 0
    if not offset:
        return np.empty(0, BLOCK)
    vector = root + offset
    vector += struct.unpack_from("<I", footer, vector)[0]
    return np.frombuffer(bytes(footer), BLOCK, struct.unpack_from("<I", footer, vector)[0], vector + 4)


def _runs(begins: np.ndarray) -> list[int]:
    """Gives the first batch of each block, and, last, the number of batches."""
    firsts, limit = [], -1
    for index, begin in enumerate(begins.tolist()):
        if begin >= limit:
            firsts.append(index)
            limit = begin + BLOCK_BYTES
    return [*firsts, len(begins)]
