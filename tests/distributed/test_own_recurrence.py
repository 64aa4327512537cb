"""A recurrent layer that is not known is refused; one function makes it known, from outside."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn import SequenceLayout, TransportOptions, shard_batch
from ring_attn.integrations.transformers import register
from ring_attn.models.recurrent import SPLITS, register_recurrence
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close
from tests.distributed.pool import on_ranks
from tests.hf_models import all_in_float64, make_batch, make_model
from tests.recurrences import split_sums, sums_of_rows
from tests.refusals import refused

SEQLEN = 23


class Sums(nn.Module):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return sums_of_rows(hidden_states)


def part_of() -> dict[str, Any]:
    """Keywords of a model's forward on this rank."""
    layout = SequenceLayout.zigzag(SEQLEN, 2)
    part = shard_batch({"input_ids": make_batch(SEQLEN)["input_ids"]}, layout, dist.get_rank())
    return {**part, "sequence_layout": layout}


def make(implementation: str) -> Any:
    model = make_model("lfm2", implementation)
    model.model.layers[0].conv = Sums()
    return model


@on_ranks(2)
def test_a_kind_of_ones_own() -> None:
    rank, layout = dist.get_rank(), SequenceLayout.zigzag(SEQLEN, 2)
    ids = make_batch(SEQLEN)["input_ids"]
    with torch.no_grad():
        model = make("sdpa")
        noisy = noisy_runs(lambda: model(ids).logits)
        with all_in_float64():
            oracle = copy.deepcopy(model).double()(ids).logits
        with register(layout="zigzag"), mock.patch.dict(SPLITS):
            model = make("ring_attn")
            with refused(NotImplementedError, "register_recurrence"):
                model(**part_of())
            register_recurrence("sums_of_rows", split_sums)
            got = model(**part_of()).logits
    runs = [layout.shard(x, rank) for x in noisy]
    assert_close("logits", got, layout.shard(oracle, rank), runs)


@pytest.mark.gloo
@on_ranks(2)
@pytest.mark.parametrize("compiled", ["the model", "its layers"])
def test_compiled_models_are_refused(compiled: str) -> None:
    """Before or after a forward as it is: a trace would leave the exchange out in silence."""
    for first in (False, True):
        with torch.no_grad(), register(dist.new_group(), layout="zigzag"):
            model = make_model("lfm2", "ring_attn")
            if first:
                model(**part_of())
            for module in [model] if compiled == "the model" else model.model.layers:
                module.compile(backend="eager")
            with refused(NotImplementedError, "not compiled"):
                model(**part_of())
    torch.compiler.reset()


@pytest.mark.gloo
@on_ranks(2)
def test_options_of_transport_are_refused() -> None:
    options = TransportOptions(timeout=7.0)
    with (
        register(dist.new_group(), "zigzag", transport=options),
        refused(NotImplementedError, "without transport"),
    ):
        make_model("lfm2", "ring_attn")(**part_of())


@pytest.mark.gloo
@on_ranks(2)
def test_states_of_another_cache_and_their_gradients_are_refused() -> None:
    ids, part = make_batch(SEQLEN)["input_ids"], part_of()
    alone = make_model("mamba2", "eager")(ids, use_cache=True).cache_params
    del part["position_ids"]
    with register(dist.new_group(), layout="zigzag") as ring:
        model = make_model("mamba2", "ring_attn")
        with refused(NotImplementedError, "Registration.cache"):
            model(**part, cache_params=alone)
        with refused(NotImplementedError, "no gradient|no_grad"):
            model(ids, cache_params=ring.cache(model))


def test_what_cannot_be_registered() -> None:
    with pytest.raises(ValueError, match="name of a function"):
        register_recurrence("a.b", split_sums)
    with pytest.raises(TypeError, match="split must be a function"):
        register_recurrence("sums_of_rows", None)  # type: ignore[arg-type]
