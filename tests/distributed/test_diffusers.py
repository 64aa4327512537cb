"""Transformers of diffusers on split sequences: right, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ring_attn import JointLayout, SequenceLayout
from ring_attn.core.masks import from_dense
from ring_attn.integrations.diffusers import PLANS, Plan, parallelize
from ring_attn.integrations.diffusers.attention import masks_of
from ring_attn.integrations.diffusers.config import requested_by
from ring_attn.testing import check_rounded, noisy_runs
from ring_attn.values.diffusers import REFUSED, Rows
from tests.diffusers_models import (
    classes,
    compared,
    inputs_of,
    make,
    outcome,
    outcomes_of,
    run,
    table,
)
from tests.diffusers_tiny import TINY
from tests.distributed.pool import Pools, on_ranks
from tests.hf_models import all_in_float64
from tests.refusals import refused

pytestmark = pytest.mark.gloo

PAGE = Path(__file__).parents[2] / "docs" / "diffusers_models.md"
# The table's classes are divided among so many tests, which run beside other tests.
PARTS = 4


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
    # Double- and single-stream blocks, and video that every rank needs whole after the blocks.
    assert compared("FluxTransformer2DModel", dist.group.WORLD, layout="zigzag") == []
    assert compared("Krea2Transformer2DModel", dist.group.WORLD, layout="striped") == []


TIMES = torch.tensor([300.0, 700.0])
# Inputs with a time for each position or frame, and without: unlike those of the table's test.
TIMED: dict[str, dict[str, Any]] = {
    "WanTransformer3DModel": {"timestep": TIMES[:, None] + torch.arange(27.0)},
    "LTXVideoTransformer3DModel": {"timestep": TIMES[:, None] + torch.arange(27.0)},
    "LTX2VideoTransformer3DModel": {"timestep": TIMES},
    "CosmosTransformer3DModel": {"timestep": TIMES.view(2, 1, 1, 1, 1)},
    "SkyReelsV2Transformer3DModel": {"timestep": TIMES.long(), "enable_diffusion_forcing": False},
}


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("name", TIMED)
def test_times_of_positions(name: str) -> None:
    """The rows leave after the last block if the time differs by frame, else after the output."""
    assert compared(name, dist.group.WORLD, TIMED[name]) == []
    if name == "LTXVideoTransformer3DModel":
        # Three rows on two ranks, of which one has one row: the times are not split.
        few: dict[str, Any] = {"num_frames": 3, "height": 1, "width": 1}
        few["hidden_states"] = inputs_of(name)["hidden_states"][:, :3]
        few["timestep"] = TIMED[name]["timestep"][:, :3]
        assert compared(name, dist.group.WORLD, few) == []


@pytest.mark.slow
@on_ranks(2)
def test_the_output_module_has_the_rows_of_a_rank() -> None:
    rows = []
    others: dict[str, dict[str, Any]] = {"WanTransformer3DModel": {}}
    others["AnyFlowTransformer3DModel"] = {}  # its times are split where it makes them
    for name, inputs in (*others.items(), *TIMED.items()):
        model: Any = make(name)
        found = []
        model.proj_out.register_forward_pre_hook(lambda _, args, f=found: f.append(args[0].size(1)))
        parallelize(model)
        with torch.no_grad():
            model(**inputs_of(name, replaced=inputs))
        rows += found
    own = 14 if dist.get_rank() == 0 else 13
    assert rows == [own, own, own, own, own, 15, 8]


@pytest.mark.slow
@on_ranks(2)
def test_times_of_other_positions_are_refused() -> None:
    """26 times of 27 positions: an error on both ranks, though 13 fit on one of them."""
    model = make("WanTransformer3DModel")
    parallelize(model, dist.new_group())
    with pytest.raises((ValueError, RuntimeError), match="temb of a block must have 27 rows"):
        run(model, inputs_of("WanTransformer3DModel", replaced={"timestep": torch.ones(2, 26)}))


@pytest.mark.slow
@on_ranks(2)
def test_a_plan_with_wrong_facts_is_found() -> None:
    """The comparison finds text in the wrong place; cross-attention by mistake does not fit."""
    name = "HunyuanVideoTransformer3DModel"
    plan = PLANS[name]._replace(text="first")
    assert "sample" in compared(name, dist.group.WORLD, plan=plan)
    name = "LTX2VideoTransformer3DModel"
    plan = PLANS[name]._replace(copies=())
    wrong = compared(name, dist.group.WORLD, TIMED[name], plan=plan)
    assert "gradient of audio_proj_out.weight" in wrong and "sample" not in wrong
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
        import peft  # it takes seconds, which each process of tests would spend

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


@pytest.mark.slow
@on_ranks(2)
def test_weights_shared_by_fsdp() -> None:
    """FSDP2 gathers the weights of a block around its forward, which `parallelize` has wrapped."""
    name = "FluxTransformer2DModel"
    model, inputs = make(name), inputs_of(name)
    with all_in_float64():
        oracle = run(make(name).double(), inputs_of(name, torch.float64))
    noisy = noisy_runs(lambda: run(model, inputs))
    parallelize(model)
    mesh = init_device_mesh("cpu", (2,))
    transformer: Any = model
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    for module in (*blocks, model):
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)  # gradients of ranks are shares of a sum
        sharded.set_force_sum_reduction_for_comms(True)  # as NCCL has the factor only
    got = run(model, inputs)
    assert got.keys() == oracle.keys()
    for key in sorted(got):
        value = got[key]
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert (key == "sample") == (whole is value)
        assert check_rounded(key, whole, oracle[key], [x[key] for x in noisy]).ok, key


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


def whole_pipeline() -> diffusers.WanPipeline:
    """Return a tiny pipeline with text encoder and VAE, made from configs."""
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "boat": 4, "at": 5, "sea": 6, "blurred": 7}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="</s>",
    )
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    torch.manual_seed(6)
    text_config = transformers.UMT5Config(
        vocab_size=8, d_model=16, d_kv=8, num_heads=2, d_ff=16, num_layers=1
    )
    return diffusers.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=transformers.UMT5EncoderModel(text_config).eval(),
        vae=diffusers.AutoencoderKLWan(
            base_dim=3,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=make("WanTransformer3DModel", in_channels=16, out_channels=16),
    )


@pytest.mark.slow
@on_ranks(2)
def test_a_whole_pipeline_makes_the_images_of_one_process() -> None:
    """Text to images: text encoder and VAE run on every rank, and are left as they are."""
    pipe = whole_pipeline()
    pipe.set_progress_bar_config(disable=True)
    modules = pipe.text_encoder, pipe.vae, pipe.transformer

    def images(**noise: Any) -> Tensor:
        result: Tensor = pipe(
            prompt="a boat at sea",
            negative_prompt="blurred",  # of another length
            guidance_scale=3.0,
            num_inference_steps=2,
            height=32,
            width=32,
            num_frames=9,
            max_sequence_length=8,
            output_type="pt",
            **noise,
        ).frames
        return result

    latents = torch.randn(1, 16, 3, 4, 4, generator=torch.Generator().manual_seed(5))
    noisy = noisy_runs(lambda: images(latents=latents))
    with all_in_float64():
        for module in modules:
            module.double()
        oracle = images(latents=latents.double())
    for module in modules:
        module.float()
    handle = parallelize(pipe.transformer, dist.group.WORLD)
    got = images(latents=latents)
    assert handle.num_calls == 2 * 2 * 2, "steps, prompts and blocks"
    assert got.shape == (1, 9, 3, 32, 32)
    assert check_rounded("images", got, oracle.double(), noisy).ok
    # Every rank draws the noise from the same seed, and gets the same images.
    drawn = images(generator=torch.Generator().manual_seed(7))
    every = [torch.empty_like(drawn) for _ in range(2)]
    dist.all_gather(every, drawn.contiguous())
    assert torch.equal(*every)


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
    with refused(ValueError, "rows of its plan|has no freqs"):
        parallelize(model, group, plan=Plan(("blocks",), "cross", rows=(Rows("freqs", 0),)))
    with refused(ValueError, "must have a module 'out'"):
        parallelize(model, group, plan=Plan(("blocks",), "cross", output="out"))
    with refused(ValueError, "must have a module 'times'"):
        parallelize(model, group, plan=Plan(("blocks",), "cross", conditions=(("times", (0,)),)))
    for plan, message in (
        (Plan(("blocks",), "cross", output=None, times="timestep"), "times|requires an output"),
        (
            Plan(("blocks",), "cross", output=None, copies=("norm_out",)),
            "copies|requires an output",
        ),
        (
            Plan(("blocks",), "cross", output=None, conditions=(("condition_embedder", (0,)),)),
            "conditions|requires an output",
        ),
        (Plan(("blocks",), "cross", times="moments"), "times|has no moments"),
        (Plan(("blocks",), "cross", hidden="video"), "hidden|has no video"),
        (Plan(("blocks",), "cross", cross=("attn2", "attn3")), "cross|has no attn3"),
        (Plan(("blocks",), "cross", to_video=("attn4",)), "to_video|has no attn4"),
        (Plan(("blocks",), "cross", copies=("audio_proj",)), "copies|has no audio_proj"),
    ):
        with refused(ValueError, message):
            parallelize(model, group, plan=plan)
    with refused(ValueError, "must have blocks in layers"):
        parallelize(model, group, plan=Plan(("layers",), "cross"))
    model = make("MotifVideoTransformer3DModel")
    model.register_to_config(num_decoder_layers=1)
    with refused(NotImplementedError, "num_decoder_layers=1 is not supported|it must be 0"):
        parallelize(model, group)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    name = "FluxTransformer2DModel"
    model = make(name)
    parallelize(model, alone, same_bits=True)
    with refused(NotImplementedError, "same_bits=True|rows that every rank holds"):
        run(model, inputs_of(name))
    for name, reason in REFUSED.items():
        with refused(NotImplementedError, f"{name}|{reason}"):
            parallelize(type(name, (nn.Module,), {})(), group)


@pytest.mark.slow
@on_ranks(2)
def test_compiled_transformers_and_blocks() -> None:
    """Compiled code has the same bits; graphs end at blocks, or in blocks at attention."""
    name = "WanTransformer3DModel"
    inputs = inputs_of(name)
    graphs: list[str] = []

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    model: Any = make(name).requires_grad_(False)
    handle = parallelize(model, dist.group.WORLD)
    expected = model(**inputs, return_dict=False)[0]
    whole = torch.compile(model, backend=counting)
    assert torch.equal(whole(**inputs, return_dict=False)[0], expected)
    assert graphs and not any("scaled_dot_product_attention" in code for code in graphs)
    graphs.clear()
    handle.remove()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=counting)
    parallelize(model, dist.group.WORLD)
    assert torch.equal(model(**inputs, return_dict=False)[0], expected)
    # Cross-attention to the text is in graphs, attention to the video of all ranks is not.
    assert any("scaled_dot_product_attention" in code for code in graphs)
    assert not any("ring_attn" in code for code in graphs)
    torch.compiler.reset()


@on_ranks(2)
def test_a_config_of_diffusers_names_ranks_and_strategy() -> None:
    config_of = diffusers.ContextParallelConfig
    model = make("WanTransformer3DModel")
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp", "ring", "ulysses"))
    for config, strategy in (
        (config_of(ring_degree=2), "ring"),
        (config_of(ulysses_degree=2, ulysses_anything=True), "ulysses"),
        (config_of(ring_degree=2, mesh=mesh), "ring"),
    ):
        group, named = requested_by(config)
        assert named.name_on(2) == strategy
        handle = parallelize(model, config)
        assert dist.get_process_group_ranks(handle.group) == [0, 1]
        assert handle.strategy == named
        handle.remove()
    with refused(ValueError, "strategy must be left out|'auto'"):
        parallelize(model, config_of(ring_degree=2), strategy="auto")
    with refused(NotImplementedError, "convert_to_fp32 must be True|float32 always"):
        parallelize(model, config_of(ring_degree=2, convert_to_fp32=False))
    with refused(ValueError, "the number of ranks, 2|got 2 x 2"):
        parallelize(model, config_of(ring_degree=2, ulysses_degree=2))
    with refused(ValueError, "sizes of these axes|(2, 1)|got (1, 2)"):
        parallelize(model, config_of(ulysses_degree=2, mesh=mesh))
    with refused(ValueError, "must have the axes|('cp',)"):
        parallelize(
            model,
            config_of(ring_degree=2, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))),
        )


@on_ranks(2)
def test_masks_from_tensors() -> None:
    """Hidden text of this rank's rows, masks of all rows, and masks that are refused."""
    rank = dist.get_rank()
    layout = JointLayout([SequenceLayout.contiguous(6, 2), 3])
    layouts = layout, layout
    text_seen = torch.tensor([True, True, False])
    own = torch.cat([torch.ones(3, dtype=torch.bool), text_seen])
    whole = torch.cat([torch.ones(6, dtype=torch.bool), text_seen])
    # HunyuanVideo 1.5 hides text from text, and makes its mask from the rows of a rank.
    expected = [from_dense(whole[:, None] & whole)]
    assert masks_of((own[:, None] & own)[None, None], layouts, rank) == expected
    assert masks_of((whole[:, None] & whole)[None, None], layouts, rank) == expected
    keys = [from_dense(whole.expand(9, -1))]
    assert masks_of(whole[None, None, None], layouts, rank) == keys
    assert masks_of(whole.expand(1, 4, 6, -1), layouts, rank) == keys, "expanded by head and row"
    added = torch.zeros(9).masked_fill(~whole, -1e4)
    assert masks_of(added[None, None, None], layouts, rank) == keys, "added to scores"
    assert masks_of(torch.zeros(1, 1, 1, 9), layouts, rank) is None
    causal = torch.ones(9, 9).tril().bool()
    assert masks_of(causal[None, None], layouts, rank) == [from_dense(causal)]
    with refused(NotImplementedError, "differs by query and key"):
        masks_of(torch.ones(6, 6).tril().bool()[None, None], layouts, rank)
    with refused(NotImplementedError, "must hide only text"):
        masks_of(own.flip(0)[None, None, None], layouts, rank)
    with refused(NotImplementedError, "numbers that are added to scores are not supported"):
        masks_of(torch.ones(1, 1, 1, 9), layouts, rank)
    with refused(NotImplementedError, "equal for all heads"):
        masks_of(torch.stack([causal, ~causal])[None], layouts, rank)
    with refused(NotImplementedError, "must have 9 rows|got 4"):
        masks_of(whole[None, None, None, 5:], layouts, rank)


def test_the_table_of_classes_has_all_and_nothing_wrong() -> None:
    page = PAGE.read_text()
    assert set(TINY) == set(PLANS)
    assert "WRONG" not in page
    assert page == "\n".join(table(outcomes_of(page)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_table_of_classes(ranks: Pools, part: int) -> None:
    """The page has what becomes of each; `tests/diffusers_models.py` says how it is made again."""
    pool = ranks(2)
    said = outcomes_of(PAGE.read_text())
    for name in classes()[part::PARTS]:
        assert pool.run(outcome, name, timeout=1000)[0] == said[name], name
