"""The picture of a ring: what each rank keeps, and whose keys and values it has in each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ring_attn.core import program as ops
from ring_attn.core.program import Program
from ring_attn.plots.style import SMALL, best_text, figure_of, new_axes, owner_colour, settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_RANKS = 8


def owners_by_step(programs: Sequence[Program]) -> list[list[int]]:
    """Return, by step and rank, the rank whose keys and values are used: the hops are followed.

    Args:
        programs: the forward of every rank, of the strategy `ring`.

    Raises:
        ValueError: programs of another strategy, which send to all ranks at once.
    """
    hops = [
        [op.route for op in program.ops if isinstance(op, ops.Post)] for program in programs
    ]
    owners = [list(range(len(programs)))]
    for step in range(max(map(len, hops), default=0)):
        now, routes = owners[-1], [of_rank[step] for of_rank in hops if step < len(of_rank)]
        if len(routes) != len(programs):
            raise ValueError(
                "the ranks' programs have different numbers of hops: draw a ring without a window"
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
        from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

        def box(x: float, y: float, text: str, fill: str, *, filled: bool) -> None:
            style = {"facecolor": fill if filled else "none", "edgecolor": fill, "linewidth": 1.6}
            shape = "round,pad=0,rounding_size=0.08"
            axes.add_patch(FancyBboxPatch((x - 0.36, y - 0.2), 0.72, 0.4, shape, **style))
            ink = best_text(fill) if filled else colours.text
            axes.text(x, y + 0.015, text, ha="center", va="center", color=ink)

        def arrow(start: tuple[float, float], stop: tuple[float, float], bend: float = 0) -> None:
            axes.add_patch(
                FancyArrowPatch(
                    start, stop, arrowstyle="-|>", mutation_scale=9, linewidth=1.1,
                    color=colours.muted, shrinkA=0, shrinkB=0, connectionstyle=f"arc3,rad={bend}",
                )
            )  # fmt: skip

        axes = new_axes(1.6 + 0.55 * len(owners))
        axes.set(xlim=(-1.15, size - 0.5), ylim=(len(owners) + 1.25, -0.55))
        axes.set_axis_off()
        for rank in range(size):
            axes.text(rank, -0.3, f"rank {rank}", ha="center", va="center", weight="bold")
            box(rank, 0.2, f"Q{rank}", owner_colour(rank), filled=False)
        axes.text(-1.1, 0.2, "keeps", va="center")
        for step, of_rank in enumerate(owners):
            y = step + 1.0
            axes.text(-1.1, y, f"step {step}", va="center")
            for rank, owner in enumerate(of_rank):
                box(rank, y, f"K{owner} V{owner}", owner_colour(owner), filled=True)
                if step + 1 < len(owners):
                    to = owners[step + 1].index(owner)
                    if to > rank:
                        arrow((rank + 0.1, y + 0.23), (to - 0.1, y + 0.77))
                    else:
                        arrow((rank + 0.38, y + 0.1), (rank + 0.5, y + 0.45))
                        arrow((to - 0.5, y + 0.55), (to - 0.38, y + 0.9))
        axes.text(
            -1.1, len(owners) + 0.75,
            "Each rank computes attention of its Q with the K and V\n"
            "that it has, while it sends them to the next rank.",
            va="center", size=SMALL, color=colours.muted,
        )  # fmt: skip
    return figure_of(axes)
