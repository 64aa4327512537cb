"""The exchanges that this rank's device has begun and ended, as the watch sees them.

On a device with streams the host waits for no exchange, and a thread that queried a CUDA event
would break a graph capture in another thread. So the device writes the number of each exchange into
pinned memory, before the exchange begins and after its end.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from ring_attn.transport import streams

# Larger than the number of exchanges ever queued, so that the numbers of queued ones are distinct.
NUMBERS = 1 << 14


@dataclass(frozen=True, slots=True)
class Posted:
    """An exchange that has not ended."""

    number: int  # among the channel's exchanges, modulo NUMBERS
    step: int
    peer: int  # index of the sender among the channel's ranks
    since: float  # time of the post, of `time.monotonic`


class Progress:
    """The exchanges of one channel that have been posted and have not ended."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.arange(NUMBERS, dtype=torch.int32, device=device)
        self._flags = streams.pinned(torch.zeros(2, dtype=torch.int32))
        self._posted: deque[Posted] = deque()
        self._last = 0

    def begin(self, step: int, peer: int) -> None:
        """Records an exchange, before its operators are queued on the current stream."""
        self._last = (self._last + 1) % NUMBERS
        self._posted.append(Posted(self._last, step, peer, time.monotonic()))
        self._flags[0].copy_(self._numbers[self._last], non_blocking=True)

    def end(self) -> None:
        """Records its end, after its operators are queued on the current stream."""
        self._flags[1].copy_(self._numbers[self._last], non_blocking=True)

    def first_under_way(self) -> tuple[Posted, bool] | None:
        """The oldest exchange that has not ended, and whether the device has begun it."""
        begun, ended = self._flags.tolist()
        posted = self._posted
        numbers = [exchange.number for exchange in list(posted)]
        if ended in numbers:
            for _ in range(numbers.index(ended) + 1):
                posted.popleft()
        if not posted:
            return None
        seen = numbers[: numbers.index(begun) + 1] if begun in numbers else []
        return posted[0], posted[0].number in seen
