"""Process groups over plain TCP Ethernet."""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By type of device. Checkpoints need gloo beside NCCL."""

DEFAULTS = {
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_BUFFSIZE": str(8 << 20),
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""NCCL by sockets, with the threads that its documentation suggests for 100G networks (the product may be 64 at most)
and buffers twice its own; and an allocator that leaves fewer gaps."""


def environment(interfaces: Sequence[str] = ()) -> dict[str, str]:
    """Gives the variables that suit TCP Ethernet, without those that are set already: the user's own come first.

    Args:
        interfaces: exact names of the network interfaces for NCCL and gloo; none leaves the choice to them.
    """
    found = dict(DEFAULTS)
    if interfaces:
        found["NCCL_SOCKET_IFNAME"] = "=" + ",".join(interfaces)
        found["GLOO_SOCKET_IFNAME"] = ",".join(interfaces)
    return {name: value for name, value in found.items() if name not in os.environ}


def start(device_type: str, interfaces: Sequence[str] = ()) -> None:
    """Starts torch.distributed as torchrun says, or for this process alone, unless it is up already.

    On CUDA it sets the variables of ``environment`` and takes this process's device.

    Raises:
        ValueError: if there is no CUDA device.
    """
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device must be 'cpu' on this machine: torch finds no CUDA device here")
        if not dist.is_initialized():
            os.environ.update(environment(interfaces))
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        store, rank, world_size = next(rendezvous("env://"))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # The store outlives the workers of an attempt, and would give those of the next one their dead addresses.
            store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(BACKENDS[device_type], store=store, rank=rank, world_size=world_size)
    else:
        dist.init_process_group(BACKENDS[device_type], store=HashStore(), rank=0, world_size=1)
