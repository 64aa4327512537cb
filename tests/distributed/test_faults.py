"""An exception in the middle of a call: an error on every rank then and later, never a result.

Raises at each event of a call (each exchange posted, each wait, each computation), on every choice
of ranks; all ranks catch the error and call again.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ring_attn
from ring_attn import TransportOptions, ring_attention, tree_decode
from ring_attn.backends import get_backend
from ring_attn.core.strategy import NAMES
from ring_attn.testing.cases import strategy_of
from ring_attn.transport.p2p import P2PTransport
from tests.distributed.pool import ended, everyone, on_ranks

pytestmark = pytest.mark.gloo

WORLD_SIZE = 4
ROWS = 5
TIMEOUT = 10.0
Group = dist.ProcessGroup

CASES = [*NAMES, "decode"]
# Made here, because an interrupt within our constructors is not within a call.
STRATEGIES = {name: strategy_of(name, WORLD_SIZE) for name in NAMES}
OPTIONS = TransportOptions(timeout=TIMEOUT)
SOON = TransportOptions(timeout=8.0)
PACKAGE = Path(ring_attn.__file__).parent


class Fault(Exception):
    """Raised on purpose."""


def shards(batch: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * batch + dist.get_rank())
    return [torch.randn(1, ROWS, 4, 8, generator=generator).requires_grad_() for _ in range(3)]


def run(
    case: str, group: Group, batch: int = 0, options: TransportOptions = OPTIONS
) -> list[Tensor]:
    q, k, v = shards(batch)
    if case == "decode":
        queries = torch.full((1, 1, 4, 8), 0.5 + batch)
        return [tree_decode(queries, k.detach(), v.detach(), group=group, transport=options)]
    out = ring_attention(
        q, k, v, causal=True, group=group, strategy=STRATEGIES[case], transport=options
    )
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


@contextmanager
def events(at: int | None = None) -> Iterator[list[str]]:
    """Notes the events of this rank's calls, and raises at one of them."""
    seen, backend = list[str](), type(get_backend("aten"))

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(function.__name__)
            if len(seen) - 1 == at:
                raise Fault(f"at event {at}")
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, names in (
            (P2PTransport, ("_start", "wait")),
            (backend, ("forward", "finalize", "row_statistics", "backward")),
        ):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name))))
        yield seen


CHOICES = [odd for n in (1, 2, 3) for odd in combinations(range(WORLD_SIZE), n)]


@pytest.mark.parametrize(
    ("case", "every"),
    [
        *((case, 17) for case in CASES[::2]),
        *(pytest.param(case, 3, marks=pytest.mark.slow) for case in CASES),
    ],
)
@on_ranks(WORLD_SIZE, timeout=280)
def test_a_fault_anywhere_on_any_ranks(case: str, every: int) -> None:
    """Each trial has its own group; a rank with fewer events raises at its last event."""
    with events() as counted:
        expected = run(case, dist.new_group())
    for at in range(CASES.index(case) % 3, max(everyone(len(counted))), every):
        # 14 choices in steps of 5: neighbouring events have other ranks, and other numbers of them.
        odd = CHOICES[5 * at % len(CHOICES)]
        group, got = dist.new_group(), list[Tensor]()
        run(case, group)  # connected
        with events(min(at, len(counted) - 1) if dist.get_rank() in odd else None):
            first = ended(lambda group=group, got=got: got.extend(run(case, group)))
        second = ended(lambda group=group: run(case, group))
        where = (case, at, odd, first, second)
        if dist.get_rank() in odd:
            # Another rank's fault may have come before this rank's own.
            assert first.error in (Fault, RuntimeError), where
        else:
            # A call that was complete on this rank before the fault has right results.
            is_right = len(got) == len(expected) and all(map(torch.equal, got, expected))
            assert first.error is RuntimeError or is_right, where
        assert second.error is RuntimeError, where
        assert first.seconds < TIMEOUT and second.seconds < TIMEOUT, where
        dist.destroy_process_group(group)


# -- interrupts


def is_inside(frame: FrameType | None) -> bool:
    """Whether an interrupt at this frame is inside a call, not between two calls.

    On the first line of a function, and in the decorator that keeps it out of graphs, nothing of
    the call has run: to the ranks such an interrupt is before the call.
    """
    while frame is not None:
        code = frame.f_code
        if Path(code.co_filename).is_relative_to(PACKAGE):
            decorator = Path(code.co_filename).name == "compiling.py"
            return not decorator and frame.f_lineno != code.co_firstlineno
        frame = frame.f_back
    return False


@pytest.mark.parametrize("case", ["ring", "decode"])
@pytest.mark.parametrize("after_s", [0.001, pytest.param(0.0123, marks=pytest.mark.slow)])
@on_ranks(WORLD_SIZE)
def test_interrupts(case: str, after_s: float) -> None:
    """Rank 2, interrupted in one of many batches, continues with the next."""
    batches, reference = range(40), dist.new_group()
    expected = [run(case, reference, batch) for batch in batches]
    group = dist.new_group()

    def interrupt(_: int, frame: FrameType | None) -> None:
        if is_inside(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.0)  # once
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    log = []
    if dist.get_rank() == 2:
        # The timer fires again until it hits a call.
        signal.setitimer(signal.ITIMER_REAL, after_s, 0.0007)
    for batch in batches:
        try:
            got = run(case, group, batch, SOON)
        except (KeyboardInterrupt, RuntimeError) as error:
            log.append(type(error).__name__)
            continue
        log.append("right" if all(map(torch.equal, got, expected[batch])) else "WRONG")
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)
    dist.destroy_process_group(group)
    dist.destroy_process_group(reference)
    # Once a rank has been interrupted, every later call raises on every rank.
    first = next(i for i, one in enumerate(log) if one != "right")
    assert log[first] != "WRONG" and set(log[first + 1 :]) == {"RuntimeError"}, log
