"""Rules for the machine code of compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dev.compiled import Compiled, CompiledRow

# The most shared memory of one program, in bytes. sm_*: CUDA C++ Programming Guide, technical
# specifications per compute capability, maximum per thread block (the system reserves 1 KiB).
# gfx942: AMD Instinct MI300 ISA, 64 KiB of LDS for a work-group.
SHARED_BYTES = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}

# Number of columns of the tensor memory of an SM of sm_100: PTX ISA, tcgen05.alloc.
TENSOR_MEMORY = 512

# The newest product instruction of an architecture. All NVIDIA GPUs have HMMA; it is slower on
# sm_90 and sm_100, but their newer instructions need 64 rows, and decoding has 16.
PRODUCTS = {"sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "mfma"}
HMMA = "HMMA"


@dataclass(frozen=True)
class Limits:
    """Requirements on a compiled kernel.

    Attributes:
        warp_specialize: whether it must be warp-specialised.
        products: required tensor-core instructions: "own" of the architecture, "any", or None.
        exposed: the largest number of exponentials, in a pass of an innermost loop, that do not
            overlap with a product; None means no limit.
        together: the smallest number of products in a pass of an innermost loop, all of which are
            to be in flight at the same time.
        spilled: the most bytes that it may spill.
        within: the largest number of loads and stores of spilled registers in a pass of a loop with
            products, without the loops within it.
        around: the same for a loop around loops with products, a pass of which is a run of columns.
        beside: the same for other loops, which other warps run.
    """

    warp_specialize: bool = False
    products: Literal["own", "any"] | None = "own"
    exposed: int | None = None
    together: int = 0
    spilled: int = 0
    within: int = 0
    around: int = 0
    beside: int = 0


def failures(report: Compiled, arch: str, expected: Limits) -> tuple[str, ...]:
    """Return messages for all requirements that a compiled kernel does not meet."""
    own = PRODUCTS.get(arch, HMMA)
    products = {"own": (own,), "any": (own, HMMA), None: ()}[expected.products]
    checks = (
        (
            report.spill_bytes > expected.spilled,
            f"spills {report.spill_bytes} bytes per thread, {expected.spilled} are allowed",
        ),
        *_in_loops(report, expected),
        (
            report.shared_bytes > SHARED_BYTES[arch],
            f"needs {report.shared_bytes} bytes of shared memory, {arch} has {SHARED_BYTES[arch]}",
        ),
        (
            report.tensor_memory > TENSOR_MEMORY,
            f"needs {report.tensor_memory} columns of tensor memory, {arch} has {TENSOR_MEMORY}",
        ),
        (
            bool(products) and not any(report.opcodes[name] for name in products),
            f"no tensor-core instruction (looked for {', '.join(products)})",
        ),
        (bool(report.advisories), "; ".join(report.advisories)),
        (
            bool(report.missing_fences),
            f"{len(report.missing_fences)} products lack a fence: "
            + "".join(report.missing_fences[:1]),
        ),
        (
            bool(report.early_reads),
            f"{len(report.early_reads)} reads before the wait for a load from tensor memory: "
            + "".join(report.early_reads[:1]),
        ),
        (
            expected.warp_specialize and not report.warp_specialized,
            "warp specialisation was requested and not done (no USETMAXREG)",
        ),
    )
    return tuple(text for failed, text in checks if failed)


def _in_loops(report: Compiled, expected: Limits) -> Iterator[tuple[bool, str]]:
    """Yield (whether a loop breaks it, message) for each rule of loops."""
    innermost = [loop for loop in report.loops if loop.products and not loop.around]
    if expected.exposed is not None:
        exposed = max((loop.exposed for loop in innermost), default=0)
        yield (
            exposed > expected.exposed or not any(loop.exponentials for loop in innermost),
            f"{exposed} exponentials of a loop overlap with no product, "
            f"{expected.exposed} are allowed",
        )
    products = max((loop.products for loop in innermost), default=0)
    yield (
        products < expected.together,
        f"{products} products in a pass of a loop, {expected.together} are to be in flight",
    )
    within = [loop.spills for loop in report.loops if loop.products]
    around = [loop.spills for loop in report.loops if loop.around and not loop.products]
    beside = [loop.spills for loop in report.loops if not (loop.products or loop.around)]
    for spills, allowed, kind in (
        (within, expected.within, "with products"),
        (around, expected.around, "around loops with products"),
        (beside, expected.beside, "without products"),
    ):
        count = max(spills, default=0)
        yield (
            count > allowed,
            f"spills {count} times in a pass of a loop {kind}, {allowed} are allowed",
        )


def other_orders(rows: Sequence[CompiledRow]) -> Iterator[tuple[CompiledRow, str]]:
    """Yield rows that add in another order than another variant of the same kernel and tile.

    Variants are steps of one call. If their orders differ, the bits of a ring are not those of one
    rank.
    """
    firsts: dict[object, CompiledRow] = {}
    for row in rows:
        kind = (row.kernel, row.arch, row.head_dims, row.dtype, row.tile, row.num_warps)
        first = firsts.setdefault(kind, row) if row.report else row
        if row.report and first.report and row.report.order != first.report.order:
            yield row, f"adds in another order than {first.variant!r}"
