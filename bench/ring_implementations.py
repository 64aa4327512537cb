"""Attention over a split sequence by several packages, for `ring-attn bench ring`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ring_attn
from ring_attn.bench.implementations import Attention
from ring_attn.check import check_group
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.spec import TransportOptions
from ring_attn.transport.base import TransportStats
from ring_attn.transport.p2p import open_p2p

MODES = {"fwd": ("fwd",), "fwd_bwd": ("fwd", "bwd", "fwd_bwd")}


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


class Impl(Attention):
    """An implementation on the ranks; `stats` counts the bytes that it sends."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.stats, self.sequence = setting, TransportStats(), setting.sequence

    @classmethod
    def reason_against(cls, setting: Setting) -> str | None:
        """Why the implementation cannot run the setting; None if it can."""
        return None

    def whole(self) -> list[Tensor]:
        """out, dq, dk, dv of the whole sequence on rank 0; nothing on other ranks."""
        parts = [ring_attn.unshard(x, self.sequence) for x in self.results()]
        return parts if dist.get_rank() == 0 else []


class Ours(Impl):
    """`ring_attention` under autograd."""

    name = "ours"

    def __init__(self, setting: Setting, inputs: Sequence[Tensor]) -> None:
        super().__init__(setting)
        q, k, v, self._dout = (setting.sequence.shard(x, dist.get_rank()) for x in inputs)
        self.inputs = [x.requires_grad_(setting.mode != "fwd") for x in (q, k, v)]
        self.stats = open_p2p(check_group(None), TransportOptions()).stats

    def forward(self) -> None:
        causal, layout = self.setting.causal, self.setting.sequence
        self.out = ring_attn.ring_attention(*self.inputs, causal=causal, layout=layout)

    def backward(self) -> None:
        assert self.out is not None, "forward comes first"
        self.grads = torch.autograd.grad(self.out, self.inputs, self._dout)


class TorchTemplate(Impl):
    """torch's private ring over its flash operators, called as by its context_parallel."""

    name = "torch-template"

    def __init__(self, setting: Setting, inputs: Sequence[Tensor]) -> None:
        super().__init__(setting)
        from torch.distributed.tensor.experimental._context_parallel import _attention as private

        self._private, self._group = private, check_group(None)
        shards = [setting.sequence.shard(x, dist.get_rank()) for x in inputs]
        self._shards = [x.transpose(1, 2).contiguous() for x in shards]
        private._cp_options.enable_load_balance = setting.layout == "zigzag"
        self._cuda = inputs[0].device.type == "cuda"
        name = "_scaled_dot_product_flash_attention" + ("" if self._cuda else "_for_cpu")
        self._forward = getattr(torch.ops.aten, name)
        self._backward = getattr(torch.ops.aten, f"{name}_backward").default
        self._options: Any = {"is_causal": setting.causal, "dropout_p": 0.0, "scale": None}
        self._saved: tuple[Any, ...] = ()

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

    def forward(self) -> None:
        q, k, v, _ = self._shards
        self._saved = self._private._templated_ring_attention(
            self._group, 2, self._forward, q, k, v, **self._options
        )
        self.out = self._saved[0].transpose(1, 2)

    def backward(self) -> None:
        q, k, v, dout = self._shards
        out, lse, *rest = self._saved
        names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
        extra = dict(zip(names, rest, strict=False)) if self._cuda else {}
        grads = self._private._templated_ring_attention_backward(
            self._group, 2, self._backward, dout, "grad_out", q, k, v, out, lse,
            **self._options, **extra,
        )  # fmt: skip
        self.grads = [x.transpose(1, 2) for x in grads[:3]]

    def release(self) -> None:
        super().release()
        self._saved = ()


class RingAttentionPytorch(Impl):
    """lucidrains' package: its function for any device, in the contiguous layout."""

    name = "ring-attention-pytorch"

    def __init__(self, setting: Setting, inputs: Sequence[Tensor]) -> None:
        super().__init__(setting)
        module = import_module("ring_attention_pytorch.ring_flash_attention")
        self._attention: Any = module.ring_flash_attn
        self.sequence = SequenceLayout.contiguous(setting.seqlen, setting.world_size)
        q, k, v, self._dout = (self.sequence.shard(x, dist.get_rank()) for x in inputs)
        self.inputs = [x.contiguous().requires_grad_(setting.mode != "fwd") for x in (q, k, v)]

    @classmethod
    def reason_against(cls, setting: Setting) -> str | None:
        """Why the package cannot run the setting, according to its source."""
        if find_spec("ring_attention_pytorch") is None:
            return "is not installed: pip install ring-attention-pytorch"
        if setting.seqlen % setting.world_size:
            return "needs a length that divides by the ranks"
        if setting.kv_heads != setting.heads:
            return "gives query head i the kv head i % kv_heads, other packages i // group"
        return None

    def forward(self) -> None:
        # The default bucket_size of the package's modules.
        self.out = self._attention(
            *self.inputs, causal=self.setting.causal, bucket_size=512, ring_reduce_col=True,
            ring_size=self.setting.world_size,
        )  # fmt: skip

    def backward(self) -> None:
        assert self.out is not None, "forward comes first"
        self.grads = torch.autograd.grad(self.out, self.inputs, self._dout)


class Dense(Impl):
    """Dense attention in one process with all threads; the other ranks sleep in a barrier."""

    name = "dense"

    def __init__(self, setting: Setting, inputs: Sequence[Tensor]) -> None:
        super().__init__(setting)
        self._is_first = dist.get_rank() == 0
        if self._is_first:
            q, k, v, self._dout = (x.transpose(1, 2).contiguous() for x in inputs)
            self.inputs = [x.requires_grad_(setting.mode != "fwd") for x in (q, k, v)]

    def forward(self) -> None:
        if self._is_first:
            with all_threads(self.setting):
                self.out = sdpa(self.inputs, self.setting)

    def backward(self) -> None:
        if self._is_first:
            assert self.out is not None, "forward comes first"
            with all_threads(self.setting):
                self.grads = torch.autograd.grad(self.out, self.inputs, self._dout)

    def whole(self) -> list[Tensor]:
        return [x.transpose(1, 2) for x in self.results()] if self._is_first else []


def sdpa(qkv: Sequence[Tensor], setting: Setting) -> Tensor:
    """torch's attention over (batch, heads, seqlen, dim)."""
    q, k, v = qkv
    grouped = setting.kv_heads != setting.heads
    return F.scaled_dot_product_attention(q, k, v, is_causal=setting.causal, enable_gqa=grouped)


@contextmanager
def all_threads(setting: Setting) -> Iterator[None]:
    """Gives this process the CPU threads of all ranks within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads * setting.world_size)
    try:
        yield
    finally:
        torch.set_num_threads(before)
