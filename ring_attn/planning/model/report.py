"""A plan of a model as text in 80 columns, and as a dict for JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import asdict

from ring_attn.core.dtypes import dtype_name
from ring_attn.planning.choice import format_seconds
from ring_attn.planning.model.advice import advice_for
from ring_attn.planning.model.architecture import Architecture
from ring_attn.planning.model.fits import MAX_RANKS, ModelPlan
from ring_attn.planning.model.job import AnyJob, Job
from ring_attn.planning.model.memory import Memory, Part
from ring_attn.planning.model.step import Step, peak_flops, product_speed

GB, WIDTH = 1e9, 80


def text_of(plan: ModelPlan, *, verbose: bool = False) -> str:
    """Return the plan as text: the model, the job, memory, time, what to write, confidence."""
    blocks = [heading(plan.job), memory_table(plan), step_table(plan), attention_lines(plan)]
    if verbose:
        blocks += [kind.choice.table(verbose=True) for kind in plan.attention.kinds]
    blocks += [advice(plan), f"{sources(plan)}\n{confidence(plan)}"]
    return "\n\n".join(blocks)


def heading(job: Job) -> str:
    """Return the model, the ranks and the options in lines."""
    architecture, cluster = job.model.architecture, job.cluster
    weights = f"{job.model.weights.total / 1e9:.3g}"
    batches = f", {job.microbatches} batches a step" if job.microbatches > 1 else ""
    documents = f", {len(job.documents) - 1} documents" if job.documents else ""
    name = architecture.name if len(architecture.name) <= 40 else f"...{architecture.name[-37:]}"
    lines = [
        f"{name}: {weights} B weights, {layers_in_words(architecture)}",
        f"{job.seqlen:,} tokens, batch {job.batch}{documents}{batches}, on "
        f"{job.degrees.world_size} x {cluster.device.name} (nodes of {cluster.node_size}): "
        f"{job.degrees}",
        f"recomputation {job.recompute}, loss {job.loss}, {job.optimizer}, {dtype_name(job.dtype)}"
        f", weights {dtype_name(job.weight_dtype)}",
    ]
    longest = architecture.max_positions
    if longest is not None and job.seqlen > longest:
        lines.append(f"the model was made for {longest:,} positions: its RoPE needs scaling")
    return "\n".join(map(wrapped, lines))


def wrapped(line: str) -> str:
    """Return a line in lines of at most `WIDTH`."""
    return textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)


def layers_in_words(architecture: Architecture) -> str:
    """Return how many layers there are of each kind."""
    mixers = Counter(x.mixer.words for x in architecture.layers if x.mixer is not None)
    parts = [f"{count} layers of {words}" for words, count in mixers.items()]
    experts = Counter(x.feedforward.words for x in architecture.layers if x.feedforward is not None)
    parts += [f"{count} with {words}" for words, count in experts.items() if words != "dense"]
    return ", ".join(parts)


def memory_table(plan: ModelPlan) -> str:
    """Return the memory of a rank by what holds it, the total, and whether it fits."""
    lines = memory_lines(plan.memory, plan.job.memory_bytes)
    stage = f", stage {plan.memory.stage} of the pipeline" if plan.job.degrees.pp > 1 else ""
    return "\n".join(lines) + stage


def memory_lines(memory: Memory, limit: float) -> list[str]:
    """Return the memory of a rank by what holds it, and the total out of a limit, in lines."""
    lines = ["memory of a rank             GB"]
    lines += [_memory_line(part) for part in memory.parts]
    verdict = "" if limit == float("inf") else f"of {limit / GB:.1f}: "
    fits = memory.total <= limit
    verdict += "fits" if fits else f"{(memory.total - limit) / GB:.1f} too many"
    lines.append(f"{'total':22}{memory.total / GB:9.2f}  {verdict}")
    return lines


def _memory_line(part: Part) -> str:
    notes = [part.words] if part.words else []
    notes += ["estimate"] if part.is_estimate else []
    notes += [] if part.at_peak else ["not at the peak"]
    return f"{part.name:22}{part.nbytes / GB:9.2f}  {'; '.join(notes)}".rstrip()


def step_table(plan: ModelPlan) -> str:
    """Return the time of a step by what takes it, tokens per second, MFU and exposed time."""
    step = plan.step
    rows = {
        "attention": (step.attention, "simulated"),
        "other products": (step.products, f"estimate: {share_of_peak(plan.job)}"),
        "other operators": (step.operators, "estimate: eager, by the memory's bandwidth"),
        "recurrences": (step.recurrences, "estimate"),
        "waits for weights": (step.exposed["fsdp"], "FSDP or DDP, not hidden behind a layer"),
        "waits of TP": (step.exposed.get("tp", 0.0), "not hidden"),
        "waits for experts": (step.exposed.get("ep", 0.0), "EP, not hidden"),
        "waits for states": (step.exposed.get("states", 0.0), "of recurrences, not hidden"),
        "pipeline": (step.bubble, "stages that wait for others"),
        "optimizer": (step.optimizer, "estimate: by the memory's bandwidth"),
    }
    always = {"attention", "other products", "other operators"}
    lines = ["a step, predicted         time"]
    for name, (seconds, words) in rows.items():
        if seconds > 0 or name in always:
            lines.append(f"{name:20}{format_seconds(seconds):>11}  {words}")
    lines.append(f"{'total':20}{format_seconds(step.seconds):>11}")
    return "\n".join([*lines, speed(step)])


def share_of_peak(job: AnyJob) -> str:
    """Return the assumed speed of products in words."""
    peak = peak_flops(job)
    if peak is None:
        return "as fast as attention"
    return f"{100 * product_speed(job) / peak:.0f} % of the peak"


def speed(step: Step) -> str:
    """Return tokens per second, MFU and exposed time in words."""
    mfu = "MFU unknown" if step.mfu is None else f"MFU {100 * step.mfu:.0f} %"
    exposed = format_seconds(sum(step.exposed.values()))
    return f"{step.tokens_per_second:,.0f} tokens/s a rank, {mfu}, {exposed} exposed"


def attention_lines(plan: ModelPlan) -> str:
    """Return the strategy of each kind of attention, and the layout of all."""
    lines = [f"layout {plan.attention.layout}"]
    for kind in plan.attention.kinds:
        best = kind.choice.best
        lines.append(
            f"{kind.count} x {kind.attention.words}: {best.full_name}, "
            f"{format_seconds(kind.forward)} forward, {format_seconds(kind.backward)} backward"
        )
    return "\n".join(lines)


def advice(plan: ModelPlan) -> str:
    """Return what to write into each trainer."""
    blocks = []
    for name, lines in advice_for(plan).items():
        blocks.append("\n".join([f"{name}:", *(f"    {line}" for line in lines)]))
    return "\n".join(blocks)


def confidence(plan: ModelPlan) -> str:
    """Return in one line how far the numbers can be trusted."""
    job = plan.job
    memory = job.model.activations.source.partition(":")[0]
    kernels = kernels_source(plan).partition(":")[0]
    return f"confidence: memory {memory}, kernels' speed {kernels}; no GPU has confirmed a plan"


def kernels_source(plan: ModelPlan) -> str:
    """Return where the speeds of the kernels of attention come from."""
    kinds = plan.attention.kinds
    cluster = kinds[0].choice.problem.cluster if kinds else plan.job.cluster
    return cluster.device.source


def sources(plan: ModelPlan) -> str:
    """Return in lines where activations and speeds come from."""
    model = plan.job.model
    why = f" (not traced: {model.note})" if model.note else ""
    lines = [f"activations: {model.activations.source}{why}", f"kernels: {kernels_source(plan)}"]
    return "\n".join(map(wrapped, lines))


def shortfall(job: AnyJob, memory: Memory, memory_bytes: float, longest: str | None) -> list[str]:
    """Return two lines: what is missing, and the longest sequence that fits.

    Args:
        job: the job that does not fit.
        memory: memory of a rank that the job needs.
        memory_bytes: memory that a rank has.
        longest: the longest length that fits, with its unit; None if no length fits.
    """
    where = f"{job.degrees.world_size} x {job.cluster.device.name}"
    largest = max((x for x in memory.parts if x.at_peak), key=lambda part: part.nbytes)
    fixed = f"{memory.fixed / GB:,.1f} GB are for any length"
    return [
        f"does not fit: a rank needs {memory.total / GB:,.1f} of {memory_bytes / GB:,.1f} GB, "
        f"{largest.name} {largest.nbytes / GB:,.1f}",
        f"no length fits on {where}: {fixed}"
        if longest is None
        else f"the longest sequence on {where}: {longest}",
    ]


def nothing_fits(
    plan: ModelPlan,
    longest: ModelPlan | None,
    fewest: ModelPlan | None,
    other: ModelPlan | None = None,
) -> str:
    """Return three lines: what is missing, the longest sequence that fits, the fewest ranks.

    If other options fit on the same ranks, the last line names them.
    """
    job = plan.job
    length = None if longest is None else f"{longest.job.seqlen:,} tokens"
    lines = shortfall(job, plan.memory, job.memory_bytes, length)
    if other is not None:
        chosen = other.job
        lines.append(f"it fits with --recompute {chosen.recompute} --loss {chosen.loss}")
    elif fewest is None:
        lines.append(f"no number of ranks up to {MAX_RANKS:,} fits: pass larger --tp, --pp or --ep")
    else:
        degrees = fewest.job.degrees
        lines.append(
            f"the fewest ranks for {job.seqlen:,} tokens: {degrees.world_size} ({degrees})"
        )
    return "\n".join(lines)


def no_ranks_fit(job: Job) -> str:
    """Return a line that no number of ranks fits a length."""
    return (
        f"{job.seqlen:,} tokens fit on no number of ranks up to {MAX_RANKS:,}, with --tp "
        f"{job.degrees.tp}, --pp {job.degrees.pp} and --ep {job.degrees.ep}: pass larger ones"
    )


def to_dict(plan: ModelPlan) -> dict[str, object]:
    """Return the plan for JSON."""
    job, step = plan.job, plan.step
    return {
        "model": job.model.architecture.name,
        "weights": job.model.weights.total,
        "layers": layers_in_words(job.model.architecture),
        "activations": job.model.activations.source,
        "seqlen": job.seqlen,
        "batch": job.batch,
        "microbatches": job.microbatches,
        "degrees": {**asdict(job.degrees), "dp": job.degrees.dp},
        "recompute": job.recompute,
        "loss": job.loss,
        "optimizer": job.optimizer,
        "device": job.cluster.device.name,
        "fits": plan.fits,
        "memory_bytes": {part.name: round(part.nbytes) for part in plan.memory.parts},
        "not_at_peak": [part.name for part in plan.memory.parts if not part.at_peak],
        "estimates": [part.name for part in plan.memory.parts if part.is_estimate],
        "total_bytes": round(plan.memory.total),
        "limit_bytes": job.memory_bytes,
        "step_s": step.seconds,
        "step": {**asdict(step), "exposed": step.exposed},
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
        "layout": plan.attention.layout,
        "attention": [
            {"layers": kind.count, "kind": kind.attention.words, **kind.choice.best.to_dict()}
            for kind in plan.attention.kinds
        ],
        "advice": advice_for(plan),
        "sources": sources(plan),
        "confidence": confidence(plan),
    }
