"""Batcher: items to batches."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torchdata.nodes import BaseNode

from ibm_nodes.node import Node, Snapshot, snapshot
from ibm_nodes.state import State

T = TypeVar("T")


class Batcher(Node[Any], Generic[T]):
    """Yields lists of ``batch_size`` items of the source, or what ``collate`` makes of them.

    Its state is the source's, after the last batch that was handed out. A batch that an error interrupted is kept and
    completed by the next call; until then there is a state only if one was taken after the last batch, as a Prefetcher
    does.

    Args:
        source: node of samples.
        batch_size: items in a batch, on this rank.
        collate: function of a list of items, such as a ``CausalLMCollator``.
        drop_last: leave out a last batch that is smaller.

    Raises:
        ValueError: if batch_size is below 1.
    """

    def __init__(
        self,
        source: BaseNode[T],
        *,
        batch_size: int,
        collate: Callable[[list[T]], Any] | None = None,
        drop_last: bool = True,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.source = source
        self.batch_size = batch_size
        self.collate = collate
        self.drop_last = drop_last

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self._batch: list[T] = []
        self._snapshot: Snapshot | None = None
        self.source.reset(initial_state)

    def next(self) -> Any:
        batch = self._batch
        while len(batch) < self.batch_size:
            try:
                batch.append(next(self.source))
            except StopIteration:
                if self.drop_last or not batch:
                    raise
                break
        item = batch if self.collate is None else self._collate(batch)
        self._batch, self._snapshot = [], None
        return item

    def snapshot(self) -> Snapshot:
        if self._snapshot is None:
            if self._batch:
                raise RuntimeError(
                    f"an error left {len(self._batch)} of {self.batch_size} items of a batch, which no state can hold: "
                    "call next() again before saving, or put a Prefetcher above, which keeps the last batch's state"
                )
            self._snapshot = snapshot(self.source)
        return self._snapshot

    def _collate(self, batch: list[T]) -> Any:
        assert self.collate is not None
        try:
            return self.collate(batch)
        except StopIteration as error:
            raise RuntimeError(
                "collate raised StopIteration, which would have ended the data without a word"
            ) from error
