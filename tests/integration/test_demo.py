"""`ring-attn demo` from its options to its report, on ranks of its own."""

import argparse
import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

import pytest
import torch

from ring_attn import ring_attention
from ring_attn.launch import run_ranks
from ring_attn.testing import Verdict, check
from ring_attn.tools import demo, training
from ring_attn.tools.generate import Comparison, Generated, compare
from ring_attn.tools.training import (
    Report,
    Settings,
    Trainer,
    sample_batches,
    standard_library_text,
)

TINY = "--seqlen 97 --dim 32 --layers 2 --quiet"


def parsed(options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(options.split())


def dense_losses(settings: Settings, dtype: torch.dtype) -> torch.Tensor:
    """Losses of the same training in one process."""
    trainer = Trainer(replace(settings, dtype=dtype), torch.device("cpu"))
    batches = sample_batches(standard_library_text(), settings.seqlen, settings.seed)
    next(batches)  # the one that warms up
    losses = [trainer.step(batch) for batch in islice(batches, settings.steps)]
    return torch.tensor(losses, dtype=dtype)


@pytest.mark.dist
def test_ring_trains_as_one_process_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, traces = tmp_path / "demo.json", tmp_path / "traces"
    words = f"--steps 4 --nproc 3 --layout zigzag --generate 64 --json {path} --profile {traces}"
    args = parsed(f"{TINY} {words}")
    assert demo.run(args) == 0
    for rank in range(3):
        text = (traces / f"rank{rank}_trace.json").read_text()
        assert "ring_attn::backward" in text and "ring_attn::gradient_sync" in text
    report = json.loads(path.read_text())
    assert report["ok"] and report["machine"]["versions"]["torch"]
    assert [row["step"] for row in report["rows"]] == [0, 1, 2, 3]

    settings = demo.settings_of(args)
    oracle, plain = (dense_losses(settings, t) for t in (torch.float64, torch.float32))
    for side in ("ring_loss", "dense_loss"):
        losses = torch.tensor([row[side] for row in report["rows"]])
        verdict = check(side, losses, oracle, plain)
        assert verdict.ok, str(verdict)
        assert losses[-1] < losses[0]
    differences = [abs(row["ring_loss"] - row["dense_loss"]) for row in report["rows"]]
    assert report["greatest_difference"] == max(differences)
    for row in report["rows"]:
        assert row["ring_tokens_per_s"] > 0 and row["dense_tokens_per_s"] > 0
        assert row["ring_peak_bytes"] > 0 and row["dense_peak_bytes"] > 0

    generation = report["generation"]
    assert generation["equal"] and generation["first_difference"] is None
    assert generation["greatest_difference"] < generation["smallest_margin"]
    # 33 bytes of prompt; the last of 64 is not fed back.
    assert sum(generation["rows"]) == 33 + 63 and min(generation["rows"]) > 0

    printed = capfd.readouterr().out.splitlines()
    assert len(printed) == 8 and printed[-1].startswith("greatest loss difference")
    assert printed[4] == f"after     {generation['context']!r}"
    assert printed[5] == f"generated {generation['text']!r}"
    assert printed[6].startswith("equal to one process: yes; greatest logit difference ")


def train_with_a_mistake(settings: Settings) -> Report:
    """Three rows do not see the first key."""
    window_size = (settings.seqlen - 5, 0)
    mistaken = partial(ring_attention, window_size=window_size)
    with mock.patch.object(training, "ring_attention", mistaken):
        return demo.train(settings)


@pytest.mark.slow
@pytest.mark.dist
def test_a_few_missing_keys_fail_the_demo() -> None:
    settings = demo.settings_of(parsed(f"{TINY} --steps 1 --nproc 1"))
    report = run_ranks(train_with_a_mistake, 2, settings, threads=1, device="cpu")[0]
    assert not report.ok
    assert not any(verdict.ok for verdict in report.verdicts)


def test_report_fails_where_a_loss_is_not_finite() -> None:
    row = demo.Row(0, 5.5, 5.5, 1.0, 1.0, 1, 1)
    verdicts = [Verdict("losses", 0.0, 1.0, ok=True)]
    assert Report([row], verdicts).ok
    assert not Report([replace(row, ring_loss=math.nan)], verdicts).ok


def test_report_fails_where_the_ranks_generate_something_else() -> None:
    row = demo.Row(0, 5.5, 5.5, 1.0, 1.0, 1, 1)
    logits = torch.eye(256)[[65, 66, 67]]
    whole = Generated([65, 66, 67], logits, (7,))
    other = Generated([65, 90, 91], logits - 0.125, (3, 4))
    prompt = torch.tensor([[42] * 50])
    same = compare(prompt, replace(whole, rows=(3, 4)), whole)
    assert same == Comparison(40 * "*", "ABC", True, None, 0.0, 1.0, (3, 4))
    wrong = compare(prompt, other, whole)
    assert wrong == Comparison(40 * "*", "AZ[", False, 1, 0.125, 1.0, (3, 4))
    assert not compare(prompt, replace(whole, logits=logits * math.nan), whole).equal
    assert Report([row], [], same).ok and not Report([row], [], wrong).ok
    settings = demo.settings_of(parsed(TINY))
    assert "equal to one process: no, from byte 1 on" in demo.summary(
        settings, Report([row], [], wrong)
    )


def test_batches_are_windows_of_the_text_and_repeat_by_seed() -> None:
    text = standard_library_text()
    assert b"import argparse" in bytes(text.tolist()[: 1 << 20])
    first, second, other = (
        next(sample_batches(text, 300, seed))["input_ids"] for seed in (0, 0, 1)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert bytes(first[0].tolist()) in text.numpy().tobytes()


def test_peak_memory_sees_what_was_held_and_is_gone() -> None:
    """In a process of its own: one that has held more before may not see the rise."""
    size = 64 << 20
    code = f"""
import torch
from ring_attn.tools.demo import PeakMemory
memory = PeakMemory(torch.device("cpu"))
torch.ones({size} // 4)
held = memory.read()
assert memory.read() >= held
print(held)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The kernel counts pages in batches, so a few may be missing.
    assert size // 2 < int(run.stdout) < 2 * size


def test_quick_is_smaller_unless_sizes_are_given() -> None:
    quick, given = (
        demo.settings_of(parsed("--quick")),
        demo.settings_of(parsed("--quick --steps 3")),
    )
    assert (quick.seqlen, quick.steps) == (training.QUICK_SEQLEN, training.QUICK_STEPS)
    assert (given.seqlen, given.steps) == (training.QUICK_SEQLEN, 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ("--seqlen 1", ValueError, "seqlen must be at least 2, a byte for each rank"),
        ("--seqlen 3 --nproc 4", ValueError, "seqlen must be at least 4"),
        ("--dtype float16", TypeError, "dtype must be float32 or bfloat16, got float16"),
        ("--dim 12", ValueError, "even headdim"),
        ("--seqlen 64 --generate 64", ValueError, "generate must be less than seqlen"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        demo.run(parsed(options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks on device 'cuda' need as many GPUs"):
        demo.run(parsed("--device cuda"))


def test_text_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="seqlen must be at most 5"):
        next(sample_batches(torch.zeros(5, dtype=torch.uint8), 6, seed=0))
