import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import Items, documents, same, stored, stored_bytes

from ibm_nodes import Document, Packer, Sample

SEQ_LEN = 8
EOS, BOS = 9, 8
LENGTHS = [SEQ_LEN - 1, SEQ_LEN, 0, SEQ_LEN + 1, 10 * SEQ_LEN, 1, 0, 0, 2, SEQ_LEN - 2, 3, 3, 17]
BIG = [65_535, 65_536, 2**31 - 1, 2**31 + 5]


def expected(docs, eos_id=EOS, bos_id=None):
    """Every token of the stream with its place: an oracle in plain Python."""
    stream = []
    for document in docs:
        tokens = document.tokens.tolist()
        if not tokens:
            continue
        run = [(token, offset) for offset, token in enumerate(tokens)]
        if bos_id is not None and tokens[0] != bos_id:
            run.insert(0, (bos_id, -1))
        if len(run) == 1 and bos_id == eos_id or run[-1][0] != eos_id:
            run.append((eos_id, len(tokens)))
        stream += [(token, (document.name, document.url, document.row, offset)) for token, offset in run]
    return stream


def placed(samples):
    """Every token of some samples with the place that starts and documents give it."""
    stream = []
    for sample in samples:
        ends = [*sample.starts[1:], len(sample.tokens)]
        assert sample.starts[0] == 0
        assert list(sample.starts) == sorted(set(sample.starts))
        assert len(sample.starts) == len(sample.documents)
        for start, end, place in zip(sample.starts, ends, sample.documents, strict=True):
            for offset, token in enumerate(sample.tokens[start:end].tolist()):
                stream.append((token, (*place[:3], place[3] + offset)))
    return stream


def check(docs, seq_len=SEQ_LEN, **ids):
    samples = list(Packer(Items(docs), seq_len=seq_len, **{"eos_id": EOS, **ids}))
    assert placed(samples) == expected(docs, **ids)
    assert all(len(sample.tokens) == seq_len for sample in samples[:-1])
    assert all(1 <= len(sample.tokens) <= seq_len for sample in samples[-1:])
    return samples


def build(docs, fails=(), seq_len=SEQ_LEN, **ids):
    return Packer(Items(docs, fails), seq_len=seq_len, **{"eos_id": EOS, **ids})


def with_ids(*rows, dtype=np.int32):
    return [Document(np.array(row, dtype), "file", number, "data") for number, row in enumerate(rows)]


def wide():
    """Documents of every dtype, with ids that just fit."""
    docs = []
    for number, dtype in enumerate(["u2", "i4", "u4", "i8", "u2", "u1", "i8", "u2", "u4", "i4", "u2"] * 2):
        fitting = [token for token in BIG if token <= np.iinfo(dtype).max] or [200]
        tokens = (fitting * 20)[: 3 + 5 * (number % 4)]
        docs.append(Document(np.array(tokens, dtype), f"file-{number}", number, "data"))
    return docs


def test_joins_documents_and_cuts_every_seq_len_tokens():
    samples = check(documents([3, 4, 6]))
    assert [sample.tokens.tolist() for sample in samples] == [
        [1000, 1001, 1002, EOS, 2000, 2001, 2002, 2003],
        [EOS, 3000, 3001, 3002, 3003, 3004, 3005, EOS],
    ]
    assert [sample.starts for sample in samples] == [(0, 4), (0, 1)]
    assert samples[1].documents == (("data", "file-1", 1, 4), ("data", "file-2", 2, 0))


@pytest.mark.parametrize("bos_id", [None, BOS, EOS])
@pytest.mark.parametrize("seq_len", [1, 2, 3, SEQ_LEN, 1000])
def test_every_token_stands_where_its_place_says(seq_len, bos_id):
    check(documents(LENGTHS), seq_len, bos_id=bos_id)


@pytest.mark.parametrize("lengths", [*itertools.product(range(5), repeat=3)], ids=str)
def test_packs_all_small_documents(lengths):
    for seq_len, bos_id in itertools.product([1, 2, 3, 4], [None, BOS]):
        check(documents(lengths), seq_len, bos_id=bos_id)


@pytest.mark.parametrize("bos_id", [None, BOS, EOS], ids=["no-bos", "bos", "bos-is-eos"])
def test_closes_and_opens_a_document_once_whatever_the_data_has(bos_id):
    bodies = [[], [1], [1, 2, 3]]
    rows = [
        [*before, *body, *after] for before in ([], [BOS], [EOS]) for body in bodies for after in ([], [EOS], [BOS])
    ]
    check(with_ids(*rows), bos_id=bos_id)


def test_a_token_that_is_bos_and_eos_is_set_at_both_ends():
    for row in ([5], [EOS, 5], [5, EOS], [EOS, 5, EOS]):
        (sample,) = check(with_ids(row), bos_id=EOS)
        assert sample.tokens.tolist() == [EOS, 5, EOS]
    (sample,) = check(with_ids([EOS]), bos_id=EOS)
    assert sample.tokens.tolist() == [EOS, EOS]


def test_eos_inside_a_document_is_a_token_like_others():
    (sample,) = check(with_ids([1, EOS, 2], [3]))
    assert sample.tokens.tolist() == [1, EOS, 2, EOS, 3, EOS]
    assert sample.starts == (0, 4)


@pytest.mark.parametrize("length", [SEQ_LEN - 2, SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 1, 10 * SEQ_LEN - 1, 10 * SEQ_LEN])
@pytest.mark.parametrize("closed", [False, True])
def test_a_document_as_long_as_samples_fills_them_exactly(length, closed):
    docs = documents([length] * 3)
    if closed:
        docs = [document._replace(tokens=np.append(document.tokens, EOS)) for document in docs]
    samples = check(docs)
    assert sum(len(sample.tokens) for sample in samples) == 3 * (length + 1)


def test_empty_documents_leave_no_trace():
    docs = documents([0, 3, 0, 0, 6, 0])
    assert list(map(str, check(docs))) == list(map(str, check([document for document in docs if len(document.tokens)])))
    assert check(documents([])) == []
    assert check(documents([0, 0, 0])) == []


def test_the_last_sample_may_be_shorter_and_the_end_stays():
    node = build(documents([SEQ_LEN]))
    assert [len(sample.tokens) for sample in node] == [SEQ_LEN, 1]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(node)
    node.reset(stored(node.state_dict()))
    with pytest.raises(StopIteration):
        next(node)


@pytest.mark.parametrize("seq_len", [2, 7, 64])
def test_ids_beyond_16_and_31_bits_are_kept_however_arrays_are_mixed(seq_len):
    check(wide(), seq_len)
    check(wide(), seq_len, eos_id=2**31 - 1, bos_id=65_536)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [("u2", "u2"), ("i4", "i4"), ("i8", "i8"), ("u2 i4", "i4"), ("i4 u2 i8", "i8"), ("u2 u4 i4", "i8")],
)
def test_a_sample_has_the_widest_type_of_its_documents(dtypes, expected):
    docs = [with_ids([1, 2], dtype=dtype)[0] for dtype in dtypes.split()]
    (sample,) = check(docs, 100)
    assert sample.tokens.dtype == expected
    assert all(sample.tokens.dtype.kind in "iu" for sample in check(wide(), 5, bos_id=70_000))


@pytest.mark.parametrize("docs", [documents(LENGTHS), wide()], ids=["documents", "wide"])
@pytest.mark.parametrize("bos_id", [None, BOS])
@pytest.mark.parametrize("seq_len", [1, 3, SEQ_LEN, 50])
def test_goes_on_from_the_state_at_every_sample_exactly(docs, bos_id, seq_len):
    node = build(docs, seq_len=seq_len, bos_id=bos_id)
    states, samples = [stored(node.state_dict())], []
    for sample in node:
        samples.append(sample)
        states.append(stored(node.state_dict()))
    other = build(docs, seq_len=seq_len, bos_id=bos_id)
    for taken in range(0, len(states), 1 if len(states) < 60 else 7):
        other.reset(states[taken])
        assert same(stored(other.state_dict()), states[taken])
        assert same(list(other), samples[taken:])


@pytest.mark.parametrize("fail", range(len(LENGTHS)))
def test_an_error_of_the_source_loses_no_token_and_its_state_goes_on(fail):
    whole = list(build(documents(LENGTHS), bos_id=BOS))
    node = build(documents(LENGTHS), fails=[fail], bos_id=BOS)
    samples = []
    with pytest.raises(OSError, match=f"cannot read item {fail}"):
        for sample in node:
            samples.append(sample)
    state = stored(node.state_dict())
    other = build(documents(LENGTHS), bos_id=BOS)
    other.reset(state)
    assert same(samples + list(other), whole)
    assert same(samples + list(node), whole)


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["u2", "i4", "u4", "i8"])), max_size=12),
    st.integers(1, 9),
    st.sampled_from([None, BOS, EOS]),
    st.lists(st.integers(0, 12), max_size=3),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_any_documents_with_any_errors_and_loads_give_the_same_samples(shapes, seq_len, bos_id, fails, cuts):
    docs = [
        document._replace(tokens=document.tokens.astype(dtype))
        for document, (_, dtype) in zip(documents([length for length, _ in shapes]), shapes, strict=True)
    ]
    whole = check(docs, seq_len, bos_id=bos_id)
    node, samples = build(docs, fails, seq_len, bos_id=bos_id), []
    while True:
        if len(samples) in cuts:
            state = stored(node.state_dict())
            node = build(docs, node.source.fails, seq_len, bos_id=bos_id)
            node.reset(state)
        try:
            samples.append(next(node))
        except OSError:
            continue
        except StopIteration:
            break
    assert same(samples, whole)


def test_a_state_does_not_change_when_the_node_goes_on():
    node = build(documents(LENGTHS))
    states = []
    while True:
        states.append((node.state_dict(), stored(node.state_dict())))
        try:
            next(node)
        except StopIteration:
            break
    assert all(same(stored(kept), copied) for kept, copied in states)


@pytest.mark.parametrize(("dtype", "top"), [("u2", 256), ("u2", 65_535), ("i4", 65_536), ("i8", 2**31 + 5)])
def test_a_state_holds_the_waiting_tokens_as_narrow_as_they_came(dtype, top):
    node = build(with_ids(np.full(100_000, top), dtype=dtype))
    next(node)
    assert stored_bytes(node.state_dict()) < 100_000 * np.dtype(dtype).itemsize + 3000


def test_a_state_holds_only_what_waits():
    node = build(documents([100_000, 3]), seq_len=50_000)
    next(node)
    next(node)
    assert stored_bytes(node.state_dict()) < 3000


def test_starts_again_after_a_reset():
    node = build(documents(LENGTHS))
    whole = list(node)
    for taken in (0, 1, 5, len(whole)):
        node.reset()
        assert same(list(itertools.islice(node, taken)), whole[:taken])
    node.reset()
    assert same(list(node), whole)


def test_a_sample_does_not_change_when_the_node_goes_on():
    node = build(documents(LENGTHS))
    kept = [(sample, Sample(sample.tokens.copy(), *sample[1:])) for sample in node]
    assert all(same(*pair) for pair in kept)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
        ({"eos_id": -1}, "eos_id must be from 0 to"),
        ({"eos_id": 1 << 31}, "eos_id must be from 0 to"),
        ({"bos_id": -5}, "bos_id must be from 0 to .*, got -5"),
        ({"pad_id": -1}, "pad_id must be from 0 to .*, got -1"),
        ({"num_open": 0}, "num_open must be at least 1, got 0"),
        ({"strategy": "best"}, "strategy must be one of concat, pad, best_fit, got 'best'"),
        ({"overflow": "cut"}, "overflow must be one of split, truncate, drop, got 'cut'"),
    ],
)
def test_refuses_numbers_that_make_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        build([], **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_id": 1},
        {"bos_id": 1},
        {"pad_id": 1},
        {"strategy": "pad"},
        {"overflow": "drop"},
        {"num_open": 3},
    ],
    ids=str,
)
def test_refuses_the_state_of_another_setting_naming_both_values(changes):
    state = build([]).state_dict()
    ((name, value),) = changes.items()
    with pytest.raises(
        ValueError, match=f"Packer was saved with {name}={state[name]!r} and is now built with {name}={value!r}"
    ):
        build([], **changes).reset(state)


def test_refuses_a_state_with_other_keys():
    state = build([]).state_dict()
    for wrong in ({key: state[key] for key in state if key != "tail"}, {**state, "more": 1}, {}):
        with pytest.raises(ValueError, match="not a state of Packer"):
            build([]).reset(wrong)


def test_arrays_that_are_not_contiguous_are_packed_too():
    for step in (2, -1):
        docs = [
            Document(np.arange(100 * row, 100 * row + 20, dtype=np.uint16)[::step], "f", row) for row in range(1, 6)
        ]
        check(docs)
