"""Items that were drawn from a source before they are due."""

from collections import deque
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from torchdata.nodes import BaseNode

from ibm_nodes.items import origin_of
from ibm_nodes.node import Snapshot, as_snapshot, began_again, draw, snapshot

T = TypeVar("T")

MAX_PASSES = 8

AheadState = tuple[Snapshot, int]
"""The source's state before the items, and how many of them were taken."""


class Ahead(Generic[T]):
    """Draws several items at once from a source; its state is exact to the item, and holds none.

    Args:
        source: the node that it draws from.
        state: the source's state and how many items to pass over, or None.

    Attributes:
        items: those that were drawn and not taken.
        taken: how many of those that were drawn together were taken.
    """

    __slots__ = ("_before", "_skip", "_source", "_started", "_state", "items", "taken")

    def __init__(self, source: BaseNode[T], state: tuple[Any, int] | None) -> None:
        self.items: deque[T] = deque()
        self.taken = 0
        self._source = source
        self._state: Any
        self._state, self._skip = (None, 0) if state is None else state
        self._started = False
        self._before: Snapshot | None = None

    def start(self) -> None:
        """Resets the source, once; after an error it may be called again."""
        if not self._started:
            self._source.reset(self._state)
            if began_again(self._source):
                self._skip = 0
            self._started = True

    def fill(self, num_tokens: int, extra: int = 0) -> None:
        """Draws more if there are none, as `Node.draw` does; an error or the end comes before the first item."""
        if self.items:
            return
        while self._skip:
            next(self._source)
            self._skip -= 1
        self._before, self.taken = snapshot(self._source), 0
        self.items.extend(draw(self._source, num_tokens, extra))

    def more(self, num_tokens: int, extra: int = 0) -> None:
        """Draws more behind those that there are."""
        self.items.extend(draw(self._source, num_tokens, extra))

    def take(self, count: int) -> None:
        """Lets go of the first items, which count as handed out."""
        for _ in range(count):
            self.items.popleft()
        self.taken += count

    def snapshot(self) -> AheadState:
        """Takes the state that belongs to the items taken so far."""
        if self.items:
            assert self._before is not None
            return self._before, self.taken
        return (snapshot(self._source) if self._started else as_snapshot(self._state)), self._skip


class Barren:
    """Notices that an endless source gives nothing that could be handed out: it would be read for ever.

    Args:
        what: what happened, for the message.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._epochs: dict[str, tuple[int, int]] = {}

    def clear(self) -> None:
        """Begins anew, as something was handed out."""
        if self._epochs:
            self._epochs = {}

    def add(self, items: Iterable[Any]) -> None:
        """Takes note of items that were not handed out.

        Raises:
            ValueError: if nothing was of any dataset, in ``MAX_PASSES`` passes.
        """
        for item in items:
            origin = origin_of(item)
            if origin is None:
                return
            first, _ = self._epochs.get(origin.name, (origin.epoch, 0))
            self._epochs[origin.name] = first, origin.epoch
        if all(last - first > MAX_PASSES for first, last in self._epochs.values()):
            names = ", ".join(map(repr, sorted(self._epochs)))
            self.clear()
            raise ValueError(
                f"{self._what} in {MAX_PASSES} passes over {names} in this logical shard, which would go on for ever: "
                "keep more of the data, use fewer logical shards, or give Reader epochs"
            )
