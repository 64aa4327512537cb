"""The demo's model: positions, heads, causality, losses (distributed/test_meshes shards it)."""

import pytest
import torch
from torch import Tensor

from ring_attn.core.mask import Mask
from ring_attn.testing import check, plain_attention, random_qkv
from ring_attn.testing import dense_attention as oracle_attention
from ring_attn.tools.model import (
    ModelConfig,
    apply_rope,
    dense_attention,
    rope_rotation,
)

CONFIG = ModelConfig(dim=32, num_layers=2, nheads=4, nheads_kv=2, hidden_dim=48)
SEQLEN = 37


def test_rope_turns_pairs_by_position_times_frequency() -> None:
    x = random_qkv(seqlen_q=SEQLEN, headdim=8).q
    positions = torch.randint(1 << 20, (1, SEQLEN), generator=torch.Generator().manual_seed(2))
    got = apply_rope(x, rope_rotation(positions, CONFIG, torch.float32))

    angle = positions[..., None, None] * CONFIG.rope_base ** (-torch.arange(4.0).double() / 4)
    turn = torch.polar(torch.ones_like(angle), angle)

    def turned(x: Tensor, turn: Tensor) -> Tensor:
        pairs = torch.complex(x[..., :4], x[..., 4:]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    oracle, plain = turned(x.double(), turn), turned(x, turn.to(torch.complex64))
    assert check("rope", got, oracle, plain).ok


@pytest.mark.parametrize("nheads_kv", [1, 2, 4])
def test_dense_attention_is_causal_and_shares_kv_heads(nheads_kv: int) -> None:
    q, k, v, _ = random_qkv(seqlen_q=SEQLEN, nheads_kv=nheads_kv)
    mask = Mask(SEQLEN, SEQLEN, causal=True)
    oracle, plain = oracle_attention(q, k, v, mask)[0], plain_attention(q, k, v, mask)[0]
    assert check("out", dense_attention(q, k, v), oracle, plain).ok


def test_sizes_that_do_not_fit_are_refused() -> None:
    for sizes, message in (
        ({"dim": 30}, "dim must be nheads=8 times an even headdim, got dim=30"),
        ({"nheads_kv": 3}, "nheads must be a multiple of nheads_kv=3, got 8"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelConfig(**sizes)
