"""The loader's part of a checkpoint of torch.distributed.checkpoint."""

from typing import Any

from ibm_nodes.archive import decode, encode, pack, unpack
from ibm_nodes.loader import Loader
from ibm_nodes.settings import check_graph, derive_lineage, describe, find_sharder
from ibm_nodes.sharder import Sharder
from ibm_nodes.state import SHARDS_KEY


class Stateful:
    """Puts a loader beside model and optimizer into ``dcp.save``, ``dcp.async_save`` and ``dcp.load``.

    One leaf of bytes for each logical shard, under a key that no other rank has, and one for what all ranks agree
    on: so nothing is overwritten, and ``dcp.load`` at another world size asks for the shards that the rank then
    owns. Before the first batch the leaves are empty, and nothing is started to make them. (DCP itself communicates,
    and keeps one save in flight; ``ibm_nodes.checkpoint.save`` needs neither.)

    Args:
        loader: a loader with a ``Sharder`` in its graph.

    Raises:
        ValueError: if there is no Sharder; while loading: if the bytes are not a loader's, or settings differ.
    """

    COMMON_KEY = "common"

    def __init__(self, loader: Loader[Any]) -> None:
        find_sharder(loader)
        self.loader = loader

    def state_dict(self) -> dict[str, bytes]:
        """Gives the leaves of this rank."""
        state = self.loader.state_dict()
        shards = state.pop(SHARDS_KEY)
        if state[Sharder.POSITION_KEY] == 0:
            return {self.COMMON_KEY: b"", **{_key(shard): b"" for shard in shards}}
        leaves = {_key(shard): encode({"shard": shard, "state": pack(own)}) for shard, own in shards.items()}
        lineage = derive_lineage(self.loader.origin, describe(self.loader))
        return {self.COMMON_KEY: encode({"lineage": lineage, "state": state}), **leaves}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the loader to what was saved, at any world size."""
        common = state_dict[self.COMMON_KEY]
        if not common:
            self.loader.root.reset(None)
            self.loader.origin = None
            return
        shards = {}
        for name, leaf in state_dict.items():
            if name != self.COMMON_KEY:
                content = decode(leaf, name)
                shards[content["shard"]] = unpack(content["state"])
        content = decode(common, self.COMMON_KEY)
        state = {**content["state"], SHARDS_KEY: shards}
        check_graph(find_sharder(self.loader), state)
        self.loader.load_state_dict(state)
        self.loader.origin = (content["lineage"], content["state"][Sharder.POSITION_KEY])


def _key(shard: int) -> str:
    return f"shard.{shard:06}"
