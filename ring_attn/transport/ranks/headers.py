"""Identities that travel as 64 bytes beside each message, where a medium has no tags: on NCCL.

The device compares what has come with what is this rank's own, once for each call and without a
wait of the host. The host looks at the result of a call at the start of the next one on the same
group, if the device has got there by then, else at the start of a later one.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ring_attn.transport import streams
from ring_attn.transport.buffers import Block, Pool
from ring_attn.transport.ranks.identity import Identity
from ring_attn.transport.streams import Event

WORDS = 8
HEADER_BYTES = 8 * WORDS

# Headers that a buffer holds; a call with more exchanges takes several buffers.
ROWS = 256


class Headers:
    """Headers of one group's messages on one rank."""

    def __init__(self) -> None:
        """No call yet."""
        self._own: Tensor | None = None
        self._begun: Event | None = None
        self._pool: Pool | None = None
        # Buffers of the call, and the number of rows of each that are taken.
        self._blocks: list[Block] = []
        self._rows: list[int] = []
        self._results: deque[tuple[str, Tensor, Event | None]] = deque()

    def begin(
        self, call: Identity, device: torch.device, values: Tensor | None, pool: Pool
    ) -> None:
        """Writes the header of a call.

        Args:
            call: whose number, kind and digest are in it.
            device: of the messages.
            values: 0-dim int64, the checksum of tensors that must be equal on all ranks.
            pool: buffers to receive into.
        """
        words = torch.tensor([*call.words(), *(WORDS - 5) * (0,)])
        queued = streams.are_used(device)
        own = (streams.pinned(words) if queued else words).to(device, non_blocking=True)
        if values is not None:
            own[5] = values
        self._own, self._pool = own.view(torch.uint8), pool
        self._begun = streams.record(device) if queued else None
        self._blocks, self._rows = [], []

    @property
    def outgoing(self) -> Tensor:
        """The 64 bytes that this rank sends with each message."""
        assert self._own is not None, "a call has begun"
        return self._own

    def incoming(self, count: int) -> tuple[Tensor, list[Event]]:
        """(count, 64) bytes to receive headers of other ranks into, and when they may come."""
        if not self._blocks or self._rows[-1] + count > ROWS:
            assert self._pool is not None, "a call has begun"
            self._blocks.append(self._pool.take(max(count, ROWS) * HEADER_BYTES))
            self._rows.append(0)
        block, taken = self._blocks[-1], self._rows[-1]
        rows = block.data.view(-1, HEADER_BYTES)[taken : taken + count]
        self._rows[-1] += count
        return rows, [event for event in (self._begun, block.written) if event is not None]

    def end(self, call: Identity) -> None:
        """Compares on the device, when all exchanges of a call have been waited for."""
        if not self._blocks:
            return
        rows = [
            block.data.view(-1, HEADER_BYTES)[:taken]
            for block, taken in zip(self._blocks, self._rows, strict=True)
        ]
        differs = torch.cat([one.ne(self.outgoing).any().view(1) for one in rows]).any()
        event = None
        if self._begun is not None:
            result = streams.pinned(torch.empty((), dtype=torch.bool))
            differs = result.copy_(differs, non_blocking=True)
            event = streams.record(self.outgoing.device)
        assert self._pool is not None, "a call has begun"
        for block in self._blocks:
            block.written = event
            self._pool.give(block)
        self._results.append((str(call), differs, event))

    def spoil(self) -> None:
        """Makes all that is still sent a message of no call.

        A device goes on when its exchanges are cut off, and would send what it computes from what
        has not come.
        """
        if self._begun is not None:
            streams.overwrite(self.outgoing)

    def found(self) -> str | None:
        """Which call met messages of another one, as far as the device has got; else None."""
        while self._results:
            call, differs, event = self._results[0]
            if event is not None and not event.query():
                return None
            self._results.popleft()
            if differs.item():
                return f"{call} met messages of another call"
        return None
