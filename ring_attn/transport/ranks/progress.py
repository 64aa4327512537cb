"""The exchanges that this rank's device has begun and ended, as the watch sees them.

On a device with streams the host waits for no exchange, and a thread that asked CUDA about one
would break a capture that goes on elsewhere. So the device writes the number of each exchange into
pinned memory, before the exchange begins and when it has ended.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from ring_attn.transport import streams

# More exchanges than a device is ever given ahead: their numbers are told apart.
NUMBERS = 1 << 14


@dataclass(frozen=True, slots=True)
class Posted:
    """An exchange that has not ended.

    Attributes:
        number: of the channel's exchanges, up to NUMBERS.
        step: of the ring, or which collective of the call.
        peer: rank of the group that is received from.
        since: when it was posted, in seconds of `time.monotonic`.
    """

    number: int
    step: int
    peer: int
    since: float


class Progress:
    """The exchanges of one channel that have been posted and have not ended."""

    def __init__(self, device: torch.device) -> None:
        """No exchange yet."""
        self._numbers = torch.arange(NUMBERS, dtype=torch.int32, device=device)
        self._flags = streams.pinned(torch.zeros(2, dtype=torch.int32))
        self._posted: deque[Posted] = deque()
        self._last = 0

    def begin(self, step: int, peer: int) -> None:
        """Notes an exchange that the current stream begins next."""
        self._last = (self._last + 1) % NUMBERS
        self._posted.append(Posted(self._last, step, peer, time.monotonic()))
        self._flags[0].copy_(self._numbers[self._last], non_blocking=True)

    def end(self) -> None:
        """Notes that the current stream is past that exchange."""
        self._flags[1].copy_(self._numbers[self._last], non_blocking=True)

    def first_under_way(self) -> tuple[Posted, bool] | None:
        """The exchange that has not ended for longest, and whether the device has begun it."""
        begun, ended = self._flags.tolist()
        posted = self._posted
        numbers = [one.number for one in list(posted)]
        if ended in numbers:
            for _ in range(numbers.index(ended) + 1):
                posted.popleft()
        if not posted:
            return None
        return posted[0], begun in numbers and posted[0].number in numbers[
            : numbers.index(begun) + 1
        ]
