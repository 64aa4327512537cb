"""`ring-attn bench kernel` on a CPU: its figures, its report, and its notes on failures."""

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn.bench import kernel, timing
from ring_attn.bench.implementations import (
    Implementation,
    OurKernels,
    Shape,
    make,
)
from ring_attn.bench.judge import OracleJudge
from ring_attn.testing import Inputs
from tests.integration.commands import options_of

CPU = torch.device("cpu")
TINY = "--device cpu --seqlen 32 --head-dim 16 --heads 2/1 --tokens 64 --iters 2 --quiet"
RUN = f"bench kernel {TINY}"


def problem(**changes: Any) -> Shape:
    sizes: dict[str, Any] = {
        "batch": 2, "seqlen": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "causal": True,
        "dtype": torch.float32, "device": CPU,
    }  # fmt: skip
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
    words = "--device cpu --seqlen 64 --head-dim 16 --heads 4/2 --tokens 128 --causal"
    run = kernel.Cells(setting(f"{words} --implementations ours"))
    run.run()
    fwd, bwd, both = run.rows
    assert (fwd.median_ms, bwd.median_ms, both.median_ms) == (1.0, 2.0, 3.0)
    assert (fwd.p20_ms, fwd.p80_ms, fwd.samples) == (1.0, 1.0, 3)
    assert fwd.batch == 2
    # Two products of 2 x 16 operations a pair, for 4 heads and 2 batch entries, in 1 ms.
    tflops = 4 * 16 * 4 * 2 * (64 * 65 // 2) / 1e9
    assert fwd.rate == pytest.approx(tflops)
    assert bwd.rate == pytest.approx(2.5 * tflops / 2)
    assert both.rate == pytest.approx(3.5 * tflops / 3)


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
        {name: call(name) for name in "abc"}, Steps(), 2,
        failed=lambda name, error: failed.append(f"{name}: {error}"),
    )  # fmt: skip
    over = [name for name in ran if len(name) == 1]
    assert over == [*"cab", *"ab", "c", *"ca"] and failed == ["b: made to fail"]
    assert ran.count("a is over") == 3 and ran.count("b is over") == 1
    assert {name: len(found) for name, found in samples.items()} == {"a": 2, "b": 0, "c": 2}
    assert samples["a"][0].ms == (1.0, 2.0)


def test_report_table_and_what_cannot_run(
    report_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(f"bench kernel {TINY.replace('--quiet', '')}")
    assert {"machine", "command", "setting", "seconds"} <= set(report)
    assert report["failures"] == []
    rows = {(row["impl"], row["mode"], row["causal"]): row for row in report["rows"]}
    for impl in ("ours", "torch-flash"):
        for mode in ("fwd", "bwd", "fwd_bwd"):
            for causal in (True, False):
                row = rows[impl, mode, causal]
                assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
                assert row["rate"] > 0 and row["host_ms"] > 0
                assert 0 < row["max_ratio"] <= 1
                assert (row["seqlen"], row["batch"], row["samples"]) == (32, 2, 2)
    assert "cannot run" in rows["cudnn", "fwd_bwd", True]["note"]
    shown = capsys.readouterr().out
    assert all(one in shown for one in ("2/1 heads of 16, causal", "cudnn: cannot run"))


def test_a_budget_ends_the_run_and_says_what_is_left(
    report_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(f"{RUN} --implementations ours --budget 0")
    notes = [row["note"] for row in report["rows"]]
    assert len(notes) == 2 and all("budget of 0 s" in note for note in notes)
    assert "ours: not measured" in capsys.readouterr().out


def test_a_wrong_result_of_ours_is_a_failure(
    report_of: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        OurKernels, "results", lambda self: [1.01 * x for x in (self.out, *self.grads)]
    )
    report = report_of(f"bench kernel {TINY} --causal --implementations ours", 1)
    assert report["rows"][0]["note"].startswith("wrong") and report["rows"][0]["max_ratio"] > 1
    assert "ours, 2/1 heads of 16, causal, 2 x 32" in capsys.readouterr().out


def test_an_error_of_ours_is_a_failure_and_of_a_peer_a_reason(
    report_of: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(name: str, *args: Any, **options: Any) -> Implementation:
        if name == "torch-flash":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        raise ArithmeticError("made to fail")

    monkeypatch.setattr(kernel, "make", raising)
    words = f"{RUN} --causal --implementations ours,torch-flash"
    report = report_of(words, status=1)
    notes = {row["impl"]: row["note"] for row in report["rows"]}
    assert "made to fail" in notes["ours"] and "out of memory" in notes["torch-flash"]
    (failure,) = report["failures"]
    assert failure.startswith("ours, ") and "ArithmeticError" in failure
    assert "made to fail" in capsys.readouterr().err  # the traceback
    monkeypatch.undo()
    exhausted = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(OracleJudge, "__init__", exhausted)
    notes = [row["note"] for row in report_of(words)["rows"]]  # an oracle without memory
    assert notes == ["cannot be judged: out of memory"] * 2


@pytest.mark.parametrize(
    ("which", "place"),
    [
        (0, (1, 95, 3, 0)),
        (1, (0, 95, 0, 0)),
        (1, (1, 50, 3, 0)),  # a row without dout, or a sampled row: wrong either way
        (2, (1, 40, 1, 3)),
        (3, (0, 0, 0, 15)),
    ],
)
@pytest.mark.parametrize("size", [0.1, math.nan])
def test_the_judge_sees_one_wrong_element(which: int, place: tuple[int, ...], size: float) -> None:
    one = problem()
    data = one.data()

    class Wrong(OurKernels):
        def results(self) -> list[Tensor]:
            found = [x.clone() for x in super().results()]
            found[which][place] += size
            return found

    found = OracleJudge(one, data, backward=True).verdicts(lambda p, d: Wrong(p, d, "reference"))
    assert not all(verdict.ok for verdict in found)


def test_flash_attn_packages_are_called_with_rows_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls a stand-in with the signature of flash_attn_func, which returns a pair."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2), None

    module = ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec("flash_attn_interface", None)
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    one = problem()

    def build(problem: Shape, data: Inputs) -> Implementation:
        return make("flash-attn-3", problem, data, backend="", backward=True)

    judge = OracleJudge(one, one.data(), backward=True)
    assert all(verdict.ok for verdict in judge.verdicts(build))
