"""Finite passes: every document once, and the same steps on all ranks, at any number of them."""

import json
import pathlib
from collections import Counter
from functools import partial

import children
import corpora
import numpy as np
import pytest
import torch
from sources import Items, documents, numbers, stored

from ibm_nodes import (
    Batcher,
    CausalLMCollator,
    EndTogether,
    Loader,
    Mixer,
    Packer,
    Prefetcher,
    Reader,
    Sample,
    Schedule,
    Sharder,
    filler,
    load_recipe,
    stats,
)

FILLER = ("filler",)
EOS = 2
SEQ_LEN, BATCH = 64, 8


def batches(lengths, batch_size, world_size=1, max_items=None):
    """Single-rank batches of a Sharder of shards of the given lengths."""
    node = Sharder(
        lambda shard, num_shards: numbers(shard, num_shards, lengths[shard]),
        num_shards=len(lengths),
        rank=0,
        world_size=world_size,
        filler=FILLER,
        max_items=max_items,
    )
    return EndTogether(Batcher(node, batch_size=batch_size))


@pytest.mark.parametrize("lengths", [[3, 0, 1, 2], [0, 0, 0, 9], [5, 5, 5, 5], [1, 0, 0, 0], [0, 7]])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 8])
def test_every_item_comes_once_and_filler_keeps_the_turns(lengths, batch_size):
    stream = sum(batches(lengths, batch_size), [])
    real = [item for item in stream if item != FILLER]
    assert sorted(real) == sorted((shard, row) for shard, length in enumerate(lengths) for row in range(length))
    for number, item in enumerate(stream):
        if item != FILLER:
            assert (number % len(lengths), number // len(lengths)) == item
    assert len(stream) <= max(lengths) * len(lengths) + len(lengths) + batch_size


def test_nothing_at_all_is_filler_until_every_shard_had_its_turn():
    assert list(batches([0, 0, 0], 4)) == []
    assert list(batches([0, 0, 0], 2)) == [[FILLER] * 2]


@pytest.mark.parametrize("cut", range(8))
def test_a_finite_pass_resumes(cut):
    expected = list(batches([3, 0, 1, 4], 2))
    node, other = batches([3, 0, 1, 4], 2), batches([3, 0, 1, 4], 2)
    found = [next(node) for _ in range(min(cut, len(expected)))]
    other.reset(stored(node.state_dict()))
    assert found + list(other) == expected


@pytest.mark.parametrize("max_items", [0, 4, 8, 12])
def test_max_items_ends_the_stream_and_may_be_another_at_resume(max_items):
    lengths = [1 << 40] * 4
    node = batches(lengths, 4, max_items=max_items)
    assert len(list(node)) == max_items // 4
    more = batches(lengths, 4, max_items=16)
    more.reset(stored(node.state_dict()))
    assert len(list(more)) == (16 - max_items) // 4


def test_says_what_it_needs():
    with pytest.raises(ValueError, match="above a Sharder with a filler"):
        EndTogether(numbers(0, 1))
    with pytest.raises(ValueError, match="2 ranks have to end together"):
        batches([1, 1], 1, world_size=2)


def test_filler_is_told_apart_and_has_no_labels():
    real = Sample(np.arange(SEQ_LEN), (0,), (("a", "u", 0, 0),))
    collate = CausalLMCollator(shift_labels=False, pad_id=5, is_filler=True)
    batch = collate([real, filler(SEQ_LEN, 5), real])
    assert batch["is_filler"].tolist() == [False, True, False]
    assert set(batch["labels"][1].tolist()) == {-100}
    assert set(batch["input_ids"][1].tolist()) == {5}
    assert torch.equal(batch["labels"][0], torch.arange(SEQ_LEN))


@pytest.mark.parametrize("num_documents, num_shards", [(3, 240), (1000, 12)])
def test_two_epochs_draw_each_document_twice(tmp_path, num_documents, num_shards):
    rows = corpora.documents([5] * num_documents)
    url = corpora.write(f"file://{tmp_path}/", [corpora.every(rows, 7)], "arrow")

    def graph(shard, num_shards):
        return Mixer(
            {"a": Reader(url, name="a", shard=shard, num_shards=num_shards, epochs=2)},
            weights={"a": 1},
            seed=(0, shard),
        )

    found = Counter()
    for rank in range(4):
        node = Sharder(graph, num_shards=num_shards, rank=rank, world_size=4)
        found.update(document.row for document in node)
    assert set(found.values()) == {2}
    assert len(found) == num_documents


def test_a_dataset_that_is_used_up_leaves_its_weight_to_the_others(tmp_path):
    urls = {name: write(tmp_path / name, count) for name, count in (("a", 40), ("b", 400))}
    settings = {"weights": {"a": 1, "b": 1}, "seq_len": SEQ_LEN, "eos_id": EOS, "global_batch_size": 4, "num_shards": 4}
    with load_recipe("pretrain")(urls, epochs={"a": 2}, **settings) as loader:
        for _, _ in zip(loader, range(60), strict=False):
            pass
        datasets = stats(loader)["datasets"]
    assert datasets["a"]["documents"] == 80
    assert datasets["b"]["documents"] > 400


def used_up(loader):
    """Draws until a dataset has ended in all logical shards, and gives the number of the sample."""
    node = loader.root.source.source  # the Sharder alone, which draws nothing ahead
    node.reset()
    for number in range(node.rank, 1 << 20, node.world_size):
        next(node)
        mixers = [shard[2]["source"]["source"] for shard in node.state_dict()["shards"].values() if shard[2]]
        if len(mixers) == len(node.state_dict()["shards"]) and all("a" in mixer["ended"] for mixer in mixers):
            return number
    raise AssertionError("it never ends")


@pytest.mark.parametrize("world_size, rank", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("limit", [{"epochs": {"a": 2}}, {"max_dataset_tokens": {"a": 1500}}])
def test_a_dataset_that_is_used_up_is_announced_once_at_its_sample(tmp_path, caplog, world_size, rank, limit):
    urls = {name: write(tmp_path / name, count) for name, count in (("a", 40), ("b", 400), ("c", 400))}
    weights = {"a": 1, "b": 1, "c": 3}
    settings = {"weights": weights, "seq_len": SEQ_LEN, "eos_id": EOS, "global_batch_size": 4, "num_shards": 4}
    build = partial(load_recipe("pretrain"), urls, **settings, **limit, rank=rank, world_size=world_size)
    number = used_up(build())
    expected = (
        f"dataset 'a' is used up: by sample {number} all logical shards of this rank have drawn what they may of it, "
        "and the weights of the others are b 0.25, c 0.75"
    )
    assert [record.getMessage() for record in caplog.records] == [expected]
    for prefetch_factor in (1, 6):
        caplog.clear()
        with build(prefetch_factor=prefetch_factor) as loader:
            iterator = iter(loader)
            next(iterator)
            assert stats(loader)["datasets"]["a"]["used_up"] == 0
            for _ in range(number // 4 + 5):
                next(iterator)
            assert {name: entry["used_up"] for name, entry in stats(loader)["datasets"].items()} == {
                "a": 1,
                "b": 0,
                "c": 0,
            }
            state = loader.state_dict()
            loader.close()
            for _ in range(8):
                next(iterator)
        assert [record.getMessage() for record in caplog.records] == [expected]
    caplog.clear()
    with build() as loader:  # says once more in what the process goes on with
        loader.load_state_dict(state)
        for _, _ in zip(loader, range(8), strict=False):
            pass
    (record,) = caplog.records
    assert record.getMessage().startswith("dataset 'a' is used up: by sample ")


def test_a_dataset_is_announced_also_where_logical_shards_had_ended_before_a_load(caplog):
    def build():
        schedule = Schedule([(0, {"a": 1, "b": 1})])

        def graph(shard, num_shards):
            lengths = {"a": [5] * (2, 20)[shard], "b": [5] * (0, 60)[shard]}
            sources = {name: Items(documents(lengths[name])) for name in lengths}
            return Mixer(sources, weights=schedule, seed=shard)

        return Sharder(graph, num_shards=2, rank=0, world_size=1, schedule=schedule)

    node = build()
    node.reset()
    for _ in range(12):
        next(node)
    state = stored(node.state_dict())
    assert [ended for _, ended, _ in state["shards"].values()] == [True, False]
    assert not caplog.records
    for loaded in (node, build()):
        caplog.clear()
        if loaded is not node:
            loaded.reset(state)
        assert len(list(loaded)) == 82 - 12
        names = [record.getMessage().split("'")[1] for record in caplog.records]
        assert names == ["a", "b"]


def test_data_that_ends_with_a_dataset_says_that_nothing_is_left(tmp_path, ibm_nodes, caplog):
    data = ["--data", f"a={write(tmp_path / 'a', 40)}", "--weight", "a=1", "--epochs", "a=1"]
    flags = ["--seq-len", SEQ_LEN, "--eos-id", EOS, "--global-batch-size", 4, "--num-shards", 4]
    target = f"file://{tmp_path}/run"
    code, out, _ = ibm_nodes("run", "pretrain", *data, *flags, "--checkpoint", target)
    assert code == 0
    assert "\na is used up in 100% of the logical shards\n" in out
    (record,) = (record for record in caplog.records if "used up" in record.getMessage())
    assert record.getMessage().endswith(" of it, and nothing is left")
    assert "\na is used up in 100% of the logical shards\n" in ibm_nodes("checkpoint", "show", target)[1]


def test_a_renamed_dataset_goes_on_where_it_stood_and_is_reported_by_its_new_name(tmp_path):
    urls = {name: write(tmp_path / name, 200) for name in ("a", "b")}
    settings = {"seq_len": SEQ_LEN, "eos_id": EOS, "global_batch_size": 4, "num_shards": 4}
    with load_recipe("pretrain")(urls, weights={"a": 1, "b": 3}, **settings) as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        state = stored(loader.state_dict())
        expected = [next(iterator)["input_ids"] for _ in range(5)]
    moved = {"a": urls["a"], "books": urls["b"]}
    with load_recipe("pretrain")(moved, weights={"a": 1, "books": 3}, renamed={"books": "b"}, **settings) as loader:
        loader.load_state_dict(state)
        assert all(torch.equal(batch["input_ids"], one) for batch, one in zip(loader, expected, strict=False))
        datasets = stats(loader)["datasets"]
    assert datasets.keys() == {"a", "books"}
    assert datasets["books"]["passes"] > 0


def test_max_tokens_end_the_run_in_whole_global_batches(tmp_path):
    urls = {"a": write(tmp_path / "a", 100)}
    settings = {"weights": {"a": 1}, "seq_len": SEQ_LEN, "eos_id": EOS, "global_batch_size": 4, "num_shards": 4}
    build = partial(load_recipe("pretrain"), urls, **settings)
    for rank in range(2):
        with build(max_tokens=SEQ_LEN * 11, rank=rank, world_size=2) as loader:
            assert len(list(loader)) == 2
            state = loader.state_dict()
    with pytest.raises(ValueError, match="max_tokens must be at least a global batch, 256, got 255"):
        build(max_tokens=255)
    with pytest.raises(ValueError, match="epochs must be for the datasets"):
        build(epochs={"b": 1})
    assert state["position"] == 8


def write(directory: pathlib.Path, num_documents: int, num_files: int = 3) -> str:
    """Documents of 10 to 29 tokens that name themselves."""
    directory.mkdir()
    rows = corpora.documents([10 + number % 20 for number in range(num_documents)])
    size = -(-num_documents // num_files)
    files = [corpora.every(part, 9) for part in corpora.every(rows, size)]
    return corpora.write(f"file://{directory}/", files, "arrow")


VALIDATION = {"seq_len": SEQ_LEN, "eos_id": EOS, "global_batch_size": BATCH, "pin_memory": False}


def documents_in(rows, stride=corpora.STRIDE):
    """How many tokens of each document are in rows of ids."""
    return Counter(token // stride for row in rows for token in row if token != EOS and token >= stride)


@pytest.mark.parametrize("holdout", [0.02, 0.3])
def test_validation_gives_what_training_leaves_out_once_and_training_the_rest(tmp_path, holdout):
    urls = {"a": write(tmp_path / "a", 500)}
    with load_recipe("validation")(urls, holdout=holdout, **VALIDATION) as loader:
        rows = [row for batch in loader for row in batch["input_ids"].tolist()]
    held_out = documents_in(rows)
    settings = {"weights": {"a": 1}, "epochs": {"a": 1}, "buffer_size": 1, "num_shards": 8}
    with load_recipe("pretrain")(urls, holdout=holdout, **VALIDATION, **settings) as loader:
        trained = documents_in(row for batch in loader for row in batch["input_ids"].tolist())
    assert not set(held_out) & set(trained)
    assert set(held_out) | set(trained) <= set(range(500)) | {0}
    assert len(held_out) > 1


def test_each_call_starts_at_the_beginning_and_leaves_the_training_loader_alone(tmp_path):
    urls = {"a": write(tmp_path / "a", 300)}
    build = partial(load_recipe("validation"), urls, holdout=0.4, max_samples=2 * BATCH, **VALIDATION)
    train = load_recipe("pretrain")(urls, weights={"a": 1}, holdout=0.4, **VALIDATION)
    with train:
        iterator = iter(train)
        next(iterator)
        before = stored(train.state_dict())
        with build() as first, build() as second:
            one, two = list(first), list(second)
        assert stored(train.state_dict())["position"] == before["position"]
    assert len(one) == len(two) == 2
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, two, strict=True))


WORKER = """
    import json, sys, torch.distributed as dist
    from ibm_nodes import load_recipe, stats
    if int(sys.argv[2]) > 1:
        dist.init_process_group("gloo")
    with load_recipe("validation")(**json.loads(sys.argv[1])) as loader:
        steps = [(batch["input_ids"].tolist(), batch["is_filler"].tolist()) for batch in loader]
        share = stats(loader)["filler"]
    print(json.dumps([steps, share]), flush=True)
    if int(sys.argv[2]) > 1:
        dist.destroy_process_group()
"""


def run(world_size: int, **arguments):
    """The steps of real gloo ranks: for each step the real rows of all ranks."""
    said = children.ranks(WORKER, world_size, json.dumps(arguments), str(world_size))
    assert len({len(steps) for steps, _ in said}) == 1, "ranks made different numbers of steps"
    steps = [
        sorted(row for rank in ranks for row, is_filler in zip(*rank, strict=True) if not is_filler)
        for ranks in zip(*(steps for steps, _ in said), strict=True)
    ]
    return steps, [share for _, share in said]


@pytest.mark.parametrize(
    "lengths, world_sizes", [([1] * 995 + [3000] * 5, (1, 2, 4)), ([30, 40], (1, 4))], ids=["unequal", "two documents"]
)
def test_ranks_with_unequal_shards_end_on_the_same_step_with_every_document_once(tmp_path, lengths, world_sizes):
    """In one corpus a logical shard has nearly all tokens; in the other most ranks have nothing at all."""
    directory = tmp_path / "data"
    directory.mkdir()
    url = f"file://{directory}/"
    rows = corpora.documents(lengths, first=1, stride=4000)
    corpora.write(url, [corpora.every(rows, 100)], "arrow")
    arguments = {"datasets": {"a": url}, "holdout": 0.999, **VALIDATION, "num_shards": 8}
    found = {world_size: run(world_size, **arguments) for world_size in world_sizes}
    steps, (share,) = found[1]
    for others, shares in found.values():
        assert others == steps
        assert min(shares) <= share <= max(shares)
    expected = [token for shard in range(8) for row in held_out(url, shard) for token in row.tolist()]
    tokens = [token for step in steps for row in step for token in row if token >= 4000]
    assert sorted(tokens) == sorted(expected)
    if len(lengths) == 2:
        assert found[4][1].count(1.0) >= 2


def held_out(url, shard):
    reader = Reader(url, name="a", shard=shard, num_shards=8, epochs=1, holdout=0.999, split="validation")
    return [document.tokens for document in reader]


def test_a_bare_loader_over_several_ranks_says_what_it_needs(tmp_path):
    urls = {"a": write(tmp_path / "a", 30)}
    with pytest.raises(ValueError, match="4 ranks can only end together with torch.distributed"):
        load_recipe("validation")(urls, holdout=0.5, rank=0, world_size=4, **VALIDATION)


def test_prefetched_passes_end_and_say_so_again(tmp_path):
    url = write(tmp_path / "a", 50)

    def graph(shard, num_shards):
        return Packer(Reader(url, shard=shard, num_shards=num_shards, epochs=1), seq_len=SEQ_LEN, eos_id=EOS)

    node = Sharder(graph, num_shards=4, rank=0, world_size=1, filler=filler(SEQ_LEN))
    loader = Loader(Prefetcher(EndTogether(Batcher(node, batch_size=4)), prefetch_factor=2))
    with loader:
        assert len(list(loader)) > 1
        assert list(loader) == []
