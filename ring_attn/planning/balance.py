"""Layouts from content: where to cut a sequence so that all ranks have equal work.

    by_area        equal numbers of visible pairs, for any mask
    by_documents   packed documents: the cheapest cuts that keep the work balanced
    by_separators  cuts only after separator tokens (ends of sentences, of turns)
    by_cost        any cost per token
    by_memory      shards in proportion to the free memory of their ranks

Each returns `SequenceLayout.boundaries(...)`, the same on every rank. `balance_of` rates a layout:
max / mean of the work, and of the rows.

    causal, 12 rows, 3 ranks        rank 0           rank 1     rank 2         work   max / mean
    equal rows                      0 1 2 3          4 5 6 7    8 9 10 11      10 26 42   1.62
    by_area                         0 1 2 3 4 5 6    7 8 9      10 11          28 27 23   1.08

Equal work is unequal memory: above, `by_area` gives rank 0 7 of 12 rows. For a causal mask without
documents `SequenceLayout.zigzag` balances both. Boundaries suit masks that depend on the content.

The work of a query is the number of keys that it sees, an exact integer. The largest part is
minimised exactly: a binary search over its size, with a greedy walk for each probe.

The cost of a cut is the KV rows that must cross it: rows that a query on the other side sees.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.checks.attention import check_cu_seqlens, check_window
from ring_attn.core.layout import SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.planning.partition import (
    as_costs,
    as_integers,
    cheapest_cuts,
    even_cuts,
    exact_sums,
    least_maximum,
)
from ring_attn.values import checks as values

# Positions inside documents that `by_documents` considers, besides all ends of documents. It covers
# every position of sequences up to this length, and 16 per rank for 4096 ranks in longer ones.
MAX_INNER_CUTS = 1 << 16

# -- how good a layout is


@dataclass(frozen=True)
class Balance:
    """Each rank's work (visible pairs, or summed costs), and the rows of its shard."""

    work: tuple[float, ...]
    rows: tuple[int, ...]

    @property
    def of_work(self) -> float:
        """max / mean of the work: 1.0 is perfect; `world_size` means that one rank does it all."""
        return _max_over_mean(self.work)

    @property
    def of_rows(self) -> float:
        """max / mean of the rows."""
        return _max_over_mean(self.rows)


def balance_of(layout: SequenceLayout, work: Mask | Tensor | Sequence[float]) -> Balance:
    """Work and rows of every rank; `work` is a mask, for its visible pairs, or (seqlen,) costs.

    Example:
        >>> causal = Mask(12, 12, causal=True)
        >>> balance_of(SequenceLayout.contiguous(12, 3), causal).work
        (10, 26, 42)
        >>> balance_of(by_area(causal, 3), causal)
        Balance(work=(28, 27, 23), rows=(7, 3, 2))
    """
    costs = _work("work", work)
    values.check_type("layout", layout, SequenceLayout)
    _check_length(costs.numel(), layout)
    own = [costs[layout.position_ids(rank)].tolist() for rank in range(layout.world_size)]
    # fsum rounds once, so the order of the rows makes no difference.
    total: Callable[[list[float]], float] = math.fsum if costs.is_floating_point() else sum
    return Balance(tuple(map(total, own)), layout.shard_lens)


def visible_keys(mask: Mask) -> Tensor:
    """(seqlen_q,) int64: number of keys that each query sees, the cost of its attention.

    Example:
        >>> visible_keys(Mask(5, 5, causal=True, window_size=(2, -1))).tolist()
        [1, 2, 3, 3, 3]
    """
    start, stop = mask.visible_runs(torch.arange(mask.seqlen_q, device="cpu"))
    return (stop - start).sum(0)


def crossing_rows(mask: Mask) -> Tensor:
    """(seqlen + 1,) int64: KV rows that must cross a cut before each position, in either direction.

    Queries and keys must have the same length; they are cut at the same positions.

    Example:
        >>> crossing_rows(Mask(7, 7, True, (-1, -1), (0, 3, 7), (0, 3, 7))).tolist()
        [0, 1, 2, 0, 1, 2, 3, 0]
    """
    if mask.seqlen_q != mask.seqlen_k:
        raise ValueError(
            "crossing_rows needs a mask with as many queries as keys, "
            f"got {mask.seqlen_q} queries and {mask.seqlen_k} keys"
        )
    keys = torch.arange(mask.seqlen_k, device="cpu")
    start, stop = mask.transposed.visible_runs(keys)
    # The first and the last query that sees each key; a key that no query sees crosses no cut.
    seen = stop > start
    first = start.where(seen, keys).amin(0) if len(seen) else keys
    last = (stop - 1).where(seen, keys).amax(0) if len(seen) else keys
    # Key j crosses the cuts (j, last] and (first, j]: +1 where each run begins, -1 after its end.
    changes = torch.zeros(mask.seqlen_q + 2, dtype=torch.int64, device="cpu")
    for begin, end in ((keys, last.maximum(keys)), (first.minimum(keys), keys)):
        one = torch.ones_like(keys)
        changes.index_add_(0, begin + 1, one).index_add_(0, end + 1, -one)
    return changes.cumsum(0)[:-1]


# -- layouts


def by_area(mask: Mask, world_size: int, *, align: int = 1) -> SequenceLayout:
    """Boundaries that balance the visible pairs of any mask: no others have a smaller maximum.

    Every shard begins at a multiple of `align`; 128 suits the kernels and `same_bits`. With fewer
    rows than ranks, some ranks get none.

    Example:
        >>> print(by_area(Mask(1024, 1024, causal=True), world_size=4, align=128))
        boundaries([0, 512, 768, 896, 1024])
    """
    values.check_type("mask", mask, Mask)
    return by_cost(visible_keys(mask), world_size, align=align)


def by_cost(cost: Tensor | Sequence[float], world_size: int, *, align: int = 1) -> SequenceLayout:
    """Boundaries that balance a cost (seqlen,) per token: no others have a smaller maximum.

    Costs must be finite and not negative. Even floats are added exactly, so every rank gets the
    same cuts. Every shard begins at a multiple of `align`.

    Example:
        >>> by_cost([1.0, 1.0, 1.0, 1.0, 4.0, 0.5], world_size=2).cuts
        (0, 4, 6)
    """
    _check_counts(world_size=world_size, align=align)
    sums = exact_sums(as_costs("cost", cost))
    return _balanced(sums, _places(len(sums) - 1, align), world_size)


def by_separators(
    token_ids: Tensor | Sequence[int],
    separators: Collection[int],
    world_size: int,
    *,
    work: Mask | Tensor | Sequence[float] | None = None,
) -> SequenceLayout:
    """The best balanced boundaries among those right after separator tokens.

    Args:
        token_ids: (seqlen,) integers.
        separators: ids after which the sequence may be cut: newline, end of turn, end of text.
        world_size: number of ranks; with too few separators some get no rows.
        work: what to balance: a mask's visible pairs, or (seqlen,) costs; None balances rows.

    Example:
        >>> by_separators([5, 6, 0, 7, 0, 8, 9, 8, 0, 3], {0}, world_size=3).cuts
        (0, 3, 5, 10)
    """
    _check_counts(world_size=world_size)
    ids = as_integers("token_ids", token_ids)
    ends = as_integers("separators", values.as_tuple("separators", separators))
    if not len(ends):
        raise ValueError("separators must hold at least one token id, got none")
    items = torch.ones_like(ids) if work is None else _work("work", work)
    if items.numel() != ids.numel():
        raise ValueError(f"work is over {items.numel()} positions, token_ids over {ids.numel()}")
    after = torch.isin(ids, ends).nonzero().flatten() + 1
    cuts = sorted({0, *after.tolist(), ids.numel()})
    return _balanced(exact_sums(items), cuts, world_size)


def by_documents(
    cu_seqlens: Tensor | Sequence[int],
    world_size: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    max_balance: float = 1.05,
    align: int = 1,
) -> SequenceLayout:
    """Boundaries for packed documents: the cheapest cuts, among all that balance the work.

    A rank's visible pairs are at most `max_balance` times the mean or, if the lengths do not allow
    that, as few as any cuts allow. If ends of documents meet that limit, the best balanced of them
    are the cuts. Otherwise the cuts are those that the fewest KV rows cross, among ends of
    documents and `MAX_INNER_CUTS` positions between them.

    Args:
        cu_seqlens: (documents + 1,) boundaries of the documents, from 0 to the length.
        world_size: number of ranks.
        causal, window_size: as for `ring_attention`.
        max_balance: max / mean of the work that is acceptable for cheaper cuts.
        align: every shard begins at a multiple of it; other ends of documents are not used.

    Example:
        >>> by_documents([0, 100, 140, 200], world_size=2, causal=True).cuts
        (0, 86, 200)
        >>> by_documents([0, 100, 140, 200], world_size=2, causal=True, max_balance=1.4).cuts
        (0, 100, 200)
    """
    _check_counts(world_size=world_size, align=align)
    check_max_balance(max_balance)
    boundaries = check_cu_seqlens("cu_seqlens", as_integers("cu_seqlens", cu_seqlens))
    assert boundaries is not None, "only None gives None"
    seqlen = boundaries[-1]
    window = check_window(window_size, causal)
    mask = Mask(seqlen, seqlen, causal, window, boundaries, boundaries)
    if not seqlen:
        return SequenceLayout.boundaries([0] * (world_size + 1))
    sums = exact_sums(visible_keys(mask))
    anywhere = _places(seqlen, align)
    at_any = [sums[place] for place in anywhere]
    best = least_maximum(at_any, world_size)
    limit = max(best, math.floor(Fraction(max_balance) * sums[-1] / world_size))

    ends = sorted({end for end in boundaries if end % align == 0 or end == seqlen})
    at_ends = [sums[end] for end in ends]
    greatest = least_maximum(at_ends, world_size)
    if greatest <= limit:
        return SequenceLayout.boundaries(even_cuts(at_ends, ends, world_size, greatest))

    balanced = even_cuts(at_any, anywhere, world_size, best)
    step = align * -(-(len(anywhere) - 1) // MAX_INNER_CUTS)
    positions = sorted({*ends, *range(0, seqlen, step), *balanced})
    costs = crossing_rows(mask)[positions].tolist()
    feasible = [bisect_left(positions, cut) for cut in balanced]
    chosen = cheapest_cuts([sums[at] for at in positions], costs, limit, feasible)
    return SequenceLayout.boundaries([positions[index] for index in chosen])


def by_memory(seqlen: int, free_bytes: Sequence[int], bytes_per_token: int) -> SequenceLayout:
    """Shards in proportion to the rows that fit into each rank's free memory, none longer.

    Args:
        seqlen: number of positions.
        free_bytes: per rank, memory for a shard; the same list on every rank (all-gather it).
        bytes_per_token: memory of one row: activations and KV of all layers on the rank.

    Example:
        >>> by_memory(1000, [8 << 30, 8 << 30, 4 << 30], bytes_per_token=1 << 20).shard_lens
        (400, 400, 200)
    """
    _check_counts(bytes_per_token=bytes_per_token)
    free_bytes = values.as_tuple("free_bytes", free_bytes)
    _check_counts(0, seqlen=seqlen, **{f"free_bytes[{r}]": b for r, b in enumerate(free_bytes)})
    if not len(free_bytes):
        raise ValueError("free_bytes must name the free memory of at least one rank, got none")
    capacity = [free // bytes_per_token for free in free_bytes]
    if seqlen > sum(capacity):
        raise ValueError(
            f"seqlen {seqlen} at {bytes_per_token} bytes a token needs {seqlen * bytes_per_token} "
            f"bytes; the {len(capacity)} ranks have {sum(free_bytes)} free, room for "
            f"{sum(capacity)} tokens: take more ranks, or fewer bytes a token"
        )
    # No part of a whole number of rows is more than the number, rounded up or down.
    before = accumulate(capacity, initial=0)
    return SequenceLayout.boundaries([seqlen * rows // max(sum(capacity), 1) for rows in before])


# -- number of ranks, and rows that cross their boundaries


class Size(NamedTuple):
    """Number of ranks that a sequence needs, and the most rows that any of them then holds."""

    world_size: int
    tokens_per_rank: int


def least_world_size(
    seqlen: int, bytes_per_rank: int, bytes_per_token: int, world_size: int
) -> Size:
    """The fewest of `world_size` ranks that hold a sequence in equal shards.

    Example:
        >>> least_world_size(10_000, 8 << 30, 1 << 10, world_size=4)
        Size(world_size=1, tokens_per_rank=10000)
        >>> least_world_size(1_000_000, 80 << 30, 512 << 10, world_size=64)
        Size(world_size=7, tokens_per_rank=142858)
    """
    _check_counts(bytes_per_token=bytes_per_token, world_size=world_size)
    _check_counts(0, seqlen=seqlen, bytes_per_rank=bytes_per_rank)
    capacity = bytes_per_rank // bytes_per_token
    if seqlen > world_size * capacity:
        raise ValueError(
            f"seqlen {seqlen} at {bytes_per_token} bytes a token needs {seqlen * bytes_per_token} "
            f"bytes; {world_size} ranks of {bytes_per_rank} bytes hold {capacity} tokens each, "
            f"{world_size * capacity} in all"
            + (f": {-(-seqlen // capacity)} ranks would do" if capacity else "")
        )
    ranks = max(1, -(-seqlen // capacity)) if seqlen else 1
    return Size(ranks, -(-seqlen // ranks))


def halo_rows(layout: SequenceLayout, mask: Mask, rank: int) -> tuple[int, int]:
    """Numbers of KV rows right before and right after a rank's shard that its queries see.

    With a window these are exactly the rows that are sent to this rank. Each rank of the layout
    must hold one run of positions, or none.

    Example:
        >>> layout = SequenceLayout.contiguous(1000, 4)
        >>> halo_rows(layout, Mask(1000, 1000, causal=True, window_size=(96, -1)), rank=2)
        (96, 0)
    """
    values.check_type("layout", layout, SequenceLayout)
    values.check_type("mask", mask, Mask)
    _check_length(mask.seqlen_q, layout)
    _check_length(mask.seqlen_k, layout)
    segments = layout.segments(rank)
    if not segments:
        return 0, 0
    if len(segments) > 1 or segments[0].stride > 1 < segments[0].length:
        raise ValueError(f"halo needs shards that are one run of positions each, got {layout}")
    first, last = segments[0].start, segments[0].start + segments[0].length
    start, stop = mask.visible_runs(segments[0].positions())
    seeing = stop > start
    if not bool(seeing.any()):
        return 0, 0
    return max(0, first - int(start[seeing].min())), max(0, int(stop[seeing].max()) - last)


def check_halo(layout: SequenceLayout, mask: Mask) -> None:
    """Refuses a layout where a rank needs a neighbour's whole shard, or rows beyond it.

    The ring also runs without this check, in more hops; it is for users who rely on one hop.
    """
    values.check_type("layout", layout, SequenceLayout)
    for rank in range(layout.world_size):
        neighbours = rank - 1, rank + 1
        for rows, neighbour in zip(halo_rows(layout, mask, rank), neighbours, strict=True):
            if rows and rows >= layout.shard_len(neighbour):
                raise ValueError(
                    f"the overlap must be shorter than a chunk: rank {rank} needs {rows} rows of "
                    f"rank {neighbour}, which holds {layout.shard_len(neighbour)}, in {layout}; "
                    "use a smaller window or fewer ranks"
                )


def local_rows(layout: SequenceLayout, rank: int, start: int, stop: int) -> slice:
    """Rows of a rank's shard that hold the global positions `[start, stop)`; they must be one run.

    Example:
        >>> local_rows(SequenceLayout.zigzag(16, 2), rank=0, start=13, stop=16)
        slice(5, 8, None)
    """
    values.check_type("layout", layout, SequenceLayout)
    start, stop = values.as_int("start", start), values.as_int("stop", stop)
    if not 0 <= start <= stop <= layout.seqlen:
        raise ValueError(
            f"start and stop must lie within [0, {layout.seqlen}], got [{start}, {stop})"
        )
    positions = layout.position_ids(rank)
    rows = ((positions >= start) & (positions < stop)).nonzero().flatten()
    first = int(rows[0]) if rows.numel() else 0
    local = slice(first, first + stop - start)
    if positions[local].tolist() != [*range(start, stop)]:
        raise ValueError(
            f"positions [{start}, {stop}) are not local to rank {rank}, in one run: it holds "
            f"{rows.numel()} of them in {layout}"
        )
    return local


def _places(seqlen: int, align: int) -> list[int]:
    return [*range(0, seqlen, align), seqlen]


def _balanced(sums: list[int], cuts: list[int], world_size: int) -> SequenceLayout:
    """Boundaries at some of the cuts with the smallest possible maximum of work."""
    at_cuts = [sums[cut] for cut in cuts]
    greatest = least_maximum(at_cuts, world_size)
    return SequenceLayout.boundaries(even_cuts(at_cuts, cuts, world_size, greatest))


def _max_over_mean(shares: Sequence[float]) -> float:
    total = math.fsum(shares)
    return max(shares) * len(shares) / total if total else 1.0


# -- checks


def _work(name: str, work: Mask | Tensor | Sequence[float]) -> Tensor:
    return visible_keys(work) if isinstance(work, Mask) else as_costs(name, work)


def _check_counts(least: int = 1, **counts: int) -> None:
    for name, count in counts.items():
        values.check_int(name, count, least=least)


def check_max_balance(max_balance: float) -> None:
    values.check_number("max_balance", max_balance)
    if not (math.isfinite(max_balance) and max_balance >= 1):
        raise ValueError(f"max_balance is max / mean, finite and at least 1, got {max_balance}")


def _check_length(length: int, layout: SequenceLayout) -> None:
    if length != layout.seqlen:
        raise ValueError(
            f"mask or costs are over {length} positions, the layout over {layout.seqlen}"
        )
