"""Samples that are left out: the stream without them is the same at any world size, wherever it is saved and loaded."""

import itertools
import json

import corpora
import pytest
import torch
from sources import Counted, Items, numbers, stored

from ibm_nodes import Sharder, cli, flags, load_recipe
from ibm_nodes.checkpoint import load, save
from ibm_nodes.recipes.pretrain import pretrain
from ibm_nodes.sharder import merge_ranges, sample_number
from ibm_nodes.state import merge

NUM_SHARDS, BATCH = 12, 12
WORLD_SIZES = (1, 2, 3, 4, 6)
SKIP = ((24, 48), (60, 72))


def ranks(world_size, state=None, graph=numbers, **options):
    nodes = [
        Sharder(graph, num_shards=NUM_SHARDS, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]
    if state is not None:
        for node in nodes:
            node.reset(state)
    return nodes


def step(nodes):
    """A global batch, in the order of the global stream."""
    drawn = [list(itertools.islice(node, BATCH // len(nodes))) for node in nodes]
    return sorted(itertools.chain.from_iterable(drawn), key=number_of)


def number_of(item):
    shard, turn = item
    return turn * NUM_SHARDS + shard


def merged(nodes):
    return stored(merge([stored(node.state_dict()) for node in nodes]))


def kept(skip, first=0, steps=9):
    """The numbers of the samples of each step, by their definition."""
    stream = (number for number in itertools.count(first) if not any(begin <= number < end for begin, end in skip))
    return [list(itertools.islice(stream, BATCH)) for _ in range(steps)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_batches_are_those_of_the_stream_without_the_samples(world_size):
    nodes = ranks(world_size, skip=SKIP)
    assert [list(map(number_of, step(nodes))) for _ in range(9)] == kept(SKIP)
    assert merged(nodes)["position"] == 9 * BATCH + 24 + 12


@pytest.mark.parametrize("before", WORLD_SIZES)
@pytest.mark.parametrize("cut", range(7))
def test_a_save_before_between_and_after_the_ranges_goes_on_at_any_world_size(before, cut):
    nodes = ranks(before, skip=SKIP)
    for _ in range(cut):
        step(nodes)
    state = merged(nodes)
    for after in WORLD_SIZES:
        others = ranks(after, state, skip=SKIP)
        assert [list(map(number_of, step(others))) for _ in range(3)] == kept(SKIP)[cut : cut + 3]
        assert merged(others)["position"] == merged(ranks_at(cut + 3))["position"]


def ranks_at(steps):
    nodes = ranks(1, skip=SKIP)
    for _ in range(steps):
        step(nodes)
    return nodes


@pytest.mark.parametrize("before", WORLD_SIZES)
def test_a_save_inside_a_range_of_a_run_that_did_not_skip_leaves_out_the_rest_of_it(before):
    nodes = ranks(before)
    for _ in range(3):
        step(nodes)
    state = merged(nodes)
    assert state["position"] == 36
    for after in WORLD_SIZES:
        others = ranks(after, state, skip=SKIP)
        assert [list(map(number_of, step(others))) for _ in range(3)] == kept(SKIP, first=36, steps=3)
        assert merged(others)["position"] == 48 + 12 + 12 + 24


def test_a_save_right_before_a_range_does_not_force_the_next_start_to_skip_it():
    nodes = ranks(3, skip=[(24, 48)])
    step(nodes), step(nodes)
    state = merged(nodes)
    assert state["position"] == 24
    assert [list(map(number_of, step(ranks(2, state))))] == kept((), first=24, steps=1)


def test_the_position_of_a_run_that_skipped_is_that_of_one_that_did_not():
    skipped, whole = ranks(2, skip=[(24, 48)]), ranks(4)
    for _ in range(3):
        step(skipped)
    for _ in range(5):
        step(whole)
    assert merged(skipped) == merged(whole)


@pytest.mark.parametrize("skip", [[(6, 18)], [(5, 13)], [(24, 25)], [(12, 24), (30, 42)]])
def test_ranges_that_ranks_would_not_meet_between_two_batches_are_refused(skip):
    for node in ranks(4, skip=skip):
        with pytest.raises(
            ValueError, match="skip must leave out whole global batches, got samples .* turns of 4 ranks"
        ):
            node.reset(None)


def test_ranges_that_lie_behind_do_not_matter():
    nodes = ranks(3)
    for _ in range(2):
        step(nodes)
    others = ranks(4, merged(nodes), skip=[(1, 2), (5, 23)])
    assert [list(map(number_of, step(others)))] == kept((), first=24, steps=1)


def test_ranges_are_sorted_and_joined():
    assert merge_ranges([(60, 72), (24, 36), (36, 48), (62, 70)]) == ((24, 48), (60, 72))
    for wrong in [(5, 5), (6, 5), (-1, 5)]:
        with pytest.raises(
            ValueError, match="skip must be ranges .begin, end. of sample numbers with 0 <= begin < end"
        ):
            merge_ranges([wrong])


def test_the_number_of_a_sample_is_found_without_drawing():
    for position in range(80):
        stream = (n for n in itertools.count(position) if not any(begin <= n < end for begin, end in SKIP))
        for index, number in enumerate(itertools.islice(stream, 60)):
            assert sample_number(SKIP, position, index) == number


def test_an_error_while_skipping_loses_nothing():
    nodes = ranks(
        1, graph=lambda shard, num_shards: Items(Counted(shard, 99), fails={2} if shard == 5 else ()), skip=SKIP
    )
    assert [list(map(number_of, step(nodes))) for _ in range(2)] == kept(SKIP)[:2]
    with pytest.raises(OSError, match="cannot read item 2"):
        step(nodes)
    assert [list(map(number_of, step(nodes))) for _ in range(3)] == kept(SKIP)[2:5]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shards_that_end_within_a_range_yield_the_filler_or_nothing(world_size):
    def graph(shard, num_shards):
        return Items(Counted(shard, 3 if shard < 6 else 9))  # those below 6 end before number 36

    filled = ranks(world_size, graph=graph, skip=SKIP, filler=(0, -1))
    batches = [step(filled) for _ in range(3)]
    assert [number_of(item) for item in batches[2]] == 6 * [-NUM_SHARDS] + [54, 55, 56, 57, 58, 59]
    nodes = ranks(world_size, graph=graph, skip=SKIP)
    drawn = sorted(number_of(item) for node in nodes for item in node)
    every = [*range(36), *(number for number in range(36, 9 * NUM_SHARDS) if number % NUM_SHARDS >= 6)]
    assert drawn == [number for number in every if not any(begin <= number < end for begin, end in SKIP)]


# The recipe and the command line


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    root = f"file://{tmp_path_factory.mktemp('data')}/"
    rows = {
        name: corpora.documents([3, 90, 17, 1, 200, 40] * 20, first=first)
        for name, first in (("web", 1), ("code", 301))
    }
    return {name: corpora.write(f"{root}{name}/", [corpora.every(rows[name], 9)] * 2, "arrow") for name in rows}


def loaders(datasets, world_size, skip=(), **more):
    settings = {"weights": {"web": 3, "code": 1}, "seq_len": 32, "eos_id": 999_999, "num_shards": 24, "buffer_size": 3}
    return [
        pretrain(datasets, **settings, **{"global_batch_size": 12, **more}, rank=rank, world_size=world_size, skip=skip)
        for rank in range(world_size)
    ]


def batches(group, count):
    """Global batches, of which each position is a multiple of the world size."""
    found = []
    for _ in range(count):
        parts = [next(iter(loader))["input_ids"] for loader in group]
        found.append(torch.stack(parts, 1).flatten(0, 1))
    return found


def close(group):
    for loader in group:
        loader.close()


@pytest.fixture(scope="module")
def stream(datasets):
    group = loaders(datasets, 1)
    found = batches(group, 12)
    close(group)
    return found


@pytest.mark.parametrize("after", WORLD_SIZES)
@pytest.mark.parametrize("before, cut", [(1, 1), (2, 2), (3, 3), (4, 5), (6, 2), (6, 6)])
def test_checkpoints_before_at_and_after_the_range_go_on_with_the_same_batches(
    datasets, stream, tmp_path, before, cut, after
):
    skip = [(24, 36), (60, 84)]
    expected = [batch for number, batch in enumerate(stream) if number not in (2, 5, 6)]
    target = f"file://{tmp_path}/run"
    group = loaders(datasets, before, skip)
    assert all(map(torch.equal, batches(group, cut), expected))
    for future in [save(loader, target, step=cut) for loader in group]:
        future.result(30)
    close(group)
    group = loaders(datasets, after, skip)
    for loader in group:
        found = load(loader, target)
        assert found.position == {1: 12, 2: 24, 3: 48, 5: 96, 6: 108}[cut]
        assert found.changes == []
    assert all(map(torch.equal, batches(group, 3), expected[cut:]))
    close(group)


def test_a_spike_is_left_out_of_a_run_that_goes_on_from_before_it_or_from_its_midst(datasets, stream, tmp_path):
    group = loaders(datasets, 2)
    for step in (1, 2, 3):
        batches(group, 1)
        for future in [save(loader, f"file://{tmp_path}/run", step=step) for loader in group]:
            future.result(30)
    close(group)
    for step, expected in ((1, [stream[1], stream[4]]), (3, [stream[4], stream[5]])):
        group = loaders(datasets, 3, [(24, 48)])
        for loader in group:
            found = load(loader, f"file://{tmp_path}/run", step=step)
            assert found.changes == ["Sharder.skip was () and is now ((24, 48),)"]
        assert all(map(torch.equal, batches(group, 2), expected))
        attempts = {save(loader, f"file://{tmp_path}/other", step=9).target.split("-")[-4] for loader in group}
        assert len(attempts) == 1
        close(group)


def test_the_recipe_takes_whole_batches_alone(datasets):
    with pytest.raises(ValueError, match="whole global batches of 12 samples, got 24 to 30, which are 6 samples"):
        loaders(datasets, 2, [(24, 30)])
    with pytest.raises(ValueError, match="got samples 30 to 42 at position 0: they are no whole turns of 4 ranks"):
        loaders(datasets, 4, [(30, 42)])[0].state_dict()


def flags_of(datasets, *more):
    data = [part for name, url in datasets.items() for part in ("--data", f"{name}={url}")]
    data += ["--weight", "web=3", "--weight", "code=1", "--seq-len", "32", "--eos-id", "999999"]
    return [*data, "--global-batch-size", "12", "--num-shards", "24", "--buffer-size", "3", *more]


@pytest.mark.parametrize("given", [["--skip", "24:48"], ["--skip", "3:5@12"], ["--skip", "24:36", "--skip", "7:9@6"]])
def test_the_command_line_takes_samples_and_steps(datasets, capsys, given):
    digests = []
    for more in ([], given):
        assert cli.main(["run", "pretrain", *flags_of(datasets, *more), "--digest", "--json", "--steps", "5"]) == 0
        digests.append([line.split()[-1] for line in capsys.readouterr().err.splitlines() if line.startswith("step ")])
    whole, left = digests
    assert left[:3] == [*whole[:2], whole[4]]


@pytest.mark.parametrize("text", ["5", "5:", "5:5", "7:3", "0:2@12", "1:2@0", "-1:3", "a:b", "1:2@x"])
def test_what_is_no_range_is_refused(datasets, text):
    parser = flags.parser("pretrain", load_recipe("pretrain"))
    with pytest.raises(ValueError, match="--skip: .*must be BEGIN:END, samples from 0 on, or BEGIN:END@N"):
        parser.parse_args([*flags_of(datasets), f"--skip={text}"])


def test_a_trace_of_a_run_that_skipped_names_what_it_drew(datasets, capsys, tmp_path, stream):
    target, skip = f"file://{tmp_path}/run", [(24, 36), (60, 84)]
    group = loaders(datasets, 2, skip)
    for step in range(1, 6):
        batches(group, 1)
        if step in (1, 3, 5):
            for future in [save(loader, target, step=step) for loader in group]:
                future.result(30)
    close(group)
    common = flags_of(datasets, "--skip", "24:36", "--skip", "60:84", "--checkpoint", target, "--json")
    for step, number in [(1, 0), (2, 1), (3, 3), (4, 4), (5, 7), (6, 8)]:
        assert cli.main(["trace", "pretrain", *common, "--step", str(step)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["begin"], found["end"], found["changes"]) == (12 * number, 12 * number + 12, [])
        for sample, tokens in zip(found["samples"], stream[number].tolist(), strict=True):
            first = sample["documents"][0]
            if tokens[0] != 999_999:
                assert first["begin"] == tokens[0] % corpora.STRIDE
            assert sample["sample"] == 12 * number + sample["row"]
