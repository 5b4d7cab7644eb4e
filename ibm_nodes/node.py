"""Node: what our nodes add to torchdata's, so that a state and a document cost little each."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torchdata.nodes import BaseNode

from ibm_nodes.state import State

T = TypeVar("T")

Snapshot = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments, none of which changes any more: what it returns is the state.

(But for what a reader learns late and what holds for its earlier states, too: the listing, and places with bad data.)
"""


class Node(BaseNode[T]):
    """A node that hands out several items in one call, and whose state is taken in two steps.

    Every item has a state, and hardly any is asked for: ``snapshot`` collects what it is made of, in a microsecond or
    two; ``get_state`` makes plain data of that.
    """

    _takes_snapshots = _draws_many = True
    _undoes = _peeks = False

    began_again = False
    """Whether the last reset began the data again, as they had changed, in place of going on from the state."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls)  # of two classes, the one further down says what counts
        if "snapshot" in own or "get_state" in own:
            cls._takes_snapshots = "snapshot" in own
        if "draw" in own or "next" in own:
            cls._draws_many = "draw" in own
        if own.keys() & {"snapshot", "get_state", "draw", "next", "undo", "peek", "take"}:
            cls._undoes, cls._peeks = "undo" in own, "peek" in own

    def snapshot(self) -> Snapshot:
        """Takes the state that the node has now; nothing in it refers to a node."""
        raise NotImplementedError(type(self))

    def get_state(self) -> State:
        state: State = render(self.snapshot())
        return state

    def draw(self, num_tokens: int, extra: int = 0) -> Sequence[T]:
        """Gives the next item, and those after it that are there without a wait, until they have ``num_tokens``.

        Args:
            num_tokens: the last item is the one that reaches it.
            extra: tokens that each item counts more than it has.

        Raises:
            StopIteration: there is no item. This and any error come in place of the first item, so that none is lost.
        """
        return [next(self)]

    def undo(self, count: int) -> None:
        """Takes back the last items of the last draw; the next draw begins with them.

        A class that has this gives snapshots whose function takes an argument ``back``, too: how many of the last items
        of the last draw are not to be part of the state.
        """
        raise NotImplementedError(type(self))

    def peek(self, num_tokens: int, wait: bool = False) -> list[int]:
        """Gives how many tokens the next items have, as far as they are there; about ``num_tokens`` together.

        Args:
            num_tokens: how many are wanted.
            wait: for the first of them, or StopIteration.
        """
        raise NotImplementedError(type(self))

    def take(self, count: int) -> Sequence[T]:
        """Gives the next items, which were peeked at: a draw of so many."""
        raise NotImplementedError(type(self))

    @property
    def is_stale(self) -> bool:
        """Whether a draw may give other items by now than those that it has given."""
        return False

    @property
    def wants_back(self) -> bool:
        """Whether its next items are others than those that it would have given, made of what nodes above have kept.

        So it is where a setting changes while it runs, or has changed since its state was taken.
        """
        return False

    def take_back(self, items: Sequence[T]) -> None:
        """Takes back what a node above has kept of it, if it wants that.

        Args:
            items: in the order in which they were drawn.
        """


def snapshot(node: BaseNode[Any]) -> Snapshot:
    """Takes the state of any node that was reset."""
    if isinstance(node, Node) and node._takes_snapshots:
        return node.snapshot()
    return as_snapshot(node.state_dict())


def undoes(node: BaseNode[Any]) -> bool:
    """Tells whether a node can take back what it has drawn."""
    return isinstance(node, Node) and node._undoes


def peeks(node: BaseNode[Any]) -> bool:
    """Tells whether one can peek at what a node has next, and it can undo that."""
    return isinstance(node, Node) and node._peeks and node._undoes


def render(taken: Snapshot, back: int = 0) -> Any:
    """Gives the state that was taken, in any thread and at any time.

    Args:
        taken: the snapshot.
        back: how many of the last items of the last draw are not to be part of it; above 0 only for a node that can
            undo so many.
    """
    function, arguments = taken
    return function(*arguments, back=back) if back else function(*arguments)


def began_again(node: Any) -> bool:
    """Tells whether the data below a node were begun again by its last reset."""
    while node is not None and not getattr(node, "began_again", False):
        node = getattr(node, "source", None)
    return node is not None


def as_snapshot(state: Any) -> Snapshot:
    """Gives a snapshot of a state that is there already."""
    return _same, (state,)


def draw(node: BaseNode[T], num_tokens: int, extra: int = 0) -> Sequence[T]:
    """Draws from any node that was reset, as `Node.draw` does."""
    if isinstance(node, Node) and node._draws_many:
        return node.draw(num_tokens, extra)
    return [next(node)]


def _same(state: Any) -> Any:
    return state
