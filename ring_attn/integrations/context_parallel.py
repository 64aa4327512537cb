"""torch's context_parallel and its related functions, computed by ring_attention.

Only the import changes:

    from torch.distributed.tensor.experimental import context_parallel           # before
    from ring_attn.integrations.context_parallel import context_parallel         # after

    context_parallel            shards buffers in place and routes F.scaled_dot_product_attention
    context_parallel_unshard    gathers whole tensors from shards
    set_rotate_method           chooses our all_gather or our ring for keys and values

Parameters, the order of rows on the ranks and the restored buffers are as in torch. In contrast to
torch, this module also runs on CPUs, routes calls by a torch function mode instead of patching the
process, accepts lengths that are not multiples of the number of ranks, and refuses options that it
does not support.
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
    """Run attention over a mesh inside the context, where buffers are this rank's shards.

    This replaces `torch.distributed.tensor.experimental.context_parallel`. If the length is a
    multiple of 2P for P ranks, and torch's `_cp_options.enable_load_balance` is on, rank r holds
    chunks r and 2P-1-r of 2P (head-tail, called "zigzag" here). Otherwise rank r holds the r-th run
    of `ceil(seqlen / P)` rows. Calls of F.scaled_dot_product_attention must pass query, key and
    value (batch, nheads, rows, headdim) with this rank's rows, plain tensors. Only calls of this
    thread are routed, with the limits of `models.sdpa.route_sdpa`. A backward may run outside the
    context, but not with activation checkpointing.

    Args:
        mesh: a mesh with one axis.
        buffers: tensors with the whole sequence, the same on every rank, of one length. They are
            resized in place and restored at the end. Buffers must not require grad.
        buffer_seq_dims: the sequence dim of each buffer.
        no_restore_buffers: buffers that remain shards.

    Raises:
        ValueError: the mesh has several axes, the numbers of dims and buffers differ, buffers have
            several lengths or require grad, or `no_restore_buffers` has a tensor that is not in
            `buffers`.
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
    not_restored = set() if no_restore_buffers is None else no_restore_buffers
    _check_mesh(mesh)
    seqlen = _check_buffers(buffers, seq_dims, not_restored)
    layout = None if seqlen is None else _default_layout(seqlen, mesh.size())
    # These tensors keep the memory of buffers that are restored.
    originals = [None if _is_among(x, not_restored) else x.detach() for x in buffers]
    if layout is not None:
        _shard_in_place(buffers, seq_dims, layout, mesh.get_local_rank())
    try:
        with _RoutedModule(mesh, layout):
            yield
    finally:
        with torch.no_grad():
            for buffer, original in zip(buffers, originals, strict=True):
                if original is not None:
                    _move(buffer, original)


@torch.no_grad()
def _shard_in_place(
    buffers: Sequence[Tensor], seq_dims: Sequence[int], layout: SequenceLayout, rank: int
) -> None:
    """Turn buffers into their shards."""
    # All shards are made before any buffer changes, so that an error leaves buffers unchanged.
    shards = [
        layout.shard(x, rank, dim % x.ndim).clone()
        for x, dim in zip(buffers, seq_dims, strict=True)
    ]
    for buffer, shard in zip(buffers, shards, strict=True):
        _move(buffer, shard)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: list[Tensor], seq_dims: list[int], load_balancer: object = None
) -> list[Tensor]:
    """Gather whole tensors from every rank's shards, without gradient, for evaluation.

    This replaces `torch.distributed.tensor.experimental._attention.context_parallel_unshard`.

    Args:
        mesh: a mesh with one axis.
        buffers: this rank's shards.
        seq_dims: the sequence dim of each buffer.
        load_balancer: must be None. Shards must be in the order of `context_parallel`: head-tail if
            the length is a multiple of 2 x ranks and balancing is on, otherwise runs of any lengths
            in the order of the ranks. For the shards of a `SequenceLayout`, call
            `ring_attn.unshard`.

    Returns:
        The whole tensors, on every rank.

    Raises:
        ValueError: the mesh has several axes, or the numbers of dims and buffers differ.
        TypeError: `mesh` is not a mesh.
        NotImplementedError: a load balancer is given.
    """
    _check_mesh(mesh)
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"seq_dims must have one dim for each buffer, got {len(seq_dims)} for {len(buffers)}"
        )
    # torch's function has this parameter, too: code that passes a balancer gets the reason here.
    # torch's function has this parameter, too: code that passes a balancer gets the reason here.
    if load_balancer is not None:
        raise NotImplementedError(
            f"load_balancer must be None, got {type(load_balancer).__name__}: gather shards of "
            "torch's load balancers with torch's context_parallel_unshard"
        )
    whole = []
    for x, dim in zip(buffers, seq_dims, strict=True):
        dim %= x.ndim
        layout = _runs_of(x.size(dim), mesh, x.device)
        seqlen, world_size = layout.seqlen, mesh.size()
        # Shards of equal lengths may be head-tail; `context_parallel` decides it by the length.
        if layout == chunks(seqlen, (world_size,)):
            layout = _default_layout(seqlen, world_size)
        whole.append(unshard(x, layout, group=mesh, dim=dim))
    return whole


def set_rotate_method(rotate_method: str) -> None:
    """Set the strategy of later calls in this process.

    Args:
        rotate_method: "allgather" (default) is strategy "all_gather", which gathers some heads of
            the whole sequence at a time; "alltoall" is strategy "ring", which passes on one shard
            per step.

    Raises:
        ValueError: the name is unknown.
    """
    global _strategy
    if rotate_method not in _STRATEGIES:
        raise ValueError(
            f"rotate_method must be one of {list(_STRATEGIES)}, got {rotate_method!r}; "
            "ring_attn.models.sdpa.route_sdpa(group=mesh, strategy=...) accepts every strategy"
        )
    _strategy = _STRATEGIES[rotate_method]


_strategy = _STRATEGIES["allgather"]


class _RoutedModule(route_sdpa):
    """A context that routes attention to the ranks of a mesh, with torch's order of the rows."""

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
        **kwargs: Any,  # scale and enable_gqa of torch's function
    ) -> Tensor:
        """Return this rank's rows of the output, a plain tensor."""
        return sdpa_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            **kwargs,
            group=self._mesh,
            layout=self._layout_of(query, key, is_causal),
            strategy=_strategy,
        )

    def _layout_of(self, q: Tensor, k: Tensor, is_causal: bool) -> str | SequenceLayout:
        """Return the layout of the buffers, or for other lengths a layout with equal shards."""
        rows = {x.size(_SEQ_DIM) for x in (q, k) if isinstance(x, Tensor) and x.ndim == 4}
        layout = self._layout
        if layout is not None and rows == {layout.shard_len(self._mesh.get_local_rank())}:
            return layout
        if layout is None:
            has_even_rows = max(rows, default=1) % 2 == 0
            balanced = _balances() and has_even_rows
        else:
            balanced = layout.kind == "zigzag"
        # Without a mask the order does not matter, and contiguous accepts any number of rows.
        return "zigzag" if is_causal and balanced else "contiguous"


def _move(x: Tensor, to: Tensor) -> None:
    """Make `x` share the memory, size and strides of `to`, in place."""
    x.set_(to.untyped_storage(), to.storage_offset(), to.size(), to.stride())


def _default_layout(seqlen: int, world_size: int) -> SequenceLayout:
    """Return the layout that torch's context_parallel uses for a length."""
    if _balances() and seqlen % (2 * world_size) == 0:
        return SequenceLayout.zigzag(seqlen, world_size)
    return chunks(seqlen, (world_size,))


def _balances() -> bool:
    """Return torch's switch for load balancing; True if its module is not loaded."""
    module = sys.modules.get("torch.distributed.tensor.experimental._attention")
    options = getattr(module, "_cp_options", None)
    return True if options is None else bool(options.enable_load_balance)


def _runs_of(rows: int, mesh: DeviceMesh, device: torch.device) -> SequenceLayout:
    """Gather each rank's number of rows; return the layout of runs in the order of the ranks."""
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
    buffers: Sequence[Tensor], seq_dims: Sequence[int], not_restored: Collection[Tensor]
) -> int | None:
    """Check the buffers; return their length in the sequence dims, or None without buffers."""
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"buffer_seq_dims must have one dim for each buffer, got {len(seq_dims)} for "
            f"{len(buffers)}"
        )
    if not all(_is_among(x, buffers) for x in not_restored):
        raise ValueError(
            "no_restore_buffers must be a subset of buffers, got a tensor that is not in buffers: "
            "pass the same tensor objects"
        )
    lengths = []
    for i, (x, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            raise TypeError(f"buffers must be plain tensors, got buffer {i}: {type(x).__name__}")
        if x.requires_grad:
            raise ValueError(
                f"buffers must not require a gradient, because they are changed in place, but "
                f"buffer {i} of shape {tuple(x.shape)} requires one: shard it with "
                "SequenceLayout.shard"
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
    """Return whether `x` is one of the tensors, by identity: `in` would compare elements."""
    return any(x is other for other in tensors)
