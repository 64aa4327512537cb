"""Calls as values: the work of a rank, with everything that follows from the tensors' sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ring_attn.backends import Purpose
from ring_attn.call.options import Options
from ring_attn.core.layout import Layouts
from ring_attn.core.mask import FlashArguments, Mask
from ring_attn.core.program import Program
from ring_attn.core.ranks import OneRank
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import Side


class GradientPlan(NamedTuple):
    """How a backward sums gradients.

    Attributes:
        sent_side: the side that is sent around; None if no side is.
        in_order: whether dK and dV are summed in the order of the queries, as in one process.
    """

    sent_side: Side | None
    in_order: bool


# Boundaries of the documents of queries and of keys.
Documents = tuple[tuple[int, ...] | None, tuple[int, ...] | None]


@dataclass(frozen=True, kw_only=True)
class DecodeCall:
    """A call of `tree_decode`, which has neither the rows of the cache nor the ranks.

    Attributes:
        options: the options that the user passed.
        spec: sizes and types of the tensors, and which kinds of scores the kernels need.
        backend: the name of the chosen backend.
    """

    options: Options
    spec: AttentionSpec
    backend: str

    @cached_property
    def scores(self) -> Scores:
        """How the backend computes scores."""
        scale = self.options.softmax_scale
        if scale is None:
            scale = 1.0 / math.sqrt(self.spec.headdim)
        return Scores(scale, self.spec.softcap)


@dataclass(frozen=True, kw_only=True)
class Call(DecodeCall):
    """A call of `ring_attention` as plain data, equal on every rank except for `rank`.

    Attributes:
        options, spec, backend: as in `DecodeCall`.
        layouts: the positions that the ranks hold, of queries and of keys.
        mask: over the whole sequence.
        rank: this rank.
        strategy: how the ranks share the work, with all degrees.
        gradients: how the backward sums gradients; None lets the strategy choose.
        in_one_pass: whether the backward's launches compute all gradients at once, see
            `Backend.in_one_pass`; None lets the strategy choose.
        sends_together: whether the backward sends gradients together with shards, see
            `StrategyCode.sends_together`; None lets the strategy choose.
    """

    layouts: Layouts
    mask: Mask
    rank: int
    strategy: Strategy
    gradients: GradientPlan | None = None
    in_one_pass: bool | None = None
    sends_together: bool | None = None

    @property
    def world_size(self) -> int:
        return self.layouts[0].world_size

    @property
    def purpose(self) -> Purpose:
        """Properties of the call, other than its spec, that determine the choice of a backend."""
        return purpose_of(self.options, self.mask, self.layouts)

    @cached_property
    def programs(self) -> dict[bool, Program]:
        """The programs of the rank that were made before, by `backward`.

        They are cached on the call, since hashing a call takes longer than posting a step.
        """
        return {}

    @cached_property
    def ranks(self) -> OneRank:
        """The peers, rows and tiles of this rank."""
        return OneRank(self.layouts, self.mask, self.rank)

    @cached_property
    def documents_like_of_one_rank(self) -> Documents | None:
        """The boundaries of documents, if they end where the rows of a rank end and others follow.

        The boundaries of one rank's documents end there, too, and may be different on every rank.
        """
        arguments = self.mask.arguments
        if arguments is None or self.world_size == 1:
            return None
        documents = arguments.cu_seqlens_q, arguments.cu_seqlens_k
        for boundaries, layout in zip(documents, self.layouts, strict=True):
            end = 0 if boundaries is None else boundaries[-1]
            if 0 < end < layout.seqlen and end in layout.shard_lens:
                return documents
        return None

    def facts(self) -> dict[str, object]:
        """Return the values that must be equal on all ranks, by name."""
        return facts_of(
            self.options, self.spec, self.layouts, self.mask, self.strategy, self.backend
        )


def purpose_of(options: Options, mask: Mask, layouts: Layouts) -> Purpose:
    """Return the properties of a call that determine the choice of its backend."""
    return Purpose.of(
        mask, backward=options.differentiated, same_bits=options.same_bits, layouts=layouts
    )


def facts_of(
    options: Options,
    spec: AttentionSpec,
    layouts: Layouts,
    mask: Mask,
    strategy: Strategy | str,
    backend: str,
) -> dict[str, object]:
    """Return the values of a call that must be equal on all ranks, by name."""
    flash = mask.arguments or FlashArguments(
        causal=False, window_size=(-1, -1), cu_seqlens_q=None, cu_seqlens_k=None
    )
    scale = options.softmax_scale
    return {
        **vars(spec),
        "seqlen_q": mask.seqlen_q,
        "seqlen_k": mask.seqlen_k,
        "causal": flash.causal,
        "window_size": flash.window_size,
        "cu_seqlens": flash.cu_seqlens_q,
        "cu_seqlens_k": flash.cu_seqlens_k,
        "mask": None if mask.arguments else mask,
        "layout": layouts,
        "transport": options.transport,
        "requires_grad": options.differentiated,
        "softmax_scale": 1.0 / math.sqrt(spec.headdim) if scale is None else scale,
        "strategy": strategy,
        "backend": backend,
    }
