"""`set_step`: the number of the training step, part of every call's identity."""

from __future__ import annotations

from ring_attn.core.values import as_int

_step: int | None = None


def set_step(step: int | None) -> None:
    """Numbers the following calls of this process, on all groups, until the next `set_step`.

    Ranks tell calls apart by their order and arguments. So a rank that leaves out whole steps, such
    as by `except OutOfMemoryError: continue`, goes on with other batches than the other ranks, in
    silence if all calls are equal. With a number for each step, all ranks raise at the next call of
    ring_attn, forward or backward, and name both numbers.

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


def current_step() -> int | None:
    return _step
