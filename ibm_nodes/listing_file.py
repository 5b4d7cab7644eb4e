"""Listing files: what is under a prefix, so that nobody needs to list it; equal listings give equal bytes.

Gzip of JSON lines: a header, then ``[key, size]`` or ``[key, size, version]`` for each object and companion.
"""

import gzip
import json
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from ibm_nodes.storage import Object

FORMAT = "ibm_nodes listing"
VERSION = 1


class Entries(NamedTuple):
    """What a listing file says.

    Attributes:
        url: the prefix or the object that was listed; "" where it does not matter.
        is_one: whether it was one object.
        objects: key, size and version (or None) of each.
        companions: of what lies beside them, likewise.
    """

    url: str
    is_one: bool
    objects: list[tuple[str, int, str | None]]
    companions: list[tuple[str, int, str | None]]


def encode(url: str, is_one: bool, objects: Sequence[Object], companions: Sequence[Object]) -> bytes:
    """Gives the bytes of a listing file, with the versions that the objects have."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "url": url,
        "is_one": is_one,
        "objects": len(objects),
        "companions": len(companions),
    }
    lines: list[Any] = [head]
    for item in (*objects, *companions):
        lines.append([item.key, item.size, *([] if item.version is None else [item.version])])
    text = "".join(json.dumps(line) + "\n" for line in lines)  # in ASCII: keys need not be UTF-8
    return gzip.compress(text.encode(), 1, mtime=0)


def decode(data: bytes, place: str) -> Entries:
    """Reads what ``encode`` gave.

    Raises:
        ValueError: if it is damaged, something else, or of a newer version; names the place.
    """
    try:
        lines = map(json.loads, gzip.decompress(data).splitlines())
        head = next(lines)
        if head["format"] == FORMAT and head["version"] == VERSION:
            entries = [_entry(*line) for line in lines]
            num_objects = head["objects"]
            if len(entries) == num_objects + head["companions"]:
                return Entries(head["url"], head["is_one"], entries[:num_objects], entries[num_objects:])
    except (EOFError, LookupError, OSError, StopIteration, TypeError, ValueError, zlib.error) as error:
        raise ValueError(_refusal(place)) from error
    raise ValueError(_refusal(place))


def _entry(key: str, size: int, version: str | None = None) -> tuple[str, int, str | None]:
    if type(key) is not str or type(size) is not int or size < 0:
        raise ValueError("this is no entry of a listing")
    return key, size, version


def _refusal(place: str) -> str:
    return (
        f"{place} is no listing, is damaged, or was written by a newer ibm_nodes: write it with ibm-nodes list URL "
        "--out FILE"
    )
