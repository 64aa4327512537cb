"""The demo's model: positions, heads, causality, losses (distributed/test_meshes shards it)."""

from functools import partial

import pytest
import torch
from torch import Tensor

from ring_attn.core.mask import Mask
from ring_attn.testing import check, plain_attention, random_qkv
from ring_attn.testing import dense_attention as oracle_attention
from ring_attn.tools.model import (
    IGNORE_INDEX,
    ModelConfig,
    Transformer,
    apply_rope,
    dense_attention,
    mean_loss,
    rope_rotation,
    token_losses,
)

CONFIG = ModelConfig(dim=32, num_layers=2, nheads=4, nheads_kv=2, hidden_dim=48)
SEQLEN = 37


def make_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG)


def random_bytes(seqlen: int = SEQLEN) -> Tensor:
    return torch.randint(256, (2, seqlen), generator=torch.Generator().manual_seed(1))


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


def test_rope_keeps_the_dtype_of_heads_under_autocast() -> None:
    x = random_qkv(seqlen_q=4, headdim=8, dtype=torch.bfloat16).q
    rotation = rope_rotation(torch.arange(4)[None], CONFIG, torch.float32)
    assert apply_rope(x, rotation).dtype == torch.bfloat16


@pytest.mark.parametrize("nheads_kv", [1, 2, 4])
def test_dense_attention_is_causal_and_shares_kv_heads(nheads_kv: int) -> None:
    q, k, v, _ = random_qkv(seqlen_q=SEQLEN, nheads_kv=nheads_kv)
    mask = Mask(SEQLEN, SEQLEN, causal=True)
    oracle, plain = oracle_attention(q, k, v, mask)[0], plain_attention(q, k, v, mask)[0]
    assert check("out", dense_attention(q, k, v), oracle, plain).ok


def test_each_layer_may_have_an_attention_of_its_own() -> None:
    model, ids, positions = make_model(), random_bytes(), torch.arange(SEQLEN)[None]
    seen: list[int] = []

    def numbered(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(layer)
        return dense_attention(q, k, v)

    got = model(ids, positions, [partial(numbered, 0), partial(numbered, 1)])
    assert seen == [0, 1] and torch.equal(got, model(ids, positions))
    with pytest.raises(ValueError, match="zip"):
        model(ids, positions, [dense_attention])


def test_loss_is_the_mean_cross_entropy_of_rows_with_a_label() -> None:
    logits = make_model()(random_bytes(), torch.arange(SEQLEN)[None])
    labels = random_bytes(SEQLEN + 1)[:, 1:]
    labels[:, -1] = IGNORE_INDEX
    losses = token_losses(logits, labels)
    assert (losses[:, -1] == 0).all()
    given = logits[:, :-1].reshape(-1, 256), labels[:, :-1].flatten()
    plain, whole = (
        torch.nn.functional.cross_entropy(x, given[1]) for x in (given[0], given[0].double())
    )
    assert check("loss", mean_loss(losses, given[1].numel()).float(), whole, plain).ok


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 30}, "dim must be nheads=8 times an even headdim, got dim=30"),
        ({"dim": 24}, "even headdim"),
        ({"nheads_kv": 3}, "nheads must be a multiple of nheads_kv=3, got 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**sizes)
