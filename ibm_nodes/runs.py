"""Runs: documents, or parts of them, on their way into samples."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ibm_nodes.items import Place, Sample

Run = tuple[Sequence[np.ndarray], int, Place]
"""The tokens of a document, or of a part of one, in arrays of one type end to end; their number; and the place of the
first.
"""

Runs = tuple[Sequence[Sequence[np.ndarray]], Sequence[int], Sequence[Place]]
"""Many runs: what they are made of, by columns."""


def columns(runs: Sequence[Run]) -> Runs:
    """Gives runs by columns."""
    if not runs:
        return (), (), ()
    pieces, lengths, places = zip(*runs, strict=True)
    return pieces, lengths, places


def joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Copies arrays end to end; as bytes where they are of one type, in half of the time."""
    if len(pieces) == 1:
        return pieces[0].copy()
    types = [tokens.dtype for tokens in pieces]
    if types.count(types[0]) == len(types):
        try:
            return np.frombuffer(bytearray().join(pieces), types[0])  # type: ignore[arg-type]  # arrays are buffers
        except (BufferError, TypeError):  # one of them is not contiguous
            pass
    return np.concatenate(pieces)


def split(run: Run, size: int) -> tuple[Run, Run]:
    """Cuts a run after ``size`` of its tokens, of which it has more."""
    pieces, length, (name, url, row, offset) = run
    number, left = 0, size
    while len(pieces[number]) <= left:
        left -= len(pieces[number])
        number += 1
    head, tail = list(pieces[:number]), list(pieces[number:])
    if left:
        head.append(tail[0][:left])
        tail[0] = tail[0][left:]
    return (head, size, run[2]), (tail, length - size, (name, url, row, offset + size))


def runs_in(sample: Sample) -> Iterator[Run]:
    """Gives the documents of a sample."""
    ends = (*sample.starts, len(sample.tokens))[1:]
    for start, end, place in zip(sample.starts, ends, sample.documents, strict=True):
        yield [sample.tokens[start:end]], end - start, place


def mended(runs: Iterable[Run], counts: dict[str, int]) -> list[Run]:
    """Puts parts of a document that follow each other together, and takes it off the count of those cut."""
    whole: list[Run] = []
    following: Place | None = None  # where the part after the last one would come from
    cut = False
    for pieces, length, place in runs:
        if place == following:
            counts["truncated"] -= cut
            first, so_far, start = whole[-1]
            kind = np.promote_types(first[0].dtype, pieces[0].dtype)
            both = [tokens.astype(kind, copy=False) for tokens in (*first, *pieces)]
            whole[-1] = (both, so_far + length, start)
        else:
            whole.append((pieces, length, place))
        name, url, row, offset = place
        following, cut = (name, url, row, offset + length), offset <= 0
    return whole
