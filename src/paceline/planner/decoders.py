"""Describes decoders of the GPT and Llama families by their shape, for models that nobody has run yet."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.planner.descriptions import BlockDescription, ModelDescription


@dataclass(frozen=True)
class DecoderShape:
    """The shape of a decoder. Zeros stand for the usual: as many key-value heads as heads, a feed-forward width of four
    times `hidden`.
    """

    layers: int
    hidden: int
    heads: int
    tokens: int  # of a row
    vocabulary: int
    key_value_heads: int = 0
    feed_forward: int = 0
    gated: bool = False  # three matrices in the feed-forward part, as in Llama (SwiGLU), instead of two
    # Whether attention is one operation that keeps no scores and leaves out masked ones (FlashAttention).
    fused: bool = True
    dropout: bool = False


def decoder(
    shape: DecoderShape,
    global_batch: int,
    element_size: float = 2.0,
    gradient_size: float = 0.0,
    precision: str = "",
    sequence_parallel: bool = False,
    name: str = "decoder",
) -> ModelDescription:
    """Returns the description of a decoder with Adam, whose state takes twice the bytes of parameters in float32.

    Activations are counted as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    2022, section 4.1: 34 bytes for each token and element of the width if all elements have two bytes, dropout is used
    and the feed-forward part is four times as wide; scores of attention that is not fused come on top.
    """
    # The product with the vocabulary is not computed in eight bits.
    head = _head(shape, element_size, "bf16" if precision == "fp8" else "")
    return ModelDescription(
        name,
        (_embedding(shape, element_size), _block(shape, element_size), head),
        global_batch,
        tokens=shape.tokens,
        width=shape.hidden,
        heads=shape.heads,
        key_value_heads=shape.key_value_heads or shape.heads,
        element_size=element_size,
        gradient_size=gradient_size,
        # With parameters of two bytes the optimizer keeps a copy in float32.
        state=6.0 if element_size == 2 else 2.0,
        precision=precision,
        sequence_parallel=sequence_parallel,
    )


def _block(shape: DecoderShape, element_size: float) -> BlockDescription:
    tokens, width = shape.tokens, shape.hidden
    key_values = width * (shape.key_value_heads or shape.heads) // shape.heads
    inner = shape.feed_forward or 4 * width
    weights = 2 * width * width + 2 * width * key_values + (3 if shape.gated else 2) * width * inner
    masks = 2.0 if shape.dropout else 0.0
    undivided = tokens * width * (4 * element_size + masks)  # inputs of two norms and of the layers behind them
    divided = element_size * (2 * width + 2 * key_values + (3 if shape.gated else 2) * inner)
    scores = 0.0
    if not shape.fused:  # of the softmax: its output, that of the dropout, and the mask
        scores = shape.heads * tokens * tokens * (2 * element_size + masks / 2 if shape.dropout else element_size)
    return BlockDescription(
        "block",
        weights + 4 * width,
        shape.layers,
        saved=undivided + tokens * divided + scores,
        undivided=undivided,
        passes=tokens * width * element_size,
        matmul=2.0 * tokens * weights,
        attention=4.0 * tokens * tokens * width * (0.5 if shape.fused else 1.0),
        operations=16 if shape.fused else 24,
        tensor_sums=2,
        exchanged=tokens * element_size * (2 * width + 2 * key_values),
    )


def _embedding(shape: DecoderShape, element_size: float) -> BlockDescription:
    passes = shape.tokens * shape.hidden * element_size
    return BlockDescription("embedding", shape.vocabulary * shape.hidden, passes=passes, operations=2, tensor_sums=1)


def _head(shape: DecoderShape, element_size: float, precision: str) -> BlockDescription:
    """The last norm, the product with the vocabulary, and the loss, which is computed in float32."""
    logits = shape.tokens * shape.vocabulary
    inputs = shape.tokens * shape.hidden * 2 * element_size
    return BlockDescription(
        "head",
        shape.vocabulary * shape.hidden + shape.hidden,
        saved=inputs + 4.0 * logits,
        undivided=inputs,
        matmul=2.0 * logits * shape.hidden,
        precision=precision,
        operations=8,
    )
