"""Trainers on split sequences: losses, gradients, checkpoints as in one process."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import ParallelismConfig
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from ring_attn.integrations import trainer as integration
from ring_attn.integrations.trainer import split_sequence
from ring_attn.integrations.transformers import register
from ring_attn.testing import check
from tests.bounds import assert_close
from tests.distributed.pool import Ended, Pools, ended
from tests.hf_models import VOCAB, all_in_float64, make_model

NUM_STEPS = 4


def texts(num: int) -> list[dict[str, Tensor]]:
    """Token ids of different lengths, odd ones among them."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(13, 47, (num,), generator=generator).tolist()
    return [{"input_ids": torch.randint(VOCAB, (n,), generator=generator)} for n in lengths]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch with padding at the end, and some labels that do not count."""
    ids = [row["input_ids"] for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(x) for x in ids], batch_first=True),
        "labels": pad(ids, batch_first=True, padding_value=-100),
    }
    batch["labels"][:, 2:5] = -100
    return batch


COLLATORS: dict[str, Callable[..., Any]] = {
    "padded": padded,
    "packed": transformers.DataCollatorWithFlattening(),
    "packed, with cu_seq_lens": transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True
    ),
}


@dataclass(frozen=True)
class Run:
    """What a training leaves: logged numbers by name, the first gradients, weights at the end."""

    logged: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class Notes(transformers.TrainerCallback):
    """Keeps the gradients of the first step, clipped as they are."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        if not self.gradients:
            self.gradients = {n: whole(p.grad).clone() for n, p in model.named_parameters()}


def whole(x: Any) -> Tensor:
    """A tensor that FSDP2 may have spread."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x.detach()


@contextmanager
def as_torchrun() -> Iterator[None]:
    """The environment that accelerate knows its ranks by."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.dict(os.environ, names | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}):
        yield


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
    """Evaluates, trains, evaluates."""
    notes = Notes()
    trainer.add_callback(notes)
    before = trainer.evaluate()
    trainer.train(**options)
    trainer.evaluate()
    history = [before, *trainer.state.log_history]
    numbers = {name: [entry[name] for entry in history if name in entry] for name in logged}
    weights = {name: whole(p).clone() for name, p in trainer.model.named_parameters()}
    return Run({n: torch.tensor(x) for n, x in numbers.items()}, notes.gradients, weights)


def plainly(make: Callable[[Any, Path], Run], out: Path) -> tuple[Run, Run]:
    """What make(model, folder) gives in one process, in float64 and in float32."""
    model = make_model("llama", "sdpa")
    exact, default = copy.deepcopy(model), torch.get_default_dtype()
    with all_in_float64():
        torch.set_default_dtype(torch.float64)
        try:
            oracle = make(exact.double(), out / "float64")
        finally:
            torch.set_default_dtype(default)
    return oracle, make(model, out / "float32")


def assert_same_run(got: Run, oracle: Run, plain: Run) -> None:
    for part in ("logged", "gradients", "weights"):
        one, two, three = (getattr(run, part) for run in (got, oracle, plain))
        assert one.keys() == two.keys() and one
        for name, x in one.items():
            assert x.numel()
            assert_close(f"{part} {name}", x, two[name].double(), three[name])


@lru_cache
def one_process(collate: str, out: Path) -> tuple[Run, Run]:
    """transformers' own Trainer."""

    def make(model: Any, folder: Path) -> Run:
        args = arguments(str(folder))
        return trained(make_trainer(model, args, transformers.Trainer, collate))

    return plainly(make, out)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainers")


@contextmanager
def split_model(layout: str = "zigzag", dp: int = 1) -> Iterator[Any]:
    """A model on sequences that are split, in `dp` groups with batches of their own."""
    mesh = init_device_mesh("cpu", (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "cp"))
    with as_torchrun(), register(group=mesh["cp"], layout=layout):
        yield make_model("llama", "ring_attn")


def split(out: Path, collate: str, layout: str, options: dict[str, Any]) -> Run:
    """The same on split sequences."""
    with split_model(layout) as model:
        args = arguments(str(out), **options)
        return trained(make_trainer(model, args, split_sequence(transformers.Trainer), collate))


@pytest.mark.parametrize("collate", COLLATORS)
def test_training_as_in_one_process(ranks: Pools, out: Path, collate: str) -> None:
    """Accumulation, clipping, evaluation before and after; lengths that 2 does not divide."""
    oracle, plain = one_process(collate, out)
    assert len(plain.logged["loss"]) == NUM_STEPS and len(plain.logged["eval_loss"]) == 2
    assert bool((plain.logged["grad_norm"] > 0.5).all())
    for got in ranks(2).run(split, out / "split", collate, "zigzag", {}):
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


def forgetful(out: Path) -> Run:
    """With attention that is told of no documents."""

    def as_one(inputs: Any) -> Any:
        rows, others = documents(inputs)
        rows.pop("position_ids", None)
        return rows, {n: x for n, x in others.items() if n not in integration.CUTS}

    documents = integration._as_documents
    with mock.patch.object(integration, "_as_documents", as_one):
        return split(out, "packed", "zigzag", {})


def test_documents_that_see_each_other_are_seen_in_the_loss(ranks: Pools, out: Path) -> None:
    """So the tests above would find it."""
    oracle, plain = one_process("packed", out)
    for wrong in ranks(2).run(forgetful, out / "forgetful"):
        for name in LOGGED:
            x, y, z = (run.logged[name] for run in (wrong, oracle, plain))
            verdict = check(name, x, y.double(), z)
            assert verdict.error > 1000 * verdict.bound, str(verdict)


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
    """Texts in one order, as a file gives them; `twist` makes each rank's its own."""

    def __init__(self, twist: bool = False) -> None:
        self.twist = twist

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows = texts(12)
        yield from rows[dist.get_rank() :] if self.twist else rows


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


def other_batches(out: Path) -> Ended:
    with split_model() as model:
        trainer_class = split_sequence(transformers.Trainer)
        data = {"train_dataset": Stream(twist=True)}
        trainer = make_trainer(model, arguments(str(out)), trainer_class, "packed", **data)
        return ended(trainer.train)


def wrong_group() -> Ended:
    """Ranks 0 and 2 of 3: not next to each other, and 2 does not divide 3."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return Ended(None, "", 0.0, True)
    with as_torchrun(), register(group=group):
        return ended(
            lambda: integration._Ring.of(mock.Mock(model=make_model("llama", "ring_attn")))
        )


def test_ranks_that_do_not_split_the_same_are_refused(ranks: Pools, out: Path) -> None:
    for end in ranks(2).run(other_batches, out / "other"):
        assert end.error is ValueError and "ranks 0 and 1" in end.text
        assert end.seconds < 20


@pytest.mark.slow
def test_a_group_must_be_neighbours(ranks: Pools) -> None:
    for end in ranks(3).run(wrong_group)[::2]:
        assert end.error is ValueError and "[0, 2]" in end.text


def batch_of(**tensors: Any) -> dict[str, Tensor]:
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    return {"input_ids": ids, "labels": ids.clone()} | {
        name: torch.tensor(x) for name, x in tensors.items()
    }


@pytest.mark.parametrize(
    ("tensors", "ids", "labels", "cuts"),
    [
        ({}, [5, 6, 7, 8, 9, 0], [-100, 6, 7, -100, 9, 0], [0, 3, 6]),
        (
            {"attention_mask": [[1, 1, 1], [1, 1, 0]], "labels": [[5, 6, 7], [8, 9, -100]]},
            *([5, 6, 7, 8, 9], [-100, 6, 7, -100, 9], [0, 3, 5]),
        ),
        (
            {"position_ids": [[0, 1, 0], [0, 1, 2]]},
            *([5, 6, 7, 8, 9, 0], [-100, 6, 7, -100, 9, 0], [0, 2, 3, 6]),
        ),
        (
            {"attention_mask": [[1, 1, 1], [0, 0, 0]], "labels": [[5, 6, 7], [-100] * 3]},
            *([5, 6, 7], [-100, 6, 7], None),
        ),
    ],
)
def test_a_batch_as_one_row_of_documents(
    tensors: dict[str, Any], ids: list[int], labels: list[int], cuts: list[int] | None
) -> None:
    rows, others = integration._as_documents(batch_of(**tensors))
    assert rows["input_ids"].tolist() == [ids] and rows["labels"].tolist() == [labels]
    if cuts is None:
        assert not others
        return
    assert others["cu_seq_lens_q"].tolist() == others["cu_seq_lens_k"].tolist() == cuts
    ends = zip(cuts, cuts[1:], strict=False)
    assert rows["position_ids"].tolist() == [[i for a, b in ends for i in range(b - a)]]
    assert integration._num_targets(batch_of(**tensors)) == sum(x != -100 for x in labels)


MASK = [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        ({"attention_mask": [[1, 1, 1], [0, 1, 1]]}, NotImplementedError, "padding_side"),
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
        integration._as_documents(batch_of(**tensors))


def test_a_batch_that_leaves_a_rank_without_rows_is_refused() -> None:
    ring = integration._Ring(mock.Mock(), 0, 4, "zigzag", mock.Mock())
    ring.cut(batch_of())
    with pytest.raises(ValueError, match="a batch of 3 tokens leaves some of 4 ranks"):
        ring.cut({name: x[:1] for name, x in batch_of().items()})


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
        [int(integration._fingerprint(batch, torch.device("cpu"))) for batch in batches]
        for _ in range(2)
    )
    assert len(set(prints)) == len(prints) and prints == again


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"neftune_noise_alpha": 5.0}, "neftune"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
    ],
)
def test_arguments_that_are_refused(out: Path, options: dict[str, Any], text: str) -> None:
    with register(), pytest.raises(NotImplementedError, match=text):
        refused(arguments(str(out), **options))


def refused(args: Any, family: str = "llama", name: str = "ring_attn", **options: Any) -> None:
    model = make_model(family, name)
    make_trainer(model, args, split_sequence(transformers.Trainer), "padded", **options)


def test_what_a_trainer_is_refused_for(out: Path) -> None:
    args = arguments(str(out))
    with register():
        for name in ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func"):
            with pytest.raises(NotImplementedError, match=name):
                refused(args, **{name: print})
        with pytest.raises(NotImplementedError, match="ForMaskedLMLoss"):
            refused(args, family="bert")
        with pytest.raises(RuntimeError, match="no process group"):
            refused(args)  # nothing else is wrong
    with pytest.raises(ValueError, match="'sdpa'"):
        refused(args, name="sdpa")
    for wrong in (transformers.Trainer.train, torch.nn.Module):
        with pytest.raises(TypeError, match="trainer_class"):
            split_sequence(wrong)
    with (
        mock.patch.dict(sys.modules, {"accelerate": None}),
        pytest.raises(ImportError, match=r"ring-attn\[trainer\]"),
    ):
        split_sequence(transformers.Trainer)


def predicted(out: Path) -> tuple[Ended, Ended]:
    with split_model() as model:
        trainer_class = split_sequence(transformers.Trainer)
        trainer = make_trainer(model, arguments(str(out)), trainer_class, "padded")
        unlabelled = dict(padded(texts(2)), labels=None)
        return (
            ended(lambda: trainer.predict(texts(4))),
            ended(lambda: trainer.prediction_step(trainer.model, unlabelled, True)),
        )


def test_predictions_are_refused(ranks: Pools, out: Path) -> None:
    for logits, labels in ranks(2).run(predicted, out / "predicted"):
        assert logits.error is NotImplementedError and "predict" in logits.text
        assert labels.error is ValueError and "labels" in labels.text


def trainer_like(**changes: Any) -> Any:
    """As much of a Trainer as is looked at, with nothing wrong but the changes."""
    args = {"label_smoothing_factor": 0, "neftune_noise_alpha": None, "use_liger_kernel": False}
    args |= {"include_num_input_tokens_seen": "no", "average_tokens_across_devices": True}
    parallel = changes.pop("parallelism_config", None)
    config = SimpleNamespace(dispatch_batches=None)
    options = {name: changes.pop(name) for name in list(changes) if name in args}
    attributes = {"compute_metrics": None, "preprocess_logits_for_metrics": None}
    attributes |= {"compute_loss_func": None, "is_deepspeed_enabled": False}
    attributes |= {"model_accepts_loss_kwargs": True}
    return SimpleNamespace(
        args=SimpleNamespace(**args | options, world_size=2, accelerator_config=config),
        accelerator=SimpleNamespace(parallelism_config=parallel),
        model=make_model("llama", "sdpa"),
        **attributes | changes,
    )


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, ValueError, "cp_size=2"),
        ({"parallelism_config": ParallelismConfig(sp_size=2)}, ValueError, "sp_size=2"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, NotImplementedError, "tp_size"),
        ({"is_deepspeed_enabled": True}, NotImplementedError, "DeepSpeed"),
        ({"use_liger_kernel": True}, NotImplementedError, "liger"),
        ({"average_tokens_across_devices": False}, NotImplementedError, "average_tokens"),
        ({"model_accepts_loss_kwargs": False}, NotImplementedError, "num_items_in_batch"),
    ],
)
def test_surroundings_that_are_refused(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    integration._check_trainer(trainer_like(parallelism_config=ParallelismConfig(dp_shard_size=2)))
    with pytest.raises(error, match=text):
        integration._check_trainer(trainer_like(**changes))


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
    "options",
    [{"packing": True}, {"packing": False}, {"padding_free": True, "max_length": None}],
    ids=["packed", "padded", "padding-free"],
)
@pytest.mark.parametrize("world_size", [2, 3])
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
@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp2(ranks: Pools, out: Path, world_size: int) -> None:
    oracle, plain = one_process("padded", out)
    make_model("llama", "sdpa").save_pretrained(out / "fsdp2" / "weights")
    for got, kinds in ranks(world_size).run(fully_sharded, out / "fsdp2"):
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
