"""A small causal transformer (RoPE, grouped heads, RMSNorm, SwiGLU) whose attention is an argument.

    input_ids (batch, rows), position_ids (1 or batch, rows)
      embed -> num_layers x [ x + o_proj(attention(q, k, v)),  x + down(silu(gate(x)) * up(x)) ]
            -> norm -> lm_head -> logits (batch, rows, vocab_size)

Only attention mixes rows, and RoPE reads global positions. So the same model runs on a whole
sequence with `dense_attention` and on a shard of any layout with ring attention. Parameters have
the names of Hugging Face's Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

#: `(q, k, v) -> out`, causal over the whole sequence: (batch, rows, nheads, headdim) each, k and v
#: with nheads_kv heads.
Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

IGNORE_INDEX = -100


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; ValueError if heads do not divide, or headdim is odd."""

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 4
    nheads: int = 8
    nheads_kv: int = 2
    hidden_dim: int = 384
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim % self.nheads or self.headdim % 2:
            raise ValueError(
                f"dim must be nheads={self.nheads} times an even headdim, got dim={self.dim}"
            )
        if self.nheads % self.nheads_kv:
            raise ValueError(
                f"nheads must be a multiple of nheads_kv={self.nheads_kv}, got {self.nheads}"
            )

    @property
    def headdim(self) -> int:
        return self.dim // self.nheads


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's causal attention over a whole sequence in one process."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


class Transformer(nn.Module):
    """The model. Two models made from one config after one `torch.manual_seed` are equal."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws normal weights that keep the norm of rows, smaller ones before residual sums."""
        # The usual 0.02 suits wide models. Here attention's logits would be so close together that
        # the gradients of q and k were mostly rounding.
        std = self.config.dim**-0.5
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=std / (2 * self.config.num_layers) ** 0.5)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=std)
            else:
                nn.init.ones_(parameter)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention: Attention | Sequence[Attention] = dense_attention,
    ) -> Tensor:
        """Logits of the next token at every row.

        Args:
            input_ids: (batch, rows) int64, in any order of positions that `attention` expects.
            position_ids: (1 or batch, rows) int64, the global position of each row.
            attention: the attention of all layers, or one for each layer.
        """
        attentions = [attention] * len(self.layers) if callable(attention) else attention
        x = self.embed_tokens(input_ids)
        rotation = rope_rotation(position_ids, self.config, x.dtype)
        for layer, attend in zip(self.layers, attentions, strict=True):
            x = layer(x, rotation, attend)
        return self.lm_head(self.norm(x))


class Layer(nn.Module):
    """Attention, then SwiGLU, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class SelfAttention(nn.Module):
    """Projections and RoPE around an attention; the number of heads follows from the weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, headdim = config.dim, config.headdim
        self.headdim = headdim
        self.q_proj = nn.Linear(dim, config.nheads * headdim, bias=False)
        self.k_proj = nn.Linear(dim, config.nheads_kv * headdim, bias=False)
        self.v_proj = nn.Linear(dim, config.nheads_kv * headdim, bias=False)
        self.o_proj = nn.Linear(config.nheads * headdim, dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        q, k, v = (
            rearrange(project(x), "b s (h d) -> b s h d", d=self.headdim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = attention(apply_rope(q, rotation), apply_rope(k, rotation), v)
        return self.o_proj(rearrange(out, "b s h d -> b s (h d)"))


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down_proj = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_rotation(
    position_ids: Tensor, config: ModelConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of each row, (1 or batch, rows, 1, headdim / 2) each."""
    # In float32 the angles at position 1e6 would be off by up to 0.03 radian.
    pair = torch.arange(0, config.headdim, 2, dtype=torch.float64, device=position_ids.device)
    frequency = config.rope_base ** (-pair / config.headdim)
    angle = rearrange(position_ids, "b s -> b s 1 1") * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates pairs (x[i], x[i + headdim / 2]) of x (batch, rows, heads, headdim)."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)  # under autocast x has 16 bits and the rotation 32


def token_losses(logits: Tensor, shift_labels: Tensor) -> Tensor:
    """Cross-entropy (batch, rows) in nats; 0 where the next token is `IGNORE_INDEX`."""
    logits = rearrange(logits, "b s v -> b v s")
    return F.cross_entropy(logits, shift_labels, ignore_index=IGNORE_INDEX, reduction="none")


def mean_loss(losses: Tensor, num_targets: int) -> Tensor:
    """A shard's share of the mean over `num_targets` rows; the shares of all shards add up to it.

    Summed in float64, so that the mean hardly depends on the split.
    """
    return losses.double().sum() / num_targets
