"""Triton's concurrency sanitizer, executed: of a small kernel in Gluon, and of our forward.

The sanitizer is compiled into a kernel, and asserts before each access to shared memory what
arrivals and waits have made known. It knows no proxy fences; the executor's clocks do.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ring_attn.kernels.launch import Launch
from ring_attn.kernels.triton_release import RELEASE
from tests.kernels import ring_toy
from tests.kernels.calls import in_interpreter
from tests.kernels.ptx import launching
from tests.kernels.ptx.faults import AssertFailed, Deadlock, Fault, NotFenced, NotWaited
from tests.kernels.test_ptx import target

pytestmark = in_interpreter

COUNT, ROWS, COLS = 5, 16, 64


def sum_blocks(left_out: str, instrument: str = "") -> tuple[Fault | None, Tensor, Tensor]:
    """Executes the small kernel; returns its fault, and the sum with what it should be."""
    x = torch.randn(COUNT * ROWS, COLS, generator=torch.Generator().manual_seed(0)).half()
    out = torch.full((ROWS, COLS), torch.nan)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    desc = TensorDescriptor(x, list(x.shape), list(x.stride()), [ROWS, COLS], layout)
    args = {"desc": desc, "out_ptr": out, "count": COUNT}
    launch = Launch(
        ring_toy.sum_blocks_kernel, (1,), args, {"LEFT_OUT": left_out}, {"num_warps": 4}
    )
    # The kernel adds the blocks in this order.
    expected = sum(x.float().view(COUNT, ROWS, COLS).unbind(), torch.zeros(ROWS, COLS))
    try:
        missing = launching.execute(launch, launching.compiled(launch, "sm_90", instrument))
    except Fault as fault:
        return fault, out, expected
    return (missing[0] if missing else None), out, expected


@pytest.mark.parametrize("instrument", ["", pytest.param("consan", marks=pytest.mark.slow)])
def test_the_whole_kernel_has_no_fault(instrument: str) -> None:
    fault, out, expected = sum_blocks("", instrument)
    assert fault is None and torch.equal(out, expected)


FOUND = {
    "wait empty": NotWaited,
    "wait full": Fault,
    "arrive empty": Deadlock,
    "expect": Deadlock,
    "fence barriers": NotFenced,
    "fence reads": NotFenced,
}


@pytest.mark.parametrize("left_out", ring_toy.STEPS)
def test_what_is_left_out_is_found(left_out: str) -> None:
    fault, _, _ = sum_blocks(left_out)
    assert isinstance(fault, FOUND[left_out])


@pytest.mark.parametrize(
    ("left_out", "reported"),
    [
        ("wait full", "outstanding writes"),
        pytest.param("wait empty", "outstanding reads", marks=pytest.mark.slow),
    ],
)
def test_the_sanitizer_finds_waits_left_out(left_out: str, reported: str) -> None:
    fault, _, _ = sum_blocks(left_out, "consan")
    assert isinstance(fault, AssertFailed) and reported in str(fault)


@pytest.mark.slow
@pytest.mark.skipif(
    RELEASE < (3, 7),
    reason="parts of a warp enter a barrier in the sanitizer of triton 3.6: not executed here",
)
@pytest.mark.timeout(1800)
def test_the_sanitizer_has_nothing_to_say_of_the_forward() -> None:
    """The sanitizer makes 178,000 instructions of 2,000, which run for two minutes."""
    forward = target("hopper fwd")
    sanitized = launching.compiled(forward.launch, "sm_90", "consan")
    assert "__assertfail" in sanitized.ptx
    assert replace(forward, code=sanitized).plant(str, None) is None
