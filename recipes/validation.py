"""The recipe for a held-out loss: every document that training leaves out, once."""

import functools
from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchdata.nodes import BaseNode

from ibm_nodes import (
    Batcher,
    CausalLMCollator,
    EndTogether,
    Listing,
    Loader,
    Mixer,
    Packer,
    Prefetcher,
    Reader,
    Sample,
    Sharder,
    filler,
)
from ibm_nodes.recipes.distributed import check_agreement, data_parallel, from_rank_zero, list_all


def validation(
    datasets: Mapping[str, str],
    *,
    holdout: float,
    seq_len: int,
    eos_id: int,
    global_batch_size: int,
    bos_id: int | None = None,
    pad_id: int = 0,
    vocab_size: int | None = None,
    on_error: Literal["raise", "quarantine"] = "raise",
    max_errors: int = 100,
    num_shards: int | None = None,
    column: str = "tokens",
    max_samples: int | None = None,
    prefetch_factor: int = 2,
    shift_labels: bool = False,
    pin_memory: bool | None = None,
    listing: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    mesh: DeviceMesh | None = None,
) -> Loader[Any]:
    """Streams the held-out documents of tokenized datasets once, packed, in the same steps at every world size.

    Each call gives a loader that starts at the beginning; the training loader is left alone. Batches are
    ``{"input_ids", "labels", "is_filler"}``: int64 of shape [batch, seq_len] twice, and bool of shape [batch]. A
    logical shard that has ended yields filler, whose labels are all -100, so that all ranks make the same steps.

    Args:
        datasets: prefix of Arrow or Parquet files by name, as the training recipe was given them.
        holdout: share of the documents that is held out, as the training recipe was given it.
        seq_len: tokens in a sample.
        eos_id: id that closes a document.
        global_batch_size: samples in a step, on all data-parallel ranks together.
        bos_id: id that opens a document, or None.
        pad_id: id that fills the last sample of a logical shard.
        vocab_size: ids must be below it, if it is given.
        on_error: "raise" stops at data that cannot be read, "quarantine" leaves it out, as in ``pretrain``.
        max_errors: bad places that a logical shard may leave out of a dataset; the next one is an error.
        num_shards: number of logical shards; None takes global_batch_size.
        column: the column of token ids.
        max_samples: end after so many samples, in whole global batches; None reads all.
        prefetch_factor: batches that are ready ahead of the consumer.
        shift_labels: as the training recipe was given it.
        pin_memory: page-locked batches; None where CUDA is available.
        listing: by name, URL of a file that ``ibm-nodes list`` wrote of the prefix, to be read in place of listing it.
        storage_options: fsspec's options for the store: key, secret, endpoint_url, anon, profile ...;
            under ``datasets``, by name, those of one dataset alone.
        rank: data-parallel rank; else from the mesh, torch.distributed, torchrun, or 0.
        world_size: number of data-parallel ranks; else as rank.
        mesh: device mesh whose dimensions have names; members of a tensor-parallel group get equal batches.

    Raises:
        ValueError: if something does not divide or is out of range, or there are several ranks without
            torch.distributed.
        FileNotFoundError, PermissionError, ConnectionError: if a dataset cannot be listed.
    """
    rank, world_size = data_parallel(rank, world_size, mesh)
    if global_batch_size % world_size:
        raise ValueError(f"global_batch_size must be a multiple of world_size={world_size}, got {global_batch_size}")
    listings = from_rank_zero(functools.partial(list_all, datasets, storage_options, listing))
    graph = functools.partial(
        validation_graph,
        listings=listings,
        holdout=holdout,
        seq_len=seq_len,
        eos_id=eos_id,
        bos_id=bos_id,
        vocab_size=vocab_size,
        on_error=on_error,
        max_errors=max_errors,
        column=column,
    )
    num_shards = num_shards or global_batch_size
    graph(0, num_shards)  # checks the arguments of all nodes; touches no data
    settings = {"datasets": {name: listing.digest for name, listing in listings.items()}, "num_shards": num_shards}
    settings |= {key: value for key, value in graph.keywords.items() if key != "listings"}
    check_agreement(settings | {"global_batch_size": global_batch_size, "max_samples": max_samples})
    node: BaseNode[Any] = Sharder(
        graph,
        num_shards=num_shards,
        rank=rank,
        world_size=world_size,
        filler=filler(seq_len, pad_id),
        max_items=None if max_samples is None else -(-max_samples // global_batch_size) * global_batch_size,
    )
    collate = CausalLMCollator(shift_labels=shift_labels, pad_id=pad_id, seq_len=seq_len, is_filler=True)
    node = Batcher(node, batch_size=global_batch_size // world_size, collate=collate)
    node = EndTogether(node, group=_group(world_size))
    return Loader(Prefetcher(node, prefetch_factor=prefetch_factor, pin_memory=pin_memory))


def validation_graph(
    shard: int,
    num_shards: int,
    *,
    listings: Mapping[str, Listing],
    holdout: float,
    seq_len: int,
    eos_id: int,
    bos_id: int | None,
    vocab_size: int | None,
    on_error: Literal["raise", "quarantine"],
    max_errors: int,
    column: str,
) -> BaseNode[Sample]:
    """Builds the graph of one logical shard."""
    sources = {
        name: Reader(
            listing.url,
            name=name,
            shard=shard,
            num_shards=num_shards,
            column=column,
            epochs=1,
            vocab_size=vocab_size,
            on_error=on_error,
            max_errors=max_errors,
            holdout=holdout,
            split="validation",
            listing=listing,
        )
        for name, listing in listings.items()
    }
    mixer = Mixer(sources, weights=dict.fromkeys(sources, 1.0), seed=(0, shard))
    return Packer(mixer, seq_len=seq_len, eos_id=eos_id, bos_id=bos_id)


def _group(world_size: int) -> dist.ProcessGroup | None:
    """Makes a gloo group of all ranks, to end together; a vote of more ranks than the data-parallel ones is as good."""
    if world_size == 1:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{world_size} ranks can only end together with torch.distributed: call init_process_group first"
        )
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group
