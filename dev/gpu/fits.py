"""Rates of attention, fitted to the cells of the stages `speed` and `sizes`."""

from __future__ import annotations

import torch

from dev.gpu.results import Row
from dev.gpu.screen import MODES, figures_of
from ring_attn.backends.rates import Rate
from ring_attn.cli.calibrate import TileSample, fit_rate
from ring_attn.core.sizes import flops
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.tiles import Tile

# The head dim of the rates, and the least number of sizes for their four parameters.
HEADDIM, LEAST_SAMPLES = 128, 4


def fitted_rate(cells: dict[str, Row], implementation: str, direction: str) -> Rate | None:
    """Return the rate of an implementation; None if too few cells have passed."""
    samples = samples_of(cells, implementation, direction)
    return fit_rate(samples) if len(samples) >= LEAST_SAMPLES else None


def samples_of(cells: dict[str, Row], implementation: str, direction: str) -> list[TileSample]:
    """Return times of whole calls as those of one tile each."""
    mode = {direction: mode for mode, direction in MODES.items()}[direction]
    samples = []
    for label in cells:
        figures = figures_of(cells, label)
        if figures.get("implementation") != implementation or figures["dim"] != HEADDIM:
            continue
        ms = figures.get(f"{mode}_ms")
        if ms is None:
            continue
        rows, (heads, kv_heads) = figures["rows"], figures["heads"]
        causal = figures["mask"] == "causal"
        tile = Tile(0, rows, 0, rows, None, 0 if causal else None)
        spec = AttentionSpec("cuda", torch.bfloat16, 1, heads, kv_heads, HEADDIM, HEADDIM)
        per_pair = flops(1, spec, backward=direction == "backward")
        samples.append(
            TileSample(
                backward=direction == "backward",
                kind=figures["mask"],
                area=tile.area,
                rows=rows,
                edge=tile.edge,
                per_pair=per_pair,
                seconds=ms[1] / 1e3,
            )
        )
    return samples
