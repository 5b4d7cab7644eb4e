"""Tail: the tokens of documents that wait to be packed, each document with its marks."""

import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ibm_nodes.items import Document, Place, Sample

Run = tuple[Sequence[np.ndarray], int, Place]
"""The tokens of a document, or of a part of one, in arrays end to end; their number; and the place of the first."""
Waiting = tuple[tuple[np.ndarray, ...], tuple[int, ...], tuple[Place, ...], int]
"""Arrays end to end, where in them each document begins, the documents' places, and the number of tokens."""


class Tail:
    """Documents end to end, closed with EOS and opened with BOS where the data does not already have it.

    Args:
        eos_id, bos_id, pad_id: as for ``Packer``.
        limit: tokens above which a document is cut or left out; None has no limit.
        truncate: cut it; else leave it out.
        counts: in which documents are counted.
    """

    def __init__(
        self,
        *,
        eos_id: int,
        bos_id: int | None,
        pad_id: int | None,
        limit: int | None,
        truncate: bool,
        counts: dict[str, int],
    ) -> None:
        self.length = 0
        self._pieces: list[np.ndarray] = []
        self._starts: list[int] = []
        self._places: list[Place] = []
        self._marks = eos_id, _one_token(eos_id), _one_token(~eos_id)
        self._opening = (None, None) if bos_id is None else (bos_id, _one_token(bos_id))
        self._pad_id = pad_id
        self._limit = sys.maxsize if limit is None else limit
        self._truncate = truncate
        self._counts = counts

    def add(self, documents: Iterable[Document]) -> None:
        """Adds documents; those without a token leave no trace."""
        pieces, starts, places, end = self._pieces, self._starts, self._places, self.length
        (bos_id, bos), (eos_id, eos, masked_eos) = self._opening, self._marks
        limit, before = self._limit, len(starts)
        stripped = documents if self._pad_id is None else _without_padding(documents, self._pad_id)
        for tokens, url, row, name, _ in stripped:
            length = len(tokens)
            if not length:
                continue
            begin, offset = end, 0
            starts.append(end)
            if bos is not None and tokens.item(0) not in (bos_id, ~bos_id):  # type: ignore[operator]
                pieces.append(bos)
                end += 1
                offset = -1
            pieces.append(tokens)
            end += length
            last = tokens.item(-1)
            if last != eos_id or (length == 1 and bos_id == eos_id):
                if last >= 0:
                    pieces.append(eos)
                    end += 1
                elif last != ~eos_id:
                    pieces.append(masked_eos)
                    end += 1
            places.append((name, url, row, offset))
            if end - begin > limit:
                end = self._shorten(end)
        self._counts["documents"] += len(starts) - before
        self.length = end

    def put(self, runs: Iterable[Run]) -> None:
        """Adds runs as they are; one that goes on where the one before it ends becomes part of it."""
        previous: Place | None = None
        size = 0
        for pieces, length, place in runs:
            if previous is not None and previous == (*place[:3], place[3] - size):
                self._counts["truncated"] -= previous[3] <= 0
            else:
                self._starts.append(self.length)
                self._places.append(place)
            self._pieces += pieces
            self.length += length
            previous, size = place, length

    def cut(self, size: int) -> Sample:
        """Takes a sample of at most ``size`` tokens off the front.

        The one copy of the tokens: sample and rest are parts of it, so that neither keeps a block of megabytes in
        memory.
        """
        pieces, starts, places, length = self._pieces, self._starts, self._places, self.length
        tokens = pieces[0] if len(pieces) == 1 and places[0][3] > 0 else joined(pieces)
        if length <= size:
            self._pieces, self._starts, self._places, self.length = [], [], [], 0
            return Sample(tokens, tuple(starts), tuple(places))
        self.length = length - size
        if starts[-1] < size:  # what remains is part of one document
            self._pieces, self._starts, self._places = [tokens[size:]], [0], [self._cut_place(-1, size)]
            return Sample(tokens[:size], tuple(starts), tuple(places))
        number = next(number for number, start in enumerate(starts) if start >= size)
        ends = [*starts[number + 1 :], length]
        runs = [
            ([tokens[start:end]], end - start, place)
            for start, end, place in zip(starts[number:], ends, places[number:], strict=True)
        ]
        if starts[number] > size:
            runs.insert(0, ([tokens[size : starts[number]]], starts[number] - size, self._cut_place(number - 1, size)))
        self._pieces, self._starts, self._places, self.length = [], [], [], 0
        self.put(runs)
        return Sample(tokens[:size], tuple(starts[:number]), tuple(places[:number]))

    def take(self) -> list[Run]:
        """Takes all of it, one document at a time."""
        runs = runs_of((self._pieces, self._starts, self._places, self.length))
        self._pieces, self._starts, self._places, self.length = [], [], [], 0
        return runs

    def snapshot(self) -> Waiting:
        """Gives what waits; nothing of it changes any more."""
        return tuple(self._pieces), tuple(self._starts), tuple(self._places), self.length

    def _cut_place(self, number: int, size: int) -> Place:
        """Gives the place of what remains of a document of which the sample's end is the cut."""
        name, url, row, offset = self._places[number]
        self._counts["truncated"] += offset <= 0
        return name, url, row, offset + size - self._starts[number]

    def _shorten(self, end: int) -> int:
        """Cuts the last document to the limit, or takes it off; gives where the tokens end then."""
        start = self._starts[-1]
        kept = start + self._limit if self._truncate else start
        while end > kept:
            last = self._pieces.pop()
            end -= len(last)
            if end < kept:
                self._pieces.append(last[: kept - end])
                end = kept
        if self._truncate:
            self._counts["truncated"] += 1
        else:
            self._counts["dropped"] += 1
            self._counts["documents"] += 1
            self._starts.pop()
            self._places.pop()
        return kept


def runs_of(waiting: tuple[Sequence[np.ndarray], Sequence[int], Sequence[Place], int]) -> list[Run]:
    """Gives what waits, one document at a time."""
    pieces, starts, places, length = waiting
    if len(pieces) == 1:
        return [(pieces, length, places[0])]
    runs, first, last = [], 0, 0
    for start, end, place in zip(starts, [*starts, length][1:], places, strict=True):
        size = end - start - len(pieces[last])
        last += 1
        while size:
            size -= len(pieces[last])
            last += 1
        runs.append((pieces[first:last], end - start, place))
        first = last
    return runs


def runs_in(sample: Sample) -> Iterator[Run]:
    """Gives the documents of a sample."""
    ends = (*sample.starts, len(sample.tokens))[1:]
    for start, end, place in zip(sample.starts, ends, sample.documents, strict=True):
        yield [sample.tokens[start:end]], end - start, place


def _without_padding(documents: Iterable[Document], pad_id: int) -> Iterator[Document]:
    """Takes off the padding that documents end with."""
    for document in documents:
        tokens = document.tokens
        if len(tokens) and tokens.item(-1) in (pad_id, ~pad_id):
            kept = np.flatnonzero((tokens != pad_id) & (tokens != ~pad_id))
            yield document._replace(tokens=tokens[: kept[-1] + 1 if len(kept) else 0])
        else:
            yield document


def joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Copies arrays end to end; as bytes where they are of one type, in half of the time."""
    if len(pieces) == 1:
        return pieces[0].copy()
    if len({tokens.dtype for tokens in pieces}) == 1 and all(tokens.flags.c_contiguous for tokens in pieces):
        return np.frombuffer(bytearray().join(pieces), pieces[0].dtype)  # type: ignore[arg-type]  # arrays are buffers
    return np.concatenate(pieces)


def _one_token(token: int) -> np.ndarray:
    return np.array([token], np.uint16 if 0 <= token < 1 << 16 else np.int32)
