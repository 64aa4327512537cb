"""Backward: delta, dq and dk/dv of all tiles of a ring step, one launch for each.

With the global lse, probabilities need no renormalisation, whichever keys a step holds:

    p  = exp(s - lse)         dv = sum_i p do           delta = rowsum(do * out)
    dp = do v^T               ds = p (dp - delta)       dq = sum_j ds k,  dk = sum_i ds q

    dk/dv   a program per block of kv rows and kv head: loops over the q blocks that see it,
            upwards, and in each over the query heads of the group
    dq      a program per block of q rows and head: loops over its keys, from the diagonal downwards

Two kernels do 7 matrix products, one kernel with atomics would do 5; in exchange no sum depends on
timing. dq, dk, dv are float32, loaded at a program's start and stored at its end. So a ring's sums
equal a single pass's, bit for bit, if its steps come in the folding order. dq and dk lack
softmax_scale, which the caller applies once at the end: it would cost ds bits in 16-bit form.

dk/dv computes the transposed scores k q^T directly. A register result of tl.dot is never
transposed: triton 3.4 to 3.7.0 miscompile the product that follows.

Exponentials are in base 2. `minus_lse` is -lse in base 2, computed once, together with delta:
within the loop of dk/dv it would take 16 of 386 instructions, and so would the sign alone.

With softcap, s = c tanh(x scale / c) and ds gains the factor 1 - tanh^2.

Dao, arXiv 2307.08691.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .configs import Config
from .flash_fwd import (
    KernelArgs,
    arguments,
    block_dim,
    in_units,
    load_block,
    load_rows,
    offset_of,
    offset_unit,
    offsets_in_block,
    step_launch,
    store_rows,
    store_stats,
)
from .launch import Launch
from .online_softmax import LOG2E, tanh
from .proxy_fence import proxy_fence
from .step_table import StepTable, column_range, load_block_row, load_run, visible_pairs
from .tasks import block_and_head


@triton.jit
def delta_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    minus_lse_ptr,
    delta_ptr,
    stride_ob,
    stride_om,
    stride_oh,
    stride_db,
    stride_dm,
    stride_dh,
    num_rows,
    nheads,
    UNIT: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Writes delta = rowsum(out * dout), and -lse in base 2, (batch, nheads, rows), of a block."""
    num_blocks = tl.cdiv(num_rows, BLOCK_M)
    row_start = tl.program_id(0) % num_blocks * BLOCK_M
    index = tl.program_id(0) // num_blocks
    offs = offsets_in_block(row_start, num_rows, BLOCK_M)
    batch = index // nheads
    head = index % nheads
    out_ptr += offset_of(batch, stride_ob, UNIT) + offset_of(head, stride_oh, UNIT)
    dout_ptr += offset_of(batch, stride_db, UNIT) + offset_of(head, stride_dh, UNIT)
    stride_om, stride_dm = in_units(stride_om, UNIT), in_units(stride_dm, UNIT)
    out = load_rows(out_ptr, row_start, offs, stride_om, HEAD_DIM_V, BLOCK_DV).to(tl.float32)
    dout = load_rows(dout_ptr, row_start, offs, stride_dm, HEAD_DIM_V, BLOCK_DV).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    stat = index.to(tl.int64) * num_rows
    store_stats(delta_ptr + stat, delta, row_start, num_rows)
    lse = tl.load(lse_ptr + stat + row_start + offs)
    store_stats(minus_lse_ptr + stat, lse * -LOG2E, row_start, num_rows)


@triton.jit
def probabilities(x, minus_lse, inner_scale, outer_scale, SOFTCAP: tl.constexpr):
    """p = exp(s - lse) from raw products x, and the factor of ds that comes from softcap.

    minus_lse, in base 2, broadcasts against x.
    """
    if SOFTCAP:
        t = tanh(x * inner_scale)
        return tl.exp2(tl.fma(t, outer_scale, minus_lse)), 1.0 - t * t
    else:
        return tl.exp2(tl.fma(x, inner_scale, minus_lse)), 1.0


@triton.jit
def load_stats(ptrs, cols, run, MASKED: tl.constexpr):
    """minus_lse or delta of q rows `cols`; with MASKED, 0 outside the run."""
    if MASKED:
        return tl.load(ptrs, (cols >= run[0]) & (cols < run[1]), 0.0)
    return tl.load(ptrs)


@triton.jit(do_not_specialize=["num_blocks", "heads_together"])
def flash_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    minus_lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    blocks_ptr,
    runs_ptr,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_db,
    stride_dm,
    stride_dh,
    num_rows,
    num_rows_kv,
    nheads_kv,
    num_blocks,
    heads_together,
    inner_scale,
    outer_scale,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    RAGGED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SAME_ROWS: tl.constexpr,
):
    """Adds to dk, dv of one block of kv rows of one kv head; columns are q rows.

    Blocks of columns are the outer loop and heads the inner one, as a ring brings its q rows in
    this order.
    """
    block, index = block_and_head(tl.program_id(0), num_blocks, heads_together)
    batch = index // nheads_kv
    kv_head = index % nheads_kv
    row_start, row_stop, first_run, last_run = load_block_row(blocks_ptr, block)

    head = (kv_head * GROUP).to(tl.int64)
    q_heads = q_ptr + offset_of(batch, stride_qb, UNIT) + offset_of(head, stride_qh, UNIT)
    dout_heads = dout_ptr + offset_of(batch, stride_db, UNIT) + offset_of(head, stride_dh, UNIT)
    k_head = k_ptr + offset_of(batch, stride_kb, UNIT) + offset_of(kv_head, stride_kh, UNIT)
    v_head = v_ptr + offset_of(batch, stride_vb, UNIT) + offset_of(kv_head, stride_vh, UNIT)
    stat = (batch * nheads_kv * GROUP + head) * num_rows
    minus_lse_heads = minus_lse_ptr + stat
    delta_heads = delta_ptr + stat
    # Gradients are contiguous: (batch, rows, nheads_kv, dim).
    grad = batch.to(tl.int64) * num_rows_kv * nheads_kv + kv_head
    dk_head = dk_ptr + grad * HEAD_DIM
    dv_head = dv_ptr + grad * HEAD_DIM_V

    if SAME_ROWS:
        stride_dm = stride_qm
    offs = offsets_in_block(row_start, row_stop, BLOCK_N)
    stride_qm, stride_dm = in_units(stride_qm, UNIT), in_units(stride_dm, UNIT)
    stride_kn, stride_vn = in_units(stride_kn, UNIT), in_units(stride_vn, UNIT)
    k = load_rows(k_head, row_start, offs, stride_kn, HEAD_DIM, BLOCK_D)  # (BLOCK_N, BLOCK_D)
    v = load_rows(v_head, row_start, offs, stride_vn, HEAD_DIM_V, BLOCK_DV)
    dk = load_rows(dk_head, row_start, offs, nheads_kv * HEAD_DIM, HEAD_DIM, BLOCK_D)
    dv = load_rows(dv_head, row_start, offs, nheads_kv * HEAD_DIM_V, HEAD_DIM_V, BLOCK_DV)

    rows = row_start + tl.arange(0, BLOCK_N)
    for j in range(first_run, last_run):
        run = load_run(runs_ptr, j)
        first, full_first, full_last, last = column_range(row_start, row_stop, run, BLOCK_M)
        for i in range((last - first) * GROUP):
            t = first * GROUP + i
            q_block = t // GROUP
            start = q_block * BLOCK_M
            of_group = t % GROUP
            cols = start + tl.arange(0, BLOCK_M)
            stats = (of_group * num_rows + start) + tl.arange(0, BLOCK_M)
            q_head = q_heads + offset_of(of_group, stride_qh, UNIT)
            q = load_block(q_head, start, run, stride_qm, HEAD_DIM, BLOCK_D, BLOCK_M, RAGGED)
            dout = load_block(
                dout_heads + offset_of(of_group, stride_dh, UNIT),
                start,
                run,
                stride_dm,
                HEAD_DIM_V,
                BLOCK_DV,
                BLOCK_M,
                RAGGED,
            )
            proxy_fence()
            kq = tl.dot(k, tl.trans(q), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
            minus_lse = load_stats(minus_lse_heads + stats, cols, run, RAGGED)
            p, slope = probabilities(kq, minus_lse[None, :], inner_scale, outer_scale, SOFTCAP)
            if HAS_LO or HAS_HI or RAGGED:
                if (q_block < full_first) | (q_block >= full_last):
                    visible = visible_pairs(rows[:, None], cols[None, :], run, HAS_LO, HAS_HI)
                    p = tl.where(visible, p, 0.0)
            # Row statistics are loaded late and dv is added late: with 64 x 128 blocks of 128 dims
            # this order fits into the registers of sm_90; other tried orders spill.
            dp = tl.dot(v, tl.trans(dout), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
            delta = load_stats(delta_heads + stats, cols, run, RAGGED)
            ds = p * (dp - delta[None, :]) * slope
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    store_rows(dk_head, dk, row_start, row_stop, nheads_kv * HEAD_DIM, HEAD_DIM, BLOCK_D)
    store_rows(dv_head, dv, row_start, row_stop, nheads_kv * HEAD_DIM_V, HEAD_DIM_V, BLOCK_DV)


@triton.jit(do_not_specialize=["num_blocks", "heads_together"])
def flash_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    minus_lse_ptr,
    delta_ptr,
    dq_ptr,
    blocks_ptr,
    runs_ptr,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_db,
    stride_dm,
    stride_dh,
    num_rows,
    nheads,
    num_blocks,
    heads_together,
    inner_scale,
    outer_scale,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    RAGGED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Adds to dq of one block of q rows of one head."""
    block, index = block_and_head(tl.program_id(0), num_blocks, heads_together)
    batch = index // nheads
    head = index % nheads
    row_start, row_stop, first_run, last_run = load_block_row(blocks_ptr, block)

    kv_head = head // GROUP
    q_head = q_ptr + offset_of(batch, stride_qb, UNIT) + offset_of(head, stride_qh, UNIT)
    dout_head = dout_ptr + offset_of(batch, stride_db, UNIT) + offset_of(head, stride_dh, UNIT)
    k_head = k_ptr + offset_of(batch, stride_kb, UNIT) + offset_of(kv_head, stride_kh, UNIT)
    v_head = v_ptr + offset_of(batch, stride_vb, UNIT) + offset_of(kv_head, stride_vh, UNIT)
    stat = (batch * nheads + head).to(tl.int64) * num_rows
    # dq is contiguous: (batch, rows, nheads, HEAD_DIM).
    dq_head = dq_ptr + (batch.to(tl.int64) * num_rows * nheads + head) * HEAD_DIM

    offs = offsets_in_block(row_start, row_stop, BLOCK_M)
    stride_qm, stride_dm = in_units(stride_qm, UNIT), in_units(stride_dm, UNIT)
    stride_kn, stride_vn = in_units(stride_kn, UNIT), in_units(stride_vn, UNIT)
    q = load_rows(q_head, row_start, offs, stride_qm, HEAD_DIM, BLOCK_D)  # (BLOCK_M, BLOCK_D)
    dout = load_rows(dout_head, row_start, offs, stride_dm, HEAD_DIM_V, BLOCK_DV)
    minus_lse = tl.load(minus_lse_ptr + stat + row_start + offs)
    delta = tl.load(delta_ptr + stat + row_start + offs)
    dq = load_rows(dq_head, row_start, offs, nheads * HEAD_DIM, HEAD_DIM, BLOCK_D)

    rows = row_start + tl.arange(0, BLOCK_M)
    for j in range(first_run, last_run):
        run = load_run(runs_ptr, j)
        first, full_first, full_last, last = column_range(row_start, row_stop, run, BLOCK_N)
        for i in range(last - first):
            kv_block = last - 1 - i
            start = kv_block * BLOCK_N
            k = load_block(k_head, start, run, stride_kn, HEAD_DIM, BLOCK_D, BLOCK_N, RAGGED)
            v = load_block(v_head, start, run, stride_vn, HEAD_DIM_V, BLOCK_DV, BLOCK_N, RAGGED)
            proxy_fence()
            qk = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
            p, slope = probabilities(qk, minus_lse[:, None], inner_scale, outer_scale, SOFTCAP)
            if HAS_LO or HAS_HI or RAGGED:
                if (kv_block < full_first) | (kv_block >= full_last):
                    cols = start + tl.arange(0, BLOCK_N)
                    visible = visible_pairs(rows[:, None], cols[None, :], run, HAS_LO, HAS_HI)
                    p = tl.where(visible, p, 0.0)
            dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None]) * slope
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")

    store_rows(dq_head, dq, row_start, row_stop, nheads * HEAD_DIM, HEAD_DIM, BLOCK_D)


def delta_launch(
    out: Tensor, dout: Tensor, lse: Tensor, minus_lse: Tensor, delta: Tensor, config: Config
) -> Launch:
    """Return the launch that writes delta, and -lse in base 2.

    out and dout (batch, rows, nheads, headdim_v), any strides, but 1 in the last dim; lse,
    minus_lse and delta (batch, nheads, rows) float32, contiguous.
    """
    batch, num_rows, nheads, headdim_v = out.shape
    return Launch(
        delta_kernel,
        (triton.cdiv(num_rows, config.BLOCK_M) * batch * nheads,),
        {
            **arguments(
                {"out": out, "dout": dout},
                {"lse": lse, "minus_lse": minus_lse, "delta": delta},
            ),
            "num_rows": num_rows,
            "nheads": nheads,
        },
        {
            "UNIT": offset_unit(out, dout),
            "HEAD_DIM_V": headdim_v,
            "BLOCK_DV": block_dim(headdim_v),
            "BLOCK_M": config.BLOCK_M,
        },
        config.options,
    )


def dq_launch(
    inputs: Sequence[Tensor],
    dq: Tensor,
    table: StepTable,
    config: Config,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
) -> Launch:
    """Return the launch that adds one step's dq, without softmax_scale.

    Args:
        inputs: q, k, v, dout, minus_lse and delta, as `KernelArgs` has them.
        dq: float32, contiguous; added to.
        table: q rows x kv rows, descending.
        config: for whose blocks the table is.
        softmax_scale: positive.
        softcap: 0 means none.
    """
    return step_launch(
        flash_dq_kernel,
        KernelArgs(*inputs),
        {"dq": dq},
        table,
        config,
        constants={},
        softmax_scale=softmax_scale,
        softcap=softcap,
    )


def dkdv_launch(
    inputs: Sequence[Tensor],
    dk: Tensor,
    dv: Tensor,
    table: StepTable,
    config: Config,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
) -> Launch:
    """Return the launch that adds one step's dk (without softmax_scale) and dv.

    The table is of kv rows x q rows (`transposed`), ascending.
    """
    named = KernelArgs(*inputs)
    return step_launch(
        flash_dkdv_kernel,
        named,
        {"dk": dk, "dv": dv},
        table,
        config,
        # With one stride for q and dout, a thread keeps half the offsets of rows: on sm_90 short
        # blocks of 128 dims spill 16 to 36 bytes instead of 40 to 108.
        constants={"SAME_ROWS": named.same_rows},
        kv_rows=True,
        softmax_scale=softmax_scale,
        softcap=softcap,
    )
