"""Rows: the same columns from every format that has them, in the same places, and the same nodes over them."""

import gzip
import io
import itertools
import json
import tarfile

import corpora
import numpy as np
import pyarrow as pa
import pytest
from sources import same

from ibm_nodes import Filter, Reader, Shuffler, storage
from ibm_nodes.testing import assert_rescales, assert_resumes

COLUMNS = ("text", "score", "tokens", "meta")
KIND = pa.struct({"url": pa.string(), "tags": pa.list_(pa.string())})
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string()), ("score", pa.float64()),
                    ("tokens", pa.list_(pa.int32())), ("meta", KIND)])  # fmt: skip


def records(count):
    return [
        {
            "id": number,
            "text": None if number == 5 else f"text {number} naïve ☃\n" * (number % 4),
            "score": number / 8,
            "tokens": list(range(1000 * number, 1000 * number + number % 5)),
            "meta": None if number == 7 else {"url": f"http://x/{number}", "tags": ["a"] * (number % 3)},
        }
        for number in range(count)
    ]


def tar(batches):
    """Samples of members of every kind, and null text left out of KEY.txt and in KEY.json."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for row in itertools.chain(*(table.to_pylist() for table in batches)):
            tokens = io.BytesIO()
            np.save(tokens, np.array(row["tokens"], np.int32))
            members = {"tokens.npy": tokens.getvalue(), "meta.json": json.dumps(row["meta"]).encode(), "png": b"image"}
            rest = {"score": row["score"], "id": row["id"]}
            if row["text"] is None:
                rest["text"] = None
            else:
                members["text" if row["id"] % 2 else "text.txt"] = row["text"].encode()
            for field, content in {**members, "json": json.dumps(rest).encode()}.items():
                info = tarfile.TarInfo(f"some/{row['id']:05}.{field}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return sink.getvalue()


FORMATS = {
    "parquet": corpora.parquet,
    "arrow": corpora.arrow,
    "arrows": corpora.stream,
    "jsonl": corpora.lines,
    "tar": tar,
    "jsonl.gz": lambda batches: gzip.compress(corpora.lines(batches)),
}


def write(url, form, rows, size=7):
    for number, part in enumerate(corpora.every(rows, 40)):
        batches = [pa.Table.from_pylist(few, SCHEMA) for few in corpora.every(part, size)]
        storage.write(f"{url}{number:03}.{form}", FORMATS[form](batches))
    return url


def take(node, count=None):
    return list(itertools.islice(node, count))


def read(url, shard=0, num_shards=1, columns=COLUMNS, **options):
    return Reader(url, name="d", columns=list(columns), shard=shard, num_shards=num_shards, **options)


@pytest.fixture(params=FORMATS)
def corpus(request, tmp_path):
    return write(f"file://{tmp_path}/d/", request.param, records(100))


def plain(row):
    """A row as JSON would have it, without its place."""
    values = {key: value for key, value in row.items() if not key.startswith("__")}
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in values.items()}


class TestEveryFormat:
    def test_shards_together_have_every_row_once_with_the_columns_asked_for(self, corpus):
        found = [row for shard in range(3) for row in take(read(corpus, shard, 3, epochs=1))]
        expected = [{column: row[column] for column in COLUMNS} for row in records(100)]
        assert sorted(map(plain, found), key=lambda row: row["score"]) == expected
        assert {tuple(row) for row in found} == {(*COLUMNS, "__url__", "__row__", "__name__", "__epoch__")}
        assert {row["__name__"] for row in found} == {"d"}

    def test_a_row_says_where_it_lies_as_a_document_does(self, corpus):
        places = {one[1:3] for one in take(Reader(corpus, shard=0, num_shards=1, epochs=1)) if len(one.tokens)}
        rows = take(read(corpus, columns=["tokens"], epochs=1))
        assert {(row["__url__"], row["__row__"]) for row in rows if len(row["tokens"])} == places

    def test_it_resumes_and_can_be_filtered_and_shuffled(self, corpus):
        assert_resumes(lambda: read(corpus))
        kept = lambda row: row["score"] > 3  # noqa: E731
        assert_resumes(lambda: Shuffler(Filter(read(corpus), kept), buffer_size=3, seed=0))
        assert_rescales(lambda *of: Filter(read(corpus, *of), kept), num_shards=4, cuts=(0, 12))

    def test_a_column_that_is_not_there_is_named_with_those_that_are(self, corpus):
        with pytest.raises(
            LookupError,
            match=r"no '?(column )?'?txt'(: give columns, FIELDs| in .*give columns?, .*'id', 'text', 'score')",
        ):
            next(read(corpus, columns=["text", "txt"]))


def test_parts_of_a_huge_row_group_have_its_rows_in_file_order(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {**row, "text": rng.bytes(40_000).hex(), "tokens": rng.integers(0, 9, 2000).tolist()} for row in records(200)
    ]
    table = pa.Table.from_pylist(rows, SCHEMA)
    storage.write(f"file://{tmp_path}/d/000.parquet", corpora.parquet([table]))
    found = take(read(f"file://{tmp_path}/d/", columns=["tokens", "text", "id"], epochs=1))
    expected = [{key: row[key] for key in ("tokens", "text", "id")} for row in rows]
    assert sorted(map(plain, found), key=lambda row: row["id"]) == expected
    order = [row["__row__"] for row in found]
    assert [row["id"] for row in found] == order != sorted(order)
    assert len({row // 50 for row in order[:30]}) == 1  # a part at a time


def test_lists_of_integers_are_arrays_that_a_shuffler_can_save(tmp_path):
    url = write(f"file://{tmp_path}/d/", "parquet", records(20))
    row = next(Filter(read(url), lambda row: len(row["tokens"]) == 3))
    assert isinstance(row["tokens"], np.ndarray) and row["tokens"].dtype == np.int32
    node = Shuffler(read(url, epochs=1), buffer_size=9, seed=0)
    first = take(node, 4)
    fresh = Shuffler(read(url, epochs=1), buffer_size=9, seed=0)
    fresh.reset(node.state_dict())
    assert same(first + take(fresh), take(Shuffler(read(url, epochs=1), buffer_size=9, seed=0)))


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_rows_that_are_empty_in_all_columns_are_passed_over_and_counted(tmp_path, form):
    url = write(f"file://{tmp_path}/d/", form, records(40))
    node = read(url, columns=["text"], epochs=1)
    assert {row["text"] for row in take(node)} == {row["text"] for row in records(40)} - {"", None}
    assert node.state_dict()["skipped"] == sum(not row["text"] for row in records(40)) == 11
    firsts = [take(read(url, shard, 80, columns=["text"]), 29) for shard in range(80)]  # some own nothing but such rows
    assert 29 in {len({row["text"] for row in few}) for few in firsts}


def test_other_columns_are_another_order_and_refused_on_resume(tmp_path):
    url = write(f"file://{tmp_path}/d/", "parquet", records(20))
    node = read(url)
    next(node)
    with pytest.raises(ValueError, match="was saved with columns=.* and is now built with columns="):
        read(url, columns=["text"]).reset(node.state_dict())


@pytest.mark.parametrize("columns", ["text", [], ["text", "text"]])
def test_columns_must_be_a_list_of_names(columns):
    with pytest.raises(ValueError, match="columns must be a list of different names, or None, got"):
        Reader("memory://d/", shard=0, num_shards=1, columns=columns)


def test_a_format_without_columns_says_so(tmp_path):
    storage.write(f"file://{tmp_path}/d/000.mds", b"x")
    with pytest.raises(ValueError, match=r"columns cannot be read from .*000.mds, whose format gives token ids alone"):
        next(read(f"file://{tmp_path}/d/"))


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_text_that_is_no_utf_8_is_an_error_that_names_its_file(tmp_path, form):
    url = write(f"file://{tmp_path}/d/", form, records(20))
    path = tmp_path / "d" / f"000.{form}"
    data = path.read_bytes()
    if form == "parquet":
        table = pa.table({"text": pa.array([b"\xff\xfe bad"]).cast(pa.binary())})
        wrong = pa.table({"text": pa.StringArray.from_buffers(1, *table["text"].chunk(0).buffers()[1:])})
        path.write_bytes(corpora.parquet([wrong]))
    else:
        path.write_bytes(data.replace(b"text 3", b"text \xff"))
    with pytest.raises(ValueError) as caught:
        next(read(url, columns=["text"]))
    assert f"000.{form}" in f"{caught.value} {caught.value.__notes__}"
