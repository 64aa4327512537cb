"""Refusals of Hugging Face models on a split sequence, on every rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attn import SequenceLayout, shard_batch
from ring_attn.integrations.transformers import register
from ring_attn.integrations.transformers_cache import NOT_WITH_CACHE
from tests.distributed.pool import on_ranks
from tests.hf_models import make_batch, make_model
from tests.refusals import refused

pytestmark = pytest.mark.gloo  # nothing is sent

SEQLEN = 83
NUM_PROMPT = 37
PROMPT = make_batch(SEQLEN)["input_ids"][:, :NUM_PROMPT]


def run_wrong(case: str) -> None:
    """A call that must be refused on this rank; more of them: integration/test_transformers.py."""
    layout = SequenceLayout.zigzag(SEQLEN, dist.get_world_size())
    with register(layout="zigzag") as ring:
        model = make_model("llama", "ring_attn")
        part = shard_batch({"input_ids": make_batch(SEQLEN)["input_ids"]}, layout, dist.get_rank())
        options: dict[str, Any] = {**part, "sequence_layout": layout}
        rows = part["input_ids"].size(1)
        mask = torch.ones(2, rows, dtype=torch.int64)

        def prompt(of: Any = model, **more: Any) -> dict[str, Any]:
            return {"input_ids": PROMPT, "past_key_values": ring.cache(of), **more}

        if case in ("cut types", "cached types"):
            model, types = make_model("gemma3_images", "ring_attn"), torch.ones_like(mask)
            options["token_type_ids"] = types
            if case == "cached types":
                short = {"input_ids": PROMPT[:, :3], "token_type_ids": types[:, :3]}
                options = short | {"past_key_values": ring.cache(model)}
        elif case in ("padded documents", "other documents"):
            cuts = torch.tensor([0, 40, SEQLEN], dtype=torch.int32)
            options |= {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts}
            if case == "padded documents":
                options["attention_mask"] = make_batch(SEQLEN, padded=True)["attention_mask"]
            else:
                model = make_model("llama4", "ring_attn")
                options["cu_seq_lens_k"] = torch.tensor([0, 41, SEQLEN], dtype=torch.int32)
        elif case == "positions":
            del options["position_ids"]
        elif case == "other layout":
            options["sequence_layout"] = SequenceLayout.contiguous(SEQLEN, dist.get_world_size())
        elif case == "plain cache":
            options["past_key_values"] = model(**options, use_cache=True).past_key_values
        elif case == "documents":
            lens = torch.cat([torch.arange(40), torch.arange(SEQLEN - 40)])[None]
            options["position_ids"] = layout.shard(lens, dist.get_rank())
        elif case == "cache and layout":
            options["past_key_values"] = ring.cache(model)
        elif case == "padded prompts":
            whole = torch.ones_like(PROMPT)
            whole[0, :2] = 0
            cache = ring.cache(model)
            model.generate(PROMPT, attention_mask=whole, past_key_values=cache, max_new_tokens=2)
        elif case == "assisted":
            cache = ring.cache(model)
            model.generate(PROMPT[:1], past_key_values=cache, prompt_lookup_num_tokens=2)
        elif case == "failed before":
            options = prompt()
            with pytest.raises(NotImplementedError):
                model(**options, tilt=0.5)
        elif case in NOT_WITH_CACHE:
            options = prompt(**{case: PROMPT if case == "labels" else True})
        elif case == "token types":
            options = prompt(token_type_ids=torch.zeros(2, NUM_PROMPT))
        elif case == "changed in place":
            model(**options)
            options["position_ids"] += 1
        elif case == "cache of another":
            options = prompt(make_model("llama", "ring_attn"))
        model(**options)


REFUSALS = {
    "cut types": (ValueError, "must be those of the whole sequence, (2, 83), got (2, 4"),
    "cached types": (NotImplementedError, "images with a cache that is split over ranks"),
    "padded documents": (ValueError, "cu_seq_lens_q says where documents end"),
    "other documents": (ValueError, "cu_seq_lens_q and cu_seq_lens_k must be the same"),
    "positions": (ValueError, "must be those of its rows, ["),
    "other layout": (ValueError, "position_ids of rank "),
    "documents": (ValueError, "need cu_seq_lens_q"),
    "plain cache": (NotImplementedError, "a KV cache must be made by `Registration.cache"),
    "cache and layout": (ValueError, "sequence_layout must be left out"),
    "padded prompts": (NotImplementedError, "the prompts of a batch must have one length"),
    "assisted": (NotImplementedError, "cannot be cropped: assisted generation is not built"),
    "failed before": (RuntimeError, "a forward with this cache has failed"),
    **{name: (NotImplementedError, f"{name} with a KV cache") for name in NOT_WITH_CACHE},
    "token types": (NotImplementedError, "token_type_ids of shape (2, 37) seems to have"),
    "changed in place": (ValueError, "must be those of its rows, ["),
    "cache of another": (RuntimeError, "this cache belongs to another model"),
}


@on_ranks(2)
def test_what_is_not_honoured_is_refused() -> None:
    for case, (error, text) in REFUSALS.items():
        with refused(error, text):
            run_wrong(case)


@on_ranks(2)
def test_a_rank_alone_with_a_part_of_the_padding_is_named() -> None:
    rank, layout = dist.get_rank(), SequenceLayout.contiguous(SEQLEN, 2)
    mask = torch.ones(2, SEQLEN, dtype=torch.int64)
    mask[0, -2:] = 0
    whole = "of the whole sequence, (2, 83), got (2, 41): give every rank all of them, as "
    told = "rank 1 raised ValueError: attention_mask and token_type_ids must be"
    if rank == 1:
        told = f"{whole}ring_attn.shard_batch does with attention_mask"
    with register(), mock.patch.dict("os.environ", RING_ATTN_DEBUG="1"):
        model = make_model("llama", "ring_attn")
        part = shard_batch({"input_ids": make_batch(SEQLEN)["input_ids"]}, layout, rank)
        with refused(ValueError, told):
            model(**part, attention_mask=layout.shard(mask, rank), sequence_layout=layout)
