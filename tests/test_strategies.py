"""How documents are packed, against a plain reading of each strategy, and in tables."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import Items, documents, same, stored, stored_bytes

from ibm_nodes import Document, Packer, Shuffler
from ibm_nodes.node import Node
from ibm_nodes.testing import assert_resumes

EOS, BOS, PAD, L = 9, 8, 7, 8
LENGTHS = [L - 1, 3, L, 0, L + 1, 1, 2, 10 * L, 0, 5, L - 2, 6, 1, 1, 4, 3 * L, 2]
STRATEGIES, OVERFLOWS = ("concat", "pad", "best_fit"), ("split", "truncate", "drop")


def build(docs, fails=(), **options):
    return Packer(Items(docs, fails), **{"seq_len": L, "eos_id": EOS, "num_open": 3, **options})


class AtOnce(Node):
    """A source that has all its documents at hand."""

    def __init__(self, items):
        super().__init__()
        self.items = items

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.position = 0 if initial_state is None else initial_state["position"]

    def next(self):
        return self.draw(1)[0]

    def draw(self, num_tokens, extra=0):
        begin = self.position
        while num_tokens > 0 and self.position < len(self.items):
            num_tokens -= len(self.items[self.position].tokens) + extra
            self.position += 1
        if begin == self.position:
            raise StopIteration
        return self.items[begin : self.position]

    def get_state(self):
        return {"position": self.position}


def pairs(sample):
    """Every token of a sample with its place."""
    ends = [*sample.starts[1:], len(sample.tokens)]
    return [
        (token, (*place[:3], place[3] + offset))
        for start, end, place in zip(sample.starts, ends, sample.documents, strict=True)
        for offset, token in enumerate(sample.tokens[start:end].tolist())
    ]


def marked(document, bos_id, pad_id):
    """The tokens of a document with its marks, each with its place."""
    tokens = document.tokens.tolist()
    while tokens and tokens[-1] == pad_id:
        tokens.pop()
    run = list(enumerate(tokens))
    if not run:
        return []
    if bos_id is not None and tokens[0] != bos_id:
        run.insert(0, (-1, bos_id))
    if tokens[-1] != EOS:
        run.append((len(tokens), EOS))
    return [(token, (document.name, document.url, document.row, offset)) for offset, token in run]


def expected(docs, strategy="concat", overflow="split", seq_len=L, num_open=3, bos_id=None, pad_id=None):
    """The samples, as lists of tokens with their places: a reading of the strategies in plain Python."""
    runs = [run for run in (marked(document, bos_id, pad_id) for document in docs) if run]
    if overflow == "drop":
        runs = [run for run in runs if len(run) <= seq_len]
    if overflow == "truncate":
        runs = [run[:seq_len] for run in runs]
    if strategy == "concat":
        flat = [token for run in runs for token in run]
        return [flat[begin : begin + seq_len] for begin in range(0, len(flat), seq_len)]
    samples, opened = [], []
    for run in runs:
        put(run, samples, opened, seq_len, 1 if strategy == "pad" else num_open)
    return samples + sorted(opened, key=len, reverse=True)


def put(run, samples, opened, seq_len, num_open):
    """Puts a document into an open sample, and what is done by that to the samples; one open sample keeps the order."""
    while len(run) >= seq_len:
        if num_open == 1 and opened:
            samples.append(opened.pop())
        samples.append(run[:seq_len])
        run = run[seq_len:]
    fitting = [sample for sample in opened if len(sample) + len(run) <= seq_len]
    if run and not fitting:
        if len(opened) == num_open:
            samples.append(opened.pop(opened.index(max(opened, key=len))))
        opened.append([])
        fitting = opened[-1:]
    if run:
        best = max(fitting, key=len)
        best += run
        if len(best) == seq_len:
            samples.append(opened.pop([one is best for one in opened].index(True)))


def check(docs, **options):
    node = build(docs, **options)
    samples = list(node)
    assert [pairs(sample) for sample in samples] == expected(docs, **options)
    return node, samples


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("bos_id", [None, BOS])
@pytest.mark.parametrize("pad_id", [None, PAD, EOS])
def test_packs_as_a_plain_reading_does_whatever_marks_the_data_has(strategy, overflow, bos_id, pad_id):
    options = {"strategy": strategy, "overflow": overflow, "bos_id": bos_id, "pad_id": pad_id}
    for first, last, padding in itertools.product(([], [BOS]), ([], [EOS]), ([], [PAD], [PAD, PAD, PAD])):
        rows = [[*first, *range(100 * row, 100 * row + length), *last, *padding] for row, length in enumerate(LENGTHS)]
        docs = [Document(np.array(row, np.int32), "file", number, "data") for number, row in enumerate(rows, 1)]
        check(docs, **options)


GOLDEN = {
    ("concat", "split"): "aaa.bbbb bbb.cccc ccccc.dd dddddddd ddd.e.",
    ("concat", "truncate"): "aaa.bbbb bbb.cccc ccccdddd dddde.",
    ("concat", "drop"): "aaa.bbbb bbb.e.",
    ("pad", "split"): "aaa. bbbbbbb. cccccccc c. dddddddd ddddd.e.",
    ("pad", "truncate"): "aaa. bbbbbbb. cccccccc dddddddd e.",
    ("pad", "drop"): "aaa. bbbbbbb. e.",
    ("best_fit", "split"): "bbbbbbb. cccccccc dddddddd aaa.c.e. ddddd.",
    ("best_fit", "truncate"): "bbbbbbb. cccccccc dddddddd aaa.e.",
    ("best_fit", "drop"): "bbbbbbb. aaa.e.",
}
TRUNCATED = {
    ("concat", "split"): 3,
    ("concat", "truncate"): 5,  # two are shortened, and three cut by the end of a sample
    ("concat", "drop"): 1,
    ("pad", "split"): 2,
    ("pad", "truncate"): 2,
    ("pad", "drop"): 0,
    ("best_fit", "split"): 2,
    ("best_fit", "truncate"): 2,
    ("best_fit", "drop"): 0,
}


@pytest.mark.parametrize(("strategy", "overflow"), GOLDEN)
def test_the_golden_table(strategy, overflow):
    """Documents of 3, 7, 9, 13 and 1 letters in samples of 8, closed with a dot; one has its dot, one is empty."""
    texts = ["aaa.", "b" * (L - 1), "", "c" * (L + 1), "d" * (L + 5), "e"]
    docs = [Document(np.array([*map(ord, text)], np.uint16)) for text in texts]
    node = build(docs, strategy=strategy, overflow=overflow, eos_id=ord("."))
    found = " ".join("".join(map(chr, sample.tokens.tolist())) for sample in node)
    assert found == GOLDEN[strategy, overflow]
    counts = node.state_dict()["counts"]
    tokens = found.replace(" ", "")
    assert counts == {
        "documents": 5,
        "truncated": TRUNCATED[strategy, overflow],
        "dropped": 2 if overflow == "drop" else 0,
        "tokens": len(tokens),
        "padding": L * len(found.split()) - len(tokens),
    }


def test_pad_keeps_the_order_of_documents_and_best_fit_a_bound_on_open_samples():
    docs = documents([length for length in LENGTHS * 3 if length < L])
    node = build(docs, strategy="pad")
    assert [place[2] for sample in node for place in sample.documents] == [one.row for one in docs if len(one.tokens)]
    for num_open in range(1, 6):
        node, _ = check(docs, strategy="best_fit", num_open=num_open)
        node.reset()
        for _ in node:
            assert len(node.state_dict()["open"]) <= num_open


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_document_that_fits_is_whole_in_one_sample_and_no_token_is_lost(strategy):
    docs = documents(LENGTHS * 5)
    found = Counter(pair for sample in build(docs, strategy=strategy) for pair in pairs(sample))
    assert found == Counter(pair for document in docs for pair in marked(document, None, None))
    if strategy != "concat":
        for sample in build(docs, strategy=strategy):
            for place in sample.documents:
                assert place[3] == 0 or len(docs[place[2]].tokens) >= L


def test_many_short_documents_leave_little_padding():
    for strategy, most in (("concat", 0), ("pad", 0.02), ("best_fit", 0.02)):
        node = Packer(Items(documents([20] * 6000)), seq_len=512, eos_id=EOS, strategy=strategy)
        samples = list(itertools.islice(node, 200))
        assert sum(512 - len(sample.tokens) for sample in samples) <= most * 200 * 512


@pytest.mark.parametrize("dtype", ["u4", "u8"])
def test_unsigned_ids_are_packed_in_every_strategy(dtype):
    docs = [Document(np.arange(length).astype(dtype) + 70_000) for length in (1, 5, 8, 8, 3)]
    for strategy in STRATEGIES:
        node = Packer(Items(docs), seq_len=10, eos_id=70_100, strategy=strategy)
        found = Counter(token for sample in node for token in sample.tokens.tolist())
        assert found == Counter([70_100] * 5 + [70_000 + one for length in (1, 5, 8, 8, 3) for one in range(length)])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_last_sample_is_left_out_where_asked_if_it_is_not_full(strategy):
    for lengths in ([], [0], [3], [L - 1], [3, L - 1], [3, 5, 5, 5], LENGTHS, LENGTHS[:-1], [L - 1] * 3):
        whole = list(build(documents(lengths), strategy=strategy))
        node = build(documents(lengths), strategy=strategy, drop_last=True)
        cut = whole[:-1] if whole and len(whole[-1].tokens) < L else whole
        assert same(list(node), cut)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(node)
        node.reset(stored(node.state_dict()))
        assert list(node) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_goes_on_from_the_state_at_every_sample_exactly(strategy, overflow):
    for num_open, bos_id in itertools.product([1, 3], [None, BOS]):
        options = {"strategy": strategy, "overflow": overflow, "num_open": num_open, "bos_id": bos_id}
        for lengths in (LENGTHS, [30, 2, 1], [2] * 9, [0, 0, 6]):
            assert_resumes(lambda of=lengths, more=options: build(documents(of), **more), num_items=30)


@pytest.mark.parametrize("strategy", ["pad", "best_fit"])
@pytest.mark.parametrize("fail", range(len(LENGTHS) + 1))
def test_an_error_of_the_source_loses_no_token_and_its_state_goes_on(strategy, fail):
    whole = list(build(documents(LENGTHS), strategy=strategy))
    node, samples = build(documents(LENGTHS), [fail], strategy=strategy), []
    with pytest.raises(OSError, match=f"cannot read item {fail}"):
        for sample in node:
            samples.append(sample)
    other = build(documents(LENGTHS), strategy=strategy)
    other.reset(stored(node.state_dict()))
    assert same(samples + list(other), whole)
    assert same(samples + list(node), whole)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bos_id", [None, BOS])
def test_how_many_documents_a_sample_takes_does_not_depend_on_how_many_come_at_once(strategy, bos_id):
    """Weights that change while a run goes on depend on it."""
    docs = documents(LENGTHS * 3)
    docs = [one if one.row % 2 else one._replace(tokens=np.append(one.tokens, EOS)) for one in docs]
    options = {"seq_len": L, "eos_id": EOS, "num_open": 3, "strategy": strategy, "bos_id": bos_id}
    alone, together, resumed = (Packer(kind(docs), **options) for kind in (Items, AtOnce, AtOnce))
    samples, drawn = [], []
    for sample in alone:
        samples.append(sample)
        drawn.append(alone.state_dict()["source"])
    for number, sample in enumerate(samples):
        assert same(next(together), sample)
        assert together.state_dict()["source"] == drawn[number]
        assert same(next(resumed), sample)
        resumed.reset(stored(resumed.state_dict()))
        assert resumed.state_dict()["source"] == drawn[number]


@settings(max_examples=80, deadline=None, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["u2", "i4", "u4", "i8"])), max_size=25),
    st.sampled_from(STRATEGIES),
    st.sampled_from(OVERFLOWS),
    st.integers(1, 12),
    st.integers(1, 4),
    st.sampled_from([None, BOS]),
    st.lists(st.integers(0, 20), max_size=3),
)
def test_any_documents_with_any_loads_give_the_samples_of_the_plain_reading(
    shapes, strategy, overflow, seq_len, num_open, bos_id, cuts
):
    docs = [
        document._replace(tokens=document.tokens.astype(dtype))
        for document, (_, dtype) in zip(documents([length for length, _ in shapes]), shapes, strict=True)
    ]
    options = {
        "strategy": strategy,
        "overflow": overflow,
        "seq_len": seq_len,
        "num_open": num_open,
        "bos_id": bos_id,
    }
    _, whole = check(docs, **options)
    node, samples = build(docs, **options), []
    while True:
        if len(samples) in cuts:
            state = stored(node.state_dict())
            node = build(docs, **options)
            node.reset(state)
        try:
            samples.append(next(node))
        except StopIteration:
            break
    assert same(samples, whole)


def test_a_state_of_open_samples_is_as_narrow_as_the_ids_and_does_not_change():
    docs = documents([900, 800, 700, 600, 500, 400] * 4, dtype=np.uint16)
    node = build(docs, strategy="best_fit", seq_len=1000, num_open=4)
    states = []
    for _ in node:
        state = node.state_dict()
        states.append((state, stored(state)))
        assert stored_bytes(state) < 2 * 1000 * 6 + 20_000
    assert all(same(stored(kept), copied) for kept, copied in states)


def lognormal(num_documents, sigma=1.0):
    """A corpus of documents of 700 tokens in the mean."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(np.log(700) - sigma**2 / 2, sigma, num_documents)).astype(int)
    tokens = np.full(lengths.max(), 5, np.uint16)
    return [Document(tokens[:length], "file", row, "data") for row, length in enumerate(lengths.tolist())]


def test_best_fit_truncates_a_tenth_of_what_concat_does_and_hardly_pads():
    docs = lognormal(20_000)
    counts = {}
    for strategy in ("concat", "best_fit"):
        node = Packer(Items(docs), seq_len=4096, eos_id=EOS, strategy=strategy)
        assert len(list(node)) > 3000
        counts[strategy] = node.state_dict()["counts"]
    assert counts["best_fit"]["truncated"] < counts["concat"]["truncated"] / 10
    assert counts["best_fit"]["padding"] < 0.01 * counts["best_fit"]["tokens"]
    assert counts["concat"]["padding"] < 4096
    assert counts["best_fit"]["tokens"] == counts["concat"]["tokens"] == sum(len(one.tokens) + 1 for one in docs)


def shuffled(docs, seq_len, **options):
    return Shuffler(build(docs, seq_len=seq_len, **options), buffer_size=4, seed=1)


def change(docs, plan, **options):
    """The samples of each leg of a plan of (seq_len, samples or None for the rest), with a load between."""
    legs, state = [], None
    for seq_len, count in plan:
        node = shuffled(docs, seq_len, **options)
        node.reset(state)
        legs.append(list(itertools.islice(node, count)))
        state = stored(node.state_dict())
    return legs


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("plan", [(8, 32, 8), (32, 8, 32), (8, 9, 7), (5, 5, 40), (1, 64, 2)])
def test_another_seq_len_at_a_load_loses_and_repeats_no_token(strategy, plan):
    docs = documents(LENGTHS * 3)
    whole = Counter(pair for document in docs for pair in marked(document, BOS, None))
    for first, second in itertools.product([0, 1, 3, 7], [0, 2, 5]):
        legs = change(docs, [(plan[0], first), (plan[1], second), (plan[2], None)], strategy=strategy, bos_id=BOS)
        assert Counter(pair for leg in legs for sample in leg for pair in pairs(sample)) == whole
        for seq_len, leg in zip(plan, legs, strict=True):
            assert all(0 < len(sample.tokens) <= seq_len for sample in leg)
            assert all(sample.starts[0] == 0 for sample in leg)
        if strategy == "concat":
            assert sum(len(sample.tokens) < plan[1] for sample in legs[1]) <= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_buffered_is_cut_anew_in_its_order(strategy):
    docs = documents(LENGTHS * 3)
    for before, after, count in itertools.product([8, 16], [5, 40], [1, 4]):
        old = shuffled(docs, before, strategy=strategy)
        taken = list(itertools.islice(old, count))
        new = Shuffler(build(docs, seq_len=after, strategy=strategy), buffer_size=1, seed=1)
        state = stored(old.state_dict())
        state["buffer_size"] = 1
        new.reset(state)
        rest = [pair for sample in new for pair in pairs(sample)]
        if strategy == "best_fit":
            continue
        packed = [pair for sample in build(docs, seq_len=before, strategy=strategy) for pair in pairs(sample)]
        gone = {pair for sample in taken for pair in pairs(sample)}
        assert rest == [pair for pair in packed if pair not in gone]


def test_the_parts_of_a_document_are_one_again_in_a_longer_sample():
    docs = documents([100, 50])
    everything = [place for one in docs for _, place in marked(one, None, None)]
    for count in (1, 2, 3, 5, 9):
        first, (sample,) = change(docs, [(8, count), (200, None)])
        gone = {place for one in first for _, place in pairs(one)}
        places = [place for _, place in pairs(sample)]
        assert places == [place for place in everything if place not in gone]
        begins = [0] + [
            at
            for at, (before, after) in enumerate(itertools.pairwise(places), start=1)
            if after != (*before[:3], before[3] + 1)
        ]
        assert list(sample.starts) == begins
        assert len(begins) < 2 + count


def test_a_state_that_was_cut_anew_goes_on_exactly_and_counts_each_token_once():
    docs = documents(LENGTHS * 4)
    for strategy in STRATEGIES:
        old = shuffled(docs, 8, strategy=strategy)
        handed_out = sum(len(sample.tokens) for sample in itertools.islice(old, 5))
        state = stored(old.state_dict())

        def make(state=state, strategy=strategy):
            node = shuffled(docs, 20, strategy=strategy)
            node.reset(state)
            return node

        expected = list(make())
        for cut in range(0, len(expected), 3):
            node = make()
            head = list(itertools.islice(node, cut))
            fresh = shuffled(docs, 20, strategy=strategy)
            fresh.reset(stored(node.state_dict()))
            assert same(head + list(fresh), expected)
        counts = fresh.state_dict()["source"]["counts"]
        total = sum(len(marked(document, None, None)) for document in docs)
        assert counts["tokens"] == total == handed_out + sum(len(sample.tokens) for sample in expected)
        padding = 5 * 8 - handed_out + sum(20 - len(sample.tokens) for sample in expected)
        assert counts["padding"] == padding


def test_the_samples_of_a_buffer_stay_where_seq_len_does():
    docs = documents(LENGTHS * 3)
    node = shuffled(docs, 8)
    next(node)
    other = shuffled(docs, 8)
    other.reset(stored(node.state_dict()))
    assert same(other.state_dict(), node.state_dict())
    assert len(other.state_dict()["buffer"]) == 3
