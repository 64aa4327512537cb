"""DTensors whose rows are sharded along a mesh: placements, lengths, local shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, placement_types

from ring_attn.core.layout import Layouts, SequenceLayout

# The placement of a dim that is sharded twice, in another order. Some versions of torch derive it
# from Shard. (isinstance, not type(): torch 2.11's compiler cannot trace the type of a placement.)
_STRIDED: type | tuple[()] = getattr(placement_types, "_StridedShard", ())


# scaled_dot_product_attention takes (batch, heads, rows, headdim).
_SEQ_DIM = 2


class SplitRows:
    """The axes of a mesh along which the rows of DTensors are sharded, nested in their order."""

    def __init__(self, mesh: DeviceMesh, seq_dim: int) -> None:
        self.mesh, self.seq_dim = mesh, seq_dim

    def distributed(self, qkv: Sequence[Tensor], layouts: Layouts | None) -> list[Tensor]:
        """Return DTensors of the whole sequence, made from the plain shards of q, k and v.

        `layouts` are the layouts of queries and keys. Without them, all shards have equal lengths.
        """
        if layouts is None:
            lengths = [x.size(self.seq_dim) * self.mesh.size() for x in qkv]
        else:
            for layout in layouts:
                self._check_lengths(layout)
            layout_q, layout_k = layouts
            lengths = [layout_q.seqlen, layout_k.seqlen, layout_k.seqlen]
        return [
            self._from_local(x, self.seq_dim, length)
            for x, length in zip(qkv, lengths, strict=True)
        ]

    def _check_lengths(self, layout: SequenceLayout) -> None:
        """Refuse a layout whose shards have other lengths than DTensor's."""
        possible = chunks(layout.seqlen, self.mesh.shape)
        if layout.shard_lens != possible.shard_lens:
            raise ValueError(
                f"DTensors with {layout.seqlen} rows have {list(possible.shard_lens)} rows on the "
                f"ranks, but layout {layout} has {list(layout.shard_lens)}: use "
                f"SequenceLayout.{possible}, or inside='local' with plain shards of any lengths"
            )

    def shards(self, qkv: Sequence[DTensor]) -> list[Tensor]:
        """Return this rank's rows of the arguments of scaled_dot_product_attention."""
        expected = [Shard(_SEQ_DIM)] * self.mesh.ndim
        for name, x in zip(("query", "key", "value"), qkv, strict=True):
            if x.device_mesh != self.mesh or [*x.placements] != expected:
                raise ValueError(
                    f"{name} of F.scaled_dot_product_attention must be sharded along its rows, "
                    f"Shard({_SEQ_DIM}), on the mesh of ContextParallel, got {list(x.placements)} "
                    f"for shape {tuple(x.shape)}; is seq_dim={self.seq_dim} right?"
                )
        return [x.to_local() for x in qkv]

    def whole(self, out: Tensor, query: Tensor) -> DTensor:
        """Return this rank's rows of the attention output as a DTensor with the rows of `query`."""
        return self._from_local(out, _SEQ_DIM, query.size(_SEQ_DIM))

    def _from_local(self, x: Tensor, dim: int, length: int) -> DTensor:
        """Return a DTensor with `length` rows in `dim`, whose strides have the order of x's."""
        placements = [Shard(dim)] * self.mesh.ndim
        # torch infers even shapes itself, also for symbolic lengths.
        if x.size(dim) * self.mesh.size() == length:
            return DTensor.from_local(x, self.mesh, placements, run_check=False)
        # Expanded dims, whose stride is 0, have no place in an order of strides.
        if 0 in x.stride():
            x = x.contiguous()
        outermost_first = sorted(range(x.ndim), key=lambda dim: -x.stride()[dim])
        shape = [*x.shape[:dim], length, *x.shape[dim + 1 :]]
        # A tensor without memory, which only computes the strides.
        whole = torch.empty_permuted(shape, outermost_first, device="meta")
        return DTensor.from_local(
            x, self.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
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
