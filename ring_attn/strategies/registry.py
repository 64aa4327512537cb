"""The registered strategies, and the programs of a call.

A strategy from outside the package is an object, and named in `strategy=` while it is registered:

    with registered(Star()):
        ring_attention(q, k, v, strategy="star")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import cast

from ring_attn.backends import choose_backend
from ring_attn.call import Call, Options, purpose_of
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.names import STRATEGIES
from ring_attn.core.program import Program
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import CORES, NAMES, Named, Strategy
from ring_attn.strategies import all_gather, exchange, q_exchange, ring, ulysses
from ring_attn.strategies.base import StrategyCode
from ring_attn.values.host import on_host


def register(code: StrategyCode) -> None:
    """Makes `Strategy(code.name)`, and `strategy=` the name, run `code`.

    Raises:
        ValueError: a strategy of that name exists.
    """
    if code.name in NAMES:
        raise ValueError(f"strategy {code.name!r} is registered already; choose another name")
    CORES[code.name] = code
    NAMES[code.name] = Named(code.candidates, code.name)


@contextmanager
def registered(code: StrategyCode) -> Iterator[None]:
    """Registers a strategy during a block."""
    register(code)
    try:
        yield
    finally:
        del CORES[code.name], NAMES[code.name]
        code_of.cache_clear()


CODES = {code.name: code for code in (ring.CODE, all_gather.CODE, exchange.CODE)}
NAMED = {**ulysses.NAMES, "double_ring": ring.DOUBLE_RING, "q_exchange": q_exchange.NAMED}
for _name in STRATEGIES:
    if _name in CODES:
        register(CODES[_name])
    else:
        NAMES[_name] = NAMED[_name]


@lru_cache(maxsize=1024)
def code_of(strategy: Strategy) -> StrategyCode:
    """The code of the strategy's core, wrapped in the exchanges around the core."""
    core = cast(StrategyCode, CORES[strategy.core])
    if strategy.exchange_q:
        return q_exchange.QExchange(core)
    return ulysses.Ulysses(core) if strategy.ulysses_degree > 1 else core


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
    options = Options(
        softmax_scale=softmax_scale,
        softcap=spec.softcap,
        max_logits=spec.max_logits,
        differentiated=backward,
        strategy=strategy,
        backend=backend,
        same_bits=same_bits,
    )
    chosen = choose_backend(spec, backend, purpose_of(options, mask, layouts)).name
    call = Call(
        options=options,
        spec=spec,
        backend=chosen,
        layouts=layouts,
        mask=mask,
        rank=rank,
        strategy=strategy,
    )
    check_call(call)
    return call


def check_call(call: Call) -> None:
    """Refuse a call that its backend or strategy cannot compute; errors as `make_call`."""
    choose_backend(call.spec, call.backend, call.purpose)
    code_of(call.strategy).check(call)
    if call.options.same_bits and (reason := why_not_same_bits(call)) is not None:
        raise NotImplementedError(f"same_bits=True cannot be had here: {reason}")


def why_not_same_bits(call: Call) -> str | None:
    return code_of(call.strategy).why_not_same_bits(call)


def program_of(call: Call, *, backward: bool) -> Program:
    """The program of the call's rank, in one direction; cached on the call."""
    if backward not in call.programs:
        with on_host():
            program = code_of(call.strategy).program(call, backward=backward)
        call.programs[backward] = program
    return call.programs[backward]


def programs_of(calls: Sequence[Call], *, backward: bool) -> list[Program]:
    """The programs of several ranks' calls, in one direction."""
    return [program_of(call, backward=backward) for call in calls]


def both_programs(call: Call, *, backward: bool) -> list[Program]:
    """The forward's program of the call's rank; with `backward`, also the backward's."""
    return [program_of(call, backward=b) for b in ((False, True) if backward else (False,))]
