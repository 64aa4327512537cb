"""RING_ATTN_DEBUG=1: ranks that disagree are told so, all of them, by rank and argument."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout, TransportOptions, ops, ring_attention, tree_decode
from ring_attn.transport.p2p import open_p2p

pytestmark = pytest.mark.dist

WORLD_SIZE = 3
ODD = 1
ROWS = 8
SEQLEN = WORLD_SIZE * ROWS

Arguments = dict[str, Any]


def tensors(
    batch: int = 1,
    rows: int = ROWS,
    nheads: int = 4,
    nheads_kv: int = 2,
    headdim: int = 8,
    headdim_v: int = 8,
    dtype: torch.dtype = torch.float32,
) -> Arguments:
    return {
        "q": torch.zeros(batch, rows, nheads, headdim, dtype=dtype),
        "k": torch.zeros(batch, rows, nheads_kv, headdim, dtype=dtype),
        "v": torch.zeros(batch, rows, nheads_kv, headdim_v, dtype=dtype),
    }


def documents(*boundaries: int) -> Tensor:
    """cu_seqlens over the whole sequence."""
    return torch.tensor((0, *boundaries, SEQLEN), dtype=torch.int32)


def shorter(rows: int) -> SequenceLayout:
    """A layout in which the odd rank holds so many rows."""
    return SequenceLayout.boundaries([0, ROWS, ROWS + rows, 2 * ROWS + rows])


# name -> what one rank calls with in place of `USUAL`, and what each rank must then be told.
USUAL: Arguments = {**tensors(), "causal": True, "softmax_scale": 0.25, "layout": "zigzag"}
DIFFERENT: dict[str, tuple[Arguments, tuple[str, ...]]] = {
    "batch": (tensors(batch=2), ("batch: rank 1 has 2, the other 2 have 1",)),
    "rows": (
        tensors(rows=ROWS - 2),
        ("seqlen_q: rank 1 has 18, the other 2 have 24", "seqlen_k: rank 1 has 18"),
    ),
    "nheads": (tensors(nheads=2), ("nheads: rank 1 has 2, the other 2 have 4",)),
    "nheads_kv": (tensors(nheads_kv=4), ("nheads_kv: rank 1 has 4, the other 2 have 2",)),
    "headdim": (tensors(headdim=16), ("headdim: rank 1 has 16, the other 2 have 8",)),
    "headdim_v": (tensors(headdim_v=16), ("headdim_v: rank 1 has 16, the other 2 have 8",)),
    "dtype": (
        tensors(dtype=torch.bfloat16),
        ("dtype: rank 1 has torch.bfloat16, the other 2 have torch.float32",),
    ),
    "scale": ({"softmax_scale": 0.5}, ("softmax_scale: rank 1 has 0.5, the other 2 have 0.25",)),
    "softcap": (
        {"softcap": 2.0, "backend": "reference"},
        ("softcap: rank 1 has 2.0, the other 2 have 0.0",),
    ),
    "sinks": ({"sinks": torch.zeros(4)}, ("sinks: rank 1 has True, the other 2 have False",)),
    "gradient of the sinks": (
        {"sinks": torch.zeros(4, requires_grad=True)},
        ("requires_grad: rank 1 has True, the other 2 have False",),
    ),
    "causal": ({"causal": False}, ("causal: rank 1 has False, the other 2 have True",)),
    "window": (
        {"window_size": (4, 0)},
        ("window_size: rank 1 has (4, 0), the other 2 have (-1, -1)",),
    ),
    "layout": (
        {"layout": "contiguous"},
        ("layout: rank 1 has", "contiguous(seqlen=24", "the other 2 have", "zigzag(seqlen=24"),
    ),
    "boundaries": (
        {**tensors(rows=ROWS - 3), "layout": shorter(ROWS - 3)},
        ("layout: rank 1 has", "boundaries([0, 8, 13, 21])", "seqlen_q: rank 1 has 21"),
    ),
    "documents": (
        {"cu_seqlens": documents(5)},
        ("cu_seqlens: rank 1 has (0, 5, 24), the other 2 have None",),
    ),
    "documents of keys": (
        {"cu_seqlens": documents(), "cu_seqlens_k": documents()},
        ("cu_seqlens: rank 1 has (0, 24)", "cu_seqlens_k: rank 1 has (0, 24)"),
    ),
    "backend": (
        {"backend": "reference"},
        ("backend: rank 1 has 'reference', the other 2 have 'aten'",),
    ),
    "timeout": ({"transport": TransportOptions(timeout=20)}, ("transport: rank 1 has", "20")),
    "two things": (
        {"causal": False, "softmax_scale": 0.5},
        ("causal: rank 1 has False", "softmax_scale: rank 1 has 0.5"),
    ),
}


# More arguments differ, or are said to.
MORE = (
    "rows",
    "boundaries",
    "documents",
    "documents of keys",
    "softcap",
    "sinks",
    "gradient of the sinks",
)


@contextmanager
def debug(value: str | None) -> Iterator[None]:
    """Sets or unsets the environment variable."""
    with mock.patch.dict(os.environ):
        os.environ.pop("RING_ATTN_DEBUG", None)
        if value is not None:
            os.environ["RING_ATTN_DEBUG"] = value
        yield


def run_different(name: str) -> tuple[str, str, int]:
    """The odd rank calls differently; what each rank is told, and what was sent by then."""
    arguments = {**USUAL, **(DIFFERENT[name][0] if dist.get_rank() == ODD else {})}
    stats = open_p2p(dist.group.WORLD, TransportOptions()).stats  # type: ignore[arg-type]
    before = stats.messages
    with debug("1"):
        try:
            ring_attention(**arguments)
        except Exception as error:
            return type(error).__name__, str(error), stats.messages - before
    return "", "it ran", stats.messages - before


@pytest.mark.parametrize("name", DIFFERENT)
def test_every_rank_is_told_who_differs_in_what(ranks: Any, name: str) -> None:
    for rank, (error, text, messages) in enumerate(ranks(WORLD_SIZE).run(run_different, name)):
        assert (error, messages) == ("ValueError", 0), (rank, error, text)
        told = DIFFERENT[name][1]
        assert all(part in text for part in told), (rank, text)
        # Only what differs is named; documents and rows take other arguments with them.
        named = {part.partition(":")[0] for part in text.split("; ")[1:]}
        expected = {part.partition(":")[0] for part in told if ": rank 1" in part}
        assert named >= expected and (named == expected or name in MORE), (rank, named)
        for innocent in {0, 1, 2} - {ODD}:
            assert f"rank {innocent} has" not in text, (rank, text)


def run_other_sinks() -> str:
    """The odd rank has the same sinks in another order."""
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0])
    mine = sinks.flip(0) if dist.get_rank() == ODD else sinks
    with debug("1"), pytest.raises(ValueError) as caught:
        ring_attention(**USUAL, sinks=mine)
    return str(caught.value)


def test_values_of_sinks_are_compared(ranks: Any) -> None:
    for text in ranks(WORLD_SIZE).run(run_other_sinks):
        assert f"values of sinks: rank {ODD} has" in text


def run_all_different() -> str:
    """Every rank has another scale."""
    with debug("1"), pytest.raises(ValueError) as caught:
        ring_attention(**{**USUAL, "softmax_scale": 1.0 + dist.get_rank()})
    return str(caught.value)


def test_all_ranks_differ(ranks: Any) -> None:
    texts = ranks(WORLD_SIZE).run(run_all_different)
    assert len(set(texts)) == 1
    assert all(scale in texts[0] for scale in ("1.0", "2.0", "3.0")), texts[0]


def run_agreeing(value: str | None) -> tuple[int, bool]:
    """Calls of ranks that agree; how often they have compared notes, and whether all ran."""
    layout = SequenceLayout.boundaries([0, 3, 3, SEQLEN])
    uneven = tensors(rows=layout.shard_len(dist.get_rank()))
    calls: list[Arguments] = [
        USUAL,
        {**USUAL, **uneven, "layout": layout},
        {**USUAL, "cu_seqlens": documents(5, 11)},
        {**USUAL, "transport": TransportOptions(timeout=20)},
    ]
    with (
        debug(value),
        mock.patch.object(ops, "check_agreement", side_effect=ops.check_agreement) as compare,
    ):
        outs = [ring_attention(**arguments) for arguments in calls]
    ran = all(bool(out.isfinite().all()) for out in outs)
    return compare.call_count, ran


@pytest.mark.parametrize(("value", "times"), [("1", 4), ("yes", 4), (None, 0), ("0", 0), ("", 0)])
def test_ranks_that_agree_run(ranks: Any, value: str | None, times: int) -> None:
    """With the check they compare once a call; without it, which is the default, never."""
    assert ranks(WORLD_SIZE).run(run_agreeing, value) == [(times, True)] * WORLD_SIZE


def run_same_bits() -> None:
    """The check changes nothing of the result; gradients need no comparing of their own."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    q, k, v = (
        torch.randn(x.shape, generator=generator).requires_grad_() for x in tensors().values()
    )

    def results() -> tuple[Tensor, ...]:
        out = ring_attention(q, k, v, causal=True)
        return (out, *torch.autograd.grad(out.sum(), (q, k, v)))

    with debug(None):
        usual = results()
    with debug("1"):
        checked = results()
    assert all(torch.equal(x, y) for x, y in zip(usual, checked, strict=True))


def run_without_other_collectives() -> int:
    """By default a call makes nothing but its exchanges."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a collective that nobody asked for")

    names = ("all_gather", "all_gather_object", "all_reduce", "broadcast", "barrier", "new_group")
    ring_attention(**USUAL)  # the ring's groups are made
    stats = open_p2p(dist.group.WORLD, TransportOptions()).stats  # type: ignore[arg-type]
    before = stats.messages
    patches = [mock.patch.object(dist, name, refuse) for name in names]
    with debug(None):
        for patch in patches:
            patch.start()
        try:
            ring_attention(**USUAL)
        finally:
            for patch in patches:
                patch.stop()
    return stats.messages - before


def test_off_by_default(ranks: Any) -> None:
    assert ranks(WORLD_SIZE).run(run_without_other_collectives) == [2] * WORLD_SIZE


@pytest.mark.parametrize("check_on_ranks", [run_same_bits], ids=lambda fn: fn.__name__)
def test_debug_changes_no_result(ranks: Any, check_on_ranks: Callable[[], None]) -> None:
    ranks(WORLD_SIZE).run(check_on_ranks)


def alone_in_debug(kind: str) -> tuple[str, float]:
    """Rank 1 does not come; the group itself would wait for much longer."""
    group = dist.new_group()
    if dist.get_rank() == ODD:
        return "", 0.0
    options = TransportOptions(timeout=1.5)
    x = torch.ones(1, 4, 2, 8)
    started = time.monotonic()
    with debug("1"), pytest.raises(RuntimeError) as caught:
        if kind == "decode":
            tree_decode(x, x, x, group=group, transport=options)
        else:
            # An error of this rank, too, waits no longer for the others to be told.
            bad = {"softcap": -1.0} if kind == "refused" else {}
            ring_attention(x, x, x, group=group, transport=options, **bad)
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("kind", ["call", "decode", "refused"])
def test_the_check_keeps_the_timeout(ranks: Any, kind: str) -> None:
    for rank, (text, seconds) in enumerate(ranks(WORLD_SIZE).run(alone_in_debug, kind)):
        if rank != ODD:
            assert f"ranks [{ODD}] did not come" in text and seconds < 3.0, (rank, text, seconds)
