"""Random masks and layouts, for hypothesis."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attn.core import masks as masks_of
from ring_attn.core.layout import LAYOUTS, Layouts, SequenceLayout
from ring_attn.core.mask import Mask, Slice
from ring_attn.core.segments import Segment
from ring_attn.testing import masks as table

reproducible = settings(deadline=None, derandomize=True, max_examples=150)

SEQLENS, WORLD_SIZES = st.integers(0, 90), st.integers(1, 9)
WINDOWS = ((-1, -1), (0, 0), (2, -1), (-1, 1), (1, 2), (9, 9), (0, 3), (3, 0), (40, 7))


@st.composite
def layouts(
    draw: st.DrawFn,
    seqlens: st.SearchStrategy[int] = SEQLENS,
    world_sizes: st.SearchStrategy[int] = WORLD_SIZES,
    stride: int | None = None,
    segments: bool = False,
) -> SequenceLayout:
    """Any layout, with lengths that do not divide, fewer rows than ranks, and empty shards.

    `stride` asks for layouts of that stride where shards have several rows. With `segments`, also
    runs of rows dealt to the ranks in any order.
    """
    seqlen, world_size = draw(seqlens), draw(world_sizes)
    kinds = [kind for kind in LAYOUTS if stride is None or (kind == "striped") == (stride > 1)]
    kinds += ["boundaries"] * (stride in (None, 1)) + ["segments"] * segments
    kind = draw(st.sampled_from(kinds))
    if kind in LAYOUTS:
        return SequenceLayout.from_name(kind, seqlen, world_size)
    if kind == "boundaries":
        inner = st.lists(st.integers(0, seqlen), min_size=world_size - 1, max_size=world_size - 1)
        return SequenceLayout.boundaries([0, *sorted(draw(inner)), seqlen])
    step = stride or 1
    cuts = sorted({0, *draw(st.sets(st.integers(0, seqlen), max_size=12)), seqlen})
    runs = [
        Segment(start, len(range(start, stop, step)), step)
        for first, stop in pairwise(cuts)
        for start in range(first, min(first + step, stop))
    ]
    dealt = draw(st.permutations(runs))
    return SequenceLayout.from_segments([dealt[rank::world_size] for rank in range(world_size)])


def scattered(*last: int) -> SequenceLayout:
    """Runs dealt to ranks in turn, but for the last ones, which are on the ranks given.

    There are so many that the text of the layout is cut, and does not tell the last ones.
    """
    parts: list[list[Segment]] = [[] for _ in last]
    for run, rank in enumerate([*14 * [*range(len(last))], *last]):
        parts[rank].append(Segment(2 * run, 2))
    return SequenceLayout.from_segments(parts)


@st.composite
def layouts_for(
    draw: st.DrawFn, mask: Mask, world_sizes: st.SearchStrategy[int] = WORLD_SIZES
) -> Layouts:
    """Any layouts of the mask's queries and keys that go together."""
    ranks = draw(world_sizes)
    stride = draw(st.sampled_from((1, ranks)))
    q, kv = (
        draw(layouts(st.just(n), st.just(ranks), stride, segments=True))
        for n in (mask.seqlen_q, mask.seqlen_k)
    )
    assume(q.stride == kv.stride)
    return q, kv


@st.composite
def flash_masks(draw: st.DrawFn, longest: int = 12) -> Mask:
    """Masks by flash-attention's arguments: documents may be empty, and padding may follow them."""
    seqlen_q, seqlen_k = (draw(st.integers(0, longest)) for _ in range(2))
    causal, window = draw(st.booleans()), draw(st.sampled_from(WINDOWS))
    count = draw(st.integers(0, 4))
    if not count:
        return Mask(seqlen_q, seqlen_k, causal, window)
    ends = (
        draw(st.lists(st.integers(0, n), min_size=count, max_size=count))
        for n in (seqlen_q, seqlen_k)
    )
    return Mask(seqlen_q, seqlen_k, causal, window, *((0, *sorted(each)) for each in ends))


@st.composite
def slice_masks(draw: st.DrawFn, longest: int = 12) -> Mask:
    """Masks of slices that share no pair."""
    rows, cols = (draw(st.integers(1, longest)) for _ in range(2))
    free, slices = torch.ones(rows, cols, dtype=torch.bool), []
    bounds = st.none() | st.integers(-9, 9)
    for _ in range(draw(st.integers(0, 5))):
        q0, k0 = draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))
        q1, k1 = draw(st.integers(q0, rows)), draw(st.integers(k0, cols))
        one = Slice(q0, q1, k0, k1, draw(bounds), draw(bounds))
        pairs = pairs_of([one], rows, cols)
        if not bool((pairs & ~free).any()):
            free &= ~pairs
            slices.append(one)
    return masks_of.from_slices(rows, cols, slices)


def table_masks(longest: int = 24) -> st.SearchStrategy[Mask]:
    """Masks of the table of cases."""
    pairs = st.tuples(st.integers(1, longest), st.sampled_from([*table(1)]))
    return pairs.map(lambda pair: table(pair[0])[pair[1]])


@st.composite
def made_masks(draw: st.DrawFn, longest: int = 24) -> Mask:
    """Masks of the constructors, with any arguments, and what two of them have in common."""
    n = draw(st.integers(0, longest))
    number = st.integers(0, n)

    def made() -> Mask:
        cu = (0, *sorted(draw(st.lists(number, max_size=4))), n)
        lengths = [b - a for a, b in pairwise(cu)]
        a, b, c = draw(st.tuples(number, number, st.integers(1, 5)))
        i = torch.arange(n)
        pattern = (i[:, None] * a + i * b) % 5 < c
        few = -(-n // c)
        return draw(
            st.sampled_from(
                (
                    lambda: masks_of.causal(n),
                    lambda: masks_of.window(n, a - 1, b - 1),
                    lambda: masks_of.documents(cu, causal=c > 2),
                    lambda: masks_of.chunked(n, c),
                    lambda: masks_of.prefix([x * a // max(1, n) for x in lengths], cu),
                    lambda: masks_of.spans(n, [*pairwise(cu)][::2], left=a - 1),
                    lambda: masks_of.shared_prefix(lengths[0], lengths[1:]),
                    lambda: masks_of.sink_window(n, a, b),
                    lambda: masks_of.blocks(pattern[:few, :few], c, n, n),
                    lambda: masks_of.from_dense(pattern),
                    lambda: masks_of.by_document([masks_of.window(x, a - 1, c) for x in lengths]),
                )
            )
        )()

    return made() & made() if draw(st.booleans()) else made()


def masks(longest: int = 12) -> st.SearchStrategy[Mask]:
    return flash_masks(longest) | slice_masks(longest) | table_masks(2 * longest)


def pairs_of(slices: Any, rows: int, cols: int) -> Tensor:
    """The pairs of slices, by their definition."""
    seen = torch.zeros(rows, cols, dtype=torch.bool)
    for (i, j), one in product(product(range(rows), range(cols)), slices):
        inside = one.q_start <= i < one.q_end and one.k_start <= j < one.k_end
        low = one.lo is None or j - i >= one.lo
        seen[i, j] |= inside and low and (one.hi is None or j - i <= one.hi)
    return seen
