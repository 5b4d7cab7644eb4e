"""Marks: documents as runs, closed with EOS and opened with BOS where the data does not already have it."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ibm_nodes.items import Document, Documents
from ibm_nodes.runs import Runs, joined


class Marks:
    """Makes runs of documents; those without a token leave none.

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
        self._eos_id, self._bos_id, self._pad_id = eos_id, bos_id, pad_id
        self._made: dict[tuple[int, str], np.ndarray] = {}
        self._limit = sys.maxsize if limit is None else limit
        self._truncate = truncate
        self._counts = counts

    def runs(self, documents: Sequence[Document]) -> tuple[Runs, Sequence[int]]:
        """Gives the runs, and for each of them how many documents there are up to it."""
        if self._pad_id is not None:
            documents = list(_without_padding(documents, self._pad_id))
        if self._bos_id is None and self._limit == sys.maxsize:
            runs = self._alike(documents if isinstance(documents, Documents) else Documents.of(documents))
            if runs is not None:
                self._counts["documents"] += len(documents)
                return runs, range(1, len(documents) + 1)
        return self._one_by_one(documents)

    def _alike(self, documents: Documents) -> Runs | None:
        """Does it in few steps for all, where they need it alike: most often none has an EOS, or each one has."""
        arrays, lengths, last = documents.tokens, documents.lengths, documents.last
        if not last:
            return None
        closed = last.count(self._eos_id)
        kinds = [array.dtype for array in arrays]
        if closed == len(last):
            return Runs(arrays, lengths, documents.places, kinds)
        if closed or min(last) < 0:
            return None
        marks = {kind: self._mark(self._eos_id, kind) for kind in set(kinds)}
        if any(mark is None for mark in marks.values()):
            return None
        pieces: list[Any] = [None] * (2 * len(arrays))
        pieces[::2], pieces[1::2] = arrays, map(marks.__getitem__, kinds)
        return Runs(pieces, [length + 1 for length in lengths], documents.places, kinds)

    def _mark(self, token: int, kind: np.dtype) -> np.ndarray | None:
        """Gives a token as an array of a type, or None if the type does not hold it."""
        made = self._made.get((token, kind.char))
        if made is None and np.iinfo(kind).min <= token <= np.iinfo(kind).max:
            made = self._made[token, kind.char] = np.array([token], kind)
        return made

    def _one_by_one(self, documents: Sequence[Document]) -> tuple[Runs, Sequence[int]]:
        every: list[np.ndarray] = []
        lengths, places, kinds, numbers = [], [], [], []
        counts, limit, bos_id = self._counts, self._limit, self._bos_id
        for number, (tokens, url, row, name, _) in enumerate(documents, 1):
            if not len(tokens):
                continue
            counts["documents"] += 1
            opened = bos_id is None or tokens.item(0) in (bos_id, ~bos_id)
            pieces = self._with_marks(tokens, opened)
            length = len(tokens) + len(pieces) - 1
            if length > limit:
                counts["truncated" if self._truncate else "dropped"] += 1
                if not self._truncate:
                    continue
                pieces, length = [joined(pieces)[:limit]], limit
            every += pieces
            lengths.append(length)
            places.append((name, url, row, 0 if opened else -1))
            kinds.append(pieces[0].dtype)
            numbers.append(number)
        return Runs(every, lengths, places, kinds), numbers

    def _with_marks(self, tokens: np.ndarray, opened: bool) -> list[np.ndarray]:
        """Gives a document with the marks that it lacks, all of one type."""
        before, after = [] if opened or self._bos_id is None else [self._bos_id], []
        last, eos_id = tokens.item(-1), self._eos_id
        if last not in (eos_id, ~eos_id) or (len(tokens) == 1 and self._bos_id == last == eos_id):
            after = [eos_id if last >= 0 else ~eos_id]
        kind = tokens.dtype
        marks = [self._mark(token, kind) for token in (*before, *after)]
        if any(mark is None for mark in marks):
            kind = np.promote_types(kind, np.int32)
            marks = [self._mark(token, kind) for token in (*before, *after)]
        pieces = [mark for mark in marks if mark is not None]
        pieces.insert(len(before), tokens.astype(kind, copy=False))
        return pieces


def _without_padding(documents: Sequence[Document], pad_id: int) -> Iterator[Document]:
    """Takes off the padding that documents end with."""
    for document in documents:
        tokens = document.tokens
        if len(tokens) and tokens.item(-1) in (pad_id, ~pad_id):
            kept = np.flatnonzero((tokens != pad_id) & (tokens != ~pad_id))
            yield document._replace(tokens=tokens[: kept[-1] + 1 if len(kept) else 0])
        else:
            yield document
