"""The recipe for pretraining on text as it lies, tokenized on the fly."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh

from ibm_nodes import Loader, Schedule
from ibm_nodes.recipes.assemble import Text
from ibm_nodes.recipes.pretrain import pretrain


def pretrain_text(
    datasets: Mapping[str, str],
    *,
    tokenizer: str,
    weights: Mapping[str, float] | Schedule,
    seq_len: int,
    eos_id: int,
    global_batch_size: int,
    add_special_tokens: bool = False,
    allow_special_tokens: bool = False,
    micro_batch_size: int | None = None,
    seq_len_schedule: Mapping[int, int] | None = None,
    bos_id: int | None = None,
    vocab_size: int | None = None,
    on_error: Literal["raise", "quarantine"] = "raise",
    max_errors: int = 100,
    num_shards: int | None = None,
    skip: Sequence[tuple[int, int]] = (),
    seed: int = 0,
    column: str = "text",
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
) -> Loader[Any]:
    """Streams a weighted mix of datasets of text, tokenized on the fly, the same at every world size.

    All but the tokenizer is as in the recipe ``pretrain``: weights are shares of tokens, and the datasets are Arrow or
    Parquet files, JSON lines or tar files, with a column of text.

    Args:
        datasets: prefix of the files by name.
        tokenizer: a ``tokenizer.json`` of the library ``tokenizers``: a path, or a URL at any store that fsspec knows.
        weights: share of tokens by name; any sum. A ``Schedule`` has them change with the tokens of the run.
        seq_len: tokens in a sample.
        eos_id: id that closes a document.
        global_batch_size: samples in an optimizer step, on all data-parallel ranks together.
        add_special_tokens: add what the tokenizer puts around a text; eos_id and bos_id are not doubled.
        allow_special_tokens: a text that spells out a special token has that token there; else it is ordinary text.
        micro_batch_size: samples in a batch of this rank; None makes a step one batch.
        seq_len_schedule: by tokens of the run, the seq_len from the first global batch on that has so many before it,
            such as ``{10**12: 8192}``; seq_len holds until then.
        bos_id: id that opens a document, or None.
        vocab_size: all ids of the tokenizer must be below it, if it is given.
        on_error: "raise" stops at data that cannot be read, "quarantine" leaves it out, as in ``pretrain``.
        max_errors: bad places that a logical shard may leave out of a dataset; the next one is an error.
        num_shards: number of logical shards, fixed for the life of the run.
        skip: half-open ranges [begin, end) of sample numbers to leave out, in whole global batches.
        seed: of the order of documents, the mix and the shuffle.
        column: the column of text.
        holdout: share of the documents that is left out.
        epochs: by name, passes after which a dataset has ended.
        max_dataset_tokens: by name, tokens after which a dataset has ended.
        max_tokens: tokens, in whole global batches, after which the run ends.
        renamed: for a dataset that has another name than in the checkpoints, the name that it has there.
        buffer_size: samples that each logical shard chooses from.
        prefetch_factor: batches that are ready ahead of the consumer.
        shift_labels: False for models that shift inside, as Hugging Face's do; True: the label is the next token.
        pin_memory: page-locked batches; None where CUDA is available.
        listing: by name, URL of a file that ``ibm-nodes list`` wrote of the prefix, to be read in place of listing it.
        on_change: by name, what to do where a checkpoint was saved with other files of a dataset: "error" (which names
            them) is the default, "keep" reads the files of then alone, "restart" begins this dataset again.
        storage_options: fsspec's options for the store of the datasets and the tokenizer; under ``datasets``,
            by name, those of one dataset alone.
        rank: data-parallel rank; else from the mesh, torch.distributed, torchrun, or 0.
        world_size: number of data-parallel ranks; else as rank.
        mesh: device mesh whose dimensions have names.

    Raises:
        ValueError: if something does not divide or is out of range.
        FileNotFoundError, PermissionError, ConnectionError: if a dataset cannot be listed.
    """
    return pretrain(
        datasets,
        weights=weights,
        seq_len=seq_len,
        eos_id=eos_id,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        seq_len_schedule=seq_len_schedule,
        bos_id=bos_id,
        vocab_size=vocab_size,
        on_error=on_error,
        max_errors=max_errors,
        num_shards=num_shards,
        skip=skip,
        seed=seed,
        column=column,
        holdout=holdout,
        epochs=epochs,
        max_dataset_tokens=max_dataset_tokens,
        max_tokens=max_tokens,
        renamed=renamed,
        buffer_size=buffer_size,
        prefetch_factor=prefetch_factor,
        shift_labels=shift_labels,
        pin_memory=pin_memory,
        listing=listing,
        on_change=on_change,
        storage_options=storage_options,
        rank=rank,
        world_size=world_size,
        mesh=mesh,
        text=Text(tokenizer, add_special_tokens, allow_special_tokens, storage_options),
    )
