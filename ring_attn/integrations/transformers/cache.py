"""Generation by Hugging Face's own loop from a KV cache that is split over ranks.

    prompt   all ranks pass all of it; each computes and keeps its rows     ring_attention
    token    all ranks compute it; one rank keeps its keys and values       tree_decode
    logits   the requested rows, from the rank that has them                one broadcast
    states   of recurrent layers: whole on every rank, from the prompt's    one broadcast a layer
             last row on; all ranks compute all later rows

Hooks around the model's forward cut its inputs and complete its logits, so that the loop, with its
stopping criteria, processors and beams, sees the whole sequence on every rank.
"""

from __future__ import annotations

import inspect
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ring_attn.core.layout import rank_of_last_row
from ring_attn.integrations.transformers.cache_step import CacheStep
from ring_attn.integrations.transformers.masks import tokens_of
from ring_attn.integrations.transformers.models import cache_of
from ring_attn.integrations.transformers.untyped import Cache, Model, Value
from ring_attn.models.batch import unshard
from ring_attn.transport import groups
from ring_attn.transport.groups import Group

# Positional arguments and keywords of a model's forward.
Values: TypeAlias = tuple[Value, ...]
Arguments: TypeAlias = dict[str, Value]

# The keyword of a model's forward that passes a layout, or a cache's step, to the attention.
LAYOUT = "sequence_layout"

# Tensors of a forward that are split, and their sequence dims; other tensors are refused.
SEQUENCE_DIMS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "cache_position": 0}

# Arguments of a forward that do not go with a cache, and why.
OWN_ROWS = "every rank has only its own rows"
NOT_WITH_CACHE = {
    "labels": "train without a cache",
    "cu_seq_lens_q": "a cache holds one document",
    "cu_seq_lens_k": "a cache holds one document",
    "output_hidden_states": OWN_ROWS,
    "output_attentions": OWN_ROWS,
}


def make_cache(model: Model, *, group: Group, kind: str, block: int) -> Cache:
    """Make an empty cache, and hook the model; see `Registration.cache`.

    `kind` names the layout of prompts.
    """
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    parameters = inspect.signature(model.forward).parameters.values()
    if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
        raise TypeError(
            f"{type(model).__name__}.forward passes no keywords on to its attention, which needs "
            f"{LAYOUT}"
        )
    # Imported late, as its base class needs transformers.
    from ring_attn.integrations.transformers.ring_cache import RingCache

    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    cache = RingCache(groups.check_group(group), kind, block, tuple(types))
    if _before not in model._forward_pre_hooks.values():  # copies of models have hooks already
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True)
    return cache


def _is_ring_cache(cache: object) -> bool:
    # Imported late, as its base class needs transformers.
    from ring_attn.integrations.transformers.ring_cache import RingCache

    return isinstance(cache, RingCache)


def _before(model: nn.Module, args: Values, kwargs: Arguments) -> tuple[Values, Arguments] | None:
    """Cut the loop's arguments to this rank's rows, and add the step for the attention."""
    cache = cache_of(kwargs)
    if not _is_ring_cache(cache):
        return None
    kwargs = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
    _check_forward(kwargs)
    tokens = tokens_of(kwargs)
    rows = tokens.size(1)
    keep = kwargs.get("logits_to_keep")
    step = cache.begin(rows, _checked_keep(keep, rows))
    if kwargs.get("position_ids") is None:
        start = step.cache.seqlen - rows
        positions = torch.arange(start, step.cache.seqlen, device=tokens.device)
        kwargs["position_ids"] = positions[None]
    if step.chunk is not None:
        _check_cut(kwargs, rows)
        for name, dim in SEQUENCE_DIMS.items():
            if kwargs.get(name) is not None:
                kwargs[name] = step.chunk.shard(kwargs[name], cache.rank, dim)
        if keep is not None and step.keep != 1:
            kwargs["logits_to_keep"] = 0
    kwargs["attention_mask"] = None
    kwargs[LAYOUT] = step
    return (), kwargs


def _after(model: nn.Module, args: Values, kwargs: Arguments, output: Value) -> Value:
    """Complete the logits, with the same bits on all ranks."""
    cache = cache_of(kwargs)
    if not _is_ring_cache(cache):
        return None
    cache.end()
    step: CacheStep = kwargs[LAYOUT]
    output["logits"] = _completed(output["logits"], step, cache)
    return output


def _completed(logits: Tensor, step: CacheStep, cache: Cache) -> Tensor:
    """Return the logits (batch, rows or fewer, vocab_size) of the requested rows.

    They are the same on every rank.
    """
    if step.chunk is not None and step.keep != 1:
        whole = unshard(logits, step.chunk, group=cache.group)
        return whole[:, -step.keep :]
    # All ranks compute rows that are not split. If one rounded differently, its tokens could
    # differ, and the ranks would continue different texts.
    logits = logits.detach().contiguous()
    owner = 0 if step.chunk is None else rank_of_last_row(step.chunk)
    groups.from_owner(logits, cache.group, owner)
    return logits


def _checked_keep(keep: object, rows: int) -> int:
    """Return `logits_to_keep` as a number from 0 to rows."""
    if keep is None:
        return 0
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise NotImplementedError(
            f"logits_to_keep must be a number of rows if the cache is split, got {keep!r}"
        )
    return min(keep, rows)


def _check_forward(kwargs: Arguments) -> None:
    if kwargs.get(LAYOUT) is not None:
        raise ValueError(f"{LAYOUT} must be left out: the cache knows the layout")
    if kwargs.get("use_cache") is False:
        raise ValueError("use_cache=False contradicts the cache that is passed")
    for name, reason in NOT_WITH_CACHE.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotImplementedError(f"{name} with a KV cache that is split over ranks: {reason}")
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all())):
        raise NotImplementedError(
            "attention_mask hides tokens: padding is not supported, so the prompts of a batch must "
            "have one length; generate from each length by itself"
        )


def _check_cut(kwargs: Arguments, rows: int) -> None:
    """Refuse unknown arguments with a row per token, which would need splitting too."""
    known = {*SEQUENCE_DIMS, "attention_mask"}
    for name, value in kwargs.items():
        if name not in known and isinstance(value, Tensor) and rows in value.shape[1:]:
            raise NotImplementedError(
                f"{name} of shape {tuple(value.shape)} seems to have a value for each of {rows} "
                "tokens: it is not split over the ranks"
            )
