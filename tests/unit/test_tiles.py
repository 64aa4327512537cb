"""Tiles hold every visible pair once, and no more rows travel than are needed.

Tiles are pure data, so they are compared with the dense mask for every rank of every layout.
"""

import time
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.program import Hop
from ring_attn.core.ranks import OneRank
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import (
    MaskKind,
    Tile,
    Traveller,
    gathered_tiles,
    pair_tiles,
    ring_grid,
)
from ring_attn.core.work import needed_displacements
from ring_attn.strategies.base import Call
from ring_attn.strategies.registry import program_of
from ring_attn.testing import LAYOUTS, Layouts, layouts_of
from ring_attn.testing import masks as table_masks
from tests.bounds import painted, visible_pairs

LENGTHS = ((0, 0), (1, 1), (13, 13), (20, 20), (7, 13), (13, 7), (11, 0), (3, 3))
WINDOWS = ((-1, -1), (0, -1), (4, -1), (7, 2), (-1, 3), (0, 0), (2, 20))
TRAVELLERS: tuple[Traveller, ...] = ("kv", "q")
MIXED = [pair for pair in product(("contiguous", "zigzag", "boundaries"), repeat=2)
         if pair[0] != pair[1]]  # fmt: skip


def masks(seqlen_q: int, seqlen_k: int) -> Iterator[Mask]:
    """Every combination of causal, window and documents (unequal, empty and one-row ones too)."""
    cu_q = (0, seqlen_q // 3, seqlen_q // 3, seqlen_q // 2, seqlen_q)
    cu_k = (0, seqlen_k // 4, seqlen_k // 2, seqlen_k // 2, seqlen_k)
    for causal, window in product((False, True), WINDOWS):
        if causal and window[1] >= 0:
            continue
        yield Mask(seqlen_q, seqlen_k, causal, window)
        yield Mask(seqlen_q, seqlen_k, causal, window, cu_q, cu_k)
    if seqlen_q == seqlen_k:
        rows = tuple(range(seqlen_q + 1))
        yield Mask(seqlen_q, seqlen_k, True, (-1, -1), rows, rows)


def check_tile(tile: Tile) -> None:
    """Checks that no row, column or bound is idle, and that the kind is right."""
    visible = visible_pairs(tile)
    assert bool(visible.any(0).all()), f"a column without a visible pair: {tile}"
    assert bool(visible.any(1).all()), f"a row without a visible pair: {tile}"
    assert tile.area == int(visible.sum())
    assert (tile.rows, tile.cols) == visible.shape
    for looser in {tile._replace(lo=None), tile._replace(hi=None)} - {tile}:
        found = visible_pairs(looser)
        assert not torch.equal(found, visible), "an idle bound"
    if bool(visible.all()):
        assert tile.kind is MaskKind.FULL
    else:
        assert tile.kind is (MaskKind.CAUSAL if tile.lo is None else MaskKind.WINDOW)


class RingStep(NamedTuple):
    source: int
    rows: slice
    tiles: tuple[Tile, ...]


def plans(layouts: Layouts, mask: Mask, travels: Traveller = "kv") -> list[list[RingStep]]:
    """The steps of each rank in a plain ring: owner, held rows and tiles of each shard."""
    return [[*_steps(OneRank(layouts, mask, r), travels)] for r in range(layouts[0].world_size)]


def _steps(ranks: OneRank, travels: Traveller) -> Iterator[RingStep]:
    grid = ring_grid(ranks.world_size)
    for by in ranks.order(grid, travels):
        rows = ranks.moving(grid, travels, by) if any(by) else slice(0, ranks.rows(travels))
        source = grid.moved(ranks.rank, by, -1)
        yield RingStep(source, rows, ranks.tiles(grid, travels, by))


def check_everything(layouts: Layouts, mask: Mask) -> None:
    world_size = layouts[0].world_size
    q_rows, kv_rows = (
        [layout.position_ids(rank) for rank in range(world_size)] for layout in layouts
    )
    pairs = [*product(range(world_size), repeat=2)]
    visible = {(r, s): mask.dense(q_rows[r], kv_rows[s]) for r, s in pairs}
    needed = {0} | {(r - s) % world_size for r, s in pairs if bool(visible[r, s].any())}
    assert [by for _, by in needed_displacements(*layouts, mask)] == sorted(needed)
    for (r, s), seen in visible.items():
        tiles = pair_tiles(*layouts, mask, r, s)
        assert torch.equal(painted(tiles, *seen.shape), seen.long()), (r, s, tiles)
        keys = [(tile.q.start, -tile.kv.start) for tile in tiles]
        assert keys == sorted(keys), "tiles of the same rows together, kv descending"
        for tile in tiles:
            check_tile(tile)
    for travels in TRAVELLERS:
        for rank, plan in enumerate(plans(layouts, mask, travels)):
            away = [step.source - rank if travels == "q" else rank - step.source for step in plan]
            assert sorted(by % world_size for by in away) == sorted(needed)
            for index, step in enumerate(plan):
                check_step(index, step, rank, visible, travels)


def check_step(
    index: int,
    step: RingStep,
    rank: int,
    visible: dict[tuple[int, int], Tensor],
    travels: Traveller,
) -> None:
    """Checks tiles, counted from the first held row; rows travel from first to last needed row."""
    side = 1 if travels == "kv" else 0
    seen = visible[(rank, step.source) if travels == "kv" else (step.source, rank)]
    held = seen[:, step.rows] if travels == "kv" else seen[step.rows]
    assert int(held.sum()) == int(seen.sum()), "a row that is needed does not travel"
    assert torch.equal(painted(step.tiles, *held.shape), held.long())
    if index == 0:
        assert step.rows == slice(0, seen.size(side)), "a rank's own rows are all there"
        return
    others = [
        pairs.any(1 - side)
        for pair, pairs in visible.items()
        if pair[0] != pair[1] and pair[side] == step.source
    ]
    rows = torch.stack(others).any(0).nonzero().flatten().tolist()
    assert step.rows == (slice(rows[0], rows[-1] + 1) if rows else slice(0, 0))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kinds", [*LAYOUTS, *MIXED], ids=str)
@pytest.mark.sweep(4)
def test_each_visible_pair_once(kinds: Any, lengths: tuple[int, int], world_size: int) -> None:
    for mask in masks(*lengths):
        check_everything(layouts_of(kinds, mask, world_size), mask)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", table_masks(61))
def test_tiles_of_gathered_queries_hold_every_visible_pair_once(name: str, layout: str) -> None:
    """Gathered keys are covered by test_strategies, which runs every mask."""
    mask = table_masks(61)[name]
    q, kv = layouts_of(layout, mask, 4)
    rows = max(q.shard_lens) + 2
    for rank in range(4):
        expected = torch.zeros(4 * rows, kv.shard_len(rank), dtype=torch.int64)
        for source in range(4):
            seen = mask.dense(q.position_ids(source), kv.position_ids(rank))
            expected[source * rows : source * rows + q.shard_len(source)] = seen
        tiles = gathered_tiles(q, kv, mask, rank, rows, "q")
        assert torch.equal(painted(tiles, *expected.shape), expected)


def test_a_touched_slice_is_the_band_in_its_bounding_box() -> None:
    bounds = (None, *range(-7, 8))
    for rows, cols, q0, k0 in product((0, 1, 3, 5), (0, 1, 4), (0, 2), (0, 3)):
        for lo, hi in product(bounds, bounds):
            rectangle = Tile(q0, q0 + rows, k0, k0 + cols, lo, hi)
            visible, tile = visible_pairs(rectangle), rectangle.touched
            assert (tile is not None) == bool(visible.any()), rectangle
            if tile is not None:
                check_tile(tile)
                count = painted((tile,), q0 + rows, k0 + cols)[rectangle.q, rectangle.kv]
                assert torch.equal(count, visible.long()), rectangle


# -- promises of the design for particular layouts


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_zigzag_balances_every_step(world_size: int) -> None:
    n = 12 * world_size
    layout = SequenceLayout.zigzag(n, world_size)
    for steps in zip(*plans((layout, layout), Mask(n, n, causal=True)), strict=True):
        areas = {sum(tile.area for tile in step.tiles) for step in steps}
        assert len(areas) == 1, "a rank waits for another"


def test_steps_have_one_tile_where_one_is_enough() -> None:
    for world_size, kind in product((1, 2, 5), ("contiguous", "striped", "zigzag")):
        n = 12 * world_size
        layout = SequenceLayout.from_name(kind, n, world_size)
        one_tile = [Mask(n, n), Mask(n, n, causal=True)]
        if kind != "zigzag":
            one_tile += [Mask(n, n, True, (9, -1)), Mask(n, n, False, (5, 7))]
        for mask in one_tile:
            for plan in plans((layout, layout), mask):
                assert max(len(step.tiles) for step in plan) == 1, (kind, mask)
        if kind == "contiguous":
            for mask, rank, side in product(one_tile, range(world_size), TRAVELLERS):
                assert len(gathered_tiles(layout, layout, mask, rank, 12, side)) == 1


@pytest.mark.parametrize("world_size", [2, 6])
@pytest.mark.parametrize("chunk", [1, 5])
def test_a_window_makes_as_many_hops_as_it_is_shards_wide(world_size: int, chunk: int) -> None:
    n = world_size * chunk
    layout = SequenceLayout.contiguous(n, world_size)
    for window in range(n + 3):
        hops = -(-window // chunk)
        mask = Mask(n, n, causal=True, window_size=(window, -1))
        for travels in TRAVELLERS:
            for plan in plans((layout, layout), mask, travels):
                assert len(plan) == min(hops, world_size - 1) + 1
        both = Mask(n, n, window_size=(window, window))
        assert len(plans((layout, layout), both)[0]) == min(2 * hops, world_size - 1) + 1


def test_distances_that_nobody_needs_are_jumped_over() -> None:
    # Two documents of two shards each: only neighbours exchange rows.
    layout = SequenceLayout.contiguous(16, 4)
    mask = Mask(16, 16, False, (-1, -1), (0, 8, 16), (0, 8, 16))
    for travels in TRAVELLERS:
        plan = plans((layout, layout), mask, travels)[0]
        assert [step.source for step in plan] == [0, 3, 1]
    spec = AttentionSpec("cpu", torch.float32, 1, 1, 1, 8, 8)
    program = program_of(
        Call(spec, (layout, layout), mask, 0, Strategy(), 0.1, "aten"), backward=False
    )
    assert [post.route for post in program.posts()] == [Hop(1, 3), Hop(2, 2)]


def test_the_kinds_of_a_causal_ring() -> None:
    layout = SequenceLayout.contiguous(1024, 4)
    (plan,) = plans((layout, layout), Mask(1024, 1024, causal=True))[2:3]
    assert [step.source for step in plan] == [2, 1, 0, 3]
    kinds = [[tile.kind.name for tile in step.tiles] for step in plan]
    assert kinds == [["CAUSAL"], ["FULL"], ["FULL"], []]


@pytest.mark.parametrize("num_documents", [1, 2000])
def test_a_program_is_made_quickly(num_documents: int) -> None:
    """One rank computes the distances that all 64 need; each new packed batch needs a program."""
    n, world_size = 2**20, 64
    cuts = torch.randint(1, n, (num_documents - 1,), generator=torch.Generator().manual_seed(0))
    documents = (0, *sorted(cuts.tolist()), n)
    layout = SequenceLayout.zigzag(n, world_size)
    mask = Mask(n, n, True, (-1, -1), documents, documents)
    spec = AttentionSpec("cpu", torch.bfloat16, 1, 8, 2, 64, 64)
    call = Call(spec, (layout, layout), mask, 17, Strategy(), 0.1, "aten")
    start = time.process_time()  # without other processes
    program = program_of(call, backward=False)
    assert time.process_time() - start < 0.5  # 0.03 on a quiet core
    assert program is program_of(call, backward=False)
