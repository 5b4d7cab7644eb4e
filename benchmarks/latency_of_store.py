"""The rate at which one process reads from an S3 server that answers after 30 ms, as a share of that without latency.

    python benchmarks/latency_of_store.py [--tokens 60_000_000] [--num-shards 8] [--latency-ms 30] [--rounds 7]

Server, client and a proxy in a process of its own share this machine; all requests go through the proxy, with latency
and without, in turns. Prints JSON lines: medians in million tokens a second, and their ratio.
"""

import argparse
import functools
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Iterator

import corpus
import numpy as np
import pipeline
from s3_server import proxy, upload

from ibm_nodes import Loader, Reader
from ibm_nodes.recipes import object_store

SETTLE_SECONDS = 0.7


def one_stream(urls: dict[str, str], storage_options: dict[str, object]) -> Iterator[int]:
    """Reads the largest dataset in one logical shard, as fast as it comes; yields numbers of tokens."""
    name, url = next(iter(urls.items()))
    reader = Reader(url, name=name, shard=0, num_shards=1, storage_options=storage_options)
    reader.reset()
    while True:
        yield sum(len(document.tokens) for document in reader.draw(pipeline.SEQ_LEN, extra=1))


def batches(urls: dict[str, str], storage_options: dict[str, object], num_shards: int) -> Iterator[int]:
    """Reads, mixes, packs, shuffles and collates all datasets in many logical shards; yields numbers of tokens."""
    for _ in Loader(pipeline.batcher(urls, num_shards, storage_options=storage_options)):
        yield pipeline.BATCH_SIZE * pipeline.SEQ_LEN


def rate(counts: Iterator[int], seconds: float, settle: float) -> float:
    """Gives million tokens a second over ``seconds``, after those of the time in which it settles."""
    began = time.perf_counter()
    while time.perf_counter() - began < settle:
        next(counts)
    began, total = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        total += next(counts)
    return total / passed / 1e6


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=60_000_000)
    parser.add_argument("--num-shards", type=int, default=8)
    parser.add_argument("--latency-ms", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--directory", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "ibm_nodes-latency"
    )
    args = parser.parse_args()
    files = corpus.build(args.directory, num_tokens=args.tokens)
    with object_store.serve(args.directory) as store, proxy(store.endpoint) as (endpoint, set_latency):
        bucket = object_store.make_bucket(store.storage_options, "latency")
        options = {**store.storage_options, "endpoint_url": endpoint}
        for form in files:
            urls = upload(files[form], bucket, store.storage_options)
            runs = {
                f"{form}, one stream": functools.partial(one_stream, urls, options),
                f"{form}, batches": functools.partial(batches, urls, options, args.num_shards),
            }
            for name, make in runs.items():
                rates: dict[float, list[float]] = {0.0: [], args.latency_ms / 1e3: []}
                counts = make()
                for _, seconds in itertools.product(range(args.rounds), rates):
                    set_latency(seconds)
                    rates[seconds].append(rate(counts, args.seconds, SETTLE_SECONDS))
                without, delayed = (float(np.median(values)) for values in rates.values())
                print(
                    json.dumps(
                        {
                            "run": name,
                            "latency_ms": args.latency_ms,
                            "without": round(without, 2),
                            "delayed": round(delayed, 2),
                            "ratio": round(delayed / without, 3),
                        }
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
