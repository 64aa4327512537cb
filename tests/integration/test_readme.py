"""The README is true: its figures, `explain`'s output, its example, commands and paths."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import ring_attn
from ring_attn.planning.devices import builtin_cluster

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BOTH = TEXT + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FIGURES = ROOT / "bench/results/ring_cpu_2ranks_8k.json"
NAMES = {
    "ours": "**ring_attn**, 2 ranks x 1 thread",
    "dense": "one process, dense, 2 threads",
    "torch-template": "torch's private ring template, 2 ranks x 1 thread",
}


def code(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def figures() -> str:
    """The README's table of the committed measurement."""
    measured = json.loads(FIGURES.read_text())
    rows = {(row["impl"], row["mode"]): row for row in measured["rows"]}
    lines = [
        "| | forward | forward + backward | x dense | waiting | sent | memory | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for impl, name in NAMES.items():
        forward, both = rows[impl, "fwd"], rows[impl, "fwd_bwd"]
        ratio = both["median_ms"] / rows["dense", "fwd_bwd"]["median_ms"]
        waited, sent = both["wait_ms"], both["bytes_sent"]
        lines.append(
            f"| {name} | {forward['median_ms']:.0f} ms | {both['median_ms']:.0f} ms | {ratio:.2f} "
            f"| {'-' if waited is None else f'{waited:.0f} ms'} "
            f"| {'-' if sent is None else f'{sent / 1e6:.1f} MB'} "
            f"| {both['peak_bytes'] / 1e6:.0f} MB | {both['max_error']:.1e} |"
        )
    machine = measured["machine"]
    where = (
        f"on {machine['cores']} cores of an {machine['cpu']}, torch "
        f"{machine['versions']['torch']}, gloo: medians of the slower rank, error against float64"
    )
    return "\n".join([*lines, "", f"`{measured['command']}`", where])


def explained() -> str:
    """The first lines of `explain`'s output, and its last."""
    choice = ring_attn.explain(
        seqlen=131072, world_size=16, nheads=32, nheads_kv=8, headdim=128, causal=True,
        cluster=builtin_cluster("H100"),
    )  # fmt: skip
    return "\n".join([*str(choice).splitlines()[:5], choice.rates, choice.reason])


def test_length() -> None:
    assert len((ROOT / "README.md").read_bytes().splitlines()) <= 180


def test_figures_are_those_that_were_measured() -> None:
    assert figures() in TEXT, figures()


def test_explanation_is_what_explain_says() -> None:
    assert explained() in TEXT, explained()


@pytest.mark.dist
def test_example(tmp_path: Path, under_torchrun: Any) -> None:
    four_lines, setup = code("python")[:2]
    after = four_lines.split("\n\n", 1)[1]
    example = tmp_path / "example.py"
    example.write_text(setup + after + "print(rank, tuple(out.shape))\n")
    layout = ring_attn.SequenceLayout.zigzag(1000, 3)
    shapes = [f"{rank} (1, {layout.shard_len(rank)}, 8, 64)\n" for rank in range(3)]
    assert under_torchrun(3, runpy.run_path, str(example)) == shapes


BEFORE_HUGGING_FACE = """
import torch
path, prompt = {path!r}, torch.arange(12)[None]
data = [dict(input_ids=list(range(n)), labels=list(range(n))) for n in (12, 12)]
"""
# The README's steps are too many for a test.
SHORT = "max_steps=1, use_cpu=True, report_to=[], save_strategy='no', disable_tqdm=True"


@pytest.mark.dist
def test_hugging_face_lines(tmp_path: Path, under_torchrun: Any) -> None:
    """In interpreters that import nothing of ours beside them."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    lines = next(block for block in code("python") if "split_sequence" in block)
    assert "max_steps=1000" in lines and '"out"' in lines
    lines = lines.replace("max_steps=1000", SHORT).replace('"out"', repr(str(tmp_path / "out")))
    example = tmp_path / "example.py"
    example.write_text(
        BEFORE_HUGGING_FACE.format(path=str(tmp_path)) + lines + "print(tuple(tokens.shape)[0])\n"
    )
    printed = under_torchrun(2, runpy.run_path, str(example))
    assert [text.splitlines()[-1] for text in printed] == ["1", "1"]


def test_targets_and_their_arguments_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"^(make [^#\n]+)|`(make [^`]+)`", BOTH, re.MULTILINE)
    variables = set(re.findall(r"^([A-Z]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    for words in (shlex.split(one or two) for one, two in named):
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if "/" in value:
                assert (ROOT / value).exists(), word
            assert name in (variables if equals else targets), word


def test_the_reading_path_is_short() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"^\d\. \[`.*?`\]\((.*?)\)", text, flags=re.M)
    assert len(paths) == 4
    assert sum(len((ROOT / path).read_bytes().splitlines()) for path in paths) < 1500
