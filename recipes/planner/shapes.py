"""Shapes of models as plain numbers: how many parameters and operations, and in which units."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Block:
    """One kind of transformer block, and how many of it there are.

    Args:
        count: number of such blocks, each a unit of FSDP.
        hidden: width of the residual stream.
        width: width of all queries together.
        kv_width: width of all keys together, and of all values.
        ffn: inner width of the feed-forward part.
        heads: number of attention heads.
        gated: the feed-forward part has three matrices, not two.
        rotary: queries and keys are rotated, which keeps a copy of both.
        cross: a second attention, over the encoder's output.
    """

    count: int
    hidden: int
    width: int
    kv_width: int
    ffn: int
    heads: int
    gated: bool = True
    rotary: bool = True
    cross: bool = False

    @property
    def attentions(self) -> int:
        """How many attentions are in the block."""
        return 2 if self.cross else 1

    @property
    def matrices(self) -> int:
        """Parameters of the matrices of one block."""
        attention = self.hidden * 2 * (self.width + self.kv_width)
        return self.attentions * attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def params(self) -> int:
        """Parameters of one block: the matrices, and a norm for each of its parts."""
        return self.matrices + (self.attentions + 1) * self.hidden

    @property
    def recomputed(self) -> float:
        """Share of a block's operations that are done twice if every second product of matrices is not kept."""
        attention = self.hidden * (self.width + self.kv_width)
        return (self.attentions * attention + self.hidden * self.ffn) / self.matrices


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of a language model.

    Args:
        name: what it is called.
        blocks: its kinds of block, in the order in which they run.
        vocab: rows of the embedding and of the head.
        tied: the head is the embedding.
        fused_attention: scores are never in memory. False for T5, whose bias of positions kept it from the fused
            kernels when its figures were published.
    """

    name: str
    blocks: tuple[Block, ...]
    vocab: int
    tied: bool = False
    fused_attention: bool = True

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.blocks[0].hidden

    @property
    def root_params(self) -> int:
        """Parameters of FSDP's root unit: embedding, head and the norms after the last block of each kind."""
        return (1 if self.tied else 2) * self.vocab * self.hidden + len(self.blocks) * self.hidden

    @property
    def params(self) -> int:
        """All parameters."""
        return self.root_params + sum(block.count * block.params for block in self.blocks)

    @property
    def units(self) -> tuple[Block, ...]:
        """The blocks one by one, in the order in which they run."""
        return tuple(block for block in self.blocks for _ in range(block.count))


def decoder(
    name: str,
    *,
    hidden: int,
    layers: int,
    vocab: int,
    ffn: int,
    kv_width: int | None = None,
    head_width: int = 128,
) -> Shape:
    """Gives the shape of a decoder like Llama's: gated feed-forward part, rotary positions, fused attention."""
    block = Block(
        count=layers,
        hidden=hidden,
        width=hidden,
        kv_width=kv_width or hidden,
        ffn=ffn,
        heads=max(1, hidden // head_width),
    )
    return Shape(name=name, blocks=(block,), vocab=vocab)


def _t5(name: str, *, hidden: int, ffn: int, heads: int) -> Shape:
    """Gives a T5 of version 1.1: as many blocks in the encoder as in the decoder, gated, head and embedding apart."""
    encoder = Block(count=24, hidden=hidden, width=hidden, kv_width=hidden, ffn=ffn, heads=heads, rotary=False)
    return Shape(name=name, blocks=(encoder, replace(encoder, cross=True)), vocab=32128, fused_attention=False)


SHAPES = {
    shape.name: shape
    for shape in (
        _t5("t5-3b", hidden=2048, ffn=5120, heads=32),
        _t5("t5-11b", hidden=4096, ffn=10240, heads=64),
        decoder("llama-1b", hidden=2048, layers=22, vocab=32000, ffn=5632, kv_width=256, head_width=64),
        decoder("llama-7b", hidden=4096, layers=32, vocab=32000, ffn=11008),
        decoder("llama-8b", hidden=4096, layers=32, vocab=128256, ffn=14336, kv_width=1024),
        decoder("llama-13b", hidden=5120, layers=40, vocab=32000, ffn=13824),
        decoder("llama-34b", hidden=8192, layers=48, vocab=32000, ffn=22016, kv_width=1024),
        decoder("llama-70b", hidden=8192, layers=80, vocab=32000, ffn=28672, kv_width=1024),
    )
}
"""Published shapes: T5 1.1 (XL and XXL), TinyLlama (1b), Llama 2, Code Llama (34b) and Llama 3 (8b)."""


def find_shape(
    model: str | None, *, params: int | None, layers: int | None, hidden: int | None, vocab: int | None
) -> Shape:
    """Gives the shape of a name, or of a decoder of the given numbers.

    Args:
        model: a name in ``SHAPES``; None to give numbers.
        params: all parameters; None takes 12 x hidden^2 a block, beside embedding and head.
        layers: number of blocks.
        hidden: width of the residual stream.
        vocab: rows of embedding and head.

    Raises:
        LookupError: if there is no model of that name.
        ValueError: if both or neither are given, or the parameters cannot be of such a model.
    """
    numbers = {"layers": layers, "hidden": hidden, "vocab": vocab}
    if model is not None:
        if given := [name for name, value in {**numbers, "params": params}.items() if value is not None]:
            raise ValueError(f"model must be given alone, got {given[0]} too: a name has all numbers of its own")
        if model not in SHAPES:
            raise LookupError(
                f"no model {model!r}: there are {', '.join(SHAPES)}; for another give layers, hidden and vocab"
            )
        return SHAPES[model]
    missing = [name for name, value in numbers.items() if value is None]
    if layers is None or hidden is None or vocab is None:
        raise ValueError(
            f"model must be one of {', '.join(SHAPES)}, or layers, hidden and vocab be given: {missing[0]} is not"
        )
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return _custom(params, layers, hidden, vocab)


def _custom(params: int | None, layers: int, hidden: int, vocab: int) -> Shape:
    outside = 2 * vocab * hidden + hidden + layers * 2 * hidden
    if params is None:
        params = outside + layers * 12 * hidden**2
    ffn = round((params - outside - layers * 4 * hidden**2) / (layers * 3 * hidden))
    if ffn < 1:
        raise ValueError(
            f"params must be above {outside + layers * 4 * hidden**2:,}, which embedding, head and attention take with "
            f"layers={layers}, hidden={hidden} and vocab={vocab}, got {params:,}"
        )
    return decoder("custom", hidden=hidden, layers=layers, vocab=vocab, ffn=ffn)
