"""One rank of a small FSDP2 training over gloo: how long a step takes, and what it sends over this host's eth0.

Rank 0 writes a line of JSON for each mode of training.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

WIDTH, LAYERS, HEADS, VOCAB, SEQ_LEN = 96, 4, 4, 384, 16
NUM_STEPS = 2
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        batch = x.shape[0]
        split = self.qkv(self.norms[0](x)).view(batch, SEQ_LEN, 3, HEADS, WIDTH // HEADS)
        mixed = functional.scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, SEQ_LEN, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(strategy, hosts):
    torch.manual_seed(0)
    model = Model()
    ranks = dist.get_world_size()
    if strategy == "hybrid":
        mesh = init_device_mesh("cpu", (hosts, ranks // hosts), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    reshard = {"no-reshard": False, "node": ranks // hosts}.get(strategy, True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh)


def step(model, optimizer, ids, strategy, accumulate):
    for number in range(accumulate):
        last = number == accumulate - 1
        (model.set_requires_all_reduce if strategy == "hybrid" else model.set_requires_gradient_sync)(last)
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def measure(mode, hosts):
    strategy, _, accumulate = mode.partition(":")
    model = build(strategy, hosts)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, VOCAB, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(dist.get_rank()))
    arguments = (model, optimizer, ids, strategy, int(accumulate or 1))
    first = step(*arguments)
    dist.barrier()
    sent, began = int(SENT.read_text()), time.perf_counter()
    for _ in range(NUM_STEPS):
        loss = step(*arguments)
    dist.barrier()
    seconds = (time.perf_counter() - began) / NUM_STEPS
    return {
        "mode": mode,
        "num_params": num_params,
        "seconds": seconds,
        "sent": (int(SENT.read_text()) - sent) / NUM_STEPS,
        "losses": [first, loss],
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int)
    parser.add_argument("modes", nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for mode in options.modes:
        found = measure(mode, options.hosts)
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
