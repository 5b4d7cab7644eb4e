import os
import subprocess
import sys

import numpy as np
import pytest

from ibm_nodes.permutation import check_seed, derive_key, permutation, random_index, random_word

KEY = 0x0123456789ABCDEF


@pytest.mark.parametrize("sizes", [range(200), [1000, 4096, 65_537, 1_000_003]], ids=["small", "large"])
def test_is_a_permutation_of_every_size(sizes):
    for size in sizes:
        order = permutation(KEY, size)
        assert order.dtype == np.int64
        assert np.array_equal(np.sort(order), np.arange(size))


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
def test_takes_every_64_bit_key(key):
    assert sorted(permutation(key, 100).tolist()) == list(range(100))


def test_orders_counters_by_the_words_that_they_get():
    for key in (0, 7, KEY, 2**64 - 1):
        words = [random_word(key, counter) for counter in range(50)]
        assert len(set(words)) == 50
        assert permutation(key, 50).tolist() == sorted(range(50), key=words.__getitem__)


def test_differs_by_key():
    orders = {tuple(permutation(derive_key("epoch", epoch), 20).tolist()) for epoch in range(1000)}
    assert len(orders) == 1000


def test_every_element_comes_to_every_place_equally_often():
    counts = np.zeros((6, 6))
    for epoch in range(6000):
        counts[np.arange(6), permutation(derive_key("epoch", epoch), 6)] += 1
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_an_index_is_below_its_size_and_each_is_equally_likely():
    for size in (1, 2, 3, 1000, 2**40):
        assert all(0 <= random_index(KEY, counter, size) < size for counter in range(100))
    counts = np.bincount([random_index(KEY, counter, 7) for counter in range(7000)], minlength=7)
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_a_key_depends_on_each_part_its_class_and_its_place():
    parts = [(), ("",), (1,), ("1",), ((1,),), (1, 2), ((1, 2),), (2, 1), ("a", "bc"), ("ab", "c"), ("abc",), ("a, b",)]
    keys = [derive_key(*each) for each in parts]
    assert len(set(keys)) == len(parts)
    assert all(0 <= key < 1 << 64 for key in keys)


def test_keys_and_orders_are_pinned():
    assert derive_key("Reader", (0, 3), "web", 1) == 0x5843A33D3CBB1E6D
    assert [random_word(KEY, counter) for counter in range(3)] == [
        0x157A3807A48FAA9D,
        0xD573529B34A1D093,
        0x2F90B72E996DCCBE,
    ]
    assert permutation(KEY, 10).tolist() == [4, 5, 0, 9, 2, 7, 3, 6, 1, 8]
    assert permutation(derive_key("epoch", 0), 8).tolist() == [1, 0, 7, 5, 2, 3, 6, 4]


def test_depends_neither_on_the_hash_seed_nor_on_global_generators():
    program = (
        "import random, numpy, torch; from ibm_nodes.permutation import *\n"
        "print(derive_key('Reader', (0, 1), 'é', 2), permutation(5, 20).tolist(), random_index(5, 1, 9))\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    assert len({process.communicate(timeout=100)[0] for process in running}) == 1
    assert all(process.returncode == 0 for process in running)


@pytest.mark.parametrize("seed", [True, 1.0, "1", None, [1], (1, "a"), (True,), np.int64(1), ((1, 2), 3)], ids=repr)
def test_a_seed_of_another_class_is_refused(seed):
    with pytest.raises(TypeError, match="seed must be an int or a tuple of ints, got"):
        check_seed(seed)


@pytest.mark.parametrize("seed", [0, -1, 2**70, (), (1,), (0, 5)], ids=repr)
def test_an_int_or_a_tuple_of_ints_is_a_seed(seed):
    assert check_seed(seed) is seed
