"""Runs launches from their PTX: another process compiles them, this one executes on CPU tensors.

This process uses Triton's interpreter (TRITON_INTERPRET=1), which cannot compile.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ring_attn.kernels import configs
from ring_attn.kernels.launch import Launch
from tests.kernels.ptx import tensor  # noqa: F401  (it and what it imports add instructions)
from tests.kernels.ptx.copies import TensorMap
from tests.kernels.ptx.faults import NotFenced
from tests.kernels.ptx.machine import run_grid
from tests.kernels.ptx.memory import GlobalMemory
from tests.kernels.ptx.parse import parse

# Bytes of a swizzled row for each value of CUtensorMapSwizzle.
SWIZZLE_BYTES = (0, 32, 64, 128)


@dataclass(frozen=True)
class Compiled:
    """A compiled launch.

    Attributes:
        signature: type of each argument by name; "constexpr" for compile-time constants.
        descriptors: box, swizzle and the like of each tensor descriptor, in order.
        scratch_bytes: memory that each program of a sanitized kernel has for itself.
    """

    ptx: str
    shared_bytes: int
    signature: Mapping[str, str]
    descriptors: tuple[Mapping[str, Any], ...]
    scratch_bytes: int = 0


@contextmanager
def executing(arch: str, seed: int | None = None) -> Iterator[list[Launch]]:
    """Gives launches the configs of `arch` and executes their PTX; yields the list of launches."""
    executed = list[Launch]()

    def run(launch: Launch) -> None:
        if all(launch.grid):
            executed.append(launch)
            missing = execute(launch, compiled(launch, arch), seed=seed)
            assert not missing, "proxy fences are missing"

    with (
        mock.patch.object(configs, "architecture", lambda device: arch),
        mock.patch.object(Launch, "run", run),
    ):
        yield executed


def execute(
    launch: Launch, code: Compiled, edit: Callable[[str], str] = str, seed: int | None = None
) -> list[NotFenced]:
    """Executes a compiled launch; writes results to the tensors of the launch.

    Args:
        launch: launch over CPU tensors.
        code: the compiled launch.
        edit: changes the PTX, to plant a fault.
        seed: draws the order in which warpgroups run.

    Returns:
        The missing proxy fences.
    """
    values = {**launch.args, **launch.constants}
    tensors = [x if isinstance(x, Tensor) else getattr(x, "base", None) for x in values.values()]
    scratch = torch.full((code.scratch_bytes * math.prod(launch.grid),), 0xFF, dtype=torch.uint8)
    memory = GlobalMemory([*(x for x in tensors if x is not None), scratch])
    kernel = parse(edit(code.ptx))
    params = iter(kernel.params)
    args: dict[str, int] = {}
    tensor_maps: dict[str, TensorMap] = {}
    metas = iter(code.descriptors)
    for name, kind in code.signature.items():
        value = values[name]
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            meta = next(metas)
            tensor_maps[next(params)] = TensorMap(
                memory.address(value.base),
                value.shape,
                value.strides,
                meta["elem_size"],
                meta["block_size"],
                SWIZZLE_BYTES[meta["swizzle"]],
            )
            for number in (*value.shape, *value.strides):
                args[next(params)] = number
        elif isinstance(value, Tensor):
            args[next(params)] = memory.address(value)
        else:
            bits = (
                struct.unpack("<I", struct.pack("<f", value))[0] if kind == "fp32" else int(value)
            )
            args[next(params)] = bits & (1 << 64) - 1
    # Scratch memory, which our kernels do not need, but a sanitizer; and memory for a profiler.
    args[next(params)] = memory.address(scratch)
    args |= dict.fromkeys(params, 0)
    missing = run_grid(
        kernel,
        args,
        memory,
        code.shared_bytes,
        launch.grid,
        tensor_maps=tensor_maps,
        seed=seed,
        noting=not code.scratch_bytes,
    )
    memory.write_back()
    return missing


# -- compiling


def compiled(launch: Launch, arch: str, instrument: str = "") -> Compiled:
    """Compiles a launch as Triton would for a GPU of this architecture.

    Triton adds its sanitizer `instrument`: "consan" finds races in shared memory.
    """
    kernel = launch.kernel.fn
    name = f"{kernel.__module__}:{kernel.__name__}"
    return _compiler().submit(_compile, replace(launch, kernel=name), arch, instrument).result()


@cache
def _compiler() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with mock.patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        pool.submit(os.getpid).result()
    return pool


def _compile(launch: Launch, arch: str, instrument: str) -> Compiled:
    """Compiles a launch as far as PTX; runs in the other process."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    from dev.compiled import compiled_kernel

    module, name = launch.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    # No GPU may load these kernels, whose machine code is missing: a cache of their own.
    no_machine_code = mock.patch.object(CUDABackend, "make_cubin", lambda *args: b"")
    with knobs.cache.scope(), knobs.compilation.scope(), no_machine_code:
        knobs.cache.dir = f"{knobs.cache.dir}-ptx"
        knobs.compilation.disable_line_info = True  # saves 15 % of the time
        knobs.compilation.instrumentation_mode = instrument
        made = compiled_kernel(replace(launch, kernel=kernel), arch)
    metas = tuple(getattr(made.metadata, "tensordesc_meta", None) or ())
    meta = made.metadata
    return Compiled(
        made.asm["ptx"], meta.shared, dict(made.src.signature), metas, meta.global_scratch_size
    )
