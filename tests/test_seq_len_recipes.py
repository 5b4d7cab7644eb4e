"""A run whose samples change their length, from recipes and the command line: batches, limits, traces, checkpoints."""

import json
import pickle

import corpora
import pytest
import torch
from sources import stored

from ibm_nodes import Schedule, load_recipe, set_weights, stats
from ibm_nodes.checkpoint import load, save
from ibm_nodes.sharder import Sharder
from ibm_nodes.state import merge
from ibm_nodes.trace import trace

EOS, BATCH = 1, 12
WEIGHTS = {"web": 0.6, "code": 0.3, "books": 0.1}
SEQ_LENS = {BATCH * 64 * 2: 256, BATCH * (64 * 2 + 256 * 3) - 5: 32}
IN_STEPS = [64] * 2 + [256] * 3 + [32] * 3
LATER = [(0, WEIGHTS), (BATCH * (64 * 2 + 256) + 1, {"web": 0.5, "books": 0.5})]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    return corpora.write_mix(f"file://{tmp_path_factory.mktemp('mix')}/")


def build(recipe, datasets, **changes):
    arguments = {"weights": WEIGHTS, "seq_len": 64, "eos_id": EOS, "global_batch_size": BATCH, "num_shards": 24}
    return load_recipe(recipe)(datasets, **(arguments | {"seq_len_schedule": SEQ_LENS} | changes))


def step_of(ranks):
    """The global batch of one step, in the order of the stream."""
    batches = [next(iter(loader)) for loader in ranks]
    return torch.stack([batch["input_ids"] for batch in batches], 1).flatten(0, 1)


def steps_of(recipe, datasets, world_size, count, state=None, **changes):
    ranks = [build(recipe, datasets, rank=rank, world_size=world_size, **changes) for rank in range(world_size)]
    for loader in ranks if state else ():
        loader.load_state_dict(state)
    found = [step_of(ranks) for _ in range(count)]
    state = merge([stored(loader.state_dict()) for loader in ranks])
    for loader in ranks:
        loader.close()
    return found, state


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("recipe", ["pretrain", "long-context"])
def test_each_step_is_of_the_length_in_force_and_the_same_at_every_world_size(datasets, recipe):
    whole, state = steps_of(recipe, datasets, 1, 8, weights=Schedule(LATER))
    assert [batch.shape for batch in whole] == [(BATCH, length) for length in IN_STEPS]
    assert state["schedule"]["seq_lens"] == [(0, 64), (2 * BATCH, 256), (5 * BATCH, 32)]
    for cut, before, after in [(1, 2, 3), (2, 3, 4), (5, 4, 6), (6, 6, 1)]:
        head, state = steps_of(recipe, datasets, before, cut, weights=Schedule(LATER))
        tail, _ = steps_of(recipe, datasets, after, 8 - cut, state, weights=Schedule(LATER))
        assert equal(head + tail, whole)


def test_micro_batches_of_a_step_have_one_length_also_when_loaded_in_the_middle_of_it(datasets):
    whole, _ = steps_of("pretrain", datasets, 1, 8)
    batches, state = steps_of("pretrain", datasets, 2, 5, micro_batch_size=2)
    more, _ = steps_of("pretrain", datasets, 2, 19, state, micro_batch_size=2)
    assert [batch.shape for batch in batches + more] == [(4, length) for length in IN_STEPS for _ in range(3)]
    assert equal([torch.cat((batches + more)[begin : begin + 3]) for begin in range(0, 24, 3)], whole)


def test_another_global_batch_size_changes_the_length_at_its_own_batches(datasets):
    _, state = steps_of("pretrain", datasets, 1, 1)
    more, state = steps_of("pretrain", datasets, 2, 4, state, global_batch_size=8)
    assert [batch.shape for batch in more] == [(8, 64), (8, 64), (8, 256), (8, 256)]
    assert state["schedule"]["seq_lens"][:2] == [(0, 64), (BATCH + 2 * 8, 256)]


def test_long_context_keeps_documents_apart_at_every_length(datasets):
    with build("long-context", datasets, multiple_of=24) as loader:
        for length, batch in zip(IN_STEPS, loader, strict=False):
            width = -(-length // 24) * 24
            assert batch["input_ids"].shape == batch["position_ids"].shape == (BATCH, width)
            assert batch["cu_seqlens"][-1] == BATCH * width
            assert 0 < batch["max_seqlen"] <= length
            assert batch["num_valid"] == (batch["labels"][:, 1:] != -100).sum()
        padding = stats(loader)["packing"]["padding"]
    assert 0 <= padding < 0.3


def test_max_tokens_count_what_samples_had_at_their_time(datasets):
    for max_tokens, steps in [
        (BATCH * 64, 1),
        (BATCH * (64 * 2 + 256) - 1, 2),
        (BATCH * (64 * 2 + 256), 3),
        (BATCH * (64 * 2 + 256 * 3 + 32 * 2) + 9, 7),
    ]:
        for world_size in (1, 2):
            loader = build("pretrain", datasets, max_tokens=max_tokens, rank=0, world_size=world_size)
            with loader:
                assert [batch["input_ids"].shape[1] for batch in loader] == IN_STEPS[:steps]
    with pytest.raises(ValueError, match="max_tokens must be at least a global batch, 768, got 767"):
        build("pretrain", datasets, max_tokens=767)


def test_what_lies_behind_a_load_with_another_length_is_counted_as_it_was(datasets, tmp_path):
    target = f"file://{tmp_path}/run"
    tokens = BATCH * (3 * 64 + 2 * 128)
    weights = Schedule([(0, WEIGHTS), (BATCH * (3 * 64 + 128), {"books": 1})])
    more = {"seq_len_schedule": None, "weights": weights}
    with build("pretrain", datasets, **more) as loader:
        for _ in range(3):
            next(iter(loader))
        save(loader, target, step=3).result(30)
    more |= {"seq_len": 128, "max_tokens": tokens + 1}
    with build("pretrain", datasets, **more) as loader:
        load(loader, target)
        batches = [batch["input_ids"].tolist() for batch in loader]
        (node,) = (node for node in [loader.root.source.source] if isinstance(node, Sharder))
    assert [len(batch[0]) for batch in batches] == [128, 128]
    assert [number for number, _ in node.schedule.entries] == [0, 4 * BATCH]
    for step, batch in enumerate(batches, start=4):
        found = trace(build("pretrain", datasets, **more), step=step, global_batch_size=BATCH, url=target)
        assert [traced.sample.tokens.tolist() for traced in found.samples] == batch


def test_says_what_is_wrong_with_a_schedule_of_lengths(datasets):
    for changes, message in [
        ({"seq_len_schedule": {0: 128}}, "seq_len_schedule must begin after 1 token or more, got 0"),
        ({"seq_len_schedule": {10**6: 0}}, "seq_len must be at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            build("pretrain", datasets, **changes)


def test_a_loader_that_was_pickled_draws_the_same(datasets):
    for recipe in ("pretrain", "long-context"):
        whole, _ = steps_of(recipe, datasets, 1, 6)
        with pickle.loads(pickle.dumps(build(recipe, datasets))) as loader:
            assert equal([step_of([loader]) for _ in range(6)], whole)


def test_skipped_steps_count_and_leave_the_others_as_they_were(datasets):
    whole, _ = steps_of("pretrain", datasets, 1, 8)
    for begin, end in ((1, 3), (2, 5), (4, 6)):
        kept, _ = steps_of("pretrain", datasets, 2, 8 - end + begin, skip=[(begin * BATCH, end * BATCH)])
        assert equal(kept, whole[:begin] + whole[end:])


FLAGS = ["--seq-len", 64, "--eos-id", EOS, "--global-batch-size", BATCH, "--num-shards", 24]
LENGTH_FLAGS = [part for tokens, length in SEQ_LENS.items() for part in ("--seq-len-schedule", f"{tokens}={length}")]


def data_flags(datasets):
    given = [(f"{name}={url}", f"{name}={WEIGHTS[name]}") for name, url in datasets.items()]
    return [part for url, weight in given for part in ("--data", url, "--weight", weight)]


def test_the_command_line_runs_checks_and_traces_it(ibm_nodes, datasets, tmp_path):
    target = f"file://{tmp_path}/run"
    flags = [*data_flags(datasets), *FLAGS, *LENGTH_FLAGS]
    whole, _ = steps_of("pretrain", datasets, 1, 8)
    more = ["--checkpoint", target, "--save-every", 4]
    found = json.loads(ibm_nodes("run", "pretrain", *flags, *more, "--steps", 7, "--json")[1])
    assert found["tokens"] == BATCH * sum(IN_STEPS[:7])
    found = json.loads(ibm_nodes("run", "pretrain", *flags, *more, "--tokens", BATCH * 32, "--json")[1])
    assert found["steps"] == 1
    for step, url in [(2, None), (3, None), (6, target), (8, target)]:
        found = trace(build("pretrain", datasets), step=step, global_batch_size=BATCH, url=url)
        assert [traced.sample.tokens.tolist() for traced in found.samples] == whole[step - 1].tolist()
    assert ibm_nodes("trace", "pretrain", *flags, "--step", 6, "--checkpoint", target)[0] == 0
    tokens = BATCH * (64 * 2 + 256 * 3 + 32 * 10)
    out = ibm_nodes("run", "pretrain", *flags, "--check", "--tokens", tokens)[1]
    assert "\nsteps: 15 for " in out


def test_the_flag_reads_amounts(ibm_nodes, datasets):
    flags = [*data_flags(datasets), *FLAGS, "--steps", 3]
    out = ibm_nodes("run", "pretrain", *flags, "--seq-len-schedule", "1.5k=32", "--json")[1]
    assert json.loads(out)["tokens"] == BATCH * (64 * 2 + 32)
    for given, message in [
        (["1T"], "must be AMOUNT=NUMBER, such as 1T=8192, got '1T'"),
        (["1T=x"], "must be AMOUNT=NUMBER, such as 1T=8192, got '1T=x'"),
        (["1k=8", "1000=9"], "--seq-len-schedule must give 1000 once, got it twice"),
    ]:
        more = [part for one in given for part in ("--seq-len-schedule", one)]
        code, _, error = ibm_nodes("run", "pretrain", *flags, *more)
        assert code == 1 and message in error


def test_a_checkpoint_shows_what_is_in_force_and_what_is_to_come(ibm_nodes, datasets, tmp_path):
    target = f"file://{tmp_path}/run"
    ranks = [build("pretrain", datasets, weights=Schedule(LATER), rank=rank, world_size=2) for rank in range(2)]
    for step in range(1, 9):
        for loader in ranks:
            next(iter(loader))
            if step == 1:
                set_weights(loader, {"code": 3, "web": 1}, at=7 * BATCH)
        if step in (1, 4, 8):
            for loader in ranks:
                save(loader, target, step=step)
    for loader in ranks:
        save(loader, target, step=9).result(30)
        loader.close()
    even, three = {"web": 0.5, "books": 0.5}, {"code": 0.75, "web": 0.25}
    for step, weights, seq_len in [(1, WEIGHTS, 64), (4, even, 256), (8, three, 32)]:
        found = json.loads(ibm_nodes("checkpoint", "show", target, "--step", step, "--json")[1])["newest"]["schedule"]
        assert found["weights"] == pytest.approx(weights)
        assert found["seq_len"] == seq_len
        assert [(entry["sample"], entry["tokens"]) for entry in found["entries"]] == [
            (0, 0),
            (3 * BATCH + 1, LATER[1][0]),
        ]
        assert found["changes"] == [{"sample": 7 * BATCH, "weights": three}]
        assert found["seq_lens"] == [
            {"sample": 0, "tokens": 0, "seq_len": 64},
            {"sample": 24, "tokens": BATCH * 64 * 2, "seq_len": 256},
            {"sample": 60, "tokens": BATCH * (64 * 2 + 256 * 3), "seq_len": 32},
        ]
    out = ibm_nodes("checkpoint", "show", target, "--step", 4)[1]
    assert (
        "weights in force: web 50.0%, books 50.0%\n"
        "weights from sample 0 (0 tokens) on: web 60.0%, code 30.0%, books 10.0%\n"
        "weights from sample 37 (4.61 k tokens) on: web 50.0%, books 50.0%\n"
        "weights set in the run, from sample 84 on: code 75.0%, web 25.0%\n"
        "seq_len in force: 256\n"
        "seq_len from sample 0 (0 tokens) on: 64\n"
        "seq_len from sample 24 (1.54 k tokens) on: 256\n"
        "seq_len from sample 60 (10.8 k tokens) on: 32\n"
    ) in out


def test_changed_lengths_are_told_when_a_checkpoint_is_loaded(datasets, tmp_path):
    target = f"file://{tmp_path}/run"
    with build("pretrain", datasets) as loader:
        next(iter(loader))
        save(loader, target, step=1).result(30)
    with build("pretrain", datasets, seq_len_schedule={**SEQ_LENS, 10**9: 512}) as loader:
        (change,) = load(loader, target).changes
    assert change.startswith("schedule was ") and "1000000000: 512" in change
