"""Sum gradients over the ranks that share parameters.

Every rank of a ring has the whole model and some rows of each sequence. Its backward computes the
gradient of the loss of these rows, including the paths through other ranks' keys and values. The
gradient of the whole sequence is the sum over the ring, which `sync_gradients` computes.

If `fully_shard` or DDP spans the ring, it reduces the gradients, and this module is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

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
SUM_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


# More than 60 lines, most of them documentation.
def sync_gradients(
    module: nn.Module | Iterable[Tensor],
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    op: Literal["sum", "mean"] = "sum",
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replace each gradient of a module by its sum or mean over the ranks of a group.

    Call it on every rank, after the last backward of a step and before clipping and the optimizer.
    On NCCL it first compares the calls of ring_attn since the last time, as `check` does, on each
    group whose ranks are all in this one.
    Gradients are sent in the order of the parameters, packed into buckets of one dtype. The next
    bucket is packed while one is in flight.

    The right `op` depends on the loss that each rank differentiates:

        loss = losses.sum() / targets of the whole batch   "sum": for uneven shards, ignored labels
        loss = losses.mean() of the rank's rows            "mean": for equally many targets per rank

    Args:
        module: a module, or parameters of any shapes in the same order on every rank.
            float16 and bfloat16 gradients are summed in float32 and rounded once. Gradients of a
            tensor-parallel DTensor are summed shard by shard. If only some ranks have a gradient
            for a parameter, it counts as zero on the other ranks, which get the result too. A
            parameter that has no gradient on any rank keeps None.
        group: the ranks that share these parameters: a process group, one axis of a mesh such as
            `mesh["cp"]`, two axes such as `mesh["dp", "cp"]`, or None for the default group.
        op: "sum" or "mean".
        bucket_bytes: the maximum size of a message in bytes, unless a single gradient is larger.

    Raises:
        ValueError: `op` is unknown, `bucket_bytes` is not positive, or a DTensor is sharded over
            ranks of the group (FSDP or tensor parallelism then reduces its gradient).
        TypeError: `module` has elements that are not tensors, a gradient is not floating point, or
            `bucket_bytes` is not an int.
        NotImplementedError: a gradient is sparse.
        RuntimeError: there is no process group, or it cannot send tensors of the gradients' device;
            or the ranks made different calls of ring_attn, or a rank failed in a call.

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
    with gradient_sync(parameters[0].device):
        in_flight: _Bucket | None = None
        for bucket_parameters in _split(parameters, bucket_bytes):
            # The next bucket is packed and sent before the program waits for the one in flight.
            started = _Bucket(bucket_parameters, process_group)
            if in_flight is not None:
                in_flight.finish(factor)
            in_flight = started
        if in_flight is not None:
            in_flight.finish(factor)


class _Bucket:
    """Gradients as one `flat` tensor in an all-reduce.

    `flat` ends with one number for each parameter: how many ranks have a gradient for it.
    """

    @torch.no_grad()
    def __init__(self, parameters: list[Tensor], group: dist.ProcessGroup) -> None:
        first = _local(parameters[0])
        self.parameters = parameters
        self.sizes = [*(_local(x).numel() for x in parameters), len(parameters)]
        self.flat = first.new_zeros(sum(self.sizes), dtype=_sum_dtype(first))
        *parts, counts = self.flat.split(self.sizes)
        for i, (parameter, part) in enumerate(zip(parameters, parts, strict=True)):
            if parameter.grad is not None:
                part.copy_(_local(parameter.grad).reshape(-1))
                counts[i] = 1.0
        self.work: dist.Work = dist.all_reduce(self.flat, group=group, async_op=True)

    @torch.no_grad()
    def finish(self, factor: float) -> None:
        """Wait for the sums, and write them, multiplied by `factor`, to the gradients."""
        self.work.wait()
        *parts, counts = self.flat.split(self.sizes)
        # Reading the counts synchronises a GPU, so only ranks that need them read them.
        if any(parameter.grad is None for parameter in self.parameters):
            for parameter, count in zip(self.parameters, counts.tolist(), strict=True):
                if parameter.grad is None and count > 0:
                    parameter.grad = torch.zeros_like(parameter)
        for parameter, part in zip(self.parameters, parts, strict=True):
            if parameter.grad is None:
                continue
            grad = _local(parameter.grad)
            result = part if factor == 1.0 else part * factor
            grad.copy_(result.view_as(grad))


def _checked(module: nn.Module | Iterable[Tensor], group: dist.ProcessGroup) -> Iterator[Tensor]:
    """Yield the parameters that require gradients; refuse parameters that the group cannot sum."""
    named: Iterable[tuple[object, Tensor]] = (
        module.named_parameters() if isinstance(module, nn.Module) else enumerate(module)
    )
    other_ranks = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    for name, parameter in named:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"parameter {name} must be a tensor, got {type(parameter).__name__}")
        if not parameter.requires_grad:
            continue
        if not parameter.is_floating_point():
            raise TypeError(f"parameter {name} must be floating point, got {parameter.dtype}")
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise NotImplementedError(
                f"the gradient of parameter {name} must be dense, got {parameter.grad.layout}: "
                "make the embedding with sparse=False"
            )
        mesh = getattr(parameter, "device_mesh", None)  # of a DTensor
        mesh_ranks = [] if mesh is None else mesh.mesh.flatten().tolist()
        shared = sorted(other_ranks.intersection(mesh_ranks))
        if shared:
            raise ValueError(
                f"parameter {name} is a DTensor on a mesh that has ranks {shared} of the group: "
                "fully_shard or parallelize_module, which made the DTensor, reduces its gradient "
                "over these ranks; leave the parameter out, or pass only axes of the mesh on which "
                "it is not sharded"
            )
        groups.check_group_device(group, parameter.device)
        yield parameter


def _split(parameters: list[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Yield runs of parameters with one device and dtype, the same runs on every rank."""
    bucket: list[Tensor] = []
    bucket_kind: tuple[torch.device, torch.dtype] | None = None
    size = 0
    for parameter in parameters:
        local = _local(parameter)
        kind = (local.device, local.dtype)
        nbytes = local.numel() * _sum_dtype(local).itemsize
        if bucket and (kind != bucket_kind or size + nbytes > bucket_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        bucket_kind = kind
        size += nbytes
    if bucket:
        yield bucket


def _sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which gradients of x are summed."""
    return SUM_DTYPES.get(x.dtype, x.dtype)


def _local(x: Tensor) -> Tensor:
    """Return the local shard of a DTensor; other tensors as they are."""
    # No isinstance, so that DTensor's slow import is left to programs that use DTensors.
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()
