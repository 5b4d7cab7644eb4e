"""Tar files whose members hold token ids or text, as webdataset writes them, plain or compressed.

Consecutive members ``KEY.FIELD`` of one KEY are a sample; FIELD begins at the first dot of the name. The column of a
sample is the member of that FIELD, with or without ``.npy`` or ``.json`` after it, or a key of its member ``json``. A
row is the number of the sample in its file.

Of several columns, each is such a member or key, or the member ``FIELD.txt``. What ends in ``txt`` or ``text`` is a
str, in ``npy`` an array, in ``json`` what it says; the rest are bytes.
"""

import io
import json
import posixpath
import re
import tarfile
import tokenize
from typing import Any

import numpy as np

from ibm_nodes.formats.lists import Columns, Lists
from ibm_nodes.formats.sequential import SequentialFile
from ibm_nodes.listing import StoredObject

RECORD = tarfile.BLOCKSIZE
SPECIAL = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE)
META = re.compile(r"__[^/]*__($|/)")


def open_tar(file: StoredObject, column: Columns) -> SequentialFile:
    """Opens a tar file, compressed or not as its ending says."""
    return SequentialFile(file, lambda: TarDecoder(column, file.url))


class TarDecoder:
    """Takes one column, or the rows of several, out of a tar file that comes in pieces."""

    def __init__(self, column: Columns, url: str) -> None:
        self._url = url
        self._column = column if isinstance(column, str) else ""
        self._sample = None if isinstance(column, str) else _Sample(column)
        self._fields = {"json", *(self._sample.fields if self._sample else _fields(self._column))}
        self._buffer = bytearray()
        self._drop = 0  # bytes still to come of members that were looked at
        self._ended = False
        self._extended: dict[str, str] = {}  # what the header of the next member cannot say
        self._key: str | None = None
        self._row, self._found = -1, True

    def feed(self, data: bytes, *, last: bool, wanted: bool) -> Lists | None:
        """Takes the next bytes, and gives the rows whose member ends in them, if they are wanted."""
        if self._sample:
            self._sample.wanted = wanted
        arrays: list[np.ndarray[Any, Any]] = []
        rows: list[int] = []
        self._buffer += data
        while not self._ended and self._skip() and len(self._buffer) >= RECORD:
            member = self._header()
            if member is None:
                self._end_sample()
                self._ended = True
                break
            size = RECORD + -(-member.size // RECORD) * RECORD
            needed = member.type in SPECIAL or self._split(member)[1] in self._fields
            if needed and len(self._buffer) < size:
                break
            array = self._take(member, bytes(self._buffer[RECORD : RECORD + member.size]), wanted)
            if array is not None:
                arrays.append(array)
                rows.append(self._row)
            self._drop = size
        if last and not self._ended:
            raise ValueError(f"{self._url} was cut off: a tar file ends with records of zeros")
        if self._sample:
            return self._sample.take() if wanted else None
        return Lists.of(arrays, rows) if wanted else None

    def _skip(self) -> bool:
        """Drops what was looked at, and tells whether all of it has come."""
        dropped = min(self._drop, len(self._buffer))
        del self._buffer[:dropped]
        self._drop -= dropped
        return not self._drop

    def _header(self) -> tarfile.TarInfo | None:
        """Reads the header at the beginning of the buffer; None is the end of the archive."""
        record = bytes(self._buffer[:RECORD])
        if not any(record):
            return None
        try:
            member = tarfile.TarInfo.frombuf(record, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise ValueError(f"{self._url} is not a tar file, or is damaged: {error}") from error
        if member.type not in SPECIAL:
            member.name = self._extended.get("path", member.name)
            member.size = int(self._extended.get("size", member.size)) if member.isreg() else 0
        if member.size < 0:
            raise ValueError(f"{self._url} is damaged: {member.name} has {member.size} bytes")
        return member

    def _split(self, member: tarfile.TarInfo) -> tuple[str, str]:
        """Gives the sample that a member belongs to, and its field; "" for none."""
        folder, name = posixpath.split(member.name)
        key, _, field = name.partition(".")
        if not member.isreg() or not key or not field or META.search(member.name):
            return "", ""
        return posixpath.join(folder, key), field.lower()

    def _take(self, member: tarfile.TarInfo, content: bytes, wanted: bool) -> np.ndarray[Any, Any] | None:
        """Takes note of a member, and gives its token ids if it is the column and they are wanted."""
        if member.type in SPECIAL:
            self._extended |= _extension(member.type, content)
            return None
        self._extended = {}
        key, field = self._split(member)
        if key and key != self._key:
            self._end_sample()
            self._key, self._row, self._found = key, self._row + 1, False
        if self._sample:
            if field in self._fields:
                self._sample.members[field] = content
            return None
        if field not in self._fields or not (wanted or field == "json"):
            self._found = self._found or field in self._fields
            return None
        try:
            array = _decode(content, field, self._column)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{member.name} in {self._url} does not hold token ids: {error}") from error
        self._found = self._found or array is not None
        return array if wanted else None

    def _end_sample(self) -> None:
        if self._sample:
            if self._key is not None:
                self._sample.end(self._row, f"sample {self._key!r} in {self._url}")
        elif not self._found:
            raise LookupError(
                f"sample {self._key!r} in {self._url} has no {self._column!r}: give column, the FIELD of its members "
                "KEY.FIELD, without .npy or .json"
            )


class _Sample:
    """Members of the present sample, and the rows that samples before it were made into.

    Attributes:
        fields: members that may hold a column.
        members: those of the present sample, by field.
        wanted: whether rows are wanted.
    """

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.fields = {field for column in columns for field in (*_fields(column), f"{column}.txt")}
        self.members: dict[str, bytes] = {}
        self.wanted = False
        self._values: dict[str, list[Any]] = {column: [] for column in columns}
        self._rows: list[int] = []

    def end(self, row: int, place: str) -> None:
        """Makes a row of the present sample, if it is wanted."""
        members, self.members = self.members, {}
        if not self.wanted:
            return
        for column, values in self._values.items():
            try:
                values.append(_find(members, column))
            except LookupError as error:
                raise LookupError(
                    f"{place} has no {column!r}: give columns, FIELDs of its members KEY.FIELD or keys of KEY.json"
                ) from error
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{column!r} of {place} cannot be decoded: {error}") from error
        self._rows.append(row)

    def take(self) -> Lists:
        """Gives the rows made since the last call."""
        lists = Lists.of_dicts(self._values, self._rows)
        self._values, self._rows = {column: [] for column in self._values}, []
        return lists


def _fields(column: str) -> tuple[str, ...]:
    return column, f"{column}.npy", f"{column}.json"


def _find(members: dict[str, bytes], column: str) -> Any:
    for field in (*_fields(column), f"{column}.txt"):
        if field in members:
            return _to_value(members[field], field.rpartition(".")[2])
    found = json.loads(members["json"])
    if not isinstance(found, dict):
        raise ValueError("the member json is not an object")
    return found[column]


def _to_value(content: bytes, ending: str) -> Any:
    if ending in ("txt", "text"):
        return content.decode()
    if ending == "json":
        return json.loads(content)
    return _decode_npy(content) if ending == "npy" else content


def _decode(content: bytes, field: str, column: str) -> np.ndarray[Any, Any] | None:
    """Decodes a member by its ending; None where a JSON object has no such key."""
    if not field.endswith("json"):
        return _decode_npy(content)
    value = json.loads(content)
    if isinstance(value, dict) and field == "json":
        if column not in value:
            return None
        value = value[column]
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise ValueError("it must be a list of integers")
    return np.array(value, np.int64)


def _decode_npy(content: bytes) -> np.ndarray[Any, Any]:
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except (SyntaxError, tokenize.TokenError) as error:
        raise ValueError(f"its header cannot be read: {error}") from error
    if dtype.kind not in "iu" or shape != (len(content[file.tell() :]) // dtype.itemsize,):
        raise ValueError(f"it must be integers in one dimension, all of them there, got {dtype} of {shape}")
    return np.frombuffer(content, dtype, offset=file.tell())


def _extension(kind: bytes, content: bytes) -> dict[str, str]:
    """Reads what a special member says of the one after it: a long name, or pairs "LENGTH KEY=VALUE"."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": content.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    found = {}
    while content and kind == tarfile.XHDTYPE:
        length = int(content.partition(b" ")[0])
        if not 0 < length <= len(content):
            raise ValueError(f"a header for the next member has a pair of {length} bytes")
        key, _, value = content[:length].partition(b" ")[2].partition(b"=")
        found[key.decode()] = value.rstrip(b"\n").decode("utf-8", "surrogateescape")
        content = content[length:]
    return found
