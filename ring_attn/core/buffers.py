"""In which buffers a rank's messages lie, and when each may be used again: pure data.

A `Schedule` says for every step of a plan what is done with a few numbered buffers before and after
it is computed. There is one for the shards, and one for their gradients in either of two orders.
The driver carries them out; how many buffers they take is known without it.

    shards, 8 ranks, inner_degree 4    step   0    1    2    3    4    5    6    7
        held                                 own   b2   b3   b2   b1   b0   b1   b0
        the inner ring brings                 b2   b3   b2        b0   b1   b0
        the outer ring sends                  b0------------->
        and brings                            b1------------->

Gradients that are added up go round in the inner ring one step behind their shards, anew in every
round, and at its end straight home. That hop alone is between nodes, and it takes place while the
next round is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ring_attn.core.plan import Plan, Transfer


@dataclass(frozen=True)
class Pack:
    """Puts the rank's own rows that travel into a buffer."""

    buffer: int


@dataclass(frozen=True)
class Clear:
    """Fills the message of a step with zeros."""

    buffer: int
    step: int


@dataclass(frozen=True)
class Post:
    """Starts an exchange; neither buffer is touched until it has been waited for."""

    transfer: Transfer
    send: int
    recv: int


@dataclass(frozen=True)
class Wait:
    """Until the exchange that was posted last on the outer or the inner ring is complete."""

    outer: bool


@dataclass(frozen=True)
class Add:
    """Adds one buffer to another, both with the message of a step."""

    into: int
    buffer: int
    step: int


@dataclass(frozen=True)
class Return:
    """Adds a buffer to the rank's own rows that travelled, or puts it in their place."""

    buffer: int
    replace: bool


Move = Pack | Clear | Post | Wait | Add | Return


@dataclass(frozen=True)
class BufferStep:
    """What is done at one step.

    Attributes:
        held: the buffer that the step reads, or adds its gradients to; None is the rank's own.
        before: moves without which `held` cannot be used; or that are to be hidden by the step.
        after: moves when the step has been computed.
    """

    held: int | None
    before: tuple[Move, ...] = ()
    after: tuple[Move, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """All steps, and what is done when they are over."""

    num_buffers: int
    steps: tuple[BufferStep, ...]
    end: tuple[Move, ...] = ()


@lru_cache(maxsize=4096)
def shard_schedule(plan: Plan) -> Schedule:
    """Two buffers for a plain ring; three or four where an outer ring sends during a whole round.

    A shard is kept until it has been computed with and all that send it have been waited for. The
    wait for the next step's shard is the last move of a step.

    Example:
        >>> from ring_attn import SequenceLayout
        >>> from ring_attn.core.mask import Mask
        >>> from ring_attn.core.plan import plan_ring
        >>> layout, mask = SequenceLayout.zigzag(64, 8), Mask(64, 64, causal=True)
        >>> [
        ...     shard_schedule(plan_ring(layout, layout, mask, 0, inner_degree=n)).num_buffers
        ...     for n in (1, 2, 4, 8)
        ... ]
        [2, 3, 4, 2]
    """
    if not plan.num_hops:
        return Schedule(0, (BufferStep(None),))
    pool, transfers = _Pool(), plan.shard_transfers
    coming = {transfer.brings: transfer for transfer in transfers}
    until = {step.index: step.index for step in plan.steps}
    for transfer in transfers:
        until[transfer.sends] = max(until[transfer.sends], transfer.brings - 1)
    buffers, steps = {0: pool.take()}, []
    for index, step in enumerate(plan.steps):
        before: list[Move] = [] if index else [Pack(buffers[0])]
        for transfer in step.posts:
            buffers[transfer.brings] = pool.take()
            before.append(Post(transfer, buffers[transfer.sends], buffers[transfer.brings]))
        after = (Wait(coming[index + 1].outer),) if index + 1 in coming else ()
        steps.append(BufferStep(buffers[index] if index else None, tuple(before), after))
        for done in [held for held in buffers if until[held] == index]:
            pool.give(buffers.pop(done))
    return Schedule(pool.size, tuple(steps))


@lru_cache(maxsize=4096)
def gradient_schedule(plan: Plan, *, continued: bool = False) -> Schedule:
    """One buffer to compute into, one to receive, one that is sent; two more on the outer ring.

    Args:
        plan: of the backward.
        continued: gradients start at their owner and every rank computes into what it has received,
            for which two buffers do; otherwise ranks compute into zeros, and add what arrives.
    """
    if not plan.num_hops:
        return Schedule(0, (BufferStep(None),))
    return _continued(plan) if continued else _added(plan)


def _continued(plan: Plan) -> Schedule:
    pool, steps = _Pool(), []
    held = pool.take()
    for step, transfer in zip(plan.steps, plan.gradient_transfers(continued=True), strict=True):
        ready = Wait(outer=False) if step.index else Pack(held)
        # With tiles dQ can be computed first, while what is waited for is on its way; the owner's
        # own gradients are sent when they are computed.
        before = (ready,) if step.index and step.tiles else ()
        recv = pool.take()
        after = (*(() if before else (ready,)), Post(transfer, held, recv))
        steps.append(BufferStep(held if step.index else None, before, after))
        # Free when the next step has waited, which it does before it takes one.
        pool.give(held)
        held = recv
    return Schedule(pool.size, tuple(steps), (Wait(outer=False), Return(held, replace=True)))


def _added(plan: Plan) -> Schedule:
    pool, steps = _Pool(), [BufferStep(None)]
    under_way: dict[bool, Post] = {}

    def land(outer: bool) -> Iterator[Move]:
        post = under_way.pop(outer)
        yield Wait(outer)
        pool.give(post.send)
        if post.transfer.brings == 0:
            yield Return(post.recv, replace=False)
            pool.give(post.recv)

    for step, transfer in zip(plan.steps[1:], plan.gradient_transfers(), strict=True):
        index, after = step.index, list[Move]()
        computed = pool.take() if step.tiles else None
        before = () if computed is None else (Clear(computed, index),)
        arrived = [p.recv for p in under_way.values() if p.transfer.brings == index]
        for outer, post in list(under_way.items()):
            if outer == transfer.outer or post.transfer.brings == index:
                after += land(outer)
        carried = computed
        for received in arrived:
            if computed is None:
                carried = received
            else:
                after.append(Add(computed, received, index))
                pool.give(received)
        if carried is None:
            carried = pool.take()
            after.append(Clear(carried, index))
        under_way[transfer.outer] = Post(transfer, carried, pool.take())
        after.append(under_way[transfer.outer])
        steps.append(BufferStep(computed, before, tuple(after)))
    end = tuple(move for outer in list(under_way) for move in land(outer))
    return Schedule(pool.size, tuple(steps), end)


class _Pool:
    """Numbers of buffers, the least first; as many as are ever taken at a time."""

    def __init__(self) -> None:
        self.size = 0
        self._free: set[int] = set()

    def take(self) -> int:
        """A free buffer."""
        if not self._free:
            self._free.add(self.size)
            self.size += 1
        buffer = min(self._free)
        self._free.remove(buffer)
        return buffer

    def give(self, buffer: int) -> None:
        """Frees a buffer."""
        self._free.add(buffer)
