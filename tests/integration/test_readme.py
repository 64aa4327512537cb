"""The README is true: its figures, its example, its numbers of models, its targets and paths."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BOTH = TEXT + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FIGURES_PAGE = (ROOT / "docs/figures.md").read_text(encoding="utf-8")
COMPARISON = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
FIGURES = ROOT / "bench/results/ring_cpu_2ranks_8k.json"
NAMES = {
    "ours": "**ring_attn**, 2 ranks x 1 thread",
    "dense": "dense attention, 1 process x 2 threads",
    "torch-template": "torch's private ring template, 2 ranks x 1 thread",
}


def code(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def measured() -> Any:
    return json.loads(FIGURES.read_text())


def figures() -> str:
    """Return the table of docs/figures.md for the committed measurement."""
    rows = {(row["impl"], row["mode"]): row for row in measured()["rows"]}
    lines = [
        "| implementation | forward | forward + backward | relative to dense | waiting | sent "
        "| memory | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for impl, name in NAMES.items():
        forward, both = rows[impl, "fwd"], rows[impl, "fwd_bwd"]
        waited, sent = both["wait_ms"], both["bytes_sent"]
        lines.append(
            f"| {name} | {forward['median_ms']:.0f} ms | {both['median_ms']:.0f} ms "
            f"| {ratio(impl)} "
            f"| {'-' if waited is None else f'{waited:.0f} ms'} "
            f"| {'-' if sent is None else f'{sent / 1e6:.1f} MB'} "
            f"| {both['peak_bytes'] / 1e6:.0f} MB | {both['max_error']:.1e} |"
        )
    return "\n".join(lines)


def ratio(impl: str) -> str:
    """Return the time of forward and backward, relative to dense attention."""
    rows = {row["impl"]: row for row in measured()["rows"] if row["mode"] == "fwd_bwd"}
    return f"{rows[impl]['median_ms'] / rows['dense']['median_ms']:.2f}"


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_it_is_read_in_five_minutes() -> None:
    assert len(re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL).split()) <= 1000


def test_figures_are_those_that_were_measured() -> None:
    assert figures() in FIGURES_PAGE, figures()
    machine, setting = measured()["machine"], measured()["setting"]
    conditions = one_line(FIGURES_PAGE)
    for condition in (
        f"{setting['seqlen']:,} rows, {setting['heads']} heads of {setting['head_dim']}, "
        f"{setting['dtype']}, causal, {setting['layout']} layout",
        f"on {machine['cores']} cores of an {machine['cpu']}",
        f"torch {machine['versions']['torch']}",
        f"median of {setting['iters']} repetitions",
    ):
        assert condition in conditions, condition
    assert measured()["command"] in one_line(FIGURES_PAGE.replace("\\\n", " "))


def test_the_simulators_error_is_that_which_was_measured() -> None:
    simulated = json.loads((ROOT / "bench/results/simulator_cpu.json").read_text())
    worst = max(abs(row["error"]) for row in simulated["rows"])
    said = (
        f"with {len(simulated['rows'])} measured calls on CPU ranks. The median error is "
        f"{simulated['median_error']:.1%}, and the largest error is {worst:.1%}."
    )
    assert said in one_line(FIGURES_PAGE)


def test_ratios_are_the_figures() -> None:
    seqlen = measured()["setting"]["seqlen"]
    ours = f"on two ranks with one core each takes {ratio('ours')} times as long as dense attention"
    call = f"for a causal forward and backward over {seqlen:,} tokens"
    text = one_line(TEXT)
    assert ours in text and call in text
    both = f"are {ratio('ours')} and {ratio('torch-template')} times the time of dense attention"
    assert both in one_line(COMPARISON)


def test_numbers_of_models_are_those_of_the_table() -> None:
    table = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    right, refused, untried = (
        table.count(f"| {word}") for word in ("right |", "refused: ", "not tried: ")
    )
    said = (
        f"lists {right + refused + untried} model classes of transformers. We tested "
        f"{right + refused} of them with small random models: {right} compute the logits of one "
        f"process, and {refused} raise an error that states the reason. We could not test the "
        f"other {untried},"
    )
    assert said in one_line((ROOT / "docs/hugging_face.md").read_text(encoding="utf-8"))


def test_the_home_page_has_the_same_example() -> None:
    home = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert code("python")[0] in home


@pytest.mark.dist
def test_example(tmp_path: Path, under_torchrun: Any) -> None:
    """The first block, copied into a file, prints what the README shows, but for the digits."""
    example = tmp_path / "example.py"
    example.write_text(code("python")[0])
    (said,) = code("output")
    printed, nothing = under_torchrun(2, runpy.run_path, str(example))
    number = r"\d\.\d\de-0[67]"
    assert re.sub(number, "", printed) == re.sub(number, "", said)
    assert nothing == ""


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
            if "/" in value and name != "PART":
                assert (ROOT / value).exists(), word
            assert name in (variables if equals else targets), word


def test_the_reading_path_is_short() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"^\d\. \[`.*?`\]\((.*?)\)", text, flags=re.M)
    assert len(paths) == 4
    assert sum(len((ROOT / path).read_bytes().splitlines()) for path in paths) < 1700
