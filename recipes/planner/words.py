"""A plan in words and as plain data."""

from typing import Any

from ibm_nodes.recipes.planner.loading import Loading
from ibm_nodes.recipes.planner.outcome import Outcome
from ibm_nodes.recipes.planner.report import columns
from ibm_nodes.recipes.planner.timing import Phase
from ibm_nodes.recipes.planner.traffic import traffic

STRATEGIES = {
    "full": "full sharding",
    "no-reshard": "full sharding without resharding after forward",
    "node": "full sharding, resharded to the node after forward",
    "hybrid": "sharding in the node with a copy in each",
}


def plan_data(found: Outcome, loaded: Loading, change: str | None) -> dict[str, Any]:
    """Gives a plan as plain data: bytes, seconds, and shares from 0 to 1."""
    job, moved = found.job, traffic(found.job)
    phases = {name: _phase(getattr(found.timing, name)) for name in ("forward", "backward", "optimizer", "step")}
    return {
        "model": job.shape.name,
        "params": job.shape.params,
        "world_size": job.cluster.world_size,
        "strategy": job.strategy,
        "limit_all_gathers": job.limiter,
        "batch": job.batch,
        "seq_len": job.seq_len,
        "accumulate": job.accumulate,
        "memory_bytes": found.memory.parts | {"total": found.memory.total},
        "gathered_bytes": {"limiter": found.memory.limited, "no limiter": found.memory.unlimited},
        "nic_bytes": moved["nic"],
        "nic_bytes_per_card": moved["nic"] / job.cards,
        "nvlink_bytes": moved["nvlink"],
        "phases": phases,
        "verdict": found.verdict,
        "waiting_share": found.waiting,
        "step_seconds": found.seconds,
        "step_seconds_band": list(found.band),
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "scaling": found.scaling,
        "loader": vars(loaded),
        "first_change": change,
        "calibration": vars(job.calibration),
    }


def plan_text(found: Outcome, loaded: Loading, change: str | None) -> str:
    """Writes a plan for a terminal."""
    blocks = [
        _head(found),
        _memory(found),
        _traffic(found),
        _time(found),
        _loading(found, loaded),
        ["first change that would help: " + (change or "none of those known; the device's own speed is the limit")],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _phase(phase: Phase) -> dict[str, float]:
    return vars(phase) | {"exposed": phase.exposed}


def _head(found: Outcome) -> list[str]:
    job, cluster = found.job, found.job.cluster
    tokens = job.tokens * job.accumulate * cluster.world_size
    steps = f", {job.accumulate} micro-steps" if job.accumulate > 1 else ""
    return [
        f"{job.shape.name}: {job.shape.params / 1e9:.2f} billion parameters in {len(job.shape.units)} blocks; "
        f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.device}, {cluster.nic_gbps:g} Gbps a node",
        f"{STRATEGIES[job.strategy]}, limiter {'on' if job.limiter else 'off'}; {job.batch} x {job.seq_len} tokens a "
        f"device{steps}, {tokens / 1e6:.3g} million a step",
    ]


def _memory(found: Outcome) -> list[str]:
    rows = [("memory of a device", "GB")]
    rows += [(name, f"{size / 1e9:.1f}") for name, size in found.memory.parts.items()]
    rows += [("total", f"{found.memory.total / 1e9:.1f}")]
    lines = columns(rows)
    lines[-1] += f" of {found.job.cluster.gpu_memory_gb:g}"
    limited, unlimited = found.memory.limited / 1e9, found.memory.unlimited / 1e9
    return [*lines, f"gathered units take {limited:.1f} GB with the limiter, {unlimited:.1f} GB without"]


def _traffic(found: Outcome) -> list[str]:
    moved = traffic(found.job)
    return [
        f"traffic of a step, each way: {moved['nic'] / found.job.cards / 1e9:.1f} GB on each network card "
        f"({moved['nic'] / 1e9:.1f} GB a node), {moved['nvlink'] / 1e9:.1f} GB on a device's NVLink"
    ]


def _time(found: Outcome) -> list[str]:
    rows: list[tuple[str, ...]] = [("seconds of", "total", "computing", "waiting", "network busy")]
    for name in ("forward", "backward", "optimizer", "step"):
        phase: Phase = getattr(found.timing, name)
        numbers = (phase.seconds, phase.compute, phase.exposed, phase.communication)
        rows.append((name, *(f"{number:.2f}" for number in numbers)))
    low, high = found.band
    return [
        *columns(rows),
        f"communication {found.verdict}: {found.waiting:.0%} of the step waits for the network",
        f"step {found.seconds:.3g} s, from {low:.3g} to {high:.3g} s as far as the calibration can be trusted",
        f"{found.tokens_per_second:,.0f} tokens/s a device, MFU {found.mfu:.1%}, {found.scaling:.0%} of the speed that "
        "a device has on one node",
    ]


def _loading(found: Outcome, loaded: Loading) -> list[str]:
    cluster = found.job.cluster
    return [
        f"loader of a node: {loaded.cores:.3f} of {cluster.vcpus} cores, {loaded.memory / 1e9:.1f} of "
        f"{cluster.memory_gb:,.0f} GB for its part of {loaded.num_shards:,} logical shards",
        f"{loaded.corpus / 1e6:.3g} MB/s of corpus and {loaded.checkpoint_rate / 1e6:.3g} MB/s of checkpoints "
        f"({loaded.checkpoint / 1e9:.2g} GB a save) take {loaded.nic_share:.2%} of the network cards",
    ]
