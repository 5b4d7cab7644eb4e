import concurrent.futures
import contextlib
import itertools
import random
import tracemalloc

import corpora
import numpy as np
import pyarrow as pa
import pytest

from ibm_nodes.formats import arrow
from ibm_nodes.formats.arrow import BLOCK_BYTES, ArrowFile
from ibm_nodes.formats.parquet import PART_BYTES, WINDOW_BYTES, ParquetFile
from ibm_nodes.listing import Listing, StoredObject, list_objects

MIB = 1 << 20
ORDINARY = pa.default_memory_pool()
WATCHED = pa.proxy_memory_pool(ORDINARY)  # lives as long as any buffer that came from it
OPENERS = {"arrow": ArrowFile, "parquet": ParquetFile}
both = pytest.mark.parametrize("form", OPENERS)


class Watched(Listing):
    """Notes the ranges that are read."""

    def read(self, item, start, end):
        self.ranges.append((start, end))
        return super().read(item, start, end)


def opened(path, data, form):
    """A file of some bytes, and the list of the ranges that are read of it."""
    path.write_bytes(data)
    listed = list_objects(f"file://{path}")
    listing = Watched(listed.url, listed.objects)
    listing.ranges = []
    return OPENERS[form](StoredObject(listing, listing.objects[0]), "tokens"), listing.ranges


def rows_of(lists):
    return [lists.values[begin:end].tolist() for begin, end in zip(lists.begins, lists.ends, strict=True)]


def rows_of_all(file):
    return [row for block in range(len(file.groups)) for row in rows_of(file.read(block))]


def large(num_rows, length, num_batches, kind="int32"):
    """Tables of long rows of ids that do not compress."""
    values = np.random.default_rng(0).integers(0, 1 << 30, num_rows * length).astype(kind)
    rows = pa.ListArray.from_arrays(np.arange(0, len(values) + 1, length, dtype=np.int32), values)
    table = pa.table({"tokens": rows})
    size = num_rows // num_batches
    return [table.slice(begin, size) for begin in range(0, num_rows, size)]


@both
def test_opens_with_one_request_and_reads_a_block_with_one(tmp_path, form):
    batches = large(64, 20_000, 8)
    file, ranges = opened(tmp_path / "x", corpora.FORMATS[form](batches), form)
    size = (tmp_path / "x").stat().st_size
    assert ranges == [(size - (64 << 10), size)]
    assert len(file.groups) >= 4
    for block in range(len(file.groups)):
        ranges.clear()
        file.read(block)
        ((start, end),) = ranges
        assert file.spans[block] <= start < end <= file.spans[block + 1]


@both
def test_a_small_file_is_opened_with_one_request(tmp_path, form):
    data = corpora.FORMATS[form](corpora.tables([corpora.documents([3, 0, 2])]))
    file, ranges = opened(tmp_path / "x", data, form)
    assert ranges == [(0, len(data))]
    assert rows_of_all(file) == corpora.documents([3, 0, 2])


@both
def test_a_footer_of_more_than_64_kib_takes_one_more_request(tmp_path, form):
    rows = corpora.documents([1] * 4000)
    data = corpora.FORMATS[form](corpora.tables(corpora.every(rows, 1)))
    file, ranges = opened(tmp_path / "x", data, form)
    assert ranges[0] == (len(data) - (64 << 10), len(data))
    assert len(ranges) == 2
    assert ranges[1][0] < ranges[0][0]
    assert rows_of_all(file) == rows


@both
def test_only_the_column_is_kept_and_in_parquet_only_it_is_read(tmp_path, form):
    tables = [
        table.append_column("text", pa.array(["x" * 40_000] * len(table))).select(["text", "tokens"])
        for table in corpora.tables(corpora.every(corpora.documents([9] * 200), 20))
    ]
    options = {"compression": "none", "use_dictionary": False} if form == "parquet" else {}
    file, ranges = opened(tmp_path / "x", corpora.FORMATS[form](tables, **options), form)
    ranges.clear()
    lists = [file.read(block) for block in range(len(file.groups))]
    assert [row for each in lists for row in rows_of(each)] == corpora.documents([9] * 200)
    if form == "parquet":
        assert sum(end - start for start, end in ranges) < 100_000
    else:
        assert all(each.values.flags.owndata for each in lists)


def test_an_arrow_block_is_as_many_batches_as_begin_within_its_bytes(tmp_path):
    file, _ = opened(tmp_path / "x", corpora.arrow(large(400, 5_000, 400)), "arrow")
    sizes = np.diff(file.spans)
    assert all(BLOCK_BYTES <= size <= BLOCK_BYTES + 25_000 for size in sizes[:-1])
    assert file.spans[0] == 0
    assert file.spans[-1] == (tmp_path / "x").stat().st_size
    assert file.groups.tolist() == list(range(len(sizes)))


def large_batches(tmp_path, **options):
    """An Arrow file of small batches around two of 24 MiB, opened, and all of its rows."""
    tables = [*large(40, 100, 2), *large(2400, 5_000, 2), *large(40, 100, 4)]
    file, ranges = opened(tmp_path / "x", corpora.arrow(tables, **options), "arrow")
    return file, ranges, [row for table in tables for row in table.column("tokens").to_pylist()]


def test_large_record_batches_are_read_in_parts_with_each_byte_read_once(tmp_path):
    file, ranges, rows = large_batches(tmp_path)
    size = (tmp_path / "x").stat().st_size
    assert len(ranges) == 2  # the footer, and the metadata of the first large batch
    assert len(file.groups) == 2 * 6 + 2
    assert all(size <= arrow.PART_BYTES for size in np.diff(file.spans)[1:-1])
    assert rows_of_all(file) == rows
    read = [end - start for start, end in ranges]
    assert sum(read) < 1.01 * size
    assert max(read) < 1.1 * arrow.PART_BYTES
    places = [row for block in range(len(file.groups)) for row in file.read(block).rows.tolist()]
    sizes = [20, 20, 1200, 1200, 10, 10, 10, 10]
    assert places == [number << 32 | row for number, count in enumerate(sizes) for row in range(count)]
    ranges.clear()
    for block in random.Random(0).choices(range(len(file.groups)), k=20):
        lists = file.read(block)
        first = [*itertools.accumulate(sizes, initial=0)][lists.rows[0] >> 32] + (int(lists.rows[0]) & 0xFFFFFFFF)
        assert rows_of(lists) == rows[first : first + len(lists.rows)]
    assert len(ranges) <= 2 * 20


def test_a_large_record_batch_that_is_compressed_is_one_block(tmp_path):
    file, ranges, rows = large_batches(tmp_path, compression="lz4")
    assert len(file.groups) == 3
    ranges.clear()
    assert rows_of_all(file) == rows
    assert sum(end - start for start, end in ranges) <= (tmp_path / "x").stat().st_size


def test_large_record_batches_of_which_only_the_first_is_simple_are_read(tmp_path):
    (simple,) = large(1200, 1_500, 1)
    odd = pa.table({"tokens": pa.array([None, *simple.column("tokens").to_pylist()[1:]], simple.schema[0].type)})
    file, _ = opened(tmp_path / "x", corpora.arrow([simple, odd]), "arrow")
    assert len(file.groups) == 4
    expected = simple.column("tokens").to_pylist()
    assert rows_of_all(file) == [*expected, [], *expected[1:]]


def test_a_damaged_offset_in_a_part_is_an_error(tmp_path):
    (table,) = large(1200, 1_500, 1)
    data = bytearray(corpora.arrow([table]))
    place = bytes(data).index(np.arange(0, 60_000, 1_500, dtype="<i4").tobytes())
    for spoiled in (-5, 1 << 30):
        data[place + 400 : place + 404] = np.int32(spoiled).tobytes()
        file, _ = opened(tmp_path / "x", bytes(data), "arrow")
        with pytest.raises(ValueError, match="damaged offsets"):
            rows_of_all(file)


def huge(tmp_path, **options):
    """A Parquet file of one row group of 64 MiB, opened."""
    (table,) = large(1600, 10_000, 1)
    data = corpora.parquet([table], use_dictionary=False, **options)
    return (*opened(tmp_path / "x", data, "parquet"), table.column("tokens").chunk(0).values.to_numpy())


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_huge_row_group_is_read_in_parts_with_little_memory_and_each_byte_about_once(tmp_path, compression):
    file, ranges, values = huge(tmp_path, compression=compression)
    assert 14 <= len(file.groups) <= 20
    assert set(file.groups.tolist()) == {0}
    ranges.clear()
    total = 0
    pa.set_memory_pool(WATCHED)
    before = WATCHED.bytes_allocated()
    tracemalloc.start()
    try:
        for block in range(len(file.groups)):
            lists = file.read(block)
            assert np.array_equal(
                lists.values[lists.begins[0] : lists.ends[-1]], values[total : total + len(lists.rows) * 10_000]
            )
            assert lists.rows.tolist() == list(range(total // 10_000, total // 10_000 + len(lists.rows)))
            total += len(lists.rows) * 10_000
            del lists
        peak = WATCHED.max_memory() - before + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(ORDINARY)
    assert total == len(values)
    assert peak < 6 * (PART_BYTES + WINDOW_BYTES)
    read = sum(end - start for start, end in ranges)
    assert read < 1.1 * (tmp_path / "x").stat().st_size
    assert len(ranges) < 30


def test_any_part_of_a_row_group_can_be_read_at_any_time(tmp_path):
    file, _, values = huge(tmp_path, compression="none")
    blocks = len(file.groups)
    whole = {}
    for block in [blocks - 1, 0, 5, 5, 6, 4, 1, blocks - 2]:
        lists = file.read(block)
        first = int(lists.rows[0])
        expected = values[first * 10_000 : (first + len(lists.rows)) * 10_000]
        assert np.array_equal(lists.values[lists.begins[0] : lists.ends[-1]], expected)
        assert whole.setdefault(block, first) == first


def test_parts_read_by_many_threads_at_once_are_right(tmp_path):
    file, _, values = huge(tmp_path, compression="none")

    def check(block):
        lists = file.read(block)
        first = int(lists.rows[0])
        expected = values[first * 10_000 : (first + len(lists.rows)) * 10_000]
        return np.array_equal(lists.values[lists.begins[0] : lists.ends[-1]], expected)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(check, [*range(6), 3, 2, 8, 0]))


def test_parts_of_a_group_are_neighbours_and_their_rows_complete(tmp_path):
    tables = [*large(300, 10_000, 1), *large(4, 10, 1), *large(200, 10_000, 1)]
    data = corpora.parquet(tables, compression="zstd")
    file, _ = opened(tmp_path / "x", data, "parquet")
    assert list(dict.fromkeys(file.groups.tolist())) == [0, 1, 2]
    assert np.all(np.diff(file.groups) >= 0)
    assert np.all(np.diff(file.spans) > 0)
    assert (file.spans[0], file.spans[-1]) == (0, len(data))
    rows = list(itertools.chain.from_iterable(file.read(block).rows.tolist() for block in range(len(file.groups))))
    assert rows == list(range(504))


@both
@pytest.mark.parametrize("cut", [1, 5, 8, 100])
def test_a_file_that_was_cut_off_is_an_error_that_names_it(tmp_path, form, cut):
    data = corpora.FORMATS[form](corpora.tables([corpora.documents([30] * 50)]))
    for damaged in (data[:-cut], data[:cut], data[: len(data) // 2]):
        with pytest.raises(ValueError, match=f"{tmp_path}/x"):
            opened(tmp_path / "x", damaged, form)


@both
def test_a_damaged_footer_is_an_error_that_names_the_file(tmp_path, form):
    data = bytearray(corpora.FORMATS[form](corpora.tables(corpora.every(corpora.documents([5] * 60), 3))))
    tail = 10 if form == "arrow" else 8
    begin = len(data) - tail
    for length in (0, -1, 1, 1 << 30, len(data), len(data) - tail):
        damaged = data.copy()
        damaged[begin : begin + 4] = length.to_bytes(4, "little", signed=True)
        with pytest.raises((ValueError, OSError), match=f"{tmp_path}/x"):
            opened(tmp_path / "x", bytes(damaged), form)


@both
def test_noise_in_a_footer_ends_in_an_error_at_worst(tmp_path, form):
    rows = corpora.documents([5] * 30)
    data = corpora.FORMATS[form](corpora.tables(corpora.every(rows, 3)))
    draw = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(data)
        damaged[len(data) - 1 - int(draw.integers(8, 500))] ^= 1 << int(draw.integers(8))
        with contextlib.suppress(ValueError, OSError, LookupError, TypeError, pa.ArrowException):
            rows_of_all(opened(tmp_path / "x", bytes(damaged), form)[0])
