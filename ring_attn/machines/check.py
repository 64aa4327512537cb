"""Check the programs of all ranks of a call against each other, without running them.

    messages   every send has its receive: order, bytes, peer and channel; collectives agree
    order      all ranks of a group post their exchanges in the same order; no rank waits for an
               exchange that is never posted
    buffers    between post and wait no op writes the sent buffer or touches the received one;
               each buffer is taken once, freed once, and freed after its last use
    tensors    are made once, and before they are used; every result is made
    work       all visible pairs of all heads are computed, once

Use it to develop a strategy: `ring-attn plan --check`, or `check(programs)` in a test.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ring_attn.call import Call
from ring_attn.core import program as ops
from ring_attn.core.program import Channel, Entry, Op, Operand, Program, View, part_of_heads
from ring_attn.core.spec import AttentionSpec


class Fault(NamedTuple):
    """A defect of a program: "message", "order", "buffer", "tensor" or "work".

    `rank` None is all programs together; `op` counts the ops of inner programs too.
    """

    kind: str
    rank: int | None
    op: int | None
    text: str

    def __str__(self) -> str:
        where = "all ranks" if self.rank is None else f"rank {self.rank}"
        at = "" if self.op is None else f", op {self.op}"
        return f"{self.kind}: {where}{at}: {self.text}"


def check(programs: Sequence[Program], call: Call | None = None) -> list[Fault]:
    """Return the faults in the programs of all ranks.

    Without a call, the work is not checked.
    """
    everyone = tuple(range(len(programs)))
    faults: list[Fault] = []
    lines = []
    for rank, program in enumerate(programs):
        line = list(_flat(program, everyone, _Scope("")))
        lines.append(line)
        faults += _Tracking(rank, line).faults(program)
    faults += _check_order(lines)
    faults += _check_messages(lines)
    if call is not None and not faults:
        faults += _check_work(programs, call)
    return faults


# -- flat programs


class _Scope(NamedTuple):
    """Outer names of an inner program's tensors: a prefix, and pairs (inner name, outer name)."""

    prefix: str
    outside: tuple[tuple[str, str], ...] = ()

    def name(self, name: str) -> str:
        return dict(self.outside).get(name, f"{self.prefix}{name}")


class _Line(NamedTuple):
    """An op, the ranks of its program as ranks of the call, and the scope of its names."""

    op: Op
    ranks: tuple[int, ...]
    scope: _Scope


def _flat(program: Program, ranks: tuple[int, ...], scope: _Scope) -> Iterator[_Line]:
    for number, op in enumerate(program.ops):
        if not isinstance(op, ops.Inner):
            yield _Line(op, ranks, scope)
            continue
        among = ranks if op.ranks is None else tuple(ranks[r] for r in op.ranks)
        names = {**dict(op.results), **dict(op.inputs)}
        outside = tuple((inner, scope.name(outer)) for inner, outer in names.items())
        yield _Line(op, ranks, scope)
        yield from _flat(op.program, among, _Scope(f"{scope.prefix}{number}/", outside))


def _members(line: _Line) -> tuple[int, ...]:
    """Return the ranks, numbered as in the call, that take part in a post or wait."""
    ranks = getattr(line.op, "ranks", None)
    return line.ranks if ranks is None else tuple(line.ranks[r] for r in ranks)


# -- one rank


class _Tracking:
    """The buffers and tensors of one rank, followed op by op."""

    def __init__(self, rank: int, lines: Sequence[_Line]) -> None:
        self._rank, self._lines = rank, lines
        self._faults: list[Fault] = []
        self._held: set[str] = set()
        self._sent: Counter[str] = Counter()
        self._received: set[str] = set()
        # Names of the buffers that are sent and received, by group and channel.
        self._under_way: dict[tuple[tuple[int, ...], Channel], list[tuple[str, str]]] = {}
        self._tensors: set[str] = set()
        self._at = 0

    def faults(self, program: Program) -> list[Fault]:
        self._tensors = set(program.arrays)
        for at, line in enumerate(self._lines):
            self._at = at
            self._do(line)
        for _, channel in self._under_way:
            self._fault("order", f"the exchange on {channel!r} is never waited for")
        for name in sorted(self._held):
            self._fault("buffer", f"buffer {name!r} is never freed")
        results = ("dq", "dk", "dv") if program.backward else ("out", "lse", *program.saved)
        for name in results:
            if name not in self._tensors:
                self._fault("tensor", f"result {name!r} is never made")
        return self._faults

    def _fault(self, kind: str, text: str) -> None:
        self._faults.append(Fault(kind, self._rank, self._at, text))

    def _do(self, line: _Line) -> None:
        op, scope = line.op, line.scope
        effects = ops.effects(op)
        for operand in effects.reads:
            self._read(operand, scope)
        for operand in effects.writes:
            self._write(operand, scope)
        for buffer in effects.takes:
            self._take(scope.name(buffer.name))
        if isinstance(op, ops.Post | ops.PostTogether):
            self._post(op, line)
        elif isinstance(op, ops.Wait):
            self._wait(op, line)
        for buffer in effects.frees:
            self._free(scope.name(buffer.name))
        for name in effects.drops:
            self._drop(scope.name(name))
        for name in effects.makes:
            self._make(op, scope.name(name))

    def _take(self, name: str) -> None:
        if name in self._held:
            self._fault("buffer", f"buffer {name!r} is taken while it is in use")
        self._held.add(name)

    def _free(self, name: str) -> None:
        if name not in self._held:
            self._fault("buffer", f"buffer {name!r} is freed and was not in use")
        if name in self._received or self._sent[name]:
            self._fault("buffer", f"buffer {name!r} is freed before its exchange is waited for")
        self._held.discard(name)

    def _drop(self, name: str) -> None:
        self._use_tensor(name, "dropped")
        self._tensors.discard(name)

    def _make(self, op: Op, name: str) -> None:
        if name in self._tensors and not isinstance(op, ops.Assign | ops.Round):
            self._fault("tensor", f"{name!r} is made again")
        self._tensors.add(name)

    def _use_tensor(self, name: str, how: str) -> None:
        if name not in self._tensors:
            self._fault("tensor", f"{name!r} is {how} and does not exist")

    def _use_buffer(self, name: str, how: str) -> None:
        if name in self._received:
            self._fault("buffer", f"buffer {name!r} is {how} before its message has arrived")
        elif name not in self._held:
            self._fault("buffer", f"buffer {name!r} is {how} and not in use")

    def _read(self, operand: Operand, scope: _Scope) -> None:
        if isinstance(operand, View):
            self._use_tensor(scope.name(operand.name), "read")
        else:
            self._use_buffer(scope.name(operand.buffer.name), "read")

    def _write(self, operand: Operand, scope: _Scope) -> None:
        self._read(operand, scope)
        if isinstance(operand, Entry) and self._sent[scope.name(operand.buffer.name)]:
            self._fault("buffer", f"buffer {operand.buffer.name!r} is written while it is sent")

    def _post(self, op: ops.Post | ops.PostTogether, line: _Line) -> None:
        key = _members(line), op.channel
        if key in self._under_way:
            self._fault("order", f"channel {op.channel!r} has an exchange under way")
        self._under_way[key] = []
        for post in ops.posts_of(op):
            send, recv = line.scope.name(post.send.name), line.scope.name(post.recv.name)
            self._use_buffer(send, "sent")
            self._take(recv)
            self._under_way[key].append((send, recv))
            self._sent[send] += 1
            self._received.add(recv)

    def _wait(self, op: ops.Wait, line: _Line) -> None:
        pairs = self._under_way.pop((_members(line), op.channel), None)
        if pairs is None:
            self._fault("order", f"nothing is under way on channel {op.channel!r}")
            return
        for send, recv in pairs:
            self._sent[send] -= 1
            self._received.discard(recv)


# -- all ranks

# The members of a group, a channel, a sender and a receiver.
_Way = tuple[tuple[int, ...], Channel, int, int]


class _Part(NamedTuple):
    """A message of an exchange: its bytes, and the line of its post."""

    nbytes: int
    at: int


class _Needed(NamedTuple):
    """A message that a wait needs: number `number` of the parts of a peer."""

    peer: int
    parts: list[_Part]
    number: int


def _check_order(lines: Sequence[Sequence[_Line]]) -> Iterator[Fault]:
    """Find groups whose members do not all make the same exchanges in one order."""
    orders: dict[tuple[int, ...], dict[int, list[tuple[str, str]]]] = defaultdict(dict)
    for rank, rank_lines in enumerate(lines):
        for line in rank_lines:
            if isinstance(line.op, ops.Post | ops.PostTogether | ops.Join):
                exchange = line.op.channel, _kind(line.op)
                orders[_members(line)].setdefault(rank, []).append(exchange)
    for members, by_rank in orders.items():
        first = by_rank.get(members[0], [])
        for rank in members[1:]:
            if by_rank.get(rank, []) != first:
                text = f"exchanges among ranks {members} differ from those of rank {members[0]}"
                yield Fault("order", rank, None, text)


def _kind(op: ops.Post | ops.PostTogether | ops.Join) -> str:
    """Return what must be equal on all ranks of an exchange, beside its channel."""
    if isinstance(op, ops.PostTogether):
        return " and ".join(post.channel for post in op.posts)
    if isinstance(op, ops.Post) and isinstance(op.route, ops.Collective):
        return op.route.op
    return "shift"


def _check_messages(lines: Sequence[Sequence[_Line]]) -> list[Fault]:
    """Find messages of which sender and receiver disagree, else ranks that wait forever."""
    messages = _Messages()
    for rank, rank_lines in enumerate(lines):
        messages.add_rank(rank, rank_lines)
    return messages.faults() or _stuck(lines, messages.needed)


class _Messages:
    """The messages of all ranks.

    Attributes:
        sent, received: parts in order, by way.
        needed: messages that a wait needs, by its rank and line.
    """

    def __init__(self) -> None:
        self.sent: dict[_Way, list[_Part]] = defaultdict(list)
        self.received: dict[_Way, list[_Part]] = defaultdict(list)
        self.needed: dict[tuple[int, int], list[_Needed]] = {}

    def add_rank(self, rank: int, lines: Sequence[_Line]) -> None:
        """Add the messages of a rank's program."""
        buffers: dict[str, int] = {}  # bytes of the message that a buffer holds
        exchanges: dict[tuple[tuple[int, ...], Channel], deque[list[_Needed]]]
        exchanges = defaultdict(deque)
        for at, line in enumerate(lines):
            op, scope = line.op, line.scope
            if isinstance(op, ops.Pack | ops.Clear):
                buffers[scope.name(op.buffer.name)] = op.message.nbytes
            elif isinstance(op, ops.Post | ops.PostTogether):
                members = _members(line)
                needed: list[_Needed] = []
                for post in ops.on_channel(op):
                    buffers[scope.name(post.recv.name)] = post.message.nbytes
                    nbytes = buffers.get(scope.name(post.send.name), -1)
                    needed += self._post(post, members, rank, at, nbytes)
                exchanges[members, op.channel].append(needed)
            elif isinstance(op, ops.Wait):
                under_way = exchanges[_members(line), op.channel]
                if under_way:
                    self.needed[rank, at] = under_way.popleft()

    def _post(
        self, op: ops.Post, members: tuple[int, ...], rank: int, at: int, nbytes: int
    ) -> list[_Needed]:
        """Add the parts of an exchange that sends `nbytes`; return what its wait needs."""
        needed = []
        for to, count in _parts(op, members, rank, nbytes, sends=True):
            way = members, op.channel, rank, to
            needed.append(_Needed(to, self.received[way], len(self.sent[way])))
            self.sent[way].append(_Part(count, at))
        for source, count in _parts(op, members, rank, op.message.nbytes, sends=False):
            way = members, op.channel, source, rank
            needed.append(_Needed(source, self.sent[way], len(self.received[way])))
            self.received[way].append(_Part(count, at))
        return needed

    def faults(self) -> list[Fault]:
        """Return the ways whose sender sends other messages than their receiver expects."""
        faults = []
        for way in sorted({*self.sent, *self.received}, key=str):
            sent = [part.nbytes for part in self.sent[way]]
            received = [part.nbytes for part in self.received[way]]
            if sent != received:
                _, channel, source, to = way
                text = f"sends {sent} bytes to rank {to} on {channel!r}, which receives {received}"
                faults.append(Fault("message", source, None, text))
        return faults


def _stuck(
    lines: Sequence[Sequence[_Line]], needed: Mapping[tuple[int, int], list[_Needed]]
) -> list[Fault]:
    """Advance all ranks as far as their waits allow, and report the ranks that do not end."""
    done = [0] * len(lines)
    moved = True
    while moved:
        moved = False
        for rank, rank_lines in enumerate(lines):
            while done[rank] < len(rank_lines) and all(
                done[one.peer] > one.parts[one.number].at
                for one in needed.get((rank, done[rank]), ())
            ):
                done[rank] += 1
                moved = True
    return [
        Fault("order", rank, at, "waits for ever")
        for rank, at in enumerate(done)
        if at < len(lines[rank])
    ]


def _parts(
    op: ops.Post, members: tuple[int, ...], rank: int, nbytes: int, *, sends: bool
) -> Iterator[tuple[int, int]]:
    """Yield peers and bytes of the parts that a rank sends, or receives, in an exchange."""
    route = op.route
    if isinstance(route, ops.Hop):
        yield members[route.send_to if sends else route.recv_from], nbytes
        return
    others = [(index, member) for index, member in enumerate(members) if member != rank]
    for index, member in others:
        if route.op == "all_to_all":
            counts = route.send_counts if sends else route.recv_counts
            yield member, counts[index]
        elif route.op == "all_gather":
            yield member, nbytes if sends else nbytes // len(members)
        else:
            yield member, nbytes // len(members) if sends else nbytes


def _check_work(programs: Sequence[Program], call: Call) -> Iterator[Fault]:
    """Find passes in which all ranks together do not compute the mask's pairs in every head."""
    expected = sum(call.layouts[0].mask_area(call.mask)) * call.spec.nheads
    passes: Counter[str] = Counter()
    for program in programs:
        add_work(program, call.spec, passes)
    for name, computed in passes.items():
        if computed != expected:
            text = f"{name}: {computed} pairs of all heads, expected {expected}"
            yield Fault("work", None, None, text)


def add_work(program: Program, spec: AttentionSpec, passes: Counter[str]) -> None:
    """Add the pairs x heads that a program attends and differentiates to `passes`."""
    for op in program.ops:
        if isinstance(op, ops.Inner):
            add_work(op.program, op.spec, passes)
        elif isinstance(op, ops.Attend | ops.Differentiate):
            pairs = sum(tile.area for tile in op.tiles) * part_of_heads(op, spec).nheads
            if isinstance(op, ops.Attend):
                passes["attended"] += pairs
                continue
            if op.part in ("all", "q"):
                passes["differentiated by q"] += pairs
            if op.part in ("all", "kv"):
                passes["differentiated by k and v"] += pairs
