"""Loader: what a training loop iterates over, saves and loads."""

from collections.abc import Iterator
from typing import Any, TypeVar

import torchdata.nodes
from torchdata.nodes import BaseNode

from ibm_nodes.node import Snapshot, render, snapshot
from ibm_nodes.schedule import SCHEDULE_KEY, Schedule
from ibm_nodes.state import State, copy_state

T = TypeVar("T")

BARE = "bare"
"""Stands for the lineage of a state that was loaded without one."""


class Loader(torchdata.nodes.Loader[T]):
    """Iterates over a node, and goes on where it stands.

    A torchdata ``Loader`` that is safe to save, load, iterate again and close. ``iter()`` goes on where the loader
    stands; after the end of a pass there is nothing more, also after a load. The state is that of the last item
    handed out, and nothing is started to take it. ``load_state_dict`` always wins: on a new loader, on a used one,
    before and after ``state_dict()``.

    Args:
        root: the node to iterate over.
        global_batch_size: samples in an optimizer step, on all data-parallel ranks together; None where a step takes
            one batch of each rank.

    Attributes:
        origin: the (lineage, position) that it was loaded from; None at the beginning of a run.

    Raises:
        ValueError: if global_batch_size is below 1.
    """

    def __init__(self, root: BaseNode[T], *, global_batch_size: int | None = None) -> None:
        super().__init__(root, restart_on_stop_iteration=False)
        if global_batch_size is not None and global_batch_size < 1:
            raise ValueError(f"global_batch_size must be at least 1 or None, got {global_batch_size}")
        self.global_batch_size = global_batch_size
        self.origin: tuple[str, int] | None = None
        self._is_reset = False

    def __iter__(self) -> Iterator[T]:
        return _Iterator(self.root)

    def state_dict(self) -> State:
        """Returns the state after the last item handed out, to save and load."""
        state: State = copy_state(render(self.snapshot()))
        return state

    def snapshot(self) -> Snapshot:
        """Takes that state in little time; ``ibm_nodes.node.render`` makes plain data of it, in any thread.

        Nothing in that data may be written to: it shares arrays with the items that are buffered.
        """
        if not self._is_reset:
            self.root.state_dict()  # which resets a node that was not yet
            self._is_reset = True
        schedule = self._schedule()
        return _state, (snapshot(self.root), None if schedule is None else schedule.state())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the loader to a state; iterators that exist go on from there too."""
        schedule = self._schedule()
        set_before = () if schedule is None else schedule.changes
        try:
            if schedule is not None:
                schedule.changes = ()
            self.root.reset(copy_state(state_dict))
        except BaseException:
            if schedule is not None:
                schedule.changes = set_before
            raise
        position = state_dict.get("position", 0)
        self.origin = (BARE, position) if position else None

    def close(self) -> None:
        """Ends the background threads and lets go of blocks; iterating again goes on after the last item handed out."""
        for node in self._chain():
            getattr(node, "close", lambda: None)()

    def _schedule(self) -> Schedule | None:
        found = (getattr(node, "schedule", None) for node in self._chain())
        return next((schedule for schedule in found if isinstance(schedule, Schedule)), None)

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


def _state(taken: Snapshot, schedule: State | None) -> State:
    """Gives the state; what was set of a schedule after the last item was drawn belongs to it too."""
    state: State = render(taken)
    return state if schedule is None or SCHEDULE_KEY not in state else {**state, SCHEDULE_KEY: schedule}
