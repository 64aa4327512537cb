"""Backward for sm_100 in Gluon: dq, dk and dv in one kernel of five products in tensor memory.

Products, visits, turns and tables are those of `hopper_bwd`, whose producer loads. A program has
128 kv rows of one kv head, and visits blocks of 128 rows of q:

    warp       loads         K and V of a run; Q, dO and their statistics into rings of buffers
    warp       multiplies    S' = K Q' and dP' = V dO'; dV += P' dO, dK += dS' Q and dQ = dS K
    warpgroup  softmax 0     P' and dS' of the first 64 rows of q; loads and stores dK
    warpgroup  softmax 1     the same of the last 64 rows of q; dV
    warpgroup  adds          dQ to dq in memory, each visit in its turn

Tensor memory has 512 columns of 128 lanes: S', dP', dK and dV. A softmax warpgroup has a kv row in
each thread, and writes its P' over its half of S' and its dS' over its half of dP'; dQ, which needs
the other transpose, reads dS' from shared memory. When dK has read dS', dQ overwrites it.

The tensor cores execute products in the order in which they were issued, so nobody waits for P',
dS' and their buffer to be free:

    tensor cores   | dV0 S1 | dK0 dQ0 dP1 |  | dV1 S2 | dK1 dQ1 dP2 |
    softmax        |   dS0  |      P1        |   dS1  |      P2

These barriers complete once a visit, so that their parity is that of the number of visits so far:

    scores     S' is complete                        multiplying -> softmax
    weights    P' is complete                        softmax -> multiplying
    products   dP' is complete                       multiplying -> softmax
    ds_full    dS' is complete, in both places       softmax -> multiplying
    dq_full    dQ is complete                        multiplying -> adding
    dq_empty   dQ has been read                      adding -> multiplying

and once a run `kv_empty`, all products are complete. Softmax loads dK and dV before the first P' of
a run. The warpgroup that adds has registers for 64 columns of dQ at a time.
Zadouri et al., arXiv 2603.05451.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .blackwell_blocks import PART, ROWS, Place, as_operand, load_tile, part_ptrs, row_layout
from .hopper_add import Context
from .hopper_blocks import (
    BufferRing,
    Flags,
    await_full,
    block_descriptor,
    make_barriers,
    make_buffers,
    mask_scores,
)
from .hopper_bwd import bwd_launch, load_visits
from .hopper_tasks import TaskTables, load_task
from .launch import Launch, Traced
from .step_table import column_range
from .turn_table import load_piece, load_visited

# Rows of q whose P' and dS' a warpgroup computes.
HALF = gl.constexpr(64)


class BwdShared(NamedTuple):
    """Shared memory of a program."""

    k: Traced  # one buffer, as v
    v: Traced
    kv_full: Traced  # barriers of both
    kv_empty: Traced
    q: Traced  # rings; full is q when the statistics are there, too
    dout: Traced
    statistics: Traced  # for each buffer of q, minus_lse and delta
    scores: Traced
    weights: Traced
    products: Traced
    ds: Traced  # one buffer, as dq in tensor memory
    ds_full: Traced
    dq_full: Traced
    dq_empty: Traced
    landed: Traced  # barriers of copies that the producer waits for


class Sums(NamedTuple):
    """Tensor memory of a program."""

    s: Traced
    dp: Traced  # and dq
    dk: Traced
    dv: Traced


@gluon.jit
def _add_product(left, right, into, pred):
    """Starts into += left right; left is in tensor memory, each half of its columns by itself."""
    for half in gl.static_range(0, ROWS, HALF):
        operand = as_operand(left, half, HALF, right.dtype)
        tcgen05_mma(operand, right.slice(half, HALF, 0), into, pred=pred)


@gluon.jit
def _issue_dv(shared, sums, use, pred, DKV: gl.constexpr):
    """Starts dV += P' dO of a visit, once its P' is complete, if `pred`."""
    STAGES: gl.constexpr = shared.dout.buffers.shape[0]
    HEAD_DIM: gl.constexpr = shared.k.shape[4]
    mbarrier.wait(shared.weights.index(0), use & 1, pred=pred)
    if DKV:
        dout = shared.dout.buffers.index(use % STAGES).reshape([ROWS, HEAD_DIM])
        _add_product(sums.s, dout, sums.dv, pred)
    tcgen05_commit(shared.dout.empty.index(use % STAGES), pred=pred)


@gluon.jit
def _issue_dk_dq(shared, sums, use, pred, DQ: gl.constexpr, DKV: gl.constexpr):
    """Starts dK += dS' Q and dQ = dS K of a visit, once its dS' is complete, if `pred`."""
    STAGES: gl.constexpr = shared.q.buffers.shape[0]
    HEAD_DIM: gl.constexpr = shared.k.shape[4]
    mbarrier.wait(shared.ds_full.index(0), use & 1, pred=pred)
    if DKV:
        q = shared.q.buffers.index(use % STAGES).reshape([ROWS, HEAD_DIM])
        _add_product(sums.dp, q, sums.dk, pred)
    tcgen05_commit(shared.q.empty.index(use % STAGES), pred=pred)
    if DQ:
        k = shared.k.index(0).reshape([ROWS, HEAD_DIM])
        dq, full = sums.dp.slice(0, HEAD_DIM), [shared.dq_full.index(0)]
        tcgen05_mma(shared.ds.permute((1, 0)), k, dq, use_acc=False, pred=pred, mbarriers=full)


@gluon.jit
def _multiply(context, sums, GROUP: gl.constexpr, DQ: gl.constexpr, DKV: gl.constexpr):
    """Issues all products: S' of a visit behind dV of the visit before, dP' behind its dQ."""
    shared, work, _, task = context
    q, dout = shared.q, shared.dout
    HEAD_DIM: gl.constexpr = shared.k.shape[4]
    _, _, _, _, first_run, last_run = load_task(work, task)
    use = 0
    for i in range(first_run, last_run):
        run = load_visited(work.runs_ptr, i)
        first, _, _, last = column_range(run[4], run[5], run[:4], ROWS)
        mbarrier.wait(shared.kv_full.index(0), (i - first_run) & 1)
        k = shared.k.index(0).reshape([ROWS, HEAD_DIM])
        v = shared.v.index(0).reshape([ROWS, HEAD_DIM])
        begun = i < first_run
        for _visit in range(first * GROUP, last * GROUP):
            _issue_dv(shared, sums, use - 1, begun, DKV)
            stage = await_full(q, use)
            right = q.buffers.index(stage).reshape([ROWS, HEAD_DIM]).permute((1, 0))
            tcgen05_mma(k, right, sums.s, use_acc=False, mbarriers=[shared.scores.index(0)])
            _issue_dk_dq(shared, sums, use - 1, begun, DQ, DKV)
            stage = await_full(dout, use)
            if DQ:
                mbarrier.wait(shared.dq_empty.index(0), (use & 1) ^ 1)
            right = dout.buffers.index(stage).reshape([ROWS, HEAD_DIM]).permute((1, 0))
            tcgen05_mma(v, right, sums.dp, use_acc=False, mbarriers=[shared.products.index(0)])
            begun = True
            use += 1
        _issue_dv(shared, sums, use - 1, begun, DKV)
        _issue_dk_dq(shared, sums, use - 1, begun, DQ, DKV)
        tcgen05_commit(shared.kv_empty.index(0))


@gluon.jit
def _visit(
    use,
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
    """Makes P' and dS' of the blocks of q rows [begin, end) of a run, with all heads."""
    shared, sums, runs_ptr, run_number, rows, scale = visited
    L: gl.constexpr = rows.type.layout.parent
    COLS: gl.constexpr = gl.SliceLayout(0, L)
    DTYPE: gl.constexpr = shared.ds.dtype
    s_half = sums.s.slice(INDEX * HALF, HALF)
    dp_half = sums.dp.slice(INDEX * HALF, HALF)
    for t in range(begin * GROUP, end * GROUP):
        stage = await_full(shared.q, use)
        mbarrier.wait(shared.scores.index(0), use & 1)
        s = load_tile(s_half, L)
        minus_lse = shared.statistics.index(2 * stage).slice(INDEX * HALF, HALF).load(COLS)
        if MASK:
            run = load_visited(runs_ptr, run_number)
            s = mask_scores(s, rows, t // GROUP * ROWS + INDEX * HALF, run, FLAGS)
        p = gl.exp2(gl.fma(s, scale, minus_lse[None, :]))
        if MASK and FLAGS.PARTIAL:
            inside = (rows >= run[4]) & (rows < run[5])
            p = gl.where(inside[:, None], p, 0.0)
        if DKV:
            as_operand(sums.s, INDEX * HALF, HALF, DTYPE).store(p.to(DTYPE))
        mbarrier.arrive(shared.weights.index(0), count=1)
        mbarrier.wait(shared.products.index(0), use & 1)
        dp = load_tile(dp_half, L)
        delta = shared.statistics.index(2 * stage + 1).slice(INDEX * HALF, HALF).load(COLS)
        ds = (p * (dp - delta[None, :])).to(DTYPE)
        if DKV:
            as_operand(sums.dp, INDEX * HALF, HALF, DTYPE).store(ds)
        if DQ:
            shared.ds.slice(INDEX * HALF, HALF, 1).store(ds)
            fence_async_shared()
        mbarrier.arrive(shared.ds_full.index(0), count=1)
        use += 1
    return use


@gluon.jit
def _soften(
    context,
    sums,
    grads,
    scale,
    INDEX: gl.constexpr,
    GROUP: gl.constexpr,
    FLAGS: gl.constexpr,
    DQ: gl.constexpr,
    DKV: gl.constexpr,
):
    """Makes P' and dS' of 64 rows of q a visit; loads and stores dK (INDEX 0) or dV."""
    shared, work, _, task = context
    dk_ptr, dv_ptr, num_rows_kv = grads
    ptr = dk_ptr if INDEX == 0 else dv_ptr
    added = sums.dk if INDEX == 0 else sums.dv
    HEAD_DIM: gl.constexpr = shared.k.shape[4]
    MASKED: gl.constexpr = FLAGS.HAS_LO or FLAGS.HAS_HI or FLAGS.RAGGED or FLAGS.PARTIAL
    L: gl.constexpr = row_layout(PART)
    part_rows = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    batch, kv_head, row, _, first_run, last_run = load_task(work, task)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, row_layout(HALF)))
    use = 0
    for i in range(first_run, last_run):
        run = load_visited(work.runs_ptr, i)
        first, full_first, full_last, last = column_range(run[4], run[5], run[:4], ROWS)
        if FLAGS.PARTIAL:
            partial = (run[4] > row) | (run[5] < row + ROWS)
            full_first = gl.where(partial, last, full_first)
            full_last = gl.where(partial, last, full_last)
        place = Place(batch, kv_head, row, num_rows_kv, num_rows_kv, work.num_heads)
        inside = (part_rows < run[5] - row)[:, None] & (part_rows >= run[4] - row)[:, None]
        if DKV:
            for part in gl.static_range(0, HEAD_DIM, PART):
                ptrs = part_ptrs(ptr, place, part, HEAD_DIM, L)
                added.slice(part, PART).store(gl.load(ptrs, inside, 0.0))
        visited = (shared, sums, work.runs_ptr, i, rows, scale)
        if MASKED:
            use = _visit(use, first, full_first, visited, INDEX, GROUP, FLAGS, True, DQ, DKV)
        use = _visit(use, full_first, full_last, visited, INDEX, GROUP, FLAGS, False, DQ, DKV)
        if FLAGS.HAS_HI or FLAGS.RAGGED:
            use = _visit(use, full_last, last, visited, INDEX, GROUP, FLAGS, True, DQ, DKV)
        if DKV:
            # Rows outside the run are not stored: if the run has NaN, their sums may be NaN.
            mbarrier.wait(shared.kv_empty.index(0), (i - first_run) & 1)
            for part in gl.static_range(0, HEAD_DIM, PART):
                ptrs = part_ptrs(ptr, place, part, HEAD_DIM, L)
                gl.store(ptrs, load_tile(added.slice(part, PART), L), inside)


@gluon.jit
def _add(context, sums, added, GROUP: gl.constexpr, RAGGED: gl.constexpr, DQ: gl.constexpr):
    """Adds dQ to dq in memory, each visit in its turn; see `hopper_add.add_in_turns`."""
    shared, work, pieces_ptr, task = context
    dq_ptr, turns_ptr, num_rows = added
    HEAD_DIM: gl.constexpr = shared.k.shape[4]
    READ: gl.constexpr = row_layout(PART)
    # A warp adds rows that it has read, 64 bytes of each.
    L: gl.constexpr = gl.BlockedLayout([4, 4], [8, 4], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    batch, kv_head, _, _, first_run, last_run = load_task(work, task)
    nheads = work.num_heads * GROUP
    use = 0
    for i in range(first_run, last_run):
        run = load_visited(work.runs_ptr, i)
        first, _, _, last = column_range(run[4], run[5], run[:4], ROWS)
        piece = run[6]
        stop, before = load_piece(pieces_ptr, piece)
        for t in range(first * GROUP, last * GROUP if DQ else first * GROUP):
            block = t // GROUP
            head = kv_head * GROUP + t % GROUP
            if block == stop:
                piece += 1
                stop, before = load_piece(pieces_ptr, piece)
            mbarrier.wait(shared.dq_full.index(0), use & 1)
            start = block * ROWS
            place = Place(batch, head, start, num_rows, num_rows, nheads)
            turn = turns_ptr + (batch * nheads + head) * gl.cdiv(num_rows, ROWS) + block
            inside = (rows >= run[0] - start) & (rows < run[1] - start)
            for half in gl.static_range(0, HEAD_DIM, HALF):
                parts = ()
                for part in gl.static_range(half, half + HALF, PART):
                    parts += (load_tile(sums.dp.slice(part, PART), READ),)  # type: ignore[assignment]
                if half + HALF == HEAD_DIM:
                    mbarrier.arrive(shared.dq_empty.index(0), count=1)
                if half == 0:
                    while gl.atomic_add(turn, 0, sem="acquire") != before:
                        pass
                for part in gl.static_range(half, half + HALF, PART):
                    if DQ:
                        ptrs = part_ptrs(dq_ptr, place, part, HEAD_DIM, L)
                        dq = gl.convert_layout(parts[(part - half) // PART], L)
                        if RAGGED:
                            gl.atomic_add(ptrs, dq, inside[:, None], sem="relaxed")
                        else:
                            gl.atomic_add(ptrs, dq, sem="relaxed")
            gl.barrier()
            gl.atomic_xchg(turn, i + 1, sem="release")
            use += 1


@gluon.jit(do_not_specialize=["num_blocks", "heads_together"])
def blackwell_bwd_kernel(
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
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[3]
    # With 128 dims there is no more room; a copy of dO ends while three products are executed.
    STAGES_DO: gl.constexpr = STAGES if HEAD_DIM == 64 else 1
    shared = BwdShared(
        k=make_buffers(k_desc, 1),
        v=make_buffers(v_desc, 1),
        statistics=gl.allocate_shared_memory(gl.float32, [2 * STAGES, BLOCK_M], STATISTICS),
        ds=gl.allocate_shared_memory(q_desc.dtype, [ROWS, BLOCK_M], DS),
        kv_full=make_barriers(1, 1),
        kv_empty=make_barriers(1, 1),
        # A buffer of q is full when its copy and its statistics are there.
        q=BufferRing(
            make_buffers(q_desc, STAGES), make_barriers(STAGES, 2), make_barriers(STAGES, 1)
        ),
        dout=BufferRing(
            make_buffers(dout_desc, STAGES_DO),
            make_barriers(STAGES_DO, 1),
            make_barriers(STAGES_DO, 1),
        ),
        scores=make_barriers(1, 1),
        weights=make_barriers(1, 2),
        products=make_barriers(1, 1),
        ds_full=make_barriers(1, 2),
        dq_full=make_barriers(1, 1),
        dq_empty=make_barriers(1, 1),
        landed=make_barriers(3, 1),
    )
    SCORES: gl.constexpr = TensorMemoryLayout([ROWS, BLOCK_M], col_stride=1)
    ADDED: gl.constexpr = TensorMemoryLayout([ROWS, HEAD_DIM], col_stride=1)
    sums = Sums(
        allocate_tensor_memory(gl.float32, [ROWS, BLOCK_M], SCORES),
        allocate_tensor_memory(gl.float32, [ROWS, BLOCK_M], SCORES),
        allocate_tensor_memory(gl.float32, [ROWS, HEAD_DIM], ADDED),
        allocate_tensor_memory(gl.float32, [ROWS, HEAD_DIM], ADDED),
    )
    # Copies and products run outside the warps: this makes the barriers above visible to them.
    fence_async_shared()
    # The first of the turns counts the tasks taken so far.
    task = gl.atomic_add(turns_ptr, 1, sem="relaxed")
    work = TaskTables(blocks_ptr, runs_ptr, num_blocks, heads_together, nheads_kv)
    context = Context(shared, work, pieces_ptr, task)
    descs = (q_desc, k_desc, v_desc, dout_desc)
    statistics = (minus_lse_ptr, delta_ptr, num_rows)
    grads = (dk_ptr, dv_ptr, num_rows_kv)
    added = (dq_ptr, turns_ptr + 1, num_rows)
    FLAGS: gl.constexpr = Flags(HAS_LO, HAS_HI, RAGGED, PARTIAL=PARTIAL)
    # The last list gives registers per thread, 512 for the four warpgroups.
    gl.warp_specialize(
        [
            (_soften, (context, sums, grads, scale, 0, GROUP, FLAGS, DQ, DKV)),
            (_soften, (context, sums, grads, scale, 1, GROUP, FLAGS, DQ, DKV)),
            (_add, (context, sums, added, GROUP, RAGGED, DQ)),
            (_multiply, (context, sums, GROUP, DQ, DKV)),
            (load_visits, (context, descs, statistics, FLAGS, GROUP)),
        ],
        [4, 4, 1, 1],
        [152, 128, 80, 80],
    )


def blackwell_bwd_launch(inputs: Sequence[Tensor], *args: Any, **options: Any) -> Launch:
    """The launch that adds one step's gradients: arguments as of `bwd_launch`, blocks of 128."""
    launch = bwd_launch(inputs, *args, **options)
    _, k, v, *_ = inputs
    own = {"k_desc": block_descriptor(k, ROWS.value), "v_desc": block_descriptor(v, ROWS.value)}
    return replace(launch, kernel=blackwell_bwd_kernel, args={**launch.args, **own})
