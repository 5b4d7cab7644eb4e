"""The loader that the benchmarks run, which reads, mixes, packs, shuffles and collates on one rank; and its rate."""

import functools
import time
from collections.abc import Iterator, Mapping

import corpus
import numpy as np

from ibm_nodes import Batcher, CausalLMCollator, Loader, Mixer, Packer, Prefetcher, Reader, Sharder, Shuffler, Tokenizer

SEQ_LEN, BATCH_SIZE = 4096, 8
PREFETCH_FACTOR = 4
Options = dict[str, object] | None


def graph(
    shard: int,
    num_shards: int,
    *,
    urls: dict[str, str],
    strategy: str,
    storage_options: Options,
    weights: Mapping[str, float] = corpus.WEIGHTS,
    tokenizer: str | None = None,
) -> Shuffler:
    """Builds the graph of one logical shard."""
    shared = {"shard": shard, "num_shards": num_shards, "seed": 0, "storage_options": storage_options}
    columns = None if tokenizer is None else ["text"]
    sources = {name: Reader(url, name=name, columns=columns, **shared) for name, url in urls.items()}
    if tokenizer is not None:
        sources = {name: Tokenizer(source, tokenizer) for name, source in sources.items()}
    node = Mixer(sources, weights={name: weights[name] for name in urls}, seed=(0, shard))
    node = Packer(node, seq_len=SEQ_LEN, eos_id=corpus.EOS_ID, strategy=strategy)
    return Shuffler(node, buffer_size=16, seed=(0, shard))


def sharder(
    urls: dict[str, str], num_shards: int, strategy: str = "concat", storage_options: Options = None, **more: object
) -> Sharder:
    """Gives a rank that owns all logical shards."""
    made = functools.partial(graph, urls=urls, strategy=strategy, storage_options=storage_options, **more)
    return Sharder(made, num_shards=num_shards, rank=0, world_size=1)


def batcher(
    urls: dict[str, str], num_shards: int, strategy: str = "concat", storage_options: Options = None, **more: object
) -> Batcher:
    """Gives batches of int64 tensors."""
    collate = CausalLMCollator(shift_labels=False, seq_len=SEQ_LEN)
    return Batcher(sharder(urls, num_shards, strategy, storage_options, **more), batch_size=BATCH_SIZE, collate=collate)


def rate(batches: Iterator[object], seconds: float, num_first: int = 8) -> float:
    """Gives million tokens a second over ``seconds``, after the first batches."""
    return count_rate((BATCH_SIZE * SEQ_LEN for _ in batches), seconds, num_first)


def count_rate(counts: Iterator[int], seconds: float, num_first: int = 8) -> float:
    """Gives the same of what yields numbers of tokens."""
    for _ in range(num_first):
        next(counts)
    began, total = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        total += next(counts)
    return total / passed / 1e6


def rate_of_loader(
    urls: dict[str, str], num_shards: int, seconds: float, *, prefetch: bool = False, num_first: int = 8, **more: object
) -> float:
    """Gives million tokens a second of a new loader, after ``num_first`` batches and full shuffle buffers."""
    node = batcher(urls, num_shards, **more)
    with Loader(Prefetcher(node, prefetch_factor=PREFETCH_FACTOR) if prefetch else node) as loader:
        return rate(iter(loader), seconds, max(num_first, -(-num_shards // BATCH_SIZE)))


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
