"""Merges all ranks' partial results in one launch: `core.state.merge_tree` as a kernel.

Each level merges the lower half of the states with the upper half; an odd state is left over:

    5 ranks    0 1 2 3 4
    level 1    0+3  1+4  2            ceil(5 / 2) = 3 states
    level 2    (0+3)+2  1+4           ceil(3 / 2) = 2
    level 3    ((0+3)+2)+(1+4)        the root, which a sink joins

A program handles one query of one head and walks the tree from left to right, so that it holds one
state per level. A missing state counts as empty; merging an empty state changes no value.

Every operation equals `merge_tree`'s, with the same rounding, except exp and log, whose last
bits differ on a GPU. So m stays in base e, as in the inputs; other kernels use base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .configs import Config
from .flash_fwd import block_dim, pointers
from .launch import Launch
from .online_softmax import softmax_pivot

# The lowest levels, whose states are all loaded before the first merge; levels above are loops.
UNROLLED = tl.constexpr(3)


@triton.jit
def _merged(acc, m, l, acc_other, m_other, l_other):
    m_new = tl.maximum(m, m_other)
    pivot = softmax_pivot(m_new)
    keep, add = tl.exp(m - pivot), tl.exp(m_other - pivot)
    return tl.fma(acc_other, add, acc * keep), m_new, tl.fma(l_other, add, l * keep)


@triton.jit
def _state(
    out_ptr,
    lse_ptr,
    out_stride,
    lse_stride,
    num_sets,
    i,
    LEVEL: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """State i of a level; an empty state if i is the number of sets."""
    dims = tl.arange(0, BLOCK_DV)
    if LEVEL == 0:
        inside = i < num_sets
        here = out_ptr + i.to(tl.int64) * out_stride + dims
        # Not `inside & (...)`: triton 3.9's interpreter makes int32 of a scalar that it splats.
        num_dims = tl.where(inside, HEAD_DIM_V, 0)
        acc = tl.load(here, dims < num_dims, 0.0)
        m = tl.load(lse_ptr + i.to(tl.int64) * lse_stride, inside, float("-inf"))
        return acc, m, 1.0
    else:
        below: tl.constexpr = LEVEL - 1
        half = tl.cdiv(num_sets, 1 << LEVEL)
        has_upper = i + half < tl.cdiv(num_sets, 1 << below)
        if LEVEL <= UNROLLED:
            acc, m, l = _state(
                out_ptr,
                lse_ptr,
                out_stride,
                lse_stride,
                num_sets,
                i,
                below,
                HEAD_DIM_V,
                BLOCK_DV,
            )
            acc_upper, m_upper, l_upper = _state(
                out_ptr,
                lse_ptr,
                out_stride,
                lse_stride,
                num_sets,
                tl.where(has_upper, i + half, num_sets),
                below,
                HEAD_DIM_V,
                BLOCK_DV,
            )
            acc, m, l = _merged(acc, m, l, acc_upper, m_upper, l_upper)
        else:
            acc = tl.zeros((BLOCK_DV,), tl.float32)
            m = float("-inf")
            l = 0.0
            for upper in range(0, tl.where(has_upper, 2, 1)):
                acc_part, m_part, l_part = _state(
                    out_ptr,
                    lse_ptr,
                    out_stride,
                    lse_stride,
                    num_sets,
                    i + upper * half,
                    below,
                    HEAD_DIM_V,
                    BLOCK_DV,
                )
                acc, m, l = _merged(acc, m, l, acc_part, m_part, l_part)
        return acc, m, l


@triton.jit
def merge_tree_kernel(
    out_ptr,
    lse_ptr,
    root_out_ptr,
    root_lse_ptr,
    sinks_ptr,
    num_sets,
    num_rows,
    nheads,
    out_stride,
    lse_stride,
    HAS_SINKS: tl.constexpr,
    LEVELS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Writes out and lse of one query of one head."""
    index = tl.program_id(0)  # in (batch, num_rows, nheads)
    head = index % nheads
    row = index // nheads % num_rows
    statistic = (index // nheads // num_rows * nheads + head) * num_rows + row
    first = index.to(tl.int64) * HEAD_DIM_V
    dims = tl.arange(0, BLOCK_DV)

    acc, m, l = _state(
        out_ptr + first,
        lse_ptr + statistic,
        out_stride,
        lse_stride,
        num_sets,
        tl.zeros((), tl.int32),
        LEVELS,
        HEAD_DIM_V,
        BLOCK_DV,
    )
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        acc, m, l = _merged(acc, m, l, tl.zeros_like(acc), sink, 1.0)
    l_safe = tl.where(l == 0.0, 1.0, l)
    tl.store(root_lse_ptr + statistic, m + tl.log(l_safe))
    out = tl.div_rn(acc, l_safe)
    tl.store(root_out_ptr + first + dims, out, dims < HEAD_DIM_V)


def config_of(headdim_v: int) -> Config:
    """A config with enough warps that each thread loads 16 bytes of a row."""
    return Config(0, 0, max(1, block_dim(headdim_v) // 128), 1)


def merge_tree_launch(
    out: Tensor, lse: Tensor, root_out: Tensor, root_lse: Tensor, sinks: Tensor | None
) -> Launch:
    """The launch that merges the results of disjoint sets of keys.

    out (sets, batch, rows, nheads, headdim_v) and lse (sets, batch, nheads, rows) are float32,
    contiguous but for the first dim; root_out and root_lse, written, lack that dim.
    """
    num_sets, batch, num_rows, nheads, headdim_v = out.shape
    config = config_of(headdim_v)
    return Launch(
        merge_tree_kernel,
        (batch * num_rows * nheads,),
        {
            **pointers(out=out, lse=lse, root_out=root_out, root_lse=root_lse, sinks=sinks),
            "num_sets": num_sets,
            "num_rows": num_rows,
            "nheads": nheads,
            "out_stride": out.stride(0),
            "lse_stride": lse.stride(0),
        },
        {
            "HAS_SINKS": sinks is not None,
            "LEVELS": (num_sets - 1).bit_length(),
            "HEAD_DIM_V": headdim_v,
            "BLOCK_DV": block_dim(headdim_v),
        },
        config.options,
    )
