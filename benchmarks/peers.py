"""Tokens a second of other loaders that do the same work on the same corpus, beside those of ibm_nodes.

    python benchmarks/peers.py [--tokens 200_000_000] [--only grain,litdata] [--s3] [--rounds 5] [--seconds 5]

Each loader has a process of its own, without workers, and they take turns: all are measured once a round, and wait
while another runs. What is packed offline is packed before. Prints a table and JSON lines: the median of the rounds,
the peak memory, and the rate of ibm_nodes on the same format over that of the other (ratio). With ``--s3``, ibm_nodes
and plain torchdata nodes read the Arrow files from an S3 server on this machine instead. A loader that is not installed
is left out.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import multiprocessing
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import corpus
import numpy as np
import pipeline
import s3_server
import torch
from peer_loaders import BATCH_SIZE, PEERS, SEQ_LEN, Options, Urls

from ibm_nodes import Loader
from ibm_nodes.recipes import object_store

OURS = "ibm_nodes"


def ibm_nodes(urls: Urls, storage_options: Options = None, num_shards: int = 64) -> Iterator[torch.Tensor]:
    """Reads, mixes, packs, shuffles and batches in many logical shards."""
    for batch in Loader(pipeline.batcher(urls, num_shards, storage_options=storage_options)):
        yield batch["input_ids"]


def _serve(load: Callable[[], Iterator[torch.Tensor]], pipe: Connection) -> None:
    """Says when it has begun; measures for as many seconds as it is told; for None, gives the peak memory in MiB."""
    batches = load()
    batch = next(batches)
    assert (batch.shape, batch.dtype) == ((BATCH_SIZE, SEQ_LEN), torch.int64)
    pipe.send("begun")
    while (seconds := pipe.recv()) is not None:
        pipe.send(pipeline.rate(batches, seconds))
    status = pathlib.Path("/proc/self/status").read_text()  # ru_maxrss would count what the parent had at the start
    pipe.send(int(status.split("VmHWM:")[1].split()[0]) / 1024)


class Turns:
    """Runs a loader in a process of its own, only while it is measured."""

    def __init__(self, load: Callable[[], Iterator[torch.Tensor]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(load, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def ask(self, seconds: float | None) -> float:
        """Gives the rate over ``seconds`` in million tokens a second; for None, the peak memory in MiB, and ends."""
        self._pipe.send(seconds)
        answer = float(self._pipe.recv())
        if seconds is None:
            self._process.join(timeout=30)
        return answer

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def installed(names: list[str]) -> dict[str, str]:
    """Gives the versions of those loaders that are installed, and says what the others need."""
    versions = {}
    for name in names:
        peer = PEERS[name]
        try:
            versions[name] = importlib.metadata.version(peer.distribution)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} is left out: {peer.distribution} is not installed (pip install -r {peer.requirements})")
    return versions


def packed(name: str, urls: Urls, root: pathlib.Path) -> Urls:
    """Packs the datasets offline for a loader that needs it, once; gives the directories."""
    pack, directory = PEERS[name].pack, root / name
    if pack is None:
        return urls
    stamp, settings = directory / "corpus.json", (root / f"{PEERS[name].form}.json").read_text()
    directories = {dataset: str(directory / dataset) for dataset in urls}
    if not stamp.exists() or stamp.read_text() != settings:
        shutil.rmtree(directory, ignore_errors=True)
        for dataset, url in urls.items():
            (directory / dataset).mkdir(parents=True)
            pack(url, directory / dataset)
        stamp.write_text(settings)
    return directories


def measure(loads: dict[str, Callable[[], Iterator[torch.Tensor]]], rounds: int, seconds: float) -> dict[str, Any]:
    """Gives the median rate in million tokens a second and the peak memory in MiB of each loader."""
    with contextlib.ExitStack() as stack:
        turns = {name: stack.enter_context(contextlib.closing(Turns(load))) for name, load in loads.items()}
        rates: dict[str, list[float]] = {name: [] for name in loads}
        for _ in range(rounds):
            for name, turn in turns.items():
                rates[name].append(turn.ask(seconds))
        peaks = {name: turn.ask(None) for name, turn in turns.items()}
    return {name: (float(np.median(rates[name])), peaks[name]) for name in loads}


def report(results: dict[str, tuple[float, float]], versions: dict[str, str], store: str) -> None:
    """Prints a line of the table and a JSON line for each loader."""
    for name, (rate, peak) in results.items():
        peer = PEERS.get(name)
        base = f"{OURS}, {peer.form}" if peer else name
        ratio = results[base][0] / rate
        label = f"{name} {versions[name]}, {peer.form}" if peer else name
        print(f"{label:36} {rate:8.1f} M tokens/s {peak:8.0f} MiB   {base} is {ratio:6.2f} times as fast")
        entry = {
            "run": name,
            "version": versions.get(name),
            "store": store,
            "million_tokens_per_second": round(rate, 2),
        }
        print(json.dumps({**entry, "ratio": round(ratio, 3), "peak_mib": round(peak)}))


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--num-shards", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=lambda names: names.split(","), default=list(PEERS), metavar="NAME,...")
    parser.add_argument("--s3", action="store_true")
    parser.add_argument(
        "--directory", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "ibm_nodes-corpus"
    )
    args = parser.parse_args()
    if unknown := set(args.only) - set(PEERS):
        parser.error(f"--only must name some of {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
    urls = corpus.build(args.directory, num_tokens=args.tokens)
    versions = installed(["torchdata"] if args.s3 else args.only)
    with contextlib.ExitStack() as stack:
        options = None
        if args.s3:
            store = stack.enter_context(object_store.serve(args.directory))
            options = store.storage_options
            bucket = object_store.make_bucket(options, "peers")
            urls = {"arrow": s3_server.upload(urls["arrow"], bucket, options)}
        loads = {
            f"{OURS}, {form}": functools.partial(ibm_nodes, urls[form], options, args.num_shards)
            for form in dict.fromkeys(PEERS[name].form for name in versions)
        }
        for name in versions:
            peer = PEERS[name]
            loads[name] = functools.partial(peer.load, packed(name, urls[peer.form], args.directory), options)
        results = measure(loads, args.rounds, args.seconds)
    store = "s3" if args.s3 else "local"
    print(f"{args.tokens:,} tokens, {args.num_shards} logical shards on one rank, {store}")
    report(results, versions, store)


if __name__ == "__main__":
    main()
