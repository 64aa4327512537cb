"""The executor of PTX (`ptx/`): refused instructions, and waits, barriers and fences left out.

The results of kernels, and faults planted into them (test_ptx.py), show that all else is right.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.ptx import tensor  # noqa: F401  (it and what it imports add instructions)
from tests.kernels.ptx.copies import TensorMap
from tests.kernels.ptx.faults import Deadlock, Fault, NotWaited, OutOfBounds, Race, Unsupported
from tests.kernels.ptx.machine import run_grid
from tests.kernels.ptx.memory import GlobalMemory
from tests.kernels.ptx.parse import parse


def run(body: str, threads: int) -> int:
    """Runs PTX; returns the number of missing fences.

    %r0 is the thread, %rd2 the address of four rows of 4 32-bit zeros, each with a gap of 4 after
    it. [tensor_map] describes a tensor of 16 x 64 16-bit zeros, which one copy takes as a whole.
    """
    strided = torch.zeros(4, 8, dtype=torch.int32)[:, :4]
    copied = torch.zeros(16, 64, dtype=torch.int16)
    text = f"""
    .visible .entry test(.param .u64 inputs, .param .b8 tensor_map[128])
    .reqntid {threads} .maxnreg 128
    {{
        .reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>; .reg .b32 %f<99>;
        ld.param.b64 %rd2, [inputs];
        mov.u32 %r0, %tid.x;
        {body}
        ret;
    }}"""
    memory = GlobalMemory([strided, copied])
    tensor_map = TensorMap(memory.address(copied), (16, 64), (64, 1), 2, (16, 64), 128)
    args, maps = {"inputs": memory.address(strided)}, {"tensor_map": tensor_map}
    return len(run_grid(parse(text), args, memory, 1 << 16, tensor_maps=maps))


SOME = "setp.lt.u32 %p1, %r0, 9; @%p1 bra out;"

# The text, the number of threads; the fault and its message, or the number of missing fences.
REFUSED: list[tuple[str, int, type[Fault] | int, str]] = [
    ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2 + 32];", 32, 0, ""),
    ("ld.global.b32 %r1, [%rd2 + 16];", 32, OutOfBounds, "thread 0 is outside every allocation"),
    ("ld.global.b32 %r1, [%rd2 + 2];", 32, OutOfBounds, "no multiple of 4"),
    ("st.shared.b32 [global_smem + 65536], %r0;", 32, OutOfBounds, "allocation of shared"),
    ("shl.b32 %r1, %r0, 12; ld.shared.b32 %r2, [%r1 + 1024];", 32, OutOfBounds, "of thread 16"),
    ("add.sat.s32 %r1, %r2, %r3;", 32, Unsupported, "add.sat"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r2};", 32, Unsupported, "tf32"),
    ("list: .branchtargets one; brx.idx %r0, list; one:", 32, Fault, "index of 31 into 1 labels"),
    (f"{SOME} bar.sync 0; out:", 32, Fault, "part of a warp"),
    (f"{SOME} shfl.sync.bfly.b32 %r3, %r0, 1, 31, -1; out:", 32, Fault, "part of a warp"),
    (f"{SOME} redux.sync.min.s32 %r3, %r0, -1; out:", 32, Fault, "part of a warp"),
    ("redux.sync.min.s32 %r3, %r0, %r0;", 32, Unsupported, "a part of the lanes"),
    ("bar.sync 0, 64;", 128, Fault, "128 threads come to a barrier of 64"),
    ("bar.sync 0, 64;", 32, Deadlock, "bar.sync"),
    ("st.shared.b32 [global_smem], %r0;", 32, Race, "different values"),
]

INIT = """
    setp.eq.b32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [global_smem], 1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    """
WAIT = """
    again:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [global_smem], 0;
    @!%p2 bra again;
    """
READ = "shl.b32 %r1, %r0, 2; ld.shared.b32 %r2, [%r1 + 2048];"


def bulk_copy(before: str, num_bytes: int, behind: str) -> str:
    return f"""
        {before}
        mov.b64 %rd3, tensor_map;
        mov.b32 %r5, 0;
        @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [global_smem], {num_bytes};
        @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
            [global_smem + 1024], [%rd3, {{%r5, %r5}}], [global_smem];
        {behind}
        """


COPIES = [
    (bulk_copy(READ + INIT, 2048, WAIT + READ), 64, 0, ""),
    (bulk_copy(INIT, 2048, READ), 64, NotWaited, ""),
    (bulk_copy(INIT, 2032, WAIT + READ), 64, Deadlock, "mbarrier 0 lacks 0 arrivals and"),
    (bulk_copy(INIT.replace("fence.proxy", "// fence.proxy"), 2048, WAIT), 64, 1, ""),
    # Overwriting data that threads have read: the copy needs a later barrier and a fence.
    (bulk_copy(INIT + READ + "bar.sync 0;", 2048, WAIT), 64, 1, ""),
    (bulk_copy(INIT + READ, 2048, WAIT), 64, Race, "no barrier between"),
]

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
PRODUCTS = [
    (PRODUCT, 128, 0, ""),
    (UNFENCED, 128, 1, ""),
    (UNFENCED.replace("mov.b64", f"{FENCE} mov.b64"), 128, 0, ""),  # behind the barrier
    (FENCE + UNFENCED, 128, 1, ""),  # before the writes
    (PRODUCT.replace("bar.sync 0;", ""), 128, Race, ""),
]


def pool(high: str, low: str, first: int = 128) -> str:
    """The warps of the threads before `first` ask for other registers than those behind."""
    ask = "setmaxnreg.{}.sync.aligned.u32 {};"
    high, low = (ask.format(*change.split()) for change in (high, low))
    return f"""
        setp.lt.u32 %p1, %r0, {first};
        @%p1 bra low; {high} bra end; low: {low} end: bar.sync 0;
        """


REGISTERS = [
    # 128 registers a thread: one warpgroup can take 168 once the other has released all but 88.
    (pool("dec 88", "inc 168"), 256, 0, ""),
    (pool("dec 88", "inc 176"), 256, Deadlock, "setmaxnreg.inc"),
    (pool("dec 88", "inc 120"), 256, Fault, "warps have"),
    (pool("dec 88", "inc 168", 96), 256, Fault, "other numbers of registers"),
]


SYNC = "bar.warp.sync -1;"
# A warp's last lane takes what the first has written, or read.
FIRST, LAST = "setp.eq.b32 %p1, %r0, 0;", "setp.eq.b32 %p2, %r0, 31;"
HERE, THERE = "[global_smem + 2048]", "[%rd2]"
WRITE = f"{FIRST} @%p1 st.shared.b32 {HERE}, %r0;"
TAKE = f"{LAST} @%p2 ld.shared.b32 %r4, {HERE};"
OVERWRITE = f"{LAST} @%p2 st.shared.b32 {HERE}, %r0;"
ALL_READ = f"ld.shared.b32 %r4, {HERE};"
# Warp 1 waits for an arrival by one lane of warp 0, and takes what another lane has written.
ARRIVE = "@%p1 mbarrier.arrive.shared::cta.b64 _, [global_smem];"
HANDED = "setp.lt.u32 %p3, %r0, 32; @%p3 bra end;" + WAIT + ALL_READ + "end:"
LANES = [
    (WRITE + SYNC + TAKE, 32, 0, ""),
    (WRITE + TAKE, 32, Race, "written by a lane of warp 0 with no barrier between"),
    (WRITE + f"@%p1 ld.shared.b32 %r4, {HERE};", 32, 0, ""),  # the same lane
    (ALL_READ + SYNC + OVERWRITE, 32, 0, ""),
    (ALL_READ + OVERWRITE, 32, Race, "read by warp 0 with no barrier between"),
    (INIT + OVERWRITE + SYNC + ARRIVE + HANDED, 64, 0, ""),
    (INIT + OVERWRITE + ARRIVE + HANDED, 64, Race, "written by a lane of warp 0 with no barrier"),
    (INIT + FIRST + WRITE + ARRIVE + HANDED, 64, 0, ""),
]

HALVES = """
    setp.lt.u32 %p1, %r0, 64;
    @%p1 bra low; bar.sync 1, 64; bra end; low: bar.sync {}, 64; end:
    """
NAMED = [
    (HALVES.format(2), 128, 0, ""),
    (HALVES.format(1), 128, Race, "may come to barrier 1 before"),
    # In an order that another barrier gives.
    ("bar.sync 1; bar.sync 0; bar.sync 1;", 64, 0, ""),
]

# The last warp reads or writes what the first has written in global memory, or read.
FIRST_WARP, LAST_WARP = "setp.lt.u32 %p1, %r0, 1;", "setp.eq.b32 %p2, %r0, 63;"
STORE, LOAD = (
    f"{FIRST_WARP} @%p1 {x};"
    for x in (f"st.global.b32 {THERE}, %r0", f"ld.global.b32 %r4, {THERE}")
)
NEXT_STORE, NEXT_LOAD = (
    f"{LAST_WARP} @%p2 {x};" for x in (f"st.global.b32 {THERE}, %r0", f"ld.global.b32 %r4, {THERE}")
)
ADD = f"{FIRST_WARP} @%p1 atom.global.gpu.relaxed.add.f32 %f1, {THERE}, %f2;"
RED = ADD.replace("atom", "red").replace("%f1, ", "")
NEXT_ADD = f"{LAST_WARP} @%p2 atom.global.gpu.relaxed.add.f32 %f1, {THERE}, %f2;"
GLOBAL = [
    *(
        (a + "bar.sync 0;" + b, 64, 0, "")
        for a, b in ((STORE, NEXT_LOAD), (LOAD, NEXT_STORE), (ADD, NEXT_ADD), (RED, NEXT_ADD))
    ),
    (STORE + NEXT_LOAD, 64, Race, "is read by warp 1 of CTA 0, and written by warp 0 of CTA 0"),
    (LOAD + NEXT_STORE, 64, Race, "is written by warp 1 of CTA 0, and read by warp 0 of CTA 0"),
    (STORE + NEXT_STORE, 64, Race, "is written by warp 1 of CTA 0, and written by warp 0"),
    (ADD + NEXT_ADD, 64, Race, "is written by warp 1 of CTA 0, and written by warp 0"),
    (RED + NEXT_ADD, 64, Race, "is written by warp 1 of CTA 0, and written by warp 0"),
    (LOAD + NEXT_LOAD, 64, 0, ""),
]

# Tensor memory. A warp stores its threads' numbers to column 8 of its lanes, and loads them.
ALLOCATE = """
    setp.lt.u32 %p4, %r0, 32;
    @%p4 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [global_smem + 16], 64;
    @%p4 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    bar.sync 0;
    ld.shared.b32 %r9, [global_smem + 16];
    shr.u32 %r10, %r0, 5;
    shl.b32 %r10, %r10, 21;
    add.s32 %r10, %r10, %r9;
    """
FREE = "bar.sync 0; @%p4 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 64;"
PUT = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10 + 8], {%r0};"
PUT_WAIT, GET_WAIT = (f"tcgen05.wait::{x}.sync.aligned;" for x in ("st", "ld"))
GET = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, [%r10 + 8];"
SAME = "setp.ne.b32 %p5, %r11, %r0; @%p5 trap;"
MOVES = [
    (ALLOCATE + PUT + PUT_WAIT + GET + GET_WAIT + SAME + FREE, 128, 0, ""),
    (ALLOCATE + PUT + PUT_WAIT + GET + SAME + GET_WAIT + FREE, 128, Fault, "executed"),
    (ALLOCATE + PUT + GET + GET_WAIT + FREE, 128, NotWaited, "tensor memory written by"),
    (ALLOCATE + PUT + PUT_WAIT + GET + PUT + PUT_WAIT + FREE, 128, NotWaited, "read by"),
    (ALLOCATE + PUT + FREE, 128, NotWaited, "dealloc"),
    (ALLOCATE + PUT + PUT_WAIT, 128, Fault, "tensor memory is not freed"),
    (ALLOCATE + PUT.replace("+ 8", "+ 64") + FREE, 128, OutOfBounds, "columns 64 to 65 of 64"),
    (ALLOCATE + PUT.replace("%r10", "%r9") + FREE, 128, Fault, "warp 1 reaches for lanes from 0"),
    (ALLOCATE + FREE.replace("64", "32"), 128, Fault, "64 columns are allocated"),
    (ALLOCATE + FREE + ALLOCATE, 128, Fault, "after the permit was given up"),
    (ALLOCATE.replace("64", "48"), 128, Fault, "48 columns"),
    (ALLOCATE + SOME + PUT + "out:" + FREE, 128, Fault, "part of a warp"),
]

# A thread multiplies 128 x 16 threads' zeros by 16 x 16; a barrier tells when that is done.
ZEROS = "shl.b32 %r5, %r0, 4; mov.b32 %r1, 0;" + "".join(
    f"st.shared.v4.b32 [%r5 + {1024 + 2048 * i}], {{%r1, %r1, %r1, %r1}};" for i in range(1, 9)
)
# 8 rows of 128 bytes are apart by 1024; 128-byte swizzle; version 1.
IN_SHARED = 3072 >> 4 | 1024 >> 4 << 32 | 1 << 46 | 1 << 62
SHAPE = 1 << 4 | 1 << 7 | 1 << 10 | 16 >> 3 << 17 | 128 >> 4 << 24  # float32 += bfloat16, 128 x 16
MMA = "@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r9 + 0], %rd3, %rd3, %r12, %p6;"
MMA_OF_TENSOR = MMA.replace("], %rd3", "], [%r9 + 16]", 1)
COMMIT = "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [global_smem];"
LOAD_SUM = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, [%r10 + 15]; " + GET_WAIT
IS_ZERO = "setp.ne.b32 %p5, %r11, 0; @%p5 trap;"
# The same of ones, added twice: 32.0.
ONE = "mov.b32 %r1, 0x3F803F80;"
TWICE = MMA_OF_TENSOR + "mov.pred %p6, -1;" + MMA_OF_TENSOR + COMMIT
IS_32 = IS_ZERO.replace(" 0;", " 0x42000000;")


def multiply(products: str, before: str = "", behind: str = WAIT + LOAD_SUM + IS_ZERO) -> str:
    begun = INIT.replace("bar.sync 0;", "") + ZEROS + FENCE + ALLOCATE + before
    numbers = f"mov.b64 %rd3, {IN_SHARED}; mov.b32 %r12, {SHAPE}; mov.pred %p6, 0;"
    return begun + numbers + products + behind + FREE


FILL = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10 + 15], {%r0};"
FILL_A = f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r10 + 16], {{{', '.join(['%r1'] * 8)}}};"
TENSOR_PRODUCTS = [
    (multiply(MMA + COMMIT), 128, 0, ""),
    (multiply(MMA + MMA + COMMIT), 128, 0, ""),  # products of a thread are in order
    (multiply(MMA + COMMIT, behind=LOAD_SUM), 128, NotWaited, "tensor memory written by"),
    (multiply(MMA), 128, Deadlock, "mbarrier 0 lacks 1 arrivals"),
    (multiply(COMMIT + MMA), 128, NotWaited, "tensor memory written by"),
    (multiply(MMA + COMMIT + COMMIT), 128, Deadlock, "mbarrier 0 lacks 1 arrivals"),  # two phases
    (multiply(MMA.replace("@%p1", "") + COMMIT), 128, Unsupported, "by several threads"),
    (multiply(MMA + COMMIT, FILL + PUT_WAIT + "bar.sync 0;"), 128, 0, ""),
    (multiply(MMA + COMMIT, FILL + "bar.sync 0;"), 128, NotWaited, "tensor memory written by"),
    (multiply(MMA + COMMIT, FILL + PUT_WAIT), 128, NotWaited, "tensor memory written by"),
    (multiply(MMA_OF_TENSOR + COMMIT, FILL_A + PUT_WAIT + "bar.sync 0;"), 128, 0, ""),
    (multiply(MMA_OF_TENSOR + COMMIT, FILL_A + "bar.sync 0;"), 128, NotWaited, "written by"),
    (
        multiply(TWICE, FILL_A + PUT_WAIT + "bar.sync 0;", WAIT + LOAD_SUM + IS_32).replace(
            "mov.b32 %r1, 0;", ONE
        ),
        128,
        0,
        "",
    ),
    (multiply(MMA_OF_TENSOR.replace("16]", "60]")), 128, OutOfBounds, "columns 60 to 68 of 64"),
    (multiply(MMA + COMMIT).replace(FENCE, "", 2), 128, 2, ""),
    (multiply(MMA).replace(f"{SHAPE};", f"{SHAPE | 1 << 13};"), 128, Unsupported, "descriptor"),
    (multiply(MMA).replace(f"{IN_SHARED};", "1;"), 128, Unsupported, "with descriptor 0x1"),
    # Data that a product reads are overwritten before it is done, and after.
    (multiply(MMA + COMMIT, behind=ZEROS + WAIT), 128, NotWaited, "read by a product of warp 0"),
    (multiply(MMA + COMMIT, behind=WAIT + ZEROS), 128, 0, ""),
]

# Arithmetic of sm_100: 1.5 and -2.0 with 0.5 and 3.0, packed; greatest numbers of three, and of 0.
PAIRS = f"mov.b64 %rd3, {0xC0000000_3FC00000}; mov.b64 %rd4, {0x40400000_3F000000};"
TRAP = "setp.ne.{0} %p1, {1}, {2}; @%p1 trap;"
GREATEST = "mov.b32 %r1, 0x{:08X}; mov.b32 %r2, 0x{:08X}; mov.b32 %r3, 0x{:08X};"
ARITHMETIC = [
    *(
        (f"{PAIRS} {op} %rd5, {sources}; {TRAP.format('b64', '%rd5', result)}", 32, 0, "")
        for op, sources, result in (
            ("add.f32x2", "%rd3, %rd4", 0x3F800000_40000000),
            ("sub.f32x2", "%rd3, %rd4", 0xC0A00000_3F800000),
            ("mul.f32x2", "%rd3, %rd4", 0xC0C00000_3F400000),
            ("fma.rn.f32x2", "%rd3, %rd4, %rd3", 0xC1000000_40100000),
        )
    ),
    *(
        (f"{GREATEST.format(*x)} {op} {TRAP.format('b32', '%r4', result)}", 32, 0, "")
        for op, x, result in (
            # A number is greater than NaN.
            ("max.f32 %r4, %r1, %r2, %r3;", (0x3F800000, 0x7FC00000, 0x40000000), 0x40000000),
            ("max.f32 %r4, %r1, %r2, %r3;", (0x40400000, 0xC0000000, 0x40000000), 0x40400000),
            ("max.relu.s32 %r4, %r1, %r2;", (0xFFFFFFFF, 0xFFFFFFFE, 0), 0),
            ("max.relu.s32 %r4, %r1, %r2;", (0xFFFFFFFF, 7, 0), 7),
        )
    ),
    (f"{PAIRS} add.f32x2 %rd5, %rd3, %rd4; {TRAP.format('b64', '%rd5', 1)}", 32, Fault, "executed"),
]

# Of the numbers -5 to 26, one in each lane.
REDUCED = [
    (
        f"add.s32 %r1, %r0, -5; redux.sync.{op} %r2, %r1, -1; {TRAP.format('b32', '%r2', result)}",
        32,
        0,
        "",
    )
    for op, result in (
        ("min.s32", "0xFFFFFFFB"),
        ("min.u32", "0"),
        ("max.s32", "26"),
        ("max.u32", "0xFFFFFFFF"),
        ("add.s32", "336"),
    )
]


@pytest.mark.parametrize(
    ("body", "threads", "expected", "reported"),
    [
        *REFUSED,
        *REDUCED,
        *COPIES,
        *PRODUCTS,
        *REGISTERS,
        *LANES,
        *NAMED,
        *GLOBAL,
        *MOVES,
        *TENSOR_PRODUCTS,
        *ARITHMETIC,
    ],
)
def test_faults_and_missing_fences(
    body: str, threads: int, expected: type[Fault] | int, reported: str
) -> None:
    if isinstance(expected, int):
        assert run(body, threads) == expected
    else:
        with pytest.raises(expected) as found:
            run(body, threads)
        assert found.type is expected and reported in str(found.value)
