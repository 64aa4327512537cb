"""Backward for sm_90 in Gluon: dq, dk and dv in one kernel of five products.

`flash_bwd` has the formulas. There the kernels of dq and of dk/dv both compute the scores and dp:
seven products. Here a program has a block of BLOCK_N kv rows of one kv head. It visits the blocks
of q rows that see it, upwards, with all query heads of the group, and computes each score once:

    S' = K Q'     dP' = V dO'     dV += P' dO     dQ = dS K     dK += dS' Q

dk and dv stay in registers from visit to visit. Several programs add to the same rows of dq, in
memory. So that its bits do not depend on timing, the visits of a block of q rows take turns, in the
order of the tasks (`turn_table`):

    kv block    visits, to the right                a program waits only within a column: `d` does
      3                            d  +  +          not wait, and `+` adds when its predecessor, the
      2                   d  +  +  +  +  +          sign above it, has added
      1          d  +  +  +  +  +  +  +  +
      0    d  +  +  +  +  +  +  +  +  +  +          q rows, from left to right

A program draws its task from a counter when it starts, so each predecessor has started before it.

Two warpgroups compute, with 64 kv rows each; one warp loads, and one warp adds to dq:

                        shared memory
      producer -----> | K  V           | -----> consumer 0, 1: S' and dP' of 64 rows, dK, dV
                      | Q  dO  lse ... |           |     ^
                      | dS of both     | <---------'     | a half of dQ each, of the dS of both
                      | dQ of a visit  | <---------------'
      adder  <------- '----------------'

Mbarriers hand buffers over, as in `hopper_fwd`. With 64 dims a visit has 128 rows of q, and each
consumer computes dQ of half the rows; with 128 dims it has 64 rows of q, and half the dims each.

Blocks of kv rows are on a grid that begins at row 0, and rows outside a run count as zeros in
products: so dQ has the same bits wherever the sequence is cut at multiples of BLOCK_N. Rows outside
a run may hold NaN: the producer zeroes them. Their own sums, which NaN within the run may spoil,
are not stored.

Shah et al., arXiv 2407.08608; for the turns, the deterministic mode of flash-attn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .configs import Config
from .flash_fwd import KernelArgs, pointers, scales
from .hopper_add import ADDED, ADDED_ROWS, CONSUMERS, PART, PART_DIMS, Context, add_in_turns
from .hopper_blocks import (
    ROWS,
    BlockRows,
    BufferRing,
    Flags,
    await_empty,
    await_full,
    block_descriptor,
    clear_outside,
    fill_rows,
    load_place,
    make_barriers,
    make_buffers,
    opaque_zero,
    probabilities,
    reinterpret,
    start_copy,
    store_place,
)
from .hopper_tasks import TaskTables, load_task
from .launch import Launch, Traced
from .step_table import column_range
from .tasks import step_schedule
from .turn_table import TurnTable, load_visited


class BwdShared(NamedTuple):
    """Shared memory of a program."""

    k: Traced  # buffers of a half for each consumer
    v: Traced
    kv_full: Traced  # barriers of both
    kv_empty: Traced
    q: Traced  # rings; full is q when the statistics are there, too
    dout: Traced  # empty when q is
    statistics: Traced  # for each buffer of q, minus_lse and delta
    ds: Traced  # buffers: two of each consumer
    ds_full: Traced
    dq: Traced  # one buffer
    dq_full: Traced
    dq_empty: Traced
    landed: Traced  # barriers of copies of K and V, of q, and of dout that the producer waits for


class Visited(NamedTuple):
    """Values that a consumer uses in all visits of a run."""

    shared: Traced
    runs_ptr: Traced
    run: Traced  # its number
    rows: Traced
    scale: Traced


@gluon.jit
def _load_statistics(ptr, start, run, BLOCK_M: gl.constexpr):
    """minus_lse or delta of BLOCK_M q rows, float32; 0 outside the run."""
    L: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    cols = start + gl.arange(0, BLOCK_M, L)
    return gl.load(ptr + cols, (cols >= run[0]) & (cols < run[1]), 0.0)


@gluon.jit
def _copy_kv(k_desc, v_desc, shared, barrier, batch, row, kv_head):
    """Copies a block of K and V; the end of the copies completes the barrier."""
    PARTS: gl.constexpr = shared.k.shape[0]
    mbarrier.expect(barrier, PARTS * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for part in gl.static_range(PARTS):
        coord = [batch, row + part * shared.k.shape[2], kv_head, 0]
        start_copy(k_desc, coord, barrier, shared.k.index(part))
        start_copy(v_desc, coord, barrier, shared.v.index(part))


@gluon.jit
def load_visits(context, descs, statistics, FLAGS: gl.constexpr, GROUP: gl.constexpr):
    """Loads the consumers' blocks, in the order in which they are used."""
    shared, work, _, task = context
    q, dout = shared.q, shared.dout
    q_desc, k_desc, v_desc, dout_desc = descs
    minus_lse_ptr, delta_ptr, num_rows = statistics
    RAGGED: gl.constexpr = FLAGS.RAGGED
    BLOCK_M: gl.constexpr = q.buffers.shape[2]
    PARTS: gl.constexpr = shared.k.shape[0]
    PART_ROWS: gl.constexpr = shared.k.shape[2]
    batch, kv_head, row, _, first_run, last_run = load_task(work, task)
    nheads = work.num_heads * GROUP
    use = 0
    q_uses = 0
    dout_uses = 0
    kv_uses = 0
    for i in range(first_run, last_run):
        run = load_visited(work.runs_ptr, i)
        rows = (run[4], run[5])
        mbarrier.wait(shared.kv_empty.index(0), ((i - first_run) & 1) ^ 1)
        partial = (rows[0] > row) | (rows[1] < row + PARTS * PART_ROWS)
        if partial and FLAGS.PARTIAL:
            _copy_kv(k_desc, v_desc, shared, shared.landed.index(0), batch, row, kv_head)
        else:
            _copy_kv(k_desc, v_desc, shared, shared.kv_full.index(0), batch, row, kv_head)
        if FLAGS.PARTIAL:
            if partial:
                mbarrier.wait(shared.landed.index(0), kv_uses & 1)
                kv_uses += 1
                for part in gl.static_range(PARTS):
                    clear_outside(shared.k.index(part), row + part * PART_ROWS, rows)
                    clear_outside(shared.v.index(part), row + part * PART_ROWS, rows)
                fence_async_shared()
                mbarrier.arrive(shared.kv_full.index(0), count=1)
        first, full_first, full_last, last = column_range(rows[0], rows[1], run[:4], BLOCK_M)
        for t in range(first * GROUP, last * GROUP):
            start = t // GROUP * BLOCK_M
            head = kv_head * GROUP + t % GROUP
            coord = [batch, start, head, 0]
            stage = await_empty(q, use)
            q_uses = fill_rows(
                q_desc,
                coord,
                q.buffers.index(stage),
                q.full.index(stage),
                shared.landed.index(1),
                start,
                run,
                q_uses,
                RAGGED,
            )
            statistic = (batch * nheads + head) * num_rows
            minus_lse = _load_statistics(minus_lse_ptr + statistic, start, run, BLOCK_M)
            # +inf (a row that sees no key) would turn the mask's -inf into NaN.
            minus_lse = gl.where(minus_lse == float("inf"), 0.0, minus_lse)
            shared.statistics.index(2 * stage).store(minus_lse)
            delta = _load_statistics(delta_ptr + statistic, start, run, BLOCK_M)
            shared.statistics.index(2 * stage + 1).store(delta)
            mbarrier.arrive(q.full.index(stage), count=1)
            # On sm_90 its last use ended before q's: no barrier of its own says so.
            if dout.empty is not None:
                stage = await_empty(dout, use)
            dout_uses = fill_rows(
                dout_desc,
                coord,
                dout.buffers.index(stage),
                dout.full.index(stage),
                shared.landed.index(2),
                start,
                run,
                dout_uses,
                RAGGED,
            )
            use += 1


@gluon.jit
def _start_scores(kv_rows, q_rows, LAYOUT: gl.constexpr):
    """Starts the product of ROWS kv rows and ROWS q rows."""
    zeros = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    return warpgroup_mma(kv_rows, q_rows.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _visit(
    sums,
    begin,
    end,
    visited,
    INDEX: gl.constexpr,
    GROUP: gl.constexpr,
    FLAGS: gl.constexpr,
    MASK: gl.constexpr,
    DQ: gl.constexpr,
    DKV: gl.constexpr,
):
    """Visits the blocks of q rows [begin, end) of a run, with every head of the group.

    dk dv (ROWS, HEAD_DIM) are a consumer's sums, rows (ROWS,) its kv rows. Scores are computed in
    parts of ROWS rows of q: two halves or one.
    """
    dk, dv, use = sums
    shared, _, _, rows, _ = visited
    BLOCK_M: gl.constexpr = shared.q.buffers.shape[2]
    HALVES: gl.constexpr = BLOCK_M // ROWS
    HEAD_DIM: gl.constexpr = shared.k.shape[4]
    S_LAYOUT: gl.constexpr = rows.type.layout.parent
    COLS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_DIMS, 16])
    for t in range(begin * GROUP, end * GROUP):
        index = INDEX + opaque_zero(t)
        k = shared.k.index(index).reshape([ROWS, HEAD_DIM])
        v = shared.v.index(index).reshape([ROWS, HEAD_DIM])
        stage = await_full(shared.q, use)
        q = shared.q.buffers.index(stage).reshape([BLOCK_M, HEAD_DIM])
        q0, q1 = q.slice(0, ROWS, 0), q.slice(BLOCK_M - ROWS, ROWS, 0)
        s0 = _start_scores(k, q0, S_LAYOUT)
        if HALVES == 2:
            s1 = _start_scores(k, q1, S_LAYOUT)
        await_full(shared.dout, use)
        dout = shared.dout.buffers.index(stage).reshape([BLOCK_M, HEAD_DIM])
        dout0, dout1 = dout.slice(0, ROWS, 0), dout.slice(BLOCK_M - ROWS, ROWS, 0)
        dp0 = _start_scores(v, dout0, S_LAYOUT)
        if HALVES == 2:
            dp1 = _start_scores(v, dout1, S_LAYOUT)
        minus_lse = shared.statistics.index(2 * stage)
        delta = shared.statistics.index(2 * stage + 1)

        s0 = warpgroup_mma_wait(2 * HALVES - 1, deps=[s0])
        start = t // GROUP * BLOCK_M
        p0 = probabilities(s0, minus_lse.slice(0, ROWS).load(COLS), start, t, visited, FLAGS, MASK)
        # dV of the first half runs beside the exponentials of the second; for a mask, too, there
        # are no registers.
        EARLY: gl.constexpr = DKV and not (MASK and HALVES == 2)
        ROUNDED: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
        if EARLY:
            dv = warpgroup_mma(gl.convert_layout(p0.to(q.dtype), ROUNDED), dout0, dv, is_async=True)
        if HALVES == 1:
            dp0 = warpgroup_mma_wait(1 if EARLY else 0, deps=[dp0])
        else:
            s1 = warpgroup_mma_wait(3 if EARLY else 2, deps=[s1])
            lse1 = minus_lse.slice(ROWS, ROWS).load(COLS)
            p1 = probabilities(s1, lse1, start + ROWS, t, visited, FLAGS, MASK)
            dp0, dp1, dv = warpgroup_mma_wait(0, deps=[dp0, dp1, dv])
        ds0 = (p0 * (dp0 - delta.slice(0, ROWS).load(COLS)[None, :])).to(q.dtype)
        if HALVES == 2:
            ds1 = (p1 * (dp1 - delta.slice(ROWS, ROWS).load(COLS)[None, :])).to(q.dtype)
            if DKV:
                if not EARLY:
                    p0 = gl.convert_layout(p0.to(q.dtype), ROUNDED)
                    dv = warpgroup_mma(p0, dout0, dv, is_async=True)
                p1 = gl.convert_layout(p1.to(q.dtype), ROUNDED)
                dv = warpgroup_mma(p1, dout1, dv, is_async=True)

        if DQ:
            # Two buffers alternate. A consumer that writes one has waited for the other consumer's
            # previous visit, and so for the product that read this buffer.
            half = CONSUMERS * (use & 1)
            shared.ds.index(half + INDEX).slice(0, ROWS, 1).store(ds0)
            if HALVES == 2:
                shared.ds.index(half + INDEX).slice(ROWS, ROWS, 1).store(ds1)
            fence_async_shared()
            mbarrier.arrive(shared.ds_full.index(0), count=1)
            mbarrier.wait(shared.ds_full.index(0), use & 1)
            dq = gl.zeros([ROWS, PART_DIMS], gl.float32, DQ_LAYOUT)
            for part in gl.static_range(CONSUMERS):
                left = shared.ds.index(half + part)
                right = shared.k.index(index - INDEX + part).reshape([ROWS, HEAD_DIM])
                if BLOCK_M == ROWS:
                    right = right.slice(INDEX * PART_DIMS, PART_DIMS, 1)
                else:
                    left = left.slice(INDEX * ROWS, ROWS, 1)
                dq = warpgroup_mma(left.permute((1, 0)), right, dq, use_acc=part > 0, is_async=True)
        if DKV:
            dk = warpgroup_mma(gl.convert_layout(ds0, ROUNDED), q0, dk, is_async=True)
            if HALVES == 2:
                dk = warpgroup_mma(gl.convert_layout(ds1, ROUNDED), q1, dk, is_async=True)
        if DQ:
            dq = warpgroup_mma_wait(HALVES if DKV else 0, deps=[dq])
            mbarrier.wait(shared.dq_empty.index(0), (use & 1) ^ 1)
            parts = reinterpret(shared.dq, gl.float32, [CONSUMERS, ROWS, PART_DIMS], PART)
            parts.index(INDEX).store(dq)
            mbarrier.arrive(shared.dq_full.index(0), count=1)
        if DKV:
            dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        mbarrier.arrive(shared.q.empty.index(stage), count=1)
        use += 1
    return dk, dv, use


@gluon.jit
def _consume(
    context,
    grads,
    scale,
    INDEX: gl.constexpr,
    GROUP: gl.constexpr,
    FLAGS: gl.constexpr,
    DQ: gl.constexpr,
    DKV: gl.constexpr,
):
    """Computes dk and dv of the INDEX-th 64 kv rows of this program's block, and its part of dQ."""
    shared, work, _, task = context
    runs_ptr = work.runs_ptr
    dk_ptr, dv_ptr, num_rows_kv = grads
    BLOCK_M: gl.constexpr = shared.q.buffers.shape[2]
    HEAD_DIM: gl.constexpr = shared.k.shape[4]
    HAS_HI: gl.constexpr = FLAGS.HAS_HI
    RAGGED: gl.constexpr = FLAGS.RAGGED
    PARTIAL: gl.constexpr = FLAGS.PARTIAL
    MASKED: gl.constexpr = FLAGS.HAS_LO or HAS_HI or RAGGED or PARTIAL
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    G_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    batch, kv_head, first_row, _, first_run, last_run = load_task(work, task)
    row = first_row + INDEX * ROWS
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    use = 0
    for i in range(first_run, last_run):
        run = load_visited(runs_ptr, i)
        first, full_first, full_last, last = column_range(run[4], run[5], run[:4], BLOCK_M)
        if PARTIAL:
            partial = (run[4] > first_row) | (run[5] < first_row + CONSUMERS * ROWS)
            full_first = gl.where(partial, last, full_first)
            full_last = gl.where(partial, last, full_last)
        if DKV:
            place = BlockRows(batch, kv_head, row, num_rows_kv, num_rows_kv, work.num_heads)
            dk = load_place(dk_ptr, place, HEAD_DIM, G_LAYOUT)
            dv = load_place(dv_ptr, place, HEAD_DIM, G_LAYOUT)
        else:
            dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, G_LAYOUT)
            dv = dk
        mbarrier.wait(shared.kv_full.index(0), (i - first_run) & 1)
        visited = Visited(shared, runs_ptr, i, rows, scale)
        sums = (dk, dv, use)
        if MASKED:
            sums = _visit(sums, first, full_first, visited, INDEX, GROUP, FLAGS, True, DQ, DKV)
        sums = _visit(sums, full_first, full_last, visited, INDEX, GROUP, FLAGS, False, DQ, DKV)
        if HAS_HI or RAGGED:
            sums = _visit(sums, full_last, last, visited, INDEX, GROUP, FLAGS, True, DQ, DKV)
        dk, dv, use = sums
        mbarrier.arrive(shared.kv_empty.index(0), count=1)
        if DKV:
            # Computed again: pointers kept during the loops would take the products' registers.
            zero = opaque_zero(i)
            batch, kv_head, first_row, _, _, _ = load_task(work, task + zero)
            row = first_row + INDEX * ROWS
            run = load_visited(runs_ptr, i + zero)
            # Not stored: rows outside the run, whose sums are zeros, or NaN if the run has NaN.
            target = BlockRows(batch, kv_head, row, run[5], num_rows_kv, work.num_heads + zero)
            store_place(dk_ptr, dk, target, run[4])
            store_place(dv_ptr, dv, target, run[4])


@gluon.jit(do_not_specialize=["num_blocks", "heads_together"])
def hopper_bwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    minus_lse_ptr,
    delta_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    turns_ptr,
    blocks_ptr,
    runs_ptr,
    pieces_ptr,
    num_blocks,
    heads_together,
    num_rows,
    num_rows_kv,
    nheads_kv,
    scale,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_LO: gl.constexpr,
    HAS_HI: gl.constexpr,
    RAGGED: gl.constexpr,
    PARTIAL: gl.constexpr,
    DQ: gl.constexpr,
    DKV: gl.constexpr,
):
    """Adds to dk and dv of a block of kv rows of one kv head, and to dq of all rows that see it."""
    DS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    STATISTICS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    k_buffers = make_buffers(k_desc, CONSUMERS)
    v_buffers = make_buffers(v_desc, CONSUMERS)
    q_buffers = make_buffers(q_desc, STAGES)
    dout_buffers = make_buffers(dout_desc, STAGES)
    shared = BwdShared(
        k=k_buffers,
        v=v_buffers,
        statistics=gl.allocate_shared_memory(gl.float32, [2 * STAGES, BLOCK_M], STATISTICS),
        ds=gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS, ROWS, BLOCK_M], DS),
        dq=gl.allocate_shared_memory(
            gl.float32, [CONSUMERS * ROWS // ADDED_ROWS, ADDED_ROWS, PART_DIMS], ADDED
        ),
        kv_full=make_barriers(1, 1),
        kv_empty=make_barriers(1, CONSUMERS),
        # A buffer of q is full when its copy and its statistics are there.
        q=BufferRing(q_buffers, make_barriers(STAGES, 2), make_barriers(STAGES, CONSUMERS)),
        dout=BufferRing(dout_buffers, make_barriers(STAGES, 1), None),
        ds_full=make_barriers(1, CONSUMERS),
        dq_full=make_barriers(1, CONSUMERS),
        dq_empty=make_barriers(1, 1),
        landed=make_barriers(3, 1),
    )
    # Copies run outside the warps: this fence makes the barriers above visible to them.
    fence_async_shared()
    # The first of the turns counts the tasks taken so far.
    task = gl.atomic_add(turns_ptr, 1, sem="relaxed")
    work = TaskTables(blocks_ptr, runs_ptr, num_blocks, heads_together, nheads_kv)
    context = Context(shared, work, pieces_ptr, task)
    descs = (q_desc, k_desc, v_desc, dout_desc)
    statistics = (minus_lse_ptr, delta_ptr, num_rows)
    grads = (dk_ptr, dv_ptr, num_rows_kv)
    FLAGS: gl.constexpr = Flags(HAS_LO, HAS_HI, RAGGED, PARTIAL=PARTIAL)
    gl.warp_specialize(
        [
            (_consume, (context, grads, scale, 0, GROUP, FLAGS, DQ, DKV)),
            (_consume, (context, grads, scale, 1, GROUP, FLAGS, DQ, DKV)),
            (load_visits, (context, descs, statistics, FLAGS, GROUP)),
            (add_in_turns, (context, dq_ptr, turns_ptr + 1, num_rows, GROUP, RAGGED, DQ)),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )


def bwd_launch(
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
        inputs: as in `flash_bwd.dq_launch`; q, k, v, dout as from `hopper_fwd.copyable`.
        gradients: dq, dk, dv, float32, contiguous; added to. None leaves dq, or dk and dv, out.
        turns: `turn_table.num_turns` int32 zeros.
        table: table for this config's blocks.
        config: BLOCK_N 128, BLOCK_M 128 for 64 dims and 64 for 128, 4 warps (of a consumer).
        softmax_scale: positive.
    """
    named = KernelArgs(*inputs)
    q, k, v, dout, *_ = inputs
    dq, dk, dv = gradients
    schedule = step_schedule(q, k, v, table, config, kv_rows=True)
    return Launch(
        hopper_bwd_kernel,
        (schedule.num_tasks,),
        {
            "q_desc": block_descriptor(q, config.BLOCK_M),
            "k_desc": block_descriptor(k, ROWS.value),
            "v_desc": block_descriptor(v, ROWS.value),
            "dout_desc": block_descriptor(dout, config.BLOCK_M),
            **pointers(**named.statistics, dq=dq, dk=dk, dv=dv, turns=turns),
            **pointers(blocks=table.blocks, runs=table.runs, pieces=table.pieces),
            **schedule.args,
            **named.sizes(kv_rows=True),
            "scale": scales(softmax_scale, 0.0)["inner_scale"],
        },
        {
            "GROUP": named.group,
            "BLOCK_M": config.BLOCK_M,
            "STAGES": config.num_stages,
            **table.constants,
            "PARTIAL": table.partial,
            "DQ": dq is not None,
            "DKV": dk is not None,
        },
        config.options,
    )
