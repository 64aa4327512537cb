"""Tasks of the Gluon kernels, and how programs of a persistent grid draw them.

A program first does the task of its own number. Then its producer draws the next free task from a
counter, and passes the number to the consumers in shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .launch import Traced
from .step_table import load_block_row
from .tasks import block_and_head


class TaskTables(NamedTuple):
    """The tables of a launch's tasks."""

    blocks_ptr: Traced
    runs_ptr: Traced
    num_blocks: Traced
    heads_together: Traced
    num_heads: Traced  # of a batch entry


class Tasks(NamedTuple):
    """The source of the programs' tasks."""

    work: Traced
    num_tasks: Traced
    num_programs: Traced
    counter_ptr: Traced


@gluon.jit
def load_task(work, task):
    """(batch, head, row_start, row_stop, first_run, last_run) of a task."""
    block, index = block_and_head(task, work.num_blocks, work.heads_together)
    row_start, row_stop, first_run, last_run = load_block_row(work.blocks_ptr, block)
    batch, head = index // work.num_heads, index % work.num_heads
    return batch, head, row_start, row_stop, first_run, last_run


@gluon.jit
def first_task(num_tasks):
    """The program's number, read at the place of the call.

    `gl.program_id` is read once, before the warps are specialised, and kept in a register, of which
    no partition has one to spare.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %ctaid.x;", "=r,r", [num_tasks], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def draw_task(tasks):
    """The next free task; a number of num_tasks or more means that there is none.

    A launch draws num_tasks times: a program's first task is not drawn, and its last draw is vain.
    """
    drawn = gl.atomic_add(tasks.counter_ptr, 1, sem="relaxed")
    if drawn == tasks.num_tasks - 1:
        gl.store(tasks.counter_ptr, 0)
    return tasks.num_programs + drawn


@gluon.jit
def hand_over(task, drawn, parity):
    """Passes the producer's next task to the consumers, after they have read the previous task."""
    mbarrier.wait(drawn.empty.index(0), parity)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    drawn.buffers.store(gl.full([1], task, gl.int32, L))
    mbarrier.arrive(drawn.full.index(0), count=1)


@gluon.jit
def next_task(drawn, parity):
    """A consumer's next task, received from the producer."""
    mbarrier.wait(drawn.full.index(0), parity)
    task = gl.max(drawn.buffers.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)
    mbarrier.arrive(drawn.empty.index(0), count=1)
    return task
