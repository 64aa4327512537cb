"""Forward for sm_90 in Gluon: some warps load while others compute, with explicit waits.

Table, state and folding order are `flash_fwd`'s, where triton's own pipeline waits for each
product before the softmax. A program is one warp that loads and BLOCK_M / 64 warpgroups that
compute, with 64 rows of q each:

                             shared memory
                 full   .---------------------.   full
      producer -------> | Q0  Q1              | ------->  consumer 0: 64 rows of q; S, P and acc
      (1 warp:          | K  K   num_stages   |                | turn ^
       copies) <------- | V  V   of each      | <-------       v turn |
                 empty  '---------------------'   empty   consumer 1: 64 rows of q; S, P and acc

Buffers are handed over by mbarriers. A `full` barrier completes when the bytes of a copy have
landed, an `empty` barrier when every consumer has finished the products that read the buffer. So
each barrier completes once for every use of its buffer. For the n-th use, from 0, a consumer waits
on `full` with the parity of n; the producer waits on `empty` with the parity of n - 1, which a new
barrier counts as complete. The uses of a ring of buffers continue from run to run and from task to
task.

A consumer has two products under way, as in FlashAttention-3: the softmax of a block runs while the
tensor cores multiply the weights of the previous block.

      tensor cores   | Q K(i+1)' |    P(i) V(i)      | Q K(i+2)' |  P(i+1) V(i+1)    |
      other units                | softmax of S(i+1) |           | softmax of S(i+2) |

The consumers take turns to issue their two products, so that the softmax of one consumer overlaps
the products of another. Gluon has no named barriers: a turn is an mbarrier, too.

A program does one task after another (`tasks`): first the task of its own number, then the next
free one. The producer draws its number from a counter and passes it to the consumers in shared
memory; the last draw of a launch resets the counter. Consumers release Q before the last product
with V, and the producer copies the first K of a task before its Q: so it loads for the next task
while the consumers finish this one. Consumers read a carried state before they wait for Q.

Rows beyond the tensor are copied as zeros. Rows outside a run but within the tensor belong to
another document and may be NaN; their weights are 0, but 0 * NaN is NaN. So if a run begins or ends
within a block, the producer itself waits for V and zeroes the other rows.

Each block's arithmetic is `online_softmax_update`'s. Shah et al., arXiv 2407.08608.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from .configs import Config
from .flash_fwd import Carried, KernelArgs, pointers, scales
from .hopper_blocks import (
    ROWS,
    BlockRows,
    BufferRing,
    Flags,
    as_operand,
    await_empty,
    await_full,
    block_descriptor,
    fill_rows,
    issue_output,
    issue_scores,
    load_state,
    make_barriers,
    make_buffers,
    opaque_zero,
    rescale,
    softmax,
    start_copy,
    store_place,
    store_place_stats,
)
from .hopper_tasks import Tasks, TaskTables, draw_task, first_task, hand_over, load_task, next_task
from .launch import Launch, Traced
from .online_softmax import LOG2E, online_softmax_add_sink, online_softmax_finalize
from .step_table import StepTable, column_range, load_run
from .tasks import step_schedule


class FwdShared(NamedTuple):
    """Shared memory of a program."""

    q: Traced  # a ring with a buffer for each consumer
    k: Traced
    v: Traced
    landed: Traced  # copies of V that the producer waits for
    turns: Traced  # a barrier for each consumer
    drawn: Traced  # a ring of one: the next task's number


class CarriedPointers(NamedTuple):
    """Pointers to a `Carried`."""

    acc_ptr: Traced
    m_ptr: Traced
    l_ptr: Traced
    out_ptr: Traced
    lse_ptr: Traced
    sinks_ptr: Traced


class Folding(NamedTuple):
    """Values that a consumer uses in all blocks of a task."""

    q: Traced
    shared: Traced
    rows: Traced
    scales: Traced


@gluon.jit
def _copy(desc, coord, buffer, full):
    """Starts the copy of a block; its end completes `full`."""
    mbarrier.expect(full, desc.block_type.nbytes)
    start_copy(desc, coord, full, buffer)


@gluon.jit
def produce(shared, tasks, descs, GROUP: gl.constexpr, RAGGED: gl.constexpr):
    """Loads the consumers' blocks, in the order in which they are used."""
    q_desc, k_desc, v_desc = descs
    CONSUMERS: gl.constexpr = shared.q.buffers.shape[0]
    BLOCK_N: gl.constexpr = shared.v.buffers.shape[2]
    use = 0
    uses_landed = 0
    parity = 0
    drawn_parity = 0
    task = first_task(tasks.num_tasks)
    while task < tasks.num_tasks:
        batch, head, row_start, row_stop, first_run, last_run = load_task(tasks.work, task)
        for i in range(first_run, last_run):
            run = load_run(tasks.work.runs_ptr, i)
            first, _, _, last = column_range(row_start, row_stop, run, BLOCK_N)
            for j in range(last - first):
                start = (last - 1 - j) * BLOCK_N
                coord = [batch, start, head // GROUP, 0]
                stage = await_empty(shared.k, use)
                _copy(k_desc, coord, shared.k.buffers.index(stage), shared.k.full.index(stage))
                if (i == first_run) & (j == 0):
                    # After K, whose buffer is free earlier.
                    for index in gl.static_range(CONSUMERS):
                        mbarrier.wait(shared.q.empty.index(index), parity ^ 1)
                        q_coord = [batch, row_start + index * shared.q.buffers.shape[2], head, 0]
                        q = shared.q.buffers.index(index)
                        _copy(q_desc, q_coord, q, shared.q.full.index(index))
                    parity ^= 1
                stage = await_empty(shared.v, use)
                uses_landed = fill_rows(
                    v_desc,
                    coord,
                    shared.v.buffers.index(stage),
                    shared.v.full.index(stage),
                    shared.landed.index(0),
                    start,
                    run,
                    uses_landed,
                    RAGGED,
                )
                use += 1
        drawn_parity ^= 1
        task = draw_task(tasks)
        hand_over(task, shared.drawn, drawn_parity)


@gluon.jit
def _fold_blocks(
    state,
    begin,
    end,
    folding,
    last,
    run,
    INDEX: gl.constexpr,
    FLAGS: gl.constexpr,
    MASK: gl.constexpr,
):
    """Folds the blocks last - 1 - i for i in [begin, end), with V one product later.

    At the start acc (ROWS, HEAD_DIM_V) lacks the product of p (ROWS, BLOCK_N), the weights of the
    previous block, with its V, which is in buffer `v_stage`; at the end, the last block's.
    """
    acc, p, m_i, l_i, v_stage, use, turn = state
    q, shared, rows, scales = folding
    k, v, turns = shared.k, shared.v, shared.turns
    CONSUMERS: gl.constexpr = turns.shape[0]
    BLOCK_N: gl.constexpr = k.buffers.shape[2]
    for i in range(begin, end):
        k_stage = await_full(k, use)
        mbarrier.wait(turns.index(INDEX), (turn & 1) ^ (INDEX == 0))
        s = issue_scores(q, k.buffers, k_stage, rows)
        acc = issue_output(p, v.buffers, v_stage, acc)
        mbarrier.arrive(turns.index((INDEX + 1) % CONSUMERS), count=1)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k.empty.index(k_stage), count=1)
        start = (last - 1 - i) * BLOCK_N
        p_next, alpha, m_i, l_i = softmax(s, m_i, l_i, rows, start, run, scales, FLAGS, MASK)
        # The loop inside this wait also keeps ptxas from moving the softmax below the next wait;
        # nothing else does.
        next_stage = await_full(v, use)
        acc, l_i = warpgroup_mma_wait(0, deps=[acc, l_i])
        mbarrier.arrive(v.empty.index(v_stage), count=1)
        acc = rescale(acc, alpha)
        p = as_operand(p_next, v.buffers, acc)
        v_stage = next_stage
        use += 1
        turn += 1
    return acc, p, m_i, l_i, v_stage, use, turn


@gluon.jit
def _fold_run(
    acc,
    m_i,
    l_i,
    use,
    turn,
    span,
    folding,
    run,
    last_run,
    INDEX: gl.constexpr,
    FLAGS: gl.constexpr,
):
    """Folds the blocks [first, last) of a run, at least one, from the last down.

    Masked blocks have separate loops: a branch between a product's start and its end would make
    ptxas wait there. If no run has more than one masked block above, there is no loop of them: p as
    an operand passes from loop to loop by 64 moves a block. After the scores of a task's last run
    (`last_run`) Q is released.
    """
    q, shared, rows, scales = folding
    k, v = shared.k, shared.v
    MASKED: gl.constexpr = FLAGS.HAS_LO or FLAGS.HAS_HI or FLAGS.RAGGED
    BLOCK_N: gl.constexpr = k.buffers.shape[2]
    first, full_first, full_last, last = span

    k_stage = await_full(k, use)
    s = issue_scores(q, k.buffers, k_stage, rows)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k.empty.index(k_stage), count=1)
    start = (last - 1) * BLOCK_N
    p, alpha, m_i, l_i = softmax(s, m_i, l_i, rows, start, run, scales, FLAGS, MASKED)
    v_stage = await_full(v, use)
    acc = rescale(acc, alpha)
    p = as_operand(p, v.buffers, acc)
    use += 1

    # Blocks from the last one down: [1, above) and [below, last - first) are masked.
    above = gl.maximum(last - full_last, 1)
    below = gl.maximum(last - full_first, above)
    state = (acc, p, m_i, l_i, v_stage, use, turn)
    if MASKED and not FLAGS.ONE_ABOVE:
        state = _fold_blocks(state, 1, above, folding, last, run, INDEX, FLAGS, True)
    state = _fold_blocks(state, above, below, folding, last, run, INDEX, FLAGS, False)
    if FLAGS.HAS_LO or FLAGS.RAGGED:
        state = _fold_blocks(state, below, last - first, folding, last, run, INDEX, FLAGS, True)
    acc, p, m_i, l_i, v_stage, use, turn = state

    mbarrier.arrive(shared.q.empty.index(INDEX), count=1, pred=last_run)
    acc = issue_output(p, v.buffers, v_stage, acc)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v.empty.index(v_stage), count=1)
    return acc, m_i, l_i, use, turn


@gluon.jit
def _consume(
    to_fold,
    INDEX: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    FLAGS: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """Computes the INDEX-th 64 rows of every task of this program."""
    shared, tasks, state, num_rows, scales = to_fold
    work = tasks.work
    BLOCK_N: gl.constexpr = shared.k.buffers.shape[2]
    HEAD_DIM: gl.constexpr = shared.k.buffers.shape[4]
    HEAD_DIM_V: gl.constexpr = shared.v.buffers.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V, 16])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    q = shared.q.buffers.index(INDEX).reshape([ROWS, HEAD_DIM])
    use = 0
    turn = 0
    parity = 0
    drawn_parity = 0
    task = first_task(tasks.num_tasks)
    while task < tasks.num_tasks:
        batch, head, row_start, row_stop, first_run, last_run = load_task(work, task)
        row = row_start + INDEX * ROWS
        if FIRST:
            acc = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, O_LAYOUT)
            m_i = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
            l_i = gl.zeros([ROWS], gl.float32, S_ROWS)
        else:
            place = BlockRows(batch, head, row, row_stop, num_rows, work.num_heads)
            acc, m_i, l_i = load_state(state, place, HEAD_DIM_V, S_LAYOUT, O_LAYOUT)

        if first_run < last_run:
            mbarrier.wait(shared.q.full.index(INDEX), parity)
            parity ^= 1
        rows = row + gl.arange(0, ROWS, S_ROWS)
        folding = Folding(q, shared, rows, scales)
        for i in range(first_run, last_run):
            run = load_run(work.runs_ptr, i)
            span = column_range(row_start, row_stop, run, BLOCK_N)
            if span[3] > span[0]:
                acc, m_i, l_i, use, turn = _fold_run(
                    acc, m_i, l_i, use, turn, span, folding, run, i == last_run - 1, INDEX, FLAGS
                )

        # Computed again: pointers kept during the loops would take registers from the products.
        batch, head, row_start, row_stop, _, _ = load_task(work, task + opaque_zero(task))
        row = row_start + INDEX * ROWS
        target = BlockRows(batch, head, row, row_stop, num_rows, work.num_heads)
        if LAST:
            m_o = gl.convert_layout(m_i, O_ROWS)
            l_o = gl.convert_layout(l_i, O_ROWS)
            if HAS_SINKS:
                sink = gl.load(state.sinks_ptr + head) * LOG2E
                acc, m_o, l_o = online_softmax_add_sink(acc, m_o, l_o, sink)
            acc, lse = online_softmax_finalize(acc, m_o, l_o)
            store_place(state.out_ptr, acc, target)
            store_place_stats(state.lse_ptr, lse, target)
        else:
            store_place(state.acc_ptr, acc, target)
            store_place_stats(state.m_ptr, m_i, target)
            store_place_stats(state.l_ptr, l_i, target)
        task = next_task(shared.drawn, drawn_parity)
        drawn_parity ^= 1


@gluon.jit(do_not_specialize=["num_tasks", "num_programs", "num_blocks", "heads_together"])
def hopper_fwd_kernel(
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
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    HAS_LO: gl.constexpr,
    HAS_HI: gl.constexpr,
    RAGGED: gl.constexpr,
    ONE_ABOVE: gl.constexpr,
    SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """Does tasks, one after another: folds the keys of a block of q rows of one head."""
    CONSUMERS: gl.constexpr = BLOCK_M // ROWS
    q_buffers = make_buffers(q_desc, CONSUMERS)
    k_buffers = make_buffers(k_desc, STAGES)
    v_buffers = make_buffers(v_desc, STAGES)
    drawn = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    shared = FwdShared(
        q=BufferRing(q_buffers, make_barriers(CONSUMERS, 1), make_barriers(CONSUMERS, 1)),
        k=BufferRing(k_buffers, make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS)),
        v=BufferRing(v_buffers, make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS)),
        landed=make_barriers(1, 1),
        turns=make_barriers(CONSUMERS, 1),
        drawn=BufferRing(drawn, make_barriers(1, 1), make_barriers(1, CONSUMERS)),
    )
    # Copies run outside the warps: this fence makes the barriers above visible to them.
    fence_async_shared()
    work = TaskTables(blocks_ptr, runs_ptr, num_blocks, heads_together, nheads)
    tasks = Tasks(work, num_tasks, num_programs, counter_ptr)
    state = CarriedPointers(acc_ptr, m_ptr, l_ptr, out_ptr, lse_ptr, sinks_ptr)
    descs = (q_desc, k_desc, v_desc)
    to_fold = (shared, tasks, state, num_rows, (inner_scale, outer_scale))
    FLAGS: gl.constexpr = Flags(HAS_LO, HAS_HI, RAGGED, SOFTCAP, ONE_ABOVE=ONE_ABOVE)
    # The last list gives registers per thread: the producer leaves most to the consumers.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (to_fold, 0, FIRST, LAST, FLAGS, HAS_SINKS)),
                (_consume, (to_fold, 1, FIRST, LAST, FLAGS, HAS_SINKS)),
                (produce, (shared, tasks, descs, GROUP, RAGGED)),
            ],
            [4, 1],
            [232, 40] if RAGGED else [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (to_fold, 0, FIRST, LAST, FLAGS, HAS_SINKS)),
                (_consume, (to_fold, 1, FIRST, LAST, FLAGS, HAS_SINKS)),
                (_consume, (to_fold, 2, FIRST, LAST, FLAGS, HAS_SINKS)),
                (produce, (shared, tasks, descs, GROUP, RAGGED)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


def copyable(x: Tensor) -> Tensor:
    """x if bulk copies support its address and strides, else a contiguous copy."""
    unit = 16 // x.element_size()
    *strides, last = x.stride()
    fits = last == 1 and x.data_ptr() % 16 == 0 and all(n > 0 and n % unit == 0 for n in strides)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def hopper_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Carried,
    table: StepTable,
    config: Config,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    first: bool,
    last: bool,
    spare_sms: int = 0,
) -> Launch:
    """Return the launch that folds one step, as `forward_launch`, if `takes_gluon` allows it.

    Args:
        q: q, k, v as from `copyable`, k and v with rows.
        state: also with the counter.
        config: BLOCK_M 128 or 192, 4 warps (of a consumer), and at least 2 stages.
        spare_sms: multiprocessors to leave to copies between GPUs and to kernels of others.
    """
    inputs = KernelArgs(q, k, v)
    schedule = step_schedule(q, k, v, table, config, spare_sms=spare_sms)
    return Launch(
        hopper_fwd_kernel,
        (schedule.num_programs,),
        {
            "q_desc": block_descriptor(q, ROWS.value),
            "k_desc": block_descriptor(k, config.BLOCK_N),
            "v_desc": block_descriptor(v, config.BLOCK_N),
            **pointers(acc=state.acc, m=state.m, l=state.l, out=state.out, lse=state.lse),
            **pointers(sinks=state.sinks, counter=state.counter),
            **pointers(blocks=table.blocks, runs=table.runs),
            "num_tasks": schedule.num_tasks,
            "num_programs": schedule.num_programs,
            **schedule.args,
            **inputs.sizes(kv_rows=False),
            **scales(softmax_scale, softcap),
        },
        {
            "GROUP": inputs.group,
            "BLOCK_M": config.BLOCK_M,
            "BLOCK_N": config.BLOCK_N,
            "STAGES": config.num_stages,
            "FIRST": first,
            "LAST": last,
            **table.constants,
            "ONE_ABOVE": table.one_above,
            "SOFTCAP": softcap != 0.0,
            "HAS_SINKS": state.sinks is not None,
        },
        config.options,
    )
