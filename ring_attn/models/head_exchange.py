"""Ulysses' exchange for any module: swaps some rows of all heads for all rows of some heads.

(arXiv 2309.14509.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.core.layout import SequenceLayout


@dataclass(frozen=True)
class HeadExchange:
    """Exchanges heads for rows in a group, for tensors with these dims of rows and heads."""

    group: dist.ProcessGroup
    seq_dim: int
    head_dim: int

    def to_heads(self, x: Tensor, layout: SequenceLayout) -> Tensor:
        """Swaps this rank's rows of all heads for all rows, in order of position, of its heads."""
        world_size = layout.world_size
        x = self._to_front(x).unflatten(1, (world_size, -1)).transpose(0, 1)
        x = _exchange(x.flatten(0, 1), self._own_rows(layout), layout.shard_lens, self.group)
        return self._back(layout.unshard(x.split(layout.shard_lens), dim=0))

    def to_rows(self, x: Tensor, layout: SequenceLayout) -> Tensor:
        """Inverts `to_heads`."""
        world_size, x = layout.world_size, self._to_front(x)
        x = torch.cat([layout.shard(x, rank, dim=0) for rank in range(world_size)])
        x = _exchange(x, layout.shard_lens, self._own_rows(layout), self.group)
        return self._back(x.unflatten(0, (world_size, -1)).transpose(0, 1).flatten(1, 2))

    def _own_rows(self, layout: SequenceLayout) -> list[int]:
        return [layout.shard_len(dist.get_rank(self.group))] * layout.world_size

    def _to_front(self, x: Tensor) -> Tensor:
        return x.movedim((self.seq_dim, self.head_dim), (0, 1))

    def _back(self, x: Tensor) -> Tensor:
        return x.movedim((0, 1), (self.seq_dim, self.head_dim))


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows; the backward is the opposite all-to-all."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: Sequence[int], recv: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        """Rows from all ranks for this rank, in the order of the ranks."""
        ctx.send, ctx.recv, ctx.group = send, recv, group
        out = x.new_empty(sum(recv), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), [*recv], [*send], group=group)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Returns gradients to the ranks of the rows; differentiable again."""
        return _exchange(dout, ctx.recv, ctx.send, ctx.group), None, None, None


def _exchange(
    x: Tensor, send: Sequence[int], recv: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Sends `send[r]` consecutive rows of `x` to each rank r, and receives `recv[r]`."""
    out: Tensor = _Exchange.apply(x, send, recv, group)
    return out
