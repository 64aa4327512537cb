"""`ring_attn.audit` and its command in processes of their own; steps that cannot be audited."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import ring_attn
from ring_attn.cli import main as cli
from ring_attn.testing.audit import check_defines, in_file
from ring_attn.testing.tiny import shrunk
from tests import audit_steps
from tests.refusals import refused

pytestmark = pytest.mark.dist

STEP = """
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy

def step(factor=1):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50))
    ids = torch.randint(50, (1, 25))
    rows = torch.arange(24).tensor_split(dist.get_world_size())[dist.get_rank()]
    loss = cross_entropy(model(ids[:, rows])[0], ids[0, rows + 1], reduction="sum") / 24
    loss.backward()
    for x in model.parameters():
        dist.all_reduce(x.grad)
        x.grad /= dist.get_world_size() ** (1 - factor)
    dist.all_reduce(loss)
    return model, loss

def averaging():
    return step(0)
"""


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(STEP)
    path, report = tmp_path / "train.py", tmp_path / "report.json"
    words = ["audit", f"{path}:averaging", "--world-size", "2", "--json", str(report)]
    assert cli.main(words) == 1
    shown = capsys.readouterr().out
    assert "1/2 of the twin's" in shown and len(shown.splitlines()) < 25
    (one,) = json.loads(report.read_text())["diagnoses"]
    assert [x["contract"] for x in one["findings"]] == ["gradient scale"]
    assert not one["unexplained"]


@pytest.mark.slow
def test_a_right_step_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(STEP)
    assert cli.main(["audit", f"{tmp_path / 'train.py'}:step", "--quiet"]) == 0
    assert capsys.readouterr().out.endswith("ok\n")


def test_a_loaded_module_hides_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(
        "made = []\ndef step():\n    return made.append(1) or made\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "train", ModuleType("train"))
    step = in_file(f"{tmp_path / 'train.py'}:step")
    assert step() is step()  # the file runs once
    assert step() == [1, 1, 1]


PRETRAINED = """
import torch, torch.distributed as dist
from transformers import AutoModelForCausalLM
import ring_attn

def step():
    n, rank = dist.get_world_size(), dist.get_rank()
    with ring_attn.integrations.transformers.register(layout="zigzag"):
        name = "ring_attn" if n > 1 else "sdpa"
        model = AutoModelForCausalLM.from_pretrained("FOLDER", attn_implementation=name)
        layout = ring_attn.SequenceLayout.zigzag(29, n)
        ids = torch.randint(100, (1, 29), generator=torch.Generator().manual_seed(0))
        part = ring_attn.shard_batch({"input_ids": ids, "labels": ids}, layout, rank)
        given = {"sequence_layout": layout} if n > 1 else {}
        logits = model(part["input_ids"], position_ids=part["position_ids"], **given).logits
        loss = torch.nn.functional.cross_entropy(
            logits.mT, part["shift_labels"], reduction="sum") / 28
        loss.backward()
    return model, loss
"""


@pytest.mark.slow
def test_a_large_model_is_shrunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.Qwen3Config(
        hidden_size=8192,
        intermediate_size=1 << 15,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=101,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    (tmp_path / "train.py").write_text(PRETRAINED.replace("FOLDER", str(tmp_path)))
    words = ["audit", f"{tmp_path / 'train.py'}:step", "--tiny", "--world-size", "2"]
    assert cli.main(words) == 1
    assert "gradient sum" in capsys.readouterr().out


def test_a_model_of_several_parts_is_not_shrunk() -> None:
    with refused(ValueError, "LlavaConfig|make the model small"):
        shrunk(transformers.LlavaConfig())


@pytest.mark.slow
def test_our_trainer_passes() -> None:
    report = ring_attn.audit(audit_steps.trainer, 2)
    assert report.ok, str(report)


def odd(kind: str) -> Any:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if kind != "unseeded":
        torch.manual_seed(0)
    parts = [nn.Embedding(50, 8), nn.Dropout(0.5 * (kind == "dropout")), nn.Linear(8, 50)]
    if kind == "dropout":
        torch.seed()
    model = nn.Sequential(*parts)
    if kind == "raises" and rank == 1:
        raise ArithmeticError("lost")
    if kind == "large" and world_size == 1:
        torch.zeros(1 << 50, dtype=torch.uint8)
    loss = model(torch.arange(24)[None])[..., 0].sum()
    loss.backward()
    return (model, loss) if kind != "no model" else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("raises", RuntimeError, "rank 1|ArithmeticError: lost"),
        ("no model", RuntimeError, "must return its model"),
        ("unseeded", RuntimeError, "two runs of the twin differ|without a seed"),
        ("dropout", RuntimeError, "two runs of the twin differ|dropout"),
        ("large", RuntimeError, "can't allocate memory|1125899906842624 bytes"),
    ],
)
def test_steps_that_end_badly(kind: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        ring_attn.audit(partial(odd, kind), 2, timeout=5)
    for part in text.split("|"):
        assert part in str(caught.value)


@pytest.mark.slow
def test_ranks_that_hang_are_ended(tmp_path: Path) -> None:
    wait = "    if dist.get_world_size() > 1:\n        import time; time.sleep(1000)\n"
    head, body = STEP.split("    torch.manual_seed(0)\n")
    (tmp_path / "train.py").write_text(f"{head}{wait}    torch.manual_seed(0)\n{body}")
    words = ["audit", f"{tmp_path / 'train.py'}:step", "--world-size", "2", "--timeout", "5"]
    ran = subprocess.run(
        [sys.executable, "-m", "ring_attn", *words],
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert ran.returncode == 1
    assert "ranks 0, 1 of 2 have no result" in ran.stderr


@pytest.mark.parametrize(
    ("step", "sizes", "text"),
    [
        (partial(odd, ""), (), "world_size"),
        (partial(odd, ""), 1, "at least 2"),
        ("missing.py:step", 2, "there is no file 'missing.py'"),
        ("train.py", 2, "got 'train.py'"),
        ("README.md:step", 2, "got 'README.md:step'"),
    ],
)
def test_wrong_arguments_are_refused(step: Any, sizes: Any, text: str) -> None:
    with refused(ValueError, text):
        ring_attn.audit(step, sizes)


def test_a_step_that_is_not_a_function_is_refused() -> None:
    not_callable: Any = 3
    with refused(TypeError, "step must be a function, or a text such as 'train.py:step', got 3"):
        ring_attn.audit(not_callable, 2)


@pytest.mark.parametrize(
    "source",
    [
        "from train import step",
        "from functools import partial\nstep = partial(print, 1)",
        "step = 1\nstep = lambda: None",
        "step, other = print, 1",
        "if True:\n    def step(): pass",
        "from trains import *",
        "def made():\n    global step\n    step = print",
        "def step(rate=1, *others, kept=2, **more): pass",
        "@decorated\ndef step(model): pass",
    ],
)
def test_what_may_be_a_step_is_not_refused(source: str, tmp_path: Path) -> None:
    """A file is refused only if its text shows that the name is no step."""
    path = tmp_path / "train.py"
    path.write_text(source)
    check_defines(path, "step")
