"""Traffic of an optimizer step: what each collective moves, and over which links."""

from dataclasses import dataclass
from typing import Literal

from ibm_nodes.recipes.planner.job import Job

Link = Literal["nic", "nvlink"]


@dataclass(frozen=True)
class Ring:
    """A collective over a ring of devices, one after the other on each node.

    One edge of the ring leaves a node and one enters it, so that a node's network cards carry, each way, what one
    device sends. Where each device of a node has a ring of its own with its like on other nodes, they carry what all
    of them send.

    Args:
        link: the slowest link that it goes over.
        bytes: what goes over that link each way, for each byte of a unit: of the node's cards, or of the device.
        nodes: number of nodes that it goes through.
        hops: number of hops in a node.
        rounds: how often it goes around.
    """

    link: Link
    bytes: float
    nodes: int
    hops: int
    rounds: int = 1


def gather(job: Job, *, backward: bool = False) -> Ring | None:
    """Gives the collective by which a unit's parameters come together, or None where they are still there."""
    if backward and not job.reshards:
        return None
    inside = job.strategy == "hybrid" or (backward and job.strategy == "node")
    return _ring(job, job.param_bytes, inside=inside)


def scatter(job: Job) -> Ring | None:
    """Gives the collective that adds up a unit's gradients and leaves each device its shard."""
    return _ring(job, job.reduce_bytes * job.scatter_factor, inside=job.strategy == "hybrid", rounds=job.scatter_factor)


def all_reduce(job: Job) -> Ring | None:
    """Gives the collective that adds up a unit's shards over the copies of the model, or None where there is one."""
    nodes = job.cluster.nodes
    if job.strategy != "hybrid" or nodes == 1:
        return None
    return Ring("nic", 2 * job.reduce_bytes * (nodes - 1) / nodes, nodes, 0, rounds=2)


def _ring(job: Job, unit_bytes: float, *, inside: bool, rounds: int = 1) -> Ring | None:
    nodes = 1 if inside else job.cluster.nodes
    ranks = nodes * job.cluster.gpus_per_node
    if ranks == 1:
        return None
    moved = unit_bytes * (ranks - 1) / ranks
    return Ring("nic" if nodes > 1 else "nvlink", moved, nodes if nodes > 1 else 0, ranks - nodes, rounds)


def seconds(job: Job, ring: Ring | None, params: float) -> float:
    """Gives how long a collective takes for a unit of so many parameters, in seconds."""
    if ring is None:
        return 0.0
    cluster, measured = job.cluster, job.calibration
    if ring.link == "nic":
        bandwidth = cluster.nic_gbps * cluster.usable_fraction * measured.bus / 8 * 1e9
    else:
        bandwidth = cluster.nvlink_gbps * measured.nvlink / 8 * 1e9
    hops = ring.rounds * (ring.nodes * measured.node_hop_us + ring.hops * measured.gpu_hop_us) / 1e6
    taken = params * ring.bytes / bandwidth + hops
    runs_ahead = not job.limiter and ring.link == "nic" and job.strategy in ("full", "node")
    return taken * measured.unlimited if runs_ahead else taken


def traffic(job: Job) -> dict[Link, float]:
    """Gives the bytes of an optimizer step, each way: of a node's network cards together, and of a device's NVLink.

    The root unit is gathered once a micro-step, since it is not freed before backward.
    """
    params, blocks = job.shape.params, job.shape.params - job.shape.root_params
    reductions = job.accumulate if job.strategy == "hybrid" else 1  # a node's own are added up sharded, at each step
    moved: dict[Link, float] = {"nic": 0.0, "nvlink": 0.0}
    for ring, amount in (
        (gather(job), job.accumulate * params),
        (gather(job, backward=True), job.accumulate * blocks),
        (scatter(job), reductions * params),
        (all_reduce(job), params),
    ):
        if ring is not None:
            moved[ring.link] += ring.bytes * amount
            if ring.link == "nic" and ring.hops and job.cluster.gpus_per_node > 1:
                moved["nvlink"] += ring.bytes * amount  # the ring's edges inside of the node
    return moved
