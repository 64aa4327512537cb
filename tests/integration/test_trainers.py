"""Trainers on split sequences: losses, gradients, checkpoints as in one process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from ring_attn.integrations import trainer as integration
from ring_attn.integrations.trainer import split_sequence
from ring_attn.integrations.transformers import register
from tests.distributed.pool import Pools, ended, on_ranks
from tests.hf_models import VOCAB, make_model
from tests.hf_trainers import (
    COLLATORS,
    EVEN_TEXTS,
    LOGGED,
    NUM_STEPS,
    Run,
    arguments,
    as_torchrun,
    assert_same_run,
    make_trainer,
    one_process,
    padded,
    plainly,
    split,
    split_model,
    texts,
    trained,
)
from tests.refusals import refused


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainers")


@pytest.mark.parametrize(
    ("family", "collate"), [*(("llama", one) for one in COLLATORS), ("llama4", "padded")]
)
@pytest.mark.sweep(2)
def test_training_as_in_one_process(ranks: Pools, out: Path, family: str, collate: str) -> None:
    """Accumulation, clipping, evaluation before and after; lengths that 2 does not divide."""
    oracle, plain = one_process(collate, out, family)
    assert len(plain.logged["loss"]) == NUM_STEPS and len(plain.logged["eval_loss"]) == 2
    assert bool((plain.logged["grad_norm"] > 0.5).all())
    for got in ranks(2).run(split, out / "split", collate, "zigzag", {}, family):
        assert_same_run(got, oracle, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collate", "layout", "options"),
    [("padded", "zigzag", {}), ("packed", "striped", {"gradient_checkpointing": True})],
)
def test_three_ranks(
    ranks: Pools, out: Path, collate: str, layout: str, options: dict[str, Any]
) -> None:
    oracle, plain = one_process(collate, out)
    for got in ranks(3).run(split, out / "three", collate, layout, options):
        assert_same_run(got, oracle, plain)


def data_parallel(model: Any, out: Path, trainer_class: Any, dp: int) -> Run:
    """Batches of two texts, and of six to evaluate: of all groups together."""
    batch = {"per_device_train_batch_size": 2 // dp, "per_device_eval_batch_size": 6 // dp}
    args = arguments(str(out), **batch)
    return trained(make_trainer(model, args, trainer_class, "padded", EVEN_TEXTS))


def split_data_parallel(out: Path) -> Run:
    with split_model("contiguous", dp=2) as model:
        return data_parallel(model, out, split_sequence(transformers.Trainer), 2)


@pytest.mark.slow
def test_two_groups_of_two_ranks(ranks: Pools, out: Path) -> None:
    oracle, plain = plainly(
        lambda model, folder: data_parallel(model, folder, transformers.Trainer, 1), out
    )
    for got in ranks(4).run(split_data_parallel, out / "groups"):
        assert_same_run(got, oracle, plain)


def saved_and_resumed(out: Path) -> tuple[Run, Run]:
    """A run that saves, and one that goes on from its middle."""
    saving = {"save_strategy": "steps", "save_steps": NUM_STEPS // 2}
    found = []
    for checkpoint in (None, str(out / f"checkpoint-{NUM_STEPS // 2}")):
        with split_model() as model:
            trainer_class = split_sequence(transformers.Trainer)
            trainer = make_trainer(model, arguments(str(out), **saving), trainer_class, "padded")
            found.append(trained(trainer, resume_from_checkpoint=checkpoint))
    return found[0], found[1]


def test_checkpoints(ranks: Pools, out: Path) -> None:
    """One rank saves what one process would; who goes on from it ends with the same bits."""
    oracle, plain = one_process("padded", out)
    for uninterrupted, resumed in ranks(2).run(saved_and_resumed, out / "saved"):
        assert_same_run(uninterrupted, oracle, plain)
        for name, x in uninterrupted.weights.items():
            assert torch.equal(x, resumed.weights[name])
        for name in ("loss", "grad_norm"):
            assert torch.equal(uninterrupted.logged[name], resumed.logged[name])
        saved = load_file(out / "saved" / f"checkpoint-{NUM_STEPS}" / "model.safetensors")
        assert all(torch.equal(x, uninterrupted.weights[name]) for name, x in saved.items())


class Stream(torch.utils.data.IterableDataset):
    """Texts in one order, as a file gives them."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from texts(12)


def streamed(out: Path) -> Run:
    with split_model() as model:
        return stream(model, out, split_sequence(transformers.Trainer))


def stream(model: Any, out: Path, trainer_class: Any) -> Run:
    args = arguments(str(out))
    return trained(make_trainer(model, args, trainer_class, "packed", train_dataset=Stream()))


def test_a_stream_of_texts(ranks: Pools, out: Path) -> None:
    oracle, plain = plainly(lambda model, to: stream(model, to, transformers.Trainer), out)
    for got in ranks(2).run(streamed, out / "streamed"):
        assert_same_run(got, oracle, plain)


class Twisted(torch.utils.data.IterableDataset):
    """Texts that begin with another one on each rank."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from texts(12)[dist.get_rank() :]


@on_ranks(2)
def test_ranks_that_do_not_split_the_same_are_refused(out: Path) -> None:
    with split_model() as model:
        trainer_class = split_sequence(transformers.Trainer)
        data = {"train_dataset": Twisted()}
        trainer = make_trainer(model, arguments(str(out)), trainer_class, "packed", **data)
        end = ended(trainer.train)
    assert end.error is ValueError and "ranks 0 and 1" in end.text and end.seconds < 20


@pytest.mark.slow
@on_ranks(3)
def test_a_group_must_be_neighbours() -> None:
    """Ranks 0 and 2 of 3: not next to each other, and 2 does not divide 3."""
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        with as_torchrun(), register(group=group), refused(ValueError, "[0, 2]"):
            integration._Ring.of(mock.Mock(model=make_model("llama", "ring_attn")))


@on_ranks(2)
def test_predictions_are_refused(out: Path) -> None:
    with split_model() as model:
        trainer_class = split_sequence(transformers.Trainer)
        trainer = make_trainer(model, arguments(str(out)), trainer_class, "padded")
        unlabelled = dict(padded(texts(2)), labels=None)
        with refused(NotImplementedError, "predict"):
            trainer.predict(texts(4))
        with refused(ValueError, "labels"):
            trainer.prediction_step(trainer.model, unlabelled, True)


TRL_LOGGED = (*LOGGED, "entropy", "mean_token_accuracy", "eval_entropy", "num_tokens")


def supervised(model: Any, out: Path, split: bool, options: dict[str, Any]) -> Run:
    """TRL's trainer; its tokenizer knows w0, w1, ..."""
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
    half = {"bf16": False, "gradient_checkpointing": False}  # TRL's defaults are the other way
    trainer_class = split_sequence(SFTTrainer) if split else SFTTrainer
    trainer = trainer_class(
        model=model,
        args=arguments(str(out), SFTConfig, **{"max_length": 64} | half | options),
        train_dataset=Dataset.from_list(rows[0]),
        eval_dataset=Dataset.from_list(rows[1]),
        processing_class=tokenizer,
    )
    return trained(trainer, TRL_LOGGED)


def split_supervised(out: Path, options: dict[str, Any]) -> Run:
    with split_model() as model:
        return supervised(model, out, True, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {"packing": True}),
        (3, {"packing": False}),
        (3, {"padding_free": True, "max_length": None}),
    ],
    ids=["packed", "padded", "padding-free"],
)
def test_trl(ranks: Pools, out: Path, world_size: int, options: dict[str, Any]) -> None:
    """With its own numbers of the batches, of which 3 ranks may have fewer samples than ranks."""
    oracle, plain = plainly(lambda model, to: supervised(model, to, False, options), out)
    for got in ranks(world_size).run(split_supervised, out / "trl", options):
        assert_same_run(got, oracle, plain)


def fully_sharded(out: Path) -> tuple[Run, set[type]]:
    """FSDP2 as transformers loads it; accelerate has none on CPUs."""
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
    oracle, plain = one_process("padded", out)
    make_model("llama", "sdpa").save_pretrained(out / "fsdp2" / "weights")
    for got, kinds in ranks(3).run(fully_sharded, out / "fsdp2"):
        assert kinds == {DTensor}
        assert_same_run(got, oracle, plain)
        saved = load_file(out / "fsdp2" / "saved" / "model.safetensors")
        assert all(torch.equal(x, got.weights[name]) for name, x in saved.items())


BEFORE = """
    import sys, torch

    class Texts(torch.utils.data.Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, i):
            ids = torch.arange(i, i + 61)
            return {"input_ids": ids, "labels": ids}

    path, data = sys.argv[1], Texts()
"""


@pytest.mark.slow
def test_the_program_of_the_docstring(tmp_path: Path) -> None:
    """Under torchrun, on 3 ranks."""
    text = integration.__doc__ or ""
    start, end = text.index("    from transformers"), text.index("\n\nThe group given")
    program = textwrap.dedent(BEFORE) + textwrap.dedent(text[start:end])
    small = 'TrainingArguments("out", use_cpu=True, learning_rate=1e-3, '
    assert 'TrainingArguments("out", ' in program
    program = program.replace('TrainingArguments("out", ', small).replace("=100", "=6")
    (tmp_path / "train.py").write_text(program)
    make_model("llama", "sdpa").save_pretrained(tmp_path / "model")
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "train.py"]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*run, "model"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    saved, first = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "model"))
    assert saved.keys() == first.keys()
    assert all(not torch.equal(x, first[name]) for name, x in saved.items())
