"""`ring-attn bench` on several ranks: its rows, what cannot run, and comparisons."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ring_attn.bench import comm, decode, overview, ring
from ring_attn.cli.main import main
from tests.integration.commands import options_of

TINY = "--heads 4 --kv-heads 2 --head-dim 16 --iters 2 --quiet"


@pytest.mark.dist
def test_strategies_and_peers_are_measured(report_of: Any, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    report = report_of(
        f"bench ring --world-size 1,2 --seqlen 256 --strategy ring,ulysses,q_exchange,auto "
        f"--peer dense,torch-template,ring-flash-attn --csv {table} {TINY}"
    )
    assert {"machine", "command", "rows", "setting"} <= set(report) and report["failures"] == []
    rows = {
        (row["impl"], row["strategy"], row["mode"]): row
        for row in report["rows"]
        if row["world_size"] == 2
    }
    shown = [("ours", name) for name in ("ring", "ulysses", "auto")]
    shown += [("dense", "-"), ("torch-template", "zigzag ring")]
    for (impl, strategy), mode in product(shown, ("fwd", "bwd", "fwd_bwd")):
        row = rows[impl, strategy, mode]
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"] and row["samples"] == 2
        assert row["max_error"] > 0 and row["tflops"] > 0 and row["share"] > 0
        assert (row["exposed_ms"] is None) == (row["bytes_sent"] is None) == (impl != "ours")
        assert (row["peak_bytes"] is None) == (mode == "bwd")
        if impl == "ours":
            off = row["predicted_ms"] / row["median_ms"] - 1
            assert row["hidden_ms"] >= 0 and row["off"] == pytest.approx(off)
    ours = rows["ours", "ring", "fwd_bwd"]
    assert ours["bytes_sent"] > rows["ours", "ring", "fwd"]["bytes_sent"] > 0
    assert rows["ours", "ring", "fwd"]["peak_bytes"] < ours["peak_bytes"]
    assert rows["ours", "auto", "fwd"]["chosen"].endswith("(zigzag)")
    notes = {row["impl"] + " " + row["strategy"]: row["note"] for row in report["rows"]}
    assert notes["ours q_exchange + ring"].startswith("cannot run: exchanging the queries' tail")
    assert notes["ring-flash-attn -"] == "cannot run: is not installed: pip install ring-flash-attn"
    alone = [row for row in report["rows"] if row["world_size"] == 1 and row["impl"] == "ours"]
    assert alone and all(row["bytes_sent"] == 0 for row in alone)
    with table.open() as file:
        assert len(list(csv.DictReader(file))) == len(report["rows"])


@pytest.mark.dist
def test_masks_and_planned_layouts(report_of: Any, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths"
    lengths.write_text("100 28")
    report = report_of(
        f"bench ring --seqlen 256 --mask causal,window:32,docs:{lengths} --layout auto --mode fwd "
        f"--strategy exchange --peer dense,torch-template {TINY}"
    )
    rows = {(row["impl"], row["mask"]): row for row in report["rows"]}
    for mask in ("window:32", f"docs:{lengths}"):
        assert rows["ours", mask]["median_ms"] > 0 and rows["ours", mask]["chosen"]
        assert "has no mask" in rows["dense", mask]["note"]
        assert "only causal, full" in rows["torch-template", mask]["note"]
    # Other packages have their own layouts, which the planner does not choose.
    for impl in ("ours", "dense", "torch-template"):
        assert rows[impl, "causal"]["median_ms"] > 0
    assert {row["mode"] for row in report["rows"]} == {"fwd"}


@pytest.mark.dist
def test_messages_and_a_comparison_with_themselves(
    report_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of("bench comm --size 4k,64k --iters 2 --quiet")
    rows = {(row["mode"], row["nbytes"]): row for row in report["rows"]}
    ops = ("hop", "all_gather", "reduce_scatter", "all_to_all", "all_reduce")
    assert [*rows] == [*product(ops, (4096, 65536))]
    for (op, nbytes), row in rows.items():
        gbps = nbytes * 1e-6 / row["median_ms"]
        factor = {"hop": 1.0, "all_reduce": 1.0}.get(op, 0.5)
        assert row["gbps"] == pytest.approx(gbps)
        assert row["bus_gbps"] == pytest.approx(factor * gbps)
        assert row["beside_gbps"] > 0 and row["slower"] is not None
    capsys.readouterr()
    # Times a million times as long: no machine is slower than that.
    for row in report["rows"]:
        for name in ("median_ms", "p20_ms", "p80_ms"):
            row[name] *= 1e6
    old = tmp_path / "old.json"
    old.write_text(json.dumps(report))
    assert main(f"bench comm --op hop --size 4k --iters 2 --quiet --compare {old}".split()) == 0
    assert "faster" in capsys.readouterr().out


@pytest.mark.dist
def test_decoding_with_pages_and_latent_attention(report_of: Any) -> None:
    words = "--batch 2 --seqlen 64,96 --pages 16 --world-size 2 --queries 2 --heads 4/2"
    report = report_of(f"bench decode {words} --head-dim 16 --iters 2 --quiet --impl ours")
    assert [(row["seqlen"], row["pages"]) for row in report["rows"]] == [(64, 16), (96, 16)]
    for row in report["rows"]:
        nbytes = 2 * row["seqlen"] * 2 * (16 + 16) * 4 / 2
        assert row["gbps"] == pytest.approx(nbytes * 1e-6 / row["median_ms"])
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 1e3 / row["median_ms"])
        assert 0 < row["max_ratio"] <= 1
    report = report_of("bench decode --mla --batch 1 --seqlen 32 --iters 2 --quiet")
    ours, theirs = report["rows"]
    assert (ours["heads"], ours["kv_heads"], ours["head_dim"], ours["head_dim_v"]) == (
        128,
        1,
        576,
        512,
    )
    # V is a part of K.
    assert ours["gbps"] == pytest.approx(32 * 576 * 4 * 1e-6 / ours["median_ms"])
    assert theirs["median_ms"] > 0 and 0 < theirs["max_ratio"] <= 1


def test_cases_that_nothing_runs() -> None:
    setting = decode.setting_of(options_of("bench decode", "--device cpu --pages 16 --mla"))
    (case, *_) = setting.cases()
    whys = {impl: decode.why_not(impl, case, setting) for impl in ("ours", "torch", "fa2", "fa3")}
    assert decode.num_caches(setting, case) == 1
    # 64 sequences of 1k rows of 2 x 128 numbers of 2 bytes are 32 MB, and the L2 cache holds 50.
    small = decode.DecodeCase(64, 1024, 0, 1, 8, 1, 128, 128)
    on_gpu = replace(setting, device="cuda", dtype=torch.bfloat16)
    assert decode.num_caches(on_gpu, small) == 8
    assert decode.num_caches(on_gpu, small._replace(seqlen=1 << 20)) == 1
    assert whys["ours"] is None and whys["torch"].endswith("has no pages")
    assert whys["fa2"] == "the package flash_attn is not installed"
    assert [comm.bus_factor(op, 4) for op in ("hop", "all_gather", "all_reduce")] == [1, 0.75, 1.5]


def test_every_degree_of_a_name_is_measured() -> None:
    words = "--device cpu --world-size 4 --strategy hybrid,double_ring,auto --peer all --heads 4"
    bench = ring.RingBench(ring.setting_of(options_of("bench ring", f"{words} --seqlen 64")))
    ((_, entries),) = bench.plans()
    ours = [entry.label for entry in entries if entry.impl == "ours"]
    assert "hybrid 2 x ring" in ours and "double_ring 2" in ours and ours[-1] == "auto"
    assert [entry.impl for entry in entries if entry.impl != "ours"] == [*ring.RING_PEERS]


@pytest.mark.dist
@pytest.mark.slow
def test_one_screen_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, too, nothing is left out.
    monkeypatch.setattr(overview, "SECONDS", 600.0)
    monkeypatch.setattr(overview, "KERNEL_SECONDS", 600.0)
    path = tmp_path / "all.json"
    assert main(["bench", "--device", "cpu", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    for title in ("attention on one device", "split sequence", "KV cache", "between ranks"):
        assert title in said
    report = json.loads(path.read_text())
    assert {*report["benches"]} == {"kernel", "ring", "decode", "comm"}
    assert all(bench["rows"] for bench in report["benches"].values())
