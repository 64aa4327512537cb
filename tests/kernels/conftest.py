"""Kernel tests run on the GPU where there is one, and else in Triton's interpreter."""

import os
import sys

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Triton decides between interpreter and compiler when it is imported, so this stands before any
# test module. Child processes inherit it.
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise pytest.UsageError(
            "triton was imported before tests/kernels/conftest.py could choose its interpreter, "
            "and there is no GPU to compile for: import triton inside the test function that needs "
            "it, or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> str:
    """Where kernels run: "cuda", or "cpu" for the interpreter."""
    return DEVICE
