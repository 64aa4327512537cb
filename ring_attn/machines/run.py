"""Runs a program on tensors: every strategy, forward and backward, runs here.

For an observed call (`ring_attn.profiling`), also records named ranges, counts of steps and merges,
and the times of posts, waits and compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor

from ring_attn.backends import get_backend
from ring_attn.backends.base import Backend, BackwardInputs
from ring_attn.core import program as ops
from ring_attn.core.messages import Message
from ring_attn.core.program import Buffer, Channel, Copy, Entry, Hop, Operand, Program, View
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.state import rounded_gradient, sinks_gradient
from ring_attn.core.tiles import Tile
from ring_attn.machines.rehearse import Silent, connect
from ring_attn.profiling import Direction, Observer, is_observed, observe
from ring_attn.strategies.base import Call
from ring_attn.strategies.registry import program_of
from ring_attn.strategies.tree_decode import DecodeCall, program
from ring_attn.transport import capture, streams
from ring_attn.transport.base import Transport
from ring_attn.transport.buffers import Block, Pool, exchanged, last_uses
from ring_attn.transport.streams import Stream

# Step number of the exchange of greatest scores; larger than the program's step numbers.
MAXIMA = 1 << 20


class Forward(NamedTuple):
    """Results of a forward.

    Attributes:
        out: (batch, rows, nheads, headdim_v) in the dtype of q.
        lse: (batch, nheads, rows) in the type of the state.
        saved: tensors that the backward needs; none is a communication buffer.
        max_logits: (nheads,) greatest scores over all ranks; empty if not requested.
    """

    out: Tensor
    lse: Tensor
    saved: tuple[Tensor, ...]
    max_logits: Tensor


class Gradients(NamedTuple):
    """Gradients of this rank's shards, and its share of the gradient of the sinks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, transport: Transport, sinks: Tensor | None = None
) -> Forward:
    """Attention of this rank's queries to all keys.

    The shards are (batch, rows, heads, dim). Sinks (nheads,) are the same on every rank, and are
    used in the type of the state.
    """
    steps = program_of(call, backward=False)
    inputs = {"q": q, "k": k, "v": v}
    run = execute(steps, call, inputs, transport, sinks, str(call.strategy))
    saved = tuple(run.tensors[name] for name in steps.saved)
    lse = run.tensors["lse"]
    most = run.max_logits
    if call.spec.max_logits and most is None:  # a rank without heads
        most = lse.new_full((call.spec.nheads,), -torch.inf)
    most = lse.new_empty(0) if most is None else transport.gather(most, MAXIMA).amax(0)
    return Forward(run.tensors["out"], lse, saved, most)


def backward(
    call: Call,
    saved: tuple[Tensor, ...],
    dout: Tensor,
    transport: Transport,
    sinks: Tensor | None = None,
) -> Gradients:
    """Gradients of this rank's shards, accumulated in float32 and rounded once.

    The forward's saved tensors are neither changed nor kept.
    """
    names = program_of(call, backward=False).saved
    inputs = {**dict(zip(names, saved, strict=True)), "dout": dout}
    steps = program_of(call, backward=True)
    run = execute(steps, call, inputs, transport, sinks, str(call.strategy))
    dq, dk, dv = (run.tensors[name] for name in ("dq", "dk", "dv"))
    dsinks = run.dsinks
    if sinks is not None and dsinks is None:  # a rank without heads
        dsinks = torch.zeros_like(sinks)
    return Gradients(dq, dk, dv, dsinks)


def decode(
    call: DecodeCall,
    tiles: tuple[Tile, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transport: Transport,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of all queries over the whole cache, with the same bits on every rank.

    The queries and the sinks are the same on every rank; k and v are this rank's rows of the
    cache, and may have none. `tiles` are those of all queries x these rows.
    """
    steps = program(call, tiles, q.size(1), k.size(1), transport.rank, transport.world_size)
    inputs = {"q": q, "k": k, "v": v}
    run = execute(steps, call, inputs, transport, sinks, "decode")
    return run.tensors["out"], run.tensors["lse"]


def execute(
    program: Program,
    call: Call | DecodeCall,
    tensors: Mapping[str, Tensor],
    transport: Transport,
    sinks: Tensor | None = None,
    kind: str = "",
) -> Run:
    """Runs a program of one rank of a call to its end, with an observer if the call is observed.

    Programs of one `kind` have the same connections. On a device with streams, all ranks connect,
    compile and wait for each other before the first call of a kind and spec.
    """
    spec, scores, backend = call.spec, call.scores, get_backend(call.backend)
    run = Run(program, spec, scores, backend, dict(tensors), transport, sinks)
    device = next(iter(tensors.values())).device
    if streams.are_used(device) and transport.world_size > 1:

        def rehearse() -> None:
            connect(program, transport, device)
            silent = Silent(tuple(range(transport.world_size)), transport.rank)
            Run(program, spec, scores, backend, dict(tensors), silent, sinks).all()

        transport.before_first((kind, program.backward, spec), call.backend, rehearse)
    if capture.is_on() or not is_observed():
        run.all()
        return run
    direction: Direction = "backward" if program.backward else "forward"
    with observe(direction, device, transport.stats) as observer:
        run.observer = observer
        run.all()
    return run


@dataclass(eq=False)
class Run:
    """One rank's tensors, by name, and buffers while its program runs.

    After a backward with sinks, `dsinks` is their gradient.
    """

    program: Program
    spec: AttentionSpec
    scores: Scores
    backend: Backend
    tensors: dict[str, Tensor]
    transport: Transport
    sinks: Tensor | None
    observer: Observer | None = None

    def __post_init__(self) -> None:
        self.dsinks: Tensor | None = None
        self._device = next(iter(self.tensors.values())).device
        self._state: Any = None
        # Buffers in use, by name; None is a cleared buffer without memory.
        self._blocks: dict[str, Block | None] = {}
        # On a device with streams: the buffers that the current op computes with.
        self._queued = streams.are_used(self._device)
        self._used: list[Block] = []
        self._messages: dict[str, Message] = {}
        self._posted: dict[Channel, Any] = {}
        self._index = 0  # of the current op
        # Greatest score of each head so far, if requested.
        self.max_logits: Tensor | None = None
        self._heads: slice | None = None  # heads of the state

    def all(self) -> None:
        """Runs every op in order."""
        for index, op in enumerate(self.program.ops):
            self._index = index
            _DO[type(op)](self, op)
            if self._used:
                self._note_uses()
        if self.observer is not None:
            self.observer.step = None

    # -- tensors

    def get(self, operand: Operand) -> Tensor:
        """The tensor of an operand, or the part of it."""
        if isinstance(operand, Entry):
            return self._entries(operand.buffer)[operand.number]
        x = self.tensors[operand.name]
        rows, heads = operand.rows, operand.heads
        if rows is None and heads is None:
            return x
        rows, heads = rows or slice(None), heads or slice(None)
        return x[:, rows, heads] if x.ndim == 4 else x[:, heads, rows]

    def _put(self, into: View, x: Tensor) -> None:
        """Copies `x` into an existing tensor, or gives the name to `x`."""
        if into.name in self.tensors:
            self.get(into).copy_(x)
        else:
            self.tensors[into.name] = x

    def step(self, op: ops.Step) -> None:
        if self.observer is not None:
            self.observer.step = op.number
            self.observer.steps += op.number is not None

    def new(self, op: ops.New) -> None:
        make = torch.zeros if op.zero else torch.empty
        array = op.array
        self.tensors[op.name] = make(array.shape, dtype=array.dtype, device=self._device)

    def assign(self, op: ops.Assign) -> None:
        self._put(op.into, self.get(op.source))

    def free(self, op: ops.Free) -> None:
        for name in op.names:
            if isinstance(name, Buffer):
                self._give(name)
            else:
                del self.tensors[name]

    # -- buffers

    @cached_property
    def _pool(self) -> Pool:
        return self.transport.pool(self._device)

    @cached_property
    def _side(self) -> Stream | None:
        return self.transport.side(self._device)

    def _take(self, buffer: Buffer, message: Message) -> Block:
        block = self._pool.take(buffer.room)
        self._blocks[buffer.name] = block
        self._messages[buffer.name] = message
        return block

    def _give(self, buffer: Buffer) -> None:
        block = self._blocks.pop(buffer.name)
        if block is None:
            return
        if self.program.keeps(buffer, self._index, pooled=self._pool.lasts):
            self._pool.give(block)

    def _held(self, buffer: Buffer) -> Block:
        """The block of a buffer in use; allocates and zeroes a cleared one."""
        block = self._blocks[buffer.name]
        if block is None:
            message = self._messages[buffer.name]
            block = self._take(buffer, message)
            block.part(message.nbytes).zero_()
            if self._queued:
                self._used.append(block)
        return block

    def _bytes(self, buffer: Buffer) -> Tensor:
        """The bytes of a buffer's message, to compute with."""
        block = self._held(buffer)
        if self._queued:
            self._used.append(block)
        return block.part(self._messages[buffer.name].nbytes)

    def _entries(self, buffer: Buffer) -> tuple[Tensor, ...]:
        """The tensors of a buffer's message, to compute with."""
        block = self._held(buffer)
        if self._queued:
            self._used.append(block)
        return block.tensors(self._messages[buffer.name])

    def _note_uses(self) -> None:
        """Records an event after the op, on the buffers that it used."""
        event = streams.record(self._device)
        for block in self._used:
            block.written = event
        self._used.clear()

    def pack(self, op: ops.Pack) -> None:
        # The compute stream, which now writes, has waited for the exchanges that sent the block.
        self._take(op.buffer, op.message).sent.clear()
        entries = self._entries(op.buffer)
        for copy in op.copies:
            target = _rows_of(entries[copy.entry], copy)
            if copy.tensor is None:
                target.zero_()
            else:
                target.copy_(self.get(copy.tensor))

    def unpack(self, op: ops.Unpack) -> None:
        entries = self._entries(op.buffer)
        for copy in op.copies:
            assert copy.tensor is not None, "only packing takes zeros"
            source, target = _rows_of(entries[copy.entry], copy), self.get(copy.tensor)
            if copy.add:
                target.add_(source)
            else:
                target.copy_(source)
        del entries
        self._give(op.buffer)

    def clear(self, op: ops.Clear) -> None:
        self._blocks[op.buffer.name] = None
        self._messages[op.buffer.name] = op.message

    def add(self, op: ops.Add) -> None:
        if self._blocks[op.into.name] is None:
            self._blocks[op.into.name] = self._blocks.pop(op.buffer.name)
            return
        dtype = self._entries(op.into)[0].dtype
        self._bytes(op.into).view(dtype).add_(self._bytes(op.buffer).view(dtype))
        self._give(op.buffer)

    # -- exchanges

    def _among(self, ranks: tuple[int, ...] | None) -> Transport:
        return self.transport if ranks is None else self.transport.sub(ranks)

    def post(self, op: ops.Post) -> None:
        transport, send = self._among(op.ranks), self._held(op.send)
        if self._used:
            self._note_uses()
        recv = self._take(op.recv, op.message)
        after = last_uses(send, recv)
        header = self._pool.header if isinstance(op.route, Hop) else 0
        data = send.part(self._messages[op.send.name].nbytes, header)
        into = recv.part(op.message.nbytes, header)
        post = partial(transport.post, op.channel, op.step, op.route, data, into, after=after)
        if self.observer is None:
            exchanged(send, recv, post())
            return
        start = self.observer.mark()
        with self._part("post"):
            end = post()
        exchanged(send, recv, end)
        if transport.world_size > 1:
            self._posted[op.channel] = start
            self.observer.arrival(start, end)

    def wait(self, op: ops.Wait) -> None:
        transport = self._among(op.ranks)
        if self.observer is None:
            transport.wait(op.channel)
            return
        with self._part("wait"):
            transport.wait(op.channel)
        if transport.world_size > 1:
            self.observer.landed(self._posted.pop(op.channel))

    def join(self, op: ops.Join) -> None:
        self.transport.join(op.channel, self._device)

    def inner(self, op: ops.Inner) -> None:
        sinks = self.sinks
        if sinks is not None and op.sinks is not None:
            sinks = sinks[op.sinks]
        inputs = {inner: self.tensors[outer] for inner, outer in op.inputs}
        run = Run(
            op.program, op.spec, self.scores, self.backend, inputs, self._among(op.ranks), sinks,
            self.observer,
        )  # fmt: skip
        run.all()
        for inner, outer in op.results:
            self.tensors[outer] = run.tensors[inner]
        if run.dsinks is not None:
            if self.dsinks is None:
                self.dsinks = torch.zeros_like(cast(Tensor, self.sinks))
            self.dsinks[op.sinks or slice(None)] = run.dsinks
        if run.max_logits is not None:
            self._note_maxima(op.sinks, run.max_logits)

    # -- attention

    def _part(self, name: str, merges: int = 0) -> Any:
        """Context of a part of the call with a separate range and time."""
        if self.observer is None:
            return _NOTHING
        self.observer.merges += merges
        return self.observer.span(name)

    def _sinks(self, heads: slice | None) -> Tensor | None:
        if self.sinks is None or heads is None:
            return None
        return self.sinks.to(self.spec.accum_dtype)[heads]

    def start(self, op: ops.Start) -> None:
        self._heads = op.sinks
        self._state = self.backend.new_state(self.get(op.q), op.headdim_v, self._sinks(op.sinks))

    def attend(self, op: ops.Attend) -> None:
        if not op.tiles:
            return
        q, k, v = self.get(op.q), self.get(op.k), self.get(op.v)
        with self._part("attend", len(op.tiles)):
            self._state = self.backend.forward(
                q, k, v, op.tiles, self._state, scores=self.scores,
                last=op.last and not self.spec.max_logits,
            )  # fmt: skip

    def decode(self, op: ops.Decode) -> None:
        q, k, v = self.get(op.q), self.get(op.k), self.get(op.v)
        with self._part("attend", len(op.tiles)):
            out, lse = self.backend.decode(q, k, v, op.tiles, scores=self.scores)
        self.tensors |= {"partial out": out, "partial lse": lse}

    def finish(self, op: ops.Finish) -> None:
        state, self._state = self._state, None
        with self._part("finalize"):
            if self.spec.max_logits:
                self._note_maxima(self._heads, self.backend.max_logits(state))
            out, lse = self.backend.finalize(state, op.out_array.dtype)
        self.tensors |= {op.out: out, op.lse: lse}

    def _note_maxima(self, heads: slice | None, values: Tensor) -> None:
        if self.max_logits is None:
            self.max_logits = values.new_full((self.spec.nheads,), -torch.inf)
        part = self.max_logits[heads or slice(None)]
        part.copy_(torch.maximum(part, values))

    def delta(self, op: ops.Delta) -> None:
        out, dout, lse = (self.tensors[name] for name in ("out", "dout", "lse"))
        with self._part("delta"):
            converted, delta = self.backend.row_statistics(out, dout, lse)
        self.tensors |= {"lse": converted, "delta": delta}
        if self.sinks is not None:
            self.dsinks = sinks_gradient(self.sinks, lse, delta)

    def differentiate(self, op: ops.Differentiate) -> None:
        if not op.tiles:
            return
        q, dout, lse, delta = map(self.get, op.q_side)
        k, v = map(self.get, op.kv)
        inputs = BackwardInputs(q, k, v, dout, lse.contiguous(), delta.contiguous())
        dq = None if op.dq is None else self.get(op.dq)
        dk, dv = (None, None) if op.dkv is None else map(self.get, op.dkv)
        backend = self.backend
        with self._part("attend", len(op.tiles)):
            whole = op.part == "all" and backend.in_one_pass(self.spec)
            if backend.in_order and not whole:
                add = partial(backend.backward, inputs, op.tiles, scores=self.scores)
                q_half, kv_half = partial(add, (dq, None, None)), partial(add, (None, dk, dv))
                halves = {"q": (q_half,), "kv": (kv_half,), "all": (kv_half, q_half)}
                streams.side_by_side(self._device, self._side, *halves[op.part])
            elif dq is not None and dk is not None and dv is not None:
                out = None if op.out is None else self.get(op.out)
                backend.backward(inputs, op.tiles, (dq, dk, dv), scores=self.scores, out=out)
            else:
                needed = "gradients in order need a backend that folds in one order, as triton does"
                raise NotImplementedError(f"{needed}; got {backend.name!r}")

    def round(self, op: ops.Round) -> None:
        if isinstance(op.gradient, View):
            grad = self.tensors.pop(op.gradient.name)
        else:
            grad = self.get(op.gradient)[:, : op.array.rows]
        factor = self.backend.gradient_factor(self.scores) if op.scaled else 1.0
        self._put(op.into, rounded_gradient(grad, op.array.dtype, factor))

    def merge(self, op: ops.Merge) -> None:
        out, lse = self._entries(op.buffer)
        q = self.tensors["q"]
        with self._part("merge", out.size(0)):
            merged = self.backend.merge(out, lse, self.sinks, q.dtype)
        self.tensors[op.out], self.tensors[op.lse] = merged
        del out, lse
        self._give(op.buffer)


_NOTHING = nullcontext()

# Each op has the method of its name.
_DO: dict[type, Callable[[Run, Any], None]] = {
    op: getattr(Run, op.__name__.lower()) for op in get_args(ops.Op)
}


def _rows_of(entry: Tensor, copy: Copy) -> Tensor:
    if copy.rows is None:
        return entry
    return entry[:, copy.rows] if entry.ndim == 4 else entry[:, :, copy.rows]
