"""A model of NCCL's rules: kernels of several communicators compete for a device's few places.

    communicator   its kernels run on each device one after another, in the order of their launch
    kernel         takes a place when the compute stream has come to its launch, and keeps the place
                   until the kernels of all its peers have one too
    device         has so many places; which of the ready kernels takes a free one is its choice,
                   or that of the host's order with NCCL_LAUNCH_ORDER_IMPLICIT=1

`deadlock` tries every order of all devices. The kernels come from the programs of
`ring_attn.strategies`; beside them stand those of FSDP2, tensor parallel and pipelines.

Left out: a kernel takes its place whole or not at all, where a GPU places blocks one by one; short
messages, which NCCL sends without waiting for the receiver; what the driver adds, such as
CUDA_DEVICE_MAX_CONNECTIONS=1; the making of communicators. With a place for every communicator of
a device none of it matters, for then no kernel waits for a place.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ring_attn.core.program import (
    Add,
    Buffer,
    Clear,
    Free,
    Hop,
    Inner,
    Merge,
    Post,
    PostTogether,
    Program,
    Unpack,
    Wait,
    posts_of,
)

Ranks = tuple[int, ...]
States = NDArray[np.uint8]


# A moment of a rank's streams: the number of ended kernels of each communicator.
Moment = dict[Hashable, int]


def last(moments: Iterable[Moment]) -> Moment:
    """The moment when all the given moments are past."""
    found: Moment = {}
    for moment in moments:
        for communicator, count in moment.items():
            found[communicator] = max(found.get(communicator, 0), count)
    return found


class Launch(NamedTuple):
    communicator: Hashable
    turn: int  # the kernel's number among the communicator's kernels on this rank
    sends: Ranks
    receives: Ranks
    after: Moment  # the earliest moment at which the kernel may start

    @property
    def end(self) -> Moment:
        return {self.communicator: self.turn + 1}


class Line:
    """One rank's host program: the kernels launched, and the moment that compute waits for."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.launches: list[Launch] = []
        self.now: Moment = {}  # to which the compute stream has been made to wait so far
        self._turns: Counter[Hashable] = Counter()
        # Last uses of the free message buffers, by the buffers' sizes.
        self._free: dict[int, deque[Uses]] = defaultdict(deque)

    def launch(
        self, communicator: Hashable, sends: Ranks, receives: Ranks, after: Moment | None = None
    ) -> Launch:
        """Adds a kernel, by default behind everything that compute waits for so far."""
        after = self.now if after is None else after
        turn = self._turns[communicator]
        self._turns[communicator] += 1
        self.launches.append(Launch(communicator, turn, sends, receives, after))
        return self.launches[-1]

    def collective(self, name: str, members: Ranks, after: Moment | None = None) -> Launch | None:
        """Adds a kernel that all members take part in, if there are any."""
        others = _others(members, self.rank)
        return self.launch((name, members), others, others, after) if members else None

    def wait(self, kernel: Launch | None) -> None:
        if kernel is not None:
            self.now = last([self.now, kernel.end])

    def run(self, program: Program, ranks: Ranks, begun: Moment | None = None) -> None:
        """Adds the exchanges of a call, each behind the last uses of its two buffers.

        `begun` is the moment when the call began, for a program within another.
        """
        begun = self.now if begun is None else begun
        pending: dict[Hashable, Launch] = {}
        held: dict[str, Uses] = {}
        for op in program.ops:
            if isinstance(op, Inner):
                self.run(op.program, _some(ranks, op.ranks), begun)
            elif isinstance(op, Post | PostTogether | Wait):
                members = _some(ranks, op.ranks)
                # As in `transport.ranks.links.NcclLink`: a communicator for each channel and ranks.
                communicator = members, op.channel
                if isinstance(op, Wait):
                    self.wait(pending.pop(communicator))
                    continue
                sends, receives, after = list[int](), list[int](), [begun]
                sent = list[Uses]()
                for post in posts_of(op):
                    send, recv = self._take(post.send, held), self._take(post.recv, held)
                    after += [send.written, recv.written, *recv.sent]
                    sent.append(send)
                    if isinstance(post.route, Hop):
                        sends.append(members[post.route.send_to])
                        receives.append(members[post.route.recv_from])
                    else:
                        sends += _others(members, self.rank)
                        receives += _others(members, self.rank)
                kernel = self.launch(communicator, tuple(sends), tuple(receives), last(after))
                pending[communicator] = kernel
                for send, post in zip(sent, posts_of(op), strict=True):
                    send.sent.append(kernel.end)
                    held[post.recv.name] = Uses(kernel.end)
            elif isinstance(op, Free):
                self._give((name for name in op.names if isinstance(name, Buffer)), held)
            elif isinstance(op, Add) and op.into.name not in held:
                held[op.into.name] = held.pop(op.buffer.name)
            elif not isinstance(op, Clear):
                for buffer in _buffers(op):
                    self._take(buffer, held).written = self.now
                if isinstance(op, Add | Unpack | Merge):
                    self._give([op.buffer], held)

    def _take(self, buffer: Buffer, held: dict[str, Uses]) -> Uses:
        """As in `transport.buffers.Pool`: takes the buffer that has been free longest."""
        if buffer.name not in held:
            free = self._free[buffer.nbytes]
            held[buffer.name] = free.popleft() if free else Uses(self.now)
        return held[buffer.name]

    def _give(self, buffers: Iterable[Buffer], held: dict[str, Uses]) -> None:
        for buffer in buffers:
            if buffer.name in held:  # otherwise no memory was taken
                self._free[buffer.nbytes].append(held.pop(buffer.name))


class Uses:
    """Last uses of a buffer: by compute or an exchange into it, and by exchanges that send it."""

    def __init__(self, written: Moment) -> None:
        self.written, self.sent = written, list[Moment]()


def _buffers(value: object) -> Iterator[Buffer]:
    if isinstance(value, Buffer):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _buffers(part)


def _some(ranks: Ranks, chosen: Ranks | None) -> Ranks:
    return ranks if chosen is None else tuple(ranks[r] for r in chosen)


def _others(members: Ranks, rank: int) -> Ranks:
    return tuple(member for member in members if member != rank)


class Needed:
    """For each kernel of a stream: the kernel numbers that other streams must have reached."""

    def __init__(self, needs: Sequence[dict[int, int]]) -> None:
        """Takes, for each kernel, the least number that it needs of each stream."""
        self._streams = sorted(set().union(*needs))
        rows = [[need.get(stream, 0) for stream in self._streams] for need in needs]
        self._least = np.array([*rows, [0] * len(self._streams)], np.uint8)

    def met(self, numbers: States, kernels: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        met: NDArray[np.bool_] = (numbers[:, self._streams] >= self._least[kernels]).all(1)
        return met


class Devices:
    """All devices, by stream: a communicator on a device.

    States are (n, streams) numbers of the kernels that have started; `end` is the last state.
    """

    def __init__(self, lines: Sequence[Line], places: int, *, in_order: bool) -> None:
        """Takes the hosts' orders, places per device, and whether kernels start in launch order."""
        self._places = places
        kernels: dict[tuple[int, Hashable], list[int]] = defaultdict(list)
        for rank, line in enumerate(lines):
            for host, kernel in enumerate(line.launches):
                kernels[rank, kernel.communicator].append(host)
        self.streams = list(kernels)
        self.end = np.array([len(kernels[stream]) for stream in self.streams], np.uint8)
        self._of = [
            [i for i, (owner, _) in enumerate(self.streams) if owner == rank]
            for rank in range(len(lines))
        ]
        index = {stream: i for i, stream in enumerate(self.streams)}
        peers = _peers(lines)
        self._peers, self._ended, self._started = [], [], []
        for (rank, name), hosts in kernels.items():
            launches = [lines[rank].launches[host] for host in hosts]
            met = [peers[rank, name, kernel.turn] for kernel in launches]
            self._peers.append(Needed([{index[r, name]: turn + 1 for r, turn in m} for m in met]))
            before = [lines[rank].launches[: host if in_order else 0] for host in hosts]
            started = [last(kernel.end for kernel in kernels) for kernels in before]
            ended = [kernel.after for kernel in launches]
            for needs, found in ((ended, self._ended), (started, self._started)):
                found.append(Needed([{index[rank, n]: c for n, c in m.items()} for m in needs]))

    def running(self, states: States) -> NDArray[np.bool_]:
        """Streams whose last kernel has started and not ended."""
        running = states > 0
        for stream, peers in enumerate(self._peers):
            running[:, stream] &= ~peers.met(states, states[:, stream].astype(int) - 1)
        return running

    def ready(self, states: States) -> NDArray[np.bool_]:
        """Streams whose next kernel may start."""
        running = self.running(states)
        ended = states - running
        ready = (states < self.end) & ~running
        for stream, (waits, before) in enumerate(zip(self._ended, self._started, strict=True)):
            ready[:, stream] &= waits.met(ended, states[:, stream])
            ready[:, stream] &= before.met(states, states[:, stream])
        for streams in self._of:
            # A running kernel leaves its place to the next kernel of its stream.
            ready[:, streams] &= (running[:, streams].sum(1) < self._places)[:, None]
        return ready


def _peers(lines: Sequence[Line]) -> dict[tuple[int, Hashable, int], list[tuple[int, int]]]:
    """The peers of every kernel, as rank and turn: the n-th send meets the n-th receive."""
    sent: dict[Hashable, list[int]] = defaultdict(list)
    received: dict[Hashable, list[int]] = defaultdict(list)
    for rank, line in enumerate(lines):
        for kernel in line.launches:
            for to in kernel.sends:
                sent[kernel.communicator, rank, to].append(kernel.turn)
            for source in kernel.receives:
                received[kernel.communicator, source, rank].append(kernel.turn)
    found = defaultdict(list)
    for key in {*sent, *received}:
        communicator, source, to = key
        for turn_sent, turn_received in zip(sent[key], received[key], strict=True):
            found[source, communicator, turn_sent].append((to, turn_received))
            found[to, communicator, turn_received].append((source, turn_sent))
    return found


def deadlock(
    lines: Sequence[Line], places: int, *, in_order: bool = False
) -> list[set[Hashable]] | None:
    """Communicators, by rank, whose kernels hold the places for ever; None if every order ends.

    Tries every order in which the devices may start kernels; if `in_order`, a device starts them in
    the order of their launch.
    """
    devices = Devices(lines, places, in_order=in_order)
    states = np.zeros((1, len(devices.end)), np.uint8)
    for _ in range(int(devices.end.sum())):
        ready = devices.ready(states)
        if not ready.any(1).all():
            running = devices.running(states[~ready.any(1)][:1])[0]
            held: list[set[Hashable]] = [set() for _ in lines]
            for at in np.flatnonzero(running):
                rank, communicator = devices.streams[at]
                held[rank].add(communicator)
            return held
        state, stream = np.nonzero(ready)
        states = states[state]
        states[np.arange(len(states)), stream] += 1
        rows = states.view(np.dtype((np.void, states.shape[1])))
        states = states[np.unique(rows, return_index=True)[1]]
    return None
