"""Pictures of the site and the README: all are made, shown in both themes, and can be read."""

from __future__ import annotations

import re
import sys
from functools import cache
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from tests import pages
from tests.pages import DOCS

ROOT = DOCS.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {str(page.path.relative_to(DOCS)): page.text for page in pages.pages()}
THEMES = ("light", "dark")
# A picture of a page: alt text, folder and name, theme, class.
PICTURE = re.compile(r"!\[([^\]]*)\]\(([\w/]+)/(\w+)-(\w+)\.svg\)\{\.only-(\w+)\}")
MADE, KEPT = "generated/pictures", "_static"


@cache
def module() -> ModuleType:
    """docs/pictures.py, as the site's settings import it."""
    sys.path.insert(0, str(DOCS))
    try:
        import pictures
    finally:
        sys.path.remove(str(DOCS))
    return pictures


NAMES = [
    "ring",
    "layouts",
    "mask",
    "tiles",
    "masks",
    "strategies",
    "timeline",
    "memory",
    "scaling",
    "plan",
    "bench",
]


@cache
def drawn(name: str) -> Figure:
    figure: Figure = module().PICTURES[name]("light")
    figure.draw_without_rendering()
    return figure


def test_every_picture_is_on_a_page_in_both_themes() -> None:
    assert [*module().PICTURES] == NAMES
    shown = set()
    for name, text in PAGES.items():
        found = PICTURE.findall(text)
        assert len(found) == text.count(".svg)"), name
        assert len(found) % 2 == 0, name
        for light, dark in zip(found[::2], found[1::2], strict=True):
            assert light[:3] == dark[:3], (name, "both variants have the same text and place")
            assert (light[3:], dark[3:]) == tuple((theme, theme) for theme in THEMES), name
            alt, folder, picture = light[:3]
            assert len(alt.split()) >= 10, (name, picture, "the alt text says what it shows")
            assert folder == (KEPT if picture in module().COMMITTED else MADE), (name, picture)
            shown.add(picture)
    assert shown == {*NAMES}


def measures(text: str) -> set[str]:
    """The numbers with a unit of time or memory in a text."""
    return set(re.findall(r"[\d.]+ (?:ms|s|MB|GB)\b", text))


@pytest.mark.parametrize("name", ["strategies", "plan", "bench"])
def test_the_text_of_a_picture_names_figures_that_it_shows(name: str) -> None:
    (alt,) = {
        alt
        for text in PAGES.values()
        for alt, _, picture, *_ in PICTURE.findall(text)
        if picture == name
    }
    words = " ".join(text.get_text() for text, _ in texts(drawn(name)))
    said, shown = measures(alt), measures(words)
    assert said and said <= shown, said - shown
    of_rank = re.search(r"timeline of rank (\d+) with ([\w ]+)", alt)
    assert of_rank is None or f"{of_rank[2]}: timeline of rank {of_rank[1]}" in words


def test_the_readme_shows_the_ring_in_both_themes() -> None:
    for theme in THEMES:
        assert f'"docs/_static/ring-{theme}.svg"' in README
    alt = PICTURE.findall(PAGES["index.md"])[0][0]
    assert f'alt="{alt}"' in README, "the same text as on the site"


@pytest.mark.parametrize("name", ["ring"])
def test_committed_pictures_are_up_to_date(name: str, tmp_path: Path) -> None:
    """After a change run `python docs/pictures.py`."""
    assert {path.stem for path in (DOCS / "_static").glob("*.svg")} == {
        f"{committed}-{theme}" for committed in module().COMMITTED for theme in THEMES
    }
    for path in module().write(name, tmp_path):
        assert path.read_text() == (DOCS / "_static" / path.name).read_text(), path.name


def texts(figure: Figure) -> list[tuple[Text, Bbox]]:
    """The texts of a figure and where they are; of ticks those within the axes."""
    hidden = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        if not (axes.axison and shows(axis, tick.get_loc()))
        for label in (tick.label1, tick.label2)
    }
    found = [text for text in figure.findobj(Text) if isinstance(text, Text)]
    shown = [one for one in found if one.get_visible() and one.get_text() and one not in hidden]
    return [(text, text.get_window_extent()) for text in shown]


def shows(axis: Axis, place: float) -> bool:
    first, last = sorted(axis.get_view_interval())
    return bool(first <= place <= last)


def inner(box: Bbox) -> Bbox:
    """A text's box without the room above and below its letters."""
    width, height = 0.03 * box.width, 0.15 * box.height
    return Bbox.from_extents(box.x0 + width, box.y0 + height, box.x1 - width, box.y1 - height)


def unreadable(figure: Figure) -> list[str]:
    """What is too small on a telephone, cut off, or covered by another text."""
    page = figure.bbox.padded(0.5)
    found = texts(figure)
    # Of 360 px a page has about 330 for a picture.
    on_telephone = 330 / (72 * figure.get_figwidth())
    wrong = [f"small: {t.get_text()}" for t, _ in found if t.get_fontsize() * on_telephone < 9]
    wrong += [
        f"cut off: {text.get_text()}"
        for text, box in found
        if not (page.contains(*box.min) and page.contains(*box.max))
    ]
    for (one, box), (other, another) in combinations(found, 2):
        if inner(box).overlaps(inner(another)):
            wrong.append(f"overlap: {one.get_text()} and {other.get_text()}")
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_pictures_can_be_read(name: str) -> None:
    assert unreadable(drawn(name)) == []


def test_what_cannot_be_read_is_found() -> None:
    figure = Figure(figsize=(5, 2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.text(0.1, 0.9, "tiny", size=5)
    axes.text(0.9, 0.5, "too long for the page", size=11)
    axes.text(0.2, 0.2, "one", size=11)
    axes.text(0.21, 0.2, "two", size=11)
    figure.draw_without_rendering()
    assert unreadable(figure) == [
        "small: tiny",
        "cut off: too long for the page",
        "overlap: one and two",
    ]
