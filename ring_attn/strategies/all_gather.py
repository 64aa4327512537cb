"""All-gather attention: the KV of some heads is gathered from all ranks, heads after heads.

    KV heads        0           1           2
    gather      |-------|   |-------|   |-------|
    compute             |-----------|-----------|-----------|
    reduce                          |-------|   |-------|   |-------|    backward: dK, dV

The gathered shards stand one behind another in the order of the ranks, and one call of the backend
folds them all: so any layout works, and the state need not be carried between steps. A rank holds
two gathered buffers of `heads_per_chunk` KV heads of the whole sequence. Shards are padded to the
length of the longest. The backward gathers again, and works in one of two ways.

Added up: dK and dV of all rows are accumulated in float32 and summed over the ranks by a
reduce-scatter, which is under way while the next heads are computed.

    rank r      K, V of all rows      ->  dQ, and its share of dK, dV of all rows  ->  + = dK, dV

In one place (`same_bits`): after KV the Q side of the same heads is gathered (Q, dO, lse, delta),
and dK and dV of a rank's own rows are computed from that. Nothing is summed over ranks, so every
sum is made in the order of one process.

    rank r      K, V of all rows                 ->  dQ
                Q, dO, lse, delta of all rows    ->  dK, dV

With a backend that folds in order (triton) the bits are then those of one process at every world
size, for every mask, where queries and keys are contiguous and every rank's rows start at a
multiple of the backend's `bits_unit`; each in its own layout. The keys then stand in the order of
their positions. Zigzag and striped shards do not: their sums are made in another order.

(Context parallelism of Llama 3, arXiv 2407.21783, section 3.3.2; some heads at a time, as
ring-flash-attention's `llama3_flash_attn_varlen_func` does with `heads_k_stride`.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.backends import bits_unit, choose_backend, folding_backend, get_backend
from ring_attn.backends.base import Backend
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.order import why_not_in_order
from ring_attn.core.plan import Tile, Traveller, gathered_tiles
from ring_attn.core.spec import AttentionSpec, Packet, Scores
from ring_attn.core.strategy import Strategy
from ring_attn.strategies.base import Forward, Gradients
from ring_attn.strategies.messages import (
    Message,
    Records,
    rounded_gradient,
    sinks_gradient,
    zeros_like,
)
from ring_attn.strategies.observed import observed, observed_backend, observed_steps
from ring_attn.transport.base import Transport


class Chunk(NamedTuple):
    """Heads that are gathered at a time: KV heads, and the query heads that read them."""

    kv: slice
    q: slice


@dataclass(frozen=True)
class AllGatherCall:
    """One call as plain data, the same on every rank but for `rank`.

    Attributes:
        spec: sizes and types.
        layouts: of the queries and of the keys.
        mask: over the whole sequence.
        rank: of this process.
        softmax_scale: factor of the scores.
        backend: name of the backend.
        heads_per_chunk: KV heads that are gathered at a time, at most; one rank takes all at once.
        same_bits: dK and dV are computed in one place, with the same bits at every world size.
    """

    spec: AttentionSpec
    layouts: tuple[SequenceLayout, SequenceLayout]
    mask: Mask
    rank: int
    softmax_scale: float
    backend: str
    heads_per_chunk: int = 1
    same_bits: bool = False

    @property
    def scores(self) -> Scores:
        """How products become scores."""
        return Scores(self.softmax_scale, self.spec.softcap)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layouts[0].world_size

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The heads in the order in which they are gathered; the last chunk may have fewer."""
        heads, group = self.spec.nheads_kv, self.spec.nheads // self.spec.nheads_kv
        step = heads if self.world_size == 1 else self.heads_per_chunk
        cuts = [*range(0, heads, step), heads]
        return tuple(
            Chunk(slice(a, b), slice(a * group, b * group))
            for a, b in zip(cuts, cuts[1:], strict=False)
        )

    def rows(self, gathers: Traveller) -> int:
        """Rows of a gathered shard: of the longest, and at least one."""
        layout = self.layouts[1 if gathers == "kv" else 0]
        longest = max(layout.shard_lens)
        if self.same_bits and self.world_size > 1:
            # Blocks of rows and columns are on a grid that begins at row 0 of what is gathered.
            unit = folding_backend(self.backend).bits_unit
            longest = -(-longest // unit) * unit
        return max(longest, 1)

    def tiles(self, gathers: Traveller = "kv") -> tuple[Tile, ...]:
        """This rank's tiles with what is gathered of the other side."""
        return gathered_tiles(*self.layouts, self.mask, self.rank, self.rows(gathers), gathers)

    def records(self, gathers: Traveller, chunk: Chunk) -> Records:
        """A rank's message: K and V of a chunk, or Q, dO, lse and delta."""
        spec = self.spec
        fields = [(spec.headdim, spec.dtype), (spec.headdim_v, spec.dtype)]
        if gathers == "q":
            fields += 2 * [(1, spec.accum_dtype)]
        heads = chunk.kv if gathers == "kv" else chunk.q
        return Records(spec.batch, self.rows(gathers), heads.stop - heads.start, tuple(fields))

    def gradient_packet(self, chunk: Chunk) -> Packet:
        """A rank's part of what is reduced: dK and dV of a chunk."""
        return self.chunk_spec(chunk).kv_grad_packet(self.rows("kv"))

    def chunk_spec(self, chunk: Chunk) -> AttentionSpec:
        """Sizes and types of the call of a chunk."""
        nheads, nheads_kv = chunk.q.stop - chunk.q.start, chunk.kv.stop - chunk.kv.start
        return replace(self.spec, nheads=nheads, nheads_kv=nheads_kv)

    @observed("forward")
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, transport: Transport, sinks: Tensor | None
    ) -> Forward:
        """`all_gather_forward`; saves its arguments, out and lse."""
        out, lse = all_gather_forward(q, k, v, self, transport, sinks)
        return Forward(out, lse, (q, k, v, out, lse))

    @observed("backward")
    def backward(
        self,
        saved: tuple[Tensor, ...],
        dout: Tensor,
        transport: Transport,
        sinks: Tensor | None,
        *,
        rounded: bool = True,
    ) -> Gradients:
        """`all_gather_backward`."""
        q, k, v, out, lse = saved
        return all_gather_backward(q, k, v, out, lse, dout, self, transport, sinks, rounded=rounded)


def make_call(
    spec: AttentionSpec,
    layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask,
    rank: int,
    *,
    softmax_scale: float | None = None,
    backend: str = "auto",
    same_bits: bool | None = None,
    heads_per_chunk: int | None = None,
) -> AllGatherCall:
    """The call with its choices made; the same on every rank but for `rank`.

    Args:
        spec: sizes and types.
        layouts: of the queries and of the keys, over as many ranks; both striped or neither.
        mask: over the whole sequence.
        rank: of this process.
        softmax_scale: factor of the scores; None is 1 / sqrt(headdim).
        backend: name of the backend, or "auto".
        same_bits: None is on where it can be had.
        heads_per_chunk: KV heads that are gathered at a time, at most; None is 1.

    Raises:
        ValueError: layouts and mask that do not fit each other, or `heads_per_chunk` below 1.
        NotImplementedError: the named backend does not support the call, layouts whose strides
            differ, or `same_bits` is asked for and cannot be had; other errors as `choose_backend`.
    """
    if heads_per_chunk is not None and heads_per_chunk < 1:
        raise ValueError(f"heads_per_chunk must be at least 1, got {heads_per_chunk}")
    backend = choose_backend(spec, backend).name
    heads, gathering = (spec.nheads, spec.nheads_kv), Strategy("all_gather")
    reason = why_not_in_order(gathering, heads, layouts, mask, backend, bits_unit(backend))
    if same_bits and reason is not None:
        raise NotImplementedError(f"same_bits=True cannot be had here: {reason}")
    call = AllGatherCall(
        spec,
        layouts,
        mask,
        rank,
        1.0 / math.sqrt(spec.headdim) if softmax_scale is None else softmax_scale,
        backend,
        heads_per_chunk or 1,
        reason is None if same_bits is None else same_bits,
    )
    call.tiles()  # raises here, where nothing has been sent yet, if the layouts do not fit
    return call


def all_gather_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AllGatherCall,
    transport: Transport,
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
    out, lse = _Heads(2, call.spec.nheads), _Heads(1, call.spec.nheads)
    messages = [_kv_message(k, v, call, chunk) for chunk in call.chunks]
    backend = observed_backend(get_backend(call.backend), transport)
    chunks = observed_steps(call.chunks, transport)
    for chunk, kv in zip(chunks, _gathered(messages, call, transport), strict=True):
        # Nothing of a chunk is kept in names here while the next one is computed.
        _put_results(chunk, (out, lse), q, kv, call, backend, sinks)
    return out.whole, lse.whole


def all_gather_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    call: AllGatherCall,
    transport: Transport,
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

    Raises:
        NotImplementedError: a call with `same_bits` and a backend that does not fold in order.
    """
    backend = observed_backend(get_backend(call.backend), transport)
    delta = backend.delta(out, dout)
    dsinks = None if sinks is None else sinks_gradient(sinks, lse, delta)
    dtype = q.dtype if rounded else call.spec.accum_dtype
    grads = _Gradients(call, q, (k, v), backend.gradient_factor(call.scores), dtype)
    q_side = (q, dout, lse, delta)
    if call.same_bits:
        _compute_in_place(q_side, (k, v), call, transport, grads)
    else:
        _compute_and_reduce(q_side, (k, v), out, call, transport, grads)
    return Gradients(grads.dq.whole, grads.dk.whole, grads.dv.whole, dsinks)


def bytes_sent(call: AllGatherCall, *, backward: bool) -> int:
    """Bytes that each rank sends in one call, in one direction; the same on every rank.

    Example:
        >>> layout = SequenceLayout.contiguous(2048, 2)
        >>> spec = AttentionSpec("cpu", torch.float32, 1, 16, 4, 64, 64)
        >>> call = make_call(spec, (layout, layout), Mask(2048, 2048, causal=True), rank=0)
        >>> bytes_sent(call, backward=False) == 2 * 1024 * 64 * 4 * 4
        True
    """
    if call.world_size == 1:
        return 0
    total = 0
    for chunk in call.chunks:
        total += call.records("kv", chunk).nbytes
        if backward and call.same_bits:
            total += call.records("q", chunk).nbytes
        elif backward:
            total += call.gradient_packet(chunk).nbytes
    return (call.world_size - 1) * total


def num_messages(call: AllGatherCall, *, backward: bool) -> int:
    """Collectives in one call, in one direction."""
    if call.world_size == 1:
        return 0
    return (2 if backward else 1) * len(call.chunks)


def predicted_peak_bytes(call: AllGatherCall, *, backward: bool) -> int:
    """Most bytes that a call holds at a time beyond its inputs, on its rank.

        always      2 gathered buffers, one message
        forward     out, lse + state and workspace of a chunk
        backward    out, lse + delta + dq, dk, dv + gradients and workspace of a chunk, where
                        added up       dq, and dk and dv of all rows, these twice
                        in one place   dq; then dk and dv, and lse and delta of all rows

    What is gathered, and the gradients of all rows, grow with the length of the whole sequence;
    `heads_per_chunk` says by how much.
    """
    spec, part, backend = call.spec, call.chunk_spec(call.chunks[0]), get_backend(call.backend)
    rows, rows_kv = (layout.shard_len(call.rank) for layout in call.layouts)
    several = len(call.chunks) > 1
    results = _result_bytes(spec, rows)
    forward = backend.forward_bytes(part, rows, [call.tiles()])
    if several:
        following = backend.forward_bytes(call.chunk_spec(call.chunks[1]), rows, [call.tiles()])
        forward = max(forward, sum(results) + max(following, sum(_result_bytes(part, rows))))
    forward += _gather_bytes(call, "kv")
    if not backward:
        return forward
    wide = spec.accum_dtype
    kept = sum(results) + results[1]  # delta is as long as lse
    if several:
        kept += sum(_gradient_bytes(spec, rows, rows_kv, spec.dtype))
    dq, dk, dv = _gradient_bytes(part, rows, rows_kv, wide)
    rounds = spec.dtype != wide
    copied = 2 * _result_bytes(part, rows)[1] if several and spec.batch > 1 else 0
    if call.same_bits:
        statistics = 0
        if call.world_size > 1:
            kept += _gather_bytes(call, "kv", "q")
            statistics = 2 * call.world_size * _result_bytes(part, call.rows("q"))[1]
        first = dq + max(copied, dq // 2 if rounds else 0)
        second = 0 if several else dq // 2 if rounds else dq
        second += dk + dv + max(statistics, max(dv, dk - dv) // 2 if rounds else 0)
        return max(forward, kept + max(first, second))
    workspace = copied + backend.workspace_bytes(part, call.tiles(), backward=True)
    if call.world_size == 1:
        # dv, dk, dq in turn: each takes half of what it gives back.
        rounded = max(dv, dq - dk - dv) // 2 if rounds else 0
        return max(forward, kept + dq + dk + dv + max(workspace, rounded))
    kept += _gather_bytes(call, "kv")
    kept += (call.world_size + 1) * call.gradient_packet(call.chunks[0]).nbytes
    if not several:
        kept += sum(_gradient_bytes(part, 0, rows_kv, spec.dtype))
    all_rows = _gradient_bytes(part, rows, call.world_size * call.rows("kv"), wide)
    return max(forward, kept + sum(all_rows) + max(workspace, dk // 2 if rounds else 0))


def _result_bytes(spec: AttentionSpec, rows: int) -> tuple[int, int]:
    """Of out and of lse."""
    heads = spec.batch * rows * spec.nheads
    return heads * spec.headdim_v * spec.dtype.itemsize, heads * spec.accum_dtype.itemsize


def _gradient_bytes(
    spec: AttentionSpec, rows: int, rows_kv: int, dtype: torch.dtype
) -> tuple[int, int, int]:
    """Of dq, dk and dv."""
    heads = spec.batch * rows * spec.nheads * dtype.itemsize
    heads_kv = spec.batch * rows_kv * spec.nheads_kv * dtype.itemsize
    return heads * spec.headdim, heads_kv * spec.headdim, heads_kv * spec.headdim_v


def _gather_bytes(call: AllGatherCall, *gathers: Traveller) -> int:
    """Of the gathered buffers and the message."""
    if call.world_size == 1:
        return 0
    count = min(2, len(gathers) * len(call.chunks))
    longest = max(call.records(side, call.chunks[0]).nbytes for side in gathers)
    return (count * call.world_size + 1) * longest


class _Message(NamedTuple):
    """What a rank gives to a gathering: tensors (batch, rows, heads, dim), as records."""

    records: Records
    tensors: tuple[Tensor, ...]


def _kv_message(k: Tensor, v: Tensor, call: AllGatherCall, chunk: Chunk) -> _Message:
    return _Message(call.records("kv", chunk), (k[:, :, chunk.kv], v[:, :, chunk.kv]))


def _q_message(q_side: tuple[Tensor, ...], call: AllGatherCall, chunk: Chunk) -> _Message:
    q, dout, lse, delta = q_side
    statistics = (x[:, chunk.q].transpose(1, 2).unsqueeze(-1) for x in (lse, delta))
    tensors = (q[:, :, chunk.q], dout[:, :, chunk.q], *statistics)
    return _Message(call.records("q", chunk), tensors)


def _gathered(
    messages: Sequence[_Message], call: AllGatherCall, transport: Transport
) -> Iterator[tuple[Tensor, ...]]:
    """The tensors of one message after another, of all ranks: (batch, all rows, heads, dim) each.

    While one is held the next is under way: what is yielded holds until the next is asked for.
    """
    if call.world_size == 1:
        yield from (message.tensors for message in messages)
        return
    longest = max(message.records.nbytes for message in messages)
    device, world_size = messages[0].tensors[0].device, call.world_size
    send = torch.zeros(longest, dtype=torch.uint8, device=device)
    buffers = [
        torch.empty(world_size * longest, dtype=torch.uint8, device=device) for _ in messages[:2]
    ]

    def received(index: int) -> Tensor:
        return buffers[index % 2][: world_size * messages[index].records.nbytes]

    def post(index: int) -> None:
        records, tensors = messages[index]
        message = send[: records.nbytes]
        records.pack(message, tensors)
        transport.all_gather("shards", index, message, received(index))

    post(0)
    for index, message in enumerate(messages):
        transport.wait("shards")
        if index + 1 < len(messages):
            post(index + 1)
        yield message.records.views(received(index))


def _put_results(
    chunk: Chunk,
    results: tuple[_Heads, _Heads],
    q: Tensor,
    kv: tuple[Tensor, ...],
    call: AllGatherCall,
    backend: Backend,
    sinks: Tensor | None,
) -> None:
    """Out and lse of a chunk."""
    tiles, (k, v) = call.tiles(), kv
    if sinks is not None:
        sinks = sinks.to(call.spec.accum_dtype)[chunk.q]
    q_heads = q[:, :, chunk.q]
    state = backend.new_state(q_heads, v.size(-1), sinks)
    if tiles:
        state = backend.forward(q_heads, k, v, tiles, state, scores=call.scores, last=True)
    for whole, part in zip(results, backend.finalize(state, q.dtype), strict=True):
        whole.put(chunk.q, part)


def _compute_and_reduce(
    q_side: tuple[Tensor, ...],
    kv: tuple[Tensor, Tensor],
    out: Tensor,
    call: AllGatherCall,
    transport: Transport,
    grads: _Gradients,
) -> None:
    """dQ, and every rank's share of dK and dV, which are summed over the ranks."""
    backend = observed_backend(get_backend(call.backend), transport)
    q, dout, lse, delta = q_side
    messages = [_kv_message(*kv, call, chunk) for chunk in call.chunks]
    reduction = _Reduction(call, transport, grads, q.device) if call.world_size > 1 else None
    chunks = observed_steps(call.chunks, transport)
    for chunk, (k, v) in zip(chunks, _gathered(messages, call, transport), strict=True):
        q_heads = q[:, :, chunk.q]
        parts = [zeros_like(x, call.spec.accum_dtype) for x in (q_heads, k, v)]
        if call.tiles():
            backend.backward(
                q_heads, k, v, dout[:, :, chunk.q], lse[:, chunk.q].contiguous(),
                delta[:, chunk.q].contiguous(), call.tiles(), *parts, scores=call.scores,
                out=out[:, :, chunk.q],
            )  # fmt: skip
        if reduction is None:
            grads.put_dv(chunk, parts.pop())
            grads.put_dk(chunk, parts.pop())
        else:
            reduction.receive()
            reduction.post(chunk, parts)
        grads.put_dq(chunk, parts.pop())
    if reduction is not None:
        reduction.receive()


def _compute_in_place(
    q_side: tuple[Tensor, ...],
    kv: tuple[Tensor, Tensor],
    call: AllGatherCall,
    transport: Transport,
    grads: _Gradients,
) -> None:
    """dQ from the gathered KV, dK and dV from the gathered Q side."""
    backend = observed_backend(folding_backend(call.backend), transport)
    q, dout, lse, delta = q_side
    messages = []
    for chunk in call.chunks:
        messages += [_kv_message(*kv, call, chunk), _q_message(q_side, call, chunk)]
    gathered = _gathered(messages, call, transport)
    for chunk in observed_steps(call.chunks, transport):
        k, v = next(gathered)
        q_heads = q[:, :, chunk.q]
        parts = [zeros_like(q_heads, call.spec.accum_dtype)]
        backend.backward_q(
            q_heads, k, v, dout[:, :, chunk.q], lse[:, chunk.q].contiguous(),
            delta[:, chunk.q].contiguous(), call.tiles("kv"), *parts, scores=call.scores,
        )  # fmt: skip
        grads.put_dq(chunk, parts.pop())
        own = [x[:, :, chunk.kv] for x in kv]
        parts = [zeros_like(x, call.spec.accum_dtype) for x in own]
        backend.backward_kv(
            *_q_side_of(next(gathered), own), call.tiles("q"), *parts, scores=call.scores
        )
        grads.put_dv(chunk, parts.pop())
        grads.put_dk(chunk, parts.pop())


def _q_side_of(
    gathered: tuple[Tensor, ...], kv: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout, lse, delta as backends take them: statistics (batch, heads, rows)."""
    q, dout, *statistics = gathered
    lse, delta = (x.squeeze(-1).transpose(1, 2).contiguous() for x in statistics)
    k, v = kv
    return q, k, v, dout, lse, delta


class _Reduction:
    """dK and dV of all rows of a chunk, summed over the ranks while the next is computed."""

    def __init__(
        self, call: AllGatherCall, transport: Transport, grads: _Gradients, device: torch.device
    ) -> None:
        self._call, self._transport, self._grads = call, transport, grads
        longest, dtype = call.gradient_packet(call.chunks[0]).nbytes, torch.uint8
        # Zeros, so that the padding in it can be summed.
        self._send = torch.zeros(call.world_size * longest, dtype=dtype, device=device)
        self._recv = torch.empty(longest, dtype=dtype, device=device)
        self._under_way: Chunk | None = None
        self._step = 0

    def post(self, chunk: Chunk, grads: list[Tensor]) -> None:
        """Starts to sum the last two of the gradients, which are used up."""
        packet, rows = self._call.gradient_packet(chunk), self._call.rows("kv")
        dk_dv = [grads.pop(), grads.pop()][::-1]
        send = self._send[: self._call.world_size * packet.nbytes]
        for rank, message in enumerate(send.chunk(self._call.world_size)):
            Message(packet, message).pack(dk_dv, slice(rank * rows, (rank + 1) * rows))
        wide = self._call.spec.accum_dtype
        self._transport.reduce_scatter(
            "gradients", self._step, send.view(wide), self._recv[: packet.nbytes].view(wide)
        )
        self._under_way = chunk
        self._step += 1

    def receive(self) -> None:
        """Waits for the sums that are under way, if any, and takes this rank's rows of them."""
        if self._under_way is None:
            return
        self._transport.wait("gradients")
        chunk, self._under_way = self._under_way, None
        rows = self._call.layouts[1].shard_len(self._call.rank)
        dk, dv = self._call.gradient_packet(chunk).views(self._recv)
        self._grads.put_dk(chunk, dk[:, :rows])
        self._grads.put_dv(chunk, dv[:, :rows])


class _Heads:
    """A tensor that is put together from heads; what has them all is taken over."""

    def __init__(self, dim: int, num: int) -> None:
        self._dim, self._num = dim, num
        self._whole: Tensor | None = None

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> _Heads:
        """With memory from the start: nothing is taken over."""
        heads = cls(2, -1)
        heads._whole = torch.empty(shape, dtype=dtype, device=device)
        return heads

    @property
    def whole(self) -> Tensor:
        assert self._whole is not None, "a call has at least one chunk"
        return self._whole

    def put(self, heads: slice, part: Tensor) -> None:
        if part.size(self._dim) == self._num:
            self._whole = part
            return
        if self._whole is None:
            shape = list(part.shape)
            shape[self._dim] = self._num
            self._whole = part.new_empty(shape)
        self._whole.narrow(self._dim, heads.start, part.size(self._dim)).copy_(part)


class _Gradients:
    """dq, dk and dv of this rank, put together from chunks of heads and rounded one by one."""

    def __init__(
        self,
        call: AllGatherCall,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        factor: float,
        dtype: torch.dtype,
    ) -> None:
        self._factor, self._dtype = factor, dtype
        several = len(call.chunks) > 1
        # What is reduced arrives in a buffer of messages.
        copied = several or (call.world_size > 1 and not call.same_bits)
        self.dq, self.dk, self.dv = (
            _Heads.empty(x.shape, dtype, x.device) if copies else _Heads(2, x.size(2))
            for x, copies in ((q, several), (kv[0], copied), (kv[1], copied))
        )

    def put_dq(self, chunk: Chunk, grad: Tensor) -> None:
        self.dq.put(chunk.q, rounded_gradient(grad, self._dtype, self._factor))

    def put_dk(self, chunk: Chunk, grad: Tensor) -> None:
        self.dk.put(chunk.kv, rounded_gradient(grad, self._dtype, self._factor))

    def put_dv(self, chunk: Chunk, grad: Tensor) -> None:
        self.dv.put(chunk.kv, rounded_gradient(grad, self._dtype, 1.0))
