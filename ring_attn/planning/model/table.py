"""Configs of models that `ring-attn plan --model` knows by name, with transformers' keys.

The sizes are those of the config.json that the authors published with the weights.
"""

from __future__ import annotations

from ring_attn.values.outside import Json

Config = dict[str, Json]


def _llama(hidden: int, width: int, layers: int, heads: int, **others: object) -> Config:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        **others,
    }


def _qwen3(hidden: int, width: int, layers: int, heads: int) -> Config:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }


def _gemma3(hidden: int, width: int, layers: int, heads: int, kv_heads: int, dim: int) -> Config:
    # Five layers with a window, then one without.
    types = [*["sliding_attention"] * 5, "full_attention"]
    return {
        "model_type": "gemma3_text",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": 262208,
        "sliding_window": 1024,
        "layer_types": [types[index % 6] for index in range(layers)],
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }


def _gpt_oss(layers: int, experts: int) -> Config:
    types = ["sliding_attention", "full_attention"]
    return {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "sliding_window": 128,
        "layer_types": [types[index % 2] for index in range(layers)],
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "max_position_embeddings": 131072,
    }


def _deepseek(model_type: str, hidden: int, width: int, layers: int, **others: object) -> Config:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        **others,
    }


def _mixtral(hidden: int, width: int, layers: int, heads: int, vocab: int) -> Config:
    return {
        "model_type": "mixtral",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": vocab,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 65536 if hidden > 4096 else 32768,
    }


# Name -> config. `plan --model` lists the names when it does not know one.
MODELS: dict[str, Config] = {
    "llama-3-8b": _llama(4096, 14336, 32, 32),
    "llama-3-70b": _llama(8192, 28672, 80, 64),
    "llama-3-405b": _llama(16384, 53248, 126, 128),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": {
        **_qwen3(2048, 6144, 48, 32),
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 151936,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "max_position_embeddings": 262144,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
    },
    "mixtral-8x7b": _mixtral(4096, 14336, 32, 32, 32000),
    "mixtral-8x22b": _mixtral(6144, 16384, 56, 48, 32768),
    "gemma-3-12b": _gemma3(3840, 15360, 48, 16, 8, 256),
    "gemma-3-27b": _gemma3(5376, 21504, 62, 32, 16, 128),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v2-lite": _deepseek(
        "deepseek_v2",
        2048,
        10944,
        27,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        vocab_size=102400,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        max_position_embeddings=163840,
    ),
    "deepseek-v3": _deepseek(
        "deepseek_v3",
        7168,
        18432,
        61,
        num_attention_heads=128,
        num_key_value_heads=128,
        q_lora_rank=1536,
        vocab_size=129280,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        max_position_embeddings=163840,
    ),
    "jamba-v0.1": {
        "model_type": "jamba",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 256,
        "max_position_embeddings": 262144,
    },
}
