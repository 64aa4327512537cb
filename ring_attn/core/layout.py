"""Layouts, the global positions of each rank: contiguous, zigzag, striped, or any segments.

A layout is a value: for each rank a short list of segments (runs of positions with a stride).
Plans, shards and position ids all follow from the segments.

    seqlen 8 on 2 ranks           rank 0         rank 1
    contiguous                    0 1 2 3        4 5 6 7
    zigzag                        0 1 6 7        2 3 4 5        chunks r and 2P-1-r
    striped                       0 2 4 6        1 3 5 7
    boundaries (0, 5, 8)          0 1 2 3 4      5 6 7

If the length does not divide evenly, the first parts are one position longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.core.mask import Mask
from ring_attn.core.names import LAYOUTS as LAYOUTS
from ring_attn.core.segments import Segment, check_cover, check_segments
from ring_attn.core.segments import joined as joined_segments
from ring_attn.values.checks import as_int, as_ints, as_tuple, check_dim, check_one_of, check_type
from ring_attn.values.compiling import kept

# Layouts of queries and of keys.
Layouts = tuple["SequenceLayout", "SequenceLayout"]
KINDS = (*LAYOUTS, "boundaries", "segments")

# `str` of a layout lists at most this many segments, and counts more.
MAX_SHOWN = 32


class _Fields(NamedTuple):
    """The fields of a layout."""

    kind: str
    seqlen: int
    world_size: int
    cuts: tuple[int, ...] | None = None
    parts: tuple[tuple[Segment, ...], ...] | None = None


@dataclass(frozen=True)
class SequenceLayout:
    """The split of a sequence over ranks: a value, made by one of five constructors.

    Example:
        >>> layout = SequenceLayout.zigzag(seqlen=8, world_size=2)
        >>> layout.position_ids(rank=0).tolist()
        [0, 1, 6, 7]
        >>> layout.shard(torch.arange(8) * 10, rank=1, dim=0).tolist()
        [20, 30, 40, 50]
    """

    kind: str
    seqlen: int
    world_size: int
    cuts: tuple[int, ...] | None = None
    parts: tuple[tuple[Segment, ...], ...] | None = None

    def __post_init__(self) -> None:
        """Refuse fields that no constructor would set."""
        check_one_of("kind", self.kind, KINDS)
        for name in ("cuts", "parts"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, tuple)):
                raise ValueError(
                    f"{name} must be a tuple or None, got {value!r}; use a constructor"
                )
        seqlen, world_size = _check_sizes(self.seqlen, self.world_size)
        if self.kind == "boundaries":
            expected = _fields_of_cuts(self.cuts or ())
        elif self.kind == "segments":
            expected = _fields_of_parts(self.parts or ())
        else:
            expected = _Fields(self.kind, seqlen, world_size)
        given = _Fields(self.kind, self.seqlen, self.world_size, self.cuts, self.parts)
        if given != expected:
            raise ValueError(
                f"a layout of kind {self.kind!r} must have seqlen={expected.seqlen}, "
                f"world_size={expected.world_size}, cuts={expected.cuts} and "
                f"parts={expected.parts}, got seqlen={self.seqlen}, "
                f"world_size={self.world_size}, cuts={self.cuts} and parts={self.parts}; use a "
                "constructor of SequenceLayout"
            )

    @classmethod
    def _new(
        cls,
        kind: str,
        seqlen: int,
        world_size: int,
        cuts: tuple[int, ...] | None = None,
        parts: tuple[tuple[Segment, ...], ...] | None = None,
    ) -> SequenceLayout:
        """Return the layout with these fields, without checks."""
        layout = object.__new__(cls)
        # Set one by one, because torch 2.11's dynamo cannot trace an update of `vars(layout)`.
        object.__setattr__(layout, "kind", kind)
        object.__setattr__(layout, "seqlen", seqlen)
        object.__setattr__(layout, "world_size", world_size)
        object.__setattr__(layout, "cuts", cuts)
        object.__setattr__(layout, "parts", parts)
        return layout

    @classmethod
    def _of_sizes(cls, kind: str, seqlen: int, world_size: int) -> SequenceLayout:
        """Return the layout of a kind that has no further fields, with checked sizes."""
        seqlen, world_size = _check_sizes(seqlen, world_size)
        return cls._new(kind, seqlen, world_size)

    @classmethod
    def contiguous(cls, seqlen: int, world_size: int) -> SequenceLayout:
        """Return the layout in which rank r holds the r-th of `world_size` equal runs.

        Raises:
            ValueError: a negative length, or fewer than 1 rank.
            TypeError: a number is not an int.

        Example:
            >>> SequenceLayout.contiguous(8, 2).position_ids(rank=0).tolist()
            [0, 1, 2, 3]
        """
        return cls._of_sizes("contiguous", seqlen, world_size)

    @classmethod
    def zigzag(cls, seqlen: int, world_size: int) -> SequenceLayout:
        """Return the layout in which rank r of P holds chunks r and 2P-1-r of 2P.

        This balances the work of a causal mask. If 2P divides `seqlen`, the order is the same as in
        torch's `_HeadTailLoadBalancer`.

        Raises:
            ValueError: a negative length, or fewer than 1 rank.
            TypeError: a number is not an int.

        Example:
            >>> SequenceLayout.zigzag(8, 2).position_ids(rank=0).tolist()
            [0, 1, 6, 7]
        """
        return cls._of_sizes("zigzag", seqlen, world_size)

    @classmethod
    def striped(cls, seqlen: int, world_size: int) -> SequenceLayout:
        """Return the layout in which rank r of P holds positions r, r+P, r+2P, ...

        This is the order of Striped Attention (arXiv 2311.09431).

        Raises:
            ValueError: a negative length, or fewer than 1 rank.
            TypeError: a number is not an int.

        Example:
            >>> SequenceLayout.striped(8, 2).position_ids(rank=0).tolist()
            [0, 2, 4, 6]
        """
        return cls._of_sizes("striped", seqlen, world_size)

    @classmethod
    def boundaries(cls, cuts: Sequence[int]) -> SequenceLayout:
        """Return the layout in which rank r holds the positions `[cuts[r], cuts[r + 1])`.

        Args:
            cuts: world_size + 1 positions, from 0 to the length, never decreasing. Equal neighbours
                give a rank an empty shard.

        Raises:
            ValueError: the cuts do not start at 0, decrease, or are fewer than two.
            TypeError: a cut is not an int.

        Example:
            >>> SequenceLayout.boundaries([0, 5, 8]).position_ids(rank=1).tolist()
            [5, 6, 7]
        """
        return cls._new(*_fields_of_cuts(cuts))

    @classmethod
    def from_segments(cls, parts: Sequence[Sequence[Segment]]) -> SequenceLayout:
        """Return the layout in which rank r holds the segments `parts[r]`, one after another.

        Adjacent segments are joined. If each shard is one run, in the order of the ranks, the
        result is a `boundaries` layout. Thus layouts with the same positions compare equal.

        Args:
            parts: the segments of each rank, all of one stride; together they hold every position
                from 0 on once.

        Raises:
            ValueError: there are no ranks, segments have different strides, or a position is held
                twice or by no rank.
            TypeError: an element is not a `Segment`, or its numbers are not ints.

        Example:
            >>> halves = [[Segment(0, 2), Segment(6, 2)], [Segment(2, 4)]]
            >>> SequenceLayout.from_segments(halves).position_ids(rank=0).tolist()
            [0, 1, 6, 7]
        """
        return cls._new(*_fields_of_parts(parts))

    @classmethod
    def from_name(cls, name: str, seqlen: int, world_size: int) -> SequenceLayout:
        """Return the layout of a name.

        Raises:
            ValueError: an unknown name; the error lists the valid names.
        """
        if not isinstance(name, str) or name not in LAYOUTS:
            raise ValueError(
                f"layout must be one of {list(LAYOUTS)} or a SequenceLayout, got {name!r}"
            )
        return cls._of_sizes(name, seqlen, world_size)

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> SequenceLayout:
        """Return the layout of `numbers`, which are a layout's `numbers`."""
        code, *rest = numbers
        if KINDS[code] == "boundaries":
            return cls.boundaries(rest)
        if KINDS[code] != "segments":
            seqlen, world_size = rest
            return cls.from_name(KINDS[code], seqlen, world_size)
        num_ranks, *rest = rest
        counts, fields = rest[:num_ranks], rest[num_ranks:]
        parts = []
        at = 0
        for count in counts:
            part = []
            for _ in range(count):
                start, length, stride = fields[at : at + 3]
                part.append(Segment(start, length, stride))
                at += 3
            parts.append(part)
        return cls.from_segments(parts)

    @kept
    def numbers(self) -> tuple[int, ...]:
        """The layout as numbers, the code of its kind and its fields, for operators of torch.

        Segments are the number of ranks, the number of segments of each rank, and then start,
        length and stride of each segment.
        """
        code = KINDS.index(self.kind)
        if self.cuts is not None:
            return (code, *self.cuts)
        if self.parts is None:
            return (code, self.seqlen, self.world_size)
        counts = [len(part) for part in self.parts]
        fields: list[int] = []
        for part in self.parts:
            for segment in part:
                fields += (segment.start, segment.length, segment.stride)
        return (code, len(counts), *counts, *fields)

    def appended(self, rank: int, count: int) -> SequenceLayout:
        """Return the layout after one rank appends `count` positions to the sequence.

        A KV cache grows this way: new rows follow the rank's old rows. The time grows with the
        number of the rank's segments, not with the length of the sequence.

        Args:
            rank: the rank that holds positions `seqlen .. seqlen + count - 1`.
            count: number of positions, at least 0.

        Raises:
            ValueError: the rank does not exist, or the count is negative.

        Example:
            >>> cache = SequenceLayout.contiguous(4, 2).appended(0, 1).appended(0, 1)
            >>> cache.position_ids(rank=0).tolist(), cache.position_ids(rank=1).tolist()
            ([0, 1, 4, 5], [2, 3])
        """
        self._rank(rank)
        count = as_int("count", count)
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count == 0:
            return self
        end = self.seqlen + count
        stride = self.stride
        if stride == 1:
            added = [Segment(self.seqlen, count)]
        else:  # consecutive positions are not a segment, which holds every stride-th position
            added = [Segment(position, 1, stride) for position in range(self.seqlen, end)]
        if self.parts is None:
            cuts = [0, *accumulate(self.shard_lens)]
            if self.kind in ("contiguous", "boundaries") and cuts[rank + 1] == self.seqlen:
                after = [end] * (self.world_size - rank)
                return SequenceLayout.boundaries([*cuts[: rank + 1], *after])
            held = [[*segments] for segments in _segments(self)]
            held[rank] += added
            return SequenceLayout.from_segments(held)
        tail = joined_segments([*self.parts[rank][-1:], *added], stride)
        parts = list(self.parts)
        parts[rank] = (*parts[rank][:-1], *tail)
        lens = list(self.shard_lens)
        lens[rank] += count
        # Skips the checks of `from_segments`, whose time grows with the number of segments.
        grown = SequenceLayout._new("segments", end, self.world_size, parts=tuple(parts))
        vars(grown).update(_shard_lens=tuple(lens), _stride=stride)
        return grown

    def followed_by(self, chunk: SequenceLayout) -> SequenceLayout:
        """Return the layout of this sequence followed by `chunk`.

        For example, this layout is that of a KV cache, and `chunk` that of the next part of a
        prompt. On every rank the rows of the chunk follow the rows of this layout.

        Args:
            chunk: layout over as many ranks, with positions from 0.

        Raises:
            ValueError: the numbers of ranks differ, or only one of the layouts is striped.

        Example:
            >>> chunk = SequenceLayout.zigzag(4, 2)
            >>> chunk.followed_by(chunk).position_ids(rank=0).tolist()
            [0, 3, 4, 7]
        """
        check_type("chunk", chunk, SequenceLayout)
        if chunk.world_size != self.world_size:
            raise ValueError(
                "both layouts must have the same number of ranks, got "
                f"{self.world_size} and {chunk.world_size}: {self} followed by {chunk}"
            )
        held = [[*segments] for segments in _segments(self)]
        for part, segments in zip(held, _segments(chunk), strict=True):
            part += [Segment(self.seqlen + s.start, s.length, s.stride) for s in segments]
        return SequenceLayout.from_segments(held)

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """Return the rank's segments, in the order of its rows, without empty ones.

        Raises:
            ValueError: the rank does not exist.
        """
        return _segments(self)[self._rank(rank)]

    def shard_len(self, rank: int) -> int:
        """Return the number of rows of a rank."""
        return self.shard_lens[self._rank(rank)]

    @kept
    def shard_lens(self) -> tuple[int, ...]:
        """The number of rows of each rank."""
        return tuple(sum(s.length for s in segments) for segments in _segments(self))

    @kept
    def stride(self) -> int:
        """Distance between positions of neighbouring rows in a segment: 1 unless striped."""
        if self.kind == "striped":
            return self.world_size
        return next((s.stride for part in self.parts or () for s in part), 1)

    def position_ids(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return the global positions of the rank's rows, for RoPE.

        Args:
            rank: the rank.
            device: device of the result; None means the CPU.

        Returns:
            (shard_len,) int64.

        Raises:
            ValueError: the rank does not exist.
        """
        parts = [segment.positions() for segment in self.segments(rank)]
        return torch.cat(parts or [torch.arange(0, device="cpu")]).to(device)

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return the rank's rows of a whole tensor.

        Args:
            x: any tensor with `seqlen` rows in `dim`.
            rank: the rank.
            dim: the sequence dim.

        Returns:
            A contiguous tensor with `shard_len(rank)` rows in `dim`; it may share memory with `x`.

        Raises:
            ValueError: `x` does not have `seqlen` rows in `dim`, or the rank does not exist.

        Example:
            >>> SequenceLayout.zigzag(8, 2).shard(torch.arange(8) * 10, rank=0, dim=0).tolist()
            [0, 10, 60, 70]
        """
        self.check_rows(x, dim)
        parts = []
        for segment in self.segments(rank):
            stop = segment.start + (segment.length - 1) * segment.stride + 1
            rows = [slice(None)] * x.ndim
            rows[dim] = slice(segment.start, stop, segment.stride)
            parts.append(x[tuple(rows)])
        if not parts:
            return x.narrow(dim, 0, 0)
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()

    def unshard(self, shards: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Return the whole tensor from the shards of all ranks.

        Args:
            shards: the shards in the order of the ranks.
            dim: the sequence dim.

        Raises:
            ValueError: a wrong number of shards, a wrong number of rows in a shard, or shards whose
                other dims or devices differ.
            TypeError: the shards are not tensors of one dtype.

        Example:
            >>> layout = SequenceLayout.striped(4, 2)
            >>> layout.unshard([torch.tensor([0, 2]), torch.tensor([1, 3])], dim=0).tolist()
            [0, 1, 2, 3]
        """
        shards = as_tuple("shards", shards)
        if len(shards) != self.world_size:
            raise ValueError(f"unshard needs {self.world_size} shards, got {len(shards)}")
        for rank, (x, rows) in enumerate(zip(shards, self.shard_lens, strict=True)):
            name, first = f"shard of rank {rank}", shards[0]
            check_dim(name, x, dim)
            if x.size(dim) != rows:
                raise ValueError(
                    f"{name} must have {rows} rows in dim {dim} for {self}, got {tuple(x.shape)}"
                )
            if x.dtype != first.dtype:
                raise TypeError(f"{name} must be {first.dtype} as on rank 0, got {x.dtype}")
        joined = torch.cat(list(shards), dim)  # in the order of the ranks
        return joined.index_select(dim, self._restore.to(joined.device))

    def mask_area(self, mask: Mask) -> tuple[int, ...]:
        """Return the number of visible (query, key) pairs of each rank, its share of the work.

        Raises:
            ValueError: the mask has another number of queries.
        """
        check_type("mask", mask, Mask)
        if mask.seqlen_q != self.seqlen:
            raise ValueError(
                f"mask must have {self.seqlen} queries for layout {self}, got {mask.seqlen_q}"
            )
        areas = []
        for rank in range(self.world_size):
            start, stop = mask.visible_runs(self.position_ids(rank))  # (layers, rows) each
            areas.append(int((stop - start).sum()))
        return tuple(areas)

    @kept
    def _hash(self) -> int:
        return hash((self.kind, self.seqlen, self.world_size, self.cuts, self.parts))

    def __hash__(self) -> int:
        # Cached, because a look-up would otherwise hash the segments of thousands of ranks.
        return self._hash

    def __str__(self) -> str:
        if self.cuts is not None:
            return f"boundaries({list(self.cuts)})"
        if self.parts is None:
            return f"{self.kind}(seqlen={self.seqlen}, world_size={self.world_size})"
        count = sum(len(part) for part in self.parts)
        if count > MAX_SHOWN:
            return f"segments(seqlen={self.seqlen}, world_size={self.world_size}, {count} of them)"
        shown = [[(s.start, s.length, s.stride) for s in part] for part in self.parts]
        return f"segments({shown})"

    @kept
    def _restore(self) -> Tensor:
        """For each position its row among the rows of all ranks, (seqlen,) int64."""
        order = torch.cat([self.position_ids(rank) for rank in range(self.world_size)])
        return torch.empty_like(order).scatter_(0, order, torch.arange(self.seqlen, device="cpu"))

    def _rank(self, rank: int) -> int:
        rank = as_int("rank", rank)
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}) for {self}, got {rank}")
        return rank

    def check_rows(self, x: Tensor, dim: int, name: str = "x") -> None:
        """Refuse a tensor without `seqlen` rows in `dim`."""
        check_dim(name, x, dim)
        if x.size(dim) != self.seqlen:
            raise ValueError(
                f"{name} must have {self.seqlen} rows in dim {dim} for {self}, got {tuple(x.shape)}"
            )


def _check_sizes(seqlen: int, world_size: int) -> tuple[int, int]:
    """Return both sizes as ints; refuse sizes that no layout has."""
    seqlen = as_int("seqlen", seqlen)
    world_size = as_int("world_size", world_size)
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if seqlen < 0:
        raise ValueError(f"seqlen must not be negative, got {seqlen}")
    return seqlen, world_size


def _equal_cuts(seqlen: int, parts: int) -> list[int]:
    # Not by `divmod`, which dynamo cannot trace for symbolic lengths.
    size = seqlen // parts
    longer = seqlen % parts
    return [part * size + min(part, longer) for part in range(parts + 1)]


def _segments(layout: SequenceLayout) -> tuple[tuple[Segment, ...], ...]:
    if layout.parts is not None:
        # Not cached: in decoding each token makes a new layout, so the cache would never hit.
        return layout.parts
    # dynamo would warn, and trace a cached function without its cache.
    of_kind = _segments_of_kind if torch.compiler.is_compiling() else cached_segments_of_kind
    return of_kind(layout)


def _segments_of_kind(layout: SequenceLayout) -> tuple[tuple[Segment, ...], ...]:
    """Return the segments of each rank, for every kind but "segments".

    This is the only function where the kinds differ.
    """
    seqlen, world_size = layout.seqlen, layout.world_size

    def runs(cuts: Sequence[int], *chunks: int) -> tuple[Segment, ...]:
        segments = [Segment(cuts[c], cuts[c + 1] - cuts[c]) for c in chunks]
        return tuple(segment for segment in segments if segment.length)

    if layout.kind == "striped":
        lens = [len(range(rank, seqlen, world_size)) for rank in range(world_size)]
        return tuple(
            (Segment(start=rank, length=length, stride=world_size),) if length else ()
            for rank, length in enumerate(lens)
        )
    if layout.kind == "zigzag":
        cuts = _equal_cuts(seqlen, 2 * world_size)
        return tuple(runs(cuts, rank, 2 * world_size - 1 - rank) for rank in range(world_size))
    cuts = list(layout.cuts) if layout.cuts is not None else _equal_cuts(seqlen, world_size)
    return tuple(runs(cuts, rank) for rank in range(world_size))


cached_segments_of_kind = lru_cache(maxsize=1024)(_segments_of_kind)


def _fields_of_cuts(cuts: Sequence[int]) -> _Fields:
    """Check the cuts of `SequenceLayout.boundaries`, and return the fields of the layout."""
    cuts = as_ints("cuts", cuts)
    if len(cuts) < 2 or cuts[0] != 0:
        raise ValueError(f"cuts must be world_size + 1 positions that start at 0, got {[*cuts]}")
    for rank, (start, stop) in enumerate(pairwise(cuts)):
        if stop < start:
            raise ValueError(
                f"cuts must not decrease, got {start} then {stop} for rank {rank} in {[*cuts]}"
            )
    return _Fields("boundaries", seqlen=cuts[-1], world_size=len(cuts) - 1, cuts=cuts)


def _fields_of_parts(parts: Sequence[Sequence[Segment]]) -> _Fields:
    """Check the parts of `SequenceLayout.from_segments`, and return the fields of the layout."""
    parts = [as_tuple("each of parts", part) for part in as_tuple("parts", parts)]
    if not parts:
        raise ValueError("parts must be the segments of at least one rank, got none")
    for rank, segments in enumerate(parts):
        check_segments(rank, segments)
    stride = _common_stride(parts)
    joined = tuple(joined_segments(segments, stride) for segments in parts)
    seqlen = sum(s.length for segments in joined for s in segments)
    cuts = [0, *accumulate(sum(s.length for s in segments) for segments in joined)]
    runs = tuple(
        (Segment(start, stop - start),) if stop > start else () for start, stop in pairwise(cuts)
    )
    if runs == joined:
        return _fields_of_cuts(cuts)
    check_cover(joined, stride, seqlen)
    return _Fields("segments", seqlen, world_size=len(joined), parts=joined)


def _common_stride(parts: Sequence[Sequence[Segment]]) -> int:
    """Return the stride of all segments; refuse segments of several strides."""
    strides = sorted({s.stride for segments in parts for s in segments if s.length > 1})
    if not strides:
        # There are only single positions: keep their stride if it is the same for all.
        declared = {s.stride for segments in parts for s in segments}
        strides = list(declared) if len(declared) == 1 else [1]
    if len(strides) > 1:
        raise ValueError(f"all segments must have one stride, got {strides}")
    return strides[0]


def rank_of_last_row(layout: SequenceLayout) -> int:
    """Return the rank that has the last row of a sequence."""
    for rank in range(layout.world_size):
        for segment in layout.segments(rank):
            last = segment.start + (segment.length - 1) * segment.stride
            if last == layout.seqlen - 1:
                return rank
    raise ValueError("a sequence without rows has no end")


def with_world_size(layouts: Layouts, world_size: int) -> Layouts | None:
    """Return the layouts of the same kinds over other ranks; None if they have no name."""
    if not {layout.kind for layout in layouts} <= set(LAYOUTS):
        return None
    q, kv = (SequenceLayout.from_name(x.kind, x.seqlen, world_size) for x in layouts)
    return q, kv
