"""Tiny transformers of diffusers: their configs, and functions that make their inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BATCH, TEXT = 2, 5
# Prompts of the two batch entries have 5 and 3 tokens.
PADDED = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])

Inputs = Callable[[Callable[..., Tensor]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Tiny:
    """Arguments of a tiny model of a class, and a function that makes its inputs.

    The function gets `randn`, which draws tensors.
    """

    config: dict[str, Any]
    inputs: Inputs


def _grid(frames: int, height: int, width: int, axes: int) -> Tensor:
    """Return the ids of all positions of a video, (positions, axes)."""
    ids = torch.cartesian_prod(*(torch.arange(n) for n in (frames, height, width)))
    return torch.nn.functional.pad(ids, (0, axes - 3)).double()


def _timestep() -> Tensor:
    return torch.tensor([300.0, 700.0])


def _flux(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 15, 4),
        "encoder_hidden_states": randn(BATCH, TEXT, 32),
        "pooled_projections": randn(BATCH, 32),
        "timestep": _timestep() / 1000,
        "img_ids": _grid(1, 3, 5, 3),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def _chroma(randn: Callable[..., Tensor]) -> dict[str, Any]:
    inputs = _flux(randn)
    del inputs["pooled_projections"]
    return inputs


def _flux2(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 15, 4),
        "encoder_hidden_states": randn(BATCH, TEXT, 32),
        "timestep": _timestep() / 1000,
        "img_ids": _grid(1, 3, 5, 4),
        "txt_ids": torch.zeros(TEXT, 4),
        "guidance": torch.tensor([3.0, 3.0]),
    }


def _sd3(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 3, 5),
        "encoder_hidden_states": randn(BATCH, TEXT, 32),
        "pooled_projections": randn(BATCH, 64),
        "timestep": _timestep(),
    }


def _wan(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 3, 6, 6),
        "encoder_hidden_states": randn(BATCH, 14, 16),  # as many as rank 0's rows of 27
        "timestep": _timestep(),
    }


def _hunyuan_video(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 3, 3, 3),
        "timestep": _timestep(),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "encoder_attention_mask": PADDED,
        "pooled_projections": randn(BATCH, 8),
        "guidance": torch.tensor([3.0, 3.0]),
    }


def _ltx(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 27, 8),
        "encoder_hidden_states": randn(BATCH, TEXT, 32),
        "timestep": _timestep(),
        "encoder_attention_mask": PADDED,
        "num_frames": 3,
        "height": 3,
        "width": 3,
    }


def _cogvideox(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 3, 4, 6, 6),
        "encoder_hidden_states": randn(BATCH, TEXT, 8),
        "timestep": _timestep(),
        "image_rotary_emb": (randn(27, 16).sin(), randn(27, 16).cos()),
    }


def _qwen(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 15, 16),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "encoder_hidden_states_mask": PADDED,
        "timestep": _timestep() / 1000,
        "img_shapes": [(1, 3, 5)] * BATCH,
    }


def _mochi(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 12, 3, 6, 6),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "timestep": _timestep(),
        "encoder_attention_mask": PADDED.bool(),
    }


def _cosmos(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 1, 6, 10),
        "timestep": _timestep(),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
    }


def _pixart(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 6, 6),
        "timestep": _timestep(),
        "encoder_hidden_states": randn(BATCH, TEXT, 8),
        "encoder_attention_mask": PADDED,
        "added_cond_kwargs": {"aspect_ratio": None, "resolution": None},
    }


def _z_image(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "x": [randn(16, 1, 6, 6), randn(16, 1, 6, 6)],
        "t": _timestep() / 1000,
        "cap_feats": [randn(TEXT, 16), randn(TEXT - 2, 16)],
    }


def _allegro(randn: Callable[..., Tensor]) -> dict[str, Any]:
    tables = tuple((randn(3, 4).cos(), randn(3, 4).sin()) for _ in range(3))
    positions = tuple(_grid(3, 3, 3, 3).long().T[:, None].unbind())
    return {
        "hidden_states": randn(BATCH, 4, 3, 6, 6),
        "encoder_hidden_states": randn(BATCH, TEXT, 8),
        "timestep": _timestep(),
        "attention_mask": torch.ones(BATCH, 3, 6, 6),
        "encoder_attention_mask": PADDED,
        "image_rotary_emb": (tables, positions),
    }


def _aura_flow(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 6, 10),
        "encoder_hidden_states": randn(BATCH, TEXT, 32),
        "timestep": _timestep() / 1000,
    }


def _bria_fibo(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return _chroma(randn) | {"text_encoder_layers": [randn(BATCH, TEXT, 8) for _ in range(2)]}


def _bria_fibo2(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 6, 10),
        "timestep": _timestep() / 1000,
        "encoder_hidden_states": randn(BATCH, 2, TEXT, 8),
        "encoder_attention_mask": PADDED.bool(),
        "context_latents": [randn(BATCH, 4, 4, 4)],
    }


def _cogview3(randn: Callable[..., Tensor]) -> dict[str, Any]:
    sizes = torch.tensor([[6.0, 10.0]] * BATCH)
    return {
        "hidden_states": randn(BATCH, 4, 6, 10),
        "encoder_hidden_states": randn(BATCH, TEXT, 8),
        "timestep": _timestep(),
        "original_size": sizes,
        "target_size": sizes,
        "crop_coords": torch.zeros_like(sizes),
    }


def _consisid(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 3, 4, 6, 6),
        "encoder_hidden_states": randn(BATCH, TEXT, 8),
        "timestep": _timestep(),
        "image_rotary_emb": (randn(27, 8).sin(), randn(27, 8).cos()),
        "id_cond": randn(BATCH, 8),
        "id_vit_hidden": [randn(BATCH, 2, 8)],
    }


def _dit(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 6, 6),
        "timestep": torch.tensor([300, 700]),
        "class_labels": torch.tensor([1, 5]),
    }


def _easy_animate(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 3, 6, 6),
        "timestep": _timestep(),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
    }


def _ernie(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 3, 5),
        "timestep": _timestep(),
        "text_bth": randn(BATCH, TEXT, 16),
        "text_lens": torch.tensor([5, 3]),
    }


def _flux3(randn: Callable[..., Tensor]) -> dict[str, Any]:
    inputs = _flux2(randn)
    del inputs["guidance"]
    return inputs


def _framepack(randn: Callable[..., Tensor]) -> dict[str, Any]:
    frames = torch.arange(8.0)
    return _hunyuan_video(randn) | {
        "hidden_states": randn(BATCH, 4, 3, 4, 4),
        "image_embeds": randn(BATCH, 2, 16),
        "indices_latents": frames[:3],
        "latents_clean": randn(BATCH, 4, 2, 4, 4),
        "indices_latents_clean": frames[:2],
        "latents_history_2x": randn(BATCH, 4, 2, 4, 4),
        "indices_latents_history_2x": frames[:2],
        "latents_history_4x": randn(BATCH, 4, 4, 4, 4),
        "indices_latents_history_4x": frames[:4],
    }


def _glm(randn: Callable[..., Tensor]) -> dict[str, Any]:
    inputs = _cogview3(randn)
    del inputs["original_size"]
    return inputs | {
        "prior_token_id": torch.arange(15).expand(BATCH, -1),
        "prior_token_drop": torch.tensor([[False] * 15, [True] * 15]),
    }


def _hidream(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 6, 10),  # 15 of 16 rows
        "timesteps": _timestep(),
        "encoder_hidden_states_t5": randn(BATCH, TEXT, 8),
        "encoder_hidden_states_llama3": [randn(BATCH, 3, 12) for _ in range(2)],
        "pooled_embeds": randn(BATCH, 8),
    }


def _hunyuan_dit(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 6, 6),
        "timestep": _timestep(),
        "encoder_hidden_states": randn(BATCH, 4, 8),
        "text_embedding_mask": PADDED[:, :4],
        "encoder_hidden_states_t5": randn(BATCH, 4, 8),
        "text_embedding_mask_t5": PADDED[:, 1:],
        "image_meta_size": randn(BATCH, 6),
        "style": torch.zeros(BATCH, dtype=torch.long),
        "image_rotary_emb": (randn(9, 8).sin(), randn(9, 8).cos()),
    }


def _hunyuan_image(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 3, 5),
        "timestep": _timestep(),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "encoder_attention_mask": PADDED,
    }


def _hunyuan_video15(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 3, 3, 3),
        "timestep": _timestep(),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "encoder_attention_mask": PADDED,
        "encoder_hidden_states_2": randn(BATCH, 3, 8),
        "encoder_attention_mask_2": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        "image_embeds": randn(BATCH, 2, 12),
    }


def _ideogram(randn: Callable[..., Tensor]) -> dict[str, Any]:
    is_image = torch.arange(20) >= TEXT
    segments = torch.ones(BATCH, 20, dtype=torch.long)
    segments[1, 3:TEXT] = 0  # padding of the shorter prompt
    return {
        "hidden_states": randn(BATCH, 20, 4),
        "timestep": _timestep() / 1000,
        "encoder_hidden_states": randn(BATCH, 20, 8),
        "position_ids": torch.arange(20)[None, :, None].expand(BATCH, -1, 3),
        "segment_ids": segments,
        "indicator": torch.where(is_image, 2, 3).expand(BATCH, -1),
    }


def _joy_image(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 3, 6, 6),
        "timestep": _timestep(),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
    }


def _joy_image_plus(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 13, 4, 1, 2, 2),
        "timestep": _timestep(),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "encoder_hidden_states_mask": PADDED,
        "shape_list": [[(1, 2, 3), (1, 1, 7)], [(1, 2, 3), (1, 2, 2)]],
    }


def _kandinsky5(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 3, 6, 6, 4),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "timestep": _timestep(),
        "pooled_projections": randn(BATCH, 8),
        "visual_rope_pos": [torch.arange(3)] * 3,
        "text_rope_pos": torch.arange(TEXT),
    }


def _krea2(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 15, 4),
        "encoder_hidden_states": randn(BATCH, TEXT, 2, 16),
        "timestep": _timestep() / 1000,
        "position_ids": torch.arange(TEXT + 15)[:, None].expand(-1, 3),
        "encoder_attention_mask": PADDED.bool(),
    }


def _ltx2(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 27, 8),
        "audio_hidden_states": randn(BATCH, 14, 4),  # as many as rank 0's rows of the video
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "audio_encoder_hidden_states": randn(BATCH, TEXT, 16),
        "timestep": _timestep()[:, None] + torch.arange(27.0),  # a time for each position
        "audio_timestep": _timestep(),
        "encoder_attention_mask": PADDED,
        "audio_encoder_attention_mask": PADDED,
        "num_frames": 3,
        "height": 3,
        "width": 3,
        "audio_num_frames": 14,
    }


def _lumina2(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 6, 10),
        "timestep": _timestep() / 1000,
        "encoder_hidden_states": randn(BATCH, TEXT, 8),
        "encoder_attention_mask": PADDED.bool(),
    }


def _minimax(randn: Callable[..., Tensor]) -> dict[str, Any]:
    rows = torch.arange(TEXT + 9 + 4)
    text, video, audio = rows.split([TEXT, 9, 4])
    return {
        "hidden_states": randn(1, 9, 16),
        "audio_hidden_states": randn(1, 4, 4),
        "encoder_hidden_states": randn(1, TEXT, 8),
        "timestep": _timestep(),
        "timestep_indices": (rows >= TEXT).long(),
        "token_tags": (rows >= TEXT).long() + (rows >= TEXT + 9).long(),
        "position_ids": rows[:, None].expand(-1, 3),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


def _motif(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 3, 6, 6),
        "timestep": _timestep(),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "encoder_attention_mask": PADDED,
    }


def _omnigen(randn: Callable[..., Tensor]) -> dict[str, Any]:
    seqlen = 6 + 1 + 9  # condition, time, image
    seen = torch.ones(seqlen, seqlen).tril()
    seen[-9:, -9:] = 1
    return {
        "hidden_states": randn(BATCH, 4, 6, 6),
        "timestep": _timestep() / 1000,
        "input_ids": torch.arange(6).expand(BATCH, -1) + 1,
        "input_img_latents": [randn(1, 4, 4, 4)],
        "input_image_sizes": {0: [[1, 5]]},
        "attention_mask": seen.expand(BATCH, -1, -1),
        "position_ids": torch.arange(seqlen).expand(BATCH, -1),
    }


def _prx(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 6, 10),
        "timestep": _timestep() / 1000,
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "attention_mask": PADDED,
    }


def _skyreels(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 4, 4, 4),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "timestep": torch.tensor([[300, 300, 700, 700]] * BATCH),  # a time for each frame
        "enable_diffusion_forcing": True,
    }


def _stable_audio(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 3, 8),
        "timestep": _timestep() / 1000,
        "encoder_hidden_states": randn(BATCH, TEXT, 4),
        "global_hidden_states": randn(BATCH, 1, 8),
        "rotary_embedding": (randn(9, 2).cos(), randn(9, 2).sin()),
    }


def _vace(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return _wan(randn) | {"control_hidden_states": randn(BATCH, 8, 3, 6, 6)}


def _ace_step(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 18, 4),
        "timestep": _timestep() / 1000,
        "timestep_r": _timestep() / 2000,
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "context_latents": randn(BATCH, 18, 8),
    }


def _any_flow(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return _wan(randn) | {
        "hidden_states": randn(BATCH, 3, 4, 6, 6),
        "timestep": torch.tensor([[300.0, 300.0, 700.0]] * BATCH),
        "r_timestep": torch.tensor([[200.0, 200.0, 600.0]] * BATCH),
    }


def _kandinsky6(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 3, 6, 6, 4),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "pooled_projections": randn(BATCH, 8),
        "timestep": _timestep(),
        "audio_hidden_states": randn(BATCH, 14, 4),  # as many as rank 0's rows of the video
    }


def _longcat_audio(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 15, 4),
        "encoder_hidden_states": randn(BATCH, TEXT, 8),
        "encoder_attention_mask": PADDED.bool(),
        "timestep": _timestep() / 1000,
        "latent_cond": randn(BATCH, 15, 4),
    }


def _minimax_music(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 14),
        "timestep": _timestep() / 1000,
        "encoder_hidden_states": randn(BATCH, 14, 8),
    }


def _refiner(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 15, 8),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "timestep": _timestep(),
        "video_rotary_emb": (randn(1, 15, 32).cos(), randn(1, 15, 32).sin()),
        "encoder_attention_mask": PADDED,
    }


def _stable_audio3(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 13),
        "timestep": _timestep() / 1000,
        "encoder_hidden_states": randn(BATCH, TEXT, 8),
        "global_hidden_states": randn(BATCH, 8),
        "encoder_attention_mask": PADDED,
    }


def _transformer_2d(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 32, 3, 5),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "encoder_attention_mask": PADDED,
    }


_FLUX = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
}

_WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 64,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}

_HUNYUAN_VIDEO = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "patch_size": 1,
    "patch_size_t": 1,
    "guidance_embeds": True,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}

_COGVIEW = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "text_embed_dim": 8,
    "time_embed_dim": 8,
    "condition_dim": 4,
}

_JOY_IMAGE = {
    "patch_size": [1, 2, 2],
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 16,
    "num_layers": 2,
    "rope_dim_list": [4, 6, 6],
}

_TRANSFORMER_2D = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 32,
    "num_layers": 2,
    "cross_attention_dim": 16,
}

_HELIOS = {name: value for name, value in _WAN.items() if name != "rope_max_seq_len"}

_FLUX_3 = {name: value for name, value in _FLUX.items() if name != "patch_size"} | {
    "axes_dims_rope": (4, 4, 4, 4)
}

TINY: dict[str, Tiny] = {
    "FluxTransformer2DModel": Tiny(
        _FLUX | {"pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]}, _flux
    ),
    "Flux2Transformer2DModel": Tiny(
        _FLUX | {"axes_dims_rope": [4, 4, 4, 4], "timestep_guidance_channels": 32}, _flux2
    ),
    "ChromaTransformer2DModel": Tiny(
        _FLUX
        | {
            "axes_dims_rope": [4, 4, 8],
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        _chroma,
    ),
    "SD3Transformer2DModel": Tiny(
        {
            "sample_size": 32,
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 64,
            "out_channels": 4,
            "dual_attention_layers": (0,),
        },
        _sd3,
    ),
    "WanTransformer3DModel": Tiny(_WAN, _wan),
    "HunyuanVideoTransformer3DModel": Tiny(_HUNYUAN_VIDEO, _hunyuan_video),
    "LTXVideoTransformer3DModel": Tiny(
        {
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "cross_attention_dim": 32,
            "num_layers": 2,
            "caption_channels": 32,
        },
        _ltx,
    ),
    "CogVideoXTransformer3DModel": Tiny(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 2,
            "text_embed_dim": 8,
            "num_layers": 2,
            "use_rotary_positional_embeddings": True,
        },
        _cogvideox,
    ),
    "QwenImageTransformer2DModel": Tiny(
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4),
        },
        _qwen,
    ),
    "MochiTransformer3DModel": Tiny(
        {
            "patch_size": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 12,
            "text_embed_dim": 16,
            "time_embed_dim": 4,
            "max_sequence_length": 16,
        },
        _mochi,
    ),
    "CosmosTransformer3DModel": Tiny(
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "mlp_ratio": 2,
            "text_embed_dim": 16,
            "adaln_lora_dim": 4,
            "max_size": (4, 32, 32),
            "concat_padding_mask": False,  # resized by torchvision
            "patch_size": (1, 2, 2),
        },
        _cosmos,
    ),
    "ZImageTransformer2DModel": Tiny(
        {
            "in_channels": 16,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 16,
            "axes_dims": [8, 4, 4],
            "axes_lens": [128, 32, 32],
        },
        _z_image,
    ),
    "PixArtTransformer2DModel": Tiny(
        {
            "num_layers": 2,
            "patch_size": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "in_channels": 4,
            "cross_attention_dim": 16,
            "caption_channels": 8,
            "out_channels": 8,
            "sample_size": 8,
            "use_additional_conditions": False,
        },
        _pixart,
    ),
    "AllegroTransformer3DModel": Tiny(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": 24,
            "sample_width": 6,
            "sample_height": 6,
            "sample_frames": 3,
            "caption_channels": 8,
        },
        _allegro,
    ),
    "AuraFlowTransformer2DModel": Tiny(
        {
            "sample_size": 32,
            "patch_size": 2,
            "in_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
            "out_channels": 4,
            "pos_embed_max_size": 256,
        },
        _aura_flow,
    ),
    "BriaFiboTransformer2DModel": Tiny(
        _FLUX | {"axes_dims_rope": [4, 4, 8], "text_encoder_dim": 8}, _bria_fibo
    ),
    "BriaFibo2Transformer2DModel": Tiny(
        {
            "in_channels": 4,
            "patch_size": 2,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "cap_feat_dim": 8,
            "injection_layer_ids": (1,),
            "perceiver_num_layers": 1,
            "min_num_gist_tokens": 4,
            "max_num_gist_tokens": 8,
            "gist_step": 2,
            "gist_min_text_len": 3,
            "gist_max_text_len": 5,
            "axes_dims": (8, 4, 4),
            "axes_lens": (64, 32, 32),
        },
        _bria_fibo2,
    ),
    "BriaTransformer2DModel": Tiny(_FLUX | {"axes_dims_rope": [4, 4, 8]}, _chroma),
    "CogView3PlusTransformer2DModel": Tiny(_COGVIEW | {"pos_embed_max_size": 8}, _cogview3),
    "CogView4Transformer2DModel": Tiny(_COGVIEW | {"rope_axes_dim": (16, 16)}, _cogview3),
    "ConsisIDTransformer3DModel": Tiny(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 2,
            "text_embed_dim": 8,
            "num_layers": 2,
            "use_rotary_positional_embeddings": True,
            "is_train_face": True,
            "cross_attn_interval": 1,
            "cross_attn_dim_head": 4,
            "cross_attn_num_heads": 2,
            "LFE_id_dim": 8,
            "LFE_vit_dim": 8,
            "LFE_depth": 1,
            "LFE_dim_head": 8,
            "LFE_num_heads": 2,
            "LFE_num_id_token": 1,
            "LFE_num_querie": 2,
            "LFE_output_dim": 10,
            "LFE_ff_mult": 1,
            "LFE_num_scale": 1,
        },
        _consisid,
    ),
    "DiTTransformer2DModel": Tiny(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 6,
            "num_embeds_ada_norm": 8,
        },
        _dit,
    ),
    "EasyAnimateTransformer3DModel": Tiny(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 4,
            "text_embed_dim": 16,
            "num_layers": 2,
            "mmdit_layers": 1,
            "patch_size": 2,
        },
        _easy_animate,
    ),
    "ErnieImageTransformer2DModel": Tiny(
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_layers": 2,
            "ffn_hidden_size": 32,
            "in_channels": 4,
            "out_channels": 4,
            "text_in_dim": 16,
            "rope_axes_dim": (4, 6, 6),
        },
        _ernie,
    ),
    "Flux3Transformer2DModel": Tiny(
        _FLUX_3 | {"cond_in_channels": 4, "timestep_channels": 16}, _flux3
    ),
    "GlmImageTransformer2DModel": Tiny(_COGVIEW | {"prior_vq_quantizer_codebook_size": 16}, _glm),
    "HiDreamImageTransformer2DModel": Tiny(
        {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "caption_channels": [8, 12],
            "text_emb_dim": 8,
            "num_routed_experts": 2,
            "num_activated_experts": 2,
            "axes_dims_rope": (4, 2, 2),
            "max_resolution": (8, 8),
            "llama_layers": (0, 1),
        },
        _hidream,
    ),
    "HunyuanDiT2DModel": Tiny(
        {
            "sample_size": 6,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 4,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "hidden_size": 16,
            "mlp_ratio": 2,
            "cross_attention_dim": 8,
            "cross_attention_dim_t5": 8,
            "pooled_projection_dim": 4,
            "text_len": 4,
            "text_len_t5": 4,
        },
        _hunyuan_dit,
    ),
    "HunyuanImageTransformer2DModel": Tiny(
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "rope_axes_dim": (4, 4),
        },
        _hunyuan_image,
    ),
    "HunyuanVideo15Transformer3DModel": Tiny(
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "text_embed_2_dim": 8,
            "image_embed_dim": 12,
            "rope_axes_dim": (2, 2, 4),
        },
        _hunyuan_video15,
    ),
    "HunyuanVideoFramepackTransformer3DModel": Tiny(
        _HUNYUAN_VIDEO
        | {
            "patch_size": 2,
            "has_image_proj": True,
            "image_proj_dim": 16,
            "has_clean_x_embedder": True,
        },
        _framepack,
    ),
    "Ideogram4Transformer2DModel": Tiny(
        {
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "adaln_dim": 8,
            "llm_features_dim": 8,
            "mrope_section": (4, 2, 2),
        },
        _ideogram,
    ),
    "JoyImageEditPlusTransformer3DModel": Tiny(_JOY_IMAGE, _joy_image_plus),
    "JoyImageEditTransformer3DModel": Tiny(_JOY_IMAGE, _joy_image),
    "Kandinsky5Transformer3DModel": Tiny(
        {
            "in_visual_dim": 4,
            "in_text_dim": 16,
            "in_text_dim2": 8,
            "time_dim": 16,
            "out_visual_dim": 4,
            "model_dim": 32,
            "ff_dim": 32,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": (4, 6, 6),
        },
        _kandinsky5,
    ),
    "Krea2Transformer2DModel": Tiny(
        {
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 32,
            "timestep_embed_dim": 16,
            "text_hidden_dim": 16,
            "num_text_layers": 2,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 32,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 6, 6),
        },
        _krea2,
    ),
    "LTX2VideoTransformer3DModel": Tiny(
        {
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "cross_attention_dim": 32,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 8,
            "audio_cross_attention_dim": 16,
            "num_layers": 2,
            "caption_channels": 16,
            "rope_double_precision": False,
        },
        _ltx2,
    ),
    "LongCatImageTransformer2DModel": Tiny(
        _FLUX | {"pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]}, _chroma
    ),
    "Lumina2Transformer2DModel": Tiny(
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 2,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (128, 32, 32),
            "cap_feat_dim": 8,
        },
        _lumina2,
    ),
    "MiniMaxH3Transformer3DModel": Tiny(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "ffn_dim": 32,
            "in_channels": 4,
            "audio_in_channels": 4,
            "text_dim": 8,
            "freq_dim": 16,
            "time_embed_hidden_dim": 16,
            "time_embed_dim": 16,
            "rope_freq_dim": 2,
        },
        _minimax,
    ),
    "MotifVideoTransformer3DModel": Tiny(
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "num_single_layers": 1,
            "text_embed_dim": 16,
            "rope_axes_dim": (2, 2, 4),
            "enable_text_cross_attention_dual": True,
            "enable_text_cross_attention_single": True,
        },
        _motif,
    ),
    "OmniGenTransformer2DModel": Tiny(
        {
            "in_channels": 4,
            "patch_size": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_layers": 2,
            "pad_token_id": 0,
            "vocab_size": 16,
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 64,
            "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
            "pos_embed_max_size": 8,
            "time_step_dim": 16,
        },
        _omnigen,
    ),
    "OvisImageTransformer2DModel": Tiny(
        _FLUX | {"out_channels": 4, "axes_dims_rope": (4, 4, 8)}, _chroma
    ),
    "PRXTransformer2DModel": Tiny(
        {
            "in_channels": 4,
            "patch_size": 2,
            "context_in_dim": 16,
            "hidden_size": 32,
            "mlp_ratio": 2.0,
            "num_heads": 2,
            "depth": 2,
            "axes_dim": [8, 8],
        },
        _prx,
    ),
    "SkyReelsV2Transformer3DModel": Tiny(_WAN | {"num_frame_per_block": 2}, _skyreels),
    "StableAudioDiTModel": Tiny(
        {
            "sample_size": 8,
            "in_channels": 3,
            "num_layers": 2,
            "attention_head_dim": 4,
            "num_attention_heads": 2,
            "num_key_value_attention_heads": 2,
            "out_channels": 3,
            "cross_attention_dim": 4,
            "time_proj_dim": 8,
            "global_states_input_dim": 8,
            "cross_attention_input_dim": 4,
        },
        _stable_audio,
    ),
    "WanVACETransformer3DModel": Tiny(_WAN | {"vace_layers": [0, 1], "vace_in_channels": 8}, _vace),
    "AceStepTransformer1DModel": Tiny(
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "in_channels": 12,
            "audio_acoustic_hidden_dim": 4,
            "sliding_window": 3,
            "encoder_hidden_size": 16,
        },
        _ace_step,
    ),
    "AnyFlowTransformer3DModel": Tiny(_WAN, _any_flow),
    "ChronoEditTransformer3DModel": Tiny(_WAN, _wan),
    "DreamLiteTransformer2DModel": Tiny(_TRANSFORMER_2D, _transformer_2d),
    "HeliosTransformer3DModel": Tiny(
        _HELIOS | {"guidance_cross_attn": False, "rope_dim": (4, 4, 4)}, _wan
    ),
    "Kandinsky6Transformer3DModel": Tiny(
        {
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "in_text_dim": 16,
            "in_text_dim2": 8,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 32,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": (4, 6, 6),
            "visual_cond": False,
            "in_audio_dim": 4,
            "out_audio_dim": 4,
        },
        _kandinsky6,
    ),
    "LongCatAudioDiTTransformer": Tiny(
        {
            "dit_dim": 32,
            "dit_depth": 2,
            "dit_heads": 2,
            "dit_text_dim": 8,
            "latent_dim": 4,
        },
        _longcat_audio,
    ),
    "MiniMaxMusic3Transformer1DModel": Tiny(
        {
            "in_channels": 4,
            "condition_dim": 8,
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "ff_inner_dim": 32,
            "rotary_dim": 4,
            "fourier_embedding_dim": 16,
        },
        _minimax_music,
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Tiny(
        {
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "cross_attention_dim": 32,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 8,
            "audio_cross_attention_dim": 16,
            "num_layers": 2,
            "caption_channels": 16,
        },
        _refiner,
    ),
    "StableAudio3DiTModel": Tiny(
        {
            "io_channels": 4,
            "embed_dim": 32,
            "depth": 2,
            "num_heads": 2,
            "cond_token_dim": 8,
            "global_cond_dim": 8,
            "local_add_cond_dim": 4,
            "timestep_features_dim": 16,
            "num_memory_tokens": 3,
        },
        _stable_audio3,
    ),
    "Transformer2DModel": Tiny(_TRANSFORMER_2D, _transformer_2d),
}
