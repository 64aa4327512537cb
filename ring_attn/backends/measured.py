"""Measured rates, which replace rates of `rates`. `python -m dev gpu --record` writes them.

They are by architecture and backend: (FLOP/s, launch, row_columns, edge_columns) of `Rate`, forward
and backward, and the source.
"""

from __future__ import annotations

Figures = tuple[float, float, float, float]

MEASURED: dict[tuple[str, str], tuple[Figures, Figures, str]] = {}
