"""Lines that the reports of language models and of diffusion transformers share."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from ring_attn.planning.choice import format_seconds
from ring_attn.planning.model.job import AnyJob
from ring_attn.planning.model.memory import Memory, Part
from ring_attn.planning.model.search import MAX_RANKS, AttentionT, JobT, Plan, StepT
from ring_attn.planning.model.step import AnyStep, peak_flops, product_speed

GB, WIDTH = 1e9, 80
# Characters of the name of a model.
MAX_NAME = 40


def wrapped(line: str) -> str:
    """Return a line in lines of at most `WIDTH`."""
    return textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)


def short_name(name: str) -> str:
    """Return the name of a model, or the end of a long one, such as a path."""
    return name if len(name) <= MAX_NAME else f"...{name[3 - MAX_NAME :]}"


def batches_of_step(count: int) -> str:
    """Return the number of batches of a step in words; "" for one."""
    return f", {count} batches a step" if count > 1 else ""


def ranks_of(job: AnyJob) -> str:
    """Return the ranks of a job, and how they share it, in words."""
    cluster, world_size = job.cluster, job.degrees.world_size
    return f"{world_size} x {cluster.device.name} (nodes of {cluster.node_size}): {job.degrees}"


# -- memory


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


def memory_figures(plan: Plan[JobT, AttentionT, StepT]) -> dict[str, object]:
    """Return whether a plan fits, and its memory, for JSON."""
    parts = plan.memory.parts
    return {
        "fits": plan.fits,
        "memory_bytes": {part.name: round(part.nbytes) for part in parts},
        "not_at_peak": [part.name for part in parts if not part.at_peak],
        "estimates": [part.name for part in parts if part.is_estimate],
        "total_bytes": round(plan.memory.total),
        "limit_bytes": plan.job.memory_bytes,
    }


# -- time

# Rows of every table of times. Other rows are left out where they take no time.
ALWAYS = ("attention", "other products", "other operators")


def time_lines(title: str, rows: Mapping[str, tuple[float, str]], total: float) -> list[str]:
    """Return a table of seconds, with words about each, in lines."""
    lines = [f"{title:25} time"]
    for name, (seconds, words) in rows.items():
        if seconds > 0 or name in ALWAYS:
            lines.append(f"{name:20}{format_seconds(seconds):>11}  {words}")
    lines.append(f"{'total':20}{format_seconds(total):>11}")
    return lines


def share_of_peak(job: AnyJob) -> str:
    """Return the assumed speed of products in words."""
    peak = peak_flops(job)
    if peak is None:
        return "as fast as attention"
    return f"{100 * product_speed(job) / peak:.0f} % of the peak"


def speed(step: AnyStep) -> str:
    """Return tokens per second, MFU and exposed time in words."""
    mfu = "MFU unknown" if step.mfu is None else f"MFU {100 * step.mfu:.0f} %"
    exposed = format_seconds(sum(step.exposed.values()))
    return f"{step.tokens_per_second:,.0f} tokens/s a rank, {mfu}, {exposed} exposed"


# -- sources


def kernels_source(plan: Plan[JobT, AttentionT, StepT]) -> str:
    """Return where the speeds of the kernels of attention come from."""
    kinds = plan.attention.kinds
    cluster = kinds[0].choice.problem.cluster if kinds else plan.job.cluster
    return cluster.device.source


def source_lines(plan: Plan[JobT, AttentionT, StepT], activations: str, note: str) -> str:
    """Return in lines where activations and speeds come from; `note` says why none were traced."""
    why = f" (not traced: {note})" if note else ""
    lines = [f"activations: {activations}{why}", f"kernels: {kernels_source(plan)}"]
    return "\n".join(map(wrapped, lines))


def confidence_in(plan: Plan[JobT, AttentionT, StepT], activations: str) -> str:
    """Return in one line how far the numbers can be trusted."""
    memory = activations.partition(":")[0]
    kernels = kernels_source(plan).partition(":")[0]
    return f"confidence: memory {memory}, kernels' speed {kernels}; no GPU has confirmed a plan"


# -- what fits


def shortfall_lines(
    plan: Plan[JobT, AttentionT, StepT],
    longest: Plan[JobT, AttentionT, StepT] | None,
    *,
    unit: str,
) -> list[str]:
    """Return two lines: what is missing, and the longest sequence that fits.

    Args:
        plan: a plan that does not fit.
        longest: the plan of the longest sequence that fits; None if no length fits.
        unit: "tokens" or "rows".
    """
    job, memory, limit = plan.job, plan.memory, plan.job.memory_bytes
    where = f"{job.degrees.world_size} x {job.cluster.device.name}"
    largest = max((x for x in memory.parts if x.at_peak), key=lambda part: part.nbytes)
    missing = (
        f"does not fit: a rank needs {memory.total / GB:,.1f} of {limit / GB:,.1f} GB, "
        f"{largest.name} {largest.nbytes / GB:,.1f}"
    )
    if longest is None:
        return [
            missing,
            f"no length fits on {where}: {memory.fixed / GB:,.1f} GB are for any length",
        ]
    return [missing, f"the longest sequence on {where}: {longest.job.seqlen:,} {unit}"]


def fewest_line(
    fewest: Plan[JobT, AttentionT, StepT] | None, *, unit: str, larger_degrees: str
) -> str:
    """Return a line: the fewest ranks on which a length fits.

    If no number fits (`fewest` is None), it says which degrees to pass: `larger_degrees`.
    """
    if fewest is None:
        return f"no number of ranks up to {MAX_RANKS:,} fits: pass {larger_degrees}"
    degrees = fewest.job.degrees
    length = f"{fewest.job.seqlen:,} {unit}"
    return f"the fewest ranks for {length}: {degrees.world_size} ({degrees})"
