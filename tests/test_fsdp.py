"""FSDP over Ethernet, on real gloo ranks: how models are wrapped, and that no division of the work changes a loss."""

import itertools
import json

import fsdp_ranks
import pytest
import torch
from torch.nn import functional

from ibm_nodes import load_recipe
from ibm_nodes.recipes import ethernet, object_store
from ibm_nodes.recipes.cluster import Cluster, current_cluster
from ibm_nodes.recipes.fsdp_ethernet import choose_strategy
from ibm_nodes.recipes.models import build_model

pytestmark = pytest.mark.timeout(600)  # all ranks' work is done before the first test, on cores that may be few

STEPS, STOP, FEW, BATCH, SEQ_LEN = 20, 14, 5, 8, 32
EXACT = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
HYBRID = {"strategy": "hybrid", **EXACT}
TWO_NODES = {"nodes": 2, "gpus_per_node": 2}
ENGINES = ["fsdp1", "fsdp2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def said(s3, folder):
    """What each rank said, by the name of what it was to do: all of it in one start of the ranks, which takes long."""
    url = object_store.make_bucket(s3.storage_options, "training").rstrip("/")
    return fsdp_ranks.start(folder, training(url, folder) | wrapping() | micro_batches(folder), s3.storage_options)


@pytest.fixture(scope="module")
def runs(said, folder):
    """Training runs on the quick start's corpus on S3, by name: losses, batches and records of the log."""
    found = {}
    for path in folder.glob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        losses = {record["step"]: record["loss"] for record in records}
        ranks = said[path.stem]
        batches = fsdp_ranks.global_batches(ranks, BATCH)
        found[path.stem] = {"losses": losses, "batches": batches, "records": records, "ranks": ranks}
    return found


def training(url, folder):
    data = {"url": f"{url}/corpus", "seq_len": SEQ_LEN, "global_batch_size": BATCH, "num_shards": BATCH}
    common = {"run": "train", "ranks": 4, "data": data, "sharding": EXACT, "train": {"steps": STEPS}}

    def saves(name):
        return {"train": {"steps": STEPS, "checkpoint": f"{url}/{name}"}}

    def loads(name, ranks, target):
        return {"ranks": ranks, "copy": [f"{url}/{name}", f"{url}/{target}"], **saves(target)}

    fsdp2, fsdp1_hybrid = {"sharding": {"engine": "fsdp2", **EXACT}}, {"sharding": HYBRID, "cluster": TWO_NODES}
    fsdp2_hybrid = {"sharding": {"engine": "fsdp2", **HYBRID}, "cluster": TWO_NODES}
    micro = {"data": {**data, "micro_batch_size": 1}, "stop_after": FEW}
    t5 = {"train": {"steps": 3}, "model": "tiny-t5"}
    phases = {
        "fsdp1": {},
        "fsdp2": fsdp2,
        "fsdp1 hybrid": fsdp1_hybrid,
        "fsdp2 hybrid": fsdp2_hybrid,
        "fsdp1 micro": micro,
        "fsdp2 micro": {**micro, **fsdp2_hybrid},
        "fsdp1 bf16": {"sharding": {}, "stop_after": FEW},
        "fsdp2 bf16": {"sharding": {"engine": "fsdp2"}, "stop_after": FEW},
        "fsdp1 stopped": {"stop_after": STOP, **saves("one")},
        "fsdp1 on 2": loads("one", 2, "one-on-2"),
        "fsdp1 on 1": loads("one", 1, "one-on-1"),
        "fsdp1 to fsdp2": {**fsdp2, **loads("one", 4, "one-to-2")},
        "fsdp2 stopped": {"stop_after": STOP, **fsdp2_hybrid, **saves("two")},
        "fsdp2 on 2": {**fsdp2, **loads("two", 2, "two-on-2")},
        "fsdp2 on 1": {**fsdp2, **loads("two", 1, "two-on-1")},
        "t5": t5,
        "t5 on 1": {**t5, "ranks": 1},
    }
    return {name: {**common, "log_file": f"{folder}/{name}.jsonl", **phase} for name, phase in phases.items()}


def wrapping():
    def wrap(cluster=None, **sharding):
        return {"run": "inspect", "ranks": 4, "sharding": sharding, "cluster": cluster or {}}

    def mesh(ranks, strategy, **cluster):
        return {"run": "mesh", "ranks": ranks, "strategy": strategy, "cluster": cluster, "num_params": 1}

    def room(gb):
        return {**TWO_NODES, "gpu_memory_gb": gb}

    return {
        "limited": wrap(),
        "unlimited": wrap(limit_all_gathers=False),
        "hybrid": wrap(TWO_NODES, strategy="hybrid", reduce_dtype="fp32"),
        "default bounds": wrap(engine="fsdp2", strategy="full"),
        "other bounds": wrap(engine="fsdp2", gathers_in_flight=3, reduce_scatter_buffers=2, param_dtype="fp32"),
        "hybrid of fsdp2": wrap(TWO_NODES, engine="fsdp2", strategy="hybrid"),
        # 238,144 parameters: 16 bytes of each on 2 devices are 1.91 MB; on 4, with 2 bytes of each on 2, 1.19 MB.
        "room": wrap(room(0.004)),
        "room for half": wrap(room(0.0037), engine="fsdp2"),
        "room for none": wrap(room(0.002), engine="fsdp2"),
        "wrong class": wrap() | {"block_class": "T5Block"},
        "too few devices": wrap({"nodes": 3, "gpus_per_node": 1}),
        "node on two machines": mesh(4, "full", nodes=1, gpus_per_node=4) | {"local": 2},
        "mesh": mesh(4, "hybrid", **TWO_NODES),
        "flat": mesh(4, "full", **TWO_NODES),
        "recompute fsdp1": {"run": "recompute", "ranks": 2, "sharding": {"engine": "fsdp1"}},
        "recompute fsdp2": {"run": "recompute", "ranks": 2, "sharding": {"engine": "fsdp2"}},
    }


def micro_batches(folder):
    phases = {}
    for engine, strategy in itertools.product(ENGINES, ("full", "hybrid")):
        place = folder / f"{engine}-{strategy}"
        place.mkdir()
        sharding = {"engine": engine, "strategy": strategy, **EXACT}
        cluster = TWO_NODES if strategy == "hybrid" else {}
        phase = {"run": "micro", "ranks": 4, "sharding": sharding, "cluster": cluster, "folder": str(place)}
        phases[f"micro {engine} {strategy}"] = phase
    return phases


def test_losses_agree_whatever_the_engine_and_the_strategy(runs):
    expected = runs["fsdp1"]["losses"]
    assert list(expected) == list(range(1, STEPS + 1))
    assert expected[STEPS] < expected[1] - 1
    for name in ("fsdp2", "fsdp1 hybrid", "fsdp2 hybrid"):
        assert runs[name]["losses"] == pytest.approx(expected, abs=1e-4), name
        assert runs[name]["batches"] == runs["fsdp1"]["batches"]


@pytest.mark.parametrize("name", ["fsdp1 micro", "fsdp2 micro"])
def test_micro_steps_change_no_loss(runs, name):
    few = {step: runs["fsdp1"]["losses"][step] for step in range(1, FEW + 1)}
    assert runs[name]["losses"] == pytest.approx(few, abs=1e-4)
    assert runs[name]["batches"] == runs["fsdp1"]["batches"][:FEW]


@pytest.mark.parametrize("name", ["fsdp1 on 2", "fsdp1 on 1", "fsdp1 to fsdp2", "fsdp2 on 2", "fsdp2 on 1"])
def test_a_run_that_was_stopped_goes_on_with_the_same_losses_and_batches(runs, name):
    whole = runs["fsdp1"]
    stopped = runs[f"{name[:5]} stopped"]
    assert stopped["ranks"][0]["done"] == STOP
    assert stopped["losses"] == pytest.approx({step: whole["losses"][step] for step in range(1, STOP + 1)}, abs=1e-4)
    rest = {step: whole["losses"][step] for step in range(STOP + 1, STEPS + 1)}
    assert runs[name]["losses"] == pytest.approx(rest, abs=1e-4)
    assert stopped["batches"] + runs[name]["batches"] == whole["batches"]


def test_bf16_is_near_to_32_bits_with_both_engines(runs):
    few = {step: runs["fsdp1"]["losses"][step] for step in range(1, FEW + 1)}
    for name in ("fsdp1 bf16", "fsdp2 bf16"):
        assert runs[name]["losses"] == pytest.approx(few, abs=0.02)
        assert runs[name]["losses"] != pytest.approx(few, abs=1e-6)


def test_t5_trains_on_any_number_of_ranks(runs):
    assert runs["t5"]["losses"] == pytest.approx(runs["t5 on 1"]["losses"], abs=1e-4)
    assert len(runs["t5"]["losses"]) == 3


def test_a_record_says_speed_and_datasets(runs):
    for record in runs["fsdp1"]["records"]:
        assert record["tokens_per_second"] == pytest.approx(BATCH * SEQ_LEN / record["seconds"])
        assert 0 <= record["waited_share"] <= 1
        assert record["mfu"] is None
        datasets = record["datasets"]
        assert set(datasets) == {"code", "prose"}
        assert sum(entry["share"] for entry in datasets.values()) == pytest.approx(1)
        assert all(entry["tokens"] > 0 and entry["passes"] >= 0 for entry in datasets.values())
    first = runs["fsdp1"]["records"][0]
    alone = runs["fsdp1 on 1"]["records"][0]
    assert alone["learning_rate"] == runs["fsdp1"]["records"][STOP]["learning_rate"] < first["learning_rate"] * 4
    assert first["learning_rate"] == pytest.approx(3e-3 / 4)
    lines = [rank["lines"] for rank in runs["fsdp1"]["ranks"]]
    assert lines[0][0].startswith(f"step 1  loss {first['loss']:.4f}  ") and lines[1:] == [[], [], []]
    assert "  code " in lines[0][0] and "tokens/s" in lines[0][0]


def test_the_losses_of_the_datasets_are_the_parts_of_the_loss(runs):
    """What is said of the datasets does not depend on the ranks, and the loss lies between them."""
    for step in range(STOP, STEPS):
        record, alone = runs["fsdp1"]["records"][step], runs["fsdp1 on 1"]["records"][step - STOP]
        losses = {name: entry["loss"] for name, entry in record["datasets"].items() if entry["loss"] is not None}
        others = {name: entry["loss"] for name, entry in alone["datasets"].items() if entry["loss"] is not None}
        assert losses == pytest.approx(others, abs=1e-4)
        assert min(losses.values()) - 1e-4 <= record["loss"] <= max(losses.values()) + 1e-4
        tokens, alone_tokens = ({n: e["tokens"] for n, e in r["datasets"].items()} for r in (record, alone))
        assert tokens == alone_tokens


# How models are wrapped


def test_the_limiter_is_what_was_asked_for_in_every_unit_and_at_work(said):
    for name, limit in (("limited", True), ("unlimited", False)):
        assert [rank["limits"] for rank in said[name]] == [[limit] * 5] * 4  # the root and four blocks
    assert all(rank["waits"] > 0 for rank in said["limited"])
    assert all(rank["waits"] == 0 for rank in said["unlimited"])


def test_fsdp1_is_wrapped_for_ethernet(said):
    for found in said["limited"]:
        assert found["strategies"] == ["FULL_SHARD"] * 5
        assert found["prefetch"] == ["BACKWARD_PRE"] * 5
        assert found["orig"] == [True] * 5
        assert found["dtypes"] == [["torch.bfloat16", "torch.bfloat16"]] * 5
    for found in said["hybrid"]:
        assert found["strategies"] == ["HYBRID_SHARD"] * 5
        assert found["dtypes"] == [["torch.bfloat16", "torch.float32"]] * 5


def test_the_bounds_of_fsdp2_are_those_asked_for(said):
    for found in said["default bounds"]:
        assert found["forward"] == found["backward"] == [[]] * 5
        assert found["buffers"] == [1] * 5
        assert found["dtypes"] == [["torch.bfloat16", "torch.bfloat16"]] * 5
    for found in said["other bounds"]:  # 0 is the root
        assert found["forward"] == [[1, 2], [2, 3], [3, 4], [4], []]
        assert found["backward"] == [[], [], [1], [2, 1], [3, 2]]
        assert found["buffers"] == [2] * 5
        assert found["dtypes"] == [["torch.float32", "torch.bfloat16"]] * 5


def test_the_mesh_follows_the_strategy_and_the_room(said):
    assert said["mesh"][0] == {"shape": [2, 2], "names": ["dp_replicate", "dp_shard"], "ranks": [0, 1, 2, 3]}
    assert said["flat"][0] == {"shape": [4], "names": ["dp_shard"], "ranks": [0, 1, 2, 3]}
    assert said["hybrid of fsdp2"][0]["mesh"] == [2, 2]
    assert said["room"][0]["strategies"] == ["HYBRID_SHARD"] * 5
    assert said["room for half"][0]["mesh"] == [4] == said["room for none"][0]["mesh"]
    assert said["room for half"][0]["after_forward"][1:] == [2] * 4  # gathered for the backward from the node alone
    assert said["room for none"][0]["after_forward"][1:] == [4] * 4
    assert said["default bounds"][0]["after_forward"][1:] == [4] * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_recomputation_changes_the_work_and_not_the_loss(said, engine):
    (none, selective, full) = (said[f"recompute {engine}"][0][kind] for kind in ("none", "selective", "full"))
    assert (none[0], selective[0], full[0]) == (4, 6, 8)
    assert none[1] == selective[1] == full[1]


@pytest.mark.parametrize("strategy", ["full", "hybrid"])
@pytest.mark.parametrize("engine", ENGINES)
def test_micro_batches_give_the_loss_and_gradient_of_the_whole_batch(said, folder, engine, strategy):
    ids, labels = fsdp_ranks.padded_batch()
    model = build_model("tiny")
    logits = model(ids)[:, :-1].flatten(0, 1)
    loss = functional.cross_entropy(logits, labels[:, 1:].flatten())  # the mean over the labels that count
    loss.backward()
    for micro_steps in (1, 2, 4):
        for rank in said[f"micro {engine} {strategy}"]:
            assert rank[str(micro_steps)][0] == pytest.approx(loss.item(), abs=1e-6)
        kept = torch.load(folder / f"{engine}-{strategy}" / f"{micro_steps}.pt")
        assert set(kept) == set(dict(model.named_parameters()))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(kept[name].view(parameter.shape), parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("strategy", ["full", "hybrid"])
@pytest.mark.parametrize("engine", ENGINES)
def test_micro_steps_reduce_no_gradient_across_nodes(said, engine, strategy):
    calls = {micro_steps: said[f"micro {engine} {strategy}"][0][str(micro_steps)][2] for micro_steps in (1, 2, 4)}
    gathers = "c10d::allgather_" if engine == "fsdp1" else "c10d::_allgather_base_"
    for micro_steps in (2, 4):
        more = {name: count - calls[1][name] for name, count in calls[micro_steps].items() if count != calls[1][name]}
        # Four blocks and the root are gathered in the forward, the blocks again in the backward.
        expected = {gathers: 9 * (micro_steps - 1)}
        if (engine, strategy) == ("fsdp2", "hybrid"):
            expected["c10d::_reduce_scatter_base_"] = 5 * (micro_steps - 1)  # within the node
        assert more == expected
    assert calls[1]["c10d::_reduce_scatter_base_"] == 5


def test_says_what_does_not_fit(said):
    blocks = "there are Embedding, Linear, LlamaBlock, ModuleList, RMSNorm"
    assert said["wrong class"][0]["error"] == (
        f"block_class must be the class of a module in the model, got T5Block: {blocks}"
    )
    assert said["too few devices"][0]["error"] == (
        "cluster must have a device for each process, got 3 nodes x 1 = 3 devices for 4 processes"
    )
    assert said["node on two machines"][0]["error"] == (
        "gpus_per_node must divide the 2 processes of a machine, got 4: a node would lie on two machines, and Ethernet "
        "carry what was meant for NVLink"
    )


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"engine": "fsdp3"}, "engine must be one of fsdp1, fsdp2, got 'fsdp3'"),
        ({"strategy": "ddp"}, "strategy must be one of auto, full, hybrid, got 'ddp'"),
        (
            {"activation_checkpointing": "some"},
            "activation_checkpointing must be one of none, selective, full, got 'some'",
        ),
        ({"param_dtype": "fp16"}, "param_dtype must be one of bf16, fp32, got 'fp16'"),
        ({"reduce_dtype": "fp16"}, "reduce_dtype must be one of bf16, fp32, got 'fp16'"),
        ({"gathers_in_flight": 1}, "gathers_in_flight must be at least 2 and reduce_scatter_buffers at least 1"),
        ({"engine": "fsdp2", "limit_all_gathers": False}, "limit_all_gathers must be True with fsdp2"),
        ({"gathers_in_flight": 3}, "gathers_in_flight and reduce_scatter_buffers must be 2 and 1 with fsdp1"),
        ({"reduce_scatter_buffers": 2}, "gathers_in_flight and reduce_scatter_buffers must be 2 and 1 with fsdp1"),
    ],
)
def test_refuses_what_does_not_apply_before_anything_is_started(wrong, text):
    with pytest.raises(ValueError) as error:
        load_recipe("fsdp-ethernet")(build_model("tiny"), "LlamaBlock", **wrong)
    assert str(error.value).startswith(text)
    assert not torch.distributed.is_initialized()


def test_hybrid_is_chosen_where_there_are_nodes_and_room():
    cluster = Cluster(nodes=64, gpus_per_node=8, gpu_memory_gb=80)
    assert choose_strategy(cluster, 20_000_000_000) == "hybrid"  # 16 B x 20e9 / 8 = 40 GB
    assert choose_strategy(cluster, 20_000_000_001) == "full"
    assert choose_strategy(Cluster(nodes=1), 1) == "full"


def test_the_environment_for_ethernet_leaves_the_users_own(monkeypatch):
    for name in (*ethernet.DEFAULTS, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert ethernet.environment() == ethernet.DEFAULTS
    found = ethernet.environment(["net1", "net2"])
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("=net1,net2", "net1,net2")
    threads = int(found["NCCL_SOCKET_NTHREADS"]) * int(found["NCCL_NSOCKS_PERTHREAD"])
    assert threads <= 64
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    found = ethernet.environment(["net1"])
    assert "NCCL_IB_DISABLE" not in found and "NCCL_SOCKET_IFNAME" not in found


def test_the_cluster_of_this_job_is_torchruns(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    known = {"device": "cpu"}
    assert (current_cluster(known).nodes, current_cluster(known).gpus_per_node) == (2, 8)
    found = current_cluster({"nodes": 4, **known})
    assert (found.nodes, found.gpus_per_node, found.device) == (4, 4, "cpu")
    found = current_cluster({"gpus_per_node": 2, "gpu_memory_gb": 7.5, **known})
    assert (found.nodes, found.gpus_per_node, found.gpu_memory_gb) == (8, 2, 7.5)
    with pytest.raises(ValueError, match="nodes must be above 0"):
        current_cluster({"nodes": 0})
