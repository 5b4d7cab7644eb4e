"""Checkpoints of a training run: model, optimizer and loader together, in the background, for any world size."""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import fsspec
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from ibm_nodes import Loader
from ibm_nodes.checkpoint import Stateful, latest
from ibm_nodes.recipes.distributed import from_rank_zero, fsspec_options

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d+)/\.metadata$")
"""What DCP writes last: a step without it is none."""


class Saves:
    """Saves a run's steps under a URL, and goes on from the newest.

    One save is in flight at a time: the next one waits for it, and raises its error. DCP's collectives run on a gloo
    group of their own, beside those of the training. All ranks must make, call and close it together.

    Args:
        url: a directory that all nodes see, or a URL that fsspec knows.
        model: what ``fsdp_ethernet`` gave.
        optimizer: of its parameters.
        loader: a loader with a ``Sharder`` in its graph.
        keep: complete steps to keep; None keeps all.
        storage_options: fsspec's options for the store.

    Raises:
        ValueError: if keep is below 1, or the loader has no ``Sharder``.
        OSError: if nothing can be written there; better now than after a thousand steps.
    """

    def __init__(
        self,
        url: str,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Loader[Any],
        *,
        keep: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1 or None, got {keep}")
        self.url, self.keep, self.storage_options = url.rstrip("/"), keep, fsspec_options(storage_options)
        self._parts = {"app": _App(model, optimizer), "loader": Stateful(loader)}
        from_rank_zero(partial(_prove_writable, self.url, self.storage_options))
        self._group = dist.new_group(backend="gloo")
        self._in_flight: Future[Any] | None = None
        self._saved: int | None = None

    def save(self, step: int) -> None:
        """Takes the state, and writes it in the background.

        Raises:
            OSError: if the save before this one could not be written.
        """
        if self._saved == step:
            return
        self.wait()
        writer = FsspecWriter(self._place(step), sync_files=_is_local(self.url), thread_count=2, **self.storage_options)
        with _quiet():
            found = async_save(self._parts, storage_writer=writer, process_group=self._group)
        assert isinstance(found, Future)
        self._in_flight, self._saved = found, step

    def wait(self) -> None:
        """Waits until all is written, and lets go of old steps.

        Raises:
            OSError: if the last save could not be written.
        """
        if self._in_flight is None:
            return
        in_flight, self._in_flight = self._in_flight, None
        try:
            in_flight.result()
        except CheckpointException as error:  # which is no Exception
            raise OSError(f"step {self._saved} could not be saved under {self.url}: {_first(error)}") from error
        if self.keep is not None and dist.get_rank() == 0:
            self._delete_old(self.keep)

    def load(self) -> int:
        """Sets model, optimizer and loader to the newest complete step, and gives its number: 0 where there is none.

        Raises:
            ValueError: if what is saved does not fit the model, or the loader.
        """
        step = from_rank_zero(partial(_latest, self.url, self.storage_options))
        if step is None:
            return 0
        try:
            with _quiet():
                reader = FsspecReader(self._place(step), **self.storage_options)
                load(self._parts, storage_reader=reader, process_group=self._group)
        except CheckpointException as error:
            raise ValueError(f"step {step} under {self.url} does not fit this run: {_first(error)}") from error
        logger.info("loaded step %d from %s", step, self.url)
        self._saved = step
        return step

    def _place(self, step: int) -> str:
        return f"{self.url}/step-{step:08}"

    def _delete_old(self, keep: int) -> None:
        files, root = fsspec.url_to_fs(self.url, **self.storage_options)
        steps = _complete(files, root)
        for step in steps[:-keep]:
            folder = f"{root}/step-{step:08}"
            files.rm(f"{folder}/.metadata")  # first, so that no half of a step counts
            files.rm(folder, recursive=True)


class _App:
    """Model and optimizer as DCP wants them, whatever the engine and the number of ranks."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _prove_writable(url: str, storage_options: Mapping[str, Any]) -> None:
    latest(
        url, storage_options=storage_options
    )  # which says in words what is wrong with a store that cannot be reached
    files, root = fsspec.url_to_fs(url, **storage_options)
    files.makedirs(root, exist_ok=True)
    files.pipe_file(f"{root}/.proof", b"")
    files.rm_file(f"{root}/.proof")


def _latest(url: str, storage_options: Mapping[str, Any]) -> int | None:
    files, root = fsspec.url_to_fs(url, **storage_options)
    files.invalidate_cache()
    return max(_complete(files, root), default=None)


def _complete(files: fsspec.AbstractFileSystem, root: str) -> list[int]:
    """Gives the steps that are whole, ascending."""
    found = (NAME.search(path) for path in files.glob(f"{root}/step-*/.metadata"))
    return sorted(int(match[1]) for match in found if match)


def _is_local(url: str) -> bool:
    return "://" not in url or url.startswith("file:")


def _first(error: CheckpointException) -> str:
    """Gives the fault of the first rank that had one, in a line."""
    rank, (fault, _) = min(error.failures.items(), key=lambda entry: entry[0])
    return f"{' '.join(str(fault).split()) or type(fault).__name__} (rank {rank})"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out what FSDP1 says of an only rank, and DCP of itself, in a healthy run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        warnings.filterwarnings("ignore", "When using ``NO_SHARD``")
        yield
