"""Triton's CUDA driver over a stub of libcuda: kernels are compiled for sm_90, launched to nowhere.

Call `install` in a separate process before any kernel runs: a driver is chosen once. Tensors stay
on the CPU; their addresses go through Triton's launcher as those of a GPU would.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("stub_cuda.c")
SIZES = {"i32": 4, "fp32": 4, "i64": 8}


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("function", ctypes.c_uint64),
        ("args", ctypes.c_uint64 * 64),
    )


class StubDriver:
    """Reports the last launch and the number of launches."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.stub_last.restype = ctypes.POINTER(_Launch)

    @property
    def count(self) -> int:
        return int(self._library.stub_count())

    def watch(self, compiled: Any) -> None:
        """Reads later launches' arguments by this kernel's signature; for None, reads none."""
        sizes: list[int] = []
        for kind in compiled.src.signature.values() if compiled else ():
            if kind.startswith("tensordesc"):
                # The address, at the start of the stub's descriptor; then shape and strides.
                rank = kind.split("[")[1].split("]")[0].count(",") + 1
                sizes += [8, *rank * [4], *rank * [8]]
            elif kind != "constexpr":
                sizes.append(8 if kind.startswith("*") else SIZES[kind])
        self._library.stub_sizes(len(sizes), (ctypes.c_uint * len(sizes))(*sizes))
        self._num_args = len(sizes)

    def last(self) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """Grid, function and arguments (bit by bit) of the last launch."""
        launch = self._library.stub_last().contents
        return tuple(launch.grid), int(launch.function), tuple(launch.args[: self._num_args])


def install(folder: Path) -> StubDriver:
    """Builds the stub in a folder and makes Triton use it."""
    from triton.backends import nvidia

    include = Path(nvidia.__file__).parent / "include"
    library = folder / "libcuda.so.1"
    words = ["gcc", "-O1", "-w", "-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*words, "-o", str(library), str(SOURCE)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    # Every later dlopen of this soname finds this library.
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.driver import driver

    class Driver(CudaDriver):
        def __init__(self) -> None:
            super().__init__()
            self.get_device_capability = lambda device=0: (9, 0)
            self.get_current_stream = lambda device: 0
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    driver.set_active(Driver())
    return StubDriver(loaded)
