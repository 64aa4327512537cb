"""Pictures of one rank's call: what it does when, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ring_attn.machines.count import Moment
from ring_attn.machines.time import Span, Timeline
from ring_attn.planning.choice import format_bytes, format_seconds
from ring_attn.plots.style import (
    BLUE,
    GREEN,
    GREY,
    OCHRE,
    PURPLE,
    SKY,
    SMALL,
    VERMILLION,
    Colours,
    best_text,
    figure_of,
    new_axes,
    new_figure,
    settings,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

# Names and colours of the kinds of spans, in the order of the legend.
KINDS = {
    "compute": ("compute", BLUE),
    "moves": ("pack, add, round", GREY),
    "transfer": ("on the wire", GREEN),
    "exposed": ("exposed: waits for bytes", VERMILLION),
    "late": ("waits for a late rank", OCHRE),
    "host": ("waits for its host", PURPLE),
}

# Kinds that take a smaller share of the time cannot be seen, and have no entry in the legend.
VISIBLE = 0.01

# Width of a letter, as a share of the narrowest axes.
SHARE_OF_LETTER = 0.028

# Names of lanes, from the top down.
LANES = {
    "device": "device",
    "shards": "wire",
    "gradients": "wire, gradients",
    "outer": "wire, nodes",
    "outer_gradients": "wire, nodes' gradients",
}


def timeline(timelines: Mapping[str, Timeline], *, theme: str = "light") -> Figure:
    """Draw what a rank does when: its device, and its transfers on each channel.

    Args:
        timelines: of one rank, by their titles such as "forward" and "backward", recorded by
            `machines.time.simulate(..., record=True)`.
        theme: "light" or "dark".

    Raises:
        ImportError: there is no matplotlib.
        ValueError: no timeline, or one that was not recorded.
    """
    if not timelines:
        raise ValueError("timelines must have at least one timeline, got none")
    with settings(theme) as colours:
        figure = new_figure(timeline_height(timelines))
        fill_timeline(figure, timelines, colours)
    return figure


def timeline_height(timelines: Mapping[str, Timeline]) -> float:
    legend_rows = -(-len(_visible_kinds(timelines)) // 2)
    lanes = sum(len(_lanes(one)) for one in timelines.values())
    return 0.9 * len(timelines) + 0.4 * lanes + 0.25 * legend_rows


def fill_timeline(figure: FigureBase, timelines: Mapping[str, Timeline], colours: Colours) -> None:
    heights = [0.35 + 0.4 * len(_lanes(one)) for one in timelines.values()]
    parts = figure.subplots(len(timelines), height_ratios=heights, squeeze=False)[:, 0]
    for axes, (title, one) in zip(parts, timelines.items(), strict=True):
        _draw_lanes(axes, recorded(one), _lanes(one), colours)
        seconds, exposed = format_seconds(one.clock), format_seconds(one.exposed)
        words = f"{title}: {seconds}" + (f", {exposed} exposed" if one.exposed else "")
        axes.set_title(words, loc="left", color=colours.text)
    _add_legend(figure, _visible_kinds(timelines))


def _lanes(timeline: Timeline) -> list[str]:
    used = {span.lane for span in recorded(timeline)}
    return [lane for lane in LANES if lane in used] or ["device"]


def _visible_kinds(timelines: Mapping[str, Timeline]) -> set[str]:
    kinds = set()
    for one in timelines.values():
        for kind in KINDS:
            seconds = sum(x.stop - x.start for x in recorded(one) if x.kind == kind)
            if seconds > VISIBLE * one.clock:
                kinds.add(kind)
    return kinds


def recorded(timeline: Timeline) -> list[Span]:
    if timeline.spans is None:
        raise ValueError(
            f"the timeline of rank {timeline.rank} has no spans: simulate with record=True"
        )
    return timeline.spans


def _of(lane: str, spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.lane == lane]


def _draw_lanes(axes: Axes, spans: Sequence[Span], lanes: Sequence[str], colours: Colours) -> None:
    from matplotlib.patches import Rectangle

    total = max((span.stop for span in spans), default=0.0) or 1.0
    scale, unit = (1e3, "ms") if total >= 1e-3 else (1e6, "us")
    axes.set(xlim=(0, total * scale), ylim=(len(lanes), 0))
    axes.set_yticks([row + 0.5 for row in range(len(lanes))], [LANES[lane] for lane in lanes])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(unit, loc="right", labelpad=-2, size=SMALL, color=colours.muted)
    for row, lane in enumerate(lanes):
        for span in _of(lane, spans):
            fill, width = KINDS[span.kind][1], (span.stop - span.start) * scale
            hatch = "////" if span.kind == "exposed" else None
            axes.add_patch(
                Rectangle(
                    (span.start * scale, row + 0.1),
                    width,
                    0.8,
                    facecolor=fill,
                    hatch=hatch,
                    edgecolor=colours.page,
                    linewidth=0.3,
                    label=f"{lane} {span.kind}",
                )
            )
            number = span.step.removeprefix("step ")
            is_wide = width >= (0.005 + SHARE_OF_LETTER * len(number)) * total * scale
            if is_wide and span.kind == "compute":
                middle = (span.start + span.stop) / 2 * scale
                axes.text(
                    middle,
                    row + 0.5,
                    number,
                    ha="center",
                    va="center",
                    size=SMALL,
                    color=best_text(fill),
                    clip_on=True,
                )


def _add_legend(figure: FigureBase, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    shown = [
        Patch(facecolor=fill, label=label, hatch="////" if kind == "exposed" else None)
        for kind, (label, fill) in KINDS.items()
        if kind in kinds
    ]
    figure.legend(
        handles=shown,
        loc="outside lower left",
        ncols=2,
        frameon=False,
        fontsize=SMALL,
        handlelength=1.2,
        columnspacing=1.2,
    )


MEMORY_HEIGHT = 2.9

# Names and colours of what a rank holds, from the bottom up.
HELD = {
    "tensors": ("results and gradients", BLUE),
    "state": ("state of the softmax", SKY),
    "messages": ("sent and received", GREEN),
    "temporary": ("temporary", OCHRE),
}


def memory(moments: Sequence[Moment], *, theme: str = "light") -> Figure:
    """Draw the bytes that a rank holds beyond its inputs, over the ops of its program.

    Args:
        moments: from `machines.count.memory_over`.
        theme: "light" or "dark".

    Raises:
        ImportError: there is no matplotlib.
        ValueError: no moments.
    """
    if not moments:
        raise ValueError("moments must have at least one moment, got none")
    with settings(theme) as colours:
        axes = new_axes(MEMORY_HEIGHT)
        draw_memory(axes, moments, colours)
    return figure_of(axes)


def draw_memory(axes: Axes, moments: Sequence[Moment], colours: Colours) -> None:
    peak = max(moment.peak for moment in moments)
    factor, unit = next(
        (factor, unit)
        for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
        if peak >= factor or factor == 1.0
    )
    layers = held_layers(moments)
    axes.stackplot(
        range(len(moments)),
        [[nbytes / factor for nbytes in layer] for layer in layers.values()],
        colors=[HELD[name][1] for name in layers],
        labels=[HELD[name][0] for name in layers],
        step="mid",
        linewidth=0,
    )
    axes.set(xlim=(-0.5, len(moments) - 0.5), ylim=(0, 1.18 * peak / factor))
    axes.axhline(peak / factor, color=colours.text, linewidth=1, linestyle="--")
    axes.text(
        0.995,
        peak / factor,
        f"peak {format_bytes(peak)} ",
        ha="right",
        va="bottom",
        transform=axes.get_yaxis_transform(),
        size=SMALL,
    )
    axes.set_ylabel(f"{unit} beyond the inputs", size=SMALL)
    first, ticks = 0, []
    for direction, group in groupby(moments, lambda moment: moment.direction):
        count = len(list(group))
        ticks.append((first + (count - 1) / 2, direction))
        if first:
            axes.axvline(first - 0.5, color=colours.muted, linewidth=1)
        first += count
    axes.set_xticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.tick_params(axis="x", length=0)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        ncols=2,
        frameon=False,
        fontsize=SMALL,
        handlelength=1.2,
        columnspacing=1.2,
    )


def held_layers(moments: Sequence[Moment]) -> dict[str, list[int]]:
    """Return the layers of the picture from the bottom up; their sum is each op's peak."""
    return {
        "tensors": [moment.tensors for moment in moments],
        "state": [moment.state for moment in moments],
        "messages": [moment.messages for moment in moments],
        "temporary": [moment.peak - moment.held for moment in moments],
    }
