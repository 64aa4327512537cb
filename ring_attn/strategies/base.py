"""What every strategy is: a call, as plain data, that can be run forward and backward.

    Call             sizes, layouts, mask, rank: the same on every rank but for `rank`
    Call.forward     this rank's shards -> out, lse, and what the backward needs of them
    Call.backward    that, and dout -> dq, dk, dv, dsinks

The operators of `ring_attn.ops` put the two under autograd, for all strategies.

Calls contain one another: one that exchanges heads or queries has inside it the call of a ring or a
gathering, over other layouts.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

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

    `same_bits` says that its results have the same bits at every world size.
    """

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
