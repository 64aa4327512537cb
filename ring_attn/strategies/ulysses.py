"""Ulysses: heads for rows. Ranks of a group exchange their rows of all heads for all rows of some.

    4 ranks with the rows a, b, c, d of 4 heads; afterwards each has all rows of a head

    rank 0    a0 a1 a2 a3                               a0 | a1 | a2 | a3
    rank 1    b0 b1 b2 b3        q, k, v   --->         b0 | b1 | b2 | b3
    rank 2    c0 c1 c2 c3        out, lse  <---         c0 | c1 | c2 | c3
    rank 3    d0 d1 d2 d3                               d0 | d1 | d2 | d3
                                              rank       0    1    2    3

In a hybrid the ranks form groups of U consecutive ones. After the exchange a rank has the rows of
its group, in the order of their positions: the shard of one rank in a layout of P/U ranks. Over
that layout the core, a ring or a gathering, runs among the ranks with the same heads.

    P = 4, U = 2          exchange within          core among
                          0 1 | 2 3                0 2 (first half of the heads) | 1 3 (second)

Backward: dout goes the way of q, and dq, dk, dv come back the way of out. They come back rounded;
but where a kv head was sent to several ranks, dk and dv come back as they were accumulated, are
added up at home in the order of the ranks, and are rounded then. Which heads go where is in
`core.heads`. (DeepSpeed-Ulysses, Jacobs et al., arXiv 2309.14509; hybrid: USP, Fang and Zhao,
arXiv 2405.07719.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Literal

import torch
from torch import Tensor

from ring_attn.core.heads import HeadRun, HeadShare, is_replicated, share_heads
from ring_attn.core.layout import MergedRows, SequenceLayout
from ring_attn.core.order import why_not_by_heads
from ring_attn.core.spec import ALIGNMENT, AttentionSpec, Packet
from ring_attn.strategies.base import Call, Forward, Gradients
from ring_attn.strategies.observed import observed
from ring_attn.transport.base import Channel, Transport

Layouts = tuple[SequenceLayout, SequenceLayout]
MakeCore = Callable[[AttentionSpec, Layouts, int], Call]


@dataclass(frozen=True)
class UlyssesCall:
    """One call as plain data, the same on every rank but for `rank` and `cores`.

    Attributes:
        spec: sizes and types of the whole call.
        layouts: of the queries and of the keys, over all ranks.
        rank: of this process.
        degree: ranks of a group; consecutive ones.
        cores: the calls between the groups, one for each run of this rank's heads.
        softmax_scale: factor of the scores.
        backend: name of the backend.
        same_bits: the bits are those of every other world size.
    """

    spec: AttentionSpec
    layouts: Layouts
    rank: int
    degree: int
    cores: tuple[Call, ...]
    softmax_scale: float
    backend: str
    same_bits: bool

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks that exchange heads for rows with this one, itself included."""
        first = self.rank - self.member
        return tuple(range(first, first + self.degree))

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks with this one's heads, one of each group: those of the core."""
        return tuple(range(self.member, self.layouts[0].world_size, self.degree))

    @property
    def member(self) -> int:
        """This rank's number in its group."""
        return self.rank % self.degree

    @property
    def shares(self) -> tuple[HeadShare, ...]:
        """The heads of each member of a group."""
        return share_heads(self.spec.nheads, self.spec.nheads_kv, self.degree)

    @property
    def share(self) -> HeadShare:
        """This rank's heads."""
        return self.shares[self.member]

    @property
    def is_replicated(self) -> bool:
        """Whether some kv head is sent to several ranks."""
        return is_replicated(self.shares, self.spec.nheads_kv)

    @observed("forward")
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, transport: Transport, sinks: Tensor | None
    ) -> Forward:
        """Heads for rows, the cores, rows for heads; saves what the cores save."""
        there, back = _exchanges(self, backward=False)
        inputs = there.run([q, k, v], transport, "shards", 0, q.device)
        results: list[Tensor] = []
        saved: list[Tensor] = []
        for core, run in zip(self.cores, self.share.runs, strict=True):
            mine, inputs = inputs[:3], inputs[3:]
            out, lse, kept = core.forward(
                mine[0], mine[1], mine[2], transport.sub(self.peers), _of(run, sinks)
            )
            results += [out, lse]
            saved += kept
        out, lse = back.run(results, transport, "shards", 1, q.device)
        return Forward(out, lse, tuple(saved))

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
        """dout to the heads, the cores, and the gradients back to the rows."""
        there, back = _exchanges(self, backward=True, rounded=rounded)
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        douts = there.run([dout], transport, "shards", 2, dout.device)
        results: list[Tensor] = []
        for index, (core, run) in enumerate(zip(self.cores, self.share.runs, strict=True)):
            kept = len(saved) // len(self.cores)
            grads = core.backward(
                saved[index * kept : (index + 1) * kept],
                douts.pop(0),
                transport.sub(self.peers),
                _of(run, sinks),
                rounded=rounded and not self.is_replicated,
            )
            if dsinks is not None and grads.dsinks is not None:
                dsinks[run.q] = grads.dsinks
            results += [x.to(kind.dtype) for x, kind in zip(grads[:3], back.kinds, strict=True)]
            del grads
        home = back.run(results, transport, "gradients", 3, dout.device)
        dtype = self.spec.dtype if rounded else self.spec.accum_dtype
        dv, dk, dq = (home.pop().to(dtype) for _ in range(3))
        return Gradients(dq, dk, dv, dsinks)


def make_call(
    spec: AttentionSpec,
    layouts: Layouts,
    rank: int,
    degree: int,
    make_core: MakeCore,
    *,
    same_bits: bool | None = None,
) -> UlyssesCall:
    """The call with its heads shared and its cores made.

    Args:
        spec: sizes and types of the whole call.
        layouts: of the queries and of the keys.
        rank: of this process.
        degree: ranks of a group; as many as there are ranks is pure Ulysses.
        make_core: from spec, layouts and rank, the call between the groups.
        same_bits: as `make_core` was told: True is refused where heads are in the way.

    Raises:
        ValueError: a degree that does not divide the ranks, or heads that do not fit each other.
        NotImplementedError: `same_bits` is asked for and a kv head is on several ranks; and what
            `make_core` raises.

    Example:
        >>> from functools import partial
        >>> from ring_attn.core.mask import Mask
        >>> from ring_attn.strategies import ring
        >>> layout = SequenceLayout.zigzag(seqlen=80, world_size=4)
        >>> spec = AttentionSpec("cpu", torch.float32, 1, 8, 2, 64, 64)
        >>> def make_ring(spec, layouts, rank):
        ...     return ring.make_call(spec, layouts, Mask(80, 80, causal=True), rank)
        >>> call = make_call(spec, (layout, layout), rank=3, degree=2, make_core=make_ring)
        >>> call.group, call.peers, [(run.q, run.kv) for run in call.share.runs]
        ((2, 3), (1, 3), [(slice(4, 8, None), slice(1, 2, None))])
        >>> call.cores[0].layouts[0].position_ids(call.rank // call.degree).tolist()[:3]
        [20, 21, 22]
    """
    world_size = layouts[0].world_size
    if degree < 1 or world_size % degree:
        raise ValueError(
            f"ulysses_degree must divide the world size, got {degree} and {world_size}"
        )
    shares = share_heads(spec.nheads, spec.nheads_kv, degree)
    reason = why_not_by_heads((spec.nheads, spec.nheads_kv), degree)
    if same_bits and reason is not None:
        raise NotImplementedError(f"same_bits=True cannot be had here: {reason}")
    merged: Layouts = (merge_groups(layouts[0], degree)[0], merge_groups(layouts[1], degree)[0])

    def core_spec(run: HeadRun) -> AttentionSpec:
        return replace(spec, nheads=run.num, nheads_kv=run.num_kv)

    # Those of all members, so that what one refuses all do, and each says the same of the call.
    runs = (run for share in shares for run in share.runs)
    cores = {
        one: make_core(one, merged, rank // degree) for one in dict.fromkeys(map(core_spec, runs))
    }
    first = next(iter(cores.values()))
    return UlyssesCall(
        spec,
        layouts,
        rank,
        degree,
        tuple(cores[core_spec(run)] for run in shares[rank % degree].runs),
        first.softmax_scale,
        first.backend,
        reason is None and all(core.same_bits for core in cores.values()),
    )


def bytes_sent(call: UlyssesCall, of_core: Callable[..., int], *, backward: bool) -> int:
    """Bytes that the call's rank sends in one direction, to its group and in its cores.

    Args:
        call: the rank's.
        of_core: the bytes of a core, as `of_core(core, backward=backward)`.
        backward: the direction.
    """
    exchanged = sum(exchange.bytes_sent for exchange in _exchanges(call, backward=backward))
    return exchanged + sum(of_core(core, backward=backward) for core in call.cores)


def num_messages(call: UlyssesCall, of_core: Callable[..., int], *, backward: bool) -> int:
    """Exchanges of the call's rank in one direction, two with its group; as `bytes_sent`."""
    exchanges = 2 if call.degree > 1 else 0
    return exchanges + sum(of_core(core, backward=backward) for core in call.cores)


def predicted_peak_bytes(call: UlyssesCall, of_core: Callable[..., int], *, backward: bool) -> int:
    """Most bytes that a call holds at a time beyond its inputs, on its rank.

        forward     q, k, v: sent + received, received + in order
                    q, k, v in order + what a core takes
                    q, k, v, out, lse of the heads + out, lse: sent + received, received + at home
        backward    q, k, v, out, lse of the heads, out, lse at home
                    + dout: sent + received, received + in order
                    + dout in order + what a core takes
                    + gradients: of the heads + sent, sent + received, received + at home

    Nothing in it grows with the whole length while the rows of a rank stay.

    Args:
        call: its cores have to save what they are given, out and lse, as a ring does.
        of_core: most bytes of a core beyond its inputs, as `of_core(core, backward=backward)`.
        backward: of forward and backward, else of the forward alone.
    """
    there, back = _exchanges(call, backward=False)
    results = _bytes_of_runs(back.source, len(call.cores))
    most = there.peak()
    held = there.target.nbytes
    for core, nbytes in zip(call.cores, results, strict=True):
        most = max(most, held + of_core(core, backward=False))
        held += nbytes
    most = max(most, held + back.peak())
    if not backward:
        return most
    held += back.target.nbytes
    there, back = _exchanges(call, backward=True)
    most = max(most, held + there.peak())
    douts, grads = there.target.nbytes, 0
    runs = zip(
        call.cores,
        results,
        _bytes_of_runs(there.target, len(call.cores)),
        _bytes_of_runs(back.source, len(call.cores)),
        strict=True,
    )
    for core, result, dout, grad in runs:
        # A core counts its own out and lse, which are held already.
        most = max(most, held + douts + grads + of_core(core, backward=True) - result)
        douts, grads = douts - dout, grads + grad
    return max(most, held + back.peak(frees_source=True))


# -- messages


@dataclass(frozen=True)
class _Kind:
    """One of the tensors that are exchanged together.

    Attributes:
        side: whose rows and heads.
        dim: of the last dimension; None is a statistic, (batch, heads, rows).
        dtype: on the way.
        summed: the same head may come from several ranks, to be added up.
    """

    side: Literal["q", "kv"]
    dim: int | None
    dtype: torch.dtype
    summed: bool = False

    def shape(self, batch: int, rows: int, heads: int) -> tuple[int, ...]:
        """Of a tensor of this kind."""
        return (batch, heads, rows) if self.dim is None else (batch, rows, heads, self.dim)

    def heads(self, run: HeadRun) -> slice:
        """The run's heads of this side."""
        return run.q if self.side == "q" else run.kv

    def layout(self, layouts: Layouts) -> SequenceLayout:
        """The layout of this side."""
        return layouts[0 if self.side == "q" else 1]


class _Side:
    """One end of an exchange: its tensors, and its messages, one for each member of the group."""

    def __init__(self, call: UlyssesCall, kinds: tuple[_Kind, ...]) -> None:
        self.call, self.kinds = call, kinds

    @cached_property
    def packets(self) -> list[Packet]:
        """What is exchanged with each member."""
        raise NotImplementedError

    @cached_property
    def shapes(self) -> list[tuple[_Kind, tuple[int, ...]]]:
        """Of the tensors."""
        raise NotImplementedError

    def parts(
        self, member: int, views: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> Iterator[tuple[_Kind, Tensor, Tensor]]:
        """Parts of a member's message, each with the part of a tensor that it belongs to."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(prod(shape) * kind.dtype.itemsize for kind, shape in self.shapes)

    @property
    def message_bytes(self) -> int:
        """Of all messages, this rank's to itself included."""
        return sum(packet.nbytes for packet in self.packets)

    def new_tensors(self, device: torch.device) -> list[Tensor]:
        """To be written to; those that are added to are zero."""
        return [
            (torch.zeros if kind.summed else torch.empty)(shape, dtype=kind.dtype, device=device)
            for kind, shape in self.shapes
        ]

    def split(self, buffer: Tensor) -> Iterator[tuple[int, Packet, Tensor]]:
        """Member, packet and buffer of each message of a buffer with all of them."""
        packets = self.packets
        parts = buffer.split([packet.nbytes for packet in packets])
        yield from zip(range(len(packets)), packets, parts, strict=True)


class _AtHome(_Side):
    """This rank's rows of all heads: a tensor for each kind."""

    @cached_property
    def packets(self) -> list[Packet]:
        """Of this rank's rows, each member's heads."""
        return [_packet(self.call, self.kinds, s, self.call.rank) for s in self.call.shares]

    @cached_property
    def shapes(self) -> list[tuple[_Kind, tuple[int, ...]]]:
        """(batch, rows, nheads, dim) in turn."""
        call = self.call
        heads = {"q": call.spec.nheads, "kv": call.spec.nheads_kv}
        return [
            (kind, kind.shape(call.spec.batch, _rows_of(call, kind, call.rank), heads[kind.side]))
            for kind in self.kinds
        ]

    def parts(
        self, member: int, views: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> Iterator[tuple[_Kind, Tensor, Tensor]]:
        """The member's heads of each tensor."""
        where = (
            (kind, x, kind.heads(run))
            for run in self.call.shares[member].runs
            for kind, x in zip(self.kinds, tensors, strict=True)
        )
        for view, (kind, x, heads) in zip(views, where, strict=True):
            yield kind, view, x[:, heads] if kind.dim is None else x[:, :, heads]


class _AtHeads(_Side):
    """The group's rows of this rank's heads: for each run of heads a tensor for each kind."""

    @cached_property
    def packets(self) -> list[Packet]:
        """Of this rank's heads, each member's rows."""
        return [_packet(self.call, self.kinds, self.call.share, r) for r in self.call.group]

    @cached_property
    def shapes(self) -> list[tuple[_Kind, tuple[int, ...]]]:
        """(batch, rows of the group, heads of a run, dim) in turn."""
        call = self.call
        return [
            (kind, _shape(call, kind, run, sum(_rows_of(call, kind, r) for r in call.group)))
            for run in call.share.runs
            for kind in self.kinds
        ]

    def parts(
        self, member: int, views: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> Iterator[tuple[_Kind, Tensor, Tensor]]:
        """The member's rows of each tensor, segment by segment."""
        call = self.call
        for view, x, (kind, _) in zip(views, tensors, self.shapes, strict=True):
            placed = merge_groups(kind.layout(call.layouts), call.degree)[1]
            for rows, group_rows in placed[call.rank // call.degree][member]:
                if kind.dim is None:
                    yield kind, view[:, :, rows], x[:, :, group_rows]
                else:
                    yield kind, view[:, rows], x[:, group_rows]


@dataclass(frozen=True)
class _Exchange:
    """Tensors of one side become those of the other, by one all-to-all."""

    source: _Side
    target: _Side

    @property
    def kinds(self) -> tuple[_Kind, ...]:
        """What is exchanged together."""
        return self.source.kinds

    @property
    def bytes_sent(self) -> int:
        """To the other members."""
        return self.source.message_bytes - self.source.packets[self.source.call.member].nbytes

    def peak(self, *, frees_source: bool = False) -> int:
        """Most bytes that it takes at a time; of the source's tensors only if it frees them."""
        sent, received = self.source.message_bytes, self.target.message_bytes
        packed = sent + self.source.nbytes if frees_source else 0
        exchanged = sent + received if self.source.call.degree > 1 else sent
        return max(packed, exchanged, received + self.target.nbytes)

    def run(
        self,
        tensors: list[Tensor],
        transport: Transport,
        channel: Channel,
        step: int,
        device: torch.device,
    ) -> list[Tensor]:
        """The target's tensors; the list is emptied, so that what is in it can be freed."""
        received = self._received(tensors, transport, channel, step, device)
        results = self.target.new_tensors(device)
        for member, packet, buffer in self.target.split(received):
            for kind, part, x in self.target.parts(member, packet.views(buffer), results):
                if kind.summed:
                    x.add_(part)
                else:
                    x.copy_(part)
        return results

    def _received(
        self,
        tensors: list[Tensor],
        transport: Transport,
        channel: Channel,
        step: int,
        device: torch.device,
    ) -> Tensor:
        """The messages of all members, in their order; what was sent is freed on return."""
        send = torch.empty(self.source.message_bytes, dtype=torch.uint8, device=device)
        for member, packet, buffer in self.source.split(send):
            # Padding is sent too; it must not hold what the transport marks buffers with.
            buffer[-ALIGNMENT:].zero_()
            for _, part, x in self.source.parts(member, packet.views(buffer), tensors):
                part.copy_(x)
        tensors.clear()
        group = transport.sub(self.source.call.group)
        if group.world_size == 1:
            return send
        recv = torch.empty(self.target.message_bytes, dtype=torch.uint8, device=device)
        send_counts, recv_counts = (
            [packet.nbytes for packet in side.packets] for side in (self.source, self.target)
        )
        group.all_to_all(channel, step, send, send_counts, recv, recv_counts)
        group.wait(channel)
        return recv


@lru_cache(maxsize=256)
def _exchanges(
    call: UlyssesCall, *, backward: bool, rounded: bool = True
) -> tuple[_Exchange, _Exchange]:
    """To the heads and back to the rows, in one direction."""
    spec = call.spec
    dtype, wide, dim, dim_v = spec.dtype, spec.accum_dtype, spec.headdim, spec.headdim_v
    if backward:
        summed = call.is_replicated
        home = dtype if rounded else wide
        home_kv = wide if summed else home
        there: tuple[_Kind, ...] = (_Kind("q", dim_v, dtype),)
        back: tuple[_Kind, ...] = (
            _Kind("q", dim, home),
            _Kind("kv", dim, home_kv, summed),
            _Kind("kv", dim_v, home_kv, summed),
        )
    else:
        there = (_Kind("q", dim, dtype), _Kind("kv", dim, dtype), _Kind("kv", dim_v, dtype))
        back = (_Kind("q", dim_v, dtype), _Kind("q", None, wide))
    return (
        _Exchange(_AtHome(call, there), _AtHeads(call, there)),
        _Exchange(_AtHeads(call, back), _AtHome(call, back)),
    )


def _packet(call: UlyssesCall, kinds: Sequence[_Kind], share: HeadShare, rank: int) -> Packet:
    """Some heads of a rank's rows: run by run, kind by kind."""
    parts = [(kind, run) for run in share.runs for kind in kinds]
    return Packet(
        tuple(_shape(call, kind, run, _rows_of(call, kind, rank)) for kind, run in parts),
        tuple(kind.dtype for kind, _ in parts),
    )


def _shape(call: UlyssesCall, kind: _Kind, run: HeadRun, rows: int) -> tuple[int, ...]:
    heads = run.num if kind.side == "q" else run.num_kv
    return kind.shape(call.spec.batch, rows, heads)


def _rows_of(call: UlyssesCall, kind: _Kind, rank: int) -> int:
    return kind.layout(call.layouts).shard_len(rank)


def _bytes_of_runs(side: _Side, num_runs: int) -> list[int]:
    """Bytes of each run's tensors."""
    nbytes = [prod(shape) * kind.dtype.itemsize for kind, shape in side.shapes]
    each = len(side.kinds)
    return [sum(nbytes[each * run : each * (run + 1)]) for run in range(num_runs)]


def _of(run: HeadRun, sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks[run.q]


# -- layouts


@lru_cache(maxsize=1024)
def merge_groups(layout: SequenceLayout, degree: int) -> tuple[SequenceLayout, MergedRows]:
    """The layout of groups of consecutive ranks, and where the rows of a rank are in its group.

    As `SequenceLayout.merged`, but that a group of all ranks has its rows in the order of their
    positions for any stride: then a call's tiles, and so its bits, are those of one process.
    """
    world_size = layout.world_size
    if degree < world_size:
        starts = range(0, world_size, degree)
        return layout.merged([range(start, start + degree) for start in starts])
    rows = []
    for rank in range(world_size):
        segments = layout.segments(rank)
        firsts = accumulate((s.length for s in segments), initial=0)
        rows.append(
            tuple(
                (
                    slice(first, first + s.length),
                    slice(s.start, s.start + (s.length - 1) * s.stride + 1, s.stride),
                )
                for first, s in zip(firsts, segments, strict=False)
            )
        )
    return SequenceLayout.contiguous(layout.seqlen, 1), (tuple(rows),)
