import itertools

import pytest
from sources import Items, stored

from ibm_nodes import Batcher


def build(length, batch_size, fails=(), **options):
    return Batcher(Items(range(length), fails), batch_size=batch_size, **options)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 6, 10])
def test_yields_batches_in_order_and_the_rest_where_it_is_wanted(length, batch_size, drop_last):
    whole = [list(range(length))[begin : begin + batch_size] for begin in range(0, length, batch_size)]
    if drop_last:
        whole = [batch for batch in whole if len(batch) == batch_size]
    node = build(length, batch_size, drop_last=drop_last)
    assert list(node) == whole
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(node)


def test_its_state_is_that_of_its_source_after_the_last_batch():
    node = build(10, 3)
    assert node.state_dict() == {"position": 0}
    for position in (3, 6, 9):
        next(node)
        assert node.state_dict() == {"position": position}


@pytest.mark.parametrize("drop_last", [True, False])
def test_goes_on_from_the_state_at_every_batch(drop_last):
    node = build(10, 3, drop_last=drop_last)
    states, batches = [stored(node.state_dict())], []
    for batch in node:
        batches.append(batch)
        states.append(stored(node.state_dict()))
    for taken, state in enumerate(states):
        other = build(10, 3, drop_last=drop_last)
        other.reset(state)
        assert list(other) == batches[taken:]


@pytest.mark.parametrize("fail", range(9))
def test_a_batch_that_an_error_interrupts_is_kept_and_completed(fail):
    node, batches = build(9, 3, [fail]), []
    with pytest.raises(OSError, match=f"cannot read item {fail}"):
        for batch in node:
            batches.append(batch)
    assert batches + list(node) == list(build(9, 3))


@pytest.mark.parametrize("fail", range(9))
def test_a_state_taken_after_the_last_batch_is_still_there_while_interrupted(fail):
    node, batches = build(9, 3, [fail]), []
    with pytest.raises(OSError, match="cannot read"):
        while True:
            node.state_dict()
            batches.append(next(node))
    state = stored(node.state_dict())
    assert state == {"position": fail - fail % 3}
    other = build(9, 3)
    other.reset(state)
    assert batches + list(other) == list(build(9, 3))


@pytest.mark.parametrize("fail", [1, 2, 4, 5])
def test_without_one_it_says_what_to_do_and_has_one_again_after_the_batch(fail):
    node = build(9, 3, [fail])
    with pytest.raises(OSError, match="cannot read"):
        list(node)
    with pytest.raises(RuntimeError, match="call next\\(\\) again before saving"):
        node.state_dict()
    next(node)
    assert node.state_dict() == {"position": fail - fail % 3 + 3}


def test_a_reset_forgets_an_interrupted_batch():
    node = build(9, 3, [4])
    next(node)
    with pytest.raises(OSError, match="cannot read"):
        next(node)
    node.reset()
    assert list(node) == list(build(9, 3))


def test_stop_iteration_from_collate_does_not_end_the_data():
    calls = itertools.count()

    def collate(batch):
        if next(calls) == 1:
            next(iter(()))
        return batch

    node = build(9, 3, collate=collate)
    assert next(node) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="collate raised StopIteration") as raised:
        next(node)
    assert isinstance(raised.value.__cause__, StopIteration)
    assert list(node) == [[3, 4, 5], [6, 7, 8]]


def test_an_error_of_collate_loses_no_batch():
    fails = {1}

    def collate(batch):
        if batch[0] == 3 and fails:
            fails.clear()
            raise ValueError("bad batch")
        return tuple(batch)

    node = build(9, 3, collate=collate)
    assert next(node) == (0, 1, 2)
    with pytest.raises(ValueError, match="bad batch"):
        next(node)
    assert list(node) == [(3, 4, 5), (6, 7, 8)]


def test_a_batch_is_the_consumers_to_change():
    node = build(6, 3)
    first = next(node)
    first.clear()
    assert next(node) == [3, 4, 5]
    assert first == []


def test_refuses_a_batch_of_nothing():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        build(1, 0)
