"""The order of data is a function of seeds and names alone, and nobody else's randomness is touched."""

import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import corpora
import numpy as np
import pytest
import torch
from fault_proxy import Fault, FaultProxy
from sources import Items, documents, numbers, same, stored

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
    storage,
)
from ibm_nodes.recipes.pretrain import pretrain

NUM_RANKS = 4


@pytest.fixture
def dataset(tmp_path):
    """Sixty documents in six files of five blocks: a record batch of half a megabyte is a block of its own."""
    rows = corpora.documents([3] * 60)
    return corpora.write(
        f"file://{tmp_path}/data/", [corpora.every(part, 2) for part in corpora.every(rows, 10)], "parquet"
    )


def take(node, count=None):
    return list(itertools.islice(node, count))


def numbers_of(found):
    """The numbers of documents, each of which is told by its tokens."""
    return [int(document.tokens[0]) // corpora.STRIDE for document in found]


def places_of(found):
    return [(document.url, document.row) for document in found]


class TestPasses:
    @pytest.mark.parametrize("prefetch", [None, 1, 3])
    def test_each_pass_is_another_order_of_the_same_documents(self, dataset, prefetch):
        node = Reader(dataset, shard=0, num_shards=1)
        if prefetch is not None:
            node = Prefetcher(node, prefetch_factor=prefetch)
        found = take(node, 4 * 60)
        passes = [numbers_of(found[begin : begin + 60]) for begin in range(0, 240, 60)]
        assert all(sorted(order) == list(range(60)) for order in passes)
        for kind, size in (("documents", 1), ("files", 10)):
            orders = {tuple(dict.fromkeys(number // size for number in order)) for order in passes}
            assert len(orders) == 4, kind
        if prefetch is not None:
            node.close()

    @pytest.mark.parametrize("world_size", [1, 3])
    def test_each_logical_shard_passes_its_own_documents_in_another_order_each_time(self, dataset, world_size):
        seen = {}
        for rank in range(world_size):
            node = Sharder(partial(endless, dataset), num_shards=3, rank=rank, world_size=world_size)
            num_owned = 3 // world_size
            found = take(node, 80 * num_owned)
            for number, shard in enumerate(range(rank, 3, world_size)):
                seen[shard] = found[number::num_owned]
        owned = []
        for shard, found in seen.items():
            passes = [[document for document in found if document.epoch == epoch] for epoch in range(3)]
            orders = [numbers_of(order) for order in passes]
            assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2]), shard
            assert len({tuple(order) for order in orders}) == 3, shard
            owned += orders[0]
        assert sorted(owned) == list(range(60))

    def test_a_buffer_of_one_item_keeps_the_order_of_its_source(self):
        items = documents([2] * 30)
        assert same(take(Shuffler(Items(items), buffer_size=1, seed=3)), items)

    def test_the_same_sources_are_mixed_in_the_same_order_each_time_the_mix_starts_anew(self, dataset):
        def make():
            return Mixer(
                {name: Reader(dataset, name=name, shard=0, num_shards=1, epochs=1) for name in ("a", "b")},
                weights={"a": 1, "b": 1},
            )

        node = make()
        golden = take(node)
        for _ in range(2):
            node.reset(None)
            assert same(take(node), golden)
        assert same(take(make()), golden)


class TestSeeds:
    """One seed reaches every order; the same seed gives the same order."""

    def orders(self, make):
        """What a seed makes of an order, for three seeds; each is made twice, and must be the same."""
        found = [[make(seed) for seed in (0, 1, 2)] for _ in range(2)]
        assert found[0] == found[1]
        return found[0]

    def test_the_seed_of_a_reader_reaches_the_order_of_files_of_blocks_and_of_rows(self, dataset):
        found = self.orders(lambda seed: places_of(take(Reader(dataset, shard=0, num_shards=1, seed=seed, epochs=1))))
        for what, key in {
            "files": lambda place: place[0],
            "blocks": lambda place: (place[0], place[1] // 2) if place[0].endswith("3.parquet") else None,
            "rows": lambda place: place if place[0].endswith("3.parquet") else None,
        }.items():
            orders = {tuple(dict.fromkeys(filter(None, map(key, order)))) for order in found}
            assert len(orders) == 3, what
        rows = [{place: order.index(place) for place in order} for order in found]
        pairs = [(f"{dataset}00{file}.parquet", row) for file in range(6) for row in range(0, 10, 2)]
        first = {tuple(at[url, row] < at[url, row + 1] for url, row in pairs) for at in rows}
        assert len(first) == 3, "rows in a block"

    def test_the_seed_of_a_mixer_reaches_its_draws(self):
        def make(seed):
            sources = {name: Items(documents([3, 5, 4] * 20)) for name in "abc"}
            node = Mixer(
                {name: Named(source, name) for name, source in sources.items()},
                weights=dict.fromkeys("abc", 1),
                seed=seed,
            )
            return [item.name for item in take(node, 40)]

        assert len(set(map(tuple, self.orders(make)))) == 3

    def test_the_seed_of_a_shuffler_reaches_its_draws(self):
        found = self.orders(
            lambda seed: [item.row for item in take(Shuffler(Items(documents([1] * 60)), buffer_size=8, seed=seed))]
        )
        assert len(set(map(tuple, found))) == 3

    @pytest.mark.parametrize("seed", [(0, 1), (1, 0), (0, 0), (0,), 0, 1, -1, 2**80])
    def test_every_seed_has_an_order_of_its_own(self, seed):
        others = [(0, 1), (1, 0), (0, 0), (0,), 0, 1, -1, 2**80]
        orders = [
            [item.row for item in take(Shuffler(Items(documents([1] * 60)), buffer_size=30, seed=one))]
            for one in others
        ]
        mine = orders[others.index(seed)]
        assert orders.count(mine) == 1

    def test_the_seed_of_the_recipe_reaches_reader_mixer_and_shuffler(self, dataset):
        def make(seed):
            graph = loader_of(dataset, seed=seed).root.source.source.graph
            drawn = take(graph(0, 16).source.source, 60)
            return (
                places_of([one for one in drawn if one.name == "a"]),
                [one.name for one in drawn],
                shuffle_of(graph(0, 16)),
            )

        found = [make(seed) for seed in (0, 1, 2)]
        assert found == [make(seed) for seed in (0, 1, 2)]
        for what, orders in zip(("documents", "draws", "buffer"), zip(*found, strict=True), strict=True):
            assert len({repr(order) for order in orders}) == 3, what

    def test_logical_shards_draw_and_shuffle_each_in_their_own_way(self, dataset):
        graph = loader_of(dataset).root.source.source.graph
        names, buffers = set(), set()
        for shard in range(8):
            names.add(tuple(one.name for one in take(graph(shard, 16).source.source, 60)))
            buffers.add(tuple(shuffle_of(graph(shard, 16))))
        assert len(buffers) == 8
        assert len(names) >= 6  # documents of one length give few ways to mix two datasets

    @pytest.mark.parametrize(
        ("node", "arguments"),
        [
            (Reader, {"url": "file:///d", "shard": 0, "num_shards": 1}),
            (Mixer, {"sources": {"a": Items([])}, "weights": {"a": 1}}),
            (Packer, {"source": Items([]), "seq_len": 8, "eos_id": 2}),
            (Shuffler, {"source": Items([]), "buffer_size": 8, "seed": 0}),
            (Sharder, {"graph": numbers, "num_shards": 1, "rank": 0, "world_size": 1}),
            (Batcher, {"source": Items([]), "batch_size": 1}),
            (Prefetcher, {"source": Items([]), "prefetch_factor": 1}),
            (pretrain, {"datasets": {}, "weights": {}, "seq_len": 8, "eos_id": 2, "global_batch_size": 1}),
        ],
        ids=lambda value: getattr(value, "__name__", ""),
    )
    def test_an_argument_that_is_not_known_is_refused_and_none_is_swallowed(self, node, arguments):
        with pytest.raises(TypeError, match="shuffle_seed"):
            node(**arguments, shuffle_seed=1)

    @pytest.mark.parametrize("seed", [0.5, "0", None, True, [0, 1], (0, "1"), np.int64(3)])
    def test_a_seed_that_could_not_be_told_apart_again_is_refused(self, seed):
        with pytest.raises(TypeError, match="seed must be an int"):
            Shuffler(Items([]), buffer_size=1, seed=seed)
        with pytest.raises(TypeError, match="seed must be an int"):
            Reader("file:///d", shard=0, num_shards=1, seed=seed)


class Named(Items):
    """Items under another dataset's name."""

    def __init__(self, source, name):
        super().__init__([item._replace(name=name) for item in source.items])


def shuffle_of(shuffler):
    """The order in which a shuffler yields sixty items."""
    shuffler.source = Items(documents([1] * 60))
    return [item.row for item in take(shuffler)]


def loader_of(dataset, **more):
    arguments = {
        "weights": {"a": 0.617, "b": 0.383},
        "seq_len": 5,
        "eos_id": 2,
        "global_batch_size": 4,
        "num_shards": 16,
    }
    arguments |= {"rank": 0, "world_size": 1, "pin_memory": False}
    return pretrain({"a": dataset, "b": dataset}, **(arguments | more))


class TestWhoReadsWhat:
    def test_the_seed_and_the_pass_change_the_order_and_never_the_owner(self, dataset):
        owned = []
        for seed, epochs in ((0, 1), (1, 1), (2, 3)):
            by_shard = [
                Counter(places_of(take(Reader(dataset, shard=shard, num_shards=8, seed=seed, epochs=epochs))))
                for shard in range(8)
            ]
            owned.append([set(places) for places in by_shard])
            assert all(set(places.values()) <= {epochs} for places in by_shard)
        assert owned[0] == owned[1] == owned[2]
        assert sum(len(places) for places in owned[0]) == 60

    def test_each_of_eight_readers_of_eight_files_has_something_to_read(self, tmp_path):
        rows = corpora.documents([4] * 64)
        url = corpora.write(f"file://{tmp_path}/data/", [[part] for part in corpora.every(rows, 8)], "arrow")
        for seed in range(5):
            counts = [len(take(Reader(url, shard=shard, num_shards=8, seed=seed, epochs=1))) for shard in range(8)]
            assert counts == [8] * 8

    def test_processes_without_a_word_about_seeds_read_disjoint_parts_and_all_together(self, dataset):
        rows = {place: number for number, place in enumerate(corpora.read(dataset))}
        parts = children(dataset)
        assert sorted(itertools.chain.from_iterable(parts)) == sorted(rows.values())
        assert all(parts)
        together = interleaved(parts)
        node = Sharder(partial(first_pass, dataset), num_shards=NUM_RANKS, rank=0, world_size=1)
        assert together == [rows[document.url, document.row] for document in take(node)]


def endless(url, shard, num_shards):
    return Reader(url, shard=shard, num_shards=num_shards)


def first_pass(url, shard, num_shards):
    return Reader(url, shard=shard, num_shards=num_shards, epochs=1)


def interleaved(parts):
    """One global stream of the ranks' parts, round robin, those that have ended passed over."""
    missing = object()
    rounds = itertools.zip_longest(*parts, fillvalue=missing)
    return [number for each in rounds for number in each if number is not missing]


def children(url):
    """The numbers of the documents that each rank reads, in two processes that hash texts in different ways."""
    processes = []
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    for ranks in ("01", "23"):
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": ranks}
        command = [sys.executable, "-P", __file__, url, ranks]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [list(map(int, line.split())) for output in outputs for line in output.splitlines()]


def generators():
    """The states of everybody's generators."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state().tolist(), "seed": torch.initial_seed()}
    state["numpy"] = [value.tolist() if isinstance(value, np.ndarray) else value for value in np.random.get_state()]
    if torch.cuda.is_available():
        state["cuda"] = [one.tolist() for one in torch.cuda.get_rng_state_all()]
    return state


class TestOtherRandomness:
    def test_importing_touches_no_generator(self):
        code = (
            "import random, numpy, torch, torchdata.nodes\n"
            "from test_seeds import generators\n"
            "random.seed(1), numpy.random.seed(1), torch.manual_seed(1)\n"
            "before = generators()\n"
            "for name in [name for name in sys.modules if name.startswith('ibm_nodes')]: del sys.modules[name]\n"
            "import ibm_nodes.testing, ibm_nodes.recipes.pretrain\n"
            "assert generators() == before\n"
        )
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-P", "-c", "import sys\n" + code]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=60)

    @pytest.mark.parametrize("prefetch", [None, 4])
    def test_building_iterating_saving_and_loading_touch_no_generator(self, dataset, tmp_path, prefetch):
        before = generators()
        loader = loader_of(dataset)
        if prefetch is None:
            node = Sharder(loader.root.source.source.graph, num_shards=16, rank=0, world_size=1)
            loader = Loader(Batcher(node, batch_size=4, collate=CausalLMCollator(shift_labels=True)))
        take(loader, 50)
        state = loader.state_dict()
        checkpoint.save(loader, f"file://{tmp_path}/saved", step=1).result()
        loader.load_state_dict(stored(state))
        take(loader, 5)
        checkpoint.load(loader, f"file://{tmp_path}/saved")
        take(loader, 5)
        loader.close()
        assert generators() == before

    def test_reading_from_a_store_that_has_to_be_asked_again_touches_no_generator(self, dataset, s3_server, bucket):
        corpora_url = f"{bucket.url}data/"
        for number, part in enumerate(corpora.every(corpora.documents([3] * 60), 10)):
            storage.write(
                f"{corpora_url}{number:03}.arrow", corpora.arrow(corpora.tables([part])), bucket.storage_options
            )
        with FaultProxy(s3_server.endpoint) as proxy:
            options = {**bucket.storage_options, "endpoint_url": proxy.endpoint}
            proxy.spoil([Fault(status=503, code="SlowDown")] * 3)
            before = generators()
            loader = loader_of(corpora_url, storage_options=options)
            take(loader, 20)
            loader.close()
            after = generators()
            assert len(proxy.reads) > 6
        assert after == before

    def test_seeding_everything_between_batches_changes_no_batch(self, dataset):
        golden = take(loader_of(dataset), 12)
        loader = loader_of(dataset)
        found = []
        for seed in range(12):
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            found += take(loader, 1)
        loader.close()
        assert same(found, golden)


@pytest.fixture
def s3_server(s3, monkeypatch):
    """The server, asked again at once where it has failed."""
    monkeypatch.setattr("ibm_nodes.attempts.FIRST_DELAY_SECONDS", 0.01)
    return s3


@pytest.fixture(autouse=True)
def generators_as_they_were():
    """What a test does to everybody's generators stays in it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def main():
    url, ranks = sys.argv[1:]
    rows = {place: number for number, place in enumerate(corpora.read(url))}
    for rank in map(int, ranks):
        node = Sharder(partial(first_pass, url), num_shards=NUM_RANKS, rank=rank, world_size=NUM_RANKS)
        sys.stdout.write(" ".join(str(rows[document.url, document.row]) for document in node) + "\n")


if __name__ == "__main__":
    main()
