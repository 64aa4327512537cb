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
    "hidden_dim encoder_hidden_size decoder_hidden_size attention_hidden_size lru_width",
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
    32: "kv_lora_rank q_lora_rank hidden_size_per_layer_input",
    512: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions "
    "max_source_positions",
    1: "pad_token_id n_group topk_group n_shared_experts first_k_dense_replace",
    0: "bos_token_id decoder_start_token_id",
}
SIZES: dict[str, Any] = {name: size for size, names in NAMES.items() for name in names.split()}
SIZES |= {"eos_token_id": 2, "initializer_range": 0.15, "init_std": 0.15, "use_cache": False}
SIZES["tie_word_embeddings"] = False
KEPT_NONE = {"q_lora_rank", "n_inner", "n_group"}
# By default these states, of 128 heads and chunks of 256 rows, take most of the time of all models.
SMALL_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 16}
# By default an image of the tiny models is one patch, which two ranks cannot share.
SMALL_PATCHES = {"tubelet_size": [1, 4, 4], "num_spatial_layers": 2, "num_temporal_layers": 2}
# Options that must go with the sizes.
SPECIAL: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": SMALL_MAMBA,
    "FalconH1ForCausalLM": SMALL_MAMBA,
    "GraniteMoeHybridForCausalLM": SMALL_MAMBA,
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "EsmcForMaskedLM": {"num_key_value_heads": 4},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "Mamba2ForCausalLM": {"num_heads": 2, "head_dim": 64, "n_groups": 1},
    "LongcatFlashForCausalLM": {"zero_expert_num": 2},
    "VideoPrismForVideoClassification": SMALL_PATCHES,
    "VideoPrismVisionModel": SMALL_PATCHES,
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
SENSED_SIZES = {
    "image_size": 28,
    "patch_size": 4,
    "num_frames": 4,
    "num_mel_bins": 16,
    "max_length": 64,
    "max_source_positions": 33,
    "layerdrop": 0.0,
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


def options(config: Any, depth: int = 0) -> dict[str, Any]:
    """Arguments that make the config, and configs in it, small and without dropout."""
    default = vars(config())
    small = {
        name: SIZES[name]
        for name, value in default.items()
        if name in SIZES and not (value is None and name in KEPT_NONE)
    }
    small |= {name: 0.0 for name, x in default.items() if "drop" in name and isinstance(x, float)}
    if "qk_rope_head_dim" in default:  # latent attention: the head dim follows
        small.pop("head_dim", None)
        small["num_key_value_heads"] = 4
    if depth < 2:
        parts = getattr(config, "sub_configs", None) or {}
        made = {name: part for name, part in parts.items() if part is not transformers.AutoConfig}
        small |= {name: options(part, depth + 1) for name, part in made.items()}
    return small


# Options of a config with their values; a dot leads into a config in it.
Changes = tuple[tuple[str, Any], ...]


def config_of(architecture: Architecture, changes: Changes = ()) -> Any:
    """The config of a tiny model, with other values of some options."""
    model_class = getattr(transformers, architecture.model_class)
    config_class = model_class.config_class or CONFIG_MAPPING[architecture.model_type]
    arguments = options(config_class) | SPECIAL.get(architecture.model_class, {})
    if architecture.head in SENSED:
        default = vars(config_class())
        arguments |= {name: x for name, x in SENSED_SIZES.items() if name in default}
    for path, value in changes:
        *parts, name = path.split(".")
        holder = arguments
        for part in parts:
            holder = holder.setdefault(part, {})
        holder[name] = value
    return config_class(**arguments)


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
    """Inputs of the whole sequence: token ids, or pixels or samples."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (1, SEQLEN), generator=generator)
    takes_both = "decoder_input_ids" in inspect.signature(model.forward).parameters
    decoder = {"decoder_input_ids": ids} if takes_both else {}
    if architecture.head not in SENSED:
        return {"input_ids": ids, **decoder}
    config, channels = model.config, getattr(model.config, "num_channels", 3)
    size = getattr(config, "image_size", 28)
    shape = {
        "images": (channels, size, size),
        "videos": (getattr(config, "num_frames", 4), channels, size, size),
        "audio": (1600,),
        "speech to text": (64, getattr(config, "input_feat_per_channel", 16)),
    }[architecture.head]
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        shape = (config.num_mel_bins, 2 * config.max_source_positions)
    elif hasattr(config, "num_mel_bins"):
        shape = (config.max_length, config.num_mel_bins)
    elif hasattr(config, "feature_projection_input_dim"):
        shape = (64, config.feature_projection_input_dim)
    drawn = torch.randn(1, *shape, generator=generator)
    return {model.main_input_name: drawn, **decoder}


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


def main(path: str) -> None:
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    outcomes = {each: outcome(each) for each in architectures()}
    if dist.get_rank() == 0:
        Path(path).write_text("\n".join(table(outcomes)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
