"""Ring attention between projections that are cut by heads: a block in two parts, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import Layer
from ring_attn import SequenceLayout, ring_attention
from ring_attn.models.tensor_parallel import (
    TensorParallelConfig,
    load_tp_state_dict,
    shard_state_dict,
)
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close, named
from tests.distributed.pool import Pools

pytestmark = pytest.mark.gloo  # code around calls; others run calls on streams

SEQLEN = 37
LAYOUT = SequenceLayout.zigzag(SEQLEN, 2)


def block(kv_heads: int) -> Layer:
    """Six heads, and an intermediate size that two ranks cannot share evenly."""
    torch.manual_seed(0)
    return Layer(dim=48, hidden_dim=51, nheads=6, nheads_kv=kv_heads)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dout = torch.randn(2, 2, SEQLEN, 48, generator=generator)
    return x, dout


def configs_of(kv_heads: int) -> list[TensorParallelConfig]:
    return [TensorParallelConfig(part, 2, 48, 51, 6, kv_heads) for part in range(2)]


def run_block(folder: str, kv_heads: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """This rank's rows of the block's output, and the gradients of both parts.

    Both parts of the block are in one process, where sums of their outputs replace all-reduces.
    """
    rank = dist.get_rank()
    configs = configs_of(kv_heads)
    one, other = parts = [block(kv_heads) for _ in configs]
    for part, config in zip(parts, configs, strict=True):
        for name, shard in load_tp_state_dict(folder, config, otherwise="replicated").items():
            module, _, leaf = name.rpartition(".")
            setattr(part.get_submodule(module), leaf, nn.Parameter(shard))
    other.attention_norm, other.mlp_norm = one.attention_norm, one.mlp_norm

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert (q.size(2), k.size(2)) == (configs[0].local_heads, configs[0].local_kv_heads)
        return ring_attention(q, k, v, causal=True, layout=LAYOUT)

    x, dout = (LAYOUT.shard(y, rank) for y in inputs())
    one.attention = other.attention = attention
    positions, y = LAYOUT.position_ids(rank)[None], one.attention_norm(x)
    x = x + one.attend(y, positions) + other.attend(y, positions)
    y = one.mlp_norm(x)
    out = x + one.mlp(y) + other.mlp(y)
    out.backward(dout)

    grads = [{name: p.grad for name, p in part.named_parameters()} for part in parts]
    for name, grad in grads[0].items():
        rows = configs[0].replicated_outputs("k")
        if name.endswith(("k_proj.weight", "v_proj.weight")) and rows.stop:
            assert configs[0].kv_replica_ranks == (0, 1)  # all parts
            grad[rows] = grads[1][name][rows] = grad[rows] + grads[1][name][rows]
    for grad in {id(x): x for part in grads for x in part.values()}.values():
        dist.all_reduce(grad)
    return out.detach(), grads


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_block_of_two_parts_on_two_ranks(ranks: Pools, kv_heads: int, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    layer = block(kv_heads)
    save_file(layer.state_dict(), tmp_path / "model.safetensors")
    results = ranks(2).run(run_block, str(tmp_path), kv_heads)

    def whole(layer: Layer, x: Tensor, dout: Tensor) -> dict[str, Tensor]:
        out = layer(x, torch.arange(SEQLEN)[None])
        out.backward(dout)
        found = {name: p.grad for name, p in layer.named_parameters()}
        layer.zero_grad()
        return {"out": out.detach(), **found}

    noisy = noisy_runs(lambda: whole(layer, *inputs()))
    oracle = whole(layer.double(), *(y.double() for y in inputs()))
    out = LAYOUT.unshard([x for x, _ in results])
    assert_close("out", out, oracle["out"], named(noisy, "out"))
    for _, grads in results:
        for part, config in zip(grads, configs_of(kv_heads), strict=True):
            exact, *usual = (
                shard_state_dict(x, config, otherwise="replicated") for x in (oracle, *noisy)
            )
            assert {*part} == {*exact} - {"out"}
            for name, x in part.items():
                assert_close(name, x, exact[name], named(usual, name))
