"""All ranks of a ring in one process: the oracle for the drivers, and a ring on one GPU.

Every rank is a thread, and one runs at a time: the lock is held while a rank computes and given up
only where it waits for a message. So the results are the same at every run, the memory is that of
one rank's work at a time, and nothing of torch.distributed is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ring_attn.plan import Hop
from ring_attn.transport.base import Channel, TransportStats

T = TypeVar("T")
Key = tuple[Channel, int, int]  # channel, sender, receiver


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


class LocalTransport:
    """One rank's end of a ring within a process."""

    def __init__(self, rank: int, world_size: int, exchange: _Exchange) -> None:
        self.rank = rank
        self.world_size = world_size
        self.stats = TransportStats()
        self._exchange = exchange
        self._pending: dict[Channel, tuple[Hop, Tensor]] = {}

    def post(self, channel: Channel, step: int, hop: Hop, send: Tensor, recv: Tensor) -> None:
        """Offers `send` to its receiver; neither buffer may be touched before `wait`."""
        self._exchange.sent[channel, self.rank, hop.send_to] = send
        self._exchange.turn.notify_all()
        self._pending[channel] = (hop, recv)
        self.stats.bytes_sent += send.numel()
        self.stats.messages += 1

    def wait(self, channel: Channel) -> None:
        """Until the message has been copied in, and one's own has been taken."""
        hop, recv = self._pending.pop(channel)
        sent, turn = self._exchange.sent, self._exchange.turn
        incoming, outgoing = (channel, hop.recv_from, self.rank), (channel, self.rank, hop.send_to)
        self._exchange.until(lambda: incoming in sent)
        recv.copy_(sent.pop(incoming))
        turn.notify_all()
        self._exchange.until(lambda: outgoing not in sent)


def run_local(world_size: int, fn: Callable[[int, LocalTransport], T]) -> list[T]:
    """Runs `fn(rank, transport)` for every rank of a ring in this process.

    Args:
        world_size: number of ranks.
        fn: what a rank does; all ranks must make the same exchanges.

    Returns:
        The results in the order of the ranks.

    Raises:
        BaseException: what the first rank to fail has raised.

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

    def work(rank: int) -> None:
        with exchange.turn:
            try:
                if exchange.failed is None:
                    settings()
                    results[rank] = fn(rank, LocalTransport(rank, world_size, exchange))
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
    """Gives a new thread the caller's grad mode and, on CUDA, its device and stream."""
    grad = torch.is_grad_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def apply() -> None:
        torch.set_grad_enabled(grad)
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)

    return apply
