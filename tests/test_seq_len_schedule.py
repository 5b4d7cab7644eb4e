"""Samples whose length changes while a run goes on: at a global batch, the same at every world size, no token lost."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import stored

from ibm_nodes import Schedule

A, B = {"a": 1.0}, {"b": 1.0}


def test_lengths_hold_from_the_first_global_batch_before_which_there_are_so_many_tokens():
    schedule = Schedule([(0, A)], seq_len={0: 10, 100: 20, 481: 5, 482: 7}, global_batch_size=4)
    assert schedule.seq_lens == ((0, 10), (12, 20), (32, 7))  # 120 tokens, and 400 more
    found = [schedule.seq_len(number) for number in (0, 11, 12, 31, 32, 1 << 40)]
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


LENGTHS = st.dictionaries(st.integers(1, 900), st.integers(1, 40), max_size=4)
LEGS = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 40), LENGTHS, st.integers(0, 25)), max_size=4
)


@settings(max_examples=300, deadline=None, database=None)
@given(LEGS, st.lists(st.integers(1, 900), unique=True, max_size=4), st.integers(1, 900))
def test_any_lengths_with_any_loads_come_where_a_count_of_tokens_says(legs, weights, max_tokens):
    """Legs of (global batch size, first length, lengths, samples until a state is loaded), in the middle of a batch too."""
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
            assert schedule.seq_len(number)[0] == length, number
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


def test_a_state_of_a_loader_without_a_schedule_takes_the_lengths_from_its_position_on():
    schedule = Schedule([(0, A)], seq_len={0: 10, 100: 20, 2000: 40}, global_batch_size=4)
    schedule.load(None, 50)
    assert schedule.seq_len(50)[0] == 20
    assert schedule.seq_len(1 << 30)[0] == 40
