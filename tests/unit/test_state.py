"""The running state: merging in any order, over any gap, gives what one softmax over all gives."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from ring_attn.core.state import State
from ring_attn.testing import check

BATCH, ROWS, HEADS, KEYS, DIM = 2, 5, 3, 24, 8
ALL = slice(0, ROWS)
DTYPES = [torch.float32, torch.float64]

Part = tuple[Tensor, Tensor, Tensor]


def new_state(dtype: torch.dtype = torch.float32, sinks: Tensor | None = None) -> State:
    return State((BATCH, ROWS, HEADS, DIM), dtype, "cpu", sinks)


def scores_and_values(dtype: torch.dtype, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """s (batch, heads, rows, keys) and v (batch, keys, heads, dim)."""
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(BATCH, HEADS, ROWS, KEYS, generator=generator, dtype=torch.float64) * spread
    v = torch.randn(BATCH, KEYS, HEADS, DIM, generator=generator, dtype=torch.float64)
    return s.to(dtype), v.to(dtype)


def partial(s: Tensor, v: Tensor) -> Part:
    """(acc, m, l) of some keys, as a backend computes it; keys of -inf are not seen."""
    m = s.amax(-1)
    p = (s - m.masked_fill(m == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return torch.einsum("bhij,bjhd->bihd", p, v), m, p.sum(-1)


def as_out_lse(part: Part) -> tuple[Tensor, Tensor]:
    acc, m, l = part
    weight = l.masked_fill(l == 0.0, 1.0).transpose(1, 2).unsqueeze(-1)
    return acc / weight, m + l.log()


def softmax(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over all keys, in the dtype of s."""
    alone = (s == -torch.inf).all(-1, keepdim=True)
    p = s.masked_fill(alone, 0.0).softmax(-1).masked_fill(alone, 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), s.logsumexp(-1)


def assert_softmax(got: tuple[Tensor, Tensor], s: Tensor, v: Tensor) -> None:
    """Within the bound that plain PyTorch's error and rounding give."""
    # Plain PyTorch sums in another order, so that its error in float64 is not 0 by construction.
    out, lse = softmax(s.flip(-1), v.flip(1))
    exact_out, exact_lse = softmax(s.double(), v.double())
    p = (s.double() - exact_lse.masked_fill(exact_lse.isneginf(), 0.0).unsqueeze(-1)).exp()
    terms = torch.einsum("bhij,bjhd->bihd", p, v.double().abs())
    lse_terms = (p * s.double().masked_fill(p == 0.0, 0.0).abs()).sum(-1)
    lse_terms += exact_lse.abs().masked_fill(exact_lse.isneginf(), 0.0)
    for verdict in (
        check("out", got[0], exact_out, out, terms),
        check("lse", got[1], exact_lse, lse, lse_terms),
    ):
        assert verdict.ok, str(verdict)


def chunks(s: Tensor, v: Tensor, *sizes: int) -> list[Part]:
    pairs = zip(s.split(list(sizes), -1), v.split(list(sizes), 1), strict=True)
    return [partial(part_s, part_v) for part_s, part_v in pairs]


def folded(
    parts: list[Part], dtype: torch.dtype, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    state = new_state(dtype, sinks)
    for acc, m, l in parts:
        state.fold(ALL, acc.clone(), m.clone(), l.clone())
    return state.finalize(dtype)


@pytest.mark.parametrize("gap", [1e3, 1e4, 3e38])
@pytest.mark.parametrize("larger_first", [False, True])
def test_a_gap_leaves_the_larger_side_alone(gap: float, larger_first: bool) -> None:
    s, v = scores_and_values(torch.float32)
    small, large = chunks(s, v, 12, 12)
    for shift in (gap, -gap):
        # The whole gap above, or the other side the whole gap below.
        parts = [small, (large[0], large[1] + shift, large[2])]
        winner = parts[1] if shift > 0 else parts[0]
        got = folded(parts[::-1] if larger_first else parts, torch.float32)
        alone = folded([winner], torch.float32)
        assert torch.equal(got[0], alone[0])
        assert torch.equal(got[1], alone[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_order_of_folding_is_one_softmax(dtype: torch.dtype) -> None:
    s, v = scores_and_values(dtype)
    for order in permutations(chunks(s, v, 3, 9, 5, 7)):
        assert_softmax(folded(list(order), dtype), s, v)
    s[:, :, 0] = -torch.inf  # row 0 sees nothing
    s[:, :, 1, :8] = -torch.inf  # row 1 sees nothing in the first chunk
    s[:, :, 2, 8:16] = -torch.inf
    s[:, :, 3, 16:] = -torch.inf
    for order in permutations(chunks(s, v, 8, 8, 8)):
        out, lse = folded(list(order), dtype)
        assert not bool(out.isnan().any() | lse.isnan().any())
        assert bool((out[:, 0] == 0.0).all())
        assert bool((lse[:, :, 0] == -torch.inf).all())
        assert_softmax((out, lse), s, v)


def test_unseen_out_and_lse_pairs_change_nothing() -> None:
    out, lse = softmax(*scores_and_values(torch.float32))
    nothing = (torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    one = (out, lse)
    for pairs in ([one], [nothing, one], [one, nothing], [nothing, one, nothing]):
        state = new_state()
        for pair in pairs:
            state.fold(ALL, *(x.clone() for x in pair))
        got = state.finalize(torch.float32)
        assert torch.equal(got[0], out)
        assert torch.equal(got[1], lse)


def test_16_bit_partials_are_folded_in_float32() -> None:
    s, v = scores_and_values(torch.float32)
    parts = [as_out_lse(part) for part in chunks(s, v, 12, 12)]
    rounded = [(out.bfloat16(), lse) for out, lse in parts]
    state, wide = new_state(), new_state()
    for out, lse in rounded:
        state.fold(ALL, out, lse)
        wide.fold(ALL, out.float(), lse.clone())
    assert state.acc.dtype == torch.float32
    got, expected = state.finalize(torch.bfloat16), wide.finalize(torch.float32)
    assert got[0].dtype == torch.bfloat16
    assert torch.equal(got[0], expected[0].bfloat16())  # rounded once, at the end
    assert torch.equal(got[1], expected[1])


# -- sinks


@pytest.mark.parametrize("gap", [1e3, 1e4, 1e30])
def test_a_sink_far_off_takes_all_or_nothing(gap: float) -> None:
    s, v = scores_and_values(torch.float32)
    sinks = torch.tensor([gap, -gap, 0.0])
    got, alone = (
        folded(chunks(s, v, 24), torch.float32, sinks),
        folded(chunks(s, v, 24), torch.float32),
    )
    assert bool((got[0][:, :, 0] == 0.0).all()) and bool((got[1][:, 0] == gap).all())
    assert torch.equal(got[0][:, :, 1], alone[0][:, :, 1])
    assert torch.equal(got[1][:, 1], alone[1][:, 1])
    assert bool(got[0].isfinite().all()) and bool(got[1].isfinite().all())


# -- what a fold owns


def test_later_and_partial_folds_leave_the_callers_tensors_alone() -> None:
    s, v = scores_and_values(torch.float32)
    first, second, third = chunks(s, v, 8, 8, 8)
    state = new_state()
    some = slice(1, 4)
    little = [x[:, some] if x.ndim == 4 else x[:, :, some] for x in first]
    for rows, part in ((some, little), (ALL, second), (ALL, third)):
        before = [x.clone() for x in part]
        state.fold(rows, *part)
        state.fold(rows, *part[:2])
        assert all(torch.equal(x, y) for x, y in zip(part, before, strict=True))
    held = [x.clone() for x in (*little, *second, *third)]
    state.finalize(torch.float32)
    assert all(torch.equal(x, y) for x, y in zip((*little, *second, *third), held, strict=True))


def test_finalize_uses_the_state_up() -> None:
    state = new_state()
    state.fold(ALL, *partial(*scores_and_values(torch.float32)))
    out, _ = state.finalize(torch.float32)
    kept = out.clone()
    empty, lse = state.finalize(torch.float32)
    assert bool((empty == 0.0).all())
    assert bool((lse == -torch.inf).all())
    state.fold(ALL, *partial(*scores_and_values(torch.float32)))
    assert torch.equal(out, kept), "a used state still writes into what it gave away"
