"""Plans compute every visible pair once, and move no more rows than are needed.

A plan is pure data, so it is compared with the dense mask for every rank of every layout.
test_programs.py checks that every message reaches its receiver.
"""

import time
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.program import Hop
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import (
    Band,
    MaskKind,
    Tile,
    Traveller,
    make_tile,
    needed_displacements,
    pair_tiles,
)
from ring_attn.machines.count import num_messages
from ring_attn.strategies.base import Call
from ring_attn.strategies.registry import program_of
from ring_attn.strategies.ring import RingStep, ring_steps
from ring_attn.testing import LAYOUTS, layouts_of
from tests.bounds import painted, visible_pairs

Plan = list[RingStep]

WORLD_SIZES = (1, 2, 3, 4, 5)
LENGTHS = ((0, 0), (1, 1), (13, 13), (20, 20), (7, 13), (13, 7), (11, 0), (3, 3))
WINDOWS = ((-1, -1), (0, -1), (4, -1), (7, 2), (-1, 3), (0, 0), (2, 20))


def masks(seqlen_q: int, seqlen_k: int) -> Iterator[Mask]:
    """Every combination of causal, window and documents (unequal and empty ones too)."""
    cu_q = (0, seqlen_q // 3, seqlen_q // 3, seqlen_q // 2, seqlen_q)
    cu_k = (0, seqlen_k // 4, seqlen_k // 2, seqlen_k // 2, seqlen_k)
    for causal, window in product((False, True), WINDOWS):
        if causal and window[1] >= 0:
            continue
        yield Mask(seqlen_q, seqlen_k, causal, window)
        yield Mask(seqlen_q, seqlen_k, causal, window, cu_q, cu_k)


def check_tile(tile: Tile) -> None:
    """Checks that no row, column or bound is idle, and that the kind is right."""
    visible = visible_pairs(tile)
    assert bool(visible.any(0).all()), f"a column without a visible pair: {tile}"
    assert bool(visible.any(1).all()), f"a row without a visible pair: {tile}"
    assert tile.area == int(visible.sum())
    assert (tile.rows, tile.cols) == visible.shape
    lo, hi = tile.band
    for looser in (Band(None, hi), Band(lo, None)):
        if looser != tile.band:
            found = visible_pairs(Tile(tile.q, tile.kv, looser))
            assert not torch.equal(found, visible), "an idle bound"
    if bool(visible.all()):
        assert tile.kind is MaskKind.FULL
    elif lo is None:
        assert tile.kind is MaskKind.CAUSAL
    else:
        assert tile.kind is MaskKind.WINDOW


def step_kind(visible: Tensor) -> MaskKind:
    if not bool(visible.any()):
        return MaskKind.NO_ATTENTION
    return MaskKind.FULL if bool(visible.all()) else MaskKind.CAUSAL


def plans(
    layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask, travels: Traveller = "kv"
) -> list[Plan]:
    ranks = range(layout_q.world_size)
    return [ring_steps(layout_q, layout_kv, mask, rank, travels) for rank in ranks]


def area_of(plan: Plan) -> int:
    return sum(tile.area for step in plan for tile in step.tiles)


def check_everything(layout_q: SequenceLayout, layout_kv: SequenceLayout, mask: Mask) -> None:
    world_size, dense = layout_q.world_size, mask.dense()
    q_rows = [layout_q.position_ids(rank) for rank in range(world_size)]
    kv_rows = [layout_kv.position_ids(rank) for rank in range(world_size)]
    visible = {
        (r, s): dense[q_rows[r]][:, kv_rows[s]] for r, s in product(range(world_size), repeat=2)
    }
    needed = {0} | {(r - s) % world_size for (r, s), pairs in visible.items() if bool(pairs.any())}
    displacements = needed_displacements(layout_q, layout_kv, mask)
    assert [distance for _, distance in displacements] == sorted(needed)

    for (r, s), pairs in visible.items():
        tiles = pair_tiles(layout_q, layout_kv, mask, r, s)
        assert torch.equal(painted(tiles, *pairs.shape), pairs.long()), (r, s, tiles)
        keys = [(tile.q.start, -tile.kv.start) for tile in tiles]
        assert keys == sorted(keys), "tiles of the same rows together, kv descending"
        for tile in tiles:
            check_tile(tile)

    travellers: tuple[Traveller, ...] = ("kv", "q")
    for travels in travellers:
        ring = plans(layout_q, layout_kv, mask, travels)
        done = set()
        for rank, plan in enumerate(ring):
            assert len(plan) == len(needed)
            for index, step in enumerate(plan):
                pair = (rank, step.source) if travels == "kv" else (step.source, rank)
                assert pair not in done
                done.add(pair)
                check_step(index, step, visible[pair], travels)
            check_rows_that_travel(plan, visible, travels)
        assert all(pair in done for pair, pairs in visible.items() if bool(pairs.any()))
        assert sum(map(area_of, ring)) == int(dense.sum())
        if travels == "kv":
            assert tuple(map(area_of, ring)) == layout_q.mask_area(mask)


def check_step(index: int, step: RingStep, visible: Tensor, travels: Traveller) -> None:
    """Checks that tiles, counted from the first held row, cover exactly the visible pairs."""
    held = visible[:, step.rows] if travels == "kv" else visible[step.rows]
    assert int(held.sum()) == int(visible.sum()), "a row that is needed does not travel"
    assert torch.equal(painted(step.tiles, *held.shape), held.long())
    for tile in step.tiles:
        check_tile(tile)
    assert step.kind is step_kind(visible)
    if index == 0:
        side = visible.size(1 if travels == "kv" else 0)
        assert step.rows == slice(0, side), "a rank's own rows are all there"


def check_rows_that_travel(
    plan: Plan, visible: dict[tuple[int, int], Tensor], travels: Traveller
) -> None:
    """Checks that rows travel from the first to the last that another rank needs."""
    for step in plan[1:]:
        needed = torch.zeros(0, dtype=torch.bool)
        for (r, s), pairs in visible.items():
            if r != s and step.source == (s if travels == "kv" else r):
                seen = pairs.any(0 if travels == "kv" else 1)
                needed = needed | seen if needed.numel() else seen
        found = needed.nonzero().flatten().tolist()
        assert step.rows == (slice(found[0], found[-1] + 1) if found else slice(0, 0))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.sweep(3)
def test_each_visible_pair_once(kind: str, lengths: tuple[int, int], world_size: int) -> None:
    for mask in masks(*lengths):
        check_everything(*layouts_of(kind, mask, world_size), mask)


@pytest.mark.parametrize(
    ("kind_q", "kind_kv"),
    [(q, kv) for q, kv in product(("contiguous", "zigzag", "boundaries"), repeat=2) if q != kv],
)
def test_mixed_layouts(kind_q: str, kind_kv: str) -> None:
    for world_size, lengths in product((2, 3), ((12, 12), (9, 14))):
        for mask in masks(*lengths):
            check_everything(*layouts_of((kind_q, kind_kv), mask, world_size), mask)


def test_one_document_a_row_and_long_documents_over_ranks() -> None:
    every = tuple(range(17))
    for kind, world_size in product(LAYOUTS, (1, 2, 4)):
        for cu in (every, (0, 1, 15, 16), (0, 16), (0, 5, 6, 16)):
            for causal, window in ((True, (-1, -1)), (False, (3, -1))):
                mask = Mask(16, 16, causal, window, cu, cu)
                check_everything(*layouts_of(kind, mask, world_size), mask)


def test_make_tile_is_the_band_in_its_bounding_box() -> None:
    bounds = (None, *range(-7, 8))
    for rows, cols, q0, k0 in product((0, 1, 3, 5), (0, 1, 4), (0, 2), (0, 3)):
        q, kv = slice(q0, q0 + rows), slice(k0, k0 + cols)
        for lo, hi in product(bounds, bounds):
            visible = visible_pairs(Tile(q, kv, Band(lo, hi)))
            tile = make_tile(q, kv, lo, hi)
            if not bool(visible.any()):
                assert tile is None, (q, kv, lo, hi)
                continue
            assert tile is not None, (q, kv, lo, hi)
            check_tile(tile)
            count = painted((tile,), q.stop, kv.stop)[q, kv]
            assert torch.equal(count, visible.long()), (q, kv, lo, hi)


# -- promises of the design for particular layouts


@cache
def causal(n: int) -> Mask:
    return Mask(n, n, causal=True)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 8])
def test_zigzag_balances_every_step(world_size: int) -> None:
    layout = SequenceLayout.zigzag(12 * world_size, world_size)
    for steps in zip(*plans(layout, layout, causal(12 * world_size)), strict=True):
        areas = {sum(tile.area for tile in step.tiles) for step in steps}
        assert len(areas) == 1, "a rank waits for another"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_steps_have_one_tile_where_one_is_enough(world_size: int) -> None:
    n = 12 * world_size
    for kind in ("contiguous", "striped", "zigzag"):
        layout = SequenceLayout.from_name(kind, n, world_size)
        one_tile = [Mask(n, n), causal(n)]
        if kind != "zigzag":
            one_tile += [Mask(n, n, True, (9, -1)), Mask(n, n, False, (5, 7))]
        for mask in one_tile:
            for plan in plans(layout, layout, mask):
                assert max(len(step.tiles) for step in plan) == 1, (kind, mask)


@pytest.mark.parametrize("world_size", [2, 4, 6])
@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_a_window_makes_as_many_hops_as_it_is_shards_wide(world_size: int, chunk: int) -> None:
    n = world_size * chunk
    layout = SequenceLayout.contiguous(n, world_size)
    for window in range(n + 3):
        hops = min(-(-window // chunk), world_size - 1)
        mask = Mask(n, n, causal=True, window_size=(window, -1))
        for travels in ("kv", "q"):
            for plan in plans(layout, layout, mask, travels):
                assert len(plan) == hops + 1
        both = Mask(n, n, window_size=(window, window))
        expected = min(2 * -(-window // chunk), world_size - 1)
        assert len(ring_steps(layout, layout, both, 0)) == expected + 1


def test_distances_that_nobody_needs_are_jumped_over() -> None:
    # Two documents of two shards each: only neighbours exchange rows.
    layout = SequenceLayout.contiguous(16, 4)
    mask = Mask(16, 16, False, (-1, -1), (0, 8, 16), (0, 8, 16))
    assert needed_displacements(layout, layout, mask) == ((0, 0), (0, 1), (0, 3))
    plan = ring_steps(layout, layout, mask, 0)
    assert [step.source for step in plan] == [0, 3, 1]
    assert [step.hop for step in plan] == [Hop(1, 3), Hop(2, 2), None]
    backward = ring_steps(layout, layout, mask, 0, "q")
    assert [step.source for step in backward] == [0, 3, 1]

    alone = Mask(16, 16, False, (-1, -1), (0, 4, 8, 12, 16), (0, 4, 8, 12, 16))
    plan = ring_steps(layout, layout, alone, 2)
    assert len(plan) == 1 and plan[0].hop is None


# -- refusals, the cache, and the time it takes


def test_striped_goes_with_striped_only() -> None:
    for kind in ("contiguous", "zigzag", "boundaries"):
        for kinds in (("striped", kind), (kind, "striped")):
            layouts = layouts_of(kinds, Mask(8, 8), 2)
            with pytest.raises(NotImplementedError, match="both be striped or neither, got .*str"):
                ring_steps(*layouts, Mask(8, 8), 0)


def test_layouts_and_mask_must_fit() -> None:
    layout = SequenceLayout.contiguous(8, 2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=rf"rank must be in \[0, 2\), got {rank}"):
            ring_steps(layout, layout, Mask(8, 8), rank)
    with pytest.raises(ValueError, match="same ranks, got .*world_size=2.*world_size=4"):
        ring_steps(layout, SequenceLayout.contiguous(8, 4), Mask(8, 8), 0)
    for mask in (Mask(8, 9), Mask(9, 8)):
        with pytest.raises(ValueError, match=r"positions, the layouts over \(8, 8\)"):
            ring_steps(layout, layout, mask, 0)


def test_a_program_is_made_quickly() -> None:
    # One rank computes the distances that all 64 need. Process time excludes other processes.
    n, world_size = 2**20, 64
    layout, mask = SequenceLayout.zigzag(n, world_size), Mask(n, n, causal=True)
    start = time.process_time()
    call = call_of(layout, mask)
    program = program_of(call, backward=False)
    assert time.process_time() - start < 1.0
    assert program is program_of(call, backward=False)
    assert area_of(ring_steps(layout, layout, mask, 17)) == n * (n + 1) // 2 // world_size


def test_a_program_of_many_documents_is_made_quickly() -> None:
    """Each new packed batch needs a program on every rank."""
    n, world_size = 2**20, 64
    cuts = torch.randint(1, n, (1999,), generator=torch.Generator().manual_seed(0))
    documents = (0, *sorted(cuts.tolist()), n)
    layout = SequenceLayout.zigzag(n, world_size)
    mask = Mask(n, n, True, (-1, -1), documents, documents)
    start = time.process_time()
    program = program_of(call_of(layout, mask), backward=False)
    assert time.process_time() - start < 0.15  # 0.03 on a quiet core
    assert 0 < num_messages(program) < world_size - 1


def call_of(layout: SequenceLayout, mask: Mask) -> Call:
    spec = AttentionSpec("cpu", torch.bfloat16, 1, 8, 2, 64, 64)
    return Call(spec, (layout, layout), mask, 17, Strategy(), 0.1, "aten")
