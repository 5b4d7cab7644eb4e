"""Tokenizer: the tokens of every text, once, with a state that is exact to the document."""

import itertools
from functools import partial

import numpy as np
import pytest
import texts
from sources import Items, same
from texts import BEGIN, END, TEXTS

from ibm_nodes import Filter, Mapper, Mixer, Packer, Prefetcher, Sharder, Shuffler, Tokenizer, tokenizer
from ibm_nodes.testing import assert_rescales, assert_resumes


def take(node, count=None):
    return list(itertools.islice(node, count))


def rows(values, url="file", epochs=1):
    return [
        {"text": value, "__url__": url, "__row__": row, "__name__": "d", "__epoch__": epoch}
        for epoch in range(epochs)
        for row, value in enumerate(values)
    ]


class Drawn(Mixer):
    """A source that gives many items at once."""

    def __init__(self, items):
        super().__init__({"d": Items(items)}, weights={"d": 1})


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return texts.save(f"file://{tmp_path_factory.mktemp('tokenizer')}/tokenizer.json")


@pytest.fixture(scope="module")
def model():
    return texts.train()


@pytest.fixture
def batches(monkeypatch):
    """How many texts each batch has that is tokenized."""
    sizes = []
    encode = tokenizer.Encoder.encode

    def counted(self, batch, *options):
        sizes.append(len(batch))
        return encode(self, batch, *options)

    monkeypatch.setattr(tokenizer.Encoder, "encode", counted)
    return sizes


def plain(model, values):
    return [model.encode(value, add_special_tokens=False).ids for value in values]


def test_every_text_is_tokenized_as_the_library_does_it_and_keeps_its_place(url, model):
    found = take(Tokenizer(Items(rows(TEXTS)), url))
    assert [one.tokens.tolist() for one in found] == plain(model, TEXTS)
    assert [one[1:] for one in found] == [("file", row, "d", 0) for row in range(len(TEXTS))]
    assert {one.tokens.dtype for one in found} == {np.dtype(np.uint16)}


def test_batches_grow_from_1_to_64(url, batches):
    assert len(take(Tokenizer(Items(rows(TEXTS * 4)), url))) == 240
    assert batches == [1, 8, 64, 64, 64, 39]


def test_it_resumes_to_the_document(url):
    values = ["", TEXTS[0], None, "", *TEXTS[1:13], ""]
    assert_resumes(lambda: Tokenizer(Items(rows(values)), url))
    assert_resumes(lambda: Packer(Tokenizer(Items(rows(values)), url), seq_len=9, eos_id=0), num_items=30)
    mixed = lambda: Mixer({"d": Tokenizer(Items(rows(values)), url)}, weights={"d": 1})  # noqa: E731
    assert_resumes(lambda: Shuffler(mixed(), buffer_size=3, seed=0))
    assert_resumes(lambda: Prefetcher(mixed(), prefetch_factor=2))
    odd = lambda: Filter(Items(rows(values)), lambda row: row["__row__"] % 2)  # noqa: E731
    assert_resumes(lambda: Tokenizer(odd(), url))
    assert_resumes(lambda: Mapper(Tokenizer(odd(), url), lambda one, _: one, seed=0))


def test_it_resumes_in_the_middle_of_large_batches(url):
    make = partial(Tokenizer, Items(rows(TEXTS * 5)), url)
    assert_resumes(make, num_items=300, cuts=(62, 63, 64, 126, 127, 150, 254, 255, 299, 300))


def test_what_was_handed_out_of_a_batch_is_not_tokenized_again(url, batches):
    node = Tokenizer(Items(rows(TEXTS * 5)), url)
    take(node, 150)
    state, (*_, size) = node.state_dict(), batches
    assert size == 64
    del batches[:]
    node.reset(state)
    take(node, 1)
    assert batches == [1]


def test_graphs_with_it_are_the_same_at_every_world_size(url):
    def graph(shard, num_shards):
        values = [f"shard {shard} text {number} {'word ' * (number % 7)}" for number in range(40)]
        return Packer(Tokenizer(Items(rows(values, f"file-{shard}", epochs=2)), url), seq_len=11, eos_id=0)

    assert_rescales(graph, num_shards=6)


class TestEdges:
    @pytest.mark.parametrize("source", [Items, Drawn])
    def test_texts_without_tokens_are_passed_over_and_counted(self, url, source):
        if source is Drawn:
            source = lambda items: Filter(Items(items), lambda _: True)  # noqa: E731
        node, state, found = Tokenizer(source(rows(["", "a", None, "", "b", "c", ""])), url), None, []
        while True:
            node.reset(state)
            if not (one := take(node, 1)):
                break
            found += one
            state = node.state_dict()
        assert [one.row for one in found] == [1, 4, 5]
        assert node.state_dict()["without_tokens"] == 4

    def test_a_document_of_10_megabytes_is_tokenized_whole_and_ends_its_batch(self, url, model, batches):
        large = "yes no end. " * (10_000_000 // 12)
        found = take(Tokenizer(Items(rows(["a", *"bc", large, "d"])), url))
        assert model.decode(found[3].tokens.tolist()) == large
        assert [len(one.tokens) for one in found[:3] + found[4:]] == [1, 1, 1, 1]
        assert batches == [1, 3, 1]

    def test_truncation_and_padding_of_the_file_are_not_done(self, tmp_path, model):
        url = texts.save(f"file://{tmp_path}/tokenizer.json", max_length=12)
        found = take(Tokenizer(Items(rows([TEXTS[3], "a"])), url))
        assert [one.tokens.tolist() for one in found] == plain(model, [TEXTS[3], "a"])
        assert len(found[0].tokens) > 12

    def test_special_tokens_are_under_control(self, url, model):
        text = f"no{END}yes"
        begin, end = model.token_to_id(BEGIN), model.token_to_id(END)

        def tokens(**options):
            return take(Tokenizer(Items(rows([text])), url, **options))[0].tokens.tolist()

        assert end not in tokens() and begin not in tokens()
        assert model.decode(tokens()) == text
        assert tokens(allow_special_tokens=True) == [*plain(model, ["no"])[0], end, *plain(model, ["yes"])[0]]
        assert tokens(add_special_tokens=True) == [begin, *tokens()]

    def test_an_endless_source_of_texts_without_tokens_is_an_error(self, url):
        with pytest.raises(ValueError, match="no text had a token in 8 passes over 'd'"):
            next(Tokenizer(Items(rows(["", None], epochs=20)), url))

    def test_a_store_has_the_file(self, bucket):
        url = texts.save(f"{bucket.url}some where/tokenizer.json", bucket.storage_options)
        assert len(take(Tokenizer(Items(rows(TEXTS)), url, storage_options=bucket.storage_options))) == len(TEXTS)

    def test_logical_shards_share_one_tokenizer(self, tmp_path, monkeypatch):
        reads, url = [], texts.save(f"file://{tmp_path}/tokenizer.json")
        load = tokenizer.load_tokenizer
        monkeypatch.setattr(tokenizer, "load_tokenizer", lambda *given: reads.append(given) or load(*given))
        node = Sharder(lambda *_: Tokenizer(Items(rows(TEXTS)), url), num_shards=8, rank=0, world_size=1)
        assert len(take(node)) == 8 * len(TEXTS)
        assert len(reads) == 1


class TestErrors:
    @pytest.mark.parametrize("bad, kind, words", [
        ({"text": 3}, TypeError, "column 'text' must hold text, got int"),
        ({"txt": "a"}, LookupError, "no column 'text': give column, one of 'txt', '__url__'"),
        ({"text": "\ud800"}, ValueError, "surrogates not allowed"),
    ])  # fmt: skip
    @pytest.mark.parametrize("place", [0, 1, 5, 20])
    def test_a_row_without_text_is_an_error_in_its_place_that_names_it(self, url, place, bad, kind, words):
        items = rows(TEXTS[:21])
        del items[place]["text"]
        items[place] = bad | items[place]
        node, found = Tokenizer(Items(items), url), []
        for _ in range(2):
            with pytest.raises(kind, match=words) as caught:
                found += iter(lambda: next(node), None)
            assert f"in row {place} of file" in caught.value.__notes__
            assert [one.row for one in found] == list(range(place))

    def test_an_error_of_the_source_loses_no_document(self, url):
        node, found = Tokenizer(Items(rows(TEXTS), fails=[0, 1, 5, 40, 60]), url), []
        expected = take(Tokenizer(Items(rows(TEXTS)), url))
        while True:
            try:
                found.append(next(node))
            except OSError:
                continue
            except StopIteration:
                break
        assert same(found, expected)

    def test_an_item_that_is_no_row_is_refused(self, url):
        with pytest.raises(TypeError, match=r"items must be rows, got str: give Reader columns=\['text'\]"):
            next(Tokenizer(Items(["text"]), url))

    def test_a_file_that_is_no_tokenizer_is_refused(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer.json of the library tokenizers"):
            next(Tokenizer(Items([]), f"file://{tmp_path}/tokenizer.json"))
        with pytest.raises(FileNotFoundError):
            next(Tokenizer(Items([]), str(tmp_path / "none.json")))

    def test_another_tokenizer_or_setting_is_refused(self, url, tmp_path):
        node = Tokenizer(Items(rows(TEXTS)), url)
        next(node)
        state = node.state_dict()
        other = texts.save(f"file://{tmp_path}/tokenizer.json", max_length=12)
        with pytest.raises(ValueError, match="saved with tokenizer='[0-9a-f]{16}' and is now built with tokenizer="):
            Tokenizer(Items(rows(TEXTS)), other).reset(state)
        for name in ("add_special_tokens", "allow_special_tokens"):
            with pytest.raises(ValueError, match=f"was saved with {name}=False and is now built with {name}=True"):
                Tokenizer(Items(rows(TEXTS)), url, **{name: True}).reset(state)
