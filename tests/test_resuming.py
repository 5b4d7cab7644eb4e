"""A run that is stopped anywhere, and started anew at any size, goes on as if nothing had happened."""

import copy
import hashlib
import itertools
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import corpora
import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from sources import Items, documents, same, stored

from ibm_nodes import (
    Batcher,
    CausalLMCollator,
    Loader,
    Mixer,
    Packer,
    Prefetcher,
    Reader,
    Sharder,
    Shuffler,
    checkpoint,
    stats,
    storage,
)
from ibm_nodes.state import merge

EOS = 9
NUM_SHARDS = 4
BATCH = 3
WEIGHTS = {"web": 0.6, "code": 0.3, "books": 0.1}
LENGTHS = {"web": [3, 8, 0, 21, 5, 13] * 8, "code": [30, 2, 7] * 5, "books": [4, 11, 6]}


def readers(shard, num_shards, *, urls, **more):
    return {name: Reader(url, name=name, shard=shard, num_shards=num_shards, **more) for name, url in urls.items()}


def one_dataset(shard, num_shards, *, urls, **more):
    return Reader(urls["web"], name="web", shard=shard, num_shards=num_shards, **more)


def mixed(shard, num_shards, *, urls, **more):
    return Mixer(readers(shard, num_shards, urls=urls, **more), weights=WEIGHTS, seed=(0, shard))


def packed(shard, num_shards, *, seq_len=16, eos_id=EOS, **more):
    return Packer(mixed(shard, num_shards, **more), seq_len=seq_len, eos_id=eos_id)


def shuffled(shard, num_shards, *, buffer_size=5, **more):
    return Shuffler(packed(shard, num_shards, **more), buffer_size=buffer_size, seed=(0, shard))


GRAPHS = {"reader": one_dataset, "mixer": mixed, "packer": packed, "shuffler": shuffled}


def build(
    graph=shuffled, *, num_shards=NUM_SHARDS, rank=0, world_size=1, batch=BATCH, prefetch=4, drop_last=True, **more
):
    """A loader over a graph; its batches are lists of items."""
    node = Sharder(partial(graph, **more), num_shards=num_shards, rank=rank, world_size=world_size)
    node = Batcher(node, batch_size=batch, drop_last=drop_last)
    return Loader(Prefetcher(node, prefetch_factor=prefetch))


def take(nodes, count=None):
    return list(itertools.islice(nodes, count))


def run(make, count, state=None):
    """What a new loader gives from a state on, and the state after it."""
    with make() as loader:
        if state is not None:
            loader.load_state_dict(stored(state))
        return take(loader, count), loader.state_dict()


def assert_cuts(make, cuts, count):
    """Asserts that a loader which is cut after any of the given numbers of items goes on as if it were not."""
    golden, _ = run(make, count)
    for cut in cuts:
        head, state = run(make, cut)
        rest, _ = run(make, count - cut, state)
        assert same(head + rest, golden), f"cut after {cut} items"
    return golden


def tear(state):
    """Empties every dict and list of a state, and zeroes its tensors."""
    if isinstance(state, (dict, list, tuple)):
        for value in state.values() if isinstance(state, dict) else state:
            tear(value)
    if isinstance(state, (dict, list)):
        state.clear()
    if isinstance(state, torch.Tensor):
        state.zero_()


def split(item):
    """The (document, position) of each token of a document, a sample or a batch of them, EOS left out."""
    if isinstance(item, list):
        return [place for one in item for place in split(one)]
    return [divmod(token - 100_000, corpora.STRIDE) for token in item.tokens.tolist() if token != EOS]


def every_token(lengths, times=1):
    """How often each token is to be seen."""
    return Counter({(number, position): times for number, length in enumerate(lengths) for position in range(length)})


def write(root, name, lengths, *, first=0, batch=7, form="arrow", num_files=1):
    """A dataset whose document d has the tokens 100000 + 1000 * d + position."""
    rows = corpora.documents(lengths, first=100 + first)
    size = max(1, -(-len(rows) // num_files))
    files = [corpora.every(part, batch) for part in corpora.every(rows, size)]
    return corpora.write(f"file://{root}/{name}/", files, form)


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """Three datasets, of which the smallest has fewer documents than there are shards."""
    root, first, prefixes = tmp_path_factory.mktemp("data"), 0, {}
    for name, lengths in LENGTHS.items():
        prefixes[name] = write(root, name, lengths, first=first, form="parquet" if name == "code" else "arrow")
        first += len(lengths)
    return prefixes


class TestTheSameTopology:
    def test_a_state_taken_while_the_thread_is_ahead_goes_on_at_the_first_item_not_handed_out(self, urls):
        cases = list(itertools.product(GRAPHS.values(), (1, 4, 16)))
        golden = {graph: run(partial(build, graph, urls=urls, batch=1), 8)[0] for graph in GRAPHS.values()}
        loaders = [build(graph, urls=urls, batch=1, prefetch=prefetch) for graph, prefetch in cases]
        for loader in loaders:
            take(loader, 3)
        time.sleep(0.3)
        states = [loader.state_dict() for loader in loaders]
        saved = copy.deepcopy(states)
        for (graph, prefetch), loader, state in zip(cases, loaders, states, strict=True):
            assert same(take(loader, 5), golden[graph][3:]), f"{graph.__name__}, run on under {prefetch}"
            loader.close()
            rest, _ = run(partial(build, graph, urls=urls, batch=1, prefetch=prefetch), 5, state)
            assert same(rest, golden[graph][3:]), f"{graph.__name__}, resumed under {prefetch}"
        assert same(states, saved)

    def test_a_state_stays_as_it_was_while_the_run_goes_on(self, urls):
        with build(urls=urls) as loader:
            taken = []
            for _ in range(25):
                next(iter(loader))
                state = loader.state_dict()
                taken.append((state, copy.deepcopy(state)))
            assert all(same(state, before) for state, before in taken)
            assert len({pickle.dumps(state) for state, _ in taken}) == 25

    def test_a_state_that_is_torn_to_pieces_changes_nothing_in_the_batches_that_follow(self, urls):
        golden, _ = run(partial(build, urls=urls), 40)
        with build(urls=urls) as loader:
            found = take(loader, 4)
            tear(loader.state_dict())
            found += take(loader, 36)
            assert same(found, golden)

    def test_what_the_trainer_adds_to_a_state_does_not_get_into_the_run(self, urls):
        golden, _ = run(partial(build, urls=urls), 6)
        with build(urls=urls) as loader:
            found = take(loader, 4)
            state = loader.state_dict()
            clean = copy.deepcopy(state)
            state["step"] = 4
            assert same(loader.state_dict(), clean)
            loader.close()
            found += take(loader, 2)
            assert same(found, golden)

    def test_what_a_state_was_loaded_from_may_be_written_to_afterwards(self, urls):
        golden, _ = run(partial(build, urls=urls), 12)
        _, state = run(partial(build, urls=urls), 4)
        with build(urls=urls) as loader:
            state = stored(state)
            loader.load_state_dict(state)
            found = take(loader, 1)
            tear(state)
            assert same(found + take(loader, 7), golden[4:])

    def test_all_counters_agree_over_ten_saves_and_loads(self, urls):
        state, drawn = None, []
        for leg in range(1, 11):
            with build(mixed, urls=urls, batch=1) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                    assert same(loader.state_dict(), state)
                drawn += take(loader, 3)
                state = stored(loader.state_dict())
                shown = stats(loader)
            assert state["position"] == shown["position"] == 3 * leg == len(drawn)
            counted = Counter(document.name for (document,) in drawn)
            assert {name: entry["documents"] for name, entry in shown["datasets"].items()} == {
                name: counted[name] for name in WEIGHTS
            }
            tokens = sum(len(document.tokens) for (document,) in drawn)
            assert sum(entry["tokens"] for entry in shown["datasets"].values()) == tokens
        once, whole = run(partial(build, mixed, urls=urls, batch=1), 30)
        assert same(drawn, once)
        for key in ("credits", "tokens", "documents", "ended"):
            assert [shard[key] for _, _, shard in state["shards"].values()] == [
                shard[key] for _, _, shard in whole["shards"].values()
            ]

    def test_counters_after_a_load_and_one_more_item_are_those_of_a_run_without_the_load(self, urls):
        make = partial(build, urls=urls, batch=1)
        _, three = run(make, 3)
        _, four = run(make, 1, three)
        assert same(four, run(make, 4)[1])
        assert four["position"] == 4

    @pytest.mark.parametrize("cut", [37, 60, 100, 120, 239])
    def test_endless_data_cut_in_or_between_passes_has_no_empty_and_no_shortened_pass(self, tmp_path, cut):
        url = write(tmp_path, "d", [2] * 60)
        make = partial(build, one_dataset, urls={"web": url}, num_shards=1, batch=1)
        golden = assert_cuts(make, [cut], 240)
        for begin in range(0, 240, 60):
            assert Counter(split(golden[begin : begin + 60])) == every_token([2] * 60)

    def test_finite_data_ends_once_and_stays_at_its_end_after_a_load(self, tmp_path):
        url = write(tmp_path, "d", [2] * 20)
        make = partial(build, one_dataset, urls={"web": url}, num_shards=1, batch=1, epochs=4)
        golden = assert_cuts(make, [0, 19, 20, 21, 40, 79, 80], 1000)
        assert Counter(split(golden)) == every_token([2] * 20, 4)
        with make() as loader:
            assert len(list(loader)) == 80
            assert list(loader) == []
            state = loader.state_dict()
        assert run(make, None, state)[0] == []

    def test_a_new_pass_of_a_loop_that_was_left_early_goes_on_where_it_was_left(self, urls):
        golden, _ = run(partial(build, urls=urls), 3 + 5 + 1 + 4)
        _, state = run(partial(build, urls=urls), 3)
        with build(urls=urls) as loader:
            loader.load_state_dict(state)
            found = []
            for limit in (5, 1, 4):
                for number, batch in enumerate(loader, start=1):
                    found.append(batch)
                    if number == limit:
                        break
                assert loader.state_dict()["position"] == BATCH * (3 + len(found))
            assert same(found, golden[3:])

    def test_an_evaluation_over_the_same_few_batches_starts_from_the_same_state_each_time(self, urls):
        make = partial(build, urls=urls)
        with make() as loader:
            start = loader.state_dict()
            passes = []
            for _ in range(4):
                loader.load_state_dict(start)
                passes.append(take(loader, 3))
            assert all(same(one, passes[0]) for one in passes)
            assert same(passes[0], run(make, 3)[0])

    def test_only_the_pass_in_which_it_was_cut_is_shortened(self, tmp_path):
        url = write(tmp_path, "d", [1] * 128, num_files=4)
        make = partial(build, one_dataset, urls={"web": url}, num_shards=1, batch=2)
        golden, _ = run(make, 3 * 64)
        _, state = run(make, 61)
        rest, _ = run(make, 3 + 64 + 64, state)
        assert same(rest, golden[61:])
        for part in (golden[:61] + rest[:3], rest[3:67], rest[67:]):
            assert Counter(split(part)) == every_token([1] * 128)

    def test_a_shuffle_loses_nothing_wherever_it_is_cut_also_while_it_drains(self):
        items = documents([1] * 1000)
        golden = take(Shuffler(Items(items), buffer_size=100, seed=0))
        assert sorted(item.row for item in golden) == list(range(1000))
        assert [item.row for item in golden] != list(range(1000))
        for cut in (0, 20, 100, 500, 900, 950, 999, 1000):
            node = Prefetcher(Shuffler(Items(items), buffer_size=100, seed=0), prefetch_factor=4)
            head = take(node, cut)
            state = stored(node.state_dict())
            node.close()
            node = Shuffler(Items(items), buffer_size=100, seed=0)
            node.reset(state)
            assert same(head + take(node), golden), f"cut after {cut} items"

    def test_a_state_is_whole_before_the_first_item_right_after_a_load_and_when_few_shards_have_moved(self, urls):
        make = partial(build, urls=urls, num_shards=40, batch=1)
        golden, _ = run(make, 60)
        with make() as loader:
            states = {0: loader.state_dict()}
            take(loader, 1)
            states[1] = loader.state_dict()
            take(loader, 44)
            states[45] = loader.state_dict()
        for cut, state in list(states.items()):
            with make() as loader:
                loader.load_state_dict(stored(state))
                assert same(loader.state_dict(), state)
                again = loader.state_dict()
                take(loader, 1)
                assert same(again, state)
                states[cut + 1] = loader.state_dict()
        for cut, state in states.items():
            assert sorted(state["shards"]) == list(range(40)), f"after {cut} items"
            assert same(run(make, 60 - cut, state)[0], golden[cut:]), f"after {cut} items"

    @pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (3, 0), (3, 1), (3, 2)])
    def test_the_shard_that_was_next_is_next(self, urls, world_size, rank):
        make = partial(build, urls=urls, num_shards=9, world_size=world_size, rank=rank, batch=1)
        golden, _ = run(make, 12)
        for cut in range(9):
            head, state = run(make, cut)
            one, state = run(make, 1, state)
            rest, _ = run(make, 12 - cut - 1, state)
            assert same(head + one + rest, golden), f"cut after {cut} and {cut + 1} items"

    @pytest.mark.parametrize(("num_docs", "num_files", "num_shards"), [(3, 3, 2), (3, 1, 2), (7, 7, 4), (2, 1, 8)])
    def test_shards_that_have_ended_are_loaded_as_ended(self, tmp_path, num_docs, num_files, num_shards):
        url = write(tmp_path, "d", [3] * num_docs, num_files=num_files)
        make = partial(build, one_dataset, urls={"web": url}, num_shards=num_shards, batch=1, epochs=1)
        golden = assert_cuts(make, range(num_docs + 1), num_docs + 5)
        assert Counter(split(golden)) == every_token([3] * num_docs)

    @pytest.mark.parametrize("form", ["arrow", "parquet"])
    def test_going_to_a_place_is_the_same_as_reading_up_to_it(self, tmp_path, form):
        rows = corpora.documents([1 + number % 4 for number in range(21)], first=100)
        sizes = corpora.cut(rows, [7, 0, 1, 13])
        url = corpora.write(f"file://{tmp_path}/d/", [sizes], form)
        for num_shards, shard in ((1, 0), (2, 0), (2, 1)):
            make = partial(Reader, url, shard=shard, num_shards=num_shards, epochs=1)
            golden = take(make())
            for count in range(len(golden) + 1):
                used = make()
                take(used, count)
                node = make()
                node.reset(stored(used.state_dict()))
                assert same(take(node), golden[count:]), f"shard {shard} of {num_shards}, after {count}"
            assert len(golden) == 21 or num_shards == 2

    @pytest.mark.parametrize("bos_id", [None, 8])
    @pytest.mark.parametrize("buffer_size", [None, 1, 4])
    def test_open_samples_and_waiting_documents_are_in_the_state(self, bos_id, buffer_size):
        def make():
            node = Packer(Items(documents([5] * 20)), seq_len=8, eos_id=EOS, bos_id=bos_id)
            return node if buffer_size is None else Shuffler(node, buffer_size=buffer_size, seed=0)

        golden = take(make())
        tokens = [token for sample in golden for token in sample.tokens.tolist()]
        assert Counter(tokens) - Counter({8: 20, EOS: 20}) == Counter(
            1000 * (number + 1) + position for number in range(20) for position in range(5)
        )
        assert len(golden) == (15 if bos_id is None else 18)
        for cut in range(len(golden) + 1):
            used = make()
            head = take(used, cut)
            node = make()
            node.reset(stored(used.state_dict()))
            assert same(head + take(node), golden), f"cut after {cut} samples"

    def test_sources_that_are_passed_several_times_go_on_in_their_own_pass(self, tmp_path):
        sizes = {"a": 3, "b": 5, "c": 7, "d": 11, "e": 13}
        urls, first = {}, 0
        for name, size in sizes.items():
            urls[name] = write(tmp_path, name, [4] * size, first=first, batch=2)
            first += size

        def graph(shard, num_shards):
            return Mixer(readers(shard, num_shards, urls=urls), weights=dict.fromkeys(sizes, 1), seed=(0, shard))

        for rank in range(2):
            make = partial(build, graph, num_shards=4, rank=rank, world_size=2, batch=1)
            golden = assert_cuts(make, range(0, 121, 7), 120)
            epochs = Counter((document.name, document.epoch) for (document,) in golden)
            assert max(epoch for name, epoch in epochs if name == "a") >= 4

    def test_reads_that_come_back_in_any_order_do_not_change_the_order_of_documents(self, late_store):
        make = partial(build, one_dataset, urls={"web": late_store}, num_shards=5, batch=2, prefetch=2)
        golden = assert_cuts(make, [2, 10, 25], 50)
        assert same(golden, run(make, 50)[0])
        assert Counter(split(golden)) == every_token([3] * 100)


class LateFileSystem(MemoryFileSystem):
    """A store whose requests take their time, the first ones most."""

    protocol = "late"
    store = {}
    pseudo_dirs = [""]
    requests = itertools.count()

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("late://").strip("/")

    def cat_file(self, path, start=None, end=None, **kwargs):
        number = next(self.requests)
        time.sleep((0.03, 0.0, 0.01, 0.002)[number % 4])
        return super().cat_file(path, start=start, end=end, **kwargs)


@pytest.fixture
def late_store():
    fsspec.register_implementation("late", LateFileSystem, clobber=True)
    LateFileSystem.store.clear()
    files = [corpora.every(part, 5) for part in corpora.every(corpora.documents([3] * 100, first=100), 20)]
    return corpora.write("late://d/", files, "arrow")


class TestDataThatIsNotTheSameAnyMore:
    """A resume over other data or other settings is refused, and says what differs."""

    @pytest.fixture
    def cut(self, tmp_path):
        url = write(tmp_path, "d", [5] * 40, num_files=5)
        _, state = run(partial(build, one_dataset, urls={"web": url}), 2)
        return url, state

    def resume(self, url, state, graph=one_dataset, **more):
        return run(partial(build, graph, urls={"web": url}, **more), 40, state)

    @pytest.mark.parametrize("name", ["000-before.arrow", "zzz.arrow"])
    def test_a_file_that_was_added_is_named_as_a_difference(self, cut, name):
        url, state = cut
        storage.write(f"{url}{name}", corpora.arrow(corpora.tables([corpora.documents([5], first=900)])))
        with pytest.raises(ValueError, match=r"5 files .* 6 files") as caught:
            self.resume(url, state)
        assert url.rstrip("/") in str(caught.value)

    def test_a_file_that_is_gone_is_named_as_a_difference(self, cut):
        url, state = cut
        os.unlink(f"{url.removeprefix('file://')}004.arrow")
        with pytest.raises(ValueError, match=r"5 files .* 4 files"):
            self.resume(url, state)

    def test_a_file_of_another_length_is_named_as_a_difference(self, cut):
        url, state = cut
        storage.write(f"{url}002.arrow", corpora.arrow(corpora.tables([corpora.documents([5] * 300, first=900)])))
        with pytest.raises(ValueError, match=r"5 files of (\d+) bytes .* 5 files of (?!\1)\d+ bytes"):
            self.resume(url, state)

    def test_a_file_of_another_name_is_a_difference(self, cut):
        url, state = cut
        path = url.removeprefix("file://")
        os.rename(f"{path}001.arrow", f"{path}001b.arrow")
        with pytest.raises(ValueError, match="listing"):
            self.resume(url, state)

    def test_a_difference_is_found_again_at_each_try_and_nothing_is_lost_when_it_is_gone(self, cut):
        url, state = cut
        golden, _ = run(partial(build, one_dataset, urls={"web": url}), 12)
        storage.write(f"{url}zzz.arrow", corpora.arrow(corpora.tables([corpora.documents([5], first=900)])))
        with build(one_dataset, urls={"web": url}) as loader:
            for _ in range(2):
                loader.load_state_dict(stored(state))
                with pytest.raises(ValueError, match="listing"):
                    next(iter(loader))
            os.unlink(f"{url.removeprefix('file://')}zzz.arrow")
            loader.load_state_dict(stored(state))
            assert same(take(loader, 10), golden[2:])

    @pytest.mark.parametrize(
        ("setting", "values"),
        [
            ("eos_id", (EOS, 7)),
            ("buffer_size", (5, 6)),
            ("seed", (0, 1)),
            ("column", ("tokens", "ids")),
        ],
    )
    def test_a_setting_that_shapes_the_order_is_named_with_both_values(self, urls, setting, values):
        before, after = values
        _, state = run(partial(build, urls=urls, **{setting: before}), 3)
        with pytest.raises(ValueError, match=f"{setting}={before!r}.*{setting}={after!r}"):
            run(partial(build, urls=urls, **{setting: after}), 1, state)

    def test_another_number_of_logical_shards_is_named_with_both_values(self, urls):
        _, state = run(partial(build, urls=urls), 3)
        with pytest.raises(ValueError, match="num_shards=4.*num_shards=8"):
            run(partial(build, urls=urls, num_shards=8), 1, state)

    def test_the_state_of_another_graph_is_refused(self, urls):
        _, state = run(partial(build, packed, urls=urls), 3)
        with pytest.raises(ValueError, match="not a state of Shuffler"):
            run(partial(build, shuffled, urls=urls), 1, state)

    def test_a_state_that_was_refused_leaves_a_new_loader_ready_for_the_right_one(self, urls):
        golden, _ = run(partial(build, urls=urls), 8)
        _, state = run(partial(build, urls=urls), 3)
        for wrong in ({}, {**state, "num_shards": 8}, {**state, "shards": {}}, {"position": 0}):
            with build(urls=urls) as loader:
                with pytest.raises(ValueError, match=r"num_shards|state"):
                    loader.load_state_dict(wrong)
                loader.load_state_dict(stored(state))
                assert same(take(loader, 5), golden[3:])

    def test_a_state_that_was_refused_is_never_given_out_as_the_state_of_a_run(self, urls):
        golden, _ = run(partial(build, urls=urls), 8)
        with build(urls=urls) as loader:
            take(loader, 3)
            state = copy.deepcopy(loader.state_dict())
            with pytest.raises(ValueError, match="num_shards"):
                loader.load_state_dict({**state, "num_shards": 8})
            try:
                found = loader.state_dict()
            except ValueError:
                found = state
            assert same(found, state)
            loader.load_state_dict(state)
            assert same(take(loader, 5), golden[3:])

    def test_after_a_state_was_refused_a_new_loader_says_so_again_or_begins_at_the_beginning(self, urls):
        golden, state = run(partial(build, urls=urls), 3)
        with build(urls=urls) as loader:
            with pytest.raises(ValueError, match="num_shards"):
                loader.load_state_dict({**state, "num_shards": 8})
            try:
                found = take(loader, 3)
            except ValueError as error:
                assert "num_shards=8" in str(error)
            else:
                assert same(found, golden)


class TestOtherSizes:
    def legs(self, plan, *, graph, num_shards, batch=1, **more):
        """The global stream over legs of (world size, items of all ranks), saved and loaded between them."""
        stream, state, position = [], None, 0
        for world_size, count in plan:
            ranks = [
                build(graph, num_shards=num_shards, rank=rank, world_size=world_size, batch=batch, **more)
                for rank in range(world_size)
            ]
            if state is not None:
                for loader in ranks:
                    loader.load_state_dict(stored(state))
            for number in range(position, position + count):
                stream += next(iter(ranks[number % world_size]))
            position += count
            states = [loader.state_dict() for loader in ranks]
            for loader in ranks:
                loader.close()
            state = merge(states)
        return stream

    def test_each_document_comes_once_over_four_world_sizes(self, tmp_path):
        url = write(tmp_path, "d", [3] * 120, num_files=12)
        more = {"graph": one_dataset, "num_shards": 12, "urls": {"web": url}, "prefetch": 2}
        plan = [(4, 40), (2, 26), (6, 30), (3, 24)]
        stream = self.legs(plan, **more)
        assert Counter(split(stream)) == every_token([3] * 120)
        assert same(stream, self.legs([(1, 120)], **more))
        later = self.legs([*plan, (12, 120)], **more)
        assert Counter(split(later[120:])) == every_token([3] * 120)

    @pytest.mark.parametrize("after", [1, 2, 3, 8, 24])
    def test_a_state_of_four_ranks_is_dealt_to_any_other_number(self, urls, after):
        more = {"graph": shuffled, "num_shards": 24, "urls": urls, "prefetch": 2}
        golden = self.legs([(1, 96)], **more)
        assert same(self.legs([(4, 48), (after, 48)], **more), golden)

    def test_a_world_size_that_cannot_be_used_is_refused_with_both_numbers_and_one_that_can(self, urls):
        with pytest.raises(ValueError, match="num_shards=24.*got 5.*4"):
            build(urls=urls, num_shards=24, world_size=5)

    def test_a_state_of_some_of_the_ranks_is_refused_and_never_loaded_in_part(self, urls):
        ranks = [build(urls=urls, num_shards=24, rank=rank, world_size=4, prefetch=1) for rank in range(4)]
        for loader in ranks:
            take(loader, 2)
        states = [loader.state_dict() for loader in ranks]
        for loader in ranks:
            loader.close()
        for world_size in (1, 2, 8):
            refused = 0
            for rank in range(world_size):
                loader = build(urls=urls, num_shards=24, rank=rank, world_size=world_size)
                needed = {shard % 4 for shard in range(rank, 24, world_size)}
                if 3 in needed:
                    with pytest.raises(ValueError, match=r"lacks the logical shards \[\d"):
                        loader.load_state_dict(merge(states[:3]))
                    refused += 1
            assert refused
        with pytest.raises(ValueError, match="both hold logical shard"):
            merge([*states, states[1]])

    def test_states_of_different_steps_are_refused(self, urls):
        ranks = [build(urls=urls, num_shards=24, rank=rank, world_size=2, prefetch=1) for rank in range(2)]
        take(ranks[0], 2)
        take(ranks[1], 3)
        with pytest.raises(ValueError, match="disagree about 'position' .12 and 18."):
            merge(loader.state_dict() for loader in ranks)
        for loader in ranks:
            loader.close()

    def test_finite_shards_of_unequal_length_are_rescaled_exactly_or_refused(self, tmp_path):
        lengths = [1 + 3 * (number % 5) for number in range(23)]
        url = write(tmp_path, "d", lengths, batch=3)
        graph = partial(one_dataset, urls={"web": url}, epochs=1)
        exact = 0
        for cut in range(0, 24, 2):
            ranks = [Sharder(graph, num_shards=4, rank=rank, world_size=2) for rank in range(2)]
            stream = []
            for number in range(cut):
                stream += take(ranks[number % 2], 1)
            try:
                state = merge(node.state_dict() for node in ranks)
            except ValueError:
                continue
            for rank in range(4):
                node = Sharder(graph, num_shards=4, rank=rank, world_size=4)
                node.reset(stored(state))
                stream += take(node)
            assert Counter(split(stream)) == every_token(lengths), f"cut at {cut}"
            exact += 1
        assert exact >= 5

    def test_a_checkpoint_without_the_file_of_a_rank_names_it(self, urls, tmp_path):
        url = f"file://{tmp_path}/saved"
        ranks = [build(urls=urls, num_shards=24, rank=rank, world_size=4, prefetch=1) for rank in range(4)]
        for step in (10, 20):
            for loader in ranks:
                take(loader, 1)
                checkpoint.save(loader, url, step=step).result()
        for loader in ranks:
            loader.close()
        next(tmp_path.glob("saved/step-00000020/*-00002-of-00004.pt")).unlink()
        new = build(urls=urls, num_shards=24)
        with pytest.raises(FileNotFoundError, match="-00002-of-00004.pt"):
            checkpoint.load(new, url, step=20)
        assert checkpoint.load(new, url)[:2] == (10, 12)
        next(tmp_path.glob("saved/step-00000010/*-00001-of-00004.pt")).unlink()
        for missing in ("error", "start"):
            with pytest.raises(FileNotFoundError, match="-00001-of-00004.pt"):
                checkpoint.load(new, url, missing=missing)

    def test_the_depth_of_prefetching_may_change_at_every_resume(self, urls):
        golden = {rank: run(partial(build, urls=urls, rank=rank, world_size=2), 20)[0] for rank in range(2)}
        for rank in range(2):
            found, state = [], None
            for prefetch in (1, 16, 2, 4):
                items, state = run(partial(build, urls=urls, rank=rank, world_size=2, prefetch=prefetch), 5, state)
                found += items
            assert same(found, golden[rank])

    def test_the_batch_size_may_change_at_every_resume(self, tmp_path):
        url = write(tmp_path, "d", [2] * 77, num_files=3)
        more = {"urls": {"web": url}, "num_shards": 6, "epochs": 1}
        golden = [item for (item,) in run(partial(build, one_dataset, batch=1, **more), None)[0]]
        assert Counter(split(golden)) == every_token([2] * 77)
        for drop_last in (True, False):
            found, state = [], None
            for batch, count in ((8, 3), (12, 2), (5, None)):
                make = partial(build, one_dataset, batch=batch, drop_last=drop_last, **more)
                batches, state = run(make, count, state)
                found += [item for items in batches for item in items]
                assert same(found, golden[: len(found)]), f"batches of {batch}"
            assert len(found) == (77 - (77 - 48) % 5 if drop_last else 77)

    def test_what_a_dropped_last_batch_held_comes_with_a_smaller_batch(self, tmp_path):
        url = write(tmp_path, "d", [2] * 10)
        more = {"urls": {"web": url}, "num_shards": 1, "epochs": 1}
        golden = [item for (item,) in run(partial(build, one_dataset, batch=1, **more), None)[0]]
        head, state = run(partial(build, one_dataset, batch=8, **more), None)
        rest, _ = run(partial(build, one_dataset, batch=1, **more), None, state)
        assert same([item for items in head + rest for item in items], golden)

    @pytest.mark.parametrize("num_files", [1, 2, 5, 7])
    def test_every_document_comes_once_at_every_size_of_everything(self, tmp_path, num_files):
        for num_docs in range(1, 42):
            lengths = [1 + number % 3 for number in range(num_docs)]
            url = write(tmp_path, f"{num_docs}", lengths, batch=1 + num_docs % 4, num_files=num_files)
            graph = partial(one_dataset, urls={"web": url}, epochs=1)
            for world_size in (1, 2, 3, 4):
                found = []
                for rank in range(world_size):
                    found += take(Sharder(graph, num_shards=12, rank=rank, world_size=world_size))
                assert Counter(split(found)) == every_token(lengths), f"{num_docs} documents on {world_size} ranks"


class TestLoading:
    def test_a_state_that_is_loaded_before_the_first_item_is_used(self, urls):
        golden, _ = run(partial(build, urls=urls), 12)
        _, state = run(partial(build, urls=urls), 5)
        with build(urls=urls) as loader:
            loader.state_dict()
            loader.load_state_dict(stored(state))
            assert same(take(loader, 7), golden[5:])

    @pytest.mark.parametrize("again", [False, True])
    def test_a_state_that_is_loaded_after_some_items_is_used(self, urls, again):
        golden, _ = run(partial(build, urls=urls), 12)
        _, state = run(partial(build, urls=urls), 5)
        with build(urls=urls) as loader:
            iterator = iter(loader)
            assert same(take(iterator, 3), golden[:3])
            loader.load_state_dict(stored(state))
            assert same(take(iter(loader) if again else iterator, 7), golden[5:])

    def test_a_loader_that_has_ended_can_be_set_back(self, tmp_path):
        url = write(tmp_path, "d", [2] * 12)
        make = partial(build, one_dataset, urls={"web": url}, num_shards=1, epochs=1)
        _, state = run(make, 1)
        with make() as loader:
            golden = list(loader)
            loader.load_state_dict(stored(state))
            assert same(list(loader), golden[1:])

    def test_a_new_process_goes_on_from_any_state(self, urls, tmp_path):
        for cut in (0, 1, 2, 5, 9):
            head, state = run(partial(trained, urls), cut)
            torch.save((cut, urls, state), tmp_path / f"{cut}.pt")
        golden, _ = run(partial(trained, urls), 12)
        wanted = {cut: digest(golden[cut:]) for cut in (0, 1, 2, 5, 9)}
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-P", __file__, str(tmp_path)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert (child.returncode, child.stderr) == (0, "")
        found = dict(line.split() for line in child.stdout.splitlines())
        assert found == {str(cut): text for cut, text in wanted.items()}


def trained(urls):
    """A loader whose batches are tensors, as a training run has it."""
    node = Sharder(partial(shuffled, urls=urls), num_shards=NUM_SHARDS, rank=0, world_size=1)
    return Loader(
        Prefetcher(Batcher(node, batch_size=3, collate=CausalLMCollator(shift_labels=True)), prefetch_factor=4)
    )


def digest(batches):
    data = b"".join(batch[key].numpy().tobytes() for batch in batches for key in ("input_ids", "labels"))
    return hashlib.sha256(data).hexdigest()


def main():
    for path in sorted(Path(sys.argv[1]).glob("*.pt")):
        cut, urls, state = torch.load(path, weights_only=True)
        with trained(urls) as loader:
            loader.load_state_dict(state)
            sys.stdout.write(f"{cut} {digest(take(loader, 12 - cut))}\n")


if __name__ == "__main__":
    main()
