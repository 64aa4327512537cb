"""Ranks that are not in the same call, without RING_ATTN_DEBUG: all of them raise, none computes.

Every way for calls to differ, in every strategy. Each trial has a process group of its own in the
same four processes, which would not outlive a message that is longer than its buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout, TransportOptions, ring_attention, tree_decode
from ring_attn.testing.cases import strategy_of
from ring_attn.transport.ranks import media
from tests.distributed.pool import Pools

pytestmark = pytest.mark.dist

WORLD_SIZE = 4
ROWS = 6
SEQLEN = WORLD_SIZE * ROWS
TIMEOUT = 4.0
Arguments = dict[str, Any]
Group = dist.ProcessGroup

STRATEGIES = ("ring", "double_ring", "all_gather", "ulysses", "hybrid", "q_exchange", "auto")


def tensors(
    rows: int = ROWS,
    nheads: int = 4,
    nheads_kv: int = 4,
    headdim: int = 8,
    dtype: torch.dtype = torch.float32,
    **_: object,
) -> list[Tensor]:
    shapes = [(1, rows, heads, headdim) for heads in (nheads, nheads_kv, nheads_kv)]
    return [torch.ones(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def documents(*boundaries: int) -> Tensor:
    return torch.tensor([0, *boundaries, SEQLEN], dtype=torch.int32)


# -- two ways to call, of which the odd rank takes the second, with the same bytes where possible

USUAL: Arguments = {"causal": True, "softmax_scale": 0.25, "layout": "contiguous"}
SINKS = torch.tensor([0.5, -1.0, 0.0, 2.0])

# name -> what all ranks but the odd one add to `USUAL`, and what that one adds.
DIFFERENT: dict[str, tuple[Arguments, Arguments]] = {
    "dtype of one size": ({"dtype": torch.float16}, {"dtype": torch.bfloat16}),
    "dtype": ({}, {"dtype": torch.float64}),
    "rows": ({}, {"rows": ROWS + 2}),
    "more rows": ({}, {"rows": 5 * ROWS}),
    "heads and headdim": ({}, {"nheads": 8, "nheads_kv": 8, "headdim": 4}),
    "kv heads": ({}, {"nheads_kv": 2}),
    "scale": ({}, {"softmax_scale": 0.5}),
    "softcap": ({"softcap": 5.0}, {"softcap": 6.0}),
    "values of sinks": ({"sinks": SINKS}, {"sinks": SINKS.flip(0)}),
    "sinks": ({}, {"sinks": SINKS}),
    "causal": ({}, {"causal": False}),
    "window": ({"window_size": (9, 0)}, {"window_size": (7, 0)}),
    "documents": ({"cu_seqlens": documents(9)}, {"cu_seqlens": documents(10)}),
    "layout": ({}, {"layout": SequenceLayout.boundaries([0, 5, 11, 17, SEQLEN - 1])}),
    "gradient": ({}, {"requires_grad": False}),
    "strategy": ({}, {"strategy": "all_gather"}),
}


def call(group: Group, **arguments: Any) -> Tensor:
    """A forward and its backward."""
    given = {**USUAL, "transport": TransportOptions(timeout=TIMEOUT), "group": group, **arguments}
    sizes = {name: given.pop(name) for name in ("rows", "nheads", "nheads_kv", "headdim", "dtype")
             if name in given}  # fmt: skip
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
    """The odd rank's first call is refused on that rank; all go on with the next one."""
    if odd:
        with pytest.raises(ValueError):
            call(group, **{**arguments, "softcap": -1.0})
    else:
        call(group, **arguments)
    call(group, **arguments)


def late(group: Group, odd: bool, **arguments: Any) -> None:
    """The odd rank comes when the others have given up."""
    call(group, **arguments)
    if odd:
        time.sleep(3.0)
    call(group, **{"transport": TransportOptions(timeout=1.0), **arguments})


def backwards_swapped(group: Group, odd: bool, **arguments: Any) -> None:
    """Two equal layers, whose backwards the odd rank runs in another order."""
    transport = TransportOptions(timeout=TIMEOUT)
    given = {**USUAL, "transport": transport, "group": group, **arguments}
    outs = [ring_attention(*tensors(), **given) for _ in range(2)]
    for out in outs if odd else reversed(outs):
        out.sum().backward()


def backward_left_out(group: Group, odd: bool, **arguments: Any) -> None:
    """The odd rank goes on with the next forward."""
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


@dataclass(frozen=True)
class Ended:
    """How one rank's part of a trial ended."""

    error: str | None
    text: str
    seconds: float


def trial(run: Callable[[Group], object]) -> Ended:
    """Runs one rank's part in a group of its own."""
    group = dist.new_group()
    try:
        return ended(lambda: run(group))
    finally:
        dist.destroy_process_group(group)


def ended(run: Callable[[], object]) -> Ended:
    """Runs it and says how it ended."""
    started = time.monotonic()
    try:
        run()
    except Exception as error:
        return Ended(type(error).__name__, str(error), time.monotonic() - started)
    return Ended(None, "it ran", time.monotonic() - started)


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
        if strategy == "auto" and all(one.error == "ValueError" for one in told):
            continue  # the ranks were told when they chose
        assert all(one.error == "RuntimeError" for one in told), (strategy, name, told)
        assert all(one.seconds < 3 * TIMEOUT for one in told), (strategy, name, told)
        # On a busy machine ranks may not even meet in time, which is an error on all of them, too;
        # test_failures holds how rings are formed.
        met = not any("could not form the ring" in one.text for one in told)
        if name != "late" and met:
            # Somebody has seen why, and told the others.
            assert all("call differs" in one.text for one in told), (strategy, name, told)


# -- identities beside the messages, as on NCCL, where messages have no tags


def with_headers(strategy: str) -> tuple[bool, Ended, Ended]:
    """Calls that agree; one in which rank 1 has other sinks, and the next."""
    with mock.patch.object(media.Gloo, "honours_tags", False):
        groups = [dist.new_group() for _ in range(2)]
        run = decode if strategy == "decode" else partial(call, strategy=strategy_of(strategy, 4))
        outs = [run(groups[0], sinks=SINKS) for _ in range(2)]
        run(groups[1], sinks=SINKS)
        sinks = SINKS.flip(0) if dist.get_rank() == 1 else SINKS
        results = [ended(lambda sinks=one: run(groups[1], sinks=sinks)) for one in (sinks, SINKS)]
    for group in groups:
        dist.destroy_process_group(group)
    return torch.equal(*outs), results[0], results[1]


@pytest.mark.parametrize("strategy", [*(name for name in STRATEGIES if name != "auto"), "decode"])
def test_headers_where_there_are_no_tags(ranks: Pools, strategy: str) -> None:
    """The device compares, and the host hears of it at the next call, on all ranks."""
    for rank, (same, _, after) in enumerate(ranks(WORLD_SIZE).run(with_headers, strategy)):
        assert same, rank
        assert after.error == "RuntimeError", (rank, after)
        assert "messages of another call" in after.text, (rank, after)


def names_of(strategy: str) -> list[str]:
    if strategy == "decode":
        return list(DECODES)
    names = [*DIFFERENT, *HAPPENED]
    if strategy == "all_gather":
        names.remove("strategy")
    return names


@pytest.mark.parametrize("strategy", [*STRATEGIES, "decode"])
def test_values_and_moments(ranks: Pools, strategy: str) -> None:
    """Differences that no size shows, and one that makes a message longer than its buffer."""
    if strategy == "decode":
        names = ["values of sinks", "queries"]
    else:
        names = ["values of sinks", "backwards swapped", "refused", "more rows"]
    check(ranks, strategy, 2, names)


@pytest.mark.slow
@pytest.mark.parametrize("odd_rank", [0, 3])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "decode"])
def test_every_difference(ranks: Pools, strategy: str, odd_rank: int) -> None:
    check(ranks, strategy, odd_rank, names_of(strategy))
