"""The benchmarks run, at a small size, and measure what they say."""

import json
import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


def run(name, *arguments):
    command = [sys.executable, "-P", str(BENCHMARKS / name), *map(str, arguments)]
    environment = {"PYTHONPATH": f"{BENCHMARKS}:{':'.join(path for path in sys.path if path)}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_saves_gives_the_time_blocked_beside_a_loop_that_goes_on(s3, tmp_path):
    size = ["--tokens", 300_000, "--num-shards", 8, "--seconds", 2, "--rounds", 10, "--every-ms", 500]
    state, saves = run("saves.py", *size, "--directory", tmp_path)
    assert (state["run"], saves["run"]) == ("get_state", "save")
    assert 0 < state["median_ms"] <= state["p90_ms"] <= state["max_ms"]
    assert saves["saves"] >= 2 and saves["batches"] > saves["saves"]
    assert 0.8 < saves["state_mb"] < 2  # 8 logical shards of 16 samples of 4096 tokens of 2 bytes
    assert 0 < saves["blocked_share"] < 1
    assert saves["latest"] == saves["saves"]


def test_throughput_prints_a_rate_for_every_run(tmp_path):
    arguments = [
        "--tokens",
        "300000",
        "--num-shards",
        "4",
        "--seconds",
        "0.1",
        "--rounds",
        "1",
        "--directory",
        str(tmp_path),
    ]
    results = run("throughput.py", *arguments)
    assert {entry["run"] for entry in results[:-1]} >= {
        "numpy loop over Arrow",
        "Arrow",
        "Arrow, best fit",
        "Arrow, Prefetcher",
        "Parquet",
    }
    assert all(entry["million_tokens_per_second"] > 0 for entry in results[:-1])
    rates = {entry["run"]: entry["million_tokens_per_second"] for entry in results[:-1]}
    assert results[-1]["best_fit_of_concat"] == pytest.approx(rates["Arrow, best fit"] / rates["Arrow"], rel=0.01)
    assert results[-1]["peak_mib"] > 0 and results[-1]["get_state_milliseconds"] > 0


def test_latency_of_store_gives_the_rate_behind_a_latency_as_a_share_of_that_without(s3, tmp_path):
    size = ["--tokens", 300_000, "--num-shards", 4, "--seconds", 0.2, "--rounds", 1, "--directory", tmp_path]
    results = run("latency_of_store.py", *size)
    assert [entry["run"] for entry in results] == [
        f"{form}, {what}" for form in ("arrow", "parquet") for what in ("one stream", "batches")
    ]
    for entry in results:
        assert entry["latency_ms"] == 30
        assert entry["without"] > 0 and entry["delayed"] > 0
        assert abs(entry["ratio"] - entry["delayed"] / entry["without"]) < 0.05 * entry["ratio"]
