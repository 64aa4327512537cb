"""The transport protocol: post an exchange, compute, then wait; compute hides the exchange.

One step of a ring is one symmetric exchange. The other strategies use the collectives of
torch.distributed. All tensors are flat; a channel has at most one exchange under way.
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
    """Counts of a transport and its `sub`s, since the transport was made or `reset` was called.

    Attributes:
        bytes_sent: bytes that left this rank; in a collective, the bytes meant for other ranks.
        messages: number of exchanges; a collective counts as one.
        wait_s: seconds of host time in `wait`, which compute did not hide; 0 on CUDA, where streams
            wait.
        bytes_received: bytes that came to this rank; p2p counts them when posted.
    """

    bytes_sent: int = 0
    messages: int = 0
    wait_s: float = field(default=0.0)
    bytes_received: int = 0

    def reset(self) -> None:
        """Sets all counts to zero."""
        self.bytes_sent, self.messages, self.wait_s, self.bytes_received = 0, 0, 0.0, 0


class Agreement:
    """Values that must be equal on all ranks of a call, by argument name."""

    def __init__(self, values: Mapping[str, object]) -> None:
        """Copies the mapping, not its values."""
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

    No tensor of an exchange may be touched between its post and the end of `wait`. On a device with
    streams, an exchange begins after the events `after`, by default after all work queued on the
    current stream; the post returns the event of the exchange's end.
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

        Then this rank has both sent and received: both buffers may be written to.
        """
        ...


class Transport(PointToPoint, Protocol):
    """A transport for all strategies: adds collectives, and transports among some of the ranks."""

    def call(
        self,
        kind: str,
        agreement: Agreement,
        device: torch.device,
        *,
        values: Sequence[Tensor] = (),
        number: int | None = None,
    ) -> AbstractContextManager[int]:
        """Begins a call that all ranks make; yields its number. No other call gets its messages.

        Args:
            kind: "forward", "backward", "decode", ...
            agreement: everything else that must be equal on all ranks.
            device: device of the messages.
            values: tensors whose values must be equal on all ranks.
            number: for a backward, the number of its forward; by default a new number.
        """
        ...

    def all_gather(
        self, channel: Channel, step: int, send: Tensor, recv: Tensor, *, after: After = None
    ) -> Event | None:
        """Starts to gather all ranks' `send`, (n,) uint8, in rank order: (world_size * n,)."""
        ...

    def reduce_scatter(
        self, channel: Channel, step: int, send: Tensor, recv: Tensor, *, after: After = None
    ) -> Event | None:
        """Starts to sum all ranks' `send`, (world_size * n,); rank r receives the r-th chunk."""
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
        """Starts to send each rank its part of `send`, and to receive each rank's part for this.

        `send` and `recv` are uint8; the counts, in bytes, split them in rank order.
        """
        ...

    def pool(self, device: torch.device) -> Pool:
        """Message buffers for operators on the current stream."""
        ...

    def join(self, channel: Channel, device: torch.device) -> None:
        """Connects for an exchange in which this rank neither sends nor receives."""
        ...

    def follow(self, channel: Channel, stream: Stream) -> bool:
        """Makes a stream wait for the current exchange; returns False if only the host can wait."""
        ...

    def before_first(self, kind: Hashable, prepare: Callable[[], None]) -> None:
        """Runs `prepare` on all ranks before the first call of a kind; waits for the last rank."""
        ...

    def sub(self, ranks: tuple[int, ...]) -> Transport:
        """The transport among some of these ranks, in ascending order, with this rank."""
        ...


def gather_texts(transport: Transport, text: str, device: torch.device) -> list[str]:
    """All ranks' texts, in rank order; takes two exchanges, for which the host waits."""
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
    """Refuses ranks that cannot form a transport.

    torch.distributed numbers a group's ranks in ascending order, in whatever order they are listed.

    Raises:
        ValueError: `rank` is not among them, or they do not ascend within the world size.
    """
    if rank not in ranks:
        raise ValueError(f"rank {rank} must be among the ranks of its transport, got {ranks}")
    if list(ranks) != sorted({r for r in ranks if 0 <= r < world_size}):
        raise ValueError(f"ranks must ascend, each in [0, {world_size}), got {ranks}")
