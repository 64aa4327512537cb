"""Links that carry the messages of a group: gloo for CPU tensors, NCCL for CUDA tensors.

gloo    one connection between each two ranks, for all channels and subgroups: a receive gets
        only a message with its own tag
NCCL    a communicator for each channel of each subgroup: messages have no tags, and those on one
        communicator go one after another
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Literal

import torch

from ring_attn.core.program import Channel
from ring_attn.torch_private import (
    PrefixStore,
    Store,
    Untyped,
    connects_when_made,
    nccl_options,
    num_high_priority_groups,
)
from ring_attn.transport import capture, streams
from ring_attn.transport.base import Ranks
from ring_attn.transport.ranks.headers import Compared
from ring_attn.transport.ranks.rendezvous import (
    CannotSucceed,
    PollingStore,
    Rendezvous,
    bounded,
    connect_gloo,
    hashed,
    meet,
    not_connected,
)
from ring_attn.transport.streams import Event

logger = logging.getLogger("ring_attn")

# Seconds between our report of an overdue exchange and torch's watchdog, which ends the process.
GRACE_S = 10.0

# Seconds that aborts may take. Their kernels stop at once, and only then memory is freed.
ABORT_S = 10.0


class GlooLink:
    """Tagged messages between all ranks of a group; a peer is its rank in that group."""

    def __init__(
        self,
        store: Store,
        meeting: str,
        rank: int,
        global_ranks: Ranks,
        seconds: float,
        cannot_succeed: CannotSucceed,
    ) -> None:
        self._peers = [peer for peer in range(len(global_ranks)) if peer != rank]
        self._polling = PollingStore(store)
        self.gloo: Untyped = connect_gloo(
            store,
            meeting,
            global_ranks[rank],
            global_ranks,
            seconds,
            cannot_succeed,
            self._polling,
        )

    def close(self) -> None:
        """End all connections at once, from any thread; pending waits raise.

        gloo cannot close its connections while a thread waits, but a wait that times out closes
        all connections of its rank. So `close` waits for a message that nobody sends.
        """
        at_once = datetime.timedelta(milliseconds=1)
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                self.gloo.recv([torch.empty(1)], peer, CLOSING_TAG).wait(at_once)

    def finish(self, seconds: float) -> None:
        """Leave the connections to the last reference's end, as no exchange is under way."""

    def overdue(self, seconds: float | None = None) -> None:
        """Return None: the host waits for each exchange with a time limit."""


# A message has this tag only by accident, with a chance of one in 2^31.
CLOSING_TAG = 0x7FFFFFFF


@dataclass(slots=True, eq=False)
class Posted:
    """An exchange that has not ended."""

    step: int
    channel: Channel
    peer: int  # the sender's rank in the group
    since: float  # time of the post, of `time.monotonic`
    end: Event
    call: Compared


class NcclChannel:
    """A channel among some ranks: a communicator of NCCL and a stream.

    Its exchanges run one after another. The host waits for no exchange, and a thread that queried a
    CUDA event would break a graph capture in another thread. So exchanges end for the host with
    their call, whose result the device writes into pinned memory. Only where an exchange has passed
    its time limit in a call that has not ended, its event is queried.
    """

    def __init__(
        self,
        members: Ranks,
        name: Channel,
        seconds: float,
        communicator: Untyped,
        device: torch.device,
    ) -> None:
        self.communicator = communicator
        self._members, self._name, self._seconds = members, name, seconds
        self._device, self.stream = device, streams.new(device)
        self.posted: deque[Posted] = deque()

    def run(
        self,
        step: int,
        peer: int,
        start: Callable[[], object],
        after: Iterable[Event] | None,
        call: Compared,
    ) -> Event:
        """Start an exchange of a call after some events; return the event of its end.

        `peer` is an index in `members`; `after` None means all work queued on the current stream.
        """
        moments = [streams.record(self._device)] if after is None else after
        with streams.use(self.stream):
            for moment in moments:
                moment.wait(self.stream)
            start()
            end = streams.record_on(self.stream)
        if not capture.is_on():  # nobody watches replays
            sender, now = self._members[peer], time.monotonic()
            self.posted.append(Posted(step, self._name, sender, now, end, call))
        return end

    def overdue(self, limit: float | None = None) -> Posted | None:
        """Return the oldest exchange under way if it has passed a limit in seconds, else None.

        The default limit is the timeout. With another limit, the exchange may have ended in a call
        that has not.
        """
        posted = self.posted
        while posted and posted[0].call.differs() is not None:
            posted.popleft()
        while posted:
            first = posted[0]
            if time.monotonic() - first.since <= (self._seconds if limit is None else limit):
                return None
            if limit is not None or not first.end.query():
                return first
            posted.popleft()
        return None


EndMethod = Literal["abort", "shutdown"]


class CommunicatorEnd(threading.Thread):
    """A thread that ends one communicator, once `ending` contains how.

    An abort stops the kernels of its communicator, and waits for those that are launched. They may
    be queued after kernels of another communicator, which stop only once that one is aborted too:
    so all aborts of a rank begin at once. A group of NCCL's around them, as in torch's own abort of
    all groups, would be empty: groups belong to a thread, and torch aborts in another. The thread
    waits from the beginning, because Python from 3.12 on starts none at exit.
    """

    def __init__(self, communicator: Untyped, of: str) -> None:
        super().__init__(name="ring_attn_ending", daemon=True)
        self.ending: SimpleQueue[EndMethod] = SimpleQueue()
        self._communicator, self._of = communicator, of
        self.start()

    def run(self) -> None:
        ending = self.ending.get()
        try:
            getattr(self._communicator, ending)()
        except Exception as error:
            logger.error("%s of NCCL's communicator %s failed: %s", ending, self._of, error)


def _warn_of_shared_streams() -> None:
    """Warn if communicators of this process share a stream of torch, and so wait for each other.

    Each communicator takes the next of torch's high-priority streams, which go round, and so does
    each process group that asks for high priority. torch accepts no other stream for a
    communicator, and does not say which one it has. By default process groups have streams of the
    lowest priority, and those of FSDP have one between: they are of other pools.
    """
    num_ours, num_groups = streams.num_held(), num_high_priority_groups()
    if num_ours + num_groups > streams.POOL:
        logger.warning(
            "%d streams of ring_attn and %d process groups of high priority of this rank share the "
            "%d high-priority streams that torch has on a device: exchanges on one stream wait for "
            "each other. Destroy process groups that are not used any more",
            num_ours,
            num_groups,
            streams.POOL,
        )


class NcclLink:
    """NCCL's communicators, each made by its members together at its first use."""

    def __init__(
        self, nccl: Untyped, store: Store, meeting: str, rank: int, global_ranks: Ranks
    ) -> None:
        """Prepare the link; `nccl` is torch's class of communicators."""
        self._nccl, self._store, self._meeting, self._rank = nccl, store, meeting, rank
        self._global_ranks = global_ranks
        self.channels: dict[tuple[Ranks, Channel, int], NcclChannel] = {}
        self._ends: list[CommunicatorEnd] = []

    def channel(
        self,
        members: Ranks,
        name: Channel,
        seconds: float,
        device: torch.device,
        max_ctas: int,
    ) -> NcclChannel:
        """Return a channel among `members`, numbered in that order; made at its first use.

        Calls with another `max_ctas` have another communicator.
        """
        key = members, name, max_ctas
        if key not in self.channels:
            communicator = self._connect(members, name, seconds, device, max_ctas)
            self.channels[key] = NcclChannel(members, name, seconds, communicator, device)
        return self.channels[key]

    def _connect(
        self,
        members: Ranks,
        channel: Channel,
        seconds: float,
        device: torch.device,
        max_ctas: int,
    ) -> Untyped:
        """Make a communicator, together with all its members."""
        name = f"{self._meeting}/{hashed(members)}/{channel}/{max_ctas}"
        everyone = [self._global_ranks[member] for member in members]
        global_rank = self._global_ranks[self._rank]
        meet(Rendezvous(self._store, name, global_rank, everyone), seconds)
        options = nccl_options(self._nccl, name, seconds + GRACE_S, max_ctas, everyone)
        store, rank = PrefixStore(name, self._store), members.index(self._rank)
        make = partial(self._nccl, store, rank, len(members), options)
        try:
            return self._connected(make, name, seconds, device)
        except (RuntimeError, TimeoutError) as error:
            recheck = Rendezvous(self._store, f"{name}/left", global_rank, everyone)
            raise not_connected(recheck, error) from error

    def _connected(
        self, make: Callable[..., Untyped], name: str, seconds: float, device: torch.device
    ) -> Untyped:
        """Make a communicator and connect it within some seconds; NCCL itself has no limit.

        A new one is not split off another one, whose ranks would all have to take part.
        """
        if connects_when_made(self._nccl):
            communicator = bounded(partial(make, device), seconds)
            self._ends.append(CommunicatorEnd(communicator, name))
        else:
            communicator = make()
            self._ends.append(CommunicatorEnd(communicator, name))
            bounded(partial(communicator.eager_connect_single_device, device), seconds)
        _warn_of_shared_streams()
        return communicator

    def overdue(self, seconds: float | None = None) -> Posted | None:
        """Return an exchange that has been running longer than `seconds`, by default its timeout.

        None if there is no such exchange.
        """
        for channel in list(self.channels.values()):
            overdue = channel.overdue(seconds)
            if overdue is not None:
                return overdue
        return None

    def close(self) -> None:
        """End all connections at once, from any thread."""
        self._end("abort", ABORT_S)

    def finish(self, seconds: float) -> None:
        """End all connections after their last exchange, together with the node's other ranks."""
        self._end("shutdown", seconds)

    def _end(self, ending: EndMethod, seconds: float) -> None:
        for end in self._ends:
            end.ending.put(ending)
        deadline = time.monotonic() + seconds
        for end in self._ends:
            end.join(max(0.0, deadline - time.monotonic()))
        num_alive = sum(end.is_alive() for end in self._ends)
        if num_alive:
            logger.error(
                "%d of %d communicators have not ended by %s within %g s",
                num_alive,
                len(self._ends),
                ending,
                seconds,
            )


Link = GlooLink | NcclLink
