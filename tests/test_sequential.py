"""Files that can only be read from their beginning on, and the format of the documentation's example."""

import concurrent.futures
import gzip
import pathlib
import random
import re
import tracemalloc
from collections import Counter
from functools import partial

import corpora
import layouts
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from fault_proxy import FaultProxy
from layouts import LAYOUTS

import ibm_nodes
from ibm_nodes import Reader, storage
from ibm_nodes.formats import arrow, jsonl, mds, megatron, opener, parquet, sequential
from ibm_nodes.listing import Listing, StoredObject, list_objects

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "formats.md"
CODECS = {
    ".jsonl.gz": partial(gzip.compress, compresslevel=1),
    ".jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
both = pytest.mark.parametrize("ending", CODECS)


class Watched(Listing):
    """Notes the ranges that are read."""

    def read(self, item, start, end):
        self.ranges.append((start, end))
        return super().read(item, start, end)


def opened(path, ending, data):
    storage.write(f"file://{path}/0{ending}", data)
    listed = list_objects(f"file://{path}/0{ending}")
    listing = Watched(listed.url, listed.objects)
    listing.ranges = []
    return opener(listed.objects[0].key, None)(StoredObject(listing, listing.objects[0]), "tokens"), listing.ranges


def rows_of(lists):
    return [lists.values[begin:end].tolist() for begin, end in zip(lists.begins, lists.ends, strict=True)]


def noise(num_rows, length=500):
    """Rows of ids that do not compress well."""
    return np.random.default_rng(0).integers(0, 1 << 20, (num_rows, length)).tolist()


@both
def test_block_after_block_reads_each_byte_once_and_any_block_can_be_read_at_any_time(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(sequential, "CHUNK_BYTES", 4096)
    rows = noise(300)
    file, ranges = opened(tmp_path, ending, CODECS[ending](layouts.json_lines([rows])))
    num_blocks = len(file.groups)
    assert num_blocks > 60
    assert not ranges  # opening reads nothing
    blocks = [rows_of(file.read(block)) for block in range(num_blocks)]
    assert [row for block in blocks for row in block] == rows
    size = (tmp_path / f"0{ending}").stat().st_size
    assert [start for start, _ in ranges] == list(range(0, size, 4 * 4096))
    assert sum(end - start for start, end in ranges) == size
    for block in random.Random(0).choices(range(num_blocks), k=20):
        assert rows_of(file.read(block)) == blocks[block]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        order = [3, 50, 4, 51, 0, 52, 5, 1, num_blocks - 1]
        assert list(pool.map(lambda block: rows_of(file.read(block)), order)) == [blocks[block] for block in order]


@both
def test_shards_that_go_on_side_by_side_do_not_read_the_file_again_for_each_block(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(sequential, "CHUNK_BYTES", 4096)
    file, ranges = opened(tmp_path, ending, CODECS[ending](layouts.json_lines([noise(300)])))
    for block in range(20, len(file.groups)):
        for behind in (0, 3, 7, 20):
            file.read(block - behind)
    assert sum(end - start for start, end in ranges) < 6 * file.spans[-1]


@both
def test_the_last_block_of_a_large_file_is_reached_with_little_memory(tmp_path, ending):
    data = CODECS[ending](layouts.json_lines([noise(6000)]))
    assert len(data) > 8 << 20
    file, _ = opened(tmp_path, ending, data)
    del data
    file.read(0)
    tracemalloc.start()
    try:
        file.read(len(file.groups) - 1)
        assert tracemalloc.get_traced_memory()[1] < 7 << 20
    finally:
        tracemalloc.stop()


@both
def test_the_rows_of_a_file_are_dealt_out_evenly(tmp_path, ending):
    url = f"file://{tmp_path}/"
    storage.write(f"{url}0{ending}", CODECS[ending](layouts.json_lines([corpora.documents([3] * 1000)])))
    counts = [sum(1 for _ in Reader(url, shard=shard, num_shards=7, epochs=1)) for shard in range(7)]
    assert sum(counts) == 1000
    assert max(counts) - min(counts) <= 1


def test_a_block_is_what_a_chunk_completes_whatever_decompresses_it(tmp_path, monkeypatch):
    """Where blocks end is part of the order of data; if this fails with another zlib or zstd, blocks depend on it."""
    monkeypatch.setattr(sequential, "CHUNK_BYTES", 1000)
    text = layouts.json_lines([corpora.documents([50] * 200)])
    files = {".jsonl.gz": gzip.compress(text, 6, mtime=0), ".jsonl.zst": zstandard.compress(text, 3)}
    for ending, data in files.items():
        file, _ = opened(tmp_path, ending, data)
        assert len(file.groups) >= 8
        counts = [len(file.read(block).rows) for block in range(len(file.groups))]
        # What a decompressor can know of the text from so many bytes.
        known = [prefix(ending, data[: int(end)]).count(b"\n") for end in file.spans[1:]]
        assert np.cumsum(counts).tolist() == known


def prefix(ending, data):
    """What another decompressor than ours gives for the beginning of a file, byte by byte."""
    codec = pa.CompressedInputStream(pa.BufferReader(data), "gzip" if ending == ".jsonl.gz" else "zstd")
    parts = []
    try:
        while part := codec.read(1):
            parts.append(part)
    except OSError:
        pass
    return b"".join(parts)


# What is fetched.

SCALE = 16
NUM_SHARDS = 2
FETCHED = {
    "Arrow": (arrow, "BLOCK_BYTES", 1300),
    "a batch a document": (arrow, "BLOCK_BYTES", 1300),
    "Parquet": (parquet, "BLOCK_BYTES", 2100),
    "JSON lines": (jsonl, "BLOCK_BYTES", 1700),
    "Megatron, 32 bits": (megatron, "BLOCK_BYTES", 1300),
    "MDS, arrays": (mds, "BLOCK_BYTES", 1300),
}


@pytest.mark.parametrize("name", [*FETCHED, "JSON lines, zstd", "Arrow stream", "tar of npy"])
def test_a_pass_over_s3_fetches_at_most_a_tenth_more_than_the_files_hold(s3, bucket, monkeypatch, name):
    """With 16 blocks a logical shard, of a sixteenth of their size; files that cannot be split have one shard."""
    num_shards, num_rows = 1, 400
    if name in FETCHED:
        module, setting, num_rows = FETCHED[name]
        num_shards = NUM_SHARDS
        monkeypatch.setattr(module, setting, getattr(module, setting) // SCALE)
        monkeypatch.setattr(jsonl, "LOOK_AHEAD_BYTES", jsonl.LOOK_AHEAD_BYTES // SCALE)
    lengths = np.random.default_rng(0).lognormal(6.5, 0.5, num_rows).astype(int)
    rows = [np.random.default_rng(1).integers(0, 1 << 20, length).tolist() for length in lengths]
    url = f"{bucket.url}data/"
    layouts.write(url, [corpora.every(rows, 20)], LAYOUTS[name], bucket.storage_options)
    options = {**bucket.storage_options, "endpoint_url": None}
    with FaultProxy(s3.endpoint) as proxy:
        options["endpoint_url"] = proxy.endpoint
        held = list_objects(url, options).starts[-1]
        if name in FETCHED:
            assert held >= 16 * num_shards * getattr(module, setting)
        found = Counter()
        for shard in range(num_shards):
            reader = Reader(url, shard=shard, num_shards=num_shards, epochs=1, storage_options=options)
            found.update(len(document.tokens) for document in reader)
        assert found == Counter(lengths.tolist())
        fetched = sum(request.range[1] - request.range[0] for request in proxy.reads)
    assert fetched <= 1.1 * held


def test_small_batches_are_decoded_many_at_a_time(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.0, 1.0, 10_000).astype(int) + 1
    ids = rng.integers(0, 50_000, lengths.sum()).astype(np.uint32)
    path = tmp_path / "0.arrow"
    schema = pa.schema({"tokens": pa.uint32()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for part in np.split(ids, np.cumsum(lengths)[:-1]):
            writer.write_batch(pa.record_batch([pa.array(part)], schema))

    data = path.read_bytes()
    file, ranges = opened(tmp_path, ".arrow", data)
    found = [file.read(block).values for block in range(len(file.groups))]
    assert np.array_equal(np.concatenate(found), ids)
    assert len(ranges) <= len(file.groups) + 3 < 100


# The documentation's example.


def example():
    (code,) = re.findall(r"```python\n([^`]*class TokenFile.*?)```", DOCS.read_text(), re.S)
    names = {}
    exec(compile(code.split("\n\n\nreader = ")[0], str(DOCS), "exec"), names)
    return names["TokenFile"], code


def test_the_documentations_format_gives_every_document_once(tmp_path, monkeypatch):
    token_file, code = example()
    assert len([line for line in code.split("class ")[1].splitlines() if line.strip()]) < 45
    assert "format=TokenFile" in code
    assert {"Lists", "ShardFile", "StoredObject"} <= set(ibm_nodes.__all__)
    rows = [[token % 50_000 for token in row] for row in corpora.documents([5, 0, 3000, 1, 40, 700, 2] * 20)]
    url = f"file://{tmp_path}/"
    expected = {}
    for number, part in enumerate(corpora.every(rows, 50)):
        ids = np.array([token for row in part for token in (50256, *row)], "<u2")
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(ids)
        storage.write(f"{url}{number}.bin", header.tobytes() + ids.tobytes())
        at = 0
        for row in part:
            expected[f"{url}{number}.bin", at] = row
            at += 1 + len(row)
    for size in (1 << 20, 2048):
        monkeypatch.setattr(token_file, "BLOCK_BYTES", size)
        for num_shards in (1, 5):
            found = {}
            for shard in range(num_shards):
                reader = Reader(url, shard=shard, num_shards=num_shards, epochs=1, format=token_file)
                for document in reader:
                    assert (document.url, document.row) not in found
                    found[document.url, document.row] = document.tokens.tolist()
            assert found == {place: row for place, row in expected.items() if row}
    storage.write(f"{url}0.bin", header.tobytes()[:-3])
    with pytest.raises(ValueError, match=r"0.bin is not a token file of llm.c"):
        list(Reader(url, shard=0, num_shards=1, epochs=1, format=token_file))
