"""JSON lines, plain or compressed.

Lines end at byte 0x0A and nowhere else. A row is the byte, of the decompressed text, at which its line begins. A value
of null is an empty row; a line without the column is an error, as is one that is no JSON object. Blank lines and a mark
at the beginning of the file (U+FEFF) are passed over.
"""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json

from ibm_nodes.formats.lists import Columns, Lists, to_lists
from ibm_nodes.formats.sequential import SequentialFile
from ibm_nodes.listing import StoredObject

BLOCK_BYTES = 2 << 20
LOOK_AHEAD_BYTES = 32 << 10
"""What is read past a block's end for the rest of its last line."""
NEWLINE = 0x0A
MARK = b"\xef\xbb\xbf"
TOKENS = pa.list_(pa.int64())
LARGEST_ID = (1 << 63) - 1


def open_json_lines(file: StoredObject, column: Columns) -> "JSONLinesFile | SequentialFile":
    """Opens a file of JSON lines, compressed or not as its ending says."""
    if file.key.lower().endswith((".gz", ".zst")):
        return SequentialFile(file, partial(LineDecoder, column, file.url))
    return JSONLinesFile(file, column)


class JSONLinesFile:
    """A plain file of JSON lines: a block is the lines that begin in a part of the file."""

    splittable = True

    def __init__(self, file: StoredObject, column: Columns) -> None:
        self._file, self._column = file, column
        self.spans = np.append(np.arange(0, file.size, BLOCK_BYTES), file.size)
        self.groups = np.arange(len(self.spans) - 1)

    def size(self, block: int) -> int:
        """Gives about how many bytes reading a block takes in memory."""
        return 2 * int(self.spans[block + 1] - self.spans[block])

    def read(self, block: int) -> Lists:
        """Reads a block."""
        begin, end = int(self.spans[block]), int(self.spans[block + 1])
        start = max(0, begin - 1)  # whose byte tells whether a line begins with the block
        data = self._file.read(start, min(end + LOOK_AHEAD_BYTES, self._file.size))
        first = 0 if block == 0 else data.find(b"\n") + 1
        if first == 0 < block or first >= end - start:
            return Lists.of([], [])  # one long line goes through it
        last = data.find(b"\n", end - 1 - start) + 1
        if not last:
            data = data + self._rest(start + len(data))
            last = len(data)
        return to_rows(memoryview(data)[first:last].tobytes(), start + first, self._column, self._file.url)

    def _rest(self, start: int) -> bytes:
        """Reads to the end of a line, in larger and larger parts."""
        parts, size = [], LOOK_AHEAD_BYTES
        while start < self._file.size:
            size = min(4 * size, BLOCK_BYTES)
            part = bytes(self._file.read(start, min(start + size, self._file.size)))
            end = part.find(b"\n") + 1
            parts.append(part[: end or None])
            if end:
                break
            start += len(part)
        return b"".join(parts)


class LineDecoder:
    """Takes a column out of JSON lines that come in pieces."""

    def __init__(self, column: Columns, url: str) -> None:
        self._column, self._url = column, url
        self._pieces: list[bytes] = []  # of the line that has not ended
        self._offset = 0

    def feed(self, data: bytes, *, last: bool, wanted: bool) -> Lists | None:
        """Takes the next bytes, and gives the rows whose lines end in them, if they are wanted."""
        end = len(data) if last else data.rfind(b"\n") + 1
        if not end and not last:
            self._pieces.append(data)
            return None
        text = b"".join([*self._pieces, data[:end]])
        self._pieces = [data[end:]]
        offset, self._offset = self._offset, self._offset + len(text)
        return to_rows(text, offset, self._column, self._url) if wanted else None


def to_rows(text: bytes, offset: int, column: Columns, url: str) -> Lists:
    """Takes lists of token ids, or several columns, out of whole lines, of which the first begins at ``offset``."""
    if isinstance(column, tuple):
        return _to_dicts(text, offset, column, url)
    array, rows = parse(text, offset, column, TOKENS, url)
    lists = to_lists(array, column, 0)
    return Lists(lists.values, lists.begins, lists.ends, rows)


def parse(text: bytes, offset: int, column: str, kind: pa.DataType, url: str) -> tuple[pa.Array, np.ndarray]:
    """Takes a column out of whole lines.

    Args:
        text: the lines.
        offset: where the first begins in its file.
        column: the column.
        kind: its type.
        url: the file, for messages.

    Returns:
        The column, null where it is, and where each line begins in its file.

    Raises:
        ValueError: naming the line, if it is no JSON object, or its column has another type.
        LookupError: naming the line, if it has no such column.
    """
    if offset == 0 and text.startswith(MARK):
        text = b" " * len(MARK) + text[len(MARK) :]
    newlines = np.flatnonzero(np.frombuffer(text, np.uint8) == NEWLINE)
    edges = np.concatenate([[0], newlines + 1, [len(text)]])
    starts = edges[:-1][np.diff(edges) > 1]
    array = _parse_fast(text, column, kind)
    if array is None or len(array) != len(starts) or _has_nulls(array):
        values = list(_parse_lines(text, offset, column, kind, url))
        array, starts = pa.array([value for value, _ in values], kind), np.array([at for _, at in values], np.int64)
    return array, starts + offset


def _to_dicts(text: bytes, offset: int, columns: tuple[str, ...], url: str) -> Lists:
    if offset == 0 and text.startswith(MARK):
        text = b" " * len(MARK) + text[len(MARK) :]
    found = list(_objects(text, offset, url))
    values = {column: [_value(row, column, place) for row, _, place in found] for column in columns}
    return Lists.of_dicts(values, [offset + begin for _, begin, _ in found])


def _parse_fast(text: bytes, column: str, kind: pa.DataType) -> pa.Array | None:
    """Parses with pyarrow, or gives None for whatever it does not like; it cannot tell null from a missing column."""
    if not text.strip():
        return pa.array([], kind)
    try:
        table = pa.json.read_json(
            pa.BufferReader(text),
            read_options=pa.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=pa.json.ParseOptions(
                explicit_schema=pa.schema([(column, kind)]), unexpected_field_behavior="ignore"
            ),
        )
    except (pa.ArrowException, OverflowError):
        return None
    return table.column(column).combine_chunks()


def _has_nulls(array: pa.Array) -> bool:
    return bool(array.null_count or (pa.types.is_list(array.type) and array.flatten().null_count))


def _parse_lines(text: bytes, offset: int, column: str, kind: pa.DataType, url: str) -> Iterator[tuple[object, int]]:
    """Parses line by line, and yields values and where the lines begin in the text."""
    for row, begin, place in _objects(text, offset, url):
        value = _value(row, column, place)
        _check(value, kind, column, place)
        yield value, begin


def _value(row: dict[str, Any], column: str, place: str) -> Any:
    if column not in row:
        raise LookupError(f"no column {column!r} in {place}: give column, one of {', '.join(map(repr, row))}")
    return row[column]


def _objects(text: bytes, offset: int, url: str) -> Iterator[tuple[dict[str, Any], int, str]]:
    """Parses line by line, and yields the objects, where their lines begin in the text, and that in words."""
    begin = 0
    for line in text.split(b"\n"):
        if line.strip():
            place = f"the line at byte {offset + begin} of {url}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # a wrong encoding is a ValueError, too
                raise ValueError(f"{place} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{place} is not a JSON object but {type(row).__name__}: give lines of objects")
            yield row, begin, place
        begin += len(line) + 1


def _check(value: object, kind: pa.DataType, column: str, place: str) -> None:
    if value is None or not pa.types.is_list(kind):
        return
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        got = (
            f"a list with {next((t for t in value if type(t) is not int), None)!r}"
            if isinstance(value, list)
            else type(value).__name__
        )
        raise ValueError(f"column {column!r} must hold lists of integers, got {got} in {place}")
    if any(abs(token) > LARGEST_ID for token in value):
        raise ValueError(f"token ids must be below {LARGEST_ID + 1}, got {max(value, key=abs)} in {place}")
