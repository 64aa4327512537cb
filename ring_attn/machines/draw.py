"""Draw a program of one rank as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from ring_attn.core import program as ops
from ring_attn.core.program import Op, Program

_WIDTH = 34


def draw(program: Program) -> str:
    """Return the ops of one rank, one op a line, with what they send, copy or compute.

    Example:
        >>> import torch
        >>> from ring_attn.core.layout import SequenceLayout
        >>> from ring_attn.core.mask import Mask
        >>> from ring_attn.core.spec import AttentionSpec
        >>> from ring_attn.core.strategy import Strategy
        >>> from ring_attn.strategies.registry import make_call, program_of
        >>> layout = SequenceLayout.contiguous(8, 2)
        >>> spec = AttentionSpec("cpu", torch.float32, 1, 1, 1, 8, 8)
        >>> call = make_call(Strategy(), spec, (layout, layout), Mask(8, 8), 0, backend="aten")
        >>> print(draw(program_of(call, backward=False)))
        rank 0 of 2, forward
        start
        step 0
        pack shard 0                       256 B
        post shard 0 -> 1 on shards        256 B
        attend 1 tile                      16 pairs
        wait shards
        step 1
        attend 1 tile                      16 pairs
        end
        finish
    """
    direction = "backward" if program.backward else "forward"
    title = f"rank {program.rank} of {program.world_size}, {direction}"
    return "\n".join([title, *_lines(program, 0)])


def _lines(program: Program, depth: int) -> Iterator[str]:
    for op in program.ops:
        text, size = op.label if isinstance(op, ops.Step) else _text(op), _size(op)
        if text:
            yield f"{'  ' * depth + text:<{_WIDTH}} {size}".rstrip()
        if isinstance(op, ops.Inner):
            yield from _lines(op.program, depth + 1)


def _text(op: Op) -> str:
    """Describe the op in a few words; empty if it costs nothing."""
    match op:
        case ops.Pack() | ops.Clear() | ops.Unpack():
            return f"{_name(op)} {op.buffer.name}"
        case ops.Post():
            return f"post {_way(op)} on {op.channel}"
        case ops.PostTogether():
            return f"post {' and '.join(map(_way, op.posts))} on {op.channel}"
        case ops.Wait() | ops.Join():
            return f"{_name(op)} {op.channel}"
        case ops.Add():
            return f"add {op.buffer.name} to {op.into.name}"
        case ops.Attend() | ops.Decode() | ops.Differentiate():
            count = f"{len(op.tiles)} tile{'' if len(op.tiles) == 1 else 's'}"
            part = op.part if isinstance(op, ops.Differentiate) and op.part != "all" else ""
            return " ".join(word for word in (_name(op), part, count) if word)
        case ops.New():
            return f"zeros {op.name}" if op.zero else ""
        case ops.Round():
            return f"round {op.into.name}"
        case ops.Inner():
            return "inner program" + ("" if op.ranks is None else f" among ranks {op.ranks}")
        case ops.Free():
            return ""
        case ops.Step() | ops.Assign() | ops.Start() | ops.Finish() | ops.Delta() | ops.Merge():
            return _name(op)
        case _:
            assert_never(op)


def _way(post: ops.Post) -> str:
    """Describe what is sent to which rank, or by which collective."""
    route = post.route
    to = route.op if isinstance(route, ops.Collective) else f"-> {route.send_to}"
    return f"{post.send.name} {to}"


def _name(op: Op) -> str:
    return type(op).__name__.lower()


def _size(op: Op) -> str:
    """Return the bytes that an op sends or copies, or the pairs that it computes."""
    match op:
        case ops.Attend() | ops.Decode() | ops.Differentiate():
            return f"{sum(tile.area for tile in op.tiles)} pairs"
        case ops.Pack() | ops.Add() | ops.Unpack():
            return f"{op.message.nbytes} B"
        case ops.Post() | ops.PostTogether():
            return f"{sum(post.nbytes for post in ops.posts_of(op))} B"
        case ops.Step() | ops.Wait() | ops.Join() | ops.Free() | ops.Clear() | ops.New():
            return ""
        case ops.Assign() | ops.Start() | ops.Finish() | ops.Delta() | ops.Round():
            return ""
        case ops.Inner() | ops.Merge():
            return ""
        case _:
            assert_never(op)
