"""The benchmarks run, at a small size, and measure what they say."""

import importlib
import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from ibm_nodes import Loader, Reader

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    """Has the benchmarks' modules importable for a test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in set(sys.modules) - before:
        if pathlib.Path(getattr(sys.modules[name], "__file__", None) or "").parent == BENCHMARKS:
            del sys.modules[name]


def run(name, *arguments, code=0):
    command = [sys.executable, "-P", str(BENCHMARKS / name), *map(str, arguments)]
    environment = {"PYTHONPATH": f"{BENCHMARKS}:{':'.join(path for path in sys.path if path)}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == code, done.stderr
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


SMALL = ["--tokens", 300_000, "--seconds", 0.1, "--rounds", 1]


def check_rates(results):
    """Every run has a rate, and a ratio to the run that it is compared with."""
    *runs, totals = results
    rates = {entry["run"]: entry["million_tokens_per_second"] for entry in runs}
    assert len(rates) == len(runs) and min(rates.values()) > 0
    for entry in runs:
        if "base" in entry:
            assert entry["ratio"] == pytest.approx(rates[entry["run"]] / rates[entry["base"]], rel=0.02, abs=0.01)
    assert totals["peak_mib"] > 0
    return {entry["run"]: entry.get("base") for entry in runs}, rates, totals


def test_throughput_of_files_is_given_beside_the_limit_of_each_layout(tmp_path):
    groups = ["arrow", "parquet", "ibm", "shards", "datasets"]
    results = run("throughput.py", *SMALL, "--only", *groups, "--num-shards", 4, 16, "--directory", tmp_path)
    bases, rates, totals = check_rates(results)
    packing, decoding, batches = "numpy loop over Arrow", "decoding Parquet", "record batches, IBM layout"
    assert bases == {
        packing: None,
        "Arrow": packing,
        "Arrow, best fit": packing,
        "Arrow, Prefetcher": packing,
        decoding: None,
        "Parquet": decoding,
        "Parquet, Prefetcher": decoding,
        batches: None,
        "IBM layout": batches,
        "IBM layout, Prefetcher": batches,
        "Arrow, 4 logical shards": "Arrow, 16 logical shards",
        "Arrow, 16 logical shards": "Arrow, 16 logical shards",
        **{f"Arrow, {number} datasets": "Arrow, 3 datasets" for number in (1, 3, 20)},
    }
    assert totals["best_fit_of_concat"] == pytest.approx(rates["Arrow, best fit"] / rates["Arrow"], rel=0.01)
    assert totals["get_state_milliseconds"] > 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "arrow",
        *(f"arrow-{number}" for number in (1, 20, 3)),
        "ibm",
        "parquet",
    ]


def test_throughput_of_text_is_given_beside_the_tokenizer_alone(tmp_path):
    results = run("throughput.py", *SMALL, "--only", "text", "--num-shards", 2, "--directory", tmp_path)
    bases, _, _ = check_rates(results)
    alone = "encode_batch"
    assert bases == {alone: None, "encode_batch_fast": alone, "text": alone, "text, Prefetcher": alone}


def test_throughput_of_s3_is_given_beside_raw_reads_of_the_same_objects(s3, tmp_path):
    size = [*SMALL, "--num-shards", 4, "--directory", tmp_path]
    bases, _, _ = check_rates(run("throughput.py", *size, "--only", "s3", "latency"))
    expected = {}
    for form in ("Arrow", "Parquet"):
        base = f"GETs of {form}"
        expected |= {base: None, f"{form}, S3": base, f"{form}, S3, Prefetcher": base}
        for where in (f"{form}, S3 behind 0 ms", f"{form}, S3 behind 30 ms"):
            expected |= {f"GETs of {where}": None, f"{where}, Prefetcher": f"GETs of {where}"}
    assert bases == expected


def test_every_layout_has_the_same_documents(benchmarks, tmp_path):
    corpus = importlib.import_module("corpus")
    layouts = ["arrow", "parquet", "ibm"]
    urls = corpus.build(tmp_path, num_tokens=50_000, layouts=layouts, tokens_per_file=7_000)
    found = {}
    for layout in layouts:
        for name, url in urls[layout].items():
            with Loader(Reader(url, name=name, shard=0, num_shards=1, seed=0, epochs=1)) as loader:
                found.setdefault(name, []).append(sorted(tuple(document.tokens.tolist()) for document in loader))
    for name, (arrow, parquet, ibm) in found.items():
        assert arrow == parquet == ibm
        assert 0.7 < sum(map(len, arrow)) / (50_000 * corpus.WEIGHTS[name]) < 1.1


def test_a_cut_of_the_corpus_has_each_file_once(benchmarks, tmp_path):
    corpus = importlib.import_module("corpus")
    corpus.build(tmp_path, num_tokens=50_000, layouts=["arrow"], tokens_per_file=3_000)
    files = sorted(path.read_bytes() for path in (tmp_path / "arrow").rglob("*.arrow"))
    for number in (1, 3, 5):
        urls = corpus.cut(tmp_path, number)
        assert len(urls) == number
        folders = [pathlib.Path(url.removeprefix("file://")) for url in urls.values()]
        assert sorted(path.read_bytes() for folder in folders for path in folder.iterdir()) == files


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


def test_latency_gives_waits_and_what_loading_costs_the_threads_of_a_trainer(s3, tmp_path):
    size = ["--tokens", 300_000, "--num-shards", 4, "--seconds", 1, "--spin-seconds", 0.4, "--rounds", 1]
    waits, spinner = run("latency.py", *size, "--batch-ms", 20, "--directory", tmp_path)
    assert (waits["run"], spinner["run"]) == ("waits", "spinner")
    assert waits["batches"] == 50 and 25 < waits["batches_per_second"] <= 50.5
    assert 0 < waits["p50_ms"] <= waits["p99_ms"] <= waits["max_ms"]
    assert 0 < waits["waited_share"] < 1
    assert waits["peak_mib"] > 100  # of the process that has the loader: torch alone takes more
    turns, rates = spinner["turns_per_second"], spinner["batches_per_second"]
    assert list(turns) == ["alone", "batches in this process", "batches in another process"]
    assert min(turns.values()) > 1000
    assert rates["batches in another process"] == 50
    assert rates["batches in this process"] == pytest.approx(50, abs=5)
    alone, here, there = turns.values()
    assert spinner["slowed_by_this_process"] == pytest.approx(alone / here - 1, abs=0.01)
    assert spinner["beyond_another_process"] == pytest.approx(there / here - 1, abs=0.01)


def test_resume_gives_the_time_to_the_first_batch_fresh_and_at_every_position(s3, tmp_path):
    size = ["--tokens-per-file", 3000, "--num-shards", 8, "--seconds", 0.5, "--rounds", 1, "--directory", tmp_path]
    *starts, saves = run("resume.py", "--files", 50, *size)
    assert [entry["run"] for entry in starts] == ["fresh", "early", "middle of an epoch", "third epoch"]
    assert [entry["step"] for entry in starts] == [0, 1, 2, 11]  # batches of 32,768 tokens, of 150,000 an epoch
    for entry in starts:
        assert entry["files"] == 50
        assert entry["first_batch_seconds"] > 0 and entry["start_up_seconds"] > 0
        fresh = starts[0]["first_batch_seconds"]
        assert entry["ratio"] == pytest.approx(entry["first_batch_seconds"] / fresh, rel=0.02)
    assert (saves["run"], saves["files"]) == ("saves", 50)
    assert saves["saves"] > 1 and saves["saves_per_second"] > 0
    assert 0 < saves["state_dict_ms"] and 0 < saves["save_ms"]


def test_check_compares_shares_with_the_baseline_and_fails_where_one_fell(s3, tmp_path):
    size = ["--tokens", 300_000, "--seconds", 0.1, "--rounds", 1, "--num-shards", 4, "--batches", 0]
    baseline = tmp_path / "baseline.json"
    size += ["--directory", tmp_path, "--baseline", baseline]
    new = run("check.py", *size, "--update")
    kept = json.loads(baseline.read_text())
    assert kept == {entry["name"]: entry["now"] for entry in new}
    assert list(kept) == ["arrow_of_numpy", "s3_of_gets"] and min(kept.values()) > 0
    assert not any(entry["worse"] for entry in new)
    baseline.write_text(json.dumps({"arrow_of_numpy": 1e-6, "s3_of_gets": 1e6, "instructions_per_token": 5.0}))
    before = baseline.read_text()
    fine, fell = run("check.py", *size, code=1)
    assert not fine["worse"] and fine["change"] > 1
    assert fell["worse"] and fell["change"] == pytest.approx(-1, abs=0.01)
    assert baseline.read_text() == before


def test_check_takes_fewer_instructions_and_greater_shares_for_better(benchmarks):
    check = importlib.import_module("check")
    tolerance = {"arrow_of_numpy": 0.25, "s3_of_gets": 0.25, "instructions_per_token": 0.05}

    def worse(**measured):
        baseline = {"arrow_of_numpy": 0.4, "s3_of_gets": 0.5, "instructions_per_token": 100.0}
        return [entry.name for entry in check.compare(baseline, measured, tolerance) if entry.worse]

    assert worse(arrow_of_numpy=0.31, s3_of_gets=5.0, instructions_per_token=104.0) == []
    assert worse(arrow_of_numpy=0.29, s3_of_gets=0.36) == ["arrow_of_numpy", "s3_of_gets"]
    assert worse(instructions_per_token=106.0) == ["instructions_per_token"]
    assert worse(instructions_per_token=50.0) == []
    assert check.compare({}, {"arrow_of_numpy": 0.1}, tolerance) == [("arrow_of_numpy", None, 0.1, None, False)]


def test_the_committed_baseline_has_all_that_check_measures(benchmarks):
    check = importlib.import_module("check")
    kept = json.loads((BENCHMARKS / "baseline.json").read_text())
    assert set(kept) == {*check.SHARES, check.INSTRUCTIONS} and min(kept.values()) > 0


@pytest.mark.slow
def test_instructions_are_those_of_the_batches_beyond_the_imports(benchmarks, tmp_path, monkeypatch):
    if shutil.which("valgrind") is None:
        pytest.skip("needs valgrind")
    check = importlib.import_module("check")
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    few, more = check.count_instructions(50, tmp_path), check.count_instructions(100, tmp_path)
    assert 1 < few < 1000  # an import of torch alone takes 5e9: 3000 a token of 50 batches
    assert few == pytest.approx(more, rel=0.2)
