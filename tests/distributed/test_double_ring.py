"""The double ring over gloo: the bits and the bytes of the double ring in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import TransportOptions
from ring_attn.cost import bytes_sent, num_messages
from ring_attn.plan import Traveller
from ring_attn.strategies.ring import RingCall
from ring_attn.testing import poisoned_empty
from ring_attn.transport.base import PointToPoint
from ring_attn.transport.local import run_local
from ring_attn.transport.p2p import open_p2p
from tests.strategies import MASKS, case, config, layouts_of, spec_of

pytestmark = pytest.mark.dist

Cases = list[tuple[str, str, torch.dtype, Traveller]]

CASES: Cases = [
    ("causal", "zigzag", torch.float32, "kv"),
    ("causal", "contiguous", torch.bfloat16, "q"),
    ("causal window", "contiguous", torch.float32, "kv"),
    ("documents of other lengths", "boundaries", torch.float32, "q"),
    ("rows that see nothing", "striped", torch.bfloat16, "kv"),
]


def compute(
    cases: Cases, rank: int, transport: PointToPoint
) -> list[tuple[list[Tensor], list[tuple[int, int]]]]:
    """Results of one rank, and the bytes and messages that it sent, forward and backward."""
    results = []
    for name, kind, dtype, travels in cases:
        mask = MASKS[name]
        inputs, _, _ = case(mask, config(dtype=dtype))
        layouts = layouts_of(kind, mask, 4)
        call = RingCall(spec_of(inputs), layouts, mask, rank, 0.35, "aten", travels, inner_degree=2)
        sides = (layouts[0], layouts[1], layouts[1], layouts[0])
        q, k, v, dout = (side.shard(x, rank) for side, x in zip(sides, inputs, strict=True))
        transport.stats.reset()
        with poisoned_empty():
            out, lse, saved = call.forward(q, k, v, transport, None)
            counts = [counted(transport)]
            dq, dk, dv, _ = call.backward(saved, dout, transport, None)
            counts.append(counted(transport))
        results.append(([out, lse, dq, dk, dv], counts))
    return results


def counted(transport: PointToPoint) -> tuple[int, int]:
    """Bytes and messages since the last time."""
    counts = transport.stats.bytes_sent, transport.stats.messages
    transport.stats.reset()
    return counts


def over_gloo(cases: Cases) -> Any:
    """On every rank of a group."""
    group = dist.group.WORLD
    assert group is not None
    return compute(cases, dist.get_rank(), open_p2p(group, TransportOptions()))


def test_over_gloo_as_in_one_process(ranks: Any) -> None:
    expected = run_local(4, partial(compute, CASES))
    got_over_gloo = ranks(4).run(over_gloo, CASES)
    for rank, (mine, alone) in enumerate(zip(got_over_gloo, expected, strict=True)):
        for one, (got, counts), (wanted, _) in zip(CASES, mine, alone, strict=True):
            assert all(map(torch.equal, got, wanted)), (one, rank)
            mask, (_, kind, dtype, travels) = MASKS[one[0]], one
            inputs, _, _ = case(mask, config(dtype=dtype))
            layouts, spec = layouts_of(kind, mask, 4), spec_of(inputs)
            call = RingCall(spec, layouts, mask, rank, 0.35, "aten", travels, inner_degree=2)
            for backward in (False, True):
                plan = call.plan(backward=backward)
                assert counts[backward] == (
                    bytes_sent(plan, spec, backward=backward),
                    num_messages(plan, backward=backward),
                )
