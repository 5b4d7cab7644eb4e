"""Weights that change at a sample of the global stream: exact shares since the change, the same at every world size."""

import functools
import itertools
import math
import random

import corpora
import pytest
from sources import Items, stored
from test_elastic import interleaved
from test_mixer import NUM_SHARDS as MANY_SHARDS
from test_mixer import RARE, Lengths, check_batches, check_shares, lengths_by_dataset, lognormal

from ibm_nodes import (
    Batcher,
    CausalLMCollator,
    Document,
    Loader,
    Mixer,
    Packer,
    Prefetcher,
    Reader,
    Schedule,
    Sharder,
    Shuffler,
    set_weights,
)
from ibm_nodes.state import merge

NUM_SHARDS, BATCH, PREFETCH = 24, 24, 2


def test_weights_hold_from_their_entry_to_the_next():
    schedule = Schedule([(0, {"a": 1}), (10, {"a": 1, "b": 3}), (30, {"b": 1})])
    assert [schedule.weights(number) for number in (0, 9)] == [({"a": 1}, 10)] * 2
    assert [schedule.weights(number) for number in (10, 29)] == [({"a": 1, "b": 3}, 30)] * 2
    assert schedule.weights(1 << 50) == ({"b": 1}, math.inf)


def test_interpolated_weights_go_in_a_line_from_shares_to_shares():
    schedule = Schedule([(0, {"a": 2}), (10, {"a": 10, "b": 10}), (20, {"b": 5})], interpolate=True)
    assert schedule.weights(0) == ({"a": 1.0, "b": 0.0}, 1)
    assert schedule.weights(5) == ({"a": 0.75, "b": 0.25}, 6)
    assert schedule.weights(10) == ({"a": 0.5, "b": 0.5}, 11)
    assert schedule.weights(15) == ({"a": 0.25, "b": 0.75}, 16)
    assert schedule.weights(20) == ({"b": 5}, math.inf)


def test_a_change_holds_until_the_next_entry_or_change():
    schedule = Schedule([(0, {"a": 1, "b": 1}), (50, {"b": 1})])
    schedule.add(20, {"a": 1})
    schedule.add(30, {"a": 1, "b": 9})
    schedule.add(70, {"a": 5})
    found = [schedule.weights(number) for number in (19, 20, 29, 30, 49, 50, 69, 70)]
    one, two, three, four, five = (
        ({"a": 1, "b": 1}, 20),
        ({"a": 1}, 30),
        ({"a": 1, "b": 9}, 50),
        ({"b": 1}, 70),
        ({"a": 5}, math.inf),
    )
    assert found == [one, two, two, three, three, four, four, five]


def test_changes_come_back_with_the_state_unless_other_weights_are_given():
    schedule = Schedule([(0, {"a": 1, "b": 1})])
    schedule.add(20, {"a": 1})
    state = stored(schedule.state())
    same, other = Schedule([(0, {"a": 1, "b": 1})]), Schedule([(0, {"a": 1, "b": 2})])
    same.load(state, 9)
    other.load(state, 9)
    assert same.changes == ((20, {"a": 1}),)
    assert other.changes == ()


@pytest.mark.parametrize(
    "entries, named",
    [
        ([], "at least one entry"),
        ([(0, {"a": 1}), (0, {"a": 1})], "ascending"),
        ([(5, {"a": 1}), (3, {"a": 1})], "ascending"),
        ([(-1, {"a": 1})], "ascending"),
        ([(0, {"a": 0})], "must not all be zero"),
        ([(0, {"a": -1})], "got -1.0 for 'a'"),
        ([(0, {"a": 1}), (7, {"a": math.nan})], "weights from 7 on must be finite"),
    ],
)
def test_refuses_what_is_no_schedule(entries, named):
    with pytest.raises(ValueError, match=named):
        Schedule(entries)


def test_a_schedule_must_know_the_sources():
    with pytest.raises(ValueError, match="must name every source, got none for"):
        Mixer({"a": Lengths("a", [1]), "b": Lengths("b", [1])}, weights=Schedule([(0, {"a": 1})]))
    with pytest.raises(ValueError, match="got weights for"):
        Mixer({"a": Lengths("a", [1])}, weights=Schedule([(0, {"a": 1, "b": 1})]))


@pytest.mark.parametrize("seed", range(4))
def test_after_each_of_twenty_changes_shares_are_within_four_documents(seed):
    """The tokens since the change; zero weights among them, of datasets that come and go."""
    rng = random.Random(seed)
    names = "abcde"
    lengths = {name: [min(length, 20_000) for length in lognormal(rng, 700, 1.5)] for name in names}
    longest = max(map(max, lengths.values()))
    schedule = Schedule([(0, dict.fromkeys(names, 1.0))])
    node = Mixer({name: Lengths(name, lengths[name]) for name in names}, weights=schedule, seed=seed)
    for number in range(1, 21):
        weights = {name: rng.choice([0.0, 0.001, 0.01, 0.1, 0.3, 0.9]) for name in names}
        weights[rng.choice(names)] = 0.9
        schedule.add(number, weights)
        schedule.now = number
        check_shares(node, weights, longest, 2000, within=4)


def test_shares_of_every_global_batch_over_240_shards_hold_after_each_of_several_changes():
    lengths = lengths_by_dataset("lognormal")
    schedule = Schedule([(0, dict.fromkeys(RARE, 1))])
    nodes = [
        Mixer(
            {name: Lengths(name, lengths[name], start=997 * shard) for name in RARE}, weights=schedule, seed=(0, shard)
        )
        for shard in range(MANY_SHARDS)
    ]
    for number, shares in enumerate([(0.94, 0.05, 0.01), (0.01, 0.94, 0.05), (0.4, 0.3, 0.3)], 1):
        weights = dict(zip(RARE, shares, strict=True))
        schedule.add(number, weights)
        schedule.now = number
        check_batches(nodes, weights, lengths, 30)


def test_a_change_from_even_to_nine_to_one_makes_no_longer_run_than_nine_to_one():
    def longest_run(documents):
        return max(len(list(group)) for name, group in itertools.groupby(document.name for document in documents))

    def sources():
        return {name: Lengths(name, [100]) for name in "ab"}

    steady = longest_run(itertools.islice(Mixer(sources(), weights={"a": 9, "b": 1}), 2000))
    for before in range(40, 60):
        schedule = Schedule([(0, {"a": 1, "b": 1}), (1, {"a": 9, "b": 1})])
        node = Mixer(sources(), weights=schedule)
        list(itertools.islice(node, before))
        schedule.now = 1
        assert longest_run(itertools.islice(node, 200)) <= steady


def test_a_state_taken_after_an_error_in_a_change_of_weights_goes_on_as_if_there_was_none():
    def build(fails):
        schedule = Schedule([(0, {"a": 1, "b": 1}), (1, {"a": 1, "b": 2, "c": 3})])
        sources = {name: Lengths(name, [3, 5, 8]) for name in "ab"}
        sources["c"] = Items([Document(range(4), row=row, name="c") for row in range(1000)], fails)
        return schedule, Mixer(sources, weights=schedule)

    def names(node, count):
        return [document.name for document in itertools.islice(node, count)]

    (schedule, node), (other_schedule, other) = build([]), build([0])
    assert names(node, 7) == names(other, 7)
    schedule.now = other_schedule.now = 1
    with pytest.raises(OSError, match="cannot read item 0"):
        next(other)
    resumed_schedule, resumed = build([])
    resumed.reset(stored(other.state_dict()))
    resumed_schedule.now = 1
    expected = names(node, 100)
    assert names(other, 100) == expected
    assert names(resumed, 100) == expected


def test_a_source_ends_at_its_tokens_and_leaves_its_share_to_the_others():
    sources = {name: Lengths(name, [7]) for name in "abc"}
    node = Mixer(sources, weights={"a": 1, "b": 1, "c": 2}, max_tokens={"a": 70, "b": 71})
    names = [document.name for document in itertools.islice(node, 1000)]
    assert names.count("a") == 10
    assert names.count("b") == 11
    other = Mixer(sources, weights={"a": 1, "b": 1, "c": 2}, max_tokens={"a": 70, "b": 71})
    other.reset(stored(node.state_dict()))
    assert [document.name for document in itertools.islice(other, 50)] == ["c"] * 50


def test_a_renamed_source_keeps_its_place():
    def build(names, **more):
        sources = {name: Lengths(name[0], [3, 5, 8]) for name in names}
        return Mixer(sources, weights=dict(zip(sorted(names), (3, 1), strict=True)), **more)

    node, moved = build(["a", "b"]), build(["a", "b2"], renamed={"b2": "b"})
    list(itertools.islice(node, 17))
    moved.reset(stored(node.state_dict()))
    expected = [(document.name, document.row) for document in itertools.islice(node, 50)]
    assert [(document.name, document.row) for document in itertools.islice(moved, 50)] == expected
    with pytest.raises(ValueError, match="renamed must be for the sources"):
        build(["a", "b"], renamed={"c": "b"})


def graph(shard, num_shards, *, urls, schedule):
    more = {"shard": shard, "num_shards": num_shards}
    mixer = Mixer(
        {name: Reader(url, name=name, **more) for name, url in urls.items()}, weights=schedule, seed=(0, shard)
    )
    return Shuffler(Packer(mixer, seq_len=128, eos_id=2), buffer_size=4, seed=(0, shard))


def build(rank, world_size, urls, entries, interpolate):
    schedule = Schedule(entries, interpolate=interpolate)
    node = Sharder(
        functools.partial(graph, urls=urls, schedule=schedule),
        num_shards=NUM_SHARDS,
        rank=rank,
        world_size=world_size,
        schedule=schedule,
    )
    node = Batcher(node, batch_size=BATCH // world_size, collate=CausalLMCollator(shift_labels=False))
    return Loader(Prefetcher(node, prefetch_factor=PREFETCH))


def run(legs, changes, **settings):
    """The global stream of legs of (world size, steps); ``changes`` are set after the step that they name."""
    stream, state, step = [], None, 0
    for world_size, steps in legs:
        ranks = [build(rank, world_size, **settings) for rank in range(world_size)]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in ranks]
        for _ in range(steps):
            stream += interleaved([next(iterator) for iterator in iterators], step * BATCH)
            step += 1
            if step in changes:
                for loader in ranks:
                    set_weights(loader, changes[step], at=(step + PREFETCH + 2) * BATCH)
        state = merge([stored(loader.state_dict()) for loader in ranks])
        for loader in ranks:
            loader.close()
    return stream, state


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return corpora.write_mix(f"file://{tmp_path_factory.mktemp('data')}/")


ENTRIES = [(0, {"web": 0.6, "code": 0.4}), (100, {"web": 0.1, "code": 0.3, "books": 0.6}), (290, {"books": 1})]
CHANGES = {3: {"books": 1, "web": 1}, 4: {"code": 1}, 9: {"web": 2, "code": 1, "books": 1}}
STEPS = 20


@pytest.fixture(scope="module", params=[False, True], ids=["steps", "interpolated"])
def settings(request, urls):
    return {"urls": urls, "entries": ENTRIES, "interpolate": request.param}


@pytest.fixture(scope="module")
def reference(settings):
    return run([(1, STEPS)], CHANGES, **settings)


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
def test_scheduled_and_set_weights_give_the_same_stream_at_every_world_size(settings, reference, world_size):
    assert run([(world_size, STEPS)], CHANGES, **settings)[0] == reference[0]


@pytest.mark.parametrize("seed", range(6))
def test_they_survive_saves_straight_after_a_change_and_other_world_sizes(settings, reference, seed):
    rng = random.Random(seed)
    cuts = sorted({3, 4, *rng.sample(range(1, STEPS), 3)})
    steps = [end - begin for begin, end in itertools.pairwise([0, *cuts, STEPS])]
    stream, state = run([(rng.choice([1, 2, 3, 4, 6, 8]), count) for count in steps], CHANGES, **settings)
    assert stream == reference[0]
    assert [at for at, _ in state["schedule"]["changes"]] == [(step + PREFETCH + 2) * BATCH for step in CHANGES]


@pytest.mark.parametrize("seed", range(4))
def test_weights_set_at_random_moments_give_the_same_stream_at_random_world_sizes(urls, seed):
    rng = random.Random(seed)
    changes = {
        step: {name: rng.choice([0.0, 0.01, 1.0, 9.0]) for name in ("web", "code")} | {"books": 1}
        for step in rng.sample(range(1, 12), 5)
    }
    more = {"urls": urls, "entries": ENTRIES, "interpolate": rng.random() < 0.5}
    expected, state = run([(1, 16)], changes, **more)
    legs, left = [], 16
    while left:
        legs.append((rng.choice([1, 2, 3, 4, 6, 8]), min(left, rng.randint(1, 6))))
        left -= legs[-1][1]
    found, others = run(legs, changes, **more)
    assert found == expected, (legs, changes)
    assert others["schedule"] == state["schedule"]
    assert len(state["schedule"]["changes"]) == 5


@pytest.mark.parametrize("sizes", [(2, 3, 4, 6), (8, 1, 6, 2)])
def test_datasets_that_come_and_go_and_come_back_give_the_same_stream_at_every_world_size(urls, sizes):
    mixes = [
        {"web": 0.5, "code": 0.5},
        {"web": 0.2, "books": 0.8},
        {"code": 0.3, "books": 0.7},
        {"web": 0.6, "code": 0.3, "books": 0.1},
    ]

    def through(world_sizes):
        stream, state = [], None
        for step, (world_size, weights) in enumerate(zip(world_sizes, mixes, strict=True)):
            chosen = {name: urls[name] for name in weights}
            ranks = [build(rank, world_size, chosen, [(0, weights)], False) for rank in range(world_size)]
            for loader in ranks if state else ():
                loader.load_state_dict(state)
            iterators = [iter(loader) for loader in ranks]
            for number in range(4):
                stream += interleaved([next(iterator) for iterator in iterators], (4 * step + number) * BATCH)
            state = merge([stored(loader.state_dict()) for loader in ranks])
            for loader in ranks:
                loader.close()
        return stream

    assert through(sizes) == through((1, 1, 1, 1))


def test_a_change_has_an_effect_and_only_from_its_sample_on(settings, reference):
    unchanged, _ = run([(1, STEPS)], {}, **settings)
    first = min(step + PREFETCH + 2 for step in CHANGES) * BATCH
    assert unchanged[:first] == reference[0][:first]
    assert unchanged[first:] != reference[0][first:]


def test_other_weights_given_at_resume_win(urls):
    settings = {"urls": urls, "interpolate": False}
    entries, other = [(0, {"web": 1, "code": 1, "books": 1})], [(0, {"web": 1, "code": 1, "books": 0})]
    _, state = run([(2, 4)], {2: {"books": 1}}, entries=entries, **settings)
    loader = build(0, 1, entries=other, **settings)
    loader.load_state_dict(state)
    with loader:
        for _ in itertools.islice(loader, 12):
            pass
        state = loader.state_dict()
    assert state["schedule"]["changes"] == []
    before = sum(shard[2]["source"]["source"]["tokens"]["books"] for shard in state["shards"].values())
    loader = build(0, 1, entries=other, **settings)
    loader.load_state_dict(state)
    with loader:
        for _ in itertools.islice(loader, 4):
            pass
        state = loader.state_dict()
    assert sum(shard[2]["source"]["source"]["tokens"]["books"] for shard in state["shards"].values()) == before


def test_a_change_that_may_be_too_late_is_refused_on_every_rank_alike(urls):
    for world_size, rank in [(1, 0), (2, 0), (2, 1), (8, 7)]:
        with build(rank, world_size, urls, ENTRIES, False) as loader:
            for _ in itertools.islice(loader, 3):
                pass
            earliest = (3 + PREFETCH + 2) * BATCH
            with pytest.raises(ValueError, match=f"at must be at least {earliest}, got {earliest - 1}"):
                set_weights(loader, {"web": 1}, at=earliest - 1)
            with pytest.raises(ValueError, match="got weights for"):
                set_weights(loader, {"wbe": 1}, at=earliest)
            set_weights(loader, {"web": 1}, at=earliest)


def test_a_loader_without_a_schedule_says_so():
    node = Sharder(lambda *_: Lengths("a", [1]), num_shards=1, rank=0, world_size=1)
    with pytest.raises(ValueError, match="must have a Schedule"):
        set_weights(Loader(node), {"a": 1}, at=100)


def test_a_change_that_was_set_before_a_close_holds_when_the_loader_goes_on(urls):
    def batches(then):
        loader, found = build(0, 1, urls, ENTRIES, False), []
        for number in range(12):
            found.append(next(iter(loader))["input_ids"].tolist())
            if number == 2:
                set_weights(loader, {"books": 1}, at=7 * BATCH)
                then(loader)
        assert loader.state_dict()["schedule"]["changes"] == [(7 * BATCH, {"books": 1.0})]
        return loader, found

    def load_what_does_not_fit(loader):
        with pytest.raises(ValueError, match="num_shards"):
            loader.load_state_dict({**loader.state_dict(), "num_shards": 7})

    loader, expected = batches(lambda loader: None)
    before = build(0, 1, urls, ENTRIES, False).state_dict()
    loader.load_state_dict(before)  # goes back to where nothing was set
    assert loader.state_dict()["schedule"]["changes"] == []
    loader.close()
    for then in (Loader.close, load_what_does_not_fit):
        loader, found = batches(then)
        loader.close()
        assert found == expected
