"""Sharder: the logical shards that a rank owns, visited so that the global stream is the same at any world size."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torchdata.nodes import BaseNode

from ibm_nodes.listing import Listing, ListingSession, listings_in
from ibm_nodes.node import Node, Snapshot, as_snapshot, render, snapshot
from ibm_nodes.permutation import derive_key, permutation
from ibm_nodes.schedule import SCHEDULE_KEY, Schedule
from ibm_nodes.state import SHARDS_KEY, State, check_keys, check_settings
from ibm_nodes.storage import hold_first_reads

T = TypeVar("T")

NUM_AHEAD = 16
"""Graphs that are reset before their turn, so that their first reads run side by side."""
APART_SECONDS = 0.005
MAX_SPREAD_SECONDS = 2.0
"""The first reads of ranks are so far apart, in a random order, or closer, so that all begin within the maximum."""


class Sharder(Node[T]):
    """Yields the items of the global stream that belong to a rank.

    The stream is cut into ``num_shards`` logical shards, each with its own complete graph. Item g of the stream is the
    next item of logical shard g % num_shards, and belongs to the rank g % world_size. So the ranks' next items are
    together the same at any world size, and the states of all ranks, merged with ``ibm_nodes.state.merge``, can be
    loaded at any other. Load a state at position G, and a rank goes on with the smallest g >= G that belongs to it.

    A shard that has ended is passed over, or, with ``filler``, goes on with it. The end is when all shards of the rank
    have ended. Nothing is built, listed or read before the first item.

    What a process first lists and reads over the network then waits for less than two seconds, 5 milliseconds a rank
    or less, so that the ranks of a large job do not all reach the store at one moment.

    What ``skip`` leaves out is drawn and dropped, so that every sample keeps its number: the position after it is that
    of a run which trained on it. What lies before the position that is loaded does not matter.

    Args:
        graph: function of (shard, num_shards) that builds the graph of one logical shard.
        num_shards: number of logical shards, fixed for the life of a run; a multiple of every world size to be used.
        rank: number of this data-parallel rank.
        world_size: number of data-parallel ranks.
        schedule: the Schedule of the graphs' mixers and packers, whose clock is set before each draw and which may end
            the run; what was set of it in the run is part of the state.
        filler: item that a shard which has ended yields at its turns; None passes it over.
        skip: half-open ranges [begin, end) of sample numbers to leave out, the same on all ranks; whole global batches.
        max_items: items of the global stream after which all ranks end; a multiple of the global batch size, or the
            last batches of the ranks differ. May be another at resume.

    Attributes:
        goes_on: yield filler also after all shards of the rank have ended; ``EndTogether`` sets it.
        saved_listings: gives the listing that a state was saved with, by its digest; ``checkpoint.load`` sets it.
        num_items, num_filler: items handed out since the node was built, and how many of them were filler.

    Raises:
        ValueError: if world_size does not divide num_shards, rank is not below world_size, or a range is empty; while
            loading: if a range that is to come does not begin and end between two batches of this world size.
    """

    POSITION_KEY = "position"
    NUM_SHARDS_KEY = "num_shards"

    def __init__(
        self,
        graph: Callable[[int, int], BaseNode[T]],
        *,
        num_shards: int,
        rank: int,
        world_size: int,
        schedule: Schedule | None = None,
        filler: T | None = None,
        skip: Iterable[tuple[int, int]] = (),
        max_items: int | None = None,
    ) -> None:
        super().__init__()
        if num_shards < 1 or world_size < 1:
            raise ValueError(f"num_shards and world_size must be at least 1, got {num_shards} and {world_size}")
        if num_shards % world_size:
            smaller = next(size for size in range(min(world_size, num_shards), 0, -1) if num_shards % size == 0)
            raise ValueError(
                f"world_size must divide num_shards={num_shards}, got {world_size}: "
                f"the next smaller one that does is {smaller}"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
        self.graph = graph
        self.num_shards = num_shards
        self.rank = rank
        self.world_size = world_size
        self.schedule = schedule
        self.filler = filler
        self.skip = merge_ranges(skip)
        self.max_items = max_items
        self.goes_on = False
        self.saved_listings: Callable[[str], Listing | None] | None = None
        self.num_items = self.num_filler = 0

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        owned = range(self.rank, self.num_shards, self.world_size)
        if initial_state is None:
            position, saved = 0, {}
        else:
            check_keys(self, initial_state, (self.POSITION_KEY, self.NUM_SHARDS_KEY, SCHEDULE_KEY, SHARDS_KEY))
            check_settings(self, initial_state, num_shards=self.num_shards)
            position, saved = initial_state[self.POSITION_KEY], initial_state[SHARDS_KEY]
            if missing := [shard for shard in owned if shard not in saved]:
                raise ValueError(
                    f"the state lacks the logical shards {missing[:8]} that rank {self.rank} of {self.world_size} "
                    "owns: load the states of all ranks, merged"
                )
        self._to_skip = self._whole_turns(position)
        if self.schedule is not None:
            self.schedule.load(None if initial_state is None else initial_state[SCHEDULE_KEY], position)
        ends = math.inf if self.schedule is None else self.schedule.end
        self._end = ends if self.max_items is None else min(ends, self.max_items)
        self._position = position
        self._graphs: dict[int, BaseNode[T]] = {}
        self._moved: set[int] = set()
        self._listings = ListingSession(self.saved_listings, listings_in(saved))
        self._taken: dict[int, _Taken] = {}
        for shard in owned:
            turns, ended, state = saved.get(shard, (0, False, None))
            self._taken[shard] = _Taken(turns, ended, as_snapshot(state))
        self._turns = {shard: taken.turns for shard, taken in self._taken.items()}
        self._ended = {shard for shard, taken in self._taken.items() if taken.ended}
        if self.schedule is not None:
            self.schedule.watch(self.num_shards, len(self._taken) - len(self._ended))
        self._next = min(turns * self.num_shards + shard for shard, turns in self._turns.items())

    def next(self) -> T:
        item = self._draw()
        while self._to_skip and self._is_left_out(self._next - self.world_size):
            item = self._draw()
        return item

    def snapshot(self) -> Snapshot:
        for shard in self._moved:
            graph = self._graphs.get(shard)
            taken = self._taken[shard].graph if graph is None else snapshot(graph)
            self._taken[shard] = _Taken(self._turns[shard], shard in self._ended, taken)
        self._moved.clear()
        schedule = None if self.schedule is None else self.schedule.state()
        return _state, (self._position, self.num_shards, schedule, self._taken.copy())

    def used_listings(self) -> dict[str, Listing]:
        """Gives the listings that the readers of this rank have read by, by digest."""
        return dict(self._listings.used) if hasattr(self, "_listings") else {}

    def close(self) -> None:
        """Lets go of all graphs, and so of their blocks and reads; the next item builds them again where they stood."""
        if hasattr(self, "_graphs"):
            self.snapshot()
            self._graphs = {}

    def _draw(self) -> T:
        turn = self._next
        while not self.all_ended:
            shard = turn % self.num_shards
            if self._turns[shard] * self.num_shards + shard > turn or (shard in self._ended and self.filler is None):
                turn += self.world_size
                continue
            if shard not in self._ended:
                self._prepare(shard)
                if self.schedule is not None:
                    self.schedule.now = turn
                self._moved.add(shard)  # also if it fails: it may have moved within
                try:
                    item: T = self._graphs[shard].next()
                except StopIteration:
                    self._ended.add(shard)
                    continue
                self._count(turn)
                return item
            return self._fill(turn)
        if not self.goes_on:
            raise StopIteration
        return self._fill(turn)

    @property
    def all_ended(self) -> bool:
        """Whether no shard of this rank has an item left, as far as is known."""
        return len(self._ended) == len(self._taken) or self._next >= self._end

    def _fill(self, turn: int) -> T:
        assert self.filler is not None
        self._count(turn)
        self.num_filler += 1
        return self.filler

    def _count(self, turn: int) -> None:
        shard = turn % self.num_shards
        self._turns[shard] += 1
        self._moved.add(shard)
        self._next = turn + self.world_size
        self._position += self.world_size
        self.num_items += 1

    def _is_left_out(self, number: int) -> bool:
        while self._to_skip and self._to_skip[0][1] <= number:
            del self._to_skip[0]
        return bool(self._to_skip) and self._to_skip[0][0] <= number

    def _whole_turns(self, position: int) -> list[tuple[int, int]]:
        """Gives what is left to skip, if all ranks have equally many turns before, in and between the ranges."""
        left = [(max(begin, position), end) for begin, end in self.skip if end > position]
        for begin, end in left:
            if (begin - position) % self.world_size or (end - begin) % self.world_size:
                raise ValueError(
                    f"skip must leave out whole global batches, got samples {begin} to {end} at position {position}: "
                    f"they are no whole turns of {self.world_size} ranks"
                )
        return left

    def _prepare(self, shard: int) -> None:
        """Builds and resets the graphs of a shard and of the shards that come after it."""
        if len(self._graphs) + len(self._ended) >= len(self._taken) and shard in self._graphs:
            return
        if not self._graphs:
            hold_first_reads(first_read_seconds(self.rank, self.world_size))
        for visit in range(min(NUM_AHEAD, len(self._taken))):
            ahead = (shard + visit * self.world_size) % self.num_shards
            if ahead not in self._graphs and ahead not in self._ended:
                self._graphs[ahead] = self._build(ahead)

    def _build(self, shard: int) -> BaseNode[T]:
        try:
            graph = self.graph(shard, self.num_shards)
            with self._listings:
                graph.reset(render(self._taken[shard].graph))
        except StopIteration as error:
            raise RuntimeError(
                f"building the graph of shard {shard} raised StopIteration, which is no end of data"
            ) from error
        return graph


def first_read_seconds(rank: int, world_size: int) -> float:
    """Gives how long the first reads of a rank wait, so that those of all ranks come evenly spread."""
    turn = int(permutation(derive_key("first reads", world_size), world_size)[rank])
    return turn * min(APART_SECONDS, MAX_SPREAD_SECONDS / world_size)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Gives half-open ranges of sample numbers in ascending order, those that meet or overlap as one.

    Raises:
        ValueError: if one is empty or begins below 0.
    """
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(map(tuple, ranges)):
        if not 0 <= begin < end:
            raise ValueError(
                f"skip must be ranges [begin, end) of sample numbers with 0 <= begin < end, got {begin}:{end}"
            )
        if merged and begin <= merged[-1][1]:
            begin, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((begin, end))
    return tuple(merged)


def sample_number(skip: Iterable[tuple[int, int]], position: int, index: int) -> int:
    """Gives the number of the sample that comes ``index`` samples after a position, with merged ranges left out."""
    number = position + index
    for begin, end in skip:
        if position < end and max(begin, position) <= number:
            number += end - max(begin, position)
    return number


class _Taken:
    """What was taken of a logical shard: its turns so far, whether it has ended, and the snapshot of its graph."""

    __slots__ = ("_state", "ended", "graph", "turns")

    def __init__(self, turns: int, ended: bool, graph: Snapshot) -> None:
        self.turns, self.ended, self.graph = turns, ended, graph
        self._state: tuple[int, bool, Any] | None = None

    def state(self) -> tuple[int, bool, Any]:
        """Renders it, once: most shards have not moved since the state before."""
        if self._state is None:
            self._state = self.turns, self.ended, render(self.graph)
        return self._state


def _state(position: int, num_shards: int, schedule: State | None, taken: dict[int, _Taken]) -> State:
    return {
        Sharder.POSITION_KEY: position,
        Sharder.NUM_SHARDS_KEY: num_shards,
        SCHEDULE_KEY: schedule,
        SHARDS_KEY: {shard: part.state() for shard, part in taken.items()},
    }
