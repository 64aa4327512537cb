"""Batches of a trainer on split sequences, and the trainers and batches that are refused."""

from __future__ import annotations

import sys
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate import ParallelismConfig
from torch import Tensor

from ring_attn.integrations.trainer import split_sequence
from ring_attn.integrations.trainer import trainer as integration
from ring_attn.integrations.trainer.batches import as_documents, fingerprint
from ring_attn.integrations.transformers import register
from tests.hf_models import make_model
from tests.hf_trainers import arguments, make_trainer
from tests.refusals import refused


def batch_of(**tensors: Any) -> dict[str, Tensor]:
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    return {"input_ids": ids, "labels": ids.clone()} | {
        name: torch.tensor(x) for name, x in tensors.items()
    }


@pytest.mark.parametrize("more", [{}, {"position_ids": [[0, 1, 2]]}])
def test_a_single_row_that_is_left_of_a_batch_has_no_documents(more: dict[str, Any]) -> None:
    """tests/integration/test_trainers.py has batches of documents."""
    left = {"attention_mask": [[1, 1, 1], [0, 0, 0]], "labels": [[5, 6, 7], [-100] * 3]}
    rows, others, _ = as_documents(batch_of(**left, **more))
    assert rows["input_ids"].tolist() == [[5, 6, 7]] and not others
    assert rows["labels"].tolist() == [[-100, 6, 7]]


MASK = [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        ({"attention_mask": [[1, 1, 1], [1, 0, 1]]}, NotImplementedError, "between tokens"),
        ({"attention_mask": [[1, 1, 1], [0, 1, 1]]}, ValueError, "hides tokens|first token"),
        ({"attention_mask": [[[1]]]}, NotImplementedError, "other masks"),
        ({"attention_mask": MASK}, ValueError, "labels must be -100"),
        ({"cu_seq_lens_q": [0, 3]}, ValueError, "one row without padding, got 2"),
        ({"pixel_values": [[1.0]]}, NotImplementedError, "pixel_values"),
        ({"position_ids": [[0, 1]]}, ValueError, "position_ids must be"),
        ({"labels": [0, 1]}, ValueError, "labels must be"),
    ],
)
def test_batches_that_are_refused(
    tensors: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        as_documents(batch_of(**tensors))


def test_a_batch_that_leaves_a_rank_without_rows_is_refused() -> None:
    ring = integration.TrainerRing(mock.Mock(), 0, 4, "zigzag", mock.Mock())
    ring.shard(batch_of())
    with pytest.raises(ValueError, match="each of 4 ranks, but a batch of 3 tokens"):
        ring.shard({name: x[:1] for name, x in batch_of().items()})


def test_a_fingerprint_knows_every_tensor() -> None:
    batches = [
        [batch_of()],
        [batch_of(), batch_of()],
        [batch_of(labels=[[6, 5, 7], [8, 9, 0]])],
        [batch_of(position_ids=[[0, 1, 2]])],
        [batch_of(input_ids=[[5, 6, 7, 8, 9, 0]])],
        [batch_of(inputs_embeds=[[0.5, 0.25]])],
        [batch_of(inputs_embeds=[[0.25, 0.5]])],
    ]
    prints, again = (
        [int(fingerprint(batch, torch.device("cpu"))) for batch in batches] for _ in range(2)
    )
    assert len(set(prints)) == len(prints) and prints == again


NOT_BUILT = NotImplementedError


@pytest.mark.parametrize(
    ("family", "name", "options", "error", "text"),
    [
        ("bert", "ring_attn", {}, NOT_BUILT, "ForMaskedLMLoss.*pass compute_loss_func"),
        ("llama", "sdpa", {}, ValueError, "'sdpa'"),
        ("llama", "ring_attn", {}, RuntimeError, "no process group"),  # nothing else is wrong
    ],
)
def test_a_trainer_is_refused(
    tmp_path: Path,
    family: str,
    name: str,
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    with register(), pytest.raises(error, match=text):
        model, args = make_model(family, name), arguments(str(tmp_path))
        make_trainer(model, args, split_sequence(transformers.Trainer), "padded", **options)


@pytest.mark.parametrize("wrong", [transformers.Trainer.train, torch.nn.Module])
def test_a_class_that_is_no_trainer_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="trainer_class"):
        split_sequence(wrong)


def test_trainers_of_several_texts_are_refused() -> None:
    from trl import DPOTrainer

    with refused(NotImplementedError, "DPOTrainer|only SFTTrainer"):
        split_sequence(DPOTrainer)


def test_a_class_that_splits_sequences_already_is_taken() -> None:
    once = split_sequence(transformers.Trainer)
    assert split_sequence(once) is once


def test_without_accelerate_the_extra_is_named() -> None:
    missing = mock.patch.dict(sys.modules, {"accelerate": None})
    with missing, pytest.raises(ImportError, match=r"ring-attn\[trainer\]"):
        split_sequence(transformers.Trainer)


PARALLEL = "accelerator.state.parallelism_config"


@pytest.mark.parametrize(
    ("attribute", "wrong", "error", "text"),
    [
        (PARALLEL, ParallelismConfig(cp_size=2), ValueError, "cp_size=2"),
        (PARALLEL, ParallelismConfig(sp_size=2), ValueError, "sp_size=2"),
        (PARALLEL, ParallelismConfig(tp_size=2), NOT_BUILT, "tp_size"),
        ("is_deepspeed_enabled", True, NOT_BUILT, "DeepSpeed"),
        ("args.neftune_noise_alpha", 5.0, NOT_BUILT, "neftune"),
        ("args.include_num_input_tokens_seen", "all", NOT_BUILT, "include_num_input_tokens_seen"),
        ("args.train_sampling_strategy", "batch_rebalance", NOT_BUILT, "batch_rebalance"),
        ("args.accelerator_config.dispatch_batches", True, NOT_BUILT, "dispatch_batches"),
        ("args.average_tokens_across_devices", False, NOT_BUILT, "average_tokens"),
        ("model_accepts_loss_kwargs", False, NOT_BUILT, "num_items_in_batch"),
        ("model.loss_type", "ForSequenceClassification", NOT_BUILT, "not a sum over tokens"),
        ("model.loss_type", "ForMaskedLM", NOT_BUILT, "pass compute_loss_func"),
    ],
)
def test_surroundings_that_are_refused(
    tmp_path: Path, attribute: str, wrong: Any, error: type[Exception], text: str
) -> None:
    args = arguments(str(tmp_path))
    trainer = make_trainer(make_model("llama", "sdpa"), args, transformers.Trainer, "padded")
    owner, _, name = attribute.rpartition(".")
    with mock.patch.object(type(args), "world_size", 2):
        integration.check_trainer(trainer)
        holder = attrgetter(owner)(trainer) if owner else trainer
        with mock.patch.object(holder, name, wrong), pytest.raises(error, match=text):
            integration.check_trainer(trainer)


@pytest.mark.parametrize(
    "loss", [{"args.label_smoothing_factor": 0.1}, {"compute_loss_func": print}]
)
def test_liger_does_not_go_with_losses_of_logits(tmp_path: Path, loss: dict[str, Any]) -> None:
    args = arguments(str(tmp_path))
    trainer = make_trainer(make_model("llama", "sdpa"), args, transformers.Trainer, "padded")
    ((attribute, value),) = loss.items()
    owner, _, name = attribute.rpartition(".")
    with mock.patch.object(attrgetter(owner)(trainer) if owner else trainer, name, value):
        integration.check_trainer(trainer)
        with mock.patch.object(args, "use_liger_kernel", True), refused(NOT_BUILT, "use_liger"):
            integration.check_trainer(trainer)


class FourBit(torch.nn.Linear):
    """As bitsandbytes' Linear4bit on a CPU with AVX512-BF16."""

    support_avx512bf16_for_cpu = True

    def forward(self, x: Tensor) -> Tensor:
        if self.support_avx512bf16_for_cpu and not self.training:
            self.weight.quant_state = SimpleNamespace(packing_format_for_cpu=True)
        return super().forward(x)


@pytest.mark.parametrize("evaluated", [False, True])
def test_4_bit_weights_that_give_no_gradients_are_avoided_or_refused(evaluated: bool) -> None:
    model = torch.nn.Sequential(FourBit(2, 2)).eval()
    if evaluated:
        model(torch.ones(2))
        with refused(ValueError, "0 has bitsandbytes|no gradients|load it again"):
            integration.keep_gradients(model)
    for _ in range(2 - 2 * evaluated):
        integration.keep_gradients(model)
        model(torch.ones(2))
