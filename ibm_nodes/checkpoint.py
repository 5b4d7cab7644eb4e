"""Checkpoints of a loader: one small object a rank, written without a word to the other ranks."""

import logging
import math
import os
import re
import threading
import time
import weakref
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Literal, NamedTuple

from ibm_nodes import saved_listings
from ibm_nodes.archive import decode, encode, pack, unpack
from ibm_nodes.loader import Loader
from ibm_nodes.node import render
from ibm_nodes.settings import check_graph, derive_lineage, describe, differences, find_sharder
from ibm_nodes.sharder import Sharder
from ibm_nodes.state import SHARDS_KEY, merge
from ibm_nodes.stateful import Stateful
from ibm_nodes.storage import Object, Options, Url, delete, find, read, write

__all__ = ["Checkpoint", "Saved", "Stateful", "choose", "latest", "load", "save"]

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 4
START_SECONDS = 0.002
NAME = re.compile(r"step-(\d+)/loader-([0-9a-f]{12})-(\d+)-of-(\d+)\.pt")


class Checkpoint(NamedTuple):
    """What was loaded.

    Attributes:
        step: the trainer's step, as it was given to ``save``.
        position: samples of the global stream that were handed out, on all ranks together, or left out.
        global_batch_size: samples in a step of all ranks, when it was saved; None without a Batcher.
        world_size: number of data-parallel ranks that saved.
        lineage: names the chain of starts and settings that led to it.
        changes: in words, which settings differ from those of the loader.
    """

    step: int
    position: int
    global_batch_size: int | None
    world_size: int
    lineage: str
    changes: list[str]


class Saved(NamedTuple):
    """The files of one attempt at one step; complete if there is one for each rank."""

    step: int
    lineage: str
    world_size: int
    files: dict[int, Object]

    @property
    def missing(self) -> list[str]:
        """The names of the files that are not there."""
        ranks = (rank for rank in range(self.world_size) if rank not in self.files)
        return [file_name(self.lineage, rank, self.world_size) for rank in ranks]


class _Saving(Future[None]):
    """A save that is being written, and where to."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target


_listings_claimed: "weakref.WeakKeyDictionary[Loader[Any], set[str]]" = weakref.WeakKeyDictionary()
_in_flight: "weakref.WeakKeyDictionary[Loader[Any], list[_Saving]]" = weakref.WeakKeyDictionary()


def save(
    loader: Loader[Any], url: Url, *, step: int, keep: int | None = None, storage_options: Options = None
) -> "Future[None]":
    """Saves the loader's state after the last batch handed out, and returns at once.

    Beside the steps, under ``listings/``, the keys and sizes of the datasets' files are kept, each listing by one of
    the ranks, so that it can be told later which of them have changed. They are never deleted.

    A snapshot is taken here; plain data is made of it and written in the background, as one object of this rank. No
    rank waits for another. Up to four saves are written side by side; one more waits for the oldest, and none is
    skipped. An error of one before is raised here, by the next call after it, or by ``result()`` of its future.

    Args:
        loader: a loader with a ``Sharder`` in its graph.
        url: where the checkpoints of this run go, at any store that fsspec knows.
        step: the trainer's step, the same on all ranks.
        keep: complete steps to keep; older ones are deleted in the background, each rank its part. None keeps all.
        storage_options: fsspec's options for the store.

    Raises:
        ValueError: if step is negative, keep is below 1, or there is no Sharder.
        OSError: if a save before this one could not be written.
    """
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1 or None, got {keep}")
    sharder, taken, settings = find_sharder(loader), loader.snapshot(), describe(loader)
    lineage = derive_lineage(loader.origin, settings)
    content = {
        "step": step,
        "lineage": lineage,
        "rank": sharder.rank,
        "world_size": sharder.world_size,
        "settings": settings,
        "saved_at": time.time(),
    }
    before = _in_flight.setdefault(loader, [])
    while before and (before[0].done() or len(before) == MAX_IN_FLIGHT):
        before.pop(0).result()
    root = os.fspath(url).rstrip("/")
    target = f"{root}/step-{step:08}/{file_name(lineage, sharder.rank, sharder.world_size)}"
    future = _Saving(target)
    claimed = _listings_claimed.setdefault(loader, set())
    listings = saved_listings.claim(root, sharder, claimed)
    same_file = [other for other in before if other.target == target]
    before.append(future)

    def work() -> None:
        time.sleep(START_SECONDS)  # the caller waits until this thread runs, and is to have Python's lock back at once
        try:
            wait(same_file)
            state = render(taken)
            shards = {shard: pack(own) for shard, own in state[SHARDS_KEY].items()}
            saved_listings.write_claimed(listings, claimed, storage_options)
            write(target, encode({**content, "state": {**state, SHARDS_KEY: shards}}), storage_options)
            if keep is not None:
                _delete_old(root, keep, step, sharder.rank, sharder.world_size, storage_options)
        except BaseException as error:  # raised to who asks for the result, or at the next save
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=work, name="ibm_nodes-save").start()
    return future


def latest(url: Url, *, storage_options: Options = None) -> int | None:
    """Gives the newest step of which every rank's file is there, or None."""
    return max((saved.step for saved in list_saved(url, storage_options) if not saved.missing), default=None)


def load(
    loader: Loader[Any],
    url: Url,
    *,
    step: "int | Saved | None" = None,
    missing: Literal["error", "start"] = "error",
    storage_options: Options = None,
) -> Checkpoint | None:
    """Sets the loader to a saved step, at whatever world size it was saved, and says what was loaded.

    Reads only the files that hold logical shards of this rank. What may change between two starts and has changed
    (weights, datasets, batch size, prefetch) is logged; what shapes the order must be as it was.

    Args:
        loader: a loader built with the settings of the one that was saved; rank and world size may differ.
        url: where the checkpoints are.
        step: which one, by its number or as ``choose`` gave it; the newest complete one if None.
        missing: "start" leaves the loader at its beginning and returns None if there is no checkpoint at all.
        storage_options: fsspec's options for the store.

    Raises:
        FileNotFoundError: if there is no complete checkpoint, or not of that step; says which files are missing.
        ValueError: if a file is damaged or of a newer version, the files are not of one step, or the settings
            differ; says which older step is complete.
    """
    chosen = (
        step if isinstance(step, Saved) else choose(url, step=step, missing=missing, storage_options=storage_options)
    )
    if chosen is None:
        return None
    sharder = find_sharder(loader)
    sharder.saved_listings = partial(saved_listings.read, os.fspath(url), storage_options=storage_options)
    stride = math.gcd(chosen.world_size, sharder.world_size)
    try:
        files = [chosen.files[rank] for rank in range(sharder.rank % stride, chosen.world_size, stride)]
        contents = [read_saved(item, storage_options) for item in files]
        state = _merge(contents, files, chosen)
        check_graph(sharder, state)
    except ValueError as error:
        found = list_saved(url, storage_options)
        older = sorted({saved.step for saved in found if saved.step < chosen.step and not saved.missing})
        error.add_note(f"older complete steps: {older}" if older else "there is no older complete step")
        raise
    loader.load_state_dict(state)
    position, settings = state[Sharder.POSITION_KEY], contents[0]["settings"]
    loader.origin = (chosen.lineage, position)
    changes = differences(settings, describe(loader))
    logger.info("loaded step %d at sample %d from %s", chosen.step, position, url)
    for change in changes:
        logger.info("since it was saved, %s", change)
    batch = settings.get("global_batch_size")
    return Checkpoint(chosen.step, position, batch, chosen.world_size, chosen.lineage, changes)


def choose(
    url: Url,
    *,
    step: int | None = None,
    missing: Literal["error", "start"] = "error",
    storage_options: Options = None,
) -> Saved | None:
    """Chooses what ``load`` would load, with one listing: plain data that one rank may share with all others.

    Args:
        url: where the checkpoints are.
        step: which one; the newest complete one if None.
        missing: "start" gives None if there is no checkpoint at all.
        storage_options: fsspec's options for the store.

    Raises:
        FileNotFoundError: if there is no complete checkpoint, or not of that step; says which files are missing.
        ValueError: if two attempts at the step are complete, and a file that would tell the later one is damaged.
    """
    found = list_saved(url, storage_options)
    if not found and missing == "start":
        return None
    complete = [saved for saved in found if not saved.missing]
    wanted = max((saved.step for saved in complete), default=None) if step is None else step
    candidates = [saved for saved in complete if saved.step == wanted]
    if not candidates:
        what = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        there = sorted({saved.step for saved in complete})
        lacking = [f"step {saved.step} lacks {', '.join(saved.missing[:4])}" for saved in found if saved.missing]
        raise FileNotFoundError(
            "; ".join(
                [f"{what} under {url}: {f'complete are {there}' if there else 'none is complete'}", *lacking[-4:]]
            )
        )
    if len(candidates) == 1:
        return candidates[0]
    return max(candidates, key=lambda saved: read_saved(saved.files[0], storage_options)["saved_at"])


def file_name(lineage: str, rank: int, world_size: int) -> str:
    """Gives the name of a rank's file. The lineage in it keeps two attempts at the same step apart."""
    return f"loader-{lineage}-{rank:05}-of-{world_size:05}.pt"


def list_saved(url: Url, storage_options: Options = None) -> list[Saved]:
    """Lists what is saved under a URL, by step; incomplete attempts too."""
    found: dict[tuple[int, str, int], dict[int, Object]] = {}
    for item in find(os.fspath(url), storage_options):
        if match := NAME.fullmatch(item.key):
            step, lineage, rank, world_size = match.groups()
            found.setdefault((int(step), lineage, int(world_size)), {})[int(rank)] = item
    return [Saved(*key, files) for key, files in sorted(found.items())]


def read_saved(item: Object, storage_options: Options = None) -> dict[str, Any]:
    """Reads a rank's file.

    Raises:
        ValueError: if it is damaged, foreign, or of a newer version.
    """
    content = decode(read(item, 0, item.size, storage_options), item.url)
    shards = content["state"][SHARDS_KEY]
    content["state"] = {**content["state"], SHARDS_KEY: {shard: unpack(packed) for shard, packed in shards.items()}}
    return content


def _merge(contents: list[dict[str, Any]], files: list[Object], chosen: Saved) -> dict[str, Any]:
    for item, content in zip(files, contents, strict=True):
        inside = file_name(content["lineage"], content["rank"], content["world_size"])
        if content["step"] != chosen.step or not item.url.endswith(inside):
            raise ValueError(f"{item.url} holds step {content['step']} of {inside}: it was moved or renamed")
    return merge(content["state"] for content in contents)


def _delete_old(url: str, keep: int, step: int, rank: int, world_size: int, storage_options: Options) -> None:
    found = list_saved(url, storage_options)
    # Later steps are of an attempt that was given up; they neither count nor go.
    complete = sorted({saved.step for saved in found if not saved.missing and saved.step <= step})
    if len(complete) < keep:
        return
    for saved in found:
        if saved.step < complete[-keep]:
            mine = [item.url for of, item in saved.files.items() if of % world_size == rank]
            delete(mine, storage_options)
