"""Trainers on split sequences have the losses, gradients, checkpoints of one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers.distributed import DistributedConfig

from ring_attn import ring_attention
from ring_attn.integrations.trainer import split_sequence
from ring_attn.integrations.trainer import trainer as integration
from ring_attn.integrations.transformers import register
from tests.bounds import assert_close
from tests.distributed.pool import Ended, Pools, ended, on_ranks
from tests.hf_models import DECODERS, HYBRIDS, VOCAB, make_model, yardstick
from tests.hf_own_rows import FAMILIES
from tests.hf_own_rows import make as make_own_rows
from tests.hf_trainers import (
    EVEN_TEXTS,
    LOGGED,
    NUM_STEPS,
    Of,
    Run,
    arguments,
    assert_same_run,
    in_one_process,
    make_trainer,
    padded,
    round_to_4_bits,
    split_model,
    texts,
    trained,
    usual,
    with_adapters,
    with_quantised_weights,
)
from tests.integration.commands import as_torchrun
from tests.refusals import refused


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainers")


def in_documents(model: Any, out: Path, of: Of) -> Run:
    """Trains on packed texts; in one process on padded ones, where Mamba loses boundaries."""
    packed = dist.is_initialized()
    return usual(model, out, of, "packed, with cu_seq_lens" if packed else "padded, all labels")


def in_groups(model: Any, out: Path, of: Of) -> Run:
    """All groups of two ranks together train on batches of two texts and evaluate six."""
    dp = dist.get_world_size() // 2 if dist.is_initialized() else 1
    batch = {"per_device_train_batch_size": 2 // dp, "per_device_eval_batch_size": 6 // dp}
    args = arguments(str(out), **batch)
    return trained(make_trainer(model, args, of(transformers.Trainer), "padded", EVEN_TEXTS))


def squared_and_right(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    """A loss of a whole batch that is no sum over rows: each text's loss is squared."""
    logits = outputs.logits[:, :-1].transpose(1, 2)
    terms = cross_entropy(logits, labels[:, 1:], reduction="none")
    return terms.sum(1).square().sum() / num_items_in_batch


def with_own_loss_function(model: Any, out: Path, of: Of) -> Run:
    args, given = arguments(str(out)), {"compute_loss_func": squared_and_right}
    return trained(make_trainer(model, args, of(transformers.Trainer), "padded", **given))


def of_masked_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    """The loss of masked language models, which does not shift labels."""
    logits = outputs.logits.transpose(1, 2)
    return cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def with_masked_tokens(model: Any, out: Path, of: Of) -> Run:
    args, given = arguments(str(out)), {"compute_loss_func": of_masked_tokens}
    return trained(make_trainer(model, args, of(transformers.Trainer), "padded", **given))


def with_liger(model: Any, out: Path, of: Of) -> Run:
    """Trains by Liger's fused projection and loss, interpreted; in one process without it."""
    others = ("cross_entropy", "rope", "rms_norm", "swiglu")
    kernels = {"fused_linear_cross_entropy": True} | dict.fromkeys(others, False)
    liger = {"use_liger_kernel": True, "liger_kernel_config": kernels}
    return usual(model, out, of, **(liger if dist.is_initialized() else {}))


@dataclass
class Stream(torch.utils.data.IterableDataset):
    """Texts in a fixed order, as from a file; perhaps without the first."""

    start: int = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from texts(12)[self.start :]


def streamed(model: Any, out: Path, of: Of) -> Run:
    args, data = arguments(str(out)), {"train_dataset": Stream()}
    return trained(make_trainer(model, args, of(transformers.Trainer), "packed", **data))


TRL_LOGGED = (*LOGGED, "entropy", "mean_token_accuracy", "eval_entropy", "num_tokens")


def supervised(model: Any, out: Path, of: Of, **options: Any) -> Run:
    """Trains with TRL's trainer; its tokenizer knows w0, w1, ...

    TRL reports statistics of batches, which may have fewer samples than the 3 ranks.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    vocab = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="w0")),
        pad_token="w0",
        eos_token="w1",
    )
    rows = [[{"input_ids": x["input_ids"].tolist()} for x in texts(n)] for n in (31, 7)]
    half = {"bf16": False, "gradient_checkpointing": False}  # TRL's defaults are True
    trainer = of(SFTTrainer)(
        model=model,
        args=arguments(str(out), SFTConfig, **{"max_length": 64} | half | options),
        train_dataset=Dataset.from_list(rows[0]),
        eval_dataset=Dataset.from_list(rows[1]),
        processing_class=tokenizer,
    )
    return trained(trainer, TRL_LOGGED)


class Training(NamedTuple):
    """A training of a model; `where` holds the options of `split_model`."""

    run: Callable[..., Run]
    world_size: int = 2
    slow: bool = True
    where: dict[str, Any] = {}


TRAININGS = {
    "padded": Training(usual),
    "documents": Training(partial(usual, collate="packed, with cu_seq_lens")),
    "llama4": Training(usual, where={"family": "llama4"}),
    "bamba, three ranks": Training(usual, 3, where={"family": "bamba"}),
    "bamba, documents": Training(in_documents, where={"family": "bamba"}),
    "three ranks": Training(usual, 3),
    "computed again": Training(
        partial(usual, collate="packed", gradient_checkpointing=True),
        3,
        where={"layout": "striped"},
    ),
    "smoothed": Training(partial(usual, label_smoothing_factor=0.3)),
    "own loss": Training(with_own_loss_function),
    "own loss, three ranks": Training(with_own_loss_function, 3),
    "smoothed, three ranks": Training(partial(usual, label_smoothing_factor=0.3), 3),
    "adapters": Training(with_adapters),
    "adapters, three ranks": Training(with_adapters, 3),
    "quantised": Training(with_quantised_weights),
    "liger": Training(with_liger),
    "liger, three ranks": Training(with_liger, 3),
    "groups": Training(in_groups, 4, where={"layout": "contiguous", "dp": 2}),
    "a stream": Training(streamed),
    # With 11 and 7 texts, all labels count, not all but the first of each text.
    **{
        family: Training(partial(usual, collate="padded, all labels"), where={"family": family})
        for family in DECODERS
    },
    "masked tokens": Training(with_masked_tokens, where={"family": "bert"}),
    "trl packed": Training(partial(supervised, packing=True)),
    "trl smoothed": Training(partial(supervised, packing=True, label_smoothing_factor=0.3)),
    "trl padded": Training(partial(supervised, packing=False), 3),
    "trl padding-free": Training(partial(supervised, padding_free=True, max_length=None), 3),
    **{family: Training(usual, where={"family": family}) for family in HYBRIDS},
}


def on_split(name: str, out: Path) -> Run:
    training = TRAININGS[name]
    with split_model(**training.where) as model:
        return training.run(model, out, split_sequence)


@lru_cache
def one_process(name: str, out: Path) -> tuple[Run, list[Run]]:
    """The training in one process: in float64, and in noisy runs."""
    training = TRAININGS[name]
    model = yardstick(training.where.get("family", "llama"))
    if training.run is with_quantised_weights:
        round_to_4_bits(model)
    return in_one_process(lambda model, to: training.run(model, to, lambda one: one), out, model)


@pytest.mark.gloo  # test_checkpoints and test_fsdp2 train on devices with streams, too
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if training.slow else [])
        for name, training in TRAININGS.items()
    ],
)
def test_training_as_in_one_process(ranks: Pools, out: Path, name: str) -> None:
    oracle, noisy = one_process(name, out)
    assert len(oracle.logged["loss"]) == NUM_STEPS and len(oracle.logged["eval_loss"]) >= 2
    assert bool((oracle.logged["grad_norm"] > 0.5).all())
    for got in ranks(TRAININGS[name].world_size).run(on_split, name, out / name):
        assert_same_run(got, oracle, noisy)


SAMPLES = 8


def samples_of(family: str) -> list[dict[str, Any]]:
    """Samples of a model that numbers its own rows, each with other values."""
    batch = FAMILIES[family].inputs()
    samples = []
    for index in range(SAMPLES):
        sample = {name: x[index % len(x)] for name, x in batch.items()}
        scale = 1 + index / 3
        samples.append({n: x * scale if x.is_floating_point() else x for n, x in sample.items()})
    return samples


def of_own_rows(model: Any, out: Path, of: Of, samples: list[dict[str, Tensor]]) -> Run:
    """Trains on whole batches, evaluates before and after, and gathers predictions."""
    dtype = model.dtype
    data = [
        {name: x.to(dtype) if x.is_floating_point() else x for name, x in sample.items()}
        for sample in samples
    ]
    args = arguments(str(out), learning_rate=0.01, per_device_eval_batch_size=2)
    trainer = of(transformers.Trainer)(
        model=model, args=args, train_dataset=data, eval_dataset=data[:5]
    )
    found = trainer.predict(data[:5]).predictions
    run = trained(trainer)
    run.logged["predicted"] = torch.tensor(found[0] if isinstance(found, tuple) else found)
    return run


def own_rows_on_ranks(family: str, out: Path) -> Run:
    with as_torchrun(), register():
        model = make_own_rows(family, "ring_attn")
        return of_own_rows(model, out, split_sequence, samples_of(family))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("family", ["vit", "bart", "bart_padded", "wav2vec2"])
def test_models_with_own_rows_as_in_one_process(ranks: Pools, out: Path, family: str) -> None:
    """Classification divides by the samples of all micro-batches, BART by its own labels.

    CTC is a loss of all frames of each sample; logits of padding are predictions, too.
    """
    samples = samples_of(family)
    oracle, noisy = in_one_process(
        lambda model, to: of_own_rows(model, to, lambda one: one, samples),
        out / family,
        make_own_rows(family, "eager"),
    )
    for got in ranks(2).run(own_rows_on_ranks, family, out / f"{family} split"):
        assert_same_run(got, oracle, noisy)


@pytest.mark.slow
@on_ranks(4)
def test_several_groups_of_a_model_with_own_rows_are_refused(out: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    with as_torchrun(), register(group=mesh["cp"]):
        model = make_own_rows("bart", "ring_attn")
        with refused(NotImplementedError, "BartForConditionalGeneration|groups of 2 of 4 ranks"):
            of_own_rows(model, out, split_sequence, samples_of("bart"))


@contextmanager
def split_trainer(out: Path, **options: Any) -> Iterator[Any]:
    with split_model() as model:
        trainer_class = split_sequence(transformers.Trainer)
        yield make_trainer(model, arguments(str(out), **options), trainer_class, "padded")


def saved_and_resumed(out: Path) -> tuple[Run, Run]:
    """A run that saves checkpoints, and a run resumed from its middle."""
    saving = {"save_strategy": "steps", "save_steps": NUM_STEPS // 2}
    found = []
    for checkpoint in (None, str(out / f"checkpoint-{NUM_STEPS // 2}")):
        with split_trainer(out, **saving) as trainer:
            found.append(trained(trainer, resume_from_checkpoint=checkpoint))
    return found[0], found[1]


@pytest.mark.slow
def test_checkpoints(ranks: Pools, out: Path) -> None:
    """A checkpoint equals that of one process; a run resumed from it ends with the same bits."""
    oracle, noisy = one_process("padded", out)
    for uninterrupted, resumed in ranks(2).run(saved_and_resumed, out / "saved"):
        assert_same_run(uninterrupted, oracle, noisy)
        for name, x in uninterrupted.weights.items():
            assert torch.equal(x, resumed.weights[name])
        for name in ("loss", "grad_norm"):
            assert torch.equal(uninterrupted.logged[name], resumed.logged[name])
        saved = load_file(out / "saved" / f"checkpoint-{NUM_STEPS}" / "model.safetensors")
        assert all(torch.equal(x, uninterrupted.weights[name]) for name, x in saved.items())


@on_ranks(2)
def test_ranks_that_do_not_split_the_same_are_refused(out: Path) -> None:
    with split_trainer(out) as trainer:
        trainer.train_dataset = Stream(dist.get_rank())
        end = ended(trainer.train)
    assert end.error is ValueError and "ranks 0 and 1" in end.text


class Differs(transformers.Trainer):
    """The last call of a step differs on rank 1."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        x, scale = torch.ones(1, 4, 2, 8), 1.0 + dist.get_rank()
        group = self.ring.group  # type: ignore[attr-defined]
        ring_attention(x, x, x, group=group, softmax_scale=scale)
        return loss


def updated(out: Path) -> tuple[Ended, bool]:
    """How training ends where calls differ, and whether the optimizer has changed a weight."""
    with split_model() as model:
        before = copy.deepcopy(model.state_dict())
        args = arguments(str(out), gradient_accumulation_steps=1)
        end = ended(make_trainer(model, args, split_sequence(Differs), "padded").train)
        after = model.state_dict()
        return end, any(not torch.equal(x, after[name]) for name, x in before.items())


def test_calls_are_compared_before_the_optimizer(fresh_ranks: Any, out: Path) -> None:
    """As on NCCL, where a call raises what an earlier one has met."""
    for end, changed in fresh_ranks(2, queued=True).run(updated, out / "differs"):
        assert end.error is RuntimeError and "another call" in end.text, end
        assert not changed


@pytest.mark.slow
@on_ranks(3)
def test_a_group_must_be_neighbours() -> None:
    """Refuses ranks 0 and 2 of 3: they are not adjacent, and 2 does not divide 3."""
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        with as_torchrun(), register(group=group), refused(ValueError, "[0, 2]"):
            integration.TrainerRing.of(mock.Mock(model=make_model("llama", "ring_attn")))


def share_right(predicted: Any) -> dict[str, float]:
    """How many next tokens are predicted, and a sum in which each position counts differently."""
    targets, found = predicted.label_ids[:, 1:], predicted.predictions[:, :-1]
    counted, places = targets != -100, np.arange(targets.size).reshape(targets.shape)
    return {
        "right": float((found == targets)[counted].mean()),
        "placed": float((found * places)[counted].sum()),
    }


def best_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    assert logits.shape[:2] == labels.shape
    return logits.argmax(-1)


def evaluated(model: Any, out: Path, of: Of, dp: int) -> tuple[dict[str, float], np.ndarray]:
    """Metrics of seven texts, and all logits of these, as a Trainer gathers them."""
    args, data = arguments(str(out), per_device_eval_batch_size=4 // dp), texts(7)
    with_metrics: Any = {
        "compute_metrics": share_right,
        "preprocess_logits_for_metrics": best_tokens,
    }
    metrics = make_trainer(
        model, args, of(transformers.Trainer), "padded", **with_metrics
    ).evaluate()
    plain = make_trainer(model, args, of(transformers.Trainer), "padded")
    found = plain.predict(data)
    assert plain.preprocess_logits_for_metrics is None and found.label_ids.shape[0] == 7
    return {name: metrics[f"eval_{name}"] for name in ("right", "placed")}, found.predictions


def evaluated_on_ranks(out: Path, dp: int) -> Any:
    with split_model(dp=dp) as model:
        return evaluated(model, out, split_sequence, dp)


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_metrics_and_predictions_are_those_of_one_process(ranks: Pools, out: Path, dp: int) -> None:
    model = yardstick("llama")
    (metrics, exact), noisy = in_one_process(
        lambda model, to: evaluated(model, to, lambda one: one, 1), out / "plain", model
    )
    rows = padded(texts(7))["attention_mask"].bool()
    for got_metrics, got in ranks(2 * dp).run(evaluated_on_ranks, out / "split", dp):
        assert got_metrics == metrics
        assert got.shape == exact.shape == (*rows.shape, VOCAB)
        right, *runs = (torch.from_numpy(x)[rows] for x in (exact, *(run[1] for run in noisy)))
        assert_close("logits", torch.from_numpy(got)[rows], right, runs)


@on_ranks(2)
def test_predictions_without_labels_or_rows_are_refused(out: Path) -> None:
    batch = padded(texts(2))
    with split_trainer(out) as trainer:
        with refused(ValueError, "labels"):
            trainer.prediction_step(trainer.model, dict(batch, labels=None), True)
        trainer.own_preprocess = lambda logits, labels: logits.mean(1)
        with refused(NotImplementedError, "row for each token|ignore_keys"):
            trainer.prediction_step(trainer.model, batch, False)


class Shifts(transformers.Trainer):
    """A loss of one's own, from labels that it shifts."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = model(**{k: x for k, x in inputs.items() if k != "labels"}).logits
        loss = cross_entropy(logits[0, :-1], inputs["labels"][0, 1:])
        return (loss, {}) if return_outputs else loss


class AddsNothing(transformers.Trainer):
    """A loss that is only looked at."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options)


def with_z_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        out = forward(*args, **options)
        out.loss = out.loss + 1e-4 * out.logits.logsumexp(-1).square().mean()
        return out

    return call


def with_own_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, labels: Tensor, **options: Any) -> Any:
        out = forward(*args, **options)
        out.loss = cross_entropy(out.logits[0, :-1], labels[0, 1:])
        return out

    return call


@on_ranks(2)
def test_losses_that_cannot_be_split_are_refused_in_the_first_step(out: Path) -> None:
    """In training and in evaluation; a compute_loss that changes nothing is taken."""
    for wrong in (Shifts, with_z_loss, with_own_loss, AddsNothing):
        for first in ("train", "evaluate"):
            with split_model() as model:
                trainer_class: Any = transformers.Trainer
                if isinstance(wrong, type):
                    trainer_class = wrong
                else:
                    model.forward = functools.wraps(model.forward)(wrong(model.forward))
                made = split_sequence(trainer_class)
                trainer = make_trainer(model, arguments(str(out), max_steps=1), made, "padded")
                end = ended(getattr(trainer, first))
            if wrong is AddsNothing:
                assert end.error is None, end
            else:
                assert end.error is NotImplementedError and "cross-entropy" in end.text, end


def fully_sharded(out: Path) -> tuple[Run, set[type]]:
    """Trains with FSDP2 as loaded by transformers; accelerate has no FSDP2 on CPUs."""
    with as_torchrun(), register(layout="zigzag"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            out / "weights",
            attn_implementation="ring_attn",
            distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()),
        )
        kinds = {type(p.data) for p in model.parameters()}
        trainer_class = split_sequence(transformers.Trainer)
        trainer = make_trainer(model, arguments(str(out)), trainer_class, "padded")
        run = trained(trainer)
        trainer.save_model(str(out / "saved"))
        return run, kinds


@pytest.mark.slow
def test_fsdp2(ranks: Pools, out: Path) -> None:
    oracle, noisy = one_process("padded", out)
    make_model("llama", "sdpa").save_pretrained(out / "fsdp2" / "weights")
    for got, kinds in ranks(3).run(fully_sharded, out / "fsdp2"):
        assert kinds == {DTensor}
        assert_same_run(got, oracle, noisy)
        saved = load_file(out / "fsdp2" / "saved" / "model.safetensors")
        assert all(torch.equal(x, got.weights[name]) for name, x in saved.items())
