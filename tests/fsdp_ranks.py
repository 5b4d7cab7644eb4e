"""A program that tests of FSDP run as real gloo ranks: one process a rank, one group of them a phase."""

import collections
import contextlib
import hashlib
import json
import os
import subprocess
import sys

import fsspec
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ibm_nodes.recipes.cluster import Cluster
from ibm_nodes.recipes.fsdp_ethernet import data_mesh, fsdp_ethernet
from ibm_nodes.recipes.models import build_model
from ibm_nodes.recipes.quickstart import quickstart
from ibm_nodes.recipes.train_step import Objective, train_step
from ibm_nodes.recipes.trainer import train

CLUSTER = {"nodes": 1, "device": "cpu"}


def start(folder, phases, storage_options=None):
    """Runs phases, and gives what each rank says of each of them: a list of ranks by name of the phase."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    given = json.dumps([str(folder), phases, storage_options])
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-W", "error", __file__, str(rank)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(max(phase["ranks"] for phase in phases.values()))
    ]
    try:
        for process in processes:
            process.stdin.write(given)
            process.stdin.close()
            process.stdin = None
        said = []
        for process in processes:
            output, errors = process.communicate(timeout=500)
            assert output, errors
            said.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {name: [ranks[name] for ranks in said if name in ranks] for name in phases}


def global_batches(ranks, size):
    """The hashes of the samples of each step, in the order of the global stream."""
    dealt = [digest for turn in zip(*(rank["digests"] for rank in ranks), strict=True) for digest in turn]
    return [dealt[begin : begin + size] for begin in range(0, len(dealt), size)]


class Digester:
    """Keeps a hash of each sample that a loader's collator is given."""

    def __init__(self, collate):
        self.collate, self.digests = collate, []
        self.shift_labels = collate.shift_labels

    def __call__(self, samples):
        self.digests += [hashlib.sha256(sample.tokens.astype("<i8").tobytes()).hexdigest()[:12] for sample in samples]
        return self.collate(samples)


def run_train(phase, options):
    """Trains, and says what was logged and which samples were drawn."""
    records, found = [], []

    def make_loader(rank, world_size):
        loader = quickstart(**phase["data"], storage_options=options, rank=rank, world_size=world_size)
        batcher = loader.root.source
        batcher.collate = Digester(batcher.collate)
        found.append((batcher, loader))
        return loader

    last = phase.get("stop_after")
    steps_begun = []

    def stopped():
        steps_begun.append(None)
        return last is not None and len(steps_begun) >= last and dist.get_rank() == dist.get_world_size() - 1

    model = build_model(phase.get("model", "tiny"))
    log_file = phase["log_file"]
    done = train(
        make_loader,
        model,
        model.block_class,
        **{"learning_rate": 3e-3, "warmup_steps": 4, "log_every": 1, "log_file": log_file, **phase["train"]},
        cluster=Cluster(**{**CLUSTER, "gpus_per_node": dist.get_world_size(), **phase.get("cluster", {})}),
        sharding=phase.get("sharding"),
        global_batch_size=phase["data"]["global_batch_size"],
        storage_options=options,
        stopped=stopped,
        say=lambda line: records.append(line),
    )
    batcher, _ = found[0]
    drawn = len(steps_begun) * phase["data"]["global_batch_size"] // dist.get_world_size()
    return {"done": done, "lines": records, "digests": batcher.collate.collate.digests[:drawn]}


class Keeper(torch.optim.Optimizer):
    """An optimizer that only keeps the gradients, whole."""

    def __init__(self, model):
        super().__init__(model.parameters(), {})
        self.model = model

    def step(self):
        if isinstance(self.model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self.model, with_grads=True):
                self.kept = {name: parameter.grad.clone() for name, parameter in self.model.named_parameters()}
            self.kept = {name.replace("_fsdp_wrapped_module.", ""): grad for name, grad in self.kept.items()}
        else:
            grads = {name: parameter.grad for name, parameter in self.model.named_parameters()}
            self.kept = {
                name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()
            }


def padded_batch():
    """32 samples, of which some are short and some have masked spans; one has no label at all."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 512, (32, 24), generator=generator)
    labels = ids.clone()
    for row in range(32):
        length = 24 - (5 * row) % 23
        ids[row, length:], labels[row, length:] = 0, -100
        labels[row, : (3 * row) % 11] = -100
    labels[7] = -100
    return ids, labels


def run_micro(phase, options):
    """Gives the loss and the gradient of the same 32 samples, for several sizes of micro-batches."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ids, labels = (part[rank::world_size] for part in padded_batch())
    cluster = Cluster(**{**CLUSTER, "gpus_per_node": world_size, **phase.get("cluster", {})})
    result = {}
    for micro_steps in (1, 2, 4):
        model = fsdp_ethernet(build_model("tiny"), "LlamaBlock", cluster=cluster, **phase["sharding"])
        objective = Objective(model, inputs=(), shifted=False, device=torch.device("cpu"))
        keeper = Keeper(model)
        size = len(ids) // micro_steps
        batches = iter({"input_ids": i, "labels": j} for i, j in zip(ids.split(size), labels.split(size), strict=True))
        with recorded(rank == 0) as names:
            found = train_step(objective, keeper, batches, micro_steps=micro_steps, max_norm=1e9)
        calls = collections.Counter(name for name in names if name.startswith("c10d::"))
        result[str(micro_steps)] = [found.loss.item(), found.norm.item(), calls]
        if rank == 0:
            torch.save(keeper.kept, f"{phase['folder']}/{micro_steps}.pt")
    return result


def run_inspect(phase, options):
    """Says how a model was wrapped."""
    model = build_model("tiny")
    cluster = Cluster(**{**CLUSTER, "gpus_per_node": dist.get_world_size(), **phase.get("cluster", {})})
    try:
        model = fsdp_ethernet(model, phase.get("block_class", "LlamaBlock"), cluster=cluster, **phase["sharding"])
    except ValueError as error:
        return {"error": str(error)}
    if isinstance(model, FullyShardedDataParallel):
        units = FullyShardedDataParallel.fsdp_modules(model)
        return {
            "waits": limiter_waits(model),
            "limits": [unit.limit_all_gathers for unit in units],
            "strategies": [unit.sharding_strategy.name for unit in units],
            "prefetch": [unit.backward_prefetch.name for unit in units],
            "dtypes": [
                [str(unit.mixed_precision.param_dtype), str(unit.mixed_precision.reduce_dtype)] for unit in units
            ],
            "orig": [unit._use_orig_params for unit in units],
        }
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states = [unit._get_fsdp_state() for unit in units]
    places = {id(state): place for place, state in enumerate(states)}
    groups = [state._fsdp_param_group for state in states]
    return {
        "forward": [[places[id(other)] for other in state._states_to_forward_prefetch] for state in states],
        "backward": [[places[id(other)] for other in state._states_to_backward_prefetch] for state in states],
        "buffers": [group.reduce_scatter_max_input_buffers for group in groups],
        "mesh": list(groups[0].mesh_info.mesh.shape),
        "after_forward": [info and info.shard_mesh_size for info in (group.post_forward_mesh_info for group in groups)],
        "dtypes": [[str(group.mp_policy.param_dtype), str(group.mp_policy.reduce_dtype)] for group in groups],
    }


def limiter_waits(model):
    """How often FSDP1's limiter holds the process in a forward and backward."""
    ids, _ = padded_batch()
    with recorded(True) as names:
        model(ids[:2]).sum().backward()
    return names.count("FullyShardedDataParallel.rate_limiter")


@contextlib.contextmanager
def recorded(wanted):
    """Gives a list that has the names of what torch's profiler saw in the block, if that is wanted."""
    names = []
    if not wanted:
        yield names
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield names
    names += [event.name() for event in profile.profiler.kineto_results.events()]  # events() takes seconds


def run_recompute(phase, options):
    """Counts how often blocks are computed in a step, and gives the loss after it."""
    ids, labels = padded_batch()
    result = {}
    for kind in ("none", "selective", "full"):
        model = build_model("tiny")
        calls = []
        for block in model.blocks:
            block.attention_norm.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
        cluster = Cluster(**CLUSTER, gpus_per_node=dist.get_world_size())
        model = fsdp_ethernet(
            model, "LlamaBlock", cluster=cluster, activation_checkpointing=kind, param_dtype="fp32", **phase["sharding"]
        )
        objective = Objective(model, inputs=(), shifted=False, device=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batch = {"input_ids": ids, "labels": labels}
        train_step(objective, optimizer, iter([batch]), micro_steps=1, max_norm=1e9)
        count = len(calls)
        found = train_step(objective, optimizer, iter([batch]), micro_steps=1, max_norm=1e9)
        result[kind] = [count, found.loss.item()]
    return result


def run_mesh(phase, options):
    """Says which mesh is made of a cluster, or what is wrong with it."""
    try:
        mesh = data_mesh(Cluster(device="cpu", **phase["cluster"]), phase["strategy"], phase["num_params"])
    except ValueError as error:
        return {"error": str(error)}
    return {"shape": list(mesh.shape), "names": list(mesh.mesh_dim_names), "ranks": mesh.mesh.flatten().tolist()}


def main(rank):
    torch.set_num_threads(1)
    folder, phases, options = json.load(sys.stdin)
    said = {}
    for name, phase in phases.items():
        if rank < phase["ranks"]:
            os.environ["LOCAL_WORLD_SIZE"] = str(phase.get("local", phase["ranks"]))
            meet = f"file://{folder}/meet-{name.replace(' ', '-')}"
            dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=phase["ranks"])
            if rank == 0 and "copy" in phase:
                copy(*phase["copy"], options)
            dist.barrier()
            said[name] = globals()[f"run_{phase['run']}"](phase, options)
            dist.barrier()
            dist.destroy_process_group()
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def copy(source, target, options):
    """Copies a folder of the store."""
    files, root = fsspec.url_to_fs(source, **(options or {}))
    _, there = fsspec.url_to_fs(target, **(options or {}))
    for path in files.find(root):
        files.pipe_file(path.replace(root, there), files.cat_file(path))


if __name__ == "__main__":
    main(int(sys.argv[1]))
