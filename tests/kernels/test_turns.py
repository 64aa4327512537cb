"""The backward of five products in Triton: interpreted, and its PTX of sm_80 and sm_86, executed.

test_hopper.py tests the tables of turns, test_ptx.py more masks and planted faults.
"""

from __future__ import annotations

import pytest
import torch

from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.kernels import configs, tuned
from ring_attn.kernels.configs import Config
from ring_attn.testing import Expected, Inputs
from tests.bounds import assert_holds, expect, run, whole
from tests.kernels.calls import (
    DTYPES,
    Step,
    assert_halves_are_equal,
    blocks,
    cut_keys,
    grouped,
    in_interpreter,
    inputs_for,
)
from tests.kernels.ptx import launching
from tests.masks import ON_A_GRID, TABLE

pytestmark = in_interpreter

SHAPES = ((32, 16), (16, 32), (64, 64))
CAUSAL = Mask(136, 200, causal=True)


def attend(inputs: Inputs, steps: list[Step], config: Config) -> Expected:
    return run(TritonBackend({"one_pass": config}), inputs, steps)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize(
    "dtype", [DTYPES[0], *(pytest.param(x, marks=pytest.mark.slow) for x in DTYPES[1:])]
)
@pytest.mark.sweep(2)
def test_masks(name: str, dtype: torch.dtype) -> None:
    """Every mask has one of the shapes of blocks, grouped heads, and a head dim that is padded."""
    mask, number = TABLE[name], list(TABLE).index(name)
    inputs = inputs_for(mask, nheads=2, nheads_kv=1 + number % 2, headdim=24, dtype=dtype, batch=2)
    got = attend(inputs, [whole(mask)], blocks(*SHAPES[number % 3]))
    assert_holds(got, *expect(inputs, mask))


def same_gradients(a: Expected, b: Expected) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("dq", "dk", "dv"))


def test_bits_depend_neither_on_steps_nor_on_which_gradients() -> None:
    """Cuts the keys, and computes dq, or dk and dv, alone."""
    inputs, config = grouped(CAUSAL, 32), blocks(32, 64)
    alone = attend(inputs, [whole(CAUSAL)], config)
    assert same_gradients(attend(inputs, cut_keys(CAUSAL, 64, 128), config), alone)
    assert_halves_are_equal(TritonBackend({"one_pass": config}), inputs, CAUSAL, alone)


def test_what_a_document_holds_does_not_reach_its_neighbours() -> None:
    bounds = (0, 40, 113, 150)
    mask = Mask(150, 150, True, (-1, -1), bounds, bounds)
    inputs = grouped(mask, 32)
    alone = attend(inputs, [whole(mask)], blocks(32, 64))
    for x in inputs:
        x[:, 40:113] = float("nan")
    got = attend(inputs, [whole(mask)], blocks(32, 64))
    others = [*range(40), *range(113, 150)]
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(got, name)[:, others], getattr(alone, name)[:, others]), name


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_executed_in_any_order(arch: str) -> None:
    """Programs and warps run in a drawn order: the same bits, whole and in steps."""
    mask = Mask(193, 193, True, (150, -1), (0, 90, 193), (0, 90, 193))
    inputs = grouped(mask, 128, dtype=torch.bfloat16)
    config, found = configs.ONE_PASS[arch][128], []
    for steps, seed in (([whole(mask)], None), (cut_keys(mask, 64, 128), 2)):
        with launching.executing(arch, seed):
            found.append(attend(inputs, steps, config))
    assert_holds(found[0], *expect(inputs, mask))
    assert all(same_gradients(found[0], other) for other in found[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["documents of other lengths", "bands", "spans", "sink window"])
def test_executed_masks(name: str) -> None:
    """Blocks of kv rows have several runs, of the same rows or of some of them."""
    mask = ON_A_GRID[name]
    inputs = grouped(mask, 128)
    with launching.executing("sm_80", 3):
        got = attend(inputs, [whole(mask)], configs.ONE_PASS["sm_80"][128])
    assert_holds(got, *expect(inputs, mask))


@pytest.mark.parametrize(
    ("arch", "taken"), [("sm_80", True), ("sm_86", True), ("sm_90", True), ("gfx942", False)]
)
def test_which_calls_take_it(arch: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(1, 4, 2, 128, dtype=torch.float16)
    assert not tuned.takes_one_pass(x, 128)
    monkeypatch.setattr(configs, "architecture", lambda device: arch)
    assert tuned.takes_one_pass(x, 128) is taken
    for other, headdim_v, softcap in ((x, 64, 0.0), (x, 128, 5.0), (x.float(), 128, 0.0)):
        assert not tuned.takes_one_pass(other, headdim_v, softcap)
    assert tuned.takes_one_pass(x[..., :64], 64) is (arch == "sm_90")
