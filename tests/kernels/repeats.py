"""CUDA gets the same kernel, grid and bytes of a repeated launch as of a new launch.

Triton's driver and launcher are real, libcuda is a stub (`stub_driver`). Kernels are compiled for
sm_90, so this runs in a process without TRITON_INTERPRET, of test_launches.py:
`python -m tests.kernels.repeats`. stub_launches.py plants faults.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ring_attn.backends.kept_launches import KeptLaunches
from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.core.messages import Gathered
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import Tile
from ring_attn.kernels import configs
from ring_attn.kernels.launch import Launch
from ring_attn.strategies.tree_decode import decode_packet
from ring_attn.testing import Inputs, random_qkv
from tests.bounds import run, whole
from tests.kernels.calls import cut_keys
from tests.kernels.stub_driver import MAX_LAUNCHES, StubDriver, launching

KERNELS = "flash_fwd flash_dq flash_dkdv delta hopper_fwd hopper_bwd decode merge_parts merge_tree"
ROWS, HEADS = 97, 4
CAUSAL = Mask(ROWS, ROWS, causal=True)


class Checked(KeptLaunches):
    """Compares every launch, new or repeated, with a new launch of the same call."""

    def __init__(self, driver: StubDriver) -> None:
        super().__init__()
        self.num_new = 0
        self._driver = driver
        self._alive = list[object]()  # tensors of all calls, whose addresses no later tensor gets

    def run(
        self,
        call: tuple[Any, ...],
        inputs: Sequence[Tensor],
        others: Sequence[Tensor | None],
        make: Callable[[], Launch],
    ) -> None:
        def make_new() -> Launch:
            self.num_new += 1
            return make()

        self._alive.append((inputs, others))
        super().run(call, inputs, others, make_new)
        make().run()
        ran, anew = self._driver.last(2)
        assert ran == anew, (call, ran, anew)


def checked_backend(driver: StubDriver) -> tuple[TritonBackend, Checked]:
    backend = TritonBackend()
    backend.launches = Checked(driver)
    return backend, backend.launches


def draw(rows: int = ROWS, kv_heads: int = 2, dim: int = 16, **sizes: Any) -> Inputs:
    usual = {"nheads": HEADS, "dtype": torch.bfloat16}
    return random_qkv(seqlen_q=rows, nheads_kv=kv_heads, headdim=dim, **(usual | sizes))


def heads_first(inputs: Inputs) -> Inputs:
    return Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))


def check_steps(driver: StubDriver, *calls: Callable[[TritonBackend], object]) -> None:
    """Runs all calls twice: the second time no launch is new."""
    backend, launches = checked_backend(driver)
    made = list[int]()
    for call in (*calls, *calls):
        call(backend)
        made.append(launches.num_new)
    once = made[: len(calls)]
    assert once == sorted(set(once)), "each call differs from those before"
    assert made[len(calls) :] == [once[-1]] * len(calls)


def decode(backend: TritonBackend, inputs: Inputs, tiles: Sequence[Tile]) -> None:
    """Decodes as many queries as the tiles have rows."""
    q, k, v, _ = inputs
    rows = tiles[0].q.stop
    backend.decode(q[:, :rows], k, v, tiles, scores=Scores(0.25))


def merge(backend: TritonBackend) -> None:
    """Merges one query's results from 5 ranks, gathered with out and lse in one message."""
    q, k, v, _ = draw()
    everyone = Gathered(decode_packet(AttentionSpec.of(q, k, v), 1), 5)
    parts = everyone.views(torch.zeros(everyone.nbytes, dtype=torch.uint8))
    backend.merge(*parts, torch.zeros(HEADS), q.dtype)


def check_unaligned(driver: StubDriver) -> None:
    """An address that is no multiple of 16 needs another kernel, whose launch is never repeated."""
    backend, launches = checked_backend(driver)
    out, lse = draw().q, torch.zeros(1, HEADS, ROWS)
    dout = torch.zeros(out.numel() + 1, dtype=out.dtype)[1:].view_as(out)
    for made in (1, 2):
        backend.row_statistics(out, dout, lse)
        assert launches.num_new == made
    backend.row_statistics(out, out, lse)
    assert len(launches.repeats) == 1


def check_kept() -> None:
    """The number of kept launches is bounded, and they hold no tensors of finished calls."""
    backend, inputs, kept = TritonBackend(), draw(), []
    with mock.patch("ring_attn.backends.kept_launches.MAX_KEPT", 3):
        for n in range(1, 6):
            run(backend, inputs, [whole(Mask(ROWS, ROWS, window_size=(n, 0)))])
            kept.append(len(backend.launches.repeats))
    held = weakref.ref(inputs.dout)
    del inputs
    assert kept == [3] * 5 and held() is None


def main() -> None:
    with launching() as driver:
        check(driver)


def check(driver: StubDriver) -> None:
    warnings.simplefilter("ignore")
    causal, parts, full = [whole(CAUSAL)], cut_keys(CAUSAL, 32, 64), [whole(Mask(ROWS, ROWS))]
    one_row = whole(Mask(1, ROWS))
    check_steps(
        driver,
        lambda backend: run(backend, draw(), causal),
        lambda backend: run(backend, draw(), causal, sinks=torch.zeros(HEADS)),
        lambda backend: run(backend, draw(), causal, scale=0.5),
        lambda backend: run(backend, draw(), parts),
        lambda backend: run(backend, draw(), parts, say_last=False),
        lambda backend: run(backend, draw(), full),
        lambda backend: run(backend, draw(dtype=torch.float16), causal),
        lambda backend: run(backend, heads_first(draw()), causal),
        lambda backend: decode(backend, draw(), one_row),
        merge,
    )
    blocks = [whole(Mask(256, 256))]
    with mock.patch.object(configs, "architecture", lambda device: "sm_90"):
        check_steps(driver, lambda backend: run(backend, draw(256, HEADS, 64), blocks))
    check_unaligned(driver)
    check_kept()
    names = {launched.kernel for launched in driver.last(MAX_LAUNCHES)}
    assert names == {f"{name}_kernel" for name in KERNELS.split()}


if __name__ == "__main__":
    main()
