"""Bytes that the recurrent layers of a model send, for plans."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.runs import runs_of, travel
from ring_attn.core.values import check_int


@dataclass(frozen=True)
class Recurrent:
    """Layers that carry a state along the sequence, or see a few rows before their own.

    Attributes:
        name: of the kind of layers.
        layers: how many.
        state: numbers of a sequence's state, which travel in float32.
        decay: numbers by which it is multiplied: heads x headdim x headdim for a delta rule.
        halo: rows before its own that a convolution sees.
        channels: of the convolution.
    """

    name: str
    layers: int
    state: int = 0
    decay: int = 0
    halo: int = 0
    channels: int = 0

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            check_int(field.name, getattr(self, field.name), least=0)

    def traffic(
        self, layout: SequenceLayout, cuts: tuple[int, ...], batch: int, itemsize: int
    ) -> dict[str, Any]:
        """The way of states in one layer's call, or "", and most bytes that leave a rank.

        Documents start at `cuts`; `itemsize` is the bytes of a number of the rows.
        """
        window, row = 4 * batch * (self.decay + self.state), batch * self.channels * itemsize
        ways = [travel(layout, cuts, window, backward=back) for back in (False, True)]
        there, back = (
            max(way.sent(rank) * window + rows[rank] * row for rank in range(layout.world_size))
            for way, rows in zip(ways, halo_rows(layout, self.halo), strict=True)
        )
        way = ways[0].way if self.state else ""
        return {"way": way, "rounds": len(ways[0].rounds), "forward": there, "backward": back}


def halo_rows(layout: SequenceLayout, before: int) -> list[Counter[int]]:
    """Rows that each rank sends, forward and backward, so that runs see `before` rows."""
    runs = [(run, rank) for rank in range(layout.world_size) for run in runs_of(layout, rank)]
    rows = {
        (owner, rank, position)
        for run, rank in runs
        for other, owner in runs
        if owner != rank
        for position in range(
            max(other.start, run.start - before), min(other.start + other.length, run.start)
        )
    }
    return [Counter(pair[end] for *pair, _ in rows) for end in (0, 1)]
