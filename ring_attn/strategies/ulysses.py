"""Ulysses: the ranks of a group exchange heads for rows.

A rank that holds some rows of all heads gets all rows of some heads.

    4 ranks with the rows a, b, c, d of 4 heads; afterwards each rank has all rows of one head

    rank 0    a0 a1 a2 a3                               a0 | a1 | a2 | a3
    rank 1    b0 b1 b2 b3        q, k, v   --->         b0 | b1 | b2 | b3
    rank 2    c0 c1 c2 c3        out, lse  <---         c0 | c1 | c2 | c3
    rank 3    d0 d1 d2 d3                               d0 | d1 | d2 | d3
                                              rank       0    1    2    3

In a hybrid, each group has U consecutive ranks. After the exchange, a rank has the rows of its
group in the order of their positions. This is the shard of one rank in a layout of P/U ranks. Over
that layout the core, such as a ring, runs among the ranks with the same heads.

    P = 4, U = 2          exchange within          core among
                          0 1 | 2 3                0 2 (first half of the heads) | 1 3 (second)

Backward: dout is exchanged like q, and dq, dk and dv like out. Gradients are rounded before they
are sent. But if a kv head was sent to several ranks, dk and dv are sent in the accumulation type;
their owner adds them up in the order of the ranks, and rounds the sums. `core.heads` assigns heads
to ranks. (DeepSpeed-Ulysses, Jacobs et al., arXiv 2309.14509; hybrid: USP, Fang and Zhao, arXiv
2405.07719.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from ring_attn.backends import get_backend
from ring_attn.backends.base import why_bits_differ
from ring_attn.call import Call
from ring_attn.core import program as ops
from ring_attn.core.heads import HeadRun, HeadShare, is_replicated
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.messages import Packet, Parcels, largest_nbytes, packet_of
from ring_attn.core.program import Array, Buffer, Channel, Copy, Op, Program, View
from ring_attn.core.segments import Segment
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import CORES, Named, Strategy
from ring_attn.core.tiles import with_first_row
from ring_attn.strategies import ring
from ring_attn.strategies.base import SAVED, StrategyCode, input_arrays
from ring_attn.strategies.order import shares_of, why_not_by_heads

# The channel of all exchanges of heads and rows, also of gradients. No two of them are under way at
# the same time, and a second channel would be a second communicator of NCCL for each group.
CHANNEL: Channel = "shards"

# Where the rows of a member lie: pairs (rows of the member, rows of its group) of equal length.
PlacedRows = tuple[tuple[slice, slice], ...]
# The placed rows for each group, for each member.
MergedRows = tuple[tuple[PlacedRows, ...], ...]


class Ulysses(StrategyCode):
    """The exchange of heads for rows around a core."""

    def __init__(self, inner: StrategyCode) -> None:
        self._inner = inner
        self.sparse = inner.sparse

    def why_not_same_bits(self, call: Call) -> str | None:
        reason = why_not_by_heads(call)
        if reason is not None:
            return reason
        backend = get_backend(call.backend)
        core_calls = _core_calls(call)
        for core_call in core_calls:
            reason = why_bits_differ(backend, call.spec, core_call.spec)
            if reason is not None:
                return reason
        for core_call in core_calls:
            reason = self._inner.why_not_same_bits(core_call)
            if reason is not None:
                return reason
        return None

    def check(self, call: Call) -> None:
        # The cores of all members: if one member cannot compute its share, every rank raises.
        for core_call in _core_calls(call):
            self._inner.check(core_call)

    def program(self, call: Call, *, backward: bool, rounded: bool = True) -> Program:
        exchanges = _Exchanges(call, self._inner, rounded=rounded)
        if backward:
            return exchanges.backward(in_one_pass=self.in_one_pass(call))
        return exchanges.forward()

    def core(self, call: Call) -> Call:
        largest = max(shares_of(call), key=lambda share: share.num)
        return self._inner.core(core(call, largest))

    def kept(self, rank: int, world_size: int) -> tuple[str, ...]:
        return ()

    def fullest_ranks(self, call: Call) -> set[int]:
        """Return one member for each number of heads, of the groups of the fullest ranks."""
        degree = call.strategy.ulysses_degree
        sizes = [(share.num, share.num_kv) for share in shares_of(call)]
        members = [sizes.index(size) for size in set(sizes)]
        first_ranks = {rank - rank % degree for rank in super().fullest_ranks(call)}
        return {first + member for first in first_ranks for member in members}


def _whole(spec: AttentionSpec, world_size: int, node_size: int) -> Iterator[Strategy]:
    yield Strategy(ulysses_degree=world_size)


def _hybrids(spec: AttentionSpec, world_size: int, node_size: int) -> Iterator[Strategy]:
    for degree in range(2, min(world_size, spec.nheads + 1)):
        if world_size % degree == 0:
            for name in CORES:
                yield Strategy(name, ulysses_degree=degree)


WHOLE = Named(_whole, core=ring.CODE.name, only=lambda world_size: world_size)
HYBRID = Named(_hybrids, core=ring.CODE.name, needed=True)


def core(call: Call, heads: HeadRun | HeadShare) -> Call:
    """Return the core's call with some of the heads, and with one rank for each group."""
    degree = call.strategy.ulysses_degree
    layout_q, layout_kv = call.layouts
    merged_q, _ = merge_groups(layout_q, degree)
    merged_kv, _ = merge_groups(layout_kv, degree)
    return replace(
        call,
        spec=replace(call.spec, nheads=heads.num, nheads_kv=heads.num_kv),
        layouts=(merged_q, merged_kv),
        rank=call.rank // degree,
        strategy=replace(call.strategy, ulysses_degree=1),
    )


def _core_calls(call: Call) -> list[Call]:
    """Return the core's calls, one for each number of heads."""
    runs = [run for share in shares_of(call) for run in share.runs]
    return list(dict.fromkeys(core(call, run) for run in runs))


@dataclass(frozen=True)
class _Kind:
    """A kind of tensor in an exchange.

    Attributes:
        name: of the tensor.
        side: whose rows and heads it has.
        dim: of a head; None for a statistic.
        dtype: of its elements.
        summed: whether a head may arrive from several ranks, and is added up.
    """

    name: str
    side: Literal["q", "kv"]
    dim: int | None
    dtype: torch.dtype
    summed: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.name} sum" if self.summed else self.name

    def heads(self, run: HeadRun) -> slice:
        return run.q if self.side == "q" else run.kv

    def num_heads(self, run: HeadRun) -> int:
        return run.num if self.side == "q" else run.num_kv


def _by_heads(name: str, index: int) -> str:
    """Return the name of a tensor with all rows of the group and one run of this rank's heads."""
    return f"{name} by heads {index}"


class _Exchanges:
    """Builds the programs: heads for rows, the cores, rows for heads."""

    def __init__(self, call: Call, inner: StrategyCode, *, rounded: bool) -> None:
        self.call = call
        self.inner = inner
        self.rounded = rounded
        self.degree = call.strategy.ulysses_degree
        self.shares = shares_of(call)
        self.summed = is_replicated(self.shares, call.spec.nheads_kv)
        self.group_number, self.member = divmod(call.rank, self.degree)
        self.share = self.shares[self.member]
        # The ranks with the same heads, among which the core runs.
        self.peers = tuple(range(self.member, call.world_size, self.degree))
        # The ranks that exchange heads for rows.
        first = self.group_number * self.degree
        self.group = tuple(range(first, first + self.degree))

    def forward(self) -> Program:
        inputs, results = self._kinds_of_forward()
        steps: list[Op] = [ops.Step("to heads")]
        steps += self._exchange(inputs, 0, to_heads=True)
        saved: list[str] = []
        for index, run in enumerate(self.share.runs):
            core_call = core(self.call, run)
            program = self.inner.program(core_call, backward=False)
            input_names = [kind.name for kind in inputs]
            result_names = [kind.name for kind in results]
            result_names += [name for name in program.saved if name not in result_names]
            steps.append(self._inner(program, core_call, index, input_names, result_names))
            saved += [_by_heads(name, index) for name in program.saved]
        steps.append(ops.Step("to rows"))
        steps += self._exchange(results, 1, to_heads=False)
        return Program(
            world_size=self.call.world_size,
            rank=self.call.rank,
            backward=False,
            ops=tuple(steps),
            arrays=input_arrays(self.call, backward=False),
            saved=tuple(saved),
        )

    def backward(self, *, in_one_pass: bool) -> Program:
        inputs, results = self._kinds_of_backward()
        arrays = {"dout": input_arrays(self.call, backward=True)["dout"]}
        steps: list[Op] = [ops.Step("to heads")]
        steps += self._exchange(inputs, 2, to_heads=True)
        for index, run in enumerate(self.share.runs):
            core_call = replace(core(self.call, run), in_one_pass=in_one_pass)
            # Gradients that are added up by their owner are rounded there.
            rounded = self.rounded and not self.summed
            program = self.inner.program(core_call, backward=True, rounded=rounded)
            arrays |= {_by_heads(name, index): program.arrays[name] for name in SAVED}
            input_names = [*(kind.name for kind in inputs), *SAVED]
            result_names = [kind.name for kind in results]
            steps.append(self._inner(program, core_call, index, input_names, result_names))
            steps.append(ops.Free((_by_heads("dout", index),)))
        steps.append(ops.Step("to rows"))
        steps += self._exchange(results, 3, to_heads=False)
        steps += self._round_sums(results)
        return Program(
            world_size=self.call.world_size,
            rank=self.call.rank,
            backward=True,
            ops=tuple(steps),
            arrays=arrays,
        )

    def _inner(
        self,
        program: Program,
        core_call: Call,
        index: int,
        input_names: list[str],
        result_names: list[str],
    ) -> ops.Inner:
        """Return the op that runs the core's program with one run of this rank's heads."""
        return ops.Inner(
            program=program,
            spec=core_call.spec,
            ranks=self.peers,
            inputs=tuple((name, _by_heads(name, index)) for name in input_names),
            results=tuple((name, _by_heads(name, index)) for name in result_names),
            sinks=self.share.runs[index].q,
        )

    # -- the tensors that are exchanged, to heads and back to rows

    def _kinds_of_forward(self) -> tuple[tuple[_Kind, ...], tuple[_Kind, ...]]:
        spec = self.call.spec
        inputs = (
            _Kind("q", "q", spec.headdim, spec.dtype),
            _Kind("k", "kv", spec.headdim, spec.dtype),
            _Kind("v", "kv", spec.headdim_v, spec.dtype),
        )
        results = (
            _Kind("out", "q", spec.headdim_v, spec.dtype),
            _Kind("lse", "q", None, spec.accum_dtype),
        )
        return inputs, results

    def _kinds_of_backward(self) -> tuple[tuple[_Kind, ...], tuple[_Kind, ...]]:
        spec = self.call.spec
        q_dtype = spec.dtype if self.rounded else spec.accum_dtype
        kv_dtype = spec.accum_dtype if self.summed else q_dtype
        inputs = (_Kind("dout", "q", spec.headdim_v, spec.dtype),)
        results = (
            _Kind("dq", "q", spec.headdim, q_dtype),
            _Kind("dk", "kv", spec.headdim, kv_dtype, self.summed),
            _Kind("dv", "kv", spec.headdim_v, kv_dtype, self.summed),
        )
        return inputs, results

    # -- exchanges

    def _exchange(self, kinds: tuple[_Kind, ...], step: int, *, to_heads: bool) -> Iterator[Op]:
        """Exchange tensors of some rows and all heads for tensors of all rows and some heads.

        If not `to_heads`, exchange them back.
        """
        side = "heads" if to_heads else "rows"
        sent = self._message(kinds, all_heads=to_heads)
        received = self._message(kinds, all_heads=not to_heads)
        send = Buffer(f"sent to {side}", largest_nbytes(sent))
        recv = Buffer(f"received to {side}", largest_nbytes(received))
        yield ops.Pack(send, sent, self._copies(kinds, all_heads=to_heads))
        is_gradients = kinds[0].name == "dq"
        if is_gradients and self.share.runs:
            # Out and lse by heads are saved for the backward; gradients are not used again.
            indices = range(len(self.share.runs))
            yield ops.Free(tuple(_by_heads(kind.name, i) for i in indices for kind in kinds))
        yield ops.Post(
            channel=CHANNEL,
            step=step,
            route=ops.Collective(
                "all_to_all",
                dtype=torch.uint8,
                send_counts=tuple(sent.counts),
                recv_counts=tuple(received.counts),
            ),
            send=send,
            recv=recv,
            message=received,
            nbytes=sent.nbytes - sent.counts[self.member],
            ranks=self.group,
        )
        yield ops.Wait(CHANNEL, self.group)
        yield ops.Free((send,))
        yield from self._new_targets(kinds, all_heads=not to_heads)
        yield ops.Unpack(recv, received, self._copies(kinds, all_heads=not to_heads))

    def _round_sums(self, kinds: tuple[_Kind, ...]) -> Iterator[Op]:
        """Round the gradients that were added up; the core has scaled them already."""
        dtype = self.call.spec.dtype if self.rounded else self.call.spec.accum_dtype
        for kind in reversed(kinds):
            if kind.summed:
                result = replace(self._array_of_all_heads(kind), dtype=dtype)
                yield ops.Round(View(kind.name), View(kind.full_name), result, scaled=False)

    def _message(self, kinds: tuple[_Kind, ...], *, all_heads: bool) -> Parcels:
        """Return the message with a packet for each member of the group.

        With `all_heads` a packet has this rank's rows of the member's heads. Otherwise it has the
        member's rows of this rank's heads.
        """
        layout_q, layout_kv = self.call.layouts
        packets = [
            _packet(
                self.call.spec.batch,
                kinds,
                share,
                rows_q=layout_q.shard_len(rank),
                rows_kv=layout_kv.shard_len(rank),
            )
            for share, rank in self._parts(all_heads=all_heads)
        ]
        return Parcels(tuple(packets))

    def _parts(self, *, all_heads: bool) -> list[tuple[HeadShare, int]]:
        """Return the heads of each member's packet, and the rank that holds its rows."""
        if all_heads:
            return [(share, self.call.rank) for share in self.shares]
        return [(self.share, rank) for rank in self.group]

    def _array_of_all_heads(self, kind: _Kind) -> Array:
        spec = self.call.spec
        return Array(
            batch=spec.batch,
            rows=self.call.ranks.rows(kind.side),
            heads=spec.nheads if kind.side == "q" else spec.nheads_kv,
            dim=kind.dim,
            dtype=kind.dtype,
        )

    def _array_by_heads(self, kind: _Kind, run: HeadRun) -> Array:
        return Array(
            batch=self.call.spec.batch,
            rows=core(self.call, run).ranks.rows(kind.side),
            heads=kind.num_heads(run),
            dim=kind.dim,
            dtype=kind.dtype,
        )

    def _new_targets(self, kinds: tuple[_Kind, ...], *, all_heads: bool) -> Iterator[Op]:
        """Make the receiving tensors."""
        if all_heads:
            for kind in kinds:
                # A sum starts as zeros, and each message is added to it.
                array = self._array_of_all_heads(kind)
                yield ops.New(kind.full_name, array, zero=kind.summed)
            return
        for index, run in enumerate(self.share.runs):
            for kind in kinds:
                yield ops.New(_by_heads(kind.name, index), self._array_by_heads(kind, run))

    def _copies(self, kinds: tuple[_Kind, ...], *, all_heads: bool) -> tuple[Copy, ...]:
        """Return the copies between messages and the tensors before, or after, the exchange."""
        copies: list[Copy] = []
        entry = 0  # of the packets, in the order of `_packet`
        for member, (share, _) in enumerate(self._parts(all_heads=all_heads)):
            for index, run in enumerate(share.runs):
                for kind in kinds:
                    if all_heads:
                        view = View(kind.full_name, rows=None, heads=kind.heads(run))
                        copies.append(Copy(entry, view, add=kind.summed))
                    else:
                        name = _by_heads(kind.name, index)
                        placed = self._placed_rows(kind, member)
                        copies += [
                            Copy(entry, View(name, rows_of_group), rows_of_member)
                            for rows_of_member, rows_of_group in placed
                        ]
                    entry += 1
        return tuple(copies)

    def _placed_rows(self, kind: _Kind, member: int) -> PlacedRows:
        """Return where a member's rows lie among the rows of this rank's group."""
        layout_q, layout_kv = self.call.layouts
        _, rows = merge_groups(layout_q if kind.side == "q" else layout_kv, self.degree)
        return rows[self.group_number][member]


@lru_cache(maxsize=4096)
def _packet(
    batch: int, kinds: tuple[_Kind, ...], share: HeadShare, rows_q: int, rows_kv: int
) -> Packet:
    """Return the packet with a share's heads of some rows: run by run, kind by kind."""
    rows = {"q": rows_q, "kv": rows_kv}
    arrays = [
        Array(batch, rows[kind.side], kind.num_heads(run), kind.dim, kind.dtype)
        for run in share.runs
        for kind in kinds
    ]
    return packet_of([(array.shape, array.dtype) for array in arrays])


# -- layouts


@dataclass(frozen=True)
class _Piece:
    """A segment of a member's shard, and its first row in the shard."""

    segment: Segment
    member: int
    first_row: int


@lru_cache(maxsize=1024)
def merge_groups(layout: SequenceLayout, degree: int) -> tuple[SequenceLayout, MergedRows]:
    """Return the layout of groups that pool their rows in the order of positions.

        zigzag, 4 ranks, in pairs     rank 0: chunks 0 7, rank 1: 1 6   ->   0 1 6 7

    Each group has `degree` consecutive ranks. A single group of all ranks is in the order of
    positions for every stride, so the call's tiles, and its bits, are those of one process.
    """
    is_whole = degree == layout.world_size
    segments, rows = [], []
    for first_rank in range(0, layout.world_size, degree):
        pieces = _pieces_of_group(layout, first_rank, degree)
        segments.append([piece.segment for piece in pieces])
        placed: list[list[tuple[slice, slice]]] = [[] for _ in range(degree)]
        row = 0  # of the group
        for piece in pieces:
            length = piece.segment.length
            rows_of_member = slice(piece.first_row, piece.first_row + length)
            rows_of_group = slice(row, row + length)
            if is_whole:
                rows_of_group = _positions_of(piece.segment)
            placed[piece.member].append((rows_of_member, rows_of_group))
            row += length
        rows.append(tuple(tuple(of_member) for of_member in placed))
    if is_whole:
        return SequenceLayout.contiguous(layout.seqlen, 1), tuple(rows)
    return SequenceLayout.from_segments(segments), tuple(rows)


def _pieces_of_group(layout: SequenceLayout, first_rank: int, degree: int) -> list[_Piece]:
    """Return the segments of a group's members in the order of their positions."""
    pieces = [
        _Piece(segment, member, first_row)
        for member in range(degree)
        for first_row, segment in with_first_row(layout.segments(first_rank + member))
    ]
    return sorted(pieces, key=lambda piece: piece.segment.start)


def _positions_of(segment: Segment) -> slice:
    """Return the positions of a segment, which are its rows if one group has the whole sequence."""
    last = segment.start + (segment.length - 1) * segment.stride
    return slice(segment.start, last + 1, segment.stride)
