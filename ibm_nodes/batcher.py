"""Batcher and the collators: samples to a dict of tensors."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torchdata.nodes import BaseNode

from ibm_nodes.items import Sample
from ibm_nodes.node import Node, Snapshot, snapshot
from ibm_nodes.state import State

T = TypeVar("T")

IGNORE_INDEX = -100
"""The label that PyTorch's cross entropy leaves out."""


class Batcher(Node[Any], Generic[T]):
    """Yields lists of ``batch_size`` items of the source, or what ``collate`` makes of them.

    Its state is the source's, after the last batch that was handed out. A batch that an error interrupted is kept and
    completed by the next call; until then there is a state only if one was taken after the last batch, as a Prefetcher
    does.

    Args:
        source: node of samples.
        batch_size: items in a batch, on this rank.
        collate: function of a list of items, such as a ``CausalLMCollator``.
        drop_last: leave out a last batch that is smaller.

    Raises:
        ValueError: if batch_size is below 1.
    """

    def __init__(
        self,
        source: BaseNode[T],
        *,
        batch_size: int,
        collate: Callable[[list[T]], Any] | None = None,
        drop_last: bool = True,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.source = source
        self.batch_size = batch_size
        self.collate = collate
        self.drop_last = drop_last

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self._batch: list[T] = []
        self._snapshot: Snapshot | None = None
        self.source.reset(initial_state)

    def next(self) -> Any:
        batch = self._batch
        while len(batch) < self.batch_size:
            try:
                batch.append(next(self.source))
            except StopIteration:
                if self.drop_last or not batch:
                    raise
                break
        item = batch if self.collate is None else self._collate(batch)
        self._batch, self._snapshot = [], None
        return item

    def snapshot(self) -> Snapshot:
        if self._snapshot is None:
            if self._batch:
                raise RuntimeError(
                    f"an error left {len(self._batch)} of {self.batch_size} items of a batch, which no state can hold: "
                    "call next() again before saving, or put a Prefetcher above, which keeps the last batch's state"
                )
            self._snapshot = snapshot(self.source)
        return self._snapshot

    def _collate(self, batch: list[T]) -> Any:
        assert self.collate is not None
        try:
            return self.collate(batch)
        except StopIteration as error:
            raise RuntimeError(
                "collate raised StopIteration, which would have ended the data without a word"
            ) from error


class CausalLMCollator:
    """Makes ``{"input_ids", "labels"}`` for training a causal language model, both int64 of shape [batch, seq_len].

    Args:
        shift_labels: False: labels are the input ids, for models that shift inside (Hugging Face's do, and need this).
            True: the label of each position is the next token, and that of the last one -100, for models that compare
            their output with the labels position by position.
        pad_id: id that fills a sample which is shorter than the longest of its batch, as the last one of finite data
            may be; its label is -100.
        pad_to_multiple_of: make samples as long as the next multiple of this.
        mark_filler: add ``"is_filler"``, bool of shape [batch]. The labels of filler are -100 in any case.
    """

    def __init__(
        self, *, shift_labels: bool, pad_id: int = 0, pad_to_multiple_of: int = 1, mark_filler: bool = False
    ) -> None:
        self.shift_labels = shift_labels
        self.pad_id = pad_id
        self.pad_to_multiple_of = pad_to_multiple_of
        self.mark_filler = mark_filler

    def __call__(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        """Collates samples."""
        lengths = [len(sample.tokens) for sample in samples]
        width = -(-max(lengths) // self.pad_to_multiple_of) * self.pad_to_multiple_of
        ids = np.empty((len(samples), width), np.int64)
        for row, sample, length in zip(ids, samples, lengths, strict=True):
            row[:length] = sample.tokens
            row[length:] = self.pad_id
        if self.shift_labels:
            labels = np.empty_like(ids)
            labels[:, :-1] = ids[:, 1:]
            labels[:, -1] = IGNORE_INDEX
        else:
            labels = ids.copy()
        if min(lengths) < width:
            for label, length in zip(labels, lengths, strict=True):
                label[length - self.shift_labels :] = IGNORE_INDEX
        is_filler = np.array([sample.is_filler for sample in samples])
        labels[is_filler] = IGNORE_INDEX
        # numpy throughout: torch would wake threads of its own to copy, and take cores from the trainer.
        batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        return {**batch, "is_filler": torch.from_numpy(is_filler)} if self.mark_filler else batch
