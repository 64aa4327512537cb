"""What CUDA gets of launches and their repeats: triton's driver over a stub of libcuda."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from dev.gpu import carry, device, plan, triton_key
from dev.gpu.cells import Stage
from dev.gpu.command import chosen
from dev.gpu.results import Results, Row, last_rows
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


def rows_of(stage: Stage, folder: Path, variables: Mapping[str, str]) -> dict[str, Row]:
    """Run a stage as `python -m dev gpu --device stub` does; return the rows by names of cells."""
    results = Results(folder)
    run = Run(results, folder, stage.seconds, device.environment(device.STUB) | variables)
    try:
        run.run([stage])
    finally:
        run.close()
    return {label.split(": ")[1]: row for label, row in last_rows(results.rows).items()}


@pytest.mark.slow
def test_a_wrong_launch_costs_one_cell_of_a_run(tmp_path: Path) -> None:
    rows = rows_of(over_the_stub(), tmp_path, {})
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


@pytest.mark.slow
def test_prepared_kernels_are_found_and_others_are_not(tmp_path: Path) -> None:
    """One kernel is compiled and packed; of two cells, the other one needs another kernel."""
    full, causal = (f"forward, portable, 64 dims, {mask}" for mask in ("full", "causal"))
    python, cache, folder = triton_key.python_here(), tmp_path / "cache", tmp_path / "carry"
    (folder / carry.LIBRARIES).mkdir(parents=True)
    library = triton_key.library_hash(python, tmp_path)
    stages = chosen(plan.stages(device.COMPILER), "contact", full)
    [row] = last_rows(carry.compile_kernels(tmp_path, cache, stages, 300.0, library)).values()
    assert row["state"] == "launched", row
    packed = carry.pack_kernels(cache, folder / carry.KERNELS, with_launchers=True)
    assert packed.kernels == 1 and packed.launchers >= 1
    carry.write_manifest(folder, python, library)
    variables = carry.unpacked(folder, tmp_path / "there", device.STUB)
    [stage] = chosen(plan.stages(device.STUB, prepared=True), "contact", full.removesuffix("full"))
    rows = rows_of(stage, tmp_path / "run", variables)
    assert rows[full]["figures"] == {"compiled": 0, "found": 1, "launches": 1, "maps": 0}, rows
    assert rows[causal]["state"] == "failed", rows
    assert "is not among the prepared kernels" in rows[causal]["error"]
