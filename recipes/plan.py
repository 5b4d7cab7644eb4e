"""The command ``ibm-nodes plan``: does a model fit a cluster, and does its traffic hide behind computing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ibm_nodes.recipes.cluster import Cluster
from ibm_nodes.recipes.planner import picture, words
from ibm_nodes.recipes.planner.advice import first_change, remedy
from ibm_nodes.recipes.planner.calibration import Transport, calibrate
from ibm_nodes.recipes.planner.cards import network_cards
from ibm_nodes.recipes.planner.job import Job, Strategy, recompute_share
from ibm_nodes.recipes.planner.loading import loading
from ibm_nodes.recipes.planner.outcome import Outcome, outcome
from ibm_nodes.recipes.planner.report import Report, tell
from ibm_nodes.recipes.planner.shapes import find_shape
from ibm_nodes.recipes.planner.sweep import parse_sweep, run_sweep, sweep_data, sweep_text

NVLINK_GBPS = {"h100": 3600.0, "h200": 3600.0}
GPU_MEMORY_GB = {"h200": 141.0}
UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def command(given: Sequence[str], say: Callable[[str], None]) -> int:
    """Runs ``plan`` with flags."""
    return tell(plan, given, say)


def plan(
    model: str | None = None,
    *,
    params: str | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    vocab: int | None = None,
    nodes: int = 1,
    gpus: int = 8,
    nic: str = "2x100",
    device: Literal["a100", "h100", "h200", "cuda", "cpu"] = "a100",
    gpu_memory_gb: float | None = None,
    nvlink_gbps: float | None = None,
    usable_fraction: float = 0.6,
    vcpus: int = 96,
    memory_gb: float = 1200.0,
    transport: Transport = "tcp",
    batch: int = 1,
    seq_len: int = 4096,
    accumulate: int | None = None,
    global_batch_size: int | None = None,
    strategy: Strategy = "full",
    limit_all_gathers: bool = True,
    activation_checkpointing: str = "full",
    reduce_dtype: Literal["bf16", "fp32"] = "bf16",
    calibration: Mapping[str, float] | None = None,
    num_datasets: int = 1,
    bytes_per_token: int = 4,
    save_minutes: float = 30.0,
    sweep: str | None = None,
    plot: str | None = None,
) -> Report:
    """Plans a run under FSDP: memory, traffic and time of a step, and the first change that would help.

    Nothing runs: all is arithmetic, on constants that ``calibration`` replaces (docs/planning.md has their sources).

    Args:
        model: a name, such as t5-11b or llama-70b; else give layers, hidden and vocab.
        params: all parameters of a model without a name, such as 11e9 or 11B; else 12 x hidden^2 a block.
        layers: its number of blocks.
        hidden: its width.
        vocab: rows of its embedding and of its head.
        nodes: number of machines.
        gpus: devices of each.
        nic: network cards of a node, as number x Gbit/s.
        device: of which the peak is known; for "cuda" and "cpu" give calibration peak_tflops, compute and hbm_gbs.
        gpu_memory_gb: memory of a device, in GB of 10^9 bytes; else 80, or 141 of an h200.
        nvlink_gbps: NVLink of a device, in Gbit/s each way; else 2400, or 3600 of an h100 or h200.
        usable_fraction: share of the cards' rate that collectives can use; 0.6 was reported of 2 x 100 Gbps.
        vcpus: logical cores of a node.
        memory_gb: memory of a node, in GB.
        transport: plain sockets, or RoCE and InfiniBand: which defaults the network's calibration has.
        batch: sequences a device and micro-step.
        seq_len: tokens of a sequence.
        accumulate: micro-steps of an optimizer step; else 1, or what global_batch_size asks for.
        global_batch_size: sequences of an optimizer step on all devices, instead of accumulate.
        strategy: full, no-reshard (keep units after forward), node (keep them sharded in the node), hybrid.
        limit_all_gathers: the limiter of units gathered at a time.
        activation_checkpointing: none, selective (every second block), full, op (keeps every second product
            of matrices), or a share of the blocks such as 1/3.
        reduce_dtype: of gradients on the network.
        calibration: a measured constant by name, such as bus=0.5; docs/planning.md lists them.
        num_datasets: number of datasets that are mixed.
        bytes_per_token: of the corpus as it is stored.
        save_minutes: time from one checkpoint to the next.
        sweep: a number and its values, such as nodes=8,16,32: a table with and without the limiter.
        plot: file for a picture of the sweep, such as scaling.png.

    Raises:
        ValueError: if the memory does not fit, the global batch does not divide, or a number is out of range.
        LookupError: if there is no such model or calibration.
        ImportError: if there is to be a picture and matplotlib is not installed.
    """
    shape = find_shape(
        model, params=None if params is None else _number(params), layers=layers, hidden=hidden, vocab=vocab
    )
    count, rate = network_cards(nic)
    cluster = Cluster(
        nodes=nodes,
        gpus_per_node=gpus,
        nic_gbps=count * rate,
        usable_fraction=usable_fraction,
        nvlink_gbps=NVLINK_GBPS.get(device, 2400.0) if nvlink_gbps is None else nvlink_gbps,
        gpu_memory_gb=GPU_MEMORY_GB.get(device, 80.0) if gpu_memory_gb is None else gpu_memory_gb,
        vcpus=vcpus,
        memory_gb=memory_gb,
        device=device,
    )
    counts = {"batch": batch, "seq_len": seq_len, "num_datasets": num_datasets, "bytes_per_token": bytes_per_token}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not save_minutes > 0:
        raise ValueError(f"save_minutes must be above 0, got {save_minutes}")
    job = Job(
        shape=shape,
        cluster=cluster,
        cards=count,
        calibration=calibrate(cluster, transport, shape.fused_attention, calibration or {}),
        batch=batch,
        seq_len=seq_len,
        strategy=strategy,
        limiter=limit_all_gathers,
        recompute=recompute_share(activation_checkpointing),
        reduce_bytes=4 if reduce_dtype == "fp32" else 2,
    )
    if sweep is not None:
        return _sweep(job, sweep, accumulate, global_batch_size, plot)
    if plot is not None:
        raise ValueError("plot must come with sweep: a single plan is no picture")
    found = outcome(_divide(job, accumulate, global_batch_size))
    check_memory(found)
    loaded = loading(found, datasets=num_datasets, bytes_per_token=bytes_per_token, save_minutes=save_minutes)
    change = first_change(found)
    return Report(words.plan_text(found, loaded, change), words.plan_data(found, loaded, change))


def check_memory(found: Outcome) -> None:
    """Refuses a job that does not fit: what an allocator at its end does to the time of a step, no formula gives.

    Raises:
        ValueError: naming the largest parts, and the first change with which it would fit.
    """
    if found.fits:
        return
    parts = sorted(found.memory.parts.items(), key=lambda part: -part[1])[:3]
    largest = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts)
    raise ValueError(
        f"memory must fit into {found.job.cluster.gpu_memory_gb:g} GB, got {found.memory.total / 1e9:.1f} GB "
        f"({largest}) on each device: {remedy(found.job)}"
    )


def _sweep(job: Job, text: str, accumulate: int | None, global_batch_size: int | None, plot: str | None) -> Report:
    name, values = parse_sweep(text)

    def make(value: int) -> Job:
        if name == "nodes":
            changed = replace(job, cluster=replace(job.cluster, nodes=value))
        elif name == "batch":
            changed = replace(job, batch=value)
        elif name == "seq_len":
            changed = replace(job, seq_len=value)
        else:
            return _divide(job, value, global_batch_size)
        return _divide(changed, accumulate, global_batch_size)

    rows = run_sweep(values, make)
    if plot is not None:
        picture.draw(plot, f"{job.shape.name}, {job.strategy} sharding, {job.cluster.device}", name, rows)
    return Report(sweep_text(name, rows), sweep_data(name, rows))


def _divide(job: Job, accumulate: int | None, global_batch_size: int | None) -> Job:
    """Gives the job with its number of micro-steps."""
    if accumulate is not None and global_batch_size is not None:
        raise ValueError("accumulate and global_batch_size must not be given together: one follows from the other")
    if global_batch_size is None:
        if accumulate is not None and accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {accumulate}")
        return replace(job, accumulate=accumulate or 1)
    cluster = job.cluster
    unit = job.batch * cluster.world_size
    if global_batch_size < 1 or global_batch_size % unit:
        per_node = job.batch * cluster.gpus_per_node
        nodes = next((nodes for nodes in range(cluster.nodes, 0, -1) if global_batch_size % (per_node * nodes) == 0), 0)
        fits = nodes and global_batch_size > 0
        raise ValueError(
            f"global_batch_size must be a multiple of nodes x gpus x batch = {unit}, got {global_batch_size}: "
            + (f"the next smaller number of nodes that fits is {nodes}" if fits else "choose a batch that divides it")
        )
    return replace(job, accumulate=global_batch_size // unit)


def _number(text: str) -> int:
    unit = UNITS.get(text[-1:].upper(), 1)
    try:
        number = float(text if unit == 1 else text[:-1]) * unit
    except ValueError:
        number = 0.0
    if not 1 <= number < float("inf"):
        raise ValueError(f"params must be a number above 0, such as 11e9 or 11B, got {text!r}")
    return round(number)
