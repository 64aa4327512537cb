"""`ring-attn bench ring`: strategies of ours, and other packages, on several ranks."""

from __future__ import annotations

import argparse
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ring_attn
from ring_attn.backends import Purpose, choose_backend, get_backend
from ring_attn.backends.base import Backend
from ring_attn.bench import implementations as one_device
from ring_attn.bench.benchmark import Benchmark, Outputs
from ring_attn.bench.implementations import DIRECTIONS, Shape, reason
from ring_attn.bench.predictions import Plan, cluster_of, plan, strategies_of
from ring_attn.bench.ring_implementations import Dense, Ours, RingCase, RingImpl, without_compute
from ring_attn.bench.ring_peers import RING_PEERS
from ring_attn.bench.rows import Row, figure, key, length, word
from ring_attn.bench.timing import STAGES, free_memory, turned
from ring_attn.cli.arguments import progress
from ring_attn.cli.bench_options import RING_ITERS, SEQLEN
from ring_attn.cli.bench_options import RING_PEERS as PEER_NAMES
from ring_attn.cli.masks import MaskChoice
from ring_attn.cli.progress import leave_to_ranks, lines_of_rank
from ring_attn.core.dtypes import dtype_name
from ring_attn.core.layout import LAYOUTS, SequenceLayout
from ring_attn.core.strategy import Strategy
from ring_attn.planning.devices import Cluster
from ring_attn.testing import Inputs, Verdict, check, dense_gradients, plain_gradients, random_qkv
from ring_attn.testing.launch import (
    check_tensors,
    checked_device,
    rank_device,
    run_ranks,
    timed_on_ranks,
    under_torchrun,
)
from ring_attn.values.outside import env_int

WARMUP = 2
QUICK = (1024, 3)  # length and repetitions with --quick

# Rows of the sequence whose results are compared with float64, which stores all scores.
JUDGED_ROWS = 1024

# Most rows that a rank computes alone, for its speed without other ranks.
ALONE_ROWS = {"cpu": 2048, "cuda": 16384}

# Shares of the work of a case, for the lines of progress.
CHECKS, TIMES = 0.3, 0.5

# Errors of ours that do not fail the run.
REFUSALS = (NotImplementedError, ValueError, ImportError, torch.OutOfMemoryError)

# Repetitions whose waits and transfers are measured.
OBSERVED = 3


@dataclass(frozen=True)
class RingSetting:
    """The problems, and the options of their measurement."""

    world_sizes: tuple[int, ...]
    seqlens: tuple[int, ...]
    strategies: tuple[str, ...]
    layout: str
    masks: tuple[MaskChoice, ...]
    modes: tuple[str, ...]
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str
    threads: int
    iters: int
    peers: tuple[str, ...]
    cluster: str | None = None

    def cases(self) -> Iterator[RingCase]:
        """Yield the problems, small worlds and short sequences first."""
        for world_size, mask, seqlen in product(self.world_sizes, self.masks, self.seqlens):
            shape = Shape(
                batch=self.batch,
                seqlen=seqlen,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                causal=mask.causal,
                dtype=self.dtype,
                device=torch.device(self.device),
                masked=mask,
            )
            yield RingCase(
                shape=shape,
                world_size=world_size,
                layout=self.layout,
                threads=self.threads,
                backward=self.modes != ("fwd",),
            )


@dataclass(frozen=True, kw_only=True)
class RingRow(Row):
    """Figures of an implementation in a mode; times and bytes are those of the worst rank.

    Attributes:
        strategy: of ours, by its name and degrees; of others, how they share the work.
        layout: as requested.
        chosen: the planner's choice, where it chose the strategy or the layout.
        tflops: TFLOP/s of a rank's device.
        share: that, as a share of the speed of one rank alone.
        exposed_ms: waits for transfers, which compute did not hide.
        hidden_ms: time of the same call without its computation, minus `exposed_ms`.
        bytes_sent: bytes that a rank sends.
        peak_bytes: most bytes that a call holds beyond its inputs.
        predicted_ms: the planner's time.
        off: predicted / measured - 1.
        max_error: largest difference from attention in float64.
    """

    strategy: str = key("strategy")
    mask: str = key("mask")
    layout: str = key("layout")
    world_size: int = key("ranks")
    seqlen: int = key("length", length)
    batch: int = key("batch")
    heads: int = key("heads")
    kv_heads: int = key("kv heads")
    head_dim: int = key("head dim")
    dtype: str = key("")
    chosen: str | None = word("chosen")
    tflops: float | None = figure("TFLOP/s", ".3g")
    share: float | None = figure("of\nalone", ".0%")
    exposed_ms: float | None = figure("exposed\nms", ".3g")
    hidden_ms: float | None = figure("hidden\nms", ".3g")
    bytes_sent: int | None = figure("sent\nMB", ".4g", scale=1e-6)
    peak_bytes: int | None = figure("peak\nMB", ".4g", scale=1e-6)
    predicted_ms: float | None = figure("predicted\nms", ".4g")
    off: float | None = figure("off", "+.0%")
    max_error: float | None = figure("error", ".1e")


class Entry(NamedTuple):
    """An implementation of a case: its name, how it shares the work, and the planner's figures.

    `strategy` is of ours: a value, or "auto". `plan` is None where the planner says nothing.
    `why` is the reason against it, or empty.
    """

    impl: str
    label: str
    strategy: Strategy | str | None = None
    plan: Plan | None = None
    why: str = ""


class RingBench(Benchmark[RingSetting, RingRow]):
    """Plans, and then measures, all cases."""

    name, title = "ring", "attention over a split sequence"

    def plans(self) -> list[tuple[RingCase, list[Entry]]]:
        """Return the cases, each with what is measured."""
        return [(case, self._entries(case)) for case in self.setting.cases()]

    def _entries(self, case: RingCase) -> list[Entry]:
        setting = self.setting
        cluster = self._cluster(case.world_size)
        node_size = env_int("LOCAL_WORLD_SIZE", 0) or case.world_size
        named = strategies_of(setting.strategies, case, node_size)
        entries = [self._ours(case, label, strategy, cluster) for label, strategy in named.items()]
        if "auto" in setting.strategies:
            entries.append(self._ours(case, "auto", None, cluster))
        return [*entries, *(Entry(name, "-") for name in setting.peers)]

    def _ours(
        self, case: RingCase, label: str, strategy: Strategy | None, cluster: Cluster | None
    ) -> Entry:
        """Return the entry of a strategy; None is the planner's choice."""
        value = "auto" if strategy is None else strategy
        if cluster is None and self.setting.layout != "auto":
            return Entry("ours", label, value)
        if cluster is None:
            raise ValueError("--layout auto needs --cluster, by which the planner chooses")
        try:
            found = plan(case, strategy, self.setting.layout, cluster)
        except (ValueError, NotImplementedError) as error:
            return Entry("ours", label, value, why=f"cannot run: {error}")
        return Entry("ours", label, value, found)

    def _cluster(self, world_size: int) -> Cluster | None:
        """Return the cluster for predictions; None, with a remark, if this GPU is not known."""
        setting = self.setting
        try:
            return cluster_of(setting.cluster, setting.device, world_size)
        except ValueError as error:
            if setting.cluster is not None:
                raise
            if not self.remarks:
                self.remarks.append(f"no predictions: {error}")
            return None

    def run(self) -> None:
        """Measure all cases in one set of ranks."""
        plans = self.plans()
        self.check_comparable(
            [row for case, entries in plans for row in self._planned(case, entries)]
        )
        leave_to_ranks()
        ranks = run_ranks(
            measure,
            _world_size(self.setting),
            self.setting,
            plans,
            self.outputs,
            threads=self.setting.threads,
            device=self.setting.device,
        )
        self.rows, self.failures = ranks[0]

    def _planned(self, case: RingCase, entries: Sequence[Entry]) -> list[RingRow]:
        return [row_of(case, e, mode) for e in entries for mode in self.setting.modes]


def row_of(case: RingCase, entry: Entry, mode: str, label: str | None = None) -> RingRow:
    """Return the row of an implementation without figures."""
    shape = case.shape
    auto = "auto" in (case.layout, entry.label)
    return RingRow(
        impl=entry.impl,
        mode=mode,
        strategy=entry.label if label is None else label,
        mask=str(shape.choice),
        layout=case.layout if entry.impl == "ours" else "-",
        world_size=case.world_size,
        seqlen=shape.seqlen,
        batch=shape.batch,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype_name(shape.dtype),
        chosen=entry.plan.chosen if entry.plan is not None and auto else None,
    )


def run(args: argparse.Namespace) -> int:
    """Measure, write the files, print the tables; return 1 if a result is wrong."""
    silence_profiler()
    bench = RingBench(setting_of(args), Outputs.of(args, RingBench.name, RingRow))
    bench.run()
    return bench.conclude()


def silence_profiler() -> None:
    """Silence the memory profiler's lines on stderr; ranks need this before they import torch."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def setting_of(args: argparse.Namespace) -> RingSetting:
    """Return the setting of the command's options.

    Raises:
        ValueError: options exclude each other, or this machine cannot provide the ranks.
    """
    if args.causal is not None and args.masks is not None:
        raise ValueError("--causal and --mask exclude each other: pass --mask alone")
    masks = args.masks or (MaskChoice("full" if args.causal is False else "causal"),)
    seqlen, iters = QUICK if args.quick else (SEQLEN, RING_ITERS)
    started = env_int("WORLD_SIZE", 1) if under_torchrun() else None
    world_sizes = args.world_size or (started or 2,)
    if started is not None and max(world_sizes) > started:
        raise ValueError(
            f"--world-size must be at most {started}, the ranks that torchrun started, got "
            f"{max(world_sizes)}"
        )
    device = checked_device(args.device, started or max(world_sizes))
    heads, kv_heads = args.heads, args.kv_heads or args.heads
    if heads % kv_heads:
        raise ValueError(f"--heads must be a multiple of --kv-heads, got {heads} and {kv_heads}")
    names = PEER_NAMES if "all" in args.peers else args.peers
    setting = RingSetting(
        world_sizes=tuple(sorted(world_sizes)),
        seqlens=tuple(sorted(args.seqlen or (seqlen,))),
        strategies=args.strategy,
        layout=args.layout,
        masks=masks,
        modes=args.modes,
        batch=args.batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=args.head_dim,
        dtype=args.dtype or (torch.bfloat16 if device == "cuda" else torch.float32),
        device=device,
        threads=args.threads,
        iters=args.iters or iters,
        peers=names,
        cluster=args.cluster,
    )
    for case in setting.cases():
        what = f"q, k, v and out of {case.shape.batch} x {length(case.shape.seqlen)} rows"
        check_tensors(what, case.shape.nbytes("fwd"), device, world_size=case.world_size)
        _ = case.shape.mask  # refuses masks with too many slices
    return setting


def _world_size(setting: RingSetting) -> int:
    """Return the number of ranks to start, or that torchrun started."""
    return env_int("WORLD_SIZE", 1) if under_torchrun() else max(setting.world_sizes)


# -- within a rank


def measure(
    setting: RingSetting,
    plans: Sequence[tuple[RingCase, Sequence[Entry]]],
    outputs: Outputs | None = None,
) -> tuple[list[RingRow], list[str]]:
    """Measure all cases on the first ranks of each; return the rows and failures of rank 0.

    Rank 0 writes the files of `outputs` after each case.
    """
    bench = RingBench(setting, outputs)
    rank, started = dist.get_rank(), dist.get_world_size()
    sizes = dict.fromkeys(case.world_size for case, _ in plans)
    groups = {n: dist.group.WORLD if n == started else dist.new_group(range(n)) for n in sizes}
    rows: list[RingRow] = []
    failures: list[str] = []
    work = [case.shape.seqlen**2 / case.world_size * len(entries) for case, entries in plans]
    with lines_of_rank("ring-attn bench ring"):
        for number, (case, entries) in enumerate(plans):
            group = groups[case.world_size]
            if rank < case.world_size and group is not None:
                before = f"case {number + 1} of {len(plans)}"
                begin = partial(_begin, before, sum(work[:number]), work[number], sum(work))
                ring = RankRing(setting, case, group)
                rows += ring.rows(entries, begin)
                failures += ring.failures
                bench.rows, bench.failures = rows, failures
                bench.save()
    return rows, failures


def _begin(before: str, done: float, work: float, total: float, what: str, share: float) -> None:
    """Begin a stage of a case, of which a share is done."""
    progress.begin(f"{before}, {what}", done=done + share * work, total=total)


class RankRing:
    """Measures the implementations of one case on the ranks of a group."""

    def __init__(self, setting: RingSetting, case: RingCase, group: dist.ProcessGroup) -> None:
        self.setting, self.case, self.group = setting, case, group
        self.failures: list[str] = []
        # Rows by their number, which all implementations share.
        self._drawn: dict[int, Inputs] = {}

    def rows(self, entries: Sequence[Entry], begin: Callable[[str, float], None]) -> list[RingRow]:
        """Judge all implementations, time them in turn, and return their rows.

        `begin` names a stage, and the share of the work that is done before it.
        """
        impls: dict[Entry, RingImpl] = {}
        verdicts: dict[Entry, list[Verdict]] = {}
        whys = {entry: entry.why for entry in entries if entry.why}
        judge = Judge(self.case, self.group)
        for number, entry in enumerate(entries):
            if entry.why:
                continue
            begin(f"checking {entry.impl} {entry.label}", CHECKS * number / len(entries))
            why = self._why_not(entry)
            if not why:
                why, impl = self._tried(entry, judge.case, judge.inputs)
            if not why:
                assert impl is not None
                verdicts[entry] = judge.verdicts(impl)
                del impl
                why, impl = self._tried(entry, self.case, None)
            if why:
                whys[entry] = f"cannot run: {why}"
            else:
                assert impl is not None
                impls[entry] = impl
        samples = self._timed(impls, begin)
        begin("memory and transfers", CHECKS + TIMES)
        alone = self._alone() if impls else {}
        only_transfers = self._only_transfers(impls)
        rows = []
        for entry in entries:
            label = impls[entry].label if entry in impls and entry.impl != "ours" else None
            for mode in self.setting.modes:
                row = row_of(self.case, entry, mode, label)
                if entry in whys:
                    rows.append(row.without_time(whys[entry]))
                    continue
                row = self._with_times(row, samples[entry][mode], alone[mode])
                row = self._with_memory(row, impls[entry])
                rows.append(self._with_verdicts(row, entry, verdicts[entry]))
            if entry in impls:
                of_entry = rows[-len(self.setting.modes) :]
                rows[-len(self.setting.modes) :] = self._with_transfers(
                    of_entry, impls[entry], entry, only_transfers.get(entry, {})
                )
        impls.clear()
        free_memory(rank_device())
        return rows

    def _why_not(self, entry: Entry) -> str:
        if entry.impl == "ours":
            return ""
        return RING_PEERS[entry.impl].reason_against(self.case) or ""

    def _built(self, entry: Entry, case: RingCase, whole: Inputs | None) -> RingImpl:
        """Return an implementation that has run once, so that a refusal comes before the timing."""
        impl: RingImpl
        if entry.impl == "ours":
            assert entry.strategy is not None
            layout_of = None
            if case.layout == "auto":
                assert entry.plan is not None, "a layout is planned, or refused"
                layout_of = partial(_like, entry.plan.layout)
            impl = Ours(
                case,
                self.group,
                whole,
                self._drawn,
                strategy=entry.strategy,
                layout_of=layout_of,
            )
        else:
            impl = RING_PEERS[entry.impl](case, self.group, whole, self._drawn)
        with impl.active():
            impl.run()
        return impl

    def _tried(
        self, entry: Entry, case: RingCase, whole: Inputs | None
    ) -> tuple[str, RingImpl | None]:
        """Return why an implementation cannot run, or the implementation, the same on all ranks.

        An error of ours that is no refusal is a failure.
        """
        tried = ("", False)  # the reason, and whether it is a failure
        impl: RingImpl | None = None
        try:
            impl = self._built(entry, case, whole)
        except Exception as error:
            is_failure = entry.impl == "ours" and not isinstance(error, REFUSALS)
            if is_failure:
                traceback.print_exception(error)
            tried = (reason(error), is_failure)
            free_memory(rank_device())
        every = [tried] * self.case.world_size
        dist.all_gather_object(every, tried, group=self.group)
        why = next((why for why, _ in every if why), "")
        if any(is_failure for _, is_failure in every):
            self.failures.append(f"ours, {entry.label}: {why}")
        return why, impl

    def _timed(
        self, impls: dict[Entry, RingImpl], begin: Callable[[str, float], None]
    ) -> dict[Entry, dict[str, list[float]]]:
        """Return the milliseconds of all repetitions, by implementation and mode."""
        found: dict[Entry, dict[str, list[float]]] = {
            entry: {mode: [] for mode in self.setting.modes} for entry in impls
        }
        repetitions = WARMUP + self.setting.iters
        for repetition in range(repetitions):
            begin(f"repetition {repetition + 1}", CHECKS + TIMES * repetition / repetitions)
            for entry in turned([*impls], repetition):
                ms = self._sampled(impls[entry])
                if repetition >= WARMUP:
                    for mode in self.setting.modes:
                        found[entry][mode].append(sum(ms[STAGES[mode]]))
        return found

    def _sampled(self, impl: RingImpl) -> list[float]:
        """Run one repetition; return the milliseconds of its stages, of the slowest rank."""
        stages = [impl.forward, impl.backward][: 1 + self.case.backward]
        with impl.active():
            _synchronize()
            dist.barrier(self.group)
            marks = [_now()]
            for stage in stages:
                stage()
                marks.append(_now())
        impl.release()
        seconds = torch.tensor(
            [stop - start for start, stop in zip(marks[:-1], marks[1:], strict=True)],
            dtype=torch.float64,
            device=rank_device(),
        )
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.group)
        return [1e3 * each for each in seconds.tolist()]

    def _alone(self) -> dict[str, float]:
        """Return the TFLOP/s of a rank by mode that computes the same mask alone, with no messages.

        All ranks do so at the same time, and the slowest one counts.
        """
        shape = self.case.shape.shortened(self.case.shape.batch, ALONE_ROWS[self.setting.device])
        backend = self._backend(shape)
        data = replace(shape, device=rank_device()).data()
        attention = one_device.Ours(shape, data, backend)
        stages = [attention.forward, attention.backward][: 1 + self.case.backward]
        times: list[list[float]] = []
        for _ in range(WARMUP + OBSERVED):
            times.append([timed_on_ranks(stage, self.group) for stage in stages])
        medians = [statistics.median(each) for each in zip(*times[WARMUP:], strict=True)]
        return {
            mode: shape.flops(mode) * 1e-12 / sum(medians[STAGES[mode]])
            for mode in self.setting.modes
        }

    def _with_times(self, row: RingRow, samples: Sequence[float], alone: float) -> RingRow:
        row = row.timed(samples)
        assert row.median_ms is not None
        devices = self.case.world_size
        if row.impl == Dense.name and self.setting.device == "cuda":
            devices = 1
        tflops = self.case.shape.flops(row.mode) * 1e-9 / row.median_ms / devices
        return replace(row, tflops=tflops, share=tflops / alone)

    def _with_memory(self, row: RingRow, impl: RingImpl) -> RingRow:
        """Add the peak memory of a forward, or of a forward and its backward."""
        if row.mode == "bwd":
            return row
        call = impl.forward if row.mode == "fwd" else impl.run
        with impl.active():
            peak = ring_attn.profiling.peak_bytes(call, rank_device())
        impl.release()
        return replace(row, peak_bytes=int(self._worst([float(peak)])[0]))

    def _with_verdicts(self, row: RingRow, entry: Entry, verdicts: Sequence[Verdict]) -> RingRow:
        judged = verdicts[:1] if row.mode == "fwd" else verdicts
        wrong = "; ".join(str(verdict) for verdict in judged if not verdict.ok)
        if wrong and entry.impl == "ours":
            self.failures.append(f"ours, {entry.label}, {row.mode}: {wrong}")
        row = replace(row, max_error=max(verdict.error for verdict in judged))
        return row.without_time(f"wrong: {wrong}") if wrong else row

    def _only_transfers(self, impls: dict[Entry, RingImpl]) -> dict[Entry, dict[str, float]]:
        """Return the milliseconds of calls of ours that compute nothing, by mode."""
        found: dict[Entry, dict[str, float]] = {}
        for entry, impl in impls.items():
            if entry.impl != "ours":
                continue
            with without_compute(self._backend(self.case.shape)):
                samples = [self._sampled(impl) for _ in range(WARMUP + OBSERVED)][WARMUP:]
            found[entry] = {
                mode: statistics.median(sum(ms[STAGES[mode]]) for ms in samples)
                for mode in self.setting.modes
            }
        return found

    def _backend(self, shape: Shape) -> Backend:
        """Return the backend that computes a problem here."""
        purpose = Purpose.of(shape.mask, backward=self.case.backward, same_bits=None)
        return get_backend(choose_backend(shape.spec, "auto", purpose).name)

    def _with_transfers(
        self,
        rows: Sequence[RingRow],
        impl: RingImpl,
        entry: Entry,
        only_transfers: Mapping[str, float],
    ) -> list[RingRow]:
        """Add waits, transfers, bytes and predictions of ours to the rows of all modes."""
        if entry.impl != "ours":
            return [*rows]
        observed = self._observed(impl)
        found = []
        for row in rows:
            parts = [observed[back] for back in DIRECTIONS[row.mode]]
            wait, sent = (sum(values) for values in zip(*parts, strict=True))
            transfers = only_transfers[row.mode] if sent else 0.0
            row = replace(
                row,
                exposed_ms=1e3 * wait,
                hidden_ms=max(transfers - 1e3 * wait, 0.0),
                bytes_sent=int(sent),
            )
            if entry.plan is not None and row.median_ms is not None:
                predicted = 1e3 * entry.plan.seconds[row.mode]
                row = replace(row, predicted_ms=predicted, off=predicted / row.median_ms - 1.0)
            found.append(row)
        return found

    def _observed(self, impl: RingImpl) -> dict[bool, tuple[float, ...]]:
        """Return seconds of waits, and bytes sent, by direction, on the rank with most of each."""
        samples: dict[bool, list[list[float]]] = {False: [], True: []}
        for _ in range(OBSERVED):
            dist.barrier(self.group)
            with ring_attn.profiling.collect(), impl.active():
                impl.run()
                stats = ring_attn.profiling.stats()
            impl.release()
            for back, figures in ((False, stats.forward), (True, stats.backward)):
                if figures is not None:
                    values = [figures.wait_s, float(figures.bytes_sent)]
                    samples[back].append(self._worst(values))
        return {
            back: tuple(statistics.median(each) for each in zip(*found, strict=True))
            for back, found in samples.items()
            if found
        }

    def _worst(self, values: Sequence[float]) -> list[float]:
        """Return the greatest of each value over the ranks."""
        figures = torch.tensor(values, dtype=torch.float64, device=rank_device())
        dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=self.group)
        found: list[float] = figures.tolist()
        return found


class Judge:
    """Compares results with attention in float64, on a short sequence with the same mask."""

    def __init__(self, case: RingCase, group: dist.ProcessGroup) -> None:
        self.case, self.group = case.shortened(min(case.shape.seqlen, JUDGED_ROWS)), group
        shape = self.case.shape
        self.inputs = random_qkv(  # the same on every rank
            batch=shape.batch,
            seqlen_q=shape.seqlen,
            nheads=shape.heads,
            nheads_kv=shape.kv_heads,
            headdim=shape.head_dim,
            headdim_v=shape.dim_v,
            dtype=shape.dtype,
            device=rank_device(),
        )
        self._is_first = dist.get_rank(group) == 0
        if self._is_first:
            self._oracle = dense_gradients(*self.inputs, shape.mask)
            self._plain = plain_gradients(*self.inputs, shape.mask)

    def verdicts(self, impl: RingImpl) -> list[Verdict]:
        """Return the verdicts on out and gradients of the last run, the same on every rank."""
        results = impl.whole()
        found: list[list[Verdict]] = [[]]
        if self._is_first:
            names = ("out", "dq", "dk", "dv")
            found = [[self._verdict(*each) for each in zip(names, results, strict=False)]]
        dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]

    def _verdict(self, name: str, got: Tensor) -> Verdict:
        return check(
            name,
            got=got,
            oracle=getattr(self._oracle, name),
            plain=getattr(self._plain, name),
            terms=self._oracle.terms[name],
        )


def _like(layout: SequenceLayout, case: RingCase) -> SequenceLayout:
    """Return a layout of the planner for a case, or one that looks like it for a shorter case."""
    rows = case.shape.seqlen
    if rows == layout.seqlen:
        return layout
    if layout.kind in LAYOUTS:
        return SequenceLayout.from_name(layout.kind, rows, layout.world_size)
    lengths = accumulate(layout.shard_lens, initial=0)
    return SequenceLayout.boundaries([cut * rows // layout.seqlen for cut in lengths])


def _synchronize() -> None:
    if rank_device().type == "cuda":
        torch.cuda.synchronize()


def _now() -> float:
    _synchronize()
    return time.perf_counter()
