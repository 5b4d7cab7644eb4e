"""A training job: the model, the cluster, and the choices that its memory, traffic and time follow from."""

from dataclasses import dataclass
from typing import Literal

from ibm_nodes.recipes.cluster import Cluster
from ibm_nodes.recipes.planner.calibration import Calibration
from ibm_nodes.recipes.planner.shapes import Shape

Strategy = Literal["full", "no-reshard", "node", "hybrid"]
BLOCK_SHARES = {"none": 0.0, "selective": 0.5, "full": 1.0}
"""Of the blocks that the choices of the recipe for FSDP compute again."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that the planner's formulae need.

    Args:
        shape: the model.
        cluster: the machines.
        calibration: what was measured.
        batch: sequences a device and micro-step.
        seq_len: tokens of a sequence; of an encoder's and of a decoder's each.
        cards: network cards of a node, which share its traffic.
        accumulate: micro-steps of an optimizer step; gradients cross the network with the last one only.
        strategy: "full" shards over all devices and frees a unit after its forward; "no-reshard" keeps it for backward;
            "node" keeps it sharded over the devices of its node; "hybrid" shards in a node, with a copy in each.
        limiter: at most two units are gathered at a time; FSDP2 always does so.
        recompute: share of the blocks whose activations are computed again, or "op" for all but every second product.
        param_bytes: of a gathered parameter.
        reduce_bytes: of a gradient on the network.
        backend: "nccl", or "gloo", whose reduce-scatter is an all-reduce.
    """

    shape: Shape
    cluster: Cluster
    calibration: Calibration
    batch: int
    seq_len: int
    cards: int = 1
    accumulate: int = 1
    strategy: Strategy = "full"
    limiter: bool = True
    recompute: float | Literal["op"] = 1.0
    param_bytes: int = 2
    reduce_bytes: int = 2
    backend: Literal["nccl", "gloo"] = "nccl"

    @property
    def shards(self) -> int:
        """The number of devices that the model is cut for."""
        return self.cluster.gpus_per_node if self.strategy == "hybrid" else self.cluster.world_size

    @property
    def reshards(self) -> bool:
        """Whether a unit is gathered again for backward."""
        return self.strategy != "no-reshard"

    @property
    def tokens(self) -> int:
        """Tokens a device and micro-step."""
        return self.batch * self.seq_len

    @property
    def scatter_factor(self) -> int:
        """How many times a reduce-scatter's bytes the backend sends for one."""
        return 2 if self.backend == "gloo" else 1


def recompute_share(text: str) -> float | Literal["op"]:
    """Reads "none", "selective", "full", "op", or a share of the blocks, such as 1/3 or 0.5.

    Raises:
        ValueError: if it is none of them.
    """
    if text in BLOCK_SHARES:
        return BLOCK_SHARES[text]
    if text == "op":
        return "op"
    above, _, below = text.partition("/")
    try:
        share = float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(
            f"activation_checkpointing must be none, selective, full, op or a share such as 1/3, got {text!r}"
        )
    return share
