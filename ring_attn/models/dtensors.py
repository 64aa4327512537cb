"""DTensors whose rows are sharded along a mesh: placements, lengths, local shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, placement_types

from ring_attn.call import Layout
from ring_attn.core.joint import JointLayout
from ring_attn.core.layout import Layouts, SequenceLayout

# The placement of a dim that is sharded twice, in another order. Some versions of torch derive it
# from Shard. (isinstance, not type(): torch 2.11's compiler cannot trace the type of a placement.)
_STRIDED: type | tuple[()] = getattr(placement_types, "_StridedShard", ())


class Dims(NamedTuple):
    """The dims of the rows and of the heads in a tensor, whose last dim is headdim."""

    seq: int
    head: int

    def check(self, ndim: int) -> None:
        """Refuse tensors whose last dim would not be headdim."""
        if max(self) >= ndim - 1:
            raise ValueError(
                f"seq_dim {self.seq} and head_dim {self.head} must come before the last dim, which "
                f"is headdim, but got tensors with {ndim} dims"
            )


class SplitRows:
    """The axes of a mesh along which the rows of DTensors are sharded, nested in their order."""

    def __init__(self, mesh: DeviceMesh, seq_dim: int) -> None:
        self.mesh, self.seq_dim = mesh, seq_dim
        # Meshes of DTensors -> the indices of our axes in them.
        self._known_axes = {mesh: tuple(range(mesh.ndim))}

    def distributed(self, qkv: Sequence[Tensor], layouts: Layouts | None) -> list[Tensor]:
        """Return DTensors of the whole sequence, made from the plain shards of q, k and v.

        `layouts` are the layouts of queries and keys. Without them, all shards have equal lengths.
        """
        if layouts is None:
            lengths = [x.size(self.seq_dim) * self.mesh.size() for x in qkv]
        else:
            layout_q, layout_k = layouts
            lengths = [layout_q.seqlen, layout_k.seqlen, layout_k.seqlen]
            self.layout_of_lengths(lengths[:2], layouts)
        dim, placements = self.seq_dim, [Shard(self.seq_dim)] * self.mesh.ndim
        return [
            _from_local(x, self.mesh, placements, [*x.shape[:dim], length, *x.shape[dim + 1 :]])
            for x, length in zip(qkv, lengths, strict=True)
        ]

    def layout_of_lengths(self, lengths: Sequence[int], layout: Layout) -> str | Layouts:
        """Return the layout of DTensors with `lengths` queries and keys.

        Refuse a layout whose shards have other lengths than DTensor's.
        """
        if isinstance(layout, str) and all(n % self.mesh.size() == 0 for n in lengths):
            return layout
        pair = layout if isinstance(layout, (tuple, list)) else (layout, layout)
        of_q, of_k = (
            self._layout_of_length(length, each) for length, each in zip(lengths, pair, strict=True)
        )
        return of_q, of_k

    def _layout_of_length(
        self, length: int, layout: str | SequenceLayout | JointLayout
    ) -> SequenceLayout:
        """Return the layout of a DTensor with `length` rows, see `layout_of_lengths`."""
        if isinstance(layout, JointLayout):
            raise NotImplementedError(
                "a JointLayout, whose first rows every rank holds, is not supported for DTensors: "
                "use inside='local' with plain shards"
            )
        possible = chunks(length, self.mesh.shape)
        if layout == "contiguous":
            return possible
        if isinstance(layout, str):
            layout = SequenceLayout.from_name(layout, length, self.mesh.size())
        if (layout.seqlen, layout.shard_lens) != (length, possible.shard_lens):
            raise ValueError(
                f"DTensors with {length} rows have {list(possible.shard_lens)} rows on the "
                f"ranks, but layout {layout} has {list(layout.shard_lens)}: use "
                f"SequenceLayout.{possible}, or inside='local' with plain shards of any lengths"
            )
        return layout

    def check_placements(
        self, qkv: Sequence[DTensor], dims: Dims, names: Sequence[str] = ("q", "k", "v")
    ) -> None:
        """Check that our axes shard the rows, and all other axes only heads or the batch."""
        q = qkv[0]
        dims.check(q.ndim)
        mesh = q.device_mesh
        axes = self._axes(mesh)
        for name, x in zip(names, qkv, strict=True):
            if x.device_mesh != mesh or x.placements != q.placements:
                raise ValueError(
                    f"{names[0]} and {name} must have the same placements on one mesh, got "
                    f"{list(q.placements)} and {list(x.placements)}"
                )
        num_head_shards = 1
        for axis, placement in enumerate(q.placements):
            dim = _sharded_dim(placement)
            if axis in axes:
                fits = dim == dims.seq
            else:
                fits = placement == Replicate() or dim not in (None, dims.seq, q.ndim - 1)
                num_head_shards *= mesh.size(axis) if dim == dims.head else 1
            if not fits:
                raise ValueError(
                    f"{', '.join(names)} must be sharded along their rows, Shard({dims.seq}), on "
                    f"the mesh of ContextParallel (axes {list(axes)} of their mesh), and along "
                    f"heads or batch on other axes, got {list(q.placements)} for shape "
                    f"{tuple(q.shape)}; is seq_dim={self.seq_dim} right?"
                )
        for name, x in zip(names, qkv, strict=True):
            if x.size(dims.head) % num_head_shards:
                raise ValueError(
                    f"the {x.size(dims.head)} heads of {name} must be a multiple of the "
                    f"{num_head_shards} ranks over which they are sharded, because a rank needs "
                    "the kv heads of its q heads"
                )

    def _axes(self, mesh: DeviceMesh) -> tuple[int, ...]:
        """Return the indices of our axes in the mesh of a DTensor."""
        if mesh in self._known_axes:
            return self._known_axes[mesh]
        ours, theirs = self.mesh.mesh_dim_names or (), mesh.mesh_dim_names or ()
        axes = tuple(theirs.index(name) for name in ours if name in theirs)
        if len(axes) != self.mesh.ndim and mesh.ndim == self.mesh.ndim:
            axes = tuple(range(mesh.ndim))  # meshes without names
        coordinate = mesh.get_coordinate()
        if len(axes) == self.mesh.ndim and list(axes) == sorted(axes) and coordinate is not None:
            # Our axes as a whole, and this rank's coordinate on the others.
            here = tuple(slice(None) if i in axes else at for i, at in enumerate(coordinate))
            if torch.equal(mesh.mesh[here], self.mesh.mesh):
                self._known_axes[mesh] = axes
                return axes
        raise ValueError(
            f"q, k, v are on a mesh with axes {theirs} of sizes {tuple(mesh.shape)}, which does "
            f"not contain the mesh of ContextParallel, axes {ours} of sizes "
            f"{tuple(self.mesh.shape)}, over the same ranks: distribute them over a mesh with "
            "these axes, or pass this rank's shards as plain tensors"
        )


def rows_of(x: DTensor) -> Tensor:
    """Return this rank's rows of a module's output, a DTensor on the style's mesh."""
    dims = {_sharded_dim(placement) for placement in x.placements}
    if len(dims) != 1 or None in dims:
        raise ValueError(
            "every DTensor that the module returns must be sharded along its rows, got "
            f"placements {list(x.placements)} of shape {tuple(x.shape)}"
        )
    return x.to_local()


def placed_as(out: Tensor, q: DTensor) -> DTensor:
    """Return this rank's rows of attention as a DTensor with the placements of q."""
    expected, headdim_v = q.to_local().shape[:-1], out.size(-1)
    if out.shape[:-1] != expected:
        raise ValueError(
            f"the attention must have the dims of q, (..., headdim_v) = {(*expected, headdim_v)} "
            f"on this rank, got {tuple(out.shape)}"
        )
    return _from_local(out, q.device_mesh, q.placements, [*q.shape[:-1], headdim_v])


def chunks(seqlen: int, sizes: Sequence[int]) -> SequenceLayout:
    """Return the layout that DTensor makes along axes of these sizes, each like torch.chunk."""
    lengths = [seqlen]
    for size in sizes:
        lengths = [part for length in lengths for part in _chunk_lengths(length, size)]
    return SequenceLayout.boundaries([*accumulate(lengths, initial=0)])


def _chunk_lengths(length: int, num_chunks: int) -> list[int]:
    """Return the lengths of torch.chunk: the last ones are shorter, or 0."""
    longest = -(-length // num_chunks)  # rounded up
    return [
        min(max(length - index * longest, 0), longest)  # the rows that are left, at most `longest`
        for index in range(num_chunks)
    ]


def _sharded_dim(placement: object) -> int | None:
    """Return the dim of a plain Shard, or None for other placements."""
    if isinstance(placement, Shard) and not isinstance(placement, _STRIDED):
        return placement.dim
    return None


def _from_local(
    x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Return a DTensor with a global shape, whose strides have the order of x's."""
    even_shape = list(x.shape)
    for axis, placement in enumerate(placements):
        dim = _sharded_dim(placement)
        if dim is not None:
            even_shape[dim] *= mesh.size(axis)
    # torch infers even shapes itself, also for symbolic lengths.
    if even_shape == list(shape):
        return DTensor.from_local(x, mesh, placements, run_check=False)
    # Expanded dims, whose stride is 0, have no place in an order of strides.
    if 0 in x.stride():
        x = x.contiguous()
    outermost_first = sorted(range(x.ndim), key=lambda dim: -x.stride()[dim])
    # A tensor without memory, which only computes the strides.
    whole = torch.empty_permuted(shape, outermost_first, device="meta")
    return DTensor.from_local(
        x, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
