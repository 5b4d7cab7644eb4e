"""The benchmarks run, at a small size, and measure what they say."""

import json
import pathlib
import subprocess
import sys

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


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
    command = [sys.executable, "-P", str(BENCHMARKS / "throughput.py"), *arguments]
    environment = {"PYTHONPATH": f"{BENCHMARKS}:{':'.join(path for path in sys.path if path)}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {entry["run"] for entry in results[:-1]} >= {
        "numpy loop over Arrow",
        "Arrow",
        "Arrow, best fit",
        "Arrow, Prefetcher",
        "Parquet",
    }
    assert all(entry["million_tokens_per_second"] > 0 for entry in results[:-1])
    assert results[-1]["peak_mib"] > 0 and results[-1]["get_state_milliseconds"] > 0
