"""The activations that a plan counts are those that torch's memory tracker sees on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import ring_attn
from ring_attn.models import recurrent
from ring_attn.planning.devices import cpu_cluster
from ring_attn.planning.model import traced
from ring_attn.planning.model.config import model_of
from ring_attn.planning.model.degrees import degrees_of
from ring_attn.planning.model.job import RECOMPUTE, Job, Recompute, SizedModel, sized
from ring_attn.planning.model.memory import memory_of

transformers = pytest.importorskip("transformers")

ROWS = 512
SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gemma3_text": {
        **SIZES,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "mixtral": SIZES | EXPERTS,
    "gpt_oss": SIZES | EXPERTS | {"sliding_window": 64, "intermediate_size": 128},
    "deepseek_v3": {
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 2,
        "n_group": 2,
        "topk_group": 1,
    },
    "qwen3_next": {
        **SIZES,
        **EXPERTS,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}


@pytest.fixture(scope="module")
def implementation() -> Iterator[str]:
    """Register ring_attn's attention for a group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with ring_attn.integrations.transformers.register(name="ring_attn_alone", layout="contiguous"):
        yield "ring_attn_alone"
    dist.destroy_process_group()


def measured(kind: str, implementation: str, recompute: Recompute) -> int:
    """Return the peak of a step by torch's tracker, without weights and their gradients.

    All gradients exist, as after the first step. The loss is the model's own, with all logits.
    """
    config = transformers.CONFIG_MAPPING[kind](**MODELS[kind])
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, dtype=torch.bfloat16
    ).train()
    if recompute != "none":
        options: dict[str, Any] = {"use_reentrant": False}
        if recompute == "attention":  # as `planning.model.advice` writes
            kept = [torch.ops.ring_attn.attention.default]
            options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
        model.gradient_checkpointing_enable(options)
    ids = torch.randint(SIZES["vocab_size"], (1, ROWS))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return int(peak["Total"]) - sum(2 * weight.nbytes for weight in model.parameters())


def sizes_of(kind: str) -> SizedModel:
    """Return the traced sizes of a model.

    Functions of recurrences are those that a CPU has, whose operators keep more than kernels.
    """
    values = {"model_type": kind, **MODELS[kind]}
    with mock.patch.object(traced, "STAND_INS", {}):
        model = sized(model_of(kind, values), torch.bfloat16)
    assert model.note == "", "the module is traced"
    return model


def planned(model: SizedModel, recompute: Recompute) -> float:
    """Return the peak of the plan, without weights and their gradients."""
    job = Job(
        model=model,
        seqlen=ROWS,
        degrees=degrees_of(1),
        cluster=cpu_cluster(),
        memory_bytes=float("inf"),
        recompute=recompute,
        loss="logits",
        optimizer="none",
        dtype=torch.bfloat16,
        weight_dtype=torch.bfloat16,
    )
    memory = memory_of(job, 0.0, 0.0)
    assert memory.fixed == 2 * 2 * model.weights.total
    return memory.total - memory.fixed


@pytest.mark.parametrize("kind", MODELS)
def test_memory_is_that_of_torchs_tracker(kind: str, implementation: str) -> None:
    model = sizes_of(kind)
    for recompute in RECOMPUTE:
        found, expected = planned(model, recompute), measured(kind, implementation, recompute)
        assert found == pytest.approx(expected, rel=0.1), recompute


def test_tensors_that_are_not_counted_are_found(implementation: str) -> None:
    """The comparison fails if the trace leaves out what norms keep in float32."""
    hold = traced.LiveBytes.hold

    def hold_16_bits(self: traced.LiveBytes, x: Tensor) -> bool:
        return x.itemsize < 4 and hold(self, x)

    with mock.patch.object(traced.LiveBytes, "hold", hold_16_bits):
        model = sizes_of("llama")
    expected = measured("llama", implementation, "none")
    assert planned(model, "none") < 0.9 * expected


def test_each_recurrence_that_is_known_has_a_stand_in() -> None:
    """Fused functions return None in transformers, and MiniMax's class is traced as it is."""
    fused = {"mamba2_split_conv1d_scan_combined", "mamba_inner_fn"}
    # Other tests register functions of their own.
    splits = recurrent.SPLITS.items()
    ours = {name for name, split in splits if split.__module__ == recurrent.__name__}
    assert {*traced.STAND_INS} == ours - fused - {"MiniMaxLightningAttention"}
