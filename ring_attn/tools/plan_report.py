"""Tables and pictures of `ring-attn plan`, in the terminal and by matplotlib.

    mask        a cell for each pair of ranks (queries down, keys across): the step at which it is
                computed, whether the mask cuts it, or nothing
    timeline    for each rank what it computes, and below what it exchanges, over time

Many ranks are drawn as blocks of ranks, and timelines of some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ring_attn.plan import ring_grid
from ring_attn.planning.choice import Choice, format_bytes, format_seconds
from ring_attn.planning.planner import core_of
from ring_attn.planning.schedule import Transfer
from ring_attn.planning.simulate import Simulation
from ring_attn.transport.base import CHANNELS
from ring_attn.work import pair_work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ring_attn.tools.plan import StepRow

# Cells of a side of the mask in the terminal and in a drawing, ranks of a timeline, its columns.
TERMINAL_CELLS, DRAWN_CELLS, TIMELINE_RANKS, COLUMNS = 32, 64, 8, 64

# Steps of a direction that a table shows: so many from the start, and the last two.
FIRST_STEPS = 8

ABSENT, FULL, CUT = 0, 1, 2
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "white")
MARKS = {"compute": "#", "move": "+", "wait": " "}


def strategies_table(choice: Choice) -> Table:
    """The strategies that were simulated, the fastest first."""
    problem = choice.problem
    title = f"strategies, predicted: {choice.describe()}"
    table = Table(box=None, title=title, title_justify="left")
    left = ("", "strategy", "layout")
    right = (
        "steps", "messages", "in node", "between", "forward", "backward", "exposed", "peak",
    )  # fmt: skip
    for name in (*left, *right, "travels", "slowest link"):
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    for candidate in choice.candidates:
        found = candidate.prediction
        if found is None:
            continue
        best = candidate is choice.best
        back = found.backward
        total = found.total
        per_rank = (total.inside_bytes, total.between_bytes)
        table.add_row(
            "*" if best else "", candidate.label, candidate.layout_name,
            str(found.forward.steps), str(total.messages),
            *(format_bytes(n // problem.world_size) for n in per_rank),
            format_seconds(found.forward.seconds),
            "" if back is None else format_seconds(back.seconds),
            format_seconds(total.exposed), format_bytes(candidate.peak_bytes),
            candidate.travels or "", total.slowest_link or "", style="bold green" if best else "",
        )  # fmt: skip
    return table


def steps_table(choice: Choice, rows: Sequence[StepRow]) -> Table:
    """The steps of the best; of many those in the middle are left out."""
    best = choice.best
    title = f"steps of {best.label} over {best.layout_name} shards"
    table = Table(box=None, title=title, title_justify="left")
    for name in (
        "step", "full", "cut", "absent", "pairs a rank", "sent", "compute", "transfer", "wait"
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "step" else "right")
    for direction in dict.fromkeys(row.direction for row in rows):
        mine = [row for row in rows if row.direction == direction]
        shown: list[StepRow | None] = [*mine]
        if len(mine) > FIRST_STEPS + 3:
            shown = [*mine[:FIRST_STEPS], None, *mine[-2:]]
        table.add_section()
        table.add_row(f"[bold]{direction}")
        for row in shown:
            if row is None:
                table.add_row(f"... {len(mine) - FIRST_STEPS - 2} more")
                continue
            computes = row.most_area > 0
            kinds = (row.full, row.cut, row.absent) if computes else 3 * ("",)
            areas = f"{row.least_area:.3g} .. {row.most_area:.3g}" if computes else ""
            table.add_row(
                row.step, *map(str, kinds), areas, format_bytes(row.bytes_sent),
                *(format_seconds(x) for x in (row.compute_s, row.transfer_s, row.wait_s)),
            )  # fmt: skip
    return table


# -- the mask


@dataclass(frozen=True)
class MaskPicture:
    """For each pair of ranks whether and when one computes with the other's keys.

    Attributes:
        kind: (n, n) ABSENT, FULL or CUT; queries down, keys across.
        step: (n, n) at which step; -1 where absent.
        num_steps: of the core.
        title: what a cell is.
    """

    kind: Tensor
    step: Tensor
    num_steps: int
    title: str

    def coarse(self, cells: int) -> MaskPicture:
        """At most so many cells a side; one of unlike ones is CUT, its step that of the middle."""
        count = len(self.kind)
        if count <= cells:
            return self
        size = -(-count // cells)
        bounds = [(a, min(a + size, count)) for a in range(0, count, size)]
        kind, step = torch.empty(2, len(bounds), len(bounds), dtype=torch.int64)
        for i, (a, b) in enumerate(bounds):
            for j, (c, d) in enumerate(bounds):
                kinds, steps = self.kind[a:b, c:d], self.step[a:b, c:d]
                alike = bool((kinds == kinds[0, 0]).all())
                kind[i, j] = kinds[0, 0] if alike else CUT
                middle = int(steps[(b - a) // 2, (d - c) // 2])
                step[i, j] = middle if middle >= 0 else int(steps.max())
        return MaskPicture(kind, step, self.num_steps, f"{self.title}, {size} of them a cell")


def mask_picture(choice: Choice) -> MaskPicture:
    """The picture of the best strategy: between ranks, or between groups that exchange heads."""
    best, problem = choice.best, choice.problem
    _, layouts = core_of(best, problem.spec)
    work = pair_work(*layouts, problem.mask)
    count = layouts[0].world_size
    kind = torch.full((count, count), ABSENT)
    kind[work.area > 0] = FULL
    kind[(work.area > 0) & (work.edge > 0)] = CUT
    step = torch.zeros(count, count, dtype=torch.int64)
    num_steps = 1
    if best.strategy.core == "ring":
        grid = ring_grid(count, best.strategy.inner_degree)
        order = work.displacements(grid)
        num_steps = len(order)
        ranks = torch.arange(count)
        for index, (outer, inner) in enumerate(order):
            source = (ranks // grid.inner - outer) % grid.outer * grid.inner
            step[ranks, source + (ranks % grid.inner - inner) % grid.inner] = index
    step[kind == ABSENT] = -1
    degree = best.strategy.ulysses_degree
    title = "rank" if degree == 1 else f"group of {degree} ranks"
    return MaskPicture(kind, step, num_steps, title)


def mask_text(choice: Choice) -> Text:
    """The mask in characters: the step of a cell, after a backslash where the mask cuts it."""
    picture = mask_picture(choice).coarse(TERMINAL_CELLS)
    scaled = picture.num_steps > len(DIGITS)
    steps = f"steps 0 to {picture.num_steps - 1}" + (" as tenths of them, 0 to 9" if scaled else "")
    text = Text(
        f"mask, queries down, keys across, a cell is a {picture.title}\n"
        f"{steps}; \\ is cut by the mask, . is absent\n"
    )
    for kinds, numbers in zip(picture.kind.tolist(), picture.step.tolist(), strict=True):
        text.append("  ")
        for kind, step in zip(kinds, numbers, strict=True):
            if kind == ABSENT:
                text.append(" .", style="dim")
                continue
            digit = DIGITS[10 * step // picture.num_steps if scaled else step]
            text.append(("\\" if kind == CUT else " ") + digit, style=COLOURS[step % len(COLOURS)])
        text.append("\n")
    return text


# -- the timeline


@dataclass(frozen=True)
class Bar:
    """Something that a rank does: seconds from the start of the call.

    Attributes:
        rank: who does it.
        lane: "compute", or the channel of an exchange.
        kind: "compute", "move", "wait" or "transfer".
        start: its beginning.
        stop: its end.
    """

    rank: int
    lane: str
    kind: str
    start: float
    stop: float


def bars(simulations: Mapping[str, Simulation], ranks: Sequence[int]) -> Iterator[Bar]:
    """The actions of some ranks, forward and then backward."""
    begin = 0.0
    for found in simulations.values():
        for action, span in zip(found.schedule.actions(), found.spans, strict=True):
            lane = action.channel if isinstance(action, Transfer) else "compute"
            for rank in ranks:
                start, stop = float(span.start[rank]), float(span.stop[rank])
                if stop > start:
                    yield Bar(rank, lane, span.kind, begin + start, begin + stop)
        begin += found.seconds


def shown_ranks(world_size: int) -> list[int]:
    """Some ranks at equal distances, the first and the last among them."""
    count = min(world_size, TIMELINE_RANKS)
    return sorted({round(i * (world_size - 1) / max(count - 1, 1)) for i in range(count)})


def timeline_text(simulations: Mapping[str, Simulation]) -> Text:
    """Two lines for each rank: what it computes, and what is under way meanwhile."""
    found = list(simulations.values())
    total = sum(one.seconds for one in found)
    ranks = shown_ranks(found[0].schedule.world_size)
    lines = {(rank, lane): [" "] * COLUMNS for rank in ranks for lane in ("compute", "links")}
    for bar in bars(simulations, ranks):
        if total == 0.0:
            continue
        lane = "compute" if bar.lane == "compute" else "links"
        mark = MARKS.get(bar.kind, "~" if "gradients" in bar.lane else "=")
        first = int(bar.start / total * COLUMNS)
        last = max(first + 1, round(bar.stop / total * COLUMNS))
        for column in range(first, min(last, COLUMNS)):
            if mark != " ":
                lines[bar.rank, lane][column] = mark
    text = Text(
        f"timeline, {format_seconds(total)}, {', then '.join(simulations)}: # attention, "
        "+ packing and adding, = shards, ~ gradients under way\n"
    )
    for (rank, lane), marks in lines.items():
        name = f"rank {rank:>4}" if lane == "compute" else " " * 9
        text.append(f"  {name} ")
        text.append("".join(marks) + "\n", style="green" if lane == "compute" else "yellow")
    return text


# -- drawings


def figure(choice: Choice, simulations: Mapping[str, Simulation]) -> Figure:
    """The mask, coloured by step and hatched where it is cut; and a Gantt chart of some ranks."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(15, 6.5), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(1, 1.4))
    _draw_mask(left, mask_picture(choice).coarse(DRAWN_CELLS))
    _draw_timeline(right, simulations)
    drawn.suptitle(f"{choice.best.label}, {choice.best.layout_name}: {choice.describe()}")
    return drawn


def plot(choice: Choice, simulations: Mapping[str, Simulation], path: Path) -> None:
    """Both pictures as a file, .png or .svg by its name."""
    figure(choice, simulations).savefig(path, dpi=120)


def _draw_mask(axes: Any, picture: MaskPicture) -> None:
    from matplotlib.patches import Rectangle

    steps = picture.step.double().masked_fill(picture.kind == ABSENT, float("nan"))
    image = axes.imshow(steps.tolist(), cmap="viridis", vmin=0, vmax=max(picture.num_steps - 1, 1))
    for row, column in (picture.kind == CUT).nonzero().tolist():
        corner = (column - 0.5, row - 0.5)
        cell = Rectangle(corner, 1, 1, fill=False, hatch="///", edgecolor="white", linewidth=0)
        axes.add_patch(cell)
    axes.figure.colorbar(image, ax=axes, label="step", shrink=0.7)
    axes.set(xlabel=f"keys of a {picture.title}", ylabel="queries")
    axes.set_title("computed at which step; hatched: cut by the mask")


def _draw_timeline(axes: Any, simulations: Mapping[str, Simulation]) -> None:
    found = list(simulations.values())
    ranks = shown_ranks(found[0].schedule.world_size)
    by_lane: dict[tuple[int, str, str], list[tuple[float, float]]] = {}
    for bar in bars(simulations, ranks):
        if bar.kind != "wait":
            spans = by_lane.setdefault((bar.rank, bar.lane, bar.kind), [])
            spans.append((1e3 * bar.start, 1e3 * (bar.stop - bar.start)))
    used = {lane for _, lane, _ in by_lane}
    lanes = ["compute", *(channel for channel in CHANNELS if channel in used)]
    colours = {"compute": "C2", "move": "C8", "shards": "C0", "gradients": "C3"}
    colours |= {"outer": "C9", "outer_gradients": "C6"}
    height = 0.9 / len(lanes)
    labelled: set[str] = set()
    for (rank, lane, kind), spans in by_lane.items():
        name = lane if kind == "transfer" else kind
        low = ranks.index(rank) + lanes.index(lane) * height
        label = None if name in labelled else name
        labelled.add(name)
        axes.broken_barh(spans, (low, 0.9 * height), facecolors=colours[name], label=label)
    begin = 0.0
    for name, one in simulations.items():
        axes.axvline(1e3 * begin, color="grey", linewidth=0.8)
        axes.annotate(name, (1e3 * begin, -0.15), fontsize=9)
        begin += one.seconds
    axes.set_yticks([i + 0.45 for i in range(len(ranks))], [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks), -0.6)
    axes.set(xlabel="ms", title="attention, and exchanges under way")
    axes.legend(loc="upper right", fontsize=8, ncols=len(colours))
