"""What a training run says of itself: a line to read, and a line of JSON."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ibm_nodes import Loader, Sample, stats

IDS_KEY = "dataset_ids"


class DatasetTagger:
    """Adds ``dataset_ids`` [batch, seq_len] to what a collator makes of samples: of which dataset each token is, or -1.

    Args:
        collate: the collator; a batch that has them already is left as it is.

    Attributes:
        names: of the datasets met so far; an id is a place in it.
    """

    def __init__(self, collate: Callable[[list[Sample]], dict[str, Any]]) -> None:
        self.collate = collate
        self.names: list[str] = []

    def __call__(self, samples: list[Sample]) -> dict[str, Any]:
        """Collates samples."""
        batch = self.collate(samples)
        if not isinstance(samples[0], Sample) or IDS_KEY in batch:
            return batch
        ids = np.full(batch["input_ids"].shape, -1, np.int64)
        for row, sample in zip(ids, samples, strict=True):
            for start, place in zip(sample.starts, sample.documents, strict=False):  # filler is of no document
                row[start:] = self._number(place[0])
        return {**batch, IDS_KEY: torch.from_numpy(ids)}

    def _number(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)


def tag_datasets(loader: Loader[Any]) -> DatasetTagger | None:
    """Puts a ``DatasetTagger`` around the loader's collator, before its first batch; None if it has no collator."""
    node: Any = loader.root
    while node is not None:
        if callable(collate := getattr(node, "collate", None)):
            node.collate = DatasetTagger(collate)
            tagger: DatasetTagger = node.collate
            return tagger
        node = getattr(node, "source", None)
    return None


class TrainLog:
    """Collects what is to be said of the steps since the last line.

    Losses stay on the device until a line is due. All ranks must ask for a record together.

    Args:
        loader: of which the datasets' numbers are asked.
        names: of the datasets, by the numbers in batches.
        flops_per_token: gives the operations of forward and backward at a sequence length.
        peak_flops: of a device, or None where it is not known.
        group: a gloo group.
    """

    def __init__(
        self,
        loader: Loader[Any],
        names: Sequence[str],
        flops_per_token: Callable[[int], float],
        peak_flops: float | None,
        group: dist.ProcessGroup,
    ) -> None:
        self.loader, self.names = loader, names
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.group = group
        self._clear()

    def _clear(self) -> None:
        self.waited_seconds = self.flops = 0.0
        self.tokens = 0
        self._began = time.perf_counter()
        self._pending: list[torch.Tensor] = []

    def draw(self, batches: Iterator[dict[str, Any]]) -> dict[str, Any]:
        """Takes a batch."""
        began = time.perf_counter()
        batch = next(batches)
        self.waited_seconds += time.perf_counter() - began
        size, seq_len = batch["input_ids"].shape
        self.tokens += size * seq_len
        self.flops += size * seq_len * self.flops_per_token(seq_len)
        return batch

    def add(self, losses: torch.Tensor, ids: torch.Tensor | None) -> None:
        """Takes the losses of labels, and their datasets, both of the same shape; a label that is left out has -1."""
        if ids is None:
            return
        size = len(self.names) + 1
        sums = torch.zeros(size, 2, device=losses.device)
        ids = (ids.flatten() + 1).clamp(max=size - 1)
        sums.index_add_(0, ids, torch.stack([losses.detach().flatten(), torch.ones_like(losses).flatten()], 1))
        self._pending.append(sums)

    def record(self, step: int, loss: float, rate: float, norm: float) -> dict[str, Any]:
        """Gives what is to be said after a step, the same on all ranks, and begins anew."""
        seconds = time.perf_counter() - self._began
        found = stats(self.loader)["datasets"]
        totals = torch.zeros(len(self.names) + 1, 2, dtype=torch.float64)
        for sums in self._pending:
            totals[: len(sums)] += sums.cpu()
        losses = {name: totals[place + 1].tolist() for place, name in enumerate(self.names)}
        mine: dict[str, Any] = {"tokens": self.tokens, "flops": self.flops, "waited": self.waited_seconds}
        mine |= {"datasets": found, "losses": losses}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self.group)
        peak = None if self.peak_flops is None else self.peak_flops * len(everyone)
        self._clear()
        return {
            "step": step,
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
            "seconds": seconds,
            "tokens_per_second": sum(entry["tokens"] for entry in everyone) / seconds,
            "mfu": None if peak is None else sum(entry["flops"] for entry in everyone) / seconds / peak,
            "waited_share": max(entry["waited"] for entry in everyone) / seconds,
            "datasets": merge_datasets(everyone),
        }


def merge_datasets(everyone: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Gives tokens, share, passes and loss of each dataset from what each rank found of its part."""
    merged: dict[str, dict[str, Any]] = {}
    names = sorted({name for entry in everyone for name in (*entry["datasets"], *entry["losses"])})
    parts = {name: [entry["datasets"].get(name, {}) for entry in everyone] for name in names}
    drawn = sum(part.get("tokens", 0) for found in parts.values() for part in found) or 1
    for name in names:
        tokens = sum(part.get("tokens", 0) for part in parts[name])
        loss, count = (sum(entry["losses"].get(name, (0, 0))[place] for entry in everyone) for place in (0, 1))
        merged[name] = {
            "tokens": tokens,
            "share": tokens / drawn,
            "passes": sum(part.get("passes", 0) for part in parts[name]) / len(everyone),
            "loss": loss / count if count else None,
        }
    return merged


def line(record: Mapping[str, Any]) -> str:
    """Writes a record for people."""
    parts = [f"step {record['step']}"]
    if "loss" in record:
        datasets = (
            f"{name} {entry['share']:.1%}" + ("" if entry["loss"] is None else f" loss {entry['loss']:.4f}")
            for name, entry in record["datasets"].items()
        )
        speed = f"{record['tokens_per_second']:,.0f} tokens/s"
        mfu = [] if record["mfu"] is None else [f"MFU {record['mfu']:.1%}"]
        parts += [f"loss {record['loss']:.4f}", speed, *mfu, f"waited for data {record['waited_share']:.1%}", *datasets]
    if "validation_loss" in record:
        parts.append(f"validation loss {record['validation_loss']:.4f}")
    return "  ".join(parts)


def append(path: str, record: Mapping[str, Any]) -> None:
    """Writes a record as a line of JSON at the end of a file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
