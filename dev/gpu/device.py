"""The device of a worker: a GPU, or in a trial the CPU, where Triton's interpreter runs kernels.

A trial (`--device cpu`) has small sizes and float16, since the interpreter has no bfloat16. With
`--device stub` sizes and kernels are those of a GPU, and Triton launches over a stub of libcuda,
which checks launches and computes nothing. `--prepare` compiles kernels in the same way.
"""

from __future__ import annotations

import os
from typing import Any

from dev.gpu.cells import NotHere

VARIABLE = "RING_ATTN_GPU_DEVICE"

# The folder of the run's results, for cells that write files.
FOLDER = "RING_ATTN_GPU_OUT"
CUDA, CPU = "cuda", "cpu"
# No device: kernels are launched over tests/kernels/libcuda.c, and their results are ones.
STUB = "stub"
# As the stub, but each kernel is compiled for sm_90, with its machine code.
COMPILER = "compiler"

# Threads of a worker on a machine with a GPU, where several workers share the cores.
THREADS = 4

# Factor of all limits in a trial, which may share its cores with other work.
PATIENCE = 10.0

# Seconds of a cell that may compile all its kernels.
COMPILER_LIMIT = 900.0

# Set where a carried folder has the kernels; over the stub none may then be missing.
CARRIED = "RING_ATTN_GPU_CARRIED"


def name() -> str:
    return os.environ.get(VARIABLE, CUDA)


def is_trial() -> bool:
    return name() == CPU


def is_pretended() -> bool:
    """Whether kernels are launched over the stub of libcuda."""
    return name() in (STUB, COMPILER)


def compiles() -> bool:
    """Whether cells may compile all their kernels."""
    return is_pretended() and not is_carried()


def is_carried() -> bool:
    return CARRIED in os.environ


def where() -> str:
    """torch's name of the device; without a GPU it may be a pretended one."""
    return CPU if is_trial() else CUDA


def environment(device: str) -> dict[str, str]:
    """Variables of the workers of a run."""
    variables = {
        VARIABLE: device,
        # A refused backend would hide what is wrong with it.
        "RING_ATTN_FIRST_USE": "off",
        "PYTHONUNBUFFERED": "1",
        # Plugins of the machine could refuse our options, and take time in each cell.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    if device == CUDA:
        variables["OMP_NUM_THREADS"] = str(THREADS)
    if device == CPU:
        variables |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if device in (STUB, COMPILER):
        variables |= {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return variables


def need_cuda(why: str) -> None:
    """Raise NotHere in a trial."""
    if is_trial():
        raise NotHere(f"needs a GPU: {why}")


def dtype() -> Any:
    import torch

    return torch.float16 if is_trial() else torch.bfloat16


class Compilations:
    """Counts kernels that triton compiled and kernels that it found in its cache."""

    def __init__(self) -> None:
        self.compiled = self.found = 0

    def __call__(self, *, cache_hit: bool, **_: Any) -> None:
        self.found += bool(cache_hit)
        self.compiled += not cache_hit

    def __enter__(self) -> Compilations:
        from triton import knobs

        knobs.compilation.listener = self
        return self

    def __exit__(self, *_: object) -> None:
        from triton import knobs

        knobs.compilation.listener = None

    @property
    def figures(self) -> dict[str, int]:
        return {"compiled": self.compiled, "found": self.found}
