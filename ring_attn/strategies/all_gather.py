"""All-gather attention: gather KV from all ranks, a few heads at a time.

    KV heads        0           1           2
    gather      |-------|   |-------|   |-------|
    compute             |-----------|-----------|-----------|
    reduce                          |-------|   |-------|   |-------|    backward: dK, dV

The gathered shards follow one another in the order of the ranks, and one call of the backend
computes attention over all of them. So any layout works, and no state is carried between steps. A
rank holds two gathered buffers, each with `heads_per_chunk` KV heads of the whole sequence. Shards
are padded to the length of the longest shard. The backward gathers KV again, and sums gradients in
one of two ways.

Added up: a rank accumulates its share of dK and dV of all rows in float32. A reduce-scatter sums
the shares over the ranks while the next heads are computed.

    rank r      K, V of all rows      ->  dQ, and its share of dK, dV of all rows  ->  + = dK, dV

In order (`same_bits`): after KV, the Q side of the same heads is gathered (Q, dO, lse, delta), from
which a rank computes dK and dV of its own rows. Nothing is summed over ranks, so every sum has the
order of one process.

    rank r      K, V of all rows                 ->  dQ
                Q, dO, lse, delta of all rows    ->  dK, dV

With a backend that folds in order (triton), the results then have the bits of one process at every
world size, for every mask. This needs contiguous layouts, which may differ for queries and keys, in
which the rows of every rank start at a multiple of the backend's `bits_unit`. The keys are then in
the order of their positions. Zigzag and striped shards are not in this order, so their sums differ
in the last bits.

(Context parallelism of Llama 3, arXiv 2407.21783, section 3.3.2; a few heads at a time, as
ring-flash-attention's `llama3_flash_attn_varlen_func` does with `heads_k_stride`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch

from ring_attn.backends import get_backend
from ring_attn.backends.base import why_bits_differ
from ring_attn.call import Call, GradientPlan
from ring_attn.core import program as ops
from ring_attn.core.heads import HeadRun
from ring_attn.core.messages import Gathered, Packet, Parcels, Records
from ring_attn.core.program import Array, Buffer, Copy, Op, Operand, Program, View
from ring_attn.core.sizes import SHARD, SHARE_OF_DQ, gradient_packet, result_arrays
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import Strategy
from ring_attn.core.tiles import Side, StepTiles
from ring_attn.strategies import ring
from ring_attn.strategies.base import StrategyCode, core_program, input_arrays, pack_and_post
from ring_attn.strategies.order import why_not_in_order


class AllGather(StrategyCode):
    name = "all_gather"
    options = ("heads_per_chunk",)
    at_once = True

    def why_not_same_bits(self, call: Call) -> str | None:
        if call.options.same_bits is False:
            return "gradients are added up: same_bits=False"
        reason = why_not_in_order(call)
        if reason is not None:
            return reason
        backend = get_backend(call.backend)
        for spec in _chunk_specs(call):
            reason = why_bits_differ(backend, call.spec, spec)
            if reason is not None:
                return reason
        return None

    def gradients(self, call: Call) -> GradientPlan:
        """Choose the order of sums; no side of the call is sent around."""
        if call.gradients is not None:
            return GradientPlan(sent_side=None, in_order=call.gradients.in_order)
        return GradientPlan(sent_side=None, in_order=self.why_not_same_bits(call) is None)

    def program(self, call: Call, *, backward: bool, rounded: bool = True) -> Program:
        if call.world_size == 1:  # nothing to gather
            return ring.CODE.program(call, backward=backward, rounded=rounded)
        arrays = input_arrays(call, backward=backward)
        gathering = _Gathering(call, arrays)
        if not backward:
            return core_program(call, arrays, gathering.forward(), backward=False)
        dtype = call.spec.dtype if rounded else call.spec.accum_dtype
        if self.gradients(call).in_order:
            steps = gathering.backward_in_order(dtype)
        else:
            steps = gathering.backward_added_up(dtype)
        return core_program(call, arrays, steps, backward=True)

    def full_name(self, strategy: Strategy) -> str:
        heads = strategy.heads_per_chunk or 1
        return self.name if heads == 1 else f"{self.name} by {heads} heads"

    def candidates(
        self, spec: AttentionSpec, world_size: int, node_size: int
    ) -> Iterator[Strategy]:
        num_powers = spec.nheads_kv.bit_length() + 1
        powers_of_two = {min(1 << exponent, spec.nheads_kv) for exponent in range(num_powers)}
        for heads in sorted(powers_of_two):
            yield Strategy(self.name, heads_per_chunk=None if heads == 1 else heads)

    def num_steps(self, call: Call) -> int:
        return len(chunks_of(call))

    def share_at_queries(self, call: Call) -> float:
        return SHARE_OF_DQ if self.gradients(call).in_order else 1.0

    def launch_spec(self, call: Call) -> AttentionSpec:
        return min(_chunk_specs(call), key=lambda spec: spec.nheads_kv)

    def launch_rows(self, call: Call) -> int:
        if call.mask.has_windows or len(call.mask.slices) != 1:
            return super().launch_rows(call)  # a launch may see few of the gathered rows
        # All rows; of a causal mask over contiguous shards on the busiest rank.
        return call.mask.seqlen_k


def chunks_of(call: Call) -> tuple[HeadRun, ...]:
    """Return the chunks of heads in the order of gathering; the last chunk may have fewer heads."""
    nheads_kv = call.spec.nheads_kv
    group_size = call.spec.nheads // nheads_kv
    chunk_size = call.strategy.heads_per_chunk or 1
    if call.world_size == 1:  # nothing is gathered
        chunk_size = nheads_kv
    bounds = [*range(0, nheads_kv, chunk_size), nheads_kv]
    return tuple(
        HeadRun(
            first=start * group_size,
            num=(end - start) * group_size,
            first_kv=start,
            num_kv=end - start,
        )
        for start, end in pairwise(bounds)
    )


def chunk_spec(spec: AttentionSpec, chunk: HeadRun) -> AttentionSpec:
    return replace(spec, nheads=chunk.num, nheads_kv=chunk.num_kv)


def _chunk_specs(call: Call) -> list[AttentionSpec]:
    """Return the different specs of the chunks."""
    return list(dict.fromkeys(chunk_spec(call.spec, chunk) for chunk in chunks_of(call)))


def _shard_rows(call: Call, side: Side) -> int:
    """Return the number of rows of each gathered shard: those of the longest, at least 1."""
    layout_q, layout_kv = call.layouts
    longest = max((layout_kv if side == "kv" else layout_q).shard_lens)
    if CODE.gradients(call).in_order:
        # The backend's grid of blocks begins at row 0 of the gathered tensor.
        unit = get_backend(call.backend).bits_unit
        longest = -(-longest // unit) * unit
    return max(longest, 1)


@dataclass(frozen=True)
class _Message:
    """One gather: the side whose shards are gathered, and their heads."""

    side: Side
    chunk: HeadRun

    @property
    def heads(self) -> slice:
        return self.chunk.q if self.side == "q" else self.chunk.kv

    @property
    def views(self) -> tuple[View, ...]:
        return tuple(View(name, rows=None, heads=self.heads) for name in SHARD[self.side])


# A function that yields the ops that compute with one message. Its arguments are the index of the
# message, the message, and the gathered tensors.
Compute = Callable[[int, _Message, tuple[Operand, ...]], Iterator[Op]]


class _Gathering:
    """Builds the programs: one chunk is gathered before its compute, and summed after it."""

    def __init__(self, call: Call, arrays: dict[str, Array]) -> None:
        self.call = call
        self.ranks = call.ranks
        self.arrays = arrays
        self.chunks = chunks_of(call)
        # Once for a program: a query to the backend per message took most of the time of a plan.
        self._rows: dict[Side, int] = {
            "kv": _shard_rows(call, "kv"),
            "q": _shard_rows(call, "q"),
        }
        self._buffers: dict[int, tuple[Buffer, Buffer]] = {}
        # The chunk whose dK and dV are being summed over the ranks, if any, with the sent and the
        # received buffer.
        self._summing: tuple[HeadRun, Buffer, Buffer] | None = None

    # -- gathering

    def _records(self, message: _Message) -> Records:
        spec = self.call.spec
        # dim and dtype of each tensor; a statistic has no dim
        fields: tuple[tuple[int | None, torch.dtype], ...]
        fields = (spec.headdim, spec.dtype), (spec.headdim_v, spec.dtype)
        if message.side == "q":
            statistic = (None, spec.accum_dtype)
            fields = (*fields, statistic, statistic)  # lse and delta
        return Records(
            batch=spec.batch,
            rows=self._rows[message.side],
            heads=message.heads.stop - message.heads.start,
            fields=fields,
        )

    def _post(self, messages: list[_Message], index: int) -> Iterator[Op]:
        """Pack a message and start to gather it; do nothing after the last message."""
        if index == len(messages):
            return
        world_size = self.call.world_size
        longest = max(self._records(message).nbytes for message in messages)
        send = Buffer(f"message {index}", longest)
        recv = Buffer(f"gathered {index}", longest * world_size)
        self._buffers[index] = send, recv
        message = messages[index]
        records = self._records(message)
        yield from pack_and_post(
            channel="shards",
            step=index,
            route=ops.Collective("all_gather"),
            message=records,
            copies=self._copies(message, records),
            send=send,
            recv=recv,
            receives=Gathered(records, world_size),
            nbytes=records.nbytes * (world_size - 1),
        )

    def _copies(self, message: _Message, records: Records) -> tuple[Copy, ...]:
        """Return the copies of this rank's rows to a message, and of zeros to its padding."""
        rows = self.ranks.rows(message.side)
        own_rows, padding = slice(0, rows), slice(rows, records.rows)
        copies = [Copy(entry, view, own_rows) for entry, view in enumerate(message.views)]
        if rows < records.rows:
            zeros = None
            copies += [Copy(entry, zeros, padding) for entry in range(len(message.views))]
        return tuple(copies)

    # -- compute

    def forward(self) -> Iterator[Op]:
        """Compute chunk after chunk, and assemble out and lse from the chunks."""
        yield from self._gathered(("kv",), self._attend)

    def backward_added_up(self, dtype: torch.dtype) -> Iterator[Op]:
        """Compute dQ and a share of dK and dV, and sum the shares over the ranks."""

        def compute(index: int, message: _Message, held: tuple[Operand, ...]) -> Iterator[Op]:
            chunk = message.chunk
            all_rows = self.call.world_size * self._rows["kv"]
            yield self._part("dq", chunk, self.ranks.rows("q"))
            yield self._part("dk", chunk, all_rows)
            yield self._part("dv", chunk, all_rows)
            k, v = held
            yield ops.Differentiate(
                part="all",
                tiles=self._tiles("kv"),
                q_side=_Message("q", chunk).views,
                kv=(k, v),
                dq=View("dq part"),
                dkv=(View("dk part"), View("dv part")),
                out=View("out", rows=None, heads=chunk.q),
            )
            yield from self._receive_sums(dtype)
            yield from self._post_shares(index, chunk)
            yield self._round("dq", View("dq part"), chunk, dtype)

        yield ops.Delta(self.arrays["lse"])
        yield from self._new_gradients(dtype, copied=True)
        yield from self._gathered(("kv",), compute)
        yield ops.Step("end")
        yield from self._receive_sums(dtype)

    def backward_in_order(self, dtype: torch.dtype) -> Iterator[Op]:
        """Compute dQ from the gathered KV, and dK and dV from the gathered Q side."""

        def compute_dq(chunk: HeadRun, kv: tuple[Operand, Operand]) -> Iterator[Op]:
            yield self._part("dq", chunk, self.ranks.rows("q"))
            yield ops.Differentiate(
                part="q",
                tiles=self._tiles("kv"),
                q_side=_Message("q", chunk).views,
                kv=kv,
                dq=View("dq part"),
            )
            yield self._round("dq", View("dq part"), chunk, dtype)

        def compute_dkv(chunk: HeadRun, q_side: tuple[Operand, ...]) -> Iterator[Op]:
            rows = self.ranks.rows("kv")
            yield self._part("dk", chunk, rows)
            yield self._part("dv", chunk, rows)
            k, v = _Message("kv", chunk).views
            yield ops.Differentiate(
                part="kv",
                tiles=self._tiles("q"),
                q_side=q_side,
                kv=(k, v),
                dkv=(View("dk part"), View("dv part")),
            )
            yield self._round("dv", View("dv part"), chunk, dtype)
            yield self._round("dk", View("dk part"), chunk, dtype)

        def compute(index: int, message: _Message, held: tuple[Operand, ...]) -> Iterator[Op]:
            if message.side == "kv":
                k, v = held
                yield from compute_dq(message.chunk, (k, v))
            else:
                yield from compute_dkv(message.chunk, held)

        yield ops.Delta(self.arrays["lse"])
        yield from self._new_gradients(dtype, copied=False)
        yield from self._gathered(("kv", "q"), compute)
        yield ops.Step("end")

    def _gathered(self, sides: tuple[Side, ...], compute: Compute) -> Iterator[Op]:
        """Compute with each message of each chunk, and gather one message ahead."""
        messages = [_Message(side, chunk) for chunk in self.chunks for side in sides]
        yield from self._post(messages, 0)
        for index, message in enumerate(messages):
            if message.side == "kv":
                yield ops.Step(f"heads {message.chunk.kv.start}", index // len(sides))
            send, recv = self._buffers[index]
            yield ops.Wait("shards")
            yield ops.Free((send,))
            yield from self._post(messages, index + 1)
            yield from compute(index, message, ops.entries(recv, len(message.views)))
            yield ops.Free((recv,))

    def _attend(self, index: int, message: _Message, held: tuple[Operand, ...]) -> Iterator[Op]:
        """Compute out and lse of a chunk, and copy them into the results of all heads."""
        spec, chunk, rows = self.call.spec, message.chunk, self.ranks.rows("q")
        k, v = held
        q = View("q", rows=None, heads=chunk.q)
        part = result_arrays(chunk_spec(spec, chunk), rows)
        state = replace(part["out"], dtype=spec.accum_dtype)
        yield ops.Start(q, spec.headdim_v, state, sinks=chunk.q)
        yield ops.Attend(self._tiles("kv"), q, k, v, last=True)
        if len(self.chunks) == 1:
            yield ops.Finish("out", "lse", part["out"], part["lse"])
            return
        yield ops.Finish("out part", "lse part", part["out"], part["lse"])
        for name, whole in result_arrays(spec, rows).items():
            if index == 0:
                yield ops.New(name, whole)
            yield ops.Assign(View(name, rows=None, heads=chunk.q), View(f"{name} part"))
            yield ops.Free((f"{name} part",))

    def _tiles(self, side: Side) -> StepTiles:
        """Return the tiles of this rank's rows and the gathered shards of a side."""
        return self.ranks.gathered(side, self._rows[side])

    # -- gradients

    def _array(self, name: str, chunk: HeadRun, rows: int, dtype: torch.dtype) -> Array:
        """Return the sizes of a gradient of some rows and of the chunk's heads."""
        source = self.arrays[name.removeprefix("d")]
        return Array(
            batch=source.batch,
            rows=rows,
            heads=chunk.num if name == "dq" else chunk.num_kv,
            dim=source.dim,
            dtype=dtype,
        )

    def _part(self, name: str, chunk: HeadRun, rows: int) -> ops.New:
        """Make a sum of zeros, for the gradient of the chunk's heads."""
        array = self._array(name, chunk, rows, self.call.spec.accum_dtype)
        return ops.New(f"{name} part", array, zero=True)

    def _new_gradients(self, dtype: torch.dtype, *, copied: bool) -> Iterator[Op]:
        """Make the gradients that are filled in parts.

        All gradients are assembled from chunks if there are several. If `copied`, dK and dV are
        copied from the received sums in any case.
        """
        several = len(self.chunks) > 1
        for name in ("q", "k", "v"):
            if several or (copied and name != "q"):
                yield ops.New(f"d{name}", replace(self.arrays[name], dtype=dtype))

    def _round(self, name: str, source: Operand, chunk: HeadRun, dtype: torch.dtype) -> ops.Round:
        """Round a chunk's gradient into the gradient of all heads."""
        side: Side = "q" if name == "dq" else "kv"
        all_heads = None
        chunk_heads = chunk.q if side == "q" else chunk.kv
        heads = chunk_heads if len(self.chunks) > 1 else all_heads
        return ops.Round(
            into=View(name, rows=None, heads=heads),
            gradient=source,
            array=self._array(name, chunk, self.ranks.rows(side), dtype),
            scaled=name != "dv",
        )

    def _gradient_packet(self, chunk: HeadRun) -> Packet:
        return gradient_packet(chunk_spec(self.call.spec, chunk), "kv", self._rows["kv"])

    def _post_shares(self, index: int, chunk: HeadRun) -> Iterator[Op]:
        """Start to sum a chunk's dK and dV of all rows over the ranks, and free them."""
        world_size = self.call.world_size
        packet = self._gradient_packet(chunk)
        longest = self._gradient_packet(self.chunks[0]).nbytes
        send = Buffer(f"shares {index}", world_size * longest)
        recv = Buffer(f"sums {index}", longest)
        one_packet_per_rank = Parcels((packet,) * world_size)
        yield ops.Pack(send, one_packet_per_rank, _shares(world_size, self._rows["kv"]))
        yield ops.Free(("dk part", "dv part"))
        yield ops.Post(
            channel="gradients",
            step=index,
            route=ops.Collective("reduce_scatter", self.call.spec.accum_dtype),
            send=send,
            recv=recv,
            message=packet,
            nbytes=packet.nbytes * (world_size - 1),
        )
        self._summing = chunk, send, recv

    def _receive_sums(self, dtype: torch.dtype) -> Iterator[Op]:
        """Wait for the sums under way, if any, and make this rank's dK and dV from them."""
        if self._summing is None:
            return
        chunk, send, recv = self._summing
        self._summing = None
        yield ops.Wait("gradients")
        yield ops.Free((send,))
        yield self._round("dk", ops.Entry(recv, 0), chunk, dtype)
        yield self._round("dv", ops.Entry(recv, 1), chunk, dtype)
        yield ops.Free((recv,))


@lru_cache(maxsize=8)
def _shares(world_size: int, rows: int) -> tuple[Copy, ...]:
    """Return the copies of each rank's rows of dK and dV to its packet.

    Cached: they are the same in the programs of all ranks, and a plan has many programs.
    """
    copies = []
    for rank in range(world_size):
        rank_rows = slice(rank * rows, (rank + 1) * rows)
        copies.append(Copy(2 * rank, View("dk part", rank_rows)))
        copies.append(Copy(2 * rank + 1, View("dv part", rank_rows)))
    return tuple(copies)


CODE = AllGather()
