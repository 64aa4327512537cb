"""One screen of what `make gpu` found, to send to us: `python -m ring_attn.bench.summary FOLDER`.

Reads what the three steps have written into the folder:

    tests.xml     pytest's report of the tests that need a GPU
    kernel.json   `ring-attn bench kernel`: TFLOP/s of our kernels, cuDNN's and flash-attn's
    tune.json     `ring-attn tune`: the fastest configs of our kernels

The exit status is 1 if a test or a result failed, or a step left no file.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ring_attn.cli.arguments import format_size, show
from ring_attn.core.values import regular_file

ReportJson = Mapping[str, Any]

# Most lines of failures, and most characters of a line: what a terminal shows at once.
FAILURES, WIDTH = 8, 110


def screen(folder: Path) -> tuple[list[str], bool]:
    """The lines of the screen, and whether all went well."""
    lines, failures = list[str](), list[str]()
    kernel, tune = (_report(folder / name, failures) for name in ("kernel.json", "tune.json"))
    if known := kernel or tune:
        lines += _machine(known)
    lines += _tests(folder / "tests.xml", failures)
    if kernel:
        lines += _kernels(kernel)
        failures += [f"bench kernel: {text}" for text in kernel["failures"]]
    if tune:
        lines += _tuned(tune)
        failures += [f"tune: {text}" for text in tune["failures"]]
    lines += [f"FAILED {text}"[:WIDTH] for text in failures[:FAILURES]]
    if len(failures) > FAILURES:
        lines.append(f"and {len(failures) - FAILURES} more failures")
    return [*lines, f"please send this screen in an issue; {folder}/ has all rows"], not failures


def _report(path: Path, failures: list[str]) -> ReportJson | None:
    try:
        report: ReportJson = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        failures.append(f"{path.name} cannot be read, so its step did not end: {error}")
        return None
    return report


def _machine(report: ReportJson) -> list[str]:
    here = report["machine"]
    versions = {name: version for name, version in here["versions"].items() if version}
    driver = (report["gpu_state"].get("before") or {}).get("driver_version")
    if driver:
        versions["driver"] = driver
    gpus = [f"{gpu['name']}, compute capability {gpu['capability']}" for gpu in here["devices"]]
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [" and ".join(dict.fromkeys(gpus)) or "no GPU", text]


def _tests(path: Path, failures: list[str]) -> list[str]:
    """A line that counts tests; those that failed become failures."""
    try:
        root = ElementTree.fromstring(regular_file(path).read_text(encoding="utf-8"))
    except (OSError, ElementTree.ParseError) as error:
        failures.append(f"{path.name} cannot be read, so the tests did not end: {error}")
        return []
    counts = Counter[str]()
    for case in root.iter("testcase"):
        wrong = [result for kind in ("failure", "error") for result in case.iter(kind)]
        skipped = case.find("skipped")
        if wrong:
            counts["failed"] += 1
            why = (wrong[0].get("message") or "").partition("\n")[0]
            failures.append(f"{case.get('name')}: {why}")
        elif skipped is None:
            counts["passed"] += 1
        else:
            beyond = "beyond the budget" in (skipped.get("message") or "")
            counts["beyond the budget" if beyond else "skipped"] += 1
    if not counts["passed"] + counts["failed"]:
        failures.append("no test ran")
    seconds = sum(float(suite.get("time") or 0.0) for suite in root.iter("testsuite"))
    names = ("passed", "failed", "skipped", "beyond the budget")
    return [f"tests: {', '.join(f'{counts[x]} {x}' for x in names)}; {seconds:.0f} s"]


def _kernels(report: ReportJson) -> Iterator[str]:
    """TFLOP/s of each cell, a column for each implementation that has figures."""
    rows = [row for row in report["rows"] if row["rate"] is not None]
    columns = [*dict.fromkeys(row["impl"] for row in rows)]
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        mask = "causal" if row["causal"] else "full"
        heads = f"{row['heads']}/{row['kv_heads']} x {row['head_dim']}"
        name = f"{heads} {mask} {row['batch']} x {format_size(row['seqlen'])}"
        if row["mode"] != "fwd_bwd":
            cells.setdefault((name, row["mode"]), {})[row["impl"]] = row["rate"]
    if cells:
        yield from _columns(
            ["TFLOP/s", "", *columns],
            [
                [*cell, *(show(of.get(name), ".3g") for name in columns)]
                for cell, of in cells.items()
            ],
        )
    for name, why in report["unavailable"].items():
        yield f"{name}: {why}"[:WIDTH]
    late = sum(row["note"].startswith("not measured") for row in report["rows"])
    yield f"bench kernel: {len(cells)} figures of ours and others, {late} rows beyond the budget"


def _tuned(report: ReportJson) -> Iterator[str]:
    """The fastest config of each kind, and by how much it is faster than ours."""
    timed = [row for row in report["rows"] if row["speed"]]
    best = {row["kind"]: row for row in sorted(timed, key=lambda row: row["speed"])}
    found = [f"{kind} {row['name']} x{row['speed']:.2f}" for kind, row in best.items()]
    yield f"tune, fastest against ours: {'; '.join(found) or 'nothing was timed'}"


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        texts = [text.ljust(width) for text, width in zip(row[:2], widths, strict=False)]
        texts += [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
        yield "  ".join(texts).rstrip()


def main() -> int:
    lines, well = screen(Path(sys.argv[1]))
    print(*lines, sep="\n")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
