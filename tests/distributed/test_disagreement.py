"""Ranks that are not in the same call: all of them raise, none computes.

With RING_ATTN_DEBUG=1 every rank learns which rank differs in which argument before anything is
sent; otherwise the messages show it. Each trial has its own process group in the same four
processes; a group does not survive a message that is longer than its buffer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout, TransportOptions, masks, ops, ring_attention, tree_decode
from ring_attn.testing.cases import strategy_of
from ring_attn.transport.p2p import open_p2p
from ring_attn.transport.ranks import media
from tests.distributed.pool import Ended, Pools, ended, on_ranks
from tests.refusals import refused as refused_by_name

pytestmark = pytest.mark.gloo

WORLD_SIZE = 4
ROWS = 6
SEQLEN = WORLD_SIZE * ROWS
TIMEOUT = 4.0
Arguments = dict[str, Any]
Group = dist.ProcessGroup | None

STRATEGIES = ("ring", "double_ring", "all_gather", "ulysses", "hybrid", "q_exchange", "auto")


def tensors(
    batch: int = 1,
    rows: int = ROWS,
    nheads: int = 4,
    nheads_kv: int = 4,
    headdim: int = 8,
    headdim_v: int = 8,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    shapes = [(nheads, headdim), (nheads_kv, headdim), (nheads_kv, headdim_v)]
    return [torch.ones(batch, rows, *one, dtype=dtype, requires_grad=True) for one in shapes]


def documents(*boundaries: int) -> Tensor:
    return torch.tensor([0, *boundaries, SEQLEN], dtype=torch.int32)


# -- two ways to call: the odd rank uses the second, with as many bytes where possible

USUAL: Arguments = {"causal": True, "softmax_scale": 0.25, "layout": "contiguous"}
SINKS = torch.tensor([0.5, -1.0, 0.0, 2.0])
WITH_GRADIENT = torch.zeros(4, requires_grad=True)
BOUNDARIES = SequenceLayout.boundaries([0, 5, 11, 17, SEQLEN - 1])

# name -> arguments added to `USUAL` by most ranks, arguments added by the odd rank, and the error
# in debug mode if the odd rank is rank 1.
DIFFERENT: dict[str, tuple[Arguments, Arguments, str]] = {
    "dtype of one size": (
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16},
        "dtype: rank 1 has torch.bfloat16, the other 3 have torch.float16",
    ),
    "dtype": ({}, {"dtype": torch.float64}, "dtype: rank 1 has torch.float64"),
    "rows": (
        {},
        {"rows": ROWS + 2},
        "seqlen_q: rank 1 has 32, the other 3 have 24; seqlen_k: rank 1 has 32",
    ),
    "more rows": ({}, {"rows": 5 * ROWS}, "seqlen_q: rank 1 has 120; seqlen_k: rank 1 has 120"),
    "heads and headdim": (
        {},
        {"nheads": 8, "nheads_kv": 8, "headdim": 4},
        "nheads: rank 1 has 8; nheads_kv: rank 1 has 8; headdim: rank 1 has 4, the other 3 have 8",
    ),
    "kv heads": ({}, {"nheads_kv": 2}, "nheads_kv: rank 1 has 2, the other 3 have 4"),
    "scale": ({}, {"softmax_scale": 0.5}, "softmax_scale: rank 1 has 0.5, the other 3 have 0.25"),
    "softcap": ({"softcap": 5.0}, {"softcap": 6.0}, "softcap: rank 1 has 6.0, the other 3 have 5"),
    "values of sinks": ({"sinks": SINKS}, {"sinks": SINKS.flip(0)}, "values of sinks: rank 1 has"),
    "sinks": ({}, {"sinks": SINKS}, "sinks: rank 1 has True, the other 3 have False"),
    "causal": ({}, {"causal": False}, "causal: rank 1 has False, the other 3 have True"),
    "window": (
        {"window_size": (9, 0)},
        {"window_size": (7, 0)},
        "window_size: rank 1 has (7, 0), the other 3 have (9, 0)",
    ),
    "documents": (
        {"cu_seqlens": documents(9)},
        {"cu_seqlens": documents(10)},
        "cu_seqlens: rank 1 has (0, 10, 24), the other 3 have (0, 9, 24)",
    ),
    "mask": (
        {"causal": False, "mask": masks.spans(SEQLEN, [(3, 9)])},
        {"causal": False, "mask": masks.spans(SEQLEN, [(3, 10)])},
        "mask: rank 1 has",
    ),
    "layout": ({}, {"layout": BOUNDARIES}, "layout: rank 1 has ('boundaries([0, 5, 11, 17, 23])'"),
    "gradient": ({}, {"requires_grad": False}, "requires_grad: rank 1 has False"),
    "strategy": ({}, {"strategy": "all_gather"}, "strategy: rank 1 has"),
}

# More differences for debug mode: without it they behave like the differences above.
COMPARED: dict[str, tuple[Arguments, Arguments, str]] = {
    "batch": ({}, {"batch": 2}, "batch: rank 1 has 2, the other 3 have 1"),
    "nheads": ({}, {"nheads": 8}, "nheads: rank 1 has 8, the other 3 have 4"),
    "headdim": ({}, {"headdim": 16}, "headdim: rank 1 has 16, the other 3 have 8"),
    "headdim_v": ({}, {"headdim_v": 16}, "headdim_v: rank 1 has 16, the other 3 have 8"),
    "gradient of the sinks": (
        {"requires_grad": False},
        {"requires_grad": False, "sinks": WITH_GRADIENT},
        "requires_grad: rank 1 has True, the other 3 have False",
    ),
    "named layout": ({}, {"layout": "zigzag"}, "layout: rank 1 has ('zigzag(seqlen=24"),
    "documents of keys": (
        {},
        {"cu_seqlens": documents(), "cu_seqlens_k": documents()},
        "cu_seqlens: rank 1 has (0, 24); cu_seqlens_k: rank 1 has (0, 24), the other 3 have None",
    ),
    "backend": ({}, {"backend": "reference"}, "backend: rank 1 has 'reference', the other"),
    "timeout": ({}, {"transport": TransportOptions(timeout=20)}, "transport: rank 1 has"),
    "two things": (
        {},
        {"causal": False, "softmax_scale": 0.5},
        "causal: rank 1 has False; softmax_scale: rank 1 has 0.5",
    ),
}
# Differences for which the error names more arguments than those listed.
MORE = ("rows", "more rows", "layout", "documents", "documents of keys", "softcap", "sinks",
        "gradient of the sinks", "strategy", "heads and headdim")  # fmt: skip


def call(group: Group, **arguments: Any) -> Tensor:
    """A forward and its backward."""
    given = {**USUAL, "transport": TransportOptions(timeout=TIMEOUT), "group": group, **arguments}
    sizes = {
        name: given.pop(name)
        for name in ("batch", "rows", "nheads", "nheads_kv", "headdim", "headdim_v", "dtype")
        if name in given
    }
    layout = given["layout"]
    if isinstance(layout, SequenceLayout):
        sizes["rows"] = layout.shard_len(dist.get_rank(group))
    q, k, v = tensors(**sizes)
    if not given.pop("requires_grad", True):
        q, k, v = (x.detach() for x in (q, k, v))
    if "cu_seqlens" in given:
        q, k, v = (x[0] for x in (q, k, v))
    out = ring_attention(q, k, v, **given)
    if out.requires_grad:
        out.sum().backward()
    return out


# -- calls that one rank makes at another time, or not at all


def skipped(group: Group, odd: bool, **arguments: Any) -> None:
    """The odd rank leaves out the first of two different calls."""
    if not odd:
        call(group, **arguments)
    call(group, softmax_scale=0.75, **arguments)


def skipped_forward(group: Group, odd: bool, **arguments: Any) -> None:
    """The odd rank leaves out one of three equal forwards, and begins its backward."""
    outs = [call(group, requires_grad=False, **arguments) for _ in range(2 if odd else 3)]
    assert outs
    call(group, **arguments)


def refused(group: Group, odd: bool, **arguments: Any) -> None:
    """The odd rank's first call is refused on that rank only; all ranks make the next call."""
    if odd:
        with pytest.raises(ValueError):
            call(group, **{**arguments, "softcap": -1.0})
    else:
        call(group, **arguments)
    call(group, **arguments)


def late(group: Group, odd: bool, **arguments: Any) -> None:
    """The odd rank makes its call when the other ranks have given up."""
    call(group, **arguments)
    if odd:
        time.sleep(3.0)
    call(group, **{"transport": TransportOptions(timeout=1.0), **arguments})


def backwards_swapped(group: Group, odd: bool, **arguments: Any) -> None:
    """The odd rank runs the backwards of two equal layers in another order."""
    transport = TransportOptions(timeout=TIMEOUT)
    given = {**USUAL, "transport": transport, "group": group, **arguments}
    outs = [ring_attention(*tensors(), **given) for _ in range(2)]
    for out in outs if odd else reversed(outs):
        out.sum().backward()


def backward_left_out(group: Group, odd: bool, **arguments: Any) -> None:
    """The odd rank skips its backward and makes the next forward."""
    transport = TransportOptions(timeout=TIMEOUT)
    given = {**USUAL, "transport": transport, "group": group, **arguments}
    out = ring_attention(*tensors(), **given)
    if not odd:
        out.sum().backward()
    call(group, **arguments)


HAPPENED: dict[str, Callable[..., None]] = {
    fn.__name__.replace("_", " "): fn
    for fn in (skipped, skipped_forward, refused, late, backwards_swapped, backward_left_out)
}

# -- decoding

DECODES: dict[str, tuple[Arguments, Arguments]] = {
    "scale": ({}, {"softmax_scale": 0.5}),
    "softcap": ({"softcap": 5.0}, {"softcap": 6.0}),
    "values of sinks": ({"sinks": SINKS}, {"sinks": SINKS.flip(0)}),
    "queries": ({}, {"queries": 3}),
    "dtype of one size": ({"dtype": torch.float16}, {"dtype": torch.bfloat16}),
    "window": ({"window_size": (9, 0)}, {"window_size": (7, 0)}),
    "causal": ({"queries": 2}, {"queries": 2, "causal": False}),
}


def decode(group: Group, queries: int = 2, **arguments: Any) -> Tensor:
    dtype = arguments.pop("dtype", torch.float32)
    rows = torch.ones(1, queries, 4, 8, dtype=dtype)
    cache = torch.ones(1, ROWS, 4, 8, dtype=dtype)
    transport = TransportOptions(timeout=TIMEOUT)
    return tree_decode(rows, cache, cache, group=group, transport=transport, **arguments)


def trial(run: Callable[[Group], object]) -> Ended:
    """Runs one rank's part in a group of its own."""
    group = dist.new_group()
    try:
        return ended(lambda: run(group))
    finally:
        dist.destroy_process_group(group)


def all_trials(strategy: str, odd_rank: int, names: list[str]) -> dict[str, Ended]:
    """Every way to differ in one strategy."""
    torch.manual_seed(0)
    odd = dist.get_rank() == odd_rank
    results = {}
    for name in names:
        if strategy == "decode":
            arguments = DECODES[name][odd]
            results[name] = trial(lambda group, a=arguments: decode(group, **a))
        elif name in DIFFERENT:
            arguments = {"strategy": strategy_of(strategy, 4), **DIFFERENT[name][odd]}
            results[name] = trial(lambda group, a=arguments: call(group, **a))
        else:
            happened, arguments = HAPPENED[name], {"strategy": strategy_of(strategy, 4)}
            results[name] = trial(lambda group, fn=happened, a=arguments: fn(group, odd, **a))
    return results


def check(ranks: Pools, strategy: str, odd_rank: int, names: list[str]) -> None:
    results = ranks(WORLD_SIZE).run(all_trials, strategy, odd_rank, names, timeout=200)
    for name in names:
        told = [one[name] for one in results]
        if strategy == "auto" and all(one.error is ValueError for one in told):
            continue  # the ranks raised while they chose
        assert all(one.error is RuntimeError for one in told), (strategy, name, told)
        assert all(one.seconds < 3 * TIMEOUT for one in told), (strategy, name, told)
        # On a busy machine ranks may not even meet in time, which also raises on all of them;
        # test_failures tests how rings are formed.
        met = not any("could not form the ring" in one.text for one in told)
        if name != "late" and met:
            # Some rank has seen the reason, and told the others.
            assert all("call differs" in one.text for one in told), (strategy, name, told)


# -- identities beside the messages, as on NCCL, where messages have no tags


@pytest.mark.parametrize("strategy", [*(name for name in STRATEGIES if name != "auto"), "decode"])
@on_ranks(WORLD_SIZE)
def test_headers_where_there_are_no_tags(strategy: str) -> None:
    """The device compares headers; at the next call all hosts raise if they differed.

    Tries calls that agree, and a call after one in which rank 1 had other sinks.
    """
    with mock.patch.object(media.Gloo, "honours_tags", False):
        groups = [dist.new_group() for _ in range(2)]
        run = decode if strategy == "decode" else partial(call, strategy=strategy_of(strategy, 4))
        outs = [run(groups[0], sinks=SINKS) for _ in range(2)]
        run(groups[1], sinks=SINKS)
        sinks = SINKS.flip(0) if dist.get_rank() == 1 else SINKS
        ended(lambda: run(groups[1], sinks=sinks))
        after = ended(lambda: run(groups[1], sinks=SINKS))
    for group in groups:
        dist.destroy_process_group(group)
    assert torch.equal(*outs)
    assert after.error is RuntimeError and "messages of another call" in after.text, after


def names_of(strategy: str) -> list[str]:
    if strategy == "decode":
        return list(DECODES)
    names = [*DIFFERENT, *HAPPENED]
    if strategy == "all_gather":
        names.remove("strategy")
    return names


@pytest.mark.parametrize(
    "strategy",
    [
        *("ring", "all_gather", "ulysses", "auto", "decode"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("double_ring", "hybrid", "q_exchange")
        ),
    ],
)
def test_values_and_moments(ranks: Pools, strategy: str) -> None:
    """Differences that change no size, and one that makes a message longer than its buffer."""
    if strategy == "decode":
        names = ["values of sinks", "queries"]
    else:
        names = ["values of sinks", "backwards swapped", "refused", "more rows"]
    check(ranks, strategy, 2, names)


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "decode"])
def test_every_difference(ranks: Pools, strategy: str, half: int) -> None:
    """Tries half of the differences on the first rank, half on the last; strategies swap them."""
    turn = len(strategy) + half
    check(ranks, strategy, 3 * (turn % 2), names_of(strategy)[half::2])


# -- debug mode


@contextmanager
def debug(value: str | None = "1") -> Iterator[None]:
    """Sets or unsets the environment variable."""
    with mock.patch.dict(os.environ):
        os.environ.pop("RING_ATTN_DEBUG", None)
        if value is not None:
            os.environ["RING_ATTN_DEBUG"] = value
        yield


ODD = 1


@on_ranks(WORLD_SIZE)
def test_every_rank_is_told_who_differs_in_what() -> None:
    """For every difference, before a message is sent."""
    stats = open_p2p(dist.group.WORLD, TransportOptions(timeout=TIMEOUT)).stats  # type: ignore[arg-type]
    before = stats.messages
    for name, arguments in (DIFFERENT | COMPARED).items():
        mine = arguments[dist.get_rank() == ODD]
        with debug():
            got = ended(lambda mine=mine: call(None, **mine))
        assert (got.error, stats.messages) == (ValueError, before), (name, got)
        told = arguments[2].split("; ")
        assert all(part in got.text for part in told), (name, got.text)
        # Only differing arguments are named; documents and rows change other arguments too.
        named = {part.partition(":")[0] for part in got.text.split("; ")[1:]}
        expected = {part.partition(":")[0] for part in told}
        assert named >= expected and (named == expected or name in MORE), (name, named)
        for innocent in {0, 1, 2, 3} - {ODD}:
            assert f"rank {innocent} has" not in got.text, (name, got.text)


@on_ranks(WORLD_SIZE)
def test_all_ranks_differ() -> None:
    """Every rank's error lists all values."""
    with debug(), refused_by_name(ValueError, "1.0|2.0|3.0|4.0"):
        call(None, softmax_scale=1.0 + dist.get_rank())


@on_ranks(WORLD_SIZE)
def test_ranks_that_agree_run() -> None:
    """With the check the ranks compare once a call; by default they never do."""
    layout, other = SequenceLayout.boundaries([0, 3, 3, 20, SEQLEN]), TransportOptions(timeout=20)
    calls = ({}, {"layout": layout}, {"cu_seqlens": documents(5, 11)}, {"transport": other})
    for value in ("1", "yes", None, "0", ""):
        with (
            debug(value),
            mock.patch.object(ops, "check_agreement", side_effect=ops.check_agreement) as compare,
        ):
            assert all(bool(call(None, **one).isfinite().all()) for one in calls)
        assert compare.call_count == (4 if value in ("1", "yes") else 0), value


@on_ranks(WORLD_SIZE)
def test_off_by_default_and_without_effect() -> None:
    """The check changes no result; without it a forward sends no more, and by no collective."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = [torch.randn(x.shape, generator=generator).requires_grad_() for x in tensors()]

    def results() -> tuple[Tensor, ...]:
        out = ring_attention(*x, causal=True)
        return (out, *torch.autograd.grad(out.sum(), x))

    with debug(None):
        usual = results()
    with debug():
        assert all(map(torch.equal, usual, results()))
    stats = open_p2p(dist.group.WORLD, TransportOptions()).stats  # type: ignore[arg-type]
    before = stats.messages
    unasked = AssertionError("a collective that nobody asked for")
    names = ("all_gather", "all_gather_object", "all_reduce", "broadcast", "barrier", "new_group")
    with debug(None), ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, side_effect=unasked))
        ring_attention(*x, causal=True)
    assert stats.messages - before == WORLD_SIZE - 1


@pytest.mark.parametrize("kind", ["call", "decode", "refused"])
@on_ranks(WORLD_SIZE)
def test_the_check_keeps_the_timeout(kind: str) -> None:
    """Rank 1 makes no call: the check stops at its timeout, long before the group's."""
    group = dist.new_group()
    if dist.get_rank() == ODD:
        return
    options = TransportOptions(timeout=1.5)
    x = torch.ones(1, 4, 2, 8)
    # A rank with an error also waits no longer than the timeout to tell the others.
    bad = {"softcap": -1.0} if kind == "refused" else {}
    run = tree_decode if kind == "decode" else ring_attention
    with debug():
        got = ended(lambda: run(x, x, x, group=group, transport=options, **bad))
    assert got.error is RuntimeError and got.seconds < 3.0, got
    assert f"ranks [{ODD}] did not come" in got.text, got
