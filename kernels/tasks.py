"""The order of tasks, and their distribution to programs: a task is one block of rows of one head.

Tasks are numbered in the order of execution. The simple order is by blocks, most work first, with
all heads within each block. Then all heads run at once, and the columns of long sequences do not
fit into the L2 cache together. So heads may come in groups of `heads_together`, one group after the
other:

    block of 4 heads      0 0 0 0 1 1 1 1 2 2 2 2      4 together     0 0 1 1 2 2 0 0 1 1 2 2
    head                  0 1 2 3 0 1 2 3 0 1 2 3      2 together     0 1 0 1 0 1 2 3 2 3 2 3

A program does the task of its own number. So no multiprocessor is idle while tasks are left, even
if other kernels hold some, and copies can start whenever a task ends. The forward in Gluon loads
ahead from task to task: its grid is persistent, and its programs draw their next tasks from a
counter. Neither order changes the bits of a task.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl  # noqa: F401  the interpreter asks that every kernel's module has it
from torch import Tensor

from .configs import Config
from .step_table import StepTable

# Multiprocessors in the interpreter: few, so that programs of a persistent grid do several tasks.
INTERPRETER_SMS = 3


@triton.jit
def block_and_head(task, num_blocks, heads_together):
    """(block, head) of a task."""
    # All groups have one size: a smaller last group would take one register too many.
    row = task // heads_together
    return row % num_blocks, row // num_blocks * heads_together + task % heads_together


class Schedule(NamedTuple):
    """A launch's programs, and the order of its tasks."""

    num_programs: int  # of a persistent grid
    num_blocks: int  # blocks of rows of each head
    num_heads: int  # of all batch entries
    heads_together: int  # of a group; divides num_heads

    @property
    def num_tasks(self) -> int:
        """Number of tasks: the programs of a grid that is not persistent."""
        return self.num_blocks * self.num_heads

    @property
    def args(self) -> dict[str, int]:
        return {"num_blocks": self.num_blocks, "heads_together": self.heads_together}


def step_schedule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: StepTable,
    config: Config,
    *,
    kv_rows: bool = False,
    spare_sms: int = 0,
) -> Schedule:
    """The schedule of q rows of each head against keys, or of kv rows of each kv head.

    A persistent grid leaves `spare_sms` multiprocessors free, at most half of all: copies between
    GPUs that find none free would wait for the grid's end.
    """
    group = q.size(2) // k.size(2)
    heads_of_column, heads_per_kv = (group, 1) if kv_rows else (1, group)
    kv_heads = q.size(0) * k.size(2)
    num_heads = heads_together = kv_heads * heads_per_kv
    if config.l2_bytes:
        bytes_per_column = heads_of_column * (q.size(3) + v.size(3)) * q.element_size()
        fitting = config.l2_bytes // max(1, table.num_cols * bytes_per_column)
        heads_together = heads_per_kv * _largest_divisor(kv_heads, max(1, fitting))
    num_programs = table.num_blocks * num_heads
    if config.programs_per_sm:
        sms = num_sms(q.device)
        sms -= min(spare_sms, sms // 2)
        num_programs = min(num_programs, config.programs_per_sm * sms)
    return Schedule(num_programs, table.num_blocks, num_heads, heads_together)


@cache
def num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, min(n, most) + 1) if n % d == 0)
