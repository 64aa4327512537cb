"""Signs of published comparisons of a ring with an all-gather, as the planner predicts them.

vllm-omni issue 5092: (all-gather - ring) / all-gather, in percent; one gathering before all of the
attention, and a ring whose steps are merged by torch's operators, as we simulate a backend that
does not carry the state. Their GPUs and kernels are unknown: an H100 with 24 heads of 128 stands
for them, so signs are compared, not sizes. Predictions made before any comparison are in
bench/results/public_figures.json.
"""

from __future__ import annotations

import pytest

from ring_attn import Strategy, explain
from ring_attn.planning.devices import builtin_cluster

SEQLENS = (2048, 8192, 32768, 65536)
NVLINK, PCIE = builtin_cluster("H100"), builtin_cluster("H100", inside="PCIe 4")

# cluster, ranks, kv heads of 24 -> percent by length
PUBLISHED = {
    ("NVLink", 2, 24): (-20, -4, -0.1, -0.1),  # the last two are published as "-0"
    ("NVLink", 4, 24): (-99, -52, -10, -3),
    ("NVLink", 4, 3): (-253, -68, -18, -8),
    ("PCIe", 2, 24): (3, 14, 28, 29),
    ("PCIe", 4, 6): (-52, -22, 19, 11),
}
CELLS = {
    (*setting, seqlen): percent
    for setting, row in PUBLISHED.items()
    for seqlen, percent in zip(SEQLENS, row, strict=True)
}

# Three transfers in turn over PCIe cost more than we predict.
WRONG = ("PCIe", 4, 6, 8192)

Cell = tuple[str, int, int, int]


def fastest(cell: Cell, backend: str, strategy: str | Strategy) -> float:
    """Predicts seconds of a strategy's fastest degree."""
    link, world_size, kv_heads, seqlen = cell
    choice = explain(
        seqlen=seqlen, world_size=world_size, nheads=24, nheads_kv=kv_heads, headdim=128,
        layout="contiguous", backward=False, cluster=NVLINK if link == "NVLink" else PCIE,
        strategies=[strategy], backend=backend, same_bits=False, effort="all",
    )  # fmt: skip
    return min(candidate.seconds for candidate in choice.candidates)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(c, marks=pytest.mark.xfail(c == WRONG, reason="known", strict=True))
        for c in CELLS
    ],
    ids=str,
)
def test_sign_of_what_overlap_is_worth(cell: Cell) -> None:
    once = Strategy("all_gather", heads_per_chunk=cell[2])
    ring, gathered = (fastest(cell, "aten", strategy) for strategy in ("ring", once))
    assert (gathered - ring) * CELLS[cell] > 0
