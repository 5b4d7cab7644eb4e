"""BestFit: documents into the fullest of a bounded number of open samples that has room."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from itertools import accumulate, islice, pairwise

import numpy as np

from ibm_nodes.items import Place, Sample
from ibm_nodes.runs import Run, Runs, joined, runs_in, split

SERIAL_BITS = 40
"""Samples are sorted by the number (room << SERIAL_BITS) + serial number: the fullest first, of those the oldest."""
FULL = 1 << SERIAL_BITS
Taken = tuple[np.ndarray, int, tuple[int, ...], tuple[Place, ...]]
"""An open sample: an array, how many of its tokens are set, where its documents begin, and their places."""


class BestFit:
    """Packs documents whole, each into the open sample with the least room that is enough.

    A sample that is full is done. Where a document fits into none and no more may be opened, the fullest is done. What
    is longer than a sample is split: its parts are samples by themselves, and the rest is packed as a document. (Best
    fit is from Johnson et al., 1974; Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024, pack whole
    corpora with it. The bound makes it a stream's, with a state of bounded size.)

    Args:
        seq_len: tokens in a sample.
        num_open: samples that are open at a time; with one, documents come in order, and each sample ends where the
            next document does not fit.
        counts: in which documents that are split are counted.

    """

    lacking = 1
    """How many tokens are to be added for the next sample: as few as there are, since no document waits for others."""

    def __init__(self, *, seq_len: int, num_open: int, counts: dict[str, int]) -> None:
        self._waiting: deque[Run] = deque()
        self._begun = False  # whether the first of them is the rest of one, or others were packed to make room for it
        self._seq_len = seq_len
        self._num_open = num_open
        self._counts = counts
        self._keys: list[int] = []
        self._open: dict[int, _Open] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._keys)

    def restore(self, samples: Iterable[Sample]) -> None:
        """Opens samples again, the oldest first."""
        for sample in samples:
            opened, key = self._new()
            for tokens, place in runs_in(sample):
                opened.add(tokens, place)
            key -= len(sample.tokens) << SERIAL_BITS
            insort(self._keys, key)
            self._open[key] = opened

    @property
    def num_whole(self) -> int:
        """How many documents wait that nothing depends on yet."""
        return len(self._waiting) - self._begun

    def add(self, runs: Runs) -> None:
        """Adds documents to those that wait."""
        if runs.lengths:
            tokens, edges = joined(runs.pieces, copy=False), pairwise(accumulate(runs.lengths, initial=0))
            each = (
                tokens[begin:end].astype(kind, copy=False) for (begin, end), kind in zip(edges, runs.kinds, strict=True)
            )
            self._waiting += zip(each, runs.places, strict=True)

    def take(self) -> list[Run]:
        """Takes all that waits."""
        runs = list(self._waiting)
        self._waiting.clear()
        self._begun = False
        return runs

    def drop(self, number: int) -> None:
        """Takes off the last of the whole documents that wait."""
        for _ in range(number):
            self._waiting.pop()

    def next(self) -> Sample | None:
        """Packs what waits until a sample is done; None if nothing waits any more."""
        waiting, keys, samples, seq_len = self._waiting, self._keys, self._open, self._seq_len
        while waiting:
            tokens, place = waiting[0]
            length = len(tokens)
            if length >= seq_len and (self._num_open > 1 or not keys):
                return self._split()
            needed = length << SERIAL_BITS
            at = bisect_left(keys, needed)
            if at < len(keys):
                key = keys.pop(at)
                opened = samples.pop(key)
            elif at < self._num_open:
                opened, key = self._new()
            else:
                self._begun = True
                return self.pop()
            opened.add(tokens, place)
            waiting.popleft()
            self._begun = False
            key -= needed
            if key < FULL:
                return opened.sample()
            insort(keys, key)
            samples[key] = opened
        return None

    def pop(self) -> Sample:
        """Takes the fullest sample."""
        return self._open.pop(self._keys.pop(0)).sample()

    def opened(self) -> list[Sample]:
        """Gives the open samples, the oldest first."""
        return [Sample(array[:length], starts, places) for array, length, starts, places in self.snapshot(0)[1]]

    def snapshot(self, less: int) -> tuple[list[Run], tuple[Taken, ...]]:
        """Gives what waits and the open samples, for a state; nothing of it changes any more.

        Args:
            less: how many of the last documents that wait are left out.
        """
        by_age = sorted(self._keys, key=lambda key: key % FULL)
        waiting = list(islice(self._waiting, len(self._waiting) - less))
        return waiting, tuple([self._open[key].snapshot() for key in by_age])

    def _new(self) -> tuple["_Open", int]:
        self._serial += 1
        return _Open(self._seq_len), (self._seq_len << SERIAL_BITS) + self._serial

    def _split(self) -> Sample:
        """Takes a sample off a document that is as long or longer; the rest stays first."""
        run = self._waiting.popleft()
        self._begun = len(run[0]) > self._seq_len
        if self._begun:
            self._counts["truncated"] += run[1][3] <= 0
            run, rest = split(run, self._seq_len)
            self._waiting.appendleft(rest)
        tokens, place = run
        return Sample(tokens.copy(), (0,), (place,))  # so that it does not keep others in memory


class _Open:
    """An open sample: documents are copied into its array, of which what is set is never written to again."""

    __slots__ = ("_array", "_length", "_places", "_size", "_starts", "_taken")

    def __init__(self, size: int) -> None:
        self._size = size
        self._array: np.ndarray | None = None
        self._length = 0
        self._starts: list[int] = []
        self._places: list[Place] = []
        self._taken: Taken | None = None

    def add(self, tokens: np.ndarray, place: Place) -> None:
        array, begin = self._array, self._length
        self._starts.append(begin)
        self._places.append(place)
        if array is None:
            array = np.empty(self._size, tokens.dtype)
        elif tokens.dtype != array.dtype:
            array = array.astype(np.promote_types(array.dtype, tokens.dtype), copy=False)
        end = begin + len(tokens)
        array[begin:end] = tokens
        self._array, self._length, self._taken = array, end, None

    def snapshot(self) -> Taken:
        if self._taken is None:
            assert self._array is not None
            self._taken = self._array, self._length, tuple(self._starts), tuple(self._places)
        return self._taken

    def sample(self) -> Sample:
        array, length, starts, places = self.snapshot()
        return Sample(array[:length], starts, places)
