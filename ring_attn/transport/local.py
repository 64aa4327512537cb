"""All ranks of a ring in one process: the oracle for the strategies, and a ring on one GPU.

Every rank is a thread, and one thread runs at a time: a rank holds the lock while it computes and
releases it only to wait for a message. So results are reproducible, only one rank at a time needs
working memory, and torch.distributed is not needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import contains
from typing import Any, TypeVar

import torch
from torch import Tensor

from ring_attn.core.program import Channel, Hop
from ring_attn.transport.base import Agreement, TransportStats, check_ranks
from ring_attn.transport.buffers import Pool
from ring_attn.transport.streams import Stream

T = TypeVar("T")
Ranks = tuple[int, ...]
Key = tuple[Ranks, Channel, int, int]  # ranks of the transport, channel, sender, receiver


class _Exchange:
    """The messages under way between the ranks, and the lock that lets one rank run."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.sent: dict[Key, Tensor] = {}
        self.failed: BaseException | None = None

    def until(self, ready: Callable[[], bool]) -> None:
        """Lets other ranks run until `ready`, or raises if one of them has failed."""
        self.turn.wait_for(lambda: self.failed is not None or ready())
        if self.failed is not None:
            raise RuntimeError("another rank of the local ring failed") from self.failed


@dataclass
class _Pending:
    """An exchange under way; `take(sender, message)` handles each message that comes."""

    receivers: Sequence[int]
    senders: Sequence[int]
    take: Callable[[int, Tensor], object]


class LocalTransport:
    """One rank's transport in a ring within a process."""

    def __init__(
        self, rank: int, ranks: Ranks, exchange: _Exchange, stats: TransportStats | None = None
    ) -> None:
        self.rank = rank
        self.world_size = len(ranks)
        self.stats = stats or TransportStats()
        self._ranks = ranks
        self._exchange = exchange
        self._pending: dict[Channel, _Pending] = {}
        self._subs: dict[Ranks, LocalTransport] = {}

    @contextmanager
    def call(
        self, kind: str, agreement: Agreement, device: torch.device, **_: Any
    ) -> Iterator[int]:
        """Begins a call without comparing ranks: in one process they make the same calls."""
        yield 0

    def post(
        self, channel: Channel, step: int, hop: Hop, send: Tensor, recv: Tensor, **_: Any
    ) -> None:
        """Offers `send` to its receiver."""
        pending = _Pending([hop.send_to], [hop.recv_from], lambda _, got: recv.copy_(got))
        self._offer(channel, {hop.send_to: send}, pending)

    def all_gather(self, channel: Channel, step: int, send: Tensor, recv: Tensor, **_: Any) -> None:
        """Offers `send` to every other rank."""
        parts = recv.view(self.world_size, -1)
        parts[self.rank] = send
        pending = _Pending(self._others, self._others, lambda r, got: parts[r].copy_(got))
        self._offer(channel, dict.fromkeys(self._others, send), pending)

    def reduce_scatter(
        self, channel: Channel, step: int, send: Tensor, recv: Tensor, **_: Any
    ) -> None:
        """Offers every other rank its part; each rank sums in rank order."""
        parts = send.view(self.world_size, -1)
        recv.zero_()

        def add(rank: int, got: Tensor) -> None:
            recv.add_(got)
            if rank + 1 == self.rank:
                recv.add_(parts[self.rank])

        if self.rank == 0:
            recv.add_(parts[0])
        pending = _Pending(self._others, self._others, add)
        self._offer(channel, {r: parts[r] for r in self._others}, pending)

    def all_to_all(
        self,
        channel: Channel,
        step: int,
        send: Tensor,
        send_counts: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
        **_: Any,
    ) -> None:
        """Offers every other rank its part."""
        outgoing, incoming = send.split(list(send_counts)), recv.split(list(recv_counts))
        incoming[self.rank].copy_(outgoing[self.rank])
        pending = _Pending(self._others, self._others, lambda r, got: incoming[r].copy_(got))
        self._offer(channel, {r: outgoing[r] for r in self._others}, pending)

    def wait(self, channel: Channel) -> None:
        """Waits until this rank has copied its messages and the others have copied theirs."""
        pending = self._pending.pop(channel)
        sent, turn = self._exchange.sent, self._exchange.turn
        for rank in pending.senders:
            incoming = self._key(channel, rank, self.rank)
            self._exchange.until(partial(contains, sent, incoming))
            self.stats.bytes_received += sent[incoming].nbytes
            pending.take(rank, sent.pop(incoming))
            turn.notify_all()
        for rank in pending.receivers:
            outgoing = self._key(channel, self.rank, rank)
            self._exchange.until(partial(_lacks, sent, outgoing))

    def pool(self, device: torch.device) -> Pool:
        """A new pool, for one call."""
        return Pool(device)

    def join(self, channel: Channel, device: torch.device) -> None:
        """Does nothing: ranks in one process need no connections."""

    def follow(self, channel: Channel, stream: Stream) -> bool:
        """False: the rank that waits for a message copies it."""
        return False

    def before_first(self, kind: Hashable, prepare: Callable[[], None]) -> None:
        """Does nothing: the local transport has no timeouts."""

    def sub(self, ranks: Ranks) -> LocalTransport:
        """The transport among some of these ranks."""
        if ranks not in self._subs:
            check_ranks(ranks, self.rank, self.world_size)
            members = tuple(self._ranks[rank] for rank in ranks)
            self._subs[ranks] = LocalTransport(
                ranks.index(self.rank), members, self._exchange, self.stats
            )
        return self._subs[ranks]

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _key(self, channel: Channel, sender: int, receiver: int) -> Key:
        return self._ranks, channel, sender, receiver

    def _offer(self, channel: Channel, messages: dict[int, Tensor], pending: _Pending) -> None:
        for rank, message in messages.items():
            self._exchange.sent[self._key(channel, self.rank, rank)] = message
            self.stats.bytes_sent += message.nbytes
        self._exchange.turn.notify_all()
        self._pending[channel] = pending
        self.stats.messages += 1


def _lacks(sent: dict[Key, Tensor], key: Key) -> bool:
    return key not in sent


def run_local(world_size: int, fn: Callable[[int, LocalTransport], T]) -> list[T]:
    """Runs `fn(rank, transport)` for every rank of a ring in this process.

    Args:
        world_size: number of ranks.
        fn: the work of a rank; all ranks must make the same exchanges.

    Returns:
        The results in rank order.

    Raises:
        BaseException: the error of the first rank that failed.

    Example:
        >>> def neighbour(rank, transport):
        ...     got = torch.zeros(1, dtype=torch.uint8)
        ...     mine = torch.tensor([rank], dtype=torch.uint8)
        ...     hop = Hop(send_to=(rank + 1) % 3, recv_from=(rank - 1) % 3)
        ...     transport.post("shards", 0, hop, mine, got)
        ...     transport.wait("shards")
        ...     return int(got)
        >>> run_local(3, neighbour)
        [2, 0, 1]
    """
    exchange = _Exchange()
    results: dict[int, T] = {}
    settings = _thread_settings()
    ranks = tuple(range(world_size))

    def work(rank: int) -> None:
        with exchange.turn:
            try:
                if exchange.failed is None:
                    settings()
                    results[rank] = fn(rank, LocalTransport(rank, ranks, exchange))
            except BaseException as error:
                exchange.failed = exchange.failed or error
                exchange.turn.notify_all()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if exchange.failed is not None:
        raise exchange.failed
    return [results[rank] for rank in range(world_size)]


def _thread_settings() -> Callable[[], None]:
    """A function that gives a new thread the caller's grad mode and, on CUDA, device and stream."""
    grad = torch.is_grad_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def apply() -> None:
        torch.set_grad_enabled(grad)
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)

    return apply
