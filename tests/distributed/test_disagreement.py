"""Ranks that are not in the same call: all of them raise, none computes.

With RING_ATTN_DEBUG=1 every rank learns which rank differs in which argument before anything is
sent; otherwise the messages show it. Each trial has its own process group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import (
    SequenceLayout,
    TransportOptions,
    halo,
    masks,
    prepare,
    ring_attention,
    set_step,
    tree_decode,
    unshard,
)
from ring_attn.testing.cases import strategy_of
from ring_attn.transport.p2p import P2PTransport, open_p2p
from tests.distributed.pool import device, ended, everyone, on_ranks
from tests.drawn import scattered
from tests.refusals import refused, says

pytestmark = pytest.mark.gloo

WORLD_SIZE = 4
ROWS = 6
SEQLEN = WORLD_SIZE * ROWS
TIMEOUT = 4.0
ODD = 1
Arguments = dict[str, Any]
Group = dist.ProcessGroup | None

STRATEGIES = ("ring", "double_ring", "all_gather", "ulysses", "hybrid", "q_exchange", "auto")
SIZES: Arguments = {
    "batch": 1, "rows": ROWS, "nheads": 4, "nheads_kv": 4, "headdim": 8, "headdim_v": 8,
    "dtype": torch.float32,
}  # fmt: skip
USUAL: Arguments = {"causal": True, "softmax_scale": 0.25, "layout": "contiguous"}
SINKS = torch.tensor([0.5, -1.0, 0.0, 2.0])
WITH_GRADIENT = torch.zeros(4, requires_grad=True)
SPANS, OTHER_SPANS = (masks.spans(SEQLEN, [(3, end)]) for end in (9, 10))
SHORTER = SequenceLayout.boundaries([0, 5, 11, 17, SEQLEN - 1])


def documents(*boundaries: int) -> Tensor:
    return torch.tensor([0, *boundaries, SEQLEN], dtype=torch.int32)


# Name -> arguments of most ranks, arguments of the odd rank, and words of the error in debug mode
# if the odd rank is rank 1.
DIFFERENT: dict[str, tuple[Arguments, Arguments, str]] = {
    **{
        name: (
            {name: usual},
            {name: odd},
            f"{name}: global rank 1 has {odd!r}, the other 3 have {usual}",
        )
        for name, usual, odd in (
            ("dtype", torch.float16, torch.bfloat16),  # of one size
            ("batch", 1, 2),
            ("nheads", 4, 8),
            ("nheads_kv", 4, 2),
            ("headdim", 8, 16),
            ("headdim_v", 8, 16),
            ("softmax_scale", 0.25, 0.5),
            ("softcap", 5.0, 6.0),
            ("causal", True, False),
            ("window_size", (9, 0), (7, 0)),
            ("requires_grad", True, False),
        )
    },
    "rows": (
        {},
        {"rows": ROWS + 2},
        "seqlen_q: global rank 1 has 32, the other 3 have 24|seqlen_k:",
    ),
    # A message longer than its buffer.
    "more rows": ({}, {"rows": 5 * ROWS}, "seqlen_q:|seqlen_k: global rank 1 has 120"),
    "heads of one size": (
        {},
        {"nheads": 8, "nheads_kv": 8, "headdim": 4},
        "nheads:|nheads_kv:|headdim: global rank 1 has 4, the other 3 have 8",
    ),
    "sinks": ({}, {"sinks": SINKS}, "sinks: global rank 1 has True, the other 3 have False"),
    "values of sinks": (
        {"sinks": SINKS},
        {"sinks": SINKS.flip(0)},
        "values of sinks: global rank 1 has",
    ),
    "gradient of the sinks": (
        {"requires_grad": False},
        {"requires_grad": False, "sinks": WITH_GRADIENT},
        "requires_grad: global rank 1 has True, the other 3 have False",
    ),
    "documents": (
        {"cu_seqlens": documents(9)},
        {"cu_seqlens": documents(10)},
        "cu_seqlens: global rank 1 has (0, 10, 24), the other 3 have (0, 9, 24)",
    ),
    "documents of keys": (
        {},
        {"cu_seqlens": documents(), "cu_seqlens_k": documents()},
        "cu_seqlens:|cu_seqlens_k: global rank 1 has (0, 24), the other 3 have None",
    ),
    "mask": ({"causal": False, "mask": SPANS}, {"causal": False, "mask": OTHER_SPANS}, "mask:"),
    "layout": (
        {},
        {"layout": SHORTER},
        "layout: global rank 1 has ('boundaries([0, 5, 11, 17, 23])'",
    ),
    "strategy": ({}, {"strategy": "exchange"}, "strategy: global rank 1 has"),
    "backend": ({}, {"backend": "reference"}, "backend: global rank 1 has 'reference', the other"),
    "timeout": ({}, {"transport": TransportOptions(timeout=20)}, "transport: global rank 1 has"),
}
# Differences that change more arguments than those named here.
MORE = ("rows", "more rows", "layout", "documents", "documents of keys", "softcap", "sinks",
        "gradient of the sinks", "strategy", "heads of one size")  # fmt: skip


def call(group: Group, *, backward: bool = True, **arguments: Any) -> Tensor:
    options = USUAL | {"transport": TransportOptions(timeout=TIMEOUT), "group": group} | arguments
    if isinstance(sinks := options.get("sinks"), Tensor):
        options["sinks"] = sinks.to(device())
    sizes = {name: options.pop(name, usual) for name, usual in SIZES.items()}
    layout = options["layout"]
    if isinstance(layout, SequenceLayout):
        sizes["rows"] = layout.shard_len(dist.get_rank(group))
    requires_grad = options.pop("requires_grad", True)
    q, k, v = (
        torch.ones(
            sizes["batch"], sizes["rows"], sizes[heads], sizes[dim],
            dtype=sizes["dtype"], requires_grad=requires_grad, device=device(),
        )
        for heads, dim in (
            ("nheads", "headdim"), ("nheads_kv", "headdim"), ("nheads_kv", "headdim_v")
        )
    )  # fmt: skip
    if "cu_seqlens" in options:
        q, k, v = (x[0] for x in (q, k, v))
    out = ring_attention(q, k, v, **options)
    if backward and out.requires_grad:
        out.sum().backward()
    return out


# Name -> what most ranks do, in order, and what the odd rank does, see `do`.
HAPPENED = {
    "skipped": ("call other", "other"),
    "skipped forward": ("infer infer infer call", "infer infer call"),
    "refused": ("call call", "bad call"),
    "late": ("call short", "call sleep short"),
    "backwards swapped": ("forward forward back-1 back-2", "forward forward back-2 back-1"),
    "backward left out": ("forward back-1 call", "forward call"),
}


def do(group: Group, order: str, **arguments: Any) -> None:
    outs: list[Tensor] = []
    for name in order.split():
        if name == "sleep":
            time.sleep(3.0)
        elif name == "bad":
            with pytest.raises(ValueError):
                call(group, **arguments, softcap=-1.0)
        elif name == "forward":
            outs.append(call(group, **arguments, backward=False))
        elif name.startswith("back"):
            outs[int(name[-2:])].sum().backward()
        else:
            changes: Arguments = {
                "call": {},
                "other": {"softmax_scale": 0.75},
                "infer": {"requires_grad": False},
                "short": {"transport": TransportOptions(timeout=1.0)},
            }
            call(group, **arguments, **changes[name])


ROOM = {"layout": SequenceLayout.contiguous(4 * ROWS, WORLD_SIZE)}
DECODES: dict[str, tuple[Arguments, Arguments]] = {
    "scale": ({}, {"softmax_scale": 0.5}),
    "softcap": ({"softcap": 5.0}, {"softcap": 6.0}),
    "values of sinks": ({"sinks": SINKS}, {"sinks": SINKS.flip(0)}),
    "queries": ({}, {"queries": 3}),
    "dtype of one size": ({"dtype": torch.float16}, {"dtype": torch.bfloat16}),
    "window": ({"window_size": (9, 0)}, {"window_size": (7, 0)}),
    "causal": ({"queries": 2}, {"queries": 2, "causal": False}),
    "cache_seqlens": ({"cache_seqlens": 20}, {"cache_seqlens": 21}),
    "one length": ({}, {"cache_seqlens": 4 * ROWS}),
}


def decode(
    group: Group, queries: int = 2, dtype: torch.dtype = torch.float32, **arguments: Any
) -> Tensor:
    rows, cache = (torch.ones(1, n, 4, 8, dtype=dtype) for n in (queries, ROWS))
    transport = TransportOptions(timeout=TIMEOUT)
    options = {"group": group, "transport": transport, **ROOM, **arguments}
    return tree_decode(rows, cache, cache, **options)


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
        told = everyone(ended(run))
        dist.destroy_process_group(group)
        asked = strategy == "auto" or "rows" in name
        if asked and all(one.error is ValueError for one in told):
            continue  # the ranks raised before they sent anything
        assert all(one.error is RuntimeError for one in told), (strategy, name, told)
        assert all(one.seconds < 3 * TIMEOUT for one in told), (strategy, name, told)
        # On a busy machine ranks may not even meet in time, which also raises on all of them;
        # test_failures tests how rings are formed.
        met = not any("could not form the ring" in one.text for one in told)
        if name != "late" and met:
            # Some rank has seen the reason, and told the others.
            assert all("call differs" in one.text for one in told), (strategy, name, told)


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
    for told in ("", f"global rank {ODD} has another "):
        group = dist.new_group()
        runs = {
            "decode": partial(tree_decode, x[:, :2], x, x, layout=layout, group=group),
            "halo": partial(halo, x, layout, 1, group=group),
            "unshard": partial(unshard, x, layout, group=group),
        }
        with debug("1" if told else None):
            got = ended(runs.get(strategy, partial(call, group, strategy=strategy, layout=layout)))
        assert got.error is (ValueError if told else RuntimeError) and told in got.text, got
    if strategy == "halo":
        group = dist.new_group()
        shape = (1, 6, 8) if odd else (2, 6, 4)
        got = ended(
            lambda: halo(torch.ones(shape), SequenceLayout.contiguous(24, 4), 1, group=group)
        )
        assert got.error is RuntimeError and "dim and shape" in got.text, got


@pytest.mark.parametrize("formed", [True, False])
@on_ranks(WORLD_SIZE)
def test_a_refusal_is_told_at_once(formed: bool) -> None:
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
    got = ended(partial(call, group, transport=TransportOptions(timeout=30.0)))
    everyone(None)
    assert got.error is RuntimeError and got.seconds < TIMEOUT, got
    assert says(got.text, f"rank {ODD} has|refused|ValueError: softcap"), got


@pytest.mark.parametrize("last", [0, 2, 3])
@on_ranks(WORLD_SIZE)
def test_many_refusals_hide_no_call(last: int) -> None:
    """A rank refuses more calls than it reports, then makes the others' next one."""
    rank, group = dist.get_rank(), dist.new_group()
    call(group)
    start = time.monotonic()
    for _ in range(20 if rank == ODD else last):
        with refused(ValueError, "softmax_scale"):
            call(group, softmax_scale=float("nan"))
    with pytest.raises(RuntimeError, match="call: global rank|left its call|failed before"):
        call(group)
    assert time.monotonic() - start < TIMEOUT


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
            call(group)

    try:
        got = ended(train)
    finally:
        set_step(None)
    assert got.error is RuntimeError and got.seconds < TIMEOUT, got
    assert says(got.text, "step: global rank|has 2|have 1") or says(
        got.text, "step: global rank|has 1|have 2"
    )


# -- debug mode


@on_ranks(WORLD_SIZE)
def test_every_rank_is_told_who_differs_in_what() -> None:
    stats = open_p2p(dist.group.WORLD, TransportOptions(timeout=TIMEOUT)).stats  # type: ignore[arg-type]
    before = stats.messages
    for name, arguments in DIFFERENT.items():
        with debug():
            got = ended(partial(call, None, **arguments[dist.get_rank() == ODD]))
        assert (got.error, stats.messages) == (ValueError, before), (name, got)
        assert says(got.text, arguments[2]), (name, got.text)
        # Only differing arguments are named.
        named = {part.partition(":")[0] for part in got.text.split("; ")[1:]}
        expected = {part.partition(":")[0] for part in arguments[2].split("|")}
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
    group = dist.new_group()
    if dist.get_rank() == ODD:
        return
    options = TransportOptions(timeout=1.5)
    bad: Arguments = {"auto": {"strategy": "auto"}, "decode": {"causal": False}}.get(kind, {})
    run = tree_decode if kind == "decode" else ring_attention
    call = partial(run, *3 * [torch.ones(1, 4, 2, 8)], transport=options, group=group, **bad)
    with debug(None if kind in ("auto", "prepare") else "1"):
        got = ended(partial(prepare, group, transport=options) if kind == "prepare" else call)
    assert got.error is RuntimeError and got.seconds < 3.0, got
    assert says(got.text, f"[{ODD}] did"), got.text
