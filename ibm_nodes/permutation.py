"""Randomness as a function of a key: no generator, nothing to save, the same on every machine.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), a bijection of 64-bit words: distinct counters give distinct words, so sorting them is a
permutation without ties.
"""

import hashlib

import numpy as np

Seed = int | tuple[int, ...]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def check_seed(seed: Seed) -> Seed:
    """Gives the seed back, after a look at its class.

    Raises:
        TypeError: if it is not an int or a tuple of ints.
    """
    parts = seed if isinstance(seed, tuple) else (seed,)
    if not all(isinstance(part, int) and not isinstance(part, bool) for part in parts):
        raise TypeError(f"seed must be an int or a tuple of ints, got {seed!r}")
    return seed


def derive_key(*parts: Seed | str) -> int:
    """Gives a 64-bit key that depends on every part, its class and its place, and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def random_word(key: int, counter: int) -> int:
    """Gives the 64-bit word number ``counter`` of the sequence that ``key`` names."""
    word = (key + (counter + 1) * _GAMMA) & _MASK
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)


def random_index(key: int, counter: int, size: int) -> int:
    """Gives an index below ``size``; its bias is below size / 2**64."""
    return (random_word(key, counter) * size) >> 64


def random_words(key: int, counters: np.ndarray) -> np.ndarray:
    """Gives `random_word` of every counter, as uint64."""
    word = counters.astype(np.uint64)
    word += np.uint64(1)
    word *= np.uint64(_GAMMA)
    word += np.uint64(key)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        word ^= word >> np.uint64(shift)
        word *= np.uint64(factor)
    word ^= word >> np.uint64(31)
    return word


def permutation(key: int, size: int) -> np.ndarray:
    """Gives a permutation of ``range(size)`` as an int64 array, in O(size log size)."""
    return np.argsort(random_words(key, np.arange(size)))
