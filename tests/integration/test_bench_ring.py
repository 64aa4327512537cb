"""`ring-attn bench ring`: its report, and its adapter of another package.

The adapter runs over a stand-in with the package's signature, which calls `ring_attention` with the
order of rows that the package documents: if the adapter cuts, calls or joins in another way, its
results are wrong.
"""

from __future__ import annotations

import sys
from itertools import product
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import ring_attn
from ring_attn import SequenceLayout
from ring_attn.bench import ring, ring_implementations
from ring_attn.bench.ring_implementations import RingAttentionPytorch, RingSetting
from ring_attn.testing import Verdict
from tests.distributed.pool import Pools
from tests.integration.commands import options_of


@pytest.mark.dist
def test_every_implementation_is_measured(
    report_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(
        "bench ring --quick --seqlen 300 --heads 4 --kv-heads 2 --head-dim 16 --iters 3"
    )
    assert {"machine", "command", "rows", "setting"} <= set(report)
    rows = {(row["impl"], row["mode"]): row for row in report["rows"]}
    for key in product(("ours", "dense", "torch-template"), ("fwd", "bwd", "fwd_bwd")):
        row = rows[key]
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["max_error"] > 0 and (row["wait_ms"] is None) == (row["impl"] != "ours")
    ours = rows["ours", "fwd_bwd"]
    assert ours["bytes_sent"] == ours["planned_bytes"] > 0
    assert rows["ours", "fwd"]["peak_bytes"] < ours["peak_bytes"]
    assert rows["ours", "step_overhead"]["median_ms"] > 0
    assert "x dense" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.dist
def test_several_lengths_and_numbers_of_ranks(report_of: Any) -> None:
    words = "--mode fwd --heads 1 --head-dim 16 --iters 2 --baseline dense,torch-template"
    report = report_of(f"bench ring {words} --layout striped --seqlen 256,512 --world-size 1,2")
    rows = [row for row in report["rows"] if row["mode"] == "fwd"]
    timed = [(r["impl"], r["world_size"], r["seqlen"]) for r in rows if r["median_ms"]]
    assert sorted(timed) == sorted(product(("ours", "dense"), (1, 2), (256, 512)))
    refused = [row["note"] for row in rows if row["impl"] == "torch-template"]
    assert refused == ["cannot run: has no striped order"] * 4


def setting(words: str) -> RingSetting:
    return ring.setting_of(options_of("bench ring", words)).each


def judged(setting: RingSetting) -> list[Verdict]:
    """Verdicts on the adapter's out, dq, dk, dv over the stand-in, against float64."""

    def ring_flash_attn(
        q, k, v, mask=None, causal=False, bucket_size=1024, ring_reduce_col=False, ring_size=None
    ):
        assert ring_reduce_col and ring_size == dist.get_world_size()
        layout = SequenceLayout.contiguous(q.size(1) * ring_size, ring_size)
        return ring_attn.ring_attention(q, k, v, causal=causal, layout=layout)

    inner = "ring_attention_pytorch.ring_flash_attention"
    modules = {name: ModuleType(name) for name in ("ring_attention_pytorch", inner)}
    vars(modules[inner])["ring_flash_attn"] = ring_flash_attn
    inputs = ring._inputs(setting)
    with mock.patch.dict(sys.modules, modules):
        peer = RingAttentionPytorch(setting, inputs)
    return ring.RingJudge(setting, inputs).verdicts(peer, setting)


@pytest.mark.dist
@pytest.mark.parametrize("words", ["--causal --layout zigzag", "--no-causal --layout contiguous"])
def test_the_adapter_of_ring_attention_pytorch_is_right(ranks: Pools, words: str) -> None:
    one = setting(f"--seqlen 52 --heads 2 --head-dim 16 {words}")
    verdicts = ranks(2).run(judged, one)[0]
    assert [verdict.name for verdict in verdicts] == ["out", "dq", "dk", "dv"]
    assert all(verdict.ok for verdict in verdicts), verdicts


def test_a_package_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is not installed" in str(RingAttentionPytorch.reason_against(setting("--quick")))
    monkeypatch.setattr(ring_implementations, "find_spec", lambda name: name)
    for words, reason in (
        ("--quick", "None"), ("--seqlen 1023", "divides"), ("--heads 4 --kv-heads 2", "kv head"),
    ):  # fmt: skip
        assert reason in str(RingAttentionPytorch.reason_against(setting(words))), words
