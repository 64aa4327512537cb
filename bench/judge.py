"""Comparison of results with dense attention in float64, before an implementation is timed.

Dense attention stores all scores. Therefore a long sequence is replaced by a shorter one with the
same heads, head dim, dtype and mask. The bound is the one of `ring_attn.testing`, which follows
from the error of plain PyTorch in the same dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ring_attn.bench.implementations import Implementation, Shape
from ring_attn.testing import Inputs, check, dense_gradients, plain_gradients

# Rows and batch entries of the sequence that is compared. The rows are several blocks of each
# config.
ROWS = 1024
BATCH = 2

Make = Callable[[Shape, Inputs], Implementation]


class OracleJudge:
    """The oracle of a problem, or of a shorter one.

    Attributes:
        problem: the problem that is compared.
        data: its q, k, v and dout.
    """

    def __init__(self, problem: Shape) -> None:
        self.problem = problem.shortened(BATCH, ROWS)
        self.data = self.problem.data()
        mask = self.problem.mask
        self._oracle = dense_gradients(*self.data, mask)
        self._plain = plain_gradients(*self.data, mask)

    def verdict(self, make: Make, *, backward: bool = True) -> tuple[float, str]:
        """Return the greatest error / bound, where NaN is infinite, and the first wrong result.

        `backward`: whether to run, and to compare, the backward, too.
        """
        attention = make(self.problem, self.data)
        attention.forward()
        if backward:
            attention.backward()
        names = ("out", "dq", "dk", "dv") if backward else ("out",)
        got = dict(zip(names, attention.results(), strict=True))
        if attention.lse is not None:
            got["lse"] = attention.lse
        verdicts = [
            check(
                name,
                got=x,
                oracle=getattr(self._oracle, name),
                plain=getattr(self._plain, name),
                terms=self._oracle.terms[name],
            )
            for name, x in got.items()
        ]
        ratios = [math.inf if math.isnan(x.ratio) else x.ratio for x in verdicts]
        first_wrong = next((str(verdict) for verdict in verdicts if not verdict.ok), "")
        return max(ratios), first_wrong
