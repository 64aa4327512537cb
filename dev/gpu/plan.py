"""The plan: stages and their cells, in the order in which a short time on a GPU is spent.

What could be wrong comes before what could be slow. The seconds of the stages are those of an H100
with prepared kernels; a stage leaves what it does not need to the next ones.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product

from dev.gpu import device
from dev.gpu.cells import Cell, Stage
from dev.gpu.ranks import LIBRARY
from dev.gpu.worker import PRELOAD

# (kernels, head dim) of the contact ladder: the most valuable first.
KERNELS = (
    ("portable", 128),
    ("gluon 0", 128),
    ("gluon 0", 64),
    ("portable", 64),
    ("gluon 0", 256),
    ("portable", 256),
)
TRIAL_KERNELS = (("portable", 64),)
MASKS = ("full", "causal")

IMPLEMENTATIONS = ("ours", "cudnn", "torch flash", "FlashAttention 3", "portable")
SPEED_ROWS, SPEED_HEADS, SPEED_DIM = 16384, (32, 8), 128
# Further sizes, of rows and head dim.
SIZES = ((4096, 128), (16384, 64), (4096, 64), (65536, 128), (16384, 256))

# Strategies with the layout that each takes.
STRATEGIES = (
    ("ring", "zigzag"),
    ("ring", "contiguous"),
    ("all_gather", "zigzag"),
    ("ulysses", "zigzag"),
    ("exchange", "zigzag"),
    ("q_exchange", "contiguous"),
)

HYBRID = ("hybrid", "zigzag")

# Ways in which ranks share the GPU, with variables of their workers: the second loads a newer NCCL
# before torch's own; without a carried library its cells are refused.
WAYS: dict[str, dict[str, str]] = {"hostid": {}, "multi": {"LD_PRELOAD": f"${LIBRARY}"}}

# Seconds of a cell of several ranks, with their start and the end of timeouts.
RANKS_LIMIT = 90.0

# Seconds of a cell over the stub, with prepared kernels.
PREPARED_LIMIT = 60.0

TUNE_SECONDS, TRIAL_TUNE_SECONDS = 70.0, 5.0

# Seconds of a stage without a GPU: the run's own limit is the one that counts.
PRETENDED_SECONDS = 7200.0

# Implementations of `speed` that have kernels of this package.
OURS = ("ours", "portable")

# Imported before a worker is ready.
CHEAP = "torch ring_attn.testing"
KERNELS_AND_ORACLE = f"{CHEAP} triton ring_attn.backends.triton tests.bounds"
WITH_KERNELS = f"{KERNELS_AND_ORACLE} dev.gpu.context"
# The ranks are forked from the worker, so they have these imports at once.
RANKS = f"{KERNELS_AND_ORACLE} dev.gpu.rank_program"

# Seconds of a cell of `contact`, with prepared kernels and without.
CONTACT_LIMITS = {True: 15.0, False: 25.0}


def stages(name_of_device: str, prepared: bool = False) -> tuple[Stage, ...]:
    """All stages of a run.

    Args:
        prepared: whether the kernels are there, so that cells may have shorter limits.
    """
    if name_of_device in (device.STUB, device.COMPILER):
        return pretended_stages(PREPARED_LIMIT if prepared else device.COMPILER_LIMIT)
    trial = name_of_device == device.CPU
    with_kernels = {PRELOAD: WITH_KERNELS}
    made = (
        _environment(with_kernels),
        _contact(trial, with_kernels, CONTACT_LIMITS[prepared]),
        # In a trial the tests pretend that there is a GPU, which no other stage may see.
        Stage(
            "tests",
            85.0,
            "every test that needs a GPU",
            lists="dev.gpu.tests:listed",
            workers=2 if trial else 6,
            environment={PRELOAD: CHEAP} if trial else with_kernels,
        ),
        _speed("speed", 50.0, ((SPEED_ROWS, SPEED_DIM),), with_kernels),
        _rings(with_kernels),
        _graphs(with_kernels),
        _costs(with_kernels),
        *_ranks_in_each_way(trial),
        _profiles(with_kernels),
        *([] if trial else [_tests_over_nccl(way, library) for way, library in WAYS.items()]),
        _speed("sizes", 40.0, SIZES, with_kernels),
        _tune(trial, with_kernels),
    )
    return tuple(map(_patient, made)) if trial else made


def pretended_stages(limit: float) -> tuple[Stage, ...]:
    """The stages of a GPU that launch kernels in one process, over the stub of libcuda.

    Nothing is computed, so cells check launches and calls of torch. Kernels of other packages and
    Nsight Compute are left out.
    """
    imports = {PRELOAD: CHEAP}
    made = (
        _environment(imports),
        _contact(False, imports, limit),
        _speed("speed", 0.0, ((SPEED_ROWS, SPEED_DIM),), imports),
        _rings(imports),
        _graphs(imports),
        _costs(imports),
        _kernels_of_ranks(imports),
        Stage("tests", 0.0, "tests that need a GPU", lists="dev.gpu.tests:listed"),
        _speed("sizes", 0.0, SIZES, imports),
    )
    return tuple(_pretended(stage, imports, limit) for stage in made)


def _pretended(stage: Stage, imports: dict[str, str], limit: float) -> Stage:
    """Return a stage with cells that run on the pretended GPU."""
    cells = [
        replace(
            cell,
            target="dev.gpu.launching:launch",
            arguments=(cell.target, *cell.arguments),
            limit=limit,
        )
        for cell in stage.cells
        if cell.target != "dev.gpu.speed:measure" or cell.arguments[0] in OURS
    ]
    return replace(
        stage,
        seconds=PRETENDED_SECONDS,
        proves=f"{stage.proves} (launches only)",
        cells=tuple(cells),
        workers=len(os.sched_getaffinity(0)),
        environment=imports,
    )


def _patient(stage: Stage) -> Stage:
    """The stage with longer limits: a trial may share its cores."""
    cells = tuple(replace(cell, limit=device.PATIENCE * cell.limit) for cell in stage.cells)
    return replace(stage, seconds=device.PATIENCE * stage.seconds, cells=cells)


def _stage(
    name: str, seconds: float, proves: str, cells: list[Cell], imports: dict[str, str]
) -> Stage:
    return Stage(name, seconds, proves, tuple(cells), environment=imports)


def _environment(imports: dict[str, str]) -> Stage:
    name = "environment"
    cells = [
        Cell(name, function, f"dev.gpu.environment:{function}", limit=40.0)
        for function in ("versions", "ceilings")
    ]
    return _stage(name, 25.0, "versions, tools, and the ceilings of this card", cells, imports)


def _contact(trial: bool, imports: dict[str, str], limit: float) -> Stage:
    name = "contact"
    cells = []
    for (kernels, dim), mask in product(TRIAL_KERNELS if trial else KERNELS, MASKS):
        for direction in ("forward", "backward"):
            label = f"{direction}, {kernels}, {dim} dims, {mask}"
            target = f"dev.gpu.contact:{direction}"
            cells.append(Cell(name, label, target, (kernels, dim, mask), limit))
    for queries in (1, 17):
        cells.append(Cell(name, f"decode, {queries}", "dev.gpu.contact:decode", (queries,), limit))
    blocking = imports if trial else imports | {"CUDA_LAUNCH_BLOCKING": "1"}
    return _stage(name, 35.0, "each kernel once: right, wrong where, or hung", cells, blocking)


def _speed(
    name: str, seconds: float, sizes: tuple[tuple[int, int], ...], imports: dict[str, str]
) -> Stage:
    cells = []
    for (rows, dim), mask, implementation in product(sizes, ("causal", "full"), IMPLEMENTATIONS):
        label = f"{implementation}, {rows} rows, {dim} dims, {mask}"
        arguments = (implementation, rows, *SPEED_HEADS, dim, mask)
        cells.append(Cell(name, label, "dev.gpu.speed:measure", arguments, limit=25.0))
    return _stage(name, seconds, "TFLOP/s beside the other kernels", cells, imports)


def _rings(imports: dict[str, str]) -> Stage:
    name = "rings"
    cells = [
        Cell(name, f"{strategy}, {layout}", "dev.gpu.rings:holds", (strategy, layout), 25.0)
        for strategy, layout in (*STRATEGIES, HYBRID)
    ]
    cells += [
        Cell(name, f"bits of {strategy}", "dev.gpu.rings:same_bits", (strategy,), 25.0)
        for strategy in ("ring", "ulysses")
    ]
    return _stage(name, 30.0, "strategies over local copies; the bits of one rank", cells, imports)


def _graphs(imports: dict[str, str]) -> Stage:
    name = "graphs"
    cells = [
        Cell(name, f"capture of {strategy}", "dev.gpu.graphs:capture", (strategy,), 25.0)
        for strategy in ("ring", "all_gather")
    ]
    target = "dev.gpu.graphs:messages_to_itself"
    cells.append(Cell(name, "NCCL to itself", target, limit=25.0))
    cells.append(Cell(name, "nccl2 to itself", "dev.gpu.graphs:second_class", limit=25.0))
    return _stage(name, 15.0, "replays have the bits of calls; NCCL to itself", cells, imports)


def _costs(imports: dict[str, str]) -> Stage:
    name = "costs"
    cells = [
        Cell(name, "host", "dev.gpu.costs:host"),
        Cell(name, "slowdown", "dev.gpu.costs:slowdown"),
        Cell(name, "first use", "dev.gpu.costs:use_for_the_first_time"),
        Cell(name, "decode", "dev.gpu.costs:decode", (65536,)),
    ]
    stage = _stage(name, 15.0, "single figures that the planner assumes", cells, imports)
    return replace(stage, alone=True)


def _kernels_of_ranks(imports: dict[str, str]) -> Stage:
    """Launches of the ranks of `hostid` and `multi`, with all ranks in one process."""
    name = "kernels of ranks"
    cells = [
        Cell(name, f"2 ranks: {strategy}, {layout}", "dev.gpu.rings:holds", (strategy, layout, 2))
        for strategy, layout in STRATEGIES
    ]
    cells.append(Cell(name, "calls", "dev.gpu.rings:calls_of_ranks"))
    cells.append(Cell(name, "profiles", "dev.gpu.profiles:one_call", ("backward",)))
    return _stage(name, 0.0, "kernels of several processes", cells, imports)


def _ranks_in_each_way(trial: bool) -> list[Stage]:
    if trial:
        return [_ranks("gloo", trial, 60.0, {})]
    return [_ranks(way, trial, 55.0, library) for way, library in WAYS.items()]


def _tests_over_nccl(way: str, variables: dict[str, str]) -> Stage:
    """The tests of ranks that share a GPU, which have more cases, and start ranks of their own."""
    return Stage(
        f"{way}-tests",
        60.0,
        "tests of several processes over NCCL",
        lists="dev.gpu.tests:listed_over_nccl",
        lists_with=(way,),
        environment=variables | {PRELOAD: CHEAP},
    )


def _ranks(way: str, trial: bool, seconds: float, variables: dict[str, str]) -> Stage:
    """Two and four ranks that share the GPU in one of the ways of `dev.gpu.ranks`."""
    cells = [_rank_cell(way, 2, "first_contact")]
    if not trial:
        cells += [_rank_cell(way, 2, case) for case in ("connection_memory", "channels")]
    cells += [_rank_cell(way, 2, "strategy", *given) for given in STRATEGIES]
    cells += [_rank_cell(way, 2, "sizes"), _rank_cell(way, 2, "late_ranks", 5 if trial else 30)]
    cells += [] if trial else [_rank_cell(way, 2, "graph", 10)]
    cells += [_rank_cell(way, 4, "strategy", *given) for given in (HYBRID, *STRATEGIES[:4])]
    for argument in ("causal", "softmax_scale"):
        target, arguments = "dev.gpu.ranks:notices", (way, "disagreement", argument)
        cells.append(Cell(way, f"other {argument}", target, arguments, RANKS_LIMIT))
    for when in ("first", "later"):
        label = f"a rank is killed at a {when} call"
        cells.append(Cell(way, label, "dev.gpu.ranks:killed", (way, when), RANKS_LIMIT))
    # Its workers fork the ranks, so none of them may have used CUDA.
    own = variables | {PRELOAD: RANKS}
    return _stage(way, seconds, "processes on one GPU: bits, errors, graphs", cells, own)


def _rank_cell(way: str, world_size: int, case: str, *arguments: str | int) -> Cell:
    words = " ".join(map(str, (case, *arguments)))
    label = f"{world_size} ranks: {words}"
    given = (way, world_size, case, *arguments)
    return Cell(way, label, "dev.gpu.ranks:run", given, RANKS_LIMIT)


def _profiles(imports: dict[str, str]) -> Stage:
    name = "profiles"
    cells = [
        Cell(name, f"{kernel}", "dev.gpu.profiles:profile", (kernel, direction), 60.0)
        for kernel, direction in (("hopper_fwd", "forward"), ("hopper_bwd", "backward"))
    ]
    return _stage(name, 60.0, "why a kernel is slow", cells, imports)


def _tune(trial: bool, imports: dict[str, str]) -> Stage:
    seconds = TRIAL_TUNE_SECONDS if trial else TUNE_SECONDS
    cell = Cell("tune", "configs", "dev.gpu.profiles:tune", (seconds,), limit=seconds + 40.0)
    return _stage("tune", 110.0, "the fastest configs", [cell], imports)
