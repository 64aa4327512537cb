"""What a ring costs beside its share of the whole, on one device: kernels, host, copies.

    python -m ring_attn.bench.ring_cost --json DIR/ring_cost.json      on a GPU
    python -m ring_attn.bench.ring_cost --device cpu --quick

Ranks take turns (`turns`), so each is timed alone: the first, the last and one in the middle.
Within every repetition a rank runs once with each kind of copies, which bring it the real bytes of
K and V, and of their gradients:

    none      copied while the rank waits: nothing is under way beside the kernels
    device    from device memory, by a stream of its own, as fast as it goes
    paced     the same, slowed down to --gbps, what a link between GPUs gives
    host      from and to pinned host memory, by the copy engines over PCIe

    % of ideal    1 / P of the kernels of one call over the whole, against those of the slowest rank
    slow-down     the kernels' time with copies under way against without
    waiting       of the slowest rank, beside its kernels and passes: what is not hidden (of `none`:
                  the copies themselves)
    host          us that the host takes to enqueue a step, without marks: Python and launches; of
                  `none` without any transport, of `device` with what its copies take to start
                  (on a CPU the host computes the step)

Every timed rank's out is held against the whole call's, must have the same bits with all copies,
and as many bytes must be brought as the plan says. Exit status 1 where one of these fails.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from ring_attn.arguments import (
    format_size,
    parse_size,
    parse_sizes,
)
from ring_attn.backends import get_backend
from ring_attn.bench.implementations import Problem
from ring_attn.bench.local_ring import LocalRing, Times, samples, timed_calls
from ring_attn.bench.one_device import (
    Findings,
    OneDevice,
    add_device_arguments,
    chosen_of,
    finish,
    one_device,
    run_module,
)
from ring_attn.bench.timing import (
    LEAST_HEAD_START_MS,
    HostWatch,
    head_start_ms,
    watch_for,
)
from ring_attn.bench.turns import Copies, Offload, Shards, Turns
from ring_attn.cost import gradient_packet, shard_packet
from ring_attn.layout import SequenceLayout
from ring_attn.strategies.ring import RingCall, make_call

LAYOUTS = ("zigzag", "contiguous")
MODES = ("fwd", "bwd")

# The name of every kind of copies, with where K and V lie then.
COPIES: dict[str, tuple[Offload, Copies]] = {
    "none": ("none", Copies(hidden=False)),
    "device": ("none", Copies()),
    "paced": ("none", Copies()),
    "host": ("kv", Copies()),
}
LINK_GBPS = 400.0

# Of the host's time a step what the target is; and what a rank's kernels may take beside 1 / P.
HOST_US, KERNELS_OVER_SHARE = 30.0, 1.03

# A rank's out may be so far from the whole call's, as a share of its norm: both round to 16 bits.
MOST_DISTANCE = 1e-2

ITERS = 3


@dataclass(frozen=True)
class Case:
    """One ring."""

    world_size: int
    rows: int
    layout: str

    def __str__(self) -> str:
        return f"{self.world_size} x {format_size(self.rows)}, {self.layout}"


@dataclass(frozen=True)
class CostRow:
    """One ring in one direction with one kind of copies; a figure for each timed rank; medians.

    Attributes:
        ranks: that were timed.
        share_ms: kernels of the whole call / world_size.
        kernels_ms: of each rank.
        rank_ms: with the driver's own passes.
        waiting_ms: between them.
        copy_ms: from the first to the last byte of each exchange, added up.
        host_us: a step, of the slowest rank; None where it is not measured.
        steps: of a rank.
        bytes_brought: of each rank, in one call.
        bytes_planned: by the plan.
        efficiency: share_ms / the most of kernels_ms.
        slowdown: all ranks' kernels_ms over those without copies, less 1.
        distance: of out from the whole call's, as a share of its norm.
        same_bits: out and dq have the bits that they have without copies beside the kernels.
        note: why there is nothing.
    """

    world_size: int
    rows: int
    layout: str
    mode: str
    copies: str
    ranks: tuple[int, ...] = ()
    share_ms: float | None = None
    kernels_ms: tuple[float, ...] = ()
    rank_ms: tuple[float, ...] = ()
    waiting_ms: tuple[float, ...] = ()
    copy_ms: tuple[float, ...] = ()
    host_us: float | None = None
    steps: int = 0
    bytes_brought: tuple[int, ...] = ()
    bytes_planned: tuple[int, ...] = ()
    efficiency: float | None = None
    slowdown: float | None = None
    distance: float | None = None
    same_bits: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Sample:
    """One run of one rank in one direction."""

    kernels_ms: float
    rank_ms: float
    waiting_ms: float
    copy_ms: float
    host_us: float | None
    brought: int
    result: Tensor


@dataclass(frozen=True, kw_only=True)
class Setting(OneDevice):
    """What is measured."""

    cases: tuple[Case, ...]
    copies: tuple[str, ...]
    gbps: float
    iters: int


def cases(world_sizes: Sequence[int], rows: Sequence[int]) -> tuple[Case, ...]:
    """All of them; first what a target is set for, 8 ranks, then by the work of the whole."""
    sizes = sorted(
        ((p, n) for p in world_sizes for n in rows), key=lambda size: (size[0] != 8, size)
    )
    return tuple(Case(p, n, layout) for p, n in sizes for layout in LAYOUTS)


class RingCost(Findings[Setting, CostRow]):
    """One run: measures case by case."""

    def __init__(self, setting: Setting, command: str = "", json: Path | None = None) -> None:
        """As `Findings`; it is saved after every case."""
        super().__init__(setting, command, json)
        self._watch = watch_for(setting.device)
        self._wholes: dict[int, tuple[dict[str, float], Tensor]] = {}
        self._host_ms: dict[tuple[object, ...], float] = {}
        self._seconds_of_pair = 0.0  # of a whole case, by the largest so far
        self._largest = 0

    def run(self) -> None:
        """Every case that the budget has time for."""
        for case in self.setting.cases:
            note = self._too_long(case)
            if note:
                self.rows += self._empty(case, note)
                continue
            started = time.monotonic()
            try:
                self.rows += self._measure(case)
            except (torch.OutOfMemoryError, NotImplementedError) as error:
                self.rows += self._empty(case, f"cannot run: {str(error).splitlines()[0]}")
            pairs = (case.world_size * case.rows) ** 2
            if pairs >= self._largest:
                self._largest = pairs
                self._seconds_of_pair = (time.monotonic() - started) / pairs
            self._free()
            self.save()
        self.save(last=True)

    def summary(self) -> list[str]:
        """The targets against what was found, and what failed."""
        timed = [row for row in self.rows if row.kernels_ms and row.copies == "none"]
        lines = []
        for mode in MODES:
            mine = [row for row in timed if row.mode == mode]
            eight = [row for row in mine if (row.world_size, row.layout) == (8, "zigzag")]
            lines += [
                f"{mode}, {row.world_size} x {format_size(row.rows)} zigzag: kernels "
                f"{1.0 / (row.efficiency or 1.0):.3f} of 1/{row.world_size} of the whole "
                f"(target {KERNELS_OVER_SHARE:g})"
                for row in eight
            ]
            hosts = [row.host_us for row in mine if row.host_us is not None]
            if hosts and self.setting.device.type == "cuda":
                lines.append(
                    f"{mode}: the host takes {min(hosts):.0f} to {max(hosts):.0f} us a step "
                    f"(target {HOST_US:g})"
                )
        measured = len({(row.world_size, row.rows, row.layout) for row in timed})
        seconds = self.seconds
        return [*lines, f"{measured} rings in {seconds:.0f} s, {len(self.failures)} failures"]

    def more(self) -> dict[str, Any]:
        """What its report says beside."""
        return {"summary": self.summary()}

    def _too_long(self, case: Case) -> str:
        budget, spent = self.setting.budget, self.seconds
        expected = self._seconds_of_pair * (case.world_size * case.rows) ** 2
        if budget is not None and spent + expected > budget:
            return f"not measured: beyond the budget of {budget:g} s"
        return ""

    def _empty(self, case: Case, note: str) -> list[CostRow]:
        return [
            CostRow(case.world_size, case.rows, case.layout, mode, name, note=note)
            for mode in MODES
            for name in self.setting.copies
        ]

    def _measure(self, case: Case) -> list[CostRow]:
        problem = self.setting.problem(case.world_size * case.rows)
        inputs = problem.data().rows_first
        whole, out = self._whole(problem)
        layout = SequenceLayout.from_name(case.layout, problem.seqlen, case.world_size)
        calls = [
            make_call(
                problem.spec, (layout, layout), problem.mask, rank, backend=self.setting.backend
            )
            for rank in range(case.world_size)
        ]
        turns = self._turns(calls, layout, inputs)
        del inputs
        ranks = timed_ranks(case.world_size)
        found: dict[tuple[str, str], list[list[Sample]]] = {}
        distances = list[float]()
        for rank in ranks:
            mine = self._rank(case, turns, rank)
            for key, taken in mine.items():
                found.setdefault(key, []).append(taken)
            distances.append(distance(mine["fwd", "none"][0].result, layout.shard(out, rank)))
        rows = [
            self._row(case, mode, name, ranks, found, whole, calls)
            for mode in MODES
            for name in self.setting.copies
        ]
        return [self._checked(replace(row, distance=max(distances))) for row in rows]

    def _turns(
        self, calls: Sequence[RingCall], layout: SequenceLayout, inputs: Sequence[Tensor]
    ) -> dict[str, Turns]:
        """By the kind of copies; those on the device share their tensors."""
        by_place: dict[Offload, Shards] = {}
        turns = {}
        for name in self.setting.copies:
            place, copies = COPIES[name]
            if name == "paced":
                copies = replace(copies, gbps=self.setting.gbps)
            if place not in by_place:
                by_place[place] = shards = Shards(self.setting.device, place)
                for rank in range(layout.world_size):
                    for which, x in zip(("q", "k", "v", "dout"), inputs, strict=True):
                        shards.put(which, rank, layout.shard(x, rank))
            turns[name] = Turns(calls, by_place[place], copies, self._watch)
        return turns

    def _whole(self, problem: Problem) -> tuple[dict[str, float], Tensor]:
        """Kernels' ms of one call over the whole, by mode, and its out; kept for other rings."""
        if problem.seqlen not in self._wholes:
            ring = LocalRing(
                problem, problem.data(), world_size=1, layout="contiguous",
                backend=self.setting.backend,
            )  # fmt: skip
            taken = samples({"": ring}, self._watch, self.setting.iters, backward=True)[""]
            ms = {mode: statistics.median(one[0][0] for one in taken[mode]) for mode in MODES}
            ring.forward()
            self._wholes = {problem.seqlen: (ms, ring.results()[0])}  # the last alone: memory
        return self._wholes[problem.seqlen]

    def _rank(
        self, case: Case, turns: Mapping[str, Turns], rank: int
    ) -> dict[tuple[str, str], list[Sample]]:
        """Samples of one rank by (mode, copies): all kinds in turn within every repetition."""
        found: dict[tuple[str, str], list[Sample]] = {}
        for repetition in range(-1, self.setting.iters):
            # The first only warms up: compiles, and puts the steps' tables on the device.
            for name, one in turns.items() if repetition >= 0 else [*turns.items()][:1]:
                taken = {"fwd": self._sample(case, one, rank, name, "fwd")}
                one.begin_backward()
                taken["bwd"] = self._sample(case, one, rank, name, "bwd")
                for mode, sample in taken.items():
                    if repetition >= 0:
                        found.setdefault((mode, name), []).append(sample)
        return found

    def _sample(self, case: Case, turns: Turns, rank: int, name: str, mode: str) -> Sample:
        """A marked run, and one for the host's time alone where no copies are slowed down."""
        work = turns.forward if mode == "fwd" else turns.backward
        key = (case, rank, name, mode)
        current = threading.local()
        current.times = times = Times(self._watch)
        before = turns.stats.bytes_received
        turns.copy_spans.clear()
        with timed_calls(get_backend(turns.calls[rank].backend), current):
            self._watch.ready(head_start_ms(self._host_ms.get(key, 0.0)))
            start = time.perf_counter()
            results = work(rank, times)
            self._host_ms[key] = 1e3 * (time.perf_counter() - start)
            self._watch.done()
        brought, copied = turns.stats.bytes_received - before, times.total_ms(turns.copy_spans)
        if mode == "fwd":
            for result, x in zip(("out", "lse"), results[:2], strict=True):
                turns.shards.put(result, rank, x)
        host_us = None
        if name in ("none", "device"):
            self._watch.ready(LEAST_HEAD_START_MS)
            bare = Times(HostWatch(), counts_posts=name != "none")
            work(rank, bare)
            steps = len(turns.calls[rank].plan(backward=mode == "bwd").steps)
            host_us = 1e6 * bare.host_s / steps
            self._watch.done()
        return Sample(
            times.total_ms(times.kernels),
            times.total_ms(times.spans),
            times.total_ms(times.waits),
            copied,
            host_us,
            brought,
            results[0],
        )

    def _row(
        self,
        case: Case,
        mode: str,
        name: str,
        ranks: tuple[int, ...],
        found: Mapping[tuple[str, str], list[list[Sample]]],
        whole: Mapping[str, float],
        calls: Sequence[RingCall],
    ) -> CostRow:
        taken, still = found[mode, name], found[mode, "none"]

        def medians(which: str, of: Sequence[Sequence[Sample]] = taken) -> tuple[float, ...]:
            return tuple(statistics.median(getattr(x, which) for x in one) for one in of)

        kernels, alone = medians("kernels_ms"), medians("kernels_ms", still)
        hosted = name in ("none", "device")
        share = whole[mode] / case.world_size
        equal = all(
            torch.equal(x.result, other.result)
            for one, others in zip(taken, still, strict=True)
            for x, other in zip(one, others, strict=True)
        )
        plans = [calls[rank].plan(backward=mode == "bwd") for rank in ranks]
        return CostRow(
            case.world_size,
            case.rows,
            case.layout,
            mode,
            name,
            ranks=ranks,
            share_ms=share,
            kernels_ms=kernels,
            rank_ms=medians("rank_ms"),
            waiting_ms=medians("waiting_ms"),
            copy_ms=medians("copy_ms"),
            host_us=max(medians("host_us")) if hosted else None,
            steps=len(plans[0].steps),
            bytes_brought=tuple(one[0].brought for one in taken),
            bytes_planned=tuple(bytes_to_bring(calls[rank], mode) for rank in ranks),
            efficiency=share / max(kernels),
            slowdown=sum(kernels) / sum(alone) - 1.0,
            same_bits=equal,
        )

    def _checked(self, row: CostRow) -> CostRow:
        """The row; what is wrong with it is a failure, and its note."""
        wrong = []
        if row.bytes_brought != row.bytes_planned:
            wrong.append(f"{row.bytes_brought} bytes were brought, planned {row.bytes_planned}")
        if not row.same_bits:
            wrong.append("copies beside the kernels change the result")
        if row.distance is None or not row.distance <= MOST_DISTANCE:  # a NaN is wrong too
            wrong.append(f"out is {row.distance} of its norm from the whole call's")
        case = Case(row.world_size, row.rows, row.layout)
        self.failures += [f"{case}, {row.mode}, copies {row.copies}: {text}" for text in wrong]
        return replace(row, note="; ".join(wrong))

    def _free(self) -> None:
        gc.collect()
        if self.setting.device.type == "cuda":
            torch.cuda.empty_cache()


def timed_ranks(world_size: int) -> tuple[int, ...]:
    """The first, the last and one in the middle."""
    return tuple(sorted({0, world_size // 2, world_size - 1}))


def bytes_to_bring(call: RingCall, mode: str) -> int:
    """What the plan has a rank receive in one direction."""
    plan = call.plan(backward=mode == "bwd")
    total = sum(
        shard_packet(call.spec, plan.travels, plan.rows_moving(transfer.brings)).nbytes
        for transfer in plan.shard_transfers
    )
    if mode == "bwd":
        for transfer in plan.gradient_transfers(continued=call.in_order):
            rows = plan.rows_moving(transfer.brings)
            total += gradient_packet(call.spec, plan.travels, rows).nbytes
    return total


def distance(x: Tensor, expected: Tensor) -> float:
    """Of two results, as a share of the expected one's norm."""
    return float((x.float() - expected.float()).norm() / expected.float().norm())


def table(rows: Sequence[CostRow], heads: str) -> Table:
    """A line for each ring, direction and kind of copies."""
    title = f"ring on one device, {heads}, causal; ms of the slowest rank"
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    names = ("ring", "mode", "copies", "share", "kernels", "% of ideal", "slow-down", "with driver",
             "waiting", "GB/s", "host us/step", "same bits")  # fmt: skip
    for name in names:
        found.add_column(name, justify="left" if name in names[:3] else "right", no_wrap=True)
    for row in rows:
        ring = str(Case(row.world_size, row.rows, row.layout))
        if not row.kernels_ms:
            found.add_row(ring, row.mode, row.copies, row.note)
            continue
        assert row.share_ms is not None and row.efficiency is not None, "a measured row has both"
        copied = sum(row.copy_ms)
        rate = f"{sum(row.bytes_brought) / copied / 1e6:.3g}" if copied else ""
        found.add_row(
            ring, row.mode, row.copies, f"{row.share_ms:.4g}", f"{max(row.kernels_ms):.4g}",
            f"{row.efficiency:.1%}", f"{row.slowdown:+.1%}", f"{max(row.rank_ms):.4g}",
            f"{max(row.waiting_ms):.3g}", rate,
            "" if row.host_us is None else f"{row.host_us:.0f}", "yes" if row.same_bits else "NO",
        )  # fmt: skip
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add = parser.add_argument
    add("--ranks", type=parse_sizes, help="numbers of ranks (2,4,8,16; with --quick 2,4)")
    add("--rows", type=parse_sizes, help="of each rank (8k,16k; with --quick 2k, on a CPU 64)")
    add("--copies", default=",".join(COPIES), help=f"of {','.join(COPIES)}; none is always there")
    add("--gbps", type=float, default=LINK_GBPS, help=f"GB/s of paced copies ({LINK_GBPS:g})")
    add("--iters", type=parse_size, default=ITERS, help=f"repetitions ({ITERS})")
    add_device_arguments(parser)


def setting_of(args: argparse.Namespace) -> Setting:
    """What the options describe.

    Raises:
        ValueError: options that cannot be.
    """
    shared = one_device(args)
    gpu = shared.device.type == "cuda"
    chosen = chosen_of("--copies", args.copies, COPIES)
    if args.gbps <= 0.0:
        raise ValueError(f"--gbps must be positive, got {args.gbps:g}")
    world_sizes = args.ranks or ((2, 4) if args.quick else (2, 4, 8, 16))
    if min(world_sizes) < 2:
        raise ValueError(f"--ranks must be at least 2, got {min(world_sizes)}")
    rows = args.rows or ((64,) if not gpu else (2048,) if args.quick else (8192, 16384))
    return Setting(
        cases=cases(world_sizes, rows),
        **vars(shared),
        copies=tuple(name for name in COPIES if name == "none" or name in chosen),
        gbps=args.gbps,
        iters=args.iters,
    )


def run(args: argparse.Namespace, words: Sequence[str] = ()) -> int:
    """Measures, writes the JSON as it goes, prints the table; 1 if a check failed."""
    setting = setting_of(args)
    command = shlex.join(["python", "-m", "ring_attn.bench.ring_cost", *words])
    bench = RingCost(setting, command, args.json)
    bench.run()
    shown = None if args.quiet else table(bench.rows, str(setting))
    return finish(bench, shown, bench.summary())


def main(words: Sequence[str] | None = None) -> int:
    """`python -m ring_attn.bench.ring_cost`."""
    return run_module("ring_cost", __doc__, add_arguments, run, words)


if __name__ == "__main__":
    sys.exit(main())
