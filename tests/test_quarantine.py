"""Bad files and blocks: an error that names them, or left out in one place, whoever reads and wherever it stops."""

import gzip
import io
import itertools
import json
import logging
import random
import struct
import time
import uuid

import corpora
import fsspec
import layouts
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import texts
import zstandard
from fault_proxy import Fault, FaultProxy
from layouts import LAYOUTS

from ibm_nodes import (
    Filter,
    Loader,
    Mixer,
    Packer,
    Prefetcher,
    Reader,
    Sharder,
    Shuffler,
    Tokenizer,
    attempts,
    list_dataset,
    quarantine,
    stats,
    storage,
)
from ibm_nodes.attempts import Changed
from ibm_nodes.formats import arrow, jsonl, mds, megatron, parquet, sequential
from ibm_nodes.formats.lists import Lists
from ibm_nodes.testing import assert_rescales, assert_resumes

ERRORS = (ValueError, LookupError, TypeError, OSError, pa.ArrowException)
BAD_ID, VOCAB_SIZE = 65_000, 60_000
FILES = [corpora.cut(corpora.documents([3, 0, 2, 4], first=10 * number), [2]) for number in range(3)]
CODECS = {".gz": (gzip.decompress, gzip.compress), ".zst": (zstandard.decompress, layouts.zstd)}
SOME = [
    "Parquet, zstd",
    "Arrow",
    "Arrow stream, zstd",
    "a batch a document",
    "JSON lines",
    "JSON lines, gzip",
    "JSON lines, zstd",
    "Megatron, 32 bits",
    "MDS, bytes",
    "MDS, zstd",
    "tar of npy",
    "tar of objects, gzip",
]


def codec_of(layout):
    return next((codec for end, codec in CODECS.items() if end in layout.ending), (bytes, bytes))


def files_of(layout, batches):
    data = layout.write(batches)
    return data if isinstance(data, dict) else {layout.ending: data}


def cut(layout, batches):
    files = files_of(layout, batches)
    return files | {layout.ending: files[layout.ending][: len(files[layout.ending]) // 2]}


def noise(layout, batches):
    files = files_of(layout, batches)
    return files | {layout.ending: random.Random(0).randbytes(len(files[layout.ending]))}


def of_other_columns(layout, batches):
    if layout.format == "megatron":
        pytest.skip("has no columns")
    unpack, pack = codec_of(layout)
    if layout.format == "webdataset":
        return {layout.ending: pack(layouts.tar(batches, field="others.npy"))}
    return {layout.ending: pack(unpack(layout.write(batches)).replace(b"tokens", b"others"))}


def beyond_vocabulary(layout, batches):
    return files_of(layout, [*batches[:1], [[BAD_ID], *batches[1][1:]]])


def put(url, files, storage_options=None):
    for ending, data in files.items():
        storage.write(f"{url}{ending}", data, storage_options)


def write(url, name, damage, bad=1, storage_options=None):
    """Writes a dataset with one damaged file; gives the rows of the others."""
    rows = layouts.write(url, FILES, LAYOUTS[name], storage_options)
    put(f"{url}{bad:03}", damage(LAYOUTS[name], FILES[bad]), storage_options)
    return {place: tokens for place, tokens in rows.items() if tokens and f"/{bad:03}." not in place[0]}


def reader(url, shard=0, num_shards=1, **more):
    return Reader(url, **{"name": "data", "shard": shard, "num_shards": num_shards, "on_error": "quarantine", **more})


def described(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def read(*nodes):
    """All rows, each of which came once."""
    documents = [document for node in nodes for document in node]
    found = {(document.url, document.row): document.tokens.tolist() for document in documents}
    assert len(found) == len(documents)
    return found


def places(node):
    return node.state_dict()["quarantined"]


def check(url, expected, *, bad="001.", first=0, end=None, cuts=None, **more):
    """The file is an error that names it, or left out: the same when stopped after any document, by any shards."""
    strict = reader(url, epochs=1, on_error="raise", **more)
    for _ in range(2):
        with pytest.raises(ERRORS) as raised:
            list(strict)
        assert f"{url}{bad}" in described(raised.value)
    assert strict.state_dict()["quarantined"] == []
    node = reader(url, epochs=1, **more)
    assert read(node) == expected
    (place,) = places(node)
    assert place["file"].startswith(bad)
    assert (place["first"], place["end"]) == (first, end)
    assert type(raised.value).__name__ in place["reason"] and len(place["reason"]) <= 200
    parts = [reader(url, shard, 4, epochs=1, **more) for shard in range(4)]
    assert read(*parts) == expected
    assert all(len(places(part)) <= 1 for part in parts)
    assert_resumes(lambda: reader(url, **more), num_items=len(expected) + 4, cuts=cuts)


@pytest.mark.parametrize("damage", [cut, noise, of_other_columns, beyond_vocabulary], ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", SOME)
def test_a_bad_file_is_an_error_or_left_out(tmp_path, name, damage):
    url = f"file://{tmp_path}/"
    expected = write(url, name, damage)
    opens = damage is beyond_vocabulary or name == "JSON lines" or (damage is noise and "Megatron" in name)
    one_block = opens and name not in ("Arrow stream, zstd", "JSON lines, gzip", "JSON lines, zstd", "MDS, zstd")
    end = 1 if one_block and "tar" not in name else None
    check(url, expected, vocab_size=VOCAB_SIZE, end=end, cuts=None if damage in (cut, beyond_vocabulary) else (2, 4, 8))


def test_a_column_of_another_type_is_left_out(tmp_path):
    for number, data in enumerate(
        (
            {".parquet": corpora.parquet([pa.table({"tokens": ["text"]})])},
            {".arrow": corpora.arrow([pa.table({"tokens": [1.5]})])},
            {".mds": layouts.mds([[[1]]], encoding="str")},
            {".jsonl": b'{"tokens": "text"}\n'},
        )
    ):
        url = f"file://{tmp_path}/{number}/"
        put(f"{url}001", data)
        storage.write(f"{url}000.jsonl", b'{"tokens": [1, 2]}\n{"tokens": [3]}\n')
        check(url, {(f"{url}000.jsonl", 0): [1, 2], (f"{url}000.jsonl", 19): [3]}, end=1 if ".jsonl" in data else None)


# Text: one bad line, or bytes that are no UTF-8.

TEXTS = ["plain", "été", "", "more of it"]


def text_file(ending, values):
    """A file of a column ``text`` of bytes, whether they are UTF-8 or not."""
    if ending in (".parquet", ".arrow"):
        column = pa.array(values, pa.binary())
        column = pa.Array.from_buffers(pa.string(), len(column), column.buffers())
        return (corpora.parquet if ending == ".parquet" else corpora.arrow)([pa.table({"text": column})])
    if ending == ".tar":
        return layouts.tar([values], field="text.txt", encode=bytes)
    lines = b"".join(b'{"text": "%s"}\n' % value for value in values)
    return codec_of(layouts.Layout("jsonl", ending, None, None))[1](lines)


@pytest.mark.parametrize("bad", [b"\xff\xfe", b'", "', b"\n"], ids=["no UTF-8", "no JSON", "half a line"])
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".tar"])
def test_a_bad_text_is_an_error_or_left_out(tmp_path, ending, bad):
    if bad != b"\xff\xfe" and ".jsonl" not in ending:
        pytest.skip("is no JSON")
    url = f"file://{tmp_path}/"
    good = [text.encode() for text in TEXTS]
    for number, values in enumerate([good, [*good[:2], bad, *good[2:]], good]):
        storage.write(f"{url}{number:03}{ending}", text_file(ending, values))
    end = None if ending in (".jsonl.gz", ".jsonl.zst", ".tar") else 1
    with pytest.raises(ERRORS) as raised:
        list(reader(url, columns=["text"], on_error="raise", epochs=1))
    assert f"{url}001" in described(raised.value)
    node = reader(url, columns=["text"], epochs=1)
    assert sorted(row["text"] for row in node) == sorted(2 * list(filter(None, TEXTS)))
    ((place),) = places(node)
    assert (place["first"], place["end"]) == (0, end)
    assert_resumes(lambda: reader(url, columns=["text"]), num_items=9)


# Gone, or another one, since the listing.


@pytest.fixture(params=["disk", "memory", "s3"])
def place(request, tmp_path):
    """A fresh prefix on each kind of store, and its options."""
    if request.param == "s3":
        bucket = request.getfixturevalue("bucket")
        return bucket.url, bucket.storage_options
    return (f"memory://{uuid.uuid4().hex[:12]}/" if request.param == "memory" else f"file://{tmp_path}/"), None


def remove(url, storage_options):
    filesystem, path = fsspec.core.url_to_fs(url, **(storage_options or {}))
    filesystem.rm_file(path)


@pytest.mark.parametrize("change", ["deleted", "replaced", "replaced by a shorter one"])
@pytest.mark.parametrize("name", ["Parquet", "JSON lines, gzip", "Megatron, 32 bits"])
def test_a_file_that_changed_since_it_was_listed_is_an_error_or_left_out(place, name, change):
    url, options = place
    if url.startswith("memory") and change == "replaced":
        pytest.skip("has no versions")
    expected = write(url, name, files_of, storage_options=options)
    listing = list_dataset(url, storage_options=options)
    changed = f"{url}001{'.idx' if 'Megatron' in name else LAYOUTS[name].ending}"
    if change == "deleted":
        remove(changed, options)
    else:
        data = storage.read_whole(changed, options)
        time.sleep(0.02)  # a clock of the disk may be that coarse
        storage.write(changed, data[::-1] if change == "replaced" else data[:20], options)
    strict = reader(url, listing=listing, on_error="raise", epochs=1)
    with pytest.raises(OSError, match=r"001\.") as raised:
        list(strict)
    assert isinstance(raised.value, FileNotFoundError if change == "deleted" else Changed)
    check(url, expected, listing=listing, cuts=None if url.startswith("file") else (2, 5))


def test_a_file_that_goes_while_it_is_read_is_left_out_from_there_on(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BLOCK_BYTES", 1)
    monkeypatch.setattr("ibm_nodes.reader.read_ahead", lambda function, size: None)
    url = f"file://{tmp_path}/"
    rows = layouts.write(url, FILES, LAYOUTS["Parquet"])
    listing = list_dataset(url)

    def run(node, count, delete_at=None):
        found = []
        for number in range(count):
            if number == delete_at:
                (tmp_path / found[-1].url.rpartition("/")[2]).unlink()
            found.append(next(node))
        return found, node.state_dict()

    found, state = run(reader(url, listing=listing), 20, delete_at=4)  # the last but one of a file's three documents
    gone = found[3].url
    (place,) = state["quarantined"]
    assert f"{url}{place['file']}" == gone and (place["first"], place["end"]) == (0, None)
    assert sum(document.url == gone for document in found) < sum(bool(rows[at]) for at in rows if at[0] == gone)
    assert {document.url for document in found[5:]} == {at[0] for at in rows} - {gone}


# Everything above it.


def graph_of(url, listing=None):
    """Graphs of two datasets, one with bad places, through a mix, a packer and a shuffle."""

    def graph(shard, num_shards):
        sources = {
            name: reader(at, shard, num_shards, name=name, vocab_size=VOCAB_SIZE, listing=found)
            for name, at, found in (("bad", url, listing), ("good", f"{url}../good/", None))
        }
        node = Packer(Mixer(sources, weights={"bad": 3, "good": 1}, seed=(0, shard)), seq_len=5, eos_id=1)
        return Shuffler(node, buffer_size=3, seed=(0, shard))

    layouts.write(f"{url}../good/", FILES[:1], LAYOUTS["Arrow"])
    return graph


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("Parquet", of_other_columns),
        ("JSON lines, gzip", cut),
        ("MDS, bytes", beyond_vocabulary),
    ],
)
def test_the_global_stream_is_the_same_at_every_world_size(tmp_path, name, damage):
    url = f"file://{tmp_path}/bad/"
    write(url, name, damage)
    graph = graph_of(url)
    assert_rescales(graph, num_shards=12, num_items=24, cuts=(12,))
    node = Sharder(graph, num_shards=12, rank=0, world_size=1)
    list(itertools.islice(node, 24))
    assert "'file': '001." in str(node.state_dict())


def test_the_global_stream_without_a_file_that_is_gone_is_the_same_at_every_world_size(tmp_path):
    url = f"file://{tmp_path}/bad/"
    layouts.write(url, FILES, LAYOUTS["JSON lines"])
    listing = list_dataset(url)
    (tmp_path / "bad" / "002.jsonl").unlink()
    assert_rescales(graph_of(url, listing), num_shards=12, num_items=24, cuts=(12,))


def test_a_graph_with_bad_places_resumes_after_every_sample(tmp_path):
    url = f"file://{tmp_path}/bad/"
    write(url, "Parquet", cut)
    graph = graph_of(url)
    assert_resumes(lambda: graph(0, 1), num_items=14)
    assert_resumes(
        lambda: Prefetcher(Sharder(graph, num_shards=2, rank=0, world_size=1), prefetch_factor=2), num_items=8
    )


def under(kind, url, tokenizer):
    if kind == "Reader":
        return reader(url, columns=["text"])
    if kind == "Filter":
        return Filter(reader(url, columns=["text"]), lambda row: "e" in row["text"])
    node = Tokenizer(reader(url, columns=["text"]), tokenizer)
    return Mixer({"data": node}, weights={"data": 1}) if kind == "Mixer" else node


@pytest.mark.parametrize("kind", ["Reader", "Filter", "Tokenizer", "Mixer"])
def test_what_was_recorded_stays_left_out_when_the_file_is_mended(tmp_path, kind):
    """The stream is a function of the state; nodes that draw ahead have a state that was taken before the place."""
    tokenizer = texts.save(f"file://{tmp_path}/tokenizer.json")
    url = f"file://{tmp_path}/data/"
    good = text_file(".jsonl", [b"one", b"two e", b"three e"] * 3)
    for number in range(5):
        storage.write(f"{url}{number:03}.jsonl", good)
    storage.write(f"{url}002.jsonl", good.replace(b"three", b"th\xffee", 1))
    node, items, states = under(kind, url, tokenizer), [], []
    for _ in range(80):
        items.append(str(next(node)))
        states.append(node.state_dict())
    has_it = ["'file': '002.jsonl'" in str(state) for state in states]
    assert has_it.index(True) < 45
    assert all(has_it[has_it.index(True) :])
    storage.write(f"{url}002.jsonl", good)
    for count in range(has_it.index(True), len(states), 3):
        node = under(kind, url, tokenizer)
        node.reset(states[count])
        rest = [str(item) for item in itertools.islice(node, 80 - count - 1)]
        assert rest == items[count + 1 :]
    assert not any("002.jsonl" in item for item in items)


def test_a_place_that_was_recorded_is_not_tried_again(tmp_path):
    url = f"file://{tmp_path}/"
    expected = write(url, "Parquet", cut)
    node = reader(url, epochs=3, listing=list_dataset(url))
    first = [next(node) for _ in range(len(expected) + 1)]
    state = node.state_dict()
    assert [place["file"] for place in state["quarantined"]] == ["001.parquet"]
    put(f"{url}001", files_of(LAYOUTS["Parquet"], FILES[1]))
    for again in (node, reader(url, epochs=3, listing=node.listing, on_error="raise")):
        if again is not node:
            again.reset(state)
        rest = list(again)
        assert len(rest) + len(first) == 3 * len(expected)
        assert {(document.url, document.row) for document in rest} == set(expected)
        assert len(places(again)) == 1


def test_a_reader_that_raises_goes_on_as_one_that_leaves_out_and_back(tmp_path):
    url = f"file://{tmp_path}/"
    expected = write(url, "Arrow", of_other_columns)
    node, found = reader(url, epochs=1, on_error="raise"), []
    with pytest.raises(LookupError, match="no column 'tokens'"):
        for document in node:
            found.append(document)
    state = node.state_dict()
    lenient = reader(url, epochs=1)
    lenient.reset(state)
    assert len(found) + len(read(lenient)) == len(expected)
    node.reset(lenient.state_dict())
    assert list(node) == []


# How many.


def write_many(url, num_files=12, num_bad=5):
    for number in range(num_files):
        line = b'{"tokens": [%d, 1]}\n' % number if number < num_files - num_bad else b'{"tokens": [%d, 1}\n' % number
        storage.write(f"{url}{number:03}.jsonl", line)


def test_one_place_more_than_max_errors_is_an_error_that_loses_nothing(tmp_path):
    url = f"file://{tmp_path}/"
    write_many(url)
    found, node = [], reader(url, max_errors=2)
    expected = [document.tokens.tolist() for document in itertools.islice(reader(url), 21)]
    with pytest.raises(
        RuntimeError, match=r"more than max_errors=2 bad places in logical shard 0: .*/0\d\d.jsonl"
    ) as raised:
        while True:
            found.append(next(node).tokens.tolist())
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(RuntimeError, match="max_errors=2"):
        next(node)
    state = node.state_dict()
    assert len(state["quarantined"]) == 2
    more = reader(url, max_errors=5)
    more.reset(state)
    assert found + [document.tokens.tolist() for document in itertools.islice(more, 21 - len(found))] == expected
    assert len(places(more)) == 5


def test_the_stop_does_not_depend_on_the_world_size(tmp_path):
    url = f"file://{tmp_path}/"
    write_many(url, num_files=60, num_bad=8)
    stops = set()
    for world_size in (1, 2, 3, 4, 6, 12):
        failed = []
        for rank in range(world_size):
            node = Sharder(
                lambda shard, num_shards: reader(url, shard, num_shards, max_errors=2),
                num_shards=12,
                rank=rank,
                world_size=world_size,
            )
            for number in range(rank, 240, world_size):
                try:
                    next(node)
                except RuntimeError:
                    failed.append(number)
                    break
        stops.add(min(failed))
    assert len(stops) == 1


def test_a_dataset_of_nothing_but_bad_files_is_an_error_that_says_why_or_ends(tmp_path):
    url = f"file://{tmp_path}/"
    write_many(url, num_files=4, num_bad=4)
    with pytest.raises(
        ValueError, match=r"no token in column 'tokens'.*4 bad places are left out, the first for Value"
    ):
        next(reader(url))
    node = reader(url, epochs=1)
    assert list(node) == []
    assert len(places(node)) == 4


def test_a_shard_whose_part_is_bad_reads_the_whole_of_a_small_dataset(tmp_path):
    url = f"file://{tmp_path}/"
    write_many(url, num_files=4, num_bad=1)
    node = reader(url, shard=3, num_shards=4)
    tokens = [int(next(node).tokens[0]) for _ in range(6)]
    assert sorted(tokens) == [0, 0, 1, 1, 2, 2]
    assert node.state_dict()["whole"] and len(places(node)) == 1
    assert_resumes(lambda: reader(url, shard=3, num_shards=4), num_items=8)
    with pytest.raises(StopIteration):
        next(reader(url, shard=3, num_shards=4, epochs=1))


@pytest.mark.parametrize("options", [{"on_error": "skip"}, {"max_errors": 0}], ids=str)
def test_refuses_what_is_no_policy(options):
    with pytest.raises(ValueError, match='on_error must be "raise" or "quarantine" and max_errors at least 1'):
        reader("memory://x/", **options)


# What exactly is left out.


@pytest.mark.parametrize("name", ["Parquet", "Arrow", "JSON lines", "Megatron, 32 bits", "MDS, bytes"])
def test_of_a_file_that_can_be_split_only_the_bad_block_is_left_out_by_each_who_owns_a_part(
    tmp_path, monkeypatch, name
):
    for module in (parquet, arrow, mds, megatron):
        monkeypatch.setattr(module, "BLOCK_BYTES", 40)
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 200)
    url = f"file://{tmp_path}/"
    rows = corpora.documents([9] * 16)
    layout = LAYOUTS[name]
    all_rows = layouts.write(url, [corpora.every(rows, 4)], layout)
    rows[9][4] = BAD_ID
    put(f"{url}000", files_of(layout, corpora.every(rows, 4)))
    node = reader(url, epochs=2, vocab_size=VOCAB_SIZE)
    found = [document.row for document in node]
    lost = {row for _, row in all_rows} - set(found)
    assert 0 < len(lost) < 10 and list(layout.rows(corpora.every(rows, 4)))[9] in lost
    assert len(found) == 2 * len(set(found))
    (place,) = places(node)
    assert place["end"] == place["first"] + 1
    for num_shards in (3, 16, 40):
        parts = [reader(url, shard, num_shards, epochs=1, vocab_size=VOCAB_SIZE) for shard in range(num_shards)]
        assert {row for _, row in read(*parts)} == set(found)
        recorded = [places(part) for part in parts]
        assert {(each["first"], each["end"]) for part in recorded for each in part} == {(place["first"], place["end"])}
        if num_shards == 40:
            assert sum(map(bool, recorded)) > 1  # neighbours
    assert_resumes(lambda: reader(url, shard=1, num_shards=3, vocab_size=VOCAB_SIZE), num_items=12)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *itertools.product(["JSON lines, gzip", "JSON lines, zstd", "Arrow stream"], [64, 300]),
        ("MDS, zstd", 300),
        ("tar of npy", 3000),
    ],
)
def test_of_a_file_that_cannot_be_split_the_rest_is_left_out(tmp_path, monkeypatch, name, size):
    monkeypatch.setattr(sequential, "CHUNK_BYTES", size)
    url, layout = f"file://{tmp_path}/", LAYOUTS[name]
    batches = corpora.every(corpora.documents([40] * 24), 2)
    layouts.write(url, [batches, FILES[0]], layout)
    batches[6][1][0] = BAD_ID
    data = layout.write(batches)
    storage.write(f"{url}000{layout.ending}", data)
    order = list(layout.rows(batches))
    node = reader(url, epochs=2, vocab_size=VOCAB_SIZE)
    documents = list(node)
    found = {document.row for document in documents if "/000." in document.url}
    assert found == set(order[: len(found)]) and len(found) < 14  # all before it, none after
    assert name == "MDS, zstd" or len(found) > 4
    assert len(documents) == 2 * (len(found) + 3)
    (place,) = places(node)
    assert place["end"] is None and place["file"].startswith("000.")
    for num_shards in (2, 7):
        parts = [reader(url, shard, num_shards, epochs=1, vocab_size=VOCAB_SIZE) for shard in range(num_shards)]
        assert len(read(*parts)) == len(found) + 3
    assert_resumes(lambda: reader(url, vocab_size=VOCAB_SIZE), num_items=20, cuts=range(0, 20, 3))


def test_the_parts_of_a_large_row_group_go_together_from_the_bad_one_on(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "PART_BYTES", 200)
    url = f"file://{tmp_path}/"
    rows = corpora.documents([10] * 40)
    rows[25][3] = BAD_ID
    storage.write(f"{url}0.parquet", corpora.parquet(corpora.tables([rows, rows[:10]]), use_dictionary=False))
    node = reader(url, epochs=1, vocab_size=VOCAB_SIZE)
    found = sorted(document.row for document in node)
    (place,) = places(node)
    assert place["end"] > place["first"] + 1
    first = [row for row in found if row < 40]
    assert first == list(range(len(first))) and 10 < len(first) <= 25
    assert found[len(first) :] == list(range(40, 50))
    assert_resumes(lambda: reader(url, vocab_size=VOCAB_SIZE), num_items=40, cuts=range(0, 40, 3))


# Who is to blame.


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(attempts, "FIRST_BYTE_SECONDS", 0.2)
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 0.3)
    monkeypatch.setattr(attempts, "FIRST_DELAY_SECONDS", 0.02)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(503, "SlowDown"), OSError),
        (Fault(500, "InternalError"), OSError),
        (Fault(after=-1), OSError),
        (Fault(after=-1, then="hang"), OSError),
        (Fault(cut=3), OSError),
        (Fault(403, "AccessDenied"), PermissionError),
        (Fault(400, "InvalidRequest"), OSError),
    ],
    ids=["busy", "broken", "reset", "hang", "short", "denied", "refused"],
)
def test_what_the_store_fails_at_is_an_error_and_never_left_out(bucket, quick, fault, kind):
    rows = layouts.write(bucket.url, FILES, LAYOUTS["Parquet"], bucket.storage_options)
    with FaultProxy(bucket.storage_options["endpoint_url"]) as proxy:
        node = reader(bucket.url, epochs=1, storage_options={**bucket.storage_options, "endpoint_url": proxy.endpoint})
        found = [next(node)]
        proxy.spoil(itertools.repeat(fault))
        with pytest.raises(kind):
            for document in node:
                found.append(document)
        assert places(node) == []
        proxy.spoil([])
        assert read(found, node) == {place: tokens for place, tokens in rows.items() if tokens}
        assert places(node) == []


def test_a_missing_codec_or_client_is_an_error_and_never_left_out(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/"
    write(url, "JSON lines", files_of)

    def opened(file, column):
        raise ImportError("no module for it")

    with pytest.raises(ImportError):
        next(reader(url, format=opened))


def test_a_format_of_ones_own_is_to_blame_for_its_own_errors_alone(tmp_path):
    """What ``file.read`` raises is the store's, also as the cause of another error."""

    class Own:
        splittable, groups = True, np.array([0])

        def __init__(self, file, column):
            self.file, self.spans = file, np.array([0, file.size])

        def size(self, block):
            return 1

        def read(self, block):
            if self.file.key == "1":
                raise OSError("it is no such file")
            try:
                return Lists.of([np.frombuffer(self.file.read(0, self.file.size), np.uint8)], [0])
            except OSError as error:
                raise ValueError("it cannot be read") from error

    url = f"file://{tmp_path}/"
    for number in range(3):
        storage.write(f"{url}{number}", b"abc")
    listing = list_dataset(url, format=Own)
    node = reader(url, format=Own, epochs=1, listing=listing)
    assert len(read(node)) == 2
    assert [place["file"] for place in places(node)] == ["1"]
    (tmp_path / "2").chmod(0)
    (tmp_path / "0").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_read_local", lambda *_: (_ for _ in ()).throw(PermissionError("denied")))
        with pytest.raises(ValueError, match="it cannot be read"):
            list(reader(url, format=Own, epochs=1, listing=listing))


def test_what_was_spoiled_on_its_way_is_read_once_more_and_not_left_out(tmp_path):
    url = f"file://{tmp_path}/"
    expected = write(url, "JSON lines, gzip", files_of)
    attempts = []

    class Spoiled(sequential.SequentialFile):
        def read(self, block):
            attempts.append(block)
            if len(attempts) % 2:
                raise ValueError("it was spoiled")
            return super().read(block)

    def opened(file, column):
        return Spoiled(file, lambda: jsonl.LineDecoder(column, file.url))

    node = reader(url, format=opened, epochs=1)
    assert len(read(node)) == len(expected) + 3
    assert len(attempts) == 6 and places(node) == []


def test_a_length_that_no_memory_has_is_the_files_fault_and_little_memory_is_not():
    assert quarantine.is_of_data(pa.ArrowMemoryError("malloc of size 281474976710848 failed"))
    assert not quarantine.is_of_data(pa.ArrowMemoryError("malloc of size 4096 failed"))
    assert not quarantine.is_of_data(MemoryError())
    assert not quarantine.is_of_data(TimeoutError("late"))


# What is told.


def test_each_place_is_logged_once_with_its_name_and_cause(tmp_path, caplog):
    url = f"file://{tmp_path}/"
    write(url, "Parquet", cut)
    node = Sharder(lambda shard, num_shards: reader(url, shard, num_shards), num_shards=8, rank=0, world_size=1)
    with caplog.at_level(logging.WARNING):
        list(itertools.islice(node, 60))
    (record,) = [record for record in caplog.records if record.name.startswith("ibm_nodes")]
    assert "dataset 'data' is read without all blocks of " in record.getMessage()
    assert f"{url}001.parquet" in record.getMessage() and "was cut off" in record.getMessage()


def test_stats_count_the_places_of_each_dataset(tmp_path):
    url = f"file://{tmp_path}/bad/"
    write(url, "Parquet", cut)
    node = Sharder(graph_of(url), num_shards=2, rank=0, world_size=1)
    with Loader(node) as loader:
        list(itertools.islice(loader, 30))
        found = stats(loader)["datasets"]
    assert found["good"]["quarantined"] == 0 < found["bad"]["quarantined"] <= 2


def test_a_run_with_bad_files_saves_what_it_left_out(tmp_path, ibm_nodes):
    url = f"file://{tmp_path}/bad/"
    rows = [corpora.documents([50] * 30, first=30 * number) for number in range(3)]
    layouts.write(url, [corpora.every(part, 5) for part in rows], LAYOUTS["Parquet"])
    path = tmp_path / "bad" / "001.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    flags = ["--data", f"web={url}", "--weight", "web=1", "--seq-len", "64", "--eos-id", "1", "--num-shards", "4"]
    flags += ["--global-batch-size", "4", "--steps", "6", "--checkpoint", f"file://{tmp_path}/run", "--json"]
    code, out, error = ibm_nodes("run", "pretrain", *flags)
    assert code == 1 and "001.parquet" in error
    code, out, _ = ibm_nodes("run", "pretrain", *flags, "--on-error", "quarantine", "--max-errors", "3")
    assert code == 0
    counted = json.loads(out)["datasets"]["web"]["quarantined"]
    assert counted > 0
    code, out, _ = ibm_nodes("checkpoint", "show", f"file://{tmp_path}/run")
    assert code == 0
    shards = f"{counted} logical shard{'s' if counted > 1 else ''}"
    assert f"quarantined of web: all blocks of 001.parquet, in {shards}: ValueError: " in out
    code, out, _ = ibm_nodes("checkpoint", "show", f"file://{tmp_path}/run", "--json")
    (place,) = json.loads(out)["newest"]["quarantined"]
    reason = place.pop("reason")
    assert place == {"dataset": "web", "file": "001.parquet", "first": 0, "end": None, "shards": counted}
    assert "does not end with" in reason


# Checksums.


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"data_page_version": "2.0"}], ids=str)
def test_no_change_of_a_parquet_page_with_a_checksum_goes_unseen(tmp_path, options):
    url, rng = f"file://{tmp_path}/", random.Random(0)
    rows = corpora.documents([30, 0, 7, 200, 1] * 4)
    data = corpora.parquet(corpora.tables([rows]), write_page_checksum=True, use_dictionary=False, **options)
    chunk = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(0)
    begin = chunk.data_page_offset + 80  # after the header of the only page, which the checksum leaves out
    end = chunk.data_page_offset + chunk.total_compressed_size
    for _ in range(60):
        damaged = bytearray(data)
        length = rng.choice([1, 4, 50])
        at = rng.randrange(begin, end - length)
        damaged[at : at + length] = bytes(byte ^ rng.randrange(1, 256) for byte in damaged[at : at + length])
        storage.write(f"{url}0.parquet", bytes(damaged))
        with pytest.raises(OSError, match="CRC checksum verification failed"):
            list(reader(url, on_error="raise", epochs=1))
        assert read(reader(url, epochs=1)) == {}


def test_a_footer_that_refers_beyond_the_end_is_the_files_fault(tmp_path):
    url = f"file://{tmp_path}/"
    files = layouts.megatron([corpora.documents([3, 4])])
    index = bytearray(files[".idx"])
    index[18:26] = struct.pack("<Q", 1 << 40)
    put(f"{url}0", files | {".idx": bytes(index)})
    node = reader(url, epochs=1)
    assert list(node) == [] and len(places(node)) == 1
