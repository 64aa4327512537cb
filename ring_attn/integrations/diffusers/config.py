"""diffusers' config of context parallelism, as a group of ranks and a strategy.

    ContextParallelConfig(ring_degree=4)                      a ring of 4 ranks
    ContextParallelConfig(ulysses_degree=4)                   Ulysses on 4 ranks
    ContextParallelConfig(ring_degree=2, ulysses_degree=2)    Ulysses on 2 consecutive ranks x ring

Any length works, so `ring_anything` and `ulysses_anything` change nothing.
"""

from __future__ import annotations

import sys
from typing import NamedTuple, Protocol, TypeGuard

from torch.distributed.device_mesh import DeviceMesh

from ring_attn.core.strategy import Strategy
from ring_attn.transport import groups
from ring_attn.transport.groups import Group

_AXES = ("ring", "ulysses")


class ContextParallelConfig(Protocol):
    """The attributes of a `diffusers.ContextParallelConfig` that are read."""

    ring_degree: int
    ulysses_degree: int
    convert_to_fp32: bool
    mesh: DeviceMesh | None


class Requested(NamedTuple):
    """The ranks and the strategy of a config."""

    group: Group
    strategy: Strategy


def is_config(value: object) -> TypeGuard[ContextParallelConfig]:
    """Return whether a value is a `diffusers.ContextParallelConfig`."""
    diffusers = sys.modules.get("diffusers")  # whoever has a config has imported it
    return diffusers is not None and isinstance(value, diffusers.ContextParallelConfig)


def requested_by(config: ContextParallelConfig) -> Requested:
    """Return the ranks and the strategy that a config names.

    Raises:
        ValueError: the degrees do not fit the number of ranks, or the mesh.
        NotImplementedError: `convert_to_fp32` is False.
        RuntimeError: there is no process group.
    """
    if not config.convert_to_fp32:
        raise NotImplementedError(
            "convert_to_fp32 must be True, got False: ring_attn sums outputs in float32 always"
        )
    degrees = config.ring_degree, config.ulysses_degree
    strategy = Strategy(ulysses_degree=config.ulysses_degree)
    if config.mesh is None:
        num_ranks = groups.check_group(None).size()
        if degrees[0] * degrees[1] != num_ranks:
            raise ValueError(
                f"ring_degree x ulysses_degree must be the number of ranks, {num_ranks}, got "
                f"{degrees[0]} x {degrees[1]}: change the degrees, or pass the mesh of some ranks"
            )
        return Requested(None, strategy)
    names = config.mesh.mesh_dim_names or ()
    if not set(_AXES) <= set(names):
        raise ValueError(
            f"the mesh of a config must have the axes {_AXES}, got {names}: an axis may have size 1"
        )
    mesh = config.mesh if names == _AXES else config.mesh[_AXES]
    if tuple(mesh.shape) != degrees:
        raise ValueError(
            "ring_degree and ulysses_degree must be the sizes of these axes of the mesh, "
            f"{tuple(mesh.shape)}, got {degrees}"
        )
    return Requested(mesh, strategy)
