"""`ring-attn verify`: ring attention on this machine's ranks against dense attention in float64.

A case is one call: strategy, backend, layout, mask, dtype, heads, length, softcap and sinks. Each
rank computes its shard, rank 0 puts the shards together and holds out, lse and every gradient
against the bound of `ring_attn.testing`, which comes from plain PyTorch's error in the same dtype.
The figures shown are error / bound: 1 is the most that passes. All buffers start as NaN.

    ring-attn verify --world-size 4
    ring-attn verify --world-size 4 --strategy ring hybrid
    torchrun --nproc-per-node 4 -m ring_attn verify

Exit status 1 where a case failed, or none passed. What a backend refuses is listed with its reason
and counts as neither.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn import SequenceLayout, TransportOptions, ring_attention, select_backend
from ring_attn.layout import LAYOUTS as NAMED_LAYOUTS
from ring_attn.mask import Mask
from ring_attn.strategy import NAMES as STRATEGY_NAMES
from ring_attn.strategy import Strategy
from ring_attn.testing import (
    RESULTS,
    RESULTS_WITH_SINKS,
    Expected,
    Inputs,
    Verdict,
    check_all,
    dense_gradients,
    plain_gradients,
    poisoned_empty,
    random_qkv,
    random_sinks,
)
from ring_attn.tools.arguments import (
    DTYPES,
    add_common,
    parse_size,
    write_if_interrupted,
    write_json,
)
from ring_attn.tools.env import backend_reasons, device_types, machine
from ring_attn.tools.launch import DEVICES, rank_device, run_ranks, send_part, under_torchrun

# Beside those by name: what a hybrid may have in the place of a ring, and what the planner takes.
STRATEGIES = (*STRATEGY_NAMES, "hybrid all_gather", "auto")

LAYOUTS = (*NAMED_LAYOUTS, "boundaries")

# Name -> (nheads, nheads_kv, headdim, headdim_v).
HEADS = {
    "mha": (2, 2, 32, 32),
    "gqa": (4, 2, 16, 16),
    "mqa": (3, 1, 24, 24),
    "headdim_v": (2, 1, 32, 16),
}

# softcap and whether there are sinks, and the masks that they are tried with. The cap is of the
# size of the scores, so that it bends most of them.
SCORES = ((2.0, False), (0.0, True), (2.0, True))
SCORES_MASKS = ("causal", "window causal", "documents", "longer kv", "empty rows")

DEFAULT_SEQLEN = 113
OTHER_SEQLENS = (1, 2, 63, 257)

# A rank that waits longer than this for another has lost it.
TIMEOUT_SECONDS = 60.0

DEFAULT_WORLD_SIZE = 4


def _documents(seqlen: int) -> tuple[int, ...]:
    """Boundaries of unequal documents, an empty one and one of a single row among them."""
    return (0, seqlen // 5, seqlen // 5, seqlen // 2, max(seqlen // 2, seqlen - 1), seqlen)


def _longer_documents(seqlen: int) -> tuple[int, ...]:
    """Boundaries of as many documents of keys, each but the empty one longer by three."""
    cuts = _documents(seqlen)
    grown = [0]
    for start, stop in zip(cuts, cuts[1:], strict=False):
        grown.append(grown[-1] + (stop - start + 3 if stop > start else 0))
    return tuple(grown)


# Name -> the mask of a case with that many rows.
MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda n: Mask(n, n),
    "causal": lambda n: Mask(n, n, causal=True),
    "window causal": lambda n: Mask(n, n, causal=True, window_size=(13, -1)),
    "window": lambda n: Mask(n, n, window_size=(9, 5)),
    "documents": lambda n: Mask(n, n, cu_seqlens_q=_documents(n), cu_seqlens_k=_documents(n)),
    "documents window": lambda n: Mask(n, n, True, (7, -1), _documents(n), _documents(n)),
    "documents unequal": lambda n: Mask(
        n, _longer_documents(n)[-1], True, (-1, -1), _documents(n), _longer_documents(n)
    ),
    "longer kv": lambda n: Mask(n, 2 * n + 31, causal=True),
    "empty rows": lambda n: Mask(n, (n + 1) // 2, causal=True),
}


@dataclass(frozen=True)
class Case:
    """One call, as data: the same on every rank and at every world size."""

    backend: str
    layout: str
    mask: str
    dtype: str = "float32"
    heads: str = "mha"
    seqlen: int = DEFAULT_SEQLEN
    noncontiguous: bool = False
    large_logits: bool = False
    strategy: str = "ring"
    seed: int = 0
    softcap: float = 0.0
    sinks: bool = False

    def build_mask(self) -> Mask:
        """The mask over the global sequence."""
        return MASKS[self.mask](self.seqlen)

    def build_layouts(self, world_size: int) -> tuple[SequenceLayout, SequenceLayout]:
        """The layouts of queries and keys; "boundaries" has shards of unequal and of no rows."""
        mask = self.build_mask()
        if self.layout != "boundaries":
            lens = (mask.seqlen_q, mask.seqlen_k)
            q, kv = (SequenceLayout.from_name(self.layout, n, world_size) for n in lens)
            return q, kv
        return (
            SequenceLayout.boundaries(_uneven_cuts(mask.seqlen_q, world_size)),
            SequenceLayout.boundaries(_uneven_cuts(mask.seqlen_k, world_size, backwards=True)),
        )

    def build_inputs(self, device: torch.device | str = "cpu") -> Inputs:
        """Whole q, k, v and dout; one sequence where there are documents, else a batch of two."""
        mask = self.build_mask()
        nheads, nheads_kv, headdim, headdim_v = HEADS[self.heads]
        return random_qkv(
            batch=1 if mask.cu_seqlens_q is not None else 2,
            seqlen_q=mask.seqlen_q,
            seqlen_k=mask.seqlen_k,
            nheads=nheads,
            nheads_kv=nheads_kv,
            headdim=headdim,
            headdim_v=headdim_v,
            dtype=DTYPES[self.dtype],
            device=device,
            seed=self.seed,
            noncontiguous=self.noncontiguous,
            large_logits=self.large_logits,
        )

    def build_sinks(self, device: torch.device | str = "cpu") -> Tensor | None:
        """(nheads,) float32, None without."""
        if not self.sinks:
            return None
        return random_sinks(HEADS[self.heads][0], device=device, seed=self.seed)

    @property
    def options(self) -> list[str]:
        """What is unusual about its inputs."""
        options = {
            "strided": self.noncontiguous,
            "large logits": self.large_logits,
            "sinks": self.sinks,
            f"softcap={self.softcap:g}": self.softcap > 0.0,
        }
        return [name for name, there in options.items() if there]

    def __str__(self) -> str:
        return " ".join(
            [self.strategy, self.backend, self.layout, self.mask, self.dtype, self.heads]
            + [f"{self.build_mask().seqlen_q}x{self.build_mask().seqlen_k}", *self.options]
        )


@dataclass(frozen=True)
class CaseResult:
    """What became of a case: verdicts, or why there are none.

    Attributes:
        case: the case.
        verdicts: one for each of out, lse, dq, dk, dv (and dsinks), where it ran.
        refused: the reason why the backend does not take it.
        error: the traceback where it raised.
        in_step: False where ranks failed in different ways, so that nothing can follow.
    """

    case: Case
    verdicts: tuple[Verdict, ...] = ()
    refused: str | None = None
    error: str | None = None
    in_step: bool = True

    @property
    def status(self) -> str:
        """ "passed", "failed" or "refused"."""
        if self.refused is not None:
            return "refused"
        held = self.error is None and bool(self.verdicts) and all(v.ok for v in self.verdicts)
        return "passed" if held else "failed"


@dataclass(frozen=True)
class _Attempt:
    """One rank's part of a case: its shards, or why it has none."""

    shards: tuple[Tensor, ...] = ()
    refused: str | None = None
    error: str | None = None


def strategy_of(name: str, world_size: int) -> str | Strategy:
    """What `ring_attention` takes for a name, with the least degree between 1 and all ranks.

    Raises:
        NotImplementedError: it needs a degree, and the world size has no such divisor.
    """
    option = {"hybrid": "ulysses_degree", "hybrid all_gather": "ulysses_degree"}.get(name)
    option = "inner_degree" if name == "double_ring" else option
    if option is None:
        return name
    degree = next((n for n in range(2, world_size) if world_size % n == 0), None)
    if degree is None:
        raise NotImplementedError(f"a {name} needs ranks in two factors, got {world_size}")
    if name == "double_ring":
        return Strategy(inner_degree=degree)
    return Strategy("ring" if name == "hybrid" else "all_gather", ulysses_degree=degree)


def cases(
    quick: bool = False,
    *,
    backends: Sequence[str] | None = None,
    layouts: Sequence[str] = LAYOUTS,
    strategies: Sequence[str] = STRATEGIES,
) -> list[Case]:
    """The cases to run, in the order in which they are shown.

    Args:
        quick: every layout with every mask once, backends, dtypes and heads in turn; else every
            backend and dtype with each, and odd lengths and large logits besides.
        backends: names; those that can run on the CPU of this machine if None.
        layouts: some of `LAYOUTS`.
        strategies: some of `STRATEGIES`.
    """
    if backends is None:
        backends = usable_backends("cpu")
    make = _quick_cases if quick else _all_cases
    return [
        case for strategy in strategies for case in make(tuple(backends), tuple(layouts), strategy)
    ]


def usable_backends(device: str) -> tuple[str, ...]:
    """The backends that take at least one dtype on that type of device."""
    return tuple(
        backend
        for backend, answers in backend_reasons().items()
        if any(
            reason is None for where, reason in answers.items() if where.startswith(f"{device} ")
        )
    )


def run_case(case: Case) -> CaseResult:
    """Runs a case on all ranks of the default group; collective.

    Returns:
        The same result on every rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs = case.build_inputs(rank_device())
    attempt = _attempt(case, inputs, rank, world_size)
    attempts: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(attempt, attempts)
    result = [None if attempts is None else _judge(case, attempts, world_size)]
    dist.broadcast_object_list(result)
    assert result[0] is not None
    return result[0]


def run_cases(wanted: Sequence[Case]) -> list[CaseResult]:
    """Runs the cases in turn on all ranks; stops where the ranks are no longer in step."""
    results = []
    with _Progress(len(wanted)) as progress:
        for case in wanted:
            results.append(run_case(case))
            send_part(results[-1])
            progress.show(len(results))
            if not results[-1].in_step:
                break
    lost = "not run: the ranks were out of step after the case before"
    return results + [CaseResult(case, error=lost) for case in wanted[len(results) :]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ring-attn verify`."""
    parser.add_argument(
        "--world-size",
        type=parse_size,
        metavar="N",
        help=f"ranks to start (default: {DEFAULT_WORLD_SIZE}, or as many as torchrun started)",
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        choices=(*STRATEGIES, "all"),
        metavar="NAME",
        default=["all"],
        help=f"of {', '.join(STRATEGIES)}; all is every one (default)",
    )
    parser.add_argument(
        "--backend", nargs="+", metavar="NAME", help="(default: every one that can run here)"
    )
    parser.add_argument(
        "--layout", nargs="+", choices=LAYOUTS, metavar="NAME", help=f"of {', '.join(LAYOUTS)}"
    )
    parser.add_argument(
        "--device", choices=DEVICES, help="(default: cuda where every rank can have a GPU)"
    )
    parser.add_argument("--threads", type=parse_size, metavar="N", help="CPU threads of each rank")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the cases and shows them; 1 where a case failed or none passed."""
    world_size = args.world_size
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", DEFAULT_WORLD_SIZE))
    device = args.device or _default_device(world_size)
    backends = _checked_backends(args.backend) or usable_backends(device)
    wanted = cases(
        args.quick,
        backends=backends,
        layouts=args.layout or LAYOUTS,
        strategies=STRATEGIES if "all" in args.strategy else args.strategy,
    )
    started = time.perf_counter()
    judged: list[CaseResult] = []
    write_if_interrupted(
        args.json,
        lambda: _payload(judged, world_size, device, time.perf_counter() - started),
    )
    # Every rank has the same list.
    results = run_ranks(
        run_cases,
        world_size,
        wanted,
        threads=args.threads,
        device=args.device,
        on_part=judged.append,
    )[0]
    seconds = time.perf_counter() - started
    if int(os.environ.get("RANK", 0)) == 0:
        if args.json:
            write_json(args.json, _payload(results, world_size, device, seconds))
        _show(results, world_size, device, seconds, backends, quiet=args.quiet)
    counts = Counter(result.status for result in results)
    return 1 if counts["failed"] or not counts["passed"] else 0


def _all_cases(
    backends: tuple[str, ...], layouts: tuple[str, ...], strategy: str
) -> Iterator[Case]:
    for (b, backend), (d, dtype), (i, layout), (j, mask) in product(
        *map(enumerate, (backends, DTYPES, layouts, MASKS))
    ):
        if dtype == "float64" and backend != "reference":
            continue
        turn = b + d + i + j
        yield Case(
            backend,
            layout,
            mask,
            dtype,
            list(HEADS)[turn % len(HEADS)],
            noncontiguous=(i + j) % 2 == 1,
            strategy=strategy,
            seed=turn,
        )
    for backend, layout in product(backends, layouts):
        for seqlen, mask in product(OTHER_SEQLENS, ("full", "causal", "documents")):
            yield Case(backend, layout, mask, "float32", "gqa", seqlen, strategy=strategy)
        for dtype in ("float32", "bfloat16"):
            yield Case(
                backend, layout, "causal", dtype, "gqa", large_logits=True, strategy=strategy
            )
    for (b, backend), (i, layout), (j, mask) in product(
        *map(enumerate, (backends, layouts, SCORES_MASKS))
    ):
        for s, (softcap, sinks) in enumerate(SCORES):
            turn = b + i + j + s
            yield Case(
                backend,
                layout,
                mask,
                ("float32", "bfloat16", "float16")[turn % 3],
                list(HEADS)[(turn + j) % len(HEADS)],
                strategy=strategy,
                seed=turn,
                softcap=softcap,
                sinks=sinks,
            )


def _quick_cases(
    backends: tuple[str, ...], layouts: tuple[str, ...], strategy: str
) -> Iterator[Case]:
    dtypes = ("float32", "bfloat16", "float16")
    for (i, layout), (j, mask) in product(enumerate(layouts), enumerate(MASKS)):
        turn = i + j
        yield Case(
            backends[turn % len(backends)],
            layout,
            mask,
            dtypes[(turn // len(backends) + i) % len(dtypes)],
            list(HEADS)[(turn + i) % len(HEADS)],
            (DEFAULT_SEQLEN, *OTHER_SEQLENS)[turn % (1 + len(OTHER_SEQLENS))],
            noncontiguous=j % 2 == 1,
            strategy=strategy,
            seed=turn,
        )
    for (i, layout), (s, (softcap, sinks)) in product(enumerate(layouts), enumerate(SCORES)):
        yield Case(
            backends[(1 + 2 * i + s) % len(backends)],
            layout,
            SCORES_MASKS[(i + s) % len(SCORES_MASKS)],
            dtypes[(i + 2 * s) % len(dtypes)],
            list(HEADS)[(1 + i + s) % len(HEADS)],
            strategy=strategy,
            seed=i,
            softcap=softcap,
            sinks=sinks,
        )


def _uneven_cuts(seqlen: int, world_size: int, backwards: bool = False) -> list[int]:
    """Boundaries in the proportions 3 : 0 : 1 : 2 : 3 : 0 ..., or those from the last rank on."""
    weights = [(3, 0, 1, 2)[rank % 4] for rank in range(world_size)]
    if backwards:
        weights.reverse()
    ends = [sum(weights[: rank + 1]) for rank in range(world_size)]
    return [0, *(seqlen * end // ends[-1] for end in ends)]


def _attempt(case: Case, inputs: Inputs, rank: int, world_size: int) -> _Attempt:
    sinks = case.build_sinks(inputs.q.device)
    try:
        # Asked with the whole tensors, so that every rank has the same answer.
        select_backend(*inputs[:3], backend=case.backend, softcap=case.softcap, sinks=sinks)
        with poisoned_empty():
            return _Attempt(_shards_of(case, inputs, sinks, rank, world_size))
    except (NotImplementedError, ImportError) as error:
        return _Attempt(refused=str(error))
    except Exception:
        return _Attempt(error=traceback.format_exc())


def _shards_of(
    case: Case, inputs: Inputs, sinks: Tensor | None, rank: int, world_size: int
) -> tuple[Tensor, ...]:
    """This rank's out, lse, dq, dk, dv with a batch dim, and dsinks where there is one, on CPU."""
    mask, (layout_q, layout_kv) = case.build_mask(), case.build_layouts(world_size)
    packed = mask.cu_seqlens_q is not None
    layouts = (layout_q, layout_kv, layout_kv, layout_q)
    shards = [
        layout.shard(x, rank).squeeze(0) if packed else layout.shard(x, rank)
        for x, layout in zip(inputs, layouts, strict=True)
    ]
    if case.noncontiguous:
        shards = [_strided(x) for x in shards]
    q, k, v = (x.requires_grad_() for x in shards[:3])
    leaves = (q, k, v) if sinks is None else (q, k, v, sinks.requires_grad_())
    out, lse = ring_attention(
        q,
        k,
        v,
        causal=mask.causal,
        window_size=mask.window_size,
        cu_seqlens=_boundaries(mask.cu_seqlens_q),
        cu_seqlens_k=_boundaries(mask.cu_seqlens_k),
        softcap=case.softcap,
        sinks=sinks,
        layout=(layout_q, layout_kv),
        strategy=strategy_of(case.strategy, world_size),
        backend=case.backend,
        return_lse=True,
        transport=TransportOptions(timeout=TIMEOUT_SECONDS),
    )
    dq, dk, dv, *dsinks = torch.autograd.grad(out, leaves, shards[3])
    results = (out.detach(), lse.detach(), dq, dk, dv)
    return tuple(x.cpu() for x in (*(x[None] if packed else x for x in results), *dsinks))


def _strided(x: Tensor) -> Tensor:
    """The same values in memory with heads before rows and a gap after every element."""
    spread = x.new_zeros(*x.transpose(-2, -3).shape, 2)
    spread[..., 0] = x.transpose(-2, -3)
    return spread[..., 0].transpose(-2, -3)


def _boundaries(cuts: tuple[int, ...] | None) -> Tensor | None:
    return None if cuts is None else torch.tensor(cuts, dtype=torch.int32)


def _judge(case: Case, attempts: Sequence[_Attempt], world_size: int) -> CaseResult:
    errors = [(rank, a.error) for rank, a in enumerate(attempts) if a.error is not None]
    if errors:
        rank, text = errors[0]
        return CaseResult(case, error=f"rank {rank}: {text}", in_step=len(errors) == len(attempts))
    refused = [a.refused for a in attempts]
    if None not in refused:
        return CaseResult(case, refused=refused[0])
    if any(reason is not None for reason in refused):
        return CaseResult(case, error=f"only some ranks refused: {refused}", in_step=False)
    layout_q, layout_kv = case.build_layouts(world_size)
    whole = {
        name: layout.unshard([a.shards[i] for a in attempts], 2 if name == "lse" else 1)
        for i, (name, layout) in enumerate(
            zip(RESULTS, (layout_q, layout_q, layout_q, layout_kv, layout_kv), strict=True)
        )
    }
    if case.sinks:
        whole["dsinks"] = torch.stack([a.shards[len(RESULTS)] for a in attempts]).sum(0)
    try:
        verdicts = check_all(
            Expected(
                whole["out"],
                whole["lse"],
                whole["dq"],
                whole["dk"],
                whole["dv"],
                whole.get("dsinks"),
            ),
            *_expected(replace(case, strategy="", backend="", layout="")),
        )
    except (TypeError, ValueError) as error:
        return CaseResult(case, error=str(error))
    return CaseResult(case, verdicts)


@lru_cache(maxsize=1024)
def _expected(case: Case) -> tuple[Expected, Expected]:
    """The oracle and plain PyTorch of a case, whose inputs know nothing of how it is run."""
    inputs, mask, sinks = case.build_inputs(), case.build_mask(), case.build_sinks()
    oracle = dense_gradients(*inputs, mask, softcap=case.softcap, sinks=sinks)
    return oracle, plain_gradients(*inputs, mask, softcap=case.softcap, sinks=sinks)


def _default_device(world_size: int) -> str:
    cuda = "cuda" in device_types() and torch.cuda.device_count() >= world_size
    return "cuda" if cuda or (under_torchrun() and "cuda" in device_types()) else "cpu"


def _checked_backends(names: Sequence[str] | None) -> tuple[str, ...]:
    known = tuple(backend_reasons())
    for name in names or ():
        if name not in known:
            raise ValueError(f"--backend must be one of {', '.join(known)}, got {name!r}")
    return tuple(names or ())


class _Progress:
    """A count on stderr while the cases run, where somebody watches."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.watched = dist.get_rank() == 0 and sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def show(self, done: int) -> None:
        if self.watched:
            print(f"\r{done} of {self.total} cases", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self.watched:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _show(
    results: Sequence[CaseResult],
    world_size: int,
    device: str,
    seconds: float,
    backends: Sequence[str],
    *,
    quiet: bool,
) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if not quiet:
        if not console.is_terminal:
            console = Console(highlight=False, width=TABLE_WIDTH, soft_wrap=True)
        console.print(_table(results))
        for line in _refusals(results, device, backends):
            console.print(line, markup=False)
    for result in results:
        if result.error is not None:
            console.print(f"\n{result.case}\n{result.error}", markup=False)
    console.print(_summary(results, world_size, device, seconds), markup=False)


TABLE_WIDTH = 160


def _table(results: Sequence[CaseResult]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, title="error / bound", title_justify="left")
    for name in ("strategy", "backend", "layout", "mask", "dtype", "heads", "rows", "input"):
        table.add_column(name, no_wrap=True)
    for name in (*RESULTS_WITH_SINKS, "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        if result.status == "refused":
            continue
        case, mask = result.case, result.case.build_mask()
        ratios = {
            verdict.name: Text(f"{verdict.ratio:.2f}", "" if verdict.ok else "bold red")
            for verdict in result.verdicts
        }
        passed = result.status == "passed"
        table.add_row(
            case.strategy,
            case.backend,
            case.layout,
            case.mask,
            case.dtype,
            case.heads,
            f"{mask.seqlen_q} x {mask.seqlen_k}",
            ", ".join(case.options),
            *(ratios.get(name, Text("-")) for name in RESULTS_WITH_SINKS),
            Text("ok", "green") if passed else Text("FAILED", "bold red"),
        )
    return table


def _refusals(results: Sequence[CaseResult], device: str, backends: Sequence[str]) -> Iterator[str]:
    """A line for each backend and reason, those that were not even tried included."""
    counts = Counter(
        (r.case.strategy, r.case.backend, r.refused) for r in results if r.refused is not None
    )
    for (strategy, backend, reason), count in counts.items():
        yield f"refused: {strategy} {backend}, {count} cases: {reason}"
    for backend, answers in backend_reasons().items():
        if backend not in backends:
            here = {r for where, r in answers.items() if where.startswith(f"{device} ")}
            reasons = "; ".join(sorted(reason for reason in here if reason is not None))
            yield f"not run: {backend}: {reasons or 'not asked for'}"


def _summary(results: Sequence[CaseResult], world_size: int, device: str, seconds: float) -> str:
    counts = Counter(result.status for result in results)
    text = (
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['refused']} refused: "
        f"world size {world_size} on {device}, {seconds:.1f} s"
    )
    judged = [(v.ratio, v.name, r.case) for r in results for v in r.verdicts]
    if not judged:
        return text
    ratio, name, case = max(judged, key=lambda one: one[0])
    return f"{text}\nlargest error / bound: {ratio:.2f} ({name} of {case})"


def _payload(
    results: Sequence[CaseResult], world_size: int, device: str, seconds: float
) -> dict[str, Any]:
    counts = Counter(result.status for result in results)
    return {
        "command": "verify",
        "machine": machine(),
        "world_size": world_size,
        "device": device,
        "seconds": seconds,
        "summary": {status: counts[status] for status in ("passed", "failed", "refused")},
        "cases": [
            {
                **asdict(result.case),
                "status": result.status,
                "reason": result.refused or result.error,
                "results": {
                    v.name: {"error": v.error, "bound": v.bound, "ok": v.ok}
                    for v in result.verdicts
                },
            }
            for result in results
        ],
    }
