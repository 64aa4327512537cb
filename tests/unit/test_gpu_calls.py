"""Calls of imported functions in `dev.gpu` fit the signatures of what is installed.

Many of them run only on a GPU, where a wrong name or argument would cost a cell.
`make test TORCH=2.11.0 ARGS=tests/unit/test_gpu_calls.py` checks them with the oldest torch.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.kernels.fake_torch import fake_torch

ROOT = Path(__file__).parents[2]

# Importing it pretends that there is a GPU, for the whole process. It runs only without one.
PRETENDS = "dev.gpu.launching"

# Modules that cannot be imported, or must not be.
NO_MODULES = ("__future__", "_typeshed", PRETENDS)

# The cells of a GPU, and the code of the package that talks to NCCL and CUDA.
FILES = (
    *(path for path in sorted((ROOT / "dev/gpu").glob("*.py")) if path.stem != "launching"),
    *sorted((ROOT / "ring_attn/transport").rglob("*.py")),
    ROOT / "ring_attn/testing/one_gpu.py",
    *sorted((ROOT / "bench").glob("*.py")),
)


class Checked(NamedTuple):
    """Calls and names that were looked up, and what is wrong with them."""

    calls: int
    wrong: list[str]


def check_calls(source: str) -> Checked:
    """Look up every name of an imported module, and bind the arguments of every call of one."""
    tree = ast.parse(source)
    names = imported(tree)
    calls, wrong = 0, list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            wrong += missing(node, names)
        if isinstance(node, ast.Call):
            signature = signature_of(node.func, names)
            if signature is not None and has_plain_arguments(node):
                calls += 1
                wrong += misfit(node, signature)
    return Checked(calls, wrong)


def imported(tree: ast.AST) -> dict[str, Any]:
    """Values of imported names; names that something else binds as well are left out."""
    names = dict[str, Any]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                module = import_module(one.name)
                root = import_module(one.name.split(".")[0])
                names[one.asname or one.name.split(".")[0]] = module if one.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module not in NO_MODULES:
            module = import_module(str(node.module))
            for one in node.names:
                names[one.asname or one.name] = value_of(module, one.name)
    bound = {node.id for node in ast.walk(tree) if is_bound(node)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return {name: value for name, value in names.items() if name not in bound}


def is_bound(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def value_of(module: Any, name: str) -> Any:
    """Return an attribute or a submodule."""
    if hasattr(module, name):
        return getattr(module, name)
    return import_module(f"{module.__name__}.{name}")


def looked_up(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of a dotted name that begins with an imported one.

    Raises:
        LookupError: it does not begin with one.
        AttributeError: a part of it does not exist.
    """
    if isinstance(node, ast.Name):
        if node.id in names:
            return names[node.id]
        raise LookupError
    if isinstance(node, ast.Attribute):
        return getattr(looked_up(node.value, names), node.attr)
    raise LookupError


def missing(node: ast.Attribute, names: dict[str, Any]) -> Iterator[str]:
    try:
        looked_up(node, names)
    except LookupError:
        pass
    except AttributeError as error:
        yield f"line {node.lineno}: {error}"


def signature_of(node: ast.expr, names: dict[str, Any]) -> inspect.Signature | None:
    """Return the signature of an imported function or class; None if Python has none for it."""
    try:
        return inspect.signature(looked_up(node, names))
    except (LookupError, AttributeError, TypeError, ValueError):
        return None


def has_plain_arguments(node: ast.Call) -> bool:
    """Whether the call has no starred arguments, whose number is known only when it runs."""
    starred = any(isinstance(one, ast.Starred) for one in node.args)
    return not starred and all(one.arg is not None for one in node.keywords)


def misfit(node: ast.Call, signature: inspect.Signature) -> Iterator[str]:
    try:
        signature.bind(*node.args, **{str(one.arg): one.value for one in node.keywords})
    except TypeError as error:
        yield f"line {node.lineno}: {ast.unparse(node)}: {error}; it takes {signature}"


def test_calls_of_cells_fit_what_is_installed() -> None:
    found = {str(path.relative_to(ROOT)): check_calls(path.read_text()) for path in FILES}
    assert {name: one.wrong for name, one in found.items() if one.wrong} == {}
    assert found["dev/gpu/graphs.py"].calls > 10 and found["dev/gpu/rank_program.py"].calls > 40


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("torch.cuda.synchronise()", "no attribute 'synchronise'"),
        ("torch.cuda.CUDAGraf()", "no attribute 'CUDAGraf'"),
        ("torch.cuda.graph(g, pools=None)", "unexpected keyword argument 'pools'"),
        ("torch.cuda.Event(timing=True)", "unexpected keyword argument 'timing'"),
        ("dist.P2POp(dist.isend)", "missing a required argument"),
        ("dist.init_process_group('nccl', device=0)", "unexpected keyword argument 'device'"),
        ("get_backend('triton', 1, 2)", "too many positional arguments"),
    ],
)
def test_wrong_names_and_arguments_are_found(line: str, reason: str) -> None:
    imports = (
        "import torch, torch.distributed as dist\nfrom ring_attn.backends import get_backend\n"
    )
    [wrong] = check_calls(imports + line).wrong
    assert reason in wrong


# -- objects, whose methods are checked while a cell runs (`tests.kernels.fake_torch`)


def test_methods_of_pretended_objects_check_their_arguments() -> None:
    with fake_torch():
        graph, event = torch.cuda.CUDAGraph(), torch.cuda.Event(enable_timing=True)
        graph.replay()
        event.record()
        assert event.elapsed_time(event) == 1.0
        with torch.cuda.graph(graph), torch.cuda.stream(torch.cuda.Stream()):
            pass
        with pytest.raises(AttributeError, match="repaly"):
            graph.repaly()
        with pytest.raises(TypeError, match="too many positional arguments"):
            graph.replay(2)
        with pytest.raises(TypeError, match="unexpected keyword argument 'timing'"):
            torch.cuda.Event(timing=True)
