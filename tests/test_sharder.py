import itertools
import random
from functools import partial

import pytest
from sources import Counted, Items, numbers, stored

from ibm_nodes import Sharder
from ibm_nodes.listing import current_session
from ibm_nodes.sharder import NUM_AHEAD
from ibm_nodes.state import merge

GRID = [(num, world) for num in (1, 2, 3, 4, 6, 12) for world in range(1, num + 1) if num % world == 0]


def build(num_shards, rank, world_size, graph=numbers, **options):
    return Sharder(graph, num_shards=num_shards, rank=rank, world_size=world_size, **options)


def ranks(num_shards, world_size, state=None, **options):
    nodes = [build(num_shards, rank, world_size, **options) for rank in range(world_size)]
    if state is not None:
        for node in nodes:
            node.reset(state)
    return nodes


def save(nodes):
    return stored(merge([stored(node.state_dict()) for node in nodes]))


def item(g, num_shards):
    """Item g of the global stream of endless shards."""
    return (g % num_shards, g // num_shards)


def of(lengths):
    return lambda shard, num_shards: Items(Counted(shard, lengths[shard]))


@pytest.mark.parametrize(("num_shards", "world_size"), GRID)
def test_a_rank_yields_every_world_size_th_item_of_the_global_stream(num_shards, world_size):
    for rank, node in enumerate(ranks(num_shards, world_size)):
        assert list(itertools.islice(node, 20)) == [item(rank + k * world_size, num_shards) for k in range(20)]


@pytest.mark.parametrize(("num_shards", "world_size"), GRID)
def test_goes_on_at_any_world_size_with_the_smallest_item_at_or_past_the_position(num_shards, world_size):
    after = [other for num, other in GRID if num == num_shards]
    for drawn in range(2 * num_shards // world_size + 2):
        nodes = ranks(num_shards, world_size)
        for node in nodes:
            assert len(list(itertools.islice(node, drawn))) == drawn
        state = save(nodes)
        position = drawn * world_size
        assert state["position"] == position
        for other in after:
            for rank, node in enumerate(ranks(num_shards, other, state)):
                first = position + (rank - position) % other
                assert list(itertools.islice(node, 5)) == [item(first + k * other, num_shards) for k in range(5)]
                assert node.state_dict()["position"] == position + 5 * other


@pytest.mark.parametrize("plan", range(20))
def test_any_plan_of_world_sizes_draws_and_loads_yields_the_global_stream(plan):
    draw = random.Random(plan)
    num_shards, state, position = draw.choice([6, 12, 24]), None, 0
    for _ in range(12):
        world_size = draw.choice([size for size in range(1, num_shards + 1) if num_shards % size == 0])
        nodes = ranks(num_shards, world_size, state)
        steps = draw.choice([0, 1, 2, 5])
        items = [[next(node) for node in nodes] for _ in range(steps)]
        assert sorted(sum(items, [])) == sorted(item(position + k, num_shards) for k in range(steps * world_size))
        position += steps * world_size
        state = save(nodes)
        assert state["position"] == position


def test_an_ended_shard_is_passed_over_and_the_end_is_when_all_have_ended():
    for lengths in itertools.product(range(4), repeat=3):
        node = build(3, 0, 1, of(lengths))
        rounds = [(shard, turn) for turn in range(4) for shard in range(3) if turn < lengths[shard]]
        assert list(node) == rounds
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(node)
        for taken in range(len(rounds) + 1):
            node.reset()
            assert list(itertools.islice(node, taken)) == rounds[:taken]
            other = build(3, 0, 1, of(lengths))
            other.reset(stored(node.state_dict()))
            assert list(other) == rounds[taken:]


@pytest.mark.parametrize("lengths", [(2, 0, 1, 3, 3, 0), (0,) * 6, (1, 2, 3, 4, 5, 6), (5, 5, 0, 0, 5, 5)], ids=str)
def test_with_a_filler_the_global_stream_keeps_its_places_at_every_world_size(lengths):
    def expected(g):
        shard, index = item(g, 6)
        return (shard, index) if index < lengths[shard] else "filler"

    for first, second in itertools.product([1, 2, 3, 6], repeat=2):
        for drawn in range(5):
            nodes = ranks(6, first, graph=of(lengths), filler="filler")
            taken = [list(itertools.islice(node, drawn)) for node in nodes]
            for rank, items in enumerate(taken):
                assert items == [expected(rank + k * first) for k in range(len(items))]
            if any(len(items) < drawn for items in taken):
                continue
            state, position = save(nodes), drawn * first
            for rank, node in enumerate(ranks(6, second, state, graph=of(lengths), filler="filler")):
                start = position + (rank - position) % second
                rest = list(node)
                assert rest == [expected(start + k * second) for k in range(len(rest))]
                end = start + len(rest) * second
                owned = range(rank, 6, second)
                assert all(expected(g) == "filler" for g in range(end, end + 60) if g % second == rank), owned


def test_with_a_filler_only_whole_rounds_of_it_mark_the_end():
    assert list(build(2, 0, 1, of([1, 3]), filler=None)) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    items = list(build(2, 0, 1, of([1, 3]), filler="-"))
    assert items[:6] == [(0, 0), (1, 0), "-", (1, 1), "-", (1, 2)]
    assert set(items[6:]) <= {"-"}


@pytest.mark.parametrize("lengths", [(1, 3, 3, 3), (4, 0, 2, 1), (0, 5, 0, 5)], ids=str)
def test_states_taken_after_shards_have_ended_go_on_at_any_world_size(lengths):
    everything = sorted((shard, turn) for shard in range(4) for turn in range(lengths[shard]))
    for first, second in itertools.product([1, 2, 4], repeat=2):
        for drawn in range(6):
            nodes = ranks(4, first, graph=of(lengths))
            taken = [item for node in nodes for item in itertools.islice(node, drawn)]
            if len(taken) < drawn * first:  # a rank has nothing left, and the ranks are not at one step any more
                continue
            rest = [item for node in ranks(4, second, save(nodes), graph=of(lengths)) for item in node]
            assert sorted(taken + rest) == everything


def test_an_error_of_a_graph_loses_nothing_and_the_state_goes_on():
    def graph(shard, num_shards):
        return Items(Counted(shard, 5), fails=[shard])

    whole = list(build(3, 0, 1, of([5, 5, 5])))
    node, items, errors = build(3, 0, 1, graph), [], 0
    while True:
        try:
            items.append(next(node))
        except OSError:
            errors += 1
            other = build(3, 0, 1, of([5, 5, 5]))
            other.reset(stored(node.state_dict()))
            assert items + list(other) == whole
        except StopIteration:
            break
    assert errors == 3
    assert items == whole


def test_a_graph_that_cannot_be_reset_is_reset_again_by_the_next_call():
    fails = {0: 1, 2: 2}

    class Fragile(Items):
        def reset(self, initial_state=None):
            if fails.get(self.items.shard, 0):
                fails[self.items.shard] -= 1
                raise ConnectionError(f"no answer for shard {self.items.shard}")
            super().reset(initial_state)

    node = build(3, 0, 1, lambda shard, num_shards: Fragile(Counted(shard, 2)))
    items, errors = [], 0
    while len(items) < 6:
        try:
            items.append(next(node))
        except ConnectionError:
            errors += 1
    assert errors == 3
    assert items == [item(g, 3) for g in range(6)]


def test_nothing_is_built_before_the_first_item():
    built = []

    def graph(shard, num_shards):
        built.append(shard)
        return numbers(shard, num_shards)

    node = build(12, 1, 3, graph)
    state = node.state_dict()
    shards = {shard: (0, False, None) for shard in (1, 4, 7, 10)}
    assert state == {"position": 0, "num_shards": 12, "schedule": None, "shards": shards}
    node.reset()
    node.reset(merge([other.state_dict() for other in ranks(12, 3)]))
    node.state_dict()
    assert built == []
    next(node)
    assert built == [1, 4, 7, 10]


def test_resets_graphs_some_visits_ahead_each_once():
    built = []

    def graph(shard, num_shards):
        assert num_shards == 120
        built.append(shard)
        return numbers(shard, num_shards)

    node = build(120, 2, 3, graph)
    owned = list(range(2, 120, 3))
    for taken in range(1, 100):
        next(node)
        assert sorted(built) == owned[: min(len(owned), taken - 1 + NUM_AHEAD)]


def test_resets_ahead_from_where_a_state_stands():
    built = []

    def graph(shard, num_shards):
        built.append(shard)
        return numbers(shard, num_shards)

    nodes = ranks(120, 3)
    for node in nodes:
        list(itertools.islice(node, 35))
    node = build(120, 0, 1, graph)
    node.reset(save(nodes))
    assert next(node) == item(105, 120)
    assert built == [shard % 120 for shard in range(105, 105 + NUM_AHEAD)]


def test_graphs_of_a_sharder_share_one_listing_session_and_those_of_another_do_not():
    sessions = []

    class Listed(Items):
        def reset(self, initial_state=None):
            super().reset(initial_state)
            sessions.append(current_session())

    def graph(shard, num_shards):
        return Listed(Counted(shard, 9))

    node = build(20, 0, 1, graph)
    list(itertools.islice(node, 40))
    assert len(sessions) == 20
    assert len(set(map(id, sessions))) == 1
    next(build(20, 0, 1, graph))
    assert sessions[-1] is not sessions[0]
    node.reset()
    next(node)
    assert sessions[-1] is not sessions[0]
    assert current_session() not in sessions


def test_takes_again_only_the_states_of_shards_that_have_moved():
    taken = []

    class Watched(Items):
        def get_state(self):
            taken.append(self.items.shard)
            return super().get_state()

    node = build(8, 0, 2, lambda shard, num_shards: Watched(Counted(shard, 100)))
    list(itertools.islice(node, 4))
    first = node.state_dict()
    assert sorted(taken) == [0, 2, 4, 6]
    taken.clear()
    next(node)
    second = node.state_dict()
    assert taken == [0]
    assert node.state_dict() == second
    assert taken == [0]
    assert all(first["shards"][shard] is second["shards"][shard] for shard in (2, 4, 6))


def test_a_state_does_not_change_when_the_node_goes_on():
    node = build(6, 0, 2)
    kept = [(node.state_dict(), stored(node.state_dict()))]
    for _ in range(9):
        next(node)
        kept.append((node.state_dict(), stored(node.state_dict())))
    assert all(state == copied for state, copied in kept)
    kept[-1][0]["shards"].clear()
    kept[-1][0]["position"] = 0
    assert node.state_dict() == kept[-1][1]


def test_starts_again_after_a_reset():
    node = build(4, 1, 2)
    for taken in (0, 1, 5):
        node.reset()
        assert list(itertools.islice(node, taken)) == [item(1 + 2 * k, 4) for k in range(taken)]


@pytest.mark.parametrize(
    ("num_shards", "world_size", "smaller"),
    [(256, 255, 128), (12, 5, 4), (12, 7, 6), (6, 100, 6), (7, 2, 1), (960, 7, 6)],
)
def test_a_world_size_that_does_not_divide_names_the_next_smaller_one_that_does(num_shards, world_size, smaller):
    with pytest.raises(ValueError, match=f"divide num_shards={num_shards}, got {world_size}: .*does is {smaller}$"):
        build(num_shards, 0, world_size)


@pytest.mark.parametrize("rank", [-1, 4, 100])
def test_refuses_a_rank_outside_the_world(rank):
    with pytest.raises(ValueError, match=f"rank must be from 0 to world_size - 1 = 3, got {rank}"):
        build(12, rank, 4)


@pytest.mark.parametrize(("num_shards", "world_size"), [(0, 1), (1, 0), (-4, 2)])
def test_refuses_numbers_below_one(num_shards, world_size):
    with pytest.raises(ValueError, match="must be at least 1, got"):
        build(num_shards, 0, world_size)


@pytest.mark.parametrize("left_out", ["rank", "world_size", "num_shards"])
def test_has_no_default_for_who_it_is(left_out):
    arguments = {"num_shards": 4, "rank": 0, "world_size": 1}
    del arguments[left_out]
    with pytest.raises(TypeError, match=left_out):
        Sharder(numbers, **arguments)


def test_refuses_the_state_of_one_rank_where_another_is_needed():
    nodes = ranks(12, 4)
    for node in nodes:
        next(node)
    state = nodes[1].state_dict()
    build(12, 1, 4).reset(state)
    with pytest.raises(ValueError, match=r"lacks the logical shards \[0, 4, 8\] that rank 0 of 4 owns"):
        build(12, 0, 4).reset(state)
    with pytest.raises(ValueError, match=r"lacks the logical shards \[3, 7, 11\] that rank 1 of 2 owns"):
        build(12, 1, 2).reset(state)


def test_refuses_the_state_of_another_number_of_shards_and_of_other_nodes():
    state = save(ranks(12, 4))
    with pytest.raises(ValueError, match="Sharder was saved with num_shards=12 and is now built with num_shards=24"):
        build(24, 0, 4).reset(state)
    for wrong in ({}, {**state, "more": 1}, {key: state[key] for key in state if key != "position"}):
        with pytest.raises(ValueError, match="not a state of Sharder"):
            build(12, 0, 4).reset(wrong)


def test_takes_a_partial_of_a_function_as_its_graph():
    node = build(2, 0, 1, partial(numbers, length=1))
    assert list(node) == [(0, 0), (1, 0)]
