"""Arguments of the operators: tensors, numbers of layouts, and the options as text."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ring_attn.call import Documents, Options
from ring_attn.checks import attention as checks
from ring_attn.core.layout import Layouts, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.strategy import Strategy, resolve_strategy
from ring_attn.torch_private import group_by_name

# `SequenceLayout.numbers` of the layouts of queries and of keys.
LayoutNumbers = tuple[tuple[int, ...], tuple[int, ...]]


class Request(NamedTuple):
    """The part of an operator's arguments that does not depend on tensors."""

    group: dist.ProcessGroup
    options: Options
    strategy: Strategy
    rank: int
    world_size: int


class Arguments(NamedTuple):
    """Arguments of the operators other than q, k, v and sinks, in the order of their schema.

    A compiler may treat the numbers of layouts as symbols.
    """

    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None  # only if it differs
    mask: Tensor | None  # `Mask.tensor` of a mask passed by value
    layout_q: Sequence[int]  # `SequenceLayout.numbers`; empty if the options name the layout
    layout_k: Sequence[int]
    text: str  # of the options

    def read(self) -> Request:
        """Return the group, the options, and the strategy with its degrees."""
        options = Options.from_text(self.text)
        group = group_by_name(options.group)
        world_size = group.size()
        return Request(
            group=group,
            options=options,
            strategy=strategy_of(self.text, world_size),
            rank=group.rank(),
            world_size=world_size,
        )

    @property
    def needs_even_rows(self) -> bool:
        """Whether every rank must have the same number of rows, which then gives the length."""
        return not self.layout_q and self.cu_seqlens is None and self.mask is None

    def documents(self) -> Documents:
        """Return the boundaries of the queries' and the keys' documents, checked, on the host."""
        if self.cu_seqlens is None and self.cu_seqlens_k is None:
            return None, None
        cu_q = checks.check_cu_seqlens("cu_seqlens", self.cu_seqlens)
        cu_k = checks.check_cu_seqlens("cu_seqlens_k", self.cu_seqlens_k)
        checks.check_documents(cu_q, cu_k)
        return cu_q, cu_q if cu_k is None else cu_k

    def given_mask(self) -> Mask | None:
        """Return the mask passed by value, if any; read its slices once for each tensor."""
        if self.mask is None:
            return None
        if self.mask not in _masks:
            _masks[self.mask] = Mask.from_tensor(self.mask)
        mask: Mask = _masks[self.mask]
        return mask

    @property
    def numbers(self) -> LayoutNumbers:
        return tuple(self.layout_q), tuple(self.layout_k)


# tensor -> its mask; does not keep the tensor alive.
_masks: MutableMapping[Tensor, Mask] = WeakTensorKeyDictionary()


@lru_cache(maxsize=1024)
def strategy_of(text: str, world_size: int) -> Strategy:
    """Return the strategy of the options' text, with its degrees checked against the ranks."""
    options = Options.from_text(text)
    return resolve_strategy(options.strategy, world_size, options.mesh_shape)


def layouts_and_mask(
    options: Options,
    rows: tuple[int, int],
    documents: Documents,
    given_mask: Mask | None,
    numbers: LayoutNumbers,
    rank: int,
    world_size: int,
) -> tuple[Layouts, Mask]:
    """Return the layouts and the mask of a call, checked against each other.

    Args:
        options: the options of the call.
        rows: this rank's rows of q and kv.
        documents: boundaries of the documents of queries and keys, if there are any.
        given_mask: the mask that was passed by value, if any.
        numbers: `SequenceLayout.numbers` of both layouts, if they were passed by value.
        rank: this rank.
        world_size: number of ranks.
    """
    cu_q, cu_k = documents
    totals = (cu_q[-1] if cu_q else None, cu_k[-1] if cu_k else None)
    if given_mask is not None:
        totals = given_mask.seqlen_q, given_mask.seqlen_k
    layout: object = options.layout
    if options.layout is None:
        numbers_q, numbers_k = numbers
        layout = SequenceLayout.from_numbers(numbers_q), SequenceLayout.from_numbers(numbers_k)
    layouts = checks.resolve_layouts(layout, rows, totals, rank, world_size)
    layout_q, layout_kv = layouts
    if given_mask is not None:
        checks.check_given_mask(given_mask, layout_q.seqlen, layout_kv.seqlen)
        return layouts, given_mask
    checks.warn_if_local("cu_seqlens", totals[0], layout_q)
    if cu_k != cu_q:
        checks.warn_if_local("cu_seqlens_k", totals[1], layout_kv)
    mask = Mask(
        layout_q.seqlen,
        layout_kv.seqlen,
        causal=options.causal,
        window_size=options.window_size,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
    )
    return layouts, mask
