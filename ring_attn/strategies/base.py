"""What every strategy is: a call, as plain data, that can be run forward and backward.

    Call             sizes, layouts, mask, rank: the same on every rank but for `rank`
    Call.forward     this rank's shards -> out, lse, and what the backward needs of them
    Call.backward    that, and dout -> dq, dk, dv, dsinks
    attend           the two under autograd, for all strategies

Calls contain one another: one that exchanges heads or queries has inside it the call of a ring or a
gathering, over other layouts.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_attn.transport.base import Transport


class Forward(NamedTuple):
    """What a forward gives.

    Attributes:
        out: (batch, rows, nheads, headdim_v) in the dtype of q.
        lse: (batch, nheads, rows) in the type of the state.
        saved: tensors that the backward wants; none of them a communication buffer.
    """

    out: Tensor
    lse: Tensor
    saved: tuple[Tensor, ...]


class Gradients(NamedTuple):
    """What a backward gives: of this rank's shards, and its share of that of the sinks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


class Call(Protocol):
    """One call of a strategy on one rank.

    `keeps_inputs` says that q, k and v are among what its forward saves; `same_bits` that its
    results have the same bits at every world size.
    """

    keeps_inputs: ClassVar[bool]

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
        ...

    @property
    def backend(self) -> str:
        """Name of the backend."""
        ...

    @property
    def same_bits(self) -> bool:
        """Whether the bits are those of every other world size."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, transport: Transport, sinks: Tensor | None
    ) -> Forward:
        """Attention of this rank's queries to all keys.

        Args:
            q: (batch, rows, nheads, headdim), this rank's shard.
            k: (batch, rows_kv, nheads_kv, headdim).
            v: (batch, rows_kv, nheads_kv, headdim_v).
            transport: of this rank among all ranks of the call.
            sinks: (nheads,), the same on every rank.
        """
        ...

    def backward(
        self,
        saved: tuple[Tensor, ...],
        dout: Tensor,
        transport: Transport,
        sinks: Tensor | None,
        *,
        rounded: bool = True,
    ) -> Gradients:
        """Gradients of this rank's shards.

        Args:
            saved: the forward's; neither changed nor kept.
            dout: gradient of `out`.
            transport: as in the forward.
            sinks: as in the forward.
            rounded: dq, dk, dv in the dtypes of q, k, v; else as they were accumulated, for a
                call around this one that has more to add.
        """
        ...


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call, transport: Transport
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a call, with gradients to q, k, v and sinks; lse takes none."""
    anchors: list[Tensor] = []
    if torch.is_grad_enabled() and not call.keeps_inputs:
        anchors = [x[:0].clone() for x in (q, k, v) if x.requires_grad]
    out, lse = _Attention.apply(q, k, v, sinks, call, transport, *anchors)
    return out, lse


class _Attention(torch.autograd.Function):
    """A call under autograd.

    What it saves is up to the call. Only so that its gradients hang on its inputs where they are
    differentiated again, `anchors` stand for inputs that the call does not save: they hold nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        call: Call,
        transport: Transport,
        *anchors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`out` and `lse`."""
        out, lse, saved = call.forward(q, k, v, transport, sinks)
        ctx.save_for_backward(sinks, *anchors, *saved)
        ctx.mark_non_differentiable(lse)
        ctx.call, ctx.transport, ctx.num_anchors = call, transport, len(anchors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        """dq, dk, dv, dsinks; differentiating them again raises."""
        sinks, *tensors = ctx.saved_tensors
        saved = tuple(tensors[ctx.num_anchors :])
        with torch.no_grad():
            grads = ctx.call.backward(saved, dout.contiguous(), ctx.transport, sinks)
        if torch.is_grad_enabled():
            grads = _OnceDifferentiable.apply(*grads, dout, sinks, *tensors)
        return (*grads, *(2 + ctx.num_anchors) * [None])


class _OnceDifferentiable(torch.autograd.Function):
    """Passes gradients through under `create_graph=True` and raises if they are differentiated.

    torch's `once_differentiable` does so only where dout itself requires a gradient, and else
    returns gradients that look like constants: a second-order term would be left out in silence.
    """

    @staticmethod
    def forward(
        ctx: Any,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dsinks: Tensor | None,
        *inputs: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients as they are."""
        return tuple(None if x is None else x.view_as(x) for x in (dq, dk, dv, dsinks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Always raises."""
        raise NotImplementedError(
            "ring_attention is differentiable once: the gradient of its gradient is not built"
        )
