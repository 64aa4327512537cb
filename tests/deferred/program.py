"""The records of all ranks: which accesses can race, and runs in any order.

    program = Program(recorders)
    program.races()                # unordered accesses to the same bytes
    program.run(schedule)          # the results of one order; fresh memory is poison
    program.stuck()                # what can never finish

A transfer becomes several steps: its start; a read of each message, at any time after the sender's
start; a write of each message, at any time after the read and the receiver's start; and its end.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest

import torch
from torch import Tensor

from tests.deferred.device import Memory, Node, Recorder, Ref, Transfer


@dataclass(eq=False)
class Step:
    kind: str  # "run" for a node; "start", "read", "write", "end" of a transfer, or its "abort"
    node: Node
    rank: int
    after: list[Step]  # steps that must be done before
    reads: Sequence[Ref] = ()
    writes: Sequence[Ref] = ()
    source: Step | None = None  # of a write

    @property
    def needs(self) -> list[Step]:
        """Steps without which this one is never done: an abort ends a transfer at any time."""
        cut = self.kind == "end" and isinstance(self.node, Transfer) and self.node.aborted
        return self.after[:1] if cut else self.after

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.node.what}"


class Program:
    def __init__(self, ranks: Sequence[Recorder]) -> None:
        self.ranks = ranks
        self.number: dict[Step, int] = {}
        self.starts: dict[Node, Step] = {}
        self.ends: dict[Node, Step] = {}
        self.parts: dict[Transfer, list[Step]] = {}  # reads and writes of a transfer
        self.unmatched: set[str] = set()
        # Names of a message's communicator, sender and receiver.
        sent: dict[tuple[str, int, int], list[Step]] = defaultdict(list)
        received: dict[tuple[str, int, int], list[Step]] = defaultdict(list)
        for rank, recorder in enumerate(ranks):
            for node in recorder.nodes:
                after = [self.ends[one] for one in node.after]
                if isinstance(node, Transfer):
                    self._add_transfer(node, rank, after, sent, received)
                else:
                    step = self._add(Step("run", node, rank, after, node.reads, node.writes))
                    self.starts[node] = self.ends[node] = step
        for key in sent.keys() | received.keys():
            for read, write in zip_longest(sent[key], received[key]):
                if read is None or write is None:
                    self.unmatched.add((read or write).node.what)
                if write is not None:
                    write.source = read
                    # No step is done before a step that comes after itself.
                    write.after.append(read or write)
                if read is not None and write is not None:
                    assert read.reads[0].nbytes == write.writes[0].nbytes, f"{read} meets {write}"
        aborted = {
            (step.rank, node.communicator): node
            for node, step in self.starts.items()
            if isinstance(node, Transfer) and node.aborted
        }
        for (rank, _), last in aborted.items():
            self._add(Step("abort", last, rank, [self.ends[one] for one in last.cut_after]))

    def _add(self, step: Step) -> Step:
        self.number[step] = len(self.number)
        return step

    def _add_transfer(
        self,
        node: Transfer,
        rank: int,
        after: list[Step],
        sent: dict[tuple[str, int, int], list[Step]],
        received: dict[tuple[str, int, int], list[Step]],
    ) -> None:
        # The contents of a receive buffer are undefined until the message is complete.
        poisoned = [ref for ref, _ in (*node.receives, *node.sums)]
        start = self.starts[node] = self._add(Step("start", node, rank, after, (), poisoned))
        reads = [self._add(Step("read", node, rank, [start], [ref])) for ref, _ in node.sends]
        writes = [self._add(Step("write", node, rank, [start], (), [x])) for x, _ in node.receives]
        for read, (_, peer) in zip(reads, node.sends, strict=True):
            sent[node.communicator, node.member, peer].append(read)
        for write, (_, peer) in zip(writes, node.receives, strict=True):
            received[node.communicator, peer, node.member].append(write)
        self.parts[node] = [*reads, *writes]
        end = Step("end", node, rank, [start, *self.parts[node]])
        end.reads = [part for _, parts in node.sums for part in parts]
        end.writes = [target for target, _ in node.sums]
        self.ends[node] = self._add(end)

    # -- every order at once

    def before(self) -> dict[Step, int]:
        """For every step that is ever done, as bits: the steps that are done before."""
        before: dict[Step, int] = {}
        order = Order({step: step.needs for step in self.number})
        while order.ready:
            step = next(iter(order.ready))
            before[step] = 0
            for one in step.needs:
                before[step] |= before[one]
            for one in step.after:  # messages do not move after an abort
                before[step] |= 1 << self.number[one]
            order.finish(step)
        return before

    def stuck(self) -> list[str]:
        before = self.before()
        return sorted({str(step) for step in self.number if step not in before})

    def races(self) -> list[str]:
        """Pairs of accesses to the same bytes, at least one a write, in no fixed order."""
        before = self.before()
        accesses: dict[tuple[int, int], list[tuple[Step, Ref, bool]]] = defaultdict(list)
        for step in before:
            for refs, writes in ((step.reads, False), (step.writes, True)):
                for ref in refs:
                    accesses[step.rank, ref.memory].append((step, ref, writes))
        found = []
        for some in accesses.values():
            for (a, ref_a, writes_a), (b, ref_b, writes_b) in combinations(some, 2):
                if a is b or not (writes_a or writes_b):
                    continue
                in_order = before[b] >> self.number[a] & 1 or before[a] >> self.number[b] & 1
                if not in_order and _overlap(ref_a, ref_b):
                    one, other = (
                        f"{step} {'writes' if writes else 'reads'}"
                        for step, writes in ((a, writes_a), (b, writes_b))
                    )
                    found.append(f"{one} while {other}")
        return found

    # -- one order

    def run(self, schedule: Schedule) -> list[dict[str, Tensor]]:
        """The results that all ranks reach, in the order that a schedule chooses."""
        run = Run(self)
        while run.ready:
            run.do(schedule(run, list(run.ready)))
        return run.results()


def same(some: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> bool:
    return all(
        a.keys() == b.keys()
        and all(a[name].view(torch.uint8).equal(b[name].view(torch.uint8)) for name in a)
        for a, b in zip(some, others, strict=True)
    )


Schedule = Callable[["Run", "list[Step]"], "Step"]


class Order:
    """Steps that are done, and those that can be done next."""

    def __init__(self, needs: dict[Step, list[Step]]) -> None:
        self.done: set[Step] = set()
        self._missing = {step: len(before) for step, before in needs.items()}
        self._next: dict[Step, list[Step]] = defaultdict(list)
        for step, before in needs.items():
            for one in before:
                self._next[one].append(step)
        self.ready = dict.fromkeys(step for step, missing in self._missing.items() if not missing)

    def finish(self, step: Step) -> None:
        self.ready.pop(step, None)
        self.done.add(step)
        for one in self._next[step]:
            self._missing[one] -= 1
            if not self._missing[one]:
                self.ready[one] = None

    def drop(self, step: Step) -> None:
        """Makes sure that a step is never done, unless it has been."""
        self.ready.pop(step, None)
        self._missing[step] = -1


class Run(Order):
    """Runs one order, on memories of its own."""

    def __init__(self, program: Program) -> None:
        super().__init__({step: step.after for step in program.number})
        self.program = program
        self.memories = [[_initial(m) for m in rank.memories] for rank in program.ranks]
        self._messages: dict[Step | None, Tensor] = {}
        self._aborted: set[tuple[int, str]] = set()

    def do(self, step: Step) -> None:
        node, memories = step.node, self.memories[step.rank]
        if not isinstance(node, Transfer):
            assert node.run is not None
            node.run(memories)
            self.finish(step)
            return
        place = step.rank, node.communicator
        if step.kind == "abort":
            self._aborted.add(place)
        elif step.kind == "start" and place not in self._aborted:
            for ref in step.writes:
                _bytes(ref, memories).fill_(0xFF)
        elif step.kind == "read":
            self._messages[step] = _bytes(step.reads[0], memories).clone()
        elif step.kind == "write":
            _bytes(step.writes[0], memories).copy_(self._messages[step.source])
        elif step.kind == "end":
            for target, parts in node.sums:
                total = target.of(memories).zero_()
                for part in parts:
                    total += part.of(memories)
        self.finish(step)
        if step.kind in ("start", "abort") and place in self._aborted:
            self._cut(*place)

    def _cut(self, rank: int, communicator: str) -> None:
        """Ends the transfers that are under way on a communicator of a rank."""
        for node, parts in self.program.parts.items():
            start, end = self.program.starts[node], self.program.ends[node]
            here = start.rank == rank and node.communicator == communicator
            if here and start in self.done and end not in self.done:
                for part in parts:
                    self.drop(part)
                self.finish(end)

    def is_sent(self, node: Transfer) -> bool:
        return all(x in self.done for x in self.program.parts[node] if x.kind == "read")

    def results(self) -> list[dict[str, Tensor]]:
        return [
            {
                name: ref.of(memories).clone()
                for name, (ref, node) in rank.results.items()
                if self.program.ends[node] in self.done
            }
            for rank, memories in zip(self.program.ranks, self.memories, strict=True)
        ]


def in_host_order(run: Run, ready: list[Step]) -> Step:
    """Takes the step that a host has queued first."""
    return min(ready, key=run.program.number.__getitem__)


def at_random(seed: int) -> Schedule:
    """Chooses steps at random; a stream or a message stays fast or slow for a while."""
    rng = random.Random(seed)
    speeds: dict[object, float] = defaultdict(rng.random)

    def choose(run: Run, ready: list[Step]) -> Step:
        if rng.random() < 0.02:
            speeds.clear()
        aborts = [step for step in ready if step.kind == "abort"]
        if aborts and (len(aborts) == len(ready) or rng.random() < 0.004):
            return rng.choice(aborts)
        ready = [step for step in ready if step.kind != "abort"]
        if rng.random() < 0.2:
            return rng.choice(ready)
        return max(ready, key=lambda step: speeds[step.rank, step.kind, step.node.stream])

    return choose


def _bytes(ref: Ref, memories: Sequence[Tensor]) -> Tensor:
    return ref.of(memories).view(-1).view(torch.uint8)


def _initial(memory: Memory) -> Tensor:
    if memory.initial is None:
        return torch.full((memory.nbytes,), 0xFF, dtype=torch.uint8)
    return torch.from_numpy(memory.initial.copy())


def _extent(ref: Ref) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(ref.shape, ref.stride, strict=True))
    return ref.offset, ref.offset + (last + 1) * ref.dtype.itemsize


def _overlap(a: Ref, b: Ref) -> bool:
    if 0 in a.shape or 0 in b.shape:
        return False
    (lo_a, hi_a), (lo_b, hi_b) = _extent(a), _extent(b)
    return lo_a < hi_b and lo_b < hi_a
