"""`ring-attn bench decode`: the newest tokens of sequences that attend to a KV cache."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ring_attn
from ring_attn.bench.benchmark import Benchmark, Outputs
from ring_attn.bench.implementations import reason
from ring_attn.bench.peers import installed
from ring_attn.bench.roofs import copy_gbps
from ring_attn.bench.rows import Row, figure, key, length
from ring_attn.bench.timing import FLUSH_BYTES, free_memory, turned
from ring_attn.cli.arguments import progress
from ring_attn.cli.bench_options import (
    DECODE_BATCHES,
    DECODE_IMPLEMENTATIONS,
    DECODE_ITERS,
    DECODE_SEQLENS,
)
from ring_attn.cli.progress import leave_to_ranks, lines_of_rank
from ring_attn.core.dtypes import dtype_name
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.testing import check, dense_gradients, plain_attention
from ring_attn.testing.launch import (
    check_tensors,
    checked_device,
    rank_device,
    run_ranks,
    timed_on_ranks,
    under_torchrun,
)
from ring_attn.values.outside import env_int

WARMUP = 3

# Calls of one repetition: one call is shorter than a synchronisation of a GPU with its host.
CALLS = {"cuda": 20, "cpu": 1}

# Errors of ours that do not fail the run.
REFUSALS = (NotImplementedError, ImportError, torch.OutOfMemoryError)

# Sizes of the cache whose results are compared with float64.
JUDGED_ROWS, JUDGED_BATCH = 1024, 2

# Query and kv heads, and dims of k and v, of multi-head latent attention with absorbed weights.
MLA_HEADS, MLA_DIMS = (128, 1), (576, 512)


class DecodeCase(NamedTuple):
    """The cache and the queries of a measurement; `page_size` 0 is a contiguous cache."""

    batch: int
    seqlen: int
    page_size: int
    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int

    def shortened(self, world_size: int) -> DecodeCase:
        """Return the case with at most as many rows as can be compared with float64."""
        least = world_size * max(self.page_size, self.queries)
        rows = min(self.seqlen, max(JUDGED_ROWS, least))
        return self._replace(batch=min(self.batch, JUDGED_BATCH), seqlen=rows)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of K and V; v is a part of k in multi-head latent attention."""
        dims = self.head_dim + (0 if self.is_latent else self.head_dim_v)
        return self.batch * self.seqlen * self.kv_heads * dims * dtype.itemsize

    @property
    def is_latent(self) -> bool:
        return (self.head_dim, self.head_dim_v) == MLA_DIMS


@dataclass(frozen=True)
class DecodeSetting:
    """The cases of a run, and the options of their measurement."""

    impls: tuple[str, ...]
    batches: tuple[int, ...]
    seqlens: tuple[int, ...]
    pages: tuple[int, ...]
    queries: int
    heads: tuple[tuple[int, int], ...]
    head_dims: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    world_size: int
    device: str
    threads: int
    iters: int

    def cases(self) -> Iterator[DecodeCase]:
        for (heads, kv_heads), (dim, dim_v), page_size, seqlen, batch in product(
            self.heads, self.head_dims, self.pages, self.seqlens, self.batches
        ):
            yield DecodeCase(
                batch=batch,
                seqlen=seqlen,
                page_size=page_size,
                queries=self.queries,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=dim,
                head_dim_v=dim_v,
            )


@dataclass(frozen=True, kw_only=True)
class DecodeRow(Row):
    """Times of an implementation on a case; `mode` is "decode".

    Attributes:
        pages: rows of a page, or 0 for a contiguous cache.
        tokens_per_s: new tokens of all sequences.
        gbps: GB/s with which a rank reads its part of K and V.
        share: that, as a share of the rate of a copy.
        max_ratio: error / bound of out; above 1 it is wrong.
    """

    batch: int = key("batch")
    seqlen: int = key("length", length)
    pages: int = key("pages", lambda size: length(size) if size else "none")
    queries: int = key("queries")
    heads: int = key("heads")
    kv_heads: int = key("kv heads")
    head_dim: int = key("head dim")
    head_dim_v: int = key("dim of v")
    dtype: str = key("")
    world_size: int = key("ranks")
    tokens_per_s: float | None = figure("tokens/s", ".4g")
    gbps: float | None = figure("GB/s", ".4g")
    share: float | None = figure("of\ncopy", ".0%")
    max_ratio: float | None = figure("error/\nbound", ".2f")


class DecodeBench(Benchmark[DecodeSetting, DecodeRow]):
    """Measures all cases in one set of ranks."""

    name, title = "decode", "decoding over a KV cache"

    def run(self) -> None:
        setting = self.setting
        self.check_comparable(
            [row_of(setting, case, impl) for case in setting.cases() for impl in setting.impls]
        )
        leave_to_ranks()
        ranks = run_ranks(
            measure,
            setting.world_size,
            setting,
            self.outputs,
            threads=setting.threads,
            device=setting.device,
        )
        self.rows, self.failures, gbps = ranks[0]
        self.remarks.append(f"a copy, read and written: {gbps:.4g} GB/s")


def row_of(setting: DecodeSetting, case: DecodeCase, impl: str) -> DecodeRow:
    """Return the row of an implementation without figures."""
    return DecodeRow(
        impl=impl,
        mode="decode",
        batch=case.batch,
        seqlen=case.seqlen,
        pages=case.page_size,
        queries=case.queries,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        dtype=dtype_name(setting.dtype),
        world_size=setting.world_size,
    )


def run(args: argparse.Namespace) -> int:
    """Measure, write the files, print the table; return 1 if a result is wrong."""
    bench = DecodeBench(setting_of(args), Outputs.of(args, DecodeBench.name, DecodeRow))
    bench.run()
    return bench.conclude()


def setting_of(args: argparse.Namespace) -> DecodeSetting:
    """Return the setting of the command's options; others have the default of the device."""
    started = env_int("WORLD_SIZE", 1) if under_torchrun() else None
    world_size = args.world_size or started or 1
    device = checked_device(args.device, world_size)
    on_gpu = device == "cuda"
    if args.mla and (args.heads or args.head_dims):
        raise ValueError("--mla sets heads and head dims: leave out --heads and --head-dim")
    heads: tuple[tuple[int, int], ...] = args.heads or ((32, 8) if on_gpu else (8, 2),)
    head_dims = args.head_dims or ((128, 128) if on_gpu else (64, 64),)
    if args.mla:
        heads, head_dims = (MLA_HEADS,), (MLA_DIMS,)
    batches = args.batches or (DECODE_BATCHES if on_gpu else (1, 4))
    seqlens = args.seqlens or (DECODE_SEQLENS if on_gpu else (1024, 4096))
    if args.quick:
        batches, seqlens = args.batches or batches[:1], args.seqlens or seqlens[:1]
    queries = args.queries or 1
    if queries > min(seqlens):
        raise ValueError(
            f"--queries must be at most the shortest length of --seqlen, {min(seqlens)}, got "
            f"{queries}"
        )
    setting = DecodeSetting(
        impls=args.impls or (DECODE_IMPLEMENTATIONS if on_gpu else ("ours", "torch")),
        batches=batches,
        seqlens=seqlens,
        pages=args.pages or (0,),
        queries=queries,
        heads=heads,
        head_dims=head_dims,
        dtype=args.dtype or (torch.bfloat16 if on_gpu else torch.float32),
        world_size=world_size,
        device=device,
        threads=args.threads,
        iters=args.iters or (3 if args.quick else DECODE_ITERS),
    )
    for case in setting.cases():
        what = f"caches of {case.batch} x {length(case.seqlen)} rows"
        check_tensors(what, case.nbytes(setting.dtype), device, world_size=world_size)
    return setting


# -- within a rank


class Cache(NamedTuple):
    """The new tokens, and a cache.

    Attributes:
        q: (batch, queries, heads, dim), the same on every rank.
        k: (batch, rows, kv_heads, dim), or the pool of pages (pages, page_size, kv_heads, dim).
        v: as k, with the dim of v; a view of k in multi-head latent attention.
        lengths: (batch,) int32 lengths of the sequences; None for a contiguous cache.
        block_table: (batch, pages) int32; None for a contiguous cache.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor | None = None
    block_table: Tensor | None = None


def measure(
    setting: DecodeSetting, outputs: Outputs | None = None
) -> tuple[list[DecodeRow], list[str], float]:
    """Measure all cases; return rows, failures, and the GB/s of a copy.

    Rank 0 writes the files of `outputs` after each case.
    """
    bench = DecodeBench(setting, outputs)
    rows: list[DecodeRow] = []
    failures: list[str] = []
    cases = list(setting.cases())
    gbps = copy_gbps(rank_device())
    work = [case.nbytes(setting.dtype) for case in cases]
    with lines_of_rank("ring-attn bench decode"):
        for number, case in enumerate(cases):
            stage = f"case {number + 1} of {len(cases)}"
            progress.begin(stage, done=sum(work[:number]), total=sum(work))
            rows += _measured(setting, case, gbps, failures)
            bench.rows, bench.failures = rows, failures
            bench.save()
    return rows, failures, gbps


def _measured(
    setting: DecodeSetting, case: DecodeCase, gbps: float, failures: list[str]
) -> list[DecodeRow]:
    """Check, and then time, all implementations on a case."""
    calls: dict[str, list[Callable[[], object]]] = {}
    rows = {impl: row_of(setting, case, impl) for impl in setting.impls}
    short = case.shortened(setting.world_size)
    for impl in setting.impls:
        try:
            why = why_not(impl, case, setting)
            if why:
                raise NotImplementedError(why)
            ratio, wrong = _verdict(setting, short, impl)
            calls[impl] = [
                _repeatable(attention(impl, case, _drawn(setting, case, whole=None)))
                for _ in range(num_caches(setting, case))
            ]
        except Exception as error:
            # Refusals are the same on all ranks: no rank has sent anything.
            rows[impl] = rows[impl].without_time(f"cannot run: {reason(error)}")
            if impl == "ours" and not isinstance(error, REFUSALS):
                traceback.print_exception(error)
                failures.append(f"ours, {case}: {reason(error)}")
            free_memory(rank_device())
            continue
        rows[impl] = replace(rows[impl], max_ratio=ratio)
        if wrong:
            rows[impl] = rows[impl].without_time(f"wrong: {wrong}")
        if wrong and impl == "ours":
            failures.append(f"ours, {case}: {wrong}")
    num_calls = CALLS[setting.device]
    samples: dict[str, list[float]] = {impl: [] for impl in calls}
    for repetition in range(WARMUP + setting.iters):
        for impl in turned([*calls], repetition):
            ms = 1e3 * timed_on_ranks(partial(_repeat, calls[impl], num_calls)) / num_calls
            if repetition >= WARMUP:
                samples[impl].append(ms)
    for impl, times in samples.items():
        row = rows[impl].timed(times)
        assert row.median_ms is not None
        rate = case.nbytes(setting.dtype) / setting.world_size * 1e-6 / row.median_ms
        rows[impl] = replace(
            row,
            tokens_per_s=1e3 * case.batch * case.queries / row.median_ms,
            gbps=rate,
            share=rate / gbps,
        )
    return list(rows.values())


def num_caches(setting: DecodeSetting, case: DecodeCase) -> int:
    """Return the number of caches to go through, so that none is in the L2 cache of a GPU.

    The layers of a model have caches of their own, too.
    """
    if setting.device == "cpu":
        return 1
    nbytes = case.nbytes(setting.dtype) // setting.world_size
    return min(CALLS[setting.device], -(-FLUSH_BYTES // nbytes))


def _repeat(calls: Sequence[Callable[[], object]], num: int) -> None:
    for number in range(num):
        calls[number % len(calls)]()


def _repeatable(call: Callable[[], object]) -> Callable[[], object]:
    """Return the call; on a GPU as a CUDA graph, as servers replay it."""
    if rank_device().type != "cuda":
        return call
    for _ in range(WARMUP):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _drawn(setting: DecodeSetting, case: DecodeCase, whole: Cache | None) -> Cache:
    """Return this rank's part of a cache; None draws one."""
    rank, world_size = dist.get_rank(), setting.world_size
    contiguous = whole or _random(case, setting.dtype, rows=_own_rows(case, rank, world_size))
    if not case.page_size:
        if whole is None:
            return contiguous
        layout = SequenceLayout.contiguous(case.seqlen, world_size)
        return Cache(whole.q, layout.shard(whole.k, rank), layout.shard(whole.v, rank))
    k, v = contiguous.k, contiguous.v
    if whole is not None:
        own = _positions(case, rank, world_size)
        k, v = k[:, own], v[:, own]
    return _paged(case, contiguous.q, k, v)


def _positions(case: DecodeCase, rank: int, world_size: int) -> Tensor:
    """Return the positions of a rank, whose pages go round the ranks."""
    positions = torch.arange(case.seqlen)
    return positions[positions // case.page_size % world_size == rank]


def _own_rows(case: DecodeCase, rank: int, world_size: int) -> int:
    if case.page_size:
        return len(_positions(case, rank, world_size))
    return SequenceLayout.contiguous(case.seqlen, world_size).shard_len(rank)


def _random(case: DecodeCase, dtype: torch.dtype, rows: int) -> Cache:
    """Draw queries, which are the same on every rank, and a contiguous cache of some rows."""
    generator = torch.Generator(rank_device()).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=rank_device(), dtype=dtype)

    q = draw(case.batch, case.queries, case.heads, case.head_dim)
    k = draw(case.batch, rows, case.kv_heads, case.head_dim)
    if case.is_latent:
        return Cache(q, k, k[..., : case.head_dim_v])
    return Cache(q, k, draw(case.batch, rows, case.kv_heads, case.head_dim_v))


def _paged(case: DecodeCase, q: Tensor, k: Tensor, v: Tensor) -> Cache:
    """Put the rows of a rank, (batch, rows, heads, dim), into pages in a mixed order."""
    size, batch = case.page_size, case.batch
    num_pages = max(-(-k.size(1) // size), 1)
    padding = (0, 0, 0, 0, 0, num_pages * size - k.size(1))
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(batch * num_pages, generator=generator).to(k.device)

    def pool(x: Tensor) -> Tensor:
        pages = F.pad(x, padding).unflatten(1, (num_pages, size)).flatten(0, 1)
        mixed = torch.empty_like(pages)
        mixed[order] = pages
        return mixed

    pool_k = pool(k)
    pool_v = pool_k[..., : case.head_dim_v] if case.is_latent else pool(v)
    lengths = torch.full((batch,), case.seqlen, dtype=torch.int32, device=k.device)
    block_table = order.view(batch, num_pages).int()
    return Cache(q, pool_k, pool_v, lengths, block_table)


def _verdict(setting: DecodeSetting, case: DecodeCase, impl: str) -> tuple[float, str]:
    """Return error / bound of out on a case, and what is wrong."""
    whole = _random(case, setting.dtype, rows=case.seqlen)
    got = attention(impl, case, _drawn(setting, case, whole))()
    mask = Mask(case.queries, case.seqlen, causal=True)
    q, k, v = whole.q, whole.k, whole.v
    dout = torch.ones_like(got)
    oracle = dense_gradients(q, k, v, dout, mask)
    plain = plain_attention(q, k, v, mask)[0]
    verdict = check("out", got, oracle.out, plain, oracle.terms["out"])
    return verdict.ratio, "" if verdict.ok else str(verdict)


# -- implementations


def why_not(impl: str, case: DecodeCase, setting: DecodeSetting) -> str | None:
    """Return the reason why an implementation cannot run a case here, or None."""
    if impl == "ours":
        return None
    if setting.world_size > 1:
        return "runs on one rank: pass --world-size 1"
    if impl == "torch":
        if case.page_size:
            return "scaled_dot_product_attention has no pages"
        if case.queries > 1:
            return "scaled_dot_product_attention aligns several queries to the first keys"
        return None
    package = {"fa2": "flash_attn", "fa3": "flash_attn_interface"}[impl]
    if not installed(package):
        return f"the package {package} is not installed"
    if setting.device == "cpu":
        return "runs on CUDA only"
    if case.head_dim != case.head_dim_v:
        return "needs equal head dims of k and v"
    if impl == "fa2" and case.page_size % 256:
        return "needs pages of a multiple of 256 rows"
    return None


def attention(impl: str, case: DecodeCase, cache: Cache) -> Callable[[], Tensor]:
    """Return a call of an implementation, which returns out (batch, queries, heads, dim)."""
    q, k, v = cache.q, cache.k, cache.v
    if impl == "ours":
        if cache.lengths is not None:
            return partial(
                ring_attn.tree_decode,
                q,
                k,
                v,
                cache_seqlens=cache.lengths,
                block_table=cache.block_table,
            )
        layout = SequenceLayout.contiguous(case.seqlen, dist.get_world_size())
        return partial(ring_attn.tree_decode, q, k, v, layout=layout)
    if impl == "torch":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = case.heads != case.kv_heads

        def attend() -> Tensor:
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
            return out.transpose(1, 2)

        return attend
    return _flash(impl, cache)


def _flash(impl: str, cache: Cache) -> Callable[[], Tensor]:
    """Return a call of flash_attn_with_kvcache of FlashAttention 2 or 3."""
    package, table = {
        "fa2": ("flash_attn", "block_table"),
        "fa3": ("flash_attn_interface", "page_table"),
    }[impl]
    function: Any = import_module(package).flash_attn_with_kvcache
    further: dict[str, Any] = {"causal": True}
    if cache.lengths is not None:
        further |= {"cache_seqlens": cache.lengths, table: cache.block_table}

    def attend() -> Tensor:
        found = function(cache.q, cache.k, cache.v, **further)
        out: Tensor = found[0] if isinstance(found, Sequence) else found
        return out

    return attend
