"""The roofs of a device, measured: the rate of a large matrix product, and that of a large copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ring_attn.bench.timing import TimedCall, Watch, free_memory, quantiles, time_in_turn

# Rows of the square matrices, and bytes of the copy, on a GPU and on a CPU.
SIDES = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}

ITERS, SECONDS = 5, 1.0


@dataclass(frozen=True)
class Roofs:
    """The highest rates that attention can have on a device.

    Attributes:
        tflops: TFLOP/s of a square matrix product in the dtype of the call.
        gbps: GB/s, read and written, of a copy.
    """

    tflops: float
    gbps: float

    def __str__(self) -> str:
        return (
            f"roofs, measured: {self.tflops:.4g} TFLOP/s of a matrix product, {self.gbps:.4g} GB/s "
            "of a copy"
        )


def measure_roofs(device: torch.device, dtype: torch.dtype) -> Roofs:
    """Time a matrix product and a copy, of random numbers."""
    side = SIDES[device.type]
    generator = torch.Generator(device).manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(side, side, generator=generator, device=device, dtype=dtype)

    a, b = draw(), draw()
    product = torch.empty_like(a)
    ms = _median_ms("a matrix product", partial(torch.matmul, a, b, out=product), device)
    return Roofs(tflops=2 * side**3 * 1e-9 / ms, gbps=copy_gbps(device))


def copy_gbps(device: torch.device) -> float:
    """Return the GB/s, read and written, of a copy within the device."""
    nbytes = COPY_BYTES[device.type]
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randint(255, (nbytes,), dtype=torch.uint8, device=device, generator=generator)
    ms = _median_ms("a copy", partial(torch.empty_like(source).copy_, source), device)
    return 2 * nbytes * 1e-6 / ms


def _median_ms(name: str, call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call in milliseconds."""

    def failed(_: str, error: Exception) -> None:
        raise RuntimeError(f"the roof of {name} could not be measured: {error}") from error

    samples = time_in_turn(
        {name: TimedCall([call])}, Watch(device), ITERS, seconds=SECONDS, failed=failed
    )[name]
    free_memory(device)
    return quantiles([sample.ms[0] for sample in samples])[1]
