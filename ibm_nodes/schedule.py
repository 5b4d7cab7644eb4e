"""Schedule: mixing weights that change at given samples of the global stream."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

SCHEDULE_KEY = "schedule"
Entry = tuple[int, dict[str, float]]


class Schedule:
    """Mixing weights as a function of the number of the sample in the global stream.

    Give one object to the mixers of all logical shards and to the Sharder, which sets its clock before each draw: so
    weights change at the same sample at any world size. A loader needs a Schedule of its own.

    Args:
        entries: pairs of (tokens, weights by name): from which number of tokens on, of all ranks together, the weights
            hold. In ascending order; the first entry holds from the start on.
        interpolate: between two entries weights go from the one's shares to the other's in a line; else they stay.
        seq_len: tokens in a sample. (Recipes set it; with 1, ``entries`` give numbers of samples.)

    Attributes:
        given: the entries as they were given.
        entries: the entries, with numbers of samples for tokens.
        now: the clock: the number of the sample that is being drawn.
        changes: what was set while the run was going, in order; an entry of the schedule that begins later wins.

    Raises:
        ValueError: if there is no entry, numbers do not ascend, or weights are negative, NaN, infinite or all zero.
    """

    def __init__(
        self, entries: Iterable[tuple[int, Mapping[str, float]]], *, interpolate: bool = False, seq_len: int = 1
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        self.given: tuple[Entry, ...] = tuple((int(tokens), _floats(weights)) for tokens, weights in entries)
        self.entries: tuple[Entry, ...] = tuple((-(-tokens // seq_len), weights) for tokens, weights in self.given)
        self.interpolate = interpolate
        self.changes: tuple[Entry, ...] = ()
        self.now = 0
        numbers = [number for number, _ in self.entries]
        if not numbers:
            raise ValueError("a schedule must have at least one entry: (0, weights)")
        if numbers != sorted(set(numbers)) or numbers[0] < 0:
            raise ValueError(f"the entries of a schedule must begin at ascending numbers from 0 on, got {numbers}")
        for number, weights in self.entries:
            check_weights(weights, f"weights from {number} on" if number else "weights")

    @property
    def names(self) -> set[str]:
        """All names that have a weight somewhere."""
        return {name for _, weights in (*self.entries, *self.changes) for name in weights}

    def add(self, at: int, weights: Mapping[str, float]) -> None:
        """Sets weights from a sample on that was not drawn yet; safe beside a thread that draws.

        Raises:
            ValueError: if a name is unknown or a weight is out of range.
        """
        if unknown := sorted(set(weights) - self.names):
            raise ValueError(f"weights must be for the datasets {sorted(self.names)}, got weights for {unknown} too")
        check_weights(weights, f"weights from {at} on")
        self.changes = (*(change for change in self.changes if change[0] < at), (at, _floats(weights)))

    def weights(self, number: int) -> tuple[dict[str, float], float]:
        """Gives the weights at a sample, and the number of the sample up to which they hold; a name left out has 0."""
        index = max(0, bisect_right(self.entries, number, key=_number) - 1)
        begin, weights = self.entries[index]
        end: float = self.entries[index + 1][0] if index + 1 < len(self.entries) else math.inf
        changed = bisect_right(self.changes, number, key=_number) - 1
        if changed + 1 < len(self.changes):
            end = min(end, self.changes[changed + 1][0])
        if changed >= 0 and self.changes[changed][0] >= begin:
            return self.changes[changed][1], end
        if not self.interpolate or index + 1 == len(self.entries) or number < begin:
            return weights, end
        goal, following = self.entries[index + 1]
        part = (number - begin) / (goal - begin)
        one, other = shares(weights), shares(following)
        names = {**one, **other}
        return {name: one.get(name, 0) * (1 - part) + other.get(name, 0) * part for name in names}, number + 1

    def state(self) -> dict[str, Any]:
        """Gives what a state holds of it: what was given, and what was set since."""
        return {
            "entries": [(tokens, dict(weights)) for tokens, weights in self.given],
            "interpolate": self.interpolate,
            "changes": [(number, dict(weights)) for number, weights in self.changes],
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Takes over what was set in the run, unless it was given other weights since."""
        same = state is not None and (
            (self.interpolate, [*self.given])
            == (state["interpolate"], [(tokens, dict(weights)) for tokens, weights in state["entries"]])
        )
        self.changes = ()
        if state is not None and same:
            self.changes = tuple((number, dict(weights)) for number, weights in state["changes"])

    def __repr__(self) -> str:
        return f"Schedule({list(self.given)}, interpolate={self.interpolate})"


def shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Gives weights scaled to the sum 1."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def check_weights(weights: Mapping[str, float], what: str = "weights") -> None:
    """Checks that weights can be drawn by.

    Raises:
        ValueError: if a weight is negative, NaN or infinite, or all are zero.
    """
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"{what} must be finite and not negative, got {weight} for {name!r}")
    if not any(weights.values()):
        raise ValueError(f"{what} must not all be zero: nothing could be drawn")


def _number(entry: Entry) -> int:
    return entry[0]


def _floats(weights: Mapping[str, float]) -> dict[str, float]:
    """Gives weights that look the same however they were typed: a lineage is made of how they look."""
    return {name: float(weight) for name, weight in weights.items()}
