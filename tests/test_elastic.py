"""The global batch of every step is the same set of samples at every world size, through any number of saves and loads.

The graph is the README's: three readers, a mix, packing, shuffling, logical shards, batches and prefetching.
"""

import copy
import functools
import hashlib
import io
import os
import random
import subprocess
import sys

import corpora
import numpy as np
import pytest
import torch

from ibm_nodes import Batcher, CausalLMCollator, Loader, Mixer, Packer, Prefetcher, Reader, Sharder, Shuffler
from ibm_nodes.state import merge

EOS, SEQ_LEN, NUM_SHARDS, BATCH = 2, 512, 24, 24
WEIGHTS = {"web": 0.6, "code": 0.3, "books": 0.1}
WORLD_SIZES = (1, 2, 3, 4, 6, 8, 12)
STEPS = 30
PLAN_STEPS = 10


def mix(shard, num_shards, *, urls, weights=None, seed=0, storage_options=None):
    """The documents of one logical shard."""
    more = {"shard": shard, "num_shards": num_shards, "seed": seed, "storage_options": storage_options}
    sources = {name: Reader(url, name=name, **more) for name, url in urls.items()}
    return Mixer(sources, weights=weights or WEIGHTS, seed=(seed, shard))


def graph(shard, num_shards, *, seed=0, **more):
    """The samples of one logical shard."""
    node = Packer(mix(shard, num_shards, seed=seed, **more), seq_len=SEQ_LEN, eos_id=EOS)
    return Shuffler(node, buffer_size=4, seed=(seed, shard))


def build(rank, world_size, *, batch=BATCH, prefetch_factor=2, **more):
    node = Sharder(functools.partial(graph, **more), num_shards=NUM_SHARDS, rank=rank, world_size=world_size)
    node = Batcher(node, batch_size=batch // world_size, collate=CausalLMCollator(shift_labels=False))
    return Loader(Prefetcher(node, prefetch_factor=prefetch_factor))


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(plan, *, state=None, **more):
    """The samples of the global stream, in its order, that a plan of (world size, steps, steps lost) gives.

    Each leg has new objects, set to the merged state of the leg before; the steps lost come after the save, as before a
    crash. Returns the last merged state too.
    """
    stream, position = [], 0
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
        states = [through_file(loader.state_dict()) for loader in ranks]
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
        assert torch.equal(batch["input_ids"], batch["labels"])
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


def test_a_hundred_random_plans_of_saves_and_loads_give_the_uninterrupted_batches(moved, reference):
    for number in range(100):
        plan = random_plan(number)
        stream, _ = run(plan, **moved)
        assert stream == reference[: BATCH * PLAN_STEPS], f"plan {number}: {plan}"


def test_random_plans_of_saves_and_loads_give_the_uninterrupted_batches_over_s3(data, reference):
    for number in range(100, 110):
        plan = random_plan(number)
        stream, _ = run(plan, **data)
        assert stream == reference[: BATCH * PLAN_STEPS], f"plan {number}: {plan}"


if __name__ == "__main__":
    web, code, books = sys.argv[1:]
    stream, _ = run([(2, 4, 0)], urls={"web": web, "code": code, "books": books})
    sys.stdout.write(hashlib.sha256(b"".join(stream)).hexdigest())
