"""How evenly launches spread their work over an H100, by simulation: figures of a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.tiles import Tile
from ring_attn.kernels.configs import FEW, GLUON, filling, frozen
from ring_attn.kernels.tasks import SMS_PER_COPY
from ring_attn.strategies.ring import ring_steps
from tests.bounds import whole
from tests.kernels.launches import (
    SMS,
    Programs,
    a_program_a_task,
    counter,
    launch,
    makespan,
    static,
    task_times,
)

RANKS, ROWS = 8, 8192
BF16 = torch.bfloat16
FWD = frozen("fwd", "sm_90", 128, BF16)


def steps() -> dict[str, tuple[Tile, ...]]:
    """The steps of a zigzag ring: its own shard, an earlier rank's, a later one's."""
    layout = SequenceLayout.zigzag(RANKS * ROWS, RANKS)
    found = ring_steps(layout, layout, Mask(RANKS * ROWS, RANKS * ROWS, causal=True), 4)
    return {"own": found[0].tiles, "all q": found[1].tiles, "late q": found[5].tiles}


STEPS = steps()


def slowdown(times: list[float], grid: Callable[..., Programs], held: int, share: float) -> float:
    """The time over the time of evenly spread work; copies hold `held` SMs for a share of it."""
    even = sum(times) / SMS
    return makespan(grid(times), held=held, until=share * even) / even


def persistent(times: list[float]) -> Programs:
    """The forward in Gluon: a program that finds no SM starts last and takes remaining tasks."""
    return counter(times, SMS - SMS // SMS_PER_COPY)


def fixed(times: list[float]) -> Programs:
    """As `persistent`, but each program has a fixed share of the tasks."""
    return static(times, SMS - SMS // SMS_PER_COPY)


# SMs that copies hold, and for which share of the time.
BESIDE = {"portable": [(2, 0.3), (16, 0.3), (2, 1.0), (16, 1.0)]}
BESIDE["gluon"] = [(8, 1.0), (16, 0.3), (16, 1.0)]


@pytest.mark.parametrize(
    ("kernel", "step", "grid", "expected"),
    [
        ("portable", "all q", static, (1.27, 1.27, 1.93, 1.93)),
        ("portable", "all q", counter, (1.03, 1.07, 1.03, 1.16)),
        ("portable", "all q", a_program_a_task, (1.03, 1.07, 1.03, 1.16)),
        ("gluon", "own", fixed, (1.13, 1.31, 2.01)),
        ("gluon", "own", persistent, (1.07, 1.09, 1.13)),
        ("gluon", "all q", fixed, (1.1, 1.33, 2.03)),
        ("gluon", "all q", persistent, (1.1, 1.1, 1.16)),
        ("gluon", "late q", fixed, (1.16, 1.33, 2.03)),
        ("gluon", "late q", persistent, (1.16, 1.16, 1.16)),
    ],
)
def test_beside_copies(
    kernel: str, step: str, grid: Callable[..., Programs], expected: tuple[float, ...]
) -> None:
    """Programs that draw their tasks lose no time against evenly spread work.

    The 124 programs in Gluon, evenly over 124 and 116 SMs, would take 1.06 and 1.14. Without
    copies, the 8 SMs that a persistent grid leaves for later copies cost 10 %, so the portable
    kernels have a program a task.
    """
    config = {"portable": FWD, "gluon": GLUON[128][0]}[kernel]
    times = task_times(launch("fwd", STEPS[step], ROWS, (32, 8), config))
    found = [slowdown(times, grid, *beside) for beside in BESIDE[kernel]]
    assert tuple(round(x, 2) for x in found) == expected
    if kernel == "portable":
        assert round(slowdown(times, lambda x: counter(x, SMS - 8), 0, 0.0), 2) == 1.1


@pytest.mark.parametrize(
    ("rows", "expected"), [(2048, (1.21, 1.03)), (8192, (1.06, 1.0)), (16384, (1.03, 1.0))]
)
def test_causal_alone(rows: int, expected: tuple[float, float]) -> None:
    times = task_times(launch("fwd", whole(Mask(rows, rows, True)), rows, (32, 8), FWD))
    grids = (static, a_program_a_task)
    assert tuple(round(slowdown(times, grid, 0, 0.0), 2) for grid in grids) == expected


def backward(
    step: str, heads: tuple[int, int], headdim: int, *, few: bool
) -> tuple[list[float], list[float], float]:
    """Times of the tasks of dk and dv, and of dq; and the time of all their work spread evenly.

    4 products and 3; with `few`, dk and dv take the shorter blocks for few programs. Their
    pairs cost as much: without a mask, compiled by triton 3.7.1 for 128 dims, a warp's loop has 389
    instructions for 64 x 64 with four warps, 386 for 64 x 128 with eight, and the same products
    (wgmma of 64 x 64 and 64 x 128).
    """
    config = frozen("dkdv", "sm_90", headdim, BF16)
    plain = launch("dkdv", STEPS[step], ROWS, heads, config)
    if few:
        config = filling(config, plain.grid[0], SMS, FEW.get(("sm_90", headdim)))
    dkdv = task_times(launch("dkdv", STEPS[step], ROWS, heads, config), 4.0)
    dq_config = frozen("dq", "sm_90", headdim, BF16)
    dq = task_times(launch("dq", STEPS[step], ROWS, heads, dq_config), 3.0)
    return dkdv, dq, (sum(task_times(plain, 4.0)) + sum(dq)) / SMS


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize(
    ("heads", "step", "before", "after", "beside_copies"),
    [
        ((32, 8), "own", 1.0, 1.0, 1.0),
        ((32, 8), "all q", 0.97, 1.0, 0.98),
        ((32, 8), "late q", 0.97, 0.97, 0.98),
        ((8, 1), "own", 0.36, 0.86, 0.92),
        ((8, 1), "all q", 0.36, 0.85, 0.9),
        ((8, 1), "late q", 0.62, 0.97, 0.85),
    ],
)
def test_how_full_a_backward_is(
    headdim: int,
    heads: tuple[int, int],
    step: str,
    before: float,
    after: float,
    beside_copies: float,
) -> None:
    """Even time over simulated time: dk and dv, then dq; all at once; and all on 8 SMs less.

    One kv head of 4096 rows has 64 blocks of 64 rows, fewer than SMs: dk and dv alone take as long
    as 1.18 times all of the step's work spread evenly.
    """
    dkdv, dq, even = backward(step, heads, headdim, few=False)
    apart = makespan(a_program_a_task(dkdv)) + makespan(a_program_a_task(dq))
    assert round(even / apart, 2) == before
    dkdv, dq, even = backward(step, heads, headdim, few=True)

    def both() -> tuple[Programs, Programs]:
        return a_program_a_task(dkdv), a_program_a_task(dq)

    assert round(even / makespan(*both()), 2) == after
    less = makespan(*both(), held=8, until=float("inf"))
    assert round(even * SMS / (SMS - 8) / less, 2) == beside_copies


def test_short_blocks_fold_over_the_same_rows() -> None:
    """Short blocks fold over the same rows, so bits are equal; otherwise long blocks are taken."""
    for (arch, headdim), few in FEW.items():
        config = frozen("dkdv", arch, headdim, BF16)
        assert filling(config, 131, 132, few) == few != config
        assert few.BLOCK_M == config.BLOCK_M and few.num_warps * 2 == config.num_warps
        assert filling(config, 132, 132, few) == config == filling(config, 1, 132, None)
        other = frozen("dkdv_softcap", "sm_90", 128, BF16)
        assert filling(other, 1, 132, FEW["sm_90", 64]) == other
