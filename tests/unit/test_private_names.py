"""A name that begins with an underscore is used in its own file only, by tests too."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ring_attn.core.host import without_garbage_collection

ROOT = Path(__file__).parents[2]
FOLDERS = ("ring_attn", "kernels", "bench", "dev")

# Names of torch, Triton and Python that the package reads or sets, and a key of a mask's `vars`.
OF_OTHERS = {
    "_apply",
    "_attention",
    "_cp_options",
    "_exit",
    "_hash_callees_first",
    "_make",
    "_patch_lang_tensor",
    "_tensor",
    "_timeout",
}

# Functions that take an object and the name of its attribute.
PATCHES = ("patch.object", "setattr", "getattr", "delattr")

Sources = Mapping[str, str]


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.startswith("__")


def called(node: ast.Call) -> str:
    """Return the last two parts of the name of a function that is called."""
    function = node.func
    if not isinstance(function, ast.Attribute):
        return function.id if isinstance(function, ast.Name) else ""
    owner = function.value
    before = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return f"{before}.{function.attr}"


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of functions, classes, variables and attributes of a file."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = [part for target in targets for part in ast.walk(target)]
            names += [part.id for part in found if isinstance(part, ast.Name)]
            names += [part.attr for part in found if isinstance(part, ast.Attribute)]
        yield from filter(is_private, names)


def used(tree: ast.Module, of_self: bool) -> Iterator[tuple[int, str]]:
    """Yield the lines and names of a file's imports, attributes and patches.

    Attributes of `self` count if `of_self`: in the package a class may have its base elsewhere.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            owner = node.value
            is_self = isinstance(owner, ast.Name) and owner.id in {"self", "cls"}
            if of_self or not is_self:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and called(node).endswith(PATCHES):
            arguments = (x.value for x in node.args if isinstance(x, ast.Constant))
            yield from ((node.lineno, x) for x in arguments if isinstance(x, str))


def used_elsewhere(package: Sources, tests: Sources) -> list[str]:
    """Return the uses of the package's private names outside of the files that define them."""
    trees = {path: ast.parse(source) for path, source in {**package, **tests}.items()}
    own = {path: set(defined(tree)) for path, tree in trees.items()}
    of_package = {name for path in package for name in own[path]} - OF_OTHERS
    found = []
    for path, tree in trees.items():
        elsewhere = of_package - own[path]
        found += [
            f"{path}:{line}: {name}"
            for line, name in used(tree, of_self=path in tests)
            if name in elsewhere
        ]
    return found


def sources(*folders: str) -> dict[str, str]:
    files = (file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


@without_garbage_collection()
def test_private_names_stay_in_their_files() -> None:
    package = sources(*FOLDERS)
    assert len(package) > 150
    assert used_elsewhere(package, sources("tests")) == []


@pytest.mark.parametrize(
    "use",
    [
        "from package import _count",
        "import package\npackage._count()",
        "import package\npackage.call._count",
        "mock.patch.object(package, '_count', None)",
        "def patched(self): return self._count()",
    ],
)
def test_a_use_elsewhere_is_found(use: str) -> None:
    package = {"package.py": "def _count(): ...\n_count()"}
    (found,) = used_elsewhere(package, {"test.py": use})
    assert found.endswith(": _count")
    assert used_elsewhere(package, {"test.py": "def _count(): ...\n_count()"}) == []
