"""Time that checkpoints take from the training loop: blocked in ``save``, and in ``get_state``.

    python benchmarks/saves.py [--seconds 20] [--num-shards 64] [--every-ms 200] [--latency-ms 30] [--step-ms 20]

Saves the state of a rank (three datasets, seq_len 4096, a shuffle buffer of 16, behind a Prefetcher) again and again to
an S3 server of this machine, behind a proxy in a process of its own that delays every request, while a loop consumes
batches. Prints JSON.
"""

import argparse
import json
import pathlib
import tempfile
import time

import corpus
import numpy as np
import pipeline
import s3_server

from ibm_nodes import Loader, Prefetcher, checkpoint
from ibm_nodes.recipes import object_store

KEEP = 3


def milliseconds(times: list[float]) -> dict[str, float]:
    """Gives some quantiles of times in seconds."""
    median, most, longest = np.quantile(times, [0.5, 0.9, 1])
    return {"median_ms": round(median * 1e3, 3), "p90_ms": round(most * 1e3, 3), "max_ms": round(longest * 1e3, 3)}


def measure_get_state(urls: dict[str, str], num_shards: int, rounds: int) -> dict[str, float]:
    """Times ``loader.root.state_dict()`` when every logical shard has moved since the last."""
    times = []
    with Loader(Prefetcher(pipeline.batcher(urls, num_shards), prefetch_factor=4)) as loader:
        batches = iter(loader)
        for _ in range(rounds):
            for _ in range(-(-num_shards // pipeline.BATCH_SIZE)):
                next(batches)
            time.sleep(0.01)  # until the batches ahead are ready
            began = time.perf_counter()
            loader.root.state_dict()
            times.append(time.perf_counter() - began)
    return milliseconds(times)


def measure_saves(
    urls: dict[str, str], num_shards: int, url: str, storage_options: dict[str, object], args: argparse.Namespace
) -> dict[str, object]:
    """Times ``save`` beside a loop that consumes batches."""
    blocked, worked, num_batches, num_late = [], [], 0, 0
    with Loader(Prefetcher(pipeline.batcher(urls, num_shards), prefetch_factor=4)) as loader:
        batches = iter(loader)
        for _ in range(2 * num_shards // pipeline.BATCH_SIZE):  # until all buffers are full
            next(batches)
        future = checkpoint.save(loader, url, step=0, keep=KEEP, storage_options=storage_options)
        future.result()
        due = began = time.perf_counter()
        while time.perf_counter() - began < args.seconds:
            next(batches)
            num_batches += 1
            time.sleep(args.step_ms / 1e3)
            if time.perf_counter() < due:
                continue
            due += args.every_ms / 1e3
            num_late += not future.done()
            before, cpu = time.perf_counter(), time.thread_time()
            future = checkpoint.save(loader, url, step=len(blocked) + 1, keep=KEEP, storage_options=storage_options)
            blocked.append(time.perf_counter() - before)
            worked.append(time.thread_time() - cpu)
        seconds = time.perf_counter() - began
        future.result()
    newest = checkpoint.list_saved(url, storage_options)[-1]
    return {
        "latest": checkpoint.latest(url, storage_options=storage_options),
        "saves": len(blocked),
        "state_mb": round(newest.files[0].size / 1e6, 2),
        "batches": num_batches,
        "begun_beside_another": num_late,
        "blocked_share": round(sum(blocked) / seconds, 5),
        "cpu_share": round(sum(worked) / seconds, 5),
        **milliseconds(blocked),
    }


def main() -> None:
    """Runs both measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=30_000_000)
    parser.add_argument("--num-shards", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--every-ms", type=float, default=200.0)
    parser.add_argument("--latency-ms", type=float, default=30.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument(
        "--directory", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "ibm_nodes-saves"
    )
    args = parser.parse_args()
    urls = corpus.build(args.directory, num_tokens=args.tokens)["arrow"]
    print(json.dumps({"run": "get_state", **measure_get_state(urls, args.num_shards, args.rounds)}))
    with object_store.serve(args.directory) as store, s3_server.proxy(store.endpoint) as (endpoint, set_latency):
        set_latency(args.latency_ms / 1e3)
        bucket = object_store.make_bucket(store.storage_options, "saves")
        options = {**store.storage_options, "endpoint_url": endpoint}
        print(json.dumps({"run": "save", **measure_saves(urls, args.num_shards, f"{bucket}run", options, args)}))


if __name__ == "__main__":
    main()
