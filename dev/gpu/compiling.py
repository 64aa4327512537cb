"""A plugin of pytest: each launch compiles its kernel for sm_90, and fills its results with ones.

It comes after `tests.kernels.fake_h100`, which pretends that there is a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernels.fake_h100 import fill

ARCHITECTURE = "sm_90"


def compile_and_fill(launch: Any) -> None:
    """Put the kernel into triton's cache, if it is not there."""
    from dev.compiled import compiled_kernel

    if all(launch.grid):
        compiled_kernel(launch, ARCHITECTURE)
    fill(launch)


@pytest.fixture(autouse=True)
def compiling(fake: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from triton.runtime import driver

    from dev.compiled import CompileTarget
    from dev.gpu.triton_key import use_library_of_variable
    from ring_attn.kernels.launch import Launch

    use_library_of_variable()
    driver.set_active(CompileTarget(ARCHITECTURE))  # else triton would look for a GPU's driver
    monkeypatch.setattr(Launch, "run", compile_and_fill)
    yield
