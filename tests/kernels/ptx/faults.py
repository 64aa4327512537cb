"""Errors of a kernel: each names the instruction."""

from __future__ import annotations

from tests.kernels.ptx.parse import Instruction


class Fault(Exception):
    """An instruction is used wrongly."""

    def __init__(self, instruction: Instruction, reason: str) -> None:
        super().__init__(f"{reason}: {instruction}")
        self.instruction = instruction


class Unsupported(Fault):
    """An instruction that cannot be executed here."""

    def __init__(self, instruction: Instruction, reason: str = "") -> None:
        super().__init__(instruction, f"Unsupported{reason and ' ' + reason}")


class OutOfBounds(Fault):
    """An address is outside every allocation, or not aligned."""


class Race(Fault):
    """Two accesses to shared memory that nothing orders."""


class NotWaited(Race):
    """An access to bytes that an asynchronous operation may still read or write."""


class NotFenced(Race):
    """An access by the asynchronous proxy that is ordered, but lacks a proxy fence."""


class AssertFailed(Fault):
    """The kernel's own assertion, as of a sanitizer that is compiled into it."""


class Deadlock(Fault):
    """No thread can go on."""
