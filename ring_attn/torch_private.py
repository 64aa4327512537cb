"""All private names of torch that this package uses, which a new version of torch may change.

Exceptions: like torch, `transport` also calls these methods of the backend of a process group:
`send`, `recv`, `_allgather_base`, `_reduce_scatter_base`, `alltoall_base`.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

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

# Objects of torch whose classes are private or have no types: communicators, operators and what
# they take and return, and the context of autograd functions, which takes attributes of every name.
Untyped: TypeAlias = Any
Context: TypeAlias = Untyped

P = ParamSpec("P")
T = TypeVar("T")

profiler_enabled = _autograd._profiler_enabled

# For comparison by identity, because the name in torch.nn.functional may be patched.
native_sdpa: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention

# Whether a transform of torch.func wraps a tensor.
is_batched: Callable[[Tensor], bool] = _functorch.is_batchedtensor
is_legacy_batched: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor
is_grad_tracking: Callable[[Tensor], bool] = _functorch.is_gradtrackingtensor

# Returns the process group of a name; a graph can contain the name of a group, but not the group.
group_by_name: Callable[[str], dist.ProcessGroup] = vars(distributed_c10d)["_resolve_process_group"]

# Skips autograd in the dispatch of operators within the block.
below_autograd: Callable[[], AbstractContextManager[object]] = torch._C._AutoDispatchBelowAutograd


def group_timeout(group: dist.ProcessGroup) -> float:
    """Return the timeout of a process group, in seconds."""
    for device in ("cuda", "cpu"):
        try:
            backend = group._get_backend(torch.device(device))
        except RuntimeError:
            continue
        try:
            timeout: datetime.timedelta = backend.options._timeout
        except AttributeError:
            raise RuntimeError(
                "group has a backend without options, such as torch's 'fake', whose ranks never "
                "communicate: use gloo or nccl, or ring_attn.testing.run_all_ranks for all "
                "ranks in one process"
            ) from None
        return timeout.total_seconds()
    raise RuntimeError("the process group has no backend for cpu or cuda: use gloo or nccl")


def group_store(group: dist.ProcessGroup) -> Store:
    """Return the store of the group, with torch's own connection to it.

    A second connection (`clone`) would look up the names of both hosts, and a request that the name
    server loses takes 5 s. A thread that waits for a key blocks this connection for other threads.
    Our ranks never wait within the store, but poll it.
    """
    store: Untyped = group.get_group_store()
    return cast(Store, store)


def all_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this process of which this rank is a member."""
    return [group for group in distributed_c10d._world.pg_map if hasattr(group, "get_group_store")]


# torch's class of NCCL process groups for which this package is written. Newer versions have other
# classes as well, one of which is the backend "nccl" of 2.15. There a collective between
# `_start_coalescing` and `_end_coalescing` starts at once, and the work that `_end_coalescing`
# returns does not wait for it: `coalesced` waits for each started work there. The rest of the class
# (options and end of communicators, flight recorder) has not run on a GPU, so it is refused.
NCCL_CLASS = "ProcessGroupNCCL"


def nccl_class() -> Untyped:
    """Return torch's class of NCCL process groups for which this package is written.

    Raises:
        NotImplementedError: torch has another class with this name.
    """
    found = dist.ProcessGroupNCCL
    second = getattr(dist, "ProcessGroupNCCL2", None)
    if found.__name__ != NCCL_CLASS or found is second:
        raise NotImplementedError(
            f"torch {torch.__version__} has {found.__name__} as torch.distributed.{NCCL_CLASS}, "
            "which ring_attn does not support: use an older torch, from 2.11"
        )
    return found


def refuse_other_nccl(group: dist.ProcessGroup) -> None:
    """Refuse a group whose CUDA tensors go through another class of NCCL process groups.

    Raises:
        NotImplementedError: the class is not `NCCL_CLASS`; the text says how to get that one.
    """
    try:
        backend: Untyped = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # none for CUDA tensors
        return
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    name = type(backend).__name__
    is_nccl = "nccl" in name.lower() or "nccl" in backend.name()
    if is_nccl and name != NCCL_CLASS:
        raise NotImplementedError(
            f"ring_attn supports only torch's {NCCL_CLASS}, got a group with {name} (torch "
            f"{torch.__version__}, backend {backend.name()!r}): "
            "set TORCH_DIST_USE_NCCL2=0 on all ranks before init_process_group, or pass "
            "init_process_group('nccl-legacy')"
        )


def num_process_groups() -> int:
    """Return the number of process groups of this rank."""
    return len(dist.distributed_c10d._world.pg_map)


def installed_nccl() -> tuple[int, ...] | None:
    """Return the version of torch's NCCL, such as (2, 28, 9); None if torch has none."""
    if not hasattr(torch._C, "_nccl_version"):  # a build for CPUs
        return None
    return torch.cuda.nccl.version()[:3]


def nccl_options(name: str, seconds: float, max_ctas: int, global_ranks: Sequence[int]) -> Untyped:
    """Return the options of an NCCL communicator that runs at the same time as attention kernels.

    Its stream has priority on free multiprocessors. Its blocks are few and not in clusters (NCCL's
    default on sm_90 is clusters of 4), so that they fit next to an attention kernel.

    Args:
        name: name of the communicator.
        seconds: timeout.
        max_ctas: the largest number of thread blocks.
        global_ranks: the members, for torch's flight recorder and logs.
    """
    options = nccl_class().Options()
    options._timeout = datetime.timedelta(seconds=seconds)
    options.group_name = GroupName(name)
    options.global_ranks_in_group = list(global_ranks)
    options.is_high_priority_stream = True
    options.config.cga_cluster_size = 0
    options.config.max_ctas = max_ctas
    return options


class StartedWorks:
    """Works that were started together."""

    def __init__(self, works: Iterable[dist.Work | None]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()


def coalesced(
    communicator: Untyped, starts: Sequence[tuple[Untyped, ...]]
) -> dist.Work | StartedWorks:
    """Start several operations as one NCCL group, in which no operation waits for another.

    Each of `starts` is a method of the communicator and its arguments. torch's flight recorder has
    an entry for each operation, and for the group if it has several operations.

    The group is closed after an error or an interrupt, too: an open group would swallow all later
    operations of its thread, on every communicator.
    """
    if len(starts) == 1:
        start, *arguments = starts[0]
        work: dist.Work = start(*arguments)
        return work
    started: list[dist.Work | None] = []
    try:
        communicator._start_coalescing()
        for start, *arguments in starts:
            started.append(start(*arguments))
    finally:
        end: dist.Work = communicator._end_coalescing()
    if type(communicator).__name__ == NCCL_CLASS:
        # Its works of single operations have no end: a capture would refuse to wait for one.
        return end
    return StartedWorks([*started, end])


def flattened(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh with several axes; every rank must call this."""
    world = dist.group.WORLD
    assert world is not None, "a mesh has a process group"
    # After init_process_group(device_id=...) torch would split the communicator of the world, and
    # wait for all ranks of the world, some of which may not make the new group.
    with _flattening:
        device = world.bound_device_id
        world.bound_device_id = None
        try:
            return mesh._flatten().get_group()
        finally:
            world.bound_device_id = device


# Held while the world has no device: a second thread would save None as its device.
_flattening = threading.Lock()


def break_graph(reason: str) -> None:
    """End the graph that dynamo traces; with fullgraph=True this raises the reason."""
    torch._dynamo.graph_break(msg=reason)


def is_traced_as_constant(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function whose result becomes a constant of the graph.

    `torch.compiler.assume_constant_result` does the same, but loads the compiler.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def specialized(value: T) -> T:
    """Return the value, as a constant of the graph if the compiler made a symbol of the number."""
    if torch.compiler.is_compiling() and isinstance(value, (int, float)):
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        return cast(T, guard_scalar(value))
    return value
