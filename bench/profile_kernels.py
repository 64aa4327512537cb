"""What limits each kernel: Nsight Compute (`ncu`) over one launch of each, in a table.

    python -m ring_attn.bench.profile_kernels --json DIR/profile.json

Every kernel has a process of its own, which launches it to warm up and once more to be profiled, in
its frozen config. Clocks are left as they are (--clock-control none). What ncu says is read twice,
by the names of its report (page details) and by those of the counters (page raw), since names
differ between its versions: the table takes what is there, the JSON keeps every row.

    tensor     share of the cycles in which an SM is active that its tensor cores are
    issued     share of the cycles in which a scheduler has issued an instruction
    stalls     what a warp waits for most, in cycles for each instruction that is issued
    DRAM, L2   share of the memory's rate; hits of the cache
    warps      that were active, of those that an SM can hold

Where ncu may not look, its words are all there is, and the exit status is 0.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ring_attn.bench.gpu import NCU_REFUSED, find_ncu, run_within
from ring_attn.bench.launches import (
    Bed,
    Case,
    CaseSetting,
    add_case_arguments,
    frozen_of,
    label,
    no_device,
    synchronize,
)
from ring_attn.bench.launches import case_setting as setting_of
from ring_attn.bench.one_device import Findings, finish, run_module

MODULE = "ring_attn.bench.profile_kernels"

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "WarpStateStats",
    "SchedulerStats",
    "Occupancy",
    "LaunchStats",
)

# A kernel is launched so often, at least; what makes its inputs may launch it once before.
LAUNCHES, SKIPPED_LAUNCHES = 3, 2

# Of one kernel under ncu, torch's start included, and of reading a report.
CASE_SECONDS, READ_SECONDS = 60.0, 30.0

# What ncu says where the driver or a virtual machine does not let it look.
REFUSALS = re.compile(
    r"ERR_NVGPUCTRPERM[^\n]*|Failed to initialize the profiler[^\n]*|LibraryNotLoaded[^\n]*"
    r"|[^\n]*profiling is not supported[^\n]*|[^\n]*Cannot find compatible module[^\n]*"
    r"|Target application terminated before first instrumented API call",
    re.IGNORECASE,
)

# Columns that tell of the machine and not of the kernel.
NOT_KEPT = ("Process ID", "Process Name", "Host Name", "Context", "Stream")

# Figure -> names in ncu's reports and of its counters, the first that has a number. Of several
# counters with one name, as there are for the pipes of the tensor cores, the greatest counts.
FIGURES = {
    "ns": (r"gpu__time_duration\.\w+", r"Duration"),
    "sm_pct": (
        r"sm__throughput\.avg\.pct_of_peak_sustained_elapsed",
        r"Compute \(SM\) (Throughput|\[%\])",
    ),
    "tensor_pct": (
        r"sm__(inst_executed_)?pipe_tensor\w*\.avg\.pct_of_peak_sustained_active",
        r"Tensor.*",
    ),
    "issued_pct": (
        r"sm__inst_issued\.avg\.pct_of_peak_sustained_active",
        r"Issue Slots Busy",
        r"smsp__issue_active\.avg\.pct",
        r"One or More Eligible",
    ),
    "l2_hit_pct": (r"lts__t_sector_hit_rate\.pct", r"L2 Hit Rate"),
    "dram_pct": (
        r"gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed",
        r"dram__throughput\.avg\.pct_of_peak_sustained_elapsed",
        r"DRAM Throughput",
    ),
    "registers": (r"launch__registers_per_thread", r"Registers Per Thread"),
    "warps_pct": (r"sm__warps_active\.avg\.pct_of_peak_sustained_active", r"Achieved Occupancy"),
}
# Of warps that are stalled, ncu counts apart those while none is issued.
STALLS = re.compile(
    r"smsp__average_warps?_issue_stalled_(?P<counter>(?!\w+_not_issued_)\w+?)_per_issue_active\.ratio"
    r"|Stall (?P<shown>.+)"
)
SHOWN_STALLS = 2

# Nanoseconds by ncu's units of time, with and without --print-units base.
NANOSECONDS = {
    **{"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3},
    **{"ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9},
}


@dataclass(frozen=True)
class ProfileRow:
    """One kernel under ncu.

    Attributes:
        case: in words.
        config: its tile, warps and stages.
        figures: of FIGURES, those that were found.
        stalls: cycles a warp waits for each issued instruction, by the reason, longest first.
        rows: all that ncu reported, by the names of its columns.
        seconds: that it took.
        note: why there is nothing.
    """

    case: str
    config: str
    figures: Mapping[str, float] = field(default_factory=dict)
    stalls: Mapping[str, float] = field(default_factory=dict)
    rows: Sequence[Mapping[str, str]] = ()
    seconds: float = 0.0
    note: str = ""


class Profile(Findings[CaseSetting, ProfileRow]):
    """One run: kernel by kernel, with the report on disk up to date."""

    def __init__(self, setting: CaseSetting, ncu: str, json: Path | None = None) -> None:
        """As `Findings`; it is saved after every kernel.

        Args:
            setting: which kernels.
            ncu: the program.
            json: where the report goes.
        """
        super().__init__(setting, shlex.join(["python", "-m", MODULE, *setting.words]), json)
        self.refused = ""
        self._ncu = ncu

    def run(self) -> None:
        """Every kernel that there is time for; none after ncu has refused to look."""
        for case in self.setting.cases():
            frozen = frozen_of(self.setting.problem_of(case.causal, case.rows))(case.kind)
            left = self.left()
            if left <= 0.0 or self.refused:
                why = self.refused or f"beyond the budget of {self.setting.budget:g} s"
                row = ProfileRow(str(case), label(frozen), note=f"not profiled: {why}")
            else:
                row = self._profile(case, label(frozen), min(left, CASE_SECONDS))
            self.rows.append(row)
            # What should have been profiled and was not; of what ncu refuses nothing should.
            notes = [] if self.refused else [one for one in self.rows if one.note]
            self.failures = [f"{one.case}: {one.note}" for one in notes]
            self.save()
        self.save(last=True)

    def more(self) -> dict[str, Any]:
        """What its report says beside."""
        return {"refused": self.refused, "summary": self.summary()}

    def summary(self) -> str:
        """One line for all."""
        if self.refused:
            return f"{NCU_REFUSED}: {self.refused}"
        done, seconds = sum(not row.note for row in self.rows), self.seconds
        return f"{done} of {len(self.rows)} kernels profiled in {seconds:.0f} s"

    def _profile(self, case: Case, config: str, seconds: float) -> ProfileRow:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            report, log = Path(folder) / "report", Path(folder) / "log"
            with log.open("wb") as output:
                words = ncu_words(self._ncu, case, str(report), self.setting.words)
                status = run_within(words, seconds, output, {})
            said = log.read_text(errors="replace")
            refused = REFUSALS.search(said)
            if refused:
                self.refused = refused[0].strip(" =")
                return ProfileRow(str(case), config, note=f"{NCU_REFUSED}: {self.refused}")
            files = sorted(Path(folder).glob("report*"))
            if status != 0 or not files:
                last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
                what = f"stopped after {seconds:.0f} s" if status is None else f"status {status}"
                return ProfileRow(str(case), config, note=f"ncu failed, {what}: {last.strip()}")
            rows = parse_details(self._read(files[0], "details")) + parse_raw(
                self._read(files[0], "raw")
            )
        found, stalled = figures(rows), stalls(rows)
        note = "" if found else "ncu reported nothing that is known"
        took = time.monotonic() - start
        return ProfileRow(str(case), config, found, stalled, rows, took, note)

    def _read(self, file: Path, page: str) -> str:
        """A page of a report as CSV; empty, with ncu's words on stderr, where it cannot be had."""
        words = [self._ncu, "--import", str(file), "--page", page, "--csv"]
        words += ["--print-units", "base"]
        words += ["--print-details", "all"] if page == "details" else []
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=READ_SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        if done.returncode:
            print(done.stdout, done.stderr, file=sys.stderr)
            return ""
        return done.stdout


def ncu_words(ncu: str, case: Case, report: str, words: Sequence[str]) -> tuple[str, ...]:
    """The command that profiles one launch of a case into a report."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    return (
        *(ncu, "--config-file", "off", "--clock-control", "none"),
        *("--kernel-name", f"regex:^flash_{case.kernel}_.*"),
        *("--launch-skip", str(SKIPPED_LAUNCHES), "--launch-count", "1"),
        *sections,
        *("--export", report, "--force-overwrite"),
        *(sys.executable, "-m", MODULE, *words, "--launch", str(case)),
    )


def launch(setting: CaseSetting, name: str) -> None:
    """Launches a case's kernel; what runs under ncu."""
    by_name = {str(case): case for case in setting.cases()}
    if name not in by_name:
        raise ValueError(f"--launch must be of {list(by_name)}, got {name!r}")
    case = by_name[name]
    problem = setting.problem_of(case.causal, case.rows)
    frozen = frozen_of(problem)
    trial = Bed(case, problem.data(), frozen).trial(frozen(case.kind))
    for _ in range(LAUNCHES):
        trial.prepare()
        trial.run()
    synchronize(setting.device)


def parse_details(text: str) -> list[dict[str, str]]:
    """The rows of `ncu --page details --csv`: a metric, or what a rule says, each."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.DictReader(lines[start:])
    return [
        {name: value for name, value in row.items() if name and value and name not in NOT_KEPT}
        for row in rows
    ]


def parse_raw(text: str) -> list[dict[str, str]]:
    """The rows of `ncu --page raw --csv`, which has a column for a counter, in the same form."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    names, units, *launches = [*csv.reader(lines[start:])] or [[], []]
    return [
        {"ID": values[0], "Metric Name": name, "Metric Unit": unit, "Metric Value": value}
        for values in launches
        for name, unit, value in zip(names, units, values, strict=False)
        if "__" in name and value
    ]


def figures(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """FIGURES by name, those that are there."""
    found = {}
    for figure, names in FIGURES.items():
        for name in names:
            values = [
                value
                for row in rows
                if re.fullmatch(name, row.get("Metric Name", ""))
                and (value := _number(row, nanoseconds=figure == "ns")) is not None
            ]
            if values:
                found[figure] = max(values)
                break
    return found


def stalls(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Cycles by the reason for which warps wait, longest first."""
    found: dict[str, float] = {}
    for row in rows:
        match, value = STALLS.fullmatch(row.get("Metric Name", "")), _number(row)
        if match and value is not None:
            reason = (match["counter"] or match["shown"]).lower().replace("_", " ")
            found[reason] = max(value, found.get(reason, 0.0))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _number(row: Mapping[str, str], *, nanoseconds: bool = False) -> float | None:
    """The value of a row; None where it has none, or a time in a unit that is not known."""
    try:
        value = float(row.get("Metric Value", "").replace(",", ""))
    except ValueError:
        return None
    factor = NANOSECONDS.get(row.get("Metric Unit", "")) if nanoseconds else 1.0
    return None if factor is None or math.isnan(value) else factor * value


def table(rows: Sequence[ProfileRow], title: str) -> Table:
    """A line for each kernel."""
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    names = {"case": "", "config": "", "ms": "ns", "SM %": "sm_pct", "tensor %": "tensor_pct",
             "issued %": "issued_pct", "L2 hit %": "l2_hit_pct", "DRAM %": "dram_pct",
             "regs": "registers", "warps %": "warps_pct"}  # fmt: skip
    for name, figure in names.items():
        found.add_column(name, justify="right" if figure else "left", no_wrap=True)
    found.add_column("longest stalls")
    for row in rows:
        if row.note:
            found.add_row(row.case, row.config, *[""] * (len(names) - 2), row.note)
            continue
        values = [row.figures.get(figure) for figure in names.values() if figure]
        texts = [
            "" if x is None else f"{x / 1e6:.3g}" if name == "ms" else f"{x:.4g}"
            for name, x in zip(list(names)[2:], values, strict=True)
        ]
        longest = list(row.stalls.items())[:SHOWN_STALLS]
        found.add_row(
            row.case, row.config, *texts, ", ".join(f"{name} {x:.3g}" for name, x in longest)
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add = parser.add_argument
    add("--launch", metavar="CASE", help="launch one kernel and no more: what runs under ncu")
    add_case_arguments(parser)


def run(args: argparse.Namespace, words: Sequence[str] = ()) -> int:
    """Profiles, writes the JSON as it goes, prints the table; 1 if a kernel was not profiled."""
    if no_device(args, "profile_kernels"):
        return 2
    setting = setting_of(args)
    if args.launch is not None:
        launch(setting, args.launch)
        return 0
    ncu = find_ncu()
    if ncu is None:
        print("profile_kernels: ncu (Nsight Compute) is not installed", file=sys.stderr)
        return 2
    bench = Profile(setting, ncu, args.json)
    bench.run()
    shown = None if args.quiet or bench.refused else table(bench.rows, str(setting))
    return finish(bench, shown, [bench.summary()])


def main(words: Sequence[str] | None = None) -> int:
    """`python -m ring_attn.bench.profile_kernels`."""
    return run_module("profile_kernels", __doc__, add_arguments, run, words)


if __name__ == "__main__":
    sys.exit(main())
