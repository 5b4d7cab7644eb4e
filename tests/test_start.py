"""What ranks ask of a store when they start: how much, and when."""

import contextlib
import itertools
import threading
import time
from collections import Counter
from functools import partial

import corpora
import pytest
from fault_proxy import FaultProxy

from ibm_nodes import Loader, Mixer, Prefetcher, Reader, Sharder, sharder, storage
from ibm_nodes.listing import list_objects
from ibm_nodes.sharder import first_read_seconds

NUM_FILES, NUM_SHARDS, WORLD_SIZE = 12, 8, 4
FOOTER_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def not_held(monkeypatch):
    """A process that has not read yet."""
    monkeypatch.setattr(storage, "_turn", None)


@pytest.mark.parametrize("world_size", [1, 2, 16, 401, 1600, 4096])
def test_the_first_reads_of_ranks_are_evenly_spread_over_less_than_two_seconds(world_size):
    waits = [first_read_seconds(rank, world_size) for rank in range(world_size)]
    assert waits == [first_read_seconds(rank, world_size) for rank in range(world_size)]
    apart = min(0.005, 2 / world_size)
    assert sorted(waits) == pytest.approx([apart * turn for turn in range(world_size)])
    assert max(waits) < 2
    if world_size > 16:  # the ranks of a machine, which start together best of all, come at different times
        on_a_host = [waits[first : first + 8] for first in range(0, world_size - 8, 8)]
        assert sum(max(host) - min(host) for host in on_a_host) / len(on_a_host) > 0.5 * max(waits)


def graph(shard, num_shards, *, urls, storage_options=None):
    shared = {"shard": shard, "num_shards": num_shards, "storage_options": storage_options}
    return Mixer({name: Reader(url, name=name, **shared) for name, url in urls.items()}, weights=dict.fromkeys(urls, 1))


@pytest.fixture
def urls(bucket):
    """A dataset of many small files, and one of a large file."""
    rows = corpora.documents([9_000] * 8 * NUM_FILES)
    files = {"web": corpora.every(rows, 8), "code": [rows]}
    return {
        name: corpora.write(
            f"{bucket.url}{name}/", [corpora.every(part, 8) for part in parts], form, bucket.storage_options
        )
        for (name, parts), form in zip(files.items(), ("arrow", "parquet"), strict=True)
    }


def owned_files(listing, shards):
    """The files in which intervals of some logical shards lie."""
    edges = [shard * listing.starts[-1] // NUM_SHARDS for shard in range(NUM_SHARDS + 1)]
    begins_and_ends = zip(listing.objects, listing.starts, listing.starts[1:], strict=False)
    return {
        item.url
        for item, begin, end in begins_and_ends
        if any(edges[shard] < end and begin < edges[shard + 1] for shard in shards)
    }


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_a_start_lists_each_prefix_once_and_reads_each_footer_of_its_own_files_once(s3, bucket, urls, rank):
    """HEAD is never asked, and each logical shard asks for a block of each dataset, and for one or two ahead."""
    listings = [list_objects(url, bucket.storage_options) for url in urls.values()]
    sizes = {item.url: item.size for listing in listings for item in listing.objects}
    shards = range(rank, NUM_SHARDS, WORLD_SIZE)
    with FaultProxy(s3.endpoint) as proxy:
        options = {**bucket.storage_options, "endpoint_url": proxy.endpoint}
        made = partial(graph, urls=urls, storage_options=options)
        with Loader(Sharder(made, num_shards=NUM_SHARDS, rank=rank, world_size=WORLD_SIZE)) as loader:
            assert len(list(itertools.islice(loader, len(shards)))) == len(shards)
        requests = list(proxy.requests)
    assert {request.method for request in requests} == {"GET"}
    assert sum(request.is_listing() for request in requests) == len(urls)
    reads = [("s3:/" + request.path.partition("?")[0], request.range) for request in requests if request.is_read()]
    assert len(reads) == len(requests) - len(urls)
    footers = Counter(url for url, place in reads if place == (max(0, sizes[url] - FOOTER_BYTES), sizes[url]))
    assert set(footers.values()) == {1}
    assert set(footers) <= {url for listing in listings for url in owned_files(listing, shards)}
    num_blocks = len(reads) - footers.total()
    assert len(urls) <= num_blocks <= 3 * len(shards) * len(urls)
    assert {url for url, _ in reads} == set(footers)


def test_the_first_reads_of_a_rank_over_the_network_wait_for_its_turn(s3, bucket, urls, monkeypatch):
    """Neither the constructor waits nor what comes later, and closing ends the wait."""
    monkeypatch.setattr(sharder, "APART_SECONDS", 0.4)
    seconds = first_read_seconds(1, 4)
    assert seconds in (0.4, 0.8, 1.2)
    made = partial(graph, urls=urls, storage_options=bucket.storage_options)
    began = time.monotonic()
    node = Sharder(made, num_shards=NUM_SHARDS, rank=1, world_size=4)
    node.reset()
    with Loader(Prefetcher(node, prefetch_factor=2)) as loader:
        assert time.monotonic() - began < 0.2
        batches = iter(loader)
        began = time.monotonic()
        next(batches)
        assert seconds <= time.monotonic() - began < seconds + 1
    began = time.monotonic()
    next(Sharder(made, num_shards=NUM_SHARDS, rank=3, world_size=4))
    assert time.monotonic() - began < 0.4

    monkeypatch.setattr(storage, "_turn", None)
    monkeypatch.setattr(sharder, "APART_SECONDS", 50)
    with Loader(Prefetcher(Sharder(made, num_shards=8, rank=1, world_size=4), prefetch_factor=2)) as loader:

        def wait(loader=loader):
            with contextlib.suppress(RuntimeError):
                next(iter(loader))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        time.sleep(0.2)
        began = time.monotonic()
        loader.close()
        assert time.monotonic() - began < 1
    thread.join(3)


def test_local_files_and_a_rank_alone_wait_for_nothing(tmp_path, bucket, monkeypatch):
    monkeypatch.setattr(sharder, "APART_SECONDS", 50)
    monkeypatch.setattr(sharder, "MAX_SPREAD_SECONDS", 200)
    for root, options, world_size in ((f"file://{tmp_path}/", None, 4), (bucket.url, bucket.storage_options, 1)):
        url = corpora.write(f"{root}web/", [[corpora.documents([3] * 8)]], "arrow", options)
        monkeypatch.setattr(storage, "_turn", None)
        made = partial(graph, urls={"web": url}, storage_options=options)
        began = time.monotonic()
        next(Sharder(made, num_shards=8, rank=world_size - 1, world_size=world_size))
        assert time.monotonic() - began < 2
