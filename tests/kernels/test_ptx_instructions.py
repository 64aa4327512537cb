"""The executor of PTX (`ptx/`) against the ISA: hard numbers, refused instructions, waits, fences.

The results of kernels (test_ptx.py) show that all other instructions are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.kernels.ptx import copies, wgmma  # noqa: F401  (they add their instructions)
from tests.kernels.ptx.bulk import TensorMap
from tests.kernels.ptx.faults import Deadlock, Fault, NotWaited, OutOfBounds, Race, Unsupported
from tests.kernels.ptx.machine import run_grid
from tests.kernels.ptx.memory import GlobalMemory
from tests.kernels.ptx.parse import parse
from tests.kernels.ptx.scalar import DTYPES, RULES


@dataclass(frozen=True)
class Ran:
    """Results of a run: uint32 of (threads, words), and the number of missing fences."""

    words: NDArray[Any]
    missing_fences: int


def run(
    body: str,
    *,
    threads: int = 32,
    words: int = 1,
    inputs: Tensor | None = None,
    head: str = "",
    tensor: Tensor | None = None,
) -> Ran:
    """Runs PTX; %rd1 is the address of `words` output words of the thread, %rd2 of `inputs`.

    %r0 is the thread, and [tensor_map] describes `tensor`, which one copy takes as a whole.
    """
    out = torch.zeros(threads, words, dtype=torch.int32)
    inputs = torch.zeros(4, dtype=torch.int32) if inputs is None else inputs
    tensor = torch.zeros(16, dtype=torch.int16) if tensor is None else tensor
    text = f"""
    .visible .entry test(.param .u64 out, .param .u64 inputs, .param .u32 minus_five,
        .param .b8 tensor_map[128])
    .reqntid {threads} {head}
    {{
        .reg .pred %p<9>; .reg .b16 %rs<99>; .reg .b32 %r<99>; .reg .b64 %rd<9>; .reg .b32 %f<99>;
        ld.param.b64 %rd1, [out];
        ld.param.b64 %rd2, [inputs];
        mov.u32 %r0, %tid.x;
        mad.wide.u32 %rd1, %r0, {4 * words}, %rd1;
        {body}
        ret;
    }}"""
    memory = GlobalMemory([out, inputs, tensor])
    args = {"out": memory.address(out), "inputs": memory.address(inputs), "minus_five": 2**32 - 5}
    shape, width = tensor.shape, tensor.element_size()
    tensor_map = TensorMap(memory.address(tensor), shape, tensor.stride(), width, shape, 128)
    missing = run_grid(parse(text), args, memory, 1 << 16, tensor_maps={"tensor_map": tensor_map})
    memory.write_back()
    return Ran(out.numpy().view(np.uint32), len(missing))


# -- one thread

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
    ("mul.wide.u32", (0xFFFFFFFF, 2), 0x1FFFFFFFE),
    ("mad.wide.s32", (-3, 4, 5), 2**64 - 7),
    ("div.s32", (-7, 2), 2**32 - 3),
    ("rem.s32", (-7, 2), 2**32 - 1),
    ("min.s32", (-1, 1), 0xFFFFFFFF),
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
    ("cvt.s64.s32", (-1,), 2**64 - 1),
    ("cvt.u32.u64", (2**40 + 5,), 5),
    ("cvt.rn.f32.s32", (2**24 + 1,), 0x4B800000),  # halfway: to the even one
    ("cvt.rn.bf16.f32", (0x3F808000,), 0x3F80),  # halfway: to the even one
    ("cvt.rn.bf16.f32", (0x3F808001,), 0x3F81),
    ("cvt.rn.bf16.f32", (NAN + 1,), 0x7FFF),
    ("cvt.rn.bf16.f32", (0x7F7FFFFF,), 0x7F80),
    ("cvt.rn.f16.f32", (NAN,), 0x7FFF),
    ("mul.f32", (0x00800000, 0x3F000000), 0x00400000),  # subnormal numbers are kept
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
        setp.ge.s32 %p1, %r1, %r0;
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


# -- waits, barriers and fences of asynchronous instructions: omitted ones are found


def outcome(body: str, **options: object) -> int | Fault:
    """The fault that ends a kernel, or the number of missing fences."""
    try:
        return run(body, **options).missing_fences
    except Fault as fault:
        return fault


INIT = """
    setp.eq.b32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [global_smem], {count};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    """
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [global_smem];"
ONE, ALL = INIT.format(count=1), INIT.format(count=32)


def waits(parity: int, name: str = "again") -> str:
    return f"""
    {name}:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [global_smem], {parity};
    @!%p2 bra {name};
    """


@pytest.mark.parametrize(
    ("body", "threads", "told"),
    [
        (ALL + waits(1), 32, ""),  # a new mbarrier has completed the phase of parity 1
        (ALL + ARRIVE + waits(0) + ARRIVE + waits(1, "more"), 32, ""),
        (ALL + waits(0), 32, "try_wait"),
        (ALL + ARRIVE + waits(1), 32, "try_wait"),
        (ALL + "@%p1 " + ARRIVE + waits(0), 32, "lacks 31 arrivals"),
        (ALL + ARRIVE, 64, "64 arrivals where 32"),
        (ALL.replace("bar.sync 0;", "") + waits(1), 64, "no barrier between"),
    ],
)
def test_mbarrier_phases(body: str, threads: int, told: str) -> None:
    found = outcome(body, threads=threads)
    assert told in str(found) if told else found == 0


READ = "shl.b32 %r1, %r0, 2; ld.shared.b32 %r2, [%r1 + 2048];"


@pytest.mark.parametrize(
    ("before", "num_bytes", "behind", "expected"),
    [
        (READ + ONE, 2048, waits(0) + READ, 0),
        (ONE, 2048, READ, NotWaited),
        (ONE, 2032, waits(0) + READ, Deadlock),
        (ONE.replace("fence.proxy", "// fence.proxy"), 2048, waits(0), 1),
        # Overwriting data that threads have read: the copy needs a later barrier and a fence.
        (ONE + READ + "bar.sync 0;", 2048, waits(0), 1),
        (ONE + READ, 2048, waits(0), Race),
    ],
)
def test_bulk_copies(before: str, num_bytes: int, behind: str, expected: object) -> None:
    tensor = torch.zeros(16, 64, dtype=torch.int16)
    body = f"""
        {before}
        mov.b64 %rd3, tensor_map;
        mov.b32 %r5, 0;
        @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [global_smem], {num_bytes};
        @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
            [global_smem + 1024], [%rd3, {{%r5, %r5}}], [global_smem];
        {behind}
        """
    found = outcome(body, threads=64, tensor=tensor)
    assert found == expected or type(found) is expected, found


# A product of 64 x 16 and 16 x 8, all zeros, from one place in shared memory.
PRODUCT = f"""
    shl.b32 %r5, %r0, 4;
    mov.b32 %r1, 0;
    st.shared.v4.b32 [%r5 + 1024], {{%r1, %r1, %r1, %r1}};
    st.shared.v4.b32 [%r5 + 3072], {{%r1, %r1, %r1, %r1}};
    st.shared.v4.b32 [%r5 + 5120], {{%r1, %r1, %r1, %r1}};
    st.shared.v4.b32 [%r5 + 7168], {{%r1, %r1, %r1, %r1}};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.b64 %rd3, {1024 >> 4 | 1024 >> 4 << 32 | 1 << 62};
    mov.pred %p1, -1;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
        {{%f0, %f1, %f2, %f3}}, %rd3, %rd3, %p1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    """
FENCE = "fence.proxy.async.shared::cta;"
UNFENCED = PRODUCT.replace(FENCE, "")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (PRODUCT, 0),
        (UNFENCED, 1),
        (UNFENCED.replace("mov.b64", f"{FENCE} mov.b64"), 0),  # behind the barrier
        (FENCE + UNFENCED, 1),  # before the writes
        (PRODUCT.replace("bar.sync 0;", ""), Race),
    ],
)
def test_wgmma_reads_what_is_fenced(body: str, expected: object) -> None:
    found = outcome(body, threads=128)
    assert found == expected or type(found) is expected, found


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("wait_group.sync.aligned 0;", "commit_group.sync.aligned;", "is not waited for"),
        ("wait_group.sync.aligned 0;", "wait_group.sync.aligned 1; mov.b32 %r9, %f0;", "%f0 bel"),
        ("wgmma.fence.sync.aligned;", "", "no wgmma.fence before it"),
        ("wgmma.fence.sync.aligned;", "mov.b32 %f0, 0;", "no wgmma.fence"),
        ("wgmma.commit", "mov.b32 %f3, 0; wgmma.commit", "%f3 belongs to a wgmma"),
        ("wgmma.wait", "st.shared.b32 [%r5 + 1024], %r0; wgmma.wait", "read by a wgmma of warp"),
        ("wgmma.commit", "setp.lt.u32 %p2, %r0, 32; @%p2 wgmma.commit", "is not waited for"),
    ],
)
def test_wgmma_is_waited_for(old: str, new: str, told: str) -> None:
    assert told in str(outcome(PRODUCT.replace(old, new), threads=128))


@pytest.mark.parametrize(
    ("high", "low", "told"),
    [
        # 128 registers a thread: one warpgroup can take 168 once the other has released all but 88.
        ("dec 88", "inc 168", ""),
        ("dec 88", "inc 176", "setmaxnreg.inc"),
        ("dec 88", "inc 120", "warps have"),
    ],
)
def test_registers_come_from_a_pool(high: str, low: str, told: str) -> None:
    each = {"dec": "setmaxnreg.dec.sync.aligned.u32", "inc": "setmaxnreg.inc.sync.aligned.u32"}
    high, low = (f"{each[word]} {number};" for word, number in (high.split(), low.split()))
    body = f"setp.lt.u32 %p1, %r0, {{}}; @%p1 bra low; {high} bra end; low: {low} end: bar.sync 0;"
    options = {"threads": 256, "head": ".maxnreg 128"}
    found = outcome(body.format(128), **options)
    assert told in str(found) if told else found == 0
    assert "other numbers of registers" in str(outcome(body.format(96), **options))
