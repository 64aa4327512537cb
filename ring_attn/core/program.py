"""Programs: what a rank does in one direction of a call, in order, as pure data.

A strategy is a function from a call to programs; machines run them on tensors, count their bytes
and memory, time them on a cluster, check them and draw them.

    ring, forward, 3 ranks          backward, KV travels, added up
    Start   state                   Delta, New dq dk dv
    Pack    shard 0                 Pack shard 0
    Post    shard 0 -> shard 1      Post shard 0 -> shard 1
    Attend  own KV                  Differentiate own KV
    Wait                            Wait
    Post    shard 1 -> shard 2      Post shard 1 -> shard 2
    Attend  shard 1                 Clear sums 1, Differentiate shard 1 into sums 1
    ...                             Post sums 1 -> ...
    Finish  out, lse                Round dv dk dq

Tensors have names, messages lie in buffers. Between a post and the wait for it nothing writes what
is sent and nothing touches what is received. A program is that of one rank, with numbers and tiles,
or of every rank at once, with tensors (world_size,) in their place (`core.ranks`); the ops and
their order are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ring_attn.core.messages import Message, Number
from ring_attn.core.spec import AttentionSpec

# Shards and gradients travel apart: a gradient is sent when its step is done, while the next shard
# is already on its way. So does what a double ring sends between nodes, round for round.
Channel = Literal["shards", "gradients", "outer", "outer_gradients"]
CHANNELS: tuple[Channel, ...] = ("shards", "gradients", "outer", "outer_gradients")

# The tiles of one rank, or a `work.StepWork` with the sizes of every rank's.
Tiles = Any


@dataclass(frozen=True, eq=False)
class Buffer:
    """Bytes that messages lie in; one buffer at a time has a name.

    Attributes:
        name: of the buffer.
        room: bytes of the longest message that any buffer of this kind holds: freed buffers are
            used again by buffers with the same room.
    """

    name: str
    room: int


@dataclass(frozen=True)
class Array:
    """Sizes of a tensor.

    Attributes:
        batch: entries of dim 0.
        rows: rows of one rank or of every rank.
        heads: number of heads.
        dim: of the last dimension; None is a statistic, (batch, heads, rows).
        dtype: of the elements.
    """

    batch: int
    rows: Number
    heads: int
    dim: int | None
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one rank's tensor."""
        if self.dim is None:
            return (self.batch, self.heads, self.rows)
        return (self.batch, self.rows, self.heads, self.dim)

    @property
    def nbytes(self) -> Number:
        """Bytes of one rank's tensor, or of every rank's."""
        return self.batch * self.rows * self.heads * (self.dim or 1) * self.dtype.itemsize


class View(NamedTuple):
    """Some rows and heads of a tensor; None is all."""

    name: str
    rows: slice | None = None
    heads: slice | None = None


class Entry(NamedTuple):
    """The tensor of that number in the message that a buffer holds."""

    buffer: Buffer
    number: int


Operand = View | Entry


class Copy(NamedTuple):
    """A tensor of a message, or rows of it, and its counterpart outside.

    Attributes:
        entry: number of the tensor in the message.
        tensor: the counterpart; None stands for zeros.
        rows: of the entry; None is all.
        add: what is unpacked is added to the counterpart, what is packed to the message.
    """

    entry: int
    tensor: View | None
    rows: slice | None = None
    add: bool = False


class Hop(NamedTuple):
    """One message to a rank and one from a rank: those of one rank, or (world_size,) of all."""

    send_to: Any
    recv_from: Any


class Collective(NamedTuple):
    """An exchange among all ranks of a group.

    Attributes:
        op: as the transport's method.
        dtype: of what is summed.
        send_counts: bytes for each rank of an all-to-all.
        recv_counts: bytes from each.
        groups: (groups, ranks) of all groups, in a program of every rank.
    """

    op: Literal["all_gather", "reduce_scatter", "all_to_all"]
    dtype: torch.dtype = torch.uint8
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    groups: Tensor | None = None


# -- ops


class Step(NamedTuple):
    """A new part of the program begins, with a name for pictures and a number for traces."""

    label: str
    number: int | None = None


class Pack(NamedTuple):
    """Takes a buffer and copies tensors into a message in it."""

    buffer: Buffer
    message: Message
    copies: tuple[Copy, ...] = ()


class Post(NamedTuple):
    """Takes a buffer and starts an exchange into it.

    Attributes:
        channel: at most one exchange is under way on it.
        step: for messages of errors.
        route: with whom.
        send: what is sent.
        recv: the buffer of what is received.
        message: what is received.
        nbytes: that leave the rank.
        ranks: of the group, in ascending order; None is all ranks of the program.
        active: (world_size,) bool: the ranks that take part, in a program of every rank.
    """

    channel: Channel
    step: int
    route: Hop | Collective
    send: Buffer
    recv: Buffer
    message: Message
    nbytes: Number
    ranks: tuple[int, ...] | None = None
    active: Tensor | None = None


class Wait(NamedTuple):
    """Until the exchange under way on the channel is complete."""

    channel: Channel
    ranks: tuple[int, ...] | None = None
    active: Tensor | None = None


class Join(NamedTuple):
    """Takes part in a call where other ranks exchange and this rank has nothing to exchange."""

    channel: Channel


class Free(NamedTuple):
    """Buffers and tensors are no longer used."""

    names: tuple[Buffer | str, ...]


class Clear(NamedTuple):
    """Takes a buffer for a message of zeros; memory is taken when something is added to it."""

    buffer: Buffer
    message: Message


class Add(NamedTuple):
    """Adds one buffer to another and frees it; cleared bytes are taken over from it."""

    into: Buffer
    buffer: Buffer
    message: Message


class Unpack(NamedTuple):
    """Copies a message into tensors, or adds it to them, and frees its buffer."""

    buffer: Buffer
    message: Message
    copies: tuple[Copy, ...] = ()


class New(NamedTuple):
    """A tensor, of zeros or not yet written."""

    name: str
    array: Array
    zero: bool = False


class Assign(NamedTuple):
    """Copies a tensor into another, or into a part of it."""

    into: View
    source: View


class Start(NamedTuple):
    """The empty state of the queries, with the sinks of some heads; None is without sinks."""

    q: View
    headdim_v: int
    array: Array
    sinks: slice | None = None


class Attend(NamedTuple):
    """Folds tiles into the state; `last` says that no more follow."""

    tiles: Tiles
    q: View
    k: Operand
    v: Operand
    last: bool = False


class Decode(NamedTuple):
    """Partial out and lse of a few queries against many keys, in the type of the state."""

    tiles: Tiles
    q: View
    k: View
    v: View


class Finish(NamedTuple):
    """Makes out and lse from the state, which is used up."""

    out: str
    lse: str
    out_array: Array
    lse_array: Array


class Delta(NamedTuple):
    """Makes delta = rowsum(dout * out), lse as the backend reads it, and the gradient of sinks."""

    array: Array


class Differentiate(NamedTuple):
    """Adds the gradients of tiles.

    Attributes:
        part: all gradients, or only those of q, or only those of k and v.
        tiles: tiles of the step.
        q_side: q, dout, lse, delta.
        kv: k, v.
        dq: what dq is added to.
        dkv: what dk and dv are added to.
        out: the forward's, where the rows of q are at home.
    """

    part: Literal["all", "q", "kv"]
    tiles: Tiles
    q_side: tuple[Operand, ...]
    kv: tuple[Operand, Operand]
    dq: Operand | None = None
    dkv: tuple[Operand, Operand] | None = None
    out: View | None = None


class Round(NamedTuple):
    """Scales a gradient where `scaled` says so, and rounds it once; the gradient is used up."""

    into: View
    gradient: Operand
    array: Array
    scaled: bool


class Inner(NamedTuple):
    """Runs the program of another call among some of the ranks.

    Attributes:
        program: with its own names for tensors.
        spec: sizes and types of that call.
        ranks: in ascending order.
        inputs: names within and names of this program, whose tensors are handed over.
        results: names within and names here.
        sinks: heads whose sinks it takes.
        members: (n,) ranks within a group that run it, in a program of every rank.
        degree: ranks of a group, in a program of every rank.
    """

    program: Program
    spec: AttentionSpec
    ranks: tuple[int, ...] | None
    inputs: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]
    sinks: slice | None = None
    members: Tensor | None = None
    degree: int = 1


class Merge(NamedTuple):
    """Merges the partial results of all ranks in a tree, the sinks at its root."""

    buffer: Buffer
    message: Message
    out: str
    lse: str


Op = (
    Step | Pack | Post | Wait | Join | Free | Clear | Add | Unpack | New | Assign | Start | Attend
    | Decode | Finish | Delta | Differentiate | Round | Inner | Merge
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Program:
    """The ops of one rank, or of every rank.

    Attributes:
        world_size: ranks of the call.
        rank: whose program; None is every rank's.
        backward: which direction.
        ops: in order.
        arrays: sizes of the tensors that it is given, by name.
        saved: names of the tensors that a backward needs, of a forward.
    """

    world_size: int
    rank: int | None
    backward: bool
    ops: tuple[Op, ...]
    arrays: dict[str, Array]
    saved: tuple[str, ...] = ()

    @cached_property
    def last_takes(self) -> dict[int, int]:
        """Number of the last op that takes a buffer with so much room, by room.

        Buffers that are freed before are kept for it.
        """
        found: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            if isinstance(op, Pack | Clear):
                found[op.buffer.room] = index
            elif isinstance(op, Differentiate):
                # Zeros take their memory here.
                some = [x for x in (op.dq, *(op.dkv or ())) if isinstance(x, Entry)]
                found |= {entry.buffer.room: index for entry in some}
            elif isinstance(op, Post):
                found[op.send.room] = found[op.recv.room] = index
        return found

    @cached_property
    def recycled(self) -> frozenset[int]:
        """Sizes of which a buffer is taken after one has been freed."""
        freed: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            names = op.names if isinstance(op, Free) else ()
            some = [name for name in names if isinstance(name, Buffer)]
            if isinstance(op, Add | Unpack | Merge):
                some.append(op.buffer)
            for buffer in some:
                freed.setdefault(buffer.room, index)
        return frozenset(
            room for room, last in self.last_takes.items() if freed.get(room, last) < last
        )

    def keeps(self, buffer: Buffer, index: int, *, pooled: bool) -> bool:
        """Whether a buffer that is freed at an op is used again.

        Args:
            buffer: that is freed.
            index: number of the op.
            pooled: buffers stay for the next call, where their size is one of which several calls
                in a row take the same ones.
        """
        if pooled and buffer.room in self.recycled:
            return True
        return self.last_takes.get(buffer.room, -1) > index

    def posts(self) -> Iterator[Post]:
        """Its exchanges in order; those of inner programs with their own ranks."""
        for op in self.ops:
            if isinstance(op, Post):
                yield op
            elif isinstance(op, Inner):
                yield from op.program.posts()


def copies_of_runs(
    names: Sequence[str], runs: Sequence[slice], *, add: bool = False
) -> tuple[Copy, ...]:
    """Runs of tensors' rows, which a message holds one after another."""
    copies, at = [], 0
    for run in runs:
        rows = slice(at, at + run.stop - run.start)
        copies += [Copy(i, View(name, run), rows, add) for i, name in enumerate(names)]
        at = rows.stop
    return tuple(copies)


def part_of_heads(op: Attend | Differentiate, spec: AttentionSpec) -> AttentionSpec:
    """Sizes of the heads that an op computes: all, or those of its views."""
    q, k = (op.q, op.k) if isinstance(op, Attend) else (op.q_side[0], op.kv[0])
    group = spec.nheads // spec.nheads_kv
    if isinstance(q, View) and q.heads is not None:
        heads = q.heads.stop - q.heads.start
    elif isinstance(k, View) and k.heads is not None:
        heads = (k.heads.stop - k.heads.start) * group
    else:
        return spec
    return replace(spec, nheads=heads, nheads_kv=heads // group)
