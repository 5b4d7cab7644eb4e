"""File formats: an object's metadata to blocks, and a block to rows.

A format is what opens an object and gives a ``ShardFile``; docs/formats.md has them all, and how to write one's own.
Blocks depend on the file alone, never on memory or on who reads, since the order of documents is built from them.
"""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ibm_nodes.formats.arrow_stream import open_arrow
from ibm_nodes.formats.jsonl import open_json_lines
from ibm_nodes.formats.lists import Columns, Lists
from ibm_nodes.formats.mds import open_mds
from ibm_nodes.formats.megatron import MegatronFile
from ibm_nodes.formats.parquet import ParquetFile
from ibm_nodes.formats.tar import open_tar
from ibm_nodes.formats.where import Where
from ibm_nodes.listing import Listing, StoredObject, load_listing
from ibm_nodes.storage import Options, Url


class ShardFile(Protocol):
    """An opened file of a dataset: blocks of rows.

    Attributes:
        splittable: whether any block can be read without those before it. If not, the file is not divided by its bytes:
            the logical shards that share it all read it, and deal the rows of each block out among themselves.
        spans: where the blocks begin in the file, in bytes, ascending, the first 0; then the file's size.
        groups: for each block, the number of its group, ascending: groups are visited in a random order, the blocks of
            one group in file order. All 0 if the file is not splittable.
    """

    @property
    def splittable(self) -> bool: ...

    spans: np.ndarray
    groups: np.ndarray

    def size(self, block: int) -> int:
        """Gives about how many bytes reading a block takes in memory."""
        ...

    def read(self, block: int) -> Lists:
        """Reads a block; threads may call it at the same time.

        Raises:
            ValueError: if it cannot be decoded.
            OSError: if it cannot be read.
        """
        ...


class Opener(Protocol):
    """What opens the files of a format: a class of them, or a function."""

    def __call__(self, file: StoredObject, column: str, /) -> ShardFile:
        """Reads the metadata of an object.

        Raises:
            ValueError: if it is not of the format, or is damaged.
            LookupError, TypeError: if it has no such column, or not one of integer lists.
        """
        ...


Format = str | Opener | None
"""A format's name, what opens its files, or None to tell by the ending."""

FORMATS: dict[str, tuple[Opener, tuple[str, ...]]] = {
    "arrow": (open_arrow, (".arrow", ".feather", ".ipc", ".arrows")),
    "parquet": (ParquetFile, (".parquet", ".pq")),
    "jsonl": (
        open_json_lines,
        (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst", ".json.gz", ".json.zst"),
    ),
    "megatron": (MegatronFile, (".bin",)),
    "mds": (open_mds, (".mds", ".mds.gz", ".mds.zstd", ".mds.zst")),
    "webdataset": (open_tar, (".tar", ".tar.gz", ".tgz", ".tar.zst")),
}

ROW_FORMATS: dict[str, Callable[[StoredObject, Columns], ShardFile]] = {
    "arrow": open_arrow,
    "parquet": ParquetFile,
    "jsonl": open_json_lines,
    "webdataset": open_tar,
}
"""Formats whose rows may have any columns."""


WHERE_FORMATS: dict[str, Callable[[StoredObject, Columns, Where], ShardFile]] = {
    "arrow": open_arrow,
    "parquet": ParquetFile,
    "jsonl": open_json_lines,
}
"""Formats whose rows have columns that a condition can look at."""


def suffixes(format: Format) -> tuple[str, ...]:
    """Gives the endings of a format's files, or of all formats' for None; all files are of a format of one's own.

    Raises:
        LookupError: if there is no such format.
    """
    if format is None:
        return tuple(suffix for _, endings in FORMATS.values() for suffix in endings)
    if not isinstance(format, str):
        return ("",)
    if format not in FORMATS:
        raise LookupError(f"no format {format!r}: give one of {', '.join(FORMATS)}, or None to tell by the ending")
    return FORMATS[format][1]


def opener(key: str, format: Format) -> Opener:
    """Gives what opens an object, by format or by its key's ending."""
    if format is not None and not isinstance(format, str):
        return format
    for name, (opens, endings) in FORMATS.items():
        if format == name or (format is None and key.lower().endswith(endings)):
            return opens
    raise LookupError(f"no format for {key!r}: give format, one of {', '.join(FORMATS)}")


def open_file(file: StoredObject, format: Format, column: Columns, where: Where | None = None) -> ShardFile:
    """Opens an object for a column of token ids, or, given a tuple, for the rows of any columns.

    Rows that are not wanted are empty.

    Raises:
        ValueError: if it is not of the format, or is damaged, or the format has no rows of several columns.
        LookupError, TypeError: if it has no such column, or not one of integer lists, or no columns to look at.
    """
    opens = opener(file.key, format)
    if where is not None:
        for name, opens_chosen in WHERE_FORMATS.items():
            if opens is FORMATS[name][0]:
                return opens_chosen(file, column, where)
        raise TypeError(
            f"where={where} cannot look at {file.url}, whose format has no table of columns: give one of the formats "
            f"{', '.join(WHERE_FORMATS)}, or a Filter after the Reader"
        )
    if isinstance(column, str):
        return opens(file, column)
    for name, opens_rows in ROW_FORMATS.items():
        if opens is FORMATS[name][0]:
            return opens_rows(file, column)
    raise ValueError(
        f"columns cannot be read from {file.url}, whose format gives token ids alone: give one of the formats "
        f"{', '.join(ROW_FORMATS)}, or column in place of columns"
    )


def list_dataset(
    url: Url, *, format: Format = None, listing: str | None = None, storage_options: Options = None
) -> Listing:
    """Lists the data files under a prefix, for ``Reader(listing=...)`` and for a look at what is there.

    Args:
        url: prefix, or one file.
        format: as in ``Reader``; None takes all formats.
        listing: URL of a file that ``Listing.write`` or ``ibm-nodes list`` wrote, to be read in place of asking the
            store.
        storage_options: fsspec's options for the store.

    Raises:
        FileNotFoundError: if there is no data.
        ValueError: if the listing is damaged, or something else.
        PermissionError, ConnectionError, OSError: as the store says.
    """
    return load_listing(os.fspath(url), storage_options, suffixes(format), listing)


__all__: Sequence[str] = [
    "FORMATS",
    "Columns",
    "Format",
    "Lists",
    "Opener",
    "ShardFile",
    "Where",
    "list_dataset",
    "open_file",
    "opener",
    "suffixes",
]
