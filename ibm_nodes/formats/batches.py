"""Record batches of an Arrow file or stream to rows, many small ones at a time.

Where batches are as small as a document, pyarrow's cost of each (some 10 microseconds) is far above that of its data.
Batches of one writer have metadata that differs in numbers only; those are decoded side by side with numpy. The others
(compressed, with nulls, of another layout, damaged) go through pyarrow one by one.
"""

import itertools
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ibm_nodes.formats.flatbuffers import Table
from ibm_nodes.formats.lists import (
    ROWS_PER_BATCH,
    Columns,
    Lists,
    check_column,
    check_columns,
    join,
    to_dicts,
    to_lists,
)
from ibm_nodes.formats.where import Where

PLACE = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])
"""A record batch: where it begins, the bytes of its metadata with their prefix, and those of its body."""
PREFIX_BYTES = 8
CONTINUATION = b"\xff\xff\xff\xff"
RECORD_BATCH = 3
DAMAGED_OFFSETS = "record batches have damaged offsets: a list ends before it begins or outside its values"


class BatchDecoder:
    """Takes one column, or the rows of several, out of record batches.

    A column of integer lists has a document in each row. In a column of integers each batch is a document.

    Attributes:
        is_easy: whether all batches so far were decoded side by side, without a copy of pyarrow's.

    Raises:
        LookupError, TypeError: if there is no such column, or it holds something else, or rows cannot be chosen.
    """

    def __init__(self, schema: pa.Schema, column: Columns, url: str, where: Where | None = None) -> None:
        self._schema, self._column, self._url, self._where = schema, column, url, where
        self._plan: _Plan | None = None
        self.is_easy = where is None
        self._conditions = [] if where is None else where.columns(schema, url)
        if isinstance(column, tuple):
            check_columns(schema, column, url)
            return
        if column not in schema.names or not pa.types.is_integer(schema.field(column).type):
            check_column(schema, column, url)
        self._index = schema.get_field_index(column)
        if where is None:
            self._plan = _plan(schema, self._index)
        elif pa.types.is_integer(schema.field(column).type):
            raise TypeError(
                f"where={where} cannot choose documents of {url}: each is a record batch of the column of integers "
                f"{column!r}, not a row"
            )

    def decode(
        self, data: bytes | bytearray, places: np.ndarray, numbers: np.ndarray, dictionaries: bytes = b""
    ) -> Lists:
        """Decodes batches.

        Args:
            data: bytes that hold them.
            places: where each lies in the data.
            numbers: the number of each in its file.
            dictionaries: messages that have to be read before them.
        """
        if self._where is not None:
            return self._wanted(self._where, data, places, numbers, dictionaries)
        if self._plan is None or dictionaries:
            self.is_easy = False
            return join(self._each(data, places, numbers, dictionaries))
        batches, easy = _side_by_side(data, places, self._plan)
        if easy.all():
            return self._plan.rows(data, batches, numbers)
        self.is_easy = False
        parts, first = [], 0
        for is_easy, run in itertools.groupby(easy.tolist()):
            last = first + len(list(run))
            if is_easy:
                parts.append(self._plan.rows(data, batches[first:last], numbers[first:last]))
            else:
                parts += self._each(data, places[first:last], numbers[first:last], b"")
            first = last
        return join(parts)

    def locate(self, metadata: bytes, body: int) -> np.void | None:
        """Finds a column of lists in a batch by its metadata; gives None if it is compressed or has nulls."""
        if self._plan is None or self._plan.offsets is None:
            return None
        places = np.array([(0, len(metadata), 0, body)], PLACE)
        batches, easy = _side_by_side(metadata, places, self._plan)
        return batches[0] if easy[0] else None

    def read_rows(
        self, read: Callable[[int, int], bytes | bytearray], place: np.void, rows: slice, number: int
    ) -> Lists:
        """Reads some rows of a batch.

        Args:
            read: reads bytes [begin, end), counted from where the batch begins.
            place: where the column is in it.
            rows: which rows.
            number: the number of the batch in its file.
        """
        plan = self._plan
        assert plan is not None and plan.offsets is not None
        if rows.start == rows.stop:
            return Lists.of([], [])
        width, size = plan.offsets.itemsize, plan.values.itemsize
        begin = int(place["offsets"])
        edges = np.frombuffer(read(begin + width * rows.start, begin + width * (rows.stop + 1)), plan.offsets)
        edges = edges.astype(np.int64)
        low, high = int(edges[0]), int(edges[-1])
        if low < 0 or high > place["child"] or np.any(np.diff(edges) < 0):
            raise ValueError(DAMAGED_OFFSETS)
        begin = int(place["values"])
        data = read(begin + size * low, begin + size * high) if low < high else b""
        edges -= low
        numbers = number * ROWS_PER_BATCH + np.arange(rows.start, rows.stop)
        return Lists(np.frombuffer(data, plan.values), edges[:-1], edges[1:], numbers)

    def _wanted(
        self, where: Where, data: bytes | bytearray, places: np.ndarray, numbers: np.ndarray, dictionaries: bytes
    ) -> Lists:
        batches = list(self._batches(data, places, numbers, dictionaries))
        parts = [self._lists(batch, number * ROWS_PER_BATCH) for batch, number in batches]
        names = pa.Table.from_batches([batch for batch, _ in batches], self._schema).select(self._conditions)
        return where.cut(join(parts), names, self._url)

    def _each(
        self, data: bytes | bytearray, places: np.ndarray, numbers: np.ndarray, dictionaries: bytes
    ) -> list[Lists]:
        batches = self._batches(data, places, numbers, dictionaries)
        return [self._lists(batch, number * ROWS_PER_BATCH) for batch, number in batches]

    def _batches(
        self, data: bytes | bytearray, places: np.ndarray, numbers: np.ndarray, dictionaries: bytes
    ) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yields the batches one by one, and the number of each in its file."""
        stream = None
        if dictionaries:
            messages = [_message(data, place) for place in places]
            stream = pa.ipc.open_stream(b"".join([self._schema.serialize(), dictionaries, *messages]))
        for place, number in zip(places, numbers.tolist(), strict=True):
            try:
                if stream is None:
                    batch = pa.ipc.read_record_batch(pa.ipc.read_message(_message(data, place)), self._schema)
                else:
                    batch = stream.read_next_batch()
            except (EOFError, StopIteration) as error:
                raise ValueError(f"record batch {number} cannot be read: it is damaged") from error
            yield batch, number

    def _lists(self, batch: pa.RecordBatch, row: int) -> Lists:
        if isinstance(self._column, tuple):
            return to_dicts(batch, self._column, row)
        array = batch.column(self._index)
        if not pa.types.is_integer(array.type):
            return to_lists(array, self._column, row)
        array.validate()
        if array.null_count:
            raise ValueError(f"column {self._column!r} has a null in record batch {row // ROWS_PER_BATCH}")
        edge = np.array([0, len(array)])
        return Lists(array.to_numpy(), edge[:1], edge[1:], np.array([row]))


class _Plan(NamedTuple):
    """Which of a batch's nodes and buffers are the column's."""

    node: int
    buffer: int
    num_nodes: int
    num_buffers: int
    values: np.dtype
    offsets: np.dtype | None  # None for a column of integers

    def rows(self, data: bytes | bytearray, batches: np.ndarray, numbers: np.ndarray) -> Lists:
        """Gives the rows of batches whose layout was checked."""
        if self.offsets is None:
            ends = np.cumsum(batches["length"])
            return Lists(
                self._values(data, batches, 0 * ends, batches["length"]),
                ends - batches["length"],
                ends,
                numbers * ROWS_PER_BATCH,
            )
        if len(batches) == 1:
            return self._rows_of_one(data, batches, int(numbers[0]))
        counts = batches["length"]
        firsts = np.cumsum(counts) - counts  # of each batch, the first of its rows among all
        row = np.arange(counts.sum()) - np.repeat(firsts, counts)
        offsets = np.frombuffer(data, self.offsets, len(data) // self.offsets.itemsize)
        at = np.repeat(batches["offsets"] // self.offsets.itemsize, counts) + row
        begins, ends = offsets[at].astype(np.int64), offsets[at + 1].astype(np.int64)
        full = np.flatnonzero(counts)
        low, high = np.zeros_like(counts), np.zeros_like(counts)
        low[full], high[full] = begins[firsts[full]], ends[firsts[full] + counts[full] - 1]
        if np.any(begins > ends) or np.any(low < 0) or np.any(high > batches["child"]):
            raise ValueError(DAMAGED_OFFSETS)
        shift = np.repeat(np.cumsum(high - low) - high, counts)
        number = np.repeat(numbers, counts)
        return Lists(
            self._values(data, batches, low, high), begins + shift, ends + shift, number * ROWS_PER_BATCH + row
        )

    def _rows_of_one(self, data: bytes | bytearray, batches: np.ndarray, number: int) -> Lists:
        count, begin = int(batches["length"][0]), int(batches["offsets"][0])
        edges = np.frombuffer(data, self.offsets, count + 1, begin) if count else np.zeros(1, self.offsets)
        edges = edges.astype(np.int64)
        low, high = int(edges[0]), int(edges[-1])
        if low < 0 or high > batches["child"][0] or np.any(edges[:-1] > edges[1:]):
            raise ValueError(DAMAGED_OFFSETS)
        edges -= low
        values = self._values(data, batches, np.array([low]), np.array([high]))
        first = number * ROWS_PER_BATCH
        return Lists(values, edges[:-1], edges[1:], np.arange(first, first + count))

    def _values(self, data: bytes | bytearray, batches: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Gives the values [low, high) of each batch, end to end; copies them if there is more than one batch."""
        view, size = memoryview(data), self.values.itemsize
        begins, ends = batches["values"] + size * low, batches["values"] + size * high
        if len(batches) == 1:
            return np.frombuffer(view[int(begins[0]) : int(ends[0])], self.values)
        parts = [view[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        return np.frombuffer(b"".join(parts), self.values)


EASY = np.dtype([("length", "<i8"), ("child", "<i8"), ("offsets", "<i8"), ("values", "<i8")])
"""The column in a batch: its rows (or integers), the values below its lists, and where offsets and values begin."""


def _side_by_side(data: bytes | bytearray, places: np.ndarray, plan: _Plan) -> tuple[np.ndarray, np.ndarray]:
    """Reads the metadata of many batches at once, and tells for which that was possible."""
    batches, easy = np.zeros(len(places), EASY), np.zeros(len(places), bool)
    for size in np.unique(places["metadata"]).tolist():
        which = np.flatnonzero(places["metadata"] == size)
        first = int(places["offset"][which[0]])
        template = bytes(data[first : first + size])
        try:
            numbers = _numbers(template, plan)
        except (struct.error, IndexError):
            numbers = None
        if numbers is None:
            continue
        metadata = np.frombuffer(data, np.uint8)[places["offset"][which][:, None] + np.arange(size)]
        fixed = np.ones(size, bool)
        for position in numbers:
            fixed[position : position + 8] = False
        same = (metadata[:, fixed] == np.frombuffer(template, np.uint8)[fixed]).all(axis=1)
        values = np.stack([metadata[:, at : at + 8].copy().view("<i8")[:, 0] for at in numbers])
        batches[which], right = _column(values, places[which], plan)
        easy[which] = same & right
    return batches, easy


def _numbers(template: bytes, plan: _Plan) -> list[int] | None:
    """Gives where a record batch's metadata has the numbers that may differ, or None if it has another layout."""
    message = Table.root(template, PREFIX_BYTES)
    batch = message.table(2)
    if template[:4] != CONTINUATION or message.integer(1, "B") != RECORD_BATCH or batch is None or batch.field(3):
        return None
    (nodes, num_nodes), (buffers, num_buffers) = batch.vector(1), batch.vector(2)
    if (num_nodes, num_buffers) != (plan.num_nodes, plan.num_buffers) or not batch.field(0) or not message.field(3):
        return None
    positions = [batch.field(0), message.field(3)]
    positions += [nodes + 8 * index for index in range(2 * num_nodes)]
    positions += [buffers + 8 * index for index in range(2 * num_buffers)]
    return positions if max(positions) + 8 <= len(template) else None


def _column(values: np.ndarray, places: np.ndarray, plan: _Plan) -> tuple[np.ndarray, np.ndarray]:
    """Gives the column's part of the numbers, and whether they can be true."""
    length, body = values[0], places["body"]
    nodes, buffers = values[2 : 2 + 2 * plan.num_nodes], values[2 + 2 * plan.num_nodes :]
    own, own_buffers = nodes[2 * plan.node :], buffers[2 * plan.buffer :]
    right = (values[1] == body) & (length >= 0) & (own[0] == length) & (own[1] == 0)
    batches = np.zeros(len(places), EASY)
    batches["length"] = batches["child"] = length
    begin, size = own_buffers[2], own_buffers[3]
    if plan.offsets is not None:
        batches["child"] = own[2]
        width = plan.offsets.itemsize
        right &= (own[2] >= 0) & (own[3] == 0) & (begin >= 0) & (size >= 0) & (begin + size <= body)
        right &= (length == 0) | (width * (length + 1) <= size)
        batches["offsets"] = places["offset"] + places["metadata"] + begin
        right &= batches["offsets"] % width == 0
        begin, size = own_buffers[6], own_buffers[7]
    right &= (begin >= 0) & (size >= 0) & (begin + size <= body) & (plan.values.itemsize * batches["child"] <= size)
    batches["values"] = places["offset"] + places["metadata"] + begin
    return batches, right


def _plan(schema: pa.Schema, index: int) -> _Plan | None:
    kind = schema.field(index).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    values = kind.value_type if is_list else kind
    counts = [_count(field.type) for field in schema]
    if not pa.types.is_integer(values) or None in counts:
        return None
    known = [count for count in counts if count is not None]
    node, buffer = (sum(count[part] for count in known[:index]) for part in (0, 1))
    total = sum(count[0] for count in known), sum(count[1] for count in known)
    offsets = np.dtype("<i8" if pa.types.is_large_list(kind) else "<i4") if is_list else None
    return _Plan(node, buffer, *total, np.dtype(values.to_pandas_dtype()), offsets)


def _count(kind: pa.DataType) -> tuple[int, int] | None:
    """Gives how many nodes and buffers a column of a type has, or None where that is not simple."""
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind):
        return 1, 3
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        below = _count(kind.value_type)
        return below and (1 + below[0], 2 + below[1])
    if pa.types.is_primitive(kind):  # numbers, bool, times
        return 1, 2
    return None


def _message(data: bytes | bytearray, place: np.void) -> memoryview:
    begin = int(place["offset"])
    return memoryview(data)[begin : begin + int(place["metadata"]) + int(place["body"])]
