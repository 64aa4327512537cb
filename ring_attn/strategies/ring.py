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

Continued (`in_order`): KV travels, and dK and dV with it, from their owner on. Every rank
accumulates into what it has received, so the queries of all ranks are folded in the order of the
ring: for a causal mask over contiguous shards that is the order of one process, and with a backend
that folds in order the bits are the same at every world size. A step computes dQ while dK and dV
are on their way: so that transfer is hidden too. It is one message more, that of the first step,
and one pass less over each: nothing is cleared, nothing added up in memory.

    owner r       own --.                                          = dK, dV
    rank r+1             `-> + own --.                            |
    rank r+2                          `-> + own --.               |
    rank r+3                                       `-> + own -----'   home

Double ring (`inner_degree`): inner rings in the nodes, an outer ring between them. A rank passes
shards on in its inner ring, and what began a round goes to the next node meanwhile; so the slow
link has a whole round for one shard. Gradients that are added up go home after every round, from
wherever in the node they have got to, and have the next round for it; home adds up the rounds.
With one inner ring the messages are those of the plain ring: the driver knows no difference.

    round 0, 2 nodes of 3       round 1                       dK, dV of rank 0, after round 1
    0 -> 1 -> 2 -> 0 ...        0 -> 1 -> 2 -> 0 ...          rank 3 -> 4 -> 5 -.
    3 -> 4 -> 5 -> 3 ...        3 -> 4 -> 5 -> 3 ...                            |
    beside it 0 <-> 3, 1 <-> 4, 2 <-> 5                       rank 0 + <--------'

`ring_forward` and `ring_backward` are functions of tensors and plain data. (Ring Attention, Liu et
al., arXiv 2310.01889; the travelling Q side, BurstAttention, arXiv 2403.09347; the double ring,
LoongTrain, arXiv 2406.18485.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from ring_attn.backends import bits_unit, choose_backend, get_backend
from ring_attn.backends.base import folds_in_order
from ring_attn.core import order
from ring_attn.core.buffers import (
    Add,
    Clear,
    Move,
    Pack,
    Post,
    Return,
    Schedule,
    Wait,
    gradient_schedule,
    shard_schedule,
)
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.plan import Plan, Tile, Traveller, plan_ring, ring_grid
from ring_attn.core.sizes import choose_traveller, gradient_packet, peak_bytes, shard_packet
from ring_attn.core.spec import AttentionSpec, Packet, Scores
from ring_attn.core.strategy import Strategy
from ring_attn.strategies.base import Forward, Gradients
from ring_attn.strategies.messages import (
    Message,
    new_buffers,
    rounded_gradient,
    sinks_gradient,
    zeros_like,
)
from ring_attn.strategies.observed import observed, observed_backend, observed_steps
from ring_attn.transport.base import Channel, PointToPoint


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
        in_order: gradients are continued rank by rank; else they are added up.
        inner_degree: ranks of an inner ring; 1, or all, is one plain ring.
    """

    spec: AttentionSpec
    layouts: tuple[SequenceLayout, SequenceLayout]
    mask: Mask
    rank: int
    softmax_scale: float
    backend: str
    travels_back: Traveller
    in_order: bool = False
    inner_degree: int = 1

    @property
    def same_bits(self) -> bool:
        """Whether the bits are those of every other world size."""
        place = (self.spec, self.layouts, self.mask, self.backend, self.inner_degree)
        return self.in_order and why_not_in_order(*place) is None

    @property
    def scores(self) -> Scores:
        """How products become scores."""
        return Scores(self.softmax_scale, self.spec.softcap)

    def plan(self, *, backward: bool) -> Plan:
        """This rank's steps in one direction."""
        travels = self.travels_back if backward else "kv"
        return plan_ring(*self.layouts, self.mask, self.rank, travels, self.inner_degree)

    @observed("forward")
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, transport: PointToPoint, sinks: Tensor | None
    ) -> Forward:
        """`ring_forward`; saves its arguments, out and lse."""
        out, lse = ring_forward(q, k, v, self, transport, sinks)
        return Forward(out, lse, (q, k, v, out, lse))

    @observed("backward")
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
    inner_degree: int = 1,
) -> RingCall:
    """The call with its choices made: backend, and what travels back; the same on every rank.

    Raises:
        ValueError: `inner_degree` does not divide the number of ranks.
        NotImplementedError: the named backend does not support the call, or `same_bits` is asked
            for and cannot be had; other errors as `choose_backend`.
    """
    ring_grid(layouts[0].world_size, inner_degree)
    backend = choose_backend(spec, backend).name
    reason = why_not_in_order(spec, layouts, mask, backend, inner_degree)
    if same_bits and reason is not None:
        raise NotImplementedError(f"same_bits=True cannot be had here: {reason}")
    travels_back, in_order = choose_gradients(spec, layouts, mask, backend, same_bits, inner_degree)
    return RingCall(
        spec,
        layouts,
        mask,
        rank,
        1.0 / math.sqrt(spec.headdim) if softmax_scale is None else softmax_scale,
        backend,
        travels_back,
        in_order,
        inner_degree,
    )


def choose_gradients(
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    backend: str,
    same_bits: bool | None,
    inner_degree: int = 1,
) -> tuple[Traveller, bool]:
    """What travels in the backward, and whether its gradients are continued.

    Where KV travels anyway, a backend that folds in order continues its gradients wherever they
    come by: each is then read and written once a step where adding up reads and writes it three
    times more. With a window there is too little to compute at a step to hide them behind its dQ.
    `same_bits=False` adds them up, behind whole steps, for links that are too slow for that.
    """
    can_have = why_not_in_order(spec, layouts, mask, backend, inner_degree) is None
    if same_bits or (same_bits is None and can_have):
        return "kv", True
    travels = choose_traveller(spec, *layouts, mask)
    plain = ring_grid(layouts[0].world_size, inner_degree).outer == 1 and mask.left is None
    in_order = folds_in_order(get_backend(backend)) and plain and travels == "kv"
    return travels, same_bits is None and in_order


def why_not_in_order(
    spec: AttentionSpec, layouts: tuple[SequenceLayout, SequenceLayout], mask: Mask, backend: str,
    inner_degree: int = 1,
) -> str | None:  # fmt: skip
    """`order.why_not_in_order` of a ring."""
    ring = Strategy(inner_degree=inner_degree)
    heads, unit = (spec.nheads, spec.nheads_kv), bits_unit(backend)
    return order.why_not_in_order(ring, heads, layouts, mask, backend, unit)


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
        in_order=call.in_order,
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
    plan = call.plan(backward=False)
    backend = observed_backend(get_backend(call.backend), transport)
    shards = _shards(plan, call, transport, (k, v))
    if sinks is not None:
        sinks = sinks.to(call.spec.accum_dtype)
    state, scores = backend.new_state(q, v.size(-1), sinks), call.scores
    last = max((step.index for step in plan.steps if step.tiles), default=0)
    for step in observed_steps(plan.steps, transport):
        shards.before(step.index)
        if step.tiles:
            k, v = shards.held(step.index)
            state = backend.forward(
                q, k, v, step.tiles, state, scores=scores, last=step.index == last
            )
        shards.after(step.index)
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
    backend = observed_backend(get_backend(call.backend), transport)
    delta = backend.delta(out, dout)
    dsinks = None if sinks is None else sinks_gradient(sinks, lse, delta)
    grads = _gradients((q, dout, lse, delta), (k, v), out, call, transport)
    # Rounded one by one, so that little is held twice.
    factor = backend.gradient_factor(call.scores)
    dtypes = [x.dtype if rounded else call.spec.accum_dtype for x in (q, k, v)]
    dv = rounded_gradient(grads.pop(), dtypes[2], 1.0)
    dk = rounded_gradient(grads.pop(), dtypes[1], factor)
    return Gradients(rounded_gradient(grads.pop(), dtypes[0], factor), dk, dv, dsinks)


def _gradients(
    q_side: tuple[Tensor, ...],
    kv: tuple[Tensor, ...],
    out: Tensor,
    call: RingCall,
    transport: PointToPoint,
) -> list[Tensor]:
    """dq, dk, dv in the type of the state; what the ring needs beside them is freed on return."""
    plan, scores = call.plan(backward=True), call.scores
    backend = observed_backend(get_backend(call.backend), transport)
    kv_travels = plan.travels == "kv"
    shards = _shards(plan, call, transport, kv if kv_travels else q_side)
    own = [zeros_like(x, call.spec.accum_dtype) for x in (q_side[0], *kv)]
    staying, moving = (own[:1], own[1:]) if kv_travels else (own[1:], own[:1])
    travelling = _travelling_gradients(plan, call, transport, moving)
    for step in observed_steps(plan.steps, transport):
        shards.before(step.index)
        if step.tiles:
            held = shards.held(step.index)
            q, dout, lse, delta = q_side if kv_travels else held
            k, v = held if kv_travels else kv
            if call.in_order and folds_in_order(backend):
                args = (q, k, v, dout, lse, delta, step.tiles)
                backend.backward_q(*args, *staying, scores=scores)
                travelling.before(step.index)
                backend.backward_kv(*args, *travelling.held(step.index), scores=scores)
            else:
                travelling.before(step.index)
                grads = travelling.held(step.index)
                dq, dk, dv = (*staying, *grads) if kv_travels else (*grads, *staying)
                backend.backward(
                    q, k, v, dout, lse, delta, step.tiles, dq, dk, dv,
                    scores=scores, out=out if kv_travels or step.index == 0 else None,
                )  # fmt: skip
        travelling.after(step.index)
        shards.after(step.index)
    travelling.end()
    return own


class _Messages:
    """The buffers of a schedule, and the moves between them: what a rank does with its messages.

    The exchanges of the inner ring and of the outer one have a channel each.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        packets: Sequence[Packet],
        channels: tuple[Channel, Channel],
        transport: PointToPoint,
        own: Sequence[Tensor],
    ) -> None:
        self._sends, self._schedule, self._packets = plan.sends, schedule, packets
        self._channels, self._transport, self._own = channels, transport, own
        self._buffers = new_buffers(packets, schedule.num_buffers, own[0].device)
        self._messages: dict[tuple[int, int], Message] = {}

    def before(self, index: int) -> None:
        """The moves before a step is computed."""
        self._do(index, self._schedule.steps[index].before)

    def held(self, index: int) -> Sequence[Tensor]:
        """What a step is computed with or into: the rank's own, or views of a buffer."""
        buffer = self._schedule.steps[index].held
        if buffer is None:
            return self._own
        return self._message(buffer, index).tensors

    def after(self, index: int) -> None:
        """The moves when a step has been computed."""
        self._do(index, self._schedule.steps[index].after)

    def end(self) -> None:
        """The moves when all steps are over."""
        self._do(len(self._schedule.steps), self._schedule.end)

    def _do(self, index: int, moves: Sequence[Move]) -> None:
        for move in moves:
            match move:
                case Pack(buffer):
                    self._message(buffer, 0).pack(self._own, self._sends)
                case Clear(buffer, step):
                    self._message(buffer, step).bytes.zero_()
                case Post(transfer, send, recv):
                    self._transport.post(
                        self._channels[transfer.outer],
                        index,
                        transfer.hop,
                        self._message(send, transfer.sends).bytes,
                        self._message(recv, transfer.brings).bytes,
                    )
                case Wait(outer):
                    self._transport.wait(self._channels[outer])
                case Add(into, buffer, step):
                    self._message(into, step).numbers.add_(self._message(buffer, step).numbers)
                case Return(buffer, replace):
                    returned = self._message(buffer, 0).tensors
                    for mine, others in zip(self._own, returned, strict=True):
                        if replace:
                            mine[:, self._sends] = others
                        else:
                            mine[:, self._sends] += others

    def _message(self, buffer: int, step: int) -> Message:
        # Steps of equal rows have one packet.
        key = (buffer, id(self._packets[step]))
        if key not in self._messages:
            self._messages[key] = Message(self._packets[step], self._buffers[buffer])
        return self._messages[key]


def _shards(
    plan: Plan, call: RingCall, transport: PointToPoint, own: tuple[Tensor, ...]
) -> _Messages:
    """The travelling side: this rank's own shard first, then those that come by."""
    packets = _packets(plan, call.spec, shard_packet)
    return _Messages(plan, shard_schedule(plan), packets, ("shards", "outer"), transport, own)


def _travelling_gradients(
    plan: Plan, call: RingCall, transport: PointToPoint, own: Sequence[Tensor]
) -> _Messages:
    """The gradients of the travelling side, passed on one step behind its shards."""
    schedule = gradient_schedule(plan, continued=call.in_order)
    packets = _packets(plan, call.spec, gradient_packet)
    channels: tuple[Channel, Channel] = ("gradients", "outer_gradients")
    return _Messages(plan, schedule, packets, channels, transport, own)


@lru_cache(maxsize=4096)
def _packets(
    plan: Plan, spec: AttentionSpec, packet_of: Callable[[AttentionSpec, Traveller, int], Packet]
) -> tuple[Packet, ...]:
    """The message of every step: what is passed on of the shard that is held then."""
    return tuple(packet_of(spec, plan.travels, plan.rows_moving(step.index)) for step in plan.steps)
