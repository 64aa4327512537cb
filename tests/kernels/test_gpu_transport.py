"""Real transfers between processes that share a GPU: the bits of the local transport.

Symmetric memory needs torch to be told that ranks share a GPU, NCCL must be 2.30 or newer; both is
`run_ranks(share_gpus=...)`. Processes on one GPU run by turns, so their times say nothing of a
ring; but messages, streams, counters and kernels are those of ranks on GPUs of their own, except
that copies stay within the GPU. The tests that start processes do so once for all their cases.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout, Strategy, TransportOptions, ring_attention
from ring_attn.launch import nccl_version, rank_device, run_ranks
from ring_attn.mask import Mask
from ring_attn.spec import AttentionSpec
from ring_attn.strategies.core import make_call
from ring_attn.testing import random_qkv
from ring_attn.transport.base import Transport
from ring_attn.transport.local import run_local

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="needs a GPU that torch can use"),
]

COPIES = TransportOptions(timeout=60.0, kind="symmetric_memory")
NCCL = TransportOptions(timeout=60.0)
REPEATS = 3
RESULTS = ("out", "lse", "dq", "dk", "dv")
DOCUMENTS = (0, 300, 300, 1100, 1999)


@dataclass(frozen=True)
class Case:
    """A call: how it is shared and what it is over.

    Attributes:
        strategy: of the call.
        kind: of the layout.
        seqlen: of the whole.
        documents: boundaries, or none.
        nheads: of queries and of keys.
        headdim: of all.
        dtype: of all.
        backend: that computes.
    """

    strategy: Strategy
    kind: str = "zigzag"
    seqlen: int = 1999
    documents: tuple[int, ...] | None = None
    nheads: tuple[int, int] = (8, 4)
    headdim: int = 128
    dtype: torch.dtype = torch.bfloat16
    backend: str = "triton"

    @property
    def layout(self) -> partial[SequenceLayout]:
        """By world size."""
        return partial(SequenceLayout.from_name, self.kind, self.seqlen)


CASES = {
    "ring": Case(Strategy(), "contiguous"),
    "ring documents": Case(Strategy(), documents=DOCUMENTS),
    # Several pieces a message: 40 MiB of K and V on each of two ranks, 80 MiB of their gradients.
    "ring long": Case(Strategy(), seqlen=20480, nheads=(8, 8)),
    "ring float64": Case(Strategy(), seqlen=777, dtype=torch.float64, headdim=48, backend="aten"),
    "double ring": Case(Strategy(inner_degree=2)),
    "all_gather": Case(Strategy("all_gather")),
    "ulysses": Case(Strategy(ulysses_degree=2)),
    "q_exchange": Case(Strategy("all_gather", exchange_q=True), "contiguous"),
}


def digest(x: Tensor) -> str:
    """Of the bits."""
    return hashlib.sha256(x.detach().contiguous().cpu().view(torch.uint8).numpy()).hexdigest()


def shards_of(case: Case, world_size: int, rank: int, device: torch.device | str) -> list[Tensor]:
    """q, k, v, dout of a rank; drawn on the CPU, so the same everywhere."""
    nheads, nheads_kv = case.nheads
    inputs = random_qkv(
        seqlen_q=case.seqlen, nheads=nheads, nheads_kv=nheads_kv, headdim=case.headdim,
        dtype=case.dtype,
    )  # fmt: skip
    layout = case.layout(world_size)
    return [layout.shard(x, rank).to(device) for x in inputs]


def run_cases(names: list[str], options: TransportOptions) -> dict[str, list[list[str]]]:
    """On a rank: the digests of every case's results, each time it is run."""
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), rank_device()
    got = {}
    for name in names:
        case = CASES[name]
        q, k, v, dout = shards_of(case, world_size, rank, device)
        documents = None
        if case.documents is not None:
            documents = torch.tensor(case.documents, dtype=torch.int32, device=device)
            q, k, v, dout = (x[0] for x in (q, k, v, dout))
        digests = []
        for _ in range(REPEATS):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out, lse = ring_attention(
                *leaves, causal=True, cu_seqlens=documents, layout=case.layout(world_size),
                strategy=case.strategy, backend=case.backend, return_lse=True, transport=options,
            )  # fmt: skip
            out.backward(dout)
            grads = [leaf.grad for leaf in leaves]
            digests.append([digest(x) for x in (out, lse, *grads) if x is not None])
        got[name] = digests
    return got


@cache
def local_digests(name: str, world_size: int, device: str) -> list[list[str]]:
    """Of the same calls with all ranks in this process, by rank."""
    case = CASES[name]
    mask = Mask(case.seqlen, case.seqlen, True, (-1, -1), case.documents, case.documents)
    layout = case.layout(world_size)
    spec = AttentionSpec(device, case.dtype, 1, *case.nheads, case.headdim, case.headdim)

    def work(rank: int, transport: Transport) -> list[str]:
        q, k, v, dout = shards_of(case, world_size, rank, device)
        call = make_call(case.strategy, spec, (layout, layout), mask, rank, backend=case.backend)
        out, lse, saved = call.forward(q, k, v, transport, None)
        grads = call.backward(saved, dout, transport, None)
        return [digest(x) for x in (out, lse, grads.dq, grads.dk, grads.dv)]

    return run_local(world_size, work)


def differences(got: list[dict[str, list[list[str]]]], device: str) -> list[str]:
    """What of which rank, case and repeat has not the local transport's bits."""
    return [
        f"{name}, rank {rank}, repeat {repeat}: {what}"
        for rank, of_rank in enumerate(got)
        for name, repeats in of_rank.items()
        for repeat, digests in enumerate(repeats)
        for what, mine, local in zip(
            RESULTS, digests, local_digests(name, len(got), device)[rank], strict=True
        )
        if mine != local
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_symmetric_memory_has_the_bits_of_the_local_transport(world_size: int) -> None:
    names = [name for name in CASES if name != "double ring" or world_size == 4]
    got = run_ranks(
        run_cases, world_size, names, COPIES, device="cuda", share_gpus="gloo", threads=4
    )
    assert [list(of_rank) for of_rank in got] == [names] * world_size
    assert not differences(got, "cuda")


def run_late() -> tuple[bool, str, str, float]:
    """On a rank: rank 1 leaves the second call to rank 0, which gives up on it."""
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), rank_device()
    case = CASES["ring"]
    q, k, v, _ = shards_of(case, world_size, rank, device)
    options = replace(COPIES, timeout=5.0)
    call = partial(
        ring_attention, q, k, v, layout=case.layout(world_size), backend="triton", transport=options
    )
    call()
    torch.cuda.synchronize()
    if rank == 1:
        return False, "", "", 0.0
    start = time.monotonic()
    try:
        lost = bool(call().isnan().any())
        first = ""
    except RuntimeError as error:  # where the host was late to wait
        lost, first = True, str(error)
    took, texts = time.monotonic() - start, [first] if first else []
    while len(texts) < 2:
        try:
            call()
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    return lost, texts[0], texts[1], took


def test_a_late_peer_ends_in_nan_and_an_error() -> None:
    (lost, first, second, took), _ = run_ranks(
        run_late, 2, device="cuda", share_gpus="gloo", threads=4
    )
    assert lost and 4 < took < 30
    assert all(word in first for word in ("ring step", "ranks [1]", "5 s", "checkpoint")), first
    assert "failed before" in second


def test_nccl_that_cannot_share_a_gpu_is_refused() -> None:
    version = nccl_version()
    if version >= (2, 30, 0):
        pytest.skip(f"NCCL {version} can")
    with pytest.raises(RuntimeError, match=rf"NCCL 2\.30.*{version[0]}\.{version[1]}.*LD_PRELOAD"):
        run_ranks(run_cases, 2, ["ring"], NCCL, device="cuda", share_gpus="nccl")


def test_nccl_has_the_bits_of_the_local_transport() -> None:
    version = nccl_version()
    if version < (2, 30, 0):
        pytest.skip(f"NCCL must be 2.30 to have two ranks on a GPU, {version} is loaded")
    names = [name for name in CASES if name != "double ring"]
    got = run_ranks(run_cases, 2, names, NCCL, device="cuda", share_gpus="nccl", threads=4)
    assert not differences(got, "cuda")
