"""Tiny models of Hugging Face that number their own rows: vision, audio, encoders and decoders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from tests.hf_models import GQA, IMAGE, VISION, VOCAB, make_batch

Inputs = dict[str, Any]

BATCH, ROWS_OF_TEXT, ROWS_OF_TARGET = 2, 21, 14


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def ids(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB - 2, (BATCH, rows), generator=generator)


# 7 x 7 patches, with a token for the class or without.
ENCODER = VISION | {"num_hidden_layers": 2, "image_size": 14, "initializer_range": 0.15}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
AUDIO = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "conv_dim": (16, 16),
    "conv_kernel": (4, 4),
    "conv_stride": (3, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 20,
    "layerdrop": 0.0,
    "initializer_range": 0.15,
} | dict.fromkeys(
    (
        "hidden_dropout",
        "attention_dropout",
        "activation_dropout",
        "feat_proj_dropout",
        "final_dropout",
    ),
    0.0,
)
SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "init_std": 0.15,
}
TOKENS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2, "decoder_start_token_id": 3}
QWEN_VISION = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 64,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "initializer_range": 0.15,
}
# Patches of two images: 12 and 4 tokens.
GRID = torch.tensor([[1, 6, 8], [1, 4, 4]])
QWEN_PATCHES = int(GRID.prod(1).sum())


def images() -> Inputs:
    return {"pixel_values": randn(BATCH, 3, 14, 14)}


def labelled_images() -> Inputs:
    return images() | {"labels": torch.tensor([0, 1])}


def videos() -> Inputs:
    return {"pixel_values": randn(1, 4, 3, 14, 14)}


def audio() -> Inputs:
    labels = torch.tensor([[1, 2, 3, 4], [5, 3, 2, -100]])
    return {"input_values": randn(BATCH, 400), "labels": labels}


def padded_audio() -> Inputs:
    mask = torch.ones(BATCH, 400, dtype=torch.int64)
    mask[1, 300:] = 0
    return audio() | {"attention_mask": mask}


def text() -> Inputs:
    return {"input_ids": ids(ROWS_OF_TEXT, 2), "labels": ids(ROWS_OF_TARGET, 3)}


def padded_text() -> Inputs:
    batch = text()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 12:] = 0
    of_target = torch.ones_like(batch["labels"])
    of_target[0, 11:] = 0
    batch["labels"] = batch["labels"].masked_fill(of_target == 0, -100)
    return batch | {"attention_mask": mask, "decoder_attention_mask": of_target}


def speech() -> Inputs:
    return {"input_features": randn(BATCH, 8, 2 * ROWS_OF_TEXT), "labels": ids(ROWS_OF_TARGET, 3)}


def patches() -> Inputs:
    return {"hidden_states": randn(QWEN_PATCHES, 12), "grid_thw": GRID}


class Family(NamedTuple):
    """A model class of transformers, its config and its inputs."""

    model_class: str
    config_class: str
    config: dict[str, Any]
    inputs: Callable[[], Inputs]


VISION_OF_QWEN = "models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel"
CONFIG_OF_QWEN = "models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig"
DINO = {name: size for name, size in ENCODER.items() if name != "intermediate_size"}
WHISPER = (
    SEQ2SEQ
    | TOKENS
    | {"num_mel_bins": 8, "max_source_positions": ROWS_OF_TEXT, "max_target_positions": 64}
)
BART = SEQ2SEQ | TOKENS | {"max_position_embeddings": 64}
FAMILIES = {
    "vit": Family(
        "ViTForImageClassification", "ViTConfig", ENCODER | WITHOUT_DROPOUT, labelled_images
    ),
    "vit_rows": Family("ViTModel", "ViTConfig", ENCODER | WITHOUT_DROPOUT, images),
    "dinov2": Family("Dinov2Model", "Dinov2Config", DINO | WITHOUT_DROPOUT, images),
    "dinov3": Family(
        "DINOv3ViTModel", "DINOv3ViTConfig", ENCODER | {"num_register_tokens": 2}, images
    ),
    "siglip": Family("SiglipVisionModel", "SiglipVisionConfig", ENCODER, images),
    "clip": Family(
        "CLIPVisionModel",
        "CLIPVisionConfig",
        ENCODER,
        lambda: images() | {"output_hidden_states": True},
    ),
    "videomae": Family(
        "VideoMAEModel", "VideoMAEConfig", ENCODER | WITHOUT_DROPOUT | {"num_frames": 4}, videos
    ),
    "wav2vec2": Family("Wav2Vec2ForCTC", "Wav2Vec2Config", AUDIO, padded_audio),
    "hubert": Family("HubertForCTC", "HubertConfig", AUDIO, audio),
    "qwen2_vl_vision": Family(VISION_OF_QWEN, CONFIG_OF_QWEN, QWEN_VISION, patches),
    "bart": Family("BartForConditionalGeneration", "BartConfig", BART, text),
    "bart_padded": Family("BartForConditionalGeneration", "BartConfig", BART, padded_text),
    "whisper": Family("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, speech),
}


def named(path: str) -> Any:
    """A class of transformers, from its path in the package."""
    return functools.reduce(getattr, path.split("."), transformers)


def make(name: str, implementation: str, **changes: Any) -> Any:
    """A float32 model in evaluation mode: the same weights in every process."""
    family = FAMILIES[name]
    config = named(family.config_class)(**family.config | changes)
    torch.manual_seed(0)
    made = named(family.model_class)._from_config(config, attn_implementation=implementation)
    for parameter in made.parameters():
        if not parameter.any():  # biases and tokens that would hide mistakes
            torch.nn.init.normal_(parameter, std=0.15)
    return made.eval()


def loss_of(output: Any) -> Tensor:
    """The model's own loss, or a weighted sum of all outputs."""
    if output.get("loss") is not None:
        loss: Tensor = output["loss"]
        return loss
    found = []
    for value in output.values():
        values = value if isinstance(value, tuple) else (value,)
        found += [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]
    sums = [(x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in found]
    return torch.stack(sums).sum()


# -- vision and language


def make_with_language(name: str, implementation: Any) -> Any:
    """A tiny LLaVA or Qwen2-VL; `implementation` is a name, or names by config."""
    text_config = {**GQA, "tie_word_embeddings": False}
    if name == "llava":
        vision = transformers.CLIPVisionConfig(**VISION | {"num_hidden_layers": 2})
        config: Any = transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**text_config),
            vision_config=vision,
            image_token_index=IMAGE,
            image_seq_length=25,
        )
        model_class: Any = transformers.LlavaForConditionalGeneration
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        config = transformers.Qwen2VLConfig(
            text_config=text_config | {"rope_parameters": rope},
            vision_config=QWEN_VISION,
            image_token_id=IMAGE,
            tie_word_embeddings=False,
        )
        model_class = transformers.Qwen2VLForConditionalGeneration
    torch.manual_seed(0)
    return model_class._from_config(config, attn_implementation=implementation).eval()


def language_batch(name: str, model: Any) -> Inputs:
    """Token ids, labels and pixels; for Qwen2-VL the positions of the whole sequence, too."""
    if name == "llava":
        batch: Inputs = make_batch(83, "gemma3_images")
        del batch["token_type_ids"]
        return batch
    tokens = make_batch(41)["input_ids"][:1] % (IMAGE - 1)
    tokens[:, 5:17] = IMAGE
    tokens[:, 22:26] = IMAGE
    is_image = (tokens == IMAGE).int()
    positions, _ = model.model.get_rope_index(
        tokens, mm_token_type_ids=is_image, image_grid_thw=GRID
    )
    labels = tokens.masked_fill(is_image == 1, -100)
    return {
        "input_ids": tokens,
        "labels": labels,
        "pixel_values": randn(QWEN_PATCHES, 12),
        "image_grid_thw": GRID,
        "position_ids": positions,
    }


def with_features(model: Any, batch: Inputs) -> Inputs:
    """The batch with embeddings of its images instead of ids and pixels."""
    batch = dict(batch)
    tokens = batch.pop("input_ids")
    of_images = {key: batch.pop(key) for key in ("pixel_values", "image_grid_thw") if key in batch}
    features = torch.cat([*model.get_image_features(**of_images).pooler_output])
    embeds = model.get_input_embeddings()(tokens)
    place = (tokens == IMAGE)[..., None]
    return {"inputs_embeds": embeds.masked_scatter(place, features), **batch}
