"""The global batch of every step is the same set of samples at every world size, through any number of saves and loads.

The graph is the README's: three readers, a mix, packing, shuffling, logical shards, batches and prefetching.
"""

import copy
import functools
import hashlib
import os
import random
import subprocess
import sys
from collections import Counter

import corpora
import numpy as np
import pytest
import torch
from sources import same, stored

from ibm_nodes import Batcher, CausalLMCollator, Loader, Mixer, Packer, Prefetcher, Reader, Sharder, Shuffler
from ibm_nodes.node import render
from ibm_nodes.state import copy_state, merge

EOS, PAD, SEQ_LEN, NUM_SHARDS, BATCH = 2, 3, 128, 24, 24
WEIGHTS = {"web": 0.6, "code": 0.3, "books": 0.1}
WORLD_SIZES = (1, 2, 3, 4, 6, 8, 12)
STEPS = 30
PLAN_STEPS = 7


def mix(shard, num_shards, *, urls, weights=None, seed=0, storage_options=None):
    """The documents of one logical shard."""
    more = {"shard": shard, "num_shards": num_shards, "seed": seed, "storage_options": storage_options}
    sources = {name: Reader(url, name=name, **more) for name, url in urls.items()}
    return Mixer(sources, weights=weights or WEIGHTS, seed=(seed, shard))


def graph(shard, num_shards, *, seed=0, seq_len=SEQ_LEN, strategy="concat", **more):
    """The samples of one logical shard."""
    node = Packer(mix(shard, num_shards, seed=seed, **more), seq_len=seq_len, eos_id=EOS, strategy=strategy)
    return Shuffler(node, buffer_size=4, seed=(seed, shard))


def build(rank, world_size, *, batch=BATCH, prefetch_factor=2, **more):
    node = Sharder(functools.partial(graph, **more), num_shards=NUM_SHARDS, rank=rank, world_size=world_size)
    collate = CausalLMCollator(shift_labels=False, pad_id=PAD, seq_len=more.get("seq_len", SEQ_LEN))
    node = Batcher(node, batch_size=batch // world_size, collate=collate)
    return Loader(Prefetcher(node, prefetch_factor=prefetch_factor))


def run(plan, *, state=None, build=build, after=lambda step, ranks: None, **more):
    """The samples of the global stream, in its order, that a plan of (world size, steps, steps lost) gives.

    Each leg has new objects, set to the merged state of the leg before; the steps lost come after the save, as before a
    crash. ``after`` is called with the number of each step and the loaders. Returns the last merged state too.
    """
    stream, position = [], 0 if state is None else state["position"]
    for world_size, steps, lost in plan:
        ranks = [build(rank, world_size, **more) for rank in range(world_size)]
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in ranks]
        for _ in range(steps):
            batches = [next(iterator) for iterator in iterators]
            stream += interleaved(batches, position)
            position += len(batches) * len(batches[0]["input_ids"])
            after(position // BATCH, ranks)
        states = [stored(loader.state_dict()) for loader in ranks]
        for _ in range(lost):
            for iterator in iterators:
                next(iterator)
        for loader in ranks:
            loader.close()
        state = merge(states)
    return stream, state


def interleaved(batches, position):
    """The rows of the ranks' batches in the order of the global stream, of which the first has number ``position``."""
    for batch in batches:
        assert batch.keys() == {"input_ids", "labels"}
        assert batch["input_ids"].dtype == torch.int64
        padding = batch["labels"] == -100
        assert torch.equal(batch["input_ids"], batch["labels"].masked_fill(padding, PAD))
        assert not (padding[:, :-1] & ~padding[:, 1:]).any()
    world_size, size = len(batches), len(batches[0]["input_ids"])
    numbers = range(position, position + world_size * size)
    first = [next(number for number in numbers if number % world_size == rank) for rank in range(world_size)]
    return [
        batches[number % world_size]["input_ids"][(number - first[number % world_size]) // world_size].numpy().tobytes()
        for number in numbers
    ]


def global_batches(stream):
    """The set of samples of each step; none of this corpus's samples comes twice in one step."""
    return [frozenset(stream[begin : begin + BATCH]) for begin in range(0, len(stream), BATCH)]


def random_plan(number):
    """World sizes, steps, and steps lost after the save; some legs have no step, at the start and after a load too."""
    rng = random.Random(number)
    plan, left = [], PLAN_STEPS
    while left:
        steps = min(left, rng.choice([0, 0, 1, 1, 2, 3, 5]))
        plan.append((rng.choice(WORLD_SIZES), steps, rng.choice([0, 0, 1, 2])))
        left -= steps
    return plan


@pytest.fixture(scope="module")
def data(s3):
    """The corpus on S3: what the graph takes."""
    from ibm_nodes.recipes import object_store

    bucket = object_store.make_bucket(s3.storage_options, "elastic")
    urls = corpora.write_mix(bucket, s3.storage_options)
    return {"urls": urls, "storage_options": s3.storage_options}


@pytest.fixture(scope="module")
def reference(data):
    """The uninterrupted stream of one rank."""
    stream, _ = run([(1, STEPS, 0)], **data)
    return stream


@pytest.fixture(scope="module")
def moved(data, tmp_path_factory):
    """The same keys at another URL, on the disk."""
    root = f"file://{tmp_path_factory.mktemp('moved')}/elsewhere/"
    for name, url in data["urls"].items():
        corpora.copy(url, f"{root}{name}-2/", data["storage_options"])
    return {"urls": {name: f"{root}{name}-2/" for name in data["urls"]}}


def test_the_corpus_is_of_unequal_datasets_with_empty_and_long_documents(data):
    rows = {name: list(corpora.read(url, data["storage_options"]).values()) for name, url in data["urls"].items()}
    lengths = {name: [len(tokens) for tokens in documents] for name, documents in rows.items()}
    totals = {name: sum(of) for name, of in lengths.items()}
    assert totals["web"] > 3 * totals["code"] > 9 * totals["books"]
    assert all(min(of) == 0 for of in lengths.values())
    assert max(lengths["web"]) == 20_000
    assert len(lengths["books"]) < NUM_SHARDS


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_global_batch_is_the_same_set_of_samples_at_every_world_size(data, reference, world_size):
    stream, _ = run([(world_size, STEPS, 0)], **data)
    assert global_batches(stream) == global_batches(reference)
    assert stream == reference


def check_plans(numbers, expected, **more):
    for number in numbers:
        plan = random_plan(number)
        stream, _ = run(plan, prefetch_factor=1, **more)
        assert stream == expected[: BATCH * PLAN_STEPS], f"plan {number}: {plan}"


def test_a_hundred_random_plans_of_saves_and_loads_give_the_uninterrupted_batches(moved, reference):
    check_plans(range(100), reference, **moved)


def test_random_plans_of_saves_and_loads_over_s3_give_the_uninterrupted_batches(data, reference):
    check_plans(range(10), reference, **data)


@pytest.mark.slow
def test_a_hundred_random_plans_over_s3_give_the_uninterrupted_batches(data, reference):
    check_plans(range(100), reference, **data)


def test_the_plans_save_before_the_first_batch_and_straight_after_a_load():
    plans = [random_plan(number) for number in range(100)]
    assert sum(plan[0][1] == 0 for plan in plans) > 10
    assert sum(any(steps == 0 for _, steps, _ in plan[1:]) for plan in plans) > 10
    assert {world_size for plan in plans for world_size, _, _ in plan} == set(WORLD_SIZES)


def test_the_stream_goes_on_at_another_global_batch_size(moved, reference):
    rng = random.Random(0)
    for _ in range(2):
        stream, state, position = [], None, 0
        while len(stream) < 10 * BATCH:
            batch = rng.choice([12, 24, 48])
            world_size = rng.choice([size for size in WORLD_SIZES if batch % size == 0])
            ranks = [build(rank, world_size, batch=batch, **moved) for rank in range(world_size)]
            for loader in ranks:
                if state is not None:
                    loader.load_state_dict(state)
            stream += interleaved([next(iter(loader)) for loader in ranks], position)
            position += batch
            state = merge([stored(loader.state_dict()) for loader in ranks])
            for loader in ranks:
                loader.close()
        assert stream == reference[: len(stream)]


@pytest.mark.parametrize("prefetch_factor", [1, 3, 16])
def test_the_stream_does_not_depend_on_how_far_the_prefetcher_runs_ahead(moved, reference, prefetch_factor):
    stream, _ = run([(2, 8, 1), (3, 8, 0)], prefetch_factor=prefetch_factor, **moved)
    assert stream == reference[: len(stream)]


@pytest.mark.parametrize("strategy", ["best_fit", "pad"])
def test_plans_give_the_uninterrupted_batches_with_every_way_to_pack(moved, strategy):
    expected, _ = run([(1, PLAN_STEPS, 0)], strategy=strategy, **moved)
    for world_size in WORLD_SIZES[1:]:
        assert run([(world_size, 1, 0)], strategy=strategy, **moved)[0] == expected[:BATCH]
    check_plans(range(3), expected, strategy=strategy, **moved)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["best_fit", "pad"])
def test_a_hundred_random_plans_give_the_uninterrupted_batches_with_every_way_to_pack(moved, strategy):
    expected, _ = run([(1, PLAN_STEPS, 0)], strategy=strategy, **moved)
    check_plans(range(100), expected, strategy=strategy, **moved)


SEQ_LENS = ((128, 2), (512, 1), (128, 2))
"""Tokens in a sample and steps, one after the other."""


@pytest.mark.parametrize("strategy", ["concat", "best_fit", "pad"])
def test_a_seq_len_that_changes_loses_no_token_and_gives_the_same_batches_at_every_world_size(moved, strategy):
    expected, state = change_seq_len(1, strategy=strategy, **moved)
    handed_out = Counter(token for sample in expected for token in np.frombuffer(sample, np.int64).tolist())
    assert {len(sample) for sample in expected} == {8 * seq_len for seq_len, _ in SEQ_LENS}
    assert without_marks(handed_out) + Counter(buffered(state)) == without_marks(drawn(state, moved))
    for world_size in (2, 3, 8):
        assert change_seq_len(world_size, strategy=strategy, **moved)[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["concat", "best_fit", "pad"])
def test_a_seq_len_that_changes_in_random_plans_gives_the_same_batches(moved, strategy):
    expected, _ = change_seq_len(1, strategy=strategy, **moved)
    for number in range(30):
        rng, stream, state = random.Random(number), [], None
        for seq_len, steps in SEQ_LENS:
            cut = rng.randint(0, steps)
            plan = [(rng.choice(WORLD_SIZES), part, rng.choice([0, 1])) for part in (cut, steps - cut)]
            more, state = run(plan, state=state, seq_len=seq_len, strategy=strategy, prefetch_factor=1, **moved)
            stream += more
        assert stream == expected, f"plan {number}"


def change_seq_len(world_size, **more):
    """The samples, and the last state, of a run whose seq_len changes twice; the world size changes with it."""
    stream, state = [], None
    for number, (seq_len, steps) in enumerate(SEQ_LENS):
        plan = [(world_size if number % 2 == 0 else {1: 1, 2: 6, 3: 4, 8: 2}[world_size], steps, number % 2)]
        part, state = run(plan, state=state, seq_len=seq_len, prefetch_factor=1, **more)
        stream += part
    return stream, state


def without_marks(tokens):
    return Counter({token: count for token, count in tokens.items() if token not in (EOS, PAD)})


def buffered(state):
    """The tokens that wait in a state."""
    for _, _, shuffler in state["shards"].values():
        packer = shuffler["source"]
        for sample in (*shuffler["buffer"], *packer["tail"], *packer["open"]):
            yield from (token for token in sample["tokens"]["tensor"].tolist() if token != EOS)


def drawn(state, moved):
    """The tokens of the documents that the mixes of a state have handed out."""
    tokens = Counter()
    for shard, (_, _, shuffler) in state["shards"].items():
        mixer = shuffler["source"]["source"]
        documents = mix(shard, NUM_SHARDS, **moved)
        for _ in range(sum(mixer["documents"].values())):
            tokens.update(next(documents).tokens.tolist())
    return tokens


def test_the_stream_does_not_depend_on_where_the_dataset_lies(data, moved, reference):
    stream, state = run([(2, 5, 1)], **data)
    more, state = run([(4, 5, 0)], state=state, **moved)
    rest, _ = run([(1, 5, 0)], state=state, **data)
    assert stream + more + rest == reference[: 15 * BATCH]


def test_the_stream_does_not_depend_on_pythonhashseed(moved, reference):
    expected = hashlib.sha256(b"".join(reference[: 4 * BATCH])).hexdigest()
    command = [sys.executable, __file__, *moved["urls"].values()]
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        assert subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout == expected


def test_another_seed_gives_another_stream_in_every_logical_shard(moved):
    streams = [run([(1, 8, 0)], seed=seed, **moved)[0] for seed in (0, 1, 2)]
    for shard in range(NUM_SHARDS):
        own = [tuple(stream[shard::NUM_SHARDS]) for stream in streams]
        assert len(set(own)) == 3


def test_another_epoch_gives_another_order_in_every_logical_shard_of_some_documents(moved):
    compared = 0
    for shard in range(NUM_SHARDS):
        reader = Reader(moved["urls"]["web"], name="web", shard=shard, num_shards=NUM_SHARDS, epochs=3)
        orders = {}
        for document in reader:
            orders.setdefault(document.epoch, []).append((document.url, document.row))
        assert sorted(orders) == [0, 1, 2]
        assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
        if len(orders[0]) > 5:
            assert orders[0] != orders[1] != orders[2] != orders[0]
            compared += 1
    assert compared > 4


def test_adding_a_dataset_or_changing_weights_keeps_the_order_of_documents_in_the_others(moved, tmp_path):
    extra = corpora.write(f"file://{tmp_path}/a-new-one/", [[corpora.documents([40] * 30, first=95_000)]], "parquet")
    urls = {"a-new-one": extra, **moved["urls"]}
    weights = {"a-new-one": 2.0, "web": 0.2, "code": 0.5, "books": 0.3}
    for shard in range(0, NUM_SHARDS, 5):
        alone = by_name(mix(shard, NUM_SHARDS, **moved))
        together = by_name(mix(shard, NUM_SHARDS, urls=urls, weights=weights))
        for name, order in alone.items():
            length = min(len(order), len(together[name]))
            assert order[:length] == together[name][:length]


def by_name(node, at_least=6):
    """The order of documents in each dataset of a mix, until each has so many."""
    orders = {name: [] for name in node.sources}
    while min(map(len, orders.values())) < at_least:
        document = next(node)
        orders[document.name].append((document.epoch, document.url, document.row))
    return orders


def test_a_state_never_changes_once_it_was_taken(moved):
    (loader,) = [build(0, 1, prefetch_factor=4, **moved)]
    iterator = iter(loader)
    states = []
    for _ in range(4):
        next(iterator)
        state = loader.state_dict()
        states.append((state, copy.deepcopy(state)))
    for _ in range(6):
        next(iterator)
    loader.close()
    for state, at_that_time in states:
        assert same(state, at_that_time)
    assert len({repr(state) for state, _ in states}) == 4


@pytest.mark.parametrize("prefetch_factor", [0, 3])
def test_a_snapshot_that_is_rendered_late_is_the_state_of_its_time(moved, prefetch_factor):
    root = build(0, 1, prefetch_factor=3, **moved).root
    loader = Loader(root if prefetch_factor else root.source)
    taken = []
    for _ in range(12):
        next(iter(loader))
        taken.append((loader.snapshot(), loader.state_dict()))
    late = build(0, 1, prefetch_factor=3, **moved)  # of which nothing was rendered in time
    late = Loader(late.root if prefetch_factor else late.root.source)
    snapshots = []
    for _ in range(12):
        next(iter(late))
        snapshots.append(late.snapshot())
    loader.close()
    late.close()
    for (first, state), second in zip(taken, snapshots, strict=True):
        assert same(stored(state), stored(copy_state(render(first))))
        assert same(stored(state), stored(copy_state(render(second))))


def test_global_random_states_are_left_alone_and_do_not_matter(moved, reference):
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
        stream, state = run([(2, 3, 1), (3, 3, 1)], **moved)
        assert (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()) == before
        assert stream == reference[: len(stream)]


if __name__ == "__main__":
    web, code, books = sys.argv[1:]
    stream, _ = run([(2, 4, 0)], urls={"web": web, "code": code, "books": books})
    sys.stdout.write(hashlib.sha256(b"".join(stream)).hexdigest())
