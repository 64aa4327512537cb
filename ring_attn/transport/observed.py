"""A transport that is watched: its posts and waits are parts of a call that an observer sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ring_attn.core.plan import Hop
from ring_attn.profiling import Observer
from ring_attn.transport.base import Agreement, Channel, Transport, TransportStats


class ObservedTransport:
    """Passes everything on to another transport. Who has it in hand knows the call's observer."""

    def __init__(self, inner: Transport, observer: Observer) -> None:
        self.observer = observer
        self._inner = inner
        self._posted: dict[Channel, Any] = {}

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._inner.world_size

    @property
    def stats(self) -> TransportStats:
        """What has been done so far."""
        return self._inner.stats

    def call(
        self, kind: str, agreement: Agreement, device: torch.device, **options: Any
    ) -> AbstractContextManager[int]:
        """A call, which all ranks make."""
        return self._inner.call(kind, agreement, device, **options)

    def post(self, channel: Channel, step: int, hop: Hop, send: Tensor, recv: Tensor) -> None:
        """Starts one exchange of uint8 buffers."""
        with self._posting(channel):
            self._inner.post(channel, step, hop, send, recv)

    def all_gather(self, channel: Channel, step: int, send: Tensor, recv: Tensor) -> None:
        """Starts to bring every rank's `send`."""
        with self._posting(channel):
            self._inner.all_gather(channel, step, send, recv)

    def reduce_scatter(self, channel: Channel, step: int, send: Tensor, recv: Tensor) -> None:
        """Starts to sum all ranks' `send`."""
        with self._posting(channel):
            self._inner.reduce_scatter(channel, step, send, recv)

    def all_to_all(
        self,
        channel: Channel,
        step: int,
        send: Tensor,
        send_counts: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> None:
        """Starts to bring from every rank its part for this one."""
        with self._posting(channel):
            self._inner.all_to_all(channel, step, send, send_counts, recv, recv_counts)

    def join(self, channel: Channel, device: torch.device) -> None:
        """Takes part without an exchange."""
        self._inner.join(channel, device)

    def wait(self, channel: Channel) -> None:
        """Until the exchange is complete."""
        with self.observer.span("wait"):
            self._inner.wait(channel)
        if self.world_size > 1:
            self.observer.landed(self._posted.pop(channel))

    def sub(self, ranks: tuple[int, ...]) -> ObservedTransport:
        """The transport among some of these ranks, seen by the same observer."""
        return ObservedTransport(self._inner.sub(ranks), self.observer)

    @contextmanager
    def _posting(self, channel: Channel) -> Iterator[None]:
        start = self.observer.mark()
        with self.observer.span("post"):
            yield
        if self.world_size > 1:
            self._posted[channel] = start
            self.observer.arrival(start, lambda stream: self._inner.follow(channel, stream))
