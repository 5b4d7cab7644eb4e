"""Bytes on a real wire against the planner's: FSDP2 over gloo, two hosts of two ranks joined by 50 Mbit/s."""

import json
import os
import subprocess
import sys

import ethernet_hosts
import fsdp_steps
import pytest

from ibm_nodes.recipes.cluster import Cluster
from ibm_nodes.recipes.planner.calibration import calibrate
from ibm_nodes.recipes.planner.job import Job
from ibm_nodes.recipes.planner.shapes import Block, Shape
from ibm_nodes.recipes.planner.traffic import traffic

HOSTS, RANKS, RATE = 2, 2, "50mbit"
MODES = ["full", "no-reshard", "node", "hybrid", "full:2", "hybrid:2"]
"""A strategy, and the number of micro-steps if it is not one."""


@pytest.fixture(scope="module")
def measured():
    """What each mode of training took and sent, by mode."""
    if reason := ethernet_hosts.reason_to_skip():
        pytest.skip(reason)
    world_size = HOSTS * RANKS
    shared = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": f"{ethernet_hosts.SUBNET}.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "WORLD_SIZE": str(world_size),
    }
    command = [sys.executable, fsdp_steps.__file__, "--hosts", str(HOSTS), *MODES]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ethernet_hosts.hosts(HOSTS, RATE) as names:
        processes = []
        for rank in range(world_size):
            env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % RANKS)}
            processes.append(ethernet_hosts.start(names[rank // RANKS], *command, env=env, text=True, **pipes))
        try:
            outputs = [process.communicate(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    found = {entry["mode"]: entry for entry in map(json.loads, outputs[0][0].splitlines())}
    assert list(found) == MODES, outputs
    return found


def job(mode):
    strategy, _, accumulate = mode.partition(":")
    width = fsdp_steps.WIDTH
    block = Block(
        count=fsdp_steps.LAYERS,
        hidden=width,
        width=width,
        kv_width=width,
        ffn=4 * width,
        heads=fsdp_steps.HEADS,
        gated=False,
    )
    shape = Shape(name="small", blocks=(block,), vocab=fsdp_steps.VOCAB)
    cluster = Cluster(nodes=HOSTS, gpus_per_node=RANKS)
    return Job(
        shape=shape,
        cluster=cluster,
        calibration=calibrate(cluster, "tcp", True, {}),
        batch=1,
        seq_len=fsdp_steps.SEQ_LEN,
        accumulate=int(accumulate or 1),
        strategy=strategy,
        param_bytes=4,
        reduce_bytes=4,
        backend="gloo",
    )


def test_the_planner_counts_the_parameters_of_the_model(measured):
    assert {entry["num_params"] for entry in measured.values()} == {job("full").shape.params}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_sends_the_bytes_that_the_planner_says(measured, mode):
    assert measured[mode]["sent"] == pytest.approx(traffic(job(mode))["nic"], rel=0.03)


def test_hybrid_sharding_is_at_least_twice_as_fast_as_full_at_50_mbit(measured):
    assert measured["full"]["seconds"] > 2 * measured["hybrid"]["seconds"]


def test_all_modes_train_the_same_model(measured):
    losses = [measured[mode]["losses"] for mode in MODES if ":" not in mode]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][1] < losses[0][0]
