"""The transport: post an exchange, compute, then wait; compute hides the exchange.

One step of a ring is one symmetric exchange. The other strategies use the collectives of
torch.distributed. All tensors are flat; a channel has at most one exchange under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attn.core.facts import Facts, details, digest, shown
from ring_attn.core.program import Channel, Collective, Hop
from ring_attn.transport import streams
from ring_attn.transport.buffers import Pool
from ring_attn.transport.options import MAX_CTAS
from ring_attn.transport.streams import Event, Stream

After = Sequence[Event] | None
Ranks = tuple[int, ...]
# A message names at most so many ranks.
MAX_RANKS = 16

RankMessages = list[tuple[int, Tensor]]  # messages to or from other ranks


class HopOf(NamedTuple):
    """A hop, with the message to send and the memory for the message to receive."""

    route: Hop
    send: Tensor
    recv: Tensor


@dataclass(slots=True)
class Batch:
    """Messages that are posted together; `finish` runs when all of them are complete.

    Messages between two ranks arrive in the order of their sends. `num_exchanges` is for
    `TransportStats.messages`.
    """

    channel: Channel
    step: int
    device: torch.device
    after: After = None
    sends: RankMessages = field(default_factory=list)
    receives: RankMessages = field(default_factory=list)
    finish: Callable[[], None] | None = None
    num_exchanges: int = 1


@dataclass
class TransportStats:
    """Counts of a transport and its `sub`s, since the transport was made or `reset` was called.

    Attributes:
        bytes_sent: bytes that left this rank; in a collective, the bytes meant for other ranks.
        messages: number of exchanges; a collective counts as one.
        wait_s: seconds of host time in `wait`, which compute did not hide; 0 on CUDA, where streams
            wait.
        bytes_received: bytes that this rank received; p2p counts them when posted.
    """

    bytes_sent: int = 0
    messages: int = 0
    wait_s: float = 0.0
    bytes_received: int = 0

    def reset(self) -> None:
        self.bytes_sent, self.messages, self.wait_s, self.bytes_received = 0, 0, 0.0, 0


def rank_name(rank: int | Sequence[int]) -> str:
    """Return the name of a global rank, or of several, for messages about a process group."""
    if isinstance(rank, int):
        return f"global rank {rank}"
    if len(rank) <= MAX_RANKS:
        return f"global ranks {list(rank)}"
    first = ", ".join(map(str, rank[: MAX_RANKS - 1]))
    return f"global ranks [{first}, ... {rank[-1]}], {len(rank)} in all"


class Agreement:
    """Values that must be equal on all ranks of a call, by argument name."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = dict(values)

    @cached_property
    def report(self) -> Facts:
        """Each value as a text and as the digest of its facts, to send to other ranks."""
        return {name: (shown(value), digest(value)) for name, value in self.values.items()}

    @cached_property
    def details(self) -> str:
        """The facts of layouts and masks, to find where they differ."""
        return details(self.values)

    @cached_property
    def digest(self) -> bytes:
        """A hash of the facts of all values, 16 bytes."""
        return bytes.fromhex(digest(self.values))


def as_facts(texts: Mapping[str, str]) -> Facts:
    """Return facts of texts by name, which are equal on two ranks if the texts are."""
    return {name: (text, text) for name, text in texts.items()}


def differences(reports: Mapping[int, Facts]) -> dict[str, str]:
    """Return a sentence for each differing fact, by its name, with the ranks' values.

    `reports` are facts by global rank. Different calls have other arguments, which are not
    compared.
    """
    found = {}
    for name in ["call", *sorted({name for report in reports.values() for name in report})]:
        values = {rank: tuple(report.get(name, ("", ""))) for rank, report in reports.items()}
        (usual, fact), _ = Counter(values.values()).most_common(1)[0]
        odd: dict[str, list[int]] = {}
        for rank, (text, other) in values.items():
            if other != fact:
                # Texts of long layouts and masks are cut.
                odd.setdefault(f"another {text}" if text == usual else text, []).append(rank)
        if not odd:
            continue
        odd_ranks = {rank for ranks in odd.values() for rank in ranks}
        others = [
            f"{rank_name(ranks if len(ranks) > 1 else ranks[0])} has {text}"
            for text, ranks in odd.items()
        ]
        rest = [rank for rank in values if rank not in odd_ranks]
        of_rest = f"the other {len(rest)} have" if len(rest) > 1 else f"{rank_name(rest[0])} has"
        found[name] = f"{name}: {', '.join(others)}, {of_rest} {usual}"
        if name == "call":
            break
    return found


class Transport:
    """One rank's exchanges with the other ranks of a group.

    No tensor of an exchange may be touched between its post and the end of `wait`. On a device with
    streams, an exchange begins after the events `after`, by default after all work queued on the
    current stream; the post returns the event of the exchange's end.

    By default ranks are in one process: they make the same calls, and the host moves messages.

    Attributes:
        sms_per_exchange: multiprocessors that the copies of an exchange take.
        spare_sms: multiprocessors that attention leaves to kernels of others.
    """

    sms_per_exchange = MAX_CTAS
    spare_sms = 0

    def __init__(self, members: Ranks, member: int, stats: TransportStats | None = None) -> None:
        self.rank, self.world_size = members.index(member), len(members)
        self.stats = stats or TransportStats()
        self.members = self.global_ranks = members
        self._subs: dict[Ranks, Transport] = {}  # without this transport itself
        self.pending: dict[Channel, Any] = {}  # a transport's own record of an exchange

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
        """Open a call that all ranks make, and yield its number. Messages of calls cannot mix.

        Args:
            kind: "forward", "backward", "decode", ...
            agreement: everything else that must be equal on all ranks.
            device: device of the messages.
            sinks: its values must be equal on all ranks.
            queries: likewise, but compared only with RING_ATTN_DEBUG.
            number: for a backward, the number of its forward; by default a new number.
        """
        yield 0

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
        """Start one exchange of uint8 buffers: with one or two other ranks, or with all.

        all_gather gathers all ranks' `send`, (n,), in rank order: (world_size * n,). reduce_scatter
        sums all ranks' `send`, (world_size * n,), of which rank r receives the r-th chunk; a host
        sums in rank order, NCCL chooses its own order. all_to_all sends each rank its part of
        `send`, and receives each rank's part for this; the counts split them in rank order.
        """
        batch = Batch(channel, step, send.device, after)
        if isinstance(route, Hop):
            batch.sends, batch.receives = [(route.send_to, send)], [(route.recv_from, recv)]
            return self._exchange(batch)
        if route.op == "reduce_scatter":
            send, recv = send.view(route.dtype), recv.view(route.dtype)
        return self._collective(batch, route, send, recv)

    def post_together(
        self, channel: Channel, step: int, hops: Sequence[HopOf], *, after: After = None
    ) -> Event | None:
        """Start several hops as one exchange on a channel, in one order on all ranks.

        One `wait` is for all of them; `post` says the rest.
        """
        return self._exchange(
            Batch(
                channel,
                step,
                hops[0].send.device,
                after,
                sends=[(hop.route.send_to, hop.send) for hop in hops],
                receives=[(hop.route.recv_from, hop.recv) for hop in hops],
                num_exchanges=len(hops),
            )
        )

    def gather(self, x: Tensor, step: int = 0) -> Tensor:
        """Return all ranks' `x`, which have one shape, in rank order: (world_size, *shape)."""
        every = x.new_empty(self.world_size, *x.shape)
        send, recv = (y.contiguous().view(-1).view(torch.uint8) for y in (x, every))
        self.post("shards", step, Collective("all_gather"), send, recv)
        self.wait("shards")
        return every

    def wait(self, channel: Channel) -> None:
        """Wait until the exchange posted on this channel is complete on this rank.

        Then this rank has both sent and received: both buffers may be written to.
        """
        raise NotImplementedError

    def pool(self, device: torch.device) -> Pool:
        """Message buffers for operators on the current stream."""
        return Pool(device)

    def side(self, device: torch.device) -> Stream | None:
        """A stream for work beside the current stream's; None on a device without streams."""
        return streams.new(device) if streams.are_used(device) else None

    def join(self, channel: Channel, device: torch.device) -> None:
        """Connect for an exchange in which this rank neither sends nor receives."""

    def before_first(self, kind: Hashable, backend: str, prepare: Callable[[], None]) -> None:
        """Run `prepare` on all ranks before the first call of a kind; wait for the last rank.

        Refuses ranks with different backends.
        """

    def sub(self, ranks: Ranks) -> Transport:
        """Return the transport among some of these ranks, in ascending order, with this rank."""
        if len(ranks) == self.world_size:
            return self
        if ranks not in self._subs:
            self._subs[ranks] = self._among(tuple(self.members[rank] for rank in ranks))
        return self._subs[ranks]

    def _among(self, members: Ranks) -> Transport:
        raise NotImplementedError

    def _exchange(self, batch: Batch) -> Event | None:
        raise NotImplementedError

    def _collective(
        self, batch: Batch, route: Collective, send: Tensor, recv: Tensor
    ) -> Event | None:
        """Start a collective, as messages between each two ranks."""
        outgoing: Sequence[Tensor] = self.world_size * [send]
        incoming: Sequence[Tensor] = recv.chunk(self.world_size)
        if route.op == "reduce_scatter":
            outgoing = send.chunk(self.world_size)
            received = [
                x if r == self.rank else torch.empty_like(x) for r, x in enumerate(outgoing)
            ]
            incoming, batch.finish = received, partial(_sum, received, recv)
        else:
            if route.op == "all_to_all":
                outgoing, incoming = send.split(route.send_counts), recv.split(route.recv_counts)
            incoming[self.rank].copy_(outgoing[self.rank])
        batch.sends, batch.receives = (
            [(r, x.view(torch.uint8)) for r, x in enumerate(parts) if r != self.rank]
            for parts in (outgoing, incoming)
        )
        return self._exchange(batch)

    def _forget(self) -> None:
        """Release the buffers of all pending exchanges: no `wait` will follow."""
        self.pending.clear()
        for sub in self._subs.values():
            sub._forget()


def _sum(parts: Sequence[Tensor], total: Tensor) -> None:
    total.zero_()
    for part in parts:
        total.add_(part)


def gather_texts(transport: Transport, text: str, device: torch.device) -> list[str]:
    """Return all ranks' texts, in rank order; takes two exchanges, for which the host waits."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    counts = transport.gather(torch.tensor(own.numel(), device=device)).tolist()
    padded = torch.nn.functional.pad(own, (0, max(counts) - own.numel()))
    rows = transport.gather(padded, 1).tolist()  # (world_size, longest) bytes
    return [bytes(row[:count]).decode() for row, count in zip(rows, counts, strict=True)]
