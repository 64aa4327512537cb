"""Ulysses: ranks of a group exchange heads for rows. A rank with some rows of all heads gets all
rows of some heads.

    4 ranks with the rows a, b, c, d of 4 heads; afterwards each rank has all rows of one head

    rank 0    a0 a1 a2 a3                               a0 | a1 | a2 | a3
    rank 1    b0 b1 b2 b3        q, k, v   --->         b0 | b1 | b2 | b3
    rank 2    c0 c1 c2 c3        out, lse  <---         c0 | c1 | c2 | c3
    rank 3    d0 d1 d2 d3                               d0 | d1 | d2 | d3
                                              rank       0    1    2    3

In a hybrid, groups have U consecutive ranks. After the exchange a rank has the rows of its group in
the order of their positions: this is the shard of one rank in a layout of P/U ranks. Over that
layout the core, such as a ring, runs among the ranks with the same heads.

    P = 4, U = 2          exchange within          core among
                          0 1 | 2 3                0 2 (first half of the heads) | 1 3 (second)

Backward: dout is exchanged like q; dq, dk and dv like out. They are rounded first; but if a kv head
was sent to several ranks, dk and dv stay in the accumulation type, their owner adds them up in the
order of the ranks, and rounds then. `core.heads` assigns heads to ranks. (DeepSpeed-Ulysses, Jacobs
et al., arXiv 2309.14509; hybrid: USP, Fang and Zhao, arXiv 2405.07719.)
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
from ring_attn.core.messages import Packet, Parcels, packet_of, room_of
from ring_attn.core.program import Array, Buffer, Channel, Copy, Op, Program, View
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.strategy import CORES, Named, Strategy
from ring_attn.core.tiles import with_first_row
from ring_attn.strategies import ring
from ring_attn.strategies.base import SAVED, StrategyCode, input_arrays
from ring_attn.strategies.order import shares_of, why_not_by_heads

# For each group, for each member: pairs (rows of the member, rows of the group) of equal length.
MergedRows = tuple[tuple[tuple[tuple[slice, slice], ...], ...], ...]


class Ulysses(StrategyCode):
    """The exchange of heads for rows around a core."""

    def __init__(self, inner: StrategyCode) -> None:
        self._inner, self.sparse = inner, inner.sparse

    def why_not_same_bits(self, call: Call) -> str | None:
        reason = why_not_by_heads(call)
        if reason is not None:
            return reason
        backend, cores = get_backend(call.backend), _cores(call)
        reasons = [
            *(why_bits_differ(backend, call.spec, each.spec) for each in cores),
            *map(self._inner.why_not_same_bits, cores),
        ]
        return next((reason for reason in reasons if reason is not None), None)

    def check(self, call: Call) -> None:
        # Checks the cores of all members, so that every rank refuses what one member refuses.
        for each in _cores(call):
            self._inner.check(each)

    def program(self, call: Call, *, backward: bool, rounded: bool = True) -> Program:
        exchanges = _Exchanges(call, self._inner)
        return exchanges.program(backward=backward, rounded=rounded)

    def core(self, call: Call) -> Call:
        largest = max(shares_of(call), key=lambda share: share.num)
        return self._inner.core(core(call, largest))

    def kept(self, rank: int, world_size: int) -> tuple[str, ...]:
        return ()

    def fullest_ranks(self, call: Call) -> set[int]:
        """A member with each number of heads, of the groups of the fullest ranks."""
        degree = call.strategy.ulysses_degree
        sizes = [(share.num, share.num_kv) for share in shares_of(call)]
        members = [sizes.index(size) for size in set(sizes)]
        return {
            rank - rank % degree + member
            for rank in super().fullest_ranks(call)
            for member in members
        }


def _whole(spec: AttentionSpec, world_size: int, node_size: int) -> Iterator[Strategy]:
    yield Strategy(ulysses_degree=world_size)


def _hybrids(spec: AttentionSpec, world_size: int, node_size: int) -> Iterator[Strategy]:
    for degree in range(2, min(world_size, spec.nheads + 1)):
        if world_size % degree == 0:
            for name in CORES:
                yield Strategy(name, ulysses_degree=degree)


NAMES = {
    "ulysses": Named(_whole, ring.CODE.name, only=lambda world_size: world_size),
    "hybrid": Named(_hybrids, ring.CODE.name, needed=True),
}


def core(call: Call, heads: HeadRun | HeadShare) -> Call:
    """The core's call with some of the heads, and with one rank for each group."""
    degree = call.strategy.ulysses_degree
    q, kv = (merge_groups(layout, degree)[0] for layout in call.layouts)
    return replace(
        call,
        spec=replace(call.spec, nheads=heads.num, nheads_kv=heads.num_kv),
        layouts=(q, kv),
        rank=call.rank // degree,
        strategy=replace(call.strategy, ulysses_degree=1),
    )


def _cores(call: Call) -> list[Call]:
    """The core's calls, one for each number of heads."""
    shares = shares_of(call)
    return list(dict.fromkeys(core(call, run) for share in shares for run in share.runs))


@dataclass(frozen=True)
class _Kind:
    """A tensor of an exchange: its name, the side of its rows and heads, its dim and type.

    The dim of a statistic is None. If `summed`, a head may arrive from several ranks and is added
    up.
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
    """Name a tensor with all rows of the group and one run of this rank's heads."""
    return f"{name} by heads {index}"


class _Exchanges:
    """Builds the programs: heads for rows, the cores, rows for heads."""

    def __init__(self, call: Call, inner: StrategyCode) -> None:
        self.call, self.inner = call, inner
        self.degree = call.strategy.ulysses_degree
        self.shares = shares_of(call)
        self.summed = is_replicated(self.shares, call.spec.nheads_kv)
        number, self.member = divmod(call.rank, self.degree)
        self.share = self.shares[self.member]
        # The ranks with the same heads, and those with which heads are exchanged for rows.
        self.peers = tuple(range(self.member, call.world_size, self.degree))
        self.group = tuple(range(number * self.degree, (number + 1) * self.degree))

    def program(self, *, backward: bool, rounded: bool) -> Program:
        spec = self.call.spec
        there, back = self._kinds(backward=backward, rounded=rounded)
        arrays = input_arrays(self.call, backward=backward)
        if backward:
            arrays = {"dout": arrays["dout"]}
        channel: Channel = "gradients" if backward else "shards"
        first = 2 if backward else 0
        made: list[Op] = [ops.Step("to heads")]
        made += self._exchange(there, "shards", first, to_heads=True)
        saved: list[str] = []
        for index, run in enumerate(self.share.runs):
            core_call = core(self.call, run)
            program = self.inner.program(
                core_call, backward=backward, rounded=rounded and not self.summed
            )
            inputs = [kind.name for kind in there]
            results = [kind.name for kind in back]
            if backward:
                arrays |= {_by_heads(name, index): program.arrays[name] for name in SAVED}
                inputs += SAVED
            else:
                saved += [_by_heads(name, index) for name in program.saved]
                results += [name for name in program.saved if name not in results]
            inner = ops.Inner(
                program=program,
                spec=core_call.spec,
                ranks=self.peers,
                inputs=tuple((name, _by_heads(name, index)) for name in inputs),
                results=tuple((name, _by_heads(name, index)) for name in results),
                sinks=run.q,
            )
            made.append(inner)
            if backward:
                made.append(ops.Free((_by_heads("dout", index),)))
        made.append(ops.Step("to rows"))
        made += self._exchange(back, channel, first + 1, to_heads=False)
        if backward:
            made += self._rounded(back, spec.dtype if rounded else spec.accum_dtype)
        call = self.call
        return Program(call.world_size, call.rank, backward, tuple(made), arrays, tuple(saved))

    # -- exchanges

    def _kinds(
        self, *, backward: bool, rounded: bool
    ) -> tuple[tuple[_Kind, ...], tuple[_Kind, ...]]:
        """The tensors exchanged to heads, and the tensors exchanged back to rows."""
        spec = self.call.spec
        dtype, wide, dim, dim_v = spec.dtype, spec.accum_dtype, spec.headdim, spec.headdim_v
        if not backward:
            kv = _Kind("k", "kv", dim, dtype), _Kind("v", "kv", dim_v, dtype)
            return (_Kind("q", "q", dim, dtype), *kv), (
                _Kind("out", "q", dim_v, dtype),
                _Kind("lse", "q", None, wide),
            )
        q_dtype = dtype if rounded else wide
        kv_dtype = wide if self.summed else q_dtype
        gradients = (
            _Kind("dq", "q", dim, q_dtype),
            _Kind("dk", "kv", dim, kv_dtype, self.summed),
            _Kind("dv", "kv", dim_v, kv_dtype, self.summed),
        )
        return (_Kind("dout", "q", dim_v, dtype),), gradients

    def _exchange(
        self, kinds: tuple[_Kind, ...], channel: Channel, step: int, *, to_heads: bool
    ) -> Iterator[Op]:
        side = "heads" if to_heads else "rows"
        sent = self._message(kinds, all_heads=to_heads)
        received = self._message(kinds, all_heads=not to_heads)
        counts = tuple(sent.counts), tuple(received.counts)
        route = ops.Collective("all_to_all", torch.uint8, *counts)
        send = Buffer(f"sent to {side}", room_of(sent))
        recv = Buffer(f"received to {side}", room_of(received))
        yield ops.Pack(send, sent, self._copies(kinds, all_heads=to_heads))
        if not to_heads and kinds[0].name == "dq" and self.share.runs:
            indices = range(len(self.share.runs))
            yield ops.Free(tuple(_by_heads(kind.name, i) for i in indices for kind in kinds))
        yield ops.Post(
            channel=channel, step=step, route=route, send=send, recv=recv, message=received,
            nbytes=sent.nbytes - counts[0][self.member], ranks=self.group,
        )  # fmt: skip
        yield ops.Wait(channel, self.group)
        yield ops.Free((send,))
        for name, array, zero in self._targets(kinds, all_heads=not to_heads):
            yield ops.New(name, array, zero)
        yield ops.Unpack(recv, received, self._copies(kinds, all_heads=not to_heads))

    def _rounded(self, kinds: tuple[_Kind, ...], dtype: torch.dtype) -> Iterator[Op]:
        for kind in reversed(kinds):
            if kind.summed:
                (array,) = (x for _, x, _ in self._targets((kind,), all_heads=True))
                result = replace(array, dtype=dtype)
                yield ops.Round(View(kind.name), View(kind.full_name), result, False)

    def _message(self, kinds: tuple[_Kind, ...], *, all_heads: bool) -> Parcels:
        """A packet for each member: this rank's rows of the member's heads, or the reverse."""
        call = self.call
        return Parcels(tuple(
            _packet(call.spec.batch, kinds, share, *(x.shard_len(rank) for x in call.layouts))
            for share, rank in self._parts(all_heads=all_heads)
        ))  # fmt: skip

    def _parts(self, *, all_heads: bool) -> list[tuple[HeadShare, int]]:
        """The heads, and the rank of the rows, of each member's packet."""
        if all_heads:
            return [(share, self.call.rank) for share in self.shares]
        return [(self.share, rank) for rank in self.group]

    def _targets(
        self, kinds: tuple[_Kind, ...], *, all_heads: bool
    ) -> Iterator[tuple[str, Array, bool]]:
        """Yields the receiving tensors: name, size, and whether messages are added to them."""
        spec = self.call.spec
        if all_heads:
            for kind in kinds:
                heads = spec.nheads if kind.side == "q" else spec.nheads_kv
                rows = self.call.ranks.rows(kind.side)
                array = Array(spec.batch, rows, heads, kind.dim, kind.dtype)
                yield kind.full_name, array, kind.summed
            return
        for index, run in enumerate(self.share.runs):
            rows_of = core(self.call, run).ranks.rows
            for kind in kinds:
                rows = rows_of(kind.side)
                array = Array(spec.batch, rows, kind.num_heads(run), kind.dim, kind.dtype)
                yield _by_heads(kind.name, index), array, False

    def _copies(self, kinds: tuple[_Kind, ...], *, all_heads: bool) -> tuple[Copy, ...]:
        """Copies between the messages and the tensors before, or after, the exchange."""
        copies: list[Copy] = []
        entry = 0  # of the packets, in the order of `_packet`
        group = self.call.rank // self.degree
        for other, (share, _) in enumerate(self._parts(all_heads=all_heads)):
            for index, run in enumerate(share.runs):
                for kind in kinds:
                    if all_heads:
                        view = View(kind.full_name, None, kind.heads(run))
                        copies.append(Copy(entry, view, add=kind.summed))
                    else:
                        layout = self.call.layouts[0 if kind.side == "q" else 1]
                        placed = merge_groups(layout, self.degree)[1][group][other]
                        name = _by_heads(kind.name, index)
                        copies += [Copy(entry, View(name, there), here) for here, there in placed]
                    entry += 1
        return tuple(copies)


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
    return packet_of([(x.shape, x.dtype) for x in arrays])


# -- layouts


@lru_cache(maxsize=1024)
def merge_groups(layout: SequenceLayout, degree: int) -> tuple[SequenceLayout, MergedRows]:
    """The layout of groups of consecutive ranks that pool their rows in the order of positions.

        zigzag, 4 ranks, in pairs     rank 0: chunks 0 7, rank 1: 1 6   ->   0 1 6 7

    A single group of all ranks is in the order of positions whatever the stride: so the call's
    tiles, and its bits, are one process's.
    """
    whole = degree == layout.world_size
    parts, rows = [], []
    for start in range(0, layout.world_size, degree):
        pieces = [
            (segment, member, first)
            for member in range(degree)
            for first, segment in with_first_row(layout.segments(start + member))
        ]
        pieces.sort(key=lambda piece: piece[0].start)
        placed: list[list[tuple[slice, slice]]] = [[] for _ in range(degree)]
        at = 0
        for segment, member, first in pieces:
            there = slice(at, at + segment.length)
            if whole:
                stop = segment.start + (segment.length - 1) * segment.stride + 1
                there = slice(segment.start, stop, segment.stride)
            placed[member].append((slice(first, first + segment.length), there))
            at += segment.length
        parts.append([segment for segment, _, _ in pieces])
        rows.append(tuple(map(tuple, placed)))
    merged = (
        SequenceLayout.contiguous(layout.seqlen, 1)
        if whole
        else SequenceLayout.from_segments(parts)
    )
    return merged, tuple(rows)
