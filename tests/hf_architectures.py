"""Tiny models of every architecture of transformers, and what becomes of them on a split sequence.

    torchrun --nproc-per-node 2 -m tests.hf_architectures docs/models.md

writes the table of the documentation.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ring_attn import SequenceLayout, shard_batch
from ring_attn.integrations.transformers import register
from ring_attn.integrations.transformers.models import first_position
from ring_attn.integrations.transformers.stacks import numbers_own_rows
from ring_attn.testing import check_rounded, noisy_runs
from tests.hf_models import VOCAB, all_in_float64

SEQLEN = 64
MAX_PARAMETERS = 30_000_000

# Names of sizes in configs.
NAMES = {
    64: "hidden_size d_model n_embd embed_dim dim emb_dim embedding_size word_embed_proj_dim "
    "hidden_dim encoder_hidden_size decoder_hidden_size attention_hidden_size lru_width "
    "hidden_size_global",
    96: "intermediate_size ffn_dim n_inner d_ff encoder_ffn_dim decoder_ffn_dim d_inner "
    "moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size "
    "shared_intermediate_size dense_intermediate_size intermediate_size_mlp",
    2: "num_hidden_layers n_layer n_layers encoder_layers decoder_layers num_layers "
    "num_decoder_layers num_encoder_layers num_key_value_heads num_kv_heads num_experts_per_tok "
    "num_experts_per_token top_k moe_topk num_selected_experts moe_k type_vocab_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts",
    16: "head_dim d_kv attention_head_dim qk_nope_head_dim v_head_dim",
    8: "qk_rope_head_dim rotary_dim",
    VOCAB: "vocab_size vocab_size_per_layer_input",
    32: "kv_lora_rank q_lora_rank hidden_size_per_layer_input entity_vocab_size",
    512: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions "
    "max_source_positions",
    1: "pad_token_id n_group num_expert_group topk_group n_shared_experts first_k_dense_replace "
    "blank_token_id",
    0: "bos_token_id decoder_start_token_id",
}
SIZES: dict[str, Any] = {name: size for size, names in NAMES.items() for name in names.split()}
SIZES |= {"eos_token_id": 2, "initializer_range": 0.15, "init_std": 0.15, "use_cache": False}
SIZES["tie_word_embeddings"] = False
KEPT_NONE = {"q_lora_rank", "n_inner", "n_group", "topk_group"}
# By default these states, of 128 heads and chunks of 256 rows, take most of the time of all models.
SMALL_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 16}
# By default an image of the tiny models is one patch, which two ranks cannot share.
SMALL_PATCHES = {"tubelet_size": [1, 4, 4], "num_spatial_layers": 2, "num_temporal_layers": 2}
SMALL_PERCEIVER = {"num_latents": 16, "d_latents": 64, "num_self_attends_per_block": 1}
SMALL_REFORMER = {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "num_buckets": 4}
# Its attention has the hidden states of the layer and of the embeddings side by side.
HYBRID = {
    "layers_block_type": ["mamba", "hybrid"],
    "use_mamba_kernels": False,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
    "num_key_value_heads": 4,
}
# Positions in time, height and width, for heads of 16 dims, or for half of these dims.
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
MROPE_OF_TEXT = {"text_config.rope_parameters": MROPE}
HALF_MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
HALF_MROPE_OF_TEXT = {"text_config.rope_parameters": HALF_MROPE | {"mrope_section": [1, 1, 2]}}
SMALL_RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
# Backbones of transformers instead of those of timm.
WITHOUT_TIMM = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": SMALL_RESNET,
}
# Options that must go with the sizes; a dot leads into a config in the config.
SPECIAL: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": SMALL_MAMBA,
    "FalconH1ForCausalLM": SMALL_MAMBA,
    "GraniteMoeHybridForCausalLM": SMALL_MAMBA,
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "EsmcForMaskedLM": {"num_key_value_heads": 4},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "Mamba2ForCausalLM": {"num_heads": 2, "head_dim": 64, "n_groups": 1},
    "LongcatFlashForCausalLM": {"zero_expert_num": 2, "head_dim": 8},
    "ConvNextForImageClassification": {"image_size": 64},
    "ConvNextV2ForImageClassification": {"image_size": 64},
    "MobileViTV2ForImageClassification": {"image_size": 128, "patch_size": 2},
    "EfficientNetForImageClassification": {
        "image_size": 64,
        "hidden_dim": 640,
        "width_coefficient": 0.5,
        "depth_coefficient": 0.2,
    },
    "LevitForImageClassification": {"image_size": 224, "patch_size": 16},
    "PvtForImageClassification": {"image_size": 64},
    "SegformerForImageClassification": {"image_size": 64},
    "SwinForImageClassification": {"embed_dim": 48, "image_size": 224},
    "Swinv2ForImageClassification": {"embed_dim": 48, "image_size": 224},
    "DonutSwinForImageClassification": {"embed_dim": 48, "image_size": 224},
    "DiaForConditionalGeneration": {"decoder_config.cross_hidden_size": 64},
    "BltForCausalLM": {
        "encoder_hash_byte_group_vocab": 100,
        "encoder_hash_byte_group_size": [2, 3],
    },
    "DeepseekV4ForCausalLM": {"mlp_layer_types": ["hash_moe", "moe"]},
    "CohereCompassForCausalLM": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "DbrxForCausalLM": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "FunAsrNanoForConditionalGeneration": {"adaptor_config.intermediate_size": 16},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "Gemma4AssistantForCausalLM": {
        "text_config.hidden_size_per_layer_input": 0,
        "text_config.num_kv_shared_layers": 0,
    },
    "Gemma4UnifiedAssistantForCausalLM": {"text_config.num_kv_shared_layers": 0},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "MiMoV2FlashForCausalLM": {"head_dim": 24},  # a third of it has RoPE: an even number
    "MoonshineStreamingForConditionalGeneration": {"num_key_value_heads": 4},
    "MoshiForCausalLM": {"audio_vocab_size": 20},
    "KyutaiSpeechToTextForConditionalGeneration": {
        "codebook_vocab_size": 20,
        "num_codebooks": 4,
        "audio_bos_token_id": 4,
        "audio_pad_token_id": 5,
        "codec_config": {},
    },
    "ShieldGemma2ForImageClassification": {"yes_token_index": 3, "no_token_index": 4},
    "PerceiverForMaskedLM": SMALL_PERCEIVER,
    "PerceiverForImageClassificationLearned": SMALL_PERCEIVER,
    "ReformerForMaskedLM": SMALL_REFORMER,
    "ReformerModelWithLMHead": SMALL_REFORMER | {"is_decoder": True},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "ZambaForCausalLM": HYBRID,
    "Zamba2ForCausalLM": HYBRID,
    "VideoPrismForVideoClassification": SMALL_PATCHES,
    "VideoPrismVisionModel": SMALL_PATCHES,
    "Qwen2VLForConditionalGeneration": MROPE_OF_TEXT,
    "Qwen2_5_VLForConditionalGeneration": MROPE_OF_TEXT,
    "Qwen2_5OmniThinkerForConditionalGeneration": MROPE_OF_TEXT,
    "PaddleOCRVLForConditionalGeneration": MROPE_OF_TEXT,
    "GlmOcrForConditionalGeneration": MROPE_OF_TEXT,
    "Glm4vForConditionalGeneration": MROPE_OF_TEXT,
    "Glm46VForConditionalGeneration": MROPE_OF_TEXT,
    "Glm4vMoeForConditionalGeneration": HALF_MROPE_OF_TEXT,
    "CohereCompassForConditionalGeneration": {
        "text_config.rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4}
        }
    },
    "ConditionalDetrForObjectDetection": WITHOUT_TIMM,
    "DabDetrForObjectDetection": WITHOUT_TIMM,
    "DeformableDetrForObjectDetection": WITHOUT_TIMM,
    "DetrForObjectDetection": WITHOUT_TIMM,
    "DetrForSegmentation": WITHOUT_TIMM,
    "TableTransformerForObjectDetection": WITHOUT_TIMM,
    "MaskFormerForInstanceSegmentation": {"backbone_config.embed_dim": 48},
    "MaskFormerSwinBackbone": {"embed_dim": 48, "image_size": 224},
    "Swin2SRForImageSuperResolution": {"embed_dim": 96, "num_heads": [2, 2], "depths": [1, 1]},
    "VideoMAEForPreTraining": {"decoder_num_attention_heads": 4, "decoder_hidden_size": 64},
    "LiltForTokenClassification": {"hidden_size": 96, "num_attention_heads": 4},
    "YolosForObjectDetection": {"image_size": [32, 48]},
    "PocketTTSForConditionalGeneration": {"flow_head_config.condition_dim": 64},
    "GradiumPhononTTSForConditionalGeneration": {"flow_head_config.condition_dim": 64},
    "GraniteDoclingForConditionalGeneration": {"vision_config.out_hidden_size": 64},
    "Inkling2ForConditionalGeneration": {"vision_config.text_hidden_size": 64},
    "Molmo2ForConditionalGeneration": {"adapter_config.vision_feature_layer": [1, 0]},
    "Nemotron3DiarizationForAudioFrameClassification": {"head_config.audio_hidden_size": 64},
    "LayoutLMv3ForTokenClassification": {
        "coordinate_size": 12,
        "shape_size": 8,
        "hidden_size": 64,
    },
}

SMALL_NECK = {"neck_hidden_sizes": [16, 16, 16, 16], "fusion_hidden_size": 16}
SMALL_BACKBONE = {
    "backbone_config.num_hidden_layers": 4,
    "backbone_config.out_indices": [1, 2, 3, 4],
    "backbone_config.reshape_hidden_states": False,
}
SMALL_SWIN = {"image_size": 224, "embed_dim": 48, "depths": [1, 1], "num_heads": [2, 2]}
SMALL_WAV2VEC = {
    "semantic_model_config.model_type": "wav2vec2-bert",
    "semantic_model_config.hidden_size": 64,
    "semantic_model_config.intermediate_size": 96,
    "semantic_model_config.num_hidden_layers": 2,
    "semantic_model_config.num_attention_heads": 4,
    "encoder_hidden_size": 4,
    "num_key_value_heads": 4,
    "quantization_dim": 128,
}
SMALL_MIMI = {
    "codec_config.model_type": "mimi",
    "codec_config.hidden_size": 64,
    "codec_config.num_filters": 8,
    "codec_config.upsample_groups": 64,
    "codec_config.codebook_size": 32,
    "codec_config.num_hidden_layers": 2,
    "codec_config.num_attention_heads": 4,
    "codec_config.num_key_value_heads": 4,
    "codec_config.intermediate_size": 96,
    "codec_config.vector_quantization_hidden_dimension": 32,
}
SMALL_RT_DETR = {
    "backbone_config.embedding_size": 16,
    "backbone_config.hidden_sizes": [16, 32, 64, 128],
    "backbone_config.depths": [1, 1, 1, 1],
    "backbone_config.out_features": ["stage2", "stage3", "stage4"],
    "encoder_in_channels": [32, 64, 128],
    "num_queries": 10,
}
SMALL_SAM = {
    "vision_config.image_size": 64,
    "vision_config.patch_size": 16,
    "vision_config.output_channels": 64,
    "vision_config.num_pos_feats": 32,
    "vision_config.window_size": 2,
    "vision_config.global_attn_indexes": [1],
    "prompt_encoder_config.image_size": 64,
    "prompt_encoder_config.patch_size": 16,
}
# Options of one class, which other classes of the same architecture do not have.
SPECIAL_OF_CLASS: dict[str, dict[str, Any]] = {
    "DacModel": {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4, 8, 8]},
    "HiggsAudioV2TokenizerModel": {
        "acoustic_model_config.encoder_hidden_size": 8,
        "acoustic_model_config.decoder_hidden_size": 64,
        "acoustic_model_config.hidden_size": 128,
        "semantic_model_config.hidden_size": 64,
        "semantic_model_config.intermediate_size": 96,
        "semantic_model_config.num_hidden_layers": 2,
        "semantic_model_config.num_attention_heads": 4,
    },
    "NeuCodecModel": SMALL_WAV2VEC,
    "Xcodec2Model": SMALL_WAV2VEC,
    "PocketTTSAudioTokenizerModel": {
        "num_filters": 8,
        "upsample_groups": 64,
        "num_key_value_heads": 4,
        "head_dim": 16,
    },
    "VibeVoiceAcousticTokenizerModel": {
        "num_filters": 4,
        "downsampling_ratios": [2, 2],
        "depths": [1, 1, 1],
    },
    "DPTForDepthEstimation": SMALL_NECK
    | {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "DPTForSemanticSegmentation": SMALL_NECK
    | {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "DepthAnythingForDepthEstimation": SMALL_NECK
    | SMALL_BACKBONE
    | {"reassemble_hidden_size": 64, "patch_size": 14},
    "PromptDepthAnythingForDepthEstimation": SMALL_NECK
    | SMALL_BACKBONE
    | {"reassemble_hidden_size": 64, "patch_size": 14},
    "ZoeDepthForDepthEstimation": SMALL_NECK | SMALL_BACKBONE | {"bottleneck_features": 16},
    "Tipsv2DptForDepthEstimation": SMALL_NECK | SMALL_BACKBONE,
    "Tipsv2DptForNormalEstimation": SMALL_NECK | SMALL_BACKBONE,
    "Tipsv2DptForSemanticSegmentation": SMALL_NECK | SMALL_BACKBONE,
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "Data2VecVisionForSemanticSegmentation": {
        "num_hidden_layers": 4,
        "out_indices": [1, 2, 3, 4],
    },
    "SwinForMaskedImageModeling": SMALL_SWIN,
    "Swinv2ForMaskedImageModeling": SMALL_SWIN,
    "DetrForSegmentation": WITHOUT_TIMM
    | {
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "backbone_config": SMALL_RESNET
        | {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
    },
    "SplinterForPreTraining": {"question_token_id": 50},
    "Kosmos2ForConditionalGeneration": {"latent_query_num": 8},
    "Llama4VisionModel": {
        "image_size": 32,
        "patch_size": 4,
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
    },
    "MllamaVisionModel": {
        "image_size": 28,
        "patch_size": 4,
        "intermediate_layers_indices": [0, 1],
        "num_global_layers": 2,
        "vision_output_dim": 192,
    },
    "GroundingDinoForObjectDetection": {"backbone_config.embed_dim": 48, "num_queries": 10},
    "MMGroundingDinoForObjectDetection": {"backbone_config.embed_dim": 48, "num_queries": 10},
    "Granite4VisionForConditionalGeneration": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
    },
    "RfDetrForObjectDetection": {"num_queries": 10},
    "RfDetrForInstanceSegmentation": {"num_queries": 10},
    "ConvNextBackbone": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "ConvNextV2Backbone": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "FocalNetBackbone": {"hidden_sizes": [64, 128], "depths": [1, 1]},
    "Nemotron3DiarizationForAudioFrameClassification": {
        "head_config.audio_hidden_size": 64,
        "audio_config.num_key_value_heads": 4,
    },
    "SamModel": SMALL_SAM,
    "SamHQModel": SMALL_SAM | {"mask_decoder_config.vit_dim": 64},
    "EfficientLoFTRForKeypointMatching": {"hidden_size": 256, "num_attention_heads": 8},
    "SuperGlueForKeypointMatching": {"hidden_size": 256, "keypoint_encoder_sizes": [32, 64]},
    "ShieldGemma2ForImageClassification": {
        "yes_token_index": 3,
        "no_token_index": 4,
        "mm_tokens_per_image": 25,
    },
    "RTDetrForObjectDetection": SMALL_RT_DETR,
    "RTDetrV2ForObjectDetection": SMALL_RT_DETR,
    "PerceiverForImageClassificationFourier": SMALL_PERCEIVER | {"num_cross_attention_heads": 1},
    "PerceiverForImageClassificationConvProcessing": SMALL_PERCEIVER
    | {"num_cross_attention_heads": 1},
    "LwDetrViTBackbone": {"image_size": 64},
    "Glm5NextForConditionalGeneration": {
        "text_config.qk_rope_head_dim": 0,
        "text_config.num_key_value_heads": 4,
    },
    "Step3p7ForConditionalGeneration": {"text_config.sliding_window": 8},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "DiffusionGemmaForBlockDiffusion": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 96,
    },
    "Dots3NoteForConditionalGeneration": {
        "vision_config.mlp_layer_types": ["dense", "sparse"],
        "vision_config.adapter_in_dim": 64,
        "vision_config.adapter_out_dim": 64,
        "audio_config.adapter_input_size": 64,
        "audio_config.adapter_out_dim": 64,
    },
    "ChameleonForConditionalGeneration": {
        "vocabulary_map": {"<image>": 90},
        "vq_config.base_channels": 32,
        "vq_config.channel_multiplier": [1, 1],
        "vq_config.num_embeddings": 20,
        "vq_config.latent_channels": 32,
    },
    "Emu3ForConditionalGeneration": {
        "vocabulary_map": {"<image>": 90, "<|extra_200|>": 91},
        "vq_config.base_channels": 32,
        "vq_config.channel_multiplier": [1, 1],
        "vq_config.codebook_size": 20,
    },
    "JanusForConditionalGeneration": {
        "vq_config.base_channels": 32,
        "vq_config.channel_multiplier": [1, 1],
        "vq_config.num_embeddings": 20,
        "vq_config.latent_channels": 32,
        "vq_config.image_token_embed_dim": 64,
        "vision_config.mlp_ratio": 2.0,
    },
    "Florence2ForConditionalGeneration": {
        "vision_config.depths": [1, 1, 1, 1],
        "vision_config.embed_dim": [16, 16, 32, 32],
        "vision_config.num_heads": [2, 2, 2, 2],
        "vision_config.num_groups": [2, 2, 2, 2],
    },
    "KyutaiSpeechToTextForConditionalGeneration": {
        "codebook_vocab_size": VOCAB,
        "num_codebooks": 4,
        "audio_bos_token_id": 4,
        "audio_pad_token_id": 5,
        **SMALL_MIMI,
    },
    "CsmForConditionalGeneration": SMALL_MIMI,
    "ColQwen2ForRetrieval": {"vlm_config.text_config.rope_parameters": MROPE},
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config.rope_parameters": MROPE | {"mrope_section": [3, 3, 2]}
    },
    "HunYuanVLForConditionalGeneration": {
        "text_config.rope_parameters": MROPE | {"mrope_section": [2, 2, 2, 2]}
    },
    "AlignModel": {
        "vision_config.width_coefficient": 0.5,
        "vision_config.depth_coefficient": 0.2,
        "vision_config.hidden_dim": 640,
    },
}

HEADS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech to text": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "images": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "videos": modeling_auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES,
    "audio": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
}
# Heads of models whose inputs are no tokens, and the sizes of these.
SENSED = ("speech to text", "images", "videos", "audio")
# Models of texts and images, whose parts all have small sizes.
MIXED = "images and texts"
SENSED_NAMES = ("pixel_values", "pixel_values_videos", "input_values", "input_features")
# Models whose rows have several codes: the dim of the codes, and their number.
NUM_CODES = {
    "MusicgenForCausalLM": (1, 4),
    "MusicgenMelodyForCausalLM": (1, 4),
    "MusicgenForConditionalGeneration": (1, 4),
    "MusicgenMelodyForConditionalGeneration": (1, 4),
    "DiaForConditionalGeneration": (2, 9),
    "KyutaiSpeechToTextForConditionalGeneration": (2, 5),
}
SENSED_SIZES = {
    "image_size": 28,
    "patch_size": 4,
    "num_frames": 4,
    "num_mel_bins": 16,
    "max_length": 64,
    "max_source_positions": 33,
    "layerdrop": 0.0,
}
# Inputs of models of texts and images: an image of 5 x 5 patches, and the ids of its tokens.
MIXED_SIZES = SENSED_SIZES | {
    "image_size": 20,
    "image_token_id": 90,
    "image_token_index": 90,
    "video_token_id": 91,
    "video_token_index": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "audio_token_id": 94,
    "audio_token_index": 94,
    "depth": 2,
    "out_hidden_size": 64,
    "projection_dim": 64,
    "projection_hidden_size": 64,
}


class Architecture(NamedTuple):
    """A model class of transformers, and the name of its config."""

    head: str
    model_type: str
    model_class: str


def architectures() -> list[Architecture]:
    """Every class for causal, masked and sequence-to-sequence language models, once."""
    found: dict[str, Architecture] = {}
    for head, classes in HEADS.items():
        for model_type, names in classes.items():
            name = str(names[0] if isinstance(names, tuple) else names)
            found.setdefault(name, Architecture(head, model_type, name))
    return sorted(found.values())


def options(config: Any, depth: int = 0, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Arguments that make the config, and configs in it, small and without dropout.

    `more` are sizes in addition to `SIZES`, such as those of images.
    """
    default = vars(config())
    sizes = SIZES | (more or {})
    small = {
        name: sizes[name]
        for name, value in default.items()
        if name in sizes and not (value is None and name in KEPT_NONE) and not _is_list(value)
    }
    small |= {name: 0.0 for name, x in default.items() if "drop" in name and isinstance(x, float)}
    rope = default.get("rope_parameters") or {}
    if rope.get("mrope_section"):  # half of the head dim, for times, heights and widths
        small["rope_parameters"] = {**rope, "mrope_section": [2, 3, 3]}
    if "qk_rope_head_dim" in default:  # latent attention: the head dim follows
        small.pop("head_dim", None)
        small["num_key_value_heads"] = 4
    if depth < 2:
        parts = getattr(config, "sub_configs", None) or {}
        for name, part in parts.items():
            if part is not transformers.AutoConfig:
                small[name] = options(part, depth + 1, more)
            elif isinstance(default.get(name), PretrainedConfig):
                kind = type(default[name])
                small[name] = {"model_type": kind.model_type, **options(kind, depth + 1, more)}
    return small


def _is_list(value: Any) -> bool:
    """Return whether an option has a value for each stage of the model."""
    return isinstance(value, list | tuple)


# Options of a config with their values; a dot leads into a config in it.
Changes = tuple[tuple[str, Any], ...]


def config_of(architecture: Architecture, changes: Changes = ()) -> Any:
    """The config of a tiny model, with other values of some options."""
    model_class = getattr(transformers, architecture.model_class)
    config_class = model_class.config_class or CONFIG_MAPPING[architecture.model_type]
    is_mixed = architecture.head == MIXED
    arguments = options(config_class, more=MIXED_SIZES if is_mixed else None)
    if architecture.head in SENSED:
        default = vars(config_class())
        arguments |= {
            name: x
            for name, x in SENSED_SIZES.items()
            if name in default and not _is_list(default[name])
        }
    name = architecture.model_class
    special = SPECIAL_OF_CLASS.get(name) or SPECIAL.get(name)
    special = special or _special_of_type(architecture.model_type)
    for path, value in (*special.items(), *changes):
        *parts, name = path.split(".")
        holder = arguments
        for part in parts:
            holder = holder.setdefault(part, {})
        holder[name] = copy.deepcopy(value)  # some configs change RoPE's parameters
    return config_class(**arguments)


@functools.cache
def _special_of_type(model_type: str) -> dict[str, Any]:
    """Return the options of another class of the same architecture, if it has special ones."""
    for name, changes in SPECIAL.items():
        model_class = getattr(transformers, name)
        if getattr(model_class.config_class, "model_type", None) == model_type:
            return changes
    return {}


def make(architecture: Architecture, implementation: str, changes: Changes = ()) -> Any:
    """A tiny model with the same random weights each time; refuses large ones."""
    model_class = getattr(transformers, architecture.model_class)
    with torch.device("meta"):
        model = model_class(config_of(architecture, changes))
    if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
        raise ValueError("too large")
    torch.manual_seed(0)
    made = model_class._from_config(
        config_of(architecture, changes),
        attn_implementation=implementation,
        experts_implementation="eager",
    )
    return made.eval()


def inputs_of(architecture: Architecture, model: Any) -> dict[str, Tensor]:
    """Inputs of the whole sequence: token ids, or pixels or samples, or both."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (1, SEQLEN), generator=generator)
    names = inspect.signature(model.forward).parameters
    inputs = {"decoder_input_ids": ids} if "decoder_input_ids" in names else {}
    if architecture.model_class in NUM_CODES:
        ids, inputs = _with_codes(architecture, ids, inputs)
    sensed = next((name for name in SENSED_NAMES if name in names), None)
    if getattr(model.config, "is_encoder_decoder", False) and _classifies(architecture):
        ids[:, -1] = model.config.eos_token_id  # it pools the row of the one end
    is_text = sensed != "pixel_values" and "input_ids" in names and not inputs
    if architecture.head not in SENSED or sensed is None or is_text:
        return {"input_ids": ids, **inputs}
    if sensed == "pixel_values" and "input_ids" in names:  # a model of images and texts
        inputs["input_ids"] = ids
    if "spatial_shapes" in names:  # patches of an image, already cut
        config = getattr(model.config, "vision_config", model.config)
        inputs["pixel_attention_mask"] = torch.ones(1, 16, dtype=torch.int64)
        inputs["spatial_shapes"] = torch.tensor([[4, 4]])
        shape: tuple[int, ...] = (16, config.num_channels * config.patch_size**2)
    else:
        shape = _sensed_shape(architecture, model, sensed)
    return {sensed: torch.randn(1, *shape, generator=generator), **inputs}


def _classifies(architecture: Architecture) -> bool:
    return architecture.model_class.endswith("ForSequenceClassification")


def _with_codes(
    architecture: Architecture, ids: Tensor, inputs: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ids, and other inputs, in which each row of a sequence has several codes."""
    dim, num = NUM_CODES[architecture.model_class]
    codes = torch.stack([(ids + i) % VOCAB for i in range(num)], dim)
    if inputs:
        return ids, {"decoder_input_ids": codes}
    return codes.flatten(0, 1) if dim == 1 else codes, inputs


def _sensed_shape(architecture: Architecture, model: Any, name: str) -> tuple[int, ...]:
    """Return the shape of pixels or samples, without the batch."""
    config = model.config
    pixels = getattr(config, "vision_config", config)
    channels, size = getattr(pixels, "num_channels", 3), getattr(pixels, "image_size", 28)
    height, width = size if _is_list(size) else (size, size)
    if architecture.head == "images":
        return channels, height, width
    if architecture.head == "videos":
        return getattr(config, "num_frames", 4), channels, height, width
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        return config.num_mel_bins, 2 * config.max_source_positions
    if hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):
        return config.max_length, config.num_mel_bins
    if hasattr(config, "feature_projection_input_dim"):
        return 64, config.feature_projection_input_dim
    if architecture.head == "audio" or name == "input_values":
        return (1600,)
    encoder = getattr(config, "encoder_config", config)
    if hasattr(encoder, "num_mel_bins"):
        return 64, encoder.num_mel_bins
    if architecture.model_class == "Pop2PianoForConditionalGeneration":
        return 64, config.d_model
    return 64, getattr(config, "input_feat_per_channel", 16)


def run(model: Any, inputs: dict[str, Tensor], **more: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**inputs, **more).logits
    return logits


def doubled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


@dataclasses.dataclass(frozen=True)
class _Whole:
    """A model in one process: its inputs, and what its logits should be."""

    model: Any
    inputs: dict[str, Tensor]
    oracle: Tensor

    @functools.cached_property
    def noisy(self) -> list[Tensor]:
        """Logits of runs with random rounding, which most models are refused before they need."""
        return noisy_runs(lambda: run(self.model, self.inputs))


def outcome(architecture: Architecture) -> str:
    """What becomes of the model on one rank and on all ranks: "right", "refused", "WRONG", ...

    It runs as the recipe says, and without position_ids: neither may be wrong without a word.
    """
    try:
        model = make(architecture, "eager")
        inputs = inputs_of(architecture, model)
        run(model, inputs)
        with all_in_float64():
            oracle = run(copy.deepcopy(model).double(), doubled(inputs))
    except Exception as error:
        return _refused_when_made(architecture) or f"not tried: {type(error).__name__}"
    whole = _Whole(model, inputs, oracle)
    rank, groups = dist.get_rank(), [dist.new_group([r]) for r in range(dist.get_world_size())]
    groups = [groups[rank], dist.new_group()]
    words = [
        [_compared(architecture, whole, group, given) for given in (True, False)]
        for group in groups
    ]
    for group in groups:
        dist.destroy_process_group(group)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, words)
    if "WRONG" in str(of_ranks):
        return f"WRONG: {of_ranks}"
    return max((words[1][0] for words in of_ranks), key=lambda word: word != "right")


def _refused_when_made(architecture: Architecture) -> str | None:
    try:
        with register():
            make(architecture, "ring_attn")
    except NotImplementedError as error:
        return _shown(architecture, error)
    except Exception:
        return None
    return None


def _shown(architecture: Architecture, error: Exception) -> str:
    return "refused: " + str(error).partition(": ")[0].replace(architecture.model_class, "it")


def _compared(
    architecture: Architecture,
    whole: _Whole,
    group: Any,
    given: bool,
) -> str:
    """The outcome of a forward of this rank's rows, with position_ids if `given`.

    A model that numbers its own rows gets the whole inputs.
    """
    rank = dist.get_rank(group)
    layout = SequenceLayout.contiguous(SEQLEN, dist.get_world_size(group))
    numbers = numbers_own_rows(whole.model)
    try:
        with register(group):
            split = make(architecture, "ring_attn")
            split.load_state_dict(whole.model.state_dict())
            if numbers:
                got = run(split, whole.inputs)
            else:
                part = shard_batch(whole.inputs, layout, rank)
                positions = part.pop("position_ids") + first_position(split)
                got = run(split, part, **{"position_ids": positions} if given else {})
    except (NotImplementedError, ValueError) as error:
        return _shown(architecture, error)
    except Exception as error:
        return f"fails: {type(error).__name__}"
    oracle, noisy = whole.oracle, whole.noisy
    if not numbers:
        oracle = layout.shard(oracle, rank)
        noisy = [layout.shard(logits, rank) for logits in noisy]
    return "right" if check_rounded("logits", got, oracle, noisy).ok else "WRONG"


def table(outcomes: dict[Architecture, str]) -> Iterator[str]:
    """Lines of docs/models.md."""
    yield f"""# Hugging Face models on split sequences

Made by `tests/hf_architectures.py` with transformers {transformers.__version__}: a tiny random
model of each architecture, on 1 and on 2 ranks, with `position_ids` and without.

- right: the logits are those of one process, within the bound of the tests
- refused: an error names the model and the reason
- not tried: no tiny model could be made

Models of an encoder and a decoder, and models of images, videos and audio, got their whole inputs
on each rank. Those that compute no attention are refused, too.
"""
    for head in HEADS:
        yield f"## {head.capitalize()}\n\n| model | on a split sequence |\n|---|---|"
        for architecture, word in outcomes.items():
            if architecture.head == head:
                yield f"| {architecture.model_class} | {word} |"
        yield ""


def outcomes_of(page: str) -> dict[Architecture, str]:
    """Return the outcome of each architecture on a page that `table` has made."""
    words: dict[tuple[str, str], str] = {}
    head = ""
    for line in page.splitlines():
        if line.startswith("## "):
            head = line.removeprefix("## ").lower()
        elif line.startswith("| "):
            model_class, word = line.strip("| ").split(" | ", maxsplit=1)
            words[head, model_class] = word
    return {each: words.get((each.head, each.model_class), "no row") for each in architectures()}


def main(path: str) -> None:
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    outcomes = {each: outcome(each) for each in architectures()}
    if dist.get_rank() == 0:
        Path(path).write_text("\n".join(table(outcomes)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
