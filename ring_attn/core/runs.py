"""Runs of consecutive positions, and how a recurrence's states travel from run to run: pure data.

Run i maps the state that enters it to `A_i state + B_i`. A window is the map of several runs in
sequence. It is closed if it starts with the sequence, or if a document starts in it: then its A
counts for nothing, and is not sent. In each round runs get windows that end before their own:

    gather, one round                   scan, 1 + log2 rounds
    run 3 gets 2, 1, 0                  run 3 gets 2, then 1 (of run 2), then 0 (of run 1)
    all maps travel to all later runs   each run sends one window a round, twice as long as before
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        first: the rows start a document, so that their start state is zeros.
        rows: number of rows of the whole shard.
    """

    start: int
    length: int
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


def last_run(layout: SequenceLayout) -> tuple[int, int]:
    """The rank that has the sequence's last row, and the number of that row's run there."""
    for rank in range(layout.world_size):
        held = [run for run in runs_of(layout, rank) if run.length]
        for number, run in enumerate(held):
            if run.start + run.length == layout.seqlen:
                return rank, number
    raise ValueError("a sequence without rows has no end")


@lru_cache(maxsize=256)
def pieces_of(
    layout: SequenceLayout, rank: int, cuts: tuple[int, ...]
) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each run of a rank's shard that has rows, in the order of its rows."""
    row, runs = 0, []
    for run in runs_of(layout, rank):
        stop = run.start + run.length
        within = [run.start, *(c for c in cuts if run.start < c < stop), stop]
        if run.length:
            runs.append(
                tuple(
                    Piece(row + a - run.start, b - a, a in cuts, layout.shard_len(rank))
                    for a, b in pairwise(within)
                )
            )
        row += run.length
    return tuple(runs)


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
        closed: whether each run's window is closed.
        parcels: the runs whose windows travel, ascending, by sender and receiver.
    """

    taken: tuple[range, ...]
    closed: tuple[bool, ...]
    parcels: dict[tuple[int, int], list[int]]


class Travel(NamedTuple):
    """The way of states in one direction; the backward's runs are in the opposite order."""

    way: Literal["gather", "scan"]
    runs: tuple[Run, ...]
    rounds: tuple[Round, ...]

    def bytes_sent(self, rank: int, decay: int, state: int) -> int:
        """Bytes that leave a rank, for a decay and a state of so many bytes."""
        return sum(
            state if step.closed[j] else decay + state
            for step in self.rounds
            for (sender, _), parcel in step.parcels.items()
            if sender == rank
            for j in parcel
        )


def halo_rows(layout: SequenceLayout, before: int) -> tuple[list[int], list[int]]:
    """Rows that each rank sends, forward and backward, so that runs see `before` rows."""
    runs = [(run.start, rank) for rank in range(layout.world_size) for run in runs_of(layout, rank)
            if run.length]  # fmt: skip
    ordered, wanted = sorted(runs), set[tuple[int, int, int]]()
    for i, (start, rank) in enumerate(ordered):
        for position in range(start - 1, max(0, start - before) - 1, -1):
            while ordered[i][0] > position:
                i -= 1
            wanted.add((ordered[i][1], rank, position))
    there, back = [0] * layout.world_size, [0] * layout.world_size
    for owner, rank, _ in wanted:
        there[owner] += owner != rank
        back[rank] += owner != rank
    return there, back


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
        held = [run for run in runs_of(layout, rank) if run.length]
        pieces = pieces_of(layout, rank, cuts)
        for number, (run, parts) in enumerate(zip(held, pieces, strict=True)):
            enters = not parts[0].first
            found.append((run.start, Run(rank, number, enters, enters and len(parts) == 1)))
    runs = tuple(run for _, run in sorted(found, reverse=backward))
    scans = 1 + max(len(runs) - 2, 0).bit_length()
    most = max((run.number + 1 for run in runs), default=0)
    saved = (len(runs) - 1 - scans) * most * nbytes
    scan = saved > (scans - 1) * LATENCY_BYTES
    later = runs[:-1] if backward else runs[1:]  # of each pair of neighbours
    linked = [False, *(run.enters for run in later)]
    rounds = _rounds(runs, linked, 2 if scan else len(runs) + 1)
    return Travel("scan" if scan else "gather", runs, tuple(rounds))


def _rounds(runs: Sequence[Run], linked: Sequence[bool], radix: int) -> Iterator[Round]:
    """Rounds of which each makes windows `radix` times longer, until what enters runs is known.

    Runs that are not linked take nothing of the run before them.
    """
    # The run at which a window that ends before each run is closed; itself if it takes nothing.
    closes = [0] * len(runs)
    for i in range(1, len(runs)):
        closes[i] = i if not linked[i] else closes[i - 1] if runs[i - 1].passes else i - 1
    width = 0
    while any(i - close > width for i, close in enumerate(closes)):
        if width:
            closed = [i - width <= close for i, close in enumerate(closes)]
            stops = [max(close, i - radix * width) for i, close in enumerate(closes)]
        else:
            closed = [i == close or not runs[i].passes for i, close in enumerate(closes)]
            stops = [max(close, i - radix + 1) - 1 for i, close in enumerate(closes)]
        step = width or 1
        taken = [range(i - step, stop, -step) for i, stop in enumerate(stops)]
        parcels: dict[tuple[int, int], set[int]] = {}
        for run, some in zip(runs, taken, strict=True):
            for j in some:
                if runs[j].rank != run.rank:
                    parcels.setdefault((runs[j].rank, run.rank), set()).add(j)
        ordered = {pair: sorted(parcel) for pair, parcel in parcels.items()}
        yield Round(tuple(taken), tuple(closed), ordered)
        width = width * radix or radix - 1
