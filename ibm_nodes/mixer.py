"""Mixer: draws from named sources so that their tokens follow weights."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from torchdata.nodes import BaseNode

from ibm_nodes.ahead import Ahead
from ibm_nodes.credits import ONE, imagine, integer_weights, scale
from ibm_nodes.items import Documents
from ibm_nodes.node import Node, Snapshot, peeks, render
from ibm_nodes.permutation import Seed, check_seed
from ibm_nodes.schedule import Schedule
from ibm_nodes.state import State, check_keys, check_settings

T = TypeVar("T")

NUM_PROBES = 8
"""Documents whose lengths are looked at before the first draw from a source."""
CHUNK_TOKENS, DRAW_TOKENS = 1 << 12, 1 << 16
"""As many are drawn from a source at once, and its share of as many, if that is more."""


class Mixer(Node[T]):
    """Yields the items of named sources so that the tokens of each source follow its weight.

    Every source has a credit. A document of n tokens adds its share of n to the credit of every source and takes n from
    the source that it came from; the next draw is from the source with the largest credit. All in integers: shares stay
    exact however long the run. Initial credits are what the same rule gives after a number of draws that depends on the
    seed alone, with the lengths of the first documents, so that logical shards do not draw a rare dataset all at once.

    Weights may change, by a ``Schedule`` or when a state is loaded: the new ones apply from the next draw on, and
    nothing is repaid, since credits begin anew as at the start. (Where a schedule goes in a line they are kept, or
    shares would not be exact.) A weight of zero is not drawn and keeps its place. A source that is new begins at its
    beginning; one that is gone stays in the state and may come back. A source that ends leaves its share to the others;
    the end is when all have ended.

    Args:
        sources: nodes of items with ``tokens``, by name.
        weights: share of each source's tokens; any sum. Names must be those of the sources. A ``Schedule`` lets them
            change; a name that one of its entries leaves out has weight 0 there.
        seed: an int or a tuple of ints; give each logical shard its own, as in ``seed=(0, shard)``.
        max_tokens: by name, when a source has ended: as soon as so many of its tokens were handed out.
        renamed: by a source's name, the name that it has in states which were saved before.

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

    def __init__(
        self,
        sources: Mapping[str, BaseNode[T]],
        *,
        weights: Mapping[str, float] | Schedule,
        seed: Seed = 0,
        max_tokens: Mapping[str, int] | None = None,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        if not sources:
            raise ValueError("sources must not be empty")
        self.sources = dict(sources)
        self.schedule = weights if isinstance(weights, Schedule) else None
        # Of a schedule its first ones, so that a description of the node does not depend on the clock.
        self.weights = self._scheduled(0) if isinstance(weights, Schedule) else integer_weights(weights, self.sources)
        self.seed = check_seed(seed)
        self.max_tokens = dict(max_tokens or {})
        self.renamed = dict(renamed or {})
        for what, names in (("max_tokens", self.max_tokens), ("renamed", self.renamed)):
            if unknown := sorted(set(names) - set(self.sources)):
                raise ValueError(f"{what} must be for the sources {sorted(self.sources)}, got {unknown} too")

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        counters = (self.CREDITS_KEY, self.TOKENS_KEY, self.DOCUMENTS_KEY)
        state = initial_state
        if state is None:
            state = {self.SEED_KEY: self.seed, self.ENDED_KEY: [], self.WEIGHTS_KEY: {}, self.SOURCES_KEY: {}}
            state |= {key: {} for key in counters}
        check_keys(self, state, (self.SEED_KEY, self.ENDED_KEY, self.WEIGHTS_KEY, self.SOURCES_KEY, *counters))
        check_settings(self, state, seed=self.seed)
        if self.renamed:
            state = self._with_new_names(state)
        saved: dict[str, int] = state[self.WEIGHTS_KEY]
        if self.schedule is not None and saved.keys() == self.sources.keys():
            self.weights = dict(saved)  # until the first draw, which compares them with the schedule's
        same = not saved or saved == self.weights
        self._credits: dict[str, int] = dict(state[self.CREDITS_KEY]) if same else {}
        self._ended = list(state[self.ENDED_KEY])
        kept = (self.TOKENS_KEY, self.DOCUMENTS_KEY, self.SOURCES_KEY)
        # What belongs to sources that are gone.
        self._parked = {
            key: {name: value for name, value in state[key].items() if name not in self.sources} for key in kept
        }
        self._places = {
            name: _Place(name, node, self.max_tokens.get(name), *(state[key].get(name) for key in kept))
            for name, node in self.sources.items()
        }
        # The sources that can be drawn from, their weights and credits, and which of them is due.
        self._active: list[_Place[T]] = []
        self._shares: list[int] = []
        self._now: list[int] = []
        self._due = 0
        self._drawn = _NONE
        self._prepared = False
        self._until: float = -1
        self._changes: object = None
        self._start()

    def next(self) -> T:
        return self.draw(1, extra=1)[0]

    def draw(self, num_tokens: int, extra: int = 0) -> Sequence[T]:
        self._drawn = _NONE
        if self.schedule is not None and self.is_stale:
            self._reweigh(self.schedule)
        self._fill()
        active, shares, due = self._active, self._shares, self._due
        queues = [place.lengths(share * num_tokens // ONE) for place, share in zip(active, shares, strict=True)]
        following = [iter(queue).__next__ for queue in queues]
        # Credits are those before the draw and the share of all tokens drawn, less what was drawn of the source itself.
        before, drawn, total = self._now, list(self._now), 0
        dues: list[int] = []
        lengths: list[int] = []
        with contextlib.suppress(StopIteration):  # no more of the source that is due is there without a wait
            while num_tokens > 0:
                length = following[due]()
                dues.append(due)
                lengths.append(length)
                num_tokens -= length + extra
                drawn[due] -= length * ONE
                total += length
                best, number = -math.inf, 0
                for share in shares:  # plain, since this is done for each document
                    credit = drawn[number] + share * total
                    if credit > best:
                        best, due = credit, number
                    number += 1
        self._now = [credit + share * total for credit, share in zip(drawn, shares, strict=True)]
        self._due, self._drawn = due, (before, shares, dues, lengths)
        counts = [dues.count(number) for number in range(len(active))]
        taken = [
            place.hand_out(count, sum(queue[:count]))
            for place, count, queue in zip(active, counts, queues, strict=True)
        ]
        parts = [part for part in taken if isinstance(part, Documents)]
        if len(parts) == len(taken):
            return Documents.woven(parts, dues)  # type: ignore[return-value]  # T is Document
        return list(map(next, map([iter(part) for part in taken].__getitem__, dues)))

    def undo(self, count: int) -> None:
        before, shares, dues, lengths = self._drawn
        first = len(dues) - count
        for number, place in enumerate(self._active):
            place.undo(*_counted(self._drawn, number, first))
        self._now, self._due = _credits(self._drawn, first), dues[first]
        self._drawn = before, shares, dues[:first], lengths[:first]

    @property
    def is_stale(self) -> bool:
        schedule = self.schedule
        return schedule is not None and (schedule.now >= self._until or schedule.changes is not self._changes)

    def snapshot(self) -> Snapshot:
        active = [place.name for place in self._active]
        places = [(place.name, place.tokens, place.documents, place.taken_state()) for place in self._places.values()]
        credits = self._credits, active, self._now
        return _state, (self.seed, credits, tuple(self._ended), self.weights, self._parked, places, self._drawn)

    def _start(self) -> None:
        """Resets the sources; called again by the first draw, in case that one of them failed."""
        for place in self._places.values():
            place.start()

    def _share(self) -> list[tuple[str, int]]:
        """Gives the weights of the sources that can be drawn from, by name."""
        left = {name: weight for name, weight in self.weights.items() if weight and name not in self._ended}
        return list(scale(left).items()) if left else []

    def _fill(self) -> None:
        """Sees to it that the source which is due has a document, or raises StopIteration."""
        if not self._prepared:
            self._start()
            self._prepare()
            self._activate()
            self._prepared = True
        while self._active:
            due = self._active[self._due]
            try:
                if not due.is_over:
                    due.fill(max(CHUNK_TOKENS, self._shares[self._due] * DRAW_TOKENS // ONE))
                    return
            except StopIteration:
                pass
            self._keep_credits()
            self._ended.append(due.name)
            self._activate()
        raise StopIteration

    def _reweigh(self, schedule: Schedule) -> None:
        """Takes the weights that the schedule has now.

        What sources were owed by other weights is not repaid: credits begin anew, but where weights go in a line, step
        by small step.
        """
        self._changes = schedule.changes
        _, self._until = schedule.weights(schedule.now)
        weights = self._scheduled(schedule.now)
        if weights != self.weights:
            if self._until == schedule.now + 1:
                self._keep_credits()
            else:
                self._credits = {}
            self._active, self._shares, self._now = [], [], []  # also for a state that is taken after an error
            self.weights, self._prepared = weights, False

    def _scheduled(self, number: int) -> dict[str, int]:
        assert self.schedule is not None
        given, _ = self.schedule.weights(number)
        return integer_weights({**dict.fromkeys(self.schedule.names, 0.0), **given}, self.sources)

    def _keep_credits(self) -> None:
        names = [place.name for place in self._active]
        self._credits = {**self._credits, **dict(zip(names, self._now, strict=True))}

    def _with_new_names(self, state: State) -> State:
        now = {old: new for new, old in self.renamed.items()}
        keys = (self.CREDITS_KEY, self.TOKENS_KEY, self.DOCUMENTS_KEY, self.WEIGHTS_KEY, self.SOURCES_KEY)
        named = {key: {now.get(name, name): value for name, value in state[key].items()} for key in keys}
        return {**state, **named, self.ENDED_KEY: [now.get(name, name) for name in state[self.ENDED_KEY]]}

    def _prepare(self) -> None:
        """Gives credit to the sources that have none."""
        lengths = {}
        for name, _ in self._share():
            if name not in self._credits:
                lengths[name] = self._places[name].probe()
        self._ended += [name for name, measured in lengths.items() if not measured]
        active = self._share()
        new = [name for name, _ in active if name in lengths]
        old = [name for name, _ in active if name not in lengths]
        for name in old:
            place = self._places[name]
            lengths[name] = (max(1, place.tokens // max(1, place.documents)),)
        credits = imagine(dict(active), {name: self._credits[name] for name in old}, lengths, self.seed)
        self._credits = {**self._credits, **{name: credits[name] for name in new}}

    def _activate(self) -> None:
        shares = self._share()
        self._active = [self._places[name] for name, _ in shares]
        self._shares = [share for _, share in shares]
        self._now = [self._credits[name] for name, _ in shares]
        self._due = self._now.index(max(self._now)) if shares else 0
        if self.schedule is not None and self._ended:
            self.schedule.note_ended(self._ended, dict(shares))


_Drawn = tuple[list[int], list[int], list[int], list[int]]
"""The credits before a draw and the shares, by number of the source; the number and the length of each item."""
_NONE: _Drawn = ([], [], [], [])
_NO_DOCUMENTS = Documents((), (), (), (), ())


def _counted(drawn: _Drawn, number: int, first: int) -> tuple[int, int]:
    """Gives how many documents and tokens were drawn of a source, from an item on."""
    _, _, dues, lengths = drawn
    chosen = [length for due, length in zip(dues[first:], lengths[first:], strict=True) if due == number]
    return len(chosen), sum(chosen)


def _credits(drawn: _Drawn, end: int) -> list[int]:
    """Gives the credits before an item."""
    before, shares, dues, lengths = drawn
    credits, total = list(before), sum(lengths[:end])
    for due, length in zip(dues[:end], lengths[:end], strict=True):
        credits[due] -= length * ONE
    return [credit + share * total for credit, share in zip(credits, shares, strict=True)]


def _state(
    seed: Seed,
    credits: tuple[dict[str, int], list[str], list[int]],
    ended: tuple[str, ...],
    weights: dict[str, int],
    parked: dict[str, dict[str, Any]],
    places: list[tuple[str, int, int, Snapshot]],
    drawn: _Drawn,
    back: int = 0,
) -> State:
    latest, active, now = credits
    credit, tokens, documents = latest.copy(), parked[Mixer.TOKENS_KEY].copy(), parked[Mixer.DOCUMENTS_KEY].copy()
    first = len(drawn[2]) - back
    credit.update(zip(active, _credits(drawn, first) if back else now, strict=True))
    sources = parked[Mixer.SOURCES_KEY].copy()
    for name, num_tokens, num_documents, taken in places:
        undone, of_tokens = _counted(drawn, active.index(name), first) if back and name in active else (0, 0)
        tokens[name], documents[name] = num_tokens - of_tokens, num_documents - undone
        sources[name] = render(taken, undone)
    return {
        Mixer.SEED_KEY: seed,
        Mixer.CREDITS_KEY: credit,
        Mixer.TOKENS_KEY: tokens,
        Mixer.DOCUMENTS_KEY: documents,
        Mixer.ENDED_KEY: list(ended),
        Mixer.WEIGHTS_KEY: weights.copy(),
        Mixer.SOURCES_KEY: sources,
    }


class _Place(Ahead[T]):
    """A source of a mix. One that can be peeked at is drawn from when a document is due; others before that.

    Attributes:
        tokens, documents: how many were handed out in all.
        limit: tokens after which the source has ended, or None.
    """

    __slots__ = ("_given", "_peeks", "documents", "limit", "name", "tokens")

    def __init__(
        self,
        name: str,
        source: BaseNode[T],
        limit: int | None,
        tokens: int | None,
        documents: int | None,
        state: tuple[Any, int] | None,
    ) -> None:
        super().__init__(source, state)
        self.name, self.limit = name, limit
        self.tokens, self.documents = tokens or 0, documents or 0
        self._peeks = peeks(source)
        self._given: list[T] | None = None  # what was handed out last, if it was drawn before

    @property
    def is_over(self) -> bool:
        """Whether it has handed out as many tokens as it may."""
        return self.limit is not None and self.tokens >= self.limit

    def probe(self) -> tuple[int, ...]:
        """Gives the lengths of the first documents, which stay to be drawn."""
        with contextlib.suppress(StopIteration):
            self.fill(CHUNK_TOKENS)
            if not self.items and len(self.lengths(CHUNK_TOKENS)) < NUM_PROBES:
                super().fill(CHUNK_TOKENS)
            while self.items and len(self.items) < NUM_PROBES:
                self.more(CHUNK_TOKENS)
        return tuple(self.lengths(CHUNK_TOKENS)[:NUM_PROBES])

    def fill(self, num_tokens: int, extra: int = 0) -> None:
        if not self._peeks or self._skip:
            super().fill(num_tokens, extra)
        elif not self.items:
            self._source.peek(1, wait=True)  # type: ignore[attr-defined]  # a Node

    def lengths(self, num_tokens: int) -> list[int]:
        """Gives the lengths of documents that are there without a wait, and may be drawn."""
        found: list[int] = []
        if self.items:
            found = [len(item.tokens) for item in self.items]  # type: ignore[attr-defined]  # those of a mix have tokens
        elif self._peeks and self._started and not self._skip:
            found = self._source.peek(num_tokens + CHUNK_TOKENS)  # type: ignore[attr-defined]  # a Node
        if self.limit is not None:
            left = self.limit - self.tokens
            found = [length for length, begin in zip(found, accumulate(found, initial=0)) if begin < left]  # noqa: B905
        return found

    def hand_out(self, count: int, num_tokens: int) -> Sequence[T]:
        """Gives the next documents."""
        self.documents += count
        self.tokens += num_tokens
        self._given = None
        if not count:
            return _NO_DOCUMENTS  # type: ignore[return-value]  # of any class
        if not self.items:
            given: Sequence[T] = self._source.take(count)  # type: ignore[attr-defined]  # a Node
            return given
        self._given = [self.items.popleft() for _ in range(count)]
        self.taken += count
        return self._given

    def undo(self, count: int, num_tokens: int) -> None:
        """Takes back documents that were handed out last."""
        if not count:
            return
        self.documents -= count
        self.tokens -= num_tokens
        if self._given is None:
            self._source.undo(count)  # type: ignore[attr-defined]  # a Node
        else:
            self.items.extendleft(reversed(self._given[-count:]))
            self.taken -= count
            del self._given[-count:]

    def taken_state(self) -> Snapshot:
        """Takes its state: the source's, and how many documents of those after that were handed out."""
        if self._given is None:
            return _place, self.snapshot()
        assert self._before is not None
        return _place_ahead, (*self.snapshot(), self._before, self.taken)


def _place(source: Snapshot, skip: int, back: int = 0) -> tuple[State, int]:
    return render(source, back), skip


def _place_ahead(source: Snapshot, skip: int, before: Snapshot, taken: int, back: int = 0) -> tuple[State, int]:
    return (render(before), taken - back) if back else (render(source), skip)
