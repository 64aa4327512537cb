"""Point-to-point transport between processes: gloo for CPU tensors, NCCL for CUDA tensors.

Each step is one batch of one send and one receive on every rank, even an idle one: an asymmetric
batch is undefined in NCCL, and an unbatched pair can deadlock. On NCCL, shards and gradients each
have a communicator, apart from the caller's, so that neither waits for the other or for unrelated
traffic; or both are sent in one batch on one communicator (`TransportOptions.one_communicator`). On
gloo, tags keep them apart.

Every message carries the identity of its call (`identity`). On gloo a rank never receives a message
of another call: its wait ends when the watch finds that calls differ, or else by the timeout. On
NCCL the device compares identities, and the host raises at the start of a later call or check.

On CUDA each channel has a stream, on which its exchanges run one after another. An exchange waits
for the last uses of its two buffers, not for other work of the compute stream. `wait` makes the
compute stream wait for the exchange. The host waits for neither.
"""

from __future__ import annotations

import datetime
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.core.facts import Facts, places_of_difference
from ring_attn.core.program import Channel, Collective, Hop
from ring_attn.torch_private import Untyped, coalesced, group_timeout
from ring_attn.transport import capture, groups, streams
from ring_attn.transport.base import (
    After,
    Agreement,
    Batch,
    Ranks,
    Transport,
    TransportStats,
    as_facts,
    gather_texts,
    rank_name,
)
from ring_attn.transport.buffers import HEADER_BYTES, Pool
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.ranks.calls import NOTHING, Waiting
from ring_attn.transport.ranks.errors import (
    NO_CALL,
    Disagreement,
    describe_error,
    mark_counted,
    noticed,
)
from ring_attn.transport.ranks.group import RankGroup, rank_group
from ring_attn.transport.ranks.identity import (
    Identity,
    checksum,
    current_step,
    debug_enabled,
    message_tag,
    report_values,
)
from ring_attn.transport.ranks.links import GlooLink, NcclChannel, NcclLink
from ring_attn.transport.ranks.rendezvous import DifferentError, MissingRanksError
from ring_attn.transport.streams import Event, Stream

# Seconds that a rank may take to connect and to compile, before its first exchange.
PREPARE_S = 600.0

# Calls that compare what other calls would send.
COMPARING = Agreement({"compares": True})

# Kinds of calls for which the host does not wait, and which a CUDA graph may hold.
CAPTURED = ("forward", "backward", "decode")

# A captured call must equal one of so many before.
CALLS_KNOWN = 1024

RECEIVE, SEND = "receive from", "send to"
Started = tuple[dist.Work, str, int]  # the work, RECEIVE or SEND, and the peer


class P2PTransport(Transport):
    """Exchanges between processes: one symmetric send and receive a step; collectives."""

    def __init__(
        self,
        shared: RankGroup,
        timeout_s: float,
        options: TransportOptions,
        members: Ranks | None = None,
        stats: TransportStats | None = None,
    ) -> None:
        """Prepare a transport; the ranks, all or `members`, connect at the first call."""
        everyone = tuple(range(shared.member.world_size))
        super().__init__(members or everyone, shared.member.rank, stats)
        self._shared, self._timeout_s, self._options = shared, timeout_s, options
        self.sms_per_exchange, self.spare_sms = options.max_ctas, options.spare_sms
        self.global_ranks = tuple(shared.member.global_ranks[member] for member in self.members)
        self._scope = zlib.crc32(repr(self.members).encode())
        self._nccl_channels: dict[Channel, NcclChannel] = {}
        # Kinds and digests of the last calls.
        self._made: deque[tuple[str, bytes]] = deque(maxlen=CALLS_KNOWN)

    @contextmanager
    def call(
        self,
        kind: str,
        agreement: Agreement,
        device: torch.device,
        *,
        sinks: Tensor | None = None,
        queries: Tensor | None = None,
        number: int | None = None,
    ) -> Iterator[int]:
        """See `Transport.call`; an error raised within the call ends the ring."""
        shared = self._shared
        if self.world_size == 1:
            yield 0
            return
        if capture.is_on():
            self._check_captured(kind, agreement)
        if debug_enabled() and agreement is not COMPARING:
            values = {"q": queries, "sinks": sinks}
            sums = {name: int(checksum(x)) for name, x in values.items() if x is not None}
            call = kind if number is None else f"{kind} {number}"
            texts = {"call": call, **report_values(current_step(), sums)}
            self.compare(as_facts(texts), agreement, device)
        shared.refuse_fork()
        shared.connection.check_device(device)
        calls = shared.calls
        calls.occupy()
        try:
            if calls.headers.calls and (mismatch := calls.headers.found()) is not None:
                shared.failure.fail(mismatch)
            shared.refuse_failed()
            sum_of_sinks = None if sinks is None else checksum(sinks)
            number = next(calls.numbers) if number is None else number
            queued = streams.are_used(device)
            values_on_host = 0 if queued or sum_of_sinks is None else int(sum_of_sinks)
            identity = Identity(next(calls.sequence), number, kind, agreement, values_on_host)
            calls.begin(identity)
            shared.link(device, self._timeout_s)
            if queued:
                pool = self.pool(device)
                pool.begin()
                calls.headers.begin(identity, device, sum_of_sinks, pool)
            yield number
            if queued:
                calls.headers.end()
                self._made.append((kind, agreement.digest))
        except BaseException as error:
            mark_counted(error)
            shared.failure.fail(f"{describe_error(error)}, in {calls.current or kind}")
            calls.unchecked = False  # the user has the error
            self._forget()
            raise
        finally:
            calls.end()

    def _check_captured(self, kind: str, agreement: Agreement) -> None:
        """Refuse to capture a call for which the host waits, as it does in the first of a kind."""
        if kind not in CAPTURED:
            capture.refuse(f"the host would wait for other ranks, to {kind}")
        if (kind, agreement.digest) not in self._made:
            capture.refuse(f"make the same {kind} call once before the capture")

    def compare(self, texts: Facts, agreement: Agreement, device: torch.device) -> None:
        """Refuse ranks whose calls differ, on every rank, before they send a message.

        `texts` are the facts of the call that its agreement does not have.
        """
        report = texts | agreement.report
        found = self._difference("arguments", report, device)
        if found is None:
            return
        places = self._places(agreement, device) if found.has_places else {}
        error = ValueError(found.text(places))
        self._shared.refuse_call(error)
        raise error

    def _difference(self, what: str, report: Facts, device: torch.device) -> Disagreement | None:
        """Return how facts differ that all ranks report through the store, without a message."""
        with self.call(f"compare {what}", COMPARING, device):
            return self._shared.difference(report, self._timeout_s)

    def _places(self, agreement: Agreement, device: torch.device) -> dict[str, str]:
        """Return the first places where the layouts and masks of all ranks differ."""
        counts = vars(self.stats).copy()
        with self.call("compare layouts and masks", COMPARING, device):
            texts = gather_texts(self, agreement.details, device)
        vars(self.stats).update(counts)
        names = map(rank_name, self.global_ranks)
        return places_of_difference(dict(zip(names, texts, strict=True)))

    def check_even(self, rows: tuple[int, int], device: torch.device) -> None:
        """Refuse ranks with different numbers of rows of q and k; compare each numbers once."""
        calls = self._shared.calls
        if rows in calls.even_rows or self.world_size == 1 or debug_enabled():
            return
        here = as_facts({"rows": f"{rows[0]} rows of q and {rows[1]} of k"})
        uneven = self._difference("rows of ring_attention", here, device)
        if uneven is not None:
            raise _uneven_rows("; ".join(uneven.facts.values()))
        calls.even_rows.add(rows)

    def check_documents(
        self,
        cu_seqlens: tuple[int, ...] | None,
        cu_seqlens_k: tuple[int, ...] | None,
        device: torch.device,
    ) -> None:
        """Refuse ranks with different boundaries of documents.

        The messages of a call do not always compare them: a rank sends none if, by its boundaries,
        no document is on two ranks. Nothing is remembered of earlier calls, because another rank
        may have other boundaries in this one.
        """
        if debug_enabled():  # compares all arguments
            return
        here = Agreement({"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}).report
        different = self._difference("documents", here, device)
        if different is not None:
            raise ValueError(different.text())

    def check(self) -> None:
        """Compare all calls so far; return once all ranks have arrived here without an error.

        A rank whose exchanges were cut off by an error does not arrive, so no other rank accepts
        what that rank has sent since then.
        """
        for device in self._shared.connection.devices.values():
            self._shared.settle()
            with self.call("check", NOTHING, device):
                self.gather(torch.zeros(1, dtype=torch.uint8, device=device))
            self._shared.settle()
        self._shared.calls.unchecked = False

    def wait(self, channel: Channel) -> None:
        """Wait for the exchange; a RuntimeError names step, peer and timeout if it fails."""
        if self.world_size == 1:
            return
        step, started, finish, device = self.pending.pop(channel)
        start = time.monotonic()
        if not isinstance(started, list):
            streams.wait(started, device)
            return
        for work, what, peer in started:
            try:
                self._wait_for(work, peer, start)
            except RuntimeError as error:
                elapsed = time.monotonic() - start
                raise self.error_of(step, what, peer, elapsed, error) from error
        if finish is not None:
            finish()
        self.stats.wait_s += time.monotonic() - start

    def pool(self, device: torch.device) -> Pool:
        return self._shared.connection.pool(device) if streams.are_used(device) else Pool(device)

    def side(self, device: torch.device) -> Stream | None:
        return self._shared.connection.side(device)

    def join(self, channel: Channel, device: torch.device) -> None:
        """Help to make the channel's communicator, which needs all ranks."""
        if self.world_size > 1 and streams.are_used(device):
            self._nccl_channel(channel, device)

    def before_first(self, kind: Hashable, backend: str, prepare: Callable[[], None]) -> None:
        prepared = self._shared.calls.prepared
        if (kind, backend) in prepared:
            return
        connection, cannot_meet = self._shared.connection, self._shared.failure.cannot_meet
        here, ready = connection.next_rendezvous(), connection.next_rendezvous()
        here.arrive(as_facts({"backend": backend}))
        try:
            here.wait(self._timeout_s, cannot_meet)
        except (DifferentError, MissingRanksError) as error:
            raise self._not_prepared(str(error)) from error
        counts = vars(self.stats).copy()
        try:
            prepare()
        except BaseException as error:
            ready.cancel(describe_error(error))
            raise
        vars(self.stats).update(counts)
        ready.arrive()
        try:
            ready.wait(PREPARE_S, cannot_meet)
        except MissingRanksError as error:
            loading = ": they are still preparing their backend, such as compiling kernels"
            cause = f"{error}{loading if error.is_unexplained else ''}"
            raise self._not_prepared(cause) from error
        prepared.add((kind, backend))

    def _not_prepared(self, cause: str) -> RuntimeError:
        """End the group before its first call of a kind; return the error."""
        self._shared.failure.fail(cause, shared=True)
        name, call = self._shared.member.name, self._shared.calls.current
        return RuntimeError(noticed(cause, f"when {name} prepared {call}, the first of its kind"))

    def _among(self, members: Ranks) -> P2PTransport:
        return P2PTransport(self._shared, self._timeout_s, self._options, members, self.stats)

    def post(
        self,
        channel: Channel,
        step: int,
        route: Hop | Collective,
        send: Tensor,
        recv: Tensor,
        *,
        after: After = None,
    ) -> Event | None:
        # Without the way through the base: see tests/distributed/test_warm_call.py.
        if isinstance(route, Collective):
            return super().post(channel, step, route, send, recv, after=after)
        messages = [(route.send_to, send)], [(route.recv_from, recv)]
        return self._exchange(Batch(channel, step, send.device, after, *messages))

    def _exchange(self, batch: Batch) -> Event | None:
        if streams.are_used(batch.device):
            return self._hops(batch)
        link, peer = self._shared.link(batch.device, self._timeout_s), batch.receives[0][0]
        assert isinstance(link, GlooLink), "CPU tensors are sent by gloo"
        sent = received = 0
        for _, x in batch.sends:
            sent += x.nbytes
        for _, x in batch.receives:
            received += x.nbytes
        start = partial(self._send_tagged, link.gloo, batch)
        return self.start_batch(batch, peer, start, sent=sent, received=received)

    def _hops(self, batch: Batch) -> Event | None:
        """Start as many sends as receives in one group of NCCL; messages begin with a header.

        NCCL has no tags: messages between two ranks must be in one order on both.
        """
        channel = self._nccl_channel(batch.channel, batch.device)
        headers, nccl = self._shared.calls.headers, channel.communicator
        # The flight recorder has three entries of a send and a receive. all_to_all has one, but
        # sends 0 bytes to all others.
        receives = [(nccl.recv, [recv], source, 0) for source, recv in batch.receives]
        sends = [(nccl.send, [send], to, 0) for to, send in batch.sends]
        marked = [send for to, send in batch.sends if headers.is_first(channel, SEND, to)]
        rows = [
            (headers.incoming(1)[0], recv)
            for source, recv in batch.receives
            if headers.is_first(channel, RECEIVE, source)
        ]

        def start() -> None:
            for send in marked:
                headers.mark(send)
            coalesced(nccl, receives + sends).wait()
            for _, recv in batch.receives:
                headers.overwritten(recv)
            for row, recv in rows:
                row.copy_(recv[:HEADER_BYTES])

        return self._start_on_nccl(
            batch,
            channel,
            batch.receives[0][0],
            start,
            sent=sum(send.nbytes - HEADER_BYTES for _, send in batch.sends),
            received=sum(recv.nbytes - HEADER_BYTES for _, recv in batch.receives),
            is_first=bool(marked or rows),
        )

    def _send_tagged(self, gloo: Untyped, batch: Batch) -> list[Started]:
        call = self._shared.calls.current
        assert call is not None, "a call has begun"
        seed, works = call.seed ^ self._scope, list[Started]()
        # Receives first: `wait` takes the works in this order, and compute needs received data.
        both = (gloo.recv, RECEIVE, batch.receives), (gloo.send, SEND, batch.sends)
        for start, what, messages in both:
            for rank, x in messages:
                tag = message_tag(seed, batch.channel, batch.step, x.nbytes)
                works.append((start([x], self.members[rank], tag), what, rank))
        return works

    def _collective(
        self, batch: Batch, route: Collective, send: Tensor, recv: Tensor
    ) -> Event | None:
        """Start one of NCCL's collectives; with a call's first, an all-gather of the headers."""
        if self.world_size == 1:
            recv.copy_(send)
            return None
        if not streams.are_used(send.device):
            return super()._collective(batch, route, send, recv)
        channel = self._nccl_channel(batch.channel, send.device)
        headers, nccl = self._shared.calls.headers, channel.communicator
        # Each rank sends a chunk to, and receives one from, each other rank.
        sent = received = (self.world_size - 1) * min(send.nbytes, recv.nbytes)
        operation: tuple[Untyped, ...]
        if route.op == "all_gather":
            operation = nccl._allgather_base, recv, send
        elif route.op == "reduce_scatter":
            operation = nccl._reduce_scatter_base, recv, send
        else:
            send_counts, recv_counts = list(route.send_counts), list(route.recv_counts)
            operation = nccl.alltoall_base, recv, send, recv_counts, send_counts
            sent = send.nbytes - send_counts[self.rank]
            received = recv.nbytes - recv_counts[self.rank]
        operations = [operation]
        is_first = headers.is_first(channel)
        if is_first:
            incoming = headers.incoming(self.world_size).view(-1)
            operations.append((nccl._allgather_base, incoming, headers.outgoing))
        any_other_rank = 1 if self.rank == 0 else 0
        return self._start_on_nccl(
            batch,
            channel,
            any_other_rank,
            lambda: coalesced(nccl, operations).wait(),
            sent=sent,
            received=received,
            is_first=is_first,
        )

    def _start_on_nccl(
        self,
        batch: Batch,
        channel: NcclChannel,
        peer: int,
        start: Callable[[], object],
        *,
        sent: int,
        received: int,
        is_first: bool,
    ) -> Event | None:
        """Start an exchange; the first with a rank waits for the memory of its headers, too."""
        headers, after = self._shared.calls.headers, batch.after
        if is_first and after is not None:
            after = [*after, *headers.ready]
        run = partial(channel.run, batch.step, peer, start, after, headers.call)
        return self.start_batch(batch, peer, run, sent=sent, received=received)

    def _nccl_channel(self, channel: Channel, device: torch.device) -> NcclChannel:
        if channel not in self._nccl_channels or self._shared.failure.error is not None:
            link = self._shared.link(device, self._timeout_s)
            assert isinstance(link, NcclLink), "CUDA tensors are sent by NCCL"
            self._nccl_channels[channel] = link.channel(
                self.members,
                channel,
                self._timeout_s,
                device,
                self._options.nccl_max_ctas,
            )
        return self._nccl_channels[channel]

    def start_batch(
        self,
        batch: Batch,
        peer: int,
        start: Callable[[], list[Started] | Event],
        *,
        sent: int,
        received: int,
    ) -> Event | None:
        channel, step = batch.channel, batch.step
        if channel in self.pending:
            raise RuntimeError(
                f"{self._shared.member.name} posts step {step} on channel "
                f"{channel!r}, where step {self.pending[channel][0]} has not been waited for"
            )
        try:
            started = start()
        except RuntimeError as error:
            raise self.error_of(step, RECEIVE, peer, 0.0, error) from error
        self.pending[channel] = step, started, batch.finish, batch.device
        self.stats.bytes_sent += sent
        self.stats.bytes_received += received
        self.stats.messages += batch.num_exchanges
        return None if isinstance(started, list) else started

    def _wait_for(self, work: dist.Work, peer: int, start: float) -> None:
        now = time.monotonic()
        left = datetime.timedelta(seconds=max(self._timeout_s - (now - start), 0.001))
        calls = self._shared.calls
        calls.waiting = Waiting(now, self.global_ranks[peer], timeout_s=left.total_seconds())
        if not work.wait(left):
            raise RuntimeError("timed out")
        calls.waiting = None

    def error_of(
        self, step: int, what: str, peer: int, elapsed: float, error: Exception
    ) -> RuntimeError:
        failure, peer_rank = self._shared.failure, self.global_ranks[peer]
        timed_out = elapsed > self._timeout_s - 2e-3  # gloo counts whole milliseconds
        crashed = (
            f"{rank_name(peer_rank)} crashed, hung or never made this call "
            f"({describe_error(error)}). {NO_CALL}"
        )
        reason = failure.error or failure.reason(peer_rank, timed_out=timed_out) or crashed
        failure.fail(str(reason), shared=True)
        call = self._shared.calls.current
        place = (
            f"in ring step {step} of {call}: {self._shared.member.name} could not {what} "
            f"{rank_name(peer_rank)} after {elapsed:.1f} s, timeout {self._timeout_s:g} s"
        )
        return RuntimeError(noticed(str(reason), place))


transports_of_groups: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[TransportOptions, P2PTransport]
] = weakref.WeakKeyDictionary()


def open_p2p(group: dist.ProcessGroup, options: TransportOptions) -> P2PTransport:
    """Return the transport of a group and options; all ranks connect together at its first call."""
    by_options = transports_of_groups.get(group, {})
    if options not in by_options:
        by_options = transports_of_groups.setdefault(group, by_options)
        by_options[options] = new_p2p(group, options)
    return by_options[options]


def check_calls(group: dist.ProcessGroup) -> None:
    """Compare the ranks' calls on a group so far; see `P2PTransport.check`."""
    for transport in list(transports_of_groups.get(group, {}).values())[:1]:
        transport.check()


def check_within(outer: dist.ProcessGroup) -> None:
    """Compare the calls since the last comparison, on the groups whose ranks are all in `outer`.

    Ranks of other groups may be elsewhere: a comparison would wait for them. See `check_pending`.
    """
    ranks = set(dist.get_process_group_ranks(outer))
    # By name: ranks may have used their groups first in different orders.
    for group in sorted(transports_of_groups, key=lambda group: group.group_name):
        if groups.is_alive(group) and ranks.issuperset(dist.get_process_group_ranks(group)):
            check_pending(group)


def check_pending(group: dist.ProcessGroup) -> None:
    """Compare a group's calls since the last comparison, where its device is not waited for.

    Elsewhere calls compare themselves. Does nothing in a capture, whose calls have not run.
    """
    if group not in transports_of_groups:
        return
    shared = rank_group(group)
    devices = shared.connection.devices.values()
    queued = [device for device in devices if streams.are_used(device)]
    captured = any(capture.captures(device) for device in queued)
    if queued and shared.calls.unchecked and not captured and groups.is_alive(group):
        check_calls(group)


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of a group's messages: this rank's GPU with NCCL, else the CPU.

    The GPU of the first call, else init_process_group's, else torch's current one.
    """
    if "nccl" in dist.get_backend_config(group):
        known = rank_group(group).connection.devices.get("cuda") or group.bound_device_id
        return known or torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def new_p2p(group: dist.ProcessGroup, options: TransportOptions) -> P2PTransport:
    """Return a transport with new statistics, over the group's shared connections."""
    timeout_s = options.timeout or group_timeout(group)
    return P2PTransport(rank_group(group), timeout_s, options)


@contextmanager
def reporting(group: object) -> Iterator[None]:
    """Report to the other ranks an error by which this rank refuses a call.

    The other ranks may be in that call, so it is counted: this rank's next call must not be
    mistaken for it. Does nothing without a group, which is unchecked, or if the call was counted
    before.
    """
    try:
        yield
    except BaseException as error:
        process_group = None
        with suppress(Exception):
            process_group = groups.check_group(cast(groups.Group, group))
        if process_group is not None:
            rank_group(process_group).refuse_call(error)
        raise


def _uneven_rows(rows: str) -> ValueError:
    """Make the error of ranks with different numbers of rows, which no layout's name describes."""
    return ValueError(
        f"without a SequenceLayout all ranks must have equally many rows, got {rows}: pass "
        "layout=SequenceLayout.boundaries(...), or another SequenceLayout, to every rank"
    )
