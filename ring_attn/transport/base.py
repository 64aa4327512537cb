"""The transport protocol: one symmetric exchange a step, posted before what hides it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from ring_attn.plan import Hop

# Shards and gradients travel apart: a gradient is sent when its step is done, while the next shard
# is already on its way.
Channel = Literal["shards", "gradients"]
CHANNELS: tuple[Channel, ...] = ("shards", "gradients")


@dataclass
class TransportStats:
    """What a transport has done since it was made or `reset`.

    Attributes:
        bytes_sent: bytes of all messages sent.
        messages: number of messages sent.
        wait_s: seconds of host time in `wait`, with everything that was not hidden by compute (on
            CUDA a wait is a wait of streams, and takes no host time).
    """

    bytes_sent: int = 0
    messages: int = 0
    wait_s: float = field(default=0.0)

    def reset(self) -> None:
        """Counts from zero again."""
        self.bytes_sent, self.messages, self.wait_s = 0, 0, 0.0


class Transport(Protocol):
    """What the strategies need of a transport."""

    rank: int
    world_size: int
    stats: TransportStats

    def post(self, channel: Channel, step: int, hop: Hop, send: Tensor, recv: Tensor) -> None:
        """Starts one exchange of uint8 buffers; neither may be touched before `wait`."""
        ...

    def wait(self, channel: Channel) -> None:
        """Until the exchange posted on this channel is complete on both sides."""
        ...
