"""Concat: documents end to end, cut every so many tokens."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

import numpy as np

from ibm_nodes.items import Place, Sample
from ibm_nodes.runs import Run, Runs, columns, joined, moved

CUT_TOKENS = 1 << 17
"""Samples are cut together as long as they have no more tokens: steps for many cost little each."""


class Concat:
    """Packs documents end to end in full samples; a document goes on in the sample after the one that it ends.

    Args:
        seq_len: tokens in a sample.
        counts: in which documents that are cut are counted.
    """

    def __init__(self, *, seq_len: int, counts: dict[str, int]) -> None:
        self._seq_len = seq_len
        self._counts = counts
        # How many of the tokens that wait are in samples handed out, and how many documents begin in these.
        self._at: int = 0
        self._next: int = 0
        self._begin(Runs())

    def __len__(self) -> int:
        return self._at < self._total

    @property
    def lacking(self) -> int:
        """How many tokens are to be added for the next sample."""
        return self._seq_len - (self._total - self._at)

    @property
    def num_whole(self) -> int:
        """How many documents wait of which nothing was taken."""
        return len(self._lengths) - self._next

    def restore(self, samples: Iterable[Sample]) -> None:
        """Opens samples again, of which it has none."""

    def add(self, runs: Runs) -> None:
        """Adds documents to those that wait; not before ``next`` has given None."""
        self._pieces += runs.pieces
        self._lengths += runs.lengths
        self._places += runs.places
        self._kinds += runs.kinds
        self._total += sum(runs.lengths)

    def next(self) -> Sample | None:
        """Takes a sample; None if too little waits."""
        if not self._ready:
            if self._next:
                self._begin(self._rest())
            if self._total < self._seq_len:
                return None
            self._cut()
        begin = self._at
        self._at, self._next, kind, starts, documents, cut = self._ready.popleft()
        self._counts["truncated"] += cut
        tokens = self._pieces[0][begin : self._at]
        # A copy, so that no sample keeps the others in memory; numpy would let go of Python's lock for each.
        own = np.frombuffer(bytearray(tokens.data), kind) if kind == tokens.dtype else tokens.astype(kind)
        return Sample(own, starts, documents)

    def pop(self) -> Sample:
        """Takes what waits, as the last sample."""
        pieces, lengths, places, _ = columns(self.take())
        starts = accumulate(lengths[:-1], initial=0)
        return Sample(joined(pieces), tuple(starts), tuple(places))

    def take(self) -> list[Run]:
        """Takes all that waits."""
        runs = self.waiting()
        self._begin(Runs())
        return runs

    def drop(self, number: int) -> None:
        """Takes off the last of the whole documents that wait."""
        self._begin(columns(self.waiting(number)))

    def opened(self) -> list[Sample]:
        """Gives the open samples: none."""
        return []

    def waiting(self, less: int = 0) -> list[Run]:
        """Gives what waits, less so many of the last whole documents."""
        pieces, lengths, places, kinds = self._rest()
        if not lengths:
            return []
        tokens, runs, begin = joined(pieces, copy=False), [], 0
        for length, place, kind in zip(lengths[: len(lengths) - less], places, kinds, strict=False):
            end = begin + length
            runs.append((tokens[begin:end].astype(kind, copy=False), place))
            begin = end
        return runs

    def snapshot(self, less: int) -> tuple[list[Run], tuple[()]]:
        """Gives what waits and the open samples, for a state; nothing of it changes any more."""
        return self.waiting(less), ()

    def _begin(self, runs: Runs) -> None:
        """Begins with documents of which nothing is taken."""
        pieces, lengths, places, kinds = runs
        self._pieces, self._lengths, self._places, self._kinds = list(pieces), list(lengths), list(places), list(kinds)
        self._total = sum(lengths)
        # Samples that are cut: how many tokens there are up to the end of each, how many documents begin before that,
        # its type, starts and documents, and whether one is cut there.
        self._ready: deque[tuple[int, int, np.dtype, tuple[int, ...], tuple[Place, ...], bool]] = deque()
        self._at = self._next = 0

    def _rest(self) -> Runs:
        """Gives what is not in samples that were handed out."""
        number, at = self._next, self._at
        if not number:
            return Runs(self._pieces, self._lengths, self._places, self._kinds)
        lengths, places, kinds = self._lengths[number:], self._places[number:], self._kinds[number:]
        left = self._starts[number] - at
        if left:
            lengths.insert(0, left)
            places.insert(0, moved(self._places[number - 1], self._lengths[number - 1] - left))
            kinds.insert(0, self._kinds[number - 1])
        return Runs([self._pieces[0][at:]] if lengths else [], lengths, places, kinds)

    def _cut(self) -> None:
        size = self._seq_len
        number = max(1, min(self._total, CUT_TOKENS) // size)
        places, kinds = self._places, self._kinds
        self._pieces = [joined(self._pieces, copy=False)]
        self._starts = starts = [0, *accumulate(self._lengths)]
        kind = kinds[0]
        mixed = kinds.count(kind) < len(kinds)
        first = 0
        for begin in range(0, number * size, size):
            end = begin + size
            behind = bisect_left(starts, end, first, len(places))
            inside = [start - begin for start in starts[first:behind]]
            documents = places[first:behind]
            if not inside or inside[0]:
                inside.insert(0, 0)
                documents.insert(0, moved(places[first - 1], begin - starts[first - 1]))
            cut = starts[behind] > end and documents[-1][3] <= 0
            if mixed:
                kind = np.result_type(*kinds[behind - len(inside) : behind])
            self._ready.append((end, behind, kind, tuple(inside), tuple(documents), cut))
            first = behind
