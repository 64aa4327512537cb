"""Calls as values: what a rank computes, with all that follows from the tensors' sizes."""

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
from ring_attn.core.tiles import Traveller


class GradientPlan(NamedTuple):
    """The side that is sent in a backward, if one is, and whether gradients are summed in order.

    In order: dK and dV are summed in the order of the queries, as one process sums them.
    """

    travels: Traveller | None
    in_order: bool


@dataclass(frozen=True, kw_only=True)
class DecodeCall:
    """A call of `tree_decode`, which knows neither the cache's rows nor the ranks.

    Attributes:
        options: what the user asked for.
        spec: sizes and types of the tensors, and which kinds of scores the kernels need.
        backend: the name of the chosen backend.
    """

    options: Options
    spec: AttentionSpec
    backend: str

    @cached_property
    def scores(self) -> Scores:
        scale = self.options.softmax_scale
        if scale is None:
            scale = 1.0 / math.sqrt(self.spec.headdim)
        return Scores(scale, self.spec.softcap)


@dataclass(frozen=True, kw_only=True)
class Call(DecodeCall):
    """A call of `ring_attention` as plain data, equal on every rank except for `rank`.

    Attributes:
        options, spec, backend: as those of a `DecodeCall`.
        layouts: the positions that the ranks hold, of queries and of keys.
        mask: over the whole sequence.
        rank: this rank.
        strategy: how the ranks share the work, with all degrees.
        gradients: None leaves the choice to the strategy.
    """

    layouts: Layouts
    mask: Mask
    rank: int
    strategy: Strategy
    gradients: GradientPlan | None = None

    @property
    def world_size(self) -> int:
        return self.layouts[0].world_size

    @property
    def purpose(self) -> Purpose:
        """Properties of the call, beside its spec, on which the choice of a backend depends."""
        return purpose_of(self.options, self.mask, self.layouts)

    @cached_property
    def programs(self) -> dict[bool, Program]:
        """The rank's programs made so far, by `backward`.

        Kept on the call: hashing a call for a cache takes longer than posting a step.
        """
        return {}

    @cached_property
    def ranks(self) -> OneRank:
        """This rank among all: its peers, rows and tiles."""
        return OneRank(self.layouts, self.mask, self.rank)

    def facts(self) -> dict[str, object]:
        """Return the values that must be equal on all ranks, by name."""
        return facts_of(
            self.options, self.spec, self.layouts, self.mask, self.strategy, self.backend
        )


def purpose_of(options: Options, mask: Mask, layouts: Layouts) -> Purpose:
    """Return the properties of a call on which the choice of its backend depends."""
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
    flash = mask.arguments or FlashArguments(False, (-1, -1), None, None)
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
