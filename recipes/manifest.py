"""The command ``ibm-nodes manifest``: a job of Kubernetes for the trainer, of the cluster that ``plan`` is told of."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from ibm_nodes.recipes import ethernet, kubernetes
from ibm_nodes.recipes.cluster import Cluster
from ibm_nodes.recipes.planner.cards import network_cards
from ibm_nodes.recipes.planner.loading import num_shards as default_num_shards
from ibm_nodes.recipes.planner.report import Report, tell

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def command(given: Sequence[str], say: Callable[[str], None]) -> int:
    """Runs ``manifest`` with flags."""
    return tell(manifest, given, say)


def manifest(
    datasets: Mapping[str, str],
    *,
    weights: Mapping[str, float],
    seq_len: int,
    eos_id: int,
    global_batch_size: int,
    name: str,
    image: str,
    kind: Literal["trainjob", "pytorchjob"] = "trainjob",
    num_shards: int | None = None,
    arguments: str = "",
    nodes: int = 1,
    gpus: int = 8,
    nic: str = "2x100",
    vcpus: int = 96,
    memory_gb: float = 1200.0,
    networks: str | None = None,
    secret: str = "s3-credentials",
    endpoint: str | None = None,
    env: Mapping[str, str] | None = None,
    namespace: str | None = None,
    queue: str | None = None,
    runtime: str = "torch-distributed",
) -> Report:
    """Writes the manifest of a training run: a TrainJob of Kubeflow Trainer, or a PyTorchJob.

    Args:
        datasets: prefix of Arrow or Parquet files by name.
        weights: share of tokens by name.
        seq_len: tokens in a sample.
        eos_id: id that closes a document.
        global_batch_size: samples in an optimizer step on all devices.
        name: of the job: lower-case letters, digits and hyphens.
        image: container image with torch and ibm-nodes.
        kind: trainjob for Kubeflow Trainer 2.2 and newer, pytorchjob for the Training Operator 1.9.
        num_shards: logical shards of the run; else the recipe's default, a multiple of the global batch.
        arguments: more of the trainer's flags, as in a shell.
        nodes: number of machines, each one pod.
        gpus: devices of each.
        nic: network cards of a node, as number x Gbit/s.
        vcpus: logical cores of a node; a pod asks for nine tenths.
        memory_gb: memory of a node, in GB; likewise.
        networks: secondary networks of multus for the cards, with commas; else the pod network alone is used.
        secret: name of the Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
        endpoint: URL of the store; else AWS's own.
        env: more environment variables by name; they replace the defaults for NCCL.
        namespace: of the job; else that of whoever applies it.
        queue: local queue of Kueue.
        runtime: ClusterTrainingRuntime of a TrainJob.

    Raises:
        ValueError: if something does not divide, or a name is reserved or not one of Kubernetes.
        ImportError: if pyyaml is not installed.
    """
    for what, text in {"name": name, "secret": secret, "namespace": namespace, "queue": queue}.items():
        if text is not None and not NAME.fullmatch(text):
            raise ValueError(f"{what} must be up to 50 lower-case letters, digits and hyphens, got {text!r}")
    cards, rate = network_cards(nic)
    cluster = Cluster(nodes=nodes, gpus_per_node=gpus, nic_gbps=cards * rate, vcpus=vcpus, memory_gb=memory_gb)
    attached = [network.strip() for network in networks.split(",")] if networks else []
    if attached and (len(attached) != cards or not all(attached)):
        raise ValueError(
            f"networks must name one network for each of the {cards} cards of nic={nic}, got {networks!r}: name one "
            "twice if two cards are on it"
        )
    shards = _shards(cluster, global_batch_size, num_shards)
    flags = _flags(datasets, weights) + [
        f"--seq-len={seq_len}",
        f"--eos-id={eos_id}",
        f"--global-batch-size={global_batch_size}",
        f"--num-shards={shards}",
        *shlex.split(arguments),
    ]
    run = kubernetes.Run(
        name=name,
        namespace=namespace,
        image=image,
        cluster=cluster,
        command=["torchrun", "-m", "ibm_nodes.recipes.train", "pretrain", *flags],
        environment=_environment(attached, endpoint, env or {}),
        secret=secret,
        networks=attached,
        queue=queue,
        runtime=runtime,
    )
    made = kubernetes.trainjob(run) if kind == "trainjob" else kubernetes.pytorchjob(run)
    return Report(_yaml(made), made)


def _shards(cluster: Cluster, global_batch_size: int, num_shards: int | None) -> int:
    """Gives the number of logical shards, which the number of data-parallel ranks divides, as it does the batch."""
    ranks = cluster.world_size
    shards = default_num_shards(global_batch_size) if num_shards is None and global_batch_size > 0 else num_shards
    for what, number in (("global_batch_size", global_batch_size), ("num_shards", shards or 0)):
        if number < 1 or number % ranks:
            above = (max(number, 0) // ranks + 1) * ranks
            raise ValueError(
                f"{what} must be a multiple of nodes x gpus = {ranks}, got {number}: the next larger one is {above}"
            )
    return shards or 0


def _flags(datasets: Mapping[str, str], weights: Mapping[str, float]) -> list[str]:
    if set(datasets) != set(weights):
        raise ValueError(f"weights must have the names of the datasets, got {sorted(weights)} for {sorted(datasets)}")
    return [f"--data={name}={url}" for name, url in datasets.items()] + [
        f"--weight={name}={weight:g}" for name, weight in weights.items()
    ]


def _environment(networks: list[str], endpoint: str | None, own: Mapping[str, str]) -> dict[str, str]:
    for name in own:
        if not VARIABLE.fullmatch(name):
            raise ValueError(f"env must have names of letters, digits and underscores, got {name!r}")
        if name.startswith("PET_") or name in RANKS:
            raise ValueError(f"env must not have {name}: the operator sets it, and refuses or breaks a job that does")
        if name in kubernetes.CREDENTIALS:
            raise ValueError(f"env must not have {name}: it comes from the Secret that secret names")
    interfaces = ",".join(kubernetes.interfaces(networks))
    found = {"HOME": "/tmp"} | ethernet.DEFAULTS  # a user without a name has no home
    found |= {"NCCL_SOCKET_IFNAME": f"={interfaces}", "GLOO_SOCKET_IFNAME": interfaces}
    if endpoint is not None:
        found["AWS_ENDPOINT_URL"] = endpoint
    return found | dict(own)


def _yaml(made: kubernetes.Manifest) -> str:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("manifest needs pyyaml: pip install 'ibm-nodes[kubernetes]'") from error

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return str(yaml.dump(made, Dumper=Dumper, sort_keys=False, width=110)).rstrip()
