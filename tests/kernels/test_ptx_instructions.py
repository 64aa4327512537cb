"""Each instruction that `ptx/` executes, by itself, against the PTX ISA's text."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.kernels.ptx.faults import Fault, OutOfBounds, Unsupported
from tests.kernels.ptx.lines import half_bits, random_halves, run
from tests.kernels.ptx.scalar import COMPARISONS, DTYPES, RULES

NAN, INF = 0x7FC00000, 0x7F800000
# Of each size in bytes: the kind of register and its name.
REGISTERS = {1: "%p", 2: "%rs", 4: "%r", 8: "%rd"}


# -- instructions of one thread


def result_of(opcode: str, operands: Sequence[int]) -> int:
    """The bits that an instruction of RULES makes of immediates."""
    rule = RULES[opcode]
    names = []
    lines = []
    for i, (kind, value) in enumerate(zip(rule.sources, operands, strict=True), 10):
        size = DTYPES[kind].itemsize
        name = f"{REGISTERS[size]}{i if size > 1 else i - 9}"
        lines.append(f"mov.{'pred' if size == 1 else f'b{8 * size}'} {name}, {value};")
        names.append(name)
    size = DTYPES[rule.result].itemsize
    name = f"{REGISTERS[size]}{20 if size > 1 else 8}"
    lines.append(f"{opcode} {name}, {', '.join(names)};")
    if size == 1:
        lines.append(f"selp.b32 %r30, 1, 0, {name}; st.global.b32 [%rd1], %r30;")
    else:
        lines.append(f"st.global.b{8 * size} [%rd1], {name};")
    words = run("\n".join(lines), words=2).words
    assert (words == words[0]).all()
    return int(words[0].copy().view(np.uint64)[0])


CASES: list[tuple[str, tuple[int, ...], int]] = [
    ("add.s32", (0x7FFFFFFF, 1), 0x80000000),
    ("add.s64", (2**63 - 1, 1), 2**63),
    ("sub.s32", (0, 1), 0xFFFFFFFF),
    ("sub.f32", (0x3F800000, 0x40000000), 0xBF800000),
    ("mul.lo.s64", (2**33, 2**31), 0),
    ("mad.lo.s64", (2**33, 2**31, 7), 7),
    ("mul.wide.u32", (0xFFFFFFFF, 2), 0x1FFFFFFFE),
    ("and.b16", (0xF0F0, 0xFF), 0xF0),
    ("cvt.u16.u32", (0x12345,), 0x2345),
    ("selp.b16", (7, 8, 0), 8),
    ("selp.f32", (0x3F800000, 0, 1), 0x3F800000),
    ("setp.ne.b32", (1, 2), 1),
    ("setp.ne.b64", (1, 1), 0),
    ("max.u32", (-1, 1), 0xFFFFFFFF),
    ("mul.lo.s32", (0x10001, 0x10001), 0x20001),
    ("mul.hi.s32", (-2, 3), 0xFFFFFFFF),
    ("mul.hi.u32", (0xFFFFFFFF, 2), 1),
    ("mul.wide.s32", (-2, 3), 2**64 - 6),
    ("mul.wide.u16", (0xFFFF, 0xFFFF), 0xFFFE0001),
    ("mad.lo.s32", (3, 4, -5), 7),
    ("mad.wide.s32", (-3, 4, 5), 2**64 - 7),
    ("mad.wide.u32", (0xFFFFFFFF, 2, 1), 0x1FFFFFFFF),
    ("div.s32", (-7, 2), 2**32 - 3),
    ("rem.s32", (-7, 2), 2**32 - 1),
    ("min.s32", (-1, 1), 0xFFFFFFFF),
    ("min.u32", (-1, 1), 1),
    ("max.s32", (-1, 1), 1),
    ("neg.s32", (5,), 2**32 - 5),
    ("and.b32", (0b1100, 0b1010), 0b1000),
    ("or.b32", (0b1100, 0b1010), 0b1110),
    ("xor.b64", (0b1100, 0b1010), 0b0110),
    ("not.b32", (0,), 0xFFFFFFFF),
    ("and.pred", (1, 0), 0),
    ("shl.b32", (1, 31), 1 << 31),
    ("shl.b32", (1, 32), 0),  # shifts are clamped to the width, not taken modulo it
    ("shl.b64", (3, 63), 1 << 63),
    ("shr.u32", (0x80000000, 40), 0),
    ("shr.s32", (0x80000000, 40), 0xFFFFFFFF),
    ("bfe.u32", (0xABCD, 4, 8), 0xBC),
    ("bfe.u32", (0x80000000, 28, 8), 8),
    ("bfe.s32", (0xF0, 4, 4), 0xFFFFFFFF),
    ("bfe.s32", (0x80000000, 28, 8), 0xFFFFFFF8),
    ("bfe.s32", (0x80000000, 4, 0), 0),
    ("selp.b32", (7, 8, 1), 7),
    ("selp.b32", (7, 8, 0), 8),
    ("setp.lt.s32", (-1, 0), 1),
    ("setp.lt.u32", (-1, 0), 0),
    ("setp.lt.f32", (NAN, 0), 0),
    ("setp.ne.f32", (NAN, NAN), 0),
    ("setp.neu.f32", (NAN, NAN), 1),
    ("cvt.s64.s32", (-1,), 2**64 - 1),
    ("cvt.u64.u32", (-1,), 2**32 - 1),
    ("cvt.u32.u64", (2**40 + 5,), 5),
    ("cvt.rn.f32.s32", (2**24 + 1,), 0x4B800000),  # halfway: to the even one
    ("cvt.rn.bf16.f32", (0x3F808000,), 0x3F80),  # halfway: to the even one
    ("cvt.rn.bf16.f32", (0x3F818000,), 0x3F82),
    ("cvt.rn.bf16.f32", (0x3F808001,), 0x3F81),
    ("cvt.rn.bf16.f32", (NAN + 1,), 0x7FFF),
    ("cvt.rn.bf16.f32", (0x7F7FFFFF,), 0x7F80),
    ("cvt.rn.f16.f32", (0x3F801000,), 0x3C00),
    ("cvt.rn.f16.f32", (NAN,), 0x7FFF),
    ("cvt.rn.bf16x2.f32", (0x3F800000, 0x40000000), 0x3F804000),  # the first is the upper half
    ("cvt.rn.f16x2.f32", (0x3F800000, 0x40000000), 0x3C004000),
    ("cvt.f32.bf16", (0x3F81,), 0x3F810000),
    ("cvt.f32.f16", (0x3C01,), 0x3F802000),
    ("add.f32", (0x3F800000, 0x33800000), 0x3F800000),
    ("mul.f32", (0x00800000, 0x3F000000), 0x00400000),  # subnormal numbers are kept
    ("mul.ftz.f32", (0x80800000, 0x3F000000), 0x80000000),
    ("fma.rn.ftz.f32", (0x00400000, 0x7F000000, 0), 0),
    ("max.f32", (NAN, 0x3F800000), 0x3F800000),
    ("max.f32", (0x80000000, 0), 0),
    ("min.f32", (0, 0x80000000), 0x80000000),
    ("abs.f32", (0xBF800000,), 0x3F800000),
    ("neg.f32", (0,), 0x80000000),
    ("ex2.approx.ftz.f32", (0xC3000000,), 0),  # 2^-128
    ("ex2.approx.ftz.f32", (0xFF800000,), 0),
    ("ex2.approx.f32", (0x40400000,), 0x41000000),
    ("lg2.approx.f32", (0x41000000,), 0x40400000),
    ("div.full.f32", (0x40C00000, 0x40000000), 0x40400000),
    ("div.full.f32", (0x3F800000, 0), INF),
]  # fmt: skip


@pytest.mark.parametrize(("opcode", "operands", "expected"), CASES)
def test_bits(opcode: str, operands: tuple[int, ...], expected: int) -> None:
    assert result_of(opcode, operands) == expected, opcode


COMPARED = [(kind, name) for kind in ("s32", "u32", "s64", "u64", "f32") for name in COMPARISONS]


@pytest.mark.parametrize(("kind", "name"), COMPARED)
def test_comparisons(kind: str, name: str) -> None:
    compare = getattr(operator, name)
    for a in (-1, 0, 1):
        for b in (-1, 0, 1):
            values = np.array([a, b]).astype(DTYPES[kind])
            bits = [int(x) for x in values.view(f"u{values.itemsize}")]
            expected = compare(*values.tolist())
            assert result_of(f"setp.{name}.{kind}", bits) == expected, (a, b)


def nearest(x: Fraction) -> int:
    """Bits of the float32 that is nearest to a fraction; of two the even one."""
    guess = np.float32(float(x))
    around = [np.nextafter(guess, np.float32(side)) for side in (-np.inf, np.inf)]
    near = [guess, *around]
    best = min(near, key=lambda y: (abs(Fraction(float(y)) - x), int(y.view(np.uint32)) & 1))
    return int(best.view(np.uint32))


def test_fma_rounds_once() -> None:
    """Also where the sum's rounding to float64 would be a tie that its fraction decides."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal((3, 4000)) * 2.0 ** rng.integers(-40, 40, (3, 4000))).astype(
        "f4"
    )
    # 1 + 2^-24 is a tie of float32, and 2^-60 above it, which float64 does not hold.
    a[0], b[0], c[0] = 1 + 2**-12, 2**-12, 1.0
    a[1], b[1], c[1] = 2**-30, 2**-30, np.float32(1 + 2**-23)
    a[2], b[2], c[2] = 2**-25 * (1 + 2**-23), np.float32(2.0), np.float32(1.0)
    found = RULES["fma.rn.f32"].function(a, b, c).view(np.uint32)
    for i in range(a.size):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        assert found[i] == nearest(exact), i


# -- registers and memory


def test_parts_of_registers() -> None:
    ran = run(
        """
        mov.b32 %r10, 0x12345678;
        mov.b32 {%rs1, %rs2}, %r10;
        mov.b32 %r11, {%rs2, %rs1};
        mov.b64 %rd3, {%r10, %r11};
        st.global.b64 [%rd1], %rd3;
        """,
        words=2,
    )
    assert ran.words[0].tolist() == [0x12345678, 0x56781234]


def test_loads_extend_and_vectors_begin_with_the_lowest() -> None:
    inputs = torch.tensor([-2, 5, 6, 7], dtype=torch.int32)
    ran = run(
        """
        ld.global.s8 %r10, [%rd2];
        ld.global.b8 %r11, [%rd2];
        ld.global.v2.b32 {%r12, %r13}, [%rd2 + 8];
        st.shared.v4.b32 [global_smem], {%r10, %r11, %r12, %r13};
        ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [global_smem];
        st.global.v4.b32 [%rd1], {%r20, %r21, %r22, %r23};
        ld.param.s32 %rd3, [minus_five];
        ld.param.b32 %r24, [minus_five];
        mov.b32 {%rs1, %rs2}, %r24;
        st.shared.v2.b16 [global_smem + 16], {%rs2, %rs1};
        bar.warp.sync -1;
        ld.shared.b8 %r25, [global_smem + 18];
        ld.shared.v2.b32 {%r26, %r27}, [global_smem + 16];
        st.global.v2.b32 [%rd1 + 16], {%r25, %r26};
        st.global.b64 [%rd1 + 24], %rd3;
        """,
        words=8,
        inputs=inputs,
    )
    minus_five = [0xFB, 0xFFFBFFFF, 2**32 - 5, 2**32 - 1]
    assert ran.words[0].tolist() == [2**32 - 2, 254, 6, 7, *minus_five]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("ld.global.b32 %r1, [%rd2 + 16];", "thread 0 is outside every allocation of global"),
        ("ld.global.b32 %r1, [%rd2 + -4];", "outside every allocation"),
        ("ld.global.v2.b32 {%r1, %r2}, [%rd2 + 12];", "outside every allocation"),
        ("ld.global.b32 %r1, [%rd2 + 2];", "no multiple of 4"),
        ("st.shared.b32 [global_smem + 65536], %r0;", "allocation of shared"),
        ("shl.b32 %r1, %r0, 12; ld.shared.b32 %r2, [%r1 + 1024];", "of thread 16 is outside"),
    ],
)
def test_addresses_have_bounds(line: str, reason: str) -> None:
    with pytest.raises(OutOfBounds, match=reason) as found:
        run(line)
    assert line.split(";")[-2].strip() in str(found.value)


def test_rows_of_a_strided_tensor_are_all_that_is_there() -> None:
    inputs = torch.zeros(4, 8, dtype=torch.int32)[:, :4]
    run("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2 + 32];", inputs=inputs)
    with pytest.raises(OutOfBounds):
        run("ld.global.b32 %r1, [%rd2 + 16];", inputs=inputs)


@pytest.mark.parametrize(
    "line",
    [
        "add.sat.s32 %r1, %r2, %r3;",
        "red.global.add.f32 [%rd1], %r1;",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r2}, {%r3}, {%r4};",
        "tcgen05.wait::ld.sync.aligned;",
        "shfl.sync.idx.b32 %r1, %r2, 0, 31, 0xffff;",
        "cp.async.cg.shared.global [global_smem], [%rd2], 4;",
        "mov.u32 %r1, %clock;",
    ],
)
def test_what_cannot_be_executed_is_named(line: str) -> None:
    with pytest.raises(Unsupported) as found:
        run(line)
    assert line[:-1] in str(found.value)


# -- threads that part


def test_threads_part_and_meet_again() -> None:
    """A loop of as many passes as the thread has number, and a warp's exchange behind it."""
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


def test_a_branch_by_index_and_guards() -> None:
    ran = run("""
        and.b32 %r1, %r0, 1;
        setp.eq.b32 %p1, %r0, 3;
        list: .branchtargets even, odd;
        brx.idx %r1, list;
    even:
        mov.b32 %r2, 100;
        bra end;
    odd:
        mov.b32 %r2, 200;
    end:
        @%p1 mov.b32 %r2, 7;
        @!%p1 add.s32 %r2, %r2, 1;
        st.global.b32 [%rd1], %r2;
        """)
    assert ran.words[:4, 0].tolist() == [101, 201, 101, 7]


def test_an_index_beyond_the_labels() -> None:
    with pytest.raises(Fault, match="an index of 31 into 1 labels"):
        run("list: .branchtargets one; brx.idx %r0, list; one:")


@pytest.mark.parametrize("line", ["bar.sync 0;", "shfl.sync.bfly.b32 %r3, %r0, 1, 31, -1;"])
def test_a_part_of_a_warp_is_not_enough(line: str) -> None:
    with pytest.raises(Fault, match="part of a warp"):
        run(f"setp.lt.u32 %p1, %r0, 9; @%p1 bra out; {line} out:")


# -- lanes


def shuffled(mode: str, lane: int, b: int, c: int) -> int:
    """The ISA's pseudocode of shfl."""
    segment, clamp = c >> 8 & 31, c & 31
    most, least = (lane & segment) | (clamp & ~segment), lane & segment
    if mode == "up":
        return lane - b if lane - b >= most else lane
    at = {"down": lane + b, "bfly": lane ^ b, "idx": least | (b & ~segment)}[mode]
    return at if at <= most else lane


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize(("b", "c"), [(1, 31), (16, 31), (3, 0x1807), (0, 31)])
def test_shuffles(mode: str, b: int, c: int) -> None:
    if mode == "up":
        c &= 0x1F00  # a clamp of 0, as compilers give it
    ran = run(f"shfl.sync.{mode}.b32 %r1, %r0, {b}, {c}, -1; st.global.b32 [%rd1], %r1;")
    assert ran.words[:, 0].tolist() == [shuffled(mode, lane, b, c) for lane in range(32)]


def test_one_lane_of_a_warp_is_elected() -> None:
    ran = run(
        "elect.sync %r1|%p1, -1; selp.b32 %r2, 1, 0, %p1; st.global.b32 [%rd1], %r2;", threads=64
    )
    assert ran.words.reshape(2, 32).sum(1).tolist() == [1, 1]


# -- matrices of a warp


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma(kind: str) -> None:
    """Fragments by the ISA's formulas for each lane and element."""
    a, b, c = random_halves(16, 16), random_halves(16, 8, seed=1), random_halves(16, 8, seed=2)
    words = np.zeros((32, 10), np.uint32)
    for lane in range(32):
        group, t = lane >> 2, lane % 4
        a_of = [
            a[group if i in (0, 1, 4, 5) else group + 8, 2 * t + (i & 1) + (8 if i >= 4 else 0)]
            for i in range(8)
        ]
        b_of = [b[2 * t + (i & 1) + (8 if i >= 2 else 0), group] for i in range(4)]
        c_of = [c[group if i < 2 else group + 8, 2 * t + (i & 1)] for i in range(4)]
        halves = half_bits(np.array([*a_of, *b_of]), kind)
        words[lane] = [*halves.view(np.uint32), *np.array(c_of, np.float32).view(np.uint32)]
    loads = "".join(f"ld.global.b32 %r{i + 10}, [%rd2 + {4 * i}];" for i in range(10))
    ran = run(
        f"""
        mad.wide.u32 %rd2, %r0, 40, %rd2;
        {loads}
        mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32
            {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}},
            {{%r16, %r17, %r18, %r19}};
        st.global.v4.b32 [%rd1], {{%r20, %r21, %r22, %r23}};
        """,
        words=4,
        inputs=torch.from_numpy(words.view(np.int32)),
    )
    d = a @ b + c
    for lane in range(32):
        row, col = lane >> 2, 2 * (lane % 4)
        expected = [d[row, col], d[row, col + 1], d[row + 8, col], d[row + 8, col + 1]]
        assert ran.words[lane].copy().view(np.float32).tolist() == expected


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_ldmatrix_and_stmatrix(num: int, transposed: bool) -> None:
    """Rows of 16 bytes at 32 bytes from each other; what is stored again stands where it was."""
    suffix = ".trans" if transposed else ""
    registers = ", ".join(f"%r{20 + i}" for i in range(num))
    ran = run(
        f"""
        shl.b32 %r1, %r0, 5;
        add.s32 %r1, %r1, 1024;
        shl.b32 %r2, %r0, 4;
        st.shared.v4.b32 [%r1], {{%r2, %r2, %r2, %r2}};
        add.s32 %r3, %r2, 65537; st.shared.b32 [%r1 + 4], %r3;
        ldmatrix.sync.aligned.m8n8.x{num}{suffix}.shared.b16 {{{registers}}}, [%r1];
        stmatrix.sync.aligned.m8n8.x{num}{suffix}.shared.b16 [%r1 + 8192], {{{registers}}};
        ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r1 + 8192];
        ld.shared.v4.b32 {{%r8, %r9, %r10, %r11}}, [%r1];
        st.global.v4.b32 [%rd1], {{{", ".join(f"%r{20 + min(i, num - 1)}" for i in range(4))}}};
        st.global.v4.b32 [%rd1 + 16], {{%r4, %r5, %r6, %r7}};
        st.global.v4.b32 [%rd1 + 32], {{%r8, %r9, %r10, %r11}};
        """,
        words=12,
    ).words
    rows = ran[:, 8:].copy().view(np.uint16)  # of each thread
    assert (ran[: 8 * num, 4:8] == ran[: 8 * num, 8:]).all()
    for matrix in range(num):
        element = rows[8 * matrix : 8 * matrix + 8]
        element = element.T if transposed else element
        for lane in range(32):
            pair = element[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
            assert ran[lane, matrix] == int(pair[0]) | int(pair[1]) << 16
