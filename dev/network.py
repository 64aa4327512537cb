"""Four ranks in network namespaces, connected by a relay that delays, limits, loses and cuts.

Each rank has a TUN device, whose packets the relay, a process, reads and writes. This needs neither
privileges nor netem in the kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ring_attn import explain, profiling
from ring_attn.core.mask import Mask
from ring_attn.machines.cluster import Cluster, Link
from ring_attn.planning.devices import cpu_cluster
from ring_attn.testing import Case, Heads, run_all_ranks, run_rank
from tests.distributed.pool import STOP, Pool, forkserver

RANKS = 4
DEVICE = "ring0"
MTU = 65000
# Constants of linux/sched.h and linux/if_tun.h: new namespaces of a user and of a network, and a
# device whose packets have no further header.
NEW_NAMESPACES = 0x10000000 | 0x40000000
TUN_SET = 0x400454CA
TUN_OPTIONS = 0x1001

SEQLEN = 128
HEADS = Heads(32, 32, 128, 128)
STRATEGIES = ("ring", "exchange", "all_gather")
# The largest factor between a wait and its prediction.
NEAR = 1.25


class Waits(NamedTuple):
    """Seconds of waits, as planned and as measured."""

    planned: float
    measured: float


class Network(NamedTuple):
    """The network between any two ranks.

    Attributes:
        delay: seconds from the sender to the receiver.
        rate: bytes/s of each rank, in each direction.
        loss: share of packets that are lost.
        cut: ranks that are cut off from the others, but not from each other.
    """

    delay: float = 1e-3
    rate: float = 125e6
    loss: float = 0.0
    cut: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{1e3 * self.delay:g} ms, {8e-6 * self.rate:g} Mbit/s, {100 * self.loss:g} % lost"


# The networks, and the documents of the mask. In one prediction the latency dominates, in another
# the rate.
NETWORKS = {
    Network(delay=50e-3, rate=125e6): (0, 128),
    Network(delay=10e-3, rate=25e6): (0, 64, 128),
    Network(delay=1e-3, rate=6.25e6): (0, 64, 128),
}


def why_not() -> str | None:
    """Return the reason why ranks cannot have separate networks here, or None."""
    words = ["unshare", "-Urn", "ip", "tuntap", "add", DEVICE, "mode", "tun"]
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespace with a TUN device: {getattr(error, 'stderr', error)}"
    return None


def enter(rank: int, relay: Connection) -> str:
    """Move this rank into a network whose device the relay gets; return the address of rank 0."""
    user = os.getuid()
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMESPACES):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "unshare")
    with open("/proc/self/uid_map", "w") as users:
        users.write(f"0 {user} 1")
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUN_SET, struct.pack("16sH22x", DEVICE.encode(), TUN_OPTIONS))
    # TCP windows are open from the start, because the planner does not model slow start.
    buffer = "4096 8388608 16777216"
    for name, value in (("slow_start_after_idle", "0"), ("rmem", buffer), ("wmem", buffer)):
        with open(f"/proc/sys/net/ipv4/tcp_{name}", "w") as setting:
            setting.write(value)
    for words in (
        "link set lo up",
        f"address add 10.0.0.{rank + 1}/32 dev {DEVICE}",
        f"link set {DEVICE} mtu {MTU} txqueuelen 10000 up",
        f"route add 10.0.0.0/24 dev {DEVICE} initcwnd 1000 initrwnd 1000 rto_min 400ms",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    send_handle(relay, tun, os.getppid())
    return "10.0.0.1"


class Relay:
    """Delivers packets; each rank serves its receivers in turn, so that none waits for another.

    `Any`: `events` has methods with their arguments.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self.ends = ends
        self.network = Network()
        self.random = Random(0)
        self.numbers = count()
        # Packets by sender and receiver.
        self.queues = [[deque[bytes]() for _ in range(RANKS)] for _ in range(RANKS)]
        self.last_receiver = [0] * RANKS
        self.sends = [False] * RANKS  # whether a rank is sending
        self.free_in = [0.0] * RANKS  # when the receiving side of a rank is free
        # (time, number, method, arguments), a heap.
        self.events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, when: float, call: Callable[..., object], *args: Any) -> None:
        """Make a call at some time."""
        heappush(self.events, (when, next(self.numbers), call, args))

    def take(self, rank: int, packet: bytes) -> None:
        """Take a packet from a rank."""
        to = packet[19] - 1  # the last byte of the address is rank + 1
        if packet[0] >> 4 == 4 and 0 <= to < RANKS:  # IPv4, and not a broadcast
            self.queues[rank][to].append(packet)
            if not self.sends[rank]:
                self.send(rank, time.monotonic())

    def send(self, rank: int, now: float) -> None:
        """Begin to send the next packet of a rank, if there is one."""
        in_turn = [(self.last_receiver[rank] + i) % RANKS for i in range(1, 1 + RANKS)]
        to = next((to for to in in_turn if self.queues[rank][to]), None)
        self.sends[rank] = to is not None
        if to is not None:
            self.last_receiver[rank] = to
            packet = self.queues[rank][to].popleft()
            seconds = len(packet) / self.network.rate
            self.at(now + seconds, self.left, rank, to, packet, now + seconds, seconds)

    def left(self, rank: int, to: int, packet: bytes, now: float, seconds: float) -> None:
        """Deliver a packet that has left its rank, unless it is lost."""
        self.send(rank, now)
        self.free_in[to] = max(self.free_in[to] + seconds, now)
        cut = (rank in self.network.cut) != (to in self.network.cut)
        if self.random.random() >= self.network.loss and not cut:
            self.at(self.free_in[to] + self.network.delay, os.write, self.ends[to], packet)

    def run(self, control: Connection) -> None:
        """Run until `control` is closed, from which changes of the network are read."""
        pipes: list[Connection | int] = [control, *self.ends]
        while True:
            while self.events and self.events[0][0] <= time.monotonic():
                _, _, call, args = heappop(self.events)
                call(*args)
            wait = max(0.0, self.events[0][0] - time.monotonic()) if self.events else None
            ready = select.select(pipes, [], [], wait)[0]
            for rank, end in enumerate(self.ends):
                if end in ready:
                    self.take(rank, os.read(end, MTU))
            if control in ready:
                try:
                    self.network = control.recv()
                except EOFError:
                    return


def relay(tuns: Sequence[Connection], control: Connection) -> None:
    Relay([recv_handle(pipe) for pipe in tuns]).run(control)


class Net(Pool):
    """The ranks, and the relay between them."""

    def __init__(self) -> None:
        context = forkserver()
        pipes = [context.Pipe() for _ in range(RANKS)]
        self._control, control = context.Pipe()
        given = [end for end, _ in pipes], control
        self._relay = context.Process(target=relay, args=given, daemon=True)
        self._relay.start()
        super().__init__(
            RANKS, enter=[partial(enter, r, pipe) for r, (_, pipe) in enumerate(pipes)]
        )
        for pipe in (control, *(end for pair in pipes for end in pair)):
            pipe.close()

    def change(self, network: Network) -> None:
        self._control.send(network)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._control.close()
        self._relay.join(STOP)


# -- calls


def waits(case: Case) -> list[float]:
    """Return the seconds of waits of this rank in each of three calls."""
    found = []
    for _ in range(3):
        # All ranks begin at the same time, by the clock that they share.
        start = [time.monotonic() + 0.5]
        dist.broadcast_object_list(start)
        time.sleep(max(0.0, start[0] - time.monotonic()))
        with profiling.collect():
            run_rank(case)
        stats = profiling.stats()
        assert stats.forward is not None and stats.backward is not None
        found.append(stats.forward.wait_s + stats.backward.wait_s)
    return found


def compared(net: Net, network: Network, name: str) -> Waits:
    """Return the longest waits of a strategy for bytes, forward and backward.

    The shortest of several calls counts, because calls wait longer on a busy machine.
    """
    net.change(network)
    cuts = NETWORKS[network]
    # Messages and gloo's collectives take a round trip, because the receiver requests the bytes.
    link = Link("relay", 2 * network.delay, network.rate)
    core = cpu_cluster()
    ops = ("all_gather", "reduce_scatter", "all_to_all")
    cluster = Cluster(core.device, 1, link, link, collectives=dict.fromkeys(ops, link))
    best = explain(
        seqlen=SEQLEN,
        world_size=RANKS,
        cu_seqlens=cuts,
        **HEADS._asdict(),
        dtype=torch.float32,
        layout="contiguous",
        strategies=[name],
        backend="aten",
        cluster=cluster,
        effort="all",
    ).best
    assert best.prediction is not None and best.prediction.backward is not None
    directions = (best.prediction.forward, best.prediction.backward)
    planned = sum(direction.exposed + direction.late for direction in directions)
    mask = Mask(SEQLEN, SEQLEN, cu_seqlens_q=cuts, cu_seqlens_k=cuts)
    case = Case(mask, strategy=best.strategy, backend="aten", heads=HEADS)
    failures = run_all_ranks(case, RANKS, net.run).failures
    assert not failures, failures
    measured = inf
    for _ in range(8):
        by_call = zip(*net.run(waits, case), strict=True)  # of all ranks
        measured = min(measured, *(max(of_ranks) for of_ranks in by_call))
        if measured < NEAR * planned:
            break
    return Waits(planned, measured)


def are_as_predicted(rows: dict[str, Waits]) -> bool:
    """Return whether all waits are near the planned waits, and in the same order."""
    near = all(1 / NEAR < row.measured / row.planned < NEAR for row in rows.values())
    by_plan = sorted(rows, key=lambda name: rows[name].planned)
    by_measure = sorted(rows, key=lambda name: rows[name].measured)
    return near and by_plan == by_measure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure waits on slow networks. Other processes of the machine make them longer."
    )


def run(args: argparse.Namespace) -> int:
    if (reason := why_not()) is not None:
        raise RuntimeError(reason)
    bad = False
    with Net() as net:
        for network in NETWORKS:
            rows = {name: compared(net, network, name) for name in STRATEGIES}
            for name, (planned, measured) in rows.items():
                print(
                    f"{network}: {name} waits {measured:.3f} s, planned {planned:.3f} s", flush=True
                )
            if not are_as_predicted(rows):
                print(
                    f"{network}: BAD, the waits differ from the plan by more than a factor of "
                    f"{NEAR:g}, or are in another order"
                )
                bad = True
    return int(bad)
