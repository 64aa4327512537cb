"""The identity of a call: equal on all ranks exactly when all ranks make the same call.

A rank counts its calls on a group, and numbers its forwards; a backward has the number of its
forward. An identity has six parts:

    sequence   number of calls so far on this group: a call that was skipped or refused shifts it
    number     number of the forward: distinguishes the backwards of two equal layers
    kind       forward, backward, decode, ...
    digest     hash of strategy, layout, mask, sizes, dtype, scale, ... by argument name
    step       last number passed to `set_step`: distinguishes equal calls of two steps
    values     checksum of the sinks

Every message carries its call's identity: on gloo as the message's tag, so that a message of
another call is never received; on NCCL, which has no tags, as 64 bytes that the device compares.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ring_attn.core.facts import Facts
from ring_attn.core.program import CHANNELS, Channel
from ring_attn.transport.base import Agreement, as_facts
from ring_attn.transport.ranks.errors import REFUSED
from ring_attn.values.checks import as_int

# gloo's tags are 32 bits, of which torch takes the lower 31.
TAG_BITS = 0x7FFFFFFF

_MESSAGE = struct.Struct("<BIQ")


_step: int | None = None


def set_step(step: int | None) -> None:
    """Number the following calls of this process, on all groups, until the next `set_step`.

    Ranks distinguish calls by their order and arguments. So a rank that leaves out whole steps,
    such as by `except OutOfMemoryError: continue`, goes on with other batches than the other ranks,
    in silence if all calls are equal. With a number for each step, all ranks raise at the next call
    of ring_attn, forward or backward, and name both numbers.

    Args:
        step: number of the step, at least 0, the same on every rank; None for no number.

    Raises:
        ValueError: a negative number.
        TypeError: not an int.

    Example:
        >>> for step in range(3):
        ...     set_step(step)  # then the step's forward and backward
        >>> set_step(None)
    """
    global _step
    _step = None if step is None else as_int("step", step, least=0)


def debug_enabled() -> bool:
    """Return whether RING_ATTN_DEBUG is set to anything but 0."""
    return os.environ.get("RING_ATTN_DEBUG", "0") not in ("", "0")


def current_step() -> int | None:
    return _step


@dataclass(frozen=True)
class Identity:
    """Identity of one call of this rank."""

    sequence: int
    number: int
    kind: str
    agreement: Agreement
    values: int = 0  # 0 on CUDA, where only the device knows the checksum
    step: int | None = field(default_factory=current_step)
    note: str = ""  # for error messages of other ranks; need not be equal

    def __str__(self) -> str:
        return f"{self.kind} {self.number}, call {self.sequence} of this group"

    def words(self) -> tuple[int, ...]:
        """Return the identity without `values`, as six int64."""
        digest = struct.unpack("<qq", self.agreement.digest)
        kind = zlib.crc32(self.kind.encode())
        step = -1 if self.step is None else self.step
        return (self.sequence, self.number, kind, *digest, step)

    @cached_property
    def seed(self) -> int:
        """A hash of the call: its message tags are computed from it, and graphs send it."""
        return zlib.crc32(struct.pack("<7q", *self.words(), self.values))

    @property
    def details(self) -> str:
        """The layouts and the mask of the call, to find where they differ."""
        return self.agreement.details

    def report(self) -> Facts:
        """Return the call by argument, for other ranks."""
        # Not numbered: a rank that refuses a call does not know whether it is a backward.
        call = self.kind if self.kind == REFUSED else f"{self.kind} {self.number}"
        checksums = {"sinks": self.values} if self.values else {}
        texts = report_values(self.step, checksums)
        return {"call": (f"{call}{self.note}", call), **as_facts(texts), **self.agreement.report}


def report_values(step: int | None, checksums: Mapping[str, int]) -> dict[str, str]:
    """Return texts, by name, of a step's number and of checksums of tensors."""
    texts = {f"values of {name}": f"checksum {values}" for name, values in checksums.items()}
    return texts if step is None else {"step": str(step), **texts}


def message_tag(seed: int, channel: Channel, step: int, nbytes: int) -> int:
    """Return the tag of one message of a call, from the call's seed."""
    message = _MESSAGE.pack(CHANNELS.index(channel), step, nbytes)
    return zlib.crc32(message, seed) & TAG_BITS


def checksum(x: Tensor) -> Tensor:
    """Return a hash of the tensor's bits in their places: 0-dim int64 on the tensor's device."""
    bits = x.detach().contiguous().view(-1).view(_INTEGERS[x.element_size()]).long()
    # Odd factors lose nothing modulo 2^64; without the shifts between them the sum were linear, and
    # changes of several elements could cancel each other.
    mixed = bits * 0x1E3779B97F4A7C15 + torch.arange(bits.numel(), device=x.device)
    mixed = (mixed ^ (mixed >> 31)) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x14D049BB133111EB
    return (mixed ^ (mixed >> 30)).sum()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
