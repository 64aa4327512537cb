"""Calls a function with flash-attn's shapes and results on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.testing import Case, RankResult, Sent, poisoned_empty


def packed(form: str, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The tensors as a function takes them whose name has `form`, such as "varlen_kvpacked_"."""
    if "qkvpacked" in form:
        return [torch.stack((q, k, v), -3)]
    return [q, torch.stack((k, v), -3)] if "kvpacked" in form else [q, k, v]


def shards_of(case: Case, world_size: int) -> list[Tensor]:
    """This rank's q, k, v and dout, without a batch dim if they are packed."""
    of_q, of_k = case.build_layouts(world_size)
    sides = zip(case.build_inputs(), (of_q, of_k, of_k, of_q), strict=True)
    shards = [layout.shard(x, dist.get_rank()) for x, layout in sides]
    return [x[0] for x in shards] if case.packed else shards


def adapter_result(
    case: Case, world_size: int, form: str, call: Callable[[list[Tensor], bool], Any]
) -> RankResult:
    """The results of `call(tensors, return_attn_probs)`, and their gradients."""
    *leaves, dout = shards_of(case, world_size)
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    tensors = packed(form, *leaves)
    with poisoned_empty():
        out, lse, nothing = call(tensors, True)
        assert nothing is None
        alone = call(tensors, False)
        assert isinstance(alone, Tensor) and alone.equal(out)
        grads = torch.autograd.grad(out, leaves, dout)
    found = (out.detach(), lse, *grads)
    tensors = [x[None] for x in found] if case.packed else [*found]
    return RankResult(tuple(tensors), (Sent(0, 0), Sent(0, 0)))
