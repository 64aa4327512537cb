"""Ring attention: KV shards go round, each rank folds them into the state of its own queries.

    step i    |  post hop i+1  |  compute tiles of step i  |  wait for hop i+1
    rank r       shard ------> r+1                            shard of r-i-1 <------ r-1

Of a shard those rows travel that another rank needs. Forward: KV travels, the state (acc, m, l)
stays and is normalised and rounded once, at the end. Backward: delta = rowsum(dO * O) once, global
lse; either KV or the Q side travels, whichever costs fewer bytes. What the ranks on its way add to
its float32 gradients follows one step behind, in a channel of its own, and a last hop brings it
home to what the owner has computed itself. A step computes into a cleared buffer while the
gradients of the step before are on their way, and adds the two when both are there: so that
transfer is hidden.

`ring_forward` and `ring_backward` are functions of tensors and plain data. (Ring Attention, Liu et
al., arXiv 2310.01889; the travelling Q side, BurstAttention, arXiv 2403.09347.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ring_attn.backends import choose_backend, get_backend
from ring_attn.cost import (
    choose_traveller,
    gradient_packet,
    num_gradient_buffers,
    peak_bytes,
    shard_packet,
)
from ring_attn.layout import SequenceLayout
from ring_attn.mask import Mask
from ring_attn.plan import Plan, Step, Tile, Traveller, plan_ring
from ring_attn.spec import ALIGNMENT, AttentionSpec, Packet
from ring_attn.transport.base import Transport


@dataclass(frozen=True)
class RingCall:
    """One call as plain data, the same on every rank but for `rank`.

    Attributes:
        spec: sizes and types.
        layouts: of the queries and of the keys.
        mask: over the whole sequence.
        rank: of this process in the ring.
        softmax_scale: factor of the scores.
        backend: name of the backend.
        travels_back: the side that travels in the backward.
    """

    spec: AttentionSpec
    layouts: tuple[SequenceLayout, SequenceLayout]
    mask: Mask
    rank: int
    softmax_scale: float
    backend: str
    travels_back: Traveller

    def plan(self, *, backward: bool) -> Plan:
        """This rank's steps in one direction."""
        travels = self.travels_back if backward else "kv"
        return plan_ring(*self.layouts, self.mask, self.rank, travels)


def make_call(
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    rank: int,
    *,
    softmax_scale: float | None = None,
    backend: str = "auto",
) -> RingCall:
    """The call with its choices made: backend, and what travels back; the same on every rank."""
    return RingCall(
        spec,
        layouts,
        mask,
        rank,
        1.0 / math.sqrt(spec.headdim) if softmax_scale is None else softmax_scale,
        choose_backend(spec, backend).name,
        choose_traveller(spec, *layouts, mask),
    )


def predicted_peak_bytes(call: RingCall, *, backward: bool) -> int:
    """Most bytes that a call holds beyond its inputs: see `cost.peak_bytes`."""
    backend = get_backend(call.backend)

    def workspace(tiles: Sequence[Tile], back: bool, rebuilds_out: bool) -> int:
        return backend.workspace_bytes(call.spec, tiles, backward=back, rebuilds_out=rebuilds_out)

    plans = (call.plan(backward=False), call.plan(backward=True) if backward else None)
    return peak_bytes(*plans, call.spec, call.layouts, workspace)


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, call: RingCall, transport: Transport
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to all keys.

    Args:
        q: (batch, rows, nheads, headdim), this rank's shard.
        k: (batch, rows_kv, nheads_kv, headdim).
        v: (batch, rows_kv, nheads_kv, headdim_v).
        call: the same on every rank but for `rank`.
        transport: of this rank.

    Returns:
        `out` (batch, rows, nheads, headdim_v) in the dtype of q, `lse` (batch, nheads, rows).
    """
    plan, backend = call.plan(backward=False), get_backend(call.backend)
    shards = _Shards(plan, call, transport, (k, v))
    state = backend.new_state(q, v.size(-1))
    for step in plan.steps:
        shards.post(step)
        k, v = shards.held
        state = backend.forward(q, k, v, step.tiles, state, softmax_scale=call.softmax_scale)
        shards.receive(step)
    return backend.finalize(state, q.dtype)


def ring_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    call: RingCall,
    transport: Transport,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's shards.

    Args:
        q: as in the forward, likewise k and v.
        out: the forward's, (batch, rows, nheads, headdim_v).
        lse: the forward's, (batch, nheads, rows).
        dout: gradient of `out`.
        call: the forward's.
        transport: of this rank.

    Returns:
        dq, dk, dv in the dtypes of q, k, v; accumulated in float32 and rounded once.
    """
    plan, backend = call.plan(backward=True), get_backend(call.backend)
    kv_travels = plan.travels == "kv"
    home_side: tuple[Tensor, ...] = (q, dout, lse, _delta(out, dout))
    shards = _Shards(plan, call, transport, (k, v) if kv_travels else home_side)
    travelling = _TravellingGradients(plan, call, transport, q.device)
    own = [_zeros_like(x, call.spec.accum_dtype) for x in (q, k, v)]
    staying, moving = (own[:1], own[1:]) if kv_travels else (own[1:], own[:1])
    for step in plan.steps:
        shards.post(step)
        if step.tiles:
            q_held, dout_held, lse_held, delta_held = home_side if kv_travels else shards.held
            k_held, v_held = shards.held if kv_travels else (k, v)
            grads = travelling.cleared(step) if step.index else moving
            dq, dk, dv = (*staying, *grads) if kv_travels else (*grads, *staying)
            out_held = out if kv_travels or step.index == 0 else None
            backend.backward(
                q_held, k_held, v_held, dout_held, lse_held, delta_held, step.tiles, dq, dk, dv,
                softmax_scale=call.softmax_scale, out=out_held,
            )  # fmt: skip
        if step.index:
            travelling.pass_on(step)
        shards.receive(step)
    for mine, returned in zip(moving, travelling.returned(), strict=False):
        mine[:, plan.sends] += returned
    dq, dk, dv = own
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class RingAttention(torch.autograd.Function):
    """`ring_forward` and `ring_backward` under autograd; q, k, v, out and lse are all it saves."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall, transport: Transport
    ) -> tuple[Tensor, Tensor]:
        """`out` and `lse`; lse takes no gradient."""
        out, lse = ring_forward(q, k, v, call, transport)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.call, ctx.transport = call, transport
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        """dq, dk, dv; differentiating them again raises."""
        q, k, v, out, lse = ctx.saved_tensors
        with torch.no_grad():
            grads = ring_backward(q, k, v, out, lse, dout.contiguous(), ctx.call, ctx.transport)
        if torch.is_grad_enabled():
            grads = _OnceDifferentiable.apply(*grads, q, k, v, dout)
        return (*grads, None, None)


class _OnceDifferentiable(torch.autograd.Function):
    """Passes gradients through under `create_graph=True` and raises if they are differentiated.

    torch's `once_differentiable` does so only where dout itself requires a gradient, and else
    returns gradients that look like constants: a second-order term would be left out in silence.
    """

    @staticmethod
    def forward(
        ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients as they are."""
        return dq.view_as(dq), dk.view_as(dk), dv.view_as(dv)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Always raises."""
        raise NotImplementedError(
            "ring_attention is differentiable once: the gradient of its gradient is not built"
        )


class _Shards:
    """The travelling side: this rank's own shard first, then those that come by in two buffers."""

    def __init__(
        self, plan: Plan, call: RingCall, transport: Transport, own: tuple[Tensor, ...]
    ) -> None:
        self.held = own
        self._transport = transport
        self._packets = _packets(plan, call, shard_packet)
        self._buffers = _buffers(self._packets, 2 if plan.num_hops else 0, own[0].device)
        if self._buffers:
            # Padding is sent too; it must not hold what the transport marks buffers with.
            self._buffers[0][: self._packets[0].nbytes][-ALIGNMENT:].zero_()
            for view, x in zip(self._packets[0].views(self._buffers[0]), own, strict=True):
                view.copy_(x[:, plan.sends] if x.ndim == 4 else x[:, :, plan.sends])

    def post(self, step: Step) -> None:
        """Sends on what is held and makes ready for what comes."""
        if step.hop is not None:
            held, coming = self._packets[step.index], self._packets[step.index + 1]
            send, recv = self._buffers
            self._transport.post(
                "shards", step.index, step.hop, send[: held.nbytes], recv[: coming.nbytes]
            )

    def receive(self, step: Step) -> None:
        """Waits for the next step's shard and holds it."""
        if step.hop is not None:
            self._transport.wait("shards")
            self._buffers.reverse()
            self.held = self._packets[step.index + 1].views(self._buffers[0])


class _TravellingGradients:
    """What this rank adds to the gradients of others, passed on one step behind their shards.

    While one buffer is sent and one received, a third is computed into.
    """

    def __init__(
        self, plan: Plan, call: RingCall, transport: Transport, device: torch.device
    ) -> None:
        self._plan, self._transport = plan, transport
        self._packets = _packets(plan, call, gradient_packet)
        self._dtype = call.spec.accum_dtype
        self._free = _buffers(self._packets, num_gradient_buffers(plan), device)
        self._computed: Tensor | None = None
        self._under_way: tuple[Tensor, Tensor] | None = None  # sent, received

    def cleared(self, step: Step) -> tuple[Tensor, ...]:
        """Zeros, (batch, rows, heads, dim) each, for this step's gradients."""
        self._computed = self._free.pop()
        packet = self._packets[step.index]
        self._computed[: packet.nbytes].zero_()
        return packet.views(self._computed)

    def pass_on(self, step: Step) -> None:
        """Adds what earlier ranks have sent along and sends the sum on, at the end homewards."""
        hop = step.hop or self._plan.home
        assert hop is not None, "a plan with a second step has a way home"
        coming = 0 if step.hop is None else step.index + 1
        carried, recv = self._carried(step), self._free.pop()
        self._transport.post(
            "gradients",
            step.index,
            hop,
            carried[: self._packets[step.index].nbytes],
            recv[: self._packets[coming].nbytes],
        )
        self._under_way = carried, recv

    def returned(self) -> tuple[Tensor, ...]:
        """What the other ranks have added to this rank's rows that travelled; nothing if none."""
        if self._under_way is None:
            return ()
        self._transport.wait("gradients")
        return self._packets[0].views(self._under_way[1])

    def _carried(self, step: Step) -> Tensor:
        """This step's gradients with those received; a step without tiles carries them along."""
        if self._computed is None and self._under_way is None:
            self.cleared(step)
        computed, self._computed = self._computed, None
        if self._under_way is None:
            assert computed is not None, "cleared has just made it"
            return computed
        self._transport.wait("gradients")
        sent, received = self._under_way
        self._free.append(sent)
        if computed is None:
            return received
        nbytes = self._packets[step.index].nbytes
        computed[:nbytes].view(self._dtype).add_(received[:nbytes].view(self._dtype))
        self._free.append(received)
        return computed


def _packets(
    plan: Plan, call: RingCall, packet_of: Callable[[AttentionSpec, Traveller, int], Packet]
) -> list[Packet]:
    """The message of every step: what is passed on of the shard that is held then."""
    return [packet_of(call.spec, plan.travels, plan.rows_moving(step.index)) for step in plan.steps]


def _buffers(packets: Sequence[Packet], count: int, device: torch.device) -> list[Tensor]:
    size = max(packet.nbytes for packet in packets)
    return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]


def _delta(out: Tensor, dout: Tensor) -> Tensor:
    """(batch, nheads, rows) rowsum(dO * O) in the type of the state."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    return (out.to(wide) * dout.to(wide)).sum(-1).transpose(1, 2).contiguous()


def _zeros_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(x.shape, dtype=dtype, device=x.device)
