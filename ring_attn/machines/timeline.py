"""Results of a simulation: the timeline of each walked rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ring_attn.core.program import Channel


class Pending(NamedTuple):
    """An exchange of a rank under way: when its host posted it, its begin and end."""

    posted: float
    start: float
    stop: float


@dataclass(eq=False)
class Timeline:
    """A walked rank: its clocks, and its seconds so far.

    Attributes:
        clock: time of the device; at the end, when the rank is done.
        host: time of the host.
        compute: time in attention itself.
        moves: time in packing, adding and rounding.
        idle, late: time waiting for the rank's host, for late peers.
        exposed: time waiting for bytes.
        sent, messages: bytes and exchanges.
    """

    rank: int
    clock: float = 0.0
    host: float = 0.0
    compute: float = 0.0
    moves: float = 0.0
    idle: float = 0.0
    late: float = 0.0
    exposed: float = 0.0
    sent: int = 0
    messages: int = 0

    def __post_init__(self) -> None:
        # The current step: its place among the steps of a program, and its label.
        self.step = 0, "start"
        self.computes: set[tuple[int, str]] = set()
        self.pending: dict[Channel, Pending] = {}
        # On a device with streams: the ends of the last two kernels, of the last packing and of the
        # last exchange on each channel.
        self.ended = (0.0, 0.0)
        self.packed = 0.0
        self.arrived: dict[Channel, float] = {}

    def begin(self, label: str) -> None:
        self.step = self.step[0] + 1, label


@dataclass(frozen=True, eq=False)
class Simulation:
    """Results of a simulation: the timeline of each walked rank."""

    ranks: tuple[Timeline, ...]

    @property
    def seconds(self) -> float:
        """Time until the last rank is done."""
        return max(rank.clock for rank in self.ranks)

    @property
    def num_steps(self) -> int:
        """Number of steps in which any rank computes."""
        return len(set().union(*(rank.computes for rank in self.ranks)))
