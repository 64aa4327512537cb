"""Numbers of a call: bytes by hand, the cheaper side is sent, a rank's share of the sequence."""

import math
from functools import partial
from itertools import cycle, product

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.sizes import choose_sent_side, flops
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import Side
from ring_attn.strategies.q_exchange import exchanged_layout
from ring_attn.testing import LAYOUTS, Sent
from tests.unit.test_programs import MASKS, calls_of, sent, spec_of

SIDES: tuple[Side, ...] = ("q", "kv")


def test_bytes_of_a_ring_step_by_step() -> None:
    spec = spec_of(8, 2, torch.bfloat16, 64, 64)
    calls = partial(calls_of, Strategy(), Mask(96, 96, causal=True), "zigzag", 3, spec)
    kv, grad = 2 * 64 * 2 * 2, 2 * 64 * 2 * 4
    # Rank 1 sends its own 32 rows, then the needed half of rank 0's; in the backward it returns the
    # gradients of that half and then of rank 2's rows.
    assert sent(calls())[1] == Sent((32 + 16) * kv, 2)
    backward = sent(calls(("kv", False)), backward=True)[1]
    assert backward == Sent((32 + 16) * kv + (16 + 32) * grad, 4)
    # In order, the gradients of rank 1's own 32 rows add a message.
    backward = sent(calls(("kv", True)), backward=True)[1]
    assert backward == Sent((32 + 16) * kv + (32 + 16 + 32) * grad, 5)
    q, dq = 8 * (2 * 64 * 2 + 2 * 4), 8 * 64 * 4
    backward = sent(calls(("q", False)), backward=True)[1]
    assert backward.nbytes == (32 + 16) * q + (16 + 32) * dq


def test_bytes_of_ulysses() -> None:
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        spec = spec_of(8, 4, dtype, 32, 32)
        calls = calls_of(Strategy(ulysses_degree=4), Mask(64, 64), "contiguous", 4, spec)
        rows = 3 * 16  # three other ranks each get a quarter of the heads
        there, back = rows * (2 + 1 + 1) * 32 * size, rows * 2 * (32 * size + 4)
        assert sent(calls)[1].nbytes == there + back
        # dout there; dq, dk and dv back, rounded.
        backward = Sent(rows * (2 + 2 + 1 + 1) * 32 * size, 2)
        assert sent(calls, backward=True)[1] == backward


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_side_with_fewer_bytes_travels(dtype: torch.dtype, kind: str) -> None:
    """Bytes are summed over all ranks; KV is sent on a tie."""
    chosen = set()
    sizes = cycle(product((1, 2, 3), (8, 32, 128), (1, 2, 4, 8)))
    for mask, world_size in product(MASKS.values(), (1, 2, 6)):
        degree, headdim, nheads_kv = next(sizes)
        spec = spec_of(8, nheads_kv, dtype, headdim, headdim)
        strategy = Strategy(inner_degree=math.gcd(degree, world_size))
        nbytes = {}
        for side in SIDES:
            calls = calls_of(strategy, mask, kind, world_size, spec, (side, False))
            nbytes[side] = sum(one.nbytes for one in sent(calls, backward=True))
        layouts = calls[0].layouts
        sent_side = choose_sent_side(spec, *layouts, mask)
        assert sent_side == ("q" if nbytes["q"] < nbytes["kv"] else "kv"), (spec, layouts, mask)
        chosen.add(sent_side)
    assert chosen == {"q", "kv"}


@pytest.mark.parametrize("world_size", [2, 3, 64])
@pytest.mark.parametrize("seqlen", [1024, 10_007])
def test_exchanged_queries_balance_causal_work(seqlen: int, world_size: int) -> None:
    mask = Mask(seqlen, seqlen, causal=True)
    given = SequenceLayout.contiguous(seqlen, world_size)
    mean = mask.area / world_size
    before, after = (
        max(layout.mask_area(mask)) / mean for layout in (given, exchanged_layout(given))
    )
    # A shard, and so a half, may be a row longer than another's.
    row = 4 * seqlen / mean
    assert 1 <= after <= 1 + row and before == pytest.approx(2 - 1 / world_size, abs=row)


def test_flops_count_each_headdim() -> None:
    """Equal head dims are compared with flash-attention's rule in tests/integration."""
    spec = AttentionSpec("cpu", torch.float32, 2, 8, 2, 10, 3)
    # q k^T and p v; then q k^T, do v^T, ds k, ds^T q and p^T do.
    assert flops(7, spec, backward=False) == 2 * 8 * 7 * 2 * (10 + 3)
    assert flops(7, spec, backward=True) == 2 * 8 * 7 * 2 * (10 + 3 + 10 + 10 + 3)


# -- the vectors of specifications A and C


@pytest.mark.parametrize(
    ("given", "local_len", "start", "end", "saving", "steps", "nbytes"),
    [
        # 24 blocks send 50331648 bytes, with head_dim 64, 4 kv heads and 4-byte items.
        ((0, 2, 2048, 1024, 16), 1024, 0, 1024, 0.5, 1, 50331648 // 24),
        ((2, 4, 8192, 1024, 16), 2048, 4096, 6144, 0.75, 3, 3 * 2 * 2048 * 64 * 4 * 4),
        ((0, 1, 100, 64, 4), 100, 0, 100, 0.0, 0, 0),
    ],
)
def test_vectors(
    given: tuple[int, ...],
    local_len: int,
    start: int,
    end: int,
    saving: float,
    steps: int,
    nbytes: int,
) -> None:
    rank, world_size, seqlen, hidden_size, nheads = given
    layout, mask = SequenceLayout.contiguous(seqlen, world_size), Mask(seqlen, seqlen)
    (segment,) = layout.segments(rank)
    assert (segment.start, segment.start + segment.length) == (start, end)
    assert layout.shard_len(rank) == local_len and 1 - local_len / seqlen == saving
    headdim = hidden_size // nheads
    spec = spec_of(nheads, nheads // 4, torch.float32, headdim, headdim)
    calls = calls_of(Strategy(), mask, "contiguous", world_size, spec)
    assert sent(calls)[rank] == Sent(nbytes, steps)
