import gc
import itertools
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import corpora
import pytest
import torchdata.nodes
from sources import Items, PassedOn, numbers, packed, same, stored

from ibm_nodes import Batcher, CausalLMCollator, Loader, Prefetcher, Sharder

PROGRAM = """
import itertools, pickle, sys
loader = pickle.load(sys.stdin.buffer)
print([batch["input_ids"].tolist() for batch in itertools.islice(loader, 5)])
loader.close()
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A few small files."""
    prefix = f"file://{tmp_path_factory.mktemp('data')}/"
    lengths = [5, 0, 30, 1, 12, 7, 3, 90] * 4
    for form in ("arrow", "parquet"):
        corpora.write(f"{prefix}{form}/", [corpora.every(corpora.documents(lengths), 4)], form)
    return prefix


def build(url, prefetch=True):
    node = Sharder(partial(packed, url), num_shards=4, rank=0, world_size=1)
    node = Batcher(node, batch_size=2, collate=CausalLMCollator(shift_labels=True))
    return Loader(Prefetcher(node, prefetch_factor=4) if prefetch else node)


def counting(length, prefetch=True, fails=()):
    node = Items(range(length), fails)
    return Loader(Prefetcher(node, prefetch_factor=4) if prefetch else node)


def take(loader, number):
    return [batch["input_ids"].tolist() for batch in itertools.islice(loader, number)]


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ibm_nodes")]


both = pytest.mark.parametrize("prefetch", [True, False], ids=["prefetched", "plain"])


def test_its_state_before_iteration_starts_nothing():
    built = []

    def graph(shard, num_shards):
        built.append(shard)
        return packed("file:///nowhere/at/all", shard, num_shards)

    loader = Loader(Prefetcher(Sharder(graph, num_shards=4, rank=0, world_size=1), prefetch_factor=2))
    state = loader.state_dict()
    loader.load_state_dict(stored(state))
    loader.state_dict()
    iter(loader)
    assert built == []
    assert threads() == []
    with pytest.raises(FileNotFoundError, match="nowhere/at/all"):
        next(iter(loader))


@both
@pytest.mark.parametrize("taken", [0, 1, 7])
@pytest.mark.parametrize("used", [0, 3])
@pytest.mark.parametrize("looks", ["nothing", "before", "after", "both"])
def test_a_load_always_wins(url, prefetch, taken, used, looks):
    loader = build(url, prefetch)
    whole = take(loader, taken)
    state = stored(loader.state_dict())
    expected = take(loader, 5)
    loader.close()

    other = build(url, prefetch)
    take(other, used)
    if looks in ("before", "both"):
        other.state_dict()
    other.load_state_dict(state)
    if looks in ("after", "both"):
        assert same(other.state_dict(), state)
    assert take(other, 5) == expected
    other.close()
    assert len(whole) == taken


@both
def test_a_load_wins_over_iterators_that_exist(prefetch):
    loader = counting(20, prefetch)
    iterator = iter(loader)
    assert [next(iterator) for _ in range(4)] == [0, 1, 2, 3]
    loader.load_state_dict({"position": 15})
    assert next(iterator) == 15
    assert next(iter(loader)) == 16
    assert list(iterator) == [17, 18, 19]


@both
def test_a_load_wins_at_the_end_of_a_pass(prefetch):
    loader = counting(6, prefetch)
    start = loader.state_dict()
    assert next(iter(loader)) == 0
    state = loader.state_dict()
    assert list(loader) == [1, 2, 3, 4, 5]
    loader.load_state_dict(state)
    assert list(loader) == [1, 2, 3, 4, 5]
    loader.load_state_dict(start)
    assert list(loader) == [0, 1, 2, 3, 4, 5]


@both
def test_the_end_of_a_pass_stays_an_end_also_after_a_load(prefetch):
    loader = counting(3, prefetch)
    assert list(loader) == [0, 1, 2]
    for _ in range(2):
        assert list(loader) == []
    state = stored(loader.state_dict())
    assert state == {"position": 3}
    other = counting(3, prefetch)
    other.load_state_dict(state)
    assert list(other) == []
    loader.load_state_dict(state)
    assert list(loader) == []


@both
def test_iterating_again_goes_on_where_it_stands(prefetch):
    loader = counting(20, prefetch)
    seen = []
    for size in (0, 1, 3, 5, 100):
        for number, item in enumerate(loader, 1):
            seen.append(item)
            if number >= size:
                break
    assert seen == list(range(20))


@both
def test_goes_on_after_an_error(prefetch):
    loader, seen, errors = counting(9, prefetch, fails=[0, 4]), [], 0
    for _ in range(3):
        try:
            for item in loader:
                seen.append(item)
        except OSError:
            errors += 1
    assert seen == list(range(9))
    assert errors == 2


@both
def test_a_state_that_is_refused_does_not_move_it(url, prefetch):
    loader = build(url, prefetch)
    whole = take(loader, 9)
    loader.close()
    wrong = [{}, {**loader.state_dict(), "num_shards": 8}, {**loader.state_dict(), "shards": {}}]
    for state in wrong:
        loader = build(url, prefetch)
        batches = take(loader, 4)
        with pytest.raises(ValueError, match="state"):
            loader.load_state_dict(state)
        assert batches + take(loader, 5) == whole
        loader.close()


@both
def test_goes_on_after_a_close(url, prefetch):
    loader = build(url, prefetch)
    whole = take(loader, 8)
    loader.close()
    loader.load_state_dict(build(url, prefetch).state_dict())
    batches = []
    for size in (0, 1, 4, 3):
        loader.close()
        batches += take(loader, size)
    loader.close()
    loader.close()
    assert batches == whole


def test_closes_a_prefetcher_wherever_it_stands():
    class Doubled(PassedOn):
        def next(self):
            return 2 * super().next()

    with Loader(Doubled(Doubled(Prefetcher(Items(range(9)), prefetch_factor=2)))) as loader:
        assert next(iter(loader)) == 0
        assert threads() == ["ibm_nodes-prefetch"]
    assert threads() == []
    assert list(loader) == [4 * number for number in range(1, 9)]


def test_a_with_block_ends_its_threads_however_it_ends():
    with counting(1 << 40) as loader:
        next(iter(loader))
        assert threads() == ["ibm_nodes-prefetch"]
    assert threads() == []
    with pytest.raises(KeyError, match="mine"), counting(1 << 40) as loader:
        next(iter(loader))
        raise KeyError("mine")
    assert threads() == []


def iterate(loader):
    return [next(iter(loader)) for _ in range(3)]


def exhaust(loader):
    loader.load_state_dict({"position": (1 << 40) - 2})
    return list(loader)


def fail(loader):
    try:
        for _ in loader:
            pass
    except OSError:
        pass


USES = {
    "new": lambda loader: None,
    "state": lambda loader: loader.state_dict(),
    "iterated": iterate,
    "closed": lambda loader: (iterate(loader), loader.close()),
    "exhausted": exhaust,
    "failed": fail,
}


@both
@pytest.mark.parametrize("use", USES)
def test_is_in_no_reference_cycle(use, prefetch):
    gc.collect()
    gc.disable()
    try:
        loader = counting(1 << 40, prefetch, fails=[5])
        USES[use](loader)
        references = [weakref.ref(loader), weakref.ref(loader.root)]
        del loader
        deadline = time.monotonic() + 2
        while threads():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


@both
def test_an_error_of_a_real_read_keeps_no_node_alive(tmp_path, prefetch):
    corpora.write(f"file://{tmp_path}/", [corpora.every(corpora.documents([50] * 40), 1)], "arrow")
    loader = build(f"file://{tmp_path}", prefetch)
    pathlib.Path(tmp_path, "000.arrow").write_bytes(b"gone")
    gc.collect()
    gc.disable()
    try:
        fail_with = (OSError, ValueError)
        try:
            next(iter(loader))
        except fail_with:
            pass
        reference = weakref.ref(loader.root)
        del loader
        deadline = time.monotonic() + 3
        while threads():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert reference() is None
    finally:
        gc.enable()


@both
def test_an_iterator_alone_keeps_it_going(prefetch):
    iterator = iter(counting(5, prefetch))
    gc.collect()
    assert list(iterator) == [0, 1, 2, 3, 4]


@both
def test_pickles_before_it_has_started_and_gives_the_same(url, prefetch):
    loader = build(url, prefetch)
    copies = [pickle.loads(pickle.dumps(loader))]
    copies[0].state_dict()
    copies.append(pickle.loads(pickle.dumps(loader)))
    expected = take(loader, 5)
    for each in (loader, *copies):
        assert take(each, 5) == expected or each is loader
        each.close()


def test_a_pickled_loader_runs_in_a_process_of_its_own(url):
    loader = build(url)
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=pickle.dumps(loader),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=60,
    )
    assert (child.returncode, child.stderr) == (0, b"")
    assert child.stdout.decode().strip() == str(take(loader, 5))
    loader.close()


def test_is_a_loader_of_torchdata():
    assert isinstance(counting(1), torchdata.nodes.Loader)


def test_a_state_is_what_the_ranks_merge():
    loader = Loader(Prefetcher(Sharder(numbers, num_shards=4, rank=1, world_size=2), prefetch_factor=2))
    with loader:
        assert [next(iter(loader)) for _ in range(3)] == [(1, 0), (3, 0), (1, 1)]
        assert loader.state_dict() == {
            "position": 6,
            "num_shards": 4,
            "schedule": None,
            "shards": {1: (2, False, {"position": 2}), 3: (1, False, {"position": 1})},
        }


def test_a_closed_loader_holds_no_blocks_and_goes_on(url):
    expected = take(build(url, 2), 12)
    loader = build(url, 2)
    begun = take(loader, 5)
    loader.close()
    node = loader.root
    while not isinstance(node, Sharder):
        node = node.source
    assert node._graphs == {}
    assert same(begun + take(loader, 7), expected)
    loader.close()
