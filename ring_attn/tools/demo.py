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
import contextlib
import math
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor

from ring_attn import SequenceLayout, ring_attention, shard_batch, unshard
from ring_attn.arguments import (
    add_common,
    add_profile,
    dtype_name,
    parse_dtype,
    parse_size,
    write_if_interrupted,
    write_json,
)
from ring_attn.env import machine
from ring_attn.launch import DEVICES, num_cores, run_ranks, send_part
from ring_attn.layout import LAYOUTS
from ring_attn.profiling import gradient_sync, reset_resident_peak, resident_bytes, trace
from ring_attn.testing import Verdict
from ring_attn.tools.generate import (
    CHUNKS,
    Comparison,
    Generated,
    ShardedCache,
    WholeCache,
    compare,
    generate,
)
from ring_attn.tools.model import (
    Attention,
    ModelConfig,
    Transformer,
    dense_attention,
    mean_loss,
    token_losses,
)

NPROC, SEQLEN, STEPS = 2, 2048, 40
QUICK_SEQLEN, QUICK_STEPS = 512, 10
WARM_UP_SEQLEN = 128
JUDGED_BATCHES = 3

# For dim 128; wider layers take smaller steps. Twice as much, or no clipping, trains no better in
# so few steps, and the optimizer then feeds roundings back tens of times as strongly.
LEARNING_RATE = 1e-3
CLIP_NORM = 1.0

MESH_OPTIONS = ("schedule", "microbatches", "batch", "fsdp", "strategy")

NOT_TEXT = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test"))


@dataclass(frozen=True)
class Settings:
    """One run, as every process gets it."""

    nproc: int
    seqlen: int
    steps: int
    layout: str
    device: str
    dtype: torch.dtype
    seed: int
    quiet: bool
    model: ModelConfig
    generate: int = 0
    batch: int = 1

    @property
    def twin(self) -> int:
        """The global rank of the process without a ring."""
        return self.nproc


@dataclass(frozen=True)
class Row:
    """One step: mean losses in nats per byte, and what it took; memory is the highest so far."""

    step: int
    ring_loss: float
    dense_loss: float
    difference: float
    ring_tokens_per_s: float
    dense_tokens_per_s: float
    ring_peak_bytes: int
    dense_peak_bytes: int


@dataclass(frozen=True)
class Report:
    """The steps, the verdicts at the trained weights, and what these generate if asked to."""

    rows: list[Row]
    verdicts: list[Verdict]
    generation: Comparison | None = None

    @property
    def ok(self) -> bool:
        """Whether all losses are finite, all verdicts hold and one process generates the same."""
        losses = (loss for row in self.rows for loss in (row.ring_loss, row.dense_loss))
        return (
            all(map(math.isfinite, losses))
            and all(verdict.ok for verdict in self.verdicts)
            and (self.generation is None or self.generation.equal)
        )

    @property
    def greatest_difference(self) -> Row:
        """The step whose losses are furthest apart."""
        return max(self.rows, key=lambda row: row.difference)


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
        from ring_attn.tools import mesh_demo

        return mesh_demo.run(args)
    for name in MESH_OPTIONS:
        if getattr(args, name):
            raise ValueError(f"--{name} is for a mesh: give --mesh cp=2,tp=2 or the like")
    settings = settings_of(args)
    is_first = os.environ.get("RANK", "0") == "0"  # torchrun starts this on every rank
    if is_first and not settings.quiet:
        print(heading(settings), flush=True)
    # gloo is the default group on every device: it carries figures between ring and twin, which may
    # share a GPU. The ring has its own group.
    rows: list[Row] = []
    write_if_interrupted(args.json, lambda: unfinished_json(settings, rows))
    reports = run_ranks(
        train,
        settings.nproc + 1,
        settings,
        args.profile,
        threads=1,
        device="cpu",
        on_part=rows.append,
    )
    report = reports[0]
    if is_first:
        print(summary(settings, report), flush=True)
    if is_first and args.json:
        write_json(args.json, to_json(settings, report))
    return 0 if report.ok else 1


def settings_of(args: argparse.Namespace) -> Settings:
    """The run that the options describe; raises as `run` does."""
    seqlen = args.seqlen or (QUICK_SEQLEN if args.quick else SEQLEN)
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    nproc = args.nproc or NPROC
    least = max(2, nproc)
    if seqlen < least:
        raise ValueError(
            f"seqlen must be at least {least}, a byte for each rank and one to predict, "
            f"got {seqlen}"
        )
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = args.device or ("cuda" if num_gpus >= nproc else "cpu")
    if device == "cuda" and num_gpus < nproc:
        raise ValueError(
            f"{nproc} ranks on device 'cuda' need as many GPUs, this machine has {num_gpus}; "
            "use fewer ranks or device 'cpu'"
        )
    dtype = args.dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"dtype must be float32 or bfloat16, got {dtype_name(dtype)}")
    num_generated = args.generate or 0
    if num_generated >= seqlen:
        raise ValueError(
            f"generate must be less than seqlen, of which the rest is the prompt, got "
            f"{num_generated} and {seqlen}"
        )
    model = ModelConfig(dim=args.dim, hidden_dim=3 * args.dim, num_layers=args.layers)
    return Settings(
        nproc,
        seqlen,
        steps,
        args.layout,
        device,
        dtype,
        args.seed,
        args.quiet,
        model,
        num_generated,
    )


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
    rows = []
    with Display(COLUMNS, settings.quiet or rank != 0) as display:
        for step in range(settings.steps):
            batch = next(batches)
            if not is_twin:
                figures = _measured(trainer, batch, memory)
            dist.barrier()
            if is_twin:
                figures = _measured(trainer, batch, memory)
            rows.append(_gathered(step, figures, settings))
            send_part(rows[-1])
            display.show(rows[-1])
    if profile is not None and not is_twin:
        with trace(profile, rank):
            trainer.backward(batch)
    verdicts = judge(trainer, islice(batches, JUDGED_BATCHES), settings)
    if not settings.generate:
        return Report(rows, verdicts)
    return Report(rows, verdicts, generate_twice(trainer, next(batches)["input_ids"], settings))


class Trainer:
    """A model, its optimizer, and the rows of each batch that this process computes.

    With a ring's group those are the rank's shard, and gradients are added up over the ring;
    without one they are the whole sequence. bfloat16 is autocast, float64 all the way.
    """

    def __init__(
        self, settings: Settings, device: torch.device, ring: dist.ProcessGroup | None = None
    ) -> None:
        self.settings, self.device, self.ring = settings, device, ring
        torch.manual_seed(settings.seed)
        self.model = Transformer(settings.model).to(device)
        if settings.dtype == torch.float64:
            self.model.double()
        self.gradients = GradientBucket(self.model)
        self.optimizer = make_optimizer(self.model.parameters(), settings)

    def step(self, batch: dict[str, Tensor]) -> float:
        """Trains on one batch; returns its mean loss before the update."""
        loss, _ = self.backward(batch)
        # The bucket holds the gradients of the whole batch: every rank clips by the same norm.
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        return loss

    def backward(self, batch: dict[str, Tensor]) -> tuple[float, Tensor]:
        """Fills `gradients` with those of the whole batch.

        Args:
            batch: `input_ids` and `labels`, (batch, seqlen) int64 each, the same on every rank.

        Returns:
            The mean loss of the whole batch, and the losses (batch, rows) of this process's rows.
        """
        self.gradients.flat.zero_()
        num_sequences, seqlen = batch["input_ids"].shape
        layout = self._layout(seqlen)
        rank = 0 if self.ring is None else dist.get_rank(self.ring)
        part = {name: x.to(self.device) for name, x in shard_batch(batch, layout, rank).items()}
        with autocast(self.settings, self.device):
            attention = self._attention(layout)
            logits = self.model(part["input_ids"], part["position_ids"], attention)
            losses = token_losses(logits, part["shift_labels"])
        # The last byte of a sequence has no next one.
        loss = mean_loss(losses, num_targets=num_sequences * (seqlen - 1))
        loss.backward()
        loss = loss.detach()
        if self.ring is not None:
            with gradient_sync(self.device):
                dist.all_reduce(self.gradients.flat, group=self.ring)
            dist.all_reduce(loss, group=self.ring)
        return loss.item(), losses.detach()

    def results_of(self, batch: dict[str, Tensor]) -> Tensor:
        """(batch * seqlen + number of parameters,) on the CPU: each byte's loss, all gradients."""
        _, losses = self.backward(batch)
        if self.ring is not None:
            losses = unshard(losses, self._layout(batch["input_ids"].size(1)), group=self.ring)
        return torch.cat([losses.flatten(), self.gradients.flat]).cpu()

    def get_weights(self) -> Tensor:
        """(number of parameters,) on the CPU."""
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().cpu()

    def set_weights(self, weights: Tensor) -> None:
        """What `get_weights` returned, here or elsewhere."""
        weights = weights.to(self.device, self.gradients.flat.dtype)
        torch.nn.utils.vector_to_parameters(weights, self.model.parameters())

    def _layout(self, seqlen: int) -> SequenceLayout:
        """Who holds which bytes; the twin is a ring of one."""
        if self.ring is None:
            return SequenceLayout.contiguous(seqlen, 1)
        return SequenceLayout.from_name(self.settings.layout, seqlen, self.settings.nproc)

    def _attention(self, layout: SequenceLayout) -> Attention:
        if self.ring is None:
            return dense_attention
        return partial(ring_attention, causal=True, group=self.ring, layout=layout)


def autocast(settings: Settings, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """What the model and its loss are computed under."""
    if settings.dtype == torch.bfloat16:
        return torch.autocast(device.type, settings.dtype)
    return contextlib.nullcontext()


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], settings: Settings, *, foreach: bool | None = None
) -> torch.optim.Optimizer:
    """The optimizer of every run; `foreach` as torch has it."""
    return torch.optim.AdamW(
        parameters,
        lr=LEARNING_RATE * 128 / settings.model.dim,
        betas=(0.9, 0.95),
        foreach=foreach,
    )


class GradientBucket:
    """All gradients of a model as views of one tensor, so that one message adds them up."""

    def __init__(self, model: torch.nn.Module) -> None:
        parameters = list(model.parameters())
        self.flat = torch.zeros_like(torch.nn.utils.parameters_to_vector(parameters).detach())
        parts = self.flat.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)


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


#: Title, width and text of a row's cell.
Column: TypeAlias = tuple[str, int, Callable[[Any], str]]


class Display:
    """The rows as they come: a live table on a terminal, else plain lines, or nothing."""

    def __init__(self, columns: Sequence[Column], quiet: bool) -> None:
        self._columns = columns
        self._console = Console()
        self._lines = not quiet and not self._console.is_terminal
        self._live: Live | None = None
        if not quiet and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
        self._rows: list[Any] = []

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        if self._lines:
            titles = (f"{title:>{width}}" for title, width, _ in self._columns)
            print("  ".join(titles), flush=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, row: Any) -> None:
        """Adds a row."""
        self._rows.append(row)
        if self._live is not None:
            # Of what does not fit rich leaves out the bottom, where the newest rows are.
            fitting = max(1, self._console.height - 2)
            self._live.update(self._table(self._rows[-fitting:]), refresh=True)
        if self._lines:
            cells = (f"{cell(row):>{width}}" for _, width, cell in self._columns)
            print("  ".join(cells), flush=True)

    def _table(self, rows: list[Any]) -> Table:
        # Narrow enough for a terminal of 80 columns.
        table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)
        for title, width, _ in self._columns:
            table.add_column(title, justify="right", min_width=width)
        for row in rows:
            table.add_row(*(cell(row) for _, _, cell in self._columns))
        return table


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


def squared_errors(x: Tensor, exact: Tensor, sizes: list[int]) -> Tensor:
    """(2,) of the losses, which are the first part, and of the gradients, in units of each part."""
    parts = zip(x.double().split(sizes), exact.split(sizes), strict=True)
    # A part that is exactly zero must be met exactly.
    tiny = torch.finfo(torch.float64).tiny
    losses, *gradients = ((a - b).square().sum() / b.square().sum().clamp(tiny) for a, b in parts)
    return torch.stack([losses, torch.stack(gradients).sum()])


def verdicts_of(squares: Tensor, num_batches: int, num_parameters: int) -> list[Verdict]:
    """Judges sums of `squared_errors` over batches: columns of what is judged, and of the twin."""
    rounding = torch.finfo(torch.float32).eps / 2
    verdicts = []
    for name, parts, (error, plain) in zip(
        ("losses", "gradients"), (1, num_parameters), squares.sqrt().tolist(), strict=True
    ):
        bound = 2.0 * plain + rounding * math.sqrt(num_batches * parts)
        verdicts.append(Verdict(name, error, bound, ok=error <= bound))
    return verdicts


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


def standard_library_text() -> Tensor:
    """(bytes,) uint8: the sources of the running Python's standard library, in the order of names.

    Raises:
        FileNotFoundError: this Python came without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    text = bytearray()
    for path in sorted(paths):
        if NOT_TEXT.isdisjoint(path.parts):
            text += (root / path).read_bytes()
    if not text:
        raise FileNotFoundError(f"no sources of the standard library in {root}")
    return torch.frombuffer(text, dtype=torch.uint8)


def sample_batches(
    text: Tensor, seqlen: int, seed: int, batch: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Windows of the text without end, the same for the same seed.

    Args:
        text: (bytes,) uint8.
        seqlen: bytes of a window.
        seed: of the positions.
        batch: windows at a time.

    Yields:
        `input_ids` and `labels`, (batch, seqlen) int64 each, unshifted.

    Raises:
        ValueError: the text is shorter than a window.
    """
    if seqlen > text.numel():
        raise ValueError(f"seqlen must be at most {text.numel()}, all of the text, got {seqlen}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(text.numel() - seqlen + 1, (batch,), generator=generator).tolist()
        windows = torch.stack([text[start : start + seqlen].long() for start in starts])
        yield {"input_ids": windows, "labels": windows}


def heading(settings: Settings) -> str:
    """What is about to run."""
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in Transformer(settings.model).parameters())
    return (
        f"{num_parameters:,} parameters in {dtype_name(settings.dtype)}, sequences of "
        f"{settings.seqlen:,} bytes: a {settings.layout} ring of {settings.nproc} on "
        f"{settings.device}, beside one process with dense attention"
    )


def summary(settings: Settings, report: Report) -> str:
    """The result in a few lines."""
    first, last, greatest = report.rows[0], report.rows[-1], report.greatest_difference
    ring_speed = statistics.median(row.ring_tokens_per_s for row in report.rows)
    dense_speed = statistics.median(row.dense_tokens_per_s for row in report.rows)
    return "\n".join(
        (
            f"loss      {first.ring_loss:.4f} -> {last.ring_loss:.4f} nats per byte in "
            f"{len(report.rows)} steps (dense {first.dense_loss:.4f} -> {last.dense_loss:.4f})",
            f"tokens/s  {ring_speed:,.0f} in a ring of {settings.nproc}, {dense_speed:,.0f} dense "
            "(medians)",
            f"memory    {last.ring_peak_bytes / 2**20:.1f} MiB a rank, "
            f"{last.dense_peak_bytes / 2**20:.1f} MiB dense, above the built model",
            "check     at the trained weights, against float64: "
            + "; ".join(map(str, report.verdicts)),
            *_generation_lines(report.generation),
            f"greatest loss difference {greatest.difference:.2e} (step {greatest.step}): "
            f"{'ok' if report.ok else 'FAILED'}",
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


def unfinished_json(settings: Settings, rows: Sequence[Row]) -> dict[str, Any]:
    """The part of the report that there is before the training has ended."""
    options = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name != "quiet"}
    options |= {"dtype": dtype_name(settings.dtype), "model": asdict(settings.model)}
    return {
        "command": "demo",
        "machine": machine(),
        "settings": options,
        "rows": [asdict(row) for row in rows],
    }


def to_json(settings: Settings, report: Report) -> dict[str, Any]:
    """The report as it is written."""
    return {
        **unfinished_json(settings, report.rows),
        "greatest_difference": report.greatest_difference.difference,
        "checks": [asdict(verdict) for verdict in report.verdicts],
        "generation": None if report.generation is None else asdict(report.generation),
        "ok": report.ok,
    }


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
        abs(ring_loss - dense_loss),
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
