"""Every architecture of transformers is right on a split sequence, or refused: none in silence."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attn import SequenceLayout, shard_batch
from ring_attn.integrations.transformers import models as integration
from ring_attn.integrations.transformers import register
from tests.distributed.pool import Pools, on_ranks
from tests.hf_architectures import MIXED, architectures, make, outcome, outcomes_of, table
from tests.hf_heads import listed
from tests.hf_options import IMAGE, OUTCOMES, Variant, of_all_ranks, page_of, rows_of
from tests.refusals import refused

OWN_CODE, OWN_POSITIONS = "computes attention in its own code", "has no parameter position_ids"
SOME = {
    "LlamaForCausalLM": "right",
    "RobertaForCausalLM": "right",
    "BloomForCausalLM": OWN_CODE,
    "BartForCausalLM": OWN_POSITIONS,
    "RecurrentGemmaForCausalLM": "RecurrentGemmaRecurrentBlock) mixes rows of the sequence",
    "MobileBertForMaskedLM": "trigram_input",
    "T5ForConditionalGeneration": "a bias by relative position",
}
DOCS = Path(__file__).parents[2] / "docs"
BY_NAME = {architecture.model_class: architecture for architecture in architectures()}
# The table's models are divided among so many tests, which run beside other tests.
PARTS = 12


@on_ranks(2)
def test_models_are_right_or_refused() -> None:
    for name, expected in SOME.items():
        found = outcome(BY_NAME[name])
        assert expected in found, (name, found)


@on_ranks(2)
def test_models_that_are_not_refused_would_be_wrong() -> None:
    """Without the checks the sweep finds the models that they are for."""
    names = ("refuse_by_code", "require_positions", "after_forward")
    with mock.patch.multiple(integration, **{name: lambda *args: None for name in names}):
        for name in ("BloomForCausalLM", "BartForCausalLM", "MobileBertForMaskedLM"):
            found = outcome(BY_NAME[name])
            integration.running.depth = 0
            assert found.startswith("WRONG"), (name, found)


@on_ranks(2)
def test_a_model_that_keeps_the_layout_back_is_named() -> None:
    layout = SequenceLayout.zigzag(13, 2)
    part = shard_batch({"input_ids": torch.arange(13)[None]}, layout, dist.get_rank())
    with register(layout="zigzag"):
        model = make(BY_NAME["StableLmForCausalLM"], "ring_attn")
        with refused(NotImplementedError, "StableLmForCausalLM|sequence_layout"):
            model(**part, sequence_layout=layout)


VARIANTS = [
    (Variant("llama", "LlamaForSequenceClassification"), "right"),
    (Variant("bert", "BertForQuestionAnswering"), "right"),
    (Variant("llama", "LlamaForCausalLM", (("attention_bias", True),)), "right"),
    (Variant("mixtral", "MixtralForCausalLM", (("output_router_logits", True),)), "aux_loss"),
    (
        Variant(
            "qwen4_exp_text",
            "Qwen4ExpForCausalLM",
            (("ple_layer_ids", [1]), ("ngram_vocab_size_base", 1000), ("split_ngram_parts", 1)),
        ),
        "mixes rows",
    ),
    (
        Variant(
            "esm",
            "EsmForSequenceClassification",
            (("token_dropout", True), ("mask_token_id", 21)),
            "masked",
        ),
        "refused: EsmForSequenceClassification has token_dropout",
    ),
    (
        Variant("t5gemma2", "T5Gemma2ForConditionalGeneration", (), "encoder-decoder"),
        "refused: T5Gemma2ForConditionalGeneration computes self-attention and cross-attention",
    ),
    (
        Variant("gemma4_text", "Gemma4ForCausalLM", (("use_bidirectional_attention", "all"),)),
        "refused: Gemma4ForCausalLM has use_bidirectional_attention='all'",
    ),
    (
        Variant(
            "t5gemma",
            "T5GemmaForConditionalGeneration",
            (("encoder.sliding_window", 8),),
            "encoder-decoder",
        ),
        "right",
    ),
    (
        Variant(
            "llama",
            "LlamaForCausalLM",
            (
                ("rope_parameters", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
                ("max_position_embeddings", 16),  # fewer than the rows
            ),
        ),
        "refused: rope_type 'dynamic' depends on the largest position on this rank",
    ),
    # Layers of SAM choose the class of their attention by its name.
    (
        Variant("deepseek_vl_hybrid", "DeepseekVLHybridForConditionalGeneration", (), MIXED),
        "has layers of images with a class of attention for each attn_implementation",
    ),
    # Its config has the id of padding in the part of texts.
    (Variant("kosmos-2.5", "Kosmos2_5ForConditionalGeneration", (), MIXED), "right"),
    # Its layers call their first argument hidden_state.
    (Variant("patchtst", "PatchTSTForRegression"), "refused: PatchTSTEncoderLayer has hidden"),
    # Each rank has the whole image, and some of its tokens.
    (Variant("llava", "LlavaForConditionalGeneration", (), MIXED, IMAGE), "refused: Image"),
    # Tokens are (batch, choices, rows).
    (Variant("bert", "BertForMultipleChoice"), "right"),
    (Variant("albert", "AlbertForMultipleChoice"), "(its output logits of shape"),
]


@pytest.mark.gloo
@on_ranks(2)
def test_options_and_heads_are_right_or_refused() -> None:
    for variant, expected in VARIANTS:
        found = of_all_ranks(variant, None)
        assert expected in str(found), (variant, found)


def test_the_table_of_options_has_all_heads_and_nothing_wrong() -> None:
    rows = rows_of(OUTCOMES.read_text())
    assert not [key for key, word in rows.items() if word.startswith(("WRONG", "FAILS"))]
    tried = {name for name, option in rows if option == "default"}
    assert not {each.model_class for each in listed("MODEL_FOR_")} - tried
    page = (DOCS / "model_options.md").read_text()
    assert page == page_of(rows)
    counts = re.search(r"Of \d+ classes, .* tried\.", page)
    assert counts and counts[0] in (DOCS / "hugging_face.md").read_text().replace("\n", " ")


def test_the_table_of_models_has_all_and_nothing_wrong() -> None:
    page = (DOCS / "models.md").read_text()
    assert "WRONG" not in page and "fails" not in page
    assert page == "\n".join(table(outcomes_of(page)))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("part", range(PARTS))
def test_the_table_of_models(ranks: Pools, part: int) -> None:
    """The page has what becomes of each; `tests/hf_architectures.py` says how it is made again."""
    pool = ranks(2)
    said = outcomes_of((DOCS / "models.md").read_text())
    for architecture in architectures()[part::PARTS]:
        # One model at a time: the limit on an answer is then the same however many there are.
        assert pool.run(outcome, architecture, timeout=1000)[0] == said[architecture], architecture
