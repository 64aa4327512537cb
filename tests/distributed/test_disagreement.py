"""Ranks that are not in the same call: all of them raise, none computes.

With RING_ATTN_DEBUG=1 every rank learns which rank differs in which argument before anything is
sent; otherwise the messages show it. Each trial has its own process group.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attn import (
    SequenceLayout,
    TransportOptions,
    halo,
    prepare,
    ring_attention,
    set_step,
    tree_decode,
    unshard,
)
from ring_attn.testing.cases import strategy_of
from ring_attn.transport.p2p import P2PTransport, open_p2p
from tests.distributed.differing import (
    DECODES,
    DIFFERENT,
    HAPPENED,
    MORE,
    ODD,
    ROWS,
    SEQLEN,
    STRATEGIES,
    TIMEOUT,
    WORLD_SIZE,
    Arguments,
    call,
    decode,
    do,
    documents,
)
from tests.distributed.pool import FAR, ended, everyone, on_ranks, roomy
from tests.drawn import scattered
from tests.refusals import refused, says

pytestmark = pytest.mark.gloo


# How the errors begin where ranks are in different calls.
HEADS = {
    "refused": r"global rank \d refused the call: ValueError: ",
    "backwards swapped": "ranks run their backwards in different orders; call: ",
    "backward left out": r"global ranks? .* skipped a backward, or made one call more",
}


def check(strategy: str, odd_rank: int, names: Iterable[str]) -> None:
    """Differs in every way, each in a group of its own."""
    odd = dist.get_rank() == odd_rank
    for name in names:
        group = dist.new_group()
        if strategy == "decode":
            run = partial(decode, group, **DECODES[name][odd])
        else:
            how = {"strategy": strategy_of(strategy, WORLD_SIZE)}
            if name in DIFFERENT:
                run = partial(call, group, **how | DIFFERENT[name][odd])
            else:
                run = partial(do, group, HAPPENED[name][odd], **how)
        reported = everyone(ended(run))
        dist.destroy_process_group(group)
        planned = strategy == "auto" or "rows" in name
        if planned and all(one.error is ValueError for one in reported):
            continue  # the ranks raised before they sent anything
        assert all(one.error is RuntimeError for one in reported), (strategy, name, reported)
        # On a busy machine ranks may not even meet in time, which also raises on all of them;
        # test_failures tests how rings are formed.
        met = not any("could not form the ring" in one.text for one in reported)
        if name != "late" and met:
            # Some rank has seen the reason, and reported it to the others.
            # Where only one side's call compares rows first, the calls themselves differ.
            head = HEADS.get(name, "ranks (disagree on the call|are in different calls);")
            head = rf"(strategy='auto': [^:]*: )?{head}"
            assert all(re.match(head, one.text) for one in reported), (strategy, name, reported)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.sweep(8)
@on_ranks(WORLD_SIZE)
def test_values_and_moments(strategy: str) -> None:
    """Differences that change no size, and one that makes a message longer than its buffer."""
    check(strategy, 2, ["values of sinks", "backwards swapped", "more rows"])


@on_ranks(WORLD_SIZE)
def test_decodes_that_differ() -> None:
    check("decode", 2, DECODES)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(len(STRATEGIES)))
@on_ranks(WORLD_SIZE)
def test_every_difference(turn: int) -> None:
    """The differences are dealt out among the strategies; the first or the last rank is odd."""
    check(STRATEGIES[turn], 3 * (turn % 2), [*DIFFERENT, *HAPPENED][turn :: len(STRATEGIES)])


@contextmanager
def debug(value: str | None = "1") -> Iterator[None]:
    with mock.patch.dict(os.environ):
        os.environ.pop("RING_ATTN_DEBUG", None)
        if value is not None:
            os.environ["RING_ATTN_DEBUG"] = value
        yield


LONG, OTHER_LONG = scattered(0, 1, 2, 3), scattered(1, 0, 2, 3)


@pytest.mark.parametrize("strategy", ["all_gather", "ulysses", "decode", "halo", "unshard"])
@on_ranks(WORLD_SIZE)
def test_layouts_with_one_text_differ(strategy: str) -> None:
    """Texts of long layouts are cut, and halo needs the same dim and shape, too."""
    odd = dist.get_rank() == ODD
    layout = OTHER_LONG if odd else LONG
    assert str(LONG) == str(OTHER_LONG)
    x = torch.ones(1, layout.shard_len(dist.get_rank()), 4, 8)
    for reported in ("", f"global rank {ODD} has another "):
        group = dist.new_group()
        runs = {
            "decode": partial(tree_decode, x[:, :2], x, x, layout=layout, group=group),
            "halo": partial(halo, x, layout, 1, group=group),
            "unshard": partial(unshard, x, layout, group=group),
        }
        with debug("1" if reported else None):
            got = ended(runs.get(strategy, partial(call, group, strategy=strategy, layout=layout)))
        assert got.error is (ValueError if reported else RuntimeError) and reported in got.text, got
    if strategy == "halo":
        group = dist.new_group()
        shape = (1, 6, 8) if odd else (2, 6, 4)
        got = ended(
            lambda: halo(torch.ones(shape), SequenceLayout.contiguous(24, 4), 1, group=group)
        )
        assert got.error is RuntimeError and "dim and shape" in got.text, got


@pytest.mark.parametrize("formed", [True, False])
@on_ranks(WORLD_SIZE)
def test_a_refusal_is_reported_at_once(formed: bool) -> None:
    """The others need not wait for the timeout, though the refusing rank makes no other call.

    At the first call of a group, here behind one that all refuse, they wait for its connections.
    """
    group, rank = dist.new_group(), dist.get_rank()
    if formed:
        call(group)
    else:
        with refused(ValueError, "softcap"):
            call(group, softcap=-1.0 - rank)
    if rank == ODD:
        with refused(ValueError, "softcap"):
            call(group, softcap=-1.0)
        everyone(None)
        return
    got = ended(partial(call, group, transport=TransportOptions(timeout=FAR)))
    everyone(None)
    assert got.error is RuntimeError, got
    assert says(got.text, f"rank {ODD} refused the call: ValueError: softcap"), got


@pytest.mark.parametrize("last", [0, 2, 3])
@on_ranks(WORLD_SIZE)
def test_many_refusals_hide_no_call(last: int) -> None:
    """A rank refuses more calls than it reports, then makes the others' next one."""
    rank, group = dist.get_rank(), dist.new_group()
    transport = TransportOptions(timeout=FAR)
    call(group, transport=transport)
    for _ in range(20 if rank == ODD else last):
        with refused(ValueError, "softmax_scale"):
            call(group, softmax_scale=float("nan"))
    with pytest.raises(RuntimeError, match="refused the call: |left its call|failed before"):
        call(group, transport=transport)


@pytest.mark.parametrize("strategy", ["ring", "auto"])
@on_ranks(WORLD_SIZE)
def test_uneven_rows_without_a_layout(strategy: str) -> None:
    """Refused before anything is sent; the next calls run, with a layout and without."""
    group, odd = dist.new_group(), dist.get_rank() == ODD
    layout = SequenceLayout.boundaries([0, 6, 14, 20, 26])
    with refused(ValueError, "SequenceLayout|global rank 1 has 8 rows|the other 3 have 6"):
        call(group, rows=8 if odd else ROWS, strategy=strategy)
    call(group, layout=layout, strategy=strategy)
    call(group, strategy=strategy)
    stats = open_p2p(group, TransportOptions(timeout=TIMEOUT)).stats
    assert stats.messages > 0


@pytest.mark.parametrize("formed", [True, False])
@on_ranks(WORLD_SIZE)
def test_refusals_by_other_words_are_no_difference(formed: bool) -> None:
    """All ranks refuse a call, each its own value: the next call runs, however long it waits."""
    group, rank = dist.new_group(), dist.get_rank()
    if formed:
        call(group)
    with refused(ValueError, "softcap"):
        call(group, softcap=-1.0 - rank)
    if rank == ODD:
        time.sleep(0.5)  # the others look at its notes
    call(group)


@pytest.mark.parametrize("steps", [(0, 2, 3), (0, 1, 1, 2)], ids=["left out", "repeated"])
@on_ranks(WORLD_SIZE)
def test_a_rank_that_skips_a_step(steps: tuple[int, ...]) -> None:
    """All calls are equal: only the number of the step tells which one a rank leaves out."""
    group = dist.new_group()

    def train() -> None:
        for step in steps if dist.get_rank() == ODD else range(4):
            set_step(step)
            call(group, transport=TransportOptions(timeout=FAR))

    try:
        got = ended(train)
    finally:
        set_step(None)
    assert got.error is RuntimeError, got
    # A rank compares its call with that of one other rank.
    assert says(got.text, "step: global rank|has 2|has 1|skipped or repeated a step"), got


# -- debug mode


@on_ranks(WORLD_SIZE)
def test_every_rank_reports_who_differs_in_what() -> None:
    stats = open_p2p(dist.group.WORLD, TransportOptions(timeout=TIMEOUT)).stats  # type: ignore[arg-type]
    before = stats.messages
    for name, arguments in DIFFERENT.items():
        with debug():
            got = ended(partial(call, None, **arguments[dist.get_rank() == ODD]))
        assert (got.error, stats.messages) == (ValueError, before), (name, got)
        assert says(got.text, arguments[2]), (name, got.text)
        # Only differing arguments are named.
        named = {part.partition(":")[0] for part in got.text.split("; ")[1:]}
        expected = {part.partition(":")[0] for part in arguments[2].split("|") if ":" in part}
        assert named >= expected and (named == expected or name in MORE), (name, named)
        assert not any(f"global rank {innocent} has" in got.text for innocent in (0, 2, 3)), (
            name,
            got,
        )
    with debug(), refused(ValueError, "causal: global rank 1 has False"):  # before the ranks choose
        call(None, strategy="auto", causal=dist.get_rank() != ODD)
    with debug(), refused(ValueError, "1.0|2.0|3.0|4.0"):
        call(None, softmax_scale=1.0 + dist.get_rank())
    with debug(), refused(ValueError, "call: global rank 1 has backward"):
        do(None, HAPPENED["backwards swapped"][dist.get_rank() == ODD])


@on_ranks(WORLD_SIZE)
def test_ranks_that_agree_run() -> None:
    """With the check the ranks compare each forward and backward; the result is the same."""
    layout, other = SequenceLayout.boundaries([0, 3, 3, 20, SEQLEN]), TransportOptions(timeout=20)
    calls = ({}, {"layout": layout}, {"cu_seqlens": documents(5, 11)}, {"transport": other})
    outs = []
    for value in ("1", "yes", None, "0", ""):
        with (
            mock.patch.object(
                P2PTransport, "compare", autospec=True, side_effect=P2PTransport.compare
            ) as compare,
            debug(value),
        ):
            outs.append([call(None, **one) for one in calls])
        assert compare.call_count == (8 if value in ("1", "yes") else 0), value
    assert all(all(map(torch.equal, outs[0], one)) for one in outs)


@pytest.mark.parametrize("kind", ["call", "decode", "auto", "prepare"])
@on_ranks(WORLD_SIZE)
def test_a_rank_that_makes_no_call_is_named(kind: str) -> None:
    """The others stop at the call's timeout, long before the group's; all but the last in debug."""
    options = TransportOptions(timeout=roomy(1.5))
    group = dist.new_group()
    if dist.get_rank() == ODD:
        return
    bad: Arguments = {"auto": {"strategy": "auto"}, "decode": {"causal": False}}.get(kind, {})
    run = tree_decode if kind == "decode" else ring_attention
    call = partial(run, *3 * [torch.ones(1, 4, 2, 8)], transport=options, group=group, **bad)
    with debug(None if kind in ("auto", "prepare") else "1"):
        got = ended(partial(prepare, group, transport=options) if kind == "prepare" else call)
    assert got.error is RuntimeError, got
    assert says(got.text, f"[{ODD}] did not arrive within {options.timeout:g} s"), got.text


@on_ranks(2)
def test_the_first_position_that_differs_is_named() -> None:
    """In a call whose messages show it, and with the check before the call."""
    rank = dist.get_rank()
    layout = SequenceLayout.zigzag(16, 2) if rank else SequenceLayout.contiguous(16, 2)
    x = torch.ones(1, 8, 2, 8)
    for value in (None, "1"):
        group = dist.new_group()
        with debug(value):
            got = ended(partial(ring_attention, x, x, x, layout=layout, group=group))
        assert got.error is (ValueError if value else RuntimeError), got
        assert "(position 4 is row 4 of the group's rank 0 on global rank 0, " in got.text, got
        assert got.text.startswith("ranks disagree on the call; layout: "), got


@pytest.mark.parametrize(("formed", "late"), [(True, False), (False, False), (True, True)])
@on_ranks(2)
def test_groups_in_another_order_are_named(formed: bool, late: bool) -> None:
    """Each rank waits in one group for the other, at the first calls of the groups or later.

    A late rank begins to wait in the second half of the other's timeout.
    """
    groups, rank = [dist.new_group(), dist.new_group()], dist.get_rank()
    options = TransportOptions(timeout=roomy(1.5))
    if formed:
        for group in groups:
            call(group)
    if late and rank == 1:
        time.sleep(0.7 * (options.timeout or 0.0))
    got = everyone(ended(partial(call, groups[rank], transport=options)))
    assert all(one.error is RuntimeError for one in got), got
    # A rank whose time is up first has closed its connections, which the other one sees.
    first = got[:1] if late else got
    named = [x.text for x in first if "of another group, the group of global ranks" in x.text]
    assert named and "in the same order on every rank" in named[0], got


@on_ranks(2)
def test_functions_that_differ_are_named() -> None:
    """Both ranks compare numbers of rows first, each in its own call."""
    group, x = dist.new_group(), torch.ones(1, 4, 2, 8)
    run = tree_decode if dist.get_rank() else ring_attention
    got = everyone(ended(partial(run, x, x, x, group=group)))
    assert all(says(x.text, "ring_attention|tree_decode|Make the same calls") for x in got), got


@on_ranks(2)
def test_a_backward_left_out_is_named() -> None:
    """A rank ends after its forward: nothing is known of it but that it does not wait."""
    group, rank = dist.new_group(), dist.get_rank()
    out = call(group, backward=False, transport=TransportOptions(timeout=roomy(1.0)))
    got = ended(lambda: out.sum().backward()) if rank == 0 else None
    dist.barrier()
    if got is not None:
        assert got.error is RuntimeError, got
        words = "global rank 1 did not run backward|skipped this backward|0 * out.sum()|Noticed in"
        assert says(got.text, words), got
