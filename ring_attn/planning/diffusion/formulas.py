"""Weights, activations and FLOPs of a transformer by the sizes in its config alone.

They are used where the real module cannot be traced, and are estimates. With the width d and the
width f of the feedforward part, a block has these weights:

    text and video in one sequence      2 x (4 d d + 2 d f + 6 d d), a half for each of the two
    the same, with shared weights       4 d d + 2 d f + 12 x 512 d
    single-stream block                 4 d d + 2 d f + 3 d d
    cross-attention to the text         8 d d + 2 d f

The terms are the projections of attention, the feedforward part and the modulation by the timestep.
A row is multiplied with those that are not of the modulation.
"""

from __future__ import annotations

from dataclasses import dataclass

from ring_attn.planning.diffusion.config import TransformerConfig
from ring_attn.planning.diffusion.sizes import Block, Call, Outside, Rowwise, SizedTransformer
from ring_attn.planning.model.sizes import LayerWeights, Weights

SOURCE = "estimate: by formula"

# Classes whose blocks multiply text and video with the same weights, but modulate them differently
# by an embedding of the timestep of this width.
SHARED = {
    "CogVideoXTransformer3DModel",
    "CogView3PlusTransformer2DModel",
    "CogView4Transformer2DModel",
    "ConsisIDTransformer3DModel",
}
TIME_WIDTH = 512

# Bytes of a row, as multiples of the bytes of d and of f elements: what a block keeps, without and
# with cross-attention; what its forward and its backward hold beyond that; and what its forward
# holds in inference. They are near those of Wan, LTX, HunyuanVideo, Flux and Qwen-Image.
KEPT_HIDDEN, KEPT_HIDDEN_CROSS, KEPT_WIDTH = 20.0, 33.0, 2.0
MORE_FORWARD, MORE_BACKWARD = 3.0, 4.0
INFERENCE_HIDDEN, INFERENCE_WIDTH = 5.0, 2.0
# Bytes that operators other than products move, as multiples of the kept bytes.
MOVED_FORWARD, MOVED_BACKWARD = 4.3, 7.2

# Numbers that enter and leave the transformer for each row, where the config does not say.
CHANNELS = 64


@dataclass(frozen=True)
class _Kind:
    """A kind of block: its weights, and those that multiply a row of video or of text."""

    weights: int
    of_video: int
    of_text: int


def estimate(
    config: TransformerConfig, itemsize: int = 2, *, training: bool = True, note: str = ""
) -> SizedTransformer:
    """Return the estimates for a transformer.

    Args:
        config: the transformer.
        itemsize: bytes of an element of its activations.
        training: whether a backward follows the forward.
        note: why the module was not traced.
    """
    kinds = [_block(config)] * config.num_blocks
    kinds += [_single_block(config)] * config.num_single_blocks
    distinct = list(dict.fromkeys(kinds))
    outside = _outside_weights(config)
    return SizedTransformer(
        name=config.name,
        class_name=config.class_name,
        weights=Weights(0, 0, outside, tuple(LayerWeights(kind.weights) for kind in kinds)),
        kinds=tuple(distinct.index(kind) for kind in kinds),
        blocks=tuple(_sized(kind, config, itemsize, training=training) for kind in distinct),
        outside=_outside(config, itemsize, training=training),
        source=SOURCE,
        note=note,
    )


def _width(config: TransformerConfig) -> int:
    """Return the width of the feedforward part."""
    ffn_dim = config.values.get("ffn_dim")
    if isinstance(ffn_dim, int) and ffn_dim > 0:
        return ffn_dim
    ratio = config.values.get("mlp_ratio")
    if isinstance(ratio, int | float) and ratio > 0:
        return round(ratio * config.hidden)
    return 4 * config.hidden


def _block(config: TransformerConfig) -> _Kind:
    d, f = config.hidden, _width(config)
    rowwise = 4 * d * d + 2 * d * f
    if not config.has_joint_text:
        # q and the output of cross-attention are of video rows, k and v of text rows.
        return _Kind(rowwise + 4 * d * d, rowwise + 2 * d * d, 2 * d * d)
    if config.class_name in SHARED:
        return _Kind(rowwise + 12 * TIME_WIDTH * d, rowwise, rowwise)
    return _Kind(2 * (rowwise + 6 * d * d), rowwise, rowwise)


def _single_block(config: TransformerConfig) -> _Kind:
    d, f = config.hidden, _width(config)
    rowwise = 4 * d * d + 2 * d * f
    return _Kind(rowwise + 3 * d * d, rowwise, rowwise)


def _sized(kind: _Kind, config: TransformerConfig, itemsize: int, *, training: bool) -> Block:
    hidden, width = config.hidden * itemsize, _width(config) * itemsize
    joint = config.has_joint_text
    kept = (KEPT_HIDDEN if joint else KEPT_HIDDEN_CROSS) * hidden + KEPT_WIDTH * width
    forward = kept + MORE_FORWARD * hidden
    if not training:
        forward = INFERENCE_HIDDEN * hidden + INFERENCE_WIDTH * width
    heads = config.nheads, config.headdim, config.headdim
    calls: tuple[Call, ...] = (Call(*heads, has_text=joint),)
    if not joint:
        calls += (Call(*heads, has_text=True, is_split=False),)

    def rows(nbytes: float) -> Rowwise:
        # The text of cross-attention has only k and v.
        return Rowwise(nbytes, nbytes if joint else min(nbytes, 6.0 * hidden))

    flops = Rowwise(2.0 * kind.of_video, 2.0 * kind.of_text)
    return Block(
        inputs=Rowwise(hidden, hidden if joint else 0.0),
        kept=rows(kept) if training else Rowwise(),
        forward=rows(forward),
        backward=rows(kept + MORE_BACKWARD * hidden) if training else Rowwise(),
        moved_forward=rows(MOVED_FORWARD * kept),
        moved_backward=rows(MOVED_BACKWARD * kept) if training else Rowwise(),
        flops_forward=flops,
        flops_backward=Rowwise(2 * flops.video, 2 * flops.text) if training else Rowwise(),
        calls=calls,
    )


def _channels(config: TransformerConfig) -> int:
    """Return the numbers of a row of the latents."""
    channels = config.values.get("in_channels")
    return channels if isinstance(channels, int) and channels > 0 else CHANNELS


def _text_width(config: TransformerConfig) -> int:
    for key in ("text_dim", "text_embed_dim", "joint_attention_dim", "caption_channels"):
        found = config.values.get(key)
        if isinstance(found, int) and found > 0:
            return found
    return config.hidden


def _outside_weights(config: TransformerConfig) -> int:
    """Return the weights of the embeddings of text, timestep and latents, and of the output."""
    d = config.hidden
    text = _text_width(config) * d + d * d
    timestep = 256 * d + 2 * d * d
    return text + timestep + 2 * CHANNELS * d


def _outside(config: TransformerConfig, itemsize: int, *, training: bool) -> Outside:
    """Return what is held outside of blocks: the embedded rows, the rotary tables, the output."""
    hidden, table = config.hidden * itemsize, 2 * 4 * config.headdim
    ends_whole = config.plan.output is None
    directions = 3 if training else 1
    flops = 2.0 * directions * CHANNELS * config.hidden
    text_flops = 2.0 * directions * (_text_width(config) + config.hidden) * config.hidden
    norm = (6 if training else 1) * hidden
    return Outside(
        kept=Rowwise(table + _channels(config) * itemsize, hidden),
        before=Rowwise(2.0 * hidden + table, 2.0 * hidden),
        after=Rowwise(norm + 2.0 * hidden),
        moved_before=Rowwise(2.0 * directions * hidden, 2.0 * directions * hidden),
        moved_after=Rowwise(4.0 * directions * hidden),
        flops_before=Rowwise(flops, text_flops),
        flops_after=Rowwise(flops),
        ends_whole=ends_whole,
    )
