"""What the recipes for training share: the readers and the mix of a logical shard, and the loader around its graph."""

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch.distributed.device_mesh import DeviceMesh
from torchdata.nodes import BaseNode

from ibm_nodes import (
    Batcher,
    CausalLMCollator,
    Document,
    Listing,
    Loader,
    Mixer,
    Prefetcher,
    Reader,
    Sample,
    Schedule,
    Sharder,
    Tokenizer,
)
from ibm_nodes.recipes.distributed import check_agreement, data_parallel, from_rank_zero, list_all

logger = logging.getLogger(__name__)

MIN_SHARDS = 256
NOTHING: Mapping[str, Any] = MappingProxyType({})
BLOCK_BYTES = 2 << 20
"""About what the present block of one dataset takes in one logical shard."""
MEMORY_SHARE = 0.25
"""Share of the machine's memory above which a warning says so."""


class Text(NamedTuple):
    """How a column of text becomes tokens: the arguments of ``Tokenizer``."""

    tokenizer: str
    add_special_tokens: bool = False
    allow_special_tokens: bool = False
    storage_options: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        """Leaves the storage options out, which may hold keys."""
        return f"Text{self[:3]!r}"


def mix(
    shard: int,
    num_shards: int,
    listings: Mapping[str, Listing],
    *,
    weights: Mapping[str, float] | Schedule,
    vocab_size: int | None,
    on_error: Literal["raise", "quarantine"],
    max_errors: int,
    seed: int,
    column: str,
    holdout: float = 0.0,
    epochs: Mapping[str, int] = NOTHING,
    max_dataset_tokens: Mapping[str, int] = NOTHING,
    renamed: Mapping[str, str] = NOTHING,
    on_change: Mapping[str, str] = NOTHING,
    text: Text | None = None,
) -> Mixer[Document]:
    """Builds what reads and mixes the documents of one logical shard."""
    by_name = {"epochs": epochs, "max_dataset_tokens": max_dataset_tokens, "renamed": renamed, "on_change": on_change}
    for what, names in by_name.items():
        if unknown := sorted(set(names) - set(listings)):
            raise ValueError(f"{what} must be for the datasets {sorted(listings)}, got {unknown} too")
    sources: dict[str, BaseNode[Any]] = {
        name: Reader(
            listing.url,
            name=renamed.get(name, name),
            shard=shard,
            num_shards=num_shards,
            seed=seed,
            column=column,
            columns=None if text is None else [column],
            epochs=epochs.get(name),
            vocab_size=vocab_size if text is None else None,
            on_error=on_error,
            max_errors=max_errors,
            holdout=holdout,
            listing=listing,
            on_change=on_change.get(name, "error"),
        )
        for name, listing in listings.items()
    }
    if text is not None:
        build = functools.partial(
            Tokenizer,
            tokenizer=text.tokenizer,
            column=column,
            add_special_tokens=text.add_special_tokens,
            allow_special_tokens=text.allow_special_tokens,
            vocab_size=vocab_size,
            storage_options=text.storage_options,
        )
        sources = {name: build(source) for name, source in sources.items()}
    limits = {name: -(-tokens // num_shards) for name, tokens in max_dataset_tokens.items()}
    return Mixer(sources, weights=weights, seed=(seed, shard), max_tokens=limits, renamed=renamed)


def own_schedule(
    weights: Mapping[str, float] | Schedule,
    seq_len: int,
    seq_len_schedule: Mapping[int, int] | None = None,
    *,
    global_batch_size: int,
    max_tokens: int | None = None,
) -> Schedule:
    """Makes the schedule of one loader, whose Sharder sets its clock."""
    if max_tokens is not None and max_tokens < seq_len * global_batch_size:
        raise ValueError(f"max_tokens must be at least a global batch, {seq_len * global_batch_size}, got {max_tokens}")
    if seq_len_schedule and min(seq_len_schedule) < 1:
        raise ValueError(
            f"seq_len_schedule must begin after 1 token or more, got {min(seq_len_schedule)}: seq_len holds until then"
        )
    schedule = weights if isinstance(weights, Schedule) else Schedule([(0, weights)])
    return Schedule(
        schedule.given,
        interpolate=schedule.interpolate,
        seq_len={0: seq_len, **(seq_len_schedule or {})},
        global_batch_size=global_batch_size,
        max_tokens=max_tokens,
    )


def build_loader(
    datasets: Mapping[str, str],
    graph: "functools.partial[BaseNode[Sample]]",
    collate: CausalLMCollator,
    *,
    schedule: Schedule,
    global_batch_size: int,
    micro_batch_size: int | None,
    num_shards: int | None,
    skip: Sequence[tuple[int, int]] = (),
    prefetch_factor: int,
    pin_memory: bool | None,
    listing: Mapping[str, str] | None,
    storage_options: Mapping[str, Any] | None,
    rank: int | None,
    world_size: int | None,
    mesh: DeviceMesh | None,
) -> Loader[Any]:
    """Builds the loader of a graph; what is not described here is as for ``pretrain``.

    Args:
        datasets: prefix by name.
        graph: partial of a function that builds the graph of one logical shard; it is given ``listings`` and
            ``schedule`` too. All ranks must have given it the same.
        collate: makes a batch of samples.
        schedule: as ``own_schedule`` made it.
        global_batch_size: samples in an optimizer step.
        micro_batch_size: samples in a batch, or None.
        num_shards: number of logical shards, or None.
        skip: ranges of samples to leave out.
        prefetch_factor: batches that are ready ahead.
        pin_memory: page-locked batches, or None.
        listing: file of a listing by name, or None.
        storage_options: fsspec's options for the store.
        rank: data-parallel rank, or None.
        world_size: number of data-parallel ranks, or None.
        mesh: device mesh, or None.
    """
    rank, world_size = data_parallel(rank, world_size, mesh)
    batch_size = _batch_size(global_batch_size, micro_batch_size, world_size)
    if num_shards is None:
        num_shards = -(-MIN_SHARDS // global_batch_size) * global_batch_size
    listings = from_rank_zero(functools.partial(list_all, datasets, storage_options, listing))
    given = graph.keywords
    graph = functools.partial(graph, listings=listings, schedule=schedule)
    graph(0, num_shards)  # checks the arguments of all nodes; touches no data
    vocab_size = given["vocab_size"]
    for name, token in ((name, given.get(name)) for name in ("eos_id", "bos_id", "pad_id")):
        if vocab_size is not None and token is not None and token >= vocab_size:
            raise ValueError(f"{name} must be below vocab_size={vocab_size}, got {token}: the model could not embed it")
    sharder = Sharder(
        graph,
        num_shards=num_shards,
        rank=rank,
        world_size=world_size,
        schedule=schedule,
        skip=skip,
    )
    settings: dict[str, Any] = {
        "datasets": {name: listing.digest for name, listing in listings.items()},
        "schedule": repr(schedule),
        **given,
        "num_shards": num_shards,
        "global_batch_size": global_batch_size,
        "world_size": world_size,
        "max_tokens": schedule.max_tokens,
        "skip": sharder.skip,
    }
    check_agreement(settings)
    _check_whole_batches(sharder.skip, global_batch_size)
    buffered_tokens = schedule.longest * (given["buffer_size"] + given.get("num_open", 0))
    _warn_of_memory(listings, num_shards, world_size, global_batch_size, buffered_tokens)
    node = Batcher(sharder, batch_size=batch_size, collate=collate)
    prefetcher = Prefetcher(node, prefetch_factor=prefetch_factor, pin_memory=pin_memory)
    return Loader(prefetcher, global_batch_size=global_batch_size)


def _batch_size(global_batch_size: int, micro_batch_size: int | None, world_size: int) -> int:
    if global_batch_size < 1 or (micro_batch_size is not None and micro_batch_size < 1):
        raise ValueError(
            f"global_batch_size and micro_batch_size must be at least 1, got {global_batch_size} and {micro_batch_size}"
        )
    unit = world_size * (micro_batch_size or 1)
    if global_batch_size % unit:
        what = "world_size" if micro_batch_size is None else "world_size x micro_batch_size"
        sizes = (size for size in range(world_size, 0, -1) if global_batch_size % (size * (micro_batch_size or 1)) == 0)
        smaller = next(sizes, None)
        raise ValueError(
            f"global_batch_size must be a multiple of {what} = {unit}, got {global_batch_size}: "
            + (
                f"the next smaller world_size that fits is {smaller}"
                if smaller
                else "choose a micro_batch_size that divides it"
            )
        )
    return micro_batch_size or global_batch_size // world_size


def _check_whole_batches(skip: Sequence[tuple[int, int]], global_batch_size: int) -> None:
    for begin, end in skip:
        if (end - begin) % global_batch_size:
            raise ValueError(
                f"skip must leave out whole global batches of {global_batch_size} samples, got {begin} to {end}, which "
                f"are {end - begin} samples: a range that lies behind need not be given any more"
            )


def memory_bytes(listings: Mapping[str, Listing], num_owned: int, buffered_tokens: int) -> int:
    """Estimates what a rank with ``num_owned`` logical shards keeps in memory: a block a dataset, and the buffers."""
    blocks = sum(min(BLOCK_BYTES, listing.starts[-1]) for listing in listings.values())
    return num_owned * (blocks + buffered_tokens * 6)


def _warn_of_memory(
    listings: Mapping[str, Listing], num_shards: int, world_size: int, global_batch_size: int, buffered_tokens: int
) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = int(machine * MEMORY_SHARE) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needed = memory_bytes(listings, num_shards // world_size, buffered_tokens)
    if needed > limit:
        fits = (
            limit
            // max(1, memory_bytes(listings, 1, buffered_tokens))
            * world_size
            // global_batch_size
            * global_batch_size
        )
        logger.warning(
            "num_shards=%d takes about %d MiB on each of %d ranks, more than a quarter of the memory: %s",
            num_shards,
            needed >> 20,
            world_size,
            f"num_shards={fits} would fit" if fits else "use more ranks or a smaller buffer_size",
        )
