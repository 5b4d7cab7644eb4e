import contextlib
import gc
import os
import signal
import threading
import time
import warnings
import weakref

import pytest

from ibm_nodes import read_ahead as module
from ibm_nodes.read_ahead import Interrupted, Task, read_ahead, stop_waiting_when

MIB = 1 << 20


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    """A pool of the test's own, whose threads go soon."""
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(module, "_pool", module._Pool())
    yield module._pool
    module._pool.close()


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


def reading_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ibm_nodes-read")]


def wait_until(condition, within_s=3):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def full(gate, number=module.MAX_THREADS):
    """Reads that keep ``number`` threads busy until the gate opens."""
    tasks = [read_ahead(gate.wait, 1) for _ in range(number)]
    wait_until(lambda: len(reading_threads()) == number)
    return tasks


def test_a_read_runs_before_its_result_is_asked_for_and_once():
    calls = []
    task = read_ahead(lambda: calls.append(threading.current_thread().name) or 7, 1)
    wait_until(task.done)
    assert [task.result(), task.result(), task.peek()] == [7, 7, 7]
    assert len(calls) == 1
    assert calls[0].startswith("ibm_nodes-read")


def test_a_result_that_no_thread_has_begun_is_read_by_who_asks(gate):
    busy = full(gate)
    names = []
    task = read_ahead(lambda: names.append(threading.current_thread().name), 1)
    time.sleep(0.05)
    assert not task.done()
    task.result()
    assert names == [threading.current_thread().name]
    gate.set()
    assert [each.result() for each in busy] == [True] * module.MAX_THREADS
    assert len(names) == 1


def test_a_task_outside_the_pool_runs_where_it_is_asked_for():
    task = Task(threading.current_thread)
    assert not task.done()
    assert task.peek() is None
    assert task.result() is threading.current_thread()
    assert reading_threads() == []


def test_many_who_ask_for_one_result_get_it_from_one_read():
    calls, results = [], []
    task = Task(lambda: time.sleep(0.05) or calls.append(1) or object())
    threads = [threading.Thread(target=lambda: results.append(task.result())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(set(map(id, results))) == 1
    assert len(results) == 8


@pytest.mark.parametrize("kind", [OSError, KeyError, SystemExit, KeyboardInterrupt, StopIteration])
def test_an_error_is_raised_where_the_result_is_asked_for_each_time(kind):
    def fail():
        raise kind("no")

    for task in (read_ahead(fail, 1), Task(fail)):
        for _ in range(2):
            with pytest.raises(kind, match="no"):
                task.result()
        assert task.peek() is None
    assert read_ahead(lambda: 5, 1).result() == 5


def test_reads_run_side_by_side_in_no_more_threads_than_allowed(gate):
    running, most, lock = 0, 0, threading.Lock()

    def read():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    tasks = [read_ahead(read, 1) for _ in range(100)]
    wait_until(lambda: all(task.done() for task in tasks))
    assert 2 <= most <= module.MAX_THREADS


def test_the_budget_bounds_what_is_read_ahead_until_it_is_dropped(monkeypatch):
    monkeypatch.setattr(module, "BUDGET_BYTES", 10 * MIB)
    tasks = [read_ahead(lambda: b"x", 4 * MIB) for _ in range(2)]
    assert read_ahead(lambda: b"x", 4 * MIB) is None
    tasks.append(read_ahead(lambda: b"x", 2 * MIB))
    assert tasks[-1] is not None
    assert read_ahead(lambda: b"x", 1) is None
    assert [task.result() for task in tasks] == [b"x"] * 3
    assert read_ahead(lambda: b"x", 1) is None, "a result counts for as long as it is kept"
    del tasks[0]
    wait_until(lambda: read_ahead(lambda: b"x", 4 * MIB) is not None)


def test_one_read_larger_than_the_budget_may_run_alone(monkeypatch):
    monkeypatch.setattr(module, "BUDGET_BYTES", MIB)
    large = read_ahead(lambda: 1, 5 * MIB)
    assert large is not None
    assert read_ahead(lambda: 1, 1) is None
    del large
    wait_until(lambda: read_ahead(lambda: 1, 5 * MIB) is not None)


def test_a_read_that_is_dropped_before_it_began_gives_its_bytes_back(monkeypatch, gate):
    monkeypatch.setattr(module, "BUDGET_BYTES", 100)
    busy = full(gate)
    tasks = [read_ahead(lambda: 1, 10) for _ in range(8)]
    assert all(task is not None for task in tasks)
    assert read_ahead(lambda: 1, 10) is None
    tasks.clear()
    gate.set()
    del busy
    wait_until(lambda: read_ahead(lambda: 1, 100) is not None)


def test_a_read_that_failed_is_gone_when_it_is_dropped(monkeypatch):
    monkeypatch.setattr(module, "BUDGET_BYTES", 10)

    class Block:
        pass

    def fail(block):
        raise OSError("no")

    def ask():
        block = Block()
        tasks = [read_ahead(lambda: fail(block), 10)]
        references = weakref.ref(tasks[0]), weakref.ref(block)
        with contextlib.suppress(OSError):
            tasks.pop().result()
        return references

    gc.collect()
    gc.disable()
    try:
        references = ask()
        wait_until(lambda: read_ahead(lambda: 1, 10) is not None)
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_threads_go_when_there_is_nothing_to_read_and_come_back(gate):
    busy = full(gate, 5)
    gate.set()
    del busy
    wait_until(lambda: not reading_threads())
    assert read_ahead(lambda: 3, 1).result() == 3
    wait_until(lambda: not reading_threads())


def test_no_read_is_forgotten_while_threads_come_and_go(monkeypatch):
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.0005)
    for number in range(300):
        tasks = [read_ahead(lambda number=number: number, 1) for _ in range(1 + number % 3)]
        wait_until(lambda tasks=tasks: all(task.done() for task in tasks))
        time.sleep(0.0005 * (number % 3))


def test_closing_leaves_no_thread_and_takes_no_more(pool, gate):
    full(gate, 3)
    waiting = read_ahead(lambda: 1, 1)
    gate.set()
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 1
    assert reading_threads() == []
    assert read_ahead(lambda: 1, 1) is None
    assert waiting.result() == 1


def test_closing_does_not_wait_for_a_read_that_never_ends(pool, gate, monkeypatch):
    monkeypatch.setattr(module, "EXIT_SECONDS", 0.2)
    full(gate, 2)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 1


def test_a_wait_ends_when_it_is_told_to(gate):
    task = read_ahead(gate.wait, 1)
    stopped, ended = threading.Event(), []

    def wait():
        stop_waiting_when(stopped.is_set)
        with pytest.raises(Interrupted):
            task.result()
        ended.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    assert not ended
    began = time.monotonic()
    stopped.set()
    thread.join(3)
    assert ended[0] - began < 0.5
    gate.set()
    assert task.result() is True


def test_counts_the_time_that_was_waited(gate):
    before = module.counters.waited_seconds
    task = read_ahead(lambda: time.sleep(0.1), 1)
    task.result()
    waited = module.counters.waited_seconds - before
    assert 0.05 < waited < 1
    task.result()
    assert module.counters.waited_seconds - before == waited


@pytest.mark.parametrize("locked", [False, True])
def test_a_forked_child_reads_with_threads_of_its_own(pool, gate, locked):
    busy = full(gate, 3)
    waiting = read_ahead(gate.wait, 1)
    held = threading.Event()

    def hold():
        with pool.lock:
            held.set()
            gate.wait(5)

    holder = threading.Thread(target=hold)
    if locked:
        holder.start()
        held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks beside threads
        child = os.fork()
    if not child:
        code = 1
        try:
            del busy, waiting  # which must not wait for the parent's lock
            task = read_ahead(lambda: 4, 1)
            while not task.done():
                time.sleep(0.01)
            code = 0 if task.result() == 4 and module.counters.requests == 0 else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 5
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    gate.set()
    if locked:
        holder.join()
    assert os.waitstatus_to_exitcode(ended[1]) == 0
