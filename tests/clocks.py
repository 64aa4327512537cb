"""Which asserts of a test's source depend on a clock: a busy machine would make them fail."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

READINGS = "monotonic|perf_counter|process_time|thread_time|time"
CLOCK = re.compile(rf"^(time\.)?({READINGS})(_ns)?$")
IN_PROGRAM = re.compile(rf"\btime\.({READINGS})(_ns)?\(")
# `Ended.took_s`: how long a call took.
MEASURED = "took_s"
ANY_CLOCK = re.compile(rf"\b({READINGS})(_ns)?\(|\b{MEASURED}\b")


def asserts_upon_a_clock(source: str) -> list[tuple[str, int]]:
    """Return the function and line of each assert that compares a clock, in source order.

    A name is a clock's if anything that contains a clock's reading is assigned to it, or if a
    function of this name returns such a thing; names are of the whole file, so a name with two
    meanings in one file counts as a clock's. A program in a string, which another process runs, may
    read no clock at all.
    """
    if not ANY_CLOCK.search(source):
        return []
    tree = ast.parse(source)
    names = _clock_names(tree)
    return [
        (function, node.lineno)
        for function, node in _with_functions(tree)
        if _compares_a_clock(node, names) or _is_a_program_with_a_clock(node)
    ]


def _compares_a_clock(node: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.Assert):
        return False
    compared = (part for part in ast.walk(node.test) if isinstance(part, ast.Compare))
    return any(_reads(part, names) for part in compared)


def _is_a_program_with_a_clock(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and IN_PROGRAM.search(node.value) is not None


def _with_functions(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
    """All nodes below one, with the name of the outermost function around each."""
    for node in ast.iter_child_nodes(tree):
        inside = function
        if not function and isinstance(node, ast.FunctionDef):
            inside = node.name
        yield inside, node
        yield from _with_functions(node, inside)


def _clock_names(tree: ast.AST) -> set[str]:
    names = set[str]()
    while True:
        found = {name for node in ast.walk(tree) for name in _named(node, names)}
        if found <= names:
            return names
        names |= found


def _named(node: ast.AST, names: set[str]) -> Iterator[str]:
    """The names to which a statement gives a clock's reading."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is not None and _reads(node.value, names):
            for target in targets:
                yield from (x.id for x in ast.walk(target) if isinstance(x, ast.Name))
    if isinstance(node, ast.FunctionDef):
        returned = (x.value for x in ast.walk(node) if isinstance(x, ast.Return) and x.value)
        if any(_reads(value, names) for value in returned):
            yield node.name


def _reads(expression: ast.AST, names: set[str]) -> bool:
    """Whether an expression contains a clock's reading, or a name that has one."""
    for part in ast.walk(expression):
        if isinstance(part, ast.Call) and CLOCK.match(ast.unparse(part.func)):
            return True
        if isinstance(part, ast.Attribute) and part.attr == MEASURED:
            return True
        if isinstance(part, ast.Name) and part.id in names:
            return True
    return False
