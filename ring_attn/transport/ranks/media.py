"""Media that carry the messages of a group: gloo for CPU tensors, NCCL for CUDA tensors.

gloo    one connection between each two ranks, for all channels and parts of the group: a
        message has a tag, and is received only by who asks for that tag
NCCL    a communicator for each channel of each part of the group: messages have no tags, and
        what is on one communicator would wait for what is before it
"""

from __future__ import annotations

import contextlib
import datetime
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.core.program import Channel
from ring_attn.core.spec import MAX_CTAS, TransportOptions
from ring_attn.torch_private import PrefixStore, Store, nccl_options
from ring_attn.transport import streams
from ring_attn.transport.ranks.formation import connect_gloo, meet
from ring_attn.transport.ranks.progress import Progress
from ring_attn.transport.streams import Event, Stream

Ranks = tuple[int, ...]

# Seconds from what the watch says of a late exchange to torch's watchdog, which ends the process.
GRACE_S = 10.0


class Medium(Protocol):
    """Connections between the ranks of a group, which are named by their rank in that group."""

    @property
    def honours_tags(self) -> bool:
        """Whether a message is received only where its tag is asked for."""
        ...

    def late(self) -> Late | None:
        """An exchange that has taken longer than its ranks may, where no wait would tell."""
        ...

    def close(self) -> None:
        """Ends all connections at once, from any thread; what waits for a message raises."""
        ...


class Gloo:
    """Tagged messages between all ranks of a group."""

    honours_tags = True

    def __init__(
        self, store: Store, meeting: str, rank: int, world_size: int, seconds: float
    ) -> None:
        """Connects the ranks, which have all been at the roll-call."""
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._gloo: Any = connect_gloo(store, meeting, rank, world_size, seconds)

    def receive(self, part: Tensor, peer: int, tag: int) -> dist.Work:
        """Starts to receive a message."""
        work: dist.Work = self._gloo.recv([part], peer, tag)
        return work

    def send(self, part: Tensor, peer: int, tag: int) -> dist.Work:
        """Starts to send a message."""
        work: dist.Work = self._gloo.send([part], peer, tag)
        return work

    def late(self) -> None:
        """None: the host waits for each exchange."""

    def close(self) -> None:
        """See `Medium`.

        gloo cannot close its connections while a thread waits. But a wait that times out closes
        all connections of the rank: so this waits for a message that nobody sends.
        """
        at_once = datetime.timedelta(milliseconds=1)
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                self._gloo.recv([torch.empty(1)], peer, CLOSING_TAG).wait(at_once)


# A tag that a message has by accident only: one in 2^31.
CLOSING_TAG = 0x7FFFFFFF


class Late(NamedTuple):
    """An exchange that has not ended in time.

    Attributes:
        step: of the ring, or which collective of the call.
        channel: of the exchange.
        peer: rank of the group that is received from.
        seconds: since it was posted.
        begun: whether this rank's device has come to it.
    """

    step: int
    channel: Channel
    peer: int
    seconds: float
    begun: bool


@dataclass(frozen=True, eq=False)
class Lane:
    """A channel among some ranks, on a device with streams.

    Attributes:
        members: ranks of the group.
        channel: of its exchanges.
        seconds: that an exchange may take.
        communicator: among the members.
        stream: from which its exchanges are posted, one after another.
        device: of the messages.
        progress: of its exchanges.
    """

    members: Ranks
    channel: Channel
    seconds: float
    communicator: Any
    stream: Stream
    device: torch.device
    progress: Progress

    def run(
        self, step: int, peer: int, start: Callable[[], dist.Work], after: Sequence[Event] | None
    ) -> Event:
        """Starts an exchange behind some moments, and returns the moment of its end.

        Args:
            step: of the ring, or which collective of the call.
            peer: number of a rank of the members, for the watch.
            start: posts the exchange.
            after: None is all that the current stream has been given.
        """
        moments = [streams.record(self.device)] if after is None else after
        with streams.use(self.stream):
            for moment in moments:
                streams.wait(moment)
            self.progress.begin(step, peer)
            # With a timeout NCCL's wait would block the host.
            start().wait()
            end = streams.record(self.device)
            self.progress.end()
        return end

    def late(self) -> Late | None:
        """The exchange that is under way, where that takes too long."""
        found = self.progress.first_under_way()
        if found is None:
            return None
        posted, begun = found
        seconds = time.monotonic() - posted.since
        peer = self.members[posted.peer]
        return (
            Late(posted.step, self.channel, peer, seconds, begun)
            if seconds > self.seconds
            else None
        )


class Nccl:
    """Communicators, each made by its members together when they first use it."""

    honours_tags = False

    def __init__(self, store: Store, meeting: str, rank: int) -> None:
        """Makes no communicators yet."""
        self._store, self._meeting, self._rank = store, meeting, rank
        self._lanes: dict[tuple[Ranks, Channel, int | None], Lane] = {}
        weakref.finalize(self, _shut_down, self._lanes)

    def lane(
        self,
        members: Ranks,
        channel: Channel,
        options: TransportOptions,
        seconds: float,
        device: torch.device,
    ) -> Lane:
        """The communicator of some ranks, numbered in that order, and its stream.

        Raises:
            MissingRanksError: naming the ranks that did not come in time.
        """
        key = members, channel, options.nccl_max_ctas
        if key not in self._lanes:
            name = f"{self._meeting}/{members}/{channel}/{options.nccl_max_ctas}"
            meeting = meet(self._store, name, self._rank, members, seconds)
            ctas = options.nccl_max_ctas or MAX_CTAS
            nccl = nccl_options(meeting, seconds + GRACE_S, ctas)
            store, rank = PrefixStore(meeting, self._store), members.index(self._rank)
            communicator: Any = dist.ProcessGroupNCCL(store, rank, len(members), nccl)
            # Not split off another communicator, which would need that one's other ranks.
            communicator.eager_connect_single_device(device)
            stream = streams.new(device)
            # Written, read and given back on that stream alone.
            with streams.use(stream):
                progress = Progress(device)
            self._lanes[key] = Lane(
                members, channel, seconds, communicator, stream, device, progress
            )
        return self._lanes[key]

    def late(self) -> Late | None:
        """See `Medium`."""
        found = (lane.late() for lane in list(self._lanes.values()))
        return next((late for late in found if late is not None), None)

    def close(self) -> None:
        """See `Medium`."""
        for lane in self._lanes.values():
            lane.communicator.abort()


def _shut_down(lanes: dict[Any, Lane]) -> None:
    for lane in lanes.values():
        lane.communicator.shutdown()
