"""`ring-attn bench ring`: time, waits, bytes and memory of a ring, beside dense attention."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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

WARMUP, QUICK = 2, (1024, 3)

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
    """Measures, prints the tables, and writes the JSON; 1 if a result is wrong."""
    # Silences messages of the memory profiler on stderr; ranks need it before they import torch.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    setting = setting_of(args)
    bench = Report[RingSetting, RingRow](setting, args.json)
    ranks = run_ranks(
        measure, setting.world_size, setting, threads=setting.threads, device=args.device
    )
    bench.rows, bench.failures = ranks[0]
    bench.save()
    lines = [f"{row.impl}, {row.mode}: {row.note}" for row in bench.rows if row.note]
    return bench.finish([], []) if args.quiet else bench.finish([_table(bench)], lines)


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
    """Measures on every rank; returns rows and failures."""
    inputs = random_qkv(  # the same on every rank
        seqlen_q=setting.seqlen, nheads=setting.heads, nheads_kv=setting.kv_heads,
        headdim=setting.head_dim, dtype=setting.dtype, device=rank_device(),
    )  # fmt: skip
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
        for mode, figures in times[impl.name].items():
            ms, waits, sent = zip(*figures, strict=True)
            p20, median, p80 = quantiles(ms)
            judged = verdicts[impl.name][: 1 if mode == "fwd" else None]
            rows.append(
                RingRow(
                    impl.name,
                    mode,
                    median_ms=median,
                    p20_ms=p20,
                    p80_ms=p80,
                    wait_ms=statistics.median(waits) if ours else None,
                    bytes_sent=sent[0] if ours else None,
                    peak_bytes=None if mode == "bwd" else _peak(impl, mode),
                    max_error=max(verdict.error for verdict in judged),
                    note="; ".join(f"wrong: {verdict}" for verdict in judged if not verdict.ok),
                )
            )
    return rows, [f"ours: {verdict}" for verdict in verdicts["ours"] if not verdict.ok]


def _timed(impls: Sequence[Impl], setting: RingSetting) -> dict[str, dict[str, list[Any]]]:
    """Figures of `_one` for each repetition, by implementation and mode."""
    by_impl: dict[str, dict[str, list[Any]]] = {impl.name: {} for impl in impls}
    for repetition in range(WARMUP + setting.iters):
        for impl in turned(impls, repetition):
            sample = _one(impl, setting.mode)
            if repetition >= WARMUP:
                for mode, figures in sample.items():
                    by_impl[impl.name].setdefault(mode, []).append(figures)
    return by_impl


def _one(impl: Impl, mode: str) -> dict[str, tuple[float, float, int]]:
    """(ms, wait ms, bytes sent) of one repetition by mode, each the greatest over the ranks."""
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
        name: (1e3 * s, 1e3 * wait, int(sent))
        for name, (s, wait, sent) in zip(MODES[mode], figures.tolist(), strict=True)
    }


def _mark(impl: Impl) -> Tensor:
    """Time, wait time and bytes sent, once the device is done."""
    if rank_device().type == "cuda":
        torch.cuda.synchronize()
    figures = time.perf_counter(), impl.stats.wait_s, impl.stats.bytes_sent
    return torch.tensor(figures, dtype=torch.float64)


def _peak(impl: Impl, mode: str) -> int:
    """Most bytes held beyond the inputs, on the rank that holds most."""
    impl.release()
    most = torch.tensor([peak_bytes(partial(impl.run, mode), rank_device())], device=rank_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def _verdicts(
    impls: Sequence[Impl], setting: RingSetting, inputs: Inputs
) -> dict[str, list[Verdict]]:
    """Checks out and the gradients of one run of each; the same verdicts on every rank.

    Attention in float64 and in the inputs' dtype is by torch's fused operator on rank 0: it does
    not store the scores, so it works at the measured lengths.
    """

    def results(impl: Impl) -> list[Tensor]:
        impl.run(setting.mode)
        return impl.whole()

    exact = [x.double() for x in inputs]
    oracle, plain = (results(Dense(setting, x)) for x in (exact, inputs))
    by_impl = {}
    for impl in impls:
        compared = zip(("out", "dq", "dk", "dv"), results(impl), oracle, plain, strict=False)
        verdicts = [[check(*result) for result in compared]]  # none on ranks above 0
        dist.broadcast_object_list(verdicts, 0)
        by_impl[impl.name] = verdicts[0]
    return by_impl


def _table(bench: Report[RingSetting, RingRow]) -> Table:
    """Times, and bytes that a call holds beyond its inputs and sends."""
    each, rows = bench.setting, bench.rows
    dense = {row.mode: row.median_ms for row in rows if row.impl == "dense"}
    table = new_table(
        f"{each.seqlen} rows on {each.world_size} ranks with {each.threads} threads, "
        f"{each.heads}/{each.kv_heads} heads of {each.head_dim}, {dtype_name(each.dtype)}, "
        f"{'causal' if each.causal else 'full'}, {each.layout}",
        ("impl", "mode"),
        ("ms", "p20", "p80", "x dense", "wait ms", "peak MB", "sent MB", "max error"),
    )
    for row in rows:
        if row.median_ms is not None:
            whole = dense.get(row.mode)
            megabytes = (None if x is None else 1e-6 * x for x in (row.peak_bytes, row.bytes_sent))
            times = (show(x, ".1f") for x in (row.median_ms, row.p20_ms, row.p80_ms))
            table.add_row(
                row.impl, row.mode, *times, show(row.median_ms / whole if whole else None, ".3f"),
                show(row.wait_ms, ".2f"),
                *(show(x, ".2f") for x in megabytes), show(row.max_error, ".1e"),
            )  # fmt: skip
    return table
