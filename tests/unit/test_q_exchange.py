"""Q-exchange: whose queries a rank has after the exchange, and that the work is then equal."""

from __future__ import annotations

import pytest

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.tiles import gathered_tiles
from ring_attn.strategies.q_exchange import exchanged_layout


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("seqlen", [0, 1, 7, 64, 97])
def test_a_rank_has_its_head_and_its_partners_tail(seqlen: int, world_size: int) -> None:
    given = SequenceLayout.contiguous(seqlen, world_size)
    here = exchanged_layout(given)
    everything = []
    for rank in range(world_size):
        mine, theirs = (given.position_ids(r).tolist() for r in (rank, world_size - 1 - rank))
        expected = mine[: len(mine) - len(mine) // 2] + theirs[len(theirs) - len(theirs) // 2 :]
        assert here.position_ids(rank).tolist() == sorted(expected)
        everything += expected
    assert sorted(everything) == list(range(seqlen))


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("seqlen", [1024, 8192, 10_007])
def test_causal_work_is_balanced(seqlen: int, world_size: int) -> None:
    mask = Mask(seqlen, seqlen, causal=True)
    given = SequenceLayout.contiguous(seqlen, world_size)

    def imbalance(layout: SequenceLayout) -> float:
        areas = layout.mask_area(mask)
        planned = [
            sum(t.area for t in gathered_tiles(layout, given, mask, r, max(given.shard_lens)))
            for r in range(world_size)
        ]
        assert planned == list(areas)
        return max(areas) / (sum(areas) / world_size)

    # A shard, and so a half, may be a row longer than another's.
    row = 4 * seqlen / (sum(given.mask_area(mask)) / world_size)
    assert 1 <= imbalance(exchanged_layout(given)) <= 1 + row
    assert imbalance(given) == pytest.approx(2 - 1 / world_size, abs=row)
