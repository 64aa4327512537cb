"""Lines of progress of commands whose work is done by ranks, which are other processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ring_attn.cli.arguments import progress, signs_of_life
from ring_attn.testing.launch import under_torchrun


def leave_to_ranks() -> None:
    """Leave the lines of this command to rank 0, if it is another process; see `lines_of_rank`."""
    progress.by_rank = not under_torchrun()


def lines_of_rank(name: str) -> AbstractContextManager[object]:
    """Return the context in which rank 0 writes signs of life, unless the command's do it."""
    return nullcontext() if under_torchrun() else signs_of_life(name)
