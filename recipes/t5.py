"""T5 in its version 1.1, of plain torch modules."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from ibm_nodes.recipes.llama import initialize, matmul_flops, split_heads

_NUM_BUCKETS, _MAX_DISTANCE = 32, 128
"""Of the relative positions."""


@dataclass(frozen=True, kw_only=True)
class T5Shape:
    """An encoder and a decoder of ``layers`` blocks each, as in T5 1.1: gated feed-forward, nothing tied."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    inner: int
    head_size: int = 64


class T5(nn.Module):
    """An encoder of a sample's first half, and a decoder of its second half, with T5's relative positions.

    ``input_ids`` [batch, seq_len] give logits [batch, seq_len - seq_len // 2, vocab_size]: of the last positions.
    """

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden)
        self.encoder_positions = nn.Embedding(_NUM_BUCKETS, shape.heads)
        self.decoder_positions = nn.Embedding(_NUM_BUCKETS, shape.heads)
        self.encoder = nn.ModuleList(T5Block(shape, crossed=False) for _ in range(shape.layers))
        self.decoder = nn.ModuleList(T5Block(shape, crossed=True) for _ in range(shape.layers))
        self.encoder_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.decoder_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.output = nn.Linear(shape.hidden, shape.vocab_size, bias=False)
        self.apply(initialize)

    @property
    def block_class(self) -> type[nn.Module]:
        """What an FSDP unit is made of."""
        return T5Block

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Gives the logits of the next token at the positions of the second half."""
        half = input_ids.shape[1] // 2
        source = self.embedding(input_ids[:, :half])
        bias = _relative_bias(self.encoder_positions, half, causal=False)
        for block in self.encoder:
            source = block(source, bias)
        source = self.encoder_norm(source)
        hidden = self.embedding(input_ids[:, half:])
        bias = _relative_bias(self.decoder_positions, hidden.shape[1], causal=True)
        for block in self.decoder:
            hidden = block(hidden, bias, source)
        logits: torch.Tensor = self.output(self.decoder_norm(hidden))
        return logits

    def flops_per_token(self, seq_len: int) -> float:
        """Gives the operations of forward and backward, without recomputation, of a token of either half."""
        # A token passes through the encoder or the decoder, not both, and attends to half of a sample, a decoder's
        # twice; the output layer sees the second half alone.
        attention = 12 * self.shape.layers * self.shape.heads * self.shape.head_size * (seq_len / 2) * 1.5
        return matmul_flops(self) / 2 + attention


class T5Block(nn.Module):
    """Attention, attention to the encoder where there is one, and feed-forward."""

    def __init__(self, shape: T5Shape, *, crossed: bool) -> None:
        super().__init__()
        self.attention = T5Attention(shape)
        self.cross = T5Attention(shape) if crossed else None
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, hidden: torch.Tensor, bias: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
        """Gives the features after the block."""
        hidden = self.attention(hidden, None, bias)
        if self.cross is not None:
            hidden = self.cross(hidden, source, None)
        normed = self.norm(hidden)
        fed: torch.Tensor = self.down(functional.gelu(self.gate(normed), approximate="tanh") * self.up(normed))
        return hidden + fed


class T5Attention(nn.Module):
    """Attention after a norm and beside a residual; T5's is not scaled."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        width = shape.heads * shape.head_size
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.query = nn.Linear(shape.hidden, width, bias=False)
        self.key = nn.Linear(shape.hidden, width, bias=False)
        self.value = nn.Linear(shape.hidden, width, bias=False)
        self.out = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, hidden: torch.Tensor, source: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Gives the features after attending to the source, or to themselves."""
        normed = self.norm(hidden)
        source = normed if source is None else source
        query, key, value = (
            split_heads(part(of), self.heads)
            for part, of in ((self.query, normed), (self.key, source), (self.value, source))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
        attended: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + attended


def _relative_bias(positions: nn.Embedding, length: int, *, causal: bool) -> torch.Tensor:
    """Gives what is added to the scores, [1, heads, length, length], as T5 does (Raffel et al., 2020, section 2.1)."""
    place = torch.arange(length, device=positions.weight.device)
    distance = place[None, :] - place[:, None]
    buckets = _NUM_BUCKETS if causal else _NUM_BUCKETS // 2
    offset = torch.zeros_like(distance) if causal else (distance > 0) * buckets
    distance = (-distance).clamp(min=0) if causal else distance.abs()
    exact = buckets // 2
    far = torch.log(distance.clamp(min=1) / exact) / math.log(_MAX_DISTANCE / exact)
    far = (exact + (far * (buckets - exact)).long()).clamp(max=buckets - 1)
    bias: torch.Tensor = positions(offset + torch.where(distance < exact, distance, far)).permute(2, 0, 1)[None]
    if causal:
        bias = bias.masked_fill(place[None, :] > place[:, None], torch.finfo(bias.dtype).min)
    return bias
