"""The forward in Gluon of sm_100: its PTX, executed in random orders of warpgroups and CTAs.

Blocks are so short that every buffer is used again and again. Results are compared with float64.
test_blackwell_bwd.py has masks and bits, of the forward, too; test_ptx.py plants faults;
test_ptx_instructions.py has each instruction of tcgen05 alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_attn.backends.triton import TritonBackend
from ring_attn.core.mask import Mask
from ring_attn.core.spec import Scores
from ring_attn.kernels import configs, tuned
from ring_attn.kernels.configs import Config
from ring_attn.testing import Inputs, random_sinks
from tests.bounds import assert_holds, expect, whole
from tests.kernels.calls import Step, cut_keys, frozen, grouped, in_interpreter, needs_sm_100
from tests.kernels.ptx import launching
from tests.kernels.ptx.races import Clocks

pytestmark = needs_sm_100

SMALL = Config(256, 32, 4, 2, programs_per_sm=1)
DTYPES = (torch.bfloat16, torch.float16)


def attend(
    inputs: Inputs,
    steps: Sequence[Step],
    config: Config = SMALL,
    *,
    seed: int | None = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> dict[str, Any]:
    """The forward, each step in a launch of its own, by its PTX."""
    backend = TritonBackend({"gluon": config})
    q, k, v, _ = inputs
    with launching.executing("sm_100", seed) as executed:
        state = backend.new_state(q, v.size(3), sinks)
        for i, tiles in enumerate(steps):
            scores, last = Scores(q.size(3) ** -0.5, softcap), i == len(steps) - 1
            state = backend.forward(q, k, v, tiles, state, scores=scores, last=last)
        out, lse = backend.finalize(state, q.dtype)
    assert [x.kernel.fn.__name__ for x in executed] == ["blackwell_fwd_kernel"] * len(steps)
    return {"out": out, "lse": lse}


@contextmanager
def unfinished_products() -> Iterator[list[int]]:
    """Numbers of groups of products that a warp knows to be unfinished, at each of its commits."""
    commit, unfinished = Clocks.commit_products, list[int]()

    def count(self: Clocks, thread: Any) -> Any:
        known = commit(self, thread)
        [warp], [strand] = thread // 32, self.strands(thread)
        done = self.seen[strand, self.products + warp]
        unfinished.append(int(self.product_groups[warp] - done))
        return known

    with mock.patch.object(Clocks, "commit_products", count):
        yield unfinished


@in_interpreter
def test_products_are_issued_while_others_run() -> None:
    """After the first block, the warp that multiplies never waits for all that it has issued."""
    mask = Mask(256, 160)
    with unfinished_products() as unfinished:
        attend(grouped(mask, 64, nheads=1), [whole(mask)])
    assert len(unfinished) > 24 and min(unfinished[1:]) > 1


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "heads", "config"),
    [
        *(((dim, dim), (2, 1, 1), one) for dim, some in configs.BLACKWELL.items() for one in some),
        ((64, 128), (4, 2, 1), replace(SMALL, num_stages=3)),
        ((128, 64), (2, 2, 2), replace(SMALL, BLOCK_N=64)),
        ((64, 64), (3, 1, 1), replace(SMALL, programs_per_sm=0)),
    ],
    ids=str,
)
def test_heads_and_configs(
    dims: tuple[int, int], heads: tuple[int, int, int], config: Config
) -> None:
    mask = Mask(300, 450, causal=True)
    sizes = dict(zip(("nheads", "nheads_kv", "batch"), heads, strict=True))
    inputs = grouped(mask, dims[0], headdim_v=dims[1], **sizes)
    assert_holds(attend(inputs, [whole(mask)], config), *expect(inputs, mask))


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("headdim", [64, 128])
def test_capped_scores_and_sinks_in_steps(headdim: int) -> None:
    """Three steps carry the state; the middle one neither begins nor ends it."""
    mask = Mask(193, 193, causal=True)
    inputs, scores = grouped(mask, headdim), {"softcap": 5.0, "sinks": random_sinks(2)}
    got = attend(inputs, cut_keys(mask, 64, 128), **scores)
    assert_holds(got, *expect(inputs, mask, **scores))


def test_which_calls_take_it() -> None:
    """sm_100 has the forward of 64 and 128 dims in 16 bits, and the backward of equal ones."""
    with mock.patch.object(configs, "architecture", lambda device: "sm_100"):
        for headdim, headdim_v, dtype, able in (
            (64, 64, torch.bfloat16, True),
            (128, 64, torch.float16, True),
            (256, 256, torch.bfloat16, False),
            (192, 128, torch.bfloat16, False),
            (64, 64, torch.float32, False),
        ):
            x = torch.empty(0, headdim, dtype=dtype)
            assert tuned.takes_gluon(x, headdim_v) is able
            assert tuned.takes_one_pass(x, headdim_v) is (able and headdim == headdim_v)
            assert not tuned.takes_one_pass(x, headdim_v, softcap=5.0)
        portable = frozen("sm_100", 64)
        assert not tuned.takes_gluon(torch.empty(0, 64).half(), 64, portable)
    for headdim, some in configs.BLACKWELL.items():
        first = configs.frozen("gluon", "sm_100", headdim, torch.bfloat16)
        assert first == some[0] and {x.BLOCK_N for x in some} == {first.BLOCK_N}
