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

from ibm_nodes.formats.lists import Columns, Lists
from ibm_nodes.formats.sequential import SequentialFile
from ibm_nodes.formats.where import Where
from ibm_nodes.listing import StoredObject

BLOCK_BYTES = 2 << 20
LOOK_AHEAD_BYTES = 32 << 10
"""What is read past a block's end for the rest of its last line."""
MARK = b"\xef\xbb\xbf"
STAND_IN = b'["\\u0000"]'
LARGEST_ID = (1 << 63) - 1


def open_json_lines(
    file: StoredObject, column: Columns, where: Where | None = None
) -> "JSONLinesFile | SequentialFile":
    """Opens a file of JSON lines, compressed or not as its ending says."""
    if file.key.lower().endswith((".gz", ".zst")):
        return SequentialFile(file, partial(LineDecoder, column, file.url, where))
    return JSONLinesFile(file, column, where)


class JSONLinesFile:
    """A plain file of JSON lines: a block is the lines that begin in a part of the file."""

    splittable = True

    def __init__(self, file: StoredObject, column: Columns, where: Where | None = None) -> None:
        self._file, self._column, self._where = file, column, where
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
        text = memoryview(data)[first:last].tobytes()
        return to_rows(text, start + first, self._column, self._file.url, self._where)

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

    def __init__(self, column: Columns, url: str, where: Where | None = None) -> None:
        self._column, self._url, self._where = column, url, where
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
        return to_rows(text, offset, self._column, self._url, self._where) if wanted else None


def to_rows(text: bytes, offset: int, column: Columns, url: str, where: Where | None = None) -> Lists:
    """Takes lists of token ids, or dicts of several columns, out of whole lines, the first of which is at ``offset``.

    Raises:
        ValueError: naming the line, if it is no JSON object, or its column no list of integers.
        LookupError: naming the line, if it has no such column.
        TypeError: if the condition cannot be computed for the columns.
    """
    if isinstance(column, tuple) or where is not None:
        return _to_rows(text, offset, column, url, where)
    key = json.dumps(column).encode()
    arrays, rows = [], []
    for line, begin in lines(text, offset):
        array = _quick(line, key, column)
        if array is None:
            place = f"the line at byte {begin} of {url}"
            array = _to_array(_value(parse(line, place), column, place), column, place)
        arrays.append(array)
        rows.append(begin)
    return Lists.of(arrays, rows)


def lines(text: bytes, offset: int) -> Iterator[tuple[bytes, int]]:
    """Yields lines that are not blank, and where they begin in their file, in which the text begins at ``offset``."""
    if offset == 0 and text.startswith(MARK):
        text = b" " * len(MARK) + text[len(MARK) :]
    for line in text.split(b"\n"):
        if line.strip():
            yield line, offset
        offset += len(line) + 1


def parse(line: bytes, place: str) -> dict[str, Any]:
    """Gives the object of a line.

    Raises:
        ValueError: naming the place, if the line is no JSON object.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # a wrong encoding is a ValueError, too
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place} is not a JSON object but {type(row).__name__}: give lines of objects")
    return row


def _value(row: dict[str, Any], column: str, place: str) -> Any:
    if column not in row:
        raise LookupError(f"no column {column!r} in {place}: give column, one of {', '.join(map(repr, row))}")
    return row[column]


def _to_rows(text: bytes, offset: int, column: Columns, url: str, where: Where | None) -> Lists:
    """Takes dicts or token ids out of lines of which the other columns count too; unwanted ones are empty."""
    begins = [begin for _, begin in lines(text, offset)]
    places = [f"the line at byte {begin} of {url}" for begin in begins]
    rows = [parse(line, place) for (line, _), place in zip(lines(text, offset), places, strict=True)]
    wanted = [True] * len(rows) if where is None else where.choose(rows, places, url).tolist()
    columns = column if isinstance(column, tuple) else (column,)
    values: dict[str, list[Any]] = {name: [] for name in columns}
    for row, place, is_wanted in zip(rows, places, wanted, strict=True):
        for name in columns:
            values[name].append(_value(row, name, place) if is_wanted else None)
    if isinstance(column, tuple):
        return Lists.of_dicts(values, begins)
    arrays = [_to_array(value, column, place) for value, place in zip(values[column], places, strict=True)]
    return Lists.of(arrays, begins)


def _quick(line: bytes, key: bytes, column: str) -> np.ndarray | None:
    """Gives the ids of an ordinary line, about twice as fast as ``json`` does, or None for what is out of the ordinary.

    The text of the only list that follows the key is parsed by numpy. The rest of the line goes through ``json`` with a
    stand-in for that list, which has to turn up in its place.
    """
    at = line.find(key)
    begin = line.find(b"[", at) + 1
    end = line.find(b"]", begin)
    if at < 0 or not begin or end < 0 or line.find(key, at + 1) >= 0 or line[at + len(key) : begin - 1].strip() != b":":
        return None
    try:
        row = json.loads(line[: begin - 1] + STAND_IN + line[end + 1 :])
        ids = np.fromstring(line[begin:end], np.int64, sep=",")
    except (ValueError, RecursionError, DeprecationWarning):  # numpy warns of what it cannot parse
        return None
    num_ids = line.count(b",", begin, end) + 1 if line[begin:end].strip() else 0
    if not isinstance(row, dict) or row.get(column) != json.loads(STAND_IN) or len(ids) != num_ids:
        return None
    # Where an id is too large numpy gives the largest there is.
    return ids if not num_ids or -LARGEST_ID < ids.min() <= ids.max() < LARGEST_ID else None


def _to_array(value: Any, column: str, place: str) -> np.ndarray:
    if value is None:
        return np.empty(0, np.int64)
    if not isinstance(value, list):
        raise ValueError(f"column {column!r} must hold lists of integers, got {type(value).__name__} in {place}")
    for token in value:
        if type(token) is not int:
            raise ValueError(f"column {column!r} must hold lists of integers, got {token!r} in a list in {place}")
        if abs(token) > LARGEST_ID:
            raise ValueError(f"token ids must be below {LARGEST_ID + 1}, got {token} in {place}")
    return np.array(value, np.int64)
