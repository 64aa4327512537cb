"""How long a schedule takes on a cluster: a discrete-event simulation of all ranks at once.

Every rank has two clocks: of its device, and of its host, which launches actions without waiting.
The simulation handles the actions of a schedule in order, each for all ranks in a few tensor
operations, so that thousands of ranks take seconds:

    compute, move    starts at the later clock and advances the device's clock; slower while an
                     exchange of the rank is under way
    post             the exchange begins when both sides, or all of a group, have posted it and
                     its ports are free; its end is then known
    wait             advances the device's clock to the end of the exchange

On a device with streams (`Cluster.copies`) an exchange does not wait for earlier actions: a shard's
begins when its receive buffer (of three) is free, a gradient's when the gradient is computed.

A port is a device's link inside the node, or a network port, in one direction. Exchanges on one
port follow one another in the order of the schedule. Exchanges of one action share the port, and
end together. A rank's waiting time is divided into waits for its host, for late peers (imbalance),
and for bytes (exposed communication), the last by kind of link.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log2

import torch
from torch import Tensor

from ring_attn.core.program import Channel
from ring_attn.machines.actions import Action, Compute, Move, Schedule, Transfer, Wait
from ring_attn.planning.devices import Cluster, Link, compute_seconds


@dataclass(frozen=True, eq=False)
class Span:
    """Start and end of an action on every rank, (P,) seconds; equal on ranks that did nothing."""

    phase: str
    kind: str
    start: Tensor
    stop: Tensor


@dataclass(frozen=True, eq=False)
class Usage:
    """Use of the links of one kind: "inside" a node, or "between" nodes.

    Attributes:
        nbytes: bytes that all ranks sent over these links.
        busy: seconds that the busiest port was sending.
        sender: rank that last sent through the busiest port.
        receiver: its receiver; None for collectives.
        exposed: longest time in seconds that a rank waited for bytes over these links.
    """

    link: str
    name: str
    nbytes: int
    busy: float
    sender: int
    receiver: int | None
    exposed: float

    def __str__(self) -> str:
        where = f"{self.name} between nodes" if self.link == "between" else f"{self.name} in a node"
        to = "" if self.receiver is None else f" -> rank {self.receiver}"
        return f"{where}, rank {self.sender}{to}"


@dataclass(frozen=True, eq=False)
class Simulation:
    """Results of a simulation; (P,) float64 seconds of each rank.

    Attributes:
        finish: time at which the rank is done.
        compute: time in attention itself.
        moves: time in packing, adding and rounding.
        host, late, exposed: time waiting for the rank's host, for late peers, for bytes.
        links: kinds of links that carried bytes, the most costly first.
        spans: every action, if requested.
    """

    schedule: Schedule
    cluster: Cluster
    finish: Tensor
    compute: Tensor
    moves: Tensor
    host: Tensor
    late: Tensor
    exposed: Tensor
    links: tuple[Usage, ...]
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Time until the last rank is done."""
        return float(self.finish.max())

    @property
    def slowest_link(self) -> Usage | None:
        """The kind of link with the longest waits, with its busiest port."""
        return self.links[0] if self.links else None


def simulate(schedule: Schedule, cluster: Cluster, *, spans: bool = False) -> Simulation:
    """Simulates a schedule on a cluster.

    Nodes hold consecutive ranks. `spans` keeps every action's start and end on every rank.
    """
    run = _Run(schedule, cluster, spans)
    for phase in schedule.phases:
        for action in phase.actions:
            run.do(action, phase.label)
    return run.done()


@dataclass(eq=False)
class _Pending:
    """An exchange under way, (P,) each: when the host posted it, its begin and end, its link."""

    posted: Tensor
    start: Tensor
    stop: Tensor
    crosses: Tensor


@dataclass(frozen=True, eq=False)
class _Route:
    """Receivers, senders and links of a shift, (P,) each, cached for many actions.

    A rank that takes no part has itself as its receiver. `source` is the inverse of `to`, `out` and
    `into` are the ports of senders and receivers; `alone` is whether every port has one message
    only.
    """

    to: Tensor
    source: Tensor
    crosses: Tensor
    out: Tensor
    into: Tensor
    alone: bool
    latency: Tensor
    bandwidth: Tensor


@dataclass(eq=False)
class _Run:
    """State of a simulation: clocks and counters."""

    schedule: Schedule
    cluster: Cluster
    keep: bool
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.schedule.world_size
        self.clock, self.compute, self.moves, self.late = torch.zeros(4, size, dtype=torch.float64)
        self.host, self.idle = torch.zeros(2, size, dtype=torch.float64)
        # First inside nodes, then between.
        self.exposed = [*torch.zeros(2, size, dtype=torch.float64)]
        self.nbytes = [0, 0]
        self.pending: dict[Channel, _Pending] = {}
        # On a device with streams: the ends of the last two kernels, of the last packing and of the
        # last exchange on each channel.
        self.ended = [self.clock, self.clock]
        self.packed = self.clock
        self.arrived: dict[Channel, Tensor] = {}
        self.ranks = ranks = torch.arange(size)
        node_size = self.cluster.node_size
        self.node = ranks // node_size
        per_node = self.cluster.ports or node_size
        port = self.node * per_node + ranks % node_size * per_node // node_size
        # Ports inside nodes, one for each rank, then ports between nodes.
        self.port = torch.stack([ranks, size + port])
        # One more port, the last, serves ranks that take no part.
        count = size + int(port.max()) + 2
        # Time at which each port, out and in, is free; seconds that each port out was busy, and the
        # sender and receiver of its last message.
        self.free = torch.zeros(2, count, dtype=torch.float64)
        self.busy = torch.zeros(count, dtype=torch.float64)
        self.message = torch.full((2, count), -1)
        self.links = (self.cluster.inside, self.cluster.between)
        self.routes: dict[tuple[int, int], _Route] = {}

    def do(self, action: Action, phase: str) -> None:
        """Advances all ranks' clocks by one action."""
        device, host = self.cluster.device, self.cluster.host
        match action:
            case Compute():
                rate = device.rate(backward=action.backward, window=action.window)
                seconds = action.share * compute_seconds(
                    rate, action.area, action.rows, action.edge, action.per_pair
                )
                seconds += action.state / device.memory_bandwidth
                launches = 1 + action.backward * (action.share == 1.0)
                start = self._launched(launches * host.launch, action.area > 0)
                self.clock = self._after(seconds)
                self.ended = [self.ended[1], self.clock]
                self.compute += self.clock - start
                self._keep(phase, "compute", start, self.clock)
            case Move():
                start = self._launched(action.count * host.copy, action.nbytes > 0)
                self.clock = self._after(action.nbytes / device.memory_bandwidth)
                self.moves += self.clock - start
                if action.label == "pack":
                    self.packed = self.clock
                self._keep(phase, "move", start, self.clock)
            case Transfer():
                self.host = self.host + host.post * action.active
                self._begin(action, self._ready(action), phase)
            case Wait():
                self.host = self.host + host.wait * action.active
                start = self.clock
                self._wait(action)
                self._keep(phase, "wait", start, self.clock)

    def done(self) -> Simulation:
        """The simulation's results."""
        kinds = ("inside", "between")
        links = [self._usage(kind, index) for index, kind in enumerate(kinds) if self.nbytes[index]]
        links.sort(key=lambda usage: (usage.exposed, usage.busy), reverse=True)
        return Simulation(
            self.schedule,
            self.cluster,
            self.clock,
            self.compute,
            self.moves,
            self.idle,
            self.late,
            self.exposed[0] + self.exposed[1],
            tuple(links),
            tuple(self.spans),
        )

    def _usage(self, kind: str, index: int) -> Usage:
        size = len(self.clock)
        ports = slice(0, size) if kind == "inside" else slice(size, -1)
        worst = int(self.busy[ports].argmax())
        sender, receiver = self.message[:, ports][:, worst].tolist()
        return Usage(
            kind,
            self.links[index].name,
            self.nbytes[index],
            float(self.busy[ports][worst]),
            sender,
            None if receiver < 0 else receiver,
            float(self.exposed[index].max()),
        )

    def _keep(self, phase: str, kind: str, start: Tensor, stop: Tensor) -> None:
        if self.keep:
            self.spans.append(Span(phase, kind, start.clone(), stop.clone()))

    def _launched(self, seconds: float, active: Tensor) -> Tensor:
        """The devices' clocks after their hosts spent `seconds` on a launch."""
        self.host = self.host + seconds * active
        start = torch.where(active, torch.maximum(self.clock, self.host), self.clock)
        self.idle += start - self.clock
        self.clock = start
        return start

    def _after(self, seconds: Tensor) -> Tensor:
        """Time at which `seconds` of work are done, slowed down by exchanges under way."""
        share = self.cluster.slowdown
        if share and self.pending:
            for exchange in self.pending.values():
                begin = torch.maximum(exchange.start, self.clock)
                work = (self.clock + seconds - begin).clamp(min=0)
                beside = torch.minimum(work / (1 - share), (exchange.stop - begin).clamp(min=0))
                seconds = seconds + share * beside
        return self.clock + seconds

    def _ready(self, post: Transfer) -> Tensor:
        """Earliest time at which each rank can begin an exchange, before peers and ports."""
        copies = self.cluster.copies
        if copies is None:
            return torch.maximum(self.clock, self.host)
        moment = self.clock
        if post.channel in ("shards", "outer"):
            moment = torch.maximum(self.packed, self.ended[0])
            if post.channel in self.arrived:
                moment = torch.maximum(moment, self.arrived[post.channel])
        return torch.maximum(moment + copies.latency, self.host)

    def _begin(self, post: Transfer, ready: Tensor, phase: str) -> None:
        """Begins an exchange, and slows down earlier kernels that overlap it."""
        start = self._shift if post.op == "shift" else self._collective
        pending = start(post, ready)
        beside = torch.minimum(pending.stop, self.ended[1]) - pending.start.maximum(self.ended[0])
        lost = self.cluster.slowdown * beside.clamp(min=0) * (post.active & (ready < self.clock))
        self.clock = self.clock + lost
        self.compute += lost
        self.pending[post.channel] = pending
        self.arrived[post.channel] = pending.stop
        self._keep(phase, "transfer", pending.start, pending.stop)

    def _shift(self, post: Transfer, ready: Tensor) -> _Pending:
        """Begins a shift: one message from each rank to another."""
        route, (free_out, free_in) = self._route(post), self.free
        self.free[:, -1] = 0
        begin = torch.maximum(ready, ready.index_select(0, route.to))
        begin = begin.maximum(free_out.index_select(0, route.out))
        begin = begin.maximum(free_in.index_select(0, route.into))
        nbytes = post.nbytes * post.active
        load = nbytes.double()
        if not route.alone:
            load = torch.maximum(
                *(
                    torch.zeros_like(self.busy).index_add_(0, ports, load)[ports]
                    for ports in (route.out, route.into)
                )
            )
        end = begin + route.latency + load / route.bandwidth
        free_out.scatter_reduce_(0, route.out, end, "amax")
        free_in.scatter_reduce_(0, route.into, end, "amax")
        taken = torch.zeros_like(self.busy)
        self.busy += taken.scatter_reduce_(0, route.out, end - begin, "amax")
        self.message[0].scatter_(0, route.out, self.ranks)
        self.message[1].scatter_(0, route.out, route.to)
        across = int((nbytes * route.crosses).sum())
        self.nbytes[1] += across
        self.nbytes[0] += int(nbytes.sum()) - across
        # For a rank it lasts from the first beginning to the last end of its two messages.
        start = torch.minimum(begin, begin.index_select(0, route.source)).maximum(ready)
        stop = torch.maximum(end, end.index_select(0, route.source))
        received = route.crosses.index_select(0, route.source)
        crosses = torch.where(end >= stop, route.crosses, received)
        return _Pending(self.host, start, stop, crosses)

    def _route(self, post: Transfer) -> _Route:
        key = id(post.to), id(post.active)
        if key not in self.routes:
            to = torch.where(post.active, post.to, self.ranks)
            source = torch.empty_like(to).scatter_(0, to, self.ranks)
            crosses = self.node != self.node[to]
            kind = crosses.long()
            nowhere = len(self.busy) - 1
            out, into = (
                torch.where(post.active, self.port[kind, ranks], nowhere)
                for ranks in (self.ranks, to)
            )
            taking_part = int(post.active.sum())
            alone = all(len(ports[post.active].unique()) == taking_part for ports in (out, into))
            latency, bandwidth = (
                torch.tensor([getattr(link, name) for link in self.links], dtype=torch.float64)
                for name in ("latency", "bandwidth")
            )
            self.routes[key] = _Route(
                to, source, crosses, out, into, alone, latency[kind] * post.active, bandwidth[kind]
            )
        return self.routes[key]

    def _collective(self, post: Transfer, when: Tensor) -> _Pending:
        """Begins a collective: a group's ranks begin when the last is ready, and end together."""
        groups = post.groups
        size = groups.size(1)
        ready = when[groups].amax(1)
        nbytes = post.nbytes[groups].double()
        nodes = self.node[groups]
        num_nodes = 1 + (nodes.sort(1).values.diff(dim=1) != 0).sum(1).double()
        here = size / num_nodes  # ranks of the group in one node
        per_node = self.cluster.ports or self.cluster.node_size
        # A rank sends equal parts to all others.
        others = max(size - 1, 1)
        across = nbytes * ((size - here) / others)[:, None]
        within = nbytes - across if post.op == "all_to_all" else nbytes
        measured = self.cluster.collectives.get(post.op)
        if measured is not None:
            seconds = [
                measured.latency + nbytes.amax(1) / measured.bandwidth,
                torch.zeros_like(ready),
            ]
            across = torch.zeros_like(across)
        else:
            # Groups that lie side by side share their nodes' ports.
            side_by_side = self.cluster.node_size / here.clamp(max=self.cluster.node_size)
            used = (per_node / side_by_side).clamp(min=per_node / self.cluster.node_size)
            seconds = [
                _seconds(self.links[0], within.amax(1), here, post),
                _seconds(self.links[1], across.amax(1) * here / used, num_nodes, post),
            ]
        begin = ready
        for kind in (0, 1) if bool((num_nodes > 1).any()) else (0,):
            begin = torch.maximum(begin, self.free[:, self.port[kind][groups]].amax((0, 2)))
        end = begin + torch.maximum(*seconds)
        for kind, sent in ((0, nbytes - across), (1, across)):
            total = int(sent.sum())
            if not total:
                continue
            self.nbytes[kind] += total
            involved = self.port[kind][groups].flatten()
            for free in self.free:
                free.scatter_reduce_(0, involved, end.repeat_interleave(size), "amax")
            each = seconds[kind].repeat_interleave(size)
            self.busy += torch.zeros_like(self.busy).scatter_reduce_(0, involved, each, "amax")
            self.message[0, involved], self.message[1, involved] = groups.flatten(), -1
        start, stop = self.clock.clone(), self.clock.clone()
        crosses = torch.zeros(len(self.clock), dtype=torch.bool)
        start[groups], stop[groups] = (
            begin[:, None].expand_as(nbytes),
            end[:, None].expand_as(nbytes),
        )
        crosses[groups] = (seconds[1] > seconds[0])[:, None].expand_as(nodes)
        return _Pending(self.host, start, stop, crosses)

    def _wait(self, action: Wait) -> None:
        exchange = self.pending[action.channel]
        copies = self.cluster.copies
        end = exchange.stop
        if copies is not None:
            end = torch.where(end > self.clock, end + copies.latency, end)
        stop = torch.where(action.active, end, self.clock)
        waited = (stop - self.clock).clamp(min=0)
        # Waits first for this rank's post, then for the peers' posts, then for the bytes.
        idle = (torch.minimum(exchange.posted, stop) - self.clock).clamp(min=0)
        begun = (torch.minimum(exchange.start, stop) - self.clock).clamp(min=0)
        begun = torch.maximum(begun, idle)
        self.idle += idle
        self.late += begun - idle
        exposed = waited - begun
        between = exposed * exchange.crosses
        self.exposed[0] += exposed - between
        self.exposed[1] += between
        self.clock = self.clock + waited
        if bool(action.active.all()):
            del self.pending[action.channel]


def _seconds(link: Link, nbytes: Tensor, ranks: Tensor, post: Transfer) -> Tensor:
    """Seconds of a collective over one kind of link; 0 for a single rank."""
    # Rings and trees forward messages hop by hop; an all-to-all sends all messages at once.
    hops = 1.0 if post.op == "all_to_all" else float(ceil(log2(max(float(ranks.max()), 2.0))))
    return (link.latency * hops + nbytes / link.bandwidth) * (ranks > 1)
