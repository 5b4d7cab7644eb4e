"""Jobs of Kubernetes that run the trainer: Kubeflow's TrainJob and its older PyTorchJob, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ibm_nodes.recipes.cluster import Cluster

USABLE_SHARE = 0.9
"""Of a node's cores and memory that a pod asks for; the rest is the system's."""
SHARED_MEMORY_GB = 64
SECONDS_TO_SAVE = 300
"""Between SIGTERM and SIGKILL, for the trainer to save."""
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""Of the store: names of variables, and of the Secret's keys that they come from."""
MANAGER = "ibm-nodes/manifest"
"""Who owns our patches of the runtime, beside those of queues and other controllers."""

Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of the trainer on a cluster.

    Args:
        name: of the job.
        namespace: of the job, or None for that of whoever applies it.
        image: container image with torch and ibm_nodes.
        cluster: how many pods there are, and what each asks for: a pod is a node.
        command: what runs in each pod; the operator tells torchrun of the others.
        environment: variables by name.
        secret: name of the Secret that has the store's credentials.
        networks: secondary networks of multus, one for each network card; empty for the pod network alone.
        queue: local queue of Kueue, or None.
        runtime: ClusterTrainingRuntime of a TrainJob.
    """

    name: str
    namespace: str | None
    image: str
    cluster: Cluster
    command: Sequence[str]
    environment: Mapping[str, str]
    secret: str
    networks: Sequence[str]
    queue: str | None
    runtime: str


def trainjob(run: Run) -> Manifest:
    """Gives a TrainJob of Kubeflow Trainer 2.2 or newer."""
    container = {"name": "node", "securityContext": _container_security(), "volumeMounts": _mounts()}
    pod: Manifest = {"spec": _pod_spec() | {"containers": [container]}}
    if run.networks:
        pod = {"metadata": {"annotations": _annotations(run)}} | pod
    patch = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": pod}}}]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(run),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": run.runtime,
            },
            "trainer": {
                "image": run.image,
                "numNodes": run.cluster.nodes,
                "numProcPerNode": run.cluster.gpus_per_node,
                "command": list(run.command),
                "env": _env(run),
                "resourcesPerNode": _resources(run.cluster),
            },
            "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": patch}}}],
        },
    }


def pytorchjob(run: Run) -> Manifest:
    """Gives a PyTorchJob of the Training Operator 1.9."""
    container = {
        "name": "pytorch",
        "image": run.image,
        "command": list(run.command),
        "env": _env(run),
        "resources": _resources(run.cluster),
        "securityContext": _container_security(),
        "volumeMounts": _mounts(),
    }
    template: Manifest = {"spec": _pod_spec() | {"containers": [container]}}
    if run.networks:
        template = {"metadata": {"annotations": _annotations(run)}} | template
    replica = {"restartPolicy": "OnFailure", "template": template}
    replicas = {"Master": {"replicas": 1} | replica}
    if run.cluster.nodes > 1:
        replicas["Worker"] = {"replicas": run.cluster.nodes - 1} | replica
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(run),
        "spec": {"nprocPerNode": str(run.cluster.gpus_per_node), "pytorchReplicaSpecs": replicas},
    }


def interfaces(networks: Sequence[str]) -> list[str]:
    """Gives the names of a pod's interfaces that training uses: those that multus adds, else the pod network's."""
    return [f"net{number}" for number, _ in enumerate(networks, start=1)] or ["eth0"]


def _metadata(run: Run) -> Manifest:
    found: Manifest = {"name": run.name}
    if run.namespace is not None:
        found["namespace"] = run.namespace
    if run.queue is not None:
        found["labels"] = {"kueue.x-k8s.io/queue-name": run.queue}
    return found


def _annotations(run: Run) -> dict[str, str]:
    return {"k8s.v1.cni.cncf.io/networks": ",".join(run.networks)}


def _env(run: Run) -> list[Manifest]:
    plain = [{"name": name, "value": value} for name, value in run.environment.items()]
    secret = [{"name": name, "valueFrom": {"secretKeyRef": {"name": run.secret, "key": name}}} for name in CREDENTIALS]
    return plain + secret


def _resources(cluster: Cluster) -> Manifest:
    limits = {"nvidia.com/gpu": str(cluster.gpus_per_node), "memory": f"{int(cluster.memory_gb * USABLE_SHARE)}G"}
    return {"requests": {"cpu": str(max(1, int(cluster.vcpus * USABLE_SHARE)))} | limits, "limits": limits}


def _pod_spec() -> Manifest:
    """Gives what OpenShift's restricted-v2 asks of a pod; the user id is left to the cluster, as it demands."""
    shared = {"medium": "Memory", "sizeLimit": f"{SHARED_MEMORY_GB}G"}
    return {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": SECONDS_TO_SAVE,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "volumes": [{"name": "shm", "emptyDir": shared}],
    }


def _mounts() -> list[Manifest]:
    return [{"name": "shm", "mountPath": "/dev/shm"}]


def _container_security() -> Manifest:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
