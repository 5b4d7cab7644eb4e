"""Parquet files: runs of row groups as blocks, or parts of those that are too big for one.

pyarrow's own reading of a row group is one request after another, of whatever size; here the bytes of a column chunk
are one ranged read, which may run ahead, and pyarrow decodes them from memory.
"""

import io
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ibm_nodes.formats.arrow import read_tail
from ibm_nodes.formats.lists import Columns, Lists, check_column, check_columns, join, to_dicts, to_lists
from ibm_nodes.formats.where import Where
from ibm_nodes.listing import StoredObject
from ibm_nodes.read_ahead import POLL_SECONDS, check_stopped

MAGIC = b"PAR1"
TAIL_BYTES = 64 << 10
BLOCK_BYTES = 1 << 20
"""A block is as many row groups as begin within this many stored bytes of the column, so that a request is worth it."""
RUN_BYTES = 3 << 19
"""Row groups that are more than this together, decoded, are no block: a process may hold a thousand blocks."""
PART_BYTES = 4 << 20
"""Row groups whose column is larger than this, decoded, are read in parts of about this size."""
WIDTHS = {"INT32": 4, "INT64": 8}
WINDOW_BYTES = 4 << 20
BUFFER_BYTES = 1 << 20
MAX_WASTE = 1.1
"""Row groups are read in one request if that fetches at most so many times the bytes of the column."""
KEPT_DECODERS = 4


class ParquetFile:
    """A Parquet file, of any codec and any size of row groups."""

    splittable = True

    def __init__(self, file: StoredObject, column: Columns, where: Where | None = None) -> None:
        self._file, self._column, self._where = file, column, where
        self._metadata = _metadata(file)
        schema = self._metadata.schema.to_arrow_schema()
        if isinstance(column, tuple):
            check_columns(schema, column, file.url)
        else:
            check_column(schema, column, file.url)
        columns = column if isinstance(column, tuple) else (column,)
        self._conditions = [] if where is None else where.columns(schema, file.url)
        self._columns = list(dict.fromkeys((*columns, *self._conditions)))  # those that are read
        self._leaves = [
            index
            for index in range(self._metadata.num_columns)
            if self._metadata.schema.column(index).path.split(".")[0] in self._columns
        ]
        self._places = self._leaves if _fault(file, self._metadata, None) else range(self._metadata.num_columns)
        fault = _fault(file, self._metadata, self._columns) if self._places is self._leaves else None
        if fault is not None:
            raise ValueError(f"{file.url} has a damaged footer: {fault}") from fault
        kinds = {self._metadata.schema.column(leaf).physical_type for leaf in self._leaves}
        # (64-bit ids are kept in 32 bits.)
        self._run_bytes = RUN_BYTES * (2 if kinds == {"INT64"} and not isinstance(column, tuple) else 1)
        self._runs = list(self._find_runs())
        begins = [self._begin(run.groups[0]) for run in self._runs]
        self.spans = np.array(_spans(self._runs, begins, file.size), np.int64)
        self.groups = np.array([run.groups[0] for run in self._runs], np.int64)
        self._decoders: OrderedDict[tuple[int, int], Iterator[pa.RecordBatch]] = OrderedDict()
        self._lock = threading.Lock()

    def size(self, block: int) -> int:
        """Gives about how many bytes reading a block takes in memory."""
        decoded = sum(self._decoded_size(group) for group in self._runs[block].groups)
        return int(min(PART_BYTES + WINDOW_BYTES, 2 * decoded))

    def read(self, block: int) -> Lists:
        """Reads a block."""
        run = self._runs[block]
        if run.last - run.first == run.num_rows:
            return self._lists(
                self._open(run.groups).read_row_groups(run.groups, self._columns, use_threads=False), run.row
            )
        while not self._lock.acquire(
            timeout=POLL_SECONDS
        ):  # one after the other: each goes on where the last one ended
            check_stopped()
        try:
            return self._lists(pa.Table.from_batches(self._decode(run)), run.row + run.first)
        finally:
            self._lock.release()

    def _find_runs(self) -> Iterator["_Run"]:
        """Yields runs of small row groups, and parts of large ones."""
        row, open_run = 0, _Run([], 0, 0, 0, 0)
        stored = decoded = 0
        for group in range(self._metadata.num_row_groups):
            num_rows, size = self._metadata.row_group(group).num_rows, self._decoded_size(group)
            full = stored >= BLOCK_BYTES or decoded + size > self._run_bytes or size > PART_BYTES
            if open_run.groups and full:
                yield open_run
                open_run, stored, decoded = _Run([], 0, 0, 0, 0), 0, 0
            if size > PART_BYTES and num_rows > 1:
                num_parts = min(num_rows, -(-size // PART_BYTES))
                for part in range(num_parts):
                    edges = num_rows * part // num_parts, num_rows * (part + 1) // num_parts
                    yield _Run([group], *edges, row, num_rows)
            elif num_rows:
                begun = open_run if open_run.groups else _Run([], 0, 0, row, 0)
                total = begun.num_rows + num_rows
                open_run = _Run([*begun.groups, group], 0, total, begun.row, total)
                stored += self._stored_size(group)
                decoded += size
            row += num_rows
        if open_run.groups:
            yield open_run

    def _decode(self, run: "_Run") -> list[pa.RecordBatch]:
        """Decodes a part of a row group, from where the last part ended or from the group's first row."""
        (group,) = run.groups
        decoder, row = self._decoders.pop((group, run.first), None), run.first
        if decoder is None:
            decoder, row = self._batches(group), 0
        batches = []
        while row < run.last:
            batch = next(decoder)
            batches.append(batch.slice(max(0, run.first - row)))
            row += len(batch)
            if row > run.last:
                raise ValueError(f"{self._file.url}: row group {group} does not decode in the parts asked for")
        self._decoders[group, run.last] = decoder
        while len(self._decoders) > KEPT_DECODERS:
            self._decoders.popitem(last=False)
        return batches

    def _lists(self, table: pa.Table, row: int) -> Lists:
        lists = self._rows(table, row)
        return lists if self._where is None else self._where.cut(lists, table.select(self._conditions), self._file.url)

    def _rows(self, table: pa.Table, row: int) -> Lists:
        if isinstance(self._column, tuple):
            return to_dicts(table, self._column, row)
        parts = []
        for chunk in table.column(self._column).chunks:
            parts.append(to_lists(chunk, self._column, row))
            row += len(chunk)
        return _copy(join(parts))

    def _batches(self, group: int) -> Iterator[pa.RecordBatch]:
        ends = [run.last for run in self._runs if run.groups == [group]]
        size = max(run.last - run.first for run in self._runs if run.groups == [group])
        file = self._open([group], buffer_size=BUFFER_BYTES)
        return _cut(file.iter_batches(size, [group], self._columns, use_threads=False), ends)

    def _open(self, groups: list[int], *, buffer_size: int = 0) -> pq.ParquetFile:
        """Opens the file for some row groups; with a buffer pyarrow reads them as it decodes, else each in one go."""
        chunks = [chunk for group in groups for chunk in self._chunks(group)]
        begin, end = min(first for first, _ in chunks), max(last for _, last in chunks)
        wanted = sum(last - first for first, last in chunks)
        whole = end - begin if end - begin < wanted * MAX_WASTE else 0  # 0: just what pyarrow asks for, a chunk each
        # (Chunks of several columns are decoded side by side: one window would be fetched again and again.)
        window = (WINDOW_BYTES if len(chunks) == 1 else 0) if buffer_size else whole
        file = pa.PythonFile(_Window(self._file, begin, end, window), mode="r")
        return pq.ParquetFile(
            file,
            metadata=self._metadata,
            pre_buffer=False,
            buffer_size=buffer_size,
            page_checksum_verification=True,  # of pages that have one
        )

    def _decoded_size(self, group: int) -> int:
        """Gives about how many bytes the columns of a group take in memory; what repeats takes far fewer on disk."""
        chunks = [self._metadata.row_group(group).column(leaf) for leaf in self._leaves]
        return sum(
            max(chunk.total_uncompressed_size, WIDTHS.get(chunk.physical_type, 0) * chunk.num_values)
            for chunk in chunks
        )

    def _stored_size(self, group: int) -> int:
        metadata = self._metadata.row_group(group)
        return sum(metadata.column(leaf).total_compressed_size for leaf in self._leaves)

    def _chunks(self, group: int) -> list[tuple[int, int]]:
        """Gives where the columns of a group lie in the file."""
        chunks = []
        for leaf in self._leaves:
            chunk = self._metadata.row_group(group).column(leaf)
            begin, end = _chunk_begin(chunk), _chunk_begin(chunk) + chunk.total_compressed_size
            if begin < 0 or end > self._file.size:
                raise ValueError(f"{self._file.url} has a damaged footer: row group {group} lies outside the file")
            chunks.append((begin, end))
        return chunks

    def _begin(self, group: int) -> int:
        metadata = self._metadata.row_group(group)
        return int(min(_chunk_begin(metadata.column(index)) for index in self._places))


class _Run(NamedTuple):
    """A block: whole row groups, or rows [first, last) of one; ``row`` is where the groups begin in the file."""

    groups: list[int]
    first: int
    last: int
    row: int
    num_rows: int


def _spans(runs: list[_Run], begins: list[int], size: int) -> list[int]:
    """Gives the edges of blocks in bytes: a part of a group has its share of the group's bytes."""
    ends = [*begins[1:], size] if begins else []
    for index in range(len(runs) - 2, -1, -1):  # the parts of a group all end where the group does
        if runs[index].groups == runs[index + 1].groups:
            ends[index] = ends[index + 1]
    begins = [0 if runs[0].groups == run.groups else begin for run, begin in zip(runs, begins, strict=True)]
    edges = [
        begin + (end - begin) * run.first // run.num_rows for run, begin, end in zip(runs, begins, ends, strict=True)
    ]
    return [*edges, size] if runs else [0]


class _Window(io.RawIOBase):
    """A file object over a range of an object, fetched in windows and held one at a time."""

    def __init__(self, file: StoredObject, begin: int, end: int, size: int) -> None:
        self._file = file
        self._begin, self._end, self._size = begin, end, size
        self._at, self._data, self._position = begin, b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._file.size

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes | memoryview:
        begin = self._position
        end = self._file.size if size < 0 else min(begin + size, self._file.size)
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
        data = self._file.read(begin + len(kept), until)
        self._data, self._at = bytes(kept) + data if kept else bytes(data), begin


def _copy(lists: Lists) -> Lists:
    """Copies what the rows are of, so that pyarrow's allocator, which holds half as much again, can let go of it."""
    if not len(lists.rows):
        return lists
    low, high = int(lists.begins.min()), int(lists.ends.max())
    return Lists(lists.values[low:high].copy(), lists.begins - low, lists.ends - low, lists.rows)


class _Touched(Exception):
    """Something was read."""


class _Nothing(_Window):
    """A window that is never read from: who tries is told so."""

    def read(self, size: int = -1) -> bytes:
        raise _Touched


def _fault(file: StoredObject, metadata: pq.FileMetaData, columns: list[str] | None) -> Exception | None:
    """Tells what is wrong with the metadata of chunks, of some columns or all.

    Asked for one that is damaged, pyarrow aborts the process; where it begins to read it, that is an error.
    """
    source = pa.PythonFile(_Nothing(file, 0, 0, 0), mode="r")
    reader = pq.ParquetFile(source, metadata=metadata, pre_buffer=False, buffer_size=1)
    for group in range(metadata.num_row_groups):
        try:
            reader.read_row_groups([group], columns, use_threads=False)
        except _Touched:
            continue
        except (pa.ArrowException, OSError, ValueError) as error:
            return error
    return None


def _metadata(file: StoredObject) -> pq.FileMetaData:
    tail = read_tail(file, TAIL_BYTES)
    if not tail.endswith(MAGIC):
        raise ValueError(f"{file.url} is not a Parquet file, or was cut off: it does not end with {MAGIC!r}")
    needed = struct.unpack_from("<i", tail, len(tail) - 8)[0] + 8
    if needed <= 8 or needed + len(MAGIC) > file.size:
        raise ValueError(f"{file.url} has a damaged footer: it says that it is {needed - 8} bytes long")
    if needed > len(tail):
        tail = file.read(file.size - needed, file.size)
    try:
        return pq.ParquetFile(pa.BufferReader(MAGIC + tail[-needed:])).metadata
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file.url} has a damaged footer: {error}") from error


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
