"""Tokens a second of a loader, each beside the limit of what it does.

    python benchmarks/throughput.py [--only arrow parquet ...] [--tokens 200_000_000] [--num-shards 64 1 16 960]
        [--seconds 5] [--rounds 3]

Prints a table and JSON lines: medians over rounds in which the runs take turns, and the ratio to the run that each is
compared with. ``--only`` chooses among

- ``arrow``: beside a numpy loop that reads the same files, mixes them by weight, packs documents end to end with EOS,
  shuffles in a buffer of 10,000 rows and makes int64 batches, all in large steps and in one thread;
- ``parquet``: beside one thread of pyarrow that decodes the same files, a row group at a time;
- ``ibm``: files of a record batch for each document, beside pyarrow that gives these out of a memory map;
- ``s3``: Arrow and Parquet from an S3 server of this machine, beside ranged GETs of the same objects by s3fs alone;
- ``latency``: the same through a proxy of this machine that answers at once, and after ``--latency-ms``;
- ``shards``: Arrow in 1, 16, 64 and 960 logical shards, beside 16 of them;
- ``datasets``: Arrow as 1, 3 and 20 datasets of equal weights, beside 3 of them;
- ``text``: JSON lines, tokenized on the fly, beside ``encode_batch`` of ``tokenizers`` on the same texts.

The first of ``--num-shards`` is the number of logical shards in all other runs.
"""

import argparse
import contextlib
import functools
import json
import pathlib
import resource
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import corpus
import corpus_of_text
import limits
import numpy as np
import pyarrow as pa
import s3_server
from pipeline import BATCH_SIZE, count_rate, get_state_milliseconds, rate, rate_of_loader

import ibm_nodes
from ibm_nodes.recipes import object_store

COUNTS_OF_DATASETS = (1, 3, 20)
TOKENS_PER_WORD_OF_TEXT = 10
"""There are so many times fewer words of text than tokens."""


class Run(NamedTuple):
    """Something whose rate is measured.

    Attributes:
        measure: gives million tokens a second, measured for so many seconds.
        base: the run that it is compared with, or None.
    """

    measure: Callable[[float], float]
    base: str | None = None


Runs = dict[str, Run]


def loader_run(*arguments: object, base: str | None, **more: object) -> Run:
    """Makes a run of ``rate_of_loader``."""
    return Run(functools.partial(rate_of_loader, *arguments, **more), base)


def limit_run(make: Callable[..., Iterator[int]], *arguments: object, base: str | None = None, **more: object) -> Run:
    """Makes a run of a limit, that yields numbers of tokens."""
    return Run(lambda seconds: count_rate(make(*arguments, **more), seconds), base)


def local_urls(args: argparse.Namespace, layout: str) -> dict[str, str]:
    """Builds the corpus in one layout, unless it is there."""
    return corpus.build(args.directory, num_tokens=args.tokens, layouts=[layout])[layout]


def arrow_runs(args: argparse.Namespace, stack: contextlib.ExitStack) -> Runs:
    """Local Arrow beside the numpy loop."""
    urls, base = local_urls(args, "arrow"), "numpy loop over Arrow"
    return {
        base: Run(lambda seconds: rate(limits.pack(urls), seconds)),
        "Arrow": loader_run(urls, args.num_shards[0], base=base),
        "Arrow, best fit": loader_run(urls, args.num_shards[0], base=base, strategy="best_fit"),
        "Arrow, Prefetcher": loader_run(urls, args.num_shards[0], base=base, prefetch=True),
    }


def local_runs(
    layout: str,
    name: str,
    base: str,
    limit: Callable[..., Iterator[int]],
    args: argparse.Namespace,
    stack: contextlib.ExitStack,
) -> Runs:
    """A layout of local files beside what reads no more than these."""
    urls = local_urls(args, layout)
    return {
        base: limit_run(limit, urls),
        name: loader_run(urls, args.num_shards[0], base=base),
        f"{name}, Prefetcher": loader_run(urls, args.num_shards[0], base=base, prefetch=True),
    }


def s3_runs(args: argparse.Namespace, stack: contextlib.ExitStack) -> Runs:
    """Both layouts from the S3 server beside raw GETs."""
    runs: Runs = {}
    store, uploaded = served(args, stack)
    for layout, urls in uploaded.items():
        base = f"GETs of {layout.capitalize()}"
        runs[base] = Run(functools.partial(rate_of_gets, args, layout, urls, store.storage_options))
        for name, prefetch in ((f"{layout.capitalize()}, S3", False), (f"{layout.capitalize()}, S3, Prefetcher", True)):
            options = {"storage_options": store.storage_options, "prefetch": prefetch}
            runs[name] = loader_run(urls, args.num_shards[0], base=base, **options)
    return runs


def latency_runs(args: argparse.Namespace, stack: contextlib.ExitStack) -> Runs:
    """Both layouts from the S3 server behind a proxy that answers late."""
    runs: Runs = {}
    store, uploaded = served(args, stack)
    endpoint, set_latency = stack.enter_context(s3_server.proxy(store.endpoint))
    options = {**store.storage_options, "endpoint_url": endpoint}

    def behind(milliseconds: float, measure: Callable[[float], float], seconds: float) -> float:
        set_latency(milliseconds / 1e3)
        return measure(seconds)

    for layout, urls in uploaded.items():
        for milliseconds in (0.0, args.latency_ms):
            where = f"{layout.capitalize()}, S3 behind {milliseconds:g} ms"
            base = f"GETs of {where}"
            gets = functools.partial(rate_of_gets, args, layout, urls, options)
            ours = functools.partial(rate_of_loader, urls, args.num_shards[0], prefetch=True, storage_options=options)
            runs[base] = Run(functools.partial(behind, milliseconds, gets))
            runs[f"{where}, Prefetcher"] = Run(
                functools.partial(behind, milliseconds, lambda seconds, ours=ours: ours(seconds=seconds)), base
            )
    return runs


def shards_runs(args: argparse.Namespace, stack: contextlib.ExitStack) -> Runs:
    """Arrow in several numbers of logical shards."""
    urls, base = local_urls(args, "arrow"), 16 if 16 in args.num_shards else args.num_shards[0]
    named = {number: f"Arrow, {number} logical shards" for number in sorted(args.num_shards)}
    return {name: loader_run(urls, number, base=named[base]) for number, name in named.items()}


def datasets_runs(args: argparse.Namespace, stack: contextlib.ExitStack) -> Runs:
    """Arrow as several numbers of datasets."""
    local_urls(args, "arrow")
    runs: Runs = {}
    for number in COUNTS_OF_DATASETS:
        urls = corpus.cut(args.directory, number)
        weights = dict.fromkeys(urls, 1.0)
        runs[f"Arrow, {number} datasets"] = loader_run(
            urls, args.num_shards[0], base="Arrow, 3 datasets", weights=weights
        )
    return runs


def text_runs(args: argparse.Namespace, stack: contextlib.ExitStack) -> Runs:
    """Text beside the tokenizer alone."""
    urls, tokenizer = corpus_of_text.build(args.directory, num_words=args.tokens // TOKENS_PER_WORD_OF_TEXT)
    base = "encode_batch"
    # Tokenizers begin with small batches, so that the first comes soon; a run of days is in large ones.
    options: dict[str, object] = {"tokenizer": tokenizer, "num_first": 2 * args.num_shards[0]}
    return {
        base: limit_run(limits.encode, urls, tokenizer, fast=False),
        "encode_batch_fast": limit_run(limits.encode, urls, tokenizer, base=base, fast=True),
        "text": loader_run(urls, args.num_shards[0], base=base, **options),
        "text, Prefetcher": loader_run(urls, args.num_shards[0], base=base, prefetch=True, **options),
    }


GROUPS = {
    "arrow": arrow_runs,
    "parquet": functools.partial(local_runs, "parquet", "Parquet", "decoding Parquet", limits.decode_row_groups),
    "ibm": functools.partial(local_runs, "ibm", "IBM layout", "record batches, IBM layout", limits.get_record_batches),
    "s3": s3_runs,
    "latency": latency_runs,
    "shards": shards_runs,
    "datasets": datasets_runs,
    "text": text_runs,
}


def served(
    args: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[object_store.ObjectStore, dict[str, dict[str, str]]]:
    """Serves the corpus from an S3 server, one for all who ask; gives it, and URLs by layout and dataset."""
    if not hasattr(args, "served"):
        files = {layout: local_urls(args, layout) for layout in ("arrow", "parquet")}
        store = stack.enter_context(object_store.serve(args.directory))
        bucket = object_store.make_bucket(store.storage_options, "throughput")
        uploaded = {layout: s3_server.upload(urls, bucket, store.storage_options) for layout, urls in files.items()}
        args.served = store, uploaded
    return args.served


def rate_of_gets(
    args: argparse.Namespace, layout: str, urls: dict[str, str], options: dict[str, object], seconds: float
) -> float:
    """Gives million tokens a second of raw GETs: as many as lie in their bytes."""
    files = [path for path in (args.directory / layout).rglob("*") if path.is_file()]
    tokens_per_byte = num_tokens(args.directory) / sum(path.stat().st_size for path in files)
    return limits.read_ranges(list(urls.values()), options, seconds) * tokens_per_byte / 1e6


@functools.cache
def num_tokens(directory: pathlib.Path) -> int:
    """Counts the tokens of the Arrow files, which the other layouts have too."""
    total = 0
    for path in (directory / "arrow").rglob("*.arrow"):
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        total += sum(len(reader.get_batch(number).column(0).values) for number in range(reader.num_record_batches))
    return total


def take_turns(runs: Runs, rounds: int, seconds: float) -> dict[str, float]:
    """Measures each run once a round; gives medians."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            rates[name].append(run.measure(seconds))
    return {name: float(np.median(values)) for name, values in rates.items()}


def show(runs: Runs, medians: dict[str, float]) -> None:
    """Prints the table and the JSON lines."""
    for name, run in runs.items():
        ratio = medians[name] / medians[run.base] if run.base else None
        compared = f"{ratio:8.2f} of {run.base}" if run.base else ""
        print(f"{name:42} {medians[name]:8.1f} M tokens/s {compared}")
    for name, run in runs.items():
        result: dict[str, object] = {"run": name, "million_tokens_per_second": round(medians[name], 4)}
        if run.base:
            result |= {"base": run.base, "ratio": round(medians[name] / medians[run.base], 3)}
        print(json.dumps(result))


def show_totals(args: argparse.Namespace, medians: dict[str, float]) -> None:
    """Prints what is about no single run."""
    totals: dict[str, float] = {}
    if "arrow" in args.only:
        totals["best_fit_of_concat"] = round(medians["Arrow, best fit"] / medians["Arrow"], 3)
        totals["get_state_milliseconds"] = round(
            get_state_milliseconds(local_urls(args, "arrow"), args.num_shards[0]), 3
        )
        print(f"{'best fit':42} {totals['best_fit_of_concat']:8.2f} of the speed of concat")
        moved = f"({args.num_shards[0]} logical shards, {BATCH_SIZE} of them moved)"
        print(f"{'get_state of a Sharder':42} {totals['get_state_milliseconds']:8.3f} ms {moved}")
    totals["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(f"{'peak memory':42} {totals['peak_mib']:8.0f} MiB")
    print(json.dumps(totals))


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--num-shards", type=int, nargs="+", default=[64, 1, 16, 960])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=30.0)
    parser.add_argument(
        "--directory", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "ibm_nodes-corpus"
    )
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        runs: Runs = {}
        for group in args.only:
            runs |= GROUPS[group](args, stack)
        medians = take_turns(runs, args.rounds, args.seconds)
    print(f"{args.tokens:,} tokens, {args.num_shards[0]} logical shards, ibm_nodes from {ibm_nodes.__file__}")
    show(runs, medians)
    show_totals(args, medians)


if __name__ == "__main__":
    main()
