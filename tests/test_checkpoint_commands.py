"""``ibm-nodes checkpoint show`` and ``verify``: the numbers of a saved step, and every kind of damage."""

import collections
import json
import pathlib
import re
import shutil

import corpora
import pytest
import torch
from torchdata.nodes import BaseNode

from ibm_nodes import Batcher, CausalLMCollator, Loader, Mixer, Packer, Reader, Sharder, Shuffler, archive
from ibm_nodes.checkpoint import list_saved, load, read_saved, save

NUM_SHARDS, BATCH, SEQ_LEN = 12, 12, 32
LENGTH = {"web": 50, "code": 30}


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    root = f"file://{tmp_path_factory.mktemp('data')}/"
    return {
        name: corpora.write(f"{root}{name}/", [[corpora.documents([length] * 60)]] * 2, "arrow")
        for name, length in LENGTH.items()
    }


class Count(BaseNode):
    """Counts the documents that pass, by dataset."""

    def __init__(self, source, counts):
        super().__init__()
        self.source, self.counts = source, counts

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.source.reset(initial_state)

    def next(self):
        document = next(self.source)
        self.counts[document.name] += 1
        return document

    def get_state(self):
        return self.source.state_dict()


def loaders(urls, world_size, counts=None, *, seed=0):
    """Loaders of all ranks that draw nothing ahead."""

    def graph(shard, num_shards):
        sources = {
            name: Reader(url, name=name, shard=shard, num_shards=num_shards, seed=seed) for name, url in urls.items()
        }
        node = Count(
            Mixer(sources, weights={"web": 3, "code": 1}, seed=(seed, shard)),
            collections.Counter() if counts is None else counts,
        )
        return Shuffler(Packer(node, seq_len=SEQ_LEN, eos_id=1), buffer_size=3, seed=(seed, shard))

    def loader(rank):
        node = Sharder(graph, num_shards=NUM_SHARDS, rank=rank, world_size=world_size)
        return Loader(Batcher(node, batch_size=BATCH // world_size, collate=CausalLMCollator(shift_labels=False)))

    return [loader(rank) for rank in range(world_size)]


def save_steps(urls, target, world_size, steps, counts=None, seed=0, **options):
    """Runs up to the last of some steps, and saves at each of them."""
    group = loaders(urls, world_size, counts, seed=seed)
    for step in range(1, max(steps) + 1):
        for loader in group:
            next(iter(loader))
        if step in steps:
            for future in [save(loader, target, step=step, **options) for loader in group]:
                future.result(30)
    for loader in group:
        loader.close()


@pytest.fixture
def saved(urls, tmp_path):
    """Steps 2, 4 and 6 of three ranks, of which 6 lacks a file; the URL and the files of step 4 by rank."""
    url = f"file://{tmp_path}/run"
    save_steps(urls, url, 3, {2, 4, 6})
    next(pathlib.Path(tmp_path, "run", "step-00000006").glob("*-00001-of-00003.pt")).unlink()
    return url, sorted(pathlib.Path(tmp_path, "run", "step-00000004").iterdir())


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_show_gives_the_numbers_that_were_counted(ibm_nodes, urls, tmp_path, world_size):
    counts, url = collections.Counter(), f"file://{tmp_path}/run"
    save_steps(urls, url, world_size, {40}, counts)
    code, out, error = ibm_nodes("checkpoint", "show", url, "--json")
    assert (code, error) == (0, "")
    found = json.loads(out)["newest"]
    assert (found["step"], found["world_size"], found["position"], found["num_shards"]) == (
        40,
        world_size,
        40 * BATCH,
        NUM_SHARDS,
    )
    tokens = {name: counts[name] * LENGTH[name] for name in LENGTH}
    assert found["tokens"] == sum(tokens.values())
    for name, weight in (("web", 0.75), ("code", 0.25)):
        entry = found["datasets"][name]
        assert (entry["documents"], entry["tokens"]) == (counts[name], tokens[name])
        assert entry["share"] == pytest.approx(tokens[name] / sum(tokens.values()))
        assert entry["weight"] == pytest.approx(weight)
        # Documents that the mixer has drawn ahead, of the ten that a logical shard owns, are not in it yet.
        assert entry["passes"] == pytest.approx(counts[name] / 120, abs=0.2)
        low, high = entry["epochs"]
        assert low <= entry["passes"] <= high + 1
    sizes = [path.stat().st_size for path in sorted(pathlib.Path(tmp_path, "run").rglob("*.pt"))]
    assert found["bytes_per_rank"] == sizes
    assert len(sizes) == world_size


def test_show_lists_the_steps_and_what_they_lack(ibm_nodes, saved):
    url, files = saved
    found = json.loads(ibm_nodes("checkpoint", "show", url, "--json")[1])
    lineage = found["steps"][0]["lineage"]
    missing = f"loader-{lineage}-00001-of-00003.pt"
    assert [(entry["step"], entry["complete"], entry["missing"], entry["position"]) for entry in found["steps"]] == [
        (2, True, [], 2 * BATCH),
        (4, True, [], 4 * BATCH),
        (6, False, [missing], 6 * BATCH),
    ]
    assert found["steps"][1]["bytes"] == sum(path.stat().st_size for path in files)
    assert found["newest"]["step"] == 4

    code, out, error = ibm_nodes("checkpoint", "show", url)
    assert (code, error) == (0, "")
    head, two, four, six, lacks, _, *facts = out.splitlines()
    assert head.split() == ["step", "state", "ranks", "position", "bytes", "lineage"]
    assert re.fullmatch(rf"4 +complete +3 +48 +[\d.]+ KiB +{lineage}", four)
    assert re.fullmatch(rf"6 +1 of 3 files missing +3 +72 +[\d.]+ KiB +{lineage}", six)
    assert lacks == f"step 6 lacks {missing}"
    assert re.fullmatch(
        r"step 4: 48 samples, [\d.]+ k tokens drawn, 12 logical shards, batches of 12 samples", facts[0]
    )
    assert facts[1].split() == ["dataset", "tokens", "documents", "share", "weight", "passes", "epoch"]
    assert {line.split()[0] for line in facts[2:4]} == {"code", "web"}
    assert re.fullmatch(r"bytes a rank: [\d.]+ KiB to [\d.]+ KiB, [\d.]+ KiB on 3 ranks", facts[4])


def test_show_of_a_step_that_is_old_incomplete_or_not_there(ibm_nodes, saved):
    url, _ = saved
    found = json.loads(ibm_nodes("checkpoint", "show", url, "--step", 2, "--json")[1])
    assert (found["newest"]["step"], found["newest"]["position"], found["problems"]) == (2, 2 * BATCH, [])
    for step, sentence in ((6, "complete are [2, 4]; step 6 lacks loader-"), (5, "complete are [2, 4]")):
        code, out, error = ibm_nodes("checkpoint", "show", url, "--step", step)
        assert code == 1
        assert "step" in out
        assert error.startswith(f"ibm-nodes: no complete checkpoint of step {step} under {url}: {sentence}")


def test_show_gives_the_epochs_of_the_logical_shards_and_what_they_left_out(ibm_nodes, saved):
    url, files = saved

    def damage(content):
        shards = content["state"]["shards"]
        turns, ended, graph = archive.unpack(shards[4])
        (web, skip) = graph["source"]["source"]["sources"]["web"]
        since = {"since": (0, False, 1, 1), "reason": "ValueError: row 3 is no list"}
        places = [
            {"file": "7.arrow", "first": 2, "end": 3, **since},
            {"file": "6.arrow", "first": 0, "end": None, **since},
        ]
        graph["source"]["source"]["sources"]["web"] = ({**web, "epoch": 5, "quarantined": places}, skip)
        shards[4] = archive.pack((turns, ended, graph))

    found = json.loads(ibm_nodes("checkpoint", "show", url, "--json")[1])["newest"]
    assert found["quarantined"] == []
    assert {name: entry["epochs"] for name, entry in found["datasets"].items()} == {"web": [0, 0], "code": [0, 0]}
    rewrite(files[1], damage)
    found = json.loads(ibm_nodes("checkpoint", "show", url, "--json")[1])["newest"]
    assert found["datasets"]["web"]["epochs"] == [0, 5]
    place = {"dataset": "web", "reason": "ValueError: row 3 is no list", "shards": 1}
    places = [{"file": "6.arrow", "first": 0, "end": None, **place}, {"file": "7.arrow", "first": 2, "end": 3, **place}]
    assert found["quarantined"] == places
    assert found["datasets"]["web"]["quarantined"] == 2
    out = ibm_nodes("checkpoint", "show", url)[1]
    ending = "in 1 logical shard: ValueError: row 3 is no list\n"
    assert f"\nquarantined of web: all blocks of 6.arrow, {ending}" in out
    assert f"\nquarantined of web: block 2 of 7.arrow, {ending}" in out
    assert re.search(r"^web .* 0 to 5$", out, re.MULTILINE) and re.search(r"^code .* 0$", out, re.MULTILINE)


def test_show_of_what_was_saved_before_the_first_batch(ibm_nodes, urls, tmp_path):
    url = f"file://{tmp_path}/run"
    for loader in loaders(urls, 2):
        save(loader, url, step=0).result(30)
    code, out, _ = ibm_nodes("checkpoint", "show", url)
    assert code == 0
    assert "step 0: 0 samples, 0 tokens drawn" in out
    assert ibm_nodes("checkpoint", "verify", url)[0] == 0


@pytest.mark.parametrize("action", ["show", "verify"])
def test_nothing_there(ibm_nodes, tmp_path, action):
    url = f"file://{tmp_path}/none"
    code, out, error = ibm_nodes("checkpoint", action, url)
    assert (code, out) == (1, "")
    assert error == f"ibm-nodes: no checkpoint under {url}: give the URL that checkpoint.save was given\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["checkpoint"], "the following arguments are required: ACTION"),
        (["checkpoint", "show"], "the following arguments are required: URL"),
        (["checkpoint", "burn", "x"], "argument ACTION: invalid choice: 'burn'"),
        (["checkpoint", "show", "x", "--step", "a"], "argument --step: invalid int value: 'a'"),
        (["checkpoint", "show", "x", "--storage-option", "hunter2"], "argument --storage-option: must be key=value"),
    ],
)
def test_says_what_is_wrong_with_the_flags(ibm_nodes, argv, message):
    code, out, error = ibm_nodes(*argv)
    assert (code, out) == (1, "")
    assert error.startswith(f"ibm-nodes: {message}")
    assert "hunter2" not in error


def test_on_an_object_store_and_never_shows_the_credentials(ibm_nodes, urls, bucket):
    url, options = f"{bucket.url}run", bucket.storage_options
    save_steps(urls, url, 2, {3}, storage_options=options)
    given = {**options, **{f"client_kwargs.{key}": value for key, value in options["client_kwargs"].items()}}
    given.pop("client_kwargs")
    good = [part for key, value in given.items() for part in ("--storage-option", f"{key}={value}")]
    code, out, error = ibm_nodes("checkpoint", "show", url, *good)
    assert (code, error) == (0, "")
    assert "step 3: 36 samples" in out
    code, out, error = ibm_nodes("checkpoint", "verify", url, *good)
    assert (code, error) == (0, "")
    assert re.match(r"step 3 of lineage [0-9a-f]+ is whole: 2 files", out)
    given["secret"] = "another-secret"
    bad = [part for key, value in given.items() for part in ("--storage-option", f"{key}={value}")]
    for action in ("show", "verify"):
        code, _, error = ibm_nodes("checkpoint", action, url, *bad)
        assert code == 1
        assert "another-secret" not in error


# Verify


def test_verify_says_what_is_whole(ibm_nodes, saved):
    url, files = saved
    code, out, error = ibm_nodes("checkpoint", "verify", url)
    assert (code, error) == (0, "")
    two, four, six = out.splitlines()
    assert re.fullmatch(r"step 2 of lineage [0-9a-f]+ is whole: 3 files, \d+ bytes", two)
    assert four.endswith(f" is whole: 3 files, {sum(path.stat().st_size for path in files)} bytes")
    assert re.fullmatch(
        r"step 6 of lineage \S+ is not complete and will not be chosen: it lacks loader-\S+-00001-of-00003.pt", six
    )
    code, out, _ = ibm_nodes("checkpoint", "verify", url, "--step", 2)
    assert code == 0
    assert out.splitlines() == [two]


def test_verify_of_a_step_that_is_not_complete(ibm_nodes, saved):
    url, files = saved
    code, out, error = ibm_nodes("checkpoint", "verify", url, "--step", 6)
    assert (code, out) == (1, "")
    assert re.search(r"no complete checkpoint of step 6 .*step 6 lacks loader-\S+-00001-of-00003.pt\n", error)
    code, _, error = ibm_nodes("checkpoint", "verify", url, "--step", 7)
    assert code == 1
    assert "no complete checkpoint of step 7" in error
    assert "complete are [2, 4]" in error
    for path in files:
        path.parent.with_name("step-00000002").joinpath(path.name).unlink()
    files[0].unlink()
    code, _, error = ibm_nodes("checkpoint", "verify", url)
    assert code == 1
    assert "none is complete; step 4 lacks loader-" in error


def rewrite(path, change):
    """Writes a file anew after a change of its content, as a program at fault might."""
    content = archive.decode(path.read_bytes(), str(path))
    change(content)
    path.write_bytes(archive.encode(content))


def cut(files):
    files[1].write_bytes(files[1].read_bytes()[:-100])


def empty(files):
    files[1].write_bytes(b"")


def flip(files):
    data = bytearray(files[1].read_bytes())
    data[len(data) // 2] ^= 0xFF
    files[1].write_bytes(data)


def foreign(files):
    torch.save({"model": 1}, files[1])


def no_dict(files):
    torch.save([1, 2], files[1])


def no_state(files):
    rewrite(files[1], lambda content: content.pop("state"))


def newer(files):
    outer = torch.load(files[1], weights_only=True)
    torch.save({**outer, "version": archive.VERSION + 1}, files[1])


def other_rank(files):
    shutil.copy(files[2], files[1])


def other_step(files):
    shutil.copy(files[1].parent.with_name("step-00000002") / files[1].name, files[1])


def other_position(files):
    older = archive.decode((files[1].parent.with_name("step-00000002") / files[1].name).read_bytes(), "")
    rewrite(files[1], lambda content: content.update(state=older["state"]))


def other_turns(files):
    older = archive.decode((files[1].parent.with_name("step-00000002") / files[1].name).read_bytes(), "")
    rewrite(files[1], lambda content: content["state"]["shards"].update({4: older["state"]["shards"][4]}))


def other_settings(files):
    rewrite(files[1], lambda content: content["settings"].update(more=1))


def shard_lost(files):
    rewrite(files[1], lambda content: content["state"]["shards"].pop(4))


def shard_of_another(files):
    rewrite(files[1], lambda content: content["state"]["shards"].update({5: archive.pack((0, False, None))}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "damaged"),
        (empty, "damaged"),
        (flip, "damaged"),
        (foreign, "is not a checkpoint of a loader"),
        (no_dict, "no checkpoint"),
        (no_state, "it has no 'state'"),
        (newer, "newer ibm_nodes"),
        (other_rank, "has rank 2 inside and 1 in its name"),
        (other_step, "has step 2 inside and 4 in its name"),
        (other_position, "disagree about 'position'"),
        (other_turns, "logical shards [4] do not stand at sample 48"),
        (other_settings, "different settings"),
        (shard_lost, "the file of rank 1 lacks the logical shards [4]"),
        (shard_of_another, "the file of rank 1 holds the logical shards [5] of other ranks"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_verify_finds_every_kind_of_damage(ibm_nodes, saved, damage, reason):
    url, files = saved
    damage(files)
    for more in ([], ["--step", 4]):
        code, out, error = ibm_nodes("checkpoint", "verify", url, *more)
        assert code == 1
        assert ("step 2" in out) == (not more)
        assert "step 4" not in out
        assert error.startswith("ibm-nodes: step 4 cannot be loaded: ")
        assert error.count("\n") == 1
        assert reason in error
    code, out, error = ibm_nodes("checkpoint", "verify", url, "--step", 2)
    assert (code, error) == (0, "")


def test_verify_finds_any_flipped_byte_of_what_is_read(ibm_nodes, saved):
    url, files = saved
    whole = files[1].read_bytes()
    content = read_saved(list_saved(url)[1].files[1])
    for place in range(50, len(whole), len(whole) // 40):
        data = bytearray(whole)
        data[place] ^= 0x10
        files[1].write_bytes(data)
        code, _, error = ibm_nodes("checkpoint", "verify", url, "--step", 4)
        if not code:  # then it was a byte of the container that means nothing
            assert str(read_saved(list_saved(url)[1].files[1])) == str(content)
        else:
            assert error.startswith("ibm-nodes: step 4 cannot be loaded: ")


def test_verify_names_the_faults_of_all_files(ibm_nodes, saved):
    url, files = saved
    cut(files)
    foreign(files[1:])
    code, _, error = ibm_nodes("checkpoint", "verify", url)
    assert code == 1
    assert [path.name in line for path, line in zip(files[1:], error.splitlines(), strict=True)] == [True, True]


def test_show_of_a_damaged_step_lists_the_others(ibm_nodes, saved):
    url, files = saved
    for path in files:
        path.write_bytes(b"")
    code, out, error = ibm_nodes("checkpoint", "show", url)
    assert code == 1
    assert re.search(r"^4 +complete +3 +\? +0 bytes", out, re.MULTILINE)
    assert re.search(r"^2 +complete +3 +24", out, re.MULTILINE)
    assert error.startswith(f"ibm-nodes: {url}/step-00000004/")
    assert "damaged" in error


def test_what_verify_passes_can_be_loaded_and_two_attempts_are_both_read(ibm_nodes, urls, tmp_path):
    url = f"file://{tmp_path}/run"
    for world_size, seed in ((2, 0), (3, 1)):
        save_steps(urls, url, world_size, {5}, seed=seed)
    code, out, _ = ibm_nodes("checkpoint", "verify", url)
    assert (code, len(out.splitlines())) == (0, 2)
    assert json.loads(ibm_nodes("checkpoint", "show", url, "--json")[1])["newest"]["world_size"] == 3
    (loader,) = loaders(urls, 1, seed=1)
    assert load(loader, url).position == 5 * BATCH
