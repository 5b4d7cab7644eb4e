"""Filter: lets through the items that a predicate wants."""

from collections.abc import Callable
from itertools import compress
from operator import not_
from typing import TypeVar

from torchdata.nodes import BaseNode

from ibm_nodes.ahead import Ahead, AheadState, Barren
from ibm_nodes.items import Origin, call, num_tokens_of, origin_of
from ibm_nodes.node import Node, Snapshot, render
from ibm_nodes.state import State, check_keys

T = TypeVar("T")


class Filter(Node[T]):
    """Yields the items for which a predicate is true, and counts the others.

    The state has the documents and tokens dropped of each dataset. An error of the predicate loses no item.

    Args:
        source: node of items: documents, rows, samples.
        predicate: tells of an item whether it is kept, by nothing but the item. Graphs that are sent to other processes
            need a function that pickles.

    Raises:
        ValueError: while reading, if nothing was kept in 8 passes over the data.
    """

    DROPPED_KEY = "dropped_by_dataset"
    TAKEN_KEY = "taken"
    SOURCE_KEY = "source"

    def __init__(self, source: BaseNode[T], predicate: Callable[[T], bool]) -> None:
        super().__init__()
        self.source = source
        self.predicate = predicate

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self._dropped: dict[str, tuple[int, int]] = {}
        self._barren = Barren("the predicate kept nothing")
        place = None
        if initial_state is not None:
            check_keys(self, initial_state, (self.DROPPED_KEY, self.TAKEN_KEY, self.SOURCE_KEY))
            self._dropped = dict(initial_state[self.DROPPED_KEY])
            place = initial_state[self.SOURCE_KEY], initial_state[self.TAKEN_KEY]
        self._ahead: Ahead[T] = Ahead(self.source, place)
        self._ahead.start()

    def next(self) -> T:
        return self.draw(1, extra=1)[0]

    def draw(self, num_tokens: int, extra: int = 0) -> list[T]:
        while True:
            self._ahead.fill(num_tokens, extra)
            items = list(self._ahead.items)
            wanted = [call(self.predicate, item) for item in items]
            for item in compress(items, map(not_, wanted)):
                self._count(item)
            self._ahead.take(len(items))
            kept = list(compress(items, wanted))
            if kept:
                self._barren.clear()
                return kept
            self._barren.add(items)

    def snapshot(self) -> Snapshot:
        return _state, (dict(self._dropped), self._ahead.snapshot())

    def _count(self, item: T) -> None:
        name = (origin_of(item) or Origin()).name
        documents, tokens = self._dropped.get(name, (0, 0))
        self._dropped[name] = documents + 1, tokens + num_tokens_of(item)


def _state(dropped: dict[str, tuple[int, int]], ahead: AheadState) -> State:
    place, taken = ahead
    return {Filter.DROPPED_KEY: dropped, Filter.TAKEN_KEY: taken, Filter.SOURCE_KEY: render(place)}
