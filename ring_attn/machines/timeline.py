"""Results of a simulation: the timeline of each walked rank, and the use of the links."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ring_attn.core.program import Channel


class Pending(NamedTuple):
    """An exchange of a rank under way: when its host posted it, its begin and end, its link."""

    posted: float
    start: float
    stop: float
    crosses: bool


@dataclass(frozen=True, eq=False)
class Usage:
    """Use of the links of one kind: "inside" a node, or "between" nodes.

    Attributes:
        busy: seconds that the busiest port was sending.
        sender: rank that last sent through the busiest port.
        receiver: its receiver; None for collectives.
        exposed: longest time in seconds that a rank waited for bytes over these links.
    """

    link: str
    name: str
    busy: float
    sender: int
    receiver: int | None
    exposed: float

    def __str__(self) -> str:
        where = f"{self.name} between nodes" if self.link == "between" else f"{self.name} in a node"
        to = "" if self.receiver is None else f" -> rank {self.receiver}"
        return f"{where}, rank {self.sender}{to}"


@dataclass(eq=False)
class Timeline:
    """A walked rank: its clocks, and its seconds so far.

    Attributes:
        clock: time of the device; at the end, when the rank is done.
        host: time of the host.
        compute: time in attention itself.
        moves: time in packing, adding and rounding.
        idle, late: time waiting for the rank's host, for late peers.
        exposed: time waiting for bytes, inside nodes and between nodes.
        sent, messages: bytes and exchanges.
    """

    rank: int
    clock: float = 0.0
    host: float = 0.0
    compute: float = 0.0
    moves: float = 0.0
    idle: float = 0.0
    late: float = 0.0
    exposed: list[float] = field(default_factory=lambda: [0.0, 0.0])
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
    """Results of a simulation: the timeline of each walked rank, and the slowest link.

    `slowest_link` is the kind of link with the longest waits; None if nothing is sent.
    """

    ranks: tuple[Timeline, ...]
    slowest_link: Usage | None

    @property
    def seconds(self) -> float:
        """Time until the last rank is done."""
        return max(rank.clock for rank in self.ranks)

    @property
    def num_steps(self) -> int:
        """Number of steps in which any rank computes."""
        return len(set().union(*(rank.computes for rank in self.ranks)))
