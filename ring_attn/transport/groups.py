"""The process group, device mesh and transport's options that a user passes: their checks.

Also `from_owner`, by which a result of one rank becomes that of all.
"""

from __future__ import annotations

import weakref
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn.torch_private import flattened, group_by_name, is_traced_as_constant
from ring_attn.transport.options import TransportOptions
from ring_attn.values.checks import check_flag, check_int, check_number, check_type
from ring_attn.values.compiling import cached
from ring_attn.values.probing import probing

Group = dist.ProcessGroup | DeviceMesh | None

# gloo counts milliseconds; the clocks of gloo and NCCL overflow at 9.2e9 seconds.
SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 1e-3, 1e9

# NCCL has at most 64 channels (MAXCHANNELS).
MOST_CTAS = 64
MOST_SPARE_SMS = 1024


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group of a name. Operators get the name, because graphs hold no groups."""
    return group_by_name(name)


def check_group(group: Group) -> dist.ProcessGroup:
    """Return the process group: `group` itself, the group of a mesh, or the default group."""
    if not torch.compiler.is_compiling() and probing.alone:
        raise RuntimeError("each rank probes the model by itself, and calls no other rank")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group, or run under "
            "torchrun --nproc-per-node N (one process is a ring of 1)"
        )
    if group is None:
        world = dist.group.WORLD
        assert world is not None, "an initialised process has a default group"
        return world
    check_group_type(group)
    process_group = _group_of_mesh(group) if isinstance(group, DeviceMesh) else group
    if not is_alive(process_group):
        raise RuntimeError(
            "group was destroyed (torch.distributed.destroy_process_group): pass one that exists, "
            "or None for the default group"
        )
    return process_group


def check_group_type(group: object) -> None:
    # On ranks outside of a new group, torch returns this integer instead of the group.
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise RuntimeError("this rank is not a member of group; only members may call")
    if not isinstance(group, dist.ProcessGroup | DeviceMesh | None):
        raise TypeError(
            "group must be a torch.distributed ProcessGroup, a DeviceMesh or None, got "
            f"{type(group).__name__}"
        )


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether the group has not been destroyed."""
    try:
        dist.get_backend(group)
    except ValueError:
        return False
    return True


def mesh_shape(group: Group) -> tuple[int, ...]:
    return tuple(group.shape) if isinstance(group, DeviceMesh) else ()


@is_traced_as_constant
def described(
    group: dist.ProcessGroup | DeviceMesh | None, device_type: str
) -> tuple[str, tuple[int, ...]]:
    """Return torch's name of the group, and the mesh's shape; constants in a compiled graph."""
    process_group = check_group(group)
    check_group_device(process_group, torch.device(device_type))
    return process_group.group_name, mesh_shape(group)


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.get_coordinate() is None:
        raise RuntimeError(
            f"this rank, {dist.get_rank()}, is not a member of group, a mesh of ranks "
            f"{mesh.mesh.flatten().tolist()}; only members may call"
        )
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.ndim > 2:
        axes: tuple[object, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise ValueError(
            f"group must be a mesh with one axis, or two for a strategy with a degree, got axes "
            f"{axes} of sizes {tuple(mesh.shape)}; pass one axis of it, such as mesh[{axes[0]!r}]"
        )
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"a mesh with two axes needs their names: init_device_mesh(..., {tuple(mesh.shape)}, "
            'mesh_dim_names=("ring", "ulysses"))'
        )
    if mesh not in _flat_groups:
        ranks = mesh.mesh.flatten().tolist()
        if ranks != sorted(ranks):
            raise ValueError(
                f"the ranks of a mesh with two axes must ascend, row by row, got {ranks}"
            )
        world = check_group(None)
        everyone = dist.get_process_group_ranks(world)
        _flat_groups[mesh] = world if ranks == everyone else flattened(mesh)
    return _flat_groups[mesh]


# Cached here: at every look-up of a flattened mesh torch builds a name.
_flat_groups: weakref.WeakKeyDictionary[DeviceMesh, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def check_group_device(group: dist.ProcessGroup, device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensors that are sent must be on cpu or cuda, got {device}")
    if group.size() > 1:
        _check_backend(dist.get_backend_config(group), device.type)


@cached
def _check_backend(backend: str, device_type: str) -> None:
    names = dict(part.split(":") for part in backend.split(",") if ":" in part)
    name = names.get(device_type, backend)
    if (device_type == "cuda") != ("nccl" in name):
        need = "nccl" if device_type == "cuda" else "gloo"
        raise RuntimeError(
            f"the group's backend {name!r} cannot send {device_type} tensors; initialise it with "
            f"{need}, or 'cpu:gloo,cuda:nccl' for both"
        )


def check_transport(options: object) -> TransportOptions:
    check_type("transport", options, TransportOptions, "TransportOptions")
    options = cast(TransportOptions, options)
    timeout = options.timeout
    if timeout is not None:
        check_number("timeout", timeout)
        if not SHORTEST_TIMEOUT <= timeout <= LONGEST_TIMEOUT:
            raise ValueError(
                f"timeout must be positive, finite seconds, from {SHORTEST_TIMEOUT} to "
                f"{LONGEST_TIMEOUT:.0e}, got {timeout}; None takes the group's timeout"
            )
    for name, least, most in (("nccl_max_ctas", 1, MOST_CTAS), ("spare_sms", 0, MOST_SPARE_SMS)):
        value = getattr(options, name)
        check_int(name, value, least=least)
        if value > most:
            raise ValueError(f"{name} must be from {least} to {most}, got {value}")
    if options.one_communicator is not None:
        check_flag("one_communicator", options.one_communicator)
    return options


def from_owner(x: Tensor, group: dist.ProcessGroup, owner: int) -> None:
    """Overwrite `x` on all ranks by the `x` of one rank."""
    dist.broadcast(x.view(torch.uint8), group=group, group_src=owner)  # gloo lacks some dtypes
