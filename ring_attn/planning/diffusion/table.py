"""Configs of diffusion transformers that `ring-attn plan --model` knows by name.

The sizes are those of the transformer/config.json that the authors published with the weights, with
the keys of diffusers. diffusers adds the defaults of the class to them.
"""

from __future__ import annotations

from ring_attn.values.outside import Json

Config = dict[str, Json]


def _wan(heads: int, layers: int, ffn_dim: int) -> Config:
    return {
        "_class_name": "WanTransformer3DModel",
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "num_layers": layers,
        "ffn_dim": ffn_dim,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "patch_size": [1, 2, 2],
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
    }


TRANSFORMERS: dict[str, Config] = {
    "wan-2.1-1.3b": _wan(heads=12, layers=30, ffn_dim=8960),
    "wan-2.1-14b": _wan(heads=40, layers=40, ffn_dim=13824),
    "hunyuan-video": {
        "_class_name": "HunyuanVideoTransformer3DModel",
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 20,
        "num_single_layers": 40,
        "num_refiner_layers": 2,
        "mlp_ratio": 4.0,
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "patch_size_t": 1,
        "text_embed_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
        "rope_axes_dim": [16, 56, 56],
    },
    "flux.1-dev": {
        "_class_name": "FluxTransformer2DModel",
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 19,
        "num_single_layers": 38,
        "in_channels": 64,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
        "axes_dims_rope": [16, 56, 56],
    },
    "ltx-video": {
        "_class_name": "LTXVideoTransformer3DModel",
        "num_attention_heads": 32,
        "attention_head_dim": 64,
        "num_layers": 28,
        "in_channels": 128,
        "out_channels": 128,
        "cross_attention_dim": 2048,
        "caption_channels": 4096,
    },
    "cogvideox-5b": {
        "_class_name": "CogVideoXTransformer3DModel",
        "num_attention_heads": 48,
        "attention_head_dim": 64,
        "num_layers": 42,
        "in_channels": 16,
        "out_channels": 16,
        "text_embed_dim": 4096,
        "time_embed_dim": 512,
        "patch_size": 2,
        "use_rotary_positional_embeddings": True,
    },
    "qwen-image": {
        "_class_name": "QwenImageTransformer2DModel",
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 60,
        "in_channels": 64,
        "out_channels": 16,
        "patch_size": 2,
        "joint_attention_dim": 3584,
        "axes_dims_rope": [16, 56, 56],
    },
}
