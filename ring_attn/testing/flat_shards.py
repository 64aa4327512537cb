"""Shards of parameters by FSDP1 (`FullyShardedDataParallel`), and the whole parameters.

FSDP1 concatenates the parameters of a module, flattened, and gives each rank a part of them. With
`use_orig_params=True`, a parameter is the flat piece of it that is in the part of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel


class FlatShards:
    """The parameters of a module that FSDP1 has sharded, with their shapes and groups.

    `parameter in shards` is whether FSDP1 has sharded a parameter.

    Raises:
        NotImplementedError: FSDP1 has `use_orig_params=False`.
    """

    def __init__(self, module: nn.Module) -> None:
        # By id of a parameter; the parameters are kept, so that ids stay theirs.
        self._groups: dict[int, dist.ProcessGroup | None] = {}
        self._shapes: dict[int, torch.Size] = {}
        self._parameters: list[Tensor] = []
        outer = FullyShardedDataParallel.fsdp_modules(module, root_only=True)
        if not outer:
            return
        for inner in FullyShardedDataParallel.fsdp_modules(module):  # outer modules come first
            if any(name.endswith("_flat_param") for name, _ in inner.named_parameters()):
                raise NotImplementedError(
                    "audit cannot compare parameters of FullyShardedDataParallel with "
                    "use_orig_params=False, which have neither names nor shapes of their own: pass "
                    "use_orig_params=True, or use torch.distributed.fsdp.fully_shard"
                )
            for parameter in inner.parameters():
                self._groups[id(parameter)] = inner.process_group
                self._parameters.append(parameter)
        for root in outer:
            parameters = [*root.parameters()]
            with FullyShardedDataParallel.summon_full_params(root, writeback=False):
                shapes = [x.shape for x in root.parameters()]
            self._shapes |= {id(x): shape for x, shape in zip(parameters, shapes, strict=True)}

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._shapes

    def whole(self, parameter: Tensor, piece: Tensor | None) -> Tensor | None:
        """Return a whole tensor on the CPU from the pieces of the ranks, or None if all have none.

        All ranks of the parameter's group call this together.

        Args:
            parameter: the parameter.
            piece: this rank's piece of the parameter, or of its gradient.
        """
        group, shape = self._groups[id(parameter)], self._shapes[id(parameter)]
        own = None if piece is None else piece.detach().cpu().flatten()
        pieces: list[Tensor | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(pieces, own, group)
        given = [x for x in pieces if x is not None]
        if not given:
            return None
        whole = torch.cat(given)
        if whole.numel() == shape.numel():
            return whole.view(shape)
        return given[0].view(shape)  # each rank has all parameters: NO_SHARD
