"""All private names of torch that this package uses, which a new version of torch may change.

Exceptions: like torch, `transport` also calls these methods of the backend of a process group:
`send`, `recv`, `_allgather_base`, `_reduce_scatter_base`, `alltoall_base`.
"""

from __future__ import annotations

import datetime
import os
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


# torch's two classes of NCCL process groups; the backend "nccl" of torch 2.15 has the second. They
# differ in this, as the classes of torch 2.15.0 showed over stubs of CUDA and NCCL that log calls:
#
#                       ProcessGroupNCCL               ProcessGroupNCCL2
#   when it is made     it connects nothing            it connects, on the device that it is given
#   coalesced messages  start in one group at the end  start in one group at the end
#   other coalesced     start in one group at the end  start at once; before 2.15.0 the work of the
#   collectives                                        end does not wait for them
#   works of single     have no end in a coalescing,   can be waited for
#   operations          so no capture may wait for one
#   flight recorder     has an entry for each          knows only works of whole process groups
NCCL_CLASS = "ProcessGroupNCCL"
SECOND_NCCL_CLASS = "ProcessGroupNCCL2"

# Methods and options of a class of NCCL process groups that this package uses.
NCCL_METHODS = (
    "Options",
    "_allgather_base",
    "_end_coalescing",
    "_reduce_scatter_base",
    "_start_coalescing",
    "abort",
    "alltoall_base",
    "eager_connect_single_device",
    "recv",
    "send",
    "shutdown",
)
NCCL_OPTIONS = (
    "_timeout",
    "config.cga_cluster_size",
    "config.max_ctas",
    "global_ranks_in_group",
    "group_name",
    "is_high_priority_stream",
)


# Gives all process groups of torch's first class streams of high priority.
HIGH_PRIORITY_VARIABLE = "TORCH_NCCL_HIGH_PRIORITY"


def nccl_class(group: dist.ProcessGroup) -> Untyped:
    """Return torch's class of communicators for messages beside a group: the group's own class.

    Raises:
        NotImplementedError: torch lacks a piece that this package uses, or the group has a property
            that this package does not follow; the text names it.
    """
    backend = _nccl_backend(group)
    name = NCCL_CLASS if backend is None else type(backend).__name__
    # A backend of another class, such as "nccl-lazy", makes its communicators of the second class.
    has_second = hasattr(dist, SECOND_NCCL_CLASS)
    found = getattr(dist, SECOND_NCCL_CLASS if has_second and name != NCCL_CLASS else NCCL_CLASS)
    _refuse_missing_pieces(found)
    if getattr(getattr(backend, "options", None), "enable_reconfigure", False) is True:
        raise NotImplementedError(
            "ring_attn does not follow a process group whose ranks may change, got a group with "
            "enable_reconfigure=True: pass a group without it"
        )
    return found


def _nccl_backend(group: dist.ProcessGroup) -> Untyped | None:
    """Return what carries the group's CUDA tensors; None if NCCL does not."""
    try:
        backend: Untyped = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # none for CUDA tensors
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    is_nccl = "nccl" in type(backend).__name__.lower() or "nccl" in backend.name()
    return backend if is_nccl else None


def _refuse_missing_pieces(found: Untyped) -> None:
    """Refuse a class of NCCL process groups without something that this package uses."""
    missing = [name for name in NCCL_METHODS if not hasattr(found, name)]
    if not missing:
        options = found.Options()
        missing = [f"Options.{name}" for name in NCCL_OPTIONS if not _has(options, name)]
    if found.__name__ not in (NCCL_CLASS, SECOND_NCCL_CLASS):
        missing.append("a constructor that ring_attn knows")
    if missing:
        raise NotImplementedError(
            f"torch {torch.__version__} has a class of NCCL process groups, {found.__name__}, "
            f"without {', '.join(missing)}: use an older torch, from 2.11"
        )


def _has(x: object, names: str) -> bool:
    """Return whether an object has an attribute, or one of an attribute: `"config.max_ctas"`."""
    for name in names.split("."):
        if not hasattr(x, name):
            return False
        x = getattr(x, name)
    return True


def num_high_priority_groups() -> int:
    """Return how many of this rank's process groups have an NCCL stream of high priority."""
    found = [_nccl_backend(group) for group in all_groups()]
    backends = [backend for backend in found if backend is not None]
    if os.environ.get(HIGH_PRIORITY_VARIABLE, "").lower() in ("1", "y", "yes", "t", "true"):
        return len(backends)
    options = [getattr(backend, "options", None) for backend in backends]
    return sum(getattr(one, "is_high_priority_stream", False) is True for one in options)


def connects_when_made(nccl: Untyped) -> bool:
    """Return whether communicators of a class are connected when they are made, on a device."""
    return bool(nccl.__name__ == SECOND_NCCL_CLASS)


def installed_nccl() -> tuple[int, ...] | None:
    """Return the version of torch's NCCL, such as (2, 28, 9); None if torch has none."""
    if not hasattr(torch._C, "_nccl_version"):  # a build for CPUs
        return None
    return torch.cuda.nccl.version()[:3]


def nccl_options(
    nccl: Untyped, name: str, seconds: float, max_ctas: int, global_ranks: Sequence[int]
) -> Untyped:
    """Return the options of an NCCL communicator that runs at the same time as attention kernels.

    Its stream has priority on free multiprocessors. Its blocks are few and not in clusters (NCCL's
    default on sm_90 is clusters of 4), so that they fit next to an attention kernel.

    Args:
        nccl: the communicator's class.
        name: name of the communicator.
        seconds: timeout.
        max_ctas: the largest number of thread blocks.
        global_ranks: the members, for torch's flight recorder and logs.
    """
    options = nccl.Options()
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
    """Start several operations together: messages as one NCCL group, where none waits for another.

    Each of `starts` is a method of the communicator and its arguments. Collectives must be in the
    same order on all ranks, as torch's second class starts them one after another. torch's flight
    recorder has an entry for each operation, and for the group if it has several operations.

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
    """Return the group of all ranks of a mesh with several axes; every rank must call this.

    Raises:
        RuntimeError: torch has made the group on another GPU than the world's.
    """
    world = dist.group.WORLD
    assert world is not None, "a mesh has a process group"
    # After init_process_group(device_id=...) torch would split the communicator of the world, and
    # wait for all ranks of the world, some of which may not make the new group.
    with _flattening:
        device = world.bound_device_id
        world.bound_device_id = None
        try:
            group = mesh._flatten().get_group()
        finally:
            world.bound_device_id = device
    # torch's second class connects a group when it is made: on a GPU that torch guesses here.
    guessed = group.bound_device_id
    if device is not None and guessed is not None and guessed != device:
        raise RuntimeError(
            f"torch {torch.__version__} has made the group of a mesh with several axes on "
            f"{guessed}, and this process uses {device}: set LOCAL_RANK to {device.index}, or pass "
            "a mesh with one axis"
        )
    return group


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
