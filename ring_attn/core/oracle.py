"""The float64 oracle, plain PyTorch as the yardstick, and `check`, which compares with both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.core.dtypes import accum_dtype
from ring_attn.core.mask import Mask

RESULTS = ("out", "lse", "dq", "dk", "dv")
RESULTS_WITH_SINKS = (*RESULTS, "dsinks")

# The number that flash-attention's tests add and then subtract, to measure rounding.
PERTURBATION = 0.3


class Inputs(NamedTuple):
    """The inputs of an attention call, and the gradient of its output."""

    q: Tensor  # (batch, seqlen_q, nheads, headdim)
    k: Tensor  # (batch, seqlen_k, nheads_kv, headdim)
    v: Tensor  # (batch, seqlen_k, nheads_kv, headdim_v)
    dout: Tensor  # (batch, seqlen_q, nheads, headdim_v)


@dataclass(frozen=True)
class Expected:
    """The results of one attention call, forward and backward.

    Attributes:
        out: (batch, seqlen_q, nheads, headdim_v).
        lse: (batch, nheads, seqlen_q), natural logarithm, -inf for rows that see no key.
        dq: the shape of q.
        dk: the shape of k.
        dv: the shape of v.
        dsinks: (nheads,); None without sinks.
        terms: from the oracle only: for each result, the sum of the absolute values of the terms of
            each element. It is large where terms cancel, and 0 where nothing is summed.
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
    """The error of one result, and its bound."""

    name: str
    error: float
    bound: float
    ok: bool

    @property
    def ratio(self) -> float:
        """error / bound, which is at most 1 for a result within its bound; 0 if both are 0."""
        if self.bound == 0.0:
            return 0.0 if self.ok else math.inf
        return self.error / self.bound

    def __str__(self) -> str:
        word = "ok" if self.ok else "FAILED"
        return f"{self.name}: error {self.error:.2e}, bound {self.bound:.2e}: {word}"


class _Rule(NamedTuple):
    """The options that determine the weights of q, k and v."""

    mask: Mask
    softmax_scale: float | None
    softcap: float
    sinks: Tensor | None

    def scale(self, q: Tensor) -> float:
        return q.size(-1) ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def double(self) -> _Rule:
        return self._replace(sinks=None if self.sinks is None else self.sinks.double())


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
    """Compute the oracle: dense attention in float64, differentiable.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k: (batch, seqlen_k, nheads_kv, headdim); nheads / nheads_kv query heads share a kv head.
        v: (batch, seqlen_k, nheads_kv, headdim_v).
        mask: which queries see which keys.
        softmax_scale: None means 1 / sqrt(headdim).
        softcap: if it is not 0, scores are `softcap * tanh(score / softcap)`.
        sinks: (nheads,), for each head a logit in the denominator, which has no value.

    Returns:
        `out` (batch, seqlen_q, nheads, headdim_v) and `lse` (batch, nheads, seqlen_q), float64. For
        a row that sees no key, `out` is 0, `lse` is -inf (or the sink), and gradients are 0.

    Example:
        >>> q = torch.zeros(1, 3, 1, 2)
        >>> v = torch.arange(6.0).view(1, 3, 1, 2)
        >>> out, lse = dense_attention(q, q, v, Mask(3, 3, causal=True))
        >>> out[0, :, 0].tolist()  # row i is the mean of v up to row i
        [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    """
    rule = _Rule(mask, softmax_scale, softcap, sinks).double()
    return _attention(q.double(), k.double(), v.double(), rule)


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
    """Compute the yardstick: dense attention in plain PyTorch, in the dtype of the inputs.

    In float64 the yardstick would equal the oracle. There, every sum runs in another order
    (queries, keys and dims are reversed), so that the two share no rounding errors.

    Returns:
        The results of `dense_attention`, with `out` in the dtype of q. `lse` is float32 (float64
        for float64), from scores in that dtype, as a matmul of 16-bit inputs has them before it
        rounds its float32 sums. Thus the yardstick of a float32 result has a float32 error.

    Example:
        >>> q = torch.zeros(1, 3, 1, 2, dtype=torch.bfloat16)
        >>> out, lse = plain_attention(q, q, q, Mask(3, 3))
        >>> out.dtype, lse.dtype
        (torch.bfloat16, torch.float32)
    """
    return _plain(q, k, v, _Rule(mask, softmax_scale, softcap, sinks))


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
    """Compute the results and gradients of the oracle in float64, with their `terms`.

    Example:
        >>> q = torch.ones(1, 3, 1, 2)
        >>> expected = dense_gradients(q, q, q, dout=q, mask=Mask(3, 3))
        >>> expected.dv.dtype, expected.dv[0, :, 0, 0].tolist()
        (torch.float64, [1.0, 1.0, 1.0])
    """
    rule = _Rule(mask, softmax_scale, softcap, sinks).double()
    inputs = Inputs(q.double(), k.double(), v.double(), dout.double())
    expected = _gradients(_attention, inputs, rule)
    return replace(expected, terms=_terms(inputs, expected, rule, q.dtype))


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
    """Compute results of plain PyTorch and gradients of autograd, in the dtype of the inputs.

    Example:
        >>> q = torch.ones(1, 3, 1, 2, dtype=torch.bfloat16)
        >>> plain_gradients(q, q, q, dout=q, mask=Mask(3, 3)).dq.dtype
        torch.bfloat16
    """
    rule = _Rule(mask, softmax_scale, softcap, sinks)
    return _gradients(_plain, Inputs(q, k, v, dout), rule)


def check(
    name: str, got: Tensor, oracle: Tensor, plain: Tensor, terms: Tensor | None = None
) -> Verdict:
    """Compare one result with the oracle: bound = 2 * plain PyTorch's error + a rounding floor.

    The floor holds for any order of sums, so the bound does not depend on a lucky plain run. The
    error of plain PyTorch adds room where products of 16-bit numbers are rounded on the way. The
    floor has two parts:

    1. flash-attention's rule, `2 * max|x + 0.3 - 0.3 - x|` in the dtype of the result, with 0.3 in
       units of the largest value. The sum rounds by at most half a unit in its last place (ulp), so
       the worst case of the rule is one ulp. The floor is that worst case, which is never 0 by
       luck.
    2. The same ulp of the accumulation dtype at the size of `terms`, because no algorithm that sums
       large terms in float32 is more exact where they cancel, plus the smallest normal number of
       that dtype, below which GPUs round to 0. (The gradient of a row that sees one key is 0, and
       plain PyTorch may compute it exactly.)

    Args:
        name: name of the result, for the verdict.
        got: the result.
        oracle: the result of the oracle, float64, of the same shape.
        plain: the result of plain PyTorch, in the dtype that `got` must have.
        terms: `Expected.terms[name]` of the oracle. None leaves out the second part, and the bound
            depends on the plain run: use it only for tensors of many numbers. Where it is 0,
            nothing is summed, as for a row that sees no key or a key that no row sees; there the
            result must equal the oracle exactly.

    Returns:
        The verdict. -inf equals -inf, and a NaN anywhere fails.

    Raises:
        ValueError: the shapes differ.
        TypeError: the dtypes of `got` and `plain` differ.

    Example:
        >>> q = torch.randn(1, 8, 1, 4)
        >>> of = {"dout": q, "mask": Mask(8, 8, causal=True)}
        >>> oracle, plain = dense_gradients(q, q, q, **of), plain_gradients(q, q, q, **of)
        >>> check("out", plain.out, oracle.out, plain.out, oracle.terms["out"]).ok
        True
        >>> check("out", plain.out + 0.01, oracle.out, plain.out, oracle.terms["out"]).ok
        False
    """
    if not got.shape == oracle.shape == plain.shape:
        raise ValueError(
            f"{name} must have the oracle's shape {tuple(oracle.shape)}, got {tuple(got.shape)} "
            f"(plain PyTorch: {tuple(plain.shape)})"
        )
    if got.dtype != plain.dtype:
        raise TypeError(f"{name} must be {plain.dtype} as in plain PyTorch, got {got.dtype}")
    got, plain_64 = (x.detach().to(oracle.device, torch.float64) for x in (got, plain))
    oracle = oracle.detach().double()
    errors = distance(got, oracle)
    bound = 2.0 * largest(distance(plain_64, oracle))
    bound += _rounding_floor(oracle, plain.dtype)
    exact = torch.zeros_like(errors, dtype=torch.bool)
    if terms is not None:
        accum = accum_dtype(plain.dtype)
        bound += _rounding_floor(terms.detach(), accum)
        # Subnormal numbers may lose all their bits, and GPUs round them to 0.
        bound += torch.finfo(accum).smallest_normal
        exact = terms.detach() == 0.0
    error = largest(errors)
    # In this form of the comparison, NaN on either side fails.
    ok = error <= bound and not bool((errors[exact] != 0.0).any())
    return Verdict(name, error, bound, ok)


def check_all(got: Expected, oracle: Expected, plain: Expected) -> tuple[Verdict, ...]:
    """Check out, lse, dq, dk, dv, and dsinks if there are any, with the terms of the oracle.

    Raises:
        ValueError: only some of the arguments have dsinks, or a reason of `check`.
        TypeError: as in `check`.

    Example:
        >>> q = torch.randn(1, 8, 1, 4)
        >>> of = {"dout": q, "mask": Mask(8, 8, causal=True)}
        >>> oracle, plain = dense_gradients(q, q, q, **of), plain_gradients(q, q, q, **of)
        >>> all(verdict.ok for verdict in check_all(plain, oracle, plain))
        True
    """
    present = [results.dsinks is not None for results in (got, oracle, plain)]
    if any(present) != all(present):
        raise ValueError(
            f"dsinks must be present in all or none of (got, oracle, plain), got {tuple(present)}"
        )
    names = RESULTS_WITH_SINKS if all(present) else RESULTS
    return tuple(
        check(
            name,
            got=getattr(got, name),
            oracle=getattr(oracle, name),
            plain=getattr(plain, name),
            terms=oracle.terms.get(name),
        )
        for name in names
    )


def _plain(q: Tensor, k: Tensor, v: Tensor, rule: _Rule) -> tuple[Tensor, Tensor]:
    if q.dtype != torch.float64:
        return _attention(q, k, v, rule)
    q, k, v = (x.flip(1, 3) for x in (q, k, v))
    out, lse = _attention(q, k, v, rule, backwards=True)
    return out.flip(1, 3), lse.flip(2)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, rule: _Rule, backwards: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute dense attention in the dtype of the inputs, with lse in at least float32.

    `backwards`: queries and keys are given in reversed order. Then a sink, which is an additional
    column of the scores, is the first column instead of the last.
    """
    mask, softcap, sinks = rule.mask, rule.softcap, rule.sinks
    visible = mask.dense().to(q.device)
    if backwards:
        visible = visible.flip(0, 1)
    alone = ~visible.any(-1, keepdim=True)  # (seqlen_q, 1), rows that see no key
    scale = rule.scale(q)

    def scores_in(dtype: torch.dtype) -> Tensor:
        """Return (batch, kv heads, q heads per kv head, seqlen_q, seqlen_k) scores.

        Rows that see no key become finite here, with their sink, which may be -inf, and zero after
        the softmax: a row of -inf gives NaN in both directions.
        """
        grouped = q.unflatten(2, (k.size(2), -1)).to(dtype)  # (batch, rows, kv heads, group, dim)
        x = torch.einsum("bignd,bjgd->bgnij", grouped, k.to(dtype)) * scale
        x = softcap * torch.tanh(x / softcap) if softcap else x
        x = x.masked_fill(~visible, -math.inf).masked_fill(alone, 0.0)
        if sinks is None:
            return x
        # (nheads,) -> (batch, kv heads, q heads per kv head, seqlen_q, 1)
        column = sinks.to(dtype).view(k.size(2), -1, 1, 1).expand(*x.shape[:-1], 1)
        column = column.masked_fill(alone, 0.0)
        return torch.cat((column, x) if backwards else (x, column), -1)

    # Heads stay grouped, so that gradients of k and v are one sum over the heads and rows of a
    # group, as in kernels that do not copy kv heads. Separate sums of each head can round less.
    p = scores_in(q.dtype).softmax(-1)
    if sinks is not None:
        p = p[..., 1:] if backwards else p[..., :-1]
    p = p.masked_fill(alone, 0.0)
    out = torch.einsum("bgnij,bjgd->bignd", p, v).flatten(2, 3)  # joins the heads
    lse = scores_in(accum_dtype(q.dtype)).logsumexp(-1).flatten(1, 2)
    empty_lse = lse.new_tensor([-math.inf]) if sinks is None else sinks.to(lse.dtype)
    return out, torch.where(alone.squeeze(-1), empty_lse.unsqueeze(-1), lse)


def _gradients(
    attention: Callable[[Tensor, Tensor, Tensor, _Rule], tuple[Tensor, Tensor]],
    inputs: Inputs,
    rule: _Rule,
) -> Expected:
    given = (inputs.q, inputs.k, inputs.v, rule.sinks)
    leaves = [x.detach().requires_grad_() for x in given if x is not None]
    q, k, v, *sinks = leaves
    with torch.enable_grad():
        out, lse = attention(q, k, v, rule._replace(sinks=sinks[0] if sinks else None))
        dq, dk, dv, *dsinks = torch.autograd.grad(out, leaves, inputs.dout.detach())
    return Expected(
        out=out.detach(),
        lse=lse.detach(),
        dq=dq,
        dk=dk,
        dv=dv,
        dsinks=dsinks[0] if dsinks else None,
    )


# Longer than 60 lines: the equations share their intermediate values, and are read side by side.
@torch.no_grad()
def _terms(
    inputs: Inputs, expected: Expected, rule: _Rule, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Compute the equations of forward and backward with the absolute value of every term.

    Intermediate values are also rounded. Each of them contributes its error, in units of the
    epsilon of the accumulation dtype:

        s        sum of |q_i k_i|, scaled. With softcap, t = s / softcap: this sum times the cap's
                 slope, 1 - t^2, plus |s|
        lse      errors of s, weighted by p, plus |lse|
        p        p (1 + error of s + error of lse), since p = exp(s - lse). With logits of some
                 hundreds this is the whole error of dv in float32; otherwise the sums dominate
        slope    1 + t^2 + 2 |t| times the error of t
        out      errors of p, weighted by |v|. Rounding `out` to `dtype` adds |out|, or the smallest
                 normal number where `out` is subnormal
        delta    errors of out, weighted by |dout|
    """
    q, k, v, dout = inputs
    softcap, sinks = rule.softcap, rule.sinks
    scale = rule.scale(q)
    groups = q.size(2) // k.size(2)  # q heads that share a kv head
    hidden = ~rule.mask.dense().to(q.device)
    k = k.repeat_interleave(groups, 2)
    v = v.repeat_interleave(groups, 2)
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
        # (batch, rows, nheads, dim) -> (batch, rows, nheads_kv, dim)
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
    """Return the worst case of `2 * max|x + c - c - x|` in `dtype`, where c is `0.3 * max|x|`.

    The sum is at most `1.3 * max|x|`, and rounds by at most half an ulp of that size.
    """
    size = largest(x[x.isfinite()].abs())
    if size == 0.0:
        return 0.0
    info = torch.finfo(dtype)
    _, exponent = math.frexp((1.0 + PERTURBATION) * size)
    return max(math.ldexp(info.eps, exponent - 1), info.smallest_normal * info.eps)


def distance(x: Tensor, oracle: Tensor) -> Tensor:
    """Return `|x - oracle|`, which is 0 where both are the same infinity."""
    return (x - oracle).abs().masked_fill(x == oracle, 0.0)


def largest(x: Tensor) -> float:
    """Return the largest element, or 0 for a tensor without elements."""
    return float(x.max()) if x.numel() else 0.0
