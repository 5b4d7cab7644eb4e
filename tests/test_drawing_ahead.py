"""Documents that are drawn ahead, many at once: samples and states are those of a graph that draws one at a time."""

import random

import corpora
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import Items, PassedOn, documents, same, stored

from ibm_nodes import Document, Mixer, Packer, Reader, Schedule, Shuffler
from ibm_nodes.node import peeks, undoes

EOS, BOS, PAD = 1, 7, 3
STRATEGIES = ("concat", "pad", "best_fit")
OVERFLOWS = ("split", "truncate", "drop")


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """Three datasets in small blocks: empty documents, some that end with EOS already, wide ids, a tiny one."""
    root, rng = tmp_path_factory.mktemp("ahead"), random.Random(1)
    made = {}
    for number, (name, count) in enumerate({"web": 120, "code": 70, "books": 3}.items()):
        lengths = [rng.choice([0, 1, 2, 3, 5, 8, 13, 40]) for _ in range(count)]
        rows = corpora.documents(lengths, first=100 + 40_000 * number, stride=50)
        rows = [[*row, EOS] if rng.random() < (0.3, 0, 1)[number] else row for row in rows]
        made[name] = corpora.write(
            f"file://{root}/{name}/", [corpora.every(part, 9) for part in (rows, rows[:20])], "arrow"
        )
    return made


def mix(urls, *, alone, names=("web", "code", "books"), shard=0, num_shards=2, weights=None, epochs=None, limits=None):
    readers = {name: Reader(urls[name], name=name, shard=shard, num_shards=num_shards, epochs=epochs) for name in names}
    if alone:
        readers = {name: PassedOn(reader) for name, reader in readers.items()}
    weights = weights or dict(zip(names, (0.6, 0.3, 0.1), strict=False))
    node = Mixer(readers, weights=weights, seed=(0, shard), max_tokens=limits)
    return PassedOn(node) if alone else node


def both(urls, seq_len, *, of_mix=None, **options):
    """The same graph twice: one draws ahead, and one draws each document alone."""
    return [
        Packer(mix(urls, alone=alone, **(of_mix or {})), seq_len=seq_len, eos_id=EOS, **options) for alone in (0, 1)
    ]


def plain(state):
    """A packer's state with its mixer's, and of readers what does not tell how far a mixer has drawn ahead of them."""
    mixer = dict(state["source"])
    mixer.pop("sources")
    return {**state, "source": mixer}


def check(ahead, alone, num_samples):
    """Compares samples and states; gives the samples."""
    samples = []
    for number in range(num_samples):
        expected = next(alone, None)
        assert same(next(ahead, None), expected), number
        if expected is None:
            break
        samples.append(expected)
        if number % 3:
            assert same(plain(ahead.state_dict()), plain(alone.state_dict())), number
    return samples


def test_readers_and_mixers_are_drawn_ahead_from(urls):
    node = mix(urls, alone=False)
    assert undoes(node)
    assert all(peeks(source) for source in node.sources.values())
    assert not undoes(mix(urls, alone=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seq_len", [1, 7, 64, 500, 5000])
def test_samples_and_states_are_those_of_documents_drawn_one_by_one(urls, strategy, seq_len):
    ahead, alone = both(urls, seq_len, strategy=strategy)
    assert check(ahead, alone, 120 if seq_len < 500 else 40)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("marks", [{"bos_id": BOS}, {"pad_id": 100}, {"bos_id": EOS}])
def test_so_they_are_with_marks_and_long_documents(urls, strategy, overflow, marks):
    ahead, alone = both(urls, 30, strategy=strategy, overflow=overflow, num_open=3, **marks)
    check(ahead, alone, 60)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_so_they_are_at_the_end_of_the_data_and_of_each_source(urls, strategy):
    for of_mix in (
        {"epochs": 1},
        {"epochs": 2, "limits": {"web": 700}},
        {"limits": {"code": 1, "web": 301, "books": 9}},
    ):
        ahead, alone = both(urls, 64, strategy=strategy, of_mix=of_mix)
        samples = check(ahead, alone, 10_000)
        assert 3 < len(samples) < 10_000
        assert same(plain(ahead.state_dict()), plain(alone.state_dict()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_state_goes_on_exactly(urls, strategy):
    node = both(urls, 64, strategy=strategy, num_open=3)[0]
    states, samples = [], []
    for _ in range(68):
        states.append(stored(node.state_dict()))
        samples.append(next(node))
    for number in range(0, 60, 5):
        for other in both(urls, 64, strategy=strategy, num_open=3):
            other.reset(states[number])
            assert same([next(other) for _ in range(4)], samples[number : number + 4])
            state = stored(other.state_dict())
            again = both(urls, 64, strategy=strategy, num_open=3)[0]
            again.reset(state)
            assert same([next(again) for _ in range(4)], samples[number + 4 : number + 8])


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(0, 10_000), st.sampled_from(STRATEGIES), st.sampled_from([3, 20, 64]), st.booleans())
def test_weights_and_lengths_that_change_at_any_moment_change_the_same_sample(urls, seed, strategy, seq_len, grows):
    rng = random.Random(seed)
    names = ("web", "code", "books")
    entries = [(0, dict(zip(names, (6, 3, 1), strict=True)))]
    entries += [
        (at, {name: rng.choice([0, 1, 5]) + (name == "web") for name in names})
        for at in sorted({9, rng.randint(10, 30)})
    ]
    lengths = {0: seq_len, 40: 2 * seq_len, 70: seq_len} if grows else seq_len

    buffer_size = rng.choice([1, 4])

    def build(alone):
        schedule = Schedule(entries, seq_len=1)
        pack = Schedule(entries, seq_len=lengths) if grows else None
        packer = Packer(
            mix(urls, alone=alone, weights=schedule), seq_len=pack or seq_len, eos_id=EOS, strategy=strategy
        )
        node = Shuffler(packer, buffer_size=buffer_size, seed=0)
        return node, schedule, pack

    (ahead, *of_ahead), (alone, *of_alone) = build(False), build(True)
    changes = {
        number: {name: rng.choice([0, 1, 9]) + (name == "code") for name in names}
        for number in rng.sample(range(60), 4)
    }

    late = {number: rng.choice([0, 0, 3]) for number in changes}

    def set_clocks(number):
        for clock, pack in (of_ahead, of_alone):
            clock.now = number
            if pack is not None:
                pack.now = number
            if number in changes:
                clock.add(number + late[number], changes[number])

    for number in range(60):
        set_clocks(number)
        assert same(next(ahead), next(alone)), number
        if number % 4 == 1:
            one, other = ahead.state_dict(), alone.state_dict()
            assert same(one["buffer"], other["buffer"])
            assert same(plain(one["source"]), plain(other["source"])), number


def test_so_they_are_where_readers_and_others_are_mixed(urls):
    def build(alone):
        docs = documents([3, 0, 9, 40, 1] * 30)
        readers = {name: Reader(urls[name], name=name, shard=0, num_shards=1) for name in ("web", "code")}
        sources = {**readers, "own": Items(docs)}
        node = Mixer(sources, weights={"web": 1, "code": 1, "own": 1}, seed=0)
        return Packer(PassedOn(node) if alone else node, seq_len=40, eos_id=EOS)

    check(build(False), build(True), 80)


def test_a_reader_alone_is_drawn_ahead_from_too(urls):
    def build(alone):
        reader = Reader(urls["web"], name="web", shard=0, num_shards=1)
        return Packer(PassedOn(reader) if alone else reader, seq_len=50, eos_id=EOS)

    ahead, alone = build(False), build(True)
    for _ in range(100):
        assert same(next(ahead), next(alone))
        one, other = ahead.state_dict(), alone.state_dict()
        assert same({**one, "source": None}, {**other, "source": None})
        assert one["source"]["row"] == other["source"]["row"] and one["source"]["block"] == other["source"]["block"]
        assert one["source"]["passes"] == other["source"]["passes"]


def test_a_class_that_changes_what_a_reader_gives_is_asked_for_it(urls):
    class Loud(Reader):
        def next(self):
            document = super().next()
            return document._replace(tokens=document.tokens + np.uint16(1))

    def reader(kind):
        return kind(urls["books"], name="books", shard=0, num_shards=1)

    assert not peeks(reader(Loud)) and not undoes(reader(Loud))
    node = Packer(Mixer({"books": reader(Loud)}, weights={"books": 1}), seq_len=10, eos_id=EOS)
    expected = [document.tokens + 1 for document, _ in zip(reader(Reader), range(2), strict=False)]
    assert next(node).tokens.tolist()[: len(expected[0])] == expected[0].tolist()[:10]


def test_documents_by_columns_are_a_sequence_of_documents(urls):
    node = Reader(urls["web"], name="web", shard=0, num_shards=1)
    node.reset(None)
    found = node.draw(100, 1)
    assert len(found) > 3
    assert all(type(document) is Document for document in found)
    assert same(list(found), [found[number] for number in range(len(found))])
    assert same(found[1:3], [found[1], found[2]]) and same(found[-1], list(found)[-1])
    assert [len(document.tokens) for document in found] == list(found.lengths)
    assert [document.tokens[-1] for document in found] == list(found.last)
    with pytest.raises(IndexError):
        found[len(found)]
