"""Small kernels for the compile check, each a test of one rule.

They are compiled, so this runs in a process without TRITON_INTERPRET, of test_aot.py:
`python -m tests.kernels.toys`.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from dev.aot import Cell, judged
from dev.code_rules import PRODUCTS, Limits
from dev.compiled import Compiled, CompiledRow
from ring_attn.kernels.launch import Launch
from ring_attn.kernels.triton_release import RELEASE

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


def launch(
    kernel: object, args: dict[str, object], tile: tuple[int, int, int], warps: int, stages: int
) -> Launch:
    constants = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
    return Launch(kernel, (1,), args, constants, {"num_warps": warps, "num_stages": stages})


def product_launch(
    tile: tuple[int, int, int] = (64, 64, 64),
    warps: int = 4,
    stages: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    stride: int = 1,
    offset: int = 0,
) -> Launch:
    """`a` begins `offset` elements after an aligned address."""
    a = torch.empty(2 * SIZE * SIZE + offset, dtype=dtype)[offset:]
    b, c = torch.empty(SIZE, SIZE, dtype=dtype), torch.empty(SIZE, SIZE)
    args = {"a": a, "b": b, "c": c, "size": SIZE, "stride": stride}
    return launch(product, args, tile, warps, stages)


SERIALIZED = "(C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized"
TOO_BIG = "needs 294912 bytes of shared memory, sm_90 has 232448"
# By name: architecture, launch, and the beginning of each failure.
TOYS: dict[str, tuple[str, Launch, tuple[str, ...]]] = {
    **{f"good {x}": (x, product_launch(), ()) for x in ("sm_80", "sm_90", "sm_100", "gfx942")},
    "spills": ("sm_90", product_launch((256, 128, 32), 4, 2), ("spills ", "spills ", SERIALIZED)),
    "spills gfx942": ("gfx942", product_launch((256, 256, 32), 2, 1), ("spills ",)),
    "too big": ("sm_90", product_launch((128, 256, 64), 8, 6), (TOO_BIG,)),
    "no tensor cores": (
        "sm_90",
        product_launch(stages=2, dtype=torch.float32),
        ("no tensor-core instruction",),
    ),
    "odd block": ("sm_90", product_launch((48, 64, 64)), ("does not compile: arange's range",)),
    "strided": ("sm_80", product_launch(stride=2), ()),
    "not aligned": ("sm_80", product_launch(offset=1), ()),
}


def die_at_one(cell: Cell) -> CompiledRow:
    """Kills its process for a cell with head dim 1; for any other cell, returns the cell's row."""
    if cell.head_dim == 1:
        os._exit(3)
    return CompiledRow("toy", "", cell.arch, cell.head_dim, cell.dtype, "", 4, 1, None, ())


def main() -> None:
    reports: dict[str, Compiled] = {}
    for name, (arch, launched, failing) in TOYS.items():
        report, failures = judged(launched, arch, Limits())
        if RELEASE < (3, 7):
            # Triton 3.6 leaves proxy fences out of these loops; our kernels have their own.
            failures = tuple(text for text in failures if "products lack a fence" not in text)
        assert len(failures) == len(failing), (name, failures)
        assert all(map(str.startswith, failures, failing)), (name, failures)
        if report is not None:
            reports[name] = report
    of_arch = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "mfma"}
    for arch, opcode in of_arch.items():
        report = reports[f"good {arch}"]
        assert {x for x in ("HMMA", *PRODUCTS.values()) if report.opcodes[x]} == {opcode}
        assert report.registers > 16 and report.shared_bytes > 0
    # 16-byte copies need an aligned pointer, rows that divide by 16, and a stride known to be 1;
    # the other operand meets all three conditions.
    kinds = ("good sm_80", "strided", "not aligned")
    good, strided, apart = (reports[name].opcodes["LDGSTS"] for name in kinds)
    assert good == 2 * strided == 2 * apart > 0


if __name__ == "__main__":
    main()
