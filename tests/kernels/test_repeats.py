"""Repeated launches equal new launches: runs `repeats.py` over a stub of the driver."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.kernels.test_aot import run_compiling


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for the driver, which is here")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the stand-in is built by gcc")
def test_repeats(tmp_path: Path) -> None:
    run_compiling("-m", "tests.kernels.repeats", str(tmp_path))
