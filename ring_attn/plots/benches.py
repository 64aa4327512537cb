"""Pictures of measurements: the reports of `ring-attn bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ring_attn.planning.choice import format_seconds
from ring_attn.plots.style import (
    BLUE,
    GREY,
    SMALL,
    new_figure,
    owner_colour,
    settings,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A report or a row of it. Any: JSON has no types.
Json: TypeAlias = Mapping[str, Any]

# What names an implementation in a report, and in a picture.
NAMES = {"ours": "ring_attn", "dense": "dense", "torch-template": "torch template"}

MODES = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward + backward"}


def bench(report: Json, *, theme: str = "light") -> Figure:
    """Draw the results of `ring-attn bench`: times of implementations, or TFLOP/s by length.

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
            "`ring-attn bench ring --json` or `ring-attn bench kernel --json` wrote"
        )
    lengths = {row.get("seqlen") for row in rows}
    if len(lengths) > 1 and all(row.get("rate") for row in rows):
        return _rates(rows, theme)
    return _times(rows, theme)


def measured(report: Json) -> list[Json]:
    """Return the rows of a report that have a time."""
    found = report.get("rows")
    return [
        row
        for row in (found if isinstance(found, list) else [])
        if isinstance(row, Mapping) and {"impl", "mode"} <= {*row} and row.get("median_ms")
    ]


def _times(rows: Sequence[Json], theme: str) -> Figure:
    """Draw a bar for each implementation in each mode, with the spread of the repetitions."""
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in rows)]
    by_mode = {mode: [row for row in rows if row["mode"] == mode] for mode in modes}
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
            axes.set_yticks(range(len(of_mode)), _labels(of_mode))
            axes.set(xlim=(0, 1.25 * most), ylim=(len(of_mode) - 0.4, -0.6))
            axes.tick_params(axis="y", length=0, labelcolor=colours.text)
            axes.tick_params(axis="x", length=3)
            axes.spines["left"].set_visible(False)
            axes.set_title(MODES[mode], loc="left", color=colours.muted, size=SMALL)
        figure.supxlabel("ms: the median, and 20 % to 80 % of the repetitions", size=SMALL)
    return figure


def _labels(rows: Sequence[Json]) -> list[str]:
    """Return the names of rows, with what was measured where a name has several rows."""
    names = [_name(row) for row in rows]
    if len({*names}) == len(names):
        return names
    return [f"{name}, {_case(row)}" for name, row in zip(names, rows, strict=True)]


def _name(row: Json) -> str:
    """Return the name of a row's implementation in pictures."""
    implementation: str = row["impl"]
    return NAMES.get(implementation, implementation)


def _case(row: Json) -> str:
    """Return heads, head dim and mask of a row of `bench kernel`."""
    heads = f"{row.get('heads')}/{row.get('kv_heads')} x {row.get('head_dim')}"
    return f"{heads}, {'causal' if row.get('causal') else 'full'}"


def _rates(rows: Sequence[Json], theme: str) -> Figure:
    """Draw TFLOP/s by length, a line for each implementation, heads and mask."""
    lines: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for row in rows:
        name = _name(row)
        lines.setdefault((row["mode"], name, _case(row)), []).append((row["seqlen"], row["rate"]))
    modes = [mode for mode in MODES if any(key[0] == mode for key in lines)]
    names = list(dict.fromkeys(name for _, name, _ in lines))
    cases = list(dict.fromkeys(case for _, _, case in lines))
    styles = ("-", "--", ":", "-.")
    with settings(theme) as colours:
        figure = new_figure(0.4 + 2.3 * len(modes) + 0.22 * len(names) * len(cases))
        parts = figure.subplots(len(modes), squeeze=False, sharex=True)[:, 0]
        for axes, mode in zip(parts, modes, strict=True):
            for (of_mode, name, case), points in lines.items():
                if of_mode == mode:
                    xs, ys = zip(*sorted(points), strict=True)
                    axes.plot(
                        xs,
                        ys,
                        "o",
                        color=owner_colour(names.index(name)),
                        linestyle=styles[cases.index(case) % len(styles)],
                        markersize=4,
                        label=f"{name}, {case}",
                    )
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.grid(axis="y", color=colours.line, linewidth=0.6)
            axes.set_title(f"{MODES[mode]}, TFLOP/s", loc="left", color=colours.text)
        lengths = sorted({row["seqlen"] for row in rows})
        parts[-1].set_xticks(lengths, [f"{n >> 10}k" if n % 1024 == 0 else str(n) for n in lengths])
        parts[-1].minorticks_off()
        parts[-1].set_xlabel("length of the sequence")
        figure.legend(
            *parts[0].get_legend_handles_labels(),
            loc="outside lower left",
            frameon=False,
            fontsize=SMALL,
            labelcolor=colours.text,
        )
    return figure
