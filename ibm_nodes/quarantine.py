"""Quarantine: the places in a dataset that a logical shard leaves out, and which faults are the data's own."""

import logging
import re
from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa

from ibm_nodes.attempts import Changed
from ibm_nodes.listing import Listing, came_from_store
from ibm_nodes.state import State

logger = logging.getLogger(__name__)

FAULTS = (ValueError, LookupError, TypeError, OSError, pa.ArrowException)
"""What the reading of a damaged or foreign file may raise, and, as OSError, a store that fails."""
UNSURE = (ConnectionError, TimeoutError, PermissionError, MemoryError)
OUT_OF_MEMORY = re.compile(r"of size (\d+)")
ABSURD_BYTES = 1 << 40
"""A damaged length can ask for as much memory; the data of a block cannot."""
REASON_CHARACTERS = 200


class Place(NamedTuple):
    """Blocks of a file that are left out.

    Attributes:
        file: the file's key under the prefix.
        first: the first block, as they lie in the file.
        end: the block after the last; None where all that follow are left out. With a first of 0 that is the file.
        since: where the reader stood, as (epoch, whole, file, block): from there on it holds, not before.
        reason: the fault in words.
    """

    file: str
    first: int
    end: int | None
    since: tuple[int, ...]
    reason: str


class Fault(NamedTuple):
    """A fault of the data at the place that a reader asked for, which is not recorded yet."""

    place: Place
    url: str
    listing: Listing
    error: BaseException


class Quarantine:
    """The places that a reader leaves out; more may be added, and each tells from where in the order on it holds.

    So a state that was taken before a place was found, but is written after, may have it: the reader that goes on from
    it comes by the same documents as this one, whatever has become of the file.

    Args:
        name: the dataset's name.
        shard: the logical shard.
        max_errors: how many places there may be.
        saved: those of a state.
    """

    def __init__(self, name: str, shard: int, max_errors: int, saved: Iterable[State]) -> None:
        self._name, self._shard, self._max_errors = name, shard, max_errors
        self.places = tuple(Place(**place) for place in saved)

    def has(self, key: str, block: int | None, at: tuple[int, ...]) -> bool:
        """Tells whether a block of a file, or for None all of them, are left out where the reader stands."""
        return any(place.file == key and place.since <= at and _covers(place, block) for place in self.places)

    def add(self, fault: Fault) -> None:
        """Records the place of a fault.

        Raises:
            RuntimeError: if there are ``max_errors`` already; nothing is recorded then.
        """
        place = fault.place
        where = f"{describe(place.first, place.end)} of {fault.url}"
        if len(self.places) >= self._max_errors:
            raise RuntimeError(
                f"dataset {self._name!r} has more than max_errors={self._max_errors} bad places in logical shard "
                f"{self._shard}: {where} would be left out, too: {place.reason}; mend the files, or go on from the "
                "last state with a larger max_errors"
            ) from fault.error
        self.places = (*self.places, place)
        if (place.file, place.first, place.end) not in fault.listing.reported:
            fault.listing.reported.add((place.file, place.first, place.end))
            logger.warning("dataset %r is read without %s from now on: %s", self._name, where, place.reason)

    def state(self) -> list[State]:
        """Gives the places as plain data."""
        return [{**place._asdict(), "since": tuple(place.since)} for place in self.places]

    def __str__(self) -> str:
        return (
            f"; {len(self.places)} bad places are left out, the first for {self.places[0].reason}"
            if self.places
            else ""
        )


def check_policy(on_error: str, max_errors: int) -> None:
    """Checks how bad places are to be treated.

    Raises:
        ValueError: if it is not known, or out of range.
    """
    if on_error not in ("raise", "quarantine") or max_errors < 1:
        raise ValueError(
            f'on_error must be "raise" or "quarantine" and max_errors at least 1, got {on_error!r} and {max_errors}'
        )


def describe(first: int, end: int | None) -> str:
    """Puts blocks of a file into words."""
    if end is None:
        return "all blocks" if first == 0 else f"all blocks from {first} on"
    return f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}"


def _covers(place: Place, block: int | None) -> bool:
    if block is None:
        return place.first == 0 and place.end is None
    return place.first <= block and (place.end is None or block < place.end)


def is_of_data(error: BaseException) -> bool:
    """Tells whether an error is the fault of a file, as it would be at each further attempt; and not the store's."""
    if came_from_store(error) is not None:
        return is_gone(error)
    if isinstance(error, pa.ArrowMemoryError):
        asked = OUT_OF_MEMORY.search(str(error))
        return asked is not None and int(asked[1]) >= ABSURD_BYTES
    return not isinstance(error, UNSURE)


def is_gone(error: BaseException) -> bool:
    """Tells whether the store said that an object is not there any more, or is another one than was listed."""
    return isinstance(came_from_store(error), FileNotFoundError | Changed)


def reason(error: BaseException) -> str:
    """Puts an error into one line for a state."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= REASON_CHARACTERS else f"{text[: REASON_CHARACTERS - 4]} ..."
