"""The executor of PTX runs kernels that are not ours, too (`tutorials`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu
from triton.tools.tensor_descriptor import TensorDescriptor

from ring_attn.core.mask import Mask
from ring_attn.kernels.launch import Launch
from ring_attn.kernels.triton_release import RELEASE
from ring_attn.testing import check, noisy_runs
from tests.bounds import assert_close, assert_holds, expect
from tests.kernels import tutorials
from tests.kernels.calls import grouped, in_interpreter
from tests.kernels.ptx import launching

pytestmark = in_interpreter


def execute(
    arch: str,
    kernel: Any,
    grid: tuple[int, ...],
    args: Mapping[str, Any],
    constants: Mapping[str, Any],
    warps: int = 4,
    edit: Callable[[str], str] = str,
) -> str:
    """Executes a launch, its warpgroups in a random order; returns its PTX."""
    launch = Launch(kernel, grid, args, constants, {"num_warps": warps, "num_stages": 3})
    code = launching.compiled(launch, arch)
    missing = launching.execute(launch, code, edit, seed=0)
    # Triton 3.6 leaves proxy fences out of the tutorials; our kernels have their own.
    assert not missing or RELEASE < (3, 7)
    return code.ptx


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def matrices(m: int, n: int, k: int, turned: tuple[bool, bool] = (False, False)) -> list[Tensor]:
    """Random a (m, k) and b (k, n), of which some have contiguous columns, and an empty c."""
    draw = torch.Generator().manual_seed(m + n + k)
    a, b = (torch.randn(*shape, generator=draw).half() for shape in ((m, k), (k, n)))
    made = [x.T.contiguous().T if turn else x for x, turn in zip((a, b), turned, strict=True)]
    return [*made, torch.full((m, n), torch.nan, dtype=torch.float16)]


def assert_product(a: Tensor, b: Tensor, c: Tensor, *, activated: bool) -> None:
    oracle, plain = (leaky_relu(x) if activated else x for x in (a.double() @ b.double(), a @ b))
    verdict = check("c", c, oracle, plain, a.double().abs() @ b.double().abs())
    assert verdict.ok, str(verdict)


def swizzles(ptx: str) -> set[int]:
    """Bytes of a swizzled row, by the descriptors of products in the PTX."""
    constants = re.findall(r"or\.b64\s+%rd\d+, %rd\d+, (-?\d+);", ptx)
    return {(0, 128, 64, 32)[int(x) >> 62 & 3] for x in constants}


@pytest.mark.parametrize(
    ("arch", "sizes", "blocks", "warps"),
    [
        ("sm_80", (100, 90, 70), (64, 64, 32), 4),
        ("sm_80", (256, 128, 64), (128, 128, 32), 8),
        ("sm_90", (100, 90, 70), (64, 64, 32), 4),
        slow("sm_90", (128, 256, 64), (128, 256, 64), 8),
    ],
)
@pytest.mark.parametrize("activation", ["", "leaky_relu"])
def test_products(
    arch: str,
    sizes: tuple[int, int, int],
    blocks: tuple[int, int, int],
    warps: int,
    activation: str,
) -> None:
    multiply(arch, sizes, blocks, warps, activation)


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("depth", "cols"), [(16, 64), (32, 32), (64, 16), (64, 64)])
def test_swizzles(depth: int, cols: int, turned: tuple[bool, bool]) -> None:
    """Operands with contiguous rows or columns of 32, 64 and 128 bytes."""
    ptx = multiply("sm_90", (64, cols, 128), (64, cols, depth), 4, "", turned)
    lengths = {128 if turned[0] else 2 * depth, 2 * depth if turned[1] else 2 * cols}
    assert swizzles(ptx) == {min(x, 128) for x in lengths}


def multiply(
    arch: str,
    sizes: tuple[int, int, int],
    blocks: tuple[int, int, int],
    warps: int,
    activation: str,
    turned: tuple[bool, bool] = (False, False),
) -> str:
    """Computes c = activation(a b) and compares it with float64; returns the PTX."""
    a, b, c = matrices(*sizes, turned)
    args = {"a_ptr": a, "b_ptr": b, "c_ptr": c, **dict(zip("MNK", sizes, strict=True))}
    strides = (*a.stride(), *b.stride())
    args |= dict(zip(("stride_am", "stride_ak", "stride_bk", "stride_bn"), strides, strict=True))
    constants = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), blocks, strict=True))
    grid = (-(-sizes[0] // blocks[0]) * -(-sizes[1] // blocks[1]),)
    how = constants | {"TOGETHER": 2, "ACTIVATION": activation}
    ptx = execute(arch, tutorials.matmul_kernel, grid, args, how, warps)
    assert_product(a, b, c, activated=bool(activation))
    return ptx


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((64, 64, 64), {128}),
        ((64, 64, 32), {64, 128}),
        ((64, 32, 16), {32, 64}),
        ((64, 16, 64), {32, 128}),
    ],
)
def test_products_of_described_blocks(blocks: tuple[int, int, int], expected: set[int]) -> None:
    """Bulk copies swizzle as products read; a grid has two axes.

    Triton leaves out the proxy fence between the making of mbarriers and the copies.
    """
    m, n, k = blocks
    a, b, c = matrices(128, 64, 128)
    args = {
        "a_desc": TensorDescriptor.from_tensor(a, [m, k]),
        "b_desc": TensorDescriptor.from_tensor(b, [k, n]),
        "c_ptr": c,
        "N": 64,
        "K": 128,
    }
    kernel, grid = tutorials.described_matmul_kernel, (128 // m, 64 // n)
    add = partial(re.sub, r"mbarrier\.init[^;]*;", r"\g<0> fence.proxy.async.shared::cta;")
    ptx = execute("sm_90", kernel, grid, args, {}, edit=add)
    assert "cp.async.bulk.tensor" in ptx and swizzles(ptx) == expected
    assert_product(a, b, c, activated=False)


@pytest.mark.parametrize(("cols", "warps"), [(781, 8), (512, 4), (1, 4)])
def test_softmax(cols: int, warps: int) -> None:
    x = torch.randn(5, cols, generator=torch.Generator().manual_seed(cols))
    out = torch.full_like(x, torch.nan)
    args = {"out_ptr": out, "x_ptr": x, "out_stride": cols, "x_stride": cols, "rows": 5}
    constants = {"BLOCK": 1 << (cols - 1).bit_length(), "STAGES": 4}
    execute("sm_80", tutorials.softmax_kernel, (2,), args | {"cols": cols}, constants, warps)
    assert_close("softmax", out, x.double().softmax(1), noisy_runs(lambda: x.softmax(1)))


@pytest.mark.parametrize("headdim", [64, slow(128)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool, headdim: int) -> None:
    mask, (block_m, block_n) = Mask(192, 192, causal=causal), (64, 32)
    inputs = grouped(mask, headdim, nheads=2, nheads_kv=2, batch=2)
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs[:3])
    out, lse = torch.full_like(q, torch.nan), torch.full((2, 2, 192), torch.nan)
    args = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "lse_ptr": lse}
    args |= {"scale": headdim**-0.5, "Z": 2, "H": 2, "N": 192}
    constants = {"DIM": headdim, "BLOCK_M": block_m, "BLOCK_N": block_n, "CAUSAL": causal}
    execute("sm_80", tutorials.attention_kernel, (192 // block_m, 4), args, constants)
    got = {"out": out.transpose(1, 2), "lse": lse * math.log(2)}
    assert_holds(got, *expect(inputs, mask))
