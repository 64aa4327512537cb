"""Forward: folds every tile of a ring step into the running state of the queries, in one launch.

A program takes one block of q rows of one head. It loads the state (acc, m, l) of earlier steps,
folds the blocks of keys that its rows see, and stores the state un-normalised. So a ring does
exactly the arithmetic of a single pass; see `online_softmax` for the equations. The first step
loads no state. The last step adds the sink, normalises, writes `out` in the input type and lse, and
stores no state.

    for each run of kv rows, from the last down:              (step_table)
        blocks that its upper bound or end cuts     masked
        blocks that every row sees whole            not masked
        blocks that its lower bound or start cuts   masked

Blocks are folded from the diagonal downwards, on a grid that does not depend on the step. A
contiguous causal ring brings its shards in the same order; so a row's sums are the same at every
world size if shards begin at multiples of BLOCK_N. A step without bands and ragged ends is compiled
without masking code, as are all steps of a zigzag ring but a rank's own.

Scores and m are in base 2, within and between steps. The lse written is the natural logarithm,
float32, -inf for rows that see no key. Softmax statistics and acc are float32. Keys are never
repeated for grouped heads: query head h reads kv head h // GROUP.

Dao et al., arXiv 2205.14135 and 2307.08691; ring use, Liu et al., arXiv 2310.01889.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .configs import Config
from .launch import Launch
from .online_softmax import (
    LOG2E,
    online_softmax_add_sink,
    online_softmax_finalize,
    online_softmax_update,
    tanh,
)
from .proxy_fence import proxy_fence
from .step_table import StepTable, column_range, load_block_row, load_run, visible_pairs
from .tasks import block_and_head, step_schedule


@triton.jit
def in_units(stride, UNIT: tl.constexpr):
    """The stride, written so that the compiler knows that UNIT divides it."""
    if UNIT == 1:
        return stride
    return stride // UNIT * UNIT


@triton.jit
def offset_of(index, stride, UNIT: tl.constexpr):
    """index * stride, written so that the compiler knows that UNIT divides it."""
    return index.to(tl.int64) * in_units(stride, UNIT)


@triton.jit
def offsets_in_block(row_start, row_stop, BLOCK: tl.constexpr):
    """(BLOCK,) offsets from row_start; beyond the block they repeat its last row.

    So loads need no mask.
    """
    return tl.minimum(tl.arange(0, BLOCK), row_stop - row_start - 1)


@triton.jit
def load_rows(ptr, row_start, offs, stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(len(offs), BLOCK_D): rows row_start + offs, which must exist; zero beyond HEAD_DIM."""
    dims = tl.arange(0, BLOCK_D)
    ptrs = (ptr + row_start.to(tl.int64) * stride) + (offs[:, None] * stride + dims[None, :])
    if HEAD_DIM == BLOCK_D:
        return tl.load(ptrs)
    return tl.load(ptrs, dims[None, :] < HEAD_DIM, 0.0)


@triton.jit
def store_rows(ptr, x, row_start, row_stop, stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores x (BLOCK, BLOCK_D) to the rows row_start, row_start + 1, ... below `row_stop`.

    Offsets count from the first row, so that the loop before the store keeps only scalars alive.
    """
    offs = tl.arange(0, x.shape[0])
    dims = tl.arange(0, BLOCK_D)
    ptrs = (ptr + row_start.to(tl.int64) * stride) + (offs[:, None] * stride + dims[None, :])
    inside = offs[:, None] < row_stop - row_start
    if HEAD_DIM != BLOCK_D:
        inside = inside & (dims[None, :] < HEAD_DIM)
    tl.store(ptrs, x.to(ptr.dtype.element_ty), inside)


@triton.jit
def store_stats(ptr, x, row_start, row_stop):
    """Stores x (BLOCK,) to the rows row_start, row_start + 1, ... below `row_stop`."""
    offs = tl.arange(0, x.shape[0])
    tl.store(ptr + row_start + offs, x, offs < row_stop - row_start)


@triton.jit
def load_block(
    ptr,
    start,
    run,
    stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(BLOCK, BLOCK_D): rows start, start + 1, ...; with MASKED, rows outside the run are zero."""
    offs = tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    ptrs = (ptr + start.to(tl.int64) * stride) + (offs[:, None] * stride + dims[None, :])
    if MASKED:
        rows = start + offs
        inside = ((rows >= run[0]) & (rows < run[1]))[:, None]
        if HEAD_DIM != BLOCK_D:
            inside = inside & (dims[None, :] < HEAD_DIM)
        return tl.load(ptrs, inside, 0.0)
    if HEAD_DIM == BLOCK_D:
        return tl.load(ptrs)
    return tl.load(ptrs, dims[None, :] < HEAD_DIM, 0.0)


@triton.jit
def _state_offsets(batch, head, num_rows, nheads, HEAD_DIM_V: tl.constexpr):
    """Offsets of a head in (batch, rows, nheads, HEAD_DIM_V) and in (batch, nheads, rows)."""
    row = batch.to(tl.int64) * num_rows * nheads * HEAD_DIM_V + head * HEAD_DIM_V
    return row, (batch * nheads + head).to(tl.int64) * num_rows


@triton.jit(do_not_specialize=["num_blocks", "heads_together"])
def flash_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    acc_ptr,
    m_ptr,
    l_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
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
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    RAGGED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Folds the keys that one block of q rows of one head sees into its state.

    Masked blocks have loops of their own, for the same bits with and without a mask: a branch
    between the two products hides from triton that they are chained. On sm_80 it then gave them
    other layouts, so that a row's sums had another order, and a block 10 barriers.
    """
    MASKED: tl.constexpr = HAS_LO or HAS_HI or RAGGED
    block, index = block_and_head(tl.program_id(0), num_blocks, heads_together)
    batch = index // nheads
    head = index % nheads
    row_start, row_stop, first_run, last_run = load_block_row(blocks_ptr, block)

    kv_head = head // GROUP
    q_head = q_ptr + offset_of(batch, stride_qb, UNIT) + offset_of(head, stride_qh, UNIT)
    k_head = k_ptr + offset_of(batch, stride_kb, UNIT) + offset_of(kv_head, stride_kh, UNIT)
    v_head = v_ptr + offset_of(batch, stride_vb, UNIT) + offset_of(kv_head, stride_vh, UNIT)

    offs = offsets_in_block(row_start, row_stop, BLOCK_M)
    stride_qm, stride_kn = in_units(stride_qm, UNIT), in_units(stride_kn, UNIT)
    stride_vn = in_units(stride_vn, UNIT)
    q = load_rows(q_head, row_start, offs, stride_qm, HEAD_DIM, BLOCK_D)  # (BLOCK_M, BLOCK_D)
    if FIRST:
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
    else:
        row, stat = _state_offsets(batch, head, num_rows, nheads, HEAD_DIM_V)
        stride = nheads * HEAD_DIM_V
        acc = load_rows(acc_ptr + row, row_start, offs, stride, HEAD_DIM_V, BLOCK_DV)
        m_i = tl.load(m_ptr + stat + row_start + offs)
        l_i = tl.load(l_ptr + stat + row_start + offs)

    rows = row_start + tl.arange(0, BLOCK_M)
    for j in range(first_run, last_run):
        run = load_run(runs_ptr, j)
        first, full_first, full_last, last = column_range(row_start, row_stop, run, BLOCK_N)
        # Blocks that the run's upper bound or end cuts, whole blocks, and blocks cut below.
        bounds = (last, full_last, full_first, first)
        for part in tl.static_range(3):
            if part == 1 or (MASKED if part == 0 else HAS_LO or RAGGED):
                for i in range(bounds[part] - bounds[part + 1]):
                    start = (bounds[part] - 1 - i) * BLOCK_N
                    k = load_block(
                        k_head,
                        start,
                        run,
                        stride_kn,
                        HEAD_DIM,
                        BLOCK_D,
                        BLOCK_N,
                        RAGGED and part != 1,
                    )
                    proxy_fence()
                    qk = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
                    if SOFTCAP:
                        qk = outer_scale * tanh(qk * inner_scale)
                    if part != 1:
                        cols = start + tl.arange(0, BLOCK_N)
                        visible = visible_pairs(rows[:, None], cols[None, :], run, HAS_LO, HAS_HI)
                        qk = tl.where(visible, qk, float("-inf"))
                    v = load_block(
                        v_head,
                        start,
                        run,
                        stride_vn,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        BLOCK_N,
                        RAGGED and part != 1,
                    )
                    proxy_fence()
                    acc, m_i, l_i = online_softmax_update(
                        acc, m_i, l_i, qk, v, 1.0 if SOFTCAP else inner_scale, MASKED=part != 1
                    )

    row, stat = _state_offsets(batch, head, num_rows, nheads, HEAD_DIM_V)
    stride = nheads * HEAD_DIM_V
    if LAST:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head) * LOG2E
            acc, m_i, l_i = online_softmax_add_sink(acc, m_i, l_i, sink)
        acc, lse = online_softmax_finalize(acc, m_i, l_i)
        store_rows(out_ptr + row, acc, row_start, row_stop, stride, HEAD_DIM_V, BLOCK_DV)
        store_stats(lse_ptr + stat, lse, row_start, row_stop)
    else:
        store_rows(acc_ptr + row, acc, row_start, row_stop, stride, HEAD_DIM_V, BLOCK_DV)
        store_stats(m_ptr + stat, m_i, row_start, row_stop)
        store_stats(l_ptr + stat, l_i, row_start, row_stop)


@dataclass
class Carried:
    """The state between two launches, or the results of the last launch."""

    acc: Tensor | None = None  # (batch, rows, nheads, headdim_v) float32; not in a single launch
    m: Tensor | None = None  # (batch, nheads, rows) float32, in base 2
    l: Tensor | None = None  # (batch, nheads, rows) float32
    out: Tensor | None = None  # (batch, rows, nheads, headdim_v) in the input type; at the end
    lse: Tensor | None = None  # (batch, nheads, rows) float32, natural logarithm
    sinks: Tensor | None = None  # (nheads,) float32
    counter: Tensor | None = None  # int32 zero: tasks of `hopper_fwd`, which each launch resets


def offset_unit(*tensors: Tensor) -> int:
    """8 if 8 divides all strides but 16 does not, else 1.

    Triton itself detects multiples of 16. Multiples of 8, such as rows of 72 dims, suffice for
    asynchronous copies of 16 bytes; without such copies the forward spilled 556 bytes.
    """
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    return 8 if any(x % 16 for x in strides) and not any(x % 8 for x in strides) else 1


def pointers(**tensors: Tensor | None) -> dict[str, Tensor | None]:
    """Tensors as arguments of a kernel."""
    return {f"{name}_ptr": x for name, x in tensors.items()}


def strides(**tensors: Tensor) -> dict[str, int]:
    """stride_{initial}{axis}: axes are b (batch), m (q rows) or n (kv rows), and h (heads)."""
    return {
        f"stride_{name[0]}{axis}": stride
        for name, x in tensors.items()
        for axis, stride in zip(f"b{'n' if name in 'kv' else 'm'}h", x.stride(), strict=False)
    }


def scales(softmax_scale: float, softcap: float) -> dict[str, float]:
    """Factors of raw products before and after tanh; without softcap the second is 1."""
    if softcap:
        return {"inner_scale": softmax_scale / softcap, "outer_scale": softcap * LOG2E.value}
    return {"inner_scale": softmax_scale * LOG2E.value, "outer_scale": 1.0}


@cache
def block_dim(headdim: int) -> int:
    """The power of two that holds a head dim; at least 16, as tl.dot requires."""
    return max(16, triton.next_power_of_2(headdim))


def arguments(
    strided: Mapping[str, Tensor], contiguous: Mapping[str, Tensor | None]
) -> dict[str, Any]:
    """Pointers of tensors, and the strides of those that have any strides, as arguments."""
    return {**pointers(**strided, **contiguous), **strides(**strided)}


@dataclass(frozen=True)
class KernelArgs:
    """The inputs of a step, which yield arguments of a kernel by name.

    Attributes:
        q: (batch, rows, nheads, headdim); q, k, v, dout with any strides, but 1 in the last dim.
        k: (batch, rows_kv, nheads_kv, headdim).
        v: (batch, rows_kv, nheads_kv, headdim_v).
        dout: (batch, rows, nheads, headdim_v), in a backward.
        minus_lse: (batch, nheads, rows) float32, contiguous, in base 2; in a backward.
        delta: likewise, over all keys of all steps.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None = None
    minus_lse: Tensor | None = None
    delta: Tensor | None = None

    @property
    def strided(self) -> dict[str, Tensor]:
        inputs = {"q": self.q, "k": self.k, "v": self.v}
        return inputs if self.dout is None else {**inputs, "dout": self.dout}

    @property
    def statistics(self) -> dict[str, Tensor | None]:
        if self.dout is None:
            return {}
        return {"minus_lse": self.minus_lse, "delta": self.delta}

    @property
    def group(self) -> int:
        """Number of q heads that share a kv head."""
        return self.q.size(2) // self.k.size(2)

    @property
    def same_rows(self) -> bool:
        """Whether rows of q and of dout are equally far apart."""
        return self.dout is not None and self.q.stride(1) == self.dout.stride(1)

    def sizes(self, *, kv_rows: bool) -> dict[str, int]:
        """Numbers of rows and heads, for a kernel over q rows of heads or kv rows of kv heads."""
        if kv_rows:
            return {
                "num_rows": self.q.size(1),
                "num_rows_kv": self.k.size(1),
                "nheads_kv": self.k.size(2),
            }
        return {"num_rows": self.q.size(1), "nheads": self.q.size(2)}

    @property
    def constants(self) -> dict[str, int]:
        headdim, headdim_v = self.q.size(3), self.v.size(3)
        return {
            "GROUP": self.group,
            "UNIT": offset_unit(*self.strided.values()),
            "HEAD_DIM": headdim,
            "HEAD_DIM_V": headdim_v,
            "BLOCK_D": block_dim(headdim),
            "BLOCK_DV": block_dim(headdim_v),
        }


def step_launch(
    kernel: Any,
    inputs: KernelArgs,
    others: Mapping[str, Tensor | None],
    table: StepTable,
    config: Config,
    *,
    constants: Mapping[str, Any],
    softmax_scale: float,
    softcap: float,
    kv_rows: bool = False,
) -> Launch:
    """Return the launch of a portable kernel over q rows of heads, or kv rows of kv heads.

    `others` are further tensors, contiguous, and `constants` further constants of the kernel.
    """
    schedule = step_schedule(inputs.q, inputs.k, inputs.v, table, config, kv_rows=kv_rows)
    tables = {"blocks": table.blocks, "runs": table.runs}
    return Launch(
        kernel=kernel,
        grid=(schedule.num_tasks,),
        args={
            **arguments(inputs.strided, {**inputs.statistics, **others, **tables}),
            **inputs.sizes(kv_rows=kv_rows),
            **schedule.args,
            **scales(softmax_scale, softcap),
        },
        constants={
            **inputs.constants,
            "BLOCK_M": config.BLOCK_M,
            "BLOCK_N": config.BLOCK_N,
            **table.constants,
            "SOFTCAP": softcap != 0.0,
            **constants,
        },
        options=config.options,
    )


def forward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Carried,
    table: StepTable,
    config: Config,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    first: bool,
    last: bool,
) -> Launch:
    """Return the launch that folds one step.

    Args:
        q: (batch, rows, nheads, headdim); q, k, v with any strides, but 1 in the last dim.
        k: (batch, rows_kv, nheads_kv, headdim).
        v: (batch, rows_kv, nheads_kv, headdim_v).
        state: allocated by the caller: acc, m, l unless first and last; out and lse if last.
        table: q rows x kv rows, descending; if first or last, with blocks for all rows.
        config: for whose blocks the table is.
        softmax_scale: positive.
        softcap: 0 means none.
        first: start from the empty state, and load none.
        last: write out and lse, and store no state.
    """
    carried = {"acc": state.acc, "m": state.m, "l": state.l, "out": state.out, "lse": state.lse}
    return step_launch(
        flash_fwd_kernel,
        KernelArgs(q, k, v),
        {**carried, "sinks": state.sinks},
        table,
        config,
        constants={"FIRST": first, "LAST": last, "HAS_SINKS": state.sinks is not None},
        softmax_scale=softmax_scale,
        softcap=softcap,
    )
