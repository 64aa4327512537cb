"""`sync_gradients`: over groups and axes of a mesh, in buckets, with gradients missing."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ring_attn import sync_gradients
from tests.distributed.pool import on_ranks
from tests.refusals import refused

pytestmark = pytest.mark.gloo  # torch's own collectives

SHAPES = [(3, 5), (7,), (), (0, 4), (2, 2, 2)]


def gradient(rank: int, index: int, dtype: torch.dtype) -> Tensor:
    """A gradient that differs by rank and parameter; sums are exact in any order."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randint(-8, 9, SHAPES[index], generator=generator).to(dtype)


def parameters_of(rank: int, dtype: torch.dtype) -> list[Tensor]:
    parameters = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in SHAPES]
    for index, parameter in enumerate(parameters):
        parameter.grad = gradient(rank, index, dtype)
    return parameters


@on_ranks(3)
def test_over_the_default_group() -> None:
    sums = product((torch.float32, torch.bfloat16), ("sum",), (1, 64, 1 << 20))
    for dtype, op, bucket_bytes in (*sums, (torch.float64, "mean", 64)):
        parameters = parameters_of(dist.get_rank(), dtype)
        sync_gradients(parameters, op=op, bucket_bytes=bucket_bytes)
        for index, got in enumerate(parameter.grad for parameter in parameters):
            whole = sum(gradient(rank, index, torch.float64) for rank in range(3))
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), whole / 3 if op == "mean" else whole)
    # In bfloat16, whose values there are 2 apart, the sum is 258 only if it is taken in float32.
    parameter = torch.zeros((), dtype=torch.bfloat16, requires_grad=True)
    parameter.grad = torch.tensor((256.0, 1.0, 1.0)[dist.get_rank()], dtype=torch.bfloat16)
    sync_gradients([parameter])
    assert parameter.grad.item() == 258.0


@on_ranks(3)
def test_gradients_that_not_all_ranks_have() -> None:
    """Rank 1 alone uses the first layer; nobody uses the second."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    model[2].requires_grad_(False)
    model.mixed = nn.Parameter(torch.ones(3, dtype=torch.float64))
    loss = model.mixed.sum()
    if dist.get_rank() == 1:
        loss = loss + model[0](torch.ones(2)).sum()
    loss.backward()
    sync_gradients(model)
    assert torch.equal(model[0].weight.grad, torch.ones(2, 2))
    assert model[1].weight.grad is None and model[2].weight.grad is None
    assert torch.equal(model.mixed.grad, torch.full((3,), 3.0, dtype=torch.float64))


@on_ranks(4)
def test_axes_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp, dp = (11.0, 11.0, 1100.0, 1100.0), (101.0, 1010.0, 101.0, 1010.0)
    for axes, sums in (("cp", cp), ("dp", dp), (("dp", "cp"), (1111.0,) * 4)):
        parameter = torch.zeros((), requires_grad=True)
        parameter.grad = torch.tensor(10.0 ** dist.get_rank())
        sync_gradients([parameter], mesh[axes])
        assert parameter.grad.item() == sums[dist.get_rank()]


@on_ranks(4)
def test_shards_of_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    rank, whole = dist.get_rank(), torch.zeros(4, 3)
    parameter = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    parameter.grad = DTensor.from_local(torch.full((2, 3), 1.0 + rank), mesh["tp"], [Shard(0)])
    sync_gradients([parameter], mesh["cp"])
    # Ranks 0 and 2 have the upper half, ranks 1 and 3 the lower half.
    halves = torch.tensor([4.0, 6.0]).repeat_interleave(2)[:, None]
    assert torch.equal(parameter.grad.full_tensor(), halves.expand(4, 3))
    replicated = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Replicate()]))
    said = f"parameter 0 is a DTensor on a mesh that has ranks [{rank ^ 1}] of the group"
    for wrong in (parameter, replicated):
        with refused(ValueError, said):
            sync_gradients([wrong], mesh["tp"])


@on_ranks(3)
def test_refusals() -> None:
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    complex_one = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
    for module, options, error, words in (
        ([], {"op": "max"}, ValueError, "op must|'max'"),
        ([], {"bucket_bytes": 0}, ValueError, "bucket_bytes must|got 0"),
        ([], {"bucket_bytes": "x"}, TypeError, "bucket_bytes must|'x'"),
        ([complex_one], {}, TypeError, "parameter 0 must|torch.complex64"),
        (sparse, {}, NotImplementedError, "parameter weight must be dense, got torch.sparse_coo"),
    ):
        with refused(error, words):
            sync_gradients(module, **options)  # type: ignore[arg-type]
