"""Train a model of linear and softmax attention on sharded sequences, and compare it.

    torchrun --nproc-per-node 2 examples/hybrid.py

Three layers of four are Gated DeltaNet, as in Qwen3-Next. The state of a head is a matrix S. For
each row it decays, and is corrected by a delta rule:

    S = exp(g) S;  S = S + k (beta (v - S'k))';  out = S'q

A recurrence needs the state before its first row, which depends on the rows of other ranks: see (1)
to (3). The fourth layer is softmax attention. Everything else is as in train.py, and is compared
with one process in the same way.
"""

import argparse
from collections.abc import Callable
from functools import partial

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
    """Compute the delta rule row by row. On GPUs, use fla's chunk_gated_delta_rule instead.

    q, k and v are (batch, rows, heads, headdim), g and beta (batch, rows, heads), and a state is
    (batch, heads, headdim of k, headdim of v).
    """
    if initial_state is None:
        batch, _, heads, headdim = k.shape
        state = v.new_zeros(batch, heads, headdim, v.size(-1))
    else:
        state = initial_state
    outs = []
    rows = zip(q.unbind(1), k.unbind(1), v.unbind(1), g.unbind(1), beta.unbind(1), strict=True)
    # q_row, k_row and v_row are (batch, heads, headdim), g_row and beta_row (batch, heads).
    for q_row, k_row, v_row, g_row, beta_row in rows:
        state = state * g_row.exp()[..., None, None]
        error = v_row - (k_row[..., None, :] @ state)[..., 0, :]
        state = state + k_row[..., None] * (beta_row[..., None] * error)[..., None, :]
        outs.append((q_row[..., None, :] @ state)[..., 0, :])
    return torch.stack(outs, 1), state


# (1) The version of the function for a sharded sequence. `linear_attention` calls the function for
# each run of consecutive rows, exchanges the states of the runs, and adds the contribution of the
# state before each run.
def split_delta_rule(
    function: Callable[..., tuple[Tensor, Tensor]],
    place: Place,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **rows: Tensor,
) -> tuple[Tensor, Tensor | None]:
    return linear_attention(function, q, k, v, rows=rows, **place._asdict())


ring_attn.register_recurrence("delta_rule", split_delta_rule)


class DeltaNet(nn.Module):
    """A module without any code for ranks, in which only `delta_rule` mixes rows."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * HEADS * HEADDIM, bias=False)
        self.gates = nn.Linear(dim, 2 * HEADS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, rows, 3 * heads * headdim) -> three of (batch, rows, heads, headdim)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEADDIM)).unbind(-3)
        g, beta = self.gates(x).chunk(2, -1)  # (batch, rows, heads) each
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        out, _ = delta_rule(q, k, v, g=-F.softplus(g), beta=beta.sigmoid())
        return out.flatten(2)  # (batch, rows, heads * headdim)


class LinearLayer(Layer):
    """A layer with a DeltaNet instead of softmax attention."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__(dim, hidden_dim)
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj
        self.delta, self.out = DeltaNet(dim), nn.Linear(HEADS * HEADDIM, dim, bias=False)

    def attend(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return self.out(self.delta(x))


class Hybrid(Transformer):
    """Three linear layers and a softmax layer, with the same weights in every process."""

    def __init__(self, dim: int = 128) -> None:
        super().__init__(4, dim)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for i in range(3):
                self.layers[str(i)] = LinearLayer(dim, 3 * dim)


def make_split(layout: SequenceLayout, device: torch.device) -> Hybrid:
    model = Hybrid().to(device)
    mesh = init_device_mesh(device.type, (layout.world_size,))
    # (2) The modules whose sequence is sharded, and their functions that mix rows.
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
