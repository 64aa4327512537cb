"""`bench.profile_kernels` without a GPU: what is asked of ncu, and how its reports are read.

The reports are made by hand, by what NVIDIA documents of `ncu --csv` and the names that its
sections have: no ncu has been run for these tests.
"""

import argparse
import csv
import io
import json
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from ring_attn.bench import gpu, launches, profile_kernels
from ring_attn.bench.launches import Case
from ring_attn.bench.profile_kernels import (
    Profile,
    figures,
    ncu_words,
    parse_details,
    parse_raw,
    stalls,
    table,
)

TINY = "--device cpu --heads 2/1 --head-dim 16 --full-rows 33 --causal-rows 33"

LAUNCH = {
    "ID": "0", "Process ID": "4711", "Process Name": "python3", "Host Name": "host",
    "Kernel Name": "flash_fwd_kernel", "Context": "1", "Stream": "7",
    "Block Size": "(256, 1, 1)", "Grid Size": "(4096, 1, 1)", "Device": "0", "CC": "9.0",
}  # fmt: skip
BY_SECTION = ("Section Name", "Metric Name", "Metric Unit", "Metric Value", "Rule Name",
              "Rule Type", "Rule Description")  # fmt: skip
SPEED, COMPUTE, WARPS = (
    "GPU Speed Of Light Throughput", "Compute Workload Analysis", "Warp State Statistics"
)  # fmt: skip
SECTIONS = (
    (SPEED, "Duration", "ns", "9,123,456"),
    (SPEED, "Compute (SM) Throughput", "%", "61.5"),
    (SPEED, "DRAM Throughput", "%", "4.25"),
    (COMPUTE, "Issue Slots Busy", "%", "35.5"),
    (COMPUTE, "Tensor (FP)", "%", "58.5"),
    ("Memory Workload Analysis", "L2 Hit Rate", "%", "n/a"),
    (WARPS, "Stall Long Scoreboard", "inst", "0.25"),
    (WARPS, "Stall Wait", "inst", "1.5"),
    (WARPS, "", "", "", "CPIStall", "OPT", "On average, each warp waits."),
    ("Occupancy", "Achieved Occupancy", "%", "12.5"),
    ("Launch Statistics", "Registers Per Thread", "register/thread", "168"),
)
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COUNTERS = (
    ("gpu__time_duration.sum", "ns", "9123456"),
    ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "%", "61.25"),
    ("sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active", "%", "60"),
    (STALLED.format("gmma"), "inst", "2.5"),
    (STALLED.format("gmma_not_issued"), "inst", "2.25"),
    (STALLED.format("barrier"), "inst", "0.125"),
    ("lts__t_sector_hit_rate.pct", "%", "88.5"),
    ("launch__registers_per_thread", "register/thread", "168"),
)


def quoted(*rows: Iterable[str]) -> str:
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return text.getvalue()


DETAILS = (
    "==PROF== Connected to process 4711 (/usr/bin/python3)\n"
    '==PROF== Profiling "flash_fwd_kernel" - 0: 0%....50%....100% - 24 passes\n'
) + quoted(
    [*LAUNCH, *BY_SECTION],
    *([*LAUNCH.values(), *row, *[""] * (len(BY_SECTION) - len(row))] for row in SECTIONS),
)
RAW = quoted(
    [*LAUNCH, *(name for name, _, _ in COUNTERS)],
    [*[""] * len(LAUNCH), *(unit for _, unit, _ in COUNTERS)],
    [*LAUNCH.values(), *(value for _, _, value in COUNTERS)],
)


def setting(words: str = TINY) -> launches.CaseSetting:
    parser = argparse.ArgumentParser()
    profile_kernels.add_arguments(parser)
    return profile_kernels.setting_of(parser.parse_args(words.split()))


def test_a_report_by_sections_is_read() -> None:
    rows = parse_details(DETAILS)
    assert len(rows) == 11 and rows[0]["Metric Value"] == "9,123,456"
    assert rows[8]["Rule Description"] == "On average, each warp waits."
    assert not {"Host Name", "Process ID", "Process Name"} & {name for row in rows for name in row}
    assert figures(rows) == {
        "ns": 9123456.0, "sm_pct": 61.5, "tensor_pct": 58.5, "issued_pct": 35.5, "dram_pct": 4.25,
        "registers": 168.0, "warps_pct": 12.5,
    }  # fmt: skip
    assert list(stalls(rows).items()) == [("wait", 1.5), ("long scoreboard", 0.25)]
    assert parse_details("==ERROR== no kernels were profiled\n") == []


def test_a_report_by_counters_is_read() -> None:
    rows = parse_raw(RAW)
    assert len(rows) == 8 and rows[0] == {
        "ID": "0", "Metric Name": "gpu__time_duration.sum", "Metric Unit": "ns",
        "Metric Value": "9123456",
    }  # fmt: skip
    assert figures(rows) == {
        "ns": 9123456.0, "tensor_pct": 61.25, "l2_hit_pct": 88.5, "registers": 168.0
    }  # fmt: skip
    assert list(stalls(rows).items()) == [("gmma", 2.5), ("barrier", 0.125)]
    assert parse_raw("") == []


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [("1.5", "msecond", 1.5e6), ("2", "us", 2e3), ("3", "parsec", None), ("n/a", "ns", None)],
)
def test_times_in_other_units(value: str, unit: str, expected: float | None) -> None:
    row = {"Metric Name": "Duration", "Metric Unit": unit, "Metric Value": value}
    assert figures([row]).get("ns") == expected


def test_one_launch_is_profiled_with_the_clocks_as_they_are() -> None:
    words = ncu_words("ncu", Case("dkdv", True, 32768, 32768), "report", ("--batch", "1"))
    text = " ".join(words)
    assert "--clock-control none" in text and "--kernel-name regex:^flash_dkdv_.*" in text
    assert "--launch-skip 2 --launch-count 1" in text
    assert text.count("--section ") == 7 and "--section WarpStateStats" in text
    assert words[-3:] == ("1", "--launch", "dkdv causal 32k")


def fake_ncu(folder: Path, body: str) -> Path:
    """A program in the place of ncu: `words` are its arguments, by name where they have a value."""
    program = folder / "ncu"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nwords = sys.argv[1:]\n"
        "def value(name):\n    return words[words.index(name) + 1]\n" + body
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


WORKS = f"""
if "--export" in words:
    open(value("--export") + ".ncu-rep", "w").write(words[-1])
elif value("--page") == "raw":
    print({RAW!r})
else:
    assert value("--print-details") == "all" and open(value("--import")).read()
    print({DETAILS!r})
"""


def test_every_kernel_is_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_ncu(tmp_path, WORKS)
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "profile.json"
    assert profile_kernels.main([*TINY.split(), "--kernels", "fwd,dq", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [row["case"] for row in report["rows"]] == [
        "fwd full 33", "fwd causal 33", "dq causal 33", "dq full 33"
    ]  # fmt: skip
    for row in report["rows"]:
        assert row["config"] == "64x64 4w 1s" and len(row["rows"]) == 11 + 8 and row["note"] == ""
        assert row["figures"]["tensor_pct"] == 61.25 and row["figures"]["issued_pct"] == 35.5
        assert list(row["stalls"])[0] == "gmma"
    shown = capsys.readouterr().out
    assert "gmma 2.5, wait 1.5" in shown
    assert shown.splitlines()[-1].startswith("4 of 4 kernels profiled in")


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "ERR_NVGPUCTRPERM - "),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "LibraryNotLoaded"),
    ],
)
def test_where_ncu_may_not_look_nothing_fails(
    says: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = fake_ncu(tmp_path, f"print({says!r}); sys.exit(9)")
    bench = Profile(setting(), str(program), tmp_path / "x.json")
    bench.run()
    assert words in bench.refused and bench.failures == []
    assert bench.rows[0].note.startswith(gpu.NCU_REFUSED)
    assert all(row.note.startswith("not profiled: ") for row in bench.rows[1:])
    assert json.loads((tmp_path / "x.json").read_text())["refused"] == bench.refused
    verdict, detail = gpu.profiled(0, f"torch warns\n{bench.summary()}\n")
    assert verdict == gpu.SKIPPED and words in detail
    assert gpu.profiled(0, "6 of 6 kernels profiled in 90 s")[0] == gpu.PASSED


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ("print('==ERROR== Unknown Error'); sys.exit(1)", "ncu failed, status 1: ==ERROR== Unkn"),
        ("print('==WARNING== No kernels were profiled.')", "ncu failed, status 0: ==WARNING== No"),
        ("import time; time.sleep(60)", "ncu failed, stopped after 1 s"),
        (
            "if '--export' in words:\n    open(value('--export'), 'w')\nelse:\n    sys.exit(2)",
            "ncu reported nothing that is known",
        ),
    ],
    ids=["fails", "finds nothing", "hangs", "cannot read"],
)
def test_a_kernel_that_is_not_profiled_is_a_failure(
    body: str, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_kernels, "CASE_SECONDS", 1.0)
    bench = Profile(setting(f"{TINY} --kernels dq"), str(fake_ncu(tmp_path, body)))
    bench.run()
    assert [row.note.startswith(note) for row in bench.rows] == [True, True]
    assert bench.failures[0].startswith(f"dq causal 33: {note}")


def test_a_budget_leaves_kernels_out(tmp_path: Path) -> None:
    bench = Profile(setting(f"{TINY} --budget 1e-9"), "no-such-program")
    bench.run()
    assert {row.note for row in bench.rows} == {"not profiled: beyond the budget of 1e-09 s"}


def test_what_runs_under_ncu_launches_often_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch that is profiled is one of the case's own, behind one that warms up."""
    launched: list[str] = []
    run = launches.Launch.run

    def counted(self: launches.Launch) -> object:
        launched.append(self.kernel.__name__)
        return run(self)

    monkeypatch.setattr(launches.Launch, "run", counted)
    for case, before in (("fwd full 33", 1), ("dq causal 33", 0)):
        launched.clear()
        assert profile_kernels.main([*TINY.split(), "--launch", case]) == 0
        kernel = f"flash_{case.split()[0]}_kernel"
        assert launched.count(kernel) == before + profile_kernels.LAUNCHES
        assert before + 1 <= profile_kernels.SKIPPED_LAUNCHES < launched.count(kernel) or not before
    with pytest.raises(ValueError, match="--launch must be of"):
        profile_kernels.main([*TINY.split(), "--launch", "dq"])


def test_without_ncu_or_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert profile_kernels.main([]) == 2
    assert "has no GPU that torch can use" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(gpu, "NCU_PATHS", ())
    assert profile_kernels.main(TINY.split()) == 2
    assert "ncu (Nsight Compute) is not installed" in capsys.readouterr().err
    (part,) = gpu.parts_of("profile", tmp_path)
    assert part.skip == "ncu is not installed"


def test_ncu_is_found_where_its_installer_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("2024.1.0", "2025.3.1"):
        (tmp_path / version).mkdir()
        fake_ncu(tmp_path / version, "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(gpu, "NCU_PATHS", (str(tmp_path / "*"),))
    assert gpu.find_ncu() == str(tmp_path / "2025.3.1" / "ncu")


def test_a_table_takes_what_is_there() -> None:
    rows = [
        profile_kernels.ProfileRow("fwd full", "c", {"ns": 9123456.0}, {"wait": 1.5, "x": 0.5}),
        profile_kernels.ProfileRow("dq full", "c", note="ncu failed"),
    ]
    shown = [list(column.cells) for column in table(rows, "title").columns]
    assert shown[2] == ["9.12", ""] and shown[3] == ["", ""]
    assert shown[-1] == ["wait 1.5, x 0.5", "ncu failed"]
