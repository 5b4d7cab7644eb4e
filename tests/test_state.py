import copy

import pytest
from sources import stored

from ibm_nodes.state import check_keys, check_settings, merge


class Node:
    pass


def states():
    return [{"shards": {rank: {"row": rank}, rank + 3: None}, "position": 12, "num_shards": 6} for rank in range(3)]


def test_unites_the_shards_and_keeps_what_is_equal():
    merged = merge(states())
    assert merged == {
        "shards": {0: {"row": 0}, 1: {"row": 1}, 2: {"row": 2}, 3: None, 4: None, 5: None},
        "position": 12,
        "num_shards": 6,
    }
    assert stored(merged) == merged


def test_takes_any_order_and_any_iterable_and_changes_none_of_its_states():
    given = states()
    before = copy.deepcopy(given)
    assert merge(reversed(given)) == merge(iter(given))
    assert merge([given[1]]) == given[1]
    assert given == before


def test_a_merged_state_is_a_state_that_merges():
    first, second, third = states()
    assert merge([merge([first, second]), third]) == merge(states())


def test_says_which_states_disagree_about_what():
    given = states()
    given[2]["position"] = 15
    with pytest.raises(ValueError, match=r"states 0 and 2 disagree about 'position' \(12 and 15\)"):
        merge(given)


@pytest.mark.parametrize("number", [0, 1])
def test_a_key_that_one_of_them_lacks_is_a_disagreement(number):
    given = states()
    del given[number]["num_shards"]
    with pytest.raises(ValueError, match="states 0 and 1 disagree about 'num_shards'"):
        merge(given)


def test_a_shard_in_two_states_is_refused_with_its_number_and_theirs():
    given = [*states(), states()[1]]
    with pytest.raises(ValueError, match="states 1 and 3 both hold logical shard 1"):
        merge(given)


def test_refuses_no_states_and_states_without_shards():
    with pytest.raises(ValueError, match="states must not be empty"):
        merge([])
    with pytest.raises(ValueError, match="state 1 has no 'shards'"):
        merge([states()[0], {"position": 12}])


def test_keys_must_be_exactly_those_of_the_node():
    check_keys(Node(), {"a": 1, "b": 2}, ("b", "a"))
    with pytest.raises(ValueError, match=r"not a state of Node: missing keys \['b'\], unknown keys \['c'\]"):
        check_keys(Node(), {"a": 1, "c": 2}, ("a", "b"))
    with pytest.raises(ValueError, match=r"unknown keys \['7'\]"):
        check_keys(Node(), {7: 1}, ())


def test_a_setting_that_differs_is_named_with_both_values():
    check_settings(Node(), {"seed": (0, 1), "size": 3}, seed=(0, 1), size=3)
    with pytest.raises(ValueError, match=r"Node was saved with seed=\(0, 1\) and is now built with seed=2"):
        check_settings(Node(), {"seed": (0, 1)}, seed=2)
