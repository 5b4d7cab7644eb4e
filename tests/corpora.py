"""Corpora that name themselves, as Arrow IPC and Parquet files, and a reading of them by pyarrow alone.

Position p of document d is the token ``stride * d + p``, so that every token says where it is from, and a loss, a
repeat or a wrong place is visible.
"""

import io
import json
import random
from collections.abc import Sequence

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from ibm_nodes import storage

STRIDE = 1000
ROWS_PER_BATCH = 1 << 32


def documents(lengths, *, first=0, stride=STRIDE):
    """Documents of the given lengths, numbered from ``first``."""
    return [list(range(stride * number, stride * number + length)) for number, length in enumerate(lengths, first)]


def cut(rows, sizes):
    """Rows as batches of the given sizes; what is left goes into a last one."""
    batches = []
    for size in sizes:
        batches.append(rows[:size])
        rows = rows[size:]
    return [*batches, rows] if rows else batches


def every(rows, size):
    """Rows as batches of one size."""
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def tables(batches, kind=None):
    """Batches of documents as tables of one column, ``tokens``."""
    kind = kind or pa.list_(pa.int32())
    return [pa.table({"tokens": pa.array(rows, kind)}) for rows in batches]


def arrow(batches: Sequence[pa.Table], schema=None, **options) -> bytes:
    """An Arrow IPC file of one record batch for each table, empty ones too."""
    schema = schema or (batches[0].schema if batches else pa.schema({"tokens": pa.list_(pa.int32())}))
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for table in batches:
            for batch in table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], schema)]:
                writer.write_batch(batch)
    return sink.getvalue()


def parquet(batches: Sequence[pa.Table], schema=None, **options) -> bytes:
    """A Parquet file of one row group for each table, empty ones too."""
    schema = schema or (batches[0].schema if batches else pa.schema({"tokens": pa.list_(pa.int32())}))
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema, **options) as writer:
        for table in batches:
            writer.write_table(table, row_group_size=max(1, len(table)))
    return sink.getvalue()


FORMATS = {"arrow": arrow, "parquet": parquet}


def copy(source: str, target: str, storage_options=None) -> None:
    """Copies what is under a prefix of an object store to a prefix of the disk."""
    filesystem, root = fsspec.core.url_to_fs(source, **(storage_options or {}))
    for path in filesystem.find(root):
        storage.write(target + path[len(root) :], filesystem.cat_file(path))


def write(url: str, files: Sequence[Sequence[Sequence[Sequence[int]]]], form: str, storage_options=None) -> str:
    """Writes a dataset of files of batches of documents; gives its prefix."""
    for number, batches in enumerate(files):
        storage.write(f"{url}{number:03}.{form}", FORMATS[form](tables(batches)), storage_options)
    return url


def read(url: str, storage_options=None) -> dict[tuple[str, int], list[int]]:
    """Every row under a prefix by its object and its number there, with pyarrow alone; a null is an empty one."""
    filesystem, root = fsspec.core.url_to_fs(url, **(storage_options or {}))
    rows = {}
    for path in sorted(filesystem.find(root)):
        place = url.rstrip("/") + path[len(root.rstrip("/")) :]
        source = pa.BufferReader(filesystem.cat_file(path))
        if path.endswith(".parquet"):
            for row, tokens in enumerate(pq.read_table(source).column("tokens").to_pylist()):
                rows[place, row] = tokens or []
            continue
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            for row, tokens in enumerate(reader.get_batch(number).column("tokens").to_pylist()):
                rows[place, ROWS_PER_BATCH * number + row] = tokens or []
    return rows


def write_mix(url: str, storage_options=None, *, seed=0, stride=20_000) -> dict[str, str]:
    """Writes three datasets of very unequal size, documents of 0 to 20,000 tokens; gives their prefixes by name."""
    rng = random.Random(seed)
    prefixes = {}
    for name, num_rows, sizes, longest in (
        ("web", 250, (50, 150), 20_000),
        ("code", 80, (50,), 9_000),
        ("books", 7, (), 700),
    ):
        lengths = [rng.choice([0, 1, 2, 30, 200, 700, 1500]) for _ in range(num_rows)]
        lengths[1], lengths[-1], lengths[num_rows // 2] = longest, 0, 5
        rows = documents(lengths, first=30_000 * len(prefixes), stride=stride)
        prefixes[name] = f"{url}{name}/"
        for number, part in enumerate(cut(rows, sizes)):
            form = ("arrow", "parquet")[number % 2]
            storage.write(
                f"{prefixes[name]}{number:03}.{form}", FORMATS[form](tables(every(part, 13))), storage_options
            )
    return prefixes


def stream(tables):
    """Tables of one schema, as bytes of an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


def lines(tables):
    """The rows of tables, as bytes of JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for table in tables for row in table.to_pylist())
