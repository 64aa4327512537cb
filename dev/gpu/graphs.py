"""One process with NCCL: calls in CUDA graphs, and messages that NCCL sends to itself."""

from __future__ import annotations

import statistics
import time
from functools import cache

import torch
import torch.distributed as dist

import ring_attn
from dev.gpu import device
from dev.gpu.cells import Figures, NotHere
from ring_attn.torch_private import SECOND_NCCL_CLASS, coalesced, nccl_options
from ring_attn.transport.options import MAX_CTAS

ROWS, HEADS, DIM, REPLAYS = 4096, 8, 128, 20
MESSAGES = (64, 16 << 10, 1 << 20, 16 << 20, 64 << 20)
WARM_UPS, REPEATS = 3, 20


@cache
def alone() -> torch.device:
    """Make the process group of this process alone."""
    device.need_cuda("NCCL and graphs run on CUDA")
    where = torch.device("cuda", 0)
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=where)
    return where


def capture(strategy: str) -> Figures:
    """Capture forward and backward; compare the bits of replays with those of eager calls."""
    where = alone()
    layout = ring_attn.SequenceLayout.zigzag(seqlen=ROWS, world_size=1)
    shape = (4, 1, ROWS, HEADS, DIM)
    given = torch.randn(shape, device=where, dtype=torch.bfloat16)

    def call() -> list[torch.Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in given[:3])
        out = ring_attn.ring_attention(q, k, v, causal=True, layout=layout, strategy=strategy)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3])]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for replay in range(REPLAYS):
        given.copy_(torch.randn(shape, device=where, dtype=torch.bfloat16))
        graph.replay()
        replayed = [x.clone() for x in captured]
        eager = call()
        for name, x, y in zip(("out", "dq", "dk", "dv"), replayed, eager, strict=True):
            if not torch.equal(x, y):
                raise AssertionError(f"replay {replay}: {name} has other bits than an eager call")
    return {"replays": REPLAYS}


def messages_to_itself() -> Figures:
    """Time messages that the only rank sends to itself, and the host's share of a post."""
    where = alone()
    figures: Figures = {}
    for nbytes in MESSAGES:
        sent = torch.randint(255, (nbytes,), dtype=torch.uint8, device=where)
        received = torch.zeros_like(sent)
        operations = [
            dist.P2POp(dist.isend, sent, 0),
            dist.P2POp(dist.irecv, received, 0),
        ]
        host, whole = [], []
        for _ in range(WARM_UPS + REPEATS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            works = dist.batch_isend_irecv(operations)
            host.append(time.perf_counter() - start)
            for work in works:
                work.wait()
            torch.cuda.synchronize()
            whole.append(time.perf_counter() - start)
        if not torch.equal(sent, received):
            raise AssertionError(f"a message of {nbytes} bytes arrived with other bytes")
        figures[f"{nbytes} B, us"] = round(1e6 * statistics.median(whole[WARM_UPS:]), 1)
        figures["post_us"] = round(1e6 * statistics.median(host[WARM_UPS:]), 1)
    return figures


def second_class() -> Figures:
    """Start two coalesced collectives over torch's second class of NCCL process groups.

    Each result is compared on the device, without a wait of the host: a work that is not waited for
    leaves other bytes. Returns the host's time of a start.
    """
    where = alone()
    nccl = getattr(dist, SECOND_NCCL_CLASS, None)
    if nccl is None:
        raise NotHere(f"torch {torch.__version__} has no {SECOND_NCCL_CLASS}")
    options = nccl_options(nccl, "second class", 30.0, MAX_CTAS, [0])
    communicator = nccl(dist.HashStore(), 0, 1, options, where)
    host = []
    for nbytes in MESSAGES:
        for _ in range(WARM_UPS + REPEATS):
            sent = torch.randint(255, (nbytes,), dtype=torch.uint8, device=where)
            exchanged, gathered = torch.zeros_like(sent), torch.zeros_like(sent)
            start = time.perf_counter()
            works = coalesced(
                communicator,
                [
                    (communicator.alltoall_base, exchanged, sent, [nbytes], [nbytes]),
                    (communicator._allgather_base, gathered, sent),
                ],
            )
            works.wait()
            host.append(time.perf_counter() - start)
            if not (torch.equal(exchanged, sent) and torch.equal(gathered, sent)):
                raise AssertionError(f"a message of {nbytes} bytes arrived with other bytes")
    communicator.shutdown()
    return {"post_us": round(1e6 * statistics.median(host), 1)}
