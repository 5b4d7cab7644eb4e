"""The contracts of a node, as assertions for our tests and for users' nodes."""

import io
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torchdata.nodes import BaseNode

from ibm_nodes.sharder import Sharder
from ibm_nodes.state import State, merge

T = TypeVar("T")


def assert_resumes(make: Callable[[], BaseNode[T]], *, num_items: int = 20, cuts: Iterable[int] | None = None) -> None:
    """Asserts that a node which is stopped after any item, saved and built anew goes on with exactly the next one.

    Also that a state is plain data (it goes through ``torch.save`` and ``torch.load(weights_only=True)``), that it
    does not change when the node runs on, that taking it changes nothing, and that ``reset(None)`` begins at the
    beginning.

    Args:
        make: builds the node, with the same arguments each time.
        num_items: items to compare, fewer if the node ends before.
        cuts: numbers of items after which to stop; all from 0 to num_items if None.

    Raises:
        AssertionError: saying after how many items, and which item differs.
    """
    node = make()
    expected = list(islice(node, num_items))
    assert expected, "the node yields nothing"
    node.reset(None)
    _assert_equal(list(islice(node, num_items)), expected, "after reset(None)")
    cuts = list(range(len(expected) + 1) if cuts is None else cuts)
    for cut in cuts:
        node = make()
        _assert_equal([next(node) for _ in range(cut)], expected[:cut], f"with states taken, before item {cut}")
        state = node.state_dict()
        saved = _to_file(state)
        _assert_equal(list(islice(node, num_items - cut)), expected[cut:], f"after the state at item {cut} was taken")
        assert _to_file(state) == saved, (
            f"the state after {cut} items changed when the node ran on: it holds a live buffer"
        )
        fresh = make()
        fresh.reset(_from_file(saved))
        _assert_equal(list(islice(fresh, num_items - cut)), expected[cut:], f"resumed after {cut} items")
        fresh.reset(_from_file(saved))
        _assert_equal(list(islice(fresh, num_items - cut)), expected[cut:], f"resumed in a used node after {cut} items")
    for cut in cuts:
        for more in range(min(2, len(expected) - cut + 1)):  # states taken right after a load, and an item later
            _assert_resumes_twice(make, expected, cut, more, num_items)


def _assert_resumes_twice(
    make: Callable[[], BaseNode[T]], expected: list[T], cut: int, more: int, num_items: int
) -> None:
    first, second, third = make(), make(), make()
    for _ in range(cut):
        next(first)
    second.reset(_from_file(_to_file(first.state_dict())))
    rest = list(islice(second, more))
    third.reset(_from_file(_to_file(second.state_dict())))
    rest += islice(third, num_items - cut - more)
    _assert_equal(rest, expected[cut:], f"resumed after {cut} items, and again {more} later")


def assert_rescales(
    graph: Callable[[int, int], BaseNode[T]],
    *,
    num_shards: int = 12,
    num_items: int = 48,
    cuts: Iterable[int] = (0, 12, 24),
) -> None:
    """Asserts that the global stream is the same at every world size, and after every change of it.

    Args:
        graph: builds the graph of a logical shard, as for ``Sharder``.
        num_shards: number of logical shards; every divisor is tried as a world size.
        num_items: length of the global stream to compare, a multiple of num_shards.
        cuts: positions at which to save, merge, and load at every other world size; multiples of num_shards.

    Raises:
        AssertionError: saying which world size, and which item of the global stream differs.
    """
    sizes = [size for size in range(1, num_shards + 1) if num_shards % size == 0]
    expected, _ = _run(graph, num_shards, 1, None, 0, num_items)
    for size in sizes:
        stream, _ = _run(graph, num_shards, size, None, 0, num_items)
        _assert_equal(stream, expected, f"at world size {size}")
    for cut in cuts:
        for before in sizes:
            stream, states = _run(graph, num_shards, before, None, 0, cut)
            state = _from_file(_to_file(merge(states)))
            for after in sizes:
                rest, _ = _run(graph, num_shards, after, state, cut, num_items - cut)
                _assert_equal(stream + rest, expected, f"from world size {before} to {after} at item {cut}")


def _run(
    graph: Callable[[int, int], BaseNode[T]], num_shards: int, size: int, state: State | None, position: int, count: int
) -> tuple[list[T], list[State]]:
    nodes = [Sharder(graph, num_shards=num_shards, rank=rank, world_size=size) for rank in range(size)]
    for node in nodes:
        node.reset(state)
    stream = [next(nodes[number % size]) for number in range(position, position + count)]
    return stream, [node.state_dict() for node in nodes]


def _to_file(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _from_file(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _assert_equal(found: list[Any], expected: list[Any], when: str) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=False)):
        assert _same(one, other), f"item {number} differs {when}: {one!r}, expected {other!r}"
    assert len(found) == len(expected), f"{len(found)} items {when}, expected {len(expected)}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        return (
            type(one) is type(other)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and bool(np.all(np.asarray(one) == np.asarray(other)))
        )
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)
