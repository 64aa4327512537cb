"""Compilation of every kernel in every tile configuration without a GPU, and checks of the code.

A cell is one kernel, variant, configuration, head dim, dtype and architecture. A cell fails if the
compiled kernel

- spills more registers than allowed (`Limits`), in total or in one loop;
- needs more shared memory than the architecture has;
- uses no tensor cores;
- has products that may read before a proxy fence, or wgmma instructions that ptxas serialised;
- is not warp-specialised although it must be;
- adds in another order than another variant with the same tile.

No kernel runs on a GPU, and none is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product

import torch
import triton
from torch import Tensor

from dev.code_rules import SHARED_BYTES, Limits, failures, other_orders
from dev.compiled import Compiled, CompiledRow, CompileError, compile_launch, interpreting
from ring_attn.backends.triton_support import TRITON_OF_SM_100
from ring_attn.bench.report import Report
from ring_attn.cli.arguments import add_common, parse_dtype, parse_size
from ring_attn.core.dtypes import HALF_DTYPES, dtype_name
from ring_attn.kernels import configs, decode, flash_bwd, flash_fwd, merge_tree
from ring_attn.kernels.configs import Config
from ring_attn.kernels.launch import Launch
from ring_attn.kernels.step_table import StepTable, make_step_table, transposed
from ring_attn.kernels.triton_release import RELEASE
from ring_attn.kernels.turn_table import TurnTable, make_turn_table
from ring_attn.testing.launch import map_in_processes

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942")
# Head dims of q and k, and after a slash the head dim of v if it differs.
HEAD_DIMS = ("64", "128", "192/128", "256")
# Not in the default, because it is not a multiple of 16: dq with a mask spills 16 to 24 bytes on
# sm_86 and sm_100, and decoding 8 on sm_86.
ODD_HEAD_DIMS = ("72",)
# The absorbed form of MLA, which is only decoded.
DECODED_HEAD_DIMS = ("576/512",)
DTYPES = tuple(dtype_name(dtype) for dtype in HALF_DTYPES)
QUICK = (("sm_90",), ("64",), ("bfloat16",))

# Sizes of the tensors of launches: multiples of 16, the usual case, for which triton specialises.
ROWS = 1024
HEADS = 32
KV_HEADS = 16

# Parts of the keys in decoding, and rows of a page.
PARTS = 32
PAGE_SIZE = 16

# (lo, hi): a row i sees the keys j with lo <= j - i <= hi.
BANDS: dict[str, tuple[int | None, int | None]] = {
    "full": (None, None),
    "causal": (None, 0),
    "shifted": (None, 8),  # causal, but the diagonal does not end with a block of columns
    "window": (-ROWS // 4, 0),
}


@dataclass(frozen=True)
class Variant:
    """A kernel and the options that change its code.

    Attributes:
        kernel: a key of KERNELS; "merge" merges parts, and "merge_tree" ranks.
        band: a key of BANDS.
        ragged: whether the keys end within a block.
        first: whether the forward loads no state.
        last: whether the forward writes out and lse.
        softcap: whether scores are capped.
        sinks: whether there are sinks.
        few: whether dk and dv use the config for few programs.
        paged: whether decoding reads lengths and pages of sequences.
    """

    kernel: str
    band: str = "full"
    ragged: bool = False
    first: bool = False
    last: bool = False
    softcap: bool = False
    sinks: bool = False
    few: bool = False
    paged: bool = False

    @property
    def is_forward(self) -> bool:
        """Whether the kernel carries a state from step to step."""
        return self.kernel.endswith("fwd")

    @property
    def kind(self) -> str:
        """The key of the variant in the table of configurations."""
        if self.kernel in ("decode", "delta"):
            return self.kernel
        kernel = "fwd" if self.is_forward else self.kernel
        if self.softcap and not self.is_forward:
            return f"{kernel}_softcap"
        return f"{kernel}_whole" if self.band == "full" and not self.ragged else kernel

    @property
    def label(self) -> str:
        """A short text such as "middle causal", which for a forward has the step of the ring."""
        words = [self.band]
        if self.is_forward:
            steps = {(True, True): "only", (True, False): "first", (False, True): "last"}
            words.insert(0, steps.get((self.first, self.last), "middle"))
        options = ("ragged", "softcap", "sinks", "few", "paged")
        words += [name for name in options if getattr(self, name)]
        return " ".join(words)


# The spills of the backward of sm_90 with triton 3.7.1; with 3.9.0 it has more, and fails. Sums
# take 208 to 224 of the 232 registers of a consumer, and the adding warp has 40 registers. The
# spilled value is the index of the thread, from which addresses are computed. The 6 loads and
# stores are in a visit with 64 dims in a ragged window, which has 580 instructions.
GLUON_BWD = Limits(warp_specialize=True, exposed=0, spilled=44, within=6, around=4, beside=4)
# On sm_80, outside the visits: the addresses of the sums, once per run.
TURNS_BWD = Limits(spilled=192, beside=31)
# The index of the thread and the numbers of a run: 3 times per visit, and before and after the
# visits of a run.
BLACKWELL_BWD = Limits(warp_specialize=True, spilled=96, around=10, beside=3)

# Kernels that only some architectures have, each in a file of its name, and the functions in these
# files that make launches.
LAUNCHES = {
    "hopper_fwd": "hopper_launch",
    "hopper_bwd": "bwd_launch",
    "turns_bwd": "turns_launch",
    "blackwell_fwd": "blackwell_launch",
    "blackwell_bwd": "blackwell_bwd_launch",
}

WITHOUT_PRODUCTS = Limits(products=None)

# The kernels, their requirements, and their variants, as the band and the options that are set. The
# variants are the most common ones, and those that need the most registers.
KERNELS = {
    "fwd": (
        Limits(),
        (
            "full",
            "full first last",
            "causal",
            "window ragged",
            "causal first last",
            "causal last softcap sinks",
        ),
    ),
    "hopper_fwd": (
        Limits(warp_specialize=True, exposed=0),
        (
            "full",
            "full first last",
            "causal first",
            "causal",
            "causal last softcap sinks",
            "causal first last",
            "shifted first last",
            "window ragged",
        ),
    ),
    # The index of the thread, before warps are specialised; twice per task.
    "blackwell_fwd": (
        Limits(warp_specialize=True, spilled=12, around=2),
        (
            "full",
            "full first last",
            "causal first",
            "causal",
            "causal last softcap sinks",
            "causal first last",
            "window ragged",
        ),
    ),
    "hopper_bwd": (GLUON_BWD, ("full", "causal", "window ragged")),
    "turns_bwd": (TURNS_BWD, ("full", "causal", "window ragged")),
    "blackwell_bwd": (BLACKWELL_BWD, ("full", "causal", "window ragged")),
    "dkdv": (
        Limits(),
        (
            "full",
            "causal",
            "window ragged",
            "causal softcap",
            "full few",
            "causal few",
            "window ragged few",
        ),
    ),
    "dq": (Limits(), ("full", "causal", "window ragged", "causal softcap")),
    "delta": (WITHOUT_PRODUCTS, ("full",)),
    "decode": (Limits(products="any"), ("full", "full paged", "full paged softcap")),
    "merge": (WITHOUT_PRODUCTS, ("full",)),
    "merge_tree": (WITHOUT_PRODUCTS, ("full sinks",)),
}
VARIANTS = tuple(
    Variant(kernel, band, **dict.fromkeys(options, True))
    for kernel, (_, variants_of) in KERNELS.items()
    for band, *options in map(str.split, variants_of)
)


@dataclass(frozen=True)
class Cell:
    """A kernel's variant and configuration to compile; `head_dim_v` None is head_dim."""

    arch: str
    head_dim: int
    dtype: str
    variant: Variant
    config: Config
    head_dim_v: int | None = None

    def launch(self) -> Launch:
        return variant_launch(
            self.variant,
            self.config,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v or self.head_dim,
            dtype=parse_dtype(self.dtype),
        )


def cells(arch: str, head_dims: str, dtype: str) -> Iterator[Cell]:
    """Yield every kernel and variant in the configurations for an architecture."""
    head_dim, *others = map(int, head_dims.split("/"))
    for variant in variants(arch, head_dims):
        for config in _configs(variant, arch, head_dim, parse_dtype(dtype)):
            yield Cell(arch, head_dim, dtype, variant, config, *others)


def why_refused(arch: str) -> str | None:
    """Return the reason why the backend refuses an architecture with this triton, or None."""
    if arch == "sm_100" and RELEASE < TRITON_OF_SM_100:
        return f"the backend refuses sm_100 with triton {triton.__version__}"
    return None


def variants(arch: str, head_dims: str) -> tuple[Variant, ...]:
    """Return the variants that exist for an architecture and head dims."""
    column = configs.column(arch)
    head_dim = int(head_dims.split("/")[0])
    # Architectures of the kernels of LAUNCHES, by the first word of their names.
    columns = {"hopper": ["sm_90"], "blackwell": ["sm_100"], "turns": ["sm_80", "sm_86"]}

    def exists(variant: Variant) -> bool:
        if variant.few:
            return (column, configs.bucket(head_dim)) in configs.FEW_PROGRAMS
        if variant.kernel in LAUNCHES:
            one_pass = configs.ONE_PASS.get(column, {})
            with_config = configs.in_gluon(arch) if variant.is_forward else one_pass
            family = variant.kernel.partition("_")[0]
            return column in columns[family] and head_dims in map(str, with_config)
        if head_dims in DECODED_HEAD_DIMS:
            return variant.kernel in ("decode", "merge")
        return True

    return tuple(variant for variant in VARIANTS if exists(variant))


def _configs(variant: Variant, arch: str, head_dim: int, dtype: torch.dtype) -> tuple[Config, ...]:
    """Return the frozen config of a variant, or all configs of the forward in Gluon."""
    if variant.kernel in LAUNCHES:
        one_pass = configs.ONE_PASS.get(configs.column(arch), {})
        return configs.in_gluon(arch)[head_dim] if variant.is_forward else (one_pass[head_dim],)
    if variant.kernel == "merge":
        return (decode.MERGE,)
    if variant.kernel == "merge_tree":
        return (merge_tree.config_of(head_dim),)
    column = configs.column(arch)
    if variant.few:
        return (configs.FEW_PROGRAMS[column, configs.bucket(head_dim)],)
    return (configs.frozen(variant.kind, column, head_dim, dtype),)


def variant_launch(
    variant: Variant, config: Config, head_dim: int, head_dim_v: int, dtype: torch.dtype
) -> Launch:
    """Return the launch of a variant over tensors that have no memory."""
    meta = torch.device("meta")

    def rows_of(heads: int, dtype: torch.dtype = dtype, dim: int = head_dim_v) -> Tensor:
        return torch.empty(1, ROWS, heads, dim, dtype=dtype, device=meta)

    def stats() -> Tensor:
        return torch.empty(1, HEADS, ROWS, device=meta)

    if variant.kernel == "delta":
        out, dout = rows_of(HEADS), rows_of(HEADS)
        return flash_bwd.delta_launch(out, dout, stats(), stats(), stats(), config)
    if variant.kernel in ("decode", "merge"):
        return _decode_launch(variant, config, head_dim, head_dim_v, dtype)
    if variant.kernel == "merge_tree":  # results of 64 ranks for 4 queries
        outs = torch.empty(64, 1, 4, HEADS, head_dim_v, device=meta)
        lses = torch.empty(64, 1, HEADS, 4, device=meta)
        sinks = torch.empty(HEADS, device=meta)
        return merge_tree.merge_tree_launch(outs, lses, outs[0].to(dtype), lses[0], sinks)
    table = _table(variant, config)
    q, k = rows_of(HEADS, dim=head_dim), rows_of(KV_HEADS, dim=head_dim)
    v = rows_of(KV_HEADS)
    scale = head_dim**-0.5
    softcap = 50.0 if variant.softcap else 0.0
    make: Callable[..., Launch]
    if variant.is_forward:
        state = flash_fwd.Carried(
            sinks=torch.empty(HEADS, device=meta) if variant.sinks else None,
            counter=torch.empty(1, dtype=torch.int32, device=meta),
        )
        if not (variant.first and variant.last):
            state.acc, state.m, state.l = rows_of(HEADS, torch.float32), stats(), stats()
        if variant.last:
            state.out, state.lse = rows_of(HEADS), stats()
        make = flash_fwd.forward_launch
        if variant.kernel in LAUNCHES:
            make = _own(variant.kernel)
        steps = {"first": variant.first, "last": variant.last}
        return make(q, k, v, state, table, config, softmax_scale=scale, softcap=softcap, **steps)
    inputs = (q, k, v, rows_of(HEADS), stats(), stats())
    dq = rows_of(HEADS, torch.float32, head_dim)
    if variant.kernel == "dq":
        return flash_bwd.dq_launch(inputs, dq, table, config, softmax_scale=scale, softcap=softcap)
    dk, dv = (rows_of(KV_HEADS, torch.float32, dim) for dim in (head_dim, head_dim_v))
    if isinstance(table, TurnTable):
        turns = torch.empty(1, dtype=torch.int32, device=meta)
        make = _own(variant.kernel)
        return make(inputs, (dq, dk, dv), turns, table, config, softmax_scale=scale)
    return flash_bwd.dkdv_launch(
        inputs, dk, dv, table, config, softmax_scale=scale, softcap=softcap
    )


def _own(kernel: str) -> Callable[..., Launch]:
    """Return the function that makes the launches of a kernel of LAUNCHES."""
    module = import_module(f"ring_attn.kernels.{kernel}")
    make: Callable[..., Launch] = getattr(module, LAUNCHES[kernel])
    return make


def _decode_launch(
    variant: Variant, config: Config, head_dim: int, head_dim_v: int, dtype: torch.dtype
) -> Launch:
    """Return the launch that decodes one query, or that merges its parts.

    Wide heads are the absorbed form of MLA, with one kv head, whose values are a part of the keys.
    """
    meta = torch.device("meta")
    wide = head_dim > configs.BUCKETS[-1]
    kv_heads = 1 if wide else KV_HEADS
    q = torch.empty(1, 1, HEADS, head_dim, dtype=dtype, device=meta)
    rows = (ROWS // PAGE_SIZE, PAGE_SIZE) if variant.paged else (1, ROWS)
    k = torch.empty(*rows, kv_heads, head_dim, dtype=dtype, device=meta)
    v = k[..., :head_dim_v] if wide else k.new_empty(*rows, kv_heads, head_dim_v)
    acc = torch.empty(1, PARTS, 1, HEADS, head_dim_v, device=meta)
    m = l = acc[..., 0]  # (1, PARTS, 1, HEADS)
    if variant.kernel == "merge":
        out, lse = acc[:, 0], acc[:, 0, ..., 0]
        return decode.merge_parts_launch(acc, m, l, out, lse, PARTS)
    block_table = None
    cache_seqlens = None
    seen: decode.SeenRows | decode.SequenceRule = decode.SeenRows(0, ROWS)
    if variant.paged:
        block_table = torch.empty(1, ROWS // PAGE_SIZE, dtype=torch.int32, device=meta)
        cache_seqlens = block_table[:, 0]
        seen = decode.SequenceRule(
            position=0, run=PAGE_SIZE, period=8 * PAGE_SIZE, most_rows=ROWS, left=-1, right=0
        )
    return decode.decode_launch(
        q,
        k,
        v,
        block_table,
        (acc, m, l),
        cache_seqlens,
        seen,
        decode.CacheParts(0, ROWS // PARTS, PARTS),
        config,
        softmax_scale=head_dim**-0.5,
        softcap=50.0 if variant.softcap else 0.0,
        shared=wide,
    )


def _table(variant: Variant, config: Config) -> StepTable:
    """Return the step table of one rectangle, transposed for dk and dv."""
    cpu = torch.device("cpu")
    lo, hi = BANDS[variant.band]
    rows = ROWS - 1 if variant.ragged else ROWS
    if variant.kernel.endswith("bwd"):
        seen = transposed([(0, rows, 0, rows, lo, hi)])
        return make_turn_table(seen, config.BLOCK_N, config.BLOCK_M, cpu)
    if variant.kernel == "dkdv":
        seen = transposed([(0, rows, 0, ROWS, lo, hi)])
        return make_step_table(seen, config.BLOCK_N, config.BLOCK_M, cpu, descending=False)
    seen = [(0, ROWS, 0, rows, lo, hi)]
    return make_step_table(seen, config.BLOCK_M, config.BLOCK_N, cpu, descending=True)


def judged(launch: Launch, arch: str, expected: Limits) -> tuple[Compiled | None, tuple[str, ...]]:
    """Compile a launch; return its report (None if it does not compile) and its failures."""
    try:
        report = compile_launch(launch, arch)
    except CompileError as error:
        return None, (f"does not compile: {error}",)
    return report, failures(report, arch, expected)


def compile_cell(cell: Cell) -> CompiledRow:
    """Compile a cell and check it by its limits."""
    report, wrong = judged(cell.launch(), cell.arch, limits_of(cell))
    return _row(cell, report, wrong)


def limits_of(cell: Cell) -> Limits:
    """Return the limits of a cell: those of its kernel, with exceptions that have reasons."""
    expected, _ = KERNELS[cell.variant.kernel]
    if cell.variant.kernel == "hopper_bwd" and cell.head_dim == 64:
        # Visits that have a mask lack registers to overlap exponentials with a product: all 64
        # exponentials overlap with none; without a mask 10 to 12. With a mask more addresses are
        # spilled.
        expected = replace(expected, exposed=64, spilled=124, around=14)
    if cell.variant.kernel == "blackwell_fwd":
        # S of the next block and O += P V of this block, of both tiles: 16 dims or columns each.
        expected = replace(expected, together=2 * (cell.head_dim + cell.config.BLOCK_N) // 16)
        if cell.variant.softcap or cell.variant.ragged:
            # Registers are loaded again in the loops over tasks and runs, not over blocks.
            expected = replace(expected, spilled=148, within=1, beside=3)
    if cell.variant.kernel == "blackwell_bwd":
        # S and dP of the next visit, dV, dK and dQ of this visit: 16 dims or columns each.
        expected = replace(expected, together=3 * cell.config.BLOCK_N // 16 + cell.head_dim // 8)
    # Head dims that are padded to one size of tiles are compiled to nearly the same code.
    size = configs.bucket(cell.head_dim)
    kind = (cell.arch, cell.variant.kernel, size, cell.variant.few)
    if kind == ("sm_80", "fwd", 128, False):  # before and after blocks
        expected = replace(expected, spilled=48, beside=2)
    elif kind == ("sm_80", "dkdv", 128, False):
        expected = replace(expected, spilled=72, within=10, beside=17)
    elif kind == ("sm_80", "dkdv", 64, False):  # before and after blocks
        expected = replace(expected, spilled=8)
    elif kind[1:3] == ("decode", 256) and configs.column(cell.arch) == "sm_86":
        # With pages of 192/128: outside the loop, so that a third program fits a multiprocessor.
        expected = replace(expected, spilled=64)
    elif cell.variant.few:  # the alternative would leave half the GPU idle
        expected = replace(expected, spilled=36, within=2, around=5)
    # On sm_100 registers are spilled before a loop over blocks and loaded after it.
    elif (cell.arch, cell.variant.kernel) == ("sm_100", "fwd"):  # 256 dims, and decoding
        expected = replace(expected, spilled=160, around=28)
    elif cell.arch == "sm_100" and cell.variant.kernel == "dkdv":  # 256 dims
        expected = replace(expected, spilled=12)
    if RELEASE < (3, 7):
        expected = _of_triton_3_6(cell, expected)
    return expected


def _of_triton_3_6(cell: Cell, expected: Limits) -> Limits:
    """Return the limits for triton 3.6, which spills more than 3.7.1 in some kernels.

    Another config would cost more than the spills.
    """
    kernel, size = cell.variant.kernel, configs.bucket(cell.head_dim)
    if kernel == "hopper_bwd" and size == 64:
        # One more of the 580 instructions of a visit. With 64 rows of q there are no spills, but
        # twice as many copies of dQ.
        return replace(expected, within=7)
    if (cell.arch, size, kernel) == ("sm_80", 128, "fwd"):  # before and after blocks
        return replace(expected, spilled=64, beside=6)
    if (cell.arch, size, kernel) == ("sm_80", 128, "dq"):  # outside the loop, as the next one
        return replace(expected, spilled=8)
    if (configs.column(cell.arch), size, kernel) == ("sm_86", 128, "decode"):
        return replace(expected, spilled=8)
    return expected


def compile_all(all_cells: Sequence[Cell], jobs: int) -> Iterator[CompiledRow]:
    """Yield rows in the order of the cells; if the compiler crashes, only that cell fails."""
    lost = ("does not compile: the process died",)
    return map_in_processes(compile_cell, all_cells, jobs, lambda cell: _row(cell, None, lost))


def _row(cell: Cell, report: Compiled | None, wrong: tuple[str, ...]) -> CompiledRow:
    config = cell.config
    return CompiledRow(
        kernel=cell.variant.kernel,
        variant=cell.variant.label,
        arch=cell.arch,
        head_dim=cell.head_dim,
        dtype=cell.dtype,
        tile=f"{config.BLOCK_M}x{config.BLOCK_N}",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        report=report,
        failures=wrong,
        head_dim_v=cell.head_dim_v,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for option, known, default in (
        ("--arch", SHARED_BYTES, ", ".join(ARCHS)),
        (
            "--head-dim",
            (*HEAD_DIMS, *ODD_HEAD_DIMS, *DECODED_HEAD_DIMS),
            ", ".join((*HEAD_DIMS, *DECODED_HEAD_DIMS)),
        ),
        ("--dtype", DTYPES, "all"),
        ("--kernel", KERNELS, "all"),
    ):
        names = f"of {', '.join(known)} (default {default})"
        add(option, nargs="+", choices=tuple(known), metavar="NAME", help=names)
    add("--jobs", type=parse_size, default=2, help="processes that compile (default 2)")
    add_common(parser)


@dataclass(frozen=True)
class Selection:
    """The cells to compile: all kernels for all architectures, head dims and dtypes listed."""

    arch: Sequence[str]
    head_dim: Sequence[str]
    dtype: Sequence[str]
    kernel: Sequence[str]
    jobs: int

    def cells(self) -> list[Cell]:
        return [
            cell
            for arch, head_dim, dtype in product(self.arch, self.head_dim, self.dtype)
            for cell in cells(arch, head_dim, dtype)
            if cell.variant.kernel in self.kernel
        ]


def run(args: argparse.Namespace) -> int:
    """Compile, print cells and failures, write the JSON; return 1 if a cell failed."""
    if interpreting():
        raise ValueError(
            "kernels of the interpreter cannot be compiled, got TRITON_INTERPRET=1: unset it"
        )
    archs, head_dims, dtypes = (
        QUICK if args.quick else (ARCHS, (*HEAD_DIMS, *DECODED_HEAD_DIMS), DTYPES)
    )
    setting = Selection(
        arch=args.arch or archs,
        head_dim=args.head_dim or head_dims,
        dtype=args.dtype or dtypes,
        kernel=args.kernel or tuple(KERNELS),
        jobs=args.jobs,
    )
    refused = {arch: why for arch in setting.arch if (why := why_refused(arch)) is not None}
    if refused and args.arch:
        raise ValueError(f"{'; '.join(refused.values())}: leave it out of --arch")
    for arch, why in refused.items():
        print(f"{arch} is left out: {why}")
    setting = replace(setting, arch=[arch for arch in setting.arch if arch not in refused])
    chosen = setting.cells()
    bench = Report[Selection, CompiledRow](setting, args.json)
    for row in compile_all(chosen, args.jobs):
        bench.rows.append(row)
        if row.report is not None and not args.quiet:
            got = row.report
            sizes = f"{got.registers} registers, bytes spilled {got.spill_bytes}"
            print(f"{_name(row)}: {sizes}, shared {got.shared_bytes}, {got.seconds:.1f} s")
        if row.failures:
            bench.failures.append(f"FAIL {_name(row)}: {'; '.join(row.failures)}")
    bench.failures += [f"FAIL {_name(row)}: {text}" for row, text in other_orders(bench.rows)]
    bench.save()
    counts = f"{len(bench.rows)} cells in {bench.seconds:.0f} s, {len(bench.failures)} failed"
    return bench.finish([], [f"triton {triton.__version__}: {counts}"])


def _name(row: CompiledRow) -> str:
    return (
        f"{row.arch} {row.kernel} {row.variant} head_dim {row.head_dims} {row.dtype} "
        f"{row.tile} {row.num_warps} warps {row.num_stages} stages"
    )
