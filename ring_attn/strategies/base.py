"""A call as plain data, and what a strategy is: a function from a call to programs.

Call        sizes, layouts, mask, strategy, backend: the same on every rank but for `rank`
Program     what a rank does, or every rank: `core.program`
machines    run a program on tensors, count, time, check and draw it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.program import Array, Program
from ring_attn.core.ranks import EveryRank, OneRank, Ranks
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import Traveller

Layouts = tuple[SequenceLayout, SequenceLayout]


@dataclass(frozen=True)
class Call:
    """One call as plain data, the same on every rank but for `rank`.

    Attributes:
        spec: sizes and types.
        layouts: of the queries and of the keys.
        mask: over the whole sequence.
        rank: of this process.
        strategy: how the ranks share the call.
        softmax_scale: factor of the scores.
        backend: name of the backend.
        same_bits: what the caller asked for; None leaves the choice to the strategy.
        gradients: what travels in a ring's backward, and whether its gradients are summed in the
            order of the queries; None leaves the choice to the ring.
    """

    spec: AttentionSpec
    layouts: Layouts
    mask: Mask
    rank: int
    strategy: Strategy
    softmax_scale: float
    backend: str
    same_bits: bool | None = None
    gradients: tuple[Traveller, bool] | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layouts[0].world_size

    @property
    def scores(self) -> Scores:
        """How products become scores."""
        return Scores(self.softmax_scale, self.spec.softcap)

    @cached_property
    def programs(self) -> dict[bool, Program]:
        """The rank's programs that were made so far, by `backward`.

        With the call, not in a cache by its value: that takes longer to hash than a step to post.
        """
        return {}

    @property
    def ranks(self) -> OneRank:
        """This rank."""
        return OneRank(self.layouts, self.mask, self.rank)

    @property
    def every_rank(self) -> EveryRank:
        """All ranks."""
        return EveryRank(self.layouts, self.mask)

    def inner(self, ranks: Ranks, strategy: Strategy, spec: AttentionSpec | None = None) -> Call:
        """The call that another strategy makes of this one, over other layouts."""
        rank = 0 if ranks.rank is None else ranks.rank
        return replace(
            self, spec=spec or self.spec, layouts=ranks.layouts, rank=rank, strategy=strategy
        )


class MakeProgram(Protocol):
    """A strategy: from a call to a program of one rank, or of every rank."""

    def __call__(
        self, call: Call, ranks: Ranks, *, backward: bool, rounded: bool = True
    ) -> Program:
        """The program in one direction.

        Args:
            call: the same on every rank.
            ranks: whose program.
            backward: the direction.
            rounded: dq, dk, dv in the dtypes of q, k, v; else as they were accumulated, for a
                strategy around this one that has more to add.
        """
        ...


@dataclass(frozen=True)
class StrategyCode:
    """A strategy by its functions.

    Attributes:
        program: makes the programs.
        why_not_same_bits: the reason why a call has other bits at other world sizes, None where it
            has the same.
        check: raises for a call that the strategy does not take, before anything is sent.
    """

    program: MakeProgram
    why_not_same_bits: Callable[[Call], str | None]
    check: Callable[[Call], None] = lambda call: None


def input_arrays(spec: AttentionSpec, ranks: Ranks, *, backward: bool) -> dict[str, Array]:
    """Sizes of the tensors that a program is given: q, k, v, and what the backward needs."""
    q, kv, batch, dtype = ranks.rows("q"), ranks.rows("kv"), spec.batch, spec.dtype
    arrays = {
        "q": Array(batch, q, spec.nheads, spec.headdim, dtype),
        "k": Array(batch, kv, spec.nheads_kv, spec.headdim, dtype),
        "v": Array(batch, kv, spec.nheads_kv, spec.headdim_v, dtype),
    }
    if backward:
        arrays |= result_arrays(spec, q)
        arrays["dout"] = arrays["out"]
    return arrays


def result_arrays(spec: AttentionSpec, rows: int) -> dict[str, Array]:
    """Sizes of out and lse of so many rows."""
    return {
        "out": Array(spec.batch, rows, spec.nheads, spec.headdim_v, spec.dtype),
        "lse": Array(spec.batch, rows, spec.nheads, None, spec.accum_dtype),
    }
