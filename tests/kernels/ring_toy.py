"""A small kernel in Gluon that hands a ring of buffers from a producer to a consumer.

Each barrier, wait and fence can be left out by its name, which the sanitizer must notice.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ring_attn.kernels.hopper_blocks import make_barriers, make_buffers, start_copy

STAGES = gl.constexpr(2)
STEPS = ("wait empty", "wait full", "arrive empty", "expect", "fence barriers", "fence reads")


@gluon.jit
def _produce(desc, buffers, full, empty, count, LEFT_OUT: gl.constexpr):
    for i in range(count):
        stage = i % STAGES
        if LEFT_OUT != "wait empty":
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        if LEFT_OUT != "expect":
            mbarrier.expect(full.index(stage), desc.block_type.nbytes)
        start_copy(desc, [i * desc.block_type.shape[0], 0], full.index(stage), buffers.index(stage))


@gluon.jit
def _consume(desc, buffers, full, empty, out_ptr, count, LEFT_OUT: gl.constexpr):
    ROWS: gl.constexpr = desc.block_type.shape[0]
    COLS: gl.constexpr = desc.block_type.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    total = gl.zeros([ROWS, COLS], gl.float32, LAYOUT)
    for i in range(count):
        stage = i % STAGES
        if LEFT_OUT != "wait full":
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        total += buffers.index(stage).load(LAYOUT).to(gl.float32)
        if LEFT_OUT != "fence reads":
            fence_async_shared()
        if LEFT_OUT != "arrive empty":
            mbarrier.arrive(empty.index(stage), count=1)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    cols = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(out_ptr + rows * COLS + cols, total)


@gluon.jit
def sum_blocks_kernel(desc, out_ptr, count, LEFT_OUT: gl.constexpr):
    """out (rows, cols) = the sum of `count` blocks of the described matrix, above each other."""
    buffers = make_buffers(desc, STAGES)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 1)
    if LEFT_OUT != "fence barriers":
        fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (desc, buffers, full, empty, out_ptr, count, LEFT_OUT)),
            (_produce, (desc, buffers, full, empty, count, LEFT_OUT)),
        ],
        [1],
        [24],
    )
