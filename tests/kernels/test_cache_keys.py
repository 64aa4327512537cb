"""What one process compiles, every other process finds in triton's cache."""

from tests.kernels.test_aot import run_compiling


def test_keys_do_not_depend_on_the_order_of_first_launches() -> None:
    """Without the order in which we hash functions they do, and the same check finds it."""
    run_compiling("-m", "tests.kernels.cache_keys")
