"""The trainer's command: on this process and under torchrun, killed, told to stop, and given bad input."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torchdata.nodes import IterableWrapper

from ibm_nodes import Loader, cli, flags, load_recipe
from ibm_nodes.recipes import train, trainer
from ibm_nodes.recipes.models import build_model
from ibm_nodes.recipes.quickstart import quickstart
from ibm_nodes.recipes.saves import _prove_writable

STEPS = 12
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    url = f"file://{tmp_path_factory.mktemp('data')}/corpus"
    quickstart(url).close()
    return url


def flags_for(url, folder, name):
    return [
        *("quickstart", "--url", url, "--seq-len", "32", "--global-batch-size", "8", "--steps", str(STEPS)),
        *("--learning-rate", "0.003", "--warmup-steps", "2", "--param-dtype", "fp32", "--reduce-dtype", "fp32"),
        *("--log-every", "1", "--log-file", f"{folder}/{name}.jsonl"),
    ]


def records(folder, name):
    path = Path(f"{folder}/{name}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(folder, name):
    return [(record["step"], record["loss"]) for record in records(folder, name)]


def begin(*command):
    return subprocess.Popen(
        [sys.executable, "-P", "-m", *command],
        cwd="/",  # not in a checkout, whose ibm_nodes has no recipes
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def torchrun(*arguments):
    return begin("torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments)


def wait_for(process, condition):
    """Waits until something holds, while a process runs."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workers(process):
    return sorted(
        int(child)
        for listing in Path(f"/proc/{process.pid}/task").glob("*/children")
        for child in listing.read_text().split()
        if b"ibm_nodes.recipes.train" in Path(f"/proc/{child}/cmdline").read_bytes()
    )


@pytest.fixture(scope="module")
def whole(url, tmp_path_factory):
    """The losses of a run that nothing interrupts, on one process."""
    folder = tmp_path_factory.mktemp("whole")
    process = begin("ibm_nodes.cli", "train", *flags_for(url, folder, "whole"))
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert [line.split("  ")[0] for line in output.splitlines()] == [f"step {step}" for step in range(1, STEPS + 1)]
    return dict(losses(folder, "whole"))


def test_a_killed_rank_and_a_restart_end_in_the_same_losses(url, whole, tmp_path):
    arguments = [*flags_for(url, tmp_path, "killed"), "--checkpoint", str(tmp_path / "saves"), "--save-every", "1"]
    last = random.randrange(2, STEPS - 3)
    process = torchrun("--max-restarts", "1", "-m", "ibm_nodes.recipes.train", *arguments, "--keep", "2")
    try:
        wait_for(process, lambda: len(records(tmp_path, "killed")) >= last)
        os.kill(random.choice(workers(process)), signal.SIGKILL)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    found = losses(tmp_path, "killed")
    assert len(found) >= STEPS and found[-1][0] == STEPS
    assert {step for step, _ in found} == set(whole)
    for step, loss in found:  # those that were done twice, too
        assert loss == pytest.approx(whole[step], abs=1e-4)
    starts = [place for place in range(1, len(found)) if found[place][0] != found[place - 1][0] + 1]
    assert len(starts) <= 1
    kept = sorted(path.name for path in (tmp_path / "saves").iterdir())
    assert kept == [f"step-{STEPS - 1:08}", f"step-{STEPS:08}"]


def test_sigterm_saves_and_ends_with_0_and_the_next_run_goes_on(url, whole, tmp_path):
    arguments = [*flags_for(url, tmp_path, "stopped"), "--checkpoint", str(tmp_path / "saves")]
    process = begin("ibm_nodes.recipes.train", *arguments)
    try:
        wait_for(process, lambda: len(records(tmp_path, "stopped")) >= 3)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
    (saved,) = (tmp_path / "saves").iterdir()
    step = losses(tmp_path, "stopped")[-1][0]
    assert 3 <= step < STEPS and saved.name == f"step-{step:08}"
    process = torchrun("-m", "ibm_nodes.recipes.train", *arguments, "--engine", "fsdp2")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert [step for step, _ in losses(tmp_path, "stopped")] == list(range(1, STEPS + 1))
    assert dict(losses(tmp_path, "stopped")) == pytest.approx(whole, abs=1e-4)


# In this process


def test_a_checkpoint_that_does_not_fit_is_one_sentence(fails, url, tmp_path, capsys):
    base = ["quickstart", "--url", url, "--checkpoint", str(tmp_path / "saves")]
    assert cli.main(["train", *base, "--steps", "1", "--seq-len", "16"]) == 0
    assert capsys.readouterr().out.startswith("step 1  loss ")
    text = fails(*base, "--steps", "2", "--seq-len", "16", "--model", "tiny-t5")
    assert text.startswith(
        f"step 1 under {tmp_path}/saves does not fit this run: Missing key in checkpoint state_dict: "
    )
    text = fails(*base, "--steps", "2", "--seq-len", "16", "--seed", "1")
    assert text.startswith("Shuffler was saved with seed=(0, 0) and is now built with seed=(1, 0)")
    assert cli.main(["train", *base, "--steps", "1", "--seq-len", "16"]) == 0  # which is done already
    assert capsys.readouterr().out == ""


def test_a_place_that_cannot_be_written_to_is_one_sentence_before_the_first_step(fails, url, tmp_path):
    (tmp_path / "file").touch()
    base = ["quickstart", "--url", url, "--steps", "1", "--seq-len", "16", "--global-batch-size", "4"]
    assert str(tmp_path / "file") in fails(*base, "--checkpoint", f"{tmp_path}/file/saves")


def test_a_store_that_cannot_be_reached_is_one_sentence_without_its_secret(url):
    with pytest.raises(ConnectionError) as error:
        options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "sesame", "give_up_seconds": 1}
        _prove_writable("s3://nowhere/saves", options)
    assert "127.0.0.1:9" in str(error.value) and "sesame" not in str(error.value)


@pytest.fixture
def fails(capsys):
    """Runs a command that must fail with one sentence on stderr and nothing else; gives the sentence."""

    def run(*argv):
        assert cli.main(["train", *argv]) == 1
        captured = capsys.readouterr()
        assert not captured.out and captured.err.count("\n") == 1
        assert not torch.distributed.is_initialized()
        return captured.err.removeprefix("ibm-nodes: ").rstrip("\n")

    return run


@pytest.mark.parametrize(
    "more, text",
    [
        (["--model", "llama-9b"], "no model 'llama-9b': there are tiny, llama-1b, "),
        (["--model", "torch.nn:Tanh"], "block_class must be given for torch.nn:Tanh: an FSDP unit is made of each of"),
        (["--block-class", "Block"], "block_class must be the class of a module in the model, got Block: there are"),
        (["--nodes", "3"], "cluster must have a device for each process, got 3 nodes x 1 = 3 devices for 1 processes"),
        (["--device", "tpu"], "device must be one of cpu, cuda, a100, h100, h200, got 'tpu'"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--keep", "0", "--checkpoint", "/tmp/never"], "keep must be at least 1 or None, got 0"),
        (["--save-every", "3"], "save_every must come with checkpoint: there is no place to save to"),
        (["--engine", "fsdp3"], "argument --engine: invalid choice: 'fsdp3'"),
        (["--global-batch-size", "9", "--micro-batch-size", "2"], "global_batch_size must be a multiple of world_size"),
    ],
)
def test_bad_input_is_one_sentence(fails, url, more, text):
    assert fails("quickstart", "--url", url, "--steps", "1", *more).startswith(text)


def test_evaluating_needs_something_to_evaluate_on():
    with pytest.raises(ValueError, match="eval_every must come with a recipe 'validation', and none is installed"):
        trainer.train(quickstart, build_model("tiny"), "LlamaBlock", steps=1, eval_every=1)


def test_evaluates_on_the_validation_recipe_with_the_arguments_that_it_takes(url, monkeypatch, tmp_path):
    ids = torch.randint(0, 512, (3, 8, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(ids % 5 == 0, -100)
    given = []

    def validation(*, seq_len: int, seed: int = 3, rank: int | None = None, world_size: int | None = None) -> Loader:
        """Gives three batches."""
        given.append((seq_len, seed, rank, world_size))
        return Loader(IterableWrapper([{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)]))

    monkeypatch.setattr(train, "list_recipes", lambda: ["validation"])
    monkeypatch.setattr(train, "load_recipe", lambda name: validation if name == "validation" else load_recipe(name))
    log_file = tmp_path / "log.jsonl"
    lines = []
    arguments = ["quickstart", "--url", url, "--seq-len", "16", "--global-batch-size", "6", "--micro-batch-size", "3"]
    arguments += ["--steps", "4", "--learning-rate", "1e-30", "--eval-every", "2", "--log-file", str(log_file)]
    assert train.command([*arguments, "--log-every", "4", "--param-dtype", "fp32"], lines.append) == 0
    assert given == [(16, 3, 0, 1)] * 2
    model = build_model("tiny")
    logits = torch.cat([model(batch)[:, :-1] for batch in ids])
    expected = functional.cross_entropy(logits.flatten(0, 1), labels[:, :, 1:].flatten()).item()
    first, last = map(json.loads, log_file.read_text().splitlines())
    assert first == {"step": 2, "validation_loss": pytest.approx(expected, abs=1e-5)}
    assert last["step"] == 4 and last["validation_loss"] == pytest.approx(expected, abs=1e-5)
    assert last["loss"] > 0
    assert lines[0] == f"step 2  validation loss {expected:.4f}"
    assert lines[1].endswith(f"  validation loss {expected:.4f}") and "tokens/s" in lines[1]


def test_a_recipe_that_gives_no_loader_is_no_data(fails):
    assert fails() == f"train must be given the name of a recipe: there are {', '.join(cli.list_recipes())}"
    assert fails("nothing").startswith("no recipe 'nothing': there are ")
    assert fails("fsdp-ethernet", "--steps", "1").startswith("the recipe needs 'model', which no flag can give")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_device_that_is_not_here_is_one_sentence(fails, url):
    text = fails("quickstart", "--url", url, "--steps", "1", "--device", "a100")
    assert text == "device must be 'cpu' on this machine: torch finds no CUDA device here"


def test_recipes_are_listed_with_what_they_give(capsys):
    assert cli.main(["recipes"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["fsdp-ethernet"].startswith("model   Shards a model with FSDP")
    assert lines["pretrain"].startswith("loader  ") and lines["quickstart"].startswith("loader  ")


def test_help_names_the_flags_of_all_parts(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "pretrain", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for title in ("data, by the recipe pretrain:", "model:", "training:", "sharding:", "cluster:"):
        assert title in text
    for flag in ("--data NAME=URL", "--limit-all-gathers", "--model TEXT", "--steps N", "--interfaces TEXT"):
        assert flag in text
    for given in ("--rank", "--world-size", "--mesh", "--say", "--cluster "):
        assert given not in text


def test_two_parts_with_the_same_flag_are_an_error():
    def other(*, seed: int = 0) -> None:
        """Takes a seed."""

    with pytest.raises(TypeError, match="an argument of the second is named as another one of x: .*--seed"):
        flags.command_parser("x", "Does.", {"first": (load_recipe("quickstart"), ()), "second": (other, ())})
