"""Who this process is among the data-parallel ranks, and what they must agree on."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ibm_nodes import Listing, Loader, checkpoint, list_dataset

T = TypeVar("T")

DATA_DIMENSIONS = {"batch", "data", "ddp", "dp", "dp_replicate", "dp_shard", "fsdp", "replicate", "shard"}
MODEL_DIMENSIONS = {"context", "cp", "model", "pipeline", "pp", "sp", "tensor", "tp"}
OURS = ("datasets", "give_up_seconds")
"""What storage options may say to us and not to fsspec."""


def data_parallel(rank: int | None, world_size: int | None, mesh: DeviceMesh | None) -> tuple[int, int]:
    """Gives this process's data-parallel rank and their number.

    They are the arguments if given; else the place in the data-parallel dimensions of the mesh, so that the members
    of a tensor-, context- or pipeline-parallel group get the same; else torch.distributed's; else torchrun's; else 0
    of 1.

    Raises:
        ValueError: if only one of rank and world_size is given, or a dimension of the mesh is not known by its name.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size must be given together, got rank={rank} and world_size={world_size}")
    if rank is not None and world_size is not None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1, got rank={rank} and world_size={world_size}")
        return rank, world_size
    if mesh is not None:
        return _place(mesh)
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _place(mesh: DeviceMesh) -> tuple[int, int]:
    names = mesh.mesh_dim_names or (("dp",) if mesh.ndim == 1 else ())
    if len(names) != mesh.ndim or (unknown := set(names) - DATA_DIMENSIONS - MODEL_DIMENSIONS):
        raise ValueError(
            f"mesh must have dimensions named as data-parallel ({', '.join(sorted(DATA_DIMENSIONS))}) or not "
            f"({', '.join(sorted(MODEL_DIMENSIONS))}), got {names and sorted(unknown)}: else give rank and world_size"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("mesh must include this process: it has no place in it")
    rank, world_size = 0, 1
    for name, place, size in zip(names, coordinate, mesh.shape, strict=True):
        if name in DATA_DIMENSIONS:
            rank, world_size = rank * size + place, world_size * size
    return rank, world_size


def from_rank_zero(make: Callable[[], T]) -> T:
    """Gives what ``make`` returns or raises on global rank 0, on all ranks, where torch.distributed is up.

    A collective on a gloo group of its own: all ranks must call it at the same point.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return make()
    result: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = make()
        except (OSError, ValueError, LookupError, TypeError) as error:
            result[1] = error
    group = dist.new_group(backend="gloo")
    dist.broadcast_object_list(result, src=0, group=group)
    dist.destroy_process_group(group)
    if result[1] is not None:
        raise result[1]
    value: T = result[0]
    return value


def resume(
    loader: Loader[Any],
    url: str,
    *,
    missing: Literal["error", "start"] = "start",
    storage_options: Mapping[str, Any] | None = None,
) -> checkpoint.Checkpoint | None:
    """Loads the newest complete checkpoint, the same on all ranks: rank 0 lists and chooses, and tells the others.

    So ranks that list at other moments do not start at other steps. One broadcast where torch.distributed is up: all
    ranks must call it at the same point. ``checkpoint.load`` is the same without a word to other ranks.

    Args:
        loader: what a recipe returned.
        url: where the checkpoints are.
        missing: "start" leaves the loader at its beginning and returns None if there is no checkpoint at all.
        storage_options: fsspec's options for the store.

    Raises:
        FileNotFoundError, ValueError: as ``checkpoint.load`` does; if rank 0 cannot choose, on all ranks.
    """
    choose = partial(checkpoint.choose, url, missing=missing, storage_options=storage_options)
    chosen = from_rank_zero(choose)
    return None if chosen is None else checkpoint.load(loader, url, step=chosen, storage_options=storage_options)


def check_agreement(settings: Mapping[str, Any]) -> None:
    """Checks that all ranks were given the same, before any of them reads.

    Raises:
        ValueError: on all ranks, naming what differs and on which ranks.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    digests = {
        name: hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest() for name, value in settings.items()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    group = dist.new_group(backend="gloo")
    dist.all_gather_object(everyone, digests, group=group)
    dist.destroy_process_group(group)
    for name in settings:
        if others := [rank for rank, theirs in enumerate(everyone) if theirs[name] != everyone[0][name]]:
            raise ValueError(
                f"{name} must be the same on all ranks: rank 0 and ranks {others[:8]} were given different ones"
            )


def list_all(
    datasets: Mapping[str, str], storage_options: Mapping[str, Any] | None, listing: Mapping[str, str] | None = None
) -> dict[str, Listing]:
    """Lists what is under the prefix of each dataset, or reads the file of its listing.

    Raises:
        ValueError: if there is no dataset, or a listing or storage_options are for one that is not there.
        FileNotFoundError, PermissionError, ConnectionError: if one cannot be listed.
    """
    if not datasets:
        raise ValueError("datasets must not be empty")
    options = options_by_dataset(datasets, storage_options)
    files = listing or {}
    if unknown := sorted(set(files) - set(datasets)):
        raise ValueError(f"listing must be for the datasets {sorted(datasets)}, got {unknown} too")
    return {
        name: list_dataset(url, listing=files.get(name), storage_options=options[name])
        for name, url in datasets.items()
    }


def options_by_dataset(datasets: Iterable[str], storage_options: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Gives the storage options of each dataset: the common ones, and over them its own, under ``"datasets"``.

    Raises:
        ValueError: if some are for a dataset that is not there.
    """
    common, names = dict(storage_options or {}), sorted(datasets)
    own = common.pop("datasets", {})
    if unknown := sorted(set(own) - set(names)):
        raise ValueError(f"storage_options['datasets'] must be for the datasets {names}, got {unknown} too")
    return {name: {**common, **(own.get(name) or {})} for name in names}


def fsspec_options(storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Gives storage options without those that fsspec does not know."""
    return {name: value for name, value in (storage_options or {}).items() if name not in OURS}
