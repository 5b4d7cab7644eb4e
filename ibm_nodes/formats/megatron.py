"""Megatron's indexed datasets: token ids end to end in a ``.bin`` file, and where they are in the ``.idx`` beside it.

The index has 20 bytes for each document, which for the largest files is more than a process should hold. It is passed
over once, in windows, and only the first document of each block is kept. A row is the number of the document.
"""

import struct
from typing import NamedTuple

import numpy as np

from ibm_nodes.formats.lists import Lists
from ibm_nodes.listing import StoredObject

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, type code, number of sequences, and of document edges."""
TYPES = dict(enumerate("<u1 <i1 <i2 <i4 <i8 <f8 <f4 <u2".split(), 1))
BLOCK_BYTES = 1 << 20
"""A block is the documents that begin within this many bytes."""
WINDOW = 1 << 18
"""Documents whose places are looked at together."""
INT32, INT64 = 4, 8


class MegatronFile:
    """A ``.bin`` file with its ``.idx`` file; the column is of no account."""

    splittable = True

    def __init__(self, file: StoredObject, column: str) -> None:
        self._file, self._places = file, file.companion()
        self._layout = _layout(self._places)
        num_blocks = -(-file.size // BLOCK_BYTES)
        self.spans = np.append(np.arange(num_blocks) * BLOCK_BYTES, file.size)
        self.groups = np.arange(num_blocks)
        self._firsts = self._find_firsts()

    def size(self, block: int) -> int:
        """Gives about how many bytes reading a block takes in memory."""
        return int(self.spans[block + 1] - self.spans[block])

    def read(self, block: int) -> Lists:
        """Reads a block."""
        first, last = int(self._firsts[block]), int(self._firsts[block + 1])
        if first == last:
            return Lists.of([], [])
        edges = self._edges(first, last)
        start, end = int(edges[0]), int(edges[-1])
        values = np.frombuffer(self._file.read(start, end) if start < end else b"", self._layout.kind)
        edges = (edges - start) // self._layout.kind.itemsize
        return Lists(values, edges[:-1], edges[1:], np.arange(first, last))

    def _find_firsts(self) -> np.ndarray:
        """Gives the first document of each block, and, last, the number of documents."""
        firsts: list[int] = []
        begins = self.spans[:-1]
        num_documents, end = self._layout.num_documents, 0
        for first in range(0, num_documents, WINDOW):
            last = min(first + WINDOW, num_documents)
            edges = self._edges(first, last)
            if edges[0] != end:
                raise ValueError(f"{self._places.url} is damaged: document {first} does not begin where the last ended")
            end = edges[-1]
            reached = begins[len(firsts) :]
            reached = reached[reached <= edges[-2]]
            firsts += (first + np.searchsorted(edges[:-1], reached, "left")).tolist()
        if end != self._file.size or end != self._layout.end:
            raise ValueError(
                f"{self._file.url} does not fit its index: it has {self._file.size} bytes, not {self._layout.end}; "
                "was one of the two cut off, or replaced?"
            )
        return np.array(firsts + [num_documents] * (len(self.spans) - len(firsts)))

    def _edges(self, first: int, last: int) -> np.ndarray:
        """Gives where documents [first, last) begin in the file, and where the last one ends."""
        layout = self._layout
        sequences = self._integers(layout.documents + INT64 * first, last + 1 - first)
        low, high = int(sequences[0]), int(sequences[-1])
        if low < 0 or high > layout.num_sequences or np.any(np.diff(sequences) < 0):
            raise ValueError(f"{self._places.url} is damaged: its documents are not in order")
        inner = self._integers(layout.pointers + INT64 * low, min(high + 1, layout.num_sequences) - low)
        begins = np.append(inner, self._file.size) if high == layout.num_sequences else inner
        edges: np.ndarray = begins[sequences - low]
        if (
            edges[0] < 0
            or edges[-1] > self._file.size
            or np.any(np.diff(edges) < 0)
            or np.any(edges % layout.kind.itemsize)
        ):
            raise ValueError(
                f"{self._places.url} is damaged: a document lies outside {self._file.url}, or out of order"
            )
        return edges

    def _integers(self, begin: int, count: int) -> np.ndarray:
        """Reads integers of the index."""
        return np.frombuffer(self._places.read(begin, begin + INT64 * count) if count else b"", "<i8")


class _Layout(NamedTuple):
    """Where the index has its arrays, and where the last sequence ends."""

    kind: np.dtype
    num_sequences: int
    num_documents: int
    pointers: int
    documents: int
    end: int


def _layout(places: StoredObject) -> _Layout:
    head = bytes(places.read(0, min(HEADER.size, places.size)))
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise ValueError(f"{places.url} is not the index of a Megatron dataset, or was cut off")
    _, version, code, num_sequences, num_edges = HEADER.unpack(head)
    kind = np.dtype(TYPES.get(code, "V1"))
    if version != 1 or kind.kind not in "iu":
        raise ValueError(f"{places.url} has version {version} and type {code}: only version 1 and integers can be read")
    pointers = HEADER.size + INT32 * num_sequences
    documents = pointers + INT64 * num_sequences
    if num_edges < 1 or documents + INT64 * num_edges > places.size:
        raise ValueError(f"{places.url} was cut off, or is damaged: {num_sequences} sequences do not fit its size")
    end = 0
    if num_sequences:
        (size,) = struct.unpack("<i", places.read(pointers - INT32, pointers))
        (begin,) = struct.unpack("<q", places.read(documents - INT64, documents))
        end = begin + size * kind.itemsize
    return _Layout(kind, num_sequences, num_edges - 1, pointers, documents, end)
