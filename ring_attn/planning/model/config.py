"""Read the config of a model: its architecture, and the config that transformers takes.

transformers fills in what a config leaves to its defaults, if it is installed. Without it, the keys
of the file are all that is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ring_attn.planning.model.architecture import (
    Architecture,
    Attention,
    Feedforward,
    Layer,
    Recurrence,
)
from ring_attn.planning.model.table import MODELS
from ring_attn.values.outside import Json, regular_file

# Types of layers by their names in configs.
FULL = {"full_attention", "attention"}
RECURRENT = {"linear_attention", "mamba", "conv"}
ROWWISE = {"mlp", "moe"}
KNOWN_TYPES = sorted(FULL | RECURRENT | ROWWISE | {"sliding_attention", "chunked_attention"})

# Classes of models whose layers have four norms, normalized heads, gated outputs, or biases, which
# their configs do not say.
FOUR_NORMS = ("gemma2", "gemma3_text")
QK_NORMS = ("qwen3", "qwen3_moe", "qwen3_next", "gemma3_text")
GATED = ("qwen3_next",)
BIASED = ("qwen2", "qwen2_moe")
UNGATED = ("bloom", "falcon", "gpt2", "gpt_neox", "opt", "phi", "starcoder2")
SHARED_GATES = ("qwen2_moe", "qwen3_next")

# Bounds of sizes in a config: products of them stay below 2^63.
MAX_LAYERS, MAX_SIZE = 1 << 12, 1 << 24


class ConfigError(ValueError):
    """A config cannot be read; the text names the file and the cause."""


@dataclass(frozen=True)
class ModelConfig:
    """A model to plan.

    Attributes:
        architecture: its layers.
        values: the config with transformers' keys, of the text model.
    """

    architecture: Architecture
    values: Mapping[str, Json] = field(repr=False)


def read_model(name: str) -> ModelConfig:
    """Return the model of a config.json, of a folder with one, or of a name in the table.

    Raises:
        ConfigError: there is no such name or file, or the file does not describe a causal language
            model that can be planned.

    Example:
        >>> model = read_model("mixtral-8x7b").architecture
        >>> len(model.layers), model.experts, model.experts_per_token
        (32, 8, 2)
    """
    known = MODELS.get(name.lower())
    if known is not None:
        return model_of(name.lower(), known)
    path = path_of(name)
    return model_of(str(path), _text_config(path))


def path_of(name: str, others: Iterable[str] = ()) -> Path:
    """Return the path of a config.json, or of the one in a folder.

    `others` are names of models that the error lists next to those of language models.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise ConfigError(
            f"--model must be a config.json, a folder with one, or one of "
            f"{', '.join([*MODELS, *others])}, got {name!r}"
        )
    return path


def model_of(name: str, values: Mapping[str, Json]) -> ModelConfig:
    """Return the model of a config, with transformers' defaults for what the config leaves out.

    Raises:
        ConfigError: as for `read_model`.
    """
    return ModelConfig(architecture_of(name, _completed(values)), values)


def _completed(values: Mapping[str, Json]) -> dict[str, Json]:
    """Return a config with transformers' defaults; as it is if transformers does not know it."""
    if find_spec("transformers") is None:
        return dict(values)
    from transformers import CONFIG_MAPPING

    model_type = str(values.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return dict(values)
    try:
        with quiet("transformers"):
            config = CONFIG_MAPPING[model_type](**values)
    except Exception:  # each class of transformers checks a config in its own way
        return dict(values)
    types = getattr(config, "layer_types", None)
    return {**config.to_dict(), "layer_types": types, **values}


def read_json(path: Path) -> dict[str, Json]:
    """Return the object in a config.json.

    Raises:
        ConfigError: the file cannot be read, or does not have an object.
    """
    try:
        values = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model: {path} is not a config.json of a model ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--model: {path} is not a config.json of a model: it is not an object")
    return values


def _text_config(path: Path) -> dict[str, Json]:
    """Return the config in a file; of a model of images and text, the part about text."""
    values = read_json(path)
    if isinstance(values.get("text_config"), dict):
        values = values["text_config"]
    if values.get("is_encoder_decoder"):
        raise ConfigError(
            f"--model: {path} describes an encoder and a decoder; only causal language models, "
            "which have one kind of layers, can be planned"
        )
    return values


@contextmanager
def quiet(package: str) -> Iterator[None]:
    """Silence the warnings of transformers or diffusers, such as those about missing kernels."""
    logging = import_module(f"{package}.utils.logging")
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def architecture_of(name: str, values: Mapping[str, Json]) -> Architecture:
    """Return the architecture of a config.

    Raises:
        ConfigError: a size is missing or wrong, or a type of layer is not known.
    """
    read = Reader(name, values)
    model_type = str(values.get("model_type", ""))
    num_layers = read.size("num_hidden_layers", "n_layer", "n_layers", most=MAX_LAYERS)
    num_norms = 4 if model_type in FOUR_NORMS else 2
    layers = tuple(
        Layer(_mixer(read, kind), _feedforward(read, index), num_norms)
        for index, kind in enumerate(_layer_types(read, num_layers))
    )
    return Architecture(
        name=name,
        model_type=model_type,
        hidden=read.size("hidden_size", "n_embd", "d_model"),
        vocab=read.size("vocab_size"),
        is_tied=bool(values.get("tie_word_embeddings", model_type.startswith("gemma"))),
        layers=layers,
        max_positions=read.optional("max_position_embeddings", "n_positions"),
    )


class Reader:
    """Sizes of a config, by the first of several keys that it has."""

    def __init__(self, name: str, values: Mapping[str, Json]) -> None:
        self.name, self.values = name, values

    def optional(self, *keys: str) -> int | None:
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.error(f"{key} must be a number of at least 0, got {value!r}")
            return value
        return None

    def size(self, *keys: str, most: int = MAX_SIZE) -> int:
        """Return a positive size; refuse a config without it."""
        value = self.optional(*keys)
        if value is None:
            raise self.error(f"it has no {keys[0]}")
        if not 1 <= value <= most:
            raise self.error(f"{keys[0]} must be from 1 to {most}, got {value}")
        return value

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"--model: {self.name} is not the config of a model: {text}")


# -- types of layers


def _layer_types(read: Reader, num_layers: int) -> list[str]:
    """Return the type of each layer."""
    values = read.values
    types = values.get("layer_types") or values.get("layers_block_type")
    if types is None:
        types = _types_by_rule(read, num_layers)
    if types is None:
        has_window = values.get("sliding_window") and values.get("use_sliding_window", True)
        types = ["sliding_attention" if has_window else "full_attention"] * num_layers
    if not isinstance(types, list) or len(types) != num_layers:
        raise read.error(f"it has {num_layers} layers, and the types of {len(types)}")
    unknown = sorted({str(x) for x in types} - {*KNOWN_TYPES})
    if unknown:
        raise ConfigError(
            f"--model: {read.name} has layers of type {', '.join(unknown)}, whose memory and time "
            f"are not known; known are {', '.join(KNOWN_TYPES)}"
        )
    return types


def _types_by_rule(read: Reader, num_layers: int) -> list[str] | None:
    """Return the types of layers that a config gives by a period or by indices."""
    indices = read.values.get("attn_layer_indices")
    every = read.optional("full_attention_interval")
    period, offset = read.optional("attn_layer_period"), read.optional("attn_layer_offset") or 0
    if every:
        attends = [(i + 1) % every == 0 for i in range(num_layers)]
    elif period:
        attends = [i % period == offset for i in range(num_layers)]
    elif isinstance(indices, list):
        attends = [i in indices for i in range(num_layers)]
    else:
        return None
    return ["full_attention" if x else "linear_attention" for x in attends]


def _mixer(read: Reader, kind: str) -> Attention | Recurrence | None:
    """Return what mixes the rows of a layer of this type; None in a layer without it."""
    if kind in ROWWISE:
        return None
    return _recurrence(read, kind) if kind in RECURRENT else _attention(read, kind)


def _attention(read: Reader, kind: str) -> Attention:
    """Return the attention of a layer."""
    values, model_type = read.values, read.values.get("model_type")
    nheads = read.size("num_attention_heads", "n_head")
    window = read.size("sliding_window") if kind == "sliding_attention" else None
    chunk = read.size("attention_chunk_size") if kind == "chunked_attention" else None
    softcap = float(values.get("attn_logit_softcapping") or 0.0)
    kv_rank = read.optional("kv_lora_rank")
    if kv_rank:
        rope_dim = read.size("qk_rope_head_dim")
        headdim = read.size("qk_nope_head_dim") + rope_dim
        return Attention(
            nheads=nheads,
            nheads_kv=nheads,
            headdim=headdim,
            headdim_v=read.size("v_head_dim"),
            window=window,
            chunk=chunk,
            softcap=softcap,
            q_rank=read.optional("q_lora_rank"),
            kv_rank=kv_rank,
            rope_dim=rope_dim,
        )
    headdim = read.optional("head_dim") or read.size("hidden_size", "n_embd", "d_model") // nheads
    nheads_kv = read.optional("num_key_value_heads") or nheads
    if kind in FULL:  # Gemma 4 has other heads in these layers
        headdim = read.optional("global_head_dim") or headdim
        nheads_kv = read.optional("num_global_key_value_heads") or nheads_kv
    if nheads % nheads_kv:
        raise read.error(
            "num_attention_heads must be a multiple of num_key_value_heads, got "
            f"{nheads} and {nheads_kv}"
        )
    return Attention(
        nheads=nheads,
        nheads_kv=nheads_kv,
        headdim=headdim,
        headdim_v=headdim,
        window=window,
        chunk=chunk,
        softcap=softcap,
        gated=model_type in GATED,
        has_bias=bool(values.get("attention_bias", model_type in BIASED)),
        has_out_bias=bool(values.get("attention_bias", False)),
        has_qk_norm=model_type in QK_NORMS,
        has_sinks=model_type == "gpt_oss",
    )


def _recurrence(read: Reader, kind: str) -> Recurrence:
    """Return the recurrence of a layer, by the keys of Qwen3-Next, Mamba 1 and 2, or LFM2."""
    hidden = read.size("hidden_size")
    if read.optional("linear_num_value_heads"):
        return Recurrence(
            kind="delta rule",
            nheads=read.size("linear_num_value_heads"),
            nheads_qk=read.size("linear_num_key_heads"),
            dim_qk=read.size("linear_key_head_dim"),
            dim_v=read.size("linear_value_head_dim"),
            conv_width=read.size("linear_conv_kernel_dim"),
        )
    if read.optional("linear_num_heads"):  # Kimi Linear
        nheads, dim = read.size("linear_num_heads"), read.size("linear_head_dim")
        conv_width = read.size("linear_conv_kernel_dim")
        return Recurrence("delta rule", nheads, nheads, dim, dim, conv_width)
    if read.optional("mamba_n_heads"):
        nheads = read.size("mamba_n_heads")
        return Recurrence(
            kind="mamba 2",
            nheads=nheads,
            nheads_qk=read.size("mamba_n_groups"),
            dim_qk=read.size("mamba_d_state"),
            dim_v=read.size("mamba_expand") * hidden // nheads,
            conv_width=read.size("mamba_d_conv"),
        )
    if read.optional("mamba_d_state"):
        dt_rank = read.values.get("mamba_dt_rank")
        return Recurrence(
            kind="mamba",
            nheads=read.size("mamba_expand") * hidden,
            nheads_qk=1,
            dim_qk=read.size("mamba_d_state"),
            conv_width=read.size("mamba_d_conv"),
            dt_rank=dt_rank if isinstance(dt_rank, int) else -(-hidden // 16),
        )
    if kind == "conv":
        return Recurrence("convolution", nheads=hidden, conv_width=read.size("conv_L_cache"))
    raise ConfigError(
        f"--model: {read.name} has recurrent layers ({kind}) whose sizes are not known: known are "
        "those of delta rules (linear_num_value_heads), Mamba (mamba_d_state) and convolutions "
        "(conv_L_cache)"
    )


# -- feedforward parts


def _feedforward(read: Reader, index: int) -> Feedforward | None:
    """Return the feedforward part of a layer: dense, or experts."""
    values = read.values
    dense = read.optional("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim")
    experts = read.optional("num_experts", "num_local_experts", "n_routed_experts") or 0
    if experts and _has_experts(read, index):
        width = read.size("moe_intermediate_size", "intermediate_size")
        shared = read.optional("shared_expert_intermediate_size", "shared_intermediate_size")
        if shared is None:
            shared = width * (read.optional("n_shared_experts", "num_shared_experts") or 0)
        if values.get("model_type") == "llama4_text":
            shared = width
        per_token = read.size("num_experts_per_tok", "num_experts_per_token", "moe_topk")
        if per_token > experts:
            raise read.error(
                f"num_experts_per_tok must be at most the number of experts, got {per_token} and "
                f"{experts}"
            )
        model_type = values.get("model_type")
        return Feedforward(
            width,
            experts,
            per_token,
            shared,
            has_bias=model_type == "gpt_oss",
            has_shared_gate=model_type in SHARED_GATES,
        )
    if values.get("model_type") in UNGATED:
        hidden = read.size("hidden_size", "n_embd", "d_model")
        return Feedforward(dense or 4 * hidden, products=2)
    if not dense:
        raise read.error("it has no intermediate_size")
    return Feedforward(dense)


def _has_experts(read: Reader, index: int) -> bool:
    """Return whether the feedforward part of a layer has experts."""
    values = read.values
    types = values.get("mlp_layer_types")
    if isinstance(types, list) and index < len(types):
        return bool(types[index] == "sparse")
    if index in (values.get("mlp_only_layers") or ()):
        return False
    if index < (read.optional("first_k_dense_replace") or 0):
        return False
    period = read.optional("expert_layer_period")
    if period:
        return index % period == (read.optional("expert_layer_offset") or 0)
    step = read.optional("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step") or 1
    return (index + 1) % step == 0
