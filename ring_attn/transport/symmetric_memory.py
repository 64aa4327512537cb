"""Transport between the GPUs of one node by their copy engines, through symmetric memory.

Every rank has an arena that all ranks of the group can write to: a header of counters, and for each
channel two slots. A message goes in pieces of at most a slot: the sender's copy engine puts a piece
into a slot of the receiver, whose own copies it out. No SM takes part, and the host waits for
nothing: counters are written and waited for in the order of streams, two a channel.

    sender, stream "out"                              receiver, stream "in"
                                                      room = 2: both slots may be written to
    until room >= 1:  piece 0 -> slot 0, arrived = 1
    until room >= 2:  piece 1 -> slot 1, arrived = 2  until arrived >= 1:  slot 0 -> recv, room = 3
    until room >= 3:  piece 2 -> slot 0, arrived = 3  until arrived >= 2:  slot 1 -> recv
                                                      until arrived >= 3:  slot 0 -> recv

Counters only grow, one for each pair of ranks and channel, and both ends know what they must be. So
nothing is reset, and no slot is written to before what it held has been copied out: room is given
anew by every exchange, after the copies of the one before. `exchange_commands` is that protocol as
data. In the order in which a rank gives its commands each waits only for what all ranks have given
before: it would run in one queue, which streams may be on a GPU of few hardware queues, and a host
that waits for its device between two posts holds nobody up for ever.

A wait of a stream has no timeout. A thread watches the exchanges; when one is late it fills this
rank's slots with bytes of ones (NaN in every floating point type), lets the waiting streams go on,
says so on stderr, and the next `post` or `wait` raises. So nothing hangs, and what a lost rank did
not send does not pass for numbers. Every rank that waits for it, or for one that does, comes to
that by its own timeout.

(Copies by copy engine with stream-ordered flags: CUDA's stream memory operations and torch's
symmetric memory, of which rendezvous and addresses are used here, and not its signals: those spin
in a kernel, which takes a place on an SM.)
"""

from __future__ import annotations

import ctypes
import os
import queue
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.plan import Hop
from ring_attn.spec import TransportOptions
from ring_attn.transport.base import (
    CHANNELS,
    Channel,
    TransportStats,
    check_ranks,
    group_timeout,
)

# Two, so that a piece is copied out while the next comes in.
SLOTS = 2

# One piece of K and V of 4k rows of 8 heads of 128 in 16 bits. Smaller ones take more host time.
SLOT_BYTES = 16 << 20

# So long after its deadline a late exchange is seen.
POLL_SECONDS = 0.05

Stream = Literal["out", "in"]
Counter = Literal["room", "arrived"]
STREAMS: tuple[Stream, ...] = ("out", "in")
COUNTERS: tuple[Counter, ...] = ("room", "arrived")


# -- the protocol, as data


@dataclass(frozen=True)
class Behind:
    """A stream waits for what the compute stream had been given when the exchange was posted."""

    stream: Stream


@dataclass(frozen=True)
class Write:
    """A stream sets a counter in the arena of another rank."""

    stream: Stream
    peer: int
    counter: Counter
    value: int


@dataclass(frozen=True)
class Until:
    """A stream waits until another rank has set a counter here to at least that."""

    stream: Stream
    peer: int
    counter: Counter
    value: int


@dataclass(frozen=True)
class Put:
    """Stream "out" copies bytes [start, stop) of what is sent into a slot of another rank."""

    peer: int
    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class Take:
    """Stream "in" copies a slot here to bytes [start, stop) of what is received."""

    slot: int
    start: int
    stop: int


Command = Behind | Write | Until | Put | Take


def exchange_commands(
    hop: Hop, sizes: tuple[int, int], slot_bytes: int = SLOT_BYTES
) -> Iterator[Command]:
    """What a rank does in one exchange, in the order in which it tells its streams.

    Args:
        hop: whom it sends to and receives from.
        sizes: bytes that it sends and receives.
        slot_bytes: of a piece, at most.

    Returns:
        The commands. Their values are counted from the pieces of the exchanges before: in stream
        "out" from those that were sent to the one peer, in "in" those received from the other.

    Example:
        >>> for command in exchange_commands(Hop(send_to=1, recv_from=2), (8, 5), 8):
        ...     print(command)
        Write(stream='in', peer=2, counter='room', value=1)
        Behind(stream='out')
        Behind(stream='in')
        Until(stream='out', peer=1, counter='room', value=1)
        Put(peer=1, slot=0, start=0, stop=8)
        Write(stream='out', peer=1, counter='arrived', value=1)
        Until(stream='in', peer=2, counter='arrived', value=1)
        Take(slot=0, start=0, stop=5)
    """
    outgoing, incoming = (_pieces(size, slot_bytes) for size in sizes)
    if incoming:
        # Before the stream waits for the compute stream, which concerns only what is received into.
        yield Write("in", hop.recv_from, "room", min(SLOTS, len(incoming)))
    yield Behind("out")
    yield Behind("in")
    for index in range(max(len(outgoing), len(incoming))):
        if index < len(outgoing):
            yield Until("out", hop.send_to, "room", index + 1)
            yield Put(hop.send_to, index % SLOTS, *outgoing[index])
            yield Write("out", hop.send_to, "arrived", index + 1)
        if index < len(incoming):
            yield Until("in", hop.recv_from, "arrived", index + 1)
            yield Take(index % SLOTS, *incoming[index])
            if index + SLOTS < len(incoming):
                yield Write("in", hop.recv_from, "room", index + SLOTS + 1)


@lru_cache(maxsize=4096)
def _commands(hop: Hop, sizes: tuple[int, int], slot_bytes: int) -> tuple[Command, ...]:
    """The same for every exchange of such sizes."""
    return tuple(exchange_commands(hop, sizes, slot_bytes))


def _pieces(size: int, slot_bytes: int) -> list[tuple[int, int]]:
    return [(start, min(start + slot_bytes, size)) for start in range(0, size, slot_bytes)]


@dataclass(frozen=True)
class Layout:
    """Where things are in an arena, in bytes; the same on every rank.

    Attributes:
        world_size: ranks that write to it.
        slot_bytes: of a slot.
    """

    world_size: int
    slot_bytes: int = SLOT_BYTES

    @cached_property
    def header(self) -> int:
        """Bytes of the counters, as a whole number of pages."""
        words = len(CHANNELS) * len(COUNTERS) * self.world_size
        return -(-4 * words // 4096) * 4096

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.header + len(CHANNELS) * SLOTS * self.slot_bytes

    def counter(self, channel: Channel, counter: Counter, writer: int) -> int:
        """First byte of the counter that this rank writes."""
        row = CHANNELS.index(channel) * len(COUNTERS) + COUNTERS.index(counter)
        return 4 * (row * self.world_size + writer)

    def slot(self, channel: Channel, slot: int) -> int:
        """First byte of a slot."""
        return self.header + (CHANNELS.index(channel) * SLOTS + slot) * self.slot_bytes


# -- who carries the commands out


class Mark(Protocol):
    """The end of an exchange, in the streams of its channel."""

    def done(self) -> bool:
        """Whether the device has come to it; asked by another thread."""
        ...

    def join(self, stream: Any = None) -> None:
        """Makes a stream wait for it, by default the compute stream."""
        ...


class Engine(Protocol):
    """One rank's end of the arenas: copies and counters in the order of streams.

    Places are bytes in an arena; (channel, stream) names a stream.
    """

    rank: int
    world_size: int
    layout: Layout

    def now(self) -> Any:
        """What the compute stream has been given so far."""
        ...

    def behind(self, channel: Channel, stream: Stream, now: Any) -> None:
        """The stream waits for that."""
        ...

    def write(self, channel: Channel, stream: Stream, peer: int, place: int, value: int) -> None:
        """The stream sets a counter of another rank, after all that it has copied is there."""
        ...

    def until(self, channel: Channel, stream: Stream, place: int, value: int) -> None:
        """The stream waits until a counter here is at least that."""
        ...

    def put(self, channel: Channel, peer: int, place: int, piece: Tensor) -> None:
        """Stream "out" copies bytes to another rank."""
        ...

    def take(self, channel: Channel, place: int, piece: Tensor) -> None:
        """Stream "in" copies bytes out of this rank's arena."""
        ...

    def mark(self, channel: Channel) -> Mark:
        """The end of all that the channel's streams have been given."""
        ...

    def release(self, counters: Mapping[int, int]) -> None:
        """Fills the slots here with ones, then sets counters here, past all waiting streams."""
        ...


@dataclass
class _Watched:
    """An exchange that must be over in time."""

    mark: Mark
    deadline: float
    step: int
    what: str


class Arena:
    """What the transports of one group share: the engine, the counters, and the watch over it."""

    def __init__(self, engine: Engine, timeout: float) -> None:
        """Nothing is sent yet.

        Args:
            engine: of this rank, whose peers are made too.
            timeout: seconds from the posting of an exchange to its end.
        """
        self.engine = engine
        self.timeout = timeout
        self.failed: RuntimeError | None = None
        self._told = False
        self._counts: dict[tuple[Channel, Counter, int], int] = {}
        self._watched: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._watching = False
        weakref.finalize(self, self._watched.put, None)

    def start(self, channel: Channel, hop: Hop, send: Tensor, recv: Tensor) -> None:
        """Gives the streams one exchange of uint8 tensors; ranks are those of the arena."""
        engine, layout = self.engine, self.engine.layout
        # Pieces sent to the one, and received from the other: what was last waited for.
        before = {
            "out": self._counts.get((channel, "room", hop.send_to), 0),
            "in": self._counts.get((channel, "arrived", hop.recv_from), 0),
        }
        now, sizes = engine.now(), (send.nbytes, recv.nbytes)
        for command in _commands(hop, sizes, layout.slot_bytes):
            match command:
                case Behind(stream):
                    engine.behind(channel, stream, now)
                case Write(stream, peer, counter, value):
                    place = layout.counter(channel, counter, engine.rank)
                    engine.write(channel, stream, peer, place, before[stream] + value)
                case Until(stream, peer, counter, value):
                    total = self._counts[channel, counter, peer] = before[stream] + value
                    engine.until(channel, stream, layout.counter(channel, counter, peer), total)
                case Put(peer, slot, start, stop):
                    engine.put(channel, peer, layout.slot(channel, slot), send[start:stop])
                case Take(slot, start, stop):
                    engine.take(channel, layout.slot(channel, slot), recv[start:stop])

    def end(self, channel: Channel, step: int, what: str) -> Mark:
        """The end of what has been started on a channel; it is watched from here on."""
        mark = self.engine.mark(channel)
        if not self._watching:
            self._watching = True
            watch = threading.Thread(
                target=_watch,
                args=(self._watched, weakref.ref(self)),
                name="ring_attn watch",
                daemon=True,
            )
            watch.start()
        self._watched.put(_Watched(mark, time.monotonic() + self.timeout, step, what))
        return mark

    def check(self) -> None:
        """Raises if an exchange has failed before."""
        if self.failed is None:
            return
        if self._told:
            raise RuntimeError("this ring has failed before and cannot go on") from self.failed
        self._told = True
        raise self.failed

    def let_go(self, late: _Watched) -> None:
        """Ends all waiting on this rank, with what has not come as NaN."""
        if self.failed is None:
            self.failed = RuntimeError(
                f"ring step {late.step}: rank {self.engine.rank} could not {late.what} within the "
                f"timeout of {self.timeout:g} s: the peer died, stalled, or called with other "
                f"shapes (RING_ATTN_DEBUG=1 tells). What has not come is NaN on this rank. Nothing "
                f"is kept between calls: restart from a checkpoint."
            )
            print(f"ring_attn: {self.failed}", file=sys.stderr, flush=True)
        # Counters are compared modulo 2**32: half of that ahead would be behind.
        ahead = {
            self.engine.layout.counter(channel, counter, peer): value + (1 << 30)
            for (channel, counter, peer), value in list(self._counts.items())
        }
        self.engine.release(ahead)


def _watch(watched: queue.SimpleQueue[_Watched | None], arena: weakref.ref[Arena]) -> None:
    """Looks at one exchange after another, until the arena is gone."""
    while (item := watched.get()) is not None:
        try:
            while not item.mark.done():
                owner = arena()
                if owner is None:
                    return
                # Again and again: a rank that was only late sets counters back to what they were.
                if owner.failed is not None or time.monotonic() > item.deadline:
                    owner.let_go(item)
                del owner
                time.sleep(POLL_SECONDS)
        except RuntimeError as error:
            # The device itself has failed, which the next use of it tells the caller, too.
            print(f"ring_attn: exchanges are no longer watched: {error}", file=sys.stderr)
            return


# -- the transport


@dataclass
class _Pending:
    """An exchange under way; holds its tensors until the streams are done with them."""

    mark: Mark
    tensors: Sequence[Tensor]
    finish: Callable[[], None] | None


@dataclass(eq=False)
class SymmetricMemoryTransport:
    """Ring exchanges and collectives as copies into the arenas of other ranks.

    A collective is `world_size - 1` exchanges, with the ranks at distance 1, 2, ... either way.

    Attributes:
        arena: of the group; None for one rank alone.
        members: the arena's ranks that take part, by this transport's rank.
        rank: of this process among them.
        stats: counted into.
    """

    arena: Arena | None
    members: tuple[int, ...]
    rank: int
    stats: TransportStats = field(default_factory=TransportStats)

    def __post_init__(self) -> None:
        self.world_size = len(self.members)
        self._pending: dict[Channel, _Pending] = {}
        self._subs: dict[tuple[int, ...], SymmetricMemoryTransport] = {}

    def post(self, channel: Channel, step: int, hop: Hop, send: Tensor, recv: Tensor) -> None:
        """Starts one exchange of uint8 buffers; neither may be touched before `wait`."""
        self._start(channel, step, [(hop, send, recv)])

    def all_gather(self, channel: Channel, step: int, send: Tensor, recv: Tensor) -> None:
        """Starts to bring every rank's (n,) uint8 `send`, in their order, to (world_size * n,)."""
        if self._alone(recv, send):
            return
        parts = recv.view(self.world_size, -1)
        parts[self.rank].copy_(send)
        self._start(channel, step, [(hop, send, parts[hop.recv_from]) for hop in self._hops()])

    def reduce_scatter(self, channel: Channel, step: int, send: Tensor, recv: Tensor) -> None:
        """Starts to sum all ranks' (world_size * n,) `send`, in their order; rank r has part r."""
        if self._alone(recv, send):
            return
        outgoing = send.view(self.world_size, -1)
        incoming = torch.empty_like(outgoing)
        incoming[self.rank] = outgoing[self.rank]

        def add() -> None:
            recv.zero_()
            for part in incoming:
                recv.add_(part)

        # As bytes, whatever their type.
        from_here, to_here = outgoing.view(torch.uint8), incoming.view(torch.uint8)
        exchanges = [(hop, from_here[hop.send_to], to_here[hop.recv_from]) for hop in self._hops()]
        self._start(channel, step, exchanges, add)

    def all_to_all(
        self,
        channel: Channel,
        step: int,
        send: Tensor,
        send_counts: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> None:
        """Starts to bring from every rank its part for this one; counts in bytes."""
        if self._alone(recv, send):
            return
        outgoing, incoming = send.split(list(send_counts)), recv.split(list(recv_counts))
        incoming[self.rank].copy_(outgoing[self.rank])
        exchanges = [(hop, outgoing[hop.send_to], incoming[hop.recv_from]) for hop in self._hops()]
        self._start(channel, step, exchanges)

    def wait(self, channel: Channel) -> None:
        """Makes the compute stream wait for the exchange, of both sides.

        Raises:
            RuntimeError: an exchange of this group was late, with its step, peers and timeout.
        """
        if self.world_size == 1:
            return
        start = time.perf_counter()
        # Before its tensors are let go, which the streams may still write to if it has failed.
        self._arena.check()
        pending = self._pending.pop(channel)
        pending.mark.join()
        if pending.finish is not None:
            pending.finish()
        self.stats.wait_s += time.perf_counter() - start

    def follow(self, channel: Channel, stream: torch.cuda.Stream) -> bool:
        """Makes a stream wait for the exchange under way, as `wait` makes the compute stream."""
        pending = self._pending.get(channel)
        if pending is None:
            return False
        pending.mark.join(stream)
        return True

    def sub(self, ranks: tuple[int, ...]) -> SymmetricMemoryTransport:
        """The transport among some of these ranks, in the same arena."""
        if ranks not in self._subs:
            check_ranks(ranks, self.rank, self.world_size)
            members = tuple(self.members[rank] for rank in ranks)
            self._subs[ranks] = SymmetricMemoryTransport(
                self.arena, members, ranks.index(self.rank), self.stats
            )
        return self._subs[ranks]

    def _hops(self) -> list[Hop]:
        """To every other rank and from every other, so that two meet in the same exchange."""
        rank, n = self.rank, self.world_size
        return [Hop((rank + shift) % n, (rank - shift) % n) for shift in range(1, n)]

    def _start(
        self,
        channel: Channel,
        step: int,
        exchanges: Sequence[tuple[Hop, Tensor, Tensor]],
        finish: Callable[[], None] | None = None,
    ) -> None:
        arena = self._arena
        arena.check()
        for hop, send, recv in exchanges:
            among = Hop(self.members[hop.send_to], self.members[hop.recv_from])
            arena.start(channel, among, send, recv)
            self.stats.bytes_sent += send.nbytes
            self.stats.bytes_received += recv.nbytes
        mark = arena.end(channel, step, self._named([hop for hop, *_ in exchanges]))
        tensors = [x for _, *both in exchanges for x in both]
        self._pending[channel] = _Pending(mark, tensors, finish)
        self.stats.messages += 1

    @property
    def _arena(self) -> Arena:
        if self.arena is None:
            raise ValueError("a transport of one rank has nobody to exchange with")
        return self.arena

    def _alone(self, recv: Tensor, send: Tensor) -> bool:
        """Does a collective of one rank."""
        if self.world_size == 1:
            recv.copy_(send)
        return self.world_size == 1

    def _named(self, hops: Sequence[Hop]) -> str:
        to = sorted(self.members[hop.send_to] for hop in hops)
        by = sorted(self.members[hop.recv_from] for hop in hops)
        return f"send to ranks {to} of the group and receive from ranks {by}"


# -- CUDA


class _Driver:
    """Stream memory operations: of the CUDA driver that torch has loaded; torch has no wait."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self._wait, self._write = (
                getattr(library, f"cuStream{name}Value32_v2") for name in ("Wait", "Write")
            )
        except (OSError, AttributeError) as error:
            raise NotImplementedError(
                f"the CUDA driver has no stream memory operations: {error}"
            ) from error
        for function in (self._wait, self._write):
            # Stream, address, value, flags.
            function.argtypes = (
                ctypes.c_void_p,
                ctypes.c_uint64,
                ctypes.c_uint32,
                ctypes.c_uint,
            )
            function.restype = ctypes.c_int

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Until the word there is at least that, modulo 2**32."""
        at_least = 0
        self._checked(self._wait(stream.cuda_stream, address, value % (1 << 32), at_least))

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Sets the word, after all that the stream has written can be seen on every device."""
        with_barrier = 0
        self._checked(self._write(stream.cuda_stream, address, value % (1 << 32), with_barrier))

    def _checked(self, status: int) -> None:
        if status:
            raise RuntimeError(f"a stream memory operation failed: CUDA driver error {status}")


@dataclass
class _Events:
    """The end of an exchange, by an event in each stream."""

    events: Sequence[torch.cuda.Event]

    def done(self) -> bool:
        return all(event.query() for event in self.events)

    def join(self, stream: torch.cuda.Stream | None = None) -> None:
        stream = stream or torch.cuda.current_stream()
        for event in self.events:
            stream.wait_event(event)


class CudaEngine:
    """Copies between the GPUs of a node, in torch's symmetric memory."""

    def __init__(self, group: dist.ProcessGroup, layout: Layout, device: torch.device) -> None:
        """Every rank of the group calls it together.

        Args:
            group: of any backend; torch's rendezvous is by its store.
            layout: of all arenas.
            device: this rank's GPU.
        """
        from torch.distributed import _symmetric_memory

        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.layout = layout
        self._driver = _Driver()
        self._device = device
        arena = _symmetric_memory.empty(layout.nbytes, dtype=torch.uint8, device=device)
        arena[: layout.header].zero_()
        # Others write as soon as they have come together.
        torch.cuda.synchronize(device)
        handle = _symmetric_memory.rendezvous(arena, group.group_name)
        # What is mapped of other ranks lasts as long as the handle.
        self._handle = handle
        self._connect(arena, lambda rank: handle.get_buffer(rank, (layout.nbytes,), torch.uint8))
        self._streams: dict[tuple[Channel, Stream], torch.cuda.Stream] = {}

    def _connect(self, own: Tensor, arena_of: Callable[[int], Tensor]) -> None:
        self._own = own
        self._arenas = [
            own if rank == self.rank else arena_of(rank) for rank in range(self.world_size)
        ]
        self._starts = [arena.data_ptr() for arena in self._arenas]

    def now(self) -> torch.cuda.Event:
        """An event of the compute stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def behind(self, channel: Channel, stream: Stream, now: torch.cuda.Event) -> None:
        """The stream waits for that event."""
        self._stream(channel, stream).wait_event(now)

    def write(self, channel: Channel, stream: Stream, peer: int, place: int, value: int) -> None:
        """By the stream itself, without a kernel."""
        self._driver.write(self._stream(channel, stream), self._starts[peer] + place, value)

    def until(self, channel: Channel, stream: Stream, place: int, value: int) -> None:
        """By the stream itself, without a kernel."""
        self._driver.wait(self._stream(channel, stream), self._starts[self.rank] + place, value)

    def put(self, channel: Channel, peer: int, place: int, piece: Tensor) -> None:
        """cudaMemcpyAsync to the other GPU."""
        there = self._arenas[peer][place : place + piece.nbytes]
        self.copy(self._stream(channel, "out"), there, piece)

    def take(self, channel: Channel, place: int, piece: Tensor) -> None:
        """cudaMemcpyAsync within this GPU."""
        self.copy(self._stream(channel, "in"), piece, self._own[place : place + piece.nbytes])

    def copy(self, stream: torch.cuda.Stream, to: Tensor, source: Tensor) -> None:
        """Copies in the order of a stream; equal, contiguous types are one cudaMemcpyAsync."""
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def mark(self, channel: Channel) -> _Events:
        """An event in each of the channel's streams."""
        return _Events([self._stream(channel, stream).record_event() for stream in STREAMS])

    def release(self, counters: Mapping[int, int]) -> None:
        """On a stream of its own, as the others are waiting."""
        header = torch.zeros(self.layout.header // 4, dtype=torch.int64)
        for place, value in counters.items():
            header[place // 4] = value % (1 << 32)
        # int32 has the bits of the driver's unsigned words.
        words = header.sub(1 << 32).where(header >= 1 << 31, header).to(torch.int32)
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
            self._own[self.layout.header :].fill_(0xFF)
            self._own[: self.layout.header].view(torch.int32).copy_(words)

    def _stream(self, channel: Channel, stream: Stream) -> torch.cuda.Stream:
        key = channel, stream
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self._device)
        return self._streams[key]


_transports: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[TransportOptions, SymmetricMemoryTransport]
] = weakref.WeakKeyDictionary()


def open_symmetric_memory(
    group: dist.ProcessGroup,
    options: TransportOptions,
    make_engine: Callable[[dist.ProcessGroup, Layout, torch.device], Engine] = CudaEngine,
) -> SymmetricMemoryTransport:
    """The transport of a group, made at its first call: every rank of the group takes part then.

    The ranks tell each other where they are and what they cannot do, so that all refuse alike.

    Args:
        group: of any backend, its ranks on one node.
        options: equal on every rank.
        make_engine: what moves the bytes.

    Raises:
        NotImplementedError: this torch, its device or its driver lacks what is needed.
        RuntimeError: ranks on different nodes, or several on one GPU where torch was not told so.
    """
    by_options = _transports.setdefault(group, {})
    if options not in by_options:
        world_size = dist.get_world_size(group)
        arena = None
        if world_size > 1:
            check_places(_tell_places(group))
            device = torch.device("cuda", torch.cuda.current_device())
            engine = make_engine(group, Layout(world_size), device)
            arena = Arena(engine, options.timeout or group_timeout(group))
        rank = dist.get_rank(group)
        by_options[options] = SymmetricMemoryTransport(arena, tuple(range(world_size)), rank)
    return by_options[options]


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        node: name of the host.
        gpu: its unique name.
        shares: torch was told that ranks share a GPU.
        lacks: why symmetric memory cannot be had there; "" where it can.
    """

    node: str
    gpu: str
    shares: bool = False
    lacks: str = ""


SHARED_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def check_places(places: Sequence[Place]) -> None:
    """Refuses ranks that symmetric memory does not reach, on all of them alike.

    Raises:
        NotImplementedError: a rank lacks something.
        RuntimeError: more than one node; several ranks on a GPU where torch was not told so.
    """
    for rank, place in enumerate(places):
        if place.lacks:
            raise NotImplementedError(
                f"transport kind 'symmetric_memory' cannot be had on rank {rank}: {place.lacks}; "
                "use kind 'p2p'"
            )
    nodes = sorted({place.node for place in places})
    if len(nodes) > 1:
        raise RuntimeError(
            f"transport kind 'symmetric_memory' is for the GPUs of one node, the ranks are on "
            f"{len(nodes)}: {nodes}; use kind 'p2p'"
        )
    gpus = {place.gpu for place in places}
    if len(gpus) < len(places) and not all(place.shares for place in places):
        raise RuntimeError(
            f"transport kind 'symmetric_memory': {len(places)} ranks are on {len(gpus)} GPUs; give "
            f"each its own by torch.cuda.set_device, or set {SHARED_GPUS}=1 to try things out"
        )


def _tell_places(group: dist.ProcessGroup) -> list[Place]:
    places: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, _place(), group=group)
    return places


def _place() -> Place:
    node = socket.gethostname()
    if not torch.cuda.is_available():
        return Place(node, "", lacks="there is no GPU that torch can use")
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return Place(node, gpu, os.environ.get(SHARED_GPUS) == "1", why_not_here())


def why_not_here() -> str:
    """What this torch, device or driver lacks for it; "" if nothing. Tries the driver's calls."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return f"torch {torch.__version__} has no symmetric memory"
    missing = [name for name in ("empty", "rendezvous") if not hasattr(_symmetric_memory, name)]
    if missing:
        return f"torch {torch.__version__} has no symmetric memory of CUDA: {missing}"
    if torch.version.hip is not None:
        return "its copies are ordered by the CUDA driver, and this torch is for ROCm"
    try:
        driver, stream = _Driver(), torch.cuda.Stream()
        word = torch.zeros(1, dtype=torch.int32, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        driver.write(stream, word.data_ptr(), 1)
        driver.wait(stream, word.data_ptr(), 1)
        stream.synchronize()
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return ""
