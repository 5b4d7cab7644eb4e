"""Samples whose length changes while a run goes on: at a global batch, the same at every world size, no token lost."""

import functools
import math
import random
from collections import Counter

import corpora
import numpy as np
import pytest
import test_elastic as elastic
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import Items, documents, stored
from test_strategies import BOS, EOS, LENGTHS, STRATEGIES, marked, pairs

from ibm_nodes import (
    Batcher,
    CausalLMCollator,
    Loader,
    Packer,
    Prefetcher,
    Schedule,
    Sharder,
    Shuffler,
    set_weights,
)
from ibm_nodes.items import thaw

A, B = {"a": 1.0}, {"b": 1.0}


def test_lengths_hold_from_the_first_global_batch_before_which_there_are_so_many_tokens():
    schedule = Schedule([(0, A)], seq_len={0: 10, 100: 20, 481: 5, 482: 7}, global_batch_size=4)
    assert schedule.seq_lens == ((0, 10), (12, 20), (32, 7))  # 120 tokens, and 400 more
    found = [schedule.seq_len_at(number) for number in (0, 11, 12, 31, 32, 1 << 40)]
    assert found == [(10, 12), (10, 12), (20, 32), (20, 32), (7, math.inf), (7, math.inf)]
    assert [schedule.tokens(number) for number in (0, 5, 12, 13, 32, 34)] == [0, 50, 120, 140, 520, 534]
    assert [schedule.samples(tokens) for tokens in (0, 1, 120, 121, 140, 520, 521)] == [0, 1, 12, 13, 13, 32, 33]


def test_weights_that_change_after_a_length_count_its_tokens():
    schedule = Schedule([(0, A), (60, B), (121, A), (534, B)], seq_len={0: 10, 100: 20, 500: 7}, global_batch_size=4)
    assert [number for number, _ in schedule.entries] == [0, 6, 13, 34]


@pytest.mark.parametrize(
    "more, named",
    [
        ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
        ({"seq_len": {0: 4, 9: 0}}, "seq_len must be at least 1, got 0"),
        ({"seq_len": {9: 4}}, "must say how long samples are from 0 tokens on"),
        ({"seq_len": {-1: 4, 0: 8}}, "must say how long samples are from 0 tokens on"),
        ({"global_batch_size": 0}, "global_batch_size must be at least 1, got 0"),
    ],
)
def test_refuses_lengths_that_make_no_sense(more, named):
    with pytest.raises(ValueError, match=named):
        Schedule([(0, A)], **more)


def test_a_run_ends_before_the_global_batch_that_has_too_many_tokens():
    for max_tokens, end in [(39, 0), (40, 4), (119, 8), (120, 12), (199, 12), (200, 16), (10**6, 50_004)]:
        made = Schedule([(0, A)], seq_len={0: 10, 100: 20}, global_batch_size=4, max_tokens=max_tokens)
        assert made.end == end
    assert Schedule([(0, A)]).end == math.inf


PLANS = st.dictionaries(st.integers(1, 900), st.integers(1, 40), max_size=4)
LEGS = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 40), PLANS, st.integers(0, 25)), max_size=4)


@settings(max_examples=300, deadline=None, database=None)
@given(LEGS, st.lists(st.integers(1, 900), unique=True, max_size=4), st.integers(1, 900))
def test_any_lengths_with_any_loads_come_where_a_count_of_tokens_says(legs, weights, max_tokens):
    """Legs of (global batch size, first length, lengths, samples until a load, in the middle of a batch too)."""
    state, position, tokens, begin, length, size_before = None, 0, 0, 0, None, None
    starts, lengths = [], []
    entries = [(0, A), *((at, B) for at in sorted(weights))]
    for size, first, more, count in legs:
        plan = {0: first, **more}
        schedule = Schedule(entries, seq_len=plan, global_batch_size=size, max_tokens=max_tokens)
        schedule.load(state, position)
        begin = begin if size == size_before else position
        for number in range(position, position + count):
            if (number - begin) % size == 0:
                length = plan[max(at for at in plan if at <= tokens)]
            assert schedule.seq_len_at(number)[0] == length, number
            starts.append(tokens)
            lengths.append(length)
            tokens += length
        position += count
        assert schedule.tokens(position) == tokens
        for (at, _), (number, _) in zip(schedule.given, schedule.entries, strict=True):
            behind = [index for index, start in enumerate(starts) if start >= at]
            if behind:
                assert number == behind[0]
        if begin <= schedule.end < position:
            assert (schedule.end - begin) % size == 0
            assert starts[int(schedule.end)] <= max_tokens
        state, size_before = stored(schedule.state()), size


def test_a_state_that_is_of_no_schedule_is_refused():
    schedule = Schedule([(0, A)])
    with pytest.raises(ValueError, match=r"not a state of Schedule: missing keys \['batches'\], unknown keys \['x'\]"):
        schedule.load({**{key: value for key, value in schedule.state().items() if key != "batches"}, "x": 1}, 0)


def test_a_state_of_a_loader_without_a_schedule_takes_the_lengths_from_its_position_on():
    schedule = Schedule([(0, A)], seq_len={0: 10, 100: 20, 2000: 40}, global_batch_size=4)
    schedule.load(None, 50)
    assert schedule.seq_len_at(50)[0] == 20
    assert schedule.seq_len_at(1 << 30)[0] == 40


PLAN = {0: 8, 8 * 5: 20, 8 * 5 + 20 * 3: 6}
EDGES = (5, 8)


def shuffled(docs, seq_len, *, strategy, buffer_size=4, **more):
    packer = Packer(Items(docs), seq_len=seq_len, eos_id=EOS, num_open=3, strategy=strategy, **more)
    return Shuffler(packer, buffer_size=buffer_size, seed=1)


def draw_on(node, schedule, numbers):
    """The samples of some numbers of the global stream."""
    found = []
    for number in numbers:
        schedule.now = number
        found.append(next(node))
    return found


def rest(node, schedule, number):
    schedule.now = number
    return list(node)


def content(samples):
    return [(sample.tokens.tolist(), sample.starts, sample.documents) for sample in samples]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_a_length_that_changes_in_a_run_is_as_one_that_changes_at_a_load(strategy, overflow):
    docs, options = documents(LENGTHS * 6), {"strategy": strategy, "overflow": overflow, "bos_id": BOS}
    schedule = Schedule([(0, A)], seq_len=PLAN)
    assert schedule.seq_lens == ((0, 8), (5, 20), (8, 6))
    node = shuffled(docs, schedule, **options)
    found, state, expected = [], None, []
    for (begin, length), end in zip(schedule.seq_lens, (*EDGES, 14), strict=True):
        found += draw_on(node, schedule, range(begin, end))
        loaded = shuffled(docs, length, **options)
        loaded.reset(state)
        expected += [next(loaded) for _ in range(begin, end)]
        state = stored(loaded.state_dict())
    assert content(found) == content(expected)
    assert node.state_dict()["source"]["counts"] == state["source"]["counts"]
    assert content(rest(node, schedule, 14)) == content(loaded)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("buffer_size", [1, 4])
def test_no_token_is_lost_or_repeated_and_every_sample_has_the_length_in_force(strategy, buffer_size):
    docs = documents(LENGTHS * 6)
    schedule = Schedule([(0, A)], seq_len=PLAN)
    node = shuffled(docs, schedule, strategy=strategy, buffer_size=buffer_size)
    samples = draw_on(node, schedule, range(12))
    lengths = [schedule.seq_len_at(number)[0] for number in range(12)]
    assert all(len(sample.tokens) <= length for sample, length in zip(samples, lengths, strict=True))
    if strategy == "concat":
        assert [len(sample.tokens) for sample in samples] == lengths
    counts = node.state_dict()["source"]["counts"]
    waiting = [thaw(data) for data in node.state_dict()["buffer"]]
    assert counts["tokens"] == sum(len(sample.tokens) for sample in (*samples, *waiting))
    padding = sum(length - len(sample.tokens) for sample, length in zip(samples, lengths, strict=True))
    assert counts["padding"] == padding + sum(6 - len(sample.tokens) for sample in waiting)
    samples += rest(node, schedule, 12)
    whole = Counter(pair for document in docs for pair in marked(document, None, None))
    assert Counter(pair for sample in samples for pair in pairs(sample)) == whole


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goes_on_from_a_state_before_at_and_after_each_change(strategy):
    docs = documents(LENGTHS * 6)
    schedule = Schedule([(0, A)], seq_len=PLAN)
    node = shuffled(docs, schedule, strategy=strategy)
    expected = content(draw_on(node, schedule, range(14)))
    for cut in range(14):
        schedule = Schedule([(0, A)], seq_len=PLAN)
        node = shuffled(docs, schedule, strategy=strategy)
        head = draw_on(node, schedule, range(cut))
        again = Schedule([(0, A)], seq_len=PLAN)
        again.load(stored(schedule.state()), cut)
        other = shuffled(docs, again, strategy=strategy)
        other.reset(stored(node.state_dict()))
        assert content(head + draw_on(other, again, range(cut, 14))) == expected


def test_an_error_of_the_source_at_a_change_loses_no_token():
    docs = documents([30] * 9)
    for fail in range(9):
        schedule = Schedule([(0, A)], seq_len=PLAN)
        node = Shuffler(Packer(Items(docs, [fail]), seq_len=schedule, eos_id=EOS), buffer_size=3, seed=0)
        whole = Shuffler(Packer(Items(docs), seq_len=schedule, eos_id=EOS), buffer_size=3, seed=0)
        found = []
        for number in range(12):
            schedule.now = number
            try:
                found.append(next(node))
            except OSError:
                found.append(next(node))
        assert content(found) == content(draw_on(whole, schedule, range(12)))


BATCH, STEPS, PREFETCH = elastic.BATCH, 12, 2
SEQ_LENS = {0: 128, BATCH * 128 * 3 - 9: 512, BATCH * (128 * 3 + 512 * 2): 100, BATCH * (128 * 3 + 512 * 2 + 300): 256}
IN_STEPS = [128] * 3 + [512] * 2 + [100] * 3 + [256] * 4
ENTRIES = [(0, elastic.WEIGHTS), (BATCH * (128 * 3 + 512) + 1000, {"web": 1, "books": 3}), (10**6, {"code": 1})]
CHANGES = {2: {"code": 1, "books": 2}, 6: {"web": 1, "code": 1}}


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return corpora.write_mix(f"file://{tmp_path_factory.mktemp('data')}/")


def graph(shard, num_shards, *, schedule, strategy, **more):
    node = Packer(
        elastic.mix(shard, num_shards, weights=schedule, **more),
        seq_len=schedule,
        eos_id=elastic.EOS,
        strategy=strategy,
    )
    return Shuffler(node, buffer_size=4, seed=(0, shard))


def build(rank, world_size, *, entries=ENTRIES, seq_lens=SEQ_LENS, strategy="concat", prefetch_factor=PREFETCH, **more):
    schedule = Schedule(entries, seq_len=seq_lens, global_batch_size=BATCH)
    node = Sharder(
        functools.partial(graph, schedule=schedule, strategy=strategy, **more),
        num_shards=elastic.NUM_SHARDS,
        rank=rank,
        world_size=world_size,
        schedule=schedule,
    )
    collate = CausalLMCollator(shift_labels=False, pad_id=elastic.PAD, seq_len=schedule)
    node = Batcher(node, batch_size=BATCH // world_size, collate=collate)
    return Loader(Prefetcher(node, prefetch_factor=prefetch_factor))


def run(plan, **more):
    return elastic.run(plan, **{"build": build, "after": change_weights, **more})


def change_weights(step, ranks):
    for loader in ranks if step in CHANGES else ():
        set_weights(loader, CHANGES[step], at=(step + PREFETCH + 2) * BATCH)


@pytest.fixture(scope="module", params=STRATEGIES)
def reference(request, urls):
    stream, state = run([(1, STEPS, 0)], urls=urls, strategy=request.param)
    return request.param, stream, state


def test_every_step_has_samples_of_the_length_in_force(reference):
    assert [len(sample) // 8 for sample in reference[1]] == [length for length in IN_STEPS for _ in range(BATCH)]


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
def test_lengths_and_weights_change_at_the_same_samples_at_every_world_size(urls, reference, world_size):
    strategy, expected, _ = reference
    assert run([(world_size, STEPS, 0)], urls=urls, strategy=strategy)[0] == expected


SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_they_survive_saves_and_loads_before_at_and_after_each_change(urls, reference, seed):
    strategy, expected, last = reference
    rng, plan, left = random.Random(seed), [], STEPS
    while left:
        steps = min(left, rng.choice([0, 1, 1, 2, 3]))
        plan.append((rng.choice([1, 2, 3, 4, 6, 8]), steps, rng.choice([0, 1])))
        left -= steps
    stream, state = run(plan, urls=urls, strategy=strategy)
    assert stream == expected, plan
    assert state["schedule"] == last["schedule"]
    edges = [BATCH * step for step in (0, 3, 5, 8)]
    assert state["schedule"]["seq_lens"] == list(zip(edges, (128, 512, 100, 256), strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_token_of_real_files_is_lost_or_repeated(urls, strategy):
    more = {"urls": urls, "strategy": strategy, "entries": [(0, elastic.WEIGHTS)]}
    stream, state = elastic.run([(3, 4, 1), (2, 6, 0)], build=build, **more)
    handed_out = Counter(token for sample in stream for token in np.frombuffer(sample, np.int64).tolist())
    waiting = Counter(elastic.buffered(state))
    assert elastic.without_marks(handed_out) + waiting == elastic.without_marks(elastic.drawn(state, {"urls": urls}))
