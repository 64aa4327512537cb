"""Identities that travel as 64 bytes beside each message, where a medium has no tags: on NCCL.

The device compares what has come with what is this rank's own, once for each call and without a
wait of the host. The host looks at the result of a call at the start of the next one on the same
group, if the device has got there by then, else at the start of a later one.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ring_attn.transport.ranks.identity import Identity

WORDS = 8
HEADER_BYTES = 8 * WORDS


class Headers:
    """Headers of one group's messages on one rank."""

    def __init__(self) -> None:
        """No call yet."""
        self._own: list[Tensor] = []
        self._received: list[Tensor] = []
        self._base: Tensor | None = None
        self._rows: dict[int, Tensor] = {}
        self._results: deque[tuple[str, Tensor, torch.cuda.Event | None]] = deque()

    def begin(self, call: Identity, device: torch.device, values: Tensor | None) -> None:
        """Writes the header of a call.

        Args:
            call: whose number, kind and digest are in it.
            device: of the messages.
            values: 0-dim int64, the checksum of tensors that must be equal on all ranks.
        """
        words = torch.tensor([*call.words(), *(WORDS - 5) * (0,)])
        base = words.pin_memory() if device.type == "cuda" else words
        self._base = base.to(device, non_blocking=True)
        if values is not None:
            self._base[5] = values
        self._rows.clear()
        self._own.clear()
        self._received.clear()

    def outgoing(self, step: int) -> Tensor:
        """The 64 bytes that this rank sends at a step."""
        if step not in self._rows:
            assert self._base is not None, "a call has begun"
            row = self._base.clone()
            row[6] = step
            self._rows[step] = row
        return self._rows[step].view(torch.uint8)

    def incoming(self, step: int, count: int) -> Tensor:
        """(count, 64) bytes to receive the headers of other ranks into, at a step."""
        own = self.outgoing(step)
        received = torch.empty(count, HEADER_BYTES, dtype=torch.uint8, device=own.device)
        self._own.append(own.expand(count, HEADER_BYTES))
        self._received.append(received)
        return received

    def end(self, call: Identity) -> None:
        """Compares on the device, when all exchanges of a call have been waited for."""
        if not self._received:
            return
        differs = torch.ne(torch.cat(self._received), torch.cat(self._own)).any()
        if not differs.is_cuda:
            self._results.append((str(call), differs, None))
            return
        result = torch.empty((), dtype=torch.bool, pin_memory=True)
        result.copy_(differs, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._results.append((str(call), result, event))

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
