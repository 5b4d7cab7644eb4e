"""``ibm-nodes show``, and the text of tokens by a real tokenizer: documents as they were written, and their bounds."""

import http.server
import json
import re
import sys
import threading

import corpora
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ibm_nodes import cli, load_recipe, storage
from ibm_nodes.recipes.pretrain import pretrain
from ibm_nodes.text import tokenizer_to_text

TEXTS = [f"Document {number}: naïve ☃ — {'yes no ' * (number % 4)}end." for number in range(40)]
END = "<|endoftext|>"
UNKNOWN = 9999


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level BPE that was trained on the texts; the path of its file."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="module")
def corpus(tokenizer, tmp_path_factory):
    ids = [Tokenizer.from_file(str(tokenizer)).encode(text).ids for text in TEXTS]
    ids[3] = [*ids[3], UNKNOWN, UNKNOWN]
    return corpora.write(f"file://{tmp_path_factory.mktemp('data')}/x/", [corpora.every(ids, 9)], "parquet")


def flags_of(corpus, *more):
    common = ["--weight", "x=1", "--seq-len", 60, "--eos-id", 0, "--global-batch-size", 4, "--num-shards", 4]
    return ["--data", f"x={corpus}", *common, *more]


def rows_of(report):
    return [(document["row"], document) for sample in report["samples"] for document in sample["documents"]]


def test_shows_the_first_samples_as_text_with_the_bounds_of_documents(ibm_nodes, corpus, tokenizer):
    code, out, error = ibm_nodes(
        "show", "pretrain", *flags_of(corpus, "--samples", 12, "--tokenizer", tokenizer, "--json")
    )
    assert (code, error) == (0, "")
    found = json.loads(out)
    assert [sample["sample"] for sample in found["samples"]] == list(range(12))
    assert [sample["shard"] for sample in found["samples"]] == [0, 1, 2, 3] * 3
    whole = {row: document["text"] for row, document in rows_of(found) if ends_and_begins(document)}
    assert len(whole) > 5
    for row, text in whole.items():
        more = f"<{UNKNOWN}><{UNKNOWN}>" if row == 3 else ""
        assert text == TEXTS[row] + more + END


def ends_and_begins(document):
    return document["begin"] == 0 and document["text"].endswith(END)


def test_the_samples_are_the_first_that_the_recipe_yields(ibm_nodes, corpus):
    options = {"weights": {"x": 1}, "seq_len": 60, "eos_id": 0, "num_shards": 4, "rank": 0, "world_size": 1}
    with pretrain({"x": corpus}, global_batch_size=4, **options) as loader:
        drawn = [row for batch, _ in zip(loader, range(2), strict=False) for row in batch["input_ids"].tolist()]
    found = json.loads(ibm_nodes("show", "pretrain", *flags_of(corpus, "--samples", 7, "--json"))[1])
    rows = corpora.read(corpus)
    assert len(found["samples"]) == 7
    for sample, tokens in zip(found["samples"], drawn, strict=False):
        read = []
        for document in sample["documents"]:
            read += [*rows[document["url"], document["row"]], 0][document["begin"] : document["end"]]
        assert read == tokens
        assert "text" not in sample["documents"][0]


def test_in_words_five_samples_are_shown_unless_it_is_said_how_many(ibm_nodes, corpus, tokenizer):
    code, out, error = ibm_nodes("show", "pretrain", *flags_of(corpus, "--tokenizer", tokenizer))
    assert (code, error) == (0, "")
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        f"sample {number} of logical shard {number % 4}" for number in range(5)
    ]
    assert re.match(rf"  0: x, {corpus}000.parquet, row \d+, tokens \d+ to \d+$", lines[1])
    assert any(line.startswith("    'Document ") and line.endswith(f"{END}'") for line in lines)
    out = ibm_nodes("show", "pretrain", *flags_of(corpus, "--samples", 1, "--text"))[1]
    assert sum(not line.startswith(" ") for line in out.splitlines()) == 1
    assert "<260>" in out or "<27" in out or "<29" in out  # without a tokenizer ids above 255 stay numbers


def test_a_trace_is_decoded_too(ibm_nodes, corpus, tokenizer):
    given = flags_of(corpus, "--step", 3, "--tokenizer", tokenizer)
    found = json.loads(ibm_nodes("trace", "pretrain", *given, "--json")[1])
    texts = [document for _, document in rows_of(found) if ends_and_begins(document)]
    assert texts and all(document["text"].startswith(TEXTS[document["row"]]) for document in texts)
    assert repr(texts[0]["text"]) in ibm_nodes("trace", "pretrain", *given)[1]


def test_a_recipe_with_a_tokenizer_decodes_with_its_own(ibm_nodes, corpus, tokenizer, monkeypatch):
    def recipe(*, tokenizer: str):
        options = {"seq_len": 60, "eos_id": 0, "global_batch_size": 4, "num_shards": 4, "rank": 0, "world_size": 1}
        return pretrain({"x": corpus}, weights={"x": 1}, **options)

    monkeypatch.setattr(cli, "load_recipe", lambda name: recipe)
    out = ibm_nodes("show", "texts", "--tokenizer", tokenizer)[1]
    assert "    '" not in out
    assert f"{END}'" in ibm_nodes("show", "texts", "--tokenizer", tokenizer, "--text")[1]


def test_the_tokenizer_may_lie_in_an_object_store_or_behind_http(bucket, tokenizer):
    expected = Tokenizer.from_file(str(tokenizer)).encode(TEXTS[5]).ids
    storage.write(f"{bucket.url}some/tokenizer.json", tokenizer.read_bytes(), bucket.storage_options)
    assert tokenizer_to_text(f"{bucket.url}some/tokenizer.json", bucket.storage_options)(expected) == TEXTS[5]
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tokenizer.parent))

        def log_request(self, *arguments):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/tokenizer.json"
            assert tokenizer_to_text(url)(expected) == TEXTS[5]
        finally:
            server.shutdown()
            thread.join()
    assert set(asked) == {"/tokenizer.json"}


@pytest.mark.parametrize("content", ["", "{}", "[1]", "\xff", '{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_one_clear_sentence(ibm_nodes, corpus, tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("latin-1"))
    code, out, error = ibm_nodes("show", "pretrain", *flags_of(corpus, "--tokenizer", path))
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert f"{path} is no tokenizer.json of the library tokenizers (" in error


def test_a_file_that_is_not_there_and_a_library_that_is_not_installed(
    ibm_nodes, corpus, tokenizer, tmp_path, monkeypatch
):
    for missing, words in ((tmp_path / "none.json", "No such file or directory"), (tmp_path, "Is a directory")):
        code, out, error = ibm_nodes("show", "pretrain", *flags_of(corpus, "--tokenizer", missing))
        assert (code, out) == (1, "")
        assert words in error and str(missing) in error
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, out, error = ibm_nodes("show", "pretrain", *flags_of(corpus, "--tokenizer", tokenizer))
    assert (code, out) == (1, "")
    assert error == (
        "ibm-nodes: tokenizers must be installed to use a tokenizer, and is not: pip install 'ibm-nodes[text]'\n"
    )


def test_says_what_is_wrong_with_the_flags(ibm_nodes, corpus):
    assert ibm_nodes("show")[2].startswith("ibm-nodes: show must be given the name of a recipe: there are ")
    error = ibm_nodes("show", "pretrain", *flags_of(corpus, "--samples", 0))[2]
    assert error.startswith("ibm-nodes: argument --samples: must be a number above 0, got '0'")
    assert load_recipe("pretrain") is pretrain
