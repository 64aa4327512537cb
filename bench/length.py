"""How long a sequence one device takes: forward and backward by a ring whose ranks take turns.

    python -m ring_attn.bench.length --json DIR/length.json            on a GPU
    python -m ring_attn.bench.length --device cpu --quick

Ranks run one after another (`turns`), so the device holds the tensors of all ranks and one rank's
working memory. Offloaded, tensors lie in pinned host memory, and those of other ranks come by a
copy stream one step ahead of the kernels:

    none    everything is on the device
    kv      k, v, their gradients and the sums of these lie in host memory
    all     so do q, dout, out, lse and dq: the device holds one rank's share

What is done, in this order, as far as --budget goes:

    forward     --seqlen causal, with none and kv: time, memory against prediction, the same bits
    longest     by bisection: the driver allocates and copies what it would, kernels are prepared
                and not launched, and torch.OutOfMemoryError is "too long"
    windowed    forward and backward of that length within a window, which takes seconds; and
    backward    of --seqlen, causal; first both with none, then both with kv

Of every run some rows of out, lse and dq, and the last rows of dk and dv, are held against float64.
Exit status 1 where a result is wrong.

On a CPU there is no allocator with a limit: memory is counted, and more than --limit is too long.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from ring_attn.arguments import (
    format_size,
    parse_size,
)
from ring_attn.bench.one_device import (
    Findings,
    OneDevice,
    add_device_arguments,
    chosen_of,
    finish,
    one_device,
    run_module,
)
from ring_attn.bench.turns import (
    GRADIENTS,
    OFFLOADED,
    RESULTS,
    Held,
    Offload,
    Shards,
    Turns,
    calls_in_order,
    drawn,
    predicted_bytes,
)
from ring_attn.cost import flops
from ring_attn.mask import Mask
from ring_attn.planning.devices import DEVICES as RATES
from ring_attn.profiling import peak_bytes
from ring_attn.strategies.ring import RingCall
from ring_attn.testing import check, dense_gradients, plain_gradients

# The longest is found to one part in so many; what is then run is shorter by that.
RESOLUTION = 128

# Rows of each rank are a multiple of it: what kernels cut at, so that bits are those of one rank.
ROWS_UNIT = 128

# At that share of host memory offloading ends.
HOST_SHARE = 0.75

# Of the device's free memory what torch's kernels and libraries take when they are first loaded.
RESERVE_BYTES = 1 << 30

# Rows in each place of a sequence that is judged, and int64 numbers that are summed at a time.
JUDGED_ROWS, DIGEST_NUMBERS = 8, 1 << 23


@dataclass(frozen=True, kw_only=True)
class Setting(OneDevice):
    """What is measured."""

    seqlen: int
    window: int
    world_size: int
    offloads: tuple[Offload, ...]
    limit: int
    host_memory: int

    @property
    def unit(self) -> int:
        """Lengths are multiples of it."""
        return self.world_size * ROWS_UNIT

    def calls(self, seqlen: int, window: int | None = None) -> list[RingCall]:
        """Of all ranks."""
        mask = Mask(seqlen, seqlen, True, (-1 if window is None else window, 0))
        return calls_in_order(self.problem(seqlen), mask, self.world_size, self.backend)


@dataclass(frozen=True)
class LengthRow:
    """One run, or the longest sequence; bytes and seconds as predicted and as found.

    Attributes:
        what: "run" or "longest".
        mode: "fwd" or "fwd_bwd".
        offload: what lies in host memory.
        seqlen: of a run, or the longest that was found; 0 if there was none.
        window: keys that a row sees before its own; None is causal.
        predicted_seqlen: the longest by prediction.
        predicted_bytes: on the device (on a CPU, of both).
        device_bytes: most that torch held there.
        host_bytes: in pinned memory, by prediction.
        predicted_s: at the built-in rate of that device; None where there is none.
        seconds: of a run, the inputs not counted.
        tflops: by the visible pairs.
        max_ratio: greatest error / bound of what was judged.
        same_bits: as the same run without offloading; None where that was not run.
        note: what is wrong, or why there is nothing.
    """

    what: str
    mode: str
    offload: str
    seqlen: int
    window: int | None = None
    predicted_seqlen: int | None = None
    predicted_bytes: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    predicted_s: float | None = None
    seconds: float | None = None
    tflops: float | None = None
    max_ratio: float | None = None
    same_bits: bool | None = None
    note: str = ""


def longest(fits: Callable[[int], bool], guess: int, unit: int) -> int:
    """The greatest multiple of `unit` that fits, to one part in RESOLUTION; 0 if none does.

    Args:
        fits: whether a length does; what does not fit stays so for all that are longer.
        guess: near the answer, so that few are tried.
        unit: what lengths are multiples of.
    """
    low, high = 0, max(guess // unit, 1)
    step = max(high // RESOLUTION, 1)
    if fits(high * unit):
        low, high = high, high + step
        while fits(high * unit):
            step *= 2
            low, high = high, high + step
    else:
        while high - step > 0 and not fits((high - step) * unit):
            high, step = high - step, 2 * step
        low = max(high - step, 0)
    while high - low > max(1, high // RESOLUTION):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return low * unit


class Lengths(Findings[Setting, LengthRow]):
    """One run: measures part by part."""

    def __init__(self, setting: Setting, command: str = "", json: Path | None = None) -> None:
        """As `Findings`; it is saved after every row."""
        super().__init__(setting, command, json)
        self._digests: dict[tuple[str, int, int | None], list[int]] = {}
        self._slower = 1.0  # than predicted, of the latest run that is predicted to take a second

    def run(self) -> None:
        """All parts, as far as the budget goes."""
        for row in self._parts():
            self.rows.append(row)
            self._free()
            self.save()
        self.save(last=True)

    def summary(self) -> str:
        """One line for all."""
        ran = [row for row in self.rows if row.seconds is not None]
        found = [row for row in self.rows if row.what == "longest" and row.seqlen]
        seconds = self.seconds
        return (
            f"{len(ran)} runs, the longest of {max((r.seqlen for r in ran), default=0)} tokens, "
            f"and {len(found)} bounds in {seconds:.0f} s, {len(self.failures)} failures"
        )

    def _parts(self) -> Iterator[LengthRow]:
        setting = self.setting
        for offload in setting.offloads:
            yield self._run("fwd", offload, setting.seqlen)
        bounds = {}
        for mode in ("fwd_bwd", "fwd"):
            for offload in setting.offloads:
                yield (row := self._longest(mode, offload))
                bounds[mode, offload] = row.seqlen
        for offload in setting.offloads:
            found = bounds["fwd_bwd", offload]
            seqlen = int(found * (1.0 - 1.0 / RESOLUTION)) // setting.unit * setting.unit
            if seqlen:
                yield self._run("fwd_bwd", offload, seqlen, setting.window)
            yield self._run("fwd_bwd", offload, setting.seqlen)

    def _run(
        self, mode: str, offload: Offload, seqlen: int, window: int | None = None
    ) -> LengthRow:
        """Runs one length for real, and judges it."""
        calls, backward = self.setting.calls(seqlen, window), mode == "fwd_bwd"
        predicted = self._predicted(calls, offload, backward=backward)
        expected_s = self._expected_seconds(calls, backward=backward)
        row = LengthRow(
            "run", mode, offload, seqlen, window,
            predicted_bytes=predicted.device, host_bytes=predicted.host, predicted_s=expected_s,
        )  # fmt: skip
        budget, spent = self.setting.budget, self.seconds
        if budget is not None and spent + self._slower * (expected_s or 0.0) > budget:
            return replace(row, note=f"not run: beyond the budget of {budget:g} s")
        if predicted.host > self.setting.host_memory and offload != "none":
            return replace(row, note="not run: more host memory than there is")
        seconds, shards = list[float](), list[Shards]()

        def call() -> None:
            shards.append(drawn(calls, self.setting.device, offload, backward=backward))
            self._synchronize()
            start = time.perf_counter()
            Turns(calls, shards[0]).run(backward=backward)
            self._synchronize()
            seconds.append(time.perf_counter() - start)

        try:
            held = peak_bytes(call, self.setting.device)
        except RuntimeError as error:  # host memory that runs out has no class of its own
            if "out of memory" not in str(error):
                raise
            return replace(row, note="out of memory")
        if expected_s is not None and expected_s > 1.0:
            self._slower = seconds[0] / expected_s
        pairs = sum(call.plan(backward=False).area for call in calls)
        count = sum(
            flops(pairs, calls[0].spec, backward=back) for back in (False, True)[: 1 + backward]
        )
        row = replace(row, device_bytes=held, seconds=seconds[0], tflops=count / seconds[0] / 1e12)
        return self._judged(row, calls, shards[0], backward=backward)

    def _longest(self, mode: str, offload: Offload) -> LengthRow:
        """The bound by prediction, and by allocating."""
        setting, backward = self.setting, mode == "fwd_bwd"
        peaks: dict[int, int] = {}

        def predicted(seqlen: int) -> Held:
            return self._predicted(setting.calls(seqlen), offload, backward=backward)

        def may_fit(seqlen: int) -> bool:
            held = predicted(seqlen)
            return held.device <= setting.limit and held.host <= setting.host_memory

        def fits(seqlen: int) -> bool:
            if predicted(seqlen).host > setting.host_memory:
                return False
            self._free()  # also what the last length held when it ran out of memory
            calls = setting.calls(seqlen)

            def call() -> Shards:
                shards = drawn(calls, setting.device, offload, backward=backward, dry=True)
                Turns(calls, shards).run(backward=backward)
                return shards

            try:
                peaks[seqlen] = peak_bytes(call, setting.device)
            except torch.OutOfMemoryError:
                return False
            return setting.device.type == "cuda" or peaks[seqlen] <= setting.limit

        guess = longest(may_fit, setting.seqlen, setting.unit)
        found = longest(fits, guess, setting.unit)
        row = LengthRow("longest", mode, offload, found, predicted_seqlen=guess)
        if not found:
            return replace(row, note="nothing fits")
        held = predicted(found)
        return replace(
            row,
            predicted_bytes=held.device,
            device_bytes=peaks[found],
            host_bytes=held.host,
            note="" if held.host + setting.unit < setting.host_memory else "host memory ends it",
        )

    def _predicted(self, calls: Sequence[RingCall], offload: Offload, *, backward: bool) -> Held:
        """On a CPU both are one memory."""
        gpu = self.setting.device.type == "cuda"
        held = predicted_bytes(calls, offload, backward=backward, pinned=gpu)
        return held if gpu else Held(held.device + held.host, held.host)

    def _expected_seconds(self, calls: Sequence[RingCall], *, backward: bool) -> float | None:
        if self.setting.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.setting.device)
        device = next((RATES[known] for known in RATES if known in name), None)
        if device is None:
            return None
        pairs = sum(call.plan(backward=False).area for call in calls)
        spec = calls[0].spec
        seconds = flops(pairs, spec, backward=False) / device.forward.flops
        return seconds + backward * flops(pairs, spec, backward=True) / device.backward.flops

    def _judged(
        self, row: LengthRow, calls: Sequence[RingCall], shards: Shards, *, backward: bool
    ) -> LengthRow:
        """The row with its results held against float64, and against those not offloaded."""
        names = (*RESULTS, *GRADIENTS) if backward else RESULTS
        digests = [
            digest(shards.at(name, rank), self.setting.device)
            for name in names
            for rank in range(len(calls))
        ]
        key = (row.mode, row.seqlen, row.window)
        known = self._digests.get(key)
        if row.offload == "none":
            self._digests[key] = digests
        row = replace(row, same_bits=None if known is None else known == digests)
        wrong = ["other bits than without offloading"] if row.same_bits is False else []
        try:
            ratio, errors = judge(calls, shards, backward=backward)
        except torch.OutOfMemoryError:
            return replace(row, note="; ".join([*wrong, "not judged: out of memory"]))
        wrong += errors
        self.failures += [f"{row.mode} of {row.seqlen}, {row.offload}: {text}" for text in wrong]
        return replace(row, max_ratio=ratio, note="; ".join(wrong))

    def _synchronize(self) -> None:
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize()

    def _free(self) -> None:
        gc.collect()
        if self.setting.device.type == "cuda":
            torch.cuda.empty_cache()


def digest(x: Tensor, device: torch.device) -> int:
    """A number that every bit and its place go into, computed on the device piece by piece."""
    numbers = x.contiguous().view(torch.uint8).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for piece in numbers.split(8 * DIGEST_NUMBERS):
        whole = piece.to(device)
        whole = torch.nn.functional.pad(whole, (0, -whole.numel() % 8)).view(torch.int64)
        places = torch.arange(1, 2 * whole.numel(), 2, dtype=torch.int64, device=device)
        total = total * 1000003 + (whole * places).sum()  # int64 wraps around
    return int(total)


def judge(calls: Sequence[RingCall], shards: Shards, *, backward: bool) -> tuple[float, list[str]]:
    """Greatest error / bound of some rows, and what is wrong with them.

    A row's out, lse and dq depend on no other row of the queries; dk and dv of the last keys on no
    row but the last. So a few rows against all keys that they see are exact.

    Args:
        calls: of all ranks, over contiguous shards and a causal mask.
        shards: with inputs and results.
        backward: whether there are gradients.
    """
    call, mask = calls[0], calls[0].mask
    n, count = mask.seqlen_q, min(JUDGED_ROWS, mask.seqlen_q)
    ratios, wrong = [0.0], []
    for start in sorted({0, (n - count) // 2, n - count}):
        rows = (start, start + count)
        low = 0 if mask.left is None else max(0, start - mask.left)
        part = Mask(count, rows[1] - low, True, mask.window_size)
        for head in range(call.spec.nheads_kv):
            group = call.spec.nheads // call.spec.nheads_kv
            heads, one = slice(head * group, (head + 1) * group), slice(head, head + 1)
            q = rows_of(calls, shards, "q", rows)[:, :, heads]
            k, v = (rows_of(calls, shards, name, (low, rows[1]), one) for name in ("k", "v"))
            dout = rows_of(calls, shards, "dout", rows)[:, :, heads] if backward else q
            oracle = dense_gradients(q, k, v, dout, part)
            plain = plain_gradients(q, k, v, dout, part)
            last = rows[1] == n
            for name in (*RESULTS, *(GRADIENTS if last else GRADIENTS[:1])):
                if name in GRADIENTS and not backward:
                    continue
                expected, yardstick, terms = (
                    getattr(oracle, name), getattr(plain, name), oracle.terms.get(name),
                )  # fmt: skip
                got = rows_of(calls, shards, name, rows)
                if name in ("dk", "dv"):
                    # Earlier keys are seen by rows that are not looked at.
                    expected, yardstick, terms = (
                        None if x is None else x[:, -count:] for x in (expected, yardstick, terms)
                    )
                    got = got[:, :, one]
                else:
                    got = got[:, heads] if name == "lse" else got[:, :, heads]
                assert expected is not None and yardstick is not None, "both have every result"
                verdict = check(name, got, expected, yardstick, terms)
                ratios.append(verdict.ratio if verdict.ratio == verdict.ratio else float("inf"))
                if not verdict.ok:
                    wrong.append(f"rows {start} to {rows[1]}, kv head {head}: {verdict}")
    return max(ratios), wrong


def rows_of(
    calls: Sequence[RingCall],
    shards: Shards,
    name: str,
    rows: tuple[int, int],
    heads: slice | None = None,
) -> Tensor:
    """Global rows of a tensor, on the device; of some heads only, if they are given."""
    dim, parts, start = 2 if name == "lse" else 1, [], 0
    for call in calls:
        stop = start + call.layouts[0].shard_len(call.rank)
        low, high = max(rows[0], start), min(rows[1], stop)
        if low < high:
            x = shards.at(name, call.rank).narrow(dim, low - start, high - low)
            parts.append((x if heads is None else x[:, :, heads]).to(shards.device))
        start = stop
    return torch.cat(parts, dim)


def table(rows: Sequence[LengthRow], heads: str) -> Table:
    """A line for each run and each bound."""
    title = f"length on one device, {heads}; GiB predicted and found"
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    names = ("", "mode", "offload", "mask", "tokens", "predicted", "device", "predicted", "host",
             "s", "predicted", "TFLOP/s", "same bits", "error/bound", "")  # fmt: skip
    for index, name in enumerate(names):
        left = index < 4 or index == len(names) - 1
        found.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        mask = "causal" if row.window is None else f"window {format_size(row.window)}"
        found.add_row(
            row.what, row.mode, row.offload, mask, f"{row.seqlen}",
            "" if row.predicted_seqlen is None else f"{row.predicted_seqlen}",
            _gib(row.device_bytes), _gib(row.predicted_bytes), _gib(row.host_bytes),
            _number(row.seconds), _number(row.predicted_s), _number(row.tflops),
            {None: "", True: "yes", False: "NO"}[row.same_bits], _number(row.max_ratio), row.note,
        )  # fmt: skip
    return found


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.4g}"


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.3g}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add = parser.add_argument
    add("--seqlen", type=parse_size, help="of the runs (1M; with --quick 64k, on a CPU 1k)")
    add("--window", type=parse_size, help="of the run at the longest (32k; on a CPU 48)")
    add("--ranks", type=parse_size, help="that take turns (16; on a CPU 4)")
    add("--offload", default="none,kv", help=f"of {','.join(OFFLOADED)} (none,kv)")
    add("--limit", type=parse_size, help="bytes of the device (what is free; on a CPU 8M)")
    add("--host-memory", type=parse_size, help="bytes of host memory for offloading (3/4 of all)")
    add_device_arguments(parser)


def setting_of(args: argparse.Namespace) -> Setting:
    """What the options describe.

    Raises:
        ValueError: options that cannot be.
    """
    shared = one_device(args)
    gpu = shared.device.type == "cuda"
    chosen = chosen_of("--offload", args.offload, OFFLOADED)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    setting = Setting(
        seqlen=args.seqlen or ((1 << 16 if args.quick else 1 << 20) if gpu else 1024),
        window=args.window or (32768 if gpu else 48),
        world_size=args.ranks or (16 if gpu else 4),
        **vars(shared),
        offloads=tuple(name for name in OFFLOADED if name in chosen),
        limit=args.limit or (free_bytes() if gpu else 8 << 20),
        host_memory=args.host_memory or int(HOST_SHARE * host),
    )
    if setting.seqlen % setting.unit:
        raise ValueError(
            f"--seqlen must be a multiple of {setting.unit} with {setting.world_size} ranks, got "
            f"{setting.seqlen}"
        )
    return setting


def free_bytes() -> int:
    """What the device has left for tensors."""
    return int(torch.cuda.mem_get_info()[0]) - RESERVE_BYTES


def run(args: argparse.Namespace, words: Sequence[str] = ()) -> int:
    """Measures, writes the JSON as it goes, prints the table; 1 if a result is wrong."""
    setting = setting_of(args)
    if setting.device.type == "cuda":
        # A limit that is an error of the allocator, as the device's own is.
        total = torch.cuda.get_device_properties(setting.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, setting.limit / total))
    command = shlex.join(["python", "-m", "ring_attn.bench.length", *words])
    bench = Lengths(setting, command, args.json)
    bench.run()
    shown = None if args.quiet else table(bench.rows, str(setting))
    return finish(bench, shown, [bench.summary()])


def main(words: Sequence[str] | None = None) -> int:
    """`python -m ring_attn.bench.length`."""
    return run_module("length", __doc__, add_arguments, run, words)


if __name__ == "__main__":
    sys.exit(main())
