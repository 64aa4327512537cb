"""Calls of other packages by the benchmarks, against packages that we imitate.

The imitations take only documented arguments, and compute attention by ours or by the oracle. So
these tests find wrong arguments, layouts and gathers; they say nothing of the packages.
"""

from __future__ import annotations

import functools
import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ring_attn
from ring_attn import profiling
from ring_attn.backends import choose_backend, get_backend
from ring_attn.bench import comm, peers, ring, ring_peers
from ring_attn.bench.benchmark import Outputs
from ring_attn.bench.implementations import Shape
from ring_attn.bench.judge import OracleJudge
from ring_attn.bench.ring_implementations import Ours, RingCase, without_compute
from ring_attn.cli.masks import MaskChoice
from ring_attn.core import masks
from ring_attn.core.mask import Mask
from ring_attn.testing import dense_attention
from tests.distributed.pool import on_ranks
from tests.integration.commands import options_of

CHOICES = {
    "causal": MaskChoice("causal"),
    "full": MaskChoice("full"),
    "window": MaskChoice("window", size=20),
    "chunked": MaskChoice("chunked", size=24),
    "prefix": MaskChoice("prefix", size=24),
    "docs": MaskChoice("docs", lengths=(20, 12)),
}


def shape(kind: str, **changes: Any) -> Shape:
    sizes: dict[str, Any] = {
        "batch": 2,
        "seqlen": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "causal": kind != "full",
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "masked": CHOICES[kind],
    }
    return Shape(**{**sizes, **changes})


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(members)
    return made


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return dense_attention(q, k, v, mask)[0].to(q.dtype)


# -- on one device


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int | None, int | None]
) -> tuple[Tensor, None]:
    left, right = (-1 if side is None else side for side in window_size)
    return dense(q, k, v, Mask(q.size(1), k.size(1), causal, (left, right))), None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
) -> Tensor:
    assert q.ndim == 3 and cu_seqlens_q.dtype == torch.int32
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q == max_seqlen_k
    mask = masks.documents(cu_seqlens_q, cu_seqlens_k, causal=causal)
    return dense(q[None], k[None], v[None], mask)[0]


def memory_efficient_attention(q: Tensor, k: Tensor, v: Tensor, *, attn_bias: Any) -> Tensor:
    if q.ndim == 5:
        k, v = k[:, :, :, 0], v[:, :, :, 0]
    out = dense(
        q.flatten(2, -2),
        k,
        v,
        attn_bias(q.size(1)) if attn_bias else masks.window(q.size(1), -1, -1),
    )
    return out.view(*q.shape[:-1], -1)


def block_diagonal(lengths: list[int]) -> Any:
    cuts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return SimpleNamespace(make_causal=lambda: lambda rows: masks.documents(cuts, causal=True))


XFORMERS = module(
    "xformers.ops.fmha.attn_bias",
    LowerTriangularMask=lambda: masks.causal,
    LocalAttentionFromBottomRightMask=lambda window_left, window_right: (
        lambda rows: masks.window(rows, window_left, window_right)
    ),
    BlockDiagonalMask=SimpleNamespace(from_seqlens=block_diagonal),
)
FLASH = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
ONE_DEVICE = {
    "flash_attn": module("flash_attn", **FLASH),
    "flash_attn_interface": module("flash_attn_interface", **FLASH),
    "flash_attn.cute": module("flash_attn.cute", **FLASH),
    "xformers.ops": module("xformers.ops", memory_efficient_attention=memory_efficient_attention),
    "xformers.ops.fmha.attn_bias": XFORMERS,
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["torch-flash", "fa2", "fa3", "fa4", "xformers", "flex"])
def test_peers_on_one_device_get_their_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each, imitation in ONE_DEVICE.items():
        monkeypatch.setitem(sys.modules, each, imitation)
    # FlexAttention compiles a part of itself; compiling all of it would take minutes.
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compiled(f, **options) if options else f
    )
    backward = name != "flex"  # it has none on CPUs
    for kind in peers.PEERS[name].kinds:
        judge = OracleJudge(shape(kind))
        make = functools.partial(peers.PEERS[name].make, backward=backward)
        ratio, wrong = judge.verdict(make, backward=backward)
        assert ratio <= 1 and not wrong, (kind, wrong)


def test_peers_name_what_they_cannot_run() -> None:
    cudnn, flash = peers.PEERS["cudnn"], peers.PEERS["torch-flash"]
    assert cudnn.unavailable(torch.device("cpu")) == "runs on CUDA only"
    assert "has no mask 'window'" in str(cudnn.reason_against(shape("window")))
    assert cudnn.reason_against(shape("full", head_dim_v=8)) is None
    assert "equal head dims" in str(flash.reason_against(shape("full", head_dim_v=8)))
    assert "not installed" in str(peers.PEERS["fa4"].unavailable(torch.device("cuda")))


# -- on ranks


def ours(layout: str) -> Callable[..., Tensor]:
    """A function of zhuzilin's package."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Any) -> Tensor:
        return ring_attn.ring_attention(q, k, v, causal=causal, layout=layout, group=group)

    return attend


def llama3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    *,
    heads_k_stride: int,
    local_k_slice: Any,
    causal: bool,
    group: Any,
) -> Tensor:
    assert q.ndim == 3 and heads_k_stride == 1 and local_k_slice == "slice" and causal
    mask = masks.documents(cu_seqlens_q, causal=True)
    return ring_attn.ring_attention(q, k, v, mask=mask, group=group)


def prepare(cu_seqlens: Tensor, *, causal: bool, rank: int, world_size: int) -> Any:
    assert causal and (rank, world_size) == (dist.get_rank(), dist.get_world_size())
    return cu_seqlens, cu_seqlens, 0, 0, "slice"


class LongContext:
    def __init__(self, ring_impl_type: str) -> None:
        self.layout = {"zigzag": "zigzag", "basic": "contiguous"}[ring_impl_type]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        return ring_attn.ring_attention(q, k, v, causal=causal, layout=self.layout)


def extract(layout: str) -> Callable[..., Tensor]:
    def cut(x: Tensor, *, rank: int, world_size: int, rd: int, ud: int) -> Tensor:
        assert rd * ud == world_size == dist.get_world_size()
        return ring_attn.SequenceLayout.from_name(layout, x.size(1), world_size).shard(x, rank)

    return cut


def set_seq_parallel_pg(ulysses: int, ring: int, rank: int, world_size: int) -> None:
    assert ulysses * ring == world_size and rank == dist.get_rank()


class DotProduct:
    def __init__(
        self,
        *,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int,
        attention_dropout: float,
        qkv_format: str,
        attn_mask_type: str,
    ) -> None:
        assert attention_dropout == 0.0 and qkv_format == "bshd"
        self.sizes = (num_attention_heads, num_gqa_groups, kv_channels)
        self.causal = {"causal": True, "no_mask": False}[attn_mask_type]

    def set_context_parallel_group(
        self, group: Any, ranks: list[int], stream: Any, cp_comm_type: str
    ) -> None:
        assert ranks == [*range(dist.get_world_size())] and cp_comm_type == "p2p"
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert (q.size(2), k.size(2), q.size(3)) == self.sizes
        out = ring_attn.ring_attention(
            q, k, v, causal=self.causal, layout="zigzag", group=self.group
        )
        return out.flatten(2)


class Magi:
    """Chunks go to the ranks in turn; the key holds what a call needs."""

    def key(
        self,
        *,
        q_ranges: Any,
        k_ranges: Any,
        attn_mask_type: list[str],
        total_seqlen_q: int,
        total_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        head_dim: int,
        pad_size: int,
        chunk_size: int,
        cp_group_or_mesh: Any,
    ) -> Any:
        assert pad_size == 0 and total_seqlen_q == total_seqlen_k and q_ranges == k_ranges
        layout = ring_attn.SequenceLayout.striped(total_seqlen_q, dist.get_world_size())
        causal = {"causal": True, "full": False}[attn_mask_type[0]]
        cuts = [*(start for start, _ in q_ranges), q_ranges[-1][1]]
        return layout, masks.documents(cuts, causal=causal), cp_group_or_mesh

    def dispatch(self, x: Tensor, *, key: Any) -> Tensor:
        return key[0].shard(x, dist.get_rank(), 0)

    def undispatch(self, *, x: Tensor, key: Any) -> Tensor:
        return ring_attn.unshard(x, key[0], group=key[2], dim=0)

    def attend(self, *, q: Tensor, k: Tensor, v: Tensor, key: Any) -> tuple[Tensor, None]:
        layout, mask, group = key
        assert q.ndim == 3
        return ring_attn.ring_attention(q, k, v, mask=mask, layout=layout, group=group), None


MAGI = Magi()
ON_RANKS = {
    "ring_flash_attn": module(
        "ring_flash_attn",
        ring_flash_attn_func=ours("contiguous"),
        zigzag_ring_flash_attn_func=ours("zigzag"),
        llama3_flash_attn_varlen_func=llama3,
        llama3_flash_attn_prepare_cu_seqlens=prepare,
    ),
    "yunchang": module(
        "yunchang",
        LongContextAttention=LongContext,
        EXTRACT_FUNC_DICT={"zigzag": extract("zigzag"), "basic": extract("contiguous")},
        set_seq_parallel_pg=set_seq_parallel_pg,
    ),
    "transformer_engine.pytorch": module(
        "transformer_engine.pytorch", DotProductAttention=DotProduct
    ),
    "magi_attention.api": module(
        "magi_attention.api",
        magi_attn_flex_key=MAGI.key,
        dispatch=MAGI.dispatch,
        undispatch=MAGI.undispatch,
        calc_attn=MAGI.attend,
        compute_pad_size=lambda *, total_seqlen_q, cp_size, chunk_size: 0,
    ),
    "magi_attention.common": module(
        "magi_attention.common", AttnRanges=SimpleNamespace(from_ranges=lambda ranges: ranges)
    ),
    "magi_attention.common.enum": module(
        "magi_attention.common.enum",
        AttnMaskType=SimpleNamespace(CAUSAL="causal", FULL="full"),
    ),
}
NAMES = ("torch-template", "ring-flash-attn", "yunchang", "transformer-engine", "magi-attention")


@on_ranks(2)
def test_peers_on_ranks_get_their_arguments() -> None:
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.dict(sys.modules, ON_RANKS), mock.patch.object(torch.cuda, "Stream"):
        for name in NAMES:
            peer: Any = ring_peers.RING_PEERS[name]
            for kind in peer.kinds:
                case = RingCase(shape(kind, batch=1), 2, "zigzag", threads=1, backward=True)
                judge = ring.Judge(case, group)
                assert peer.reason_against_size(case) is None
                impl = peer(judge.case, group, judge.inputs)
                with impl.active():
                    impl.run()
                verdicts = judge.verdicts(impl)
                assert len(verdicts) == 4 and all(each.ok for each in verdicts), (name, kind)
                assert impl.label
                # The rows that are drawn for the timing have the sizes of those that are judged.
                drawn = peer(judge.case, group)
                sizes = [[x.shape for x in each.leaves] for each in (drawn, impl)]
                assert sizes[0] == sizes[1]


@on_ranks(2)
def test_a_call_without_its_computation_only_sends() -> None:
    """Its results are those of rows that see nothing; the next call computes again."""
    case = RingCase(shape("causal"), 2, "zigzag", threads=1, backward=True)
    group = dist.group.WORLD
    assert group is not None
    judge = ring.Judge(case, group)
    impl = Ours(judge.case, group, judge.inputs)
    backend = get_backend(choose_backend(case.shape.spec).name)
    with without_compute(backend), profiling.collect():
        impl.run()
        figures = profiling.stats().backward
    assert figures is not None and figures.bytes_sent > 0
    assert all(bool((x == 0).all()) for x in impl.whole())
    impl.run()
    assert all(each.ok for each in judge.verdicts(impl))


@on_ranks(2)
def test_peers_on_ranks_name_what_they_cannot_run() -> None:
    def why(name: str, kind: str = "causal", world_size: int = 2, **changes: Any) -> str:
        case = RingCase(shape(kind, **changes), world_size, "zigzag", threads=1, backward=True)
        return ring_peers.RING_PEERS[name].reason_against(case) or ""

    assert "has no mask 'window'" in why("dense", "window")
    assert why("torch-template", seqlen=66) == "needs a length that is a multiple of 2 x ranks"
    assert why("torch-context-parallel") == "runs on CUDA only"
    assert why("yunchang") == "is not installed: pip install yunchang"
    with mock.patch.object(ring_peers, "installed", lambda name: True):
        assert "query head i" in why("ring-attention-pytorch")
        assert "all ranks" in why("ring-attention-pytorch", kv_heads=4, world_size=1)
        assert why("ring-attention-pytorch", kv_heads=4) == ""


@on_ranks(2)
def test_an_error_of_ours_fails_the_run_and_a_refusal_does_not() -> None:
    words = "--device cpu --world-size 2 --seqlen 32 --heads 2 --head-dim 16 --iters 1 --peer dense"
    setting = ring.setting_of(options_of("bench ring", words))
    ((case, entries),) = ring.RingBench(setting).plans()
    group = dist.group.WORLD
    assert group is not None
    for error, failures in ((ArithmeticError("made to fail"), 1), (ValueError("refused"), 0)):
        one = ring.RankRing(setting, case, group)
        said = io.StringIO()
        with mock.patch.object(Ours, "set_up", side_effect=error), redirect_stderr(said):
            rows = one.rows(entries, lambda what, share: None)
        assert len(one.failures) == failures
        notes = {row.impl: row.note for row in rows}
        assert str(error) in notes["ours"] and not notes["dense"]
        assert ("made to fail" in said.getvalue()) == bool(failures)


@on_ranks(2)
def test_rows_are_written_as_they_come() -> None:
    """A run that is killed leaves the rows so far: `measure` itself writes them."""
    setting = comm.setting_of(options_of("bench comm", "--op hop --size 64,128 --iters 1"))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "comm.json"
        comm.measure(setting, Outputs(json=path))
        assert [row["nbytes"] for row in json.loads(path.read_text())["rows"]] == [64, 128]
