"""Packer: documents to samples of a fixed number of tokens."""

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from torchdata.nodes import BaseNode

from ibm_nodes.best_fit import BestFit, Taken
from ibm_nodes.concat import CUT_TOKENS, Concat
from ibm_nodes.items import Document, Sample, freeze, thaw
from ibm_nodes.marks import Marks
from ibm_nodes.node import Node, Snapshot, draw, render, snapshot, undoes
from ibm_nodes.runs import Run, columns, mended, runs_in
from ibm_nodes.schedule import Schedule
from ibm_nodes.state import State, check_keys, check_settings

Strategy = Literal["concat", "pad", "best_fit"]
Overflow = Literal["split", "truncate", "drop"]
COUNTS = ("documents", "truncated", "dropped", "tokens", "padding")
"""What is counted: documents without the empty ones; of these how many were truncated to the length of a sample or cut
by the end of one, and how many dropped; tokens in samples; and tokens that these lack to be full.
"""


class Packer(Node[Sample]):
    """Packs documents into samples of at most ``seq_len`` tokens.

    Each document is closed with EOS, and opened with BOS if there is one, where the data does not already have it.
    Documents without tokens leave no trace. Strategies:

    - ``concat``: documents end to end, cut every ``seq_len`` tokens. Every sample is full, but for the last one.
    - ``pad``: whole documents in their order; a sample ends where the next document does not fit.
    - ``best_fit``: whole documents, each into the fullest of ``num_open`` open samples that has room for it.

    Samples hold no padding: a collator adds it. Documents that wait and samples that are open are part of the state,
    and come when the source ends. Where ``seq_len`` changes, when a state is loaded or by a ``Schedule``, these and the
    samples that a ``Shuffler`` above has kept are cut anew in their order, split if they are longer; none of their
    tokens is lost or repeated.

    Args:
        source: node of documents.
        seq_len: tokens in a sample; with a ``Schedule``, as many as it says for the sample that is drawn.
        eos_id: id that closes a document.
        bos_id: id that opens a document, or None.
        pad_id: id that documents in the data may end with as padding, which is taken off; or None.
        strategy: "concat", "pad" or "best_fit".
        overflow: what becomes of a document that is longer than ``seq_len`` with its marks. "split": all of it comes,
            in several samples; "truncate": its first ``seq_len`` tokens, without an EOS after them; "drop": nothing.
        num_open: for best_fit, samples that are open at a time: more of them pad less, and take memory.
        drop_last: leave out the last sample of finite data if it is not full.

    Raises:
        ValueError: if an argument is out of range.
    """

    SETTING_KEYS = ("eos_id", "bos_id", "pad_id", "strategy", "overflow", "num_open")
    SEQ_LEN_KEY = "seq_len"
    COUNTS_KEY = "counts"
    TAIL_KEY = "tail"
    OPEN_KEY = "open"
    SOURCE_KEY = "source"

    def __init__(
        self,
        source: BaseNode[Document],
        *,
        seq_len: int | Schedule,
        eos_id: int,
        bos_id: int | None = None,
        pad_id: int | None = None,
        strategy: Strategy = "concat",
        overflow: Overflow = "split",
        num_open: int = 16,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        self.schedule = seq_len if isinstance(seq_len, Schedule) else None
        # Of a schedule its first one, so that a description of the node does not depend on the clock.
        self.seq_len = seq_len.given_seq_lens[0][1] if isinstance(seq_len, Schedule) else seq_len
        for name, value in (("seq_len", self.seq_len), ("num_open", num_open)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name, token in (("eos_id", eos_id), ("bos_id", bos_id), ("pad_id", pad_id)):
            if token is not None and not 0 <= token < 1 << 31:
                raise ValueError(f"{name} must be from 0 to 2**31 - 1, got {token}")
        for name, choice, kind in (("strategy", strategy, Strategy), ("overflow", overflow, Overflow)):
            if choice not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {choice!r}")
        self.source = source
        self.eos_id = eos_id
        self.bos_id = bos_id
        self.pad_id = pad_id
        self.strategy = strategy
        self.overflow = overflow
        self.num_open = num_open
        self.drop_last = drop_last

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self._settings = {name: getattr(self, name) for name in self.SETTING_KEYS}
        state = initial_state
        if state is None:
            state = {self.SEQ_LEN_KEY: self.seq_len, **self._settings, self.SOURCE_KEY: None}
            state |= {self.COUNTS_KEY: dict.fromkeys(COUNTS, 0), self.TAIL_KEY: [], self.OPEN_KEY: []}
        own = (self.SEQ_LEN_KEY, self.COUNTS_KEY, self.TAIL_KEY, self.OPEN_KEY, self.SOURCE_KEY)
        check_keys(self, state, (*self.SETTING_KEYS, *own))
        check_settings(self, state, **self._settings)
        self._counts: dict[str, int] = dict(state[self.COUNTS_KEY])
        # The length that samples have, and the one that they are to have up to a sample of the global stream.
        self._length: int = state[self.SEQ_LEN_KEY]
        self._goal, self._until = self.seq_len, -1 if self.schedule else math.inf
        self._below: Snapshot | None = None
        # Whether a draw may go ahead. What it has brought and was not packed is no part of the state: the source gives
        # the state before it, and takes it back when it would give something else by now.
        self._ahead = self.overflow == "split" and undoes(self.source)
        self._begin()
        opened, waiting = ([thaw(sample) for sample in state[key]] for key in (self.OPEN_KEY, self.TAIL_KEY))
        self._packing.restore(opened)
        self._packing.add(columns(mended((run for sample in waiting for run in runs_in(sample)), self._counts)))
        self.source.reset(state[self.SOURCE_KEY])

    def next(self) -> Sample:
        if self.wants_back:
            self.take_back(())
        elif self._numbers and self.source.is_stale:  # type: ignore[attr-defined]  # a Node, if it can undo
            self._undo()
        packing, counts = self._packing, self._counts
        while (sample := packing.next()) is None:
            if not self._draw():
                if len(packing) <= self.drop_last:
                    raise StopIteration
                sample = packing.pop()
                break
        length = len(sample.tokens)
        counts["tokens"] += length
        if length < self._length:
            counts["padding"] += self._length - length
        return sample

    def snapshot(self) -> Snapshot:
        if self._below is None:
            self._below = snapshot(self.source)
        unused, back = self._unused()
        counts = self._counts.copy()
        counts["documents"] -= unused
        return _state, (self._length, self._settings, counts, *self._packing.snapshot(unused), self._below, back)

    @property
    def wants_back(self) -> bool:
        schedule = self.schedule
        if schedule is not None and schedule.now >= self._until:
            self._goal, self._until = schedule.seq_len_at(schedule.now)
        return self._goal != self._length

    def take_back(self, items: Sequence[Sample]) -> None:
        if not self.wants_back:
            return
        self._undo()
        self._counts["tokens"] -= sum(len(sample.tokens) for sample in items)
        self._counts["padding"] -= sum(self._length - len(sample.tokens) for sample in items)
        kept = [run for sample in (*items, *self._packing.opened()) for run in runs_in(sample)]
        kept += self._packing.take()
        self._length = self._goal
        self._begin()
        self._packing.add(columns(mended(kept, self._counts)))

    def _begin(self) -> None:
        """Begins with nothing packed, in samples of the length that they have."""
        self._marks = Marks(
            eos_id=self.eos_id,
            bos_id=self.bos_id,
            pad_id=self.pad_id,
            limit=None if self.overflow == "split" else self._length,
            truncate=self.overflow == "truncate",
            counts=self._counts,
        )
        self._packing: Concat | BestFit
        if self.strategy == "concat":
            self._packing = Concat(seq_len=self._length, counts=self._counts)
        else:
            num_open = 1 if self.strategy == "pad" else self.num_open
            self._packing = BestFit(seq_len=self._length, num_open=num_open, counts=self._counts)
        self._forget_draw()

    def _forget_draw(self) -> None:
        # Of the last draw: how many documents it brought, for each that has tokens how many there are up to it, and the
        # source's state after it.
        self._num_drawn = 0
        self._numbers: Sequence[int] = ()
        self._below = None

    def _draw(self) -> bool:
        """Adds documents to those that wait; says whether there were any."""
        self._forget_draw()
        num_tokens = self._packing.lacking
        if self._ahead:
            num_tokens = max(num_tokens, CUT_TOKENS)
        try:
            documents = draw(self.source, num_tokens, extra=1 if self.bos_id is None else 2)
        except StopIteration:
            return False
        runs, numbers = self._marks.runs(documents)
        self._packing.add(runs)
        if self._ahead:
            self._num_drawn, self._numbers = len(documents), numbers
        return True

    def _unused(self) -> tuple[int, int]:
        """Gives how many runs of the last draw nothing was taken of, and how many documents that goes back."""
        numbers = self._numbers
        unused = min(len(numbers), self._packing.num_whole)
        if not unused:
            return 0, 0
        return unused, self._num_drawn - (numbers[-unused - 1] if unused < len(numbers) else 0)

    def _undo(self) -> None:
        """Gives back what was drawn ahead."""
        unused, back = self._unused()
        if unused:
            self._packing.drop(unused)
            self._counts["documents"] -= unused
            self.source.undo(back)  # type: ignore[attr-defined]  # a Node, if it can undo
        self._forget_draw()


def _state(
    seq_len: int,
    settings: dict[str, Any],
    counts: dict[str, int],
    waiting: list[Run],
    opened: tuple[Taken, ...],
    source: Snapshot,
    back: int,
) -> State:
    return {
        Packer.SEQ_LEN_KEY: seq_len,
        **settings,
        Packer.COUNTS_KEY: counts,
        Packer.TAIL_KEY: [freeze(Sample(tokens.copy(), (0,), (place,))) for tokens, place in waiting],
        Packer.OPEN_KEY: [
            freeze(Sample(array[:length].copy(), starts, places)) for array, length, starts, places in opened
        ],
        Packer.SOURCE_KEY: render(source, back),
    }
