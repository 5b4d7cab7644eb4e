"""Shuffler: yields a random item of a full buffer."""

from operator import itemgetter
from typing import Any, TypeVar

from torchdata.nodes import BaseNode

from ibm_nodes.items import freeze, thaw
from ibm_nodes.node import Node, Snapshot, render, snapshot
from ibm_nodes.permutation import Seed, check_seed, derive_key, random_index
from ibm_nodes.state import State, check_keys, check_settings

T = TypeVar("T")


class Shuffler(Node[T]):
    """Yields the source's items in a random order, each from a buffer that is full until the source ends.

    When the source ends, the rest of the buffer follows, in random order too. The buffer is part of the state. A source
    that makes other items from now on, such as a Packer with another seq_len, gets the buffer back to cut it anew.

    Args:
        source: node of items that ``ibm_nodes.items.freeze`` can save: samples, documents, dicts, arrays, tensors.
        buffer_size: number of items to choose from; 1 keeps the order.
        seed: an int or a tuple of ints; give each logical shard its own, as in ``seed=(0, shard)``.

    Raises:
        ValueError: if buffer_size is below 1.
    """

    SEED_KEY = "seed"
    SIZE_KEY = "buffer_size"
    DRAWN_KEY = "drawn"
    BUFFER_KEY = "buffer"
    NUMBERS_KEY = "numbers"
    SOURCE_KEY = "source"

    def __init__(self, source: BaseNode[T], *, buffer_size: int, seed: Seed) -> None:
        super().__init__()
        if buffer_size < 1:
            raise ValueError(f"buffer_size must be at least 1, got {buffer_size}")
        self.source = source
        self.buffer_size = buffer_size
        self.seed = check_seed(seed)
        self._key = derive_key("Shuffler", self.seed)

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self._buffer: list[T] = []
        # For each item its plain form, or None: it is turned into plain data once, when a state needs it.
        self._plain: list[Any] = []
        # How many items came before each.
        self._numbers: list[int] = []
        self._drawn = 0
        self._below: Node[T] | None = self.source if isinstance(self.source, Node) else None
        if initial_state is None:
            self.source.reset(None)
            return
        buffer_keys = (self.BUFFER_KEY, self.NUMBERS_KEY)
        check_keys(self, initial_state, (self.SEED_KEY, self.SIZE_KEY, self.DRAWN_KEY, *buffer_keys, self.SOURCE_KEY))
        check_settings(self, initial_state, seed=self.seed, buffer_size=self.buffer_size)
        self._plain = list(initial_state[self.BUFFER_KEY])
        self._buffer = [thaw(data) for data in self._plain]
        self._numbers = list(initial_state[self.NUMBERS_KEY])
        self._drawn = initial_state[self.DRAWN_KEY]
        self.source.reset(initial_state[self.SOURCE_KEY])

    def next(self) -> T:
        if self._below is not None and self._below.wants_back:
            self._give_back(self._below)
        buffer, plain, numbers = self._buffer, self._plain, self._numbers
        while len(buffer) < self.buffer_size:
            try:
                buffer.append(next(self.source))
            except StopIteration:
                break
            plain.append(None)
            numbers.append(self._drawn + len(numbers))
        if not buffer:
            raise StopIteration
        index = random_index(self._key, self._drawn, len(buffer))
        self._drawn += 1
        last, last_plain, last_number = buffer.pop(), plain.pop(), numbers.pop()
        if index == len(buffer):
            return last
        item = buffer[index]
        buffer[index], plain[index], numbers[index] = last, last_plain, last_number
        return item

    def snapshot(self) -> Snapshot:
        plain = self._plain
        if None in plain:
            self._plain = plain = [
                freeze(item) if data is None else data for item, data in zip(self._buffer, plain, strict=True)
            ]
        return _state, (
            self.seed,
            self.buffer_size,
            self._drawn,
            plain.copy(),
            self._numbers.copy(),
            snapshot(self.source),
        )

    def _give_back(self, below: Node[T]) -> None:
        in_order = [item for _, item in sorted(zip(self._numbers, self._buffer, strict=True), key=itemgetter(0))]
        below.take_back(in_order)
        self._buffer, self._plain, self._numbers = [], [], []


def _state(seed: Seed, buffer_size: int, drawn: int, buffer: list[Any], numbers: list[int], source: Snapshot) -> State:
    return {
        Shuffler.SEED_KEY: seed,
        Shuffler.SIZE_KEY: buffer_size,
        Shuffler.DRAWN_KEY: drawn,
        Shuffler.BUFFER_KEY: list(buffer),
        Shuffler.NUMBERS_KEY: list(numbers),
        Shuffler.SOURCE_KEY: render(source),
    }
