"""All-gather attention: gathers KV from all ranks, some heads at a time.

    KV heads        0           1           2
    gather      |-------|   |-------|   |-------|
    compute             |-----------|-----------|-----------|
    reduce                          |-------|   |-------|   |-------|    backward: dK, dV

The gathered shards follow one another in the order of the ranks, and one call of the backend folds
them all. So any layout works, and no state is carried between steps. A rank holds two gathered
buffers, each with `heads_per_chunk` KV heads of the whole sequence. Shards are padded to the length
of the longest. The backward gathers again, and works in one of two ways.

Added up: a rank accumulates its share of dK and dV of all rows in float32. A reduce-scatter sums
the shares over the ranks while the next heads are computed.

    rank r      K, V of all rows      ->  dQ, and its share of dK, dV of all rows  ->  + = dK, dV

In one place (`same_bits`): after KV, the Q side of the same heads is gathered (Q, dO, lse, delta),
from which a rank computes dK and dV of its own rows. Nothing is summed over ranks, so every sum has
the order of one process.

    rank r      K, V of all rows                 ->  dQ
                Q, dO, lse, delta of all rows    ->  dK, dV

With a backend that folds in order (triton) the bits are then one process's at every world
size, for every mask. This needs contiguous layouts, which may differ for queries and keys, in which
every rank's rows start at a multiple of the backend's `bits_unit`: the keys are then in the order
of their positions. Zigzag and striped shards are not, so their sums have another order.

(Context parallelism of Llama 3, arXiv 2407.21783, section 3.3.2; some heads at a time, as
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
from ring_attn.core.tiles import StepTiles, Traveller
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
        backend, specs = get_backend(call.backend), dict.fromkeys(_chunk_specs(call))
        reasons = (why_bits_differ(backend, call.spec, spec) for spec in specs)
        return why_not_in_order(call) or next(filter(None, reasons), None)

    def gradients(self, call: Call) -> GradientPlan:
        """In order, the owner of rows computes their dK and dV; else ranks' shares are summed."""
        if call.gradients is not None:
            return GradientPlan(None, call.gradients[1])
        return GradientPlan(None, self.why_not_same_bits(call) is None)

    def program(self, call: Call, *, backward: bool, rounded: bool = True) -> Program:
        if call.world_size == 1:  # nothing to gather
            return ring.CODE.program(call, backward=backward, rounded=rounded)
        arrays = input_arrays(call, backward=backward)
        work = _Gathering(call, arrays)
        if not backward:
            return core_program(call, arrays, work.forward(), backward=False)
        dtype = call.spec.dtype if rounded else call.spec.accum_dtype
        made = work.in_one_place(dtype) if in_one_place(call) else work.added_up(dtype)
        return core_program(call, arrays, made, backward=True)

    def label(self, strategy: Strategy) -> str:
        heads = strategy.heads_per_chunk or 1
        return self.name if heads == 1 else f"{self.name} by {heads} heads"

    def candidates(
        self, spec: AttentionSpec, world_size: int, node_size: int
    ) -> Iterator[Strategy]:
        powers = {min(1 << i, spec.nheads_kv) for i in range(spec.nheads_kv.bit_length() + 1)}
        for heads in sorted(powers):
            yield Strategy(self.name, heads_per_chunk=None if heads == 1 else heads)

    def num_steps(self, call: Call) -> int:
        return len(chunks_of(call))

    def share_at_queries(self, call: Call) -> float:
        return SHARE_OF_DQ if in_one_place(call) else 1.0

    def launch_spec(self, call: Call) -> AttentionSpec:
        return min(_chunk_specs(call), key=lambda spec: spec.nheads_kv)


def in_one_place(call: Call) -> bool:
    return CODE.gradients(call).in_order


def chunks_of(call: Call) -> tuple[HeadRun, ...]:
    """The chunks of heads in the order of gathering; the last chunk may have fewer heads."""
    heads, group = call.spec.nheads_kv, call.spec.nheads // call.spec.nheads_kv
    step = heads if call.world_size == 1 else call.strategy.heads_per_chunk or 1
    cuts = [*range(0, heads, step), heads]
    return tuple(HeadRun(a * group, (b - a) * group, a, b - a) for a, b in pairwise(cuts))


def chunk_spec(spec: AttentionSpec, chunk: HeadRun) -> AttentionSpec:
    return replace(spec, nheads=chunk.num, nheads_kv=chunk.num_kv)


def _chunk_specs(call: Call) -> list[AttentionSpec]:
    return [chunk_spec(call.spec, chunk) for chunk in chunks_of(call)]


def _shard_rows(call: Call, gathers: Traveller) -> int:
    """Rows of each gathered shard: the length of the longest, at least 1."""
    longest = max(call.layouts[1 if gathers == "kv" else 0].shard_lens)
    if in_one_place(call):
        # The backend's grid of blocks begins at row 0 of the gathered tensor.
        unit = get_backend(call.backend).bits_unit
        longest = -(-longest // unit) * unit
    return max(longest, 1)


@dataclass(frozen=True)
class _Message:
    """A gathering: the side whose shards are gathered, and the heads."""

    side: Traveller
    chunk: HeadRun

    @property
    def heads(self) -> slice:
        return self.chunk.q if self.side == "q" else self.chunk.kv

    @property
    def views(self) -> tuple[View, ...]:
        return tuple(View(name, None, self.heads) for name in SHARD[self.side])


# Yields the ops that compute with a message: its index, the message, the gathered tensors.
Compute = Callable[[int, _Message, tuple[Operand, ...]], Iterator[Op]]


class _Gathering:
    """Builds the programs: gathers one chunk before the compute, and sums one chunk after it."""

    def __init__(self, call: Call, arrays: dict[str, Array]) -> None:
        self.call, self.ranks, self.arrays = call, call.ranks, arrays
        self.chunks = chunks_of(call)
        # Once a program: asking the backend for each message took most of the time of a plan.
        self._rows: dict[Traveller, int] = {x: _shard_rows(call, x) for x in ("kv", "q")}
        self._buffers: dict[int, tuple[Buffer, Buffer]] = {}
        # The chunk whose dK and dV are being summed over the ranks, if any, and the buffers.
        self._summing: tuple[HeadRun, Buffer, Buffer] | None = None

    # -- gathering

    def _records(self, message: _Message) -> Records:
        spec, heads = self.call.spec, message.heads
        fields: list[tuple[int | None, torch.dtype]] = [
            (spec.headdim, spec.dtype), (spec.headdim_v, spec.dtype)
        ]  # fmt: skip
        if message.side == "q":
            fields += 2 * [(None, spec.accum_dtype)]
        rows = self._rows[message.side]
        return Records(spec.batch, rows, heads.stop - heads.start, tuple(fields))

    def _post(self, messages: list[_Message], index: int) -> Iterator[Op]:
        """Packs a message and starts to gather it; does nothing after the last."""
        if index == len(messages):
            return
        message, others = messages[index], self.call.world_size - 1
        longest = max(self._records(m).nbytes for m in messages)
        send = Buffer(f"message {index}", longest)
        recv = Buffer(f"gathered {index}", longest * self.call.world_size)
        self._buffers[index] = send, recv
        records = self._records(message)
        yield from pack_and_post(
            "shards", index, ops.Collective("all_gather"),
            message=records, copies=self._copies(message, records), send=send, recv=recv,
            receives=Gathered(records, self.call.world_size), nbytes=records.nbytes * others,
        )  # fmt: skip

    def _copies(self, message: _Message, records: Records) -> tuple[Copy, ...]:
        rows = self.ranks.rows(message.side)
        copies = [Copy(i, view, slice(0, rows)) for i, view in enumerate(message.views)]
        if rows < records.rows:
            copies += [Copy(i, None, slice(rows, records.rows)) for i in range(len(copies))]
        return tuple(copies)

    # -- compute

    def forward(self) -> Iterator[Op]:
        """Computes chunk after chunk, and assembles out and lse from the chunks."""
        yield from self._gathered(("kv",), self._attend)

    def added_up(self, dtype: torch.dtype) -> Iterator[Op]:
        """Computes dQ and a share of dK and dV, and sums the shares over the ranks."""

        def compute(index: int, message: _Message, held: tuple[Operand, ...]) -> Iterator[Op]:
            chunk, rows = message.chunk, self.call.world_size * self._rows["kv"]
            yield self._part("dq", chunk, self.ranks.rows("q"))
            for name in ("dk", "dv"):
                yield self._part(name, chunk, rows)
            yield ops.Differentiate(
                "all", self._tiles("kv"), _Message("q", chunk).views, (held[0], held[1]),
                View("dq part"), (View("dk part"), View("dv part")), View("out", None, chunk.q),
            )  # fmt: skip
            yield from self._receive_sums(dtype)
            yield from self._post_shares(index, chunk)
            yield self._round("dq", View("dq part"), chunk, dtype)

        yield ops.Delta(self.arrays["lse"])
        yield from self._new_gradients(dtype, copied=True)
        yield from self._gathered(("kv",), compute)
        yield ops.Step("end")
        yield from self._receive_sums(dtype)

    def in_one_place(self, dtype: torch.dtype) -> Iterator[Op]:
        """Computes dQ from the gathered KV, and dK and dV from the gathered Q side."""

        def compute(index: int, message: _Message, held: tuple[Operand, ...]) -> Iterator[Op]:
            chunk, tiles = message.chunk, self._tiles(message.side)
            if message.side == "kv":
                yield self._part("dq", chunk, self.ranks.rows("q"))
                q_side = _Message("q", chunk).views
                yield ops.Differentiate("q", tiles, q_side, (held[0], held[1]), View("dq part"))
                yield self._round("dq", View("dq part"), chunk, dtype)
                return
            for name in ("dk", "dv"):
                yield self._part(name, chunk, self.ranks.rows("kv"))
            k, v = _Message("kv", chunk).views
            parts = View("dk part"), View("dv part")
            yield ops.Differentiate("kv", tiles, held, (k, v), None, parts)
            for name in ("dv", "dk"):
                yield self._round(name, View(f"{name} part"), chunk, dtype)

        yield ops.Delta(self.arrays["lse"])
        yield from self._new_gradients(dtype, copied=False)
        yield from self._gathered(("kv", "q"), compute)
        yield ops.Step("end")

    def _gathered(self, sides: tuple[Traveller, ...], compute: Compute) -> Iterator[Op]:
        """Computes with each message of each chunk, and gathers one message ahead."""
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
        spec, chunk, rows = self.call.spec, message.chunk, self.ranks.rows("q")
        part = result_arrays(chunk_spec(spec, chunk), rows)
        q = View("q", None, chunk.q)
        yield ops.Start(q, spec.headdim_v, replace(part["out"], dtype=spec.accum_dtype), chunk.q)
        yield ops.Attend(self._tiles("kv"), q, held[0], held[1], last=True)
        if len(self.chunks) == 1:
            yield ops.Finish("out", "lse", part["out"], part["lse"])
            return
        yield ops.Finish("out part", "lse part", part["out"], part["lse"])
        for name, whole in result_arrays(spec, rows).items():
            if index == 0:
                yield ops.New(name, whole)
            yield ops.Assign(View(name, None, chunk.q), View(f"{name} part"))
            yield ops.Free((f"{name} part",))

    def _tiles(self, gathers: Traveller) -> StepTiles:
        return self.ranks.gathered(gathers, self._rows[gathers])

    # -- gradients

    def _array(self, name: str, chunk: HeadRun, rows: int, dtype: torch.dtype) -> Array:
        heads = chunk.q if name == "dq" else chunk.kv
        source = self.arrays[name[1:]]
        return Array(source.batch, rows, heads.stop - heads.start, source.dim, dtype)

    def _part(self, name: str, chunk: HeadRun, rows: int) -> ops.New:
        array = self._array(name, chunk, rows, self.call.spec.accum_dtype)
        return ops.New(f"{name} part", array, zero=True)

    def _new_gradients(self, dtype: torch.dtype, *, copied: bool) -> Iterator[Op]:
        """Makes the gradients that are assembled from chunks, or (dK, dV) copied from sums."""
        several = len(self.chunks) > 1
        for name in ("q", "k", "v"):
            if several or (copied and name != "q"):
                yield ops.New(f"d{name}", replace(self.arrays[name], dtype=dtype))

    def _round(self, name: str, source: Operand, chunk: HeadRun, dtype: torch.dtype) -> ops.Round:
        heads = None
        if len(self.chunks) > 1:
            heads = chunk.q if name == "dq" else chunk.kv
        rows = self.ranks.rows("q" if name == "dq" else "kv")
        array = self._array(name, chunk, rows, dtype)
        return ops.Round(View(name, None, heads), source, array, scaled=name != "dv")

    def _gradient_packet(self, chunk: HeadRun) -> Packet:
        return gradient_packet(chunk_spec(self.call.spec, chunk), "kv", self._rows["kv"])

    def _post_shares(self, index: int, chunk: HeadRun) -> Iterator[Op]:
        """Starts to sum a chunk's dK and dV of all rows over the ranks, and frees them."""
        packet, rows, world_size = (
            self._gradient_packet(chunk),
            self._rows["kv"],
            self.call.world_size,
        )
        longest = self._gradient_packet(self.chunks[0]).nbytes
        send = Buffer(f"shares {index}", world_size * longest)
        recv = Buffer(f"sums {index}", longest)
        yield ops.Pack(send, Parcels((packet,) * world_size), _shares(world_size, rows))
        yield ops.Free(("dk part", "dv part"))
        yield ops.Post(
            channel="gradients", step=index,
            route=ops.Collective("reduce_scatter", self.call.spec.accum_dtype),
            send=send, recv=recv, message=packet, nbytes=packet.nbytes * (world_size - 1),
        )  # fmt: skip
        self._summing = chunk, send, recv

    def _receive_sums(self, dtype: torch.dtype) -> Iterator[Op]:
        """Waits for the sums under way, if any, and makes this rank's dK and dV from them."""
        if self._summing is None:
            return
        chunk, send, recv = self._summing
        self._summing = None
        yield ops.Wait("gradients")
        yield ops.Free((send,))
        for i, name in enumerate(("dk", "dv")):
            yield self._round(name, ops.Entry(recv, i), chunk, dtype)
        yield ops.Free((recv,))


@lru_cache(maxsize=8)
def _shares(world_size: int, rows: int) -> tuple[Copy, ...]:
    """Every rank's rows of dK and dV; equal in all ranks' programs, of which a plan has many."""
    return tuple(
        Copy(2 * rank + i, View(name, slice(rank * rows, (rank + 1) * rows)))
        for rank in range(world_size)
        for i, name in enumerate(("dk part", "dv part"))
    )


CODE = AllGather()
