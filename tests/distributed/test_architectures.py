"""Every architecture of transformers is right on a split sequence, or refused: none in silence."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attn import SequenceLayout, shard_batch
from ring_attn.integrations.transformers import models as integration
from ring_attn.integrations.transformers import register
from tests.distributed.pool import Pools, on_ranks
from tests.hf_architectures import architectures, make, outcome, table
from tests.refusals import refused

OWN_CODE, OWN_POSITIONS = "computes attention in its own code", "has no parameter position_ids"
SOME = {
    "LlamaForCausalLM": "right",
    "RobertaForCausalLM": "right",
    "BloomForCausalLM": OWN_CODE,
    "BartForCausalLM": OWN_POSITIONS,
    "RecurrentGemmaForCausalLM": "of 2 recurrent layers 0 are known",
    "MobileBertForMaskedLM": "trigram_input",
    "T5ForConditionalGeneration": "an encoder and a decoder",
}
BY_NAME = {architecture.model_class: architecture for architecture in architectures()}


@on_ranks(2)
def test_models_are_right_or_refused() -> None:
    for name, expected in SOME.items():
        found = outcome(BY_NAME[name])
        assert expected in found, (name, found)


@on_ranks(2)
def test_models_that_are_not_refused_would_be_wrong() -> None:
    """Without the checks the sweep finds the models that they are for."""
    names = ("_refuse_by_code", "_require_positions", "_after")
    with mock.patch.multiple(integration, **{name: lambda *args: None for name in names}):
        for name in ("BloomForCausalLM", "BartForCausalLM", "MobileBertForMaskedLM"):
            found = outcome(BY_NAME[name])
            integration._forward.depth = 0
            assert found.startswith("WRONG"), (name, found)


@on_ranks(2)
def test_a_model_that_keeps_the_layout_back_is_named() -> None:
    layout = SequenceLayout.zigzag(13, 2)
    part = shard_batch({"input_ids": torch.arange(13)[None]}, layout, dist.get_rank())
    with register(layout="zigzag"):
        model = make(BY_NAME["StableLmForCausalLM"], "ring_attn")
        with refused(NotImplementedError, "StableLmForCausalLM|sequence_layout"):
            model(**part, sequence_layout=layout)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(2400)
def test_the_table_of_models(ranks: Pools) -> None:
    """Has no model that is wrong; `tests/hf_architectures.py` says how it is written again."""
    pool = ranks(2)
    # One model at a time: the limit on an answer is then the same however many models there are.
    outcomes = {each: pool.run(outcome, each, timeout=300)[0] for each in BY_NAME.values()}
    text = "\n".join(table(outcomes))
    assert "WRONG" not in text and "fails" not in text
    assert text == (Path(__file__).parents[2] / "docs" / "models.md").read_text()
