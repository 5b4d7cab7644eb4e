"""Rows that an expression over their columns chooses: the same from every format, at every place and world size."""

import gzip
import io
import json
import pickle
from functools import partial

import corpora
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from sources import same, stored

from ibm_nodes import Batcher, Loader, Mixer, Packer, Reader, Sharder, checkpoint, list_dataset, stats, storage
from ibm_nodes.testing import assert_rescales, assert_resumes

SCHEMA = pa.schema(
    [
        ("lang", pa.string()),
        ("score", pa.float64()),
        ("tokens", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("meta", pa.struct({"source": pa.string()})),
    ]
)
SIZES = [1, 7, 30, 3]


def records(count, first=0):
    return [
        {
            "lang": [None, "en", "de", "en", "fr"][number % 5],
            "score": None if number % 7 == 3 else number % 11 / 10,
            "tokens": list(range(1000 * number, 1000 * number + number % 4)),
            "text": f"text {number}" * (number % 3),
            "meta": {"source": "ab"[number % 2]},
        }
        for number in range(first, first + count)
    ]


def tables(rows, sizes=SIZES):
    return [pa.Table.from_pylist(batch, SCHEMA) for batch in corpora.cut(rows, sizes)]


FORMATS = {
    "parquet": corpora.parquet,
    "arrow": corpora.arrow,
    "feather": partial(corpora.arrow, compression="zstd"),
    "arrows": corpora.stream,
    "jsonl": corpora.lines,
    "jsonl.gz": lambda batches: gzip.compress(corpora.lines(batches)),
}
CONDITIONS = {
    "a comparison": (pc.field("score") > 0.4, lambda row: row["score"] is not None and row["score"] > 0.4),
    "a text": (pc.field("lang") == "en", lambda row: row["lang"] == "en"),
    "a null": (pc.field("lang").is_null(), lambda row: row["lang"] is None),
    "two": (
        (pc.field("lang") != "en") & (pc.field("score") <= 0.5),
        lambda row: row["lang"] not in ("en", None) and row["score"] is not None and row["score"] <= 0.5,
    ),
    "one of some": (pc.field("lang").isin(["de", "fr"]), lambda row: row["lang"] in ("de", "fr")),
    "a nested column": (pc.field("meta", "source") == "b", lambda row: row["meta"]["source"] == "b"),
    "the tokens themselves": (pc.list_value_length(pc.field("tokens")) == 2, lambda row: len(row["tokens"]) == 2),
    "a function": (pc.match_substring(pc.field("lang"), "e"), lambda row: "e" in (row["lang"] or "")),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The same two files in every format."""
    root = f"file://{tmp_path_factory.mktemp('where')}/"
    for form, encode in FORMATS.items():
        for number in range(2):
            storage.write(f"{root}{form}/{number:03}.{form}", encode(tables(records(100, 100 * number))))
    return root


def read(url, shard=0, num_shards=1, **options):
    return Reader(url, **{"name": "data", "shard": shard, "num_shards": num_shards, **options})


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_just_the_rows_for_which_it_is_true_come_whole_and_the_others_count(corpus, form, condition):
    where, holds = CONDITIONS[condition]
    rows = records(200)
    for shards in (1, 7):
        nodes = [read(f"{corpus}{form}/", shard, shards, where=where, epochs=1) for shard in range(shards)]
        found = sorted(document.tokens.tolist() for node in nodes for document in node)
        assert found == sorted(row["tokens"] for row in rows if holds(row) and row["tokens"])
        assert sum(node.state_dict()["skipped"] for node in nodes) == len(rows) - len(found)


@pytest.mark.parametrize("form", FORMATS)
def test_the_columns_of_a_condition_are_read_and_not_yielded(corpus, form):
    where, holds = CONDITIONS["a text"]
    found = list(read(f"{corpus}{form}/", columns=["text", "score"], where=where, epochs=1))
    assert {frozenset(row) for row in found} == {
        frozenset(("text", "score", "__url__", "__row__", "__name__", "__epoch__"))
    }
    key = lambda row: (row["text"], row["score"] is None, row["score"] or 0)  # noqa: E731
    wanted = [row for row in records(200) if holds(row) and (row["text"] or row["score"] is not None)]
    assert [key(row) for row in sorted(found, key=key)] == [key(row) for row in sorted(wanted, key=key)]


def test_of_a_parquet_file_no_other_columns_are_fetched(tmp_path):
    rng = np.random.default_rng(0)
    table = pa.table(
        {"score": rng.random(2000), "junk": [rng.bytes(2000) for _ in range(2000)], "tokens": [[1]] * 2000}
    )
    storage.write(f"file://{tmp_path}/d/000.parquet", corpora.parquet([table]))
    node = read(f"file://{tmp_path}/d/", where=pc.field("score") > 0.5, epochs=1)
    before = stats(Loader(node))["store"]["bytes"]
    assert len(list(node)) == (np.array(table["score"]) > 0.5).sum()
    assert stats(Loader(node))["store"]["bytes"] - before < 200_000


def test_parts_of_a_huge_row_group_are_cut_row_by_row(tmp_path):
    rng = np.random.default_rng(0)
    texts = [rng.bytes(40_000).hex() for _ in range(200)]
    table = pa.table({"id": range(200), "text": texts, "tokens": [[number, 7] for number in range(200)]})
    storage.write(f"file://{tmp_path}/d/000.parquet", corpora.parquet([table]))
    where = (pc.field("id") >= 50) & (pc.binary_length(pc.field("text")) > 0)
    found = list(read(f"file://{tmp_path}/d/", where=where, epochs=1))
    assert sorted(document.tokens[0] for document in found) == list(range(50, 200))
    assert all(document.row == document.tokens[0] for document in found)


def test_documents_keep_the_places_that_they_have_without_it(corpus):
    for form in FORMATS:
        places = {(d.url, d.row): d.tokens.tolist() for d in read(f"{corpus}{form}/", epochs=1)}
        chosen = {
            (d.url, d.row): d.tokens.tolist() for d in read(f"{corpus}{form}/", epochs=1, where=pc.field("score") > 0.4)
        }
        assert chosen
        assert chosen.items() <= places.items()


@pytest.mark.parametrize("form", FORMATS)
def test_it_resumes_after_every_document(corpus, form):
    make = partial(read, f"{corpus}{form}/", 1, 5, where=pc.field("score") > 0.6, epochs=2)
    assert_resumes(make, num_items=40)


@pytest.mark.parametrize("form", ["parquet", "jsonl.gz"])
def test_it_is_the_same_at_every_world_size(corpus, form):
    def graph(shard, num_shards):
        options = {"shard": shard, "num_shards": num_shards}
        web = read(f"{corpus}{form}/", where=pc.field("lang") == "en", **options)
        rest = read(f"{corpus}{form}/", name="rest", where=pc.field("lang") != "en", holdout=0.2, **options)
        return Packer(Mixer({"web": web, "rest": rest}, weights={"web": 2, "rest": 1}), seq_len=16, eos_id=1)

    assert_rescales(graph, num_shards=6, num_items=36, cuts=[0, 12])


def test_what_is_passed_over_shows_in_the_stats_of_its_dataset(corpus):
    def graph(shard, num_shards):
        options = {"shard": shard, "num_shards": num_shards}
        readers = {
            "some": read(f"{corpus}arrow/", name="some", where=pc.field("score") > 0.4, **options),
            "all": read(f"{corpus}arrow/", name="all", **options),
        }
        return Mixer(readers, weights={"some": 1, "all": 1})

    with Loader(Batcher(Sharder(graph, num_shards=1, rank=0, world_size=1), batch_size=10)) as loader:
        for _ in zip(range(60), loader, strict=False):
            pass
        found = stats(loader)["datasets"]
    assert 0 < found["all"]["skipped"] / found["all"]["passes"] < 60
    assert found["some"]["skipped"] / found["some"]["passes"] > 100


def test_readers_of_other_conditions_share_a_listing_and_no_block(corpus):
    listing = list_dataset(f"{corpus}parquet/")
    first = read(listing.url, listing=listing, where=pc.field("score") > 0.4)
    second = read(listing.url, listing=listing, where=pc.field("score") <= 0.4)
    third = read(listing.url, listing=listing)
    found = [{tuple(next(node).tokens.tolist()) for _ in range(30)} for node in (first, second, third)]
    scores = {tuple(row["tokens"]): row["score"] for row in records(200)}
    assert all(scores[tokens] > 0.4 for tokens in found[0])
    assert all(scores[tokens] <= 0.4 for tokens in found[1])
    assert any(scores[tokens] is None for tokens in found[2])


class TestAnotherConditionAtResume:
    def test_it_is_refused_naming_both(self, corpus):
        node = read(f"{corpus}arrow/", where=pc.field("score") > 0.4)
        next(node)
        state = stored(node.state_dict())
        for other, text in ((pc.field("score") > 0.5, r"'\(score > 0.5\)'"), (None, "None")):
            with pytest.raises(
                ValueError, match=rf"saved with where='\(score > 0.4\)' and is now built with where={text}"
            ):
                read(f"{corpus}arrow/", where=other).reset(state)
        read(f"{corpus}arrow/", where=pc.field("score") > 0.4).reset(state)

    def test_long_lists_that_are_written_alike_are_told_apart(self):
        one, other = (pc.field("id").isin([*range(500), last, *range(600, 1000)]) for last in (550, 551))
        assert str(one) == str(other)
        assert read("memory://x/", where=one).where != read("memory://x/", where=other).where
        again = pc.field("id").isin([*range(500), 550, *range(600, 1000)])
        assert read("memory://x/", where=one).where == read("memory://x/", where=again).where

    def test_it_is_another_lineage(self, corpus, tmp_path):
        for number, where in enumerate((None, pc.field("score") > 0.4, pc.field("score") > 0.5)):
            graph = partial(conditional, f"{corpus}arrow/", where)
            with Loader(Batcher(Sharder(graph, num_shards=2, rank=0, world_size=1), batch_size=2)) as loader:
                next(iter(loader))
                checkpoint.save(loader, f"file://{tmp_path}/saves", step=1).result(30)
            assert len(checkpoint.list_saved(f"file://{tmp_path}/saves")) == number + 1


def conditional(url, where, shard, num_shards):
    return read(url, shard, num_shards, where=where)


def test_a_reader_with_one_pickles(corpus):
    node = read(f"{corpus}arrow/", where=pc.field("lang").isin(["de"]), epochs=1)
    assert same(list(pickle.loads(pickle.dumps(node))), list(node))


class TestWhatCannotBe:
    @pytest.mark.parametrize("form", FORMATS)
    def test_a_condition_that_holds_for_no_row_is_a_dataset_without_a_token(self, corpus, form):
        with pytest.raises(ValueError, match=r"has no token in column 'tokens' where \(score > 5\): leave it out"):
            next(read(f"{corpus}{form}/", where=pc.field("score") > 5))
        with pytest.raises(ValueError, match=r"has no row where \(score > 5\): leave it out"):
            next(read(f"{corpus}{form}/", where=pc.field("score") > 5, columns=["text"]))
        assert list(read(f"{corpus}{form}/", where=pc.field("score") > 5, epochs=1)) == []

    @pytest.mark.parametrize("form", FORMATS)
    @pytest.mark.parametrize("where", [pc.field("scores") > 0.5, pc.field("meta", "sources") == "a"], ids=str)
    def test_a_column_that_is_not_there_is_named_with_those_that_are(self, corpus, form, where):
        with pytest.raises(LookupError) as caught:
            next(read(f"{corpus}{form}/", where=where))
        assert str(where) in str(caught.value) and f".{form}" in str(caught.value)

    @pytest.mark.parametrize("form", FORMATS)
    @pytest.mark.parametrize(
        ("where", "message"),
        [
            (pc.field("score") + 1, "must be true or false for a row, and is a double"),
            (pc.field("score") == "high", "cannot be computed for .*no kernel"),
            (pc.list_value_length(pc.field("lang")) > 1, "cannot be computed for .*no kernel"),
        ],
    )
    def test_a_condition_that_cannot_be_computed_is_a_named_type_error(self, corpus, form, where, message):
        with pytest.raises(TypeError, match=message) as caught:
            next(read(f"{corpus}{form}/", where=where))
        assert f".{form}" in str(caught.value)

    @pytest.mark.parametrize("name", ["000.mds", "000.tar", "000.bin"])
    def test_formats_without_columns_say_so(self, tmp_path, name):
        storage.write(f"file://{tmp_path}/d/{name}", b"x")
        with pytest.raises(TypeError, match=rf"where=\(a > 1\) cannot look at .*{name}, whose format has no table"):
            next(read(f"file://{tmp_path}/d/", where=pc.field("a") > 1))

    def test_a_format_of_ones_own_says_so(self, tmp_path):
        storage.write(f"file://{tmp_path}/d/000.x", b"x")
        with pytest.raises(TypeError, match="whose format has no table of columns"):
            next(read(f"file://{tmp_path}/d/", where=pc.field("a") > 1, format=lambda file, column: None))

    def test_documents_that_are_record_batches_are_no_rows(self, tmp_path):
        batches = [pa.table({"tokens": pa.array([number] * 5, pa.int32())}) for number in range(9)]
        storage.write(f"file://{tmp_path}/d/000.arrow", corpora.arrow(batches))
        with pytest.raises(TypeError, match="each is a record batch of the column of integers 'tokens', not a row"):
            next(read(f"file://{tmp_path}/d/", where=pc.field("tokens") > 1))

    @pytest.mark.parametrize("where", ["score > 0.5", lambda row: True, True])
    def test_it_must_be_an_expression(self, where):
        with pytest.raises(TypeError, match="where must be an expression such as pyarrow.compute.field"):
            read("memory://x/", where=where)

    def test_it_must_name_its_columns(self):
        with pytest.raises(TypeError, match="where must look at columns by their names"):
            read("memory://x/", where=pc.field(0) > 1)

    def test_a_line_that_lacks_the_column_is_an_error_that_names_its_place(self, tmp_path):
        rows = [b'{"tokens": [1], "a": 1}', b'{"tokens": [2]}']
        storage.write(f"file://{tmp_path}/d/000.jsonl", b"\n".join(rows))
        with pytest.raises(LookupError, match="no column 'a' in the line at byte 24 of .*000.jsonl, which where="):
            next(read(f"file://{tmp_path}/d/", where=pc.field("a") > 0))

    def test_lines_of_several_types_are_a_named_type_error(self, tmp_path):
        for wrong in (b'"x"', b"99999999999999999999999"):
            storage.write(
                f"file://{tmp_path}/d/000.jsonl", b'{"tokens": [1], "a": 1}\n{"tokens": [2], "a": %s}' % wrong
            )
            with pytest.raises(TypeError, match="cannot be computed for .*000.jsonl: a column has no one type"):
                next(read(f"file://{tmp_path}/d/", where=pc.field("a") > 0))


class TestJSONLines:
    """Columns have types only as far as their values have."""

    def test_names_in_the_text_of_a_condition_are_not_its_columns(self, tmp_path):
        rows = [{"tokens": [number], "kind": ["text", "image"][number % 2]} for number in range(1, 9)]
        rows[1]["text"] = "some lines have it, some do not"
        storage.write(f"file://{tmp_path}/d/000.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        found = list(read(f"file://{tmp_path}/d/", where=pc.field("kind") == "text", epochs=1))
        assert sorted(document.tokens[0] for document in found) == [2, 4, 6, 8]

    def test_lines_that_are_not_wanted_need_no_tokens(self, tmp_path):
        storage.write(f"file://{tmp_path}/d/000.jsonl", b'{"kind": "a"}\n{"kind": "b", "tokens": [5]}\n{"kind": "a"}\n')
        (document,) = read(f"file://{tmp_path}/d/", where=pc.field("kind") == "b", epochs=1)
        assert document.tokens.tolist() == [5]

    @pytest.mark.parametrize(
        "where",
        [
            pc.field("a") > 1,
            pc.field("a") == "x",
            pc.match_substring(pc.field("a"), "x"),
            pc.field("a").isin(["x"]),
            pc.list_value_length(pc.field("a")) > 1,
            pc.invert(pc.field("a")),
        ],
        ids=str,
    )
    def test_nothing_but_nulls_in_a_block_is_of_any_type(self, tmp_path, where):
        storage.write(f"file://{tmp_path}/d/000.jsonl", b'{"tokens": [1], "a": null}\n')
        assert list(read(f"file://{tmp_path}/d/", where=where, epochs=1)) == []
        assert len(list(read(f"file://{tmp_path}/d/", where=pc.field("a").is_null(), epochs=1))) == 1


def test_text_offsets_that_are_damaged_are_an_error_and_no_crash(tmp_path):
    column = pa.StringArray.from_buffers(2, pa.array([0, 1 << 30, 3], pa.int32()).buffers()[1], pa.py_buffer(b"abc"))
    sink = io.BytesIO()
    batch = pa.record_batch({"lang": column, "tokens": pa.array([[1], [2]])})
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    storage.write(f"file://{tmp_path}/d/000.arrow", sink.getvalue())
    with pytest.raises(ValueError, match="ffset"):
        next(read(f"file://{tmp_path}/d/", where=pc.match_substring(pc.field("lang"), "en")))
