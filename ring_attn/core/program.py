"""Programs, the operations of a rank in one direction of a call: pure data.

A strategy is a function from a call to programs. Machines run programs on tensors, count their
bytes and memory, time them on a cluster, check them and draw them.

    ring, forward, 3 ranks          backward, shards of KV and their gradients are sent
    Start   state                   Delta, New dq dk dv
    Pack    shard 0                 Pack shard 0
    Post    shard 0 -> shard 1      Post shard 0 -> shard 1
    Attend  own KV                  Differentiate own KV
    Wait                            Wait
    Post    shard 1 -> shard 2      Post shard 1 -> shard 2
    Attend  shard 1                 Clear sums 1, Differentiate shard 1 into sums 1
    ...                             Post sums 1 -> ...
    Finish  out, lse                Round dv dk dq

Tensors have names, messages lie in buffers. Between a post and its wait no op writes the sent
buffer and no op touches the received one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, assert_never

import torch

from ring_attn.core.cache import Sequences
from ring_attn.core.messages import Message
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.tiles import StepTiles, Tile

# Shards and gradients have separate channels, because the next shard is already in flight when the
# gradients of a step are sent; or both start together, on the channel of shards (`PostTogether`).
# The messages that a double ring sends between nodes once a round also have channels of their own.
Channel = Literal["shards", "gradients", "outer", "outer_gradients"]
CHANNELS: tuple[Channel, ...] = ("shards", "gradients", "outer", "outer_gradients")


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory for a message. No two live buffers have the same name.

    `nbytes` is the size of the longest message of any buffer of this kind. A freed buffer is reused
    by buffers of the same size.
    """

    name: str
    nbytes: int


@dataclass(frozen=True)
class Array:
    """Sizes of a tensor. A dim of None is a statistic, one number for each row and head."""

    batch: int
    rows: int
    heads: int
    dim: int | None
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, rows, heads, dim), or (batch, heads, rows) of a statistic."""
        if self.dim is None:
            return (self.batch, self.heads, self.rows)
        return (self.batch, self.rows, self.heads, self.dim)

    @property
    def nbytes(self) -> int:
        return self.batch * self.rows * self.heads * (self.dim or 1) * self.dtype.itemsize


class View(NamedTuple):
    """Some rows and heads of a tensor; None means all."""

    name: str
    rows: slice | None = None
    heads: slice | None = None


class Entry(NamedTuple):
    """Tensor `number` of the message that a buffer holds."""

    buffer: Buffer
    number: int


Operand = View | Entry


def entries(buffer: Buffer, count: int) -> tuple[Operand, ...]:
    """Return the `count` tensors of the message that a buffer holds."""
    return tuple(Entry(buffer, number) for number in range(count))


class Copy(NamedTuple):
    """A copy between tensor `entry` of a message and a tensor outside.

    Attributes:
        tensor: the tensor outside; None means zeros.
        rows: rows of the tensor of the message; None means all.
        add: whether the copy adds to its destination.
    """

    entry: int
    tensor: View | None
    rows: slice | None = None
    add: bool = False


class Hop(NamedTuple):
    """Peers of an exchange."""

    send_to: int
    recv_from: int


class Collective(NamedTuple):
    """An exchange among all ranks of a group.

    Attributes:
        op: see `Transport.post`.
        dtype: type of the summed elements.
        send_counts, recv_counts: bytes of an all-to-all to, and from, each rank.
    """

    op: Literal["all_gather", "reduce_scatter", "all_to_all"]
    dtype: torch.dtype = torch.uint8
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()


# -- ops


class Step(NamedTuple):
    """Begin a part of the program, with a label for pictures and a number for traces."""

    label: str
    number: int | None = None


class Pack(NamedTuple):
    """Take a buffer and copy tensors into a message in it."""

    buffer: Buffer
    message: Message
    copies: tuple[Copy, ...] = ()


class Post(NamedTuple):
    """Take a buffer and start an exchange into it.

    Attributes:
        channel: at most one exchange is in flight on a channel.
        step: number of the step, for errors.
        route: the peers.
        message: message to receive.
        nbytes: bytes that leave the rank.
        ranks: ranks of the group, ascending; None means all ranks of the program.
    """

    channel: Channel
    step: int
    route: Hop | Collective
    send: Buffer
    recv: Buffer
    message: Message
    nbytes: int
    ranks: tuple[int, ...] | None = None


class PostTogether(NamedTuple):
    """Start several exchanges as one, on one channel; one `Wait` on that channel is for all.

    NCCL starts them in one group on one communicator, where the messages between two ranks go one
    after another.

    Attributes:
        channel: the channel of all exchanges.
        posts: hops among the same ranks, in one order on all ranks. The channel of each only says
            what the hop carries.
    """

    channel: Channel
    posts: tuple[Post, ...]

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """Ranks of the group, as in `Post`."""
        return self.posts[0].ranks


class Wait(NamedTuple):
    """Wait until the exchange in flight on the channel is complete."""

    channel: Channel
    ranks: tuple[int, ...] | None = None


class Join(NamedTuple):
    """Join a collective in which this rank has nothing to send or receive."""

    channel: Channel


class Free(NamedTuple):
    """Free buffers, and tensors by name."""

    names: tuple[Buffer | str, ...]


class Clear(NamedTuple):
    """Take a buffer for a message of zeros, whose memory is allocated at the first addition."""

    buffer: Buffer
    message: Message


class Add(NamedTuple):
    """Add `buffer` to `into` and free `buffer`; if `into` is clear, it takes over the memory."""

    into: Buffer
    buffer: Buffer
    message: Message


class Unpack(NamedTuple):
    """Copy a message into tensors, or add it to them, and free the buffer."""

    buffer: Buffer
    message: Message
    copies: tuple[Copy, ...] = ()


class New(NamedTuple):
    """Make a tensor, of zeros or uninitialised."""

    name: str
    array: Array
    zero: bool = False


class Assign(NamedTuple):
    """Copy a tensor into another tensor, or into a part of it."""

    into: View
    source: View


class Start(NamedTuple):
    """Make the empty state of the queries, with the sinks of some heads; None means no sinks."""

    q: View
    headdim_v: int
    array: Array
    sinks: slice | None = None


class Attend(NamedTuple):
    """Fold tiles into the state; `last` marks the last fold of the state."""

    tiles: StepTiles
    q: View
    k: Operand
    v: Operand
    last: bool = False


class Decode(NamedTuple):
    """Compute partial out and lse of a few queries over many keys, in the dtype of the state.

    The queries see tiles, or rows of sequences. `tables` are then the tensors with the lengths of
    the sequences and, for a paged cache, their pages.
    """

    tiles: tuple[Tile, ...]
    q: View
    k: View
    v: View
    sequences: Sequences | None = None
    tables: tuple[View, ...] = ()


class Finish(NamedTuple):
    """Make out and lse from the state, and consume it."""

    out: str
    lse: str
    out_array: Array
    lse_array: Array


class Delta(NamedTuple):
    """Compute delta = rowsum(dout * out), lse in the backend's form, and the gradient of sinks."""

    array: Array


class Differentiate(NamedTuple):
    """Add the gradients of tiles: all of them, only that of q, or only those of k and v.

    Attributes:
        q_side: q, dout, lse, delta.
        kv: k, v.
        dq: sum to which dq is added.
        dkv: sums to which dk and dv are added.
        out: the forward's output, if this rank owns the q rows.
    """

    part: Literal["all", "q", "kv"]
    tiles: StepTiles
    q_side: tuple[Operand, ...]
    kv: tuple[Operand, Operand]
    dq: Operand | None = None
    dkv: tuple[Operand, Operand] | None = None
    out: View | None = None


class Round(NamedTuple):
    """Scale a gradient if `scaled`, round it once, and consume it."""

    into: View
    gradient: Operand
    array: Array
    scaled: bool


class Inner(NamedTuple):
    """Run the program of another call among some of the ranks.

    Attributes:
        program: the inner program, with its own names for tensors.
        spec: sizes and types of the inner call.
        ranks: the ranks, ascending.
        inputs, results: pairs (inner name, outer name) of the tensors.
        sinks: heads whose sinks the inner program takes.
    """

    program: Program
    spec: AttentionSpec
    ranks: tuple[int, ...] | None
    inputs: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]
    sinks: slice | None = None


class Merge(NamedTuple):
    """Merge the partial results of all ranks in a tree, and the sinks at the root."""

    buffer: Buffer
    message: Message
    out: str
    lse: str


Op = (
    Step
    | Pack
    | Post
    | PostTogether
    | Wait
    | Join
    | Free
    | Clear
    | Add
    | Unpack
    | New
    | Assign
    | Start
    | Attend
    | Decode
    | Finish
    | Delta
    | Differentiate
    | Round
    | Inner
    | Merge
)


@dataclass(frozen=True, eq=False)
class Program:
    """The ops of one rank.

    Attributes:
        world_size, rank, backward: of the call.
        ops: in their order.
        arrays: sizes of the input tensors by name.
        saved: names of the tensors of a forward that its backward needs.
        in_one_pass: whether the launches of a backward compute all gradients at once, see
            `Backend.in_one_pass`.
    """

    world_size: int
    rank: int
    backward: bool
    ops: tuple[Op, ...]
    arrays: dict[str, Array]
    saved: tuple[str, ...] = ()
    in_one_pass: bool = False

    @cached_property
    def last_takes(self) -> dict[int, int]:
        """Index of the last op that takes a buffer, by size in bytes.

        Buffers freed before that op are kept for reuse.
        """
        last: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            if isinstance(op, Pack | Clear):
                last[op.buffer.nbytes] = index
            elif isinstance(op, Differentiate):
                # Cleared buffers get their memory here.
                entries = [x for x in effects(op).writes if isinstance(x, Entry)]
                last |= {entry.buffer.nbytes: index for entry in entries}
            for post in posts_of(op):
                last[post.send.nbytes] = last[post.recv.nbytes] = index
        return last

    @cached_property
    def recycled(self) -> frozenset[int]:
        """Sizes in bytes of which a buffer is taken after another was freed."""
        freed: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            for buffer in effects(op).frees:
                freed.setdefault(buffer.nbytes, index)
        return frozenset(
            nbytes for nbytes, last in self.last_takes.items() if freed.get(nbytes, last) < last
        )

    def posts(self) -> Iterator[Post]:
        """Yield the exchanges in order; posts of inner programs count the ranks of those."""
        for op in self.ops:
            yield from posts_of(op)
            if isinstance(op, Inner):
                yield from op.program.posts()


def posts_of(op: Op) -> tuple[Post, ...]:
    """Return the exchanges that an op starts, of which most ops have none."""
    if isinstance(op, Post):
        return (op,)
    return op.posts if isinstance(op, PostTogether) else ()


def on_channel(op: Post | PostTogether) -> tuple[Post, ...]:
    """Return the exchanges that an op starts, as if each started by itself on the op's channel."""
    return tuple(post._replace(channel=op.channel) for post in posts_of(op))


class Effects(NamedTuple):
    """Existing operands that an op reads and writes, and lifetimes that it begins and ends."""

    reads: tuple[Operand, ...] = ()
    writes: tuple[Operand, ...] = ()
    takes: tuple[Buffer, ...] = ()
    frees: tuple[Buffer, ...] = ()
    makes: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()


# The state of the queries as a tensor: `Start` makes it, `Finish` consumes it.
STATE = "state"


def effects(op: Op) -> Effects:
    """Return the effects of an op, without a post's buffers, which are in use until its wait."""
    match op:
        case Pack():
            return Effects(reads=_outside(op.copies), takes=(op.buffer,))
        case Clear():
            return Effects(takes=(op.buffer,))
        case Add():
            return Effects((Entry(op.buffer, 0),), (Entry(op.into, 0),), frees=(op.buffer,))
        case Unpack():
            return Effects((Entry(op.buffer, 0),), _outside(op.copies), frees=(op.buffer,))
        case Merge():
            return Effects((Entry(op.buffer, 0),), frees=(op.buffer,), makes=(op.out, op.lse))
        case Free():
            buffers = tuple(name for name in op.names if isinstance(name, Buffer))
            return Effects(frees=buffers, drops=tuple(x for x in op.names if isinstance(x, str)))
        case New():
            return Effects(makes=(op.name,))
        case Assign():
            return Effects((op.source,), _parts(op.into), makes=(op.into.name,))
        case Round():
            used_up = (op.gradient.name,) if isinstance(op.gradient, View) else ()
            made = (op.into.name,)
            return Effects((op.gradient,), _parts(op.into), makes=made, drops=used_up)
        case Start():
            return Effects(reads=(op.q,), makes=(STATE,))
        case Attend():
            return Effects(reads=(op.q, op.k, op.v, View(STATE)))
        case Decode():
            reads = (op.q, op.k, op.v, *op.tables)
            return Effects(reads=reads, makes=("partial out", "partial lse"))
        case Finish():
            return Effects(reads=(View(STATE),), makes=(op.out, op.lse), drops=(STATE,))
        case Delta():
            return Effects(reads=tuple(map(View, ("out", "dout", "lse"))), makes=("delta",))
        case Differentiate():
            out = () if op.out is None else (op.out,)
            sums = (op.dq, *(op.dkv or ()))
            writes = tuple(x for x in sums if x is not None)
            return Effects((*op.q_side, *op.kv, *out), writes)
        case Inner():
            return Effects(reads=tuple(View(outer) for _, outer in op.inputs))
        case Step() | Post() | PostTogether() | Wait() | Join():
            return Effects()
        case _:
            assert_never(op)


def _parts(into: View) -> tuple[View, ...]:
    """Return the view if it is a part of an existing tensor."""
    return () if into.rows is None and into.heads is None else (into,)


def _outside(copies: Sequence[Copy]) -> tuple[View, ...]:
    return tuple(copy.tensor for copy in copies if copy.tensor is not None)


def copies_of_runs(
    names: Sequence[str], runs: Sequence[slice], *, add: bool = False
) -> tuple[Copy, ...]:
    """Return the copies between runs of rows of tensors and a message of these runs, in order."""
    copies = []
    at = 0  # row of the message
    for run in runs:
        rows = slice(at, at + run.stop - run.start)
        copies += [Copy(i, View(name, run), rows, add) for i, name in enumerate(names)]
        at = rows.stop
    return tuple(copies)


def part_of_heads(op: Attend | Differentiate, spec: AttentionSpec) -> AttentionSpec:
    """Return the spec of an op, with the heads of its views."""
    q, k = (op.q, op.k) if isinstance(op, Attend) else (op.q_side[0], op.kv[0])
    group = spec.nheads // spec.nheads_kv
    if isinstance(q, View) and q.heads is not None:
        heads = q.heads.stop - q.heads.start
    elif isinstance(k, View) and k.heads is not None:
        heads = (k.heads.stop - k.heads.start) * group
    else:
        return spec
    return replace(spec, nheads=heads, nheads_kv=heads // group)
