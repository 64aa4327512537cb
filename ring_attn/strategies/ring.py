"""Ring attention: KV shards go round, each rank folds them into the state of its own queries.

    step i    |  post hop i+1  |  compute tiles of step i  |  wait for hop i+1
    rank r       shard ------> r+1                            shard of r-i-1 <------ r-1

Forward: KV travels, the state (acc, m, l) stays and is normalised and rounded once, at the end.
Backward: delta = rowsum(dO * O) once, global lse; either KV or the Q side travels, whichever costs
fewer bytes, and its float32 gradients follow one step behind in a channel of their own, until a
last hop brings them home. A step computes into a cleared buffer while the gradients of the step
before are on their way, and adds the two when both are there: so that transfer is hidden as well.

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
from ring_attn.cost import choose_traveller, gradient_packet, peak_bytes, shard_packet
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
    gradients = _Gradients(plan, call, transport, q.device)
    at_home = [_zeros_like(x, call.spec.accum_dtype) for x in ((q,) if kv_travels else (k, v))]
    for step in plan.steps:
        shards.post(step)
        if step.tiles:
            q_held, dout_held, lse_held, delta_held = home_side if kv_travels else shards.held
            k_held, v_held = shards.held if kv_travels else (k, v)
            moving_grads = gradients.cleared(step)
            out_held = out if kv_travels or step.index == 0 else None
            dq, dk, dv = (*at_home, *moving_grads) if kv_travels else (*moving_grads, *at_home)
            backend.backward(
                q_held, k_held, v_held, dout_held, lse_held, delta_held, step.tiles, dq, dk, dv,
                softmax_scale=call.softmax_scale, out=out_held,
            )  # fmt: skip
        gradients.pass_on(step)
        shards.receive(step)
    returned = gradients.returned()
    dq, dk, dv = (*at_home, *returned) if kv_travels else (*returned, *at_home)
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
        self._plan, self._transport = plan, transport
        self._packets = _packets(plan, call, shard_packet)
        self._buffers = []
        if plan.num_hops:
            self._buffers = _buffers(self._packets, 2, own[0].device)
            packet = self._packets[plan.rank]
            # Padding is sent too; it must not hold what the transport marks buffers with.
            self._buffers[0][: packet.nbytes][-ALIGNMENT:].zero_()
            views = packet.views(self._buffers[0])
            for view, x in zip(views, own, strict=True):
                view.copy_(x)
            self.held = views

    def post(self, step: Step) -> None:
        """Sends on what is held and makes ready for what comes."""
        if step.hop is not None:
            held, coming = self._at(step.index), self._at(step.index + 1)
            send, recv = self._buffers
            self._transport.post(
                "shards", step.index, step.hop, send[: held.nbytes], recv[: coming.nbytes]
            )

    def receive(self, step: Step) -> None:
        """Waits for the next step's shard and holds it."""
        if step.hop is not None:
            self._transport.wait("shards")
            self._buffers.reverse()
            self.held = self._at(step.index + 1).views(self._buffers[0])

    def _at(self, index: int) -> Packet:
        return self._packets[self._plan.steps[index].source]


class _Gradients:
    """The travelling side's gradients, one step behind it, in three buffers.

    While one is sent and one received, the third is computed into.
    """

    def __init__(
        self, plan: Plan, call: RingCall, transport: Transport, device: torch.device
    ) -> None:
        self._plan, self._transport = plan, transport
        self._packets = _packets(plan, call, gradient_packet)
        self._dtype = call.spec.accum_dtype
        self._free = _buffers(self._packets, 3 if plan.home else 1, device)
        self._computed: Tensor | None = None
        self._sent: Tensor | None = None
        self._received: Tensor | None = None

    def cleared(self, step: Step) -> tuple[Tensor, ...]:
        """Zeros, (batch, rows, heads, dim) each, for this step's gradients."""
        self._computed = self._free.pop()
        packet = self._packets[step.source]
        self._computed[: packet.nbytes].zero_()
        return packet.views(self._computed)

    def pass_on(self, step: Step) -> None:
        """Adds what earlier ranks have sent along and sends the sum on, at the end homewards."""
        hop = step.hop or self._plan.home
        packet = self._packets[step.source]
        carried = self._take(packet)
        if hop is None:
            self._received = carried
            return
        last = step.hop is None
        source = self._plan.rank if last else self._plan.steps[step.index + 1].source
        recv = self._free.pop()
        self._transport.post(
            "gradients",
            step.index,
            hop,
            carried[: packet.nbytes],
            recv[: self._packets[source].nbytes],
        )
        self._sent, self._received = carried, recv

    def returned(self) -> tuple[Tensor, ...]:
        """This rank's own gradients, complete."""
        if self._plan.home is not None:
            self._transport.wait("gradients")
        assert self._received is not None, "a plan has at least one step"
        return self._packets[self._plan.rank].views(self._received)

    def _take(self, packet: Packet) -> Tensor:
        """This step's gradients with those received; a step without tiles carries them along."""
        if self._sent is None:
            if self._computed is None:
                self._computed = self._free.pop()
                self._computed.zero_()
            carried, self._computed = self._computed, None
            return carried
        self._transport.wait("gradients")
        assert self._received is not None, "what is sent is received as well"
        self._free.append(self._sent)
        if self._computed is None:
            return self._received
        carried, self._computed = self._computed, None
        sums, received = (
            buffer[: packet.nbytes].view(self._dtype) for buffer in (carried, self._received)
        )
        sums.add_(received)
        self._free.append(self._received)
        return carried


def _packets(
    plan: Plan,
    call: RingCall,
    packet_of: Callable[..., Packet],
) -> dict[int, Packet]:
    """The messages of all sources of a plan."""
    return {
        step.source: packet_of(call.spec, call.layouts, plan.travels, step.source)
        for step in plan.steps
    }


def _buffers(packets: dict[int, Packet], count: int, device: torch.device) -> list[Tensor]:
    size = max(packet.nbytes for packet in packets.values())
    return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]


def _delta(out: Tensor, dout: Tensor) -> Tensor:
    """(batch, nheads, rows) rowsum(dO * O) in the type of the state."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    return (out.to(wide) * dout.to(wide)).sum(-1).transpose(1, 2).contiguous()


def _zeros_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(x.shape, dtype=dtype, device=x.device)
