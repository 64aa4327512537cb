"""Simulates launches without a GPU: programs are placed on SMs in order, as SMs become free.

A program has an SM to itself, as the registers of H100 configs require, and takes its
pairs of blocks, by the launch's step table, times a cost. So the simulation shows how evenly
work is spread: memory, caches and the start of a program are not in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from ring_attn.kernels.configs import Config
from ring_attn.kernels.flash_bwd import dkdv_launch, dq_launch
from ring_attn.kernels.flash_fwd import Carried, forward_launch
from ring_attn.kernels.launch import Launch
from tests.kernels.calls import Step, kv_table, q_table

SMS = 132  # of an H100

# For each program, the times of its tasks.
Programs = Sequence[Iterator[float]]


def launch(kernel: str, tiles: Step, rows: int, heads: tuple[int, int], config: Config) -> Launch:
    """The launch of "fwd", "dq" or "dkdv" over shards of `rows` rows, of head dim 128."""

    def rows_of(heads: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(1, rows, heads, 128, dtype=dtype, device="meta")

    q, k = (rows_of(num) for num in heads)
    if kernel == "fwd":
        table, options = q_table(tiles, config, rows), {"first": True, "last": True}
        return forward_launch(q, k, k, Carried(), table, config, softmax_scale=1.0, **options)
    stats = torch.empty(1, heads[0], rows, device="meta")
    given, sums = (q, k, k, q, stats, stats), rows_of(heads[1], torch.float32)
    if kernel == "dq":
        return dq_launch(*given, sums, q_table(tiles, config), config, softmax_scale=1.0)
    return dkdv_launch(*given, sums, sums, kv_table(tiles, config), config, softmax_scale=1.0)


def task_times(launch: Launch, cost: float = 1.0) -> list[float]:
    """The times of a launch's tasks in the order of their numbers: pairs of rows x cost."""
    args, constants = launch.args, launch.constants
    rows, cols, group = constants["BLOCK_M"], constants["BLOCK_N"], 1
    if "dk_ptr" in args:
        rows, cols, group = cols, rows, constants["GROUP"]
    runs, blocks = args["runs_ptr"].tolist(), args["blocks_ptr"].tolist()
    pairs = [sum(_visits(*block[:2], run, cols) for run in runs[slice(*block[2:])])
             for block in blocks]  # fmt: skip
    together = args["heads_together"]
    groups = launch.grid[0] // (len(blocks) * together)
    unit = cost * rows * cols * group
    return [unit * num for _ in range(groups) for num in pairs for _ in range(together)]


def _visits(row_start: int, row_stop: int, run: Sequence[int], cols: int) -> int:
    """Number of a run's blocks of columns that hold a visible pair."""
    start, stop, lo, hi = run
    return max(0, -(-min(stop, row_stop + hi) // cols) - max(start, row_start + lo) // cols)


def a_program_a_task(times: Sequence[float]) -> Programs:
    return [iter((time,)) for time in times]


def static(times: Sequence[float], num_programs: int = SMS) -> Programs:
    """A persistent grid: each program does every num_programs-th task."""
    return [iter(times[i::num_programs]) for i in range(num_programs)]


def counter(times: Sequence[float], num_programs: int = SMS) -> Programs:
    """A persistent grid: each program takes the next task when it has done one."""
    tasks = iter(times)
    return [tasks] * num_programs


def makespan(*launches: Programs, held: int = 0, until: float = 0.0) -> float:
    """When the last program ends.

    Args:
        launches: run concurrently, on streams of their own, in this order.
        held: number of SMs that copies hold from the start.
        until: the time when copies free these SMs.
    """
    waiting = chain.from_iterable(launches)
    # (time when the SM is free, SM, its program)
    sms = [(until if sm < held else 0.0, sm, iter(())) for sm in range(SMS)]
    heapq.heapify(sms)
    end = 0.0
    while sms:
        now, sm, tasks = heapq.heappop(sms)
        time = next(tasks, None)
        while time is None and (following := next(waiting, None)) is not None:
            tasks = following
            time = next(tasks, None)
        if time is not None:
            end = max(end, now + time)
            heapq.heappush(sms, (now + time, sm, tasks))
    return end
