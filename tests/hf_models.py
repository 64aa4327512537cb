"""Tiny random models of Hugging Face's families, and a way to run them wholly in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

VOCAB = 97
WINDOW = 16
IMAGE, IMAGE_TOKENS = VOCAB - 1, 25  # more than a window

# Weights so large that scores differ: with the usual weights all keys count about the same, and a
# test would not notice a key too many or too few.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
GQA: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
# Gemma scales its embeddings up: with a tied head it would only repeat the last token.
GEMMA = GQA | {"query_pre_attn_scalar": 24, "tie_word_embeddings": False}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

CHUNKS = {
    "intermediate_size_mlp": 96,
    "num_local_experts": 2,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": WINDOW,
    "floor_scale": 7,
    "attn_scale": 0.7,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 10,
    "patch_size": 2,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GQA),
    "qwen2": ("Qwen2Config", GQA | ALTERNATING | {"use_sliding_window": True}),
    "qwen3": ("Qwen3Config", GQA | ALTERNATING | {"use_sliding_window": True}),
    "gemma2": ("Gemma2Config", GEMMA | ALTERNATING | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", GEMMA | ALTERNATING),
    "gpt_oss": (
        "GptOssConfig",
        GQA
        | ALTERNATING
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
    ),
    "llama4": ("Llama4TextConfig", GQA | CHUNKS),
    "gemma3_images": (
        "Gemma3Config",
        {
            "text_config": GEMMA | ALTERNATING,
            "vision_config": VISION,
            "mm_tokens_per_image": IMAGE_TOKENS,
            "image_token_id": IMAGE,
            "initializer_range": 0.15,
            "tie_word_embeddings": False,
        },
    ),
    "bert": (
        "BertConfig",
        SIZES | {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    ),
}

# Models with recurrent layers, one of each architecture.
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
RECURRENT = GQA | {"layer_types": ["linear_attention", "full_attention"]}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 16}
# Many heads: the largest error of only 4 numbers of a gradient varies too much to be compared.
HEADS = {"mamba_n_heads": 16, "mamba_d_head": 8}
# Models of which transformers does not know the loss type, because of their names; and RoBERTa.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "initializer_range": 0.15,
            "tie_word_embeddings": False,
        }
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    ),
    # Its positions begin after the id of padding, which no text has.
    "roberta": (
        "RobertaConfig",
        CONFIGS["bert"][1] | {"is_decoder": True, "vocab_size": VOCAB + 1, "pad_token_id": VOCAB},
    ),
    "bert_decoder": ("BertConfig", CONFIGS["bert"][1] | {"is_decoder": True}),
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", RECURRENT | LINEAR | EXPERTS),
    "olmo_hybrid": ("OlmoHybridConfig", RECURRENT | LINEAR | {"pad_token_id": None}),
    "bamba": ("BambaConfig", GQA | MAMBA | HEADS | {"attn_layer_indices": [1]}),
    "jamba": (
        "JambaConfig",
        GQA
        | MAMBA
        | EXPERTS
        | {"mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "lfm2": ("Lfm2Config", GQA | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 4}),
    "qwen3_5": ("Qwen3_5TextConfig", RECURRENT | LINEAR),
    "kimi_linear": (
        "KimiLinearConfig",
        RECURRENT
        | {
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "mlp_layer_types": ["dense", "dense"],
            "pad_token_id": None,
        },
    ),
    "granite_moe_hybrid": (
        "GraniteMoeHybridConfig",
        RECURRENT | MAMBA | HEADS | EXPERTS | {"shared_intermediate_size": 32},
    ),
    "falcon_h1": ("FalconH1Config", GQA | MAMBA | HEADS | {"mamba_d_ssm": 128}),
    "nemotron_h": (
        "NemotronHConfig",
        GQA
        | {
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "ssm_state_size": 8,
            "mamba_num_heads": 16,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        SIZES
        | {
            "layers_block_type": ["linear_attention", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 16,
            "chunk_size": 16,
            "use_mem_rope": True,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        SIZES
        | {"num_heads": 16, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16}
        | {"pad_token_id": None},
    ),
    "falcon_mamba": (
        "FalconMambaConfig",
        SIZES | {"state_size": 8, "time_step_rank": 4, "pad_token_id": None},
    ),
    "minimax": ("MiniMaxConfig", RECURRENT | EXPERTS | {"block_size": 16}),
}

# Attention that supports every option of the family: sdpa has neither softcap nor sinks, and is
# refused by models without attention.
YARDSTICKS = dict.fromkeys(
    ("gemma2", "gpt_oss", "llama4", "gemma3_images", "mamba2", "falcon_mamba"), "eager"
)


def make_model(family: str, implementation: str, **changes: Any) -> Any:
    """A float32 model in evaluation mode: the same weights in every process."""
    name, options = (CONFIGS | HYBRIDS | DECODERS)[family]
    config = getattr(transformers, name)(**options | changes)
    auto = (
        transformers.AutoModelForMaskedLM
        if family == "bert"
        else (transformers.AutoModelForCausalLM)
    )
    torch.manual_seed(0)
    # The experts' grouped matmul has no float64.
    grouped = ("gpt_oss", "qwen3_next", "jamba", "granite_moe_hybrid", "minimax")
    experts = {"experts_implementation": "eager"} if family in grouped else {}
    given: Any = implementation
    if family == "gemma3_images":
        given = {"text_config": implementation, "vision_config": "sdpa"}
    model = auto.from_config(config, attn_implementation=given, **experts)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
        elif parameter_name.endswith("A_log"):  # states last for hundreds of rows
            parameter.data -= 4
        elif parameter_name.endswith("mm_input_projection_weight"):  # zeros else
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def make_batch(seqlen: int, family: str = "llama", padded: bool | str = False) -> dict[str, Tensor]:
    """Two sequences with some ignored labels; optionally padded, or with images.

    Padding is at the ends of rows, or with "left" at their beginnings, with its positions.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (2, seqlen), generator=generator)
    batch = {"input_ids": ids}
    if family == "gemma3_images":
        ids[ids == IMAGE] = 0
        for row, start in ((0, 3), (0, 3 + IMAGE_TOKENS + 1), (1, 20)):
            ids[row, start : start + IMAGE_TOKENS] = IMAGE
        batch["token_type_ids"] = (ids == IMAGE).long()
        batch["pixel_values"] = torch.randn(3, 3, 10, 10, generator=generator)
    batch["labels"] = ids.clone()
    batch["labels"][:, 5:9] = -100
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        for row, length in enumerate((seqlen - 9, seqlen // 2)):
            batch["attention_mask"][row, length:] = 0
            batch["labels"][row, length:] = -100
    if padded == "left":
        batch = {name: x.flip(1) for name, x in batch.items()}
        real = batch["attention_mask"]
        batch["position_ids"] = (real.cumsum(1) - 1).masked_fill(real == 0, 1)
        # No token predicts the first one after padding.
        first = real.cumsum(1) * real == 1
        batch["labels"] = batch["labels"].masked_fill(first, -100)
    return batch


def yardstick(family: str, **changes: Any) -> Any:
    """The one-process model: with sdpa, or eager attention where sdpa lacks an option."""
    return make_model(family, YARDSTICKS.get(family, "sdpa"), **changes)


@contextmanager
def all_in_float64() -> Iterator[None]:
    """Computes in float64 what models always compute in float32 (norms, RoPE, loss)."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        yield
