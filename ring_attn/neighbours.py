"""`halo`: a shard with the neighbouring rows before and after each of its runs.

For layers other than attention that look a few positions back or ahead: convolutions of hybrid
layers, predictions of several tokens across the edge of a shard.

    contiguous, 2 ranks, left=2, right=1        rank 0             rank 1
    positions                                   0 1 2 3            4 5 6 7
    halo                                        . . 0 1 2 3 4      2 3 4 5 6 7 .

A rank needs the rows that a window mask of `left` and `right` sees, so the rows travel as in an
exchange with this mask (`core.turns`): each once, straight from its owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import check
from ring_attn.call import Group
from ring_attn.core.layout import Segment, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.core.messages import Message, packet_of
from ring_attn.core.program import (
    Array,
    Assign,
    Buffer,
    Channel,
    Copy,
    Free,
    Hop,
    Join,
    New,
    Op,
    Pack,
    Post,
    Program,
    Unpack,
    View,
    Wait,
    copies_of_runs,
)
from ring_attn.core.ranks import OneRank, Turn
from ring_attn.core.spec import AttentionSpec, Scores, TransportOptions
from ring_attn.core.tiles import needed_runs
from ring_attn.core.values import as_int, check_dim, check_type
from ring_attn.machines.run import execute
from ring_attn.torch_private import group_by_name
from ring_attn.transport.base import Agreement
from ring_attn.transport.debug import check_agreement, debug_enabled, tell_refusal
from ring_attn.transport.p2p import open_p2p
from ring_attn.transport.ranks.group import refused

LANES: tuple[Channel, Channel] = ("shards", "outer")

# (layout, rows before, rows after, rank)
Place = tuple[SequenceLayout, int, int, int]


def halo(
    x: Tensor,
    layout: SequenceLayout,
    left: int,
    right: int = 0,
    *,
    group: Group = None,
    dim: int = 1,
) -> tuple[Tensor, ...]:
    """Each run of this rank's rows, with `left` rows before it and `right` rows after it.

    Every rank of the group must call it. Apply a layer that looks at positions
    `i - left .. i + right` to each of the results, without padding, to get the rank's shard:

        torch.cat([conv(run) for run in ring_attn.halo(x, layout, left=3)], dim=1)

    Args:
        x: this rank's shard, (batch, rows, ...) with the sequence in `dim`; any dtype.
        layout: how the sequence is split. A contiguous shard is one run; a zigzag shard is two
            runs, on the last rank one; in a striped layout every row is a run.
        left: number of rows before each run, at least 0.
        right: number of rows after each run, at least 0.
        group: as for `ring_attention`.
        dim: the sequence dim.

    Returns:
        For each run of consecutive positions, in the order of the shard, a tensor with the run and
        its neighbours: `left + length + right` rows in `dim`. Rows outside of the sequence are
        zeros. A rank without rows gets a run of length 0. Gradients travel back to the rows'
        owners, which add them up in an order that does not depend on timing; they can be
        differentiated again. All ranks must take part in a backward.

    Raises:
        ValueError: a wrong number of rows, a negative count, or a dim that x lacks.
        TypeError: a type that is not accepted, such as a layout given by name.
        RuntimeError: no process group, or as `ring_attention`.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> layout = ring_attn.SequenceLayout.contiguous(8, 2)
        >>> x = layout.shard(torch.arange(8.0)[None], rank)
        >>> ring_attn.halo(x, layout, left=2, right=1)[0].tolist()  # on rank 1
        [[2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0]]
    """
    process_group = check.check_group(group)
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    try:
        check_dim("x", x, dim)
        check.check_plain("x", x)
        check_type("layout", layout, SequenceLayout)
        left, right = as_int("left", left, least=0), as_int("right", right, least=0)
        check.check_group_device(process_group, x.device)
        check.check_layout("x", layout, x.size(dim), None, rank, world_size)
    except Exception as error:
        tell_refusal(error, process_group)
        raise
    rows = x.movedim(dim, 0)
    flat = rows.reshape(1, rows.size(0), 1, math.prod(rows.shape[1:]))
    numbers = list(layout.numbers)
    around: Tensor = _halo(flat, numbers, left, right, process_group.group_name, False)
    lengths = _lengths((layout, left, right, rank))
    shape = (sum(lengths), *rows.shape[1:])
    return around.view(shape).movedim(0, dim).split(lengths, dim)


# A custom operator, so that torch.compile keeps it whole in a graph.
@torch.library.custom_op("ring_attn::halo", mutates_args=())
def _halo(
    x: Tensor, layout: Sequence[int], left: int, right: int, group: str, back: bool
) -> Tensor:
    """(1, rows, 1, features) -> the runs with their neighbours; `back` maps gradients back."""
    check.check_capture("halo", x)
    process_group = group_by_name(group)
    rank = dist.get_rank(process_group)
    place: Place = SequenceLayout.from_numbers(layout), left, right, rank
    described = {
        "dtype": x.dtype, "features": x.size(-1), "layout": str(place[0]), "left": left,
        "right": right, "back": back,
    }  # fmt: skip
    if debug_enabled():
        check_agreement(described, process_group, TransportOptions())
    spec = AttentionSpec(x.device.type, x.dtype, 1, 1, 1, x.size(-1), x.size(-1))
    program = _program(place, x.size(-1), x.dtype, back=back)
    try:
        transport = open_p2p(process_group, TransportOptions())
        with transport.call("halo", Agreement(described), x.device):
            inputs = {"around" if back else "x": x}
            scores, kind = Scores(1.0, 0.0), f"halo {left} {right}"
            run = execute(program, spec, scores, "reference", inputs, transport, None, kind)
    except BaseException as error:
        refused(process_group, error)
        raise
    return run.tensors["x" if back else "around"]


@_halo.register_fake
def _(x: Tensor, layout: Sequence[int], left: int, right: int, group: str, back: bool) -> Tensor:
    whole, rank = SequenceLayout.from_numbers(layout), dist.get_rank(group_by_name(group))
    rows = whole.shard_len(rank) if back else sum(_lengths((whole, left, right, rank)))
    return x.new_empty(1, rows, 1, x.size(-1))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.place = inputs[1:5]
    ctx.back = inputs[5]


def _gradient(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    dx = _halo(dout.contiguous(), *ctx.place, not ctx.back)
    return (dx, None, None, None, None, None)


_halo.register_autograd(_gradient, setup_context=_setup)


# -- the program


@lru_cache(maxsize=256)
def _program(place: Place, features: int, dtype: torch.dtype, *, back: bool) -> Program:
    """The program that brings neighbouring rows or, if `back`, returns their gradients."""
    layout, left, right, rank = place
    window = Mask(layout.seqlen, layout.seqlen, window_size=(left, right))
    work = _Halo(place, window, features, dtype)
    ops = tuple(work.back() if back else work.there())
    source = "around" if back else "x"
    return Program(layout.world_size, rank, back, ops, {source: work.arrays[source]})


class _Halo:
    """Ops of one rank; `x` are its rows, `around` its runs with their neighbours."""

    def __init__(self, place: Place, window: Mask, features: int, dtype: torch.dtype) -> None:
        self._place, self._window = place, window
        layout, *_, rank = place
        self._rank, self._own = rank, slice(0, layout.shard_len(rank))
        rows = {"x": self._own.stop, "around": sum(_lengths(place))}
        self.arrays = {name: Array(1, n, 1, features, dtype) for name, n in rows.items()}
        self._turns = OneRank((layout, layout), window, rank).turns("kv")

    def there(self) -> Iterator[Op]:
        """Makes `around` from the rows of all ranks."""
        yield New("around", self.arrays["around"], zero=True)
        for target, source in self._places(self._rank, (self._own,)):
            yield Assign(View("around", target), View("x", source))

        def out(turn: Turn) -> tuple[Copy, ...]:
            return copies_of_runs(("x",), turn.runs)

        def into(turn: Turn) -> tuple[Copy, ...]:
            pairs = self._received(turn)
            return tuple(Copy(0, View("around", target), source) for target, source in pairs)

        yield from self._exchange([(t, t.hop, t.sent, t.received) for t in self._turns], out, into)

    def back(self) -> Iterator[Op]:
        """Adds up the gradients of `x`, turn by turn, from the gradients of `around`."""
        yield New("x", self.arrays["x"], zero=True)
        own, message = Buffer("own", self._message(self._own.stop).nbytes), self._own.stop
        places = list(self._places(self._rank, (self._own,)))
        yield Pack(own, self._message(message), _sums(places))
        yield Unpack(own, self._message(message), (Copy(0, View("x"), None, True),))

        def out(turn: Turn) -> tuple[Copy, ...]:
            return _sums(self._received(turn))

        def into(turn: Turn) -> tuple[Copy, ...]:
            return copies_of_runs(("x",), turn.runs, add=True)

        turns = [(t, Hop(t.hop.recv_from, t.hop.send_to), t.received, t.sent) for t in self._turns]
        yield from self._exchange(turns, out, into)

    def _exchange(
        self,
        turns: list[tuple[Turn, Hop, int, int]],
        out: Callable[[Turn], tuple[Copy, ...]],
        into: Callable[[Turn], tuple[Copy, ...]],
    ) -> Iterator[Op]:
        """Runs `turns` of (turn, hop, rows sent, rows received), two under way at a time."""
        sizes = [self._message(n).nbytes for *_, sent, received in turns for n in (sent, received)]
        room = max(sizes, default=0)
        sends, receives = ([Buffer(f"{x} {i}", room) for i in range(len(turns))] for x in "oi")

        def land(number: int) -> Iterator[Op]:
            turn, *_, received = turns[number]
            if number < 0 or turn.hop.send_to == self._rank:
                return
            yield Wait(LANES[number % 2])
            yield Free((sends[number],))
            yield Unpack(receives[number], self._message(received), into(turn))

        for number, (turn, hop, sent, received) in enumerate(turns):
            message = self._message(sent)
            if hop.send_to == self._rank:
                yield Join(LANES[number % 2])
            else:
                yield Pack(sends[number], message, out(turn))
                yield Post(
                    LANES[number % 2], number, hop, sends[number], receives[number],
                    self._message(received), message.nbytes,
                )  # fmt: skip
            yield from land(number - 1)
        if turns:
            yield from land(len(turns) - 1)

    def _message(self, rows: int) -> Message:
        array = self.arrays["x"]
        return packet_of([((1, rows, 1, array.dim or 0), array.dtype)])

    def _received(self, turn: Turn) -> list[tuple[slice, slice]]:
        """Pairs of slices for the rows received in a turn: in `around`, and in the message."""
        layout, source = self._place[0], turn.hop.recv_from
        if not turn.received:
            return []
        sent = needed_runs(layout, layout, self._window, (self._rank, source), "kv")
        return list(self._places(source, sent))

    def _places(self, source: int, sent: tuple[slice, ...]) -> Iterator[tuple[slice, slice]]:
        """Yields slices in `around`, and in a message that holds the runs `sent` of `source`."""
        layout, left, right, rank = self._place
        before = 0
        for run in _runs(layout, rank):
            first, stop = run.start - left, run.start + run.length + right
            for segment, at in _pieces(layout.segments(source), sent):
                begin, end = segment.rows_between(first, stop)
                for rows in _steps(begin, end, segment.stride):
                    target = before + segment.start + rows.start * segment.stride - first
                    n, row = rows.stop - rows.start, at + rows.start
                    yield slice(target, target + n), slice(row, row + n)
            before += stop - first


def _lengths(place: Place) -> list[int]:
    layout, left, right, rank = place
    return [run.length + left + right for run in _runs(layout, rank)]


def _runs(layout: SequenceLayout, rank: int) -> list[Segment]:
    """Runs of consecutive positions, in the order of the rank's rows; at least one, empty."""
    runs: list[Segment] = []
    for segment in layout.segments(rank):
        if segment.stride > 1 and segment.length > 1:
            runs += [Segment(position, 1) for position in segment.positions().tolist()]
        elif runs and runs[-1].start + runs[-1].length == segment.start:
            runs[-1] = Segment(runs[-1].start, runs[-1].length + segment.length)
        else:
            runs.append(Segment(segment.start, segment.length))
    return runs or [Segment(0, 0)]


def _pieces(
    segments: tuple[Segment, ...], sent: tuple[slice, ...]
) -> Iterator[tuple[Segment, int]]:
    """Yields the parts of segments that a message holds, and the row of each in the message."""
    row = at = 0
    for segment in segments:
        for rows in sent:
            a, b = max(rows.start - row, 0), min(rows.stop - row, segment.length)
            if a < b:
                yield Segment(segment.start + a * segment.stride, b - a, segment.stride), at
                at += b - a
        row += segment.length


def _sums(places: list[tuple[slice, slice]]) -> tuple[Copy, ...]:
    """Copies that add gradients in a message: a row may occur several times in `around`."""
    added = (Copy(0, View("around", target), row, True) for target, row in places)
    return (Copy(0, None), *added)


def _steps(begin: int, end: int, stride: int) -> Iterator[slice]:
    """Yields the rows `[begin, end)` at once if their positions are consecutive, else singly."""
    if begin < end and stride == 1:
        yield slice(begin, end)
    elif begin < end:
        yield from (slice(row, row + 1) for row in range(begin, end))
