"""The examples as users run them, and on ranks in tests; mistakes fail their checks."""

from __future__ import annotations

import math
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fsdp2
import generate
import hybrid
import mesh
import own_mask
import quickstart
import train
import video_transformer
from common import Layer, Transformer, batches
from ring_attn import JointLayout, SequenceLayout, masks, ring_attention
from ring_attn.models.recurrent import SPLITS

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
CPU = torch.device("cpu")


def run(words: str, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    name, *options = words.split()
    launcher = [*TORCHRUN, f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, *launcher, str(EXAMPLES / name), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=1000)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        (2, "train.py --steps 3 --seqlen 65"),
        (3, "train.py --steps 2 --seqlen 66"),
        (3, "mesh.py cp=3 --steps 2 --batch 2"),
        (3, "own_mask.py --document 100"),
        (3, "fsdp2.py --cp 3 --steps 2 --batch 2"),
        (3, "generate.py --seqlen 65 --tokens 20"),
        (3, "hybrid.py --steps 2 --seqlen 65"),
        (3, "video_transformer.py"),
        (2, "quickstart.py"),
        (2, "huggingface_trainer.py --steps 3 --seqlen 65"),
        (2, "trl_sft_packed.py --steps 3 --documents 30"),
        (2, "long_document_generate.py --seqlen 301 --chunk 100 --tokens 20"),
    ],
)
def test_as_users_run_them(num_ranks: int, words: str) -> None:
    done = run(words, num_ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(line.startswith("ok") for line in done.stdout.splitlines()), done.stdout


@pytest.mark.dist
@pytest.mark.slow
def test_an_error_of_a_rank_is_shown() -> None:
    done = run("train.py --seqlen 1000000000")  # longer than the text
    assert done.returncode == 1 and "RuntimeError: random_" in done.stderr


# -- train.py


def verdict_with(attention: Callable[..., Tensor]) -> bool:
    """The verdict of train.py on a rank, for layers with another attention."""
    layout = SequenceLayout.zigzag(33, 2)
    model = train.make_ring(layout)
    for module in model.modules():
        if isinstance(module, Layer):
            module.attention = partial(attention, module.attention)
    return train.train(model, layout, 1)


def right(ring: Any, *qkv: Tensor) -> Tensor:
    return ring(*qkv)


def three_rows_without_the_first_key(ring: Any, *qkv: Tensor) -> Tensor:
    return ring(*qkv, window_size=(29, 0))


def rounded_values(ring: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ring(q, k, v + (v.bfloat16().float() - v).detach())


# -- mesh.py

MESHES = ["pp=2,cp=2", "cp=2,tp=2", "dp=2,cp=2"]


def settings(words: str, steps: int = 3) -> Namespace:
    return Namespace(axes=mesh.axes_of(words), steps=steps, seqlen=33, batch=4)


@pytest.mark.parametrize("words", MESHES)
@pytest.mark.sweep(3)
def test_meshes_train_as_one_process_does(ranks: Any, words: str) -> None:
    assert ranks(4).run(mesh.main, settings(words, steps=2), CPU) == [True] * 4


@pytest.mark.slow
def test_all_axes_at_once(fresh_ranks: Any) -> None:
    args = settings("pp=2,dp=2,cp=2,tp=2")
    pool = fresh_ranks(math.prod(args.axes), group_timeout=900)
    assert all(pool.run(mesh.main, args, CPU, timeout=1000))


def without_the_sum_over_the_ring(args: Namespace) -> bool:
    with mock.patch("ring_attn.sync_gradients"):
        return mesh.main(args, CPU)


def with_a_window(args: Namespace) -> bool:
    with mock.patch.object(mesh, "make_ring", windowed):
        return mesh.main(args, CPU)


def windowed(*args: Any, **kwargs: Any) -> Transformer:
    model = train.make_ring(*args, **kwargs)
    for module in model.modules():
        if isinstance(module, Layer):
            module.attention = partial(three_rows_without_the_first_key, module.attention)
    return model


def test_axes_in_any_order() -> None:
    assert mesh.axes_of("tp=2, cp=1,pp=3".replace(" ", "")) == (3, 1, 1, 2)
    for text in ("cp", "ep=2", "cp=x"):
        with pytest.raises(ValueError):
            mesh.axes_of(text)


# -- generate.py


def generated(wrong: bool) -> bool:
    model = train.make_ring(SequenceLayout.zigzag(33, 2))
    prompt, run = next(batches(33, CPU))["input_ids"], generate.SplitCache.run

    def late(cache: Any, ids: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return run(cache, ids, positions + 9 * (wrong and ids.size(1) == 1), *args, **kwargs)

    with mock.patch.object(generate.SplitCache, "run", late):
        tokens, expected = generate.generate(model, prompt, 40)
    return torch.equal(tokens, expected)


# -- hybrid.py


def trained_hybrid(every_rank_from_zeros: bool) -> bool:
    with mock.patch.dict(SPLITS):
        if every_rank_from_zeros:
            SPLITS["delta_rule"] = lambda function, place, *qkv, **rows: function(*qkv, **rows)
        return hybrid.main(Namespace(steps=2, seqlen=33), CPU)


# -- video_transformer.py


def with_text_of_the_rank() -> bool:
    """The verdict if each rank counts the text that it holds as rows of its own."""

    def counted_twice(*qkv: Tensor, layout: JointLayout) -> Tensor:
        lens = [0, *accumulate(layout.shard_lens)]
        return ring_attention(*qkv, layout=SequenceLayout.boundaries(lens))

    with mock.patch("ring_attn.ring_attention", counted_twice):
        return video_transformer.main(Namespace(steps=2), CPU)


# -- quickstart.py, own_mask.py, fsdp2.py


def with_another_window(main: Callable[..., bool], *args: Any) -> bool:
    """The verdict of an example in whose attention three rows miss the first key."""

    def windowed(*qkv: Tensor, layout: SequenceLayout, **_: Any) -> Tensor:
        mask = masks.window(layout.seqlen, layout.seqlen - 4)
        return ring_attention(*qkv, mask=mask, layout=layout)

    with mock.patch("ring_attn.ring_attention", windowed):
        return main(*args)


# -- the verdicts of the examples, right and with a mistake

ONE_RING = settings("cp=2", steps=2)
OF_FSDP2 = Namespace(cp=2, steps=3, seqlen=33, batch=2)
PASSES, FAILS, FAILS_ON_RANK_0 = [True, True], [False, False], [False, True]
VERDICTS: dict[str, tuple[Callable[..., bool], tuple[Any, ...], list[bool]]] = {
    "train": (verdict_with, (right,), PASSES),
    "train, a window": (verdict_with, (three_rows_without_the_first_key,), FAILS_ON_RANK_0),
    "train, rounded": (verdict_with, (rounded_values,), FAILS_ON_RANK_0),
    "mesh, no sum": (without_the_sum_over_the_ring, (ONE_RING,), FAILS_ON_RANK_0),
    "mesh, a window": (with_a_window, (ONE_RING,), FAILS_ON_RANK_0),
    "generate": (generated, (False,), PASSES),
    "generate, late": (generated, (True,), FAILS),
    "hybrid": (trained_hybrid, (False,), PASSES),
    "hybrid, from zeros": (trained_hybrid, (True,), FAILS_ON_RANK_0),
    "video": (video_transformer.main, (Namespace(steps=2), CPU), PASSES),
    "video, other text": (with_text_of_the_rank, (), FAILS_ON_RANK_0),
    "quickstart": (quickstart.main, (), PASSES),
    "quickstart, a window": (with_another_window, (quickstart.main,), FAILS),
    "own_mask": (own_mask.main, (Namespace(document=300), CPU), PASSES),
    "fsdp2": (fsdp2.main, (OF_FSDP2, CPU), PASSES),
    "fsdp2, a window": (with_another_window, (fsdp2.main, OF_FSDP2, CPU), FAILS_ON_RANK_0),
}


# Their trainings are short; each kind of example has a verdict that fails.
QUICK = ("train, rounded", "mesh, a window", "generate, late", "quickstart", "fsdp2, a window")


@pytest.mark.gloo
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in VERDICTS]
)
def test_verdicts_need_exact_attention(ranks: Any, name: str) -> None:
    example, args, expected = VERDICTS[name]
    assert ranks(2).run(example, *args) == expected


# -- Hugging Face


def test_another_token_fails() -> None:
    import long_document_generate

    model = long_document_generate.make_model("sdpa")
    document = next(batches(65, CPU))["input_ids"]
    tokens = model.generate(document, max_new_tokens=9, do_sample=False)
    assert long_document_generate.same_tokens(tokens, 65)
    tokens[0, 70] += 1
    assert not long_document_generate.same_tokens(tokens, 65)


@pytest.mark.slow
def test_another_loss_fails() -> None:
    import huggingface_trainer

    model, (text,) = huggingface_trainer.make_model("sdpa"), huggingface_trainer.texts(1, 65)
    with torch.no_grad():
        loss = float(model.eval()(**{name: x[None] for name, x in text.items()}).loss)
    assert huggingface_trainer.same_loss(model, [text], loss)
    assert not huggingface_trainer.same_loss(model, [text], loss * 1.0001)
