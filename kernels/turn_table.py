"""Tables of a launch in which programs add to the same rows of dq, one after the other.

Rectangles are `step_table`'s, with kv rows and q columns. Blocks of rows are on a grid that
begins at row 0, and a rectangle has a run in each block that it touches:

    runs    (num_runs, 8)   col_start, col_stop, lo, hi, row_start, row_stop, first_piece, 0
    blocks  (num_blocks, 4) row, row_stop, first_run, last_run (exclusive), from the last row down

A program visits the blocks of columns of its runs. All visits of one block of columns take turns:
blocks with later rows go first, and within a block, earlier runs. When a visit ends, it writes its
run's number (from 1) for the next visit; a visit begins when it reads the number of the visit
before it (0 if it is the first). This predecessor changes at few places within a run:

    pieces  (num_pieces, 2) stop, before: the blocks of columns up to `stop` (exclusive) wait for
                            run `before`; a piece begins where the previous piece of the run stops

A predecessor belongs to an earlier task, or to an earlier run of the same task.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .step_table import Rectangle, StepTable, bounded, properties, tables_on, visited_columns


@triton.jit
def load_visited(runs_ptr, run):
    """(col_start, col_stop, lo, hi, row_start, row_stop, first_piece) of a run."""
    row = runs_ptr + 8 * run
    return (
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
        tl.load(row + 4),
        tl.load(row + 5),
        tl.load(row + 6),
    )


@triton.jit
def load_piece(pieces_ptr, piece):
    """(stop, before) of a piece."""
    row = pieces_ptr + 2 * piece
    return tl.load(row), tl.load(row + 1)


@dataclass(frozen=True)
class TurnTable(StepTable):
    pieces: Tensor  # (num_pieces, 2) int32
    partial: bool  # some run lacks rows of its block


def make_turn_table(
    rectangles: Sequence[Rectangle], block_rows: int, block_cols: int, device: torch.device
) -> TurnTable:
    """The table of a step; see `make_step_table`, with `transposed` rectangles."""
    parts: dict[int, list[Rectangle]] = defaultdict(list)
    for r0, r1, c0, c1, lo, hi in rectangles:
        for row in range(r0 // block_rows * block_rows, r1, block_rows):
            part = (max(r0, row), min(r1, row + block_rows), c0, c1, lo, hi)
            if len(visited_columns(part, block_cols)):
                parts[row].append(part)
    runs: list[tuple[int, ...]] = []
    blocks: list[tuple[int, ...]] = []
    pieces: list[tuple[int, int]] = []
    turns = _LastRuns()
    for row in sorted(parts, reverse=True):
        # By the first column that a row sees: cutting the sequence does not change this order.
        seen = sorted(
            parts[row], key=lambda r: (r[2] if r[4] is None else max(r[2], r[0] + r[4]), r[0])
        )
        blocks.append((row, row + block_rows, len(runs), len(runs) + len(seen)))
        for part in seen:
            runs.append((*bounded(part), part[0], part[1], len(pieces), 0))
            columns = visited_columns(part, block_cols)
            pieces += turns.take(columns.start, columns.stop, len(runs))
    blocks_there, runs_there, pieces_there = tables_on(device, blocks, runs, pieces)
    partial = any(r[0] % block_rows or r[1] % block_rows for r in rectangles)
    known = properties(rectangles, block_cols)
    return TurnTable(blocks_there, runs_there, len(blocks), *known, pieces_there, partial)


def num_turns(batch: int, num_rows: int, nheads: int, block_rows: int) -> int:
    """Number of a launch's counters: one of tasks, and a turn of each block of q rows and head."""
    return 1 + batch * nheads * -(-num_rows // block_rows)


class _LastRuns:
    """The last run that has visited each block of columns, in intervals of blocks."""

    def __init__(self) -> None:
        # Interval i is [starts[i], starts[i + 1]); run 0 means no visit yet.
        self._starts = [0]
        self._last = [0]

    def take(self, start: int, stop: int, run: int) -> list[tuple[int, int]]:
        """The pieces of a run, which visits the blocks [start, stop) next."""
        first = self._cut(start)
        last = self._cut(stop)
        ends = [*self._starts[first + 1 : last], stop]
        pieces = list(zip(ends, self._last[first:last], strict=True))
        self._starts[first:last] = [start]
        self._last[first:last] = [run]
        return pieces

    def _cut(self, at: int) -> int:
        """The index of the interval that begins at a block; splits an interval if needed."""
        index = bisect_left(self._starts, at)
        if index == len(self._starts) or self._starts[index] != at:
            self._starts.insert(index, at)
            self._last.insert(index, self._last[index - 1])
        return index
