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

    began_again = False
    """Whether the last reset began the data again, as they had changed, in place of going on from the state."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls)  # of two classes, the one further down says what counts
        if "snapshot" in own or "get_state" in own:
            cls._takes_snapshots = "snapshot" in own
        if "draw" in own or "next" in own:
            cls._draws_many = "draw" in own

    def snapshot(self) -> Snapshot:
        """Takes the state that the node has now; nothing in it refers to a node."""
        raise NotImplementedError(type(self))

    def get_state(self) -> State:
        state: State = render(self.snapshot())
        return state

    def draw(self, num_tokens: int, extra: int = 0) -> list[T]:
        """Gives the next item, and those after it that are there without a wait, until they have ``num_tokens``.

        Args:
            num_tokens: the last item is the one that reaches it.
            extra: tokens that each item counts more than it has.

        Raises:
            StopIteration: there is no item. This and any error come in place of the first item, so that none is lost.
        """
        return [next(self)]

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


def render(taken: Snapshot) -> Any:
    """Gives the state that was taken, in any thread and at any time."""
    function, arguments = taken
    return function(*arguments)


def began_again(node: Any) -> bool:
    """Tells whether the data below a node were begun again by its last reset."""
    while node is not None and not getattr(node, "began_again", False):
        node = getattr(node, "source", None)
    return node is not None


def as_snapshot(state: Any) -> Snapshot:
    """Gives a snapshot of a state that is there already."""
    return _same, (state,)


def draw(node: BaseNode[T], num_tokens: int, extra: int = 0) -> list[T]:
    """Draws from any node that was reset, as `Node.draw` does."""
    if isinstance(node, Node) and node._draws_many:
        return node.draw(num_tokens, extra)
    return [next(node)]


def _same(state: Any) -> Any:
    return state
