"""Tiny trainings by transformers' Trainer, in one process and on ranks, and their results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_attn.integrations.transformers import register
from ring_attn.testing import noisy_runs
from tests.bounds import assert_close, named
from tests.hf_models import VOCAB, all_in_float64, make_model
from tests.integration.commands import as_torchrun

NUM_STEPS = 4

# Noisy runs of a training, which takes longer than one step of a model.
NUM_NOISY = 8


def texts(num: int) -> list[dict[str, Tensor]]:
    """Token ids of different lengths, some of them odd."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(13, 47, (num,), generator=generator).tolist()
    return [{"input_ids": torch.randint(VOCAB, (n,), generator=generator)} for n in lengths]


def padded(rows: list[dict[str, Tensor]], without_labels: slice = slice(2, 5)) -> dict[str, Tensor]:
    ids = [row["input_ids"] for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(x) for x in ids], batch_first=True),
        "labels": pad(ids, batch_first=True, padding_value=-100),
    }
    batch["labels"][:, without_labels] = -100
    return batch


COLLATORS: dict[str, Callable[..., Any]] = {
    "padded": padded,
    "padded, all labels": partial(padded, without_labels=slice(0)),
    "packed": transformers.DataCollatorWithFlattening(),
    "packed, with cu_seq_lens": transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True
    ),
}


T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """Results of a training: logged numbers by name, the first gradients, the final weights."""

    logged: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class Notes(transformers.TrainerCallback):
    """Keeps the clipped gradients of the first step."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        if not self.gradients:
            self.gradients = {
                n: whole(p.grad).clone() for n, p in model.named_parameters() if p.requires_grad
            }


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x.detach()


def arguments(out: str, made: Any = transformers.TrainingArguments, **options: Any) -> Any:
    options = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": NUM_STEPS,
        "learning_rate": 0.1,
        "optim": "sgd",
        "max_grad_norm": 0.5,  # clips
        "save_strategy": "no",
        "logging_steps": 1,
    } | options
    return made(out, use_cpu=True, report_to=[], disable_tqdm=True, **options)


# How many texts to train on and to evaluate; the last batches of both are short.
TEXTS = (11, 7)
EVEN_TEXTS = (12, 6)


def make_trainer(
    model: Any,
    args: Any,
    trainer_class: Any,
    collate: str,
    num: tuple[int, int] = TEXTS,
    **options: Any,
) -> Any:
    data = {"train_dataset": texts(num[0]), "eval_dataset": texts(num[1])}
    return trainer_class(model=model, args=args, data_collator=COLLATORS[collate], **data | options)


LOGGED = ("loss", "grad_norm", "eval_loss")


def trained(trainer: Any, logged: tuple[str, ...] = LOGGED, **options: Any) -> Run:
    notes = Notes()
    trainer.add_callback(notes)
    before = trainer.evaluate()
    trainer.train(**options)
    trainer.evaluate()
    history = [before, *trainer.state.log_history]
    numbers = {name: [entry[name] for entry in history if name in entry] for name in logged}
    weights = {name: whole(p).clone() for name, p in trainer.model.named_parameters()}
    return Run({n: torch.tensor(x) for n, x in numbers.items()}, notes.gradients, weights)


# Maps a trainer class to the class to train with; in one process, to the same class.
Of = Callable[[Any], Any]


def usual(model: Any, out: Path, of: Of, collate: str = "padded", **options: Any) -> Run:
    """Trains with accumulation, clipping, evaluation before and after, and odd lengths."""
    args = arguments(str(out), **options)
    return trained(make_trainer(model, args, of(transformers.Trainer), collate))


def with_adapters(model: Any, out: Path, of: Of, **options: Any) -> Run:
    """Trains LoRA adapters, whose second factors begin at random instead of at zero."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
    generator = torch.Generator().manual_seed(9)
    for name, p in adapted.named_parameters():
        if p.requires_grad:
            p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
        else:
            assert "lora" not in name
    return usual(adapted, out, of, **options)


def round_to_4_bits(model: Any) -> None:
    """Gives weights the values that bitsandbytes keeps of them."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for module in model.model.modules():
        if isinstance(module, torch.nn.Linear):
            kept = quantize_4bit(module.weight.data, quant_type="nf4")
            module.weight.data = dequantize_4bit(*kept)


def with_quantised_weights(model: Any, out: Path, of: Of) -> Run:
    """Trains adapters over weights in 4 bits; in one process, over a model rounded so before.

    Before the first step and after each the model is evaluated: on some CPUs bitsandbytes' layers
    lose their gradients then, unless the trainer prevents it.
    """
    from peft import prepare_model_for_kbit_training

    if dist.is_initialized():
        model.save_pretrained(out / "model")  # rank 0 does
        dist.barrier()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            out / "model",
            attn_implementation="ring_attn",
            dtype=torch.float32,
            quantization_config=transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
            ),
        )
        again = {"use_reentrant": False}  # DDP and transformers' default exclude each other
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=again)
    run = with_adapters(model, out, of, eval_strategy="steps", eval_steps=1)
    return replace(run, weights={n: x for n, x in run.weights.items() if "lora" in n})


def in_one_process(
    make: Callable[[Any, Path], T], out: Path, model: Any = None
) -> tuple[T, list[T]]:
    """Results of make(model, folder) in one process: in float64, and in noisy runs."""
    model = make_model("llama", "sdpa") if model is None else model
    exact, default = copy.deepcopy(model), torch.get_default_dtype()
    with all_in_float64():
        torch.set_default_dtype(torch.float64)
        try:
            oracle = make(exact.double(), out / "float64")
        finally:
            torch.set_default_dtype(default)
    noisy = noisy_runs(lambda: make(copy.deepcopy(model), out / "float32"), NUM_NOISY)
    return oracle, noisy


def assert_same_run(got: Run, oracle: Run, noisy: Sequence[Run]) -> None:
    for part in ("logged", "gradients", "weights"):
        results, exact = getattr(got, part), getattr(oracle, part)
        runs = [getattr(run, part) for run in noisy]
        assert results.keys() == exact.keys() and results
        for name, x in results.items():
            assert x.numel()
            assert_close(f"{part} {name}", x, exact[name].double(), named(runs, name))


@contextmanager
def split_model(layout: str = "zigzag", dp: int = 1, family: str = "llama") -> Iterator[Any]:
    """A model on split sequences, in `dp` groups that each have their own batches."""
    mesh = init_device_mesh("cpu", (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "cp"))
    with as_torchrun(), register(group=mesh["cp"], layout=layout):
        yield make_model(family, "ring_attn")
