"""Pictures of measurements: the reports of `ring-attn bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ring_attn.planning.choice import format_seconds
from ring_attn.plots.style import (
    BLUE,
    GREY,
    SMALL,
    new_figure,
    owner_colour,
    settings,
)
from ring_attn.values.outside import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A report, or a row of it.
Row: TypeAlias = Mapping[str, Json]

# What names an implementation in a report, and in a picture.
NAMES = {"ours": "ring_attn", "dense": "dense", "torch-template": "torch template"}

MODES = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward + backward"}

# Sizes along the axis of lines, and their names, the first that has several values.
SIZES = {
    "nbytes": "bytes of a message",
    "seqlen": "length of the sequence",
    "batch": "sequences",
    "world_size": "ranks",
}

# Rates, the first that all rows have, and their units; "rate" is of older reports.
RATES = {"tflops": "TFLOP/s", "rate": "TFLOP/s", "gbps": "GB/s"}

# Entries that tell rows of one implementation apart, beside its mode and size.
CASES = (
    "strategy",
    "heads",
    "head_dim",
    "head_dim_v",
    "mask",
    "causal",
    "layout",
    "pages",
    "queries",
    "dtype",
    *SIZES,
)

# Lines of an implementation are told apart by their style, and beyond that by their markers.
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "x")

# The most bars of a picture: of more rows the first ones are drawn.
MAX_BARS = 60


class Line(NamedTuple):
    """What a line shows: a mode, an implementation, and what tells it apart from others."""

    mode: str
    name: str
    case: str


def bench(report: Row, *, theme: str = "light") -> Figure:
    """Draw the results of `ring-attn bench`: times of implementations, or rates by size.

    Rates are drawn if the rows have several lengths, messages, batches or numbers of ranks.

    Args:
        report: the content of a file of `--json`, or of a file in `bench/results`.
        theme: "light" or "dark".

    Raises:
        ImportError: there is no matplotlib.
        ValueError: the report has no rows of measured times.

    Example:
        >>> from ring_attn import plots
        >>> rows = [{"impl": "ours", "mode": "fwd", "median_ms": 2.0, "p20_ms": 1.9, "p80_ms": 2.2}]
        >>> [text.get_text() for text in plots.bench({"rows": rows}).axes[0].texts]
        ['2 ms']
    """
    rows = measured(report)
    if not rows:
        raise ValueError(
            "the report has no rows with impl, mode and median_ms: pass the content of a file that "
            "`ring-attn bench ring --json` or another benchmark wrote"
        )
    size = next((name for name in SIZES if _has_several(rows, name)), None)
    rate = next((name for name in RATES if all(row.get(name) for row in rows)), None)
    if size is not None and rate is not None:
        return _rates(rows, size, rate, theme)
    return _times(rows[:MAX_BARS], theme)


def measured(report: Row) -> list[Row]:
    """Return the rows of a report that have a time."""
    found = report.get("rows")
    return [
        row
        for row in (found if isinstance(found, list) else [])
        if isinstance(row, Mapping) and {"impl", "mode"} <= {*row} and row.get("median_ms")
    ]


def _has_several(rows: Sequence[Row], name: str) -> bool:
    """Return whether an entry has several values; "-" stands for none."""
    return len({str(row[name]) for row in rows if row.get(name) not in (None, "-")}) > 1


def _follows(rows: Sequence[Row], name: str, size: str) -> bool:
    """Return whether an entry follows from the size, as the batch does from the length."""
    pairs = {(row[size], str(row.get(name))) for row in rows}
    return len(pairs) == len({row[size] for row in rows})


def _modes(rows: Sequence[Row]) -> dict[str, str]:
    """Return the titles of the modes of the rows; operations are their own titles."""
    present = dict.fromkeys(row["mode"] for row in rows)
    known = {mode: title for mode, title in MODES.items() if mode in present}
    others = {mode: mode for mode in present if mode not in MODES}
    return {**known, **others}


def _times(rows: Sequence[Row], theme: str) -> Figure:
    """Draw a bar for each implementation in each mode, with the spread of the repetitions."""
    modes = _modes(rows)
    by_mode = {mode: [row for row in rows if row["mode"] == mode] for mode in modes}
    differing = [name for name in CASES if _has_several(rows, name)]
    with settings(theme) as colours:
        counts = [len(of_mode) for of_mode in by_mode.values()]
        figure = new_figure(0.5 + 0.35 * len(counts) + 0.36 * sum(counts))
        parts = figure.subplots(len(counts), squeeze=False, sharex=True, height_ratios=counts)
        most = max(row.get("p80_ms") or row["median_ms"] for row in rows)
        for axes, (mode, of_mode) in zip(parts[:, 0], by_mode.items(), strict=True):
            medians = [row["median_ms"] for row in of_mode]
            spread = [
                [row["median_ms"] - (row.get("p20_ms") or row["median_ms"]) for row in of_mode],
                [(row.get("p80_ms") or row["median_ms"]) - row["median_ms"] for row in of_mode],
            ]
            fills = [BLUE if row["impl"] == "ours" else GREY for row in of_mode]
            axes.barh(
                range(len(of_mode)),
                medians,
                xerr=spread,
                color=fills,
                height=0.7,
                ecolor=colours.text,
                capsize=2.5,
            )
            for place, row in enumerate(of_mode):
                right = row.get("p80_ms") or row["median_ms"]
                text = format_seconds(1e-3 * row["median_ms"])
                axes.annotate(text, (right, place), (5, 0), textcoords="offset points", va="center")
            labels = [_label(row, differing) for row in of_mode]
            axes.set_yticks(range(len(of_mode)), labels)
            axes.set(xlim=(0, 1.25 * most), ylim=(len(of_mode) - 0.4, -0.6))
            axes.tick_params(axis="y", length=0, labelcolor=colours.text)
            axes.tick_params(axis="x", length=3)
            axes.spines["left"].set_visible(False)
            axes.set_title(modes[mode], loc="left", color=colours.muted, size=SMALL)
        figure.supxlabel("ms: the median, and 20 % to 80 % of the repetitions", size=SMALL)
    return figure


def _label(row: Row, differing: Sequence[str]) -> str:
    """Return the name of a row, with what tells it apart."""
    name, case = _name(row), _case(row, differing)
    return f"{name}, {case}" if case else name


def _name(row: Row) -> str:
    """Return the name of a row's implementation in pictures."""
    implementation: str = row["impl"]
    return NAMES.get(implementation, implementation)


def _case(row: Row, differing: Sequence[str]) -> str:
    """Return the values of entries in which rows differ: "ring, 8/2 x 64, causal, 4k"."""
    words = []
    if {"heads", "head_dim", "head_dim_v"} & {*differing}:
        words.append(_heads(row))
    for name in differing:
        value = row.get(name)
        if name == "causal":
            words.append("causal" if value else "full")
        elif name == "world_size":
            words.append("1 rank" if value == 1 else f"{value} ranks")
        elif name == "batch":
            words.append(f"batch {value}")
        elif name == "queries":
            words.append("1 query" if value == 1 else f"{value} queries")
        elif name == "pages":
            words.append(f"pages of {value}" if value else "no pages")
        elif isinstance(value, int):
            if name not in ("heads", "head_dim", "head_dim_v"):
                words.append(_short(value))
        elif value not in (None, "-"):
            words.append(str(value))
    return ", ".join(words)


def _heads(row: Row) -> str:
    """Return heads, kv heads and head dims of a row: "32/8 x 128"."""
    dims = str(row.get("head_dim"))
    if row.get("head_dim_v", row.get("head_dim")) != row.get("head_dim"):
        dims = f"{dims}/{row['head_dim_v']}"
    return f"{row.get('heads')}/{row.get('kv_heads')} x {dims}"


def _short(size: int) -> str:
    """Return a size with a suffix: 8192 -> "8k"."""
    for suffix, shift in (("G", 30), ("M", 20), ("k", 10)):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift}{suffix}"
    return str(size)


def _rates(rows: Sequence[Row], size: str, rate: str, theme: str) -> Figure:
    """Draw a rate by size, a line for each implementation and case."""
    differing = [
        name
        for name in CASES
        if name != size and _has_several(rows, name) and not _follows(rows, name, size)
    ]
    is_known = "heads" in rows[0] and not {"heads", "head_dim", "head_dim_v"} & {*differing}
    heads = _heads(rows[0]) if is_known else ""
    lines: dict[Line, list[tuple[int, float]]] = {}
    for row in rows:
        name = _name(row)
        line = Line(row["mode"], name, _case(row, differing))
        lines.setdefault(line, []).append((row[size], row[rate]))
    modes = _modes(rows)
    names = list(dict.fromkeys(line.name for line in lines))
    # A case has the same style for every implementation, which its colour shows.
    cases = list(dict.fromkeys(line.case for line in lines))
    unit = RATES[rate]
    with settings(theme) as colours:
        labels = {f"{line.name}, {line.case}" if line.case else line.name for line in lines}
        figure = new_figure(0.4 + 2.3 * len(modes) + 0.22 * len(labels))
        parts = figure.subplots(len(modes), squeeze=False, sharex=True)[:, 0]
        for axes, (mode, title) in zip(parts, modes.items(), strict=True):
            for line, points in lines.items():
                if line.mode == mode:
                    xs, ys = zip(*sorted(points), strict=True)
                    place = cases.index(line.case)
                    axes.plot(
                        xs,
                        ys,
                        color=owner_colour(names.index(line.name) if len(names) > 1 else place),
                        linestyle=STYLES[place % len(STYLES)],
                        marker=MARKERS[place // len(STYLES) % len(MARKERS)],
                        markersize=4,
                        label=f"{line.name}, {line.case}" if line.case else line.name,
                    )
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.grid(axis="y", color=colours.line, linewidth=0.6)
            axes.set_title(f"{title}, {unit}", loc="left", color=colours.text)
        sizes = sorted({row[size] for row in rows})
        parts[-1].set_xticks(sizes, [_short(each) for each in sizes])
        parts[-1].minorticks_off()
        parts[-1].set_xlabel(f"{SIZES[size]} ({heads})" if heads else SIZES[size])
        figure.legend(
            *parts[0].get_legend_handles_labels(),
            loc="outside lower left",
            frameon=False,
            fontsize=SMALL,
            labelcolor=colours.text,
        )
    return figure
