"""Plans of diffusion transformers: the activations are those that torch's memory tracker sees."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ring_attn.integrations.diffusers import parallelize
from ring_attn.planning.devices import cpu_cluster
from ring_attn.planning.diffusion import formulas
from ring_attn.planning.diffusion.config import read_transformer, transformer_of
from ring_attn.planning.diffusion.inputs import INPUTS, Maker, Shape
from ring_attn.planning.diffusion.job import DiffusionJob, sized
from ring_attn.planning.diffusion.memory import memory_of
from ring_attn.planning.diffusion.sizes import SizedTransformer
from ring_attn.planning.diffusion.table import TRANSFORMERS
from ring_attn.planning.model.degrees import degrees_of
from ring_attn.planning.model.job import RECOMPUTE, Recompute
from ring_attn.planning.model.traced import LiveBytes

diffusers = pytest.importorskip("diffusers")

pytestmark = pytest.mark.slow

SHAPE = Shape(frames=4, height=8, width=16, text=64)
MODELS: dict[str, dict[str, Any]] = {
    "WanTransformer3DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "num_layers": 3,
        "ffn_dim": 256,
        "text_dim": 64,
        "freq_dim": 32,
    },
    "FluxTransformer2DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "num_layers": 2,
        "num_single_layers": 2,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 32,
        "axes_dims_rope": [8, 12, 12],
        "guidance_embeds": True,
    },
    "HunyuanVideoTransformer3DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "text_embed_dim": 64,
        "pooled_projection_dim": 32,
        "rope_axes_dim": [8, 12, 12],
    },
    "MochiTransformer3DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "num_layers": 3,
        "text_embed_dim": 64,
        "pooled_projection_dim": 32,
        "time_embed_dim": 32,
    },
    "LTXVideoTransformer3DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "num_layers": 3,
        "cross_attention_dim": 128,
        "caption_channels": 64,
    },
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Make a process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(name: str) -> nn.Module:
    found = getattr(diffusers.models.transformers, name)
    model: nn.Module = found(**MODELS[name]).to(torch.bfloat16)
    return model


def inputs_of(name: str, model: Any) -> dict[str, Any]:
    """Return random inputs with the shapes of those on the meta device."""

    def drawn(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return type(x)(map(drawn, x)) if isinstance(x, tuple) else x
        if x.dtype == torch.bool:
            return torch.ones(x.shape, dtype=torch.bool)
        return torch.randn(x.shape, dtype=x.dtype)

    inputs = INPUTS[name](model.config, Maker(SHAPE, torch.bfloat16))
    return {key: drawn(x) for key, x in inputs.items()}


def measured(name: str, recompute: Recompute) -> int:
    """Return the peak of a training step by torch's tracker, without weights and their gradients.

    All gradients exist, as after the first step.
    """
    model: Any = make(name).train()
    if recompute != "none":
        options: dict[str, Any] = {"use_reentrant": False}
        if recompute == "attention":
            kept = [torch.ops.ring_attn.attention.default]
            options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
        model.enable_gradient_checkpointing(partial(checkpoint, **options))
    inputs = inputs_of(name, model)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    tracker = MemTracker()
    tracker.track_external(model)
    handle = parallelize(model, strategy="ring")
    with tracker:
        sample = model(**inputs, return_dict=False)[0]
        target = torch.empty_like(sample)
        loss = nn.functional.mse_loss(sample.float(), target.float())
        del sample, target
        loss.backward()
    handle.remove()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return int(peak["Total"]) - sum(2 * weight.nbytes for weight in model.parameters())


def measured_inference(name: str) -> int:
    """Return the peak of a forward without gradients by torch's tracker, without weights."""
    model: Any = make(name).eval()
    inputs = inputs_of(name, model)
    tracker = MemTracker()
    tracker.track_external(model)
    handle = parallelize(model, strategy="ring")
    with torch.no_grad(), tracker:
        model(**inputs, return_dict=False)
    handle.remove()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return int(peak["Total"]) - sum(weight.nbytes for weight in model.parameters())


def traced(name: str, *, training: bool = True) -> SizedTransformer:
    """Return the traced sizes of a small model."""
    config = transformer_of("small", {"_class_name": name, **MODELS[name]})
    model = sized(config, torch.bfloat16, training=training)
    assert model.note == "", "the module is traced"
    return model


def planned(model: SizedTransformer, recompute: Recompute, *, steps: int | None = None) -> float:
    """Return the peak of the plan, without weights and their gradients."""
    job = DiffusionJob(
        model=model,
        seqlen=SHAPE.video + SHAPE.text,
        text=SHAPE.text,
        degrees=degrees_of(1),
        cluster=cpu_cluster(),
        memory_bytes=float("inf"),
        steps=steps,
        recompute=recompute,
        optimizer="none",
        weight_dtype=torch.bfloat16,
    )
    memory = memory_of(job, 0.0, 0.0)
    copies = 2 if steps is None else 1
    assert memory.fixed == copies * 2 * model.weights.total
    return memory.total - memory.fixed


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_that_of_torchs_tracker(name: str) -> None:
    model = traced(name)
    for recompute in RECOMPUTE:
        found, expected = planned(model, recompute), measured(name, recompute)
        assert found == pytest.approx(expected, rel=0.1), recompute


@pytest.mark.parametrize("name", MODELS)
def test_memory_of_inference_is_that_of_torchs_tracker(name: str) -> None:
    found = planned(traced(name, training=False), "none", steps=1)
    assert found == pytest.approx(measured_inference(name), rel=0.1)


def test_tensors_that_are_not_counted_are_found() -> None:
    """The comparison fails if the trace leaves out what is kept in float32."""
    hold, name = LiveBytes.hold, "WanTransformer3DModel"

    def hold_16_bits(self: LiveBytes, x: Tensor) -> bool:
        return x.itemsize < 4 and hold(self, x)

    with mock.patch.object(LiveBytes, "hold", hold_16_bits):
        model = traced(name)
    assert planned(model, "none") < 0.9 * measured(name, "none")


# Weights of the transformers as their authors publish them, in billions.
PUBLISHED = {
    "wan-2.1-1.3b": 1.42,
    "wan-2.1-14b": 14.29,
    "hunyuan-video": 12.82,
    "flux.1-dev": 11.9,
    "ltx-video": 1.92,
    "cogvideox-5b": 5.57,
    "qwen-image": 20.4,
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_formulas_are_near_the_real_module(name: str) -> None:
    config = read_transformer(name)
    assert config is not None
    model, estimated = sized(config), formulas.estimate(config)
    assert model.note == "" and model.weights.total / 1e9 == pytest.approx(PUBLISHED[name], 0.01)
    assert estimated.weights.total == pytest.approx(model.weights.total, rel=0.15)
    assert len(estimated.kinds) == len(model.kinds)
    # For 75,000 rows of video and 512 of text.
    rows = 75_000, 512
    for index in range(len(model.kinds)):
        found, real = estimated.of_block(index), model.of_block(index)
        assert found.flops_forward.at(*rows) == pytest.approx(real.flops_forward.at(*rows), rel=0.1)
        assert found.kept.at(*rows) == pytest.approx(real.kept.at(*rows), rel=0.4)
        assert found.backward.at(*rows) == pytest.approx(real.backward.at(*rows), rel=0.4)
        assert {call for call in found.calls if call.is_split} == {
            call for call in real.calls if call.is_split
        }
