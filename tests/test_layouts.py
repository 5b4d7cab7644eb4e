"""The same documents, whatever format and layout they lie in and whatever store they come from."""

import itertools
import random
from collections import Counter

import corpora
import layouts
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS
from sources import stored

from ibm_nodes import Reader
from ibm_nodes.formats import arrow, jsonl, mds, megatron, parquet, sequential

every_layout = pytest.mark.parametrize("name", LAYOUTS)
SIZES = (  # and the least that each is worth a try
    (arrow, "BLOCK_BYTES", 1),
    (arrow, "PART_BYTES", 60),
    (parquet, "PART_BYTES", 1),
    (jsonl, "BLOCK_BYTES", 8),
    (jsonl, "LOOK_AHEAD_BYTES", 8),
    (sequential, "CHUNK_BYTES", 300),
    (megatron, "BLOCK_BYTES", 8),
    (megatron, "WINDOW", 1),
    (mds, "BLOCK_BYTES", 1),
    (mds, "HEAD_BYTES", 1),
)


def small_blocks(monkeypatch, size):
    """Makes blocks of a few rows, so that a small file has many."""
    for module, name, least in SIZES:
        monkeypatch.setattr(module, name, max(size, least))


def read(url, num_shards, **more):
    return [
        document
        for shard in range(num_shards)
        for document in Reader(url, shard=shard, num_shards=num_shards, epochs=1, **more)
    ]


def check_once(url, rows, num_shards, **more):
    """All logical shards together give every document that has tokens once, with its tokens, object and row."""
    documents = read(url, num_shards, **more)
    found = Counter((document.url, document.row) for document in documents)
    assert found == Counter(place for place, tokens in rows.items() if tokens)
    for document in documents:
        assert document.tokens.tolist() == rows[document.url, document.row]


def some_files(seed=0):
    rng = random.Random(seed)
    rows = corpora.documents([rng.choice([0, 1, 3, 9, 30, 200]) for _ in range(160)])
    return [corpora.every(part, 9) for part in corpora.cut(rows, [1, 60])]


@pytest.fixture(params=["file", "memory", "s3"])
def root(request, tmp_path):
    """A prefix of each store, and its options."""
    if request.param == "s3":
        bucket = request.getfixturevalue("bucket")
        return f"{bucket.url}data/", bucket.storage_options
    return (f"file://{tmp_path}/" if request.param == "file" else f"memory://{tmp_path.name}/"), None


@every_layout
def test_gives_the_same_documents_from_every_layout_and_store(root, name):
    url, options = root
    rows = layouts.write(url, some_files(), LAYOUTS[name], options)
    assert list(rows.values()) == [row for batches in some_files() for row in layouts.flat(batches)]
    for num_shards in (1, 5):
        check_once(url, rows, num_shards, storage_options=options)


@every_layout
@pytest.mark.parametrize("size", [1, 1000])
def test_every_row_has_one_owner_in_small_blocks_of_every_layout(tmp_path, monkeypatch, name, size):
    small_blocks(monkeypatch, size)
    url = f"file://{tmp_path}/"
    files = [batches[:2] for batches in some_files(seed=1)]
    rows = layouts.write(url, files, LAYOUTS[name])
    for num_shards in (1, 5):
        check_once(url, rows, num_shards)


@every_layout
def test_every_row_has_one_owner_among_far_more_shards_than_rows(tmp_path, name):
    url = f"file://{tmp_path}/"
    rows = layouts.write(url, [[corpora.documents([3, 1])], [corpora.documents([2], first=5)]], LAYOUTS[name])
    check_once(url, rows, 97)
    wholes = [next(Reader(url, shard=shard, num_shards=97)).tokens.tolist() for shard in range(97)]
    assert {tuple(tokens) for tokens in wholes} == {tuple(tokens) for tokens in rows.values()}


@every_layout
def test_resuming_at_any_document_equals_the_uninterrupted_reading(tmp_path, monkeypatch, name):
    small_blocks(monkeypatch, 1000)
    url = f"file://{tmp_path}/"
    layouts.write(url, [batches[:2] for batches in some_files(seed=2)], LAYOUTS[name])
    for shard, num_shards in ((0, 1), (2, 3)):

        def build(shard=shard, num_shards=num_shards):
            return Reader(url, shard=shard, num_shards=num_shards, epochs=2)

        whole = [plain(document) for document in build()]
        assert len(whole) > 8
        reader = build()
        for position in range(0, len(whole), 3):
            resumed = build()
            resumed.reset(stored(reader.state_dict()))
            ahead = len(whole) if position % 7 == 0 else position + 3
            assert [plain(d) for d in itertools.islice(resumed, ahead - position)] == whole[position:ahead]
            for _ in range(3):
                next(reader, None)


def plain(document):
    return document.tokens.tolist(), *document[1:]


@st.composite
def datasets(draw):
    """A layout, documents cut into files and batches, the size of blocks, a number of shards, a place to stop at."""
    lengths = st.lists(st.lists(st.lists(st.integers(0, 12), max_size=6), max_size=4), min_size=1, max_size=3)
    shape = draw(lengths.filter(lambda shape: any(length for file in shape for batch in file for length in batch)))
    rows = iter(corpora.documents([length for file in shape for batch in file for length in batch]))
    files = [[[next(rows) for _ in batch] for batch in file] for file in shape]
    name = draw(st.sampled_from(list(LAYOUTS)))
    return name, files, draw(st.sampled_from([8, 40, 200, 5000])), draw(st.integers(1, 12)), draw(st.integers(0, 20))


def check_any(factory, dataset):
    """No token is lost or repeated, also when every shard stops somewhere and goes on from its state."""
    name, files, size, num_shards, cut = dataset
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, size)
        url = f"file://{factory.mktemp('any')}/"
        rows = layouts.write(url, files, LAYOUTS[name])
        found = Counter()
        for shard in range(num_shards):
            reader = Reader(url, shard=shard, num_shards=num_shards, epochs=1)
            documents = list(itertools.islice(reader, cut))
            resumed = Reader(url, shard=shard, num_shards=num_shards, epochs=1)
            resumed.reset(stored(reader.state_dict()))
            for document in [*documents, *resumed]:
                found.update((document.url, document.row, token) for token in document.tokens.tolist())
        assert found == Counter((*place, token) for place, tokens in rows.items() for token in tokens)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(dataset=datasets())
def test_no_token_is_lost_or_repeated_whatever_the_layout(tmp_path_factory, dataset):
    check_any(tmp_path_factory, dataset)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(dataset=datasets())
def test_no_token_is_lost_or_repeated_in_a_long_search_over_layouts(tmp_path_factory, dataset):
    check_any(tmp_path_factory, dataset)
