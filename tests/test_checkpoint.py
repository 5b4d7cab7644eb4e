"""Checkpoints: each rank saves alone, and any number of ranks loads."""

import itertools
import pathlib
import threading
import time

import corpora
import pytest
import torch

from ibm_nodes import (
    Batcher,
    CausalLMCollator,
    Loader,
    Packer,
    Prefetcher,
    Reader,
    Sharder,
    Shuffler,
    checkpoint,
    list_dataset,
)
from ibm_nodes.checkpoint import Stateful, latest, list_saved, load, save
from ibm_nodes.state import merge


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    root = f"file://{tmp_path_factory.mktemp('data')}/web/"
    return corpora.write(root, [corpora.every(corpora.documents([3, 40, 0, 90] * 30), 7)] * 2, "parquet")


def loaders(url, world_size, *, num_shards=12, batch=12, seed=0):
    def graph(shard, num_shards):
        node = Packer(Reader(url, shard=shard, num_shards=num_shards, seed=seed), seq_len=32, eos_id=1)
        return Shuffler(node, buffer_size=3, seed=(seed, shard))

    def loader(rank):
        node = Sharder(graph, num_shards=num_shards, rank=rank, world_size=world_size)
        node = Batcher(node, batch_size=batch // world_size, collate=CausalLMCollator(shift_labels=False))
        return Loader(Prefetcher(node, prefetch_factor=2))

    return [loader(rank) for rank in range(world_size)]


def steps(group, count):
    batches = []
    for _ in range(count):
        parts = [next(iter(loader))["input_ids"] for loader in group]
        batches.append(torch.stack(parts, 1).reshape(-1, 32))
    return batches


def close(group):
    for loader in group:
        loader.close()


def save_all(group, target, step, **options):
    for future in [save(loader, target, step=step, **options) for loader in group]:
        future.result(30)


def test_goes_on_at_any_world_size_with_the_batches_that_would_have_come(url, bucket):
    (whole,) = loaders(url, 1)
    expected = steps([whole], 9)
    close([whole])
    for number, (before, after) in enumerate(itertools.product([1, 2, 3, 4], [1, 2, 3, 6])):
        target = f"{bucket.url}run{number}/"
        group = loaders(url, before)
        assert all(map(torch.equal, steps(group, 4), expected))
        save_all(group, target, 4, storage_options=bucket.storage_options)
        close(group)
        group = loaders(url, after)
        for loader in group:
            found = load(loader, target, storage_options=bucket.storage_options)
            assert found[:4] == (4, 48, 12, before)
            assert found.changes == []
        assert all(map(torch.equal, steps(group, 5), expected[4:]))
        close(group)


def test_saving_shows_a_step_only_when_every_rank_has_written(url, tmp_path):
    target = f"file://{tmp_path}/run"
    assert latest(target) is None
    group = loaders(url, 3)
    save_all(group, target, 7)
    assert latest(target) == 7
    save_all(group[:2], target, 9)
    assert latest(target) == 7
    close(group)
    (loader,) = loaders(url, 1)
    assert load(loader, target).step == 7
    with pytest.raises(
        FileNotFoundError, match="step 9 .*complete are \\[7\\]; step 9 lacks loader-[0-9a-f]+-00002-of-00003.pt"
    ):
        load(loader, target, step=9)


def test_nothing_there_is_an_error_unless_a_fresh_start_was_asked_for(url, tmp_path):
    (loader,) = loaders(url, 1)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint under"):
        load(loader, f"file://{tmp_path}/none")
    assert load(loader, f"file://{tmp_path}/none", missing="start") is None
    (other,) = loaders(url, 2)[:1]
    save_all([other], f"file://{tmp_path}/torn", 3)
    with pytest.raises(FileNotFoundError, match="none is complete; step 3 lacks loader-[0-9a-f]+-00001-of-00002.pt"):
        load(loader, f"file://{tmp_path}/torn", missing="start")


def test_files_of_two_steps_or_two_world_sizes_are_not_mixed(url, tmp_path):
    target = f"file://{tmp_path}/run"
    group = loaders(url, 2)
    save_all(group, target, 5)
    steps(group, 1)
    save_all(group[:1], target, 5)
    close(group)
    (loader,) = loaders(url, 1)
    with pytest.raises(ValueError, match="disagree about 'position' \\(12 and 0\\): they are not of the same step"):
        load(loader, target)


def test_of_two_attempts_at_a_step_the_later_is_loaded(url, tmp_path):
    target = f"file://{tmp_path}/run"
    for world_size, batches in ((2, 1), (3, 2)):
        group = loaders(url, world_size)
        steps(group, batches)
        save_all(group, target, 5)
        close(group)
    (loader,) = loaders(url, 1)
    assert load(loader, target)[:4] == (5, 24, 12, 3)


def test_a_damaged_file_is_named(url, tmp_path):
    target = f"file://{tmp_path}/run"
    (loader,) = loaders(url, 1)
    save_all([loader], target, 1)
    (file,) = pathlib.Path(tmp_path).rglob("*.pt")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="loader-[0-9a-f]+-00000-of-00001.pt is damaged"):
        load(loader, target)


def test_a_run_with_other_settings_is_refused_naming_both(url, tmp_path):
    target = f"file://{tmp_path}/run"
    save_all(loaders(url, 2), target, 0)
    (loader,) = loaders(url, 1, num_shards=24)
    with pytest.raises(ValueError, match="saved with num_shards=12 and is now built with num_shards=24"):
        load(loader, target)


@pytest.fixture
def gate(monkeypatch):
    """Writes that wait until they are let through, one by one."""

    class Gate:
        def __init__(self):
            self.waiting, self.free = [], threading.Semaphore(0)

        def write(self, url, data, storage_options=None):
            self.waiting.append(url)
            assert self.free.acquire(timeout=30)
            write(url, data, storage_options)

        def wait_for(self, count):
            deadline = time.monotonic() + 30
            while len(self.waiting) < count and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(self.waiting) == count

    made, write = Gate(), checkpoint.write
    monkeypatch.setattr(checkpoint, "write", made.write)
    yield made
    made.free.release(100)


def test_four_saves_are_written_side_by_side_and_a_fifth_waits_for_the_first(url, tmp_path, gate):
    (loader,) = loaders(url, 1)
    futures = []
    for step in range(1, 5):
        steps([loader], 1)
        futures.append(save(loader, f"file://{tmp_path}/run", step=step))
    gate.wait_for(4)
    assert not any(future.done() for future in futures)
    fifth = []
    thread = threading.Thread(target=lambda: fifth.append(save(loader, f"file://{tmp_path}/run", step=5)))
    thread.start()
    thread.join(0.2)
    assert not fifth
    gate.free.release(5)
    thread.join(30)
    for future in [*futures, *fifth]:
        future.result(30)
    assert sorted(saved.step for saved in list_saved(f"file://{tmp_path}/run")) == [1, 2, 3, 4, 5]
    close([loader])
    for step in range(1, 6):
        (other,) = loaders(url, 1)
        assert load(other, f"file://{tmp_path}/run", step=step).position == 12 * min(step, 4)


def test_two_saves_of_one_step_are_written_one_after_the_other(url, tmp_path, gate):
    (loader,) = loaders(url, 1)
    futures = []
    for _ in range(3):
        steps([loader], 1)
        futures.append(save(loader, f"file://{tmp_path}/run", step=1))
    time.sleep(0.2)
    assert len(gate.waiting) == 1
    gate.free.release(3)
    for future in futures:
        future.result(30)
    close([loader])
    (other,) = loaders(url, 1)
    assert load(other, f"file://{tmp_path}/run").position == 36


def test_what_is_saved_is_what_had_been_handed_out_and_is_rendered_outside_of_the_caller(url, tmp_path, monkeypatch):
    threads, rendered = [], []

    def watched(taken):
        threads.append(threading.current_thread())
        rendered.append(started.wait(30))
        return render(taken)

    started, render = threading.Event(), checkpoint.render
    monkeypatch.setattr(checkpoint, "render", watched)
    (loader,) = loaders(url, 1)
    steps([loader], 2)
    future = save(loader, f"file://{tmp_path}/run", step=2)
    expected = steps([loader], 5)
    started.set()
    future.result(30)
    assert threads != [threading.current_thread()] and rendered == [True]
    close([loader])
    (other,) = loaders(url, 1)
    assert load(other, f"file://{tmp_path}/run").position == 24
    assert all(map(torch.equal, steps([other], 5), expected))
    close([other])


def test_an_error_of_a_save_is_raised_by_its_future_and_at_the_next_save(url, tmp_path):
    (tmp_path / "file").write_text("in the way")
    (loader,) = loaders(url, 1)
    future = save(loader, f"file://{tmp_path}/file", step=1)
    with pytest.raises(OSError):
        future.result(30)
    with pytest.raises(OSError):
        save(loader, f"file://{tmp_path}/good", step=3)
    save(loader, f"file://{tmp_path}/good", step=4).result(30)
    assert latest(f"file://{tmp_path}/good") == 4


def test_a_loader_without_a_sharder_is_refused(url, tmp_path):
    with pytest.raises(ValueError, match="must have a Sharder"):
        save(Loader(Reader(url, shard=0, num_shards=1)), f"file://{tmp_path}/x", step=0)
    (loader,) = loaders(url, 1)
    with pytest.raises(ValueError, match="step must not be negative"):
        save(loader, f"file://{tmp_path}/x", step=-1)


def lineages(target):
    return [saved.lineage for saved in list_saved(target)]


def test_a_state_that_was_loaded_without_its_lineage_begins_one_of_its_own(url, tmp_path):
    """A rank that went on from a bare state, and one that did not, have files that make no step."""
    target = f"file://{tmp_path}/run"
    group = loaders(url, 2)
    steps(group, 1)
    state = merge([loader.state_dict() for loader in group])
    steps(group, 1)
    save(group[0], target, step=2).result(30)
    others = loaders(url, 2)
    for loader in others:
        loader.load_state_dict(state)
    steps(others, 1)
    save(others[1], target, step=2).result(30)
    assert latest(target) is None
    assert len(set(lineages(target))) == 2
    save(others[0], target, step=2).result(30)
    save(group[1], target, step=2).result(30)
    assert [saved.missing for saved in list_saved(target)] == [[], []]
    close([*group, *others])


def test_all_ranks_that_load_a_bare_state_have_one_lineage(url, tmp_path):
    target = f"file://{tmp_path}/run"
    group = loaders(url, 2)
    steps(group, 2)
    states = [loader.state_dict() for loader in group]
    for world_size, given in ((2, states), (3, [merge(states)] * 3)):
        others = loaders(url, world_size)
        for loader, state in zip(others, given, strict=True):
            loader.load_state_dict(state)
        save_all(others, target, 2)
        close(others)
    assert len(list_saved(target)) == 2 and len(set(lineages(target))) == 1
    assert not any(saved.missing for saved in list_saved(target))
    close(group)


def test_the_state_of_the_beginning_has_the_lineage_of_the_beginning(url, tmp_path):
    target = f"file://{tmp_path}/run"
    first, used, through_dcp = loaders(url, 1) + loaders(url, 1) + loaders(url, 1)
    steps([used, through_dcp], 1)
    used.load_state_dict(used.state_dict())
    used.load_state_dict(first.state_dict())
    through_dcp.load_state_dict(through_dcp.state_dict())
    Stateful(through_dcp).load_state_dict(Stateful(first).state_dict())
    for step, loader in enumerate((first, used, through_dcp)):
        save(loader, target, step=step).result(30)
    assert len(set(lineages(target))) == 1
    close([first, used, through_dcp])


def test_places_may_be_given_as_paths_and_in_the_home_folder(url, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = corpora.documents([3, 40, 90] * 10)
    corpora.write(f"file://{tmp_path}/data/web/", [corpora.every(rows, 7)], "parquet")
    expected = corpora.read(f"file://{tmp_path}/data/web/").values()
    for place in (tmp_path / "data" / "web", str(tmp_path / "data/web/"), "~/data/web", pathlib.Path("~/data/web")):
        found = [document.tokens.tolist() for document in Reader(place, shard=0, num_shards=1, epochs=1)]
        assert sorted(found) == sorted(expected)
        assert Reader(place, shard=0, num_shards=1).name == "web"
        assert len(list_dataset(place).objects) == 1
    for number, target in enumerate((tmp_path / "saves", pathlib.Path("~/more"))):
        group = loaders(url, 2)
        steps(group, 1)
        save_all(group, target, number)
        close(group)
        assert latest(target) == number
        (loader,) = loaders(url, 1)
        assert load(loader, target).step == number
        close([loader])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "more", "saves"]
