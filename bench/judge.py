"""Compares an implementation's results with float64, at any length, before it is timed.

Dense attention in float64 is too large at the measured lengths. So dout is zero except in some rows
of every head and batch entry, which then alone determine the gradients, exactly: checked are out,
dq, and lse where an implementation returns it, of these rows, dk and dv of some keys, and that dq
is 0 elsewhere. The bound is that of `ring_attn.testing`, which follows from plain PyTorch's error
in the same dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from ring_attn.bench.implementations import Implementation, Shape
from ring_attn.core.mask import Mask
from ring_attn.testing import Inputs, Verdict, check, dense_gradients, plain_gradients

# Numbers of rows and keys that are checked.
ROWS, KEYS = 32, 256

GRADIENTS = ("dq", "dk", "dv")

# For each result: float64's, plain PyTorch's, and the terms of each sum.
Results = Mapping[str, tuple[Tensor, ...]]

Make = Callable[[Shape, Inputs], Implementation]


class OracleJudge:
    """The oracle of some rows and keys of a problem, which checks every implementation."""

    def __init__(self, problem: Shape, data: Inputs, *, backward: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        rows = _sample(problem.rows, ROWS, generator)
        keys = _sample(problem.seqlen, KEYS, generator)
        self._problem, self._backward = problem, backward
        self._rows, self._keys = (torch.tensor(x).to(problem.device) for x in (rows, keys))
        q, k, v, dout = data
        few = torch.zeros_like(dout)
        few[:, self._rows] = dout[:, self._rows]
        self._data = Inputs(q, k, v, few)
        self._figures = self._oracle(_of_rows(problem.mask, rows))

    def verdicts(self, make: Make) -> list[Verdict]:
        attention = make(self._problem, self._data)
        attention.forward()
        if self._backward:
            attention.backward()
        out, *grads = attention.results()
        got = {"out": out, **dict(zip(GRADIENTS, grads, strict=False))}
        compared = {
            name: self._by_kv_head(x[:, self._keys if name in ("dk", "dv") else self._rows])
            for name, x in got.items()
        }
        if attention.lse is not None:
            compared["lse"] = self._by_kv_head(attention.lse[:, :, self._rows], 1)
        verdicts = [
            check(name, x.flatten(0, 1), *self._figures[name]) for name, x in compared.items()
        ]
        if self._backward:
            verdicts.append(_zero_elsewhere(got["dq"], self._rows))
        return verdicts

    def _oracle(self, mask: Mask) -> Results:
        """The figures, one batch entry and kv head at a time, to bound the scores' memory."""
        q, k, v, dout = self._data
        whole = (q[:, self._rows], k, v, dout[:, self._rows])
        views = [self._by_kv_head(x) for x in whole]
        figures = [
            _figures(Inputs(*(x[b : b + 1, g] for x in views)), mask, self._keys)
            for b, g in product(range(self._problem.batch), range(self._problem.kv_heads))
        ]
        kinds = {name: zip(*(part[name] for part in figures), strict=True) for name in figures[0]}
        return {name: tuple(map(torch.cat, kind)) for name, kind in kinds.items()}

    def _by_kv_head(self, x: Tensor, dim: int = 2) -> Tensor:
        """A view of (batch, rows, heads, dim) as (batch, kv heads, rows, heads of one, dim)."""
        return x.unflatten(dim, (self._problem.kv_heads, -1)).movedim(dim, 1)


def worst_of(verdicts: Sequence[Verdict]) -> tuple[float, str]:
    """The greatest error / bound, NaN counting as infinite, and the first wrong result's text."""
    ratios = [math.inf if math.isnan(verdict.ratio) else verdict.ratio for verdict in verdicts]
    return max(ratios), next((str(verdict) for verdict in verdicts if not verdict.ok), "")


def _of_rows(mask: Mask, rows: Sequence[int]) -> Mask:
    slices = [
        part.moved(at, 0) for at, row in enumerate(rows) for part in mask.rows(row, row + 1).slices
    ]
    return Mask.of(len(rows), mask.seqlen_k, slices)


def _figures(inputs: Inputs, mask: Mask, keys: Tensor) -> Results:
    """The three tensors of every result; dk and dv only of `keys`."""
    oracle, plain = dense_gradients(*inputs, mask), plain_gradients(*inputs, mask)
    by_name = {"lse": (oracle.lse, plain.lse, oracle.terms["lse"])}
    for name in ("out", *GRADIENTS):
        chosen = keys if name in ("dk", "dv") else slice(None)
        three = getattr(oracle, name), getattr(plain, name), oracle.terms[name]
        by_name[name] = three[0][:, chosen], three[1][:, chosen], three[2][:, chosen]
    return by_name


def _sample(seqlen: int, count: int, generator: torch.Generator) -> tuple[int, ...]:
    """The first, the last, and random other positions, in order; all if there are no more."""
    chosen = torch.randperm(seqlen, generator=generator)[: max(count - 2, 0)]
    return tuple(sorted({0, seqlen - 1, *chosen.tolist()}))


def _zero_elsewhere(dq: Tensor, rows: Tensor) -> Verdict:
    """Checks that dq is exactly 0 in rows without dout."""
    rest = dq.abs().amax((0, 2, 3))
    rest[rows] = 0.0
    error = float(rest.max())
    return Verdict("dq of rows without dout", error, 0.0, error == 0.0)
