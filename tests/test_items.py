from collections import OrderedDict, namedtuple
from enum import IntEnum
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from sources import same, stored, stored_bytes

from ibm_nodes import Document, Sample
from ibm_nodes.items import TAG, freeze, thaw

FEW = settings(max_examples=150, deadline=None, database=None)
DTYPES = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8", "?"]
Pair = namedtuple("Pair", "left right")


class Color(IntEnum):
    RED = 1


ids = st.sampled_from([0, 1, 254, 255, 256, 65_534, 65_535, 65_536, 2**31 - 1, 2**31 + 5])


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    array = draw(npst.arrays(dtype, shape))
    return array[::2] if array.ndim and draw(st.booleans()) else array


@st.composite
def token_arrays(draw):
    values = draw(st.lists(ids, max_size=8))
    fitting = [kind for kind in ("u2", "u4", "i4", "i8") if all(value <= np.iinfo(kind).max for value in values)]
    return np.array(values, draw(st.sampled_from(fitting)))


tensors = token_arrays().map(lambda array: torch.from_numpy(array.astype(np.int64)))
places = st.tuples(st.text(), st.text(), st.integers(0, 2**60), st.integers(-1, 2**60))
documents = st.builds(Document, token_arrays(), st.text(), st.integers(0, 2**60), st.text(), st.integers(0, 100))
samples = st.builds(Sample, token_arrays(), st.tuples(st.just(0), st.integers(1)), st.tuples(places, places))
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
items = st.recursive(
    plain | arrays() | token_arrays() | tensors | documents | samples,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


@FEW
@given(items)
def test_an_item_comes_back_as_it_was_with_its_classes_and_dtypes(item):
    assert same(thaw(freeze(item)), item)


@FEW
@given(items)
def test_a_frozen_item_loads_with_weights_only_and_is_the_same(item):
    frozen = stored(freeze(item))
    assert same(thaw(frozen), item)
    assert same(freeze(thaw(frozen)), freeze(item))


@pytest.mark.parametrize(("dtype", "top"), [("u2", 97), ("u2", 65_535), ("i4", 2**31 - 1), ("i8", 2**31 + 5)])
def test_an_array_takes_no_more_bytes_in_a_checkpoint_than_in_memory(dtype, top):
    item = Sample(np.full(10_000, top, dtype), (0,), (("data", "file", 1, 0),))
    assert stored_bytes(freeze(item)) < item.tokens.nbytes + 3000
    assert same(thaw(stored(freeze(item))), item)


@pytest.mark.parametrize("item", [b"", b"x" * 3, bytes(range(256)), np.array([], np.int32), np.zeros((0, 3))], ids=repr)
def test_bytes_and_arrays_load_with_weights_only_also_when_empty(item):
    assert same(thaw(stored(freeze(item))), item)


def test_writing_to_an_item_later_does_not_change_what_was_frozen():
    for array in (np.arange(4), np.arange(4).astype(np.uint16), np.ones(4, np.float32)):
        item = {"array": array, "tensor": torch.from_numpy(array.copy().astype(np.int64)), "list": [1, [2]]}
        expected = {"array": array.copy(), "tensor": item["tensor"].clone(), "list": [1, [2]]}
        frozen = freeze(item)
        with pytest.raises(ValueError, match="read-only"):
            item["array"][:] = 9
        item["tensor"][:] = 9
        item["list"][1].append(3)
        item["list"].append(4)
        assert same(thaw(frozen), expected)


def test_writing_to_what_was_thawed_does_not_change_the_state():
    frozen = freeze({"tensor": torch.arange(3), "list": [1], "array": np.arange(3)})
    first = thaw(frozen)
    first["tensor"][:] = 9
    first["list"].append(2)
    assert not first["array"].flags.writeable
    assert same(thaw(frozen), {"tensor": torch.arange(3), "list": [1], "array": np.arange(3)})


def test_a_slice_of_a_tensor_or_an_array_is_saved_without_the_rest():
    assert stored_bytes(freeze(torch.zeros(1 << 20)[5:7])) < 3000
    assert stored_bytes(freeze(torch.zeros(1 << 10, 1 << 10)[:, 5])) < 10_000
    assert stored_bytes(freeze(np.zeros(1 << 20)[5:7])) < 3000


@pytest.mark.parametrize(
    "item",
    [
        {1, 2},
        object(),
        1j,
        Fraction(1, 2),
        Pair(1, 2),
        Color.RED,
        np.int64(3),
        np.float64(0.5),
        np.bool_(True),
        np.array([None]),
        np.array(["a", {}], object),
        range(3),
        bytearray(b"x"),
        (value for value in ()),
    ],
    ids=lambda item: type(item).__name__,
)
def test_any_other_class_is_refused_by_name_however_deep_it_lies(item):
    kind = "object" if isinstance(item, np.ndarray) else type(item).__name__
    for nested in (item, [item], {"key": (1, [item])}):
        with pytest.raises(TypeError, match=kind):
            freeze(nested)


@pytest.mark.parametrize(
    "item",
    [
        OrderedDict(a=1),
        {Color.RED: 1},
        {np.int64(1): 1},
        {Fraction(1, 2): 1},
        {TAG: "array"},
        {TAG: "sample", "other": 1},
        np.array([(1, 2.0)], [("id", "i4"), ("score", "f8")]),
        np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=["OrderedDict", "key-enum", "key-numpy", "key-fraction", "tag", "tag-sample", "structured", "masked"],
)
def test_what_would_come_back_as_something_else_is_refused(item):
    try:
        frozen = freeze(item)
    except TypeError:
        return
    assert same(thaw(stored(frozen)), item)
