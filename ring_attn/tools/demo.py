"""`ring-attn demo`: trains a small transformer, its sequence sharded over ranks, beside its twin.

The text is real, the sources of Python's standard library; a token is a byte. Ranks 0 .. nproc-1
are the ring: each holds its part of every sequence and sees the rest through ring attention. One
more process is the twin: the same model on the same bytes, with dense attention over the whole
sequence. They take turns within a step, so that neither is measured while the other computes, and
all ranks of the ring together use as many cores as the twin does.

Two float32 runs of one model drift apart, since the optimizer feeds every rounding back; that
difference is shown, not judged. What is judged are three more batches at the trained weights: the
losses of the ring's bytes and the gradients of its parameters may be twice as far from float64 as
the dense twin's, and a rounding. The exit status is 1 if they are not, or if a loss is not finite.

With `--generate N` the trained model continues a text by N bytes, greedily: the ring from a KV
cache that is split over its ranks and grows, its twin from a whole one. The bytes must be equal.

With `--mesh cp=2,tp=2` (any of pp, dp, cp, tp) the ring is one axis of a mesh with pipeline, data
and tensor parallelism; see `ring_attn.tools.mesh_demo`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.arguments import add_common, add_profile, dtype_name, parse_dtype, parse_size
from ring_attn.launch import DEVICES, num_cores, send_part
from ring_attn.layout import LAYOUTS
from ring_attn.profiling import reset_resident_peak, resident_bytes, trace
from ring_attn.testing import Verdict
from ring_attn.tools import mesh_demo
from ring_attn.tools.generate import (
    CHUNKS,
    Comparison,
    Generated,
    ShardedCache,
    WholeCache,
    compare,
    generate,
)
from ring_attn.tools.model import Transformer
from ring_attn.tools.training import (
    JUDGED_BATCHES,
    NPROC,
    SEQLEN,
    STEPS,
    Column,
    Report,
    Settings,
    Trainer,
    check_sizes,
    print_row,
    print_titles,
    run_and_report,
    sample_batches,
    settings_of,
    squared_errors,
    standard_library_text,
    verdicts_of,
)

WARM_UP_SEQLEN = 128

MESH_OPTIONS = ("schedule", "microbatches", "batch", "fsdp", "strategy")


@dataclass(frozen=True)
class Row:
    """One step: mean losses in nats per byte, and what it took; memory is the highest so far."""

    step: int
    ring_loss: float
    dense_loss: float
    ring_tokens_per_s: float
    dense_tokens_per_s: float
    ring_peak_bytes: int
    dense_peak_bytes: int

    @property
    def losses(self) -> tuple[float, float]:
        """Losses of the ring and of its twin."""
        return self.ring_loss, self.dense_loss

    @property
    def difference(self) -> float:
        """Between the two."""
        return abs(self.ring_loss - self.dense_loss)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the demo."""
    add = parser.add_argument
    add(
        "--nproc",
        "--world-size",
        type=parse_size,
        help=f"ranks of the ring (default: {NPROC})",
    )
    add("--seqlen", type=parse_size, help=f"bytes of each sequence (default: {SEQLEN})")
    add("--steps", type=parse_size, help=f"training steps (default: {STEPS})")
    add("--layout", choices=LAYOUTS, default="zigzag", help="who holds what (default: zigzag)")
    add("--device", choices=DEVICES, help="default: cuda where every rank can have a GPU")
    add(
        "--dtype",
        type=parse_dtype,
        help="float32, or bfloat16 for autocast (default: float32 on cpu, bfloat16 on cuda)",
    )
    add("--dim", type=parse_size, default=128, help="width of the model (default: 128)")
    add("--layers", type=parse_size, default=4, help="layers of the model (default: 4)")
    add("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    add(
        "--generate",
        type=parse_size,
        metavar="N",
        help="then continue a text by N bytes, from a sharded and from a whole KV cache",
    )
    mesh = parser.add_argument_group("on a mesh")
    mesh.add_argument("--mesh", metavar="AXES", help="sizes of pp, dp, cp and tp: cp=2,tp=2")
    mesh.add_argument("--schedule", help="gpipe, 1f1b or interleaved (default: 1f1b)")
    mesh.add_argument(
        "--microbatches",
        type=parse_size,
        help="of a replica's sequences (default: 2 * pp; 1 if pp=1)",
    )
    mesh.add_argument("--batch", type=parse_size, help="sequences (default: dp * microbatches)")
    mesh.add_argument("--fsdp", action="store_true", help="shard parameters over dp and cp")
    mesh.add_argument("--strategy", help="of the attention over cp (default: ring)")
    add_profile(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Trains, prints and writes what came out.

    Returns:
        0, or 1 where a loss is not finite, a result at the trained weights misses its bound, or
        ring and twin do not generate the same.

    Raises:
        ValueError: sizes that do not fit each other, the text or this machine.
        TypeError: a dtype that is not trained in.
    """
    if args.profile:
        # The profiler greets on stderr, unless it is told before torch is imported.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if args.mesh:
        return mesh_demo.run(args)
    for name in MESH_OPTIONS:
        if getattr(args, name):
            raise ValueError(f"--{name} is for a mesh: give --mesh cp=2,tp=2 or the like")
    settings = settings_of(args)
    check_sizes(settings)
    # gloo is the default group on every device: it carries figures between ring and twin, which may
    # share a GPU. The ring has its own group.
    return run_and_report(
        args, train, settings.nproc + 1, settings, settings.described(), heading(settings), summary,
        device="cpu", threads=1,
    )  # fmt: skip


def train(settings: Settings, profile: Path | None = None) -> Report:
    """One process of the demo: a rank of the ring, or the twin. The report is rank 0's.

    Args:
        settings: the same in every process.
        profile: folder for each rank's trace of the last batch once more, or None.
    """
    rank = dist.get_rank()
    is_twin = rank == settings.twin
    backend = "nccl" if settings.device == "cuda" else "gloo"
    ring = dist.new_group(list(range(settings.nproc)), backend=backend)
    torch.set_num_threads(num_cores() if is_twin else max(1, num_cores() // settings.nproc))
    device = _device(settings, rank)
    trainer = Trainer(settings, device, None if is_twin else ring)
    batches = sample_batches(standard_library_text(), settings.seqlen, settings.seed)

    # Operators are loaded and connections made before anything is measured.
    trainer.backward({name: x[:, :WARM_UP_SEQLEN] for name, x in next(batches).items()})
    memory = PeakMemory(device)
    rows, shown = [], rank == 0 and not settings.quiet
    if shown:
        print_titles(COLUMNS)
    for step in range(settings.steps):
        batch = next(batches)
        if not is_twin:
            figures = _measured(trainer, batch, memory)
        dist.barrier()
        if is_twin:
            figures = _measured(trainer, batch, memory)
        rows.append(_gathered(step, figures, settings))
        send_part(rows[-1])
        if shown:
            print_row(COLUMNS, rows[-1])
    if profile is not None and not is_twin:
        with trace(profile, rank):
            trainer.backward(batch)
    verdicts = judge(trainer, islice(batches, JUDGED_BATCHES), settings)
    if not settings.generate:
        return Report(rows, verdicts)
    return Report(rows, verdicts, generate_twice(trainer, next(batches)["input_ids"], settings))


class PeakMemory:
    """How far a process's memory has risen above what it held when this was made.

    On CUDA that is what torch has allocated. On the CPU it is the resident set, which knows of
    everything the process holds: torch, the transport's buffers, and what malloc has kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
        else:
            # Where the kernel does not let a process reset its peak, only a rise above it is seen.
            reset_resident_peak()
            _, self._start = resident_bytes()
        self._highest = 0

    def read(self) -> int:
        """Bytes above the start, at the highest point since."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            _, peak = resident_bytes()
        # Some kernels take the resident set's peak from samples, and it may even fall.
        self._highest = max(self._highest, peak - self._start)
        return self._highest


COLUMNS: tuple[Column, ...] = (
    ("step", 4, lambda row: str(row.step)),
    ("ring loss", 9, lambda row: f"{row.ring_loss:.6f}"),
    ("dense loss", 10, lambda row: f"{row.dense_loss:.6f}"),
    ("difference", 10, lambda row: f"{row.difference:.1e}"),
    ("ring tok/s", 10, lambda row: f"{row.ring_tokens_per_s:,.0f}"),
    ("dense tok/s", 11, lambda row: f"{row.dense_tokens_per_s:,.0f}"),
    ("MiB/rank", 8, lambda row: f"{row.ring_peak_bytes / 2**20:.1f}"),
    ("dense MiB", 9, lambda row: f"{row.dense_peak_bytes / 2**20:.1f}"),
)


def judge(
    trainer: Trainer, batches: Iterable[dict[str, Tensor]], settings: Settings
) -> list[Verdict]:
    """The ring's losses and gradients against float64, at the ring's weights.

    The bound is twice the dense twin's error, plus the rounding of the results to float32. Both
    errors are norms over all bytes, or all parameters in units of each one's gradient. Roundings of
    one row reach whole parameters, so that of a single one the greatest error is a matter of luck.

    Every process calls it and gets the verdicts.
    """
    is_twin = trainer.ring is None
    weights = trainer.get_weights()
    dist.broadcast(weights, src=0)
    trainer.set_weights(weights)
    if is_twin:
        oracle = Trainer(replace(settings, dtype=torch.float64), trainer.device)
        oracle.set_weights(weights)
    sizes = [settings.seqlen, *(p.numel() for p in trainer.model.parameters())]
    num_batches, squares = 0, torch.zeros(2, 2, dtype=torch.float64)
    for batch in batches:
        results = trainer.results_of(batch)
        ring_results = results.clone()
        dist.broadcast(ring_results, src=0)
        if is_twin:
            exact = oracle.results_of(batch)
            pair = [squared_errors(x, exact, sizes) for x in (ring_results, results)]
            squares += torch.stack(pair, dim=1)
        num_batches += 1
    dist.broadcast(squares, src=settings.twin)
    return verdicts_of(squares, num_batches, len(sizes) - 1)


def generate_twice(trainer: Trainer, text: Tensor, settings: Settings) -> Comparison:
    """Continues a text from the ring's sharded cache and from the twin's whole one.

    In the type of the weights, float32: with bfloat16 a choice between two bytes would often hang
    on a rounding.

    Args:
        trainer: with the weights that `judge` leaves, the same in every process.
        text: (1, seqlen) int64, the same in every process; its last bytes are left out.
        settings: of the run.

    Every process calls it and gets the result.
    """
    prompt = text[:, : settings.seqlen - settings.generate].to(trainer.device)
    num_layers = settings.model.num_layers
    if trainer.ring is None:
        mine = generate(trainer.model, prompt, settings.generate, WholeCache(num_layers))
    else:
        cache = ShardedCache(num_layers, trainer.ring, settings.layout)
        mine = generate(trainer.model, prompt, settings.generate, cache, CHUNKS)
    generated: list[Generated] = []
    for source in (0, settings.twin):
        box = [mine if dist.get_rank() == source else None]
        dist.broadcast_object_list(box, src=source)
        assert box[0] is not None, "its source has filled it"
        generated.append(box[0])
    return compare(prompt, *generated)


def heading(settings: Settings) -> str:
    """Describes the run that is about to begin."""
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in Transformer(settings.model).parameters())
    return (
        f"{num_parameters:,} parameters in {dtype_name(settings.dtype)}, sequences of "
        f"{settings.seqlen:,} bytes: a {settings.layout} ring of {settings.nproc} on "
        f"{settings.device}, beside one process with dense attention"
    )


def summary(settings: Settings, report: Report) -> str:
    """The result in a few lines."""
    last = report.rows[-1]
    ring_speed = statistics.median(row.ring_tokens_per_s for row in report.rows)
    dense_speed = statistics.median(row.dense_tokens_per_s for row in report.rows)
    return "\n".join(
        (
            report.losses_line("", "dense"),
            f"tokens/s  {ring_speed:,.0f} in a ring of {settings.nproc}, {dense_speed:,.0f} dense "
            "(medians)",
            f"memory    {last.ring_peak_bytes / 2**20:.1f} MiB a rank, "
            f"{last.dense_peak_bytes / 2**20:.1f} MiB dense, above the built model",
            "check     at the trained weights, against float64: "
            + "; ".join(map(str, report.verdicts)),
            *_generation_lines(report.generation),
            report.last_line(),
        )
    )


def _generation_lines(generation: Comparison | None) -> list[str]:
    if generation is None:
        return []
    first = generation.first_difference
    where = "" if first is None else f", from byte {first} on"
    return [
        f"after     {generation.context!r}",
        f"generated {generation.text!r}",
        f"equal to one process: {'yes' if generation.equal else 'no'}{where}; greatest logit "
        f"difference {generation.greatest_difference:.1e}, closest choice by "
        f"{generation.smallest_margin:.1e}, KV rows on the ranks "
        f"{', '.join(map(str, generation.rows))}",
    ]


def _measured(trainer: Trainer, batch: dict[str, Tensor], memory: PeakMemory) -> Tensor:
    """One step: (3,) float64 loss, seconds and peak bytes."""
    start = time.perf_counter()
    loss = trainer.step(batch)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    seconds = time.perf_counter() - start
    return torch.tensor([loss, seconds, memory.read()], dtype=torch.float64)


def _gathered(step: int, figures: Tensor, settings: Settings) -> Row:
    """The figures of all processes as a row; of the ring, those of its slowest and largest rank."""
    everyone = [torch.empty_like(figures) for _ in range(settings.nproc + 1)]
    dist.all_gather(everyone, figures)
    ring, dense = torch.stack(everyone[: settings.twin]), everyone[settings.twin]
    ring_loss, dense_loss = ring[0, 0].item(), dense[0].item()
    return Row(
        step,
        ring_loss,
        dense_loss,
        settings.seqlen / ring[:, 1].max().item(),
        settings.seqlen / dense[1].item(),
        int(ring[:, 2].max()),
        int(dense[2]),
    )


def _device(settings: Settings, rank: int) -> torch.device:
    """The rank's own GPU; the twin takes the next one, or shares the last."""
    if settings.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", min(rank, torch.cuda.device_count() - 1))
    torch.cuda.set_device(device)
    return device
