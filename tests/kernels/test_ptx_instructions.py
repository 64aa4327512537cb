"""The executor of PTX (`ptx/`): refused instructions, and fences of asynchronous ones.

The results of kernels, and faults planted into them (test_ptx.py), show that all else is right.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.ptx import matrix  # noqa: F401  (it adds its instructions)
from tests.kernels.ptx.copies import TensorMap
from tests.kernels.ptx.faults import Deadlock, Fault, NotWaited, OutOfBounds, Race, Unsupported
from tests.kernels.ptx.machine import run_grid
from tests.kernels.ptx.memory import GlobalMemory
from tests.kernels.ptx.parse import parse


def run(
    body: str,
    *,
    threads: int = 32,
    inputs: Tensor | None = None,
    head: str = "",
    tensor: Tensor | None = None,
) -> int:
    """Runs PTX; %rd2 is the address of `inputs`, %r0 the thread.

    [tensor_map] describes `tensor`, which one copy takes as a whole. Returns the number of missing
    fences.
    """
    inputs = torch.zeros(4, dtype=torch.int32) if inputs is None else inputs
    tensor = torch.zeros(16, dtype=torch.int16) if tensor is None else tensor
    text = f"""
    .visible .entry test(.param .u64 inputs, .param .b8 tensor_map[128])
    .reqntid {threads} {head}
    {{
        .reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>; .reg .b32 %f<99>;
        ld.param.b64 %rd2, [inputs];
        mov.u32 %r0, %tid.x;
        {body}
        ret;
    }}"""
    memory = GlobalMemory([inputs, tensor])
    args = {"inputs": memory.address(inputs)}
    shape, width = tensor.shape, tensor.element_size()
    tensor_map = TensorMap(memory.address(tensor), shape, tensor.stride(), width, shape, 128)
    missing = run_grid(parse(text), args, memory, 1 << 16, tensor_maps={"tensor_map": tensor_map})
    return len(missing)


def test_rows_of_a_strided_tensor_are_all_that_is_there() -> None:
    inputs = torch.zeros(4, 8, dtype=torch.int32)[:, :4]
    run("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2 + 32];", inputs=inputs)
    with pytest.raises(OutOfBounds):
        run("ld.global.b32 %r1, [%rd2 + 16];", inputs=inputs)


SOME = "setp.lt.u32 %p1, %r0, 9; @%p1 bra out;"

# The text, the number of threads, the fault and its message.
REFUSED: list[tuple[str, int, type[Fault], str]] = [
    ("ld.global.b32 %r1, [%rd2 + 16];", 32, OutOfBounds, "thread 0 is outside every allocation"),
    ("ld.global.b32 %r1, [%rd2 + 2];", 32, OutOfBounds, "no multiple of 4"),
    ("st.shared.b32 [global_smem + 65536], %r0;", 32, OutOfBounds, "allocation of shared"),
    ("shl.b32 %r1, %r0, 12; ld.shared.b32 %r2, [%r1 + 1024];", 32, OutOfBounds, "of thread 16"),
    ("add.sat.s32 %r1, %r2, %r3;", 32, Unsupported, "add.sat"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r2};", 32, Unsupported, "tf32"),
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
        return run(body, **options)
    except Fault as fault:
        return fault


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


@pytest.mark.parametrize(
    ("before", "num_bytes", "behind", "expected"),
    [
        (READ + INIT, 2048, WAIT + READ, 0),
        (INIT, 2048, READ, NotWaited),
        (INIT, 2032, WAIT + READ, Deadlock),
        (INIT.replace("fence.proxy", "// fence.proxy"), 2048, WAIT, 1),
        # Overwriting data that threads have read: the copy needs a later barrier and a fence.
        (INIT + READ + "bar.sync 0;", 2048, WAIT, 1),
        (INIT + READ, 2048, WAIT, Race),
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
