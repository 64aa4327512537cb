"""Hugging Face models that number their own rows, split after their embeddings."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn import SequenceLayout, shard_batch, unshard
from ring_attn.integrations.transformers import register, stacks
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close
from tests.bounds import named as by_name
from tests.distributed.pool import Pools, on_ranks
from tests.hf_models import all_in_float64
from tests.hf_own_rows import (
    FAMILIES,
    Inputs,
    images,
    language_batch,
    loss_of,
    make,
    make_with_language,
    with_features,
)
from tests.refusals import refused

pytestmark = pytest.mark.gloo

Step = tuple[Tensor, dict[str, Tensor]]


class How(NamedTuple):
    """A training step; with `computed_again` layers run again in the backward."""

    family: str
    kind: str = "zigzag"
    world_size: int = 2
    computed_again: bool = False
    strategy: str = "ring"


def gradients(model: Any, loss: Tensor) -> Step:
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


def doubled(inputs: Inputs) -> Inputs:
    is_float = torch.is_floating_point
    return {
        name: x.double() if isinstance(x, Tensor) and is_float(x) else x
        for name, x in inputs.items()
    }


@lru_cache
def whole_step(family: str) -> tuple[Step, list[Step]]:
    """Loss and gradients of one process, in float64 and in noisy runs."""

    def step(model: Any, inputs: Inputs) -> Step:
        return gradients(model, loss_of(model(**inputs)))

    model, inputs = make(family, "eager"), FAMILIES[family].inputs()
    noisy = noisy_runs(lambda: step(copy.deepcopy(model), inputs))
    with all_in_float64():
        return step(model.double(), doubled(inputs)), noisy


def split_step(how: How) -> Step:
    """Loss of this rank, and the sums of all ranks' gradients."""
    with register(layout=how.kind, strategy=how.strategy):
        model = make(how.family, "ring_attn")
        if how.computed_again:
            model.train().gradient_checkpointing_enable()
        output = model(**FAMILIES[how.family].inputs())
        loss = loss_of(output)
        # A model's own loss has a share of the gradient.
        share = 1 if output.get("loss") is not None else how.world_size
        _, found = gradients(model, loss / share)
    for gradient in found.values():
        dist.all_reduce(gradient)
    return loss.detach(), found


def assert_same_step(ranks: Pools, how: How) -> None:
    (loss, expected), noisy = whole_step(how.family)
    losses, noisy_gradients = zip(*noisy, strict=True)
    for got_loss, got in ranks(how.world_size).run(split_step, how):
        assert expected.keys() == got.keys()
        assert_close("loss", got_loss, loss, losses)
        for name, gradient in got.items():
            assert_close(name, gradient, expected[name], by_name(noisy_gradients, name))


@pytest.mark.parametrize("how", [How("vit_rows"), How("bart_padded", "contiguous")], ids=str)
def test_a_training_step(ranks: Pools, how: How) -> None:
    assert_same_step(ranks, how)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        *(How(family) for family in FAMILIES if family not in ("vit_rows", "bart_padded")),
        How("vit", "striped", 3),
        How("vit", computed_again=True),
        How("vit", "contiguous", strategy="ulysses"),
        How("siglip", "contiguous", 3),
        How("qwen2_vl_vision", "striped", 3),
        How("wav2vec2", "striped", 3),
        How("bart", "striped", 3),
        How("bart", computed_again=True),
        How("bart", "contiguous", strategy="all_gather"),
        How("bart_padded", "zigzag", 3),
        How("whisper", "contiguous", 3),
    ],
    ids=str,
)
def test_training_steps_of_more_models(ranks: Pools, how: How) -> None:
    assert_same_step(ranks, how)


@on_ranks(2)
def test_rows_that_are_left_split() -> None:
    rank, inputs = dist.get_rank(), images()
    with torch.no_grad(), register(layout="zigzag", gather=False):
        model = make("siglip", "ring_attn", vision_use_head=False)
        rows = model(**inputs).last_hidden_state
        plain = make("siglip", "eager", vision_use_head=False)
        layout = SequenceLayout.zigzag(49, 2)
        assert rows.size(1) == layout.shard_len(rank)
        noisy = noisy_runs(lambda: plain(**inputs).last_hidden_state)
        with all_in_float64():
            oracle = plain.double()(**doubled(inputs)).last_hidden_state
        assert_close("rows", unshard(rows, layout), oracle, noisy)
        with refused(NotImplementedError, "the output loss|gather=False|ViTForImageClassification"):
            make("vit", "ring_attn")(**FAMILIES["vit"].inputs())


@on_ranks(2)
def test_logits_are_those_of_all_rows() -> None:
    """A second forward, without labels, of another length, has no check before it."""
    with torch.no_grad(), register():
        model, inputs = make("bart", "ring_attn"), FAMILIES["bart"].inputs()
        plain = make("bart", "eager")
        model(**inputs)
        given = {"input_ids": inputs["input_ids"][:, :17], "decoder_input_ids": inputs["labels"]}
        noisy = noisy_runs(lambda: plain(**given).logits)
        got = model(**given).logits
        with all_in_float64():
            oracle = plain.double()(**given).logits
        assert_close("logits", got, oracle, noisy)


# -- faults that the tests and the check must find


def not_gathered(out: Tensor, rows: Any) -> Tensor:
    return out


def gathered_in_the_order_of_ranks(out: Tensor, rows: Any) -> Tensor:
    kind = SequenceLayout.contiguous(rows.layout.seqlen, 2)
    return stacks.gather_rows(out, kind, rows.group, rows.dim)


def without_gradients_of_other_ranks(out: Tensor, rows: Any) -> Tensor:
    whole = unshard(out, rows.layout, group=rows.group, dim=rows.dim)
    positions = rows.layout.position_ids(dist.get_rank(rows.group))
    return whole.index_copy(rows.dim, positions, out)


FAULTS = (not_gathered, gathered_in_the_order_of_ranks, without_gradients_of_other_ranks)


def faulty_step(index: int, family: str) -> Step:
    with mock.patch.object(stacks, "whole_rows", FAULTS[index]):
        return split_step(How(family))


@pytest.mark.parametrize("index", range(len(FAULTS)), ids=[fault.__name__ for fault in FAULTS])
def test_a_planted_fault_is_found(ranks: Pools, index: int) -> None:
    (loss, expected), noisy = whole_step("vit_rows")
    losses, noisy_gradients = zip(*noisy, strict=True)
    of_ranks = ranks(2).run(faulty_step, index, "vit_rows")
    with pytest.raises(AssertionError):
        for got_loss, got in of_ranks:
            assert_close("loss", got_loss, loss, losses)
            for name, gradient in got.items():
                assert_close(name, gradient, expected[name], by_name(noisy_gradients, name))


class CountsRows(nn.Module):
    """Adds the index of a row among the rows that it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.size(1))[:, None] / 10


class MixesRows(nn.Module):
    """Adds the mean of the rows that it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


@on_ranks(2)
def test_layers_that_need_other_rows_are_refused() -> None:
    # Rank 0 has the first row, so that counting rows from 0 is right there.
    for part in (CountsRows(), MixesRows()):
        with register():
            model = make("vit", "ring_attn")
            layer = model.vit.layers[1]
            layer.mlp = nn.Sequential(part, layer.mlp)
            found = isinstance(part, MixesRows) or dist.get_rank() == 1
            words = "ViTLayer compute other values for" if found else "as rank 1 has found"
            with refused(NotImplementedError, f"{words}|a part of the rows"):
                model(**FAMILIES["vit"].inputs())


# -- refusals


def run_wrong(case: str) -> None:
    """A call that must be refused on this rank."""
    rank = dist.get_rank()
    family = "vit" if case in ("inputs", "tuple", "layout", "compiled") else "bart"
    if case == "layerdrop":
        model = make("wav2vec2", "ring_attn", layerdrop=0.1).train()
        model(**FAMILIES["wav2vec2"].inputs())
    model, inputs = make(family, "ring_attn"), FAMILIES[family].inputs()
    if case == "inputs":
        inputs["pixel_values"] = inputs["pixel_values"] + rank
    elif case == "tuple":
        inputs["return_dict"] = False
    elif case == "layout":
        inputs["sequence_layout"] = "zigzag"
    elif case == "cache":
        inputs["use_cache"] = True
    elif case == "generate":
        model.generate(inputs["input_ids"], max_new_tokens=2)
    elif case == "attention outside":
        of_stack = stacks.stacks_of(model)[0]
        model.model.encoder.layernorm_embedding = Attending(of_stack[0].self_attn)
    model(**inputs)


class Attending(nn.Module):
    """Attention between the rows that every rank has."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = [attention]  # no submodule, so that it is not in the list twice

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention[0](x)[0]
        return out


REFUSALS = {
    "inputs": (ValueError, "must get the same inputs on every rank|ranks [1] differ"),
    "tuple": (NotImplementedError, "ViTForImageClassification|return_dict=False"),
    "layout": (NotImplementedError, "ViTForImageClassification|leave sequence_layout out"),
    "layerdrop": (NotImplementedError, "Wav2Vec2ForCTC skips layers at random (layerdrop)"),
    "cache": (NotImplementedError, "BartForConditionalGeneration|use_cache is not supported"),
    "generate": (NotImplementedError, "BartForConditionalGeneration|is not supported"),
    "attention outside": (NotImplementedError, "BartAttention is outside of the layers"),
}


@on_ranks(2)
def test_what_is_not_honoured_is_refused() -> None:
    for case, (error, words) in REFUSALS.items():
        with register(dist.new_group()), refused(error, words):
            run_wrong(case)


# -- vision and language on the same ranks


class Both(NamedTuple):
    """A training step of vision and language; the vision tower is split, or whole on each rank."""

    family: str
    vision: str = "ring_attn"
    kind: str = "zigzag"
    world_size: int = 2


@lru_cache
def whole_step_of_both(family: str) -> tuple[Step, list[Step]]:
    def step(model: Any, batch: Inputs) -> Step:
        return gradients(model, model(**batch).loss)

    model = make_with_language(family, "eager")
    batch = language_batch(family, model)
    noisy = noisy_runs(lambda: step(copy.deepcopy(model), batch))
    with all_in_float64():
        return step(model.double(), doubled(batch)), noisy


def split_step_of_both(how: Both) -> Step:
    with register(layout=how.kind):
        given = {"text_config": "ring_attn", "vision_config": how.vision}
        model = make_with_language(how.family, given)
        batch = language_batch(how.family, model)
        count = int((batch["labels"][:, 1:] != -100).sum())
        layout = SequenceLayout.from_name(how.kind, batch["labels"].size(1), how.world_size)
        part = shard_batch(with_features(model, batch), layout, dist.get_rank())
        loss = model(
            **part,
            labels=part["shift_labels"],
            num_items_in_batch=count,
            sequence_layout=layout,
        ).loss
        found = gradients(model, loss)
    for x in (found[0], *found[1].values()):
        dist.all_reduce(x)
    return found


@pytest.mark.parametrize(
    "how",
    [
        Both("llava"),
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in (
                Both("llava", "sdpa"),
                Both("llava", kind="striped", world_size=3),
                Both("qwen2_vl"),
                Both("qwen2_vl", "sdpa"),
                Both("qwen2_vl", kind="contiguous", world_size=3),
            )
        ),
    ],
    ids=str,
)
def test_vision_and_language(ranks: Pools, how: Both) -> None:
    (loss, expected), noisy = whole_step_of_both(how.family)
    losses, noisy_gradients = zip(*noisy, strict=True)
    for got_loss, got in ranks(how.world_size).run(split_step_of_both, how):
        assert expected.keys() == got.keys()
        assert_close("loss", got_loss, loss, losses)
        for name, gradient in got.items():
            assert_close(name, gradient, expected[name], by_name(noisy_gradients, name))
