"""Keys of kernels in triton's cache do not depend on the order of first launches.

Keys are of compiled kernels, so this runs in a process without TRITON_INTERPRET, of
test_cache_keys.py: `python -m tests.kernels.cache_keys`. Nothing is compiled.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from unittest import mock

from triton.runtime.jit import JITCallable, JITFunction

from dev import aot
from ring_attn.kernels import cache_keys, launch
from ring_attn.kernels.gluon_guard import gluon_missing
from ring_attn.kernels.launch import Launch
from ring_attn.kernels.triton_release import RELEASE

# From this version on triton itself reads the constants of callees in one order.
RELEASE_OF_STABLE_KEYS = (3, 8)

# Orders of first launches: as they are listed, backwards, and drawn.
NUM_DRAWN = 2


def one_launch_of_each_kernel() -> list[Launch]:
    archs = ["sm_80", "sm_90"]
    if gluon_missing("sm_100") is None:
        archs.append("sm_100")
    cells = {
        cell.variant.kernel: cell for arch in archs for cell in aot.cells(arch, "128", "bfloat16")
    }
    return [cell.launch() for cell in cells.values()]


def forget_keys() -> None:
    """Make all jit functions of our kernels as they are in a new process."""
    cache_keys._hash_callees_first.cache_clear()
    for name, module in list(sys.modules.items()):
        if not name.startswith("ring_attn.kernels."):
            continue
        for value in vars(module).values():
            if isinstance(value, JITCallable):
                value.hash, value.used_global_vals = None, {}


def keys_after(launches: Sequence[Launch], compile_only: bool) -> dict[str, str]:
    """The key with which each kernel is first looked up, by the kernel's name."""
    forget_keys()
    keys = dict[str, str]()

    def look_up(kernel: JITFunction, **_: object) -> None:
        keys[kernel.fn.__name__] = kernel.cache_key

    with mock.patch.object(JITFunction, "run", look_up):
        for one in launches:
            if compile_only:
                one.warmup()
            else:
                one.run()
    return keys


def number_of_unstable_keys(launches: Sequence[Launch]) -> int:
    """How many kernels have several keys, among orders, with two ways to look kernels up."""
    orders = [list(launches), list(reversed(launches))]
    for seed in range(NUM_DRAWN):
        orders.append(random.Random(seed).sample(launches, len(launches)))
    found = [keys_after(order, compile_only=i % 2 == 0) for i, order in enumerate(orders)]
    assert all(keys.keys() == found[0].keys() for keys in found)
    return sum(len({keys[name] for keys in found}) > 1 for name in found[0])


def check_second_pass() -> None:
    """Hash all functions again, now that the constants of all are known: no key changes.

    Nor does a key depend on addresses: triton sorts constants of one name by the address of their
    module, so constants of one name must have one value.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith("ring_attn.kernels."):
            continue
        for value in vars(module).values():
            if not isinstance(value, JITCallable):
                continue
            first, value.hash = value.cache_key, None
            assert value.cache_key == first, (name, value)
            constants = {(name, str(x)) for (name, _), (x, _) in value.used_global_vals.items()}
            assert len({name for name, _ in constants}) == len(constants), constants


def main() -> None:
    launches = one_launch_of_each_kernel()
    assert number_of_unstable_keys(launches) == 0
    check_second_pass()
    if RELEASE < RELEASE_OF_STABLE_KEYS:
        with mock.patch.object(launch, "fix_cache_key", lambda kernel: None):
            assert number_of_unstable_keys(launches) > 0


if __name__ == "__main__":
    main()
