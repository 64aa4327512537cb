"""Packages of context parallelism that need GPUs, for `ring-attn bench ring`.

Each is called as its documentation says: ring-flash-attn 0.1.7, yunchang 0.6, TransformerEngine 2,
MagiAttention 1.1. None of them has been run here; the tests replace them by modules with the same
names and signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.bench.ring_implementations import Impl, Setting
from ring_attn.check import check_group
from ring_attn.core.layout import SequenceLayout
from ring_attn.tools.launch import rank_device

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class GpuPeer(Impl):
    """A package with a differentiable function of a rank's rows of q, k and v."""

    module: str
    install: str

    def __init__(self, setting: Setting, inputs: Sequence[Tensor]) -> None:
        super().__init__(setting)
        self.sequence = self.layout_of(setting)
        self._attend = self.attention(setting)
        shards = [self.shard(x).contiguous() for x in inputs]
        self._dout = shards.pop()
        self.inputs = [x.requires_grad_(setting.mode != "fwd") for x in shards]

    @classmethod
    def reason_against(cls, setting: Setting) -> str | None:
        """Why the package cannot run the setting; None if it can."""
        if find_spec(cls.module) is None:
            return f"is not installed: {cls.install}"
        if rank_device().type != "cuda":
            return "needs GPUs"
        if setting.dtype not in (torch.float16, torch.bfloat16):
            return f"has float16 and bfloat16, not {setting.dtype}"
        if setting.layout == "striped":
            return "has no striped order"
        if setting.causal != (setting.layout == "zigzag"):
            return "is measured in zigzag order where causal, else in contiguous order"
        if setting.seqlen % (2 * setting.world_size):
            return "needs a length that divides by 2 x ranks"
        return None

    def layout_of(self, setting: Setting) -> SequenceLayout:
        """The positions of each rank."""
        return setting.sequence

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows of a whole tensor."""
        return self.sequence.shard(x, dist.get_rank())

    def attention(self, setting: Setting) -> Attend:
        """Sets the package up, and returns its function."""
        raise NotImplementedError

    def forward(self) -> None:
        self.out = self._attend(*self.inputs)

    def backward(self) -> None:
        assert self.out is not None, "forward comes first"
        self.grads = torch.autograd.grad(self.out, self.inputs, self._dout)


class RingFlashAttn(GpuPeer):
    """zhuzilin's rings over flash-attention."""

    name = "ring-flash-attn"
    module = "ring_flash_attn"
    install = "pip install ring-flash-attn flash-attn"

    def attention(self, setting: Setting) -> Attend:
        package = import_module(self.module)
        if setting.causal:
            function = package.zigzag_ring_flash_attn_func
        else:
            function = package.ring_flash_attn_func
        return lambda q, k, v: function(q, k, v, causal=setting.causal)


class Yunchang(GpuPeer):
    """USP: Ulysses over all ranks if the kv heads divide by them, else a ring."""

    name = "yunchang"
    module = "yunchang"
    install = "pip install yunchang flash-attn"

    @staticmethod
    def _by_heads(setting: Setting) -> bool:
        return setting.kv_heads % setting.world_size == 0

    def layout_of(self, setting: Setting) -> SequenceLayout:
        if self._by_heads(setting):
            return SequenceLayout.contiguous(setting.seqlen, setting.world_size)
        return setting.sequence

    def attention(self, setting: Setting) -> Attend:
        package, size = import_module(self.module), setting.world_size
        ulysses, ring = (size, 1) if self._by_heads(setting) else (1, size)
        package.set_seq_parallel_pg(ulysses, ring, dist.get_rank(), size)
        kind = "zigzag" if ring > 1 and setting.causal else "basic"
        attention = package.LongContextAttention(ring_impl_type=kind)
        return lambda q, k, v: attention(q, k, v, causal=setting.causal)


class TransformerEngine(GpuPeer):
    """NVIDIA's package with its default communication, a ring."""

    name = "transformer-engine"
    module = "transformer_engine"
    install = "pip install transformer-engine[pytorch]"

    def attention(self, setting: Setting) -> Attend:
        attention = import_module(f"{self.module}.pytorch").DotProductAttention(
            setting.heads,
            setting.head_dim,
            num_gqa_groups=setting.kv_heads,
            attn_mask_type="causal" if setting.causal else "no_mask",
            qkv_format="bshd",
        )
        ranks, group = list(range(setting.world_size)), check_group(None)
        attention.set_context_parallel_group(group, ranks, torch.cuda.Stream(), "p2p")
        return lambda q, k, v: attention(q, k, v).view(q.shape)


class MagiAttention(GpuPeer):
    """SandAI's package, which dispatches chunks of rows to ranks itself."""

    name = "magi-attention"
    module = "magi_attention"
    install = "see its documentation, it is built from source"

    def attention(self, setting: Setting) -> Attend:
        self._api: Any = import_module(f"{self.module}.api")
        ranges = import_module(f"{self.module}.common").AttnRanges.from_ranges
        self._key = self._api.magi_attn_flex_key(
            q_ranges=ranges([[0, setting.seqlen]]),
            k_ranges=ranges([[0, setting.seqlen]]),
            attn_mask_type="causal" if setting.causal else "full",
            total_seqlen_q=setting.seqlen,
            total_seqlen_k=setting.seqlen,
            num_heads_q=setting.heads,
            num_heads_kv=setting.kv_heads,
            head_dim=setting.head_dim,
            pad_size=0,
            cp_group_or_mesh=check_group(None),
        )
        return lambda q, k, v: self._api.calc_attn(q, k, v, self._key)[0]

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows of one sequence, without a batch dim."""
        rows: Tensor = self._api.dispatch(x[0], self._key)
        return rows

    def whole(self) -> list[Tensor]:
        parts = [self._api.undispatch(x, self._key)[None] for x in self.results()]
        return parts if dist.get_rank() == 0 else []


GPU_PEERS: tuple[type[GpuPeer], ...] = (RingFlashAttn, Yunchang, TransformerEngine, MagiAttention)
