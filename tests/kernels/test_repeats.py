"""Launches that are repeated are those made anew: `repeats.py`, over a stand-in of the driver."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.test_aot import ROOT, compiling


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for the driver, which is here")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the stand-in is built by gcc")
def test_repeats(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kernels.repeats", str(tmp_path)]
    result = subprocess.run(
        command, cwd=ROOT, env=compiling(), capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
