"""Memory and descriptors: what one process holds, measured in a process of its own."""

import json
import os
import pathlib

import children
import corpora
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(), reason="samples memory and descriptors from /proc"
)
MIB = 1 << 20
ROW_LENGTH = 700

MEASURE = """
import ctypes, gc, itertools, json, os, pathlib, re, resource, sys
import pyarrow.parquet
from ibm_nodes import Loader, Packer, Prefetcher, Reader, Sharder
from ibm_nodes.recipes.pretrain import pretrain

def memory(what="VmRSS"):
    return int(re.search(what + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) << 10

def kept():
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return memory()

def forget_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")

arguments = json.loads(sys.argv[1])
"""


def measure(code, *arguments, timeout=250):
    """Runs a program; gives what it prints last, as JSON."""
    process = children.start_code(MEASURE + code, *arguments)
    try:
        out, error = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, error
    return json.loads(out.splitlines()[-1])


def noise(size, vocab_size=128_000):
    """A table of rows of 700 ids, of about so many bytes."""
    num_rows = size // 4 // ROW_LENGTH
    values = np.random.default_rng(0).integers(0, vocab_size, num_rows * ROW_LENGTH, np.int32)
    offsets = np.arange(0, len(values) + 1, ROW_LENGTH, np.int32)
    return pa.table({"tokens": pa.ListArray.from_arrays(offsets, values)})


READ_ALL = """
(url,) = arguments
before = memory()
forget_peak()
num_tokens = sum(len(document.tokens) for document in Reader(url, shard=0, num_shards=1, epochs=1))
print(json.dumps([num_tokens, memory("VmHWM") - before]))
"""
PARQUET = {
    "none": {"compression": "none", "use_dictionary": False},
    "snappy": {"compression": "snappy", "use_dictionary": False},
    "zstd": {"compression": "zstd", "use_dictionary": False},
    "dictionary": {"compression": "zstd"},
}


def check_row_group(path, table, options, limit):
    pq.write_table(table, path / "0.parquet", row_group_size=len(table), **options)
    assert pq.read_metadata(path / "0.parquet").num_row_groups == 1
    num_tokens, peak = measure(READ_ALL, f"file://{path}/")
    assert num_tokens == len(table) * ROW_LENGTH
    assert peak < limit


def test_a_huge_row_group_takes_a_small_part_of_its_size(tmp_path):
    check_row_group(tmp_path, noise(256 * MIB), PARQUET["zstd"], 160 * MIB)


@pytest.mark.slow
@pytest.mark.parametrize("codec", PARQUET)
def test_a_row_group_of_1_gib_takes_a_fifth_of_it(tmp_path, codec):
    check_row_group(tmp_path, noise(1024 * MIB), PARQUET[codec], 205 * MIB)


def test_a_row_group_that_is_small_on_disk_for_its_repeats_is_read_in_parts_too(tmp_path):
    table = noise(256 * MIB, vocab_size=1)
    check_row_group(tmp_path, table, PARQUET["dictionary"], 160 * MIB)
    assert (tmp_path / "0.parquet").stat().st_size < MIB


def check_record_batch(path, table, limit):
    with pa.ipc.new_file(str(path / "0.arrow"), table.schema) as writer:
        writer.write_table(table)
    num_tokens, peak = measure(READ_ALL, f"file://{path}/")
    assert num_tokens == len(table) * ROW_LENGTH
    assert peak < limit


def test_a_huge_record_batch_takes_a_small_part_of_its_size(tmp_path):
    check_record_batch(tmp_path, noise(256 * MIB), 120 * MIB)


@pytest.mark.slow
def test_a_record_batch_of_1_gib_takes_an_eighth_of_it(tmp_path):
    check_record_batch(tmp_path, noise(1024 * MIB), 128 * MIB)


CYCLES = """
url, num_cycles, kind = arguments
samples = []
for number in range(num_cycles + 1):
    reader = Reader(url, shard=number % 4, num_shards=4)
    if kind == "reader":
        next(reader)
        reader.close()
    else:
        graph = lambda shard, num_shards: Packer(Reader(url, shard=shard, num_shards=num_shards), seq_len=99, eos_id=0)
        with Loader(Prefetcher(Sharder(graph, num_shards=4, rank=0, world_size=1), prefetch_factor=2)) as loader:
            next(iter(loader))
    if number % (num_cycles // 10) == 0:
        samples.append((kept(), len(os.listdir("/proc/self/fd"))))
print(json.dumps(samples))
"""


def check_cycles(url, num_cycles, kind):
    """The first tenth fills what libraries keep for each thread."""
    memory, descriptors = zip(*measure(CYCLES, url, num_cycles, kind)[1:], strict=True)
    assert max(memory) - memory[0] < 20 * MIB, memory
    assert max(descriptors) == descriptors[0], descriptors


@pytest.mark.parametrize("form", corpora.FORMATS)
def test_opening_reading_and_closing_2000_times_leaves_no_memory_and_no_descriptor(tmp_path, form):
    url = corpora.write(f"file://{tmp_path}/", [[corpora.documents([300] * 50)]] * 4, form)
    check_cycles(url, 2000, "reader")


@pytest.mark.slow
@pytest.mark.parametrize("form", corpora.FORMATS)
def test_2000_loaders_leave_no_memory_and_no_descriptor(tmp_path, form):
    url = corpora.write(f"file://{tmp_path}/", [[corpora.documents([300] * 50)]] * 4, form)
    check_cycles(url, 2000, "loader")


PASSES = """
url, num_passes = arguments
reader = iter(Reader(url, shard=0, num_shards=1, epochs=num_passes))
samples = []
for document in reader:
    while len(samples) < document.epoch:
        samples.append(kept())
print(json.dumps(samples))
"""


def test_pass_after_pass_takes_no_more_memory(tmp_path):
    for number in range(20):
        pq.write_table(noise(MIB), tmp_path / f"{number:02}.parquet", row_group_size=100)
    samples = measure(PASSES, f"file://{tmp_path}/", 12)
    assert len(samples) == 11
    assert samples[-1] < 1.1 * samples[2]


FEW_HANDLES = """
(url,) = arguments
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
reader = Reader(url, shard=0, num_shards=1, epochs=1)
before = [next(reader).row for _ in range(1500)]
resumed = Reader(url, shard=0, num_shards=1, epochs=1)
resumed.reset(reader.state_dict())
print(json.dumps(len(before) + len(list(resumed))))
"""


def test_3000_files_are_read_with_256_handles(tmp_path):
    data = corpora.arrow(corpora.tables([corpora.documents([3])]))
    for number in range(3000):
        (tmp_path / f"{number:04}.arrow").write_bytes(data)
    assert measure(FEW_HANDLES, f"file://{tmp_path}/") == 3000


START = """
(folder,) = arguments
urls = {path.name: f"file://{path}/" for path in pathlib.Path(folder).iterdir()}
loader = pretrain(
    urls, weights=dict.fromkeys(urls, 1), seq_len=2048, eos_id=2, global_batch_size=64, num_shards=64,
    rank=0, world_size=1,
)
batches = list(itertools.islice(loader, 3))

def started(state):
    # The readers whose documents the mixers of a state have drawn.
    if isinstance(state, dict) and "credits" in state:
        return sum(count > 0 for count in state["documents"].values())
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(map(started, parts))

readers = started(loader.state_dict())
loader.close()
print(json.dumps([len(batches), readers, memory("VmHWM")]))
"""


@pytest.mark.parametrize("form", corpora.FORMATS)
def test_a_rank_with_20_datasets_and_64_logical_shards_starts_below_3_gb(tmp_path, form):
    """Every one of the 1280 readers holds a block; the 20 datasets are links to the same files."""
    table = noise(40 * MIB)
    folders = [tmp_path / f"{number:02}" for number in range(20)]
    for folder in folders:
        folder.mkdir()
    for number in range(3):
        path = folders[0] / f"{number}.{form}"
        if form == "parquet":
            pq.write_table(table, path, row_group_size=200, compression="zstd", use_dictionary=False)
        else:
            with pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=200)
        for folder in folders[1:]:
            os.link(path, folder / path.name)
    num_batches, num_readers, peak = measure(START, str(tmp_path))
    assert (num_batches, num_readers) == (3, 1280)
    assert peak < 3_000_000_000
