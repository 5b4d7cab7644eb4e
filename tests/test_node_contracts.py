"""What every node promises: exact states, one order at every size, errors that lose nothing, items as they were."""

import itertools
import threading
from collections import Counter, namedtuple
from functools import partial

import corpora
import fsspec
import numpy as np
import pytest
import torch
from fault_proxy import Fault, FaultProxy
from fsspec.implementations.memory import MemoryFileSystem
from sources import Items, documents, numbers, same, stored
from torchdata.nodes import BaseNode

from ibm_nodes import (
    Batcher,
    CausalLMCollator,
    Loader,
    Mixer,
    Packer,
    Prefetcher,
    PromptMasker,
    Reader,
    Sharder,
    Shuffler,
)
from ibm_nodes.testing import assert_rescales, assert_resumes

EOS, BOS = 2, 1


def take(node, count=None):
    return list(itertools.islice(node, count))


def mix(lengths, fails=(), weights=(2, 1)):
    """A mix of two sources, of which the second has half the documents."""
    sources = {
        "a": Items([one._replace(name="a") for one in documents(lengths)], fails),
        "b": Items([one._replace(name="b", url="b") for one in documents(lengths[::2])], fails),
    }
    return Mixer(sources, weights=dict(zip("ab", weights, strict=True)), seed=7)


def pack(source, seq_len=4, bos_id=None):
    return Packer(source, seq_len=seq_len, eos_id=EOS, bos_id=bos_id)


def uneven(shard, num_shards):
    return numbers(shard, num_shards, 1 + shard % 4)


def shuffle(source, buffer_size=3):
    return Shuffler(source, buffer_size=buffer_size, seed=5)


def pack_whole(source, strategy="best_fit"):
    return Packer(source, seq_len=4, eos_id=EOS, strategy=strategy, num_open=3)


STACKS = {
    "batcher": partial(Batcher, batch_size=2),
    "packer": pack,
    "pad": partial(pack_whole, strategy="pad"),
    "best-fit": pack_whole,
    "masker": lambda source: pack_whole(PromptMasker(source, response_ids=[2001, 2002])),
    "shuffler": shuffle,
    "mixer": lambda source: Mixer({"a": source}, weights={"a": 1}),
    "prefetcher": partial(Prefetcher, prefetch_factor=2),
    "sharder": lambda source: Sharder(lambda *_: source, num_shards=1, rank=0, world_size=1),
    "all": lambda source: Loader(Prefetcher(Batcher(shuffle(pack(source)), batch_size=2), prefetch_factor=2)),
}


def root_of(node):
    return node.root if isinstance(node, Loader) else node


class TestEveryNode:
    """All of a small space of sources and settings."""

    @pytest.mark.parametrize("length", range(1, 8))
    @pytest.mark.parametrize("buffer_size", [1, 2, 3, 9])
    def test_a_shuffler_resumes(self, length, buffer_size):
        items = documents([1 + number % 3 for number in range(length)])
        assert_resumes(lambda: shuffle(Items(items), buffer_size))

    @pytest.mark.parametrize("bos_id", [None, BOS])
    @pytest.mark.parametrize("seq_len", [1, 2, 3, 8, 40])
    def test_a_packer_resumes(self, seq_len, bos_id):
        for lengths in [(1,), (0, 1), (5, 0, 0, 1), (1, 2, 3, 4), (7, 8, 9, 3), (17, 1), (3, 3, 3, 3)]:
            assert_resumes(lambda of=lengths: pack(Items(documents(of)), seq_len, bos_id), num_items=60)

    @pytest.mark.parametrize("weights", [(1, 1), (2, 1), (1, 50), (1, 0)])
    def test_a_mixer_resumes(self, weights):
        for lengths in [(1,), (2, 3), (5, 1, 1, 4, 2), (3,) * 30]:
            assert_resumes(lambda of=lengths: mix(of, weights=weights), num_items=50)

    @pytest.mark.parametrize("drop_last", [True, False])
    @pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
    def test_a_batcher_resumes(self, batch_size, drop_last):
        make = partial(Batcher, batch_size=batch_size, drop_last=drop_last)
        assert_resumes(lambda: make(Items(documents([1, 2, 3] * 3))))
        assert_resumes(lambda: make(shuffle(pack(mix((3, 1, 4, 1, 5))))))
        collated = partial(make, collate=CausalLMCollator(shift_labels=True))
        assert_resumes(lambda: collated(pack(Items(documents([9, 2, 16, 1, 4])))))

    @pytest.mark.parametrize("world_size", [1, 2, 6])
    @pytest.mark.parametrize("filler", [None, ("none", 0)])
    def test_a_sharder_resumes(self, world_size, filler):
        for rank in range(world_size):
            make = partial(Sharder, num_shards=6, rank=rank, world_size=world_size, filler=filler)
            assert_resumes(lambda build=make: build(numbers), num_items=15)
            assert_resumes(lambda build=make: build(uneven), num_items=30)

    @pytest.mark.parametrize("prefetch_factor", [1, 2, 16])
    def test_a_prefetcher_resumes(self, prefetch_factor):
        make = partial(Prefetcher, prefetch_factor=prefetch_factor)
        assert_resumes(lambda: make(Items(documents([1] * 9))))
        assert_resumes(lambda: make(shuffle(pack(mix((3, 1, 4, 1, 5))))), num_items=8)
        assert_resumes(lambda: make(make(Batcher(shuffle(Items(list(range(9)))), batch_size=2))))

    @pytest.mark.parametrize("form", ["arrow", "parquet"])
    @pytest.mark.parametrize("epochs", [1, 2, None])
    def test_a_reader_resumes(self, tmp_path, form, epochs):
        rows = corpora.documents([3, 0, 1, 0, 2, 5, 1, 0, 0, 4, 1, 2])
        files = [corpora.cut(rows[:7], [2, 1, 4]), corpora.every(rows[7:], 2)]
        url = corpora.write(f"file://{tmp_path}/d/", files, form)
        for num_shards in (1, 2, 5):
            for shard in range(num_shards):
                make = partial(Reader, url, shard=shard, num_shards=num_shards, epochs=epochs)
                if epochs is None or take(make(), 1):
                    assert_resumes(make, num_items=16)

    def test_graphs_are_the_same_at_every_world_size(self, tmp_path):
        rows = corpora.documents([1 + number % 5 for number in range(150)])
        url = corpora.write(
            f"file://{tmp_path}/d/", [corpora.every(part, 7) for part in corpora.every(rows, 50)], "arrow"
        )
        small = corpora.write(f"file://{tmp_path}/small/", [[corpora.documents([4, 4, 4], first=900)]], "parquet")

        def read(shard, num_shards, url=url):
            return Reader(url, name="d", shard=shard, num_shards=num_shards)

        def mixed(shard, num_shards):
            sources = {"d": read(shard, num_shards), "small": read(shard, num_shards, small)}
            return Mixer(sources, weights={"d": 3, "small": 1}, seed=(0, shard))

        for graph in (
            read,
            mixed,
            lambda *of: pack(mixed(*of)),
            lambda *of: shuffle(pack(mixed(*of), seq_len=7), buffer_size=2),
            lambda *of: shuffle(pack_whole(mixed(*of)), buffer_size=2),
            lambda *of: pack_whole(mixed(*of), strategy="pad"),
            lambda *of: shuffle(read(*of)),
            lambda *of: Batcher(numbers(*of), batch_size=2),
        ):
            assert_rescales(graph, num_shards=6, num_items=30, cuts=(0, 12))

    @pytest.mark.parametrize("name", [*STACKS, "filled"])
    def test_saving_and_loading_before_and_after_every_item_changes_nothing(self, name):
        def make():
            if name == "filled":
                return Sharder(uneven, num_shards=6, rank=0, world_size=2, filler=("none", 0))
            return STACKS[name](Items(documents([1 + number % 4 for number in range(14)])))

        golden = take(make())
        found, state = [], None
        for _ in golden:
            for _ in range(2):
                node = make()
                if state is not None:
                    root_of(node).reset(state)
                state = stored(node.state_dict())
            found += take(node, 1)
            state = stored(node.state_dict())
        assert same(found, golden)
        root_of(node).reset(state)
        assert take(node) == []

    @pytest.mark.slow
    def test_every_stack_of_three_nodes_resumes(self):
        layers = {
            "shuffler": shuffle,
            "batcher": partial(Batcher, batch_size=2, drop_last=False),
            "prefetcher": partial(Prefetcher, prefetch_factor=2),
            "sharder": lambda node: Sharder(lambda *_: node, num_shards=1, rank=0, world_size=1),
        }
        for names in itertools.product(layers, repeat=3):
            for length in range(1, 12):

                def make(names=names, length=length):
                    node = Items(list(range(length)))
                    for name in names:
                        node = layers[name](node)
                    return node

                assert_resumes(make)


class Counting(BaseNode):
    """Yields 0, 1, 2, ... and is right; what stands below is broken in one way each."""

    def __init__(self, length=1000):
        super().__init__()
        self.length = length

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.position = 0 if initial_state is None else self.load(initial_state)

    def load(self, state):
        return state["position"]

    def next(self):
        if self.position >= self.length:
            raise StopIteration
        self.position += 1
        return self.position - 1

    def get_state(self):
        return {"position": self.position}


class LosesAnItem(Counting):
    def load(self, state):
        return state["position"] + 1


class RepeatsAnItem(Counting):
    def load(self, state):
        return max(0, state["position"] - 1)


class LosesAnItemLate(Counting):
    def load(self, state):
        return state["position"] + (state["position"] == 13)


class KeepsALiveBuffer(Counting):
    """Its state is the very list that it goes on writing to."""

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.seen = [self.position]

    def load(self, state):
        return state["seen"][0]

    def next(self):
        item = super().next()
        self.seen[0] = self.position
        return item

    def get_state(self):
        return {"seen": self.seen}


class KeepsALiveTensor(KeepsALiveBuffer):
    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.seen = torch.tensor(self.seen)

    def load(self, state):
        return int(state["seen"][0])


class SavesAFunction(Counting):
    def get_state(self):
        return {"position": self.position, "key": lambda: 0}


class SavesANumpyNumber(Counting):
    def get_state(self):
        return {"position": np.int64(self.position)}


class SavesAClassOfItsOwn(Counting):
    def get_state(self):
        return {"position": self.position, "options": Options(1)}


Options = namedtuple("Options", "size")


class MovesWhenItsStateIsTaken(Counting):
    def get_state(self):
        self.position += 1
        return {"position": self.position - 1}


class DoesNotBeginAgain(Counting):
    def reset(self, initial_state=None):
        before = getattr(self, "position", 0)
        super().reset(initial_state)
        if initial_state is None:
            self.position = before


class ForgetsToLoadWhenUsed(Counting):
    def reset(self, initial_state=None):
        before = getattr(self, "position", None)
        super().reset(initial_state)
        if before and initial_state is not None:
            self.position = before


class ChangesTheClass(Counting):
    """Its items are float after a load."""

    def load(self, state):
        return float(state["position"])


class ChangesTheDtype(Counting):
    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.dtype = np.int32 if initial_state is None else np.int64

    def next(self):
        return np.array([super().next()], self.dtype)


class EndsEarlyAfterALoad(Counting):
    def load(self, state):
        self.length = 15
        return super().load(state)


class CountsFromTheLoad(Counting):
    """Its position is that since the last load, so that a second load goes back."""

    def load(self, state):
        self.base = state["position"]
        return self.base

    def get_state(self):
        return {"position": self.position - getattr(self, "base", 0)}


class ForgetsWhatItLoadedUntilTheFirstItem(Counting):
    """Its state right after a load is that of the beginning."""

    def load(self, state):
        self.moved = False
        return super().load(state)

    def next(self):
        self.moved = True
        return super().next()

    def get_state(self):
        return super().get_state() if getattr(self, "moved", True) else {"position": 0}


class TestBrokenNodes:
    """The assertions catch what they are for."""

    def test_a_node_that_is_right_passes(self):
        assert_resumes(Counting)
        assert_resumes(lambda: Counting(7))

    @pytest.mark.parametrize(
        ("node", "words"),
        [
            (LosesAnItem, "item 0 differs resumed after 0 items"),
            (RepeatsAnItem, "item 0 differs resumed after 1 items"),
            (LosesAnItemLate, "item 0 differs resumed after 13 items"),
            (KeepsALiveBuffer, "live buffer"),
            (KeepsALiveTensor, "live buffer"),
            (MovesWhenItsStateIsTaken, "after the state at item 0 was taken"),
            (DoesNotBeginAgain, r"after reset\(None\)"),
            (ForgetsToLoadWhenUsed, "resumed in a used node"),
            (ChangesTheDtype, "resumed after 0 items"),
            (EndsEarlyAfterALoad, "15 items resumed after 0 items, expected 20"),
        ],
    )
    def test_a_broken_node_is_caught_and_told_where(self, node, words):
        with pytest.raises(AssertionError, match=words):
            assert_resumes(node)

    @pytest.mark.parametrize("node", [ChangesTheClass, CountsFromTheLoad, ForgetsWhatItLoadedUntilTheFirstItem])
    def test_a_node_that_is_broken_after_a_load_is_caught(self, node):
        with pytest.raises(AssertionError, match="resumed"):
            assert_resumes(node)

    @pytest.mark.parametrize("node", [SavesAFunction, SavesANumpyNumber, SavesAClassOfItsOwn])
    def test_a_state_that_could_not_be_read_back_is_caught(self, node):
        with pytest.raises(Exception, match=r"(?i)pickle|weights_only|unsupported|local object"):
            assert_resumes(node)

    def test_a_node_without_items_proves_nothing(self):
        with pytest.raises(AssertionError, match="yields nothing"):
            assert_resumes(lambda: Counting(0))

    def test_graphs_that_are_right_pass(self):
        assert_rescales(numbers)
        assert_rescales(numbers, num_shards=6, num_items=24, cuts=(0, 6))

    def test_an_order_that_depends_on_the_rank_is_caught(self):
        owned = []

        def graph(shard, num_shards):
            owned.append(shard)
            return Items([(shard, len(owned), number) for number in range(100)])

        with pytest.raises(AssertionError, match="at world size"):
            assert_rescales(graph)

    def test_shards_that_share_their_place_are_caught(self):
        shared = itertools.count()

        class Shared(Counting):
            def next(self):
                super().next()
                return next(shared)

        with pytest.raises(AssertionError, match="at world size"):
            assert_rescales(lambda *_: Shared())

    @pytest.mark.parametrize("node", [LosesAnItem, RepeatsAnItem])
    def test_a_graph_that_loses_or_repeats_at_a_change_of_size_is_caught(self, node):
        with pytest.raises(AssertionError, match="from world size 1 to 1 at item"):
            assert_rescales(lambda *_: node())

    def test_a_graph_with_a_live_buffer_is_caught_by_resuming_its_sharder(self):
        with pytest.raises(AssertionError, match="live buffer"):
            assert_resumes(lambda: Sharder(lambda *_: KeepsALiveBuffer(), num_shards=2, rank=0, world_size=1))


class FlakyReset(Items):
    """The first reset after each ``fail()`` raises."""

    fails_next = False

    def reset(self, initial_state=None):
        if self.fails_next:
            self.fails_next = False
            raise PermissionError("not yet")
        super().reset(initial_state)


class TestErrors:
    """An error is shown as it is, once, and loses nothing."""

    @pytest.mark.parametrize("name", STACKS)
    def test_an_error_of_the_source_at_any_item_loses_none(self, name):
        items = documents([1 + number % 4 for number in range(12)])
        golden = take(STACKS[name](Items(items)))
        assert len(golden) > 4
        for places in ([0], [1], [5], [11], [12], [0, 1, 2], [3, 7, 8, 12]):
            node = STACKS[name](Items(items, places))
            iterator, found, errors = iter(node), [], 0
            while True:
                try:
                    found.append(next(iterator))
                except OSError as error:
                    assert str(error).startswith("cannot read item")
                    errors += 1
                except StopIteration:
                    break
            assert errors == len(places), places
            assert same(found, golden), places

    def test_an_error_of_one_of_two_sources_loses_no_document_and_no_draw(self):
        lengths = [1 + number % 4 for number in range(20)]
        golden = take(mix(lengths))
        for place in range(10):
            node, found, errors = mix(lengths, [place]), [], 0
            while errors < 3:
                try:
                    found.append(next(node))
                except OSError:
                    errors += 1
                except StopIteration:
                    break
            assert errors == 2
            assert same(found, golden), place

    @pytest.mark.parametrize("name", STACKS)
    @pytest.mark.parametrize("prior", [False, True])
    def test_a_reset_that_failed_works_when_the_cause_is_gone(self, name, prior):
        golden = take(STACKS[name](Items(documents([3] * 9))))
        source = FlakyReset(documents([3] * 9))
        node = STACKS[name](source)
        root = root_of(node)
        if prior:
            take(node, 2)
        source.fails_next = True
        with pytest.raises(PermissionError, match="not yet"):
            root.reset(None)
            next(root)  # some reset their source late
        root.reset(None)
        assert same(take(node), golden)

    @pytest.mark.parametrize("name", STACKS)
    def test_a_load_that_failed_works_when_the_cause_is_gone(self, name):
        golden = take(STACKS[name](Items(documents([3] * 9))))
        used = STACKS[name](Items(documents([3] * 9)))
        take(used, 2)
        state = stored(used.state_dict())
        source = FlakyReset(documents([3] * 9))
        source.fails_next = True
        node = STACKS[name](source)
        root = root_of(node)
        with pytest.raises(PermissionError, match="not yet"):
            root.reset(state)
            next(root)
        root.reset(state)
        assert same(take(node), golden[2:])
        if isinstance(used, Loader):
            used.close()

    @pytest.mark.parametrize("name", STACKS)
    def test_a_first_item_that_failed_at_the_start_comes_at_the_next_call(self, name):
        golden = take(STACKS[name](Items(documents([3] * 9))))
        source = FlakyReset(documents([3] * 9))
        source.fails_next = True
        node = STACKS[name](source)
        iterator = iter(node)
        with pytest.raises(PermissionError, match="not yet"):
            next(iterator)
        assert same(take(iterator), golden)

    def test_a_store_that_says_no_once_is_asked_again_at_the_next_call(self, s3, bucket):
        rows = corpora.documents([3] * 20)
        url = corpora.write(
            f"{bucket.url}d/", [[part] for part in corpora.every(rows, 5)], "arrow", bucket.storage_options
        )
        with FaultProxy(s3.endpoint) as proxy:
            options = {**bucket.storage_options, "endpoint_url": proxy.endpoint}
            golden = take(Reader(url, shard=0, num_shards=1, epochs=1, storage_options=options))
            for where in (lambda request: request.is_listing(), lambda request: request.is_read()):
                node = Reader(url, shard=0, num_shards=1, epochs=1, storage_options=options)
                node = Loader(Prefetcher(Batcher(node, batch_size=2), prefetch_factor=3))
                proxy.spoil([Fault(status=403, code="AccessDenied")], where)
                with node, pytest.raises(PermissionError):
                    take(node)
                with node:
                    state = node.state_dict()
                    rest = [one for batch in node for one in batch]
                    assert same(rest, golden[20 - len(rest) :])
                    node.load_state_dict(state)
                    assert same([one for batch in node for one in batch], rest)


def raises_stop_iteration(*arguments, **more):
    """What a user's function does that calls a bare ``next`` on something empty."""
    return next(iter(()))


class StoppingFileSystem(MemoryFileSystem):
    """A store whose client calls a bare ``next`` on something empty, for one file."""

    protocol = "stopping"
    store = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("stopping://").strip("/")

    def cat_file(self, path, start=None, end=None, **kwargs):
        return raises_stop_iteration() if "002" in path else super().cat_file(path, start=start, end=end, **kwargs)


class TestAnEndThatIsNone:
    """A StopIteration which escapes from somebody's function is an error, not an end of data."""

    @pytest.mark.parametrize("prefetch", [False, True])
    def test_one_from_collate_is_an_error(self, prefetch):
        calls = itertools.count()
        collate = lambda batch: raises_stop_iteration() if next(calls) == 2 else batch  # noqa: E731
        node = Batcher(Items(list(range(6))), batch_size=1, collate=collate)
        node = Prefetcher(node, prefetch_factor=2) if prefetch else node
        assert take(node, 2) == [[0], [1]]
        with pytest.raises(RuntimeError, match="collate raised StopIteration"):
            next(node)
        assert take(node) == [[2], [3], [4], [5]]

    @pytest.mark.parametrize("prefetch", [False, True])
    def test_one_from_the_function_that_builds_a_graph_is_an_error(self, prefetch):
        node = Sharder(raises_stop_iteration, num_shards=6, rank=0, world_size=1)
        node = Prefetcher(node, prefetch_factor=2) if prefetch else node
        with pytest.raises(RuntimeError):
            next(node)

    def test_one_from_the_reset_of_a_graph_is_an_error(self):
        class Peeks(Items):
            def reset(self, initial_state=None):
                super().reset(initial_state)
                raises_stop_iteration()

        node = Sharder(lambda *_: Peeks([1, 2, 3]), num_shards=2, rank=0, world_size=1)
        with pytest.raises(RuntimeError):
            next(node)

    @pytest.mark.parametrize("prefetch", [False, True])
    def test_one_from_the_client_of_a_store_is_an_error(self, prefetch):
        fsspec.register_implementation("stopping", StoppingFileSystem, clobber=True)
        files = [[part] for part in corpora.every(corpora.documents([3] * 20), 5)]
        url = corpora.write("stopping://d/", files, "arrow")
        node = Reader(url, shard=0, num_shards=1, epochs=1)
        node = Prefetcher(node, prefetch_factor=2) if prefetch else node
        with pytest.raises(RuntimeError):
            take(node)

    def test_one_from_the_state_of_a_source_is_an_error(self):
        class Broken(Items):
            def get_state(self):
                return raises_stop_iteration() if self.position == 3 else super().get_state()

        node = Prefetcher(Broken(list(range(6))), prefetch_factor=2)
        with pytest.raises(RuntimeError):
            assert take(node) == list(range(6))


class TestStarting:
    """Starting is done once, and consumes nothing before the first item."""

    @pytest.fixture
    def store(self, s3, bucket):
        rows = corpora.documents([3] * 24)
        url = corpora.write(
            f"{bucket.url}d/", [[part] for part in corpora.every(rows, 8)], "arrow", bucket.storage_options
        )
        with FaultProxy(s3.endpoint) as proxy:
            yield url, {**bucket.storage_options, "endpoint_url": proxy.endpoint}, proxy

    def loader(self, url, options):
        node = Sharder(partial(finite, url, storage_options=options), num_shards=3, rank=0, world_size=1)
        return Loader(Prefetcher(Batcher(node, batch_size=2), prefetch_factor=2))

    def test_each_part_of_each_file_is_read_once_at_the_start_and_at_a_resume(self, store):
        url, options, proxy = store
        with self.loader(url, options) as loader:
            head = take(loader, 5)
            state = stored(loader.state_dict())
            rest = take(loader)
        seen = Counter((request.path, request.range) for request in proxy.reads)
        assert set(seen.values()) == {1}
        assert len({path for path, _ in seen}) == 3
        assert sum(request.is_listing() for request in proxy.requests) == 1
        proxy.spoil([])
        with self.loader(url, options) as loader:
            loader.load_state_dict(state)
            assert proxy.requests == []
            assert same(take(loader), rest)
        again = Counter((request.path, request.range) for request in proxy.reads)
        assert set(again.values()) == {1}
        assert again.keys() <= seen.keys()
        assert sum(request.is_listing() for request in proxy.requests) == 1
        assert len(head) + len(rest) == 12

    def test_asking_for_an_iterator_many_times_starts_nothing_and_loses_nothing(self, store):
        url, options, proxy = store
        with self.loader(url, options) as loader:
            golden = take(loader)
        proxy.spoil([])
        before = set(threading.enumerate())
        with self.loader(url, options) as loader:
            iterators = [iter(loader) for _ in range(3)]
            assert set(threading.enumerate()) <= before
            assert proxy.requests == []
            found = [next(iterators[number % 3]) for number in range(6)]
            assert sum(thread.name.startswith("ibm_nodes-prefetch") for thread in threading.enumerate()) == 1
            assert same(found + take(loader), golden)
        assert set(Counter((request.path, request.range) for request in proxy.reads).values()) == {1}


def finite(url, shard, num_shards, **more):
    return Reader(url, name="d", shard=shard, num_shards=num_shards, epochs=1, **more)


def strange_items():
    return [
        {"text": "x"},
        {"text": "x" * 5, "nested": {"deep": [1, (2, None)], "flag": True}},
        {"text": "é" * 50, "empty": torch.zeros(0, 4), "point": torch.tensor(3.5)},
        ["", b"\0\1", None, -1, 2**70, 0.1],
        (torch.arange(6).reshape(2, 3)[:, 1], torch.zeros(2, dtype=torch.bool), torch.ones(3, dtype=torch.float16)),
        {"array": np.arange(5, dtype=np.uint16)[::2], "none": np.zeros((0, 3)), "point": np.array(7, np.int64)},
        None,
    ]


class TestItems:
    """Items arrive as they were sent: their classes, dtypes, shapes and lengths."""

    @pytest.mark.parametrize("pin_memory", [False, None, True])
    @pytest.mark.parametrize("cut", range(7))
    def test_items_are_the_same_behind_batches_buffers_threads_and_a_checkpoint(self, cut, pin_memory):
        def make():
            node = Batcher(Shuffler(Items(strange_items()), buffer_size=4, seed=1), batch_size=1)
            return Prefetcher(node, prefetch_factor=2, pin_memory=pin_memory)

        order = [item.row for item in take(Shuffler(Items(documents([1] * 7)), buffer_size=4, seed=1))]
        expected = [strange_items()[number] for number in order]
        node = make()
        found = take(node, cut)
        fresh = make()
        fresh.reset(stored(node.state_dict()))
        found += take(fresh)
        assert same([item for (item,) in found], expected)
        node.close()


Pair = namedtuple("Pair", "left right")


class TestPinnedMemory:
    def test_pinning_where_there_is_no_accelerator_passes_everything_through_for_many_passes(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        items = [
            {
                "ids": torch.arange(4),
                "text": "a",
                "none": None,
                "list": [torch.ones(2), 3],
                "away": torch.empty(2, device="meta"),
            },
            Pair(torch.zeros(1), "b"),
        ]
        node = Prefetcher(Items(items * 3), prefetch_factor=2, pin_memory=True)
        loader = Loader(node)
        start = loader.state_dict()
        for _ in range(2):
            found = list(loader)
            assert [one is other for one, other in zip(found, items * 3, strict=True)] == [True] * 6
            loader.load_state_dict(start)
        take(loader, 3)
        state = stored(loader.state_dict())
        loader.close()
        node.reset(state)
        assert len(take(node)) == 3

    def test_pinning_finds_every_tensor_and_changes_nothing_else(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self + 1)
        item = {
            "a": torch.tensor([1]),
            "b": [torch.tensor([2]), (torch.tensor([3]), "text", None)],
            "away": torch.empty(2, device="meta"),
        }
        (found,) = take(Prefetcher(Items([item]), prefetch_factor=1, pin_memory=True))
        assert found["a"].tolist() == [2]
        assert found["b"][0].tolist() == [3]
        assert found["b"][1][0].tolist() == [4]
        assert found["b"][1][1:] == ("text", None)
        assert found["away"] is item["away"]
        assert item["a"].tolist() == [1]

    def test_a_batch_that_could_not_be_pinned_is_not_lost_and_is_told_of(self, monkeypatch, caplog):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        refusals = iter([False, True, False, False, False])

        def pin(tensor, *_):
            if next(refusals, False):
                raise RuntimeError("out of page-locked memory")
            return tensor

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        node = Prefetcher(Items([torch.tensor(number) for number in range(4)]), prefetch_factor=1, pin_memory=True)
        assert [int(one) for one in take(node)] == [0, 1, 2, 3]
        assert "out of page-locked memory" in caplog.text

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
    def test_on_an_accelerator_tensors_are_pinned_and_those_that_are_there_already_stay(self):
        there = torch.ones(2, device="cuda")
        item = {"ids": torch.arange(4), "there": there, "text": "a", "list": [torch.zeros(0)]}
        node = Prefetcher(Items([item] * 4), prefetch_factor=2, pin_memory=None)
        for found in take(node):
            assert found["ids"].is_pinned()
            assert found["there"] is there
            assert found["text"] == "a"
            assert found["ids"].tolist() == [0, 1, 2, 3]


class CountingPacker(Packer):
    """A subclass that adds to the state, as torchdata's documentation shows."""

    def reset(self, initial_state=None):
        state = None if initial_state is None else dict(initial_state)
        self.count = 0 if state is None else state.pop("count")
        super().reset(state)

    def next(self):
        self.count += 1
        return super().next()

    def get_state(self):
        return {**super().get_state(), "count": self.count}


@pytest.mark.parametrize("prefetched", [False, True])
def test_a_subclass_with_a_state_of_its_own_keeps_it_under_any_node(prefetched):
    def build():
        source = CountingPacker(Items(documents([3, 5, 7] * 9)), seq_len=4, eos_id=EOS)
        node = Batcher(shuffle(source), batch_size=2)
        return Prefetcher(node, prefetch_factor=2) if prefetched else node

    node, other = build(), build()
    take(node, 4)
    state = node.state_dict()
    assert state["source"]["count"] == 4 * 2 + 2
    other.reset(state)
    assert other.state_dict() == state
    if prefetched:
        node.close()
        other.close()
