"""`audit`: comparison of a user's training step on ranks with its twin in one process."""

from __future__ import annotations

import ast
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ring_attn.core.names import AUDITED_SIZES
from ring_attn.testing.diagnosis import (
    AFTER_BACKWARD,
    Diagnosis,
    Runs,
    diagnose,
    distance,
    stacked,
)
from ring_attn.testing.launch import check_memory, run_forked
from ring_attn.testing.observe import Change, Outcome, Step, run_step
from ring_attn.testing.rounding import rounding_bound
from ring_attn.testing.trials import listed
from ring_attn.values.checks import as_ints

# Runs of the twin with random roundings.
NUM_NOISY = 8

# Modules that every rank needs, and those that it needs for models of transformers. DDP and
# optimizers import torch._dynamo, which takes each rank a second of CPU time.
PRELOADED = ("ring_attn.testing.audit", "torch._dynamo")
PRELOADED_TRANSFORMERS = ("transformers.modeling_utils",)

# Names in a file that may define others, or which hide that.
DYNAMIC = {"*", "__getattr__", "exec", "globals", "setattr", "vars"}

# Expressions that are never functions.
LITERALS = (
    ast.Constant,
    ast.Dict,
    ast.DictComp,
    ast.GeneratorExp,
    ast.JoinedStr,
    ast.List,
    ast.ListComp,
    ast.Set,
    ast.SetComp,
    ast.Tuple,
)

# The largest number of ranks that is audited without being asked for.
MOST_RANKS = 7


@dataclass(frozen=True)
class Report:
    """The result of `audit`: a diagnosis for each world size, and what was not tested."""

    diagnoses: tuple[Diagnosis, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the results of the ranks are those of the twin, within their bounds."""
        return not any(diagnosis.differences for diagnosis in self.diagnoses)

    def __str__(self) -> str:
        lines = [f"audit: {'ok' if self.ok else 'FAILED'}"]
        for diagnosis in self.diagnoses:
            differences, unexplained = diagnosis.differences, diagnosis.unexplained
            lines.append(
                f"{diagnosis.world_size} ranks: {len(differences)} results differ from the twin's"
            )
            for finding in diagnosis.findings:
                lines.append(f"  {finding.contract}: {finding.text}")
                lines.append(f"    (tested: {finding.tested})")
            if unexplained:
                lines.append(f"  not explained: {len(unexplained)} results, the worst are")
                verdicts = [differences[key] for key in unexplained]
                worst = sorted(verdicts, key=lambda verdict: -verdict.ratio)
                lines += [f"    {verdict}" for verdict in worst[:4]]
        return "\n".join([*lines, *self.notes])


def audit(
    step: Step | str,
    world_size: int | Sequence[int] | None = None,
    *,
    timeout: float = 120.0,
    tiny: bool = False,
    on_stage: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Compare a training step on ranks with the same step in one process, and explain differences.

    The step runs as it is written, on ranks that are processes over gloo, and in one process as its
    twin. The twin's batch is the batch of all ranks together. The step creates the model (a small
    one, from a seed) and the batch, runs forward and backward, and sums gradients. It may clip,
    step an optimizer and evaluate. The comparison covers losses, gradients before they are clipped,
    and weights at the end. Bounds follow from runs of the twin whose results are rounded at random.

    Args:
        step: a function without arguments at the top level of a module, or "file.py:function". It
            returns its model, or (model, loss), or (model, loss, evaluation loss).
        world_size: one or several numbers of ranks. None is 2, 3 and 4; and one more, up to 7, if
            all ranks of these have equally many rows, because means of means are then right.
        timeout: seconds that one run of the step may take.
        tiny: whether models of transformers get 2 layers, few heads and random weights, whatever
            the step asks for.
        on_stage: a function that is called before each stage, with its name, the number of stages
            before it, and the number of all stages.

    Returns:
        The report: `ok`, and a diagnosis for each world size; `print` shows it.

    Raises:
        ValueError: there are no world sizes, or more ranks than this machine has memory for; there
            is no such file, or it has no such function, or the function needs arguments; or ranks
            exist already (torchrun).
        TypeError: `step` is neither a function nor a text.
        AttributeError: ranks cannot import the function by its name. pickle may raise other errors.
        RuntimeError: the step raised an error on a rank (the text has its traceback), does not
            return a model, or needs more memory than the machine has; or two runs of the twin
            differ.
        TimeoutError: ranks hang.
    """
    given = AUDITED_SIZES if world_size is None else world_size
    sizes = (given,) if isinstance(given, int) else as_ints("world_size", given)
    if not sizes or min(sizes) < 2:
        raise ValueError(f"world_size must be numbers of at least 2 ranks, got {world_size}")
    check_memory(max(sizes))
    function = in_file(step) if isinstance(step, str) else step
    if not callable(function):
        raise TypeError(f"step must be a function, or a text such as 'train.py:step', got {step!r}")
    uses_transformers = tiny or "transformers" in sys.modules or _mentions_transformers(step)
    preload = [*PRELOADED, *(PRELOADED_TRANSFORMERS if uses_transformers else ())]

    def runs(changes: Sequence[Mapping[int, Change]], num: int) -> list[list[Outcome]]:
        bytes_per_rank = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num
        start_s = 60.0  # of processes and their imports
        outcomes_by_rank = run_forked(
            run_step,
            num,
            function,
            changes,
            bytes_per_rank,
            tiny,
            preload=preload,
            timeout=timeout * len(changes) + start_s,
        )
        return [list(outcomes) for outcomes in zip(*outcomes_by_rank, strict=True)]

    return judge(sizes, runs, on_stage, may_add=world_size is None)


def judge(
    sizes: Sequence[int],
    runs: Runs,
    on_stage: Callable[[str, int, int], None] | None = None,
    *,
    may_add: bool = False,
) -> Report:
    """Return the report on a step, whose runs `runs` returns; see `audit`.

    `may_add` is whether to add a number of ranks that gives them different numbers of rows.
    """
    num_stages = 1 + len(sizes)
    if on_stage is not None:
        on_stage("one process", 0, num_stages)
    noises: list[Mapping[int, Change]] = [{0: {("noise",): seed}} for seed in range(NUM_NOISY)]
    twin, again, *noisy = (outcome for (outcome,) in runs([{}, {}, *noises], 1))
    _check_repeatable(twin, again)
    bounds = _bounds(twin, noisy)
    diagnoses = []
    have_even_rows = True
    for number, size in enumerate(sizes, 1):
        if on_stage is not None:
            on_stage(f"{size} ranks", number, num_stages)
        (ranks,) = runs([{}], size)
        have_even_rows &= _have_even_rows(ranks)
        diagnoses.append(diagnose(bounds, twin, ranks, runs))
    report = Report(tuple(diagnoses))
    if not report.ok or not have_even_rows:
        return report
    return _with_uneven_rows(report, bounds, twin, sizes, runs, may_add=may_add)


def _ulp(result: torch.Tensor) -> float:
    """Return one rounding of every element of a result, as a distance."""
    return torch.finfo(result.dtype).eps * float(result.double().norm())


def _check_repeatable(twin: Outcome, again: Outcome) -> None:
    """Check that two runs of the twin have the same results.

    Raises:
        RuntimeError: They differ by more than a rounding.
    """
    differing = [
        key
        for key, right in twin.results.items()
        if distance(stacked(key, twin, [again]), right) > _ulp(right)
    ]
    if differing:
        raise RuntimeError(
            f"two runs of the twin differ in {len(differing)} results: weights, batches or dropout "
            "are drawn without a seed, or depend on the time; set a seed in the step"
        )


def _bounds(twin: Outcome, noisy: Sequence[Outcome]) -> dict[str, float]:
    """Return the bound of each result, from runs of the twin with random roundings."""
    bounds = {}
    # A noisy run and the twin differ by one set of roundings, the ranks and the twin by two.
    of_two = math.sqrt(2)
    for key, right in twin.results.items():
        errors = [of_two * distance(stacked(key, twin, [run]), right) for run in noisy]
        bounds[key] = rounding_bound(errors, _ulp(right))
    for name, right in twin.after_backward.items():
        errors = [
            of_two * distance(run.after_backward[name].double()[None], right)
            for run in noisy
            if name in run.after_backward
        ]
        if errors:
            bounds[f"{AFTER_BACKWARD} {name}"] = rounding_bound(errors, _ulp(right))
    return bounds


def _with_uneven_rows(
    report: Report,
    bounds: Mapping[str, float],
    twin: Outcome,
    sizes: Sequence[int],
    runs: Runs,
    *,
    may_add: bool,
) -> Report:
    """Return a report with ranks that have different numbers of rows, or why it has none."""
    length = twin.fed()[0].tokens.size(-1)
    uneven = next((n for n in range(2, MOST_RANKS + 1) if n not in sizes and length % n), None)
    untested = (
        "not tested: ranks with different numbers of rows, for which a mean over a rank's own rows "
        f"is wrong; {length} rows are equally many on each of {listed(sizes)} ranks"
    )
    if uneven is None or not may_add:
        advice = "a batch of another length" if uneven is None else f"{uneven} ranks, too"
        return Report(report.diagnoses, (f"{untested}: audit {advice}",))
    try:
        (ranks,) = runs([{}], uneven)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1]
        return Report(report.diagnoses, (f"{untested}, and on {uneven} the step raises {reason}",))
    return Report((*report.diagnoses, diagnose(bounds, twin, ranks, runs)))


def _have_even_rows(ranks: Sequence[Outcome]) -> bool:
    """Return whether all ranks have equally many tokens in their first forward."""
    rows = [[forward.tokens.size(-1) for forward in rank.fed()[:1]] for rank in ranks]
    return bool(rows[0]) and all(of_rank == rows[0] for of_rank in rows)


def _mentions_transformers(step: Step | str) -> bool:
    """Return whether the file of a step has the word `transformers`."""
    path = Path(step.rpartition(":")[0]) if isinstance(step, str) else None
    return path is not None and "transformers" in path.read_text()


def in_file(step: str) -> Step:
    """Return the step that "file.py:function" names; each rank imports it when it is called."""
    path, _, name = step.rpartition(":")
    if not (path.endswith(".py") and name.isidentifier()):
        raise ValueError(
            "step must be a function, or a file and a function of it such as 'train.py:step', got "
            f"{step!r}"
        )
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path!r}, of which {name!r} should be audited")
    check_defines(Path(path), name)
    return partial(_call, Path(path).resolve(), name)


def check_defines(path: Path, name: str) -> None:
    """Check that a file is Python and that a name in it may be a step, without running the file.

    Raises:
        ValueError: the file cannot be parsed; nothing in it defines or imports the name; or the
            name is certainly not a function that can be called without arguments.
    """
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        where = "" if line is None else f" in line {line}"
        raise ValueError(f"{path} is not a file of Python: {error.args[0]}{where}") from None
    if _defines_dynamically(tree, name):
        return
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    others = [function for function in functions if function != name]
    advice = f"pass one of {', '.join(others)}" if others else "define a function in it"
    definitions = [statement for statement in tree.body if name in _bound_names(statement)]
    if not definitions:
        raise ValueError(f"{path} has no function {name!r}: {advice}")
    # A later definition replaces earlier ones.
    match definitions[-1]:
        case (
            ast.Assign(targets=[ast.Name()], value=value)
            | ast.AnnAssign(target=ast.Name(), value=value)
        ) if isinstance(value, LITERALS):
            raise ValueError(f"{name!r} of {path} is not a function: {advice}")
        case ast.AsyncFunctionDef():
            raise ValueError(
                f"{name!r} of {path} is an async function, which does not run when it is called: "
                "define it with `def`"
            )
        case ast.FunctionDef(decorator_list=[], args=arguments):
            required = _without_default(arguments)
            if required:
                raise ValueError(
                    f"{name!r} of {path} needs the arguments {', '.join(required)}, and a step is "
                    "called without arguments: give them defaults"
                )


def _defines_dynamically(tree: ast.Module, name: str) -> bool:
    """Return whether code of a file may define a name in a way that is seen only when it runs."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=word) | ast.FunctionDef(name=word) | ast.alias(name=word):
                if word in DYNAMIC:
                    return True
            case ast.Global(names=names):
                if name in names:
                    return True
    return False


def _bound_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement defines, imports or assigns when its file is imported."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
            return  # names in it are local
        case ast.Lambda():
            return
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.alias():
            yield node.asname or node.name
    for child in ast.iter_child_nodes(node):
        yield from _bound_names(child)


def _without_default(arguments: ast.arguments) -> list[str]:
    """Return the names of the arguments that a call must pass."""
    by_place = [*arguments.posonlyargs, *arguments.args]
    num_required = len(by_place) - len(arguments.defaults)
    by_keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required = by_place[:num_required] + [each for each, default in by_keyword if default is None]
    return [each.arg for each in required]


def _call(path: Path, name: str) -> object:
    """Import a file as a module, and call a function of it."""
    if getattr(sys.modules.get(path.stem), "__file__", None) != str(path):
        sys.path.insert(0, str(path.parent))
        sys.modules.pop(path.stem, None)  # another module of that name would hide it
    function: Step = getattr(importlib.import_module(path.stem), name)
    return function()
