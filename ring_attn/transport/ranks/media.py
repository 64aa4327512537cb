"""Media that carry the messages of a group: gloo for CPU tensors, NCCL for CUDA tensors.

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
from typing import Any, Literal

import torch

from ring_attn.core.program import Channel
from ring_attn.torch_private import PrefixStore, Store, nccl_class, nccl_options
from ring_attn.transport import capture, streams
from ring_attn.transport.base import Ranks
from ring_attn.transport.options import MAX_CTAS
from ring_attn.transport.ranks.formation import (
    InVain,
    RollCall,
    bounded,
    connect_gloo,
    hashed,
    meet,
    unconnected,
)
from ring_attn.transport.ranks.headers import Compared
from ring_attn.transport.streams import Event

logger = logging.getLogger("ring_attn")

# Seconds between our report of a late exchange and torch's watchdog, which ends the process.
GRACE_S = 10.0

# Seconds that aborts may take. Their kernels stop at once, and only then memory is freed.
ABORT_S = 10.0


class Gloo:
    """Tagged messages between all ranks of a group; a peer is its rank in that group."""

    def __init__(
        self,
        store: Store,
        meeting: str,
        rank: int,
        global_ranks: Ranks,
        seconds: float,
        in_vain: InVain,
    ) -> None:
        self._peers = [peer for peer in range(len(global_ranks)) if peer != rank]
        me = global_ranks[rank]
        self.gloo: Any = connect_gloo(store, meeting, me, global_ranks, seconds, in_vain)

    def close(self) -> None:
        """Ends all connections at once, from any thread; pending waits raise.

        gloo cannot close its connections while a thread waits, but a wait that times out closes
        all connections of its rank. So `close` waits for a message that nobody sends.
        """
        at_once = datetime.timedelta(milliseconds=1)
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                self.gloo.recv([torch.empty(1)], peer, CLOSING_TAG).wait(at_once)

    def finish(self, seconds: float) -> None:
        """Leaves the connections to the last reference's end, as no exchange is under way."""

    def late(self, seconds: float | None = None) -> None:
        """No exchange is late here: the host waits for each with a time limit."""


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


class Lane:
    """A channel among some ranks, on a device with streams: exchanges run one after another.

    The host waits for no exchange, and a thread that queried a CUDA event would break a graph
    capture in another thread. So exchanges end for the host with their call, whose result the
    device writes into pinned memory. Only where an exchange has passed its time limit in a call
    that has not ended, its event is queried.
    """

    def __init__(
        self,
        members: Ranks,
        channel: Channel,
        seconds: float,
        communicator: Any,
        device: torch.device,
    ) -> None:
        self.communicator = communicator
        self._members, self._channel, self._seconds = members, channel, seconds
        self._device, self._stream = device, streams.new(device)
        self._posted: deque[Posted] = deque()

    def run(
        self,
        step: int,
        peer: int,
        start: Callable[[], object],
        after: Iterable[Event] | None,
        call: Compared,
    ) -> Event:
        """Starts an exchange of a call after some events; returns the event of its end.

        `peer` is an index in `members`; `after` None means all work queued on the current stream.
        """
        moments = [streams.record(self._device)] if after is None else after
        with streams.use(self._stream):
            for moment in moments:
                moment.wait(self._stream)
            start()
            end = streams.record_on(self._stream)
        if not capture.is_on():  # nobody watches replays
            sender, now = self._members[peer], time.monotonic()
            self._posted.append(Posted(step, self._channel, sender, now, end, call))
        return end

    def late(self, limit: float | None = None) -> Posted | None:
        """The oldest exchange under way, if it has passed a limit in seconds; see `Nccl.late`.

        With a limit of the caller, the exchange may have ended in a call that has not.
        """
        posted = self._posted
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


How = Literal["abort", "shutdown"]


class Ending(threading.Thread):
    """A thread that ends one communicator, once it is told how.

    An abort tells the kernels of its communicator to stop, and waits for those that are launched.
    They may be queued after kernels of another communicator, which stop only once that one is
    aborted too: so all aborts of a rank begin at once. A group of NCCL's around them, as in torch's
    own abort of all groups, would be empty: groups belong to a thread, and torch aborts in another.
    The thread waits from the beginning, because Python from 3.12 on starts none at exit.
    """

    def __init__(self, communicator: Any, of: str) -> None:
        super().__init__(name="ring_attn_ending", daemon=True)
        self.told: SimpleQueue[How] = SimpleQueue()
        self._communicator, self._of = communicator, of
        self.start()

    def run(self) -> None:
        how = self.told.get()
        try:
            getattr(self._communicator, how)()
        except Exception as error:
            logger.error("%s of NCCL's communicator %s failed: %s", how, self._of, error)


class Nccl:
    """NCCL's communicators, each made by its members together at its first use."""

    def __init__(self, store: Store, meeting: str, rank: int, global_ranks: Ranks) -> None:
        self._store, self._meeting, self._rank = store, meeting, rank
        self._global_ranks = global_ranks
        self._lanes: dict[tuple[Ranks, Channel], Lane] = {}
        self._endings: list[Ending] = []

    def lane(
        self,
        members: Ranks,
        channel: Channel,
        seconds: float,
        device: torch.device,
    ) -> Lane:
        """The lane of a channel among `members`, numbered in that order; made at its first use."""
        key = members, channel
        if key not in self._lanes:
            name = f"{self._meeting}/{hashed(members)}/{channel}"
            everyone = [self._global_ranks[member] for member in members]
            me = self._global_ranks[self._rank]
            meet(RollCall(self._store, name, me, everyone), seconds)
            nccl = nccl_options(name, seconds + GRACE_S, MAX_CTAS, everyone)
            store, rank = PrefixStore(name, self._store), members.index(self._rank)
            communicator: Any = nccl_class()(store, rank, len(members), nccl)
            self._endings.append(Ending(communicator, name))
            # Splitting another communicator would need all of its ranks.
            connect = partial(communicator.eager_connect_single_device, device)
            try:
                # NCCL itself waits for ranks without limit.
                bounded(connect, seconds)
            except (RuntimeError, TimeoutError) as error:
                asked_again = RollCall(self._store, f"{name}/left", me, everyone)
                raise unconnected(asked_again, error) from error
            self._lanes[key] = Lane(members, channel, seconds, communicator, device)
        return self._lanes[key]

    def late(self, seconds: float | None = None) -> Posted | None:
        """An exchange under way for longer than that, by default than its time limit; else None."""
        late_ones = (lane.late(seconds) for lane in list(self._lanes.values()))
        return next((late for late in late_ones if late is not None), None)

    def close(self) -> None:
        """Ends all connections at once, from any thread."""
        self._end("abort", ABORT_S)

    def finish(self, seconds: float) -> None:
        """Ends all connections after their last exchange, together with the node's other ranks."""
        self._end("shutdown", seconds)

    def _end(self, how: How, seconds: float) -> None:
        for ending in self._endings:
            ending.told.put(how)
        deadline = time.monotonic() + seconds
        for ending in self._endings:
            ending.join(max(0.0, deadline - time.monotonic()))
        late = sum(ending.is_alive() for ending in self._endings)
        if late:
            told = late, len(self._endings), how, seconds
            logger.error("%d of %d communicators have not ended by %s within %g s", *told)


Medium = Gloo | Nccl
