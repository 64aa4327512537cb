"""A rank of `dev.gpu.ranks`, and the cases that it runs."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ring_attn
from dev.gpu.cells import Figures
from dev.gpu.rings import CALL_DIM, CALL_HEADS, CALL_ROWS, ROWS_OF_RANK, case_of
from ring_attn.attention.connections import CHANNELS as connected
from ring_attn.core.program import CHANNELS, Hop
from ring_attn.testing import run_all_ranks
from ring_attn.transport.base import Agreement
from ring_attn.transport.options import MAX_CTAS, TransportOptions
from ring_attn.transport.p2p import open_p2p

MOST_RANKS = 4

# Seconds after which a missing peer is an error.
TIMEOUT = 10.0

KIB, MIB = 1 << 10, 1 << 20
SMALL = (0, 64, 8 * KIB, 16 * KIB - 64, 16 * KIB, 16 * KIB + 64, 128 * KIB)
# Around 16 MiB NCCL changes the number of its channels.
LARGE = (16 * MIB - 64, 16 * MIB + 64, 40 * MIB)

# Cycles of the GPU for which a late rank sleeps at most: about 10 ms, by an estimate of
# 2 GHz.
SLEEP_CYCLES = 20_000_000

TRIAL_ROWS, TRIAL_DIM = 64, 16


def serve(way: str, variables: Mapping[str, str], pipe: Connection) -> None:
    """Join the process group; run the cases that come, and send an answer for each."""
    os.environ.update(variables)
    # The ranks share the cores; with gloo each computes the oracle on them.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // MOST_RANKS))
    timeout = timedelta(seconds=TIMEOUT)
    if way == "gloo":
        dist.init_process_group("gloo", timeout=timeout)
    else:
        gpu = torch.device("cuda", 0)
        torch.cuda.set_device(gpu)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=gpu, timeout=timeout)
    pipe.send({"figures": None})
    while True:
        case, arguments = pipe.recv()
        try:
            pipe.send({"figures": globals()[case](*arguments)})
        except Exception as error:
            pipe.send({"error": f"{type(error).__name__}: {error}"[:3000]})


def on_cuda() -> bool:
    return "nccl" in dist.get_backend_config()


def where() -> torch.device:
    return torch.device("cuda", 0) if on_cuda() else torch.device("cpu")


# -- cases: functions that all ranks call with the same arguments


def first_contact() -> Figures:
    """Check a sum over all ranks, and a message from each rank to the next."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.full((1000,), float(rank + 1), device=where())
    dist.all_reduce(total)
    assert total.eq(size * (size + 1) / 2).all(), total
    sent = torch.full((1000,), float(rank), device=where())
    received = torch.empty_like(sent)
    after, before = (rank + 1) % size, (rank - 1) % size
    operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.eq(float(before)).all(), received
    return {"nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_cuda() else None}


def connection_memory() -> Figures:
    """Measure the memory of each channel of our communicators, of two ranks; none must exist yet.

    The GPU's free memory also counts the other ranks.
    """
    torch.cuda.empty_cache()
    dist.barrier()
    before = torch.cuda.mem_get_info()[0]
    ring_attn.prepare()
    torch.cuda.synchronize()
    dist.barrier()
    used = before - torch.cuda.mem_get_info()[0]
    connections = dist.get_world_size() * len(connected) * MAX_CTAS
    return {"MiB": used / connections / 2**20, "all_MiB": used / 2**20}


def channels() -> Figures:
    """Read from NCCL's log how many channels a peer has, in the last communicator."""
    log = Path(os.environ["NCCL_DEBUG_FILE"]).read_text(errors="replace")
    found = re.findall(r"(\d+) p2p channels, (\d+) p2p channels per peer", log)
    assert found, f"NCCL's log says nothing of channels: {log[-500:]}"
    return {"channels": int(found[-1][0]), "per peer": int(found[-1][1])}


def strategy(name: str, layout: str) -> Figures:
    """Compare with the oracle, with a second run, and with the ring in one process.

    NCCL sums the gradients of an all-gather over more than two ranks in an order of its own.
    """
    size = dist.get_world_size()
    case = case_of(name, layout, ROWS_OF_RANK * size)
    got, again = (run_all_ranks(case, size, everywhere, device=where()) for _ in range(2))
    assert not got.failures, got.failures
    assert got.differing(again) == [], f"other bits in a second run: {got.differing(again)}"
    others = set(got.differing(run_all_ranks(case, size, device=where())))
    summed = on_cuda() and "all_gather" in name and size > 2
    assert others <= ({"dk", "dv"} if summed else set()), (
        f"other bits than in one process: {others}"
    )
    return {"ratio": max(round(float(verdict.ratio), 3) for verdict in got.verdicts)}


def sizes() -> Figures:
    """Send messages of all sizes around on every lane; compare each byte."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert world is not None
    transport = open_p2p(world, TransportOptions(timeout=TIMEOUT))
    after, before = (rank + 1) % size, (rank - 1) % size
    header = transport.pool(where()).header
    given = SMALL + LARGE if on_cuda() else SMALL
    with transport.call("messages of all sizes", Agreement({}), where()):
        for step, nbytes in enumerate(given):
            received = []
            for lane, channel in enumerate(CHANNELS):
                space = torch.zeros(header, dtype=torch.uint8, device=where())
                message = torch.cat((space, numbered(nbytes, rank, lane)))
                received.append(torch.full_like(message, 255))
                transport.post(channel, step, Hop(after, before), message, received[lane])
            for lane, channel in enumerate(CHANNELS):
                transport.wait(channel)
                same = torch.equal(received[lane][header:], numbered(nbytes, before, lane))
                assert same, f"{nbytes} bytes on {channel}"
    transport.check()
    return {"sizes": len(given), "lanes": len(CHANNELS)}


def numbered(nbytes: int, rank: int, lane: int) -> Tensor:
    """Bytes by which a message of another rank, lane or place is known."""
    factor = 2 * rank + 5 * lane + 3
    return (torch.arange(nbytes, dtype=torch.int32, device=where()) * factor % 251).byte()


def late_ranks(trials: int) -> Figures:
    """Make drawn ranks late before calls; all trials have the same bits."""
    drawn = random.Random(dist.get_rank())
    first = call()
    for trial in range(trials):
        with late(drawn):
            got = call()
        for name, x, y in zip(("out", "dq", "dk", "dv"), first, got, strict=True):
            assert torch.equal(x, y), f"trial {trial}: {name} has other bits"
    return {"trials": trials}


@contextmanager
def late(drawn: random.Random) -> Iterator[None]:
    """Sleep on the device before, and on the side stream within, by chance."""
    if on_cuda() and drawn.random() < 0.5:
        torch.cuda._sleep(drawn.randrange(SLEEP_CYCLES))
    yield
    if on_cuda() and drawn.random() < 0.5:
        torch.cuda._sleep(drawn.randrange(SLEEP_CYCLES))


def graph(replays: int) -> Figures:
    """Capture forward and backward on all ranks; replays have the bits of eager calls."""
    assert on_cuda(), "graphs are of CUDA"
    given = torch.randn(4, 1, rows(), CALL_HEADS, dim(), device=where(), dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call(given)
    torch.cuda.synchronize()
    captured_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured_graph):
        captured = call(given)
    for replay in range(replays):
        given.normal_()
        captured_graph.replay()
        replayed = [x.clone() for x in captured]
        for name, x, y in zip(("out", "dq", "dk", "dv"), replayed, call(given), strict=True):
            assert torch.equal(x, y), f"replay {replay}: {name} has other bits"
    return {"replays": replays}


def disagreement(argument: str) -> None:
    """Rank 1 passes another argument: a call, a later call or `check` must raise."""
    other: Figures = {"causal": False} if argument == "causal" else {"softmax_scale": 0.5}
    call()
    call(**(other if dist.get_rank() == 1 else {}))
    call()
    ring_attn.check()


def call_once() -> None:
    call()


def call_often() -> None:
    """Call until an error, which a killed peer must cause."""
    while True:
        call()
        ring_attn.check()


def rows() -> int:
    return CALL_ROWS if on_cuda() else TRIAL_ROWS


def dim() -> int:
    return CALL_DIM if on_cuda() else TRIAL_DIM


def call(given: Tensor | None = None, **changes: Any) -> list[Tensor]:
    """A causal forward and backward of this rank's rows, of the same data at each call."""
    if given is None:
        generator = torch.Generator(where()).manual_seed(dist.get_rank())
        dtype = torch.bfloat16 if on_cuda() else torch.float32
        shape = (4, 1, rows(), CALL_HEADS, dim())
        given = torch.randn(shape, generator=generator, device=where(), dtype=dtype)
    size = dist.get_world_size()
    layout = ring_attn.SequenceLayout.zigzag(seqlen=rows() * size, world_size=size)
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    transport = TransportOptions(timeout=TIMEOUT)
    options: Figures = {"causal": True, "strategy": "ring", **changes}
    out = ring_attn.ring_attention(q, k, v, layout=layout, transport=transport, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3])]


def everywhere(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of a function of all ranks, as `run_all_ranks` asks for them."""
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, function(*arguments))
    return results
