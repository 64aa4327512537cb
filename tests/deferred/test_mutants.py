"""Every line of `transport.streams` matters: with one changed, some test here fails."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from ring_attn.transport import streams
from tests.deferred import test_cached, test_calls, test_errors, test_streams
from tests.deferred.device import Recorder
from tests.deferred.ranks import device_of

SOURCE = inspect.getsource(streams)
LINES = SOURCE.splitlines()

# `are_used` is replaced on this device, whose tensors are on the CPU, and whose events have no time
# that `seconds_between` could read.
NOT_CHANGED = {"are_used", "seconds_between"}


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Parts of a node with what replaces them: nothing, fewer arguments, the opposite."""
    if isinstance(node, ast.With):
        yield node.items[0].context_expr, "mock.MagicMock()"
    elif isinstance(node, ast.Expr | ast.Assign | ast.Return | ast.Raise):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            yield node, "pass"
    elif isinstance(node, ast.Compare):
        yield node, f"not ({ast.unparse(node)})"
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield node, ast.unparse(value)
    elif isinstance(node, ast.Call):
        given = [*map(ast.unparse, (*node.args, *node.keywords))]
        for left_out in range(len(given)):
            fewer = ", ".join(x for i, x in enumerate(given) if i != left_out)
            yield node, f"{ast.unparse(node.func)}({fewer})"


def mutants() -> Iterator[tuple[str, str]]:
    """Names and sources of modules with one change each."""
    body = ast.parse(SOURCE).body
    body += [part for node in body if isinstance(node, ast.ClassDef) for part in node.body]
    for function in body:
        if isinstance(function, ast.FunctionDef) and function.name not in NOT_CHANGED:
            inside = (node for statement in function.body for node in ast.walk(statement))
            for part, text in (change for node in inside for change in changes(node)):
                first, last = part.lineno - 1, part.end_lineno
                lines = LINES[first:last]
                changed = lines[0][: part.col_offset] + text + lines[-1][part.end_col_offset :]
                name = f"{function.name}: {ast.unparse(part)[:50]} -> {text}"
                yield name, "\n".join([*LINES[:first], changed, *LINES[last:]])


def with_recorder(test: Callable[[Recorder], None]) -> None:
    recorder = Recorder()
    with device_of(recorder):
        test(recorder)


# The fast ones first: one that fails ends the search.
TESTS: list[Callable[[], None]] = [
    lambda: with_recorder(test_streams.test_every_event_is_of_the_tensors_device),
    lambda: with_recorder(test_streams.test_no_two_callers_hold_one_stream),
    lambda: with_recorder(test_streams.test_works_run_side_by_side),
    lambda: with_recorder(test_streams.test_two_threads_hold_two_streams),
    lambda: test_cached.test_other_streams_wait_for_what_is_cached("tables"),
    test_calls.test_dq_runs_beside_dk_and_dv,
    lambda: test_errors.test_channels_are_aborted_one_after_the_other(check=True),
]


def is_found() -> bool:
    for test in TESTS:
        try:
            test()
        except BaseException:
            return True
    return False


@pytest.mark.slow
def test_a_change_of_any_line_is_found() -> None:
    assert not is_found()
    missed, tried = [], 0
    for name, source in mutants():
        made = {"mock": mock}
        exec(compile(source, "mutant", "exec"), made)
        functions = {x: f for x, f in made.items() if x in vars(streams) and inspect.isfunction(f)}
        del functions["are_used"]
        tried += 1
        with mock.patch.multiple(streams, **functions):
            if not is_found():
                missed.append(name)
    assert not missed and tried > 60
