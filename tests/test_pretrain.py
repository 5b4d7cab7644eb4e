"""The recipe for pretraining: what it checks, who it thinks it is, and that all ranks read the same corpus."""

import json
import pickle

import children
import corpora
import pytest
import torch

from ibm_nodes import load_recipe, stats
from ibm_nodes.recipes import distributed
from ibm_nodes.recipes.assemble import memory_bytes

WEIGHTS = {"web": 0.6, "code": 0.3, "books": 0.1}


def recipe(datasets, **changes):
    arguments = {"weights": WEIGHTS, "seq_len": 64, "eos_id": 1, "global_batch_size": 12, "num_shards": 24}
    return load_recipe("pretrain")(datasets, **(arguments | changes))


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    return corpora.write_mix(f"file://{tmp_path_factory.mktemp('mix')}/")


def take(loader, count):
    with loader:
        return [batch["input_ids"] for batch, _ in zip(loader, range(count), strict=False)]


def test_batches_have_the_shape_of_the_local_batch(datasets):
    loader = recipe(datasets, rank=1, world_size=3)
    with loader:
        batch = next(iter(loader))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()} == {
        "input_ids": ((4, 64), torch.int64),
        "labels": ((4, 64), torch.int64),
    }


def test_micro_batches_of_all_ranks_are_together_the_global_batch(datasets):
    whole = take(recipe(datasets, rank=0, world_size=1), 3)
    for world_size, micro in [(1, 4), (2, 3), (3, 2), (2, 6), (12, 1)]:
        ranks = [
            take(recipe(datasets, rank=rank, world_size=world_size, micro_batch_size=micro), 36 // world_size // micro)
            for rank in range(world_size)
        ]
        stream = torch.stack([torch.cat(batches) for batches in ranks], 1).reshape(-1, 64)
        assert torch.equal(stream, torch.cat(whole))


@pytest.mark.parametrize("changes, message", [
    ({"global_batch_size": 10, "world_size": 4, "rank": 0}, "= 4, got 10: the next smaller world_size that fits is 2"),
    ({"global_batch_size": 12, "world_size": 2, "rank": 0, "micro_batch_size": 4}, "world_size x micro_batch_size = 8"),
    ({"global_batch_size": 0}, "global_batch_size must be at least 1"),
    ({"num_shards": 16, "world_size": 12, "rank": 0}, "must divide num_shards=16, got 12: the next smaller .* is 8"),
    ({"rank": 1}, "rank and world_size must be given together"),
    ({"weights": {"web": 1}}, "weights must name every source, got none for"),
    ({"weights": {**WEIGHTS, "wbe": 1}}, "for the sources .* got weights for \\['wbe'\\] too"),
    ({"eos_id": -1}, "eos_id must be from 0"),
    ({"seq_len": 0}, "seq_len must be at least 1"),
    ({"buffer_size": 0}, "buffer_size must be at least 1"),
    ({"vocab_size": 0}, "vocab_size must be at least 1"),
])  # fmt: skip
def test_what_does_not_fit_is_one_clear_error(datasets, changes, message):
    with pytest.raises(ValueError, match=message):
        recipe(datasets, **changes)


def test_the_default_number_of_shards_suits_every_world_size_that_can_split_the_batch(datasets):
    for batch_size, expected in [(12, 264), (256, 256), (300, 300), (1, 256)]:
        loader = recipe(datasets, global_batch_size=batch_size, num_shards=None, rank=0, world_size=1)
        assert loader.state_dict()["num_shards"] == expected


def test_it_does_not_read_before_the_first_batch(datasets, monkeypatch):
    loader = recipe(datasets)
    before = stats(loader)["store"]["requests"]
    assert loader.state_dict()["position"] == 0
    assert stats(loader)["store"]["requests"] == before


def test_a_loader_that_has_not_started_pickles_and_gives_the_same(datasets):
    loader = recipe(datasets)
    copy = pickle.loads(pickle.dumps(loader))
    assert all(map(torch.equal, take(loader, 2), take(copy, 2)))


def test_a_misspelt_dataset_is_an_error_at_once(datasets, tmp_path):
    with pytest.raises(FileNotFoundError, match="no data under .*/wbe/"):
        recipe({**datasets, "web": datasets["web"].replace("/web/", "/wbe/")})
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match="1 other objects; give a prefix with files that end in one of .arrow"):
        recipe({**datasets, "web": f"file://{tmp_path}/empty/"})


def test_it_warns_of_memory_and_says_how_many_shards_fit(datasets, monkeypatch, caplog):
    monkeypatch.setattr("ibm_nodes.recipes.assemble.MEMORY_SHARE", 0.01)
    recipe(datasets, num_shards=2400, rank=0, world_size=2)
    (record,) = caplog.records
    fits = int(record.getMessage().split("num_shards=")[2].split()[0])
    assert fits % 12 == 0 and 0 < fits < 2400
    caplog.clear()
    recipe(datasets, num_shards=fits, rank=0, world_size=2)
    assert not caplog.records
    assert memory_bytes({}, 10, 100) == 6000


def test_the_environment_of_torchrun_says_who_a_process_is(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert distributed.data_parallel(None, None, None) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert distributed.data_parallel(None, None, None) == (3, 8)
    assert distributed.data_parallel(1, 2, None) == (1, 2)


WORKER = """
    import json, os, sys, torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from ibm_nodes import load_recipe
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    arguments = json.loads(sys.argv[1])
    mode = arguments.pop("mode")
    if mode == "mesh":
        arguments["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if mode == "hsdp":
        arguments["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    if mode == "unknown":
        arguments["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "expert"))
    if mode == "differs" and rank == 1:
        arguments["seed"] = 7
    if mode == "missing":
        arguments["datasets"] = {"web": "file:///nowhere/at/all/"}
        arguments["weights"] = {"web": 1}
    try:
        loader = load_recipe("pretrain")(**arguments)
        with loader:
            result = [batch["input_ids"].tolist() for batch, _ in zip(loader, range(2))]
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    print(json.dumps({"rank": rank, "result": result}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""


def ranks(world_size: int, **arguments):
    """Runs the recipe on real gloo ranks; gives what each said."""
    said = children.ranks(WORKER, world_size, json.dumps(arguments))
    return [entry["result"] for entry in sorted(said, key=lambda entry: entry["rank"])]


def settings(datasets):
    return {
        "datasets": datasets,
        "weights": WEIGHTS,
        "seq_len": 64,
        "eos_id": 1,
        "global_batch_size": 12,
        "num_shards": 24,
    }


def test_ranks_of_torch_distributed_share_a_listing_and_yield_the_global_batches(datasets):
    whole = take(recipe(datasets), 2)
    results = ranks(2, mode="plain", **settings(datasets))
    for step in range(2):
        stream = torch.stack([torch.tensor(result[step]) for result in results], 1).reshape(12, 64)
        assert torch.equal(stream, whole[step])


def test_members_of_a_tensor_parallel_group_get_equal_batches(datasets):
    expected = [[batch.tolist() for batch in take(recipe(datasets, rank=rank, world_size=2), 2)] for rank in range(2)]
    assert ranks(4, mode="mesh", **settings(datasets)) == [expected[0], expected[0], expected[1], expected[1]]


def test_both_dimensions_of_hybrid_sharding_are_data_parallel(datasets):
    expected = [[batch.tolist() for batch in take(recipe(datasets, rank=rank, world_size=4), 2)] for rank in range(4)]
    assert ranks(4, mode="hsdp", **settings(datasets)) == expected


def test_ranks_that_differ_are_an_error_on_all_of_them_before_the_first_batch(datasets):
    said = ranks(2, mode="differs", **settings(datasets))
    assert (
        said == ["ValueError: seed must be the same on all ranks: rank 0 and ranks [1] were given different ones"] * 2
    )


def test_an_error_of_the_listing_on_rank_zero_is_raised_on_all_ranks(datasets):
    said = ranks(2, mode="missing", **settings(datasets))
    assert len(set(said)) == 1 and said[0].startswith("FileNotFoundError: no data under file:///nowhere/at/all/")


def test_a_mesh_with_an_unknown_dimension_is_refused(datasets):
    said = ranks(4, mode="unknown", **settings(datasets))
    assert all("got ['expert']: else give rank and world_size" in text for text in said)
