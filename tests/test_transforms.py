"""Filter and Mapper: exact states, what is dropped is counted, and randomness belongs to the document."""

import itertools
import pathlib
import re
from functools import partial

import corpora
import numpy as np
import pytest
from sources import Items, documents, numbers, packed, same
from torchdata.nodes import BaseNode

from ibm_nodes import Batcher, Document, Filter, Loader, Mapper, Mixer, Packer, Reader, Sharder, Shuffler, stats
from ibm_nodes.testing import assert_rescales, assert_resumes

TRANSFORMS = pathlib.Path(__file__).parent.parent / "docs" / "transforms.md"


def take(node, count=None):
    return list(itertools.islice(node, count))


def is_even(item):
    return (item.row if isinstance(item, Document) else item[1]) % 2 == 0


def shift(document, seed):
    """A document all of whose tokens grow by a number of its own."""
    return document._replace(tokens=document.tokens + np.random.default_rng(seed).integers(1, 500, dtype=np.int32))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    rows = corpora.documents([1 + number % 5 for number in range(150)])
    files = [corpora.every(part, 7) for part in corpora.every(rows, 50)]
    return corpora.write(f"file://{tmp_path_factory.mktemp('d')}/d/", files, "parquet")


def read(url, shard=0, num_shards=1, **options):
    return Reader(url, name="d", shard=shard, num_shards=num_shards, **options)


class TestFilter:
    def test_what_is_kept_is_in_the_order_of_the_source(self, corpus):
        kept = take(Filter(read(corpus, epochs=1), is_even))
        assert same(kept, [one for one in take(read(corpus, epochs=1)) if is_even(one)])
        assert 0 < len(kept) < 150

    @pytest.mark.parametrize("keep", [(), (0,), (6,), (2, 3), range(7)])
    def test_it_resumes_whatever_is_dropped(self, keep):
        make = lambda: Filter(Items(documents([3, 0, 1, 2, 5, 1, 4])), lambda one: one.row in keep)  # noqa: E731
        if keep:
            assert_resumes(make)
        assert [one.row for one in make()] == list(keep)

    def test_it_resumes_between_nodes_that_draw_many(self, corpus):
        assert_resumes(lambda: Filter(Filter(read(corpus), is_even), lambda one: one.row % 3 == 0))
        assert_resumes(
            lambda: Packer(Mixer({"d": Filter(read(corpus), is_even)}, weights={"d": 1}), seq_len=7, eos_id=2)
        )
        assert_resumes(lambda: Shuffler(Filter(numbers(0, 1), is_even), buffer_size=3, seed=0))

    def test_graphs_with_it_are_the_same_at_every_world_size(self, corpus):
        assert_rescales(lambda *of: Packer(Filter(read(corpus, *of), is_even), seq_len=7, eos_id=2), num_shards=6)
        assert_rescales(lambda *of: Filter(packed(corpus, *of), lambda one: one.tokens[0] % 2), num_shards=6)

    def test_documents_and_tokens_dropped_are_counted_by_dataset_through_any_number_of_resumes(self, corpus):
        whole = take(read(corpus, epochs=1))
        expected = [one for one in whole if not is_even(one)]
        node, state = Filter(read(corpus, epochs=1), is_even), None
        while True:
            node.reset(state)
            if not take(node, 7):
                break
            state = node.state_dict()
        assert node.state_dict()["dropped_by_dataset"] == {
            "d": (len(expected), sum(len(one.tokens) for one in expected))
        }

    @pytest.mark.parametrize("packed", [True, False])
    def test_stats_have_what_was_dropped_of_each_dataset(self, corpus, packed):
        def graph(shard, num_shards):
            sources = {name: Reader(corpus, name=name, shard=shard, num_shards=num_shards, epochs=1) for name in "ab"}
            node = Filter(Mixer(sources, weights={"a": 1, "b": 1}), lambda one: one.name == "a" or is_even(one))
            return Packer(node, seq_len=8, eos_id=2) if packed else node

        loader = Loader(Batcher(Sharder(graph, num_shards=4, rank=0, world_size=1), batch_size=8, drop_last=False))
        kept = sum(map(len, loader))
        found = stats(loader)["datasets"]
        dropped = [one for one in take(read(corpus, epochs=1)) if not is_even(one)]
        assert found["b"]["dropped"] == len(dropped)
        assert packed or len(dropped) == 300 - kept
        assert found["b"]["dropped_tokens"] == sum(len(one.tokens) for one in dropped)
        assert "dropped" not in found["a"]

    def test_a_predicate_that_keeps_nothing_of_an_endless_source_is_an_error(self, corpus):
        with pytest.raises(ValueError, match=r"kept nothing in 8 passes over 'd' .* give Reader epochs"):
            next(Filter(read(corpus), lambda _: False))

    def test_a_predicate_that_keeps_nothing_of_a_finite_source_is_its_end(self, corpus):
        node = Filter(read(corpus, epochs=2), lambda _: False)
        assert take(node) == []
        assert node.state_dict()["dropped_by_dataset"]["d"][0] == 300


class FailsOnce:
    def __init__(self, function, row, error):
        self.function, self.row, self.error = function, row, error

    def __call__(self, document, *seed):
        if document.row == self.row and self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.function(document, *seed)


class TestErrors:
    @pytest.mark.parametrize("row", [0, 3, 8])
    @pytest.mark.parametrize("make", [
        lambda fails: Filter(fails[0], fails[1](is_even)),
        lambda fails: Mapper(fails[0], fails[1](shift), seed=0),
    ])  # fmt: skip
    @pytest.mark.parametrize("many", [True, False])
    def test_an_error_names_the_place_and_loses_no_item(self, make, row, many):
        def build(error):
            source = Items(documents([2] * 9))
            return make(
                (Mixer({"a": source}, weights={"a": 1}) if many else source, partial(FailsOnce, row=row, error=error))
            )

        expected = take(build(None))
        node, found = build(ValueError("odd")), []
        with pytest.raises(ValueError, match="odd") as caught:
            found += iter(lambda: next(node), None)
        assert caught.value.__notes__ == [f"in row {row} of file-{row % 3}"]
        fresh = build(None)
        fresh.reset(node.state_dict())
        assert same(found + take(node), expected)
        assert same(found + take(fresh), expected)

    @pytest.mark.parametrize("node", [Filter(Items(documents([1])), next), Mapper(Items(documents([1])), next, seed=0)])
    def test_a_function_that_raises_stop_iteration_does_not_end_the_data(self, node):
        def stop(*_):
            raise StopIteration

        if isinstance(node, Filter):
            node.predicate = stop
        else:
            node.function = stop
        with pytest.raises(RuntimeError, match="row 0 of file-0 raised StopIteration, which is no end of data"):
            next(node)

    def test_an_error_of_the_source_loses_no_item(self):
        for make in (lambda source: Filter(source, is_even), lambda source: Mapper(source, shift, seed=0)):
            expected = take(make(Items(documents([2] * 9))))
            node, found = make(Items(documents([2] * 9), fails=[0, 4, 9])), []
            while True:
                try:
                    found.append(next(node))
                except OSError:
                    continue
                except StopIteration:
                    break
            assert same(found, expected)


class TestMapper:
    def test_it_resumes(self, corpus):
        assert_resumes(lambda: Mapper(Items(documents([3, 0, 1, 2, 5])), shift, seed=0))
        assert_resumes(lambda: Mapper(Mapper(read(corpus), shift, seed=0), shift, seed=1))
        assert_resumes(lambda: Packer(Mapper(Filter(read(corpus), is_even), shift, seed=0), seq_len=7, eos_id=2))

    def test_graphs_with_it_are_the_same_at_every_world_size(self, corpus):
        assert_rescales(lambda *of: Packer(Mapper(read(corpus, *of), shift, seed=0), seq_len=7, eos_id=2), num_shards=6)

    def test_a_seed_is_of_the_document_and_nobody_else(self):
        items = [
            Document(np.zeros(1, np.int32), url, row, name, epoch)
            for url, row, name, epoch in itertools.product(("s3://a/x", "s3://a/y"), (0, 1), ("d", "e"), (0, 1))
        ]
        seeds = {seed: take(Mapper(Items(items), lambda _, own: own, seed=seed)) for seed in (0, 1, (0, 1))}
        assert len(set(itertools.chain(*seeds.values()))) == 3 * len(items)
        assert take(Mapper(Items(items[::-1]), lambda _, own: own, seed=0)) == seeds[0][::-1]
        moved = [one._replace(url=one.url.replace("s3://a/", "file:///b/c/")) for one in items]
        assert take(Mapper(Items(moved), lambda _, own: own, seed=0)) == seeds[0]

    def test_seeds_are_those_of_the_first_release(self):
        (one,) = documents([1])
        assert take(Mapper(Items([one]), lambda _, own: own, seed=0)) == [18132430176798049596]

    def test_a_change_of_the_seed_is_refused(self):
        node = Mapper(Items(documents([1])), shift, seed=0)
        next(node)
        with pytest.raises(ValueError, match="was saved with seed=0 and is now built with seed=1"):
            Mapper(Items(documents([1])), shift, seed=1).reset(node.state_dict())

    def test_an_item_without_a_place_is_refused(self):
        with pytest.raises(TypeError, match="must be documents or rows, .* got tuple: put it below"):
            next(Mapper(numbers(0, 1), shift, seed=0))


@pytest.fixture(scope="module")
def names(corpus):
    names = {}
    code = re.findall(r"```python\n(.*?)```", TRANSFORMS.read_text(), re.S)[1]
    exec(compile(code.replace("4096", "16").replace("s3://corpora/code/", corpus), TRANSFORMS, "exec"), names)
    return names


class TestFillInTheMiddle:
    """The example of docs/transforms.md, as it stands there."""

    IDS = dict(prefix_id=50_001, suffix_id=50_002, middle_id=50_003)

    def test_it_is_the_same_at_every_world_size(self, names):
        assert_rescales(names["graph"], num_shards=6)
        assert_resumes(lambda: names["graph"](0, 6))

    def test_half_of_the_documents_are_cut_and_none_loses_a_token(self, names):
        whole = documents([3 + number % 40 for number in range(400)])
        middle = partial(names["fill_in_the_middle"], rate=0.5, **self.IDS)
        found = take(Mapper(Items(whole), middle, seed=0))
        num_cut = 0
        for before, after in zip(whole, found, strict=True):
            if same(before, after):
                continue
            num_cut += 1
            places = [after.tokens.tolist().index(token) for token in self.IDS.values()]
            assert places[0] == 0
            prefix, suffix, tail = (part[1:] for part in np.split(after.tokens, places[1:]))
            assert np.concatenate([prefix, tail, suffix]).tolist() == before.tokens.tolist()
        assert 150 < num_cut < 250


def test_the_example_of_a_filter_runs(corpus):
    code = re.findall(r"```python\n(.*?)```", TRANSFORMS.read_text(), re.S)[0]
    names = {}
    exec(
        compile(code.replace("32", "3").replace("256", "1").replace("s3://corpora/web/", corpus), TRANSFORMS, "exec"),
        names,
    )
    assert isinstance(names["node"], BaseNode)
    assert {len(one.tokens) for one in take(names["node"], 100)} == {3, 4, 5}
