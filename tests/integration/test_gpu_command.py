"""`ring-attn gpu`: how it runs its parts, by parts that pass, fail, hang and are skipped."""

import argparse
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from ring_attn.bench import gpu, sanitize
from ring_attn.bench.gpu import FAILED, PASSED, SKIPPED, TIMEOUT, Outcome, Part
from ring_attn.cli import main


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def run(out: Path, *parts: Part, seconds: float = 60.0) -> list[Outcome]:
    return gpu.run_parts(parts, out, seconds, {"command": "ring-attn gpu"})


def test_parts_pass_fail_and_are_skipped(tmp_path: Path) -> None:
    outcomes = run(
        tmp_path,
        Part("good", python("print('all is well')")),
        Part("bad", python("import sys; print('oh'); sys.exit(3)")),
        Part("absent", ("no-such-program",), skip="not installed"),
    )
    assert [(o.name, o.verdict, o.detail) for o in outcomes] == [
        ("good", PASSED, "all is well"),
        ("bad", FAILED, "exit status 3: oh"),
        ("absent", SKIPPED, "not installed"),
    ]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["command"] == "ring-attn gpu" and report["not_run"] == []
    assert [part["verdict"] for part in report["parts"]] == [PASSED, FAILED, SKIPPED]
    assert report["parts"][1]["tail"] == ["oh"]
    log = (tmp_path / "log.txt").read_text()
    assert "##### good:" in log and "all is well" in log and "oh" in log
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "report.json"]


def test_a_part_that_hangs_is_stopped_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.5)
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    (outcome,) = run(tmp_path, Part("hangs", python(code), seconds=1.5))
    assert time.monotonic() - start < 20
    assert (outcome.verdict, outcome.detail) == (TIMEOUT, "at its limit of 2 s")
    assert not running(int(outcome.tail[0]))


def running(pid: int) -> bool:
    """Whether a process still computes; what is dead and not yet buried does not."""
    for _ in range(50):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("ignored", [False, True], ids=["", "interrupts ignored here"])
def test_a_part_that_is_interrupted_can_write_what_it_has(tmp_path: Path, ignored: bool) -> None:
    here = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    code = (
        "import time\n"
        "try:\n    print('begun', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('what there is', flush=True)\n"
    )
    try:
        (outcome,) = run(tmp_path, Part("long", python(code), seconds=2.0))
    finally:
        signal.signal(signal.SIGINT, here)
    assert outcome.verdict == TIMEOUT
    assert outcome.tail == ("begun", "what there is")


def test_a_report_exists_before_the_first_part_ends(tmp_path: Path) -> None:
    code = (
        f"import json; report = json.load(open({str(tmp_path / 'report.json')!r}))\n"
        "assert report['parts'][0]['name'] == 'first' and report['not_run'] == ['second']\n"
    )
    outcomes = run(tmp_path, Part("first", python("")), Part("second", python(code)))
    assert [outcome.verdict for outcome in outcomes] == [PASSED, PASSED]


def test_time_is_kept_for_the_parts_behind(tmp_path: Path) -> None:
    shows = "import sys; print(*sys.argv[1:])"
    parts = (
        Part("rest", (*python(shows), gpu.BUDGET), takes_rest=True),
        Part("behind", python("print('done')"), seconds=20.0),
        Part("absent", ("no-such-program",), seconds=30.0, skip="it takes no time"),
    )
    rest, behind, _ = run(tmp_path, *parts, seconds=60.0)
    assert 0 < int(rest.detail) <= 60 - 20 - gpu.BENCH_MARGIN
    assert behind.verdict == PASSED
    (late,) = run(tmp_path, parts[1], seconds=5.0)
    assert (late.verdict, late.detail) == (TIMEOUT, "the parts before it left no time")


def test_the_report_names_the_whole_command(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    words = ["--seconds", "100", "--bench", "--seqlen 2k --ring 0", "--parts", "bench"]
    command = gpu.facts(parser.parse_args(words))["command"]
    assert shlex.split(command) == ["ring-attn", "gpu", *words]


@pytest.mark.parametrize(("words", "seconds"), [("--set tune", 540.0), ("", 500.0)])
def test_every_set_has_its_limit(words: str, seconds: float) -> None:
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    args = parser.parse_args(words.split())
    assert gpu.seconds_of(args) == seconds
    found = parser.parse_args(shlex.split(gpu.facts(args)["command"])[2:])
    assert found.set == args.set and gpu.seconds_of(found) == seconds
    assert gpu.seconds_of(parser.parse_args([*words.split(), "--seconds", "7"])) == 7.0


def test_tables_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "for i in range(200): print('line', i)"
    run(tmp_path, Part("quiet", python(code)), Part("shown", python(code), shows=True))
    lines = capsys.readouterr().out.splitlines()
    shown = lines[lines.index("shown ...") + 1 : -1]
    assert shown == [f"line {i}" for i in range(200 - gpu.SHOWN_LINES, 200)]
    assert lines[lines.index("quiet ...") + 1].startswith("  passed")


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpu", "--out", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().err == "ring-attn gpu: this machine has no GPU that torch can use\n"
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(("code", "status"), [("", 0), ("raise SystemExit(1)", 1)])
def test_exit_status(
    code: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "facts", lambda args: {})
    skipped = Part("absent", ("no-such-program",), skip="not installed")
    monkeypatch.setattr(gpu, "parts", lambda out, bench: [Part("one", python(code)), skipped])
    assert main(["gpu", "--out", str(tmp_path)]) == status
    shown = capsys.readouterr().out
    assert ("failed" in shown) == bool(status) and "not installed" in shown
    assert main(["gpu", "--out", str(tmp_path), "--parts", "absent"]) == 0
    assert main(["gpu", "--out", str(tmp_path), "--parts", "two"]) == 2
    assert "--parts must be of ['one', 'absent'], got 'two'" in capsys.readouterr().err


def test_the_parts_fit_the_time_and_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = gpu.parts(tmp_path)
    bench = next(part for part in parts if part.name == "bench")
    assert sum(part.seconds for part in parts if part is not bench) < gpu.SETS["kernels"] < 540
    names = {word.rpartition("/")[2] for part in parts for word in part.command if ".." not in word}
    written = {name for name in names if name.endswith((".xml", ".json", ".png"))}
    assert len(written | {"report.json", "log.txt"}) == 6
    monkeypatch.setattr(gpu, "source_root", lambda: tmp_path)
    skipped = [part.name for part in gpu.parts(tmp_path) if "no tests" in part.skip]
    assert skipped == ["gpu tests", "kernel tests"]


def test_what_is_not_installed_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def words() -> set[str]:
        return {word for part in gpu.parts(tmp_path) for word in part.command}

    monkeypatch.setattr(gpu, "installed", lambda package: True)
    assert {"--plot", "-n"} <= words()
    monkeypatch.setattr(gpu, "installed", lambda package: False)
    assert not {"--plot", "-n"} & words()


def test_no_test_is_no_success() -> None:
    assert gpu.tested(0, "....\n12 passed, 1 skipped in 3.4s\n")[0] == PASSED
    assert gpu.tested(0, "ssss\n12 skipped in 3.4s\n") == (
        FAILED,
        "no test passed: 12 skipped in 3.4s",
    )
    assert gpu.tested(1, "1 failed, 12 passed in 3.4s\n")[0] == FAILED


@pytest.mark.parametrize(
    ("status", "output", "verdict"),
    [
        (0, "9 cases, 0 wrong\n========= ERROR SUMMARY: 0 errors\n", PASSED),
        (86, "========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors\n", FAILED),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", PASSED),
        (1, "1 cases, 1 wrong\n========= ERROR SUMMARY: 0 errors\n", FAILED),
        (255, "========= Error: Device not supported. Please refer to the manual\n", SKIPPED),
        (0, "nothing at all", FAILED),
    ],
)
def test_what_compute_sanitizer_says(status: int, output: str, verdict: str) -> None:
    assert gpu.sanity(status, output)[0] == verdict


def test_a_sanitizer_is_found_beside_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(gpu, "SANITIZER_PATHS", ())
    assert gpu.find_sanitizer() is None
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert gpu.find_sanitizer() == str(program)


def test_children_compile_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" not in gpu.environment()


@pytest.mark.parametrize("case", sanitize.CASES, ids=str)
def test_small_shapes(case: sanitize.Case) -> None:
    verdicts = sanitize.verdicts(case, "reference", "cpu")
    assert len(verdicts) == (6 if case.sinks else 5)
    assert all(verdict.ok for verdict in verdicts), verdicts
