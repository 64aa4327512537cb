"""stats() and named ranges over gloo: the measured counts of every strategy equal its plan's."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ring_attn import SequenceLayout, Strategy, ring_attention, tree_decode
from ring_attn.core.program import Inner, Program, Step
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import resolve_strategy
from ring_attn.machines.count import bytes_sent
from ring_attn.profiling import Figures, collect, gradient_sync, stats
from ring_attn.strategies.registry import make_call, program_of
from ring_attn.strategies.tree_decode import decode_packet
from ring_attn.testing import Case, Heads, random_qkv
from ring_attn.testing.ranks import arguments_of
from ring_attn.transport import streams
from tests.distributed.pool import Pools, everyone, on_ranks

SEQLEN = 97
SIZES = {"batch": 2, "nheads": 6, "nheads_kv": 2, "headdim": 16, "headdim_v": 8}

# Counts of one direction: bytes sent, messages, steps.
Counts = tuple[int, int, int]


def planned(program: Program) -> Counts:
    return bytes_sent(program), len([*program.posts()]), num_steps(program)


def num_steps(program: Program) -> int:
    """The number of steps of a program and of the programs inside it."""
    inner = sum(num_steps(op.program) for op in program.ops if isinstance(op, Inner))
    return inner + sum(op.number is not None for op in program.ops if isinstance(op, Step))


def adding_up(figures: Figures | None, seconds: float) -> Figures:
    """The figures, whose times fit into the call's, and the call's into `seconds`."""
    assert figures is not None
    assert figures.compute_s > 0.0
    assert figures.compute_s + figures.wait_s <= figures.seconds <= seconds
    assert figures.wait_s <= figures.in_flight_s
    if figures.messages:
        assert figures.wait_s > 0.0
        # gloo does not report when a message has arrived.
        is_known = streams.are_used(torch.device("cpu"))
        assert (figures.transfer_s is not None) == is_known
        assert figures.transfer_s is None or 0.0 < figures.transfer_s <= figures.in_flight_s
    return figures


CASES: dict[str, tuple[int, str, str | Strategy]] = {
    "two heads": (2, "zigzag", Strategy("all_gather", heads_per_chunk=2)),
    "q_exchange": (2, "contiguous", "q_exchange"),
    "ring": (3, "contiguous", "ring"),
    "hybrid": (4, "zigzag", Strategy(ulysses_degree=2)),
}


def measured_as_planned(kind: str, strategy: str | Strategy) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    case = Case("causal", kind, strategy, heads=Heads(6, 2, 16, 8), seqlen=SEQLEN)
    (q, k, v, dout), options = arguments_of(case, world_size, rank)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with collect():
        start = time.perf_counter()
        out = ring_attention(*leaves, **options)
        middle = time.perf_counter()
        torch.autograd.grad(out, leaves, dout)
        end = time.perf_counter()
    resolved, spec = resolve_strategy(strategy, world_size, ()), AttentionSpec.of(q, k, v)
    layouts, mask = case.build_layouts(world_size), case.build_mask()
    call, measured = make_call(resolved, spec, layouts, mask, rank), stats()
    for figures, seconds, backward in (
        (measured.forward, middle - start, False),
        (measured.backward, end - middle, True),
    ):
        got = adding_up(figures, seconds)
        counts = planned(program_of(call, backward=backward))
        assert (got.bytes_sent, got.messages, got.steps) == counts
        # Bytes that a rank sends are received by another rank.
        assert sum(everyone(got.bytes_sent)) == sum(everyone(got.bytes_received)) > 0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sweep(2)
def test_what_is_measured_is_what_is_planned(ranks: Pools, name: str) -> None:
    world_size, kind, strategy = CASES[name]
    ranks(world_size).run(measured_as_planned, kind, strategy)


@on_ranks(2)
def test_decoding_is_measured() -> None:
    q, k, v, _ = random_qkv(seqlen_q=1, seqlen_k=11, **SIZES)
    k, v = (x.split((7, 4), 1)[dist.get_rank()] for x in (k, v))
    with collect():
        start = time.perf_counter()
        tree_decode(q, k, v)
        seconds = time.perf_counter() - start
    figures = adding_up(stats().forward, seconds)
    nbytes = decode_packet(AttentionSpec.of(q, k, v), 1).nbytes
    assert (figures.bytes_sent, figures.bytes_received, figures.messages) == (nbytes, nbytes, 1)
    assert figures.steps == 0
    assert stats().backward is None


TRACED = {
    "ring": "step0.post step0.attend step0.wait step1.attend step1.post wait",
    "ulysses": "post wait step0.attend",
}


@on_ranks(2)
def test_torchs_profiler_sees_the_ranges() -> None:
    rank, layout = dist.get_rank(), SequenceLayout.zigzag(SEQLEN, 2)
    q, k, v, dout = (layout.shard(x, rank) for x in random_qkv(seqlen_q=SEQLEN, **SIZES))
    q.requires_grad_()
    for strategy, names in TRACED.items():
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as run, gradient_sync():
            out = ring_attention(q, k, v, causal=True, layout=layout, strategy=strategy)
            torch.autograd.grad(out, q, dout)
        found = [one.name for one in run.events() if one.name.startswith("ring_attn::")]
        expected = {"forward", "backward", "delta", "finalize", "gradient_sync", *names.split()}
        operators = {"ring_attn::attention", "ring_attn::attention_backward"}
        assert {*found} - operators == {f"ring_attn::{name}" for name in expected}
        # Calls within a call have no separate range.
        assert found.count("ring_attn::forward") == 1
