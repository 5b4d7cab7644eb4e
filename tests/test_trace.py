"""``ibm-nodes trace`` and ``run --digest``: the documents of any step, as data that names itself proves."""

import hashlib
import json
import random
import re

import corpora
import numpy as np
import pytest
from torchdata.nodes import BaseNode

from ibm_nodes import (
    Batcher,
    CausalLMCollator,
    Loader,
    Mixer,
    Packer,
    Reader,
    Sample,
    Schedule,
    Sharder,
    cli,
    load_recipe,
    set_weights,
)
from ibm_nodes.checkpoint import load, save
from ibm_nodes.text import bytes_to_text
from ibm_nodes.trace import documents, trace

SEQ_LEN, NUM_SHARDS, EOS = 64, 24, 999_999
STRIDE = corpora.STRIDE
LENGTHS = [3, 90, 0, 17, 1, 200, 40, 5]


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """Two datasets whose tokens say where they are from: Arrow files of many record batches, and Parquet files."""
    root = f"file://{tmp_path_factory.mktemp('data')}/"
    rows = {name: corpora.documents(LENGTHS * 20, first=first) for name, first in (("web", 1), ("code", 301))}
    return {
        "web": corpora.write(
            f"{root}web/", [corpora.every(rows["web"][:80], 7), corpora.every(rows["web"][80:], 9)], "arrow"
        ),
        "code": corpora.write(f"{root}code/", [corpora.every(rows["code"], 13)], "parquet"),
    }


@pytest.fixture(scope="module")
def places(urls):
    """Where each document is, by its number: dataset, object, row."""
    found = {}
    for name, url in urls.items():
        for (place, row), tokens in corpora.read(url).items():
            if tokens:
                found[tokens[0] // STRIDE] = (name, place, row)
    return found


def flags_of(urls, batch):
    data = [part for name, url in urls.items() for part in ("--data", f"{name}={url}")]
    data += ["--weight", "web=0.7", "--weight", "code=0.3"]
    return [
        *data, "--seq-len", SEQ_LEN, "--eos-id", EOS, "--global-batch-size", batch, "--num-shards", NUM_SHARDS,
        "--buffer-size", 4,
    ]  # fmt: skip


def loaders(urls, world_size, batch, **more):
    settings = {"weights": {"web": 0.7, "code": 0.3}, "seq_len": SEQ_LEN, "eos_id": EOS, "num_shards": NUM_SHARDS}
    return [
        load_recipe("pretrain")(
            urls, **settings, buffer_size=4, global_batch_size=batch, rank=rank, world_size=world_size, **more
        )
        for rank in range(world_size)
    ]


def run(urls, target, legs):
    """Runs legs of (world size, batch, steps to save at), each from the last step saved; gives each step's batch.

    The rows of a step are in the order of the global stream: row k is row k // world_size of rank k % world_size.
    """
    batches: dict[int, list[list[int]]] = {}
    for world_size, batch, saves in legs:
        group = loaders(urls, world_size, batch)
        if batches:
            for loader in group:
                load(loader, target)
        for step in range(len(batches) + 1, max(saves) + 1):
            parts = [next(iter(loader))["input_ids"] for loader in group]
            batches[step] = [parts[row % world_size][row // world_size].tolist() for row in range(batch)]
            if step in saves:
                for future in [save(loader, target, step=step) for loader in group]:
                    future.result(30)
        for loader in group:
            loader.close()
    return batches


def expected(tokens, places):
    """Names the documents of a row by its tokens alone: (at, dataset, url, row, begin, end) of each part."""
    found = []
    for at, token in enumerate(tokens):
        if token == EOS:
            if found and not found[-1][-1]:
                found[-1][5] += 1
                found[-1][-1] = True
                continue
            found.append([at, None, None, None, None, None, True])  # EOS alone: the sample before had the document
            continue
        number, position = divmod(token, STRIDE)
        if found and not found[-1][-1]:
            found[-1][5] = position + 1
        else:
            found.append([at, *places[number], position, position + 1, False])
    return [tuple(part[:6]) for part in found]


def assert_named(sample, tokens, places):
    named = [
        tuple(document[key] for key in ("at", "dataset", "url", "row", "begin", "end"))
        for document in sample["documents"]
    ]
    proven = expected(tokens, places)
    assert len(named) == len(proven)
    for ours, theirs in zip(named, proven, strict=True):
        if theirs[1] is None:
            assert ours[0] == theirs[0] and ours[5] - ours[4] == 1
        else:
            assert ours == theirs


def traced(ibm_nodes, urls, batch, *more):
    code, out, error = ibm_nodes("trace", "pretrain", *flags_of(urls, batch), *more, "--json")
    assert code == 0, error
    return json.loads(out)


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_names_the_documents_of_every_row_of_random_steps(ibm_nodes, urls, places, tmp_path, world_size):
    target = f"file://{tmp_path}/run"
    batches = run(urls, target, [(world_size, 24, {7, 20, 41})])
    rng = random.Random(world_size)
    for step in [1, 7, 8, 20, 41, *rng.sample(range(2, 41), 12)]:
        since = max(saved for saved in (0, 7, 20) if saved < step)
        found = traced(ibm_nodes, urls, 24, "--step", step, "--checkpoint", target)
        assert (found["step"], found["since"], found["begin"]) == (step, since, 24 * (step - 1))
        assert [sample["row"] for sample in found["samples"]] == list(range(24))
        for sample, tokens in zip(found["samples"], batches[step], strict=True):
            assert_named(sample, tokens, places)
    again = traced(ibm_nodes, urls, 24, "--step", step)
    assert again["samples"] == found["samples"]
    assert again["since"] == 0


@pytest.mark.parametrize("legs", [[(1, 24, {5}), (4, 12, {9, 12})], [(3, 12, {4, 6}), (2, 48, {9}), (8, 24, {14})]])
def test_names_them_after_changes_of_the_batch_size_and_the_world_size(ibm_nodes, urls, places, tmp_path, legs):
    target = f"file://{tmp_path}/run"
    batches = run(urls, target, legs)
    for step, batch in batches.items():
        found = traced(ibm_nodes, urls, len(batch), "--step", step, "--checkpoint", target)
        for sample, tokens in zip(found["samples"], batch, strict=True):
            assert_named(sample, tokens, places)
    (loader,) = loaders(urls, 1, len(batch))
    load(loader, target)
    after = next(iter(loader))["input_ids"].tolist()
    loader.close()
    found = traced(ibm_nodes, urls, len(batch), "--step", step + 1, "--checkpoint", target)
    assert found["since"] == step
    for sample, tokens in zip(found["samples"], after, strict=True):
        assert_named(sample, tokens, places)


def test_one_row_and_a_batch_beyond_the_shards_and_a_run_of_micro_batches(ibm_nodes, urls, places):
    (loader,) = loaders(urls, 1, 48)
    batches = [next(iter(loader))["input_ids"].tolist() for _ in range(5)]
    loader.close()
    for row in (0, 17, 47):
        (sample,) = traced(ibm_nodes, urls, 48, "--step", 5, "--row", row)["samples"]
        assert (sample["row"], sample["sample"], sample["shard"]) == (row, 4 * 48 + row, row % NUM_SHARDS)
        assert_named(sample, batches[4][row], places)
    ranks = ["--micro-batch-size", 4, "--world-size", 2]
    found = traced(ibm_nodes, urls, 48, "--step", 5, *ranks)
    for sample, tokens in zip(found["samples"], batches[4], strict=True):
        assert_named(sample, tokens, places)


def test_reads_only_what_the_rows_need(urls, tmp_path):
    target = f"file://{tmp_path}/run"
    run(urls, target, [(4, 24, {3})])
    (loader,) = loaders(urls, 1, 24)
    for path in tmp_path.rglob("*-of-00004.pt"):
        if "-00002-of" not in path.name and "-00000-of" not in path.name:
            path.write_bytes(b"")
    found = trace(loader, step=4, global_batch_size=24, url=target, row=6)
    assert [sample.number for sample in found.samples] == [3 * 24 + 6]
    with pytest.raises(ValueError, match="-00001-of-00004.pt is damaged"):
        trace(loader, step=4, global_batch_size=24, url=target, row=5)


def test_writes_the_samples_in_words(ibm_nodes, urls, places):
    batch = traced(ibm_nodes, urls, 24, "--step", 2)
    code, out, error = ibm_nodes("trace", "pretrain", *flags_of(urls, 24), "--step", 2)
    assert (code, error) == (0, "")
    head, *lines = out.splitlines()
    assert head == "step 2: samples 24 to 47 of 24 logical shards, replayed since the start"
    assert lines[0] == "row 0: sample 24, logical shard 0"
    assert len(lines) == 24 + sum(len(sample["documents"]) for sample in batch["samples"])
    first = batch["samples"][0]["documents"][0]
    words = f"{first['dataset']}, {first['url']}, {first['place']}, tokens {first['begin']} to {first['end']}"
    assert lines[1] == f"  0: {words}"
    assert re.search(r"web/00\d.arrow, row \d of record batch \d+, tokens", out)
    assert re.search(r"code/000.parquet, row \d+, tokens", out)


def test_says_what_has_changed_since_the_step_was_saved(ibm_nodes, urls, tmp_path):
    target = f"file://{tmp_path}/run"
    run(urls, target, [(1, 24, {2})])
    code, out, error = ibm_nodes(
        "trace", "pretrain", *flags_of(urls, 12), "--step", 3, "--checkpoint", target, "--row", 0
    )
    assert code == 0
    assert "replayed since step 2" in out
    assert error == "ibm-nodes: since step 2 was saved, global_batch_size was 24 and is now 12\n"


@pytest.mark.parametrize(
    ("more", "batch", "message"),
    [
        (["--step", "5"], 12, "global_batch_size must be 24, as the run's from step 4 to 8, got 12"),
        (["--step", "2"], 12, "global_batch_size must be 24, as the run's from step 0 to 4, got 12"),
        (["--step", "3", "--row", "24"], 24, "step must be at least 1 and row from 0 to 23, got step 3 and row 24"),
        (["--step", "5", "--seed", "1"], 24, "was saved with seed="),
        (["--step", "5", "--num-shards", "48"], 24, "saved with num_shards=24 and is now built with num_shards=48"),
        (["--step", "0"], 24, "argument --step: must be a number above 0"),
        (["--step", "1", "--row", "-1"], 24, "argument --row: must be a number from 0 on, got '-1'"),
        ([], 24, "the following arguments are required: --step"),
    ],
)
def test_refuses_what_would_name_the_wrong_documents(ibm_nodes, urls, tmp_path, more, batch, message):
    target = f"file://{tmp_path}/run"
    run(urls, target, [(1, 24, {4, 8})])
    given = flags_of(urls, batch)
    if "--num-shards" in more:
        del given[given.index("--num-shards") : given.index("--num-shards") + 2]
    code, out, error = ibm_nodes("trace", "pretrain", *given, "--checkpoint", target, *more)
    assert (code, out) == (1, "")
    assert error.count("\n") == 1
    assert message in error


def test_knows_the_batch_size_of_a_run_that_went_on_from_the_step(ibm_nodes, urls, tmp_path):
    target = f"file://{tmp_path}/run"
    run(urls, target, [(2, 24, {4}), (3, 12, {8})])
    given = ["--step", 6, "--checkpoint", target]
    code, _, error = ibm_nodes("trace", "pretrain", *flags_of(urls, 24), *given)
    assert (code, error) == (
        1,
        "ibm-nodes: global_batch_size must be 12, as the run's from step 4 to 8, got 24\n",
    )
    assert traced(ibm_nodes, urls, 12, *given)["begin"] == 4 * 24 + 12
    error = ibm_nodes("trace", "pretrain", *flags_of(urls, 12), "--step", 3, "--checkpoint", target)[2]
    assert "must be 24, as the run's from step 0 to 4" in error


def test_needs_a_recipe_and_a_checkpoint_that_is_there(ibm_nodes, urls, tmp_path):
    assert ibm_nodes("trace")[2].startswith("ibm-nodes: trace must be given the name of a recipe: there are ")
    url = f"file://{tmp_path}/none"
    error = ibm_nodes("trace", "pretrain", *flags_of(urls, 24), "--step", 3, "--checkpoint", url)[2]
    assert error == f"ibm-nodes: no complete checkpoint under {url}: leave it out to replay from the start\n"


def test_on_an_object_store_and_never_shows_the_credentials(ibm_nodes, bucket):
    options = bucket.storage_options
    data = {
        name: corpora.write(f"{bucket.url}{name}/", [[corpora.documents([50] * 30)]], "parquet", options)
        for name in ("web", "code")
    }
    given = {**options, **{f"client_kwargs.{key}": value for key, value in options["client_kwargs"].items()}}
    given.pop("client_kwargs")
    store = [part for key, value in given.items() for part in ("--storage-option", f"{key}={value}")]
    target = f"{bucket.url}run"
    assert ibm_nodes("run", "pretrain", *flags_of(data, 24), *store, "--steps", 2, "--checkpoint", target)[0] == 0
    step = ["trace", "pretrain", *flags_of(data, 24), *store, "--step", 3]
    found = [ibm_nodes(*step, *more, "--json") for more in ([], ["--checkpoint", target])]
    for code, out, error in found:
        assert (code, error) == (0, "")
        assert options["secret"] not in out
    whole, since = (json.loads(out) for _, out, _ in found)
    assert (since["since"], since["changes"]) == (2, [])
    assert since["samples"] == whole["samples"]


def finite(url, source=None, filler=None):
    def graph(shard, num_shards):
        reader = Reader(url, shard=shard, num_shards=num_shards, epochs=1)
        return reader if source is Reader else Packer(reader, seq_len=32, eos_id=1, bos_id=7)

    node = Sharder(graph, num_shards=4, rank=0, world_size=1, filler=filler)
    return Loader(Batcher(node, batch_size=4, collate=CausalLMCollator(shift_labels=False)))


def test_data_that_ends_and_items_that_are_no_samples(urls):
    loader = finite(urls["web"])
    first = next(iter(Loader(loader.root)))["input_ids"].tolist()
    found = trace(finite(urls["web"]), step=1, global_batch_size=4)
    assert [traced.sample.tokens.tolist() for traced in found.samples] == first
    start = documents(found.samples[0].sample)[0]
    assert (start["begin"], start["bos"], start["at"]) == (0, True, 0)
    with pytest.raises(ValueError, match="logical shard 0 ended before sample 4000: "):
        trace(loader, step=1001, global_batch_size=4)
    filled = trace(finite(urls["web"], filler=found.samples[0].sample), step=1001, global_batch_size=4)
    assert {id(traced.sample) for traced in filled.samples} == {id(found.samples[0].sample)}
    with pytest.raises(TypeError, match="must draw samples to be traced, got Document"):
        trace(finite(urls["web"], Reader), step=1, global_batch_size=4)


def scheduled(urls):
    """A loader whose weights change at sample 60, and as they are told to."""
    schedule = Schedule([(0, {"web": 3, "code": 1}), (60, {"web": 1, "code": 9})])

    def graph(shard, num_shards):
        sources = {name: Reader(url, name=name, shard=shard, num_shards=num_shards) for name, url in urls.items()}
        return Packer(Mixer(sources, weights=schedule, seed=shard), seq_len=32, eos_id=EOS)

    node = Sharder(graph, num_shards=4, rank=0, world_size=1, schedule=schedule)
    return Loader(Batcher(node, batch_size=4, collate=CausalLMCollator(shift_labels=False)))


@pytest.mark.parametrize("saved", [0, 8, 22])
def test_a_replay_follows_the_weights_as_they_were_at_each_sample(urls, tmp_path, saved):
    target = f"file://{tmp_path}/run"
    loader = scheduled(urls)
    set_weights(loader, {"web": 0, "code": 1}, at=80)
    batches = []
    for step in range(1, 31):
        batches.append(next(iter(loader))["input_ids"].tolist())
        if step == saved:
            save(loader, target, step=step).result(30)
    for step in range(saved + 1, 31, 3):
        other = scheduled(urls)
        if not saved:
            if step > 20:
                continue  # what was set in the run is known from its checkpoints alone
            found = trace(other, step=step, global_batch_size=4)
        else:
            found = trace(other, step=step, global_batch_size=4, url=target)
        assert [traced.sample.tokens.tolist() for traced in found.samples] == batches[step - 1]


# Text


def test_text_is_written_with_the_boundaries_of_the_documents(ibm_nodes, tmp_path):
    texts = [f"Document {number}: naïve ☃. " * 3 for number in range(40)]
    url = corpora.write(f"file://{tmp_path}/x/", [[[list(text.encode()) for text in texts]]], "arrow")
    given = ["--data", f"x={url}", "--weight", "x=1", "--seq-len", 4000, "--eos-id", 256, "--global-batch-size", 2]
    code, out, error = ibm_nodes("trace", "pretrain", *given, "--num-shards", 2, "--step", 1, "--text", "--json")
    assert (code, error) == (0, "")
    for sample in json.loads(out)["samples"]:
        for document in sample["documents"][:-1]:
            part = texts[document["row"]].encode()[document["begin"] : document["end"]]
            assert document["text"] == part.decode("utf-8", "replace") + "<256>"
    out = ibm_nodes("trace", "pretrain", *given, "--num-shards", 2, "--step", 1, "--text")[1]
    assert f"\n    {texts[0] + '<256>'!r}\n" in out


def test_text_of_tokens_that_are_not_learned_is_written_too():
    tokens = np.array([*map(ord, "Q: why? A: so."), 256], np.int32)
    tokens[:10] = ~tokens[:10]
    (found,) = documents(Sample(tokens, (0,), (("chat", "file", 7, 0),)), to_text=bytes_to_text)
    assert found["text"] == "Q: why? A: so.<256>"
    assert (found["begin"], found["end"]) == (0, 15)


def test_bytes_that_are_no_text_are_written_too():
    assert bytes_to_text([72, 105, 300, 0xE2, 0x98]) == "Hi<300>\ufffd"


# Digests


def test_a_digest_is_the_hash_of_the_ranks_part_of_each_step(ibm_nodes, urls):
    for world_size, rank in ((1, 0), (3, 2)):
        loader = loaders(urls, world_size, 24)[rank]
        batches = [next(iter(loader))["input_ids"].numpy().astype("<i8") for _ in range(3)]
        loader.close()
        hashes = [
            hashlib.blake2b(np.ascontiguousarray(batch).tobytes(), digest_size=8).hexdigest() for batch in batches
        ]
        lines = [f"step {step} {digest}" for step, digest in enumerate(hashes, 1)]
        ranks = ["--world-size", world_size, "--rank", rank, "--steps", 3, "--digest"]
        for micro in ([], ["--micro-batch-size", 2]):
            code, out, error = ibm_nodes("run", "pretrain", *flags_of(urls, 24), *ranks, *micro)
            assert (code, error) == (0, "")
            assert [line for line in out.splitlines() if re.match(r"step \d+ [0-9a-f]{16}$", line)] == lines
        code, out, error = ibm_nodes("run", "pretrain", *flags_of(urls, 24), *ranks, "--json")
        assert json.loads(out)["steps"] == 3
        assert error.splitlines() == lines


def test_a_digest_goes_on_with_the_number_of_the_step_that_was_loaded(ibm_nodes, urls, tmp_path):
    given = ["run", "pretrain", *flags_of(urls, 24), "--digest"]
    whole = ibm_nodes(*given, "--steps", 5, "--json")[2].splitlines()
    halves = []
    for steps in (2, 3):
        halves += ibm_nodes(*given, "--steps", steps, "--json", "--checkpoint", f"file://{tmp_path}/run")[
            2
        ].splitlines()
    assert halves == whole
    assert [line.split()[1] for line in whole] == ["1", "2", "3", "4", "5"]


class Numbers(BaseNode):
    """Yields what has no input ids."""

    def next(self):
        return {"x": 1}

    def get_state(self):
        return {}


def test_a_digest_needs_input_ids(ibm_nodes, monkeypatch):
    monkeypatch.setattr(cli, "load_recipe", lambda name: lambda: Loader(Numbers()))
    code, _, error = ibm_nodes("run", "x", "--digest", "--steps", 1)
    assert (code, error) == (1, "ibm-nodes: batches must have a tensor input_ids to be hashed, got dict\n")
