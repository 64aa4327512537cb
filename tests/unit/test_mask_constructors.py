"""Every constructor of masks, with any arguments: refused, or the mask of its definition.

A pair that two slices hold would be computed twice, which `area` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from ring_attn import Mask, masks
from ring_attn.core.mask import MAX_SLICES, Slice
from tests.counts import counted
from tests.drawn import flash_masks, pairs_of, reproducible
from tests.refusals import refused

Grid = tuple[Tensor, Tensor]


def grid(seqlen_q: int, seqlen_k: int | None = None) -> Grid:
    """Positions of queries, as a column, and of keys, as a row."""
    keys = seqlen_q if seqlen_k is None else seqlen_k
    return torch.arange(seqlen_q)[:, None], torch.arange(keys)[None]


def part_of(cuts: list[int], positions: Tensor) -> Tensor:
    return torch.searchsorted(torch.tensor(cuts), positions, right=True)


def window(seqlen_q: int, left: int, right: int = 0, seqlen_k: int | None = None) -> Tensor:
    i, j = grid(seqlen_q, seqlen_k)
    d = j - i - (j.numel() - seqlen_q)
    seen = torch.ones_like(d).bool()
    return seen & ((left < 0) | (d >= -left)) & ((right < 0) | (d <= right))


def documents(cu: list[int], cu_k: list[int] | None, causal: bool) -> Tensor:
    cu_k = cu if cu_k is None else cu_k
    return flash(cu[-1], cu_k[-1], causal, (-1, -1), cu, cu_k)


def flash(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    sides: tuple[int, int],
    cu_q: Sequence[int] | None,
    cu_k: Sequence[int] | None,
) -> Tensor:
    """flash-attention's definition; positions are counted from the end of their document."""
    seen = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    left, right = sides[0], 0 if causal else sides[1]
    parts = zip(pairwise(cu_q or (0, seqlen_q)), pairwise(cu_k or (0, seqlen_k)), strict=True)
    for (a, b), (c, d) in parts:
        seen[a:b, c:d] = window(b - a, left, right, d - c)
    return seen


def chunked(seqlen: int, size: int) -> Tensor:
    i, j = grid(seqlen)
    return (i // size == j // size) & (j <= i)


def prefix(lens: list[int], cu: list[int]) -> Tensor:
    i, j = grid(cu[-1])
    ends = torch.tensor([a + n for a, n in zip(cu, lens, strict=False)] or [0])
    of_i, of_j = part_of(cu, i), part_of(cu, j)
    return (of_i == of_j) & ((j <= i) | (j < ends[of_i.clamp(max=len(ends)) - 1]))


def spans(seqlen: int, pairs: list[tuple[int, int]], left: int) -> Tensor:
    i, j = grid(seqlen)
    seen = (j <= i) & ((left < 0) | (j >= i - left))
    for a, b in pairs:
        seen |= (i >= a) & (i < b) & (j >= a) & (j < b)
    return seen


def shared_prefix(first: int, lengths: list[int]) -> Tensor:
    cuts = [first, *(first + end for end in accumulate(lengths))]
    i, j = grid(cuts[-1])
    return (j <= i) & ((j < first) | (part_of(cuts, i) == part_of(cuts, j)))


def sink_window(seqlen: int, sinks: int, left: int) -> Tensor:
    i, j = grid(seqlen)
    return (j <= i) & ((j < sinks) | (j >= i - left))


def blocks(seen: Tensor, size: Any, seqlen_q: int | None, seqlen_k: int | None) -> Tensor:
    rows, cols = size if isinstance(size, tuple) else (size, size)
    whole = seen.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    return whole[:seqlen_q, :seqlen_k]


def from_slices(seqlen_q: int, seqlen_k: int, slices: list[tuple[Any, ...]]) -> Tensor:
    return pairs_of([Slice(*one) for one in slices], seqlen_q, seqlen_k)


def neighborhood(shape: list[int], reach: list[int]) -> Tensor:
    places = torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, len(shape))
    far = (places[:, None] - places[None]).abs()
    limits = torch.tensor([n if r == -1 else r for n, r in zip(shape, reach, strict=True)])
    return (far <= limits).all(-1)


def with_text(video: Mask, text: int, where: str) -> Tensor:
    seen = torch.ones(video.seqlen_q + text, video.seqlen_k + text).bool()
    start = text if where == "first" else 0
    seen[start : start + video.seqlen_q, start : start + video.seqlen_k] = video.dense()
    return seen


def by_document(parts: list[Mask]) -> Tensor:
    seen = [part.dense().int() for part in parts]
    return torch.block_diag(*seen).bool() if seen else torch.zeros(0, 0).bool()


JUNK = st.sampled_from([2.0, 1.5, True, None, "3", -1, float("nan")])
NUMBER = st.one_of(*6 * [st.integers(0, 9)], st.integers(-3, 9), JUNK)
NUMBERS = st.lists(NUMBER, max_size=4)
CUTS = st.one_of(
    *4 * [st.lists(st.integers(0, 9), max_size=4).map(lambda x: [0, *sorted(x)])], NUMBERS
)
SEEN = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 99)).map(
    lambda x: torch.rand(x[:2], generator=torch.Generator().manual_seed(x[2])) < 0.5
)
LENGTH = st.one_of(st.none(), NUMBER)
BAND = st.one_of(st.none(), st.integers(-9, 9))
SLICE = st.one_of(st.tuples(*4 * [NUMBER]), st.tuples(*4 * [st.integers(0, 9)], BAND, BAND))
SOME = st.sampled_from([Mask(3, 4, causal=True), Mask(2, 2), masks.chunked(5, 2), Mask(0, 3)])

SQUARE = st.sampled_from([Mask(3, 4), Mask(2, 2), masks.chunked(5, 2), Mask(0, 0)])

# Constructor -> the definition in its docstring, and its arguments.
DEFINED: dict[str, tuple[Callable[..., Tensor], list[Any]]] = {
    "causal": (lambda q, k: window(q, -1, 0, k), [NUMBER, LENGTH]),
    "window": (window, [NUMBER, NUMBER, NUMBER, LENGTH]),
    "documents": (documents, [CUTS, st.one_of(st.none(), CUTS), st.one_of(st.booleans(), NUMBER)]),
    "chunked": (chunked, [NUMBER, NUMBER]),
    "prefix": (prefix, [NUMBERS, CUTS]),
    "spans": (spans, [NUMBER, st.lists(st.tuples(NUMBER, NUMBER), max_size=3), NUMBER]),
    "shared_prefix": (shared_prefix, [NUMBER, NUMBERS]),
    "sink_window": (sink_window, [NUMBER, NUMBER, NUMBER]),
    "blocks": (blocks, [SEEN, st.one_of(NUMBER, st.tuples(NUMBER, NUMBER)), LENGTH, LENGTH]),
    "from_dense": (lambda seen: seen, [SEEN]),
    "from_slices": (from_slices, [NUMBER, NUMBER, st.lists(SLICE, max_size=3)]),
    "neighborhood": (
        neighborhood,
        [st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(-1, 3), max_size=3)],
    ),
    "with_text": (with_text, [SQUARE, NUMBER, st.sampled_from(["first", "last", "middle"])]),
    "by_document": (by_document, [st.lists(st.one_of(SOME, SOME, JUNK), max_size=3)]),
}
BY_NAME = {"documents": ("causal",), "spans": ("left",)}


def test_every_constructor_has_a_definition() -> None:
    public = [n for n, x in vars(masks).items() if getattr(x, "__module__", "") == masks.__name__]
    several = {"each_of_blocks"}  # returns lists of masks
    assert {*DEFINED} | several == {name for name in public if not name.startswith("_")}


@pytest.mark.parametrize("name", DEFINED)
@settings(reproducible, max_examples=120)
@given(data=st.data())
def test_it_is_refused_or_as_defined(name: str, data: st.DataObject) -> None:
    define, strategies = DEFINED[name]
    values = [data.draw(strategy) for strategy in strategies]
    named = dict(
        zip(BY_NAME.get(name, ()), values[len(values) - len(BY_NAME.get(name, ())) :], strict=True)
    )
    try:
        mask = getattr(masks, name)(*values[: len(values) - len(named)], **named)
    except (ValueError, TypeError):
        return
    expected = define(*values)
    assert torch.equal(mask.dense(), expected), values
    assert mask.area == int(expected.sum()), values


@settings(reproducible, max_examples=400)
@given(flash_masks())
def test_flash_arguments_are_as_defined(mask: Mask) -> None:
    assert mask.arguments is not None
    assert torch.equal(mask.dense(), flash(mask.seqlen_q, mask.seqlen_k, *mask.arguments))


@settings(reproducible, max_examples=200)
@given(st.tuples(NUMBER, NUMBER, st.booleans() | NUMBER), st.tuples(NUMBER, NUMBER), CUTS, CUTS)
def test_flash_arguments_are_refused_or_count_each_pair_once(
    lengths: Any, sides: Any, cu_q: Any, cu_k: Any
) -> None:
    try:
        mask = Mask(*lengths, sides, tuple(cu_q), tuple(cu_k))
    except (ValueError, TypeError):
        return
    assert mask.area == int(mask.dense().sum())
    both = mask & masks.window(mask.seqlen_q, 2, 1, mask.seqlen_k)
    assert both.area == int(both.dense().sum())
    assert mask.transposed.area == mask.area


def test_what_does_not_fit_or_would_count_a_pair_twice_is_refused() -> None:
    for make in (
        lambda: Mask(8, 8, cu_seqlens_q=(0, 6, 4, 8), cu_seqlens_k=(0, 6, 4, 8)),
        lambda: Mask(8, 8, cu_seqlens_q=(0, 12), cu_seqlens_k=(0, 12)),
        lambda: Mask(4, 4, cu_seqlens_q=(0, 1, 4)),
        lambda: Mask.of(4, 4, [Slice(0, 4, 0, 2), Slice(1, 2, 1, 4)]),
        lambda: masks.from_slices(4, 4, [(0, 4, 0)]),  # type: ignore[list-item]
        lambda: masks.blocks(torch.ones(2, 2).bool(), 2, 5),
        lambda: masks.causal(4).rows(3, 5),
    ):
        with pytest.raises(ValueError):
            make()
    for wrong in (lambda: Mask(8.0, 8.0), lambda: Mask(8, 8) & 3, lambda: masks.spans(8, None)):  # type: ignore
        with pytest.raises(TypeError):
            wrong()
    with refused(ValueError, "same number of documents, got 1 and 2"):
        Mask(8, 8, cu_seqlens_q=(0, 8), cu_seqlens_k=(0, 3, 8))
    with refused(ValueError, "block_size|(queries, keys)"):
        masks.blocks(torch.ones(2, 2).bool(), (1,))  # type: ignore[arg-type]
    with refused(ValueError, "block_size|at least 1"):
        masks.blocks(torch.ones(2, 2).bool(), 0)
    assert Mask(np.int64(4), 4) == Mask(4, 4)
    assert masks.from_slices(4, 4, [(0, 4, 0, 2)]).words == "1 slices"


def test_more_slices_than_fit_are_refused_by_their_number() -> None:
    def refuse_both() -> None:
        for seqlen, size, number in ((10**7, 1, "10,000,000"), (2**40, 4, "274,877,906,944")):
            with refused(ValueError, f"{MAX_SLICES:,}|{number}"):
                masks.chunked(seqlen, size)

    _, calls = counted(refuse_both)
    assert calls < 1000, "slices are made before they are counted"
    assert masks.chunked(10**7, 128).area == 78_125 * 128 * 129 // 2


# -- masks of torch's FlexAttention

BITS = torch.tensor([[(n * (7 * b + 3)) % 5 < 2 for b in range(4)] for n in range(320)])
NUMBERS_OF = torch.arange(320).remainder(7).float()
DOCUMENT = torch.arange(320) // 90
BIAS = torch.linspace(-1, 1, 320)
FUNCTIONS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 70),
    "documents": lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k),
    "any": lambda b, h, q, k: (BITS[q] & BITS[k]).any(),
    "norm": lambda b, h, q, k: (BITS[q].float() - BITS[k].float()).norm() < 1.5,
    "stack": lambda b, h, q, k: torch.stack([NUMBERS_OF[q], NUMBERS_OF[k]]).max() > 4,
    "cat": lambda b, h, q, k: torch.cat([BITS[q], BITS[k]]).sum() % 2 == 0,
    "mean": lambda b, h, q, k: torch.stack([BIAS[q], BIAS[k]]).mean() > 0.1,
    "dot": lambda b, h, q, k: BITS[q].float() @ BITS[k].float() >= 1,
    "modulo": lambda b, h, q, k: (q + k) % 3 != 0,
    "where": lambda b, h, q, k: torch.where(q < 100, q >= k, k % 2 == 0),
    "batch and head": lambda b, h, q, k: q + b >= k + h,
    "nothing": lambda b, h, q, k: q < 0,
    "alike": lambda b, h, q, k: torch.tensor(True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_block_masks_are_read_as_torch_reads_them(name: str) -> None:
    mask_mod = FUNCTIONS[name]
    for lengths, size in (((97, 257), (32, 64)), ((129, 63), 128)):
        expected = create_mask(mask_mod, 1, 1, *lengths, device="cpu")[0, 0].bool()
        block_mask = create_block_mask(
            mask_mod, None, None, *lengths, device="cpu", BLOCK_SIZE=size
        )
        mask = masks.blocks(block_mask)
        assert torch.equal(mask.dense(), expected), (lengths, size)
        assert mask.area == int(expected.sum())


def test_functions_themselves_and_masks_of_several_heads_are_refused() -> None:
    with refused(TypeError, "a torch.Tensor or a BlockMask"):
        masks.blocks(FUNCTIONS["causal"])
    several = create_block_mask(FUNCTIONS["causal"], None, 2, 320, 320, device="cpu")
    with refused(NotImplementedError, "one batch entry and one head"):
        masks.blocks(several)


def test_each_mask_of_a_block_mask_that_differs_by_batch_entry_and_head() -> None:
    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k <= 20 + 40 * b + 7 * h)

    expected = create_mask(seen, 2, 3, 97, 130, device="cpu").bool()
    block_mask = create_block_mask(seen, 2, 3, 97, 130, device="cpu", BLOCK_SIZE=32)
    each = masks.each_of_blocks(block_mask)
    assert torch.equal(
        torch.stack([torch.stack([mask.dense() for mask in heads]) for heads in each]), expected
    )
    with refused(TypeError, "BlockMask|Tensor"):
        masks.each_of_blocks(torch.ones(2))
