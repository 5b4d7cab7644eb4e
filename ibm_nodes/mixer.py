"""Mixer: draws from named sources so that their tokens follow weights."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from torchdata.nodes import BaseNode

from ibm_nodes.permutation import Seed, check_seed, derive_key, random_index
from ibm_nodes.state import Node, Snapshot, State, check_keys, check_settings, snapshot

T = TypeVar("T")

ONE = 1 << 32
"""The sum of all weights, as integers."""
NUM_PROBES = 8
"""Documents whose lengths are looked at before the first draw from a source."""
MAX_WARM_UP = 2048


class Mixer(Node[T]):
    """Yields the items of named sources so that the tokens of each source follow its weight.

    Every source has a credit. A document of n tokens adds its share of n to the credit of every source and takes n from
    the source that it came from; the next draw is from the source with the largest credit. All in integers: shares stay
    exact however long the run. Initial credits are what the same rule gives after a number of draws that depends on the
    seed alone, with the lengths of the first documents, so that logical shards do not draw a rare dataset all at once.

    Other weights may be given when a state is loaded: they apply from the next draw on, and nothing is repaid. A weight
    of zero is not drawn and keeps its place. A source that is new begins at its beginning; one that is gone stays in
    the state and may come back. A source that ends leaves its share to the others; the end is when all have ended.

    Args:
        sources: nodes of items with ``tokens``, by name.
        weights: share of each source's tokens; any sum. Names must be those of the sources.
        seed: an int or a tuple of ints; give each logical shard its own, as in ``seed=(0, shard)``.

    Raises:
        ValueError: if a weight is negative, NaN or infinite, if all are zero, or if names differ.
    """

    SEED_KEY = "seed"
    CREDITS_KEY = "credits"
    TOKENS_KEY = "tokens"
    DOCUMENTS_KEY = "documents"
    ENDED_KEY = "ended"
    WEIGHTS_KEY = "weights"
    SOURCES_KEY = "sources"

    def __init__(self, sources: Mapping[str, BaseNode[T]], *, weights: Mapping[str, float], seed: Seed = 0) -> None:
        super().__init__()
        if not sources:
            raise ValueError("sources must not be empty")
        self.sources = dict(sources)
        self.weights = integer_weights(weights, self.sources)
        self.seed = check_seed(seed)

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        counters = (self.CREDITS_KEY, self.TOKENS_KEY, self.DOCUMENTS_KEY)
        state = initial_state
        if state is None:
            state = {self.SEED_KEY: self.seed, self.ENDED_KEY: [], self.WEIGHTS_KEY: {}, self.SOURCES_KEY: {}}
            state |= {key: {} for key in counters}
        check_keys(self, state, (self.SEED_KEY, self.ENDED_KEY, self.WEIGHTS_KEY, self.SOURCES_KEY, *counters))
        check_settings(self, state, seed=self.seed)
        self._credits, self._tokens, self._documents = (dict(state[key]) for key in counters)
        self._ended = list(state[self.ENDED_KEY])
        saved = state[self.SOURCES_KEY]
        self._parked = {name: place for name, place in saved.items() if name not in self.sources}
        self._places = {name: _Place(node, saved.get(name)) for name, node in self.sources.items()}
        self._active: list[tuple[str, int]] | None = None
        self._due = ""
        self._start()

    def next(self) -> T:
        if self._active is None:
            self._start()
            self._active = self._prepare()
            self._due = self._largest()
        credits = self._credits
        while self._active:
            name = self._due
            try:
                item = self._places[name].next()
            except StopIteration:
                self._ended.append(name)
                self._active = self._share()
                self._due = self._largest()
                continue
            length = len(item.tokens)  # type: ignore[attr-defined]  # items of a mix have tokens
            self._tokens[name] += length
            self._documents[name] += 1
            credits[name] -= length * ONE
            largest = None
            for other, weight in self._active:
                credit = credits[other] = credits[other] + weight * length
                if largest is None or credit > largest:
                    largest, self._due = credit, other
            return item
        raise StopIteration

    def snapshot(self) -> Snapshot:
        places = [(name, place.snapshot(), place.skip) for name, place in self._places.items()]
        counters = self._credits.copy(), self._tokens.copy(), self._documents.copy()
        return _state, (self.seed, *counters, tuple(self._ended), self.weights, self._parked, places)

    def _start(self) -> None:
        """Resets the sources; called again by the first draw, in case that one of them failed."""
        for place in self._places.values():
            place.start()

    def _largest(self) -> str:
        return max((name for name, _ in self._active or ()), key=self._credits.__getitem__, default="")

    def _share(self) -> list[tuple[str, int]]:
        """Gives the weights of the sources that can be drawn from, by name."""
        left = {name: weight for name, weight in self.weights.items() if weight and name not in self._ended}
        return list(_scale(left).items()) if left else []

    def _prepare(self) -> list[tuple[str, int]]:
        """Gives credit to the sources that have none."""
        lengths = {}
        for name, _ in self._share():
            if name not in self._credits:
                lengths[name] = self._places[name].probe()
        self._ended += [name for name, measured in lengths.items() if not measured]
        active = self._share()
        new = [name for name, _ in active if name in lengths]
        old = [name for name, _ in active if name not in lengths]
        for name in self.sources:
            self._tokens.setdefault(name, 0)
            self._documents.setdefault(name, 0)
        for name in old:
            lengths[name] = (max(1, self._tokens[name] // max(1, self._documents[name])),)
        credits = _imagine(dict(active), {name: self._credits[name] for name in old}, lengths, self.seed)
        self._credits.update({name: credits[name] for name in new})
        return active


def _state(
    seed: Seed,
    credits: dict[str, int],
    tokens: dict[str, int],
    documents: dict[str, int],
    ended: tuple[str, ...],
    weights: dict[str, int],
    parked: dict[str, Any],
    places: list[tuple[str, Snapshot, int]],
) -> State:
    sources = dict(parked)
    for name, (function, arguments), skip in places:
        sources[name] = function(*arguments), skip
    return {
        Mixer.SEED_KEY: seed,
        Mixer.CREDITS_KEY: credits,
        Mixer.TOKENS_KEY: tokens,
        Mixer.DOCUMENTS_KEY: documents,
        Mixer.ENDED_KEY: list(ended),
        Mixer.WEIGHTS_KEY: weights.copy(),
        Mixer.SOURCES_KEY: sources,
    }


class _Place(Generic[T]):
    """A source with the first documents that were looked at before they are due; its state holds none of them.

    Attributes:
        skip: how many documents after the snapshot have been drawn.
    """

    def __init__(self, source: BaseNode[T], state: tuple[Any, int] | None) -> None:
        self._source = source
        self._state: Any
        self._state, self.skip = (None, 0) if state is None else state
        self._started = False
        self._ahead: deque[T] = deque()
        self._before: Snapshot | None = None

    def next(self) -> T:
        if not self._ahead:
            self._pass_over()
            item: T = next(self._source)
            return item
        item = self._ahead.popleft()
        self.skip += 1
        if not self._ahead:
            self._before, self.skip = None, 0
        return item

    def start(self) -> None:
        if not self._started:
            self._source.reset(self._state)
            self._started = True

    def probe(self) -> tuple[int, ...]:
        """Gives the lengths of the first documents, which stay to be drawn."""
        if self._before is None:
            self._pass_over()
            self._before = snapshot(self._source)
        while len(self._ahead) < NUM_PROBES:
            try:
                self._ahead.append(next(self._source))
            except StopIteration:
                break
        return tuple(len(item.tokens) for item in self._ahead)  # type: ignore[attr-defined]

    def snapshot(self) -> Snapshot:
        return snapshot(self._source) if self._before is None else self._before

    def _pass_over(self) -> None:
        while self.skip:
            next(self._source)
            self.skip -= 1


def integer_weights(weights: Mapping[str, float], names: Mapping[str, Any]) -> dict[str, int]:
    """Gives weights as integers of sum 2**32, none of them 0 unless it was given as 0.

    Raises:
        ValueError: if names differ, or a weight is negative, NaN or infinite, or all are zero.
    """
    if unknown := sorted(set(weights) - set(names)):
        raise ValueError(f"weights must be for the sources {sorted(names)}, got weights for {unknown} too")
    if missing := sorted(set(names) - set(weights)):
        raise ValueError(f"weights must name every source, got none for {missing}: give 0 to leave one out")
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"weights must be finite and not negative, got {weight} for {name!r}")
    if not any(weights.values()):
        raise ValueError("weights must not all be zero: nothing could be drawn")
    largest = max(weights.values())  # exact: a float is a fraction
    return _scale({name: round(weights[name] / largest * (1 << 62)) if weights[name] else 0 for name in sorted(names)})


def _scale(weights: dict[str, int]) -> dict[str, int]:
    """Scales integers to the sum 2**32 by largest remainders, ties by name."""
    total = sum(weights.values())
    scaled = {name: max(weight * ONE // total, weight > 0) for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: (-(weights[name] * ONE % total), name))
    for name in by_remainder[: max(0, ONE - sum(scaled.values()))]:
        scaled[name] += 1
    scaled[max(scaled, key=lambda name: (scaled[name], name))] += ONE - sum(scaled.values())
    return scaled


def _residual(key: int, lengths: tuple[int, ...]) -> int:
    """Picks one of the lengths in proportion to itself: the document that a random token falls into."""
    token = random_index(key, 1, max(1, sum(lengths)))
    for length in lengths:
        if token < length:
            return length
        token -= length
    return 1


def _imagine(
    active: dict[str, int], credits: dict[str, int], lengths: dict[str, tuple[int, ...]], seed: Seed
) -> dict[str, int]:
    """Gives the credits after a random number of imagined draws, up to two cycles of the rarest source.

    ``credits`` are those that there are already; their mean is kept, and without any the mean of all is zero.
    """
    if credits.keys() == active.keys():
        return credits
    key = derive_key("Mixer", seed, "imagine", *sorted(active.keys() - credits.keys()))
    imagined = dict(credits)
    top = max(credits.values(), default=0)
    for name in active.keys() - credits.keys():
        own = derive_key("Mixer", seed, name)
        imagined[name] = top - random_index(own, 0, _residual(own, lengths[name]) * ONE)
    num_draws = random_index(key, 0, min(MAX_WARM_UP, 2 * ONE // min(active.values())))
    for draw in range(len(active) > 1 and num_draws):
        name = max(active, key=imagined.__getitem__)
        length = lengths[name][random_index(key, draw + 1, len(lengths[name]))]
        for other, weight in active.items():
            imagined[other] += weight * length
        imagined[name] -= length * ONE
    kept = list(credits) or list(active)
    before, after = sum(credits.values()) // len(kept), sum(imagined[name] for name in kept) // len(kept)
    return {name: credit - after + before for name, credit in imagined.items()}
