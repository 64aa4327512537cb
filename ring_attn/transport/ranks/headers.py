"""Identities that travel as 64 bytes beside each message on NCCL, which has no tags.

The device compares the headers that came with this rank's own, once per call, and the host does not
wait. The host reads a call's result at the start of the group's next call, of a later call if the
device has not finished by then, or in a check, which waits for it.
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

# Headers per buffer; a call with more exchanges takes several buffers.
ROWS = 256


class Headers:
    """Headers of one group's messages on one rank."""

    def __init__(self) -> None:
        self._own: Tensor | None = None
        self._begun: Event | None = None
        self._pool: Pool | None = None
        # The call's buffers, and the number of used rows in each buffer.
        self._blocks: list[Block] = []
        self._rows: list[int] = []
        self._results: deque[tuple[str, Tensor, Event]] = deque()

    def begin(
        self, call: Identity, device: torch.device, values: Tensor | None, pool: Pool
    ) -> None:
        """Writes the header of a call.

        `values` is a checksum, 0-dim int64, of tensors that must be equal on all ranks; other
        ranks' headers are received into buffers of the pool.
        """
        words = torch.tensor([*call.words(), *(WORDS - 6) * (0,)])
        own = streams.pinned(words, device).to(device, non_blocking=True)
        if values is not None:
            own[6] = values
        self._own, self._pool = own.view(torch.uint8), pool
        self._begun = streams.record(device)
        self._blocks, self._rows = [], []

    @property
    def outgoing(self) -> Tensor:
        """The 64 bytes that this rank sends with each message."""
        assert self._own is not None, "a call has begun"
        return self._own

    def incoming(self, count: int) -> tuple[Tensor, list[Event]]:
        """(count, 64) bytes to receive other ranks' headers, and events to wait for before that."""
        if not self._blocks or self._rows[-1] + count > ROWS:
            assert self._pool is not None, "a call has begun"
            self._blocks.append(self._pool.take(max(count, ROWS) * HEADER_BYTES))
            self._rows.append(0)
        block, taken = self._blocks[-1], self._rows[-1]
        rows = block.data.view(-1, HEADER_BYTES)[taken : taken + count]
        self._rows[-1] += count
        return rows, [event for event in (self._begun, block.written) if event is not None]

    def end(self, call: Identity) -> None:
        """Compares all headers on the device, after the waits for all exchanges of a call."""
        if not self._blocks:
            return
        rows = [
            block.data.view(-1, HEADER_BYTES)[:taken]
            for block, taken in zip(self._blocks, self._rows, strict=True)
        ]
        differs = torch.cat([block.ne(self.outgoing).any().view(1) for block in rows]).any()
        device = differs.device
        result = streams.pinned(torch.empty((), dtype=torch.bool), device)
        result.copy_(differs, non_blocking=True)
        event = streams.record(device)
        assert self._pool is not None, "a call has begun"
        for block in self._blocks:
            block.written = event
            self._pool.give(block)
        self._results.append((str(call), result, event))

    @property
    def settled(self) -> bool:
        """Whether the device has compared all calls that have ended on the host."""
        return all(event.query() for _, _, event in self._results)

    def found(self) -> str | None:
        """The first error among the calls that the device has compared so far, or None."""
        while self._results:
            call, differs, event = self._results[0]
            if not event.query():
                return None
            self._results.popleft()
            if differs.item():
                return f"{call} met messages of another call"
        return None
