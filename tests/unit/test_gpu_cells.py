"""What `python -m dev gpu` carries and prints, and how it describes wrong results."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from dev.gpu import carry, device, nccl_library, triton_key
from dev.gpu.contact import fault_of
from dev.gpu.results import Results, last_rows, read_rows, with_verdict
from dev.gpu.schedule import Run
from dev.gpu.screen import screen
from dev.gpu.tests import in_turn
from tests.gpu_cells import wrong_results

ROOT = Path(__file__).parents[2]


# -- wrong results


def test_a_map_shows_the_rows_and_dims_that_are_wrong() -> None:
    """The second eight rows of each tile of 64 are wrong in the last eight of 16 dims."""
    expected = torch.zeros(1, 128, 2, 16, dtype=torch.float64)
    got = expected.clone()
    got[:, 8:16, 0, 8:] = 0.1
    got[:, 72, 0, 15] = 10.0
    got[:, 5, 0, 0] = float("nan")
    fault = fault_of("dq", got, expected)
    assert fault["nan"] == 1 and fault["of"] == 128 * 2 * 16
    assert [row[1] for row in fault["map"]] == [-9, 1, *[-9] * 6]
    assert [row[0] for row in fault["map"]] == [9, *[-9] * 7]
    assert {5, 72, *range(8, 16)} <= set(fault["worst rows"])


def test_a_trial_finds_wrong_results(tmp_path: Path) -> None:
    """As `python -m dev gpu --device cpu` runs its cells, in Triton's interpreter."""
    results = Results(tmp_path)
    run = Run(results, tmp_path, 240.0, device.environment(device.CPU))
    run.run([wrong_results()])
    run.close()
    rows = last_rows(results.rows)
    right, wrong = rows["wrong results: right"], rows["wrong results: wrong"]
    assert right["state"] == "ok" and right["figures"]["ratios"]["out"] <= 1, right
    assert wrong["state"] == "failed", wrong
    [out, lse] = json.loads(wrong["error"].removeprefix("AssertionError: "))["wrong"]
    assert out["result"] == "out" and len(out["map"]) == 8 and lse["result"] == "lse"


# -- what is carried


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """A folder with one kernel and a broken launcher, whose cache was in another place."""
    cache = tmp_path / "cache"
    (cache / "LAUNCHER").mkdir(parents=True)
    (cache / "LAUNCHER/launcher.so").write_text("no library")
    entry = cache / "KEY"
    entry.mkdir(parents=True)
    names = ["kernel.cubin", "kernel.json", "kernel.ttir"]
    for name in names:
        (entry / name).write_text(name)
    group = {"child_paths": {name: str(entry / name) for name in names}}
    (entry / "__grp__kernel.json").write_text(json.dumps(group))
    folder = tmp_path / "carry"
    (folder / carry.LIBRARIES).mkdir(parents=True)
    packed = carry.pack_kernels(cache, folder / carry.KERNELS, with_launchers=True)
    assert packed == (1, 1)
    python = triton_key.python_here()
    carry.write_manifest(folder, python, triton_key.library_hash(python, folder))
    return folder


def test_kernels_arrive_with_paths_of_the_new_place(carried: Path, tmp_path: Path) -> None:
    variables = carry.unpacked(carried, tmp_path / "there", "cuda")
    cache = Path(variables["TRITON_CACHE_DIR"])
    paths = json.loads((cache / "KEY/__grp__kernel.json").read_text())["child_paths"]
    assert {name: Path(path).read_text() for name, path in paths.items()} == {
        "kernel.cubin": "kernel.cubin",
        "kernel.json": "kernel.json",
    }
    assert all(path.startswith(str(tmp_path / "there")) for path in paths.values())


def test_launchers_that_do_not_load_are_made_anew(
    carried: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = carry.unpack_kernels(carried / carry.KERNELS, tmp_path / "there")
    assert (cache / "LAUNCHER/launcher.so").exists()
    carry.drop_launchers_that_do_not_load(cache)
    assert not (cache / "LAUNCHER/launcher.so").exists()
    assert "carried launchers do not load" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["sources", "files"])
def test_kernels_of_other_sources_are_refused(carried: Path, tmp_path: Path, kind: str) -> None:
    carry.check(carried)
    if kind == "files":
        with (carried / carry.KERNELS).open("ab") as file:
            file.write(b"x")
    else:
        manifest = json.loads((carried / carry.MANIFEST).read_text())
        manifest["sources"]["flash_fwd.py"] = "0"
        (carried / carry.MANIFEST).write_text(json.dumps(manifest))
    name = {"files": carry.KERNELS, "sources": "flash_fwd.py"}[kind]
    with pytest.raises(ValueError, match=f"is of other {kind}: {name} changed"):
        carry.unpacked(carried, tmp_path / "there", "cuda")


def test_without_a_folder_nothing_is_carried(tmp_path: Path) -> None:
    assert carry.unpacked(tmp_path / "none", tmp_path, "cuda") == {}
    with pytest.raises(ValueError, match="there is no .*none.*leave out --carry"):
        carry.unpacked(tmp_path / "none", tmp_path, "cuda", needed=True)


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    """An entry of a fat binary."""
    head = nccl_library.ENTRY.pack(kind, 0x101, 32, len(code)) + bytes(12)
    return head + struct.pack("<I", architecture) + code


def test_other_device_code_is_cleared() -> None:
    entries = entry(2, 80, b"a" * 64) + entry(2, 90, b"b" * 64) + entry(1, 90, b"c" * 64)
    magic = struct.unpack("<I", nccl_library.MAGIC)[0]
    library = bytearray(b"text" + nccl_library.MAGIC + bytes(8))  # the magic alone is none
    library += nccl_library.HEADER.pack(magic, 1, 16, len(entries)) + entries + b"aaaa"
    assert nccl_library.only_for(90, library) == 64
    assert (library.count(b"a"), library.count(b"b"), library.count(b"c")) == (4, 64, 0)


# -- the order of tests, and the screen


def test_no_test_waits_for_all_cases_of_another() -> None:
    names = ["x.py::a[1]", "x.py::a[2]", "x.py::b[1]", "x.py::c"]
    assert in_turn(names) == ["x.py::a[1]", "x.py::b[1]", "x.py::c", "x.py::a[2]"]


def ok(cell: str, **figures: Any) -> dict[str, Any]:
    return {"cell": cell, "state": "ok", "at": 1.0, "s": 1.0, "figures": figures}


def test_the_screen_has_ours_beside_others_and_the_ceiling() -> None:
    rows = [
        ok(
            "environment: versions",
            card="NVIDIA H100",
            torch="2.11.0",
            triton="3.6.0",
            nccl="2.28.9",
        ),
        ok("environment: ceilings", product_TFLOPs=800.0, copy_TBs=3.0),
        ok("speed: ours, 16384 rows", implementation="ours", fwd_TFLOPs=600.0, bwd_TFLOPs=400.0),
        ok("speed: cudnn, 16384 rows", implementation="cudnn", fwd_TFLOPs=500.0, bwd_TFLOPs=500.0),
        ok("speed: FlashAttention 3, 16384 rows", fwd_TFLOPs=750.0),
        {"cell": "tests: x", "state": "begun", "at": 1.0},
        {"cell": "tests: x", "state": "hung", "at": 2.0, "error": "no verdict within 5 s"},
        {"cell": "tests: y", "state": "begun", "at": 2.0},
    ]
    text = screen(rows)
    forward, backward = (line for line in text.splitlines() if line.startswith("16384 rows"))
    assert forward.split("forward")[1].split() == (
        ["600", "500", "(120", "%)", "-", "750", "(80", "%)", "75", "%"]
    )
    assert "500 (80 %)" in backward and backward.endswith("50 %")
    assert "NVIDIA H100" in text and "triton 3.6.0" in text
    assert "hung: tests: x: no verdict within 5 s" in text and "begun: tests: y" in text


def test_launches_are_not_counted_as_passed() -> None:
    listed = ok("tests: (list of cells)", cells=[])
    text = screen([listed, ok("contact: x") | {"state": "launched"}])
    _, machine, _, states, row = text.splitlines()[:5]
    assert machine.startswith("no device") and states.split() == ["launched", "s"]
    assert row.split() == ["contact", "1"]
    assert with_verdict([ok("contact: y"), ok("contact: x") | {"state": "launched"}]) == {
        "contact: y"
    }


# -- from end to end


@pytest.mark.slow
@pytest.mark.timeout(1400)
def test_a_trial_runs_all_stages(tmp_path: Path) -> None:
    """On a CPU: Triton's interpreter, a pretended H100 for the tests, and ranks over gloo."""
    command = [sys.executable, "-m", "dev", "gpu", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(
        # Of time on a busy machine; a quiet one takes a minute.
        [*command, "--seconds", "1200"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1300,
    )
    rows = read_rows(tmp_path / "results.jsonl")
    bad = [row for row in rows if row["state"] not in ("begun", "ok", "not here", "stage")]
    assert done.returncode == 0 and not bad, (bad, done.stdout[-3000:], done.stderr[-2000:])
    passed = {label.split(":")[0] for label, row in last_rows(rows).items() if row["state"] == "ok"}
    assert {"environment", "contact", "tests", "speed", "rings", "gloo", "sizes", "tune"} <= passed
    # A lent machine gives back few files.
    assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "files.tar.gz"}


def test_a_wrong_stage_is_refused_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "dev", "gpu", "--stages", "sped"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "no stage sped" in done.stderr
    assert " torch\n" not in done.stderr


def test_a_kernel_cache_is_an_archive_without_paths_above(carried: Path) -> None:
    with tarfile.open(carried / carry.KERNELS) as tar:
        assert all(name.startswith(("KEY/", "LAUNCHER/")) for name in tar.getnames())


def test_keys_are_made_as_with_another_pythons_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Triton's own function makes the same key from a library with the other hash."""
    from triton.runtime import cache

    here = cache.triton_key()
    library = triton_key.library_hash(triton_key.python_here(), tmp_path)
    assert library in here and triton_key.key_of(library) == here
    kept = tmp_path / f"libtriton-{triton.__version__}-3.99.sha256"
    kept.write_text("a" * 64)
    other = triton_key.key_of(triton_key.library_hash("3.99", tmp_path))
    monkeypatch.setattr(cache, "triton_key", cache.triton_key)  # the patch ends with this test
    monkeypatch.setenv(triton_key.VARIABLE, other)
    triton_key.use_key_of_variable()
    assert cache.triton_key() == here.replace(library, "a" * 64) != here
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="no hash of its library"):
        monkeypatch.setattr(cache, "triton_key", lambda: "other")
        triton_key.key_of("b" * 64)


def test_kernels_of_another_python_are_found_and_of_another_triton_not(
    carried: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = carry.key_of_kernels(carried)
    carry.write_manifest(carried, "3.99", "a" * 64)
    there = carry.key_of_kernels(carried)
    assert "a" * 64 in there[triton_key.VARIABLE] and there != here
    assert capsys.readouterr().out == ""
    manifest = json.loads((carried / carry.MANIFEST).read_text())
    (carried / carry.MANIFEST).write_text(json.dumps(manifest | {"triton": "1.0"}))
    carry.unpacked(carried, tmp_path / "here", "stub")
    assert "for triton 1.0" in capsys.readouterr().out
    with pytest.raises(ValueError, match="for triton 1.0.*or leave out --carry"):
        carry.unpacked(carried, tmp_path / "there", "stub", needed=True)
