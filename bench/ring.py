"""`ring-attn bench ring`: time, waits, bytes and memory of a ring, next to dense attention."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from ring_attn.bench.report import Report
from ring_attn.bench.ring_implementations import Dense, Impl, Ours, RingSetting, TorchTemplate
from ring_attn.bench.timing import STAGES, quantiles, turned
from ring_attn.cli.arguments import new_table, show, with_options
from ring_attn.cli.options import MODES, RING_ITERS, SEQLEN
from ring_attn.core.dtypes import dtype_name
from ring_attn.profiling import peak_bytes
from ring_attn.testing import Inputs, Verdict, check, random_qkv
from ring_attn.testing.launch import rank_device, run_ranks

WARMUP = 2
QUICK = (1024, 3)  # length and repetitions with --quick

BASELINES: dict[str, type[Impl]] = {peer.name: peer for peer in (Dense, TorchTemplate)}


@dataclass(frozen=True)
class RingRow:
    """Figures of an implementation in a mode; None where they do not apply."""

    impl: str
    mode: str
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    wait_ms: float | None = None
    bytes_sent: int | None = None
    peak_bytes: int | None = None
    max_error: float | None = None
    note: str = ""


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables and write the JSON; return 1 if a result is wrong."""
    # Silences the memory profiler on stderr. Ranks need it before they import torch.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    setting = setting_of(args)
    bench = Report[RingSetting, RingRow](setting, args.json)
    ranks = run_ranks(
        measure, setting.world_size, setting, threads=setting.threads, device=args.device
    )
    bench.rows, bench.failures = ranks[0]
    bench.save()
    lines = [f"{row.impl}, {row.mode}: {row.note}" for row in bench.rows if row.note]
    status = bench.finish([], []) if args.quiet else bench.finish([_table(bench)], lines)
    bench.draw(args.plot)
    return status


def setting_of(args: argparse.Namespace) -> RingSetting:
    seqlen, iters = QUICK if args.quick else (SEQLEN, RING_ITERS)
    return with_options(
        RingSetting,
        args,
        seqlen=args.seqlen or seqlen,
        kv_heads=args.kv_heads or args.heads,
        iters=args.iters or iters,
        baselines=args.baseline,
    )


def measure(setting: RingSetting) -> tuple[list[RingRow], list[str]]:
    """Measure on every rank; return rows and failures."""
    inputs = random_qkv(  # the same on every rank
        seqlen_q=setting.seqlen,
        nheads=setting.heads,
        nheads_kv=setting.kv_heads,
        headdim=setting.head_dim,
        dtype=setting.dtype,
        device=rank_device(),
    )
    rows: list[RingRow] = []
    impls: list[Impl] = [Ours(setting, inputs)]
    for name in setting.baselines:
        reason = BASELINES[name].reason_against(setting)
        if reason:
            rows.append(RingRow(name, setting.mode, note=f"cannot run: {reason}"))
        else:
            impls.append(BASELINES[name](setting, inputs))
    verdicts = _verdicts(impls, setting, inputs)
    times = _timed(impls, setting)
    for impl in impls:
        ours = impl.name == "ours"
        for mode, samples in times[impl.name].items():
            p20, median, p80 = quantiles([sample.ms for sample in samples])
            judged = verdicts[impl.name]
            if mode == "fwd":
                judged = judged[:1]  # of out only
            rows.append(
                RingRow(
                    impl.name,
                    mode,
                    median_ms=median,
                    p20_ms=p20,
                    p80_ms=p80,
                    wait_ms=statistics.median(x.wait_ms for x in samples) if ours else None,
                    bytes_sent=samples[0].bytes_sent if ours else None,
                    peak_bytes=None if mode == "bwd" else _peak(impl, mode),
                    max_error=max(verdict.error for verdict in judged),
                    note="; ".join(f"wrong: {verdict}" for verdict in judged if not verdict.ok),
                )
            )
    return rows, [f"ours: {verdict}" for verdict in verdicts["ours"] if not verdict.ok]


class Sample(NamedTuple):
    """Figures of one repetition, each the greatest over the ranks."""

    ms: float
    wait_ms: float
    bytes_sent: int


def _timed(impls: Sequence[Impl], setting: RingSetting) -> dict[str, dict[str, list[Sample]]]:
    """Return the samples of all repetitions, by implementation and mode."""
    by_impl: dict[str, dict[str, list[Sample]]] = {impl.name: {} for impl in impls}
    for repetition in range(WARMUP + setting.iters):
        for impl in turned(impls, repetition):
            samples = _sampled(impl, setting.mode)
            if repetition >= WARMUP:
                for mode, sample in samples.items():
                    by_impl[impl.name].setdefault(mode, []).append(sample)
    return by_impl


def _sampled(impl: Impl, mode: str) -> dict[str, Sample]:
    """Run one repetition; return its sample for each mode that `mode` contains."""
    _mark(impl)
    dist.barrier()
    marks = [_mark(impl)]
    for stage in [impl.forward, impl.backward][STAGES[mode]]:
        stage()
        marks.append(_mark(impl))
    spans = [STAGES[name] for name in MODES[mode]]
    figures = torch.stack([marks[span.stop] - marks[span.start] for span in spans])
    figures = figures.to(rank_device())
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return {
        name: Sample(ms=1e3 * seconds, wait_ms=1e3 * wait_s, bytes_sent=int(nbytes))
        for name, (seconds, wait_s, nbytes) in zip(MODES[mode], figures.tolist(), strict=True)
    }


def _mark(impl: Impl) -> Tensor:
    """Return seconds, seconds of waits and bytes sent so far, when the device is done."""
    if rank_device().type == "cuda":
        torch.cuda.synchronize()
    figures = time.perf_counter(), impl.stats.wait_s, impl.stats.bytes_sent
    return torch.tensor(figures, dtype=torch.float64)


def _peak(impl: Impl, mode: str) -> int:
    """Return the peak memory beyond the inputs, in bytes, on the rank where it is greatest."""
    impl.release()
    device = rank_device()
    nbytes = torch.tensor([peak_bytes(partial(impl.run, mode), device)], device=device)
    dist.all_reduce(nbytes, op=dist.ReduceOp.MAX)
    return int(nbytes)


def _verdicts(
    impls: Sequence[Impl], setting: RingSetting, inputs: Inputs
) -> dict[str, list[Verdict]]:
    """Check out and gradients of one run of each implementation; every rank gets the verdicts.

    torch's fused operator on rank 0 computes attention in float64 and in the dtype of the inputs.
    It does not store the scores, so it works for the measured lengths.
    """

    def results(impl: Impl) -> list[Tensor]:
        impl.run(setting.mode)
        return impl.whole()

    oracle = results(Dense(setting, [x.double() for x in inputs]))
    plain = results(Dense(setting, inputs))
    by_impl = {}
    for impl in impls:
        compared = zip(("out", "dq", "dk", "dv"), results(impl), oracle, plain, strict=False)
        # Ranks other than 0 have no results, and get the verdicts of rank 0.
        verdicts = [[check(name, *tensors) for name, *tensors in compared]]
        dist.broadcast_object_list(verdicts, 0)
        by_impl[impl.name] = verdicts[0]
    return by_impl


def _table(bench: Report[RingSetting, RingRow]) -> Table:
    """Return the table of times, of the peak memory of a call beyond its inputs, and of traffic."""
    each, rows = bench.setting, bench.rows
    dense_ms = {row.mode: row.median_ms for row in rows if row.impl == "dense"}
    table = new_table(
        f"{each.seqlen} rows on {each.world_size} ranks with {each.threads} threads, "
        f"{each.heads}/{each.kv_heads} heads of {each.head_dim}, {dtype_name(each.dtype)}, "
        f"{'causal' if each.causal else 'full'}, {each.layout}",
        ("impl", "mode"),
        ("ms", "p20", "p80", "x dense", "wait ms", "peak MB", "sent MB", "max error"),
    )
    for row in rows:
        if row.median_ms is not None:
            dense = dense_ms.get(row.mode)
            table.add_row(
                row.impl,
                row.mode,
                show(row.median_ms, ".1f"),
                show(row.p20_ms, ".1f"),
                show(row.p80_ms, ".1f"),
                show(row.median_ms / dense if dense else None, ".3f"),
                show(row.wait_ms, ".2f"),
                show(_megabytes(row.peak_bytes), ".2f"),
                show(_megabytes(row.bytes_sent), ".2f"),
                show(row.max_error, ".1e"),
            )
    return table


def _megabytes(nbytes: int | None) -> float | None:
    return None if nbytes is None else 1e-6 * nbytes
