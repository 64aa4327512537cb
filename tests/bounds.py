"""References for results, masks to try backends and kernels with, painted tiles, noted calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ring_attn.backends.base import Backend, BackwardInputs
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import Scores
from ring_attn.core.tiles import Tile, pair_tiles
from ring_attn.testing import (
    Expected,
    Inputs,
    check,
    check_all,
    check_rounded,
    dense_gradients,
    noisy_runs,
    plain_gradients,
    poisoned_empty,
)

T = TypeVar("T")


def whole(mask: Mask) -> tuple[Tile, ...]:
    layouts = (SequenceLayout.contiguous(n, 1) for n in (mask.seqlen_q, mask.seqlen_k))
    return pair_tiles(*layouts, mask, 0, 0)


def expect(
    inputs: Inputs, mask: Mask, scale: float | None = None, **scores: Any
) -> tuple[Expected, Expected]:
    oracle, plain = (f(*inputs, mask, scale, **scores) for f in (dense_gradients, plain_gradients))
    return oracle, plain


def run(
    backend: Backend,
    inputs: Inputs,
    steps: Sequence[Sequence[Tile]],
    *,
    rebuild_out: bool = False,
    say_last: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Expected:
    """Runs one rank's forward and backward, one step per list of tiles; asserts unchanged inputs.

    With `rebuild_out` the backward gets delta but no `out`; with `say_last` the forward's last
    step is called with `last=True`. Memory starts as NaN.
    """
    q, k, v, dout = inputs
    before = [x.clone() for x in inputs]
    scores = Scores(q.size(-1) ** -0.5 if scale is None else scale, softcap)
    accum = torch.float64 if q.dtype == torch.float64 else torch.float32
    dq, dk, dv = (torch.zeros(x.shape, dtype=accum, device=q.device) for x in (q, k, v))
    with poisoned_empty():
        state = backend.new_state(q, v.size(-1), sinks)
        for index, tiles in enumerate(steps):
            last = say_last and index == len(steps) - 1
            state = backend.forward(q, k, v, tiles, state, scores=scores, last=last)
        out, lse = backend.finalize(state, q.dtype)
        given = BackwardInputs(q, k, v, dout, *backend.row_statistics(out, dout, lse))
        for tiles in steps:
            rest = None if rebuild_out else out
            backend.backward(given, tiles, (dq, dk, dv), scores=scores, out=rest)
    assert all(map(same_bits, inputs, before))
    factor = backend.gradient_factor(scores)
    return Expected(out, lse, *(x.to(q.dtype) for x in (dq * factor, dk * factor, dv)))


def assert_holds(
    got: Expected | Mapping[str, Tensor], oracle: Expected, plain: Expected, where: object = ""
) -> None:
    """Asserts each result within its bound; a mapping may hold only some results, by name."""
    if isinstance(got, Expected):
        verdicts = check_all(got, oracle, plain)
    else:
        verdicts = tuple(
            check(name, x, getattr(oracle, name), getattr(plain, name), oracle.terms[name])
            for name, x in got.items()
        )
    assert verdicts and all(verdict.ok for verdict in verdicts), (where, *map(str, verdicts))


def assert_close(name: str, got: Tensor, oracle: Tensor, noisy: Sequence[Tensor]) -> None:
    """Assert a result within the bound of runs with random roundings (`noisy_runs`)."""
    verdict = check_rounded(name, got.detach(), oracle, noisy)
    assert verdict.ok, str(verdict)


def assert_computes(got: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Assert that a result is the function's, which is run in float64 and in noisy runs."""
    oracle = function(*(x.detach().double() for x in inputs))
    noisy = noisy_runs(lambda: function(*(x.detach() for x in inputs)))
    assert_close("result", got, oracle, noisy)


def named(runs: Sequence[Mapping[str, T]], name: str) -> list[T]:
    return [run[name] for run in runs]


def visible_pairs(tile: Tile) -> Tensor:
    """(rows, cols) booleans of a tile, written as its definition states them."""
    i, j = (torch.arange(rows.start, rows.stop) for rows in (tile.q, tile.kv))
    offsets = j - i[:, None]
    lo, hi = tile.lo, tile.hi
    seen = torch.ones_like(offsets, dtype=torch.bool)
    if lo is not None:
        seen &= offsets >= lo
    if hi is not None:
        seen &= offsets <= hi
    return seen


def painted(tiles: Sequence[Tile], rows: int, cols: int) -> Tensor:
    count = torch.zeros(rows, cols, dtype=torch.int64)
    for tile in tiles:
        count[tile.q, tile.kv] += visible_pairs(tile)
    return count


def same(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    """Whether there are as many tensors, each equal to the other."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compares bits: NaN equals NaN, and 8-bit floats have no comparison."""
    bits = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and torch.equal(*bits)


def _scores(
    q: Tensor, k: Tensor, seen: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Scores (batch, heads, rows, cols), -inf where nothing is seen, and the slope of the cap."""
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(q.size(2) // k.size(2), 2)) * scale
    slope = torch.ones_like(s)
    if softcap:
        t = torch.tanh(s / softcap)
        s, slope = softcap * t, 1.0 - t * t
    return s.masked_fill(~seen, -torch.inf), slope


def textbook_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse in the dtype of the inputs; `seen` (rows, cols) has True for visible pairs."""
    s, _ = _scores(q, k, seen, scale, softcap)
    lse = s.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1))
    p = (s - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp()
    v = v.repeat_interleave(q.size(2) // v.size(2), 2)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def textbook_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv as in flash-attention's paper: p = exp(s - lse), and delta."""
    groups = q.size(2) // k.size(2)
    s, slope = _scores(q, k, seen, scale, softcap)
    p = (s - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp()
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    ds = p * (torch.einsum("bihd,bjhd->bhij", dout, v) - delta.unsqueeze(-1)) * scale * slope
    dq = torch.einsum("bhij,bjhd->bihd", ds, k)
    dk = torch.einsum("bhij,bihd->bjhd", ds, q).unflatten(2, (-1, groups)).sum(3)
    dv = torch.einsum("bhij,bihd->bjhd", p, dout).unflatten(2, (-1, groups)).sum(3)
    return dq, dk, dv
