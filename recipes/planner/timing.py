"""Time of an optimizer step: computing and communicating side by side, unit by unit."""

from collections.abc import Sequence
from dataclasses import dataclass

from ibm_nodes.recipes.planner.job import Job
from ibm_nodes.recipes.planner.memory import IN_FLIGHT
from ibm_nodes.recipes.planner.shapes import Block
from ibm_nodes.recipes.planner.traffic import Link, Ring, all_reduce, gather, scatter, seconds

OPTIMIZER_BYTES = 28
"""Read and written for a parameter by AdamW: parameter, gradient and two moments in, all but the gradient out."""


@dataclass(frozen=True)
class Phase:
    """A part of a step, in seconds: its length, what it computes, and what it communicates."""

    seconds: float
    compute: float
    communication: float

    def __add__(self, other: "Phase") -> "Phase":
        return Phase(
            self.seconds + other.seconds,
            self.compute + other.compute,
            self.communication + other.communication,
        )

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits for the network."""
        return max(0.0, self.seconds - self.compute)


@dataclass(frozen=True)
class Timing:
    """The phases of an optimizer step, all micro-steps together, on each device."""

    forward: Phase
    backward: Phase
    optimizer: Phase

    @property
    def step(self) -> Phase:
        """All phases together."""
        return self.forward + self.backward + self.optimizer


class _Wires:
    """The links, each of which carries one collective after the other."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.free: dict[Link, float] = {"nic": 0.0, "nvlink": 0.0}
        self.busy = 0.0

    def send(self, ring: Ring | None, params: float, after: float) -> float:
        """Puts a collective behind the others of its link, and gives when it is done."""
        if ring is None:
            return after
        taken = seconds(self.job, ring, params)
        self.busy += taken
        self.free[ring.link] = max(self.free[ring.link], after) + taken
        return self.free[ring.link]


def timing(job: Job) -> Timing:
    """Gives the time of each phase of an optimizer step."""
    forward = _forward(job)
    backward = _backward(job, reduces=True)
    if job.accumulate > 1:
        without = _backward(job, reduces=False)
        for _ in range(job.accumulate - 1):
            forward, backward = forward + _forward(job), backward + without
    update = OPTIMIZER_BYTES * job.shape.params / job.shards / (job.calibration.hbm_gbs * 1e9)
    return Timing(forward, backward, Phase(update, update, 0.0))


def block_flops(job: Job, block: Block) -> float:
    """Gives the operations of one block's forward: two for each parameter of a matrix, and the scores, unmasked."""
    scores = 2 * 2 * job.seq_len * block.width * block.attentions
    return job.tokens * (2 * block.matrices + scores)


def head_flops(job: Job) -> float:
    """Gives the operations of the head's forward."""
    return job.tokens * 2.0 * job.shape.vocab * job.shape.hidden


def model_flops(job: Job) -> float:
    """Gives the operations of an optimizer step that the model needs on each device; nothing that is done again."""
    forward = sum(block_flops(job, block) * block.count for block in job.shape.blocks) + head_flops(job)
    return 3.0 * job.accumulate * forward


def _rate(job: Job) -> float:
    return job.calibration.peak_tflops * 1e12 * job.calibration.compute


def _forward(job: Job) -> Phase:
    """Runs through the units; the gather of the one after next waits until the present one is done."""
    wires, ring, rate = _Wires(job), gather(job), _rate(job)
    arrived = wires.send(ring, job.shape.root_params, 0.0)
    clock, computed, done = arrived, 0.0, [0.0] * IN_FLIGHT
    for block in job.shape.units:
        arrived = wires.send(ring, block.params, done[-IN_FLIGHT] if job.limiter else 0.0)
        taken = block_flops(job, block) / rate
        clock, computed = max(clock, arrived) + taken, computed + taken
        done.append(clock)
    head = head_flops(job) / rate
    return Phase(clock + head, computed + head, wires.busy)


def _backward(job: Job, *, reduces: bool) -> Phase:
    """Runs through the units from the last to the first, each reduction queued before the next gather but one."""
    wires, rate = _Wires(job), _rate(job)
    units: Sequence[Block] = job.shape.units[::-1]
    reduced = scatter(job) if reduces or job.strategy == "hybrid" else None
    replicated = all_reduce(job) if reduces else None
    again = gather(job, backward=True)
    head = 2 * head_flops(job) / rate
    clock = computed = head
    arrived = [wires.send(again, block.params, 0.0) for block in units[:IN_FLIGHT]]
    end = 0.0
    for number, block in enumerate(units):
        taken = (2 + _again(job, block)) * block_flops(job, block) / rate
        clock, computed = max(clock, arrived[number]) + taken, computed + taken
        end = max(end, wires.send(replicated, block.params, wires.send(reduced, block.params, clock)))
        if number + IN_FLIGHT < len(units):
            arrived.append(wires.send(again, units[number + IN_FLIGHT].params, clock if job.limiter else 0.0))
    end = max(end, wires.send(replicated, job.shape.root_params, wires.send(reduced, job.shape.root_params, clock)))
    return Phase(max(clock, end), computed, wires.busy)


def _again(job: Job, block: Block) -> float:
    """Gives the share of a block's forward that its backward does again."""
    return block.recomputed if job.recompute == "op" else job.recompute
