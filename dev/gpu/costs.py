"""Single figures that the planner assumes: host times, a first use, decoding, a slower kernel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dev.gpu import device
from dev.gpu.cells import Figures
from dev.gpu.graphs import alone
from ring_attn.attention import first_use
from ring_attn.backends import Purpose, get_backend
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.tiles import pair_tiles
from ring_attn.testing import random_qkv

WARM_UPS, REPEATS = 5, 50
MESSAGE_BYTES = 1 << 20


def host_us(call: Callable[[], object]) -> float:
    """Microseconds that the host needs to issue a call, the median; the device is idle before."""
    times = []
    for _ in range(WARM_UPS + REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(1e6 * statistics.median(times[WARM_UPS:]), 2)


def host() -> Figures:
    """Host times of a launch, a copy, a post and a wait, as `Host` of the planner has them."""
    where = alone()
    mask = Mask(1024, 1024)
    inputs = random_qkv(
        seqlen_q=1024, nheads=8, nheads_kv=2, headdim=128, device=where, dtype=torch.bfloat16
    )
    layout = SequenceLayout.contiguous(1024, 1)
    tiles, backend = pair_tiles(layout, layout, mask, 0, 0), get_backend("triton")
    scores, state = Scores(128**-0.5), backend.new_state(inputs.q, 128)

    def launch() -> None:
        backend.forward(inputs.q, inputs.k, inputs.v, tiles, state, scores=scores, last=False)

    sent = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=where)
    received, copied = torch.empty_like(sent), torch.empty_like(sent)
    operations = [dist.P2POp(dist.isend, sent, 0), dist.P2POp(dist.irecv, received, 0)]
    works: list[Any] = []

    def post() -> None:
        works[:] = dist.batch_isend_irecv(operations)

    def wait() -> None:
        for work in works:
            work.wait()

    return {
        "launch_us": host_us(launch),
        "copy_us": host_us(lambda: copied.copy_(sent)),
        "post_us": host_us(post),
        "wait_us": host_us(wait),
    }


def slowdown() -> Figures:
    """The share of its speed that attention loses while messages of NCCL are under way."""
    where = alone()
    inputs = random_qkv(
        seqlen_q=8192, nheads=32, nheads_kv=8, headdim=128, device=where, dtype=torch.bfloat16
    )
    layout = SequenceLayout.contiguous(8192, 1)
    tiles = pair_tiles(layout, layout, Mask(8192, 8192), 0, 0)
    backend, scores = get_backend("triton"), Scores(128**-0.5)
    sent = torch.zeros(256 << 20, dtype=torch.uint8, device=where)
    received = torch.empty_like(sent)
    operations = [dist.P2POp(dist.isend, sent, 0), dist.P2POp(dist.irecv, received, 0)]

    def attend() -> None:
        state = backend.new_state(inputs.q, 128)
        backend.forward(inputs.q, inputs.k, inputs.v, tiles, state, scores=scores, last=True)

    def ms(messages: int) -> float:
        torch.cuda.synchronize()
        works = [work for _ in range(messages) for work in dist.batch_isend_irecv(operations)]
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            attend()
        stop.record()
        for work in works:
            work.wait()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 5

    for messages in (0, 20):
        ms(messages)
    lone, beside = (statistics.median(ms(messages) for _ in range(5)) for messages in (0, 20))
    return {"alone_ms": lone, "beside_ms": beside, "share": round(1 - lone / beside, 4)}


def use_for_the_first_time() -> Figures:
    """Seconds of the case that a first call runs, beside compiling."""
    device.need_cuda("a first use")
    sizes = ("cuda", torch.bfloat16, 1, 32, 8, 128, 128)
    purpose = Purpose(backward=True)
    seconds = []
    for use in first_use.uses("triton", AttentionSpec(*sizes), purpose):
        first_use.proof(use)  # compiles
        torch.cuda.synchronize()
        start = time.perf_counter()
        first_use.proof(use)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": round(max(seconds), 3)}


def decode(rows: int) -> Figures:
    """Microseconds of one token over a cache of so many rows, and the bandwidth that it reads."""
    import ring_attn

    where = alone()
    heads, kv_heads, dim = 32, 8, 128
    q = torch.randn(1, 1, heads, dim, device=where, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, rows, kv_heads, dim, device=where, dtype=torch.bfloat16)
    layout = SequenceLayout.contiguous(rows, 1)

    def call() -> None:
        ring_attn.tree_decode(q, k, v, layout=layout)

    for _ in range(WARM_UPS):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPEATS):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    us = 1e3 * start.elapsed_time(stop) / REPEATS
    return {"us": round(us, 1), "TBs": round((k.numel() + v.numel()) * 2 / us * 1e-6, 3)}
