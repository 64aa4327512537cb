"""Compares an implementation's results with dense attention in float64, before it is timed.

Dense attention stores all scores, so a long sequence is replaced by a shorter one with the same
heads, head dim, dtype and mask. The bound is that of `ring_attn.testing`, which follows from plain
PyTorch's error in the same dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ring_attn.bench.implementations import Implementation, Shape
from ring_attn.testing import Inputs, check, dense_gradients, plain_gradients

# Rows and batch entries of the sequence that is compared: several blocks of every config.
ROWS, BATCH = 1024, 2

Make = Callable[[Shape, Inputs], Implementation]


class OracleJudge:
    """The oracle of a problem, or of a shorter one.

    Attributes:
        problem: what is compared.
        data: q, k, v and dout of that problem.
    """

    def __init__(self, problem: Shape) -> None:
        batch, seqlen = min(problem.batch, BATCH), min(problem.seqlen, ROWS)
        self.problem = replace(problem, batch=batch, seqlen=seqlen)
        self.data = self.problem.data()
        mask = self.problem.mask
        self._oracle = dense_gradients(*self.data, mask)
        self._plain = plain_gradients(*self.data, mask)

    def verdict(self, make: Make) -> tuple[float, str]:
        """The greatest error / bound, NaN counting as infinite, and the first wrong result."""
        attention = make(self.problem, self.data)
        attention.forward()
        attention.backward()
        got = dict(zip(("out", "dq", "dk", "dv"), attention.results(), strict=True))
        if attention.lse is not None:
            got["lse"] = attention.lse
        oracle, plain = self._oracle, self._plain
        verdicts = [
            check(name, x, getattr(oracle, name), getattr(plain, name), oracle.terms[name])
            for name, x in got.items()
        ]
        ratios = [math.inf if math.isnan(one.ratio) else one.ratio for one in verdicts]
        return max(ratios), next((str(one) for one in verdicts if not one.ok), "")
