"""Ring attention: KV shards go round, each rank folds them into the state of its own queries.

    step i    |  post hop i+1  |  compute tiles of step i  |  wait for hop i+1
    rank r       shard ------> r+1                            shard of r-i-1 <------ r-1

Of a shard those rows travel that another rank needs. Forward: KV travels, the state (acc, m, l)
stays and is normalised and rounded once, at the end. Backward: delta = rowsum(dO * O) once, global
lse; either KV or the Q side travels, whichever costs fewer bytes. Its float32 gradients follow, in
a channel of their own, in one of two orders.

Added up: what the ranks on its way have to add follows one step behind, and is added at home to
what the owner has computed. A step computes into a cleared buffer while the gradients of the step
before are on their way, and adds the two when both are there: so that transfer is hidden.

    owner r       own -------------------------------------------> + = dK, dV (or dQ)
    rank r+1             0 + own --.                              |
    rank r+2                        `-> + own --.                 |
    rank r+3                                     `-> + own -------'   home

Continued (`same_bits`): KV travels, and dK and dV with it, from their owner on. Every rank
accumulates into what it has received, so the queries of all ranks are folded in the order of the
ring: for a causal mask over contiguous shards that is the order of one process, and with a backend
that folds in order the bits are the same at every world size. A step computes dQ while dK and dV
are on their way: so that transfer is hidden too. It is one message more, that of the first step.

    owner r       own --.                                          = dK, dV
    rank r+1             `-> + own --.                            |
    rank r+2                          `-> + own --.               |
    rank r+3                                       `-> + own -----'   home

`ring_forward` and `ring_backward` are functions of tensors and plain data. (Ring Attention, Liu et
al., arXiv 2310.01889; the travelling Q side, BurstAttention, arXiv 2403.09347.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from ring_attn.backends import choose_backend, get_backend
from ring_attn.backends.base import folds_in_order
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
from ring_attn.spec import ALIGNMENT, AttentionSpec, Packet, Scores
from ring_attn.strategies.base import Forward, Gradients
from ring_attn.transport.base import PointToPoint


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
        same_bits: gradients travel in the order that keeps the bits at every world size.
    """

    spec: AttentionSpec
    layouts: tuple[SequenceLayout, SequenceLayout]
    mask: Mask
    rank: int
    softmax_scale: float
    backend: str
    travels_back: Traveller
    same_bits: bool = False
    keeps_inputs: ClassVar[bool] = True

    @property
    def scores(self) -> Scores:
        """How products become scores."""
        return Scores(self.softmax_scale, self.spec.softcap)

    def plan(self, *, backward: bool) -> Plan:
        """This rank's steps in one direction."""
        travels = self.travels_back if backward else "kv"
        return plan_ring(*self.layouts, self.mask, self.rank, travels)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, transport: PointToPoint, sinks: Tensor | None
    ) -> Forward:
        """`ring_forward`; saves its arguments, out and lse."""
        out, lse = ring_forward(q, k, v, self, transport, sinks)
        return Forward(out, lse, (q, k, v, out, lse))

    def backward(
        self,
        saved: tuple[Tensor, ...],
        dout: Tensor,
        transport: PointToPoint,
        sinks: Tensor | None,
        *,
        rounded: bool = True,
    ) -> Gradients:
        """`ring_backward`."""
        q, k, v, out, lse = saved
        return ring_backward(q, k, v, out, lse, dout, self, transport, sinks, rounded=rounded)


def make_call(
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    rank: int,
    *,
    softmax_scale: float | None = None,
    backend: str = "auto",
    same_bits: bool | None = None,
) -> RingCall:
    """The call with its choices made: backend, and what travels back; the same on every rank.

    Raises:
        NotImplementedError: the named backend does not support the call, or `same_bits` is asked
            for and cannot be had; other errors as `choose_backend`.
    """
    backend = choose_backend(spec, backend).name
    reason = why_not_same_bits(layouts, mask, backend)
    if same_bits and reason is not None:
        raise NotImplementedError(f"same_bits=True cannot be had here: {reason}")
    if same_bits is None:
        same_bits = reason is None
    return RingCall(
        spec,
        layouts,
        mask,
        rank,
        1.0 / math.sqrt(spec.headdim) if softmax_scale is None else softmax_scale,
        backend,
        "kv" if same_bits else choose_traveller(spec, *layouts, mask),
        same_bits,
    )


@lru_cache(maxsize=1024)
def why_not_same_bits(
    layouts: tuple[SequenceLayout, SequenceLayout], mask: Mask, backend: str
) -> str | None:
    """None where a ring can have the same bits at every world size, else the reason why not."""
    in_order = get_backend(backend)
    if not folds_in_order(in_order):
        return f"backend {backend!r} does not fold in one order; triton does"
    if mask.right != 0 or mask.left is not None or mask.cu_seqlens_q is not None:
        return "the mask must be causal without window_size and cu_seqlens"
    if any(layout.kind not in ("contiguous", "boundaries") for layout in layouts):
        return f"the layout must be contiguous, got {layouts[0]} and {layouts[1]}"
    starts, starts_kv = ((0, *accumulate(layout.shard_lens)) for layout in layouts)
    if starts != starts_kv:
        return f"q and kv must have one layout, got {layouts[0]} and {layouts[1]}"
    unit = in_order.bits_unit
    for start in starts:
        if start % unit and start != starts[-1]:
            return f"every rank's rows must start at a multiple of {unit}, one's start at {start}"
    return None


def predicted_peak_bytes(call: RingCall, *, backward: bool) -> int:
    """Most bytes that a call holds beyond its inputs: see `cost.peak_bytes`."""
    backend = get_backend(call.backend)

    def workspace(tiles: Sequence[Tile], rebuilds_out: bool) -> int:
        return backend.workspace_bytes(call.spec, tiles, backward=True, rebuilds_out=rebuilds_out)

    forward = call.plan(backward=False)
    rows = call.layouts[0].shard_len(call.rank)
    return peak_bytes(
        forward,
        call.plan(backward=True) if backward else None,
        call.spec,
        call.layouts,
        backend.forward_bytes(call.spec, rows, [step.tiles for step in forward.steps]),
        workspace,
        same_bits=call.same_bits,
    )


def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: RingCall,
    transport: PointToPoint,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to all keys.

    Args:
        q: (batch, rows, nheads, headdim), this rank's shard.
        k: (batch, rows_kv, nheads_kv, headdim).
        v: (batch, rows_kv, nheads_kv, headdim_v).
        call: the same on every rank but for `rank`.
        transport: of this rank.
        sinks: (nheads,), the same on every rank; used in the type of the state.

    Returns:
        `out` (batch, rows, nheads, headdim_v) in the dtype of q, `lse` (batch, nheads, rows).
    """
    plan, backend = call.plan(backward=False), get_backend(call.backend)
    shards = _Shards(plan, call, transport, (k, v))
    if sinks is not None:
        sinks = sinks.to(call.spec.accum_dtype)
    state = backend.new_state(q, v.size(-1), sinks)
    last = max((step.index for step in plan.steps if step.tiles), default=0)
    for step in plan.steps:
        shards.post(step)
        if step.tiles:
            k, v = shards.held
            state = backend.forward(
                q, k, v, step.tiles, state, scores=call.scores, last=step.index == last
            )
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
    transport: PointToPoint,
    sinks: Tensor | None = None,
    *,
    rounded: bool = True,
) -> Gradients:
    """Gradients of this rank's shards.

    Args:
        q: as in the forward, likewise k and v.
        out: the forward's, (batch, rows, nheads, headdim_v).
        lse: the forward's, (batch, nheads, rows).
        dout: gradient of `out`.
        call: the forward's.
        transport: of this rank.
        sinks: as in the forward.
        rounded: see below.

    Returns:
        dq, dk, dv in the dtypes of q, k, v, accumulated in float32 and rounded once (with
        `rounded=False` not at all); and dsinks, this rank's rows' share of the gradient of the
        sinks, None without them.
    """
    backend = get_backend(call.backend)
    delta = backend.delta(out, dout)
    dsinks = None if sinks is None else _sinks_gradient(sinks, lse, delta)
    grads = _gradients((q, dout, lse, delta), (k, v), out, call, transport)
    # Rounded one by one, so that little is held twice.
    factor = backend.gradient_factor(call.scores)
    dtypes = [x.dtype if rounded else call.spec.accum_dtype for x in (q, k, v)]
    dv = _rounded(grads.pop(), dtypes[2], 1.0)
    dk = _rounded(grads.pop(), dtypes[1], factor)
    return Gradients(_rounded(grads.pop(), dtypes[0], factor), dk, dv, dsinks)


def _gradients(
    q_side: tuple[Tensor, ...],
    kv: tuple[Tensor, ...],
    out: Tensor,
    call: RingCall,
    transport: PointToPoint,
) -> list[Tensor]:
    """dq, dk, dv in the type of the state; what the ring needs beside them is freed on return."""
    plan, backend = call.plan(backward=True), get_backend(call.backend)
    kv_travels = plan.travels == "kv"
    shards = _Shards(plan, call, transport, kv if kv_travels else q_side)
    own = [_zeros_like(x, call.spec.accum_dtype) for x in (q_side[0], *kv)]
    staying, moving = (own[:1], own[1:]) if kv_travels else (own[1:], own[:1])
    order = _ContinuedGradients if call.same_bits else _AddedGradients
    travelling = order(plan, call, transport, moving)
    for step in plan.steps:
        shards.post(step)
        if step.tiles:
            q, dout, lse, delta = q_side if kv_travels else shards.held
            k, v = shards.held if kv_travels else kv
            if call.same_bits and folds_in_order(backend):
                args = (q, k, v, dout, lse, delta, step.tiles)
                backend.backward_q(*args, *staying, scores=call.scores)
                backend.backward_kv(*args, *travelling.of(step), scores=call.scores)
            else:
                grads = travelling.of(step)
                dq, dk, dv = (*staying, *grads) if kv_travels else (*grads, *staying)
                backend.backward(
                    q, k, v, dout, lse, delta, step.tiles, dq, dk, dv,
                    scores=call.scores, out=out if kv_travels or step.index == 0 else None,
                )  # fmt: skip
        travelling.pass_on(step)
        shards.receive(step)
    travelling.come_home()
    return own


class _Shards:
    """The travelling side: this rank's own shard first, then those that come by in two buffers."""

    def __init__(
        self, plan: Plan, call: RingCall, transport: PointToPoint, own: tuple[Tensor, ...]
    ) -> None:
        self.held = own
        self._transport = transport
        self._packets = _packets(plan, call, shard_packet)
        self._buffers = _buffers(self._packets, 2 if plan.num_hops else 0, own[0].device)
        if self._buffers:
            _pack(self._packets[0], self._buffers[0], own, plan.sends)

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
    """The gradients of the travelling side, passed on one step behind its shards."""

    def __init__(
        self, plan: Plan, call: RingCall, transport: PointToPoint, own: Sequence[Tensor]
    ) -> None:
        self._plan, self._transport, self._own = plan, transport, own
        self._packets = _packets(plan, call, gradient_packet)
        count = num_gradient_buffers(plan, same_bits=call.same_bits)
        self._free = _buffers(self._packets, count, own[0].device)
        self._under_way: tuple[Tensor, Tensor] | None = None  # sent, received

    def _send(self, step: Step, buffer: Tensor) -> None:
        """Sends what belongs to this step's shard to where that goes, at the end homewards."""
        hop = step.hop or self._plan.home
        assert hop is not None, "a plan with a second step has a way home"
        held = self._packets[step.index]
        coming = self._packets[0 if step.hop is None else step.index + 1]
        recv = self._free.pop()
        self._transport.post(
            "gradients", step.index, hop, buffer[: held.nbytes], recv[: coming.nbytes]
        )
        self._under_way = buffer, recv

    def _received(self) -> Tensor | None:
        """The buffer that is under way to this rank, when it is there; None if none is."""
        if self._under_way is None:
            return None
        self._transport.wait("gradients")
        (sent, received), self._under_way = self._under_way, None
        self._free.append(sent)
        return received


class _AddedGradients(_TravellingGradients):
    """What this rank computes for others is added to what ranks before it have computed.

    While one buffer is sent and one received, a third is computed into.
    """

    _computed: Tensor | None = None

    def of(self, step: Step) -> Sequence[Tensor]:
        """What this step adds to, (batch, rows, heads, dim) each: the owner's own, or zeros."""
        if step.index == 0:
            return self._own
        self._computed = self._free.pop()
        packet = self._packets[step.index]
        self._computed[: packet.nbytes].zero_()
        return packet.views(self._computed)

    def pass_on(self, step: Step) -> None:
        """Adds what has been sent along; a step without tiles carries only that."""
        if step.index == 0:
            return
        received = self._received()
        if self._computed is None and received is None:
            self.of(step)
        computed, self._computed = self._computed, None
        if computed is not None and received is not None:
            nbytes, dtype = self._packets[step.index].nbytes, self._own[0].dtype
            computed[:nbytes].view(dtype).add_(received[:nbytes].view(dtype))
            self._free.append(received)
        carried = received if computed is None else computed
        assert carried is not None, "one of them is there"
        self._send(step, carried)

    def come_home(self) -> None:
        """Adds what the other ranks have computed to this rank's rows that travelled."""
        received = self._received()
        if received is not None:
            for mine, returned in zip(self._own, self._packets[0].views(received), strict=True):
                mine[:, self._plan.sends] += returned


class _ContinuedGradients(_TravellingGradients):
    """Every rank computes into what it has received, from the owner on."""

    def __init__(
        self, plan: Plan, call: RingCall, transport: PointToPoint, own: Sequence[Tensor]
    ) -> None:
        super().__init__(plan, call, transport, own)
        self._held = self._free.pop() if self._free else None

    def of(self, step: Step) -> Sequence[Tensor]:
        """What this step adds to, (batch, rows, heads, dim) each; waits until it is there."""
        return self._own if step.index == 0 else self._packets[step.index].views(self._hold())

    def pass_on(self, step: Step) -> None:
        """Sends it on; a step without tiles does so with what it has received."""
        if not self._plan.num_hops:
            return
        buffer = self._hold()
        if step.index == 0:
            _pack(self._packets[0], buffer, self._own, self._plan.sends)
        self._send(step, buffer)

    def come_home(self) -> None:
        """Puts the sums over all ranks in the place of this rank's rows that travelled."""
        received = self._received()
        if received is not None:
            for mine, returned in zip(self._own, self._packets[0].views(received), strict=True):
                mine[:, self._plan.sends] = returned

    def _hold(self) -> Tensor:
        received = self._received()
        if received is not None:
            self._held = received
        assert self._held is not None, "a ring with a second step has buffers"
        return self._held


def _packets(
    plan: Plan, call: RingCall, packet_of: Callable[[AttentionSpec, Traveller, int], Packet]
) -> list[Packet]:
    """The message of every step: what is passed on of the shard that is held then."""
    return [packet_of(call.spec, plan.travels, plan.rows_moving(step.index)) for step in plan.steps]


def _buffers(packets: Sequence[Packet], count: int, device: torch.device) -> list[Tensor]:
    size = max(packet.nbytes for packet in packets)
    return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(nheads,) -sum exp(sink - lse) delta over the rows: a sink takes weight and has no value."""
    # Rows that see nothing beside a sink of -inf: their delta is 0, and must not meet a NaN.
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    weight = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp_()
    return weight.mul_(delta).sum((0, 2)).neg_().to(sinks.dtype)


def _rounded(grad: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    """`factor * grad` in that type, rounded once; `grad` is used up."""
    if factor == 1.0:
        return grad.to(dtype)
    if grad.dtype == dtype:
        return grad.mul_(factor)
    return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))


def _pack(packet: Packet, buffer: Tensor, tensors: Sequence[Tensor], rows: slice) -> None:
    """Copies some rows of the tensors, dim 1 of 4-D and dim 2 of statistics, into a message."""
    # Padding is sent too; it must not hold what the transport marks buffers with.
    buffer[: packet.nbytes][-ALIGNMENT:].zero_()
    for view, x in zip(packet.views(buffer), tensors, strict=True):
        view.copy_(x[:, rows] if x.ndim == 4 else x[:, :, rows])


def _zeros_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(x.shape, dtype=dtype, device=x.device)
