"""A plan of a model as text in 80 columns, and as a dict for JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from ring_attn.core.dtypes import dtype_name
from ring_attn.planning.choice import format_seconds
from ring_attn.planning.model.advice import advice_for
from ring_attn.planning.model.architecture import Architecture
from ring_attn.planning.model.fits import ModelPlan
from ring_attn.planning.model.job import Job
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

# The unit of the length of a sequence.
UNIT = "tokens"


def text_of(plan: ModelPlan, *, verbose: bool = False) -> str:
    """Return the plan as text: the model, the job, memory, time, what to write, confidence."""
    blocks = [heading(plan.job), memory_table(plan), step_table(plan), attention_lines(plan)]
    if verbose:
        blocks += [kind.choice.table(verbose=True) for kind in plan.attention.kinds]
    blocks += [advice(plan), f"{sources(plan)}\n{confidence(plan)}"]
    return "\n\n".join(blocks)


def heading(job: Job) -> str:
    """Return the model, the ranks and the options in lines."""
    architecture = job.model.architecture
    name, weights = short_name(architecture.name), f"{job.model.weights.total / 1e9:.3g}"
    documents = f", {len(job.documents) - 1} documents" if job.documents else ""
    batches = documents + batches_of_step(job.microbatches)
    lines = [
        f"{name}: {weights} B weights, {layers_in_words(architecture)}",
        f"{job.seqlen:,} tokens, batch {job.batch}{batches}, on {ranks_of(job)}",
        f"recomputation {job.recompute}, loss {job.loss}, {job.optimizer}, {dtype_name(job.dtype)}"
        f", weights {dtype_name(job.weight_dtype)}",
    ]
    longest = architecture.max_positions
    if longest is not None and job.seqlen > longest:
        lines.append(f"the model was made for {longest:,} positions: its RoPE needs scaling")
    return "\n".join(map(wrapped, lines))


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
    return "\n".join([*time_lines("a step, predicted", rows, step.seconds), speed(step)])


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


def sources(plan: ModelPlan) -> str:
    """Return in lines where activations and speeds come from."""
    model = plan.job.model
    return source_lines(plan, model.activations.source, model.note)


def confidence(plan: ModelPlan) -> str:
    """Return in one line how far the numbers can be trusted."""
    return confidence_in(plan, plan.job.model.activations.source)


def nothing_fits(
    plan: ModelPlan,
    longest: ModelPlan | None,
    fewest: ModelPlan | None,
    other: ModelPlan | None = None,
) -> str:
    """Return three lines: what is missing, the longest sequence that fits, the fewest ranks.

    If other options fit on the same ranks, the last line names them.
    """
    lines = shortfall_lines(plan, longest, unit=UNIT)
    if other is not None:
        chosen = other.job
        lines.append(f"it fits with --recompute {chosen.recompute} --loss {chosen.loss}")
    else:
        lines.append(fewest_line(fewest, unit=UNIT, larger_degrees="larger --tp, --pp or --ep"))
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
        **memory_figures(plan),
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
