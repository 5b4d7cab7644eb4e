"""Histories of a run: saved, killed, loaded on other ranks, changed, and always the stream of one never stopped."""

import ctypes
import gc
import os
import pathlib
import random
import re
import threading
import time

import corpora
import numpy as np
import pytest
from sources import Items

from ibm_nodes import (
    Batcher,
    Document,
    Loader,
    Mixer,
    Packer,
    Prefetcher,
    Reader,
    Sharder,
    Shuffler,
    checkpoint,
)
from ibm_nodes.checkpoint import file_name, latest, list_saved, load, save
from ibm_nodes.read_ahead import counters

NUM_SHARDS = 24
WORLD_SIZES = (1, 2, 3, 4, 6, 8)
WEIGHTS = {"web": 3, "code": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = f"file://{tmp_path_factory.mktemp('data')}/"
    for number, name in enumerate(WEIGHTS):
        documents = corpora.documents([3, 40, 0, 90, 7, 20] * 25, first=1000 * number)
        corpora.write(f"{root}{name}/", [corpora.every(documents, 9)] * 2, "arrow")
    return root


def build(data, rank, world_size, *, batch=24, prefetch=2, weights=WEIGHTS):
    def graph(shard, num_shards):
        readers = {name: Reader(f"{data}{name}/", shard=shard, num_shards=num_shards) for name in weights}
        packer = Packer(Mixer(readers, weights=weights, seed=shard), seq_len=16, eos_id=1)
        return Shuffler(packer, buffer_size=3, seed=shard)

    node = Sharder(graph, num_shards=NUM_SHARDS, rank=rank, world_size=world_size)
    node = Batcher(node, batch_size=batch // world_size)
    return Loader(Prefetcher(node, prefetch_factor=prefetch) if prefetch else node)


def group_of(data, world_size, **options):
    return [build(data, rank, world_size, **options) for rank in range(world_size)]


def close(group):
    for loader in group:
        loader.close()


def step(group, position):
    """One global batch, in the order of the global stream, of which the first sample has number ``position``."""
    batches = [next(iter(loader)) for loader in group]
    count = sum(map(len, batches))
    ranks = [iter(batch) for batch in batches]
    return [next(ranks[number % len(group)]).tokens.tobytes() for number in range(position, position + count)]


def stream_of(data, count, **options):
    (loader,) = group_of(data, 1, **options)
    rows = []
    while len(rows) < count:
        rows += step([loader], len(rows))
    close([loader])
    return rows


@pytest.fixture(scope="module")
def reference(data):
    return stream_of(data, 3000)


def save_all(group, target, number, **options):
    for future in [save(loader, target, step=number, **options) for loader in group]:
        future.result(30)


class History:
    """A run that is killed, and goes on from its checkpoints on whatever hardware is left."""

    def __init__(self, data, target, reference, rng):
        self.data, self.target, self.reference, self.rng = data, target, reference, rng
        self.saved = {}
        self.keep = rng.choice([None, None, 1, 2, 3])
        self.group = []

    def start(self):
        rng = self.rng
        world_size = rng.choice(WORLD_SIZES)
        batch = world_size * rng.randint(1, 24 // world_size)
        self.group = group_of(self.data, world_size, batch=batch, prefetch=rng.choice([0, 1, 2, 5]))
        for loader in rng.sample(self.group, world_size):
            if self.saved:
                found = load(loader, self.target, missing=rng.choice(["start", "error"]))
                assert (found.step, found.position) == max(self.saved.items())
            elif list_saved(self.target):  # a first save that was torn is not taken for none: the user starts anew
                with pytest.raises(FileNotFoundError, match="none is complete"):
                    load(loader, self.target, missing="start")
            else:
                assert load(loader, self.target, missing="start") is None
        self.step, self.position = max(self.saved.items(), default=(0, 0))
        assert latest(self.target) == (self.step if self.saved else None)
        self.batch = batch

    def train(self):
        for _ in range(self.rng.randint(0, 3)):
            if self.position + self.batch > len(self.reference):
                return
            assert step(self.group, self.position) == self.reference[self.position :][: self.batch]
            self.step += 1
            self.position += self.batch

    def save(self):
        """All ranks write, or the machine dies while they do: then some have written, and some left a part behind."""
        rng, group = self.rng, self.group
        crash = rng.random() < 0.4
        world_size = len(group)
        again = self.step in self.saved
        writing = rng.sample(group, rng.randint(0, world_size - 1) if crash and not again else world_size)
        futures = [save(loader, self.target, step=self.step, keep=self.keep) for loader in writing]
        before = self.step, self.position
        if rng.random() < 0.5 and not crash:
            self.train()  # while it is written
        for future in futures:
            future.result(30)
        if len(writing) == world_size:
            self.saved[before[0]] = before[1]
        for loader in group:
            if loader not in writing and rng.random() < 0.5:
                self.leave_a_part(group.index(loader))
        return crash

    def leave_a_part(self, rank):
        """What is left of a temporary file."""
        files = list(pathlib.Path(self.target[len("file://") :]).glob("step-*/*.pt"))
        if files:
            source = self.rng.choice(files)
            part = source.read_bytes()[: self.rng.randint(0, source.stat().st_size)]
            pathlib.Path(f"{source.with_name(file_name('0' * 12, rank, 8))}.17.tmp").write_bytes(part)

    def run(self):
        for _ in range(self.rng.randint(2, 5)):
            self.start()
            for _ in range(self.rng.randint(1, 3)):
                self.train()
                if self.save():
                    break
            close(self.group)
            self.check_kept()
        self.start()
        self.train()
        close(self.group)

    def check_kept(self):
        """The newest complete steps are all there, however many it was told to keep."""
        complete = {saved.step for saved in list_saved(self.target) if not saved.missing}
        assert complete <= self.saved.keys()
        wanted = sorted(self.saved)[-self.keep :] if self.keep else sorted(self.saved)
        assert complete >= set(wanted)


@pytest.mark.parametrize("number", range(25))
def test_a_random_history_gives_the_uninterrupted_stream(data, reference, tmp_path, number):
    History(data, f"file://{tmp_path}/run", reference, random.Random(number)).run()


def resident():
    """Bytes of memory that are really used, without what the allocator merely holds on to."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1]) << 10


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/fd").exists(), reason="samples memory and descriptors from /proc")
def test_three_hundred_random_histories_leave_no_memory_and_no_descriptors(data, reference, tmp_path):
    samples = []
    for number in range(300):
        History(data, f"file://{tmp_path}/run{number}", reference, random.Random(1000 + number)).run()
        if number % 50 == 49:
            time.sleep(0.3)
            samples.append((resident(), len(os.listdir("/proc/self/fd")), threading.active_count()))
    memory, descriptors, threads = zip(*samples, strict=True)
    assert max(memory[1:]) - memory[0] < 24 << 20, samples
    assert max(descriptors) <= descriptors[0] + 2, samples
    assert max(threads) <= threads[0] + 2, samples


def test_the_previous_step_stays_loadable_whichever_ranks_did_not_write(data, reference, tmp_path):
    world_size, batch = 3, 24
    for number in range(2**world_size):
        target = f"file://{tmp_path}/run{number}"
        group = group_of(data, world_size)
        step(group, 0)
        save_all(group, target, 1)
        step(group, batch)
        written = [loader for rank, loader in enumerate(group) if number >> rank & 1]
        save_all(written, target, 2, keep=1)
        close(group)
        expected = 2 if len(written) == world_size else 1
        assert latest(target) == expected
        for size in (1, 2):
            group = group_of(data, size)
            assert {load(loader, target)[:2] for loader in group} == {(expected, expected * batch)}
            assert step(group, expected * batch) == reference[expected * batch :][:batch]
            close(group)


OTHER = {"web": 1, "code": 3}


def two_attempts(data, target, first, second):
    """Goes on from step 3 twice, with other weights, and saves step 5 on some of the ranks each time."""
    group = group_of(data, 2)
    step(group, 0)
    save_all(group, target, 3)
    close(group)
    streams = []
    for weights, ranks in ((WEIGHTS, first), (OTHER, second)):
        group = group_of(data, 2, weights=weights)
        for loader in group:
            assert load(loader, target, step=3).position == 24
        step(group, 24)
        save_all([group[rank] for rank in ranks], target, 5)
        streams.append(step(group, 48))
        close(group)
    assert streams[0] != streams[1]
    return streams


@pytest.mark.parametrize("first", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("second", [(), (0,), (1,), (0, 1)])
def test_two_attempts_at_the_same_step_with_other_weights_are_never_mixed(data, tmp_path, first, second):
    target = f"file://{tmp_path}/run"
    one, other = two_attempts(data, target, first, second)
    expected = other if len(second) == 2 else one if len(first) == 2 else None
    assert latest(target) == (5 if expected else 3)
    group = group_of(data, 3, weights=OTHER if expected is other else WEIGHTS)
    found = [load(loader, target) for loader in group]
    assert len({(each.step, each.lineage) for each in found}) == 1
    if expected:
        assert found[0].position == 48 and step(group, 48) == expected
    else:
        assert found[0].position == 24
    close(group)


def test_attempts_from_a_fresh_start_with_other_weights_are_not_mixed(data, tmp_path):
    target = f"file://{tmp_path}/run"
    for weights, rank in ((WEIGHTS, 0), (OTHER, 1)):
        group = group_of(data, 2, weights=weights)
        step(group, 0)
        save_all([group[rank]], target, 1)
        close(group)
    assert latest(target) is None


def test_attempts_that_dcp_loaded_from_different_pasts_are_not_mixed(data, tmp_path):
    """Both have the same settings, but not the same past."""
    target = f"file://{tmp_path}/run"
    for past, rank in ((WEIGHTS, 0), (OTHER, 1)):
        (before,) = group_of(data, 1, weights=past)
        step([before], 0)
        (after,) = group_of(data, 1)
        checkpoint.Stateful(after).load_state_dict(checkpoint.Stateful(before).state_dict())
        close([before, after])
        group = group_of(data, 2)
        for loader in group:
            leaves = checkpoint.Stateful(after).state_dict()
            part = checkpoint.Stateful(loader)
            part.load_state_dict({name: leaves[name] for name in part.state_dict()})
        step(group, 24)
        save_all([group[rank]], target, 2)
        close(group)
    assert latest(target) is None


def test_an_attempt_at_another_world_size_completes_nothing(data, tmp_path):
    target = f"file://{tmp_path}/run"
    for size in (2, 3, 4):
        group = group_of(data, size)
        step(group, 0)
        save_all(group[1:], target, 1)
        close(group)
    assert latest(target) is None


def names(tmp_path):
    return sorted(f"{file.parent.name}/{file.name}" for file in tmp_path.glob("run/*/*.pt"))


def test_keep_deletes_only_old_complete_steps_and_what_is_older(data, tmp_path):
    target = f"file://{tmp_path}/run"
    other = group_of(data, 4)
    save_all(other[:3], target, 0)  # incomplete, and older than all that is complete
    group = group_of(data, 2)
    for number in (1, 2, 3):
        save_all(group, target, number)
    save_all(other[:2], target, 4)  # incomplete, but newer than what is to be kept
    save_all(group, target, 5)
    (tmp_path / "run" / "step-00000001" / "notes.txt").write_text("not ours")
    before = names(tmp_path)
    # The first rank deletes while step 6 is not complete: steps 5 and 3 are the two to keep, its part of 2 goes.
    save_all(group[:1], target, 6, keep=2)
    deleted = set(before) - set(names(tmp_path))
    assert deleted == {name for name in before if name[:13] < "step-00000003" and int(name[34:39]) % 2 == 0}
    # The second finds it complete.
    save_all(group[1:], target, 6, keep=2)
    save_all(group, target, 7, keep=2)
    save_all(group, target, 7, keep=2)
    complete = {saved.step for saved in list_saved(target) if not saved.missing}
    assert complete == {6, 7}
    assert {name[:13] for name in names(tmp_path)} == {"step-00000006", "step-00000007"}
    assert (tmp_path / "run" / "step-00000001" / "notes.txt").exists()
    close(group + other)


def test_keep_deletes_the_files_of_more_ranks_than_there_are_now(data, tmp_path):
    target = f"file://{tmp_path}/run"
    group = group_of(data, 6)
    for number in (1, 2):
        save_all(group, target, number)
    close(group)
    group = group_of(data, 2)
    for number in (3, 4, 4):
        save_all(group, target, number, keep=1)
    close(group)
    assert {name[:13] for name in names(tmp_path)} == {"step-00000004"}


def test_keep_does_not_delete_what_was_just_saved_after_going_back_to_an_older_step(data, tmp_path):
    target = f"file://{tmp_path}/run"
    group = group_of(data, 2)
    for number in (8, 10):
        step(group, 0)
        save_all(group, target, number)
    close(group)
    group = group_of(data, 2, weights=OTHER)
    for loader in group:
        load(loader, target, step=8)
    step(group, 24)
    save_all(group, target, 9, keep=1)
    save_all(group, target, 9, keep=1)
    close(group)
    assert 9 in {saved.step for saved in list_saved(target) if not saved.missing}


NUM_LARGE = 960


class Texts:
    """An endless dataset of which nothing is stored: documents of 1 to 3000 tokens."""

    def __init__(self, name, shard, largest):
        self.name, self.shard, self.largest = name, shard, largest
        self.tokens = np.arange(3000, dtype=np.int32) % largest

    def __len__(self):
        return 1 << 40

    def __getitem__(self, index):
        length = 1 + (index * 1009 + self.shard * 31) % 3000
        tokens = self.tokens[:length].astype(np.uint16) if self.largest <= 1 << 16 else self.tokens[:length] + (1 << 16)
        return Document(tokens, f"s3://bucket/{self.name}/part-{index % 40:05}.parquet", index, self.name)


@pytest.mark.parametrize(
    "largest, limit", [(1 << 16, 150_000_000), pytest.param(1 << 17, 300_000_000, marks=pytest.mark.slow)]
)
def test_the_files_of_all_ranks_are_small_together(tmp_path, largest, limit):
    names = ("web", "code", "books")

    def graph(shard, num_shards):
        sources = {name: Items(Texts(name, shard, largest)) for name in names}
        mixer = Mixer(sources, weights=dict.fromkeys(names, 1), seed=shard)
        return Shuffler(Packer(mixer, seq_len=4096, eos_id=1), buffer_size=16, seed=shard)

    for rank in range(8):
        loader = Loader(Sharder(graph, num_shards=NUM_LARGE, rank=rank, world_size=8))
        for _ in zip(range(NUM_LARGE // 8), loader, strict=False):
            pass
        state = loader.state_dict()
        assert all(len(own[2]["buffer"]) >= 15 for own in state["shards"].values())
        save(loader, f"file://{tmp_path}/run", step=1).result(60)
    sizes = [item.size for item in list_saved(f"file://{tmp_path}/run")[0].files.values()]
    assert len(sizes) == 8
    assert sum(sizes) < limit


def test_loading_at_step_a_million_takes_the_requests_and_bytes_of_step_ten(tmp_path, monkeypatch):
    root = f"file://{tmp_path}/data/"
    for name in WEIGHTS:
        corpora.write(f"{root}{name}/", [[corpora.documents([30] * 40)]] * 24, "arrow")
    batch, costs = 24, {}
    read = []
    original = checkpoint.read

    def watched(item, start, end, storage_options=None):
        read.append((item.key, end - start))
        return original(item, start, end, storage_options)

    monkeypatch.setattr(checkpoint, "read", watched)
    monkeypatch.setattr(
        "ibm_nodes.reader.MAX_DEPTH", 1
    )  # more blocks ahead where one came late would depend on the time
    for number in (10, 1_000_000):
        target = f"file://{tmp_path}/run{number}"
        group = group_of(root, 4, prefetch=0)
        for tenth in range(10):
            step(group, tenth * batch)
        for loader in group:
            loader.load_state_dict(advanced(loader.state_dict(), number, batch))
        save_all(group, target, number)
        close(group)
        loader = build(root, 1, 2, prefetch=0)
        read.clear()
        before = settled()
        assert load(loader, target)[:2] == (number, number * batch)
        files = [size for _, size in read]
        next(iter(loader))
        costs[number] = (len(files), sum(files), np.subtract(settled(), before).tolist())
        loader.close()
    (files, size, (requests, total)), late = costs[10], costs[1_000_000]
    assert files == late[0] == 2
    assert abs(late[1] - size) < 0.02 * size  # larger numbers take some bytes more
    assert late[2][0] == requests
    assert abs(late[2][1] - total) < 0.02 * total


def test_a_load_reads_nothing_of_the_data(data, tmp_path):
    group = group_of(data, 2, prefetch=0)
    step(group, 0)
    save_all(group, f"file://{tmp_path}/run", 1)
    close(group)
    loader = build(data, 0, 1, prefetch=0)
    before = settled()
    load(loader, f"file://{tmp_path}/run")
    assert settled()[0] - before[0] == 2  # the two ranks' files
    loader.close()


def advanced(state, number, batch):
    """The state of a run that has come to a step, as far as counters and passes say so."""
    shards = {}
    for shard, (turns, ended, graph) in state["shards"].items():
        assert turns == 10 * batch // NUM_SHARDS
        mixer = graph["source"]["source"]
        for key in ("tokens", "documents"):
            mixer[key] = {name: count * number // 10 for name, count in mixer[key].items()}
        for name, (reader, skip) in mixer["sources"].items():
            passes = number // 10
            later = {"epoch": reader["epoch"] + passes, "passes": reader["passes"] + passes}
            mixer["sources"][name] = ({**reader, **(later if number > 10 else {})}, skip)
        shards[shard] = number * batch // NUM_SHARDS, ended, graph
    return {**state, "position": number * batch, "shards": shards}


def settled():
    """Requests and bytes so far, once no read is on its way: the pool's threads end when they are idle."""
    while any(thread.name.startswith("ibm_nodes-read") for thread in threading.enumerate()):
        time.sleep(0.01)
    return counters.requests, counters.bytes
