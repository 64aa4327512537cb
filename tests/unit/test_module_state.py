"""CONTRIBUTING lists all state of modules: caches, registries and flags, and who clears each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ring_attn"

# Decorators of ours and of functools that cache results.
CACHES = {"cache", "lru_cache", "cached_by_gpu", "cached"}

# Classes of values that change: containers that are made empty, locks, and events.
CHANGING = {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "WeakTensorKeyDictionary"}
CHANGING |= {"Lock", "RLock", "Event", "local", "ContextVar", "deque", "Counter", "OrderedDict"}

# Methods that change a dict, a list or a set.
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"}
CHANGES |= {"setdefault", "update"}


class State(NamedTuple):
    """A name of a module, or of a class of it, whose value changes."""

    file: str
    name: str


def sources() -> dict[str, str]:
    """Return the source of each module, by its path in the package, through the links in it."""
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
    paths = [path for folder in folders for path in folder.glob("*.py")]
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in paths}


def found(modules: Mapping[str, str]) -> set[State]:
    """Return the state of modules, which are sources by file."""
    trees = {file: ast.parse(source) for file, source in modules.items()}
    states = {State(file, name) for file, tree in trees.items() for name in _made(tree)}
    for file, tree in trees.items():
        known = _imported(file, tree, trees)
        known |= {name: State(file, name) for name in _assigned(tree)}
        states |= {known[name] for name in _changed(tree) if name in known}
    return states


def _made(tree: ast.Module) -> Iterator[str]:
    """Yield cached functions, and names whose first value is one that changes."""
    yield from _cached(tree.body)
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, value in _assigned(tree).items():
        if isinstance(value, ast.Call):
            called = _last_name(value)
            # An object of a class of the module, whose name is not that of a constant.
            own_object = called in classes and name.lower() == name
            if called in CHANGING | CACHES or own_object:
                yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names


def _cached(body: list[ast.stmt], owner: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _cached(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            decorators = {_last_name(decorator) for decorator in node.decorator_list}
            if decorators & CACHES:
                yield owner + node.name


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the values of the names that a module assigns outside of functions."""
    values: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            values |= {x.id: node.value for x in node.targets if isinstance(x, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            values[node.target.id] = node.value
    return values


def _imported(file: str, tree: ast.Module, modules: Mapping[str, ast.Module]) -> dict[str, State]:
    """Return the values of other modules that a module can name, such as `NAMES` or `a.NAMES`."""
    states = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = (node.module or "").removeprefix("ring_attn.").replace(".", "/")
        if node.level:  # relative to the folder of the file
            module = str(Path(file).parent / module)
        owners = {f"{module}.py", f"{module}/__init__.py"} & modules.keys()
        for alias in node.names:
            name = alias.asname or alias.name
            for owner in owners:
                if alias.name in _assigned(modules[owner]):
                    states[name] = State(owner, alias.name)
            submodule = f"{module}/{alias.name}.py"
            if submodule in modules:
                values = _assigned(modules[submodule])
                states |= {f"{name}.{value}": State(submodule, value) for value in values}
    return states


def _changed(tree: ast.Module) -> Iterator[str]:
    """Yield the names of containers that functions change, by an item or by a method."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        nodes = [*ast.walk(function)]
        local = {x.id for x in nodes if _is_stored(x)}
        local |= {x.arg for x in nodes if isinstance(x, ast.arg)}
        for node in nodes:
            if not isinstance(node, ast.Subscript | ast.Attribute):
                continue
            is_item = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
            is_method = isinstance(node, ast.Attribute) and node.attr in CHANGES
            if not (is_item or is_method):
                continue
            name = ast.unparse(node.value)
            if name.partition(".")[0] not in local:
                yield name


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _last_name(node: ast.expr) -> str:
    """Return the last part of the name of a function or class, which may be called."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def listed(text: str) -> set[State]:
    """Return the state in the table of CONTRIBUTING: names in the first cell, then the file."""
    section = text.partition("## State of modules\n")[2].partition("\n## ")[0]
    states = set()
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        files = re.findall(r"`([\w/]+\.py)`", cells[1]) if len(cells) == 4 else []
        names = re.findall(r"`([^`]+)`", cells[0])
        states |= {State(file, name) for file in files for name in names}
    return states


def test_contributing_lists_the_state_of_all_modules() -> None:
    states, table = found(sources()), listed((ROOT / "CONTRIBUTING.md").read_text())
    assert len(table) > 50
    assert sorted(states - table) == [], "add a row: what it holds, and who clears it"
    assert sorted(table - states) == [], "remove these rows"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("@lru_cache(maxsize=8)\ndef f(): ...", "f"),
        ("class A:\n    @staticmethod\n    @functools.cache\n    def f(): ...", "A.f"),
        ("f = lru_cache(maxsize=8)(g)", "f"),
        ("_by_group: dict = weakref.WeakKeyDictionary()", "_by_group"),
        ("_lock = threading.Lock()", "_lock"),
        ("x = None\ndef f():\n    global x\n    x = 1", "x"),
        ("class A(threading.local): ...\n_a = A()", "_a"),
        ("NAMES = {}\ndef f():\n    NAMES['a'] = 1", "NAMES"),
        ("NAMES = ['a']\ndef f():\n    NAMES.append('b')", "NAMES"),
    ],
)
def test_state_is_found(source: str, name: str) -> None:
    assert found({"a.py": source}) == {State("a.py", name)}


def test_state_that_another_module_changes_is_found() -> None:
    other = "from ring_attn.core.a import NAMES as N\ndef f():\n    del N['a']"
    modules = {"core/a.py": "NAMES = {'a': 1}", "core/b.py": other}
    assert found(modules) == {State("core/a.py", "NAMES")}
    modules["core/b.py"] = "from ring_attn.core import a\ndef f():\n    a.NAMES.clear()"
    assert found(modules) == {State("core/a.py", "NAMES")}


@pytest.mark.parametrize(
    "source",
    [
        "NAMES = {'a': 1}",
        "NAMES = {}\nNAMES['a'] = 1",
        "def f():\n    names = {}\n    names['a'] = 1",
        "class A: ...\nA_CONSTANT = A()",
        "logger = logging.getLogger('a')",
    ],
)
def test_constants_are_not_state(source: str) -> None:
    assert found({"a.py": source}) == set()
