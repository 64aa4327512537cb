"""The records of all ranks: which accesses can race, and runs in any order.

    program = Program(recorders)
    program.races()                # unordered accesses to the same bytes
    program.run(schedule)          # the results of one order; fresh memory is poison
    program.stuck()                # nodes that can never finish

A message is read at any time after the sender starts, and written at any later time after the
receiver starts.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from tests.deferred.device import OVERWRITE, Node, Recorder, Ref, Transfer


@dataclass(eq=False)
class Message:
    sender: Transfer
    source: Ref
    receiver: Transfer
    target: Ref


class Program:
    def __init__(self, ranks: Sequence[Recorder]) -> None:
        self.ranks = ranks
        self.nodes = [node for rank in ranks for node in rank.nodes]
        self.number = {node: i for i, node in enumerate(self.nodes)}
        self.rank_of = {node: r for r, rank in enumerate(ranks) for node in rank.nodes}
        self.transfers = [node for node in self.nodes if isinstance(node, Transfer)]
        self.messages = list(self._matched())
        self.incoming: dict[Node, list[Message]] = defaultdict(list)
        self.outgoing: dict[Node, list[Message]] = defaultdict(list)
        for message in self.messages:
            self.incoming[message.receiver].append(message)
            self.outgoing[message.sender].append(message)

    def _matched(self) -> Iterator[Message]:
        sent: dict[tuple[str, int, int], deque[tuple[Transfer, Ref]]] = defaultdict(deque)
        received: dict[tuple[str, int, int], deque[tuple[Transfer, Ref]]] = defaultdict(deque)
        for node in self.transfers:
            for ref, peer in node.sends:
                sent[node.communicator, node.member, peer].append((node, ref))
            for ref, peer in node.receives:
                received[node.communicator, peer, node.member].append((node, ref))
        self.unmatched = {
            node.what
            for key in sent.keys() | received.keys()
            for some, others in ((sent[key], received[key]), (received[key], sent[key]))
            for node, _ in list(some)[len(others) :]
        }
        self._alone = {
            node for key, some in received.items() for node, _ in list(some)[len(sent[key]) :]
        }
        for key, some in sent.items():
            for (sender, source), (receiver, target) in zip(some, received[key], strict=False):
                assert source.nbytes == target.nbytes, f"{sender.what} meets {receiver.what}"
                yield Message(sender, source, receiver, target)

    # -- every order at once

    def _before(self) -> dict[Node, int]:
        """For every node that ever starts, as bits: the nodes that are done before."""
        before: dict[Node, int] = {}
        done: dict[Node, int] = {}
        waiting = list(self.nodes)
        while waiting:
            left = []
            for node in waiting:
                if node not in before and all(one in done for one in node.after):
                    bits = 0
                    for one in node.after:
                        bits |= done[one]
                    before[node] = bits
                aborted = isinstance(node, Transfer) and node.aborted
                senders = [] if aborted else [message.sender for message in self.incoming[node]]
                ends = aborted or node not in self._alone
                if node in before and ends and all(one in before for one in senders):
                    bits = before[node] | 1 << self.number[node]
                    for one in senders:
                        bits |= before[one]
                    done[node] = bits
                else:
                    left.append(node)
            if len(left) == len(waiting):
                break
            waiting = left
        self._never = left if waiting else []
        return before

    def stuck(self) -> list[str]:
        self._before()
        return [f"rank {self.rank_of[node]}: {node.what}" for node in self._never]

    def races(self) -> list[str]:
        """Pairs of accesses to the same bytes, at least one a write, in no fixed order."""
        before = self._before()
        accesses: dict[tuple[int, int], list[tuple[Node, Ref, bool]]] = defaultdict(list)
        for node in before:
            rank = self.rank_of[node]
            for refs, writes in ((node.reads, False), (node.writes, True)):
                for ref in refs:
                    accesses[rank, ref.memory].append((node, ref, writes))
        found = []
        for (rank, _), some in accesses.items():
            for (a, ref_a, writes_a), (b, ref_b, writes_b) in combinations(some, 2):
                if a is b or not (writes_a or writes_b) or OVERWRITE in (a.what, b.what):
                    continue
                in_order = before[b] >> self.number[a] & 1 or before[a] >> self.number[b] & 1
                if not in_order and _overlap(ref_a, ref_b):
                    one, other = (
                        f"{node.what} {'writes' if writes else 'reads'}"
                        for node, writes in ((a, writes_a), (b, writes_b))
                    )
                    found.append(f"rank {rank}: {one} while {other}")
        return found

    # -- one order

    def run(self, schedule: Schedule) -> list[dict[str, Tensor]]:
        """The results that all ranks reach, in the order that a schedule chooses."""
        run = Run(self)
        while ready := run.ready():
            run.do(schedule(run, ready))
        return run.results()


def same(some: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> bool:
    return all(
        a.keys() == b.keys()
        and all(a[name].view(torch.uint8).equal(b[name].view(torch.uint8)) for name in a)
        for a, b in zip(some, others, strict=True)
    )


Schedule = Callable[["Run", "list[Action]"], "Action"]


@dataclass(frozen=True)
class Action:
    """A thing that a device can do next.

    To start a "node", "read" or "write" a message, or "abort" the node's communicator.
    """

    kind: str
    node: Node
    message: Message | None = None


class Run:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.memories = [[_initial(m) for m in rank.memories] for rank in program.ranks]
        self.started: set[Node] = set()
        self.done: set[Node] = set()
        self._missing = {node: len(node.after) for node in program.nodes}
        self._next: dict[Node, list[Node]] = defaultdict(list)
        for node in program.nodes:
            for one in node.after:
                self._next[one].append(node)
        self._read: dict[Message, Tensor] = {}
        self._written: set[Message] = set()
        self._ready = {
            Action("node", node): None for node, missing in self._missing.items() if not missing
        }
        self._aborted: set[tuple[int, str]] = set()
        aborted = {self._place(x): x for x in program.transfers if x.aborted}
        self._cuts = list(aborted.values())
        self._offer_cuts()

    def _offer_cuts(self) -> None:
        ready = [x for x in self._cuts if self.done.issuperset(x.cut_after)]
        self._cuts = [x for x in self._cuts if x not in ready]
        self._ready |= {Action("abort", node): None for node in ready}

    def ready(self) -> list[Action]:
        return list(self._ready)

    def do(self, action: Action) -> None:
        del self._ready[action]
        node, message = action.node, action.message
        if action.kind == "abort":
            self._abort(node)
        elif message is not None:
            self._move(action, message)
        elif not isinstance(node, Transfer):
            assert node.run is not None
            node.run(self.memories[self.program.rank_of[node]])
            self._finish(node)
        else:
            self._start(node)

    def _start(self, node: Transfer) -> None:
        self.started.add(node)
        if self._place(node) in self._aborted:
            self._finish(node)
            return
        for message in self.program.incoming[node]:
            # The contents of a receive buffer are undefined until the message is complete.
            self._view(node, message.target).fill_(0xFF)
            self._offer(message)
        for target, _ in node.sums:
            self._view(node, target).fill_(0xFF)
        for message in self.program.outgoing[node]:
            self._offer(message)
        self._finish_transfer(node)

    def _place(self, node: Transfer) -> tuple[int, str]:
        return self.program.rank_of[node], node.communicator

    def _abort(self, node: Transfer) -> None:
        """Ends all transfers on a communicator of a rank: those under way, and later ones."""
        place = self._place(node)
        self._aborted.add(place)
        for one in self.program.transfers:
            if self._place(one) == place and one in self.started - self.done:
                for action in [action for action in self._ready if action.node is one]:
                    del self._ready[action]
                self._finish(one)

    def _offer(self, message: Message) -> None:
        going = self.started - self.done
        if message.sender in going and message not in self._read:
            self._ready[Action("read", message.sender, message)] = None
        if message.receiver in going and message in self._read and message not in self._written:
            self._ready[Action("write", message.receiver, message)] = None

    def _move(self, action: Action, message: Message) -> None:
        if action.kind == "read":
            self._read[message] = self._view(message.sender, message.source).clone()
        else:
            self._view(message.receiver, message.target).copy_(self._read[message])
            self._written.add(message)
        self._offer(message)
        self._finish_transfer(message.sender)
        self._finish_transfer(message.receiver)

    def _finish_transfer(self, node: Transfer) -> None:
        if node not in self.started or node in self.done | self.program._alone:
            return
        if not self._written.issuperset(self.program.incoming[node]) or not self.is_sent(node):
            return
        memories = self.memories[self.program.rank_of[node]]
        for target, parts in node.sums:
            total = target.of(memories)
            total.zero_()
            for part in parts:
                total += part.of(memories)
        self._finish(node)

    def _finish(self, node: Node) -> None:
        self.done.add(node)
        if self._cuts:
            self._offer_cuts()
        for one in self._next[node]:
            self._missing[one] -= 1
            if not self._missing[one]:
                self._ready[Action("node", one)] = None

    def _view(self, node: Node, ref: Ref) -> Tensor:
        x = ref.of(self.memories[self.program.rank_of[node]])
        return x.view(-1).view(torch.uint8)

    def is_sent(self, node: Transfer) -> bool:
        return self._read.keys() >= set(self.program.outgoing[node])

    def results(self) -> list[dict[str, Tensor]]:
        return [
            {
                name: ref.of(memories).clone()
                for name, (ref, node) in rank.results.items()
                if node in self.done
            }
            for rank, memories in zip(self.program.ranks, self.memories, strict=True)
        ]


def in_host_order(run: Run, ready: list[Action]) -> Action:
    """Takes the action whose node a host has queued first."""
    number = run.program.number
    return min(ready, key=lambda action: number[action.node])


def at_random(seed: int) -> Schedule:
    """Chooses actions at random; a stream or a message stays fast or slow for a while."""
    rng = random.Random(seed)
    speeds: dict[object, float] = {}

    def choose(run: Run, ready: list[Action]) -> Action:
        if rng.random() < 0.02:
            speeds.clear()
        aborts = [action for action in ready if action.kind == "abort"]
        if aborts and (len(aborts) == len(ready) or rng.random() < 0.004):
            return rng.choice(aborts)
        ready = [action for action in ready if action.kind != "abort"]
        if rng.random() < 0.2:
            return rng.choice(ready)

        def speed(action: Action) -> float:
            key = run.program.rank_of[action.node], action.kind, action.node.stream
            if key not in speeds:
                speeds[key] = rng.random()
            return speeds[key]

        return max(ready, key=speed)

    return choose


def _initial(memory: object) -> Tensor:
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
