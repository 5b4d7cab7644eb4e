"""Datasets whose files change while a run is stopped: refused by name, kept as they were, or begun again."""

import itertools
import json
import os
from functools import partial

import corpora
import pytest
import torch
from sources import same, stored

from ibm_nodes import (
    Batcher,
    Filter,
    Listing,
    Loader,
    Mixer,
    Packer,
    Prefetcher,
    Reader,
    Sharder,
    Shuffler,
    checkpoint,
    list_dataset,
    load_recipe,
    storage,
)
from ibm_nodes.state import merge
from ibm_nodes.trace import trace

NUM_SHARDS = 12
LENGTHS = [3, 9, 0, 21, 5, 13]


def rows(first, count):
    return corpora.documents([LENGTHS[number % 6] for number in range(count)], first=first)


def put(url, name, first, count=40):
    storage.write(f"{url}{name}", corpora.arrow(corpora.tables(corpora.every(rows(first, count), 7))))


def path(url, name):
    return f"{url.removeprefix('file://')}{name}"


@pytest.fixture
def url(tmp_path):
    url = f"file://{tmp_path}/web/"
    for number in range(5):
        put(url, f"{number:03}.arrow", 40 * number)
    return url


@pytest.fixture
def book(tmp_path):
    return corpora.write(f"file://{tmp_path}/book/", [[rows(500, 30)]], "parquet")


def graph(shard, num_shards, *, url, book, on_change="error", keep=None, **more):
    """Two datasets, the first through a filter whose own state counts what it took."""
    options = {"shard": shard, "num_shards": num_shards, "seed": 3}
    web = Filter(Reader(url, name="web", on_change=on_change, **options, **more), lambda item: len(item.tokens) != 9)
    node = Mixer({"web": web, "book": Reader(book, name="book", **options)}, weights={"web": 3, "book": 1}, seed=shard)
    return Shuffler(Packer(node, seq_len=16, eos_id=1), buffer_size=3, seed=(0, shard))


def loaders(world_size, num_shards=NUM_SHARDS, batch=12, **more):
    group = []
    for rank in range(world_size):
        node = Sharder(partial(graph, **more), num_shards=num_shards, rank=rank, world_size=world_size)
        group.append(Loader(Prefetcher(Batcher(node, batch_size=batch // world_size), prefetch_factor=2)))
    return group


def steps(group, count):
    """Global batches: samples in the order of the global stream, and the documents that they are of."""
    found = []
    for _ in range(count):
        batches = [next(iter(loader)) for loader in group]
        found += [sample for samples in zip(*batches, strict=True) for sample in samples]
    return found


def close(group):
    for loader in group:
        loader.close()


def save(group, target, step):
    for loader in group:
        checkpoint.save(loader, target, step=step).result(30)


def load(group, target):
    for loader in group:
        checkpoint.load(loader, target)


def run(target, world_size, count, **more):
    """Loads what is saved at a target, if anything, and draws."""
    group = loaders(world_size, **more)
    if checkpoint.latest(target) is not None:
        load(group, target)
    try:
        return steps(group, count)
    finally:
        close(group)


@pytest.fixture
def saved(url, book, tmp_path):
    """A run of four steps that two ranks saved after the second one: where, and its samples."""
    target = f"file://{tmp_path}/saves"
    group = loaders(2, url=url, book=book)
    samples = steps(group, 2)
    save(group, target, 2)
    samples += steps(group, 2)
    close(group)
    return target, samples


def test_each_listing_is_saved_once_by_one_rank_and_outlives_its_steps(url, book, tmp_path):
    target, group, first = f"file://{tmp_path}/saves", loaders(3, url=url, book=book), None
    for step in range(1, 5):
        steps(group, 1)
        for loader in group:
            checkpoint.save(loader, target, step=step, keep=1).result(30)
        names = sorted(os.listdir(tmp_path / "saves" / "listings"))
        times = {name: os.stat(tmp_path / "saves" / "listings" / name).st_mtime_ns for name in names}
        first = first or times
        assert times == first
    close(group)
    assert names == sorted(f"{list_dataset(each).digest}.jsonl.gz" for each in (url, book))
    assert 1 not in {found.step for found in checkpoint.list_saved(target)}


def test_a_saved_listing_is_the_same_wherever_the_files_lie_and_small(tmp_path, url):
    names = [f"part-{number:06}-{number * 7919:08x}.parquet" for number in range(50_000)]
    objects = [storage.Object(f"s3://a/{name}", name, 10**9 + 37 * n, f'"etag{n}"') for n, name in enumerate(names)]
    moved = [item._replace(url=f"s3://b/x/{item.key}", version=None) for item in objects]
    data = Listing("s3://a/", objects).encode()
    assert data == Listing("s3://b/x/", moved[::-1]).encode()
    assert len(data) < 16 * len(names)


def test_a_change_is_refused_with_the_names_of_the_files(url, book, saved):
    target, _ = saved
    put(url, "000b.arrow", 900)
    put(url, "zzz.arrow", 950)
    os.unlink(path(url, "003.arrow"))
    put(url, "001.arrow", 40, 39)
    with pytest.raises(ValueError) as caught:
        run(target, 2, 1, url=url, book=book)
    text = str(caught.value)
    size = os.stat(path(url, "001.arrow")).st_size
    assert text.startswith("dataset 'web' was saved with 5 files of ")
    assert "added 000b.arrow, zzz.arrow; removed 003.arrow; of another size 001.arrow (" in text
    assert f" bytes, now {size})" in text
    assert 'on_change="keep"' in text and '"restart"' in text
    assert "book" not in text


def test_many_names_are_cut_short(url, book, saved):
    target, _ = saved
    for number in range(20):
        put(url, f"new-{number:02}.arrow", 900, 1)
    with pytest.raises(ValueError, match=r"added new-00.arrow, new-01.arrow, new-02.arrow, new-03.arrow and 16 more\."):
        run(target, 2, 1, url=url, book=book)


def test_logical_shards_that_were_not_visited_take_the_files_of_the_others(url, book, tmp_path):
    target = f"file://{tmp_path}/early"
    group = loaders(1, num_shards=24, url=url, book=book)
    steps(group, 1)
    save(group, target, 1)
    close(group)
    put(url, "zzz.arrow", 950)
    with pytest.raises(ValueError, match="added zzz.arrow"):
        run(target, 1, 1, num_shards=24, url=url, book=book)
    found = run(target, 1, 60, num_shards=24, url=url, book=book, on_change="keep")
    seen = {place[1] for sample in found for place in sample.documents if place[0] == "web"}
    assert seen == {f"{url}{number:03}.arrow" for number in range(5)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_kept_data_go_on_as_if_nothing_had_been_added(url, book, saved, world_size):
    target, samples = saved
    put(url, "000b.arrow", 900)
    put(url, "zzz.arrow", 950)
    found = run(target, world_size, 2, url=url, book=book, on_change="keep")
    assert same(found, samples[24:])


def test_kept_data_are_saved_and_kept_again_elsewhere(url, book, saved, tmp_path):
    target, samples = saved
    put(url, "zzz.arrow", 950)
    group, elsewhere = loaders(3, url=url, book=book, on_change="keep"), f"file://{tmp_path}/elsewhere"
    load(group, target)
    assert same(steps(group, 1), samples[24:36])
    save(group, elsewhere, 3)
    close(group)
    assert same(run(elsewhere, 2, 1, url=url, book=book, on_change="keep"), samples[36:])
    os.unlink(path(url, "zzz.arrow"))
    assert same(run(elsewhere, 2, 1, url=url, book=book), samples[36:])


def test_what_is_kept_must_be_there(url, book, saved):
    target, _ = saved
    put(url, "zzz.arrow", 950)
    os.unlink(path(url, "003.arrow"))
    put(url, "001.arrow", 40, 39)
    with pytest.raises(ValueError, match=r"'web' cannot be kept .*missing 003.arrow; of another size 001.arrow \("):
        run(target, 2, 1, url=url, book=book, on_change="keep")


def test_keeping_changes_nothing_where_nothing_has_changed(url, book, saved):
    target, samples = saved
    assert same(run(target, 2, 2, url=url, book=book, on_change="keep"), samples[24:])
    assert same(run(target, 2, 2, url=url, book=book, on_change="restart"), samples[24:])


class TestBeginningAgain:
    @pytest.fixture
    def changed(self, url, saved):
        target, _ = saved
        os.unlink(path(url, "002.arrow"))
        put(url, "zzz.arrow", 950)
        return target

    def test_it_is_the_same_at_every_world_size_and_through_every_resume(self, url, book, changed, tmp_path):
        options = {"url": url, "book": book, "on_change": "restart"}
        expected = run(changed, 1, 6, **options)
        for world_size in (2, 3, 4, 6, 12):
            assert same(run(changed, world_size, 6, **options), expected)
        for cut, (before, after) in zip(range(1, 6), itertools.cycle([(1, 3), (4, 2)])):
            target, group = f"file://{tmp_path}/cut{cut}", loaders(before, **options)
            load(group, changed)
            steps(group, cut)
            save(group, target, cut)
            close(group)
            assert same(run(target, after, 6 - cut, **options), expected[12 * cut :])

    def test_every_document_of_the_new_files_comes_once_a_pass_and_none_is_lost_at_the_seam(self, url, book, changed):
        (loader,) = loaders(1, url=url, book=book, on_change="restart")
        load([loader], changed)
        old = set(storage_names(url, "002.arrow"))
        epochs = {}
        while len(epochs.get(0, ())) < 128 or 1 not in epochs:
            for sample in steps([loader], 1):
                for name, where, row, offset in sample.documents:
                    if name == "web" and where not in old and offset == 0:
                        epochs.setdefault(0, set()).add((where, row))
            state = loader.state_dict()
            passes = [reader["epoch"] for reader in readers(state)]
            if min(passes) >= 2:  # nor does anything of the first wait in a buffer any more
                epochs[1] = True
        close([loader])
        wanted = {place for place, tokens in corpora.read(url).items() if tokens and len(tokens) != 9}
        assert epochs[0] >= wanted

    def test_its_places_begin_at_nothing_and_its_counts_go_on(self, url, book):
        group = loaders(1, url=url, book=book)
        steps(group, 30)
        state = stored(group[0].state_dict())
        close(group)
        before = readers(state)
        assert all(reader["epoch"] >= 1 for reader in before)
        put(url, "zzz.arrow", 950)
        (loader,) = loaders(1, url=url, book=book, on_change="restart")
        loader.load_state_dict(state)
        steps([loader], 1)
        digest = list_dataset(url).digest
        for reader, was in zip(readers(loader.state_dict()), before, strict=True):
            assert digest in reader["settings"]["listing"]
            assert reader["epoch"] == 0 and reader["passes"] < 1
            assert reader["skipped"] >= was["skipped"] > 0
        close([loader])

    def test_the_other_datasets_keep_their_places(self, url, book, changed):
        (loader,) = loaders(1, url=url, book=book, on_change="restart")
        load([loader], changed)
        was = {reader["settings"]["shard"]: reader for reader in readers(loader.state_dict(), "book")}
        steps([loader], 1)
        for reader in readers(loader.state_dict(), "book"):
            before = was[reader["settings"]["shard"]]
            assert (reader["epoch"], reader["file"], reader["block"]) >= (
                before["epoch"],
                before["file"],
                before["block"],
            )
        close([loader])

    def test_a_second_change_begins_it_once_more(self, url, book, changed, tmp_path):
        options = {"url": url, "book": book, "on_change": "restart"}
        group, target = loaders(2, **options), f"file://{tmp_path}/twice"
        load(group, changed)
        steps(group, 1)
        save(group, target, 3)
        close(group)
        put(url, "zzzz.arrow", 990)
        expected = run(target, 1, 3, **options)
        assert same(run(target, 3, 3, **options), expected)
        seen = {place[1] for sample in run(target, 1, 40, **options) for place in sample.documents}
        assert any(name.endswith("zzzz.arrow") for name in seen)

    def test_epochs_do_not_go_with_it(self, url):
        with pytest.raises(ValueError, match='on_change="restart" must come with epochs=None, got 2'):
            Reader(url, shard=0, num_shards=1, epochs=2, on_change="restart")


def storage_names(url, *names):
    return [f"{url}{name}" for name in names]


def readers(state, name="web"):
    """The states of a dataset's readers, in the order of their logical shards."""
    found = []

    def look(value):
        if isinstance(value, dict):
            if value.get("settings", {}).get("name") == name:
                found.append(value)
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            for each in value:
                look(each)

    look(state)
    return sorted(found, key=lambda reader: reader["settings"]["shard"])


class TestWithoutASavedListing:
    @pytest.fixture
    def state(self, url):
        node = Reader(url, shard=0, num_shards=1)
        next(node)
        return stored(node.state_dict())

    @pytest.mark.parametrize("on_change", ["error", "keep"])
    def test_the_error_says_that_only_digests_differ_and_how_to_see_more(self, url, state, on_change):
        put(url, "zzz.arrow", 950)
        node = Reader(url, shard=0, num_shards=1, on_change=on_change)
        node.reset(state)
        with pytest.raises(ValueError) as caught:
            next(node)
        assert "5 files of " in str(caught.value) and "now there are 6 files" in str(caught.value)
        assert "only the digests of listings are in a state" in str(caught.value)
        assert f"ibm-nodes list {url} --out FILE" in str(caught.value)

    def test_a_listing_of_then_keeps_the_data(self, url, tmp_path):
        (expected,) = [list(itertools.islice(Reader(url, shard=0, num_shards=1), 30))]
        for given in (list_dataset(url), f"file://{tmp_path}/web.listing"):
            list_dataset(url).write(f"file://{tmp_path}/web.listing")
            node = Reader(url, shard=0, num_shards=1)
            head = [next(node) for _ in range(10)]
            state = stored(node.state_dict())
            put(url, "zzz.arrow", 950)
            node = Reader(url, shard=0, num_shards=1, listing=given)
            node.reset(state)
            assert same(head + [next(node) for _ in range(20)], expected)
            os.unlink(path(url, "zzz.arrow"))

    def test_a_damaged_one_is_as_good_as_none(self, url, book, saved, caplog):
        target, _ = saved
        put(url, "zzz.arrow", 950)
        for name in os.listdir(path(f"{target}/", "listings")):
            storage.write(f"{target}/listings/{name}", b"\x1f\x8bnonsense")
        with pytest.raises(ValueError, match="only the digests"):
            run(target, 1, 1, url=url, book=book)
        assert "a saved listing is left out: " in caplog.text


def test_one_of_the_three_ways_must_be_given(url):
    with pytest.raises(ValueError, match="on_change must be one of error, keep, restart, got 'ignore'"):
        Reader(url, shard=0, num_shards=1, on_change="ignore")


@pytest.fixture
def recipe(url, book):
    return partial(
        load_recipe("pretrain"),
        {"web": url, "book": book},
        weights={"web": 3, "book": 1},
        seq_len=16,
        eos_id=1,
        global_batch_size=12,
        num_shards=12,
    )


def draw(loader):
    return [batch["input_ids"] for batch in itertools.islice(loader, 60)]


def test_a_recipe_takes_it_by_name(recipe, url, tmp_path):
    target = f"file://{tmp_path}/saves"
    with recipe() as loader:
        next(iter(loader))
        checkpoint.save(loader, target, step=1).result(30)
        expected = draw(loader)
    put(url, "zzz.arrow", 950)
    with recipe() as loader:
        checkpoint.load(loader, target)
        with pytest.raises(ValueError, match="added zzz.arrow"):
            next(iter(loader))
    with recipe(on_change={"web": "keep"}) as loader:
        checkpoint.load(loader, target)
        assert same(draw(loader), expected)
    with recipe(on_change={"web": "restart"}) as loader:
        checkpoint.load(loader, target)
        found = draw(loader)
    new = {id for number in range(950, 990) for id in range(1000 * number, 1000 * number + 21)}
    assert new & set(torch.stack(found).flatten().tolist())
    assert not new & set(torch.stack(expected).flatten().tolist())
    with pytest.raises(ValueError, match=r"on_change must be for the datasets \['book', 'web'\], got \['code'\] too"):
        recipe(on_change={"code": "keep"})


def test_a_step_of_kept_data_can_be_traced(recipe, url, tmp_path):
    target = f"file://{tmp_path}/saves"
    with recipe() as loader:
        next(iter(loader))
        checkpoint.save(loader, target, step=1).result(30)
    with recipe() as loader:
        expected = trace(loader, step=2, global_batch_size=12, url=target)
    put(url, "zzz.arrow", 950)
    with recipe(on_change={"web": "keep"}) as loader:
        found = trace(loader, step=2, global_batch_size=12, url=target)
    assert [traced.sample.documents for traced in found.samples] == [
        traced.sample.documents for traced in expected.samples
    ]


def test_the_command_line_takes_it(ibm_nodes, url, tmp_path):
    flags = ["run", "pretrain", "--data", f"web={url}", "--weight", "web=1", "--seq-len", 16, "--eos-id", 1]
    flags += ["--global-batch-size", 12, "--num-shards", 12, "--checkpoint", f"file://{tmp_path}/saves", "--steps", 1]
    assert ibm_nodes(*flags)[0] == 0
    put(url, "zzz.arrow", 950)
    code, _, error = ibm_nodes(*flags)
    assert code == 1
    assert "added zzz.arrow" in error
    code, out, _ = ibm_nodes(*flags, "--on-change", "web=keep", "--json")
    assert code == 0
    assert json.loads(out)["steps"] == 1


def test_merged_states_go_on_the_same_way(url, book):
    """The states themselves, without any file of a checkpoint."""
    group = [
        Sharder(partial(graph, url=url, book=book), num_shards=NUM_SHARDS, rank=rank, world_size=2) for rank in range(2)
    ]
    for node in group:
        node.reset()
        for _ in range(12):
            next(node)
    state = stored(merge([node.state_dict() for node in group]))
    put(url, "zzz.arrow", 950)
    streams = []
    for world_size in (1, 3):
        ranks = [
            Sharder(
                partial(graph, url=url, book=book, on_change="restart"),
                num_shards=NUM_SHARDS,
                rank=rank,
                world_size=world_size,
            )
            for rank in range(world_size)
        ]
        for node in ranks:
            node.reset(state)
        streams.append([next(ranks[number % world_size]) for number in range(48)])
    assert same(*streams)
