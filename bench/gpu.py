"""Everything that needs a GPU, in one command: tests, checks and benchmarks of the kernels.

    make gpu                                   on a machine with a GPU, from a checkout
    python -m ring_attn.bench.gpu --out DIR

Each part runs as a process of its own within a time limit and writes what it finds as it goes, so
that a run that is cut short leaves what it has. Nothing is installed and no setting of the GPU is
changed. DIR holds

    report.json      machine, versions, clocks, commit, and of each part: verdict, seconds, command
    log.txt          what the parts printed
    gpu.xml          tests with the mark `gpu`: every tile config against float64, repeats bit-equal
    kernels.xml      the other tests of the kernels, which run on the GPU where there is one
    kernel.json      `ring-attn bench kernel`, with the ring on one device
    kernel.png       its plot, where matplotlib is installed

Each of the others is a run of its own, with report.json and log.txt of its own:

    tune.json        `--set tune`: the fastest configs of the kernels, searched, checked and timed;
                     lines for `kernels/configs.py` at the end (`tune`)
    ring_cost.json   `--set ring`: 2 to 16 ranks one by one: kernels, host time, copies under way
    decode.json      `--set decode`: a query a sequence against long caches, by the bytes it reads
    transport.xml    `--set transfers`: real transfers between 2 and 4 processes on one GPU: the
                     bits of the local transport, by symmetric memory, and by NCCL from 2.30 on
                     (LD_PRELOAD=PATH/libnccl.so.2 where torch's is older)
    transfers.json   and copy engines against copies by SMs
    length.json      `--set length`: a million tokens, and the longest sequence, offloaded or not
    profile.json     `--set profile`: what limits each kernel, by ncu (`profile_kernels`)

Where a command may take ten minutes and no more, each set is a command of its own, in this order of
value; the seconds are limits, so none takes longer whatever hangs.

    kernels      500    small shapes 60, gpu tests 180, kernel tests 120, memcheck 45, racecheck 45,
                        bench what is left
    tune         540    tune 540
    ring         180    ring cost 180
    decode        90    decode 90
    transfers    360    transport tests 240, transfers 120
    length       420    length 420
    profile      200    profile 200

Together they are 39 minutes. Of half an hour leave out `length`, and `profile` too if the others
have taken all of their time. Once the configs that `tune` found are in the table, they want tests
and a comparison of their own, before anything below `ring`: `--parts "gpu tests,bench" --seconds
300`.

Exit status 0 if every part passed or was skipped with a reason, 1 if one failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import ring_attn
from ring_attn.arguments import write_json
from ring_attn.bench.timing import gpu_state
from ring_attn.env import machine
from ring_attn.launch import num_cores

OUT = "gpu-results"

# What one run does, and the seconds of it. Of `kernels` the benchmark gets what the parts before it
# have left, less the limits of those behind it.
SETS = {
    "kernels": 500.0,
    "tune": 540.0,
    "ring": 180.0,
    "decode": 90.0,
    "transfers": 360.0,
    "length": 420.0,
    "profile": 200.0,
}
DEFAULT_SET = "kernels"
SANITIZER_SECONDS = 45.0

# Processes that share the GPU: tests of real transfers, and their times.
TRANSPORT_TESTS = "tests/kernels/test_gpu_transport.py"
TRANSPORT_SECONDS, TRANSFERS_SECONDS = 240.0, 120.0

# Sets of one benchmark, which keeps to a budget: the name of the part, and its module.
BENCHMARKS = {
    "tune": ("tune", "tune"),
    "ring": ("ring cost", "ring_cost"),
    "decode": ("decode", "decode"),
    "length": ("length", "length"),
    "profile": ("profile", "profile_kernels"),
}

# With less than that left a part is not begun.
LEAST_SECONDS = 10.0

# The benchmark's budget ends so long before its limit: to compile for its last cell, and to plot.
BENCH_MARGIN = 30.0

# Stands in a command for the seconds that a part has.
BUDGET = "{budget}"

# After an interrupt a part has so long to write down what it has.
GRACE_SECONDS = 10.0

# At most so many processes compile kernels for tests side by side, where pytest-xdist is there.
TEST_PROCESSES = 12

# Lines of a part's output that the report keeps, and of a benchmark's that are printed.
TAIL_LINES, SHOWN_LINES = 25, 120

BENCH_WORDS = (
    "--seqlen 2k,8k,32k,128k --head-dim 128,64,256 --heads 32/8,64/8 --ring 8 --ring-seqlen 8k"
)

# Where CUDA's tools are beside the PATH; of several versions the newest comes first.
SANITIZER_PATHS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
NCU_PATHS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*", "/usr/local/NVIDIA-Nsight*")

# How `profile_kernels` says that ncu was not let look.
NCU_REFUSED = "ncu cannot look here"

# What the sanitizer says where the driver or a virtual machine does not let it look.
SANITIZER_REFUSED = re.compile(
    r"Device not supported|not supported on this|Unable to initialize|ERR_NVGPUCTRPERM"
    r"|Target application terminated before first instrumented API call",
    re.IGNORECASE,
)
SANITIZER_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")

PASSED, FAILED, SKIPPED, TIMEOUT = "passed", "failed", "skipped", "timed out"


@dataclass(frozen=True)
class Part:
    """One process of the run.

    Attributes:
        name: in the report.
        command: words; BUDGET is replaced by its seconds, less BENCH_MARGIN.
        seconds: its limit; less where less is left of the whole.
        takes_rest: it takes as long as it gets, and leaves their limits to the parts behind it.
        shows: its output is printed, too.
        skip: why it cannot run here.
        judge: turns exit status and output into (verdict, detail).
        variables: of its environment, beside this process's.
    """

    name: str
    command: tuple[str, ...]
    seconds: float = math.inf
    takes_rest: bool = False
    shows: bool = False
    skip: str = ""
    judge: Callable[[int, str], tuple[str, str]] | None = None
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of a part."""

    name: str
    verdict: str
    seconds: float
    detail: str = ""
    command: str = ""
    tail: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ring-attn gpu`."""
    parser.add_argument("--out", type=Path, default=Path(OUT), help=f"folder, made here ({OUT})")
    limits = ", ".join(f"{name} {seconds:g}" for name, seconds in SETS.items())
    parser.add_argument("--seconds", type=float, help=f"limit of the whole run ({limits})")
    parser.add_argument(
        "--set", choices=tuple(SETS), default=DEFAULT_SET, help="of parts, a run of its own"
    )
    parser.add_argument("--parts", help="comma-separated, of those that a run lists; all if absent")
    parser.add_argument("--bench", default=BENCH_WORDS, help="options of the benchmark")


def run(args: argparse.Namespace) -> int:
    """Runs the parts and shows a table; 1 if one failed, 2 where there is no GPU."""
    if not torch.cuda.is_available():
        print("ring-attn gpu: this machine has no GPU that torch can use", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = chosen_parts(parts_of(args.set, args.out.resolve(), args.bench), args.parts)
    outcomes = run_parts(chosen, args.out, seconds_of(args), facts(args))
    Console(width=150).print(table(outcomes))
    return 0 if all(outcome.verdict in (PASSED, SKIPPED) for outcome in outcomes) else 1


def seconds_of(args: argparse.Namespace) -> float:
    """Limit of the whole run."""
    return SETS[args.set] if args.seconds is None else float(args.seconds)


def parts_of(name: str, out: Path, bench: str = BENCH_WORDS) -> list[Part]:
    """The parts of a set by its name."""
    if name in BENCHMARKS:
        return [benchmark(name, out)]
    return {"kernels": parts, "transfers": transfer_parts}[name](out, bench)


def benchmark(set_name: str, out: Path) -> Part:
    """A benchmark that ends by itself, before its limit, and is a set of its own."""
    name, module = BENCHMARKS[set_name]
    json = out / f"{name.replace(' ', '_')}.json"
    words = ("--budget", BUDGET, "--json", str(json))
    needs_ncu = set_name == "profile"
    return Part(
        name,
        (sys.executable, "-m", f"ring_attn.bench.{module}", *words),
        SETS[set_name],
        shows=True,
        skip="ncu is not installed" if needs_ncu and find_ncu() is None else "",
        judge=profiled if needs_ncu else None,
    )


def parts(out: Path, bench: str = BENCH_WORDS) -> list[Part]:
    """The parts in their order: what is cheap and tells most comes first."""
    python, root = sys.executable, source_root()
    there = (root / "tests" / "kernels").is_dir()
    no_tests = "" if there else "there are no tests beside the package"
    sanitizer = find_sanitizer()
    no_sanitizer = "" if sanitizer else "compute-sanitizer is not installed"
    small = (python, "-m", "ring_attn.bench.sanitize")
    plot = ("--plot", str(out / "kernel.png")) if installed("matplotlib") else ()

    def pytest(name: str, seconds: float, xml: str, *words: str) -> Part:
        several = installed("xdist")
        processes = min(TEST_PROCESSES, num_cores()) if several else 1
        spread = ("-n", str(processes)) if several else ()
        command = (
            python, "-m", "pytest", *words, "-q", "-p", "no:cacheprovider", "--durations=10",
            f"--junit-xml={out / xml}", *spread,
        )  # fmt: skip
        # The oracles are computed on the CPU: as many threads as cores in all.
        threads = (("OMP_NUM_THREADS", str(num_cores() // processes)),)
        return Part(name, command, seconds, skip=no_tests, judge=tested, variables=threads)

    def sanitized(tool: str) -> Part:
        words = (sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "86")
        return Part(tool, (*words, *small), SANITIZER_SECONDS, skip=no_sanitizer, judge=sanity)

    return [
        Part("small shapes", small, 60.0),
        pytest("gpu tests", 180.0, "gpu.xml", "tests", "-m", "gpu", f"--ignore={TRANSPORT_TESTS}"),
        pytest(
            *("kernel tests", 120.0, "kernels.xml", "tests/kernels", "-m", "not gpu and not slow"),
            "--ignore=tests/kernels/test_aot.py",  # compiles for GPUs that are not here
            # Among the GPU tests, with the tiles of the table in place of small ones.
            "--ignore=tests/kernels/test_same_bits_all_gather.py",
            "--ignore=tests/kernels/test_same_bits_ulysses.py",
        ),
        Part(
            "bench",
            (
                *(python, "-m", "ring_attn", "bench", "kernel", *bench.split()),
                *("--budget", BUDGET),
                *("--json", str(out / "kernel.json"), *plot),
            ),
            takes_rest=True,
            shows=True,
        ),
        sanitized("memcheck"),
        sanitized("racecheck"),
    ]


def transfer_parts(out: Path, bench: str = BENCH_WORDS) -> list[Part]:
    """Those of `--set transfers`; they start the processes that share the GPU."""
    there = (source_root() / TRANSPORT_TESTS).is_file()
    return [
        Part(
            "transport tests",
            (
                *(sys.executable, "-m", "pytest", TRANSPORT_TESTS, "-q", "-p", "no:cacheprovider"),
                *("--durations=10", f"--junit-xml={out / 'transport.xml'}"),
            ),
            TRANSPORT_SECONDS,
            skip="" if there else "there are no tests beside the package",
            judge=tested,
        ),
        Part(
            "transfers",
            (
                *(sys.executable, "-m", "ring_attn.bench.transfers"),
                *("--json", str(out / "transfers.json")),
            ),
            TRANSFERS_SECONDS,
        ),
    ]


def chosen_parts(all_parts: Sequence[Part], names: str | None) -> list[Part]:
    """Those of the names, in their own order; ValueError names the valid ones."""
    if names is None:
        return list(all_parts)
    known, wanted = [part.name for part in all_parts], names.split(",")
    for name in wanted:
        if name not in known:
            raise ValueError(f"--parts must be of {known}, got {name!r}")
    return [part for part in all_parts if part.name in wanted]


def run_parts(
    chosen: Sequence[Part], out: Path, seconds: float, facts: dict[str, Any]
) -> list[Outcome]:
    """Runs parts one after another and keeps `out/report.json` up to date.

    Args:
        chosen: the parts.
        out: a folder that exists.
        seconds: limit of all together.
        facts: what the report says beside the parts.
    """
    start, outcomes = time.monotonic(), list[Outcome]()
    (out / "log.txt").write_text("", encoding="utf-8")

    def report() -> None:
        payload = {
            **facts,
            "seconds": time.monotonic() - start,
            "parts": [asdict(outcome) for outcome in outcomes],
            "not_run": [part.name for part in chosen[len(outcomes) :]],
        }
        fresh = out / "report.json.part"
        write_json(fresh, payload)
        fresh.replace(out / "report.json")

    report()
    for index, part in enumerate(chosen):
        left = seconds - (time.monotonic() - start)
        if part.takes_rest:
            left -= sum(behind.seconds for behind in chosen[index + 1 :] if not behind.skip)
        print(f"{part.name} ...", flush=True)
        outcomes.append(run_part(part, out, left))
        report()
        shown = outcomes[-1]
        print(f"  {shown.verdict} after {shown.seconds:.1f} s: {shown.detail}", flush=True)
    return outcomes


def run_part(part: Part, out: Path, left: float) -> Outcome:
    """Runs one part within its limit and what is left; its output goes to `out/log.txt`."""
    seconds = min(part.seconds, left)
    budget = f"{max(seconds - BENCH_MARGIN, 0.0):.0f}"
    words = tuple(budget if word == BUDGET else word for word in part.command)
    command = " ".join(words)
    if part.skip:
        return Outcome(part.name, SKIPPED, 0.0, part.skip, command)
    if left < LEAST_SECONDS:
        return Outcome(part.name, TIMEOUT, 0.0, "the parts before it left no time", command)
    start, path = time.monotonic(), out / "log.txt"
    with path.open("ab") as log:
        log.write(f"\n##### {part.name}: {command}\n".encode())
        log.flush()
        offset = log.tell()
        status = run_within(words, seconds, log, dict(part.variables))
    took = time.monotonic() - start
    with path.open("rb") as log:
        log.seek(offset)
        output = log.read().decode(errors="replace")
    if status is None:
        verdict, detail = TIMEOUT, f"at its limit of {seconds:.0f} s"
    else:
        verdict, detail = (part.judge or by_status)(status, output)
    lines = output.splitlines()
    if part.shows:
        print(*lines[-SHOWN_LINES:], sep="\n", flush=True)
    tail = tuple(lines[-TAIL_LINES:])
    return Outcome(part.name, verdict, took, detail, command, tail)


def run_within(
    words: Sequence[str], seconds: float, output: Any, variables: dict[str, str]
) -> int | None:
    """The exit status; None where it was stopped: interrupted first, so that it can write."""
    process = subprocess.Popen(
        words,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        cwd=source_root(),
        env={**environment(), **variables},
        start_new_session=True,  # a group of its own, which is stopped whole
        # What a shell starts in the background ignores interrupts, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        process.wait()


def tested(status: int, output: str) -> tuple[str, str]:
    """Of pytest: passed if nothing failed and something passed; skipping everything is neither."""
    verdict, detail = by_status(status, output)
    if verdict == PASSED and not re.search(r"\b[1-9]\d* passed", detail):
        return FAILED, f"no test passed: {detail}"
    return verdict, detail


def by_status(status: int, output: str) -> tuple[str, str]:
    """Passed if the exit status is 0; the detail is the last line of the output."""
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""
    return (PASSED, last) if status == 0 else (FAILED, f"exit status {status}: {last}")


def sanity(status: int, output: str) -> tuple[str, str]:
    """Of compute-sanitizer: skipped where it may not look, else by its summary."""
    refused = SANITIZER_REFUSED.search(output)
    if refused:
        return SKIPPED, f"compute-sanitizer cannot look here: {refused[0]}"
    summaries = SANITIZER_SUMMARY.findall(output)
    if status == 0 and summaries:
        return PASSED, summaries[-1]
    return FAILED, f"exit status {status}: {summaries[-1] if summaries else 'no summary'}"


def installed(package: str) -> bool:
    """Whether a package that a part can do without is here."""
    return importlib.util.find_spec(package) is not None


def profiled(status: int, output: str) -> tuple[str, str]:
    """Of `profile_kernels`: skipped where ncu may not look."""
    verdict, detail = by_status(status, output)
    return (SKIPPED, detail) if NCU_REFUSED in detail else (verdict, detail)


def find_sanitizer() -> str | None:
    """compute-sanitizer, if it is installed."""
    return find_program("compute-sanitizer", SANITIZER_PATHS)


def find_ncu() -> str | None:
    """Nsight Compute on the command line, if it is installed."""
    return find_program("ncu", NCU_PATHS)


def find_program(name: str, paths: Sequence[str]) -> str | None:
    """A tool of CUDA on the PATH, beside CUDA_HOME, or in one of the folders (or patterns)."""
    homes = [os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
    folders = [f"{home}/bin" for home in homes if home]
    folders += [folder for path in paths for folder in sorted(glob(path), reverse=True)]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


def source_root() -> Path:
    """The folder that holds the package: a checkout, or where it is installed."""
    return Path(ring_attn.__file__).parents[1]


def environment() -> dict[str, str]:
    """This one's, for kernels that are compiled, and for output that comes at once."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """What the report says of the run itself."""
    words = ["ring-attn", "gpu", "--seconds", f"{seconds_of(args):g}", "--bench", args.bench]
    if args.set != DEFAULT_SET:
        words += ["--set", args.set]
    if args.parts is not None:
        words += ["--parts", args.parts]
    return {
        "command": shlex.join(words),
        "machine": machine(),
        "gpu_state": gpu_state(),
        "commit": commit(),
    }


def commit() -> str | None:
    """Of the checkout, with "+" where files differ from it; None where there is none."""
    git = ["git", "-C", str(source_root())]
    try:
        found = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=20
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")


def table(outcomes: Sequence[Outcome]) -> Table:
    """A line for each part."""
    colours = {PASSED: "green", SKIPPED: "yellow"}
    found = Table("part", "verdict", "seconds", "", title="ring-attn gpu", title_justify="left")
    for outcome in outcomes:
        verdict = Text(outcome.verdict, colours.get(outcome.verdict, "red"))
        found.add_row(outcome.name, verdict, f"{outcome.seconds:.1f}", Text(outcome.detail))
    return found


def main() -> int:
    """`python -m ring_attn.bench.gpu`."""
    parser = argparse.ArgumentParser(
        prog="python -m ring_attn.bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
