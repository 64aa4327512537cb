"""The kernels once on small shapes, forward and backward: what compute-sanitizer runs.

    compute-sanitizer --tool memcheck python -m ring_attn.bench.sanitize

Small, because a sanitizer slows a kernel down a hundredfold; ragged, because what reads beyond a
tensor does so at its end: lengths that no tile divides, grouped heads, a head dim that is no power
of two, windows, documents, rows that see nothing, softcap and sinks, and a ring of three. Inputs
are drawn on the CPU and results are held against float64 there, so that nearly all kernels that
run on the device are ours. Every tensor is an allocation of its own: an access beyond its end
is not one into its neighbour.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from ring_attn.layout import SequenceLayout
from ring_attn.spec import AttentionSpec
from ring_attn.strategies.ring import make_call, ring_backward, ring_forward
from ring_attn.testing import (
    Expected,
    Verdict,
    check_all,
    dense_gradients,
    plain_gradients,
    random_qkv,
    random_sinks,
)
from ring_attn.transport.base import Transport
from ring_attn.transport.local import run_local
from ring_attn.verify import MASKS

SEQLEN = 113


@dataclass(frozen=True)
class Case:
    """One call; the mask by its name in `ring-attn verify`."""

    mask: str = "causal"
    headdim: int = 64
    dtype: torch.dtype = torch.bfloat16
    world_size: int = 1
    layout: str = "contiguous"
    softcap: float = 0.0
    sinks: bool = False

    def __str__(self) -> str:
        options = f", softcap {self.softcap:g}, sinks" if self.sinks else ""
        return (
            f"{self.mask}, {self.dtype}, head dim {self.headdim}, {self.world_size} ranks "
            f"{self.layout}{options}"
        )


CASES = (
    Case(),
    Case("window"),
    Case("documents unequal"),
    Case("empty rows"),
    Case(world_size=3, layout="zigzag"),
    Case(headdim=128),
    Case(headdim=80, dtype=torch.float16),
    Case(softcap=2.0, sinks=True),
    Case(dtype=torch.float32),
)


def verdicts(case: Case, backend: str, device: str) -> tuple[Verdict, ...]:
    """Runs a case on all its ranks in this process, and holds every result against float64."""
    mask = MASKS[case.mask](SEQLEN)
    inputs = random_qkv(
        seqlen_q=mask.seqlen_q,
        seqlen_k=mask.seqlen_k,
        nheads=4,
        nheads_kv=2,
        headdim=case.headdim,
        dtype=case.dtype,
    )
    sinks = random_sinks(4) if case.sinks else None
    oracle = dense_gradients(*inputs, mask, softcap=case.softcap, sinks=sinks)
    plain = plain_gradients(*inputs, mask, softcap=case.softcap, sinks=sinks)
    spec = AttentionSpec(
        device, case.dtype, 1, 4, 2, case.headdim, case.headdim, case.softcap, case.sinks
    )
    lens = (mask.seqlen_q, mask.seqlen_k)
    layouts = tuple(SequenceLayout.from_name(case.layout, n, case.world_size) for n in lens)
    sides = (layouts[0], layouts[1], layouts[1], layouts[0])

    def rank(index: int, transport: Transport) -> list[Tensor]:
        call = make_call(spec, (layouts[0], layouts[1]), mask, index, backend=backend)
        shards = (x.shard(y, index).to(device) for x, y in zip(sides, inputs, strict=True))
        q, k, v, dout = shards
        there = None if sinks is None else sinks.to(device)
        out, lse = ring_forward(q, k, v, call, transport, there)
        *grads, dsinks = ring_backward(q, k, v, out, lse, dout, call, transport, there)
        return [x.cpu() for x in (out, lse, *grads, *([] if dsinks is None else [dsinks]))]

    ranks = list(zip(*run_local(case.world_size, rank), strict=True))
    dims = (1, 2, 1, 1, 1)
    wholes = (layouts[0], layouts[0], layouts[0], layouts[1], layouts[1])
    out, lse, dq, dk, dv = (
        x.unshard(y, dim) for x, y, dim in zip(wholes, ranks, dims, strict=False)
    )
    dsinks = torch.stack(ranks[len(dims)]).sum(0) if case.sinks else None
    return check_all(Expected(out, lse, dq, dk, dv, dsinks), oracle, plain)


def main() -> int:
    """1 if a result is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    # Read when CUDA starts; the caching allocator would put tensors side by side.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    wrong = 0
    for case in CASES:
        found = verdicts(case, args.backend, args.device)
        bad = [str(verdict) for verdict in found if not verdict.ok]
        print(f"{case}: {'; '.join(bad) or 'ok'}", flush=True)
        wrong += bool(bad)
    print(f"{len(CASES)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
