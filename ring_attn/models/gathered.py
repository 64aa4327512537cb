"""Gather the rows of all ranks with a gradient; `unshard` gathers them without one.

gather_rows           each rank has a loss of its own        sums the gradients of the ranks
gather_own_rows       all ranks have the same loss           takes the rank's own rows
counted_on_one_rank   all ranks have the same loss of `x`    zero except on one rank

`of_ranks` gathers facts that ranks compare, such as flags.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.models.batch import unshard
from ring_attn.torch_private import Context


def gather_rows(x: Tensor, layout: SequenceLayout, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Return the rows of all ranks in `dim`, with a gradient for this rank's rows.

    The gradient of a row is the sum of the ranks' gradients. If one rank runs the backward, all
    ranks must.
    """
    whole: Tensor = _RowsOfAll.apply(x, layout, group, dim)
    return whole


def gather_own_rows(
    x: Tensor, layout: SequenceLayout, group: dist.ProcessGroup, dim: int
) -> Tensor:
    """Return the rows of all ranks in `dim`, for a loss that every rank computes from all rows.

    The gradient of this rank's rows is its own gradient of the whole, without a sum over the ranks,
    which all have the same one. The backward sends nothing.
    """
    whole: Tensor = _RowsOfOne.apply(x, layout, group, dim)
    return whole


def counted_on_one_rank(x: Tensor, *, is_counted: bool) -> Tensor:
    """Return the tensor; its gradient is zero on ranks where it is not counted.

    Where all ranks compute the same loss from the same tensor, a sum of the ranks' gradients would
    count it several times.
    """
    same: Tensor = _Counted.apply(x, is_counted)
    return same


def of_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, (ranks, ...), without a gradient."""
    world_size = dist.get_world_size(group)
    one_each = SequenceLayout.contiguous(world_size, world_size)
    return unshard(x[None], one_each, group=group, dim=0)


class _RowsOfAll(torch.autograd.Function):
    """The rows of all ranks; the gradient is this rank's rows of the sum of all gradients."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, layout: SequenceLayout, group: dist.ProcessGroup, dim: int
    ) -> Tensor:
        ctx.layout, ctx.group, ctx.dim = layout, group, dim
        return unshard(x, layout, group=group, dim=dim)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # gloo cannot add 16-bit numbers, and errors are smaller in float32.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(wide, copy=True).contiguous()
        dist.all_reduce(total, group=ctx.group)
        own = ctx.layout.shard(total, dist.get_rank(ctx.group), ctx.dim)
        return own.to(gradient.dtype), None, None, None


class _RowsOfOne(torch.autograd.Function):
    """The rows of all ranks; the gradient is this rank's rows of its own gradient."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, layout: SequenceLayout, group: dist.ProcessGroup, dim: int
    ) -> Tensor:
        ctx.layout, ctx.rank, ctx.dim = layout, dist.get_rank(group), dim
        return unshard(x, layout, group=group, dim=dim)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.layout.shard(gradient, ctx.rank, ctx.dim), None, None, None


class _Counted(torch.autograd.Function):
    """The tensor; the gradient is zero unless it is counted."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, is_counted: bool) -> Tensor:
        ctx.is_counted = is_counted
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient if ctx.is_counted else torch.zeros_like(gradient), None
