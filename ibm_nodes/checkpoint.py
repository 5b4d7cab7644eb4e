"""Checkpoints of a loader: one small object a rank, written without a word to the other ranks."""

import io
import math
import re
import threading
import weakref
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import torch
from torchdata.nodes import Loader

from ibm_nodes.sharder import Sharder
from ibm_nodes.state import merge
from ibm_nodes.storage import Object, Options, find, read, write

VERSION = 1
NAME = re.compile(r"step-(\d+)/loader-(\d+)-of-(\d+)\.pt")


class Checkpoint(NamedTuple):
    """What was loaded.

    Attributes:
        step: the trainer's step, as it was given to ``save``.
        position: samples of the global stream that were handed out, on all ranks together.
        world_size: number of data-parallel ranks that saved.
    """

    step: int
    position: int
    world_size: int


_in_flight: "weakref.WeakKeyDictionary[Loader[Any], Future[None]]" = weakref.WeakKeyDictionary()


def save(loader: Loader[Any], url: str, *, step: int, storage_options: Options = None) -> "Future[None]":
    """Saves the loader's state after the last batch handed out, and returns at once.

    The state is taken here; it is written in the background, as one object of this rank. No rank waits for another.
    A save waits for the one before it; an error of that one is raised here, or by ``result()`` of its future.

    Args:
        loader: a loader with a ``Sharder`` in its graph.
        url: where the checkpoints of this run go, at any store that fsspec knows.
        step: the trainer's step, the same on all ranks.
        storage_options: fsspec's options for the store.

    Raises:
        ValueError: if step is negative or there is no Sharder.
        OSError: if the save before this one could not be written.
    """
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    rank, world_size = _rank(loader)
    content = {"version": VERSION, "step": step, "rank": rank, "world_size": world_size, "state": loader.state_dict()}
    if before := _in_flight.pop(loader, None):
        before.result()
    target = f"{url.rstrip('/')}/step-{step:08}/loader-{rank:05}-of-{world_size:05}.pt"
    future: Future[None] = Future()
    _in_flight[loader] = future
    threading.Thread(target=_write, args=(future, target, content, storage_options), name="ibm_nodes-save").start()
    return future


def latest(url: str, *, storage_options: Options = None) -> int | None:
    """Gives the newest step of which every rank's file is there, or None."""
    complete = [step for step, files in _steps(url, storage_options).items() if _missing(files) == []]
    return max(complete, default=None)


def load(
    loader: Loader[Any],
    url: str,
    *,
    step: int | None = None,
    missing: Literal["error", "start"] = "error",
    storage_options: Options = None,
) -> Checkpoint | None:
    """Sets the loader to a saved step, at whatever world size it was saved, and says what was loaded.

    Reads only the files that hold logical shards of this rank.

    Args:
        loader: a loader built with the settings of the one that was saved; rank and world size may differ.
        url: where the checkpoints are.
        step: which one; the newest complete one if None.
        missing: "start" leaves the loader at its beginning and returns None if there is no checkpoint at all.
        storage_options: fsspec's options for the store.

    Raises:
        FileNotFoundError: if there is no complete checkpoint, or not of that step; says which files are missing.
        ValueError: if a file is damaged or of a newer version, the files are not of one step, or the settings differ.
    """
    steps = _steps(url, storage_options)
    if not steps and missing == "start":
        return None
    complete = [number for number, files in steps.items() if not _missing(files)]
    chosen = max(complete, default=None) if step is None else step
    if chosen not in complete:
        lacking = "; ".join(
            f"step {n} lacks {', '.join(_missing(files)[:4])}" for n, files in sorted(steps.items()) if _missing(files)
        )
        wanted = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        found = f"complete are {sorted(complete)}" if complete else "none is complete"
        raise FileNotFoundError(f"{wanted} under {url}: {found}{f'; {lacking}' if lacking else ''}")
    assert chosen is not None
    rank, world_size = _rank(loader)
    files = steps[chosen]
    saved_size = max(size for _, size in files)
    stride = math.gcd(saved_size, world_size)
    contents = [_read(files[old, saved_size], storage_options) for old in range(rank % stride, saved_size, stride)]
    state = merge(content["state"] for content in contents)
    loader.load_state_dict(state)
    return Checkpoint(chosen, state[Sharder.POSITION_KEY], saved_size)


def _rank(loader: Loader[Any]) -> tuple[int, int]:
    node: Any = loader.root
    while node is not None:
        if isinstance(node, Sharder):
            return node.rank, node.world_size
        node = getattr(node, "source", None)
    raise ValueError("loader must have a Sharder in its graph to be saved by rank: use state_dict() for others")


def _write(future: "Future[None]", url: str, content: dict[str, Any], storage_options: Options) -> None:
    try:
        file = io.BytesIO()
        torch.save(content, file)
        write(url, file.getvalue(), storage_options)
    except BaseException as error:  # raised to who asks for the result, or at the next save
        future.set_exception(error)
    else:
        future.set_result(None)


def _steps(url: str, storage_options: Options) -> dict[int, dict[tuple[int, int], Object]]:
    steps: dict[int, dict[tuple[int, int], Object]] = {}
    for item in find(url, storage_options):
        if match := NAME.fullmatch(item.key):
            step, rank, world_size = map(int, match.groups())
            steps.setdefault(step, {})[rank, world_size] = item
    return steps


def _missing(files: dict[tuple[int, int], Object]) -> list[str]:
    """Gives the files that a step lacks; one that was saved at two world sizes lacks a single answer."""
    sizes = {size for _, size in files}
    if len(sizes) > 1:
        return [f"agreement: it was saved at world sizes {sorted(sizes)}"]
    (size,) = sizes
    return [f"loader-{rank:05}-of-{size:05}.pt" for rank in range(size) if (rank, size) not in files]


def _read(item: Object, storage_options: Options) -> dict[str, Any]:
    data = read(item, 0, item.size, storage_options)
    try:
        content: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    except (RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{item.url} is damaged ({error}): load an older step") from error
    if content["version"] > VERSION:
        raise ValueError(
            f"{item.url} was written by a newer ibm_nodes (version {content['version']}, this one reads {VERSION})"
        )
    return content
