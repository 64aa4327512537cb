"""DTensors whose rows are split along a mesh: placements, lengths, local shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types

from ring_attn.core.layout import Layouts, SequenceLayout

# The placement of a dim that is split twice, in another order; some versions derive it from Shard.
# (isinstance, not type(): torch 2.11's compiler cannot trace the type of a placement.)
_STRIDED: Any = getattr(placement_types, "_StridedShard", ())


class Dims(NamedTuple):
    seq: int
    head: int

    def check(self, ndim: int) -> None:
        """Refuses tensors whose last dim would not be headdim."""
        if max(self) >= ndim - 1:
            raise ValueError(
                f"seq_dim {self.seq} and head_dim {self.head} must come before the last dim, which "
                f"is headdim; got tensors with {ndim} dims"
            )


class SplitRows:
    """The axes of a mesh along which the rows of DTensors are split, nested in their order."""

    def __init__(self, mesh: DeviceMesh, seq_dim: int) -> None:
        self.mesh, self.seq_dim = mesh, seq_dim
        self._known_axes = {mesh: tuple(range(mesh.ndim))}

    def distributed(self, qkv: Sequence[Tensor], layouts: Layouts | None) -> list[Tensor]:
        """DTensors of the whole sequence from plain shards; without layouts, from equal shards."""
        lengths = [x.size(self.seq_dim) * self.mesh.size() for x in qkv]
        if layouts is not None:
            lengths = [layouts[0].seqlen, layouts[1].seqlen, layouts[1].seqlen]
            self.layout_of_lengths((lengths[0], lengths[1]), layouts)
        dim, placements = self.seq_dim, [Shard(self.seq_dim)] * self.mesh.ndim
        return [
            _from_local(x, self.mesh, placements, [*x.shape[:dim], length, *x.shape[dim + 1 :]])
            for x, length in zip(qkv, lengths, strict=True)
        ]

    def layout_of_lengths(
        self, lengths: tuple[int, int], requested: str | SequenceLayout | Layouts
    ) -> str | Layouts:
        """The layout of queries and keys of these lengths; refuses shards other than DTensor's."""
        if isinstance(requested, str) and all(n % self.mesh.size() == 0 for n in lengths):
            return requested
        pair = requested if isinstance(requested, tuple | list) else (requested, requested)
        layouts = []
        for seqlen, layout in zip(lengths, pair, strict=True):
            possible = chunks(seqlen, self.mesh.shape)
            if layout == "contiguous":
                layout = possible
            elif isinstance(layout, str):
                layout = SequenceLayout.from_name(layout, seqlen, self.mesh.size())
            if (layout.seqlen, layout.shard_lens) != (seqlen, possible.shard_lens):
                raise ValueError(
                    f"DTensors with {seqlen} rows have {list(possible.shard_lens)} on the ranks, "
                    f"layout {layout} has {list(layout.shard_lens)}. Use "
                    f"SequenceLayout.{possible}, or inside='local' with plain shards of any lengths"
                )
            layouts.append(layout)
        return layouts[0], layouts[1]

    def check_placements(self, qkv: Sequence[Any], dims: Dims) -> None:
        """Refuses DTensors unless the style's axes split only rows, others only heads or batch."""
        q = qkv[0]
        dims.check(q.ndim)
        axes, mesh = self._axes(q.device_mesh), q.device_mesh
        num_shares = 1  # ranks among which the heads are split
        for name, x in zip("qkv", qkv, strict=True):
            if x.device_mesh != mesh or x.placements != q.placements:
                raise ValueError(
                    "q, k, v must be placed alike on one mesh, got q "
                    f"{list(q.placements)} and {name} {list(x.placements)}"
                )
        for axis, placement in enumerate(q.placements):
            dim = _sharded_dim(placement)
            if axis in axes:
                fits = dim == dims.seq
            else:
                fits = placement == Replicate() or dim not in (None, dims.seq, q.ndim - 1)
                num_shares *= mesh.size(axis) if dim == dims.head else 1
            if not fits:
                raise ValueError(
                    f"placements of q, k, v must be Shard({dims.seq}), of the rows, on the axes of "
                    f"ContextParallel (axes {list(axes)} of the mesh) and of heads or batch on "
                    f"others, got {list(q.placements)} for shape {tuple(q.shape)}; is seq_dim="
                    f"{self.seq_dim} right?"
                )
        for name, x in zip("qkv", qkv, strict=True):
            if x.size(dims.head) % num_shares:
                raise ValueError(
                    f"the {x.size(dims.head)} heads of {name} must divide by the {num_shares} "
                    "ranks of the mesh among which they are split: a rank needs the kv heads of "
                    "its q heads"
                )

    def _axes(self, mesh: DeviceMesh) -> tuple[int, ...]:
        """The style's axes, as indices in a DTensor's mesh."""
        if mesh in self._known_axes:
            return self._known_axes[mesh]
        ours, theirs = self.mesh.mesh_dim_names or (), mesh.mesh_dim_names or ()
        axes = tuple(theirs.index(name) for name in ours if name in theirs)
        if len(axes) != self.mesh.ndim and mesh.ndim == self.mesh.ndim:
            axes = tuple(range(mesh.ndim))
        coordinate = mesh.get_coordinate()
        if len(axes) == self.mesh.ndim and list(axes) == sorted(axes) and coordinate is not None:
            here = tuple(slice(None) if i in axes else at for i, at in enumerate(coordinate))
            if torch.equal(mesh.mesh[here], self.mesh.mesh):
                self._known_axes[mesh] = axes
                return axes
        raise ValueError(
            f"q, k, v are on a mesh with axes {theirs} of sizes {tuple(mesh.shape)}, which does "
            f"not have those of ContextParallel, {ours} of sizes {tuple(self.mesh.shape)}, over "
            "the same ranks; distribute them over both, or pass this rank's shards as plain tensors"
        )


def rows_of(x: DTensor) -> Tensor:
    """This rank's rows of an output, a DTensor on the style's mesh."""
    dims = {_sharded_dim(p) for p in x.placements}
    if len(dims) != 1 or None in dims:
        raise ValueError(
            "every DTensor that the module returns must be split along the rows, got "
            f"placements {list(x.placements)} of shape {tuple(x.shape)}"
        )
    return x.to_local()


def placed_as(out: Tensor, q: DTensor) -> DTensor:
    """This rank's attention as a DTensor with the placements of q."""
    expected, dim_v = list(q.to_local().shape[:-1]), out.size(-1)
    if list(out.shape[:-1]) != expected:
        raise ValueError(
            f"the attention must have the dims of q, shape {(*expected, dim_v)} on this rank, got "
            f"{tuple(out.shape)}"
        )
    return _from_local(out, q.device_mesh, q.placements, [*q.shape[:-1], dim_v])


def chunks(seqlen: int, sizes: Sequence[int]) -> SequenceLayout:
    """The layout of rows that DTensor splits along axes of these sizes, each like torch.chunk."""
    lens = [seqlen]
    for size in sizes:
        lens = [
            min(max(n - part * -(-n // size), 0), -(-n // size))
            for n in lens
            for part in range(size)
        ]
    return SequenceLayout.boundaries([*accumulate(lens, initial=0)])


def _sharded_dim(placement: object) -> int | None:
    """The dim of a plain Shard; None for other placements."""
    if isinstance(placement, Shard) and not isinstance(placement, _STRIDED):
        return placement.dim
    return None


def _from_local(
    x: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]
) -> DTensor:
    """A DTensor of that global shape, whose dims have the same order in memory as those of `x`."""
    even = list(x.shape)
    for axis, placement in enumerate(placements):
        dim = _sharded_dim(placement)
        if dim is not None:
            even[dim] *= mesh.size(axis)
    # torch infers even shapes itself, also for symbolic lengths.
    if even == list(shape):
        return DTensor.from_local(x, mesh, placements, run_check=False)
    if 0 in x.stride():
        x = x.contiguous()
    inward = sorted(range(x.ndim), key=lambda dim: -x.stride()[dim])
    whole = torch.empty_permuted(shape, inward, device="meta")
    return DTensor.from_local(
        x, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
