"""Q-exchange: balances a contiguous layout like a zigzag one, by exchanging half the queries.

With a causal mask over contiguous shards the last rank has almost twice the mean work. Here ranks r
and P-1-r exchange the tail halves of their queries. Keys stay in place, and code that loads data,
rotates positions or shifts labels is not affected.

    P = 4, chunks of the queries           held       computed     swaps with
                                rank 0     0 1        0 7          3
                                rank 1     2 3        2 5          2
                                rank 2     4 5        3 4          1
                                rank 3     6 7        1 6          0

    forward     Q there         attention of what is held now       out, lse back
    backward    dO there                                            dQ back

In between an inner call computes attention, over the layout of the exchanged queries. It saves the
exchanged Q, out and lse, so the backward does not exchange them again. With an odd number of ranks
the middle rank keeps its queries.

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
from ring_attn.core.messages import Message, packet_of, room_of
from ring_attn.core.program import Array, Buffer, Copy, Op, Program, View
from ring_attn.core.segments import Segment
from ring_attn.core.sizes import result_arrays
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Named, Strategy
from ring_attn.strategies.base import SAVED, StrategyCode, input_arrays, pack_and_post


class QExchange(StrategyCode):
    """The exchange of queries around a core."""

    def __init__(self, inner: StrategyCode) -> None:
        self._inner, self.sparse = inner, inner.sparse

    def why_not_same_bits(self, call: Call) -> str | None:
        return self._inner.why_not_same_bits(core(call))

    def check(self, call: Call) -> None:
        self._inner.check(core(call))

    def program(self, call: Call, *, backward: bool, rounded: bool = True) -> Program:
        within = self._inner.program(core(call), backward=backward, rounded=rounded)
        arrays = input_arrays(call, backward=backward)
        made = tuple(_around(call, within, arrays, rounded=rounded))
        if backward:
            saved_arrays = {_inner_name(name): within.arrays[name] for name in SAVED}
            arrays = {"dout": arrays["dout"], **saved_arrays}
        saved = tuple(_inner_name(name) for name in within.saved)
        return Program(call.world_size, call.rank, backward, made, arrays, saved)

    def core(self, call: Call) -> Call:
        return self._inner.core(core(call))

    def kept(self, rank: int, world_size: int) -> tuple[str, ...]:
        alone = 2 * rank + 1 == world_size
        return SAVED if alone else ("k", "v")

    def fullest_ranks(self, call: Call) -> set[int]:
        # The first and the last rank exchange no less, but hold less.
        return super().fullest_ranks(call) | {call.world_size // 2}


def _both_cores(spec: AttentionSpec, world_size: int, node_size: int) -> Iterator[Strategy]:
    yield Strategy("all_gather", exchange_q=True)
    yield Strategy(exchange_q=True)


NAMED = Named(_both_cores, "all_gather", exchange_q=True, only=lambda world_size: 1)


def core(call: Call) -> Call:
    """The inner call, over the exchanged queries."""
    layouts = exchanged_layout(call.layouts[0]), call.layouts[1]
    return replace(call, layouts=layouts, strategy=replace(call.strategy, exchange_q=False))


def _inner_name(name: str) -> str:
    """Name of a tensor over the exchanged queries; tensors of keys keep their names."""
    return name if name in ("k", "v", "dk", "dv") else f"{name} there"


def _around(
    call: Call, within: Program, arrays: dict[str, Array], *, rounded: bool
) -> Iterator[Op]:
    """Exchanges queries (or dout), runs the inner program, and exchanges results (or dq) back."""
    exchange = _Exchange(call)
    spec, rows = call.spec, exchange.rows_there
    if within.backward:
        dtype = spec.dtype if rounded else spec.accum_dtype
        dout = {"dout": replace(arrays["dout"], rows=rows)}
        dq = {"dq": replace(arrays["q"], dtype=dtype)}
        yield from exchange.steps("swap dout", dout, 0, there=True)
        yield _inner(call, within, ("dout", *SAVED), ("dq", "dk", "dv"))
        yield from exchange.steps("swap dq back", dq, 1, there=False)
        return
    queries = {"q": replace(arrays["q"], rows=rows)}
    yield from exchange.steps("swap queries", queries, 0, there=True)
    yield _inner(call, within, ("q", "k", "v"), ("out", "lse"))
    results = result_arrays(spec, exchange.own_rows)
    yield from exchange.steps("swap back", results, 1, there=False)


def _inner(
    call: Call, within: Program, inputs: tuple[str, ...], results: tuple[str, ...]
) -> ops.Inner:
    names = {name: (name, _inner_name(name)) for name in (*inputs, *results, *within.saved)}
    taken = tuple(names[name] for name in inputs)
    kept = tuple(names[name] for name in dict.fromkeys((*results, *within.saved)))
    return ops.Inner(within, call.spec, None, taken, kept, slice(None))


class _Exchange:
    """The exchange of tails with rank P - 1 - r."""

    def __init__(self, call: Call) -> None:
        self.rank, self.partner = call.rank, call.world_size - 1 - call.rank
        self.own_rows, self.partner_rows = map(call.layouts[0].shard_len, (self.rank, self.partner))

    @property
    def rows_there(self) -> int:
        """Number of rows after the exchange: the own head and the partner's tail."""
        return self.own_rows - self.own_rows // 2 + self.partner_rows // 2

    def _halves(self, *, there: bool) -> tuple[slice, slice]:
        """Rows of the half that stays and of the half that is exchanged, before it or `there`."""
        head, tail = self.own_rows - self.own_rows // 2, self.own_rows // 2
        if there:
            tail = self.partner_rows // 2
            if self.partner < self.rank:
                return slice(tail, tail + head), slice(0, tail)
        return slice(0, head), slice(head, head + tail)

    def steps(
        self, label: str, arrays: dict[str, Array], step: int, *, there: bool
    ) -> Iterator[Op]:
        """Yields ops that exchange the tails of tensors, or (not `there`) exchange them back.

        `arrays` has the names of the tensors outside, and their sizes after the exchange.
        """
        yield ops.Step(label)
        names = [(name, _inner_name(name)) for name in arrays]
        sources, targets = zip(*(pair if there else pair[::-1] for pair in names), strict=True)
        if self.partner == self.rank:
            yield ops.Join("shards")
            for name, source in zip(targets, sources, strict=True):
                yield ops.Assign(View(name), View(source))
            return
        sent = self._message(arrays, self.own_rows if there else self.partner_rows)
        received = self._message(arrays, self.partner_rows if there else self.own_rows)
        send, recv = (
            Buffer(f"{label}: {direction}", room_of(x))
            for direction, x in (("sent", sent), ("received", received))
        )
        head_before, tail_before = self._halves(there=not there)
        head_after, tail_after = self._halves(there=there)
        yield from pack_and_post(
            "shards", step, ops.Hop(self.partner, self.partner), message=sent,
            copies=tuple(Copy(i, View(x, tail_before)) for i, x in enumerate(sources)),
            send=send, recv=recv, receives=received,
        )  # fmt: skip
        yield ops.Wait("shards")
        yield ops.Free((send,))
        for name, array, source in zip(targets, arrays.values(), sources, strict=True):
            yield ops.New(name, array)
            yield ops.Assign(View(name, head_after), View(source, head_before))
        copies = tuple(Copy(i, View(x, tail_after)) for i, x in enumerate(targets))
        yield ops.Unpack(recv, received, copies)
        if not there:
            yield ops.Free(tuple(x for x in sources if x == "dq there"))

    def _message(self, arrays: dict[str, Array], rows: int) -> Message:
        tails = [replace(array, rows=rows // 2) for array in arrays.values()]
        return packet_of([(x.shape, x.dtype) for x in tails])


@lru_cache(maxsize=1024)
def exchanged_layout(layout: SequenceLayout) -> SequenceLayout:
    """The layout of the exchanged queries: a rank's head half and rank P-1-r's tail half."""
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
