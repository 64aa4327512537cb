"""The activations that a plan counts are those that torch's memory tracker sees on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

import ring_attn
from ring_attn.planning.devices import cpu_cluster
from ring_attn.planning.model import traced
from ring_attn.planning.model.config import model_of
from ring_attn.planning.model.degrees import degrees_of
from ring_attn.planning.model.job import Job, Recompute, SizedModel, sized
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
    if recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
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
    for recompute in ("none", "full"):
        found, expected = planned(model, recompute), measured(kind, implementation, recompute)
        assert found == pytest.approx(expected, rel=0.1), recompute
