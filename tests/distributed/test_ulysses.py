"""Heads for rows between processes: the bits and the messages of the same call in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import TransportOptions
from ring_attn.spec import AttentionSpec
from ring_attn.strategies import ring, ulysses
from ring_attn.strategies.base import Call
from ring_attn.testing import Expected, check_all, poisoned_empty
from ring_attn.transport.local import LocalTransport, run_local
from ring_attn.transport.p2p import P2PTransport, open_p2p
from tests.strategies import MASKS, Config, Layouts, case, config, layouts_of, sinks_of, spec_of

pytestmark = pytest.mark.dist

# Mask, layout, sizes; all have sinks. Shared kv heads, cut groups, ranks without heads.
CASES: tuple[tuple[str, str, Config], ...] = (
    ("causal", "zigzag", config()),
    ("documents of other lengths", "striped", config(nheads=3, nheads_kv=1)),
    ("window", "boundaries", config(nheads=9, nheads_kv=3, dtype=torch.bfloat16)),
    ("rows that see nothing", "contiguous", config(nheads=2, nheads_kv=2, headdim_v=12)),
)

Results = tuple[tuple[Tensor, ...], tuple[int, int]]


def forward_and_backward(
    name: str,
    layout: str,
    sizes: Config,
    degree: int,
    rank: int,
    transport: LocalTransport | P2PTransport,
) -> Results:
    """out, lse, dq, dk, dv, dsinks of a rank, and the bytes and messages that it has sent."""
    mask = MASKS[name]
    inputs, _, _ = case(mask, sizes, 0.0, True)
    layouts, sinks = layouts_of(layout, mask, transport.world_size), sinks_of(inputs)

    def make_core(spec: AttentionSpec, layouts: Layouts, rank: int) -> Call:
        return ring.make_call(spec, layouts, mask, rank, backend="aten")

    spec = spec_of(inputs, with_sinks=True)
    call = ulysses.make_call(spec, layouts, rank, degree, make_core)
    sides = (layouts[0], layouts[1], layouts[1], layouts[0])
    q, k, v, dout = (side.shard(x, rank) for side, x in zip(sides, inputs, strict=True))
    stats = transport.stats
    stats.reset()
    with poisoned_empty():
        out, lse, saved = call.forward(q, k, v, transport, sinks)
        dq, dk, dv, dsinks = call.backward(saved, dout, transport, sinks)
    assert dsinks is not None
    return (out, lse, dq, dk, dv, dsinks), (stats.bytes_sent, stats.messages)


def on_this_rank(degree: int) -> list[Results]:
    """All cases between processes."""
    group = dist.group.WORLD
    assert group is not None
    transport = open_p2p(group, TransportOptions())
    return [forward_and_backward(*one, degree, transport.rank, transport) for one in CASES]


@pytest.mark.parametrize(("world_size", "degree"), [(2, 2), (3, 3), (4, 2)])
def test_between_processes(ranks: Any, one_thread: None, world_size: int, degree: int) -> None:
    by_rank = ranks(world_size).run(on_this_rank, degree)
    for one, got in zip(CASES, zip(*by_rank, strict=True), strict=True):

        def in_one_process(
            rank: int, transport: LocalTransport, one: tuple[str, str, Config] = one
        ) -> Results:
            return forward_and_backward(*one, degree, rank, transport)

        expected = run_local(world_size, in_one_process)
        for (results, sent), (results_here, sent_here) in zip(got, expected, strict=True):
            assert sent == sent_here and sent[1] > 0
            assert all(map(torch.equal, results, results_here)), one
        assert_within_bounds([results for results, _ in got], *one)


def assert_within_bounds(
    by_rank: list[tuple[Tensor, ...]], name: str, layout: str, sizes: Config
) -> None:
    _, oracle, plain = case(MASKS[name], sizes, 0.0, True)
    q_side, kv_side = layouts_of(layout, MASKS[name], len(by_rank))
    out, lse, dq, dk, dv, dsinks = zip(*by_rank, strict=True)
    whole = Expected(
        q_side.unshard(out),
        q_side.unshard(lse, 2),
        q_side.unshard(dq),
        kv_side.unshard(dk),
        kv_side.unshard(dv),
        torch.stack(dsinks).sum(0),
    )
    verdicts = check_all(whole, oracle, plain)
    assert all(verdict.ok for verdict in verdicts), [str(v) for v in verdicts if not v.ok]
