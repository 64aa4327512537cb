"""Every private name of torch that this package uses, and that a new torch may break.

Exceptions: `transport` also calls these methods of a process group's backend, as torch does:
`send`, `recv`, `_allgather_base`, `_reduce_scatter_base`, `alltoall_base`.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _autograd, _functorch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.distributed_c10d import PrefixStore as PrefixStore
from torch.distributed.distributed_c10d import Store as Store
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

F = TypeVar("F", bound=Callable[..., Any])

profiler_enabled = _autograd._profiler_enabled

# For comparison by identity: torch.nn.functional's name for it may be patched.
native_sdpa: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention


# Whether a transform of torch.func wraps a tensor.
is_batched: Callable[[Tensor], bool] = _functorch.is_batchedtensor
is_legacy_batched: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor
is_grad_tracking: Callable[[Tensor], bool] = _functorch.is_gradtrackingtensor

# The process group of a name; a graph can hold a group's name, not the group.
group_by_name: Callable[[str], dist.ProcessGroup] = vars(distributed_c10d)["_resolve_process_group"]

# Skips autograd's part of an operator's dispatch within the block.
below_autograd: Callable[[], AbstractContextManager[object]] = torch._C._AutoDispatchBelowAutograd


def group_timeout(group: dist.ProcessGroup) -> float:
    """The timeout of a process group, in seconds."""
    for device in ("cuda", "cpu"):
        try:
            backend = group._get_backend(torch.device(device))
        except RuntimeError:
            continue
        try:
            timeout: datetime.timedelta = backend.options._timeout
        except AttributeError:
            raise RuntimeError(
                "group has a backend without options, as torch's 'fake', whose ranks never meet: "
                "use gloo or nccl, or ring_attn.testing.run_all_ranks for all ranks in one process"
            ) from None
        return timeout.total_seconds()
    raise RuntimeError("the process group has no backend for cpu or cuda")


def group_store(group: dist.ProcessGroup) -> Store:
    """The group's store, by torch's own connection to it.

    A second connection (`clone`) looks up the names of both hosts, and a request that the name
    server loses costs 5 s. A thread that waits for a key blocks this connection for other threads;
    a rank of ours never waits within the store, but asks again (`formation.poll`).
    """
    store: Any = group.get_group_store()
    return cast(Store, store)


# torch's class of NCCL process groups for which this package is written. Newer versions have
# others as well, and 2.15 takes one of these for the backend "nccl". There a collective between
# `_start_coalescing` and `_end_coalescing` starts at once, and the work that the latter returns
# waits for no collective: `coalesced` would give results before they have arrived.
NCCL_CLASS = "ProcessGroupNCCL"


def nccl_class() -> Any:
    """Return torch's class of NCCL process groups for which this package is written.

    Raises:
        NotImplementedError: torch has another class by that name.
    """
    found = dist.ProcessGroupNCCL
    second = getattr(dist, "ProcessGroupNCCL2", None)
    if found.__name__ != NCCL_CLASS or found is second:
        raise NotImplementedError(
            f"torch {torch.__version__} has {found.__name__} as torch.distributed.{NCCL_CLASS}, "
            f"for which ring_attn is not written yet: use an older torch, from 2.11"
        )
    return found


def refuse_other_nccl(group: dist.ProcessGroup) -> None:
    """Refuse a group whose CUDA tensors go through another class of NCCL process groups.

    Raises:
        NotImplementedError: the class is not `NCCL_CLASS`; the text says how to get that one.
    """
    try:
        backend: Any = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # none for CUDA tensors
        return
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    name = type(backend).__name__
    is_nccl = "nccl" in name.lower() or "nccl" in backend.name()
    if is_nccl and name != NCCL_CLASS:
        raise NotImplementedError(
            f"ring_attn supports torch's {NCCL_CLASS}, but the group has {name} (torch "
            f"{torch.__version__}, backend {backend.name()!r}), for which it is not written yet: "
            "set TORCH_DIST_USE_NCCL2=0 on all ranks before init_process_group, or pass "
            "init_process_group('nccl-legacy')"
        )


def nccl_options(name: str, seconds: float, max_ctas: int, global_ranks: Sequence[int]) -> Any:
    """Options of an NCCL communicator that runs beside attention kernels.

    torch's flight recorder and its logs name the members by global ranks.

    Its stream has priority on free multiprocessors. Its blocks are few, and not in clusters: NCCL's
    default on sm_90 is clusters of 4.
    """
    options = nccl_class().Options()
    options._timeout = datetime.timedelta(seconds=seconds)
    options.group_name = GroupName(name)
    options.global_ranks_in_group = list(global_ranks)
    options.is_high_priority_stream = True
    options.config.cga_cluster_size = 0
    options.config.max_ctas = max_ctas
    return options


def coalesced(communicator: Any, starts: Sequence[tuple[Any, ...]]) -> dist.Work:
    """Starts several operations as one NCCL group, in which no operation waits for another.

    Each of `starts` is a method of the communicator with its arguments. torch's flight recorder
    makes an entry of each operation, and one of the group, unless that has one operation only.

    After an error or an interrupt the group is closed too: a group left open would swallow all
    later operations of its thread, on every communicator.
    """
    if len(starts) == 1:
        ((start, *given),) = starts
        work: dist.Work = start(*given)
        return work
    try:
        communicator._start_coalescing()
        for start, *given in starts:
            start(*given)
    finally:
        work = communicator._end_coalescing()
    return work


def flattened(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of a mesh with several axes; every rank of the mesh must call this."""
    world = dist.group.WORLD
    assert world is not None, "a mesh has a process group"
    # After init_process_group(device_id=...) torch would split the world's communicator, and wait
    # for all ranks of the world, of which some may not make the new group.
    with _flattening:
        device, world.bound_device_id = world.bound_device_id, None
        try:
            return mesh._flatten().get_group()
        finally:
            world.bound_device_id = device


# Two threads at once would lose the world's device: one would save what the other has set.
_flattening = threading.Lock()


def break_graph(reason: str) -> None:
    """Ends the graph that dynamo traces; under fullgraph=True raises the reason."""
    torch._dynamo.graph_break(msg=reason)


def is_traced_as_constant(function: F) -> F:
    """Marks a function whose result becomes a constant of the graph.

    As `torch.compiler.assume_constant_result`, but without loading the compiler.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def specialized(value: Any) -> Any:
    """The value; turns a number that the compiler made symbolic into a constant of the graph."""
    if torch.compiler.is_compiling() and isinstance(value, (int, float)):
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        return guard_scalar(value)
    return value
