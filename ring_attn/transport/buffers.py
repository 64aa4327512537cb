"""Message buffers and their last uses.

On a device with streams, an exchange waits only for the last uses of its two buffers. So it can
begin while the attention kernel that was launched before it still runs.

    compute    | attend 0 | attend 1 | attend 2 |        shard i+1 comes into the buffer of
    exchanges  | shard 1 | shard 2 |   | shard 3 |       shard i-2, as soon as that is free

torch's allocator would hold a buffer used by another stream until the device catches up with the
host (`record_stream`), and does not record a buffer's last use. So a pool keeps the buffers of a
group between calls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ring_attn.core.messages import Message
from ring_attn.transport import streams
from ring_attn.transport.streams import Event

# Bytes before a message on NCCL, for the identity of its call; see `ranks.headers`.
HEADER_BYTES = 64

# Calls after which the buffers of a size are dropped, if it has not been taken before in longer
# intervals; and the longest such interval.
SHORTEST_PAUSE, LONGEST_PAUSE = 2, 64

# Messages whose views a buffer keeps: more than a few programs have.
MAX_MESSAGES = 32


@dataclass(slots=True, eq=False)
class Block:
    """A message buffer and its last uses."""

    whole: Tensor  # (header + nbytes,) uint8
    header: int  # bytes of the header
    # After the last operator on the buffer, or the last exchange into it.
    written: Event | None = None
    # Ends of the exchanges that have sent it since then.
    sent: list[Event] = field(default_factory=list)
    # Of the message that the buffer holds now: its bytes without and with the header, its tensors.
    bytes: Tensor = field(init=False)
    framed: Tensor = field(init=False)
    tensors: tuple[Tensor, ...] = field(init=False)
    # Views of messages by their ids: to make them takes longer than to launch a copy.
    _kept: dict[int, tuple[Message, Tensor, Tensor, tuple[Tensor, ...]]] = field(
        default_factory=dict
    )

    def hold(self, message: Message) -> None:
        """Make the buffer hold a message."""
        kept = self._kept.get(id(message))
        # A message that is kept here keeps its id.
        if kept is None or kept[0] is not message:
            if len(self._kept) >= MAX_MESSAGES:
                self._kept.clear()
            framed = self.whole[: self.header + message.nbytes]
            part = framed[self.header :]
            kept = self._kept[id(message)] = message, part, framed, message.views(part)
        _, self.bytes, self.framed, self.tensors = kept


def last_uses(send: Block, recv: Block) -> list[Event]:
    """Return the events that an exchange between two buffers must wait for."""
    return [event for event in (send.written, recv.written, *recv.sent) if event is not None]


class Pool:
    """Free buffers, by size; the buffer that has been free longest is taken first.

    On a device with streams a pool lasts from call to call, and drops the buffers of a size that
    two calls in a row have not taken. A size that returns after a pause of more calls is kept for
    such pauses from then on, up to LONGEST_PAUSE: in a model with 5 layers of local attention to
    one of global, the latter's buffers are not allocated anew in every layer. Elsewhere a pool
    serves one call.
    """

    def __init__(self, device: torch.device, header: int = 0) -> None:
        self._device, self.lasts, self.header = device, streams.are_used(device), header
        self.free: dict[int, deque[Block]] = {}
        self._calls = 0
        # By size: the last call that took a buffer.
        self.taken: dict[int, int] = {}
        # By size: the longest pause so far, in calls, if it was longer than SHORTEST_PAUSE.
        self.pauses: dict[int, int] = {}

    def begin(self) -> None:
        """Begin a call: drop buffers of sizes that have not been taken for too long."""
        self._calls += 1
        for size, call in [*self.taken.items()]:
            pause = self._calls - call
            if pause > self.pauses.get(size, SHORTEST_PAUSE):
                self.free.pop(size, None)
            if pause > LONGEST_PAUSE:
                del self.taken[size]
                self.pauses.pop(size, None)

    def take(self, nbytes: int) -> Block:
        pause = self._calls - self.taken.get(nbytes, self._calls)
        if pause > SHORTEST_PAUSE:
            self.pauses[nbytes] = max(pause, self.pauses.get(nbytes, 0))
        self.taken[nbytes] = self._calls
        free = self.free.get(nbytes)
        if free:
            return free.popleft()
        whole = torch.empty(self.header + nbytes, dtype=torch.uint8, device=self._device)
        # Queued operators may still use the memory.
        written = streams.record(self._device) if self.lasts else None
        return Block(whole, self.header, written)

    def give(self, block: Block) -> None:
        """Take back a buffer; its recorded uses may still run."""
        self.free.setdefault(block.whole.nbytes - self.header, deque()).append(block)
