"""Media that carry the messages of a group: gloo for CPU tensors, NCCL for CUDA tensors.

gloo    one connection between each two ranks, for all channels and parts of the group: a
        message has a tag, and is received only by who asks for that tag
NCCL    a communicator for each channel of each part of the group: messages have no tags, and
        what is on one communicator would wait for what is before it
"""

from __future__ import annotations

import contextlib
import datetime
import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.core.program import Channel
from ring_attn.core.spec import TransportOptions
from ring_attn.torch_private import PrefixStore, Store, nccl_options
from ring_attn.transport.ranks.formation import connect_gloo, meet

Ranks = tuple[int, ...]


class Medium(Protocol):
    """Connections between the ranks of a group, which are named by their rank in that group."""

    @property
    def honours_tags(self) -> bool:
        """Whether a message is received only where its tag is asked for."""
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


class Nccl:
    """Communicators, each made by its members together when they first use it."""

    honours_tags = False

    def __init__(self, store: Store, meeting: str, rank: int) -> None:
        """Makes no communicators yet."""
        self._store, self._meeting, self._rank = store, meeting, rank
        self._communicators: dict[tuple[Ranks, Channel, int | None], Any] = {}
        weakref.finalize(self, _shut_down, self._communicators)

    def communicator(
        self,
        members: Ranks,
        channel: Channel,
        options: TransportOptions,
        seconds: float,
        device: torch.device,
    ) -> Any:
        """The communicator of some ranks, numbered in that order.

        Raises:
            MissingRanksError: naming the ranks that did not come in time.
        """
        key = members, channel, options.nccl_max_ctas
        if key not in self._communicators:
            name = f"{self._meeting}/{members}/{channel}/{options.nccl_max_ctas}"
            meeting = meet(self._store, name, self._rank, members, seconds)
            nccl = nccl_options(meeting, seconds, options.nccl_max_ctas)
            store, rank = PrefixStore(meeting, self._store), members.index(self._rank)
            communicator: Any = dist.ProcessGroupNCCL(store, rank, len(members), nccl)
            # Not split off another communicator, which would need that one's other ranks.
            communicator.eager_connect_single_device(device)
            self._communicators[key] = communicator
        return self._communicators[key]

    def close(self) -> None:
        """See `Medium`."""
        for communicator in self._communicators.values():
            communicator.abort()


def _shut_down(communicators: dict[Any, Any]) -> None:
    for communicator in communicators.values():
        communicator.shutdown()
