"""Decoding: a few queries against many keys, which the whole GPU reads in parts.

With one query `flash_fwd` has one block of rows per head: 32 programs for 132 multiprocessors, each
of which would read a whole cache. So the cache is cut into parts that are folded in parallel, and a
second launch merges the states of a row's parts, in a fixed order:

    queries of a kv head   r0 r1                     rows of part 0  part 1  part 2 ..
    x its query heads      g0 g1 g2 g3     ------>   r0g0 r0g1 .. r1g3, each sees its part's keys

The query heads of a kv head see the same keys, so they are rows of one block, which reads the keys
once. The rows of all parts are stacked, and a step table says which keys they see. Its rectangles
have no bounds: where rows count heads, too, a bound on j - i has no meaning.

Every token needs a new table. If all queries see the same keys, as a single query does, the GPU
writes the table (`part_table_kernel`) and nothing is copied to it; else the host makes the table.

Flash-Decoding (Dao et al., 2023); equations and the base of m as in `online_softmax`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import Config
from .flash_fwd import block_dim, pointers
from .launch import Launch
from .online_softmax import online_softmax_finalize, online_softmax_merge, softmax_pivot
from .step_table import COLUMNS, UNBOUNDED, Rectangle, StepTable, properties

# Parts end at multiples of every config's blocks; shorter ones would cost more to merge than read.
PART_UNIT, LEAST_PART = 128, 256

# Programs per multiprocessor: two programs hide each other's waits.
PROGRAMS_PER_SM = 2

# Parts that a program merges at a time.
MERGED_AT_ONCE = 16
MERGE = Config(0, 0, 4, 1)


class CacheParts(NamedTuple):
    """Columns [start + i * length, start + (i + 1) * length) for each part i of `num_parts`."""

    start: int
    length: int
    num_parts: int


def choose_parts(first: int, last: int, programs: int, num_sms: int) -> CacheParts:
    """Just enough parts of the columns [first, last) to fill a GPU of `num_sms`.

    `programs` of one part: kv heads x blocks of rows x batch.
    """
    start = first // PART_UNIT * PART_UNIT
    wanted = -(-PROGRAMS_PER_SM * num_sms // programs)
    length = max(LEAST_PART, -(-(last - start) // wanted))
    length = -(-length // PART_UNIT) * PART_UNIT
    return CacheParts(start, length, -(-(last - start) // length))


def part_rectangles(
    rectangles: Sequence[Rectangle], num_rows: int, group: int, parts: CacheParts
) -> list[Rectangle]:
    """Rectangles without bounds for the stacked rows of all parts, `group` rows for each query."""
    pieces = list[Rectangle]()
    for row_start, row_stop, col_start, col_stop in _unbounded(rectangles):
        for part in range(parts.num_parts):
            start = parts.start + part * parts.length
            cols = max(col_start, start), min(col_stop, start + parts.length)
            if cols[0] < cols[1]:
                above = part * num_rows
                rows = (above + row_start) * group, (above + row_stop) * group
                pieces.append((*rows, *cols, None, None))
    return pieces


def _unbounded(rectangles: Sequence[Rectangle]) -> Iterator[tuple[int, int, int, int]]:
    """Splits rectangles into columns that all rows see, and row by row the other columns."""
    for r0, r1, c0, c1, lo, hi in rectangles:
        left = c0 if lo is None else max(c0, r1 - 1 + lo)
        right = c1 if hi is None else min(c1, r0 + hi + 1)
        if left < right:
            yield r0, r1, left, right
        else:
            left = right = c0
        for row in range(r0, r1) if (left, right) != (c0, c1) else ():
            first = c0 if lo is None else max(c0, row + lo)
            last = c1 if hi is None else min(c1, row + hi + 1)
            if first < min(left, last):
                yield row, row + 1, first, min(left, last)
            if max(right, first) < last:
                yield row, row + 1, max(right, first), last


@triton.jit(do_not_specialize=["start", "length", "col_start", "col_stop"])
def part_table_kernel(
    table_ptr,
    start,
    length,
    col_start,
    col_stop,
    NUM_ROWS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LARGE: tl.constexpr,
):
    """Writes the blocks of a part's rows, and the run of columns that they see."""
    part = tl.program_id(0)
    for i in range(NUM_BLOCKS):
        block = table_ptr + 4 * (part * NUM_BLOCKS + i)
        row = part * NUM_ROWS + i * BLOCK_M
        tl.store(block, row)
        tl.store(block + 1, tl.minimum(row + BLOCK_M, (part + 1) * NUM_ROWS))
        tl.store(block + 2, part)
        tl.store(block + 3, part + 1)
    run = table_ptr + 4 * (tl.num_programs(0) * NUM_BLOCKS + part)
    tl.store(run, tl.maximum(col_start, start + part * length))
    tl.store(run + 1, tl.minimum(col_stop, start + (part + 1) * length))
    tl.store(run + 2, -LARGE)
    tl.store(run + 3, LARGE)


def part_table(
    rectangle: Rectangle, num_rows: int, parts: CacheParts, config: Config, device: torch.device
) -> tuple[StepTable, Launch]:
    """The table of parts whose rows all see the rectangle's columns, and the launch that fills it.

    Each part has `num_rows` rows; the rectangle has no bounds.
    """
    num_blocks = -(-num_rows // config.BLOCK_M)
    blocks = parts.num_parts * num_blocks
    rows = torch.empty(blocks + parts.num_parts, COLUMNS, dtype=torch.int32, device=device)
    known = properties([rectangle], config.BLOCK_N)
    table = StepTable(rows[:blocks], rows[blocks:], blocks, *known)
    launch = Launch(
        part_table_kernel,
        (parts.num_parts,),
        {
            "table_ptr": rows,
            "start": parts.start,
            "length": parts.length,
            "col_start": rectangle[2],
            "col_stop": rectangle[3],
        },
        {
            "NUM_ROWS": num_rows,
            "NUM_BLOCKS": num_blocks,
            "BLOCK_M": config.BLOCK_M,
            "LARGE": UNBOUNDED,
        },
        {"num_warps": 1, "num_stages": 1},
    )
    return table, launch


def part_rows(q: Tensor, nheads_kv: int, num_parts: int) -> Tensor:
    """q (batch, rows, nheads, headdim) as (batch, num_parts * rows * group, nheads_kv, headdim)."""
    batch, rows, nheads, headdim = q.shape
    group = nheads // nheads_kv
    q = q.unflatten(2, (nheads_kv, group)).transpose(2, 3)
    q = q.unsqueeze(1).expand(batch, num_parts, rows, group, nheads_kv, headdim)
    return q.reshape(batch, num_parts * rows * group, nheads_kv, headdim)


@triton.jit
def merge_parts_kernel(
    acc_ptr,
    m_ptr,
    l_ptr,
    out_ptr,
    lse_ptr,
    num_parts,
    num_rows,
    nheads_kv,
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Writes out and lse of one query head of one query, from the states of its parts."""
    rows_of_part = num_rows * GROUP
    row = tl.program_id(0) % rows_of_part  # query * GROUP + query head within the kv head
    batch = (tl.program_id(0) // rows_of_part // nheads_kv).to(tl.int64)
    kv_head = tl.program_id(0) // rows_of_part % nheads_kv
    dims = tl.arange(0, BLOCK_DV)

    acc = tl.zeros((1, BLOCK_DV), tl.float32)
    m_i = tl.full((1,), float("-inf"), tl.float32)
    l_i = tl.zeros((1,), tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        parts = start + tl.arange(0, BLOCK_P)
        inside = parts < num_parts
        rows = parts * rows_of_part + row
        # (batch, nheads_kv, all rows) and (batch, all rows, nheads_kv, HEAD_DIM_V)
        stats = (batch * nheads_kv + kv_head) * num_parts * rows_of_part + rows
        m = tl.load(m_ptr + stats, inside, float("-inf"))
        l = tl.load(l_ptr + stats, inside, 0.0)
        states = (batch * num_parts * rows_of_part + rows) * nheads_kv + kv_head
        x = tl.load(
            acc_ptr + states[:, None] * HEAD_DIM_V + dims[None, :],
            inside[:, None] & (dims[None, :] < HEAD_DIM_V),
            0.0,
        )
        m_new = tl.max(m, 0)
        weight = tl.exp2(m - softmax_pivot(m_new))
        total, one_row = tl.sum(l * weight, 0), tl.zeros((1,), tl.float32)
        x = tl.sum(x * weight[:, None], 0)[None, :]
        acc, m_i, l_i = online_softmax_merge(acc, m_i, l_i, x, m_new + one_row, total + one_row)
    out, lse = online_softmax_finalize(acc, m_i, l_i)

    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    nheads = nheads_kv * GROUP
    one = tl.arange(0, 1)
    tl.store(lse_ptr + (batch * nheads + head) * num_rows + query + one, lse)
    out_row = ((batch * num_rows + query) * nheads + head) * HEAD_DIM_V
    tl.store(out_ptr + out_row + dims[None, :] + one[:, None], out, dims[None, :] < HEAD_DIM_V)


def merge_parts_launch(
    acc: Tensor, m: Tensor, l: Tensor, out: Tensor, lse: Tensor, num_parts: int
) -> Launch:
    """The launch that merges the states of all parts into out and lse.

    acc (batch, num_parts * rows * group, nheads_kv, headdim_v), m in base 2 and l (batch,
    nheads_kv, num_parts * rows * group), out (batch, rows, nheads, headdim_v), lse (batch, nheads,
    rows): all float32 and contiguous.
    """
    batch, num_rows, nheads, headdim_v = out.shape
    nheads_kv = acc.size(2)
    group = nheads // nheads_kv
    return Launch(
        merge_parts_kernel,
        (num_rows * group * batch * nheads_kv,),
        {
            **pointers(acc=acc, m=m, l=l, out=out, lse=lse),
            "num_parts": num_parts,
            "num_rows": num_rows,
            "nheads_kv": nheads_kv,
        },
        {
            "GROUP": group,
            "HEAD_DIM_V": headdim_v,
            "BLOCK_DV": block_dim(headdim_v),
            "BLOCK_P": min(MERGED_AT_ONCE, triton.next_power_of_2(num_parts)),
        },
        MERGE.options,
    )
