"""A plan of a diffusion transformer as text in 80 columns, and as a dict for JSON."""

from __future__ import annotations

from dataclasses import asdict

from ring_attn.core.dtypes import dtype_name
from ring_attn.planning.choice import format_seconds
from ring_attn.planning.diffusion.fits import DiffusionPlan
from ring_attn.planning.diffusion.job import DiffusionJob
from ring_attn.planning.model.advice import strategy_of
from ring_attn.planning.model.job import Recompute
from ring_attn.planning.model.lines import (
    batches_of_step,
    confidence_in,
    fewest_line,
    memory_figures,
    memory_lines,
    ranks_of,
    share_of_peak,
    short_name,
    shortfall_lines,
    source_lines,
    speed,
    time_lines,
    wrapped,
)
from ring_attn.planning.model.search import MAX_RANKS

# The unit of the length of a sample.
UNIT = "rows"
LARGER_DEGREES = "a larger --fsdp or --cp"


def text_of(plan: DiffusionPlan, *, verbose: bool = False) -> str:
    """Return the plan as text: the model, the job, memory, time, what to write, confidence."""
    job = plan.job
    blocks = [heading(job), memory_table(plan), step_table(plan), attention_lines(plan)]
    if verbose:
        blocks += [kind.choice.table(verbose=True) for kind in plan.attention.kinds]
    blocks += ["\n".join(advice(plan)), f"{sources(plan)}\n{wrapped(confidence(plan))}"]
    return "\n\n".join(blocks)


def heading(job: DiffusionJob) -> str:
    """Return the model, the ranks and the options in lines."""
    model, batches = job.model, batches_of_step(job.microbatches)
    dtypes = f"{dtype_name(job.dtype)}, weights {dtype_name(job.weight_dtype)}"
    if job.is_training:
        what = f"training: recomputation {job.recompute}, {job.optimizer}, {dtypes}"
    else:
        what = f"inference: {_steps(job)}, {dtypes}"
    lines = [
        f"{short_name(model.name)} ({model.class_name}): {model.weights.total / 1e9:.3g} B "
        f"weights, {len(model.kinds)} blocks",
        f"{job.video:,} rows of video, {job.text:,} of text, batch {job.batch}{batches}, on "
        f"{ranks_of(job)}",
        what,
    ]
    if job.text == 0:
        lines.append("without text: pass --replicated with the number of its rows")
    return "\n".join(map(wrapped, lines))


def _steps(job: DiffusionJob) -> str:
    return "1 denoising step" if job.steps == 1 else f"{job.steps} denoising steps"


def memory_table(plan: DiffusionPlan) -> str:
    """Return the memory of a rank by what holds it, the total, and whether it fits."""
    return "\n".join(memory_lines(plan.memory, plan.job.memory_bytes))


def step_table(plan: DiffusionPlan) -> str:
    """Return the time by what takes it, samples and rows per second, MFU and exposed time."""
    job, step = plan.job, plan.step
    rows = {
        "attention": (step.attention, "simulated, with cross-attention"),
        "other products": (step.products, f"estimate: {share_of_peak(job)}"),
        "other operators": (step.operators, "estimate: eager, by the memory's bandwidth"),
        "waits for weights": (step.exposed["fsdp"], "FSDP or DDP, not hidden behind a block"),
        "gather of the output": (step.exposed["output"], "not hidden"),
        "optimizer": (step.optimizer, "estimate: by the memory's bandwidth"),
    }
    what = "a training step" if job.is_training else _steps(job)
    lines = time_lines(f"{what}, predicted", rows, step.seconds)
    return "\n".join([*lines, f"{step.samples_per_second:,.3g} samples/s, {speed(step)}"])


def attention_lines(plan: DiffusionPlan) -> str:
    """Return the layout, and the strategy of each kind of attention."""
    lines = [f"layout {plan.attention.layout}"]
    for kind in plan.attention.kinds:
        times = f"{format_seconds(kind.forward.seconds)} forward"
        if plan.job.is_training:
            times += f", {format_seconds(kind.backward.seconds)} backward"
        lines.append(f"{kind.count} x {kind.call.words}: {kind.choice.best.full_name}, {times}")
    local = [(call, n) for call, n in plan.job.model.calls.items() if not call.is_split]
    lines += [f"{count} x {call.words}" for call, count in local]
    return "\n".join(lines)


def advice(plan: DiffusionPlan) -> list[str]:
    """Return what to write into a program that runs the job."""
    degrees = plan.job.degrees
    sizes = f"({degrees.dp}, {degrees.cp})"
    lines = [
        "ring_attn:",
        f'    mesh = init_device_mesh("cuda", {sizes}, mesh_dim_names=("dp", "cp"))',
        "    ring_attn.integrations.diffusers.parallelize(",
        f'        transformer, mesh["cp"], layout="{plan.attention.layout}",',
        f"        strategy={strategy_of(plan)})",
    ]
    if degrees.fsdp > 1:
        lines.append(
            "    # then fully_shard of each block and of the transformer: examples/fsdp2.py"
        )
    return lines + (_checkpointing(plan.job.recompute) if plan.job.is_training else [])


def _checkpointing(recompute: Recompute) -> list[str]:
    """Return the lines for recomputation."""
    if recompute == "none":
        return []
    if recompute == "full":
        return ["    transformer.enable_gradient_checkpointing()"]
    # The results of attention are kept for each block.
    return [
        "    kept = [torch.ops.ring_attn.attention.default]",
        "    transformer.enable_gradient_checkpointing(partial(checkpoint,",
        "        use_reentrant=False, context_fn=partial(",
        "            create_selective_checkpoint_contexts, kept)))",
    ]


def sources(plan: DiffusionPlan) -> str:
    """Return in lines where activations and speeds come from."""
    return source_lines(plan, plan.job.model.source, plan.job.model.note)


def confidence(plan: DiffusionPlan) -> str:
    """Return in one line how far the numbers can be trusted."""
    return confidence_in(plan, plan.job.model.source)


def nothing_fits(
    plan: DiffusionPlan,
    longest: DiffusionPlan | None,
    fewest: DiffusionPlan | None,
    other: DiffusionPlan | None = None,
) -> str:
    """Return three lines: what is missing, the longest sequence that fits, the fewest ranks.

    If another recomputation fits on the same ranks, the last line names it.
    """
    lines = shortfall_lines(plan, longest, unit=UNIT)
    if other is not None:
        lines.append(f"it fits with --recompute {other.job.recompute}")
    else:
        lines.append(fewest_line(fewest, unit=UNIT, larger_degrees=LARGER_DEGREES))
    return "\n".join(lines)


def no_ranks_fit(job: DiffusionJob) -> str:
    """Return a line that no number of ranks fits a length."""
    return (
        f"{job.seqlen:,} rows fit on no number of ranks up to {MAX_RANKS:,}: pass {LARGER_DEGREES}"
    )


def to_dict(plan: DiffusionPlan) -> dict[str, object]:
    """Return the plan for JSON."""
    job, step = plan.job, plan.step
    return {
        "model": job.model.name,
        "class": job.model.class_name,
        "weights": job.model.weights.total,
        "blocks": len(job.model.kinds),
        "activations": job.model.source,
        "seqlen": job.seqlen,
        "replicated": job.text,
        "batch": job.batch,
        "microbatches": job.microbatches,
        "denoising_steps": job.steps,
        "degrees": {**asdict(job.degrees), "dp": job.degrees.dp},
        "recompute": job.recompute if job.is_training else None,
        "optimizer": job.optimizer if job.is_training else None,
        "device": job.cluster.device.name,
        **memory_figures(plan),
        "step_s": step.seconds,
        "step": asdict(step),
        "samples_per_second": step.samples_per_second,
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
        "layout": plan.attention.layout,
        "attention": [
            {
                "calls": kind.count,
                "kind": kind.call.words,
                "forward_s": kind.forward.seconds,
                "backward_s": kind.backward.seconds,
                **kind.choice.best.to_dict(),
                "replicated": [asdict(cost) for cost in kind.choice.replicated],
            }
            for kind in plan.attention.kinds
        ],
        "advice": advice(plan),
        "sources": sources(plan),
        "confidence": confidence(plan),
    }
