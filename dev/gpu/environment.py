"""What the machine has: versions, the card, tools, and its two ceilings."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess

from dev.gpu import device
from dev.gpu.cells import Figures

# Elements a side of the product that is the ceiling of matrix rates, and bytes of the copy.
PRODUCT, COPY_BYTES = 8192, 1 << 30
TRIAL_PRODUCT, TRIAL_COPY_BYTES = 256, 1 << 20

SMI = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
PREFIXES = ("CUDA", "NCCL", "PYTORCH", "TORCH", "TRITON")


def versions() -> Figures:
    """Return versions of software and hardware, and the tools that later stages use."""
    import torch
    import triton
    from triton import knobs
    from triton.runtime.cache import triton_key

    from dev.gpu.triton_key import short

    found: Figures = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "triton_key": short(triton_key()),
        "cores": os.cpu_count(),
        "tools": {tool: shutil.which(tool) for tool in ("gcc", "ncu", "cuda-gdb", "make")},
        "variables": {name: x for name, x in os.environ.items() if name.startswith(PREFIXES)},
        "cache": str(knobs.cache.dir),
        "card": "a trial on a CPU, of small sizes, whose figures mean nothing",
    }
    if not device.is_trial():
        properties = torch.cuda.get_device_properties(0)
        found["card"] = properties.name
        found["architecture"] = f"sm_{properties.major}{properties.minor}"
        found["sms"] = properties.multi_processor_count
        found["memory_GiB"] = round(properties.total_memory / 2**30, 1)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["smi"] = _printed("nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader")
    return found


def _printed(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def ceilings() -> dict[str, float]:
    """Measure the rate of a large product and the bandwidth of a large copy, on random data."""
    import torch

    from ring_attn.bench.timing import TimedCall, Watch, quantiles, time_in_turn

    where = torch.device(device.where())
    side = TRIAL_PRODUCT if device.is_trial() else PRODUCT
    nbytes = TRIAL_COPY_BYTES if device.is_trial() else COPY_BYTES
    generator = torch.Generator(where).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=where, dtype=torch.bfloat16)

    a, b = draw(side, side), draw(side, side)
    product = torch.empty_like(a)
    source = torch.randint(255, (nbytes,), dtype=torch.uint8, device=where, generator=generator)
    copy = torch.empty_like(source)
    calls = {
        "product": TimedCall([lambda: torch.matmul(a, b, out=product)]),
        "copy": TimedCall([lambda: copy.copy_(source)]),
    }

    def failed(name: str, error: Exception) -> None:
        raise RuntimeError(f"the ceiling by a {name}") from error

    samples = time_in_turn(calls, Watch(where), 10, seconds=5.0, failed=failed)
    ms = {name: quantiles([one.ms[0] for one in some])[1] for name, some in samples.items()}
    return {
        "product_TFLOPs": 2 * side**3 / ms["product"] * 1e-9,
        "copy_TBs": 2 * nbytes / ms["copy"] * 1e-9,
    }
