"""The one table of dtypes: inputs of attention, their names, and accumulation types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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


# Type of the state and of gradients that are sent: float32, or float64 for float64 inputs.
accum_dtype: Callable[[torch.dtype], torch.dtype] = partial(torch.promote_types, torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch.", such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
