"""Forward for sm_100 in Gluon: products in tensor memory, warps that load, multiply and correct.

Table, state and folding order are those of `hopper_fwd`, whose producer loads. A program computes
two tiles of 128 rows of q, so that the tensor cores multiply for one while the other has its
softmax:

    warp       loads         Q of both tiles; K and V into rings of buffers
    warp       multiplies    S = Q K' and O += P V of both tiles, in tensor memory
    warpgroup  softmax 0     S of tile 0 -> P of tile 0, with a row in each thread
    warpgroup  softmax 1     the same of tile 1
    warpgroup  correction    O times alpha, before each O += P V; at the end O -> out or acc

Tensor memory has 512 columns of 128 lanes: S of both tiles, which P overwrites, and O of both. The
tensor cores execute products in the order in which they were issued, so S of the next block may be
issued as soon as O += P V has been: nobody waits for P to be free.

      tensor cores   | S0 | S1 |      | O0 S0 |  | O1 S1 |  | O0 S0 |
      softmax 0           |  P0      |           |  P0     |
      softmax 1                |  P1       |              |  P1     |

For each tile, these barriers complete once a block, so that their parity is that of the number of
blocks so far:

    scores     S is complete              multiplying -> softmax
    weights    P is complete              softmax -> multiplying
    added      O += P V is complete       multiplying -> correction
    corrected  O has the new maximum      correction -> multiplying

Softmax passes alpha to correction through shared memory, a ring of one buffer a tile. After a
task's blocks it passes what the result is divided by. Rows and masks are as in `hopper_fwd`.
Zadouri et al., arXiv 2603.05451.
"""

from __future__ import annotations

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

from .blackwell_blocks import PART, ROWS, Place, as_operand, part_ptrs, row_layout
from .hopper_blocks import (
    BufferRing,
    Flags,
    await_full,
    block_descriptor,
    make_barriers,
    make_buffers,
    mask_scores,
)
from .hopper_fwd import CarriedPointers, hopper_launch, produce
from .hopper_tasks import Tasks, TaskTables, first_task, load_task, next_task
from .launch import Launch, Traced
from .online_softmax import LN2, LOG2E, softmax_pivot, tanh
from .step_table import column_range, load_run

TILES = gl.constexpr(2)


class FwdShared(NamedTuple):
    """Shared memory of a program."""

    q: Traced  # a ring with a buffer for each tile
    k: Traced
    v: Traced
    landed: Traced  # copies of V that the producer waits for
    drawn: Traced  # a ring of one: the next task's number
    passed: Traced  # a ring of one for each tile: alpha, or what the result is divided by
    scores: Traced  # a barrier for each tile, as the following
    weights: Traced
    added: Traced
    corrected: Traced


@gluon.jit
def _issue_scores(shared, s, TILE: gl.constexpr, stage):
    """Starts S = Q K' of a tile."""
    k_buffers, q_buffers = shared.k.buffers, shared.q.buffers
    BLOCK_N: gl.constexpr = k_buffers.shape[2]
    HEAD_DIM: gl.constexpr = k_buffers.shape[4]
    q = q_buffers.index(TILE).reshape([ROWS, HEAD_DIM])
    k = k_buffers.index(stage).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
    tcgen05_mma(q, k, s.index(TILE), use_acc=False, mbarriers=[shared.scores.index(TILE)])


@gluon.jit
def _issue_output(shared, s, o, TILE: gl.constexpr, use, pred):
    """Starts O += P V of a tile, once its P is complete and its O corrected, if `pred`."""
    v_buffers = shared.v.buffers
    STAGES: gl.constexpr = v_buffers.shape[0]
    BLOCK_N: gl.constexpr = v_buffers.shape[2]
    HEAD_DIM_V: gl.constexpr = v_buffers.shape[4]
    stage = use % STAGES
    if TILE == 0:
        mbarrier.wait(shared.v.full.index(stage), (use // STAGES) & 1, pred=pred)
    v = v_buffers.index(stage).reshape([BLOCK_N, HEAD_DIM_V])
    mbarrier.wait(shared.weights.index(TILE), use & 1, pred=pred)
    mbarrier.wait(shared.corrected.index(TILE), use & 1, pred=pred)
    p = as_operand(s.index(TILE), 0, BLOCK_N, v_buffers.dtype)
    tcgen05_mma(p, v, o.index(TILE), pred=pred, mbarriers=[shared.added.index(TILE)])
    if TILE == 1:
        tcgen05_commit(shared.v.empty.index(stage), pred=pred)


@gluon.jit
def _multiply(shared, tasks, s, o):
    """Issues all products: S of a block behind O += P V of the block before."""
    k, work = shared.k, tasks.work
    BLOCK_N: gl.constexpr = k.buffers.shape[2]
    use = 0
    parity = 0
    drawn_parity = 0
    task = first_task(tasks.num_tasks)
    while task < tasks.num_tasks:
        _, _, row_start, row_stop, first_run, last_run = load_task(work, task)
        begun = first_run < first_run
        for i in range(first_run, last_run):
            run = load_run(work.runs_ptr, i)
            first, _, _, last = column_range(row_start, row_stop, run, BLOCK_N)
            for _block in range(first, last):
                k_stage = await_full(k, use)
                for tile in gl.static_range(TILES):
                    mbarrier.wait(shared.q.full.index(tile), parity, pred=not begun)
                    _issue_output(shared, s, o, tile, use - 1, begun)
                    _issue_scores(shared, s, tile, k_stage)
                tcgen05_commit(k.empty.index(k_stage))
                begun = True
                use += 1
        for tile in gl.static_range(TILES):
            tcgen05_commit(shared.q.empty.index(tile), pred=begun)
            _issue_output(shared, s, o, tile, use - 1, begun)
        parity ^= begun.to(gl.int32)
        task = next_task(shared.drawn, drawn_parity)
        drawn_parity ^= 1


@gluon.jit
def _pass_on(x, passed, sent, TILE: gl.constexpr):
    """Passes x (ROWS,) to correction, after it has taken what was passed before."""
    mbarrier.wait(passed.empty.index(TILE), (sent & 1) ^ 1)
    passed.buffers.index(TILE).store(x)
    mbarrier.arrive(passed.full.index(TILE), count=1)
    return sent + 1


@gluon.jit
def _take(passed, taken, TILE: gl.constexpr, L: gl.constexpr):
    """Alpha or the divisor, (ROWS,), which softmax has passed on."""
    mbarrier.wait(passed.full.index(TILE), taken & 1)
    x = passed.buffers.index(TILE).load(L)
    mbarrier.arrive(passed.empty.index(TILE), count=1)
    return x


@gluon.jit
def _load_scores(half, rows, start, run, scales, FLAGS: gl.constexpr, MASK: gl.constexpr):
    """Half of S (ROWS, BLOCK_N / 2), with cap and mask; its first column is `start`."""
    s = half.load(rows.type.layout.parent)
    if FLAGS.SOFTCAP:
        s = scales[1] * tanh(s * scales[0])
    if MASK:
        s = mask_scores(s, rows, start, run, FLAGS)
    return s


@gluon.jit
def _fold_blocks(
    state,
    begin,
    end,
    folding,
    last,
    run,
    TILE: gl.constexpr,
    FLAGS: gl.constexpr,
    MASK: gl.constexpr,
):
    """Makes P of the blocks last - 1 - i for i in [begin, end) of S.

    In halves, since moves to and from tensor memory need registers in a row.
    """
    m_i, l_i, use, sent = state
    shared, s_tile, rows, scales = folding
    HALF: gl.constexpr = s_tile.shape[1] // 2
    SOFTCAP: gl.constexpr = FLAGS.SOFTCAP
    MASKED: gl.constexpr = FLAGS.HAS_LO or FLAGS.HAS_HI or FLAGS.RAGGED
    qk_scale = 1.0 if SOFTCAP else scales[0]
    p_tile = as_operand(s_tile, 0, 2 * HALF, shared.v.buffers.dtype)
    for i in range(begin, end):
        start = (last - 1 - i) * (2 * HALF)
        mbarrier.wait(shared.scores.index(TILE), use & 1)
        left = _load_scores(s_tile.slice(0, HALF), rows, start, run, scales, FLAGS, MASK)
        right = _load_scores(s_tile.slice(HALF, HALF), rows, start + HALF, run, scales, FLAGS, MASK)
        m_new = gl.maximum(m_i, gl.maximum(gl.max(left, 1), gl.max(right, 1)) * qk_scale)
        pivot = softmax_pivot(m_new) if MASKED else m_new
        alpha = gl.exp2(m_i - pivot)
        sent = _pass_on(alpha, shared.passed, sent, TILE)
        p = gl.exp2(gl.fma(left, qk_scale, -pivot[:, None]))
        p_tile.slice(0, HALF).store(p.to(p_tile.dtype))
        p_sum = gl.sum(p, 1)
        p = gl.exp2(gl.fma(right, qk_scale, -pivot[:, None]))
        p_tile.slice(HALF, HALF).store(p.to(p_tile.dtype))
        mbarrier.arrive(shared.weights.index(TILE), count=1)
        l_i = gl.fma(l_i, alpha, p_sum + gl.sum(p, 1))
        m_i = m_new
        use += 1
    return m_i, l_i, use, sent


@gluon.jit
def _stat_ptrs(ptr, place, rows):
    """Pointers (ROWS,) to rows of a head, in (batch, heads, rows)."""
    return ptr + (place.batch * place.num_heads + place.head) * place.num_rows + rows


@gluon.jit
def _soften(
    to_fold,
    TILE: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    FLAGS: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """Makes P of S of a tile, and keeps m and l, for all tasks of this program."""
    shared, tasks, s, state, num_rows, scales = to_fold
    work = tasks.work
    MASKED: gl.constexpr = FLAGS.HAS_LO or FLAGS.HAS_HI or FLAGS.RAGGED
    BLOCK_N: gl.constexpr = shared.k.buffers.shape[2]
    L: gl.constexpr = gl.SliceLayout(1, row_layout(BLOCK_N // 2))
    use = 0
    sent = 0
    drawn_parity = 0
    task = first_task(tasks.num_tasks)
    while task < tasks.num_tasks:
        batch, head, row_start, row_stop, first_run, last_run = load_task(work, task)
        row = row_start + TILE * ROWS
        place = Place(batch, head, row, row_stop, num_rows, work.num_heads)
        rows = row + gl.arange(0, ROWS, L)
        if FIRST:
            m_i = gl.full([ROWS], float("-inf"), gl.float32, L)
            l_i = gl.zeros([ROWS], gl.float32, L)
        else:
            m_i = gl.load(_stat_ptrs(state.m_ptr, place, rows), rows < row_stop, float("-inf"))
            l_i = gl.load(_stat_ptrs(state.l_ptr, place, rows), rows < row_stop, 0.0)
        folding = (shared, s.index(TILE), rows, scales)
        for i in range(first_run, last_run):
            run = load_run(work.runs_ptr, i)
            first, full_first, full_last, last = column_range(row_start, row_stop, run, BLOCK_N)
            above = gl.maximum(last - full_last, 0)
            below = gl.maximum(last - full_first, above)
            folded = (m_i, l_i, use, sent)
            if MASKED:
                folded = _fold_blocks(folded, 0, above, folding, last, run, TILE, FLAGS, True)
            folded = _fold_blocks(folded, above, below, folding, last, run, TILE, FLAGS, False)
            if FLAGS.HAS_LO or FLAGS.RAGGED:
                stop = last - first
                folded = _fold_blocks(folded, below, stop, folding, last, run, TILE, FLAGS, True)
            m_i, l_i, use, sent = folded
        if LAST:
            if HAS_SINKS:
                sink = gl.load(state.sinks_ptr + head) * LOG2E
                m_new = gl.maximum(m_i, sink)
                pivot = softmax_pivot(m_new)
                alpha = gl.exp2(m_i - pivot)
                l_i = l_i * alpha + gl.exp2(sink - pivot)
                m_i = m_new
                sent = _pass_on(alpha, shared.passed, sent, TILE)
            l_i = gl.where(l_i == 0.0, 1.0, l_i)
            sent = _pass_on(l_i, shared.passed, sent, TILE)
            lse = (m_i + gl.log2(l_i)) * LN2
            gl.store(_stat_ptrs(state.lse_ptr, place, rows), lse, rows < row_stop)
        else:
            gl.store(_stat_ptrs(state.m_ptr, place, rows), m_i, rows < row_stop)
            gl.store(_stat_ptrs(state.l_ptr, place, rows), l_i, rows < row_stop)
        task = next_task(shared.drawn, drawn_parity)
        drawn_parity ^= 1


@gluon.jit
def _correct(
    to_correct,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """Brings O to the new maximum before each product, and writes it at the end of a task."""
    shared, tasks, o, state, num_rows = to_correct
    work, passed = tasks.work, shared.passed
    BLOCK_N: gl.constexpr = shared.k.buffers.shape[2]
    HEAD_DIM_V: gl.constexpr = shared.v.buffers.shape[4]
    L: gl.constexpr = row_layout(PART)
    R: gl.constexpr = gl.SliceLayout(1, L)
    use = 0
    taken = 0
    drawn_parity = 0
    task = first_task(tasks.num_tasks)
    while task < tasks.num_tasks:
        batch, head, row_start, row_stop, first_run, last_run = load_task(work, task)
        for tile in gl.static_range(TILES):
            row = row_start + tile * ROWS
            place = Place(batch, head, row, row_stop, num_rows, work.num_heads)
            inside = gl.arange(0, ROWS, R) < row_stop - row
            for part in gl.static_range(0, HEAD_DIM_V, PART):
                if FIRST:
                    acc = gl.zeros([ROWS, PART], gl.float32, L)
                else:
                    ptrs = part_ptrs(state.acc_ptr, place, part, HEAD_DIM_V, L)
                    acc = gl.load(ptrs, inside[:, None], 0.0)
                o.index(tile).slice(part, PART).store(acc)
        for i in range(first_run, last_run):
            run = load_run(work.runs_ptr, i)
            first, _, _, last = column_range(row_start, row_stop, run, BLOCK_N)
            for _block in range(first, last):
                for tile in gl.static_range(TILES):
                    alpha = _take(passed, taken, tile, R)
                    mbarrier.wait(shared.added.index(tile), (use & 1) ^ 1)
                    for part in gl.static_range(0, HEAD_DIM_V, PART):
                        o_part = o.index(tile).slice(part, PART)
                        o_part.store(o_part.load(L) * alpha[:, None])
                    mbarrier.arrive(shared.corrected.index(tile), count=1)
                taken += 1
                use += 1
        for tile in gl.static_range(TILES):
            row = row_start + tile * ROWS
            place = Place(batch, head, row, row_stop, num_rows, work.num_heads)
            inside = gl.arange(0, ROWS, R) < row_stop - row
            mbarrier.wait(shared.added.index(tile), (use & 1) ^ 1)
            if LAST:
                if HAS_SINKS:
                    alpha = _take(passed, taken, tile, R)
                divisor = _take(passed, taken + HAS_SINKS, tile, R)
            for part in gl.static_range(0, HEAD_DIM_V, PART):
                acc = o.index(tile).slice(part, PART).load(L)
                if LAST:
                    if HAS_SINKS:
                        acc = acc * alpha[:, None]
                    acc = acc / divisor[:, None]
                    ptrs = part_ptrs(state.out_ptr, place, part, HEAD_DIM_V, L)
                else:
                    ptrs = part_ptrs(state.acc_ptr, place, part, HEAD_DIM_V, L)
                gl.store(ptrs, acc.to(ptrs.dtype.element_ty), inside[:, None])
        if LAST:
            taken += 1 + HAS_SINKS
        task = next_task(shared.drawn, drawn_parity)
        drawn_parity ^= 1


@gluon.jit(do_not_specialize=["num_tasks", "num_programs", "num_blocks", "heads_together"])
def blackwell_fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    acc_ptr,
    m_ptr,
    l_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    counter_ptr,
    blocks_ptr,
    runs_ptr,
    num_tasks,
    num_programs,
    num_blocks,
    heads_together,
    num_rows,
    nheads,
    inner_scale,
    outer_scale,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    HAS_LO: gl.constexpr,
    HAS_HI: gl.constexpr,
    RAGGED: gl.constexpr,
    SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """Does tasks, one after another: folds the keys of a block of q rows of one head."""
    q_buffers = make_buffers(q_desc, TILES)
    k_buffers = make_buffers(k_desc, STAGES)
    v_buffers = make_buffers(v_desc, STAGES)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    drawn = gl.allocate_shared_memory(gl.int32, [1], WORDS)
    passed = gl.allocate_shared_memory(gl.float32, [TILES, ROWS], WORDS)
    shared = FwdShared(
        q=BufferRing(q_buffers, make_barriers(TILES, 1), make_barriers(TILES, 1)),
        k=BufferRing(k_buffers, make_barriers(STAGES, 1), make_barriers(STAGES, 1)),
        v=BufferRing(v_buffers, make_barriers(STAGES, 1), make_barriers(STAGES, 1)),
        landed=make_barriers(1, 1),
        drawn=BufferRing(drawn, make_barriers(1, 1), make_barriers(1, 4)),
        passed=BufferRing(passed, make_barriers(TILES, 1), make_barriers(TILES, 1)),
        scores=make_barriers(TILES, 1),
        weights=make_barriers(TILES, 1),
        added=make_barriers(TILES, 1),
        corrected=make_barriers(TILES, 1),
    )
    HEAD_DIM_V: gl.constexpr = v_desc.block_type.shape[3]
    S: gl.constexpr = TensorMemoryLayout([ROWS, BLOCK_N], col_stride=1)
    O: gl.constexpr = TensorMemoryLayout([ROWS, HEAD_DIM_V], col_stride=1)
    s = allocate_tensor_memory(gl.float32, [TILES, ROWS, BLOCK_N], S)
    o = allocate_tensor_memory(gl.float32, [TILES, ROWS, HEAD_DIM_V], O)
    # Copies and products run outside the warps: this makes the barriers above visible to them.
    fence_async_shared()
    work = TaskTables(blocks_ptr, runs_ptr, num_blocks, heads_together, nheads)
    tasks = Tasks(work, num_tasks, num_programs, counter_ptr)
    state = CarriedPointers(acc_ptr, m_ptr, l_ptr, out_ptr, lse_ptr, sinks_ptr)
    to_fold = (shared, tasks, s, state, num_rows, (inner_scale, outer_scale))
    to_correct = (shared, tasks, o, state, num_rows)
    FLAGS: gl.constexpr = Flags(HAS_LO, HAS_HI, RAGGED, SOFTCAP)
    # The last list gives registers per thread, 512 for the four warpgroups.
    gl.warp_specialize(
        [
            (_soften, (to_fold, 0, FIRST, LAST, FLAGS, HAS_SINKS)),
            (_soften, (to_fold, 1, FIRST, LAST, FLAGS, HAS_SINKS)),
            (_correct, (to_correct, FIRST, LAST, HAS_SINKS)),
            (_multiply, (shared, tasks, s, o)),
            (produce, (shared, tasks, (q_desc, k_desc, v_desc), GROUP, RAGGED)),
        ],
        [4, 4, 1, 1],
        [192, 80, 48, 48],
    )


def blackwell_launch(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Launch:
    """The launch that folds one step: arguments as of `hopper_launch`, BLOCK_M 256."""
    launch = hopper_launch(q, k, v, *args, **options)
    own = {"q_desc": block_descriptor(q, ROWS.value)}
    constants = {x: y for x, y in launch.constants.items() if x not in ("BLOCK_M", "ONE_ABOVE")}
    return replace(
        launch, kernel=blackwell_fwd_kernel, args={**launch.args, **own}, constants=constants
    )
