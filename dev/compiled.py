"""`compile_launch`: compilation of a kernel launch for a GPU that this machine may not have.

The launch uses triton's own launcher with a stub driver. Therefore triton specialises the kernel
(alignment, divisibility by 16, arguments equal to 1) as it would on such a GPU.

`Any` in this module: compiled kernels and drivers of triton, which have no types.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dev.loops import Loop, loops_of
from dev.proxy_fences import missing_fences
from dev.tensor_loads import early_reads
from ring_attn.kernels.launch import Launch

# A wavefront of CDNA has 64 lanes.
WARP_SIZE = {"cuda": 32, "hip": 64}

# Instructions to count in the machine code.
TMA = ("UTMALDG", "UTMASTG", "UTMAREDG")
OPCODES = {
    "HGMMA": re.compile(r"\bHGMMA\b"),
    "HMMA": re.compile(r"\bHMMA\b"),
    "UTCHMMA": re.compile(r"\bUTC\w*MMA\b"),
    "mfma": re.compile(r"\bv_s?mfmac?_"),
    **{name: re.compile(rf"\b{name}\b") for name in TMA},
    "LDGSTS": re.compile(r"\bLDGSTS\b"),
    "USETMAXREG": re.compile(r"\bUSETMAXREG\b"),
}

# In TTGIR: layouts by name, the tensors that are reduced, and the results of products.
LAYOUT = re.compile(r"^(#\w+) = (.*)$", re.MULTILINE)
REDUCED = re.compile(r'"tt\.reduce".*?\}\) : \((.*?)\) ->', re.DOTALL)
PRODUCT = re.compile(r"= (?:tt\.dot|ttng\.warp_group_dot) .*-> tensor<[^>]*, (#\w+)>|(tc_gen5_mma)")
INSTRUCTION = re.compile(r"version\w* = \d+|instrShape = \[[^]]*\]")

# The advisories of ptxas such as C7510, "wgmma.mma_async instructions are serialized due to".
SERIALIZED = re.compile(r"\(C75\d\d\).*|wgmma\S* .*serialized.*")


@dataclass(frozen=True)
class Compiled:
    """Resources and instructions of a compiled kernel.

    Attributes:
        registers: registers per thread; on AMD vector registers with accumulation registers.
        spill_bytes: the stack frame or the spilled bytes per thread, whichever is larger.
        shared_bytes: shared memory per program.
        tensor_memory: columns of tensor memory, on sm_100.
        opcodes: counts of OPCODES in the machine code.
        advisories: lines of ptxas about serialised wgmma instructions.
        seconds: compile time.
        loops: the loops of SASS that have products or spills, with outer loops.
        missing_fences: products in the PTX that may read before a proxy fence; see `proxy_fences`.
        early_reads: see `tensor_loads`.
        order: see `order_of_sums`.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_memory: int
    opcodes: Mapping[str, int]
    advisories: tuple[str, ...]
    seconds: float
    loops: tuple[Loop, ...] = ()
    missing_fences: tuple[str, ...] = ()
    early_reads: tuple[str, ...] = ()
    order: str = ""

    @property
    def warp_specialized(self) -> bool:
        """Whether warps reallocate registers, as only specialised warps do."""
        return self.opcodes["USETMAXREG"] > 0


@dataclass(frozen=True)
class CompiledRow:
    """Result of a cell; `report` is None if the cell did not compile."""

    kernel: str
    variant: str
    arch: str
    head_dim: int
    dtype: str
    tile: str
    num_warps: int
    num_stages: int
    report: Compiled | None
    failures: tuple[str, ...]
    head_dim_v: int | None = None

    @property
    def head_dims(self) -> str:
        return "/".join(str(dim) for dim in (self.head_dim, self.head_dim_v) if dim is not None)


class CompileError(RuntimeError):
    """An error of triton or ptxas, in one line."""


def interpreting() -> bool:
    """Return whether TRITON_INTERPRET=1; kernels of the interpreter cannot be compiled."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def compile_launch(launch: Launch, arch: str) -> Compiled:
    """Compile `launch` for an architecture, such as "sm_90" or "gfx942".

    Raises:
        CompileError: triton or ptxas fails.
    """
    from triton import knobs

    with (
        tempfile.TemporaryDirectory() as folder,
        knobs.cache.scope(),
        knobs.compilation.scope(),
        knobs.nvidia.scope(),
    ):
        # A cached kernel would have no ptxas log.
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        start = time.perf_counter()
        kernel, log = _compile(launch, arch)
        seconds = time.perf_counter() - start
    return _report(kernel, log, seconds)


def compiled_kernel(launch: Launch, arch: str) -> Any:
    """Return triton's compiled kernel, with the text of every stage, from its cache if possible."""
    kernel, _ = _compile(launch, arch)
    return kernel


class CompileTarget:
    """A driver that replaces triton's GPU driver while a kernel is compiled."""

    def __init__(self, arch: str) -> None:
        from triton.backends.compiler import GPUTarget

        if arch.startswith("sm_"):
            self._target = GPUTarget("cuda", int(arch.removeprefix("sm_")), WARP_SIZE["cuda"])
        else:
            self._target = GPUTarget("hip", arch, WARP_SIZE["hip"])

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> object:
        """Return a new object each time, because triton caches compiled kernels by device."""
        return object()

    def get_current_stream(self, device: object) -> int:
        return 0


@contextlib.contextmanager
def active_driver(driver: Any) -> Iterator[None]:
    """Make `driver` triton's active driver within the context."""
    from triton.runtime import driver as drivers

    try:
        before = drivers.active
    except RuntimeError:  # there is no GPU
        before = None
    drivers.set_active(driver)
    try:
        yield
    finally:
        drivers.set_active(before)


def _compile(launch: Launch, arch: str) -> tuple[Any, str]:
    """Return (triton's compiled kernel, output of ptxas)."""
    if interpreting():
        raise RuntimeError("kernels cannot be compiled with TRITON_INTERPRET=1: unset it")
    log = io.StringIO()
    with (
        active_driver(CompileTarget(arch)),
        _stderr_of_process() as errors,
        contextlib.redirect_stdout(log),
    ):
        try:
            kernel = launch.warmup()
        except Exception as error:
            raise CompileError(_reason(error, errors())) from error
    return kernel, log.getvalue()


@contextlib.contextmanager
def _stderr_of_process() -> Iterator[Callable[[], str]]:
    """Capture the stderr of the compiler; yield a function that returns it."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:

        def read() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        os.dup2(file.fileno(), 2)
        try:
            yield read
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _reason(error: BaseException, output: str) -> str:
    """Return the root exception and the compiler's first error, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r" at 0x[0-9a-f]+", "", lines[-1]) if lines else type(error).__name__
    compiler_errors = re.findall(r"\berror: (.*)", output)
    return f"{text}: {compiler_errors[0]}" if compiler_errors else text


def _report(kernel: Any, log: str, seconds: float) -> Compiled:
    if "cubin" in kernel.asm:
        code = _sass(kernel.asm["cubin"])
        registers, spill_bytes = _ptxas_figures(log)
    else:
        code = kernel.asm["amdgcn"]
        registers, spill_bytes = _amd_figures(code)
    return Compiled(
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=kernel.metadata.shared,
        tensor_memory=getattr(kernel.metadata, "tmem_size", None) or 0,
        opcodes={name: len(pattern.findall(code)) for name, pattern in OPCODES.items()},
        advisories=tuple(match[0] for match in SERIALIZED.finditer(log)),
        seconds=seconds,
        loops=tuple(loop for loop in loops_of(code) if loop.products or loop.spills),
        missing_fences=missing_fences(kernel.asm["ptx"]) if "ptx" in kernel.asm else (),
        early_reads=early_reads(kernel.asm.get("ptx", "")),
        order=order_of_sums(kernel.asm["ttgir"]),
    )


def order_of_sums(ttgir: str) -> str:
    """Return a hash of everything on which the order of a kernel's sums depends.

    The order depends on the layout of every reduced tensor, and on the instruction of every
    product. It does not depend on how warps share a product, because one thread sums an element.
    """
    layouts = dict(LAYOUT.findall(ttgir))

    def resolved(text: str) -> str:
        return re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), text)

    sums = {resolved(tensors) for tensors in REDUCED.findall(ttgir)}
    products = {
        own or " ".join(INSTRUCTION.findall(layouts[name])) for name, own in PRODUCT.findall(ttgir)
    }
    text = repr((sorted(sums), sorted(products)))
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _sass(cubin: bytes) -> str:
    """Return the disassembled machine code."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, check=True, text=True, capture_output=True).stdout


def _ptxas_figures(log: str) -> tuple[int, int]:
    """Return (registers, spilled bytes) from the output of `ptxas -v`."""
    registers = re.findall(r"Used (\d+) registers", log)
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    return max(map(int, registers)), max(int(size) for frame in frames for size in frame)


def _amd_figures(code: str) -> tuple[int, int]:
    """Return (vector registers, spilled bytes) from the metadata at the end of the assembly."""
    figures = dict(re.findall(r"\.(\w+):\s+(\d+)$", code, re.MULTILINE))
    spilled = 4 * int(figures["vgpr_spill_count"])
    return int(figures["vgpr_count"]), max(spilled, int(figures["private_segment_fixed_size"]))
