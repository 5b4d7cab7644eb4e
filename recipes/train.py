"""The command that trains a model: ``torchrun -m ibm_nodes.recipes.train NAME [flags]``, or ``ibm-nodes train``."""

import contextlib
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ibm_nodes import Loader, flags, list_recipes, load_recipe
from ibm_nodes.recipes import ethernet
from ibm_nodes.recipes.cluster import Cluster, current_cluster
from ibm_nodes.recipes.fsdp_ethernet import BlockClass, fsdp_ethernet
from ibm_nodes.recipes.models import SHAPES, build_model
from ibm_nodes.recipes.trainer import MakeLoader, train

VALIDATION = "validation"
PLACE = ("rank", "world_size", "mesh")
"""What the trainer itself tells a data recipe."""
ASSEMBLED = (
    *("make_loader", "model", "block_class", "global_batch_size", "cluster", "sharding"),
    *("make_validation", "storage_options", "say", "stopped"),
)
"""Arguments of ``train`` that this command makes from its flags."""
WRAPPED = ("model", "block_class", "cluster", "mesh")
"""Arguments of the FSDP recipe that the trainer gives."""


def command(given: Sequence[str], say: Callable[[str], None]) -> int:
    """Trains a model with a recipe's data, on this process or on those of torchrun; a SIGTERM saves, and ends with 0.

    Args:
        given: the name of a data recipe, and flags.
        say: is given each line, on rank 0.

    Raises:
        ValueError, LookupError, TypeError, OSError: for bad input, and a store that fails.
    """
    name, recipe = given[0], load_recipe(given[0])
    options = parser(name, recipe).parse_args(given[1:])
    data = flags.arguments(recipe, options)
    model, block_class, vocab_size = pick_model(
        **flags.arguments(pick_model, options), vocab_size=data.get("vocab_size")
    )
    if "vocab_size" in flags.signature(recipe).parameters:
        data.setdefault("vocab_size", vocab_size)
    training = flags.arguments(train, options, ASSEMBLED)
    with _distributed(**flags.arguments(pick_cluster, options)) as cluster, _until_sigterm() as stopped:
        train(
            _maker(name, recipe, data),
            model,
            block_class,
            **training,
            global_batch_size=_default(recipe, data, "global_batch_size"),
            cluster=cluster,
            sharding=flags.arguments(fsdp_ethernet, options, WRAPPED),
            make_validation=_validation(data) if training.get("eval_every") else None,
            storage_options=_of_url(training.get("checkpoint"), data.get("storage_options")),
            say=say,
            stopped=stopped,
        )
    return 0


def parser(name: str, recipe: Callable[..., Any]) -> flags.Parser:
    """Gives the parser of ``ibm-nodes train NAME``."""
    groups: dict[str, tuple[Callable[..., Any], Collection[str]]] = {
        f"data, by the recipe {name}": (recipe, PLACE),
        "model": (pick_model, ("vocab_size",)),
        "training": (train, ASSEMBLED),
        "sharding": (fsdp_ethernet, WRAPPED),
        "cluster": (pick_cluster, ()),
    }
    return flags.command_parser(f"ibm-nodes train {name}", "Trains a model with FSDP over Ethernet.", groups)


def pick_model(
    *,
    model: str = "tiny",
    model_options: Mapping[str, Any] | None = None,
    model_seed: int = 0,
    block_class: str | None = None,
    vocab_size: int | None = None,
) -> tuple[nn.Module, BlockClass, int | None]:
    """Builds the model, and gives it with the class of its blocks, and the size of its vocabulary if it is known.

    Args:
        model: the name of a shape, or package.module:name of a class or function that gives a module.
        model_options: keyword arguments for what an import path names.
        model_seed: of the first weights.
        block_class: the name of the class that an FSDP unit is made of; the shapes know theirs.
        vocab_size: of a shape, instead of its own.

    Raises:
        LookupError: if there is no such model.
        ValueError: if the class of its blocks is neither given nor known.
    """
    if model in SHAPES:
        vocab_size = vocab_size or SHAPES[model].vocab_size
        built = build_model(model, vocab_size=vocab_size, seed=model_seed, options=model_options)
    else:
        built = build_model(model, seed=model_seed, options=model_options)
    known: Any = block_class or getattr(built, "block_class", None)
    if known is None:
        raise ValueError(f"block_class must be given for {model}: an FSDP unit is made of each of its blocks")
    return built, known, vocab_size


def pick_cluster(
    *,
    device: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu_memory_gb: float | None = None,
    interfaces: str | None = None,
) -> tuple[Cluster, list[str]]:
    """Gives the cluster, and the names of its network interfaces.

    Args:
        device: "cpu", "cuda", "a100", "h100" or "h200"; else the one that is here.
        nodes: number of machines; else torchrun's.
        gpus_per_node: devices, and so processes, on each; else torchrun's.
        gpu_memory_gb: memory of a device, in GB of 10^9 bytes; else what it says.
        interfaces: exact names of the interfaces for NCCL and gloo, such as net1,net2; else they choose.
    """
    found = {"device": device, "nodes": nodes, "gpus_per_node": gpus_per_node, "gpu_memory_gb": gpu_memory_gb}
    cluster = current_cluster({key: value for key, value in found.items() if value is not None})
    return cluster, interfaces.split(",") if interfaces else []


@contextlib.contextmanager
def _distributed(**given: Any) -> Iterator[Cluster]:
    """Starts torch.distributed, and ends it; a rank that has failed does not wait for the others."""
    cluster, interfaces = pick_cluster(**given)
    ethernet.start(cluster.device_type, interfaces)
    try:
        yield cluster
        sys.stdout.flush()
        dist.barrier()  # without it gloo now and then ends a process with SIGABRT
    except BaseException:
        if dist.get_world_size() > 1:
            raise
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextlib.contextmanager
def _until_sigterm() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether a SIGTERM has come."""
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)


def _maker(name: str, recipe: Callable[..., Any], data: Mapping[str, Any]) -> MakeLoader:
    def make(rank: int, world_size: int) -> Loader[Any]:
        loader = recipe(**data, rank=rank, world_size=world_size)
        if not isinstance(loader, Loader):
            raise TypeError(f"recipe {name!r} gives a {type(loader).__name__}, not a loader to train on")
        return loader

    return make


def _validation(data: Mapping[str, Any]) -> MakeLoader | None:
    """Gives the maker of loaders of the held-out data, with what it takes of the training data's arguments."""
    if VALIDATION not in list_recipes():
        return None
    recipe = load_recipe(VALIDATION)
    taken = flags.signature(recipe).parameters
    return _maker(VALIDATION, recipe, {key: value for key, value in data.items() if key in taken})


def _default(recipe: Callable[..., Any], data: Mapping[str, Any], name: str) -> Any:
    """Gives an argument of a recipe, or its default, or None if it has no such argument."""
    parameter = flags.signature(recipe).parameters.get(name)
    return data.get(name, None if parameter is None or parameter.default is parameter.empty else parameter.default)


def _of_url(url: str | None, storage_options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Gives the options where a URL is one of a store; a path on a disk takes none."""
    return storage_options if url is not None and "://" in url and not url.startswith("file:") else None


if __name__ == "__main__":
    from ibm_nodes.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
