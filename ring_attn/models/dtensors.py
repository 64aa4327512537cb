"""DTensors whose rows are split along a mesh: placements, lengths, local shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, placement_types

from ring_attn.core.layout import Layouts, SequenceLayout

# The placement of a dim that is split twice, in another order; some versions derive it from Shard.
# (isinstance, not type(): torch 2.11's compiler cannot trace the type of a placement.)
_STRIDED: Any = getattr(placement_types, "_StridedShard", ())


# scaled_dot_product_attention takes (batch, heads, rows, headdim).
_SEQ_DIM = 2


class SplitRows:
    """The axes of a mesh along which the rows of DTensors are split, nested in their order."""

    def __init__(self, mesh: DeviceMesh, seq_dim: int) -> None:
        self.mesh, self.seq_dim = mesh, seq_dim

    def distributed(self, qkv: Sequence[Tensor], layouts: Layouts | None) -> list[Tensor]:
        """DTensors of the whole sequence from plain shards; without layouts, from equal shards."""
        lengths = [x.size(self.seq_dim) * self.mesh.size() for x in qkv]
        if layouts is not None:
            for layout in layouts:
                possible = chunks(layout.seqlen, self.mesh.shape)
                if layout.shard_lens != possible.shard_lens:
                    raise ValueError(
                        f"DTensors with {layout.seqlen} rows have {list(possible.shard_lens)} on "
                        f"the ranks, layout {layout} has {list(layout.shard_lens)}. Use "
                        f"SequenceLayout.{possible}, or inside='local' with plain shards of any "
                        "lengths"
                    )
            lengths = [layouts[0].seqlen, layouts[1].seqlen, layouts[1].seqlen]
        return [
            self._from_local(x, self.seq_dim, length)
            for x, length in zip(qkv, lengths, strict=True)
        ]

    def shards(self, qkv: Sequence[Any]) -> list[Tensor]:
        """This rank's rows of what scaled_dot_product_attention gets."""
        for name, x in zip(("query", "key", "value"), qkv, strict=True):
            if x.device_mesh != self.mesh or [*x.placements] != [Shard(_SEQ_DIM)] * self.mesh.ndim:
                raise ValueError(
                    f"{name} of F.scaled_dot_product_attention must be split along its rows, "
                    f"Shard({_SEQ_DIM}), on the mesh of ContextParallel, got {list(x.placements)} "
                    f"for shape {tuple(x.shape)}; is seq_dim={self.seq_dim} right?"
                )
        return [x.to_local() for x in qkv]

    def whole(self, out: Tensor, query: Tensor) -> DTensor:
        """This rank's rows of scaled_dot_product_attention's output, as a DTensor like `query`."""
        return self._from_local(out, _SEQ_DIM, query.size(_SEQ_DIM))

    def _from_local(self, x: Tensor, dim: int, length: int) -> DTensor:
        """A DTensor with `length` rows in `dim`, whose dims have the order in memory of x's."""
        placements = [Shard(dim)] * self.mesh.ndim
        # torch infers even shapes itself, also for symbolic lengths.
        if x.size(dim) * self.mesh.size() == length:
            return DTensor.from_local(x, self.mesh, placements, run_check=False)
        if 0 in x.stride():
            x = x.contiguous()
        inward = sorted(range(x.ndim), key=lambda dim: -x.stride()[dim])
        shape = [*x.shape[:dim], length, *x.shape[dim + 1 :]]
        whole = torch.empty_permuted(shape, inward, device="meta")
        return DTensor.from_local(
            x, self.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
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
