"""Pooled rows: `pool`, reward models, classifiers and poolers; and the probe for other parts."""

from __future__ import annotations

import copy
import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from ring_attn import SequenceLayout, pool, shard_batch
from ring_attn.integrations.transformers import models as integration
from ring_attn.integrations.transformers import probe, register
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close, named
from tests.distributed.pool import Pools, on_ranks
from tests.hf_models import GQA, SIZES, VOCAB, all_in_float64
from tests.refusals import refused

pytestmark = pytest.mark.gloo

SEQLEN, PAD, BATCH = 29, 1, 3
LENGTHS = (29, 11, 20)


@pytest.mark.parametrize("how", ["first", "last", "mean"])
@pytest.mark.parametrize("padding", [None, "right", "left"])
@on_ranks(3)
def test_pooled_rows_and_their_gradients(how: Any, padding: str | None) -> None:
    layout, rank = SequenceLayout.zigzag(SEQLEN, 3), dist.get_rank()
    torch.manual_seed(0)
    x, dout = torch.randn(BATCH, SEQLEN, 4), torch.randn(BATCH, 4)
    mask = torch.arange(SEQLEN) < torch.tensor(LENGTHS)[:, None]
    mask = torch.ones_like(mask) if padding is None else mask
    mask = mask.flip(1) if padding == "left" else mask

    def whole(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
        x = x.to(dtype).requires_grad_()
        rows = [one[real] for one, real in zip(x, mask, strict=True)]
        of_row = {"first": lambda r: r[0], "last": lambda r: r[-1], "mean": lambda r: r.mean(0)}
        out = torch.stack([of_row[how](r) for r in rows])
        return [out.detach(), *torch.autograd.grad(out, x, dout.to(dtype))]

    own = layout.shard(x, rank).clone().requires_grad_()
    given = None if padding is None else mask.long()
    out = pool(own, layout, how, attention_mask=given)
    (gradient,) = torch.autograd.grad(out, own, dout / 3)
    expected, noisy = whole(x, torch.float64), noisy_runs(lambda: whole(x, torch.float32))
    assert_close("pooled", out, expected[0], [one[0] for one in noisy])
    got = torch.zeros_like(x)
    got[:, layout.position_ids(rank)] = gradient
    dist.all_reduce(got)
    assert_close("gradient", got, expected[1], [one[1] for one in noisy])


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForSequenceClassification": ("LlamaConfig", GQA),
    "GPT2ForSequenceClassification": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.15}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "BertForSequenceClassification": ("BertConfig", SIZES),
    "RobertaForSequenceClassification": ("RobertaConfig", SIZES),
    "DistilBertForSequenceClassification": (
        "DistilBertConfig",
        {"vocab_size": VOCAB, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4}
        | dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0),
    ),
    "ModernBertForSequenceClassification": (
        "ModernBertConfig",
        {**SIZES, "classifier_pooling": "mean", "layer_types": ["full_attention"] * 2},
    ),
    "BertModel": ("BertConfig", SIZES),
}


def make(name: str, implementation: str) -> Any:
    config_name, options = HEADS[name]
    options = {"num_labels": 3, "pad_token_id": PAD, "eos_token_id": 2, "bos_token_id": 0} | options
    if "Bert" in name or "Roberta" in name:
        options |= {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    config = getattr(transformers, config_name)(**options)
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(config, attn_implementation=implementation)
    return model.eval()


def ids_of(padded: bool) -> tuple[Tensor, Tensor]:
    """Ids, and the mask of padding at the end of rows."""
    ids = torch.randint(3, VOCAB, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(SEQLEN) < torch.tensor(LENGTHS)[:, None]
    return (ids.masked_fill(~mask, PAD), mask.long()) if padded else (ids, torch.ones_like(ids))


def results(model: Any, output: Any) -> dict[str, Tensor]:
    """The pooled values, and the gradients of a loss that the head computes of them."""
    pooled = output.logits if "logits" in output else output.pooler_output
    loss = output.loss if output.get("loss") is not None else pooled.square().sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"pooled": pooled.detach(), "loss": loss.detach(), **gradients}


def of_whole(name: str, padded: bool) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    ids, mask = ids_of(padded)
    model = make(name, "eager")
    given = {"labels": torch.tensor([2, 0, 1])} if "Classification" in name else {}

    def step(model: Any) -> dict[str, Tensor]:
        return results(model, model(input_ids=ids, attention_mask=mask, **given))

    noisy = noisy_runs(lambda: step(copy.deepcopy(model)))
    with all_in_float64():
        return step(model.double()), noisy


def of_ranks(name: str, padded: bool) -> dict[str, Tensor]:
    """The results of this rank, and the sums of the ranks' gradients."""
    layout, rank = SequenceLayout.zigzag(SEQLEN, dist.get_world_size()), dist.get_rank()
    ids, mask = ids_of(padded)
    given = {"labels": torch.tensor([2, 0, 1])} if "Classification" in name else {}
    if padded:
        given["attention_mask"] = mask
    part = shard_batch({"input_ids": ids}, layout, rank)
    with register():
        model = make(name, "ring_attn")
        first = 2 if name.startswith("Roberta") else 0
        takes_positions = "DistilBert" not in name
        if takes_positions:
            part["position_ids"] = part["position_ids"] + first
        output = model(**part, **given, sequence_layout=layout)
        found = results(model, output)
    for key, x in found.items():
        if key not in ("pooled", "loss"):
            dist.all_reduce(x)
    return found


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        *((name, False) for name in HEADS if not name.startswith("DistilBert")),
        ("LlamaForSequenceClassification", True),
        ("BertForSequenceClassification", True),
    ],
)
@pytest.mark.sweep(2)
def test_heads_that_pool(ranks: Pools, name: str, padded: bool) -> None:
    oracle, noisy = of_whole(name, padded)
    for got in ranks(2).run(of_ranks, name, padded):
        assert got.keys() == oracle.keys()
        for key, x in got.items():
            assert_close(f"{name}: {key}", x, oracle[key], named(noisy, key))


class Mixing(nn.Module):
    """A part that adds something of other rows."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if self.kind == "mean":
            return out + 0.1 * out.mean(1, keepdim=True)
        if self.kind == "neighbour":
            return out + 0.01 * out.roll(1, 1)
        return out


@pytest.mark.parametrize("kind", ["mean", "neighbour", "none", "off"])
@on_ranks(2)
def test_parts_that_mix_rows_are_named(kind: str) -> None:
    layout = SequenceLayout.zigzag(SEQLEN, 2)
    part = shard_batch({"input_ids": ids_of(False)[0]}, layout, dist.get_rank())
    with register(probe=kind != "off"):
        model = make("LlamaForSequenceClassification", "ring_attn")
        llama = model.model
        llama.layers[1].mlp = Mixing(llama.layers[1].mlp, "mean" if kind == "off" else kind)
        if kind in ("none", "off"):
            llama(**part, sequence_layout=layout)
            assert not probe.probing.on and not llama.training
            return
        words = "layers.1.mlp (Mixing) mixes rows|a change of token 0|ring_attn.pool|probe=False"
        for _ in range(2):  # it is not forgotten
            with refused(NotImplementedError, words):
                llama(**part, sequence_layout=layout)


@on_ranks(2)
def test_real_models_with_such_parts_are_refused() -> None:
    """ESM scales embeddings by the share of masks; a question's start is a position."""
    layout, rank = SequenceLayout.zigzag(SEQLEN, 2), dist.get_rank()
    part = shard_batch({"input_ids": ids_of(False)[0]}, layout, rank)
    part["position_ids"] = part["position_ids"] + PAD + 1
    options = SIZES | {"pad_token_id": PAD, "mask_token_id": 2, "token_dropout": True}
    options |= {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    with register():
        config = transformers.EsmConfig(**options, position_embedding_type="rotary")
        with refused(NotImplementedError, "EsmForMaskedLM has token_dropout|share of masks"):
            transformers.EsmForMaskedLM._from_config(config, attn_implementation="ring_attn")
        with mock.patch.dict(integration.OTHER_ROWS):  # the probe finds it, too
            del integration.OTHER_ROWS["token_dropout"]
            esm = transformers.EsmForMaskedLM._from_config(config, attn_implementation="ring_attn")
        plain = {**part, "position_ids": part["position_ids"] - PAD - 1}
        with refused(NotImplementedError, "embeddings (EsmEmbeddings) mixes rows|token 9"):
            esm.eval()(**plain, sequence_layout=layout)
        config = transformers.BertConfig(**SIZES)
        asks = transformers.BertForQuestionAnswering._from_config(
            config, attn_implementation="ring_attn"
        )
        where = torch.tensor([3, 4, 5])
        with refused(NotImplementedError, "is a position in the whole sequence"):
            asks.eval()(**plain, sequence_layout=layout, start_positions=where, end_positions=where)


def test_rows_are_compared_in_outputs_of_any_number_of_dims() -> None:
    """Logits of positions are (batch, rows)."""
    before = torch.zeros(5)
    after = before.clone()
    after[2] = 1.0
    assert probe.other_rows(before, after, 2) == ()
    after[4] = 0.5
    assert probe.other_rows(before, after, 2) == (4,)
    assert probe.other_rows(before.view(5, 1, 1), after.view(5, 1, 1), 2) == (4,)


@on_ranks(2)
def test_a_model_that_cannot_be_probed_is_logged() -> None:
    layout = SequenceLayout.zigzag(SEQLEN, 2)
    part = shard_batch({"input_ids": ids_of(False)[0]}, layout, dist.get_rank())
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("ring_attn").addHandler(handler)
    try:
        with register():
            model = make("LlamaForSequenceClassification", "ring_attn").model

            def refuses_few_rows(layer: nn.Module, args: tuple[Any, ...]) -> None:
                if args[0].size(1) == probe.ROWS:
                    raise RuntimeError("23 rows")

            model.layers[0].register_forward_pre_hook(refuses_few_rows)
            model(**part, sequence_layout=layout)
    finally:
        logging.getLogger("ring_attn").removeHandler(handler)
    assert "LlamaModel could not be probed" in records[0].getMessage()
