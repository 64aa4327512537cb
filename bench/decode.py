"""Time of decoding on one device: one query per sequence and a long cache of keys and values.

Decoding reads the cache once and computes almost nothing, so memory bandwidth limits it. GB/s is
the bytes of K and V / time; `% of copy` compares that with the bytes that a copy within the device
reads and writes. All run in turn within every repetition, with a cold L2.

    parts          --backend: the keys in parallel parts, as in `tree_decode`
    whole          the same backend as a forward: a program per query head reads all keys
    torch-flash    scaled_dot_product_attention with FlashAttention 2
    cudnn          scaled_dot_product_attention with cuDNN

Each result is compared with float64 on the query heads of the first kv head. The exit status is 1
if one of ours is wrong.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ring_attn.backends import Purpose, choose_backend, get_backend
from ring_attn.backends.base import decodes
from ring_attn.bench.implementations import SDPA_BACKENDS, reason, sdpa_by
from ring_attn.bench.one_device import OneDevice, add_device_arguments, one_device
from ring_attn.bench.outputs import Outputs
from ring_attn.bench.report import Report
from ring_attn.bench.timing import Call, Sample, Watch, quantiles, time_in_turn, watch_for
from ring_attn.core.layout import Segment
from ring_attn.core.mask import Mask
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.strategies.tree_decode import decode_tiles
from ring_attn.testing import check, dense_attention, plain_attention
from ring_attn.tools.arguments import format_size, new_table, parse_size, parse_sizes, show

ITERS = 15
OURS = ("parts", "whole")

# Size of the copy that measures a GPU's memory bandwidth.
COPY_BYTES = 4 << 30

Run = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting(OneDevice):
    """The caches and repetitions of a run; `backend` computes `OURS`."""

    seqlens: tuple[int, ...]
    batches: tuple[int, ...]
    backend: str
    iters: int = ITERS


@dataclass(frozen=True)
class Row:
    """Times of an implementation on a cache; None where there is no time.

    Attributes:
        gbps: GB/s: bytes of K and V / the median.
        of_copy: `gbps` / the GB/s of a copy.
        ratio: greatest error / bound.
        note: why there is no time, or what is wrong.
    """

    name: str
    seqlen: int
    batch: int
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    gbps: float | None = None
    of_copy: float | None = None
    ratio: float | None = None
    note: str = ""


class Cache:
    """The tensors of one case, and the implementations that run on them."""

    def __init__(self, setting: Setting, batch: int, seqlen: int) -> None:
        device, dtype, dim = setting.device, setting.dtype, setting.head_dim
        generator = torch.Generator(device).manual_seed(0)

        def random(rows: int, heads: int) -> Tensor:
            shape = (batch, rows, heads, dim)
            return torch.randn(shape, device=device, dtype=dtype, generator=generator)

        self.q, self.k, self.v = (
            random(1, setting.heads), random(seqlen, setting.kv_heads),
            random(seqlen, setting.kv_heads),
        )  # fmt: skip
        self.nbytes = self.k.nbytes + self.v.nbytes
        self.mask = Mask(1, seqlen, causal=True)
        self._tiles = decode_tiles((Segment(0, seqlen),), self.mask)
        spec = AttentionSpec.of(self.q, self.k, self.v)
        chosen = choose_backend(spec, setting.backend, Purpose(decoding=True))
        self._scores = Scores(dim**-0.5)
        self._backend = get_backend(chosen.name)

    def runs(self) -> Iterator[tuple[str, Run]]:
        """Every implementation, with its name."""
        if decodes(self._backend):
            yield "parts", self._parts
        yield "whole", self._whole
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        grouped = self.q.size(2) != self.k.size(2)
        for name, sdpa_backend in SDPA_BACKENDS.items():
            function = sdpa_by(sdpa_backend, causal=False, grouped=grouped)
            yield name, partial(_rows_first, function, q, k, v)

    def _parts(self) -> Tensor:
        backend: Any = self._backend
        out: Tensor = backend.decode(self.q, self.k, self.v, self._tiles, scores=self._scores)[0]
        return out

    def _whole(self) -> Tensor:
        backend = self._backend
        state = backend.new_state(self.q, self.v.size(3))
        args = (self.q, self.k, self.v, self._tiles, state)
        state = backend.forward(*args, scores=self._scores, last=True)
        return backend.finalize(state, self.q.dtype)[0]

    def ratio(self, out: Tensor) -> float:
        """Greatest error / bound of the query heads of the first kv head, in the first sequence."""
        group = self.q.size(2) // self.k.size(2)
        q, k, v = (x[:1, :, :n] for x, n in ((self.q, group), (self.k, 1), (self.v, 1)))
        oracle, plain = (f(q, k, v, self.mask)[0] for f in (dense_attention, plain_attention))
        return check("out", out[:1, :, :group].to(q.dtype), oracle, plain).ratio


class Decode(Report[Setting, Row]):
    """Measures one cache after another, and saves the report after each."""

    def __init__(self, setting: Setting, outputs: Outputs | None = None) -> None:
        super().__init__(setting, outputs)
        self._watch = watch_for(setting.device)
        self.copy_gbps = copy_gbps(setting.device, self._watch)

    def run(self) -> None:
        """Measures caches, the shortest first, until the budget is spent."""
        sizes = product(self.setting.seqlens, self.setting.batches)
        caches = [(f"caches of {b} x {n} rows", float(b * n), (n, b)) for n, b in sizes]
        for (seqlen, batch), note in self.in_budget(caches):
            if note:
                self.rows.append(Row("all", seqlen, batch, note=note))
            else:
                self.rows += self._case(batch, seqlen)

    def more(self) -> dict[str, Any]:
        """The GB/s of a copy."""
        return {"copy_gbps": self.copy_gbps}

    def _case(self, batch: int, seqlen: int) -> list[Row]:
        try:
            cache = Cache(self.setting, batch, seqlen)
        except torch.OutOfMemoryError:
            return [Row("all", seqlen, batch, note="out of memory")]
        runs, notes, ratios = dict(cache.runs()), dict[str, str](), dict[str, float]()
        for name, run in runs.items():
            try:
                ratios[name] = cache.ratio(run())
            except Exception as error:
                if name in OURS:
                    raise
                notes[name] = reason(error)
        calls = {name: Call([run]) for name, run in runs.items() if name not in notes}
        taken = time_in_turn(calls, self._watch, self.setting.iters)
        rows = [
            self._row(name, cache, taken.get(name, []), ratios.get(name), notes.get(name, ""))
            for name in runs
        ]
        for row in rows:
            if row.name in OURS and not (row.ratio is not None and row.ratio <= 1.0):
                self.failures.append(f"{row.name} on {seqlen} x {batch}: error / bound {row.ratio}")
        return rows

    def _row(
        self, name: str, cache: Cache, samples: list[Sample], ratio: float | None, note: str
    ) -> Row:
        batch, seqlen = cache.k.shape[:2]
        if not samples:
            return Row(name, seqlen, batch, note=note)
        low, median, high = (1e3 * x for x in quantiles([sample.ms[0] for sample in samples]))
        gbps = cache.nbytes / median / 1e3
        of_copy = None if self.copy_gbps is None else gbps / self.copy_gbps
        return Row(name, seqlen, batch, median, low, high, gbps, of_copy, ratio)


def _rows_first(function: Callable[..., Tensor], *qkv: Tensor) -> Tensor:
    return function(*qkv).transpose(1, 2)


def copy_gbps(device: torch.device, watch: Watch) -> float | None:
    """GB/s that a copy within a GPU reads and writes; None on a CPU."""
    if device.type != "cuda":
        return None
    x = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    samples = time_in_turn({"copy": Call([lambda: y.copy_(x)])}, watch, ITERS)["copy"]
    return 2 * COPY_BYTES / statistics.median(sample.ms[0] for sample in samples) / 1e6


def table(rows: Sequence[Row], setting: Setting) -> Table:
    """A line for each implementation on each cache."""
    lines = new_table(
        f"decoding, one query per sequence, {setting}",
        ("cache", "batch", ""),
        ("us", "GB/s", "% of copy", "error / bound"),
        "note",
    )
    for row in rows:
        lines.add_row(
            format_size(row.seqlen), str(row.batch), row.name, show(row.median_us, ".4g"),
            show(row.gbps, ".4g"), show(row.of_copy, ".0%"), show(row.ratio, ".2f"), row.note,
        )  # fmt: skip
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seqlen", type=parse_sizes, help="cache lengths (8k,32k,128k,1M; on a CPU 300,600)")
    add("--batch", type=parse_sizes, help="numbers of sequences (1,8; on a CPU 1)")
    add("--backend", help="our backend (triton; on a CPU auto)")
    add("--iters", type=parse_size, default=ITERS, help=f"repetitions ({ITERS})")
    add_device_arguments(parser)


def setting_of(args: argparse.Namespace) -> Setting:
    """The setting from the options; raises like `one_device`."""
    shared = one_device(args)
    gpu = shared.device.type == "cuda"
    seqlens: tuple[int, ...] = (8192, 32768, 131072, 1 << 20) if gpu else (300, 600)
    batches: tuple[int, ...] = (1, 8) if gpu else (1,)
    if args.quick:
        seqlens, batches = seqlens[:1], batches[:1]
    return Setting(
        **vars(shared),
        seqlens=args.seqlen or seqlens,
        batches=args.batch or batches,
        backend=args.backend or ("triton" if gpu else "auto"),
        iters=args.iters,
    )


def run(args: argparse.Namespace) -> int:
    """Measures, saves the JSON after each cache, prints the table; 1 if one of ours is wrong."""
    bench = Decode(setting_of(args), Outputs.of(args))
    bench.run()
    return bench.finish([] if args.quiet else [table(bench.rows, bench.setting)], [])
