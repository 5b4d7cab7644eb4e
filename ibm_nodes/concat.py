"""Concat: documents end to end, cut every so many tokens."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import numpy as np

from ibm_nodes.items import Sample
from ibm_nodes.runs import Run, Runs, columns, joined, split

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
        self._begin(())

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
        pieces, lengths, places = runs
        self._pieces += pieces
        self._lengths += lengths
        self._places += places
        self._total += sum(lengths)

    def next(self) -> Sample | None:
        """Takes a sample; None if too little waits."""
        if not self._ready:
            if self._next:
                self._begin(self.waiting())
            if self._total < self._seq_len:
                return None
            self._cut()
        sample, self._at, self._next, cut = self._ready.popleft()
        self._counts["truncated"] += cut
        return sample

    def pop(self) -> Sample:
        """Takes what waits, as the last sample."""
        pieces, lengths, places = columns(self.take())
        starts = accumulate(lengths[:-1], initial=0)
        return Sample(joined([*chain.from_iterable(pieces)]), tuple(starts), tuple(places))

    def take(self) -> list[Run]:
        """Takes all that waits."""
        runs = self.waiting()
        self._begin(())
        return runs

    def drop(self, number: int) -> None:
        """Takes off the last of the whole documents that wait."""
        self._begin(self.waiting(number))

    def opened(self) -> list[Sample]:
        """Gives the open samples: none."""
        return []

    def waiting(self, less: int = 0) -> list[Run]:
        """Gives what waits, less so many of the last whole documents."""
        number, end = self._next, len(self._lengths) - less
        left = list(zip(self._pieces[number:end], self._lengths[number:end], self._places[number:end], strict=True))
        if number and self._at < (behind := self._ends[number - 1]):
            length = self._lengths[number - 1]
            run = (self._pieces[number - 1], length, self._places[number - 1])
            left.insert(0, split(run, self._at - behind + length)[1])
        return left

    def snapshot(self, less: int) -> tuple[list[Run], tuple[()]]:
        """Gives what waits and the open samples, for a state; nothing of it changes any more."""
        return self.waiting(less), ()

    def _begin(self, runs: Sequence[Run]) -> None:
        """Begins with documents of which nothing is taken."""
        pieces, lengths, places = columns(runs)
        self._pieces, self._lengths, self._places = list(pieces), list(lengths), list(places)
        self._total = sum(lengths)
        # Samples that are cut; with each how many tokens there are up to its end, how many documents begin before that,
        # and whether one of them is cut there.
        self._ready: deque[tuple[Sample, int, int, bool]] = deque()
        self._ends: list[int] = []
        self._at = self._next = 0

    def _cut(self) -> None:
        size = self._seq_len
        number = max(1, min(self._total, CUT_TOKENS) // size)
        lengths, places = self._lengths, self._places
        self._ends = ends = list(accumulate(lengths))
        starts = [0, *ends]
        used = bisect_left(ends, number * size) + 1
        parts = list(chain.from_iterable(self._pieces[: used - 1]))
        last, left = self._pieces[used - 1], number * size - starts[used - 1]
        parts += last if left == lengths[used - 1] else split((last, lengths[used - 1], places[used - 1]), left)[0][0]
        tokens = joined(parts)
        mixed = len({part.dtype for part in parts}) > 1
        first = 0
        for begin in range(0, number * size, size):
            end = begin + size
            behind = bisect_left(starts, end, first, used)
            inside = [start - begin for start in starts[first:behind]]
            documents = places[first:behind]
            if not inside or inside[0]:
                name, url, row, offset = places[first - 1]
                inside.insert(0, 0)
                documents.insert(0, (name, url, row, offset + begin - starts[first - 1]))
            cut = ends[behind - 1] > end and documents[-1][3] <= 0
            kind = tokens.dtype
            if mixed:
                kind = np.result_type(*(pieces[0] for pieces in self._pieces[behind - len(inside) : behind]))
            own = tokens[begin:end].astype(kind, copy=number > 1)  # so that no sample keeps the others in memory
            self._ready.append((Sample(own, tuple(inside), tuple(documents)), end, behind, cut))
            first = behind
