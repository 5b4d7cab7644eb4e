"""Resuming in a recipe: where torch.distributed is up, rank 0 chooses the step for all ranks."""

import json

import children
import corpora
import pytest
import torch

from ibm_nodes import checkpoint
from ibm_nodes.recipes.distributed import resume
from ibm_nodes.recipes.pretrain import pretrain

SETTINGS = {"weights": {"web": 1}, "seq_len": 16, "eos_id": 1, "global_batch_size": 12, "num_shards": 12}

WORKER = """
    import itertools, json, sys
    import torch.distributed as dist
    from ibm_nodes import checkpoint
    from ibm_nodes.recipes.distributed import resume
    from ibm_nodes.recipes.pretrain import pretrain

    dist.init_process_group("gloo")
    rank, url, target, settings = dist.get_rank(), sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    said = {"rank": rank}

    def train(loader, step):
        next(iter(loader))
        next(iter(loader))
        checkpoint.save(loader, target, step=step).result()
        dist.barrier()

    with pretrain({"web": url}, **settings) as loader:
        said["at first"] = resume(loader, target)
        try:
            resume(loader, target, missing="error")
        except FileNotFoundError as error:
            said["error"] = str(error)
        train(loader, 2)
        before = checkpoint.find(target)  # a listing, which will be stale
        dist.barrier()
        train(loader, 4)
    listed = []
    if rank:
        checkpoint.find = lambda *arguments: listed.append(arguments) or before
    said["alone"] = checkpoint.choose(target).step
    listed.clear()
    with pretrain({"web": url}, **settings) as loader:
        found = resume(loader, target)
        said |= {"step": found.step, "position": found.position, "changes": found.changes, "listed": len(listed)}
        said["batch"] = next(iter(loader))["input_ids"].tolist()
    print(json.dumps(said), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    root = f"file://{tmp_path_factory.mktemp('data')}/web/"
    return corpora.write(root, [corpora.every(corpora.documents([3, 40, 0, 90] * 30), 7)], "parquet")


def run(world_size, *arguments):
    """Runs the worker on real gloo ranks; gives what each said, by rank."""
    return sorted(children.ranks(WORKER, world_size, *arguments), key=lambda entry: entry["rank"])


def test_a_rank_with_a_stale_listing_starts_at_the_step_of_rank_zero(url, tmp_path):
    target = f"file://{tmp_path}/run"
    with pretrain({"web": url}, rank=0, world_size=1, **SETTINGS) as loader:
        expected = [next(iter(loader))["input_ids"] for _ in range(5)][4]
    said = run(3, url, target, json.dumps(SETTINGS))
    assert [entry["alone"] for entry in said] == [4, 2, 2]
    for entry in said:
        assert (entry["step"], entry["position"], entry["changes"], entry["listed"]) == (4, 48, [], 0)
        assert entry["at first"] is None
        assert entry["error"] == f"no complete checkpoint under {target}: none is complete"
    batch = torch.stack([torch.tensor(entry["batch"]) for entry in said], 1).reshape(-1, 16)
    assert torch.equal(batch, expected)


def test_one_process_resumes_as_it_would_load(url, tmp_path):
    target = f"file://{tmp_path}/run"
    with pretrain({"web": url}, rank=0, world_size=1, **SETTINGS) as loader:
        assert resume(loader, target) is None
        next(iter(loader))
        checkpoint.save(loader, target, step=1).result(30)
        expected = next(iter(loader))["input_ids"]
    with pretrain({"web": url}, rank=0, world_size=1, **SETTINGS) as loader:
        assert resume(loader, target).step == 1
        assert torch.equal(next(iter(loader))["input_ids"], expected)
