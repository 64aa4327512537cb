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
    """The time over that of work spread evenly, beside copies on `held` SMs for a share of it."""
    even = sum(times) / SMS
    return makespan(grid(times), held=held, until=share * even) / even


@pytest.mark.parametrize(
    ("share", "grid", "expected"),
    [
        (0.3, static, (1.27, 1.27)),
        (0.3, counter, (1.03, 1.07)),
        (0.3, a_program_a_task, (1.03, 1.07)),
        (1.0, static, (1.93, 1.93)),
        (1.0, counter, (1.03, 1.16)),
        (1.0, a_program_a_task, (1.03, 1.16)),
    ],
)
def test_beside_copies(
    share: float, grid: Callable[..., Programs], expected: tuple[float, float]
) -> None:
    """Copies on 2 and on 16 SMs: tasks that are drawn lose nothing against even work.

    A margin of 8 SMs, which a persistent grid leaves for copies that begin later, costs it 10 %
    where there are none: so the portable kernels have a program a task.
    """
    times = task_times(launch("fwd", STEPS["all q"], ROWS, (32, 8), FWD))
    found = tuple(round(slowdown(times, grid, held, share), 2) for held in (2, 16))
    assert found == expected
    assert round(slowdown(times, lambda x: counter(x, SMS - 8), 0, 0.0), 2) == 1.1


@pytest.mark.parametrize(
    ("step", "grid", "expected"),
    [
        ("own", static, (1.13, 1.31, 2.01)),
        ("own", counter, (1.07, 1.09, 1.13)),
        ("all q", static, (1.1, 1.33, 2.03)),
        ("all q", counter, (1.1, 1.1, 1.16)),
        ("late q", static, (1.16, 1.33, 2.03)),
        ("late q", counter, (1.16, 1.16, 1.16)),
    ],
)
def test_a_persistent_grid_beside_copies(
    step: str, grid: Callable[..., Programs], expected: tuple[float, ...]
) -> None:
    """The forward in Gluon, of 124 programs: copies on 8 SMs, 16 for a third of the time, 16.

    A program that finds no SM comes last: of a static grid with a share of the tasks, else with
    what is left. Spread evenly over 124 and 116 SMs the work takes 1.06 and 1.14.
    """
    times = task_times(launch("fwd", STEPS[step], ROWS, (32, 8), GLUON[128][0]))
    programs = SMS - SMS // SMS_PER_COPY
    held = ((8, 1.0), (16, 0.3), (16, 1.0))
    found = [slowdown(times, lambda x: grid(x, programs), *beside) for beside in held]
    assert tuple(round(x, 2) for x in found) == expected


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
    """The times of tasks of dk and dv, and of dq, and that of their work spread evenly.

    4 products and 3; with `few` in the shorter blocks that are taken where programs are few. Their
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
def test_programs_of_a_step(headdim: int) -> None:
    for heads, dkdv, dq in (((32, 8), (256, 512), (1024, 2048)), ((8, 1), (32, 64), (256, 512))):
        found = [backward(step, heads, headdim, few=False)[:2] for step in STEPS]
        assert {len(times) for times, _ in found} == set(dkdv)
        assert {len(times) for _, times in found} == set(dq)


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
    """Even time over simulated time: dk and dv, then dq; dq beside dk and dv; and with 8 SMs less.

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
    """So a row's sums, and their bits, are those of long blocks; where they are not, long ones."""
    for (arch, headdim), few in FEW.items():
        config = frozen("dkdv", arch, headdim, BF16)
        assert filling(config, 131, 132, few) == few != config
        assert few.BLOCK_M == config.BLOCK_M and few.num_warps * 2 == config.num_warps
        assert filling(config, 132, 132, few) == config == filling(config, 1, 132, None)
        other = frozen("dkdv_softcap", "sm_90", 128, BF16)
        assert filling(other, 1, 132, FEW["sm_90", 64]) == other
