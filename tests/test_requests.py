"""What reading asks of a store: ranges of 1 to 16 MiB, from one pool and within one budget for the whole process."""

import threading
from functools import partial

import corpora
import layouts
import numpy as np
import pyarrow as pa
import pytest
from fault_proxy import FaultProxy

from ibm_nodes import Loader, Mixer, Reader, Sharder, read_ahead, storage
from ibm_nodes.listing import list_objects

MIB = 1 << 20
FOOTER_BYTES = 128 << 10


def tables(num_values, num_rows_each, vocab_size=50_000):
    values = np.random.default_rng(0).integers(0, vocab_size, num_values // 500 * 500, np.int32)
    rows = pa.ListArray.from_arrays(np.arange(0, len(values) + 1, 500, np.int32), values)
    table = pa.table({"tokens": rows})
    return [table.slice(begin, num_rows_each) for begin in range(0, len(table), num_rows_each)]


def rows(num_values):
    return [row for table in tables(num_values, 1000) for row in table.column("tokens").to_pylist()]


LAYOUTS = {
    "Arrow": (".arrow", lambda: corpora.arrow(tables(2_000_000, 40))),
    "Arrow, large batches": (".arrow", lambda: corpora.arrow(tables(6_000_000, 6_000))),
    "a batch a document": (".arrow", lambda: layouts.ibm([rows(2_000_000)])),
    "Parquet": (".parquet", lambda: corpora.parquet(tables(2_000_000, 100), compression="none")),
    "Parquet, zstd": (".parquet", lambda: corpora.parquet(tables(4_000_000, 50, 120_000), compression="zstd")),
    "Parquet, one row group": (".parquet", lambda: corpora.parquet(tables(4_000_000, 8_000), compression="zstd")),
    "JSON lines": (".jsonl", lambda: layouts.json_lines([rows(1_000_000)])),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_data_are_asked_for_in_few_large_ranges(s3, bucket, name):
    """Of 1 to 16 MiB, but for what is left over at the end of a file, and what says where the rest is."""
    ending, make = LAYOUTS[name]
    storage.write(f"{bucket.url}data/0{ending}", make(), bucket.storage_options)
    with FaultProxy(s3.endpoint) as proxy:
        options = {**bucket.storage_options, "endpoint_url": proxy.endpoint}
        (item,) = list_objects(f"{bucket.url}data/", options).objects
        num_tokens = sum(
            len(document.tokens)
            for document in Reader(f"{bucket.url}data/", shard=0, num_shards=1, epochs=1, storage_options=options)
        )
        ranges = [request.range for request in proxy.reads]
    assert num_tokens >= 1_000_000
    sizes = sorted(end - start for start, end in ranges if end - start > FOOTER_BYTES)
    assert sum(end - start for start, end in ranges) <= 1.1 * item.size
    assert sum(sizes) >= 0.9 * item.size
    assert len(sizes) <= item.size / MIB + 1
    assert all(0.95 * MIB <= size <= 16 * MIB for size in sizes[1:]), sizes


def graph(shard, num_shards, *, url):
    readers = {name: Reader(url, name=name, shard=shard, num_shards=num_shards) for name in ("one", "two")}
    return Mixer(readers, weights={"one": 1, "two": 1})


def test_all_datasets_and_logical_shards_share_one_pool_and_one_budget(tmp_path, monkeypatch):
    """What is read ahead never passes the budget; a read that a consumer waits for is never refused."""
    url = corpora.write(f"file://{tmp_path}/", [[corpora.documents([600] * 400)] for _ in range(8)], "arrow")
    refused, used = [], []
    pool = read_ahead._Pool()
    submit = pool.submit

    def watched(function, size):
        task = submit(function, size)
        (used if task else refused).append(pool._used)
        return task

    monkeypatch.setattr(read_ahead, "BUDGET_BYTES", 3 * MIB)
    monkeypatch.setattr(read_ahead, "_pool", pool)
    monkeypatch.setattr(pool, "submit", watched)
    expected = {tuple(row) for row in corpora.documents([600] * 400)}
    with Loader(Sharder(partial(graph, url=url), num_shards=32, rank=0, world_size=1)) as loader:
        documents = iter(loader)
        found = {tuple(next(documents).tokens.tolist()) for _ in range(4000)}
        assert (
            len([thread for thread in threading.enumerate() if thread.name.startswith("ibm_nodes-read")])
            <= read_ahead.MAX_THREADS
        )
    pool.close()
    assert found <= expected
    assert len(found) > 0.9 * len(expected)
    assert refused
    assert max(used) <= 3 * MIB
