"""`ring-attn bench kernel` on a CPU: its figures, its report, and its notes on failures."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attn.backends import get_backend
from ring_attn.bench import kernel, timing
from ring_attn.bench.implementations import Implementation, Ours, Shape
from ring_attn.bench.judge import OracleJudge
from ring_attn.bench.roofs import Roofs
from tests.integration.commands import options_of

CPU = torch.device("cpu")
TINY = "--device cpu --seqlen 32 --head-dim 16 --heads 2/1 --iters 2 --quiet"
RUN = f"bench kernel {TINY}"


def problem(**changes: Any) -> Shape:
    sizes: dict[str, Any] = {
        "batch": 2,
        "seqlen": 96,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "causal": True,
        "dtype": torch.float32,
        "device": CPU,
    }
    return Shape(**{**sizes, **changes})


def setting(words: str) -> kernel.CellSetting:
    return kernel.setting_of(options_of("bench kernel", words))


class Steps:
    """A stub clock whose marks are 1, then 2, then 3 ms apart; host time stands still."""

    def __init__(self) -> None:
        self._next = self._gap = self.now = 0.0
        self.head_starts: list[float] = []

    def ready(self, head_start_ms: float) -> None:
        self._gap = 0.0
        self.head_starts.append(head_start_ms)

    def mark(self) -> float:
        self._next += self._gap
        self._gap += 1.0
        return self._next

    def ms(self, start: float, stop: float) -> float:
        return stop - start

    def done(self) -> None:
        pass


def test_figures_of_a_row_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "Watch", lambda device: Steps())
    roofs = Roofs(tflops=1.0, gbps=0.5)
    monkeypatch.setattr(kernel, "measure_roofs", lambda device, dtype: roofs)
    run = kernel.Cells(setting("--device cpu --seqlen 64 --head-dim 16 --heads 4/2"))
    run.run()
    fwd, bwd, both = run.rows[:3]
    assert (fwd.median_ms, bwd.median_ms, both.median_ms) == (1.0, 2.0, 3.0)
    assert (fwd.p20_ms, fwd.p80_ms, fwd.samples) == (1.0, 1.0, 3)
    assert fwd.impl == "ours" and fwd.mask == "causal" and fwd.batch == 8
    # Two products of 2 x 16 operations a pair, for 4 heads and 8 batch entries, in 1 ms.
    tflops = 4 * 16 * 4 * 8 * (64 * 65 // 2) / 1e9
    assert fwd.tflops == pytest.approx(tflops)
    assert bwd.tflops == pytest.approx(2.5 * tflops / 2)
    assert both.tflops == pytest.approx(3.5 * tflops / 3) == pytest.approx(both.tflops_share)
    # q, k, v and out of 8 x 64 rows in float32.
    gbps = 8 * 64 * 16 * (4 + 2 + 2 + 4) * 4 / 1e6
    assert fwd.gbps == pytest.approx(gbps) and fwd.gbps_share == pytest.approx(2 * gbps)
    assert bwd.gbps == pytest.approx(2 * gbps / 2)


def test_calls_run_in_turn_and_one_that_fails_leaves() -> None:
    ran: list[str] = []

    def call(name: str) -> timing.TimedCall:
        def run() -> None:
            ran.append(name)
            if name == "b" and ran.count("b") == 2:
                raise ArithmeticError("made to fail")

        return timing.TimedCall([run, lambda: None], after=lambda: ran.append(f"{name} is over"))

    failed: list[str] = []
    samples = timing.time_in_turn(
        {name: call(name) for name in "abc"},
        Steps(),
        2,
        failed=lambda name, error: failed.append(f"{name}: {error}"),
    )
    over = [name for name in ran if len(name) == 1]
    assert over == [*"cab", *"ab", "c", *"ca"] and failed == ["b: made to fail"]
    assert ran.count("a is over") == 3 and ran.count("b is over") == 1
    assert {name: len(found) for name, found in samples.items()} == {"a": 2, "b": 0, "c": 2}
    assert samples["a"][0].ms == (1.0, 2.0)


def test_report_and_table(report_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(f"bench kernel {TINY.replace('--quiet', '')}")
    assert {"machine", "command", "setting", "seconds"} <= set(report)
    assert report["failures"] == []
    rows = {(row["impl"], row["mode"], row["mask"]): row for row in report["rows"]}
    for impl in ("ours", "torch-flash"):
        for mode in ("fwd", "bwd", "fwd_bwd"):
            for mask in ("causal", "full"):
                row = rows[impl, mode, mask]
                assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
                assert row["tflops"] > 0 and row["gbps"] > 0 and row["host_ms"] > 0
                assert row["tflops_share"] > 0 and row["gbps_share"] > 0
                assert 0 < row["max_ratio"] <= 1
                assert (row["seqlen"], row["batch"], row["samples"]) == (32, 16, 2)
    said = capsys.readouterr().out
    assert "batch 16, length 32, heads 2, kv heads 1, head dim 16" in " ".join(said.split())
    assert "roofs, measured" in said


def test_what_is_not_there_is_one_line_and_a_row(
    report_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(f"{RUN} --impl fa2,cudnn --mode fwd")
    notes = {row["impl"]: row["note"] for row in report["rows"]}
    assert notes == {
        "fa2": "the package flash_attn is not installed",
        "cudnn": "runs on CUDA only",
    }
    said = capsys.readouterr().out
    assert said.count("is not installed") == 1 and len(report["rows"]) == 4


def test_a_budget_ends_the_run_and_says_what_is_left(
    report_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(f"{RUN} --budget 0.001")
    notes = [row["note"] for row in report["rows"]]
    assert len(notes) == 12 and all("budget of 0.001 s" in note for note in notes)
    assert "ours: not measured" in capsys.readouterr().out


def test_a_wrong_result_of_ours_is_a_failure(
    report_of: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Ours, "results", lambda self: [1.01 * x for x in (self.out, *self.grads)])
    report = report_of(RUN, 1)
    assert report["rows"][0]["note"].startswith("wrong") and report["rows"][0]["max_ratio"] > 1
    assert "ours, 2/1 heads of 16, causal, 16 x 32" in capsys.readouterr().out


def test_an_error_of_ours_is_a_failure_and_of_a_peer_a_reason(
    report_of: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(name: str, *args: Any, **options: Any) -> Implementation:
        if name == "torch-flash":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        raise ArithmeticError("made to fail")

    monkeypatch.setattr(kernel, "make", raising)
    report = report_of(RUN, status=1)
    notes = {row["impl"]: row["note"] for row in report["rows"]}
    assert "made to fail" in notes["ours"] and "out of memory" in notes["torch-flash"]
    assert len(report["failures"]) == 2  # with a causal mask, and without
    failure = report["failures"][0]
    assert failure.startswith("ours, ") and "ArithmeticError" in failure
    assert "made to fail" in capsys.readouterr().err  # the traceback


@pytest.mark.parametrize(
    ("which", "place"),
    [
        (0, (1, 95, 3, 0)),
        (1, (0, 95, 0, 0)),
        (1, (1, 50, 3, 0)),
        (2, (1, 40, 1, 3)),
        (3, (0, 0, 0, 15)),
    ],
)
@pytest.mark.parametrize("size", [0.1, math.nan])
def test_the_judge_sees_one_wrong_element(which: int, place: tuple[int, ...], size: float) -> None:
    class Wrong(Ours):
        def results(self) -> list[Tensor]:
            found = [x.clone() for x in super().results()]
            found[which][place] += size
            return found

    judge = OracleJudge(problem())
    assert judge.verdict(lambda p, d: Ours(p, d, get_backend("reference")))[1] == ""
    ratio, wrong = judge.verdict(lambda p, d: Wrong(p, d, get_backend("reference")))
    assert ratio > 1 and wrong


def test_the_judge_takes_a_part_of_a_long_sequence() -> None:
    judge = OracleJudge(problem(batch=3, seqlen=5000, heads=2, kv_heads=1))
    assert judge.data.q.shape == (2, 1024, 2, 16) and judge.data.k.shape == (2, 1024, 1, 16)
