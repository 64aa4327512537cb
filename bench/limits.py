"""Limits of sizes: tensors that no memory of this machine holds are refused before a run."""

from __future__ import annotations

import torch

from ring_attn.testing.launch import machine_bytes, under_torchrun
from ring_attn.values.outside import env_int


def check_tensors(what: str, nbytes: int, device: str, *, world_size: int = 1) -> None:
    """Refuse tensors that need more than the memory of a GPU, or of this machine's CPUs.

    Args:
        what: the tensors, for the message.
        nbytes: bytes of the tensors of all ranks.
        device: "cpu" or "cuda".
        world_size: ranks that share the tensors evenly, of which torchrun may have started some on
            other machines.

    Raises:
        ValueError: the tensors need more memory.
    """
    if device == "cuda":
        needed, memory = nbytes // world_size, torch.cuda.get_device_properties(0).total_memory
    else:
        num_local = env_int("LOCAL_WORLD_SIZE", 1) if under_torchrun() else world_size
        needed, memory = nbytes * min(num_local, world_size) // world_size, machine_bytes()
    if needed > memory:
        where = "a GPU" if device == "cuda" else "this machine"
        raise ValueError(
            f"{what} need at least {needed / 2**30:.4g} GiB, and {where} has "
            f"{memory / 2**30:.4g} GiB: pass smaller sizes"
        )
