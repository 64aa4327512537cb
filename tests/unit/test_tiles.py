"""Tiles, work and turns of all pairs of ranks are those of the dense mask."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, product
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attn.call import Call, Options
from ring_attn.core import work as module
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.masks import documents, from_dense
from ring_attn.core.program import Hop
from ring_attn.core.ranks import OneRank
from ring_attn.core.segments import Segment
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import (
    MaskKind,
    Side,
    StepTiles,
    Tile,
    gathered_tiles,
    pair_tiles,
    ring_grid,
)
from ring_attn.core.turns import turns_of
from ring_attn.core.work import needed_displacements, needed_rows, pair_work
from ring_attn.strategies.registry import program_of
from ring_attn.testing import Layouts
from tests.bounds import painted, visible_pairs
from tests.counts import counted
from tests.drawn import layouts_for, masks, reproducible
from tests.unit.test_programs import calls_of

SIDES: tuple[Side, ...] = ("kv", "q")


class RingStep(NamedTuple):
    source: int
    rows: slice
    tiles: StepTiles


# True where a query row (dim 0) of rank a sees a key row (dim 1) of rank b.
Visible = dict[tuple[int, int], Tensor]


@settings(reproducible, max_examples=200)
@given(st.data())
def test_everything_is_as_in_the_dense_mask(data: st.DataObject) -> None:
    mask = data.draw(masks())
    q, kv = data.draw(layouts_for(mask, st.integers(1, 6)))
    ranks = q.world_size
    positions = [[layout.position_ids(rank) for rank in range(ranks)] for layout in (q, kv)]
    visible = {
        (a, b): mask.dense(positions[0][a], positions[1][b])
        for a, b in product(range(ranks), repeat=2)
    }
    check_pairs((q, kv), mask, visible, chunk=data.draw(st.sampled_from((7, module.CHUNK))))
    for sent_side in SIDES:
        check_turns((q, kv), mask, visible, sent_side)
        check_ring((q, kv), mask, visible, sent_side)
        check_gathering((q, kv), mask, visible, sent_side)


def check_pairs(layouts: Layouts, mask: Mask, visible: Visible, chunk: int) -> None:
    with mock.patch.object(module, "CHUNK", chunk):
        work = module.compute_pair_work(*layouts, mask)
        with mock.patch.object(module, "SMALL", 0):
            totals = module.totals.__wrapped__(*layouts, mask)
        in_table = module.totals.__wrapped__(*layouts, mask)
    for pair, seen in visible.items():
        tiles = pair_tiles(*layouts, mask, *pair)
        assert torch.equal(painted(tiles, *seen.shape), seen.long()), (pair, tiles)
        keys = [(tile.q.start, -tile.kv.start) for tile in tiles]
        assert keys == sorted(keys), "tiles of the same rows together, kv descending"
        for tile in tiles:
            check_tile(tile)
        assert int(work.area[pair]) == int(seen.sum()), pair
        assert int(work.area[pair]) > 0 or int(work.edge[pair]) == 0, pair
        for rows, dim in ((work.q, 1), (work.kv, 0)):
            assert (int(rows.start[pair]), int(rows.stop[pair])) == run_of(seen.any(dim)), pair
    moving = [totals.moving[sent_side] for sent_side in SIDES]
    assert torch.equal(totals.seen, work.area > 0)
    for sent_side, dim in (("kv", 1), ("q", 0)):
        assert torch.equal(totals.num_seen[sent_side], totals.seen.sum(dim))
        sums = [table.sum(dim) for table in work.at(...)]
        for same in (totals, in_table):
            assert all(map(torch.equal, same.work[sent_side], sums))
    for rank, (dim, rows) in product(range(layouts[0].world_size), enumerate(moving)):
        others = [
            seen.any(dim)
            for pair, seen in visible.items()
            if pair[1 - dim] == rank and pair != (rank, rank)
        ]
        run = run_of(torch.stack(others).any(0)) if others else (0, 0)
        assert (int(rows.start[rank]), int(rows.stop[rank])) == run, (rank, dim)
    check_lines(layouts, mask)


def check_lines(layouts: Layouts, mask: Mask) -> None:
    """Checks that a line computed alone, as of many ranks, is that of the table."""
    for rank, sent_side in product(range(layouts[0].world_size), SIDES):
        with mock.patch.object(module, "SMALL", 0):
            alone = module.sizes_with.__wrapped__(*layouts, mask, rank, sent_side)
        assert alone == module.sizes_with(*layouts, mask, rank, sent_side)


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


def check_turns(layouts: Layouts, mask: Mask, visible: Visible, sent_side: Side) -> None:
    """Checks an exchange: exactly the needed rows go from rank to rank, in one turn each."""
    dim = 0 if sent_side == "kv" else 1
    rows = needed_rows(*layouts, mask, sent_side)
    sent: dict[tuple[int, int], list[int]] = {}
    for rank in range(layouts[0].world_size):
        held = torch.arange(layouts[1 - dim].shard_len(rank))
        for turn in OneRank(layouts, mask, rank).row_exchanges(sent_side):
            if turn.sent:
                assert (rank, turn.hop.send_to) not in sent, "one turn for each pair"
                sent[rank, turn.hop.send_to] = [i for run in turn.runs for i in held[run].tolist()]
    for (a, b), seen in visible.items():
        needed = indices(seen.any(dim))
        assert int(rows[a, b]) == (0 if a == b else len(needed))
        if a != b:
            assert sent.get((b, a) if sent_side == "kv" else (a, b), []) == needed


def check_ring(layouts: Layouts, mask: Mask, visible: Visible, sent_side: Side) -> None:
    """Checks that a ring makes no needless hop, and sends no needless row."""
    ranks = layouts[0].world_size
    distances = {0} | {(a - b) % ranks for (a, b), seen in visible.items() if bool(seen.any())}
    assert [by for _, by in needed_displacements(*layouts, mask)] == sorted(distances)
    for rank, steps in enumerate(plans(layouts, mask, sent_side)):
        away = [step.source - rank if sent_side == "q" else rank - step.source for step in steps]
        assert sorted(by % ranks for by in away) == sorted(distances)
        for index, step in enumerate(steps):
            check_step(index, step, rank, visible, sent_side)


def check_step(index: int, step: RingStep, rank: int, visible: Visible, sent_side: Side) -> None:
    """Checks tiles, counted from the first held row; rows travel from first to last needed row."""
    side = 1 if sent_side == "kv" else 0
    seen = visible[(rank, step.source) if sent_side == "kv" else (step.source, rank)]
    held = seen[:, step.rows] if sent_side == "kv" else seen[step.rows]
    assert int(held.sum()) == int(seen.sum()), "a row that is needed does not travel"
    assert torch.equal(painted(step.tiles, *held.shape), held.long())
    assert step.tiles.sizes.area == StepTiles.of(step.tiles.listed).sizes.area == int(seen.sum())
    if index == 0:
        assert step.rows == slice(0, seen.size(side)), "a rank's own rows are all there"
        return
    others = [
        pairs.any(1 - side)
        for pair, pairs in visible.items()
        if pair[0] != pair[1] and pair[side] == step.source
    ]
    rows = indices(torch.stack(others).any(0))
    assert step.rows == (slice(rows[0], rows[-1] + 1) if rows else slice(0, 0))


def check_gathering(layouts: Layouts, mask: Mask, visible: Visible, gathers: Side) -> None:
    """Checks tiles over the shards of all ranks, with two rows between them."""
    ranks, side = layouts[0].world_size, 1 if gathers == "kv" else 0
    rows = max(layouts[side].shard_lens) + 2
    for rank in range(ranks):
        shape = [layout.shard_len(rank) for layout in layouts]
        shape[side] = ranks * rows
        expected = torch.zeros(shape, dtype=torch.int64)
        for source in range(ranks):
            seen = visible[(rank, source) if gathers == "kv" else (source, rank)]
            expected.narrow(side, source * rows, seen.size(side)).copy_(seen)
        tiles = gathered_tiles(*layouts, mask, rank, rows, gathers)
        assert torch.equal(painted(tiles, *shape), expected)


def indices(seen: Tensor) -> list[int]:
    """Where a vector is True."""
    return seen.nonzero().flatten().tolist()


def run_of(seen: Tensor) -> tuple[int, int]:
    """The run around all places where a vector is True."""
    found = indices(seen)
    return (found[0], found[-1] + 1) if found else (0, 0)


def plans(layouts: Layouts, mask: Mask, sent_side: Side = "kv") -> list[list[RingStep]]:
    """The steps of each rank in a plain ring: owner, held rows and tiles of each shard."""
    return [[*_steps(OneRank(layouts, mask, r), sent_side)] for r in range(layouts[0].world_size)]


def _steps(ranks: OneRank, sent_side: Side) -> Iterator[RingStep]:
    grid = ring_grid(ranks.world_size)
    for by in ranks.order(grid, sent_side):
        rows = ranks.moving(grid, sent_side, by) if any(by) else slice(0, ranks.rows(sent_side))
        source = grid.moved(ranks.rank, by, -1)
        yield RingStep(source, rows, ranks.tiles(grid, sent_side, by))


def test_a_touched_slice_is_the_band_in_its_bounding_box() -> None:
    bounds = (None, *range(-7, 8))
    for rows, cols, q0, k0 in product((0, 1, 3, 5), (0, 1, 4), (0, 2), (0, 3)):
        for lo, hi in product(bounds, bounds):
            rectangle = Tile(q0, q0 + rows, k0, k0 + cols, lo, hi)
            visible, tile = visible_pairs(rectangle), rectangle.trimmed
            assert (tile is not None) == bool(visible.any()), rectangle
            if tile is not None:
                check_tile(tile)
                count = painted((tile,), q0 + rows, k0 + cols)[rectangle.q, rectangle.kv]
                assert torch.equal(count, visible.long()), rectangle


# -- promises of the design for particular layouts


def test_edges() -> None:
    layout = SequenceLayout.contiguous(10, 2)
    work = pair_work(layout, layout, Mask(10, 10, causal=True))
    assert work.area.tolist() == [[15, 0], [25, 15]] and work.edge.tolist() == [[4, 0], [0, 4]]
    work = pair_work(layout, layout, Mask(10, 10, True, (2, 0)))
    assert work.area.tolist() == [[12, 0], [3, 12]] and work.edge.tolist() == [[6, 0], [1, 6]]


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
            for mask, rank, side in product(one_tile, range(world_size), SIDES):
                assert len(gathered_tiles(layout, layout, mask, rank, 12, side)) == 1


def test_distances_that_nobody_needs_are_jumped_over() -> None:
    # Two documents of two shards each: only neighbours exchange rows.
    call = calls_of(Strategy(), documents([0, 8, 16]), "contiguous", 4)[0]
    routes = [post.route for post in program_of(call, backward=False).posts()]
    assert routes == [Hop(1, 3), Hop(2, 2)]


# -- an exchange

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


def test_few_turns() -> None:
    """All pairs need a turn per distance; few pairs need about a turn per partner of a rank."""
    layout = SequenceLayout.zigzag(64, 16)
    assert len(turns_of(layout, layout, Mask(64, 64), "kv")) == 15
    mask, layout = placed(12)
    rows = needed_rows(layout, layout, mask, "kv")
    partners = max(int((rows > 0).sum(dim).max()) for dim in (0, 1))
    distances = len(needed_displacements(layout, layout, mask)) - 1
    assert partners <= len(turns_of(layout, layout, mask, "kv")) <= partners + 1 < distances
    # Three distances, two partners; the first free turn of each pair would be one of three, too.
    seen = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]]).bool()
    layout = SequenceLayout.contiguous(4, 4)
    assert len(turns_of(layout, layout, from_dense(seen), "kv")) == 3
    # Two distances, one partner: 0 sends to 1, and 2 to 0.
    seen = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]).bool()
    assert len(turns_of(layout, layout, from_dense(seen), "kv")) == 1


# -- work


def test_work_of_many_ranks_or_documents_takes_few_calls() -> None:
    """A call for each pair of ranks would be a million."""
    size, parts = 8192, [[] for _ in range(64)]
    for start in range(0, 200 * size, size):
        for rank, part in enumerate(parts):
            for one in SequenceLayout.zigzag(size, 64).segments(rank):
                part.append(Segment(start + one.start, one.length))
    for layout, mask in (
        (SequenceLayout.zigzag(1 << 18, 1024), Mask(1 << 18, 1 << 18, causal=True)),
        (SequenceLayout.from_segments(parts), documents(range(0, 201 * size, size), causal=True)),
    ):
        work, calls = counted(partial(pair_work, layout, layout, mask))
        assert calls < 200_000
        assert int(work.area.sum()) == mask.area


@pytest.mark.parametrize("num_documents", [1, 2000])
def test_a_program_takes_few_calls(num_documents: int) -> None:
    """One rank computes the distances that all 64 need; each new packed batch needs a program."""
    n, world_size = 2**20, 64
    cuts = torch.randint(1, n, (num_documents - 1,), generator=torch.Generator().manual_seed(0))
    layout = SequenceLayout.zigzag(n, world_size)
    mask = documents((0, *sorted(cuts.tolist()), n), causal=True)
    spec = AttentionSpec("cpu", torch.bfloat16, 1, 8, 2, 64, 64)
    call = Call(
        options=Options(),
        spec=spec,
        backend="aten",
        layouts=(layout, layout),
        mask=mask,
        rank=17,
        strategy=Strategy(),
    )
    program, calls = counted(partial(program_of, call, backward=False))
    assert calls < 30_000  # 7,000 were counted
    assert program is program_of(call, backward=False)
