"""A plan of a diffusion transformer as text in 80 columns, and as a dict for JSON."""

from __future__ import annotations

from dataclasses import asdict

from ring_attn.core.dtypes import dtype_name
from ring_attn.planning.choice import format_seconds
from ring_attn.planning.diffusion.fits import DiffusionPlan
from ring_attn.planning.diffusion.job import DiffusionJob
from ring_attn.planning.model.fits import MAX_RANKS
from ring_attn.planning.model.job import Recompute
from ring_attn.planning.model.report import memory_lines, share_of_peak, shortfall, wrapped


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
    model, cluster = job.model, job.cluster
    name = model.name if len(model.name) <= 40 else f"...{model.name[-37:]}"
    batches = f", {job.microbatches} batches a step" if job.microbatches > 1 else ""
    dtypes = f"{dtype_name(job.dtype)}, weights {dtype_name(job.weight_dtype)}"
    if job.is_training:
        what = f"training: recomputation {job.recompute}, {job.optimizer}, {dtypes}"
    else:
        what = f"inference: {_steps(job)}, {dtypes}"
    lines = [
        f"{name} ({model.class_name}): {model.weights.total / 1e9:.3g} B weights, "
        f"{len(model.kinds)} blocks",
        f"{job.video:,} rows of video, {job.text:,} of text, batch {job.batch}{batches}, on "
        f"{job.degrees.world_size} x {cluster.device.name} (nodes of {cluster.node_size}): "
        f"{job.degrees}",
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
    always = {"attention", "other products", "other operators"}
    what = "a training step" if job.is_training else _steps(job)
    lines = [f"{what + ', predicted':26} time"]
    for name, (seconds, words) in rows.items():
        if seconds > 0 or name in always:
            lines.append(f"{name:20}{format_seconds(seconds):>11}  {words}")
    lines.append(f"{'total':20}{format_seconds(step.seconds):>11}")
    return "\n".join([*lines, speed(plan)])


def speed(plan: DiffusionPlan) -> str:
    """Return samples and rows per second, MFU and exposed time in words."""
    step = plan.step
    mfu = "MFU unknown" if step.mfu is None else f"MFU {100 * step.mfu:.0f} %"
    exposed = format_seconds(sum(step.exposed.values()))
    per_second = f"{step.samples_per_second:,.3g} samples/s"
    return f"{per_second}, {step.tokens_per_second:,.0f} tokens/s a rank, {mfu}, {exposed} exposed"


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
    strategies = {repr(kind.choice.strategy) for kind in plan.attention.kinds}
    only = plan.attention.kinds[0].choice.best if len(strategies) == 1 else None
    strategy = '"auto"'
    if only is not None:
        is_name = only.full_name == only.name
        strategy = f'"{only.name}"' if is_name else f"ring_attn.{only.strategy!r}"
    sizes = f"({degrees.dp}, {degrees.cp})"
    lines = [
        "ring_attn:",
        f'    mesh = init_device_mesh("cuda", {sizes}, mesh_dim_names=("dp", "cp"))',
        "    ring_attn.integrations.diffusers.parallelize(",
        f'        transformer, mesh["cp"], layout="{plan.attention.layout}",',
        f"        strategy={strategy})",
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


def kernels_source(plan: DiffusionPlan) -> str:
    """Return where the speeds of the kernels of attention come from."""
    kinds = plan.attention.kinds
    cluster = kinds[0].choice.problem.cluster if kinds else plan.job.cluster
    return cluster.device.source


def sources(plan: DiffusionPlan) -> str:
    """Return in lines where activations and speeds come from."""
    model = plan.job.model
    why = f" (not traced: {model.note})" if model.note else ""
    lines = [f"activations: {model.source}{why}", f"kernels: {kernels_source(plan)}"]
    return "\n".join(map(wrapped, lines))


def confidence(plan: DiffusionPlan) -> str:
    """Return in one line how far the numbers can be trusted."""
    memory = plan.job.model.source.partition(":")[0]
    kernels = kernels_source(plan).partition(":")[0]
    return f"confidence: memory {memory}, kernels' speed {kernels}; no GPU has confirmed a plan"


def nothing_fits(
    plan: DiffusionPlan,
    longest: DiffusionPlan | None,
    fewest: DiffusionPlan | None,
    other: DiffusionPlan | None = None,
) -> str:
    """Return three lines: what is missing, the longest sequence that fits, the fewest ranks.

    If another recomputation fits on the same ranks, the last line names it.
    """
    job = plan.job
    length = None if longest is None else f"{longest.job.seqlen:,} rows"
    lines = shortfall(job, plan.memory, job.memory_bytes, length)
    if other is not None:
        lines.append(f"it fits with --recompute {other.job.recompute}")
    elif fewest is None:
        lines.append(f"no number of ranks up to {MAX_RANKS:,} fits: pass a larger --fsdp or --cp")
    else:
        degrees = fewest.job.degrees
        lines.append(f"the fewest ranks for {job.seqlen:,} rows: {degrees.world_size} ({degrees})")
    return "\n".join(lines)


def no_ranks_fit(job: DiffusionJob) -> str:
    """Return a line that no number of ranks fits a length."""
    return (
        f"{job.seqlen:,} rows fit on no number of ranks up to {MAX_RANKS:,}: pass a larger --fsdp "
        "or --cp"
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
        "fits": plan.fits,
        "memory_bytes": {part.name: round(part.nbytes) for part in plan.memory.parts},
        "not_at_peak": [part.name for part in plan.memory.parts if not part.at_peak],
        "estimates": [part.name for part in plan.memory.parts if part.is_estimate],
        "total_bytes": round(plan.memory.total),
        "limit_bytes": job.memory_bytes,
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
