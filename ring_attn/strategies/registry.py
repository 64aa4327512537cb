"""Strategies by name, and the programs of a call.

Two lines add a strategy:

    register("star", StrategyCode(program, why_not_same_bits))
    ring_attention(..., strategy=Strategy("star"))
"""

from __future__ import annotations

import math

from ring_attn.backends import Purpose, choose_backend
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.program import Program
from ring_attn.core.ranks import Ranks
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import CORES, Strategy
from ring_attn.core.values import on_host
from ring_attn.strategies import all_gather, exchange, q_exchange, ring, ulysses
from ring_attn.strategies.base import Call, StrategyCode

_CODES: dict[str, StrategyCode] = {
    "ring": ring.CODE,
    "all_gather": all_gather.CODE,
    "exchange": exchange.CODE,
}


def register(name: str, code: StrategyCode) -> None:
    """Makes `Strategy(name)` run `code`.

    Raises:
        ValueError: a strategy of that name exists.
    """
    if name in _CODES:
        raise ValueError(f"strategy {name!r} is registered already; choose another name")
    _CODES[name] = code
    CORES.append(name)


def code_of(strategy: Strategy) -> StrategyCode:
    """The code of the strategy's core, wrapped in the exchanges around the core."""
    core = _CODES[strategy.core]
    if strategy.exchange_q:
        return q_exchange.around(core)
    return ulysses.around(core) if strategy.ulysses_degree > 1 else core


def make_call(
    strategy: Strategy,
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    rank: int,
    *,
    softmax_scale: float | None = None,
    backend: str = "auto",
    same_bits: bool | None = None,
    backward: bool = True,
) -> Call:
    """The call with its backend and scale chosen; equal on every rank except for `rank`.

    `backward` says whether a backward may follow, which affects the choice of the backend.

    Raises:
        ValueError: degrees, heads or layouts do not fit the strategy.
        NotImplementedError: the strategy or the named backend does not support the call, or
            `same_bits=True` is impossible; other errors as `choose_backend`.
    """
    scale = 1.0 / math.sqrt(spec.headdim) if softmax_scale is None else softmax_scale
    purpose = Purpose.of(mask, backward=backward, same_bits=same_bits)
    backend = choose_backend(spec, backend, purpose).name
    call = Call(spec, layouts, mask, rank, strategy, scale, backend, same_bits)
    code_of(strategy).check(call)
    if same_bits and (reason := why_not_same_bits(call)) is not None:
        raise NotImplementedError(f"same_bits=True cannot be had here: {reason}")
    return call


def why_not_same_bits(call: Call) -> str | None:
    return code_of(call.strategy).why_not_same_bits(call)


def program_of(call: Call, *, backward: bool) -> Program:
    """The program of the call's rank, in one direction; cached on the call."""
    if backward not in call.programs:
        call.programs[backward] = programs(call, call.ranks, backward=backward)
    return call.programs[backward]


def programs(call: Call, ranks: Ranks, *, backward: bool) -> Program:
    with on_host():
        return code_of(call.strategy).program(call, ranks, backward=backward)
