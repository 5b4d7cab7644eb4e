"""How long a trainer waits for batches from S3, and what loading them costs its own Python threads.

    python benchmarks/latency.py [--seconds 20] [--batch-ms 16.384] [--num-shards 64] [--rounds 5]

A process takes a batch of 8 x 4096 tokens from an S3 server of this machine every ``--batch-ms``, by default 2 million
tokens a second of three datasets behind a Prefetcher, and times its waits in ``next()``. Then a loop of pure Python
spins in its main thread for ``--spin-seconds``, in turns: alone; while it takes batches at that rate; and while another
process does. Prints a table and JSON lines: medians over rounds, and how much faster it spins in the last case than in
the one before.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import pathlib
import resource
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import corpus
import numpy as np
import pipeline
import s3_server

from ibm_nodes import Loader, Prefetcher
from ibm_nodes.recipes import object_store

CASES = ("alone", "batches in this process", "batches in another process")


def consume(batches: Iterator[object], seconds: float, every: float) -> dict[str, float]:
    """Takes a batch whenever one is due; gives the waits in milliseconds, and their share of the time."""
    waits = []
    last: list[object] = []
    began = time.perf_counter()
    for number in range(round(seconds / every)):
        last.clear()  # freeing a batch is not waiting for one
        time.sleep(max(0.0, began + (number + 1) * every - time.perf_counter()))
        asked = time.perf_counter()
        last.append(next(batches))
        waits.append(time.perf_counter() - asked)
    passed = time.perf_counter() - began
    p50, p99, longest = np.quantile(waits, [0.5, 0.99, 1]) * 1e3
    return {
        "batches": len(waits),
        "batches_per_second": round(len(waits) / passed, 2),
        "waited_share": round(sum(waits) / passed, 6),
        "p50_ms": round(p50, 4),
        "p99_ms": round(p99, 4),
        "max_ms": round(longest, 3),
    }


def spin(batches: Iterator[object], seconds: float, every: float) -> dict[str, float]:
    """Counts, and takes a batch whenever one is due; gives turns of the loop a second."""
    turns = taken = 0
    now = due = began = time.perf_counter()
    while now < began + seconds:
        turns += 1
        if now >= due:
            next(batches)
            taken += 1
            due += every
        now = time.perf_counter()
    return {"batches": taken, "turns_per_second": turns / (now - began)}


def peak(batches: Iterator[object]) -> float:
    """Gives the most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work(urls: dict[str, str], options: dict[str, object], num_shards: int, pipe: Connection) -> None:
    """Calls what it is told to, with one loader all the time, until the pipe is closed."""
    node = pipeline.batcher(urls, num_shards, storage_options=options)
    with Loader(Prefetcher(node, prefetch_factor=pipeline.PREFETCH_FACTOR)) as loader, contextlib.suppress(EOFError):
        batches = iter(loader)
        for _ in range(2 * num_shards // pipeline.BATCH_SIZE + pipeline.PREFETCH_FACTOR):  # until all buffers are full
            next(batches)
        pipe.send(None)
        while True:
            function, *arguments = pipe.recv()
            pipe.send(function(batches, *arguments))


@contextlib.contextmanager
def worker(*arguments: object) -> Iterator[Connection]:
    """Runs ``work`` in a process of its own, which has begun to draw batches."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()  # so that an end of the process is an error here
    try:
        ours.recv()
        yield ours
    finally:
        ours.close()  # which ends a process that still waits for commands
        process.join()


def ask(pipe: Connection, *command: object) -> Any:
    """Has a worker call a function; gives what it returns."""
    pipe.send(command)
    return pipe.recv()


def compare(first: Connection, second: Connection, args: argparse.Namespace) -> dict[str, object]:
    """Spins in the first worker, alone and beside batches here and there, in turns."""
    every = args.batch_ms / 1e3
    turns: dict[str, list[float]] = {case: [] for case in CASES}
    rates: dict[str, float] = {}
    for _, case in itertools.product(range(args.rounds), CASES):
        if case == "batches in another process":
            second.send((consume, args.spin_seconds, every))
        answer = ask(first, spin, args.spin_seconds, every if case == "batches in this process" else 1e9)
        turns[case].append(answer["turns_per_second"])
        taken = second.recv() if case == "batches in another process" else answer
        rates[case] = round(taken["batches"] / args.spin_seconds, 1)
    # Within rounds, since the machine itself is faster in some than in others.
    alone, here, there = (np.array(turns[case]) for case in CASES)
    return {
        "turns_per_second": {case: round(float(np.median(values))) for case, values in turns.items()},
        "batches_per_second": {case: rates[case] for case in CASES[1:]},
        "slowed_by_this_process": round(float(np.median(alone / here)) - 1, 4),
        "slowed_by_another_process": round(float(np.median(alone / there)) - 1, 4),
        "beyond_another_process": round(float(np.median(there / here)) - 1, 4),
    }


def show(waits: dict[str, float], spins: dict[str, object], peak_mib: float) -> None:
    """Prints the table and the JSON lines."""
    print(f"{'waited in next()':34} {waits['waited_share']:9.4%} of the time, {waits['batches_per_second']} batches/s")
    for name in ("p50_ms", "p99_ms", "max_ms"):
        print(f"{'wait, ' + name[:-3]:34} {waits[name]:9.3f} ms")
    for case, turns in spins["turns_per_second"].items():
        print(f"{'spinner, ' + case:34} {turns:9,} turns/s")
    print(f"{'slowed beyond another process':34} {spins['beyond_another_process']:9.1%}")
    print(f"{'peak memory':34} {peak_mib:9.0f} MiB")
    print(json.dumps({"run": "waits", **waits, "peak_mib": round(peak_mib)}))
    print(json.dumps({"run": "spinner", **spins}))


def main() -> None:
    """Runs both measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=60_000_000)
    parser.add_argument("--num-shards", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--batch-ms", type=float, default=pipeline.BATCH_SIZE * pipeline.SEQ_LEN / 2e3)
    parser.add_argument("--spin-seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument(
        "--directory", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "ibm_nodes-latency"
    )
    args = parser.parse_args()
    files = corpus.build(args.directory, num_tokens=args.tokens, layouts=["arrow"])["arrow"]
    with object_store.serve(args.directory) as store:
        bucket = object_store.make_bucket(store.storage_options, "latency")
        urls = s3_server.upload(files, bucket, store.storage_options)
        setting = urls, store.storage_options, args.num_shards
        with worker(*setting) as first:
            waits = ask(first, consume, args.seconds, args.batch_ms / 1e3)
            with worker(*setting) as second:
                spins = compare(first, second, args)
            peak_mib = ask(first, peak)
    show(waits, spins, peak_mib)


if __name__ == "__main__":
    main()
