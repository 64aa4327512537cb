"""Arguments of the operators: tensors, numbers of layouts, and the options as text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ring_attn.call import Options
from ring_attn.checks import attention as checks
from ring_attn.core.layout import Layouts, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.strategy import Strategy, resolve_strategy
from ring_attn.torch_private import group_by_name

# Boundaries of the documents of queries and of keys.
Documents = tuple[tuple[int, ...] | None, tuple[int, ...] | None]
# `SequenceLayout.numbers` of the layouts of queries and of keys.
LayoutNumbers = tuple[tuple[int, ...], tuple[int, ...]]


class Asked(NamedTuple):
    """What an operator's arguments say without their tensors."""

    group: dist.ProcessGroup
    options: Options
    strategy: Strategy
    rank: int
    world_size: int


class Arguments(NamedTuple):
    """Arguments of the operators beside q, k, v and sinks, in the order of their schema.

    A compiler may treat the numbers of layouts as symbols.
    """

    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None  # only if it differs
    mask: Tensor | None  # `Mask.tensor` of a mask passed by value
    layout_q: Sequence[int]  # `SequenceLayout.numbers`; empty if the options name the layout
    layout_k: Sequence[int]
    text: str  # of the options

    def read(self) -> Asked:
        """Return the group, the options, and the strategy with its degrees."""
        options = Options.from_text(self.text)
        group = group_by_name(options.group)
        world_size = group.size()
        return Asked(group, options, strategy_of(self.text, world_size), group.rank(), world_size)

    @property
    def needs_even_rows(self) -> bool:
        """Whether the number of all rows follows from one rank's rows."""
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


# tensor -> its mask; does not keep the tensor alive
_masks: Any = WeakTensorKeyDictionary()


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

    `rows` are this rank's rows of q and kv.
    """
    cu_q, cu_k = documents
    totals = (cu_q[-1] if cu_q else None, cu_k[-1] if cu_k else None)
    if given_mask is not None:
        totals = given_mask.seqlen_q, given_mask.seqlen_k
    layout: object = options.layout
    if options.layout is None:
        layout = tuple(map(SequenceLayout.from_numbers, numbers))
    layouts = checks.resolve_layouts(layout, rows, totals, rank, world_size)
    seqlens = layouts[0].seqlen, layouts[1].seqlen
    if given_mask is not None:
        checks.check_given_mask(given_mask, *seqlens)
        return layouts, given_mask
    return layouts, Mask(*seqlens, options.causal, options.window_size, cu_q, cu_k)
