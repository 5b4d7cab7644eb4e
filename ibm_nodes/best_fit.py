"""BestFit: documents into the fullest of a bounded number of open samples that has room."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from ibm_nodes.items import Place, Sample
from ibm_nodes.tail import Run, runs_in

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

    Attributes:
        waiting: documents that are not packed yet.
        length: their tokens.
    """

    def __init__(self, *, seq_len: int, num_open: int, counts: dict[str, int]) -> None:
        self.length = 0
        self.waiting: deque[Run] = deque()
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
            for pieces, _, place in runs_in(sample):
                opened.add(pieces, place)
            key -= len(sample.tokens) << SERIAL_BITS
            insort(self._keys, key)
            self._open[key] = opened

    def add(self, runs: Iterable[Run]) -> None:
        """Adds documents to those that wait."""
        for run in runs:
            self.waiting.append(run)
            self.length += run[1]

    def take(self) -> list[Run]:
        """Takes all that waits."""
        runs = list(self.waiting)
        self.waiting.clear()
        self.length = 0
        return runs

    def next(self) -> Sample | None:
        """Packs what waits until a sample is done; None if nothing waits any more."""
        waiting, keys, samples, seq_len = self.waiting, self._keys, self._open, self._seq_len
        while waiting:
            pieces, length, place = waiting[0]
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
                return self.pop()
            opened.add(pieces, place)
            waiting.popleft()
            self.length -= length
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
        return [Sample(array[:length], starts, places) for array, length, starts, places in self.snapshot()[1]]

    def snapshot(self) -> tuple[tuple[Run, ...], tuple[Taken, ...]]:
        """Gives what waits and the open samples, the oldest first; what is set in their arrays changes no more."""
        if not self._keys and not self.waiting:
            return (), ()
        by_age = sorted(self._keys, key=lambda key: key % FULL)
        return tuple(self.waiting), tuple([self._open[key].snapshot() for key in by_age])

    def _new(self) -> tuple["_Open", int]:
        self._serial += 1
        return _Open(self._seq_len), (self._seq_len << SERIAL_BITS) + self._serial

    def _split(self) -> Sample:
        """Takes a sample off a document that is as long or longer; the rest stays first."""
        pieces, length, place = self.waiting.popleft()
        size = self._seq_len
        self.length -= size
        tokens = pieces[0] if len(pieces) == 1 and place[3] > 0 else np.concatenate(pieces)
        if length > size:
            name, url, row, offset = place
            self._counts["truncated"] += offset <= 0
            self.waiting.appendleft(([tokens[size:]], length - size, (name, url, row, offset + size)))
        return Sample(tokens[:size], (0,), (place,))


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

    def add(self, pieces: Sequence[np.ndarray], place: Place) -> None:
        array, begin = self._array, self._length
        self._starts.append(begin)
        self._places.append(place)
        if array is None:
            array = np.empty(self._size, pieces[0].dtype)
        for tokens in pieces:
            if tokens.dtype != array.dtype:
                array = array.astype(np.promote_types(array.dtype, tokens.dtype), copy=False)
            end = begin + len(tokens)
            array[begin:end] = tokens
            begin = end
        self._array, self._length, self._taken = array, begin, None

    def snapshot(self) -> Taken:
        if self._taken is None:
            assert self._array is not None
            self._taken = self._array, self._length, tuple(self._starts), tuple(self._places)
        return self._taken

    def sample(self) -> Sample:
        array, length, starts, places = self.snapshot()
        return Sample(array[:length], starts, places)
