"""The loader's share of a node: cores, memory, and what corpus and checkpoints take of the same network cards."""

from dataclasses import dataclass

from ibm_nodes.recipes.assemble import BLOCK_BYTES, MIN_SHARDS
from ibm_nodes.recipes.planner.outcome import Outcome

SAVED_BYTES = 12
"""Of a parameter in a checkpoint: its fp32 copy and two moments."""
BLOCKS_IN_MEMORY = 2
"""Of a logical shard and dataset: the present block, and the next one while it is read."""
BUFFERED_SAMPLES, BUFFERED_BYTES = 16, 6
"""Samples of the shuffle buffer of a logical shard, and bytes of a token in it."""


@dataclass(frozen=True)
class Loading:
    """What loading takes on each node.

    Args:
        num_shards: logical shards of the run.
        cores: cores that reading, mixing and packing keep busy.
        memory: bytes that all ranks of the node hold.
        corpus: bytes a second from the store.
        checkpoint: bytes of a checkpoint that a node writes.
        checkpoint_rate: bytes a second, if it is written from one save to the next.
        nic_share: what both rates take of the node's usable bandwidth.
    """

    num_shards: int
    cores: float
    memory: float
    corpus: float
    checkpoint: float
    checkpoint_rate: float
    nic_share: float


def num_shards(global_batch_size: int) -> int:
    """Gives the recipe's default: the smallest multiple of the global batch that is at least 256."""
    return -(-MIN_SHARDS // global_batch_size) * global_batch_size


def loading(found: Outcome, *, datasets: int, bytes_per_token: int, save_minutes: float) -> Loading:
    """Gives the loader's share for a corpus of so many datasets, stored with so many bytes a token."""
    job, cluster = found.job, found.job.cluster
    shards = num_shards(job.batch * job.accumulate * cluster.world_size)
    per_shard = datasets * BLOCK_BYTES * BLOCKS_IN_MEMORY + BUFFERED_SAMPLES * BUFFERED_BYTES * job.seq_len
    tokens = found.tokens_per_second * cluster.gpus_per_node
    checkpoint = SAVED_BYTES * job.shape.params / cluster.nodes
    rate = checkpoint / (save_minutes * 60)
    corpus = tokens * bytes_per_token
    return Loading(
        num_shards=shards,
        cores=tokens / job.calibration.core_tokens,
        memory=shards / cluster.nodes * per_shard,
        corpus=corpus,
        checkpoint=checkpoint,
        checkpoint_rate=rate,
        nic_share=(corpus + rate) / (cluster.nic_gbps * cluster.usable_fraction / 8 * 1e9),
    )
