"""Attention within documents gives what the documents give when they are run one by one."""

import numpy as np
import pytest
import torch
from sources import Items, documents
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from ibm_nodes import CausalLMCollator, Packer, document_ids, flex_block_mask

EOS, HEADS, SIZE = 9, 2, 8


class Attention(torch.nn.Module):
    """Embeds tokens and positions, and attends twice with a feed-forward layer between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = torch.nn.Embedding(20, HEADS * SIZE), torch.nn.Embedding(100, HEADS * SIZE)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE) for _ in range(2))

    def forward(self, ids, positions, attend):
        hidden = self.tokens(ids % 20) + self.positions(positions)
        for layer in self.layers:
            heads = layer(hidden).unflatten(-1, (3 * HEADS, SIZE)).transpose(1, 2)
            hidden = hidden + attend(*heads.chunk(3, dim=1)).transpose(1, 2).flatten(-2).relu()
        return hidden


def one_by_one(model, samples):
    """What each document of some samples gives by itself."""
    for sample in samples:
        for start, end in zip(sample.starts, [*sample.starts[1:], len(sample.tokens)], strict=True):
            ids = torch.from_numpy(sample.tokens[start:end].astype(np.int64))[None]
            positions = torch.arange(end - start)[None]
            yield model(ids, positions, lambda *heads: scaled_dot_product_attention(*heads, is_causal=True))[0]


@pytest.mark.parametrize("strategy", ["concat", "pad", "best_fit"])
@pytest.mark.parametrize("flex", [True, False])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_documents_in_a_sample_are_as_documents_alone(strategy, flex):
    docs = documents([3, 30, 1, 12, 47, 5, 9, 20, 2, 2, 31, 64])
    samples = list(Packer(Items(docs), seq_len=48, eos_id=EOS, strategy=strategy))
    batch = CausalLMCollator(shift_labels=False, seq_len=48, position_ids=True, cu_seqlens=True)(samples)
    if flex:
        mask = flex_block_mask(batch, block_size=16)
        attend = lambda *heads: flex_attention(*heads, block_mask=mask)  # noqa: E731
    else:
        ids = document_ids(batch["cu_seqlens"], batch["input_ids"].shape)
        may_see = (ids[:, :, None] == ids[:, None, :]).tril()[:, None]
        attend = lambda *heads: scaled_dot_product_attention(*heads, attn_mask=may_see)  # noqa: E731
    model = Attention()
    found = model(batch["input_ids"], batch["position_ids"], attend)
    real = torch.cat([row[: len(sample.tokens)] for row, sample in zip(found, samples, strict=True)])
    assert torch.allclose(real, torch.cat(list(one_by_one(model, samples))), atol=1e-5)
    causal = model(
        batch["input_ids"],
        batch["position_ids"],
        lambda *heads: scaled_dot_product_attention(*heads, is_causal=True),
    )
    assert not torch.allclose(causal, found, atol=1e-2)


def test_documents_are_numbered_and_padding_is_one_of_its_own():
    cu_seqlens = torch.tensor([0, 2, 4, 5, 8], dtype=torch.int32)
    assert document_ids(cu_seqlens, (2, 4)).tolist() == [[0, 0, 1, 1], [2, 3, 3, 3]]


def test_a_mask_of_a_slice_is_refused():
    samples = list(Packer(Items(documents([3, 9])), seq_len=16, eos_id=EOS))
    batch = CausalLMCollator(shift_labels=True, cu_seqlens=True, context_parallel=(0, 2))(samples)
    with pytest.raises(ValueError, match="must end at the 8 tokens of the batch, got 16"):
        flex_block_mask(batch)
