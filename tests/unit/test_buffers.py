"""The pool of message buffers, and headers in it; tests/deferred has the events of its uses."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from ring_attn.attention import drivers
from ring_attn.call import Call
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.program import Inner
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.strategies.registry import make_call, program_of
from ring_attn.testing import poisoned_empty, random_qkv
from ring_attn.transport import streams
from ring_attn.transport.base import Agreement
from ring_attn.transport.buffers import Pool
from ring_attn.transport.local import LocalTransport, run_local
from ring_attn.transport.ranks.headers import Headers
from ring_attn.transport.ranks.identity import Identity

CPU = torch.device("cpu")
ROWS = 16


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates streams on a CPU."""
    monkeypatch.setattr(streams, "are_used", lambda device: True)
    monkeypatch.setattr(streams, "record", lambda device: mock.Mock())
    monkeypatch.setattr(streams, "pinned", lambda x, device: x.clone())


def test_sizes_that_two_calls_have_not_taken_are_let_go(queued: None) -> None:
    pool = Pool(CPU)
    block = pool.take(64)
    pool.give(block)
    for _ in range(2):
        pool.begin()
    assert pool.take(64) is block
    pool.give(block)
    for _ in range(3):
        pool.begin()
    assert pool.take(64) is not block


@pytest.mark.parametrize("size", [128, 64])
def test_sizes_of_every_sixth_layer_are_kept_from_the_second_time_on(
    queued: None, size: int
) -> None:
    """Five layers of local attention, and one of global, whose messages are longer or shorter."""
    pool = Pool(CPU)
    found = []
    for layer in range(4 * 6):
        pool.begin()
        block = pool.take(size if layer % 6 == 5 else 96)
        pool.give(block)
        if layer % 6 == 5:
            found.append(block)
    first, second, *others = found
    assert first is not second and all(other is second for other in others)
    # A size that does not return is dropped, after a pause longer than any before.
    for call in range(7):
        pool.begin()
        assert (size in pool.free) == (call < 6), call
    for _ in range(64):
        pool.begin()
    assert not pool.taken and not pool.pauses


@pytest.mark.parametrize("wrong", [None, 0, 99, 199])
def test_headers_of_more_exchanges_than_a_buffer_holds(queued: None, wrong: int | None) -> None:
    """Makes 200 gatherings of 3 headers; 85 fill a buffer but for one row, never compared."""
    headers, call = Headers(), Identity(1, 1, "forward", Agreement({}))
    with poisoned_empty():
        headers.begin(call, CPU, None, Pool(CPU))
        for exchange in range(200):
            rows = headers.incoming(3)
            rows.copy_(headers.outgoing)
            if exchange == wrong:
                rows[1, 5] += 1
        headers.end()
    assert (headers.found() is None) == (wrong is None)


class Lasting(LocalTransport):
    """A rank whose buffers stay from call to call."""

    pools: ClassVar[dict[int, Pool]] = {}

    def pool(self, device: torch.device) -> Pool:
        """Pools are keyed by global rank, also within a group."""
        return self.pools.setdefault(self.members[self.rank], Pool(device))

    def post(self, *given: Any, **options: Any) -> Any:
        """Returns an end of the exchange, as transports over streams do."""
        super().post(*given, **options)
        return object()


STRATEGIES = [Strategy(), Strategy(inner_degree=2), Strategy("all_gather"), Strategy("exchange")]
STRATEGIES += [Strategy(ulysses_degree=degree) for degree in (2, 4)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_layers_in_flight_hold_what_is_predicted(
    queued: None, monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    """The host runs layers ahead of its device; each layer reuses its predecessor's buffers."""
    monkeypatch.setattr("ring_attn.transport.local.LocalTransport", Lasting)
    monkeypatch.setattr(Lasting, "pools", {})
    layout = SequenceLayout.zigzag(4 * ROWS, 4)
    mask = Mask(4 * ROWS, 4 * ROWS, causal=True)
    inputs = random_qkv(seqlen_q=4 * ROWS, nheads=4, nheads_kv=4, headdim=16)

    def layers(rank: int, transport: LocalTransport) -> tuple[Call, list[Counter[int]], int]:
        q, k, v, dout = (layout.shard(x, rank) for x in inputs)
        spec = AttentionSpec.of(q, k, v)
        call = make_call(strategy, spec, (layout, layout), mask, rank, backend="reference")
        held = []
        for _ in range(3):
            saved = [drivers.forward(call, q, k, v, transport).saved for _ in range(2)]
            for one in saved:
                drivers.backward(call, one, dout, transport)
            pool = transport.pool(q.device)
            held.append(Counter({size: len(blocks) for size, blocks in pool.free.items()}))
        blocks = [block for free in pool.free.values() for block in free]
        return call, held, max((len(block.sent) for block in blocks), default=0)

    for rank, (call, held, sent) in enumerate(run_local(4, layers)):
        # Blocks forget the exchanges of earlier calls.
        assert sent <= 3, rank
        assert held[0] == held[1] == held[2], rank
        both = [program_of(call, backward=backward) for backward in (False, True)]
        inner = [op.program for one in both for op in one.ops if isinstance(op, Inner)]
        assert held[0].keys() <= set().union(*(one.recycled for one in (*both, *inner))), rank
