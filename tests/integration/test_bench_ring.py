"""`ring-attn bench ring`: its report, and the adapters of other packages over stand-ins.

A stand-in has the package's signatures and calls `ring_attention` with the order of rows that the
package documents: an adapter that cuts, calls or joins in another way has wrong results.
"""

from __future__ import annotations

import sys
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ring_attn
from ring_attn import SequenceLayout, Strategy
from ring_attn.bench import ring, ring_implementations
from ring_attn.bench.ring_implementations import GPU_PACKAGES, RingAttentionPytorch, Setting
from ring_attn.integrations import ring_flash_attn as names_of_ring_flash_attn
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
def test_growth_over_length_and_ranks(report_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--mode fwd --heads 1 --head-dim 16 --iters 2 --baseline dense,torch-template"
    report = report_of(f"bench ring {words} --layout striped --seqlen 256,512 --world-size 1,2")
    rows = [row for row in report["rows"] if row["mode"] == "fwd"]
    timed = [(r["impl"], r["world_size"], r["seqlen"]) for r in rows if r["median_ms"]]
    assert sorted(timed) == sorted(product(("ours", "dense"), (1, 2), (256, 512)))
    refused = [row["note"] for row in rows if row["impl"] == "torch-template"]
    assert refused == ["cannot run: has no striped order"] * 4
    shown = capsys.readouterr().out
    assert "seqlen" in shown and "world_size" in shown and "theory" in shown


def setting(words: str) -> Setting:
    return ring.setting_of(options_of(ring, words)).each


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, kind: str, **options: Any) -> Tensor:
    """Attention of shards in the order `kind`."""
    ranks = dist.get_world_size()
    layout = SequenceLayout.from_name(kind, q.size(1) * ranks, ranks)
    return ring_attn.ring_attention(q, k, v, causal=causal, layout=layout, **options)


def module(name: str, *functions: Any, **others: Any) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update({f.__name__: f for f in functions} | others)


def stand_in_ring_attention_pytorch() -> None:
    def ring_flash_attn(
        q, k, v, mask=None, causal=False, bucket_size=1024, ring_reduce_col=False, ring_size=None
    ):
        assert ring_reduce_col and ring_size == dist.get_world_size()
        return attend(q, k, v, causal, "contiguous")

    module("ring_attention_pytorch")
    module("ring_attention_pytorch.ring_flash_attention", ring_flash_attn)


def stand_in_ring_flash_attn() -> None:
    sys.modules["ring_flash_attn"] = names_of_ring_flash_attn


def stand_in_yunchang() -> None:
    degrees: list[int] = []

    def set_seq_parallel_pg(
        sp_ulysses_degree, sp_ring_degree, rank, world_size, use_ulysses_low=True
    ):
        assert sp_ulysses_degree * sp_ring_degree == world_size == dist.get_world_size()
        assert rank == dist.get_rank()
        degrees[:] = [sp_ulysses_degree, sp_ring_degree]

    def make(scatter_idx=2, gather_idx=1, ring_impl_type="basic", use_pack_qkv=False):
        kind = "zigzag" if ring_impl_type == "zigzag" else "contiguous"
        assert degrees[0] == 1 or kind == "contiguous"

        def forward(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
            return attend(q, k, v, causal, kind, strategy=Strategy(ulysses_degree=degrees[0]))

        return forward

    module("yunchang", set_seq_parallel_pg, LongContextAttention=make)


def stand_in_transformer_engine() -> None:
    class DotProductAttention:
        def __init__(
            self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0,
            qkv_format="sbhd", attn_mask_type="causal",
        ):  # fmt: skip
            assert qkv_format == "bshd"
            self.causal = {"causal": True, "no_mask": False}[attn_mask_type]
            self.sizes = num_attention_heads, num_gqa_groups, kv_channels

        def set_context_parallel_group(
            self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"
        ):
            assert cp_global_ranks == dist.get_process_group_ranks(cp_group)

        def __call__(self, q, k, v):
            assert self.sizes == (q.size(2), k.size(2), q.size(3))
            kind = "zigzag" if self.causal else "contiguous"
            return attend(q, k, v, self.causal, kind).flatten(2)

    module("transformer_engine")
    module("transformer_engine.pytorch", DotProductAttention)


def stand_in_magi_attention() -> None:
    def magi_attn_flex_key(
        q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k, num_heads_q,
        num_heads_kv, head_dim, pad_size, cp_group_or_mesh,
    ):  # fmt: skip
        assert q_ranges == k_ranges == [[0, total_seqlen_q]] and total_seqlen_q == total_seqlen_k
        layout = SequenceLayout.zigzag(total_seqlen_q, dist.get_world_size(cp_group_or_mesh))
        causal = {"causal": True, "full": False}[attn_mask_type]
        return SimpleNamespace(layout=layout, causal=causal)

    def calc_attn(q, k, v, key):
        return attend(q[None], k[None], v[None], key.causal, "zigzag")[0], None

    def dispatch(x, key):
        return key.layout.shard(x, dist.get_rank(), 0)

    def undispatch(x, key):
        return ring_attn.unshard(x, key.layout, dim=0)

    module("magi_attention")
    module("magi_attention.api", magi_attn_flex_key, calc_attn, dispatch, undispatch)
    module("magi_attention.common", AttnRanges=SimpleNamespace(from_ranges=list))


STAND_INS = {
    "ring-attention-pytorch": stand_in_ring_attention_pytorch,
    "ring-flash-attn": stand_in_ring_flash_attn,
    "yunchang": stand_in_yunchang,
    "transformer-engine": stand_in_transformer_engine,
    "magi-attention": stand_in_magi_attention,
}


def judged(name: str, setting: Setting) -> list[Verdict]:
    """Verdicts on an adapter's out, dq, dk, dv against float64."""
    inputs, before = ring._inputs(setting), {*sys.modules}
    with mock.patch.object(torch.cuda, "Stream", SimpleNamespace):
        STAND_INS[name]()
        made = {*sys.modules} - before
        try:
            peer = ring.BASELINES[name](setting, inputs)
            return ring.Judge(setting, inputs).verdicts(peer, setting)
        finally:
            # Removes only the stand-ins: our modules that were loaded after them must stay.
            for one in made:
                del sys.modules[one]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kv_heads", "words"),
    [(1, "--causal --layout zigzag"), (2, "--no-causal --layout contiguous")],
)
@pytest.mark.parametrize("name", STAND_INS)
def test_adapters_are_right(ranks: Pools, name: str, words: str, kv_heads: int) -> None:
    one = setting(f"--seqlen 52 --heads 2 --kv-heads {kv_heads} --head-dim 16 {words}")
    verdicts = ranks(2).run(judged, name, one)[0]
    assert [verdict.name for verdict in verdicts] == ["out", "dq", "dk", "dv"]
    assert all(verdict.ok for verdict in verdicts), verdicts


def test_a_package_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in (RingAttentionPytorch, *GPU_PACKAGES):
        assert "is not installed" in str(package.reason_against(setting("--quick")))
    monkeypatch.setattr(ring_implementations, "find_spec", lambda name: name)
    cases = [
        (RingAttentionPytorch, "cpu", "--quick", "None"),
        (RingAttentionPytorch, "cpu", "--seqlen 1023", "divides"),
        (RingAttentionPytorch, "cpu", "--heads 4 --kv-heads 2", "kv head"),
    ]
    half = "--quick --dtype bfloat16"
    for package in GPU_PACKAGES:
        cases += [
            (package, "cpu", half, "GPU"),
            (package, "cuda", "--quick", "float16"),
            (package, "cuda", f"{half} --layout striped", "striped"),
            (package, "cuda", f"{half} --no-causal", "order"),
            (package, "cuda", f"{half} --seqlen 1022", "divides"),
            (package, "cuda", half, "None"),
        ]
    for package, device, words, reason in cases:
        monkeypatch.setattr(ring_implementations, "rank_device", lambda: torch.device(device))  # noqa: B023
        assert reason in str(package.reason_against(setting(words))), (package, words)
