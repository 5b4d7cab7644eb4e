"""Loader: what a training loop iterates over, saves and loads."""

from collections.abc import Iterator
from typing import Any, TypeVar

import torchdata.nodes
from torchdata.nodes import BaseNode

from ibm_nodes.schedule import SCHEDULE_KEY, Schedule
from ibm_nodes.state import State, copy_state

T = TypeVar("T")


class Loader(torchdata.nodes.Loader[T]):
    """Iterates over a node, and goes on where it stands.

    A torchdata ``Loader`` that is safe to save, load, iterate again and close. ``iter()`` goes on where the loader
    stands; after the end of a pass there is nothing more, also after a load. The state is that of the last item
    handed out, and nothing is started to take it. ``load_state_dict`` always wins: on a new loader, on a used one,
    before and after ``state_dict()``.

    Args:
        root: the node to iterate over.
    """

    def __init__(self, root: BaseNode[T]) -> None:
        super().__init__(root, restart_on_stop_iteration=False)

    def __iter__(self) -> Iterator[T]:
        return _Iterator(self.root)

    def state_dict(self) -> State:
        """Returns the state after the last item handed out, to save and load."""
        state: State = copy_state(self.root.state_dict())
        for node in self._chain():
            schedule = getattr(node, "schedule", None)
            if isinstance(schedule, Schedule) and SCHEDULE_KEY in state:
                state[SCHEDULE_KEY] = schedule.state()  # what was set after the last item was drawn belongs to it too
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the loader to a state; iterators that exist go on from there too."""
        self.root.reset(copy_state(state_dict))

    def close(self) -> None:
        """Ends the background threads and lets go of blocks; iterating again goes on after the last item handed out."""
        for node in self._chain():
            getattr(node, "close", lambda: None)()

    def _chain(self) -> Iterator[Any]:
        node: Any = self.root
        while node is not None:
            yield node
            node = getattr(node, "source", None)

    def __enter__(self) -> "Loader[T]":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Iterator(Iterator[T]):
    """Draws from the root; holds no loader, so that dropping the last reference to both ends everything at once."""

    def __init__(self, root: BaseNode[T]) -> None:
        self._root = root

    def __next__(self) -> T:
        item: T = next(self._root)
        return item
