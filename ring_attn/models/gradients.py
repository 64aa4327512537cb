"""Sums gradients over the ranks that share parameters.

Every rank of a ring has the whole model and some rows of each sequence. Its backward computes the
gradient of its own rows' loss, including the paths through other ranks' keys and values. The
gradient of the whole sequence is the sum over the ring: `sync_gradients`.

If `fully_shard` or DDP spans the ring, they reduce the gradients, and this is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attn.profiling import gradient_sync
from ring_attn.transport import groups
from ring_attn.transport.p2p import check_within
from ring_attn.values.checks import check_int, check_one_of

BUCKET_BYTES = 32 << 20

# 16-bit gradients are summed in float32: gloo cannot add 16-bit numbers, and errors are smaller.
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def sync_gradients(
    module: nn.Module | Iterable[Tensor],
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    op: Literal["sum", "mean"] = "sum",
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replaces each gradient of a module by its sum or mean over the ranks of a group.

    Call it on every rank, between the last backward of a step and the clipping or the optimizer.
    On NCCL it first compares the calls of ring_attn since the last time, as `check` does, on each
    group whose ranks are all in this one.
    Gradients are sent in the order of the parameters, packed into buckets of one dtype; the next
    bucket is packed while one is in flight.

    The right `op` depends on the loss that each rank differentiates:

        loss = losses.sum() / targets of the whole batch     "sum": uneven shards, ignored labels
        loss = losses.mean() of the rank's own rows          "mean": as many targets on every rank

    Args:
        module: a module, or parameters of any shapes in the same order on every rank.
            float16 and bfloat16 gradients are summed in float32 and rounded once. Gradients of a
            tensor-parallel DTensor are summed shard by shard. If only some ranks have a gradient
            for a parameter, it counts as zero on the others, and they get the result too. A
            parameter without a gradient on any rank keeps none.
        group: the ranks that share these parameters: a process group, one axis of a mesh such as
            `mesh["cp"]`, two such as `mesh["dp", "cp"]`, or None for the default group.
        op: "sum" or "mean".
        bucket_bytes: most bytes of a message, unless a single gradient is larger.

    Raises:
        ValueError: `op` is unknown, `bucket_bytes` is not positive, or a DTensor is spread over
            ranks of the group (FSDP or tensor parallelism then reduces its gradient).
        TypeError: `module` has something other than tensors, a gradient is not floating point, or
            `bucket_bytes` is no int.
        NotImplementedError: a gradient is sparse.
        RuntimeError: there is no process group, or it cannot send the gradients' device; calls of
            ring_attn have differed, or a rank has failed in one.

    Example:
        >>> # a ring of one; under torchrun, init_process_group("gloo") is enough
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = nn.Linear(4, 2)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> sync_gradients(model)
        >>> model.bias.grad.tolist()
        [3.0, 3.0]
        >>> dist.destroy_process_group()
    """
    check_one_of("op", op, ("sum", "mean"))
    check_int("bucket_bytes", bucket_bytes, least=1)
    if isinstance(module, Tensor) or not isinstance(module, (nn.Module, Iterable)):
        raise TypeError(
            f"module must be a module or parameters in a list, got {type(module).__name__}"
        )
    process_group = groups.check_group(group)
    parameters = list(_checked(module, process_group))
    check_within(process_group)
    world_size = dist.get_world_size(process_group)
    if world_size == 1 or not parameters:
        return
    factor = 1.0 / world_size if op == "mean" else 1.0
    started: Iterator[Any] = (
        _Bucket(run, process_group) for run in _split(parameters, bucket_bytes)
    )
    with gradient_sync(parameters[0].device):
        # The next bucket is started before one is finished.
        for bucket, _ in pairwise(chain(started, [None])):
            bucket.finish(factor)


class _Bucket:
    """Gradients as one `flat` tensor in an all-reduce.

    `flat` ends with the number of ranks that have a gradient, for each parameter.
    """

    @torch.no_grad()
    def __init__(self, parameters: list[Tensor], group: dist.ProcessGroup) -> None:
        first = _local(parameters[0])
        self.parameters = parameters
        self.sizes = [*(_local(x).numel() for x in parameters), len(parameters)]
        self.flat = first.new_zeros(sum(self.sizes), dtype=WIDE.get(first.dtype, first.dtype))
        *parts, counts = self.flat.split(self.sizes)
        for i, (parameter, part) in enumerate(zip(parameters, parts, strict=True)):
            if parameter.grad is not None:
                part.copy_(_local(parameter.grad).reshape(-1))
                counts[i] = 1.0
        self.work: Any = dist.all_reduce(self.flat, group=group, async_op=True)

    @torch.no_grad()
    def finish(self, factor: float) -> None:
        self.work.wait()
        *parts, counts = self.flat.split(self.sizes)
        # Reading the counts synchronises a GPU, so only ranks that need them do.
        if any(parameter.grad is None for parameter in self.parameters):
            for parameter, count in zip(self.parameters, counts.tolist(), strict=True):
                if parameter.grad is None and count:
                    parameter.grad = torch.zeros_like(parameter)
        for parameter, part in zip(self.parameters, parts, strict=True):
            if parameter.grad is not None:
                grad = _local(parameter.grad)
                grad.copy_((part * factor if factor != 1.0 else part).view_as(grad))


def _checked(module: nn.Module | Iterable[Tensor], group: dist.ProcessGroup) -> Iterator[Tensor]:
    """The parameters that require gradients; refuses those that the group cannot sum."""
    named: Iterable[tuple[object, Tensor]] = (
        module.named_parameters() if isinstance(module, nn.Module) else enumerate(module)
    )
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    for name, parameter in named:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"parameter {name} must be a tensor, got {type(parameter).__name__}")
        if not parameter.requires_grad:
            continue
        if not parameter.is_floating_point():
            raise TypeError(f"parameter {name} must be floating point, got {parameter.dtype}")
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise NotImplementedError(
                f"the gradient of parameter {name} is {parameter.grad.layout}: only dense "
                "gradients are summed; make the embedding with sparse=False"
            )
        mesh = getattr(parameter, "device_mesh", None)  # of a DTensor
        shared = [] if mesh is None else sorted(others.intersection(mesh.mesh.flatten().tolist()))
        if shared:
            raise ValueError(
                f"parameter {name} is a DTensor on a mesh with ranks {shared} of the group: what "
                "spread it (fully_shard, parallelize_module) reduces its gradient over them; "
                "leave it out, or give the axes of the mesh that it is not on"
            )
        groups.check_group_device(group, parameter.device)
        yield parameter


def _split(parameters: list[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Runs of parameters of one device and dtype, the same on every rank."""
    bucket: list[Tensor] = []
    kind, size = None, 0
    for parameter in parameters:
        local = _local(parameter)
        nbytes = local.numel() * WIDE.get(local.dtype, local.dtype).itemsize
        if bucket and (kind != (local.device, local.dtype) or size + nbytes > bucket_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        kind, size = (local.device, local.dtype), size + nbytes
    if bucket:
        yield bucket


def _local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x
