"""Memory of a device, by part, in bytes."""

from dataclasses import dataclass

from ibm_nodes.recipes.planner.job import Job
from ibm_nodes.recipes.planner.shapes import Block

MASTER_BYTES = 4
"""Of a parameter of the optimizer's copy, of its gradient, and of each of Adam's two moments."""
ACTIVATION_BYTES = 2
LOGIT_BYTES = 10
"""Of a logit: the output in bf16, its copy in fp32 for the loss, and that copy's gradient."""
SCORE_BYTES = 5
"""Of an attention score that is kept: softmax and dropout in bf16, and dropout's mask."""
IN_FLIGHT = 2
"""Units that are gathered at a time under the limiter: the present one and the next."""


@dataclass(frozen=True)
class Memory:
    """What a device holds at the peak, as if all parts peaked at once.

    Args:
        parts: bytes by name.
        limited: bytes of gathered units with the limiter.
        unlimited: the same without, if the host runs ahead through the whole model.
    """

    parts: dict[str, float]
    limited: float
    unlimited: float

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


def memory(job: Job) -> Memory:
    """Gives the memory that a job takes on each device."""
    shape = job.shape
    sharded = MASTER_BYTES * shape.params / job.shards
    limited, unlimited = _gathered(job, limiter=True), _gathered(job, limiter=False)
    logits = job.tokens * shape.vocab * LOGIT_BYTES
    parts = {
        "parameters": sharded,
        "gradients": sharded,
        "optimizer": 2 * sharded,
        "gathered units": limited if job.limiter else unlimited,
        "gradients in flight": _in_flight(job),
        "activations": sum(_kept(job, block) * block.count for block in shape.blocks) + _recomputed(job),
        "logits": logits,
    }
    if job.accumulate > 1:
        parts["unsharded gradients"] = _accumulated(job)
    parts["allocator slack"] = job.calibration.slack * sum(parts.values())
    parts["context"] = job.calibration.context_gb * 1e9
    return Memory(parts, limited, unlimited)


def _gathered(job: Job, *, limiter: bool) -> float:
    shape = job.shape
    blocks = [block.params for block in shape.units]
    held = sum(sorted(blocks)[-IN_FLIGHT:]) if limiter and job.reshards else sum(blocks)
    kept_in_node = sum(blocks) / job.cluster.gpus_per_node if job.strategy == "node" else 0
    return (held + shape.root_params + kept_in_node) * job.param_bytes


def _in_flight(job: Job) -> float:
    """Gives the bytes of gradients that wait for their reduction; without the limiter those of all blocks may."""
    blocks = [block.params for block in job.shape.units]
    if job.limiter or not job.reshards:
        return max(blocks) * (job.param_bytes + job.reduce_bytes)
    return sum(blocks) * job.param_bytes


def _accumulated(job: Job) -> float:
    """Gives the bytes of gradients that micro-steps add up: those of the node's shard under hybrid, else all."""
    return job.reduce_bytes * job.shape.params / (job.shards if job.strategy == "hybrid" else 1)


def _kept(job: Job, block: Block) -> float:
    """Gives the bytes that one block keeps from forward to backward."""
    values: float = job.tokens * ACTIVATION_BYTES
    if job.recompute == "op":
        half = block.attentions * (2 * block.width + block.kv_width) + block.ffn + 2 * block.hidden
        return values * half
    return values * block.hidden * job.recompute + _all(job, block) * (1 - job.recompute)


def _recomputed(job: Job) -> float:
    """Gives what the block that is computed again has in memory meanwhile."""
    return max(_all(job, block) for block in job.shape.blocks) if job.recompute else 0


def _all(job: Job, block: Block) -> float:
    """Gives the bytes of all that a block's backward needs: the inputs of norms, matrices, attention, activation."""
    rotated = block.width + block.kv_width if block.rotary else 0
    attention = 2 * block.hidden + 2 * block.width + 2 * block.kv_width + rotated
    values = block.attentions * attention + 2 * block.hidden + (4 if block.gated else 2) * block.ffn
    scores = 0 if job.shape.fused_attention else block.attentions * block.heads * job.seq_len * SCORE_BYTES
    return job.tokens * (values * ACTIVATION_BYTES + scores)
