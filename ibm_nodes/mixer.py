"""Mixer: draws from named sources so that their tokens follow weights."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torchdata.nodes import BaseNode

from ibm_nodes.credits import (
    NOTHING_DRAWN,
    ONE,
    Drawn,
    choose,
    counted,
    credits_before,
    imagine,
    integer_weights,
    scale,
)
from ibm_nodes.items import Documents
from ibm_nodes.mix_source import CHUNK_TOKENS, MixSource
from ibm_nodes.node import Node, Snapshot, render
from ibm_nodes.permutation import Seed, check_seed
from ibm_nodes.schedule import Schedule
from ibm_nodes.state import State, check_keys, check_settings

T = TypeVar("T")


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
            name: MixSource(name, node, self.max_tokens.get(name), *(state[key].get(name) for key in kept))
            for name, node in self.sources.items()
        }
        # The sources that can be drawn from, their weights and credits, and which of them is due.
        self._active: list[MixSource[T]] = []
        self._shares: list[int] = []
        self._now: list[int] = []
        self._due = 0
        self._drawn = NOTHING_DRAWN
        self._prepared = False
        self._until: float = -1
        self._changes: object = None
        self._start()

    def next(self) -> T:
        return self.draw(1, extra=1)[0]

    def draw(self, num_tokens: int, extra: int = 0) -> Sequence[T]:
        self._drawn = NOTHING_DRAWN
        if self.schedule is not None and self.is_stale:
            self._reweigh(self.schedule)
        self._fill(num_tokens)
        active, shares, due = self._active, self._shares, self._due
        queues = [place.lengths(share * num_tokens // ONE) for place, share in zip(active, shares, strict=True)]
        before = self._now
        dues, lengths, self._now, self._due = choose(queues, before, shares, due, num_tokens, extra)
        self._drawn = before, shares, dues, lengths
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
            place.undo(*counted(self._drawn, number, first))
        self._now, self._due = credits_before(self._drawn, first), dues[first]
        self._drawn = before, shares, dues[:first], lengths[:first]

    @property
    def is_stale(self) -> bool:
        schedule = self.schedule
        return schedule is not None and (schedule.now >= self._until or schedule.changes is not self._changes)

    def snapshot(self) -> Snapshot:
        active = [place.name for place in self._active]
        places = [
            (place.name, place.tokens, place.documents, place.mixed_snapshot()) for place in self._places.values()
        ]
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

    def _fill(self, num_tokens: int) -> None:
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
                    due.fill(max(CHUNK_TOKENS, self._shares[self._due] * num_tokens // ONE))
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


def _state(
    seed: Seed,
    credits: tuple[dict[str, int], list[str], list[int]],
    ended: tuple[str, ...],
    weights: dict[str, int],
    parked: dict[str, dict[str, Any]],
    places: list[tuple[str, int, int, Snapshot]],
    drawn: Drawn,
    back: int = 0,
) -> State:
    latest, active, now = credits
    credit, tokens, documents = latest.copy(), parked[Mixer.TOKENS_KEY].copy(), parked[Mixer.DOCUMENTS_KEY].copy()
    first = len(drawn[2]) - back
    credit.update(zip(active, credits_before(drawn, first) if back else now, strict=True))
    sources = parked[Mixer.SOURCES_KEY].copy()
    for name, num_tokens, num_documents, taken in places:
        undone, of_tokens = counted(drawn, active.index(name), first) if back and name in active else (0, 0)
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
