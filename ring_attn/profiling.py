"""Measuring a call: the most memory that it holds at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(fn: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Most bytes of tensors that `fn` holds at a time beyond what was there before.

    On CPU every allocation is counted, those inside of torch's operators too; on CUDA the caching
    allocator's own count is read.

    Args:
        fn: what is measured; its result is kept until the count is read.
        device: where it allocates.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = fn()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as run:
        result = fn()
    kineto = run.profiler.kineto_results
    allocations = [(e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]"]
    held = most = 0
    for _, nbytes in sorted(allocations, key=lambda event: event[0]):
        held += nbytes
        most = max(most, held)
    del result
    return most
