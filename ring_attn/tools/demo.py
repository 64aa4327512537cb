"""`ring-attn demo`: trains a small transformer over ranks, beside its twin in one process.

The text is real, the sources of Python's standard library; a token is a byte. By default the ranks
are a ring; with `--mesh cp=2,tp=2` (any of pp, dp, cp, tp) the ring is one axis of a mesh: see
`ring_attn.tools.mesh`. The twin is the same model on the same bytes with dense attention over whole
sequences, on rank 0 with all cores while the other ranks wait.

Two float32 runs of one model drift apart, since the optimizer feeds every rounding back; their
difference is shown, not judged. Three more batches at the trained weights are judged: the losses
and gradients of the mesh may be twice as far from float64 as those of the twin, plus a rounding.
The exit status is 1 if they are not, or if a loss is not finite.

With `--packed` a batch is whole files of the library, each a document in its real length, which
`ring_attn.pack` places; the twin computes one after another.

With `--generate N` the trained model continues a text by N bytes, greedily, from a KV cache that is
split over the ring. Its twin must choose the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import (
    SequenceLayout,
    pack,
    ring_attention,
    shard_batch,
    sync_gradients,
    unshard,
)
from ring_attn.core.dtypes import dtype_name
from ring_attn.core.layout import LAYOUTS
from ring_attn.profiling import trace
from ring_attn.testing import Verdict
from ring_attn.tools.arguments import (
    add_common,
    parse_dtype,
    parse_folder,
    parse_size,
    setting_from,
    write_if_interrupted,
    write_json,
)
from ring_attn.tools.env import machine
from ring_attn.tools.generate import Comparison, generate_twice
from ring_attn.tools.launch import (
    DEVICES,
    checked_device,
    num_cores,
    rank_device,
    run_ranks,
    send_part,
)
from ring_attn.tools.mesh import CLIP_NORM, SCHEDULES, Axes, MeshTrainer, Settings
from ring_attn.tools.model import (
    Attention,
    ModelConfig,
    dense_attention,
    mean_loss,
    token_losses,
)
from ring_attn.tools.texts import standard_library_files

NPROC, SEQLEN, STEPS = 2, 2048, 40
QUICK_SEQLEN, QUICK_STEPS = 512, 10
PACKED_SEQLEN = 8192
JUDGED_BATCHES = 3

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """One training, its number of steps, and what follows it; the same on every rank."""

    training: Settings
    steps: int
    generate: int = 0
    packed: bool = False
    quiet: bool = False
    profile: Path | None = None


@dataclass(frozen=True)
class Row:
    """Figures of a step: mean losses in nats per byte, and speed."""

    step: int
    mesh_loss: float
    dense_loss: float
    mesh_tokens_per_s: float
    dense_tokens_per_s: float

    @property
    def difference(self) -> float:
        return abs(self.mesh_loss - self.dense_loss)


@dataclass(frozen=True)
class Report:
    """The steps of a demo, the verdicts at the trained weights, and what these generate."""

    rows: list[Row]
    verdicts: list[Verdict]
    generation: Comparison | None = None

    @property
    def ok(self) -> bool:
        """Whether all losses are finite, all verdicts hold and one process generates the same."""
        return (
            all(math.isfinite(row.mesh_loss + row.dense_loss) for row in self.rows)
            and all(verdict.ok for verdict in self.verdicts)
            and (self.generation is None or self.generation.equal)
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nproc", "--world-size", type=parse_size, help=f"ranks of the ring (default: {NPROC})")
    add("--seqlen", type=parse_size, help=f"bytes of each sequence (default: {SEQLEN})")
    add("--steps", type=parse_size, help=f"training steps (default: {STEPS})")
    packed = "whole files, at most seqlen bytes of them a batch, placed by ring_attn.pack"
    add("--packed", action="store_true", help=f"{packed} (default seqlen: {PACKED_SEQLEN})")
    add("--layout", choices=LAYOUTS, default="zigzag", help="who holds what (default: zigzag)")
    add("--device", choices=DEVICES, help="default: cuda where every rank can have a GPU")
    dtypes = "float32, or bfloat16 for autocast (default: float32 on cpu, bfloat16 on cuda)"
    add("--dtype", type=parse_dtype, help=dtypes)
    add("--dim", type=parse_size, default=128, help="width of the model (default: 128)")
    add("--layers", type=parse_size, default=4, help="layers of the model (default: 4)")
    generate = "then continue a text by N bytes, from a sharded KV cache and in one process"
    add("--generate", type=parse_size, metavar="N", help=generate)
    add("--mesh", metavar="AXES", help="sizes of pp, dp, cp and tp: cp=2,tp=2 (default: the ring)")
    add("--schedule", default="1f1b", help=f"one of {', '.join(SCHEDULES)} (default: 1f1b)")
    add("--microbatches", type=parse_size, help="of a replica's batch (default: 2 * pp; 1 if pp=1)")
    add("--batch", type=parse_size, help="sequences (default: dp * microbatches)")
    add("--fsdp", action="store_true", help="shard parameters over dp and cp")
    add("--strategy", default="ring", help="of the attention over cp (default: ring)")
    trace = "then trace one more batch: DIR/rank0_trace.json and so on, for Perfetto"
    add("--profile", metavar="DIR", type=parse_folder, help=trace)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Trains, prints and writes the report; 0, or 1 where it is not ok."""
    if args.profile:
        # The ranks inherit it: else the profiler greets on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    device, what = run_of(args)
    settings = what.training
    next(batches_of(what))  # refuses a length before ranks are started
    is_first = os.environ.get("RANK", "0") == "0"  # torchrun starts this on every rank
    if is_first and not args.quiet:
        print(heading(what, device), flush=True)
    rows: list[Row] = []

    def to_json() -> dict[str, Any]:
        values = asdict(settings) | {
            "dtype": dtype_name(settings.dtype),
            "nproc": settings.axes.size,
            "device": device,
            "steps": what.steps,
            "generate": what.generate,
            "packed": what.packed,
        }
        steps = [asdict(row) | {"difference": row.difference} for row in rows]
        return {"command": "demo", "machine": machine(), "settings": values, "rows": steps}

    write_if_interrupted(args.json, to_json)
    report = run_ranks(train, settings.axes.size, what, device=device, on_part=rows.append)[0]
    assert report is not None, "rank 0 has it"
    if is_first:
        print(summary(report), flush=True)
    if is_first and args.json:
        verdicts = {
            "greatest_difference": max(row.difference for row in report.rows),
            "checks": [asdict(verdict) for verdict in report.verdicts],
            "generation": report.generation and asdict(report.generation),
            "ok": report.ok,
        }
        write_json(args.json, to_json() | verdicts)
    return 0 if report.ok else 1


def run_of(args: argparse.Namespace) -> tuple[str, Run]:
    """The device and the run that the options describe; ValueError where they do not fit."""
    axes = Axes(cp=args.nproc or NPROC) if args.mesh is None else Axes.parse(args.mesh)
    if args.nproc not in (None, axes.size):
        raise ValueError(f"mesh {axes} has {axes.size} ranks, got --nproc {args.nproc}")
    if args.generate and axes.size != axes.cp:
        raise NotImplementedError(
            f"--generate is for a ring alone, got mesh {axes}: give only cp, or leave out --mesh"
        )
    if args.packed:
        _check_packed(args, axes)
    usual = PACKED_SEQLEN if args.packed else SEQLEN
    seqlen = args.seqlen or (QUICK_SEQLEN if args.quick else usual)
    if args.generate and args.generate >= seqlen:
        raise ValueError(
            f"generate must be less than seqlen, of which the rest is the prompt, got "
            f"{args.generate} and {seqlen}"
        )
    device = checked_device(args.device, axes.size)
    dtype = args.dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"dtype must be float32 or bfloat16, got {dtype_name(dtype)}")
    microbatches = args.microbatches or (2 * axes.pp if axes.pp > 1 else 1)
    training = setting_from(
        Settings,
        args,
        axes=axes,
        model=ModelConfig(dim=args.dim, hidden_dim=3 * args.dim, num_layers=args.layers),
        seqlen=seqlen,
        batch=args.batch or axes.dp * microbatches,
        microbatches=microbatches,
        dtype=dtype,
    )
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    return device, Run(training, steps, args.generate or 0, args.packed, args.quiet, args.profile)


def _check_packed(args: argparse.Namespace, axes: Axes) -> None:
    others = {"generate": 0, "batch": 1, "microbatches": 1, "fsdp": False, "layout": "zigzag"}
    given = [
        f"--{name} {getattr(args, name)}"
        for name, usual in others.items()
        if (getattr(args, name) or usual) != usual
    ]
    given += [f"--mesh {axes}"] * (axes.size != axes.cp)
    if given:
        raise NotImplementedError(
            f"--packed is one sequence of documents over a ring alone, got {', '.join(given)}: "
            "leave out these, or --packed"
        )


def batches_of(what: Run) -> Iterator[Batch]:
    """The batches of a run, without end."""
    settings = what.training
    if what.packed:
        return document_batches(settings.seqlen, settings.seed)
    text = standard_library_text()
    return sample_batches(text, settings.seqlen, settings.seed, settings.batch)


def train(what: Run) -> Report | None:
    """Trains as one rank of the mesh; rank 0 trains the twin too, and returns the report."""
    settings, device = what.training, rank_device()
    trainer: MeshTrainer | PackedTrainer
    if what.packed:
        trainer = PackedTrainer(settings, device)
    else:
        trainer = MeshTrainer(settings, settings.axes.mesh(device.type), device)
    twin = Twin(settings, device) if dist.get_rank() == 0 else None
    batches = batches_of(what)
    rows: list[Row] = []
    shown = twin is not None and not what.quiet
    if shown:
        print(COLUMNS, flush=True)
    for step, batch in enumerate(islice(batches, what.steps)):
        dist.barrier()
        loss, seconds = timed(trainer.step, batch, device)
        worst = torch.tensor(seconds, device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if twin is not None:
            with _all_cores():
                dense_loss, dense_seconds = timed(twin.step, batch, device)
            num = batch["input_ids"].numel()
            rows.append(Row(step, loss, dense_loss, num / worst.item(), num / dense_seconds))
            send_part(rows[-1])
        if shown:
            print(_text(rows[-1]), flush=True)
    dist.barrier()
    if what.profile is not None:
        with trace(what.profile):
            trainer.backward(batch)
    verdicts = judge(trainer, twin, islice(batches, JUDGED_BATCHES))
    generation = None
    if what.generate and isinstance(trainer, MeshTrainer):
        model = replace(settings, dtype=torch.float32).make_model(device)
        weights = trainer.get_weights().to(device)
        torch.nn.utils.vector_to_parameters(weights, model.parameters())
        text = next(batches)["input_ids"][:1].to(device)
        prompt = text[:, : settings.seqlen - what.generate]
        group = trainer.mesh.get_group("cp")
        generation = generate_twice(model, prompt, what.generate, group, settings.layout)
    return None if twin is None else Report(rows, verdicts, generation)


class Twin:
    """The whole model in one process, with dense attention; it uses nothing of the mesh.

    Documents of a batch, where it has `cu_seqlens`, are attended to one after another.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.model = settings.make_model(device)
        self._optimizer = settings.make_optimizer(self.model.parameters())

    def step(self, batch: Batch) -> float:
        """Trains on one batch; returns its mean loss before the update."""
        loss, _ = self.backward(batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self._optimizer.step()
        return loss

    def backward(self, batch: Batch) -> tuple[float, Tensor]:
        """Leaves gradients in the parameters; returns the mean loss, and each byte's."""
        whole = {name: x.to(self.device) for name, x in batch.items() if name != "cu_seqlens"}
        layout = SequenceLayout.contiguous(whole["input_ids"].size(1), 1)
        cuts = batch.get("cu_seqlens")
        return self._backward(whole, layout, 0, cuts, partial(dense_documents, cuts))

    def _backward(
        self,
        whole: Batch,
        layout: SequenceLayout,
        rank: int,
        cu_seqlens: Tensor | None,
        attention: Attention,
    ) -> tuple[float, Tensor]:
        self._optimizer.zero_grad()
        part = shard_batch(whole, layout, rank, cu_seqlens=cu_seqlens)
        with self.settings.autocast(self.device):
            logits = self.model(part["input_ids"], part["position_ids"], attention)
            losses = token_losses(logits, part["shift_labels"])
        # The last byte of a document has no next one.
        ends = 1 if cu_seqlens is None else len(cu_seqlens) - 1
        targets = losses.size(0) * (layout.seqlen - ends)
        loss = mean_loss(losses, num_targets=targets)
        loss.backward()
        return loss.item(), losses.detach()

    def results_of(self, batch: Batch) -> Tensor:
        """Each byte's loss, then all gradients: (batch * seqlen + parameters,) on the CPU."""
        _, losses = self.backward(batch)
        gradients = [x.grad.flatten() for x in self.model.parameters() if x.grad is not None]
        return torch.cat([losses.flatten(), *gradients]).cpu()

    def set_weights(self, weights: Tensor) -> None:
        """Takes over weights (parameters,) of `MeshTrainer.get_weights`."""
        weights = weights.to(self.device, next(self.model.parameters()).dtype)
        torch.nn.utils.vector_to_parameters(weights, self.model.parameters())


class PackedTrainer(Twin):
    """The model on a ring, trained on documents; a copy of it on every rank."""

    def backward(self, batch: Batch) -> tuple[float, Tensor]:
        """As the twin's; the losses are of all documents, in the batch's order."""
        lengths = batch["cu_seqlens"].diff().tolist()
        packing = pack(lengths, dist.get_world_size())
        layout, cuts = packing.layout, torch.tensor(packing.cu_seqlens, dtype=torch.int32)
        order = torch.cat([torch.arange(batch["input_ids"].size(1)).split(lengths)[i]
                           for i in packing.order])  # fmt: skip
        placed = {
            name: x[:, order].to(self.device) for name, x in batch.items() if name != "cu_seqlens"
        }

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = ring_attention(
                *(x.squeeze(0) for x in (q, k, v)), causal=True, cu_seqlens=cuts, layout=layout,
                strategy=self.settings.strategy,
            )  # fmt: skip
            return out.unsqueeze(0)

        loss, losses = self._backward(placed, layout, dist.get_rank(), cuts, attention)
        sync_gradients(self.model)
        total = torch.tensor(loss, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        whole = unshard(losses, layout)
        return total.item(), torch.empty_like(whole).index_copy_(1, order.to(whole.device), whole)

    @property
    def parameter_sizes(self) -> list[int]:
        return [x.numel() for x in self.model.parameters()]

    def get_weights(self) -> Tensor:
        """(number of parameters,) on the CPU."""
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().cpu()


def dense_documents(cu_seqlens: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention within each document of a sequence, by torch; None is one document."""
    if cu_seqlens is None:
        return dense_attention(q, k, v)
    lengths = cu_seqlens.diff().tolist()
    documents = zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([dense_attention(*document) for document in documents], dim=1)


def timed(
    step: Callable[[Batch], float], batch: Batch, device: torch.device
) -> tuple[float, float]:
    """A step's loss and its seconds."""
    start = time.perf_counter()
    loss = step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return loss, time.perf_counter() - start


def judge(
    trainer: MeshTrainer | PackedTrainer, twin: Twin | None, batches: Iterable[Batch]
) -> list[Verdict]:
    """Losses and gradients at the mesh's weights against float64; collective.

    The bound is twice the twin's error, plus the rounding of the results to float32. Both errors
    are norms over all bytes, or all parameters in units of each one's gradient: the greatest error
    of a single parameter is a matter of luck, since roundings of one row reach all of it.

    Returns:
        The verdicts on rank 0, which has the twin; nothing elsewhere.
    """
    weights, settings = trainer.get_weights(), trainer.settings
    parameters = trainer.parameter_sizes
    if twin is not None:
        oracle = Twin(replace(settings, dtype=torch.float64), twin.device)
        for one in (twin, oracle):
            one.set_weights(weights)
    squares = torch.zeros(2, 2, dtype=torch.float64)
    for batch in batches:
        sizes = [batch["input_ids"].numel(), *parameters]
        results = trainer.results_of(batch)
        if twin is not None:
            with _all_cores():
                dense, exact = twin.results_of(batch), oracle.results_of(batch)
            squares += torch.stack([squared_errors(x, exact, sizes) for x in (results, dense)], 1)
        dist.barrier()
    if twin is None:
        return []
    rounding = torch.finfo(torch.float32).eps / 2
    verdicts = []
    for name, parts, (error, plain) in zip(
        ("losses", "gradients"), (1, len(parameters)), squares.sqrt().tolist(), strict=True
    ):
        bound = 2.0 * plain + rounding * math.sqrt(JUDGED_BATCHES * parts)
        verdicts.append(Verdict(name, error, bound, ok=error <= bound))
    return verdicts


def squared_errors(x: Tensor, exact: Tensor, sizes: list[int]) -> Tensor:
    """(2,): of the losses, the first part, and of the gradients, in units of each part."""
    parts = zip(x.double().split(sizes), exact.split(sizes), strict=True)
    # A part that is exactly zero must be met exactly.
    tiny = torch.finfo(torch.float64).tiny
    losses, *gradients = ((a - b).square().sum() / b.square().sum().clamp(tiny) for a, b in parts)
    return torch.stack([losses, torch.stack(gradients).sum()])


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_cores())
    yield
    torch.set_num_threads(before)


# -- the text


@lru_cache(maxsize=1)
def standard_library_text() -> Tensor:
    """(bytes,) uint8: the sources of the running Python's standard library, by name."""
    return torch.frombuffer(bytearray().join(standard_library_files()), dtype=torch.uint8)


def document_batches(most: int, seed: int) -> Iterator[Batch]:
    """Whole files one after another, at most so many bytes a batch, without end.

    All files that are no longer than a batch are drawn before one is drawn again.

    Yields:
        `input_ids` and `labels`, (1, bytes) int64 each, unshifted; `cu_seqlens` (files + 1,) int32.
    """
    files = [torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in standard_library_files()
             if 2 <= len(x) <= most]  # fmt: skip
    if not files:
        raise ValueError(f"seqlen must hold a file of the standard library, got {most}")
    generator = torch.Generator().manual_seed(seed)
    drawn: list[Tensor] = []
    while True:
        for index in torch.randperm(len(files), generator=generator).tolist():
            if sum(map(len, drawn)) + len(files[index]) > most:
                ids = torch.cat(drawn).long()[None]
                cuts = torch.tensor([0, *map(len, drawn)], dtype=torch.int32).cumsum(0).int()
                yield {"input_ids": ids, "labels": ids, "cu_seqlens": cuts}
                drawn = []
            drawn.append(files[index])


def sample_batches(text: Tensor, seqlen: int, seed: int, batch: int = 1) -> Iterator[Batch]:
    """Random windows of a text (bytes,) uint8, without end and the same for the same seed.

    Yields:
        `input_ids` and `labels`, (batch, seqlen) int64 each, unshifted.
    """
    if seqlen > text.numel():
        raise ValueError(f"seqlen must be at most {text.numel()}, all of the text, got {seqlen}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(text.numel() - seqlen + 1, (batch,), generator=generator).tolist()
        windows = torch.stack([text[start : start + seqlen].long() for start in starts])
        yield {"input_ids": windows, "labels": windows}


# -- the printed report

COLUMNS = "step  mesh loss  dense loss  difference   mesh tok/s  dense tok/s"


def heading(what: Run, device: str) -> str:
    """The run that is about to begin, in a line."""
    settings = what.training
    names = ["batch", "seqlen", "microbatches", "schedule", "fsdp", "strategy", "layout"]
    if what.packed:
        names = ["seqlen", "strategy"]
    values = ", ".join(f"{name} {getattr(settings, name)}" for name in names)
    return (
        f"mesh {settings.axes}, {settings.axes.size} ranks on {device}, "
        f"{dtype_name(settings.dtype)}, {values}; {what.packed * 'whole files packed, '}"
        "beside one process with dense attention"
    )


def _text(row: Row) -> str:
    return (
        f"{row.step:4}  {row.mesh_loss:9.6f}  {row.dense_loss:10.6f}  {row.difference:10.1e}  "
        f"{row.mesh_tokens_per_s:11,.0f}  {row.dense_tokens_per_s:11,.0f}"
    )


def summary(report: Report) -> str:
    rows = report.rows
    lines = [
        f"loss      {rows[0].mesh_loss:.4f} -> {rows[-1].mesh_loss:.4f} nats per byte in "
        f"{len(rows)} steps"
    ]
    for side in ("mesh", "dense"):
        speed = statistics.median(getattr(row, f"{side}_tokens_per_s") for row in rows)
        lines.append(f"{side:9} {speed:,.0f} tokens/s (median)")
    lines.append(f"check     against float64: {'; '.join(map(str, report.verdicts))}")
    if report.generation is not None:
        lines += report.generation.lines()
    greatest = max(rows, key=lambda row: row.difference)
    verdict = "ok" if report.ok else "FAILED"
    lines.append(
        f"greatest loss difference {greatest.difference:.2e} (step {greatest.step}): {verdict}"
    )
    return "\n".join(lines)
