"""The pictures of the site and of the README, each made in a light and a dark variant.

The site's are made whenever it is built. `python docs/pictures.py` makes those of the README, which
are committed: their SVG is deterministic, and a test compares it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import ring_attn
from ring_attn import SequenceLayout, Strategy, masks, plots
from ring_attn.core.spec import AttentionSpec
from ring_attn.planning.choice import Choice
from ring_attn.planning.devices import builtin_cluster
from ring_attn.strategies.registry import make_call, program_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
RESULTS = HERE.parent / "bench/results"
THEMES = ("light", "dark")

# Names of the pictures that are committed, for the README.
COMMITTED = ("ring",)


def ring(theme: str) -> Figure:
    layout = SequenceLayout.zigzag(seqlen=64, world_size=4)
    spec = AttentionSpec("cpu", torch.float32, 1, 1, 1, 8, 8)
    calls = [
        make_call(Strategy(), spec, (layout, layout), masks.causal(64), rank, backend="reference")
        for rank in range(4)
    ]
    return plots.ring([program_of(call, backward=False) for call in calls], theme=theme)


def layouts(theme: str) -> Figure:
    named = {
        name: SequenceLayout.from_name(name, 32, 4) for name in ("contiguous", "zigzag", "striped")
    }
    return plots.layouts(named, theme=theme)


def owned_mask(theme: str) -> Figure:
    layout = SequenceLayout.zigzag(seqlen=64, world_size=4)
    return plots.mask(masks.causal(64), layout, title="causal, zigzag, 4 ranks", theme=theme)


def tiles(theme: str) -> Figure:
    layout = SequenceLayout.zigzag(seqlen=64, world_size=4)
    return plots.tiles(layout, masks.causal(64), theme=theme)


def all_masks(theme: str) -> Figure:
    named = {
        "causal": masks.causal(48),
        "window": masks.window(48, 10),
        "documents": masks.documents([0, 12, 32, 48], causal=True),
        "chunked": masks.chunked(48, 16),
        "prefix": masks.prefix([8, 6], [0, 28, 48]),
        "spans": masks.spans(48, [(8, 20), (30, 40)]),
        "shared_prefix": masks.shared_prefix(16, [12, 12, 8]),
        "sink_window": masks.sink_window(48, 4, 8),
        "from_slices": masks.from_slices(
            48,
            48,
            [
                (q, q + 8, k, k + 8)
                for q in range(0, 48, 8)
                for k in range(0, q + 8, 8)
                if q - k <= 8 or k in (0, 16)
            ],
        ),
    }
    return plots.masks(named, theme=theme)


@cache
def plan(world_size: int, layout: str = "zigzag", strategy: str | None = None) -> Choice:
    """Return the plan of the page on strategies: 128k rows, forward and backward, on H100."""
    return ring_attn.explain(
        seqlen=131072,
        world_size=world_size,
        nheads=32,
        nheads_kv=8,
        headdim=128,
        causal=True,
        layout=layout,
        strategies=None if strategy is None else [strategy],
        cluster=builtin_cluster("H100"),
    )


def strategies(theme: str) -> Figure:
    return plots.strategies(plan(16, "auto"), theme=theme)


def timeline(theme: str) -> Figure:
    return plots.timeline(plots.timelines_of(plan(16, strategy="ring"), rank=8), theme=theme)


def memory(theme: str) -> Figure:
    return plots.memory(plots.moments_of(plan(16, strategy="ring"), rank=8), theme=theme)


def scaling(theme: str) -> Figure:
    return plots.scaling([plan(2**n) for n in range(1, 7)], theme=theme)


def bench(theme: str) -> Figure:
    report = json.loads((RESULTS / "ring_cpu_2ranks_8k.json").read_text(encoding="utf-8"))
    # The report also has the overhead of a step, which is too short for a bar.
    rows = [row for row in report["rows"] if row["mode"] in ("fwd", "bwd", "fwd_bwd")]
    return plots.bench(report | {"rows": rows}, theme=theme)


def whole_plan(theme: str) -> Figure:
    return plots.plan(plan(16, "auto"), theme=theme)


PICTURES: dict[str, Callable[[str], Figure]] = {
    "ring": ring,
    "layouts": layouts,
    "mask": owned_mask,
    "tiles": tiles,
    "masks": all_masks,
    "strategies": strategies,
    "timeline": timeline,
    "memory": memory,
    "scaling": scaling,
    "plan": whole_plan,
    "bench": bench,
}


def write(name: str, folder: Path, suffix: str = "svg") -> list[Path]:
    """Write both variants of a picture into a folder, and return their paths."""
    paths = [folder / f"{name}-{theme}.{suffix}" for theme in THEMES]
    for theme, path in zip(THEMES, paths, strict=True):
        plots.save(PICTURES[name](theme), path, transparent=True)
    return paths


def write_all(folder: Path) -> None:
    """Write every picture of the site."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        write(name, folder)


if __name__ == "__main__":
    for name in COMMITTED:
        write(name, HERE / "_static")
