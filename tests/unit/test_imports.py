"""Imports go one way, `import ring_attn` needs nothing optional, and it is quick."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ring_attn
from tests import public_names

ROOT = Path(__file__).parents[2]
PACKAGE = "ring_attn"

# Units from the bottom up. A unit is a module or folder of the package, or a module of a folder
# that is named here by itself. A unit may import its own modules and units of lower rows, nothing
# else of ours; a backend no other backend. Imports inside functions count.
ROWS = [
    "torch_private version",
    "values core attention sequence",
    "core.dtypes core.names core.heads core.state",
    "core.segments backends.proofs backends.measured",
    "core.mask core.spec core.messages transport.options",
    "core.dense core.layout core.strategy backends.rates",
    "core.facts core.masks core.oracle core.tiles",
    "core.cache",
    "core.work core.program core.joint core.runs core.copies",
    "core.turns",
    "core.ranks",
    "core.sizes transport.streams",
    "transport.groups transport.capture",
    "checks kernels transport.cached",
    "backends.base backends.kept_launches backends.triton_support",
    "backends.aten backends.flash_attn backends.reference backends.triton transport.buffers",
    "backends transport.base",
    "call transport profiling",
    "machines attention.arguments attention.mask_lists",
    "strategies",
    "planning attention.drivers",
    "attention.first_use plots",
    "attention.operators attention.decode sequence.halo attention.connections",
    "sequence.states attention.joint",
    "sequence.recurrence",
    "recurrence api",
    "models",
    "__init__",
    "integrations testing.launch cli.arguments",
    "testing cli.masks",
    "planning.model",
    "planning.diffusion",
    "cli.env cli.options cli.bench_options cli.progress",
    "cli.verify cli.calibrate",
    "cli.doctor",
    "bench",
    "cli",
    "cli.main",
    "__main__",
]
ROW = {unit: row for row, units in enumerate(ROWS) for unit in units.split()}

# What may be imported outside a function, besides the standard library; kernels import triton, too.
BASE_DEPENDENCIES = {"torch", "einops", "rich", *sys.stdlib_module_names}

# Modules whose base classes come from a package that is optional: imported only in functions.
LATE = {"ring_attn.integrations.transformers.ring_cache": "transformers"}

# Every module of the package by its dotted name, through the links to kernels and bench.
FOLDERS = [ROOT / PACKAGE, *(path for path in (ROOT / PACKAGE).rglob("*") if path.is_dir())]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in FOLDERS
    for path in folder.glob("*.py")
}


def find_imports(module: str, source: str) -> Iterator[tuple[str, int, bool]]:
    """Imported names, lines, and whether importing the module loads what is imported."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, int, bool]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, at_import
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            owner = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{owner}.{alias.name}"
                yield name if name in MODULES else owner, node.lineno, at_import
        type_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        later = isinstance(node, ast.FunctionDef | ast.Lambda) or type_only
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not later)

    yield from visit(ast.parse(source), True)


def unit_of(module: str) -> str:
    """`ring_attn.backends.aten` -> `backends.aten`; the package itself is `__init__`."""
    parts = module.split(".")
    if (module_of_folder := ".".join(parts[1:3])) in ROW:
        return module_of_folder
    return parts[1] if len(parts) > 1 else "__init__"


def violations(module: str, source: str) -> list[str]:
    """Describes each forbidden import of a module."""
    unit = unit_of(module)
    if unit not in ROW:
        return [f"{module}: not in ROWS: put it above what it imports"]
    allowed = BASE_DEPENDENCIES | ({"triton"} if unit == "kernels" else set())
    allowed |= {LATE[module]} if module in LATE else set()
    wrong = []
    for name, line, at_import in find_imports(module, source):
        if unit == "__init__" and not at_import:
            continue  # the package hands out what is built upon it, at its first use
        where, top = f"{module}:{line}: {name}", name.split(".")[0]
        target = unit_of(name)
        if at_import and any(name == late or name.startswith(f"{late}.") for late in LATE):
            wrong.append(f"{where}: import it in the function that uses it")
        elif top in ("kernels", "bench", "tests"):
            wrong.append(f"{where}: import it as {PACKAGE}.{name}")
        elif top != PACKAGE:
            if top not in allowed and (at_import or unit == "kernels"):
                wrong.append(f"{where}: import it in the function that uses it; kernels never")
        elif target != unit and (unit == "kernels" or ROW[target] >= ROW[unit]):
            wrong.append(f"{where}: {unit} may not import {target}")
    return wrong


def test_imports_go_one_way() -> None:
    assert {"ring_attn", "ring_attn.kernels.flash_fwd", "ring_attn.bench.ring"} <= set(MODULES)
    wrong = [violations(module, path.read_text()) for module, path in MODULES.items()]
    assert not any(wrong), "\n".join(sum(wrong, []))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ring_attn.core.layout", "from ring_attn.core.tiles import Plan"),
        ("ring_attn.core.layout", "from . import tiles"),
        ("ring_attn.core.layout", "def f():\n    from ring_attn.core import tiles"),
        ("ring_attn.core.layout", "import ring_attn"),
        ("ring_attn.backends.aten", "def f():\n    from .triton import Triton"),
        ("ring_attn.backends.triton", "try:\n    import triton\nexcept ImportError:\n    pass"),
        ("ring_attn.kernels.flash_fwd", "from ring_attn.core.tiles import Plan"),
        ("ring_attn.kernels.flash_fwd", "def f():\n    import numpy"),
        ("ring_attn.kernels.flash_fwd", "from kernels.online_softmax import LOG2E"),
        ("ring_attn.machines.time", "from ring_attn.strategies.registry import program_of"),
        ("ring_attn.machines.count", "def f():\n    from ring_attn.strategies import base"),
        ("ring_attn.machines.time", "from ring_attn.planning.devices import Cluster"),
        ("ring_attn.unheard_of", "import torch"),
        (
            "ring_attn.integrations.transformers.cache",
            "from ring_attn.integrations.transformers.ring_cache import RingCache",
        ),
        ("ring_attn.integrations.transformers.ring_cache", "import trl"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(module, source)


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, themselves or through others."""
    reached = {module: {*names} for module, names in imports.items()}
    for through in imports:
        for names in reached.values():
            if through in names:
                names |= reached[through]
    groups = {
        frozenset(other for other in names if module in reached[other])
        for module, names in reached.items()
        if module in names
    }
    return sorted(map(sorted, groups))


def test_no_modules_import_each_other() -> None:
    """Within a unit, too, in functions and for types: each can be read without the others."""
    imports: dict[str, set[str]] = {module: set() for module in MODULES if module != PACKAGE}
    for module, names in imports.items():
        found = find_imports(module, MODULES[module].read_text())
        names.update(name for name, _, _ in found if name in imports)
    assert circles(imports) == []
    watch, group = (f"ring_attn.transport.ranks.{name}" for name in ("watch", "group"))
    assert group not in imports[watch] and circles(imports | {watch: {group}}) != []


def names_of_torch(source: str) -> Iterator[str]:
    """torch's names in a module, as far as its imports show them."""
    tree = ast.parse(source)
    modules = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from (f"{node.module}.{x.name}" for x in node.names)
            modules |= {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}
        elif isinstance(node, ast.Import):
            modules |= {x.asname: x.name for x in node.names if x.asname and "torch" in x.name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *rest = ast.unparse(node).split(".")
            if root in modules:
                yield ".".join([modules[root], *rest])


def is_private(name: str) -> bool:
    parts = name.split(".")
    return "distributed_c10d" in parts or any(re.match("_(?!_)", part) for part in parts)


def test_private_names_of_torch_stand_in_one_file() -> None:
    for module, path in MODULES.items():
        if unit_of(module) not in ("bench", "kernels"):
            private = [*filter(is_private, names_of_torch(path.read_text()))]
            assert bool(private) == (unit_of(module) == "torch_private"), (module, private)


def test_only_commands_handle_signals() -> None:
    for module, path in MODULES.items():
        imported = {name for name, _, _ in find_imports(module, path.read_text())}
        assert "signal" not in imported or module in (
            "ring_attn.cli.main",
            "ring_attn.testing.launch",
        )


HEAVY = {
    "triton",
    "flash_attn",
    "flash_attn_interface",
    "transformers",
    "safetensors",
    "matplotlib",
    "rich",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch._inductor",
}

COLD_IMPORT = """
import cProfile, json, sys
import torch
before = set(sys.modules)
profile = cProfile.Profile(builtins=False)
profile.enable()
import ring_attn
profile.disable()
calls = sum(entry.callcount for entry in profile.getstats())
print(json.dumps([calls, sorted(set(sys.modules) - before)]))
"""
# 34,000 calls and 3 modules of others were counted.
MOST_CALLS_OF_IMPORT, MOST_MODULES_OF_OTHERS = 70_000, 20


def test_import_loads_nothing_optional_or_heavy_and_does_little() -> None:
    """Count calls and modules that the import adds, in a new interpreter after torch's."""
    command = [sys.executable, "-c", COLD_IMPORT]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    calls, loaded = json.loads(ran.stdout)
    assert PACKAGE in loaded
    assert not {name for name in loaded if any(f"{name}.".startswith(f"{h}.") for h in HEAVY)}
    of_others = [name for name in loaded if name.partition(".")[0] != PACKAGE]
    assert len(of_others) <= MOST_MODULES_OF_OTHERS, of_others
    assert calls <= MOST_CALLS_OF_IMPORT


def test_public_names_and_signatures_are_as_listed() -> None:
    """After a change run `python -m tests.public_names`, and say in CHANGELOG.md what vanished."""
    listed = public_names.FILE.read_text().splitlines()
    assert list(public_names.lines()) == listed
    assert dir(ring_attn) == ring_attn.__all__
    assert all(hasattr(ring_attn, name) for name in ring_attn.__all__)
