"""Tokens a second of a loader, beside a numpy loop that packs the same files.

    python benchmarks/throughput.py [--tokens 200_000_000] [--num-shards 64] [--seconds 10]

Prints a table and JSON lines. Beside it runs one thread of numpy that reads the same Arrow files, mixes them by weight,
packs documents end to end with EOS, shuffles in a buffer of 10,000 rows and makes int64 batches, all in large steps;
ratios to it, in one run, are what counts.
"""

import argparse
import functools
import json
import pathlib
import resource
import tempfile
import time
from collections.abc import Iterator

import corpus
import numpy as np
import pyarrow as pa

import ibm_nodes
from ibm_nodes import Batcher, CausalLMCollator, Loader, Mixer, Packer, Prefetcher, Reader, Sharder, Shuffler

SEQ_LEN, BATCH_SIZE = 4096, 8
Options = dict[str, object] | None


def graph(shard: int, num_shards: int, *, urls: dict[str, str], strategy: str, storage_options: Options) -> Shuffler:
    """Builds the graph of one logical shard."""
    shared = {"shard": shard, "num_shards": num_shards, "seed": 0, "storage_options": storage_options}
    sources = {name: Reader(url, name=name, **shared) for name, url in urls.items()}
    node = Mixer(sources, weights={name: corpus.WEIGHTS[name] for name in urls}, seed=(0, shard))
    node = Packer(node, seq_len=SEQ_LEN, eos_id=corpus.EOS_ID, strategy=strategy)
    return Shuffler(node, buffer_size=16, seed=(0, shard))


def sharder(
    urls: dict[str, str], num_shards: int, strategy: str = "concat", storage_options: Options = None
) -> Sharder:
    """Gives a rank that owns all logical shards."""
    made = functools.partial(graph, urls=urls, strategy=strategy, storage_options=storage_options)
    return Sharder(made, num_shards=num_shards, rank=0, world_size=1)


def batcher(
    urls: dict[str, str], num_shards: int, strategy: str = "concat", storage_options: Options = None
) -> Batcher:
    """Gives batches of int64 tensors."""
    collate = CausalLMCollator(shift_labels=False, seq_len=SEQ_LEN)
    return Batcher(sharder(urls, num_shards, strategy, storage_options), batch_size=BATCH_SIZE, collate=collate)


def numpy_loop(urls: dict[str, str], buffer_size: int = 10_000) -> Iterator[np.ndarray]:
    """Mixes, packs and shuffles the files of all datasets for ever, a record batch at a time: the least one has to do.

    Nothing of it could be resumed or rescaled, and the mix is exact to a record batch.
    """
    rng = np.random.default_rng(0)
    sources = {name: _closed_batches(url) for name, url in urls.items()}
    drawn = dict.fromkeys(urls, 0)
    buffer, filled = np.empty((buffer_size, SEQ_LEN), np.int32), 0
    rest = np.empty(0, np.int32)
    while True:
        name = min(urls, key=lambda name: drawn[name] / corpus.WEIGHTS[name])
        tokens = next(sources[name])
        drawn[name] += len(tokens)
        tokens = np.concatenate([rest, tokens])
        end = len(tokens) - len(tokens) % SEQ_LEN
        rows, rest = tokens[:end].reshape(-1, SEQ_LEN), tokens[end:]
        missing = min(buffer_size - filled, len(rows))
        buffer[filled : filled + missing] = rows[:missing]
        filled += missing
        for at in range(missing, len(rows), BATCH_SIZE):
            new = rows[at : at + BATCH_SIZE]
            chosen = rng.choice(buffer_size, len(new), replace=False, shuffle=False)
            batch = buffer[chosen].astype(np.int64)
            buffer[chosen] = new
            yield batch


def _closed_batches(url: str) -> Iterator[np.ndarray]:
    """Gives the tokens of each record batch, with an EOS after each document."""
    while True:
        for path in sorted(pathlib.Path(url.removeprefix("file://")).glob("*.arrow")):
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            for number in range(reader.num_record_batches):
                column = reader.get_batch(number).column(0)
                ends = column.offsets.to_numpy()[1:]
                closed = np.insert(column.values.to_numpy(), ends, corpus.EOS_ID)
                yield closed


def rate(batches: Iterator[object], seconds: float) -> float:
    """Gives million tokens a second over ``seconds``, after the first batches."""
    for _ in range(8):
        next(batches)
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        next(batches)
        count += 1
    return count * BATCH_SIZE * SEQ_LEN / passed / 1e6


def get_state_milliseconds(urls: dict[str, str], num_shards: int) -> float:
    """Gives the time of one state of a Sharder of which a batch's worth of shards has moved."""
    node = sharder(urls, num_shards)
    times = []
    for _ in range(200):
        for _ in range(BATCH_SIZE):
            next(node)
        began = time.perf_counter()
        node.state_dict()
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e3


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--num-shards", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--directory", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "ibm_nodes-corpus"
    )
    args = parser.parse_args()
    urls = corpus.build(args.directory, num_tokens=args.tokens)
    runs = {
        "numpy loop over Arrow": lambda: numpy_loop(urls["arrow"]),
        "Arrow": lambda: iter(Loader(batcher(urls["arrow"], args.num_shards))),
        "Arrow, best fit": lambda: iter(Loader(batcher(urls["arrow"], args.num_shards, "best_fit"))),
        "Arrow, Prefetcher": lambda: iter(
            Loader(Prefetcher(batcher(urls["arrow"], args.num_shards), prefetch_factor=4))
        ),
        "Parquet": lambda: iter(Loader(batcher(urls["parquet"], args.num_shards))),
    }
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, make in runs.items():
            rates[name].append(rate(make(), args.seconds))
    base = float(np.median(rates["numpy loop over Arrow"]))
    print(f"{args.tokens:,} tokens, {args.num_shards} logical shards on one rank, ibm_nodes from {ibm_nodes.__file__}")
    for name, values in rates.items():
        median = float(np.median(values))
        print(f"{name:28} {median:8.1f} M tokens/s   {median / base:5.2f} of the numpy loop")
        print(
            json.dumps({"run": name, "million_tokens_per_second": round(median, 2), "ratio": round(median / base, 3)})
        )
    of_concat = float(np.median(rates["Arrow, best fit"]) / np.median(rates["Arrow"]))
    print(f"best fit                     {of_concat:8.2f} of the speed of concat")
    milliseconds = get_state_milliseconds(urls["arrow"], args.num_shards)
    print(
        f"get_state of a Sharder       {milliseconds:8.3f} ms   ({args.num_shards} shards, {BATCH_SIZE} of them moved)"
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory                  {peak:8.0f} MiB")
    totals = {"get_state_milliseconds": round(milliseconds, 3), "peak_mib": round(peak)}
    print(json.dumps({**totals, "best_fit_of_concat": round(of_concat, 3)}))


if __name__ == "__main__":
    main()
