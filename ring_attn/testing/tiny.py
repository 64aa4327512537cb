"""Hugging Face models made small, with random weights, for `ring-attn audit --tiny`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest import mock

import torch

# A config, a model, its class, or an option of `from_pretrained`: mypy skips transformers.
Model: TypeAlias = Any

# Numbers of a config that are at most so large.
MAX_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
NUM_HEADS = 4


def shrunk(config: Model) -> Model:
    """Return a config with 2 layers and 4 heads; the vocabulary and the kinds of layers stay.

    Raises:
        ValueError: the sizes are in configs of the model's parts, as in models with images.
    """
    given = config.to_dict()
    num_heads = given.get("num_attention_heads")
    if not num_heads:
        raise ValueError(
            f"--tiny cannot shrink a {type(config).__name__}, whose sizes are in configs of its "
            "parts: make the model small in the step"
        )
    small = {name: min(most, given[name]) for name, most in MAX_SIZES.items() if given.get(name)}
    small["num_attention_heads"] = NUM_HEADS
    num_kv_heads = given.get("num_key_value_heads")
    if num_kv_heads:
        small["num_key_value_heads"] = max(1, NUM_HEADS * num_kv_heads // num_heads)
    num_layers = given.get("num_hidden_layers")
    for name, values in given.items():
        # A list with a value for each layer keeps two kinds, if it has them.
        if isinstance(values, list) and values and len(values) == num_layers:
            first = values[0]
            small[name] = [first, next((value for value in values if value != first), first)]
    return type(config)(**given | small)


@contextmanager
def tiny_models() -> Iterator[None]:
    """Shrink every model of transformers that is made by `from_pretrained` or `from_config`."""
    import transformers

    base = transformers.PreTrainedModel
    make = base._from_config.__func__

    def from_config(cls: Model, config: Model, **options: object) -> Model:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same weights on every rank
            return make(cls, shrunk(config), **options)

    def from_pretrained(
        cls: Model, path: object, *_: object, config: Model = None, **options: object
    ) -> Model:
        config = config or cls.config_class.from_pretrained(path)
        kept = {name: options[name] for name in ("dtype", "attn_implementation") if name in options}
        if kept.get("dtype") == "auto":
            kept["dtype"] = config.dtype
        return from_config(cls, config, **kept).eval()

    with mock.patch.multiple(
        base, _from_config=classmethod(from_config), from_pretrained=classmethod(from_pretrained)
    ):
        yield
