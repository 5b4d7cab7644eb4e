"""The recipes long-context and sft, on real files."""

import pickle

import corpora
import numpy as np
import pytest
import torch

from ibm_nodes import cli, load_recipe, stats
from ibm_nodes.state import merge

EOS, PROMPT, RESPONSE = 1, 3, 4
WEIGHTS = {"web": 0.6, "code": 0.3, "books": 0.1}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    return corpora.write_mix(f"file://{tmp_path_factory.mktemp('mix')}/")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations: the tokens of a prompt are 1000 * row + 100 and so on, those of an answer 1000 * row + 500."""
    rows = []
    for row in range(1, 60):
        turns = [
            [
                PROMPT,
                *range(1000 * row + 100, 1000 * row + 103 + row % 9),
                RESPONSE,
                *range(first, first + 1 + row % 13),
            ]
            for first in (1000 * row + 500, 1000 * row + 600)
        ]
        rows.append(sum(turns[: 1 + row % 2], []))
    return {"chat": corpora.write(f"file://{tmp_path_factory.mktemp('chat')}/", [[rows[:20], rows[20:]]], "arrow")}


def long_context(datasets, **changes):
    arguments = {"weights": WEIGHTS, "seq_len": 256, "eos_id": EOS, "global_batch_size": 12, "num_shards": 24}
    return load_recipe("long-context")(datasets, **(arguments | changes))


def sft(chats, **changes):
    arguments = {"weights": {"chat": 1}, "seq_len": 64, "eos_id": EOS, "global_batch_size": 4, "num_shards": 4}
    arguments |= {"response_ids": [RESPONSE], "prompt_ids": [PROMPT]}
    return load_recipe("sft")(chats, **(arguments | changes))


def take(loader, count):
    with loader:
        return [batch for batch, _ in zip(loader, range(count), strict=False)]


def test_long_context_gives_what_keeps_documents_apart(datasets):
    for batch in take(long_context(datasets, rank=1, world_size=3, multiple_of=100), 20):
        assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (4, 300)
        edges = batch["cu_seqlens"].tolist()
        assert batch["cu_seqlens"].dtype == torch.int32
        assert batch["max_seqlen"] == max(np.diff(edges)) <= 256
        assert batch["num_valid"] == (batch["labels"][:, 1:] != -100).sum()
        flat, positions = batch["input_ids"].flatten(), batch["position_ids"].flatten()
        labels = batch["labels"].flatten()
        for begin, end in zip(edges, edges[1:], strict=False):
            assert positions[begin:end].tolist() == list(range(end - begin))
            ids = flat[begin:end].tolist()
            if begin % 300 and set(ids) != {EOS}:
                assert labels[begin] == -100
                assert labels[begin + 1 : end].tolist() == ids[1:]
            whole = [token for token in ids if token != EOS]
            assert whole == list(range(whole[0], whole[0] + len(whole))) if whole else True


def test_long_context_is_the_same_at_every_world_size_and_slices_for_context_parallel_ranks(datasets):
    whole = take(long_context(datasets, shift_labels=True), 2)
    ranks = [take(long_context(datasets, shift_labels=True, rank=rank, world_size=4), 2) for rank in range(4)]
    for step, batch in enumerate(whole):
        parts = torch.stack([one[step]["labels"] for one in ranks], 1).reshape(12, -1)
        assert torch.equal(parts, batch["labels"])
    first = take(long_context(datasets, shift_labels=True, context_parallel=(0, 2)), 1)[0]
    assert first["input_ids"].shape == (12, 128)
    assert torch.equal(first["input_ids"][:, :64], whole[0]["input_ids"][:, :64])
    assert torch.equal(first["input_ids"][:, 64:], whole[0]["input_ids"][:, 192:])


def test_documents_that_are_too_long_are_treated_as_asked_and_that_is_reported(datasets):
    found = {}
    for overflow in ("split", "truncate", "drop"):
        loader = long_context(datasets, overflow=overflow)
        take(loader, 10)
        found[overflow] = stats(loader)["packing"]
    assert found["drop"]["dropped"] > 0.05 and found["drop"]["truncated"] == 0
    assert found["truncate"]["truncated"] > 0.05 and found["truncate"]["dropped"] == 0
    assert found["split"]["truncated"] > 0.05 and found["split"]["dropped"] == 0
    assert all(0 <= one["padding"] < 0.2 for one in found.values())


def test_a_state_is_loaded_with_a_longer_context(datasets):
    short = [long_context(datasets, rank=rank, world_size=2) for rank in range(2)]
    for loader in short:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
    state = merge([loader.state_dict() for loader in short])
    for loader in short:
        loader.close()
    streams = []
    for world_size in (1, 3):
        ranks = []
        for rank in range(world_size):
            loader = long_context(datasets, seq_len=1024, rank=rank, world_size=world_size)
            loader.load_state_dict(state)
            ranks.append(take(loader, 3))
        assert ranks[0][0]["input_ids"].shape == (12 // world_size, 1024)
        streams.append([torch.stack([one[step]["input_ids"] for one in ranks], 1).reshape(12, -1) for step in range(3)])
    assert all(map(torch.equal, *streams))


@pytest.mark.parametrize("strategy", ["pad", "best_fit"])
def test_sft_learns_the_responses_alone(chats, strategy):
    for batch in take(sft(chats, strategy=strategy, shift_labels=True), 30):
        ids, labels = batch["input_ids"], batch["labels"]
        assert ids.shape == (4, 64)
        assert batch["num_valid"] == (labels != -100).sum() > 0
        learned = labels != -100
        assert torch.equal(labels[:, :-1][learned[:, :-1]], ids[:, 1:][learned[:, :-1]])
        assert all(token == EOS or token % 1000 >= 500 for token in labels[learned].tolist())
        kept = labels[learned].tolist()
        asked = [token for token in ids.flatten().tolist() if token % 1000 >= 500]
        assert sorted(token for token in kept if token != EOS) == sorted(asked)


def test_sft_pads_less_with_best_fit(chats):
    padding = {}
    for strategy in ("pad", "best_fit"):
        loader = sft(chats, strategy=strategy)
        take(loader, 60)
        padding[strategy] = stats(loader)["packing"]["padding"]
    assert padding["best_fit"] < padding["pad"] / 2


def test_sft_truncates_or_drops_what_is_too_long(chats):
    assert all(batch["input_ids"].shape == (4, 16) for batch in take(sft(chats, seq_len=16), 5))
    loader = sft(chats, seq_len=16, overflow="drop")
    for batch in take(loader, 5):
        assert all(
            row[0] == PROMPT for row in batch["input_ids"].tolist()
        )  # every sample begins with a whole conversation
    assert stats(loader)["packing"]["dropped"] > 0


def test_padding_in_the_data_is_taken_off_and_set_anew(tmp_path):
    rows = [[PROMPT, 11, RESPONSE, 501 + row, EOS, 0, 0, 0] for row in range(20)]
    url = corpora.write(f"file://{tmp_path}/padded/", [[rows]], "parquet")
    for pad_id in (None, 0):
        (batch,) = take(sft({"chat": url}, pad_id=pad_id, seq_len=22, num_shards=4), 1)
        padding = batch["input_ids"][batch["input_ids"] == 0].numel()
        assert (padding > 0 and (batch["labels"][batch["input_ids"] == 0] == -100).all()) if pad_id == 0 else True
        counts = [row.tolist().count(PROMPT) for row in batch["input_ids"]]
        assert counts == [4 if pad_id == 0 else 2] * 4


@pytest.mark.parametrize("recipe", [long_context, sft])
def test_loaders_pickle_and_refuse_what_does_not_fit(datasets, chats, recipe):
    data = datasets if recipe is long_context else chats
    loader = recipe(data)
    first, second = take(loader, 1), take(pickle.loads(pickle.dumps(recipe(data))), 1)
    assert torch.equal(first[0]["input_ids"], second[0]["input_ids"])
    for changes, message in [
        ({"num_open": 0}, "num_open must be at least 1"),
        ({"overflow": "cut"}, "overflow must be one of"),
        ({"pad_id": 70_000, "vocab_size": 65_000}, "pad_id must be below vocab_size=65000"),
    ]:
        with pytest.raises(ValueError, match=message):
            recipe(data, **changes)
    with pytest.raises(ValueError, match="shift_labels must be True"):
        long_context(datasets, context_parallel=(0, 2))


def test_the_command_line_runs_both(datasets, chats, capsys):
    more = ["--eos-id", "1", "--global-batch-size", "4", "--num-shards", "4", "--seq-len", "64", "--steps", "3"]
    urls = [part for name in datasets for part in ("--data", f"{name}={datasets[name]}", "--weight", f"{name}=1")]
    assert cli.main(["run", "long-context", *urls, *more, "--overflow", "drop"]) == 0
    assert "dropped; " in capsys.readouterr().out
    chat = ["--data", f"chat={chats['chat']}", "--weight", "chat=1"]
    assert cli.main(["run", "sft", *chat, *more, "--response-ids", "4", "--prompt-ids", "3"]) == 0
    assert cli.main(["run", "sft", *chat, *more, "--response-ids", "4,x"]) == 1
    assert "must be whole numbers with commas between them, got '4,x'" in capsys.readouterr().err
    assert cli.main(["run", "sft", *chat, *more, "--response-ids", "4,5", "--check"]) == 0
