"""Lists: rows of integers, taken out of Arrow arrays whatever their layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

ROWS_PER_BATCH = 1 << 32
Columns = str | tuple[str, ...]
"""A column of token ids, or columns of anything, which are read as dicts."""
LIST_TYPES = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
VIEW_TYPES = (pa.types.is_list_view, pa.types.is_large_list_view)


LINES = tuple(f".{form}{codec}" for form in ("jsonl", "ndjson", "json") for codec in ("", ".gz", ".zst"))
"""Endings of files whose rows are counted in bytes."""


@dataclass(frozen=True, eq=False)
class Lists:
    """Rows of integers: number i is ``values[begins[i]:ends[i]]``, empty where it was null.

    Where columns were asked for by a tuple, the values are dicts, one a row.

    ``rows`` says where each stands in its file: its row, or what else is stable there and known without reading the
    rows before it (docs/formats.md says what, for each format).
    """

    values: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray], rows: Sequence[int] | np.ndarray) -> "Lists":
        """Puts one array of integers for each row end to end.

        Args:
            arrays: one-dimensional arrays of any integer types.
            rows: where each stands in its file.

        Raises:
            ValueError: naming the row, if an array has another shape or type, or an id above 2**63 - 1.
        """
        for array, row in zip(arrays, rows, strict=True):
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise ValueError(
                    f"token ids must be integers in one dimension, got {array.dtype} of {array.shape} in row {row}"
                )
        ends = np.cumsum([0, *(len(array) for array in arrays)])
        kinds = {array.dtype for array in arrays if len(array)}
        kind = kinds.pop() if len(kinds) == 1 else np.dtype(np.int64)
        if kinds and any(int(array.max()) >= 1 << 63 for array in arrays if len(array) and array.dtype == np.uint64):
            raise ValueError(f"token ids must be below {1 << 63}: is it the right column and vocabulary?")
        parts = [array.astype(kind.newbyteorder("="), copy=False) for array in arrays if len(array)]
        values = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return cls(values, ends[:-1], ends[1:], np.array(rows, np.int64))

    @classmethod
    def of_dicts(cls, columns: Mapping[str, Sequence[Any]], rows: Sequence[int] | np.ndarray) -> "Lists":
        """Makes a dict for each row; one whose values are all null or empty is an empty row.

        Args:
            columns: a value for each row, by name.
            rows: where each stands in its file.
        """
        values, sizes = np.empty(len(rows), object), np.empty(len(rows), np.int64)
        for index, row in enumerate(zip(*columns.values(), strict=True)):
            values[index] = dict(zip(columns, row, strict=True))
            sizes[index] = not all(map(_is_empty, row))
        begins = np.arange(len(rows))
        return cls(values, begins, begins + sizes, np.array(rows, np.int64))


def _is_empty(value: Any) -> bool:
    return value is None or (hasattr(value, "__len__") and not len(value))


def is_list_of_integers(kind: pa.DataType) -> bool:
    """Tells whether a column of this type can be read as rows of integers."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not any(check(kind) for check in LIST_TYPES + VIEW_TYPES):
        return False
    inner = kind.value_type
    return bool(pa.types.is_integer(inner.value_type if pa.types.is_dictionary(inner) else inner))


def check_column(schema: pa.Schema, column: str, url: str) -> None:
    """Checks that a file has a column of lists of integers of that name.

    Raises:
        LookupError: if there is no such column; names those that could be read.
        TypeError: if it holds something else.
    """
    readable = [field.name for field in schema if is_list_of_integers(field.type)]
    others = f"columns of integer lists: {', '.join(map(repr, readable)) or 'none'}"
    if column not in schema.names:
        raise LookupError(f"no column {column!r} in {url}: give column, one of its {others}")
    kind = schema.field(column).type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        raise TypeError(
            f"column {column!r} of {url} holds text, not token ids: tokenize it first, or give "
            f"column, one of its {others}"
        )
    if not is_list_of_integers(kind):
        raise TypeError(
            f"column {column!r} of {url} holds {kind}, not lists of integers: give column, one of its {others}"
        )


def check_columns(schema: pa.Schema, columns: tuple[str, ...], url: str) -> None:
    """Checks that a file has the columns.

    Raises:
        LookupError: if it has not; names those that it has.
    """
    for column in columns:
        if column not in schema.names:
            raise LookupError(
                f"no column {column!r} in {url}: give columns, some of {', '.join(map(repr, schema.names))}"
            )


def to_dicts(table: pa.RecordBatch | pa.Table, columns: tuple[str, ...], first_row: int) -> Lists:
    """Takes the columns of rows out of a table: lists of integers as arrays, the rest as Python's own values."""
    table.validate(full=True)
    values = {column: _to_values(table.column(column), column, first_row) for column in columns}
    return Lists.of_dicts(values, np.arange(first_row, first_row + len(table)))


def _to_values(array: pa.Array | pa.ChunkedArray, column: str, first_row: int) -> list[Any]:
    if not is_list_of_integers(array.type):
        values: list[Any] = array.to_pylist()
        return values
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    found: list[Any] = []
    for chunk in chunks:
        lists = to_lists(chunk, column, first_row + len(found))
        edges = zip(lists.begins.tolist(), lists.ends.tolist(), strict=True)
        found += [lists.values[begin:end] for begin, end in edges]
    return found


def to_lists(array: pa.Array, column: str, first_row: int) -> Lists:
    """Takes rows out of an array, of which the first is ``first_row``; copies only where Arrow's layout demands it.

    Raises:
        ValueError: if there is a null inside a row.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    array.validate(full=True)  # damaged offsets would be read outside the buffer
    num_rows = len(array)
    begins, ends = _edges(array)
    values = array.values
    if array.null_count:
        ends = np.where(array.is_valid().to_numpy(zero_copy_only=False), ends, begins)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if values.null_count:
        _check_nulls(values, begins, ends, column, first_row)
        values = values.fill_null(0)
    return Lists(values.to_numpy(), begins, ends, np.arange(first_row, first_row + num_rows))


def join(parts: list[Lists]) -> Lists:
    """Joins rows end to end; values are copied if there is more than one part."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Lists.of([], [])
    shifts = np.cumsum([0, *(len(part.values) for part in parts)])
    return Lists(
        _concatenate([part.values for part in parts]),
        np.concatenate([part.begins + shift for part, shift in zip(parts, shifts, strict=False)]),
        np.concatenate([part.ends + shift for part, shift in zip(parts, shifts, strict=False)]),
        np.concatenate([part.rows for part in parts]),
    )


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    """Joins arrays; int64 and uint64 would become floats."""
    return np.concatenate([array for array in arrays if len(array)] or arrays)


def check_ids(lists: Lists, vocab_size: int | None, url: str) -> Lists:
    """Checks token ids, and gives them in the narrowest of uint16, int32 and int64 that holds all of them.

    Args:
        lists: the rows.
        vocab_size: ids must be below it, if it is given.
        url: the file, for messages.

    Raises:
        ValueError: naming the id and its row, if it is negative, not below vocab_size, or above 2**63 - 1.
    """
    limit = (1 << 63) if vocab_size is None else vocab_size
    values, top = lists.values, 0
    if len(lists.rows):
        begin, end = int(lists.begins.min()), int(lists.ends.max())
        if begin < end:
            top = int(values[begin:end].view(f"u{values.dtype.itemsize}").max())  # a negative id is a huge one
            if top >= min(limit, 1 << (8 * values.dtype.itemsize - (values.dtype.kind == "i"))):
                _check_each(lists, limit, url)
                top = limit - 1  # what is out of range belongs to no row
    return replace(lists, values=_narrow(values, top))


def _narrow(values: np.ndarray, top: int) -> np.ndarray:
    if top < 1 << 16:
        return values.astype(np.uint16, copy=False)
    if top >= 1 << 31:
        return values.astype(np.int64, copy=False)
    return values.view(np.int32) if values.dtype.itemsize == np.dtype(np.int32).itemsize else values.astype(np.int32)


def _check_each(lists: Lists, limit: int, url: str) -> None:
    for begin, end, row in zip(lists.begins.tolist(), lists.ends.tolist(), lists.rows.tolist(), strict=True):
        tokens = lists.values[begin:end]
        if not len(tokens):
            continue
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < limit:
                condition = "must not be negative" if token < 0 else f"must be below {limit}"
                where = describe_row(row, url)
                raise ValueError(
                    f"token ids {condition}, got {token} in {where}: is it the right column and vocabulary?"
                )


def describe_row(row: int, url: str) -> str:
    """Puts the number of a row of a file into words."""
    if url.lower().endswith(LINES):
        return f"the line at byte {row}"
    batch, row_in_batch = divmod(row, ROWS_PER_BATCH)
    return f"row {row_in_batch} of record batch {batch}" if batch else f"row {row}"


def _edges(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Gives where each row begins and ends in the array's values."""
    if any(check(array.type) for check in VIEW_TYPES):
        begins = array.offsets.to_numpy().astype(np.int64)[: len(array)]
        return begins, begins + array.sizes.to_numpy().astype(np.int64)
    if pa.types.is_fixed_size_list(array.type):
        offsets = (array.offset + np.arange(len(array) + 1, dtype=np.int64)) * array.type.list_size
    else:
        offsets = array.offsets.to_numpy().astype(np.int64, copy=False)
    return offsets[:-1], offsets[1:]


def _check_nulls(values: pa.Array, begins: np.ndarray, ends: np.ndarray, column: str, first_row: int) -> None:
    before = np.concatenate([[0], np.cumsum(values.is_null().to_numpy(zero_copy_only=False))])
    rows = np.flatnonzero(before[ends] > before[begins])
    if len(rows):
        where = describe_row(first_row + int(rows[0]), "")
        raise ValueError(f"column {column!r} has a null inside the list of {where}: a token id is missing")
