"""Attention over a sequence as several packages have it on the ranks of `ring-attn bench ring`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ring_attn
from ring_attn.check import check_group
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.spec import TransportOptions
from ring_attn.tools.arguments import parse_dtype
from ring_attn.transport.base import TransportStats
from ring_attn.transport.p2p import open_p2p

MODES = {"fwd": ("fwd",), "fwd_bwd": ("fwd", "bwd", "fwd_bwd")}


@dataclass(frozen=True)
class Setting:
    """Sizes, ranks and repetitions of a run."""

    world_size: int
    seqlen: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    layout: str
    mode: str
    backend: str
    threads: int
    iters: int
    warmup: int
    baselines: tuple[str, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        return parse_dtype(self.dtype)

    @property
    def sequence(self) -> SequenceLayout:
        """The layout over the whole sequence."""
        return SequenceLayout.from_name(self.layout, self.seqlen, self.world_size)


class Impl(Protocol):
    """An implementation of attention: forward, then backward of that forward."""

    name: str
    stats: TransportStats

    def forward(self) -> None:
        """Computes `out`."""
        ...

    def backward(self) -> None:
        """Computes the gradients of the last forward."""
        ...

    def results(self) -> list[Tensor] | None:
        """out, dq, dk, dv of the whole sequence on rank 0; None on ranks that hold none."""
        ...

    def release(self) -> None:
        """Lets go of the last results, so that a measurement starts from the inputs alone."""
        ...


class Ours:
    """`ring_attention` and autograd."""

    name = "ours"

    def __init__(self, setting: Setting, inputs: Sequence[Tensor]) -> None:
        self._setting, self._layout = setting, setting.sequence
        rank = dist.get_rank()
        q, k, v, self._dout = (self._layout.shard(x, rank) for x in inputs)
        self.inputs = [x.requires_grad_(setting.mode != "fwd") for x in (q, k, v)]
        self.stats = open_p2p(check_group(None), TransportOptions()).stats
        self._grads: Sequence[Tensor] = ()

    def forward(self) -> None:
        """Computes `out`."""
        self._out = ring_attn.ring_attention(
            *self.inputs,
            causal=self._setting.causal,
            layout=self._layout,
            backend=self._setting.backend,
        )

    def backward(self) -> None:
        """Computes the gradients of the last forward."""
        self._grads = torch.autograd.grad(self._out, self.inputs, self._dout)

    def results(self) -> list[Tensor] | None:
        """The shards gathered."""
        whole = [ring_attn.unshard(x, self._layout) for x in (self._out, *self._grads)]
        return whole if dist.get_rank() == 0 else None

    def release(self) -> None:
        """Lets go of the last results, so that a measurement starts from the inputs alone."""
        del self._out
        self._grads = ()


class TorchTemplate:
    """torch's private ring over its own flash operators, as its context_parallel calls it."""

    name = "torch-template"

    def __init__(self, setting: Setting, inputs: Sequence[Tensor]) -> None:
        self.stats = TransportStats()
        from torch.distributed.tensor.experimental._context_parallel import _attention as private

        self._private, self._setting, self._layout = private, setting, setting.sequence
        self._group, rank = check_group(None), dist.get_rank()
        self._shards = [self._layout.shard(x, rank).transpose(1, 2).contiguous() for x in inputs]
        private._cp_options.enable_load_balance = setting.layout == "zigzag"
        aten = torch.ops.aten
        if inputs[0].device.type == "cuda":
            self._ops = (
                aten._scaled_dot_product_flash_attention,
                aten._scaled_dot_product_flash_attention_backward.default,
            )
        else:
            self._ops = (
                aten._scaled_dot_product_flash_attention_for_cpu,
                aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            )
        self._grads: Sequence[Tensor] = ()

    @staticmethod
    def reason_against(setting: Setting) -> str | None:
        """Why torch's ring cannot run this, by its own source."""
        if setting.layout not in ("contiguous", "zigzag"):
            return f"has no {setting.layout} order"
        if setting.layout == "zigzag" and not setting.causal:
            return "balances only causal attention"
        if setting.seqlen % (2 * setting.world_size):
            return "needs a length that divides by 2 x ranks"
        return None

    def forward(self) -> None:
        """Computes `out`."""
        q, k, v, _ = self._shards
        self._forward_result = self._private._templated_ring_attention(
            self._group, 2, self._ops[0], q, k, v,
            is_causal=self._setting.causal, dropout_p=0.0, scale=None,
        )  # fmt: skip
        self._out = self._forward_result[0]

    def backward(self) -> None:
        """Computes the gradients of the last forward."""
        q, k, v, dout = self._shards
        out, lse, *rest = self._forward_result
        extra: dict[str, Any] = {}
        if q.device.type == "cuda":
            names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
            extra = dict(zip(names, rest, strict=False))
        self._grads = self._private._templated_ring_attention_backward(
            self._group, 2, self._ops[1], dout, "grad_out", q, k, v, out, lse,
            is_causal=self._setting.causal, dropout_p=0.0, scale=None, **extra,
        )[:3]  # fmt: skip

    def results(self) -> list[Tensor] | None:
        """The shards gathered."""
        parts = [x.transpose(1, 2) for x in (self._out, *self._grads)]
        whole = [ring_attn.unshard(x, self._layout) for x in parts]
        return whole if dist.get_rank() == 0 else None

    def release(self) -> None:
        """Lets go of the last results."""
        del self._out, self._forward_result
        self._grads = ()


class Dense:
    """Dense attention in one process with all threads; the other ranks sleep in a barrier."""

    name = "dense"

    def __init__(self, setting: Setting, inputs: Sequence[Tensor]) -> None:
        self.stats = TransportStats()
        self._setting = setting
        self._mine = dist.get_rank() == 0
        if self._mine:
            q, k, v, self._dout = (x.transpose(1, 2).contiguous() for x in inputs)
            self.inputs = [x.requires_grad_(setting.mode != "fwd") for x in (q, k, v)]
        self._grads: Sequence[Tensor] = ()

    def forward(self) -> None:
        """Computes `out`."""
        if self._mine:
            with threads(self._setting.threads * self._setting.world_size):
                self._out = sdpa(self.inputs, self._setting)

    def backward(self) -> None:
        """Computes the gradients of the last forward."""
        if self._mine:
            with threads(self._setting.threads * self._setting.world_size):
                self._grads = torch.autograd.grad(self._out, self.inputs, self._dout)

    def results(self) -> list[Tensor] | None:
        """The results, which rank 0 has."""
        if not self._mine:
            return None
        return [x.transpose(1, 2) for x in (self._out, *self._grads)]

    def release(self) -> None:
        """Lets go of the last results."""
        if self._mine:
            del self._out
            self._grads = ()


def sdpa(qkv: Sequence[Tensor], setting: Setting) -> Tensor:
    """torch's attention over (batch, heads, seqlen, dim)."""
    q, k, v = qkv
    grouped = setting.kv_heads != setting.heads
    return F.scaled_dot_product_attention(q, k, v, is_causal=setting.causal, enable_gqa=grouped)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of CPU threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
