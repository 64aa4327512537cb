"""Two small integer tables of a launch: blocks of rows, and runs of columns that they see.

A rectangle is (row_start, row_stop, col_start, col_stop, lo, hi): its rows see its columns with
`lo <= col - row <= hi`; None means no bound. Forward and dq have q rows and kv columns, dk/dv has
kv rows and q columns (`transposed`). Rows are cut where rectangles begin and end, so that all rows
of a block see the same rectangles, and then into blocks of BLOCK_ROWS:

    runs    (num_runs, 4)   col_start, col_stop, lo, hi
    blocks  (num_blocks, 4) row_start, row_stop, first_run, last_run (exclusive), most work first

The first and the last run of a block hold a visible pair; runs between them may hold none.

Columns are visited in blocks on a grid that begins at column 0, not at the run. So a row meets the
same blocks of columns wherever a sequence is cut at multiples of BLOCK_COLS, and its sums have the
same bits. A program computes the blocks of a run by `column_range`:

    cols            first      full_first            full_last      last
    row_start         .  [ masked ][    no mask needed     ][ masked ]  .
    row_stop - 1      every block in [first, last) holds a visible pair
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

Rectangle = tuple[int, int, int, int, int | None, int | None]

# Stands for an unbounded side of a band: larger than any distance, and small enough that adding a
# row does not overflow int32.
UNBOUNDED = 1 << 30

# Integers in a row of either table.
COLUMNS = 4


@triton.jit
def load_block_row(blocks_ptr, block):
    """(row_start, row_stop, first_run, last_run) of a block."""
    row = blocks_ptr + 4 * block
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def load_run(runs_ptr, run):
    """(col_start, col_stop, lo, hi) of a run."""
    row = runs_ptr + 4 * run
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def column_range(row_start, row_stop, run, BLOCK_COLS: tl.constexpr):
    """(first, full_first, full_last, last): blocks [first, last) of a run hold a visible pair.

    Blocks [full_first, full_last) need no mask. A ragged start or end of a run needs one.
    """
    col_start, col_stop, lo, hi = run
    first = tl.maximum(col_start, row_start + lo) // BLOCK_COLS
    last = tl.cdiv(tl.minimum(col_stop, row_stop + hi), BLOCK_COLS)
    full_first = tl.cdiv(tl.maximum(col_start, row_stop - 1 + lo), BLOCK_COLS)
    full_last = tl.minimum(col_stop, row_start + hi + 1) // BLOCK_COLS
    full_first = tl.minimum(tl.maximum(full_first, first), last)
    full_last = tl.maximum(tl.minimum(full_last, last), full_first)
    return first, full_first, full_last, last


@triton.jit
def visible_pairs(rows, cols, run, HAS_LO: tl.constexpr, HAS_HI: tl.constexpr):
    """Tells which pairs of `rows` and `cols`, broadcast together, lie in the run and its band."""
    col_start, col_stop, lo, hi = run
    visible = (cols >= col_start) & (cols < col_stop)
    if HAS_LO:
        visible = visible & (cols - rows >= lo)
    if HAS_HI:
        visible = visible & (cols - rows <= hi)
    return visible


@dataclass(frozen=True)
class StepTable:
    """A launch's blocks and runs on a device, and their properties, known on the host."""

    blocks: Tensor  # (num_blocks, 4) int32
    runs: Tensor  # (num_runs, 4) int32
    num_blocks: int  # tasks per head
    num_cols: int  # distance from the first to the last column of the rectangles
    has_lo: bool  # some run has a lower bound
    has_hi: bool  # some run has an upper bound
    ragged: bool  # some run begins or ends within a block of columns
    # Of a run's columns, only the last block has pairs above the band or outside the run.
    one_above: bool = field(default=False, kw_only=True)

    @property
    def constants(self) -> dict[str, bool]:
        """Constants of a kernel that masks."""
        return {"HAS_LO": self.has_lo, "HAS_HI": self.has_hi, "RAGGED": self.ragged}


def transposed(rectangles: Sequence[Rectangle]) -> list[Rectangle]:
    """The rectangles with rows and columns exchanged."""
    return [
        (c0, c1, r0, r1, None if hi is None else -hi, None if lo is None else -lo)
        for r0, r1, c0, c1, lo, hi in rectangles
    ]


def make_step_table(
    rectangles: Sequence[Rectangle],
    block_rows: int,
    block_cols: int,
    device: torch.device,
    *,
    descending: bool,
    num_rows: int = 0,
) -> StepTable:
    """The table of a step.

    Args:
        rectangles: the step's rectangles, in local indices, without a common pair.
        block_rows: rows of a program.
        block_cols: columns of one iteration.
        device: of the tables.
        descending: a row's runs are folded from the last column down, not up.
        num_rows: if not 0, rows of [0, num_rows) outside all rectangles get blocks without runs:
            for launches that write every row.
    """
    runs: list[tuple[int, int, int, int]] = []
    blocks: list[tuple[int, int, int, int, int]] = []
    one_above = True
    for start, stop, seen in _row_runs(rectangles, num_rows):
        if not seen and not num_rows:
            continue
        first = len(runs)
        runs += [bounded(r) for r in (reversed(seen) if descending else seen)]
        for row in range(start, stop, block_rows):
            end = min(row + block_rows, stop)
            rows = [(row, end, *run) for run in runs[first:]]
            visits = [len(visited_columns(part, block_cols)) for part in rows]
            one_above &= all(masked_above(part, block_cols) <= 1 for part in rows)
            visible = [first + i for i, count in enumerate(visits) if count] or [first, first - 1]
            blocks.append((row, end, visible[0], visible[-1] + 1, sum(visits)))
    # Programs start in this order: the longest first, so that no long program runs last and alone.
    blocks.sort(key=lambda block: -block[COLUMNS])
    blocks_there, runs_there = tables_on(device, [block[:COLUMNS] for block in blocks], runs)
    known = properties(rectangles, block_cols)
    return StepTable(blocks_there, runs_there, len(blocks), *known, one_above=one_above)


def properties(rectangles: Sequence[Rectangle], block_cols: int) -> tuple[int, bool, bool, bool]:
    """num_cols, has_lo, has_hi and ragged of a table."""
    num_cols = max((r[3] for r in rectangles), default=0) - min(
        (r[2] for r in rectangles), default=0
    )
    has_lo, has_hi = (any(r[side] is not None for r in rectangles) for side in (4, 5))
    ragged = any(r[2] % block_cols or r[3] % block_cols for r in rectangles)
    return num_cols, has_lo, has_hi, ragged


def _row_runs(
    rectangles: Sequence[Rectangle], num_rows: int
) -> Iterator[tuple[int, int, list[Rectangle]]]:
    """Yields rows [start, stop) that see the same rectangles, and these sorted by columns."""
    cuts = sorted(
        {cut for r in rectangles for cut in r[:2]} | ({0, num_rows} if num_rows else set())
    )
    waiting = sorted(rectangles, key=lambda r: r[0], reverse=True)
    seen: list[Rectangle] = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        seen = [r for r in seen if r[1] > start]
        while waiting and waiting[-1][0] == start:
            seen.append(waiting.pop())
        # By the first column that a row sees: cutting the sequence does not change this order.
        seen.sort(key=lambda r: r[2] if r[4] is None else max(r[2], start + r[4]))
        yield start, stop, seen


def bounded(rectangle: Rectangle) -> tuple[int, int, int, int]:
    """(col_start, col_stop, lo, hi) of a rectangle, with +-UNBOUNDED for None."""
    _, _, start, stop, lo, hi = rectangle
    return start, stop, -UNBOUNDED if lo is None else lo, UNBOUNDED if hi is None else hi


def visited_columns(rectangle: Rectangle, block_cols: int) -> range:
    """Blocks of columns that hold a visible pair: `column_range` on the host."""
    row_start, row_stop, start, stop, lo, hi = rectangle
    first = (start if lo is None else max(start, row_start + lo)) // block_cols
    last = -(-(stop if hi is None else min(stop, row_stop + hi)) // block_cols)
    return range(first, max(last, first))


def masked_above(rectangle: Rectangle, block_cols: int) -> int:
    """The number of last visited blocks with pairs above the band or columns beyond the run."""
    row_start, _, _, stop, _, hi = rectangle
    full_last = (stop if hi is None else min(stop, row_start + hi + 1)) // block_cols
    visited = visited_columns(rectangle, block_cols)
    return min(max(visited.stop - full_last, 0), len(visited))


def tables_on(device: torch.device, *tables: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
    """Copies tables to a device in one transfer, for which the host does not wait."""
    # A kernel never reads a table without rows, but needs a pointer.
    filled = [rows or [(0,) * COLUMNS] for rows in tables]
    numbers = [number for rows in filled for row in rows for number in row]
    here = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    there = here.to(device, non_blocking=True)
    start = 0
    for rows in filled:
        width = len(rows[0])
        yield there[start : start + len(rows) * width].view(-1, width)
        start += len(rows) * width
