"""Message buffers and their last uses.

On a device with streams a post waits for the last uses of its two buffers and for no more: so an
exchange can begin while the attention kernel that was launched before it still runs.

    compute    | attend 0 | attend 1 | attend 2 |        shard i+1 comes into the buffer of
    exchanges  | shard 1 | shard 2 |   | shard 3 |       shard i-2, as soon as that is free

torch's allocator would keep a buffer that another stream has used until the device has caught up
with the host (`record_stream`), and it forgets what used a buffer last. So the buffers of a group
stay in a pool between its calls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ring_attn.transport import streams
from ring_attn.transport.streams import Event


@dataclass(slots=True, eq=False)
class Block:
    """Bytes of a message buffer.

    Attributes:
        data: (nbytes,) uint8.
        written: the moment after the last operator, or exchange into it, that used the bytes.
        sent: the ends of the exchanges that have sent the bytes since.
    """

    data: Tensor
    written: Event | None = None
    sent: list[Event] = field(default_factory=list)


def last_uses(send: Block, recv: Block) -> list[Event]:
    """The moments before an exchange between two buffers cannot begin."""
    return [event for event in (send.written, recv.written, *recv.sent) if event is not None]


def exchanged(send: Block, recv: Block, end: Event | None) -> None:
    """Notes an exchange that has been posted, whose end is known where there are streams."""
    if end is not None:
        send.sent.append(end)
        recv.written, recv.sent = end, []


class Pool:
    """Buffers that are free, by size; the one that has been free longest is taken first.

    A pool lasts from call to call where there are streams, and buffers in it until two calls in a
    row have not taken their size; else it is the pool of one call.
    """

    def __init__(self, device: torch.device) -> None:
        """An empty pool for buffers on a device."""
        self._device, self.lasts = device, streams.are_used(device)
        self._free: dict[int, deque[Block]] = {}
        self._calls = 0
        # The last call that took a size.
        self._taken: dict[int, int] = {}

    def begin(self) -> None:
        """Begins a call: buffers of sizes that neither of the last two has taken are let go."""
        self._calls += 1
        for size in [size for size, call in self._taken.items() if call < self._calls - 2]:
            del self._taken[size]
            self._free.pop(size, None)

    def take(self, nbytes: int) -> Block:
        """A buffer of that size."""
        self._taken[nbytes] = self._calls
        free = self._free.get(nbytes)
        if free:
            return free.popleft()
        data = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Operators that have been queued may still use the memory.
        return Block(data, streams.record(self._device) if self.lasts else None)

    def give(self, block: Block) -> None:
        """Takes back a buffer that is no longer used."""
        self._free.setdefault(block.data.nbytes, deque()).append(block)
