"""Bytes that the recurrent layers of a model send, for plans."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.runs import halo_rows, travel
from ring_attn.core.values import check_int


class Traffic(NamedTuple):
    """Most bytes that leave a rank in one layer's call, by direction.

    Attributes:
        way: "gather" or "scan" of the states, "" if nothing but rows of a halo travels.
        rounds: of that way.
        forward, backward: bytes.
        runs: most runs of a rank.
    """

    way: str
    rounds: int
    forward: int
    backward: int
    runs: int


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
    ) -> Traffic:
        """Counts what one layer's call will exchange; documents start at `cuts`.

        `itemsize` is the bytes of a number of the rows.
        """
        sizes = batch * self.decay * 4, batch * self.state * 4
        ways = [travel(layout, cuts, sum(sizes), backward=back) for back in (False, True)]
        row, ranks = batch * self.channels * itemsize, range(layout.world_size)
        there, back = (
            max(way.bytes_sent(r, *sizes) + rows[r] * row for r in ranks)
            for way, rows in zip(ways, halo_rows(layout, self.halo), strict=True)
        )
        runs = max((run.number + 1 for run in ways[0].runs), default=0)
        return Traffic(ways[0].way if self.state else "", len(ways[0].rounds), there, back, runs)
