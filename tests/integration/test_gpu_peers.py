"""The adapters of packages that need GPUs, over stand-ins with the packages' signatures.

A stand-in calls `ring_attention` with the order of rows that its package documents: an adapter
that cuts, calls or joins in another way has wrong results.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ring_attn
from ring_attn import SequenceLayout, Strategy
from ring_attn.bench import gpu_peers, ring
from ring_attn.bench.gpu_peers import GPU_PEERS, GpuPeer
from ring_attn.bench.ring_implementations import Setting
from ring_attn.testing import Verdict
from tests.distributed.pool import Pools
from tests.integration.commands import options_of


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, kind: str, **options: Any) -> Tensor:
    """Attention of shards in the order `kind`."""
    ranks = dist.get_world_size()
    layout = SequenceLayout.from_name(kind, q.size(1) * ranks, ranks)
    return ring_attn.ring_attention(q, k, v, causal=causal, layout=layout, **options)


def module(name: str, *functions: Any, **others: Any) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update({f.__name__: f for f in functions} | others)


def stand_in_ring_flash_attn() -> None:
    def zigzag_ring_flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
        alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None,
    ):  # fmt: skip
        assert causal
        return attend(q, k, v, True, "zigzag")

    def ring_flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        return attend(q, k, v, causal, "contiguous")

    module("ring_flash_attn", zigzag_ring_flash_attn_func, ring_flash_attn_func)


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
    "ring-flash-attn": stand_in_ring_flash_attn,
    "yunchang": stand_in_yunchang,
    "transformer-engine": stand_in_transformer_engine,
    "magi-attention": stand_in_magi_attention,
}


def judged(peer: type[GpuPeer], setting: Setting) -> list[Verdict]:
    """Verdicts on an adapter's out, dq, dk, dv against float64."""
    inputs, before = ring._inputs(setting), {*sys.modules}
    with mock.patch.object(torch.cuda, "Stream", SimpleNamespace):
        STAND_INS[peer.name]()
        made = {*sys.modules} - before
        try:
            return ring.Judge(setting, inputs).verdicts(peer(setting, inputs), setting)
        finally:
            # Removes only the stand-ins: our modules that were loaded after them must stay.
            for name in made:
                del sys.modules[name]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kv_heads", "words"),
    [(1, "--causal --layout zigzag"), (2, "--no-causal --layout contiguous")],
)
@pytest.mark.parametrize("peer", GPU_PEERS, ids=lambda peer: peer.name)
def test_results_are_right(ranks: Pools, peer: type[GpuPeer], words: str, kv_heads: int) -> None:
    options = f"--seqlen 52 --heads 2 --kv-heads {kv_heads} --head-dim 16 {words}"
    setting = ring.setting_of(options_of(ring, options))
    verdicts = ranks(2).run(judged, peer, setting)[0]
    assert [verdict.name for verdict in verdicts] == ["out", "dq", "dk", "dv"]
    assert all(verdict.ok for verdict in verdicts), verdicts


@pytest.mark.parametrize("peer", GPU_PEERS, ids=lambda peer: peer.name)
def test_a_gpu_peer_says_why_it_cannot_run(
    peer: type[GpuPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(words: str) -> str:
        return str(peer.reason_against(ring.setting_of(options_of(ring, words))))

    monkeypatch.setattr(gpu_peers, "rank_device", lambda: torch.device("cpu"))
    assert "is not installed" in reason("--quick")
    monkeypatch.setattr(gpu_peers, "find_spec", lambda name: name)
    assert "GPU" in reason("--quick")
    monkeypatch.setattr(gpu_peers, "rank_device", lambda: torch.device("cuda"))
    assert "float16" in reason("--quick")
    half = "--quick --dtype bfloat16"
    assert "striped" in reason(f"{half} --layout striped")
    assert "order" in reason(f"{half} --no-causal")
    assert "divides" in reason(f"{half} --seqlen 1022")
    assert reason(half) == "None"
