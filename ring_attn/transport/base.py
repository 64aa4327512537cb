"""The transport: post an exchange, compute, then wait; compute hides the exchange.

One step of a ring is one symmetric exchange. The other strategies use the collectives of
torch.distributed. All tensors are flat; a channel has at most one exchange under way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ring_attn.core.program import Channel, Hop
from ring_attn.transport.buffers import Pool
from ring_attn.transport.streams import Event, Stream

After = Sequence[Event] | None
Ranks = tuple[int, ...]
Parts = list[tuple[int, Tensor]]  # messages to or from other ranks


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


class Transport:
    """One rank's exchanges with the other ranks of a group.

    No tensor of an exchange may be touched between its post and the end of `wait`. On a device with
    streams, an exchange begins after the events `after`, by default after all work queued on the
    current stream; the post returns the event of the exchange's end.

    By default ranks are in one process: they make the same calls, and the host moves messages.
    """

    def __init__(self, members: Ranks, member: int, stats: TransportStats | None = None) -> None:
        """Makes the transport of `member`, one of the `members`."""
        self.rank, self.world_size = members.index(member), len(members)
        self.stats = stats or TransportStats()
        self._members = members
        self._subs: dict[Ranks, Transport] = {}
        self._pending: dict[Channel, Any] = {}

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
        """Begins a call that all ranks make; yields its number. No other call gets its messages.

        Args:
            kind: "forward", "backward", "decode", ...
            agreement: everything else that must be equal on all ranks.
            device: device of the messages.
            values: tensors whose values must be equal on all ranks.
            number: for a backward, the number of its forward; by default a new number.
        """
        yield 0

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
        return self._exchange(channel, step, [(hop.send_to, send)], [(hop.recv_from, recv)], after)

    def all_gather(
        self, channel: Channel, step: int, send: Tensor, recv: Tensor, *, after: After = None
    ) -> Event | None:
        """Starts to gather all ranks' `send`, (n,) uint8, in rank order: (world_size * n,)."""
        return self._collective("all_gather", channel, step, send, recv, after)

    def reduce_scatter(
        self, channel: Channel, step: int, send: Tensor, recv: Tensor, *, after: After = None
    ) -> Event | None:
        """Starts to sum all ranks' `send`, (world_size * n,); rank r receives the r-th chunk.

        A host sums in rank order; NCCL chooses its own order.
        """
        return self._collective("reduce_scatter", channel, step, send, recv, after)

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
        counts = list(send_counts), list(recv_counts)
        return self._collective("all_to_all", channel, step, send, recv, after, counts)

    def wait(self, channel: Channel) -> None:
        """Waits until the exchange posted on this channel is complete on this rank.

        Then this rank has both sent and received: both buffers may be written to.
        """
        raise NotImplementedError

    def pool(self, device: torch.device) -> Pool:
        """Message buffers for operators on the current stream."""
        return Pool(device)

    def join(self, channel: Channel, device: torch.device) -> None:
        """Connects for an exchange in which this rank neither sends nor receives."""

    def follow(self, channel: Channel, stream: Stream) -> bool:
        """Makes a stream wait for the current exchange; returns False if only the host can wait."""
        return False

    def before_first(self, kind: Hashable, prepare: Callable[[], None]) -> None:
        """Runs `prepare` on all ranks before the first call of a kind; waits for the last rank."""

    def sub(self, ranks: Ranks) -> Transport:
        """The transport among some of these ranks, in ascending order, with this rank."""
        if ranks not in self._subs:
            check_ranks(ranks, self.rank, self.world_size)
            members = tuple(self._members[rank] for rank in ranks)
            self._subs[ranks] = self if members == self._members else self._among(members)
        return self._subs[ranks]

    def _among(self, members: Ranks) -> Transport:
        raise NotImplementedError

    def _exchange(
        self,
        channel: Channel,
        step: int,
        sends: Parts,
        receives: Parts,
        after: After,
        finish: Callable[[], None] | None = None,
    ) -> Event | None:
        """Starts one batch of messages; `finish` runs when all of them are complete."""
        raise NotImplementedError

    def _collective(
        self,
        kind: str,
        channel: Channel,
        step: int,
        send: Tensor,
        recv: Tensor,
        after: After,
        counts: tuple[list[int], list[int]] | None = None,
    ) -> Event | None:
        """Starts a collective, as messages between each two ranks."""
        ranks, finish = range(self.world_size), None
        outgoing: Sequence[Tensor] = self.world_size * [send]
        incoming: Sequence[Tensor]
        if kind == "reduce_scatter":
            outgoing = send.chunk(self.world_size)
            received = [torch.empty_like(x) for x in outgoing]
            received[self.rank] = outgoing[self.rank]
            incoming, finish = received, partial(_sum, received, recv)
        else:
            if counts is not None:
                outgoing, incoming = send.split(counts[0]), recv.split(counts[1])
            else:
                incoming = recv.chunk(self.world_size)
            incoming[self.rank].copy_(outgoing[self.rank])
        sends, receives = (
            [(r, parts[r].view(torch.uint8)) for r in ranks if r != self.rank]
            for parts in (outgoing, incoming)
        )
        return self._exchange(channel, step, sends, receives, after, finish)

    def _forget(self) -> None:
        """Releases the buffers of all pending exchanges: no `wait` will come."""
        self._pending.clear()
        for sub in self._subs.values():
            if sub is not self:
                sub._forget()


def _sum(parts: Sequence[Tensor], total: Tensor) -> None:
    total.zero_()
    for part in parts:
        total.add_(part)


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


def check_ranks(ranks: Ranks, rank: int, world_size: int) -> None:
    """Refuses ranks without `rank`, or that do not ascend within the world size.

    torch.distributed numbers a group's ranks in ascending order, in whatever order they are listed.
    """
    if rank not in ranks:
        raise ValueError(f"rank {rank} must be among the ranks of its transport, got {ranks}")
    if list(ranks) != sorted({r for r in ranks if 0 <= r < world_size}):
        raise ValueError(f"ranks must ascend, each in [0, {world_size}), got {ranks}")
