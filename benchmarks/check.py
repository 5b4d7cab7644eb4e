"""Compares what holds on any machine with a baseline that is kept beside this file, and says what moved.

    python benchmarks/check.py [--update] [--tolerance 0.25] [--instructions-tolerance 0.05]

Measured are the rates of local Arrow files as a share of a numpy loop over them, and of Arrow files from an S3 server
of this machine as a share of ranged GETs of the same objects, as ``throughput.py`` does; and, if ``valgrind`` is
installed, the instructions of ``consume.py`` a token, by callgrind: of ``--batches`` batches beyond as many others, so
that imports do not count. Instructions depend on the versions of Python and the libraries, too.

Prints a table and JSON lines. The exit code is 1 if a share fell, or instructions rose, by more than the tolerance.
``--update`` makes what was measured the baseline; what was left out stays in it as it was.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from typing import NamedTuple

import pipeline
import throughput

HERE = pathlib.Path(__file__).resolve().parent
SHARES = {"arrow_of_numpy": "Arrow", "s3_of_gets": "Arrow, S3, Prefetcher"}
INSTRUCTIONS = "instructions_per_token"


class Moved(NamedTuple):
    """What became of one figure.

    Attributes:
        name: the figure.
        before: in the baseline, or None.
        now: as measured.
        change: relative, above zero if it is better now, or None.
        worse: it is worse by more than the tolerance.
    """

    name: str
    before: float | None
    now: float
    change: float | None
    worse: bool


def measure_shares(args: argparse.Namespace) -> dict[str, float]:
    """Measures the rates that are shares of a limit; gives medians of the shares in each round."""
    with contextlib.ExitStack() as stack:
        runs = throughput.arrow_runs(args, stack) | throughput.s3_runs(args, stack)
        wanted = {name for run in SHARES.values() for name in (run, runs[run].base)}
        runs = {name: run for name, run in runs.items() if name in wanted}
        rounds = [throughput.take_turns(runs, 1, args.seconds) for _ in range(args.rounds)]
    shares = {name: [rates[run] / rates[runs[run].base] for rates in rounds] for name, run in SHARES.items()}
    return {name: round(statistics.median(values), 4) for name, values in shares.items()}


def count_instructions(num_batches: int, directory: pathlib.Path) -> float:
    """Counts the instructions of a process that draws so many batches, and those of one that draws twice as many."""
    once, twice = (_collected(number, directory) for number in (num_batches, 2 * num_batches))
    return round((twice - once) / num_batches / pipeline.BATCH_SIZE / pipeline.SEQ_LEN, 4)


def _collected(num_batches: int, directory: pathlib.Path) -> int:
    command = [sys.executable, "-P", str(HERE / "consume.py"), str(num_batches), str(directory / "instructions")]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, env=environment, check=True)  # builds the corpus
    tool = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    done = subprocess.run([*tool, *command], env=environment, check=True, capture_output=True, text=True)
    return int(re.search(r"Collected *: *(\d+)", done.stderr)[1])


def compare(baseline: dict[str, float], measured: dict[str, float], tolerance: dict[str, float]) -> list[Moved]:
    """Says what moved.

    Args:
        baseline: figures by name.
        measured: figures by name; of instructions fewer are better, of shares more.
        tolerance: by name, by what share of the baseline a figure may be worse.
    """
    moved = []
    for name, now in measured.items():
        before = baseline.get(name)
        change = None
        if before is not None:
            change = (before - now if name == INSTRUCTIONS else now - before) / before
        moved.append(Moved(name, before, now, change, change is not None and change < -tolerance[name]))
    return moved


def show(moved: list[Moved]) -> None:
    """Prints the table and the JSON lines."""
    for entry in moved:
        before = "      new" if entry.change is None else f"{entry.before:9.4f}"
        change = "" if entry.change is None else f"{entry.change:+8.1%}{'  WORSE' if entry.worse else ''}"
        print(f"{entry.name:24} {before} -> {entry.now:9.4f} {change}")
    for entry in moved:
        print(json.dumps(entry._asdict()))


def main() -> int:
    """Measures, compares, and says whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--baseline", type=pathlib.Path, default=HERE / "baseline.json")
    parser.add_argument("--tolerance", type=float, default=0.25)
    parser.add_argument("--instructions-tolerance", type=float, default=0.05)
    parser.add_argument("--tokens", type=int, default=60_000_000)
    parser.add_argument("--num-shards", type=int, default=[64], nargs=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=100, help="of which instructions are counted; 0 leaves them out")
    parser.add_argument(
        "--directory", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "ibm_nodes-check"
    )
    args = parser.parse_args()
    measured = measure_shares(args)
    if not args.batches or shutil.which("valgrind") is None:
        print(f"{INSTRUCTIONS} left out: {'valgrind is not installed' if args.batches else '--batches is 0'}")
    else:
        measured[INSTRUCTIONS] = count_instructions(args.batches, args.directory)
    baseline = json.loads(args.baseline.read_text()) if args.baseline.exists() else {}
    tolerance = {**dict.fromkeys(SHARES, args.tolerance), INSTRUCTIONS: args.instructions_tolerance}
    moved = compare(baseline, measured, tolerance)
    show(moved)
    if args.update:
        args.baseline.write_text(json.dumps(baseline | measured, indent=4) + "\n")
    return int(any(entry.worse for entry in moved) and not args.update)


if __name__ == "__main__":
    sys.exit(main())
