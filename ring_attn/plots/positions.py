"""Pictures of positions: which rank holds which, which keys each query sees, and tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ring_attn.core.joint import JointLayout
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask, Slice
from ring_attn.core.tiles import check_fit, pair_tiles
from ring_attn.plots.style import (
    FONT_SIZE,
    SMALL,
    WIDTH,
    Colours,
    best_text,
    figure_of,
    new_axes,
    new_figure,
    owner_colour,
    settings,
    text_like,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]

# Slices of more rows are drawn with straight edges, those of fewer with one stair for each row.
MAX_STAIRS = 64

# More runs would be thinner than a line.
MAX_RUNS = 512

# Of more ranks or steps, only the numbers are shown.
MAX_NAMED = 5

# More ranks have no room in a picture.
MAX_RANKS = 16


def layouts(layouts: Mapping[str, SequenceLayout | JointLayout], *, theme: str = "light") -> Figure:
    """Draw which rank holds which positions, one bar for each layout.

    Args:
        layouts: by their titles. Positions that every rank holds have the colours of all ranks, one
            above another.
        theme: "light" or "dark".

    Raises:
        ImportError: there is no matplotlib.
        ValueError: no layout, more than 16 ranks, or more than 512 runs of positions.

    Example:
        >>> from ring_attn import SequenceLayout, plots
        >>> figure = plots.layouts({"zigzag": SequenceLayout.zigzag(seqlen=64, world_size=4)})
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['0', '1', '2', '3', '3', '2', '1', '0']
    """
    if not layouts:
        raise ValueError("layouts must have at least one layout, got none")
    with settings(theme) as colours:
        figure = new_figure(0.45 + 0.62 * len(layouts))
        parts = figure.subplots(len(layouts), squeeze=False)[:, 0]
        for axes, (title, layout) in zip(parts, layouts.items(), strict=True):
            axes.set_title(title, loc="left", color=colours.text)
            _draw_positions(axes, layout, colours)
        figure.supxlabel("positions, from first to last; numbers are ranks", size=SMALL)
    return figure


def _draw_positions(axes: Axes, layout: SequenceLayout | JointLayout, colours: Colours) -> None:
    axes.set(xlim=(0, max(layout.seqlen, 1)), ylim=(0, 1))
    axes.set_axis_off()
    parts = layout.parts if isinstance(layout, JointLayout) else (layout,)
    at = 0  # first position of the part
    for part in parts:
        if isinstance(part, SequenceLayout):
            for rank, start, stop in owned_runs(part):
                _draw_run(axes, rank, (at + start, at + stop), (0.0, 1.0), colours)
            at += part.seqlen
        else:
            height = 1 / layout.world_size
            for rank in range(layout.world_size if part else 0):
                _draw_run(axes, rank, (at, at + part), (rank * height, height), colours)
            at += part


def _draw_run(
    axes: Axes, rank: int, run: tuple[int, int], band: tuple[float, float], colours: Colours
) -> None:
    """Draw a run of positions; the band is its lower edge and its height."""
    from matplotlib.patches import Rectangle

    start, stop = run
    low, height = band
    fill = owner_colour(rank)
    axes.add_patch(
        Rectangle((start, low), stop - start, height, facecolor=fill, edgecolor=colours.page)
    )
    # A digit needs about a fortieth of the width, and more than half of the height.
    if height > 0.5 and 40 * (stop - start) >= axes.get_xlim()[1]:
        axes.text(
            (start + stop) / 2, 0.47, str(rank), color=best_text(fill), ha="center", va="center"
        )


def owned_runs(layout: SequenceLayout) -> list[tuple[int, int, int]]:
    """Return (rank, start, stop) of all runs of positions, from first to last.

    Raises:
        ValueError: more than 16 ranks, or more than 512 runs.

    Example:
        >>> owned_runs(SequenceLayout.zigzag(seqlen=8, world_size=2))
        [(0, 0, 2), (1, 2, 4), (1, 4, 6), (0, 6, 8)]
    """
    if layout.world_size > MAX_RANKS:
        raise ValueError(
            f"a picture shows at most {MAX_RANKS} ranks, got {layout}; draw a layout of fewer ranks"
        )
    runs = []
    for rank in range(layout.world_size):
        for segment in layout.segments(rank):
            if segment.stride == 1:
                runs.append((rank, segment.start, segment.start + segment.length))
            else:
                starts = range(segment.start, segment.start + segment.length * segment.stride)
                runs += [(rank, start, start + 1) for start in starts[:: segment.stride]]
        if len(runs) > MAX_RUNS:
            raise ValueError(
                f"a picture shows at most {MAX_RUNS} runs of positions, got more in {layout}; draw "
                "a shorter sequence"
            )
    return sorted(runs, key=lambda run: run[1])


def mask(
    mask: Mask, layout: SequenceLayout | None = None, *, title: str = "", theme: str = "light"
) -> Figure:
    """Draw which keys each query sees: a row for each query, a column for each key.

    Args:
        mask: of the whole sequence.
        layout: of the queries, and of the keys if both have the same length; each query then has
            the colour of the rank that holds it.
        title: shown above; "" is the mask's description.
        theme: "light" or "dark".

    Raises:
        ImportError: there is no matplotlib.
        ValueError: the layout has another length, more than 16 ranks or more than 512 runs.

    Example:
        >>> from ring_attn import masks, plots
        >>> plots.mask(masks.chunked(64, 16)).axes[0].get_ylabel()
        'queries'
    """
    with settings(theme) as colours:
        axes = new_axes(0.86 * WIDTH)
        _draw_mask(axes, mask, layout, colours)
        axes.set_title(title or mask.words, loc="left", color=colours.text)
        axes.set(xlabel="keys", ylabel="queries")
        if layout is not None:
            _add_owners(axes, layout, colours)
    return figure_of(axes)


def masks(masks: Mapping[str, Mask], *, theme: str = "light") -> Figure:
    """Draw several masks beside one another, by their titles.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: no mask.

    Example:
        >>> from ring_attn import masks, plots
        >>> figure = plots.masks({"causal": masks.causal(8), "window": masks.window(8, 2)})
        >>> len(figure.axes)
        2
    """
    if not masks:
        raise ValueError("masks must have at least one mask, got none")
    columns = min(len(masks), 3)
    rows = -(-len(masks) // columns)
    with settings(theme) as colours:
        figure = new_figure(0.25 + rows * (WIDTH / columns + 0.18))
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, (title, one) in zip(grid, masks.items(), strict=False):
            _draw_mask(axes, one, None, colours)
            axes.set_title(title, loc="left", color=colours.text, size=SMALL)
        for axes in grid[len(masks) :]:
            axes.set_axis_off()
        figure.supxlabel("keys", size=SMALL)
        figure.supylabel("queries", size=SMALL)
    return figure


def _draw_mask(axes: Axes, mask: Mask, layout: SequenceLayout | None, colours: Colours) -> None:
    if layout is not None and layout.seqlen != mask.seqlen_q:
        raise ValueError(
            f"mask has {mask.seqlen_q} queries, layout {layout} has {layout.seqlen}: give the "
            "layout of the queries"
        )
    _set_square(axes, mask.seqlen_q, mask.seqlen_k, colours)
    runs = [(0, 0, mask.seqlen_q)] if layout is None else owned_runs(layout)
    for rank, start, stop in runs:
        for piece in mask.overlapping(start, stop):
            seen = piece & Slice(start, stop, 0, mask.seqlen_k)
            if seen is not None:
                _add_slice(axes, seen, owner_colour(rank))
    for _, start, _ in runs[1:]:
        axes.axhline(start, color=colours.page, linewidth=0.8)


def _set_square(axes: Axes, rows: int, cols: int, colours: Colours) -> None:
    """Prepare axes with the first query at the top, without ticks, in a thin frame."""
    axes.set(xlim=(0, max(cols, 1)), ylim=(max(rows, 1), 0), xticks=[], yticks=[])
    axes.set_aspect("equal" if rows == cols else "auto")
    for spine in axes.spines.values():
        spine.set(visible=True, color=colours.line)


def _add_slice(axes: Axes, piece: Slice, fill: str) -> None:
    from matplotlib.patches import Polygon

    axes.add_patch(Polygon(outline(piece), closed=True, facecolor=fill, edgecolor="none"))


def outline(piece: Slice) -> list[Point]:
    """Return the corners (key, query) of a slice, one stair a row if it has few rows.

    Example:
        >>> outline(Slice(0, 2, 0, 2, None, 0))
        [(1, 0), (1, 1), (2, 1), (2, 2), (0, 2), (0, 1), (0, 1), (0, 0)]
    """
    left: list[Point] = []
    right: list[Point] = []
    if piece.q_end - piece.q_start <= MAX_STAIRS:
        for query in range(piece.q_start, piece.q_end):
            start, stop = _seen(piece, query)
            left += [(start, query), (start, query + 1)]
            right += [(stop, query), (stop, query + 1)]
        return [*right, *reversed(left)]
    bends = {piece.q_start, piece.q_end - 1}
    if piece.lo is not None:
        bends.add(piece.k_start - piece.lo)
    if piece.hi is not None:
        bends.add(piece.k_end - 1 - piece.hi)
    for query in sorted(bends):
        if piece.q_start <= query < piece.q_end:
            start, stop = _seen(piece, query)
            # The last query's row is drawn to its end, and the others' as the line between them.
            height = piece.q_end if query == piece.q_end - 1 else query
            left.append((start, height))
            right.append((stop, height))
    return [*right, *reversed(left)]


def _seen(piece: Slice, query: int) -> tuple[int, int]:
    """Return the first key that a query sees in the slice, and the key after its last."""
    start = piece.k_start if piece.lo is None else max(piece.k_start, query + piece.lo)
    stop = piece.k_end if piece.hi is None else min(piece.k_end, query + piece.hi + 1)
    return start, stop


def _add_owners(axes: Axes, layout: SequenceLayout, colours: Colours) -> None:
    """Name the rank of each run of queries at the right of the mask."""
    for rank, start, stop in owned_runs(layout):
        if 24 * (stop - start) >= layout.seqlen:
            axes.annotate(
                f"rank {rank}",
                (1, (start + stop) / 2),
                (5, 0),
                size=SMALL,
                xycoords=axes.get_yaxis_transform(),
                textcoords="offset points",
                va="center",
                color=text_like(owner_colour(rank), colours),
                weight="bold",
            )


def tiles(layout: SequenceLayout, mask: Mask, *, theme: str = "light") -> Figure:
    """Draw the tiles of each step of a ring: a row for each rank, a column for each step.

    In step s, rank r computes its queries with the keys of rank r - s, in whose colour the tiles
    are. What is empty is neither computed nor sent.

    Args:
        layout: of queries and keys.
        mask: of the whole sequence.
        theme: "light" or "dark".

    Raises:
        ImportError: there is no matplotlib.
        ValueError: layout and mask have other lengths, or there are more than 16 ranks.

    Example:
        >>> from ring_attn import SequenceLayout, masks, plots
        >>> layout = SequenceLayout.zigzag(seqlen=64, world_size=4)
        >>> len(plots.tiles(layout, masks.causal(64)).axes)
        16
    """
    check_fit(layout, layout, mask)
    size = layout.world_size
    if size > MAX_RANKS:
        raise ValueError(f"a picture shows at most {MAX_RANKS} ranks, got {size}; draw fewer ranks")
    with settings(theme) as colours:
        figure = new_figure(WIDTH + 0.35)
        grid = figure.subplots(size, size, squeeze=False)
        for rank, step in _pairs(size):
            axes = grid[rank, step]
            owner = (rank - step) % size
            rows, cols = layout.shard_len(rank), layout.shard_len(owner)
            _set_square(axes, rows, cols, colours)
            for tile in pair_tiles(layout, layout, mask, rank, owner):
                _add_slice(axes, tile, owner_colour(owner))
            axes.set_box_aspect(1)
            if rank == 0:
                axes.set_title(_short("step", step, size), color=colours.muted)
            if step == 0:
                colour = text_like(owner_colour(rank), colours)
                axes.set_ylabel(_short("rank", rank, size), color=colour)
        if size > MAX_NAMED:
            figure.suptitle("steps", size=FONT_SIZE)
            figure.supylabel("ranks", size=FONT_SIZE)
        figure.supxlabel("colour: the rank whose keys and values are used", size=SMALL)
    return figure


def _pairs(size: int) -> Iterator[tuple[int, int]]:
    return ((rank, step) for rank in range(size) for step in range(size))


def _short(name: str, number: int, count: int) -> str:
    """Return "step 3", or only "3" where there is no room for more."""
    return f"{name} {number}" if count <= MAX_NAMED else str(number)
