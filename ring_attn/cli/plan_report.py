"""Tables of `ring-attn plan` for the terminal, and its pictures as a file.

mask        a cell for each pair of ranks (queries down, keys across): the step that computes
            the pair, and whether the mask cuts it; empty if the mask hides it
timeline    for each of up to 8 ranks its compute, and below its exchanges, over time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from ring_attn.cli.arguments import new_table
from ring_attn.core.program import CHANNELS
from ring_attn.core.work import pair_work
from ring_attn.machines.timeline import Phase, Simulation, Span, Timeline
from ring_attn.planning.bounds import call_of, core_of
from ring_attn.planning.choice import Choice, describe, format_bytes, format_seconds
from ring_attn.strategies.registry import code_of

TIMELINE_RANKS = 8

# A table shows this many first steps of a direction, and the last two.
FIRST_STEPS = 8

ABSENT, FULL, CUT = 0, 1, 2

# Where legends stand: below the axes, which hide nothing there.
BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1), "ncols": 6}


@dataclass(frozen=True)
class StepRow:
    """Figures of a step of the best strategy; seconds are the slowest rank's.

    `full`, `cut` and `absent` count ranks: without a mask, with rows that the mask cuts, without
    compute. Areas are the least and most visible pairs of a rank; `bytes_sent` is the most that a
    rank sends. `transfer_s` is the time of the exchanges that the step posts, `wait_s` of its
    waits.
    """

    direction: str
    step: str
    full: int
    cut: int
    absent: int
    least_area: int
    most_area: int
    bytes_sent: int
    compute_s: float
    transfer_s: float
    wait_s: float


def step_rows(direction: str, simulation: Simulation) -> Iterator[StepRow]:
    """The steps of a direction with their times, from a simulation with spans."""
    phases: dict[Phase, list[list[Span]]] = {}
    for index, rank in enumerate(simulation.ranks):
        for span in rank.spans:
            by_rank = phases.setdefault(span.phase, [[] for _ in simulation.ranks])
            by_rank[index].append(span)
    for phase, by_rank in sorted(phases.items()):
        # Several passes over a step's tiles count once.
        areas = [max((span.area for span in spans), default=0) for spans in by_rank]
        edges = [max((span.edge for span in spans), default=0) for spans in by_rank]
        seconds = {
            kind: max(sum(x.stop - x.start for x in spans if x.kind == kind) for spans in by_rank)
            for kind in ("compute", "transfer", "wait")
        }
        yield StepRow(
            direction,
            phase.label,
            full=sum(area > 0 and not edge for area, edge in zip(areas, edges, strict=True)),
            cut=sum(edge > 0 for edge in edges),
            absent=areas.count(0),
            least_area=min(areas),
            most_area=max(areas),
            bytes_sent=max(sum(span.nbytes for span in spans) for spans in by_rank),
            **{f"{kind}_s": most for kind, most in seconds.items()},
        )


def steps_table(choice: Choice, rows: Sequence[StepRow]) -> Table:
    """The steps of the best strategy; of many steps the middle ones are left out."""
    title = f"steps of {choice.best.label} over {choice.best.layout_name} shards"
    numbers = ("full", "cut", "absent", "pairs a rank", "sent", "compute", "transfer", "wait")
    table = new_table(title, ("step",), numbers)
    table.padding = 0  # for 80 columns
    for direction in dict.fromkeys(row.direction for row in rows):
        steps = [row for row in rows if row.direction == direction]
        hidden = range(FIRST_STEPS, len(steps) - 2 if len(steps) > FIRST_STEPS + 3 else 0)
        table.add_section()
        table.add_row(f"[bold]{direction}")
        for index, row in enumerate(steps):
            if index in hidden:
                if index == hidden[0]:
                    table.add_row(f"... {len(hidden)} more")
                continue
            kinds = [str(row.full), str(row.cut), str(row.absent)]
            areas = " .. ".join(f"{x:.3g}" for x in sorted({row.least_area, row.most_area}))
            table.add_row(
                row.step, *([*kinds, areas] if row.most_area else [""] * 4),
                format_bytes(row.bytes_sent),
                *map(format_seconds, (row.compute_s, row.transfer_s, row.wait_s)),
            )  # fmt: skip
    return table


class MaskPicture(NamedTuple):
    """For each pair of ranks, whether and at which step one computes with the other's keys.

    Attributes:
        kind: (n, n) ABSENT, FULL or CUT; queries down, keys across.
        step: (n, n) the step that computes the pair; -1 where absent.
        title: what a row or column stands for: "rank", or a group of ranks.
    """

    kind: Tensor
    step: Tensor
    title: str


def mask_picture(choice: Choice) -> MaskPicture:
    """The picture of the best strategy, by rank, or by group of ranks that exchange heads."""
    best, problem = choice.best, choice.problem
    core = core_of(call_of(problem, best))
    work = pair_work(*core.layouts, problem.mask)
    kind = torch.where(work.area > 0, torch.where(work.edge > 0, CUT, FULL), ABSENT)
    step = code_of(core.strategy).pair_steps(core)
    step[kind == ABSENT] = -1
    degree = best.strategy.ulysses_degree
    title = "rank" if degree == 1 else f"group of {degree} ranks"
    return MaskPicture(kind, step, title)


def shown_ranks(simulation: Simulation) -> list[Timeline]:
    """Up to `TIMELINE_RANKS` evenly spaced ranks, with the first and the last."""
    ranks = simulation.ranks
    count = min(len(ranks), TIMELINE_RANKS)
    return [ranks[i] for i in torch.linspace(0, len(ranks) - 1, count).round().long().tolist()]


def plot(choice: Choice, simulations: Mapping[str, Simulation], path: Path) -> None:
    """Draws the mask, coloured by step and paler where it cuts; and a Gantt chart of some ranks."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(15, 6.5), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(1, 1.4))
    _draw_mask(left, mask_picture(choice))
    _draw_timeline(right, simulations)
    best, problem = f"{choice.best.label}, {choice.best.layout_name}", describe(choice.problem)
    drawn.suptitle(f"{best}: {problem}\n{choice.rates}")
    drawn.savefig(path, dpi=120)


def _draw_mask(axes: Any, picture: MaskPicture) -> None:
    steps = picture.step.float().masked_fill(picture.kind == ABSENT, float("nan"))
    opaque = torch.where(picture.kind == CUT, 0.5, 1.0)
    image = axes.imshow(
        steps.numpy(), alpha=opaque.numpy(), vmin=0, vmax=max(int(picture.step.max()), 1)
    )
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    whole = MaxNLocator(integer=True, min_n_ticks=1)
    axes.figure.colorbar(image, ax=axes, label="step", shrink=0.7, ticks=whole)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    meaning = {"all pairs visible": 1.0, "pale: cut by the mask": 0.5}
    patches = [Patch(color="C0", alpha=x, label=label) for label, x in meaning.items()]
    axes.legend(handles=patches, **BELOW, fontsize=8)
    axes.set(xlabel=f"keys of a {picture.title}", ylabel="queries")
    axes.set_title("computed at which step; empty: hidden by the mask")


def _draw_timeline(axes: Any, simulations: Mapping[str, Simulation]) -> None:
    ranks = [rank.rank for rank in shown_ranks(next(iter(simulations.values())))]
    by_lane: dict[tuple[int, str, str], list[tuple[float, float]]] = {}
    begin = 0.0
    for direction, simulation in simulations.items():
        axes.axvline(1e3 * begin, color="grey", linewidth=0.8)
        axes.annotate(direction, (1e3 * begin, -0.15), fontsize=9)
        for shown in shown_ranks(simulation):
            for span in shown.spans:
                if span.kind != "wait" and span.stop > span.start:
                    channel: str | None = span.channel
                    lane, name = channel or "compute", channel or span.kind
                    bar = 1e3 * (begin + span.start), 1e3 * (span.stop - span.start)
                    by_lane.setdefault((shown.rank, lane, name), []).append(bar)
        begin += simulation.seconds
    used = {lane for _, lane, _ in by_lane}
    lanes = ["compute", *(channel for channel in CHANNELS if channel in used)]
    names = dict.fromkeys(name for _, _, name in by_lane)
    colours = {name: f"C{index}" for index, name in enumerate(("compute", "move", *CHANNELS))}
    height = 0.9 / len(lanes)
    for (rank, lane, name), spans in by_lane.items():
        low = ranks.index(rank) + lanes.index(lane) * height
        # The legend needs one label per name; matplotlib omits labels that begin with "_".
        shown_as = {"move": "move (rows copied or added on the device)"}.get(name, name)
        label = shown_as if names.pop(name, "shown") is None else "_"
        axes.broken_barh(spans, (low, 0.9 * height), facecolors=colours[name], label=label)
    axes.set_yticks([i + 0.45 for i in range(len(ranks))], [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks), -0.6)
    axes.set(xlabel="ms", title="attention, and exchanges in flight")
    axes.legend(**BELOW, fontsize=8)
