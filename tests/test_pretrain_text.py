"""The recipe for text: the batches are those of tokens made beforehand, at every world size and after every load."""

import json
import pathlib
import re

import corpora
import numpy as np
import pyarrow as pa
import pytest
import texts
import torch

from ibm_nodes import cli, load_recipe, stats, storage
from ibm_nodes.state import merge
from ibm_nodes.testing import assert_rescales

EOS = 0
SETTINGS = {"weights": {"web": 3, "code": 1}, "seq_len": 32, "eos_id": EOS, "global_batch_size": 4, "num_shards": 8}


def values(name, count=160):
    rng = np.random.default_rng(len(name))
    words = ["yes", "no", "Document", "naïve", "end.", "☃"]
    some = [f"{name} {number} {' '.join(rng.choice(words, rng.integers(0, 60)))}" for number in range(count)]
    some[3], some[9] = "", None
    return some


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return f"file://{tmp_path_factory.mktemp('text')}/"


@pytest.fixture(scope="module")
def tokenizer(root):
    return texts.save(f"{root}tokenizer.json")


@pytest.fixture(scope="module")
def datasets(root):
    for name, form in (("web", "parquet"), ("code", "jsonl")):
        for number, part in enumerate(corpora.every(values(name), 60)):
            if form == "parquet":
                data = corpora.parquet([pa.table({"text": pa.array(few)}) for few in corpora.every(part, 9)])
            else:
                data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in part)
            storage.write(f"{root}{name}/{number}.{form}", data)
    return {name: f"{root}{name}/" for name in ("web", "code")}


def recipe(datasets, tokenizer, **changes):
    return load_recipe("pretrain-text")(datasets, tokenizer=tokenizer, **(SETTINGS | changes))


def take(loader, count):
    with loader:
        return [batch["input_ids"] for batch, _ in zip(loader, range(count), strict=False)]


def test_one_pass_has_the_tokens_of_every_text_once(datasets, tokenizer):
    model = texts.train()
    expected = sorted(
        model.encode(text, add_special_tokens=False).ids for name in datasets for text in values(name) if text
    )
    loader = recipe(datasets, tokenizer, epochs={"web": 1, "code": 1}, num_shards=1, global_batch_size=1, buffer_size=1)
    with loader:
        tokens = torch.cat([batch["input_ids"].flatten() for batch in loader]).tolist()
        found = stats(loader)["datasets"]
    runs, run = [], []
    for token in tokens:
        if token == EOS:
            runs.append(run)
            run = []
        else:
            run.append(token)
    assert sorted(filter(None, runs)) == expected
    assert {name: (entry["documents"], entry["skipped"]) for name, entry in found.items()} == {
        "web": (158, 2),
        "code": (158, 2),
    }


def test_batches_are_the_same_at_every_world_size_and_after_a_load_at_another(datasets, tokenizer):
    whole = torch.cat(take(recipe(datasets, tokenizer, rank=0, world_size=1), 12))
    for before, after in ((2, 4), (4, 1)):
        loaders = [recipe(datasets, tokenizer, rank=rank, world_size=before) for rank in range(before)]
        first = [[next(iter(loader))["input_ids"] for _ in range(5)] for loader in loaders]
        state = merge([loader.state_dict() for loader in loaders])
        for loader in loaders:
            loader.close()
        rest = []
        for rank in range(after):
            loader = recipe(datasets, tokenizer, rank=rank, world_size=after)
            loader.load_state_dict(state)
            rest.append(take(loader, 7))
        stream = [torch.stack([torch.cat(batches) for batches in ranks], 1).reshape(-1, 32) for ranks in (first, rest)]
        assert torch.equal(torch.cat(stream), whole)


def test_a_vocabulary_that_the_model_does_not_have_is_an_error(datasets, tokenizer):
    with pytest.raises(ValueError, match="vocab_size must be at least [0-9]+ for .*tokenizer.json, got 100"):
        take(recipe(datasets, tokenizer, vocab_size=100), 1)


@pytest.fixture
def ibm_nodes(capsys, datasets, tokenizer):
    """Runs a command of the recipe in this process; gives its exit code, and what it wrote."""

    def run(command, *more):
        flags = [
            part for name, url in datasets.items() for part in ("--data", f"{name}={url}", "--weight", f"{name}=1")
        ]
        flags += ["--seq-len", 32, "--eos-id", EOS, "--global-batch-size", 4, "--num-shards", 4]
        flags += ["--tokenizer", tokenizer, *more]
        code = cli.main([command, "pretrain-text", *map(str, flags)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_check_estimates_the_tokens_of_the_text(ibm_nodes):
    code, output, errors = ibm_nodes("run", "--check", "--json")
    assert (code, errors) == (0, "")
    found = json.loads(output)["datasets"]
    model = texts.train()
    for name in ("web", "code"):
        num_tokens = sum(len(model.encode(text or "").ids) for text in values(name))
        assert 0.4 < found[name]["tokens"] / num_tokens < 2.5
        assert (found[name]["column"], found[name]["type"]) == ("text", "text")


def test_a_check_names_a_column_that_is_not_there(ibm_nodes):
    code, output, errors = ibm_nodes("run", "--check", "--column", "content")
    assert code == 1
    assert "no column 'content'" in output + errors


def test_show_writes_the_text(ibm_nodes):
    code, output, _ = ibm_nodes("show", "--samples", 1, "--text")
    assert code == 0
    assert "naïve" in output


class TestDocumentation:
    """The examples of docs/text.md, as they stand there."""

    @pytest.fixture
    def blocks(self, root):
        code = (pathlib.Path(__file__).parent.parent / "docs" / "text.md").read_text().replace("4096", "32")
        return re.findall(r"```python\n(.*?)```", code.replace("=1024", "=4").replace("s3://corpora/", root), re.S)

    def test_the_recipe_gives_batches(self, blocks, datasets, tokenizer):
        names = {}
        exec(compile(blocks[0], "text.md", "exec"), names)
        assert [tuple(batch.shape) for batch in take(names["loader"], 3)] == [(4, 32)] * 3

    def test_the_nodes_give_samples_of_the_rows_that_are_kept(self, blocks, root, tokenizer):
        names = {}
        rows = [{"text": f"text {number} yes", "language": ("en", "de")[number % 2]} for number in range(80)]
        storage.write(f"{root}languages/0.parquet", corpora.parquet([pa.Table.from_pylist(rows)]))
        exec(compile(blocks[1].replace("/web/", "/languages/"), "text.md", "exec"), names)
        assert_rescales(names["graph"], num_shards=2, cuts=(0, 12))
        sample = next(names["graph"](0, 1))
        assert {row % 2 for _, _, row, _ in sample.documents} == {0}
