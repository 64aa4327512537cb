"""Backward for sm_80 and sm_86: dq, dk and dv in one kernel of five products, for `flash_bwd`'s 7.

The algorithm is that of `hopper_bwd`, in Triton and without warps of their own for copies and sums:
a program has a block of kv rows, keeps dk and dv in registers, and adds dQ of each visited block of
q rows to dq in memory, when its turn comes. `hopper_bwd` says why no program waits for one that has
not started, and why the bits of dq depend neither on timing nor on where the sequence is cut.

    turn    0, then WARPS * run: each warp that has added raises it by run - before, if `before` was
            the number of the run before; so no barrier of all warps is needed

Threads add from the layout of the product's result, since through shared memory a second program
would not fit a multiprocessor: inline assembly, as Triton's own atomics move their operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from .configs import Config
from .flash_bwd import load_stats, probabilities
from .flash_fwd import KernelArgs, in_units, load_block, offset_of, step_launch
from .launch import Launch
from .step_table import column_range, load_block_row, visible_pairs
from .tasks import block_and_head
from .turn_table import TurnTable, load_piece, load_visited


@triton.constexpr_function
def _interpreted():
    return knobs.runtime.interpret


@triton.jit
def _opaque_zero(x):
    """0, unknown to the compiler, which thus keeps no results of it in registers during a loop."""
    if _interpreted():
        return 0
    return tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], tl.int32, is_pure=True, pack=1)


@triton.jit
def _await_turn(turn, before, WARPS: tl.constexpr):
    """Waits until the run `before`, 0 if there is none, has passed the turn on; returns 0.

    Other warps of the program may have raised the turn already. What is to follow must depend on
    the result: triton moves parts of a loop past each other.
    """
    if _interpreted():
        while tl.atomic_add(turn, 0, sem="acquire") < before * WARPS:
            pass
        return 0
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred early; poll: ld.global.gpu.acquire.b32 $0, [$1]; "
            "setp.lt.s32 early, $0, $2; @early bra poll; mov.b32 $0, 0; }",
            "=r,l,r",
            [turn.to(tl.int64), before * WARPS],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _pass_turn(turn, runs, WARPS: tl.constexpr):
    """Raises the turn by a number of runs, when all threads have added."""
    if _interpreted():
        tl.atomic_add(turn, runs * WARPS, sem="release")
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred lead; .reg .b32 lane; bar.warp.sync 0xffffffff; mov.u32 lane, %tid.x; "
            "and.b32 lane, lane, 31; setp.eq.b32 lead, lane, 0; "
            "@lead atom.global.gpu.release.add.u32 $0, [$1], $2; }",
            "=r,l,r",
            [turn.to(tl.int64), runs],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _add(ptrs, x, inside, MASKED: tl.constexpr):
    """Adds x to memory; with MASKED, where `inside`."""
    if _interpreted():
        tl.atomic_add(ptrs, x, inside, sem="relaxed")
    elif MASKED:
        tl.inline_asm_elementwise(
            "{ .reg .pred inside; setp.ne.b32 inside, $3, 0; "
            "@inside atom.global.gpu.relaxed.add.f32 $0, [$1], $2; }",
            "=f,l,f,r",
            [ptrs.to(tl.int64), x, inside.to(tl.int32)],
            tl.float32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "atom.global.gpu.relaxed.add.f32 $0, [$1], $2;",
            "=f,l,f",
            [ptrs.to(tl.int64), x],
            tl.float32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["num_blocks", "heads_together"])
def turns_bwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    minus_lse_ptr,
    delta_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    turns_ptr,
    blocks_ptr,
    runs_ptr,
    pieces_ptr,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_db,
    stride_dm,
    stride_dh,
    num_rows,
    num_rows_kv,
    nheads_kv,
    num_blocks,
    heads_together,
    inner_scale,
    outer_scale,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    RAGGED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PARTIAL: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    DQ: tl.constexpr,
    DKV: tl.constexpr,
):
    """Adds to dk and dv of a block of kv rows of one kv head, and to dq of all rows that see it."""
    # The first of the turns counts the tasks taken so far.
    task = tl.atomic_add(turns_ptr, 1, sem="relaxed")
    block, index = block_and_head(task, num_blocks, heads_together)
    batch = index // nheads_kv
    kv_head = index % nheads_kv
    row_start, row_stop, first_run, last_run = load_block_row(blocks_ptr, block)

    head = (kv_head * GROUP).to(tl.int64)
    q_heads = q_ptr + offset_of(batch, stride_qb, UNIT) + offset_of(head, stride_qh, UNIT)
    dout_heads = dout_ptr + offset_of(batch, stride_db, UNIT) + offset_of(head, stride_dh, UNIT)
    k_head = k_ptr + offset_of(batch, stride_kb, UNIT) + offset_of(kv_head, stride_kh, UNIT)
    v_head = v_ptr + offset_of(batch, stride_vb, UNIT) + offset_of(kv_head, stride_vh, UNIT)
    first_head = batch * nheads_kv * GROUP + head
    minus_lse_heads = minus_lse_ptr + first_head * num_rows
    delta_heads = delta_ptr + first_head * num_rows
    num_cols = tl.cdiv(num_rows, BLOCK_M)
    turns = turns_ptr + 1 + first_head * num_cols
    # Gradients are contiguous: (batch, rows, nheads, HEAD_DIM).
    stride_grad = nheads_kv * HEAD_DIM
    if DQ:
        dq_heads = dq_ptr + (batch.to(tl.int64) * num_rows * nheads_kv * GROUP + head) * HEAD_DIM
    grad = (batch.to(tl.int64) * num_rows_kv * nheads_kv + kv_head) * HEAD_DIM

    if SAME_ROWS:
        stride_dm = stride_qm
    stride_qm, stride_dm = in_units(stride_qm, UNIT), in_units(stride_dm, UNIT)
    stride_kn, stride_vn = in_units(stride_kn, UNIT), in_units(stride_vn, UNIT)
    offs = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    for j in range(first_run, last_run):
        run = load_visited(runs_ptr, j)
        # Rows of the block that are not the run's count as zeros.
        own = (run[4], run[5])
        k = load_block(k_head, row_start, own, stride_kn, HEAD_DIM, BLOCK_D, BLOCK_N, PARTIAL)
        v = load_block(v_head, row_start, own, stride_vn, HEAD_DIM, BLOCK_D, BLOCK_N, PARTIAL)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        if DKV:
            dk_head, dv_head = dk_ptr + grad, dv_ptr + grad
            stride_run = stride_grad + 16 * _opaque_zero(j)
            dk = load_block(
                dk_head, row_start, own, stride_run, HEAD_DIM, BLOCK_D, BLOCK_N, PARTIAL
            )
            dv = load_block(
                dv_head, row_start, own, stride_run, HEAD_DIM, BLOCK_D, BLOCK_N, PARTIAL
            )
        first, full_first, full_last, last = column_range(run[4], run[5], run[:4], BLOCK_M)
        if PARTIAL:
            if (run[4] > row_start) | (run[5] < row_start + BLOCK_N):
                full_first, full_last = last, last
        piece = run[6]
        stop, _ = load_piece(pieces_ptr, piece)
        for i in range((last - first) * GROUP):
            t = first * GROUP + i
            q_block = t // GROUP
            start = q_block * BLOCK_M
            of_group = t % GROUP
            if DQ:
                piece += (q_block == stop).to(tl.int32)
                stop, before = load_piece(pieces_ptr, piece)
            # Computed at every visit: kept during the loop, rows would take 26 registers too many.
            zero = _opaque_zero(t)
            rows_q = stride_qm + 16 * zero
            rows_d = rows_q if SAME_ROWS else stride_dm + 16 * zero
            cols = start + tl.arange(0, BLOCK_M)
            stats = (of_group * num_rows + start) + tl.arange(0, BLOCK_M)
            q_head = q_heads + offset_of(of_group, stride_qh, UNIT)
            q = load_block(q_head, start, run, rows_q, HEAD_DIM, BLOCK_D, BLOCK_M, RAGGED)
            dout_head = dout_heads + offset_of(of_group, stride_dh, UNIT)
            dout = load_block(dout_head, start, run, rows_d, HEAD_DIM, BLOCK_D, BLOCK_M, RAGGED)
            kq = tl.dot(k, tl.trans(q), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
            minus_lse = load_stats(minus_lse_heads + stats, cols, run, RAGGED)
            p, slope = probabilities(kq, minus_lse[None, :], inner_scale, outer_scale, SOFTCAP)
            if HAS_LO or HAS_HI or RAGGED or PARTIAL:
                if (q_block < full_first) | (q_block >= full_last):
                    rows = (row_start + zero) + offs
                    visible = visible_pairs(rows[:, None], cols[None, :], run[:4], HAS_LO, HAS_HI)
                    if PARTIAL:
                        visible = visible & ((rows >= run[4]) & (rows < run[5]))[:, None]
                    p = tl.where(visible, p, 0.0)
            dp = tl.dot(v, tl.trans(dout), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
            delta = load_stats(delta_heads + stats, cols, run, RAGGED)
            ds = (p * (dp - delta[None, :]) * slope).to(q.dtype)
            if DKV:
                dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
                dk = tl.dot(ds, q, dk, input_precision="ieee")
            if DQ:
                turn = turns + (of_group * num_cols + q_block)
                zero += _await_turn(turn, before, WARPS)
                dq = tl.dot(tl.trans(ds), k, input_precision="ieee")  # (BLOCK_M, BLOCK_D)
                rows_dq = tl.arange(0, BLOCK_M) + zero
                dq_block = dq_heads + of_group * HEAD_DIM + start.to(tl.int64) * GROUP * stride_grad
                ptrs = dq_block + (rows_dq[:, None] * (GROUP * stride_grad) + dims[None, :])
                inside = (cols >= run[0]) & (cols < run[1])
                inside = inside[:, None] & (dims < HEAD_DIM)[None, :]
                _add(ptrs, dq, inside, RAGGED or HEAD_DIM != BLOCK_D)
                _pass_turn(turn, j + 1 - before, WARPS)
        if DKV:
            # Another run of the same rows loads these sums, perhaps in other threads.
            tl.debug_barrier()
            # Not stored: rows outside the run, whose sums are zeros, or NaN if the run has NaN.
            rows = row_start + _opaque_zero(j) + offs
            inside = ((rows >= run[4]) & (rows < run[5]))[:, None] & (dims < HEAD_DIM)[None, :]
            stored = grad + (rows.to(tl.int64) * stride_grad)[:, None] + dims[None, :]
            tl.store(dk_ptr + stored, dk, inside)
            tl.store(dv_ptr + stored, dv, inside)
            tl.debug_barrier()


def turns_launch(
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    turns: Tensor,
    table: TurnTable,
    config: Config,
    *,
    softmax_scale: float,
) -> Launch:
    """Return the launch that adds one step's dq and dk (without softmax_scale) and dv.

    Args:
        inputs: as in `flash_bwd.dq_launch`, with equal head dims.
        gradients: dq, dk, dv, float32, contiguous; added to. None leaves dq, or dk and dv, out.
        turns: `turn_table.num_turns` int32 zeros.
        table: table for this config's blocks.
        config: `configs.ONE_PASS` has those in use.
        softmax_scale: positive.
    """
    dq, dk, dv = gradients
    named = KernelArgs(*inputs)
    return step_launch(
        turns_bwd_kernel,
        named,
        {"dq": dq, "dk": dk, "dv": dv, "turns": turns, "pieces": table.pieces},
        table,
        config,
        constants={
            "PARTIAL": table.partial,
            "SAME_ROWS": named.same_rows,
            "WARPS": config.num_warps,
            "DQ": dq is not None,
            "DKV": dk is not None,
        },
        kv_rows=True,
        softmax_scale=softmax_scale,
        softcap=0.0,
    )
