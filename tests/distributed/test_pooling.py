"""Pooled rows: `pool`, reward models, classifiers and poolers; and the probe for other parts."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from ring_attn import SequenceLayout, halo, pool, shard_batch
from ring_attn.integrations.transformers import models as integration
from ring_attn.integrations.transformers import probe, probe_ranks, register
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close, named
from tests.distributed.pool import Pools, on_ranks
from tests.hf_models import GQA, SIZES, VOCAB, all_in_float64
from tests.refusals import refused, says

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
    """A part that adds something of other rows, of all ranks or of its own rank only."""

    def __init__(self, inner: nn.Module, kind: str, layout: SequenceLayout) -> None:
        super().__init__()
        self.inner, self.kind, self.layout = inner, kind, layout

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if self.kind == "mean":
            return out + 0.1 * out.mean(1, keepdim=True)
        if self.kind == "neighbour":
            return out + 0.01 * out.roll(1, 1)
        if self.kind == "mean of all":
            total = out.sum(1, keepdim=True)
            dist.all_reduce(total)
            return out + 0.1 * total / self.layout.seqlen
        if self.kind == "pool":  # takes the rows of this layout only
            return out + 0.1 * pool(out, self.layout, "mean")[:, None]
        if self.kind == "neighbour of all":
            before = [run[:, :-1] for run in halo(out, self.layout, 1)]
            return out + 0.01 * torch.cat(before, 1)
        return out


class OfNeighbours(Mixing):
    """A part of another class."""


def mixing_llama(kinds: dict[int, str], layout: SequenceLayout) -> Any:
    """A model with parts that mix rows, by the index of the layer."""
    llama = make("LlamaForSequenceClassification", "ring_attn").model
    for index, kind in kinds.items():
        llama.layers[index].mlp = Mixing(llama.layers[index].mlp, kind, layout)
    return llama


@pytest.mark.parametrize("kind", ["mean", "neighbour", "none", "off"])
@on_ranks(2)
def test_parts_that_mix_rows_are_named(kind: str) -> None:
    layout = SequenceLayout.zigzag(SEQLEN, 2)
    part = shard_batch({"input_ids": ids_of(False)[0]}, layout, dist.get_rank())
    with register(probe=kind != "off"):
        llama = mixing_llama({1: "mean" if kind == "off" else kind}, layout)
        if kind in ("none", "off"):
            llama(**part, sequence_layout=layout)
            assert not probe.probing.on and not llama.training
            return
        words = "layers.1.mlp (Mixing) mixes rows|a change of token 0|ring_attn.pool|probe=False"
        for _ in range(2):  # it is not forgotten
            with refused(NotImplementedError, words):
                llama(**part, sequence_layout=layout)


@on_ranks(3)
def test_parts_that_see_rows_of_other_ranks_are_accepted() -> None:
    layout = SequenceLayout.zigzag(SEQLEN, 3)
    part = shard_batch({"input_ids": ids_of(False)[0]}, layout, dist.get_rank())
    with register():
        for kind in ("mean of all", "pool", "neighbour of all"):
            mixing_llama({0: kind, 1: kind}, layout)(**part, sequence_layout=layout)
        # A part behind a right one is judged by itself.
        for kind in ("mean of all", "pool"):
            llama = mixing_llama({0: kind, 1: "mean"}, layout)
            with refused(
                NotImplementedError, "layers.1.mlp (Mixing) mixes rows|trusted=['Mixing']"
            ):
                llama(**part, sequence_layout=layout)


@on_ranks(2)
def test_trusted_parts_are_not_judged_but_others_are() -> None:
    layout = SequenceLayout.zigzag(SEQLEN, 2)
    part = shard_batch({"input_ids": ids_of(False)[0]}, layout, dist.get_rank())
    with register(trusted=["Mixing"]):
        mixing_llama({0: "mean", 1: "neighbour"}, layout)(**part, sequence_layout=layout)
        llama = mixing_llama({0: "mean"}, layout)
        llama.layers[1].mlp = OfNeighbours(llama.layers[1].mlp, "neighbour", layout)
        with refused(NotImplementedError, "layers.1.mlp (OfNeighbours) mixes rows"):
            llama(**part, sequence_layout=layout)


@on_ranks(2)
def test_the_second_stage_is_what_refuses_and_accepts() -> None:
    """Planted faults: a judge that sees nothing, and one that sees a change everywhere."""
    layout = SequenceLayout.zigzag(SEQLEN, 2)
    part = shard_batch({"input_ids": ids_of(False)[0]}, layout, dist.get_rank())
    with register():
        blind = mock.patch.object(probe_ranks, "greatest_difference", lambda usual, other: 0.0)
        with blind, refused(NotImplementedError, "layers.1.mlp (Mixing) mixes rows"):
            mixing_llama({1: "mean of all"}, layout)(**part, sequence_layout=layout)
        with mock.patch.object(probe_ranks.Judge, "num_needed", lambda self, finding: 0):
            mixing_llama({1: "mean"}, layout)(**part, sequence_layout=layout)


class FailsOnOneRank(nn.Module):
    """A part with a collective of its own, which one rank does not reach."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ArithmeticError("lost")
        dist.all_reduce(x, group=self.group)
        return x


@on_ranks(2)
def test_a_rank_that_fails_says_so_while_others_wait_in_a_collective_of_the_model() -> None:
    layout, rank = SequenceLayout.zigzag(SEQLEN, 2), dist.get_rank()
    part = shard_batch({"input_ids": ids_of(False)[0]}, layout, rank)
    group = dist.new_group(timeout=timedelta(seconds=2))
    told: list[str] = []
    with register(), mock.patch.object(probe_ranks, "PATIENCE_S", 0.1):
        llama = mixing_llama({}, layout)
        llama.layers[1].mlp = FailsOnOneRank(group)
        log = mock.patch.object(probe_ranks.logger, "warning", lambda _, text: told.append(text))
        with log, refused(NotImplementedError, "LlamaModel could not be probed"):
            llama(**part, sequence_layout=layout)
    if rank == 1:
        assert says(told[0], "ArithmeticError: lost|in a collective that the model calls itself")


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


def refuses_rows(ranks: tuple[int, ...], rows: tuple[int, ...]) -> Any:
    """Return a hook that fails in a probe on some ranks, for some numbers of rows."""

    def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
        if probe.probing.on and dist.get_rank() in ranks and args[0].size(1) in rows:
            raise RuntimeError(f"{args[0].size(1)} rows")

    return hook


@on_ranks(2)
def test_a_model_that_cannot_be_probed_is_refused_or_trusted() -> None:
    layout = SequenceLayout.zigzag(SEQLEN, 2)
    part = shard_batch({"input_ids": ids_of(False)[0]}, layout, dist.get_rank())
    own = layout.shard_len(dist.get_rank())

    def run(kind: str, ranks: tuple[int, ...], rows: tuple[int, ...]) -> None:
        llama = mixing_llama({1: kind}, layout)
        llama.layers[0].register_forward_pre_hook(refuses_rows(ranks, rows))
        llama(**part, sequence_layout=layout)

    with register():
        # The inputs of the forward are taken instead of random tokens.
        run("none", (0, 1), (probe.ROWS,))
        run("mean of all", (0, 1), (probe.ROWS,))
        run("pool", (1,), (probe.ROWS,))
        with refused(NotImplementedError, "layers.1.mlp (Mixing) mixes rows|ring_attn.halo"):
            run("neighbour", (1,), (probe.ROWS,))
        reason = f"RuntimeError: {own} rows" if dist.get_rank() else "rank 1 has the error"
        words = f"LlamaModel could not be probed|({reason})|register(trusted=['LlamaModel'])"
        with refused(NotImplementedError, words):
            run("none", (1,), (probe.ROWS, own))
    with register(trusted=["LlamaModel"]):
        run("none", (1,), (probe.ROWS, own))
    with refused(TypeError, "trusted must be a sequence"):
        register(trusted="LlamaModel")
