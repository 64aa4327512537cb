"""Ring attention between projections that are cut by heads: a block in two parts, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn import SequenceLayout, ring_attention
from ring_attn.models.tensor_parallel import (
    TensorParallelConfig,
    load_tp_state_dict,
    unshard_state_dict,
)
from ring_attn.tools.model import Layer, ModelConfig, dense_attention, rope_rotation
from tests.bounds import assert_close
from tests.distributed.pool import Pools

pytestmark = pytest.mark.gloo  # code around calls; others run calls on streams

SEQLEN = 37
LAYOUT = SequenceLayout.zigzag(SEQLEN, 2)


def model_config(kv_heads: int) -> ModelConfig:
    """Six heads, and an intermediate size that two ranks cannot share evenly."""
    return ModelConfig(dim=48, num_layers=1, nheads=6, nheads_kv=kv_heads, hidden_dim=51)


def block(kv_heads: int) -> Layer:
    torch.manual_seed(0)
    return Layer(model_config(kv_heads))


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dout = torch.randn(2, 2, SEQLEN, 48, generator=generator)
    return x, dout


def run_block(folder: str, kv_heads: int) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's rows of the block's output, and the whole gradients.

    Both parts of the block are in one process, where sums of their outputs replace all-reduces.
    """
    rank = dist.get_rank()
    configs = [TensorParallelConfig(part, 2, 48, 51, 6, kv_heads) for part in range(2)]
    one, other = parts = [block(kv_heads) for _ in configs]
    for part, config in zip(parts, configs, strict=True):
        for name, shard in load_tp_state_dict(folder, config, otherwise="replicated").items():
            module, _, leaf = name.rpartition(".")
            setattr(part.get_submodule(module), leaf, nn.Parameter(shard))
    other.input_layernorm = one.input_layernorm
    other.post_attention_layernorm = one.post_attention_layernorm

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert (q.size(2), k.size(2)) == (configs[0].local_heads, configs[0].local_kv_heads)
        return ring_attention(q, k, v, causal=True, layout=LAYOUT)

    x, dout = (LAYOUT.shard(y, rank) for y in inputs())
    rotation = rope_rotation(LAYOUT.position_ids(rank)[None], model_config(kv_heads), x.dtype)
    y = one.input_layernorm(x)
    x = x + one.self_attn(y, rotation, attention) + other.self_attn(y, rotation, attention)
    y = one.post_attention_layernorm(x)
    out = x + one.mlp(y) + other.mlp(y)
    out.backward(dout)

    grads = [{name: p.grad for name, p in part.named_parameters()} for part in parts]
    for name, grad in grads[0].items():
        rows = configs[0].replicated_outputs("k")
        if name.endswith(("k_proj.weight", "v_proj.weight")) and rows.stop:
            assert configs[0].kv_replica_ranks == (0, 1)  # all parts
            grad[rows] = grads[1][name][rows] = grad[rows] + grads[1][name][rows]
    whole = unshard_state_dict(grads, configs[0], otherwise="replicated")
    for grad in whole.values():
        dist.all_reduce(grad)
    return out.detach(), whole


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_block_of_two_parts_on_two_ranks(ranks: Pools, kv_heads: int, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    layer = block(kv_heads)
    save_file(layer.state_dict(), tmp_path / "model.safetensors")
    results = ranks(2).run(run_block, str(tmp_path), kv_heads)

    def whole(layer: Layer, x: Tensor, dout: Tensor) -> dict[str, Tensor]:
        rotation = rope_rotation(torch.arange(SEQLEN)[None], model_config(kv_heads), x.dtype)
        out = layer(x, rotation, dense_attention)
        out.backward(dout)
        found = {name: p.grad for name, p in layer.named_parameters()}
        layer.zero_grad()
        return {"out": out.detach(), **found}

    plain = whole(layer, *inputs())
    oracle = whole(layer.double(), *(y.double() for y in inputs()))
    assert_close("out", LAYOUT.unshard([x for x, _ in results]), oracle["out"], plain["out"])
    for _, grads in results:
        assert len(grads) == len(oracle) - 1
        for name, x in grads.items():
            assert_close(name, x, oracle[name], plain[name])
