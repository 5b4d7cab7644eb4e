"""File formats: an object's metadata to blocks, and a block to rows.

A format is a class that fits ``ShardFile``. Blocks depend on the file alone, never on memory or on who reads, since the
order of documents is built from them.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ibm_nodes.formats.arrow import ArrowFile
from ibm_nodes.formats.lists import Lists
from ibm_nodes.formats.parquet import ParquetFile
from ibm_nodes.listing import Listing, list_objects
from ibm_nodes.storage import Object, Options


class ShardFile(Protocol):
    """An opened file of a dataset.

    Attributes:
        spans: where the blocks begin in the file, in bytes, ascending, the first 0; then the file's size.
        groups: for each block, the number of its group, ascending: groups are visited in a random order, the blocks of
            one group in file order.
    """

    spans: np.ndarray
    groups: np.ndarray

    def size(self, block: int) -> int:
        """Gives about how many bytes reading a block takes in memory."""
        ...

    def read(self, block: int) -> Lists:
        """Reads a block."""
        ...


class Opener(Protocol):
    """A class whose instances are files of a format."""

    def __call__(self, listing: Listing, item: Object, column: str) -> ShardFile:
        """Reads the metadata of an object."""
        ...


FORMATS: dict[str, tuple[Opener, tuple[str, ...]]] = {
    "arrow": (ArrowFile, (".arrow", ".feather", ".ipc")),
    "parquet": (ParquetFile, (".parquet", ".pq")),
}


def suffixes(format: str | None) -> tuple[str, ...]:
    """Gives the endings of a format's files, or of all formats' for None.

    Raises:
        LookupError: if there is no such format.
    """
    if format is None:
        return tuple(suffix for _, endings in FORMATS.values() for suffix in endings)
    if format not in FORMATS:
        raise LookupError(f"no format {format!r}: give one of {', '.join(FORMATS)}, or None to tell by the ending")
    return FORMATS[format][1]


def opener(key: str, format: str | None) -> Opener:
    """Gives what opens an object, by format or by its key's ending."""
    for name, (opens, endings) in FORMATS.items():
        if format == name or (format is None and key.lower().endswith(endings)):
            return opens
    raise LookupError(f"no format for {key!r}: give format, one of {', '.join(FORMATS)}")


def list_dataset(url: str, *, format: str | None = None, storage_options: Options = None) -> Listing:
    """Lists the data files under a prefix, for ``Reader(listing=...)`` and for a look at what is there.

    Args:
        url: prefix, or one file.
        format: "arrow" or "parquet"; None takes both.
        storage_options: fsspec's options for the store.

    Raises:
        FileNotFoundError: if there is no data.
        PermissionError, ConnectionError, OSError: as the store says.
    """
    return list_objects(url, storage_options, suffixes(format))


__all__: Sequence[str] = ["FORMATS", "Lists", "Opener", "ShardFile", "list_dataset", "opener", "suffixes"]
