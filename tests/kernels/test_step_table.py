"""The step tables of launches against dense masks, over every kind of step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_attn.backends.triton import _rectangles as rectangles_of
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.tiles import Band, Tile
from ring_attn.kernels.step_table import (
    Rectangle,
    StepTable,
    column_range,
    load_run,
    make_step_table,
)
from ring_attn.strategies.ring import ring_steps
from ring_attn.testing import masks
from tests.bounds import painted
from tests.kernels.calls import DEVICE

BLOCKS = ((16, 16), (32, 16), (16, 64), (64, 32))
# Besides the shared masks: rows in whole blocks, and a window on the left only.
MASKS = masks(97) | {
    "whole blocks": Mask(128, 128, causal=True),
    "left window": Mask(97, 97, window_size=(40, -1)),
}


@dataclass(frozen=True)
class Case:
    """A step's rectangles, and its pairs as booleans (rows, cols)."""

    name: str
    rectangles: list[Rectangle]
    dense: Tensor

    def table(self, rows: int, cols: int, **options: Any) -> StepTable:
        options = {"descending": True} | options
        return make_step_table(self.rectangles, rows, cols, torch.device("cpu"), **options)


def cases() -> Iterator[Case]:
    """Every step of every rank, for all kinds of layouts and masks."""
    kinds = ("contiguous", "zigzag", "striped")
    for (name, mask), kind, world_size in product(MASKS.items(), kinds, (1, 2, 3)):
        layouts = [
            SequenceLayout.from_name(kind, n, world_size) for n in (mask.seqlen_q, mask.seqlen_k)
        ]
        for rank in range(world_size):
            for index, step in enumerate(ring_steps(*layouts, mask, rank)):
                keys = layouts[1].position_ids(step.source)[step.rows]
                yield Case(
                    f"{name}, {kind} {world_size}, rank {rank}, step {index}",
                    rectangles_of(step.tiles),
                    mask.dense(layouts[0].position_ids(rank), keys),
                )


CASES = list(cases())


def rows_of(table: StepTable) -> list[tuple[int, int, int, int]]:
    """(row_start, row_stop, first_run, last_run) of each block."""
    return [tuple(row) for row in table.blocks.tolist()[: table.num_blocks]]


def rows_in(blocks: list[tuple[int, int, int, int]]) -> list[int]:
    return [
        row for start, stop in sorted(block[:2] for block in blocks) for row in range(start, stop)
    ]


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_tables_hold_the_visible_pairs_once(blocks: tuple[int, int]) -> None:
    """Cuts blocks of rows where rectangles begin and end; their runs hold all visible pairs.

    Where every row is written, the blocks also hold the rows that see nothing.
    """
    block_rows, block_cols = blocks
    seen = set[tuple[bool, bool, bool]]()
    for case in CASES:
        table = case.table(*blocks)
        assert table.blocks.dtype == table.runs.dtype == torch.int32
        seeing = case.dense.any(1).nonzero().flatten().tolist()
        assert rows_in(rows_of(table)) == seeing, case.name
        cuts = {cut for r in case.rectangles for cut in r[:2]}
        for start, stop, *_ in rows_of(table):
            assert 0 < stop - start <= block_rows, case.name
            assert stop - start == block_rows or stop in cuts, case.name
        ends = {end for r in case.rectangles for end in r[2:4]}
        found = table.has_lo, table.has_hi, table.ragged
        assert found == (
            any(r[4] is not None for r in case.rectangles),
            any(r[5] is not None for r in case.rectangles),
            any(end % block_cols for end in ends),
        ), case.name
        seen.add(found)
        every = case.table(*blocks, num_rows=case.dense.size(0))
        assert rows_in(rows_of(every)) == list(range(case.dense.size(0))), case.name
        idle = rows_in([block for block in rows_of(every) if block[2] == block[3]])
        assert set(idle) == set(range(case.dense.size(0))) - set(seeing), case.name
        for descending in (False, True):
            table = case.table(*blocks, descending=descending)
            count = torch.zeros(case.dense.shape, dtype=torch.int64)
            for start, stop, first, last in rows_of(table):
                runs = table.runs[first:last].tolist()
                starts = [max(col_start, start + lo) for col_start, _, lo, _ in runs]
                assert starts == sorted(starts, reverse=descending), case.name
                tiles = [Tile(slice(start, stop), slice(*run[:2]), Band(*run[2:])) for run in runs]
                count += painted(tiles, *case.dense.shape)
            assert torch.equal(count, case.dense.long()), case.name
    assert len(seen) > 4, "steps of every kind"


def test_the_longest_blocks_come_first() -> None:
    unordered = 0
    for case in CASES:
        table = case.table(16, 16)
        work = [
            sum(bool(c.any()) for c in case.dense[start:stop].any(0).split(16))
            for start, stop, first, last in rows_of(table)
            if last - first == 1
        ]
        assert work == sorted(work, reverse=True), case.name
        starts = [row[0] for row in rows_of(table)]
        unordered += starts != sorted(starts)
    assert unordered, "in some case the rows alone would give another order"


@triton.jit
def _ranges(runs_ptr, rows_ptr, ranges_ptr, BLOCK_COLS: tl.constexpr):
    """Writes the column_range of each case."""
    i = tl.program_id(0)
    row_start, row_stop = tl.load(rows_ptr + 2 * i), tl.load(rows_ptr + 2 * i + 1)
    found = column_range(row_start, row_stop, load_run(runs_ptr, i), BLOCK_COLS)
    for j in tl.static_range(4):
        tl.store(ranges_ptr + 4 * i + j, found[j])


@pytest.mark.parametrize(("block_rows", "block_cols"), [(32, 16), (16, 64)])
def test_column_range_is_the_visible_blocks(block_rows: int, block_cols: int) -> None:
    """Outer bounds: blocks with a visible pair; inner bounds: blocks with visible pairs only."""
    found: set[tuple[int, ...]] = set()
    for case in CASES:
        table = case.table(block_rows, block_cols)
        for start, stop, first, last in rows_of(table):
            found.update((*run, start, stop) for run in table.runs[first:last].tolist())
    keys = sorted(found)[::8]
    assert len(keys) > 60
    given = torch.tensor(keys, dtype=torch.int32, device=DEVICE)
    ranges = torch.full((len(keys), 4), -1, dtype=torch.int32, device=DEVICE)
    runs, rows = (x.contiguous() for x in given.split([4, 2], 1))
    _ranges[(len(keys),)](runs, rows, ranges, BLOCK_COLS=block_cols)
    for key, (first, full_first, full_last, last) in zip(keys, ranges.tolist(), strict=True):
        col_start, col_stop, lo, hi, start, stop = key
        i, j = torch.arange(start, stop)[:, None], torch.arange(256)[None, :]
        dense = (col_start <= j) & (j < col_stop) & (lo <= j - i) & (j - i <= hi)
        tiles = dense.unflatten(1, (-1, block_cols))
        assert list(range(first, last)) == tiles.any(2).any(0).nonzero().flatten().tolist(), key
        full = tiles.all(2).all(0).nonzero().flatten().tolist()
        assert list(range(full_first, full_last)) == full, key
        assert first <= full_first <= full_last <= last, key
