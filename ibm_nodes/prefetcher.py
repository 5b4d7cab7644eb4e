"""Prefetcher: a background thread that runs ahead of its consumer."""

import contextlib
import logging
import queue
import threading
import time
import weakref
from collections import deque
from typing import Any, TypeVar

import torch
from torchdata.nodes import BaseNode

from ibm_nodes.node import Node, Snapshot, as_snapshot, render, snapshot
from ibm_nodes.read_ahead import Interrupted, stop_waiting_when
from ibm_nodes.state import State

T = TypeVar("T")

logger = logging.getLogger(__name__)

JOIN_SECONDS = 2.0


class Prefetcher(Node[T]):
    """Yields the source's items, drawn ahead of time by one background thread.

    Each item comes with a snapshot of the state after it, so that the state is always that of the last item handed
    out, however far the thread has run ahead. An error of the source is raised in its place; the next call goes on
    where it failed. The thread starts with the first item and ends when the node is closed, reset, garbage-collected,
    or the program ends.

    Args:
        source: any node.
        prefetch_factor: how many items may wait.
        pin_memory: put tensors into page-locked memory, for copies to the GPU that do not block; None does so where
            CUDA is available. Dicts, lists and tuples are searched for tensors; anything else is passed through.

    Attributes:
        waited_seconds: how long the consumer has waited for items since the node was built.

    Raises:
        ValueError: if prefetch_factor is below 1.
    """

    def __init__(self, source: BaseNode[T], *, prefetch_factor: int, pin_memory: bool | None = False) -> None:
        super().__init__()
        if prefetch_factor < 1:
            raise ValueError(f"prefetch_factor must be at least 1, got {prefetch_factor}")
        self.source = source
        self.prefetch_factor = prefetch_factor
        self.pin_memory = pin_memory
        self.waited_seconds = 0.0
        self._worker: _Worker | None = None
        self._leaving: _Worker | None = None
        self._taken: Snapshot | None = None
        self._ended = self._stale = False

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self.close()
        before = self._taken
        self._taken, self._stale = as_snapshot(initial_state), True
        try:
            self._settle()
        except BaseException:
            if before is not None:
                self._taken = before  # where it stood, and where the next call goes on
            raise
        self._taken, self._ended = None, False

    def next(self) -> T:
        if self._ended:
            raise StopIteration
        if self._worker is None:
            self._settle()
            self._taken = self.snapshot()
            pin = (
                torch.cuda.is_available() if self.pin_memory is None else self.pin_memory and torch.cuda.is_available()
            )
            self._worker = _Worker(self.source, self.prefetch_factor, pin)
            # Stops the thread when this node is collected; the thread itself must not refer to the node.
            self._finalizer = weakref.finalize(self, self._worker.stop)
        worker = self._worker  # another thread may close the node in the meantime
        item: T
        if worker.is_ready():
            item, taken, error = worker.get()
        else:
            began = time.perf_counter()
            item, taken, error = worker.get()
            self.waited_seconds += time.perf_counter() - began
        if error is None:
            worker.spent.append(self._taken)
            self._taken = taken
            return item
        if worker is self._worker:
            self._end()
        if isinstance(error, StopIteration):
            self._ended = True
            self._taken = taken
            raise StopIteration
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def snapshot(self) -> Snapshot:
        if self._taken is None:
            self._taken = snapshot(self.source)
        return self._taken

    def close(self) -> None:
        """Ends the thread; the next call starts another one, after the last item handed out."""
        if self._worker is not None:
            worker = self._worker
            self._end()
            self._stale = True
            node: Any = None if worker.is_alive() else self.source
            while node is not None:  # what they have read ahead is of no use any more
                getattr(node, "close", lambda: None)()
                node = getattr(node, "source", None)

    def _end(self) -> None:
        assert self._worker is not None
        self._finalizer()
        self._leaving, self._worker = self._worker, None

    def _settle(self) -> None:
        """Puts the source where the state says, once no thread is inside it any more."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None
        if self._stale:
            self.source.reset(render(self._taken) if self._taken else None)
            self._stale = False


class _Worker:
    """The thread, and the queue of (item, snapshot after it, error)."""

    def __init__(self, source: BaseNode[Any], size: int, pin: bool) -> None:
        # Of queue.SimpleQueue, which is made in C: a Queue's locks in Python take a tenth of the time of a small batch.
        # Never asked with a timeout: one that passes at the wrong moment makes CPython 3.11's wait for ever.
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(size):
            self._room.put(None)
        self._stopped = threading.Event()
        # Snapshots that are over. The thread that took them frees them, so that it and the consumer do not contend.
        self.spent: deque[Snapshot | None] = deque()
        self._thread = threading.Thread(
            target=_work,
            args=(source, self._results, self._room, self._stopped, pin, self.spent),
            name="ibm_nodes-prefetch",
            daemon=True,
        )
        self._thread.start()

    def is_ready(self) -> bool:
        return not self._results.empty()

    def get(self) -> "_Result":
        if self._results.empty() and not self._thread.is_alive() and self._results.empty():
            raise RuntimeError(
                "the prefetching thread is gone, so that no item will come: in a forked process, build another loader"
            )
        result = self._results.get()
        self._room.put(None)
        return result

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the thread, which is told to stop, to leave the source."""
        self._thread.join()

    def stop(self) -> None:
        self._stopped.set()
        self._room.put(None)  # wakes it where it waits for room
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)


_Result = tuple[Any, Snapshot | None, BaseException | None]


def _work(source: BaseNode[Any], results: "queue.SimpleQueue[_Result]", *more: Any) -> None:
    try:
        _fill(source, results, *more)
    except BaseException as error:
        results.put((None, None, error))
    finally:  # who still waits would wait for ever
        results.put((None, None, Interrupted("closed while an item was waited for")))


def _fill(
    source: BaseNode[Any],
    results: "queue.SimpleQueue[_Result]",
    room: "queue.SimpleQueue[None]",
    stopped: threading.Event,
    pin: bool,
    spent: "deque[Snapshot | None]",
) -> None:
    stop_waiting_when(stopped.is_set)
    # Snapshots whose states were not made yet.
    fresh: deque[Snapshot] = deque(maxlen=room.qsize() + 1)
    while not stopped.is_set():
        result = _draw(source)
        spent.clear()
        if pin and result[2] is None:
            try:
                result = (_pinned(result[0]), *result[1:])
            except RuntimeError as error:
                logger.warning("batches are not pinned any more, which slows copies to the GPU: %s", error)
                pin = False
        if result[1] is not None:
            fresh.append(result[1])
        if room.empty():
            _make_states(fresh, stopped)
        room.get()
        results.put(result)
        if result[2] is not None:
            del result  # the error's traceback refers to this frame
            return


def _make_states(fresh: "deque[Snapshot]", stopped: threading.Event) -> None:
    """Makes states while there is nothing else to do: nodes keep parts of them, and who asks waits the less."""
    while fresh and not stopped.is_set():
        with contextlib.suppress(Exception):  # who asks for it is told
            render(fresh.popleft())


def _draw(source: BaseNode[Any]) -> _Result:
    """Gives the next item and the snapshot after it, or the error that came in its place: none is lost."""
    item, ended = None, None
    try:
        try:
            item = next(source)
        except StopIteration as end:
            ended = end
        return item, _snapshot_of(source), ended
    except BaseException as error:
        return None, None, error


def _snapshot_of(source: BaseNode[Any]) -> Snapshot:
    try:
        return snapshot(source)
    except StopIteration as error:
        raise RuntimeError("taking a state raised StopIteration, which is no end of data") from error


def _pinned(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.pin_memory() if item.device.type == "cpu" else item
    if isinstance(item, dict):
        return {key: _pinned(value) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_pinned(value) for value in item)
    return item
