"""Once: makes each value once, however many threads ask for it together."""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ibm_nodes.read_ahead import POLL_SECONDS, check_stopped

T = TypeVar("T")


class Once(Generic[T]):
    """Gives the value of a key, made at the first call; keeps the ``size`` used last, or all if it is None.

    A call that fails leaves nothing behind: the next one tries again. With ``weak``, a value lives only as long as
    somebody else holds it.
    """

    def __init__(self, size: int | None, *, weak: bool = False) -> None:
        self._size = size
        self._weak = weak
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._entries: OrderedDict[Any, list[Any]] = OrderedDict()

    def peek(self, key: Any) -> T | None:
        """Gives the value of a key if it was made, else None."""
        entry = self._entries.get(key)
        return None if entry is None else entry[1]()

    def get(self, key: Any, make: Callable[[], T]) -> T:
        """Gives the value of a key."""
        if self._process != os.getpid():
            self._begin()  # a forked child inherits locks that no thread of its own will release
        with self._lock:
            entry = self._entries.setdefault(key, [threading.Lock(), lambda: None])
            self._entries.move_to_end(key)
            if self._size is not None and len(self._entries) > self._size:
                self._entries.popitem(last=False)
        while not entry[0].acquire(timeout=POLL_SECONDS):
            check_stopped()
        try:
            value: T | None = entry[1]()
            if value is None:
                value = make()
                entry[1] = weakref.ref(value) if self._weak else lambda: value
            return value
        finally:
            entry[0].release()
