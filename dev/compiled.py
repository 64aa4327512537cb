"""`compile_launch`: compiles a kernel launch for a GPU that this machine need not have.

The launch goes through triton's own launcher with a stub driver. So triton specialises the kernel
(alignment, divisibility by 16, arguments equal to 1) as it would on such a GPU.
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

# The advisories of ptxas: C7510 and its like, "wgmma.mma_async instructions are serialized due to".
SERIALIZED = re.compile(r"\(C75\d\d\).*|wgmma\S* .*serialized.*")


@dataclass(frozen=True)
class Compiled:
    """Resources and instructions of a compiled kernel.

    Attributes:
        registers: per thread; on AMD vector registers with accumulation registers.
        spill_bytes: per thread: the stack frame or the spilled bytes, whichever is more.
        shared_bytes: shared memory per program.
        tensor_memory: columns of tensor memory, on sm_100.
        opcodes: counts of OPCODES in the machine code.
        advisories: lines of ptxas about serialised wgmma instructions.
        seconds: compile time.
        loops: the loops of SASS that have products or spill, outer ones too.
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
        """Tells whether warps reallocate registers, as only specialised warps do."""
        return self.opcodes["USETMAXREG"] > 0


class CompileError(RuntimeError):
    """triton or ptxas failed; the text is one line."""


def interpreting() -> bool:
    """Tells whether TRITON_INTERPRET=1: the interpreter's kernels cannot be compiled."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def compile_launch(launch: Launch, arch: str) -> Compiled:
    """Compiles `launch` for `arch` ("sm_90", "gfx942"); raises CompileError."""
    from triton import knobs

    with (
        tempfile.TemporaryDirectory() as folder,
        knobs.cache.scope(),
        knobs.compilation.scope(),
        knobs.nvidia.scope(),
    ):
        # A cached kernel would have no ptxas log.
        knobs.cache.dir = folder
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        start = time.perf_counter()
        kernel, log = _compile(launch, arch)
        seconds = time.perf_counter() - start
    return _report(kernel, log, seconds)


def compiled_kernel(launch: Launch, arch: str) -> Any:
    """triton's compiled kernel with the text of every stage; from triton's cache if possible."""
    return _compile(launch, arch)[0]


class CompileTarget:
    """Replaces triton's GPU driver while a kernel is compiled."""

    def __init__(self, arch: str) -> None:
        from triton.backends.compiler import GPUTarget

        backend, name = ("cuda", int(arch[3:])) if arch.startswith("sm_") else ("hip", arch)
        self._target = GPUTarget(backend, name, WARP_SIZE[backend])

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> object:
        """A new object each time: triton caches compiled kernels by device."""
        return object()

    def get_current_stream(self, device: object) -> int:
        return 0


@contextlib.contextmanager
def active_driver(driver: Any) -> Iterator[None]:
    """Makes `driver` triton's active driver within the context."""
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
    """Returns triton's compiled kernel, and the output of ptxas."""
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
    """Captures what the compiler writes to stderr; yields a function that returns it."""
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
    """The root exception and the compiler's first error, in one line."""
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
    """A hash of all that decides in which order a kernel adds: equal for kernels with equal sums.

    This is the layout of every tensor that is reduced, and the instruction of every product. How
    warps share a product does not matter: one thread adds up an element.
    """
    layouts = dict(LAYOUT.findall(ttgir))

    def resolved(text: str) -> str:
        return re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), text)

    sums = {resolved(tensors) for tensors in REDUCED.findall(ttgir)}
    products = {
        own or " ".join(INSTRUCTION.findall(layouts[name])) for name, own in PRODUCT.findall(ttgir)
    }
    return hashlib.blake2b(
        repr((sorted(sums), sorted(products))).encode(), digest_size=4
    ).hexdigest()


def _sass(cubin: bytes) -> str:
    """Disassembled machine code."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, check=True, text=True, capture_output=True).stdout


def _ptxas_figures(log: str) -> tuple[int, int]:
    """Registers and spilled bytes, from the output of `ptxas -v`."""
    registers = re.findall(r"Used (\d+) registers", log)
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    return max(map(int, registers)), max(int(size) for frame in frames for size in frame)


def _amd_figures(code: str) -> tuple[int, int]:
    """Vector registers and spilled bytes, from the metadata at the end of the assembly."""
    figures = dict(re.findall(r"\.(\w+):\s+(\d+)$", code, re.MULTILINE))
    spilled = 4 * int(figures["vgpr_spill_count"])
    return int(figures["vgpr_count"]), max(spilled, int(figures["private_segment_fixed_size"]))
