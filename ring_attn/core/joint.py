"""Joint layouts: sequences in which every rank holds some of the positions, such as text.

    JointLayout([3, SequenceLayout.contiguous(8, 2)])       3 positions of text, 8 of a video

    positions      0 1 2 | 3 4 5 6 7 8 9 10
    rank 0 holds   0 1 2 | 3 4 5 6                          owns   0 1 | 3 4 5 6
    rank 1 holds   0 1 2 |         7 8 9 10                 owns   2   | 7 8 9 10

Every replicated position has one owner. The owners' rows are an ordinary `SequenceLayout`, over
which each strategy computes attention as usual, so each key counts once and each query is computed
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.values.checks import as_int, as_tuple, check_dim
from ring_attn.values.compiling import kept


@dataclass(frozen=True, init=False)
class JointLayout:
    """A sequence of parts: some are split over the ranks, every rank holds all of the others.

    The rows of a rank are its rows of each part, in the order of the parts. This is what
    `torch.cat([text, video], dim=1)` makes on a rank that has the whole text and a shard of the
    video.

    Args:
        parts: the parts of the sequence in their order. An int is the number of positions of a part
            that every rank holds. A `SequenceLayout` is a split part, with positions from 0.
        world_size: number of ranks. None takes it from the split parts.

    Raises:
        ValueError: there are no parts, a number is negative, the parts have different numbers of
            ranks or different strides, or there is neither a split part nor a `world_size`.
        TypeError: a part is neither an int nor a `SequenceLayout`.

    Example:
        >>> layout = JointLayout([3, SequenceLayout.contiguous(8, 2)])
        >>> layout.position_ids(rank=1).tolist()
        [0, 1, 2, 7, 8, 9, 10]
        >>> layout.owners.position_ids(rank=1).tolist()
        [2, 7, 8, 9, 10]
    """

    parts: tuple[int | SequenceLayout, ...]
    world_size: int

    def __init__(
        self, parts: Sequence[int | SequenceLayout], world_size: int | None = None
    ) -> None:
        given = as_tuple("parts", parts)
        if not given:
            raise ValueError(
                "parts must be at least one number of rows or SequenceLayout, got none"
            )
        checked = tuple(
            part if isinstance(part, SequenceLayout) else _as_count(part) for part in given
        )
        sizes = {part.world_size for part in checked if isinstance(part, SequenceLayout)}
        if world_size is not None:
            sizes.add(as_int("world_size", world_size, least=1))
        if len(sizes) > 1:
            raise ValueError(
                f"all parts must have the same number of ranks, got {sorted(sizes)}: make every "
                "SequenceLayout for the ranks of one group"
            )
        if not sizes:
            raise ValueError(
                "world_size must be given if every rank holds all parts, got None: pass the number "
                "of ranks of the group"
            )
        object.__setattr__(self, "parts", checked)
        object.__setattr__(self, "world_size", sizes.pop())
        strides = sorted({part.stride for part in self._split_parts if part.seqlen})
        if len(strides) > 1:
            raise ValueError(f"all split parts must be striped, or none, got strides {strides}")

    @property
    def _split_parts(self) -> tuple[SequenceLayout, ...]:
        return tuple(part for part in self.parts if isinstance(part, SequenceLayout))

    @kept
    def part_layouts(self) -> tuple[SequenceLayout, ...]:
        """The layout of the owners of each part.

        The positions of a replicated part are divided evenly among the ranks.
        """
        strides = {part.stride for part in self._split_parts if part.seqlen}
        kind = "contiguous" if strides <= {1} else "striped"
        return tuple(
            part
            if isinstance(part, SequenceLayout)
            else SequenceLayout.from_name(kind, part, self.world_size)
            for part in self.parts
        )

    @kept
    def owners(self) -> SequenceLayout:
        """The layout of the owners' rows, which holds each position once."""
        first, *others = self.part_layouts
        whole: SequenceLayout = first
        for part in others:
            whole = whole.followed_by(part)
        return whole

    @property
    def seqlen(self) -> int:
        """The number of positions."""
        return sum(self.part_lens)

    @property
    def part_lens(self) -> tuple[int, ...]:
        """The number of positions of each part."""
        return tuple(part.seqlen for part in self.part_layouts)

    @property
    def num_replicated(self) -> int:
        """The number of positions that every rank holds."""
        return sum(part for part in self.parts if isinstance(part, int))

    @property
    def has_copies(self) -> bool:
        """Whether several ranks hold the same rows."""
        return self.world_size > 1 and self.num_replicated > 0

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all positions."""
        return self.num_replicated == self.seqlen

    def rows_of_parts(self, rank: int) -> tuple[int, ...]:
        """Return the rank's number of rows of each part.

        Raises:
            ValueError: the rank does not exist.
        """
        self.owners.shard_len(rank)  # refuses a rank that does not exist
        return tuple(part if isinstance(part, int) else part.shard_len(rank) for part in self.parts)

    def shard_len(self, rank: int) -> int:
        """Return the number of rows of a rank."""
        return sum(self.rows_of_parts(rank))

    @property
    def shard_lens(self) -> tuple[int, ...]:
        """The number of rows of each rank."""
        return tuple(self.shard_len(rank) for rank in range(self.world_size))

    def num_owned(self, rank: int) -> int:
        """Return the number of replicated positions that a rank owns."""
        return sum(layout.shard_len(rank) for layout in self._replicated_layouts)

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
        positions = torch.arange(self.seqlen, device="cpu")
        return self.shard(positions, rank, dim=0).to(device)

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return the rank's rows of a whole tensor.

        Args:
            x: any tensor with `seqlen` rows in `dim`.
            rank: the rank.
            dim: the sequence dim.

        Raises:
            ValueError: `x` does not have `seqlen` rows in `dim`, or the rank does not exist.

        Example:
            >>> layout = JointLayout([1, SequenceLayout.contiguous(4, 2)])
            >>> layout.shard(torch.arange(5) * 10, rank=1, dim=0).tolist()
            [0, 30, 40]
        """
        self.owners.check_rows(x, dim)
        self.owners.shard_len(rank)  # refuses a rank that does not exist
        pieces = [
            part.shard(piece, rank, dim) if isinstance(part, SequenceLayout) else piece
            for part, piece in zip(self.parts, x.split(list(self.part_lens), dim), strict=True)
        ]
        return torch.cat(pieces, dim)

    def unshard(self, shards: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Return the whole tensor from the shards of all ranks; replicated rows from their owners.

        Args:
            shards: the shards in the order of the ranks.
            dim: the sequence dim.

        Raises:
            ValueError: a wrong number of shards, or a wrong number of rows in a shard.
            TypeError: the shards are not tensors of one dtype.

        Example:
            >>> layout = JointLayout([1, SequenceLayout.contiguous(4, 2)])
            >>> layout.unshard([torch.tensor([0, 1, 2]), torch.tensor([0, 3, 4])], dim=0).tolist()
            [0, 1, 2, 3, 4]
        """
        shards = as_tuple("shards", shards)
        if len(shards) != self.world_size:
            raise ValueError(f"unshard needs {self.world_size} shards, got {len(shards)}")
        owned = [self.owned(x, rank, dim) for rank, x in enumerate(shards)]
        return self.owners.unshard(owned, dim)

    def owned(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return the rows of a rank's shard that the rank owns: a shard of `owners`.

        Raises:
            ValueError: `x` does not have `shard_len(rank)` rows in `dim`.
        """
        self.check_shard(x, rank, dim)
        pieces = []
        for part, layout, piece in self._pieces(x, rank, dim):
            is_replicated = isinstance(part, int)
            pieces.append(layout.shard(piece, rank, dim) if is_replicated else piece)
        return torch.cat(pieces, dim)

    def check_shard(self, x: Tensor, rank: int, dim: int, name: str = "x") -> None:
        """Refuse a tensor without the rank's number of rows in `dim`."""
        check_dim(name, x, dim)
        expected = self.rows_of_parts(rank)
        if x.size(dim) != sum(expected):
            raise ValueError(
                f"{name} of rank {rank} must have {sum(expected)} rows in dim {dim} for layout "
                f"{self}, {' + '.join(map(str, expected))} of its parts, got {tuple(x.shape)}: "
                "pass the whole of each replicated part and this rank's shard of each split part"
            )

    @property
    def _replicated_layouts(self) -> tuple[SequenceLayout, ...]:
        """The layouts of the owners of the replicated parts."""
        pairs = zip(self.parts, self.part_layouts, strict=True)
        return tuple(layout for part, layout in pairs if isinstance(part, int))

    def owned_replicated(self, owned: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return the replicated rows among the rows that a rank owns."""
        lens = [layout.shard_len(rank) for layout in self.part_layouts]
        pieces = zip(self.parts, owned.split(lens, dim), strict=True)
        replicated = [piece for part, piece in pieces if isinstance(part, int)]
        return torch.cat(replicated, dim) if replicated else owned.narrow(dim, 0, 0)

    def joined(self, owned: Tensor, replicated: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return a rank's shard from its owned rows and all replicated rows.

        Args:
            owned: the rank's rows of `owners`.
            replicated: the replicated rows of all owners, in the order of the ranks.
            rank: the rank.
            dim: the sequence dim.
        """
        in_order = replicated.index_select(dim, self._order.to(replicated.device))
        counts = [part for part in self.parts if isinstance(part, int)]
        whole_parts = iter(in_order.split(counts, dim))
        lens = [layout.shard_len(rank) for layout in self.part_layouts]
        pieces = zip(self.parts, owned.split(lens, dim), strict=True)
        return torch.cat(
            [next(whole_parts) if isinstance(part, int) else piece for part, piece in pieces], dim
        )

    @kept
    def _order(self) -> Tensor:
        """For each replicated position its row among the owned rows of all ranks, int64."""
        layouts = self._replicated_layouts
        starts = [0, *accumulate(layout.seqlen for layout in layouts)][:-1]
        held = [
            start + layout.position_ids(rank)
            for rank in range(self.world_size)
            for start, layout in zip(starts, layouts, strict=True)
        ]
        order = torch.cat(held or [torch.arange(0, device="cpu")])
        rows = torch.arange(len(order), device="cpu")
        return torch.empty_like(order).scatter_(0, order, rows)

    def _pieces(
        self, x: Tensor, rank: int, dim: int
    ) -> list[tuple[int | SequenceLayout, SequenceLayout, Tensor]]:
        """Return each part, the layout of its owners, and the rank's rows of it."""
        rows = x.split(list(self.rows_of_parts(rank)), dim)
        return list(zip(self.parts, self.part_layouts, rows, strict=True))

    def __str__(self) -> str:
        shown = [
            f"{part} on every rank" if isinstance(part, int) else str(part) for part in self.parts
        ]
        return f"joint({', '.join(shown)})"


def _as_count(part: object) -> int:
    """Return the number of rows of a replicated part."""
    return as_int("each of parts that is not a SequenceLayout", part, least=0)
