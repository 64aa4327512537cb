"""The time of a call on a cluster, by a discrete-event simulation that walks ranks' programs.

Every rank has two clocks: of its device, and of its host, which launches ops without waiting.

    compute, move    starts at the later clock and advances the device's clock; slower while an
                     exchange of the rank is under way
    post             the exchange begins when both sides, or all of a group, have posted it and
                     its ports are free; its end is then known
    wait             advances the device's clock to the end of the exchange

On a device with streams (`Cluster.stream_latency`) an exchange does not wait for earlier ops: a
shard's begins when its receive buffer (of three) is free, a gradient's when it is computed.

A port is a device's link inside the node, or a network port, in one direction. Exchanges on one
port follow one another in the order of the program. A message that NCCL copies on few channels
takes only a part of a port's bandwidth: an exchange on another channel of the program, which is
another communicator, uses the rest at the same time. Messages of one exchange share the port, and
end together. A rank's waiting time is divided into waits for its host, for late peers (imbalance),
and for bytes (exposed communication).

All ranks can be walked, or some (`sampled_ranks`): runs of consecutive ranks. A peer that is not
walked is taken to be as late as a rank of the same run, as if the run were a ring by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, log2
from typing import NamedTuple, assert_never

from ring_attn.backends import get_backend
from ring_attn.backends.rates import is_persistent
from ring_attn.call import Call
from ring_attn.core import program as ops
from ring_attn.core.program import Program, part_of_heads
from ring_attn.core.sizes import SHARE_OF_DQ, flops, merged_bytes
from ring_attn.core.spec import AttentionSpec
from ring_attn.machines.cluster import Cluster, Link, compute_seconds
from ring_attn.transport.nccl_channels import communicator_of

# Most ranks of a node in a sample.
RUN = 8

# Number of operators in `State.fold`, most of them over the statistics.
FOLD = 14


def sampled_ranks(world_size: int, node_size: int, *members: int) -> list[int]:
    """Return the ranks that stand for all.

    These are RUN or fewer of the first node, of the last node and of the members' nodes.
    """
    length = min(node_size, RUN)
    runs = sorted({rank // length for rank in (0, world_size - 1, *members)})
    ranks: list[int] = []
    for run in runs:
        start = run * length
        ranks += range(start, min(start + length, world_size))
    return ranks


def simulate(
    programs: Sequence[Program], call: Call, cluster: Cluster, *, record: bool = False
) -> Simulation:
    """Simulate one direction of a call: the programs of the ranks to be walked.

    Nodes hold consecutive ranks. With `record`, each timeline also has its spans, for pictures.

    Raises:
        ValueError: the programs do not end; `machines.check` says why.
    """
    return _Simulator(programs, call, cluster, record).all()


class Span(NamedTuple):
    """A part of a rank's time, in seconds since the start.

    Attributes:
        lane: "device", or the channel of a transfer.
        kind: of the device "compute", "moves", "host", "late" or "exposed", which add up to the
            fields of `Timeline` (host to `idle`); of a channel "transfer".
        step: label of the program's step; "" before the first.
    """

    lane: str
    kind: str
    step: str
    start: float
    stop: float


class Pending(NamedTuple):
    """An exchange of a rank under way.

    Attributes:
        posted: when the rank's host posted it.
        start, stop: its begin and end.
        share: share of its speed that compute loses meanwhile.
    """

    posted: float
    start: float
    stop: float
    share: float


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
        step: label of the step that the rank is in.
        spans: what the rank did when, if it is recorded; else None.
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
    step: str = ""
    spans: list[Span] | None = None

    def __post_init__(self) -> None:
        self.pending: dict[ops.Channel, Pending] = {}
        # On a device with streams: the ends of the last two kernels, of the last packing and of the
        # last exchange on each channel.
        self.ended = (0.0, 0.0)
        self.packed = 0.0
        self.arrived: dict[ops.Channel, float] = {}

    def record(self, kind: str, start: float, stop: float, lane: str = "device") -> None:
        """Keep what the rank does in this step from `start` to `stop`.

        Callers ask first whether `spans` is None: plans of thousands of ranks make 100,000 calls.
        """
        if self.spans is not None and stop > start:
            self.spans.append(Span(lane, kind, self.step, start, stop))


@dataclass(frozen=True, eq=False)
class Simulation:
    """Results of a simulation: the timeline of each walked rank."""

    ranks: tuple[Timeline, ...]

    @property
    def seconds(self) -> float:
        """Time until the last rank is done."""
        return max(rank.clock for rank in self.ranks)


class _Posted(NamedTuple):
    """A rank at a post, or at an exchange in which it takes no part."""

    rank: Timeline
    op: ops.Post | ops.PostTogether | ops.Join
    ready: float


# A rank's post, and when the rank is ready.
_Post = tuple[Timeline, ops.Post, float]

# Whether a port is a network port, else a link inside the node; and the rank.
Port = tuple[bool, int]


class _Route(NamedTuple):
    """The way of a rank's message.

    Attributes:
        like: the walked rank that stands for the receiver.
        link: the kind of link.
        out, into: ports of the sender and of the receiver.
    """

    like: int
    link: Link
    out: Port
    into: Port


class _Group:
    """Ranks that make their exchanges together; `walked` are the indices of the walked ranks."""

    def __init__(self, members: tuple[int, ...], walked: Container[int], cluster: Cluster) -> None:
        self.members = members
        self.walked = [i for i, rank in enumerate(members) if rank in walked]
        self.num_nodes = len({rank // cluster.node_size for rank in members})
        # Where a rank stands for several, an exchange does so, too; but not within a node.
        self._each = cluster.each
        num_ranks, num_nodes = len(members), self.num_nodes
        if num_nodes > 1:
            num_ranks = round(num_ranks * cluster.each)
            num_nodes = round(num_nodes * cluster.each)
        self.communicator = communicator_of(
            num_ranks, num_nodes, cluster.max_ctas, over_pcie=cluster.over_pcie
        )
        self.waiting: list[_Posted] = []
        # Times at which the communicator of a channel of the program is free, by rank.
        self.free: dict[ops.Channel, dict[int, float]]
        self.free = defaultdict(lambda: defaultdict(float))
        self._places = {members[index]: index for index in self.walked}
        self._runs: dict[int, list[int]] = {}
        for _, pairs in groupby(enumerate(self.walked), lambda pair: pair[1] - pair[0]):
            run = [index for _, index in pairs]  # consecutive
            self._runs |= dict.fromkeys(run, run)

    def channels(self, nbytes: int) -> int:
        """Return the number of NCCL's channels that copy a message."""
        return self.communicator.channels(int(nbytes / self._each))

    def like(self, peer: int, rank: int) -> int:
        """Return the walked rank, of the run of `rank`, that stands for the peer at an index."""
        if peer in self._runs:
            return self.members[peer]
        run = self._runs[self._places[rank]]
        return self.members[run[(peer - run[0]) % len(run)]]


@dataclass(eq=False)
class _Simulator:
    """State of a simulation: timelines and ports."""

    programs: Sequence[Program]
    call: Call
    cluster: Cluster
    record: bool = False

    def __post_init__(self) -> None:
        self.carries = get_backend(self.call.backend).carries_state
        backward, window = self.programs[0].backward, self.call.mask.has_windows
        self.rate = self.cluster.device.rate(backward=backward, window=window)
        device, backend, spec = self.cluster.device, self.call.backend, self.call.spec
        self.bandwidth = device.memory_bandwidth
        # Share of the multiprocessors that a persistent forward leaves to each exchange in flight.
        self.margin = 0.0
        if device.multiprocessors and is_persistent(device.architecture, backend, spec):
            self.margin = self.cluster.max_ctas / device.multiprocessors
        self.ranks = {
            p.rank: Timeline(p.rank, spans=[] if self.record else None) for p in self.programs
        }
        between = self.cluster.between
        latency = between.latency + self.cluster.off_rail_latency
        self.off_rail = replace(between, latency=latency)
        self.groups: dict[tuple[int, ...], _Group] = {}
        # Times at which ports are free, out and in.
        self.free_out: dict[Port, float] = defaultdict(float)
        self.free_in: dict[Port, float] = defaultdict(float)

    def all(self) -> Simulation:
        """Walk each rank up to its next exchange; the last rank of a group lets all go on."""
        everyone, spec = tuple(range(self.call.world_size)), self.call.spec
        walks = {
            program.rank: _Walk(self, self.ranks[program.rank], program, spec, everyone).all()
            for program in self.programs
        }
        moving = [*reversed(self.ranks.values())]
        while moving:
            rank = moving.pop()
            group = next(walks[rank.rank], None)
            if group is not None and len(group.waiting) == len(group.walked):
                posted, group.waiting = group.waiting, []
                self._exchange(group, sorted(posted, key=lambda one: one.rank.rank))
                moving += [one.rank for one in reversed(posted)]
        if any(group.waiting for group in self.groups.values()):
            stuck = sorted(one.rank.rank for x in self.groups.values() for one in x.waiting)
            raise ValueError(
                f"the programs of ranks {stuck} do not end: other ranks post fewer exchanges; "
                "`ring-attn plan --check` says which"
            )
        return Simulation(tuple(self.ranks.values()))

    def group(self, members: tuple[int, ...]) -> _Group:
        if members not in self.groups:
            self.groups[members] = _Group(members, self.ranks, self.cluster)
        return self.groups[members]

    # -- exchanges

    def _exchange(self, group: _Group, posted: list[_Posted]) -> None:
        """Begin an exchange of a group, and slow down earlier kernels that overlap it."""
        started = [
            (rank, ops.on_channel(op), ready)
            for rank, op, ready in posted
            if not isinstance(op, ops.Join)
        ]
        if not started:
            return
        # Messages that start together follow one another on their communicator.
        for number in range(len(started[0][1])):
            posts = [(rank, each[number], ready) for rank, each, ready in started]
            self._begin(group, posts, is_first=number == 0)

    def _begin(self, group: _Group, posts: list[_Post], *, is_first: bool) -> None:
        """Begin the first exchange on a channel, or a further one that started together with it."""
        collective = isinstance(posts[0][1].route, ops.Collective)
        begin = self._collective if collective else self._shift
        for (rank, op, ready), pending in zip(posts, begin(group, posts), strict=True):
            rank.sent += op.nbytes
            rank.messages += 1
            first, second = rank.ended
            beside = min(pending.stop, second) - max(pending.start, first)
            is_beside = beside > 0 and ready < rank.clock
            has_margin = self.margin and not self.programs[0].backward
            if is_beside and not has_margin:
                lost = pending.share * beside
                if rank.spans is not None:
                    rank.record("compute", rank.clock, rank.clock + lost)
                rank.clock += lost
                rank.compute += lost
            if not is_first:
                earlier = rank.pending[op.channel]
                pending = Pending(
                    pending.posted,
                    start=earlier.start,
                    stop=max(earlier.stop, pending.stop),
                    share=max(earlier.share, pending.share),
                )
            rank.pending[op.channel] = pending
            if rank.spans is not None:
                rank.record("transfer", pending.start, pending.stop, lane=op.channel)
            rank.arrived[op.channel] = pending.stop

    def _shift(self, group: _Group, posts: list[_Post]) -> Iterator[Pending]:
        """Begin the messages of an exchange in which each rank has one peer for each direction."""
        routes: dict[int, _Route] = {}
        loads_out: dict[Port, int] = defaultdict(int)
        loads_in: dict[Port, int] = defaultdict(int)
        for rank, op, _ in posts:
            route = routes[rank.rank] = self._route(group, rank.rank, op)
            loads_out[route.out] += op.nbytes
            loads_in[route.into] += op.nbytes
        ready = {rank.rank: when for rank, _, when in posts}
        free = group.free[posts[0][1].channel]
        spans: dict[int, tuple[float, float]] = {}  # begin and end of a message, by its sender
        for rank, op, when in posts:
            route = routes[rank.rank]
            ports_free = max(self.free_out[route.out], self.free_in[route.into])
            communicators_free = max(free[rank.rank], free[route.like])
            begin = max(when, ready.get(route.like, 0.0), ports_free, communicators_free)
            load = max(loads_out[route.out], loads_in[route.into])
            bandwidth = route.link.bandwidth
            if self.cluster.channel_bandwidth is not None:
                bandwidth = self._bandwidth(route.link, group.channels(op.nbytes))
            end = begin + route.link.latency + load / bandwidth
            spans[rank.rank] = begin, end
        for rank, _, _ in posts:
            route = routes[rank.rank]
            begin, end = spans[rank.rank]
            load = max(loads_out[route.out], loads_in[route.into])
            # While a message is on its way its ports take the next one.
            free[rank.rank] = max(free[rank.rank], end - route.link.latency)
            free[route.like] = max(free[route.like], end - route.link.latency)
            left = begin + load / route.link.bandwidth
            self.free_out[route.out] = max(self.free_out[route.out], left)
            self.free_in[route.into] = max(self.free_in[route.into], left)
        for rank, op, when in posts:
            # For a rank it lasts from the first beginning to the last end of its two messages.
            begin, end = spans[rank.rank]
            other_begin, other_end = self._received(group, rank.rank, op, when, spans)
            start, stop = max(min(begin, other_begin), when), max(end, other_end)
            share = self._slowdown(group, group.channels(op.nbytes))
            yield Pending(rank.host, start, stop, share)

    def _route(self, group: _Group, rank: int, op: ops.Post) -> _Route:
        assert isinstance(op.route, ops.Hop)
        to = group.members[op.route.send_to]
        crosses = self._crosses(rank, to)
        return _Route(
            like=group.like(op.route.send_to, rank),
            link=self._link(rank, to),
            out=(crosses, rank),
            into=(crosses, to),
        )

    def _crosses(self, rank: int, other: int) -> bool:
        """Whether two ranks are on different nodes."""
        return rank // self.cluster.node_size != other // self.cluster.node_size

    def _link(self, rank: int, other: int) -> Link:
        if not self._crosses(rank, other):
            return self.cluster.inside
        node_size = self.cluster.node_size
        is_on_rail = rank % node_size == other % node_size
        return self.cluster.between if is_on_rail else self.off_rail

    def _bandwidth(self, link: Link, num_channels: int) -> float:
        """Return the bytes/s of a link for messages that NCCL copies on so many channels."""
        of_channel = self.cluster.channel_bandwidth
        if of_channel is None:
            return link.bandwidth
        return min(link.bandwidth, num_channels * of_channel)

    def _slowdown(self, group: _Group, num_channels: int) -> float:
        """Return the share of its speed that compute loses to an exchange on so many channels."""
        if self.cluster.channel_bandwidth is None:
            return self.cluster.slowdown
        return self.cluster.slowdown * num_channels / group.communicator.num_channels

    def _received(
        self,
        group: _Group,
        rank: int,
        op: ops.Post,
        when: float,
        spans: dict[int, tuple[float, float]],
    ) -> tuple[float, float]:
        """Return begin and end of the message that a rank receives; its sender may not be walked.

        `when` is the time at which the rank is ready, `spans` has the messages of walked senders.
        """
        assert isinstance(op.route, ops.Hop)
        source = group.members[op.route.recv_from]
        if source in spans:
            return spans[source]
        like = group.like(op.route.recv_from, rank)
        link = self._link(source, rank)
        begin = spans[like][0] if like in spans else when
        bandwidth = self._bandwidth(link, group.channels(op.message.nbytes))
        return begin, begin + link.latency + op.message.nbytes / bandwidth

    def _collective(self, group: _Group, posts: list[_Post]) -> Iterator[Pending]:
        """Begin a collective: it starts when the last rank is ready, and ends on all at once."""
        route = posts[0][1].route
        assert isinstance(route, ops.Collective)
        nbytes = float(max(post.nbytes for _, post, _ in posts))
        seconds, share = self._seconds_of_collective(group, route.op, nbytes)
        ports: list[Port] = []
        if len(group.members) > group.num_nodes:
            ports += [(False, rank.rank) for rank, _, _ in posts]
        if group.num_nodes > 1:
            ports += [(True, rank.rank) for rank, _, _ in posts]
        last_ready = max(when for _, _, when in posts)
        ports_free = max((max(self.free_out[x], self.free_in[x]) for x in ports), default=0.0)
        begin = max(last_ready, ports_free)
        for port in ports:
            self.free_out[port] = self.free_in[port] = begin + seconds
        for rank, _, _ in posts:
            yield Pending(rank.host, begin, begin + seconds, share)

    def _seconds_of_collective(self, group: _Group, op: str, nbytes: float) -> tuple[float, float]:
        """Return the time of a collective, and the share of its speed that compute loses to it.

        `nbytes` are those that a rank receives.
        """
        measured = self.cluster.collectives.get(op)
        if measured is not None:
            # NCCL's rings and trees, and an all-to-all with many peers, use all channels.
            return measured.latency + nbytes / measured.bandwidth, self.cluster.slowdown
        size, num_nodes = len(group.members), float(group.num_nodes)
        here = size / num_nodes  # ranks of the group in one node
        inside, between = self.cluster.inside, self.cluster.between
        num_channels = group.communicator.num_channels
        if op == "all_to_all":
            # A rank sends equal parts to all others.
            across = nbytes * (size - here) / max(size - 1, 1)
            within = nbytes - across
            if here > 1:
                between = self.off_rail  # most peers of other nodes have other places there
            # Each message has channels of its own, as long as there are any.
            each = group.channels(int(nbytes / max(size - 1, 1)))
            channels_within = min(num_channels, round(each * max(here - 1, 1)))
            channels_across = min(num_channels, round(each * max(size - here, 1)))
            share = self._slowdown(group, min(num_channels, round(each * max(size - 1, 1))))
        else:
            # A ring of NCCL passes all bytes through each rank, but enters and leaves a node only
            # once. Its channels are rings that cross between the nodes at different ranks, so that
            # each network adapter carries its share of the bytes and of the channels.
            within, channels_within = nbytes, num_channels
            across, channels_across = nbytes / here, max(1, round(num_channels / here))
            share = self.cluster.slowdown
        bandwidth_within = self._bandwidth(inside, channels_within)
        bandwidth_across = self._bandwidth(between, channels_across)
        seconds = max(
            _seconds(inside.latency, bandwidth_within, within, here, op),
            _seconds(between.latency, bandwidth_across, across, num_nodes, op),
        )
        return seconds, share


def _seconds(latency: float, bandwidth: float, nbytes: float, ranks: float, op: str) -> float:
    """Return the seconds of a collective over one kind of link; 0 for a single rank."""
    if ranks <= 1:
        return 0.0
    # Rings and trees forward messages hop by hop; an all-to-all sends all messages at once.
    hops = 1.0 if op == "all_to_all" else float(ceil(log2(max(ranks, 2.0))))
    return latency * hops + nbytes / bandwidth


@dataclass(eq=False)
class _Walk:
    """A walk of one program of a rank.

    If the backend's kernels carry the state, the first kernel makes it and the last one writes the
    results: then merging and finalizing take no passes of their own.
    """

    run: _Simulator
    me: Timeline
    program: Program
    spec: AttentionSpec
    members: tuple[int, ...]

    def __post_init__(self) -> None:
        self.first = True
        self.group = self.run.group(self.members)
        self.wide = self.spec.accum_dtype.itemsize

    def all(self) -> Iterator[_Group]:
        """Do every op in order; yield at each exchange, whose group then goes on together."""
        for op in self.program.ops:
            # The most frequent ops first.
            match op:
                case ops.Free() | ops.Assign():
                    pass  # takes no time on the device
                case ops.Step():
                    self.me.step = op.label
                case ops.Attend():
                    self._attend(op)
                case ops.Differentiate():
                    self._compute(op, part_of_heads(op, self.spec))
                case ops.Wait():
                    self._wait(op)
                case ops.Post() | ops.PostTogether():
                    yield self._post(op, op.ranks)
                case ops.Join():
                    yield self._post(op, None)
                case ops.Pack():
                    self._move(2 * op.message.nbytes)
                    self.me.packed = self.me.clock
                case ops.Clear():
                    self._move(op.message.nbytes)
                case ops.Add():
                    self._move(3 * op.message.nbytes)
                case ops.Unpack():
                    adds = any(copy.add for copy in op.copies)
                    self._move((3 if adds else 2) * op.message.nbytes)
                case ops.New():
                    if op.zero:
                        self._move(op.array.nbytes)
                case ops.Start():
                    self.first = True
                case ops.Finish():
                    self._finish(op)
                case ops.Delta():
                    self._delta()
                case ops.Round():
                    self._round(op)
                case ops.Inner():
                    members = self._among(op.ranks)
                    yield from _Walk(self.run, self.me, op.program, op.spec, members).all()
                case ops.Decode() | ops.Merge():
                    pass  # `tree_decode` is not predicted
                case _:
                    assert_never(op)

    def _post(
        self, op: ops.Post | ops.PostTogether | ops.Join, ranks: tuple[int, ...] | None
    ) -> _Group:
        """Return the group of an exchange, in which this rank now waits for the others."""
        group = self.group if ranks is None else self.run.group(self._among(ranks))
        group.waiting.append(_Posted(self.me, op, self._ready(op)))
        return group

    def _among(self, ranks: tuple[int, ...] | None) -> tuple[int, ...]:
        return self.members if ranks is None else tuple(self.members[r] for r in ranks)

    def _ready(self, op: ops.Post | ops.PostTogether | ops.Join) -> float:
        """Return the earliest time of an exchange on this rank, before peers and ports."""
        me, latency = self.me, self.run.cluster.stream_latency
        # Nobody has measured how much less the host does for two exchanges together.
        me.host += len(ops.posts_of(op)) * self.run.cluster.host.post
        if latency is None:
            return max(me.clock, me.host)
        moment = me.clock
        if not isinstance(op, ops.PostTogether) and op.channel in ("shards", "outer"):
            moment = max(me.packed, me.ended[0], me.arrived.get(op.channel, 0.0))
        return max(moment + latency, me.host)

    def _launched(self, seconds: float) -> float:
        """Return the device's clock after the host spent `seconds` on a launch."""
        me = self.me
        me.host += seconds
        start = max(me.clock, me.host)
        if me.spans is not None:
            me.record("host", me.clock, start)
        me.idle += start - me.clock
        me.clock = start
        return start

    def _after(self, seconds: float) -> float:
        """Return the end of `seconds` of work, slowed down by exchanges under way."""
        clock = self.me.clock
        if self.run.cluster.slowdown:
            for exchange in self.me.pending.values():
                share = exchange.share
                begin = max(exchange.start, clock)
                work = max(clock + seconds - begin, 0.0)
                beside = min(work / (1 - share), max(exchange.stop - begin, 0.0))
                seconds += share * beside
        return clock + seconds

    # -- ops

    def _move(self, nbytes: int, count: int = 1) -> None:
        """Do passes of `count` operators over memory, such as packing."""
        if not nbytes:
            return
        me = self.me
        start = self._launched(count * self.run.cluster.host.copy)
        me.clock = self._after(nbytes / self.run.bandwidth)
        if me.spans is not None:
            me.record("moves", start, me.clock)
        me.moves += me.clock - start

    def _finish(self, op: ops.Finish) -> None:
        if not self.run.carries:
            self._move(op.out_array.nbytes * (1 + self.wide // self.spec.dtype.itemsize))

    def _delta(self) -> None:
        out = self.program.arrays.get("out")
        if out is not None:
            self._move(2 * out.nbytes)

    def _round(self, op: ops.Round) -> None:
        item = op.array.dtype.itemsize
        self._move(op.array.nbytes // item * (self.wide + item))

    def _wait(self, op: ops.Wait) -> None:
        me = self.me
        me.host += self.run.cluster.host.wait
        exchange = me.pending.pop(op.channel, None)
        if exchange is None:
            raise ValueError(
                f"rank {me.rank} waits on channel {op.channel!r}, where nothing is under way; "
                "`ring-attn plan --check` says more"
            )
        start, stop = me.clock, exchange.stop
        if stop > start:
            stop += self.run.cluster.stream_latency or 0.0
        # Waits first for this rank's post, then for the peers' posts, then for the bytes.
        waited = max(stop - start, 0.0)
        idle = max(min(exchange.posted, stop) - start, 0.0)
        begun = max(min(exchange.start, stop) - start, idle)
        if me.spans is not None:
            me.record("host", start, start + idle)
            me.record("late", start + idle, start + begun)
            me.record("exposed", start + begun, start + waited)
        me.idle += idle
        me.late += begun - idle
        me.exposed += waited - begun
        me.clock += waited

    def _compute(self, op: ops.Attend | ops.Differentiate, spec: AttentionSpec) -> None:
        """Compute the tiles of a step, in the only pass or in one of two passes."""
        me, run, sizes = self.me, self.run, op.tiles.sizes
        backward = isinstance(op, ops.Differentiate)
        share, num_launches = 1.0, 1
        if isinstance(op, ops.Differentiate):
            share = {"all": 1.0, "q": SHARE_OF_DQ, "kv": 1 - SHARE_OF_DQ}[op.part]
            num_launches = 2 if op.part == "all" else 1
        seconds = 0.0
        start = me.clock
        # A persistent forward loses the multiprocessors that it leaves free, for the whole step.
        margin = 0.0 if backward else min(run.margin * len(me.pending), 0.5)
        if sizes.area:
            per_pair = flops(1, spec, backward=backward)
            touched = (sizes.rows + sizes.cols) // 2 if backward else sizes.rows
            in_one_pass = compute_seconds(run.rate, sizes.area, touched, sizes.edge, per_pair)
            seconds = share * in_one_pass / (1 - margin)
            if run.carries:
                seconds += self._state_bytes(op, spec) / run.bandwidth
            start = self._launched(num_launches * run.cluster.host.launch)
        me.clock = me.clock + seconds if margin else self._after(seconds)
        me.ended = me.ended[1], me.clock
        if me.spans is not None:
            me.record("compute", start, me.clock)
        me.compute += me.clock - start

    def _state_bytes(self, op: ops.Attend | ops.Differentiate, spec: AttentionSpec) -> int:
        """Return the bytes of sums that a kernel loads and stores, for rows that take part."""
        sizes, wide = op.tiles.sizes, spec.batch * self.wide
        if isinstance(op, ops.Attend):
            loads = 0 if self.first else 1
            stores = 0 if op.last else 1
            per_row = wide * spec.nheads * (spec.headdim_v + 2)
            return sizes.rows * (loads + stores) * per_row
        # Gradients are loaded, added to, and stored.
        q = sizes.rows * (2 * wide * spec.nheads * spec.headdim)
        kv = sizes.cols * (2 * wide * spec.nheads_kv * (spec.headdim + spec.headdim_v))
        return {"all": q + kv, "q": q, "kv": kv}[op.part]

    def _attend(self, op: ops.Attend) -> None:
        """Compute a step's tiles; from the second step on, merge the result into the state."""
        spec = part_of_heads(op, self.spec)
        self._compute(op, spec)
        if not self.run.carries and not self.first:
            elements = op.tiles.sizes.rows * (spec.batch * spec.nheads * spec.headdim_v)
            self._move(elements * merged_bytes(spec), FOLD)
        self.first = False
