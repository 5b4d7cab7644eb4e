"""The same documents in every format and layout, written as their own tools write them, and where each row then is.

Megatron's, MosaicML's and webdataset's files are written from their documented layouts: the project depends on none of
them.
"""

import gzip
import io
import itertools
import json
import struct
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import corpora
import numpy as np
import pyarrow as pa
import zstandard

from ibm_nodes import storage

Batches = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Layout:
    """How documents lie in a file.

    Attributes:
        format: the format's name.
        ending: of the file.
        write: batches of documents to the file's bytes, or to those of several by their endings.
        rows: batches of documents to the numbers of their rows.
    """

    format: str
    ending: str
    write: Callable[[Batches], bytes | dict[str, bytes]]
    rows: Callable[[Batches], Sequence[int]]


def flat(batches):
    return [row for batch in batches for row in batch]


def numbered(batches):
    return range(len(flat(batches)))


def in_batches(batches):
    return [corpora.ROWS_PER_BATCH * number + row for number, rows in enumerate(batches) for row in range(len(rows))]


def a_batch_each(batches):
    return [corpora.ROWS_PER_BATCH * number for number in numbered(batches)]


def in_bytes(batches):
    lines = [len(line(row)) for row in flat(batches)]
    return list(itertools.accumulate(lines, initial=0))[:-1]


def arrow(batches, **options):
    return corpora.arrow(corpora.tables(batches), **options)


def arrow_stream(batches, **options):
    schema = pa.schema({"tokens": pa.list_(pa.int32())})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for table in corpora.tables(batches):
            for batch in table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], schema)]:
                writer.write_batch(batch)
    return sink.getvalue()


def ibm(batches, *, new=pa.ipc.new_file, kind=None, **options):
    """IBM's layout: a column of integers, and a record batch for each document."""
    kind = kind or pa.uint32()
    sink = io.BytesIO()
    schema = pa.schema({"tokens": kind})
    with new(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for row in flat(batches):
            writer.write_batch(pa.record_batch([pa.array(row, kind)], schema))
    return sink.getvalue()


def lists_one_by_one(batches, *, kind=None, **options):
    """A record batch for each document, of a column of lists between two others."""
    schema = pa.schema({"id": pa.int64(), "tokens": kind or pa.list_(pa.int32()), "source": pa.string()})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for number, row in enumerate(flat(batches)):
            writer.write_batch(pa.record_batch([pa.array([number]), pa.array([row], schema[1].type), ["x"]], schema))
    return sink.getvalue()


def parquet(batches, **options):
    return corpora.parquet(corpora.tables(batches), **options)


def line(row):
    return json.dumps({"id": 7, "tokens": row, "meta": {"ids": [1]}}).encode() + b"\n"


def json_lines(batches):
    return b"".join(map(line, flat(batches)))


def compressed(batches, *, write, compress):
    """A member or a frame for each batch."""
    if write is json_lines:
        return b"".join(compress(json_lines([batch])) for batch in batches) or compress(b"")
    return compress(write(batches))


def megatron(batches, *, code=4):
    kind = {4: np.int32, 8: np.uint16}[code]
    rows = [np.array(row, kind) for row in flat(batches)]
    sizes = np.array([len(row) for row in rows], np.int32)
    pointers = np.cumsum(sizes.astype(np.int64) * kind().itemsize) - sizes * kind().itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(rows), len(rows) + 1)
    edges = np.arange(len(rows) + 1, dtype=np.int64)
    return {
        ".bin": b"".join(row.tobytes() for row in rows),
        ".idx": head + sizes.tobytes() + pointers.astype(np.int64).tobytes() + edges.tobytes(),
    }


def mds_bytes(row):
    return np.array(row, np.int64).tobytes()


def mds_array(row):
    """An array of a type that the column fixes, of any length."""
    return bytes([1 << 2 | 2]) + struct.pack("<I", len(row)) + np.array(row, np.int32).tobytes()


def mds_any_array(row):
    """An array of any type and length."""
    return bytes([33]) + mds_array(row)


def mds(batches, *, encoding="bytes", encode=mds_bytes):
    columns = {"id": ("int", 8), "source": ("str", None), "tokens": (encoding, None)}
    samples = []
    for number, row in enumerate(flat(batches)):
        values = [np.int64(number).tobytes(), b"x" * (number % 5), encode(row)]
        samples.append(np.array([len(value) for value in values[1:]], np.uint32).tobytes() + b"".join(values))
    config = {
        "column_names": list(columns),
        "column_encodings": [encoding for encoding, _ in columns.values()],
        "column_sizes": [size for _, size in columns.values()],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
    }
    head = json.dumps(config, sort_keys=True).encode()
    begin = 4 + 4 * (len(samples) + 1) + len(head)
    edges = begin + np.cumsum([0, *map(len, samples)])
    return struct.pack("<I", len(samples)) + edges.astype(np.uint32).tobytes() + head + b"".join(samples)


def npy(row):
    file = io.BytesIO()
    np.save(file, np.array(row, np.int32))
    return file.getvalue()


def tar(batches, *, field="tokens.npy", encode=npy, format=tarfile.PAX_FORMAT, key="part/{:05}", mtime=0.5):
    """Samples of three members: the column is the second."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        folder = tarfile.TarInfo("part")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for number, row in enumerate(flat(batches)):
            for name, data in (("cls", b"7"), (field, encode(row)), ("png", b"p" * (number % 700))):
                member = tarfile.TarInfo(f"{key.format(number)}.{name}")
                member.size, member.mtime = len(data), mtime  # a time with a fraction takes a header of its own
                archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def json_list(row):
    return json.dumps(row).encode()


def json_object(row):
    return json.dumps({"tokens": row}).encode()


zstd = zstandard.ZstdCompressor(write_checksum=True).compress

LAYOUTS = {
    "Arrow": Layout("arrow", ".arrow", arrow, in_batches),
    "Arrow, lz4": Layout("arrow", ".arrow", partial(arrow, compression="lz4"), in_batches),
    "Arrow, zstd": Layout("arrow", ".feather", partial(arrow, compression="zstd"), in_batches),
    "Arrow stream": Layout("arrow", ".arrow", arrow_stream, in_batches),
    "Arrow stream, lz4": Layout("arrow", ".arrows", partial(arrow_stream, compression="lz4"), in_batches),
    "Arrow stream, zstd": Layout("arrow", ".ipc", partial(arrow_stream, compression="zstd"), in_batches),
    "a batch a document": Layout("arrow", ".arrow", ibm, a_batch_each),
    "a batch a document, zstd": Layout("arrow", ".arrow", partial(ibm, compression="zstd"), a_batch_each),
    "a batch a document, stream": Layout("arrow", ".arrow", partial(ibm, new=pa.ipc.new_stream), a_batch_each),
    "a batch a list": Layout("arrow", ".arrow", lists_one_by_one, a_batch_each),
    "a batch a large list": Layout(
        "arrow", ".arrow", partial(lists_one_by_one, kind=pa.large_list(pa.uint32())), a_batch_each
    ),
    "Parquet": Layout("parquet", ".parquet", parquet, numbered),
    "Parquet, zstd": Layout("parquet", ".parquet", partial(parquet, compression="zstd"), numbered),
    "Parquet, page checksums": Layout("parquet", ".parquet", partial(parquet, write_page_checksum=True), numbered),
    "JSON lines": Layout("jsonl", ".jsonl", json_lines, in_bytes),
    "JSON lines, gzip": Layout(
        "jsonl", ".json.gz", partial(compressed, write=json_lines, compress=gzip.compress), in_bytes
    ),
    "JSON lines, zstd": Layout("jsonl", ".jsonl.zst", partial(compressed, write=json_lines, compress=zstd), in_bytes),
    "Megatron, 32 bits": Layout("megatron", ".bin", megatron, numbered),
    "MDS, bytes": Layout("mds", ".mds", mds, numbered),
    "MDS, arrays": Layout("mds", ".mds", partial(mds, encoding="ndarray:int32", encode=mds_array), numbered),
    "MDS, arrays of any type": Layout("mds", ".mds", partial(mds, encoding="ndarray", encode=mds_any_array), numbered),
    "MDS, zstd": Layout("mds", ".mds.zstd", partial(compressed, write=mds, compress=zstd), numbered),
    "tar of npy": Layout("webdataset", ".tar", tar, numbered),
    "tar of npy, GNU": Layout(
        "webdataset", ".tar", partial(tar, format=tarfile.GNU_FORMAT, key="part/" + 120 * "k" + "{}"), numbered
    ),
    "tar of lists": Layout("webdataset", ".tar", partial(tar, field="tokens.json", encode=json_list), numbered),
    "tar of objects, gzip": Layout(
        "webdataset",
        ".tar.gz",
        partial(compressed, write=partial(tar, field="json", encode=json_object), compress=gzip.compress),
        numbered,
    ),
}


def write(url: str, files: Sequence[Batches], layout: Layout, storage_options=None) -> dict[tuple[str, int], list[int]]:
    """Writes a dataset of files of batches of documents; gives every row by its object and its number there."""
    rows = {}
    for number, batches in enumerate(files):
        data = layout.write(batches)
        for ending, part in data.items() if isinstance(data, dict) else [(layout.ending, data)]:
            storage.write(f"{url}{number:03}{ending}", part, storage_options)
        places = layout.rows(batches)
        rows |= {
            (f"{url}{number:03}{layout.ending}", row): tokens for row, tokens in zip(places, flat(batches), strict=True)
        }
    return rows
