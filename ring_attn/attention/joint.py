"""Attention over joint layouts, in which every rank holds some of the rows.

    this rank's rows      its own rows of `owners`      this rank's rows
    q, k, v       --->    attention as usual    --->    out, lse
            leave out rows                  gather the replicated rows
            that others own                 from their owners

The strategies see only `JointLayout.owners`, an ordinary layout. So every strategy, backend and
mask serves a joint layout, and rows are computed and counted once. Afterwards one all-gather brings
the replicated rows of the output from their owners to all ranks, which then have the same bits.

Gradients of everything that the ranks hold equally are shares, as those of parameters are: their
sum over the ranks is the gradient. In the backward, the owner of a row gets the sum of the ranks'
shares of its output gradient. It returns the whole gradient of its q, k and v; the share of the
other ranks is zero.

If every rank holds all keys, as in cross-attention to text, each rank attends with its own rows of
q, and nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.call import Masks
from ring_attn.checks import attention as checks
from ring_attn.core.copies import local_layouts, local_mask
from ring_attn.core.joint import JointLayout
from ring_attn.core.layout import Layouts, SequenceLayout
from ring_attn.core.mask import Mask
from ring_attn.torch_private import Context, Untyped
from ring_attn.transport import groups
from ring_attn.transport.base import Agreement, Transport
from ring_attn.transport.options import TransportOptions
from ring_attn.transport.p2p import open_p2p, reporting
from ring_attn.transport.rows import exchange_rows

# A layout of one side of a call.
AnyLayout = SequenceLayout | JointLayout

# The value of an option of `ring_attention`. The options of a user are passed on by name, and each
# has another type, which `checks` tests.
Option: TypeAlias = Any

# A mask, or masks in lists and lists of lists.
_Nested: TypeAlias = "Mask | Sequence[_Nested]"


def is_joint(layout: object) -> bool:
    """Return whether the layout that a user passed is a joint layout, or has one."""
    # No generator, and no second call for a plain layout: every call of the user comes here.
    if isinstance(layout, (tuple, list)):
        return any(isinstance(side, JointLayout) for side in layout)
    return isinstance(layout, JointLayout)


def sides_of(layout: object, group: dist.ProcessGroup) -> Sides:
    """Return the layouts of queries and keys; refuse layouts for another number of ranks."""
    sides = layout if isinstance(layout, (tuple, list)) else (layout, layout)
    if len(sides) != 2 or not all(isinstance(x, (SequenceLayout, JointLayout)) for x in sides):
        raise TypeError(
            "layout must be a JointLayout, or a pair of SequenceLayout and JointLayout for queries "
            f"and keys, got {layout!r}"
        )
    for side in sides:
        if side.world_size != group.size():
            raise ValueError(
                f"layout must be for {group.size()} ranks, as the group has, got {side} for "
                f"{side.world_size}: pass a layout for {group.size()} ranks, or the group of "
                f"{side.world_size} ranks"
            )
    return Sides(*sides)


def check_options(options: dict[str, Option]) -> None:
    """Refuse options of `ring_attention` that joint layouts do not have."""
    if options["same_bits"]:
        raise NotImplementedError(
            "same_bits=True is not possible with rows that every rank holds: their keys are summed "
            "with those of their owner, and their gradients over the ranks, in another order for "
            "another number of ranks; leave same_bits out, or use a SequenceLayout"
        )


def owners_of(layout: AnyLayout) -> SequenceLayout:
    """Return the layout that holds each position once."""
    return layout.owners if isinstance(layout, JointLayout) else layout


def own_rows(name: str, x: Tensor, layout: AnyLayout, rank: int, dim: int) -> Tensor:
    """Return the rows of `owners_of(layout)` among a rank's rows."""
    if isinstance(layout, SequenceLayout):
        checks.check_layout(name, layout, x.size(dim), None, rank, layout.world_size)
        return x
    layout.check_shard(x, rank, dim, name)
    return layout.owned(x, rank, dim) if layout.has_copies else x


def on_every_rank(owned: Tensor, layout: AnyLayout, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Return this rank's rows of `layout` from its own rows: gather the replicated ones."""
    if isinstance(layout, SequenceLayout) or not layout.has_copies:
        return owned
    rank = dist.get_rank(group)
    counts = [layout.num_owned(owner) for owner in range(layout.world_size)]
    replicated = _of_all_ranks(layout.owned_replicated(owned, rank, dim), counts, group, dim)
    return layout.joined(owned, replicated, rank, dim)


def _of_all_ranks(x: Tensor, counts: list[int], group: dist.ProcessGroup, dim: int) -> Tensor:
    """Return the rows of all ranks, in the order of the ranks.

    Args:
        x: this rank's rows in `dim`.
        counts: the number of rows of each rank.
        group: the ranks.
        dim: the dim of the rows.
    """
    rows_first = x.movedim(dim, 0)
    other_dims = rows_first.shape[1:]
    gathered: Tensor = _replicate(
        rows_first.reshape(rows_first.size(0), math.prod(other_dims)),  # (rows, features)
        counts=counts,
        group=group.group_name,
        back=False,
        shape=[dim % x.ndim, *other_dims],
    )
    return gathered.view(sum(counts), *other_dims).movedim(0, dim)


# -- keys that every rank holds


class Sides(NamedTuple):
    """The layouts of queries and keys, of which at least one is joint."""

    q: AnyLayout
    k: AnyLayout

    @property
    def has_local_keys(self) -> bool:
        """Whether every rank holds all keys."""
        return isinstance(self.k, JointLayout) and self.k.is_replicated

    def own_queries(self, q: Tensor, rank: int, dim: int) -> Tensor:
        """Return the rows of q that a rank owns."""
        return own_rows("q", q, self.q, rank, dim)

    def own_keys(self, name: str, x: Tensor, rank: int, dim: int) -> Tensor:
        """Return the rows of k or v with which a rank takes part: all, if all ranks hold them."""
        if isinstance(self.k, JointLayout) and self.k.is_replicated:
            self.k.check_shard(x, rank, dim, name)
            return x
        return own_rows(name, x, self.k, rank, dim)

    @property
    def owners(self) -> Layouts:
        """The layouts of the owners."""
        return owners_of(self.q), owners_of(self.k)

    def local(self, mask: Masks | None, options: dict[str, Option]) -> tuple[Layouts, Masks]:
        """Return the layouts and the mask of a call in which every rank attends to its own keys.

        Args:
            mask: the mask, or masks, that the user passed.
            options: options of `ring_attention`; those that make a mask are removed.
        """
        layout_q, seqlen_k = owners_of(self.q), self.k.seqlen
        if mask is None:
            causal = options.pop("causal")
            cu_q = checks.check_cu_seqlens("cu_seqlens", options.pop("cu_seqlens"))
            cu_k = checks.check_cu_seqlens("cu_seqlens_k", options.pop("cu_seqlens_k"))
            checks.check_documents(cu_q, cu_k)
            mask = Mask(
                layout_q.seqlen,
                seqlen_k,
                causal=causal,
                window_size=checks.check_window(options.pop("window_size"), causal),
                cu_seqlens_q=cu_q,
                cu_seqlens_k=cu_q if cu_k is None else cu_k,
            )
        local_masks = cast(Masks, _local_masks(layout_q, seqlen_k, mask))
        return local_layouts(layout_q, seqlen_k), local_masks


def _local_masks(layout_q: SequenceLayout, seqlen_k: int, mask: _Nested) -> _Nested:
    """Return the masks of `local_mask`, in lists like those that were given."""
    if isinstance(mask, Mask):
        checks.check_given_mask(mask, layout_q.seqlen, seqlen_k)
        return local_mask(layout_q, seqlen_k, mask)
    return [_local_masks(layout_q, seqlen_k, each) for each in mask]


# -- the exchange, as a custom operator, so that torch.compile keeps it whole in a graph


@torch.library.custom_op("ring_attn::replicate", mutates_args=())
def _replicate(
    x: Tensor, counts: Sequence[int], group: str, back: bool, shape: Sequence[int]
) -> Tensor:
    """Return the rows of all ranks, or with `back` the sums of the ranks' gradients of own rows.

    Args:
        x: this rank's rows, (rows, features); with `back` gradients of the rows of all ranks.
        counts: the number of rows of each rank.
        group: name of the process group.
        back: whether x is gradients.
        shape: the dim of the rows in the caller's tensor, and the sizes of its other dims.
    """
    checks.check_capture("a joint layout", x)
    process_group = groups.group_named(group)
    # The ranks compare these values.
    described = {
        "dtype": x.dtype,
        "dim and shape": tuple(shape),
        "replicated rows": tuple(counts),
        "back": back,
    }
    with reporting(process_group):
        transport = open_p2p(process_group, TransportOptions())
        # Not observed: `stats` returns the figures of the attention itself.
        with transport.call("replicate", Agreement(described), x.device):
            if back:
                return _sum_at_owners(x, counts, transport)
            return _gathered(x, counts, transport)


@_replicate.register_fake
def _(x: Tensor, counts: Sequence[int], group: str, back: bool, shape: Sequence[int]) -> Tensor:
    rank = dist.get_rank(groups.group_named(group))
    return x.new_empty(counts[rank] if back else sum(counts), x.size(-1))


def _gathered(x: Tensor, counts: Sequence[int], transport: Transport) -> Tensor:
    """Return the rows of all ranks, in the order of the ranks."""
    # An all-gather needs equal sizes, so short messages are padded, and trimmed after it.
    padded = x.new_zeros(max(counts), x.size(1))
    padded[: x.size(0)] = x
    every = transport.gather(padded)
    return torch.cat([rows[:count] for rows, count in zip(every, counts, strict=True)])


def _sum_at_owners(x: Tensor, counts: Sequence[int], transport: Transport) -> Tensor:
    """Return the sums of own rows over the ranks, added in the order of the ranks."""
    own = counts[transport.rank]
    received = exchange_rows(x, counts, [own] * transport.world_size, transport)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x.new_zeros(own, x.size(1), dtype=wide)
    for share in received.split(own) if own else ():
        total += share
    return total.to(x.dtype)


def _setup(ctx: Context, inputs: tuple[Untyped, ...], output: Tensor) -> None:
    _, counts, group, back, shape = inputs
    ctx.counts = counts
    ctx.group = group
    ctx.back = back
    ctx.shape = shape


def _gradient(ctx: Context, dout: Tensor) -> tuple[Tensor | None, ...]:
    dx: Tensor = _replicate(dout.contiguous(), ctx.counts, ctx.group, not ctx.back, ctx.shape)
    return (dx, None, None, None, None)


_replicate.register_autograd(_gradient, setup_context=_setup)
