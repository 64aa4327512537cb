"""`bench.tune`: what is searched, checked, timed and recommended, on a CPU."""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.bench.implementations import Attention, Problem
from ring_attn.bench.judge import Judge
from ring_attn.cli import main
from ring_attn.kernels.configs import INTERPRETER, Config
from ring_attn.tools import launches, tune, tune_report
from ring_attn.tools.launches import Bed, Built, Case, Kernels, Task, build, frozen_of, thirds
from ring_attn.tools.tune import Race, Tuning, bits_of
from ring_attn.tools.tune_report import BEST_SET, FROZEN_SET, TuneRow, best, fastest
from ring_attn.tools.workers import NO_TIME

CPU = torch.device("cpu")
TINY = "--device cpu --heads 2/1 --head-dim 16 --full-rows 97 --causal-rows 63 --jobs 0"

SMALL, NO_TILE = Config(32, 32, 4, 1), Config(48, 64, 4, 1)


def setting(words: str) -> tune.Setting:
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    return tune.setting_of(parser.parse_args(words.split()))


def tuning(words: str, *space: Config, json: Path | None = None) -> Tuning:
    """A run over these configs and the interpreter's own, which is the frozen one."""
    return Tuning(setting(words), "again", json, lambda *kind: (INTERPRETER, *space))


def problem(causal: bool, seqlen: int = 97) -> Problem:
    return Problem(1, seqlen, 2, 1, 16, causal, torch.float32, CPU)


def row(case: str, kind: str, config: Config, speed: float | None, **others: Any) -> TuneRow:
    return TuneRow(
        case, kind, launches.label(config), asdict(config), decides=True, speed=speed,
        median_ms=None if speed is None else 2.0 / speed, **others,
    )  # fmt: skip


# -- launches


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_our_kernels_are_an_attention(causal: bool) -> None:
    one = problem(causal)
    frozen = frozen_of(one)
    chosen = {"fwd": SMALL, "dkdv": Config(32, 64, 4, 1), "dq": frozen("dq")}

    def ours(problem: Problem, data: Any) -> Attention:
        ends = None if causal else frozen("fwd_whole")
        return Kernels(data.rows_first, causal, chosen, ends=ends)

    judge = Judge(one, one.data(), backward=True)
    verdicts = judge.whole(ours) + judge.sampled(ours)
    assert len(verdicts) == 9 and all(verdict.ok for verdict in verdicts), verdicts


def test_a_step_in_the_middle_continues_what_was_there() -> None:
    """Of a third of the keys, between two others: the results of one launch over all of them."""
    one = problem(False, 192)
    data, frozen = one.data(), frozen_of(one)
    assert thirds(192, 64) == [(0, 64), (64, 128), (128, 192)] and thirds(113, 64)[1:] == [
        (0, 64), (64, 113)
    ]  # fmt: skip
    kernels = {}
    for ends in (None, frozen("fwd_whole")):
        kernels[ends] = Kernels(data.rows_first, False, {"fwd": INTERPRETER}, ends=ends)
        kernels[ends].forward()
    alone, steps = kernels.values()
    assert torch.equal(alone.results()[0], steps.results()[0])
    assert alone.lse is not None and steps.lse is not None and torch.equal(alone.lse, steps.lse)


@pytest.mark.parametrize(
    "case",
    [
        Case("fwd", True, 63, 63),
        Case("fwd", False, 97, 33, middle=True),
        Case("dkdv", True, 63, 63),
        Case("dq", False, 97, 97),
    ],
    ids=str,
)
def test_a_trial_can_be_run_again(case: Case) -> None:
    one = problem(case.causal, case.rows)
    trial = Bed(case, one.data(), frozen_of(one)).trial(SMALL)
    found = []
    for _ in range(2):
        trial.prepare()
        trial.run()
        found.append([x.clone() for x in trial.results])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    if trial.continued:  # without being set back it goes on
        trial.run()
        assert not torch.equal(trial.results[0], found[0][0])


def test_cases_in_words_and_numbers() -> None:
    full, causal = Case("fwd", False, 8192, 4096, middle=True), Case("dkdv", True, 4, 4)
    assert str(full) == "fwd full 8k x 4k, middle of a ring" and full.kind == "fwd_whole"
    assert str(causal) == "dkdv causal 4" and causal.kind == "dkdv"
    # 4 products of 2 x 10 pairs x 16 of each of 2 heads in 3 batch entries.
    assert causal.flops(replace(problem(True), batch=3)) == 4 * 2 * 10 * 16 * 2 * 3
    assert full.flops(problem(False)) == 2 * 2 * 8192 * 4096 * 16 * 2


def test_configs_in_words() -> None:
    assert launches.label(replace(INTERPRETER, l2_bytes=1 << 25)) == "64x64 4w 1s l2_bytes=32M"
    special = replace(INTERPRETER, programs_per_sm=2, note="of the table")
    assert launches.label(special) == "64x64 4w 1s programs_per_sm=2"
    line = launches.table_line("sm_90", "fwd_whole", 128, special, "12 regs")
    key, _, text = line.rstrip(",").partition(": ")
    assert eval(key) == ("sm_90", "fwd_whole", 128)
    assert eval(text, {"Config": Config}) == replace(special, note="12 regs")


def test_what_cannot_be_built_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    one = problem(True, 63)
    case = Case("dq", True, 63, 63)
    built, goes_on = build(Task(case, one, NO_TILE))
    assert "power of 2" in built.note and goes_on
    monkeypatch.setattr(launches, "alive", lambda device: False)
    assert not build(Task(case, one, NO_TILE))[1]
    built, goes_on = build(Task(case, one, SMALL))
    assert built.note == "" and built.registers is None and built.seconds > 0 and goes_on


def test_figures_of_a_compiled_kernel() -> None:
    compiled = argparse.Namespace(
        n_regs=168, n_spills=3, metadata=argparse.Namespace(shared=230000)
    )
    assert launches.figures(compiled, 1.5) == Built(168, 12, 230000, 1.5)


# -- the race


class Ticks:
    """A watch on which a run takes what it says."""

    def __init__(self) -> None:
        self.now = 0.0

    def ready(self, head_start_ms: float) -> None:
        pass

    def mark(self) -> float:
        return self.now

    def ms(self, start: float, stop: float) -> float:
        return stop - start

    def done(self) -> None:
        pass


class Runner:
    """A run of a given length; its n-th has the n-th of the results."""

    def __init__(self, watch: Ticks, ms: float, results: Sequence[float] = (), fails: int = -1):
        self._watch, self._ms, self._values, self._fails = watch, ms, [*results], fails
        self.count = 0

    @property
    def results(self) -> list[Tensor]:
        return [torch.tensor(self._values[: self.count][-1:])] if self._values else []

    def prepare(self) -> None:
        self._watch.now += 100.0

    def run(self) -> None:
        self.count += 1
        if self.count == self._fails:
            raise torch.OutOfMemoryError("no memory")
        self._watch.now += self._ms


def test_only_the_fastest_run_to_the_end() -> None:
    watch = Ticks()
    race = Race(watch, CPU)
    runs = {
        "fast": Runner(watch, 10.0, [1.0]),
        "close": Runner(watch, 11.0, [1.0]),
        "slow": Runner(watch, 12.0, [2.0]),
        "slower": Runner(watch, 25.0, [2.0]),
        "frozen": Runner(watch, 30.0, [1.0]),
        "peer": Runner(watch, 1.0),
        "restless": Runner(watch, 9.0, [1.0, 1.0, 3.0]),
        "failing": Runner(watch, 9.0, [1.0], fails=2),
    }
    race.run(runs, 9, ["frozen"], math.inf)
    # The first of all runs warms up. Another implementation sets no limit for ours.
    assert {name: run.count - 1 for name, run in runs.items()} == {
        "fast": 9, "close": 9, "slow": 3, "slower": 1, "frozen": 9, "peer": 9, "restless": 2,
        "failing": 1,
    }  # fmt: skip
    assert race.samples["fast"] == [10.0] * 9 and race.samples["slow"] == [12.0] * 3
    assert race.notes == {
        "restless": "other bits than in the run before",
        "failing": "cannot run: out of memory",
    }
    assert race.bits["fast"] == race.bits["frozen"] != race.bits["slow"]
    assert not {"restless", "failing"} & race.samples.keys() and "peer" not in race.bits
    filled = race.fill(TuneRow("case", "fwd", "fast"), "fast", 5 * 10**9)
    assert (filled.median_ms, filled.samples, filled.tflops) == (10.0, 9, 0.5)
    assert race.fill(TuneRow("case", "fwd", "x"), "restless", 1).median_ms is None


def test_a_broken_device_ends_a_race_and_keeps_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tune, "alive", lambda device: False)
    watch = Ticks()
    race = Race(watch, CPU)
    runs = {"good": Runner(watch, 10.0, [1.0]), "bad": Runner(watch, 10.0, [1.0], fails=4)}
    race.run(runs, 9, [], math.inf)
    assert race.broken_by == "bad" and race.notes == {"bad": "cannot run: out of memory"}
    assert 2 <= len(race.samples["good"]) <= 3 and runs["good"].count <= 4


def test_no_more_heats_than_there_is_time_for() -> None:
    watch = Ticks()
    race = Race(watch, CPU)
    runs = {"one": Runner(watch, 10.0, [1.0])}
    race.run(runs, 50, [], deadline=0.0)
    assert race.samples["one"] == [10.0] * tune.HEATS


# -- a run


def test_a_search_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command, with a process that builds."""
    path = tmp_path / "tune.json"
    words = f"{TINY} --kernels dq --jobs 1 --json {path}"
    assert main(["tune", *words.split()]) == 0
    report = json.loads(path.read_text())
    ours = [row for row in report["rows"] if row["config"]]
    assert [row["case"] for row in ours] == ["dq causal 63", "dq full 97"]
    for one in ours:
        assert one["frozen"] and one["note"] == "" and one["repeats"] == 2 and one["same_bits"]
        assert 0 < one["max_ratio"] <= 1 and one["samples"] == 1 and one["speed"] == 1.0
        assert one["built"]["seconds"] > 0 and one["built"]["note"] == ""
    assert report["failures"] == [] and report["setting"]["jobs"] == 1
    shown = capsys.readouterr().out
    assert '("interpreter", "dq", 16): Config(64, 64, 4, 1, "dq causal 63' in shown
    assert shown.splitlines()[-1].startswith("2 cases, 2 configs, 2 timed, 0 wrong")


def test_candidates_that_cannot_or_must_not_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One does not compile, one is wrong, one is not the same twice; the frozen one stays."""
    wrong, restless = Config(64, 32, 4, 1), Config(32, 64, 4, 1)
    bench = tuning(
        f"{TINY} --kernels fwd --full-rows 33",
        SMALL,
        NO_TILE,
        wrong,
        restless,
        replace(SMALL, note="x"),
    )
    run = launches.Trial.run

    def wrongly(self: launches.Trial) -> Any:
        found = run(self)
        blocks = tuple(self.launch.constants[name] for name in ("BLOCK_M", "BLOCK_N"))
        if blocks == (restless.BLOCK_M, restless.BLOCK_N):
            self.results[0].mul_(1.0 + 1e-6 * torch.rand(()))
        return found

    forward = Kernels.forward

    def wrong_forward(self: Kernels) -> None:
        forward(self)
        if self._configs["fwd"] == wrong:
            self._results[0][:, 0] += 0.1

    monkeypatch.setattr(launches.Trial, "run", wrongly)
    monkeypatch.setattr(Kernels, "forward", wrong_forward)
    bench._search(bench.setting.cases()[0], math.inf)
    rows = {row.name: row for row in bench.rows if row.config}
    assert len(rows) == 5  # two that differ in their notes are one
    assert rows["48x64 4w 1s"].note.startswith("not built: ")
    assert "error" in rows["64x32 4w 1s"].note and (rows["64x32 4w 1s"].max_ratio or 0) > 1
    assert rows["32x64 4w 1s"].note == "other bits after 1 equal runs of 2"
    assert rows["64x64 4w 1s"].frozen and rows["64x64 4w 1s"].speed == 1.0
    assert rows["32x32 4w 1s"].note == "" and rows["32x32 4w 1s"].samples == 1
    assert [row.wrong for row in rows.values()] == [False, False, False, True, True]
    chosen = best(bench.rows, ["fwd_whole"])["fwd_whole"].config
    assert chosen in (replace(INTERPRETER, note=""), SMALL)
    assert bench.failures == []
    lines = bench.summary()
    assert sum(line.startswith("WRONG fwd full 33: ") for line in lines) == 2
    assert "5 configs, 2 timed, 2 wrong" in lines[-1]


@pytest.mark.slow
def test_another_kernel_that_is_wrong_is_not_held_against_a_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frozen config of dk and dv is wrong: those of the forward and of dq are judged as ever,
    those of dk and dv are compared with each other."""
    backward = Kernels.backward

    def wrong_backward(self: Kernels) -> None:
        backward(self)
        if self._configs["dkdv"] == frozen:
            self._results[2][:, 0] += 1.0

    bench = tuning(f"{TINY} --causal-rows 33", SMALL)
    frozen = bench._frozen("dkdv")
    monkeypatch.setattr(Kernels, "backward", wrong_backward)
    fwd, dkdv, dq = Case("fwd", True, 33, 33), Case("dkdv", True, 33, 33), Case("dq", True, 33, 33)
    for case in (fwd, dkdv, dq):
        bench._search(case, math.inf)
    rows = {(row.kind, row.frozen): row for row in bench.rows if row.config}
    assert [key for key, row in rows.items() if row.wrong] == [("dkdv", True)]
    assert bench._trusted("dkdv") == SMALL and bench._trusted("dq") == frozen
    assert (rows["dkdv", True].speed, rows["dkdv", False].speed) == (None, 1.0)
    assert bench.failures[0].startswith("dkdv causal 33, the frozen config: dk of 33: error")
    lines = bench.summary()
    over = "1.000 x the fastest: the frozen config does not hold"
    assert f"dkdv: 32x32 4w 1s is {over}, but other masks have another BLOCK_M" in lines


def test_forwards_in_gluon_run_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here they cannot; and they are no lines of the table."""
    monkeypatch.setattr(tune, "gluon_configs", lambda *kind: (SMALL,))
    bench = tuning(f"{TINY} --kernels fwd --full-rows 33")
    bench._search(bench.setting.cases()[0], math.inf)
    gluon = [row for row in bench.rows if row.kind == launches.GLUON_KIND]
    assert [row.case for row in gluon] == [f"{name} fwd full 33" for name in launches.GLUON]
    assert all("does not take these tensors" in row.note for row in gluon)
    assert not any(row.decides or row.wrong for row in gluon) and bench.failures == []
    assert launches.gluon_configs("sm_80", 128, torch.bfloat16) == ()
    assert launches.gluon_configs("sm_90", 128, torch.float32) == ()


def test_steps_and_whole_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuning, "_repeats", lambda self, case, config: self.setting.repeats)
    bench = tuning(f"{TINY} --full-rows 64 --causal-rows 64 --step-rows 64", json=tmp_path / "x")
    monkeypatch.setattr(bench, "_search", lambda case, deadline: None)
    bench.run()
    cases = {row.case: [] for row in bench.rows}
    for found in bench.rows:
        cases[found.case].append(found)
    assert list(cases) == [
        "backward causal 64", "backward full 64", "fwd full 64 x 32",
        "fwd full 64 x 32, middle of a ring",
    ]  # fmt: skip
    names = [row.name for row in cases["backward full 64"]]
    assert names == [FROZEN_SET, BEST_SET, "torch-flash"]
    assert all(row.median_ms and not row.note for row in bench.rows)
    assert not any(row.decides for row in bench.rows)
    assert any(
        line.startswith("fwd full 64 x 32, middle of a ring: ") and "x the time alone" in line
        for line in bench.summary()
    )


def test_a_wrong_frozen_config_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Tuning, "_repeats", lambda self, case, config: 0)
    assert (
        main(["tune", *f"{TINY} --kernels dq --causal-rows 33 --full-rows 33 --quiet".split()]) == 1
    )
    shown = capsys.readouterr().out
    assert "dq causal 33, the frozen config: other bits after 0 equal runs of 2" in shown


def test_a_broken_device_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Tuning, case: Case, config: Config) -> int:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Tuning, "_repeats", broken)
    monkeypatch.setattr(tune, "alive", lambda device: False)
    path = tmp_path / "tune.json"
    bench = tuning(f"{TINY} --kernels dq --causal-rows 33", SMALL, json=path)
    bench.run()
    report = json.loads(path.read_text())
    assert {row["case"] for row in report["rows"]} == {"dq causal 33"}
    notes = [row["note"] for row in report["rows"] if row["config"]]
    assert "illegal memory access" in notes[0] and notes[1] == "the device failed before"
    assert report["failures"][0].startswith("the device failed while this ran: dq causal 33: 64x64")


def test_a_budget_leaves_cases_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = tuning(f"{TINY} --budget 1e-9")
    bench.run()
    assert bench.rows == [] and bench.summary()[-1].startswith("0 cases, 0 configs")
    bench = tuning(f"{TINY} --causal-rows 17", SMALL)
    bench._search(Case("dq", True, 17, 17), deadline=0.0)
    assert [row.note for row in bench.rows if row.config] == ["", f"not checked: {NO_TIME}"]
    assert "2 configs, 1 timed, 0 wrong, 1 had no time" in bench.summary()[-1]
    shares = []
    bench = tuning(f"{TINY} --kernels dkdv,dq --budget 1000")
    monkeypatch.setattr(bench, "left", lambda: 440.0)
    monkeypatch.setattr(tune.time, "monotonic", lambda: 0.0)
    for name in ("_search", "_backward"):
        monkeypatch.setattr(bench, name, lambda what, deadline: shares.append(deadline))
    monkeypatch.setattr(bench, "_steps", shares.append)
    bench.run()
    # Four searches, two backwards of a fifth of one, and steps; the last has all that is left.
    assert shares == pytest.approx(
        [440 / 4.8, 440 / 3.8, 440 / 2.8, 440 / 1.8, 88 / 0.8, 88 / 0.6, 440]
    )


def test_a_stage_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = tuning(f"{TINY} --kernels dkdv,dq", json=tmp_path / "tune.json")

    def failing(case: Case, deadline: float) -> None:
        done.append(case.kernel)
        if case.kernel == "dkdv":
            raise torch.OutOfMemoryError("out of memory")

    done: list[str] = []
    monkeypatch.setattr(bench, "_search", failing)
    monkeypatch.setattr(bench, "_backward", lambda causal, deadline: None)
    bench.run()
    assert done == ["dkdv", "dkdv", "dq", "dq"]
    assert bench.failures == ["a stage failed: out of memory"] * 2
    assert "OutOfMemoryError" in capsys.readouterr().err


def test_candidates_that_were_fast_come_first() -> None:
    bench = tuning(f"{TINY} --kernels dq", SMALL, NO_TILE, Config(16, 16, 4, 1))
    bench.rows = [
        row("dq causal 63", "dq", NO_TILE, 1.5),
        row("dq causal 63", "dq", Config(16, 16, 4, 1), 1.2),
        row("dkdv causal 63", "dkdv", SMALL, 9.0),
    ]
    found = bench._candidates("dq")
    assert found == [replace(INTERPRETER, note=""), NO_TILE, Config(16, 16, 4, 1), SMALL]


def test_the_fastest_tile_is_tried_in_other_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = replace(INTERPRETER, l2_bytes=1 << 20, note="")
    persistent = replace(INTERPRETER, programs_per_sm=2, note="")
    eight = replace(INTERPRETER, num_warps=8, programs_per_sm=1, note="")
    bench = tuning(f"{TINY} --kernels dq --causal-rows 33", SMALL, grouped, persistent, eight)
    frozen = bench._frozen("dq")
    asked: list[list[Config]] = []

    def measured(configs: Sequence[tuple[Case, Config]], deadline: float, *, decides: bool) -> None:
        asked.append([config for _, config in configs])
        speeds = {SMALL: 2.0}
        bench.rows += [
            row("dq causal 33", "dq", config, speeds.get(config, 1.0)) for _, config in configs
        ]

    monkeypatch.setattr(bench, "_measure", measured)
    bench._search(bench.setting.cases()[0], math.inf)
    orders = [replace(SMALL, l2_bytes=1 << 20), replace(SMALL, programs_per_sm=2)]
    assert asked == [[frozen, SMALL, grouped, persistent, eight], [frozen, SMALL, *orders]]


@pytest.mark.slow
def test_what_is_timed_again_is_one_row() -> None:
    bench = tuning(f"{TINY} --kernels dq --causal-rows 17")
    case, frozen = Case("dq", True, 17, 17), bench._frozen("dq")
    for configs in ([frozen], [frozen, SMALL]):
        bench._measure([(case, config) for config in configs], math.inf, decides=True)
    names = [row.name for row in bench.rows]
    assert names == ["64x64 4w 1s", "torch-flash, whole backward", "32x32 4w 1s"]
    assert bench.rows[2].speed is not None and bench.failures == []


# -- what is recommended


def test_the_best_serves_all_cases_of_its_kind() -> None:
    fast, steady = Config(64, 128, 8, 2), Config(32, 128, 8, 2)
    rows = [
        row("dkdv causal", "dkdv", INTERPRETER, 1.0, frozen=True),
        row("dkdv causal", "dkdv", fast, 2.0),
        row("dkdv causal", "dkdv", steady, 1.2),
        row("dkdv causal", "dkdv", NO_TILE, 5.0),
        row("dkdv full", "dkdv", INTERPRETER, 1.0, frozen=True),
        row("dkdv full", "dkdv", fast, 0.5),
        row("dkdv full", "dkdv", steady, 1.3),
        row("dkdv full", "dkdv", NO_TILE, None, note="wrong"),
    ]
    choice = best(rows, ["dkdv"])["dkdv"]
    assert choice.config == steady and choice.speed == pytest.approx(math.sqrt(1.2 * 1.3))
    assert [one.case for one in choice.rows] == ["dkdv causal", "dkdv full"]
    assert best(rows[:4], ["dkdv"])["dkdv"].config == NO_TILE
    assert best([], ["dkdv"]) == {} and fastest([], "dkdv") is None


def test_masks_share_the_blocks_that_are_folded() -> None:
    wide, narrow = Config(128, 128, 8, 2), Config(128, 64, 8, 2)
    rows = [
        row("fwd full", "fwd_whole", wide, 1.0, frozen=True),
        row("fwd full", "fwd_whole", narrow, 1.1),
        row("fwd causal", "fwd", wide, 1.0, frozen=True),
        row("fwd causal", "fwd", narrow, 0.8),
    ]
    kinds = ["fwd_whole", "fwd"]
    assert {kind: choice.config for kind, choice in best(rows, kinds).items()} == {
        "fwd_whole": wide, "fwd": wide,
    }  # fmt: skip
    lines = tune_report.summary(rows, kinds, "sm_90", 128, "here")
    frozen = "x the frozen config"
    assert lines[:3] == [
        f"fwd_whole: 128x128 8w 2s is 1.000 {frozen}",
        f"fwd_whole: 128x64 8w 2s is 1.100 {frozen}, but other masks have another BLOCK_N",
        f"fwd: 128x128 8w 2s is 1.000 {frozen}",
    ]
    assert '("sm_90", "fwd_whole", 128): Config(128, 128, 8, 2, "fwd full 2 ms (here)"),' in lines
    quick = [*rows[:3], row("fwd causal", "fwd", narrow, 0.95)]
    assert best(quick, kinds)["fwd"].config == narrow
    # A kind that was not timed keeps the frozen config, whose blocks the other has to have.
    assert best(rows[:2], kinds)["fwd_whole"].config == wide


def test_speeds_and_targets_in_words() -> None:
    timed = TuneRow("fwd full", "fwd_whole", "a", asdict(INTERPRETER), True, True, median_ms=4.0)
    ours = tune_report.with_speeds(timed, [4.0, 4.0, 9.0], [3.0])
    assert (ours.speed, ours.speed_over_cudnn) == (1.0, 0.75)
    part = tune_report.with_speeds(timed, [5.0], None)
    assert (part.speed, part.speed_over_cudnn) == (1.25, None)
    assert tune_report.with_speeds(replace(timed, median_ms=None), [5.0], [5.0]).speed is None
    rows = [
        ours,
        TuneRow("backward full", "", BEST_SET, speed_over_cudnn=0.97),
        TuneRow("backward full", "", FROZEN_SET, speed_over_cudnn=0.9),
        TuneRow("gluon fwd full", "gluon", "slow", {}, speed=1.1, speed_over_cudnn=1.0),
        TuneRow("gluon-ping-pong fwd full", "gluon", "fast", {}, speed=1.2, speed_over_cudnn=1.1),
        TuneRow("gluon fwd causal", "gluon", "only", {}, speed=0.9),
        TuneRow("fwd full", "", "cudnn", note="cannot run: no"),
        TuneRow("fwd causal", "", "cudnn", note="cannot run: no"),
    ]
    lines = tune_report.summary(rows, ["fwd_whole"], "sm_90", 128, "here")
    assert "fwd full: 0.750 x cuDNN's speed (target 1.00)" in lines
    assert [line for line in lines if line.startswith("backward")] == [
        "backward full: 0.970 x cuDNN's speed (target 0.95)"
    ]
    assert [line for line in lines if line.startswith("gluon")] == [
        "gluon fwd causal: only is 0.900 x the frozen config",
        "gluon-ping-pong fwd full: fast is 1.200 x the frozen config, 1.100 x cuDNN's speed",
    ]
    assert lines.count("cudnn: cannot run: no") == 1


def test_a_table_shows_the_fastest_and_counts_the_rest() -> None:
    built = Built(168, 8, 164_000, 1.0)
    rows = [
        row("fwd full", "fwd", Config(64, n, 4, 1), 1.0 / n, built=built, p20_ms=1.0, p80_ms=2.0)
        for n in (16, 32, 64, 128, 256)
    ]
    rows[3] = replace(rows[3], frozen=True, same_bits=True)
    rows.append(TuneRow("fwd full", "fwd", "none", note="not built: no"))
    table = tune_report.table(rows, "title")
    shown = [list(column.cells) for column in table.columns]
    assert shown[1][:4] == ["64x16 4w 1s", "64x32 4w 1s", "64x64 4w 1s", "64x128 4w 1s (frozen)"]
    assert shown[1][4] == "and 2 more: 1 without a time"
    assert [column[3] for column in shown[7:]] == ["168", "8", "164", "same"]


# -- options


def test_sizes_by_device_and_option() -> None:
    given = setting("--device cpu --heads 8/2 --kernels dq,fwd --batch 3 --jobs 5")
    assert given.kernels == ("fwd", "dq") and given.jobs == 5 and given.batch == 3
    assert [str(case) for case in given.cases()] == [
        "fwd full 128", "fwd causal 128", "dq causal 128", "dq full 128"
    ]  # fmt: skip
    assert [str(case) for case in given.steps()] == [
        "fwd full 192 x 96", "fwd full 192 x 96, middle of a ring"
    ]  # fmt: skip
    parser = argparse.ArgumentParser()
    launches.add_case_arguments(parser)
    assert launches.case_setting(parser.parse_args([*given.words])).words == given.words


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--kernels bwd", "--kernels must be of"),
        ("--jobs -1", "--jobs must be at least 0"),
        ("--backend aten", "these are the kernels of backend triton"),
        ("--heads 4/2,8/2", "--heads must be one pair"),
        ("--dtype bfloat16", "bfloat16 arithmetic is wrong in Triton's interpreter"),
    ],
)
def test_bad_options_are_refused(words: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        setting(f"--device cpu {words}")


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune"]) == 2
    assert "has no GPU that torch can use" in capsys.readouterr().err


def test_bits_are_seen() -> None:
    x = torch.randn(3, 5)
    assert bits_of([x, x], CPU) == bits_of([x.clone(), x], CPU)
    assert bits_of([x, x], CPU) != bits_of([x, x.nextafter(x + 1)], CPU)
