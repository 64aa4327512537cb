"""Decoding: a few queries against many keys, which the whole GPU reads in parts, in one launch.

With one query `flash_fwd` has one block of rows per head: 32 programs for 132 multiprocessors, each
of which would read a whole cache. So every sequence's keys are cut into parts, which are folded in
parallel, and a second launch merges the states of a row's parts, in a fixed order:

    program   sequence 0, kv head 0     part 0   part 1   part 2 ..
              sequence 0, kv head 1     part 0 ..
    its rows  queries x the query heads of the kv head: they see the same keys, which are read once

What queries see is one of three, and for each row a run [first, last) of local rows of the cache:

    one run      two numbers, the same for all queries
    table        several runs of each query, from the last columns down, made on the host
    sequences    `cache_seqlens`, read here, so that a CUDA graph serves sequences that grow; row j
                 has position start + j // run * period + j % run (`ring_attn.core.cache`)

Keys stand in rows of a batch entry, or in pages of a pool, which `block_table` names. Blocks of
keys are folded on a grid that begins at column 0, from the last down, always masked: a masked block
has the bits of one without a mask, and decoding waits for memory.

Bases of lse: a part's m is in base 2, as all scores in kernels. `online_softmax_finalize`, in the
merge, is the one place where a natural logarithm is made of it, as flash-attention returns it.

Head dims above 256 are cut in two, 576 into 512 and 64, as a block's dims are a power of two. If v
is the first dims of k, as in MLA's absorbed form, each key is read once for both products.

Flash-Decoding (Dao et al., 2023); equations as in `online_softmax`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import Config
from .flash_fwd import KernelArgs, arguments, block_dim, in_units, offset_of, pointers, scales
from .launch import Launch
from .online_softmax import (
    online_softmax_finalize,
    online_softmax_merge,
    online_softmax_update,
    softmax_pivot,
    tanh,
)
from .proxy_fence import proxy_fence
from .step_table import Rectangle, tables_on

# Parts end at multiples of every config's blocks; shorter ones would cost more to merge than read.
PART_UNIT, LEAST_PART = 128, 256

# Programs per multiprocessor: two programs hide each other's waits.
PROGRAMS_PER_SM = 2

# Parts that a program merges at a time.
MERGED_AT_ONCE = 16
MERGE = Config(0, 0, 4, 1)

# Head dims up to this one are one block.
WHOLE_DIM = 256

# Greater than the number of rows of any cache.
FAR = tl.constexpr(1 << 30)


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


@dataclass(frozen=True)
class SeenRows:
    """The rows that queries see: of all queries one run [start, stop), or the runs of a table."""

    start: int
    stop: int
    num_runs: int = 1
    table: Tensor | None = None  # (num_runs * queries, 2) int32


def seen_rows(rectangles: Sequence[Rectangle], num_rows: int, device: torch.device) -> SeenRows:
    """The keys that `num_rows` queries see, by rectangles."""
    start, stop = min(r[2] for r in rectangles), max(r[3] for r in rectangles)
    runs = seen_runs(rectangles, num_rows)
    if runs == [[(start, stop)] * num_rows]:
        return SeenRows(start, stop)
    (table,) = tables_on(device, [row for run in runs for row in run])
    return SeenRows(start, stop, len(runs), table)


def seen_runs(rectangles: Sequence[Rectangle], num_rows: int) -> list[list[tuple[int, int]]]:
    """Runs in the order in which they are folded, each with the columns of every row.

    A row's columns come from the last down. Pieces of several rows share a run, and so are read
    once, if their columns touch.
    """
    runs, spans = list[list[tuple[int, int]]](), list[tuple[int, int]]()
    folded = [0] * num_rows  # for each row, the number of runs up to its last piece
    for r0, r1, c0, c1 in sorted(_unbounded(rectangles), key=lambda piece: -piece[2]):
        least = max(folded[r0:r1])
        touching = (i for i in range(least, len(runs)) if spans[i][0] <= c1 and c0 <= spans[i][1])
        at = next(touching, len(runs))
        if at == len(runs):
            runs.append([(0, 0)] * num_rows)
            spans.append((c0, c1))
        runs[at][r0:r1] = [(c0, c1)] * (r1 - r0)
        folded[r0:r1] = [at + 1] * (r1 - r0)
        spans[at] = min(spans[at][0], c0), max(spans[at][1], c1)
    return runs


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


@triton.jit
def _rows_before(positions, first, run, period, most):
    """Numbers of local rows at positions below these: `Sequences.rows_before`."""
    past = tl.maximum(positions - first, 0)
    return tl.minimum(past // period * run + tl.minimum(past % period, run), most)


@triton.jit
def _load(ptrs, dims, inside, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """(len(ptrs), BLOCK): rows at pointers, zero where they are not inside, and beyond DIM."""
    mask = inside[:, None]
    if DIM != BLOCK:
        mask = mask & (dims[None, :] < DIM)
    return tl.load(ptrs[:, None] + dims[None, :], mask, 0.0)


@triton.jit(
    do_not_specialize=[
        "num_blocks",
        "num_parts",
        "num_runs",
        "start",
        "stop",
        "part_start",
        "part_length",
        "position",
        "run",
        "period",
        "most_rows",
        "left",
        "right",
    ]
)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_table_ptr,
    acc_ptr,
    m_ptr,
    l_ptr,
    cache_seqlens_ptr,
    table_ptr,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    num_rows,
    nheads_kv,
    num_blocks,
    num_parts,
    num_runs,
    start,
    stop,
    part_start,
    part_length,
    position,
    run,
    period,
    most_rows,
    left,
    right,
    table_pages,
    inner_scale,
    outer_scale,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TABLE: tl.constexpr,
    SHARED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PART_UNIT: tl.constexpr,
    LEAST_PART: tl.constexpr,
):
    """Folds one part of the keys of a sequence and a kv head into states of a block of rows."""
    # Blocks of rows of one part run together, so that its keys come from the L2 cache.
    block = tl.program_id(0) % num_blocks
    part = tl.program_id(0) // num_blocks % num_parts
    index = tl.program_id(0) // num_blocks // num_parts
    batch, kv_head = index // nheads_kv, index % nheads_kv

    # Rows after the last one repeat it, so that loads need no mask.
    offs = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(offs, num_rows * GROUP - 1)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    q_rows = q_ptr + offset_of(batch, stride_qb, UNIT)
    q_rows += offset_of(query, stride_qm, UNIT) + offset_of(head, stride_qh, UNIT)
    dims, dims_v, every = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), offs >= 0
    MAIN: tl.constexpr = BLOCK_D if BLOCK_REST else HEAD_DIM
    q = _load(q_rows, dims, every, MAIN, BLOCK_D)
    if BLOCK_REST:
        rest = tl.arange(0, BLOCK_REST)
        q_rest = _load(q_rows + BLOCK_D, rest, every, HEAD_DIM - BLOCK_D, BLOCK_REST)
    k_head = k_ptr + offset_of(kv_head, stride_kh, UNIT)
    v_head = v_ptr + offset_of(kv_head, stride_vh, UNIT)
    if PAGE_SIZE == 0:
        k_head += offset_of(batch, stride_kb, UNIT)
        v_head += offset_of(batch, stride_vb, UNIT)
    stride_kn, stride_vn = in_units(stride_kn, UNIT), in_units(stride_vn, UNIT)

    if SEQUENCES:
        length = tl.load(cache_seqlens_ptr + batch)
        at = length - num_rows + query  # positions of the queries
        lowest = tl.where(left < 0, 0, at - left)
        highest = tl.where(right < 0, length, tl.minimum(length, at + right + 1))
        first = _rows_before(lowest, position, run, period, most_rows)
        last = _rows_before(highest, position, run, period, most_rows)
        part_start = tl.min(first, 0) // PART_UNIT * PART_UNIT
        part_length = tl.maximum(tl.cdiv(tl.max(last, 0) - part_start, num_parts), LEAST_PART)
        part_length = tl.cdiv(part_length, PART_UNIT) * PART_UNIT
    part_start += part * part_length

    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    for j in range(num_runs):
        if TABLE:
            entry = table_ptr + 2 * (j * num_rows + query)
            first, last = tl.load(entry), tl.load(entry + 1)
        elif not SEQUENCES:
            first, last = tl.zeros_like(row) + start, tl.zeros_like(row) + stop
        begin = tl.maximum(first, part_start)
        end = tl.minimum(last, part_start + part_length)
        low = tl.min(tl.where(begin < end, begin, FAR), 0)
        high = tl.max(tl.where(begin < end, end, 0), 0)
        last_block = tl.cdiv(high, BLOCK_N)
        for i in range(last_block - low // BLOCK_N):
            cols = (last_block - 1 - i) * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = (cols >= low) & (cols < high)
            # Other columns are another sequence's, or memory that nobody has written.
            k_rows, v_rows = k_head, v_head
            held = cols
            if PAGE_SIZE:
                pages = batch.to(tl.int64) * table_pages + cols // PAGE_SIZE
                page = tl.load(block_table_ptr + pages, inside, 0)
                held = cols % PAGE_SIZE
                k_rows += offset_of(page, stride_kb, UNIT)
                v_rows += offset_of(page, stride_vb, UNIT)
            k_rows += held.to(tl.int64) * stride_kn
            k = _load(k_rows, dims, inside, MAIN, BLOCK_D)
            proxy_fence()
            qk = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
            if BLOCK_REST:
                k_rest = _load(k_rows + BLOCK_D, rest, inside, HEAD_DIM - BLOCK_D, BLOCK_REST)
                proxy_fence()
                qk = tl.dot(q_rest, tl.trans(k_rest), qk, input_precision="ieee")
            if SOFTCAP:
                qk = outer_scale * tanh(qk * inner_scale)
            visible = (cols[None, :] >= begin[:, None]) & (cols[None, :] < end[:, None])
            qk = tl.where(visible, qk, float("-inf"))
            if SHARED:
                v = k
            else:
                v_rows += held.to(tl.int64) * stride_vn
                v = _load(v_rows, dims_v, inside, HEAD_DIM_V, BLOCK_DV)
                proxy_fence()
            acc, m_i, l_i = online_softmax_update(
                acc, m_i, l_i, qk, v, 1.0 if SOFTCAP else inner_scale
            )

    stat = ((batch * num_parts + part).to(tl.int64) * num_rows + query) * nheads_kv * GROUP + head
    own = offs < num_rows * GROUP
    tl.store(m_ptr + stat, m_i, own)
    tl.store(l_ptr + stat, l_i, own)
    own = own[:, None] & (dims_v[None, :] < HEAD_DIM_V)
    tl.store(acc_ptr + stat[:, None] * HEAD_DIM_V + dims_v[None, :], acc, own)


def main_dim(headdim: int) -> int:
    """The first block of a head dim: all of it, or the largest power of two in one above 256."""
    return block_dim(headdim) if headdim <= WHOLE_DIM else 1 << (headdim.bit_length() - 1)


def shares(k: Tensor, v: Tensor) -> bool:
    """Return whether v is the first dims of k, in the same memory, and fills k's first block."""
    same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
    return same and block_dim(v.size(3)) == main_dim(k.size(3))


class SequenceRule(NamedTuple):
    """Numbers of `ring_attn.core.cache.Sequences`, as a kernel takes them."""

    position: int
    run: int
    period: int
    most_rows: int
    left: int
    right: int


def decode_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor | None,
    states: tuple[Tensor, Tensor, Tensor],
    cache_seqlens: Tensor | None,
    seen: SeenRows | SequenceRule,
    parts: CacheParts,
    config: Config,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    shared: bool = False,
) -> Launch:
    """Return the launch that folds all parts into states.

    Args:
        q: (batch, rows, nheads, headdim); q, k, v with any strides, but 1 in the last dim.
        k: (batch, rows_kv, nheads_kv, headdim), or (pages, page_size, nheads_kv, headdim).
        v: likewise, with headdim_v.
        block_table: (batch, pages) int32, contiguous, if k and v are pages.
        states: acc (batch, num_parts, rows, nheads, headdim_v), m in base 2, and l without the last
            dim; contiguous float32.
        cache_seqlens: (batch,) int32 lengths of sequences.
        seen: what the queries see; a rule only with `cache_seqlens`.
        parts: of all rows; of sequences only their number, as their lengths follow from theirs.
        config: the tiling.
        softmax_scale: positive.
        softcap: 0 means none.
        shared: v is the first dims of k, in the same memory.
    """
    inputs = KernelArgs(q, k, v)
    rule = seen if isinstance(seen, SequenceRule) else SequenceRule(0, 0, 1, 0, 0, 0)
    runs = SeenRows(0, 0) if isinstance(seen, SequenceRule) else seen
    num_blocks = -(-q.size(1) * inputs.group // config.BLOCK_M)
    acc, m, l = states
    tables = {"cache_seqlens": cache_seqlens, "table": runs.table}
    contiguous = {"block_table": block_table, "acc": acc, "m": m, "l": l, **tables}
    return Launch(
        kernel=decode_kernel,
        grid=(num_blocks * parts.num_parts * q.size(0) * k.size(2),),
        args={
            **arguments(inputs.strided, contiguous),
            "num_rows": q.size(1),
            "nheads_kv": k.size(2),
            "num_blocks": num_blocks,
            "num_parts": parts.num_parts,
            "num_runs": runs.num_runs,
            "start": runs.start,
            "stop": runs.stop,
            "part_start": parts.start,
            "part_length": parts.length,
            **rule._asdict(),
            "table_pages": 0 if block_table is None else block_table.size(1),
            **scales(softmax_scale, softcap),
        },
        constants={
            **_constants_of_dims(inputs),
            **_constants_of_rows(runs, k, block_table, config),
            "SEQUENCES": isinstance(seen, SequenceRule),
            "SHARED": shared,
            "SOFTCAP": softcap != 0.0,
        },
        options=config.options,
    )


@triton.jit
def merge_parts_kernel(
    acc_ptr,
    m_ptr,
    l_ptr,
    out_ptr,
    lse_ptr,
    num_parts,
    num_rows,
    nheads,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Writes out and lse of one head of one query, from the states of its parts."""
    index = tl.program_id(0)  # in (batch, num_rows, nheads)
    rows_of_part = num_rows * nheads
    batch = (index // rows_of_part).to(tl.int64)
    dims = tl.arange(0, BLOCK_DV)

    acc = tl.zeros((1, BLOCK_DV), tl.float32)
    m_i = tl.full((1,), float("-inf"), tl.float32)
    l_i = tl.zeros((1,), tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        parts = start + tl.arange(0, BLOCK_P)
        inside = parts < num_parts
        states = (batch * num_parts + parts) * rows_of_part + index % rows_of_part
        m = tl.load(m_ptr + states, inside, float("-inf"))
        l = tl.load(l_ptr + states, inside, 0.0)
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

    head, query = index % nheads, index // nheads % num_rows
    one = tl.arange(0, 1)
    tl.store(lse_ptr + (batch * nheads + head) * num_rows + query + one, lse)
    out_row = out_ptr + index.to(tl.int64) * HEAD_DIM_V
    tl.store(out_row + dims[None, :] + one[:, None], out, dims[None, :] < HEAD_DIM_V)


def merge_parts_launch(
    acc: Tensor, m: Tensor, l: Tensor, out: Tensor, lse: Tensor, num_parts: int
) -> Launch:
    """Return the launch that merges the states of all parts into out and lse.

    acc (batch, num_parts, rows, nheads, headdim_v), m in base 2 and l without the last dim, out
    (batch, rows, nheads, headdim_v), lse (batch, nheads, rows): all float32 and contiguous.
    """
    batch, num_rows, nheads, headdim_v = out.shape
    return Launch(
        merge_parts_kernel,
        (batch * num_rows * nheads,),
        {
            **pointers(acc=acc, m=m, l=l, out=out, lse=lse),
            "num_parts": num_parts,
            "num_rows": num_rows,
            "nheads": nheads,
        },
        {
            "HEAD_DIM_V": headdim_v,
            "BLOCK_DV": block_dim(headdim_v),
            "BLOCK_P": min(MERGED_AT_ONCE, triton.next_power_of_2(num_parts)),
        },
        MERGE.options,
    )


def _constants_of_dims(inputs: KernelArgs) -> dict[str, int]:
    """Constants of the head dims; a wide head dim has two blocks, the rest in the second."""
    headdim = inputs.q.size(3)
    main = main_dim(headdim)
    rest = block_dim(headdim - main) if headdim > main else 0
    return {**inputs.constants, "BLOCK_D": main, "BLOCK_REST": rest}


def _constants_of_rows(
    runs: SeenRows, k: Tensor, block_table: Tensor | None, config: Config
) -> dict[str, int]:
    return {
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "PAGE_SIZE": 0 if block_table is None else k.size(1),
        "TABLE": runs.table is not None,
        "PART_UNIT": PART_UNIT,
        "LEAST_PART": LEAST_PART,
    }
