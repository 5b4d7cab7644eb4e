"""Parquet files: row groups as blocks, or parts of those that are too big for one.

pyarrow's own reading of a row group is one request after another, of whatever size; here the bytes of a column chunk
are one ranged read, which may run ahead, and pyarrow decodes them from memory.
"""

import io
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ibm_nodes.formats.arrow import read_tail
from ibm_nodes.formats.lists import Lists, check_column, join, to_lists
from ibm_nodes.listing import Listing
from ibm_nodes.storage import Object

MAGIC = b"PAR1"
TAIL_BYTES = 64 << 10
PART_BYTES = 4 << 20
"""Row groups whose column is larger than this, decoded, are read in parts of about this size."""
WINDOW_BYTES = 4 << 20
BUFFER_BYTES = 1 << 20
KEPT_DECODERS = 4


class ParquetFile:
    """A Parquet file, of any codec and any size of row groups."""

    def __init__(self, listing: Listing, item: Object, column: str) -> None:
        self._listing = listing
        self._item = item
        self._column = column
        self._metadata = _metadata(listing, item)
        schema = self._metadata.schema.to_arrow_schema()
        check_column(schema, column, item.url)
        self._leaf = [
            index
            for index in range(self._metadata.num_columns)
            if self._metadata.schema.column(index).path.split(".")[0] == column
        ][0]
        spans, groups, self._rows, self._firsts = [0], [], [], [0]
        num_groups = self._metadata.num_row_groups
        begins = [0, *(self._begin(group) for group in range(1, num_groups)), item.size]
        for group in range(num_groups):
            num_rows = self._metadata.row_group(group).num_rows
            decoded = self._metadata.row_group(group).column(self._leaf).total_uncompressed_size
            self._firsts.append(self._firsts[-1] + num_rows)
            num_parts = max(1, min(num_rows, -(-decoded // PART_BYTES)))
            for part in range(num_parts):
                spans.append(begins[group] + (begins[group + 1] - begins[group]) * (part + 1) // num_parts)
                groups.append(group)
                self._rows.append((num_rows * part // num_parts, num_rows * (part + 1) // num_parts))
        self.spans = np.array(spans, np.int64)
        self.groups = np.array(groups, np.int64)
        self._decoders: OrderedDict[tuple[int, int], Iterator[pa.RecordBatch]] = OrderedDict()
        self._lock = threading.Lock()

    def size(self, block: int) -> int:
        """Gives about how many bytes reading a block takes in memory."""
        chunk = self._metadata.row_group(int(self.groups[block])).column(self._leaf)
        return int(min(PART_BYTES, chunk.total_uncompressed_size) + min(WINDOW_BYTES, chunk.total_compressed_size))

    def read(self, block: int) -> Lists:
        """Reads a block."""
        group, (first, last) = int(self.groups[block]), self._rows[block]
        if last - first == self._metadata.row_group(group).num_rows:
            table = self._open(group, whole=True).read_row_group(group, [self._column], use_threads=False)
            return self._lists(table, self._firsts[group])
        decoder, row = self._decoder(group, first)
        batches = []
        while row < last:
            batch = next(decoder)
            batches.append(batch.slice(max(0, first - row), last - max(first, row)))
            row += len(batch)
            if row > last:
                raise ValueError(f"{self._item.url}: row group {group} does not decode in the parts asked for")
        with self._lock:
            self._decoders[group, last] = decoder
            while len(self._decoders) > KEPT_DECODERS:
                self._decoders.popitem(last=False)
        return self._lists(pa.Table.from_batches(batches), self._firsts[group] + first)

    def _lists(self, table: pa.Table, row: int) -> Lists:
        parts = []
        for chunk in table.column(self._column).chunks:
            parts.append(to_lists(chunk, self._column, row))
            row += len(chunk)
        return join(parts)

    def _decoder(self, group: int, first: int) -> tuple[Iterator[pa.RecordBatch], int]:
        """Gives an iterator that stands at a row of a group, or at the group's first row."""
        with self._lock:
            decoder = self._decoders.pop((group, first), None)
        if decoder is not None:
            return decoder, first
        return self._batches(group), 0

    def _batches(self, group: int) -> Iterator[pa.RecordBatch]:
        file = self._open(group, whole=False)
        rows = [part for part, of in zip(self._rows, self.groups, strict=True) if of == group]
        size = max(last - first for first, last in rows)
        return _cut(file.iter_batches(size, [group], [self._column], use_threads=False), [last for _, last in rows])

    def _open(self, group: int, *, whole: bool) -> pq.ParquetFile:
        begin, end = self._chunk(group)
        window = _Window(self._listing, self._item, begin, end, end - begin if whole else WINDOW_BYTES)
        # With a buffer pyarrow reads a column as it decodes it; without, it reads all of it first.
        buffer_size = 0 if whole else BUFFER_BYTES
        file = pa.PythonFile(window, mode="r")
        return pq.ParquetFile(file, metadata=self._metadata, pre_buffer=False, buffer_size=buffer_size)

    def _chunk(self, group: int) -> tuple[int, int]:
        chunk = self._metadata.row_group(group).column(self._leaf)
        begin = _chunk_begin(chunk)
        if begin < 0 or begin + chunk.total_compressed_size > self._item.size:
            raise ValueError(f"{self._item.url} has a damaged footer: row group {group} lies outside the file")
        return begin, begin + chunk.total_compressed_size

    def _begin(self, group: int) -> int:
        metadata = self._metadata.row_group(group)
        return int(min(_chunk_begin(metadata.column(index)) for index in range(metadata.num_columns)))


class _Window(io.RawIOBase):
    """A file object over a range of an object, fetched in windows and held one at a time."""

    def __init__(self, listing: Listing, item: Object, begin: int, end: int, size: int) -> None:
        self._listing, self._item = listing, item
        self._begin, self._end, self._size = begin, end, size
        self._at, self._data, self._position = begin, b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._item.size

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._item.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes | memoryview:
        begin = self._position
        end = self._item.size if size < 0 else min(begin + size, self._item.size)
        if not self._at <= begin <= end <= self._at + len(self._data):
            self._fetch(begin, end)
        self._position = end
        return memoryview(self._data)[begin - self._at : end - self._at]

    def _fetch(self, begin: int, end: int) -> None:
        until = max(end, min(begin + self._size, self._end))
        kept = (
            memoryview(self._data)[max(0, begin - self._at) :]
            if self._at <= begin < self._at + len(self._data)
            else b""
        )
        data = self._listing.read(self._item, begin + len(kept), until)
        self._data, self._at = bytes(kept) + data if kept else bytes(data), begin


def _metadata(listing: Listing, item: Object) -> pq.FileMetaData:
    tail = read_tail(listing, item, TAIL_BYTES)
    if not tail.endswith(MAGIC):
        raise ValueError(f"{item.url} is not a Parquet file, or was cut off: it does not end with {MAGIC!r}")
    needed = struct.unpack_from("<i", tail, len(tail) - 8)[0] + 8
    if needed <= 8 or needed + len(MAGIC) > item.size:
        raise ValueError(f"{item.url} has a damaged footer: it says that it is {needed - 8} bytes long")
    if needed > len(tail):
        tail = listing.read(item, item.size - needed, item.size)
    try:
        return pq.ParquetFile(pa.BufferReader(MAGIC + tail[-needed:])).metadata
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{item.url} has a damaged footer: {error}") from error


def _chunk_begin(chunk: pq.ColumnChunkMetaData) -> int:
    first = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        first = min(first, chunk.dictionary_page_offset)
    return int(first)


def _cut(batches: Iterator[pa.RecordBatch], ends: list[int]) -> Iterator[pa.RecordBatch]:
    """Cuts batches at the given rows as well."""
    row, limits = 0, iter(ends)
    limit = next(limits)
    for batch in batches:
        while len(batch):
            size = min(len(batch), limit - row)
            yield batch.slice(0, size)
            batch = batch.slice(size)
            row += size
            if row == limit:
                limit = next(limits, row + (1 << 62))
