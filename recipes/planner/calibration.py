"""Calibration: what no formula gives, with where each default comes from."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ibm_nodes.recipes.cluster import Cluster

Transport = Literal["tcp", "rdma"]

FUSED_EFFICIENCY = {"a100": 0.71, "h100": 0.49, "h200": 0.49}
"""Share of the peak while computing, with fused attention and torch.compile: the mean of fms-fsdp's published HFU on
A100, and of its published MFU and what is computed again on H100."""
UNFUSED_EFFICIENCY = {"a100": 0.48, "h100": 0.33, "h200": 0.33}
"""The same without either: assumed for T5 on A100, within the 45 to 50 % usual in 2022; the others in proportion."""
HBM_BYTES = {"a100": 2.0e12, "h100": 3.35e12, "h200": 4.8e12}
"""Bytes a second of the device's memory, from NVIDIA's data sheets."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What measurement must give, each a default that a user's own measurement replaces.

    Args:
        compute: share of the device's peak that is reached while computing.
        bus: share of the usable bandwidth of the network cards that collectives reach.
        nvlink: the same of NVLink.
        node_hop_us: microseconds that a ring spends for each node, whatever the size.
        gpu_hop_us: the same for each further device of a node.
        unlimited: how many times as long gathers and reductions take without the limiter.
        context_gb: GB of a device that the allocator does not have: CUDA context and NCCL's buffers.
        slack: what the allocator holds and cannot use, as a share of what it gives out.
        peak_tflops: dense bf16 peak of the device, in 10^12 operations a second.
        hbm_gbs: GB a second of the device's memory.
        core_tokens: tokens a second that a core loads, mixes and packs.
        compute_error: the step time's band assumes that ``compute`` may be off by this share.
        bus_error: the same for ``bus`` and the hops.

    Raises:
        ValueError: if a number is out of range.
    """

    compute: float
    bus: float
    nvlink: float = 0.75
    node_hop_us: float
    gpu_hop_us: float = 5.0
    unlimited: float = 1.6
    context_gb: float = 1.5
    slack: float = 0.05
    peak_tflops: float
    hbm_gbs: float
    core_tokens: float = 17e6
    compute_error: float = 0.1
    bus_error: float = 0.25

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            share = field.name in ("compute", "bus", "nvlink", "compute_error", "bus_error")
            zero = field.name in ("node_hop_us", "gpu_hop_us", "context_gb", "slack", "compute_error", "bus_error")
            if not (value > 0 or (zero and value == 0)) or value == float("inf") or (share and value > 1):
                low = "from 0" if zero else "above 0"
                raise ValueError(f"calibration {field.name} must be {low}{' to 1' if share else ' on'}, got {value}")


NETWORK = {"tcp": {"bus": 0.25, "node_hop_us": 100.0}, "rdma": {"bus": 0.8, "node_hop_us": 15.0}}
"""Of plain sockets a quarter of the bandwidth was used on the cluster of 11 billion parameters, as its authors report;
the rest is assumed: a round trip between virtual machines, and what NCCL reaches on RoCE and InfiniBand."""


def calibrate(cluster: Cluster, transport: Transport, fused_attention: bool, own: Mapping[str, float]) -> Calibration:
    """Gives the defaults for a cluster and a model, with a user's own measurements in their place.

    Raises:
        LookupError: if one of the user's is none of these.
        ValueError: if a number is out of range, or the device is one of which nothing is known.
    """
    names = [field.name for field in dataclasses.fields(Calibration)]
    if unknown := [name for name in own if name not in names]:
        raise LookupError(f"no calibration {unknown[0]!r}: there are {', '.join(names)}")
    found = dict(NETWORK[transport])
    if cluster.peak_flops is not None:
        efficiency = FUSED_EFFICIENCY if fused_attention else UNFUSED_EFFICIENCY
        found |= {
            "peak_tflops": cluster.peak_flops / 1e12,
            "compute": efficiency[cluster.device],
            "hbm_gbs": HBM_BYTES[cluster.device] / 1e9,
        }
    found |= own
    if missing := [name for name in ("peak_tflops", "compute", "hbm_gbs") if name not in found]:
        raise ValueError(
            f"device must be one of {', '.join(FUSED_EFFICIENCY)}, got {cluster.device!r}: for another give "
            f"calibration {', '.join(missing)}"
        )
    return Calibration(**found)
