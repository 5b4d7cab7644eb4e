"""Mapper: changes documents one by one, with randomness that belongs to the document."""

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from torchdata.nodes import BaseNode

from ibm_nodes.ahead import Ahead, AheadState
from ibm_nodes.items import call, origin_of
from ibm_nodes.node import Node, Snapshot, render
from ibm_nodes.permutation import Seed, check_seed, derive_key
from ibm_nodes.state import State, check_keys, check_settings

T = TypeVar("T")
U = TypeVar("U")


class Mapper(Node[U], Generic[T, U]):
    """Yields what a function makes of each document, and of a seed of the document's own.

    That seed is a function of ``seed`` and of the document's dataset, file name, row and epoch: a document is changed
    in the same way whoever reads it, after resuming, at any world size, and in a copy of the corpus in another place;
    and in another way in the next epoch. An error of the function loses no item.

    Args:
        source: node of documents or rows.
        function: gives a document for a document and a seed from 0 to 2**64 - 1, and depends on nothing else: no
            global generator, no count of calls. It must not write to the document's tokens. Graphs that are sent to
            other processes need a function that pickles.
        seed: an int or a tuple of ints, the same for all logical shards.

    Raises:
        TypeError: while reading, if an item is neither a document nor a row.
    """

    SEED_KEY = "seed"
    TAKEN_KEY = "taken"
    SOURCE_KEY = "source"

    def __init__(self, source: BaseNode[T], function: Callable[[T, int], U], *, seed: Seed) -> None:
        super().__init__()
        self.source = source
        self.function = function
        self.seed = check_seed(seed)

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        place = None
        if initial_state is not None:
            check_keys(self, initial_state, (self.SEED_KEY, self.TAKEN_KEY, self.SOURCE_KEY))
            check_settings(self, initial_state, seed=self.seed)
            place = initial_state[self.SOURCE_KEY], initial_state[self.TAKEN_KEY]
        self._ahead: Ahead[T] = Ahead(self.source, place)
        self._ahead.start()

    def next(self) -> U:
        return self.draw(1, extra=1)[0]

    def draw(self, num_tokens: int, extra: int = 0) -> list[U]:
        self._ahead.fill(num_tokens, extra)
        apply = partial(_apply, self.function, self.seed)
        made = [call(apply, item) for item in self._ahead.items]
        self._ahead.take(len(made))
        return made

    def snapshot(self) -> Snapshot:
        return _state, (self.seed, self._ahead.snapshot())


def _apply(function: Callable[[T, int], U], seed: Seed, item: T) -> U:
    origin = origin_of(item)
    if origin is None:
        raise TypeError(
            f"Mapper's items must be documents or rows, which say where they are from, got {type(item).__name__}: put "
            "it below the node that makes something else of them"
        )
    file = origin.url.rpartition("/")[2]
    return function(item, derive_key("Mapper", seed, origin.name, file, origin.row, origin.epoch))


def _state(seed: Seed, ahead: AheadState) -> State:
    place, taken = ahead
    return {Mapper.SEED_KEY: seed, Mapper.TAKEN_KEY: taken, Mapper.SOURCE_KEY: render(place)}
