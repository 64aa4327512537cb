"""Generation by Hugging Face's own loop from a KV cache that is split over ranks.

    prompt   all ranks give all of it; each computes and keeps its rows      ring_attention
    token    all ranks compute it; one of them keeps its keys and values     tree_decode
    logits   those that the loop asked for, from the rank that has them      one broadcast

Hooks around the model's forward cut what comes in and complete what goes out, so that the loop,
with its stopping criteria, processors and beams, sees the whole sequence on every rank.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn import check
from ring_attn.api import unshard
from ring_attn.call import Group
from ring_attn.core.layout import SequenceLayout
from ring_attn.decode import next_rank

# From so many new tokens a rank on they are split: so every rank has some, in zigzag two chunks.
ROWS_PER_RANK = 2

# Of what a forward takes, what is cut into rows and along which dim; other tensors are refused.
SEQUENCE_DIMS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "cache_position": 0}

# Other values with rows of the whole sequence in what a forward gives.
NOT_COMPLETED = ("output_hidden_states", "output_attentions")


@dataclass(frozen=True)
class CacheStep:
    """A forward with a cache: the rows that each rank computes, and those that it then caches.

    Attributes:
        cache: with the new rows.
        chunk: how the new rows are split; None where every rank computes all of them.
        keep: logits of how many of the last rows are wanted; 0 is all.
    """

    cache: SequenceLayout
    chunk: SequenceLayout | None
    keep: int = 0

    @property
    def layouts(self) -> tuple[SequenceLayout, SequenceLayout]:
        assert self.chunk is not None, "queries that are not split have no layout"
        return self.chunk, self.cache

    def num_new(self, rows: int) -> int:
        """New rows of all ranks, of which a rank has so many."""
        return rows if self.chunk is None else self.chunk.seqlen

    def position_ids(self, rank: int, rows: int) -> Tensor:
        """The global positions of the rows that a rank computes, `rows` where it computes all."""
        past = self.cache.seqlen - self.num_new(rows)
        of_rank = torch.arange(rows) if self.chunk is None else self.chunk.position_ids(rank)
        return past + of_rank


def make_cache(model: Any, *, group: Group, kind: str, block: int, keyword: str) -> Any:
    """An empty cache, and hooks on the model that serve it; see `Registration.cache`.

    Args:
        model: whose forward is called.
        group: the ranks.
        kind: of the layout of prompts.
        block: new tokens that a rank takes at a time.
        keyword: of the forward that brings a step to the attention.
    """
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    parameters = inspect.signature(model.forward).parameters.values()
    if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in parameters):
        raise TypeError(
            f"{type(model).__name__}.forward hands no keywords on to its attention, which needs "
            f"{keyword}"
        )
    cache_class, _ = _classes()
    cache = cache_class(check.check_group(group), kind, block, keyword)
    if _before not in model._forward_pre_hooks.values():  # a copy of a model has its hooks, too
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True)
    return cache


@lru_cache(maxsize=1)
def _classes() -> tuple[type[Any], type[Any]]:
    """The classes of a cache and of its layers, made late: their bases are in transformers."""
    from transformers.cache_utils import Cache, DynamicLayer

    class RingLayer(DynamicLayer):
        """This rank's keys and values of one layer, (batch, nheads_kv, rows, headdim) each."""

        def __init__(self, cache: RingCache) -> None:
            super().__init__()
            self._cache = weakref.ref(cache)

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            """Appends the new rows if this rank keeps them; returns all rows that it has."""
            cache = self._cache()
            assert cache is not None, "a layer does not outlive its cache"
            if not cache.keeps:
                key_states, value_states = key_states[:, :, :0], value_states[:, :, :0]
            return super().update(key_states, value_states, *args, **kwargs)

        def get_seq_length(self, *args: Any) -> int:
            """Length of the whole sequence, without the rows that this forward adds."""
            cache = self._cache()
            return 0 if cache is None else cache.num_seen

        def get_mask_sizes(self, new: int | Tensor, *args: Any) -> tuple[int, int]:
            """(keys, offset) of a mask over the whole sequence, which nobody makes."""
            return self.get_seq_length() + _count(new), 0

        is_croppable = False

        def crop(self, *args: Any) -> None:
            """Refused: rows would have to go on several ranks."""
            raise NotImplementedError(
                "a cache that is split over ranks cannot be cropped: assisted generation is not "
                "built"
            )

    class RingCache(Cache):
        """Keys and values of all layers, of which this rank has the rows that `layout` says."""

        def __init__(self, group: dist.ProcessGroup, kind: str, block: int, keyword: str) -> None:
            super().__init__(layers=[])
            self.group, self.kind, self.block, self.keyword = group, kind, block, keyword
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
            self.layout = SequenceLayout.from_name(kind, 0, self.world_size)
            self.num_seen = 0
            self.keeps = False

        def begin(self, rows: int, keep: int) -> CacheStep:
            """Decides who computes and who keeps so many new rows."""
            if self.num_seen != self.layout.seqlen:
                raise RuntimeError("a forward with this cache has failed: start with an empty one")
            if rows >= ROWS_PER_RANK * self.world_size:
                chunk = SequenceLayout.from_name(self.kind, rows, self.world_size)
                self.layout, self.keeps = self.layout.followed_by(chunk), True
                return CacheStep(self.layout, chunk, keep)
            taker = next_rank(self.layout, block=self.block)
            self.layout, self.keeps = self.layout.appended(taker, rows), taker == self.rank
            return CacheStep(self.layout, None, keep)

        def end(self) -> None:
            """Ends a forward that has been through all layers."""
            self.num_seen = self.layout.seqlen

        def update(
            self,
            key_states: Tensor,
            value_states: Tensor,
            layer_idx: int,
            *args: Any,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor]:
            """Updates as transformers' method does; only within a forward of the cache's model."""
            if self.num_seen == self.layout.seqlen:
                raise RuntimeError(
                    "this cache belongs to another model: make one by Registration.cache(model)"
                )
            while len(self.layers) <= layer_idx:
                self.layers.append(RingLayer(self))
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

        def get_seq_length(self, layer_idx: int = 0) -> int:
            """Length of the whole sequence, without the rows that this forward adds."""
            return self.num_seen

        def get_mask_sizes(self, new: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
            """(keys, offset) of a mask over the whole sequence, which nobody makes."""
            return self.num_seen + _count(new), 0

        def reset(self) -> None:
            self.layers.clear()
            self.layout = SequenceLayout.from_name(self.kind, 0, self.world_size)
            self.num_seen = 0

    return RingCache, RingLayer


def _count(new: int | Tensor) -> int:
    """New rows, which releases of transformers tell by number or by position."""
    return new.size(0) if isinstance(new, Tensor) else new


def _before(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Gives the rank its rows of what the loop passes, and the attention its step."""
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, _classes()[0]):
        return None
    kwargs = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
    _check_forward(kwargs, cache.keyword)
    tokens = _tokens(kwargs)
    rows = tokens.size(1)
    wanted = kwargs.get("logits_to_keep")
    step = cache.begin(rows, _checked_keep(wanted, rows))
    if kwargs.get("position_ids") is None:
        start = step.cache.seqlen - rows
        positions = torch.arange(start, step.cache.seqlen, device=tokens.device)
        kwargs["position_ids"] = positions[None]
    if step.chunk is not None:
        _check_cut(kwargs, rows)
        for name, dim in SEQUENCE_DIMS.items():
            if kwargs.get(name) is not None:
                kwargs[name] = step.chunk.shard(kwargs[name], cache.rank, dim)
        if wanted is not None and step.keep != 1:
            kwargs["logits_to_keep"] = 0
    kwargs["attention_mask"] = None
    kwargs[cache.keyword] = step
    return (), kwargs


def _after(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Completes the logits, and makes them the same bits on all ranks."""
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, _classes()[0]):
        return None
    cache.end()
    step: CacheStep = kwargs[cache.keyword]
    output["logits"] = _completed(output["logits"], step, cache)
    return output


def _completed(logits: Tensor, step: CacheStep, cache: Any) -> Tensor:
    """(batch, rows or less, vocab_size) of the whole chunk on every rank, or of its end."""
    if step.chunk is not None and step.keep != 1:
        whole = unshard(logits, step.chunk, group=cache.group)
        return whole[:, -step.keep :]
    # All ranks compute what is not split, from the same inputs. Were one to round otherwise its
    # tokens would be others, and the ranks no longer in one text.
    owner = 0 if step.chunk is None else _owner_of_last(step.chunk)
    logits = logits.detach().contiguous()
    # As bytes: gloo has no broadcast of every dtype.
    dist.broadcast(logits.view(torch.uint8), group=cache.group, group_src=owner)
    return logits


def _owner_of_last(layout: SequenceLayout) -> int:
    """The rank whose last row is the last position."""
    ends = [layout.segments(rank)[-1] for rank in range(layout.world_size)]
    lasts = [s.start + (s.length - 1) * s.stride for s in ends]
    return lasts.index(layout.seqlen - 1)


def _checked_keep(wanted: object, rows: int) -> int:
    """`logits_to_keep` as a number from 0 to rows."""
    if wanted is None:
        return 0
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0:
        raise NotImplementedError(
            f"logits_to_keep must be a number of rows where the cache is split, got {wanted!r}"
        )
    return min(wanted, rows)


def _tokens(kwargs: dict[str, Any]) -> Tensor:
    """Ids or embeddings, (batch, rows, ...)."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(kwargs.get(name), Tensor):
            return kwargs[name]
    raise ValueError("a forward with a cache needs input_ids or inputs_embeds")


def _check_forward(kwargs: dict[str, Any], keyword: str) -> None:
    """Refuses arguments of a forward that a split cache cannot honour."""
    if kwargs.get(keyword) is not None:
        raise ValueError(f"{keyword} must be left out: the cache knows the layout")
    if kwargs.get("use_cache") is False:
        raise ValueError("use_cache=False contradicts the cache that is passed")
    if kwargs.get("labels") is not None:
        raise NotImplementedError("labels with a KV cache: train without a cache")
    if kwargs.get("cu_seq_lens_q") is not None or kwargs.get("cu_seq_lens_k") is not None:
        raise NotImplementedError("cu_seq_lens_q with a KV cache: a cache holds one document")
    for name in NOT_COMPLETED:
        if kwargs.get(name):
            raise NotImplementedError(
                f"{name}: every rank has those of its own rows only while the cache is split"
            )
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all())):
        raise NotImplementedError(
            "attention_mask hides tokens: padding is not built, so the prompts of a batch must "
            "have one length; generate from each length by itself"
        )


def _check_cut(kwargs: dict[str, Any], rows: int) -> None:
    """Refuses other arguments with a row for each token, which would have to be cut too."""
    known = {*SEQUENCE_DIMS, "attention_mask", "past_key_values"}
    for name, value in kwargs.items():
        if name not in known and isinstance(value, Tensor) and rows in value.shape[1:]:
            raise NotImplementedError(
                f"{name} of shape {tuple(value.shape)} seems to have a value for each of {rows} "
                "tokens: it is not split over the ranks"
            )
