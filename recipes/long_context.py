"""The recipe for long contexts: whole documents, which do not see each other, in long samples."""

import functools
from collections.abc import Mapping
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh
from torchdata.nodes import BaseNode

from ibm_nodes import CausalLMCollator, Listing, Loader, Packer, Sample, Schedule, Shuffler
from ibm_nodes.recipes.assemble import build_loader, mix, own_schedule


def long_context(
    datasets: Mapping[str, str],
    *,
    weights: Mapping[str, float] | Schedule,
    seq_len: int,
    eos_id: int,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    seq_len_schedule: Mapping[int, int] | None = None,
    bos_id: int | None = None,
    pad_id: int | None = None,
    vocab_size: int | None = None,
    on_error: Literal["raise", "quarantine"] = "raise",
    max_errors: int = 100,
    num_shards: int | None = None,
    seed: int = 0,
    column: str = "tokens",
    overflow: Literal["split", "truncate", "drop"] = "split",
    num_open: int = 16,
    buffer_size: int = 4,
    prefetch_factor: int = 4,
    shift_labels: bool = False,
    multiple_of: int = 1,
    context_parallel: tuple[int, int] | None = None,
    pin_memory: bool | None = None,
    listing: Mapping[str, str] | None = None,
    on_change: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    mesh: DeviceMesh | None = None,
) -> Loader[Any]:
    """Streams a weighted mix of tokenized datasets, packed by best fit, with what keeps documents apart.

    Documents that fit into a sample are not cut. Batches are those of ``pretrain``, with ``position_ids`` that begin
    at 0 in each document, ``cu_seqlens`` and ``max_seqlen`` for variable-length attention (``flex_block_mask`` makes a
    mask of them), and ``num_valid``, the number of labels that count; the first token of a document is no label of the
    one before it. A state may be loaded with another seq_len: what was packed and not handed out is cut anew.

    Args:
        datasets: prefix of Arrow or Parquet files by name; the order of data depends on the names, not on the prefixes.
        weights: share of tokens by name; any sum. A ``Schedule`` has them change with the tokens of the run.
        seq_len: tokens in a sample.
        eos_id: id that closes a document.
        global_batch_size: samples in an optimizer step, on all data-parallel ranks together.
        micro_batch_size: samples in a batch of this rank; None makes a step one batch.
        seq_len_schedule: by tokens of the run, the seq_len from the first global batch on that has so many before it,
            such as ``{10**12: 8192}``; seq_len holds until then.
        bos_id: id that opens a document, or None.
        pad_id: id that fills samples, and that is taken off documents which end with it; None fills with eos_id.
        vocab_size: ids must be below it, if it is given.
        on_error: "raise" stops at data that cannot be read, "quarantine" leaves it out, as in ``pretrain``.
        max_errors: bad places that a logical shard may leave out of a dataset; the next one is an error.
        num_shards: number of logical shards, fixed for the life of a run; None chooses as ``pretrain`` does.
        seed: of the order of documents, the mix and the shuffle.
        column: the column of token ids.
        overflow: whether a document that is longer than a sample is split over several, truncated or left out.
        num_open: samples that each logical shard fills at a time.
        buffer_size: samples that each logical shard chooses from.
        prefetch_factor: batches that are ready ahead of the consumer.
        shift_labels: False for models that shift inside, as Hugging Face's do; True: the label is the next token.
        multiple_of: batches are padded to a width that is a multiple of this.
        context_parallel: (rank, size) in the context-parallel group, to be given that rank's slice of each batch; leave
            it out where the trainer slices.
        pin_memory: page-locked batches; None where CUDA is available.
        listing: by name, URL of a file that ``ibm-nodes list`` wrote of the prefix, to be read in place of listing it.
        on_change: by name, what to do where a checkpoint was saved with other files of a dataset: "error" (which names
            them) is the default, "keep" reads the files of then alone, "restart" begins this dataset again.
        storage_options: fsspec's options for the store: key, secret, endpoint_url, anon, profile ...;
            under ``datasets``, by name, those of one dataset alone.
        rank: data-parallel rank; else from the mesh, torch.distributed, torchrun, or 0.
        world_size: number of data-parallel ranks; else as rank.
        mesh: device mesh whose dimensions have names; members of a tensor-parallel group get equal batches.

    Raises:
        ValueError: if something does not divide or is out of range.
        FileNotFoundError, PermissionError, ConnectionError: if a dataset cannot be listed.
    """
    schedule = own_schedule(weights, seq_len, seq_len_schedule, global_batch_size=global_batch_size)
    graph = functools.partial(
        long_context_graph,
        eos_id=eos_id,
        bos_id=bos_id,
        pad_id=pad_id,
        vocab_size=vocab_size,
        on_error=on_error,
        max_errors=max_errors,
        seed=seed,
        column=column,
        overflow=overflow,
        num_open=num_open,
        buffer_size=buffer_size,
        on_change=dict(on_change or {}),
    )
    collate = CausalLMCollator(
        shift_labels=shift_labels,
        pad_id=eos_id if pad_id is None else pad_id,
        seq_len=schedule,
        multiple_of=multiple_of,
        mask_boundaries=True,
        position_ids=True,
        cu_seqlens=True,
        num_valid=True,
        context_parallel=context_parallel,
    )
    return build_loader(
        datasets,
        graph,
        collate,
        schedule=schedule,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_shards=num_shards,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        listing=listing,
        storage_options=storage_options,
        rank=rank,
        world_size=world_size,
        mesh=mesh,
    )


def long_context_graph(
    shard: int,
    num_shards: int,
    *,
    listings: Mapping[str, Listing],
    schedule: Schedule,
    eos_id: int,
    bos_id: int | None,
    pad_id: int | None,
    vocab_size: int | None,
    on_error: Literal["raise", "quarantine"],
    max_errors: int,
    seed: int,
    column: str,
    overflow: Literal["split", "truncate", "drop"],
    num_open: int,
    buffer_size: int,
    on_change: Mapping[str, str],
) -> BaseNode[Sample]:
    """Builds the graph of one logical shard."""
    mixer = mix(
        shard,
        num_shards,
        listings,
        weights=schedule,
        vocab_size=vocab_size,
        seed=seed,
        column=column,
        on_change=on_change,
        on_error=on_error,
        max_errors=max_errors,
    )
    packer = Packer(
        mixer,
        seq_len=schedule,
        eos_id=eos_id,
        bos_id=bos_id,
        pad_id=pad_id,
        strategy="best_fit",
        overflow=overflow,
        num_open=num_open,
    )
    return Shuffler(packer, buffer_size=buffer_size, seed=(seed, shard))
