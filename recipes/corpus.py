"""A small corpus from text that every Python installation has, for the quick start."""

import io
import itertools
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

EOS_ID = 256
VOCAB_SIZE = 257

_CODE_BYTES = 4_000_000
_CODE_FILES = 4
_PROSE_FILES = 3
_DOCUMENT_BYTES = 1_000


def build_corpus(url: str, storage_options: dict[str, Any] | None = None) -> dict[str, str]:
    """Writes the corpus below ``url`` and returns the URL of each dataset by its name.

    ``code`` is Python's standard library in Parquet files, ``prose`` its help topics and licence in Arrow files. Both
    have one column, ``tokens``, of uint16: the UTF-8 bytes of a document, without an end (`EOS_ID` is free for that).
    One Python installation always gives the same documents.

    Args:
        url: Where to write, as fsspec understands it: ``s3://bucket/corpus``, ``file:///tmp/corpus``.
        storage_options: What fsspec needs to reach it.
    """
    root = url.rstrip("/")
    for number, documents in enumerate(_deal(code_documents(), _CODE_FILES)):
        _upload(f"{root}/code/{number:03}.parquet", _parquet(documents), storage_options)
    for number, documents in enumerate(_deal(prose_documents(), _PROSE_FILES)):
        _upload(f"{root}/prose/{number:03}.arrow", _arrow(documents), storage_options)
    return {name: f"{root}/{name}/" for name in ("code", "prose")}


def code_documents() -> list[str]:
    """Returns the standard library's modules, about 4 MB of them, cut into some functions or classes each."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    ends = itertools.accumulate(path.stat().st_size for path in paths)
    texts = (path.read_text("utf-8", "replace") for path, end in zip(paths, ends, strict=True) if end <= _CODE_BYTES)
    return [document for text in texts for document in _cut(text, "\n\n\n")]


def prose_documents() -> list[str]:
    """Returns the pages of ``help()`` and the licence of Python, cut into some paragraphs each."""
    licence = Path(sysconfig.get_path("stdlib"), "LICENSE.txt")  # not every distributor ships it
    texts = [topics[name] for name in sorted(topics)]
    texts.append(licence.read_text("utf-8", "replace") if licence.exists() else sys.copyright)
    return [document for text in texts for document in _cut(text, "\n\n")]


def _cut(text: str, separator: str) -> Iterator[str]:
    """Cuts after separators, once a document is long enough; the documents joined are the text."""
    document = ""
    for part in re.split(f"(?<={separator})", text):
        document += part
        if len(document) >= _DOCUMENT_BYTES:
            yield document
            document = ""
    if document:
        yield document


def _deal(documents: Sequence[str], num_files: int) -> Iterable[Sequence[str]]:
    """Gives each file a run of documents, a later file more of them, so that the files differ in size."""
    shares = num_files * (num_files + 1) // 2
    edges = [len(documents) * share // shares for share in itertools.accumulate(range(num_files + 1))]
    return (documents[start:end] for start, end in itertools.pairwise(edges))


def _table(documents: Sequence[str]) -> pa.Table:
    encoded = [document.encode() for document in documents]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    tokens = np.frombuffer(b"".join(encoded), dtype=np.uint8).astype(np.uint16)
    return pa.table({"tokens": pa.ListArray.from_arrays(offsets, tokens)})


def _parquet(documents: Sequence[str]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(_table(documents), sink, row_group_size=64, compression="zstd")
    return sink.getvalue()


def _arrow(documents: Sequence[str]) -> bytes:
    table = _table(documents)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=32)
    return sink.getvalue()


def _upload(url: str, content: bytes, storage_options: dict[str, Any] | None) -> None:
    with fsspec.open(url, "wb", **(storage_options or {})) as file:
        file.write(content)
