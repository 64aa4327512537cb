"""Pictures show the data that they are given: areas, widths, colours and numbers, not pixels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle

import ring_attn
from ring_attn import JointLayout, SequenceLayout, masks, plots
from ring_attn.bench import comm
from ring_attn.cli import main as cli
from ring_attn.core.mask import Mask, Slice
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import pair_tiles
from ring_attn.machines.count import memory_over, peak_bytes
from ring_attn.machines.time import Timeline, simulate
from ring_attn.planning.choice import Choice
from ring_attn.planning.devices import builtin_cluster
from ring_attn.plots import plans, positions, rings, runs, style
from ring_attn.strategies.registry import both_programs, programs_of
from ring_attn.values import outside
from tests.integration.commands import options_of
from tests.refusals import refused
from tests.unit.test_programs import calls_of

MASKS = {
    "causal": masks.causal(48),
    "full": Mask(48, 48),
    "window": masks.window(48, 10),
    "documents": masks.documents([0, 12, 32, 48], causal=True),
    "spans": masks.spans(48, [(8, 20), (30, 40)]),
    "sink_window": masks.sink_window(48, 4, 8),
}
ZIGZAG = SequenceLayout.zigzag(48, 4)
STRATEGIES = {
    "ring": Strategy(),
    "double_ring": Strategy(inner_degree=2),
    "all_gather": Strategy("all_gather"),
    "exchange": Strategy("exchange"),
    "ulysses": Strategy(ulysses_degree=4),
    "hybrid": Strategy(ulysses_degree=2),
}
H100 = builtin_cluster("H100", node_size=2)


def area(polygon: Polygon) -> float:
    """The area of a polygon, by the shoelace formula."""
    corners = polygon.get_xy()
    return abs(sum(x * v - u * y for (x, y), (u, v) in pairwise(corners))) / 2


def areas(axes: Axes) -> dict[str, float]:
    """The areas of an axes' polygons by colour."""
    found: dict[str, float] = defaultdict(float)
    for patch in axes.patches:
        assert isinstance(patch, Polygon)
        found[to_hex(patch.get_facecolor())] += area(patch)
    return found


def owners(sizes: Sequence[float]) -> dict[str, float]:
    return {style.owner_colour(rank): size for rank, size in enumerate(sizes) if size}


# -- positions


def test_layouts_show_which_rank_holds_which_positions() -> None:
    named = {
        "zigzag": SequenceLayout.zigzag(50, 4),
        "striped": SequenceLayout.striped(50, 4),
        "cut": SequenceLayout.boundaries([0, 7, 7, 50]),
        "joint": JointLayout([4, SequenceLayout.zigzag(40, 4), 6]),
    }
    for axes, layout in zip(plots.layouts(named).axes, named.values(), strict=True):
        held: dict[str, set[int]] = defaultdict(set)
        for bar in axes.patches:
            assert isinstance(bar, Rectangle)
            start = int(bar.get_x())
            held[to_hex(bar.get_facecolor())] |= {*range(start, start + int(bar.get_width()))}
        expected = [{*layout.position_ids(rank).tolist()} for rank in range(layout.world_size)]
        assert held == {style.owner_colour(r): x for r, x in enumerate(expected) if x}


@pytest.mark.parametrize("name", list(MASKS))
def test_a_mask_shows_its_pairs(name: str) -> None:
    mask = MASKS[name]
    (axes,) = plots.mask(mask).axes
    assert areas(axes) == owners([mask.area])


@pytest.mark.parametrize("layout", [ZIGZAG, SequenceLayout.striped(48, 4)])
def test_the_pairs_of_a_mask_have_their_ranks_colours(layout: SequenceLayout) -> None:
    for mask in MASKS.values():
        (axes,) = plots.mask(mask, layout).axes
        assert areas(axes) == owners(layout.mask_area(mask))
    names = [text.get_text() for text in axes.texts]
    assert names == [f"rank {r}" for r, a, b in positions.owned_runs(layout) if b - a > 1]


@pytest.mark.parametrize(
    "piece",
    [
        Slice(0, 1000, 0, 1000, None, 0),
        Slice(100, 1000, 50, 900, -300, 20),
        Slice(0, 1000, 0, 500, None, -100),
    ],
)
def test_slices_of_many_rows_have_straight_edges(piece: Slice) -> None:
    """An edge leaves out at most half a pair of each row and bend."""
    seen = piece.trimmed
    assert seen is not None
    mask = Mask.of(1000, 1000, [seen])
    corners = positions.outline(seen)
    assert len(corners) <= 8
    assert abs(area(Polygon(corners)) - mask.area) <= 1000


@pytest.mark.parametrize("name", list(MASKS))
def test_tiles_of_each_step(name: str) -> None:
    mask = MASKS[name]
    grid = plots.tiles(ZIGZAG, mask).axes
    for number, axes in enumerate(grid):
        rank, step = divmod(number, 4)
        owner = (rank - step) % 4
        found = pair_tiles(ZIGZAG, ZIGZAG, mask, rank, owner)
        expected = sum(tile.area for tile in found)
        assert areas(axes) == ({style.owner_colour(owner): expected} if expected else {})
    assert sum(sum(areas(axes).values()) for axes in grid) == mask.area


def test_positions_that_cannot_be_drawn_are_refused() -> None:
    with refused(ValueError, "at least one layout"):
        plots.layouts({})
    with refused(ValueError, "at least one mask"):
        plots.masks({})
    with refused(ValueError, "16|fewer ranks"):
        plots.layouts({"many": SequenceLayout.zigzag(64, 17)})
    with refused(ValueError, "512|shorter"):
        plots.mask(masks.causal(1024), SequenceLayout.striped(1024, 4))
    with refused(ValueError, "48 queries|12"):
        plots.mask(masks.causal(48), SequenceLayout.zigzag(12, 4))
    with refused(ValueError, "16|got 17"):
        plots.tiles(SequenceLayout.zigzag(68, 17), masks.causal(68))
    with refused(ValueError, "theme|sepia"):
        plots.mask(masks.causal(8), theme="sepia")


# -- programs


def programs(strategy: Strategy, mask: Mask | None = None) -> Any:
    calls = calls_of(strategy, mask or masks.causal(48), "zigzag", 4)
    return programs_of(calls, backward=False)


def test_a_ring_shows_whose_keys_each_rank_has() -> None:
    expected = [[(rank - step) % 4 for rank in range(4)] for step in range(4)]
    assert rings.owners_by_step(programs(Strategy())) == expected
    (axes,) = plots.ring(programs(Strategy())).axes
    boxes = [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    filled = [to_hex(box.get_facecolor()) for box in boxes[4:]]
    assert filled == [style.owner_colour(owner) for step in expected for owner in step]
    texts = [text.get_text() for text in axes.texts]
    assert [t for t in texts if t[0] == "K"] == [f"K{o} V{o}" for step in expected for o in step]


def test_what_is_no_ring_is_refused() -> None:
    with refused(ValueError, "programs of a ring"):
        plots.ring(programs(Strategy("all_gather")))
    with refused(ValueError, "2 to 8 ranks|1 programs"):
        plots.ring(programs(Strategy())[:1])
    with refused(ValueError, "different numbers of hops"):
        plots.ring([*programs(Strategy())[:3], *programs(Strategy(), masks.window(48, 5))[3:]])


def recorded(
    strategy: Strategy, *, backward: bool, layout: str = "zigzag", seqlen: int = 48
) -> tuple[Timeline, ...]:
    calls = calls_of(strategy, masks.causal(seqlen), layout, 4)
    found = programs_of(calls, backward=backward)
    simulation = simulate(found, calls[0], H100, record=True)
    plain = simulate(found, calls[0], H100)
    assert simulation.seconds == plain.seconds and plain.ranks[0].spans is None
    return simulation.ranks


def seconds(timeline: Timeline, kind: str) -> float:
    return sum(span.stop - span.start for span in runs.recorded(timeline) if span.kind == kind)


WAYS = {"host": "idle", **{way: way for way in ("compute", "moves", "late", "exposed")}}


@pytest.mark.parametrize(("layout", "seqlen"), [("zigzag", 48), ("contiguous", 1 << 16)])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_spans_add_up_to_the_predicted_seconds(
    name: str, backward: bool, layout: str, seqlen: int
) -> None:
    """Of long contiguous shards ranks are late, and messages slow down compute."""
    for timeline in recorded(STRATEGIES[name], backward=backward, layout=layout, seqlen=seqlen):
        for kind, field in WAYS.items():
            assert seconds(timeline, kind) == pytest.approx(getattr(timeline, field), abs=1e-12)
        spans = [span for span in runs.recorded(timeline) if span.lane == "device"]
        for before, after in pairwise(spans):
            assert after.start == pytest.approx(before.stop, abs=1e-12), "no gaps, no overlaps"
        assert spans[-1].stop == pytest.approx(timeline.clock)
        transfers = [span for span in runs.recorded(timeline) if span.kind == "transfer"]
        assert len(transfers) == timeline.messages


def test_a_timeline_shows_its_spans() -> None:
    titles = ("forward", "backward")
    timelines = {title: recorded(Strategy(), backward=title == "backward")[3] for title in titles}
    figure = plots.timeline(timelines)
    for axes, (title, timeline) in zip(figure.axes, timelines.items(), strict=True):
        assert axes.get_title(loc="left").startswith(f"{title}: ")
        drawn: dict[str, float] = defaultdict(float)
        for bar in axes.patches:
            assert isinstance(bar, Rectangle)
            kind = str(bar.get_label()).split()[-1]
            drawn[kind] += bar.get_width()
            assert to_hex(bar.get_facecolor()) == runs.KINDS[kind][1]
        scale = 1e3 if timeline.clock >= 1e-3 else 1e6
        for kind, width in drawn.items():
            assert width == pytest.approx(scale * seconds(timeline, kind))
        lanes = [label.get_text() for label in axes.get_yticklabels()]
        assert lanes == ["device", "wire", "wire, gradients"][: len(lanes)]
    assert len(figure.axes) == 2 and len(figure.legends) == 1


def test_timelines_without_spans_are_refused() -> None:
    with refused(ValueError, "rank 2|record=True"):
        plots.timeline({"forward": Timeline(2)})
    with refused(ValueError, "at least one timeline"):
        plots.timeline({})


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_memory_over_a_call_has_the_peak_that_is_predicted(name: str) -> None:
    for call in calls_of(STRATEGIES[name], masks.causal(48), "zigzag", 4):
        both = both_programs(call, backward=True)
        moments = memory_over(both, call)
        assert max(moment.peak for moment in moments) == peak_bytes(both, call)
        assert all(min(moment[2:5]) >= 0 and moment.peak >= moment.held for moment in moments)
        assert {moment.direction for moment in moments} == {"forward", "backward"}
    layers = runs.held_layers(moments)
    assert [*map(sum, zip(*layers.values(), strict=True))] == [moment.peak for moment in moments]


def test_memory_shows_its_layers() -> None:
    call = calls_of(Strategy(), masks.causal(48), "zigzag", 4)[0]
    moments = memory_over(both_programs(call, backward=True), call)
    (axes,) = plots.memory(moments).axes
    peak = max(moment.peak for moment in moments)
    tops = [layer.get_paths()[0].get_extents().y1 for layer in axes.collections]
    assert len(tops) == len(runs.HELD) and max(tops) == pytest.approx(peak / 1e3)
    assert axes.get_ylabel().startswith("kB")
    with refused(ValueError, "at least one moment"):
        plots.memory([])


# -- plans


@cache
def planned(world_size: int = 4, seqlen: int = 8192) -> Choice:
    return ring_attn.explain(
        seqlen=seqlen,
        world_size=world_size,
        nheads=8,
        nheads_kv=4,
        headdim=64,
        causal=True,
        layout="zigzag",
        cluster=H100,
    )


def test_strategies_have_their_predicted_times() -> None:
    choice = planned()
    (axes,) = plots.strategies(choice).axes
    shown = plans.simulated(choice)
    assert shown[0] is choice.best
    widths = [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]
    assert widths == pytest.approx([1e3 * candidate.seconds for candidate in shown])
    colours = [to_hex(bar.get_facecolor()) for bar in axes.patches]
    assert colours == [style.BLUE] + [style.GREY] * (len(shown) - 1)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"{candidate.full_name}, zigzag" for candidate in shown]


def test_a_plan_shows_the_best_strategys_own_figures() -> None:
    choice = planned()
    prediction = choice.best.prediction
    assert prediction is not None and prediction.backward is not None
    for rank in range(4):
        timelines = plots.timelines_of(choice, rank)
        assert timelines["forward"].clock <= prediction.forward.seconds
        assert timelines["backward"].clock <= prediction.backward.seconds
    peaks = [max(x.peak for x in plots.moments_of(choice, rank)) for rank in range(4)]
    assert max(peaks) == choice.best.peak_bytes
    headings = [part.get_suptitle() for part in plots.plan(choice).subfigs]
    assert headings[1:] == [
        f"{choice.best.full_name}: {what} of rank 0" for what in ("timeline", "memory")
    ]
    with refused(ValueError, "no timeline of its own|0, 1, 2, 3"):
        plots.timelines_of(choice, 4)
    with refused(ValueError, "rank must be in|4"):
        plots.moments_of(choice, 4)


@pytest.mark.parametrize("value", ["seconds", "bytes_sent", "peak_bytes", "efficiency"])
def test_scaling_shows_the_best_of_each_name(value: Any) -> None:
    choices = [planned(2), planned(4)]
    (axes,) = plots.scaling(choices, value).axes
    lines = {str(line.get_label()): line for line in axes.lines}
    assert {*lines} == {c.name for one in choices for c in one.candidates if c.prediction}
    for name, line in lines.items():
        for x, y in line.get_xydata():
            (choice,) = (one for one in choices if one.problem.world_size == x)
            of_name = [c for c in choice.candidates if c.name == name and c.prediction]
            fastest = min(of_name, key=lambda c: c.seconds)
            assert y == plans.value_of(fastest, value)
    assert {text.get_text() for text in axes.texts} == {*lines}


def test_scaling_has_one_axis() -> None:
    (axes,) = plots.scaling([planned(), planned(seqlen=16384)]).axes
    assert axes.get_xlabel() == "length of the sequence"
    with refused(ValueError, "several world sizes or several lengths"):
        plots.scaling([planned()])
    with refused(ValueError, "several world sizes or several lengths"):
        plots.scaling([planned(2), planned(seqlen=16384)])


# -- measurements


def row(impl: str, mode: str, ms: float | None, **more: Any) -> dict[str, Any]:
    spread = {} if ms is None else {"p20_ms": 0.9 * ms, "p80_ms": 1.2 * ms}
    return {"impl": impl, "mode": mode, "median_ms": ms, **spread, **more}


def test_a_bench_shows_its_times() -> None:
    rows = [row("ours", "fwd", 2.0), row("dense", "fwd", 3.0), row("ours", "bwd", 5.0)]
    figure = plots.bench({"rows": [*rows, row("torch-template", "fwd", None)]})
    forward, backward = figure.axes
    for axes, times in ((forward, [2.0, 3.0]), (backward, [5.0])):
        bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert [bar.get_width() for bar in bars] == times
        assert to_hex(bars[0].get_facecolor()) == style.BLUE
    assert [label.get_text() for label in forward.get_yticklabels()] == ["ring_attn", "dense"]
    for report in (
        {},
        {"rows": 3},
        {"rows": [{"impl": "ours"}]},
        {"rows": [row("a", "fwd", None)]},
    ):
        with refused(ValueError, "no rows|--json"):
            plots.bench(report)


def test_a_bench_of_lengths_shows_its_rates() -> None:
    rows = [
        row(impl, "fwd", 1.0, seqlen=n, rate=n / 8, causal=causal, heads=8, kv_heads=2, head_dim=64)
        for impl in ("ours", "torch-flash")
        for causal in (True, False)
        for n in (1024, 2048)
    ]
    (axes,) = plots.bench({"rows": rows}).axes
    assert [str(line.get_label()) for line in axes.lines] == [
        f"{name}, {mask}" for name in ("ring_attn", "torch-flash") for mask in ("causal", "full")
    ]
    assert all(line.get_ydata().tolist() == [128.0, 256.0] for line in axes.lines)
    assert axes.get_xlabel() == "length of the sequence (8/2 x 64)"
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines}
    assert len(looks) == len(axes.lines)
    # A case has one style, also if an implementation lacks the case before.
    some = [one for one in rows if one["impl"] == "ours" or not one["causal"]]
    lines = plots.bench({"rows": some}).axes[0].lines
    styles = {str(line.get_label()): line.get_linestyle() for line in lines}
    assert styles["torch-flash, full"] == styles["ring_attn, full"] != styles["ring_attn, causal"]
    # The batch follows from the length, and makes no further lines; that of others does.
    for one in rows:
        one["batch"] = 4096 // one["seqlen"]
    assert len(plots.bench({"rows": rows}).axes[0].lines) == 4
    (axes,) = plots.bench({"rows": [*rows, {**rows[0], "batch": 64}]}).axes
    assert "ring_attn, causal, batch 64" in [line.get_label() for line in axes.lines]
    messages = [
        row("gloo", op, 1.0, nbytes=n, gbps=n / 4.0) for op in ("hop", "all_gather") for n in (4, 8)
    ]
    parts = plots.bench({"rows": messages}).axes
    assert [axes.get_title(loc="left") for axes in parts] == ["hop, GB/s", "all_gather, GB/s"]
    assert parts[1].get_xlabel() == "bytes of a message"
    of_one = plots.bench({"rows": [one for one in rows if one["seqlen"] == 1024]}).axes[0]
    assert len({label.get_text() for label in of_one.get_yticklabels()}) == 4


# -- colours and files


@pytest.mark.parametrize("theme", list(style.THEMES))
def test_colours_are_seen_on_the_page(theme: str) -> None:
    """By WCAG 2.1: 3:1 for shapes, 4.5:1 for text; also on GitHub's dark page."""
    colours = style.THEMES[theme]
    pages = [colours.page] + (["#0d1117"] if theme == "dark" else [])
    for page in pages:
        for fill in style.OWNERS:
            assert style.contrast(fill, page) >= 3.0, fill
            assert style.contrast(style.best_text(fill), fill) >= 4.5, fill
            assert style.contrast(style.text_like(fill, colours), page) >= 4.5, fill
        assert min(style.contrast(ink, page) for ink in colours[:2]) >= 4.5
    assert style.contrast("#ffffff", "#000000") == pytest.approx(21)


def test_ticks_keep_the_theme_when_the_figure_is_written(tmp_path: Path) -> None:
    figure = plots.strategies(planned(), theme="dark")
    plots.save(figure, tmp_path / "dark.svg")
    (axes,) = figure.axes
    assert {label.get_color() for label in axes.get_xticklabels()} == {style.THEMES["dark"].muted}


def test_files_are_deterministic(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.PNG", "b.PNG"):
        plots.save(plots.mask(MASKS["causal"], ZIGZAG), tmp_path / name)
    for suffix, start in (("svg", b"<?xml"), ("PNG", b"\x89PNG")):
        content, again = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in "ab")
        assert content == again and content.startswith(start)
    text = (tmp_path / "a.svg").read_text()
    assert "dc:date" not in text and "Matplotlib" not in text and ">rank 3</text>" in text
    assert len([*tmp_path.iterdir()]) == 4


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "find_spec", lambda name: None)


def test_pictures_that_cannot_be_written_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure: Figure = plots.mask(MASKS["causal"])
    for name in ("mask.pdf", "mask", "svg"):
        with refused(ValueError, f".svg or .png|{name}"):
            plots.save(figure, tmp_path / name)
    with pytest.raises(OSError, match="missing"):
        plots.save(figure, tmp_path / "missing" / "mask.svg")
    without_matplotlib(monkeypatch)
    calls: list[Callable[[], object]] = [
        lambda: plots.save(figure, tmp_path / "mask.svg"),
        lambda: plots.mask(MASKS["causal"]),
        lambda: plots.bench({"rows": [row("ours", "fwd", 1.0)]}),
        lambda: plots.strategies(planned()),
    ]
    for call in calls:
        with refused(ImportError, "matplotlib|ring-attn[plot]"):
            call()
    assert not [*tmp_path.iterdir()]


PLAN = ["plan", "--seqlen", "8k", "--world-size", "4", "--heads", "8", "--cluster", "h100"]


def test_plan_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.svg"
    assert cli.main([*PLAN, "--quiet", "--plot", str(path)]) == 0
    best = capsys.readouterr().out.partition(":")[0]
    text = path.read_text()
    assert f">{best}: timeline of rank 0</text>" in text and "peak" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plot", "{folder}/plan.pdf"], ".svg or .png|plan.pdf|--help"),
        (["--plot", "{folder}/missing/plan.svg"], "plan.svg|existing folder"),
        (["--plot", "{folder}/plan.svg", "--world-size", "512"], "--plot|256|512"),
        (
            [
                *("--plot", "{folder}/plan.svg", "--quick", "--world-size", "128"),
                *("--strategy", "ring", "--layout", "zigzag", "--seqlen", "128k"),
            ],
            "128|without --quick",
        ),
    ],
)
def test_a_plan_that_cannot_be_drawn_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    files = [*words, "--json", "{folder}/plan.json"]
    assert status_of([*PLAN, *(word.format(folder=tmp_path) for word in files)]) == 2
    found = capsys.readouterr()
    assert all(word in found.err for word in said.split("|")), found.err
    assert found.err.count("\n") == 1 and not found.out and not [*tmp_path.iterdir()]


def status_of(words: list[str]) -> object:
    try:
        return cli.main(words)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("command", ["plan", "bench ring", "bench kernel", "bench comm"])
def test_commands_without_matplotlib_refuse_to_draw(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    without_matplotlib(monkeypatch)
    words = PLAN if command == "plan" else command.split()
    assert status_of([*words, "--plot", str(tmp_path / "picture.svg")]) == 2
    assert "pip install 'ring-attn[plot]'" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_report_draws_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting = comm.setting_of(options_of("bench comm", "--op hop --size 64"))
    report = comm.CommBench(setting)
    report.draw(None)
    (row,) = comm.planned(setting)
    report.rows = [row.without_time("cannot run: no memory")]
    report.draw(tmp_path / "comm.svg")
    assert "nothing was measured" in capsys.readouterr().out and not [*tmp_path.iterdir()]
    report.rows.append(row.timed([1.0, 2.0, 3.0]))
    report.draw(tmp_path / "comm.svg")
    assert ">2 ms</text>" in (tmp_path / "comm.svg").read_text()
