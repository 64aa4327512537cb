"""Global positions of each rank: contiguous, zigzag, striped, boundaries, any segments.

A layout is a value: for each rank a short list of segments (runs of positions with a stride).
Plans, shards and position ids all follow from the segments.

    seqlen 8 on 2 ranks           rank 0         rank 1
    contiguous                    0 1 2 3        4 5 6 7
    zigzag                        0 1 6 7        2 3 4 5        chunks r and 2P-1-r
    striped                       0 2 4 6        1 3 5 7
    boundaries (0, 5, 8)          0 1 2 3 4      5 6 7

Lengths need not divide: the first parts are then one position longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
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
        for name, value in (("cuts", self.cuts), ("parts", self.parts)):
            if not (value is None or isinstance(value, tuple)):
                raise ValueError(
                    f"{name} must be a tuple or None, got {value!r}; use a constructor"
                )
        seqlen, world_size = _checked(self.seqlen, self.world_size)
        if self.kind == "boundaries":
            expected = _fields_of_cuts(self.cuts or ())
        elif self.kind == "segments":
            expected = _fields_of_parts(self.parts or ())
        else:
            expected = _Fields(self.kind, seqlen, world_size)
        given = _Fields(self.kind, self.seqlen, self.world_size, self.cuts, self.parts)
        if given != expected:
            raise ValueError(
                f"{self.kind!r} has seqlen {expected.seqlen}, world_size {expected.world_size}, "
                f"cuts {expected.cuts} and parts {expected.parts}, got {self.seqlen}, "
                f"{self.world_size}, {self.cuts} and {self.parts}; use a constructor of "
                "SequenceLayout"
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
        """The layout of valid fields, unchecked."""
        layout = object.__new__(cls)
        # One after the other, as torch 2.11's dynamo cannot trace an update of `vars(layout)`.
        object.__setattr__(layout, "kind", kind)
        object.__setattr__(layout, "seqlen", seqlen)
        object.__setattr__(layout, "world_size", world_size)
        object.__setattr__(layout, "cuts", cuts)
        object.__setattr__(layout, "parts", parts)
        return layout

    @classmethod
    def contiguous(cls, seqlen: int, world_size: int) -> SequenceLayout:
        """Rank r holds the r-th of `world_size` equal runs."""
        return cls._new("contiguous", *_checked(seqlen, world_size))

    @classmethod
    def zigzag(cls, seqlen: int, world_size: int) -> SequenceLayout:
        """Rank r holds chunks r and 2P-1-r of 2P, which balances the work of a causal mask.

        If `seqlen` divides by 2P, the order is the same as in torch's `_HeadTailLoadBalancer`.
        """
        return cls._new("zigzag", *_checked(seqlen, world_size))

    @classmethod
    def striped(cls, seqlen: int, world_size: int) -> SequenceLayout:
        """Rank r holds positions r, r+P, r+2P, ... (Striped Attention, arXiv 2311.09431)."""
        return cls._new("striped", *_checked(seqlen, world_size))

    @classmethod
    def boundaries(cls, cuts: Sequence[int]) -> SequenceLayout:
        """Rank r holds `[cuts[r], cuts[r + 1])`; equal neighbours give that rank an empty shard.

        Args:
            cuts: world_size + 1 positions, from 0 to the length, never decreasing.

        Raises:
            ValueError: the cuts do not start at 0, decrease, or are fewer than two.
            TypeError: a cut is not an int.
        """
        return cls._new(*_fields_of_cuts(cuts))

    @classmethod
    def from_segments(cls, parts: Sequence[Sequence[Segment]]) -> SequenceLayout:
        """Rank r holds the segments `parts[r]`, one after another.

        Adjacent segments are joined. If each shard is one run, in the order of the ranks, the
        result is a `boundaries` layout. So equal layouts compare equal however they were made.

        Args:
            parts: the segments of each rank, all of one stride; together they hold every position
                from 0 on once.

        Raises:
            ValueError: no ranks, segments of different strides, or positions that are held twice or
                by no rank.
            TypeError: an element is not a `Segment`, or its numbers are not ints.

        Example:
            >>> halves = [[Segment(0, 2), Segment(6, 2)], [Segment(2, 4)]]
            >>> SequenceLayout.from_segments(halves).position_ids(rank=0).tolist()
            [0, 1, 6, 7]
        """
        return cls._new(*_fields_of_parts(parts))

    @classmethod
    def from_name(cls, name: str, seqlen: int, world_size: int) -> SequenceLayout:
        """The layout of that name; ValueError lists the valid names."""
        if not isinstance(name, str) or name not in LAYOUTS:
            raise ValueError(
                f"layout must be one of {list(LAYOUTS)} or a SequenceLayout, got {name!r}"
            )
        return cls._new(name, *_checked(seqlen, world_size))

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> SequenceLayout:
        code, *rest = numbers
        if KINDS[code] == "boundaries":
            return cls.boundaries(rest)
        if KINDS[code] != "segments":
            seqlen, world_size = rest
            return cls.from_name(KINDS[code], seqlen, world_size)
        counts = rest[1 : 1 + rest[0]]
        runs = iter(zip(*(iter(rest[1 + rest[0] :]),) * 3, strict=True))
        return cls.from_segments([[Segment(*next(runs)) for _ in range(count)] for count in counts])

    @kept
    def numbers(self) -> tuple[int, ...]:
        """The layout as numbers, its kind and then its fields, as operators of torch take it."""
        code = KINDS.index(self.kind)
        if self.cuts is not None:
            return (code, *self.cuts)
        if self.parts is None:
            return (code, self.seqlen, self.world_size)
        counts = [len(part) for part in self.parts]
        runs = [(s.start, s.length, s.stride) for part in self.parts for s in part]
        return (code, len(counts), *counts, *(n for run in runs for n in run))

    def appended(self, rank: int, count: int) -> SequenceLayout:
        """The layout after one rank appends `count` positions to the sequence.

        A KV cache grows like this: new rows follow the rank's old rows. The time grows with the
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
        end, stride = self.seqlen + count, self.stride
        if stride == 1:
            added = [Segment(self.seqlen, count)]
        else:  # a segment holds every stride-th position: consecutive positions are no segment
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
        parts, lens = [*self.parts], [*self.shard_lens]
        parts[rank], lens[rank] = (*parts[rank][:-1], *tail), lens[rank] + count
        # Skips the checks of `from_segments`, whose time grows with the number of segments.
        grown = SequenceLayout._new("segments", end, self.world_size, parts=tuple(parts))
        vars(grown).update(_shard_lens=tuple(lens), _stride=stride)
        return grown

    def followed_by(self, chunk: SequenceLayout) -> SequenceLayout:
        """The layout of this sequence and then `chunk`, such as a KV cache and more of a prompt.

        On every rank the rows of the chunk follow the rows of this layout.

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
                f"both layouts must have the same ranks, got {self.world_size} and "
                f"{chunk.world_size}: {self} followed by {chunk}"
            )
        held = [[*segments] for segments in _segments(self)]
        for part, segments in zip(held, _segments(chunk), strict=True):
            part += [Segment(self.seqlen + s.start, s.length, s.stride) for s in segments]
        return SequenceLayout.from_segments(held)

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The rank's segments, in the order of its rows, without empty ones."""
        return _segments(self)[self._rank(rank)]

    def shard_len(self, rank: int) -> int:
        return self.shard_lens[self._rank(rank)]

    @kept
    def shard_lens(self) -> tuple[int, ...]:
        return tuple(sum(s.length for s in segments) for segments in _segments(self))

    @kept
    def stride(self) -> int:
        """Distance between positions of neighbouring rows in a segment: 1 unless striped."""
        if self.kind == "striped":
            return self.world_size
        return next((s.stride for part in self.parts or () for s in part), 1)

    def position_ids(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """(shard_len,) int64 global positions of the rank's rows, for RoPE."""
        parts = [segment.positions() for segment in self.segments(rank)]
        return torch.cat(parts or [torch.arange(0, device="cpu")]).to(device)

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The rank's rows of a whole tensor.

        Args:
            x: any tensor with `seqlen` rows in `dim`.
            rank: the rank.
            dim: the sequence dim.

        Returns:
            A contiguous tensor with `shard_len(rank)` rows in `dim`; it may share memory with `x`.

        Raises:
            ValueError: `x` has another number of rows.
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
        """The whole tensor from the shards of all ranks, in the order of the ranks.

        Raises:
            ValueError: a wrong number of shards, a wrong number of rows in a shard, or shards whose
                other dims or devices differ.
            TypeError: the shards are not tensors of one dtype.
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
        return torch.cat(list(shards), dim).index_select(dim, self._restore.to(shards[0].device))

    def mask_area(self, mask: Mask) -> tuple[int, ...]:
        """Number of visible (query, key) pairs of each rank's queries: its share of the work.

        Raises:
            ValueError: the mask has another number of queries.
        """
        check_type("mask", mask, Mask)
        if mask.seqlen_q != self.seqlen:
            raise ValueError(f"mask has {mask.seqlen_q} queries, layout {self} has {self.seqlen}")
        areas = []
        for rank in range(self.world_size):
            start, stop = mask.visible_runs(self.position_ids(rank))
            areas.append(int((stop - start).sum()))  # of all layers
        return tuple(areas)

    @kept
    def _hash(self) -> int:
        return hash((self.kind, self.seqlen, self.world_size, self.cuts, self.parts))

    def __hash__(self) -> int:
        # Cached: hashing the segments of thousands of ranks at every look-up would be slow.
        return self._hash

    def __str__(self) -> str:
        if self.cuts is not None:
            return f"boundaries({list(self.cuts)})"
        if self.parts is not None and sum(map(len, self.parts)) > MAX_SHOWN:
            count = sum(map(len, self.parts))
            return f"segments(seqlen={self.seqlen}, world_size={self.world_size}, {count} of them)"
        if self.parts is not None:
            return f"segments({[[tuple(vars(s).values()) for s in part] for part in self.parts]})"
        return f"{self.kind}(seqlen={self.seqlen}, world_size={self.world_size})"

    @kept
    def _restore(self) -> Tensor:
        order = torch.cat([self.position_ids(rank) for rank in range(self.world_size)])
        return torch.empty_like(order).scatter_(0, order, torch.arange(self.seqlen, device="cpu"))

    def _rank(self, rank: int) -> int:
        rank = as_int("rank", rank)
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}) for {self}, got {rank}")
        return rank

    def check_rows(self, x: Tensor, dim: int, name: str = "x") -> None:
        """Refuses a tensor without `seqlen` rows in `dim`."""
        check_dim(name, x, dim)
        if x.size(dim) != self.seqlen:
            raise ValueError(
                f"{name} must have {self.seqlen} rows in dim {dim} for {self}, got {tuple(x.shape)}"
            )


def _checked(seqlen: int, world_size: int) -> tuple[int, int]:
    seqlen, world_size = as_int("seqlen", seqlen), as_int("world_size", world_size)
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if seqlen < 0:
        raise ValueError(f"seqlen must not be negative, got {seqlen}")
    return seqlen, world_size


def _equal_cuts(seqlen: int, parts: int) -> list[int]:
    size, longer = seqlen // parts, seqlen % parts  # dynamo has no divmod of symbols
    return [part * size + min(part, longer) for part in range(parts + 1)]


def _segments(layout: SequenceLayout) -> tuple[tuple[Segment, ...], ...]:
    if layout.parts is not None:
        # Not cached: while decoding, each token makes a new layout, so the cache would never hit.
        return layout.parts
    # dynamo would trace a cached function without its cache, with a warning.
    of_kind = _segments_of_kind if torch.compiler.is_compiling() else _cached_segments_of_kind
    return of_kind(layout)


def _segments_of_kind(layout: SequenceLayout) -> tuple[tuple[Segment, ...], ...]:
    """Segments of every kind but "segments": the only function where the kinds differ."""
    seqlen, world_size = layout.seqlen, layout.world_size

    def runs(cuts: Sequence[int], *chunks: int) -> tuple[Segment, ...]:
        segments = [Segment(cuts[c], cuts[c + 1] - cuts[c]) for c in chunks]
        return tuple(segment for segment in segments if segment.length)

    if layout.kind == "striped":
        lens = [len(range(rank, seqlen, world_size)) for rank in range(world_size)]
        return tuple((Segment(r, n, world_size),) if n else () for r, n in enumerate(lens))
    if layout.kind == "zigzag":
        cuts = _equal_cuts(seqlen, 2 * world_size)
        return tuple(runs(cuts, rank, 2 * world_size - 1 - rank) for rank in range(world_size))
    cuts = list(layout.cuts) if layout.cuts is not None else _equal_cuts(seqlen, world_size)
    return tuple(runs(cuts, rank) for rank in range(world_size))


_cached_segments_of_kind = lru_cache(maxsize=1024)(_segments_of_kind)


def _fields_of_cuts(cuts: Sequence[int]) -> _Fields:
    """Check the cuts of `SequenceLayout.boundaries`, and return the fields of the layout."""
    cuts = as_ints("cuts", cuts)
    if len(cuts) < 2 or cuts[0] != 0:
        raise ValueError(f"cuts must be world_size + 1 positions that start at 0, got {[*cuts]}")
    for rank, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False)):
        if b < a:
            raise ValueError(
                f"cuts must not decrease, got {a} then {b} for rank {rank} in {[*cuts]}"
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
        (Segment(a, b - a),) if b > a else () for a, b in zip(cuts, cuts[1:], strict=False)
    )
    if runs == joined:
        return _fields_of_cuts(cuts)
    check_cover(joined, stride, seqlen)
    return _Fields("segments", seqlen, world_size=len(joined), parts=joined)


def _common_stride(parts: Sequence[Sequence[Segment]]) -> int:
    strides = sorted({s.stride for segments in parts for s in segments if s.length > 1})
    if not strides:
        # Only single positions: keep their stride if all agree on it.
        declared = {s.stride for segments in parts for s in segments}
        strides = list(declared) if len(declared) == 1 else [1]
    if len(strides) > 1:
        raise ValueError(f"all segments must have one stride, got {strides}")
    return strides[0]


def with_world_size(layouts: Layouts, world_size: int) -> Layouts | None:
    """Return the layouts of the same kinds over other ranks; None if they have no name."""
    if not {layout.kind for layout in layouts} <= set(LAYOUTS):
        return None
    q, kv = (SequenceLayout.from_name(x.kind, x.seqlen, world_size) for x in layouts)
    return q, kv
