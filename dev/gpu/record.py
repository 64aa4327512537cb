"""`python -m dev gpu --record FILE`: measured figures go into the tables, with card and date."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from dev.gpu import estimates
from dev.gpu.estimates import BACKENDS, MEASURED, TABLE, Cells
from dev.gpu.fits import fitted_rate
from dev.gpu.results import last_rows, read_rows
from dev.gpu.screen import figures_of
from dev.gpu.watch import ROOT

RATES = ROOT / "ring_attn/backends/measured.py"

HEADER = '''\
"""Measured rates, which replace those of `rates`; `python -m dev gpu --record` writes them.

By architecture and backend: (FLOP/s, launch, row_columns, edge_columns) of `Rate`, forward and
backward, and the source.
"""

from __future__ import annotations

Figures = tuple[float, float, float, float]

'''


def record(paths: Sequence[Path]) -> int:
    """Write the figures of runs on one card; print what changed and what is left to do by hand.

    Raises:
        ValueError: the runs do not say on which card they ran, or are of a trial.
    """
    rows = [row for path in paths for row in read_rows(path)]
    cells = last_rows(rows)
    found = figures_of(cells, "environment: versions")
    if "architecture" not in found:
        names = ", ".join(map(str, paths))
        raise ValueError(f"{names}: no GPU is named: record runs whose stage `environment` passed")
    date = time.strftime("%Y-%m-%d", time.localtime(paths[-1].stat().st_mtime))
    card = found["card"]
    raw = keep_rows(paths, f"{card} {date}")
    written = write_figures(cells, {"card": card, "date": date, "rows": raw.name})
    TABLE.write_text(estimates.table())
    replaced = write_rates(cells, found["architecture"], f"measured: {card}, {date}")
    print(f"rows: {raw.relative_to(ROOT)}")
    print(f"{TABLE.relative_to(ROOT)}: {', '.join(written) or 'nothing'}")
    print(f"{RATES.relative_to(ROOT)}: {', '.join(replaced) or 'nothing'}")
    print("by hand: the status in README.md, docs/figures.md and bench/results/NOTES.md; then")
    print("    make test ARGS=tests/unit/test_gpu_estimates.py    says which sentences are stale")
    return 0


def keep_rows(paths: Sequence[Path], name: str) -> Path:
    """Copy the rows into bench/results, so that each figure can be traced."""
    words = re.sub(r"\W+", "_", name).strip("_").lower()
    target = estimates.RESULTS / f"gpu_{words}.jsonl"
    target.write_text("".join(path.read_text() for path in paths))
    return target


def write_figures(cells: Cells, conditions: dict[str, str]) -> list[str]:
    """Store the figures that these cells have; return their keys."""
    known, written = estimates.measured(), []
    for one in estimates.estimates():
        value = one.measured(cells)
        if value is not None:
            before = known.get(one.key, {"assumed": one.assumed})
            known[one.key] = {"value": value, "assumed": before["assumed"], **conditions}
            written.append(one.key)
    MEASURED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return written


def write_rates(cells: Cells, architecture: str, source: str) -> list[str]:
    """Write the rates of backends of which both directions were measured; return their names."""
    from ring_attn.backends import measured

    known: dict[tuple[str, str], Any] = dict(measured.MEASURED)
    replaced = []
    for backend, implementation in BACKENDS.items():
        pair = [fitted_rate(cells, implementation, way) for way in ("forward", "backward")]
        if None not in pair:
            known[architecture, backend] = (*(astuple(rate) for rate in pair if rate), source)
            replaced.append(backend)
    lines = [f"    {key!r}: {value!r},\n" for key, value in sorted(known.items())]
    text = "{\n" + "".join(lines) + "}" if lines else "{}"
    annotation = "MEASURED: dict[tuple[str, str], tuple[Figures, Figures, str]]"
    RATES.write_text(f"{HEADER}{annotation} = {text}\n")
    return replaced
