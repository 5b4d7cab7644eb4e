"""Stateful: the loader beside an FSDP2 model and AdamW in torch's distributed checkpoints, loaded on other ranks."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap
import threading

import corpora
import pytest
import torch
import torch.distributed.checkpoint as dcp
from sources import same

from ibm_nodes import Batcher, CausalLMCollator, Loader, Packer, Prefetcher, Reader, Sharder, Shuffler
from ibm_nodes.checkpoint import Stateful

BATCH = NUM_SHARDS = 12
SEQ_LEN = 16

WORKER = """
    import functools, json, sys
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from ibm_nodes import Batcher, CausalLMCollator, Loader, Packer, Prefetcher, Reader, Sharder, Shuffler
    from ibm_nodes.checkpoint import Stateful

    url, rank, phases = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])

    def graph(shard, num_shards):
        packer = Packer(Reader(url, shard=shard, num_shards=num_shards), seq_len=16, eos_id=1)
        return Shuffler(packer, buffer_size=3, seed=shard)

    class App:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

        def state_dict(self):
            model, optimizer = get_state_dict(self.model, self.optimizer)
            return {"model": model, "optimizer": optimizer}

        def load_state_dict(self, state):
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )

    def run(plan, world_size):
        dist.init_process_group("gloo", init_method=plan["meet"], rank=rank, world_size=world_size)
        own = dist.new_group(backend="gloo")
        mesh = init_device_mesh("cpu", (world_size,))
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(1 << 10, 24), torch.nn.Linear(24, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1)
        )
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        node = Sharder(graph, num_shards=12, rank=rank, world_size=world_size)
        node = Batcher(node, batch_size=12 // world_size, collate=CausalLMCollator(shift_labels=False))
        loader = Loader(Prefetcher(node, prefetch_factor=2))
        state = {"app": App(model, optimizer), "loader": Stateful(loader)}
        losses, batches, pending = [], [], None
        if plan["load"]:
            dcp.load(state, checkpoint_id=plan["load"])
        for step in range(plan["first"], plan["last"] + 1):
            if str(step) in plan["save"]:
                dcp.save(state, checkpoint_id=plan["save"][str(step)])
            if str(step) in plan["async_save"]:
                pending = dcp.async_save(state, checkpoint_id=plan["async_save"][str(step)], process_group=own)
            if step == plan["last"]:
                break
            ids = next(iter(loader))["input_ids"]
            batches.append(ids.tolist())
            loss = model(ids % (1 << 10)).mean(1).pow(2).add(model(ids % 7).mean(1).sub(1).abs()).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            dist.all_reduce(loss)
            losses.append(loss.item() / world_size)
        if pending is not None:
            pending.result()
        loader.close()
        dist.barrier()
        dist.destroy_process_group()
        return {"losses": losses, "batches": batches}

    if __name__ == "__main__":
        results = [run(plan, plan["ranks"]) if rank < plan["ranks"] else None for plan in phases]
        print(json.dumps(results), flush=True)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    root = f"file://{tmp_path_factory.mktemp('data')}/web/"
    return corpora.write(root, [corpora.every(corpora.documents([3, 40, 0, 90] * 30, stride=100), 7)] * 2, "parquet")


def build(url, rank=0, world_size=1, *, batch=BATCH, prefetch=2, eos_id=1):
    def graph(shard, num_shards):
        packer = Packer(Reader(url, shard=shard, num_shards=num_shards), seq_len=SEQ_LEN, eos_id=eos_id)
        return Shuffler(packer, buffer_size=3, seed=shard)

    node = Sharder(graph, num_shards=NUM_SHARDS, rank=rank, world_size=world_size)
    node = Batcher(node, batch_size=batch // world_size, collate=CausalLMCollator(shift_labels=False))
    return Loader(Prefetcher(node, prefetch_factor=prefetch))


def steps(group, count):
    """The global batches that a group of loaders yields, from a multiple of their number on."""
    batches = []
    for _ in range(count):
        parts = [next(iter(loader))["input_ids"] for loader in group]
        batches.append(torch.stack(parts, 1).reshape(-1, SEQ_LEN))
    return batches


def close(group):
    for loader in group:
        loader.close()


def launch(folder: pathlib.Path, url: str, phases):
    """Runs phases on real gloo ranks, each with a group of its own; gives each one's losses and global batches.

    (A phase has new models, optimizers and loaders, but not new processes, which take seconds to start.)
    """
    script = folder / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    common = {"load": None, "save": {}, "async_save": {}}
    phases = [{**common, "meet": f"file://{folder}/meet{number}", **plan} for number, plan in enumerate(phases)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(script), url, str(rank), json.dumps(phases)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(max(plan["ranks"] for plan in phases))
    ]
    try:
        said = []
        for process in processes:
            output, errors = process.communicate(timeout=100)
            assert output, errors
            said.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = []
    for plan, ranks in zip(phases, zip(*said, strict=True), strict=True):
        ranks = ranks[: plan["ranks"]]
        assert all(entry["losses"] == pytest.approx(ranks[0]["losses"], rel=1e-6) for entry in ranks)
        parts = [torch.tensor(entry["batches"]) for entry in ranks]
        results.append((ranks[0]["losses"], list(torch.stack(parts, 2).reshape(-1, BATCH, SEQ_LEN))))
    return results


@pytest.fixture(scope="module")
def runs(url, tmp_path_factory):
    """Six steps that nothing interrupts, saved after three at once and in the background, and runs that go on."""
    folder = tmp_path_factory.mktemp("checkpoints")
    four, behind, two = f"{folder}/four", f"{folder}/behind", f"{folder}/two"
    phases = {
        "whole": {"ranks": 4, "first": 0, "last": 6, "save": {3: four}, "async_save": {3: behind}},
        "four to two": {"ranks": 2, "first": 3, "last": 6, "load": four, "save": {4: two}},
        "two to four": {"ranks": 4, "first": 4, "last": 6, "load": two},
        "four to three": {"ranks": 3, "first": 3, "last": 6, "load": four},
        "async to three": {"ranks": 3, "first": 3, "last": 6, "load": behind},
        "async to four": {"ranks": 4, "first": 3, "last": 6, "load": behind},
    }
    return dict(zip(phases, launch(folder, url, list(phases.values())), strict=True))


def test_an_uninterrupted_run_yields_the_stream_of_one_rank_and_learns(url, runs):
    losses, batches = runs["whole"]
    loader = build(url)
    assert all(map(torch.equal, batches, steps([loader], 6))) and len(batches) == 6
    close([loader])
    assert len(set(losses)) == 6


@pytest.mark.parametrize("name, first", [
    ("four to two", 3), ("two to four", 4), ("four to three", 3), ("async to three", 3), ("async to four", 3)
])  # fmt: skip
def test_other_ranks_go_on_with_the_losses_and_batches_of_the_uninterrupted_run(runs, name, first):
    losses, batches = runs[name]
    expected, stream = runs["whole"]
    assert losses == pytest.approx(expected[first:], rel=1e-4)
    assert len(batches) == len(losses) == 6 - first
    assert all(map(torch.equal, batches, stream[first:]))


def through(before, after):
    """What DCP does with bytes: all keys are united, one of equals wins, and a rank gets those it asks for."""
    saved = {}
    for loader in before:
        leaves = Stateful(loader).state_dict()
        assert all(type(name) is str and type(leaf) is bytes for name, leaf in leaves.items())
        twice = saved.keys() & leaves.keys()
        assert twice <= {Stateful.COMMON_KEY}
        assert all(saved[name] == leaves[name] for name in twice)
        saved |= leaves
    for loader in after:
        part = Stateful(loader)
        part.load_state_dict({name: saved[name] for name in part.state_dict()})
    return saved


@pytest.mark.parametrize("after", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("before", [1, 3, 4, 12])
def test_every_world_size_goes_on_where_every_other_stopped(url, before, after):
    one = build(url)
    expected = steps([one], 5)
    group = [build(url, rank, before) for rank in range(before)]
    steps(group, 2)
    others = [build(url, rank, after) for rank in range(after)]
    saved = through(group, others)
    assert len(saved) == NUM_SHARDS + 1
    assert all(map(torch.equal, steps(others, 3), expected[2:]))
    close([one, *group, *others])


def test_before_the_first_batch_the_leaves_are_empty_and_nothing_is_started():
    threads = threading.active_count()
    for world_size in (1, 3):
        for rank in range(world_size):
            loader = build("file:///nowhere/at/all/", rank, world_size)  # to list it would be an error
            leaves = Stateful(loader).state_dict()
            owned = range(rank, NUM_SHARDS, world_size)
            assert leaves == {"common": b"", **{f"shard.{shard:06}": b"" for shard in owned}}
            assert threading.active_count() == threads
            loader.close()


def test_a_checkpoint_from_before_the_first_batch_is_the_beginning(url):
    expected = steps([one := build(url)], 2)
    used = [build(url, rank, 2) for rank in range(2)]
    steps(used, 1)
    through([build(url, rank, 3) for rank in range(3)], used)
    assert all(map(torch.equal, steps(used, 2), expected))
    close([one, *used])


@pytest.mark.parametrize("first", [1, 2, 5])
def test_saved_again_before_the_first_batch_after_a_load(url, first):
    """At a position that has not come to every rank's shards yet, which is no beginning."""
    one = build(url, batch=1)
    expected = steps([one], first + 8)
    before = build(url, batch=1)
    steps([before], first)
    close([one, before])
    between = [build(url, rank, 4, batch=4) for rank in range(4)]
    through([before], between)
    after = build(url, batch=1)
    through(between, [after])
    assert all(map(torch.equal, steps([after], 8), expected[first:]))
    close([after])


def test_a_state_is_not_changed_by_what_comes_after_it(url):
    loader = build(url)
    steps([loader], 2)
    part = Stateful(loader)
    leaves = part.state_dict()
    copy = dict(leaves)
    expected = steps([loader], 2)
    assert same(leaves, copy)
    part.load_state_dict(leaves)
    assert all(map(torch.equal, steps([loader], 2), expected))
    close([loader])


@pytest.mark.filterwarnings("ignore")
def test_one_process_saves_and_loads_without_a_process_group(url, tmp_path):
    loader = build(url)
    steps([loader], 2)
    dcp.save({"loader": Stateful(loader)}, checkpoint_id=f"{tmp_path}/saved")
    expected = steps([loader], 2)
    other = build(url)
    dcp.load({"loader": Stateful(other)}, checkpoint_id=f"{tmp_path}/saved")
    assert all(map(torch.equal, steps([other], 2), expected))
    close([loader, other])


def test_bytes_that_are_no_state_are_an_error_that_names_the_leaf(url):
    loader = build(url)
    steps([loader], 1)
    part = Stateful(loader)
    leaves = part.state_dict()
    for name in ("common", "shard.000003"):
        for wrong in (b"x", leaves[name][:-9]):
            with pytest.raises(ValueError, match=name):
                part.load_state_dict({**leaves, name: wrong})
    close([loader])


def test_another_setting_is_an_error_of_the_load_and_not_of_a_later_step(url):
    loader, other = build(url), build(url, eos_id=2)
    steps([loader], 3)
    with pytest.raises(ValueError, match="eos_id=1 and is now built with eos_id=2"):
        Stateful(other).load_state_dict(Stateful(loader).state_dict())
    close([loader, other])


def test_a_loader_without_a_sharder_is_refused(url):
    with pytest.raises(ValueError, match="must have a Sharder"):
        Stateful(Loader(Reader(url, shard=0, num_shards=1)))
