"""Transformers of diffusers on split sequences: right, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn.integrations.diffusers import PLANS, Plan, parallelize
from ring_attn.integrations.diffusers.plans import Rows
from ring_attn.testing import check_rounded, noisy_runs
from tests.diffusers_models import TINY, classes, compared, inputs_of, make, outcome, run, table
from tests.distributed.pool import Pools, on_ranks
from tests.hf_models import all_in_float64
from tests.refusals import refused

pytestmark = pytest.mark.gloo


@pytest.mark.slow
@on_ranks(2)
def test_some_classes_are_right() -> None:
    """Joint attention with text first, and with padded text last, and cross-attention."""
    for name in (
        "FluxTransformer2DModel",
        "HunyuanVideoTransformer3DModel",
        "WanTransformer3DModel",
    ):
        assert compared(name, dist.group.WORLD) == [], name


@pytest.mark.slow
@on_ranks(3)
def test_other_layouts_strategies_and_numbers_of_ranks() -> None:
    assert compared("SD3Transformer2DModel", dist.group.WORLD, layout="zigzag") == []
    assert compared("QwenImageTransformer2DModel", dist.group.WORLD, strategy="ulysses") == []


@pytest.mark.slow
@on_ranks(2)
def test_a_plan_with_wrong_facts_is_found() -> None:
    """The comparison finds text in the wrong place; cross-attention by mistake does not fit."""
    name = "HunyuanVideoTransformer3DModel"
    plan = PLANS[name]._replace(text="first")
    assert "sample" in compared(name, dist.group.WORLD, plan=plan)
    name = "WanTransformer3DModel"
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = make(name)
    parallelize(model, alone, plan=PLANS[name]._replace(cross=()))
    with refused(ValueError, "must have 27 rows of the video|got 14|does not fit its plan"):
        run(model, inputs_of(name))


@pytest.mark.slow
@on_ranks(2)
def test_lora_and_checkpointing() -> None:
    """Blocks run again in the backward, outside of the transformer's forward."""

    def adapted() -> nn.Module:
        model = make("WanTransformer3DModel")
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
        model.add_adapter(config)
        model.enable_gradient_checkpointing()
        return model.train()

    model, inputs = adapted(), inputs_of("WanTransformer3DModel")
    with all_in_float64():
        oracle = run(adapted().double(), inputs_of("WanTransformer3DModel", torch.float64))
    noisy = noisy_runs(lambda: run(model, inputs))
    parallelize(model)
    got = run(model, inputs)
    assert got.keys() == oracle.keys() and all("lora" in key for key in got if key != "sample")
    for key in sorted(got):
        if key != "sample":
            dist.all_reduce(got[key])
        assert check_rounded(key, got[key], oracle[key], [x[key] for x in noisy]).ok, key


@on_ranks(2)
def test_a_pipeline_with_guidance_makes_the_video_of_one_process() -> None:
    transformer = make("WanTransformer3DModel")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=transformer
    )
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(4)
    prompt, negative = torch.randn(2, 1, 7, 16, generator=generator)

    def frames(dtype: torch.dtype = torch.float32) -> Tensor:
        latents = torch.randn(1, 4, 3, 6, 6, generator=torch.Generator().manual_seed(5))
        result: Tensor = pipe(
            prompt_embeds=prompt.to(dtype),
            negative_prompt_embeds=negative.to(dtype),
            guidance_scale=3.0,
            num_inference_steps=2,
            height=48,
            width=48,
            num_frames=9,
            latents=latents.to(dtype),
            output_type="latent",
        ).frames
        return result

    noisy = noisy_runs(frames, num=8)
    with all_in_float64():
        transformer.double()
        oracle = frames(torch.float64)
    transformer.float()
    handle = parallelize(pipe.transformer)
    got = frames()
    assert handle.num_calls == 2 * 2 * 2, "steps, prompts and blocks"
    assert check_rounded("latents", got, oracle.double(), noisy).ok
    handle.remove()
    assert frames().shape == got.shape and handle.num_calls == 8


@on_ranks(2)
def test_what_is_not_built_is_refused() -> None:
    group = dist.new_group()

    class NewTransformer3DModel(nn.Module): ...

    with refused(NotImplementedError, "NewTransformer3DModel has no plan|WanTransformer3DModel"):
        parallelize(NewTransformer3DModel(), group)
    with refused(TypeError, "a transformer of diffusers"):
        parallelize("wan", group)  # type: ignore[arg-type]
    with refused(ValueError, "layout must be one of"):
        parallelize(make("WanTransformer3DModel"), group, layout="balanced")
    model: Any = make("HunyuanVideoTransformer3DModel")
    model.register_to_config(image_condition_type="token_replace")
    with refused(NotImplementedError, "image_condition_type='token_replace' is not supported"):
        parallelize(model, group)
    model = make("WanTransformer3DModel")
    handle = parallelize(model, group)
    with refused(ValueError, "split already|remove()"):
        parallelize(model, group)
    handle.remove()
    with refused(ValueError, "have no freqs"):
        parallelize(model, group, plan=Plan(("blocks",), "cross", rows=(Rows("freqs", 0),)))
    with refused(ValueError, "must have a module 'out'"):
        parallelize(model, group, plan=Plan(("blocks",), "cross", output="out"))
    with refused(ValueError, "must have blocks in layers"):
        parallelize(model, group, plan=Plan(("layers",), "cross"))


@pytest.mark.slow
def test_the_table_of_classes(ranks: Pools) -> None:
    """Has no class that is wrong; `tests/diffusers_models.py` says how it is written again."""
    pool = ranks(2)
    outcomes = {name: pool.run(outcome, name, timeout=1000)[0] for name in classes()}
    text = "\n".join(table(outcomes))
    assert set(TINY) == set(PLANS)
    assert "WRONG" not in text
    assert text == (Path(__file__).parents[2] / "docs" / "diffusers_models.md").read_text()
