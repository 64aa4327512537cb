"""Compute with many small values on the host."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_host() -> Iterator[None]:
    """Create tensors of plain data on the host, regardless of torch's default device."""
    # torch's context slows down every call of torch, which costs 10 % of a plan for 4096 ranks.
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, for code that makes millions of small values without cycles.

    Looking for cycles among them takes longer than making them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
