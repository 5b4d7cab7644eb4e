"""Cluster: the numbers that decide how to shard."""

import pytest

from ibm_nodes.recipes.cluster import DEVICES, Cluster


def test_counts_processes_and_knows_its_device():
    cluster = Cluster(nodes=200)
    assert (cluster.world_size, cluster.device_type, cluster.peak_flops) == (1600, "cuda", 312e12)
    cluster = Cluster(nodes=2, gpus_per_node=3, device="cpu")
    assert (cluster.world_size, cluster.device_type, cluster.peak_flops) == (6, "cpu", None)
    assert Cluster(device="cuda").peak_flops is None
    assert all(Cluster(device=device).device_type in ("cpu", "cuda") for device in DEVICES)


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"nodes": 0}, "nodes must be above 0 and finite, got 0"),
        ({"gpus_per_node": -1}, "gpus_per_node must be above 0 and finite, got -1"),
        ({"nic_gbps": 0.0}, "nic_gbps must be above 0 and finite, got 0.0"),
        ({"gpu_memory_gb": float("inf")}, "gpu_memory_gb must be above 0 and finite, got inf"),
        ({"memory_gb": float("nan")}, "memory_gb must be above 0 and finite, got nan"),
        ({"usable_fraction": 120}, "usable_fraction must be at most 1, got 120: it is a share of nic_gbps, not Gbit/s"),
        ({"device": "a10"}, "device must be one of cpu, cuda, a100, h100, h200, got 'a10'"),
    ],
)
def test_refuses_numbers_out_of_range_and_unknown_devices(wrong, text):
    with pytest.raises(ValueError) as error:
        Cluster(**wrong)
    assert str(error.value) == text


@pytest.mark.parametrize("wrong", [{"nodes": 2.0}, {"vcpus": "8"}, {"nodes": True}, {"nic_gbps": "2x100"}])
def test_refuses_numbers_of_another_class(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(TypeError, match=f"{name} must be an? (integer|number), got {value!r}"):
        Cluster(**wrong)
