"""Online softmax primitives against dense softmax in float64, over every way of cutting a row."""

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_attn.kernels.online_softmax import (
    LOG2E,
    online_softmax_finalize,
    online_softmax_merge,
    online_softmax_update,
)

HEAD_DIM = 32


@triton.jit
def _fold(x, v, acc, m, l, start, stop, num_keys, rows, offs_d, qk_scale, HEAD_DIM: tl.constexpr,
          BLOCK_N: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    for j0 in range(start, stop, BLOCK_N):
        keys = j0 + tl.arange(0, BLOCK_N)
        inside = keys < stop
        qk = tl.load(x + rows[:, None] * num_keys + keys[None, :], inside[None, :], float("-inf"))
        values = tl.load(v + keys[:, None] * HEAD_DIM + offs_d[None, :], inside[:, None], 0.0)
        acc, m, l = online_softmax_update(acc, m, l, qk, values, qk_scale, MASKED=MASKED)
    return acc, m, l


@triton.jit
def _attend(
    x,
    v,
    out,
    lse,
    num_rows,
    num_keys,
    split,
    qk_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """softmax(x * scale) v: keys below `split` into one state, the others into a second, merged."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    clamped = tl.minimum(rows, num_rows - 1)

    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc1, m1, l1 = _fold(x, v, acc, m, l, 0, split, num_keys, clamped, offs_d, qk_scale, HEAD_DIM,
                         BLOCK_N, MASKED)  # fmt: skip
    acc2, m2, l2 = _fold(x, v, acc, m, l, split, num_keys, num_keys, clamped, offs_d, qk_scale,
                         HEAD_DIM, BLOCK_N, MASKED)  # fmt: skip
    acc, m, l = online_softmax_merge(acc1, m1, l1, acc2, m2, l2)

    o, s = online_softmax_finalize(acc, m, l)
    valid = rows < num_rows
    tl.store(out + rows[:, None] * HEAD_DIM + offs_d[None, :], o, valid[:, None])
    tl.store(lse + rows, s, valid)


def attend(
    x: Tensor, v: Tensor, scale: float, block: int, split: int = 0, masked: bool = True
) -> tuple[Tensor, Tensor]:
    """Runs the kernel; out and lse start as NaN, so a row that is not written is seen."""
    num_rows, num_keys = x.shape
    out = x.new_full((num_rows, HEAD_DIM), torch.nan)
    lse = x.new_full((num_rows,), torch.nan)
    grid = (triton.cdiv(num_rows, block),)
    _attend[grid](x, v, out, lse, num_rows, num_keys, split, scale * LOG2E.value,
                  HEAD_DIM=HEAD_DIM, BLOCK_M=block, BLOCK_N=block, MASKED=masked)  # fmt: skip
    return out, lse


def dense(x: Tensor, v: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same in plain torch: out 0 and lse -inf for a row of -inf."""
    scores = x.to(dtype) * scale
    return scores.softmax(-1).nan_to_num(0.0) @ v.to(dtype), scores.logsumexp(-1)


@dataclass
class Case:
    """Raw products, values, and the scale between them."""

    x: Tensor
    v: Tensor
    scale: float


def make_case(
    rows: int, keys: int, device: str, magnitude: float = 3.0, dtype: torch.dtype = torch.float32
) -> Case:
    generator = torch.Generator().manual_seed(rows * 1000 + keys)
    x = torch.randn(rows, keys, generator=generator) * magnitude
    v = torch.randn(keys, HEAD_DIM, generator=generator).to(dtype)
    return Case(x.to(device), v.to(device), HEAD_DIM**-0.5)


def check(case: Case, out: Tensor, lse: Tensor) -> None:
    """Error at most twice that of plain torch in v's dtype plus one rounding of the result."""
    dtype = case.v.dtype
    exact = dense(case.x, case.v, case.scale, torch.float64)
    plain_lse = dense(case.x, case.v, case.scale, torch.float32)[1]
    if dtype == torch.float32:
        plain_out = dense(case.x, case.v, case.scale, dtype)[0]
    else:
        # Plain attention of 16-bit tensors: weights are rounded to the dtype before the product.
        weights = (case.x * case.scale).softmax(-1).nan_to_num(0.0).to(dtype)
        plain_out = (weights.float() @ case.v.float()).to(dtype)
    for name, got, want, plain, kind in (
        ("out", out, exact[0], plain_out, dtype),
        ("lse", lse, exact[1], plain_lse, torch.float32),
    ):
        seen = want.isfinite()
        assert torch.equal(got[~seen].double(), want[~seen]), name
        if not seen.any():
            continue
        floor = torch.finfo(kind).eps * want[seen].abs().max()
        bound = 2 * (plain.double() - want)[seen].abs().max() + floor
        error = (got.to(kind).double() - want)[seen].abs().max()
        assert error <= bound, f"{name}: error {error:.3e} > bound {bound:.3e}"


@pytest.mark.parametrize("keys", [1, 63, 97, 113, 257])
@pytest.mark.parametrize("rows", [1, 63, 97])
def test_matches_dense_softmax(rows: int, keys: int, device: str) -> None:
    case = make_case(rows, keys, device)
    check(case, *attend(case.x, case.v, case.scale, block=32))


@pytest.mark.parametrize("split", [0, 1, 64, 100, 113])
def test_two_states_merge_to_the_state_of_both(split: int, device: str) -> None:
    case = make_case(63, 113, device)
    check(case, *attend(case.x, case.v, case.scale, block=32, split=split))


def test_weights_are_rounded_to_the_dtype_of_the_values(device: str) -> None:
    case = make_case(97, 113, device, dtype=torch.float16)
    check(case, *attend(case.x, case.v, case.scale, block=32))


def test_unmasked_path_gives_the_same_bits(device: str) -> None:
    case = make_case(64, 128, device)
    guarded = attend(case.x, case.v, case.scale, block=32, split=64)
    unguarded = attend(case.x, case.v, case.scale, block=32, split=64, masked=False)
    assert torch.equal(guarded[0], unguarded[0])
    assert torch.equal(guarded[1], unguarded[1])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_of_1e4_neither_overflow_nor_vanish(sign: float, device: str) -> None:
    case = make_case(63, 97, device)
    case.x[:, ::7] += sign * 1e4 / case.scale  # gaps of 1e4 between and inside blocks
    check(case, *attend(case.x, case.v, case.scale, block=32, split=40))


def test_a_row_that_sees_nothing_is_zero_and_minus_infinity(device: str) -> None:
    case = make_case(63, 97, device)
    case.x[::5] = -torch.inf  # whole rows
    case.x[1::5, :70] = -torch.inf  # nothing in the first blocks, so the state starts late
    case.x[2::5, 30:] = -torch.inf  # nothing in the last ones
    case.x[3::5, 1:] = -torch.inf  # a single key
    out, lse = attend(case.x, case.v, case.scale, block=32, split=64)
    check(case, out, lse)
    assert (out[::5] == 0).all() and (lse[::5] == -torch.inf).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy, in the interpreter
@pytest.mark.parametrize("whole_row", [False, True])
def test_nan_reaches_the_result_of_its_row_and_no_other(whole_row: bool, device: str) -> None:
    case = make_case(63, 97, device)
    clean = attend(case.x, case.v, case.scale, block=32, split=64)
    case.x[5, slice(None) if whole_row else 40] = torch.nan
    out, lse = attend(case.x, case.v, case.scale, block=32, split=64)
    assert out[5].isnan().all() and lse[5].isnan()
    others = torch.arange(63) != 5
    assert torch.equal(out[others], clean[0][others])
    assert torch.equal(lse[others], clean[1][others])
