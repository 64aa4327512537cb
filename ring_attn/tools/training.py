"""The parts that both demos share: text, training, verdicts and report.

Two float32 runs of one model drift apart, since the optimizer feeds every rounding back. What is
judged are therefore batches at the trained weights, of which the losses and gradients may be twice
as far from float64 as those of one process with dense attention, and a rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout, ring_attention, shard_batch, sync_gradients, unshard
from ring_attn.arguments import dtype_name, shortened, write_if_interrupted, write_json
from ring_attn.env import machine
from ring_attn.launch import check_memory, run_ranks
from ring_attn.testing import Verdict
from ring_attn.tools.generate import Comparison
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
JUDGED_BATCHES = 3

# For dim 128; wider layers take smaller steps. Twice as much, or no clipping, trains no better in
# so few steps, and the optimizer then feeds roundings back tens of times as strongly.
LEARNING_RATE = 1e-3
CLIP_NORM = 1.0

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

    def described(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "quiet"}
        return options | {"dtype": dtype_name(self.dtype), "model": asdict(self.model)}


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
    if not -(1 << 63) <= args.seed < 1 << 64:
        raise ValueError(f"--seed must fit into 64 bits, got {shortened(str(args.seed))}")
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


def check_sizes(settings: Settings) -> None:
    """Refuses a run that this machine, or the text, is too small for, before any rank is started.

    Raises:
        ValueError: a sequence longer than the text, or tensors that need more memory.
    """
    length = standard_library_text().numel()
    if settings.seqlen > length:
        raise ValueError(f"seqlen must be at most {length}, all of the text, got {settings.seqlen}")
    nbytes = least_bytes(settings)
    check_memory("model and activations", nbytes, "use a smaller --dim or --seqlen")


def least_bytes(settings: Settings) -> int:
    """Bytes of the twin's activations, as many of the ring's, and all models with their optimizers.

    A layer keeps its input, q, k, v, out and three rows of the hidden dim for the backward.
    """
    model = settings.model
    row = model.num_layers * (4 * model.dim + 3 * model.hidden_dim) + 2 * model.vocab_size
    weights = model.num_layers * model.dim * (2 * model.dim + 3 * model.hidden_dim)
    # Weights, gradients and both moments of AdamW, in each process.
    models = 4 * weights * (settings.nproc + 1)
    return torch.float32.itemsize * (2 * settings.batch * settings.seqlen * row + models)


@dataclass(frozen=True)
class Report:
    """The result of a demo.

    Attributes:
        rows: one of each step, with its number `step`, the `losses` that must be finite, of the
            ranks first and then of one process, and the `difference` of these two.
        verdicts: at the trained weights.
        generation: what these generate, if asked to.
    """

    rows: list[Any]
    verdicts: list[Verdict]
    generation: Comparison | None = None

    @property
    def ok(self) -> bool:
        """Whether all losses are finite, all verdicts hold and one process generates the same."""
        return (
            all(math.isfinite(loss) for row in self.rows for loss in row.losses)
            and all(verdict.ok for verdict in self.verdicts)
            and (self.generation is None or self.generation.equal)
        )

    @property
    def greatest_difference(self) -> Any:
        """The step whose losses are furthest apart."""
        return max(self.rows, key=lambda row: row.difference)

    def losses_line(self, where: str, beside: str) -> str:
        """How far the losses came, of the ranks and of one process."""
        (a, x, *_), (b, y, *_) = self.rows[0].losses, self.rows[-1].losses
        return (
            f"loss      {a:.4f} -> {b:.4f} nats per byte in {len(self.rows)} steps{where} "
            f"({beside} {x:.4f} -> {y:.4f})"
        )

    def last_line(self) -> str:
        """The greatest difference, and whether all is well."""
        greatest = self.greatest_difference
        return (
            f"greatest loss difference {greatest.difference:.2e} (step {greatest.step}): "
            f"{'ok' if self.ok else 'FAILED'}"
        )


def to_json(settings: dict[str, Any], rows: Sequence[Any]) -> dict[str, Any]:
    """The JSON that there is before the training has ended."""
    return {
        "command": "demo",
        "machine": machine(),
        "settings": settings,
        "rows": [asdict(row) | {"difference": row.difference} for row in rows],
    }


def verdicts_json(report: Report) -> dict[str, Any]:
    """The entries that are added when it has."""
    return {
        "greatest_difference": report.greatest_difference.difference,
        "checks": [asdict(verdict) for verdict in report.verdicts],
        "generation": None if report.generation is None else asdict(report.generation),
        "ok": report.ok,
    }


def run_and_report(
    args: argparse.Namespace,
    train: Callable[..., Report | None],
    nproc: int,
    settings: Any,
    described: dict[str, Any],
    heading: str,
    summary: Callable[[Any, Any], str],
    *,
    device: str,
    threads: int | None = None,
) -> int:
    """Trains on ranks, prints and writes what came out.

    Args:
        args: the options `quiet`, `json` and `profile` count here.
        train: takes `settings` and the folder for traces; rank 0 returns the report.
        nproc: number of ranks.
        settings: the same on every rank.
        described: the settings as JSON has them.
        heading: what is about to run.
        summary: the result in a few lines.
        device: of the ranks' default group.
        threads: of each rank; as for `run_ranks`.

    Returns:
        The exit status: 0, or 1 where the report is not ok.
    """
    is_first = os.environ.get("RANK", "0") == "0"  # torchrun starts this on every rank
    if is_first and not args.quiet:
        print(heading, flush=True)
    rows: list[Any] = []
    write_if_interrupted(args.json, lambda: to_json(described, rows))
    report = run_ranks(
        train, nproc, settings, args.profile, device=device, threads=threads, on_part=rows.append
    )[0]
    assert report is not None, "rank 0 has it"
    if is_first:
        print(summary(settings, report), flush=True)
    if is_first and args.json:
        write_json(args.json, {**to_json(described, report.rows), **verdicts_json(report)})
    return 0 if report.ok else 1


#: Title, width and text of a row's cell.
Column: TypeAlias = tuple[str, int, Callable[[Any], str]]


def print_titles(columns: Sequence[Column]) -> None:
    """The line above the rows."""
    print("  ".join(f"{title:>{width}}" for title, width, _ in columns), flush=True)


def print_row(columns: Sequence[Column], row: Any) -> None:
    """One row, as it comes."""
    print("  ".join(f"{cell(row):>{width}}" for _, width, cell in columns), flush=True)


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
        self.optimizer = make_optimizer(self.model.parameters(), settings)

    def step(self, batch: dict[str, Tensor]) -> float:
        """Trains on one batch; returns its mean loss before the update."""
        loss, _ = self.backward(batch)
        # Gradients are those of the whole batch: every rank clips by the same norm.
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        return loss

    def backward(self, batch: dict[str, Tensor]) -> tuple[float, Tensor]:
        """Leaves the gradients of the whole batch in the parameters.

        Args:
            batch: `input_ids` and `labels`, (batch, seqlen) int64 each, the same on every rank.

        Returns:
            The mean loss of the whole batch, and the losses (batch, rows) of this process's rows.
        """
        self.optimizer.zero_grad()
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
            sync_gradients(self.model, self.ring)
            dist.all_reduce(loss, group=self.ring)
        return loss.item(), losses.detach()

    def results_of(self, batch: dict[str, Tensor]) -> Tensor:
        """(batch * seqlen + number of parameters,) on the CPU: each byte's loss, all gradients."""
        _, losses = self.backward(batch)
        if self.ring is not None:
            losses = unshard(losses, self._layout(batch["input_ids"].size(1)), group=self.ring)
        gradients = [x.grad.flatten() for x in self.model.parameters() if x.grad is not None]
        return torch.cat([losses.flatten(), *gradients]).cpu()

    def get_weights(self) -> Tensor:
        """(number of parameters,) on the CPU."""
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().cpu()

    def set_weights(self, weights: Tensor) -> None:
        """Takes over weights that `get_weights` returned, here or elsewhere."""
        weights = weights.to(self.device, next(self.model.parameters()).dtype)
        torch.nn.utils.vector_to_parameters(weights, self.model.parameters())

    def _layout(self, seqlen: int) -> SequenceLayout:
        """The layout of a sequence over the ring; the twin is a ring of one."""
        if self.ring is None:
            return SequenceLayout.contiguous(seqlen, 1)
        return SequenceLayout.from_name(self.settings.layout, seqlen, self.settings.nproc)

    def _attention(self, layout: SequenceLayout) -> Attention:
        if self.ring is None:
            return dense_attention
        return partial(ring_attention, causal=True, group=self.ring, layout=layout)


def autocast(settings: Settings, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context in which the model and its loss are computed."""
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
