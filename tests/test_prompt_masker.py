import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import Items, stored

from ibm_nodes import CausalLMCollator, Document, Packer, PromptMasker, Shuffler
from ibm_nodes.testing import assert_resumes

EOS, BOS, PAD = 9, 8, 7
PROMPT, RESPONSE, END = 1, 2, 3


def conversation(*tokens, dtype=np.uint16, row=0):
    return Document(np.array(tokens, dtype), "file", row, "data")


def build(*docs, response_ids=(PROMPT, RESPONSE), prompt_ids=(PROMPT,), fails=()):
    return PromptMasker(Items(list(docs), fails), response_ids=response_ids, prompt_ids=prompt_ids)


def learned(document):
    return [token if token >= 0 else None for token in document.tokens.tolist()]


def test_what_stands_between_a_response_and_the_next_prompt_is_learned():
    (found,) = build(conversation(PROMPT, 11, 12, END, PROMPT, RESPONSE, 21, 22, END, PROMPT, 13, PROMPT, RESPONSE, 23))
    assert learned(found) == [*[None] * 6, 21, 22, END, *[None] * 4, 23]
    assert [token if token >= 0 else ~token for token in found.tokens.tolist()][:4] == [PROMPT, 11, 12, END]
    assert found[1:] == ("file", 0, "data", 0)


def test_without_ids_of_prompts_a_response_goes_on_to_the_end():
    (found,) = build(conversation(11, RESPONSE, 21, PROMPT, 22), response_ids=[RESPONSE], prompt_ids=None)
    assert learned(found) == [None, None, 21, PROMPT, 22]


@pytest.mark.parametrize("dtype", ["u1", "u2", "i4", "u4", "i8"])
def test_ids_of_every_type_keep_their_values(dtype):
    top = min(np.iinfo(dtype).max, 2**32 - 1)
    (found,) = build(conversation(top, 0, RESPONSE, top, dtype=dtype), response_ids=[RESPONSE])
    assert [token if token >= 0 else ~token for token in found.tokens.tolist()] == [top, 0, RESPONSE, top]
    assert (found.tokens < 0).tolist() == [True, True, True, False]


def test_documents_without_a_response_are_masked_and_counted():
    node = build(conversation(PROMPT, 5), conversation(), conversation(RESPONSE), conversation(PROMPT, RESPONSE, 6))
    assert [learned(found) for found in node] == [[None, None], [], [None], [None, None, 6]]
    assert node.state_dict()["unanswered"] == 2


@settings(max_examples=200, deadline=None, database=None)
@given(
    st.lists(st.integers(1, 4), max_size=30),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.none() | st.lists(st.integers(1, 3), min_size=1, max_size=2),
)
def test_any_markers_are_found_as_a_plain_reading_finds_them(tokens, response_ids, prompt_ids):
    expected, at = [None] * len(tokens), 0
    for at in range(len(tokens)):
        if tokens[at : at + len(response_ids)] == response_ids:
            begin = at + len(response_ids)
            end = begin
            while end < len(tokens) and (prompt_ids is None or tokens[end : end + len(prompt_ids)] != prompt_ids):
                end += 1
            expected[begin:end] = tokens[begin:end]
    (found,) = build(conversation(*tokens), response_ids=response_ids, prompt_ids=prompt_ids)
    assert learned(found) == expected


def many():
    return [
        conversation(PROMPT, *range(10, 10 + row % 5), PROMPT, RESPONSE, *range(20, 20 + row % 7), row=row)
        for row in range(20)
    ]


@pytest.mark.parametrize("strategy", ["concat", "pad", "best_fit"])
def test_masks_go_through_packing_shuffling_and_states(strategy):
    def make():
        node = Packer(build(*many()), seq_len=16, eos_id=EOS, bos_id=BOS, strategy=strategy)
        return Shuffler(node, buffer_size=3, seed=0)

    assert_resumes(make)
    tokens = sorted(token for sample in make() for token in sample.tokens.tolist())
    expected = [BOS] * 20
    for document in build(*many()):
        own = document.tokens.tolist()
        expected += [*own, EOS if own[-1] >= 0 else ~EOS]
    assert tokens == sorted(expected)


def test_it_resumes_and_an_error_loses_nothing():
    assert_resumes(lambda: build(*many()))
    node, found = build(*many(), fails=[0, 7]), []
    for _ in range(22):
        try:
            found.append(learned(next(node)))
        except OSError:
            continue
    assert found == [learned(document) for document in build(*many())]


@pytest.mark.parametrize(("first", "last", "padding"), [*itertools.product([[], [BOS]], [[], [EOS]], [[], [PAD, PAD]])])
def test_marks_in_masked_tokens_are_not_set_twice(first, last, padding):
    docs = [
        conversation(*first, PROMPT, 11, *last, *padding),
        conversation(*first, PROMPT, RESPONSE, 21, *last, *padding),
    ]
    (sample,) = Packer(build(*docs), seq_len=99, eos_id=EOS, bos_id=BOS, pad_id=PAD)
    collate = CausalLMCollator(shift_labels=False, mask_boundaries=True)
    batch = collate([sample])
    assert batch["input_ids"].tolist() == [[BOS, PROMPT, 11, EOS, BOS, PROMPT, RESPONSE, 21, EOS]]
    assert batch["labels"][0, 1:].tolist() == [*[-100] * 6, 21, EOS]


@pytest.mark.parametrize("changes", [{"response_ids": []}, {"prompt_ids": []}, {"response_ids": [-1]}], ids=str)
def test_refuses_markers_that_are_none(changes):
    with pytest.raises(ValueError, match="must be ids of 0 or more, at least one"):
        build(**changes)


@pytest.mark.parametrize("changes", [{"response_ids": (4,)}, {"prompt_ids": None}], ids=str)
def test_refuses_the_state_of_other_markers_and_other_keys(changes):
    state = stored(build().state_dict())
    with pytest.raises(ValueError, match="PromptMasker was saved with"):
        build(**changes).reset(state)
    with pytest.raises(ValueError, match="not a state of PromptMasker"):
        build().reset({**state, "more": 1})
