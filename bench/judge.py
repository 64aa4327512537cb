"""Compares an implementation's results with float64, at any length, before it is timed.

Dense attention in float64 is too large at the measured lengths. So there are two checks, both with
the bound of `ring_attn.testing`, which follows from plain PyTorch's error in the same dtype:

    whole    all of out, dq, dk, dv of a short sequence with the same heads, dtype and mask
    sampled  at the measured size, with dout zero except in some rows of every head and batch entry,
             which then alone determine the gradients, exactly: checks out and dq of these rows, dk
             and dv of some keys, and that dq is 0 elsewhere
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ring_attn.bench.implementations import Attention, Data, Problem
from ring_attn.core.mask import Mask
from ring_attn.testing import Inputs, Verdict, check, dense_gradients, plain_gradients

# Length of the whole check; numbers of rows and keys of the sampled check.
WHOLE_SEQLEN = 512
SAMPLED_ROWS, SAMPLED_KEYS = 32, 256

NAMES = ("out", "dq", "dk", "dv")

# For each result: float64's, plain PyTorch's, and the terms of each sum.
Figures = Mapping[str, tuple[Tensor, Tensor, Tensor]]

Make = Callable[[Problem, Data], Attention]


class Judge:
    """The oracle of a problem, which checks every implementation."""

    def __init__(self, problem: Problem, data: Data, *, backward: bool, seed: int = 1) -> None:
        """
        Args:
            problem: sizes, dtype and mask.
            data: inputs of the problem.
            backward: whether to check gradients too.
            seed: seed for the rows, the keys and the short sequence.
        """
        self._problem, self._backward = problem, backward
        self._short = replace(problem, batch=1, seqlen=min(problem.seqlen, WHOLE_SEQLEN))
        self._short_data = self._short.data(seed)
        generator = torch.Generator().manual_seed(seed)
        self._rows = _sample(problem.rows, SAMPLED_ROWS, generator)
        self._keys = _sample(problem.seqlen, SAMPLED_KEYS, generator)
        self._sampled_data = _with_few_rows(data, self._rows)

    def prepare(self) -> None:
        """Computes the oracle, so that its errors are not taken for an implementation's."""
        _ = self._whole, self._sampled

    def whole(self, make: Make) -> list[Verdict]:
        """Checks an implementation on the short sequence."""
        got = self._run(make, self._short, self._short_data)
        return [
            check(f"{name} of {self._short.seqlen}", x, *self._whole[name])
            for name, x in zip(NAMES, got, strict=False)
        ]

    def sampled(self, make: Make) -> list[Verdict]:
        """Checks an implementation at the measured size."""
        got = self._run(make, self._problem, self._sampled_data)
        verdicts = []
        for name, x in zip(NAMES, got, strict=False):
            index = torch.tensor(self._keys if name in ("dk", "dv") else self._rows)
            verdicts.append(check(name, x[:, index.to(x.device)], *self._sampled[name]))
        if self._backward:
            verdicts.append(_zero_elsewhere(got[1], self._rows))
        return verdicts

    def _run(self, make: Make, problem: Problem, data: Data) -> list[Tensor]:
        attention = make(problem, data)
        attention.forward()
        if self._backward:
            attention.backward()
        return attention.results()

    @cached_property
    def _whole(self) -> Figures:
        return _figures(self._short_data.rows_first, self._short.mask)

    @cached_property
    def _sampled(self) -> Figures:
        """The sampled rows; one batch entry and kv head at a time, to bound the scores' memory."""
        problem, device = self._problem, self._problem.device
        group = problem.heads // problem.kv_heads
        mask = _of_rows(problem.mask, self._rows)
        rows, keys = (torch.tensor(x).to(device) for x in (self._rows, self._keys))
        q, k, v, dout = self._sampled_data.rows_first
        q, dout = q[:, rows], dout[:, rows]
        entries = []
        for b in range(problem.batch):
            parts = []
            for g in range(problem.kv_heads):
                heads = slice(g * group, (g + 1) * group)
                q_part, dout_part = (x[b : b + 1, :, heads] for x in (q, dout))
                k_part, v_part = (x[b : b + 1, :, g : g + 1] for x in (k, v))
                parts.append(_figures(Inputs(q_part, k_part, v_part, dout_part), mask, keys))
            entries.append(_joined(parts, dim=2))
        return _joined(entries, dim=0)


def worst_of(verdicts: Sequence[Verdict]) -> tuple[float, str]:
    """The greatest error / bound, NaN counting as infinite, and the first wrong result's text."""
    ratios = [math.inf if math.isnan(verdict.ratio) else verdict.ratio for verdict in verdicts]
    return max(ratios), next((str(verdict) for verdict in verdicts if not verdict.ok), "")


class TokenJudge:
    """The oracle of decoding: the last query of a problem against all keys."""

    def __init__(self, problem: Problem, data: Data) -> None:
        """Takes the inputs; `prepare` computes the oracle."""
        q, k, v, dout = data.rows_first
        self._inputs = Inputs(q[:, -1:], k, v, dout[:, -1:])
        self._mask = Mask(1, problem.seqlen)

    def prepare(self) -> None:
        """Computes the oracle, so that its errors are not taken for an implementation's."""
        self._oracle = dense_gradients(*self._inputs, self._mask)
        self._plain = plain_gradients(*self._inputs, self._mask)

    def verdicts(self, out: Tensor, lse: Tensor) -> list[Verdict]:
        """Checks out (batch, 1, heads, dim) and lse (batch, heads, 1)."""
        oracle, plain = self._oracle, self._plain
        return [
            check("out of a token", out, oracle.out, plain.out, oracle.terms["out"]),
            check("lse of a token", lse, oracle.lse, plain.lse, oracle.terms["lse"]),
        ]


def _of_rows(mask: Mask, rows: Sequence[int]) -> Mask:
    """The mask of some queries against all keys."""
    slices = [
        part.moved(at, 0) for at, row in enumerate(rows) for part in mask.rows(row, row + 1).slices
    ]
    return Mask.of(len(rows), mask.seqlen_k, slices)


def _figures(inputs: Inputs, mask: Mask, keys: Tensor | None = None) -> Figures:
    """The three tensors of every result; dk and dv only of `keys`, unless None."""
    oracle, plain = dense_gradients(*inputs, mask), plain_gradients(*inputs, mask)
    by_name = {}
    for name in NAMES:
        chosen = keys if keys is not None and name in ("dk", "dv") else slice(None)
        three = getattr(oracle, name), getattr(plain, name), oracle.terms[name]
        by_name[name] = three[0][:, chosen], three[1][:, chosen], three[2][:, chosen]
    return by_name


def _joined(parts: Sequence[Figures], dim: int) -> Figures:
    joined = {}
    for name in NAMES:
        got, plain, terms = zip(*(part[name] for part in parts), strict=True)
        joined[name] = torch.cat(got, dim), torch.cat(plain, dim), torch.cat(terms, dim)
    return joined


def _sample(seqlen: int, count: int, generator: torch.Generator) -> tuple[int, ...]:
    """The first, the last, and random other positions, in order; all if there are no more."""
    chosen = torch.randperm(seqlen, generator=generator)[: max(count - 2, 0)]
    return tuple(sorted({0, seqlen - 1, *chosen.tolist()}))


def _with_few_rows(data: Data, rows: Sequence[int]) -> Data:
    q, k, v, dout = data.rows_first
    few = torch.zeros_like(dout)
    index = torch.tensor(rows).to(dout.device)
    few[:, index] = dout[:, index]
    return Data(Inputs(q, k, v, few))


def _zero_elsewhere(dq: Tensor, rows: Sequence[int]) -> Verdict:
    """Checks that dq is exactly 0 in rows without dout."""
    rest = dq.abs().amax((0, 2, 3))
    rest[torch.tensor(rows).to(rest.device)] = 0.0
    error = float(rest.max())
    return Verdict("dq of rows without dout", error, 0.0, error == 0.0)
