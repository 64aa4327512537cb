"""Pictures of plans: the time of each strategy, and how it grows with ranks or lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from ring_attn.machines.count import Moment
from ring_attn.machines.time import Timeline
from ring_attn.planning.calls import call_of
from ring_attn.planning.choice import Candidate, Choice, format_bytes, format_seconds
from ring_attn.planning.memory import moments_of_rank
from ring_attn.planning.scale import MAX_EXACT, estimates_of
from ring_attn.plots.runs import MEMORY_HEIGHT, draw_memory, fill_timeline, timeline_height
from ring_attn.plots.style import (
    BLUE,
    FONT_SIZE,
    GREY,
    SMALL,
    Colours,
    figure_of,
    new_axes,
    new_figure,
    owner_colour,
    settings,
    text_like,
)
from ring_attn.values.checks import check_one_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = Literal["seconds", "bytes_sent", "peak_bytes", "efficiency"]

VALUES: dict[str, tuple[str, Callable[[float], str]]] = {
    "seconds": ("seconds of a call", format_seconds),
    "bytes_sent": ("bytes that a rank sends", lambda nbytes: format_bytes(int(nbytes))),
    "peak_bytes": ("peak bytes beyond the inputs", lambda nbytes: format_bytes(int(nbytes))),
    "efficiency": ("share of the time in attention", lambda share: f"{share:.0%}"),
}


def timelines_of(choice: Choice, rank: int = 0) -> dict[str, Timeline]:
    """Return the predicted timelines of a rank with the best strategy, for `timeline`.

    Raises:
        ValueError: the rank's time is not simulated by itself, as where a few ranks stand for many.
    """
    found = {}
    for backward in choice.problem.directions:
        ranks = estimates_of(choice.problem, choice.best).timelines(backward=backward)
        of_rank = next((one for one in ranks if one.rank == rank), None)
        if of_rank is None:
            walked = ", ".join(str(one.rank) for one in ranks)
            raise ValueError(f"rank {rank} has no timeline of its own; give one of {walked}")
        found["backward" if backward else "forward"] = of_rank
    return found


def moments_of(choice: Choice, rank: int = 0) -> list[Moment]:
    """Return what a rank holds during a call with the best strategy, for `memory`.

    Raises:
        ValueError: there is no such rank.
    """
    if not 0 <= rank < choice.problem.world_size:
        raise ValueError(f"rank must be in [0, {choice.problem.world_size}), got {rank}")
    call = replace(call_of(choice.problem, choice.best), rank=rank)
    problem = choice.problem
    return moments_of_rank(call, backward=problem.backward, replicated=problem.replicated)


def strategies(choice: Choice, *, theme: str = "light") -> Figure:
    """Draw the predicted time of every strategy that was simulated, the best one first.

    Args:
        choice: from `ring_attn.explain`.
        theme: "light" or "dark".

    Raises:
        ImportError: there is no matplotlib.
    """
    with settings(theme) as colours:
        axes = new_axes(_strategies_height(choice))
        _draw_strategies(axes, choice, colours)
    return figure_of(axes)


def _strategies_height(choice: Choice) -> float:
    return 0.7 + 0.34 * len(simulated(choice))


def simulated(choice: Choice) -> list[Candidate]:
    """Return the candidates with a prediction: the fastest of each name, in the choice's order."""
    fastest: dict[str, Candidate] = {}
    for candidate in choice.candidates:
        if candidate.prediction is not None:
            fastest.setdefault(candidate.full_name, candidate)
    return [*fastest.values()]


def _draw_strategies(axes: Axes, choice: Choice, colours: Colours) -> None:
    shown = simulated(choice)
    seconds = [one.seconds for one in shown]
    scale, unit = (1e3, "ms") if max(seconds) < 1.0 else (1.0, "s")
    fills = [BLUE if one is choice.best else GREY for one in shown]
    bars = axes.barh(range(len(shown)), [scale * s for s in seconds], color=fills, height=0.72)
    axes.bar_label(bars, [format_seconds(s) for s in seconds], padding=4, color=colours.text)
    names = [f"{one.full_name}, {one.layout_name}" for one in shown]
    axes.set_yticks(range(len(shown)), names)
    axes.set(xlim=(0, 1.45 * scale * max(seconds)), ylim=(len(shown) - 0.4, -0.6))
    axes.set_xlabel(f"{unit}, predicted", size=SMALL)
    axes.tick_params(axis="y", length=0, labelcolor=colours.text)
    axes.spines["left"].set_visible(False)


def plan(choice: Choice, *, theme: str = "light") -> Figure:
    """Draw a plan: the time of every strategy, then the best one's timeline and memory on rank 0.

    Args:
        choice: from `ring_attn.explain`, for at most 256 ranks.
        theme: "light" or "dark".

    Raises:
        ImportError: there is no matplotlib.
        ValueError: more ranks.
    """
    if choice.problem.world_size > MAX_EXACT:
        raise ValueError(
            f"a picture of a plan shows at most {MAX_EXACT} ranks, got "
            f"{choice.problem.world_size}: the timelines of more are not simulated"
        )
    timelines, moments = timelines_of(choice), moments_of(choice)
    heights = [_strategies_height(choice) + 0.3, timeline_height(timelines) + 0.4, MEMORY_HEIGHT]
    with settings(theme) as colours:
        figure = new_figure(sum(heights))
        # The parameters of matplotlib have different types.
        heading: dict[str, Any] = {"weight": "bold", "size": FONT_SIZE, "x": 0.01, "ha": "left"}
        first, second, third = figure.subfigures(3, 1, squeeze=False, height_ratios=heights)[:, 0]
        first.suptitle("time of a call", **heading)
        _draw_strategies(first.add_subplot(), choice, colours)
        second.suptitle(f"{choice.best.full_name}: timeline of rank 0", **heading)
        fill_timeline(second, timelines, colours)
        third.suptitle(f"{choice.best.full_name}: memory of rank 0", **heading)
        draw_memory(third.add_subplot(), moments, colours)
    return figure


def scaling(choices: Sequence[Choice], value: Value = "seconds", *, theme: str = "light") -> Figure:
    """Draw how the costs of strategies grow with the ranks, or with the length.

    Args:
        choices: of one call at several world sizes, or at several lengths.
        value: "seconds", "bytes_sent", "peak_bytes", or "efficiency": the busiest rank's time in
            attention, divided by the time of the call.
        theme: "light" or "dark".

    Raises:
        ImportError: there is no matplotlib.
        ValueError: fewer than two choices, an unknown value, or world sizes and lengths that both
            differ.
    """
    check_one_of("value", value, get_args(Value))
    by, ticks = _axis(choices)
    lines = scaling_lines(choices, value)
    with settings(theme) as colours:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        axes = new_axes(3.6)
        for number, (name, points) in enumerate(lines.items()):
            xs, ys = zip(*points, strict=True)
            colour = owner_colour(number)
            axes.plot(xs, ys, "o-", color=colour, linewidth=2, markersize=4.5, label=name)
        axes.set_xscale("log", base=2)
        if value != "efficiency":
            axes.set_yscale("log", base=2)
        else:
            axes.set_ylim(0, 1.05)
        label, form = VALUES[value]
        axes.set_xticks(ticks, [_count(x) for x in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: form(y)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="y", color=colours.line, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlim(ticks[0] / 1.15, ticks[-1] * 1.15)
        axes.set_xlabel(by)
        axes.set_title(label, loc="left", color=colours.text)
        _label_lines(axes, lines, colours)
    return figure_of(axes)


def scaling_lines(choices: Sequence[Choice], value: Value) -> dict[str, list[tuple[int, float]]]:
    """Return the points (ranks or length, value) of each strategy's name, with its best degree."""
    by_ranks = len({choice.problem.world_size for choice in choices}) > 1
    lines: dict[str, list[tuple[int, float]]] = {}
    for choice in choices:
        problem = choice.problem
        x = problem.world_size if by_ranks else problem.mask.seqlen_q
        seen = set()
        for candidate in sorted(choice.candidates, key=lambda one: one.seconds):
            if candidate.prediction is not None and candidate.name not in seen:
                seen.add(candidate.name)
                lines.setdefault(candidate.name, []).append((x, value_of(candidate, value)))
    return {name: sorted(points) for name, points in lines.items()}


def value_of(candidate: Candidate, value: Value) -> float:
    assert candidate.prediction is not None, "only simulated candidates have values"
    total = candidate.prediction.total
    if value == "efficiency":
        return total.compute / total.seconds
    if value == "peak_bytes":
        return float(candidate.peak_bytes)
    return float(getattr(total, value))


def _axis(choices: Sequence[Choice]) -> tuple[str, list[int]]:
    """Return the name and the values of what differs between the choices."""
    sizes = sorted({choice.problem.world_size for choice in choices})
    lengths = sorted({choice.problem.mask.seqlen_q for choice in choices})
    if (len(sizes) > 1) == (len(lengths) > 1):
        raise ValueError(
            f"choices must have several world sizes or several lengths, got world sizes {sizes} "
            f"and lengths {lengths}"
        )
    return ("ranks", sizes) if len(sizes) > 1 else ("length of the sequence", lengths)


def _count(number: int) -> str:
    for factor, suffix in ((1 << 20, "M"), (1 << 10, "k")):
        if number >= factor and number % factor == 0:
            return f"{number // factor}{suffix}"
    return str(number)


def _label_lines(axes: Axes, lines: dict[str, list[tuple[int, float]]], colours: Colours) -> None:
    """Name each line at its last point, one name above the other where points are near."""
    transform = axes.transData
    bottom, top = (axes.transAxes.transform((0, y))[1] for y in (0, 1))
    room = (top - bottom) / 14
    ends = sorted((transform.transform(points[-1])[1], name) for name, points in lines.items())
    fills = {name: owner_colour(number) for number, name in enumerate(lines)}
    free = bottom
    for y, name in ends:
        at = max(y, free)
        free = at + room
        axes.annotate(
            name,
            (1.0, (at - bottom) / (top - bottom)),
            (4, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            size=SMALL,
            weight="bold",
            color=text_like(fills[name], colours),
        )
