"""`parse`: the statements of the one kernel in a module of PTX; and `parse_functions`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

COMMENT = re.compile(r"//.*|^[ \t]*\.(?:loc|file|pragma)\b.*", re.MULTILINE)
ENTRY = re.compile(r"\.entry\s+\w+\s*\(([^)]*)\)([^{]*)\{")
FUNCTION = re.compile(r"\.func\s+(?:\(([^)]*)\)\s*)?(\w+)\s*\(([^)]*)\)([^{;]*)\{")
# A label, a brace of a scope, or a statement, in which braces hold operands.
TOKEN = re.compile(r"([$\w]+):(?!:)|([{}])|([^\s{};][^;{}]*(?:\{[^{}]*\}[^;{}]*)*);")
STATEMENT = re.compile(r"(?:@(\S+)\s+)?(\S+)\s*(.*)")
NAME = re.compile(r"(?<![.%\w])[A-Za-z_]\w*")


@dataclass(frozen=True)
class Statement:
    """An instruction or a directive; `guard` is the predicate after @, or empty."""

    opcode: str
    operands: str
    guard: str
    line: int


class Code(NamedTuple):
    """A kernel.

    A name declared in inner braces ends with "#" and the number of the braces.

    Attributes:
        params, directives: texts.
        statements: the statements in order.
        labels: for each label the index of the statement after it.
    """

    params: str
    directives: str
    statements: list[Statement]
    labels: dict[str, int]


def parse(ptx: str) -> Code:
    """Return the code of the one kernel in a module of PTX."""
    text = COMMENT.sub("", ptx)
    entry = ENTRY.search(text)
    if entry is None:
        raise ValueError("no .entry in the PTX")
    params, directives = entry.groups()
    code = Code(params, directives, statements=[], labels={})
    return _parse_body(text, entry.end(), code, num_scopes=0)


def parse_functions(ptx: str) -> dict[str, tuple[str, Code]]:
    """Return the declaration of the result, and the code, of each function of a kernel, by name.

    Numbers of braces start at the position of the function in the text.
    """
    text = COMMENT.sub("", ptx)
    functions = {}
    for found in FUNCTION.finditer(text):
        result, name, params, directives = found.groups()
        code = Code(params, directives, statements=[], labels={})
        functions[name] = (result or "", _parse_body(text, found.end(), code, found.start()))
    return functions


def _parse_body(text: str, start: int, code: Code, num_scopes: int) -> Code:
    """Fill in the code of the body at `start`; its inner braces count from `num_scopes`."""
    scopes_of: list[tuple[int, ...]] = []  # the braces around each statement, outermost first
    local: set[tuple[int, str]] = set()  # (braces, name) of each declaration
    scopes = [0]
    line = 1
    counted = 0  # the text up to here has been searched for ends of lines
    for token in TOKEN.finditer(text, start):
        line += text.count("\n", counted, token.start())
        counted = token.start()
        label, brace, statement = token.groups()
        if label:
            local.add((scopes[-1], label))
            code.labels[_unique(label, scopes[-1])] = len(code.statements)
        elif brace == "{":
            num_scopes += 1
            scopes.append(num_scopes)
        elif brace:
            scopes.pop()
            if not scopes:
                break
        elif match := STATEMENT.match(" ".join(statement.split())):
            guard, opcode, operands = match.groups()
            code.statements.append(Statement(opcode, operands, guard or "", line))
            scopes_of.append(tuple(scopes))
            if opcode in (".reg", ".param"):
                local.update((scopes[-1], name) for name in NAME.findall(operands))
    for index, (ins, scopes_here) in enumerate(zip(code.statements, scopes_of, strict=True)):
        if len(scopes_here) > 1:
            code.statements[index] = _renamed(ins, scopes_here, local)
    return code


def _unique(name: str, scope: int) -> str:
    return f"{name}#{scope}" if scope else name


def _renamed(ins: Statement, scopes: tuple[int, ...], local: set[tuple[int, str]]) -> Statement:
    def unique(match: re.Match[str]) -> str:
        scope = next((s for s in reversed(scopes) if (s, match[0]) in local), 0)
        return _unique(match[0], scope)

    return Statement(
        opcode=ins.opcode,
        operands=NAME.sub(unique, ins.operands),
        guard=NAME.sub(unique, ins.guard),
        line=ins.line,
    )
