"""Parts of the Gluon kernels for sm_90: products, masks, softmax, rows of state, shared memory.

The kernels, with their warps and barriers, are in `hopper_fwd` and `hopper_bwd`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .launch import Traced
from .online_softmax import softmax_pivot, tanh
from .turn_table import load_visited

# Rows of a warpgroup's products.
ROWS = gl.constexpr(64)

# Each by its name in triton 3.9, or by its older name.
_memory = gl.shared_memory_descriptor
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret
start_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


# Named tuples, which triton passes like other tuples, and not its aggregates: a field of an
# aggregate has one type, but triton turns an argument that is 1 or None into a constant.
class BufferRing(NamedTuple):
    """Buffers in shared memory that one side fills and the other frees, alternately."""

    buffers: Traced  # (stages, *block)
    full: Traced  # a barrier for each buffer, which completes when the buffer has been filled
    empty: Traced  # the same, when the buffer is free again


class BlockRows(NamedTuple):
    """ROWS rows from `row` on, as far as `row_stop`, of a head of (batch, rows, heads, dim)."""

    batch: Traced
    head: Traced
    row: Traced
    row_stop: Traced
    num_rows: Traced
    num_heads: Traced


class Flags(NamedTuple):
    """Values of a launch that its blocks use."""

    HAS_LO: Traced
    HAS_HI: Traced
    RAGGED: Traced  # runs begin or end within a block of columns
    SOFTCAP: Traced = False
    PARTIAL: Traced = False  # the same of blocks of rows
    ONE_ABOVE: Traced = False  # of a run's columns, only the last block may need a mask above


@gluon.jit
def await_full(ring, use):
    """Waits until a ring's buffer has been filled for its `use`; returns the buffer's index."""
    STAGES: gl.constexpr = ring.buffers.shape[0]
    mbarrier.wait(ring.full.index(use % STAGES), (use // STAGES) & 1)
    return use % STAGES


@gluon.jit
def await_empty(ring, use):
    """Waits until a ring's buffer is free for its `use`; returns the buffer's index."""
    STAGES: gl.constexpr = ring.buffers.shape[0]
    mbarrier.wait(ring.empty.index(use % STAGES), ((use // STAGES) & 1) ^ 1)
    return use % STAGES


@gluon.jit
def clear_outside(buffer, start, run):
    """Zeroes the rows of a block (1, BLOCK_N, 1, HEAD_DIM_V) that are outside the run.

    Copies leave the block in shared memory in swizzled pieces of 8 rows x 64 dims: first all pieces
    of the first 64 dims, then of the next.
    """
    BLOCK_N: gl.constexpr = buffer.shape[1]
    PIECES: gl.constexpr = BLOCK_N * buffer.shape[3] // (8 * 64)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    pieces = reinterpret(buffer, buffer.dtype, [PIECES, 8, 64], SHARED)
    for i in range(PIECES):
        first = start + (8 * i) % BLOCK_N
        if (first < run[0]) | (first + 8 > run[1]):
            rows = first + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
            inside = (rows >= run[0]) & (rows < run[1])
            x = pieces.index(i).load(LAYOUT)
            pieces.index(i).store(gl.where(inside[:, None], x, gl.zeros_like(x)))


@gluon.jit
def fill_rows(desc, coord, buffer, full, landed, start, run, uses, RAGGED: gl.constexpr):
    """Copies a block of rows, with zeros for rows outside the run, and completes `full`.

    To zero such rows the producer itself waits for the copy, by `landed`. Returns the next `uses`.
    """
    whole = (start >= run[0]) & (
        (start + desc.block_type.shape[1] <= run[1]) | (run[1] >= desc.shape[1])
    )
    if whole or not RAGGED:
        mbarrier.expect(full, desc.block_type.nbytes)
        start_copy(desc, coord, full, buffer)
    else:
        mbarrier.expect(landed, desc.block_type.nbytes)
        start_copy(desc, coord, landed, buffer)
        mbarrier.wait(landed, uses & 1)
        uses += 1
        clear_outside(buffer, start, run)
        fence_async_shared()
        mbarrier.arrive(full, count=1)
    return uses


@gluon.jit
def opaque_zero(x):
    """0, unknown to the compiler, which therefore does not move computations that depend on it."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def issue_scores(q, k_buffers, stage, rows):
    """Starts S = Q K' in the layout of `rows`; returns the argument of `warpgroup_mma_wait`."""
    BLOCK_N: gl.constexpr = k_buffers.shape[2]
    HEAD_DIM: gl.constexpr = k_buffers.shape[4]
    k = k_buffers.index(stage).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
    S_LAYOUT: gl.constexpr = rows.type.layout.parent
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    return warpgroup_mma(q, k, s, use_acc=False, is_async=True)


@gluon.jit
def issue_output(p, v_buffers, stage, acc):
    """Starts acc += P V; returns the argument of `warpgroup_mma_wait`."""
    BLOCK_N: gl.constexpr = v_buffers.shape[2]
    HEAD_DIM_V: gl.constexpr = v_buffers.shape[4]
    v = v_buffers.index(stage).reshape([BLOCK_N, HEAD_DIM_V])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def mask_scores(s, rows, first, run, FLAGS: gl.constexpr):
    """s (ROWS, BLOCK_N) with -inf where a row does not see a column; see `visible_pairs`.

    rows (ROWS,), `first` the block's first column. A column is split into a multiple of 8, which is
    a constant in each thread, and the rest: whole column numbers would occupy registers over all
    loops.
    """
    RAGGED: gl.constexpr = FLAGS.RAGGED
    rows, start, stop, lo, hi = rows - first, run[0] - first, run[1] - first, run[2], run[3]
    BLOCK_N: gl.constexpr = s.shape[1]
    LAYOUT: gl.constexpr = s.type.layout
    s = s.reshape([s.shape[0], BLOCK_N // 8, 8])
    PARTS: gl.constexpr = s.type.layout
    rows = gl.convert_layout(rows, gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))[:, None][:, :, None]
    eights = 8 * gl.arange(0, BLOCK_N // 8, gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))
    eights = eights[None, :][:, :, None]
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))[None, :][:, None, :]
    if FLAGS.HAS_HI:
        above = gl.minimum(rows + hi + 1, stop) - within
        s = gl.where(eights < above, s, float("-inf"))
    elif RAGGED:
        s = gl.where(eights < stop - within, s, float("-inf"))
    if FLAGS.HAS_LO:
        below = gl.maximum(rows + lo, start) - within
        s = gl.where(eights >= below, s, float("-inf"))
    elif RAGGED:
        s = gl.where(eights >= start - within, s, float("-inf"))
    return gl.convert_layout(s.reshape([s.shape[0], BLOCK_N]), LAYOUT, assert_trivial=True)


@gluon.jit
def softmax(s, m_i, l_i, rows, start, run, scales, FLAGS: gl.constexpr, MASK: gl.constexpr):
    """`online_softmax_update` without its product: returns p, alpha, m_i and l_i.

    s (ROWS, BLOCK_N) raw products, m_i l_i rows (ROWS,), all float32 but rows. MASK: this block has
    a mask. scales: from `flash_fwd.scales`.
    """
    SOFTCAP: gl.constexpr = FLAGS.SOFTCAP
    inner_scale, outer_scale = scales
    if SOFTCAP:
        s = outer_scale * tanh(s * inner_scale)
    qk_scale = 1.0 if SOFTCAP else inner_scale
    if MASK:
        s = mask_scores(s, rows, start, run, FLAGS)
    MASKED: gl.constexpr = FLAGS.HAS_LO or FLAGS.HAS_HI or FLAGS.RAGGED
    m_new = gl.maximum(m_i, gl.max(s, 1) * qk_scale)
    pivot = softmax_pivot(m_new) if MASKED else m_new
    alpha = gl.exp2(m_i - pivot)
    p = gl.exp2(gl.fma(s, qk_scale, -pivot[:, None]))
    l_i = gl.fma(l_i, alpha, gl.sum(p, 1))
    return p, alpha, m_new, l_i


@gluon.jit
def rescale(acc, alpha):
    """acc (ROWS, HEAD_DIM_V) times alpha (ROWS,), which has the layout of scores."""
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def as_operand(p, buffers, acc):
    """Weights p in the buffers' dtype, in the layout of an operand of a product into acc."""
    return gl.convert_layout(p.to(buffers.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def _row_ptrs(ptr, place, HEAD_DIM: gl.constexpr, L: gl.constexpr):
    """Pointers (ROWS, HEAD_DIM) to the rows of a place, in (batch, rows, heads, HEAD_DIM).

    Rows are added before dims, so that a thread keeps pointers per row, not per element.
    """
    row = place.batch * place.num_rows + place.row
    first = gl.cast(row * place.num_heads + place.head, gl.int64)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, L))
    return (ptr + first * HEAD_DIM + rows * (place.num_heads * HEAD_DIM))[:, None] + dims[None, :]


@gluon.jit
def _stat_ptrs(ptr, place, L: gl.constexpr):
    """Pointers (ROWS,) to the rows of a place, in (batch, heads, rows)."""
    first = (place.batch * place.num_heads + place.head) * place.num_rows + place.row
    return (ptr + first) + gl.arange(0, ROWS, gl.SliceLayout(1, L))


@gluon.jit
def load_place(ptr, place, HEAD_DIM: gl.constexpr, L):
    """x (ROWS, HEAD_DIM) of a place; rows from `row_stop` on are zeros."""
    inside = gl.arange(0, ROWS, gl.SliceLayout(1, L)) < place.row_stop - place.row
    ptrs = _row_ptrs(ptr, place, HEAD_DIM, L)
    return gl.load(ptrs, inside[:, None], 0.0)


@gluon.jit
def load_state(state, place, HEAD_DIM_V, S_LAYOUT, O_LAYOUT):
    """acc (ROWS, HEAD_DIM_V), m_i and l_i (ROWS,); rows beyond the block have an empty state."""
    acc = load_place(state.acc_ptr, place, HEAD_DIM_V, O_LAYOUT)
    inside = gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT)) < place.row_stop - place.row
    m_i = gl.load(_stat_ptrs(state.m_ptr, place, S_LAYOUT), inside, float("-inf"))
    return acc, m_i, gl.load(_stat_ptrs(state.l_ptr, place, S_LAYOUT), inside, 0.0)


@gluon.constexpr_function
def _stored_layout(product: gl.constexpr, num_dims: int, num_bits: int) -> gl.DistributedLayout:
    """The layout in which each store of a product's rows fills whole sectors of 32 bytes.

    In a product four lanes share a row, and each lane has pairs of elements. Pairs of 16-bit
    elements fill half a sector, so shuffles among the four lanes give each lane four in a row.
    """
    if num_bits != 16:
        return product
    dims = [[0, 1 << i] for i in range(4, num_dims.bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *dims], lanes, [[16, 0], [32, 0]], [], [64, num_dims]
    )


@gluon.jit
def store_place(ptr, x, place, row_start=None):
    """Stores x (ROWS, HEAD_DIM_V) to the rows of a place, from `row_start` on."""
    x = x.to(ptr.dtype.element_ty)
    L: gl.constexpr = _stored_layout(x.type.layout, x.shape[1], x.dtype.primitive_bitwidth)
    ptrs = _row_ptrs(ptr, place, x.shape[1], L)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    inside = rows < place.row_stop - place.row
    if row_start is not None:
        inside &= rows >= row_start - place.row
    gl.store(ptrs, gl.convert_layout(x, L), inside[:, None])


@gluon.jit
def store_place_stats(ptr, x, place):
    """Stores x (ROWS,) to the rows of a place."""
    L: gl.constexpr = x.type.layout.parent
    ptrs = _stat_ptrs(ptr, place, L)
    inside = gl.arange(0, ROWS, gl.SliceLayout(1, L)) < place.row_stop - place.row
    gl.store(ptrs, x, inside)


@gluon.jit
def make_buffers(desc, COUNT: gl.constexpr):
    """(COUNT, *block) of shared memory for the blocks of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers, each of which completes after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


def block_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of 16-bit x (batch, rows, heads, dim), to copy `rows` rows of one head."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    block = [1, rows, 1, x.size(3)]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


@gluon.jit
def probabilities(s, minus_lse, start, t, visited, FLAGS: gl.constexpr, MASK: gl.constexpr):
    """exp(s - lse) in the backward, of the q rows from `start` on."""
    if MASK:
        # Loaded at every visit: kept during the loop, a run would take the products' registers.
        run = load_visited(visited.runs_ptr, visited.run + opaque_zero(t))
        s = mask_scores(s, visited.rows, start, run, FLAGS)
    p = gl.exp2(gl.fma(s, visited.scale, minus_lse[None, :]))
    if MASK and FLAGS.PARTIAL:
        inside = (visited.rows >= run[4]) & (visited.rows < run[5])
        p = gl.where(inside[:, None], p, 0.0)
    return p
