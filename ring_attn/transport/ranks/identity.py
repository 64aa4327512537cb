"""The identity of a call: equal on all ranks exactly when all ranks make the same call.

A rank counts its calls on a group, and numbers its forwards; a backward has the number of its
forward. An identity has five parts:

    sequence   number of calls so far on this group: a call that was skipped or refused shifts it
    number     number of the forward: tells the backwards of two equal layers apart
    kind       forward, backward, decode, ...
    digest     hash of strategy, layout, mask, sizes, dtype, scale, ... by argument name
    values     checksum of the sinks

Every message carries its call's identity: on gloo as the message's tag, so that a message of
another call is never received; on NCCL, which has no tags, as 64 bytes that the device compares.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ring_attn.core.program import CHANNELS, Channel
from ring_attn.transport.base import Agreement

# gloo's tags are 32 bits, of which torch takes the lower 31.
TAG_BITS = 0x7FFFFFFF

_MESSAGE = struct.Struct("<BIQ")


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of one call of this rank."""

    sequence: int
    number: int
    kind: str
    agreement: Agreement
    values: int = 0  # 0 on CUDA, where only the device knows the checksum
    note: str = ""  # for error messages of other ranks; need not be equal

    def __str__(self) -> str:
        return f"{self.kind} {self.number}, call {self.sequence} of this group"

    def words(self) -> tuple[int, ...]:
        """The identity without `values`, as five int64."""
        digest = struct.unpack("<qq", self.agreement.digest)
        kind = zlib.crc32(self.kind.encode())
        return (self.sequence, self.number, kind, *digest)

    def seed(self) -> int:
        """The number from which the message tags are computed."""
        return zlib.crc32(struct.pack("<6q", *self.words(), self.values))

    def report(self) -> dict[str, str]:
        """The call as texts by argument, for other ranks."""
        report = {"call": f"{self.kind} {self.number}{self.note}", **self.agreement.texts}
        return report | ({"values of sinks": f"checksum {self.values}"} if self.values else {})


def message_tag(seed: int, channel: Channel, step: int, nbytes: int) -> int:
    """The tag of one message of a call, from the call's seed."""
    message = _MESSAGE.pack(CHANNELS.index(channel), step, nbytes)
    return zlib.crc32(message, seed) & TAG_BITS


def checksum(x: Tensor) -> Tensor:
    """A checksum of the tensor's bits and their order: 0-dim int64 on the tensor's device."""
    bits = x.detach().contiguous().view(-1).view(_INTEGERS[x.element_size()]).long()
    return (bits * torch.arange(1, 2 * bits.numel(), 2, device=x.device)).sum()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
