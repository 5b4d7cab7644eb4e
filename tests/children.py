"""Programs that tests run as processes of their own, and what starts them."""

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

from ibm_nodes import Loader, checkpoint
from ibm_nodes.recipes.pretrain import pretrain

FIRST_BATCH_SECONDS = 15


def start(program, *arguments):
    """Starts one of the programs below; its standard streams are pipes."""
    return _start([__file__, program], arguments)


def start_code(code, *arguments):
    """Starts a program of which the code is given, and which finds its arguments as JSON."""
    return _start(["-c", code], arguments)


def _start(what, arguments):
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", *what, json.dumps(arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, text=True, **pipes)


def ranks(code, world_size, *arguments, timeout=100):
    """Runs a program on ranks that find each other by torch.distributed's variables; gives the last line each said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    base = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world_size)}
    base |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-P", "-c", textwrap.dedent(code), *arguments]
    processes = [
        subprocess.Popen(command, env=base | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(world_size)
    ]
    try:
        return [json.loads(process.communicate(timeout=timeout)[0].splitlines()[-1]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def finish(process, timeout=60):
    """Its exit code, standard output and standard error; a process that does not end in time is killed."""
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
        process.wait()
    return process.returncode, output, errors


def build(config) -> Loader:
    """The loader of a training run, from plain data."""
    return pretrain(
        **{"seq_len": 16, "eos_id": 2, "global_batch_size": 4, "num_shards": 16, "pin_memory": False, **config}
    )


def digest(batch):
    return hashlib.sha256(batch["input_ids"].numpy().tobytes() + batch["labels"].numpy().tobytes()).hexdigest()[:16]


def train(config, url, log, num_steps, pause):
    """A training run that starts from the last checkpoint, and notes what was in each step."""
    loader = build(config)
    found = checkpoint.load(loader, url, missing="start")
    step = 0 if found is None else found.step
    with open(log, "a", buffering=1) as notes:
        notes.write(f"start {step}\n")
        for batch in loader:
            notes.write(f"{step} {digest(batch)}\n")
            step += 1
            if step == num_steps:
                break
            checkpoint.save(loader, url, step=step)
            time.sleep(pause)


def end(case):
    """A script that reads three batches, says that it is ready, and ends."""
    loader = build(case["config"])
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    Path(case["directory"], "ready").touch()
    time.sleep(case["pause"])
    WAYS[case["how"]](case, loader, iterator)


kept = []


def fail(*_):
    raise ValueError("the loss is not a number")


def go_on(_, loader, iterator):
    for _ in iterator:
        pass


WAYS = {
    "by falling off its end": lambda *_: None,
    "with its iterator in a global": lambda *state: kept.append(state),
    "with an iterator in a loop that refers to itself": lambda *state: kept.append([kept, state]),
    "by an exception": fail,
    "by sys.exit(3)": lambda *_: sys.exit(3),
    "in the midst of a save": lambda case, loader, _: checkpoint.save(loader, case["url"], step=3),
    "by Ctrl-C": go_on,
}


def endings(cases):
    """Forks a process for each case, which ends as a script ends; this one only waits for them all."""
    import s3fs  # noqa: F401  # which takes its time

    results = []
    for case in cases:
        began = time.monotonic()
        child = os.fork()
        if not child:
            for number, name in enumerate(("stdout", "stderr"), start=1):
                os.dup2(os.open(f"{case['directory']}/{name}", os.O_CREAT | os.O_WRONLY, 0o600), number)
            return end(case)
        status = None
        while status is None and time.monotonic() < began + case["limit"]:
            found, code = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if found else None
            time.sleep(0.01)
            if case["how"] == "by Ctrl-C" and os.path.exists(f"{case['directory']}/ready"):
                os.unlink(f"{case['directory']}/ready")
                time.sleep(case["pause"] + 0.2)
                os.kill(child, signal.SIGINT)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        results.append([status, time.monotonic() - began])
    sys.stdout.write(json.dumps(results))
    return None


def first_batches(connection, loader, count):
    """What a child process does with a loader that was made by its parent."""
    connection.send([digest(batch) for batch in itertools.islice(loader, count)])
    loader.close()
    connection.close()


def hand_over(config, methods):
    """A parent whose loader is in the midst of reading gives loaders to children of its own."""
    with build(config) as running:
        take = iter(running)
        for _ in range(3):
            next(take)
        results = []
        for method in methods:
            results.append(run_child(method, build(config)))
            next(take)
    sys.stdout.write(json.dumps(results))


def hand_over_at_once(config):
    """A parent that waits for its very first reads forks, and its child wants to read the same."""
    with build(config) as running:
        other = sibling(running)
        waiting = threading.Thread(target=next, args=(iter(running),))
        waiting.start()
        time.sleep(0.1)
        results = [run_child("fork", other)]
        waiting.join()
    sys.stdout.write(json.dumps(results))


def run_child(method, loader):
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=first_batches, args=(theirs, loader, 5))
    began = time.monotonic()
    process.start()
    theirs.close()
    found = ours.recv() if ours.poll(FIRST_BATCH_SECONDS) else ["nothing came"]
    seconds = time.monotonic() - began
    process.join(5)
    code = process.exitcode
    process.kill()
    process.join()
    return method, found, seconds, code


def sibling(loader):
    """Another loader that was not started, over the very same listings."""
    from ibm_nodes import Batcher, CausalLMCollator, Prefetcher, Sharder

    sharder = loader.root.source.source
    node = Sharder(sharder.graph, num_shards=sharder.num_shards, rank=0, world_size=1)
    node = Batcher(node, batch_size=4, collate=CausalLMCollator(shift_labels=False))
    return Loader(Prefetcher(node, prefetch_factor=4))


def long_run(configs, num_batches):
    """A healthy run of several ranks, saved and loaded on the way."""
    loaders = [build(config) for config in configs]
    for _ in range(num_batches):
        for loader in loaders:
            next(iter(loader))
    for loader in loaders:
        loader.load_state_dict(loader.state_dict())
        next(iter(loader))


if __name__ == "__main__":
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
