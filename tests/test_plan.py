"""The planner: its numbers beside published ones, its sums, its tables and picture, and what it refuses."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from ibm_nodes.recipes import models
from ibm_nodes.recipes.cluster import Cluster
from ibm_nodes.recipes.llama import Llama
from ibm_nodes.recipes.plan import plan
from ibm_nodes.recipes.planner.calibration import calibrate
from ibm_nodes.recipes.planner.job import Job
from ibm_nodes.recipes.planner.memory import memory
from ibm_nodes.recipes.planner.outcome import largest_batch, outcome
from ibm_nodes.recipes.planner.shapes import SHAPES
from ibm_nodes.recipes.planner.timing import timing
from ibm_nodes.recipes.planner.traffic import traffic
from ibm_nodes.recipes.t5 import T5, T5Shape

GIB = 1 << 30
PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
T5_11B = {"model": "t5-11b", "seq_len": 512}
BEFORE = {**T5_11B, "batch": 20, "limit_all_gathers": False}
AFTER = {**T5_11B, "batch": 50}
A100 = {"nodes": 16, "nic": "8x50", "usable_fraction": 1.0, "transport": "rdma"}
H100 = {"nodes": 12, "nic": "8x100", "usable_fraction": 1.0, "transport": "rdma", "device": "h100"}
FMS = {
    "llama-7b": {"strategy": "hybrid", "activation_checkpointing": "none"},
    "llama-13b": {"activation_checkpointing": "1/3"},
    "llama-34b": {},
    "llama-70b": {},
}
TITAN = {
    "model": "llama-8b",
    "device": "h100",
    "gpu_memory_gb": 96.0,
    "nic": "8x400",
    "usable_fraction": 1.0,
    "transport": "rdma",
    "batch": 2,
    "seq_len": 8192,
    "activation_checkpointing": "op",
    "reduce_dtype": "fp32",
}


def data(**arguments):
    return plan(**arguments).data


def allocated(**arguments):
    """GiB that the allocator has, as torchtitan reports them."""
    parts = data(**arguments)["memory_bytes"]
    return (parts["total"] - parts["context"]) / GIB


def job(model="llama-7b", *, nodes=2, gpus=8, strategy="full", **more):
    shape = SHAPES[model]
    cluster = Cluster(nodes=nodes, gpus_per_node=gpus)
    calibration = calibrate(cluster, "tcp", shape.fused_attention, {})
    more = {"batch": 2, "seq_len": 4096, **more}
    return Job(shape=shape, cluster=cluster, calibration=calibration, strategy=strategy, **more)


# Published numbers


@pytest.mark.parametrize(("nodes", "eager", "compiled"), [(1, 82.4, 77.0), (16, 67.0, 62.0)])
def test_memory_is_within_a_tenth_of_torchtitans(nodes, eager, compiled):
    planned = allocated(nodes=nodes, **TITAN)
    assert planned == pytest.approx(eager, rel=0.1)
    assert planned == pytest.approx(compiled, rel=0.1)


def test_memory_that_sharding_over_128_devices_instead_of_8_frees_is_within_a_tenth_of_torchtitans():
    freed = allocated(nodes=1, **TITAN) - allocated(nodes=16, **TITAN)
    assert freed == pytest.approx(82.4 - 67.0, rel=0.1)
    assert freed == pytest.approx(77.0 - 62.0, rel=0.1)


@pytest.mark.parametrize(
    ("cluster", "model", "mfu", "tokens"),
    [
        (A100, "llama-7b", 0.68, 4550),
        (A100, "llama-13b", 0.61, 2150),
        (A100, "llama-34b", 0.55, 820),
        (A100, "llama-70b", 0.55, 410),
        (H100, "llama-7b", 0.46, 9600),
        (H100, "llama-13b", 0.43, 4850),
        (H100, "llama-34b", 0.38, 1830),
        (H100, "llama-70b", 0.38, 890),
    ],
)
def test_mfu_is_within_a_twentieth_of_fms_fsdps(cluster, model, mfu, tokens):
    planned = data(model=model, batch=2, seq_len=4096, **cluster, **FMS[model])
    assert planned["mfu"] == pytest.approx(mfu, abs=0.05)
    assert planned["tokens_per_second"] == pytest.approx(tokens, rel=0.15)
    assert planned["verdict"] == "hides"


@pytest.mark.parametrize("model", FMS)
def test_what_hides_at_400_gbps_does_not_on_two_cards_of_100_by_sockets(model):
    planned = data(model=model, batch=2, seq_len=4096, nodes=16, **FMS[model])
    assert planned["verdict"] == "does not hide"
    assert planned["first_change"]


def test_t5_3b_hides_over_512_devices_without_the_limiter():
    planned = data(model="t5-3b", nodes=64, batch=128, seq_len=512, limit_all_gathers=False)
    assert planned["scaling"] == pytest.approx(0.95, abs=0.05)
    assert planned["verdict"] != "does not hide"


def test_t5_11b_hides_over_512_devices_only_with_the_batch_that_the_limiter_allows():
    before, after = data(nodes=64, **BEFORE), data(nodes=64, **AFTER)
    assert before["scaling"] == pytest.approx(0.2, abs=0.15)
    assert after["scaling"] == pytest.approx(0.8, abs=0.15)
    assert 3.5 < after["scaling"] / before["scaling"] < 5.5
    assert (before["verdict"], after["verdict"]) == ("does not hide", "nearly hides")
    assert data(nodes=32, **AFTER)["scaling"] == pytest.approx(0.9, abs=0.15)


def test_the_limiter_frees_memory_without_which_a_batch_of_50_does_not_fit():
    gathered = data(nodes=64, **AFTER)["gathered_bytes"]
    assert gathered["no limiter"] - gathered["limiter"] > 15e9
    with pytest.raises(ValueError, match="memory must fit into 80 GB, got 81.4 GB .*: it would fit with the limiter$"):
        plan(nodes=64, **AFTER, limit_all_gathers=False)


def test_operations_of_t5_are_those_of_the_published_formula():
    found = outcome(job("t5-11b", nodes=64, batch=50, seq_len=512))
    rate = found.job.calibration.peak_tflops * 1e12 * found.job.calibration.compute
    batch, seq, hidden, vocab = 50, 512, 4096, 32128
    blocks = 96 * (54 * batch * seq * hidden**2 + 12 * batch * seq**2 * hidden)
    computed = found.timing.forward.compute + found.timing.backward.compute
    assert computed * rate == pytest.approx(blocks + 6 * batch * seq * hidden * vocab, rel=0.01)


# Sums


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_of_the_models_of_that_name(name):
    with torch.device("meta"):
        shape = models.SHAPES[name]
        model = (T5 if isinstance(shape, T5Shape) else Llama)(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(SHAPES[name].params, rel=1e-4)


def test_shapes_have_the_parameters_that_their_names_and_papers_say():
    published = {
        "t5-3b": 2.85e9,
        "t5-11b": 11.1e9,
        "llama-1b": 1.10e9,
        "llama-7b": 6.74e9,
        "llama-8b": 8.03e9,
        "llama-13b": 13.02e9,
        "llama-34b": 33.7e9,
        "llama-70b": 68.98e9,
    }
    assert {name: shape.params for name, shape in SHAPES.items()} == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(
    ("strategy", "nic", "nvlink"),
    [
        ("full", lambda p, root: (4 * p - 2 * root + 2 * p) * 15 / 16, None),
        ("no-reshard", lambda p, root: 4 * p * 15 / 16, None),
        ("node", lambda p, root: 4 * p * 15 / 16, lambda p, root: 4 * p * 15 / 16 + 2 * (p - root) * 7 / 8),
        ("hybrid", lambda p, root: 2 * p, lambda p, root: (6 * p - 2 * root) * 7 / 8),
    ],
)
def test_bytes_of_a_step_follow_from_parameters_and_strategy(strategy, nic, nvlink):
    shape = SHAPES["llama-7b"]
    moved = traffic(job(strategy=strategy))
    assert moved["nic"] == pytest.approx(nic(shape.params, shape.root_params))
    assert moved["nvlink"] == pytest.approx((nvlink or nic)(shape.params, shape.root_params))


def test_accumulation_gathers_for_each_micro_step_and_reduces_over_the_network_once():
    shape = SHAPES["llama-7b"]
    gathered = 2 * (2 * shape.params - shape.root_params) * 15 / 16
    reduced = 2 * shape.params * 15 / 16
    assert traffic(job(accumulate=4))["nic"] == pytest.approx(4 * gathered + reduced)
    assert traffic(job(accumulate=4, strategy="hybrid"))["nic"] == traffic(job(strategy="hybrid"))["nic"]


def test_a_single_device_moves_nothing_and_one_node_nothing_over_its_cards():
    assert traffic(job(nodes=1, gpus=1)) == {"nic": 0, "nvlink": 0}
    assert traffic(job(nodes=1))["nic"] == 0 < traffic(job(nodes=1))["nvlink"]
    assert timing(job(nodes=1, gpus=1)).step.exposed == 0


@pytest.mark.parametrize("strategy", ["full", "no-reshard", "node", "hybrid"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("nodes", [1, 2, 64])
def test_a_phase_takes_at_least_its_computing_and_at_most_all_after_one_another(strategy, accumulate, nodes):
    found = timing(job(strategy=strategy, accumulate=accumulate, nodes=nodes))
    for phase in (found.forward, found.backward):
        assert phase.compute <= phase.seconds <= phase.compute + phase.communication
        assert phase.seconds >= phase.communication - 1e-9 or strategy in ("node", "hybrid")
    assert found.step.seconds == pytest.approx(found.forward.seconds + found.backward.seconds + found.optimizer.seconds)


def test_communication_hides_once_there_are_tokens_enough_whatever_the_size_of_the_model():
    """With checkpointing, backward has 6 operations a parameter and token for 4 bytes a parameter."""
    for model in ("llama-7b", "llama-70b"):
        base = job(model, nodes=64)
        measured = dataclasses.replace(base.calibration, node_hop_us=0.0, gpu_hop_us=0.0, nvlink=1.0)
        bandwidth = base.cluster.nic_gbps * base.cluster.usable_fraction * measured.bus / 8 * 1e9
        rate = measured.peak_tflops * 1e12 * measured.compute
        enough = 4 * rate / (6 * bandwidth)

        def waits(tokens, base=base, measured=measured):
            at = dataclasses.replace(base, batch=round(tokens / 512), seq_len=512, calibration=measured)
            backward = timing(at).backward
            return backward.exposed / backward.seconds

        assert waits(0.8 * enough) > 0.1
        assert waits(1.1 * enough) < 0.05


def test_the_band_holds_the_step_and_narrows_with_the_calibration():
    wide = data(nodes=64, **AFTER)
    low, high = wide["step_seconds_band"]
    assert low < 0.9 * wide["step_seconds"] < 1.1 * wide["step_seconds"] < high
    exact = data(nodes=64, **AFTER, calibration={"compute_error": 0, "bus_error": 0})
    assert exact["step_seconds_band"] == pytest.approx([wide["step_seconds"]] * 2)


def test_every_constant_of_the_calibration_can_be_given_and_changes_the_plan():
    before = data(nodes=4, **BEFORE)
    for name, value in before["calibration"].items():
        after = data(nodes=4, **BEFORE, calibration={name: 0.9 * value})
        changed = [key for key in before if before[key] != after[key]]
        assert "calibration" in changed and len(changed) > 1, name


def test_the_largest_batch_fits_and_the_next_does_not():
    most = largest_batch(job())
    sizes = [memory(job(batch=batch)).total for batch in (most, most + 1)]
    assert sizes[0] <= 80e9 < sizes[1]


def test_a_model_of_numbers_is_planned_as_the_one_that_has_them():
    named = data(model="llama-7b", nodes=8)
    shape = SHAPES["llama-7b"]
    numbers = data(params=str(shape.params), layers=32, hidden=4096, vocab=32000, nodes=8)
    for key in ("step_seconds", "mfu", "nic_bytes"):
        assert numbers[key] == pytest.approx(named[key], rel=0.01)
    assert data(layers=32, hidden=4096, vocab=32000)["params"] == pytest.approx(
        2 * 32000 * 4096 + 32 * 12 * 4096**2, rel=1e-3
    )
    assert data(params="7B", layers=32, hidden=4096, vocab=32000)["params"] == pytest.approx(7e9, rel=1e-3)


def test_the_loaders_share_follows_from_the_tokens_of_a_node():
    found = data(model="llama-1b", nodes=4, batch=8, transport="rdma", num_datasets=5, bytes_per_token=2)
    loader, tokens = found["loader"], found["tokens_per_second"] * 8
    assert loader["corpus"] == pytest.approx(2 * tokens)
    assert loader["cores"] == pytest.approx(tokens / found["calibration"]["core_tokens"])
    assert loader["num_shards"] == 256
    assert loader["memory"] == pytest.approx(64 * (5 * 2 * (2 << 20) + 16 * 4096 * 6))
    assert loader["checkpoint"] == pytest.approx(12 * found["params"] / 4)
    assert loader["checkpoint_rate"] == pytest.approx(loader["checkpoint"] / 1800)


def test_the_global_batch_gives_the_number_of_micro_steps():
    assert data(model="llama-7b", nodes=2, batch=4, global_batch_size=256)["accumulate"] == 4


# Advice


def test_the_first_change_makes_the_step_as_much_faster_as_it_says():
    planned = data(nodes=64, **AFTER)
    assert planned["first_change"].startswith("strategy hybrid: 1.16 times as fast, 60.9 GB a device")
    changed = data(nodes=64, **AFTER, strategy="hybrid")
    assert changed["tokens_per_second"] / planned["tokens_per_second"] == pytest.approx(1.16, abs=0.005)
    assert changed["memory_bytes"]["total"] / 1e9 == pytest.approx(60.9, abs=0.05)


def test_no_change_is_named_where_none_helps():
    planned = plan("llama-1b", nodes=1, batch=2, activation_checkpointing="none")
    assert planned.data["first_change"] is None
    assert planned.text.endswith(
        "first change that would help: none of those known; the device's own speed is the limit"
    )


# Bad input


@pytest.mark.parametrize(
    ("arguments", "kind", "sentence"),
    [
        (
            {"model": "t6"},
            LookupError,
            "no model 't6': there are t5-3b, t5-11b, llama-1b, llama-7b, llama-8b, llama-13b, llama-34b, llama-70b; "
            "for another give layers, hidden and vocab",
        ),
        ({"layers": 3, "hidden": 8}, ValueError, "model must be one of .*, or .* be given: vocab is not"),
        ({"model": "llama-7b", "layers": 3}, ValueError, "model must be given alone, got layers too: "),
        (
            {"layers": 32, "hidden": 4096, "vocab": 32000, "params": "1B"},
            ValueError,
            "params must be above 2,409,893,888, which .* got 1,000,000,000",
        ),
        (
            {"layers": 1, "hidden": 8, "vocab": 8, "params": "many"},
            ValueError,
            "params must be a number above 0, such as 11e9 or 11B, got 'many'",
        ),
        (
            {"model": "llama-70b", "nodes": 16, "strategy": "hybrid"},
            ValueError,
            r"memory must fit into 80 GB, got 163.2 GB \(optimizer 69.0, .*\) on each device: it would fit with "
            "strategy full",
        ),
        (
            {"model": "llama-7b", "nodes": 8, "batch": 500},
            ValueError,
            "memory must fit into 80 GB, .* on each device: it would fit with batch ",
        ),
        (
            {"model": "llama-70b", "nodes": 1},
            ValueError,
            "memory must fit into 80 GB, .* on each device: it would fit with 4 nodes",
        ),
        (
            {"layers": 1, "hidden": 40960, "vocab": 128256, "params": "200B"},
            ValueError,
            "memory must fit .*: no batch, sharding or number of nodes makes it fit",
        ),
        (
            {"model": "llama-7b", "nodes": 6, "global_batch_size": 1024},
            ValueError,
            "global_batch_size must be a multiple of nodes x gpus x batch = 48, got 1024: the next smaller number of "
            "nodes that fits is 4",
        ),
        (
            {"model": "llama-7b", "nodes": 2, "batch": 3, "global_batch_size": 128},
            ValueError,
            "global_batch_size must be a multiple of .* = 48, got 128: choose a batch that divides it",
        ),
        (
            {"model": "llama-7b", "accumulate": 2, "global_batch_size": 1024},
            ValueError,
            "accumulate and global_batch_size must not be given together",
        ),
        ({"model": "llama-7b", "accumulate": 0}, ValueError, "accumulate must be at least 1, got 0"),
        ({"model": "llama-7b", "batch": 0}, ValueError, "batch must be at least 1, got 0"),
        ({"model": "llama-7b", "nodes": 0}, ValueError, "nodes must be above 0"),
        ({"model": "llama-7b", "save_minutes": 0.0}, ValueError, "save_minutes must be above 0, got 0.0"),
        ({"model": "llama-7b", "nvlink_gbps": 0.0}, ValueError, "nvlink_gbps must be above 0"),
        ({"model": "llama-7b", "nic": "2y100"}, ValueError, "nic must be cards x Gbit/s, such as 2x100, got '2y100'"),
        ({"model": "llama-7b", "nic": "0x100"}, ValueError, "nic must be cards"),
        (
            {"model": "llama-7b", "device": "cuda"},
            ValueError,
            "device must be one of a100, h100, h200, got 'cuda': for another give calibration peak_tflops, compute",
        ),
        (
            {"model": "llama-7b", "calibration": {"bas": 1.0}},
            LookupError,
            "no calibration 'bas': there are compute, bus",
        ),
        (
            {"model": "llama-7b", "calibration": {"bus": 25.0}},
            ValueError,
            "calibration bus must be above 0 to 1, got 25",
        ),
        (
            {"model": "llama-7b", "calibration": {"slack": -1.0}},
            ValueError,
            "calibration slack must be from 0 on, got -1",
        ),
        (
            {"model": "llama-7b", "activation_checkpointing": "1/0"},
            ValueError,
            "activation_checkpointing must be none, selective, full, op or a share such as 1/3, got '1/0'",
        ),
        (
            {"model": "llama-7b", "sweep": "gpus=1,2"},
            ValueError,
            "sweep must be one of nodes, batch, seq_len, accumulate",
        ),
        ({"model": "llama-7b", "sweep": "nodes=1,x"}, ValueError, "sweep must be one of .*, got 'nodes=1,x'"),
        ({"model": "llama-7b", "plot": "x.png"}, ValueError, "plot must come with sweep"),
    ],
)
def test_bad_input_is_one_clear_sentence(arguments, kind, sentence):
    with pytest.raises(kind, match=f"^{sentence}"):
        plan(**arguments)


# The command


def test_the_command_prints_all_parts_of_a_plan(ibm_nodes):
    arguments = "--model t5-11b --nodes 64 --gpus 8 --nic 2x100 --batch 50 --seq-len 512"
    code, out, error = ibm_nodes("plan", *arguments.split())
    assert (code, error) == (0, "")
    assert out.splitlines()[:2] == [
        "t5-11b: 11.14 billion parameters in 48 blocks; 64 x 8 a100, 200 Gbps a node",
        "full sharding, limiter on; 50 x 512 tokens a device, 13.1 million a step",
    ]
    assert "gathered units take 1.6 GB with the limiter, 22.3 GB without\n" in out
    assert "communication nearly hides: 20% of the step waits for the network\n" in out
    assert "first change that would help: strategy hybrid" in out
    parts = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[4:13])
    assert sum(map(float, parts.values())) == pytest.approx(37.9, abs=0.5)


def test_the_command_writes_the_same_as_json(ibm_nodes):
    code, out, _ = ibm_nodes("plan", "--model", "llama-7b", "--nodes", "8", "--calibration", "bus=0.5", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(data(model="llama-7b", nodes=8, calibration={"bus": 0.5})))


def test_the_command_says_what_is_wrong_in_one_line(ibm_nodes):
    for arguments in (["--model", "t6"], ["--mdel", "t5-3b"], ["--nodes", "many", "--model", "t5-3b"]):
        code, out, error = ibm_nodes("plan", *arguments)
        assert (code, out) == (1, "")
        assert error.startswith("ibm-nodes: ") and error.count("\n") == 1


def test_a_sweep_is_a_table_and_a_picture(ibm_nodes, tmp_path):
    picture = tmp_path / "scaling.png"
    flags = ["--model", "t5-11b", "--batch", "50", "--seq-len", "512", "--sweep", "nodes=1,8,64", "--plot", picture]
    code, out, error = ibm_nodes("plan", *flags)
    assert (code, error) == (0, "")
    head, *rows = [line.split() for line in out.splitlines()[:4]]
    assert head[0] == "nodes"
    assert [row[0] for row in rows] == ["1", "8", "64"]
    assert [row[5] for row in rows] == ["100%", "86%", "80%"]
    assert out.splitlines()[3].endswith("48% (batch 47)")
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000


def test_a_sweep_says_where_memory_does_not_fit_and_gives_no_speed_there():
    report = plan("llama-70b", batch=1, seq_len=4096, sweep="nodes=1,16", limit_all_gathers=True)
    small, large = report.data
    assert not small["fits"] and small["step_seconds"] is None and small["no_limiter"]["batch"] is None
    assert large["fits"] and large["scaling"] > 0
    assert "memory does not fit" in report.text.splitlines()[1]


@pytest.mark.parametrize(("sweep", "key"), [("batch=1,2", "batch"), ("seq_len=512,1024", "seq_len")])
def test_a_sweep_plans_each_value_as_a_plan_of_its_own(sweep, key):
    for row in plan("llama-7b", nodes=8, sweep=sweep).data:
        alone = data(model="llama-7b", nodes=8, **{key: row[key]})
        assert row["step_seconds"] == alone["step_seconds"]


def test_a_sweep_at_a_fixed_global_batch_changes_the_micro_steps():
    rows = plan("llama-7b", batch=1, sweep="nodes=1,2,4", global_batch_size=64, nic="8x400", transport="rdma").data
    assert rows[0]["step_seconds"] > 1.8 * rows[1]["step_seconds"] > 3.2 * rows[2]["step_seconds"]


# The page


def published():
    """Runs with what was published and what is planned, as lines of the page's table."""
    rows = []
    for devices, nodes, eager, compiled in ((8, 1, 82.4, 77.0), (128, 16, 67.0, 62.0)):
        planned = f"{allocated(nodes=nodes, **TITAN):.1f} GiB"
        rows.append((f"torchtitan, Llama 8B, {devices} H100: memory", f"{eager}, compiled {compiled} GiB", planned))
    for device, cluster, figures in (
        ("128 A100", A100, ((0.68, 4550), (0.61, 2150), (0.55, 820), (0.55, 410))),
        ("96 H100", H100, ((0.46, 9600), (0.43, 4850), (0.38, 1830), (0.38, 890))),
    ):
        for (model, choices), (mfu, tokens) in zip(FMS.items(), figures, strict=True):
            found = data(model=model, batch=2, seq_len=4096, **cluster, **choices)
            planned = f"{found['mfu']:.2f}, {found['tokens_per_second']:,.0f} tokens/s"
            name = f"fms-fsdp, Llama {model.removeprefix('llama-').upper()}, {device}: MFU, a device's speed"
            rows.append((name, f"{mfu}, {tokens:,} tokens/s", planned))
    small = data(model="t5-3b", nodes=64, batch=128, seq_len=512, limit_all_gathers=False)
    rows.append(("T5-3B, 512 A100: scaling", "95 %", f"{small['scaling']:.0%}".replace("%", " %")))
    for name, figure, nodes, choices in (
        ("T5-11B, 512 A100, batch 20, no limiter: scaling", "20 %", 64, BEFORE),
        ("T5-11B, 512 A100, batch 50, limiter: scaling", "80 %", 64, AFTER),
        ("T5-11B, 256 A100, batch 50, limiter: scaling", "90 %", 32, AFTER),
    ):
        rows.append((name, figure, f"{data(nodes=nodes, **choices)['scaling']:.0%}".replace("%", " %")))
    return [f"| {' | '.join(row)} |" for row in rows]


def test_the_page_shows_what_is_planned():
    text = PAGE.read_text()
    table = text[text.index("| run | published") :].split("\n\n")[0].splitlines()[2:]
    assert table == published()


def test_the_page_shows_what_the_commands_print(ibm_nodes):
    blocks = re.findall(r"```console\n\$ ibm-nodes ([^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for arguments, shown in blocks:
        assert ibm_nodes(*arguments.split()) == (0, shown, "")


def test_the_page_has_every_constant_with_its_default():
    text = PAGE.read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text, re.MULTILINE))
    defaults = data(model="llama-7b", nodes=8)["calibration"]
    assert list(table) == sorted(defaults, key=list(table).index)
    for name, value in defaults.items():
        assert float(table[name].split()[0]) == pytest.approx(value), name
