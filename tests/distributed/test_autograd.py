"""ring_attention under autograd on real ranks, for every strategy; and unshard."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from ring_attn import ring_attention, tree_decode, unshard
from ring_attn.core.mask import Mask
from ring_attn.testing import HEADS, LAYOUTS, Case, Heads, Inputs, layouts_of
from ring_attn.testing.ranks import arguments_of
from tests.bounds import same
from tests.distributed.pool import on_ranks
from tests.distributed.test_bad_input import good, no_communication
from tests.refusals import refused


def _ring(name: str, heads: Heads = HEADS["gqa"]) -> tuple[Callable[..., Any], Inputs]:
    layout = "contiguous" if name == "q_exchange" else "zigzag"
    case = Case("causal", layout, name, heads=heads, batch=1)
    (q, k, v, dout), options = arguments_of(case, dist.get_world_size(), dist.get_rank())
    shards = Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)
    return partial(ring_attention, **options), shards


def calls_in_flight(name: str) -> None:
    (ring, a), (_, b) = _ring(name), _ring(name, Heads(4, 1, 16, 16))
    alone = [torch.autograd.grad(ring(*x[:3]), x[:3], x.dout) for x in (a, b)]
    for order in ((0, 1), (1, 0)):
        outs = [ring(*x[:3]) for x in (a, b)]
        for i in order:
            shards = (a, b)[i]
            assert same(alone[i], torch.autograd.grad(outs[i], shards[:3], shards.dout)), order


def double_backward_is_refused(name: str) -> None:
    """Refused if dout is a constant, depends on the inputs, or is a leaf with a gradient."""
    ring, (q, k, v, dout) = _ring(name)
    sinks = torch.zeros(q.size(2), requires_grad=True)
    for wrt in (q, k, v, sinks):
        for seed in (torch.ones_like(dout), q.square(), dout.clone().requires_grad_()):
            out = ring(q, k, v, sinks=sinks)
            (grad,) = torch.autograd.grad(out, wrt, seed, create_graph=True)
            assert grad.requires_grad
            with pytest.raises(NotImplementedError, match="differentiable once"):
                grad.sum().backward()
    # `create_graph=True` without a second backward changes nothing.
    (kept,) = torch.autograd.grad(ring(q, k, v), q, dout, create_graph=True)
    (usual,) = torch.autograd.grad(ring(q, k, v), q, dout)
    assert torch.equal(kept, usual) and not usual.requires_grad


def lse_takes_no_gradient(name: str) -> None:
    ring, (q, k, v, dout) = _ring(name)
    out, lse = ring(q, k, v, return_lse=True)
    assert not lse.requires_grad
    assert lse.dtype == torch.float32 and lse.shape == (1, 4, q.size(1))
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert same(grads, torch.autograd.grad(ring(q, k, v), (q, k, v), dout))


def sinks_keep_their_dtype(name: str) -> None:
    ring, (q, k, v, dout) = _ring(name)
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        sinks = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=dtype, requires_grad=True)
        *grads, dsinks = torch.autograd.grad(ring(q, k, v, sinks=sinks), (q, k, v, sinks), dout)
        assert dsinks.dtype == dtype
        found.append([*grads, dsinks.to(torch.bfloat16)])
    assert same(found[0], found[1]) and same(found[0], found[2])


def some_inputs_without_gradient(name: str) -> None:
    ring, (q, k, v, dout) = _ring(name)
    usual = torch.autograd.grad(ring(q, k, v), (q, k, v), dout)
    for chosen in range(8):
        leaves = [x.detach().requires_grad_(bool(chosen >> i & 1)) for i, x in enumerate((q, k, v))]
        out = ring(*leaves)
        assert out.requires_grad == bool(chosen)
        if chosen:
            out.backward(dout)
        for leaf, grad in zip(leaves, usual, strict=True):
            assert (leaf.grad is not None) == leaf.requires_grad
            assert leaf.grad is None or torch.equal(leaf.grad, grad)
    with torch.no_grad():
        assert not ring(q, k, v).requires_grad
    with torch.inference_mode():
        assert torch.equal(ring(q, k, v), ring(q.detach(), k.detach(), v.detach()))


def graphs_that_are_kept(name: str) -> None:
    """A second backward has the same bits; a dout with stride 0, from a sum, those of ones."""
    ring, (q, k, v, dout) = _ring(name)
    out = ring(q, k, v)
    ones = torch.ones_like(dout)
    first, again, summed, filled = (
        torch.autograd.grad(of, (q, k, v), seed, retain_graph=True)
        for of, seed in ((out, dout), (out, dout), (out.sum(), None), (out, ones))
    )
    assert same(first, again) and same(summed, filled)


def the_ring_has_its_own_groups(name: str) -> None:
    ring, (q, k, v, _) = _ring(name)
    usual = ring(q, k, v)
    x = torch.full((1000,), float(dist.get_rank() + 1))
    work = dist.all_reduce(x, async_op=True)
    assert torch.equal(usual, ring(q, k, v))
    work.wait()
    total = dist.get_world_size() * (dist.get_world_size() + 1) // 2
    assert bool((x == total).all())


def check_all(name: str) -> None:
    calls_in_flight(name)
    double_backward_is_refused(name)
    lse_takes_no_gradient(name)
    sinks_keep_their_dtype(name)
    some_inputs_without_gradient(name)
    graphs_that_are_kept(name)
    if name == "ring":
        the_ring_has_its_own_groups(name)


@pytest.mark.parametrize(
    ("name", "world_size"), [("ring", 3), ("hybrid", 4), ("all_gather", 2), ("q_exchange", 4)]
)
@pytest.mark.queued
@pytest.mark.sweep(4)
def test_autograd(ranks: Any, name: str, world_size: int) -> None:
    ranks(world_size).run(check_all, name)


def unshard_round_trips() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    for kind, seqlen, dim in product(LAYOUTS, (1, 2, 113), (0, 1, -1)):
        layout = layouts_of(kind, Mask(seqlen, seqlen), world_size)[1]
        x = torch.randn(2, 3, seqlen, requires_grad=True).movedim(-1, dim)
        for whole in (x, x.bfloat16(), (8 * x).long(), x > 0):
            got = unshard(layout.shard(whole, rank, dim), layout, dim=dim)
            assert torch.equal(got, whole) and not got.requires_grad, (kind, seqlen, dim)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_unshard(ranks: Any, world_size: int) -> None:
    ranks(world_size).run(unshard_round_trips)


@on_ranks(2)
def test_transforms_are_refused() -> None:
    q, k, v = good().values()
    attend, decode = partial(ring_attention, k=k, v=v), partial(tree_decode, k=k, v=v)

    def loss(q: Tensor) -> Tensor:
        return attend(q).sum()

    leaf = q.clone().requires_grad_()
    out = attend(leaf)
    ones = torch.ones_like(out)

    def grad(dout: Tensor, **options: bool) -> Tensor:
        return torch.autograd.grad(out, leaf, dout, retain_graph=True, **options)[0]

    many = torch.stack([q, q])
    calls: list[Callable[[], object]] = [
        lambda: torch.func.jvp(attend, (q,), (q,)),
        lambda: torch.func.jvp(decode, (q,), (q,)),
        lambda: torch.func.jacfwd(attend)(q),
        lambda: torch.func.grad(loss)(q),
        lambda: torch.func.vjp(attend, q),
        lambda: torch.func.hessian(loss)(q),
        lambda: torch.vmap(attend)(many),
        lambda: torch.vmap(decode)(many),
        lambda: grad(forward_ad.make_dual(ones, ones)),
        lambda: grad(torch.stack([ones, ones]), is_grads_batched=True),
    ]
    for call in calls:
        level = forward_ad.dual_level() if call in calls[-2:] else nullcontext()
        with no_communication(), level, refused(NotImplementedError, "not supported"):
            call()
