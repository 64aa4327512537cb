"""All ranks of a ring in one process: the oracle for the strategies, and a ring on one GPU.

Every rank is a thread, and one thread runs at a time: a rank holds the lock while it computes and
releases it only to wait for a message. So results are reproducible, only one rank at a time needs
working memory, and torch.distributed is not needed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from ring_attn.core.program import Channel
from ring_attn.transport.base import Batch, RankMessages, Ranks, Transport, TransportStats

T = TypeVar("T")
# Ranks of the transport, channel, sender, receiver, and the message's number in its exchange.
MessageKey = tuple[Ranks, Channel, int, int, int]


class _Exchange:
    """The messages under way between the ranks, and the lock that lets one rank run."""

    def __init__(self, world_size: int) -> None:
        self.turn = threading.Condition()
        self.sent: dict[MessageKey, Tensor] = {}
        self.failed: BaseException | None = None
        self._running = world_size
        # Whether a message is waited for, or that it is received, by each waiting rank and key.
        self._waits: dict[tuple[int, MessageKey], bool] = {}

    def until(self, rank: int, key: MessageKey, *, sent: bool) -> None:
        """Let other ranks run until a message is `sent` or received; raise if one has failed."""
        self._waits[rank, key] = sent
        self._check_some_can_run()
        self.turn.wait_for(lambda: self.failed is not None or (key in self.sent) == sent)
        del self._waits[rank, key]
        if self.failed is not None:
            text = f"another rank of the local ring failed: {self.failed}"
            raise RuntimeError(text) from self.failed

    def end(self) -> None:
        self._running -= 1
        self._check_some_can_run()

    def _check_some_can_run(self) -> None:
        """Fail the ring if every rank that has not ended waits for a message that cannot arrive."""
        waits = self._waits.items()
        if self.failed is not None or len(waits) < self._running or not waits:
            return
        if any((key in self.sent) == sent for (_, key), sent in waits):
            return
        texts = [
            f"rank {rank} waits for a message from rank {sender} to rank {receiver} on {channel!r}"
            for rank, (_, channel, sender, receiver, _) in sorted(self._waits)
        ]
        self.failed = RuntimeError(f"no rank of the local ring can go on: {'; '.join(texts)}")
        self.turn.notify_all()


class LocalTransport(Transport):
    """One rank's transport in a ring within a process."""

    def __init__(
        self, members: Ranks, member: int, exchange: _Exchange, stats: TransportStats | None = None
    ) -> None:
        super().__init__(members, member, stats)
        self._under_way = exchange

    def wait(self, channel: Channel) -> None:
        """Wait until this rank has copied its messages and the others have copied theirs."""
        batch: Batch = self.pending.pop(channel)
        sent, turn = self._under_way.sent, self._under_way.turn
        for incoming, into in self._incoming(batch):
            self._under_way.until(self.members[self.rank], incoming, sent=True)
            self.stats.bytes_received += sent[incoming].nbytes
            into.copy_(sent.pop(incoming))
            turn.notify_all()
        for outgoing, _ in self._outgoing(batch):
            self._under_way.until(self.members[self.rank], outgoing, sent=False)
        if batch.finish is not None:
            batch.finish()

    def _among(self, members: Ranks) -> LocalTransport:
        return LocalTransport(members, self.members[self.rank], self._under_way, self.stats)

    def _exchange(self, batch: Batch) -> None:
        for outgoing, message in self._outgoing(batch):
            self._under_way.sent[outgoing] = message
            self.stats.bytes_sent += message.nbytes
        self._under_way.turn.notify_all()
        self.pending[batch.channel] = batch
        self.stats.messages += batch.num_exchanges

    def _outgoing(self, batch: Batch) -> Iterator[tuple[MessageKey, Tensor]]:
        here = self.members[self.rank]
        for rank, number, message in _numbered(batch.sends):
            yield (self.members, batch.channel, here, self.members[rank], number), message

    def _incoming(self, batch: Batch) -> Iterator[tuple[MessageKey, Tensor]]:
        here = self.members[self.rank]
        for rank, number, into in _numbered(batch.receives):
            yield (self.members, batch.channel, self.members[rank], here, number), into


def _numbered(messages: RankMessages) -> Iterator[tuple[int, int, Tensor]]:
    """Yield ranks and messages, with the message's number among those of its rank."""
    counts: Counter[int] = Counter()
    for rank, message in messages:
        yield rank, counts[rank], message
        counts[rank] += 1


def run_local(world_size: int, fn: Callable[[int, LocalTransport], T]) -> list[T]:
    """The results of `fn(rank, transport)` for every rank of a ring in this process, in rank order.

    All ranks must make the same exchanges. Raises the error of the first rank that failed.
    """
    exchange = _Exchange(world_size)
    results: dict[int, T] = {}
    ranks = tuple(range(world_size))
    # Threads get the caller's grad mode and, on CUDA, device and stream.
    grad = torch.is_grad_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def work(rank: int) -> None:
        with exchange.turn:
            try:
                if exchange.failed is None:
                    torch.set_grad_enabled(grad)
                    if stream is not None:
                        torch.cuda.set_device(stream.device)
                        torch.cuda.set_stream(stream)
                    results[rank] = fn(rank, LocalTransport(ranks, rank, exchange))
            except BaseException as error:
                exchange.failed = exchange.failed or error
                exchange.turn.notify_all()
            finally:
                exchange.end()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if exchange.failed is not None:
        raise exchange.failed
    return [results[rank] for rank in range(world_size)]
