"""The registered strategies, and the programs of a call.

A strategy from outside the package is an object. While it is registered, its name can be passed as
`strategy=`:

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
from ring_attn.core.host import on_host
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.names import STRATEGIES
from ring_attn.core.program import Program
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import CORES, NAMES, Named, Strategy
from ring_attn.strategies import all_gather, exchange, q_exchange, ring, ulysses
from ring_attn.strategies.base import StrategyCode


def register(code: StrategyCode) -> None:
    """Register a strategy: `Strategy(code.name)` and `strategy=code.name` then run `code`.

    Raises:
        ValueError: a strategy of that name exists.
    """
    if code.name in NAMES:
        raise ValueError(f"strategy {code.name!r} is registered already; choose another name")
    CORES[code.name] = code
    NAMES[code.name] = Named(code.candidates, core=code.name)


@contextmanager
def registered(code: StrategyCode) -> Iterator[None]:
    """Register a strategy within a block."""
    register(code)
    try:
        yield
    finally:
        del CORES[code.name], NAMES[code.name]
        code_of.cache_clear()


def _register_all() -> None:
    """Register the strategies of the package, in the order of their names in `core.names`."""
    codes = {code.name: code for code in (ring.CODE, all_gather.CODE, exchange.CODE)}
    other_names = {
        "double_ring": ring.DOUBLE_RING,
        "ulysses": ulysses.WHOLE,
        "hybrid": ulysses.HYBRID,
        "q_exchange": q_exchange.NAME,
    }
    for name in STRATEGIES:
        if name in codes:
            register(codes[name])
        else:
            NAMES[name] = other_names[name]


_register_all()


@lru_cache(maxsize=1024)
def code_of(strategy: Strategy) -> StrategyCode:
    """Return the code of the strategy's core, wrapped in the exchanges around the core."""
    core = cast(StrategyCode, CORES[strategy.core])
    if strategy.exchange_q:
        return q_exchange.QExchange(core)
    if strategy.ulysses_degree > 1:
        return ulysses.Ulysses(core)
    return core


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
    """Return the call with its backend and scale chosen; equal on every rank except for `rank`.

    Args:
        strategy: how the ranks share the work.
        spec: sizes and types of the tensors.
        layouts: the layouts of queries and keys.
        mask: over the whole sequence.
        rank: the rank that makes the call.
        softmax_scale, backend, same_bits: as in `ring_attention`.
        backward: whether a backward may follow, which affects the choice of the backend.

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
    """Raise an error if the backend or the strategy cannot compute a call; as `make_call`."""
    choose_backend(call.spec, call.backend, call.purpose)
    code_of(call.strategy).check(call)
    if not call.options.same_bits:
        return
    reason = why_not_same_bits(call)
    if reason is not None:
        raise NotImplementedError(f"same_bits=True is not possible here: {reason}")


def why_not_same_bits(call: Call) -> str | None:
    """Return None if a call has the same bits at every world size, else the reason why not."""
    return code_of(call.strategy).why_not_same_bits(call)


def program_of(call: Call, *, backward: bool) -> Program:
    """Return the program of the call's rank, in one direction; cached on the call."""
    if backward not in call.programs:
        with on_host():
            program = code_of(call.strategy).program(call, backward=backward)
        call.programs[backward] = program
    return call.programs[backward]


def programs_of(calls: Sequence[Call], *, backward: bool) -> list[Program]:
    """Return the programs of several ranks' calls, in one direction."""
    return [program_of(call, backward=backward) for call in calls]


def both_programs(call: Call, *, backward: bool) -> list[Program]:
    """Return the forward's program of the call's rank; with `backward`, also the backward's."""
    programs = [program_of(call, backward=False)]
    if backward:
        programs.append(program_of(call, backward=True))
    return programs
