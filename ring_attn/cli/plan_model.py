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
    unknown = sorted(kinds.keys() - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(
            f"--model {args.model} has layers of type {', '.join(unknown)}, whose time is not "
            "predicted: give --layers, the number of those with attention"
        )
    sliding, window = kinds["sliding_attention"], _int(config, "sliding_window")
    if sliding and window is None:
        raise ValueError(f"--model {args.model} has sliding layers and no sliding_window")
    return Layers(num - sliding, sliding, (window or 0) - 1, hidden)


def _layer_types(config: dict[str, Any], num: int) -> list[str]:
    """The type of each layer, in transformers' words of today."""
    types = config.get("layer_types") or config.get("layers_block_type")
    if types is None:
        # Each such model says in its own way which of its layers attend.
        hybrid = any(name.startswith(("mamba_", "linear_", "conv_L_")) for name in config)
        types = ["recurrent" if hybrid else "full_attention"] * num
    if len(types) != num:
        raise ValueError(f"--model has types of {len(types)} layers, and {num} layers")
    return [{"attention": "full_attention"}.get(x, x) for x in types]


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
