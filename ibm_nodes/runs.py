"""Runs: documents, or parts of them, on their way into samples."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ibm_nodes.items import Place, Sample

Run = tuple[np.ndarray, Place]
"""The tokens of a document, or of a part of one, and the place of the first."""


class Runs(NamedTuple):
    """Many runs, by columns.

    Attributes:
        pieces: their tokens, end to end, in any number of arrays.
        lengths: the number of tokens of each.
        places: where each comes from.
        kinds: the type of each, which the arrays are of, or wider.
    """

    pieces: Sequence[np.ndarray] = ()
    lengths: Sequence[int] = ()
    places: Sequence[Place] = ()
    kinds: Sequence[np.dtype] = ()


def columns(runs: Sequence[Run]) -> Runs:
    """Gives runs by columns."""
    if not runs:
        return Runs()
    pieces, places = zip(*runs, strict=True)
    return Runs(pieces, [len(tokens) for tokens in pieces], places, [tokens.dtype for tokens in pieces])


def joined(pieces: Sequence[np.ndarray], *, copy: bool = True) -> np.ndarray:
    """Copies arrays end to end; as bytes where they are of one type, in half of the time.

    Args:
        pieces: the arrays.
        copy: one alone is copied, too.
    """
    if len(pieces) == 1:
        return pieces[0].copy() if copy else pieces[0]
    types = [tokens.dtype for tokens in pieces]
    if types.count(types[0]) == len(types):
        try:
            return np.frombuffer(bytearray().join(pieces), types[0])  # type: ignore[arg-type]  # arrays are buffers
        except (BufferError, TypeError):  # one of them is not contiguous
            pass
    return np.concatenate(pieces)


def split(run: Run, size: int) -> tuple[Run, Run]:
    """Cuts a run after ``size`` of its tokens, of which it has more."""
    tokens, place = run
    return (tokens[:size], place), (tokens[size:], moved(place, size))


def moved(place: Place, size: int) -> Place:
    """Gives the place so many tokens further on."""
    name, url, row, offset = place
    return name, url, row, offset + size


def runs_in(sample: Sample) -> Iterator[Run]:
    """Gives the documents of a sample."""
    ends = (*sample.starts, len(sample.tokens))[1:]
    for start, end, place in zip(sample.starts, ends, sample.documents, strict=True):
        yield sample.tokens[start:end], place


def mended(runs: Iterable[Run], counts: dict[str, int]) -> list[Run]:
    """Puts parts of a document that follow each other together, and takes it off the count of those cut."""
    whole: list[tuple[list[np.ndarray], Place]] = []
    following: Place | None = None  # where the part after the last one would come from
    cut = False
    for tokens, place in runs:
        if place == following:
            counts["truncated"] -= cut
            whole[-1][0].append(tokens)
        else:
            whole.append(([tokens], place))
        following, cut = moved(place, len(tokens)), place[3] <= 0
    return [(joined(pieces, copy=False), place) for pieces, place in whole]
