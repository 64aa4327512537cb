"""Count the bytes that a program sends, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from ring_attn.backends import get_backend
from ring_attn.backends.base import Backend
from ring_attn.call import Call
from ring_attn.core import program as ops
from ring_attn.core.messages import Gathered, Message, Records
from ring_attn.core.program import (
    Array,
    Buffer,
    Entry,
    Op,
    Operand,
    Program,
    View,
    part_of_heads,
)
from ring_attn.core.spec import AttentionSpec
from ring_attn.core.tiles import Sizes, Tile
from ring_attn.transport.nccl_channels import NET_STEP, communicator_of
from ring_attn.transport.options import MAX_CTAS


def bytes_sent(program: Program) -> int:
    """Return the bytes that leave a rank."""
    return sum(post.nbytes for post in program.posts())


# Bytes of the buffers with which NCCL receives from one rank on one channel, for its protocols LL,
# LL128 and Simple: the defaults of NCCL 2.30.
CONNECTION_BYTES = 524_288 + 4_915_200 + 4_194_304
# Bytes of the buffers that all sends, or all receives, between nodes share on one channel: 16 steps
# (NCCL_SHARED_STEPS).
SHARED_NET_BYTES = 16 * NET_STEP

Members = tuple[int, ...]
Sources = dict[tuple[Members, ops.Channel], set[int | None]]


def communicator_bytes(
    programs: Sequence[Program],
    rank: int,
    world_size: int,
    node_size: int,
    max_ctas: int = MAX_CTAS,
    *,
    over_pcie: bool = False,
) -> int:
    """Return an estimate of the bytes that NCCL's communicators of the rank's programs take.

    The first calls allocate them, and all later calls and layers share them. A communicator has
    buffers for each rank of the node from which it receives, on as many channels as NCCL gives it
    (`transport.nccl_channels`). Ranks of other nodes share buffers. `max_ctas` and `over_pcie` are
    those of the `Cluster`.
    """
    sources: Sources = {}
    for program in programs:
        _add_sources(program, rank, tuple(range(world_size)), sources)
    node = rank // node_size
    nbytes = 0
    for (members, _), found in sources.items():
        num_nodes = len({member // node_size for member in members})
        communicator = communicator_of(len(members), num_nodes, max_ctas, over_pcie=over_pcie)
        for source in found:
            if source is None:
                # A ring of NCCL's, for a collective, uses all channels.
                nbytes += communicator.num_channels * CONNECTION_BYTES
            elif source // node_size == node:
                nbytes += communicator.channels_per_peer * CONNECTION_BYTES
        if any(source is not None and source // node_size != node for source in found):
            nbytes += 2 * communicator.num_channels * SHARED_NET_BYTES
    return nbytes


def _add_sources(program: Program, rank: int, members: Members, sources: Sources) -> None:
    """Add the ranks from which each communicator receives; None is the neighbour in NCCL's ring.

    A communicator has one channel and some ranks, as in `transport.ranks.links.NcclLink`.
    """
    for op in program.ops:
        if not isinstance(op, ops.Post | ops.PostTogether | ops.Inner):
            continue
        some = members if op.ranks is None else tuple(members[index] for index in op.ranks)
        if isinstance(op, ops.Inner):
            _add_sources(op.program, rank, some, sources)
            continue
        found = sources.setdefault((some, op.channel), set())
        for post in ops.posts_of(op):
            if isinstance(post.route, ops.Hop):
                found.add(some[post.route.recv_from])
            elif post.route.op == "all_to_all":
                found.update(member for member in some if member != rank)
            else:
                found.add(None)


def peak_bytes(programs: Sequence[Program], call: Call) -> int:
    """Return the peak bytes that a forward, or a forward and a backward, hold beyond the inputs."""
    return _walk_memory(programs, call, moments=None)


def _walk_memory(programs: Sequence[Program], call: Call, moments: list[Moment] | None) -> int:
    """Return the peak bytes; append what is held after each op to `moments`, if it is a list."""
    backend = get_backend(call.backend)
    memory = Memory(programs[0], call.spec, backend, dict(programs[0].arrays), 0, moments)
    memory.all()
    if len(programs) == 1:
        return memory.peak
    forward, (_, program) = programs[0], programs
    # The result and saved tensors stay held; dout is an input.
    arrays = {name: memory.arrays[name] for name in (*forward.saved, "out")}
    held = sum(x.nbytes for name, x in arrays.items() if name in memory.own)
    arrays["dout"] = program.arrays["dout"]
    back = Memory(program, call.spec, backend, arrays, held, moments)
    back.own = {name for name in arrays if name in memory.own}
    back.all()
    return max(memory.peak, back.peak)


class Moment(NamedTuple):
    """The bytes that a rank holds beyond its inputs after an op of its program.

    Attributes:
        direction: "forward" or "backward".
        step: label of the program's step; "" before the first.
        tensors: results, gradients and saved tensors.
        messages: buffers that are sent, received or added.
        state: running sums of the softmax.
        peak: the most that is held during the op, with its temporary tensors.
    """

    direction: str
    step: str
    tensors: int
    messages: int
    state: int
    peak: int

    @property
    def held(self) -> int:
        return self.tensors + self.messages + self.state


def memory_over(programs: Sequence[Program], call: Call) -> list[Moment]:
    """Return what a rank holds after each op of a forward, or of a forward and a backward.

    The greatest `peak` is what `peak_bytes` returns.
    """
    moments: list[Moment] = []
    _walk_memory(programs, call, moments)
    return moments


@dataclass(eq=False)
class Memory:
    """The bytes that a rank holds while `machines.run` runs its program.

    `own` are the names of the tensors that the program has made, `peak` is the greatest `held`.
    `outer` is what the program around an inner one holds.
    """

    program: Program
    spec: AttentionSpec
    backend: Backend
    arrays: dict[str, Array]
    held: int
    moments: list[Moment] | None = None
    outer: Moment | None = None

    def __post_init__(self) -> None:
        self.own: set[str] = set()
        self.peak = self.held
        self.index = self._rows = self._folds = 0
        self._heads = self.spec
        # Rooms of the buffers with memory; cleared buffers have none yet.
        self._buffer_bytes: dict[str, int] = {}
        self._messages: dict[str, Message] = {}
        # Bytes that a sum over ranks receives, by channel, until the end of the exchange.
        self._parts: dict[ops.Channel, int] = {}
        self._state = 0  # bytes of the state between its steps
        self._step = "" if self.outer is None else self.outer.step
        self._free: dict[int, int] = {}  # numbers of free buffers by size
        # Bytes of workspaces, by the arguments of `Backend.workspace_bytes`.
        self._workspaces: dict[tuple[Sizes, AttentionSpec, bool, bool], int] = {}

    def all(self) -> None:
        """Count every op in order, and free all buffers at the end."""
        for index, op in enumerate(self.program.ops):
            self.index = index
            if self.moments is None:
                self.do(op)
            else:
                self._record(op, self.moments)
        self.held -= sum(self._buffer_bytes.values())
        self.held -= sum(nbytes * count for nbytes, count in self._free.items())

    def _record(self, op: Op, moments: list[Moment]) -> None:
        """Count an op, and append what is held after it."""
        if isinstance(op, ops.Step):
            self._step = op.label
        before, self.peak = self.peak, self.held
        self.do(op)
        moments.append(self._moment(peak=self.peak))
        self.peak = max(before, self.peak)

    def _moment(self, peak: int) -> Moment:
        messages = sum(self._buffer_bytes.values()) + sum(self._parts.values())
        messages += sum(nbytes * count for nbytes, count in self._free.items())
        state = self._state
        if self.outer is not None:
            messages += self.outer.messages
            state += self.outer.state
        return Moment(
            direction="backward" if self.program.backward else "forward",
            step=self._step,
            tensors=self.held - messages - state,
            messages=messages,
            state=state,
            peak=peak,
        )

    def _use(self, nbytes: int) -> None:
        self.peak = max(self.peak, self.held + nbytes)

    def _hold(self, nbytes: int) -> None:
        self._use(nbytes)
        self.held += nbytes

    def _make(self, name: str, array: Array) -> None:
        self.arrays[name] = array
        self.own.add(name)
        self._hold(array.nbytes)

    def _drop(self, name: str) -> None:
        if name in self.own:
            self.own.remove(name)
            self.held -= self.arrays[name].nbytes

    def _take(self, buffer: Buffer, message: Message) -> None:
        if self._free.get(buffer.nbytes, 0):
            self._free[buffer.nbytes] -= 1
        else:
            self._hold(buffer.nbytes)
        self._buffer_bytes[buffer.name] = buffer.nbytes
        self._messages[buffer.name] = message

    def _give(self, buffer: Buffer) -> None:
        nbytes = self._buffer_bytes.pop(buffer.name, None)
        if nbytes is None:
            return
        if self.program.last_takes.get(nbytes, -1) > self.index:
            self._free[nbytes] = self._free.get(nbytes, 0) + 1
        else:
            self.held -= nbytes

    def do(self, op: Op) -> None:
        match op:
            case ops.Pack():
                self._take(op.buffer, op.message)
            case ops.Post() | ops.PostTogether():
                for post in ops.posts_of(op):
                    self._written(post.send)
                    self._take(post.recv, post.message)
                    self._receive_parts(post)
            case ops.Wait():
                self.held -= self._parts.pop(op.channel, 0)
            case ops.Clear():
                self._messages[op.buffer.name] = op.message
            case ops.Add():
                if op.into.name in self._buffer_bytes:
                    self._give(op.buffer)
                else:
                    self._buffer_bytes[op.into.name] = self._buffer_bytes.pop(op.buffer.name)
            case ops.Unpack():
                self._give(op.buffer)
            case ops.Free():
                for name in op.names:
                    if isinstance(name, Buffer):
                        self._give(name)
                    else:
                        self._drop(name)
            case ops.New():
                self._make(op.name, op.array)
            case ops.Assign():
                # A new name shares the memory of its source, which is counted already.
                self.arrays.setdefault(op.into.name, self.arrays[op.source.name])
            case ops.Start():
                self._rows, self._folds = op.array.rows, 0
            case ops.Attend():
                self._attend(op)
            case ops.Finish():
                self._finish(op)
            case ops.Delta():
                if self.backend.tile_by_tile:
                    # The products dO * O, before they are summed over the head dim; of 16-bit
                    # inputs beside copies of both.
                    products = op.array.nbytes * self.spec.headdim_v
                    copies = 2 * products if self.spec.dtype != self.spec.accum_dtype else 0
                    self._use(products + max(copies, op.array.nbytes))
                self._make("delta", op.array)
                if self.backend.converts_lse:
                    self._make("lse", op.array)
            case ops.Differentiate():
                self._differentiate(op)
            case ops.Round():
                self._round(op)
            case ops.Inner():
                self._inner(op)
            case ops.Step() | ops.Join():
                pass  # takes no memory
            case ops.Decode() | ops.Merge():
                pass  # the memory of `tree_decode` is not counted
            case _:
                assert_never(op)

    def _receive_parts(self, post: ops.Post) -> None:
        """Take memory for the other ranks' parts of a sum, which a host adds up itself."""
        collective = isinstance(post.route, ops.Collective) and post.route.op
        if collective == "reduce_scatter" and self.spec.device_type == "cpu":
            self._parts[post.channel] = post.nbytes
            self._hold(post.nbytes)

    def _written(self, buffer: Buffer) -> None:
        if buffer.name not in self._buffer_bytes:
            self._take(buffer, self._messages[buffer.name])

    def _attend(self, op: ops.Attend) -> None:
        if op.tiles:
            self._heads = part_of_heads(op, self.spec)
            self._folds += 1 if self.backend.carries_state or self._is_one_piece(op) else 2
            self.held -= self._state
            kept = self._kept_state_bytes(last=op.last)
            workspace = self._workspace(op, self._heads, rebuilds=False)
            if self.backend.carries_state:
                self._use(self._state_bytes(last=op.last) + workspace)
            elif self._folds == 1:  # the state adopts the result
                self._use(max(workspace, kept))
            else:  # the result is merged with the state
                self._use(kept + max(workspace, self._merge_bytes(op)))
            self._state = kept
            self.held += kept

    def _is_one_piece(self, op: ops.Attend) -> bool:
        """Return whether a step is one piece with all rows, whose result a state can adopt."""
        pieces = self._pieces(op)
        return len(pieces) == 1 and pieces[0].rows == self._rows

    def _state_bytes(self, *, last: bool) -> int:
        """Return the bytes of a kernel's state; after the last fold, with the results."""
        spec = self._heads
        statistic = spec.batch * self._rows * spec.nheads
        acc, wide = statistic * spec.headdim_v, spec.accum_dtype.itemsize
        results = acc * spec.dtype.itemsize + statistic * wide
        # A single fold writes the results without a state.
        has_state = self._folds > 1 or not last or spec.max_logits
        state = (acc + 2 * statistic) * wide if has_state else 0
        return state + (results if last else 0)

    def _pieces(self, op: ops.Attend) -> list[Tile]:
        return [x for tile in op.tiles for x in self.backend.pieces(tile, self.spec.device_type)]

    def _merge_bytes(self, op: ops.Attend) -> int:
        """Return the bytes of a piece's result that is merged, with its and four statistics."""
        spec = self._heads
        rows = max(piece.rows for piece in self._pieces(op))
        return spec.batch * rows * spec.nheads * (spec.headdim_v + 6) * spec.accum_dtype.itemsize

    def _kept_state_bytes(self, *, last: bool) -> int:
        """Return the bytes of the state, or of its results after the last step, between steps."""
        spec = self._heads
        statistic = spec.batch * self._rows * spec.nheads
        acc, wide = statistic * spec.headdim_v, spec.accum_dtype.itemsize
        if self.backend.carries_state and last:
            return acc * spec.dtype.itemsize + statistic * wide
        return (acc + 2 * statistic) * wide

    def _finish(self, op: ops.Finish) -> None:
        self.held -= self._state
        self._state = 0
        if self.backend.carries_state:
            self._use(self._kept_state_bytes(last=True))
        else:
            out, lse = op.out_array.nbytes, op.lse_array.nbytes
            acc = lse * self.spec.headdim_v
            rounded = out if op.out_array.dtype != self.spec.accum_dtype else 0
            self._use(acc + max(4 * lse, rounded + 3 * lse))
        self._make(op.out, op.out_array)
        self._make(op.lse, op.lse_array)

    def _differentiate(self, op: ops.Differentiate) -> None:
        if not op.tiles:
            return
        for operand in (op.dq, *(op.dkv or ())):
            if isinstance(operand, Entry):
                self._written(operand.buffer)
        spec = part_of_heads(op, self.spec)
        copies = sum(map(self._copy_bytes, op.q_side[2:]))
        self._use(copies + self._workspace(op, spec, rebuilds=op.out is None))

    def _copy_bytes(self, operand: Operand) -> int:
        """Return the bytes of a copy of lse or delta, which is made if its rows lie apart."""
        if isinstance(operand, View):
            array = self.arrays[operand.name]
            if array.batch == 1 or operand.heads is None:
                return 0
            heads = len(range(*operand.heads.indices(array.heads)))
            return array.nbytes // array.heads * heads if heads < array.heads else 0
        message = self._messages[operand.buffer.name]
        count, part = 1, message
        if isinstance(message, Gathered):
            count, part = message.count, message.part
        if not isinstance(part, Records):
            return 0
        rows = count * part.rows
        return part.batch * rows * part.heads * part.fields[operand.number][1].itemsize

    def _workspace(
        self, op: ops.Attend | ops.Differentiate, spec: AttentionSpec, *, rebuilds: bool
    ) -> int:
        """Return the bytes that the backend takes for a step; ask once for tiles of equal sizes."""
        if not self.backend.tile_by_tile:
            return 0
        backward = isinstance(op, ops.Differentiate)
        key = op.tiles.sizes, spec, backward, rebuilds
        if key not in self._workspaces:
            self._workspaces[key] = self.backend.workspace_bytes(
                spec, op.tiles.listed, backward=backward, rebuilds=rebuilds
            )
        return self._workspaces[key]

    def _round(self, op: ops.Round) -> None:
        """Make the result next to the gradient, or of it, then drop the gradient."""
        same = op.array.dtype == self.spec.accum_dtype
        if op.into.name in self.own:
            # A part of an existing result.
            self._use(0 if same else op.array.nbytes)
        elif not same or isinstance(op.gradient, Entry):
            self._make(op.into.name, op.array)
        if isinstance(op.gradient, View):
            self._drop(op.gradient.name)
            if op.into.name not in self.own:
                self._make(op.into.name, op.array)

    def _inner(self, op: ops.Inner) -> None:
        arrays = {inner: self.arrays[outer] for inner, outer in op.inputs}
        around = self._moment(self.held) if self.moments is not None else None
        memory = Memory(op.program, op.spec, self.backend, arrays, self.held, self.moments, around)
        memory.all()
        self.peak = max(self.peak, memory.peak)
        for inner, outer in op.results:
            array = memory.arrays[inner]
            if inner in memory.own:
                self._make(outer, array)
            else:
                self.arrays[outer] = array
