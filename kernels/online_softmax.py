"""Blockwise online softmax: @triton.jit primitives of the attention kernels.

A row of scores s = softmax_scale * q k^T comes one block at a time. The state over the keys so far
is in base 2, because the hardware's exponential is exp2. So softmax_scale and log2(e) become one
factor `qk_scale = softmax_scale * log2(e)` of the raw product x = q k^T:

    m   = max_j x_j * qk_scale                       running maximum, base 2
    l   = sum_j exp2(x_j * qk_scale - m)             running sum
    acc = sum_j exp2(x_j * qk_scale - m) v_j         un-normalised output

A block with raw products x and values v moves the state to the new maximum and adds its terms:

    m'    = max(m, max_j x_j * qk_scale)
    alpha = exp2(m - m')                             <= 1: no gap overflows, 1e4 underflows to 0
    p     = exp2(x * qk_scale - m')
    l'    = l * alpha + sum_j p_j
    acc'  = acc * alpha + p v

A masked score is -inf. A row that has seen no key is (acc, m, l) = (0, -inf, 0). Its difference
m - m' would be -inf - -inf = NaN, so exponents are relative to a pivot, which is 0 for such rows. A
NaN in the scores reaches `l`, and from there `out` and `lse`.

The state is normalised only at the end:

    out = acc / l            0 if no key was seen
    lse = (m + log2 l) ln 2  natural logarithm, float32, -inf if no key was seen

Any finished (out, lse) is again a state, (out, lse * log2(e), 1).

With softcap the score is `softcap * tanh(x * softmax_scale / softcap)`: kernels compute it in base
2, and `qk_scale` is 1. A sink is one more key, without a value; it joins a finished state.

Multiply-adds are explicit fma, so that all kernels round alike whatever a compiler contracts.

Milakov and Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Below this, tanh(x) = x + x u P(u), u = x^2: a fit of degree 4 in u, with a relative error of 7e-8
# in float32. Above it 1 - 2 / (e^2x + 1) is as good; below it that formula cancels.
TANH_SMALL = tl.constexpr(0.55)


@triton.jit
def softmax_pivot(m):
    """The number subtracted from scores before exp: m, or 0 for rows that have seen no key."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def tanh(x):
    """tanh of a float32 block within 2e-7 relative; the interpreter lacks libdevice's tanh."""
    u = x * x
    p = tl.fma(u, -0.006615754685, 0.02131274449)
    p = tl.fma(u, p, -0.05391006651)
    p = tl.fma(u, p, 0.1333311762)
    p = tl.fma(u, p, -0.3333333205)
    small = tl.fma(x * u, p, x)
    big = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < TANH_SMALL, small, tl.where(x < 0.0, -big, big))


@triton.jit
def online_softmax_rescale(acc, m_i, l_i, m_new):
    """Moves a state from its maximum `m_i` to `m_new >= m_i`.

    acc (M, D), m_i l_i m_new (M,), all float32. Returns acc and l_i.
    """
    alpha = tl.exp2(m_i - softmax_pivot(m_new))
    return acc * alpha[:, None], l_i * alpha


@triton.jit
def online_softmax_update(acc, m_i, l_i, qk, v, qk_scale, MASKED: tl.constexpr = True):
    """Folds one block of keys into the state.

    acc (M, D) float32, m_i l_i (M,) float32, qk (M, N) float32 raw products with -inf where masked,
    v (N, D). Returns acc, m_i, l_i.

    `qk_scale` must be positive: it applies after the maximum, as part of one fused multiply-add per
    score. `MASKED=False`, for blocks without -inf, leaves out the guard for rows without keys. The
    weights are rounded to v's dtype for the product, but not for the sum `l`.
    """
    m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
    pivot = softmax_pivot(m_new) if MASKED else m_new
    alpha = tl.exp2(m_i - pivot)
    p = tl.exp2(tl.fma(qk, qk_scale, -pivot[:, None]))
    l_i = tl.fma(l_i, alpha, tl.sum(p, 1))
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, m_new, l_i


@triton.jit
def online_softmax_merge(acc, m_i, l_i, acc_other, m_other, l_other):
    """Merges two states over disjoint keys: acc (M, D), m_i l_i (M,), all float32."""
    m_new = tl.maximum(m_i, m_other)
    acc, l_i = online_softmax_rescale(acc, m_i, l_i, m_new)
    acc_other, l_other = online_softmax_rescale(acc_other, m_other, l_other, m_new)
    return acc + acc_other, m_new, l_i + l_other


@triton.jit
def online_softmax_add_sink(acc, m_i, l_i, sink):
    """Adds a key with score `sink`, in base 2, and no value: acc (M, D), m_i l_i (M,)."""
    m_new = tl.maximum(m_i, sink)
    acc, l_i = online_softmax_rescale(acc, m_i, l_i, m_new)
    return acc, m_new, l_i + tl.exp2(sink - softmax_pivot(m_new))


@triton.jit
def online_softmax_finalize(acc, m_i, l_i):
    """Normalises: returns out (M, D) float32 and lse (M,) natural logarithm."""
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    return acc / l_safe[:, None], (m_i + tl.log2(l_safe)) * LN2
