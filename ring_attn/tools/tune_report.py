"""Results of `ring-attn tune`: rows, the best config of each kind, lines for the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ring_attn.bench.report import new_table, show
from ring_attn.bench.timing import Sample, quantiles
from ring_attn.tools.arguments import format_size

if TYPE_CHECKING:
    from ring_attn.kernels.configs import Config

# Kinds of the table of configs that are searched, the most valuable first.
KINDS = ("fwd_whole", "fwd", "dkdv", "dkdv_whole", "dq", "dq_whole")

# Kinds that differ in the mask alone fold over blocks of one length, of kv rows or of q rows: else
# a ring would not have the bits of a single pass.
FOLDED = {"fwd": "BLOCK_N", "dkdv": "BLOCK_M", "dq": "BLOCK_N"}

# Configs of each kind that the table shows, the fastest first.
SHOWN = 5


@dataclass(frozen=True)
class Row:
    """One config of a kind of the table of configs; None where there is no figure.

    `max_ratio` is the greatest error / bound, above 1 wrong; `speed` is relative to the frozen
    config; `note` says why there is no time, or what is wrong.
    """

    kind: str
    name: str
    config: Config
    gluon: bool = False
    frozen: bool = False
    max_ratio: float | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    samples: int = 0
    tflops: float | None = None
    speed: float | None = None
    note: str = ""

    @property
    def wrong(self) -> bool:
        """Whether it ran, and its results must not be used."""
        return self.max_ratio is not None and bool(self.note)


def kernel_of(kind: str) -> str:
    """The kernel of a kind: "dkdv" of "dkdv_whole"."""
    return kind.partition("_")[0]


def median_ms(samples: Sequence[Sample]) -> float:
    """The median of calls of one stage."""
    return quantiles([sample.ms[0] for sample in samples])[1]


def with_times(row: Row, samples: Sequence[Sample], flops: int, frozen_ms: float | None) -> Row:
    """The row with medians; as it is where nothing was timed."""
    if not samples:
        return row
    p20, median, p80 = quantiles([sample.ms[0] for sample in samples])
    return replace(
        row, median_ms=median, p20_ms=p20, p80_ms=p80, samples=len(samples),
        tflops=flops / median / 1e9, speed=frozen_ms and frozen_ms / median,
    )  # fmt: skip


def best(rows: Sequence[Row]) -> list[Row]:
    """The fastest row of every kind that was timed, as far as a ring's bits allow.

    The folded blocks of a kernel's kinds must have one length; a kind that was not timed keeps its
    frozen config, and so its length.
    """
    found: list[Row] = []
    for kernel, block in FOLDED.items():
        mine = [row for row in rows if kernel_of(row.kind) == kernel]
        kinds = {kind: [r for r in mine if r.kind == kind and r.speed] for kind in KINDS}
        timed = [of_kind for of_kind in kinds.values() if of_kind]
        lengths = {row.name: getattr(row.config, block) for row in mine}
        frozen = {lengths[row.name] for row in mine if row.frozen}
        options = [
            option
            for option in product(*timed)
            if len({(lengths[row.name], row.gluon) for row in option}) == 1
            and (len(timed) == 2 or lengths[option[0].name] in frozen)
        ]
        if options:
            found += max(options, key=lambda option: math.prod(row.speed or 0.0 for row in option))
    return found


def label(config: Config) -> str:
    """A config in words: tile, warps, stages, and fields that are not the default."""
    tile = f"{config.BLOCK_M}x{config.BLOCK_N} {config.num_warps}w {config.num_stages}s"
    sizes = ((name, format_size(x) if x >= 1024 else x) for name, x in _extras(config).items())
    return " ".join([tile, *(f"{name}={size}" for name, size in sizes)])


def table_line(row: Row, arch: str, head_dim: int, where: str) -> str:
    """The line that puts a row's config into the table of `kernels/configs.py`."""
    config = row.config
    names = [field.name for field in fields(config) if field.default is MISSING]
    words = [repr(getattr(config, name)) for name in names]
    words.append(f'"{show(row.median_ms, ".3g")} ms ({where})"')
    words += [f"{name}={value!r}" for name, value in _extras(config).items()]
    key = f"GLUON {head_dim}" if row.gluon else f'("{arch}", "{row.kind}", {head_dim})'
    return f"{key}: Config({', '.join(words)}),"


def _extras(config: Config) -> dict[str, Any]:
    """The optional fields of a config that differ from their defaults, but for its note."""
    return {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name != "note" and field.default not in (MISSING, getattr(config, field.name))
    }


def table(rows: Sequence[Row], title: str) -> Table:
    """The frozen config, and the fastest ones; the JSON has all."""
    found = new_table(
        title, ("kind", "config"), ("ms", "p20-p80", "TFLOP/s", "x frozen", "error / bound")
    )
    for kind in dict.fromkeys(row.kind for row in rows):
        mine = [row for row in rows if row.kind == kind]
        timed = sorted((row for row in mine if row.median_ms), key=lambda row: row.median_ms or 0.0)
        shown = [row for row in timed if row.frozen or row in timed[:SHOWN]]
        for index, row in enumerate(shown):
            found.add_row(
                "" if index else kind, f"{row.name} (frozen)" if row.frozen else row.name,
                show(row.median_ms, ".4g"), f"{row.p20_ms:.4g}-{row.p80_ms:.4g}",
                show(row.tflops, ".0f"), show(row.speed, ".3f"), show(row.max_ratio, ".2f"),
            )  # fmt: skip
        without = sum(not row.median_ms for row in mine)
        found.add_row("", f"and {len(mine) - len(shown)} more, {without} without a time")
        found.add_section()
    return found
