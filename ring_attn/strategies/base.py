"""A call as plain data, and the interface of a strategy: a function from a call to programs.

Call        sizes, layouts, mask, strategy, backend: equal on every rank except for `rank`
Program     the ops of one rank, or of every rank: `core.program`
machines    run a program on tensors, count, time, check and draw it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from ring_attn.core import program as ops
from ring_attn.core.layout import Layouts
from ring_attn.core.mask import Mask
from ring_attn.core.messages import Number
from ring_attn.core.program import Array, Op, Operand, Program, Tiles, View
from ring_attn.core.ranks import OneRank, Ranks
from ring_attn.core.sizes import SHARD
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import Traveller, check_fit

# The tensors that every core's forward saves.
SAVED = ("q", "k", "v", "out", "lse")


@dataclass(frozen=True)
class Call:
    """One call as plain data, equal on every rank except for `rank`.

    Attributes:
        same_bits: the caller's choice; None leaves the choice to the strategy.
        gradients: the side that travels in a ring's backward, and whether its gradients are summed
            in the order of the queries; None leaves the choice to the ring.
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
        return self.layouts[0].world_size

    @property
    def scores(self) -> Scores:
        return Scores(self.softmax_scale, self.spec.softcap)

    @cached_property
    def programs(self) -> dict[bool, Program]:
        """The rank's programs made so far, by `backward`.

        Kept on the call: hashing a call for a cache takes longer than posting a step.
        """
        return {}

    @property
    def ranks(self) -> OneRank:
        return OneRank(self.layouts, self.mask, self.rank)


class MakeProgram(Protocol):
    """Makes the program of one rank, or of every rank, for a call in one direction.

    `rounded` True rounds dq, dk and dv to the dtypes of q, k and v; False keeps them in the
    accumulation type, for an outer strategy that adds to them.
    """

    def __call__(
        self, call: Call, ranks: Ranks, *, backward: bool, rounded: bool = True
    ) -> Program: ...


def check_layouts(call: Call) -> None:
    check_fit(*call.layouts, call.mask)


@dataclass(frozen=True)
class StrategyCode:
    """The functions of a strategy.

    `why_not_same_bits` returns None if a call has the same bits at every world size, else the
    reason why not. `check` raises for a call that the strategy does not take, before anything is
    sent.
    """

    program: MakeProgram
    why_not_same_bits: Callable[[Call], str | None]
    check: Callable[[Call], None] = check_layouts


def input_arrays(spec: AttentionSpec, ranks: Ranks, *, backward: bool) -> dict[str, Array]:
    """Sizes of a program's inputs: q, k, v, and in the backward also out, lse and dout."""
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


def core_program(
    ranks: Ranks, arrays: dict[str, Array], made: Iterable[Op], *, backward: bool
) -> Program:
    """The program of these ops; its forward saves the inputs and the results."""
    saved = () if backward else SAVED
    return Program(ranks.world_size, ranks.rank, backward, tuple(made), arrays, saved)


def start(spec: AttentionSpec, ranks: Ranks) -> ops.Start:
    """Makes the state of all queries."""
    out = result_arrays(spec, ranks.rows("q"))["out"]
    return ops.Start(View("q"), spec.headdim_v, replace(out, dtype=spec.accum_dtype), slice(None))


def finish(spec: AttentionSpec, ranks: Ranks) -> ops.Finish:
    """Makes the results from the state."""
    results = result_arrays(spec, ranks.rows("q"))
    return ops.Finish("out", "lse", results["out"], results["lse"])


def result_arrays(spec: AttentionSpec, rows: Number) -> dict[str, Array]:
    """Sizes of out and lse with `rows` rows."""
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
) -> ops.Differentiate:
    """The op for the gradients of tiles with a shard of the travelling side.

    Args:
        held: tensors of the shard.
        into: sums for the shard's gradients; gradients of the other side go to the rank's sums.
        own: whether the shard is the rank's own.
    """
    if travels == "kv":
        own_q = tuple(map(View, SHARD["q"]))
        kv, dkv = (held[0], held[1]), (into[0], into[1])
        return ops.Differentiate("all", tiles, own_q, kv, View("dq sum"), dkv, View("out"))
    kv, dkv = (View("k"), View("v")), (View("dk sum"), View("dv sum"))
    return ops.Differentiate("all", tiles, held, kv, into[0], dkv, View("out") if own else None)


def sums_of(spec: AttentionSpec, arrays: dict[str, Array]) -> dict[str, Array]:
    """Sizes of a rank's sums for dq, dk and dv."""
    return {f"d{name}": replace(arrays[name], dtype=spec.accum_dtype) for name in ("q", "k", "v")}


def new_sums(sums: dict[str, Array]) -> Iterator[Op]:
    """Yields ops that make the sums, of zeros."""
    for name, array in sums.items():
        yield ops.New(f"{name} sum", array, zero=True)


def rounded_sums(sums: dict[str, Array], spec: AttentionSpec, *, rounded: bool) -> Iterator[Op]:
    """Yields ops that make the results from the sums, one by one, so that little is held twice."""
    dtype = spec.dtype if rounded else spec.accum_dtype
    for name in ("dv", "dk", "dq"):
        result = replace(sums[name], dtype=dtype)
        yield ops.Round(View(name), View(f"{name} sum"), result, scaled=name != "dv")
