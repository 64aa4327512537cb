"""Ring attention between projections that are cut by heads: a block on a (cp 2, tp 2) mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ring_attn import SequenceLayout, ring_attention
from ring_attn.models.tensor_parallel import (
    TensorParallelConfig,
    load_tp_state_dict,
    unshard_state_dict,
)
from ring_attn.tools.model import Layer, ModelConfig, dense_attention, rope_rotation
from tests.bounds import assert_close
from tests.distributed.pool import Pools

SEQLEN = 37
LAYOUT = SequenceLayout.zigzag(SEQLEN, 2)


def model_config(kv_heads: int) -> ModelConfig:
    """Six heads, and an intermediate size that two ranks cannot share evenly."""
    return ModelConfig(dim=48, num_layers=1, nheads=6, nheads_kv=kv_heads, hidden_dim=51)


def tp_config(kv_heads: int, rank: int) -> TensorParallelConfig:
    model = model_config(kv_heads)
    sizes = model.dim, model.hidden_dim, model.nheads, model.nheads_kv
    return TensorParallelConfig(rank, 2, *sizes)


def block(kv_heads: int) -> Layer:
    torch.manual_seed(0)
    return Layer(model_config(kv_heads))


def inputs() -> tuple[Tensor, Tensor]:
    """x and dout of the whole sequence."""
    generator = torch.Generator().manual_seed(1)
    x, dout = torch.randn(2, 2, SEQLEN, 48, generator=generator)
    return x, dout


class Enter(torch.autograd.Function):
    """Into the tensor-parallel part: the gradients of all ranks are summed on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """Out of it: what the ranks have is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def run_block(folder: str, kv_heads: int) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's rows of the block's output, and its gradients with what is owed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = mesh.get_group("cp"), mesh.get_group("tp")
    rank, config = dist.get_rank(cp), tp_config(kv_heads, dist.get_rank(tp))
    layer = block(kv_heads)
    for name, shard in load_tp_state_dict(folder, config, otherwise="replicated").items():
        module, _, leaf = name.rpartition(".")
        setattr(layer.get_submodule(module), leaf, nn.Parameter(shard))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert (q.size(2), k.size(2)) == (config.local_heads, config.local_kv_heads)
        return ring_attention(q, k, v, causal=True, layout=LAYOUT, group=mesh["cp"])

    x, dout = (LAYOUT.shard(y, rank) for y in inputs())
    rotation = rope_rotation(LAYOUT.position_ids(rank)[None], model_config(kv_heads), x.dtype)
    y = Enter.apply(layer.input_layernorm(x), tp)
    x = x + Leave.apply(layer.self_attn(y, rotation, attention), tp)
    y = Enter.apply(layer.post_attention_layernorm(x), tp)
    out = x + Leave.apply(layer.mlp(y), tp)
    out.backward(dout)

    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=cp)
        rows = config.replicated_outputs("k")
        if name.endswith(("k_proj.weight", "v_proj.weight")) and rows.stop:
            assert config.kv_replica_ranks == (0, 1)  # the whole axis
            dist.all_reduce(parameter.grad[rows], group=tp)
    return out.detach(), {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_block_on_a_cp_and_tp_mesh(ranks: Pools, kv_heads: int, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    layer = block(kv_heads)
    save_file(layer.state_dict(), tmp_path / "model.safetensors")
    results = ranks(4).run(run_block, str(tmp_path), kv_heads)

    def whole(layer: Layer, x: Tensor, dout: Tensor) -> dict[str, Tensor]:
        rotation = rope_rotation(torch.arange(SEQLEN)[None], model_config(kv_heads), x.dtype)
        out = layer(x, rotation, dense_attention)
        out.backward(dout)
        found = {name: p.grad for name, p in layer.named_parameters()}
        layer.zero_grad()
        return {"out": out.detach(), **found}

    plain = whole(layer, *inputs())
    oracle = whole(layer.double(), *(y.double() for y in inputs()))
    for tp in range(2):  # rank 2 * cp + tp
        out = LAYOUT.unshard([results[2 * cp + tp][0] for cp in range(2)])
        assert_close("out", out, oracle["out"], plain["out"])
    for cp in range(2):
        grads = [results[2 * cp + tp][1] for tp in range(2)]
        got = unshard_state_dict(grads, tp_config(kv_heads, 0), otherwise="replicated")
        assert len(got) == len(oracle) - 1
        for name, x in got.items():
            assert_close(name, x, oracle[name], plain[name])
