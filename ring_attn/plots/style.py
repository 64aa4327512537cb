"""Colours, fonts and files of all pictures.

Colours are told apart by colour-blind readers (after Okabe and Ito), and have a contrast of at
least 3:1 with white and with the dark pages of GitHub and of the site. Texts have the colour of the
theme's text, or that of black and white which is read better.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ring_attn.values.checks import check_one_of
from ring_attn.values.outside import check_matplotlib, picture_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Theme = Literal["light", "dark"]

# Inches and points. A telephone of 360 px shows this width at about its size.
WIDTH, FONT_SIZE, SMALL = 5.0, 11.0, 10.0

BLUE, VERMILLION, GREEN, PURPLE = "#0b74b8", "#d55e00", "#0a8f68", "#b8639a"
OCHRE, SKY, GREY, BROWN = "#a87900", "#3a8fc0", "#7d7d7d", "#94683d"

# Least contrast of text with the page behind it (WCAG, level AA).
LEGIBLE = 4.5

# Of ranks; more ranks begin again, and are told apart by their numbers.
OWNERS = (BLUE, VERMILLION, GREEN, PURPLE, OCHRE, SKY, GREY, BROWN)


class Colours(NamedTuple):
    """Colours of a theme: of text, of less important text, of lines, and behind the picture."""

    text: str
    muted: str
    line: str
    page: str


THEMES: dict[str, Colours] = {
    "light": Colours(text="#1f2328", muted="#59636e", line="#c4ccd4", page="#ffffff"),
    "dark": Colours(text="#e6edf3", muted="#9aa4ae", line="#4a525b", page="#131416"),
}


def owner_colour(rank: int) -> str:
    """Return the colour of a rank, which is that of all that it holds."""
    return OWNERS[rank % len(OWNERS)]


@contextmanager
def settings(theme: str = "light") -> Iterator[Colours]:
    """Make and write pictures with matplotlib's settings for a theme.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: an unknown theme.
    """
    check_matplotlib()
    check_one_of("theme", theme, [*THEMES])
    import matplotlib

    colours = THEMES[theme]
    # The settings of matplotlib have a type with each of their names.
    chosen: Any = {
        "axes.edgecolor": colours.line,
        "axes.facecolor": "none",
        "axes.labelcolor": colours.text,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": FONT_SIZE,
        "figure.facecolor": colours.page,
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": FONT_SIZE,
        "hatch.linewidth": 0.8,
        "savefig.facecolor": "auto",
        "svg.fonttype": "none",
        "svg.hashsalt": "ring_attn",
        "text.color": colours.text,
        "xtick.color": colours.line,
        "xtick.labelcolor": colours.muted,
        "xtick.labelsize": SMALL,
        "ytick.color": colours.line,
        "ytick.labelcolor": colours.muted,
        "ytick.labelsize": SMALL,
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(chosen)
        yield colours


def new_figure(height: float) -> Figure:
    """Return an empty figure of the usual width; its parts are kept from overlapping."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def new_axes(height: float) -> Axes:
    """Return the only axes of a new figure."""
    return new_figure(height).add_subplot()


def figure_of(axes: Axes) -> Figure:
    from matplotlib.figure import Figure

    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure


def best_text(fill: str) -> str:
    """Return black or white, whichever is read better on the colour."""
    return max(("#000000", "#ffffff"), key=lambda text: contrast(text, fill))


def text_like(fill: str, colours: Colours) -> str:
    """Return the colour for text, mixed with that of the theme's text until it is read well."""
    for share in (0.0, 0.15, 0.3, 0.45, 0.6):
        mixed = _mixed(fill, colours.text, share)
        if contrast(mixed, colours.page) >= LEGIBLE:
            return mixed
    return colours.text


def _mixed(one: str, other: str, share: float) -> str:
    levels = (
        round((1 - share) * int(one[at : at + 2], 16) + share * int(other[at : at + 2], 16))
        for at in (1, 3, 5)
    )
    return "#" + "".join(f"{level:02x}" for level in levels)


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, from 1 to 21, as the WCAG define it."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    total = 0.0
    for weight, at in ((0.2126, 1), (0.7152, 3), (0.0722, 5)):
        level = int(colour[at : at + 2], 16) / 255
        linear = level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4
        total += weight * linear
    return total


def save(figure: Figure, path: Path | str, *, transparent: bool = False) -> None:
    """Write a figure of this package as SVG or PNG, by the suffix of the path.

    The same figure gives the same file. The file is whole at any time, even if the process is
    killed.

    Args:
        figure: what a function of `ring_attn.plots` returned.
        path: ends in .svg or .png; its folder must exist.
        transparent: whether the page behind the picture shines through.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: another suffix.
        OSError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> from ring_attn import masks, plots
        >>> figure = plots.mask(masks.causal(8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plots.save(figure, f"{folder}/mask.svg")
        ...     Path(f"{folder}/mask.svg").read_text()[:5]
        '<?xml'
    """
    path = picture_path(path)
    suffix = path.suffix.lower().removeprefix(".")
    metadata = {"Date": None, "Creator": None} if suffix == "svg" else {"Software": None}
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with settings():
        try:
            figure.savefig(part, format=suffix, dpi=200, transparent=transparent, metadata=metadata)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
