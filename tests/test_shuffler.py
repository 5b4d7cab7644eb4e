import itertools

import numpy as np
import pytest
import torch
from sources import Items, documents, same, stored, stored_bytes

from ibm_nodes import Packer, Sample, Shuffler


def build(items, buffer_size, seed=0, fails=()):
    return Shuffler(Items(items, fails), buffer_size=buffer_size, seed=seed)


def drawn(length, buffer_size, seed=0):
    return list(build(range(length), buffer_size, seed))


@pytest.mark.parametrize("length", range(9))
@pytest.mark.parametrize("buffer_size", [1, 2, 3, 4, 8, 100])
def test_yields_every_item_once(length, buffer_size):
    assert sorted(drawn(length, buffer_size)) == list(range(length))


def test_a_buffer_of_one_keeps_the_order():
    assert drawn(50, 1) == list(range(50))


@pytest.mark.parametrize("buffer_size", [2, 5, 16])
def test_no_item_comes_before_the_buffer_reaches_it(buffer_size):
    assert all(item < place + buffer_size for place, item in enumerate(drawn(300, buffer_size)))


def test_a_buffer_larger_than_the_data_shuffles_all_of_it_to_every_place():
    counts = np.zeros((5, 5))
    for seed in range(5000):
        counts[np.arange(5), drawn(5, 8, seed)] += 1
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_draws_each_item_of_the_full_buffer_equally_often():
    firsts = np.bincount([next(build(range(100), 4, seed)) for seed in range(4000)], minlength=4)
    assert len(firsts) == 4
    assert np.abs(firsts - 1000).max() < 5 * np.sqrt(1000)


def test_the_order_is_a_function_of_the_seed():
    assert drawn(100, 16, (0, 1)) == drawn(100, 16, (0, 1))
    assert len({tuple(drawn(100, 16, (0, shard))) for shard in range(50)}) == 50
    assert drawn(100, 16, 0) != drawn(100, 16, (0, 0))


def kinds():
    """Items of every class that a buffer can hold."""
    samples = list(Packer(Items(documents([5, 20, 0, 3, 9])), seq_len=4, eos_id=9))
    others = [{"ids": torch.arange(3), "text": "é"}, (1, 2.5, None), [b"x", True], np.array([2**31 + 5, 65_536])]
    return [*samples, *documents([0, 1, 3]), *others]


@pytest.mark.parametrize("buffer_size", [1, 3, 16, 100])
def test_goes_on_from_the_state_at_every_item_exactly(buffer_size):
    node = build(kinds(), buffer_size)
    states, items = [stored(node.state_dict())], []
    for item in node:
        items.append(item)
        states.append(stored(node.state_dict()))
    other = build(kinds(), buffer_size)
    for taken, state in enumerate(states):
        other.reset(state)
        assert same(stored(other.state_dict()), state)
        assert same(list(other), items[taken:])


@pytest.mark.parametrize("fail", range(10))
@pytest.mark.parametrize("buffer_size", [1, 4, 20])
def test_an_error_of_the_source_loses_no_item_and_its_state_goes_on(fail, buffer_size):
    whole = drawn(10, buffer_size)
    node, items = build(range(10), buffer_size, fails=[fail]), []
    with pytest.raises(OSError, match=f"cannot read item {fail}"):
        for item in node:
            items.append(item)
    state = stored(node.state_dict())
    other = build(range(10), buffer_size)
    other.reset(state)
    assert items + list(other) == whole
    assert items + list(node) == whole


def test_the_end_stays_also_in_the_state():
    node = build(range(3), 2)
    assert len(list(node)) == 3
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(node)
    node.reset(stored(node.state_dict()))
    assert list(node) == []


def test_starts_again_after_a_reset():
    node = build(range(30), 4)
    whole = list(node)
    node.reset()
    assert list(itertools.islice(node, 7)) == whole[:7]
    node.reset()
    assert list(node) == whole


def test_a_state_does_not_change_when_the_node_goes_on():
    node = build(kinds(), 4)
    states = [(node.state_dict(), stored(node.state_dict()))]
    for _ in node:
        states.append((node.state_dict(), stored(node.state_dict())))
    assert all(same(stored(kept), copied) for kept, copied in states)


def test_writing_to_an_item_that_was_handed_out_changes_no_state():
    node = build([{"ids": torch.full((3,), number)} for number in range(20)], 4)
    states, items = [], []
    for item in node:
        states.append(node.state_dict())
        items.append(item["ids"].tolist())
        item["ids"].fill_(-1)
    other = build([{"ids": torch.full((3,), number)} for number in range(20)], 4)
    for taken, state in enumerate(states):
        other.reset(state)
        assert [item["ids"].tolist() for item in other] == items[taken + 1 :]


def test_turns_an_item_into_plain_data_once():
    node = build([Sample(np.arange(1000) + number) for number in range(100)], 50)
    next(node)
    first, second = node.state_dict(), node.state_dict()
    assert all(one is other for one, other in zip(first["buffer"], second["buffer"], strict=True))
    next(node)
    kept = {id(entry) for entry in first["buffer"]} & {id(entry) for entry in node.state_dict()["buffer"]}
    assert len(kept) >= 48


@pytest.mark.parametrize(("dtype", "top"), [("u2", 97), ("u2", 65_535), ("i4", 65_536)])
def test_a_state_holds_the_buffer_as_narrow_as_it_came(dtype, top):
    node = build([Sample(np.full(4096, top, dtype))] * 40, 17)
    next(node)
    assert stored_bytes(node.state_dict()) < 16 * (4096 * np.dtype(dtype).itemsize + 1000) + 3000


def test_an_item_that_no_state_can_hold_is_refused_by_name():
    node = build([{1, 2}, {3, 4}], 2)
    next(node)
    with pytest.raises(TypeError, match="got set"):
        node.state_dict()


def test_refuses_a_buffer_of_nothing_and_a_seed_that_is_no_number():
    with pytest.raises(ValueError, match="buffer_size must be at least 1, got 0"):
        build([], 0)
    with pytest.raises(TypeError, match="seed must be an int"):
        build([], 1, seed="a")


@pytest.mark.parametrize(("size", "seed", "named"), [(3, 0, "buffer_size=2"), (2, 1, "seed=0"), (2, (0,), "seed=0")])
def test_refuses_the_state_of_another_setting_naming_both_values(size, seed, named):
    state = build(range(9), 2).state_dict()
    with pytest.raises(ValueError, match=f"Shuffler was saved with {named} and is now built with"):
        build(range(9), size, seed).reset(state)


def test_refuses_a_state_with_other_keys():
    state = build([], 2).state_dict()
    for wrong in ({key: state[key] for key in state if key != "drawn"}, {**state, "more": 1}, {}):
        with pytest.raises(ValueError, match="not a state of Shuffler"):
            build([], 2).reset(wrong)
