"""Q-exchange: a contiguous layout with the work of a zigzag one, for the price of half the queries.

With a causal mask over contiguous shards the last rank has almost twice the mean work. Here the
tail half of a rank's queries changes places with that of rank P-1-r; keys stay where they are, and
whoever loads data, rotates positions or shifts labels never learns of it.

    P = 4, chunks of the queries           given      computed     swaps with
                                rank 0     0 1        0 7          3
                                rank 1     2 3        2 5          2
                                rank 2     4 5        3 4          1
                                rank 3     6 7        1 6          0

    forward     Q there         attention of what is held now       out, lse back
    backward    dO there                                            dQ back

The attention between is another call, over the layout of the exchanged queries and the keys as they
are. It saves the exchanged Q, out and lse, so the backward does not exchange them again. The middle
one of an odd number of ranks keeps its own.

(Head-tail load balance of hyper-parallel's context parallelism; the chunks are those of Llama 3,
arXiv 2407.21783, section 3.3.2, which has the keys in that order too.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from ring_attn.core.layout import Segment, SequenceLayout
from ring_attn.core.plan import Hop
from ring_attn.core.spec import AttentionSpec, Packet
from ring_attn.strategies.base import Call, Forward, Gradients
from ring_attn.strategies.messages import Message, new_buffers
from ring_attn.strategies.observed import observed
from ring_attn.transport.base import Transport

Layouts = tuple[SequenceLayout, SequenceLayout]


class Halves(NamedTuple):
    """Rows of the half that stays and of the half that is exchanged."""

    head: slice
    tail: slice


@dataclass(frozen=True)
class QExchangeCall:
    """One call as plain data, the same on every rank but for `rank`.

    Attributes:
        spec: sizes and types.
        layouts: of the queries and of the keys, as they are given.
        rank: of this process.
        inner: the call over the exchanged queries.
    """

    spec: AttentionSpec
    layouts: Layouts
    rank: int
    inner: Call

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
        return self.inner.softmax_scale

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return self.inner.backend

    @property
    def same_bits(self) -> bool:
        """Whether the bits are those of every other world size."""
        return self.inner.same_bits

    @property
    def partner(self) -> int:
        """With whom queries are exchanged; a rank that is its own partner keeps them."""
        return self.layouts[0].world_size - 1 - self.rank

    @property
    def home(self) -> Halves:
        """Rows of the head and of this rank's own tail in its shard."""
        rows = self.layouts[0].shard_len(self.rank)
        return Halves(slice(0, rows - rows // 2), slice(rows - rows // 2, rows))

    @property
    def there(self) -> Halves:
        """Rows of the head and of the partner's tail, in the order of positions."""
        if self.partner == self.rank:
            return self.home
        head, tail = self.home.head.stop, self.layouts[0].shard_len(self.partner) // 2
        if self.partner < self.rank:
            return Halves(slice(tail, tail + head), slice(0, tail))
        return Halves(slice(0, head), slice(head, head + tail))

    @observed("forward")
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, transport: Transport, sinks: Tensor | None
    ) -> Forward:
        """Attention of this rank's queries to all keys; arguments as of `Call.forward`.

        Saves what the call over the exchanged queries saves.
        """
        (q,) = self._exchanged((q,), self.home, self.there, 0, transport)
        out, lse, saved = self.inner.forward(q, k, v, transport, sinks)
        out, lse = self._exchanged((out, lse), self.there, self.home, 1, transport)
        return Forward(out, lse, saved)

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
        """Gradients of this rank's shards; arguments as of `Call.backward`."""
        (dout,) = self._exchanged((dout,), self.home, self.there, 0, transport)
        dq, dk, dv, dsinks = self.inner.backward(saved, dout, transport, sinks, rounded=rounded)
        (dq,) = self._exchanged((dq,), self.there, self.home, 1, transport)
        return Gradients(dq, dk, dv, dsinks)

    def _exchanged(
        self,
        tensors: Sequence[Tensor],
        held: Halves,
        wanted: Halves,
        step: int,
        transport: Transport,
    ) -> list[Tensor]:
        """The tensors with the other tail. Rows are dim 1 of 4-D tensors, dim 2 of statistics."""
        if self.partner == self.rank:
            transport.join("shards", tensors[0].device)
            return list(tensors)
        outgoing, incoming = (_packet(tensors, _len(rows.tail)) for rows in (held, wanted))
        send, recv = (new_buffers([p], 1, tensors[0].device)[0] for p in (outgoing, incoming))
        Message(outgoing, send).pack(tensors, held.tail)
        transport.post("shards", step, Hop(self.partner, self.partner), send, recv)
        transport.wait("shards")
        results = []
        for x, tail in zip(tensors, incoming.views(recv), strict=True):
            result = x.new_empty(_with_rows(x, _len(wanted.head) + _len(wanted.tail)))
            _rows(result, wanted.head).copy_(_rows(x, held.head))
            _rows(result, wanted.tail).copy_(tail)
            results.append(result)
        return results


def make_call(
    spec: AttentionSpec,
    layouts: Layouts,
    rank: int,
    make_core: Callable[[AttentionSpec, Layouts, int], Call],
) -> QExchangeCall:
    """The call around another one.

    Args:
        spec: sizes and types.
        layouts: of the queries, contiguous or `boundaries`, and of the keys, of stride 1.
        rank: of this process.
        make_core: from spec, layouts and rank, the call over the exchanged queries.

    Raises:
        NotImplementedError: queries that do not lie contiguously; other errors as `make_core`.
    """
    return QExchangeCall(
        spec, layouts, rank, make_core(spec, (exchanged_layout(layouts[0]), layouts[1]), rank)
    )


@lru_cache(maxsize=1024)
def exchanged_layout(layout: SequenceLayout) -> SequenceLayout:
    """Where the queries are while they are computed: own head half, and the tail of rank P-1-r.

    Args:
        layout: contiguous or `boundaries`.

    Raises:
        NotImplementedError: any other layout.

    Example:
        >>> exchanged_layout(SequenceLayout.contiguous(16, 4)).position_ids(rank=1).tolist()
        [4, 5, 10, 11]
    """
    if layout.kind not in ("contiguous", "boundaries"):
        raise NotImplementedError(
            f"exchanging the queries' tail halves is for a contiguous layout, got {layout}; "
            "zigzag and striped layouts are balanced without it: use another strategy"
        )
    starts = [*accumulate(layout.shard_lens, initial=0)]
    parts = []
    for rank in range(layout.world_size):
        partner = layout.world_size - 1 - rank
        tail = layout.shard_len(partner) // 2
        head = layout.shard_len(rank) - layout.shard_len(rank) // 2
        segments = [Segment(starts[rank], head), Segment(starts[partner + 1] - tail, tail)]
        parts.append(sorted(segments, key=lambda segment: segment.start))
    return SequenceLayout.from_segments(parts)


def bytes_sent(call: QExchangeCall, *, backward: bool) -> int:
    """Bytes that the rank's own exchanges send in one direction, beside what `call.inner` sends."""
    if call.partner == call.rank:
        return 0
    spec, mine, theirs = call.spec, _len(call.home.tail), _len(call.there.tail)

    def nbytes(rows: int, dim: int, *, with_lse: bool = False) -> int:
        shapes = ((spec.batch, rows, spec.nheads, dim), (spec.batch, spec.nheads, rows))
        count = 2 if with_lse else 1
        return Packet(shapes[:count], (spec.dtype, spec.accum_dtype)[:count]).nbytes

    if backward:
        return nbytes(mine, spec.headdim_v) + nbytes(theirs, spec.headdim)
    return nbytes(mine, spec.headdim) + nbytes(theirs, spec.headdim_v, with_lse=True)


def num_messages(call: QExchangeCall) -> int:
    """Exchanges of the rank in one direction, beside those of `call.inner`."""
    return 0 if call.partner == call.rank else 2


def predicted_peak_bytes(
    call: QExchangeCall, of_core: Callable[..., int], *, backward: bool
) -> int:
    """Most bytes that a call holds at a time beyond its inputs, on its rank.

        forward     exchanged q + what the core takes
                    exchanged q, out, lse + messages of both sides + out, lse at home
        backward    exchanged q, out, lse + out, lse at home + exchanged dout
                    + what the core takes; or + its gradients, messages of both sides, dq at home

    Args:
        call: its core saves what it is given, out and lse, as a ring does.
        of_core: most bytes of the core beyond its inputs, as `of_core(core, backward=backward)`.
        backward: of forward and backward, else of the forward alone.
    """
    if call.partner == call.rank:
        return of_core(call.inner, backward=backward)
    spec, tails = call.spec, (_len(call.home.tail), _len(call.there.tail))
    heads = spec.batch * spec.nheads

    def side(rows: int, *dims: int, with_lse: bool = False) -> int:
        lse = heads * rows * spec.accum_dtype.itemsize if with_lse else 0
        return heads * rows * sum(dims) * spec.dtype.itemsize + lse

    def messages(*dims: int, with_lse: bool = False) -> int:
        return sum(side(rows, *dims, with_lse=with_lse) for rows in tails)

    home, there = (_len(rows.head) + _len(rows.tail) for rows in (call.home, call.there))
    q, result = side(there, spec.headdim), side(there, spec.headdim_v, with_lse=True)
    result_home = side(home, spec.headdim_v, with_lse=True)
    forward = q + max(
        messages(spec.headdim),
        of_core(call.inner, backward=False),
        result + messages(spec.headdim_v, with_lse=True) + result_home,
    )
    if not backward:
        return forward
    dout, dq_home = side(there, spec.headdim_v), side(home, spec.headdim)
    rows_kv = spec.batch * call.layouts[1].shard_len(call.rank) * spec.nheads_kv
    grads = q + rows_kv * (spec.headdim + spec.headdim_v) * spec.dtype.itemsize
    held = q + result_home + dout
    # A core counts its own out and lse.
    within = of_core(call.inner, backward=True)
    return max(
        forward,
        held + result + messages(spec.headdim_v) - dout,
        held + within,
        held + result + grads + messages(spec.headdim) + dq_home,
    )


def _packet(tensors: Sequence[Tensor], rows: int) -> Packet:
    """The message with so many rows of each tensor."""
    return Packet(tuple(_with_rows(x, rows) for x in tensors), tuple(x.dtype for x in tensors))


def _with_rows(x: Tensor, rows: int) -> tuple[int, ...]:
    """Its shape with another number of rows."""
    dim = _rows_dim(x)
    return (*x.shape[:dim], rows, *x.shape[dim + 1 :])


def _rows(x: Tensor, rows: slice) -> Tensor:
    return x.narrow(_rows_dim(x), rows.start, _len(rows))


def _rows_dim(x: Tensor) -> int:
    return 1 if x.ndim == 4 else 2


def _len(rows: slice) -> int:
    return int(rows.stop - rows.start)
