"""Calls that nobody follows by another one: `check`, and who calls it, on NCCL's stand-in.

There an error of a call is raised by a later one, so that of the last call would be silent.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn import TransportOptions, check, ring_attention, sync_gradients
from ring_attn.testing import Case, run_rank
from ring_attn.transport import streams
from ring_attn.transport.p2p import check_pending
from ring_attn.transport.ranks import group as ranks_group
from ring_attn.transport.ranks.group import rank_group
from ring_attn.transport.ranks.links import Posted
from tests.distributed.pool import FAR, Ended, ended, on_ranks
from tests.refusals import says

RANKS, ODD = 3, 1
OTHER = "messages of another call"


def call(group: dist.ProcessGroup | None, x: Tensor, *, odd: bool = False) -> Tensor:
    """A call, in which the odd rank may have another scale."""
    scale = 3.0 if odd and dist.get_rank() == ODD else 0.5
    options = TransportOptions(timeout=FAR)
    return ring_attention(x, x, x, softmax_scale=scale, group=group, transport=options)


def last_call(then: Callable[[dist.ProcessGroup, nn.Parameter], object]) -> Ended:
    """How `then` ends after a last call that differs."""
    group, x = dist.new_group(), nn.Parameter(torch.ones(1, 4, 2, 8))
    call(group, x)
    check(group)
    with torch.no_grad():
        call(group, x, odd=True)
    return ended(lambda: then(group, x))


def checks(group: dist.ProcessGroup, _: nn.Parameter) -> None:
    check(group)


def syncs(_: dist.ProcessGroup, x: nn.Parameter) -> None:
    x.grad = torch.ones_like(x)
    sync_gradients([x])


@pytest.mark.parametrize("then", [checks, syncs])
def test_a_last_call_that_differs_is_reported(
    fresh_ranks: Callable[..., Any], then: Callable[..., object]
) -> None:
    """On every rank: those that met no other call hear of it from those that did."""
    ends = fresh_ranks(RANKS, queued=True).run(last_call, then)
    assert {end.error for end in ends} == {RuntimeError}, ends
    assert all(OTHER in end.text for end in ends), ends


def right_and_checked(case: Case) -> None:
    run_rank(case)
    check()


def test_a_header_is_written_again_where_a_message_was_received(
    fresh_ranks: Callable[..., Any],
) -> None:
    """A double ring sends from a buffer to several ranks, and receives into it between."""
    pool = fresh_ranks(4, queued=True)
    for mask, layout in (
        ("spans", "contiguous"),
        ("sink window", "zigzag"),
        ("longer kv", "contiguous"),
    ):
        pool.run(right_and_checked, Case(mask, layout, "double_ring", "reference"))


@pytest.mark.queued
@on_ranks(2)
def test_a_group_is_compared_without_others() -> None:
    """A Trainer compares its own group: of another one, ranks may not all have calls to compare."""
    mine, other = dist.new_group(), dist.new_group()
    for group in (mine, other):
        call(group, torch.ones(1, 4, 2, 8))
    rank_group(other).calls.unchecked = dist.get_rank() == 0
    check_pending(mine)
    # On a device that the host waits for, calls compare themselves.
    assert rank_group(mine).calls.unchecked != streams.are_used(torch.device("cpu"))
    assert rank_group(other).calls.unchecked == (dist.get_rank() == 0)
    rank_group(other).calls.unchecked = False  # for later tests in these processes


@pytest.mark.queued
@on_ranks(RANKS)
def test_gradients_wait_for_no_rank_outside_their_group() -> None:
    """A rank of another group is elsewhere: what that group has to compare waits for it."""
    other, mine, ended_group = dist.new_group([0, 1]), dist.new_group([0, 2]), dist.new_group()
    call(ended_group, torch.ones(1, 4, 2, 8))
    dist.destroy_process_group(ended_group)  # but the test holds it
    if dist.get_rank() in (0, 1):
        call(other, torch.ones(1, 4, 2, 8))
    if dist.get_rank() in (0, 2):
        x = nn.Parameter(torch.ones(3))
        x.grad = torch.ones_like(x)
        sync_gradients([x], mine)
        assert torch.equal(x.grad, torch.full_like(x, 2))
    dist.barrier()
    if dist.get_rank() in (0, 1):
        check(other)


@pytest.mark.queued
@on_ranks(RANKS)
def test_calls_that_agree_pass() -> None:
    """Gradients are summed as without a ring; `check` and calls may alternate."""
    group, x = dist.new_group(), nn.Parameter(torch.ones(1, 4, 2, 8))
    check(group)  # nothing to compare
    for _ in range(2):
        call(group, x).sum().backward()
        check(group)
        check(group)
    x.grad = torch.ones_like(x)
    call(group, x)
    sync_gradients([x], group)
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, RANKS))


def logged_at(end: Callable[[dist.ProcessGroup], object]) -> str:
    """What a rank logs when its group ends after a last call that differs."""
    group, x = dist.new_group(), torch.ones(1, 4, 2, 8)
    call(group, x, odd=True)
    with mock.patch.object(ranks_group.logger, "error") as said:
        end(group)
        del group
    return " ".join(str(one.args) for one in said.call_args_list)


def leaves(_: dist.ProcessGroup) -> None:
    atexit._run_exitfuncs()


@pytest.mark.parametrize("end", [dist.destroy_process_group, leaves])
def test_the_end_of_a_group_tells_of_its_last_call(
    fresh_ranks: Callable[..., Any], end: Callable[..., object]
) -> None:
    """The odd rank and the next one met other calls; the group's end can raise nothing."""
    said = fresh_ranks(RANKS, queued=True).run(logged_at, end)
    for rank in (ODD, ODD + 1):
        assert says(said[rank], f"{OTHER}|global rank {rank}"), said


def fails_while_another_waits() -> None:
    """A rank, whose exchange does not end, refuses a call as another has failed."""
    x = torch.ones(1, 4, 2, 8)
    call(None, x)
    world = dist.group.WORLD
    assert world is not None
    shared = rank_group(world)
    if dist.get_rank() == ODD:
        shared.failure.fail("out of memory")  # as an error within a call does
    else:
        channel = next(iter(shared.connection.links["cpu"].channels.values()))  # type: ignore[attr-defined]
        never: Any = SimpleNamespace(differs=lambda: None)
        channel.posted.append(Posted(0, "shards", ODD, time.monotonic(), never, never))
        while shared.failure.error is None:
            time.sleep(0.1)
        assert "out of memory" in ended(lambda: call(None, x)).text


def test_the_note_of_a_failure_is_read_before_the_timeout(
    fresh_ranks: Callable[..., Any],
) -> None:
    fresh_ranks(2, queued=True).run(fails_while_another_waits)
