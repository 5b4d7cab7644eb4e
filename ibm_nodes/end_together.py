"""EndTogether: a finite pass that ends at the same batch on all ranks."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torchdata.nodes import BaseNode

from ibm_nodes.node import Node, Snapshot, snapshot
from ibm_nodes.sharder import Sharder
from ibm_nodes.state import State

T = TypeVar("T")


class EndTogether(Node[T]):
    """Yields the source's batches until no rank has an item left; ranks that have none yield filler until then.

    So every rank makes the same number of steps, and the real items of a step are the same at every world size. Costs
    one all-reduce of eight bytes for each batch, in the thread that draws the batch; none if there is one rank.

    Args:
        source: node above a Sharder with a ``filler``, such as a Batcher.
        group: a process group of the data-parallel ranks that nothing else uses, such as
            ``torch.distributed.new_group(backend="gloo")``; None if there is one rank.

    Raises:
        ValueError: if there is no Sharder with a filler below, or it has several ranks and there is no group.
    """

    def __init__(self, source: BaseNode[T], *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.source = source
        self._group = group
        node: Any = source
        while node is not None and not isinstance(node, Sharder):
            node = getattr(node, "source", None)
        if node is None or node.filler is None:
            raise ValueError("EndTogether must stand above a Sharder with a filler, which ranks yield that have ended")
        if node.world_size > 1 and group is None:
            raise ValueError(f"group must be given, since {node.world_size} ranks have to end together")
        self._sharder: Sharder[Any] = node
        node.goes_on = True

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(initial_state)
        self._more: bool | None = None

    def next(self) -> T:
        sharder = self._sharder
        if self._more is None:
            _, self._more = self._any(False, not sharder.all_ended)
        if not self._more:
            raise StopIteration
        before = sharder.num_items - sharder.num_filler
        item: T = next(self.source)
        real, self._more = self._any(sharder.num_items - sharder.num_filler > before, not sharder.all_ended)
        if not real and not self._more:
            raise StopIteration
        return item

    def snapshot(self) -> Snapshot:
        return snapshot(self.source)

    def _any(self, *votes: bool) -> list[bool]:
        """Tells of each vote whether any rank says yes."""
        if self._group is None:
            return list(votes)
        ballot = torch.tensor(votes, dtype=torch.int32)
        dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self._group)
        return [bool(vote) for vote in ballot.tolist()]
