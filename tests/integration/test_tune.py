"""`ring-attn tune` on a CPU: its search, checks, timings and recommendations."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.backends.triton import TritonBackend
from ring_attn.bench.implementations import Ours
from ring_attn.bench.judge import OracleJudge
from ring_attn.cli import tune
from ring_attn.cli.tune import TuneRow, Tuning, best
from ring_attn.kernels.configs import Config
from ring_attn.transport.ranks.configs import CONFIGS_VARIABLE
from tests.integration.commands import options_of

TINY = "--device cpu --heads 2/1 --head-dim 16 --quick"

SMALL, NO_TILE = Config(32, 32, 4, 1), Config(48, 64, 4, 1)


def setting(words: str) -> tune.TuneSetting:
    return tune.setting_of(options_of("tune", words))


def tuning(words: str, monkeypatch: pytest.MonkeyPatch, *space: Config) -> Tuning:
    """A run over these configs and the interpreter's config, which is the frozen one."""
    monkeypatch.setattr("ring_attn.kernels.configs.search_space", lambda *kind: space)
    return Tuning(setting(words))


def row(kind: str, config: Config, speed: float | None, **others: Any) -> TuneRow:
    ms = None if speed is None else 2.0 / speed
    return TuneRow(kind, str(config), config, speed=speed, median_ms=ms, **others)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_our_kernels_in_other_configs_are_an_attention(causal: bool) -> None:
    kinds = ("fwd", "dkdv", "dq") if causal else ("fwd_whole", "dkdv_whole", "dq_whole")
    one = setting(TINY).problem_of(kinds[0])
    chosen = dict(zip(kinds, (SMALL, Config(32, 64, 4, 1), SMALL), strict=True))
    judge = OracleJudge(one)
    ratio, wrong = judge.verdict(lambda p, d: Ours(p, d, TritonBackend(chosen)))
    assert ratio <= 1 and not wrong


@pytest.mark.slow
def test_a_search_on_a_cpu(report_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(f"tune {TINY} --kernels dq")
    assert [row["kind"] for row in report["rows"]] == ["dq", "dq_whole"]
    for one in report["rows"]:
        assert one["frozen"] and one["note"] == "" and one["speed"] == 1.0
        assert 0 < one["max_ratio"] <= 1
    assert report["failures"] == []
    configs = report["configs"]
    assert (configs["version"], configs["architecture"]) == (1, "interpreter")
    assert [(one["kind"], one["headdim"], one["BLOCK_M"]) for one in configs["table"]] == [
        ("dq", 64, 64),
        ("dq_whole", 64, 64),
    ]
    shown = capsys.readouterr().out
    assert "RING_ATTN_CONFIGS=" in shown
    assert shown.splitlines()[-1].startswith("2 configs, 2 timed, 0 wrong")


def test_candidates_that_cannot_or_must_not_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One config fails to compile, one is wrong, one varies from run to run; the frozen stays."""
    wrong, restless = Config(64, 32, 4, 1), Config(32, 64, 4, 1)
    forward, one = Ours.forward, Ours.one

    def wrongly(self: Ours) -> None:
        forward(self)
        if self.backend.configs.get("fwd") == wrong:
            self.out[:, 0] += 0.1

    def restlessly(self: Ours, kernel: str) -> Callable[[], list[Tensor]]:
        factor = 1.0 + 1e-3 * torch.rand(())
        call = one(self, kernel)
        return (
            (lambda: [x * factor for x in call()])
            if self.backend.configs.get("fwd") == restless
            else call
        )

    monkeypatch.setattr(Ours, "forward", wrongly)
    monkeypatch.setattr(Ours, "one", restlessly)
    space = (SMALL, NO_TILE, wrong, restless, SMALL)
    bench = tuning(f"{TINY} --kernels fwd", monkeypatch, *space)
    bench.search("fwd", math.inf)
    rows = {f"{row.config.BLOCK_M}x{row.config.BLOCK_N}": row for row in bench.rows}
    assert len(bench.rows) == len(rows) == 5  # equal configs count once
    assert re.search("not built: .*power of 2", rows["48x64"].note)
    assert (rows["64x32"].max_ratio or 0) > 1
    assert "different bits in one of 2 equal runs" in rows["32x64"].note
    assert rows["64x64"].frozen and rows["64x64"].speed == 1.0
    assert rows["32x32"].note == "" and rows["32x32"].speed
    assert [row.wrong for row in rows.values()] == [False, False, False, True, True]
    assert bench.failures == []
    assert sum(line.startswith("WRONG fwd: ") for line in bench.summary()) == 2


def test_a_wrong_frozen_config_is_a_failure(
    report_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Ours.forward

    def wrongly(self: Ours) -> None:
        forward(self)
        self.out[:, 0] += 0.1

    monkeypatch.setattr(Ours, "forward", wrongly)
    report = report_of(f"tune {TINY} --kernels fwd --quiet", status=1)
    assert [failure.partition(",")[0] for failure in report["failures"]] == ["fwd_whole", "fwd"]


def test_the_best_of_a_kernel_folds_blocks_of_one_length() -> None:
    wide, narrow = Config(128, 128, 8, 2), Config(128, 64, 8, 2)
    rows = [
        row("fwd_whole", wide, 1.0, frozen=True),
        row("fwd_whole", narrow, 1.1),
        row("fwd", wide, 1.0, frozen=True),
        row("fwd", narrow, 0.8),
        row("fwd", NO_TILE, None, note="wrong"),
    ]
    assert [one.config for one in best(rows)] == [wide, wide]
    assert [one.name for one in best([*rows[:3], row("fwd", narrow, 0.95)])] == [str(narrow)] * 2
    # A kind without timings keeps the frozen config, and the other kind must share its blocks.
    assert [one.name for one in best(rows[:2])] == [str(wide)]
    assert best([]) == []
    # Only one config of the forward in Gluon can be taken.
    gluon = [replace(r, gluon=True, name=f"gluon {r.name}") for r in (rows[1], rows[3])]
    other = replace(gluon[1], name="gluon other", config=replace(narrow, num_stages=3), speed=9.0)
    taken = best([*rows, *gluon, other])
    assert {one.gluon and one.name for one in taken} in ({False}, {gluon[0].name})


def test_a_file_of_configs_must_not_be_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIGS_VARIABLE, "tune.json")
    with pytest.raises(ValueError, match="unset.*'tune.json'"):
        setting(TINY)
