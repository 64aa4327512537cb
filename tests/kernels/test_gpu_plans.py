"""test_gpu.py, without a GPU: `fake_h100` says what of it is real there."""

from __future__ import annotations

import pytest

from tests.kernels.test_aot import run_compiling

# Two runs, for two workers of pytest: each has a limit of time.
PART = "one_rank and ulysses"


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [PART, f"not ({PART})"])
def test_on_an_h100_no_test_is_refused(chosen: str) -> None:
    plugin = ("-p", "tests.kernels.fake_h100", "-p", "no:cacheprovider")
    run_compiling(
        "-m", "pytest", "-q", *plugin, "-m", "gpu", "-k", chosen, "tests/kernels/test_gpu.py"
    )


def test_cells_call_torch_as_its_signatures_ask() -> None:
    """CUDA graphs, costs and ranks, which no CPU can run, with planted wrong calls."""
    run_compiling("-m", "tests.kernels.pretended_cells")
