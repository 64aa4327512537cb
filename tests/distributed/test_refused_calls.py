"""Calls that the table of bad arguments cannot hold: decoding, transforms of torch, lost groups."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

import ring_attn
from ring_attn import ring_attention, tree_decode, unshard
from tests.distributed.pool import on_ranks
from tests.distributed.test_bad_input import ROWS, SEQLEN, good, no_communication, x, zigzag
from tests.refusals import refused

pytestmark = pytest.mark.gloo  # nothing is sent


@on_ranks(2)
def test_scores_are_finite_at_their_bounds() -> None:
    torch.manual_seed(0)
    for scale, softcap in product((2.0**-63, 2.0**63), (0.0, 2.0**-63, 2.0**63)):
        tensors = {name: torch.randn_like(one).requires_grad_() for name, one in good().items()}
        options = {"softmax_scale": scale, "softcap": softcap, "backend": "reference"}
        out = ring_attention(**tensors, **options, causal=True)
        grads = torch.autograd.grad(out.sum(), [*tensors.values()])
        decoded = tree_decode(**{name: one.detach() for name, one in tensors.items()}, **options)
        assert all(bool(one.isfinite().all()) for one in (out, decoded, *grads))


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
        with no_communication(), level, refused(NotImplementedError, "not built"):
            call()


@on_ranks(2)
def test_functionalize_changes_nothing() -> None:
    tensors = good()
    tensors["v"] += 1.0
    out = torch.func.functionalize(lambda q: ring_attention(**{**tensors, "q": q}))(tensors["q"])
    assert float((out - 1.0).abs().max()) < 1e-6


@on_ranks(2)
def test_lost_groups_are_named() -> None:
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
    for call in calls:
        with no_communication(), refused(RuntimeError, "group was destroyed"):
            call()
    if dist.get_rank() == 1:
        for function in (ring_attention, tree_decode):
            with (
                no_communication(),
                refused(RuntimeError, "rank, 1, is not a member of group|[0]"),
            ):
                function(**good(), group=alone)


@on_ranks(2)
def test_capture_is_refused() -> None:
    """Refuses calls on tensors that report a GPU whose stream is being captured."""
    q, k, v = (one.requires_grad_() for one in good().values())
    layout = ring_attn.SequenceLayout.contiguous(2 * q.size(1), 2)
    backward = ring_attention(q, k, v).sum()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("ring_attention", lambda: ring_attention(**good())),
        ("ring_attention", lambda: ring_attention(**good(), strategy="auto")),
        ("tree_decode", lambda: tree_decode(**good())),
        ("tree_decode", lambda: tree_decode(**good(), window_size=(2, 0))),  # asks for lengths
        ("unshard", lambda: ring_attn.unshard(q.detach(), layout)),
        ("halo", lambda: ring_attn.halo(q, layout, 1, 1)),
        ("ring_attention", backward.backward),
    ]
    for name, call in calls:
        with (
            refused(NotImplementedError, f"{name} cannot be captured in a CUDA graph"),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
            mock.patch.object(Tensor, "is_cuda", True),
            no_communication(),
        ):
            call()
