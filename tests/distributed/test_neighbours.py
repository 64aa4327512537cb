"""Rows from neighbours: values, gradients, bytes and refusals, over gloo."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import conv1d, pad

from ring_attn import SequenceLayout, halo, roll, stats
from ring_attn.core.mask import Mask
from ring_attn.core.segments import Segment
from ring_attn.profiling import collect
from ring_attn.testing import LAYOUTS, layouts_of
from tests.bounds import same
from tests.cold import assert_compiles
from tests.distributed.pool import on_ranks


def layouts(seqlen: int, world_size: int) -> list[SequenceLayout]:
    named = [layouts_of(name, Mask(seqlen, seqlen), world_size)[0] for name in LAYOUTS]
    cuts = [*range(0, seqlen, 5), seqlen]
    parts: list[list[Segment]] = [[] for _ in range(world_size)]
    for number, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False)):
        parts[number * number % world_size].append(Segment(a, b - a))
    return [*named, SequenceLayout.from_segments(parts)]


def expected(x: Tensor, layout: SequenceLayout, rank: int, left: int, right: int) -> list[Tensor]:
    """Each run of a rank with its neighbouring rows, cut from the whole (batch, seqlen, ...)."""
    positions = layout.position_ids(rank)
    starts = [i for i in range(len(positions)) if i == 0 or positions[i] != positions[i - 1] + 1]
    if not len(positions):
        return [x.new_zeros(len(x), left + right, *x.shape[2:])]
    runs = positions.tensor_split(starts[1:])
    padded = pad(x.movedim(1, -1), (left, right)).movedim(-1, 1)
    return [padded[:, int(run[0]) : int(run[-1]) + 1 + left + right] for run in runs]


def compare(layout: SequenceLayout, left: int, right: int) -> None:
    """Asserts this rank's values and gradients, after all ranks have made all exchanges."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = torch.randn(2, layout.seqlen, 3, dtype=torch.float64, requires_grad=True)
    x = layout.shard(whole.detach(), rank).requires_grad_()
    runs = halo(x, layout, left, right)
    wanted = [expected(whole, layout, r, left, right) for r in range(layout.world_size)]
    # Whole numbers, whose sums are exact in any order.
    weights = [[torch.randn_like(run).round().requires_grad_() for run in of] for of in wanted]
    (dx,) = torch.autograd.grad(runs, x, weights[rank], create_graph=True)
    total = sum(
        (run * w.detach()).sum()
        for of in zip(wanted, weights, strict=True)
        for run, w in zip(*of, strict=True)
    )
    (dwhole,) = torch.autograd.grad(total, whole)
    # The derivative of the backward is the halo of its argument.
    back = torch.autograd.grad(dx, weights[rank], x)
    assert same(runs, wanted[rank]), layout
    assert torch.equal(dx, layout.shard(dwhole, rank))
    assert same(back, runs)


def rolled(whole: Tensor, shift: int, cuts: list[int], fill: float) -> Tensor:
    """(batch, seqlen, ...) with each document shifted by itself."""
    parts = []
    for document in whole.split([b - a for a, b in pairwise([*cuts, whole.size(1)])], 1):
        count = min(abs(shift), document.size(1))
        outside = torch.full_like(document[:, :count], fill)
        if shift > 0:
            parts += [outside, document[:, : document.size(1) - count]]
        else:
            parts += [document[:, count:], outside]
    return torch.cat(parts, 1)


def compare_rolled(layout: SequenceLayout, shift: int, cuts: list[int]) -> None:
    rank = dist.get_rank()
    torch.manual_seed(2)
    whole = torch.randn(2, 3, layout.seqlen, requires_grad=True)
    x = layout.shard(whole.detach(), rank, 2).requires_grad_()
    documents = torch.tensor(cuts, dtype=torch.int32) if len(cuts) > 1 else None
    got = roll(x, layout, shift, cu_seqlens=documents, fill=0.5, dim=2)
    want = rolled(whole.movedim(2, 1), shift, cuts, 0.5).movedim(1, 2)
    dout = torch.randn_like(want)
    got.backward(layout.shard(dout, rank, 2))
    (dx,) = torch.autograd.grad(want, whole, dout)
    assert torch.equal(got, layout.shard(want, rank, 2)), (layout, shift, cuts)
    assert torch.equal(x.grad, layout.shard(dx, rank, 2))


@on_ranks(2)
def test_roll_refuses_documents_beyond_the_layout() -> None:
    layout, group = SequenceLayout.zigzag(8, 2), dist.new_group()
    ids = layout.shard(torch.arange(8)[None], dist.get_rank())
    with pytest.raises(ValueError, match="8 rows, got 9"):
        roll(ids, layout, 1, cu_seqlens=torch.tensor([0, 9], dtype=torch.int32), group=group)


@on_ranks(3)
def test_other_shapes() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.zigzag(24, world_size)
    ids = torch.arange(24) * 3
    runs = halo(layout.shard(ids, rank, 0), layout, 1, 2, dim=0)
    for got, want in zip(runs, expected(ids[None], layout, rank, 1, 2), strict=True):
        assert torch.equal(got, want[0]) and got.dtype == torch.int64
    image = torch.randn(2, 4, 24, 5).to(torch.bfloat16)
    dist.broadcast(image, 0)
    runs = halo(layout.shard(image, rank, 2), layout, 2, dim=2)
    for got, want in zip(runs, expected(image.movedim(2, 1), layout, rank, 2, 0), strict=True):
        assert torch.equal(got, want.movedim(1, 2))
    for left in (0, 2):
        with collect():
            halo(layout.shard(image, rank, 2), layout, left, dim=2)
        # Chunks 0 5, 1 4, 2 3: the ends of 0, of 1 and 4, and of 3 lie before chunks of others.
        assert stats().forward.bytes_sent == ((1, 2, 1)[rank] * 160 if left else 0)


@on_ranks(2)
def test_convolution() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.zigzag(37, world_size)
    torch.manual_seed(1)
    whole = torch.randn(2, 37, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 1, 4, dtype=torch.float64, requires_grad=True)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        runs = halo(x, layout, left=3)
        return torch.cat([conv1d(run.mT, weight, groups=4).mT for run in runs], 1)

    x = layout.shard(whole.detach(), rank).requires_grad_()
    assert_compiles(layer, [(x, weight)], "aot_eager", fullgraph=True)
    out = layer(x, weight)
    dense = conv1d(pad(whole.mT, (3, 0)), weight, groups=4).mT
    torch.testing.assert_close(out, layout.shard(dense, rank))
    dout = torch.randn_like(dense)
    out.backward(layout.shard(dout, rank))
    dx, dw = torch.autograd.grad(dense, (whole, weight), dout)
    dist.all_reduce(weight.grad)
    torch.testing.assert_close(x.grad, layout.shard(dx, rank))
    torch.testing.assert_close(weight.grad, dw)


@pytest.mark.gloo
@on_ranks(2)
def test_other_rows_on_another_rank_are_named() -> None:
    layout = SequenceLayout.contiguous(8, 2)
    with pytest.raises(RuntimeError, match="left"):
        halo(torch.zeros(1, 4), layout, 1 + dist.get_rank(), group=dist.new_group())
