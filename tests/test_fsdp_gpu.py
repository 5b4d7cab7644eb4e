"""The trainer on a GPU: a model of 1.1 billion parameters, fed from S3."""

import json

import pytest
import torch

from ibm_nodes.recipes import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device with 40 GB"),
]

STEPS, WARM = 20, 5


@pytest.fixture
def run(bucket, tmp_path):
    """Trains llama-1b on the quick start's corpus from S3 with an engine; gives the records of the log."""

    def run(engine):
        options = [
            f"--storage-option={key}={value}" for key, value in bucket.storage_options.items() if key != "client_kwargs"
        ]
        options += [
            f"--storage-option=client_kwargs.{key}={value}"
            for key, value in bucket.storage_options.get("client_kwargs", {}).items()
        ]
        log_file = tmp_path / f"{engine}.jsonl"
        arguments = ["quickstart", "--url", f"{bucket.url}corpus", *options, "--model", "llama-1b", "--engine", engine]
        arguments += ["--seq-len", "1024", "--global-batch-size", "8", "--steps", str(STEPS), "--warmup-steps", "2"]
        train.command([*arguments, "--log-every", "1", "--log-file", str(log_file)], lambda line: None)
        return [json.loads(line) for line in log_file.read_text().splitlines()]

    return run


def test_a_model_of_a_billion_parameters_does_not_wait_for_s3_and_both_engines_agree(run):
    losses = {}
    for engine in ("fsdp1", "fsdp2"):
        records = run(engine)
        assert len(records) == STEPS
        seconds = sum(record["seconds"] for record in records[WARM:])
        waited = sum(record["seconds"] * record["waited_share"] for record in records[WARM:])
        assert waited < 0.01 * seconds
        losses[engine] = [record["loss"] for record in records]
        assert losses[engine][-1] < losses[engine][0]
        torch.cuda.empty_cache()
    assert losses["fsdp2"] == pytest.approx(losses["fsdp1"], abs=0.02)
