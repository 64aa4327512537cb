"""stats() and trace over gloo: what is measured of every strategy is what its plan has."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ring_attn import SequenceLayout, Strategy, ring_attention, tree_decode
from ring_attn.core.mask import Mask
from ring_attn.core.program import Attend, Differentiate, Inner, Program, Step
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import resolve_strategy
from ring_attn.machines.count import bytes_sent, num_messages
from ring_attn.profiling import Figures, Stats, collect, stats, trace
from ring_attn.strategies.registry import make_call, program_of
from ring_attn.strategies.tree_decode import decode_packet
from ring_attn.testing import random_qkv
from tests.distributed.pool import Pools

SEQLEN = 97
MASK = Mask(SEQLEN, SEQLEN, causal=True)
SIZES = {"batch": 2, "nheads": 6, "nheads_kv": 2, "headdim": 16, "headdim_v": 8}

# Of one direction: bytes sent, messages, steps, merges.
Counts = tuple[int, int, int, int]


def planned(program: Program) -> Counts:
    """What a program holds."""
    steps = merges = 0
    for op in program.ops:
        if isinstance(op, Inner):
            inside = planned(op.program)
            steps, merges = steps + inside[2], merges + inside[3]
        elif isinstance(op, Step):
            steps += op.number is not None
        elif isinstance(op, Attend | Differentiate):
            merges += len(op.tiles)
    return bytes_sent(program), num_messages(program), steps, merges


def run_measured(kind: str, strategy: str | Strategy) -> tuple[Stats, list[Counts], list[float]]:
    """A call with its backward on this rank: stats, what is planned, and seconds around it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.from_name(kind, SEQLEN, world_size)
    q, k, v, dout = (layout.shard(x, rank) for x in random_qkv(seqlen_q=SEQLEN, **SIZES))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with collect():
        start = time.perf_counter()
        out = ring_attention(*leaves, causal=True, layout=layout, strategy=strategy)
        middle = time.perf_counter()
        torch.autograd.grad(out, leaves, dout)
        end = time.perf_counter()
    spec = AttentionSpec.of(q, k, v)
    resolved = resolve_strategy(strategy, world_size, ())
    call = make_call(resolved, spec, (layout, layout), MASK, rank)
    counts = [planned(program_of(call, backward=backward)) for backward in (False, True)]
    return stats(), counts, [middle - start, end - middle]


def assert_adds_up(figures: Figures | None, seconds: float, *, queued: bool) -> Figures:
    """Parts are less than the whole, and the whole is less than what is around it."""
    assert figures is not None
    assert figures.compute_s > 0.0
    assert figures.compute_s + figures.wait_s + figures.post_s <= figures.seconds <= seconds
    assert figures.wait_s <= figures.in_flight_s
    if figures.messages:
        assert figures.post_s > 0.0 < figures.wait_s
        assert (figures.transfer_s is not None) == queued  # gloo cannot tell
    if figures.peak_bytes is not None:
        assert figures.start_bytes is not None and figures.pressure is not None
        assert 0 < figures.start_bytes <= figures.peak_bytes and 0.0 < figures.pressure < 1.0
    return figures


CASES: dict[str, tuple[int, str, str | Strategy]] = {
    "ring": (2, "zigzag", "ring"),
    "all_gather": (2, "striped", "all_gather"),
    "two heads": (2, "zigzag", Strategy("all_gather", heads_per_chunk=2)),
    "ulysses": (2, "zigzag", "ulysses"),
    "q_exchange": (2, "contiguous", "q_exchange"),
    "ring of 3": (3, "contiguous", "ring"),
    "replicated heads": (3, "zigzag", "ulysses"),
    "hybrid": (4, "zigzag", Strategy(ulysses_degree=2)),
    "double_ring": (4, "zigzag", Strategy(inner_degree=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_measured_is_what_is_planned(ranks: Pools, name: str) -> None:
    world_size, kind, strategy = CASES[name]
    everyone = ranks(world_size).run(run_measured, kind, strategy)
    received = [0, 0]
    for measured, counts, seconds in everyone:
        for i, figures in enumerate((measured.forward, measured.backward)):
            got = assert_adds_up(figures, seconds[i], queued=ranks.queued)
            assert (got.bytes_sent, got.messages, got.steps, got.merges) == counts[i]
            received[i] += got.bytes_received
    # What one sends another receives.
    assert received == [sum(counts[i][0] for _, counts, _ in everyone) for i in (0, 1)]
    assert min(received) > 0


def run_decoding() -> tuple[Stats, float]:
    rank, rows = dist.get_rank(), (7, 4)
    q, k, v, _ = random_qkv(seqlen_q=1, seqlen_k=sum(rows), **SIZES)
    with collect():
        start = time.perf_counter()
        tree_decode(q, k.split(rows, 1)[rank], v.split(rows, 1)[rank])
        seconds = time.perf_counter() - start
    return stats(), seconds


def test_decoding_is_measured(ranks: Pools) -> None:
    spec = AttentionSpec.of(*random_qkv(seqlen_q=1, **SIZES)[:3])
    for measured, seconds in ranks(2).run(run_decoding):
        figures = assert_adds_up(measured.forward, seconds, queued=ranks.queued)
        nbytes = decode_packet(spec, 1).nbytes
        assert (figures.bytes_sent, figures.bytes_received, figures.messages) == (nbytes, nbytes, 1)
        # A tile of the rank's rows, and two partial results.
        assert (figures.steps, figures.merges) == (0, 3)
        assert measured.backward is None


def run_traced(folder: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.zigzag(SEQLEN, world_size)
    q, k, v, dout = (layout.shard(x, rank) for x in random_qkv(seqlen_q=SEQLEN, **SIZES))
    q.requires_grad_()
    for strategy in ("ring", "ulysses"):
        with trace(folder / strategy):
            out = ring_attention(q, k, v, causal=True, layout=layout, strategy=strategy)
            torch.autograd.grad(out, q, dout)


def test_every_rank_writes_its_trace(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(run_traced, tmp_path)
    steps = ("step0.post", "step0.attend", "step0.wait", "step1.attend")
    expected = {
        "ring": {"forward", "backward", "delta", "finalize", "step1.post", "wait", *steps},
        "ulysses": {"forward", "backward", "delta", "finalize", "post", "wait", "step0.attend"},
    }
    for strategy, names in expected.items():
        for rank in (0, 1):
            text = (tmp_path / strategy / f"rank{rank}_trace.json").read_text()
            found = [event["name"] for event in json.loads(text)["traceEvents"] if "name" in event]
            ours = {name for name in found if name.startswith("ring_attn::")}
            assert ours - {"ring_attn::attention", "ring_attn::attention_backward"} == {
                f"ring_attn::{name}" for name in names
            }
            # Calls within a call have no range of their own.
            spans = [name for name in found if name == "ring_attn::forward"]
            assert len(spans) == 1
