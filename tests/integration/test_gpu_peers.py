"""The adapters of packages that need GPUs, over stand-ins with those packages' signatures.

A stand-in attends by `ring_attention` in the order of rows that its package documents: where an
adapter cuts, calls or puts together in another way, its results are wrong.
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
    layout = SequenceLayout.from_name(
        kind, q.size(1) * dist.get_world_size(), dist.get_world_size()
    )
    return ring_attn.ring_attention(q, k, v, causal=causal, layout=layout, **options)


def module(name: str, **contents: Any) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(contents)


def stand_in_ring_flash_attn() -> None:
    def zigzag_ring_flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: Any = None,
        causal: bool = False, window_size: Any = (-1, -1), alibi_slopes: Any = None,
        deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
    ) -> Tensor:  # fmt: skip
        assert causal
        return attend(q, k, v, True, "zigzag")

    def ring_flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: Any = None,
        causal: bool = False,
    ) -> Tensor:  # fmt: skip
        return attend(q, k, v, causal, "contiguous")

    module("ring_flash_attn", **{f.__name__: f for f in (zigzag_ring_flash_attn_func,
                                                         ring_flash_attn_func)})  # fmt: skip


def stand_in_yunchang() -> None:
    degrees: list[int] = []

    def set_seq_parallel_pg(
        sp_ulysses_degree: int, sp_ring_degree: int, rank: int, world_size: int,
        use_ulysses_low: bool = True,
    ) -> None:  # fmt: skip
        assert sp_ulysses_degree * sp_ring_degree == world_size == dist.get_world_size()
        assert rank == dist.get_rank()
        degrees[:] = [sp_ulysses_degree, sp_ring_degree]

    def make(
        scatter_idx: int = 2, gather_idx: int = 1, ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
    ) -> Any:  # fmt: skip
        kind = "zigzag" if ring_impl_type == "zigzag" else "contiguous"
        assert degrees[0] == 1 or kind == "contiguous"

        def forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0,
                    softmax_scale: Any = None, causal: bool = False) -> Tensor:  # fmt: skip
            return attend(q, k, v, causal, kind, strategy=Strategy(ulysses_degree=degrees[0]))

        return forward

    module("yunchang", set_seq_parallel_pg=set_seq_parallel_pg, LongContextAttention=make)


def stand_in_transformer_engine() -> None:
    class DotProductAttention:
        def __init__(
            self, num_attention_heads: int, kv_channels: int, num_gqa_groups: int | None = None,
            attention_dropout: float = 0.0, qkv_format: str = "sbhd",
            attn_mask_type: str = "causal",
        ) -> None:  # fmt: skip
            assert qkv_format == "bshd"
            self.causal = {"causal": True, "no_mask": False}[attn_mask_type]
            self.sizes = num_attention_heads, num_gqa_groups, kv_channels

        def set_context_parallel_group(
            self, cp_group: Any, cp_global_ranks: list[int], cp_stream: Any,
            cp_comm_type: str = "p2p",
        ) -> None:  # fmt: skip
            assert cp_global_ranks == dist.get_process_group_ranks(cp_group)

        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert self.sizes == (q.size(2), k.size(2), q.size(3))
            kind = "zigzag" if self.causal else "contiguous"
            return attend(q, k, v, self.causal, kind).flatten(2)

    module("transformer_engine")
    module("transformer_engine.pytorch", DotProductAttention=DotProductAttention)


def stand_in_magi_attention() -> None:
    def magi_attn_flex_key(
        q_ranges: Any, k_ranges: Any, attn_mask_type: str, total_seqlen_q: int,
        total_seqlen_k: int, num_heads_q: int, num_heads_kv: int, head_dim: int, pad_size: int,
        cp_group_or_mesh: dist.ProcessGroup,
    ) -> Any:  # fmt: skip
        assert q_ranges == k_ranges == [[0, total_seqlen_q]] and total_seqlen_q == total_seqlen_k
        layout = SequenceLayout.zigzag(total_seqlen_q, dist.get_world_size(cp_group_or_mesh))
        return SimpleNamespace(
            layout=layout, causal={"causal": True, "full": False}[attn_mask_type]
        )

    def calc_attn(q: Tensor, k: Tensor, v: Tensor, key: Any) -> tuple[Tensor, None]:
        q, k, v = (x[None] for x in (q, k, v))
        out = ring_attn.ring_attention(q, k, v, causal=key.causal, layout=key.layout)
        return out[0], None

    def dispatch(x: Tensor, key: Any) -> Tensor:
        return key.layout.shard(x[None], dist.get_rank())[0]  # type: ignore[no-any-return]

    def undispatch(x: Tensor, key: Any) -> Tensor:
        return ring_attn.unshard(x[None], key.layout)[0]

    module("magi_attention")
    functions = (magi_attn_flex_key, calc_attn, dispatch, undispatch)
    module("magi_attention.api", **{f.__name__: f for f in functions})
    module("magi_attention.common", AttnRanges=SimpleNamespace(from_ranges=list))


STAND_INS = {
    "ring-flash-attn": stand_in_ring_flash_attn,
    "yunchang": stand_in_yunchang,
    "transformer-engine": stand_in_transformer_engine,
    "magi-attention": stand_in_magi_attention,
}


def judged(peer: type[GpuPeer], setting: Setting) -> list[Verdict]:
    """Verdicts on out, dq, dk, dv of an adapter, against float64."""
    inputs, before = ring._inputs(setting), {*sys.modules}
    with mock.patch.object(torch.cuda, "Stream", SimpleNamespace):
        STAND_INS[peer.name]()
        made = {*sys.modules} - before
        try:
            return ring.Judge(setting, inputs).verdicts(peer(setting, inputs), setting)
        finally:
            # The stand-ins alone: modules of ours that were loaded with them have to stay.
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
