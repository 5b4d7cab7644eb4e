"""Items that were drawn from a source before they are due."""

from collections import deque
from typing import Any, Generic, TypeVar

from torchdata.nodes import BaseNode

from ibm_nodes.node import Snapshot, draw, snapshot

T = TypeVar("T")

AheadState = tuple[Snapshot, int]
"""The source's state before the items, and how many of them were taken."""


class Ahead(Generic[T]):
    """Draws several items at once from a source; its state is exact to the item, and holds none.

    Args:
        source: the node that it draws from, which it resets.
        state: the source's state and how many items to pass over, or None.

    Attributes:
        items: those that were drawn and not taken.
    """

    __slots__ = ("_before", "_skip", "_source", "_taken", "items")

    def __init__(self, source: BaseNode[T], state: tuple[Any, int] | None) -> None:
        self.items: deque[T] = deque()
        self._source = source
        self._before: Snapshot | None = None
        self._taken = 0
        source_state, self._skip = (None, 0) if state is None else state
        source.reset(source_state)

    def fill(self, num_tokens: int, extra: int = 0) -> None:
        """Draws more if there are none, as `Node.draw` does; an error or the end comes before the first item."""
        if self.items:
            return
        while self._skip:
            next(self._source)
            self._skip -= 1
        self._before, self._taken = snapshot(self._source), 0
        self.items.extend(draw(self._source, num_tokens, extra))

    def more(self, num_tokens: int, extra: int = 0) -> None:
        """Draws more behind those that there are."""
        self.items.extend(draw(self._source, num_tokens, extra))

    def take(self, count: int) -> None:
        """Lets go of the first items, which count as handed out."""
        for _ in range(count):
            self.items.popleft()
        self._taken += count

    def snapshot(self) -> AheadState:
        """Takes the state that belongs to the items taken so far."""
        if self.items:
            assert self._before is not None
            return self._before, self._taken
        return snapshot(self._source), self._skip
