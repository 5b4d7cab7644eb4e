"""The process's one pool of reading threads, and the budget of what they may read before it is asked for."""

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MAX_THREADS = 16
BUDGET_BYTES = 256 << 20
IDLE_SECONDS = 1.0
POLL_SECONDS = 0.05
EXIT_SECONDS = 2.0

_NEW, _RUNNING, _DONE = range(3)


class Interrupted(RuntimeError):
    """A wait was given up because the node that waits was closed."""


class Counters:
    """What reading has cost this process so far."""

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0
        self.store_seconds = 0.0
        """Time spent in requests, all threads together."""
        self.waited_seconds = 0.0
        """Time that nodes waited for blocks which were not there yet."""


counters = Counters()
_local = threading.local()


def stop_waiting_when(stopped: Callable[[], bool]) -> None:
    """Makes every wait of the calling thread end with ``Interrupted`` once the function says so."""
    _local.stopped = stopped


def check_stopped() -> None:
    """Raises Interrupted if the calling thread was told to stop waiting."""
    stopped = getattr(_local, "stopped", None)
    if stopped is not None and stopped():
        raise Interrupted("closed while waiting for a read")


class _Job(Generic[T]):
    """A read, in the hands of the pool and of the task that asked for it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function: Callable[[], T] | None = function
        self.lock = threading.Lock()
        self.status = _NEW
        self.finished = threading.Event()
        self.value: T | None = None
        self.error: BaseException | None = None
        self.abandoned = False

    def claim(self) -> bool:
        with self.lock:
            claimed = self.status == _NEW
            if claimed:
                self.status = _RUNNING
            return claimed

    def run(self) -> None:
        assert self.function is not None
        try:
            self.value = self.function()
        except BaseException as error:  # raised again where the result is asked for
            self.error = error
        self.function = None
        self.status = _DONE
        self.finished.set()
        self = None  # type: ignore[assignment]  # the error's traceback refers to this frame


class Task(Generic[T]):
    """A read that may run in the pool before its result is asked for. Dropping it gives the read up."""

    def __init__(self, function: Callable[[], T], *, pool: "_Pool | None" = None, size: int = 0) -> None:
        self._job = _Job(function)
        self._pool = pool
        self._size = size

    def done(self) -> bool:
        """Tells whether the result is there."""
        return self._job.status == _DONE

    def peek(self) -> T | None:
        """Gives the result if it is there and no error, else None."""
        return self._job.value

    def result(self) -> T:
        """Gives the result, running the read in this thread if no other has begun it; raises its error."""
        job = self._job
        if job.status != _DONE:
            began = time.perf_counter()
            if job.claim():
                job.run()
            while not job.finished.wait(POLL_SECONDS):
                check_stopped()
            counters.waited_seconds += time.perf_counter() - began
        if job.error is not None:
            try:
                raise job.error
            finally:
                del self, job  # the error's traceback refers to this frame
        return job.value  # type: ignore[return-value]  # set by run

    def __del__(self) -> None:
        self._job.abandoned = True
        if self._pool is not None:
            self._pool.release(self._size)


class _Pool:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._waiting: deque[Any] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._used = 0
        # Sizes to give back. A task may be collected anywhere, also in a thread that another waits for with the lock
        # held, so its end must take no lock.
        self._released: deque[int] = deque()
        self._closed = False
        self._number = 0

    def submit(self, function: Callable[[], T], size: int) -> Task[T] | None:
        thread = None
        with self.lock:
            while self._released:
                self._used -= self._released.popleft()
            if self._closed or (self._used and self._used + size > BUDGET_BYTES):
                return None
            self._used += size
            task = Task(function, pool=self, size=size)
            self._waiting.append(task._job)
            if self._idle >= len(self._waiting):
                self._changed.notify()
            elif len(self._threads) < MAX_THREADS:
                self._number += 1
                thread = threading.Thread(target=self._work, name=f"ibm_nodes-read-{self._number}", daemon=True)
                self._threads.add(thread)
        if thread is not None:
            thread.start()
        return task

    def release(self, size: int) -> None:
        self._released.append(size)

    def close(self) -> None:
        with self.lock:
            self._closed = True
            self._waiting.clear()
            threads = list(self._threads)
            self._changed.notify_all()
        end = time.monotonic() + EXIT_SECONDS
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while (job := self._take()) is not None:
            stop_waiting_when(partial(self._is_over, job))
            if not job.abandoned and job.claim():
                job.run()
            _local.stopped = job = None

    def _is_over(self, job: _Job[Any]) -> bool:
        return job.abandoned or self._closed

    def _take(self) -> "_Job[Any] | None":
        with self.lock:
            end = time.monotonic() + IDLE_SECONDS
            self._idle += 1
            while not self._waiting and not self._closed and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())
            self._idle -= 1
            if self._waiting and not self._closed:
                job: _Job[Any] = self._waiting.popleft()
                return job
            self._threads.discard(threading.current_thread())
            return None


_pool = _Pool()


def _start_anew() -> None:
    """A forked child has none of the threads, and a lock that may be held for ever."""
    global _pool, counters
    _pool, counters = _Pool(), Counters()


os.register_at_fork(after_in_child=_start_anew)
atexit.register(lambda: _pool.close())


def read_ahead(function: Callable[[], T], size: int) -> Task[T] | None:
    """Queues a speculative read, or gives None if ``size`` more bytes would pass the process's budget.

    The bytes count until the task is dropped.
    """
    return None if getattr(_local, "idle", False) else _pool.submit(function, size)


@contextlib.contextmanager
def nothing_ahead() -> Iterator[None]:
    """Lets the calling thread queue no read: for a graph that is put somewhere, but not read from."""
    _local.idle = True
    try:
        yield
    finally:
        _local.idle = False
