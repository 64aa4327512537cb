"""A table of faults x strategies: how a step ends on other ranks if some ranks fail in it.

    killed        SIGKILL
    stopped       SIGSTOP
    raising       an error that is not caught: the process exits
    interrupted   SIGINT; the program goes on with the next step
    memory        an allocation fails; the program goes on with the next step
    disagreeing   other options, shapes, or another order of backwards
    skipped       a forward or backward is left out, with `set_step`
    restarted     a process ends, and torchrun's agent starts all ranks again

The other ranks must have correct results, or raise in time an error that names a failed rank. The
same holds for the next step. Words select rows and columns: `python -m dev faults killed ring
backward`.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations, product
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ring_attn import TransportOptions, ring_attention, set_step, tree_decode
from ring_attn.core.strategy import NAMES
from ring_attn.testing import Case, Heads
from ring_attn.testing.ranks import arguments_of
from tests.distributed.pool import Ended, Pool, RankError, calls_within, ended, forkserver

RANKS = 4
LAYERS = 2
ROWS = 20
HEADS = Heads(4, 4, 8, 8)
# The fault is in step 1; step 2 shows the state that is left.
HIT = 1
STEPS = 3
# Timeout of steps without a fault, which must not time out even on a busy machine.
PATIENCE = 60.0
# A failure must be reported at most this long after the timeout of a cell: some seconds, and on a
# slow or busy machine the time of some steps without a fault.
GRACE_S = 5.0
GRACE_STEPS = 20

STRATEGIES = (*NAMES, "decode")
VICTIMS = [ranks for n in (1, 2, 3) for ranks in combinations(range(RANKS), n)]
# Fields of `Case`, by name, in which a rank differs from the others. `Any`, here and below: the
# values of such fields, and options of a call by name.
CHANGES: tuple[dict[str, Any], ...] = (
    {"softmax_scale": 0.5},
    {"seqlen": ROWS + RANKS},
    {"softcap": 5.0},
    {"dtype": "float64"},
    {"heads": Heads(8, 8, 8, 8)},
)

# The action of a rank within a call; None is a fault that is not within a call.
FAULTS: dict[str, Callable[[], object] | None] = {
    "killed": lambda: signal.raise_signal(signal.SIGKILL),
    "stopped": lambda: signal.raise_signal(signal.SIGSTOP),
    "raising": lambda: torch.ones(2) @ torch.ones(3),
    "interrupted": lambda: signal.raise_signal(signal.SIGINT),
    "memory": lambda: torch.empty(1 << 50),
    "disagreeing": None,
    "skipped": None,
    "restarted": lambda: os._exit(7),
}
LOST = ("killed", "stopped", "raising")  # the rank makes no further call
# Faults that may occur after the results are complete: then the rank can continue.
PASSING = ("interrupted", "memory")


class Cell(NamedTuple):
    """A fault in the middle of a part of a step."""

    fault: str
    strategy: str
    part: str

    @property
    def number(self) -> int:
        return [*FAULTS].index(self.fault) + STRATEGIES.index(self.strategy)

    @property
    def victims(self) -> tuple[int, ...]:
        """The ranks that fail: several ranks for ^C, one rank for other faults."""
        if self.fault == "interrupted":
            return VICTIMS[5 * self.number % len(VICTIMS)]
        return VICTIMS[self.number % RANKS]  # the first ones are single ranks

    @property
    def timeout(self) -> float:
        """The timeout in seconds, which matters only if a rank is stopped."""
        return 3.0 if self.fault == "stopped" else 10.0

    @property
    def first(self) -> int:
        """The first step, in which the ranks connect, and which may be the step of the fault."""
        return 0 if self.fault == "stopped" else HIT * (self.number % 2)

    def __str__(self) -> str:
        return " ".join(self)


class StepEnd(NamedTuple):
    """The end of a rank's step.

    Attributes:
        end: the error, if there is one, and the seconds.
        right: whether the results are correct.
        usual_s: seconds of an equal step without a fault, in the same process.
    """

    end: Ended
    right: bool
    usual_s: float


class Result(NamedTuple):
    """The outcome of a cell, the seconds of the longest call, and the output of bad cells."""

    cell: Cell
    outcome: str
    seconds: float
    output: str = ""

    @property
    def good(self) -> bool:
        return self.outcome in ("reported", "right")


def cells(words: Iterable[str] = ()) -> list[Cell]:
    """Return the cells that have all of the words."""
    every = [
        Cell(fault, strategy, part)
        for fault, strategy, part in product(FAULTS, STRATEGIES, ("forward", "backward"))
        if (strategy, part) != ("decode", "backward")
    ]
    return [cell for cell in every if set(words) <= set(cell)]


class Step:
    """A rank's step: a forward and a backward of layers, or two decodes without a backward."""

    def __init__(
        self, cell: Cell, group: dist.ProcessGroup | None, number: int, **changes: Any
    ) -> None:
        set_step(number)
        self.decodes = cell.strategy == "decode"
        strategy = "ring" if self.decodes else cell.strategy
        case = replace(Case("causal", strategy=strategy, heads=HEADS, seqlen=ROWS), **changes)
        self.layers = []
        for layer in range(LAYERS):
            of_layer = replace(case, seed=LAYERS * number + layer)
            tensors, options = arguments_of(of_layer, RANKS, dist.get_rank())
            self.layers.append([x.requires_grad_(not self.decodes) for x in tensors])
        transport = TransportOptions(timeout=cell.timeout if group is None else PATIENCE)
        self.options: dict[str, Any] = {**options, "group": group, "transport": transport}
        self.outs = list[Tensor]()

    def forward(self) -> list[Tensor]:
        if self.decodes:
            names = ("softmax_scale", "softcap", "group", "transport")
            options = {name: self.options[name] for name in names}
            one = torch.ones_like(self.layers[0][0][:, :1])
            return [tree_decode(one, k, v, **options) for _, k, v, _ in self.layers]
        self.outs = [ring_attention(q, k, v, **self.options) for q, k, v, _ in self.layers]
        return [out.detach() for out in self.outs]

    def backward(self, order: int = -1) -> list[Tensor]:
        both = [*zip(self.outs, self.layers, strict=True)][::order]
        return [x for out, (*leaves, dout) in both for x in torch.autograd.grad(out, leaves, dout)]


def run_step(
    cell: Cell,
    group: dist.ProcessGroup | None,
    number: int,
    results: list[Tensor],
    *,
    at: int | None = None,
    odd: bool = False,
) -> int:
    """Run a step, add its results to `results`, and return the number of calls in the cell's part.

    Args:
        cell: the cell.
        group: the group; None is the default group.
        number: number of the step.
        results: list to which the results are added.
        at: the call of the cell's part at which the fault is.
        odd: whether this rank has the fault in this step.
    """
    differs = odd and cell.fault == "disagreeing"
    changes: dict[str, Any] = {}
    if differs and cell.part == "forward":
        changes = CHANGES[cell.number % len(CHANGES)]
    step = Step(cell, group, number, **changes)
    count = 0
    for part in ("forward",) if step.decodes else ("forward", "backward"):
        here = part == cell.part
        if here and odd and cell.fault == "skipped":
            break
        with calls_within(at if here and odd else None, FAULTS[cell.fault]) as seen:
            if part == "forward":
                results += step.forward()
            else:
                results += step.backward(order=1 if differs and here else -1)
        if here:
            count = len(seen)
    return count


def on_rank(cell: Cell, victims: Sequence[int]) -> list[StepEnd]:
    """Run the steps of this rank; return the end of each of them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Lazily: torch's connections may use addresses of an earlier start, which the store still has.
    with mock.patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="1"):
        healthy = dist.new_group()
    expected = [list[Tensor]() for _ in range(STEPS)]
    start = time.monotonic()
    counts = [run_step(cell, healthy, number, expected[number]) for number in range(STEPS)]
    usual_s = (time.monotonic() - start) / STEPS
    at = counts[-1] // 2  # in the middle of the part
    is_victim = dist.get_rank() in victims
    ends: list[StepEnd] = []
    for number in range(cell.first, STEPS):
        got: list[Tensor] = []
        odd = is_victim and number == HIT
        end = ended(lambda: run_step(cell, None, number, got, at=at, odd=odd))  # noqa: B023
        right = all(map(torch.equal, got, expected[number]))
        ends.append(StepEnd(end, right, usual_s))
        if odd and cell.fault == "raising":
            atexit._run_exitfuncs()
            os._exit(1)
    return ends


def on_restarted_rank(cell: Cell) -> list[StepEnd]:
    """Run the steps; the victims exit in the first start, and all ranks run in later ones."""
    torch.set_num_threads(1)
    with mock.patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="1"):
        dist.init_process_group("gloo")
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    return on_rank(cell, cell.victims if first else ())


# Held when processes start or end, because multiprocessing joins ended processes when it starts
# one, which must not happen in two threads.
STARTING = threading.Lock()


def run_cell(cell: Cell, work: Callable[..., object] = on_rank) -> Result:
    """Run a cell in separate processes, each of which calls `work`."""
    start = time.monotonic()
    lost = cell.victims if cell.fault in LOST else ()
    try:
        if cell.fault == "restarted":
            return judged(cell, restarted(cell), [0] * RANKS)
        with STARTING:
            pool = Pool(RANKS)
        pool.start(work, cell, cell.victims)
        ends = pool.results(lost=lost, timeout=PATIENCE + 40.0)
        with STARTING:
            return judged(cell, ends, pool.close(lost=lost))
    except RankError as error:
        outcome = "CRASH" if "the process ended" in str(error) else "HANG"
        return Result(cell, outcome, time.monotonic() - start, str(error))


def restarted(cell: Cell) -> list[list[StepEnd]]:
    """Run a cell under torchrun's agent; return the ends of the steps of each rank."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they log each process that ends
    forkserver()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        run_id=str(cell),
        max_restarts=1,
        start_method="forkserver",
        local_addr="127.0.0.1",
    )
    ends = elastic_launch(config, on_restarted_rank)(cell)
    return [ends[rank] for rank in range(RANKS)]


def judged(cell: Cell, ends: Sequence[Sequence[StepEnd]], codes: Sequence[int | None]) -> Result:
    """Return the outcome of a cell.

    Args:
        cell: the cell.
        ends: the ends of the steps of each rank; a lost rank has none.
        codes: the exit code of each rank.
    """
    restarts = cell.fault == "restarted"
    others = [rank for rank in range(RANKS) if restarts or rank not in cell.victims]
    steps = [step for rank in others for step in ends[rank]]
    errors_of_ranks = [[step.end for step in ends[rank] if step.end.error] for rank in others]
    errors = [end for of_rank in errors_of_ranks for end in of_rank]
    seconds = max((step.end.took_s for step in steps), default=0.0)
    victims = [ends[rank] for rank in cell.victims if cell.fault not in LOST]
    hit = all(any(restarts or step.end.error for step in of_rank) for of_rank in victims)
    all_reported = all(errors_of_ranks) or cell.fault in PASSING
    # The processes that report are those of the first start, of which nothing is left.
    reported = not errors if restarts else all_reported
    # Of the outcomes that do not hold, the first one counts.
    named = re.compile(rf"ranks? (\[[^]]*)?\b({'|'.join(map(str, cell.victims))})\b")
    holds = {
        "WRONG": all(step.right for of_rank in ends for step in of_rank or ()),
        "CRASH": not any(codes[rank] for rank in others),
        "HANG": all(
            step.end.took_s <= cell.timeout + GRACE_S + GRACE_STEPS * step.usual_s for step in steps
        ),
        "NOT HIT": hit,
        "NOT REPORTED": reported,
        "UNNAMED": all(named.search(end.text) for end in errors),
    }
    for outcome, held in holds.items():
        if not held:
            lines = [f"rank {rank}: {code}, {ends[rank]}" for rank, code in enumerate(codes)]
            return Result(cell, outcome, seconds, "\n".join(lines))
    return Result(cell, "reported" if errors else "right", seconds)


def run_cells(chosen: Sequence[Cell]) -> Iterator[Result]:
    """Run four cells at a time, since most of them wait for timeouts; yield results in order."""
    with ThreadPoolExecutor(4) as executor:
        yield from executor.map(run_cell, chosen)


def table(results: Sequence[Result]) -> str:
    """Return the table of outcomes and longest seconds.

    There is a row for each fault and part, and a column for each strategy.
    """
    texts = {result.cell: f"{result.outcome} {result.seconds:.1f}" for result in results}
    rows = [("", "", *STRATEGIES)]
    for fault, part in dict.fromkeys((cell.fault, cell.part) for cell in texts):
        row = (texts.get(Cell(fault, name, part), "") for name in STRATEGIES)
        rows.append((fault, part, *row))
    return "\n".join("".join(f"{word:<18}" for word in row) for row in rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", help="only cells with all these words")


def run(args: argparse.Namespace) -> int:
    start = time.monotonic()
    results: list[Result] = []
    for result in run_cells(cells(args.words)):
        results.append(result)
        if not result.good:
            print(f"{result.cell}: {result.outcome}\n{result.output}", flush=True)
    bad = sum(not result.good for result in results)
    print(table(results))
    print(f"{len(results)} cells, {bad} bad, {time.monotonic() - start:.0f} s")
    return int(bad > 0)
