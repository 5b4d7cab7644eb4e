import contextlib
import gc
import itertools
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor

import corpora
import pytest
import torch
from fault_proxy import Fault, FaultProxy
from sources import Items, documents, numbers, same, stored

from ibm_nodes import Batcher, Packer, Prefetcher, Reader, Sharder, Shuffler, prefetcher
from ibm_nodes.node import Node
from ibm_nodes.recipes import object_store

FACTORS = [1, 4, 16]


class Slow(Items):
    """Takes its time for each item."""

    def __init__(self, items, seconds, fails=()):
        super().__init__(items, fails)
        self.seconds = seconds

    def next(self):
        time.sleep(self.seconds)
        return super().next()


class Gated(Items):
    """Blocks before each item for as long as its gate is shut."""

    def __init__(self, items):
        super().__init__(items)
        self.gate, self.waiting = threading.Event(), threading.Event()

    def next(self):
        self.waiting.set()
        self.gate.wait()
        return super().next()


def build(length, prefetch_factor=4, fails=()):
    return Prefetcher(Items(range(length), fails), prefetch_factor=prefetch_factor)


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ibm_nodes")]


def no_thread_within(seconds):
    deadline = time.monotonic() + seconds
    while threads():
        assert time.monotonic() < deadline, threads()
        time.sleep(0.01)


def run_ahead():
    """Gives a prefetching thread time to fill its queue."""
    time.sleep(0.02)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 40])
def test_yields_the_items_of_its_source_in_order_and_then_ends(length, factor):
    node = build(length, factor)
    assert list(node) == list(range(length))
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(node)
    assert threads() == []


@pytest.mark.parametrize("factor", FACTORS)
def test_its_state_is_that_of_the_last_item_handed_out_however_far_it_ran_ahead(factor):
    node = build(30, factor)
    assert node.state_dict() == {"position": 0}
    for item in range(30):
        assert next(node) == item
        if item % 7 == 0:
            run_ahead()
        assert node.state_dict() == {"position": item + 1}
    with pytest.raises(StopIteration):
        next(node)
    assert node.state_dict() == {"position": 30}


def nodes_with_buffers(factor):
    node = Items(documents([5, 20, 0, 3, 9, 1, 30, 2] * 4))
    node = Shuffler(Packer(node, seq_len=4, eos_id=9), buffer_size=5, seed=0)
    return Prefetcher(Batcher(node, batch_size=2, drop_last=False), prefetch_factor=factor)


@pytest.mark.parametrize("factor", FACTORS)
def test_states_of_nodes_with_buffers_are_exact_and_stay_as_they_were_taken(factor):
    node = nodes_with_buffers(factor)
    states, batches = [(node.state_dict(), stored(node.state_dict()))], []
    for batch in node:
        batches.append(batch)
        run_ahead()
        states.append((node.state_dict(), stored(node.state_dict())))
    other = nodes_with_buffers(factor)
    for taken in range(0, len(states), 5):
        kept, copied = states[taken]
        assert same(stored(kept), copied)
        other.reset(copied)
        assert same(list(other), batches[taken:])


@pytest.mark.parametrize("factor", FACTORS)
def test_an_error_comes_in_its_place_and_the_next_call_goes_on_after_it(factor):
    node, seen = build(20, factor, fails=[0, 7, 8, 20]), []
    while True:
        try:
            seen.append(next(node))
        except OSError as error:
            seen.append(str(error))
            assert node.state_dict() == {"position": sum(isinstance(item, int) for item in seen)}
        except StopIteration:
            break
    expected = list(range(20))
    for fail in (20, 8, 7, 0):
        expected.insert(fail, f"cannot read item {fail}")
    assert seen == expected
    assert threads() == []


def test_an_error_that_stays_is_raised_each_time():
    class Broken(Items):
        def next(self):
            if self.position == 2:
                raise OSError("gone")
            return super().next()

    node = Prefetcher(Broken(range(9)), prefetch_factor=4)
    assert [next(node), next(node)] == [0, 1]
    for _ in range(3):
        with pytest.raises(OSError, match="gone"):
            next(node)
    assert node.state_dict() == {"position": 2}
    assert threads() == []


@pytest.mark.parametrize("kind", [KeyError, MemoryError, SystemExit, KeyboardInterrupt])
def test_an_error_of_any_class_reaches_the_consumer_with_its_traceback(kind):
    class Broken(Items):
        def next(self):
            raise kind("no")

    node = Prefetcher(Broken(range(3)), prefetch_factor=2)
    with pytest.raises(kind, match="no") as raised:
        next(node)
    assert raised.traceback[-1].name == "next"
    assert raised.traceback[-1].path.name == "test_prefetcher.py"


def test_a_source_whose_state_cannot_be_taken_is_an_error_not_a_dead_thread():
    node = Prefetcher(Shuffler(Items([{1}, {2}, {3}]), buffer_size=2, seed=0), prefetch_factor=2)
    with pytest.raises(TypeError, match="got set"):
        next(node)


def test_stop_iteration_stays_until_a_reset():
    node = build(3)
    for _ in range(2):
        assert list(node) == [0, 1, 2]
        assert list(node) == []
        node.close()
        assert list(node) == []
        node.reset()


def test_goes_on_after_a_close_with_the_item_after_the_last_handed_out():
    node, items = build(40, 8), []
    for number in range(40):
        if number % 6 == 0:
            run_ahead()
            node.close()
            node.close()
            assert threads() == []
            assert node.state_dict() == {"position": number}
        items.append(next(node))
    assert items == list(range(40))
    node.close()


def test_a_reset_forgets_what_was_read_ahead():
    node = build(40, 8)
    for taken in (0, 1, 5):
        node.reset()
        assert list(itertools.islice(node, taken)) == list(range(taken))
        run_ahead()
    node.reset({"position": 30})
    assert threads() == []
    assert list(node) == list(range(30, 40))


def test_nothing_is_started_before_the_first_item():
    node = build(5)
    node.state_dict()
    node.reset()
    node.reset(node.state_dict())
    assert threads() == []
    next(node)
    assert threads() == ["ibm_nodes-prefetch"]
    node.close()


def test_holds_no_more_items_than_it_was_told():
    class Alive:
        count = 0

        def __init__(self):
            Alive.count += 1

        def __del__(self):
            Alive.count -= 1

    class Made(Items):
        def next(self):
            super().next()
            return Alive()

    node = Prefetcher(Made(range(100)), prefetch_factor=5)
    for _ in range(10):
        next(node)
        time.sleep(0.01)
        assert Alive.count <= 5 + 1
    node.close()


def test_a_node_that_is_dropped_ends_its_thread_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        node = build(1 << 40)
        next(node)
        reference = weakref.ref(node)
        del node
        assert reference() is None
        no_thread_within(2)
    finally:
        gc.enable()


def test_an_error_keeps_no_node_alive():
    gc.collect()
    gc.disable()
    try:
        node = build(9, fails=[2])
        with pytest.raises(OSError, match="cannot read"):
            list(node)
        reference = weakref.ref(node)
        del node
        assert reference() is None
        no_thread_within(2)
    finally:
        gc.enable()


ENDS = {"close": lambda nodes: nodes[0].close(), "reset": lambda nodes: nodes[0].reset(), "drop": list.clear}


@pytest.mark.parametrize("how", ENDS)
def test_ends_its_thread_while_its_queue_is_full(how):
    nodes = [build(1 << 40)]
    next(nodes[0])
    run_ahead()
    began = time.monotonic()
    ENDS[how](nodes)
    assert time.monotonic() - began < 1
    no_thread_within(2)


def test_no_wait_has_a_limit_since_one_that_passes_at_the_wrong_moment_never_ends(monkeypatch):
    """SimpleQueue.get in CPython 3.11 waits for ever if its timeout passes before it begins to wait."""

    class Strict(queue.SimpleQueue):
        def get(self, block=True, timeout=None):
            assert timeout is None
            return super().get(block)

    monkeypatch.setattr(queue, "SimpleQueue", Strict)
    node = build(100)
    assert next(node) == 0
    run_ahead()
    node.close()
    no_thread_within(2)
    assert list(node) == list(range(1, 100))
    no_thread_within(2)


def test_a_consumer_that_waits_while_another_thread_closes_the_node_does_not_wait_for_ever():
    rng = random.Random(0)
    for _ in range(100):
        node, given = Prefetcher(Slow(range(100), 0.003), prefetch_factor=2), []

        def consume(node=node, given=given):
            with contextlib.suppress(RuntimeError):
                given.append(next(node))

        assert next(node) == 0
        consumer = threading.Thread(target=consume, daemon=True)
        consumer.start()
        time.sleep(rng.random() * 0.004)
        node.close()
        consumer.join(5)
        assert not consumer.is_alive()
        assert next(node) == 1 + len(given)
        node.close()
    no_thread_within(2)


def test_a_thread_that_fails_outside_of_its_source_is_an_error_not_a_dead_thread(monkeypatch):
    node = build(100)
    monkeypatch.setattr(prefetcher, "_draw", lambda source: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(node)
    monkeypatch.undo()
    assert list(node) == list(range(100))
    no_thread_within(2)


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has threads")
def test_a_node_that_was_started_is_an_error_in_a_forked_process_not_a_wait_for_ever():
    node = build(100)
    assert next(node) == 0
    child = os.fork()
    if not child:
        try:
            list(node)
        except RuntimeError as error:
            os._exit(0 if "in a forked process, build another loader" in str(error) else 2)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 10
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if found == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert found == (child, 0)
    node.close()


@pytest.fixture(scope="module")
def store(s3):
    """Files of many blocks, read through a proxy."""
    url = object_store.make_bucket(s3.storage_options, f"t-{uuid.uuid4().hex[:12]}")
    rows = corpora.documents([200_000] * 24, stride=200_000)
    corpora.write(f"{url}data/", [corpora.every(rows, 1)], "arrow", s3.storage_options)
    with FaultProxy(s3.endpoint) as proxy:
        yield f"{url}data", {**s3.storage_options, "endpoint_url": proxy.endpoint}, proxy


def reading(store):
    url, options, _ = store
    source = Reader(url, shard=0, num_shards=1, storage_options=options)
    return Prefetcher(Packer(source, seq_len=1000, eos_id=1), prefetch_factor=2)


@pytest.mark.parametrize("how", ENDS)
def test_leaves_no_thread_while_a_read_never_answers(store, how):
    nodes = [reading(store)]
    next(nodes[0])
    store[2].spoil(itertools.repeat(Fault(after=-1, then="hang")))
    time.sleep(0.1)
    ENDS[how](nodes)
    if how == "reset":
        nodes.clear()  # a reader that is reset asks for its first block again
    began = time.monotonic()
    try:
        no_thread_within(2)
        assert time.monotonic() - began < 2
    finally:
        store[2].spoil([])


@pytest.mark.parametrize("where", ["is_listing", "is_read"])
def test_leaves_no_thread_while_the_first_answer_never_comes(store, where):
    url, options, proxy = store
    proxy.spoil(itertools.repeat(Fault(after=-1, then="hang")), lambda request: getattr(request, where)())
    node = reading(store)

    def wait():
        with contextlib.suppress(BaseException):
            next(node)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)
    began = time.monotonic()
    try:
        node.close()
        waiting.join(5)
        no_thread_within(2)
        assert time.monotonic() - began < 3
    finally:
        proxy.spoil([])
        waiting.join()


def test_goes_on_after_a_close_while_a_read_never_answered(store):
    node, whole = reading(store), list(itertools.islice(reading(store), 900))
    items = list(itertools.islice(node, 300))
    store[2].spoil(itertools.repeat(Fault(after=-1, then="hang")))
    time.sleep(0.1)
    node.close()
    store[2].spoil([])
    items += itertools.islice(node, 600)
    assert same(items, whole)
    node.close()


def test_a_source_that_is_still_busy_when_it_is_closed_is_not_used_by_two(monkeypatch):
    monkeypatch.setattr(prefetcher, "JOIN_SECONDS", 0.05)
    source = Gated(range(100))
    node = Prefetcher(source, prefetch_factor=2)
    source.gate.set()
    assert next(node) == 0
    source.gate.clear()
    source.waiting.clear()
    assert next(node) == 1
    assert source.waiting.wait(2)
    node.close()
    opener = threading.Timer(0.2, source.gate.set)
    opener.start()
    try:
        assert [next(node) for _ in range(10)] == list(range(2, 12))
    finally:
        opener.join()
        node.close()


def test_a_source_whose_reset_fails_is_reset_again_by_the_next_call():
    class Fragile(Items):
        fails_left = 1

        def reset(self, initial_state=None):
            if self.fails_left:
                self.fails_left -= 1
                raise ConnectionError("no answer")
            super().reset(initial_state)

    node = Prefetcher(Fragile(range(5)), prefetch_factor=2)
    with pytest.raises(ConnectionError, match="no answer"):
        next(node)
    assert list(node) == list(range(5))

    node = Prefetcher(Fragile(range(5)), prefetch_factor=2)
    with pytest.raises(ConnectionError, match="no answer"):
        node.reset({"position": 3})
    assert list(node) == [3, 4]

    node = Prefetcher(Fragile(range(5)), prefetch_factor=2)
    node.source.fails_left = 0
    assert next(node) == 0
    node.close()
    node.source.fails_left = 1
    with pytest.raises(ConnectionError, match="no answer"):
        next(node)
    assert list(node) == [1, 2, 3, 4]


def test_counts_the_time_its_consumer_waited():
    node = Prefetcher(Slow(range(6), 0.05), prefetch_factor=2)
    list(node)
    assert 0.25 < node.waited_seconds < 2
    node = Prefetcher(Slow(range(6), 0.001), prefetch_factor=2)
    for _ in node:
        time.sleep(0.05)
    assert node.waited_seconds < 0.05


def test_runs_ahead_while_its_consumer_works():
    node = Prefetcher(Slow(range(8), 0.05), prefetch_factor=8)
    next(node)
    time.sleep(0.5)
    began = time.monotonic()
    assert list(node) == list(range(1, 8))
    assert time.monotonic() - began < 0.1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("pin_memory", [True, None, False])
def test_passes_all_through_where_there_is_nothing_to_pin_for(pin_memory):
    items = [{"ids": torch.arange(3)}, [torch.zeros(2)], (1, "a"), documents([3])[0], None]
    given = list(Prefetcher(Items(items), prefetch_factor=2, pin_memory=pin_memory))
    assert all(one is other for one, other in zip(given, items, strict=True))


def test_refuses_to_prefetch_nothing():
    with pytest.raises(ValueError, match="prefetch_factor must be at least 1, got 0"):
        build(1, 0)


def test_many_at_once_each_have_a_thread_and_none_stays():
    nodes = [
        Prefetcher(Sharder(numbers, num_shards=4, rank=rank, world_size=4), prefetch_factor=2) for rank in range(4)
    ]
    assert [[next(node) for _ in range(3)] for node in nodes] == [[(rank, k) for k in range(3)] for rank in range(4)]
    assert len(threads()) == 4
    nodes.clear()
    del nodes
    no_thread_within(2)


PROGRAM = """
import json, sys, time
from ibm_nodes import Batcher, CausalLMCollator, Loader, Packer, Prefetcher, Reader, Sharder

url, options, how, hangs = json.loads(sys.argv[1])


def graph(shard, num_shards):
    reader = Reader(url, shard=shard, num_shards=num_shards, storage_options=options)
    return Packer(reader, seq_len=1000, eos_id=1)


def say(word):
    print(word, time.monotonic(), flush=True)


def train():
    node = Sharder(graph, num_shards=4, rank=0, world_size=1)
    node = Batcher(node, batch_size=4, collate=CausalLMCollator(shift_labels=True))
    loader = Loader(Prefetcher(node, prefetch_factor=4))
    iterator = iter(loader)
    for number in range(3):
        next(iterator)
    say("drawn")
    if hangs:
        sys.stdin.readline()
    if how == "global":
        globals().update(iterator=iterator, loader=loader)
    elif how == "exception":
        say("ending")
        raise ValueError("a bad loss")
    elif how == "exit":
        say("ending")
        sys.exit(3)
    elif how == "interrupt":
        while True:
            next(iterator)
            time.sleep(0 if hangs else 0.01)
    say("ending")


train()
"""
WHILE_IT_ANSWERS = ["exception", "exit", "global", "interrupt"]
WHILE_IT_HANGS = ["fall-off", "interrupt"]


def run_child(url, options, how, proxy):
    """Runs the program to its end; gives its exit code, how many seconds its end took, and what it complained of."""
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps([url, options, how, proxy is not None])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        drawn = child.stdout.readline()
        assert drawn.startswith("drawn"), child.communicate()
        if proxy is not None:
            proxy.spoil(itertools.repeat(Fault(after=-1, then="hang")))
            child.stdin.write("\n")
            child.stdin.flush()
        if how == "interrupt":
            time.sleep(0.7)
            began = time.monotonic()
            child.send_signal(signal.SIGINT)
        else:
            began = float(child.stdout.readline().split()[1])
        _, complaints = child.communicate(timeout=60)
        return child.returncode, time.monotonic() - began, complaints
    finally:
        child.kill()
        child.wait()


@pytest.fixture(scope="module")
def ends(store):
    """Programs that end in every way, while the store answers and while it does not."""
    url, options, proxy = store
    with FaultProxy(proxy.server) as stuck, ThreadPoolExecutor(2) as pool:
        stuck_options = {**options, "endpoint_url": stuck.endpoint}
        normal = pool.submit(lambda: {(how, "answers"): run_child(url, options, how, None) for how in WHILE_IT_ANSWERS})
        hanging = {}
        for how in WHILE_IT_HANGS:
            hanging[how, "hangs"] = run_child(url, stuck_options, how, stuck)
            stuck.spoil([])
        return {**normal.result(), **hanging}


CODES = {"fall-off": 0, "exception": 1, "exit": 3, "global": 0, "interrupt": -signal.SIGINT}
LAST_LINES = {"exception": "ValueError: a bad loss", "interrupt": "KeyboardInterrupt"}


@pytest.mark.parametrize(
    ("how", "store_state"),
    [*itertools.product(WHILE_IT_ANSWERS, ["answers"]), *itertools.product(WHILE_IT_HANGS, ["hangs"])],
)
def test_a_program_ends_at_once_with_its_own_exit_code_and_its_own_words(ends, how, store_state):
    code, seconds, complaints = ends[how, store_state]
    assert code == CODES[how], complaints
    assert seconds < 10
    if how not in LAST_LINES:
        assert complaints == ""
    else:
        lines = complaints.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[-1] == LAST_LINES[how]
        assert complaints.count("Traceback") == 1
        assert "ignored" not in complaints


class Costly(Node):
    """Its state takes long to make, but once; parts are kept, as a Sharder keeps those of its logical shards."""

    def __init__(self):
        super().__init__()
        self.made = []

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.position = 0 if initial_state is None else initial_state["position"]

    def next(self):
        self.position += 1
        return self.position

    def snapshot(self):
        return self._make, (self.position,)

    def _make(self, position):
        self.made.append((position, threading.current_thread().name))
        if position == 3:
            raise OSError("no state")
        return {"position": position}


def test_states_are_made_while_the_thread_has_nothing_else_to_do_and_an_error_is_told_to_who_asks():
    source = Costly()
    with contextlib.closing(Prefetcher(source, prefetch_factor=2)) as node:
        assert next(node) == 1
        deadline = time.monotonic() + 10
        while len(source.made) < 3:  # of the two that wait, and of the one that has no room yet
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert {name for _, name in source.made} == {"ibm_nodes-prefetch"}
        assert node.state_dict() == {"position": 1}
        assert [next(node), next(node)] == [2, 3]
        with pytest.raises(OSError, match="no state"):
            node.state_dict()
        assert next(node) == 4
        assert node.state_dict() == {"position": 4}
