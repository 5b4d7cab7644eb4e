"""Masks for attention that keeps the documents of a sample apart."""

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


def document_ids(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Numbers the documents of a batch.

    Args:
        cu_seqlens: what ``CausalLMCollator(cu_seqlens=True)`` gives.
        shape: [batch, width] of the batch.

    Returns:
        For each position the number of its document, int64 of that shape, on the device of ``cu_seqlens``; the padding
        of a sample has a number of its own. Two positions may see each other if their numbers are equal.

    Raises:
        ValueError: if the shape is not that of the whole batch.
    """
    num_tokens = shape[0] * shape[1]
    if int(cu_seqlens[-1]) != num_tokens:
        raise ValueError(
            f"cu_seqlens must end at the {num_tokens} tokens of the batch, got {int(cu_seqlens[-1])}: it is of another "
            "batch, or this is the slice of a context-parallel rank"
        )
    positions = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(positions, cu_seqlens[1:], right=True).view(shape)


def flex_block_mask(batch: dict[str, Any], *, block_size: int = 128) -> BlockMask:
    """Makes the mask of causal attention within documents, for ``flex_attention(..., block_mask=...)``.

    Args:
        batch: with ``input_ids`` and ``cu_seqlens``, on the device where attention runs.
        block_size: tokens in a block of the mask.

    Raises:
        KeyError: if the batch has no ``cu_seqlens``.
        ValueError: if the batch is the slice of a context-parallel rank.
    """
    rows, width = batch["input_ids"].shape
    ids = document_ids(batch["cu_seqlens"], (rows, width))

    def may_see(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (ids[row, query] == ids[row, key])

    return create_block_mask(
        may_see, B=rows, H=None, Q_LEN=width, KV_LEN=width, device=str(ids.device), BLOCK_SIZE=block_size
    )
