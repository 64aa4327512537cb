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
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn.core.layout import SequenceLayout
from ring_attn.decoding.call import next_rank
from ring_attn.integrations.transformers.masks import tokens_of
from ring_attn.integrations.transformers.models import ALONE_TYPES, RECURRENT_TYPES, cache_of
from ring_attn.models.batch import unshard
from ring_attn.sequence.runs import last_run
from ring_attn.transport import groups
from ring_attn.transport.groups import Group

# The keyword of a model's forward that passes a layout, or a cache's step, to the attention.
LAYOUT = "sequence_layout"

# Fewest new tokens per rank to split them: so every rank gets some, in zigzag two chunks.
ROWS_PER_RANK = 2

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


@dataclass(frozen=True)
class CacheStep:
    """A forward: the rows that each rank computes, and the rows that it then holds.

    Without a cache both are the same.

    Attributes:
        cache: layout of all rows with the new ones.
        chunk: layout of the new rows; None if every rank computes all of them.
        keep: number of last rows whose logits are requested; 0 is all.
    """

    cache: SequenceLayout
    chunk: SequenceLayout | None
    keep: int = 0

    @property
    def layouts(self) -> tuple[SequenceLayout, SequenceLayout]:
        assert self.chunk is not None, "queries that are not split have no layout"
        return self.chunk, self.cache

    def num_new(self, rows: int) -> int:
        return rows if self.chunk is None else self.chunk.seqlen

    def position_ids(self, rank: int, rows: int) -> Tensor:
        """Global positions of the `rows` rows that a rank computes."""
        past = self.cache.seqlen - self.num_new(rows)
        of_rank = torch.arange(rows) if self.chunk is None else self.chunk.position_ids(rank)
        return past + of_rank


def make_cache(model: Any, *, group: Group, kind: str, block: int) -> Any:
    """Makes an empty cache, and hooks the model; see `Registration.cache`.

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
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    cache = _cache_class()(groups.check_group(group), kind, block, tuple(types))
    if _before not in model._forward_pre_hooks.values():  # copies of models have hooks already
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True)
    return cache


@lru_cache(maxsize=1)
def _cache_class() -> Any:
    """The class of a cache, made late as its base needs transformers."""
    from transformers.cache_utils import (
        Cache,
        DynamicLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionLayer,
    )

    with_states = dict.fromkeys(RECURRENT_TYPES, LinearAttentionAndFullAttentionLayer)
    with_states |= dict.fromkeys(ALONE_TYPES, LinearAttentionLayer)

    class RingCache(Cache):
        """This rank's rows of the keys and values of all layers, by `layout`; whole states.

        Attributes:
            step: the forward under way, or None.
            keeps: whether the rank keeps rows of that forward.
            cut: layout of those rows, of which all ranks compute all, or None.
        """

        is_croppable = False
        layout: SequenceLayout
        num_seen: int
        step: CacheStep | None
        keeps: bool
        cut: SequenceLayout | None

        def __init__(
            self, group: dist.ProcessGroup, kind: str, block: int, types: tuple[str, ...]
        ) -> None:
            super().__init__(layers=[])
            self.group, self.kind, self.block = group, kind, block
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
            self.types, self.has_states = types, bool(with_states.keys() & {*types})
            self.reset()

        def begin(self, rows: int, keep: int) -> CacheStep:
            """Assigns `rows` new rows to the ranks that compute and keep them."""
            if self.num_seen != self.layout.seqlen:
                raise RuntimeError("a forward with this cache has failed: start with an empty one")
            self.cut = chunk = None
            if rows >= ROWS_PER_RANK * self.world_size:
                chunk = SequenceLayout.from_name(self.kind, rows, self.world_size)
                self.layout, self.keeps = self.layout.followed_by(chunk), True
                if self.has_states and self.num_seen:
                    self.cut, chunk = chunk, None
            else:
                taker = next_rank(self.layout, block=self.block)
                self.layout, self.keeps = self.layout.appended(taker, rows), taker == self.rank
            self.step = step = CacheStep(self.layout, chunk, keep)
            return step

        def end(self) -> None:
            self.num_seen, self.step = self.layout.seqlen, None

        def under_way(self) -> CacheStep:
            if self.step is None:
                raise RuntimeError(
                    "this cache belongs to another model: make one by Registration.cache(model)"
                )
            return self.step

        def update(
            self,
            key_states: Tensor,
            value_states: Tensor,
            layer_idx: int,
            *args: Any,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor]:
            """Appends new rows if this rank keeps them; only in a forward of the cache's model."""
            self.under_way()
            while len(self.layers) <= layer_idx:
                self.layers.append(DynamicLayer())
            if self.cut is not None:
                key_states, value_states = (
                    self.cut.shard(x, self.rank, 2) for x in (key_states, value_states)
                )
            elif not self.keeps:
                key_states, value_states = key_states[:, :, :0], value_states[:, :, :0]
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

        def update_conv_state(
            self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
        ) -> Tensor:
            """Keeps the rows before the next one; returns the rows that a convolution needs.

            Of split rows these are the rank's own, as the exchange is part of their convolution.
            """
            chunk, keep = self.under_way().chunk, super().update_conv_state
            if chunk is None or self.world_size == 1:
                return keep(conv_states, layer_idx, state_idx, **kwargs)
            width = kwargs.get("conv_kernel_size") or conv_states.size(-1)
            first = max(0, chunk.seqlen - width)
            positions = chunk.position_ids(self.rank, conv_states.device)
            last = conv_states.new_zeros(*conv_states.shape[:-1], chunk.seqlen - first)
            last[..., positions[positions >= first] - first] = conv_states[..., positions >= first]
            # As bytes, to which one rank each contributes: gloo cannot sum every dtype.
            dist.all_reduce(last.view(torch.uint8), group=self.group)
            keep(last, layer_idx, state_idx, **kwargs)
            return conv_states

        def get_seq_length(self, layer_idx: int = 0) -> int:
            """Length of the whole sequence, without the rows that this forward adds."""
            return self.num_seen

        def get_mask_sizes(self, new: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
            """(keys, offset) of a mask over the whole sequence, which is never made.

            Releases of transformers pass a number of new rows, or their positions.
            """
            return self.num_seen + (new.size(0) if isinstance(new, Tensor) else new), 0

        def crop(self, *args: Any) -> None:
            """Raises: several ranks would have to drop rows."""
            raise NotImplementedError(
                "a cache that is split over ranks cannot be cropped: assisted generation is not "
                "built"
            )

        def reset(self) -> None:
            self.layers.clear()
            if self.has_states:
                self.layers += [with_states.get(one, DynamicLayer)() for one in self.types]
            self.layout = SequenceLayout.from_name(self.kind, 0, self.world_size)
            self.num_seen, self.step, self.keeps, self.cut = 0, None, False, None

    return RingCache


def _before(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Cuts the loop's arguments to this rank's rows, and adds the step for the attention."""
    cache = cache_of(kwargs)
    if not isinstance(cache, _cache_class()):
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


def _after(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Completes the logits, with the same bits on all ranks."""
    cache = cache_of(kwargs)
    if not isinstance(cache, _cache_class()):
        return None
    cache.end()
    step: CacheStep = kwargs[LAYOUT]
    output["logits"] = _completed(output["logits"], step, cache)
    return output


def _completed(logits: Tensor, step: CacheStep, cache: Any) -> Tensor:
    """Logits (batch, rows or fewer, vocab_size) of the requested rows, the same on every rank."""
    if step.chunk is not None and step.keep != 1:
        whole = unshard(logits, step.chunk, group=cache.group)
        return whole[:, -step.keep :]
    # All ranks compute rows that are not split. If one rounded differently, its tokens could
    # differ, and the ranks would continue different texts.
    logits = logits.detach().contiguous()
    groups.from_owner(logits, cache.group, 0 if step.chunk is None else last_run(step.chunk)[0])
    return logits


def _checked_keep(keep: object, rows: int) -> int:
    """`logits_to_keep` as a number from 0 to rows."""
    if keep is None:
        return 0
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise NotImplementedError(
            f"logits_to_keep must be a number of rows if the cache is split, got {keep!r}"
        )
    return min(keep, rows)


def _check_forward(kwargs: dict[str, Any]) -> None:
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
            "attention_mask hides tokens: padding is not built, so the prompts of a batch must "
            "have one length; generate from each length by itself"
        )


def _check_cut(kwargs: dict[str, Any], rows: int) -> None:
    """Refuses unknown arguments with a row per token, which would need splitting too."""
    known = {*SEQUENCE_DIMS, "attention_mask"}
    for name, value in kwargs.items():
        if name not in known and isinstance(value, Tensor) and rows in value.shape[1:]:
            raise NotImplementedError(
                f"{name} of shape {tuple(value.shape)} seems to have a value for each of {rows} "
                "tokens: it is not split over the ranks"
            )
