"""`ring-attn plan --model` of a config of diffusers, by formula: memory, time, what fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ring_attn.cli import main as cli
from ring_attn.planning.devices import builtin_cluster
from ring_attn.planning.diffusion import config as config_file
from ring_attn.planning.diffusion import formulas, traced
from ring_attn.planning.diffusion.config import transformer_of
from ring_attn.planning.diffusion.fits import plan_job
from ring_attn.planning.diffusion.job import DiffusionJob
from ring_attn.planning.diffusion.memory import memory_of
from ring_attn.planning.diffusion.sizes import Rowwise, SizedTransformer
from ring_attn.planning.diffusion.step import model_flops
from ring_attn.planning.model.degrees import degrees_of

H100 = builtin_cluster("H100")
FLUX: dict[str, Any] = {
    "_class_name": "FluxTransformer2DModel",
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "num_layers": 19,
    "num_single_layers": 38,
    "joint_attention_dim": 4096,
}
WAN: dict[str, Any] = {
    "_class_name": "WanTransformer3DModel",
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "num_layers": 30,
    "ffn_dim": 8960,
    "text_dim": 4096,
}


@pytest.fixture(autouse=True)
def without_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan by formula, which takes no import of diffusers."""
    for module in (config_file, traced):
        monkeypatch.setattr(module, "find_spec", lambda name: None)


def estimated(values: dict[str, Any], *, training: bool = True) -> SizedTransformer:
    return formulas.estimate(transformer_of("mine", values), training=training)


def job_of(values: dict[str, Any], world_size: int = 8, **options: Any) -> DiffusionJob:
    """Return a job of 75,264 rows of video and 512 of text, with a batch of 2."""
    fsdp = options.pop("fsdp", None)
    return DiffusionJob(
        model=estimated(values, training=options.get("steps") is None),
        seqlen=75_264 + 512,
        text=512,
        degrees=degrees_of(world_size, fsdp=fsdp),
        cluster=H100,
        memory_bytes=80e9,
        batch=2,
        explained={"strategies": ["ring"]},
        **options,
    )


def parts_of(job: DiffusionJob) -> dict[str, float]:
    return {part.name: part.nbytes for part in memory_of(job, 0.0, 0.0).parts}


# -- memory


def test_weights_by_formula_are_those_computed_by_hand() -> None:
    model, d = estimated(WAN), 1536
    block = 8 * d * d + 2 * d * 8960
    assert {layer.dense for layer in model.weights.layers} == {block}
    assert len(model.kinds) == 30 and model.weights.total / 1e9 == pytest.approx(1.42, rel=0.05)
    flux = estimated(FLUX)
    assert len(flux.kinds) == 57 and flux.weights.total / 1e9 == pytest.approx(11.9, rel=0.05)


@pytest.mark.parametrize(("optimizer", "states"), [("adamw", 8), ("sgd", 0)])
def test_weights_are_shared_and_the_optimizer_has_states(optimizer: str, states: int) -> None:
    job = job_of(WAN, optimizer=optimizer)
    found, total = parts_of(job), job.weights.total
    assert found["weights"] == total * 4 / 8
    assert found["optimizer"] == total * states / 8
    layer, others = job.weights.layers[0].dense, job.weights.others
    assert found["gradients"] == total * 4 / 8 + 6 * layer + 2 * others


def test_all_ranks_hold_the_text_and_shares_of_the_video() -> None:
    # Each block keeps its input: 9,408 rows of video and 512 of text, two samples of 2 bytes. The
    # first one has the video of all ranks.
    job = job_of(FLUX, recompute="full")
    model = replace(job.model, outside=replace(job.model.outside, kept=Rowwise()))
    found = parts_of(replace(job, model=model))
    rows = 57 * (9_408 + 512) + (75_264 + 512)
    assert found["activations"] == 2 * rows * 24 * 128 * 2
    # Wan's text is an input of cross-attention only, and all blocks share it.
    job = job_of(WAN, recompute="full")
    model = replace(job.model, outside=replace(job.model.outside, kept=Rowwise()))
    rows = 30 * 9_408 + 75_264
    assert parts_of(replace(job, model=model))["activations"] == 2 * rows * 12 * 128 * 2


def test_recomputation_keeps_less() -> None:
    none, attention, full = (
        parts_of(job_of(FLUX, recompute=recompute))["activations"]
        for recompute in ("none", "attention", "full")
    )
    assert full < attention < none
    # out and lse of 9,408 rows of video and 64 of the 512 rows of text.
    results = 2 * 57 * (9_408 + 64) * 24 * (2 * 128 + 4)
    assert attention - full == pytest.approx(results)


def test_inference_has_neither_gradients_nor_optimizer() -> None:
    job = job_of(WAN, steps=50, fsdp=1, weight_dtype=torch.bfloat16)
    found = parts_of(job)
    assert {"gradients", "optimizer"}.isdisjoint(found)
    assert found["weights"] == 2 * job.weights.total and found["gathered weights"] == 0
    assert parts_of(replace(job, degrees=degrees_of(8)))["weights"] == 2 * job.weights.total / 8


def test_what_follows_the_last_block_may_have_the_rows_of_all_ranks() -> None:
    last_rows = {**WAN, "_class_name": "HeliosTransformer3DModel"}
    whole = parts_of(job_of(last_rows))["outside of blocks"]
    one = parts_of(job_of(last_rows, world_size=1))["outside of blocks"]
    assert whole == one + 2 * 75_264 * 12 * 128 * 2, "the rows are gathered, too"
    assert parts_of(job_of(WAN))["outside of blocks"] < whole / 4


def test_a_call_keeps_copies_of_own_rows() -> None:
    """The plan counts 9,472 rows of q, k, v and out instead of 9,920, and the 9,920 rows of out."""
    job = job_of(FLUX, recompute="none")
    model, rows = job.model, (9_408, 512)
    of_block = model.of_block(0).kept.at(*rows)
    of_ends = model.outside.kept.at(75_264, 512) + model.of_block(0).inputs.at(*rows)
    copied = parts_of(job)["activations"] - 2 * (57 * of_block + of_ends)
    row, lse = 24 * 128 * 2, 24 * 4
    assert copied == pytest.approx(2 * 57 * (9_472 * (4 * row + lse) - 9_920 * (3 * row + lse)))


# -- time


def test_the_flops_are_those_computed_by_hand() -> None:
    job = replace(job_of(WAN), model=replace(estimated(WAN), outside=_nothing()))
    plan = plan_job(job)
    d, video, text = 1536, 75_264, 512
    products = 2 * video * (6 * d * d + 2 * d * 8960) + 2 * text * 2 * d * d
    attention = 4 * d * video * (video + text)
    assert model_flops(job, plan.attention) == pytest.approx(3 * 2 * 30 * (products + attention))
    assert plan.step.flops == model_flops(job, plan.attention)


def _nothing() -> Any:
    outside = estimated(WAN).outside
    return replace(outside, flops_before=Rowwise(), flops_after=Rowwise())


def test_steps_and_batches_repeat_a_forward() -> None:
    one = plan_job(job_of(WAN, steps=1)).step
    fifty = plan_job(job_of(WAN, steps=50)).step
    assert fifty.seconds == pytest.approx(50 * one.seconds)
    assert fifty.tokens_per_second == pytest.approx(one.tokens_per_second)
    assert fifty.samples_per_second == pytest.approx(one.samples_per_second / 50)
    training = plan_job(job_of(WAN, recompute="none")).step
    assert training.attention > 3 * one.attention and training.optimizer > one.optimizer == 0
    again = plan_job(job_of(WAN, recompute="full")).step
    assert again.seconds > training.seconds and again.flops == training.flops


def test_the_exchange_of_the_text_is_in_the_time() -> None:
    with_text = plan_job(job_of(FLUX)).attention.kinds[0]
    forward, backward = with_text.choice.replicated
    prediction = with_text.choice.best.prediction
    assert prediction is not None and prediction.backward is not None
    assert with_text.forward.seconds == prediction.forward.seconds + forward.seconds
    assert with_text.backward.exposed == prediction.backward.exposed + backward.seconds
    (without_text,) = plan_job(job_of(WAN)).attention.kinds
    assert without_text.choice.replicated == () and not without_text.call.has_text


# -- the command

PLAN = ("plan", "--cluster", "h100", "--strategy", "ring")
SIZES = ("--seqlen", "32k", "--replicated", "512", "--world-size", "4")


def planned(tmp_path: Path, values: object, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the command on a config; return its exit status and its report."""
    path, out = tmp_path / "config.json", tmp_path / "plan.json"
    path.write_text(json.dumps(values))
    status = cli.main([*PLAN, "--model", str(path), "--json", str(out), *words])
    return status, json.loads(out.read_text()) if out.exists() else {}


def test_a_config_of_diffusers_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = planned(tmp_path, FLUX, *SIZES, "--batch", "2", "--quick")
    text = capsys.readouterr().out
    assert status == 0 and found["fits"] and found["blocks"] == 57
    assert not [line for line in text.splitlines() if len(line) > 80]
    assert {"weights", "gradients", "optimizer", "activations", "NCCL"} <= {*found["memory_bytes"]}
    counted = {k: v for k, v in found["memory_bytes"].items() if k not in found["not_at_peak"]}
    assert sum(counted.values()) == pytest.approx(found["total_bytes"], abs=len(counted))
    for words in ("32,256 rows of video, 512 of text", "tokens/s a rank", "MFU", "exposed"):
        assert words in text
    assert "diffusers is not installed" in text and "attention over text and video: ring" in text
    (attention,) = found["attention"]
    assert attention["calls"] == 57 and len(attention["replicated"]) == 2


def test_inference_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = planned(tmp_path, WAN, *SIZES, "--steps", "50", "--quick")
    text = capsys.readouterr().out
    assert status == 0 and found["denoising_steps"] == 50 and found["optimizer"] is None
    assert found["degrees"]["fsdp"] == 1 and "gradients" not in found["memory_bytes"]
    assert (
        "\n50 denoising steps, predicted time\n" in text
        and "30 x cross-attention, not sent" in text
    )
    status, one = planned(tmp_path, WAN, *SIZES, "--no-backward", "--quick", "--quiet")
    assert status == 0 and 50 * one["step_s"] == pytest.approx(found["step_s"])


@pytest.mark.slow
def test_the_length_and_the_ranks_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--fits", "--replicated", "512", "--quiet")
    status, found = planned(tmp_path, WAN, *words, "--world-size", "2", "--memory", "30G")
    assert status == 0 and found["fits"] and found["replicated"] == 512
    assert f"{found['seqlen']:,} rows" in capsys.readouterr().out
    longer = ("--seqlen", str(found["seqlen"] * 101 // 100), "--replicated", "512")
    longer += ("--world-size", "2", "--memory", "30G", "--recompute", "full")
    status, _ = planned(tmp_path, WAN, *longer)
    lines = capsys.readouterr().out.splitlines()
    assert status == 1 and len(lines) == 3 and max(map(len, lines)) <= 80
    assert lines[0].startswith("does not fit: a rank needs")
    words = ("--target", "64k", "--replicated", "512", "--memory", "12G", "--quiet")
    status, found = planned(tmp_path, WAN, *words)
    text = " ".join(capsys.readouterr().out.split())
    assert status == 0 and f"rows need {found['degrees']['world_size']} x H100" in text
    status, _ = planned(tmp_path, WAN, *words[:4], "--memory", "900M")
    assert status == 1 and "fit on no number of ranks" in capsys.readouterr().out


def test_attention_of_a_config_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = planned(tmp_path, WAN, "--seqlen", "4k", "--world-size", "2", "--check", "--quick")
    text = capsys.readouterr().out
    assert status == 0 and "2 ranks: 0 faults" in text and "without text" in text


WRONG: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    (FLUX, (*SIZES, "--heads", "4"), "--heads is not used with --model"),
    (FLUX, (*SIZES, "--causal"), "--causal is not used with a config of diffusers"),
    (FLUX, (*SIZES, "--tp", "2"), "--tp is not used with a config of diffusers: its blocks are"),
    (FLUX, (*SIZES, "--loss", "fused"), "it has no logits"),
    (FLUX, (*SIZES, "--steps", "4", "--optimizer", "sgd"), "--optimizer is of training"),
    (FLUX, (*SIZES, "--no-backward", "--recompute", "full"), "--recompute is of training"),
    (FLUX, (*SIZES, "--fsdp", "3"), "--fsdp must divide"),
    (FLUX, (*SIZES, "--fits"), "--seqlen is not used with --fits"),
    (FLUX, ("--fits", "--world-size", "2", "--check"), "--check is not used with --fits"),
    (FLUX, ("--fits", "--target", "64k"), "--fits or --target, not both"),
    (FLUX, ("--seqlen", "4k"), "needs --world-size"),
    (FLUX, ("--seqlen", "512", *SIZES[2:]), "--replicated must be less than the 512 rows"),
    (WAN, (*SIZES, "--documents", "4k"), "does not have the text"),
    ({"_class_name": "AutoencoderKL", "num_layers": 2}, SIZES, "it has no num_attention_heads"),
    ({**FLUX, "num_layers": 1 << 20}, SIZES, "from 1 to 4096"),
    ({**FLUX, "_class_name": "LatteTransformer3DModel"}, SIZES, "does not split it over ranks"),
]


@pytest.mark.parametrize(
    ("values", "words", "text"), WRONG, ids=[" ".join(text.split()) for *_, text in WRONG]
)
def test_wrong_options_and_configs_are_one_line(
    values: dict[str, Any],
    words: tuple[str, ...],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, found = planned(tmp_path, values, *words)
    error = " ".join(capsys.readouterr().err.split())
    assert status == 2 and found == {} and text in error


def test_steps_are_of_transformers_of_diffusers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--seqlen", "4k", "--world-size", "2", "--steps", "4"]
    assert cli.main(["plan", "--model", "llama-3-8b", *words]) == 2
    assert "--steps is of transformers of diffusers" in capsys.readouterr().err
    assert cli.main(["plan", *words]) == 2
    assert "--steps needs --model" in capsys.readouterr().err
