"""Attention over a split sequence by several packages, for `ring-attn bench ring`.

Packages that need GPUs are called as their documentation says: ring-flash-attn 0.1.7, yunchang 0.6,
TransformerEngine 2, MagiAttention 1.1. None of them has been run here; the tests replace them by
modules with the same names and signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ring_attn
from ring_attn.bench.implementations import Differentiable
from ring_attn.core.dtypes import HALF_DTYPES
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.spec import TransportOptions
from ring_attn.groups import check_group
from ring_attn.tools.launch import num_threads, rank_device
from ring_attn.transport.base import TransportStats
from ring_attn.transport.p2p import open_p2p

MODES = {"fwd": ("fwd",), "fwd_bwd": ("fwd", "bwd", "fwd_bwd")}

Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Setting:
    """Sizes, ranks and repetitions of a run."""

    world_size: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    layout: str
    mode: str
    threads: int
    iters: int
    warmup: int
    baselines: tuple[str, ...]

    @property
    def sequence(self) -> SequenceLayout:
        return SequenceLayout.from_name(self.layout, self.seqlen, self.world_size)

    @property
    def all_threads(self) -> int:
        return self.threads * self.world_size


class Impl(Differentiable):
    """An implementation on the ranks; `stats` counts the bytes that it sends."""

    name: str

    def __init__(self, setting: Setting, inputs: Sequence[Tensor]) -> None:
        self.setting, self.stats, self.sequence = setting, TransportStats(), setting.sequence
        attend = self.attention()
        shards = [self.shard(x).contiguous() for x in inputs]
        super().__init__(attend, shards, backward=setting.mode != "fwd")

    @classmethod
    def reason_against(cls, setting: Setting) -> str | None:
        """Why the implementation cannot run the setting; None if it can."""
        return None

    def attention(self) -> Attend:
        """Sets the package up, maybe with another `sequence`; returns its function of q, k, v."""
        raise NotImplementedError

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows of a whole tensor."""
        return self.sequence.shard(x, dist.get_rank())

    def run(self, mode: str) -> None:
        """Runs a forward, and unless `mode` is "fwd" its backward."""
        self.forward()
        if mode != "fwd":
            self.backward()

    def whole(self) -> list[Tensor]:
        """out, dq, dk, dv of the whole sequence on rank 0; nothing on other ranks."""
        parts = [ring_attn.unshard(x, self.sequence) for x in self.results()]
        return parts if dist.get_rank() == 0 else []


class Ours(Impl):
    """`ring_attention` under autograd."""

    name = "ours"

    def attention(self) -> Attend:
        self.stats = open_p2p(check_group(None), TransportOptions()).stats
        causal, layout = self.setting.causal, self.sequence
        return partial(ring_attn.ring_attention, causal=causal, layout=layout)


class Dense(Impl):
    """Dense attention in one process with all threads; the other ranks sleep in a barrier."""

    name = "dense"

    def attention(self) -> Attend:
        self._is_first = dist.get_rank() == 0
        setting, attend = self.setting, F.scaled_dot_product_attention
        grouped = setting.kv_heads != setting.heads
        return partial(attend, is_causal=setting.causal, enable_gqa=grouped)

    def shard(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    def forward(self) -> None:
        if self._is_first:
            with num_threads(self.setting.all_threads):
                super().forward()

    def backward(self) -> None:
        if self._is_first:
            with num_threads(self.setting.all_threads):
                super().backward()

    def whole(self) -> list[Tensor]:
        return [x.transpose(1, 2) for x in self.results()] if self._is_first else []


class TorchTemplate(Impl):
    """torch's private ring over its flash operators, called as by its context_parallel."""

    name = "torch-template"

    @classmethod
    def reason_against(cls, setting: Setting) -> str | None:
        """Why torch's ring cannot run the setting, according to its source."""
        if setting.layout not in ("contiguous", "zigzag"):
            return f"has no {setting.layout} order"
        if setting.layout == "zigzag" and not setting.causal:
            return "balances only causal attention"
        if setting.seqlen % (2 * setting.world_size):
            return "needs a length that divides by 2 x ranks"
        return None

    def attention(self) -> Attend:
        from torch.distributed.tensor.experimental._context_parallel import _attention as private

        self._private: Any = private
        self._group = check_group(None)
        private._cp_options.enable_load_balance = self.setting.layout == "zigzag"
        self._cuda = rank_device().type == "cuda"
        name = "_scaled_dot_product_flash_attention" + ("" if self._cuda else "_for_cpu")
        self._operator = getattr(torch.ops.aten, name)
        self._backward = getattr(torch.ops.aten, f"{name}_backward").default
        self._options: Any = {"is_causal": self.setting.causal, "dropout_p": 0.0, "scale": None}
        self._saved: tuple[Any, ...] = ()
        return self._operator

    def shard(self, x: Tensor) -> Tensor:
        return super().shard(x).transpose(1, 2)

    def forward(self) -> None:
        with torch.no_grad():
            self._saved = self._private._templated_ring_attention(
                self._group, 2, self._operator, *self._leaves, **self._options
            )
        self.out = self._saved[0].transpose(1, 2)

    def backward(self) -> None:
        out, lse, *rest = self._saved
        names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
        extra = dict(zip(names, rest, strict=False)) if self._cuda else {}
        with torch.no_grad():
            grads = self._private._templated_ring_attention_backward(
                self._group, 2, self._backward, self._dout, "grad_out", *self._leaves, out, lse,
                **self._options, **extra,
            )  # fmt: skip
        self.grads = [x.transpose(1, 2) for x in grads[:3]]

    def release(self) -> None:
        super().release()
        self._saved = ()


class Package(Impl):
    """An implementation of another package, `module`, installed as `install` says."""

    module: str
    install: str

    @classmethod
    def reason_against(cls, setting: Setting) -> str | None:
        """Why the package cannot run the setting, according to its documentation."""
        return None if find_spec(cls.module) else f"is not installed: {cls.install}"


class RingAttentionPytorch(Package):
    """lucidrains' package: its function for any device, in the contiguous layout."""

    name = "ring-attention-pytorch"
    module = "ring_attention_pytorch"
    install = "pip install ring-attention-pytorch"

    @classmethod
    def reason_against(cls, setting: Setting) -> str | None:
        if setting.seqlen % setting.world_size:
            return "needs a length that divides by the ranks"
        if setting.kv_heads != setting.heads:
            return "gives query head i the kv head i % kv_heads, other packages i // group"
        return super().reason_against(setting)

    def attention(self) -> Attend:
        setting = self.setting
        self.sequence = SequenceLayout.contiguous(setting.seqlen, setting.world_size)
        # The default bucket_size of the package's modules.
        return partial(
            import_module(f"{self.module}.ring_flash_attention").ring_flash_attn,
            causal=setting.causal, bucket_size=512, ring_reduce_col=True,
            ring_size=setting.world_size,
        )  # fmt: skip


class GpuPackage(Package):
    """A package that needs GPUs."""

    @classmethod
    def reason_against(cls, setting: Setting) -> str | None:
        if reason := super().reason_against(setting):
            return reason
        if rank_device().type != "cuda":
            return "needs GPUs"
        if setting.dtype not in HALF_DTYPES:
            return f"has float16 and bfloat16, not {setting.dtype}"
        if setting.layout == "striped":
            return "has no striped order"
        if setting.causal != (setting.layout == "zigzag"):
            return "is measured in zigzag order where causal, else in contiguous order"
        if setting.seqlen % (2 * setting.world_size):
            return "needs a length that divides by 2 x ranks"
        return None


class RingFlashAttn(GpuPackage):
    """zhuzilin's rings over flash-attention."""

    name = "ring-flash-attn"
    module = "ring_flash_attn"
    install = "pip install ring-flash-attn flash-attn"

    def attention(self) -> Attend:
        package, causal = import_module(self.module), self.setting.causal
        if causal:
            return partial(package.zigzag_ring_flash_attn_func, causal=True)
        return partial(package.ring_flash_attn_func, causal=False)


class Yunchang(GpuPackage):
    """USP: Ulysses over all ranks if the kv heads divide by them, else a ring."""

    name = "yunchang"
    module = "yunchang"
    install = "pip install yunchang flash-attn"

    def attention(self) -> Attend:
        package, setting, size = import_module(self.module), self.setting, self.setting.world_size
        by_heads = setting.kv_heads % size == 0
        if by_heads:
            self.sequence = SequenceLayout.contiguous(setting.seqlen, size)
        package.set_seq_parallel_pg(*((size, 1) if by_heads else (1, size)), dist.get_rank(), size)
        kind = "basic" if by_heads or not setting.causal else "zigzag"
        return partial(package.LongContextAttention(ring_impl_type=kind), causal=setting.causal)


class TransformerEngine(GpuPackage):
    """NVIDIA's package with its default communication, a ring."""

    name = "transformer-engine"
    module = "transformer_engine"
    install = "pip install transformer-engine[pytorch]"

    def attention(self) -> Attend:
        setting = self.setting
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


class MagiAttention(GpuPackage):
    """SandAI's package, which dispatches chunks of rows to ranks itself."""

    name = "magi-attention"
    module = "magi_attention"
    install = "see its documentation, it is built from source"

    def attention(self) -> Attend:
        setting, self._api = self.setting, import_module(f"{self.module}.api")
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


GPU_PACKAGES: tuple[type[GpuPackage], ...] = (
    RingFlashAttn, Yunchang, TransformerEngine, MagiAttention,
)  # fmt: skip
