"""torch's context_parallel and its companions over ring_attention: only the import changes.

    from torch.distributed.tensor.experimental import context_parallel           # before
    from ring_attn.integrations.context_parallel import context_parallel         # after

    context_parallel            shards buffers in place and routes F.scaled_dot_product_attention
    context_parallel_unshard    gathers whole tensors from shards
    set_rotate_method           chooses our all_gather or our ring for keys and values

Parameters, the order of rows on the ranks and the restored buffers are as in torch. Unlike torch,
this module runs on CPUs too, routes calls by a torch function mode instead of patching the process,
takes lengths that the ranks do not divide, and refuses options that it does not support.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ring_attn.core.layout import SequenceLayout
from ring_attn.models.batch import unshard
from ring_attn.models.dtensors import chunks
from ring_attn.models.sdpa import route_sdpa, sdpa_attention
from ring_attn.values.checks import check_dim

# torch's name -> ours.
_STRATEGIES = {"allgather": "all_gather", "alltoall": "ring"}

# scaled_dot_product_attention takes (batch, nheads, rows, headdim).
_SEQ_DIM = 2


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """A context in which attention runs over a mesh, and buffers are this rank's shards.

    Replaces `torch.distributed.tensor.experimental.context_parallel`. If the length is a multiple
    of 2P for P ranks, and torch's `_cp_options.enable_load_balance` is on, rank r holds chunks r
    and 2P-1-r of 2P (head-tail, our "zigzag"); otherwise the r-th run of `ceil(seqlen / P)` rows.
    Calls of F.scaled_dot_product_attention must pass query, key and value (batch, nheads,
    rows, headdim) with this rank's rows, plain tensors. Only calls of this thread are routed, with
    the limits of `models.sdpa.route_sdpa`. A backward may run outside the context, but not with
    activation checkpointing.

    Args:
        mesh: a mesh with one axis.
        buffers: tensors with the whole sequence, the same on every rank, of one length. They are
            resized in place and restored at the end. None of them may require a gradient.
        buffer_seq_dims: the sequence dim of each buffer.
        no_restore_buffers: buffers that stay shards.

    Raises:
        ValueError: the mesh has more axes, the numbers of dims and buffers differ, buffers have
            several lengths or a gradient, or `no_restore_buffers` has a tensor not in `buffers`.
        TypeError: `mesh` is not a mesh, or buffers are not plain tensors.

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
        # Makes all shards before it changes any buffer, so that an error leaves buffers unchanged.
        shards = [
            layout.shard(x, rank, dim % x.ndim).clone()
            for x, dim in zip(buffers, seq_dims, strict=True)
            if layout is not None
        ]
        # These tensors keep the buffers' memory, while the buffers point to the shards.
        whole = [None if _is_among(x, left) else x.detach() for x in buffers]
        for buffer, shard in zip(buffers, shards, strict=True):
            _move(buffer, shard)
    try:
        with _RoutedModule(mesh, layout):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(buffers, whole, strict=True):
                if before is not None:
                    _move(buffer, before)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: list[Tensor], seq_dims: list[int], load_balancer: object = None
) -> list[Tensor]:
    """Gather whole tensors from every rank's shards; for evaluation, without gradient.

    Replaces `torch.distributed.tensor.experimental._attention.context_parallel_unshard`.

    Args:
        mesh: a mesh with one axis.
        buffers: this rank's shards.
        seq_dims: the sequence dim of each buffer.
        load_balancer: must be None. Shards are in the order of `context_parallel`: head-tail if the
            length is a multiple of 2 x ranks and balancing is on, else runs of any lengths in the
            order of the ranks. Shards of a `SequenceLayout` are for `ring_attn.unshard`.

    Raises:
        ValueError: the mesh has more axes, or the numbers of dims and buffers differ.
        TypeError: `mesh` is not a mesh.
        NotImplementedError: a balancer.
    """
    _check_mesh(mesh)
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"seq_dims must have one dim for each buffer, got {len(seq_dims)} for {len(buffers)}"
        )
    # torch's function has this parameter, too: code that passes a balancer gets the reason here.
    if load_balancer is not None:
        raise NotImplementedError(
            "load_balancer must be None: shards that torch's balancers made are for torch's "
            "context_parallel_unshard"
        )
    whole = []
    for x, dim in zip(buffers, seq_dims, strict=True):
        dim %= x.ndim
        layout = _runs_of(x.size(dim), mesh, x.device)
        seqlen, world_size = layout.seqlen, mesh.size()
        if layout == chunks(seqlen, (world_size,)):
            layout = _default_layout(seqlen, world_size)
        whole.append(unshard(x, layout, group=mesh, dim=dim))
    return whole


def set_rotate_method(rotate_method: str) -> None:
    """Sets the strategy of later calls in this process.

    Args:
        rotate_method: "allgather" (default) is strategy "all_gather", which gathers some heads of
            the whole sequence at a time; "alltoall" is strategy "ring", a shard per step.

    Raises:
        ValueError: the name is unknown.
    """
    global _strategy
    if rotate_method not in _STRATEGIES:
        raise ValueError(
            f"rotate_method must be one of {list(_STRATEGIES)}, got {rotate_method!r}; "
            "ring_attn.models.sdpa.route_sdpa(group=mesh, strategy=...) takes every strategy"
        )
    _strategy = _STRATEGIES[rotate_method]


_strategy = _STRATEGIES["allgather"]


class _RoutedModule(route_sdpa):
    """Routes attention to the ranks of a mesh, with torch's order of the rows."""

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
        """This rank's rows of the output, a plain tensor."""
        ours = {"group": self._mesh, "layout": self._layout_of(query, key, is_causal)}
        options = {**kwargs, **ours, "strategy": _strategy}
        return sdpa_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)

    def _layout_of(self, q: Tensor, k: Tensor, is_causal: bool) -> str | SequenceLayout:
        """Layout of the buffers; for other lengths the same kind with equal shards."""
        rows = {x.size(_SEQ_DIM) for x in (q, k) if isinstance(x, Tensor) and x.ndim == 4}
        layout = self._layout
        if layout is not None and rows == {layout.shard_len(self._mesh.get_local_rank())}:
            return layout
        even = max(rows, default=1) % 2 == 0
        balanced = _balances() and even if layout is None else layout.kind == "zigzag"
        # Without a mask the order does not matter, and contiguous takes any number of rows.
        return "zigzag" if is_causal and balanced else "contiguous"


def _move(x: Tensor, to: Tensor) -> None:
    """Makes `x` share the memory, size and strides of `to`, in place."""
    x.set_(to.untyped_storage(), to.storage_offset(), to.size(), to.stride())


def _default_layout(seqlen: int, world_size: int) -> SequenceLayout:
    if _balances() and seqlen % (2 * world_size) == 0:
        return SequenceLayout.zigzag(seqlen, world_size)
    return chunks(seqlen, (world_size,))


def _balances() -> bool:
    """torch's switch for load balancing; True if its module is not loaded."""
    theirs = sys.modules.get("torch.distributed.tensor.experimental._attention")
    options = getattr(theirs, "_cp_options", None)
    return True if options is None else bool(options.enable_load_balance)


def _runs_of(rows: int, mesh: DeviceMesh, device: torch.device) -> SequenceLayout:
    """The layout of runs in the order of the ranks; collective, as each rank gives its `rows`."""
    length = torch.tensor([rows], device=device)
    lengths = [torch.empty_like(length) for _ in range(mesh.size())]
    dist.all_gather(lengths, length, group=mesh.get_group())
    return SequenceLayout.boundaries([0, *accumulate(int(n) for n in lengths)])


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
        check_dim(f"buffer {i}", x, dim)
        lengths.append(x.size(dim))
    if len(set(lengths)) > 1:
        raise ValueError(
            f"buffers must have one length in their seq dims, got {lengths}: shard buffers of "
            "other lengths with SequenceLayout.shard"
        )
    return lengths[0] if lengths else None


def _is_among(x: Tensor, tensors: Iterable[Tensor]) -> bool:
    """Tells whether `x` is one of the tensors, by identity: `in` would compare elements."""
    return any(x is other for other in tensors)
