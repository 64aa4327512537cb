"""The table of the steps of `ring-attn plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from ring_attn.cli.arguments import new_table
from ring_attn.machines.timeline import Phase, Simulation, Span
from ring_attn.planning.choice import Choice, format_bytes, format_seconds

# A table shows this many first steps of a direction, and the last two.
FIRST_STEPS = 8


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
