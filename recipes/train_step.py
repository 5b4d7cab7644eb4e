"""One step of training and one evaluation, with losses that no division of the batch changes."""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim import Optimizer

from ibm_nodes import Loader
from ibm_nodes.recipes.fsdp_ethernet import accumulate
from ibm_nodes.recipes.train_log import IDS_KEY, TrainLog

IGNORE_INDEX = -100


class Outcome(NamedTuple):
    """What a step came to, on the device: asking for a number waits for it.

    Attributes:
        loss: mean over the labels of the global batch.
        norm: of the gradient, before it was clipped.
    """

    loss: torch.Tensor
    norm: torch.Tensor


class Objective:
    """The losses of a model's predictions of the next token.

    Args:
        model: gives logits [batch, n, vocab_size], or an object that has them as ``logits``, of the last n positions.
        inputs: the entries of a batch that it takes by name, beside the first one, ``input_ids``.
        shifted: whether labels are the next tokens already.
        device: where batches go.
    """

    def __init__(self, model: nn.Module, *, inputs: Iterable[str], shifted: bool, device: torch.device) -> None:
        self.model, self.inputs, self.shifted, self.device = model, tuple(inputs), shifted, device

    def __call__(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Gives losses, labels and dataset numbers, each [batch, n]; where the label is -100, they are 0 and -1."""
        batch = {
            key: value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for key, value in batch.items()
        }
        output = self.model(batch["input_ids"], **{name: batch[name] for name in self.inputs if name in batch})
        logits: torch.Tensor = getattr(output, "logits", output)
        labels = batch["labels"] if self.shifted else _next(batch["labels"], IGNORE_INDEX)
        labels = labels[:, -logits.shape[1] :]
        losses = functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
        ).view(labels.shape)
        ids = batch.get(IDS_KEY)
        if ids is not None:
            ids = _next(ids, -1)[:, -logits.shape[1] :].masked_fill(labels == IGNORE_INDEX, -1)
        return losses, labels, ids


def train_step(
    objective: Objective,
    optimizer: Optimizer,
    batches: Iterator[dict[str, Any]],
    *,
    micro_steps: int,
    max_norm: float,
    log: TrainLog | None = None,
) -> Outcome:
    """Takes an optimizer step over the next batches of this rank.

    The gradient is that of the sum of all labels' losses divided by their number, both of the whole global batch; the
    number is known once all have been drawn, so gradients are divided at the end.

    Raises:
        StopIteration: if the batches have ended.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=objective.device)
    for micro_step in range(micro_steps):
        batch = next(batches) if log is None else log.draw(batches)
        with accumulate(objective.model, last=micro_step == micro_steps - 1):
            losses, labels, ids = objective(batch)
            losses.sum().backward()
        sums += torch.stack([losses.detach().sum(dtype=torch.float64), (labels != IGNORE_INDEX).sum()])
        if log is not None:
            log.add(losses, ids)
    dist.all_reduce(sums)
    total, count = sums[0], sums[1].clamp(min=1)
    _scale(objective.model, (dist.get_world_size() / count).float())  # FSDP has divided by the number of ranks
    norm = _clip(objective.model, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return Outcome(total / count, norm)


def evaluate(objective: Objective, loader: Loader[Any], rows: int | None = None) -> torch.Tensor:
    """Gives the mean loss over the labels of a finite loader, on all ranks; stops where the first of them ends.

    Args:
        objective: what was trained.
        loader: with batches of equal sizes on all ranks.
        rows: samples that the model is given at once, on a rank; None gives it whole batches.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=objective.device)
    objective.model.eval()
    with torch.no_grad():
        for batch in _together(loader, objective.device):
            for part in _split(batch, rows):
                losses, labels, _ = objective(part)
                sums += torch.stack([losses.sum(dtype=torch.float64), (labels != IGNORE_INDEX).sum()])
    objective.model.train()
    if isinstance(objective.model, FSDPModule):
        objective.model.reshard()  # FSDP2 has kept the root's weights whole for a backward
    dist.all_reduce(sums)
    return sums[0] / sums[1].clamp(min=1)


def inputs_of(model: nn.Module) -> list[str]:
    """Gives the entries of a batch that a model takes by name; ``labels`` are not for it."""
    return [name for name in inspect.signature(model.forward).parameters if name not in ("input_ids", "labels")]


def _next(values: torch.Tensor, last: int) -> torch.Tensor:
    """Moves each row one place to the left."""
    return torch.cat([values[:, 1:], torch.full_like(values[:, :1], last)], 1)


def _split(batch: dict[str, Any], rows: int | None) -> Iterator[dict[str, Any]]:
    """Yields parts of a batch of so many rows; what has another number of rows stays as it is."""
    size = len(batch["input_ids"])
    for begin in range(0, size, rows or size):
        yield {
            key: value[begin : begin + (rows or size)]
            if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == size
            else value
            for key, value in batch.items()
        }


def _together(loader: Loader[Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields batches as long as all ranks have one: a rank alone would wait in FSDP's gathers for ever."""
    for batch in _with_end(loader):
        lasts = torch.tensor([batch is not None], dtype=torch.int32, device=device)
        dist.all_reduce(lasts, dist.ReduceOp.MIN)
        if batch is None or not lasts.item():
            return
        yield batch


def _with_end(loader: Loader[Any]) -> Iterator[dict[str, Any] | None]:
    yield from loader
    yield None


def _scale(model: nn.Module, factor: torch.Tensor) -> None:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    gradients = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
    torch._foreach_mul_(gradients, factor)


def _clip(model: nn.Module, max_norm: float) -> torch.Tensor:
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
