"""Small kernels that the compile check must judge, each for one reason: run by test_aot.py.

They are compiled, so this runs in a process without TRITON_INTERPRET:
`python -m tests.kernels.toys` prints what was found as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_attn.kernels.launch import Launch
from ring_attn.tools.aot import Cell, Expected, Row, judged

SIZE = 1024


@triton.jit
def product(
    a, b, c, size, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """One tile of c = a b; the columns of `a` are `stride` apart."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, size, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        x = tl.load(a + offs_m[:, None] * size + offs_k[None, :] * stride)
        y = tl.load(b + offs_k[:, None] * size + offs_n[None, :])
        acc = tl.dot(x, y, acc, input_precision="ieee")
    tl.store(c + offs_m[:, None] * size + offs_n[None, :], acc)


@triton.jit
def specialized(a, b, c, size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same from descriptors, in a loop that asks to be warp-specialised."""
    a_rows = tl.make_tensor_descriptor(a, [size, size], [size, 1], [BLOCK_M, BLOCK_K])
    b_rows = tl.make_tensor_descriptor(b, [size, size], [size, 1], [BLOCK_K, BLOCK_N])
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, size, BLOCK_K, warp_specialize=True):
        acc = tl.dot(a_rows.load([0, start]), b_rows.load([start, 0]), acc)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    tl.store(c + offs_m[:, None] * size + offs_n[None, :], acc)


@triton.jit
def refused(a, size, BLOCK: tl.constexpr):
    """Does not compile."""
    tl.static_assert(BLOCK > 64, "this toy wants a greater block")
    tl.store(a + tl.arange(0, BLOCK), size)


def product_launch(
    tile: tuple[int, int, int],
    num_warps: int,
    num_stages: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    stride: int = 1,
    offset: int = 0,
) -> Launch:
    """`a` begins `offset` elements after an aligned address."""
    a = torch.empty(2 * SIZE * SIZE + offset, dtype=dtype)[offset:]
    args = {"a": a, "b": empty(dtype), "c": empty(torch.float32), "size": SIZE, "stride": stride}
    return launch(product, args, tile, num_warps, num_stages)


def specialized_launch(num_warps: int) -> Launch:
    """Three stages of 128 x 128 x 64."""
    args = {"a": empty(), "b": empty(), "c": empty(torch.float32), "size": SIZE}
    return launch(specialized, args, (128, 128, 64), num_warps, 3)


def refused_launch() -> Launch:
    options = {"num_warps": 4, "num_stages": 1}
    return Launch(refused, (1,), {"a": empty(torch.int32), "size": SIZE}, {"BLOCK": 64}, options)


def launch(
    kernel: object, args: dict[str, object], tile: tuple[int, int, int], warps: int, stages: int
) -> Launch:
    constants = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
    return Launch(kernel, (1,), args, constants, {"num_warps": warps, "num_stages": stages})


def empty(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(SIZE, SIZE, dtype=dtype)


def toys() -> Iterator[tuple[str, str, Launch, Expected]]:
    """Name, architecture, launch, and what is expected of it."""
    usual = Expected()
    small = product_launch((64, 64, 64), 4, 3)
    for arch in ("sm_80", "sm_90", "sm_100", "gfx942"):
        yield f"good {arch}", arch, small, usual
    yield "spills", "sm_90", product_launch((256, 128, 32), 4, 2), usual
    yield "spills gfx942", "gfx942", product_launch((256, 256, 32), 2, 1), usual
    yield "too big", "sm_90", product_launch((128, 256, 64), 8, 6), usual
    yield "too big gfx942", "gfx942", product_launch((128, 128, 128), 8, 3), usual
    scalar = product_launch((64, 64, 32), 8, 2, dtype=torch.float32)
    yield "no tensor cores", "sm_90", scalar, usual
    few_rows = product_launch((16, 64, 64), 4, 3)
    yield "others' tensor cores", "sm_90", few_rows, usual
    yield "too few rows for its own", "sm_90", few_rows, Expected(products="any")
    yield "no need of them", "sm_90", scalar, Expected(products=None)
    for warps in (4, 8):
        launched = specialized_launch(warps)
        yield f"specialised, {warps} warps", "sm_90", launched, Expected(warp_specialize=True)
    yield "refused", "sm_90", refused_launch(), Expected(products=None)
    yield "strided", "sm_80", product_launch((64, 64, 64), 4, 3, stride=2), usual
    yield "not aligned", "sm_80", product_launch((64, 64, 64), 4, 3, offset=1), usual


def die_at_one(cell: Cell) -> Row:
    """Takes its process down for the cell with head dim 1; for others, a row that says which."""
    if cell.head_dim == 1:
        os._exit(3)
    return Row("toy", "", cell.arch, cell.head_dim, cell.dtype, "", 4, 1, "", None, ())


def main() -> None:
    rows = {}
    for name, arch, launched, expected in toys():
        report, failures = judged(launched, arch, expected)
        rows[name] = {"report": report and asdict(report), "failures": failures}
    json.dump({"triton": triton.__version__, "rows": rows}, sys.stdout)


if __name__ == "__main__":
    main()
