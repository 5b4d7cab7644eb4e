"""The recipe for pretraining: a weighted mix of tokenized datasets, packed and shuffled."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh
from torchdata.nodes import BaseNode

from ibm_nodes import CausalLMCollator, Listing, Loader, Packer, Sample, Schedule, Shuffler
from ibm_nodes.recipes.assemble import Text, build_loader, mix, own_schedule


def pretrain(
    datasets: Mapping[str, str],
    *,
    weights: Mapping[str, float] | Schedule,
    seq_len: int,
    eos_id: int,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    seq_len_schedule: Mapping[int, int] | None = None,
    bos_id: int | None = None,
    vocab_size: int | None = None,
    on_error: Literal["raise", "quarantine"] = "raise",
    max_errors: int = 100,
    num_shards: int | None = None,
    skip: Sequence[tuple[int, int]] = (),
    seed: int = 0,
    column: str = "tokens",
    holdout: float = 0.0,
    epochs: Mapping[str, int] | None = None,
    max_dataset_tokens: Mapping[str, int] | None = None,
    max_tokens: int | None = None,
    renamed: Mapping[str, str] | None = None,
    buffer_size: int = 16,
    prefetch_factor: int = 4,
    shift_labels: bool = False,
    pin_memory: bool | None = None,
    listing: Mapping[str, str] | None = None,
    on_change: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    mesh: DeviceMesh | None = None,
    text: Text | None = None,
) -> Loader[Any]:
    """Streams a weighted mix of tokenized datasets as packed, shuffled batches, the same at every world size.

    The datasets are listed here, by rank 0 where torch.distributed is up; nothing else is read before the first
    batch. Batches are ``{"input_ids", "labels"}``, int64 of shape [batch, seq_len], and go on for ever, unless
    ``max_tokens`` or ``epochs`` of all datasets end them.

    Args:
        datasets: prefix of Arrow or Parquet files by name; the order of data depends on the names, not on the prefixes.
        weights: share of tokens by name; any sum. A ``Schedule`` has them change with the tokens of the run.
        seq_len: tokens in a sample.
        eos_id: id that closes a document.
        global_batch_size: samples in an optimizer step, on all data-parallel ranks together.
        micro_batch_size: samples in a batch of this rank; a step is then global_batch_size / (world_size x
            micro_batch_size) batches. None makes a step one batch.
        seq_len_schedule: by tokens of the run, the seq_len from the first global batch on that has so many before it,
            such as ``{10**12: 8192}``; seq_len holds until then.
        bos_id: id that opens a document, or None.
        vocab_size: ids must be below it, if it is given.
        on_error: "raise" stops at data that cannot be read; "quarantine" leaves out such blocks and files from then on,
            and records them in the state. Errors of the store that another attempt may cure are raised in any case.
        max_errors: bad places that a logical shard may leave out of a dataset; the next one is an error.
        num_shards: number of logical shards, fixed for the life of the run; None takes the smallest multiple of
            global_batch_size that is at least 256, so that every world size which divides the batch works.
        skip: half-open ranges [begin, end) of sample numbers to leave out, in whole global batches, such as those of a
            loss spike. Ranges that lie behind may be taken out.
        seed: of the order of documents, the mix and the shuffle.
        column: the column of token ids.
        holdout: share of the documents that is left out, for the recipe ``validation`` to read.
        epochs: by name, passes after which a dataset has ended; the others then share its weight.
        max_dataset_tokens: by name, tokens after which a dataset has ended, give or take a document in each logical
            shard; the others then share its weight.
        max_tokens: tokens, in whole global batches, after which the run ends, on the same step on all ranks; what is
            skipped counts.
        renamed: for a dataset that has another name than in the checkpoints, the name that it has there; its order of
            documents, and the name that they carry, stay.
        buffer_size: samples that each logical shard chooses from.
        prefetch_factor: batches that are ready ahead of the consumer.
        shift_labels: False for models that shift inside, as Hugging Face's do; True: the label is the next token.
        pin_memory: page-locked batches; None where CUDA is available.
        listing: by name, URL of a file that ``ibm-nodes list`` wrote of the prefix, to be read in place of listing it.
        on_change: by name, what to do where a checkpoint was saved with other files of a dataset: "error" (which names
            them) is the default, "keep" reads the files of then alone, "restart" begins this dataset again.
        storage_options: fsspec's options for the store: key, secret, endpoint_url, anon, profile ...;
            under ``datasets``, by name, those of one dataset alone.
        rank: data-parallel rank; else from the mesh, torch.distributed, torchrun, or 0.
        world_size: number of data-parallel ranks; else as rank.
        mesh: device mesh whose dimensions have names; members of a tensor-parallel group get equal batches.
        text: how to tokenize the column, if it holds text; the recipe ``pretrain-text`` gives it.

    Raises:
        ValueError: if something does not divide or is out of range.
        FileNotFoundError, PermissionError, ConnectionError: if a dataset cannot be listed.
    """
    schedule = own_schedule(
        weights, seq_len, seq_len_schedule, global_batch_size=global_batch_size, max_tokens=max_tokens
    )
    graph = functools.partial(
        pretrain_graph,
        eos_id=eos_id,
        bos_id=bos_id,
        vocab_size=vocab_size,
        on_error=on_error,
        max_errors=max_errors,
        seed=seed,
        column=column,
        holdout=holdout,
        epochs=dict(epochs or {}),
        max_dataset_tokens=dict(max_dataset_tokens or {}),
        renamed=dict(renamed or {}),
        buffer_size=buffer_size,
        on_change=dict(on_change or {}),
        text=text,
    )
    return build_loader(
        datasets,
        graph,
        CausalLMCollator(shift_labels=shift_labels),
        schedule=schedule,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_shards=num_shards,
        skip=skip,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        listing=listing,
        storage_options=storage_options,
        rank=rank,
        world_size=world_size,
        mesh=mesh,
    )


def pretrain_graph(
    shard: int,
    num_shards: int,
    *,
    listings: Mapping[str, Listing],
    schedule: Schedule,
    eos_id: int,
    bos_id: int | None,
    vocab_size: int | None,
    on_error: Literal["raise", "quarantine"],
    max_errors: int,
    seed: int,
    column: str,
    holdout: float,
    epochs: Mapping[str, int],
    max_dataset_tokens: Mapping[str, int],
    renamed: Mapping[str, str],
    buffer_size: int,
    on_change: Mapping[str, str],
    text: Text | None,
) -> BaseNode[Sample]:
    """Builds the graph of one logical shard."""
    mixer = mix(
        shard,
        num_shards,
        listings,
        weights=schedule,
        vocab_size=vocab_size,
        on_error=on_error,
        max_errors=max_errors,
        seed=seed,
        column=column,
        holdout=holdout,
        epochs=epochs,
        max_dataset_tokens=max_dataset_tokens,
        renamed=renamed,
        on_change=on_change,
        text=text,
    )
    packer = Packer(mixer, seq_len=schedule, eos_id=eos_id, bos_id=bos_id)
    return Shuffler(packer, buffer_size=buffer_size, seed=(seed, shard))
