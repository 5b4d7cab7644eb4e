"""Blocks that are in memory already are read when they are due; only others are worth a thread that reads ahead."""

import os
import threading

import corpora
import pytest

from ibm_nodes import Reader, storage

ROWS = corpora.documents([20_000] * 160, stride=20_000)


@pytest.fixture
def readers(monkeypatch):
    """The names of the threads that read local files, in order."""
    names, read = [], storage._read_local

    def watched(*arguments):
        names.append(threading.current_thread().name)
        return read(*arguments)

    monkeypatch.setattr(storage, "_read_local", watched)
    return names


def write(path, form, **options):
    """One file of many blocks, which are on the disk and in memory."""
    tables = corpora.tables([[row] for row in ROWS])
    data = corpora.arrow(tables, **options) if form == "arrow" else corpora.parquet(tables)
    file = path / f"0.{form}"
    file.write_bytes(data)
    with open(file, "rb+") as opened:
        os.fsync(opened.fileno())
        try:
            os.preadv(opened.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError:
            pytest.skip("the file system does not tell what of a file is in memory")
    return file


def forget(file):
    """Drops a file from memory."""
    with open(file, "rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with pytest.raises(BlockingIOError):
            os.preadv(opened.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)


def documents_of(path, num, protocol="file://"):
    node = Reader(f"{protocol}{path}", name="d", shard=0, num_shards=1)
    node.reset(None)
    for _ in range(num):
        next(node)
    return node


def in_the_pool(names):
    return [name.startswith("ibm_nodes-read") for name in names]


needs_nowait = pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="the system cannot tell what is in memory")


@needs_nowait
@pytest.mark.parametrize("protocol", ["file://", "local://", ""])
def test_what_is_in_memory_is_read_by_who_uses_it(tmp_path, readers, protocol):
    write(tmp_path, "arrow")
    documents_of(tmp_path, 160, protocol).close()
    found = in_the_pool(readers)
    assert len(found) > 8
    assert not any(found[4:])  # behind what the file begins and ends with, and the first block


@needs_nowait
def test_what_is_not_in_memory_is_read_ahead(tmp_path, readers):
    file = write(tmp_path, "arrow")
    node = documents_of(tmp_path, 5)
    forget(file)
    del readers[:]
    while len(readers) < 5:
        next(node)
    assert any(in_the_pool(readers))  # until the system has brought the rest into memory by itself
    node.close()


@needs_nowait
@pytest.mark.parametrize("form, options", [("parquet", {}), ("arrow", {"compression": "zstd"})])
def test_what_has_to_be_decompressed_is_read_ahead(tmp_path, readers, form, options):
    write(tmp_path, form, **options)
    documents_of(tmp_path, 160).close()
    found = in_the_pool(readers)
    assert len(found) > 8
    assert sum(found) > 0.8 * len(found) - 3


@pytest.mark.parametrize("url", ["s3://bucket/d/0.arrow", "memory://d/0.arrow", "file:///nothing/here.arrow"])
def test_what_is_no_local_file_is_never_taken_for_at_hand(url):
    assert not storage.is_at_hand(storage.Object(url, "0.arrow", 100, None), 0, 10)
