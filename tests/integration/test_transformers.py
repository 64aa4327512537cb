"""Registering with transformers: masks, options and refusals, without other processes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import masking_utils

from ring_attn import SequenceLayout
from ring_attn.integrations.transformers import register
from ring_attn.integrations.transformers.masks import Rule, mask_of, read_mask
from ring_attn.integrations.transformers.models import causal_of
from tests.hf_models import make_model

FUNCTIONS = transformers.AttentionInterface._global_mapping
MASKS = transformers.AttentionMaskInterface._global_mapping


def test_a_name_comes_and_goes() -> None:
    ring = register()
    assert "ring_attn" in FUNCTIONS and "ring_attn" in MASKS
    with register(layout="zigzag", name="ring_zigzag"):
        assert {"ring_attn", "ring_zigzag"} <= set(FUNCTIONS)
    assert "ring_zigzag" not in FUNCTIONS and "ring_zigzag" not in MASKS
    model = make_model("llama", "sdpa")
    model.set_attn_implementation("ring_attn")
    assert model.config._attn_implementation == "ring_attn"
    ring.unregister()
    ring.unregister()
    assert "ring_attn" not in FUNCTIONS and "ring_attn" not in MASKS
    with pytest.raises(KeyError, match="ring_attn"):
        model(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="ring_attn"):
        make_model("llama", "ring_attn")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"name": "my_flash"}, ValueError, "must not contain 'flash'"),
        ({"name": "me/ring"}, ValueError, "got 'me/ring'"),
        ({"name": "sdpa"}, ValueError, "'sdpa' is registered already"),
        ({"layout": "spiral"}, ValueError, "layout must be one of"),
        (
            {"layout": SequenceLayout.zigzag(8, 2)},
            TypeError,
            "pass a SequenceLayout to the model",
        ),
        ({"name": 3}, TypeError, "name must be"),
        ({"group": 3}, TypeError, "group must be"),
        ({"strategy": 3}, TypeError, "strategy must be"),
        ({"strategy": "rings"}, ValueError, "strategy must be"),
        ({"backend": "tritons"}, ValueError, "backend must be"),
        ({"same_bits": 3}, TypeError, "same_bits must be"),
        ({"transport": 3}, TypeError, "transport must be"),
        ({"ignore": [3]}, TypeError, "each of ignore"),
        ({"causal": True}, TypeError, "register has no option causal"),
    ],
)
def test_a_bad_registration(options: dict[str, Any], error: type[Exception], text: str) -> None:
    before = set(FUNCTIONS)
    with pytest.raises(error, match=text):
        register(**options)
    assert set(FUNCTIONS) == before


def test_without_transformers_the_extra_is_named() -> None:
    with (
        mock.patch.dict(sys.modules, transformers=None),
        pytest.raises(ImportError, match=r"pip install 'ring-attn\[hf\]'"),
    ):
        register()
    old = ModuleType("transformers")
    old.__version__ = "4.40.0"  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, transformers=old),
        pytest.raises(ImportError, match=r"found 4\.40\.0"),
    ):
        register()


def made_mask(make: str, implementation: str = "ring_attn", **options: Any) -> Any:
    """The mask that transformers makes for a model, by our implementation or another."""
    with register():
        config = transformers.Llama4TextConfig(**options.pop("config", {}))
        config._attn_implementation = implementation
        arguments = {
            "config": config,
            "inputs_embeds": torch.zeros(2, 12, 8),
            "attention_mask": None,
            "past_key_values": None,
        }
        return getattr(masking_utils, make)(**arguments | options)


ZIGZAG = SequenceLayout.zigzag(24, 2).position_ids(0)[None]
WINDOW = {"config": {"sliding_window": 4}}
CHUNKS = {"config": {"attention_chunk_size": 5}}
PADDING = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])
LEFT = PADDING.flip(1)
BETWEEN = torch.tensor([[1] * 12, [1] * 7 + [0, 0, 1, 1, 1]])
# Two adjacent images, one longer than the window; and one at the end.
BLOCKS = torch.tensor([[-1, 0, 0, 1, 1, 1, 1, 1, 1, -1, -1, -1], [-1] * 7 + [4] * 5])
APART = torch.tensor([[0] * 3 + [-1] * 6 + [0] * 3] * 2)
IMAGES, SLIDING_OVERLAY = (
    masking_utils.blockwise_overlay(BLOCKS),
    masking_utils.sliding_window_overlay(4),
)
BY_IMAGE = {"or_mask_function": IMAGES, "and_mask_function": SLIDING_OVERLAY}
PLAIN, SLIDING = Rule(True, (-1, -1), None), Rule(True, (3, 0), None)
CHUNKED = Rule(True, (-1, -1), 5)


def first_four(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return kv < 4


@pytest.mark.parametrize(
    ("make", "options", "rule"),
    [
        ("create_causal_mask", {}, PLAIN),
        ("create_causal_mask", {"position_ids": ZIGZAG}, PLAIN),
        ("create_causal_mask", {"attention_mask": torch.ones(2, 12)}, PLAIN),
        ("create_sliding_window_causal_mask", {**WINDOW, "position_ids": ZIGZAG}, SLIDING),
        ("create_bidirectional_sliding_window_mask", WINDOW, Rule(False, (4, 4), None)),
        ("create_causal_mask", {"attention_mask": PADDING}, PLAIN),
        ("create_bidirectional_mask", {"attention_mask": PADDING}, Rule(False, (-1, -1), None)),
        ("create_sliding_window_causal_mask", WINDOW, SLIDING),
        ("create_chunked_causal_mask", CHUNKS, CHUNKED),
        ("create_causal_mask", {"block_sequence_ids": BLOCKS}, PLAIN),
        ("create_causal_mask", {**BY_IMAGE, "position_ids": ZIGZAG}, SLIDING),
        ("create_sliding_window_causal_mask", {**WINDOW, "block_sequence_ids": BLOCKS}, SLIDING),
        ("create_chunked_causal_mask", {**CHUNKS, "attention_mask": PADDING}, CHUNKED),
        ("create_causal_mask", {"attention_mask": LEFT}, PLAIN),
        ("create_bidirectional_mask", {"attention_mask": LEFT}, Rule(False, (-1, -1), None)),
        ("create_sliding_window_causal_mask", {**WINDOW, "attention_mask": LEFT}, SLIDING),
        ("create_chunked_causal_mask", {**CHUNKS, "attention_mask": LEFT}, CHUNKED),
    ],
)
def test_masks_are_those_of_transformers(make: str, options: dict[str, Any], rule: Rule) -> None:
    theirs = made_mask(make, "eager", **dict(options) | {"position_ids": None})[:, 0] == 0
    reported = made_mask(make, **dict(options))
    marks = (PADDING, LEFT, BLOCKS, IMAGES)
    needs_one = any(x is mark for x in options.values() for mark in marks)
    assert (reported is not None) == needs_one
    rows, beyond = (
        (reported.rows, reported.beyond_windows) if reported else ((((0, 12), ()),) * 2, False)
    )
    for row, one in zip(rows, theirs.expand(2, -1, -1), strict=True):
        seen, (first, end) = mask_of(12, row, rule, None, beyond).dense(), row[0]
        assert torch.equal(seen[first:end], one[first:end])
        assert not seen[:first].any() and not seen[end:].any()


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (
            "create_causal_mask",
            {"attention_mask": BETWEEN},
            "hides 2 of 24 .* between",
        ),
        ("create_causal_mask", {"block_sequence_ids": APART}, "not consecutive"),
        ("create_bidirectional_mask", {"or_mask_function": IMAGES}, "or_masks"),
        ("create_causal_mask", {"and_mask_function": IMAGES}, "blockwise"),
        (
            "create_causal_mask",
            {"and_mask_function": IMAGES, "block_sequence_ids": BLOCKS},
            "made of blockwise_overlay, or_masks",
        ),
        (
            "create_chunked_causal_mask",
            {"config": {"attention_chunk_size": 5, "layer_types": ["full_attention"] * 48}},
            "made of chunked_overlay",
        ),
        (
            "create_causal_mask",
            {"attention_mask": PADDING, "block_sequence_ids": BLOCKS},
            "attention_mask is not supported together with token_type_ids",
        ),
        ("create_causal_mask", {"or_mask_function": first_four}, "or_masks, tests.*first_four"),
        ("create_causal_mask", {"and_mask_function": first_four}, "first_four"),
    ],
)
def test_other_masks_are_refused(make: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        made_mask(make, **dict(options))


def test_under_compile_unions_and_padding_are_refused() -> None:
    union = masking_utils.or_masks(masking_utils.causal_mask_function, first_four)
    window = masking_utils.sliding_window_causal_mask_function(4)
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        assert read_mask(mask_function=window) is None
        with pytest.raises(NotImplementedError, match="or_mask"):
            read_mask(mask_function=union)
        with pytest.raises(NotImplementedError, match="custom functions"):
            read_mask(mask_function=window, use_vmap=True)
        with pytest.raises(NotImplementedError, match="leave it out"):
            read_mask(mask_function=window, attention_mask=torch.ones(2, 12))


def attend(config: dict[str, Any], mask: Any = None, ignore: Any = (), **options: Any) -> Any:
    """Calls the attention function as a module with this config does."""
    module = SimpleNamespace(config=SimpleNamespace(**config), is_causal=True, layer_idx=0)
    x = torch.zeros(1, 2, 6, 8)
    with register(ignore=ignore) as ring:
        return ring.attend(module, x, x, x, mask, **options)


LONGROPE = {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        ({"layer_types": ["indexed_attention"]}, {}, "type indexed_attention"),
        ({"layer_types": ["sliding_attention"]}, {}, "layer 0 has a sliding"),
        ({"sliding_window": 8}, {}, "layer 0 has a sliding window"),
        (LONGROPE, {}, "rope_type 'longrope'"),
        ({"patch_size": 2}, {}, "the patches of images cannot be sharded"),
        (
            {},
            {"mask": torch.ones(2, 1, 6, 6)},
            r"\(batch, seqlen\), got Tensor of shape \(2",
        ),
        ({}, {"output_router_logits": True}, "output_router_logits .*: the auxiliary loss"),
        ({}, {"dropout": 0.1}, "attention dropout must be 0"),
        ({}, {"position_bias": torch.zeros(1)}, "position_bias reached"),
        ({}, {"head_mask": torch.zeros(1)}, "heads cannot be masked"),
        ({}, {"cache": object()}, "a paged cache is not supported"),
        ({}, {"tilt": 0.5}, "tilt reached the attention: it is unknown"),
    ],
)
def test_what_attention_refuses(config: dict[str, Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        attend(config, **options)
    with pytest.raises(RuntimeError, match="no process group"):
        attend({})  # nothing else is wrong


def test_a_config_must_say_what_the_module_says() -> None:
    with pytest.raises(ValueError, match="config.is_causal is False, but"):
        attend({"is_causal": False})


def test_a_keyword_that_is_declared_may_reach_the_attention() -> None:
    with pytest.raises(RuntimeError, match="no process group"):
        attend({}, ignore=["tilt"], tilt=0.5)


def test_which_way_attention_looks() -> None:
    """Some models pass False for any single row; tests/distributed has configs and encoders."""
    module: Any = SimpleNamespace(is_causal=True, config=SimpleNamespace())
    calls = ((False, 6), (False, 1), (True, 1))
    assert [causal_of(module, *call) for call in calls] == [False, True, True]
    module.config.is_causal = False
    assert not causal_of(module, False, 1)


def test_the_model_of_a_cache_must_have_the_implementation() -> None:
    with register() as ring, pytest.raises(ValueError, match="set_attn_implementation"):
        ring.cache(make_model("llama", "sdpa"))
