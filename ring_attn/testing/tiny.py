"""Hugging Face models made small, with random weights, for `ring-attn audit --tiny`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

# Numbers of a config that are at most so large.
MAX_SIZES = {
    "num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96,
    "moe_intermediate_size": 48, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


def shrunk(config: Any) -> Any:
    """A config of 2 layers with 4 heads; the vocabulary, masks and kinds of layers stay."""
    given = config.to_dict()
    if not (heads := given.get("num_attention_heads")):
        raise ValueError(
            f"--tiny does not shrink a {type(config).__name__}, whose sizes are in configs of its "
            "parts: make the model small in the step"
        )
    small = {name: min(most, given[name]) for name, most in MAX_SIZES.items() if given.get(name)}
    small["num_attention_heads"] = 4
    if groups := given.get("num_key_value_heads"):
        small["num_key_value_heads"] = max(1, 4 * groups // heads)
    for name, x in given.items():
        # Lists with a value for each layer keep both kinds, where there are two.
        if isinstance(x, list) and len(x) == given["num_hidden_layers"]:
            small[name] = [x[0], next((y for y in x if y != x[0]), x[0])]
    return type(config)(**given | small)


@contextmanager
def tiny_models() -> Iterator[None]:
    """Every model of transformers that is made by from_pretrained or from_config is shrunk."""
    import transformers

    base = transformers.PreTrainedModel
    make = base._from_config.__func__

    def from_config(cls: Any, config: Any, **options: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same weights on every rank
            return make(cls, shrunk(config), **options)

    def from_pretrained(cls: Any, path: Any, *_: Any, config: Any = None, **options: Any) -> Any:
        config = config or cls.config_class.from_pretrained(path)
        kept = {x: options[x] for x in ("dtype", "attn_implementation") if options.get(x)}
        if kept.get("dtype") == "auto":
            kept["dtype"] = config.dtype
        return from_config(cls, config, **kept).eval()

    with mock.patch.multiple(
        base, _from_config=classmethod(from_config), from_pretrained=classmethod(from_pretrained)
    ):
        yield
