"""A whole model in `ring-attn plan`: the attention of its layers, and their sum."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ring_attn.cli.options import HEADDIM, HEADS
from ring_attn.core.values import regular_file
from ring_attn.planning.choice import Choice, format_bytes, format_seconds

# Types of layers without attention; of some the states are known.
RECURRENT = ("linear_attention", "conv")


@dataclass(frozen=True)
class Layers:
    """Layers of a model by the keys that a query sees.

    Attributes:
        full: layers whose queries see all keys that --window leaves.
        sliding: layers with the model's own window.
        window: left keys of these layers.
        hidden: width of the model; None if unknown.
    """

    full: int
    sliding: int = 0
    window: int = -1
    hidden: int | None = None

    @property
    def num(self) -> int:
        return self.full + self.sliding


def read_model(args: argparse.Namespace) -> Layers | None:
    """Fills the sizes that were not given from --model, else with defaults; the model's layers."""
    config = {} if args.model is None else _config(args.model)
    heads = _int(config, "num_attention_heads") or HEADS
    given = args.nheads is not None
    args.nheads = args.nheads or heads
    if args.nheads_kv is None and not given:
        args.nheads_kv = _int(config, "num_key_value_heads")
    hidden = args.hidden or _int(config, "hidden_size")
    of_heads = hidden // heads if config and hidden else HEADDIM
    args.headdim = args.headdim or _int(config, "head_dim") or of_heads
    num = args.layers or _int(config, "num_hidden_layers")
    if num is None:
        if args.hidden is not None:
            raise ValueError("--hidden goes with --layers or --model: one layer has no boundary")
        return None
    if args.layers is not None or not config:
        return Layers(num, hidden=hidden)
    kinds = Counter(_layer_types(config, num))
    args.recurrent = _map_bytes(config) if kinds["linear_attention"] else 0
    num -= kinds["linear_attention"] + kinds["conv"]
    unknown = sorted(kinds.keys() - {"full_attention", "sliding_attention", *RECURRENT})
    if unknown:
        raise ValueError(
            f"--model {args.model} has layers of type {', '.join(unknown)}, whose time is not "
            "predicted: give --layers, the number of those with attention"
        )
    if num == 0:
        raise ValueError(f"--model {args.model} has no layer with attention to plan")
    sliding, window = kinds["sliding_attention"], _int(config, "sliding_window")
    if sliding and window is None:
        raise ValueError(f"--model {args.model} has sliding layers and no sliding_window")
    return Layers(num - sliding, sliding, (window or 0) - 1, hidden)


def _layer_types(config: dict[str, Any], num: int) -> list[str]:
    """The type of each layer, in transformers' words of today."""
    types = config.get("layer_types") or config.get("layers_block_type")
    if types is None and any(name.startswith("mamba_") for name in config):
        # Each such model says in its own way which of its layers attend.
        try:
            from transformers import CONFIG_MAPPING

            of_layers = {name: value for name, value in config.items() if "_layer" in name}
            types = CONFIG_MAPPING[str(config.get("model_type"))](**of_layers).layer_types
        except Exception as error:  # transformers checks the user's values in ways of its own
            raise ValueError(
                "--model has recurrent layers, and only transformers knows which they are: "
                f"pip install 'ring-attn[hf]', or write layer_types into the file ({error})"
            ) from error
    every = _int(config, "full_attention_interval") or 1
    by_turn = ["linear_attention"] * (every - 1) + ["full_attention"]
    types = types or [by_turn[i % every] for i in range(num)]
    if len(types) != num:
        raise ValueError(f"--model has types of {len(types)} layers, and {num} layers")
    words = {"attention": "full_attention", "mamba": "linear_attention"}
    return [words.get(x, x) for x in types]


def _map_bytes(config: dict[str, Any]) -> int:
    """Bytes of decay and state of a linear layer, as Qwen3-Next's or Mamba's; 0 if unknown."""
    names = "num_value_heads", "key_head_dim", "value_head_dim"
    heads, dim, dim_v = (_int(config, f"linear_{name}") or 0 for name in names)
    names = "mamba_expand", "hidden_size", "mamba_d_state"
    expand, hidden, state = (_int(config, name) or 0 for name in names)
    # Mamba 2 has one decay for each head, Mamba 1 one for each number of the state.
    inner = expand * hidden * state
    decays = _int(config, "mamba_n_heads") or inner
    return 4 * (heads * dim * (dim + dim_v) or (inner and inner + decays))


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {path} is no config.json of a model: {error}") from error
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict) or "num_attention_heads" not in config:
        raise ValueError(f"--model {path} is no config.json of a model: no num_attention_heads")
    return config


def _int(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) else None


def model_lines(layers: Layers, full: Choice, sliding: Choice | None) -> list[str]:
    """Time of a whole step's attention, and memory of a rank, in lines."""
    kinds = [(layers.full, full)] if layers.full else []
    kinds += [(layers.sliding, sliding)] if sliding is not None else []
    lines = [
        f"{count} layers of {choice.problem.mask.words}: {count} x "
        f"{format_seconds(choice.best.seconds)} by {choice.best.label}"
        for count, choice in kinds
    ]
    seconds = sum(count * choice.best.seconds for count, choice in kinds)
    problem = full.problem
    spec, rows = problem.spec, problem.mask.seqlen_k / problem.world_size
    dims = spec.nheads_kv * (spec.headdim + spec.headdim_v)
    cache = layers.num * spec.batch * rows * dims * spec.dtype.itemsize
    peak = max(choice.best.peak_bytes for _, choice in kinds)
    memory = f"{format_bytes(peak)} for a layer's call, {format_bytes(int(cache))} of KV to decode"
    if layers.hidden is not None:
        kept = int(layers.num * spec.batch * rows * layers.hidden * spec.dtype.itemsize)
        memory += f", {format_bytes(kept)} of rows between layers (with checkpointing)"
    step = "a step" if problem.backward else "a forward"
    return [*lines, f"{step}'s attention: {format_seconds(seconds)}", f"on a rank: {memory}"]
