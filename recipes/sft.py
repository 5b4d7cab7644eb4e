"""The recipe for supervised fine-tuning: conversations of which only the responses are learned."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh
from torchdata.nodes import BaseNode

from ibm_nodes import CausalLMCollator, Listing, Loader, Packer, PromptMasker, Sample, Schedule, Shuffler
from ibm_nodes.recipes.assemble import build_loader, mix, own_schedule


def sft(
    datasets: Mapping[str, str],
    *,
    weights: Mapping[str, float] | Schedule,
    seq_len: int,
    eos_id: int,
    response_ids: Sequence[int],
    prompt_ids: Sequence[int] | None = None,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    bos_id: int | None = None,
    pad_id: int | None = None,
    vocab_size: int | None = None,
    on_error: Literal["raise", "quarantine"] = "raise",
    max_errors: int = 100,
    num_shards: int | None = None,
    seed: int = 0,
    column: str = "tokens",
    strategy: Literal["pad", "best_fit"] = "best_fit",
    overflow: Literal["truncate", "drop"] = "truncate",
    num_open: int = 16,
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
) -> Loader[Any]:
    """Streams tokenized conversations, several in a sample, with labels for the responses alone.

    A row is a conversation with the markers of its chat template, in one column of token ids. What stands between the
    marker of a response and that of the next prompt is learned; the label of everything else is -100. Conversations do
    not see each other: batches have the entries of ``long-context``.

    Args:
        datasets: prefix of Arrow or Parquet files by name; the order of data depends on the names, not on the prefixes.
        weights: share of tokens by name; any sum. A ``Schedule`` has them change with the tokens of the run.
        seq_len: tokens in a sample.
        eos_id: id that closes a conversation.
        response_ids: ids that open a response, such as those of ``<|im_start|>assistant`` and the end of the line.
        prompt_ids: ids that open the next prompt, such as that of ``<|im_start|>``; None: a response goes on to the end
            of the conversation.
        global_batch_size: samples in an optimizer step, on all data-parallel ranks together.
        micro_batch_size: samples in a batch of this rank; None makes a step one batch.
        bos_id: id that opens a document, or None.
        pad_id: id that fills samples, and that is taken off documents which end with it; None fills with eos_id.
        vocab_size: ids must be below it, if it is given.
        on_error: "raise" stops at data that cannot be read, "quarantine" leaves it out, as in ``pretrain``.
        max_errors: bad places that a logical shard may leave out of a dataset; the next one is an error.
        num_shards: number of logical shards, fixed for the life of a run; None chooses as ``pretrain`` does.
        seed: of the order of documents, the mix and the shuffle.
        column: the column of token ids.
        strategy: "pad" keeps the order, and a sample ends where the next conversation does not fit; "best_fit" pads
            much less.
        overflow: whether a conversation that is longer than a sample is truncated or left out.
        num_open: for best_fit, samples that each logical shard fills at a time.
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

    Raises:
        ValueError: if something does not divide or is out of range.
        FileNotFoundError, PermissionError, ConnectionError: if a dataset cannot be listed.
    """
    schedule = own_schedule(weights, seq_len, global_batch_size=global_batch_size)
    graph = functools.partial(
        sft_graph,
        eos_id=eos_id,
        response_ids=tuple(response_ids),
        prompt_ids=None if prompt_ids is None else tuple(prompt_ids),
        bos_id=bos_id,
        pad_id=pad_id,
        vocab_size=vocab_size,
        on_error=on_error,
        max_errors=max_errors,
        seed=seed,
        column=column,
        strategy=strategy,
        overflow=overflow,
        num_open=num_open,
        buffer_size=buffer_size,
        on_change=dict(on_change or {}),
    )
    collate = CausalLMCollator(
        shift_labels=shift_labels,
        pad_id=eos_id if pad_id is None else pad_id,
        seq_len=schedule,
        mask_boundaries=True,
        position_ids=True,
        cu_seqlens=True,
        num_valid=True,
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


def sft_graph(
    shard: int,
    num_shards: int,
    *,
    listings: Mapping[str, Listing],
    schedule: Schedule,
    eos_id: int,
    response_ids: Sequence[int],
    prompt_ids: Sequence[int] | None,
    bos_id: int | None,
    pad_id: int | None,
    vocab_size: int | None,
    on_error: Literal["raise", "quarantine"],
    max_errors: int,
    seed: int,
    column: str,
    strategy: Literal["pad", "best_fit"],
    overflow: Literal["truncate", "drop"],
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
    masker = PromptMasker(mixer, response_ids=response_ids, prompt_ids=prompt_ids)
    packer = Packer(
        masker,
        seq_len=schedule,
        eos_id=eos_id,
        bos_id=bos_id,
        pad_id=pad_id,
        strategy=strategy,
        overflow=overflow,
        num_open=num_open,
    )
    return Shuffler(packer, buffer_size=buffer_size, seed=(seed, shard))
