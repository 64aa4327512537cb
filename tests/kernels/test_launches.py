"""What CUDA gets of launches and their repeats: triton's driver over a stub of libcuda."""

import pytest

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
