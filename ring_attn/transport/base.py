"""The transport protocol: exchanges that are posted before what hides them, and waited for after.

One step of a ring is one symmetric exchange. The other strategies use the collectives of
torch.distributed. All tensors are flat; at most one exchange is under way on a channel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ring_attn.core.program import Channel, Hop
from ring_attn.transport.buffers import Pool
from ring_attn.transport.streams import Event, Stream

After = Sequence[Event] | None


@dataclass
class TransportStats:
    """Counts of a transport, shared with its `sub`s, since it was made or `reset`.

    Attributes:
        bytes_sent: bytes that have left this rank: of a collective what it has for the others.
        messages: number of exchanges, a collective being one.
        wait_s: seconds of host time in `wait`, with everything that was not hidden by compute (on
            CUDA a wait is a wait of streams, and takes no host time).
        bytes_received: bytes that have come to this rank, counted when they are asked for.
    """

    bytes_sent: int = 0
    messages: int = 0
    wait_s: float = field(default=0.0)
    bytes_received: int = 0

    def reset(self) -> None:
        """Counts from zero again."""
        self.bytes_sent, self.messages, self.wait_s, self.bytes_received = 0, 0, 0.0, 0


class Agreement:
    """Everything that must be equal on all ranks of a call, by the names of the arguments."""

    def __init__(self, values: Mapping[str, object]) -> None:
        """Takes the values as they are."""
        self.values = dict(values)

    @cached_property
    def texts(self) -> dict[str, str]:
        """The values as text, to send to other ranks."""
        return {name: repr(value) for name, value in self.values.items()}

    @cached_property
    def digest(self) -> bytes:
        """A hash of all values, 16 bytes."""
        text = repr(sorted(self.texts.items())).encode()
        return hashlib.blake2b(text, digest_size=16).digest()


class PointToPoint(Protocol):
    """The exchanges of a ring.

    No tensor of an exchange may be touched between its posting and the end of `wait`. On a device
    with streams an exchange begins after the moments `after`, by default after everything that the
    current stream has been given; the moment when it has ended is returned.
    """

    rank: int
    world_size: int
    stats: TransportStats

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
        """Starts one exchange of uint8 buffers with one or two other ranks."""
        ...

    def wait(self, channel: Channel) -> None:
        """Waits until the exchange posted on this channel is complete on this rank.

        Both sides of a ring's exchange are complete then: its buffers may be written to.
        """
        ...


class Transport(PointToPoint, Protocol):
    """A transport for all strategies: collectives too, and transports among some of the ranks."""

    def call(
        self,
        kind: str,
        agreement: Agreement,
        device: torch.device,
        *,
        values: Sequence[Tensor] = (),
        number: int | None = None,
    ) -> AbstractContextManager[int]:
        """Begins a call that all ranks make, whose messages reach no other call; gives its number.

        Args:
            kind: "forward", "backward", "decode", ...
            agreement: everything else that must be equal on all ranks.
            device: of the messages.
            values: tensors whose values must be equal on all ranks.
            number: of the forward that a backward belongs to; a new one by default.
        """
        ...

    def all_gather(
        self, channel: Channel, step: int, send: Tensor, recv: Tensor, *, after: After = None
    ) -> Event | None:
        """Starts to bring every rank's (n,) uint8 `send`, in their order, to (world_size * n,)."""
        ...

    def reduce_scatter(
        self, channel: Channel, step: int, send: Tensor, recv: Tensor, *, after: After = None
    ) -> Event | None:
        """Starts to sum all ranks' (world_size * n,) `send`; rank r receives the r-th n of them."""
        ...

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
        """Starts to bring every rank's part for this rank.

        `send` and `recv` are uint8, cut by the counts (bytes) in the order of the ranks.
        """
        ...

    def pool(self, device: torch.device) -> Pool:
        """Message buffers for operators on the current stream."""
        ...

    def join(self, channel: Channel, device: torch.device) -> None:
        """Takes part in an exchange in which this rank neither sends nor receives."""
        ...

    def follow(self, channel: Channel, stream: Stream) -> bool:
        """Makes a stream wait for the exchange under way; False where only the host can wait."""
        ...

    def before_first(self, kind: Hashable, prepare: Callable[[], None]) -> None:
        """Before the first call of a kind all ranks `prepare`, and wait until the last has."""
        ...

    def sub(self, ranks: tuple[int, ...]) -> Transport:
        """The transport among some of these ranks, ascending; this rank is one of them."""
        ...


def gather_texts(transport: Transport, text: str, device: torch.device) -> list[str]:
    """The texts of all ranks, in their order: two exchanges, for which the host waits."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([mine.numel()], device=device)
    lengths = length.new_empty(transport.world_size)
    transport.all_gather("shards", 0, length.view(torch.uint8), lengths.view(torch.uint8))
    transport.wait("shards")
    counts: list[int] = lengths.tolist()
    send = mine.new_zeros(max(counts))
    send[: mine.numel()] = mine
    everyone = mine.new_empty(transport.world_size, max(counts))
    transport.all_gather("shards", 1, send, everyone.view(-1))
    transport.wait("shards")
    rows = zip(everyone.cpu(), counts, strict=True)
    return [bytes(row[:count].tolist()).decode() for row, count in rows]


def check_ranks(ranks: tuple[int, ...], rank: int, world_size: int) -> None:
    """Refuses ranks among which no transport can be made.

    torch.distributed numbers a group's ranks upwards, whatever order they are given in.

    Raises:
        ValueError: `rank` is not among them, or they do not ascend within the world size.
    """
    if rank not in ranks:
        raise ValueError(f"rank {rank} must be among the ranks of its transport, got {ranks}")
    if list(ranks) != sorted({r for r in ranks if 0 <= r < world_size}):
        raise ValueError(f"ranks must ascend, each in [0, {world_size}), got {ranks}")
