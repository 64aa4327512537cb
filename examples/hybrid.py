"""Trains a model of linear and softmax attention on split sequences, and beside its twin.

    torchrun --nproc-per-node 2 examples/hybrid.py

Three layers of four are Gated DeltaNet, as in Qwen3-Next: a head has a matrix S as its state, which
decays, and which each row corrects by a delta rule,

    S = exp(g) S;  S = S + k (beta (v - S'k))';  out = S'q

A recurrence needs the state before its first row, which other ranks know: (1) to (3) say how. The
fourth layer is softmax attention, and all else is as in train.py, which prints the same verdict.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import ring_attn
from common import Layer, Transformer, start
from ring_attn import RecurrentParallel, SequenceLayout
from ring_attn.models.recurrent import Place
from ring_attn.recurrence import linear_attention
from train import train

HEADS, HEADDIM = 4, 16


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor]:
    """Row by row, for (batch, rows, heads, headdim). On GPUs: fla's chunk_gated_delta_rule."""
    state = v.new_zeros(*k.shape[::2], k.size(-1), v.size(-1))
    state = state if initial_state is None else initial_state
    outs = []
    for row in zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True):
        q_, k_, v_, g_, beta_ = row
        state = state * g_.exp()[..., None, None]
        wrong = v_ - (k_[..., None, :] @ state)[..., 0, :]
        state = state + k_[..., None] * (beta_[..., None] * wrong)[..., None, :]
        outs.append((q_[..., None, :] @ state)[..., 0, :])
    return torch.stack(outs, 1), state


# (1) How the function runs on this rank's rows. `linear_attention` calls it for each run of
# consecutive ones, exchanges what these do to a state, and adds what came before them.
def split_delta_rule(
    function: Callable[..., Any], place: Place, q: Tensor, k: Tensor, v: Tensor, **rows: Tensor
) -> tuple[Tensor, Tensor | None]:
    return linear_attention(function, q, k, v, rows=rows, **place._asdict())


ring_attn.register_recurrence("delta_rule", split_delta_rule)


class DeltaNet(nn.Module):
    """The module knows nothing of ranks: only `delta_rule` mixes rows."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * HEADS * HEADDIM, bias=False)
        self.gates = nn.Linear(dim, 2 * HEADS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEADDIM)).unbind(-3)
        g, beta = self.gates(x).chunk(2, -1)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return delta_rule(q, k, v, g=-F.softplus(g), beta=beta.sigmoid())[0].flatten(2)


class LinearLayer(Layer):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__(dim, hidden_dim)
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj
        self.delta, self.out = DeltaNet(dim), nn.Linear(HEADS * HEADDIM, dim, bias=False)

    def attend(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return self.out(self.delta(x))


class Hybrid(Transformer):
    """Three linear layers and one of softmax attention; the same weights wherever it is made."""

    def __init__(self, dim: int = 128) -> None:
        super().__init__(4, dim)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for i in range(3):
                self.layers[str(i)] = LinearLayer(dim, 3 * dim)


def make_split(layout: SequenceLayout, device: torch.device) -> Hybrid:
    model = Hybrid().to(device)
    mesh = init_device_mesh(device.type, (layout.world_size,))
    # (2) Names the modules to be split, and the functions of theirs that mix rows.
    style = RecurrentParallel(functions=["delta_rule"], layout=layout)
    ring_attn.parallelize(model, mesh, {"layers.*.delta": style})
    # (3) Softmax attention, as in train.py.
    last = model.layers["3"]
    assert isinstance(last, Layer)
    last.attention = partial(ring_attn.ring_attention, causal=True, layout=layout)
    return model


def main(args: argparse.Namespace, device: torch.device) -> bool:
    layout = SequenceLayout.zigzag(args.seqlen, dist.get_world_size())
    return train(make_split(layout, device), layout, args.steps, Hybrid)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seqlen", type=int, default=512, help="bytes of each sequence")
    start(partial(main, parser.parse_args()))
