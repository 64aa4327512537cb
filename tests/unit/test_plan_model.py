"""`ring-attn plan --model`: sizes of models, memory, time, what fits, and what to write."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ring_attn.cli import main as cli
from ring_attn.cli import plan as command
from ring_attn.cli import plan_model
from ring_attn.planning.devices import builtin_cluster, cpu_cluster
from ring_attn.planning.model import attention as attention_of_model
from ring_attn.planning.model import formulas, job, report, traced
from ring_attn.planning.model.advice import advice_for
from ring_attn.planning.model.config import model_of, read_model
from ring_attn.planning.model.degrees import check_degrees, degrees_of, stages_of
from ring_attn.planning.model.fits import ModelPlan, ModelPlanner, plan_job
from ring_attn.planning.model.job import Job, SizedModel
from ring_attn.planning.model.lines import speed
from ring_attn.planning.model.memory import Memory, memory_of
from ring_attn.planning.model.search import thrifty, unit_of
from ring_attn.planning.model.step import PRODUCT_SHARES, collective_seconds, model_flops
from ring_attn.planning.model.table import MODELS

transformers = pytest.importorskip("transformers")

ROOT, GB = Path(__file__).parents[2], 1e9
H100 = builtin_cluster("H100")
PLANNER = ModelPlanner()


@lru_cache
def model(name: str) -> SizedModel:
    return job.sized(read_model(name))


def job_of(name: str, seqlen: int, world_size: int, **options: Any) -> Job:
    names = ("cp", "tp", "pp", "ep", "fsdp")
    degrees = {key: options.pop(key) for key in names if key in options}
    return Job(
        model=model(name),
        seqlen=seqlen,
        degrees=degrees_of(world_size, **degrees),
        cluster=H100,
        memory_bytes=80 * GB,
        **options,
    )


def parts_of(memory: Memory) -> dict[str, float]:
    return {part.name: part.nbytes for part in memory.parts}


# -- sizes of models

# Weights as their authors count them: in all, and those that a token visits, in billions. gpt-oss
# counts the embedding in the first number only.
COUNTED = {
    "llama-3-8b": (8.03, 8.03),
    "llama-3-70b": (70.6, 70.6),
    "llama-3-405b": (405.9, 405.9),
    "mistral-7b": (7.24, 7.24),
    "gemma-3-27b": (27.0, 27.0),
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-next-80b-a3b": (79.7, 3.9),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "deepseek-v3": (671.0, 37.5),
    "deepseek-v2-lite": (15.7, 2.7),
    "jamba-v0.1": (51.6, 12.1),
}


@pytest.mark.parametrize("name", COUNTED)
def test_models_have_the_weights_that_their_authors_count(name: str) -> None:
    sized = model(name)
    total, active = COUNTED[name]
    assert sized.note == "" and sized.weights.total / 1e9 == pytest.approx(total, rel=2e-3)
    share = sized.architecture.experts_per_token / max(sized.architecture.experts, 1)
    counts_embedding = sized.weights.head > 0 and not name.startswith("gpt-oss")
    embedding = sized.weights.embedding * counts_embedding
    visited = (sized.weights.visited(share) + embedding) / 1e9
    assert visited == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("name", MODELS)
def test_formulas_have_the_weights_of_the_real_module(name: str) -> None:
    sized = model(name)
    assert formulas.weights_of(sized.architecture) == sized.weights
    estimated = formulas.activations_of(sized.architecture)
    for index in range(len(sized.architecture.layers)):
        found, real = estimated.of_layer(index), sized.activations.of_layer(index)
        assert found.kept == pytest.approx(real.kept, rel=0.3)
        assert found.backward == pytest.approx(real.backward, rel=0.3)
    assert estimated.head.peak == pytest.approx(sized.activations.head.peak, rel=0.05)


def test_activations_of_a_layer_of_llama_are_those_counted_by_hand() -> None:
    # Two norms keep 4 bytes of their input and twice 2 of the result, and a number; q, k, v and out
    # 2 bytes, lse 4; gate, up, activation and product 2 each; the layer's output 2.
    norms = 2 * (8 * 4096 + 4)
    attention = 2 * (4096 + 2 * 1024 + 4096) + 4 * 32
    feedforward = 4 * 2 * 14336
    expected = norms + attention + feedforward + 2 * 4096
    (layer,) = model("llama-3-8b").activations.layers
    assert layer.kept == expected == 209032


def kinds_of(name: str) -> dict[str, int]:
    architecture = model(name).architecture
    every = (*architecture.attentions.items(), *architecture.recurrences.items())
    return {mixer.words: count for mixer, count in every}


def test_layers_are_those_of_the_config() -> None:
    assert kinds_of("llama-3-8b") == {"full attention": 32}
    assert kinds_of("mistral-7b") == {"window of 4096": 32}
    assert kinds_of("gemma-3-12b") == {"window of 1024": 40, "full attention": 8}
    assert kinds_of("qwen3-next-80b-a3b") == {"delta rule": 36, "full attention": 12}
    assert kinds_of("jamba-v0.1") == {"mamba": 28, "full attention": 4}
    architecture = model("deepseek-v3").architecture
    (mla,) = architecture.attentions
    assert (mla.nheads, mla.headdim, mla.headdim_v, mla.kv_rank) == (128, 192, 128, 512)
    dense = [x for x in architecture.layers if x.feedforward and not x.feedforward.experts]
    assert len(dense) == 3 and "58 with 8 of 256 experts" in report.layers_in_words(architecture)
    (delta,) = model("qwen3-next-80b-a3b").architecture.recurrences
    assert delta.state_bytes == 4 * (32 * 128 * 128 + 32)
    (mamba,) = model("jamba-v0.1").architecture.recurrences
    assert mamba.state_bytes == 4 * 2 * 8192 * 16
    (kimi,) = model_of("kimi", {"model_type": "kimi_linear"}).architecture.recurrences
    assert (kimi.kind, kimi.nheads, kimi.dim_qk, kimi.dim_v) == ("delta rule", 32, 128, 128)
    chunked = {**LLAMA, "layer_types": ["chunked_attention", "full_attention"]}
    kinds = model_of("chunks", {**chunked, "attention_chunk_size": 64}).architecture.attentions
    assert [kind.chunk for kind in kinds] == [64, None]


# -- memory


def test_the_memory_of_llama_is_that_computed_by_hand() -> None:
    # 64k tokens on 8 ranks: 8192 rows of each. A layer has 218,112,000 weights.
    total, layer, outside = 8_030_261_248, 218_112_000, 2 * 128256 * 4096 + 4096
    found = parts_of(memory_of(job_of("llama-3-8b", 1 << 16, 8, loss="logits"), 1e9, 2e9))
    assert found["weights"] == total * 4 / 8
    assert found["optimizer"] == total * 8 / 8
    assert found["gathered weights"] == 2 * (2 * layer + outside)
    assert found["gradients"] == total * 4 / 8 + 6 * layer + 2 * outside
    # With full recomputation a layer keeps its input; the embedded tokens, positions and RoPE's
    # cosines and sines of 128 dims, and 8 bytes of ids.
    before = 2 * 4096 + 2 * 2 * 128 + 8
    assert found["activations"] == 8192 * (32 * 2 * 4096 + before)
    assert found["one layer"] == 8192 * 258176
    assert found["logits and loss"] == pytest.approx(8192 * (12 * 128256 + 4 * 4096), rel=1e-4)
    assert found["attention's buffers"] == 1e9
    assert found["NCCL"] > 2e9


@pytest.mark.parametrize(
    ("optimizer", "dtype", "nbytes"),
    [
        ("adamw", torch.float32, 8),
        ("adamw", torch.bfloat16, 4),
        ("adamw-8bit", torch.float32, 2),
        ("momentum", torch.float32, 4),
        ("sgd", torch.float32, 0),
    ],
)
def test_an_optimizer_has_states_for_each_weight(
    optimizer: str, dtype: torch.dtype, nbytes: int
) -> None:
    found = job_of("llama-3-8b", 1 << 16, 8, optimizer=optimizer, weight_dtype=dtype)
    parts = parts_of(memory_of(found, 0.0, 0.0))
    assert parts["optimizer"] == 8_030_261_248 / 8 * nbytes
    assert parts["weights"] == 8_030_261_248 / 8 * dtype.itemsize


def test_only_the_larger_of_loss_and_layer_counts() -> None:
    memory = memory_of(job_of("llama-3-8b", 1 << 16, 8, loss="logits"), 1e9, 0.0)
    absent = {part.name for part in memory.parts if not part.at_peak}
    assert absent == {"one layer", "attention's buffers"}
    fused = memory_of(job_of("llama-3-8b", 1 << 16, 8, loss="fused"), 1e9, 0.0)
    assert {part.name for part in fused.parts if not part.at_peak} == {"logits and loss"}
    assert fused.total < memory.total


def test_recomputation_keeps_less() -> None:
    kept = {
        recompute: parts_of(memory_of(job_of("llama-3-8b", 1 << 16, 8, recompute=recompute), 0, 0))
        for recompute in job.RECOMPUTE
    }
    rows, before = 8192, 8712
    # out and lse of 32 heads of 128.
    results = 2 * 4096 + 4 * 32
    assert kept["none"]["activations"] == rows * (32 * 209032 + before)
    assert kept["attention"]["activations"] == rows * (32 * (8192 + results) + before)
    assert kept["full"]["one layer"] - kept["attention"]["one layer"] == rows * results


@pytest.mark.parametrize(
    ("degrees", "weights", "rows"),
    [
        ({"tp": 2}, 8_030_261_248 / 8, 1 << 14),
        ({"fsdp": 2}, 8_030_261_248 / 2, 1 << 13),
        ({"fsdp": 1}, 8_030_261_248, 1 << 13),
        # The first stage has 16 layers and the embedding.
        ({"pp": 2}, (16 * 218_112_000 + 128256 * 4096) / 4, 1 << 14),
        ({"cp": 2}, 8_030_261_248 / 8, 1 << 15),
    ],
)
def test_degrees_share_weights_and_rows(degrees: dict[str, int], weights: float, rows: int) -> None:
    found = job_of("llama-3-8b", 1 << 16, 8, **degrees)
    assert found.rows == rows
    memory = memory_of(found, 0.0, 0.0)
    if memory.stage == 0:
        assert parts_of(memory)["weights"] == 4 * weights


def test_experts_are_shared_by_the_ranks_of_ep() -> None:
    alone = parts_of(memory_of(job_of("mixtral-8x7b", 1 << 16, 8), 0, 0))
    shared = parts_of(memory_of(job_of("mixtral-8x7b", 1 << 16, 8, ep=8), 0, 0))
    experts = 8 * 3 * 4096 * 14336
    assert alone["weights"] == shared["weights"]
    assert alone["gathered weights"] - shared["gathered weights"] == 2 * 2 * experts * 7 / 8
    # Two experts of each token, sent and received.
    assert shared["one layer"] - alone["one layer"] == 8192 * 2 * 2 * 4096 * 2


def test_a_pipeline_keeps_as_many_batches_as_stages_follow() -> None:
    one = job_of("llama-3-8b", 1 << 16, 8, pp=4)
    four = replace(one, microbatches=4)
    kept = [parts_of(memory_of(x, 0.0, 0.0))["activations"] for x in (one, four)]
    assert kept[1] == 4 * kept[0]
    assert [len(stage) for stage in stages_of(33, 4)] == [9, 8, 8, 8]


# -- time


def test_flops_are_those_computed_by_hand() -> None:
    found = job_of("llama-3-8b", 1 << 14, 2)
    plan = attention_of_model.plan_attention(found)
    n, products = 1 << 14, 6 * (8_030_261_248 - 128256 * 4096 - 33 * 2 * 4096 + 32 * 2 * 4096)
    visible = n * (n + 1) // 2
    # Two products of 32 heads of 128, forward and twice as many backward, in 32 layers.
    pairs = 3 * 32 * 4 * 32 * 128 * visible
    assert model_flops(found, plan) == pytest.approx(n * products + pairs, rel=1e-4)
    window = job_of("mistral-7b", 1 << 14, 2)
    (kind,) = attention_of_model.plan_attention(window).kinds
    # A query sees itself and 4095 keys before it.
    assert kind.choice.problem.mask.area == 4096 * n - 4096 * 4095 // 2


def test_the_step_adds_up() -> None:
    plan = plan_job(job_of("llama-3-8b", 1 << 16, 8, recompute="full"))
    step = plan.step
    weights = 8_030_261_248 - 128256 * 4096 - 4096
    head = 128256 * 4096
    # Three products for each weight and one again; the head's are not computed again.
    flops = 8192 * 2 * (4 * (weights - head) + 3 * head)
    assert step.products == pytest.approx(flops / (PRODUCT_SHARES["sm_90"] * 989e12), rel=1e-6)
    (kind,) = plan.attention.kinds
    assert step.attention == pytest.approx(32 * (2 * kind.forward + kind.backward))
    waits = step.exposed["fsdp"]
    others = step.attention + step.products + step.operators + waits + step.optimizer
    assert step.seconds == pytest.approx(others)
    assert step.mfu is not None and step.mfu < 1
    assert step.mfu == pytest.approx(step.flops / (8 * 989e12 * step.seconds))
    kept = plan_job(replace(plan.job, recompute="attention")).step
    assert step.attention - kept.attention == pytest.approx(32 * kind.forward)
    unknown = plan_job(replace(plan.job, cluster=cpu_cluster(8))).step
    assert unknown.mfu is None and "MFU unknown" in speed(unknown)


def test_a_pipeline_waits_for_its_first_and_last_batch() -> None:
    found = job_of("llama-3-8b", 1 << 14, 4, pp=4, cp=1)
    one, eight = plan_job(found).step, plan_job(replace(found, microbatches=8)).step
    assert one.bubble == eight.bubble > 0
    assert eight.tokens == 8 * one.tokens and eight.tokens_per_second > one.tokens_per_second


def test_a_collective_uses_the_ports_of_all_ranks_of_a_node() -> None:
    found = job_of("llama-3-8b", 1 << 14, 16)
    within = collective_seconds(found, 1e9, 8, 1)
    assert within == pytest.approx(3 * 8e-6 + 7e9 / (0.9 * 450 * GB))
    across = collective_seconds(found, 1e9, 16, 1)
    assert across == pytest.approx(4 * 15e-6 + 15e9 / (8 * 0.9 * 50 * GB))


# torchtitan's published tokens/s of a GPU, for sequences of 8k, without torch.compile.
PUBLISHED = [
    ("llama-3-8b", 64, "A100", 1, "attention", 2973),
    ("llama-3-70b", 64, "A100", 1, "full", 331),
    ("llama-3-8b", 8, "H100", 2, "attention", 5762),
    ("llama-3-8b", 128, "H100", 2, "attention", 5605),
]


@pytest.mark.parametrize(("name", "gpus", "card", "batch", "recompute", "published"), PUBLISHED)
def test_the_page_compares_plans_with_published_speeds(
    name: str, gpus: int, card: str, batch: int, recompute: Any, published: int
) -> None:
    cluster = builtin_cluster(card)
    if card == "H100":  # with HBM2e, of which our rates take 0.8
        cluster = replace(cluster, device=replace(cluster.device, memory_bandwidth=0.8 * 2.4e12))
    found = job_of(name, 8192, gpus, cp=1, batch=batch, recompute=recompute, loss="logits")
    tokens = plan_job(replace(found, cluster=cluster)).step.tokens_per_second
    assert tokens == pytest.approx(published, rel=0.1)
    row = f"| {gpus} {card} | {batch} | {recompute} | {published:,} | {tokens:,.0f} |"
    assert row in (ROOT / "docs/fits.md").read_text()


def test_ranks_that_do_not_share_weights_sum_all_gradients() -> None:
    shared = job_of("llama-3-8b", 1 << 12, 16)
    alone = replace(shared, degrees=degrees_of(16, fsdp=1))
    slow = replace(H100, between=replace(H100.between, bandwidth=1e8))
    waits = [plan_job(replace(x, cluster=slow)).step.exposed["fsdp"] for x in (shared, alone)]
    # Per layer and weight 2 + 2 + 4 bytes are gathered and scattered, or 2 x 4 summed.
    assert waits[0] == pytest.approx(waits[1], rel=0.05)
    sent = 32 * 218_112_000 * 8 * 15 / 16 / 8 / 1e8  # over 8 ports of a node
    assert waits[1] == pytest.approx(sent, rel=0.05)


def test_ep_and_tp_cost_messages() -> None:
    mixed = plan_job(job_of("mixtral-8x7b", 1 << 14, 8, ep=4, tp=2)).step
    assert mixed.exposed["ep"] > 0 and mixed.exposed["tp"] > 0
    hybrid = plan_job(job_of("jamba-v0.1", 1 << 14, 8)).step
    assert hybrid.exposed["states"] > 0 and hybrid.recurrences > 0
    assert {"ep", "tp"}.isdisjoint(hybrid.exposed)


# -- what fits


def test_the_longest_sequence_is_the_last_that_fits() -> None:
    found = job_of("llama-3-8b", 1, 8)
    plan = PLANNER.longest(found)
    assert plan is not None and plan.fits
    assert (plan.job.recompute, plan.job.loss) == ("full", "fused")
    by_rings = PLANNER.longest(thrifty(found))
    assert by_rings is not None and by_rings.attention.strategies == ["ring"]
    assert by_rings.job.seqlen <= plan.job.seqlen
    longer = plan_job(PLANNER.with_rows(plan.job, plan.job.seqlen * 101 // 100))
    assert not longer.fits
    assert plan.job.seqlen % unit_of(found.degrees) == 0
    assert PLANNER.longest(job_of("llama-3-405b", 1, 8)) is None


def test_the_fewest_ranks_are_the_first_that_fit() -> None:
    found = job_of("llama-3-8b", 1 << 20, 1)
    plan = PLANNER.fewest(found, degrees_of)
    assert plan is not None and plan.fits
    half = plan.job.degrees.world_size // 2
    assert not PLANNER.fastest(replace(found, degrees=degrees_of(half))).fits
    impossible = replace(found, memory_bytes=1e9)
    assert PLANNER.fewest(impossible, degrees_of) is None


def test_the_fastest_options_that_fit_are_chosen() -> None:
    plan = PLANNER.fastest(job_of("llama-3-8b", 1 << 13, 8))
    assert (plan.job.recompute, plan.job.loss, plan.fits) == ("none", "logits", True)
    given = ModelPlanner(recompute="full", loss="fused").fastest(plan.job)
    assert (given.job.recompute, given.job.loss) == ("full", "fused")
    assert given.step.seconds > plan.step.seconds


# -- what to write


def written(plan: ModelPlan, trainer: str) -> str:
    return "\n".join(advice_for(plan)[trainer])


def test_what_is_written_has_the_degrees_of_the_plan() -> None:
    plan = plan_job(job_of("gemma-3-12b", 1 << 16, 16, cp=8, recompute="attention"))
    trainer = written(plan, "ring_attn's Trainer")
    assert '"cuda", (2, 8)' in trainer and "use_liger_kernel=True" in trainer
    assert 'strategy="auto"' in trainer, "two kinds of layers"
    assert "torch.ops.ring_attn.attention.default" in trainer
    assert hasattr(torch.ops.ring_attn, "attention")
    titan = written(plan, "torchtitan")
    assert "context_parallel_degree 8" in titan and "data_parallel_shard_degree 2" in titan
    assert "context_parallel_size: 8" in written(plan, "axolotl")
    assert "--num_processes 16" in written(plan, "accelerate")
    split = plan_job(job_of("llama-3-8b", 1 << 14, 8, tp=2))
    assert written(split, "accelerate").startswith("not with --tp 2")
    assert "tensor_parallel_degree 2" in written(split, "torchtitan")
    unsharded = plan_job(job_of("llama-3-8b", 1 << 14, 8, fsdp=1))
    assert written(unsharded, "torchtitan").startswith("not with --fsdp 1")


# -- models that cannot be traced


def test_a_model_that_is_not_traced_is_estimated_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = job.sized(model_of("mine", {**LLAMA, "model_type": "mine"}))
    assert "does not know the model_type 'mine'" in unknown.note
    assert unknown.activations.source == formulas.SOURCE
    monkeypatch.setattr(traced, "find_spec", lambda name: None)
    missing = job.sized(model_of("tiny", LLAMA))
    assert missing.note == "transformers is not installed"
    plan = plan_job(Job(missing, 4096, degrees_of(2), H100, 80 * GB))
    assert "by formula (not traced: transformers is not installed)" in report.sources(plan)
    assert "memory estimate, kernels' speed estimate;" in report.confidence(plan)


def test_a_trace_leaves_nothing_behind() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as file

    function = file.torch_chunk_gated_delta_rule
    names = {*transformers.AttentionInterface._global_mapping}
    traced.trace(MODELS["qwen3-next-80b-a3b"])
    assert file.torch_chunk_gated_delta_rule is function
    assert {*transformers.AttentionInterface._global_mapping} == names


def test_files_of_weights_and_sizes_with_the_prime_do_not_matter() -> None:
    found = job.sized(model_of("tiny", LLAMA))
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    config = {**LLAMA, "quantization_config": quantized, "rope_scaling": dynamic}
    same = job.sized(model_of("tiny", config))
    assert same.note == "" and same.activations == found.activations
    (prime, *_) = traced.PRIMES
    unlucky = job.sized(model_of("tiny", {**LLAMA, "intermediate_size": 2 * 8 * prime}))
    (layer,), (other,) = unlucky.activations.layers, found.activations.layers
    assert layer.kept - other.kept == 4 * 2 * (2 * 8 * prime - 512)


# -- the command

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}
PLAN = ("plan", "--cluster", "h100")


def planned(tmp_path: Path, config: object, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the command on a config; return its exit status and its report."""
    path, out = tmp_path / "config.json", tmp_path / "plan.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    status = cli.main([*PLAN, "--model", str(path), "--json", str(out), *words])
    return status, json.loads(out.read_text()) if out.exists() else {}


def test_a_config_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--seqlen", "64k", "--world-size", "4", "--documents", "3k")
    status, found = planned(tmp_path, {"text_config": LLAMA}, *words)
    text = capsys.readouterr().out
    assert status == 0 and found["fits"] and found["seqlen"] == 1 << 16
    assert not [line for line in text.splitlines() if len(line) > 80]
    assert {"weights", "gradients", "optimizer", "activations", "NCCL"} <= {*found["memory_bytes"]}
    counted = {k: v for k, v in found["memory_bytes"].items() if k not in found["not_at_peak"]}
    assert sum(counted.values()) == pytest.approx(found["total_bytes"], abs=len(counted))
    for words_of_text in ("memory of a rank", "tokens/s a rank", "MFU", "exposed", "22 documents"):
        assert words_of_text in text
    (confidence,) = [line for line in text.splitlines() if line.startswith("confidence:")]
    assert "memory traced" in confidence and "no GPU has confirmed a plan" in confidence


def test_three_lines_say_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-3-8b", "--seqlen", "4M", "--world-size", "8")
    assert cli.main([*PLAN, *words]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 80
    assert lines[0].startswith("does not fit: a rank needs")
    assert lines[1].startswith("the longest sequence on 8 x H100:")
    assert lines[2].startswith("the fewest ranks for 4,194,304 tokens:")


def test_other_options_that_fit_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-3-8b", "--seqlen", "256k", "--world-size", "8")
    assert cli.main([*PLAN, *words, "--recompute", "none"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[2].startswith("it fits with --recompute ")


def test_the_length_and_the_ranks_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = planned(tmp_path, LLAMA, "--fits", "--world-size", "2", "--memory", "2G")
    assert status == 0 and found["fits"] and found["degrees"]["world_size"] == 2
    assert f"{found['seqlen']:,} tokens" in capsys.readouterr().out
    status, found = planned(tmp_path, LLAMA, "--target", "512k", "--memory", "2G", "--quiet")
    text = capsys.readouterr().out
    assert status == 0 and f"need {found['degrees']['world_size']} x H100" in text
    assert "half as many do not fit" in text
    status, found = planned(tmp_path, LLAMA, "--target", "8k", "--cp", "2", "--fsdp", "4")
    assert (found["degrees"]["world_size"], found["degrees"]["dp"]) == (4, 2)
    assert "the degrees allow no fewer" in " ".join(capsys.readouterr().out.split())
    status, found = planned(tmp_path, LLAMA, "--target", "512k", "--memory", "900M", "--quiet")
    assert status == 1 and "fit on no number of ranks" in capsys.readouterr().out
    status, found = planned(tmp_path, LLAMA, "--fits", "--world-size", "2", "--memory", "500M")
    assert status == 1 and "no length fits on 2 x H100" in capsys.readouterr().out


SIZES = ("--seqlen", "4k", "--world-size", "4")
WRONG: list[tuple[tuple[str, ...], str]] = [
    (("--model", "nope", *SIZES), "one of llama-3-8b, llama-3-70b"),
    (("--model", "llama-3-8b", "--world-size", "4"), "needs --seqlen; --fits finds the length"),
    (("--model", "llama-3-8b", *SIZES, "--heads", "4"), "--heads is not used with --model"),
    (("--model", "llama-3-8b", *SIZES, "--window", "4k,0"), "--window is not used"),
    (("--model", "llama-3-8b", *SIZES, "--no-causal"), "--no-causal is not used"),
    (("--model", "llama-3-8b", *SIZES, "--check"), "--check is not used"),
    (("--model", "llama-3-8b", *SIZES, "--tp", "3"), "pass one of 1, 2, 4"),
    (("--model", "llama-3-8b", *SIZES, "--tp", "16"), "--tp x --pp must divide --world-size 4"),
    (("--model", "llama-3-8b", *SIZES, "--ep", "2"), "has no experts"),
    (("--model", "mixtral-8x7b", "--seqlen", "4k", "--world-size", "3", "--ep", "3"), "1, 2, 4, 8"),
    (("--model", "llama-3-8b", *SIZES, "--cp", "3"), "--cp must divide"),
    (("--model", "llama-3-8b", *SIZES, "--fsdp", "3"), "--fsdp must divide"),
    (("--model", "llama-3-8b", *SIZES, "--fits"), "--seqlen is not used with --fits"),
    (("--model", "llama-3-8b", *SIZES, "--target", "1M"), "--world-size is not used with --target"),
    (("--model", "llama-3-8b", "--fits", "--target", "1M"), "--fits or --target, not both"),
    ((*SIZES, "--tp", "2"), "--tp needs --model"),
    ((*SIZES, "--fits"), "--fits needs --model"),
    (("--seqlen", "4k"), "needs --world-size"),
    (("--model", "llama-3-8b", "--seqlen", "4G", "--world-size", "4"), "--seqlen must be at most"),
]


@pytest.mark.parametrize(("words", "text"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_options_are_one_line(
    words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    assert cli.main([*PLAN, *words, "--json", str(out)]) == 2
    found = capsys.readouterr()
    assert text in found.err and found.err.count("\n") == 1 and found.out == ""
    assert not out.exists()


def test_degrees_are_checked_before_the_model_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(name: str) -> None:
        pytest.fail(f"{name} was read")

    monkeypatch.setattr(plan_model, "read_model", read)
    assert cli.main([*PLAN, "--model", "llama-3-8b", *SIZES, "--cp", "3"]) == 2
    assert "--cp must divide" in capsys.readouterr().err


CONFIGS: list[tuple[object, str]] = [
    ("not json", "is not a config.json"),
    ([1], "it is not an object"),
    ({"model_type": "mine", "hidden_size": 4}, "it has no num_hidden_layers"),
    ({**LLAMA, "hidden_size": "big"}, "hidden_size must be a number"),
    ({**LLAMA, "num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
    ({**LLAMA, "layer_types": ["full_attention"]}, "it has 2 layers, and the types of 1"),
    ({**LLAMA, "layer_types": ["magic", "full_attention"]}, "layers of type magic"),
    ({**LLAMA, "layer_types": ["mamba"] * 2}, "whose sizes are not known"),
    ({**LLAMA, "layer_types": ["sliding_attention"] * 2}, "it has no sliding_window"),
    ({**LLAMA, "is_encoder_decoder": True}, "an encoder and a decoder"),
    ({**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 4}, "at most the number of experts"),
    ({**LLAMA, "num_hidden_layers": 1 << 20}, "from 1 to 4096"),
]


@pytest.mark.parametrize(("config", "text"), CONFIGS, ids=[text for _, text in CONFIGS])
def test_wrong_configs_are_one_line(
    config: object, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, found = planned(tmp_path, config, *SIZES)
    error = capsys.readouterr().err
    assert status == 2 and found == {} and text in error and error.count("\n") == 1


def test_the_memory_of_a_cpu_is_not_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "cluster_of", lambda *_: cpu_cluster())
    words = ["plan", "--model", "llama-3.2-1b", "--world-size", "2"]
    assert cli.main([*words, "--fits"]) == 2
    assert "--memory is needed" in capsys.readouterr().err
    assert cli.main([*words, "--seqlen", "4k", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("a rank takes ")


def test_layers_bound_the_stages_of_a_pipeline() -> None:
    with pytest.raises(ValueError, match="at most llama-3-8b's 32 layers, got 64"):
        check_degrees(degrees_of(64, pp=64), model("llama-3-8b").architecture)
