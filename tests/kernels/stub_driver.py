"""Triton's own driver and launcher of CUDA without a GPU, over a libcuda that computes nothing.

`libcuda.c` checks launches and tensor maps by CUDA's rules, and records them. Real are triton's
compiler as far as PTX, its driver, and its launchers in C. Kernels do not run.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest import mock

import triton.backends.nvidia
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import CUDABackend

from dev.compiled import active_driver
from dev.ptx import parse

SOURCE = Path(__file__).with_name("libcuda.c")
HEADERS = Path(triton.backends.nvidia.__file__).with_name("include")

# Of libcuda.c.
MAX_PARAM_BYTES, MAX_LAUNCHES = 4096, 4096

# Bytes of types of parameters in PTX.
BITS = re.compile(r"\.(?:[bufs])(8|16|32|64)\b")
ARRAY = re.compile(r"\[(\d+)\]")

STREAM = 0x7000

# What the stub launches; see `launching`.
Kernels = Literal["described", "compiled", "prepared"]


class Record(ctypes.Structure):
    """A launch, as libcuda.c records it."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("num_attributes", ctypes.c_uint),
        ("stream", ctypes.c_ulonglong),
        ("num_bytes", ctypes.c_size_t),
        ("params", ctypes.c_ubyte * MAX_PARAM_BYTES),
    )


class Launched(NamedTuple):
    """What CUDA gets of a launch; `params` are the bytes of all parameters, one after another."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    num_attributes: int
    stream: int
    params: bytes


class TensorMap(NamedTuple):
    """A tensor map in the stub's format: dims from the last one on, strides in bytes."""

    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @classmethod
    def of(cls, data: bytes) -> TensorMap:
        fields = memoryview(data).cast("Q").tolist()
        rank = fields[1]
        box = fields[12].to_bytes(8, "little")
        return cls(
            address=fields[0],
            dims=tuple(fields[2 : 2 + rank]),
            strides=tuple(fields[7 : 7 + rank]),
            box=tuple(size + 1 for size in box[:rank]),
            swizzle=fields[13],
        )


class StubDriver(nvidia.CudaDriver):
    """Triton's driver for an H100 that does not exist."""

    def __init__(self) -> None:
        # Not the initialiser of the base class, which asks torch for a GPU.
        self._libcuda = _stub().library
        # A copy: Triton has one object for the process, whose functions each driver makes anew.
        self.utils = SimpleNamespace(**vars(nvidia.CudaUtils()))
        self._load_binary = self.utils.load_binary
        self.utils.load_binary = self._load
        self.launcher_cls = nvidia.CudaLauncher
        self.get_device_capability = lambda device=0: (9, 0)
        self.get_current_stream = lambda device=0: STREAM
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None

    def _load(self, name: str, image: bytes, *others: Any) -> Any:
        return self._load_binary(name, image_for_stub(name, image), *others)

    @property
    def num_launches(self) -> int:
        """Number of accepted launches."""
        return int(self._libcuda.stub_num_launches())

    @property
    def num_maps(self) -> int:
        """Number of tensor maps that were asked for, with those that were refused."""
        return int(self._libcuda.stub_num_maps())

    def forget(self) -> None:
        """Drop the records of launches, and count launches and maps from 0 again."""
        self._libcuda.stub_forget()

    def last(self, count: int) -> list[Launched]:
        """The last launches, the latest one at the end."""
        end = self.num_launches
        found = list[Launched]()
        for number in range(max(0, end - count), end):
            record = self._libcuda.stub_launch(number).contents
            found.append(
                Launched(
                    kernel=record.kernel.decode(),
                    grid=tuple(record.grid),
                    block=tuple(record.block),
                    shared_bytes=record.shared_bytes,
                    num_attributes=record.num_attributes,
                    stream=record.stream,
                    params=bytes(record.params[: record.num_bytes]),
                )
            )
        return found


@contextmanager
def launching(kernels: Kernels = "described") -> Iterator[StubDriver]:
    """Launch kernels through triton's driver and the stub, within the context.

    Args:
        kernels: "described" ones are compiled as far as PTX; no GPU may load them, so triton's
            cache is one of their own. "compiled" ones get machine code, and triton's cache is used
            as it is. "prepared" ones are in that cache: a kernel that it lacks is an error.
    """
    with ExitStack() as stack:
        stack.enter_context(knobs.cache.scope())
        stack.enter_context(knobs.nvidia.scope())
        last_stage = LAST_STAGES.get(kernels)
        if last_stage is not None:
            stack.enter_context(mock.patch.object(CUDABackend, "make_cubin", last_stage))
        if kernels == "described":
            knobs.cache.dir = f"{knobs.cache.dir}-stub"
        knobs.nvidia.libcuda_path = _stub().folder.name  # to link with
        driver = StubDriver()
        stack.enter_context(active_driver(driver))
        yield driver


def c_compiler() -> str | None:
    """The C compiler, as triton chooses it."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


class Stub(NamedTuple):
    """The loaded library, and its folder, which is removed when the process ends."""

    library: ctypes.CDLL
    folder: tempfile.TemporaryDirectory[str]


@cache
def _stub() -> Stub:
    """Compile and load the library: triton's driver then finds it by its name in this process."""
    compiler = c_compiler()
    if compiler is None:
        raise RuntimeError("no C compiler was found: install gcc, or set CC")
    folder = tempfile.TemporaryDirectory()
    path = f"{folder.name}/libcuda.so.1"
    options = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", f"-I{HEADERS}"]
    subprocess.run([compiler, *options, str(SOURCE), "-o", path], check=True)
    library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    library.stub_launch.restype = ctypes.POINTER(Record)
    return Stub(library, folder)


def _sizes_of_parameters(
    backend: Any, ptx: str, metadata: Any, options: Any, capability: int
) -> bytes:
    """What stands for machine code: the sizes that libcuda.c reads."""
    sizes = list[str]()
    for param in parse(ptx).params.split(","):
        bits, count = BITS.search(param), ARRAY.search(param)
        assert bits is not None, param
        sizes.append(str(int(bits[1]) // 8 * int(count[1] if count else 1)))
    return " ".join(sizes).encode()


def _refuse_to_compile(
    backend: Any, ptx: str, metadata: dict[str, Any], options: Any, capability: int
) -> bytes:
    raise RuntimeError(
        f"{metadata['name']} is not among the prepared kernels: python -m dev gpu --prepare must "
        "compile what this cell launches"
    )


# The last stage of triton's compiler; with machine code it is triton's own.
LAST_STAGES: Mapping[Kernels, Callable[..., bytes]] = {
    "described": _sizes_of_parameters,
    "prepared": _refuse_to_compile,
}


# -- sizes of parameters of machine code

# In sections .nv.info: a format (here one of values with a size), an attribute, the size of its
# value, and the value.
SIZED, PARAMETER = 4, 0x17
ATTRIBUTE = struct.Struct("<BBH")
# Index, ordinal, offset, and a word whose upper bits are the size.
PARAMETER_INFO = struct.Struct("<IHHI")
SIZE_SHIFT = 18
SECTION = struct.Struct("<IIQQQQIIQQ")


def image_for_stub(kernel: str, image: bytes) -> bytes:
    """Return what libcuda.c loads: the sizes of the parameters, also of machine code."""
    if not image.startswith(b"\x7fELF"):
        return image
    sizes = dict[int, int]()
    info = section_of(image, f".nv.info.{kernel}")
    at = 0
    while at < len(info):
        form, attribute, size = ATTRIBUTE.unpack_from(info, at)
        at += ATTRIBUTE.size
        if form != SIZED:
            continue  # the value is in the place of its size
        if attribute == PARAMETER:
            _, ordinal, _, word = PARAMETER_INFO.unpack_from(info, at)
            sizes[ordinal] = word >> SIZE_SHIFT
        at += size
    if sorted(sizes) != list(range(len(sizes))) or not sizes:
        raise ValueError(f"the machine code of {kernel} does not list its parameters: {sizes}")
    return " ".join(str(sizes[ordinal]) for ordinal in range(len(sizes))).encode()


def section_of(image: bytes, name: str) -> bytes:
    """Return a section of an ELF file of 64 bits."""
    (start,) = struct.unpack_from("<Q", image, 0x28)
    _, count, names = struct.unpack_from("<HHH", image, 0x3A)
    sections = [SECTION.unpack_from(image, start + i * SECTION.size) for i in range(count)]
    texts = sections[names][4]
    for section in sections:
        begin = texts + section[0]
        if image[begin : image.index(b"\0", begin)].decode() == name:
            return image[section[4] : section[4] + section[5]]
    raise ValueError(f"the machine code has no section {name}")
