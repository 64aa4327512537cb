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

With a backend that folds in order (triton) the bits are then those of one process at every world
size, for every mask. This needs contiguous layouts, which may differ for queries and keys, in which
every rank's rows start at a multiple of the backend's `bits_unit`: the keys are then in the order
of their positions. Zigzag and striped shards are not, so their sums have another order.

(Context parallelism of Llama 3, arXiv 2407.21783, section 3.3.2; some heads at a time, as
ring-flash-attention's `llama3_flash_attn_varlen_func` does with `heads_k_stride`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ring_attn.backends import bits_unit, get_backend
from ring_attn.backends.base import why_not_alike
from ring_attn.core import order
from ring_attn.core.messages import Gathered, Parcels, Records
from ring_attn.core.program import (
    Array,
    Assign,
    Attend,
    Buffer,
    Collective,
    Copy,
    Delta,
    Differentiate,
    Entry,
    Finish,
    Free,
    New,
    Op,
    Operand,
    Pack,
    Post,
    Program,
    Round,
    Start,
    Step,
    View,
    Wait,
)
from ring_attn.core.ranks import Ranks
from ring_attn.core.spec import AttentionSpec, Packet
from ring_attn.core.tiles import Traveller, check_fit
from ring_attn.strategies.base import Call, StrategyCode, input_arrays, result_arrays


class Chunk(NamedTuple):
    """Heads that are gathered at a time: KV heads, and the query heads that use them."""

    kv: slice
    q: slice


def check(call: Call) -> None:
    """Refuses layouts and masks that do not fit."""
    check_fit(*call.layouts, call.mask)


def why_not_same_bits(call: Call) -> str | None:
    """None if an all-gather has the same bits at every world size, else the reason why not."""
    if call.same_bits is False:
        return "gradients are added up: same_bits=False"
    heads = (call.spec.nheads, call.spec.nheads_kv)
    unit, backend = bits_unit(call.backend), get_backend(call.backend)
    reason = order.why_not_in_order(
        call.strategy, heads, call.layouts, call.mask, call.backend, unit
    )
    parts = (chunk_spec(call.spec, chunk) for chunk in chunks_of(call))
    return reason or next(filter(None, (why_not_alike(backend, call.spec, x) for x in parts)), None)


def in_one_place(call: Call) -> bool:
    """Whether the owner of the rows computes dK and dV, rather than summing shares of all ranks."""
    if call.gradients is not None:
        return call.gradients[1]
    return why_not_same_bits(call) is None


def chunks_of(call: Call) -> tuple[Chunk, ...]:
    """The chunks of heads in the order of gathering; the last chunk may have fewer heads."""
    heads, group = call.spec.nheads_kv, call.spec.nheads // call.spec.nheads_kv
    step = heads if call.world_size == 1 else call.strategy.heads_per_chunk or 1
    cuts = [*range(0, heads, step), heads]
    return tuple(
        Chunk(slice(a, b), slice(a * group, b * group))
        for a, b in zip(cuts, cuts[1:], strict=False)
    )


def chunk_spec(spec: AttentionSpec, chunk: Chunk) -> AttentionSpec:
    """The spec with the heads of a chunk."""
    nheads, nheads_kv = chunk.q.stop - chunk.q.start, chunk.kv.stop - chunk.kv.start
    return replace(spec, nheads=nheads, nheads_kv=nheads_kv)


def _shard_rows(call: Call, gathers: Traveller) -> int:
    """Rows of each gathered shard: the length of the longest, at least 1."""
    longest = max(call.layouts[1 if gathers == "kv" else 0].shard_lens)
    if call.world_size > 1 and in_one_place(call):
        # The backend's grid of blocks begins at row 0 of the gathered tensor.
        unit = get_backend(call.backend).bits_unit
        longest = -(-longest // unit) * unit
    return max(longest, 1)


def program(call: Call, ranks: Ranks, *, backward: bool, rounded: bool = True) -> Program:
    """The program of an all-gather, in one direction."""
    arrays = input_arrays(call.spec, ranks, backward=backward)
    work = _Gathering(call, ranks, arrays)
    if not backward:
        ops = tuple(work.forward())
        saved = ("q", "k", "v", "out", "lse")
        return Program(ranks.world_size, ranks.rank, False, ops, arrays, saved)
    dtype = call.spec.dtype if rounded else call.spec.accum_dtype
    ops = tuple(work.in_one_place(dtype) if in_one_place(call) else work.added_up(dtype))
    return Program(ranks.world_size, ranks.rank, True, ops, arrays)


@dataclass(frozen=True)
class _Message:
    """A gathering: the side whose shards are gathered, and the heads."""

    side: Traveller
    chunk: Chunk


class _Gathering:
    """Builds the programs: gathers one chunk ahead of the compute, and sums one behind it."""

    def __init__(self, call: Call, ranks: Ranks, arrays: dict[str, Array]) -> None:
        self.call, self.ranks, self.arrays = call, ranks, arrays
        self.chunks = chunks_of(call)
        self.alone = call.world_size == 1
        self._buffers: dict[int, tuple[Buffer, Buffer]] = {}

    # -- gathering

    def _records(self, message: _Message) -> Records:
        spec, chunk = self.call.spec, message.chunk
        fields: list[tuple[int | None, torch.dtype]] = [
            (spec.headdim, spec.dtype), (spec.headdim_v, spec.dtype)
        ]  # fmt: skip
        heads = chunk.kv
        if message.side == "q":
            heads = chunk.q
            fields += 2 * [(None, spec.accum_dtype)]
        rows = _shard_rows(self.call, message.side)
        return Records(spec.batch, rows, heads.stop - heads.start, tuple(fields))

    def _post(self, messages: list[_Message], index: int) -> Iterator[Op]:
        """Packs a message and starts to gather it; does nothing after the last."""
        if self.alone or index == len(messages):
            return
        message, others = messages[index], self.call.world_size - 1
        longest = max(self._records(m).nbytes for m in messages)
        send = Buffer(f"message {index}", longest)
        recv = Buffer(f"gathered {index}", longest * self.call.world_size)
        self._buffers[index] = send, recv
        records = self._records(message)
        yield Pack(send, records, self._copies(message, records))
        yield Post(
            "shards", index, self._collective("all_gather"), send, recv,
            Gathered(records, self.call.world_size), records.nbytes * others,
        )  # fmt: skip

    def _collective(self, op: str, dtype: torch.dtype = torch.uint8) -> Collective:
        groups = None
        if self.ranks.rank is None:
            groups = torch.arange(self.call.world_size)[None]
        return Collective(op, dtype, groups=groups)  # type: ignore[arg-type]

    def _copies(self, message: _Message, records: Records) -> tuple[Copy, ...]:
        rows = self.ranks.rows(message.side)
        if not isinstance(rows, int):
            return ()
        heads = message.chunk.q if message.side == "q" else message.chunk.kv
        names = ("q", "dout", "lse", "delta") if message.side == "q" else ("k", "v")
        copies = [Copy(i, View(n, None, heads), slice(0, rows)) for i, n in enumerate(names)]
        if rows < records.rows:
            copies += [Copy(i, None, slice(rows, records.rows)) for i in range(len(names))]
        return tuple(copies)

    def _wait(self, messages: list[_Message], index: int) -> Iterator[Op]:
        """Waits for a message and starts to gather the next."""
        if not self.alone:
            yield Wait("shards")
            yield Free((self._buffers[index][0],))
        yield from self._post(messages, index + 1)

    def _free(self, index: int) -> Iterator[Op]:
        if not self.alone:
            yield Free((self._buffers[index][1],))

    def _held(self, index: int, message: _Message) -> tuple[Operand, ...]:
        """The gathered tensors; a single rank has its own tensors."""
        if not self.alone:
            count = 2 if message.side == "kv" else 4
            return tuple(Entry(self._buffers[index][1], i) for i in range(count))
        names = ("k", "v") if message.side == "kv" else ("q", "dout", "lse", "delta")
        heads = message.chunk.kv if message.side == "kv" else message.chunk.q
        return tuple(View(name, None, heads) for name in names)

    def _tiles(self, gathers: Traveller = "kv") -> object:
        return self.ranks.gathered(gathers, _shard_rows(self.call, gathers))

    # -- compute

    def forward(self) -> Iterator[Op]:
        """Computes chunk after chunk, and assembles out and lse from the chunks."""
        spec, several = self.call.spec, len(self.chunks) > 1
        whole = result_arrays(spec, self.ranks.rows("q"))
        messages = [_Message("kv", chunk) for chunk in self.chunks]
        yield from self._post(messages, 0)
        for index, message in enumerate(messages):
            chunk = message.chunk
            yield Step(f"heads {chunk.kv.start}", index)
            yield from self._wait(messages, index)
            part = result_arrays(chunk_spec(self.call.spec, chunk), self.ranks.rows("q"))
            q, (k, v) = View("q", None, chunk.q), self._held(index, message)
            state = replace(part["out"], dtype=spec.accum_dtype)
            yield Start(q, spec.headdim_v, state, chunk.q)
            yield Attend(self._tiles(), q, k, v, last=True)
            names = ("out", "lse")
            parts = tuple(f"{name} part" for name in names) if several else names
            yield Finish(parts[0], parts[1], part["out"], part["lse"])
            if several:
                for name, part_name in zip(names, parts, strict=True):
                    if index == 0:
                        yield New(name, whole[name])
                    yield Assign(View(name, None, chunk.q), View(part_name))
                    yield Free((part_name,))
            yield from self._free(index)

    def added_up(self, dtype: torch.dtype) -> Iterator[Op]:
        """Computes dQ and a share of dK and dV, and sums the shares over the ranks."""
        yield Delta(self.arrays["lse"])
        messages = [_Message("kv", chunk) for chunk in self.chunks]
        sums = _Sums(self, dtype)
        yield from self._new_gradients(dtype, copied=not self.alone)
        yield from self._post(messages, 0)
        for index, message in enumerate(messages):
            chunk = message.chunk
            yield Step(f"heads {chunk.kv.start}", index)
            yield from self._wait(messages, index)
            k, v = self._held(index, message)
            all_rows = self.call.world_size * _shard_rows(self.call, "kv")
            rows = self.ranks.rows("kv") if self.alone else all_rows
            yield from self._parts(chunk, rows)
            yield Differentiate(
                "all", self._tiles(), self._q_side(chunk), (k, v), View("dq part"),
                (View("dk part"), View("dv part")), View("out", None, chunk.q),
            )  # fmt: skip
            if self.alone:
                yield self._round("dv", chunk, dtype)
                yield self._round("dk", chunk, dtype)
            else:
                yield from sums.receive()
                yield from sums.post(index, chunk)
            yield self._round("dq", chunk, dtype)
            yield from self._free(index)
        yield Step("end")
        yield from sums.receive()

    def in_one_place(self, dtype: torch.dtype) -> Iterator[Op]:
        """Computes dQ from the gathered KV, and dK and dV from the gathered Q side."""
        yield Delta(self.arrays["lse"])
        messages = [_Message(side, chunk) for chunk in self.chunks for side in ("kv", "q")]
        yield from self._new_gradients(dtype, copied=False)
        yield from self._post(messages, 0)
        for index, message in enumerate(messages):
            chunk, step = message.chunk, index // 2
            if message.side == "kv":
                yield Step(f"heads {chunk.kv.start}", step)
            yield from self._wait(messages, index)
            held = self._held(index, message)
            if message.side == "kv":
                yield self._part("dq", chunk, self.ranks.rows("q"))
                yield Differentiate(
                    "q", self._tiles("kv"), self._q_side(chunk), (held[0], held[1]),
                    View("dq part"),
                )  # fmt: skip
                yield self._round("dq", chunk, dtype)
            else:
                for name in ("dk", "dv"):
                    yield self._part(name, chunk, self.ranks.rows("kv"))
                own = (View("k", None, chunk.kv), View("v", None, chunk.kv))
                yield Differentiate(
                    "kv", self._tiles("q"), held, own, None, (View("dk part"), View("dv part"))
                )
                yield self._round("dv", chunk, dtype)
                yield self._round("dk", chunk, dtype)
            yield from self._free(index)
        yield Step("end")

    def _q_side(self, chunk: Chunk) -> tuple[Operand, ...]:
        return tuple(View(name, None, chunk.q) for name in ("q", "dout", "lse", "delta"))

    # -- gradients

    def _array(self, name: str, chunk: Chunk, rows: int, dtype: torch.dtype) -> Array:
        heads = chunk.q if name == "dq" else chunk.kv
        source = self.arrays[name[1:]]
        return Array(source.batch, rows, heads.stop - heads.start, source.dim, dtype)

    def _part(self, name: str, chunk: Chunk, rows: int) -> New:
        """Makes zeros for a gradient of a chunk."""
        array = self._array(name, chunk, rows, self.call.spec.accum_dtype)
        return New(f"{name} part", array, zero=True)

    def _parts(self, chunk: Chunk, rows_kv: int) -> Iterator[Op]:
        yield self._part("dq", chunk, self.ranks.rows("q"))
        yield self._part("dk", chunk, rows_kv)
        yield self._part("dv", chunk, rows_kv)

    def _new_gradients(self, dtype: torch.dtype, *, copied: bool) -> Iterator[Op]:
        """Makes the gradients that are assembled from chunks, or (dK, dV) copied from sums."""
        several = len(self.chunks) > 1
        for name in ("q", "k", "v"):
            if several or (copied and name != "q"):
                yield New(f"d{name}", replace(self.arrays[name], dtype=dtype))

    def _round(self, name: str, chunk: Chunk, dtype: torch.dtype) -> Round:
        heads = None
        if len(self.chunks) > 1:
            heads = chunk.q if name == "dq" else chunk.kv
        rows = self.ranks.rows("q" if name == "dq" else "kv")
        array = self._array(name, chunk, rows, dtype)
        return Round(View(name, None, heads), View(f"{name} part"), array, scaled=name != "dv")


class _Sums:
    """Sums a chunk's dK and dV of all rows over the ranks, while the next chunk is computed."""

    def __init__(self, gathering: _Gathering, dtype: torch.dtype) -> None:
        self._gathering, self._dtype = gathering, dtype
        self._under_way: tuple[Chunk, Buffer, Buffer] | None = None

    def _packet(self, chunk: Chunk) -> Packet:
        call = self._gathering.call
        return chunk_spec(call.spec, chunk).kv_grad_packet(_shard_rows(call, "kv"))

    def post(self, index: int, chunk: Chunk) -> Iterator[Op]:
        """Starts to sum dK and dV of all rows, and frees them."""
        call, packet = self._gathering.call, self._packet(chunk)
        rows, world_size = _shard_rows(call, "kv"), call.world_size
        longest = self._packet(self._gathering.chunks[0]).nbytes
        send = Buffer(f"shares {index}", world_size * longest)
        recv = Buffer(f"sums {index}", longest)
        copies = tuple(
            Copy(2 * rank + i, View(name, slice(rank * rows, (rank + 1) * rows)))
            for rank in range(world_size if self._gathering.ranks.rank is not None else 0)
            for i, name in enumerate(("dk part", "dv part"))
        )
        shares = Parcels((packet,) * world_size)
        yield Pack(send, shares, copies)
        yield Free(("dk part", "dv part"))
        sums = self._gathering._collective("reduce_scatter", call.spec.accum_dtype)
        nbytes = packet.nbytes * (world_size - 1)
        yield Post("gradients", index, sums, send, recv, packet, nbytes)
        self._under_way = chunk, send, recv

    def receive(self) -> Iterator[Op]:
        """Waits for the sums under way, if any, and makes this rank's dK and dV from them."""
        if self._under_way is None:
            return
        chunk, send, recv = self._under_way
        self._under_way = None
        yield Wait("gradients")
        yield Free((send,))
        rows = self._gathering.ranks.rows("kv")
        for i, name in enumerate(("dk", "dv")):
            heads = chunk.kv if len(self._gathering.chunks) > 1 else None
            array = self._gathering._array(name, chunk, rows, self._dtype)
            yield Round(View(name, None, heads), Entry(recv, i), array, scaled=name != "dv")
        yield Free((recv,))


CODE = StrategyCode(program, why_not_same_bits, check)
