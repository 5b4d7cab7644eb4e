"""The recipe for FSDP over Ethernet: a model whose all-gathers are limited, so that memory is left for the batch."""

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ibm_nodes.recipes import ethernet
from ibm_nodes.recipes.cluster import Cluster, current_cluster
from ibm_nodes.recipes.distributed import DATA_DIMENSIONS

Engine = Literal["fsdp1", "fsdp2"]
Strategy = Literal["auto", "full", "hybrid"]
Recomputation = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp32"]
BlockClass = type[nn.Module] | str

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STATE_BYTES = 16
"""Of a parameter: weight, gradient and AdamW's two averages, in 32 bits."""
STATE_SHARE = 0.5
"""Of a device's memory that they may take for hybrid sharding to be chosen; the rest is for activations."""
SELECTIVE_STRIDE = 2
GATHERS_IN_FLIGHT = 2
"""Units that are whole at a time, the one that computes and the next: FSDP1's limiter knows no other number."""


def fsdp_ethernet(
    model: nn.Module,
    block_class: BlockClass | Sequence[BlockClass],
    *,
    cluster: Cluster | None = None,
    mesh: DeviceMesh | None = None,
    engine: Engine = "fsdp1",
    limit_all_gathers: bool = True,
    strategy: Strategy = "auto",
    activation_checkpointing: Recomputation = "none",
    param_dtype: Precision = "bf16",
    reduce_dtype: Precision = "bf16",
    gathers_in_flight: int = GATHERS_IN_FLIGHT,
    reduce_scatter_buffers: int = 1,
) -> nn.Module:
    """Shards a model with FSDP, for clusters that are joined by Ethernet; gives the wrapped model.

    Starts torch.distributed if it is not up. All ranks must give equal weights, on the CPU or on the device. Weights
    and optimizer stay in 32 bits.

    Args:
        model: any module, in 32 bits.
        block_class: the class of the model's blocks, or its name, or several: an FSDP unit each.
        cluster: nodes and devices; None takes those of this job.
        mesh: a mesh that ``data_mesh`` made; None makes one.
        engine: "fsdp1" wraps the model in FullyShardedDataParallel; "fsdp2" is fully_shard, which changes it in place.
        limit_all_gathers: FSDP1's rate limiter. FSDP2 has a bound of its own instead, which cannot be lifted.
        strategy: "full" shards over all devices; "hybrid" over the devices of a node, and replicates across nodes, so
            that Ethernet carries gradients alone; "auto" is hybrid where weights and optimizer then fit into half of
            a device, else full. FSDP2 then gathers for the backward within the node where there is room for that.
        activation_checkpointing: what is computed again in the backward: "none", every second block ("selective"), or
            every block ("full").
        param_dtype: of the weights that are gathered and computed with.
        reduce_dtype: of the gradients that are reduced; "fp32" makes Ethernet carry twice as much of them.
        gathers_in_flight: for FSDP2, units that are whole at a time in each pass, the one that computes and those
            after it; each above 2 takes the memory of a unit more.
        reduce_scatter_buffers: for FSDP2, gradients of how many units may wait to be reduced.

    Raises:
        ValueError: if the block class is not in the model, or something does not divide, fit or apply.
    """
    _check_choices(
        engine=(engine, ("fsdp1", "fsdp2")),
        strategy=(strategy, ("auto", "full", "hybrid")),
        activation_checkpointing=(activation_checkpointing, ("none", "selective", "full")),
        param_dtype=(param_dtype, list(DTYPES)),
        reduce_dtype=(reduce_dtype, list(DTYPES)),
    )
    _check_bounds(engine, limit_all_gathers, gathers_in_flight, reduce_scatter_buffers)
    classes = _classes(model, block_class)
    cluster = cluster or current_cluster()
    num_params = sum(parameter.numel() for parameter in model.parameters())
    mesh = data_mesh(cluster, strategy, num_params) if mesh is None else _checked(mesh, strategy, cluster)
    units = [module for module in model.modules() if isinstance(module, classes) and module is not model]
    stride = {"none": len(units), "selective": SELECTIVE_STRIDE, "full": 1}[activation_checkpointing]
    for block in units[stride - 1 :: stride] if activation_checkpointing != "none" else []:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    dtypes = DTYPES[param_dtype], DTYPES[reduce_dtype]
    if engine == "fsdp1":
        return _fsdp1(model, classes, mesh, limit_all_gathers, *dtypes)
    reshard = cluster.gpus_per_node if strategy == "auto" and _gathers_in_node(cluster, num_params, mesh) else True
    policy = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    for unit in reversed(units):  # an inner one before the one that it is in
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    _bound(model, units, gathers_in_flight, reduce_scatter_buffers)
    return model


def data_mesh(cluster: Cluster, strategy: Strategy, num_params: int) -> DeviceMesh:
    """Gives the device mesh of a strategy, all of whose dimensions are data-parallel; starts torch.distributed.

    It is (dp_replicate = nodes, dp_shard = devices of a node) for hybrid sharding, else (dp_shard).

    Args:
        cluster: nodes and devices.
        strategy: "auto", "full" or "hybrid".
        num_params: parameters of the model.

    Raises:
        ValueError: if the cluster does not fit the processes.
    """
    ethernet.start(cluster.device_type)
    world_size = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", cluster.gpus_per_node))
    if cluster.world_size != world_size:
        raise ValueError(
            f"cluster must have a device for each process, got {cluster.nodes} nodes x {cluster.gpus_per_node} = "
            f"{cluster.world_size} devices for {world_size} processes"
        )
    if local % cluster.gpus_per_node:
        raise ValueError(
            f"gpus_per_node must divide the {local} processes of a machine, got {cluster.gpus_per_node}: "
            "a node would lie on two machines, and Ethernet carry what was meant for NVLink"
        )
    if strategy == "auto":
        strategy = choose_strategy(cluster, num_params)
    if strategy == "hybrid" and cluster.nodes > 1:
        shape, names = (cluster.nodes, cluster.gpus_per_node), ("dp_replicate", "dp_shard")
        return init_device_mesh(cluster.device_type, shape, mesh_dim_names=names)
    return init_device_mesh(cluster.device_type, (world_size,), mesh_dim_names=("dp_shard",))


def choose_strategy(cluster: Cluster, num_params: int) -> Literal["full", "hybrid"]:
    """Gives the strategy that "auto" stands for: hybrid where there are nodes to replicate across, and room for it."""
    states = STATE_BYTES * num_params / cluster.gpus_per_node
    return "hybrid" if cluster.nodes > 1 and states <= STATE_SHARE * cluster.gpu_memory_gb * 1e9 else "full"


def _gathers_in_node(cluster: Cluster, num_params: int, mesh: DeviceMesh) -> bool:
    """Tells whether a node has room for the weights of the whole model, in 16 bits, between forward and backward."""
    spare = num_params * (STATE_BYTES / cluster.world_size + 2 / cluster.gpus_per_node)
    several = cluster.nodes > 1 and cluster.gpus_per_node > 1
    return mesh.ndim == 1 and several and spare <= STATE_SHARE * cluster.gpu_memory_gb * 1e9


@contextlib.contextmanager
def accumulate(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Keeps the gradients of a micro-step from Ethernet, unless it is the last of its step.

    Parameters are gathered as ever. FSDP1, and FSDP2 where it shards over all devices, keep whole gradients on each
    device meanwhile; FSDP2 where it is hybrid reduces them within the node.

    Args:
        model: what ``fsdp_ethernet`` gave.
        last: whether the optimizer steps after this backward.
    """
    if isinstance(model, FullyShardedDataParallel):
        with contextlib.nullcontext() if last else model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        weight = cast(DTensor, next(model.parameters()))
        hybrid = weight.device_mesh.ndim == 2
        (model.set_requires_all_reduce if hybrid else model.set_requires_gradient_sync)(last)
        yield
    else:
        raise TypeError(f"model must be one that fsdp_ethernet gave, got {type(model).__name__}")


def _fsdp1(
    model: nn.Module,
    classes: tuple[type[nn.Module], ...],
    mesh: DeviceMesh,
    limit_all_gathers: bool,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> FullyShardedDataParallel:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")  # which is all there is to one rank
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=ModuleWrapPolicy(classes),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            mixed_precision=MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
            device_id=torch.device("cpu") if mesh.device_type == "cpu" else torch.cuda.current_device(),
            limit_all_gathers=limit_all_gathers,
            use_orig_params=True,
            device_mesh=mesh,
        )


def _bound(model: nn.Module, units: list[Any], gathers_in_flight: int, reduce_scatter_buffers: int) -> None:
    """Sets how much of FSDP2's communication may be in flight, where it is not the default."""
    ahead = gathers_in_flight - 1
    if ahead > 1:
        model.set_modules_to_forward_prefetch(units[:ahead])  # type: ignore[operator]  # fully_shard has added it
        for place, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + ahead])
            unit.set_modules_to_backward_prefetch(units[max(0, place - ahead) : place][::-1])
    if reduce_scatter_buffers > 1:
        if not hasattr(model, "set_reduce_scatter_max_input_buffers"):
            raise ValueError(
                f"reduce_scatter_buffers must be 1 with torch {torch.__version__}, which has no such bound"
            )
        model.set_reduce_scatter_max_input_buffers(reduce_scatter_buffers)  # type: ignore[operator]  # as above


def _check_choices(**given: tuple[str, Sequence[str]]) -> None:
    for name, (value, choices) in given.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_bounds(engine: Engine, limit_all_gathers: bool, gathers_in_flight: int, reduce_scatter_buffers: int) -> None:
    if gathers_in_flight < GATHERS_IN_FLIGHT or reduce_scatter_buffers < 1:
        raise ValueError(
            f"gathers_in_flight must be at least {GATHERS_IN_FLIGHT} and reduce_scatter_buffers at least 1, "
            f"got {gathers_in_flight} and {reduce_scatter_buffers}"
        )
    if engine == "fsdp2" and not limit_all_gathers:
        raise ValueError(
            "limit_all_gathers must be True with fsdp2, whose bound cannot be lifted: give a larger gathers_in_flight"
        )
    if engine == "fsdp1" and (gathers_in_flight > GATHERS_IN_FLIGHT or reduce_scatter_buffers > 1):
        raise ValueError(
            "gathers_in_flight and reduce_scatter_buffers must be 2 and 1 with fsdp1, whose limiter knows no other "
            f"numbers, got {gathers_in_flight} and {reduce_scatter_buffers}: use fsdp2"
        )


def _classes(model: nn.Module, block_class: BlockClass | Sequence[BlockClass]) -> tuple[type[nn.Module], ...]:
    """Gives the classes of blocks, all of which have instances in the model."""
    inner = dict.fromkeys(type(module) for module in model.modules() if module is not model)
    found = []
    for wanted in [block_class] if isinstance(block_class, type | str) else block_class:
        matches = [kind for kind in inner if wanted in (kind, kind.__name__)]
        if not matches:
            name = wanted if isinstance(wanted, str) else wanted.__name__
            there = ", ".join(sorted({kind.__name__ for kind in inner}))
            raise ValueError(f"block_class must be the class of a module in the model, got {name}: there are {there}")
        found += matches
    if not found:
        raise ValueError("block_class must be given: the model would be one unit, gathered whole")
    return tuple(found)


def _checked(mesh: DeviceMesh, strategy: Strategy, cluster: Cluster) -> DeviceMesh:
    """Gives a mesh that the caller made, if FSDP can use it as the strategy says."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 2 or len(names) != mesh.ndim or not set(names) <= DATA_DIMENSIONS:
        raise ValueError(
            f"mesh must have one or two dimensions with names, all data-parallel, got {names or mesh.ndim}: "
            'give the part for it, such as mesh["dp_replicate", "dp_shard"]'
        )
    if (strategy == "hybrid" and mesh.ndim == 1 and cluster.nodes > 1) or (strategy == "full" and mesh.ndim == 2):
        raise ValueError(f"mesh must have {3 - mesh.ndim} dimensions for strategy {strategy!r}, got {mesh.ndim}")
    return mesh
