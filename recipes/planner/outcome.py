"""What comes of a job: does it fit, does its communication hide, how fast is it."""

from dataclasses import dataclass, replace

from ibm_nodes.recipes.planner.job import Job
from ibm_nodes.recipes.planner.memory import Memory, memory
from ibm_nodes.recipes.planner.timing import Timing, model_flops, timing

HIDES, NEARLY_HIDES = 0.05, 0.25
"""Up to which share of the step the device may wait for the network."""


@dataclass(frozen=True)
class Outcome:
    """What the formulae say of a job.

    Args:
        job: the job.
        memory: of a device.
        timing: of an optimizer step.
        scaling: speed of a device as a share of what it would be on one node, were that one's memory large enough.
    """

    job: Job
    memory: Memory
    timing: Timing
    scaling: float

    @property
    def fits(self) -> bool:
        """Whether the device has the memory."""
        return self.memory.total <= self.job.cluster.gpu_memory_gb * 1e9

    @property
    def seconds(self) -> float:
        """Seconds of an optimizer step."""
        return self.timing.step.seconds

    @property
    def waiting(self) -> float:
        """Share of the step in which the device waits for the network."""
        return self.timing.step.exposed / self.seconds

    @property
    def verdict(self) -> str:
        """Whether communication hides behind computing: "hides", "nearly hides" or "does not hide"."""
        if self.waiting <= HIDES:
            return "hides"
        return "nearly hides" if self.waiting <= NEARLY_HIDES else "does not hide"

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second and device."""
        return self.job.accumulate * self.job.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Share of the device's peak that the model's own operations make up."""
        return model_flops(self.job) / (self.seconds * self.job.calibration.peak_tflops * 1e12)

    @property
    def band(self) -> tuple[float, float]:
        """Seconds of a step if the calibration is as far off as it says it may be, for the better and for the worse."""
        return timing(_off(self.job, 1)).step.seconds, timing(_off(self.job, -1)).step.seconds


def outcome(job: Job) -> Outcome:
    """Applies all formulae to a job; of one that does not fit, time and speed are those with memory enough."""
    found = timing(job)
    alone = timing(replace(job, cluster=replace(job.cluster, nodes=1)))
    return Outcome(job, memory(job), found, alone.step.seconds / found.step.seconds)


def largest_batch(job: Job) -> int:
    """Gives the largest batch that fits, or 0 if none does."""
    low, high = 0, 1
    while high <= 1 << 20 and _fits(job, high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(job, middle) else (low, middle)
    return low


def _fits(job: Job, batch: int) -> bool:
    return memory(replace(job, batch=batch)).total <= job.cluster.gpu_memory_gb * 1e9


def _off(job: Job, sign: int) -> Job:
    measured = job.calibration
    compute = measured.compute * (1 + sign * measured.compute_error)
    bus = measured.bus * (1 + sign * measured.bus_error)
    hop = measured.node_hop_us * (1 - sign * measured.bus_error)
    off = replace(measured, compute=min(1.0, compute), bus=min(1.0, bus), node_hop_us=hop)
    return replace(job, calibration=off)
