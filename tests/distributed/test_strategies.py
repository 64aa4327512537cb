"""ring_attention(strategy=) over gloo: names, meshes with two axes, autograd around the calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ring_attn import SequenceLayout, Strategy, ring_attention, unshard
from ring_attn.mask import Mask
from ring_attn.testing import (
    RESULTS_WITH_SINKS,
    Expected,
    check_all,
    dense_gradients,
    plain_gradients,
    poisoned_empty,
    random_qkv,
    random_sinks,
)

pytestmark = pytest.mark.dist

SEQLEN = 97
MASK = Mask(SEQLEN, SEQLEN, causal=True)

STRATEGIES: dict[str, str | Strategy] = {
    "ring": "ring",
    "all_gather": "all_gather",
    "all_gather of two heads": Strategy("all_gather", heads_per_chunk=2),
    "ulysses": "ulysses",
    "hybrid": Strategy(ulysses_degree=2),
    "double_ring": Strategy(inner_degree=2),
    "hybrid all_gather": Strategy("all_gather", ulysses_degree=2),
    "q_exchange": "q_exchange",
}


def shards(layout: SequenceLayout) -> tuple[list[Tensor], Tensor]:
    """This rank's q, k, v, with gradients, the sinks, and its dout."""
    rank = dist.get_rank()
    inputs = random_qkv(seqlen_q=SEQLEN, nheads=4, nheads_kv=2, headdim=16)
    *qkv, dout = (layout.shard(x, rank) for x in inputs)
    return [x.requires_grad_() for x in (*qkv, random_sinks(4))], dout


def attend(leaves: list[Tensor], layout: SequenceLayout, **options: Any) -> tuple[Tensor, Tensor]:
    *qkv, sinks = leaves
    with poisoned_empty():
        return ring_attention(
            *qkv, causal=True, sinks=sinks, layout=layout, return_lse=True, **options
        )


def results(layout: SequenceLayout, **options: Any) -> tuple[Tensor, ...]:
    """This rank's out, lse, dq, dk, dv, dsinks."""
    leaves, dout = shards(layout)
    out, lse = attend(leaves, layout, **options)
    return out.detach(), lse, *torch.autograd.grad(out, leaves, dout)


def layout_for(name: str) -> SequenceLayout:
    kind = "contiguous" if name == "q_exchange" else "zigzag"
    return SequenceLayout.from_name(kind, SEQLEN, dist.get_world_size())


def run_by_name(name: str) -> Expected:
    """The whole of it on every rank."""
    layout = layout_for(name)
    out, lse, dq, dk, dv, dsinks = results(layout, strategy=STRATEGIES[name])
    dist.all_reduce(dsinks)
    rows = (unshard(x, layout) for x in (dq, dk, dv))
    return Expected(unshard(out, layout), unshard(lse, layout, dim=2), *rows, dsinks)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_dense_attention(ranks: Any, one_thread: None, name: str) -> None:
    inputs = random_qkv(seqlen_q=SEQLEN, nheads=4, nheads_kv=2, headdim=16)
    oracle, plain = (
        f(*inputs, MASK, sinks=random_sinks(4)) for f in (dense_gradients, plain_gradients)
    )
    for got in ranks(4).run(run_by_name, name):
        verdicts = check_all(got, oracle, plain)
        assert len(verdicts) == len(RESULTS_WITH_SINKS)
        assert all(verdict.ok for verdict in verdicts), [str(v) for v in verdicts if not v.ok]


def run_on_a_mesh() -> dict[str, bool]:
    """Whether a mesh with two axes gives the bits of the strategy with the same degree."""
    layout = layout_for("ring")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "gpus"))
    same = {}
    for name, strategy in {
        "hybrid": Strategy(ulysses_degree=2),
        "double_ring": Strategy(inner_degree=2),
    }.items():
        expected = results(layout, strategy=strategy)
        got = results(layout, strategy=name, group=mesh)
        again = results(layout, strategy=strategy, group=mesh)
        same[name] = all(map(torch.equal, got, expected)) and all(map(torch.equal, again, expected))
    return same


def test_a_mesh_with_two_axes_gives_the_degree(ranks: Any) -> None:
    assert ranks(4).run(run_on_a_mesh) == [{"hybrid": True, "double_ring": True}] * 4


def run_checkpointed(name: str) -> bool:
    """Whether recomputed activations give the bits of kept ones, and no others are kept."""
    layout, strategy = layout_for(name), STRATEGIES[name]
    expected = results(layout, strategy=strategy)
    leaves, dout = shards(layout)

    def attention(*xs: Tensor) -> tuple[Tensor, Tensor]:
        return attend(list(xs), layout, strategy=strategy)

    out, _ = checkpoint(attention, *leaves, use_reentrant=False)
    return all(map(torch.equal, torch.autograd.grad(out, leaves, dout), expected[2:]))


def run_twice_differentiated(name: str) -> str:
    """What differentiating a gradient again says; dout is constant, so nothing else is in it."""
    layout = layout_for(name)
    leaves, dout = shards(layout)
    out, _ = attend(leaves, layout, strategy=STRATEGIES[name])
    grads = torch.autograd.grad(out, leaves, dout, create_graph=True)
    try:
        torch.autograd.grad(sum(x.sum() for x in grads), leaves)
    except NotImplementedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", ["all_gather", "ulysses", "hybrid", "q_exchange"])
def test_under_autograd(ranks: Any, name: str) -> None:
    assert ranks(4).run(run_checkpointed, name) == [True] * 4
    for text in ranks(4).run(run_twice_differentiated, name):
        assert "differentiable once" in text


def run_two_layers(name: str) -> list[bool]:
    """Whether calls that are under way at the same time leave each other's tensors alone."""
    layout, strategy = layout_for(name), STRATEGIES[name]
    expected = results(layout, strategy=strategy)
    made = []
    for _ in range(2):
        leaves, dout = shards(layout)
        made.append((attend(leaves, layout, strategy=strategy)[0], leaves, dout))
    same = []
    for out, leaves, dout in reversed(made):
        same.append(all(map(torch.equal, torch.autograd.grad(out, leaves, dout), expected[2:])))
    return same


@pytest.mark.parametrize("name", ["all_gather", "ulysses", "hybrid", "q_exchange"])
def test_two_layers_in_flight(ranks: Any, name: str) -> None:
    assert ranks(4).run(run_two_layers, name) == [[True, True]] * 4
