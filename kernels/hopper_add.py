"""The warp of the backward in Gluon that adds dQ to dq in memory; see `hopper_bwd`."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_blocks import ROWS
from .hopper_tasks import load_task
from .launch import Traced
from .step_table import column_range
from .turn_table import load_piece, load_visited

# Warpgroups that compute, with ROWS kv rows each.
CONSUMERS = gl.constexpr(2)

# Rows of dq that the adding warp holds in registers at a time, and dims of a consumer's part. With
# 8 rows its 40 registers overflow: 23 loads and stores of spilled registers a visit, with 4 rows 2.
ADDED_ROWS = gl.constexpr(4)
PART_DIMS = gl.constexpr(64)

# Layouts of dq in shared memory: the 8 rows that a warp stores at once use different banks.
ADDED = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[64, 8]], [4, 64], order=[1, 0]))
PART = gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[64, 8]], [64, 64], order=[1, 0]))


class Context(NamedTuple):
    """Values that all warps of a program have."""

    shared: Traced
    work: Traced
    pieces_ptr: Traced
    task: Traced


@gluon.jit
def add_in_turns(
    context,
    dq_ptr,
    turns_ptr,
    num_rows,
    GROUP: gl.constexpr,
    RAGGED: gl.constexpr,
    DQ: gl.constexpr,
):
    """Adds the consumers' dQ to dq in memory, each visit in its turn."""
    shared, work, pieces_ptr, task = context
    BLOCK_M: gl.constexpr = shared.q.buffers.shape[2]
    HEAD_DIM: gl.constexpr = shared.k.shape[4]
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [1, 1], [1, 0])
    if DQ:
        batch, kv_head, _, _, first_run, last_run = load_task(work, task)
        nheads = work.num_heads * GROUP
        num_cols = gl.cdiv(num_rows, BLOCK_M)
        use = 0
        for i in range(first_run, last_run):
            run = load_visited(work.runs_ptr, i)
            first, full_first, full_last, last = column_range(run[4], run[5], run[:4], BLOCK_M)
            piece = run[6]
            stop, before = load_piece(pieces_ptr, piece)
            for t in range(first * GROUP, last * GROUP):
                block = t // GROUP
                head = kv_head * GROUP + t % GROUP
                if block == stop:
                    piece += 1
                    stop, before = load_piece(pieces_ptr, piece)
                turn = turns_ptr + (batch * nheads + head) * num_cols + block
                while gl.atomic_add(turn, 0, sem="acquire") != before:
                    pass
                mbarrier.wait(shared.dq_full.index(0), use & 1)
                start = block * BLOCK_M
                grad = gl.cast((batch * num_rows + start) * nheads + head, gl.int64) * HEAD_DIM
                rows = gl.arange(0, ADDED_ROWS, gl.SliceLayout(1, L))
                dims = gl.arange(0, PART_DIMS, gl.SliceLayout(0, L))
                ptrs = (dq_ptr + grad + rows * (nheads * HEAD_DIM))[:, None] + dims[None, :]
                row = start
                step = ADDED_ROWS * nheads * HEAD_DIM
                for part in gl.static_range(CONSUMERS):
                    if BLOCK_M == ROWS and part > 0:
                        row -= ROWS
                        ptrs += part * PART_DIMS - ROWS // ADDED_ROWS * step
                    for j in range(ROWS // ADDED_ROWS):
                        x = shared.dq.index(part * (ROWS // ADDED_ROWS) + j).load(L)
                        if RAGGED:
                            inside = (rows >= run[0] - row) & (rows < run[1] - row)
                            gl.atomic_add(ptrs, x, inside[:, None], sem="relaxed")
                        else:
                            gl.atomic_add(ptrs, x, sem="relaxed")
                        ptrs += step
                        row += ADDED_ROWS
                mbarrier.arrive(shared.dq_empty.index(0), count=1)
                gl.atomic_xchg(turn, i + 1, sem="release")
                use += 1
