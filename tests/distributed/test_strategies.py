"""Triton's kernels between processes, over gloo; `dev/fuzz.py` draws calls of other backends."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from ring_attn.core.mask import Mask
from ring_attn.testing import Case, Heads, run_all_ranks

# On a machine with a GPU the interpreter must be requested.
interpreted = pytest.mark.skipif(
    torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="CPU tensors need TRITON_INTERPRET=1 on a machine with a GPU",
)
SHARED = Heads(2, 1, 20, 16)
SAME_BITS = Case(
    Mask(256, 256, True),
    "contiguous",
    "ring",
    "triton",
    "float16",
    Heads(2, 1, 16, 16),
    softcap=5.0,
    sinks=True,
    same_bits=True,
)


@interpreted
@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (3, Case("causal", "zigzag", dtype="float16", heads=SHARED, softcap=2.0, sinks=True)),
        (2, Case("causal", "striped", heads=Heads(2, 2, 20, 16), noncontiguous=True)),
        (2, Case("documents", "contiguous", heads=SHARED, sinks=True)),
        (2, SAME_BITS),
        (2, replace(SAME_BITS, strategy="all_gather")),
    ],
    ids=str,
)
def test_triton(ranks: Any, one_thread: None, world_size: int, case: Case) -> None:
    case = replace(case, backend="triton", seqlen=61, batch=1)
    got = run_all_ranks(case, world_size, ranks(world_size).run)
    assert not got.failures
    if case.same_bits:
        assert got.differing(run_all_ranks(case, 1, ranks(1).run)) == []
