"""Llama, of plain torch modules; and what other models share with it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

_INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """A decoder: ``hidden`` features, ``layers`` blocks, and a gated feed-forward of ``inner`` features."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    rope_theta: float = 10_000.0


class Llama(nn.Module):
    """A decoder with rotary positions: ``input_ids`` [batch, seq_len] to logits [batch, seq_len, vocab_size].

    ``position_ids`` [batch, seq_len] that begin anew at 0 keep the documents of a sample apart.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.output = nn.Linear(shape.hidden, shape.vocab_size, bias=False)
        self.apply(initialize)

    @property
    def block_class(self) -> type[nn.Module]:
        """What an FSDP unit is made of."""
        return LlamaBlock

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Gives the logits of the next token at every position."""
        mask = None
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        else:
            document = (position_ids == 0).cumsum(1)
            mask = (document[:, None, :, None] == document[:, None, None, :]).tril()
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden, position_ids, mask)
        logits: torch.Tensor = self.output(self.norm(hidden))
        return logits

    def flops_per_token(self, seq_len: int) -> float:
        """Gives the operations of forward and backward, without recomputation; attention counted as if not causal."""
        return matmul_flops(self) + 12 * self.shape.layers * self.shape.hidden * seq_len


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.theta = shape.heads, shape.kv_heads, shape.rope_theta
        self.head_size = shape.hidden // shape.heads
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key = nn.Linear(shape.hidden, self.kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(shape.hidden, self.kv_heads * self.head_size, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.feed_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Gives the features after the block."""
        normed = self.attention_norm(hidden)
        query, key, value = (
            split_heads(part(normed), heads)
            for part, heads in ((self.query, self.heads), (self.key, self.kv_heads), (self.value, self.kv_heads))
        )
        # The angles are made here, in 32 bits: a sharding that casts what a block is given would round them.
        angles = position_ids[..., None] * self.theta ** (
            -torch.arange(0, self.head_size, 2, device=hidden.device) / self.head_size
        )
        query, key = _rotate(query, angles), _rotate(key, angles)
        groups = self.heads // self.kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.feed_norm(hidden)
        fed: torch.Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return hidden + fed


def _rotate(features: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turns the two halves of each head by the angles [batch, length, half of a head]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = features.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(features.dtype)


def matmul_flops(model: nn.Module) -> float:
    """Gives six operations for each weight that a token is multiplied with."""
    weights: Iterator[torch.Tensor] = (module.weight for module in model.modules() if isinstance(module, nn.Linear))
    return 6.0 * sum(weight.numel() for weight in weights)


def initialize(module: nn.Module) -> None:
    """Draws the weights of a layer from a normal distribution."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_INIT_STD)


def split_heads(features: torch.Tensor, heads: int) -> torch.Tensor:
    """Splits [batch, length, features] into [batch, heads, length, features of a head]."""
    return features.view(*features.shape[:2], heads, -1).transpose(1, 2)
