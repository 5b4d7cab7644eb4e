"""Every row has exactly one owner, is read right whatever its layout, and is found where its place says.

What is right is what pyarrow alone reads from the same files.
"""

import io
import itertools
import random
import struct
import subprocess
import sys
from collections import Counter

import corpora
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sources import stored

from ibm_nodes import Packer, Reader, storage
from ibm_nodes.formats import arrow, parquet
from ibm_nodes.read_ahead import counters

FORMATS = ("arrow", "parquet")


@pytest.fixture(params=FORMATS)
def form(request):
    return request.param


@pytest.fixture(params=["default", "tiny"])
def block_sizes(request, monkeypatch):
    """Blocks as they are, and so small that a file of a few rows has many: each batch, each few rows of a row group."""
    if request.param == "tiny":
        monkeypatch.setattr(arrow, "BLOCK_BYTES", 1)
        monkeypatch.setattr(parquet, "PART_BYTES", 64)
    return request.param


def place_of(document):
    return document.url, document.row


def read_all(url, num_shards, **more):
    """The documents of all logical shards, by shard."""
    return [list(Reader(url, shard=shard, num_shards=num_shards, **more)) for shard in range(num_shards)]


def count_skipped(url, num_shards):
    """How many empty rows all logical shards pass over in one pass, as their states count them."""
    skipped = 0
    for shard in range(num_shards):
        reader = Reader(url, shard=shard, num_shards=num_shards, epochs=1)
        for _ in reader:
            pass
        skipped += reader.state_dict()["skipped"]
    return skipped


def check_once(url, num_shards, rows, **more):
    """All logical shards together give every document that has tokens once, with its tokens, object and row."""
    found = [document for shard in read_all(url, num_shards, epochs=1, **more) for document in shard]
    expected = {place: tokens for place, tokens in rows.items() if tokens}
    assert Counter(map(place_of, found)) == Counter(expected.keys())
    for document in found:
        assert document.tokens.tolist() == expected[place_of(document)]


@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_every_row_has_one_owner_in_files_of_few_rows(tmp_path, form, block_sizes, num_rows):
    for number, num_files in enumerate((1, 2, 3, 5)):
        rows = corpora.documents([4 * (row % 3) + 1 for row in range(num_rows * num_files)])
        files = [corpora.every(part, 2) for part in corpora.every(rows, num_rows)]
        url = corpora.write(f"file://{tmp_path}/{number}/", files, form)
        for num_shards in (1, 2, 3, 4, 7, 24):
            check_once(url, num_shards, corpora.read(url))


def test_every_row_has_one_owner_in_files_of_a_thousand_rows(tmp_path, form, block_sizes):
    rng = random.Random(0)
    rows = corpora.documents([rng.choice([0, 1, 5, 40]) for _ in range(3000)])
    files = [corpora.every(part, 64) for part in corpora.every(rows, 1000)]
    url = corpora.write(f"file://{tmp_path}/", files, form)
    expected = corpora.read(url)
    for num_shards in (1, 5, 240):
        check_once(url, num_shards, expected)
    assert count_skipped(url, 5) == sum(not tokens for tokens in expected.values())


def test_every_row_has_one_owner_over_s3(bucket, form):
    rng = random.Random(0)
    rows = corpora.documents([rng.choice([0, 1, 5, 40]) for _ in range(500)])
    files = [corpora.every(part, 30) for part in corpora.cut(rows, [3, 400])]
    url = corpora.write(f"{bucket.url}data/", files, form, bucket.storage_options)
    expected = corpora.read(url, bucket.storage_options)
    for num_shards in (1, 7):
        check_once(url, num_shards, expected, storage_options=bucket.storage_options)


def test_every_row_has_one_owner_in_every_small_layout(tmp_path, form, block_sizes):
    """All files of up to three batches of 0, 1 or 3 rows, each cut among one to six logical shards."""
    layouts = [sizes for length in range(4) for sizes in itertools.product((0, 1, 3), repeat=length) if any(sizes)]
    for number, sizes in enumerate(layouts):
        rows = corpora.documents([(5 * row + number) % 7 for row in range(sum(sizes))])
        url = corpora.write(f"file://{tmp_path}/{number}/", [corpora.cut(rows, sizes)], form)
        for num_shards in (1, 2, 3, 6):
            check_once(url, num_shards, corpora.read(url))


def test_every_row_has_one_owner_among_empty_files_and_files_of_very_unequal_size(tmp_path, form, block_sizes):
    """Files without a batch, with one empty batch, with empty ones among full ones, of one row and of a giant row."""
    lengths = [3, 0, 1, *range(20), 5000, 2, 0, *[7] * 300, 1, 20_000]
    rows = corpora.documents(lengths, stride=20_000)
    sizes = [[], [0], [1], [0, 1], [0, 0], [1, 0, 0, 5, 0], [15], [1], [3, 0], [150, 150], [], [1, 1]]
    files, left = [], rows
    for file in sizes:
        files.append(corpora.cut(left[: sum(file)], file))
        left = left[sum(file) :]
    assert not left
    url = corpora.write(f"file://{tmp_path}/", files, form)
    for num_shards in (1, 2, 3, 5, 12, 48, 240):
        check_once(url, num_shards, corpora.read(url))


def test_empty_files_alone_are_no_data(tmp_path, form):
    url = corpora.write(f"file://{tmp_path}/empty/", [[], [[]], [[[]], [[], []]]], form)
    for shard in range(3):
        with pytest.raises(ValueError, match=r"dataset 'empty' at file://.* has no token") as error:
            next(Reader(url, shard=shard, num_shards=3))
        assert url in str(error.value)
        assert list(Reader(url, shard=shard, num_shards=3, epochs=1)) == []


def test_every_row_has_one_owner_with_a_giant_row_among_small_ones(tmp_path, form, block_sizes):
    for number, position in enumerate((0, 6, 12)):
        lengths = [2] * 13
        lengths[position] = 200_000
        rows = corpora.documents(lengths, stride=200_000)
        url = corpora.write(f"file://{tmp_path}/{number}/", [corpora.every(rows, 4)], form)
        for num_shards in (1, 2, 5, 24):
            check_once(url, num_shards, corpora.read(url))


@pytest.mark.parametrize("part_bytes", [500, 4000, 40_000])
def test_a_huge_row_group_is_read_in_parts_with_every_row_owned_once(tmp_path, monkeypatch, part_bytes):
    monkeypatch.setattr(parquet, "PART_BYTES", part_bytes)
    rng = random.Random(0)
    rows = corpora.documents([rng.choice([0, 1, 3, 20]) for _ in range(3000)])
    url = corpora.write(f"file://{tmp_path}/", [[rows[:2500], rows[2500:]]], "parquet")
    for num_shards in (1, 2, 7):
        check_once(url, num_shards, corpora.read(url))


def test_a_huge_row_group_is_not_read_again_for_each_of_its_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "PART_BYTES", 10_000)
    monkeypatch.setattr(parquet, "WINDOW_BYTES", 4096)
    rows = corpora.documents([100] * 5000)
    url = corpora.write(f"file://{tmp_path}/", [[rows]], "parquet")
    size = (tmp_path / "000.parquet").stat().st_size
    assert size > 100 * 10_000
    for _ in range(3):
        before = counters.bytes
        assert sum(1 for _ in Reader(url, shard=0, num_shards=1, epochs=1)) == len(rows)
        assert counters.bytes - before < 2 * size


def small_corpus(tmp_path, form):
    """Three files, with empty documents and batches among them."""
    rng = random.Random(1)
    rows = corpora.documents([rng.choice([0, 1, 2, 9]) for _ in range(37)])
    files = [corpora.cut(part, (0, 1, 5, 2)) for part in corpora.cut(rows, (1, 20))]
    return corpora.write(f"file://{tmp_path}/corpus/", files, form)


def test_two_epochs_give_every_document_twice_and_in_another_order(tmp_path, form, block_sizes):
    url = small_corpus(tmp_path, form)
    expected = Counter(place for place, tokens in corpora.read(url).items() if tokens)
    for num_shards in (1, 2, 3):
        passes = [Counter(), Counter()]
        for documents in read_all(url, num_shards, epochs=2):
            orders = [[place_of(document) for document in documents if document.epoch == epoch] for epoch in (0, 1)]
            assert [document.epoch for document in documents] == [0] * len(orders[0]) + [1] * len(orders[1])
            assert sorted(orders[0]) == sorted(orders[1])
            assert len(orders[0]) < 5 or orders[0] != orders[1]
            for epoch in (0, 1):
                passes[epoch].update(orders[epoch])
        assert passes == [expected, expected]


def test_no_file_and_no_batch_is_read_in_the_same_place_in_every_epoch(tmp_path, form, block_sizes):
    rows = corpora.documents([3] * 120)
    url = corpora.write(f"file://{tmp_path}/", [corpora.every(part, 10) for part in corpora.every(rows, 30)], form)
    documents = list(Reader(url, shard=0, num_shards=1, epochs=6))
    orders = [[place_of(document) for document in documents if document.epoch == epoch] for epoch in range(6)]
    assert len(set(map(tuple, orders))) == 6
    assert len({order[0][0] for order in orders}) > 1
    for order in orders:
        assert order != sorted(order)


@pytest.mark.parametrize("epochs", [2, None])
def test_resuming_at_every_document_equals_the_uninterrupted_reading(tmp_path, form, block_sizes, epochs):
    url = small_corpus(tmp_path, form)
    for num_shards, shard in ((1, 0), (3, 1), (48, 17)):

        def build(shard=shard, num_shards=num_shards):
            return Reader(url, shard=shard, num_shards=num_shards, epochs=epochs)

        length = 60
        whole = [plain(document) for document in itertools.islice(build(), length)]
        reader = build()
        for position in range(len(whole) + 1):
            resumed = build()
            resumed.reset(stored(reader.state_dict()))
            again = build()
            again.reset(stored(resumed.state_dict()))  # saved straight after a load
            ahead = 9 if position % 10 else length
            for node in (resumed, again):
                rest = [plain(document) for document in itertools.islice(node, min(ahead, length - position))]
                assert rest == whole[position : position + ahead]
            if position < len(whole):
                next(reader)


def plain(document):
    return document.tokens.tolist(), *document[1:]


def test_a_logical_shard_whose_rows_are_all_empty_does_not_spin(tmp_path, form, block_sizes):
    full = corpora.documents([3, 0, 2], first=1000)
    url = corpora.write(f"file://{tmp_path}/", [corpora.every([[]] * 200, 7), [full]], form)
    alone = read_all(url, 4, epochs=1)
    barren = [shard for shard in range(4) if not alone[shard]]
    assert barren
    for shard in barren:
        endless = itertools.islice(Reader(url, shard=shard, num_shards=4), 4)
        assert sorted(document.tokens.tolist() for document in endless) == sorted([full[0], full[2]] * 2)
        assert list(Reader(url, shard=shard, num_shards=4, epochs=3)) == []


def test_a_dataset_without_a_token_is_an_error_that_names_it(tmp_path, form, block_sizes):
    url = corpora.write(f"file://{tmp_path}/silence/", [corpora.every([[]] * 20, 7)] * 2, form)
    for shard in range(3):
        reader = Reader(url, shard=shard, num_shards=3)
        for _ in range(2):
            with pytest.raises(ValueError, match="dataset 'silence' at .*silence/ has no token"):
                next(reader)


def test_a_logical_shard_that_owns_no_row_reads_the_whole_of_a_tiny_dataset_in_its_own_order(tmp_path, form):
    rows = corpora.documents([3] * 6)
    url = corpora.write(f"file://{tmp_path}/", [[rows[:4]], [rows[4:]]], form)
    num_shards = 100
    owners = [shard for shard, documents in enumerate(read_all(url, num_shards, epochs=1)) if documents]
    assert 0 < len(owners) <= 6
    orders = set()
    for shard in set(range(num_shards)) - set(owners):
        documents = list(itertools.islice(Reader(url, shard=shard, num_shards=num_shards), 12))
        order = [document.tokens.tolist() for document in documents]
        assert sorted(order[:6]) == sorted(order[6:]) == sorted(rows)
        orders.add(tuple(map(place_of, documents)))
    assert len(orders) > 80


def test_a_logical_shard_that_owns_a_row_reads_nothing_else(tmp_path, form):
    rows = corpora.documents([3] * 6)
    url = corpora.write(f"file://{tmp_path}/", [[rows]], form)
    for shard, own in enumerate(read_all(url, 10, epochs=1)):
        if own:
            endless = itertools.islice(Reader(url, shard=shard, num_shards=10), 3 * len(own))
            assert {place_of(document) for document in endless} == set(map(place_of, own))


# Layouts of a column.

ROWS = [[1, 2, 3], [], [4], None, [5, 6, 70_000], [7], [8, 9, 10, 11]]


def lists(rows, kind=None):
    return pa.array(rows, kind or pa.list_(pa.int32()))


def of_dictionary_values(rows):
    values = pa.array([token for row in rows for token in row or []], pa.int32()).dictionary_encode()
    offsets = np.cumsum([0, *(len(row or []) for row in rows)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def views_out_of_order(rows):
    """A list view whose rows lie backwards and overlap garbage in between."""
    values, offsets = [], []
    for row in reversed(rows):
        values += [-1]
        offsets.insert(0, len(values))
        values += row or []
    sizes = [len(row or []) for row in rows]
    return pa.ListViewArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(sizes, pa.int32()), pa.array([*values, -1], pa.int32())
    )


def nulls_with_garbage(rows):
    """A null row that has values all the same, which no reader may see."""
    filled = [[-7, -8] if row is None else row for row in rows]
    flat = pa.array([token for row in filled for token in row], pa.int32())
    offsets = pa.array(np.cumsum([0, *map(len, filled)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, flat, mask=pa.array([row is None for row in rows]))


LAYOUTS = {
    "list": lists,
    "large_list": lambda rows: lists(rows, pa.large_list(pa.int32())),
    "sliced": lambda rows: lists([[-5] * 9, None, *rows, [-6]]).slice(2, len(rows)),
    "sliced large_list": lambda rows: lists([[-5] * 9, *rows], pa.large_list(pa.int64())).slice(1),
    "not nullable": lambda rows: lists([row or [] for row in rows], pa.list_(pa.field("item", pa.int32(), False))),
    "dictionary of values": of_dictionary_values,
    "null with values": nulls_with_garbage,
}
ARROW_LAYOUTS = {
    "list_view": lambda rows: lists(rows, pa.list_view(pa.int32())),
    "large_list_view": lambda rows: lists(rows, pa.large_list_view(pa.int32())),
    "sliced list_view": lambda rows: lists([[-5] * 9, *rows, [-6]], pa.list_view(pa.int32())).slice(1, len(rows)),
    "list_view out of order": views_out_of_order,
    "dictionary of lists": lambda rows: pa.DictionaryArray.from_arrays(
        pa.array(range(len(rows)), pa.int16())[::-1], lists(rows[::-1])
    ),
    "dictionary of lists with nulls": lambda rows: pa.DictionaryArray.from_arrays(
        pa.array([None if row is None else number for number, row in enumerate(rows)], pa.int8()),
        lists([row or [] for row in rows]),
    ),
}
CASES = [(form, layout) for form in FORMATS for layout in LAYOUTS] + [("arrow", layout) for layout in ARROW_LAYOUTS]


def check_column(tmp_path, form, parts, **options):
    """The rows of files with these arrays as batches are what pyarrow reads, for one and for three logical shards."""
    tables = [pa.table({"tokens": part}) for part in parts]
    url = f"file://{tmp_path}/data/"
    storage.write(f"{url}0.{form}", corpora.FORMATS[form](tables, **options))
    rows = corpora.read(url)
    assert list(rows.values()) == [row or [] for part in parts for row in part.to_pylist()]
    for num_shards in (1, 3):
        check_once(url, num_shards, rows)


@pytest.mark.parametrize(("form", "layout"), CASES)
def test_reads_right_tokens_from_every_layout_of_a_list(tmp_path, block_sizes, form, layout):
    make = {**LAYOUTS, **ARROW_LAYOUTS}[layout]
    check_column(tmp_path, form, [make(ROWS), make(ROWS[:3])] if "dictionary" not in layout else [make(ROWS)])


def test_reads_right_tokens_from_fixed_size_lists(tmp_path, form, block_sizes):
    rows = corpora.documents([3] * 7)
    kind = pa.list_(pa.int32(), 3)
    check_column(tmp_path, form, [lists(rows, kind), lists([[-1] * 3, *rows, [-1] * 3], kind).slice(1, 7)])


def test_reads_right_tokens_from_fixed_size_lists_with_nulls(tmp_path, block_sizes):
    rows = [[1, 2, 3], None, [4, 5, 6], None]
    check_column(tmp_path, "arrow", [lists(rows, pa.list_(pa.int32(), 3)), lists(rows[1:], pa.list_(pa.int32(), 3))])


def test_reads_right_tokens_from_chunked_columns(tmp_path, form):
    chunks = [lists(ROWS[:2]), lists([[-1], *ROWS[2:5]]).slice(1), lists(ROWS[5:])]
    table = pa.table({"tokens": pa.chunked_array(chunks)})
    data = io.BytesIO()
    if form == "arrow":
        with pa.ipc.new_file(data, table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, data, row_group_size=4)
    url = f"file://{tmp_path}/data/"
    storage.write(f"{url}0.{form}", data.getvalue())
    rows = corpora.read(url)
    assert list(rows.values()) == [row or [] for row in ROWS]
    for num_shards in (1, 3):
        check_once(url, num_shards, rows)


@pytest.mark.parametrize("compression", ["lz4", "zstd", None])
@pytest.mark.parametrize("layout", ["list", "dictionary of values", "list_view", "null with values"])
def test_reads_arrow_files_with_compressed_bodies(tmp_path, block_sizes, compression, layout):
    make = {**LAYOUTS, **ARROW_LAYOUTS}[layout]
    check_column(tmp_path, "arrow", [make(ROWS * 20)], compression=compression)


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_reads_parquet_files_of_every_codec_and_page_version(tmp_path, block_sizes, compression, version):
    parts = [lists(ROWS * 20), lists(ROWS)]
    check_column(tmp_path, "parquet", parts, compression=compression, data_page_version=version, data_page_size=100)


def test_reads_arrow_files_whose_dictionary_grows(tmp_path, block_sizes):
    kind = pa.dictionary(pa.int16(), pa.list_(pa.int32()))
    values = lists([[1, 2], [3], [4, 5, 6], []])
    parts = [
        pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int16()), values[:2]),
        pa.DictionaryArray.from_arrays(pa.array([2, 0, 3], pa.int16()), values),
    ]
    assert parts[0].type == kind
    check_column(tmp_path, "arrow", parts, emit_dictionary_deltas=True)


def test_reads_one_column_of_many(tmp_path, form, block_sizes):
    """Text, dictionaries, structs and other lists beside it, before and after."""
    num_rows = 40
    rows = corpora.documents([row % 5 for row in range(num_rows)])
    text = pa.array([f"text {row}" * (row % 4) for row in range(num_rows)])
    table = pa.table(
        {
            "text": text,
            "source": text.dictionary_encode(),
            "meta": pa.array([{"tokens": [1], "a": row} for row in range(num_rows)]),
            "tokens": lists(rows),
            "more tokens": lists([[9]] * num_rows),
            "empty": pa.nulls(num_rows),
        }
    )
    if form == "parquet":
        table = table.drop_columns("empty")
    url = f"file://{tmp_path}/data/"
    kept = table.combine_chunks()
    storage.write(f"{url}0.{form}", corpora.FORMATS[form]([kept.slice(0, 40)]))
    expected = corpora.read(url)
    assert list(expected.values()) == rows
    for num_shards in (1, 3):
        check_once(url, num_shards, expected)
    other = list(Reader(url, shard=0, num_shards=1, epochs=1, column="more tokens"))
    assert [document.tokens.tolist() for document in other] == [[9]] * num_rows


def test_a_column_of_another_place_in_each_file_is_found_by_its_name(tmp_path, form):
    rows = corpora.documents([3] * 6)
    url = f"file://{tmp_path}/data/"
    other = lists([[1]] * 3)
    storage.write(f"{url}0.{form}", corpora.FORMATS[form]([pa.table({"a": other, "tokens": lists(rows[:3])})]))
    storage.write(f"{url}1.{form}", corpora.FORMATS[form]([pa.table({"tokens": lists(rows[3:]), "a": other})]))
    check_once(url, 2, corpora.read(url))


# Values.

LARGEST = {
    "int8": 127,
    "uint8": 255,
    "int16": 32_767,
    "uint16": 65_535,
    "int32": 2**31 - 1,
    "uint32": 2**32 - 1,
    "int64": 2**63 - 1,
    "uint64": 2**63 - 1,
}


@pytest.mark.parametrize("kind", LARGEST)
def test_holds_the_largest_value_of_every_integer_type(tmp_path, form, block_sizes, kind):
    largest = LARGEST[kind]
    rows = [[0, largest], [largest], [largest - 1, 1], [0]]
    check_column(tmp_path, form, [lists(rows, pa.list_(getattr(pa, kind)()))])
    url = f"file://{tmp_path}/data/"
    for document in Reader(url, shard=0, num_shards=1, epochs=1):
        assert document.tokens.dtype in (np.uint8, np.uint16, np.int32, np.int64)


@pytest.mark.parametrize("kind", ["uint32", "int32", "int64", "uint64"])
def test_holds_ids_above_65535_and_around_the_widths(tmp_path, form, kind):
    ids = [32_767, 32_768, 65_535, 65_536, 70_000, 131_071, 2**31 - 1]
    check_column(tmp_path, form, [lists([ids, ids[::-1]], pa.list_(getattr(pa, kind)()))])


def described(error):
    """An error's message and its notes."""
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


def check_bad_id(tmp_path, form, kind, bad, message, **more):
    """The id is in the file's tenth row: the third of its second batch."""
    rows = [[1, 2]] * 12
    rows[9] = [3, bad, 4]
    tables = corpora.tables(corpora.every(rows, 7), pa.list_(getattr(pa, kind)()))
    url = f"file://{tmp_path}/{kind} {bad}/"
    storage.write(f"{url}0.{form}", corpora.FORMATS[form](tables))
    reader = Reader(url, shard=0, num_shards=1, **more)
    for _ in range(2):  # and again: an error of the source is never an end of data
        with pytest.raises(ValueError, match=message) as error:
            for _ in range(13):
                next(reader)
        assert f"{url}0.{form}" in described(error)
        place = "row 9" if form == "parquet" else "row 2 of record batch 1"
        assert place in described(error)
        assert str(bad) in described(error)


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64"])
def test_a_negative_id_is_an_error_that_names_object_and_row(tmp_path, form, block_sizes, kind):
    check_bad_id(tmp_path, form, kind, -1, "must not be negative")
    check_bad_id(tmp_path, form, kind, -128, "must not be negative", vocab_size=100)


@pytest.mark.parametrize("kind", LARGEST)
def test_an_id_that_is_not_below_vocab_size_is_an_error_that_names_object_and_row(tmp_path, form, kind):
    check_bad_id(tmp_path, form, kind, 100, "must be below 100", vocab_size=100)
    check_bad_id(tmp_path, form, kind, LARGEST[kind], f"must be below {LARGEST[kind]}", vocab_size=LARGEST[kind])


def test_an_id_above_the_largest_int64_is_an_error_that_names_object_and_row(tmp_path, form):
    check_bad_id(tmp_path, form, "uint64", 2**63, "must be below")


def test_ids_up_to_vocab_size_are_fine(tmp_path, form):
    url = corpora.write(f"file://{tmp_path}/", [[[[0, 99]]]], form)
    (document,) = Reader(url, shard=0, num_shards=1, epochs=1, vocab_size=100)
    assert document.tokens.tolist() == [0, 99]


def test_a_null_among_the_ids_is_an_error_that_names_object_and_row(tmp_path, form, block_sizes):
    rows = [[1, 2]] * 12
    rows[9] = [3, None]
    url = f"file://{tmp_path}/"
    storage.write(f"{url}0.{form}", corpora.FORMATS[form](corpora.tables(corpora.every(rows, 7))))
    with pytest.raises(ValueError, match="null inside") as error:
        list(Reader(url, shard=0, num_shards=1, epochs=1))
    assert f"{url}0.{form}" in described(error)
    place = "row 9" if form == "parquet" else "row 2 of record batch 1"
    assert place in described(error)


def test_a_column_of_text_is_a_type_error_that_names_the_columns_of_integer_lists(tmp_path, form):
    table = pa.table({"text": ["a"], "ids": lists([[1]]), "more": lists([[1]]), "floats": pa.array([[0.5]])})
    url = f"file://{tmp_path}/"
    storage.write(f"{url}0.{form}", corpora.FORMATS[form]([table]))
    for column in ("text", "floats"):
        with pytest.raises(TypeError, match="'ids', 'more'") as error:
            next(Reader(url, shard=0, num_shards=1, column=column))
        assert f"{url}0.{form}" in described(error)
        assert f"'{column}'" in str(error.value)
        assert "floats'" not in str(error.value).split("columns of integer lists")[1]
    with pytest.raises(TypeError, match="tokenize"):
        next(Reader(url, shard=0, num_shards=1, column="text"))


def test_a_missing_column_is_a_lookup_error_that_names_the_columns_of_integer_lists(tmp_path, form):
    table = pa.table({"text": ["a"], "ids": lists([[1]]), "more": lists([[1]])})
    url = f"file://{tmp_path}/"
    storage.write(f"{url}0.{form}", corpora.FORMATS[form]([table]))
    with pytest.raises(LookupError, match="'tokens'.*'ids', 'more'") as error:
        next(Reader(url, shard=0, num_shards=1))
    assert f"{url}0.{form}" in described(error)


# Files that are broken.


def test_a_file_cut_off_anywhere_is_an_error_that_names_it(tmp_path, form):
    data = corpora.FORMATS[form](corpora.tables([[[1, 2, 3]] * 5] * 2))
    url = f"file://{tmp_path}/"
    for length in range(1, len(data), 7):
        storage.write(f"{url}0.{form}", data[:length])
        with pytest.raises(ValueError, match=f"{url}0.{form}"):
            next(Reader(url, shard=0, num_shards=1))


def test_a_file_of_something_else_is_an_error_that_names_it(tmp_path, form):
    url = f"file://{tmp_path}/"
    other = corpora.FORMATS["parquet" if form == "arrow" else "arrow"](corpora.tables([[[1]]]))
    magic = b"ARROW1" if form == "arrow" else b"PAR1"
    for data in (b"{}\n" * 100, b"x", magic, magic * 2, bytes(1000) + magic, b"\xff" * 100 + magic, other):
        storage.write(f"{url}0.{form}", data)
        with pytest.raises(ValueError, match=f"{url}0.{form}"):
            next(Reader(url, shard=0, num_shards=1))


@pytest.mark.slow
def test_a_byte_changed_anywhere_gives_documents_or_an_error_that_names_the_file_and_never_a_crash(tmp_path, form):
    """In a process of its own, which could die. Not in Parquet footers: with a damaged one pyarrow itself may abort."""
    command = [sys.executable, __file__, f"file://{tmp_path}/", form]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout[-200:]}\n{result.stderr[-2000:]}"


def read_with_each_byte_changed(url, form):
    data = corpora.FORMATS[form](corpora.tables([[[1, 2, 3]] * 5] * 2))
    footer = struct.unpack_from("<i", data, len(data) - 8)[0] + 8 if form == "parquet" else 0
    for position in range(len(data) - footer):
        for flip in (0x01, 0x80, 0xFF):
            sys.stdout.write(f"byte {position} ^ {flip}\n")
            sys.stdout.flush()
            storage.write(f"{url}0.{form}", data[:position] + bytes([data[position] ^ flip]) + data[position + 1 :])
            try:
                documents = list(itertools.islice(Reader(url, shard=0, num_shards=1, epochs=1), 100))
            except (ValueError, LookupError, TypeError, OSError) as error:
                assert url in "\n".join([str(error), *getattr(error, "__notes__", [])])
            else:
                assert len(documents) <= 10


# Places.


@pytest.mark.parametrize("bos_id", [None, 100_001])
def test_every_token_of_a_sample_stands_where_its_document_says(tmp_path, form, block_sizes, bos_id):
    eos_id = 100_000
    rng = random.Random(2)
    rows = corpora.documents([rng.choice([0, 1, 2, 9, 30]) for _ in range(60)])
    url = corpora.write(f"file://{tmp_path}/", [corpora.every(part, 9) for part in corpora.every(rows, 25)], form)
    expected = corpora.read(url)
    for seq_len, num_shards in itertools.product((1, 2, 7, 32, 1000), (1, 4)):
        seen = Counter()
        for shard in range(num_shards):
            reader = Reader(url, shard=shard, num_shards=num_shards, epochs=1)
            samples = list(Packer(reader, seq_len=seq_len, eos_id=eos_id, bos_id=bos_id))
            assert all(len(sample.tokens) == seq_len for sample in samples[:-1])
            for sample in samples:
                assert sample.starts[0] == 0
                assert len(sample.starts) == len(sample.documents)
                ends = (*sample.starts[1:], len(sample.tokens))
                for start, end, place in zip(sample.starts, ends, sample.documents, strict=True):
                    assert start < end
                    for position in range(start, end):
                        offset = place[3] + position - start
                        seen[place[1], place[2], offset] += 1
                        document = expected[place[1], place[2]]
                        marked = {-1: bos_id, len(document): eos_id}
                        token = marked[offset] if offset in marked else document[offset]
                        assert sample.tokens[position] == token
        first = 0 if bos_id is None else -1
        assert seen == Counter(
            (*place, offset) for place, row in expected.items() if row for offset in range(first, len(row) + 1)
        )


if __name__ == "__main__":
    read_with_each_byte_changed(*sys.argv[1:])
