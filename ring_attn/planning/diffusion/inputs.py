"""Inputs of transformers of diffusers on the meta device, by their classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

# A config of diffusers, whose attributes depend on the class, and arguments of a forward.
Config: TypeAlias = Any
Arguments: TypeAlias = dict[str, Any]

# Tokens that an image encoder gives a transformer of image to video.
IMAGE_TOKENS = 257


class Shape(NamedTuple):
    """The numbers of rows of a sample: frames x height x width of video, and text."""

    frames: int
    height: int
    width: int
    text: int

    @property
    def video(self) -> int:
        return self.frames * self.height * self.width


class Maker(NamedTuple):
    """Make tensors on the meta device.

    Attributes:
        shape: the rows of the sample.
        dtype: the dtype of the model.
    """

    shape: Shape
    dtype: torch.dtype

    def tensor(self, *sizes: int) -> Tensor:
        return torch.empty(1, *sizes, dtype=self.dtype, device="meta")

    def latents(self, channels: int, patch: tuple[int, int, int]) -> Tensor:
        """Return the latents of a video, (batch, channels, frames, height, width)."""
        shape = self.shape
        sizes = shape.frames * patch[0], shape.height * patch[1], shape.width * patch[2]
        return self.tensor(channels, *sizes)

    def rows(self, channels: int) -> Tensor:
        return self.tensor(self.shape.video, channels)

    def text(self, channels: int) -> Tensor:
        return self.tensor(self.shape.text, channels)

    def numbers(self, *sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=torch.float32, device="meta")

    def text_mask(self) -> Tensor:
        return torch.empty(1, self.shape.text, dtype=torch.bool, device="meta")


def _wan(config: Config, make: Maker) -> Arguments:
    inputs = {
        "hidden_states": make.latents(config.in_channels, config.patch_size),
        "encoder_hidden_states": make.text(config.text_dim),
        "timestep": make.numbers(1),
    }
    if config.image_dim is not None:
        inputs["encoder_hidden_states_image"] = make.tensor(IMAGE_TOKENS, config.image_dim)
    return inputs


def _hunyuan_video(config: Config, make: Maker) -> Arguments:
    patch = config.patch_size_t, config.patch_size, config.patch_size
    inputs = {
        "hidden_states": make.latents(config.in_channels, patch),
        "encoder_hidden_states": make.text(config.text_embed_dim),
        "encoder_attention_mask": make.text_mask(),
        "pooled_projections": make.tensor(config.pooled_projection_dim),
        "timestep": make.numbers(1),
    }
    return inputs | _guidance(config, make)


def _guidance(config: Config, make: Maker) -> Arguments:
    return {"guidance": make.numbers(1)} if config.guidance_embeds else {}


def _chroma(config: Config, make: Maker, *, num_axes: int = 3) -> Arguments:
    return {
        "hidden_states": make.rows(config.in_channels),
        "encoder_hidden_states": make.text(config.joint_attention_dim),
        "timestep": make.numbers(1),
        "img_ids": make.numbers(make.shape.video, num_axes),
        "txt_ids": make.numbers(make.shape.text, num_axes),
    }


def _flux(config: Config, make: Maker) -> Arguments:
    pooled = {"pooled_projections": make.tensor(config.pooled_projection_dim)}
    return _chroma(config, make) | pooled | _guidance(config, make)


def _flux2(config: Config, make: Maker) -> Arguments:
    return _chroma(config, make, num_axes=4) | _guidance(config, make)


def _ltx(config: Config, make: Maker) -> Arguments:
    return {
        "hidden_states": make.rows(config.in_channels),
        "encoder_hidden_states": make.text(config.caption_channels),
        "encoder_attention_mask": make.text_mask(),
        "timestep": make.numbers(1),
        "num_frames": make.shape.frames,
        "height": make.shape.height,
        "width": make.shape.width,
    }


def _cogvideox(config: Config, make: Maker) -> Arguments:
    patch = config.patch_size_t or 1, config.patch_size, config.patch_size
    inputs: Arguments = {
        # (batch, frames, channels, height, width)
        "hidden_states": make.latents(config.in_channels, patch).transpose(1, 2),
        "encoder_hidden_states": make.text(config.text_embed_dim),
        "timestep": make.numbers(1),
    }
    if config.use_rotary_positional_embeddings:
        table = make.numbers(make.shape.video, config.attention_head_dim)
        inputs["image_rotary_emb"] = (table, table)
    return inputs


def _mochi(config: Config, make: Maker) -> Arguments:
    patch = 1, config.patch_size, config.patch_size
    return {
        "hidden_states": make.latents(config.in_channels, patch),
        "encoder_hidden_states": make.text(config.text_embed_dim),
        "encoder_attention_mask": make.text_mask(),
        "timestep": make.numbers(1),
    }


def _qwen_image(config: Config, make: Maker) -> Arguments:
    return {
        "hidden_states": make.rows(config.in_channels),
        "encoder_hidden_states": make.text(config.joint_attention_dim),
        "encoder_hidden_states_mask": make.text_mask(),
        "timestep": make.numbers(1),
        "img_shapes": [(make.shape.frames, make.shape.height, make.shape.width)],
    } | _guidance(config, make)


def _sd3(config: Config, make: Maker) -> Arguments:
    shape, patch = make.shape, config.patch_size
    height = shape.frames * shape.height * patch
    return {
        "hidden_states": make.tensor(config.in_channels, height, shape.width * patch),
        "encoder_hidden_states": make.text(config.joint_attention_dim),
        "pooled_projections": make.tensor(config.pooled_projection_dim),
        "timestep": make.numbers(1),
    }


# Classes that are traced. All others are planned by formula.
INPUTS: dict[str, Callable[[Config, Maker], Arguments]] = {
    "ChromaTransformer2DModel": _chroma,
    "CogVideoXTransformer3DModel": _cogvideox,
    "Flux2Transformer2DModel": _flux2,
    "FluxTransformer2DModel": _flux,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "LTXVideoTransformer3DModel": _ltx,
    "MochiTransformer3DModel": _mochi,
    "QwenImageTransformer2DModel": _qwen_image,
    "SD3Transformer2DModel": _sd3,
    "SkyReelsV2Transformer3DModel": _wan,
    "WanTransformer3DModel": _wan,
}
