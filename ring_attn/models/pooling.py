"""Pool the rows of a sharded sequence: the first or last token of each sequence, or their mean."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.checks import attention as checks
from ring_attn.core.layout import SequenceLayout
from ring_attn.torch_private import Context
from ring_attn.transport import groups
from ring_attn.transport.groups import Group
from ring_attn.transport.p2p import reporting
from ring_attn.values.checks import check_one_of, check_type

How = Literal["first", "last", "mean"]


def pool(
    x: Tensor,
    layout: SequenceLayout,
    how: How = "mean",
    *,
    attention_mask: Tensor | None = None,
    group: Group = None,
) -> Tensor:
    """Pool the rows of all ranks: for embedding models, reward models and classifiers.

    Every rank of the group must call it, and must run the backward if one rank does. All ranks get
    the same result and compute the same loss from it. Gradients of rows are sums over the ranks. So
    divide the loss by the number of ranks, if gradients are summed (`sync_gradients`).

    Args:
        x: this rank's rows, (batch, rows, dim), such as `last_hidden_state`.
        layout: how the sequence is split.
        how: "first" or "last" token of each sequence, or the "mean" of its tokens.
        attention_mask: (batch, seqlen) of the whole sequence, 0 for padding; None without padding.
        group: as in `ring_attention`.

    Returns:
        (batch, dim), in the dtype of x. Means are computed in float32 (float64 for float64). A
        sequence without tokens gives zeros.

    Raises:
        ValueError: a number of rows or the shape of the mask does not fit, or `how` is unknown.
        TypeError: a wrong type, such as a layout given by name.
        RuntimeError: there is no process group, or a rank has failed.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> layout = ring_attn.SequenceLayout.zigzag(8, 2)
        >>> x = layout.shard(torch.arange(8.0).view(1, 8, 1), rank)
        >>> ring_attn.pool(x, layout, "mean").tolist()
        [[3.5]]
    """
    process_group = groups.check_group(group)
    with reporting(process_group):
        check_one_of("how", how, ("first", "last", "mean"))
        rank = checks.check_shard(x, 1, layout, process_group)
        if x.ndim != 3:
            raise ValueError(f"x must be (batch, rows, dim), got shape {tuple(x.shape)}")
        real = torch.ones(x.size(0), layout.seqlen, dtype=torch.bool, device=x.device)
        if attention_mask is not None:
            check_type("attention_mask", attention_mask, Tensor, "a torch.Tensor")
            if attention_mask.shape != real.shape:
                raise ValueError(
                    f"attention_mask must be {tuple(real.shape)}, of the whole sequence, got "
                    f"{tuple(attention_mask.shape)}"
                )
            real = attention_mask.to(x.device) != 0
    positions = layout.position_ids(rank, x.device)
    if how == "mean":
        weights = real.float() / real.sum(1, keepdim=True).clamp(min=1)
    else:
        # argmax returns the first of equal values.
        order = real.int() if how == "first" else real * _ranked(layout, x.device)
        chosen = order.argmax(1, keepdim=True)
        weights = torch.zeros_like(real, dtype=torch.float32).scatter_(1, chosen, 1.0) * real
    return weighted_sum(x, weights[:, positions], process_group)


def _ranked(layout: SequenceLayout, device: torch.device) -> Tensor:
    return torch.arange(1, layout.seqlen + 1, device=device)


def weighted_sum(x: Tensor, weights: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the weighted sum of the rows of all ranks, (batch, dim); `weights` is (batch, rows).

    Rows with weight 0 do not count, whatever their values.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    counted = x.to(wide).masked_fill(weights[..., None] == 0, 0.0)
    local = (counted * weights[..., None].to(wide)).sum(1)
    total: Tensor = _SumOfRanks.apply(local, group)
    return total.to(x.dtype)


class _SumOfRanks(torch.autograd.Function):
    """The sum of the ranks' tensors; the gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _OfOneRank(torch.autograd.Function):
    """The same values, whose gradient is divided by a number of ranks."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, world_size: int) -> Tensor:
        ctx.world_size = world_size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.world_size, None


def share_of_gradient(x: Tensor, world_size: int) -> Tensor:
    """Return x with a share of its gradient, as all ranks have the same x and compute its loss."""
    shared: Tensor = _OfOneRank.apply(x, world_size)
    return shared
