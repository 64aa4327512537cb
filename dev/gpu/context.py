"""Importing this module makes CUDA's context, so that no cell's limit pays for it.

Workers of the plan import it before they are ready. Those that fork ranks must not: a process that
has used CUDA cannot fork others that use it.
"""

from __future__ import annotations

from dev.gpu import device

if device.name() == device.CUDA:
    import torch

    torch.zeros(1, device=device.CUDA)
    torch.cuda.synchronize()
