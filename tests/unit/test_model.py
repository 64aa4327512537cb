"""The demo's model: positions, heads, causality, and losses that add up over shards."""

from functools import partial

import pytest
import torch
from torch import Tensor

from ring_attn import SequenceLayout, shard_batch
from ring_attn.core.layout import LAYOUTS
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


def reversed_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain PyTorch with its sums in another order: a yardstick of rounding."""
    return plain_attention(q, k, v, Mask(q.size(1), k.size(1), causal=True))[0]


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_in_any_order_have_the_logits_of_the_whole_sequence(layout: str) -> None:
    ids, positions = random_bytes(), torch.arange(SEQLEN)[None]
    cut = SequenceLayout.from_name(layout, SEQLEN, 3)
    order = torch.cat([cut.position_ids(rank) for rank in range(3)])

    def in_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        back = torch.argsort(order)
        return dense_attention(q[:, back], k[:, back], v[:, back])[:, order]

    got = make_model()(ids[:, order], order[None], in_order)
    oracle = make_model(torch.float64)(ids, positions)[:, order]
    plain = make_model()(ids, positions, reversed_attention)[:, order]
    assert check("logits", got, oracle, plain).ok


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_shards_add_up_to_the_whole_loss(layout: str) -> None:
    ids = random_bytes()
    batch = {"input_ids": ids, "labels": ids}
    logits = make_model()(ids, torch.arange(SEQLEN)[None])
    num_targets = ids.numel() - ids.size(0)
    whole = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, 256).double(), ids[:, 1:].flatten()
    )
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 256), ids[:, 1:].flatten())
    cut = SequenceLayout.from_name(layout, SEQLEN, 3)
    parts = []
    for rank in range(3):
        labels = shard_batch(batch, cut, rank)["shift_labels"]
        parts.append(mean_loss(token_losses(cut.shard(logits, rank), labels), num_targets))
    assert check("loss", torch.stack(parts).sum().float(), whole, plain).ok


def test_a_row_without_label_has_no_loss() -> None:
    labels = torch.tensor([[7, IGNORE_INDEX]])
    losses = token_losses(torch.zeros(1, 2, 256), labels)
    assert losses[0, 0] > 0 and losses[0, 1] == 0


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
