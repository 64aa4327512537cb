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
from tests.kernels.stub_driver import STREAM, StubDriver, TensorMap, launching

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


def maps_passed(driver: StubDriver) -> list[TensorMap]:
    """The maps of q, k and v of the last launch, its kernel's first parameters."""
    [launched] = driver.last(1)
    apart = MAP_BYTES + 4 * 4 + 4 * 8  # sizes and strides follow each map
    return [
        TensorMap.of(launched.params[start : start + MAP_BYTES])
        for start in range(0, 3 * apart, apart)
    ]


def maps_of(given: Sequence[Tensor]) -> list[TensorMap]:
    """The maps by which q, k and v can be copied."""
    return [
        TensorMap(
            address=x.data_ptr(),
            dims=tuple(reversed(x.shape)),
            strides=tuple(x.element_size() * stride for stride in reversed(x.stride())),
            box=(DIM, 1, rows, 1),
            swizzle=128,
        )
        for x, rows in zip(given, (64, CONFIG.BLOCK_N, CONFIG.BLOCK_N), strict=False)
    ]


def with_descriptor(launch: Launch, **changes: Any) -> Launch:
    """The launch with another descriptor of q."""
    descriptor = copy.copy(launch.args["q_desc"])
    for name, value in changes.items():
        setattr(descriptor, name, value)
    return replace(launch, args={**launch.args, "q_desc": descriptor})


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
    with mock.patch.object(launch_module, "moved", lambda descriptor, base: descriptor):
        assert not is_as_new(driver, Repeat(first, compiled, NUM_TENSORS), others)
    pointer_stays = Repeat(first, compiled, NUM_TENSORS)
    enqueue, old = pointer_stays.enqueue, first.args["out_ptr"].data_ptr()
    out = others[3].data_ptr()
    pointer_stays.enqueue = lambda *args: enqueue(*(old if x == out else x for x in args))
    assert not is_as_new(driver, pointer_stays, others)


def check_wrong_maps_are_found(driver: StubDriver, first: Launch, given: Sequence[Tensor]) -> None:
    """CUDA refuses maps by the rule that they break; one map that it takes is of other elements."""
    batch, rows, heads, one = first.args["q_desc"].strides
    unaligned = torch.zeros(ROWS * HEADS * DIM + 4, dtype=torch.bfloat16)[4:]
    wrong: dict[str, dict[str, Any]] = {
        "stride of 520 bytes of dim 2": {"strides": [batch, rows + 4, heads, one]},
        "is no multiple of 16": {"base": unaligned.view(1, ROWS, HEADS, DIM)},
        "size 0 of dim 2": {"shape": [1, 0, HEADS, DIM]},
    }
    for rule, changes in wrong.items():
        try:
            with_descriptor(first, **changes).run()
        except RuntimeError as error:
            assert rule in str(error), error
        else:
            raise AssertionError(f"not refused: {rule}")
    with_descriptor(first, strides=[batch, 2 * rows, heads, one]).run()
    assert maps_passed(driver) != maps_of(given)


def main() -> None:
    with launching() as driver:
        calls = [tensors() for _ in range(3)]
        first = launch_of(calls[0])
        compiled = first.run()
        [launched] = driver.last(1)
        assert launched.grid == (*first.grid, 1, 1)[:3] and launched.stream == STREAM
        assert maps_passed(driver) == maps_of(calls[0])
        repeat = Repeat(first, compiled, NUM_TENSORS)
        assert all(is_as_new(driver, repeat, given) for given in calls)
        check_stale_pointers_are_found(driver, first, compiled, calls[1])
        check_wrong_maps_are_found(driver, first, calls[0])


if __name__ == "__main__":
    main()
