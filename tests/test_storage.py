import multiprocessing
import os
import pathlib
import pickle
import threading
import time
import traceback
import uuid
import warnings

import fsspec
import pytest
from sources import read_all

from ibm_nodes import Reader, attempts, storage
from ibm_nodes.listing import CACHED_FILES, Listing, ListingSession, current_session, list_objects
from ibm_nodes.read_ahead import counters
from ibm_nodes.recipes import object_store
from ibm_nodes.storage import Object, read

ODD_KEYS = ["a b", "c#", "p%20q", "r=1", "é日", "q?", "plus+", "[x]*", "sub dir/é b#.arrow", "a&b", "-", "~", "x:y@z"]
SUFFIXES = (".arrow", ".parquet")
SECRET = "not-a-secret-of-anyone"


@pytest.fixture(scope="module")
def server(s3):
    """A bucket for the file."""
    return object_store.make_bucket(s3.storage_options, f"t-{uuid.uuid4().hex[:12]}"), s3.storage_options


@pytest.fixture(params=["disk", "memory", "s3"])
def place(request, tmp_path):
    """A fresh prefix on each kind of store, and its options."""
    if request.param == "s3":
        url, options = request.getfixturevalue("server")
        return f"{url}{uuid.uuid4().hex[:12]}/", options
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex[:12]}/", None
    return f"file://{tmp_path}/", None


@pytest.fixture
def remote(server):
    url, options = server
    return f"{url}{uuid.uuid4().hex[:12]}/", options


def remove(url, options=None):
    filesystem, path = fsspec.core.url_to_fs(url, **(options or {}))
    filesystem.rm_file(path)


def fill(place, *keys, data=b"data"):
    url, options = place
    for key in keys:
        storage.write(url + key, data, options)


def keys(place, suffixes=("",)):
    return [item.key for item in list_objects(place[0], place[1], suffixes).objects]


def test_lists_keys_sorted_by_code_point_with_urls_and_sizes(place):
    url, options = place
    for number, key in enumerate(["b", "B", "a/z", "a-b", "é", "10", "9"], 1):
        storage.write(url + key, b"x" * number, options)
    listing = list_objects(url, options)
    assert [item.key for item in listing.objects] == ["10", "9", "B", "a-b", "a/z", "b", "é"]
    assert [item.url for item in listing.objects] == [url + item.key for item in listing.objects]
    assert listing.starts == [0, 6, 13, 15, 19, 22, 23, 28]
    assert len({item.version for item in listing.objects}) > 1 or url.startswith("memory")


def test_a_slash_at_the_end_makes_no_difference(place):
    fill(place, "x/one.arrow", "two.arrow")
    url, options = place
    with_slash, without = list_objects(url, options), list_objects(url.rstrip("/"), options)
    assert with_slash.objects == without.objects
    assert with_slash.digest == without.digest


def test_leaves_out_hidden_names_other_endings_and_empty_objects(place):
    fill(place, "a.arrow", "b.PARQUET", "sub/c.Arrow", "no.txt", "arrow", ".d.arrow", "_e.arrow")
    fill(
        place,
        "_SUCCESS",
        ".x/f.arrow",
        "sub/_temporary/0/g.arrow",
        "sub/.h.arrow",
        "i.arrow.tmp",
        "i_.arrow",
        "j.k.arrow",
    )
    fill(place, "empty.arrow", "sub/empty.parquet", data=b"")
    assert keys(place, SUFFIXES) == ["a.arrow", "b.PARQUET", "i_.arrow", "j.k.arrow", "sub/c.Arrow"]


def test_names_above_the_prefix_may_be_hidden(place):
    url, options = place
    root = f"{url}.hidden/_private/data"
    fill((f"{root}/", options), "a.arrow", "_b.arrow")
    assert keys((root, options), SUFFIXES) == ["a.arrow"]


def test_an_object_that_is_named_is_always_read(place):
    url, options = place
    for key in ("x.bin", "_hidden.txt", ".dot/_x"):
        storage.write(url + key, b"some data", options)
        listing = list_objects(url + key, options, SUFFIXES)
        (item,) = listing.objects
        assert (item.url, item.key, item.size) == (url + key, key.rpartition("/")[2], 9)
        assert bytes(listing.read(item, 5, 9)) == b"data"


def test_a_prefix_is_a_folder_and_not_the_beginning_of_a_name(place):
    url, options = place
    fill(place, "web/a", "web2/b", "web.arrow", "we/c")
    assert keys((f"{url}web", options)) == ["a"]
    assert keys((f"{url}web/", options)) == ["a"]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys_are_listed_and_read(place, key):
    fill(place, key, f"{key}x/{key}", data=key.encode())
    listing = list_objects(*place)
    assert {(item.key, item.url) for item in listing.objects} == {
        (each, place[0] + each) for each in (key, f"{key}x/{key}")
    }
    assert [data for _, data in read_all(listing)] == [key.encode()] * 2
    url, options = place
    assert read_all(list_objects(f"{url}{key}x", options)) == [(key, key.encode())]


def test_an_empty_range_is_nothing(place):
    fill(place, "a")
    listing = list_objects(*place)
    assert bytes(listing.read(listing.objects[0], 2, 2)) == b""


def test_names_that_are_not_utf_8_are_listed_and_read(tmp_path):
    pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.arrow")).write_bytes(b"x")
    assert read_all(list_objects(f"file://{tmp_path}")) == [("\udcff.arrow", b"x")]


def test_takes_a_path_without_a_protocol(tmp_path, monkeypatch):
    fill((f"file://{tmp_path}/", None), "data/a.arrow")
    monkeypatch.chdir(tmp_path)
    for url in (f"{tmp_path}/data", "data", "./data/"):
        assert read_all(list_objects(url)) == [("a.arrow", b"data")]


def test_links_are_read_as_what_they_point_to(tmp_path):
    fill((f"file://{tmp_path}/", None), "blobs/1234", "far/away.arrow")
    (tmp_path / "data").mkdir()
    os.utime(tmp_path / "blobs" / "1234", (1, 1))
    (tmp_path / "data" / "a.arrow").symlink_to(tmp_path / "blobs" / "1234")
    assert read_all(list_objects(f"file://{tmp_path}/data")) == [("a.arrow", b"data")]


def test_lists_more_keys_than_fit_on_a_page(remote):
    url, options = remote
    filesystem = fsspec.filesystem("s3", **options)
    filesystem.pipe({f"{url}part-{number:05}.arrow": b"%d" % number for number in range(1, 1004)})
    listing = list_objects(url, options)
    assert [item.key for item in listing.objects] == [f"part-{number:05}.arrow" for number in range(1, 1004)]
    assert listing.read(listing.objects[-1], 0, 4) == b"1003"


def test_leaves_out_what_stands_for_a_folder(remote):
    url, options = remote
    fill(remote, "sub/a.arrow")
    bucket, _, key = url.removeprefix("s3://").partition("/")
    for folder in ("", "sub/", "more.arrow/"):
        fsspec.filesystem("s3", **options).call_s3("put_object", Bucket=bucket, Key=key + folder, Body=b"")
    assert keys(remote, SUFFIXES) == ["sub/a.arrow"]
    assert keys((f"{url}sub", options), SUFFIXES) == ["a.arrow"]


def test_lists_afresh_each_time(place):
    url, options = place
    fill(place, "a", "b")
    first = list_objects(url, options)
    storage.write(f"{url}c", b"more", options)
    remove(f"{url}a", options)
    assert keys(place) == ["b", "c"]
    assert [item.key for item in first.objects] == ["a", "b"]


def test_the_digest_tells_keys_and_sizes_and_nothing_else(place, tmp_path):
    fill(place, "a", "b/c")
    digest = list_objects(*place).digest
    other = f"file://{tmp_path}/elsewhere/"
    for key in ("b/c", "a"):
        storage.write(other + key, b"DATA")
    assert list_objects(other).digest == digest
    for change in ({"a": b"data!"}, {"A": b"data"}, {"b": b"data"}):
        moved = f"file://{tmp_path}/{uuid.uuid4()}/"
        for key, data in {"a": b"data", **change}.items():
            storage.write(moved + key, data)
        assert list_objects(moved).digest != digest


def test_the_description_of_a_listing_does_not_depend_on_how_it_came():
    objects = [Object(f"s3://x/{key}", key, size, "tag") for key, size in (("b", 2), ("a", 1))]
    one, other = Listing("s3://x", objects), Listing("s3://y", objects[::-1])
    assert str(one) == str(other) == f"2 files of 3 bytes (listing {one.digest})"


def test_a_prefix_without_data_is_an_error_that_says_what_is_there(place):
    url, options = place
    with pytest.raises(FileNotFoundError, match=f"{url}.*nothing"):
        list_objects(url, options, SUFFIXES)
    fill(place, "readme.txt", "_hidden.arrow")
    with pytest.raises(FileNotFoundError, match=f"no data under {url}: it holds 2 other objects; .*.arrow, .parquet"):
        list_objects(url, options, SUFFIXES)


def test_a_bucket_that_does_not_exist_is_an_error_that_names_it(server):
    for url in ("s3://there-is-no-such-bucket/data/", "s3://there-is-no-such-bucket"):
        with pytest.raises(FileNotFoundError, match="there-is-no-such-bucket"):
            list_objects(url, server[1])


@pytest.mark.parametrize("changes", [{"secret": SECRET}, {"key": SECRET}, {"anon": True}], ids=str)
def test_wrong_credentials_are_an_error_that_names_the_prefix_and_no_credentials(remote, changes):
    url, options = remote
    fill(remote, "a.arrow")
    options = {**options, **changes}
    if "anon" in changes:
        del options["key"], options["secret"]
    began = time.monotonic()
    with pytest.raises(PermissionError, match=url) as raised:
        list_objects(url, options)
    assert time.monotonic() - began < 5
    text = "".join(traceback.format_exception(raised.value))
    assert SECRET not in text
    assert options.get("secret", SECRET) not in text


def test_no_credentials_at_all_is_an_error_that_says_what_to_give(remote, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    url, options = remote
    options = {name: value for name, value in options.items() if name not in ("key", "secret")}
    with pytest.raises(PermissionError, match=f"{url}.*(storage_options|anon)"):
        list_objects(url, options)


def test_a_server_that_is_not_there_is_an_error_that_names_the_prefix(remote, monkeypatch):
    monkeypatch.setattr(attempts, "GIVE_UP_SECONDS", 0.3)
    url, options = remote
    with pytest.raises(OSError, match=f"{url} could not be listed in \\d+ attempts: .*127.0.0.1:9"):
        list_objects(url, {**options, "endpoint_url": "http://127.0.0.1:9"})


def test_an_unknown_protocol_is_an_error():
    with pytest.raises(ValueError, match="nope"):
        list_objects("nope://x")


def test_a_range_is_read_and_counted(place):
    url, options = place
    storage.write(f"{url}a", bytes(range(200)), options)
    listing = list_objects(url, options)
    (item,) = listing.objects
    for start, end in [(0, 200), (0, 1), (199, 200), (7, 90)]:
        requests, size = counters.requests, counters.bytes
        assert bytes(listing.read(item, start, end)) == bytes(range(start, end))
        assert (counters.requests - requests, counters.bytes - size) == (1, end - start)
    assert bytes(read(item, 3, 5, options)) == b"\3\4"


@pytest.mark.parametrize("size", [1, 5, 9, 20, 30])
def test_an_object_that_was_replaced_is_a_named_error(place, size):
    url, options = place
    if url.startswith("memory") and size >= 9:
        pytest.skip("has no versions")
    storage.write(f"{url}the-object", b"123456789", options)
    listing = list_objects(url, options)
    time.sleep(0.02)  # a clock of the disk may be that coarse
    storage.write(f"{url}the-object", b"z" * size, options)
    (item,) = listing.objects
    with pytest.raises(OSError, match="the-object.*changed since it was listed"):
        listing.read(item, 0, 9)


def test_an_object_that_was_cut_off_in_place_is_a_named_error(tmp_path):
    (tmp_path / "the-object").write_bytes(b"1" * 1000)
    listing = list_objects(f"file://{tmp_path}")
    with open(tmp_path / "the-object", "r+b") as file:
        file.truncate(400)
    with pytest.raises(OSError, match="the-object has changed"):
        listing.read(listing.objects[0], 0, 1000)


def test_an_object_that_is_gone_is_a_named_error(place):
    fill(place, "the-object")
    listing = list_objects(*place)
    remove(f"{place[0]}the-object", place[1])
    began = time.monotonic()
    with pytest.raises(FileNotFoundError, match="the-object"):
        listing.read(listing.objects[0], 0, 4)
    assert time.monotonic() - began < 2


def test_a_range_beyond_the_end_is_a_named_error(place):
    fill(place, "the-object")
    listing = list_objects(*place)
    for start, end in ((2, 9), (5, 9)):
        with pytest.raises(OSError, match="the-object"):
            listing.read(listing.objects[0], start, end)


def test_a_session_lists_a_prefix_once(place):
    url, options = place
    fill(place, "a.arrow")
    session = ListingSession()
    first = session.listing(url, options, SUFFIXES)
    storage.write(f"{url}b.arrow", b"more", options)
    assert session.listing(url, dict(options) if options else options, SUFFIXES) is first
    assert session.listing(url, options, (".arrow",)) is not first
    assert len(ListingSession().listing(url, options, SUFFIXES).objects) == 2


def test_many_who_ask_a_session_at_once_get_one_listing(tmp_path):
    fill((f"file://{tmp_path}/", None), *(f"{number}.arrow" for number in range(50)))
    session, listings, start = ListingSession(), [], threading.Barrier(16)

    def ask():
        start.wait()
        listings.append(session.listing(f"file://{tmp_path}", None, SUFFIXES))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(listings) == 16
    assert len(set(map(id, listings))) == 1


def test_a_session_does_not_keep_an_error(tmp_path):
    session, url = ListingSession(), f"file://{tmp_path}/data"
    with pytest.raises(FileNotFoundError):
        session.listing(url, None, SUFFIXES)
    storage.write(f"{url}/a.arrow", b"x")
    assert len(session.listing(url, None, SUFFIXES).objects) == 1


def test_a_session_is_current_within_its_block_alone():
    one, other = ListingSession(), ListingSession()
    assert current_session() is not current_session()
    with one:
        assert current_session() is one
        with other, one:
            assert current_session() is one
        assert current_session() is one
        seen = []
        thread = threading.Thread(target=lambda: seen.append(current_session()))
        thread.start()
        thread.join()
        assert seen[0] is not one
    with pytest.raises(KeyError), one:
        raise KeyError
    assert current_session() is not one


def test_a_file_is_opened_once_for_all_who_ask():
    listing, opened, files = Listing("memory://x", []), [], []

    def make():
        time.sleep(0.05)
        opened.append(1)
        return object()

    threads = [threading.Thread(target=lambda: files.append(listing.file("key", make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1
    assert len(set(map(id, files))) == 1
    assert listing.file("other", make) is not files[0]


def test_a_file_that_cannot_be_opened_is_opened_again_by_the_next_who_asks():
    listing = Listing("memory://x", [])
    with pytest.raises(ZeroDivisionError):
        listing.file("key", lambda: 1 / 0)
    assert listing.file("key", lambda: 5) == 5


def test_keeps_the_files_that_were_used_last():
    listing = Listing("memory://x", [])
    for number in range(CACHED_FILES + 10):
        listing.file(number, lambda number=number: number)
        listing.file(0, lambda: pytest.fail("was dropped"))
    assert listing.file(CACHED_FILES, lambda: None) == CACHED_FILES
    assert listing.file(3, lambda: "again") == "again"


def test_a_listing_pickles_and_reads(place):
    fill(place, "a", "b/c")
    listing = list_objects(*place)
    copy = pickle.loads(pickle.dumps(listing))
    assert (copy.objects, copy.starts, copy.digest, copy.url) == (
        listing.objects,
        listing.starts,
        listing.digest,
        listing.url,
    )
    assert read_all(copy) == read_all(listing)
    assert pickle.loads(pickle.dumps(copy)).digest == listing.digest


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_listing_that_was_used_reads_in_another_process(remote, method):
    fill(remote, "a", "b/c")
    listing = list_objects(*remote)
    expected = read_all(listing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks beside threads
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply_async(read_all, (listing,)).get(60) == expected
            pool.close()
            pool.join()


def test_options_show_in_no_text(remote, tmp_path):
    url, options = remote
    fill(remote, "a.arrow", data=b"not an Arrow file at all")
    listing = list_objects(url, options)
    reader = Reader(url, shard=0, num_shards=1, listing=listing, storage_options=options)
    with pytest.raises(ValueError, match="a.arrow") as raised:
        next(reader)
    texts = [repr(listing), str(listing), repr(listing.objects), repr(reader), str(reader.state_dict())]
    texts += traceback.format_exception(raised.value)
    assert not any(options[name] in text for name in ("key", "secret") for text in texts)


def test_writes_an_object_whole_and_over_another(place):
    url, options = place
    for data in (b"one", b"twice as long", b""):
        storage.write(f"{url}deep/down/x", data, options)
        (item,) = storage.find(url, options)
        assert (item.key, item.url, item.size) == ("deep/down/x", f"{url}deep/down/x", len(data))
        assert bytes(storage.read(item, 0, item.size, options) if data else b"") == data


def test_finds_every_object_and_nothing_where_nothing_is(place):
    url, options = place
    assert storage.find(f"{url}nothing", options) == []
    fill(place, "b", "_a", ".c/d", "e.txt")
    assert [item.key for item in storage.find(url, options)] == [".c/d", "_a", "b", "e.txt"]
