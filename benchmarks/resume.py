"""Time to the first batch from S3, fresh and resumed, and saves a second.

    python benchmarks/resume.py [--files 1000 10000] [--num-shards 64] [--rounds 5]

Three datasets of so many small Arrow files in all lie on an S3 server of this machine. New processes build the loader
and take one batch, in turns: from the beginning, and from checkpoints that lie on the server: early in the first epoch,
in the middle of it, and in the third. Then a loader takes batches, and its state after each is taken and saved there.
Prints a table and JSON lines: medians over rounds, in seconds, beside the time until the process had started and
imported everything, which is not in them; and ratios to a fresh start.
"""

import argparse
import itertools
import json
import multiprocessing
import pathlib
import tempfile
import time
from multiprocessing.connection import Connection

import corpus
import numpy as np
import pipeline
import s3_server

from ibm_nodes import Loader, Prefetcher, checkpoint
from ibm_nodes.recipes import object_store

FRESH = "fresh"
POSITIONS = {"early": 0.05, "middle of an epoch": 0.5, "third epoch": 2.5}
"""Epochs after which it was saved."""
Options = dict[str, object]


def build_loader(urls: dict[str, str], num_shards: int, storage_options: Options | None) -> Loader:
    """Gives the loader that is measured."""
    node = pipeline.batcher(urls, num_shards, storage_options=storage_options)
    return Loader(Prefetcher(node, prefetch_factor=pipeline.PREFETCH_FACTOR))


def save_positions(files: dict[str, str], num_shards: int, tokens: int, url: str, options: Options) -> dict[str, int]:
    """Saves each position, out of a loader that reads the same files from the disk; gives their steps by name."""
    per_epoch = tokens / pipeline.BATCH_SIZE / pipeline.SEQ_LEN
    steps = {name: max(1, round(epochs * per_epoch)) for name, epochs in POSITIONS.items()}
    with build_loader(files, num_shards, None) as loader:
        for step, _ in enumerate(itertools.islice(loader, max(steps.values())), 1):
            if step in steps.values():
                checkpoint.save(loader, url, step=step, storage_options=options).result()
    return steps


def first_batch(
    urls: dict[str, str],
    num_shards: int,
    options: Options,
    saved: tuple[str, int] | None,
    launched: float,
    to: Connection,
) -> None:
    """Takes one batch, of a fresh or a resumed loader; sends the seconds until all was imported, and from there on."""
    began = time.time()
    with build_loader(urls, num_shards, options) as loader:
        if saved is not None:
            url, step = saved
            checkpoint.load(loader, url, step=step, storage_options=options)
        next(iter(loader))
        to.send((began - launched, time.time() - began))


def in_new_process(*arguments: object) -> tuple[float, float]:
    """Runs ``first_batch`` in a new process; gives its times."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=first_batch, args=(*arguments, time.time(), theirs))
    process.start()
    theirs.close()  # so that an end of the process is an error here
    times = ours.recv()
    process.join()
    return times


def measure_saves(
    urls: dict[str, str], num_shards: int, url: str, options: Options, seconds: float
) -> dict[str, float]:
    """Takes and saves a state after each batch; gives how many of both go into a second that does nothing else."""
    taken, saved = [], []
    with build_loader(urls, num_shards, options) as loader:
        batches = iter(loader)
        for _ in range(2 * num_shards // pipeline.BATCH_SIZE):  # until all buffers are full
            next(batches)
        end = time.perf_counter() + seconds
        for step, _ in enumerate(batches):
            began = time.perf_counter()
            loader.state_dict()
            between = time.perf_counter()
            checkpoint.save(loader, url, step=step, keep=3, storage_options=options).result()
            taken.append(between - began)
            saved.append(time.perf_counter() - between)
            if time.perf_counter() > end:
                break
    return {
        "saves": len(saved),
        "state_dict_ms": round(float(np.median(taken)) * 1e3, 3),
        "save_ms": round(float(np.median(saved)) * 1e3, 3),
        "saves_per_second": round(len(saved) / (sum(taken) + sum(saved)), 2),
    }


def measure(num_files: int, store: object_store.ObjectStore, args: argparse.Namespace) -> list[dict[str, object]]:
    """Measures with so many files; gives a result for fresh, for each position, and for saves."""
    tokens = num_files * args.tokens_per_file
    built = corpus.build(
        args.directory / str(num_files), num_tokens=tokens, layouts=["arrow"], tokens_per_file=args.tokens_per_file
    )
    bucket = object_store.make_bucket(store.storage_options, f"files-{num_files}")
    urls = s3_server.upload(built["arrow"], bucket, store.storage_options)
    saves = f"{bucket}saves"
    steps = save_positions(built["arrow"], args.num_shards, tokens, saves, store.storage_options)
    starts = {FRESH: None, **{name: (saves, step) for name, step in steps.items()}}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    for _, (name, saved) in itertools.product(range(args.rounds), starts.items()):
        times[name].append(in_new_process(urls, args.num_shards, store.storage_options, saved))
    medians = {name: np.median(values, axis=0).tolist() for name, values in times.items()}
    results: list[dict[str, object]] = [
        {
            "run": name,
            "files": num_files,
            "step": steps.get(name, 0),
            "first_batch_seconds": round(first, 3),
            "start_up_seconds": round(start_up, 3),
            "ratio": round(first / medians[FRESH][1], 3),
        }
        for name, (start_up, first) in medians.items()
    ]
    also = measure_saves(urls, args.num_shards, f"{bucket}again", store.storage_options, args.seconds)
    return [*results, {"run": "saves", "files": num_files, **also}]


def show(results: list[dict[str, object]]) -> None:
    """Prints the table and the JSON lines."""
    for entry in results:
        what = f"{entry['files']:,} files, {entry['run']}"
        if entry["run"] == "saves":
            each = f"{entry['state_dict_ms']} ms a state_dict(), {entry['save_ms']} ms a save"
            print(f"{what:32} {entry['saves_per_second']:8.1f} a second   {each}")
        else:
            times = f"{entry['first_batch_seconds']:8.2f} s   {entry['ratio']:5.2f} of fresh"
            print(f"{what:32} {times}   ({entry['start_up_seconds']:.2f} s of imports before)")
    for entry in results:
        print(json.dumps(entry), flush=True)


def main() -> None:
    """Runs the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--tokens-per-file", type=int, default=4000)
    parser.add_argument("--num-shards", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="of saves")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--directory", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "ibm_nodes-resume"
    )
    args = parser.parse_args()
    for num_files in args.files:
        with object_store.serve(args.directory) as store:
            show(measure(num_files, store, args))


if __name__ == "__main__":
    main()
