"""Calls that the table of bad arguments cannot hold: decoding, transforms of torch, lost groups."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

import ring_attn
from ring_attn import ring_attention, tree_decode, unshard
from tests.distributed.pool import Ended, ended
from tests.distributed.test_bad_input import ROWS, SEQLEN, good, no_communication, x, zigzag


def run_extreme_scores() -> list[bool]:
    """Whether results and gradients are finite at the bounds of softmax_scale and softcap."""
    torch.manual_seed(0)
    finite = []
    for scale, softcap in product((2.0**-63, 2.0**63), (0.0, 2.0**-63, 2.0**63)):
        tensors = {name: torch.randn_like(one).requires_grad_() for name, one in good().items()}
        options = {"softmax_scale": scale, "softcap": softcap, "backend": "reference"}
        out = ring_attention(**tensors, **options, causal=True)
        grads = torch.autograd.grad(out.sum(), [*tensors.values()])
        decoded = tree_decode(**{name: one.detach() for name, one in tensors.items()}, **options)
        finite += [bool(one.isfinite().all()) for one in (out, decoded, *grads)]
    return finite


def test_scores_are_finite_at_their_bounds(ranks: Any) -> None:
    assert all(all(finite) for finite in ranks(2).run(run_extreme_scores))


def run_transforms() -> list[Ended]:
    """Transforms of torch.func and forward-mode differentiation, which the operators have not."""
    tensors = good()

    def attend(q: Tensor) -> Tensor:
        return ring_attention(**{**tensors, "q": q})

    def decode(q: Tensor) -> Tensor:
        return tree_decode(**{**tensors, "q": q})

    def loss(q: Tensor) -> Tensor:
        return attend(q).sum()

    q = tensors["q"]
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
    ]
    with no_communication():
        return [ended(call) for call in calls]


def run_transforms_of_backward() -> list[Ended]:
    """The same of the gradient that a backward is given."""
    q = good()["q"].requires_grad_()
    out = ring_attention(**{**good(), "q": q})
    ones = torch.ones_like(out)

    def grad(dout: Tensor, **options: bool) -> Tensor:
        return torch.autograd.grad(out, q, dout, retain_graph=True, **options)[0]

    with no_communication(), forward_ad.dual_level():
        return [
            ended(lambda: grad(forward_ad.make_dual(ones, ones))),
            ended(lambda: grad(torch.stack([ones, ones]), is_grads_batched=True)),
        ]


@pytest.mark.parametrize("run", [run_transforms, run_transforms_of_backward])
def test_transforms_are_refused(ranks: Any, run: Callable[[], list[Ended]]) -> None:
    for results in ranks(2).run(run):
        for got in results:
            assert got.error is NotImplementedError, got
            assert "is not built" in got.text or "are not built" in got.text, got


def run_functionalized() -> float:
    """What functionalize changes in the result."""
    tensors = good()
    tensors["v"] += 1.0
    out = torch.func.functionalize(lambda q: ring_attention(**{**tensors, "q": q}))(tensors["q"])
    return float((out - 1.0).abs().max())


def test_functionalize_changes_nothing(ranks: Any) -> None:
    assert max(ranks(2).run(run_functionalized)) < 1e-6


def run_lost_groups() -> list[Ended]:
    """A group that was destroyed, and on rank 1 a mesh that this rank is not in."""
    group = dist.new_group([0, 1])
    dist.barrier()  # the other rank may still connect
    dist.destroy_process_group(group)
    alone = DeviceMesh("cpu", [0])
    layout = zigzag(SEQLEN)
    calls: list[Callable[[], object]] = [
        lambda: ring_attention(**good(), group=group),
        lambda: tree_decode(**good(), group=group),
        lambda: unshard(x(1, ROWS, 4), layout, group=group),
        lambda: ring_attn.sync_gradients([x(3).requires_grad_()], group),
    ]
    if dist.get_rank() == 1:
        calls += [
            lambda: ring_attention(**good(), group=alone),
            lambda: tree_decode(**good(), group=alone),
        ]
    with no_communication():
        return [ended(call) for call in calls]


def test_lost_groups_are_named(ranks: Any) -> None:
    first, second = ranks(2).run(run_lost_groups)
    for got in (*first, *second[:4]):
        assert got.error is RuntimeError and "group was destroyed" in got.text, got
    for got in second[4:]:
        assert got.error is RuntimeError, got
        assert "rank, 1, is not a member of group" in got.text and "[0]" in got.text, got


def run_captured() -> list[Ended]:
    """Calls on tensors that say they are on a GPU, whose stream is captured."""
    q, k, v = (one.requires_grad_() for one in good().values())
    layout = ring_attn.SequenceLayout.contiguous(2 * q.size(1), 2)
    backward = ring_attention(q, k, v).sum()
    calls: list[Callable[[], object]] = [
        lambda: ring_attention(**good()),
        lambda: ring_attention(**good(), strategy="auto"),
        lambda: tree_decode(**good()),
        lambda: tree_decode(**good(), window_size=(2, 0)),  # asks for lengths
        lambda: ring_attn.unshard(q.detach(), layout),
        lambda: ring_attn.halo(q, layout, 1, 1),
        backward.backward,
    ]
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
        mock.patch.object(Tensor, "is_cuda", True),
        no_communication(),
    ):
        return [ended(call) for call in calls]


def test_capture_is_refused(ranks: Any) -> None:
    for calls in ranks(2).run(run_captured):
        names = 2 * ["ring_attention"] + 2 * ["tree_decode"]
        names += ["unshard", "halo", "ring_attention"]
        for name, got in zip(names, calls, strict=True):
            assert got.error is NotImplementedError, got
            assert f"{name} cannot be captured in a CUDA graph" in got.text, got
