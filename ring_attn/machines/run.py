"""Run a program on tensors: every strategy, forward and backward, runs here.

An observed call (`ring_attn.profiling`) also records named ranges, and the times of posts, waits
and compute: `Observed`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property, partial
from typing import assert_never, cast

import torch
from torch import Tensor

from ring_attn import profiling
from ring_attn.backends import get_backend
from ring_attn.backends.base import Backend, BackwardInputs, StepState
from ring_attn.call import DecodeCall
from ring_attn.core import program as ops
from ring_attn.core.messages import Message
from ring_attn.core.program import Buffer, Channel, Copy, Entry, Hop, Operand, Program, View
from ring_attn.core.spec import AttentionSpec, Scores
from ring_attn.core.state import rounded_gradient, sinks_gradient
from ring_attn.machines.rehearse import Silent, connect
from ring_attn.profiling import Direction, Observer, observe
from ring_attn.transport import capture, streams
from ring_attn.transport.base import HopOf, Transport
from ring_attn.transport.buffers import Block, last_uses
from ring_attn.transport.streams import Event, Moment, Stream


def execute(
    program: Program,
    call: DecodeCall,
    tensors: Mapping[str, Tensor],
    transport: Transport,
    sinks: Tensor | None = None,
    kind: Hashable = None,
) -> Run:
    """Run a program of one rank of a call to its end, with an observer if the call is observed.

    Programs of one `kind` have the same connections. On a device with streams, all ranks connect,
    compile and wait for each other before the first call of a kind and spec.
    """
    if torch.is_autocast_enabled(call.spec.device_type):
        # Operators keep the dtypes that a call has.
        with torch.autocast(call.spec.device_type, enabled=False):
            return execute(program, call, tensors, transport, sinks, kind)
    spec, scores, backend = call.spec, call.scores, get_backend(call.backend)
    if capture.is_on() or not (profiling.collected.depth or profiling.profiler_enabled()):
        run = Run(program, spec, scores, backend, dict(tensors), transport, sinks)
        if run.queued:
            _prepare(run, kind)
        run.all()
        return run
    observed = Observed(program, spec, scores, backend, dict(tensors), transport, sinks)
    _prepare(observed, kind)
    direction: Direction = "backward" if program.backward else "forward"
    with observe(direction, observed.device, transport.stats) as observed.observer:
        observed.all()
    return observed


def _prepare(run: Run, kind: Hashable) -> None:
    """Connect all ranks and compile, before the first call of a kind and spec."""
    transport, program = run.transport, run.program
    if not run.queued or transport.world_size == 1:
        return

    def rehearse() -> None:
        connect(program, transport, run.device)
        silent = Silent(tuple(range(transport.world_size)), transport.rank)
        given = dict(run.tensors), silent, run.sinks
        Run(program, run.spec, run.scores, run.backend, *given).all()

    transport.before_first((kind, program.backward, run.spec), run.backend.name, rehearse)


class Run:
    """One rank's tensors, by name, and buffers while its program runs.

    After a backward with sinks, `dsinks` is their gradient.
    """

    def __init__(
        self,
        program: Program,
        spec: AttentionSpec,
        scores: Scores,
        backend: Backend,
        tensors: dict[str, Tensor],
        transport: Transport,
        sinks: Tensor | None,
    ) -> None:
        self.program, self.spec, self.scores, self.backend = program, spec, scores, backend
        self.tensors, self.transport, self.sinks = tensors, transport, sinks
        self.dsinks: Tensor | None = None
        # Greatest score of each head so far, if requested.
        self.max_logits: Tensor | None = None
        self.device = next(iter(tensors.values())).device
        self.queued = streams.are_used(self.device)
        self._pool = transport.pool(self.device)
        self._state: StepState = None
        self._heads: slice | None = None  # heads of the state
        # Buffers in use, by name; of a cleared buffer without memory, its message.
        self.blocks: dict[str, Block | Message] = {}
        self.in_flight = 0  # exchanges posted and not waited for, by outer programs too
        # On a device with streams: the buffers that the current op computes with.
        self._used: list[Block] = []
        self.index = 0  # of the current op

    def all(self) -> None:
        """Run every op in order."""
        for index, op in enumerate(self.program.ops):
            self.index = index
            # Without a method of its own, which each op would call; the most frequent ops first.
            match op:
                case ops.Step():
                    self.step(op)
                case ops.Attend():
                    self.attend(op)
                case ops.Differentiate():
                    self.differentiate(op)
                case ops.Wait():
                    self.wait(op)
                case ops.Post():
                    self.post(op)
                case ops.PostTogether():
                    self.post_together(op)
                case ops.Free():
                    self.free(op)
                case ops.Pack():
                    self.pack(op)
                case ops.Clear():
                    self.clear(op)
                case ops.Add():
                    self.add(op)
                case ops.Unpack():
                    self.unpack(op)
                case ops.New():
                    self.new(op)
                case ops.Assign():
                    self.assign(op)
                case ops.Round():
                    self.round(op)
                case ops.Start():
                    self.start(op)
                case ops.Finish():
                    self.finish(op)
                case ops.Delta():
                    self.delta(op)
                case ops.Join():
                    self.join(op)
                case ops.Inner():
                    self.inner(op)
                case ops.Decode():
                    self.decode(op)
                case ops.Merge():
                    self.merge(op)
                case _:
                    assert_never(op)
            if self._used:
                self.note_uses()

    # -- tensors

    def get(self, operand: Operand) -> Tensor:
        """Return the tensor of an operand, or the part of it."""
        if isinstance(operand, Entry):
            return self._held(operand.buffer).tensors[operand.number]
        x = self.tensors[operand.name]
        rows, heads = operand.rows, operand.heads
        if rows is None and heads is None:
            return x
        rows, heads = rows or slice(None), heads or slice(None)
        return x[:, rows, heads] if x.ndim == 4 else x[:, heads, rows]

    def _put(self, into: View, x: Tensor) -> None:
        """Copy `x` into an existing tensor, or give the name to `x`."""
        if into.name in self.tensors:
            self.get(into).copy_(x)
        else:
            self.tensors[into.name] = x

    def step(self, op: ops.Step) -> None:
        """Do nothing; `Observed` records the number of the step."""

    def new(self, op: ops.New) -> None:
        make = torch.zeros if op.zero else torch.empty
        array = op.array
        self.tensors[op.name] = make(array.shape, dtype=array.dtype, device=self.device)

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
    def _side(self) -> Stream | None:
        return self.transport.side(self.device)

    def _take(self, buffer: Buffer, message: Message) -> Block:
        block = self._pool.take(buffer.nbytes)
        block.hold(message)
        self.blocks[buffer.name] = block
        return block

    def _give(self, buffer: Buffer) -> None:
        block, program, nbytes = self.blocks.pop(buffer.name), self.program, buffer.nbytes
        if isinstance(block, Block) and (
            (self._pool.lasts and nbytes in program.recycled)
            or program.last_takes.get(nbytes, -1) > self.index
        ):
            self._pool.give(block)

    def _sent(self, buffer: Buffer) -> Block:
        """Return the block of a buffer to send; allocate and zero a cleared one."""
        block = self.blocks[buffer.name]
        if not isinstance(block, Block):
            block = self._held(buffer)
            if self.queued:
                self.note_uses()
        return block

    def _held(self, buffer: Buffer) -> Block:
        """Return the block of a buffer to compute with; allocate and zero a cleared one."""
        block = self.blocks[buffer.name]
        if not isinstance(block, Block):
            block = self._take(buffer, block)
            block.bytes.zero_()
        if self.queued:
            self._used.append(block)
        return block

    def note_uses(self) -> None:
        """Record an event after the op, on the buffers that it used."""
        event = streams.record(self.device)
        for block in self._used:
            block.written = event
        self._used.clear()

    def pack(self, op: ops.Pack) -> None:
        # The compute stream, which now writes, has waited for the exchanges that sent the block.
        self._take(op.buffer, op.message).sent.clear()
        entries = self._held(op.buffer).tensors
        for copy in op.copies:
            target = _rows_of(entries[copy.entry], copy)
            if copy.tensor is None:
                target.zero_()
            else:
                target.copy_(self.get(copy.tensor))

    def unpack(self, op: ops.Unpack) -> None:
        entries = self._held(op.buffer).tensors
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
        self.blocks[op.buffer.name] = op.message

    def add(self, op: ops.Add) -> None:
        if not isinstance(self.blocks[op.into.name], Block):
            self.blocks[op.into.name] = self.blocks.pop(op.buffer.name)
            return
        into, block = self._held(op.into), self._held(op.buffer)
        dtype = into.tensors[0].dtype
        into.bytes.view(dtype).add_(block.bytes.view(dtype))
        self._give(op.buffer)

    # -- exchanges

    def _among(self, ranks: tuple[int, ...] | None) -> Transport:
        return self.transport if ranks is None else self.transport.sub(ranks)

    def post(self, op: ops.Post) -> Event | None:
        """Start the exchange; return the event of its end, on a device with streams."""
        send = self._sent(op.send)
        recv = self._take(op.recv, op.message)
        data, into = send.bytes, recv.bytes
        if type(op.route) is Hop:
            data, into = send.framed, recv.framed
        transport = self.transport if op.ranks is None else self.transport.sub(op.ranks)
        self.in_flight += 1
        if not self.queued:
            return transport.post(op.channel, op.step, op.route, data, into)
        after = last_uses(send, recv)
        end = transport.post(op.channel, op.step, op.route, data, into, after=after)
        if end is not None:
            send.sent.append(end)
            recv.written, recv.sent = end, []
        return end

    def post_together(self, op: ops.PostTogether) -> Event | None:
        """Start several exchanges as one; return the event of their end, as `post` does."""
        hops, pairs = list[HopOf](), list[tuple[Block, Block]]()
        after = list[Event]()
        for post in op.posts:
            send, recv = self._sent(post.send), self._take(post.recv, post.message)
            hops.append(HopOf(cast(Hop, post.route), send.framed, recv.framed))
            pairs.append((send, recv))
            after += last_uses(send, recv)
        self.in_flight += 1
        end = self._among(op.ranks).post_together(op.channel, op.posts[0].step, hops, after=after)
        if end is not None:
            for send, recv in pairs:
                send.sent.append(end)
                recv.written, recv.sent = end, []
        return end

    def wait(self, op: ops.Wait) -> None:
        self.in_flight -= 1
        (self.transport if op.ranks is None else self.transport.sub(op.ranks)).wait(op.channel)

    def join(self, op: ops.Join) -> None:
        self.transport.join(op.channel, self.device)

    def inner(self, op: ops.Inner) -> None:
        sinks = self.sinks
        if sinks is not None and op.sinks is not None:
            sinks = sinks[op.sinks]
        inputs = {inner: self.tensors[outer] for inner, outer in op.inputs}
        run = self.another(op.program, op.spec, inputs, self._among(op.ranks), sinks)
        run.in_flight = self.in_flight
        run.all()
        for inner, outer in op.results:
            self.tensors[outer] = run.tensors[inner]
        if run.dsinks is not None:
            if self.dsinks is None:
                self.dsinks = torch.zeros_like(cast(Tensor, self.sinks))
            self.dsinks[op.sinks or slice(None)] = run.dsinks
        if run.max_logits is not None:
            self._note_maxima(op.sinks, run.max_logits)

    def another(
        self,
        program: Program,
        spec: AttentionSpec,
        inputs: dict[str, Tensor],
        transport: Transport,
        sinks: Tensor | None,
    ) -> Run:
        """Return a run of an inner program."""
        return Run(program, spec, self.scores, self.backend, inputs, transport, sinks)

    # -- attention

    def _sinks(self, heads: slice | None) -> Tensor | None:
        if self.sinks is None or heads is None:
            return None
        return self.sinks.to(self.spec.accum_dtype)[heads]

    def start(self, op: ops.Start) -> None:
        self._heads = op.sinks
        self._state = self.backend.new_state(self.get(op.q), op.headdim_v, self._sinks(op.sinks))

    def attend(self, op: ops.Attend) -> None:
        tiles = op.tiles.listed
        if not tiles:
            return
        q, k, v = self.get(op.q), self.get(op.k), self.get(op.v)
        transport = self.transport
        self._state = self.backend.forward(
            q,
            k,
            v,
            tiles,
            self._state,
            scores=self.scores,
            last=op.last and not self.spec.max_logits,
            spare_sms=transport.spare_sms + self.in_flight * transport.sms_per_exchange,
        )

    def decode(self, op: ops.Decode) -> None:
        q, k, v = self.get(op.q), self.get(op.k), self.get(op.v)
        if op.sequences is None:
            out, lse = self.backend.decode(q, k, v, op.tiles, scores=self.scores)
        else:
            out, lse = self.backend.decode_sequences(
                q, k, v, op.sequences, *map(self.get, op.tables), scores=self.scores
            )
        self.tensors |= {"partial out": out, "partial lse": lse}

    def finish(self, op: ops.Finish) -> None:
        state, self._state = self._state, None
        if self.spec.max_logits:
            self._note_maxima(self._heads, self.backend.max_logits(state))
        self.tensors[op.out], self.tensors[op.lse] = self.backend.finalize(
            state, op.out_array.dtype
        )

    def _note_maxima(self, heads: slice | None, values: Tensor) -> None:
        if self.max_logits is None:
            self.max_logits = values.new_full((self.spec.nheads,), -torch.inf)
        part = self.max_logits[heads or slice(None)]
        part.copy_(torch.maximum(part, values))

    def delta(self, op: ops.Delta) -> None:
        tensors, lse = self.tensors, self.tensors["lse"]
        converted, delta = self.backend.row_statistics(tensors["out"], tensors["dout"], lse)
        tensors["lse"], tensors["delta"] = converted, delta
        if self.sinks is not None:
            self.dsinks = sinks_gradient(self.sinks, lse, delta)

    def differentiate(self, op: ops.Differentiate) -> None:
        tiles = op.tiles.listed
        if not tiles:
            return
        q, dout, lse, delta = map(self.get, op.q_side)
        k, v = map(self.get, op.kv)
        inputs = BackwardInputs(q, k, v, dout, lse.contiguous(), delta.contiguous())
        dq = None if op.dq is None else self.get(op.dq)
        dk, dv = (None, None) if op.dkv is None else map(self.get, op.dkv)
        backend, in_one_pass = self.backend, self.program.in_one_pass
        whole = op.part == "all" and in_one_pass
        if backend.in_order and not whole:
            add = partial(
                backend.backward, inputs, tiles, scores=self.scores, in_one_pass=in_one_pass
            )
            q_half, kv_half = partial(add, (dq, None, None)), partial(add, (None, dk, dv))
            halves = {"q": (q_half,), "kv": (kv_half,), "all": (kv_half, q_half)}
            streams.side_by_side(self.device, self._side, *halves[op.part])
        elif dq is not None and dk is not None and dv is not None:
            out = None if op.out is None else self.get(op.out)
            backend.backward(
                inputs, tiles, (dq, dk, dv), scores=self.scores, out=out, in_one_pass=in_one_pass
            )
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
        out, lse = self._held(op.buffer).tensors
        merged = self.backend.merge(out, lse, self.sinks, self.tensors["q"].dtype)
        self.tensors[op.out], self.tensors[op.lse] = merged
        del out, lse
        self._give(op.buffer)


class Observed(Run):
    """A run whose ops an observer times, each in a range of its name."""

    observer: Observer

    def all(self) -> None:
        self._posted: dict[Channel, Moment] = {}
        super().all()
        self.observer.begin_step(None)

    def another(
        self,
        program: Program,
        spec: AttentionSpec,
        inputs: dict[str, Tensor],
        transport: Transport,
        sinks: Tensor | None,
    ) -> Run:
        run = Observed(program, spec, self.scores, self.backend, inputs, transport, sinks)
        run.observer = self.observer
        return run

    def step(self, op: ops.Step) -> None:
        self.observer.begin_step(op.number)

    def post(self, op: ops.Post) -> Event | None:
        start = self.observer.mark()
        with self.observer.span("post"):
            end = super().post(op)
        self._note_post(op, start, end)
        return end

    def post_together(self, op: ops.PostTogether) -> Event | None:
        start = self.observer.mark()
        with self.observer.span("post"):
            end = super().post_together(op)
        self._note_post(op, start, end)
        return end

    def _note_post(self, op: ops.Post | ops.PostTogether, start: Moment, end: Event | None) -> None:
        if self._among(op.ranks).world_size > 1:
            self._posted[op.channel] = start
            self.observer.sent(start, end)

    def wait(self, op: ops.Wait) -> None:
        with self.observer.span("wait"):
            super().wait(op)
        if self._among(op.ranks).world_size > 1:
            self.observer.landed(self._posted.pop(op.channel))

    def attend(self, op: ops.Attend) -> None:
        if not op.tiles:
            return
        with self.observer.span("attend"):
            super().attend(op)

    def differentiate(self, op: ops.Differentiate) -> None:
        if not op.tiles:
            return
        with self.observer.span("attend"):
            super().differentiate(op)

    def decode(self, op: ops.Decode) -> None:
        with self.observer.span("attend"):
            super().decode(op)

    def finish(self, op: ops.Finish) -> None:
        with self.observer.span("finalize"):
            super().finish(op)

    def delta(self, op: ops.Delta) -> None:
        with self.observer.span("delta"):
            super().delta(op)

    def merge(self, op: ops.Merge) -> None:
        with self.observer.span("merge"):
            super().merge(op)


def _rows_of(entry: Tensor, copy: Copy) -> Tensor:
    if copy.rows is None:
        return entry
    return entry[:, copy.rows] if entry.ndim == 4 else entry[:, :, copy.rows]
