"""CausalLMCollator: samples to the tensors that a causal language model is trained with."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ibm_nodes.items import Sample, masked_in
from ibm_nodes.runs import joined
from ibm_nodes.schedule import Schedule

IGNORE_INDEX = -100
"""The label that PyTorch's cross entropy leaves out."""


class CausalLMCollator:
    """Makes ``{"input_ids", "labels"}`` for training a causal language model, both int64 of shape [batch, width].

    The label of padding is -100, and so is that of a token that a sample holds as its complement, as ``PromptMasker``
    makes them; ``input_ids`` have the token itself. On request there are more entries, for models that keep the
    documents of a sample apart.

    Args:
        shift_labels: False: labels are the input ids, for models that shift inside (Hugging Face's do, and need this).
            True: the label of each position is the next token, and that of the last one -100, for models that compare
            their output with the labels position by position.
        pad_id: id that fills samples up to the width.
        seq_len: the width; None takes the longest sample of the batch. With a ``Schedule``, the packer's, it is what
            that says for the sample drawn last.
        multiple_of: the width is rounded up to a multiple of this.
        mask_boundaries: the first token of a document that follows another one is no label.
        position_ids: add ``position_ids``, int64 of shape [batch, width], that begin at 0 in each document.
        cu_seqlens: add ``cu_seqlens``, int32 of shape [documents + 1], where documents begin in the flattened batch and
            its length, and ``max_seqlen``, an int, the longest: what variable-length attention takes. The padding of a
            sample counts as a document.
        dataset_ids: id of each dataset by name: add ``dataset_ids``, int64 of shape [batch, width], -1 for padding.
        is_filler: add ``is_filler``, bool of shape [batch]. The labels of filler are -100 in any case.
        num_valid: add ``num_valid``, an int, how many labels count: what to divide a sum of losses by.
        context_parallel: (rank, size) in the context-parallel group: give this rank's slice of all of shape [batch,
            width], parts rank and 2 size - 1 - rank of 2 size equal parts, which balances causal attention, and count
            its labels. The width is rounded up to fit; ``cu_seqlens`` stays that of the whole. Adds ``position_ids``.

    Raises:
        ValueError: if an argument is out of range, or labels are sliced that the model would shift.
    """

    def __init__(
        self,
        *,
        shift_labels: bool,
        pad_id: int = 0,
        seq_len: int | Schedule | None = None,
        multiple_of: int = 1,
        mask_boundaries: bool = False,
        position_ids: bool = False,
        cu_seqlens: bool = False,
        dataset_ids: Mapping[str, int] | None = None,
        is_filler: bool = False,
        num_valid: bool = False,
        context_parallel: tuple[int, int] | None = None,
    ) -> None:
        if multiple_of < 1 or (isinstance(seq_len, int) and seq_len < 1):
            raise ValueError(f"seq_len and multiple_of must be at least 1, got {seq_len} and {multiple_of}")
        if context_parallel is not None:
            rank, size = context_parallel
            if not 0 <= rank < size:
                raise ValueError(f"context_parallel must be (rank, size) with rank below size, got {context_parallel}")
            if not shift_labels:
                raise ValueError(
                    "shift_labels must be True with context_parallel: a model that shifts inside would compare the end "
                    "of each part with the beginning of another"
                )
            multiple_of = math.lcm(multiple_of, 2 * size)
        self.shift_labels = shift_labels
        self.pad_id = pad_id
        self.seq_len = seq_len
        self.multiple_of = multiple_of
        self.mask_boundaries = mask_boundaries
        self.position_ids = position_ids or context_parallel is not None
        self.cu_seqlens = cu_seqlens
        self.dataset_ids = None if dataset_ids is None else dict(dataset_ids)
        self.is_filler = is_filler
        self.num_valid = num_valid
        self.context_parallel = context_parallel

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Collates samples.

        Raises:
            ValueError: if a sample is longer than ``seq_len``.
            LookupError: if a dataset has no id.
        """
        lengths = [_length(sample) for sample in samples]
        width = self._width(max(len(sample.tokens) for sample in samples))
        ids, masks = self._ids(samples, lengths, width)
        arrays = {"input_ids": ids, "labels": self._labels(ids, samples, lengths, masks)}
        if self.position_ids:
            arrays["position_ids"] = np.stack([_positions(sample, width) for sample in samples])
        if self.dataset_ids is not None:
            arrays["dataset_ids"] = np.stack([self._datasets(sample, width) for sample in samples])
        if self.context_parallel is not None:
            arrays = {name: _slice(array, *self.context_parallel) for name, array in arrays.items()}
        # numpy throughout: torch would wake threads of its own to copy, and take cores from the trainer.
        batch: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return batch | self._more(arrays["labels"], samples, width)

    def _ids(
        self, samples: Sequence[Sample], lengths: list[int], width: int
    ) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
        """Gives the ids, and for each sample of which tokens are not to be learned its number and which they are."""
        arrays = [sample.tokens for sample in samples]
        if min(lengths) == width and len({array.dtype for array in arrays}) == 1:
            tokens = joined(arrays)
            if masked_in(tokens) is None:
                return tokens.astype(np.int64).reshape(len(samples), width), []
        ids = np.empty((len(samples), width), np.int64)
        masks = []
        for number, (row, array, length) in enumerate(zip(ids, arrays, lengths, strict=True)):
            tokens = array[:length]
            if (masked := masked_in(tokens)) is not None:
                masks.append((number, masked))
                tokens = np.where(masked, ~tokens, tokens)
            row[:length] = tokens
            row[length:] = self.pad_id
        return ids, masks

    def _more(self, labels: np.ndarray, samples: Sequence[Sample], width: int) -> dict[str, Any]:
        """Gives what does not have the shape of the ids."""
        more: dict[str, Any] = {}
        if self.is_filler:
            more["is_filler"] = torch.tensor([sample.is_filler for sample in samples])
        if self.num_valid:
            counted = labels if self.shift_labels else labels[:, 1:]
            more["num_valid"] = int(np.count_nonzero(counted != IGNORE_INDEX))
        if self.cu_seqlens:
            edges = _edges(samples, width)
            more["cu_seqlens"] = torch.from_numpy(np.array(edges, np.int32))
            more["max_seqlen"] = max((end - begin for begin, end in pairwise(edges)), default=0)
        return more

    def _width(self, longest: int) -> int:
        width = self.seq_len
        if isinstance(width, Schedule):
            # The longest, since a state from the middle of a step may be loaded where batches end at other samples.
            width = max(longest, width.seq_len_at(width.now)[0])
        if width is not None and longest > width:
            raise ValueError(
                f"samples must have at most seq_len={width} tokens, got one of {longest}: give the collator the "
                "seq_len of the Packer"
            )
        width = longest if width is None else width
        return -(-width // self.multiple_of) * self.multiple_of

    def _labels(
        self, ids: np.ndarray, samples: Sequence[Sample], lengths: list[int], masks: list[tuple[int, np.ndarray]]
    ) -> np.ndarray:
        shift = int(self.shift_labels)
        if shift:
            labels = np.empty_like(ids)
            labels[:, :-1] = ids[:, 1:]
            labels[:, -1:] = IGNORE_INDEX
        else:
            labels = ids.copy()
        if min(lengths) < ids.shape[1]:
            for label, length in zip(labels, lengths, strict=True):
                label[max(0, length - shift) :] = IGNORE_INDEX
        for number, masked in masks:
            labels[number, : len(masked) - shift][masked[shift:]] = IGNORE_INDEX
        if self.mask_boundaries:
            for label, sample in zip(labels, samples, strict=True):
                label[[start - shift for start in sample.starts if start]] = IGNORE_INDEX
        return labels

    def _datasets(self, sample: Sample, width: int) -> np.ndarray:
        assert self.dataset_ids is not None
        ids = np.full(width, -1, np.int64)
        for start, (name, *_) in zip(sample.starts, sample.documents, strict=True):
            if name not in self.dataset_ids:
                raise LookupError(f"dataset_ids must have an id for every dataset, got none for {name!r}")
            ids[start:] = self.dataset_ids[name]
        ids[_length(sample) :] = -1
        return ids


def _length(sample: Sample) -> int:
    return 0 if sample.is_filler else len(sample.tokens)


def _starts(sample: Sample, width: int) -> list[int]:
    """Gives where the documents of a sample begin, and its padding if there is any."""
    length = _length(sample)
    starts = list(sample.starts) if length else []
    return [*starts, length] if length < width else starts


def _positions(sample: Sample, width: int) -> np.ndarray:
    starts = np.array(_starts(sample, width), np.int64)
    return np.arange(width, dtype=np.int64) - np.repeat(starts, np.diff(starts, append=width))


def _edges(samples: Sequence[Sample], width: int) -> list[int]:
    edges = [number * width + start for number, sample in enumerate(samples) for start in _starts(sample, width)]
    return [*edges, len(samples) * width]


def _slice(array: np.ndarray, rank: int, size: int) -> np.ndarray:
    parts = np.split(array, 2 * size, axis=1)
    return np.concatenate([parts[rank], parts[2 * size - 1 - rank]], axis=1)
