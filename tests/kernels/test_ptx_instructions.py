"""The executor of PTX (`ptx/`) against the ISA: hard numbers, and refused instructions.

The results of kernels (test_ptx.py) show that all other instructions are right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.kernels.ptx.faults import Deadlock, Fault, OutOfBounds, Race, Unsupported
from tests.kernels.ptx.lines import run
from tests.kernels.ptx.scalar import DTYPES, RULES

NAN, INF = 0x7FC00000, 0x7F800000
# By the size of a result in bytes.
REGISTERS = {1: "%p1", 2: "%rs1", 4: "%r10", 8: "%rd3"}


def result_of(opcode: str, operands: Sequence[int]) -> int:
    """The bits that an instruction of RULES makes of immediates."""
    size = DTYPES[RULES[opcode].result].itemsize
    name = REGISTERS[size]
    store = f"st.global.b{8 * size} [%rd1], {name};"
    if size == 1:
        store = f"selp.b32 %r30, 1, 0, {name}; st.global.b32 [%rd1], %r30;"
    words = run(f"{opcode} {name}, {', '.join(map(str, operands))}; {store}", words=2).words
    return int(words[0].copy().view(np.uint64)[0])


CASES: list[tuple[str, tuple[int, ...], int]] = [
    ("add.s32", (0x7FFFFFFF, 1), 0x80000000),
    ("mul.lo.s64", (2**33, 2**31), 0),
    ("mul.hi.s32", (-2, 3), 0xFFFFFFFF),
    ("mul.hi.u32", (0xFFFFFFFF, 2), 1),
    ("mul.wide.u32", (0xFFFFFFFF, 2), 0x1FFFFFFFE),
    ("mad.wide.s32", (-3, 4, 5), 2**64 - 7),
    ("div.s32", (-7, 2), 2**32 - 3),
    ("rem.s32", (-7, 2), 2**32 - 1),
    ("min.s32", (-1, 1), 0xFFFFFFFF),
    ("min.u32", (-1, 1), 1),
    ("shl.b32", (1, 32), 0),  # shifts are clamped to the width, not taken modulo it
    ("shr.u32", (0x80000000, 40), 0),
    ("shr.s32", (0x80000000, 40), 0xFFFFFFFF),
    ("bfe.u32", (0xABCD, 4, 8), 0xBC),
    ("bfe.u32", (0x80000000, 28, 8), 8),
    ("bfe.s32", (0xF0, 4, 4), 0xFFFFFFFF),
    ("bfe.s32", (0x80000000, 28, 8), 0xFFFFFFF8),
    ("bfe.s32", (0x80000000, 4, 0), 0),
    ("setp.lt.u32", (-1, 0), 0),
    ("setp.lt.f32", (NAN, 0), 0),
    ("setp.ne.f32", (NAN, NAN), 0),
    ("setp.neu.f32", (NAN, NAN), 1),
    ("cvt.s64.s32", (-1,), 2**64 - 1),
    ("cvt.u32.u64", (2**40 + 5,), 5),
    ("cvt.rn.f32.s32", (2**24 + 1,), 0x4B800000),  # halfway: to the even one
    ("cvt.rn.bf16.f32", (0x3F808000,), 0x3F80),  # halfway: to the even one
    ("cvt.rn.bf16.f32", (0x3F808001,), 0x3F81),
    ("cvt.rn.bf16.f32", (NAN + 1,), 0x7FFF),
    ("cvt.rn.bf16.f32", (0x7F7FFFFF,), 0x7F80),
    ("cvt.rn.f16.f32", (NAN,), 0x7FFF),
    ("mul.f32", (0x00800000, 0x3F000000), 0x00400000),  # subnormal numbers are kept
    ("mul.ftz.f32", (0x80800000, 0x3F000000), 0x80000000),
    ("fma.rn.ftz.f32", (0x00400000, 0x7F000000, 0), 0),
    ("fma.rn.f32", (0x3F800800, 0x3F7FF000, 0xBF800000), 0xB3800000),  # rounded once
    ("max.f32", (NAN, 0x3F800000), 0x3F800000),
    ("ex2.approx.ftz.f32", (0xC3000000,), 0),  # 2^-128
    ("ex2.approx.ftz.f32", (0xFF800000,), 0),
    ("div.full.f32", (0x3F800000, 0), INF),
]


@pytest.mark.parametrize(("opcode", "operands", "expected"), CASES)
def test_bits(opcode: str, operands: tuple[int, ...], expected: int) -> None:
    assert result_of(opcode, operands) == expected


def test_threads_part_and_meet_again() -> None:
    """Thread n makes n passes of a loop; after it the warp exchanges values."""
    ran = run("""
        mov.b32 %r1, 0;
        mov.b32 %r2, 0;
    again:
        setp.ge.u32 %p1, %r1, %r0;
        @%p1 bra done;
        add.s32 %r1, %r1, 1;
        add.s32 %r2, %r2, %r1;
        bra.uni again;
    done:
        shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;
        st.global.b32 [%rd1], %r3;
        """)
    thread = np.arange(32) ^ 1
    assert ran.words[:, 0].tolist() == (thread * (thread + 1) // 2).tolist()


def test_loads_extend_by_their_sign() -> None:
    ran = run(
        """
        ld.global.s8 %r10, [%rd2];
        ld.global.b8 %r11, [%rd2];
        ld.param.s32 %rd3, [minus_five];
        st.global.v2.b32 [%rd1], {%r10, %r11};
        st.global.b64 [%rd1 + 8], %rd3;
        """,
        words=4,
        inputs=torch.tensor([-2], dtype=torch.int32),
    )
    assert ran.words[0].tolist() == [2**32 - 2, 254, 2**32 - 5, 2**32 - 1]


def test_rows_of_a_strided_tensor_are_all_that_is_there() -> None:
    inputs = torch.zeros(4, 8, dtype=torch.int32)[:, :4]
    run("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2 + 32];", inputs=inputs)
    with pytest.raises(OutOfBounds):
        run("ld.global.b32 %r1, [%rd2 + 16];", inputs=inputs)


SOME = "setp.lt.u32 %p1, %r0, 9; @%p1 bra out;"

# The text, the number of threads, the fault and its message.
REFUSED: list[tuple[str, int, type[Fault], str]] = [
    ("ld.global.b32 %r1, [%rd2 + 16];", 32, OutOfBounds, "thread 0 is outside every allocation"),
    ("ld.global.b32 %r1, [%rd2 + -4];", 32, OutOfBounds, "outside every allocation of global"),
    ("ld.global.v2.b32 {%r1, %r2}, [%rd2 + 12];", 32, OutOfBounds, "outside every allocation"),
    ("ld.global.b32 %r1, [%rd2 + 2];", 32, OutOfBounds, "no multiple of 4"),
    ("st.shared.b32 [global_smem + 65536], %r0;", 32, OutOfBounds, "allocation of shared"),
    ("shl.b32 %r1, %r0, 12; ld.shared.b32 %r2, [%r1 + 1024];", 32, OutOfBounds, "of thread 16"),
    ("add.sat.s32 %r1, %r2, %r3;", 32, Unsupported, "add.sat"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r2};", 32, Unsupported, "tf32"),
    ("tcgen05.wait::ld.sync.aligned;", 32, Unsupported, "tcgen05.wait"),
    ("shfl.sync.idx.b32 %r1, %r2, 0, 31, 0xffff;", 32, Unsupported, "shfl.sync"),
    ("cp.async.cg.shared.global [global_smem], [%rd2], 4;", 32, Unsupported, "cp.async"),
    ("mov.u32 %r1, %clock;", 32, Unsupported, "%clock"),
    ("list: .branchtargets one; brx.idx %r0, list; one:", 32, Fault, "index of 31 into 1 labels"),
    (f"{SOME} bar.sync 0; out:", 32, Fault, "part of a warp"),
    (f"{SOME} shfl.sync.bfly.b32 %r3, %r0, 1, 31, -1; out:", 32, Fault, "part of a warp"),
    ("bar.sync 0, 64;", 128, Fault, "128 threads come to a barrier of 64"),
    ("bar.sync 0, 64;", 32, Deadlock, "bar.sync"),
    ("st.shared.b32 [global_smem], %r0;", 32, Race, "different values"),
]


@pytest.mark.parametrize(("body", "threads", "error", "told"), REFUSED)
def test_what_is_refused_is_named(body: str, threads: int, error: type[Fault], told: str) -> None:
    with pytest.raises(error) as found:
        run(body, threads=threads)
    assert found.type is error and told in str(found.value)
