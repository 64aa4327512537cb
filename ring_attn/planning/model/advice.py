"""What to write into a trainer, so that a job runs as it was planned."""

from __future__ import annotations

from ring_attn.planning.model.fits import ModelPlan
from ring_attn.planning.model.job import Job
from ring_attn.planning.model.search import AttentionT, JobT, Plan, StepT

# Names of the optimizers in transformers' TrainingArguments, and in axolotl.
OPTIMIZER_NAMES = {
    "adamw": "adamw_torch",
    "adamw-8bit": "adamw_bnb_8bit",
    "sgd": "sgd",
    "momentum": "sgd",
}


def advice_for(plan: ModelPlan) -> dict[str, list[str]]:
    """Return the lines for each trainer, or the reason why it cannot run the job."""
    return {
        "ring_attn's Trainer": _trainer(plan),
        "torchtitan": _torchtitan(plan),
        "accelerate": _accelerate(plan),
        "axolotl": _axolotl(plan),
    }


def strategy_of(plan: Plan[JobT, AttentionT, StepT]) -> str:
    """Return the argument `strategy` in code; layers of several kinds choose by "auto"."""
    strategies = {repr(kind.choice.strategy) for kind in plan.attention.kinds}
    if len(strategies) != 1:
        return '"auto"'
    only = next(iter(plan.attention.kinds)).choice.best
    return f'"{only.name}"' if only.full_name == only.name else f"ring_attn.{only.strategy!r}"


def _only_data_and_sequence(job: Job) -> str | None:
    """Return why trainers of Hugging Face's models cannot run the job; None if they can."""
    degrees = job.degrees
    others = {"--tp": degrees.tp, "--pp": degrees.pp, "--ep": degrees.ep}
    given = [f"{name} {size}" for name, size in others.items() if size > 1]
    return f"not with {', '.join(given)}: it splits data and sequences only" if given else None


def _trainer(plan: ModelPlan) -> list[str]:
    job, degrees = plan.job, plan.job.degrees
    why_not = _only_data_and_sequence(job)
    if why_not:
        return [why_not]
    optimizer = OPTIMIZER_NAMES.get(job.optimizer, "adamw_torch")
    sizes = f"({degrees.dp}, {degrees.cp})"
    return [
        f'mesh = init_device_mesh("cuda", {sizes}, mesh_dim_names=("dp", "cp"))',
        'register(group=mesh["cp"],',
        f'    layout="{plan.attention.layout}", strategy={strategy_of(plan)})',
        f"TrainingArguments(out, per_device_train_batch_size={job.batch}, bf16=True,",
        f'    gradient_accumulation_steps={job.microbatches}, optim="{optimizer}",',
        f"    use_liger_kernel={job.loss == 'fused'},",
        *_checkpointing(job),
        *_fsdp(job),
    ]


def _fsdp(job: Job) -> list[str]:
    """Return the arguments for FSDP, which shards over all ranks."""
    degrees = job.degrees
    if degrees.fsdp == 1:
        return [")"]
    lines = ['    fsdp=True, fsdp_config={"version": 2})']
    if degrees.fsdp < degrees.world_size:
        lines.append(f"# it shards weights over all ranks; the plan has --fsdp {degrees.fsdp}")
    return lines


def _checkpointing(job: Job) -> list[str]:
    """Return the arguments for recomputation."""
    if job.recompute == "none":
        return []
    if job.recompute == "full":
        return ["    gradient_checkpointing=True,"]
    # Of each layer, the results of attention are kept.
    return [
        "    gradient_checkpointing=True,",
        '    gradient_checkpointing_kwargs={"use_reentrant": False,',
        '        "context_fn": partial(create_selective_checkpoint_contexts,',
        "            [torch.ops.ring_attn.attention.default])},",
    ]


def _torchtitan(plan: ModelPlan) -> list[str]:
    job, degrees = plan.job, plan.job.degrees
    if degrees.fsdp % degrees.cp:
        return [f"not with --fsdp {degrees.fsdp}: it shards weights over all cp ranks"]
    sizes = {
        "context_parallel_degree": degrees.cp,
        "data_parallel_shard_degree": degrees.fsdp // degrees.cp,
        "data_parallel_replicate_degree": degrees.dp * degrees.cp // degrees.fsdp,
        "tensor_parallel_degree": degrees.tp,
        "pipeline_parallel_degree": degrees.pp,
        "expert_parallel_degree": degrees.ep,
    }
    lines = [f"--parallelism.{name} {size}" for name, size in sizes.items() if size > 1]
    lines += [
        f"--training.seq_len {job.seqlen} --training.local_batch_size {job.batch}",
        f"--activation_checkpoint.mode {'none' if job.recompute == 'none' else 'full'}",
        'style = ring_attn.ContextParallel(layout="zigzag", inside="local",',
        f"    strategy={strategy_of(plan)})  # see docs/training.md",
    ]
    if job.recompute == "attention":
        lines.append("# its checkpointing runs attention again: --recompute full has that time")
    if plan.attention.layout != "zigzag":
        lines.append(f"# it shards by zigzag only; the plan has {plan.attention.layout}")
    return lines


def _accelerate(plan: ModelPlan) -> list[str]:
    job, degrees = plan.job, plan.job.degrees
    why_not = _only_data_and_sequence(job)
    if why_not:
        return [why_not]
    return [
        f"accelerate launch --num_processes {degrees.world_size} --mixed_precision bf16 \\",
        "    --use_fsdp --fsdp_version 2 \\",
        "    --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \\",
        f"    --fsdp_activation_checkpointing {str(job.recompute != 'none').lower()} train.py",
        "# in train.py: mesh and register as above; without accelerate's own cp_size",
    ]


def _axolotl(plan: ModelPlan) -> list[str]:
    job, degrees = plan.job, plan.job.degrees
    why_not = _only_data_and_sequence(job)
    if why_not:
        return [why_not]
    return [
        f"sequence_len: {job.seqlen}",
        f"context_parallel_size: {degrees.cp}",
        f"micro_batch_size: {job.batch}",
        f"gradient_accumulation_steps: {job.microbatches}",
        f"gradient_checkpointing: {str(job.recompute != 'none').lower()}",
        f"optimizer: {OPTIMIZER_NAMES.get(job.optimizer, 'adamw_torch')}",
        "fsdp_version: 2",
        "# axolotl then runs ring-flash-attn, whose time and buffers are others",
    ]
