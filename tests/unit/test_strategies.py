"""Strategies with all ranks in this process; `dev/fuzz.py` draws any of their calls.

Results are compared with dense attention in float64, and sent bytes with counted bytes; allocated
memory starts as NaN.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.attention import drivers
from ring_attn.backends.base import Backend
from ring_attn.call import Call, GradientPlan
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.strategy import Strategy
from ring_attn.machines import run
from ring_attn.strategies.order import why_not_by_heads
from ring_attn.strategies.registry import code_of, program_of
from ring_attn.testing import (
    LAYOUTS,
    RESULTS,
    Case,
    Expected,
    Heads,
    expected,
    masks,
    put_together,
    run_all_ranks,
    run_calls,
)
from ring_attn.testing.ranks import calls_of
from ring_attn.transport.base import Transport
from ring_attn.transport.local import LocalTransport, run_local
from tests.refusals import refused
from tests.unit.test_programs import sent

RING, GATHER = Strategy(), Strategy("all_gather")
# World sizes and strategy of each name.
STRATEGIES: dict[str, tuple[tuple[int, ...], Strategy]] = {
    "ring": ((1, 2, 3, 4), RING),
    "double ring": ((4, 8), Strategy(inner_degree=2)),
    "double ring of threes": ((6,), Strategy(inner_degree=3)),
    "all_gather": ((1, 2, 3, 4), GATHER),
    "all_gather, two heads": ((3,), Strategy("all_gather", heads_per_chunk=2)),
    "exchange": ((1, 2, 3, 4, 6), Strategy("exchange")),
    "ulysses": ((3,), Strategy(ulysses_degree=3)),
    "ulysses of four": ((4,), Strategy(ulysses_degree=4)),
    "hybrid": ((4,), Strategy(ulysses_degree=2)),
    "hybrid of threes": ((6,), Strategy(ulysses_degree=3)),
    "hybrid all_gather": ((4,), Strategy("all_gather", ulysses_degree=2)),
    "hybrid exchange": ((4,), Strategy("exchange", ulysses_degree=2)),
    "hybrid double ring": ((8,), Strategy(ulysses_degree=2, inner_degree=2)),
    "q_exchange": ((1, 2, 3, 4), Strategy("all_gather", exchange_q=True)),
    "q_exchange exchange": ((4,), Strategy("exchange", exchange_q=True)),
    "q_exchange ring": ((3, 4), Strategy("ring", exchange_q=True)),
}
GRID = [(name, ranks) for name, (sizes, _) in STRATEGIES.items() for ranks in sizes]


# The side that is sent in the backward, and whether gradients are continued rank by rank.
@pytest.mark.parametrize("gradients", [("kv", False), ("q", False), ("kv", True)], ids=str)
@pytest.mark.parametrize("name", ["ring", "double ring", "q_exchange ring"])
@pytest.mark.sweep(2)
def test_either_side_is_sent(name: str, gradients: Any) -> None:
    layouts = ("contiguous", "boundaries") if name == "q_exchange ring" else LAYOUTS
    for turn, mask in enumerate(masks(61).values()):
        layout = layouts[turn % len(layouts)]
        dtype = ("bfloat16", "float32")[turn // 2 % 2]
        case = Case(mask, layout, STRATEGIES[name][1], "reference", dtype, batch=1 + turn % 2)
        plan = gradients and GradientPlan(*gradients)
        calls = [replace(call, gradients=plan) for call in calls_of(case, 4)]
        ranks = run_calls(calls, case.build_inputs(), case.build_layouts(4))
        ran = put_together(case, ranks)
        assert not ran.failures
        assert [*ran.sent] == [*zip(sent(calls), sent(calls, backward=True), strict=True)]


@pytest.mark.parametrize("backend", ["reference", "aten"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.sweep(2)
def test_the_error_does_not_grow_with_the_ranks(layout: str, dtype: str, backend: str) -> None:
    """The design promises at most 1.1 times the error of one rank."""
    for nheads_kv, name in product((2, 1), RESULTS):
        heads = Heads(2, nheads_kv, 32, 32)
        case = Case("causal", layout, RING, backend, dtype, heads, seqlen=512, batch=1)
        right = getattr(expected(case)[0], name)
        alone, eight = (
            float((getattr(whole_of_ranks(case, ranks), name).double() - right).norm())
            for ranks in (1, 8)
        )
        assert eight <= 1.1 * alone, (name, nheads_kv, eight, alone)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("degree", "world_size"), [(3, 3), (3, 6), (5, 5)])
@pytest.mark.parametrize("heads", [Heads(12, 2, 8, 16), Heads(10, 2, 8, 8), Heads(9, 3, 8, 8)])
def test_heads_are_dealt_as_equally_as_possible(
    heads: Heads, degree: int, world_size: int, sinks: bool
) -> None:
    """A rank may have parts of two groups of heads; with same_bits=True it has whole groups."""
    strategy = Strategy(ulysses_degree=degree)
    case = Case(
        "causal", "zigzag", strategy, "reference", "float32", heads, 61, sinks=sinks, softcap=3.0
    )
    assert not run_all_ranks(case, world_size).failures
    for call in calls_of(case, world_size):
        options = replace(call.options, same_bits=True)
        reason = why_not_by_heads(replace(call, options=options))
        assert (reason is None) == (degree <= heads.nheads_kv)


@cache
def whole_of_ranks(case: Case, world_size: int) -> Expected:
    return run_all_ranks(case, world_size).whole


@pytest.mark.parametrize(("name", "world_size"), GRID)
def test_what_is_kept_and_when_it_is_rounded(name: str, world_size: int) -> None:
    """No message is kept, inputs and kept tensors stay unchanged, gradients are rounded once."""
    for heads in (Heads(9, 3, 8, 8), Heads(4, 1, 8, 8)):
        case = Case("causal", "contiguous", STRATEGIES[name][1], "aten", "bfloat16", heads, 61)
        run_local(world_size, partial(keep, case, calls_of(case, world_size)))


def keep(case: Case, calls: list[Call], rank: int, transport: LocalTransport) -> None:
    layout, _ = case.build_layouts(len(calls))
    call: Call = calls[rank]
    q, k, v, dout = shards = [layout.shard(x, rank) for x in case.build_inputs()]
    saved = drivers.forward(call, q, k, v, transport).saved
    assert sum(x.untyped_storage().nbytes() for x in saved) <= sum(x.nbytes for x in saved)
    before = [x.clone() for x in (*shards, *saved)]
    rounded = drivers.backward(call, saved, dout, transport)[:3]
    names = program_of(call, backward=False).saved
    program = code_of(call.strategy).program(call, backward=True, rounded=False)
    given = {**dict(zip(names, saved, strict=True)), "dout": dout}
    ran = run.execute(program, call, given, transport)
    assert all(map(torch.equal, before, (*shards, *saved)))
    for x, name in zip(rounded, ("dq", "dk", "dv"), strict=True):
        y = ran.tensors[name]
        assert (x.dtype, y.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(x, y.bfloat16())


def test_refused_before_anything_is_sent() -> None:
    mask, layout = Mask(64, 64, causal=True), SequenceLayout.zigzag(64, 4)
    misfits = {
        "got mask (64, 64) and layouts (64, 63)": (layout, SequenceLayout.zigzag(63, 4)),
        "same number of ranks": (layout, SequenceLayout.contiguous(64, 2)),
    }
    halves = Strategy(ulysses_degree=2)
    for strategy, (words, layouts) in product((RING, GATHER, halves), misfits.items()):
        with refused(ValueError, words):
            run_all_ranks(Case(mask, layouts, strategy), 4)
    for name in ("ring", "double ring", "all_gather", "hybrid"):
        with refused(NotImplementedError, "must both be striped, or neither"):
            run_all_ranks(Case("causal", ("striped", "zigzag"), STRATEGIES[name][1]), 4)
    with refused(NotImplementedError, "for a contiguous layout"):
        run_all_ranks(Case("causal", "zigzag", "q_exchange"), 4)
    words = "same_bits=True is not possible here|with 6 heads, 1 kv heads and ulysses_degree 2"
    with refused(NotImplementedError, words):
        run_all_ranks(Case(mask, strategy=halves, heads=Heads(6, 1, 8, 8), same_bits=True), 4)
    case = Case(mask, strategy=GATHER)
    calls = [replace(call, gradients=GradientPlan("kv", True)) for call in calls_of(case, 4)]
    with refused(NotImplementedError, "one order|got 'aten'"):
        run_calls(calls, case.build_inputs(), case.build_layouts(4))


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (RING, [1, 1, 1, 0]),
        # Rounds of two ranks: the next round's keys travel during a whole round.
        (Strategy(inner_degree=2), [2, 1, 1, 0]),
        (Strategy("exchange"), [2, 2, 1, 0]),
        (Strategy(ulysses_degree=4), [0]),
        (Strategy(ulysses_degree=2), [1, 0]),
    ],
    ids=str,
)
def test_attention_leaves_multiprocessors_to_each_exchange_beside_it(
    strategy: Strategy, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = defaultdict[int, list[int]](list)
    forward = Backend.forward

    def noted(self: Backend, q: Tensor, *given: Any, spare_sms: int, **options: Any) -> Any:
        found[threading.get_ident()].append(spare_sms)
        return forward(self, q, *given, **options)

    monkeypatch.setattr(Backend, "forward", noted)
    monkeypatch.setattr(Transport, "sms_per_exchange", 4)
    monkeypatch.setattr(Transport, "spare_sms", 3)
    assert not run_all_ranks(
        Case("full", "contiguous", strategy, heads=Heads(4, 2, 8, 8)), 4
    ).failures
    assert [*found.values()] == [[3 + 4 * lanes for lanes in expected]] * 4
