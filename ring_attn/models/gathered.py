"""Gather the rows of all ranks with a gradient; `unshard` gathers them without one."""

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
