"""The picture of a ring: what each rank keeps, and whose keys and values it has in each step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ring_attn.core import program as ops
from ring_attn.core.program import Program
from ring_attn.plots.style import (
    SMALL,
    Colours,
    best_text,
    figure_of,
    new_axes,
    owner_colour,
    settings,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]

MAX_RANKS = 8

# Where the labels of rows begin.
LEFT = -1.1


def owners_by_step(programs: Sequence[Program]) -> list[list[int]]:
    """Return, by step and rank, the rank whose keys and values are used: the hops are followed.

    Args:
        programs: the forward of every rank, of the strategy `ring`.

    Raises:
        ValueError: programs of another strategy, which send to all ranks at once.
    """
    hops = [[op.route for op in program.ops if isinstance(op, ops.Post)] for program in programs]
    owners = [list(range(len(programs)))]
    for step in range(max(map(len, hops), default=0)):
        now, routes = owners[-1], [of_rank[step] for of_rank in hops if step < len(of_rank)]
        if len(routes) != len(programs):
            raise ValueError(
                "the programs have different numbers of hops: pass those of all ranks of a call"
            )
        sources = [route.recv_from for route in routes if isinstance(route, ops.Hop)]
        if len(sources) != len(programs):
            raise ValueError("the programs send to all ranks at once: give programs of a ring")
        owners.append([now[source] for source in sources])
    return owners


def ring(programs: Sequence[Program], *, theme: str = "light") -> Figure:
    """Draw a ring: every rank keeps its queries, while keys and values go around.

    Args:
        programs: the forward of every rank, of the strategy `ring`, for at most 8 ranks.
        theme: "light" or "dark".

    Raises:
        ImportError: there is no matplotlib.
        ValueError: more ranks, or programs of another strategy.
    """
    size = len(programs)
    if not 2 <= size <= MAX_RANKS:
        raise ValueError(f"a picture shows a ring of 2 to {MAX_RANKS} ranks, got {size} programs")
    owners = owners_by_step(programs)
    with settings(theme) as colours:
        axes = new_axes(1.6 + 0.55 * len(owners))
        axes.set(xlim=(-1.15, size - 0.5), ylim=(len(owners) + 1.25, -0.55))
        axes.set_axis_off()
        axes.text(LEFT, 0.2, "keeps", va="center")
        for rank in range(size):
            axes.text(rank, -0.3, f"rank {rank}", ha="center", va="center", weight="bold")
            _add_box(axes, (rank, 0.2), f"Q{rank}", rank, colours, filled=False)
        for step, of_rank in enumerate(owners):
            axes.text(LEFT, step + 1, f"step {step}", va="center")
            for rank, owner in enumerate(of_rank):
                _add_box(axes, (rank, step + 1), f"K{owner} V{owner}", owner, colours, filled=True)
        for step, (before, after) in enumerate(pairwise(owners)):
            for rank, owner in enumerate(before):
                _add_hop(axes, step + 1, rank, after.index(owner), colours)
        text = (
            "Each rank computes attention of its Q with the K and V\n"
            "that it has, while it sends them to the next rank."
        )
        below = len(owners) + 0.75
        axes.text(LEFT, below, text, va="center", size=SMALL, color=colours.muted)
    return figure_of(axes)


def _add_box(
    axes: Axes, middle: Point, text: str, owner: int, colours: Colours, *, filled: bool
) -> None:
    """Add a box with a text in the colour of a rank."""
    from matplotlib.patches import FancyBboxPatch

    x, y = middle
    fill = owner_colour(owner)
    axes.add_patch(
        FancyBboxPatch(
            (x - 0.36, y - 0.2),
            width=0.72,
            height=0.4,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=fill if filled else "none",
            edgecolor=fill,
            linewidth=1.6,
        )
    )
    ink = best_text(fill) if filled else colours.text
    axes.text(x, y + 0.015, text, ha="center", va="center", color=ink)


def _add_hop(axes: Axes, row: float, sender: int, receiver: int, colours: Colours) -> None:
    """Add the arrow of a hop; one that closes the ring leaves at the right side."""
    if receiver > sender:
        _add_arrow(axes, (sender + 0.1, row + 0.23), (receiver - 0.1, row + 0.77), colours)
    else:
        _add_arrow(axes, (sender + 0.38, row + 0.1), (sender + 0.5, row + 0.45), colours)
        _add_arrow(axes, (receiver - 0.5, row + 0.55), (receiver - 0.38, row + 0.9), colours)


def _add_arrow(axes: Axes, start: Point, stop: Point, colours: Colours) -> None:
    from matplotlib.patches import FancyArrowPatch

    axes.add_patch(
        FancyArrowPatch(
            start,
            stop,
            arrowstyle="-|>",
            mutation_scale=9,
            linewidth=1.1,
            color=colours.muted,
            shrinkA=0,
            shrinkB=0,
        )
    )
