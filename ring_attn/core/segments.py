"""Segments, the runs of positions with a stride that shards consist of; and pairs of positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ring_attn.values.checks import as_int, check_type

Number = TypeVar("Number", int, Tensor)


@dataclass(frozen=True)
class Segment:
    """The positions `start, start + stride, ...`, held as consecutive rows of a shard.

    Attributes:
        start: the first position.
        length: number of positions.
        stride: distance between neighbouring positions.

    Example:
        >>> Segment(start=1, length=3, stride=2).positions().tolist()
        [1, 3, 5]
    """

    start: int
    length: int
    stride: int = 1

    def positions(self) -> Tensor:
        """Return the global positions, (length,) int64."""
        stop = self.start + self.length * self.stride
        return torch.arange(self.start, stop, self.stride, device="cpu")

    def rows_between(self, start: int, stop: int) -> tuple[int, int]:
        """Return the rows `[first, last)` of the segment whose positions lie in `[start, stop)`."""
        first = max(0, -((self.start - start) // self.stride))
        last = min(self.length, -((self.start - stop) // self.stride))
        return first, max(first, last)


def check_segments(rank: int, segments: Sequence[Segment]) -> None:
    """Refuse parts of a rank that are not segments, and segments whose numbers are not ints."""
    label = f"each of rank {rank}'s parts"
    for segment in segments:
        check_type(label, segment, Segment)
        as_int(f"start of {label}", segment.start)
        as_int(f"length of {label}", segment.length, least=0)
        as_int(f"stride of {label}", segment.stride)


def joined(segments: Sequence[Segment], stride: int) -> tuple[Segment, ...]:
    """Return the segments with one stride, adjacent ones joined, without empty ones."""
    found: list[Segment] = []
    for segment in segments:
        last = found[-1] if found else None
        if last and last.start + last.length * stride == segment.start:
            found[-1] = Segment(last.start, last.length + segment.length, stride)
        elif segment.length:
            found.append(Segment(segment.start, segment.length, stride))
    return tuple(found)


def check_cover(parts: Sequence[Sequence[Segment]], stride: int, seqlen: int) -> None:
    """Refuse segments that do not hold each position of `[0, seqlen)` exactly once."""
    for rank, segments in enumerate(parts):
        for s in segments:
            last = s.start + (s.length - 1) * stride
            if s.start < 0 or s.length < 1 or stride < 1 or last >= seqlen:
                raise ValueError(
                    f"segments must hold each position of 0..{seqlen - 1} once, because they have "
                    f"{seqlen} rows in total, got {s} of rank {rank}"
                )
    # All positions of a segment have the same remainder modulo the stride. Among the segments of a
    # remainder, each must start where the previous one ended.
    ends = list(range(min(stride, seqlen)))
    for s in sorted((s for segments in parts for s in segments), key=lambda s: s.start):
        expected = ends[s.start % stride]
        if s.start != expected:
            times = "twice" if s.start < expected else "nowhere"
            raise ValueError(
                "segments must hold each position once, but position "
                f"{min(s.start, expected)} is held {times}"
            )
        ends[s.start % stride] = s.start + s.length * stride


def pairs_up_to(rows: Number, cols: Number, hi: Number) -> Number:
    """Return the number of pairs with `j - i <= hi` in `rows` x `cols`, in closed form.

    The arguments are ints, or tensors with the sizes of many rectangles. Therefore conditions are
    factors of 0 or 1, the only form that serves both.
    """

    def below(x: Number) -> Number:  # sum over t <= x of clip(t, 0, cols)
        x = x * (x > 0)
        inside = cols + (x - cols) * (x < cols)  # min(x, cols)
        return (inside * (inside + 1) >> 1) + cols * (x - inside)

    return below(hi + rows) - below(hi)
