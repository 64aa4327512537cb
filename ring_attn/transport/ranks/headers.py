"""Identities of calls, sent in front of messages on NCCL, where messages have no tags.

Messages between two ranks on one channel arrive in the order in which they are sent. So where the
first message of a call is of the same call on its receiver, all others are, too: only the headers
of first messages are written and compared. The device compares them once per call, and the host
does not wait. The host reads a call's result at the start of the group's next call, of a later call
if the device has not finished by then, or in a check, which waits for it.

A CUDA graph sends the same header at each replay, and adds up whether any has differed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import torch
from torch import Tensor

from ring_attn.transport import capture, streams
from ring_attn.transport.buffers import HEADER_BYTES, Block, Pool
from ring_attn.transport.ranks.identity import Identity
from ring_attn.transport.streams import Event

WORDS = HEADER_BYTES // 8

# Headers per buffer; a call with more first messages takes several buffers.
ROWS = 256

# The number that the host reads where the device has not compared yet.
UNKNOWN = -1


class Compared:
    """One call, and whether its messages were of another call, once the device knows."""

    def __init__(self, call: Identity, result: Tensor) -> None:
        self._call, self.result = call, result
        self._differs: int | None = None

    def __str__(self) -> str:
        return str(self._call)

    def differs(self) -> bool | None:
        """Return whether messages were of another call; None before the device has compared.

        The device compares after all exchanges of the call.
        """
        if self._differs is None and (found := self.result.item()) != UNKNOWN:
            self._differs = int(found)
        return None if self._differs is None else self._differs != 0


class Headers:
    """Headers of one group's messages on one rank."""

    def __init__(self) -> None:
        self._own: Tensor | None = None
        self._pool: Pool | None = None
        # The call's buffers, and the number of used rows in each buffer.
        self._blocks: list[Block] = []
        self._rows: list[int] = []
        # The peers to which the call has sent, or from which it has received.
        self._known: set[Hashable] = set()
        # Messages of the call that begin with its header, by their place in memory.
        self._marked: dict[int, tuple[Tensor, Event]] = {}
        # Events for which an exchange waits before it uses headers.
        self.ready: list[Event] = []
        self.call: Compared
        self.calls: deque[Compared] = deque()
        # Whether headers have differed in any replay: on the device, and in pinned memory.
        self.replays: tuple[Tensor, Tensor] | None = None

    def begin(
        self, call: Identity, device: torch.device, values: Tensor | None, pool: Pool
    ) -> None:
        """Write the header of a call.

        `values` is a checksum, 0-dim int64, of tensors that must be equal on all ranks; other
        ranks' headers are received into buffers of the pool.
        """
        if capture.is_on():
            assert self.replays is not None, "an equal call was made before"
            own, result = torch.full((WORDS,), call.seed, device=device), self.replays[1]
        else:
            identity = call.words()
            zeros = [0] * (WORDS - len(identity))
            words = torch.tensor([*identity, *zeros, UNKNOWN])
            words = streams.pinned(words, device)
            own, result = words.to(device, non_blocking=True)[:WORDS], words[WORDS]
            if self.replays is None:
                no = torch.zeros((), dtype=torch.bool)
                self.replays = no.to(device, copy=True), streams.pinned(no, device)
        if values is not None:
            own[6] = values
        self._own, self._pool, self.call = own.view(torch.uint8), pool, Compared(call, result)
        self._blocks, self._rows, self.ready = [], [], [streams.record(device)]
        self._known.clear()
        self._marked.clear()

    @property
    def outgoing(self) -> Tensor:
        """The 64 bytes of this rank's call."""
        assert self._own is not None, "a call has begun"
        return self._own

    def is_first(self, *place: Hashable) -> bool:
        """Return whether the call has sent nothing there before, or received nothing from there."""
        if place in self._known:
            return False
        self._known.add(place)
        return True

    def mark(self, message: Tensor) -> None:
        """Write this rank's header in front of a message, once for all channels that send it."""
        place = message.data_ptr()
        if place in self._marked:
            _, written = self._marked[place]
            streams.wait(written, message.device)
            return
        message[:HEADER_BYTES].copy_(self.outgoing)
        # The message is kept until the call ends: no other gets its place.
        self._marked[place] = message, streams.record(message.device)

    def overwritten(self, message: Tensor) -> None:
        """Forget what `mark` has written there, as another message has been received into it."""
        self._marked.pop(message.data_ptr(), None)

    def incoming(self, count: int) -> Tensor:
        """Return (count, 64) bytes for other ranks' headers, to use after `ready`."""
        if not self._blocks or self._rows[-1] + count > ROWS:
            assert self._pool is not None, "a call has begun"
            block = self._pool.take(max(count, ROWS) * HEADER_BYTES)
            self._blocks.append(block)
            self._rows.append(0)
            if block.written is not None:
                self.ready.append(block.written)
        taken = self._rows[-1]
        self._rows[-1] += count
        return _rows(self._blocks[-1])[taken : taken + count]

    def end(self) -> None:
        """Compare all headers on the device, after the waits for all exchanges of a call."""
        self._marked.clear()
        if not self._blocks:
            return
        taken = zip(self._blocks, self._rows, strict=True)
        rows = [_rows(block)[:count] for block, count in taken]
        found = rows[0] if len(rows) == 1 else torch.cat(rows)
        differs = found.ne(self.outgoing).any()
        if capture.is_on():
            assert self.replays is not None, "an equal call was made before"
            differs = self.replays[0].logical_or_(differs)
        else:
            self.calls.append(self.call)
        self.call.result.copy_(differs, non_blocking=True)
        event = streams.record(differs.device)
        assert self._pool is not None, "a call has begun"
        for block in self._blocks:
            block.written = event
            self._pool.give(block)

    @property
    def settled(self) -> bool:
        """Whether the device has compared all calls that have ended on the host."""
        return all(call.differs() is not None for call in self.calls)

    def found(self) -> str | None:
        """Return the first error among the calls that the device has compared so far, or None."""
        if self.replays is not None and self.replays[1].item():
            return "a replay of a CUDA graph met messages of another call"
        while self.calls:
            differs = self.calls[0].differs()
            if differs is None:
                return None
            call = self.calls.popleft()
            if differs:
                return f"{call} met messages of another call"
        return None


def _rows(block: Block) -> Tensor:
    """Return the headers in a buffer, whose own header is not used: (rows, 64)."""
    return block.whole.view(-1, HEADER_BYTES)[1:]
