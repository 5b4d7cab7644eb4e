"""The cluster that a model is trained on, in the numbers that decide how to shard it."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

PEAK_FLOPS = {"a100": 312e12, "h100": 989e12, "h200": 989e12}
"""Dense bf16 operations a second of the SXM modules, from NVIDIA's data sheets."""
DEVICES = ("cpu", "cuda", *PEAK_FLOPS)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What there is of nodes, devices and network.

    The defaults are a node of the cluster on which PyTorch and IBM trained 11 billion parameters over Ethernet.

    Args:
        nodes: number of machines.
        gpus_per_node: devices, and so processes, on each.
        nic_gbps: line rate of all network cards of a node together, in Gbit/s each way: 200 for 2 x 100 Gbps.
        usable_fraction: how much of it collectives can use, from above 0 to 1; 120 of 200 Gbps were reported there.
        nvlink_gbps: what joins the devices of a node, in Gbit/s each way of one device; 2,400 is an A100's, whose data
            sheet says 600 GB/s for both ways together.
        gpu_memory_gb: memory of a device, in GB of 10^9 bytes.
        vcpus: logical cores of a node.
        memory_gb: memory of a node, in GB of 10^9 bytes.
        device: "a100", "h100" or "h200"; "cuda" for another one, of which the peak is not known; "cpu".

    Raises:
        ValueError: if a number is out of range, or the device is not one of these.
        TypeError: if a count is not an integer.
    """

    nodes: int = 1
    gpus_per_node: int = 8
    nic_gbps: float = 200.0
    usable_fraction: float = 0.6
    nvlink_gbps: float = 2400.0
    gpu_memory_gb: float = 80.0
    vcpus: int = 96
    memory_gb: float = 1200.0
    device: str = "a100"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "device":
                continue
            whole = field.type in (int, "int")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise TypeError(f"{field.name} must be {'an integer' if whole else 'a number'}, got {value!r}")
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{field.name} must be above 0 and finite, got {value}")
        if self.usable_fraction > 1:
            raise ValueError(
                f"usable_fraction must be at most 1, got {self.usable_fraction}: it is a share of nic_gbps, not Gbit/s"
            )
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {self.device!r}")

    @property
    def world_size(self) -> int:
        """The number of processes, one a device."""
        return self.nodes * self.gpus_per_node

    @property
    def device_type(self) -> str:
        """What torch calls the device: "cuda" or "cpu"."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 operations a second of a device, or None where they are not known."""
        return PEAK_FLOPS.get(self.device)


def current_cluster(known: Mapping[str, Any] | None = None) -> Cluster:
    """Gives the cluster of this job, as torchrun and the machine say; what is known is taken as it is.

    Args:
        known: arguments of ``Cluster``.

    Raises:
        ValueError, TypeError: as ``Cluster`` does.
    """
    known = dict(known or {})
    Cluster(**known)  # checks what is divided by below
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if "nodes" in known:
        known.setdefault("gpus_per_node", max(1, world_size // known["nodes"]))
    else:
        known.setdefault("gpus_per_node", int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        known["nodes"] = max(1, world_size // known["gpus_per_node"])
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    device, gpu_memory_gb = "cpu", memory_gb / known["gpus_per_node"]
    if known.get("device") != "cpu" and torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower()
        device = next((known_name for known_name in PEAK_FLOPS if known_name in name), "cuda")
        gpu_memory_gb = torch.cuda.get_device_properties().total_memory / 1e9
    found = Cluster(device=device, gpu_memory_gb=gpu_memory_gb, vcpus=os.cpu_count() or 1, memory_gb=memory_gb)
    return replace(found, **known)
