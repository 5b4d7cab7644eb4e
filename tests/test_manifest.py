"""Kubernetes manifests: valid by Kubeflow's own models and by Kubernetes' schemas, and what is refused."""

import copy
import json
import re
from pathlib import Path

import corpora
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from ibm_nodes import cli, flags
from ibm_nodes.recipes import ethernet, train
from ibm_nodes.recipes.manifest import manifest
from ibm_nodes.recipes.pretrain import pretrain

KUBERNETES = "1.34"
RUN = {
    "datasets": {"web": "s3://corpora/web/", "code": "s3://corpora/code/"},
    "weights": {"web": 0.8, "code": 0.2},
    "seq_len": 4096,
    "eos_id": 2,
    "name": "pretrain-11b",
    "image": "registry.example.com/train:1",
    "arguments": "--model llama-13b --steps 1000",
}
LARGE = {**RUN, "nodes": 200, "gpus": 8, "global_batch_size": 3200, "networks": "net-a,net-b", "queue": "batch"}
SMALL = {**RUN, "nodes": 1, "gpus": 8, "global_batch_size": 64}
SIZES = pytest.mark.parametrize("size", [LARGE, SMALL], ids=["200x8", "1x8"])
PYTORCHJOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": dict},
    "spec": {"nprocPerNode": str, "pytorchReplicaSpecs": {"Master": dict, "Worker": dict}},
}
"""What of a PyTorchJob we write, and of which types, as its custom resource definition of release 1.9 has them."""


def made(**arguments):
    """The manifest as a cluster would read it."""
    return yaml.safe_load(manifest(**arguments).text)


def check_trainjob(job):
    """Raises ValueError if Kubeflow's models have no such job; they drop what they do not know."""
    if (job.get("apiVersion"), job.get("kind")) != ("trainer.kubeflow.org/v1alpha1", "TrainJob"):
        raise ValueError("not a TrainJob")
    known = json.loads(TrainerV1alpha1TrainJob.from_dict(job).to_json())
    if known != job:
        raise ValueError(f"not known to Kubeflow: {job}")


def check_pytorchjob(job):
    """Raises ValueError if a PyTorchJob has other fields or types than its definition, or pods that are none."""
    _check(job, PYTORCHJOB)
    if (job["apiVersion"], job["kind"]) != ("kubeflow.org/v1", "PyTorchJob"):
        raise ValueError("not a PyTorchJob")
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        _check(replica, {"replicas": int, "restartPolicy": str, "template": dict})
        check_pod(replica["template"])


def check_pod(template):
    """Raises ValueError if a pod's template is not one by the strict schema of Kubernetes."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}} | copy.deepcopy(template)
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def _check(given, known):
    for name, value in given.items():
        kind = known.get(name)
        if kind is None or not isinstance(value, dict if isinstance(kind, dict) else kind):
            raise ValueError(f"{name}: {value!r}")
        if isinstance(kind, dict):
            _check(value, kind)


def merged_pod(job):
    """The pod's template as the runtime's container with the trainer's fields and our patch in it."""
    trainer = job["spec"]["trainer"]
    [patch] = job["spec"]["runtimePatches"]
    [replicated] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = copy.deepcopy(replicated["template"]["spec"]["template"])
    [container] = pod["spec"]["containers"]
    container |= {key: trainer[key] for key in ("image", "command", "env")}
    container["resources"] = trainer["resourcesPerNode"]
    return pod


def pods(job):
    if job["kind"] == "TrainJob":
        return [merged_pod(job)]
    return [replica["template"] for replica in job["spec"]["pytorchReplicaSpecs"].values()]


def environment(job):
    """The plain variables of a job's first pod."""
    entries = pods(job)[0]["spec"]["containers"][0]["env"]
    return {entry["name"]: entry["value"] for entry in entries if "value" in entry}


# Valid


@SIZES
def test_a_trainjob_is_one_by_kubeflows_models_and_its_pod_by_kubernetes_schema(size):
    job = made(**size)
    check_trainjob(job)
    check_pod(merged_pod(job))
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (size["nodes"], 8)


@SIZES
def test_a_pytorchjob_is_one_by_its_definition_and_its_pods_by_kubernetes_schema(size):
    job = made(kind="pytorchjob", **size)
    check_pytorchjob(job)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert sum(replica["replicas"] for replica in replicas.values()) == size["nodes"]
    assert replicas["Master"]["replicas"] == 1
    assert {pod["spec"]["containers"][0]["name"] for pod in pods(job)} == {"pytorch"}


@SIZES
@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_pods_have_network_memory_rights_and_credentials_for_training(kind, size):
    job = made(kind=kind, endpoint="https://s3.example.com", **size)
    for pod in pods(job):
        spec, [container] = pod["spec"], pod["spec"]["containers"]
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
        assert spec["volumes"][0]["emptyDir"]["medium"] == "Memory"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert container["command"][:4] == ["torchrun", "-m", "ibm_nodes.recipes.train", "pretrain"]
        assert container["command"][-4:] == ["--model", "llama-13b", "--steps", "1000"]
        secrets = [entry for entry in container["env"] if "valueFrom" in entry]
        assert [entry["name"] for entry in secrets] == ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
        assert {entry["valueFrom"]["secretKeyRef"]["name"] for entry in secrets} == {"s3-credentials"}
        networks = pod.get("metadata", {}).get("annotations", {}).get("k8s.v1.cni.cncf.io/networks")
        assert networks == size.get("networks")
    variables = environment(job)
    assert variables["AWS_ENDPOINT_URL"] == "https://s3.example.com"
    assert variables.items() >= ethernet.DEFAULTS.items()
    assert variables["NCCL_SOCKET_IFNAME"] == ("=net1,net2" if "networks" in size else "=eth0")
    assert variables["GLOO_SOCKET_IFNAME"] == ("net1,net2" if "networks" in size else "eth0")
    assert not any(name.startswith("PET_") for name in variables)


def test_labels_and_namespace_are_those_given():
    metadata = made(**{**LARGE, "namespace": "team"})["metadata"]
    assert metadata == {
        "name": "pretrain-11b",
        "namespace": "team",
        "labels": {"kueue.x-k8s.io/queue-name": "batch"},
    }
    assert made(**SMALL)["metadata"] == {"name": "pretrain-11b"}


def test_variables_of_the_user_replace_the_defaults():
    assert environment(made(**SMALL, env={"NCCL_BUFFSIZE": "1", "DEBUG": "x=y"})).items() >= {
        ("NCCL_BUFFSIZE", "1"),
        ("DEBUG", "x=y"),
    }


def test_the_manifest_does_not_depend_on_the_environment_of_who_writes_it(monkeypatch):
    before = manifest(**LARGE).text
    for name in ethernet.DEFAULTS:
        monkeypatch.setenv(name, "0")
    assert manifest(**LARGE).text == before


@pytest.mark.parametrize(
    ("batch", "given", "expected"), [(3200, None, 3200), (1600, 4800, 4800), (1600, None, 1600), (4800, None, 4800)]
)
def test_the_data_parallel_size_divides_the_number_of_logical_shards(batch, given, expected):
    command = made(**{**LARGE, "global_batch_size": batch, "num_shards": given})["spec"]["trainer"]["command"]
    assert f"--num-shards={expected}" in command
    assert expected % (200 * 8) == 0


def test_the_trainer_knows_the_flags_and_finds_the_bucket_by_the_environment(bucket, monkeypatch):
    """The loader that a rank would make, from the manifest alone and the keys of the Secret."""
    options = bucket.storage_options
    corpora.write(bucket.url + "web/", [[corpora.documents([40] * 50, stride=60)]], "arrow", options)
    size = {**SMALL, "datasets": {"web": bucket.url + "web/"}, "weights": {"web": 1.0}, "seq_len": 64}
    job = made(**size, endpoint=options["endpoint_url"])
    for name, value in environment(job).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    given = train.parser("pretrain", pretrain).parse_args(job["spec"]["trainer"]["command"][4:])
    assert (given.model, given.steps) == ("llama-13b", 1000)
    with pretrain(**flags.arguments(pretrain, given), rank=7, world_size=8, pin_memory=False) as loader:
        assert next(iter(loader))["input_ids"].shape == (8, 64)


# Refused


MISTAKES = {
    "typo": lambda job: job["spec"].update(traner={}),
    "typo in the trainer": lambda job: job["spec"]["trainer"].update(numNode=3),
    "typo in the patch": lambda job: job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"].update(tempate={}),
    "number as text": lambda job: job["spec"]["trainer"].update(numProcPerNode="8"),
    "text as number": lambda job: job["spec"]["trainer"].update(image=1),
    "no runtime": lambda job: job["spec"].pop("runtimeRef"),
    "API before 2.2": lambda job: job["spec"].update(podTemplateOverrides=[]),
    "wrong kind": lambda job: job.update(kind="TrainJobs"),
}
POD_MISTAKES = {
    "typo": lambda pod: pod["spec"].update(volume=[]),
    "typo in the container": lambda pod: pod["spec"]["containers"][0].update(comand=[]),
    "wrong type": lambda pod: pod["spec"].update(terminationGracePeriodSeconds="long"),
    "no containers": lambda pod: pod["spec"].pop("containers"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_of_trainjobs_refuses_mistakes(mistake):
    job = made(**LARGE)
    MISTAKES[mistake](job)
    with pytest.raises((ValueError, KeyError)):
        check_trainjob(job)


@pytest.mark.parametrize("mistake", POD_MISTAKES)
def test_the_check_of_pods_refuses_mistakes(mistake):
    pod = merged_pod(made(**LARGE))
    POD_MISTAKES[mistake](pod)
    with pytest.raises(kubernetes_validate.ValidationError):
        check_pod(pod)


@pytest.mark.parametrize("mistake", [{"nprocPerNode": 8}, {"pytorchReplicaSpec": {}}, {"pytorchReplicaSpecs": []}])
def test_the_check_of_pytorchjobs_refuses_mistakes(mistake):
    job = made(kind="pytorchjob", **LARGE)
    job["spec"] |= mistake
    with pytest.raises(ValueError):
        check_pytorchjob(job)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"env": {"PET_NNODES": "3"}}, "env must not have PET_NNODES: the operator sets it"),
        ({"env": {"PET_ANY": "3"}}, "env must not have PET_ANY"),
        ({"env": {"WORLD_SIZE": "3"}}, "env must not have WORLD_SIZE"),
        ({"env": {"AWS_SECRET_ACCESS_KEY": "x"}}, "env must not have AWS_SECRET_ACCESS_KEY: it comes from the Secret"),
        ({"env": {"A-B": "x"}}, "env must have names of letters, digits and underscores, got 'A-B'"),
        (
            {"global_batch_size": 1000},
            "global_batch_size must be a multiple of nodes x gpus = 1600, got 1000: the next larger one is 1600",
        ),
        ({"global_batch_size": 0}, "global_batch_size must be a multiple of .* got 0: the next larger one is 1600"),
        (
            {"num_shards": 2000},
            "num_shards must be a multiple of nodes x gpus = 1600, got 2000: the next larger one is 3200",
        ),
        (
            {"weights": {"web": 1.0}},
            r"weights must have the names of the datasets, got \['web'\] for \['code', 'web'\]",
        ),
        ({"name": "Pretrain"}, "name must be up to 50 lower-case letters, digits and hyphens, got 'Pretrain'"),
        ({"name": "x" * 51}, "name must be up to 50"),
        ({"queue": "a b"}, "queue must be up to 50"),
        ({"networks": "net-a"}, "networks must name one network for each of the 2 cards of nic=2x100, got 'net-a'"),
        ({"networks": "net-a,"}, "networks must name one network for each of the 2 cards"),
        ({"nodes": 0}, "nodes must be above 0"),
    ],
)
@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_bad_input_is_one_clear_sentence(kind, change, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        manifest(**{**LARGE, "kind": kind, **change})


# The command


def test_the_command_writes_yaml_or_json(capsys):
    flags = "--data web=s3://corpora/web/ --weight web=1 --seq-len 4096 --eos-id 2 --global-batch-size 64 --name small"
    arguments = ["manifest", *flags.split(), "--image", "registry.example.com/train:1", "--env", "DEBUG=1"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == yaml.safe_load(text)
    check_trainjob(yaml.safe_load(text))
    assert "&id" not in text and len(text.splitlines()) > 50


def test_the_command_says_what_is_missing_in_one_line(capsys):
    assert cli.main(["manifest", "--name", "x", "--kind", "job"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ibm-nodes: ") and captured.err.count("\n") == 1


def test_the_page_shows_what_the_command_writes(capsys):
    page = Path(__file__).parents[1] / "docs" / "kubernetes.md"
    [(arguments, shown)] = re.findall(r"```console\n\$ ibm-nodes ([^\n]*)\n(.*?)```", page.read_text(), re.DOTALL)
    assert cli.main(arguments.split()) == 0
    assert capsys.readouterr().out == shown
