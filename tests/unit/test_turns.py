"""Turns of an exchange: each pair that needs rows has one turn; exactly the needed rows travel."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch

from ring_attn.core.layout import Segment, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.masks import documents
from ring_attn.core.ranks import EveryRank, OneRank
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import needed_displacements
from ring_attn.core.turns import turns_of
from ring_attn.core.work import needed_rows
from ring_attn.machines.count import bytes_sent, peak_bytes
from ring_attn.strategies.registry import make_call, program_of
from ring_attn.testing import LAYOUTS, layouts_of, masks

SPEC = AttentionSpec("cpu", torch.float32, 1, 1, 1, 16, 16)
LENGTHS = (40, 3, 90, 11, 64, 64, 7, 33, 128, 5, 21, 46)


def placed(world_size: int) -> tuple[Mask, SequenceLayout]:
    """Puts the halves of each document on distant ranks, among pieces of other documents."""
    parts: list[list[Segment]] = [[] for _ in range(world_size)]
    start = 0
    for number, length in enumerate(LENGTHS):
        half = length // 2
        for piece, (first, rows) in enumerate(((start, half), (start + half, length - half))):
            rank = (5 * number + (3 + number) * piece) % world_size
            parts[rank].append(Segment(first, rows))
        start += length
    return documents([0, *accumulate(LENGTHS)], causal=True), SequenceLayout.from_segments(parts)


def sides(name: str, world_size: int) -> Iterator[tuple[Mask, Any]]:
    """A mask with every layout."""
    if name == "placed":
        mask, layout = placed(world_size)
        yield mask, (layout, layout)
        return
    mask = masks(61)[name]
    for one in LAYOUTS:
        yield mask, layouts_of(one, mask, world_size)


@pytest.mark.parametrize("travels", ["kv", "q"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", [*masks(61), "placed"])
def test_rows_are_those_that_see(name: str, world_size: int, travels: Any) -> None:
    """Compares numbers of rows, and the rows sent from rank to rank, with the dense mask."""
    for mask, layouts in sides(name, world_size):
        assert_exact(mask, layouts, world_size, travels)


def assert_exact(mask: Mask, layouts: Any, world_size: int, travels: Any) -> None:
    dense = mask.dense()
    rows = needed_rows(*layouts, mask, travels)
    sent: dict[tuple[int, int], list[int]] = {}
    turns = [OneRank(layouts, mask, rank).turns(travels) for rank in range(world_size)]
    every = EveryRank(layouts, mask).turns(travels)
    for rank, mine in enumerate(turns):
        for number, (turn, of_all) in enumerate(zip(mine, every, strict=True)):
            assert tuple(int(x[rank]) for x in of_all.hop) == turn.hop
            assert (int(of_all.sent[rank]), int(of_all.received[rank])) == turn[2:4]
            assert int(of_all.tiles.area[rank]) == sum(tile.area for tile in turn.tiles)
            assert turns[turn.hop.send_to][number].hop.recv_from == rank
            assert turns[turn.hop.send_to][number].received == turn.sent
            if turn.sent:
                assert (rank, turn.hop.send_to) not in sent, "one turn for each pair"
                held = torch.arange(layouts[travels == "kv"].shard_len(rank))
                sent[rank, turn.hop.send_to] = [i for run in turn.runs for i in held[run].tolist()]
    for a in range(world_size):
        for b in range(world_size):
            seen = dense[layouts[0].position_ids(a)][:, layouts[1].position_ids(b)]
            some = seen.any(0 if travels == "kv" else 1).nonzero().flatten().tolist()
            assert int(rows[a, b]) == len(some)
            if a != b:
                owner, holder = (b, a) if travels == "kv" else (a, b)
                assert sent.get((owner, holder), []) == some


def test_few_turns() -> None:
    """All pairs need a turn per distance; few pairs need about a turn per partner of a rank."""
    layout = SequenceLayout.zigzag(64, 16)
    assert len(turns_of(layout, layout, Mask(64, 64), "kv")) == 15
    mask, layout = placed(12)
    rows = needed_rows(layout, layout, mask, "kv").clone().fill_diagonal_(0)
    partners = max(int((rows > 0).sum(dim).max()) for dim in (0, 1))
    distances = len(needed_displacements(layout, layout, mask)) - 1
    assert partners <= len(turns_of(layout, layout, mask, "kv")) <= partners + 1 < distances


def test_a_rank_holds_no_more_with_more_ranks() -> None:
    peaks = set()
    for world_size in (6, 12, 24):
        layout = SequenceLayout.contiguous(64 * world_size, world_size)
        args = (SPEC, (layout, layout), Mask(layout.seqlen, layout.seqlen), 1)
        call = make_call(Strategy("exchange"), *args, backend="reference")
        peaks.add(peak_bytes(call, backward=True))
    assert len(peaks) == 1


def test_nothing_but_what_is_needed_is_sent() -> None:
    """Each document's first half is sent to its second half, wherever both lie."""
    mask, layout = placed(8)
    nbytes = 0
    for rank in range(8):
        call = make_call(Strategy("exchange"), SPEC, (layout, layout), mask, rank, backend="aten")
        nbytes += bytes_sent(program_of(call, backward=False))
    apart = [length // 2 for n, length in enumerate(LENGTHS) if (3 + n) % 8]
    padding = nbytes - sum(apart) * 2 * 16 * 4  # V begins at a multiple of 128 bytes
    assert 0 <= padding < 128 * len(apart)
