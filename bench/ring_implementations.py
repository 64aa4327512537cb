"""Implementations of attention over a split sequence, for `ring-attn bench ring`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ring_attn
from ring_attn.bench.implementations import Differentiable
from ring_attn.core.layout import SequenceLayout
from ring_attn.testing.launch import num_threads, rank_device
from ring_attn.transport.base import TransportStats
from ring_attn.transport.groups import check_group
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import open_p2p

Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class RingSetting:
    """The problem, and the options of its measurement."""

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
    baselines: tuple[str, ...]

    @property
    def sequence(self) -> SequenceLayout:
        return SequenceLayout.from_name(self.layout, self.seqlen, self.world_size)


class Impl(Differentiable):
    """An implementation on the ranks; `stats` counts the bytes that it sends."""

    name: str

    def __init__(self, setting: RingSetting, inputs: Sequence[Tensor]) -> None:
        self.setting = setting
        self.stats = TransportStats()
        self.sequence = setting.sequence
        attend = self.attention()
        shards = [self.shard(x).contiguous() for x in inputs]
        super().__init__(attend, shards, backward=setting.mode != "fwd")

    @classmethod
    def reason_against(cls, setting: RingSetting) -> str | None:
        """Return the reason why the implementation cannot run the setting, or None."""
        return None

    def attention(self) -> Attend:
        """Set the package up, which may change `sequence`; return its function of q, k, v."""
        raise NotImplementedError

    def shard(self, x: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor."""
        return self.sequence.shard(x, dist.get_rank())

    def run(self, mode: str) -> None:
        """Run a forward, and its backward unless `mode` is "fwd"."""
        self.forward()
        if mode != "fwd":
            self.backward()

    def whole(self) -> list[Tensor]:
        """Return out, dq, dk, dv of the whole sequence on rank 0; nothing on other ranks."""
        parts = [ring_attn.unshard(x, self.sequence) for x in self.results()]
        return parts if dist.get_rank() == 0 else []


class Ours(Impl):
    """`ring_attention` under autograd."""

    name = "ours"

    def attention(self) -> Attend:
        self.stats = open_p2p(check_group(None), TransportOptions()).stats
        causal = self.setting.causal
        layout = self.sequence
        return partial(ring_attn.ring_attention, causal=causal, layout=layout)


class Dense(Impl):
    """Dense attention in one process with all threads; the other ranks wait in a barrier."""

    name = "dense"

    def attention(self) -> Attend:
        self._is_first = dist.get_rank() == 0
        self._threads = self.setting.threads * self.setting.world_size
        grouped = self.setting.kv_heads != self.setting.heads
        attend: Attend = partial(
            F.scaled_dot_product_attention, is_causal=self.setting.causal, enable_gqa=grouped
        )
        return attend

    def shard(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    def forward(self) -> None:
        self._alone(super().forward)

    def backward(self) -> None:
        self._alone(super().backward)

    def _alone(self, stage: Callable[[], None]) -> None:
        if self._is_first:
            with num_threads(self._threads):
                stage()

    def whole(self) -> list[Tensor]:
        return [x.transpose(1, 2) for x in self.results()] if self._is_first else []


class TorchTemplate(Impl):
    """torch's private ring over its flash operators, with the arguments of context_parallel.

    `Any`: private functions and operators of torch have no types.
    """

    name = "torch-template"

    @classmethod
    def reason_against(cls, setting: RingSetting) -> str | None:
        """Return the reason why torch's ring cannot run the setting, according to its source."""
        if rank_device().type != "cpu":
            return "is measured only on CPUs"
        if setting.layout not in ("contiguous", "zigzag"):
            return f"has no {setting.layout} order"
        if setting.layout == "zigzag" and not setting.causal:
            return "supports zigzag only for causal attention"
        if setting.seqlen % (2 * setting.world_size):
            return "needs a length that is a multiple of 2 x ranks"
        return None

    def attention(self) -> Attend:
        from torch.distributed.tensor.experimental._context_parallel import _attention as private

        self._private: Any = private
        self._group = check_group(None)
        private._cp_options.enable_load_balance = self.setting.layout == "zigzag"
        aten = torch.ops.aten
        self._operator: Any = aten._scaled_dot_product_flash_attention_for_cpu
        self._backward: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        self._options: dict[str, bool | float | None] = {
            "is_causal": self.setting.causal,
            "dropout_p": 0.0,
            "scale": None,
        }
        self._saved: tuple[Tensor, ...] = ()
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
        out, lse = self._saved
        with torch.no_grad():
            grads = self._private._templated_ring_attention_backward(
                self._group,
                2,  # the sequence dim
                self._backward,
                self._dout,
                "grad_out",
                *self._leaves,
                out,
                lse,
                **self._options,
            )
        self.grads = [x.transpose(1, 2) for x in grads[:3]]

    def release(self) -> None:
        super().release()
        self._saved = ()
