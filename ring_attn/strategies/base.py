"""A call as plain data, and what a strategy is: a function from a call to programs.

Call        sizes, layouts, mask, strategy, backend: the same on every rank but for `rank`
Program     what a rank does, or every rank: `core.program`
machines    run a program on tensors, count, time, check and draw it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.program import (
    Array,
    Differentiate,
    New,
    Op,
    Operand,
    Program,
    Round,
    Tiles,
    View,
)
from ring_attn.core.ranks import EveryRank, OneRank, Ranks
from ring_attn.core.sizes import SHARD
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


def differentiate(
    travels: Traveller,
    tiles: Tiles,
    held: tuple[Operand, ...],
    into: tuple[Operand, ...],
    *,
    own: bool,
) -> Differentiate:
    """The gradients of tiles with a shard that is held.

    Args:
        travels: the side of that shard.
        tiles: the tiles.
        held: the shard's tensors.
        into: what the gradients of that side are added to; those of the other side go to its sums.
        own: whether the shard is the rank's own.
    """
    if travels == "kv":
        own_q = tuple(map(View, SHARD["q"]))
        kv, dkv = (held[0], held[1]), (into[0], into[1])
        return Differentiate("all", tiles, own_q, kv, View("dq sum"), dkv, View("out"))
    kv, dkv = (View("k"), View("v")), (View("dk sum"), View("dv sum"))
    return Differentiate("all", tiles, held, kv, into[0], dkv, View("out") if own else None)


def sums_of(spec: AttentionSpec, arrays: dict[str, Array]) -> dict[str, Array]:
    """Sizes of a rank's dq, dk and dv while they are added up."""
    return {f"d{name}": replace(arrays[name], dtype=spec.accum_dtype) for name in ("q", "k", "v")}


def new_sums(sums: dict[str, Array]) -> Iterator[Op]:
    """Zeros for a rank's gradients."""
    for name, array in sums.items():
        yield New(f"{name} sum", array, zero=True)


def rounded_sums(sums: dict[str, Array], spec: AttentionSpec, *, rounded: bool) -> Iterator[Op]:
    """Makes the results of the sums, one by one, so that little is held twice."""
    dtype = spec.dtype if rounded else spec.accum_dtype
    for name in ("dv", "dk", "dq"):
        result = replace(sums[name], dtype=dtype)
        yield Round(View(name), View(f"{name} sum"), result, scaled=name != "dv")
