"""Runs of consecutive positions, and how a recurrence's states travel from run to run: pure data.

Run i maps the state that enters it to `A_i state + B_i`. A window is the map of several runs in
sequence. None reaches beyond a document's start. In each round runs get windows that end before
their own:

    gather, one round                   scan, 1 + log2 rounds
    run 3 gets 2, 1, 0                  run 3 gets 2, then 1 (of run 2), then 0 (of run 1)
    all maps travel to all later runs   each run sends one window a round, twice as long as before
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from torch import Tensor
from torch.nn import functional

from ring_attn.core.layout import SequenceLayout
from ring_attn.core.segments import Segment

# Bytes that a 400 Gb/s link of `planning.devices` carries in its latency, 15 us at 45 GB/s.
LATENCY_BYTES = 675_000


class Piece(NamedTuple):
    """Rows [start, start + length) of a shard: consecutive positions of one document.

    Attributes:
        position: that of the first row, in the sequence.
        first: the rows start a document, so that their start state is zeros.
        rows: number of rows of the whole shard.
    """

    start: int
    length: int
    position: int
    first: bool
    rows: int

    def of(self, x: Tensor) -> Tensor:
        """The piece's rows of a shard, (batch, rows, ...); one row of zeros if there are none."""
        if x.size(1) != self.rows:
            raise ValueError(
                f"the shard must have {self.rows} rows in dim 1 for its layout, got {x.size(1)}: "
                "cut it by layout.shard"
            )
        if self.length:
            return x.narrow(1, self.start, self.length)
        return functional.pad(x, (*(0, 0) * (x.ndim - 2), 0, 1))


def runs_of(layout: SequenceLayout, rank: int) -> list[Segment]:
    """Runs of consecutive positions, in the order of the rank's rows; at least one, empty."""
    runs: list[Segment] = []
    for segment in layout.segments(rank):
        if segment.stride > 1 and segment.length > 1:
            runs += [Segment(position, 1) for position in segment.positions().tolist()]
        elif runs and runs[-1].start + runs[-1].length == segment.start:
            runs[-1] = Segment(runs[-1].start, runs[-1].length + segment.length)
        else:
            runs.append(Segment(segment.start, segment.length))
    return runs or [Segment(0, 0)]


@lru_cache(maxsize=256)
def pieces_of(
    layout: SequenceLayout, rank: int, cuts: tuple[int, ...]
) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each run of a rank's shard that has rows, in the order of its rows."""
    row, runs, rows = 0, [], layout.shard_len(rank)
    for run in runs_of(layout, rank) if rows else ():
        stop = run.start + run.length
        ends = pairwise([run.start, *(c for c in cuts if run.start < c < stop), stop])
        runs.append(tuple(Piece(row + a - run.start, b - a, a, a in cuts, rows) for a, b in ends))
        row += run.length
    return tuple(runs)


def last_run(layout: SequenceLayout) -> tuple[int, int]:
    """The rank that has the sequence's last row, and the number of that row's run there."""
    for rank in range(layout.world_size):
        for number, (*_, piece) in enumerate(pieces_of(layout, rank, ())):
            if piece.position + piece.length == layout.seqlen:
                return rank, number
    raise ValueError("a sequence without rows has no end")


class Run(NamedTuple):
    """A run among all ranks' runs: its rank, and its number there."""

    rank: int
    number: int
    enters: bool  # no document starts with it, so the state before it matters
    passes: bool  # no document starts in it, so what leaves it depends on what enters it


class Round(NamedTuple):
    """One exchange.

    Attributes:
        taken: for each run those whose windows it takes, nearest first. A run's window is itself
            in the first round; later the window that ends before the run.
        parcels: the runs whose windows travel, ascending, by sender and receiver.
    """

    taken: Sequence[Sequence[int]]
    parcels: dict[tuple[int, int], list[int]]


class Travel(NamedTuple):
    """The way of states in one direction; the backward's runs are in the opposite order."""

    way: Literal["gather", "scan"]
    runs: tuple[Run, ...]
    rounds: tuple[Round, ...]

    def sent(self, rank: int) -> int:
        """Number of windows that leave a rank, each a decay and a state."""
        return sum(
            len(parcel)
            for step in self.rounds
            for (sender, _), parcel in step.parcels.items()
            if sender == rank
        )


@lru_cache(maxsize=256)
def travel(
    layout: SequenceLayout, cuts: tuple[int, ...], nbytes: int, *, backward: bool = False
) -> Travel:
    """The way of states between the runs of all ranks; decay and state have `nbytes` together.

    Documents start at `cuts`. The scan is taken where it saves more bytes than links carry in the
    latency of its further rounds.
    """
    found = []
    for rank in range(layout.world_size):
        for number, (first, *rest) in enumerate(pieces_of(layout, rank, cuts)):
            enters = not first.first
            found.append((first.position, Run(rank, number, enters, enters and not rest)))
    runs = tuple(run for _, run in sorted(found, reverse=backward))
    scans = 1 + max(len(runs) - 2, 0).bit_length()
    most = max((run.number + 1 for run in runs), default=0)
    saved = (len(runs) - 1 - scans) * most * nbytes
    scan = saved > (scans - 1) * LATENCY_BYTES
    # For each run, the number of earlier runs that count: back to where a document starts.
    counts = [0] * len(runs)
    for i in range(1, len(runs)):
        if runs[i - 1 if backward else i].enters:
            counts[i] = 1 + (counts[i - 1] if runs[i - 1].passes else 0)
    longest = max(counts, default=0)
    takes: list[list[Sequence[int]]] = []
    if longest and not scan:
        takes = [[range(i - 1, i - 1 - n, -1) for i, n in enumerate(counts)]]
    elif longest:
        for have in [0, *(1 << i for i in range((longest - 1).bit_length()))]:
            # A window of so many runs gets that before it, which is as long.
            takes.append([[i - max(have, 1)] if n > have else [] for i, n in enumerate(counts)])
    rounds = tuple(Round(taken, _parcels(runs, taken)) for taken in takes)
    return Travel("scan" if scan else "gather", runs, rounds)


def _parcels(
    runs: Sequence[Run], taken: Sequence[Sequence[int]]
) -> dict[tuple[int, int], list[int]]:
    """The runs whose windows travel, ascending, by sender and receiver."""
    found: dict[tuple[int, int], set[int]] = {}
    for run, some in zip(runs, taken, strict=True):
        for j in some:
            if runs[j].rank != run.rank:
                found.setdefault((runs[j].rank, run.rank), set()).add(j)
    return {pair: sorted(parcel) for pair, parcel in found.items()}
