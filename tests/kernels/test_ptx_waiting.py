"""Waits, barriers and fences of asynchronous instructions: the executor finds omitted ones.

The results of kernels (test_ptx.py) show that those instructions do what they must.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.ptx.faults import Deadlock, Fault, NotWaited, Race
from tests.kernels.ptx.lines import run


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
