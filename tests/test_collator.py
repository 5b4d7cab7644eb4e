import itertools

import numpy as np
import pytest
import torch
from sources import Items, documents

from ibm_nodes import Batcher, CausalLMCollator, Packer, Sample


def samples(*rows, dtype=np.int32):
    return [Sample(np.array(row, dtype)) for row in rows]


def test_collates_to_two_int64_tensors_of_batch_by_seq_len():
    for dtype, shift in itertools.product(["u2", "i4", "u4", "i8"], [True, False]):
        batch = CausalLMCollator(shift_labels=shift)(samples([1, 2, 3], [4, 5, 6], dtype=dtype))
        assert list(batch) == ["input_ids", "labels"]
        assert all(value.dtype == torch.int64 and value.shape == (2, 3) for value in batch.values())
        assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_labels_are_the_ids_or_the_next_ids():
    batch = samples([1, 2, 3], [4, 5, 6])
    assert CausalLMCollator(shift_labels=False)(batch)["labels"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert CausalLMCollator(shift_labels=True)(batch)["labels"].tolist() == [[2, 3, -100], [5, 6, -100]]


def test_both_labels_train_the_same_predictions():
    batch = samples([3, 1, 4, 1], [5, 2])
    logits = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    inside = CausalLMCollator(shift_labels=False)(batch)["labels"]
    outside = CausalLMCollator(shift_labels=True)(batch)["labels"]
    loss = torch.nn.functional.cross_entropy
    assert torch.equal(
        loss(logits[:, :-1].reshape(-1, 6), inside[:, 1:].reshape(-1)), loss(logits.reshape(-1, 6), outside.reshape(-1))
    )


def test_pads_shorter_samples_and_never_trains_on_the_padding():
    batch = samples([1, 2, 3, 4], [5, 6], [7])
    for shift, labels in (
        (False, [[1, 2, 3, 4], [5, 6, -100, -100], [7, -100, -100, -100]]),
        (True, [[2, 3, 4, -100], [6, -100, -100, -100], [-100] * 4]),
    ):
        collated = CausalLMCollator(shift_labels=shift, pad_id=11)(batch)
        assert collated["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 11, 11], [7, 11, 11, 11]]
        assert collated["labels"].tolist() == labels


def test_a_token_that_is_the_pad_id_is_trained_on():
    collated = CausalLMCollator(shift_labels=False, pad_id=2)(samples([1, 2, 2], [2, 2]))
    assert collated["labels"].tolist() == [[1, 2, 2], [2, 2, -100]]


def test_ids_beyond_31_bits_are_kept():
    (row,) = CausalLMCollator(shift_labels=False)(samples([65_536, 2**31 + 5], dtype=np.int64))["input_ids"].tolist()
    assert row == [65_536, 2**31 + 5]


@pytest.mark.parametrize("shift", [True, False])
def test_batches_never_share_storage(shift):
    source = samples(*([number] * 4 for number in range(6)), dtype=np.int64)
    kept = [sample.tokens.copy() for sample in source]
    node = Batcher(Items(source), batch_size=2, collate=CausalLMCollator(shift_labels=shift))
    batches = list(node)
    storages = [tensor.untyped_storage().data_ptr() for batch in batches for tensor in batch.values()]
    assert len(set(storages)) == 6
    for batch in batches:
        for tensor in batch.values():
            tensor.fill_(-7)
    assert all(np.array_equal(sample.tokens, tokens) for sample, tokens in zip(source, kept, strict=True))


def two():
    """Two samples of three documents of two datasets, of which one is shorter."""
    places = [("web", "a", 0, 0), ("code", "b", 1, 0), ("web", "a", 2, 3)]
    return [
        Sample(np.array([11, 12, 13, 9, 21, 22]), (0, 4), tuple(places[:2])),
        Sample(np.array([31, 32, 9]), (0,), (places[2],)),
    ]


def test_the_first_token_of_a_following_document_is_no_label_where_asked():
    for mask, shift, row in [
        (False, True, [12, 13, 9, 21, 22, -100]),
        (True, True, [12, 13, 9, -100, 22, -100]),
        (False, False, [11, 12, 13, 9, 21, 22]),
        (True, False, [11, 12, 13, 9, -100, 22]),
    ]:
        batch = CausalLMCollator(shift_labels=shift, mask_boundaries=mask)(two())
        assert batch["labels"][0].tolist() == row
        assert batch["input_ids"][0].tolist() == [11, 12, 13, 9, 21, 22]


def test_everything_on_request_is_exact():
    collate = CausalLMCollator(
        shift_labels=True,
        pad_id=5,
        seq_len=7,
        multiple_of=4,
        mask_boundaries=True,
        position_ids=True,
        cu_seqlens=True,
        dataset_ids={"code": 0, "web": 3},
        num_valid=True,
    )
    batch = collate(two())
    cu_seqlens = batch.pop("cu_seqlens")
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, 4, 6, 8, 11, 16]
    assert type(batch["max_seqlen"]) is type(batch["num_valid"]) is int
    assert batch.pop("max_seqlen") == 5
    assert batch.pop("num_valid") == 4 + 2
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[11, 12, 13, 9, 21, 22, 5, 5], [31, 32, 9, 5, 5, 5, 5, 5]],
        "labels": [[12, 13, 9, -100, 22, -100, -100, -100], [32, 9, -100, -100, -100, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 3, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2, 3, 4]],
        "dataset_ids": [[3, 3, 3, 3, 0, 0, -1, -1], [3, 3, 3, -1, -1, -1, -1, -1]],
    }


@pytest.mark.parametrize("mask", [True, False])
def test_both_ways_to_shift_count_the_same_labels(mask):
    docs = list(Packer(Items(documents([5, 2, 9, 1, 30])), seq_len=12, eos_id=9, strategy="pad"))
    found = [
        CausalLMCollator(shift_labels=shift, mask_boundaries=mask, num_valid=True)(docs)["num_valid"]
        for shift in (True, False)
    ]
    assert found[0] == found[1] > 0


def test_masked_tokens_are_given_back_and_are_no_labels():
    masked = [Sample(np.array([~70_000, ~0, 5, 6, ~7], np.int32)), Sample(np.array([1, 2], np.uint16))]
    for shift, labels in (
        (False, [[-100, -100, 5, 6, -100], [1, 2, -100, -100, -100]]),
        (True, [[-100, 5, 6, -100, -100], [2, -100, -100, -100, -100]]),
    ):
        batch = CausalLMCollator(shift_labels=shift, num_valid=True)(masked)
        assert batch["input_ids"].tolist() == [[70_000, 0, 5, 6, 7], [1, 2, 0, 0, 0]]
        assert batch["labels"].tolist() == labels
        assert batch["num_valid"] == 3
    assert masked[0].tokens.tolist() == [-70_001, -1, 5, 6, -8]


def test_a_sample_without_tokens_is_padding_alone():
    empty = Sample(np.empty(0, np.uint16), (), ())
    for shift in (True, False):
        collate = CausalLMCollator(
            shift_labels=shift,
            pad_id=5,
            seq_len=3,
            mask_boundaries=True,
            position_ids=True,
            cu_seqlens=True,
            dataset_ids={},
            num_valid=True,
        )
        batch = collate([empty, empty])
        assert batch["input_ids"].tolist() == [[5, 5, 5]] * 2
        assert batch["labels"].tolist() == [[-100] * 3] * 2
        assert batch["position_ids"].tolist() == [[0, 1, 2]] * 2
        assert batch["dataset_ids"].tolist() == [[-1] * 3] * 2
        assert batch["cu_seqlens"].tolist() == [0, 3, 6]
        assert batch["num_valid"] == 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_slices_of_context_parallel_ranks_are_together_the_batch(size):
    more = {"shift_labels": True, "multiple_of": 4, "position_ids": True, "cu_seqlens": True, "num_valid": True}
    docs = list(Packer(Items(documents([5, 2, 9, 1, 30])), seq_len=30, eos_id=9, strategy="pad"))
    slices = [CausalLMCollator(context_parallel=(rank, size), **more)(docs) for rank in range(size)]
    width = slices[0]["input_ids"].shape[1] * size
    assert width % (2 * size) == width % 4 == 0
    whole = CausalLMCollator(seq_len=width, **more)(docs)
    for name in ("input_ids", "labels", "position_ids"):
        parts = [part[name].chunk(2, dim=1) for part in slices]
        rebuilt = torch.cat([first for first, _ in parts] + [second for _, second in parts[::-1]], dim=1)
        assert torch.equal(rebuilt, whole[name])
    assert sum(part["num_valid"] for part in slices) == whole["num_valid"]
    assert all(torch.equal(part["cu_seqlens"], whole["cu_seqlens"]) for part in slices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len and multiple_of must be at least 1, got 0 and 1"),
        ({"multiple_of": 0}, "seq_len and multiple_of must be at least 1, got None and 0"),
        ({"context_parallel": (2, 2)}, "rank below size, got \\(2, 2\\)"),
        ({"context_parallel": (0, 2), "shift_labels": False}, "shift_labels must be True with context_parallel"),
    ],
)
def test_refuses_what_makes_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        CausalLMCollator(**{"shift_labels": True, **options})


def test_a_sample_that_is_longer_than_the_width_and_a_dataset_without_an_id_are_errors():
    with pytest.raises(ValueError, match="at most seq_len=5 tokens, got one of 6"):
        CausalLMCollator(shift_labels=True, seq_len=5)(two())
    with pytest.raises(LookupError, match="none for 'code'"):
        CausalLMCollator(shift_labels=True, dataset_ids={"web": 0})(two())
