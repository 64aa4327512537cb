"""Point-to-point transport between processes: gloo for CPU tensors, NCCL for CUDA tensors.

Each step is one batch of one send and one receive on every rank, even an idle one: an asymmetric
batch is undefined in NCCL, and an unbatched pair can deadlock. On NCCL, shards and gradients each
have a communicator, apart from the caller's, so that neither waits for the other or for unrelated
traffic. On gloo, tags keep them apart.

Every message carries the identity of its call (`identity`). On gloo a rank never receives a message
of another call: its wait ends when the watch finds that calls differ, or else by the timeout. On
NCCL the device compares identities, and the host raises at the start of a later call.

On CUDA each channel has a stream, on which its exchanges run one after another. An exchange waits
for the last uses of its two buffers, not for other work of the compute stream. `wait` makes the
compute stream wait for the exchange. The host waits for neither.
"""

from __future__ import annotations

import datetime
import time
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.core.program import Channel, Hop
from ring_attn.core.spec import TransportOptions
from ring_attn.torch_private import coalesced, group_timeout
from ring_attn.transport import streams
from ring_attn.transport.base import After, Agreement, TransportStats, check_ranks
from ring_attn.transport.buffers import Pool
from ring_attn.transport.ranks.group import RankGroup, Waiting, describe_error, rank_group
from ring_attn.transport.ranks.identity import Identity, checksum, message_tag
from ring_attn.transport.ranks.media import Gloo, Lane, Nccl
from ring_attn.transport.streams import Event, Stream

# Seconds that a rank may take to connect and to compile, before its first exchange.
PREPARE_S = 600.0

RECEIVE, SEND = "receive from", "send to"
Started = tuple[dist.Work, str, int]
Parts = list[tuple[int, Tensor]]


@dataclass(slots=True)
class Pending:
    """An exchange under way.

    Attributes:
        step: step of the ring, or number of the collective within the call.
        works: torch.distributed's works, each with "receive from" or "send to" and the peer.
        end: event of the exchange's end, for which streams wait; None without streams.
        finish: called when all works are complete.
    """

    step: int
    works: list[tuple[dist.Work, str, int]]
    end: Event | None
    finish: Callable[[], None] | None


class P2PTransport:
    """Exchanges between processes: one symmetric send and receive a step; collectives."""

    def __init__(
        self,
        shared: RankGroup,
        options: TransportOptions,
        timeout_s: float,
        members: tuple[int, ...] | None = None,
        stats: TransportStats | None = None,
    ) -> None:
        """Makes no connections: the ranks make them together at the first call.

        Args:
            shared: state shared by all transports of the group.
            options: equal on every rank.
            timeout_s: longest wait of a rank for another rank, in seconds.
            members: ranks of the group that take part; all by default.
            stats: counts to add to; new by default.
        """
        self._members = members or tuple(range(shared.world_size))
        self.rank = self._members.index(shared.rank)
        self.world_size = len(self._members)
        self.stats = stats or TransportStats()
        self._shared, self._options, self._timeout_s = shared, options, timeout_s
        self._scope = zlib.crc32(repr(self._members).encode())
        self._subs: dict[tuple[int, ...], P2PTransport] = {}
        self._pending: dict[Channel, Pending] = {}

    @contextmanager
    def call(
        self,
        kind: str,
        agreement: Agreement,
        device: torch.device,
        *,
        values: Sequence[Tensor] = (),
        number: int | None = None,
    ) -> Iterator[int]:
        """See `Transport.call`; an error raised within the call ends the ring.

        Raises:
            RuntimeError: the ring has failed before, a rank did not come, this process was forked
                from a rank, or another thread is in a call on this group.
        """
        shared = self._shared
        if self.world_size == 1:
            yield 0
            return
        shared.refuse_fork()
        shared.occupy()
        try:
            self._check_headers()
            shared.refuse_failed()
            check = checksum(values) if values else None
            number = shared.next_number() if number is None else number
            queued = streams.are_used(device)
            known = 0 if queued or check is None else int(check)
            identity = Identity(shared.next_sequence(), number, kind, agreement, known)
            shared.begin(identity)
            tagged = shared.medium(device, self._timeout_s).honours_tags
            if not tagged:
                pool = self.pool(device)
                pool.begin()
                shared.headers.begin(identity, device, check, pool)
            yield number
            if not tagged:
                shared.headers.end(identity)
        except BaseException as error:
            shared.fail(f"{shared.call or kind} ended by {describe_error(error)}")
            self._forget()
            raise
        finally:
            shared.end()

    def post(
        self,
        channel: Channel,
        step: int,
        hop: Hop,
        send: Tensor,
        recv: Tensor,
        *,
        after: After = None,
    ) -> Event | None:
        """Starts one exchange of uint8 buffers; neither may be touched before `wait`."""
        return self._exchange(channel, step, [(hop.recv_from, recv)], [(hop.send_to, send)], after)

    def all_gather(
        self, channel: Channel, step: int, send: Tensor, recv: Tensor, *, after: After = None
    ) -> Event | None:
        """Starts to gather all ranks' `send`, (n,) uint8, in rank order: (world_size * n,)."""
        if self._alone(recv, send):
            return None
        if streams.are_used(send.device):
            nbytes = 2 * ((self.world_size - 1) * send.nbytes,)

            def start(nccl: Any) -> None:
                nccl._allgather_base(recv, send)

            return self._collective(channel, step, nbytes, send.device, start, after)
        parts = recv.chunk(self.world_size)
        parts[self.rank].copy_(send)
        receives = [(r, parts[r]) for r in self._others]
        return self._exchange(channel, step, receives, [(r, send) for r in self._others])

    def reduce_scatter(
        self, channel: Channel, step: int, send: Tensor, recv: Tensor, *, after: After = None
    ) -> Event | None:
        """Starts to sum all ranks' `send`, (world_size * n,); rank r receives the r-th chunk.

        A CPU sums in rank order; NCCL chooses its own order.
        """
        if self._alone(recv, send):
            return None
        if streams.are_used(send.device):
            nbytes = 2 * ((self.world_size - 1) * recv.nbytes,)

            def start(nccl: Any) -> None:
                nccl._reduce_scatter_base(recv, send)

            return self._collective(channel, step, nbytes, send.device, start, after)
        parts = list(send.chunk(self.world_size))
        received = {r: torch.empty_like(recv) for r in self._others}

        def add() -> None:
            recv.zero_()
            for rank in range(self.world_size):
                recv.add_(received.get(rank, parts[self.rank]))

        receives = [(r, part.view(torch.uint8)) for r, part in received.items()]
        sends = [(r, parts[r].view(torch.uint8)) for r in self._others]
        return self._exchange(channel, step, receives, sends, finish=add)

    def all_to_all(
        self,
        channel: Channel,
        step: int,
        send: Tensor,
        send_counts: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
        *,
        after: After = None,
    ) -> Event | None:
        """Starts to send each rank its part, and to receive each rank's part; counts in bytes."""
        if self._alone(recv, send):
            return None
        mine = self.rank
        if streams.are_used(send.device):
            nbytes = (send.nbytes - send_counts[mine], recv.nbytes - recv_counts[mine])

            def start(nccl: Any) -> None:
                nccl.alltoall_base(recv, send, list(recv_counts), list(send_counts))

            return self._collective(channel, step, nbytes, send.device, start, after)
        outgoing, incoming = send.split(list(send_counts)), recv.split(list(recv_counts))
        incoming[mine].copy_(outgoing[mine])
        receives = [(r, incoming[r]) for r in self._others]
        return self._exchange(channel, step, receives, [(r, outgoing[r]) for r in self._others])

    def wait(self, channel: Channel) -> None:
        """Waits for the exchange; a RuntimeError names step, peer and timeout if it fails."""
        if self.world_size == 1:
            return
        pending, start = self._pending.pop(channel), time.monotonic()
        if pending.end is not None:
            streams.wait(pending.end)
            return
        for work, what, peer in pending.works:
            try:
                self._wait_for(work, peer, start)
            except RuntimeError as error:
                elapsed = time.monotonic() - start
                raise self._error(pending.step, what, peer, elapsed, error) from error
        if pending.finish is not None:
            pending.finish()
        self.stats.wait_s += time.monotonic() - start

    def follow(self, channel: Channel, stream: Stream) -> bool:
        """See `Transport.follow`."""
        pending = self._pending.get(channel)
        if pending is None or pending.end is None:
            return False
        stream.wait_event(pending.end)
        return True

    def pool(self, device: torch.device) -> Pool:
        """Message buffers for the current stream: with streams the group's pool, else a new one."""
        return self._shared.pool(device) if streams.are_used(device) else Pool(device)

    def join(self, channel: Channel, device: torch.device) -> None:
        """Helps to make the channel's communicator, which needs all ranks, without a message."""
        if self.world_size > 1 and streams.are_used(device):
            self._lane(channel, device)

    def before_first(self, kind: Hashable, prepare: Callable[[], None]) -> None:
        """Runs `prepare` on all ranks before the first call of a kind; waits for the last rank.

        Raises:
            RuntimeError: naming the ranks that did not come, or did not get ready in time.
        """
        shared = self._shared
        if kind in shared.prepared:
            return
        here, ready = shared.roll_call("come"), shared.roll_call("get ready")
        here.come()
        here.wait(self._timeout_s)
        counts = vars(self.stats).copy()
        try:
            prepare()
        except BaseException as error:
            ready.give_up(describe_error(error))
            raise
        vars(self.stats).update(counts)
        ready.come()
        ready.wait(PREPARE_S)
        shared.prepared.add(kind)

    def sub(self, ranks: tuple[int, ...]) -> P2PTransport:
        """The transport among some of these ranks; if one transport fails, both fail."""
        if ranks not in self._subs:
            check_ranks(ranks, self.rank, self.world_size)
            members = tuple(self._members[rank] for rank in ranks)
            self._subs[ranks] = (
                self
                if members == self._members
                else P2PTransport(self._shared, self._options, self._timeout_s, members, self.stats)
            )
        return self._subs[ranks]

    def _forget(self) -> None:
        """Releases the buffers of all pending exchanges: no `wait` will come."""
        self._pending.clear()
        for sub in self._subs.values():
            if sub is not self:
                sub._forget()

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _alone(self, recv: Tensor, send: Tensor) -> bool:
        """Whether the world size is 1; then copies `send` to `recv`, which is the collective."""
        if self.world_size == 1:
            recv.copy_(send)
        return self.world_size == 1

    def _exchange(
        self,
        channel: Channel,
        step: int,
        receives: Parts,
        sends: Parts,
        after: After = None,
        finish: Callable[[], None] | None = None,
    ) -> Event | None:
        """Starts one batch of messages from and to other ranks."""
        device = sends[0][1].device
        medium = self._shared.medium(device, self._timeout_s)
        nbytes = sum(x.nbytes for _, x in sends), sum(x.nbytes for _, x in receives)
        if not medium.honours_tags:
            headers, begun = self._shared.headers.incoming(len(receives))
            own = self._shared.headers.outgoing
            rows = headers.unbind()
            receives = receives + [(r, x) for (r, _), x in zip(receives, rows, strict=True)]
            sends = sends + [(r, own) for r, _ in sends]
            after = None if after is None else [*after, *begun]

        # Receives first: `wait` takes the works in this order, and compute needs the received data.
        peer = receives[0][0]
        if isinstance(medium, Gloo):
            tagged = partial(self._send_tagged, medium, channel, step, receives, sends)
            return self._start(channel, step, peer, nbytes, tagged, finish)
        lane = self._lane(channel, device)
        together = partial(_send_together, lane.communicator, receives, sends)
        return self._start(
            channel, step, peer, nbytes, partial(lane.run, step, peer, together, after)
        )

    def _send_tagged(
        self, gloo: Gloo, channel: Channel, step: int, receives: Parts, sends: Parts
    ) -> list[Started]:
        # A medium without tags tells messages apart only by their order.
        seed = self._shared.seed ^ self._scope if gloo.honours_tags else 0

        def tag(x: Tensor) -> int:
            return message_tag(seed, channel, step, x.nbytes)

        works = [(gloo.receive(x, self._members[r], tag(x)), RECEIVE, r) for r, x in receives]
        works += [(gloo.send(x, self._members[r], tag(x)), SEND, r) for r, x in sends]
        return works

    def _collective(
        self,
        channel: Channel,
        step: int,
        nbytes: tuple[int, int],
        device: torch.device,
        start: Callable[[Any], object],
        after: After,
    ) -> Event | None:
        """Starts one of NCCL's collectives, together with an all-gather of the headers."""
        lane, headers = self._lane(channel, device), self._shared.headers
        nccl = lane.communicator
        (incoming, begun), own = headers.incoming(self.world_size), headers.outgoing
        starts = [partial(start, nccl), partial(nccl._allgather_base, incoming.view(-1), own)]
        peer, together = self._others[0], partial(coalesced, nccl, starts)
        after = None if after is None else [*after, *begun]
        return self._start(
            channel, step, peer, nbytes, partial(lane.run, step, peer, together, after)
        )

    def _lane(self, channel: Channel, device: torch.device) -> Lane:
        medium = self._shared.medium(device, self._timeout_s)
        assert isinstance(medium, Nccl), "CUDA tensors travel by NCCL"
        return medium.lane(self._members, channel, self._options, self._timeout_s, device)

    def _start(
        self,
        channel: Channel,
        step: int,
        peer: int,
        nbytes: tuple[int, int],
        start: Callable[[], list[Started] | Event],
        finish: Callable[[], None] | None = None,
    ) -> Event | None:
        """Starts and counts an exchange; `nbytes` are the bytes sent and received."""
        if channel in self._pending:
            raise RuntimeError(
                f"rank {self.rank} posts step {step} on channel {channel!r}, where step "
                f"{self._pending[channel].step} has not been waited for"
            )
        try:
            started = start()
        except RuntimeError as error:
            raise self._error(step, RECEIVE, peer, 0.0, error) from error
        works, end = (started, None) if isinstance(started, list) else ([], started)
        self._pending[channel] = Pending(step, works, end, finish)
        self.stats.bytes_sent += nbytes[0]
        self.stats.bytes_received += nbytes[1]
        self.stats.messages += 1
        return end

    def _wait_for(self, work: dist.Work, peer: int, start: float) -> None:
        now = time.monotonic()
        left = datetime.timedelta(seconds=max(self._timeout_s - (now - start), 0.001))
        self._shared.waiting = Waiting(now, (self._members[peer],))
        try:
            if not work.wait(left):
                raise RuntimeError("timed out")
        finally:
            self._shared.waiting = None

    def _check_headers(self) -> None:
        mismatch = self._shared.headers.found()
        if mismatch is not None:
            self._shared.fail(mismatch)

    def _error(
        self, step: int, what: str, peer: int, elapsed: float, error: Exception
    ) -> RuntimeError:
        shared, member = self._shared, self._members[peer]
        reason = str(shared.failed) if shared.failed else shared.reason(member)
        if reason is None:
            reason = f"the peer died, stalled, or did not make this call ({describe_error(error)})"
        text = (
            f"ring step {step}: rank {self.rank} could not {what} rank {peer} (global rank "
            f"{shared.global_ranks[member]}) after {elapsed:.1f} s, timeout {self._timeout_s:g} s: "
            f"{reason}"
        )
        shared.fail(text)
        return RuntimeError(f"{text}. Nothing is kept between calls: restart from a checkpoint")


def _send_together(nccl: Any, receives: Parts, sends: Parts) -> dist.Work:
    """Starts all messages of an exchange as one operation."""
    starts = [partial(nccl.recv, [x], r, 0) for r, x in receives]
    starts += [partial(nccl.send, [x], r, 0) for r, x in sends]
    return coalesced(nccl, starts)


_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[TransportOptions, P2PTransport]] = (
    weakref.WeakKeyDictionary()
)


def open_p2p(group: dist.ProcessGroup, options: TransportOptions) -> P2PTransport:
    """The transport of a group and options; all ranks connect together at its first call."""
    by_options = _transports.setdefault(group, {})
    if options not in by_options:
        by_options[options] = new_p2p(group, options)
    return by_options[options]


def group_device(group: dist.ProcessGroup) -> torch.device:
    """The device of a group's messages: this rank's GPU with NCCL, else the CPU."""
    if "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def new_p2p(group: dist.ProcessGroup, options: TransportOptions) -> P2PTransport:
    """A transport with new statistics, over the group's shared connections."""
    return P2PTransport(rank_group(group), options, options.timeout or group_timeout(group))
