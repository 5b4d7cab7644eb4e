"""A trainer: batches of a loader, a model that FSDP shards, AdamW, saves and a log."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer

from ibm_nodes import Loader
from ibm_nodes.recipes import train_log
from ibm_nodes.recipes.cluster import Cluster, current_cluster
from ibm_nodes.recipes.distributed import data_parallel
from ibm_nodes.recipes.fsdp_ethernet import BlockClass, data_mesh, fsdp_ethernet
from ibm_nodes.recipes.saves import Saves
from ibm_nodes.recipes.train_step import Objective, evaluate, inputs_of, train_step

BETAS = (0.9, 0.95)

MakeLoader = Callable[[int, int], Loader[Any]]
"""Gives the loader of a data-parallel (rank, world size)."""


def train(
    make_loader: MakeLoader,
    model: nn.Module,
    block_class: BlockClass,
    *,
    steps: int,
    learning_rate: float = 3e-4,
    warmup_steps: int = 100,
    final_share: float = 0.1,
    weight_decay: float = 0.1,
    max_norm: float = 1.0,
    checkpoint: str | None = None,
    save_every: int | None = None,
    keep: int | None = None,
    eval_every: int | None = None,
    log_every: int = 10,
    log_file: str | None = None,
    global_batch_size: int | None = None,
    cluster: Cluster | None = None,
    sharding: Mapping[str, Any] | None = None,
    make_validation: MakeLoader | None = None,
    storage_options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Trains a model on a loader's batches, and gives the number of the last step that is done.

    The loss of a step is the sum over all labels that count, divided by their number, in the whole global batch; so it
    depends neither on the number of ranks nor on the size of micro-batches. Batches are ``input_ids`` and ``labels`` of
    [batch, seq_len]; what else of them the model's forward names is handed to it. It gives logits, or an object that
    has them, of all positions or of the last ones.

    Args:
        make_loader: gives the loader of a rank.
        model: weights in 32 bits, equal on all ranks.
        block_class: what an FSDP unit is made of, by its class or the name of it.
        steps: optimizer steps from the very first; a run that goes on from a checkpoint does the rest of them.
        learning_rate: of AdamW, after the warm-up.
        warmup_steps: in which it rises from zero.
        final_share: of the learning rate, to which it falls at the last step, along a cosine.
        weight_decay: of AdamW, for all weights.
        max_norm: to which the gradient's norm is clipped.
        checkpoint: where steps are saved, and the newest is loaded from: a directory that all nodes see, or a URL.
        save_every: save every so many steps; the last one is saved in any case.
        keep: steps to keep there; None keeps all.
        eval_every: evaluate every so many steps, on the recipe "validation".
        log_every: write a line every so many steps.
        log_file: rank 0 adds the lines to this file too, as JSON.
        global_batch_size: samples of a step on all ranks; None takes a step to be one batch of each.
        cluster: nodes and devices; None takes those of this job.
        sharding: arguments of ``fsdp_ethernet``.
        make_validation: gives a finite loader of a rank, with equally many batches on all ranks.
        storage_options: fsspec's options for the store of the checkpoints.
        say: is given each line, on rank 0.
        stopped: tells whether to save and leave after the present step; the word of one rank is enough.

    Raises:
        ValueError: if something is out of range, or does not divide or fit.
        OSError: if something cannot be read or saved.
    """
    _check(
        steps=steps, log_every=log_every, save_every=save_every, eval_every=eval_every, warmup_steps=warmup_steps + 1
    )
    _check_needs(save_every, checkpoint, eval_every, make_validation)
    cluster, sharding = cluster or current_cluster(), dict(sharding or {})
    num_params = sum(parameter.numel() for parameter in model.parameters())
    flops = getattr(model, "flops_per_token", lambda seq_len: 6.0 * num_params)
    inputs = inputs_of(model)
    mesh = data_mesh(cluster, sharding.get("strategy", "auto"), num_params)
    place = data_parallel(None, None, mesh)
    loader = make_loader(*place)
    with loader:
        rows = _rows(loader)
        micro_steps = _micro_steps(rows, global_batch_size, place[1])
        tagger = train_log.tag_datasets(loader)
        model = fsdp_ethernet(model, block_class, cluster=cluster, mesh=mesh, **sharding)
        cuda = cluster.device_type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        optimizer = AdamW(model.parameters(), learning_rate, BETAS, weight_decay=weight_decay, fused=cuda)
        shifted = bool(getattr(tagger and tagger.collate, "shift_labels", False))
        objective = Objective(model, inputs=inputs, shifted=shifted, device=device)
        control = dist.new_group(backend="gloo")
        log = train_log.TrainLog(loader, tagger.names if tagger else [], flops, cluster.peak_flops, control)
        saves, done = None, 0
        if checkpoint is not None:
            saves = Saves(checkpoint, model, optimizer, loader, keep=keep, storage_options=storage_options)
            done = saves.load()
        batches, stop = iter(loader), False
        while done < steps and not stop:
            asked, stopping = _ask(stopped(), control)
            rate = _set_rate(optimizer, learning_rate * schedule(done + 1, steps, warmup_steps, final_share))
            found = train_step(objective, optimizer, batches, micro_steps=micro_steps, max_norm=max_norm, log=log)
            asked.wait()
            done, stop = done + 1, bool(stopping.item())
            if saves and _is_due(done, save_every):
                saves.save(done)
            record: dict[str, Any] = {}
            if _is_due(done, log_every) or done == steps or stop:
                record = log.record(done, found.loss.item(), rate, found.norm.item())
            if make_validation and _is_due(done, eval_every):
                with make_validation(*place) as validation:
                    record |= {"step": done, "validation_loss": evaluate(objective, validation, rows).item()}
            _report(record, say, log_file)
        if saves:
            saves.save(done)
            saves.wait()
    return done


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _set_rate(optimizer: Optimizer, rate: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def _report(record: Mapping[str, Any], say: Callable[[str], None], log_file: str | None) -> None:
    if record and dist.get_rank() == 0:
        say(train_log.line(record))
        if log_file is not None:
            train_log.append(log_file, record)


def schedule(step: int, steps: int, warmup_steps: int, final_share: float) -> float:
    """Gives the share of the learning rate at a step, from 1 on: a rise from zero, then half a cosine to the last."""
    if step <= warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return final_share + (1 - final_share) * (1 + math.cos(math.pi * progress)) / 2


def _ask(wants: bool, group: dist.ProcessGroup) -> tuple[dist.Work, torch.Tensor]:
    """Begins to ask all ranks whether one of them wants to stop, beside the step: no rank waits for its device."""
    answer = torch.tensor([wants], dtype=torch.int32)
    work = dist.all_reduce(answer, dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None
    return work, answer


def _rows(loader: Loader[Any]) -> int | None:
    """Gives how many samples are in a batch of a rank, if one of the loader's nodes knows."""
    node: Any = loader.root
    while node is not None and not hasattr(node, "batch_size"):
        node = getattr(node, "source", None)
    return None if node is None else int(node.batch_size)


def _micro_steps(rows: int | None, global_batch_size: int | None, world_size: int) -> int:
    """Gives how many batches of a rank make a step."""
    if rows is None or global_batch_size is None:
        return 1
    if global_batch_size % (rows * world_size):
        raise ValueError(
            f"global_batch_size must be a multiple of {rows} samples x {world_size} ranks = {rows * world_size}, "
            f"got {global_batch_size}"
        )
    return global_batch_size // (rows * world_size)


def _check(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def _check_needs(save_every: int | None, checkpoint: str | None, eval_every: int | None, validation: object) -> None:
    if save_every and checkpoint is None:
        raise ValueError("save_every must come with checkpoint: there is no place to save to")
    if eval_every and validation is None:
        raise ValueError("eval_every must come with a recipe 'validation', and none is installed")
