"""What `tune` found: its rows, the best config of each kind, the table, the lines at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from ring_attn.bench.timing import quantiles
from ring_attn.tools.launches import GLUON_KIND, Built, label, table_line

if TYPE_CHECKING:
    from ring_attn.kernels.configs import Config

# Whose speed the targets are set by: a forward's, and a whole backward's.
YARDSTICK, TARGETS = "cudnn", {"fwd": 1.00, "bwd": 0.95}

# Kinds that differ in the mask alone fold over blocks of one length, of kv rows or of q rows: else
# a ring would not have the bits of a single pass.
FOLDED = {"fwd": "BLOCK_N", "dkdv": "BLOCK_M", "dq": "BLOCK_N"}

# The names of whole backwards of ours.
FROZEN_SET, BEST_SET = "ours, frozen configs", "ours, best configs"

# Of every case the fastest so many are shown.
SHOWN = 4


@dataclass(frozen=True)
class TuneRow:
    """One config, or one other implementation, in one case; None where there is no figure.

    Attributes:
        case: in words.
        kind: in the table of configs; "" of what is no single kernel of ours.
        name: the config in words, or the implementation.
        config: its fields.
        frozen: it is the table's.
        decides: the case counts for which config is the best of its kind.
        built: registers, spilled bytes, shared memory, and seconds to make it.
        max_ratio: greatest error / bound; above 1 is wrong.
        repeats: runs of the shorter sequence that gave the same bits.
        same_bits: its results have the frozen config's bits.
        tflops: by the operations that are done.
        speed: over the frozen config's, above 1 is faster; where that is wrong, over the fastest's.
        speed_over_cudnn: likewise, of a forward or a whole backward.
        note: why there is no time, or what is wrong.
    """

    case: str
    kind: str
    name: str
    config: dict[str, Any] | None = None
    frozen: bool = False
    decides: bool = False
    built: Built = field(default_factory=Built)
    max_ratio: float | None = None
    repeats: int = 0
    same_bits: bool | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    samples: int = 0
    tflops: float | None = None
    speed: float | None = None
    speed_over_cudnn: float | None = None
    note: str = ""

    @property
    def wrong(self) -> bool:
        """It was run, and what came out must not be used."""
        return self.max_ratio is not None and bool(self.note)


@dataclass(frozen=True)
class Choice:
    """The config that a kind is best served by.

    Attributes:
        config: without its note.
        speed: over the frozen one's, the geometric mean over the kind's cases.
        rows: of the config, one for each case.
    """

    config: Config
    speed: float
    rows: tuple[TuneRow, ...]


def with_times(row: TuneRow, samples: Sequence[float], flops: int) -> TuneRow:
    """The row with medians; as it is where nothing was timed, or something is wrong."""
    if not samples or row.note:
        return row
    p20, median, p80 = quantiles(samples)
    return replace(
        row,
        median_ms=median,
        p20_ms=p20,
        p80_ms=p80,
        samples=len(samples),
        tflops=flops / median / 1e9,
    )


def with_speeds(
    row: TuneRow, ours: Sequence[float] | None, cudnn: Sequence[float] | None
) -> TuneRow:
    """The row with its speeds over those of the two references, by their samples."""

    def over(samples: Sequence[float] | None) -> float | None:
        return quantiles(samples)[1] / row.median_ms if samples and row.median_ms else None

    return replace(row, speed=over(ours), speed_over_cudnn=over(cudnn))


def config_of(row: TuneRow) -> Config:
    """Of a row that has one."""
    from ring_attn.kernels.configs import Config

    assert row.config is not None, "only rows of single kernels are asked"
    return Config(**row.config)


def base_of(kind: str) -> str:
    """The kernel of a kind: "dkdv" of "dkdv_whole"."""
    return kind.partition("_")[0]


def best(rows: Iterable[TuneRow], kinds: Sequence[str]) -> dict[str, Choice]:
    """The best config of every kind that was timed, as far as a ring's bits allow.

    Args:
        rows: of all cases.
        kinds: that the table has; one that was not timed keeps its frozen config.
    """
    found = {kind: _choices([row for row in rows if row.kind == kind]) for kind in kinds}
    chosen: dict[str, Choice] = {}
    for base, name in FOLDED.items():
        group = [kind for kind in kinds if base_of(kind) == base]
        if not any(found[kind] for kind in group):
            continue
        together: dict[int, dict[str, Choice]] = {}
        for kind in group:
            for choice in found[kind]:
                block = getattr(choice.config, name)
                together.setdefault(block, {}).setdefault(kind, choice)
        # The frozen configs of a group share one block: it is what a kind that was not timed has.
        timed = sum(bool(found[kind]) for kind in group)
        blocks = together if timed == len(group) else _frozen_blocks(rows, group, name)
        options = [together[block] for block in blocks if len(together.get(block, {})) == timed]
        if options:
            chosen.update(sorted(options, key=_product)[-1])
    return chosen


def _product(option: Mapping[str, Choice]) -> float:
    return math.prod(choice.speed for choice in option.values())


def fastest(rows: Iterable[TuneRow], kind: str) -> Choice | None:
    """The best config of a kind, whatever the others are; None where nothing was timed."""
    return next(iter(_choices([row for row in rows if row.kind == kind])), None)


def _frozen_blocks(rows: Iterable[TuneRow], group: Sequence[str], name: str) -> set[int]:
    return {getattr(config_of(row), name) for row in rows if row.kind in group and row.frozen}


def _choices(rows: Sequence[TuneRow]) -> list[Choice]:
    """Configs that hold in all cases of a kind, the fastest first."""
    mine = [row for row in rows if row.decides]
    cases = {row.case for row in mine if row.speed}
    by_name: dict[str, list[TuneRow]] = {}
    for row in mine:
        if row.speed:
            by_name.setdefault(row.name, []).append(row)
    found = [
        Choice(config_of(taken[0]), _mean(row.speed or 0.0 for row in taken), tuple(taken))
        for taken in by_name.values()
        if len(taken) == len(cases)
    ]
    return sorted(found, key=lambda choice: -choice.speed)


def _mean(speeds: Iterable[float]) -> float:
    logarithms = [math.log(speed) for speed in speeds]
    return math.exp(sum(logarithms) / len(logarithms))


def paste(kind: str, choice: Choice, arch: str, head_dim: int, where: str) -> str:
    """The line for the table of configs, its figures in the note."""
    built = [row.built for row in choice.rows if row.built.registers is not None]
    registers = max((one.registers or 0 for one in built), default=0)
    shared = max((one.shared_bytes or 0 for one in built), default=0) / 1e3
    size = f"{registers} regs, {shared:.0f} KB; " if built else ""
    times = ", ".join(f"{row.case} {row.median_ms:.3g} ms" for row in choice.rows)
    return table_line(arch, kind, head_dim, choice.config, f"{size}{times} ({where})")


def summary(
    rows: Sequence[TuneRow], kinds: Sequence[str], arch: str, head_dim: int, where: str
) -> list[str]:
    """What was found, in lines: speeds, what is wrong, lines for the table."""
    chosen = best(rows, kinds)
    lines = [line for kind in kinds for line in _speeds(rows, kind, chosen.get(kind))]
    lines += [line for row in rows if (line := _target(row, chosen))]
    lines += _gluon(rows)
    lines += _steps(rows)
    lines += _absent(rows)
    lines += [f"WRONG {row.case}: {row.name}: {row.note}" for row in rows if row.wrong]
    lines += [paste(kind, choice, arch, head_dim, where) for kind, choice in chosen.items()]
    return lines


def _speeds(rows: Sequence[TuneRow], kind: str, choice: Choice | None) -> list[str]:
    """How fast the best config of a kind is, and a faster one that other masks do not allow."""
    holds = any(row.frozen and row.speed for row in rows if row.kind == kind)
    other = "the frozen config" if holds else "the fastest: the frozen config does not hold"
    lines = []
    if choice is not None:
        lines.append(f"{kind}: {label(choice.config)} is {choice.speed:.3f} x {other}")
    free = fastest(rows, kind)
    if free is not None and (choice is None or free.config != choice.config):
        lines.append(
            f"{kind}: {label(free.config)} is {free.speed:.3f} x {other}, but other masks have "
            f"another {FOLDED[base_of(kind)]}"
        )
    return lines


def _target(row: TuneRow, chosen: Mapping[str, Choice]) -> str:
    """Against the target: the best forward of a case, the whole backward with the best."""
    if row.speed_over_cudnn is None:
        return ""
    of_best = row.kind in chosen and row in chosen[row.kind].rows
    if not (of_best or row.name == BEST_SET):
        return ""
    target = TARGETS["fwd" if of_best else "bwd"]
    return f"{row.case}: {row.speed_over_cudnn:.3f} x cuDNN's speed (target {target:.2f})"


def _gluon(rows: Sequence[TuneRow]) -> list[str]:
    """The fastest forward in Gluon of every mask."""
    mine = sorted((row for row in rows if row.kind == GLUON_KIND and row.speed), key=_slowness)
    first = {row.case.partition(" ")[2]: row for row in reversed(mine)}
    return [
        f"{row.case}: {row.name} is {row.speed:.3f} x the frozen config"
        + (f", {row.speed_over_cudnn:.3f} x cuDNN's speed" if row.speed_over_cudnn else "")
        for row in first.values()
    ]


def _slowness(row: TuneRow) -> float:
    return -(row.speed or 0.0)


def _absent(rows: Sequence[TuneRow]) -> list[str]:
    """Why other implementations have no times."""
    notes = [f"{row.name}: {row.note}" for row in rows if row.config is None and row.note]
    return list(dict.fromkeys(notes))


def _steps(rows: Sequence[TuneRow]) -> list[str]:
    """What carrying the state costs: the same step, config by config."""
    mine = [row for row in rows if row.kind and not row.decides and row.median_ms]
    cases = list(dict.fromkeys(row.case for row in mine))
    if len(cases) != 2:
        return []
    ms = {(row.case, row.name): row.median_ms or 0.0 for row in mine}
    return [
        f"{cases[1]}: {ms[cases[1], name] / ms[cases[0], name]:.3f} x the time alone ({name})"
        for name in dict.fromkeys(row.name for row in mine)
        if all((case, name) in ms for case in cases)
    ]


def table(rows: Sequence[TuneRow], title: str) -> Table:
    """Of every case the frozen config, the fastest ones and the others; all are in the JSON."""
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    names = ("case", "config", "ms", "p20-p80", "TFLOP/s", "x frozen", "x cuDNN", "regs", "spill",
             "KB", "bits")  # fmt: skip
    for name in names:
        found.add_column(name, justify="left" if name in names[:2] else "right", no_wrap=True)
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        timed = sorted((row for row in mine if row.median_ms), key=lambda row: row.median_ms or 0.0)
        ours = [row for row in timed if row.config is not None]
        shown = [row for row in timed if row.config is None or row.frozen or row in ours[:SHOWN]]
        for index, row in enumerate(shown):
            found.add_row("" if index else case, *_texts(row))
        left = len(mine) - len(shown)
        if left:
            found.add_row("" if shown else case, f"and {left} more: {_reasons(mine)}")
        found.add_section()
    return found


def _texts(row: TuneRow) -> list[str]:
    def number(x: float | None, form: str) -> str:
        return "" if x is None else format(x, form)

    built = row.built
    name = f"{row.name} (frozen)" if row.frozen else row.name
    kilobytes = None if built.shared_bytes is None else built.shared_bytes / 1e3
    return [
        name, number(row.median_ms, ".4g"), f"{row.p20_ms:.4g}-{row.p80_ms:.4g}",
        number(row.tflops, ".0f"), number(row.speed, ".3f"), number(row.speed_over_cudnn, ".3f"),
        number(built.registers, "d"), number(built.spill_bytes, "d"), number(kilobytes, ".0f"),
        "" if row.same_bits is None else "same" if row.same_bits else "other",
    ]  # fmt: skip


def _reasons(rows: Sequence[TuneRow]) -> str:
    """How many rows have no time."""
    failed = sum(bool(row.note) for row in rows)
    return f"{failed} without a time" if failed else "slower"
