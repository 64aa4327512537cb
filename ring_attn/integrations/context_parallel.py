"""The names of torch's context parallelism, as ring_attention: change the import.

    from torch.distributed.tensor.experimental import context_parallel           # before
    from ring_attn.integrations.context_parallel import context_parallel         # after

    context_parallel            shards buffers in place and routes F.scaled_dot_product_attention
    context_parallel_unshard    the whole tensors again
    set_rotate_method           how keys and values reach the ranks: our all_gather, or our ring
    as_load_balancer            any SequenceLayout as a balancer for torch's own functions

Parameters, the order of the rows on the ranks and what is restored are torch's. It runs on CPUs
too, routes calls by a torch function mode instead of replacing the function for the whole process,
takes lengths that the ranks do not divide, and refuses what it does not honour.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ring_attn.api import unshard
from ring_attn.core.layout import SequenceLayout
from ring_attn.models.sdpa import route_sdpa, sdpa_attention

# torch's name -> ours.
_STRATEGIES = {"allgather": "all_gather", "alltoall": "ring"}

# (batch, nheads, rows, headdim), as scaled_dot_product_attention has it.
_SEQ_DIM = 2


class LoadBalancer(Protocol):
    """The interface of torch's load balancers and of `LayoutBalancer`."""

    def _generate_indices(self, restore: bool = False) -> Tensor | None:
        """(1, seqlen) or (batch, seqlen): which rows stand where, or where they stood."""
        ...


class LayoutBalancer:
    """A `SequenceLayout` as torch's load balancers are; made by `as_load_balancer`."""

    def __init__(self, layout: SequenceLayout, device: torch.device | str) -> None:
        """Keeps layout and device; makes no indices yet."""
        self.layout, self.device = layout, device

    def _generate_indices(self, restore: bool = False) -> Tensor:
        """(1, seqlen) int64: global positions, rank by rank, or with `restore` their inverse."""
        order = torch.cat([self.layout.position_ids(r) for r in range(self.layout.world_size)])
        if restore:
            order = torch.argsort(order)
        return order[None].to(self.device)


def as_load_balancer(layout: SequenceLayout, device: torch.device | str = "cpu") -> LayoutBalancer:
    """A layout as a load balancer for torch's context parallelism.

    torch's `_context_parallel_shard` and `context_parallel_unshard`, and ours, take it. Attention
    over such shards is `ring_attention(..., layout=layout)`, or `models.sdpa.route_sdpa(group=
    mesh, layout=layout)` around a model: torch's own attention knows the head-tail order only.

    Args:
        layout: every rank must hold as many rows as torch gives it, `ceil(seqlen / world_size)`
            while there are any.
        device: of the buffers.

    Raises:
        ValueError: a layout with other numbers of rows.

    Example:
        >>> as_load_balancer(SequenceLayout.striped(6, 2))._generate_indices()
        tensor([[0, 2, 4, 1, 3, 5]])
    """
    given = _chunks(layout.seqlen, layout.world_size).shard_lens
    if layout.shard_lens != given:
        raise ValueError(
            f"torch gives the ranks {list(given)} rows, layout {layout} {list(layout.shard_lens)}: "
            "shard with layout.shard and unshard with ring_attn.unshard instead"
        )
    return LayoutBalancer(layout, device)


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """Within it, attention runs over the ranks of a mesh, and buffers are this rank's shards.

    As `torch.distributed.tensor.experimental.context_parallel`. Where the length is a multiple of
    2 x ranks, rank r holds chunks r and 2P-1-r of 2P (head-tail, our "zigzag"), unless torch's
    `_cp_options.enable_load_balance` is off; else the r-th run of `ceil(seqlen / ranks)`. Calls of
    F.scaled_dot_product_attention must have query, key and value (batch, nheads, rows, headdim)
    with this rank's rows, plain or as DTensors of this mesh that are sharded in dim 2; the output
    is plain. Only calls of this thread are routed: see `models.sdpa.route_sdpa`, also for what
    is refused. A backward may run outside, but not with activation checkpointing.

    Args:
        mesh: with one axis.
        buffers: tensors with the whole sequence, the same on every rank, of one length. They are
            resized in place; afterwards they are whole again. None of them may require a gradient.
        buffer_seq_dims: the sequence dim of each.
        no_restore_buffers: those of them that stay shards.

    Raises:
        ValueError: a mesh with more axes, as many dims as not buffers, buffers of several lengths
            or with a gradient, or one to be left that is none of them.
        TypeError: something else than a mesh or plain tensors.

    Example:
        >>> # under torchrun --nproc-per-node 2, after init_process_group("gloo")
        >>> mesh = init_device_mesh("cpu", (2,))
        >>> q, k, v = (torch.randn(1, 8, 1000, 64) for _ in range(3))
        >>> with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        ...     out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> out.shape, q.shape
        (torch.Size([1, 8, 500, 64]), torch.Size([1, 8, 1000, 64]))
    """
    buffers = [] if buffers is None else buffers
    seq_dims = [] if buffer_seq_dims is None else buffer_seq_dims
    left = set() if no_restore_buffers is None else no_restore_buffers
    _check_mesh(mesh)
    seqlen = _check_buffers(buffers, seq_dims, left)
    layout = None if seqlen is None else _default_layout(seqlen, mesh.size())
    rank = mesh.get_local_rank()
    with torch.no_grad():
        # All shards before any buffer changes: what raises leaves them as they were.
        shards = [
            layout.shard(x, rank, dim % x.ndim).clone()
            for x, dim in zip(buffers, seq_dims, strict=True)
            if layout is not None
        ]
        # Their memory stays as it is, under another tensor, while the buffers are moved to other.
        whole = [None if _is_among(x, left) else x.detach() for x in buffers]
        for buffer, shard in zip(buffers, shards, strict=True):
            _move(buffer, shard)
    try:
        with _Routed(mesh, layout):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(buffers, whole, strict=True):
                if before is not None:
                    _move(buffer, before)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: list[Tensor],
    seq_dims: list[int],
    load_balancer: LoadBalancer | None = None,
) -> list[Tensor]:
    """The whole tensors, from each rank's shards; for evaluation, without gradient.

    As `torch.distributed.tensor.experimental._attention.context_parallel_unshard`.

    Args:
        mesh: with one axis.
        buffers: this rank's shards.
        seq_dims: the sequence dim of each.
        load_balancer: that they were sharded with, ours or one of torch's; by default the order of
            `context_parallel`: head-tail where the length is a multiple of 2 x ranks and
            balancing is on, else runs in the order of the ranks, of any lengths.

    Raises:
        ValueError: a mesh with more axes, as many dims as not buffers, or shards that do not fit
            the balancer.
        TypeError: something else than a mesh.
    """
    _check_mesh(mesh)
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"seq_dims must have one dim for each buffer, got {len(seq_dims)} for {len(buffers)}"
        )
    if isinstance(load_balancer, LayoutBalancer):
        layout = load_balancer.layout
        return [
            unshard(x, layout, group=mesh, dim=dim % x.ndim)
            for x, dim in zip(buffers, seq_dims, strict=True)
        ]
    restore = None if load_balancer is None else load_balancer._generate_indices(restore=True)
    whole = []
    for x, dim in zip(buffers, seq_dims, strict=True):
        dim %= x.ndim
        layout = _runs_of(x.size(dim), mesh, x.device)
        if load_balancer is None:
            seqlen, world_size = layout.seqlen, mesh.size()
            if layout == _chunks(seqlen, world_size):
                layout = _default_layout(seqlen, world_size)
        full = unshard(x, layout, group=mesh, dim=dim)
        whole.append(full if restore is None else _reordered(full, restore, dim))
    return whole


def set_rotate_method(rotate_method: str) -> None:
    """Sets how keys and values reach the ranks in later calls of this process.

    Args:
        rotate_method: "allgather", the default: strategy "all_gather", some heads of the whole
            sequence at a time; "alltoall": strategy "ring", a shard a step.

    Raises:
        ValueError: another name.
    """
    global _strategy
    if rotate_method not in _STRATEGIES:
        raise ValueError(
            f"rotate_method must be one of {list(_STRATEGIES)}, got {rotate_method!r}; "
            "ring_attn.models.sdpa.route_sdpa(group=mesh, strategy=...) takes every strategy"
        )
    _strategy = _STRATEGIES[rotate_method]


_strategy = _STRATEGIES["allgather"]


class _Routed(route_sdpa):
    """Routes to a ring over a mesh, in the order of the rows that torch would have."""

    def __init__(self, mesh: DeviceMesh, layout: SequenceLayout | None) -> None:
        super().__init__()
        self._mesh, self._layout = mesh, layout

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """This rank's rows of the output, plain."""
        q, k, v = (
            _local(name, x, self._mesh)
            for name, x in (("query", query), ("key", key), ("value", value))
        )
        return sdpa_attention(
            q,
            k,
            v,
            attn_mask,
            dropout_p,
            is_causal,
            **kwargs,
            group=self._mesh,
            layout=self._layout_of(q, k, is_causal),
            strategy=_strategy,
        )

    def _layout_of(self, q: Tensor, k: Tensor, is_causal: bool) -> str | SequenceLayout:
        """Layout of the buffers; for other lengths the same kind, with as many rows a rank."""
        rows = {x.size(_SEQ_DIM) for x in (q, k) if isinstance(x, Tensor) and x.ndim == 4}
        layout = self._layout
        if layout is not None and rows == {layout.shard_len(self._mesh.get_local_rank())}:
            return layout
        even = max(rows, default=1) % 2 == 0
        balanced = _balances() and even if layout is None else layout.kind == "zigzag"
        # Without a mask the order is nothing, and only runs may have any number of rows.
        return "zigzag" if is_causal and balanced else "contiguous"


def _move(x: Tensor, to: Tensor) -> None:
    """Makes a tensor another in place, memory and all."""
    x.set_(to.untyped_storage(), to.storage_offset(), to.size(), to.stride())


def _default_layout(seqlen: int, world_size: int) -> SequenceLayout:
    """torch's choice."""
    if _balances() and seqlen % (2 * world_size) == 0:
        return SequenceLayout.zigzag(seqlen, world_size)
    return _chunks(seqlen, world_size)


def _chunks(seqlen: int, world_size: int) -> SequenceLayout:
    """Runs of as many rows as torch.chunk makes: the last ranks may have fewer, or none."""
    size = -(-seqlen // world_size)
    return SequenceLayout.boundaries([min(r * size, seqlen) for r in range(world_size + 1)])


def _balances() -> bool:
    """torch's switch for load balancing, if a program has set it; else True."""
    theirs = sys.modules.get("torch.distributed.tensor.experimental._attention")
    options = getattr(theirs, "_cp_options", None)
    return True if options is None else bool(options.enable_load_balance)


def _runs_of(rows: int, mesh: DeviceMesh, device: torch.device) -> SequenceLayout:
    """The layout of runs in the order of the ranks, each as long as its rank's rows."""
    mine = torch.tensor([rows], device=device)
    lengths = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(lengths, mine, group=mesh.get_group())
    return SequenceLayout.boundaries([0, *accumulate(int(n) for n in lengths)])


def _reordered(x: Tensor, restore: Tensor, dim: int) -> Tensor:
    """Rows of `dim` by the indices of a balancer, one for all of a batch or one for each."""
    batch = x.size(0) if dim > 0 else 1
    if restore.size(0) not in (1, batch) or restore.size(1) != x.size(dim):
        raise ValueError(
            f"load_balancer has indices {tuple(restore.shape)}, which fit no buffer of "
            f"{tuple(x.shape)} with its sequence in dim {dim}"
        )
    restore = restore.to(x.device)
    if restore.size(0) == 1:
        return x.index_select(dim, restore[0])
    parts = [part.index_select(dim - 1, order) for part, order in zip(x, restore, strict=True)]
    return torch.stack(parts)


def _local(name: str, x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's shard, of a DTensor too."""
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh != mesh or x.placements != (Shard(_SEQ_DIM),):
        raise ValueError(
            f"{name} must be a plain tensor, or a DTensor with placements {(Shard(_SEQ_DIM),)} on "
            f"the mesh of context_parallel, got {x.placements} on {x.device_mesh}"
        )
    return x.to_local()


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        axes: tuple[object, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise ValueError(
            f"mesh must have one axis, got {axes} of sizes {tuple(mesh.shape)}; pass one of them, "
            f"such as mesh[{axes[-1]!r}]"
        )


def _check_buffers(
    buffers: Sequence[Tensor], seq_dims: Sequence[int], left: Collection[Tensor]
) -> int | None:
    """The one length of all buffers, None without any."""
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"buffer_seq_dims must have one dim for each buffer, got {len(seq_dims)} for "
            f"{len(buffers)}"
        )
    if not all(_is_among(x, buffers) for x in left):
        raise ValueError("no_restore_buffers must be some of buffers, got others")
    lengths = []
    for i, (x, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            raise TypeError(f"buffers must be plain tensors, got buffer {i}: {type(x).__name__}")
        if x.requires_grad:
            raise ValueError(
                f"buffers must not require a gradient, as they are changed in place; buffer {i} "
                f"of shape {tuple(x.shape)} does: shard it with SequenceLayout.shard"
            )
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(
                f"buffer_seq_dims must be dims of the buffers, got {dim} for buffer {i} of shape "
                f"{tuple(x.shape)}"
            )
        lengths.append(x.size(dim))
    if len(set(lengths)) > 1:
        raise ValueError(
            f"buffers must have one length in their seq dims, got {lengths}: shard what is of "
            "another length with SequenceLayout.shard"
        )
    return lengths[0] if lengths else None


def _is_among(x: Tensor, tensors: Iterable[Tensor]) -> bool:
    """By identity: tensors compare by element."""
    return any(x is one for one in tensors)
