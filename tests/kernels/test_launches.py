"""What CUDA gets of launches and their repeats: triton's driver over a stub of libcuda."""

from pathlib import Path

import pytest

from dev.gpu import device
from dev.gpu.results import Results, last_rows
from dev.gpu.schedule import Run
from tests.gpu_cells import over_the_stub
from tests.kernels.stub_driver import c_compiler
from tests.kernels.test_aot import run_compiling

needs_c_compiler = pytest.mark.skipif(
    c_compiler() is None, reason="no C compiler: the stub of libcuda, and triton, need gcc or CC"
)

pytestmark = needs_c_compiler


def test_tensor_maps_and_a_repeat_of_one_kernel() -> None:
    """With planted faults: pointers of an earlier call, and maps that CUDA refuses."""
    run_compiling("-m", "tests.kernels.stub_launches")


@pytest.mark.slow
def test_repeated_launches_equal_new_launches() -> None:
    run_compiling("-m", "tests.kernels.repeats")


@pytest.mark.slow
def test_a_wrong_launch_costs_one_cell_of_a_run(tmp_path: Path) -> None:
    """As `python -m dev gpu --device stub` runs its cells."""
    stage, results = over_the_stub(), Results(tmp_path)
    run = Run(results, tmp_path, stage.seconds, device.environment(device.STUB))
    try:
        run.run([stage])
    finally:
        run.close()
    rows = {label.split(": ")[1]: row for label, row in last_rows(results.rows).items()}
    states = {name: row["state"] for name, row in rows.items() if row["state"] != "launched"}
    assert states == {
        "wrong stride": "failed",
        "stale pointers": "failed",
        "hang": "hung",
        "crash": "died",
    }, rows
    assert "stride of" in rows["wrong stride"]["error"]
    assert "a repeat is not as a new launch" in rows["stale pointers"]["error"]
    launched = {name: rows[name]["figures"]["launches"] for name in ("forward", "repeated", "test")}
    assert launched["forward"] == 1 and launched["repeated"] == 3 and launched["test"] > 0
