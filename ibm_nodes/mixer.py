"""Mixer: draws from named sources so that their tokens follow weights."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from torchdata.nodes import BaseNode

from ibm_nodes.credits import ONE, imagine, integer_weights, scale
from ibm_nodes.items import Documents, document
from ibm_nodes.node import Node, Snapshot, as_snapshot, draw, snapshot
from ibm_nodes.permutation import Seed, check_seed
from ibm_nodes.schedule import Schedule
from ibm_nodes.state import State, check_keys, check_settings

T = TypeVar("T")

NUM_PROBES = 8
"""Documents whose lengths are looked at before the first draw from a source."""
CHUNK_TOKENS = 1 << 16
"""As many are drawn from a source at once."""


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
        # The sources that can be drawn from, and their weights.
        self._active: list[_Place[T]] = []
        self._shares: list[int] = []
        self._prepared = False
        self._at = 0
        self._lay_down([], [], ())  # also for a state that is taken after an error
        self._until: float = -1
        self._changes: object = None
        self._start()
        self._lay_down([], [], ())

    def next(self) -> T:
        return self.draw(1, extra=1)[0]

    def draw(self, num_tokens: int, extra: int = 0) -> Sequence[T]:
        schedule = self.schedule
        if schedule is not None and (schedule.now >= self._until or schedule.changes is not self._changes):
            self._reweigh(schedule)
        plan, first = self._plan, self._at
        if first >= len(plan.lengths):
            plan, first = self._plan_more(num_tokens), 0
        last = first
        for length in islice(plan.lengths, first, None):
            num_tokens -= length + extra
            last += 1
            if num_tokens <= 0:
                break
        self._at = last
        return plan.items[first:last]

    def snapshot(self) -> Snapshot:
        return _state, (self._plan, self._at)

    def _start(self) -> None:
        """Resets the sources; called again by the first draw, in case that one of them failed."""
        for place in self._places.values():
            place.start()

    def _share(self) -> list[tuple[str, int]]:
        """Gives the weights of the sources that can be drawn from, by name."""
        left = {name: weight for name, weight in self.weights.items() if weight and name not in self._ended}
        return list(scale(left).items()) if left else []

    def _plan_more(self, num_tokens: int) -> "_Plan[T]":
        """Decides which documents come next, of those that sources have at hand; at least one, or StopIteration.

        The order is that of drawing one by one, and the state is exact to the document.
        """
        self._settle()
        if not self._prepared:
            self._start()
            self._prepare()
            self._activate()
            self._prepared = True
        active = self._active
        while active:
            due = self._credits_of(active)
            place = active[due.index(max(due))]
            try:
                place.fill()
                break
            except StopIteration:
                pass
            self._ended.append(place.name)
            self._activate()
            self._lay_down([], [], ())
            active = self._active
        else:
            raise StopIteration
        # Weights that change with every sample would make a longer plan useless.
        step = self.schedule is not None and self._until == self.schedule.now + 1
        return self._mix(num_tokens if step else CHUNK_TOKENS)

    def _mix(self, num_tokens: int) -> "_Plan[T]":
        active, shares = self._active, self._shares
        rows = [iter(place.rest()) for place in active]
        credits = self._credits_of(active)
        order: list[int] = []
        drawn: list[Any] = []
        while num_tokens > 0:
            due = credits.index(max(credits))
            row = next(rows[due], None)
            if row is None:
                break
            length = row[0]
            credits = [credit + share * length for credit, share in zip(credits, shares, strict=True)]
            credits[due] -= length * ONE
            num_tokens -= length
            order.append(due)
            drawn.append(row)
        lengths, items = _columns(drawn, {place.dtype for place in active})
        return self._lay_down(order, lengths, items)

    def _lay_down(self, order: list[int], lengths: Sequence[int], items: Sequence[T]) -> "_Plan[T]":
        self._plan: _Plan[T] = _Plan(
            self.seed,
            self._credits,
            tuple(self._ended),
            self.weights,
            self._parked,
            tuple([place.name for place in self._active]),
            self._shares,
            [place.stand or place.take_stand() for place in self._places.values()],
            order,
            lengths,
            items,
        )
        self._at = 0
        self._settled = False
        return self._plan

    def _settle(self) -> None:
        """Moves sources and credits past the documents that were handed out; the plan is over."""
        if self._settled:
            return
        moved, self._credits = self._plan.after(self._at)
        for name, (num_documents, num_tokens) in moved.items():
            if num_documents:
                self._places[name].move(num_documents, num_tokens)
        self._settled = True

    def _credits_of(self, active: "list[_Place[T]]") -> list[int]:
        return [self._credits[place.name] for place in active]

    def _reweigh(self, schedule: Schedule) -> None:
        """Takes the weights that the schedule has now.

        What sources were owed by other weights is not repaid: credits begin anew, but where weights go in a line, step
        by small step.
        """
        self._changes = schedule.changes
        _, self._until = schedule.weights(schedule.now)
        weights = self._scheduled(schedule.now)
        if weights != self.weights:
            self._settle()
            if self._until != schedule.now + 1:
                self._credits = {}
            self.weights, self._prepared = weights, False
            self._active, self._shares = [], []
            self._lay_down([], [], ())  # also for a state that is taken after an error

    def _scheduled(self, number: int) -> dict[str, int]:
        assert self.schedule is not None
        given, _ = self.schedule.weights(number)
        return integer_weights({**dict.fromkeys(self.schedule.names, 0.0), **given}, self.sources)

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
        if self.schedule is not None and self._ended:
            self.schedule.note_ended(self._ended, dict(shares))


class _Part(NamedTuple):
    """Items that were drawn together from a source, and its snapshots before and after them."""

    items: Sequence[Any]
    before: Snapshot
    end: Snapshot

    def after(self, count: int) -> tuple[Snapshot, int]:
        """Gives a snapshot, and how many items to pass over from there."""
        if count == len(self.items):
            return self.end, 0
        if isinstance(self.items, Documents) and self.items.after is not None:
            return self.items.after(count), 0
        return self.before, count


class _Stand(NamedTuple):
    """What a state needs to know of a source."""

    name: str
    tokens: int
    documents: int
    parts: tuple[_Part, ...]
    at: int
    known: Snapshot
    skip: int

    def after(self, count: int) -> tuple[Snapshot, int]:
        """Gives a snapshot, and how many items to pass over from there, so many items further on."""
        left = self.at + count
        for part in self.parts:
            if left <= len(part.items):
                return part.after(left)
            left -= len(part.items)
        return self.known, self.skip


class _Plan(NamedTuple, Generic[T]):
    """What comes next, and what was known when that was decided; nothing in it changes."""

    seed: Seed
    credits: dict[str, int]
    ended: tuple[str, ...]
    weights: dict[str, int]
    parked: dict[str, dict[str, Any]]
    active: tuple[str, ...]
    shares: Sequence[int]
    stands: Sequence[_Stand]
    order: Sequence[int]
    lengths: Sequence[int]
    items: Sequence[T]

    def after(self, count: int) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
        """Gives documents and tokens that some items are of each source, and the credits after them."""
        documents, tokens = [0] * len(self.active), [0] * len(self.active)
        for source, length in zip(self.order[:count], self.lengths, strict=False):
            documents[source] += 1
            tokens[source] += length
        total = sum(tokens)
        credits = self.credits.copy()
        for name, share, own in zip(self.active, self.shares, tokens, strict=True):
            credits[name] += share * total - own * ONE
        return dict(zip(self.active, zip(documents, tokens, strict=True), strict=True)), credits


def _state(plan: _Plan[Any], count: int) -> State:
    moved, credits = plan.after(count)
    tokens, documents, sources = (
        plan.parked[key].copy() for key in (Mixer.TOKENS_KEY, Mixer.DOCUMENTS_KEY, Mixer.SOURCES_KEY)
    )
    for stand in plan.stands:
        name = stand.name
        num_documents, num_tokens = moved.get(name, (0, 0))
        documents[name], tokens[name] = stand.documents + num_documents, stand.tokens + num_tokens
        (function, arguments), skip = stand.after(num_documents)
        sources[name] = function(*arguments), skip
    return {
        Mixer.SEED_KEY: plan.seed,
        Mixer.CREDITS_KEY: credits,
        Mixer.TOKENS_KEY: tokens,
        Mixer.DOCUMENTS_KEY: documents,
        Mixer.ENDED_KEY: list(plan.ended),
        Mixer.WEIGHTS_KEY: plan.weights.copy(),
        Mixer.SOURCES_KEY: sources,
    }


class _Place(Generic[T]):
    """A source, with documents that were drawn before they are due.

    Attributes:
        dtype: that of the tokens of all documents that are known, or None.
        stand: what a state needs to know, or None if it has changed since.
    """

    def __init__(
        self,
        name: str,
        source: BaseNode[T],
        limit: int | None,
        tokens: int | None,
        documents: int | None,
        state: tuple[Any, int] | None,
    ) -> None:
        self.name, self.tokens, self.documents = name, tokens or 0, documents or 0
        self.stand: _Stand | None = None
        self.dtype: np.dtype[Any] | None = None
        self._at = 0
        self._source, self._limit = source, limit
        self._state: Any
        self._state, self._skip = (None, 0) if state is None else state
        self._known: Snapshot = as_snapshot(self._state)
        self._started = False
        self._parts: list[_Part] = []
        self._rows: list[Any] = []

    def start(self) -> None:
        """Resets the source, once; after an error it may be called again."""
        if not self._started:
            self._source.reset(self._state)
            self._known, self._started, self.stand = snapshot(self._source), True, None

    def fill(self) -> None:
        """Sees to it that there is a document, or raises StopIteration."""
        if self._limit is not None and self.tokens >= self._limit:
            raise StopIteration
        if self._at >= len(self._rows):
            self._parts, self._rows, self._at, self.stand = [], [], 0, None
            self._more()

    def rest(self) -> Iterator[Any]:
        """Gives the documents that are known and were not handed out, up to the limit."""
        rows = islice(self._rows, self._at, None)
        return rows if self._limit is None else _up_to(rows, self._limit - self.tokens)

    def move(self, num_documents: int, num_tokens: int) -> None:
        """Takes note that documents were handed out."""
        self._at += num_documents
        self.documents += num_documents
        self.tokens += num_tokens
        self.stand = None

    def probe(self) -> tuple[int, ...]:
        """Gives the lengths of the next documents, which stay to be drawn."""
        with contextlib.suppress(StopIteration):
            self.fill()
            while len(self._rows) < self._at + NUM_PROBES:
                self._more()
        return tuple([row[0] for row in self._rows[self._at : self._at + NUM_PROBES]])

    def take_stand(self) -> _Stand:
        """Takes what a state needs to know."""
        parts = tuple(self._parts)
        self.stand = _Stand(self.name, self.tokens, self.documents, parts, self._at, self._known, self._skip)
        return self.stand

    def _more(self) -> None:
        """Draws more documents; an error or the end comes before the first of them."""
        while True:
            items = draw(self._source, CHUNK_TOKENS)
            part = _Part(items, self._known, snapshot(self._source))
            self._known, self.stand = part.end, None
            if self._skip < len(items):
                break
            self._skip -= len(items)
        dtype = items.dtype if isinstance(items, Documents) else None
        self.dtype = dtype if not self._parts or self.dtype == dtype else None
        self._parts.append(part)
        self._rows += _rows_of(items)
        self._at, self._skip, self.stand = self._at + self._skip, 0, None


def _rows_of(items: Sequence[Any]) -> Iterator[Any]:
    """Gives (length, tokens, place, epoch, last token) of each document, or (length, item)."""
    if isinstance(items, Documents):
        return zip(items.lengths, items.tokens, items.places, items.epochs, items.lasts, strict=True)
    return ((len(item.tokens), item) for item in items)


def _columns(drawn: list[Any], dtypes: "set[np.dtype[Any] | None]") -> tuple[Sequence[int], Sequence[Any]]:
    """Makes columns of such rows."""
    if all(len(row) > 2 for row in drawn):
        lengths, tokens, places, epochs, lasts = zip(*drawn, strict=True)
        return lengths, Documents(tokens, lengths, places, epochs, lasts, dtypes.pop() if len(dtypes) == 1 else None)
    return [row[0] for row in drawn], [row[1] if len(row) == 2 else document(*row[1:4]) for row in drawn]


def _up_to(rows: Iterable[Any], num_tokens: int) -> Iterator[Any]:
    """Gives rows as long as those before have fewer tokens."""
    for row in rows:
        if num_tokens <= 0:
            return
        num_tokens -= row[0]
        yield row
