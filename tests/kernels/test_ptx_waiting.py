"""Instructions that run on by themselves, and those that wait for them, against the PTX ISA's text.

Each wait, barrier and fence is also left out, which must be found.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.ptx.faults import Deadlock, Fault, NotWaited, Race
from tests.kernels.ptx.lines import Array, half_bits, random_halves, run, swizzled

COPY = "mad.wide.u32 %rd2, %r0, 16, %rd2; shl.b32 %r1, %r0, 4; add.s32 %r1, %r1, 1024;"


def test_cp_async_fills_with_zeros() -> None:
    inputs = torch.arange(1, 33, dtype=torch.int32)[:, None].repeat(1, 4)
    ran = run(
        f"""
        {COPY}
        setp.lt.u32 %p1, %r0, 9;
        selp.b32 %r2, 16, 0, %p1;
        @!%p1 add.s64 %rd2, %rd2, 65536;
        cp.async.cg.shared.global [%r1], [%rd2], 16, %r2;
        cp.async.commit_group;
        cp.async.wait_group 0;
        ld.shared.b32 %r3, [%r1 + 12];
        st.global.b32 [%rd1], %r3;
        """,
        inputs=inputs,
    )
    assert ran.words[:, 0].tolist() == [*range(1, 10), *[0] * 23]


@pytest.mark.parametrize(
    ("behind", "fault"),
    [
        ("cp.async.wait_group 0; bar.sync 0;", None),
        ("bar.sync 0;", NotWaited),
        ("cp.async.wait_group 1; bar.sync 0;", NotWaited),
        ("cp.async.wait_group 0;", Race),
        ("bar.sync 0; cp.async.wait_group 0;", NotWaited),
    ],
)
def test_copies_are_waited_for_and_then_a_barrier_passed(
    behind: str, fault: type[Fault] | None
) -> None:
    inputs = torch.arange(64, dtype=torch.int32)[:, None].repeat(1, 4)
    body = f"""
        {COPY}
        cp.async.ca.shared.global [%r1], [%rd2], 16;
        cp.async.commit_group;
        {behind}
        xor.b32 %r2, %r1, 512;
        ld.shared.b32 %r3, [%r2];
        st.global.b32 [%rd1], %r3;
        """
    if fault is None:
        words = run(body, threads=64, inputs=inputs).words[:, 0]
        assert words.tolist() == [thread ^ 32 for thread in range(64)]
    else:
        with pytest.raises(fault):
            run(body, threads=64, inputs=inputs)


def test_barriers_by_number_and_count() -> None:
    """Warps 0 and 1 meet at one barrier, 2 and 3 at another; a third warp would be too many."""
    body = """
        shl.b32 %r1, %r0, 2;
        st.shared.b32 [%r1 + 1024], %r0;
        shr.u32 %r2, %r0, 6;
        setp.eq.b32 %p1, %r2, 0;
        @%p1 bra low;
        bar.sync 2, 64;
        bra end;
    low:
        barrier.sync 1, 64;
    end:
        xor.b32 %r3, %r1, {distance};
        ld.shared.b32 %r4, [%r3 + 1024];
        st.global.b32 [%rd1], %r4;
        """
    words = run(body.format(distance=128), threads=128).words[:, 0]
    assert words.tolist() == [thread ^ 32 for thread in range(128)]
    with pytest.raises(Race):
        run(body.format(distance=256), threads=128)
    with pytest.raises(Fault, match="128 threads come to a barrier of 64"):
        run("bar.sync 0, 64;", threads=128)
    with pytest.raises(Deadlock):
        run("bar.sync 0, 64;")


def test_two_writers_of_one_place() -> None:
    with pytest.raises(Race, match="different values"):
        run("st.shared.b32 [global_smem], %r0;")
    run("mov.b32 %r1, 5; st.shared.b32 [global_smem], %r1;", threads=64)


INIT = """
    setp.eq.b32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [global_smem], {count};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    """


def waits(parity: int, name: str = "again") -> str:
    return f"""
    {name}:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [global_smem], {parity};
    @!%p2 bra {name};
    """


def test_mbarrier_phases() -> None:
    """A fresh one has completed the phase of parity 1; each phase needs all its arrivals."""
    arrive = "mbarrier.arrive.shared::cta.b64 _, [global_smem];"
    start = INIT.format(count=32)
    run(start + waits(1))
    run(start + arrive + waits(0) + arrive + waits(1, "more"))
    for wrong in (waits(0), arrive + waits(1), "@%p1 " + arrive + waits(0)):
        with pytest.raises(Deadlock, match="try_wait"):
            run(start + wrong)
    with pytest.raises(Fault, match="64 arrivals where 32"):
        run(start + arrive, threads=64)
    with pytest.raises(Race):
        run(INIT.format(count=32).replace("bar.sync 0;", "") + waits(1), threads=64)


@pytest.mark.parametrize(("mode", "cols"), [(0, 64), (1, 16), (2, 32), (3, 64)])
def test_bulk_tensor_copies(mode: int, cols: int) -> None:
    """A box that juts out of the tensor by 3 rows: zeros, which count as bytes."""
    shape = (2, 40, 3, 2 * cols)
    tensor = torch.arange(2 * 40 * 3 * 2 * cols, dtype=torch.int32).to(torch.int16).view(shape) + 1
    num_bytes = 16 * cols * 2
    body = f"""
        {INIT.format(count=1)}
        mov.b64 %rd3, tensor_map;
        cvta.param.u64 %rd3, %rd3;
        mov.b32 %r5, {cols}; mov.b32 %r6, 2; mov.b32 %r7, 27; mov.b32 %r8, 1;
        @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [global_smem], {num_bytes};
        @%p1 cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes
            [global_smem + 1024], [%rd3, {{%r5, %r6, %r7, %r8}}], [global_smem];
        """
    copy = """
        shl.b32 %r1, %r0, 2; add.s32 %r1, %r1, 2048;
        ld.shared.b32 %r2, [%r1]; st.global.b32 [%rd1], %r2;
        """
    options = {
        "threads": num_bytes // 4,
        "tensor": tensor,
        "box": (1, 16, 1, cols),
        "swizzle": mode,
    }
    ran = run(body + waits(0) + copy, **options)
    assert ran.missing_fences == 0
    found = ran.words.ravel().view(np.uint8)
    expected = np.zeros((16, cols), np.int16)
    expected[:13] = tensor[1, 27:, 2, cols:].numpy()
    for i, byte in enumerate(expected.view(np.uint8).ravel()):
        assert found[swizzled(i, mode)] == byte
    with pytest.raises(NotWaited, match="a bulk copy of mbarrier 0"):
        run(body + copy, **options)
    with pytest.raises(Deadlock):
        run(body.replace(f"], {num_bytes}", f"], {num_bytes - 16}") + waits(0) + copy, **options)
    assert run(body.replace("fence.proxy", "// fence.proxy") + waits(0), **options).missing_fences


def test_a_bulk_copy_over_what_threads_have_read() -> None:
    """It needs a barrier since, and a fence."""
    tensor = torch.zeros(16, 64, dtype=torch.int16)
    read = "shl.b32 %r1, %r0, 2; ld.shared.b32 %r2, [%r1 + 2048];"
    body = f"""
        {{before}}
        mov.b64 %rd3, tensor_map;
        mov.b32 %r5, 0;
        @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [global_smem], 2048;
        @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
            [global_smem + 1024], [%rd3, {{{{%r5, %r5}}}}], [global_smem];
        {waits(0)}
        """
    options = {"threads": 64, "tensor": tensor, "box": (16, 64), "swizzle": 0}
    start = INIT.format(count=1)
    assert run(body.format(before=read + start), **options).missing_fences == 0
    late = start + read + "bar.sync 0;"
    assert run(body.format(before=late), **options).missing_fences == 1
    with pytest.raises(Race):
        run(body.format(before=start + read), **options)


# -- products of a warpgroup

WIDTHS = {1: 32, 2: 64, 3: 128}


def image(matrix: Array, mode: int, transposed: bool) -> tuple[Array, int, int]:
    """Bytes of a (rows, 16) operand, with its leading and stride offsets.

    ISA: groups of 8 swizzled rows. Not transposed, a row of the matrix begins each; transposed, a
    step of K does, and wider matrices go on in the next panel.
    """
    rows, depth = matrix.shape
    width = WIDTHS[mode]
    there = width // 2
    panel = depth // 8 * 8 * width
    found = np.zeros(max(rows * width, -(-rows // there) * panel), np.uint8)
    for row in range(rows):
        for k in range(depth):
            if transposed:
                at = row // there * panel + k * width + row % there * 2
            else:
                at = row * width + k * 2
            # In a narrower swizzle 128 bytes have several rows.
            pair = half_bits(matrix[row, k : k + 1], "bf16").view(np.uint8)
            for byte in range(2):
                found[swizzled(at + byte, mode)] = pair[byte]
    return found, panel, 8 * width


def descriptor(start: int, leading: int, stride: int, mode: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | {3: 1, 2: 2, 1: 3}[mode] << 62


def product(
    images: list[tuple[Array, int, int]], modes: list[int], transposed: list[bool], cols: int
) -> tuple[str, dict[str, object]]:
    """PTX that multiplies operands in shared memory, and what `run` needs for it."""
    sizes = [-(-x[0].size // 2048) * 2048 for x in images]
    data = np.zeros(sum(sizes), np.uint8)
    data[: images[0][0].size] = images[0][0]
    data[sizes[0] : sizes[0] + images[1][0].size] = images[1][0]
    starts = (1024, 1024 + sizes[0])
    a, b = (
        descriptor(start, x[1], x[2], mode)
        for start, x, mode in zip(starts, images, modes, strict=True)
    )
    copies = "".join(
        f"ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd2 + {i}];"
        f"st.shared.v4.b32 [%r5 + {i + 1024}], {{%r1, %r2, %r3, %r4}};"
        for i in range(0, data.size, 2048)
    )
    registers = ", ".join(f"%f{i}" for i in range(cols // 2))
    flags = ", ".join(str(int(x)) for x in transposed)
    body = f"""
        mad.wide.u32 %rd2, %r0, 16, %rd2;
        shl.b32 %r5, %r0, 4;
        {copies}
        fence.proxy.async.shared::cta;
        bar.sync 0;
        mov.b64 %rd3, {a};
        mov.b64 %rd4, {b};
        mov.pred %p1, -1;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.bf16.bf16
            {{{registers}}}, %rd3, %rd4, 0, 1, 1, {flags};
        wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.bf16.bf16
            {{{registers}}}, %rd3, %rd4, %p1, 1, 1, {flags};
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        """
    for i in range(cols // 2):
        body += f"st.global.b32 [%rd1 + {4 * i}], %f{i};"
    inputs = torch.from_numpy(data.view(np.int32).reshape(-1, 4))
    return body, {"threads": 128, "words": cols // 2, "inputs": inputs}


CASES = [(m, t, u) for m in WIDTHS for t in (False, True) for u in (False, True)]


@pytest.mark.parametrize(("mode", "a_transposed", "b_transposed"), CASES)
def test_wgmma_of_shared_memory(mode: int, a_transposed: bool, b_transposed: bool) -> None:
    """Twice the product of 64 x 16 and 16 x 128, and D by the ISA's formula."""
    cols = 128
    a, b = random_halves(64, 16), random_halves(cols, 16, seed=1)
    images = [image(a, mode, a_transposed), image(b, mode, b_transposed)]
    body, options = product(images, [mode, mode], [a_transposed, b_transposed], cols)
    ran = run(body, **options)
    assert ran.missing_fences == 0
    d, found = 2 * a @ b.T, ran.words.copy().view(np.float32)
    for thread in range(128):
        row = 16 * (thread // 32) + thread % 32 // 4
        for i in range(cols // 2):
            col = 8 * (i // 4) + 2 * (thread % 4) + i % 2
            assert found[thread, i] == d[row + 8 * (i // 2 % 2), col]


def small_product() -> tuple[str, dict[str, object]]:
    operands = [image(random_halves(rows, 16), 3, False) for rows in (64, 8)]
    return product(operands, [3, 3], [False, False], 8)


def test_wgmma_reads_what_is_fenced() -> None:
    body, options = small_product()
    assert run(body, **options).missing_fences == 0
    assert run(body.replace("fence.proxy", "// fence.proxy"), **options).missing_fences == 2
    # The fence may also stand behind the barrier.
    later = body.replace("fence.proxy.async.shared::cta;", "").replace(
        "mov.b64 %rd3", "fence.proxy.async; mov.b64 %rd3"
    )
    assert run(later, **options).missing_fences == 0
    # But not before the writes.
    before = body.replace("fence.proxy.async.shared::cta;", "")
    assert run("fence.proxy.async;" + before, **options).missing_fences == 2
    with pytest.raises(Race):
        run(body.replace("bar.sync 0;", ""), **options)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("wait_group.sync.aligned 0;", "commit_group.sync.aligned;", "has not been waited for"),
        ("wait_group.sync.aligned 0", "wait_group.sync.aligned 1", "has not been waited for"),
        ("wgmma.fence.sync.aligned;", "", "no wgmma.fence before it"),
        ("wgmma.fence.sync.aligned;", "mov.b32 %f0, 0;", "no wgmma.fence"),
        ("wgmma.commit", "mov.b32 %f3, 0; wgmma.commit", "%f3 belongs to a wgmma"),
        ("wgmma.wait", "st.shared.b32 [%r5 + 1024], %r0; wgmma.wait", "read by a wgmma of warp"),
        (
            "wgmma.commit_group",
            "setp.lt.u32 %p2, %r0, 32; @%p2 wgmma.commit_group",
            "has not been waited for",
        ),
    ],
)
def test_wgmma_is_waited_for(old: str, new: str, reason: str) -> None:
    body, options = small_product()
    with pytest.raises(Fault, match=reason):
        run(body.replace(old, new), **options)


def test_registers_come_from_a_pool() -> None:
    """128 of each thread: one warpgroup can have 168 once the other has gone down to 88."""
    up, down = (f"setmaxnreg.{word}.sync.aligned.u32" for word in ("inc", "dec"))
    body = """
        setp.lt.u32 %p1, %r0, 128;
        @%p1 bra low;
        {high};
        bra end;
    low:
        {low};
    end:
        bar.sync 0;
        """
    options = {"threads": 256, "head": ".maxnreg 128"}
    run(body.format(low=f"{up} 168", high=f"{down} 88"), **options)
    with pytest.raises(Deadlock, match="setmaxnreg.inc"):
        run(body.format(low=f"{up} 176", high=f"{down} 88"), **options)
    with pytest.raises(Fault, match="warps have"):
        run(body.format(low=f"{up} 120", high=f"{down} 88"), **options)
    with pytest.raises(Fault, match="other numbers of registers"):
        run(body.replace("128;", "96;").format(low=f"{down} 96", high=f"{down} 88"), **options)
