"""The backward in Gluon of sm_100: its PTX, executed in random orders of warpgroups and CTAs.

Results are compared with float64. test_hopper.py has the turns' tables, test_ptx.py plants faults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ring_attn.backends.base import BackwardInputs
from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.core.spec import Scores
from ring_attn.kernels import configs
from ring_attn.kernels.configs import Config
from ring_attn.testing import Expected, Inputs
from tests.bounds import assert_holds, expect, run, whole
from tests.kernels.calls import (
    Step,
    assert_halves_are_equal,
    cut_keys,
    cut_rows,
    grouped,
    in_interpreter,
    needs_sm_100,
    same,
)
from tests.kernels.ptx import launching
from tests.kernels.test_blackwell import DTYPES, SMALL, unfinished_products
from tests.masks import ON_A_GRID

pytestmark = [in_interpreter, needs_sm_100]
TWO_STAGES = {dim: replace(one, num_stages=2) for dim, one in configs.ONE_PASS["sm_100"].items()}


def attend(
    inputs: Inputs,
    steps: Sequence[Step],
    config: Config | None = None,
    *,
    forward: Config = SMALL,
    seed: int | None = 0,
    **how: Any,
) -> Expected:
    """Forward and backward, each step in launches of its own, by their PTX."""
    named = {"gluon": forward, "one_pass": config or TWO_STAGES[inputs.q.size(3)]}
    with launching.executing("sm_100", seed) as executed:
        got = run(TritonBackend(named), inputs, steps, **how)
    names = [x.kernel.fn.__name__ for x in executed]
    assert names.count("blackwell_bwd_kernel") == len(steps)
    assert set(names) == {"blackwell_fwd_kernel", "blackwell_bwd_kernel", "delta_kernel"}
    return got


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_GRID)
def test_masks(name: str) -> None:
    mask, number = ON_A_GRID[name], list(ON_A_GRID).index(name)
    inputs = grouped(mask, (64, 128)[number % 2], dtype=DTYPES[number // 2 % 2])
    assert_holds(attend(inputs, [whole(mask)], seed=number), *expect(inputs, mask))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 2, 1), (3, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("headdim", [64, 128])
def test_heads_and_stages(heads: tuple[int, int, int], headdim: int) -> None:
    mask = Mask(300, 450, causal=True)
    sizes = dict(zip(("nheads", "nheads_kv", "batch"), heads, strict=True))
    inputs, config = grouped(mask, headdim, **sizes), configs.ONE_PASS["sm_100"][headdim]
    assert_holds(attend(inputs, [whole(mask)], config), *expect(inputs, mask))


def test_products_are_issued_while_others_run() -> None:
    """The warp that multiplies waits for all that it has issued before dP' only.

    dP' has the columns of the dQ before, which must have been read.
    """
    mask = Mask(768, 128)
    inputs = grouped(mask, 64, nheads=1)
    stats = torch.zeros(1, 1, 768), torch.zeros(1, 1, 768)
    grads = [torch.zeros(x.shape) for x in inputs[:3]]
    backend = TritonBackend({"one_pass": TWO_STAGES[64]})
    with unfinished_products() as unfinished, launching.executing("sm_100", 0):
        backend.backward(BackwardInputs(*inputs, *stats), whole(mask), grads, scores=Scores(0.1))
    assert len(unfinished) == 31 and unfinished.count(1) == 6


@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128])
def test_bits_do_not_depend_on_time_steps_grids_or_halves(headdim: int) -> None:
    """Tries several orders of CTAs and warpgroups, cut keys and rows, dq or dk and dv alone."""
    mask = Mask(264, 200, causal=True)
    inputs = grouped(mask, headdim, nheads=1)
    alone = attend(inputs, [whole(mask)], seed=None)
    config = configs.ONE_PASS["sm_100"][headdim]
    assert same(attend(inputs, [whole(mask)], config, seed=1), alone)
    assert same(attend(inputs, cut_keys(mask, 128), seed=2), alone)
    other_grid = replace(SMALL, programs_per_sm=0, l2_bytes=1)
    assert same(attend(inputs, [whole(mask)], forward=other_grid, seed=3), alone)
    three_stages = replace(SMALL, num_stages=3)
    assert same(attend(inputs, cut_keys(mask, 128), forward=three_stages, seed=4), alone)
    assert same(attend(inputs, cut_rows(mask, 128, 256), seed=5), alone)
    with launching.executing("sm_100", 5):
        assert_halves_are_equal(TritonBackend({"one_pass": config}), inputs, mask, alone)


@pytest.mark.slow
@pytest.mark.parametrize(("headdim", "bad"), [(64, float("nan")), (128, float("inf"))])
def test_what_a_document_holds_does_not_reach_its_neighbours(headdim: int, bad: float) -> None:
    bounds = (0, 40, 113, 150)
    mask = Mask(150, 150, True, (-1, -1), bounds, bounds)
    inputs = grouped(mask, headdim)
    alone = attend(inputs, [whole(mask)])
    minus_lse, delta = -alone.lse / math.log(2.0), (alone.out * inputs.dout).float().sum(-1)
    stats = minus_lse, delta.transpose(1, 2).contiguous()
    for x in (*inputs, *(x.transpose(1, 2) for x in stats)):
        x[:, 40:113] = bad
    others = [*range(40), *range(113, 150)]
    found = []
    for seed, value in enumerate((bad, 0.0)):
        grads = [torch.zeros(x.shape) for x in inputs[:3]]
        for x in inputs:
            x[:, 40:113] = value
        backend = TritonBackend({"one_pass": TWO_STAGES[headdim]})
        with launching.executing("sm_100", seed):
            backend.backward(
                BackwardInputs(*inputs, *stats), whole(mask), grads, scores=Scores(0.1)
            )
        found.append([x[:, others] for x in grads])
    assert all(torch.equal(x, y) and bool(x.any()) for x, y in zip(*found, strict=True))
