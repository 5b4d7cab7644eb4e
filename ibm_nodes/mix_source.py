"""MixSource: a source of a mix, whose documents are chosen by their lengths."""

import contextlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

from torchdata.nodes import BaseNode

from ibm_nodes.ahead import Ahead
from ibm_nodes.items import Documents
from ibm_nodes.node import Snapshot, peeks, render
from ibm_nodes.state import State

T = TypeVar("T")

NUM_PROBES = 8
"""Documents whose lengths are looked at before the first draw from a source."""
CHUNK_TOKENS = 1 << 12
"""As many at least are drawn at once from a source that cannot be peeked at, or looked at beyond a source's share."""
_NO_DOCUMENTS = Documents((), (), (), (), ())


class MixSource(Ahead[T]):
    """A source of a mix. One that can be peeked at is drawn from when a document is due; others before that.

    Attributes:
        tokens, documents: how many were handed out in all.
        limit: tokens after which the source has ended, or None.
    """

    __slots__ = ("_given", "_peeks", "documents", "limit", "name", "tokens")

    def __init__(
        self,
        name: str,
        source: BaseNode[T],
        limit: int | None,
        tokens: int | None,
        documents: int | None,
        state: tuple[Any, int] | None,
    ) -> None:
        super().__init__(source, state)
        self.name, self.limit = name, limit
        self.tokens, self.documents = tokens or 0, documents or 0
        self._peeks = peeks(source)
        self._given: list[T] | None = None  # what was handed out last, if it was drawn before

    @property
    def is_over(self) -> bool:
        """Whether it has handed out as many tokens as it may."""
        return self.limit is not None and self.tokens >= self.limit

    def probe(self) -> tuple[int, ...]:
        """Gives the lengths of the first documents, which stay to be drawn."""
        with contextlib.suppress(StopIteration):
            self.fill(CHUNK_TOKENS)
            if not self.items and len(self.lengths(CHUNK_TOKENS)) < NUM_PROBES:
                super().fill(CHUNK_TOKENS)
            while self.items and len(self.items) < NUM_PROBES:
                self.more(CHUNK_TOKENS)
        return tuple(self.lengths(CHUNK_TOKENS)[:NUM_PROBES])

    def fill(self, num_tokens: int, extra: int = 0) -> None:
        if not self._peeks or self._skip:
            super().fill(num_tokens, extra)
        elif not self.items:
            self._source.peek(1, wait=True)  # type: ignore[attr-defined]  # a Node

    def lengths(self, num_tokens: int) -> list[int]:
        """Gives the lengths of documents that are there without a wait, and may be drawn."""
        found: list[int] = []
        if self.items:
            found = [len(item.tokens) for item in self.items]  # type: ignore[attr-defined]  # those of a mix have tokens
        elif self._peeks and self._started and not self._skip:
            found = self._source.peek(num_tokens + CHUNK_TOKENS)  # type: ignore[attr-defined]  # a Node
        if self.limit is not None:
            left = self.limit - self.tokens
            found = [length for length, begin in zip(found, accumulate(found, initial=0)) if begin < left]  # noqa: B905
        return found

    def hand_out(self, count: int, num_tokens: int) -> Sequence[T]:
        """Gives the next documents."""
        self.documents += count
        self.tokens += num_tokens
        self._given = None
        if not count:
            return _NO_DOCUMENTS  # type: ignore[return-value]  # of any class
        if not self.items:
            given: Sequence[T] = self._source.take(count)  # type: ignore[attr-defined]  # a Node
            return given
        self._given = [self.items.popleft() for _ in range(count)]
        self.taken += count
        return self._given

    def undo(self, count: int, num_tokens: int) -> None:
        """Takes back documents that were handed out last."""
        if not count:
            return
        self.documents -= count
        self.tokens -= num_tokens
        if self._given is None:
            self._source.undo(count)  # type: ignore[attr-defined]  # a Node
        else:
            self.items.extendleft(reversed(self._given[-count:]))
            self.taken -= count
            del self._given[-count:]

    def mixed_snapshot(self) -> Snapshot:
        """Takes its state: the source's, and how many documents of those after that were handed out."""
        if self._given is None:
            return _state, self.snapshot()
        assert self._before is not None
        return _state_ahead, (*self.snapshot(), self._before, self.taken)


def _state(source: Snapshot, skip: int, back: int = 0) -> tuple[State, int]:
    return render(source, back), skip


def _state_ahead(source: Snapshot, skip: int, before: Snapshot, taken: int, back: int = 0) -> tuple[State, int]:
    return (render(before), taken - back) if back else (render(source), skip)
