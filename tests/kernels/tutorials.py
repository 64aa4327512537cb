"""Kernels that users of Triton write, for the executor of PTX: not ours, and not for speed.

Products with an activation, softmax over rows, and attention, in the manner of Triton's tutorials.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """c (M, N) = a b, whose blocks are computed TOGETHER rows of blocks at a time."""
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (TOGETHER * cols)
    height = min(rows - band * TOGETHER, TOGETHER)
    within = tl.program_id(0) % (TOGETHER * cols)
    block_m = band * TOGETHER + within % height
    block_n = within // height
    offs_m = (block_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    offs_n = (block_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_K, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    if ACTIVATION == "leaky_relu":
        acc = leaky_relu(acc)
    offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=inside)


@triton.jit
def described_matmul_kernel(a_desc, b_desc, c_ptr, N, K):
    """c = a b, with a (M, K) and b (K, N) read by bulk copies of whole blocks."""
    BLOCK_M: tl.constexpr = a_desc.block_shape[0]
    BLOCK_N: tl.constexpr = b_desc.block_shape[1]
    BLOCK_K: tl.constexpr = a_desc.block_shape[1]
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a_desc.load([row, k]), b_desc.load([k, col]), acc)
    c_ptrs = c_ptr + (row + tl.arange(0, BLOCK_M))[:, None] * N + col + tl.arange(0, BLOCK_N)
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty))


@triton.jit
def softmax_kernel(
    out_ptr, x_ptr, out_stride, x_stride, rows, cols, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Softmax of each row; a program does every num_programs-th row."""
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        offs = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + offs, mask=offs < cols, other=-float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * out_stride + offs, e / tl.sum(e, axis=0), mask=offs < cols)


@triton.jit
def _attend(
    state,
    q,
    k_desc,
    v_desc,
    first,
    scale,
    begin,
    end,
    rows,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
):
    """Folds columns [begin, end) of a head, whose rows in k and v begin at `first`."""
    acc, l_i, m_i = state
    for start in range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        s = tl.dot(q, k_desc.load([first + start, 0]).T) * scale
        if MASK:
            cols = start + tl.arange(0, BLOCK_N)
            s += tl.where(rows[:, None] >= cols[None, :], 0, -1.0e6)
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = v_desc.load([first + start, 0])
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    scale,
    Z,
    H,
    N,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Attention of contiguous (Z, H, N, DIM); lse in base 2. Axis 1 of the grid is (Z, H)."""
    total = Z * H * N
    q_desc = tl.make_tensor_descriptor(q_ptr, [total, DIM], [DIM, 1], [BLOCK_M, DIM])
    k_desc = tl.make_tensor_descriptor(k_ptr, [total, DIM], [DIM, 1], [BLOCK_N, DIM])
    v_desc = tl.make_tensor_descriptor(v_ptr, [total, DIM], [DIM, 1], [BLOCK_N, DIM])
    out_desc = tl.make_tensor_descriptor(out_ptr, [total, DIM], [DIM, 1], [BLOCK_M, DIM])
    row = tl.program_id(0) * BLOCK_M
    first = tl.program_id(1) * N
    rows = row + tl.arange(0, BLOCK_M)
    q = q_desc.load([first + row, 0])
    scale *= 1.44269504
    state = (
        tl.zeros((BLOCK_M, DIM), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
    )
    whole = row if CAUSAL else N
    state = _attend(state, q, k_desc, v_desc, first, scale, 0, whole, rows, BLOCK_N, False)
    if CAUSAL:
        end = row + BLOCK_M
        state = _attend(state, q, k_desc, v_desc, first, scale, row, end, rows, BLOCK_N, True)
    acc, l_i, m_i = state
    tl.store(lse_ptr + first + rows, m_i + tl.math.log2(l_i))
    out_desc.store([first + row, 0], (acc / l_i[:, None]).to(out_ptr.dtype.element_ty))
