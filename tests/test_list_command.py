"""Listings in files: a start that lists nothing reads what one that lists does."""

import gzip
import itertools
import json
import os
import posixpath
from functools import partial

import corpora
import layouts
import pytest
import torch
from fault_proxy import FaultProxy
from sources import read_all, same

from ibm_nodes import Batcher, Loader, Prefetcher, Reader, Sharder, list_dataset, load_recipe, storage
from ibm_nodes.listing import StoredObject

ODD = ["a b/c#.arrow", "p%20q.arrow", "r=1/é日.arrow", "plus+?.arrow", "x/.hidden/y.arrow", "_SUCCESS"]

HEAD = b'{"format": "ibm_nodes listing", "version": 1, "url": "", "is_one": false, "objects": %d, "companions": 0}\n'


def write(url, options=None, first=0):
    files = [corpora.every(corpora.documents([5, 0, 30] * 20, first=first + 60 * number), 9) for number in range(4)]
    return corpora.write(url, files, "arrow", options)


def places(listing):
    return [(item.url, item.key, item.size, item.version) for item in (*listing.objects, *listing.companions)]


@pytest.fixture(params=["file", "memory", "s3"])
def place(request, tmp_path):
    """A prefix, a file beside it, and fsspec's options."""
    if request.param == "s3":
        bucket = request.getfixturevalue("bucket")
        return f"{bucket.url}data/", f"{bucket.url}the.listing", bucket.storage_options
    root = {"file": f"file://{tmp_path}", "memory": f"memory://{tmp_path}"}[request.param]
    return f"{root}/data/", f"{root}/the.listing", None


def test_a_listing_goes_through_a_file_with_odd_keys_and_versions(place):
    url, file, options = place
    for key in ODD:
        storage.write(url + key, b"data", options)
    listed = list_dataset(url, storage_options=options)
    listed.write(file, options)
    read = list_dataset(url, listing=file, storage_options=options)
    assert places(read) == places(listed)
    assert len(read.objects) == 4
    assert str(read) == str(listed)
    assert read_all(read) == read_all(listed)


def test_a_name_that_is_not_utf_8_goes_through_a_file(tmp_path):
    with open(os.fsencode(f"{tmp_path}/") + b"\xff.arrow", "wb") as file:
        file.write(b"data")
    listed = list_dataset(f"file://{tmp_path}/")
    listed.write(f"file://{tmp_path}/the.listing")
    assert read_all(list_dataset(listed.url, listing=f"file://{tmp_path}/the.listing")) == read_all(listed)


@pytest.mark.parametrize("place", ["file", "s3"], indirect=True)  # the memory has no versions
def test_an_object_that_is_replaced_after_it_was_listed_is_noticed(place):
    url, file, options = place
    storage.write(f"{url}a.arrow", b"data", options)
    list_dataset(url, storage_options=options).write(file, options)
    storage.write(f"{url}a.arrow", b"DATA", options)
    listing = list_dataset(url, listing=file, storage_options=options)
    with pytest.raises(OSError, match="has changed since it was listed"):
        listing.read(listing.objects[0], 0, 4)


def test_the_files_may_have_moved_since(tmp_path):
    url = write(f"file://{tmp_path}/here/")
    list_dataset(url).write(f"file://{tmp_path}/the.listing")
    corpora.copy(url, f"file://{tmp_path}/there")
    options = {"name": "web", "shard": 1, "num_shards": 3, "epochs": 1}
    moved = list(Reader(f"file://{tmp_path}/there", listing=f"file://{tmp_path}/the.listing", **options))
    assert [document.tokens.tolist() for document in moved] == [
        document.tokens.tolist() for document in Reader(url, **options)
    ]
    assert {posixpath.dirname(document.url) for document in moved} == {f"file://{tmp_path}/there"}


@pytest.mark.parametrize("name", ["", "000.bin"])
def test_companions_and_single_files_go_with_it(tmp_path, name):
    layout = layouts.LAYOUTS["Megatron, 32 bits"]
    layouts.write(f"file://{tmp_path}/data/", [[corpora.documents([4, 9, 2])]], layout)
    url, file = f"file://{tmp_path}/data/{name}", f"file://{tmp_path}/the.listing"
    listed = list_dataset(url)
    listed.write(file)
    read = list_dataset(url, listing=file)
    assert places(read) == places(listed)
    assert StoredObject(read, read.objects[0]).companion().size
    options = {"shard": 0, "num_shards": 1, "epochs": 1}
    assert same(list(Reader(url, listing=file, **options)), list(Reader(url, **options)))


def test_a_listing_of_one_file_is_of_that_file_alone(tmp_path):
    storage.write(f"file://{tmp_path}/a.arrow", b"data")
    list_dataset(f"file://{tmp_path}/a.arrow").write(f"file://{tmp_path}/the.listing")
    with pytest.raises(ValueError, match=r"b.arrow cannot be read by a listing of the one file 'a.arrow'"):
        list_dataset(f"file://{tmp_path}/b.arrow", listing=f"file://{tmp_path}/the.listing")


def test_formats_choose_from_a_file_as_they_do_from_a_store(tmp_path):
    url, file = write(f"file://{tmp_path}/data/"), f"file://{tmp_path}/the.listing"
    storage.write(f"{url}more.jsonl", b'{"tokens": [1]}\n')
    list_dataset(url).write(file)
    for form in (None, "jsonl", "arrow"):
        assert places(list_dataset(url, format=form, listing=file)) == places(list_dataset(url, format=form))
    with pytest.raises(FileNotFoundError, match=rf"no data under {url} in the listing {file}: it has 5 other objects"):
        list_dataset(url, format="mds", listing=file)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        gzip.compress(b""),
        gzip.compress(b"[]"),
        gzip.compress(b'{"format": "another"}'),
        gzip.compress(b'{"format": "ibm_nodes listing", "version": 2}'),
        gzip.compress(HEAD % 2 + b'["a", 1]\n'),
        gzip.compress(HEAD % 1 + b'["a", -1]\n'),
    ],
    ids=["nothing", "nonsense", "nothing inside", "a list", "another format", "newer", "cut off", "a negative size"],
)
def test_what_is_no_listing_is_an_error_that_names_it(tmp_path, data):
    (tmp_path / "the.listing").write_bytes(data)
    with pytest.raises(ValueError, match="the.listing is no listing, is damaged, or was written by a newer ibm_nodes"):
        list_dataset(f"file://{tmp_path}/data/", listing=f"file://{tmp_path}/the.listing")


def test_every_cut_of_a_listing_is_noticed(tmp_path):
    list_dataset(write(f"file://{tmp_path}/data/")).write(f"file://{tmp_path}/the.listing")
    data = (tmp_path / "the.listing").read_bytes()
    for size in range(len(data)):
        (tmp_path / "the.listing").write_bytes(data[:size])
        with pytest.raises(ValueError, match="the.listing is no listing"):
            list_dataset(f"file://{tmp_path}/data/", listing=f"file://{tmp_path}/the.listing")


class TestWithoutPermissionToList:
    @pytest.fixture
    def store(self, s3, bucket):
        urls = {
            name: write(f"{bucket.url}{name}/", bucket.storage_options, first) for name, first in (("a", 0), ("b", 500))
        }
        with FaultProxy(s3.endpoint) as proxy:
            yield urls, f"{bucket.url}listings/", {**bucket.storage_options, "endpoint_url": proxy.endpoint}, proxy

    def test_readers_send_no_list_and_read_the_listing_once(self, store):
        urls, folder, options, proxy = store

        def loader(listing):
            graph = partial(reader, urls["a"], listing=listing, storage_options=options)
            node = Sharder(graph, num_shards=6, rank=0, world_size=1)
            return Loader(Prefetcher(Batcher(node, batch_size=6), prefetch_factor=2))

        list_dataset(urls["a"], storage_options=options).write(f"{folder}a", options)
        with loader(None) as made:
            expected = list(itertools.islice(made, 8))
        proxy.spoil([])
        with loader(f"{folder}a") as made:
            assert proxy.requests == []
            assert same(list(itertools.islice(made, 8)), expected)
        assert not any(request.is_listing() for request in proxy.requests)
        asked = [request.method for request in proxy.requests if request.path.endswith("/listings/a")]
        assert asked.count("GET") == 1

    def test_a_recipe_sends_none_by_the_command_line_either(self, store, ibm_nodes):
        urls, folder, options, proxy = store
        flags = [part for name, url in urls.items() for part in ("--data", f"{name}={url}", "--weight", f"{name}=1")]
        flags += ["--seq-len", 16, "--eos-id", 1, "--global-batch-size", 6, "--num-shards", 6, "--steps", 4, "--digest"]
        given = {**options, **{f"client_kwargs.{key}": value for key, value in options["client_kwargs"].items()}}
        del given["client_kwargs"]
        store_flags = [part for key, value in given.items() for part in ("--storage-option", f"{key}={value}")]
        lists = []
        for name, url in urls.items():
            code, out, _ = ibm_nodes("list", url, "--out", f"{folder}{name}", *store_flags)
            size = sum(item.size for item in storage.find(url, options))
            assert (code, out) == (0, f"4 files, {size:,} bytes under {url}\n")
            lists += ["--listing", f"{name}={folder}{name}"]
        assert any(request.is_listing() for request in proxy.requests)
        digests = []
        for more in ([], lists):
            proxy.spoil([])
            code, out, error = ibm_nodes("run", "pretrain", *flags, *store_flags, *more)
            assert code == 0, error
            digests.append([line for line in out.splitlines() if line.startswith("step ")])
        assert digests[0] == digests[1]
        assert not any(request.is_listing() for request in proxy.requests)
        assert not any(options[name] in out + error for name in ("key", "secret"))


def reader(url, shard, num_shards, **options):
    return Reader(url, shard=shard, num_shards=num_shards, **options)


RECIPES = {
    "pretrain": {"weights": {"web": 1}},
    "long-context": {"weights": {"web": 1}},
    "sft": {"weights": {"web": 1}, "response_ids": [1000]},
    "validation": {"holdout": 0.5},
}


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_takes_listings_by_name(tmp_path, name):
    url, file = write(f"file://{tmp_path}/data/"), f"file://{tmp_path}/the.listing"
    list_dataset(url).write(file)
    storage.write(f"{url}zzz.arrow", b"which was not there")
    recipe = partial(
        load_recipe(name), {"web": url}, seq_len=16, eos_id=1, global_batch_size=4, num_shards=4, **RECIPES[name]
    )
    with recipe(listing={"web": file}) as loader:
        found = [batch["input_ids"] for batch in itertools.islice(loader, 5)]
    os.unlink(f"{tmp_path}/data/zzz.arrow")
    with recipe() as loader:
        expected = [batch["input_ids"] for batch in itertools.islice(loader, 5)]
    assert len(found) == 5
    assert all(map(torch.equal, found, expected))
    with pytest.raises(ValueError, match=r"listing must be for the datasets \['web'\], got \['code'\] too"):
        recipe(listing={"code": file})


def test_the_recipe_for_text_takes_them(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    url, file = f"file://{tmp_path}/data/", f"file://{tmp_path}/the.listing"
    storage.write(f"{url}000.jsonl", b"".join(json.dumps({"text": "a b " * n}).encode() + b"\n" for n in range(1, 40)))
    list_dataset(url).write(file)
    storage.write(f"{url}001.jsonl", b"which was not there\n")
    loader = load_recipe("pretrain-text")(
        {"web": url},
        tokenizer=f"{tmp_path}/tokenizer.json",
        weights={"web": 1},
        seq_len=16,
        eos_id=2,
        global_batch_size=4,
        num_shards=4,
        listing={"web": file},
        on_change={"web": "keep"},
    )
    with loader:
        assert next(iter(loader))["input_ids"].shape == (4, 16)


class TestTheCommand:
    def test_it_says_what_is_there_and_writes_nothing_unasked(self, ibm_nodes, tmp_path):
        url = write(f"file://{tmp_path}/data/")
        storage.write(f"{url}more.jsonl", b'{"tokens": [1]}\n')
        before = sorted(os.listdir(tmp_path))
        sizes = [item.size for item in storage.find(url)]
        assert ibm_nodes("list", url) == (0, f"5 files, {sum(sizes):,} bytes under {url}\n", "")
        assert ibm_nodes("list", url, "--format", "jsonl") == (0, f"1 files, 16 bytes under {url}\n", "")
        assert sorted(os.listdir(tmp_path)) == before

    def test_a_path_will_do(self, ibm_nodes, tmp_path):
        url = write(f"file://{tmp_path}/data/")
        assert ibm_nodes("list", url, "--out", tmp_path / "lists" / "web")[0] == 0
        assert len(list_dataset(url, listing=f"{tmp_path}/lists/web").objects) == 4

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["list"], "URL"),
            (["list", "file:///nowhere/"], "no data under file:///nowhere/"),
            (["list", "file:///nowhere/", "--format", "csv"], "csv"),
        ],
    )
    def test_what_is_wrong_is_one_sentence(self, ibm_nodes, argv, message):
        code, out, error = ibm_nodes(*argv)
        assert (code, out, error.count("\n")) == (1, "", 1)
        assert message in error
