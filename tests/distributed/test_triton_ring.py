"""ring_attention(backend="triton") over gloo, in Triton's interpreter: real processes.

The ring itself, without processes, is tested in tests/kernels.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_attn import SequenceLayout, ring_attention, unshard
from ring_attn.mask import Mask
from ring_attn.testing import (
    RESULTS,
    Expected,
    Inputs,
    check_all,
    dense_gradients,
    plain_gradients,
    poisoned_empty,
    random_qkv,
    random_sinks,
)

# Where there is a GPU the interpreter has to be asked for.
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
        reason="CPU tensors need TRITON_INTERPRET=1 on a machine with a GPU",
    ),
]


@dataclass(frozen=True)
class Case:
    """One call, for any world size."""

    mask: Mask
    layout: str
    dtype: torch.dtype = torch.float32
    nheads: int = 2
    nheads_kv: int = 1
    softcap: float = 0.0
    with_sinks: bool = False
    noncontiguous: bool = False

    def inputs(self) -> Inputs:
        """The whole tensors, the same in every process."""
        return random_qkv(
            seqlen_q=self.mask.seqlen_q, seqlen_k=self.mask.seqlen_k, nheads=self.nheads,
            nheads_kv=self.nheads_kv, headdim=20, headdim_v=16, dtype=self.dtype,
        )  # fmt: skip

    def scores(self) -> dict[str, Any]:
        """softcap and sinks, for the call and for the oracle."""
        sinks = random_sinks(self.nheads, seed=1) if self.with_sinks else None
        return {"softcap": self.softcap, "sinks": sinks}


DOCUMENTS = (0, 30, 31, 97)

CASES = {
    "zigzag": Case(Mask(97, 97, True), "zigzag", torch.float16, softcap=2.0, with_sinks=True),
    "striped": Case(Mask(97, 97, True), "striped", nheads_kv=2, noncontiguous=True),
    "window": Case(Mask(97, 97, True, (20, 0)), "contiguous", torch.float16, nheads_kv=2),
    "documents": Case(
        Mask(97, 97, True, (-1, -1), DOCUMENTS, DOCUMENTS), "contiguous", with_sinks=True
    ),
    "rows that see nothing": Case(Mask(97, 33, True), "zigzag", with_sinks=True),
}


def run_case(case: Case) -> Expected:
    """Forward and backward through the public function; whole results on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mask = case.mask
    layouts = [
        SequenceLayout.from_name(case.layout, n, world_size) for n in (mask.seqlen_q, mask.seqlen_k)
    ]
    sides = (layouts[0], layouts[1], layouts[1], layouts[0])
    q, k, v, dout = (layout.shard(x, rank) for x, layout in zip(case.inputs(), sides, strict=True))
    if case.noncontiguous:
        q, k, v = (torch.stack((x, x), -1)[..., 0] for x in (q, k, v))
    scores = case.scores()
    wanted = [x.requires_grad_() for x in (q, k, v, scores["sinks"]) if x is not None]
    documents = mask.cu_seqlens_q
    with poisoned_empty():
        out, lse = ring_attention(
            q, k, v, causal=mask.causal, window_size=mask.window_size, layout=tuple(layouts),
            cu_seqlens=None if documents is None else torch.tensor(documents, dtype=torch.int32),
            backend="triton", return_lse=True, **scores,
        )  # fmt: skip
        dq, dk, dv, *dsinks = torch.autograd.grad(out, wanted, dout)
    for share in dsinks:
        dist.all_reduce(share)
    return Expected(
        unshard(out, layouts[0]),
        unshard(lse, layouts[0], dim=2),
        unshard(dq, layouts[0]),
        unshard(dk, layouts[1]),
        unshard(dv, layouts[1]),
        dsinks[0] if dsinks else None,
    )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_results_are_within_the_bound(ranks: Any, name: str, world_size: int) -> None:
    case = CASES[name]
    args = (*case.inputs(), case.mask)
    oracle, plain = (f(*args, **case.scores()) for f in (dense_gradients, plain_gradients))
    for got in ranks(world_size).run(run_case, case):
        verdicts = check_all(got, oracle, plain)
        assert all(verdict.ok for verdict in verdicts), [str(verdict) for verdict in verdicts]


def test_every_world_size_has_the_bits_of_one(ranks: Any) -> None:
    case = Case(Mask(384, 384, True), "contiguous", torch.float16, softcap=5.0, with_sinks=True)
    alone = ranks(1).run(run_case, case)[0]
    for got in ranks(3).run(run_case, case):
        for name in RESULTS:
            assert torch.equal(getattr(got, name), getattr(alone, name)), name


def refusals() -> list[str]:
    """What every rank is told, before anything is sent."""
    x = torch.randn(1, 8, 2, 16)
    said = []
    for dtype in (torch.bfloat16, torch.float64):
        y = x.to(dtype)
        with pytest.raises(NotImplementedError) as caught:
            ring_attention(y, y, y, backend="triton")
        said.append(str(caught.value))
    return said


def test_what_cannot_run_is_refused_on_every_rank(ranks: Any) -> None:
    for said in ranks(2).run(refusals):
        assert "bfloat16 arithmetic is wrong in Triton's interpreter" in said[0]
        assert "takes float16, bfloat16 and float32, not torch.float64" in said[1]


def warnings_of_two_calls() -> list[str]:
    """Of a process that may have been warned before."""
    from ring_attn.backends import kept_launches

    kept_launches._warn_of_interpreter.cache_clear()
    x = torch.randn(1, 8, 2, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            ring_attention(x, x, x, backend="triton")
        ring_attention(x, x, x)
    return [str(warning.message) for warning in caught]


def test_each_rank_is_told_once_that_it_is_the_interpreter(ranks: Any) -> None:
    for said in ranks(2).run(warnings_of_two_calls):
        assert len(said) == 1
        assert "backend='triton' on CPU tensors runs in Triton's interpreter" in said[0]
