"""Imports go one way, `import ring_attn` needs nothing optional, and it is quick."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ring_attn

ROOT = Path(__file__).parents[2]
PACKAGE = "ring_attn"

# Units from the bottom up. A unit is a module or folder of the package, or a module of a folder
# that is named here by itself. A unit may import its own modules (SIBLINGS restricts them) and
# units of lower rows, nothing else of ours. Imports inside functions count.
ROWS = [
    "core core.dtypes core.values core.heads core.mask core.state torch_private",
    "core.masks core.spec core.strategy compiling",
    "core.rates core.layout core.messages",
    "core.batch core.tiles core.program",
    "core.work",
    "core.turns",
    "core.ranks core.order",
    "core.sizes",
    "check kernels",
    "call transport backends planning.devices",
    "profiling strategies transport.debug",
    "machines",
    "planning",
    "ops decode neighbours connections",
    "api",
    "models",
    "tools.interrupt",
    "__init__",
    "integrations tools.launch tools.arguments",
    "tools.env",
    "testing",
    "tools.verify tools.calibrate",
    "bench",
    "tools",
    "tools.cli",
    "__main__",
]
ROW = {unit: row for row, units in enumerate(ROWS) for unit in units.split()}

# Folders whose modules may import no siblings but these.
SIBLINGS = {
    "backends": {"base", "kept_launches", "triton_support"},
    "transport": {"base", "ranks", "streams", "buffers"},
}

# Allowed imports outside a function: the base dependencies, and triton by kernels.
BASE_DEPENDENCIES = {"torch", "einops", "rich"}
EXTRA_DEPENDENCIES = {"kernels": {"triton"}}

# Folders that must never be imported by their top-level names.
NEVER_TOP_LEVEL = {"kernels", "bench", "tests"}


@dataclass(frozen=True)
class Import:
    """An imported module: its full name, and whether importing the importer loads it."""

    name: str
    line: int
    at_import: bool


def find_modules(root: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name, through the links to kernels and bench."""
    folders = [root / PACKAGE]
    modules = {}
    while folders:
        folder = folders.pop()
        for path in sorted(folder.iterdir()):
            if path.is_dir() and path.name != "__pycache__":
                folders.append(path)
            elif path.suffix == ".py":
                parts = path.relative_to(root).with_suffix("").parts
                modules[".".join(parts).removesuffix(".__init__")] = path
    return modules


def find_imports(module: str, is_package: bool, source: str, known: set[str]) -> Iterator[Import]:
    """Imports of every form: absolute, relative, inside functions, import_module("...")."""
    package = module if is_package else module.rpartition(".")[0]

    def absolute(name: str, level: int) -> str:
        if level == 0:
            return name
        base = package.split(".")[: len(package.split(".")) - (level - 1)]
        return ".".join([*base, name] if name else base)

    def visit(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_import)
        elif isinstance(node, ast.ImportFrom):
            source_module = absolute(node.module or "", node.level)
            for alias in node.names:
                submodule = f"{source_module}.{alias.name}"
                name = submodule if submodule in known else source_module
                yield Import(name, node.lineno, at_import)
        elif isinstance(node, ast.Call):
            function = node.func
            called = getattr(function, "attr", getattr(function, "id", ""))
            first = node.args[0] if node.args else None
            if (
                called in ("import_module", "__import__")
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str)
            ):
                name = first.value.lstrip(".")
                yield Import(absolute(name, len(first.value) - len(name)), node.lineno, at_import)
        type_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or type_only
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not later)

    yield from visit(ast.parse(source), True)


def unit_of(module: str) -> str:
    """`ring_attn.backends.aten` -> `backends`; the package itself is `__init__`."""
    parts = module.split(".")
    if (module_of_folder := ".".join(parts[1:3])) in ROW:
        return module_of_folder
    return parts[1] if len(parts) > 1 else "__init__"


def violations(module: str, is_package: bool, source: str, known: set[str]) -> list[str]:
    """Describes each forbidden import of a module."""
    unit = unit_of(module)
    if unit not in ROW:
        return [f"{module}: not in ROWS: put it above what it imports"]
    wrong = []
    for imported in find_imports(module, is_package, source, known):
        where = f"{module}:{imported.line}"
        top = imported.name.split(".")[0]
        if top in NEVER_TOP_LEVEL:
            wrong.append(f"{where}: {imported.name}: import it as {PACKAGE}.{imported.name}")
        elif top != PACKAGE:
            allowed = (
                sys.stdlib_module_names | BASE_DEPENDENCIES | EXTRA_DEPENDENCIES.get(unit, set())
            )
            if imported.at_import and top not in allowed:
                wrong.append(f"{where}: {imported.name}: import it in the function that uses it")
            elif unit == "kernels" and top not in allowed:
                wrong.append(f"{where}: {imported.name}: kernels import torch and triton only")
        elif (target := unit_of(imported.name)) != unit:
            if unit == "kernels" or ROW[target] >= ROW[unit]:
                wrong.append(f"{where}: {unit} may not import {target}")
        elif unit in SIBLINGS and imported.name != module:
            sibling = imported.name.split(".")[2:3]
            if is_package:
                if imported.at_import and sibling and sibling[0] not in SIBLINGS[unit]:
                    wrong.append(f"{where}: {imported.name}: select it inside a function")
            elif not sibling or sibling[0] not in SIBLINGS[unit]:
                wrong.append(f"{where}: {imported.name}: {unit} do not import one another")
    return wrong


MODULES = find_modules(ROOT)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_one_way(module: str) -> None:
    path = MODULES[module]
    wrong = violations(module, path.name == "__init__.py", path.read_text(), set(MODULES))
    assert not wrong, "\n".join(wrong)


def private_names(source: str) -> list[str]:
    """torch's names with a leading underscore in a module, as far as its imports show them."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [name for name in names if name.startswith("_")]
            if "distributed_c10d" in names:
                found.append("distributed_c10d")
        elif (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and ast.unparse(node.value).split(".")[0] in ("torch", "dist")
        ):
            found.append(ast.unparse(node))
    return found


def test_private_names_of_torch_stand_in_one_file() -> None:
    assert private_names(MODULES["ring_attn.torch_private"].read_text())
    for module, path in MODULES.items():
        unit = unit_of(module)
        if unit not in ("torch_private", "bench", "kernels"):
            assert not private_names(path.read_text()), module


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ring_attn.core.layout", "from ring_attn.core.tiles import Plan"),
        ("ring_attn.core.layout", "from . import tiles"),
        (
            "ring_attn.core.layout",
            "import importlib\nimportlib.import_module('ring_attn.core.tiles')",
        ),
        ("ring_attn.core.layout", "import ring_attn"),
        ("ring_attn.backends.aten", "from ring_attn.backends import triton"),
        ("ring_attn.backends.aten", "def f():\n    from .triton import Triton"),
        ("ring_attn.backends", "from ring_attn.backends import triton"),
        ("ring_attn.backends.triton", "try:\n    import triton\nexcept ImportError:\n    pass"),
        ("ring_attn.kernels.flash_fwd", "from ring_attn.core.tiles import Plan"),
        ("ring_attn.kernels.flash_fwd", "def f():\n    import einops.layers\n    import numpy"),
        ("ring_attn.kernels.flash_fwd", "from kernels.online_softmax import LOG2E"),
        ("ring_attn.unheard_of", "import torch"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(module, module == "ring_attn.backends", source, set(MODULES))


HEAVY = {
    "triton", "flash_attn", "flash_attn_interface", "transformers", "safetensors", "matplotlib",
    "rich", "torch.distributed.tensor", "torch._dynamo", "torch._inductor",
}  # fmt: skip

COLD_IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import ring_attn
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def test_import_loads_nothing_optional_or_heavy_and_is_quick() -> None:
    """Measures, in a new interpreter after torch, added CPU time and modules."""
    seconds = []
    # A busy machine or cold caches add time, so the fastest of a few tries counts.
    while len(seconds) < 3 and min(seconds, default=1.0) > 0.5:
        command = [sys.executable, "-c", COLD_IMPORT]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        took, loaded = json.loads(ran.stdout)
        seconds.append(took)
        assert PACKAGE in loaded
        assert not {name for name in loaded if any(f"{name}.".startswith(f"{h}.") for h in HEAVY)}
    assert min(seconds) < 0.5, f"import ring_attn adds {min(seconds):.2f} s to import torch"


# Names of `__all__` before the package exported only ten names.
STILL_HERE = {
    "__version__", "balance", "next_rank", "profiling", "select_backend", "stats",
    "tensor_parallel", "unshard",
}  # fmt: skip


def test_the_front_is_thirteen_names_and_no_name_is_lost() -> None:
    assert len(ring_attn.__all__) == 13 and not STILL_HERE & set(ring_attn.__all__)
    for name in (*ring_attn.__all__, *STILL_HERE):
        assert hasattr(ring_attn, name), name
