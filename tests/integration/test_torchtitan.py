"""docs/training.md's change to torchtitan gives one process's loss and gradients.

Runs where torchtitan 0.3 is installed: its wheel needs packages that none of our extras asks for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import ring_attn
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close, named
from tests.distributed.pool import Pools

SEQLEN, VOCAB = 48, 2048  # torch's cut needs a multiple of twice the ranks


def made() -> Any:
    """torchtitan's debug model, by its attention without a mask: causal over the whole row."""
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = llama3._debugmodel("flex")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=None)
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(VOCAB, (2, SEQLEN + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:], torch.arange(SEQLEN).expand(2, SEQLEN)


def results(model: Any, ids: Tensor, labels: Tensor, positions: Tensor) -> dict[str, Tensor]:
    loss = cross_entropy(model(ids, positions).mT, labels, reduction="sum") / (2 * SEQLEN)
    loss.backward()
    ring_attn.sync_gradients(model) if dist.is_initialized() else None
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def on_split() -> dict[str, Tensor]:
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]
    model = made()
    style = ring_attn.ContextParallel(layout="zigzag", inside="local")
    ring_attn.parallelize(model, mesh, {"layers.*.attention.inner_attention": style})
    ids, labels, positions = batch()
    given: dict[str, Any] = {"positions": positions}
    cpu = torch.device("cpu")
    ids, labels, given = prepare_context_parallel_input(ids, labels, given, mesh, cpu, "headtail")
    assert ids.size(1) == SEQLEN // mesh.size()
    found = results(model, ids, labels, given["positions"])
    dist.all_reduce(found["loss"])
    return found


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_torchtitan_trains_as_in_one_process(ranks: Pools, world_size: int) -> None:
    pytest.importorskip("torchtitan")
    oracle = results(made().double(), *batch())
    noisy = noisy_runs(lambda: results(made(), *batch()))
    for got in ranks(world_size).run(on_split):
        assert got.keys() == oracle.keys() and len(oracle) > 10
        for name, x in got.items():
            assert_close(name, x, oracle[name], named(noisy, name))
