"""The float64 oracle, plain PyTorch as the yardstick, and `check`, which holds a result to both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from ring_attn.core.dtypes import accum_dtype
from ring_attn.core.mask import Mask

RESULTS = ("out", "lse", "dq", "dk", "dv")
RESULTS_WITH_SINKS = (*RESULTS, "dsinks")

# Puts logits some hundreds apart: rows become one-hot, and exp(s) without its maximum overflows.
LARGE_LOGITS = 64.0

# The number that flash-attention's tests add and subtract again to see how a result is rounded.
PERTURBATION = 0.3


class Inputs(NamedTuple):
    """`q (batch, seqlen_q, nheads, headdim)`, `k`, `v (batch, seqlen_k, nheads_kv, ..)`, `dout`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


@dataclass(frozen=True)
class Expected:
    """The results of one attention call, forward and backward.

    Attributes:
        out: (batch, seqlen_q, nheads, headdim_v).
        lse: (batch, nheads, seqlen_q), natural logarithm, -inf for rows that see nothing.
        dq: as q.
        dk: as k.
        dv: as v.
        dsinks: (nheads,), None without sinks.
        terms: from the oracle only, by result: how much is summed, in absolute values, for each
            element. It shows what cancels, and is 0 where nothing is summed.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None
    terms: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """One result against its bound."""

    name: str
    error: float
    bound: float
    ok: bool

    @property
    def ratio(self) -> float:
        """error / bound: at most 1 where the result holds; 0 where nothing can be wrong."""
        if self.bound == 0.0:
            return 0.0 if self.ok else math.inf
        return self.error / self.bound

    def __str__(self) -> str:
        word = "ok" if self.ok else "FAILED"
        return f"{self.name}: error {self.error:.2e}, bound {self.bound:.2e}: {word}"


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    softmax_scale: float | None = None,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The oracle: dense attention in float64, differentiable.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k: (batch, seqlen_k, nheads_kv, headdim); a kv head serves nheads / nheads_kv query heads.
        v: (batch, seqlen_k, nheads_kv, headdim_v).
        mask: what sees what.
        softmax_scale: 1 / sqrt(headdim) by default.
        softcap: where it is not 0, scores are `softcap * tanh(score / softcap)`.
        sinks: (nheads,), a logit of each head in the denominator, without a value.

    Returns:
        `out` (batch, seqlen_q, nheads, headdim_v) and `lse` (batch, nheads, seqlen_q), float64. A
        row that sees nothing has out 0, lse -inf (or its sink) and zero gradients.
    """
    sinks = None if sinks is None else sinks.double()
    return _attention(q.double(), k.double(), v.double(), mask, softmax_scale, softcap, sinks)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    softmax_scale: float | None = None,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The yardstick: the same mathematics as plain PyTorch does it in the inputs' own dtype.

    In float64, where it would be the oracle itself, every sum runs in another order (queries, keys
    and dims reversed), so that the two share no rounding errors.

    Returns:
        As `dense_attention`; `out` in q's dtype. `lse` in float32 (float64 for float64), from
        scores in that dtype: what a matmul of 16-bit inputs that accumulates in float32 has before
        it rounds, so that the yardstick of a float32 result has a float32 error.
    """
    if q.dtype != torch.float64:
        return _attention(q, k, v, mask, softmax_scale, softcap, sinks)
    q, k, v = (x.flip(1, 3) for x in (q, k, v))
    out, lse = _attention(q, k, v, mask, softmax_scale, softcap, sinks, backwards=True)
    return out.flip(1, 3), lse.flip(2)


def dense_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    mask: Mask,
    softmax_scale: float | None = None,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Expected:
    """The oracle's results and gradients in float64, with their `terms`."""
    dtype = q.dtype
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    sinks = None if sinks is None else sinks.double()
    expected = _gradients(dense_attention, q, k, v, dout, mask, softmax_scale, softcap, sinks)
    terms = _terms(q, k, v, dout, expected, mask, softmax_scale, softcap, sinks, dtype)
    return replace(expected, terms=terms)


def plain_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    mask: Mask,
    softmax_scale: float | None = None,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Expected:
    """Plain PyTorch's results and autograd's gradients in the inputs' own dtypes."""
    return _gradients(plain_attention, q, k, v, dout, mask, softmax_scale, softcap, sinks)


def check(
    name: str, got: Tensor, oracle: Tensor, plain: Tensor, terms: Tensor | None = None
) -> Verdict:
    """Holds one result against the oracle, within twice plain PyTorch's error and a rounding floor.

    The floor has two parts. One is flash-attention's rule, `2 * max|x + 0.3 - 0.3 - x|` in the
    result's dtype, for values of any size: 0.3 is counted in units of the largest one, and since
    the sum of the two rounds by at most half a unit in its last place (ulp), the worst case of the
    expression is one such ulp. It is taken in closed form, so that it is not zero by luck. The
    other is the same ulp of the accumulation dtype at the size of what is summed, `terms`: where
    large terms cancel (the gradient of a row that sees one key is 0, and plain PyTorch may even say
    so exactly) no algorithm that sums them in float32 can do better.

    Args:
        name: of the result, for the verdict.
        got: the result.
        oracle: float64, the same shape.
        plain: what plain PyTorch gives, in the dtype that `got` must have.
        terms: `Expected.terms[name]` of the oracle; without it the second part is left out. Where
            it is 0 nothing is summed, and the result must be exactly the oracle's: a row that sees
            nothing, a key that nobody sees.

    Returns:
        The verdict. -inf agrees with -inf; NaN anywhere fails.

    Raises:
        ValueError: shapes differ.
        TypeError: dtypes of `got` and `plain` differ.
    """
    if not got.shape == oracle.shape == plain.shape:
        raise ValueError(
            f"{name} must have shape {tuple(oracle.shape)} as the oracle, got {tuple(got.shape)} "
            f"(plain PyTorch: {tuple(plain.shape)})"
        )
    if got.dtype != plain.dtype:
        raise TypeError(f"{name} must be {plain.dtype} as plain PyTorch's, got {got.dtype}")
    got, oracle = got.detach().double().cpu(), oracle.detach().double().cpu()
    errors = _distance(got, oracle)
    bound = 2.0 * _largest(_distance(plain.detach().double().cpu(), oracle))
    bound += _rounding_floor(oracle, plain.dtype)
    exact = torch.zeros_like(errors, dtype=torch.bool)
    if terms is not None:
        bound += _rounding_floor(terms.detach().cpu(), accum_dtype(plain.dtype))
        exact = terms.detach().cpu() == 0.0
    error = _largest(errors)
    # Written so that a NaN on either side is a failure.
    ok = error <= bound and not bool((errors[exact] != 0.0).any())
    return Verdict(name, error, bound, ok)


def check_all(got: Expected, oracle: Expected, plain: Expected) -> tuple[Verdict, ...]:
    """`check` of out, lse, dq, dk, dv, and dsinks where there is one, with the oracle's terms.

    Raises:
        ValueError: only some have dsinks, or as `check`.
        TypeError: as `check`.
    """
    there = [one.dsinks is not None for one in (got, oracle, plain)]
    if any(there) != all(there):
        raise ValueError(f"dsinks must be in all or none of got, oracle and plain, are in {there}")
    return tuple(
        check(
            name,
            getattr(got, name),
            getattr(oracle, name),
            getattr(plain, name),
            oracle.terms.get(name),
        )
        for name in (RESULTS_WITH_SINKS if all(there) else RESULTS)
    )


def random_qkv(
    *,
    batch: int = 1,
    seqlen_q: int = 113,
    seqlen_k: int | None = None,
    nheads: int = 4,
    nheads_kv: int | None = None,
    headdim: int = 32,
    headdim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    noncontiguous: bool = False,
    large_logits: bool = False,
) -> Inputs:
    """Normally distributed inputs: the same values for the same sizes and seed on every machine.

    Args:
        batch: batch size.
        seqlen_q: number of queries.
        seqlen_k: number of keys; as many as queries if None.
        nheads: query heads.
        nheads_kv: kv heads; as many as query heads if None.
        headdim: of q and k.
        headdim_v: of v and dout; headdim if None.
        dtype: of all four.
        device: where they end up; the numbers are drawn on the CPU.
        seed: of the generator.
        noncontiguous: heads before rows in memory and every other element of the head dim, so that
            no stride is what a contiguous tensor has.
        large_logits: logits some hundreds apart.

    Returns:
        `Inputs(q, k, v, dout)`.
    """
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    nheads_kv = nheads if nheads_kv is None else nheads_kv
    headdim_v = headdim if headdim_v is None else headdim_v
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, heads: int, dim: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(batch, rows, heads, dim, generator=generator, dtype=torch.float64)
        x = (x * scale).to(device, dtype)
        return strided(x) if noncontiguous else x

    return Inputs(
        draw(seqlen_q, nheads, headdim, LARGE_LOGITS if large_logits else 1.0),
        draw(seqlen_k, nheads_kv, headdim),
        draw(seqlen_k, nheads_kv, headdim_v),
        draw(seqlen_q, nheads, headdim_v),
    )


def strided(x: Tensor) -> Tensor:
    """The same values in memory with heads before rows and a gap after every element."""
    spread = x.new_zeros(*x.transpose(-2, -3).shape, 2)
    spread[..., 0] = x.transpose(-2, -3)
    return spread[..., 0].transpose(-2, -3)


def random_sinks(
    nheads: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Tensor:
    """(nheads,) sinks: of the size of ordinary scores, the first so low that it takes no weight.

    The values are those of a bfloat16 in every dtype, so that no dtype of a call rounds them.
    """
    generator = torch.Generator().manual_seed(seed)
    sinks = 2.0 * torch.randn(nheads, generator=generator, dtype=torch.float64)
    sinks[0] = -1e4
    return sinks.to(torch.bfloat16).to(device, dtype)


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within it, `torch.empty` and its relatives return NaN instead of whatever memory held.

    What reads memory that it never wrote then fails every time, rather than once in a while.
    Integers get bytes of 0xFF: a uint8 buffer reads as NaN in every floating-point dtype.
    """
    owners_and_names: tuple[tuple[Any, str], ...] = (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    )
    with ExitStack() as stack:
        for owner, name in owners_and_names:
            poisoned = _poisoned(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, poisoned))
        yield


def _poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        x = make(*args, **kwargs)
        with torch.no_grad():
            if x.is_floating_point() or x.is_complex():
                return x.fill_(math.nan)
            if x.dtype == torch.bool:
                return x.fill_(True)
            return x.fill_(torch.iinfo(x.dtype).max if x.dtype == torch.uint8 else -1)

    return poisoned


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    softmax_scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    backwards: bool = False,
) -> tuple[Tensor, Tensor]:
    """Dense attention in the dtype of its inputs, with lse in at least float32.

    `backwards` says that queries and keys are given from the last to the first: a sink, which is
    one more column of the scores, then stands before them instead of behind.
    """
    visible = mask.dense().to(q.device)
    if backwards:
        visible = visible.flip(0, 1)
    alone = ~visible.any(-1, keepdim=True)  # (seqlen_q, 1), rows that see nothing
    scale = _scale(q, softmax_scale)

    def scores_in(dtype: torch.dtype) -> Tensor:
        # (batch, kv heads, heads of each, seqlen_q, seqlen_k). Rows that see nothing are made
        # finite before the softmax and zero after it: a row of -inf is NaN there, both ways.
        x = torch.einsum("bignd,bjgd->bgnij", _grouped(q, k).to(dtype), k.to(dtype)) * scale
        x = softcap * torch.tanh(x / softcap) if softcap else x
        x = x.masked_fill(~visible, -math.inf).masked_fill(alone, 0.0)
        if sinks is None:
            return x
        column = sinks.to(dtype).view(k.size(2), -1, 1, 1).expand(*x.shape[:-1], 1)
        return torch.cat((column, x) if backwards else (x, column), -1)

    # Heads stay grouped, so that gradients of k and v are one sum over a group's heads and rows, as
    # in any kernel that does not copy kv heads: sums by head, added up later, can round less.
    p = scores_in(q.dtype).softmax(-1)
    if sinks is not None:
        p = p[..., 1:] if backwards else p[..., :-1]
    p = p.masked_fill(alone, 0.0)
    out = torch.einsum("bgnij,bjgd->bignd", p, v).flatten(2, 3)
    lse = scores_in(accum_dtype(q.dtype)).logsumexp(-1).flatten(1, 2)
    of_none = lse.new_tensor([-math.inf]) if sinks is None else sinks.to(lse.dtype)
    return out, torch.where(alone.squeeze(-1), of_none.unsqueeze(-1), lse)


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """(batch, rows, nheads, dim) -> (batch, rows, kv heads, heads of each, dim)."""
    return q.unflatten(2, (k.size(2), -1))


def _gradients(
    attention: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    mask: Mask,
    softmax_scale: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> Expected:
    wanted = [x.detach().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    with torch.enable_grad():
        given = None if sinks is None else wanted[3]
        out, lse = attention(*wanted[:3], mask, softmax_scale, softcap=softcap, sinks=given)
        dq, dk, dv, *dsinks = torch.autograd.grad(out, wanted, dout.detach())
    return Expected(out.detach(), lse.detach(), dq, dk, dv, dsinks[0] if dsinks else None)


@torch.no_grad()
def _terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    expected: Expected,
    mask: Mask,
    softmax_scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The equations of forward and backward with the absolute value of every term in its place.

    What is computed on the way is rounded too, and its error, in units of the accumulation dtype's
    epsilon, stands for it where it is used:

        s        the size of the products that it sums. With softcap of the share that the slope of
                 the cap, 1 - t^2 with t = s / softcap, lets through, and the size of s again
        lse      those of s, weighted by p, and its own size
        p        p (1 + s's + lse's), since p = exp(s - lse). With logits of some hundreds that is
                 all of the error of dv in float32; with ordinary ones it is that of the sums
        slope    1 and t^2, and 2 |t| times what t has of s
        out      by that of p; and `out` is rounded to `dtype`, by its size or, where it is
                 subnormal there, the smallest normal number's
        delta    by that of out
    """
    scale, groups = _scale(q, softmax_scale), q.size(2) // k.size(2)
    hidden = ~mask.dense().to(q.device)
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    t = torch.tanh(s / softcap) if softcap else s.new_zeros(())
    slope = 1.0 - t**2
    s = softcap * t if softcap else s
    p = (s - expected.lse.unsqueeze(-1)).masked_fill(hidden, -math.inf).exp()

    q, k, v, dout, out = (x.abs() for x in (q, k, v, dout, expected.out))
    products = torch.einsum("bihd,bjhd->bhij", q, k) * scale * slope
    s_terms = products + softcap * t.abs()
    slope_terms = 1.0 + t**2 + 2.0 * t.abs() * products / softcap if softcap else 0.0
    lse_terms = (p * s_terms).sum(-1) + expected.lse.abs().masked_fill(expected.lse.isneginf(), 0.0)
    p_sink = None
    if sinks is not None:
        sinks = sinks.view(-1, 1)
        p_sink = (sinks - expected.lse.masked_fill(expected.lse.isneginf(), 0.0)).exp()
        sink_terms = sinks.abs().masked_fill(sinks.isneginf(), 0.0)
        lse_terms = lse_terms + p_sink * sink_terms

    p_terms = p * (1.0 + s_terms + lse_terms.unsqueeze(-1))
    out_terms = torch.einsum("bhij,bjhd->bihd", p_terms, v)
    rounding = torch.finfo(dtype).eps / torch.finfo(accum_dtype(dtype)).eps
    rounded = out.clamp(min=torch.finfo(dtype).smallest_normal).masked_fill(out == 0.0, 0.0)
    delta = torch.einsum("bihd,bihd->bhi", out, dout)
    delta_terms = torch.einsum("bihd,bihd->bhi", out_terms + rounding * rounded, dout)
    dp = torch.einsum("bihd,bjhd->bhij", dout, v) + delta.unsqueeze(-1)
    ds_terms = (p_terms * slope + p * slope_terms) * dp + p * slope * delta_terms.unsqueeze(-1)
    ds_terms = ds_terms * scale

    def to_kv_heads(x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, groups)).sum(3)

    terms = {
        "out": out_terms,
        "lse": lse_terms,
        "dq": torch.einsum("bhij,bjhd->bihd", ds_terms, k),
        "dk": to_kv_heads(torch.einsum("bhij,bihd->bjhd", ds_terms, q)),
        "dv": to_kv_heads(torch.einsum("bhij,bihd->bjhd", p_terms, dout)),
    }
    if p_sink is not None:
        dsinks_terms = p_sink * ((1.0 + sink_terms + lse_terms) * delta + delta_terms)
        terms["dsinks"] = dsinks_terms.sum((0, 2))
    return terms


def _rounding_floor(x: Tensor, dtype: torch.dtype) -> float:
    """The worst of `2 * max|x + c - c - x|` in dtype, `c` being 0.3 of the largest value of x.

    The sum is at most `1.3 * max|x|` and rounds by half the distance between neighbours there.
    """
    largest = _largest(x[x.isfinite()].abs())
    if largest == 0.0:
        return 0.0
    info = torch.finfo(dtype)
    _, exponent = math.frexp((1.0 + PERTURBATION) * largest)
    return max(math.ldexp(info.eps, exponent - 1), info.smallest_normal * info.eps)


def _distance(x: Tensor, oracle: Tensor) -> Tensor:
    """|x - oracle|, 0 where both are the same infinity."""
    return (x - oracle).abs().masked_fill(x == oracle, 0.0)


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale
