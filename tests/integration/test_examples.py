"""The examples as users run them; and wrong attention fails their checks."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import train
from common import Layer, batches

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]


def run(words: str, *launcher: str) -> str:
    """Runs an example, which must succeed; returns what it printed."""
    name, *options = words.split()
    command = [sys.executable, *launcher, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"^ *\d+ +(\d\.\d+)", printed, re.MULTILINE)]


@pytest.mark.dist
def test_train() -> None:
    printed = run("train.py --steps 3 --seqlen 65")
    first, *_, last = losses(printed)
    assert printed.startswith("2 ranks on") and len(losses(printed)) == 3 and last < first


@pytest.mark.dist
@pytest.mark.slow
def test_train_under_torchrun() -> None:
    printed = run("train.py --steps 2 --seqlen 66 --strategy all_gather", *TORCHRUN)
    assert printed.startswith("3 ranks on") and len(losses(printed)) == 2


@pytest.mark.dist
@pytest.mark.slow
def test_an_error_of_a_rank_is_shown() -> None:
    command = [sys.executable, str(EXAMPLES / "train.py"), "--strategy", "magic"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1 and "'magic'" in done.stderr


def verdict(attention: Any, seqlen: int) -> bool:
    """The verdict of train.py on a rank whose layers have another attention."""
    model, layout = train.make_ring(seqlen, "ring")
    for module in model.modules():
        if isinstance(module, Layer):
            module.attention = partial(attention, module.attention, seqlen)
    return train.judge(model, layout, next(batches(seqlen, torch.device("cpu"))))


def right(ring: Any, _seqlen: int, *qkv: Tensor) -> Tensor:
    return ring(*qkv)


def three_rows_without_the_first_key(ring: Any, seqlen: int, *qkv: Tensor) -> Tensor:
    return ring(*qkv, window_size=(seqlen - 4, 0))


def rounded_values(ring: Any, _seqlen: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ring(q, k, v + (v.bfloat16().float() - v).detach())


@pytest.mark.gloo
def test_the_verdict_of_train_needs_exact_attention(ranks: Any) -> None:
    assert ranks(2).run(verdict, right, 33) == [True, True]
    for wrong in (three_rows_without_the_first_key, rounded_values):
        assert ranks(2).run(verdict, wrong, 33) == [False, True]
