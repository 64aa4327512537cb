"""Q-exchange: exchange half the queries, to balance a contiguous layout like a zigzag one.

With a causal mask over contiguous shards, the last rank has almost twice the mean work. Here ranks
r and P-1-r exchange the tail halves of their queries. Keys stay in place, and code that loads data,
rotates positions or shifts labels is not affected.

    P = 4, chunks of the queries           held       computed     swaps with
                                rank 0     0 1        0 7          3
                                rank 1     2 3        2 5          2
                                rank 2     4 5        3 4          1
                                rank 3     6 7        1 6          0

    forward     Q there         attention of what is held now       out, lse back
    backward    dO there                                            dQ back

Between the two exchanges, an inner call computes attention over the layout of the exchanged
queries. It saves the exchanged Q, out and lse, so the backward does not exchange them again. With
an odd number of ranks, the middle rank keeps its queries.

(Head-tail load balance of hyper-parallel's context parallelism; the chunks are Llama 3's,
arXiv 2407.21783, section 3.3.2, which orders the keys in the same way.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from ring_attn.call import Call
from ring_attn.core import program as ops
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.messages import Message, largest_nbytes, packet_of
from ring_attn.core.program import Array, Buffer, Copy, Op, Program, View
from ring_attn.core.segments import Segment
from ring_attn.core.sizes import result_arrays
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Named, Strategy
from ring_attn.strategies.base import SAVED, StrategyCode, input_arrays, pack_and_post


class QExchange(StrategyCode):
    """The exchange of queries around a core."""

    def __init__(self, inner: StrategyCode) -> None:
        self._inner = inner
        self.sparse = inner.sparse

    def why_not_same_bits(self, call: Call) -> str | None:
        return self._inner.why_not_same_bits(core(call))

    def check(self, call: Call) -> None:
        self._inner.check(core(call))

    def program(self, call: Call, *, backward: bool, rounded: bool = True) -> Program:
        within = self._inner.program(core(call), backward=backward, rounded=rounded)
        arrays = input_arrays(call, backward=backward)
        if backward:
            steps = _around_backward(call, within, arrays, rounded=rounded)
            saved_arrays = {_inner_name(name): within.arrays[name] for name in SAVED}
            inputs = {"dout": arrays["dout"], **saved_arrays}
        else:
            steps = _around_forward(call, within, arrays)
            inputs = arrays
        return Program(
            world_size=call.world_size,
            rank=call.rank,
            backward=backward,
            ops=tuple(steps),
            arrays=inputs,
            saved=tuple(_inner_name(name) for name in within.saved),
        )

    def core(self, call: Call) -> Call:
        return self._inner.core(core(call))

    def kept(self, rank: int, world_size: int) -> tuple[str, ...]:
        is_middle = 2 * rank + 1 == world_size
        return SAVED if is_middle else ("k", "v")

    def fullest_ranks(self, call: Call) -> set[int]:
        # A rank in the middle may hold more than the first and the last rank.
        middle = call.world_size // 2
        return super().fullest_ranks(call) | {middle}


def _both_cores(spec: AttentionSpec, world_size: int, node_size: int) -> Iterator[Strategy]:
    yield Strategy("all_gather", exchange_q=True)
    yield Strategy(exchange_q=True)


NAME = Named(_both_cores, core="all_gather", exchange_q=True, only=lambda world_size: 1)


def core(call: Call) -> Call:
    """Return the inner call, over the exchanged queries."""
    layout_q, layout_kv = call.layouts
    return replace(
        call,
        layouts=(exchanged_layout(layout_q), layout_kv),
        strategy=replace(call.strategy, exchange_q=False),
    )


def _inner_name(name: str) -> str:
    """Return the name of a tensor over the exchanged queries; tensors of keys keep their names."""
    return name if name in ("k", "v", "dk", "dv") else f"{name} there"


def _around_forward(call: Call, within: Program, arrays: dict[str, Array]) -> Iterator[Op]:
    """Exchange queries, run the inner program, and exchange out and lse back."""
    exchange = _Exchange(call)
    queries = {"q": replace(arrays["q"], rows=exchange.rows_there)}
    results = result_arrays(call.spec, exchange.own_rows)
    yield from exchange.steps("swap queries", queries, 0, there=True)
    yield _inner(call, within, ("q", "k", "v"), ("out", "lse"))
    yield from exchange.steps("swap back", results, 1, there=False)


def _around_backward(
    call: Call, within: Program, arrays: dict[str, Array], *, rounded: bool
) -> Iterator[Op]:
    """Exchange dout, run the inner program, and exchange dq back."""
    exchange = _Exchange(call)
    dtype = call.spec.dtype if rounded else call.spec.accum_dtype
    dout = {"dout": replace(arrays["dout"], rows=exchange.rows_there)}
    dq = {"dq": replace(arrays["q"], dtype=dtype)}
    yield from exchange.steps("swap dout", dout, 0, there=True)
    yield _inner(call, within, ("dout", *SAVED), ("dq", "dk", "dv"))
    yield from exchange.steps("swap dq back", dq, 1, there=False)


def _inner(
    call: Call, within: Program, inputs: tuple[str, ...], results: tuple[str, ...]
) -> ops.Inner:
    """Return the op that runs the inner program, and passes on the tensors that it saves."""
    passed_on = dict.fromkeys((*results, *within.saved))
    all_heads = slice(None)
    return ops.Inner(
        program=within,
        spec=call.spec,
        ranks=None,
        inputs=tuple((name, _inner_name(name)) for name in inputs),
        results=tuple((name, _inner_name(name)) for name in passed_on),
        sinks=all_heads,
    )


class _Exchange:
    """The exchange of tails with rank P - 1 - r."""

    def __init__(self, call: Call) -> None:
        layout_q, _ = call.layouts
        self.rank = call.rank
        self.partner = call.world_size - 1 - call.rank
        self.own_rows = layout_q.shard_len(self.rank)
        self.partner_rows = layout_q.shard_len(self.partner)

    @property
    def rows_there(self) -> int:
        """Number of rows after the exchange: the own head and the partner's tail."""
        return self.own_rows - self.own_rows // 2 + self.partner_rows // 2

    def _halves(self, *, there: bool) -> tuple[slice, slice]:
        """Return the rows of the half that stays, and of the half that is exchanged.

        `there` means after the exchange. The halves are then in the order of their positions.
        """
        head = self.own_rows - self.own_rows // 2
        tail = self.partner_rows // 2 if there else self.own_rows // 2
        if there and self.partner < self.rank:
            return slice(tail, tail + head), slice(0, tail)
        return slice(0, head), slice(head, head + tail)

    def steps(
        self, label: str, arrays: dict[str, Array], step: int, *, there: bool
    ) -> Iterator[Op]:
        """Yield ops that exchange the tails of tensors, or (not `there`) exchange them back.

        `arrays` has the names of the tensors outside, and their sizes after the exchange.
        """
        yield ops.Step(label)
        outside = tuple(arrays)
        inside = tuple(_inner_name(name) for name in arrays)
        sources, targets = (outside, inside) if there else (inside, outside)
        if self.partner == self.rank:
            yield ops.Join("shards")
            for source, target in zip(sources, targets, strict=True):
                yield ops.Assign(into=View(target), source=View(source))
            return
        own_tails = self._message(arrays, self.own_rows)
        partner_tails = self._message(arrays, self.partner_rows)
        sent, received = (own_tails, partner_tails) if there else (partner_tails, own_tails)
        send = Buffer(f"{label}: sent", largest_nbytes(sent))
        recv = Buffer(f"{label}: received", largest_nbytes(received))
        head_before, tail_before = self._halves(there=not there)
        head_after, tail_after = self._halves(there=there)
        yield from pack_and_post(
            channel="shards",
            step=step,
            route=ops.Hop(send_to=self.partner, recv_from=self.partner),
            message=sent,
            copies=tuple(Copy(i, View(name, tail_before)) for i, name in enumerate(sources)),
            send=send,
            recv=recv,
            receives=received,
        )
        yield ops.Wait("shards")
        yield ops.Free((send,))
        for target, array, source in zip(targets, arrays.values(), sources, strict=True):
            yield ops.New(target, array)
            yield ops.Assign(into=View(target, head_after), source=View(source, head_before))
        copies = tuple(Copy(i, View(name, tail_after)) for i, name in enumerate(targets))
        yield ops.Unpack(recv, received, copies)
        if not there:
            # The backward reads the exchanged out and lse; nothing reads the exchanged dq again.
            yield ops.Free(tuple(name for name in sources if name == "dq there"))

    def _message(self, arrays: dict[str, Array], rows: int) -> Message:
        """Return the message with the tail halves of so many rows."""
        tails = [replace(array, rows=rows // 2) for array in arrays.values()]
        return packet_of([(tail.shape, tail.dtype) for tail in tails])


@lru_cache(maxsize=1024)
def exchanged_layout(layout: SequenceLayout) -> SequenceLayout:
    """Return the layout of the exchanged queries: a rank's head half and rank P-1-r's tail half."""
    if layout.kind not in ("contiguous", "boundaries"):
        raise NotImplementedError(
            f"exchanging the queries' tail halves is for a contiguous layout, got {layout}; "
            "zigzag and striped layouts are balanced without it: use another strategy"
        )
    starts = [*accumulate(layout.shard_lens, initial=0)]
    parts = []
    for rank in range(layout.world_size):
        partner = layout.world_size - 1 - rank
        head = layout.shard_len(rank) - layout.shard_len(rank) // 2
        tail = layout.shard_len(partner) // 2
        partner_end = starts[partner + 1]
        segments = [Segment(starts[rank], head), Segment(partner_end - tail, tail)]
        parts.append(sorted(segments, key=lambda segment: segment.start))
    return SequenceLayout.from_segments(parts)
