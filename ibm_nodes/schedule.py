"""Schedule: mixing weights and lengths of samples that change at given samples of the global stream."""

import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from ibm_nodes.state import check_keys

logger = logging.getLogger(__name__)

SCHEDULE_KEY = "schedule"
Entry = tuple[int, dict[str, float]]
Length = tuple[int, int]
"""From where on samples have so many tokens: a number of samples or, as it is given, of tokens."""


class Schedule:
    """Mixing weights, and the number of tokens in a sample, as functions of the sample's number in the global stream.

    Give one object to the mixers and packers of all logical shards and to the Sharder, which sets its clock before each
    draw: so all changes come at the same sample at any world size. A loader needs a Schedule of its own.

    What is given in tokens is counted in samples of the length that they have at their time, also in runs before a
    load: weights change at the first sample before which there are so many tokens, lengths at the first global batch.

    Args:
        entries: pairs of (tokens, weights by name): from which number of tokens on, of all ranks together, the weights
            hold. In ascending order; the first entry holds from the start on.
        interpolate: between two entries weights go from the one's shares to the other's in a line; else they stay.
        seq_len: tokens in a sample; or by numbers of tokens, of all ranks together, from which on they hold, such as
            ``{0: 4096, 10**12: 8192}``. (Recipes set it; with 1, ``entries`` give numbers of samples.)
        global_batch_size: samples in an optimizer step, which all have the same length.
        max_tokens: tokens, in whole global batches, after which the run ends; None: it does not.

    Attributes:
        given: the entries as they were given.
        entries: the entries, with numbers of samples for tokens.
        given_seq_lens: the lengths as they were given.
        seq_lens: the lengths, with numbers of samples for tokens; what lies behind is as it was.
        end: the number of samples after which the run ends, or infinity.
        now: the clock: the number of the sample that is being drawn.
        changes: what was set while the run was going, in order; an entry of the schedule that begins later wins.

    Raises:
        ValueError: if there is no entry, numbers do not ascend, a length is below 1, or weights are negative, NaN,
            infinite or all zero.
    """

    def __init__(
        self,
        entries: Iterable[tuple[int, Mapping[str, float]]],
        *,
        interpolate: bool = False,
        seq_len: int | Mapping[int, int] = 1,
        global_batch_size: int = 1,
        max_tokens: int | None = None,
    ) -> None:
        self.given: tuple[Entry, ...] = tuple((int(tokens), _floats(weights)) for tokens, weights in entries)
        lengths = seq_len if isinstance(seq_len, Mapping) else {0: seq_len}
        self.given_seq_lens: tuple[Length, ...] = tuple(sorted((int(tokens), n) for tokens, n in lengths.items()))
        self.interpolate = interpolate
        self.global_batch_size = global_batch_size
        self.max_tokens = max_tokens
        self.changes: tuple[Entry, ...] = ()
        self.now = 0
        self._check()
        self._arrange((), 0, 0)
        self._announced: set[str] = set()
        self.watch(1, 0)

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

    def seq_len_at(self, number: int) -> tuple[int, float]:
        """Gives the tokens in a sample at its number, and the number of the sample up to which it is so."""
        index = bisect_right(self.seq_lens, number, key=_number) - 1
        end: float = self.seq_lens[index + 1][0] if index + 1 < len(self.seq_lens) else math.inf
        return self.seq_lens[index][1], end

    @property
    def longest(self) -> int:
        """The tokens in the longest samples."""
        return max(length for _, length in self.seq_lens)

    def tokens(self, number: int) -> int:
        """Gives how many tokens there are before a sample, of all ranks together and with padding."""
        edges = pairwise([*(min(begin, number) for begin, _ in self.seq_lens), number])
        return sum((end - begin) * length for (begin, end), (_, length) in zip(edges, self.seq_lens, strict=True))

    def samples(self, tokens: int) -> int:
        """Gives the number of the first sample before which there are so many tokens."""
        for (begin, length), (end, _) in pairwise(self.seq_lens):
            if begin + -(-tokens // length) <= end:
                return begin + -(-tokens // length)
            tokens -= (end - begin) * length
        begin, length = self.seq_lens[-1]
        return begin + -(-tokens // length)

    def watch(self, num_shards: int, num_left: int) -> None:
        """Sets how many logical shards there are, and in how many of this rank a dataset may still end."""
        self._num_shards, self._num_left = num_shards, num_left
        self._used_up: dict[str, set[int]] = {}

    def note_ended(self, names: Iterable[str], left: Mapping[str, float]) -> None:
        """Is told by a mixer which datasets have ended in its logical shard; logs once which are so in all of the rank.

        Args:
            names: of the datasets.
            left: weights of those that have not ended there.
        """
        for name in names:
            shards = self._used_up.setdefault(name, set())
            if (shard := self.now % self._num_shards) in shards:
                continue
            shards.add(shard)
            if len(shards) == self._num_left and name not in self._announced:
                self._announced.add(name)
                others = ", ".join(f"{other} {share:.4g}" for other, share in shares(left).items()) if left else ""
                logger.warning(
                    "dataset %r is used up: by sample %d all logical shards of this rank have drawn what they may of "
                    "it, and %s",
                    name,
                    self.now,
                    f"the weights of the others are {others}" if left else "nothing is left",
                )

    def state(self) -> dict[str, Any]:
        """Gives what a state holds of it: what was given, what was set since, and where lengths change."""
        return {
            "entries": [(tokens, dict(weights)) for tokens, weights in self.given],
            "interpolate": self.interpolate,
            "changes": [(number, dict(weights)) for number, weights in self.changes],
            "seq_lens": list(self.seq_lens),
            "batches": (self._begin, self.global_batch_size),
        }

    def load(self, state: Mapping[str, Any] | None, position: int) -> None:
        """Takes over the lengths of the samples before a position, and the weights that were set in the run.

        Weights that were set are gone if other ones were given since; those that were set of this object stay, since
        a loader that was closed goes on from the state of its last item. Lengths that were given hold from the next
        global batch on.

        Raises:
            ValueError: if it is no state of a schedule.
        """
        if state is None:
            self.changes = ()
            self._arrange((), position, position)
            return
        check_keys(self, state, ("entries", "interpolate", "changes", "seq_lens", "batches"))
        given = [(tokens, dict(weights)) for tokens, weights in state["entries"]]
        if not self.changes and (self.interpolate, [*self.given]) == (state["interpolate"], given):
            self.changes = tuple((number, dict(weights)) for number, weights in state["changes"])
        begin, size = state["batches"]
        past = [(number, length) for number, length in state["seq_lens"] if number < position]
        self._arrange(past, position, begin if size == self.global_batch_size else position)

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> "Schedule":
        """Makes the schedule of which a state was taken, to look at."""
        made = cls(state["entries"], interpolate=state["interpolate"])
        made.changes = tuple((number, dict(weights)) for number, weights in state["changes"])
        made.seq_lens = tuple((number, length) for number, length in state["seq_lens"])
        made.entries = tuple((made.samples(tokens), weights) for tokens, weights in made.given)
        return made

    def __repr__(self) -> str:
        return f"Schedule({list(self.given)}, interpolate={self.interpolate}, seq_len={dict(self.given_seq_lens)})"

    def _check(self) -> None:
        for name, value in (
            ("seq_len", min(n for _, n in self.given_seq_lens)),
            ("global_batch_size", self.global_batch_size),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.given_seq_lens[0][0] != 0:
            raise ValueError(f"seq_len must say how long samples are from 0 tokens on, got {dict(self.given_seq_lens)}")
        numbers = [number for number, _ in self.given]
        if not numbers:
            raise ValueError("a schedule must have at least one entry: (0, weights)")
        if numbers != sorted(set(numbers)) or numbers[0] < 0:
            raise ValueError(f"the entries of a schedule must begin at ascending numbers from 0 on, got {numbers}")
        for number, weights in self.given:
            check_weights(weights, f"weights from {number} on" if number else "weights")

    def _arrange(self, past: Iterable[Length], position: int, begin: int) -> None:
        """Puts what was given in tokens to its place in the stream.

        Args:
            past: the lengths before the position.
            position: from where on it may be changed.
            begin: where a global batch begins.
        """
        self._begin = begin
        size = self.global_batch_size
        lengths = list(past) or [(0, self.given_seq_lens[0][1])]
        for tokens, length in self.given_seq_lens:
            self.seq_lens: tuple[Length, ...] = tuple(lengths)
            number = begin - (begin - max(self.samples(tokens), position)) // size * size
            lengths = [one for one in lengths if one[0] < number]
            if not lengths or lengths[-1][1] != length:
                lengths.append((number, length))
        self.seq_lens = tuple(lengths)
        self.entries: tuple[Entry, ...] = tuple((self.samples(tokens), weights) for tokens, weights in self.given)
        self.end: float = math.inf
        if self.max_tokens is not None:
            last = self.samples(self.max_tokens + 1) - 1  # the last number before which there are not more tokens
            self.end = last - (last - begin) % size


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


def _number(entry: tuple[int, Any]) -> int:
    return entry[0]


def _floats(weights: Mapping[str, float]) -> dict[str, float]:
    """Gives weights that look the same however they were typed: a lineage is made of how they look."""
    return {name: float(weight) for name, weight in weights.items()}
