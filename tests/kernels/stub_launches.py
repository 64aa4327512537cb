"""A launch in Gluon and its repeats, as CUDA gets them from triton's launcher (`stub_driver`).

Kernels are compiled, so this runs in a process without TRITON_INTERPRET, of test_launches.py:
`python -m tests.kernels.stub_launches`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ring_attn.core.mask import Mask
from ring_attn.kernels import configs, hopper_fwd
from ring_attn.kernels import launch as launch_module
from ring_attn.kernels.flash_fwd import Carried
from ring_attn.kernels.launch import Launch, Repeat
from ring_attn.kernels.step_table import StepTable, make_step_table
from ring_attn.testing import random_qkv
from tests.bounds import whole
from tests.kernels.stub_driver import StubDriver, TensorMap, launching

ROWS, HEADS, DIM = 256, 4, 64
CONFIG = configs.GLUON[DIM][0]
MAP_BYTES = 128
# Arguments that a repeat replaces: q, k, v, state, results, sinks and the counter.
NUM_TENSORS = 10


def tensors() -> list[Tensor]:
    """q, k, v and results of a call: the arguments that a repeat replaces."""
    drawn = random_qkv(seqlen_q=ROWS, nheads=HEADS, nheads_kv=2, headdim=DIM, dtype=torch.bfloat16)
    q, k, v, _ = drawn
    return [q, k, v, torch.empty_like(q), torch.empty(1, HEADS, ROWS), torch.empty(1).int()]


@cache
def table() -> StepTable:
    """The table of the step, which all calls share."""
    tiles, cpu = whole(Mask(ROWS, ROWS)), torch.device("cpu")
    return make_step_table(tiles, CONFIG.BLOCK_M, CONFIG.BLOCK_N, cpu, descending=True)


def launch_of(given: Sequence[Tensor]) -> Launch:
    """The forward of one step."""
    q, k, v, out, lse, counter = given
    state = Carried(out=out, lse=lse, counter=counter)
    return hopper_fwd.hopper_launch(
        q, k, v, state, table(), CONFIG, softmax_scale=0.125, first=True, last=True
    )


def check_maps(driver: StubDriver, given: Sequence[Tensor]) -> None:
    """Compare the maps, the first parameters of the kernel, with q, k and v."""
    [launched] = driver.last(1)
    after_a_map = 4 * 4 + 4 * 8  # sizes and strides
    for number, x in enumerate(given[:3]):
        start = number * (MAP_BYTES + after_a_map)
        found = TensorMap.of(launched.params[start : start + MAP_BYTES])
        rows = 64 if number == 0 else CONFIG.BLOCK_N
        expected = TensorMap(
            address=x.data_ptr(),
            dims=tuple(reversed(x.shape)),
            strides=tuple(x.element_size() * stride for stride in reversed(x.stride())),
            box=(DIM, 1, rows, 1),
            swizzle=128,
        )
        assert found == expected, (number, found, expected)


def is_as_new(driver: StubDriver, repeat: Repeat, given: Sequence[Tensor]) -> bool:
    """Whether CUDA gets the same of a repeat for these tensors as of a new launch for them."""
    q, k, v, out, lse, counter = given
    arguments = [q, k, v, None, None, None, out, lse, None, counter]
    repeat.run([0 if x is None else x.data_ptr() for x in arguments])
    launch_of(given).run()
    repeated, new = driver.last(2)
    return repeated == new


def check_stale_pointers_are_found(
    driver: StubDriver, first: Launch, compiled: Any, others: Sequence[Tensor]
) -> None:
    """A repeat that keeps an address of its first call is not as a new launch."""
    descriptors_stay = mock.patch.object(
        launch_module, "_moved", lambda descriptor, base: first.args["q_desc"]
    )
    with descriptors_stay:
        assert not is_as_new(driver, Repeat(first, compiled, NUM_TENSORS), others)
    pointer_stays = Repeat(first, compiled, NUM_TENSORS)
    enqueue, old = pointer_stays._enqueue, first.args["out_ptr"].data_ptr()
    out = others[3].data_ptr()
    pointer_stays._enqueue = lambda *args: enqueue(*(old if x == out else x for x in args))
    assert not is_as_new(driver, pointer_stays, others)


def check_wrong_maps_are_refused(first: Launch) -> None:
    """CUDA's rules refuse descriptors that no bulk copy can use; triton raises the broken rule."""
    batch, rows, heads, one = first.args["q_desc"].strides
    unaligned = torch.zeros(ROWS * HEADS * DIM + 4, dtype=torch.bfloat16)[4:]
    wrong: dict[str, dict[str, Any]] = {
        "stride of 520 bytes of dim 2": {"strides": [batch, rows + 4, heads, one]},
        "is no multiple of 16": {"base": unaligned.view(1, ROWS, HEADS, DIM)},
        "size 0 of dim 2": {"shape": [1, 0, HEADS, DIM]},
    }
    for rule, changes in wrong.items():
        descriptor = copy.copy(first.args["q_desc"])
        for name, value in changes.items():
            setattr(descriptor, name, value)
        launch = replace(first, args={**first.args, "q_desc": descriptor})
        try:
            launch.run()
        except RuntimeError as error:
            assert rule in str(error), error
        else:
            raise AssertionError(f"not refused: {rule}")


def main() -> None:
    with launching() as driver:
        calls = [tensors() for _ in range(3)]
        first = launch_of(calls[0])
        compiled = first.run()
        check_maps(driver, calls[0])
        repeat = Repeat(first, compiled, NUM_TENSORS)
        assert all(is_as_new(driver, repeat, given) for given in calls)
        check_stale_pointers_are_found(driver, first, compiled, calls[1])
        check_wrong_maps_are_refused(first)


if __name__ == "__main__":
    main()
