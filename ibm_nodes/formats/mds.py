"""MosaicML's shards (MDS), which know by themselves where their samples are; their index.json is not needed.

A shard is: the number of samples; where each begins, and the end; the columns as JSON; the samples. A sample is: the
sizes of the values whose columns have no fixed size; the values. A row is the number of the sample in its shard.
"""

import json
import struct
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ibm_nodes.formats.lists import Lists
from ibm_nodes.formats.sequential import SequentialFile
from ibm_nodes.listing import StoredObject

HEAD_BYTES = 64 << 10
BLOCK_BYTES = 1 << 20
"""A block is the samples that begin within this many bytes."""
BYTES_TYPE = np.dtype("<i8")
"""What a column of plain bytes holds, as LLM Foundry writes it."""
UINT32 = 4
TYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
SHAPE_TYPES = ["u1", "<u2", "<u4", "<u8"]


def open_mds(file: StoredObject, column: str) -> "MDSFile | SequentialFile":
    """Opens a shard, compressed or not as its ending says."""
    if file.key.lower().endswith(".mds"):
        return MDSFile(file, column)
    return SequentialFile(file, partial(ShardDecoder, column, file.url))


class MDSFile:
    """A shard that is not compressed."""

    splittable = True

    def __init__(self, file: StoredObject, column: str) -> None:
        self._file = file
        head = bytes(file.read(0, min(HEAD_BYTES, file.size)))
        while (header := _Header.parse(head, column, file.url)) is None:
            if len(head) == file.size:
                raise ValueError(f"{file.url} is not an MDS shard, or was cut off: its header goes beyond its end")
            head += bytes(file.read(len(head), min(4 * len(head), file.size)))
        if header.edges[-1] != file.size:
            raise ValueError(f"{file.url} was cut off, or is damaged: it should have {header.edges[-1]} bytes")
        self._header = header
        begins, limit, firsts = header.edges[:-1], -1, []
        for index, begin in enumerate(begins.tolist()):
            if begin >= limit:
                firsts.append(index)
                limit = begin + BLOCK_BYTES
        self._firsts = [*firsts, len(begins)]
        self.spans = np.concatenate([[0], begins[firsts[1:]], [file.size]]) if firsts else np.array([0])
        self.groups = np.arange(len(firsts))

    def size(self, block: int) -> int:
        """Gives about how many bytes reading a block takes in memory."""
        return int(self.spans[block + 1] - self.spans[block])

    def read(self, block: int) -> Lists:
        """Reads a block."""
        first, last = self._firsts[block], self._firsts[block + 1]
        edges = self._header.edges[first : last + 1].tolist()
        data = bytes(self._file.read(edges[0], edges[-1]))
        return self._header.lists(data, edges[0], first, last)


class ShardDecoder:
    """Takes one column out of a shard that comes in pieces."""

    def __init__(self, column: str, url: str) -> None:
        self._column, self._url = column, url
        self._buffer, self._begin = b"", 0
        self._header: _Header | None = None
        self._row = 0

    def feed(self, data: bytes, *, last: bool, wanted: bool) -> Lists | None:
        """Takes the next bytes, and gives the samples that end in them, if they are wanted."""
        self._buffer += data
        if self._header is None:
            self._header = _Header.parse(self._buffer, self._column, self._url)
        end = self._begin + len(self._buffer)
        if last and (self._header is None or end != self._header.edges[-1]):
            raise ValueError(f"{self._url} is not an MDS shard, was cut off, or is damaged: it ends at byte {end}")
        if self._header is None:
            return None
        first, edges = self._row, self._header.edges
        self._row = max(first, int(np.searchsorted(edges, end, "right")) - 1)
        lists = self._header.lists(self._buffer, self._begin, first, self._row) if wanted else None
        done = int(edges[self._row]) - self._begin
        self._buffer, self._begin = self._buffer[done:], self._begin + done
        return lists


class _Header(NamedTuple):
    """What a shard says of itself: where samples begin and the last one ends, and their columns."""

    edges: np.ndarray
    column: int
    encoding: str
    sizes: list[int | None]
    url: str

    @classmethod
    def parse(cls, data: bytes, column: str, url: str) -> "_Header | None":
        """Reads a header, or gives None if it is not all there."""
        if len(data) < UINT32:
            return None
        (num_samples,) = struct.unpack_from("<I", data)
        begin = UINT32 * (num_samples + 2)
        if len(data) < begin:
            return None
        edges = np.frombuffer(data, "<u4", num_samples + 1, UINT32).astype(np.int64)
        if edges[0] < begin or np.any(np.diff(edges) < 0):
            raise ValueError(f"{url} is not an MDS shard, or is damaged: its samples are not in order")
        if len(data) < edges[0]:
            return None
        try:
            config = json.loads(data[begin : edges[0]])
            names, encodings, sizes = (config[f"column_{part}"] for part in ("names", "encodings", "sizes"))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{url} is not an MDS shard, or is damaged: its columns cannot be read") from error
        index = _index(column, names, encodings, url)
        return cls(edges, index, encodings[index], sizes, url)

    def lists(self, data: bytes, begin: int, first: int, last: int) -> Lists:
        """Decodes samples [first, last) out of data that begins at a byte of the shard."""
        edges = (self.edges[first : last + 1] - begin).tolist()
        arrays = []
        for row, start, end in zip(range(first, last), edges, edges[1:], strict=False):
            try:
                arrays.append(_decode(self._value(data, start, end), self.encoding))
            except (ValueError, LookupError, struct.error) as error:
                raise ValueError(f"sample {row} of {self.url} cannot be decoded: {error}: is it damaged?") from error
        return Lists.of(arrays, range(first, last))

    def _value(self, data: bytes, start: int, end: int) -> bytes:
        unsized = self.sizes.count(None)
        given = iter(struct.unpack_from(f"<{unsized}I", data, start))
        sizes = [next(given) if size is None else size for size in self.sizes]
        begin = start + UINT32 * unsized + sum(sizes[: self.column])
        if start + UINT32 * unsized + sum(sizes) != end:
            raise ValueError("its values do not fill it")
        return data[begin : begin + sizes[self.column]]


def _index(column: str, names: list[str], encodings: list[str], url: str) -> int:
    readable = [name for name, encoding in zip(names, encodings, strict=True) if _is_readable(encoding)]
    others = f"columns of integer arrays: {', '.join(map(repr, readable)) or 'none'}"
    if column not in names:
        raise LookupError(f"no column {column!r} in {url}: give column, one of its {others}")
    index = names.index(column)
    if not _is_readable(encodings[index]):
        raise TypeError(
            f"column {column!r} of {url} holds {encodings[index]}, not arrays of integers: give column, one of its "
            f"{others}"
        )
    return index


def _is_readable(encoding: str) -> bool:
    kind, _, rest = encoding.partition(":")
    return kind == "bytes" or (kind == "ndarray" and "float" not in rest)


def _decode(value: bytes, encoding: str) -> np.ndarray[Any, Any]:
    """Decodes plain bytes or an array (its type and its number of axes and shape first, where they are not fixed)."""
    kind, *given = encoding.split(":")
    if kind == "bytes":
        return np.frombuffer(value, BYTES_TYPE)
    at = 0
    if not given:
        dtype, at = np.dtype(TYPES[value[0]]), 1
    else:
        dtype = np.dtype(given[0]).newbyteorder("<")
    if len(given) < 2:
        num_axes, code = divmod(value[at], 4)
        if num_axes != 1:
            raise ValueError(f"it has {num_axes} axes, not 1")
        at += 1 + np.dtype(SHAPE_TYPES[code]).itemsize
    return np.frombuffer(value, dtype, offset=at)
