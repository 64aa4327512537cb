"""Hugging Face models generate on 2 and 3 ranks, from a split cache, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ring_attn.integrations.transformers import register
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close
from tests.distributed.pool import Pools, on_ranks
from tests.distributed.test_transformers import NUM_PROMPT, SEQLEN, both, make_prompt
from tests.hf_models import CONFIGS, HYBRIDS, make_batch, make_model, yardstick
from tests.refusals import refused

NUM_TOKENS = 18

# Noisy runs of a generation, which takes longer than one forward.
NUM_NOISY = 8
Generated = tuple[Tensor, Tensor, tuple[int, ...]]


def generate(model: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Tokens, and the logits from which they were chosen."""
    model.generation_config.eos_token_id = None
    out = model.generate(
        make_prompt(),
        max_new_tokens=NUM_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
        **{"do_sample": False} | options,
    )
    return out.sequences, torch.stack(out.logits, 1)


def generate_sharded(family: str, kind: str, options: dict[str, Any]) -> Generated:
    """Generates from a split prompt, with a cache that grows on both ranks."""
    with register(layout=kind) as ring:
        model = make_model(family, "ring_attn")
        cache = ring.cache(model, block=4)
        if options.get("do_sample"):
            torch.manual_seed(3)
        name = "cache_params" if family in WITHOUT_ATTENTION else "past_key_values"
        tokens, logits = generate(model, **{name: cache}, **options)
        held = [
            x for layer in cache.layers for x in (getattr(layer, "keys", None),) if x is not None
        ]
        assert {x.size(2) for x in held} <= {cache.layout.shard_len(cache.rank)}
        assert bool(held) != (family in WITHOUT_ATTENTION)
        return tokens, logits, cache.layout.shard_lens


WITHOUT_ATTENTION = ("mamba2", "falcon_mamba")
GENERATING = ("lfm2",)  # others are slow
CHUNKED = {"prefill_chunk_size": 15}  # the last chunk has 7 rows


@pytest.mark.parametrize(
    ("family", "kind", "options", "world_size"),
    [
        *((family, "zigzag", {}, 2) for family in CONFIGS if family != "bert"),
        *((family, "zigzag", CHUNKED, 2) for family in ("llama", "llama4")),
        *(("llama", kind, {}, 2) for kind in ("contiguous", "striped")),
        ("llama", "zigzag", {"do_sample": True, "top_k": 50}, 2),
        *((family, "zigzag", {}, 3) for family in ("qwen2", "llama4", "lfm2")),
        pytest.param("qwen3_next", "contiguous", CHUNKED, 2, marks=pytest.mark.slow),
        *(
            pytest.param(
                family, "zigzag", {}, 2, marks=() if family in GENERATING else pytest.mark.slow
            )
            for family in HYBRIDS
            # One has a cache of its own, one repeats a token.
            if family not in ("minimax", "falcon_mamba")
        ),
    ],
)
@pytest.mark.gloo
def test_generation(
    ranks: Pools, family: str, kind: str, options: dict[str, Any], world_size: int
) -> None:
    model, got = yardstick(family), ranks(world_size).run(generate_sharded, family, kind, options)
    if options.get("do_sample"):
        torch.manual_seed(3)
    tokens, _ = generate(model, **options)
    assert len(tokens[:, NUM_PROMPT:].unique()) > 5, "a text of few tokens would hide a mistake"
    noisy = None
    if family in HYBRIDS:
        # Token by token a recurrence is another algorithm, with other errors, than over a prompt.
        noisy = [logits for _, logits in noisy_runs(lambda: generate(model, **options), NUM_NOISY)]
    oracle, of_prompts = both(
        model, lambda model: model(tokens[:, :-1]).logits[:, NUM_PROMPT - 1 :]
    )
    for sequences, logits, lens in got:
        assert torch.equal(sequences, tokens)
        assert_close("logits", logits, oracle, noisy or of_prompts)
        assert torch.equal(logits, got[0][1])
        assert sum(lens) == NUM_PROMPT + NUM_TOKENS - 1 and max(lens) - min(lens) <= 4


def in_two_turns(model: Any, **options: Any) -> Tensor:
    """Generates a text, appends more prompt, and generates again, with one cache."""
    options |= {"do_sample": False, "max_new_tokens": 5}
    first = model.generate(make_prompt(), **options)
    more = make_batch(SEQLEN)["input_ids"][:, NUM_PROMPT : NUM_PROMPT + 9]
    return model.generate(torch.cat([first, more], 1), **options)


def beams(model: Any, **options: Any) -> Tensor:
    """Generates by a search with three beams, which reorders the cache."""
    return model.generate(make_prompt(), max_new_tokens=9, num_beams=3, do_sample=False, **options)


def sharded(run: Callable[..., Tensor], family: str) -> Tensor:
    """Runs a copy of a model that already has another cache, and hooks."""
    with register(layout="zigzag") as ring:
        model = copy.deepcopy(make_model(family, "ring_attn"))
        ring.cache(model)
        model = copy.deepcopy(model)
        model.generation_config.eos_token_id = None
        return run(model, past_key_values=ring.cache(model))


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("run", [in_two_turns, beams])
@pytest.mark.gloo
def test_a_cache_goes_on_and_is_reordered(
    ranks: Pools, run: Callable[..., Tensor], family: str
) -> None:
    model = yardstick(family)
    model.generation_config.eos_token_id = None
    expected = run(model, past_key_values=transformers.DynamicCache(config=model.config))
    assert all(torch.equal(got, expected) for got in ranks(2).run(sharded, run, family))


@on_ranks(2)
def test_a_cache_of_transformers_is_refused() -> None:
    """Every rank would read the whole prompt as its own rows."""
    with register(layout="zigzag"):
        model = make_model("llama", "ring_attn")
        with refused(ValueError, "DynamicCache|pass past_key_values=ring.cache(model)"):
            model.generate(make_prompt(), max_new_tokens=2, do_sample=False)
