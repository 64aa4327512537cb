"""Runs of consecutive positions, and the exchanges of a recurrence's states: pure data.

Run i maps the state that enters it to `A_i state + B_i`. A window is the map of consecutive runs,
which does not extend beyond the start of a document. In each round, runs get windows that end
before their own window:

    gather, one round                   scan, 1 + log2 rounds
    run 3 gets 2, 1, 0                  run 3 gets 2, then 1 (of run 2), then 0 (of run 1)
    each map is sent to all later runs  each run sends one window a round, twice as long as before
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from torch import Tensor
from torch.nn import functional

from ring_attn.core.layout import SequenceLayout, rank_of_last_row
from ring_attn.core.segments import Segment

# Bytes that a 400 Gb/s link of `planning.devices` transfers during its latency: by the estimates
# there 15 us at 45 GB/s.
LATENCY_BYTES = 675_000


class Piece(NamedTuple):
    """Rows [start, start + length) of a shard: consecutive positions of one document.

    Attributes:
        start: first row of the piece in the shard.
        length: number of rows.
        position: position of the first row in the sequence.
        first: whether the rows start a document, so that their start state is zeros.
        rows: number of rows of the whole shard.
    """

    start: int
    length: int
    position: int
    first: bool
    rows: int

    def of(self, x: Tensor) -> Tensor:
        """Return the piece's rows of a shard (batch, rows, ...); without rows, one row of zeros."""
        if x.size(1) != self.rows:
            raise ValueError(
                f"the shard must have {self.rows} rows in dim 1 for its layout, got {x.size(1)}: "
                "use layout.shard"
            )
        if self.length:
            return x.narrow(1, self.start, self.length)
        # A row of zeros by padding, which autograd connects to the shard.
        unpadded = (0, 0) * (x.ndim - 2)
        return functional.pad(x, (*unpadded, 0, 1))


def runs_of(layout: SequenceLayout, rank: int) -> list[Segment]:
    """Return the runs of consecutive positions in the order of the rank's rows.

    There is at least one run, which may be empty.
    """
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
    """Return the pieces of each run of a rank's shard, in the order of its rows.

    A shard without rows has no runs. Documents start at `cuts`.
    """
    rows = layout.shard_len(rank)
    runs = []
    row = 0  # first row of the run
    for run in runs_of(layout, rank) if rows else ():
        stop = run.start + run.length
        inner_cuts = [cut for cut in cuts if run.start < cut < stop]
        pieces = [
            Piece(
                start=row + first - run.start,
                length=end - first,
                position=first,
                first=first in cuts,
                rows=rows,
            )
            for first, end in pairwise([run.start, *inner_cuts, stop])
        ]
        runs.append(tuple(pieces))
        row += run.length
    return tuple(runs)


def last_run(layout: SequenceLayout) -> tuple[int, int]:
    """Return the rank that has the sequence's last row, and the number of that row's run there."""
    rank = rank_of_last_row(layout)
    last_pieces = (pieces[-1] for pieces in pieces_of(layout, rank, ()))
    stops = [piece.position + piece.length for piece in last_pieces]
    return rank, stops.index(layout.seqlen)


class StateRun(NamedTuple):
    """A run among the runs of all ranks.

    Attributes:
        rank: its rank.
        number: its number among the runs of the rank.
        enters: whether the state before the run enters it, because it does not start a document.
        passes: whether the state after the run depends on the state before it, because no document
            starts in it.
    """

    rank: int
    number: int
    enters: bool
    passes: bool


class StateRound(NamedTuple):
    """One exchange.

    Attributes:
        taken: for each run the runs whose windows it gets, nearest first. In the first round the
            window of a run is the run itself; later it is the window that ends before the run.
        parcels: the runs whose windows are sent, ascending, by sender and receiver.
    """

    taken: Sequence[Sequence[int]]
    parcels: dict[tuple[int, int], list[int]]


class StatesPlan(NamedTuple):
    """The exchanges of states in one direction; the runs of a backward are in reverse order."""

    algorithm: Literal["gather", "scan"]
    runs: tuple[StateRun, ...]
    rounds: tuple[StateRound, ...]

    def sent(self, rank: int) -> int:
        """Return the number of windows that leave a rank, each a decay and a state."""
        return sum(
            len(parcel)
            for exchange in self.rounds
            for (sender, _), parcel in exchange.parcels.items()
            if sender == rank
        )


@lru_cache(maxsize=256)
def plan_states(
    layout: SequenceLayout, cuts: tuple[int, ...], nbytes: int, *, backward: bool = False
) -> StatesPlan:
    """Plan the exchanges of states between the runs of all ranks.

    The scan is used where it saves more bytes than links transfer during the latency of its
    additional rounds.

    Args:
        layout: how the sequence is split.
        cuts: positions at which documents start.
        nbytes: size of a window, a decay and a state.
        backward: whether gradients are sent to earlier runs.
    """
    found = []
    for rank in range(layout.world_size):
        for number, (first, *rest) in enumerate(pieces_of(layout, rank, cuts)):
            enters = not first.first
            run = StateRun(rank, number, enters=enters, passes=enters and not rest)
            found.append((first.position, run))
    runs = tuple(run for _, run in sorted(found, reverse=backward))
    # Windows that a rank sends: in a gather to all later runs, in a scan one in each round.
    scan_rounds = 1 + max(len(runs) - 2, 0).bit_length()
    runs_of_rank = max((run.number + 1 for run in runs), default=0)
    saved = (len(runs) - 1 - scan_rounds) * runs_of_rank * nbytes
    scan = saved > (scan_rounds - 1) * LATENCY_BYTES
    counts = _counts_before(runs, backward=backward)
    takes = _scanned(counts) if scan else _gathered(counts)
    rounds = tuple(StateRound(taken, _parcels(runs, taken)) for taken in takes)
    return StatesPlan("scan" if scan else "gather", runs, rounds)


def _counts_before(runs: Sequence[StateRun], *, backward: bool) -> list[int]:
    """Return for each run how many runs before it, back to a document's start, affect it."""
    counts = [0] * len(runs)
    for i in range(1, len(runs)):
        # In a backward, gradients enter a run from the run that follows it in the sequence.
        connected = runs[i - 1].enters if backward else runs[i].enters
        if connected:
            counts[i] = 1 + (counts[i - 1] if runs[i - 1].passes else 0)
    return counts


def _gathered(counts: Sequence[int]) -> list[list[Sequence[int]]]:
    """Return the runs that each run takes in the one round of a gather."""
    if not any(counts):
        return []
    return [[range(i - 1, i - 1 - count, -1) for i, count in enumerate(counts)]]


def _scanned(counts: Sequence[int]) -> list[list[Sequence[int]]]:
    """Return the runs that each run takes in each round of a scan."""
    longest = max(counts, default=0)
    if longest == 0:
        return []
    takes: list[list[Sequence[int]]] = []
    lengths = [0, *(1 << i for i in range((longest - 1).bit_length()))]
    for length in lengths:
        # A run with a window of this length takes the window before it, which is as long.
        distance = max(length, 1)
        takes.append([[i - distance] if count > length else [] for i, count in enumerate(counts)])
    return takes


def _parcels(
    runs: Sequence[StateRun], taken: Sequence[Sequence[int]]
) -> dict[tuple[int, int], list[int]]:
    """Return the runs whose windows are sent, ascending, by sender and receiver."""
    found: dict[tuple[int, int], set[int]] = {}
    for run, some in zip(runs, taken, strict=True):
        for j in some:
            if runs[j].rank != run.rank:
                found.setdefault((runs[j].rank, run.rank), set()).add(j)
    return {pair: sorted(parcel) for pair, parcel in found.items()}
