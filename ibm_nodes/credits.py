"""The arithmetic of mixing: weights as integers, and the credits that sources begin with."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ibm_nodes.permutation import Seed, derive_key, random_index
from ibm_nodes.schedule import check_weights

ONE = 1 << 32
"""The sum of all weights, as integers."""
MAX_WARM_UP = 2048
EXACT = 1 << 53

T = TypeVar("T", int, float)


Drawn = tuple[list[int], list[int], list[int], list[int]]
"""What a draw has chosen: the credits before it and the shares, by number of the source; and each document's
source and length.
"""
NOTHING_DRAWN: Drawn = ([], [], [], [])


def integer_weights(weights: Mapping[str, float], names: Mapping[str, Any]) -> dict[str, int]:
    """Gives weights as integers of sum 2**32, none of them 0 unless it was given as 0.

    Raises:
        ValueError: if names differ, or a weight is negative, NaN or infinite, or all are zero.
    """
    if unknown := sorted(set(weights) - set(names)):
        raise ValueError(f"weights must be for the sources {sorted(names)}, got weights for {unknown} too")
    if missing := sorted(set(names) - set(weights)):
        raise ValueError(f"weights must name every source, got none for {missing}: give 0 to leave one out")
    check_weights(weights)
    largest = max(weights.values())  # exact: a float is a fraction
    return scale({name: round(weights[name] / largest * (1 << 62)) if weights[name] else 0 for name in sorted(names)})


def scale(weights: dict[str, int]) -> dict[str, int]:
    """Scales integers to the sum 2**32 by largest remainders, ties by name."""
    total = sum(weights.values())
    scaled = {name: max(weight * ONE // total, weight > 0) for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: (-(weights[name] * ONE % total), name))
    for name in by_remainder[: max(0, ONE - sum(scaled.values()))]:
        scaled[name] += 1
    scaled[max(scaled, key=lambda name: (scaled[name], name))] += ONE - sum(scaled.values())
    return scaled


def _residual(key: int, lengths: tuple[int, ...]) -> int:
    """Picks one of the lengths in proportion to itself: the document that a random token falls into."""
    token = random_index(key, 1, max(1, sum(lengths)))
    for length in lengths:
        if token < length:
            return length
        token -= length
    return 1


def imagine(
    active: dict[str, int], credits: dict[str, int], lengths: dict[str, tuple[int, ...]], seed: Seed
) -> dict[str, int]:
    """Gives the credits after a random number of imagined draws, up to two cycles of the rarest source.

    ``credits`` are those that there are already; their mean is kept, and without any the mean of all is zero.
    """
    if credits.keys() == active.keys():
        return credits
    key = derive_key("Mixer", seed, "imagine", *sorted(active.keys() - credits.keys()))
    imagined = dict(credits)
    top = max(credits.values(), default=0)
    for name in active.keys() - credits.keys():
        own = derive_key("Mixer", seed, name)
        imagined[name] = top - random_index(own, 0, _residual(own, lengths[name]) * ONE)
    num_draws = random_index(key, 0, min(MAX_WARM_UP, 2 * ONE // min(active.values())))
    for number in range(len(active) > 1 and num_draws):
        name = max(active, key=imagined.__getitem__)
        length = lengths[name][random_index(key, number + 1, len(lengths[name]))]
        for other, weight in active.items():
            imagined[other] += weight * length
        imagined[name] -= length * ONE
    kept = list(credits) or list(active)
    before, after = sum(credits.values()) // len(kept), sum(imagined[name] for name in kept) // len(kept)
    return {name: credit - after + before for name, credit in imagined.items()}


def choose(
    queues: Sequence[Sequence[int]],
    credits: Sequence[int],
    shares: Sequence[int],
    due: int,
    num_tokens: int,
    extra: int,
) -> tuple[list[int], list[int], list[int], int]:
    """Chooses documents by their lengths: each from the source of the largest credit, of equal ones the first.

    Args:
        queues: for each source the lengths of documents that are there.
        credits: of each source.
        shares: of each source, as integers of sum 2**32.
        due: the source that the first document is of.
        num_tokens: the last document is the one that reaches it, or after which the queue that is due is empty.
        extra: tokens that each document counts more than it has.

    Returns:
        Each document's source and length; the credits after them; and the source that is due then.
    """
    chosen = _choose(queues, [*map(float, credits)], [*map(float, shares)], float(ONE), due, num_tokens, extra)
    dues, lengths, after, due_then = chosen
    # Sums and products of whole numbers are exact in floats below this limit, and take less time.
    if max(map(abs, credits)) + 2 * ONE * sum(lengths) < EXACT:
        return dues, lengths, [*map(int, after)], due_then
    return _choose(queues, list(credits), list(shares), ONE, due, num_tokens, extra)


def _choose(
    queues: Sequence[Sequence[int]], drawn: list[T], shares: list[T], one: T, due: int, num_tokens: int, extra: int
) -> tuple[list[int], list[int], list[T], int]:
    # Credits are those before and the share of all tokens chosen, less what was chosen of the source itself.
    following = [iter(queue).__next__ for queue in queues]
    dues: list[int] = []
    lengths: list[int] = []
    total = 0
    with contextlib.suppress(StopIteration):
        while num_tokens > 0:
            length = following[due]()
            dues.append(due)
            lengths.append(length)
            num_tokens -= length + extra
            drawn[due] -= length * one
            total += length
            best, number = -math.inf, 0
            for share in shares:  # plain, since this is done for each document
                credit = drawn[number] + share * total
                if credit > best:
                    best, due = credit, number
                number += 1
    return dues, lengths, [credit + share * total for credit, share in zip(drawn, shares, strict=True)], due


def counted(drawn: Drawn, number: int, first: int) -> tuple[int, int]:
    """Gives how many documents and tokens were drawn of a source, from a document on."""
    _, _, dues, lengths = drawn
    chosen = [length for due, length in zip(dues[first:], lengths[first:], strict=True) if due == number]
    return len(chosen), sum(chosen)


def credits_before(drawn: Drawn, end: int) -> list[int]:
    """Gives the credits before a document."""
    before, shares, dues, lengths = drawn
    credits, total = list(before), sum(lengths[:end])
    for due, length in zip(dues[:end], lengths[:end], strict=True):
        credits[due] -= length * ONE
    return [credit + share * total for credit, share in zip(credits, shares, strict=True)]
