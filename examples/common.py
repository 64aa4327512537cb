"""Parts that the examples share: the start of ranks, a text, and a small transformer."""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

# `(q, k, v) -> out`, causal: (batch, rows, heads, headdim) each, k and v with fewer heads.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def start(main: Callable[[torch.device], bool]) -> None:
    """Call main on each rank of torchrun; exit with status 1 on a rank where it returns False."""
    if "RANK" not in os.environ:
        sys.exit(f"start the ranks: torchrun --nproc-per-node 2 {sys.argv[0]}")
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    ok = main(device)
    dist.barrier()
    dist.destroy_process_group()
    if not ok:
        sys.exit(1)


def batches(seqlen: int, device: torch.device, batch: int = 1) -> Iterator[dict[str, Tensor]]:
    """Yield random pieces of Python's standard library, a byte a token, the same on all ranks."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = bytearray().join(path.read_bytes() for path in paths)
    text = torch.frombuffer(source, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - seqlen + 1, (batch,), generator=generator).tolist()
        pieces = [text[start : start + seqlen].long() for start in starts]
        ids = torch.stack(pieces).to(device)  # (batch, seqlen)
        yield {"input_ids": ids, "labels": ids}


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute torch's causal attention over a whole sequence in one process."""
    # (batch, rows, heads, headdim) -> (batch, heads, rows, headdim)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


class Transformer(nn.Module):
    """A small Llama over bytes, with the same initial weights in every process."""

    def __init__(self, num_layers: int = 4, dim: int = 128) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):  # does not change the caller's random numbers
            torch.manual_seed(0)
            self.embed: nn.Module = nn.Embedding(256, dim)
            self.layers = nn.ModuleDict({str(i): Layer(dim, 3 * dim) for i in range(num_layers)})
            self.norm: nn.Module = nn.RMSNorm(dim, 1e-5)
            self.head: nn.Module = nn.Linear(dim, 256, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return logits (batch, rows, 256). Only attention mixes rows, so rows may be a shard."""
        x = self.embed(input_ids)
        for layer in self.layers.values():
            x = layer(x, position_ids)
        return self.head(self.norm(x))


class Layer(nn.Module):
    """Attention with RoPE, then SwiGLU. The sizes of the weights determine the number of heads."""

    def __init__(self, dim: int, hidden_dim: int, nheads: int = 8, nheads_kv: int = 2) -> None:
        super().__init__()
        self.headdim = dim // nheads
        self.attention: Attention = dense_attention
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)
        self.q_proj = nn.Linear(dim, nheads * self.headdim, bias=False)
        self.k_proj = nn.Linear(dim, nheads_kv * self.headdim, bias=False)
        self.v_proj = nn.Linear(dim, nheads_kv * self.headdim, bias=False)
        self.o_proj = nn.Linear(nheads * self.headdim, dim, bias=False)
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), position_ids)
        return x + self.mlp(self.mlp_norm(x))

    def attend(self, x: Tensor, position_ids: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        # (batch, rows, heads * headdim) -> (batch, rows, heads, headdim)
        q, k, v = (project(x).unflatten(-1, (-1, self.headdim)) for project in projections)
        out = self.attention(rope(q, position_ids), rope(k, position_ids), v)
        return self.o_proj(out.flatten(2))  # (batch, rows, heads * headdim) -> (batch, rows, dim)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rope(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotate pairs of x (batch, rows, heads, headdim) by position_ids (1 or batch, rows)."""
    # In float32 the angles at position 1e6 would be off by up to 0.03 radian.
    pair = torch.arange(0, x.size(-1), 2, dtype=torch.float64, device=x.device)
    frequency = 10000.0 ** (-pair / x.size(-1))  # (headdim / 2,)
    angle = position_ids[:, :, None, None] * frequency  # (1 or batch, rows, 1, headdim / 2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
