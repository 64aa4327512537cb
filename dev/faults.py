"""A table of faults x strategies: how a step ends on the other ranks if some ranks fail in it.

    killed        SIGKILL
    stopped       SIGSTOP
    raising       an error that nobody catches: the process exits
    interrupted   SIGINT; the program goes on with the next step
    memory        an allocation fails; the program goes on with the next step
    disagreeing   other options, shapes, or another order of backwards
    skipped       a forward or backward is left out, with `set_step`
    restarted     a process ends, and torchrun's agent starts all ranks again

The other ranks must have right results, or raise in time and name a rank that failed; also in the
next step. Words choose rows and columns: `python -m dev faults killed ring backward`.
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

RANKS, LAYERS, ROWS, HEADS = 4, 2, 20, Heads(4, 4, 8, 8)
# The fault is in step 1; step 2 shows what is left.
HIT, STEPS = 1, 3
# Without a fault nothing may time out, however busy the machine is.
PATIENCE = 60.0
# A failure is told after a cell's timeout and so many seconds at most; on a slow or busy machine,
# whose slowness the steps without a fault show, after so many of those steps more.
GRACE_S, GRACE_STEPS = 5.0, 20

STRATEGIES = (*NAMES, "decode")
VICTIMS = [ranks for n in (1, 2, 3) for ranks in combinations(range(RANKS), n)]
CHANGES: tuple[dict[str, Any], ...] = (
    {"softmax_scale": 0.5}, {"seqlen": ROWS + RANKS}, {"softcap": 5.0}, {"dtype": "float64"},
    {"heads": Heads(8, 8, 8, 8)},
)  # fmt: skip


# The act of a rank within a call; None is a fault that is not within a call.
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
# Faults that may come when all is done: then the rank can go on.
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
        """^C reaches several ranks; another fault hits one."""
        several = self.fault == "interrupted"
        return VICTIMS[5 * self.number % len(VICTIMS) if several else self.number % RANKS]

    @property
    def timeout(self) -> float:
        """Only a rank that is stopped is found by a timeout."""
        return 3.0 if self.fault == "stopped" else 10.0

    @property
    def first(self) -> int:
        """The first step, in which the ranks connect; this may be the step of the fault."""
        return 0 if self.fault == "stopped" else HIT * (self.number % 2)

    def __str__(self) -> str:
        return " ".join(self)


class StepEnd(NamedTuple):
    """The end of a rank's step.

    Attributes:
        end: how it ended, and after how many seconds.
        right: whether its results are right.
        usual_s: seconds of an equal step without a fault, just before in the same process.
    """

    end: Ended
    right: bool
    usual_s: float


class Result(NamedTuple):
    """The end of a cell, the seconds of the longest call, and what ranks said if it is not good."""

    cell: Cell
    outcome: str
    seconds: float
    said: str = ""

    @property
    def good(self) -> bool:
        return self.outcome in ("told", "right")


def cells(words: Iterable[str] = ()) -> list[Cell]:
    """The cells that have each of the words."""
    every = map(Cell._make, product(FAULTS, STRATEGIES, ("forward", "backward")))
    return [x for x in every if set(words) <= set(x) and x[1:] != ("decode", "backward")]


class Step:
    """A rank's step: layers forward, then backward; or two decodes, which have no backward."""

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
    """Adds a step's results; the fault is at call `at` of its part, whose calls are counted."""
    count, differs = 0, odd and cell.fault == "disagreeing"
    changes = CHANGES[cell.number % len(CHANGES)] if differs and cell.part == "forward" else {}
    step = Step(cell, group, number, **changes)
    for part in ("forward",) if step.decodes else ("forward", "backward"):
        here = part == cell.part
        if here and odd and cell.fault == "skipped":
            break
        with calls_within(at if here and odd else None, FAULTS[cell.fault]) as seen:
            if part == "forward":
                results += step.forward()
            else:
                results += step.backward(1 if differs and here else -1)
        count = len(seen) if here else count
    return count


def on_rank(cell: Cell, victims: Sequence[int]) -> list[StepEnd]:
    """The end of each step of this rank."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # torch's own connections may use addresses of an earlier start, which the store still has.
    with mock.patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="1"):
        healthy = dist.new_group()
    expected = [list[Tensor]() for _ in range(STEPS)]
    start = time.monotonic()
    counts = [run_step(cell, healthy, number, expected[number]) for number in range(STEPS)]
    usual_s, at = (time.monotonic() - start) / STEPS, counts[-1] // 2
    is_victim, ends = dist.get_rank() in victims, list[StepEnd]()
    for number in range(cell.first, STEPS):
        got, odd = list[Tensor](), is_victim and number == HIT
        end = ended(lambda: run_step(cell, None, number, got, at=at, odd=odd))  # noqa: B023
        ends.append(StepEnd(end, all(map(torch.equal, got, expected[number])), usual_s))
        if odd and cell.fault == "raising":
            atexit._run_exitfuncs()
            os._exit(1)
    return ends


def on_restarted_rank(cell: Cell) -> list[StepEnd]:
    """The victims of the first start die in it; later all ranks run."""
    torch.set_num_threads(1)
    with mock.patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="1"):
        dist.init_process_group("gloo")
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    return on_rank(cell, cell.victims if first else ())


# multiprocessing looks for processes that have ended when it starts one: not in two threads.
STARTING = threading.Lock()


def run_cell(cell: Cell, work: Callable[..., object] = on_rank) -> Result:
    """Runs a cell in processes of its own, each of which calls `work`."""
    start, lost = time.monotonic(), cell.victims if cell.fault in LOST else ()
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


def restarted(cell: Cell) -> list[Any]:
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # tells of each process that ends
    forkserver()
    config = LaunchConfig(
        1, 1, RANKS, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", run_id=str(cell),
        max_restarts=1, start_method="forkserver", local_addr="127.0.0.1",
    )  # fmt: skip
    ends = elastic_launch(config, on_restarted_rank)(cell)
    return [ends[rank] for rank in range(RANKS)]


def judged(cell: Cell, ends: Sequence[Any], codes: Sequence[int | None]) -> Result:
    """The outcome of a cell, from the ends of each rank's steps; a rank that is lost has none."""
    again = cell.fault == "restarted"
    others = [rank for rank in range(RANKS) if again or rank not in cell.victims]
    steps = [step for rank in others for step in ends[rank]]
    told = [[step.end for step in ends[rank] if step.end.error] for rank in others]
    errors = [end for of_rank in told for end in of_rank]
    seconds = max((step.end.took_s for step in steps), default=0.0)
    victims = [ends[rank] for rank in cell.victims if cell.fault not in LOST]
    hit = all(any(again or step.end.error for step in of_rank) for of_rank in victims)
    named = re.compile(rf"ranks? (\[[^]]*)?\b({'|'.join(map(str, cell.victims))})\b")
    holds = {
        "WRONG": all(step.right for of_rank in ends for step in of_rank or ()),
        "CRASH": not any(codes[rank] for rank in others),
        "HANG": all(
            step.end.took_s <= cell.timeout + GRACE_S + GRACE_STEPS * step.usual_s for step in steps
        ),
        "NOT HIT": hit,
        "UNTOLD": not errors if again else all(told) or cell.fault in PASSING,
        "UNNAMED": all(named.search(end.text) for end in errors),
    }
    for outcome, held in holds.items():
        if not held:
            said = [f"rank {rank}: {code}, {ends[rank]}" for rank, code in enumerate(codes)]
            return Result(cell, outcome, seconds, "\n".join(said))
    return Result(cell, "told" if errors else "right", seconds)


def run_cells(chosen: Sequence[Cell]) -> Iterator[Result]:
    """Runs four cells at once, most of which wait for timeouts; in the order of the cells."""
    with ThreadPoolExecutor(4) as executor:
        yield from executor.map(run_cell, chosen)


def table(results: Sequence[Result]) -> str:
    """A row for each fault and part, a column for each strategy: outcomes, and longest seconds."""
    told = {one.cell: f"{one.outcome} {one.seconds:.1f}" for one in results}
    rows = [("", "", *STRATEGIES)]
    for fault, part in dict.fromkeys((cell.fault, cell.part) for cell in told):
        row = (told.get(Cell(fault, name, part), "") for name in STRATEGIES)
        rows.append((fault, part, *row))
    return "\n".join("".join(f"{word:<13}" for word in row) for row in rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", help="only cells with all these words")


def run(args: argparse.Namespace) -> int:
    start, results = time.monotonic(), list[Result]()
    for result in run_cells(cells(args.words)):
        results.append(result)
        if not result.good:
            print(f"{result.cell}: {result.outcome}\n{result.said}", flush=True)
    bad = sum(not result.good for result in results)
    print(table(results))
    print(f"{len(results)} cells, {bad} bad, {time.monotonic() - start:.0f} s")
    return int(bad > 0)
