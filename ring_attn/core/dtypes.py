"""The one table of dtypes: inputs of attention, their names, and accumulation types."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

BY_NAME = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
SHORT_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}

DTYPES = tuple(BY_NAME.values())
HALF_DTYPES = (torch.float16, torch.bfloat16)


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the state and of travelling gradients: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def own_dtypes(device_type: str) -> AbstractContextManager[object]:
    """A context in which autocast, if it is on, leaves the dtypes of operators as they are."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
